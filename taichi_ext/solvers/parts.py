"""The parts of a vector of all parameters or residuals: their bounds and scales, and errors that name an entry."""

# pyright knows no types of Taichi, torch and SciPy, nor of arrays of any shape and type.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from taichi_ext.api.inputs.arguments import flatten
from taichi_ext.api.jacobian import matrices
from taichi_ext.errors import InvalidArgumentError, unexpected


class Part(NamedTuple):
    """A part of a vector: a parameter or an output."""

    name: str  # as messages call it
    shape: tuple[int, ...]  # with that of its elements
    dtype: np.dtype  # the type in which it is kept


def pieces_of(vector: np.ndarray, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """A vector as arrays of these shapes, one after the other."""
    ends = np.cumsum([math.prod(shape) for shape in shapes])[:-1]
    return [piece.reshape(shape) for piece, shape in zip(np.split(vector, ends), shapes, strict=True)]


def slices_of(parts: Iterable[Part]) -> list[slice]:
    ends = itertools.accumulate((math.prod(part.shape) for part in parts), initial=0)
    return list(itertools.starmap(slice, itertools.pairwise(ends)))


def bounds_of(
    given: object, params: object, shapes: list[tuple[int, ...]]
) -> tuple[float | np.ndarray, float | np.ndarray]:
    """The least and the largest values: two numbers or two vectors."""
    if not isinstance(given, (list, tuple)) or len(given) != 2:
        raise unexpected("bounds", given, "a pair: the least and the largest values")
    return _vector(given[0], params, shapes, "bounds[0]"), _vector(given[1], params, shapes, "bounds[1]")


def is_complex(value: object) -> bool:
    """Whether something is a complex number, or an array or list of those."""
    try:
        return np.asarray(value).dtype.kind == "c"
    except ValueError:  # a list of lists of different lengths
        return False


def scale_of(given: object, params: object, shapes: list[tuple[int, ...]]) -> object:
    """The scales as a vector where they are structured like the parameters, else as they are."""
    is_structure = isinstance(given, (list, tuple, dict))
    if is_structure and [path for path, _ in flatten(given)[0]] == [path for path, _ in flatten(params)[0]]:
        return _vector(given, params, shapes, "x_scale")
    return given


def _vector(given: object, params: object, shapes: list[tuple[int, ...]], what: str) -> float | np.ndarray:
    if isinstance(given, numbers.Real):
        return float(given)
    leaves, rebuild = flatten(given, what)
    is_nested = len(flatten(params)[0]) > 1 or isinstance(params, (list, tuple, dict))
    if is_nested and len(leaves) == len(shapes):  # a number stands for all entries of its parameter
        pairs = zip(leaves, shapes, strict=True)
        given = rebuild([np.full(s, v) if isinstance(v, numbers.Real) else v for (_, v), s in pairs])
    vector = matrices(given, params, what, shapes, are_several=False)[0]
    return np.concatenate(vector).reshape(-1).astype(np.float64)


def start_within(start: np.ndarray, low: Any, high: Any, parts: list[Part]) -> np.ndarray:
    """The start, moved by no more than the rounding to its type; raises where it is not within the bounds."""
    check_finite(start, parts, "; start at finite numbers.")
    low, high = np.broadcast_to(low, start.shape), np.broadcast_to(high, start.shape)
    is_outside = ~((rounded(low, parts) <= start) & (start <= rounded(high, parts)))
    for is_wrong, advice in [
        (~(low < high), "expected less to more. To keep a parameter as it is, leave it out of params."),
        (is_outside, "start within the bounds."),
    ]:
        if is_wrong.any():
            n = int(np.argmax(is_wrong))
            raise InvalidArgumentError(
                f"{entry_name(n, parts)} is {start[n]:g}, and bounds gives {low[n]:g} to {high[n]:g}; {advice}"
            )
    return np.clip(start, low, high)


def check_finite(values: np.ndarray, parts: list[Part], advice: str) -> None:
    """Raise for the first entry that is not a finite number, with its name and place."""
    is_wrong = ~np.isfinite(values)
    if is_wrong.any():
        n = int(np.argmax(is_wrong))
        raise InvalidArgumentError(f"{entry_name(n, parts)} is {values[n]:g}{advice}")


def check_rows_finite(J: Any, parts: list[Part], advice: str) -> None:
    """Raise for the first row of J, dense or CSR, with an entry that is not a finite number."""
    values = J.data if hasattr(J, "indptr") else J
    is_wrong = ~np.isfinite(values)
    if is_wrong.any():
        n = int(np.argmax(is_wrong))
        row = np.searchsorted(J.indptr, n, "right") - 1 if hasattr(J, "indptr") else n // J.shape[1]
        raise InvalidArgumentError(f"J of {entry_name(int(row), parts)} has the entry {values.flat[n]:g}{advice}")


def rounded(values: np.ndarray, parts: list[Part]) -> np.ndarray:
    """Numbers as the parameters hold them."""
    pieces = [values[place] for place in slices_of(parts)]
    with np.errstate(over="ignore"):
        return np.concatenate([v.astype(p.dtype).astype(np.float64) for v, p in zip(pieces, parts, strict=True)])


def entry_name(n: int, parts: list[Part]) -> str:
    """An entry of a vector as messages call it."""
    for part in parts:
        size = math.prod(part.shape)
        if n < size:
            place = ", ".join(str(int(i)) for i in np.unravel_index(n, part.shape))
            return f"entry [{place}] of {part.name}" if part.shape else part.name
        n -= size
    raise IndexError(n)
