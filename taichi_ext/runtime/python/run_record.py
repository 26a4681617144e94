"""A record of the numbers that runs pass to kernels and store: runs for different columns must agree."""

from __future__ import annotations

import inspect
import math
import types
import zlib
from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.errors import InvalidArgumentError, UnsupportedError
from taichi_ext.launches import NumberColumns
from taichi_ext.record.variables import number_shape
from taichi_ext.runtime.memory.shadows import TangentColumns
from taichi_ext.runtime.python.dual_numbers import (
    DualNumber,
    PipelineRun,
    is_dual,
    matrix_of,
    plain_number,
    warn_at_user,
    warn_of_old_number,
)

_DIFFERENT = (
    "The call takes several runs (chunk_size=, tangents that do not fit into max_memory, a Hessian), and Python's "
    "state differs between them: a later run {}. Prepare changing objects before the call, or compute all columns in "
    "one run (a larger max_memory=)."
)
_OTHERS = (
    "The call takes several runs, as Python's numbers depend on the params, and Python's state differs between them: a "
    "later run {}. Values and derivatives are those of the last run. Iterators, generators and files cannot be put "
    "back as they were: make them in the pipeline, or prepare what they give before the call."
)
_ROUNDING = 1e-5  # relative difference between runs of parallel sums, and of numbers computed from them


@dataclass(frozen=True)
class _Object:
    """A field, kernel or other object of a launch, with its identifying key."""

    key: Any
    obj: object  # kept alive, so that its identity is not used again


class RunRecord:
    """The launches and stores of the first run; those of later runs are compared with them one by one.

    The first run, and the second and so on, may end before the others do.
    """

    def __init__(self) -> None:
        self._events: list[tuple[object, ...]] = []  # the numbers and objects of each
        self._at = 0
        self._is_whole, self._raises = False, True
        self._has_read = False
        self._start = backend.moment()
        self._others: dict[object, tuple[object, object]] = {}  # by key of a later run's object: that of the first

    def begin(self, *, raises: bool) -> None:
        """Start the first run, or another one; one that differs raises, or else there is a warning."""
        self._raises = raises
        self._at, self._has_read = 0, False
        self._others.clear()

    def note_read(self) -> None:
        """Note that Python reads numbers written by kernels: sums of parallel loops can differ in rounding."""
        self._has_read = True

    def launch(self, kernel: backend.Kernel, args: tuple[object, ...]) -> None:
        args = backend.leaf_values(kernel, args)
        self._add(_use(kernel), _named(kernel), *(part for a in args for part in _parts(a)))

    def arrays(self, kernel: backend.Kernel, read: Set[str], args: tuple[object, ...]) -> None:
        """Record the numbers of NumPy arrays and tensors that this launch reads, by leaf arguments."""
        host = [(leaf, a) for leaf, _, a in backend.array_values(kernel, args) if not isinstance(a, backend.Ndarray)]
        known = [a for leaf, a in host if leaf.name in read]
        if known:
            self._add(_use(kernel), *(part for a in known for part in _numbers(a, self._has_read)))
        if host and not backend.is_library_kernel(kernel):
            self.note_read()  # Python can read numbers that the kernel writes

    def store(self, obj: object, value: object) -> None:
        """Record a store from Python to a field or array before it is made."""
        is_entry = isinstance(obj, backend.FieldEntry)
        place = (_Object(("node", obj.node), obj), obj.index) if is_entry else (_named(obj),)
        self._add("stores", *place, *_parts(value))

    def end(self) -> None:
        """The run has ended."""
        if self._at < len(self._events):
            self._differ("launches fewer kernels than the first")
        self._is_whole = True

    def _add(self, use: str, *parts: object) -> None:
        if self._at < len(self._events):
            is_same = self._are_same(self._events[self._at], parts)
        else:
            is_same = not self._is_whole
        if not is_same:
            self._differ(f"{use} other numbers, fields or arrays than in the run before, or does it at another time")
        if not self._is_whole:  # this run counts as the first one
            self._events[self._at : self._at + 1] = [parts]
        self._at += 1

    def _differ(self, how: str) -> None:
        """Raise, or warn, and go on with this run as the first one."""
        if self._raises:
            raise InvalidArgumentError(_DIFFERENT.format(how))
        warn_at_user(_OTHERS.format(how))
        del self._events[self._at :]
        self._is_whole = False

    def _are_same(self, first: tuple[object, ...], now: tuple[object, ...]) -> bool:
        return len(first) == len(now) and all(map(self._is_same, first, now))

    def _is_same(self, first: Any, now: Any) -> bool:
        if type(first) is not type(now):
            return False
        if isinstance(first, _Object):
            return self._is_same_object(first, now)
        if isinstance(first, float):
            is_close = self._has_read and abs(first - now) <= _ROUNDING * max(abs(first), abs(now))
            return is_close or repr(first) == repr(now)
        return bool(first == now)

    def _is_same_object(self, first: _Object, now: _Object) -> bool:
        if now.key == first.key:
            return True
        if now.key in self._others:
            return self._others[now.key][0] == first.key
        if any(now.key == part.key for parts in self._events for part in parts if isinstance(part, _Object)):
            return False
        self._others[now.key] = first.key, now.obj
        return type(now.obj) is type(first.obj) and self._is_made_alike(first.obj, now.obj)

    def _is_made_alike(self, first: object, now: object) -> bool:
        """Whether both objects may have been created by the same code in their runs."""
        if isinstance(now, (backend.Field, backend.StructField, backend.Ndarray, backend.FieldEntry)):
            return backend.is_made_since(now, self._start)
        codes = [getattr(getattr(obj, "func", obj), "__code__", None) for obj in (first, now)]
        return codes[0] == codes[1] and self._are_same(_contents(first), _contents(now))


def _parts(value: Any) -> Iterator[object]:
    """Yield the numbers and objects in a value that a run passes on."""
    if isinstance(value, backend.Matrix):
        value = value.to_list()
    if isinstance(value, backend.Struct):
        value = {key: value[key] for key in value.keys}
    if isinstance(value, dict):
        value = [item for pair in value.items() for item in pair]
    if isinstance(value, (list, tuple)):
        yield len(value)
        for item in value:
            yield from _parts(item)
    elif isinstance(value, (float, np.floating)):
        yield float(value)  # without its tangent
    elif isinstance(value, np.generic):
        yield value.item()
    elif isinstance(value, (bool, int, str, type(None))):
        yield value
    elif isinstance(value, backend.Ndarray) or not backend.is_array(value):
        yield _named(value)
    else:
        yield tuple(value.shape), str(value.dtype)


def _contents(obj: object) -> tuple[object, ...]:
    """The outside variables of a kernel or function, or the attributes of another object."""
    function = getattr(obj, "func", obj)
    is_function = isinstance(function, types.FunctionType)
    values = inspect.getclosurevars(function).nonlocals if is_function else getattr(obj, "__dict__", {})
    return tuple(_parts(dict(values)))


def _named(obj: object) -> _Object:
    is_field = isinstance(obj, backend.Field)  # a component is a new object at each access
    return _Object(backend.field_identity(obj) if is_field else id(obj), obj)


def _use(kernel: backend.Kernel) -> str:
    return "stores" if backend.is_library_kernel(kernel) else f"launches {kernel.func.__qualname__} and passes"


def _numbers(array: object, is_rounded: bool) -> tuple[object, ...]:
    """The numbers of an array: exactly, or by two sums where they may differ in rounding."""
    values = backend.as_numpy(array)
    flat = np.ascontiguousarray(values).reshape(-1)
    if not is_rounded or flat.dtype.kind not in "fiub":
        return values.shape, str(values.dtype), zlib.crc32(flat.view(np.uint8).data)
    finite = np.nan_to_num(flat.astype(np.float64))
    total = float(np.abs(finite).sum())
    return values.shape, str(values.dtype), total, 2 * total + float(finite @ np.cos(np.arange(finite.size)))


# The arguments of a launch that depend on parameters: numbers with tangents are taken out and passed as rows.


def with_passed(numbers: NumberColumns, passed: dict[str, list[Any]], columns: TangentColumns) -> NumberColumns:
    """The numbers of a launch with ``passed``, dual or plain ones, by the names of its leaf arguments."""
    if not passed:
        return numbers
    starts: dict[str, Any] = {name: getattr(entries[0], "column", None) for name, entries in passed.items()}
    if (
        columns.directions is None
        and numbers.tangents is None
        and all(
            is_dual(n) and first is not None and n.column == first + place
            for first, entries in zip(starts.values(), passed.values(), strict=True)
            for place, n in enumerate(entries)
        )
    ):
        return NumberColumns(starts, numbers.constants)  # the parameters themselves
    constants, rows = numbers.constants, [] if numbers.tangents is None else [numbers.tangents]
    count = sum(map(len, rows))
    if numbers.tangents is None:
        constants = ()
        for variable, column in numbers.constants:
            rows.append(columns.rows_of(column, math.prod(number_shape(variable.read()) or ())))
            constants += ((variable, count),)
            count += len(rows[-1])
    arguments: dict[str, int] = {}
    zero = np.zeros(columns.count)
    for name, entries in passed.items():
        arguments[name] = count
        rows.append(np.array([n.tangent if is_dual(n) else zero for n in entries]).reshape(len(entries), -1))
        count += len(entries)
    return NumberColumns(arguments, constants, np.concatenate(rows))


def taken_out(
    kernel: backend.Kernel, args: tuple[Any, ...], run: PipelineRun | None
) -> tuple[tuple[object, ...], tuple[object, ...], dict[str, list[Any]]]:
    """The arguments of a launch as plain values, and its leaf arguments; entries of these with tangents, by name."""
    values = backend.leaf_values(kernel, args)
    all_entries = tuple(map(entries_of, values))
    if not any(is_dual(n) for entries in all_entries for n in entries):
        return args, values, {}
    plain: list[Any] = []
    tangents: dict[str, list[Any]] = {}
    for leaf, value, entries in zip(backend.leaf_arguments(kernel), values, all_entries, strict=True):
        own = [n if is_dual(n) and n.run is run else plain_number(n) for n in entries]
        if any(is_dual(n) and n.run.is_over for n in entries):
            warn_of_old_number()
        duals = [n for n in own if is_dual(n)]
        if run is not None and duals and _can_carry(kernel, leaf, duals):
            run.passed.update(*(n.names for n in duals))
            tangents[leaf.name] = own
        if is_dual(value):
            value = plain_number(value)
        elif any(map(is_dual, entries)):
            shape = np.shape(value.entries if isinstance(value, backend.Matrix) else np.array(value, object))
            value = matrix_of(list(map(plain_number, entries)), shape)
        plain.append(value)
    return backend.with_leaf_values(kernel, tuple(plain)), tuple(plain), tangents


def _can_carry(kernel: backend.Kernel, leaf: Any, duals: list[DualNumber]) -> bool:
    """Whether a kernel takes numbers with tangents as an argument that carries them.

    Raises:
        UnsupportedError: it does not, and they are computed from arguments of the pipeline that are parameters.
    """
    kind = leaf.annotation
    if backend.is_template(kind):
        problem = f"the template {leaf.name!r}, which is compiled into the kernel. Give the argument a type, as ti.f32"
    elif backend.is_scalar_type(kind) and backend.is_integer(backend.cook_dtype(kind)):
        problem = f"the integer {leaf.name!r}; whole numbers have no derivative. Leave it out of params"
    else:
        return True
    names = sorted(frozenset[str]().union(*(n.names for n in duals)))
    if names and not backend.is_library_kernel(kernel):
        raise UnsupportedError(
            f"{', '.join(map(repr, names))} is a parameter, and is passed to {backend.short_name(kernel)} as {problem}."
        )
    return False


def warn_of_captured(captures: backend.Captures, kernel: backend.Kernel, run: PipelineRun) -> None:
    """Warn of numbers with tangents that a kernel reads from variables or attributes, which Taichi compiles into it."""
    for capture, value in captures.with_numbers():
        if any(is_dual(n) and n.run is run for n in entries_of(value)):
            warn_at_user(
                f"{capture.place}\n{capture.text} depends on the params, and is compiled into "
                f"{backend.short_name(kernel)}: it counts as a constant, its tangent is lost. Pass it as an argument "
                "of the kernel, or keep it in a field."
            )


def entries_of(value: object) -> list[Any]:
    """The numbers of a vector, matrix, dict or sequence of numbers; anything else as it is."""
    value = [*value.values()] if isinstance(value, dict) else value
    if isinstance(value, backend.Matrix) and not value.is_host_access:
        return list(np.asarray(value.entries, object).flat)
    if isinstance(value, (list, tuple)):
        return [entry for part in value for entry in entries_of(part)]
    return [value]


def numbers_like(value: Any, numbers: Iterator[Any]) -> Any:
    """A number or nested tuples of numbers, with other numbers."""
    return tuple(numbers_like(part, numbers) for part in value) if isinstance(value, tuple) else next(numbers)
