"""Points at which a user's rule is tried, and kernels written for them: text that calls the function or the rule.

The kernels take NumPy arrays with one entry per point; the text is kept where Python's ``inspect`` finds it.
"""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.backend import ti
from taichi_ext.errors import InvalidArgumentError
from taichi_ext.program import Tensor, Value
from taichi_ext.record.handles import Cell, Cells

_numbers = itertools.count()


@dataclass
class Slot:
    """One argument: what it is at each point, and for a real number its tangents."""

    name: str
    values: Any  # an array with one entry per point, or an object that is passed as it is
    tangent: np.ndarray | None = None  # set for real numbers
    shift: np.ndarray | None = None  # zeros that are added at all points: what autodiff differentiates by

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape[1:]


def make_slots(names: list[str], inputs: dict[str, Any], dtype: Any) -> tuple[list[Slot], int]:
    given = {"missing": [n for n in names if n not in inputs], "unknown": sorted(set(inputs) - set(names))}
    if any(given.values()):
        problems = [f"{what} {', '.join(map(repr, found))}" for what, found in given.items() if found]
        raise InvalidArgumentError(f"inputs: {'; '.join(problems)}. Expected are {', '.join(map(repr, names))}.")
    arrays = {n: _array(n, v) for n, v in inputs.items()}
    counts = {n: len(a) for n, a in arrays.items() if isinstance(a, np.ndarray) and a.ndim}
    if len(set(counts.values())) > 1:
        raise InvalidArgumentError(f"inputs have different numbers of points: {counts}.")
    points = next(iter(counts.values()), 1)
    slots = []
    for name in names:
        values = arrays[name]
        if isinstance(values, dict):
            raise InvalidArgumentError(
                f"inputs[{name!r}] is a struct, which check_rule does not take. Try the rule with a function of the "
                "struct's members, or compare jacobian with the derivative that you expect."
            )
        if isinstance(values, np.ndarray):
            if values.ndim == 0:
                values = np.full(points, values)
            if values.ndim > 3:
                raise InvalidArgumentError(
                    f"inputs[{name!r}] has shape {values.shape}; see check_rule for what it can be."
                )
            is_real = values.dtype.kind == "f"
            values = np.ascontiguousarray(values, dtype if is_real else np.int32)
            zeros = np.zeros_like(values) if is_real else None
            slots.append(Slot(name, values, zeros, None if zeros is None else np.zeros((1, *values.shape[1:]), dtype)))
        else:
            slots.append(Slot(name, values))
    return slots, points


def _array(name: str, value: Any) -> Any:
    if isinstance(value, (bool, str)) or value is None:
        return value
    if isinstance(value, (int, float, list, tuple, np.ndarray, np.number)):
        problem = backend.array_problem(value) if isinstance(value, np.ndarray) else ""
        try:
            array = np.asarray(value)
        except ValueError:
            array, problem = np.zeros(0), "has rows of different lengths"
        if isinstance(value, np.ndarray) and not problem and array.dtype.kind not in "fiub":
            problem = f"has elements of type {array.dtype}; expected real numbers or integers"
        if array.dtype.kind == "c":
            problem = "has complex numbers; expected real numbers or integers"
        if array.ndim and not array.size:
            problem = problem or "is empty; give at least one point"
        if problem:
            raise InvalidArgumentError(f"inputs[{name!r}] {problem}.")
        return array if array.dtype.kind in "fiu" else value
    return value


# --- the kernels ------------------------------------------------------------------------------------------------------


class PointKernel:
    """A kernel ``result = <call>`` at each point, written as text; its arguments are NumPy arrays."""

    def __init__(self, points: int, dtype: Any) -> None:
        self.points = points
        self.dtype = dtype
        self.scope: dict[str, Any] = {"points": points, "ti": ti}
        self.arguments: dict[str, np.ndarray] = {}

    def array(self, values: np.ndarray, index: str = "i") -> str:
        """The text that reads an array at a point."""
        name = f"a{len(self.arguments)}"
        self.arguments[name] = values
        return f"{name}[{index}]"

    def value(self, values: Any) -> str:
        """The text for an object that is passed as it is."""
        name = f"o{len(self.scope)}"
        self.scope[name] = values
        return name

    def build(self, call: str, results: list[str], is_tuple: bool) -> Any:
        """Compile it; ``results`` are the texts of the arrays that take the result."""
        annotations = {f"t{n}": _annotation(a) for n, a in enumerate(self.arguments.values())}
        parameters = ", ".join(f"{a}: t{n}" for n, a in enumerate(self.arguments))
        stores = [f"{place} = result{f'[{m}]' if is_tuple else ''}" for m, place in enumerate(results)]
        lines = [f"def kernel({parameters}):", "    for i in range(points):", f"        result = {call}"]
        lines += [f"        {store}" for store in stores]
        text = "\n".join(lines) + "\n"
        file = f"<check_rule {next(_numbers)}>"
        linecache.cache[file] = (len(text), None, text.splitlines(True), file)
        scope = {**self.scope, **annotations, "__name__": __name__}
        exec(compile(text, file, "exec", dont_inherit=True), scope)
        return ti.kernel(scope["kernel"])

    @property
    def args(self) -> tuple[np.ndarray, ...]:
        return tuple(self.arguments.values())


def _annotation(array: np.ndarray) -> Any:
    dtype = {"float32": ti.f32, "float64": ti.f64, "int32": ti.i32}[array.dtype.name]
    shape = array.shape[1:]
    if len(shape) == 1:
        return ti.types.ndarray(dtype=ti.types.vector(shape[0], dtype), ndim=1)
    if len(shape) == 2:
        return ti.types.ndarray(dtype=ti.types.matrix(*shape, dtype), ndim=1)
    return ti.types.ndarray(dtype=dtype, ndim=1)


def result_shapes(call: Callable[[PointKernel], str], points: int, dtype: Any) -> tuple[list[tuple[int, ...]], bool]:
    """Shapes of what a call returns, and whether it is a tuple: found by tracing it once."""
    noted: list[Any] = []

    def note(value: Any) -> float:
        noted.append(value)
        return 0.0

    note._is_wrapped_kernel = True  # type: ignore[attr-defined]  # Taichi: not a foreign function
    kernel = PointKernel(points, dtype)
    text = f"{kernel.value(note)}({call(kernel)})"
    place = kernel.array(np.zeros(points, dtype))
    kernel.build(text, [place], False)(*kernel.args)
    result = noted[0]
    is_tuple = isinstance(result, (tuple, list))
    parts = list(result) if is_tuple else [result]
    shapes = list(map(_shape, parts))
    if None in shapes:
        raise InvalidArgumentError(
            "check_rule takes functions that return numbers, vectors, matrices or tuples of them."
        )
    return [s for s in shapes if s is not None], is_tuple


def _shape(x: Any) -> tuple[int, ...] | None:
    """The shape of a value in a kernel that Taichi compiles, or that is recorded; None where it is something else."""
    if isinstance(x, backend.Matrix):
        return tuple(x.get_shape() or ())
    if isinstance(x, (Tensor, Cells)):
        return x.shape
    if backend.is_expr(x):
        return backend.shape_of(x)
    return () if isinstance(x, (int, float, Value, Cell)) else None
