"""Points at which a user's rule is tried, and kernels written for them: text that calls the function or the rule.

The kernels take NumPy arrays with one entry per point; the text is kept where Python's ``inspect`` finds it.
"""

from __future__ import annotations

import inspect
import itertools
import linecache
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.backend import ti
from taichi_ext.boundary.registry import GradientRule, registry
from taichi_ext.errors import InvalidArgumentError
from taichi_ext.program import Tensor, Value
from taichi_ext.record.handles import Cell, Cells

_MOST_KEPT = 16  # kernels for one rule
_numbers = itertools.count()


@dataclass
class Slot:
    """One argument: its value at each point, and its tangents if it is real."""

    name: str
    values: Any  # an array with one entry per point, or an object that is passed as it is
    tangent: np.ndarray | None = None  # set for real numbers
    shift: np.ndarray | None = None  # zeros added at all points, for autodiff to differentiate by

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape[1:]


def make_slots(names: list[str], inputs: Mapping[str, object], dtype: Any) -> tuple[list[Slot], int]:
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
                    f"inputs[{name!r}] has shape {values.shape}; see check_rule for its possible values."
                )
            is_real = values.dtype.kind == "f"
            values = np.ascontiguousarray(values, dtype if is_real else np.int32)
            zeros = np.zeros_like(values) if is_real else None
            slots.append(Slot(name, values, zeros, None if zeros is None else np.zeros((1, *values.shape[1:]), dtype)))
        else:
            slots.append(Slot(name, values))
    return slots, points


def _array(name: str, value: object) -> object:
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


@dataclass(frozen=True)
class Built:
    """A compiled kernel, and the arguments of the calls of ``note`` in it during compilation."""

    kernel: Any
    noted: list[Any]


class PointKernel:
    """A kernel ``result = <call>`` at each point, written as text; its arguments are NumPy arrays.

    The latest kernels stay with the rule, so that another check with such arguments compiles nothing.
    """

    def __init__(self, rule: GradientRule) -> None:
        self.rule = rule
        self.scope: dict[str, object] = {"ti": ti}
        self.arguments: dict[str, np.ndarray] = {}
        self._given: list[Hashable] = []

    def array(self, values: np.ndarray, index: str = "i") -> str:
        """The text that reads an array at a point."""
        name = f"a{len(self.arguments)}"
        self.arguments[name] = values
        return f"{name}[{index}]"

    def value(self, values: object) -> str:
        """The text for something that belongs to the rule."""
        name = f"o{len(self.scope)}"
        self.scope[name] = values
        return name

    def given(self, values: object) -> str:
        """The text for a user's object, which is passed as it is."""
        self._given.append(values if isinstance(values, (bool, str)) else id(values))
        return self.value(values)

    def build(self, call: str, results: list[str], is_tuple: bool) -> Built:
        """Compile it, unless that was done before; ``results`` are the texts of the arrays that take the result."""
        types = tuple((a.dtype.str, a.shape[1:]) for a in self.arguments.values())
        functions = [getattr(self.rule.target, "func", None), self.rule.function]
        applied = registry.rule_for(self.rule.target) is self.rule
        key = (call, types, *self._given, *_with_named(functions), applied)
        kernels = self.rule.kernels
        if key in kernels and not backend.has_changed(kernels[key].kernel):
            return kernels[key]
        if len(kernels) >= _MOST_KEPT:
            del kernels[next(iter(kernels))]
        kernels[key] = self._compiled(call, results, is_tuple)
        return kernels[key]

    def _compiled(self, call: str, results: list[str], is_tuple: bool) -> Built:
        annotations = {f"t{n}": _annotation(a) for n, a in enumerate(self.arguments.values())}
        parameters = ", ".join(f"{a}: t{n}" for n, a in enumerate(self.arguments))
        stores = [f"{place} = result{f'[{m}]' if is_tuple else ''}" for m, place in enumerate(results)]
        points = f"{results[0].removesuffix('[i]')}.shape[0]"
        lines = [f"def kernel({parameters}):", f"    for i in range({points}):", f"        result = {call}"]
        lines += [f"        {store}" for store in stores]
        text = "\n".join(lines) + "\n"
        file = f"<check_rule {next(_numbers)}>"
        linecache.cache[file] = (len(text), None, text.splitlines(True), file)
        noted: list[Any] = []
        scope = {**self.scope, **annotations, "note": _noting(noted), "__name__": __name__}
        exec(compile(text, file, "exec", dont_inherit=True), scope)
        return Built(ti.kernel(scope["kernel"]), noted)

    @property
    def args(self) -> tuple[np.ndarray, ...]:
        return tuple(self.arguments.values())


def _with_named(functions: list[Any]) -> list[Any]:
    """Functions, and those that they name, directly or through others: as they are now."""
    found = [f for f in functions if f is not None]
    for function in found:  # grows
        names = inspect.getclosurevars(function)
        for value in (*names.nonlocals.values(), *names.globals.values()):
            func = backend.taichi_func(value)
            inner = value if func is None else func.func
            if inspect.isfunction(inner) and inner not in found:
                found.append(inner)
    return found


def _annotation(array: np.ndarray) -> object:
    dtype = {"float32": ti.f32, "float64": ti.f64, "int32": ti.i32}[array.dtype.name]
    shape = array.shape[1:]
    if len(shape) == 1:
        return ti.types.ndarray(dtype=ti.types.vector(shape[0], dtype), ndim=1)
    if len(shape) == 2:
        return ti.types.ndarray(dtype=ti.types.matrix(*shape, dtype), ndim=1)
    return ti.types.ndarray(dtype=dtype, ndim=1)


def result_shapes(
    rule: GradientRule, call: Callable[[PointKernel], str], points: int, dtype: Any
) -> tuple[list[tuple[int, ...]], bool]:
    """The shapes of the results of a call, and whether it returns a tuple: found when it is compiled."""
    kernel = PointKernel(rule)
    text = f"note({call(kernel)})"
    built = kernel.build(text, [kernel.array(np.zeros(points, dtype))], False)
    if not built.noted:
        built.kernel(*kernel.args)
    shapes, is_tuple = built.noted[0]
    if None in shapes:
        raise InvalidArgumentError(
            "check_rule takes functions that return numbers, vectors, matrices or tuples of them."
        )
    return shapes, is_tuple


def _noting(noted: list[object]) -> Callable[[object], float]:
    """A function that notes the shapes of its arguments."""

    def note(value: object) -> float:
        is_tuple = isinstance(value, (tuple, list))
        noted.append((list(map(_shape, value if is_tuple else [value])), is_tuple))
        return 0.0

    return backend.known_in_kernels(note)


def _shape(x: object) -> tuple[int, ...] | None:
    """The shape of a value in a kernel that Taichi compiles, or that is recorded; None where it is something else."""
    if isinstance(x, backend.Matrix):
        return tuple(x.get_shape() or ())
    if isinstance(x, (Tensor, Cells)):
        return x.shape
    if backend.is_expr(x):
        return backend.shape_of(x)
    return () if isinstance(x, (int, float, Value, Cell)) else None
