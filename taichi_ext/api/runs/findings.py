"""Merge observations of the runs of one call into warnings about its parameters and outputs."""

from __future__ import annotations

import linecache
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.analysis.cuts import Cut, Paths, cuts_between, reaches
from taichi_ext.api.inputs.arguments import KernelCall, Target
from taichi_ext.api.inputs.results import Layout, Placed
from taichi_ext.api.runs.replay import Prepared
from taichi_ext.boundary.registry import registry
from taichi_ext.errors import InvalidArgumentError
from taichi_ext.launches import JacobianKernel
from taichi_ext.program.keys import Key
from taichi_ext.record.variables import python_reader
from taichi_ext.runtime.launching.session import Session
from taichi_ext.runtime.memory.shadows import FieldTable
from taichi_ext.runtime.python.dual_numbers import ASKING, warn_at, warn_at_user
from taichi_ext.runtime.sparse.rows import ContainerRows


def check_accesses(call: KernelCall, layout: Layout, read: set[Key], written: set[Key]) -> None:
    """Raise where a parameter is not read, or an output not written."""
    where = f"in {call.name}" if call.kernel is not None else f"by the kernels that {call.name} launched"
    params = [(p.target, p.container) for p in layout.params]
    for target, key in params:
        if target.variable is not None and target.variable.key not in read:
            raise InvalidArgumentError(
                f"{target.name} is not read {where}, so nothing depends on it.{call.known_numbers} "
                "Values that Python computed from a number before do not depend on it. To differentiate with respect "
                "to a number that Python passes to kernels, make it an argument of the pipeline and name that."
            )
        if key not in read and key not in written:
            is_array = call.kernel is None and target.variable is None and backend.is_array(call.value(target))
            why = "and what Python computes from an array has no derivative. Read it in a kernel."
            raise InvalidArgumentError(
                f"{target.name} is not read {where}, {why if is_array else 'so nothing depends on it.'}"
            )
    for output in layout.outputs:
        if output.container not in written and output.container not in {key for _, key in params}:
            raise InvalidArgumentError(f"{output.target.name} is not written {where}.")


def check_run(
    prepared: Prepared, call: KernelCall, layout: Layout, accessed: tuple[set[Key], set[Key]], *, has_launched: bool
) -> None:
    """Check what a run has read and written, if it is the first one, and that it has launched a kernel."""
    if prepared.rules_seen != registry.version:
        prepared.rules_seen = registry.version
        for message in registry.warnings():
            warn_at_user(message)
    if call.kernel is None and not has_launched:
        own = {param.container for param in layout.params}  # their J is known without a launch
        if any(o.container not in own for o in layout.outputs):
            raise InvalidArgumentError(f"{call.name} launched no kernel, so there is nothing to differentiate.")
    if prepared.is_checked:
        return
    check_accesses(call, layout, *accessed)
    if call.kernel is None:
        warn_of_python_readers([p.target for p in layout.params], call.function)
    prepared.is_checked = True


class RunLog:
    """Observations of the runs of one call, of some columns each; they hold for J if all runs agree.

    Args:
        of_zeros: whether to warn of an output whose Jacobian is zero; a gradient may be zero.
        is_first: whether it is the first call of a prepared form.

    Attributes:
        has_begun: whether there has been a run since everything was put back.
        has_parts: whether columns are computed in several runs.
    """

    def __init__(self, *, of_zeros: bool, is_first: bool) -> None:
        self.has_begun = False
        self._of_zeros, self._is_first = of_zeros, is_first
        self._layout: Layout | None = None  # of the first call, where paths are cut
        self.begin()

    def begin(self) -> None:
        """Start the first run of a call; it may have started before, with more columns per run."""
        self.has_parts = False
        self._kept: set[Key] = set()  # parameters that some run has read
        self._overwritten: dict[Key, object] = {}  # names of parameters that a run has overwritten before any read
        self._zero: dict[int, Target] = {}  # outputs that may depend on the parameters, all zero so far
        self._python_cuts: dict[tuple[str, str, int], set[int]] = {}  # columns by operation, file and line
        self._is_due = self._is_first  # whether the next run shows what does not depend on the columns

    def note_python_cuts(self, cuts: Mapping[tuple[str, str, int], Any], first: int) -> None:
        """Note where Python has taken something of numbers that has no derivative, in a run of columns from one on."""
        for place, columns in cuts.items():
            if isinstance(columns, np.ndarray):  # they are known
                self._python_cuts.setdefault(place, set()).update((first + np.flatnonzero(columns)).tolist())

    def note_python_cuts_along(self, other: RunLog, directions: np.ndarray) -> None:
        """Note what the log of a run with tangents along directions has found."""
        for place, cuts in other._python_cuts.items():
            self.note_python_cuts({place: directions[:, list(cuts)].any(1)}, 0)

    def note_run(self, session: Session, layout: Layout, kernels: Collection[JacobianKernel]) -> None:
        """Note which parameters a run has overwritten before anything read them.

        After the first one warn of indices, and of outputs that depend on no parameter, and watch the others.
        """
        names, overwritten = session.accesses.params, session.accesses.overwritten
        self._kept |= names.keys() - overwritten
        self._overwritten |= {key: names[key] for key in overwritten}
        if not self._is_due:
            return
        self._is_due = False
        warn_of_indices(kernels)
        for n, (output, placed) in enumerate(zip(layout.outputs, session.request.outputs, strict=True)):
            if self._of_zeros and 0 not in output.shape and session.tangents.is_fresh(placed.key):
                warn_at_user(f"{output.target.name} does not depend on any of the params: its Jacobian is zero.")
            elif 0 not in output.shape:
                self._zero[n] = output.target
        self._watch_cuts(layout, kernels)

    def _watch_cuts(self, layout: Layout, kernels: Collection[JacobianKernel]) -> None:
        """Warn after the last run where J is zero for a parameter, or a component, since a path from it is cut."""
        all_facts = [fused.facts for fused in kernels]
        self._reports = [facts.report for facts in all_facts]
        params = {param.container for param in layout.params}
        is_cut = any(facts.report.has_cuts or facts.written & params for facts in all_facts)
        if self._of_zeros and (is_cut or self._python_cuts or self.has_parts):
            self._layout, self._nonzero = layout, [np.zeros(layout.count, bool) for _ in layout.outputs]

    def _warn_of_cuts(self) -> None:
        assert self._layout is not None
        paths = [] if all(map(np.all, self._nonzero)) else [report.paths() for report in self._reports]
        for output, nonzero in zip(self._layout.outputs, self._nonzero, strict=True):
            for param in (p for p in self._layout.params if p.container not in self._overwritten):
                zeros = np.flatnonzero(~nonzero[param.columns].reshape(-1, param.element).any(0))
                by_param: dict[int, list[Cut | str]] = {
                    int(k): [
                        *cuts_between(paths, param.container, int(k), output.container),
                        *self._in_python(param, k),
                    ]
                    for k in zeros
                }
                cuts = list(dict.fromkeys(cut for cuts in by_param.values() for cut in cuts))
                if cuts:
                    which = [str(k) for k, cuts in by_param.items() if cuts]
                    part = "" if len(which) == param.element else f" (components {', '.join(which)})"
                    warn_at_user(
                        f"The Jacobian of {output.target.name} with respect to {param.target.name}{part} is zero: "
                        f"paths end at {'; '.join(map(str, cuts))}, where the derivative is 0."
                    )

    def _in_python(self, param: Placed, component: Any) -> Iterator[str]:
        """The cuts in Python of a component of a parameter, of which an output's columns are zero.

        Comparisons and formats are often those of a log: they count where no output depends on the component.
        """
        columns = range(param.first + component, param.first + param.size, param.element)
        is_used = any(nonzero[columns].any() for nonzero in self._nonzero)
        for (name, file, line), known in self._python_cuts.items():
            if not known.isdisjoint(columns) and not (is_used and name in ASKING):
                yield f"{file}:{line} (`{linecache.getline(file, line).strip()}`), in {name}"

    def note_columns(self, outputs: list[Any], first: int, *, is_last: bool) -> None:
        """Note columns of J that a run has computed, output by output; warn after the last run."""
        if self._layout is not None:
            for nonzero, output in zip(self._nonzero, outputs, strict=True):
                if not isinstance(output, ContainerRows):
                    columns = np.asarray(output != 0).any(0)
                    nonzero[first : first + columns.size] |= columns
                    continue
                for param in self._layout.params:  # a component is a part of the columns of its field
                    known = output.columns(param.container, param.size) if param.key == param.container else True
                    nonzero[param.columns] |= known
            if is_last:
                self._warn_of_cuts()
                self._layout = None
        self._zero = {n: target for n, target in self._zero.items() if not outputs[n].any()}
        if not is_last:
            return
        for name in (name for key, name in self._overwritten.items() if key not in self._kept):
            warn_at_user(
                f"{name} is a parameter that is overwritten before it is read: nothing depends on its earlier value."
            )
        if not self._overwritten and self._of_zeros:
            for target in self._zero.values():
                warn_at_user(f"{target.name} does not depend on the params as they are now: its Jacobian is zero.")


def warn_of_alerts(
    alerts: Iterable[backend.Alert], table: FieldTable, layout: Layout, paths: list[Paths] | None
) -> bool:
    """Warn of what kernels have said, if an output is computed from the field that they have stored to.

    ``paths`` are those of the kernels; None: an output is known to be concerned.

    Returns:
        Whether a field that is no output, or an array, was computed without a derivative.
    """
    is_undefined, outputs = False, {output.container for output in layout.outputs}
    for alert in alerts:
        field, place = alert.field and alert.field(), alert.place
        info = None if field is None else table.field(field)
        if info is None or paths is None or any(reaches(paths, info.key, output) for output in outputs):
            text = "" if place is None else f"{place.file}:{place.line} (`{place.text.strip()}`): "
            warn_at(text + alert.what, place and (place.file, place.line))
            is_kept = alert.field is not None and (info is None or info.key not in outputs)
            is_undefined |= alert.is_undefined and is_kept
    return is_undefined


def warn_of_indices(kernels: Iterable[JacobianKernel]) -> None:
    """Warn of indices that are known to be out of range of their container or local."""
    for fused in kernels:
        for access in fused.facts.report.accesses:
            if access.number is not None:
                warn_at_user(access.warning())


def warn_of_python_readers(params: list[Target], function: object) -> None:
    """Warn of Python numbers that are parameters and are also read by the Python code of a pipeline."""
    for target in params:
        reader = None if target.variable is None else python_reader(target.variable, function)
        if reader is not None:
            warn_at_user(
                f"{target.name} is read by the Python code of {reader.__qualname__}, too: values that it stores, or "
                "passes to a kernel, count as constants. Read the number in the kernel."
            )
