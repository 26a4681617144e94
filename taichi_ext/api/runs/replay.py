"""Fast path for repeated calls: one kernel without arguments, launched as in the previous call."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from taichi_ext import backend
from taichi_ext.api.inputs.layout import Layout
from taichi_ext.launches import GRADIENT, FirstOrderArray, Fused
from taichi_ext.program.keys import Key, SiteArray
from taichi_ext.runtime.launching.pipeline import Repetition
from taichi_ext.runtime.memory.shadows import numpy_dtype
from taichi_ext.runtime.sparse.rows import SparseRows
from taichi_ext.runtime.sparse.streams import Streams

MOST_KEPT = 2**24  # bytes of tangents that are kept from call to call
R = TypeVar("R", bound=SparseRows)


@dataclass(frozen=True)
class _Tangents:
    """An array of tangents as the kernel takes it: zeros, unless it writes all of them."""

    shape: tuple[int, ...]
    dtype: np.dtype
    is_covered: bool

    def new(self) -> np.ndarray:
        return (np.empty if self.is_covered else np.zeros)(self.shape, self.dtype)

    def clear(self, array: np.ndarray) -> None:
        if not self.is_covered:
            array.fill(0)

    def fits(self, array: Any) -> bool:
        is_array = type(array) is np.ndarray and array.shape == self.shape and array.dtype == self.dtype
        return is_array and array.flags.c_contiguous and array.flags.writeable


@dataclass(frozen=True)
class Replay:
    """A launch that takes tangents that begin at zero, and memory of the kernel itself.

    Attributes:
        layout: the parameters and outputs.
        launch: the kernel.
        tangents: the tangents that it takes; for a dense J, J alone.
        gradient: of an energy, which the launch adds up beside H.
    """

    layout: Layout
    launch: Repetition
    tangents: dict[Key, _Tangents]
    gradient: _Tangents | None = None

    @staticmethod
    def of(fused: Fused, layout: Layout, tangents: Mapping[Key, tuple[tuple[int, ...], np.dtype]]) -> Replay | None:
        """A launch; None if the kernel takes more than these tangents, of this shape and type, and its own memory."""
        scratch = {key: shadow.array for key, shadow in fused.memory.scratch.items()}
        known = (
            key in tangents or key in scratch or isinstance(key, (SiteArray, FirstOrderArray)) for key in fused.shadows
        )
        first_order = [array.info for array in fused.first_order]
        if backend.stores_by_column() or not all(known) or any(info.key != GRADIENT for info in first_order):
            return None
        given = {key: _Tangents(*kind, key in fused.facts.covered) for key, kind in tangents.items()}
        gradients = [_Tangents((max(1, i.size),), numpy_dtype(i.dtype), is_covered=False) for i in first_order]
        return Replay(layout, Repetition(fused, scratch), given, *gradients)

    @staticmethod
    def of_field(kernels: list[Fused], layout: Layout) -> Replay | None:
        """The launch of one kernel for a dense J of one field with respect to one other parameter; None for others."""
        if any(len(items) != 1 for items in (kernels, layout.outputs, layout.params)):
            return None
        (fused,), (output,), (param,) = kernels, layout.outputs, layout.params
        shape = (*output.shape, *param.shape)
        is_whole = output.target.kind == "field" and output.key == output.container != param.container
        is_simple = is_whole and math.prod(shape) > 0
        return Replay.of(fused, layout, {output.key: (shape, output.result_dtype)}) if is_simple else None

    @property
    def is_sparse(self) -> bool:
        """Whether J is sparse."""
        return self.launch.fused.entries is not None

    def dense(self, args: tuple[object, ...], out: Any) -> np.ndarray | None:
        """J of a launch that is current, in ``out`` if that is given; None if J does not fit there.

        ``args`` holds the object that the kernel is bound to.
        """
        (given,) = self.tangents.values()
        if out is None:
            out = given.new()
        elif not given.fits(out):
            return None
        else:
            given.clear(out)
        with backend.exclusive:  # scratch memory is shared
            self.launch.launch(args, lambda _: out.reshape(-1))
        return out

    @property
    def is_symmetric(self) -> bool:
        """Whether J is symmetric to the last bit, as a Hessian is."""
        return Streams.of(self.launch.fused).is_symmetric

    def sparse(self, args: tuple[object, ...], rows: R) -> tuple[R, np.ndarray | None]:
        """Compose the rows of a launch that is current, see ``dense``; with the gradient of an energy."""
        streams = Streams.of(self.launch.fused)
        streams.begin()
        for key in self.tangents.keys() & self.launch.kept:
            self.tangents[key].clear(self.launch.kept[key])
        gradient = None if self.gradient is None else self.gradient.new()

        def array(key: Key) -> object:
            if isinstance(key, SiteArray):
                return streams.array(key)
            return gradient if isinstance(key, FirstOrderArray) else self._new(key)

        self.launch.launch(args, array)
        rows.compose(streams.end(), lambda key: key)
        return rows, gradient

    def _new(self, key: Key) -> np.ndarray:
        """An array of tangents, which is kept if there is room."""
        array, kept = self.tangents[key].new(), self.launch.kept
        if array.nbytes + sum(kept[other].nbytes for other in self.tangents if other in kept) <= MOST_KEPT:
            kept[key] = array
        return array
