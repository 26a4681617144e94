"""The numbers of arrays that Python has stored to since the last launch, whether or not they have changed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.record.rewriter import OPERATORS
from taichi_ext.runtime.memory.regions import View

_PARTS = ("real", "imag", "flat")  # attributes of arrays by which all their numbers are stored to


class ArrayStores:
    """Masks of memory: a byte is nonzero if Python has stored there."""

    def __init__(self) -> None:
        self._masks: dict[tuple[object, int, int], np.ndarray] = {}

    def note(self, array: Any, store: Callable[[np.ndarray], None]) -> None:
        """Python stores to an array; ``store`` stores ones to an array like it in the same way."""
        space, start, end = span = backend.memory_span(array)
        if space[0] == "empty":
            return
        mask = self._masks.setdefault(span, np.zeros(end - start, np.uint8))
        is_tensor = backend.is_torch_tensor(array)
        width = array.element_size() if is_tensor else array.itemsize
        strides = tuple(s * width for s in array.stride()) if is_tensor else array.strides
        kind = np.dtype(f"u{width}") if width in (1, 2, 4, 8) else np.dtype([("bytes", np.uint8, (width,))])
        place = backend.memory_place(array)[1] - start
        store(np.ndarray(tuple(array.shape), kind, mask, place, strides))

    def within(self, layout: View) -> np.ndarray | None:
        """For each byte of a stretch of memory, whether it was stored to; None if there were no stores."""
        found = np.zeros(layout.end - layout.start, bool)
        for (space, start, end), mask in self._masks.items():
            first, last = max(start, layout.start), min(end, layout.end)
            if space == layout.space and first < last:
                found[first - layout.start : last - layout.start] |= mask[first - start : last - start] != 0
        return found if found.any() else None

    def clear(self) -> None:
        """Forget all stores, after a launch."""
        self._masks.clear()


def _index_of(index: object) -> Any:
    """An index as NumPy takes it."""
    if isinstance(index, tuple):
        return tuple(map(_index_of, index))
    return index.detach().cpu().numpy() if backend.is_torch_tensor(index) else index


def stores_of(
    function: Any, args: tuple[Any, ...], keywords: dict[str, Any]
) -> list[tuple[Any, Callable[[Any], None]]]:
    """The arrays that a function of NumPy, torch or Python stores to, each with a function that stores likewise."""
    name, owner = getattr(function, "__name__", ""), getattr(function, "__self__", None)
    where = keywords.get("where", True)
    outputs = [*_listed(keywords.get("out")), *(args[function.nin :] if isinstance(function, np.ufunc) else ())]
    found = [(a, lambda mask: np.copyto(mask, 1, where=where)) for a in outputs if is_memory(a)]
    is_method = memory_of(owner) is not None
    target, *rest = args if args and not is_method else (owner, *args)
    array = memory_of(target)
    if array is None:
        return found
    word, is_torch = name.strip("_"), backend.is_torch_tensor(array)
    is_numeric = is_method or backend.module_of(function).split(".")[0] in ("numpy", "torch")  # not a queue's put
    is_in_place = is_torch and name.endswith("_") and not name.startswith("__") and name not in _SHAPES
    if word == "setitem" or (word == "at" and isinstance(owner, np.ufunc)):
        store = item_store(target, rest[0])
    elif is_numeric and (word in _PROBED or (is_in_place and name.startswith(_BY_INDEX))):
        method = getattr(type(array), name) if is_method else function
        store = partial(_probe, array, lambda a: method(a, *rest, **keywords))
    elif (
        is_in_place
        or word in (*_IN_PLACE, "shuffle")
        or (is_method and name in _METHODS)
        or (function is setattr and rest[0] in _PARTS)
    ):
        store = _everywhere
    else:
        return found
    return [*found, (array, store)]


def is_memory(value: object) -> bool:
    """Whether a value is a NumPy array or tensor."""
    return isinstance(value, np.ndarray) or backend.is_torch_tensor(value)


def memory_of(value: object) -> object:
    """The array or tensor that an object, such as a flat iterator, stores to; None for other objects."""
    if isinstance(value, np.flatiter):
        return value.base
    if isinstance(value, memoryview):
        return np.asarray(value)
    return value if is_memory(value) else None


def item_store(target: object, index: object) -> Callable[[Any], None]:
    """A function that stores to an array like the target's as ``target[index] = ...`` does."""
    place = _index_of(index)
    if isinstance(target, np.flatiter):
        return lambda mask: mask.flat.__setitem__(place, 1)
    return lambda mask: mask.__setitem__(place, 1)


_PROBED = ("copyto", "put", "place", "putmask", "put_along_axis", "fill_diagonal")
_METHODS = ("fill", "sort", "partition", "byteswap", "resize", "setfield")
_IN_PLACE = frozenset(f"i{name}" for name in OPERATORS.values())
_SHAPES = ("requires_grad_", "share_memory_", "squeeze_", "unsqueeze_", "transpose_", "t_", "detach_", "rename_")
_BY_INDEX = ("index_", "masked_", "scatter_", "put_")


def _probe(array: Any, store: Callable[[Any], object], mask: np.ndarray) -> None:
    """Find out where numbers are stored, by applying the store to arrays of other numbers."""
    for number in (77, 78):  # at least one of them differs from the stored number
        other = array.detach().clone() if backend.is_torch_tensor(array) else array.copy()
        other[...] = number
        store(other)
        mask[(backend.as_numpy(other) != number)] = 1


def _everywhere(mask: np.ndarray) -> None:
    """Mark a whole array as stored to."""
    mask[...] = 1


def _listed(value: object) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
