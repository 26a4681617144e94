"""check_jacobian: the Jacobian compared with central differences, and the line where a NaN or an infinity arises.

The first step is ``h = eps ** (1/3) * abs(x)``, which balances truncation against the rounding of outputs (Nocedal and
Wright, Numerical Optimization, section 8.1).  Where J does not agree with that difference, ``differences.verdict_of``
compares it with those at smaller and larger steps.
"""

# pyright knows no types of Taichi, torch and SciPy, nor of arrays of any shape and type.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from textwrap import indent
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.api.inputs.arguments import KernelCall, Target
from taichi_ext.api.inputs.options import check_count, check_flag, check_number, checked_options
from taichi_ext.api.inputs.progress import check_progress, progress_bar
from taichi_ext.api.inputs.types import Format
from taichi_ext.api.jacobian import prepared_form
from taichi_ext.api.plans.plan import Plan
from taichi_ext.checks.differences import BlockComparison, ComparedColumns, JacobianReport, MovedEntry, index_text
from taichi_ext.differentiate.facts.decisions import Differentiated
from taichi_ext.differentiate.transform.watch import watched
from taichi_ext.errors import CheckError, InvalidArgumentError, with_short_traceback
from taichi_ext.program import I32, Container, Place, Program
from taichi_ext.record.variables import Variable, with_entries
from taichi_ext.runtime.memory.state import State

_MOST_SITES = 4096
_SHOWN = 3
_MARGIN = "    "


class Watch:
    """Counts, for each place that keeps a value with a tangent, how often that or its tangent is NaN or infinite.

    And how often an index at a place is outside of the field, array or local that it is of.
    It is given to ``Jacobian.start``, and shown the programs of the kernels in the order in which they run.
    """

    def __init__(self) -> None:
        self.sites: dict[tuple[str, bool], int] = {}  # for indices or not
        self.counts, self._tree = backend.temporary_field(backend.ti.i32, _MOST_SITES)

    def program(self, differentiated: Differentiated) -> Program:
        """A differentiated program that counts."""
        counts = Container("counts", I32, 1, (), self.counts, False, (_MOST_SITES,))
        return watched(differentiated, counts, self._number)

    def _number(self, place: Place | None, is_index: bool) -> int | None:
        """The number of a place; None where there are too many."""
        if place is None:
            return None
        number = self.sites.setdefault((place.message().strip("\n"), is_index), len(self.sites))
        return number if number < _MOST_SITES else None

    def findings(self) -> list[str]:
        """The first places where something is not finite."""
        places = list(self._counted(is_index=False))
        if not places:
            return []
        first, *others = places
        texts = [f"it arises first in\n{indent(first, _MARGIN)}"]
        if others:
            lines = ", ".join(dict.fromkeys(place.split(", in ")[0].split(", ")[-1] for place in others[:_SHOWN]))
            texts.append(f"from there it reaches {lines}{' and more' if len(others) > _SHOWN else ''}.")
        return texts

    def outside(self) -> list[str]:
        """The places where an index is outside, and how often."""
        counted = ((indent(place, _MARGIN), n) for place, n in self._counted(is_index=True).items())
        return [f"an index is outside ({n} {'time' if n == 1 else 'times'}) in\n{place}" for place, n in counted]

    def _counted(self, *, is_index: bool) -> dict[str, int]:
        """The places where something was counted, and how often."""
        counts = self.counts.to_numpy()
        numbers = ((place, n) for (place, of_index), n in self.sites.items() if of_index == is_index)
        return {place: int(counts[n]) for place, n in numbers if n < _MOST_SITES and counts[n]}

    def close(self) -> None:
        """Give the memory back."""
        self._tree.destroy()


_RTOL = {2: 0.2, 4: 2e-2, 8: 1e-6}  # by bytes of the type; central differences are no better
_FEW = 20  # entries of parameters that are tried without a progress bar


@with_short_traceback
def check_jacobian(
    kernel: Callable[..., object],
    params: object,
    outputs: object = None,
    *,
    args: tuple[object, ...] = (),
    step: float | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    most_entries: int | None = 200,
    raise_on_failure: bool = False,
    progress: bool | None = None,
    format: Format | None = None,
) -> JacobianReport:
    """Compare ``jacobian(kernel, params, outputs, args=args)`` with central differences.

    The kernel runs once for J and twice for each checked entry of a parameter.  Where J does not agree, it runs at more
    steps, from 256 times smaller ones up to a quarter of the entry (or of 1), to tell a wrong J from a difference that
    truncation or rounding spoils.  Afterwards, every field and array that it changes is restored.  A NaN never agrees
    with anything.  The report names the entries that are not finite and the line of the kernel where the first of them
    arose.

    An entry is undecided where differences cannot tell: where the output has a jump or a kink at the parameter, is not
    finite next to it, or changes by less than its rounding error.  For example, at a silhouette, differences of single
    samples say nothing about J with its boundary term.

    Args:
        kernel, params, outputs, args, format: see ``jacobian``.
        step: the first step of the differences, relative to the magnitude of an entry; by default the cube root of the
            precision, 6e-6 for float64 and 5e-3 for float32.
        rtol: relative tolerance of an entry; by default 1e-6 for float64 and 2e-2 for float32.
        atol: absolute tolerance; by default 0.1 rtol times the largest entry of the same column.  An allowance for the
            rounding of the outputs is added to it where that is smaller than half the entry.
        most_entries: the largest number of entries of each parameter to check; a fixed seed makes the sample
            reproducible.  None checks all entries.
        raise_on_failure: raise ``CheckError`` if the check fails.
        progress: whether to show a progress bar if more than 20 entries are checked; see ``jacobian``.

    Returns:
        The report, which is true if all checked entries agree: ``bool(report)``, ``print(report)``,
        ``report.verdict``, and the numbers in ``report.blocks``.

    Raises:
        CheckError: the report is not true, and ``raise_on_failure`` is set.
        InvalidArgumentError: an argument is invalid; or the kernel cannot run again from the same state, because it
            draws random numbers.
        UnsupportedError: the derivative of a construct is not known.

    Example:
        >>> import taichi as ti
        >>> from taichi_ext import check_jacobian
        >>> ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
        >>> x = ti.field(ti.f64, shape=2)
        >>> y = ti.field(ti.f64, shape=3)
        >>> @ti.kernel
        ... def powers():
        ...     for i in range(3):
        ...         y[i] = x[0] ** (i + 1) * x[1]
        >>> x.from_numpy(np.array([2.0, 1.0]))
        >>> report = check_jacobian(powers, x, y)
        >>> bool(report)
        True
        >>> print(report)  # doctest: +ELLIPSIS
        J of powers agrees with central differences (relative tolerance 1e-06)
          output ...
          outputs (field y of shape (3,))  params (field x of shape (2,))  6 of 6 ...
    """
    way = Comparison(step, rtol, atol, most_entries, progress, raise_on_failure)
    run = CheckedRun(*prepared_form(kernel, params, outputs, args, checked_options(format=format)))
    return report_of(run, way, "J")


@dataclass(frozen=True)
class Comparison:
    """How a Jacobian is compared with differences, see ``check_jacobian``."""

    step: float | None
    rtol: float | None
    atol: float | None
    most_entries: int | None
    progress: bool | None
    raise_on_failure: bool

    def __post_init__(self) -> None:
        check_flag("raise_on_failure", self.raise_on_failure)
        check_number("step", self.step, "the step of the differences relative to an entry")
        check_number("rtol", self.rtol, "a relative tolerance", least=0)
        check_number("atol", self.atol, "an absolute tolerance", least=0)
        if self.most_entries is not None:
            check_count("most_entries", self.most_entries, least=1)
        check_progress(self.progress)


def report_of(run: CheckedRun, way: Comparison, of: str) -> JacobianReport:
    """The report on the derivative (J or H, ``of``) that a run computes; the state is restored."""
    try:
        blocks, (not_finite, outside), tolerance = _compare(run, way, of)
    finally:
        run.finish()
    report = JacobianReport(run.name, tuple(blocks), tuple(not_finite), tolerance, tuple(outside), of)
    if way.raise_on_failure and not report:
        raise CheckError(str(report))
    return report


# --- running the kernel again and again from the same state -----------------------------------------------------------


class CheckedRun:
    """The kernel, its parameters and its outputs, run from the state in which the check began."""

    def __init__(self, plan: Plan, call: KernelCall) -> None:
        self.plan = plan
        self.call = call
        self.params = [call.current(target) for target in plan.prepared.params]
        self.output_targets = [call.current(target) for target in plan.prepared.outputs]
        self.names = [str(target.name) for target in self.output_targets]  # of the differentiated outputs
        self.name = self.call.name
        self.args = tuple(a.detach() if backend.is_torch_tensor(a) else a for a in self.call.args)
        self.state = State(call.python_state())
        for target in [*self.params, *self.output_targets]:
            if target.kind != "return" and not call.is_value(target):
                self.state.save(call.value(target))
        for value in self.call.args:
            if backend.is_array(value):
                self.state.save(value)

    def jacobian(self, watch: Watch | None = None) -> list[list[Any]]:
        """J as ``[output][parameter]``, in the types that ``jacobian`` gives them; SciPy's arrays with a format."""
        self.state.restore()
        blocks = self.plan.start(self.call, state=self.state, watch=watch).blocks()
        if self.state.has_random:
            raise InvalidArgumentError(
                f"{self.name} draws random numbers, so two runs differ by more than the parameters. Read the numbers "
                "from a field that is filled before the check."
            )
        return blocks

    def outputs(self, param: Target | None = None, index: tuple[int, ...] = (), value: float = 0.0) -> list[np.ndarray]:
        """The outputs after a plain run, in which one entry of a parameter has another value."""
        self.state.restore()
        args = list(self.args)
        if param is not None:
            values = self.values(param)
            values[index] = value
            if param.variable is not None:
                with self._set(param.variable, with_entries(param.variable.read(), values)):
                    return self.outputs()
            if self.call.is_value(param):
                like = args[param.position]
                given = float(values) if values.ndim == 0 else backend.ti.Matrix(values.tolist())
                args[param.position] = with_entries(like, values) if self.call.kernel is None else given
            else:
                backend.put_back(self.call.value(param), values)
        return self.results(tuple(args))

    def results(self, args: tuple[object, ...]) -> list[np.ndarray]:
        """The outputs after a plain run."""
        returned = self.call.run(args)
        targets = self.output_targets
        return [_as_array(returned) if t.kind == "return" else self.values(t).astype(np.float64) for t in targets]

    @contextlib.contextmanager
    def _set(self, variable: Variable, value: object) -> Generator[None, None, None]:
        """Within the context, a Python number has another value, and kernels are compiled for it."""
        fused = self.plan.prepared.fused.values()
        same = [variable, *(v for f in fused for v in f.facts.namesakes.get(variable.key, ()))]
        before = [v.read() for v in same]
        try:
            with backend.compiled_again():
                for v in same:
                    v.write(value)
                yield
        except (AttributeError, TypeError) as error:
            raise InvalidArgumentError(
                f"The Python number {variable.name!r} cannot be set ({error}), as central differences need it."
            ) from error
        finally:
            for v, old in zip(same, before, strict=True):
                if v.read() is not old:
                    v.write(old)

    def values(self, target: Target) -> np.ndarray:
        """A copy of the current value of a parameter or output."""
        if target.variable is not None:
            value = target.variable.read()
            dtype = np.dtype(backend.to_numpy_type(backend.default_type(float)))
            return np.array(backend.as_numpy(value), dtype)
        if self.call.is_value(target):
            kind = backend.default_type(float) if self.call.kernel is None else self.call.annotation(target)
            dtype = backend.numpy_dtype_of_annotation(kind)
            return np.array(_as_array(self.call.args[target.position]), dtype)
        return backend.as_numpy(backend.copy_of(self.call.value(target)))

    def finish(self) -> None:
        """Put everything back."""
        self.state.has_random = False
        self.state.restore()


def _as_array(value: object) -> np.ndarray:
    """A number, vector or matrix, or the result of a kernel, in float64."""
    if isinstance(value, (list, tuple)) and any(hasattr(v, "to_numpy") for v in value):
        return np.concatenate([_as_array(v).reshape(-1) for v in value])
    return np.array(backend.as_numpy(value), np.float64)


# --- the comparison ---------------------------------------------------------------------------------------------------


def _compare(
    run: CheckedRun, way: Comparison, of: str
) -> tuple[list[BlockComparison], tuple[list[str], list[str]], float]:
    J = run.jacobian()
    centre = run.outputs()
    dtypes = [*(run.values(param).dtype for param in run.params), *(row[0].dtype for row in J)]
    precision = max(float(np.finfo(dtype).eps) for dtype in dtypes)
    usual = _RTOL[next(s for s in (8, 4, 2) if np.finfo(f"f{s}").eps >= precision)]
    tolerance = usual if way.rtol is None else way.rtol
    steps = precision ** (1 / 3) if way.step is None else way.step
    blocks: dict[tuple[int, int], BlockComparison] = {}
    chosen = [list(_chosen(run.values(param).shape, way.most_entries)) for param in run.params]
    entries = sum(map(len, chosen))
    with progress_bar(way.progress if entries > _FEW else False, f"Differences, {run.name}", entries) as advance:
        for m, param in enumerate(run.params):
            run.state.restore()
            values = run.values(param)
            columns = [ComparedColumns(row[m], y, values.shape) for row, y in zip(J, centre, strict=True)]
            for index in chosen[m]:
                entry = MovedEntry(partial(run.outputs, param, index), values, index, steps, precision)
                for n, column in enumerate(columns):
                    column.compare(entry, n, tolerance, way.atol)
                advance(1)
            for n, column in enumerate(columns):
                blocks[n, m] = column.block(run.names[n], str(param.name))
    ordered = [blocks[n, m] for n in range(len(run.names)) for m in range(len(run.params))]
    return ordered, _wrong(run, _not_finite(run, J, centre, of)), tolerance


def _chosen(shape: tuple[int, ...], most: int | None) -> Iterator[tuple[int, ...]]:
    total = math.prod(shape)
    if most is None or total <= most:
        yield from np.ndindex(shape)
    else:
        for flat in sorted(np.random.default_rng(0).choice(total, most, replace=False)):
            yield tuple(int(i) for i in np.unravel_index(flat, shape))


# --- values that are not finite ---------------------------------------------------------------------------------------


def _not_finite(run: CheckedRun, J: Sequence[Sequence[object]], centre: list[np.ndarray], of: str) -> list[str]:
    run.state.restore()
    result = [f"{param.name} holds {text}." for param in run.params for text in _first(run.values(param))]
    for name, y in zip(run.names, centre, strict=True):
        result += [f"{name} is {text} after a plain run." for text in _first(y)]
    for name, row, y in zip(run.names, J, centre, strict=True):
        for param, block in zip(run.params, row, strict=True):
            shape = (y.shape, run.values(param).shape)
            result += [f"{of} of {name} with respect to {param.name} is {text}." for text in _first(block, *shape)]
    return result


def _wrong(run: CheckedRun, not_finite: list[str]) -> tuple[list[str], list[str]]:
    """The values that are not finite and where they arose, and the lines with indices that are outside."""
    has_checks = any(fused.facts.report.accesses for fused in run.plan.prepared.fused.values())
    if not (not_finite or has_checks):
        return [], []
    watch = Watch()
    try:
        run.jacobian(watch)
        return [*not_finite, *(watch.findings() if not_finite else ())], watch.outside()
    finally:
        watch.close()


def _first(values: Any, *shape: tuple[int, ...]) -> Iterator[str]:
    """The first entry that is not finite, and how many there are; for J, with the shapes of output and parameter."""
    data = values.ravel() if isinstance(values, np.ndarray) else values.data
    wrong = np.flatnonzero(~np.isfinite(data))
    if not wrong.size:
        return
    at = int(wrong[0])
    if isinstance(values, np.ndarray):
        places = np.unravel_index(at, sum(shape, ()) or values.shape)
    else:
        row = int(np.searchsorted(values.indptr, at, side="right")) - 1
        places = (*np.unravel_index(row, shape[0]), *np.unravel_index(int(values.indices[at]), shape[1]))
    index = tuple(int(i) for i in places)
    outer = len(shape[0]) if shape else 0
    place = f"{index_text(index[:outer])}, {index_text(index[outer:])}" if shape else index_text(index)
    more = f" ({len(wrong)} entries in all)" if len(wrong) > 1 else ""
    yield f"{data[at]} at {place}{more}"


# check_hessian: the Hessian compared with central differences of the gradient.


@with_short_traceback
def check_hessian(
    kernel: Callable[..., object],
    params: object,
    energy: object = None,
    *,
    args: tuple[object, ...] = (),
    step: float | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    most_entries: int | None = 200,
    raise_on_failure: bool = False,
    progress: bool | None = None,
    format: Format | None = None,
) -> JacobianReport:
    """Compare ``hessian(kernel, params, energy, args=args)`` with central differences of its gradient.

    The gradient is that of ``value_and_gradient``, which ``check_jacobian(kernel, params, energy)`` compares with
    differences of the energy.  It is computed twice for each checked entry of a parameter.  Afterwards, every field and
    array that the kernel changes is restored.

    Args and errors are those of ``check_jacobian`` and ``hessian``.

    Returns:
        The report, see ``check_jacobian``; its outputs are the gradients with respect to each parameter.

    Example:
        >>> import taichi as ti
        >>> from taichi_ext import check_hessian
        >>> ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
        >>> x, energy = ti.field(ti.f64, shape=2), ti.field(ti.f64, shape=())
        >>> x[0], x[1] = 1.0, 2.0
        >>> @ti.kernel
        ... def rosenbrock():
        ...     energy[None] += (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2
        >>> print(check_hessian(rosenbrock, x, energy))  # doctest: +ELLIPSIS
        H of rosenbrock agrees with central differences (relative tolerance 1e-06)
          output ...
          gradient with respect to params (field x of shape (2,))  params (field x of shape (2,))  4 of 4 ...
    """
    way = Comparison(step, rtol, atol, most_entries, progress, raise_on_failure)
    plan, call = prepared_form(kernel, params, energy, args, checked_options(format=format), "hessian")
    gradient, _ = prepared_form(kernel, params, energy, args, checked_options(), "gradient")
    return report_of(_GradientRun(plan, gradient, call), way, "H")


class _GradientRun(CheckedRun):
    """The kernel, its parameters, and the gradient with respect to each of them in place of outputs."""

    def __init__(self, plan: Plan, gradient: Plan, call: KernelCall) -> None:
        super().__init__(plan, call)
        self._gradient = gradient
        self.names = [f"gradient with respect to {param.name}" for param in self.params]

    def results(self, args: tuple[object, ...]) -> list[np.ndarray]:
        """The gradient with respect to each parameter."""
        evaluation = self._gradient.start(self.call.with_args(args))
        (blocks,) = evaluation.blocks()
        shapes = evaluation.parameter_shapes()
        return [np.reshape(np.asarray(b, np.float64), s) for s, b in zip(shapes, blocks, strict=True)]
