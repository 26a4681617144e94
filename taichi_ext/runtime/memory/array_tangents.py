"""The arrays of one evaluation and their tangents: views of one memory share them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.cached import Bounded
from taichi_ext.errors import InvalidArgumentError
from taichi_ext.labels import Label
from taichi_ext.launches import ArrayArgument, ContainerInfo, JacobianKernel
from taichi_ext.program.keys import Key
from taichi_ext.runtime.memory.regions import Region, Regions, View
from taichi_ext.runtime.memory.shadows import Shadow, TangentColumns, array_info, view_of

_SHARED = "{} and {} share a part of their memory"
_MOST_BINDINGS = 1024  # launches with different arrays that are remembered
_OTHER_TYPE = ", but not the type of their elements; pass copies, or one array."


@dataclass(frozen=True)
class Given:
    """An array as it is given to a kernel."""

    name: Label | str
    view: View  # the key of the array in a session
    value: Any
    info: ContainerInfo | None  # the container of the trace; None for integers

    def is_current(self) -> bool:
        """Whether the array is still at the same address: the memory of a tensor can be replaced."""
        is_same = self.view.shape == backend.full_shape(self.value)
        return is_same and self.view.start == backend.memory_place(self.value)[1]


@dataclass(frozen=True)
class Binding:
    """The arrays among the arguments of a launch."""

    given: list[Given]
    arrays: dict[int, ContainerInfo]  # those of real numbers, by position
    outer: dict[Key, View]  # the keys of a session by those of the trace

    def is_current(self) -> bool:
        """Whether all arrays are still where they were."""
        return all(given.is_current() for given in self.given)


class ArrayTangents:
    """The tangents of arrays, by their memory.

    The key of an array is its view; arrays that share memory share the tangents in it.
    """

    def __init__(self, columns: TangentColumns) -> None:
        self.regions = Regions()
        self._columns = columns
        self.infos: dict[View, ContainerInfo] = {}  # of parameters and outputs, by key
        self._registered: dict[int, Given] = {}  # parameters and outputs, by identity
        self._bindings: Bounded[object, Binding] = Bounded(_MOST_BINDINGS)

    # --- which array is which

    def register(self, array: Given) -> None:
        self._registered[id(array.value)] = array
        if array.view not in self.infos:
            assert array.info is not None
            self._include(array)
            self.infos[array.view] = array.info

    def check_separate(self, key: View) -> None:
        """Raise for a parameter that shares memory with another one."""
        for other in self.region(key).seeds:
            if other.overlaps(key):
                names = f"{self.infos[other].name} and {self.infos[key].name}"
                raise InvalidArgumentError(
                    f"{names} share a part of their memory; pass copies, or name one array that holds both."
                )

    def bind(self, kernel: backend.Kernel, args: tuple[object, ...]) -> Binding:
        """The arrays among the leaf arguments of a kernel, each in its region."""
        places = backend.array_positions(kernel)
        name = (id(kernel), *(id(args[position]) for position in places))
        binding = self._bindings.get(name)
        if binding is None or not binding.is_current():
            binding = self._bindings[name] = array_arguments(kernel, args, self._registered)
        for array in binding.given:
            if array.info is None:
                self._check_type(array)
            else:
                self._include(array)
        for array in binding.given:
            if array.info is not None:
                region = self.region(array.view)
                if region.seeds and region.first_seed(array.view) is None:
                    region.sown(self._columns)
        return binding

    def include(self, array: Any, key: View) -> None:
        """Give an array tangents that no kernel has used yet."""
        self._include(Given("an array", key, array, None))

    def _include(self, array: Given) -> None:
        if self.regions.find(array.view) is not None:
            return
        self._check_type(array)
        for region in self.regions.overlapping(array.view):
            if not region.layout.fits(array.view):
                self.regions.forget(region)
        region, parts = self.regions.include(array.view, array.name, array.value)
        for part in parts:
            region.seeds.update(part.seeds)
        if any(part.shadow is not None for part in parts):
            region.sown(self._columns)
        for part in parts:
            if part.shadow is not None and not part.shadow.is_fresh:
                region.shadow.set_rows(region.rows(part.layout), part.shadow.to_numpy())

    def _check_type(self, array: Given) -> None:
        for region in self.regions.overlapping(array.view):
            if region.layout.fits(array.view):
                continue
            if region.is_active or any(key.overlaps(region.layout) for key in self.infos):
                raise InvalidArgumentError(_SHARED.format(region.name, array.name) + _OTHER_TYPE)

    def accesses(self, fused: JacobianKernel, binding: Binding) -> tuple[set[Key], set[Key]]:
        """The containers that a kernel reads and writes, see ``shared``."""
        outer, facts = binding.outer, fused.facts
        return self.shared(outer.get(k, k) for k in facts.read), self.shared(outer.get(k, k) for k in facts.written)

    def shared(self, keys: Iterable[Key]) -> set[Key]:
        """The keys, and those of parameters and outputs that share memory with arrays among them."""
        known = set(keys)
        views = [key for key in known if isinstance(key, View)]
        return known | {other for other in self.infos if any(other.overlaps(view) for view in views)}

    # --- tangents

    def region(self, key: View) -> Region:
        """The memory of an array that has been included."""
        region = self.regions.find(key)
        assert region is not None
        return region

    def borrow(self, key: View, *, is_covered: bool) -> tuple[object, Callable[[], None]]:
        """The tangents of an array as a kernel takes them, and a function to call after a launch that writes them."""
        view, region = key, self.region(key)
        shadow = region.sown(self._columns)
        if is_covered and region.is_whole(view):
            shadow.is_dirty = False
        else:
            shadow.clean()
        if region.is_whole(view):
            return shadow.array, lambda: None
        rows = region.rows(view)
        if isinstance(rows, slice) and shadow.on_host and not shadow.by_column:
            width = shadow.shape[1]
            return shadow.array[rows.start * width : rows.stop * width], lambda: None
        part = Shadow(region.name, view.size, self._columns.count, backend.named_type(region.layout.dtype))
        part.set_rows(slice(None), shadow.to_numpy()[rows])
        return part.array, lambda: shadow.set_rows(rows, part.to_numpy())

    def along(self, key: View, direction: np.ndarray) -> np.ndarray:
        region = self.regions.find(key)
        column = None if region is None else region.first_seed(key)
        if column is not None:
            return self._columns.along(column, key.size, direction)
        return np.full(key.size, np.nan) if region is None or region.seeds else region.values(key) @ direction

    # --- changes by Python between launches

    def has_host_memory(self) -> bool:
        """Whether Python can read arrays with tangents unnoticed."""
        return any(region.copy is not None and region.is_active for region in self.regions)

    def remember(self) -> None:
        """Save the numbers of arrays that carry tangents and that Python can change unnoticed."""
        self.regions.remember(lambda region: region.is_active)


def array_arguments(
    kernel: backend.Kernel, args: tuple[Any, ...], known: Mapping[int, Given] = MappingProxyType({})
) -> Binding:
    """The arrays among the arguments of a kernel, some known by identity; an array passed twice is one container."""
    binding = Binding([], {}, {})
    first: dict[Any, Any] = {}
    for argument, position, value in backend.array_values(kernel, args):
        name = f"array argument {argument.name!r}"
        if not backend.is_array(value):
            raise InvalidArgumentError(f"{name} {backend.argument_problem(argument.annotation, value)}.")
        same = known.get(id(value))
        view = same.view if same is not None and same.is_current() else view_of(value, name)
        element_shape = backend.array_element_shape(value, argument.annotation)
        local = first.setdefault((view, element_shape), ArrayArgument(position))
        given = Given(name, view, value, array_info(local, name, value, element_shape))
        binding.given.append(given)
        if given.info is not None:
            binding.arrays[position] = given.info
            binding.outer[local] = given.view
    return binding


def check_overlaps(given: Iterable[Given], written: Set[object]) -> None:
    """Raise if two arguments share memory and one is written: a kernel with tangents would not notice."""
    for one, other in itertools.combinations(given, 2):
        if not one.view.overlaps(other.view) or (one.info is None and other.info is None):
            continue
        if one.info is None or other.info is None or not one.view.fits(other.view):
            raise InvalidArgumentError(_SHARED.format(one.name, other.name) + _OTHER_TYPE)
        is_on_gpu = one.view.space == "host" and not backend.is_host_arch()
        is_one = one.info.key == other.info.key and not one.view.is_fortran and not is_on_gpu
        if not is_one and not written.isdisjoint((one.info.key, other.info.key)):
            why, remedy = ", and the kernel writes to it", "pass copies, or one array"
            if is_on_gpu:
                why, remedy = f", of which Taichi gives the GPU two copies{why}", "pass copies, or a ti.ndarray"
            raise InvalidArgumentError(f"{_SHARED.format(one.name, other.name)}{why}; {remedy}.")
