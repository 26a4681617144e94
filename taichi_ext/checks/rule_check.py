"""check_rule: whether a user's rule is linear, and where it differs from autodiff and from differences.

One small kernel calls the function, or uses the mark, at every point given; its Jacobian is computed with and without
the rule.  It is written as text, which is kept where Python's ``inspect`` finds it.
"""

# pyright knows no types of Taichi, torch and SciPy, nor of arrays of any shape and type.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# Input is checked, whatever its annotation says.
# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

import itertools
import linecache
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from taichi_ext import backend, errors
from taichi_ext.api.inputs.arguments import check_initialised
from taichi_ext.api.inputs.options import check_flag, check_number, checked_choice
from taichi_ext.api.jacobian import jacobian
from taichi_ext.backend import ti
from taichi_ext.boundary.gradients import mark
from taichi_ext.boundary.registry import GradientRule, registry
from taichi_ext.checks.check import check_jacobian
from taichi_ext.checks.differences import entry_text, number_text, table
from taichi_ext.errors import CheckError, InvalidArgumentError, UnsupportedError, raise_problem, unexpected
from taichi_ext.program import Tensor, Value
from taichi_ext.record.handles import VectorPlace
from taichi_ext.runtime.memory.shadows import numpy_dtype

_numbers = itertools.count()
_TOLERANCE = {4: (1e-4, 2e-2), 8: (1e-9, 1e-6)}  # of identities, and of differences, by bytes of the type
_SHOWN = 5


@dataclass(frozen=True)
class Finding:
    """One tested property: ``figure`` is the largest relative error, ``where`` is the point where it occurs."""

    text: str
    is_ok: bool
    figure: float
    where: str = ""

    def __str__(self) -> str:
        verdict = "ok" if self.is_ok else "FAILED"
        return f"{self.text}: {verdict}, {self.figure:.2g}{' at ' + self.where if self.where else ''}"


@dataclass(frozen=True, repr=False)
class RuleReport:
    """The result of ``check_rule``: true if every property holds; ``print`` shows it as text.

    Attributes:
        name: the rule.
        place: file and line where it is defined.
        findings: the tested properties.
        points: the number of points.
        differing: the points where the rule differs from autodiff.
        rows: the largest differences, one line of a table each: point, derivative, rule, autodiff.
        remarks: properties that could not be tested, and why.
    """

    name: str
    place: str
    findings: tuple[Finding, ...]
    points: int
    differing: tuple[int, ...]
    rows: tuple[tuple[str, ...], ...]
    remarks: tuple[str, ...]

    @property
    def is_ok(self) -> bool:
        """Whether every property holds."""
        return all(finding.is_ok for finding in self.findings)

    def __bool__(self) -> bool:
        return self.is_ok

    def __str__(self) -> str:
        lines = [f"rule {self.name!r} ({self.place}) at {self.points} points: {'ok' if self.is_ok else 'FAILED'}"]
        lines += [f"  {finding}" for finding in self.findings]
        lines += [f"  {remark}" for remark in self.remarks]
        lines.append(f"  rule and autodiff differ at {len(self.differing)} of {self.points} points")
        if self.rows:
            lines += [f"    {line}" for line in table([("point", "derivative", "rule", "autodiff"), *self.rows])]
        return "\n".join(lines)

    __repr__ = __str__


@errors.with_short_traceback
def check_rule(
    rule: str | Callable[..., object],
    inputs: dict[str, object],
    *,
    expected: Literal["autodiff", "boundary"] = "autodiff",
    rtol: float | None = None,
    raise_on_failure: bool = False,
) -> RuleReport:
    """Test a rule at points of your choice: is it linear, and where does it differ from autodiff?

    The tests are:

    * ``jacobian`` applies the rule: it rejects rules that are not linear in the tangents;
    * ``auto`` agrees with central differences of the function where it is smooth, and the rule with autodiff.

    Everything is computed in Taichi's ``default_fp``.

    Args:
        rule: the name of a rule in the registry, the rule itself, or its ``ti.func``.
        inputs: a dict with the arguments of the function by name.  For a mark: its value as ``"out"``, and its further
            values by name.  Each is an array of shape ``(points,)``, ``(points, n)`` for vectors or ``(points, n, m)``
            for matrices; a number, used at all points; or any other object, passed unchanged (``self``, a field).
        expected: "autodiff" if the rule should agree with it; "boundary" if it may add a term at a jump.
        rtol: relative tolerance of ``auto`` against differences; by default 1e-6 for float64 and 2e-2 for float32.
        raise_on_failure: raise ``CheckError`` if the check fails.

    Returns:
        The report: ``bool(report)``, ``print(report)``.

    Raises:
        CheckError: a property does not hold, and ``raise_on_failure`` is set.
        InvalidArgumentError: there is no such rule; an input is missing, unknown, a struct, or has another number of
            points than the others.

    Example:
        >>> import taichi as ti
        >>> from taichi_ext import boundary_gradient, check_rule, registry
        >>> ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
        >>> @ti.func
        ... def clamped(x):
        ...     return ti.max(x, 0.0)
        >>> @boundary_gradient(clamped)
        ... def _(x, d_x, auto):
        ...     return ti.select(abs(x) < 0.1, 0.5 * d_x, auto)
        >>> report = check_rule("clamped", {"x": [-1.0, 0.05, 2.0]}, expected="boundary")
        >>> bool(report)
        True
        >>> report.differing
        (1,)
        >>> registry.remove("clamped")
    """
    check_initialised()
    check_number("rtol", rtol, "a relative tolerance", least=0)
    check_flag("raise_on_failure", raise_on_failure)
    checked_choice("expected", expected, ("autodiff", "boundary"))
    if not isinstance(inputs, Mapping):
        raise unexpected("inputs", inputs, "a dict of arrays by name")
    checked = _find(rule)
    uses = checked.uses
    try:
        with np.errstate(invalid="ignore", over="ignore"):
            report = _check(checked, inputs, rtol, may_differ=expected == "boundary")
    finally:
        checked.uses = uses
    if raise_on_failure and not report:
        raise CheckError(str(report))
    return report


def _find(rule: str | Callable[..., object]) -> GradientRule:
    if isinstance(rule, str):
        return registry[rule]
    func = backend.taichi_func(rule)
    of_function = registry.rule_for(func) if func is not None else None
    result = next((known for known in registry if known.function is rule), of_function)
    if result is None:
        raise InvalidArgumentError(
            f"{rule!r} is neither the name of a rule, nor a registered rule, nor a ti.func with an enabled rule."
        )
    return result


def _values(names: Sequence[str], inputs: Mapping[str, object]) -> tuple[dict[str, Any], int]:
    """The values of the arguments, arrays by point or objects as they are, and the number of points."""
    given = {"missing": [n for n in names if n not in inputs], "unknown": sorted(set(inputs) - set(names))}
    if any(given.values()):
        problems = [f"{what} {', '.join(map(repr, entries))}" for what, entries in given.items() if entries]
        raise InvalidArgumentError(f"inputs: {'; '.join(problems)}. Expected are {', '.join(map(repr, names))}.")
    values = {name: _array(name, inputs[name]) for name in names}
    counts = {n: len(a) for n, a in values.items() if isinstance(a, np.ndarray) and a.ndim}
    if len(set(counts.values())) > 1:
        raise InvalidArgumentError(f"inputs have different numbers of points: {counts}.")
    points = next(iter(counts.values()), 1)
    dtype = numpy_dtype(backend.dtype_of(1.0))
    for name, a in values.items():
        if isinstance(a, np.ndarray):
            a = a if a.ndim else np.full(points, a)
            values[name] = np.array(a, dtype if a.dtype.kind == "f" else np.int32, order="C")
    return values, points


def _array(name: str, value: object) -> object:
    if isinstance(value, dict):
        raise InvalidArgumentError(f"inputs[{name!r}] is a struct, which check_rule does not take.")
    if isinstance(value, (bool, str)) or not isinstance(value, (int, float, list, tuple, np.ndarray, np.number)):
        return value
    problem = backend.array_problem(value) if isinstance(value, np.ndarray) else ""
    try:
        array = np.asarray(value)
    except ValueError:
        array, problem = np.zeros(1), "has rows of different lengths"
    if array.ndim > 3 or not array.size:
        problem = problem or ("is empty" if not array.size else f"has shape {array.shape}; see check_rule")
    if array.dtype.kind not in "fiu":
        if not problem and not isinstance(value, np.ndarray) and array.dtype.kind != "c":
            return value
        kind = "has complex numbers" if array.dtype.kind == "c" else f"has elements of type {array.dtype}"
        problem = problem or f"{kind}; expected real numbers or integers"
    raise_problem(f"inputs[{name!r}]", problem)
    return array


class _Subject:
    """The function, or mark, that a rule is for, at the points."""

    def __init__(self, rule: GradientRule, inputs: Mapping[str, object]) -> None:
        self.rule = rule
        self.is_mark = isinstance(rule.target, str)
        if self.is_mark:
            used = [p.removeprefix("d_") for p in rule.parameters if p not in ("out", "auto")]
            names = ["out", *dict.fromkeys([*used, *(n for n in inputs if n != "out")])]
        else:
            names = [a.name for a in backend.arguments(rule.target)]
        self.values, self.points = _values(names, inputs)
        given = self.given = {n: v for n, v in self.values.items() if isinstance(v, np.ndarray)}
        self.real = {n: v for n, v in given.items() if v.dtype.kind == "f"}
        if not self.real:
            raise InvalidArgumentError("inputs has no real numbers; give at least one argument as an array of floats.")
        if self.is_mark and "out" not in self.real:
            raise InvalidArgumentError('inputs["out"], the value of the mark, is not an array of real numbers.')
        self.dtype = next(iter(self.real.values())).dtype
        self._arrays = {f"at_{n}": v for n, v in given.items()}
        self._arrays |= {f"shift_{n}": np.zeros_like(v[:1]) for n, v in self.real.items()}  # at all points
        self._scope: dict[str, Any] = {"ti": ti, "mark": mark, "__name__": __name__}
        if not self.is_mark:
            self._scope["target"] = backend.as_function(rule.target)
        self._scope |= {f"given_{n}": v for n, v in self.values.items() if n not in given}
        self.shapes, self.is_tuple = self._result_shapes(self._call())
        results = {f"result{m}": np.zeros((self.points, *shape), self.dtype) for m, shape in enumerate(self.shapes)}
        self._arrays |= results
        self.results = list(results.values())
        self.function = self._kernel(self._call(), range(len(self.shapes)))
        self.args = tuple(self._arrays.values())
        self.shifts = [self._arrays[f"shift_{n}"] for n in self.real]

    def _call(self) -> str:
        """The call at a point, each real argument moved by its shift."""
        texts = {name: f"at_{name}[i]" if f"at_{name}" in self._arrays else f"given_{name}" for name in self.values}
        texts |= {name: f"{texts[name]} + shift_{name}[0]" for name in self.real}
        if self.is_mark:
            out, along = texts.pop("out"), "".join(f", {n}={t}" for n, t in texts.items())
            return f"mark({self.rule.target!r}, {out}{along})"
        return f"target({', '.join(texts.values())})"

    def _kernel(self, call: str, results: Sequence[int]) -> Any:
        """The kernel that makes a call at each point, and stores its results; it takes all arrays."""
        parameters = ", ".join(f"{name}: kind_{name}" for name in self._arrays)
        parts = (f"        result{m}[i] = value{f'[{m}]' if self.is_tuple else ''}\n" for m in results)
        lines = f"    for i in range({self.points}):\n        value = {call}\n"
        text = f"def kernel({parameters}):\n{lines}{''.join(parts)}"
        file = f"<check_rule {next(_numbers)}>"
        linecache.cache[file] = (len(text), None, text.splitlines(True), file)
        scope = {**self._scope, **{f"kind_{name}": _annotation(a) for name, a in self._arrays.items()}}
        exec(compile(text, file, "exec", dont_inherit=True), scope)
        weakref.finalize(scope["kernel"], linecache.cache.pop, file, None)
        return ti.kernel(scope["kernel"])

    def _result_shapes(self, call: str) -> tuple[list[Any], bool]:
        """The shapes of the results of a call, and whether it returns a tuple: found while it is compiled."""
        noted: list[tuple[list[Any], bool]] = []

        def note(value: object) -> float:
            is_tuple = isinstance(value, (tuple, list))
            noted.append((list(map(_shape, value if is_tuple else [value])), is_tuple))
            return 0.0

        self._scope["note"] = backend.known_in_kernels(note)
        self._kernel(f"note({call})", ())(*self._arrays.values())
        if None in noted[0][0]:
            raise InvalidArgumentError("check_rule takes functions that return numbers, vectors, matrices or tuples.")
        return noted[0]

    # --- results, flattened to one axis of results and one of arguments

    @property
    def columns(self) -> list[tuple[str, tuple[int, ...]]]:
        """The entries of the arguments that have tangents."""
        return [(name, index) for name, v in self.real.items() for index in np.ndindex(v.shape[1:])]

    def partials(self) -> np.ndarray:
        """The result of ``jacobian``: shape (points, results, arguments)."""
        J = jacobian(self.function, self.shifts, self.results, args=self.args)
        sizes = [math.prod(shape) for shape in self.shapes]
        rows = [[b.reshape(self.points, n, -1) for b in blocks] for n, blocks in zip(sizes, J, strict=True)]
        return np.concatenate([np.concatenate(blocks, axis=2) for blocks in rows], axis=1)

    # --- names

    def where(self, point: int) -> str:
        return f"point {point} ({', '.join(f'{n} = {number_text(v[point])}' for n, v in self.given.items())})"

    def derivative(self, result: int, column: int) -> str:
        entries = [(m, index) for m, s in enumerate(self.shapes) for index in np.ndindex(s)]
        number, index = entries[result]
        name, entry = self.columns[column]
        name = "auto" if self.is_mark and name == "out" else name
        out = "out" + (f"[{number}]" if self.is_tuple else "") + entry_text(index)
        return f"d {out} / d {name}{entry_text(entry)}"


def _check(rule: GradientRule, inputs: dict[str, object], rtol: float | None, *, may_differ: bool) -> RuleReport:
    subject = _Subject(rule, inputs)
    exact, coarse = _TOLERANCE[subject.dtype.itemsize]
    findings: list[Finding] = []
    remarks: list[str] = []
    same_target = [r.name for r in registry if r.target is rule.target or r.target == rule.target]
    automatic = None
    with registry.disabled(*same_target):
        try:
            automatic = subject.partials()
        except UnsupportedError as error:
            if "auto" in rule.parameters or set(rule.taken) < set(subject.real):
                raise
            remarks.append(f"autodiff does not know the function: {str(error).strip().splitlines()[-1]}")
        if automatic is not None and not subject.is_mark:
            findings.append(_against_differences(subject, coarse if rtol is None else rtol))
    others = [name for name in same_target if name != rule.name]
    try:
        with registry.disabled(*others) if others else registry.enabled(rule.name), registry.enabled(rule.name):
            by_rule = subject.partials()
        undefined = np.where(np.isnan(by_rule), np.nan, 0.0)
        findings.append(_finding(subject, "jacobian applies the rule", undefined, np.ones(1), exact))
    except UnsupportedError as error:
        by_rule = None
        findings.append(Finding(f"jacobian rejects the rule ({str(error).strip().splitlines()[-1]})", False, math.nan))
    if automatic is None or by_rule is None:
        return RuleReport(rule.name, rule.place, tuple(findings), subject.points, (), (), tuple(remarks))
    if not may_differ:
        scale = np.maximum(np.abs(by_rule), np.abs(automatic)).max(axis=(1, 2), initial=0.0, keepdims=True)
        findings.append(_finding(subject, "the rule agrees with autodiff", by_rule - automatic, scale, exact))
    differing, rows = _differing(subject, by_rule, automatic, exact)
    return RuleReport(rule.name, rule.place, tuple(findings), subject.points, differing, rows, tuple(remarks))


def _against_differences(subject: _Subject, rtol: float) -> Finding:
    report = check_jacobian(subject.function, subject.shifts, subject.results, args=subject.args, rtol=rtol)
    entries = [(b.worst, b.failed) for b in report.blocks if b.worst is not None and (b.failed or not b.undecided)]
    figures = [e.error / max(abs(e.jacobian), abs(e.differences), 1e-30) for e, _ in entries]
    undecided = sum(block.undecided for block in report.blocks)
    text = "auto agrees with differences" + (f" ({undecided} at a jump or kink left out)" if undecided else "")
    where = next((subject.where(e.output[0]) for e, failed in entries if failed), "")
    return Finding(text, report.verdict != "disagrees", max(figures, default=0.0), where)


def _finding(subject: _Subject, text: str, error: np.ndarray, scale: np.ndarray, tolerance: float) -> Finding:
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.abs(error) / np.where(scale > 0, scale, 1.0)
    by_point = relative.reshape(subject.points, -1).max(axis=1, initial=0.0)
    wrong = ~(by_point <= tolerance)  # a NaN is wrong
    point = int(np.argmax(np.where(np.isnan(by_point), np.inf, by_point)))
    return Finding(text, not wrong.any(), float(by_point[point]), subject.where(point) if wrong.any() else "")


def _differing(
    subject: _Subject, by_rule: np.ndarray, automatic: np.ndarray, tolerance: float
) -> tuple[tuple[int, ...], tuple[tuple[str, ...], ...]]:
    """The points where the rule is not autodiff, and the largest difference at each of the first few."""
    distance = np.abs(by_rule - automatic)
    scale = np.maximum(np.abs(by_rule), np.abs(automatic)).max(axis=(1, 2), keepdims=True)
    is_other = ~(distance <= tolerance * scale) | (np.isfinite(by_rule) != np.isfinite(automatic))
    points = np.flatnonzero(is_other.any(axis=(1, 2)))
    ranked = np.where(np.isnan(distance), np.inf, distance).reshape(subject.points, -1)
    rows = []
    for point in sorted(points, key=lambda p: -ranked[p].max())[:_SHOWN]:
        result, column = divmod(int(ranked[point].argmax()), distance.shape[2])
        values = (f"{m[point, result, column]:.6g}" for m in (by_rule, automatic))
        rows.append((subject.where(int(point)), subject.derivative(result, column), *values))
    return tuple(int(p) for p in points), tuple(rows)


def _annotation(array: np.ndarray) -> object:
    """The annotation of an argument with one entry for each point."""
    dtype, shape = backend.outer_array_dtype(array), array.shape[1:]
    if shape:
        dtype = ti.types.vector(shape[0], dtype) if len(shape) == 1 else ti.types.matrix(shape[0], shape[1], dtype)
    return ti.types.ndarray(dtype=dtype, ndim=1)


def _shape(x: object) -> tuple[int, ...] | None:
    """The shape of a value in a kernel that Taichi compiles, or that is recorded; None where it is something else."""
    if isinstance(x, backend.Matrix):
        return tuple(x.get_shape() or ())
    if isinstance(x, (Tensor, VectorPlace)):
        return x.shape
    if isinstance(x, backend.Expr):
        return backend.shape_of(x)
    return () if isinstance(x, (int, float, Value)) else None
