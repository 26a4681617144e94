"""check_rule: whether a user's rule is linear, and where it differs from autodiff and from differences.

One small kernel calls the function, or uses the mark, at every point given, and another one calls the rule.
"""

# pyright knows no types of Taichi, torch and SciPy, nor of arrays of any shape and type.
# pyright: reportMissingTypeStubs=false
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# Input is checked, whatever its annotation says.
# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.api.inputs.kernel_checks import check_initialised
from taichi_ext.api.inputs.options import check_flag, check_number
from taichi_ext.api.jacobian import jacobian
from taichi_ext.backend import ti
from taichi_ext.boundary.gradients import mark
from taichi_ext.boundary.registry import GradientRule, registry
from taichi_ext.boundary.rule_points import PointKernel, Slot, make_slots, result_shapes
from taichi_ext.checks.reports import entry_text, number_text, table
from taichi_ext.errors import CheckError, InvalidArgumentError, InvalidRuleError, UnsupportedError, shown
from taichi_ext.record.rules import check_shapes
from taichi_ext.runtime.memory.kernel_arrays import numpy_dtype

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


def check_rule(
    rule: str | Callable[..., object],
    inputs: dict[str, object],
    *,
    expected: str = "autodiff",
    rtol: float | None = None,
    raise_on_failure: bool = False,
) -> RuleReport:
    """Test a rule at points of your choice: is it linear, and where does it differ from autodiff?

    The tests are:

    * ``rule(0) = 0``, ``rule(2 t) = 2 rule(t)`` and ``rule(a + b) = rule(a) + rule(b)`` for random tangents;
    * ``jacobian`` applies the rule;
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
    if expected not in ("autodiff", "boundary"):
        raise InvalidArgumentError(f"expected is {shown(expected)}; it can be 'autodiff' or 'boundary'.")
    if not isinstance(inputs, Mapping):
        raise InvalidArgumentError(f"inputs is {shown(inputs)}; expected a dict of arrays by name.")
    found = _find(rule)
    uses = found.uses
    try:
        with np.errstate(invalid="ignore", over="ignore"):
            report = _check(found, inputs, rtol, may_differ=expected == "boundary")
    finally:
        found.uses = uses
    if raise_on_failure and not report:
        raise CheckError(str(report))
    return report


def _find(rule: str | Callable[..., object]) -> GradientRule:
    if isinstance(rule, str):
        return registry[rule]
    func = backend.taichi_func(rule)
    found = registry.rule_for(func) if func is not None else None
    for candidate in registry:
        if candidate.function is rule:
            found = candidate
    if found is None:
        raise InvalidArgumentError(
            f"{rule!r} is neither the name of a rule, nor a registered rule, nor a ti.func with an enabled rule."
        )
    return found


# --- the checks -------------------------------------------------------------------------------------------------------


class _Subject:
    """A rule at its points: the function (or mark) that it is for, and the rule as a function of the tangents."""

    def __init__(self, rule: GradientRule, inputs: dict[str, object]) -> None:
        self.rule = rule
        self.is_mark = isinstance(rule.target, str)
        dtype = numpy_dtype(backend.dtype_of(1.0))
        if self.is_mark:
            used = [p.removeprefix("d_") for p in rule.parameters if p not in ("out", "auto")]
            names = ["out", *dict.fromkeys([*used, *(n for n in inputs if n != "out")])]
        else:
            names = [a.name for a in backend.arguments(rule.target)]
        self.slots, self.points = make_slots(names, inputs, dtype)
        self.real = [slot for slot in self.slots if slot.tangent is not None]
        if not self.real:
            raise InvalidArgumentError("inputs has no real numbers; give at least one argument as an array of floats.")
        if self.is_mark and not (self.slots[0].tangent is not None):
            raise InvalidArgumentError('inputs["out"], the value of the mark, is not an array of real numbers.')
        self.shapes, self.is_tuple = result_shapes(rule, self._call, self.points, dtype)
        self.results = [np.zeros((self.points, *s), dtype) for s in self.shapes]
        self.outs = [np.zeros_like(r) for r in self.results]
        self.autos = [np.zeros_like(r) for r in self.results]
        self.tangents = [np.zeros_like(r) for r in self.results]
        returned, _ = result_shapes(rule, self._rule_call, self.points, dtype)
        check_shapes(rule, self.shapes, returned)
        self.primal()
        for out, result in zip(self.outs, self.results, strict=True):
            out[...] = result

    def _kernel(self, call: Callable[[PointKernel], str], results: list[np.ndarray]) -> tuple[Any, PointKernel]:
        """The kernel that stores the results of a call at each point, with the rules that currently apply."""
        points = PointKernel(self.rule)
        text = call(points)
        return points.build(text, [points.array(r) for r in results], self.is_tuple).kernel, points

    def _call(self, kernel: PointKernel) -> str:
        texts = {}
        for slot in self.slots:
            if slot.shift is not None:
                texts[slot.name] = f"{kernel.array(slot.values)} + {kernel.array(slot.shift, '0')}"
            else:
                is_array = isinstance(slot.values, np.ndarray)
                texts[slot.name] = kernel.array(slot.values) if is_array else kernel.given(slot.values)
        if self.is_mark:
            along = "".join(f", {n}={t}" for n, t in texts.items() if n != "out")
            return f"{kernel.value(mark)}({self.rule.target!r}, {texts['out']}{along})"
        return f"{kernel.value(backend.as_function(self.rule.target))}({', '.join(texts.values())})"

    def _rule_call(self, kernel: PointKernel) -> str:
        slots = {slot.name: slot for slot in self.slots}
        texts = []
        for parameter in self.rule.parameters:
            if parameter in ("out", "auto"):
                parts = [kernel.array(a) for a in (self.outs if parameter == "out" else self.autos)]
                texts.append(f"({', '.join(parts)})" if self.is_tuple else parts[0])
            elif parameter in slots:
                values = slots[parameter].values
                texts.append(kernel.array(values) if isinstance(values, np.ndarray) else kernel.given(values))
            else:
                tangent = slots[parameter[2:]].tangent
                texts.append("0.0" if tangent is None else kernel.array(tangent))
        return f"{kernel.value(ti.func(self.rule.function))}({', '.join(texts)})"

    # --- results, flattened to one axis of results and one of arguments

    @property
    def columns(self) -> list[tuple[Slot, tuple[int, ...]]]:
        """The entries of the arguments that have tangents."""
        return [(slot, index) for slot in self.real for index in np.ndindex(slot.shape)]

    def primal(self) -> np.ndarray:
        kernel, arguments = self._kernel(self._call, self.results)
        kernel(*arguments.args)
        return self._flat(self.results)

    def partials(self) -> np.ndarray:
        """The result of ``jacobian``: shape (points, results, arguments)."""
        kernel, arguments = self._kernel(self._call, self.results)
        J = jacobian(kernel, [s.shift for s in self.real], self.results, args=arguments.args)
        rows = []
        for result, blocks in zip(self.results, J, strict=True):
            entries = math.prod(result.shape[1:])
            rows.append(np.concatenate([b.reshape(self.points, entries, -1) for b in blocks], axis=2))
        return np.concatenate(rows, axis=1)

    def apply(self, tangents: np.ndarray, automatic: np.ndarray) -> np.ndarray:
        """The rule: tangents of shape (points, arguments) to tangents of shape (points, results)."""
        at = 0
        for slot in self.real:
            assert slot.tangent is not None
            size = math.prod(slot.shape)
            slot.tangent[...] = tangents[:, at : at + size].reshape(slot.tangent.shape)
            at += size
        at = 0
        for auto in self.autos:
            size = math.prod(auto.shape[1:])
            auto[...] = automatic[:, at : at + size].reshape(auto.shape)
            at += size
        kernel, arguments = self._kernel(self._rule_call, self.tangents)
        kernel(*arguments.args)
        return self._flat(self.tangents)

    def differences(self, fraction: float) -> np.ndarray:
        """Central differences of the function: shape (points, results, arguments)."""
        columns = []
        for slot, index in self.columns:
            centre = slot.values.copy()
            eps = np.finfo(centre.dtype).eps
            scale = np.maximum(np.abs(centre[(..., *index)]), np.sqrt(np.mean(centre.astype(float) ** 2)))
            h = fraction * eps ** (1 / 3) * np.where(scale > 0, scale, 1)
            ends = []
            for sign in (1, -1):
                slot.values[(..., *index)] = centre[(..., *index)] + sign * h
                ends.append((slot.values[(..., *index)].astype(np.float64), self.primal()))
                slot.values[...] = centre
            width = (ends[0][0] - ends[1][0])[:, None]
            columns.append((ends[0][1] - ends[1][1]) / width)
        return np.stack(columns, axis=2)

    def _flat(self, arrays: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([a.reshape(self.points, -1) for a in arrays], axis=1).astype(np.float64)

    # --- names

    def where(self, point: int) -> str:
        shown = [f"{s.name} = {number_text(s.values[point])}" for s in self.slots if isinstance(s.values, np.ndarray)]
        return f"point {point} ({', '.join(shown)})"

    def derivative(self, result: int, column: int) -> str:
        entries = [(m, index) for m, s in enumerate(self.shapes) for index in np.ndindex(s)]
        number, index = entries[result]
        slot, entry = self.columns[column]
        name = "auto" if self.is_mark and slot.name == "out" else slot.name
        out = "out" + (f"[{number}]" if self.is_tuple else "") + entry_text(index)
        return f"d {out} / d {name}{entry_text(entry)}"


def _check(rule: GradientRule, inputs: dict[str, object], rtol: float | None, *, may_differ: bool) -> RuleReport:
    subject = _Subject(rule, inputs)
    exact, coarse = _TOLERANCE[subject.results[0].dtype.itemsize]
    findings: list[Finding] = []
    remarks: list[str] = []
    same_target = [r.name for r in registry if r.target is rule.target or r.target == rule.target]
    automatic = None
    with registry.disabled(*same_target):
        try:
            automatic = subject.partials()
        except UnsupportedError as error:
            if "auto" in rule.parameters or set(rule.taken) < {s.name for s in subject.real}:
                raise
            remarks.append(f"autodiff does not know the function: {str(error).strip().splitlines()[-1]}")
        if automatic is not None and not subject.is_mark:
            findings.append(_against_differences(subject, automatic, coarse if rtol is None else rtol))
    findings += _linearity(subject, automatic, exact)
    by_rule = _by_rule(subject, automatic)
    others = [name for name in same_target if name != rule.name]
    try:
        with registry.disabled(*others) if others else registry.enabled(rule.name), registry.enabled(rule.name):
            applied = subject.partials()
        findings.append(_compare(subject, "jacobian applies the rule", applied, by_rule, exact))
    except InvalidRuleError:
        raise
    except UnsupportedError as error:
        findings.append(Finding(f"jacobian rejects the rule ({str(error).strip().splitlines()[-1]})", False, math.nan))
    if automatic is None:
        return RuleReport(rule.name, rule.place, tuple(findings), subject.points, (), (), tuple(remarks))
    if not may_differ:
        findings.append(_compare(subject, "the rule agrees with autodiff", by_rule, automatic, exact))
    differing, rows = _differing(subject, by_rule, automatic, exact)
    return RuleReport(rule.name, rule.place, tuple(findings), subject.points, differing, rows, tuple(remarks))


def _linearity(subject: _Subject, automatic: np.ndarray | None, tolerance: float) -> list[Finding]:
    generator = np.random.default_rng(0)

    def rule(tangents: np.ndarray) -> np.ndarray:
        results = sum(math.prod(s) for s in subject.shapes)
        auto = (
            np.zeros((subject.points, results)) if automatic is None else np.einsum("prk,pk->pr", automatic, tangents)
        )
        return subject.apply(tangents, auto)

    a, b = (generator.normal(size=(subject.points, len(subject.columns))) for _ in range(2))
    of_zero, of_a, of_b = rule(a * 0), rule(a), rule(b)
    scale = np.maximum(np.abs(of_a), np.abs(of_b)).max(axis=1, initial=0.0, keepdims=True)
    return [
        _finding(subject, "rule(0) = 0", of_zero, scale, tolerance),
        _finding(subject, "rule(2 t) = 2 rule(t)", rule(2 * a) - 2 * of_a, scale, tolerance),
        _finding(subject, "rule(a + b) = rule(a) + rule(b)", rule(a + b) - of_a - of_b, scale, tolerance),
    ]


def _by_rule(subject: _Subject, automatic: np.ndarray | None) -> np.ndarray:
    """The partials of the rule, one unit tangent after the other: shape (points, results, arguments)."""
    results = sum(math.prod(s) for s in subject.shapes)
    columns = []
    for k, (slot, _) in enumerate(subject.columns):
        auto = np.zeros((subject.points, results)) if automatic is None else automatic[:, :, k]
        unit = np.zeros((subject.points, len(subject.columns)))
        unit[:, k] = 1
        column = subject.apply(unit, auto)
        if "auto" not in subject.rule.parameters and (slot.name not in subject.rule.taken):
            column = column + auto
        columns.append(column)
    return np.stack(columns, axis=2)


def _against_differences(subject: _Subject, automatic: np.ndarray, tolerance: float) -> Finding:
    coarse, fine = subject.differences(1.0), subject.differences(0.25)
    size = np.maximum(np.abs(coarse), np.abs(fine)).max(axis=(1, 2), keepdims=True)
    # differences that change with the step say nothing: the function jumps or has a kink there
    is_smooth = np.abs(coarse - fine).max(axis=(1, 2)) <= 0.3 * size[:, 0, 0]
    jumps = int((~is_smooth).sum())
    text = "auto agrees with differences" + (f" ({jumps} points with a jump or kink left out)" if jumps else "")
    error = np.where(is_smooth[:, None, None], automatic - coarse, 0.0)
    return _finding(subject, text, error, np.maximum(size, 1e-30), tolerance)


def _compare(subject: _Subject, text: str, a: np.ndarray, b: np.ndarray, tolerance: float) -> Finding:
    scale = np.maximum(np.abs(a), np.abs(b)).max(axis=(1, 2), initial=0.0, keepdims=True)
    return _finding(subject, text, a - b, scale, tolerance)


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
    is_other = ~(distance <= tolerance * scale)
    points = np.flatnonzero(is_other.any(axis=(1, 2)))
    largest = np.where(np.isnan(distance), np.inf, distance).reshape(subject.points, -1).max(axis=1, initial=0.0)
    rows = []
    for point in sorted(points, key=lambda p: -largest[p])[:_SHOWN]:
        ranked = np.where(np.isnan(distance[point]), np.inf, distance[point])
        result, column = (int(n) for n in np.unravel_index(int(ranked.argmax()), ranked.shape))
        values = (f"{m[point, result, column]:.6g}" for m in (by_rule, automatic))
        rows.append((subject.where(int(point)), subject.derivative(result, column), *values))
    return tuple(int(p) for p in points), tuple(rows)
