"""Find numbers that Python passes on without the derivative that they have: by runs with other params.

A pipeline whose Python reads numbers that depend on the params is run again, without tangents: with the params moved
along a random direction, and as they are.  A number that is passed or stored must move as its tangent says; one that
moves without has lost its derivative on the way.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.api.inputs.arguments import KernelCall
from taichi_ext.api.inputs.results import Layout, Placed
from taichi_ext.errors import DerivativeWarning, InvalidArgumentError
from taichi_ext.launches import JacobianKernel
from taichi_ext.record.calls import definition
from taichi_ext.record.variables import with_entries
from taichi_ext.runtime.launching.trace import (
    CHANGED,
    PathChangedError,
    PlainRun,
    Trace,
    TracedRun,
    TraceEvent,
    is_host_array,
)
from taichi_ext.runtime.memory.shadows import FieldTable, numpy_dtype
from taichi_ext.runtime.memory.state import State
from taichi_ext.runtime.python.dual_numbers import warn_at
from taichi_ext.runtime.python.reached import reachable

_STEP = 0.4  # the power of the precision of numbers that the params are moved by, relative to their size
_LEAST_STEP = 1e-5  # so that numbers move that Python rounds to float32, in programs of float64, too
_SMALLER = 8.0  # the second step is smaller by this factor
_FACTORS = (1.0, 1 / _SMALLER, -1 / _SMALLER)  # until a run goes the same way: at a jump, one side does
_CURVATURE = 0.02  # how far moves may differ from the tangents, relative to them
_ROUNDINGS = 32.0  # of a number, that are no move
_ROUNDING = 1e-5  # relative difference between runs of parallel sums, and of numbers computed from them
_MOST_MOVED = 256  # entries of a field whose memory is not dense
_LAUNCHING = (ast.Expr, ast.For, ast.Pass, ast.Return, ast.Call, ast.Name, ast.Attribute, ast.Constant)
_PLAIN_ATTRIBUTES = (types.FunctionType, staticmethod, classmethod, types.MemberDescriptorType)
_TRACEBACK = re.compile(r"Traceback \(most recent call last\):\n(?: .*\n)*")  # of Taichi, within its errors
_DEEPEST = 8  # calls in calls, of a function that only launches kernels
_ADVICE = (
    "Compute it in a kernel, or from numbers such as y[0] with Python's operators and functions of NumPy and math. "
    "stop_gradient(y[0]) says that a constant is meant."
)
_LOST = "{} depends on the params, but Python has computed it without its derivative: it counts as a constant, its "
_LOST += "tangent is lost. "
_PARTLY = "{} depends on the params in more ways than its tangent says: a part of its tangent is lost in Python. "
_DIFFERS = "{} differs from run to run (random numbers, a counter, a clock), so that it cannot be told whether it "
_DIFFERS += "depends on the params: it counts as a constant."
_OTHER_WAY = "{} comes after a choice that changes with the params, however little they move: whether it depends on "
_OTHER_WAY += "them cannot be told, and it counts as a constant."
_NOT_AGAIN = "Python reads numbers that depend on the params, and the pipeline cannot be run again to find out whether "
_NOT_AGAIN += "what it passes on depends on them ({}): it counts as a constant."


class Arbiter:
    """The arbiter of one call of a pipeline.

    Args:
        directions: of products with J, the tangents of the parameters.

    Attributes:
        trace: takes the numbers of the runs with tangents.
        is_over: whether it has judged, and the run begins again.
        python: what Python may change, before the run; None if it only launches kernels.
    """

    def __init__(self, call: KernelCall, layout: Layout, directions: np.ndarray | None) -> None:
        self.is_over = False
        self._call, self._params = call, [p for p in layout.params if p.target.variable is None]
        dtypes: list[Any] = [backend.default_type(float), *(p.dtype for p in self._params if p.dtype is not None)]
        self._precision = max(float(np.finfo(numpy_dtype(t)).eps) for t in dtypes)
        sizes = np.zeros(layout.count)  # of the steps
        for p in self._params:
            has_all = not isinstance(p.target.field, backend.Field) or backend.is_dense(p.target.field)
            sizes[p.columns] = _sizes(self._values(p).reshape(-1), has_all)
        sizes *= max(self._precision**_STEP, _LEAST_STEP)
        count = layout.count if directions is None else directions.shape[1]
        signs = np.random.default_rng(1).choice([-1.0, 1.0], count)
        along = np.random.default_rng(0).uniform(0.5, 1.0, count) * signs
        if directions is None:
            along = self._delta = along * sizes
        else:
            self._delta = directions @ along
            is_moved = (self._delta != 0) & (sizes > 0)
            factor = np.min(sizes[is_moved] / np.abs(self._delta[is_moved]), initial=np.inf)
            factor = factor if np.isfinite(factor) else 0.0
            along, self._delta = factor * along, factor * self._delta
        is_free = not only_launches(call.function, call.args)
        self.python = call.python_state() if is_free else None
        known = reachable(call.function, call.args) if is_free else frozenset[int]()
        self.trace = Trace(along, sees_arrays=is_free, known=known)
        if is_free and any(is_host_array(self._call.value(p.target)) for p in self._params):
            self.trace.note_read()  # Python may read a parameter before any kernel does

    def end(self, stores: Mapping[int, np.ndarray]) -> None:
        """Judge no more; in the runs that follow, Python stores these entries, though their numbers are the same."""
        self.trace, self.is_over = Trace(stores=stores), True

    def _values(self, p: Placed) -> np.ndarray:
        """A copy of the current value of a parameter."""
        value = self._call.value(p.target)
        if self._call.is_value(p.target):
            return np.array(value.to_numpy() if isinstance(value, backend.Matrix) else value, np.float64)
        return np.array(backend.as_numpy(backend.copy_of(value)))

    def may_find(self, *, has_all: bool) -> bool:
        """Whether there is anything to judge; ``has_all``: the run had tangents that say how all numbers move."""
        return self.trace.start is not None and (not has_all or bool(self.trace.found.events and self._delta.any()))

    def judge(
        self,
        state: State,
        kernels: Sequence[tuple[Any, JacobianKernel]],
        table: FieldTable,
        along: Callable[[], ArrayStores] | None,
    ) -> ArrayStores:
        """Compare the run with others, and warn; everything is put back as it is now.

        Args:
            state: everything that the run has changed, as it was before, Python included.
            kernels: those with tangents, by name.
            table: the fields that they use.
            along: judges a run with the tangents of any direction; None if this run has these.

        Returns:
            What Python stores to arrays that have tangents.
        """
        first, stores = self.trace, ArrayStores()
        try:
            state.check_repetition()
        except InvalidArgumentError:
            self._warn_of_all("it draws random numbers in kernels" if state.has_random else "it destroys fields")
            return stores
        now = state.as_now()

        def run(factor: float, *, is_last: bool = False) -> TracedRun:
            state.begin_again()
            trace = Trace(np.zeros(0), known=first.known, start=first.start)
            trace.begin()
            args = self._moved(state, factor)
            trace.remember(filter(is_host_array, args))
            plain = PlainRun(trace, state, kernels, table, first.facts, is_last=is_last)
            with contextlib.suppress(PathChangedError), backend.follow(plain):
                self._call.function(*args)
                trace.end(None)
            return trace.found

        try:
            if along is not None:
                state.begin_again()
                return along()
            for factor in _FACTORS:
                moved = run(factor)
                if first.found.alike(moved) == len(first.found.events):
                    break
            is_suspect = _mismatches(first.found, moved, first.found, factor, self._precision).bad.any()
            smaller = run(factor / _SMALLER) if is_suspect else moved
            last = run(0.0, is_last=True)
            self._warn(moved, smaller, last, factor)
            self._warn_of_others(moved, last)
            return _stores(first.found, moved)
        except DerivativeWarning:  # warnings are errors
            raise
        except Exception as error:  # the user's code cannot run again
            self._warn_of_all(f"{type(error).__name__}: {_TRACEBACK.sub('', str(error)).strip()}")
            return stores
        finally:
            state.undo()
            now.undo()

    def _moved(self, state: State, factor: float) -> tuple[Any, ...]:
        args = [a.detach() if backend.is_torch_tensor(a) else a for a in self._call.args]
        for p in self._params:
            is_value = self._call.is_value(p.target)
            if not (factor or is_value):
                continue
            values = self._values(p)
            move = factor * self._delta[p.columns].reshape(values.shape)
            moved = (values + move).astype(values.dtype)
            if is_value:  # real, also where a whole number is given
                args[p.target.position] = with_entries(args[p.target.position], moved)
                continue
            obj = self._call.value(p.target)
            state.save(obj)
            backend.put_back(obj, moved)  # in cells that are there
        return tuple(args)

    def move_params(self, state: State) -> None:
        """Move the parameters in memory, until ``state`` is undone."""
        if any(self._call.is_value(p.target) for p in self._params):
            raise InvalidArgumentError("Numbers that are passed by value are not moved.")
        self._moved(state, 1.0)

    def is_doubtful(self, known: ArrayStores) -> bool:
        """Whether more happens than in an earlier call, or entries that Python stored to then keep their numbers."""
        events = {event.at: event for event in self.trace.found.events}
        if len(events) > known.events:
            return True
        for n, entries in known.seen.items():
            changed = events[n].changed if n in events else None
            if changed is not None and entries[-1] < changed.size and not changed[entries].all():
                return True
        return False

    # --- the verdict

    def _warn(self, moved: TracedRun, smaller: TracedRun, last: TracedRun, factor: float) -> None:
        first, precision = self.trace.found, self._precision
        mismatches = _mismatches(first, moved, last, factor, precision)
        again = _mismatches(first, smaller, last, factor / _SMALLER, precision)
        ends, every = mismatches.ends, slice(mismatches.ends[-1])
        numbers, told, before = (np.array(part[every]) for part in (first.numbers, first.moves, last.numbers))
        known = min(ends[-1], again.ends[-1])  # numbers of runs that are alike so far
        with np.errstate(all="ignore"):
            size = np.maximum(np.abs(numbers), np.abs(before))
            differs = np.abs(numbers - before) > max(_ROUNDING, 1e3 * precision) * size
            differs &= (told == 0) & mismatches.is_judged
            # 1 for a derivative, and not for a jump
            ratio = _SMALLER * again.beyond[:known] / mismatches.beyond[:known]
        lost = np.zeros(differs.shape, bool)
        lost[:known] = mismatches.bad[:known] & again.bad[:known] & (ratio > 0.5) & (ratio < 2.0)
        due = np.searchsorted(ends, np.flatnonzero(differs | lost), side="right") - 1
        for n in np.unique(due):
            event, part = first.events[n], slice(ends[n] + first.events[n].reads, ends[n + 1])
            if event.use == CHANGED and not _is_constant(event):
                continue
            if event.use == CHANGED and event.changed is None:
                differs[part] = False  # memory that was never written may have any numbers
            if differs[part].any():
                warn_at(_DIFFERS.format(_subject(event, differs[part])), event.place)
            is_lost = lost[part] & ~differs[part]
            if is_lost.any():
                text = _PARTLY if told[part][is_lost].any() else _LOST
                warn_at(text.format(_subject(event, is_lost)) + _ADVICE, event.place)
        alike = first.alike(last)
        if alike < len(first.events):
            warn_at(_DIFFERS.format("What this line does"), first.events[alike].place)

    def _warn_of_others(self, moved: TracedRun, last: TracedRun) -> None:
        """Warn of numbers where the run with other params goes another way; constants are there, too."""
        first = self.trace.found
        alike, ends = first.alike(moved), first.ends()
        known = moved.numbers[moved.ends()[alike] :]
        for n in range(alike, first.alike(last)):
            event, own = first.events[n], slice(ends[n] + first.events[n].reads, ends[n + 1])
            others = ~np.isin(first.numbers[own], known) & (np.array(first.moves[own]) == 0)
            if others.any() and (event.use != CHANGED or _is_constant(event)):
                warn_at(_OTHER_WAY.format(_subject(event, others)), event.place)

    def _warn_of_all(self, reason: str) -> None:
        """Warn at the first line that passes a number without a tangent."""
        first = self.trace.found
        ends = first.ends()
        for n, event in enumerate(first.events):
            if event.use != CHANGED and 0.0 in first.moves[ends[n] + event.reads : ends[n + 1]]:
                warn_at(_NOT_AGAIN.format(reason), event.place)
                return


def only_launches(function: object, args: tuple[object, ...], depth: int = _DEEPEST) -> bool:
    """Whether a function does nothing but launch kernels, with arrays and numbers as they are; False if not known."""
    if isinstance(function, types.MethodType):
        function, args = function.__func__, (function.__self__, *args)
    if not depth or not isinstance(function, types.FunctionType):
        return False
    node = definition(function.__code__)
    body = [] if node is None else [ast.Expr(node.body)] if isinstance(node, ast.Lambda) else node.body
    nodes = [n for statement in body for n in ast.walk(statement)]
    if not nodes or not all(isinstance(n, (*_LAUNCHING, ast.expr_context)) for n in nodes):
        return False
    try:
        given = inspect.signature(function).bind(*args)
        given.apply_defaults()
        variables = inspect.getclosurevars(function)
    except (TypeError, ValueError):  # a wrong call; a variable that is not assigned yet
        return False
    names = {"range": range, **variables.globals, **variables.nonlocals, **given.arguments}
    counters = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    names = {name: value for name, value in names.items() if name not in counters}

    def launches(call: ast.Call) -> bool:
        callee = _stored(call.func, names)
        if callee is range or backend.primal_kernel(callee) is not None:
            return True
        return not call.keywords and only_launches(callee, tuple(_stored(a, names) for a in call.args), depth - 1)

    is_read = all(_stored(n, names) is not None for n in nodes if isinstance(n, ast.Attribute))  # no property, perhaps
    return is_read and all(launches(n) for n in nodes if isinstance(n, ast.Call))


def _stored(node: ast.expr, names: Mapping[str, object]) -> object:
    """What a name or attribute stands for; None where that takes code of the user's, or is not known."""
    if not isinstance(node, ast.Attribute):
        return names.get(node.id) if isinstance(node, ast.Name) else None
    owner = _stored(node.value, names)
    stored, looking_up = inspect.getattr_static(owner, node.attr, None), type(owner).__getattribute__
    is_plain = isinstance(stored, _PLAIN_ATTRIBUTES) or backend.is_decorated(stored)
    is_plain = is_plain or not hasattr(type(stored), "__get__")
    is_plain = is_plain and (backend.is_library(looking_up) or not backend.module_of(looking_up))
    return getattr(owner, node.attr) if is_plain and stored is not None else None


@dataclass(frozen=True)
class Mismatches:
    """How the numbers of all events of two runs, one after the other, differ from what their tangents say."""

    ends: np.ndarray  # of the numbers of the events that are alike, from the first on, after a 0
    beyond: np.ndarray  # how far each number moves beyond what its tangent says
    bad: np.ndarray  # whether that is more than rounding
    is_judged: np.ndarray  # whether it is asked for, see ``_is_judged``


def _mismatches(first: TracedRun, moved: TracedRun, last: TracedRun, factor: float, precision: float) -> Mismatches:
    """Compare the moves of numbers with what their tangents say.

    ``factor`` is how far the params were moved, relative to the direction of the tangents.
    """
    count = min(first.alike(moved), first.alike(last))
    ends = np.array(first.ends()[: count + 1])
    is_judged, is_read = np.ones(ends[-1], bool), np.zeros(ends[-1], bool)
    for n, event in enumerate(first.events[:count]):
        own = ends[n] + event.reads
        is_read[ends[n] : own] = True
        if event.is_array:
            is_judged[own : ends[n + 1]] = _is_judged(event, moved.events[n], ends[n + 1] - own)
    ours, theirs, now, moves = (
        np.array(part[: ends[-1]]) for part in (first.numbers, moved.numbers, last.numbers, first.moves)
    )
    with np.errstate(all="ignore"):
        told = factor * moves
        move = theirs - now
        size, noise = np.maximum(np.abs(theirs), np.abs(now)), np.abs(now - ours)
        bound = _ROUNDINGS * precision * size + 4 * noise
        bad = np.abs(move - told) > bound + _CURVATURE * np.maximum(np.abs(move), np.abs(told))
        bad &= is_judged & np.isfinite(told)
        inexact = np.flatnonzero(bad & is_read)
        if inexact.size:  # what Python has read moves otherwise than its tangents say: from then on, lost ones count
            end = inexact[0] + np.argmin(np.append(is_read[inexact[0] :], False))
            bad[end:] &= told[end:] == 0
        return Mismatches(ends, move - told, bad & ~is_read, is_judged)


def _is_constant(event: TraceEvent) -> bool:
    """Whether an array without tangents is given to a kernel that keeps entries which Python may have changed."""
    return event.kernel is not None and not event.is_active


def _is_judged(event: TraceEvent, moved: TraceEvent, size: int) -> Any:
    """The entries of an array that Python may have changed; a change of an array with tangents has a warning."""
    if not event.is_array or event.changed is None or moved.changed is None:
        return True
    changed = event.changed | moved.changed
    if event.is_active or not changed.any():
        return False
    return changed if changed.size == size else True


@dataclass(frozen=True)
class ArrayStores:
    """Stores of Python to arrays with tangents, as entries of an array by event."""

    seen: dict[int, np.ndarray] = field(default_factory=dict)  # all of them
    equal: dict[int, np.ndarray] = field(default_factory=dict)  # those of numbers that were there already
    events: int = 0  # how many events were compared

    def plus(self, later: ArrayStores) -> ArrayStores:
        """With those of a later call."""
        return ArrayStores({**self.seen, **later.seen}, later.equal, max(self.events, later.events))


def _stores(first: TracedRun, moved: TracedRun) -> ArrayStores:
    """The entries that change by Python where the params are as they are, or where they are moved."""
    result, alike = ArrayStores(events=len(first.events)), first.alike(moved)
    for r, m in zip(first.events[:alike], moved.events[:alike], strict=True):
        if r.is_active and r.changed is not None and m.changed is not None:
            for kind, mask in ((result.seen, m.changed | r.changed), (result.equal, m.changed & ~r.changed)):
                kind.update({r.at: np.flatnonzero(mask)} if mask.any() else {})
    return result


def _subject(event: TraceEvent, entries: np.ndarray) -> str:
    if event.is_array:
        count = np.count_nonzero(entries) if event.changed is None or event.changed.size == entries.size else "Some"
        return f"{count} entries of an array {event.use}: each"
    return f"A number {event.use}"


def _sizes(values: np.ndarray, has_all: bool) -> np.ndarray:
    """For each entry of a parameter a length to move it by; 0 for entries that may not be there, and most of these."""
    sizes = np.where(np.isfinite(values), np.abs(values.astype(np.float64)), 0.0)
    if has_all:
        typical = float(np.median(sizes[sizes > 0])) if sizes.any() else 1.0
        return np.where(np.isfinite(values), np.where(sizes > 0, sizes, typical), 0.0)
    others = np.flatnonzero(sizes)
    sizes[np.random.default_rng(0).permutation(others)[_MOST_MOVED:]] = 0.0
    return sizes
