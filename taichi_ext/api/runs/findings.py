"""Merge observations of the runs of one call into warnings about its parameters and outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from taichi_ext.api.inputs.arguments import Target
from taichi_ext.differentiate.forms.keys import Key
from taichi_ext.launches import Fused
from taichi_ext.record.variables import python_reader
from taichi_ext.runtime.launching.session import Accesses
from taichi_ext.runtime.python.run_record import RunRecord
from taichi_ext.runtime.python.warning import saying_once, warn_at_user


class RunLog:
    """Observations of the runs of one call: for some columns each, for J where all runs agree.

    Attributes:
        runs: how many there have been of single blocks of columns.
    """

    def __init__(self, *, of_zeros: bool) -> None:
        self.runs = 0
        self._of_zeros = of_zeros  # whether to warn of an output whose Jacobian is zero: a gradient may be
        self._active: dict[int, Target] = {}  # outputs that might depend on the parameters
        self._said: set[Any] = set()  # warnings
        self.begin()

    def begin(self) -> None:
        """The first run of a call begins; it may have begun before, with more columns at a time."""
        self._record: RunRecord | None = None
        self._kept: set[Key] = set()  # parameters of which a run has left some columns
        self._overwritten: dict[Key, Any] = {}  # the names of those of which a run has left none
        self._zero = dict(self._active)  # those that have not yet

    def record(self, *, is_part: bool) -> RunRecord | None:
        """A record of what the runs launch and store, if there are several."""
        if not is_part:
            return None
        self._record = self._record or RunRecord()
        self._record.begin()
        return self._record

    def saying_once(self) -> contextlib.AbstractContextManager[None]:
        """Within the context no warning of this call is repeated."""
        return saying_once(self._said)

    def note_params(self, accesses: Accesses) -> None:
        """A run had columns of parameters; of some nothing was left before anything read them."""
        names, overwritten = accesses.params, accesses.overwritten
        self._kept |= names.keys() - overwritten
        self._overwritten |= {key: names[key] for key in overwritten}

    def record_independent_outputs(self, outputs: Iterable[tuple[Target, bool]]) -> None:
        """Warn of outputs that depend on no parameter, as is said of each; from now on the others are watched."""
        for n, (target, is_fresh) in enumerate(outputs):
            if is_fresh and self._of_zeros:
                warn_at_user(f"{target.name} does not depend on any of the params: its Jacobian is zero.")
            else:
                self._active[n] = target
        self._zero = dict(self._active)

    def note_columns(self, outputs: list[Any], *, is_last: bool) -> None:
        """A run has computed these columns of J, output by output; after the last one there are warnings."""
        self._zero = {n: target for n, target in self._zero.items() if not outputs[n].any()}
        if not is_last:
            return
        for name in (name for key, name in self._overwritten.items() if key not in self._kept):
            warn_at_user(
                f"{name} is a parameter that is overwritten before it is read: nothing depends on what it held before."
            )
        if not self._overwritten and self._of_zeros:
            for target in self._zero.values():
                warn_at_user(f"{target.name} does not depend on the params as they are now: its Jacobian is zero.")


def warn_of_indices(kernels: Iterable[Fused]) -> None:
    """Warn of indices that are known to leave the container or local that they are of."""
    for fused in kernels:
        for access in fused.facts.report.accesses:
            if access.number is not None:
                warn_at_user(access.warning())


def warn_of_python_readers(params: list[Target], function: object) -> None:
    """Warn of Python numbers that are parameters, and that the Python code of a pipeline reads, too."""
    for target in params:
        reader = None if target.variable is None else python_reader(target.variable, function)
        if reader is not None:
            warn_at_user(
                f"{target.name} is read by the Python code of {reader.__qualname__}, too: what that stores, or "
                "passes to a kernel, counts as a constant. Read the number in the kernel."
            )
