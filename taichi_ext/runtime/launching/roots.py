"""Solvers of implicit functions in a pipeline: their unknowns get the tangents that their equation gives.

If ``residual(x, p) = 0`` defines x, then ``dx = -(d residual / d x)^-1 (d residual / d p) dp`` (the implicit function
theorem).  ``(d residual / d p) dp`` are the tangents of the residuals in a run of ``residual`` in which the unknowns
have none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.analysis.changes import written_containers
from taichi_ext.errors import InvalidArgumentError, UnsupportedError
from taichi_ext.labels import Label
from taichi_ext.launches import container_key
from taichi_ext.program.keys import Key
from taichi_ext.record import record
from taichi_ext.runtime.launching.session import Session
from taichi_ext.runtime.memory.shadows import FieldTable, view_of
from taichi_ext.runtime.python.warning import warn_at_user


@dataclass(frozen=True)
class Root:
    """A call of the solver of an implicit function.

    Attributes:
        name: of the solver.
        solve: runs it.
        residual: computes the residuals.
        unknowns: the fields and arrays that it solves for.
        residuals: the fields and arrays that are zero at the solution.
        step: at the solution, takes values of the residuals and columns of right-hand sides b, and gives the solution
            of ``(d residual / d x) dx = b`` for each; it warns if the residuals are far from zero.
    """

    name: str
    solve: Callable[[], object]
    residual: Callable[[], object]
    unknowns: Sequence[Any]
    residuals: Sequence[Any]
    step: Callable[[np.ndarray, np.ndarray], np.ndarray]

    def refuses(self, changed: Label | str) -> Callable[[], None]:
        """An error for residuals that read what the solver changes besides its unknowns."""

        def refuse() -> None:
            raise InvalidArgumentError(
                f"The residual of {self.name} reads {changed}, which the solver changes, too, and which is not among "
                "the unknowns. Add it to unknowns, or compute it in the residual."
            )

        return refuse

    def warns(self, changed: Label | str) -> Callable[[], None]:
        """A warning for a kernel that reads what a solver has changed besides its unknowns."""
        return lambda: warn_at_user(
            f"{changed} was changed by {self.name}, which solves for other fields, and is read by a kernel: it counts "
            "as a constant. Add it to unknowns, or compute it from the unknowns after the solver."
        )


class Solving:
    """Follows a solver: its launches and stores are made as they are, and clear the tangents of what they change.

    Args:
        table: the fields of the pipeline.
        save: saves a field or array before it is changed.
        clear: takes a field or array that has been changed.
        host_write: notes a store of Python, see ``Pipeline``.
    """

    runs_plainly = True  # so that solvers of this package can run in it

    def __init__(
        self,
        table: FieldTable,
        save: Callable[[Any], None],
        clear: Callable[[Any], None],
        host_write: Callable[[Any, object, object], None],
    ) -> None:
        self._table, self._save, self._clear, self.host_write = table, save, clear, host_write

    def launch(self, kernel: backend.Kernel, args: tuple[object, ...]) -> Any:
        """Launch a kernel without tangents."""
        with backend.exclusive:
            changed = _changed_by(kernel, args, self._table)
            suspects = self._with_numbers(kernel, args) if changed is None else [(obj, None) for obj in changed]
            for obj, _ in suspects:
                self._save(obj)
            with backend.suspend_following():
                result = kernel(*args)
                found = [obj for obj, before in suspects if before is None or _differs(obj, before)]
            for obj in found:
                self._clear(obj)
            return result

    def _with_numbers(self, kernel: backend.Kernel, args: tuple[Any, ...]) -> list[tuple[Any, Any]]:
        """The fields and arrays that a kernel which cannot be recorded may change, with their numbers."""
        given = (v for v in backend.leaf_values(kernel, args) if backend.is_array(v) or isinstance(v, backend.Field))
        known = (info.obj for info in self._table.infos.values() if not backend.ended_problem(info.obj))
        with backend.suspend_following():
            return [(obj, np.array(backend.as_numpy(obj))) for obj in (*given, *known)]

    def before_host_write(self, obj: object, value: object) -> None:
        """Python is about to store to a field or array."""
        self._save(obj)

    def host_read(self, obj: object, index: object, value: object) -> object:
        """The value that Python reads: nothing in a solver is followed."""
        return value

    def note_field(self, field: object) -> None:
        """Python accesses entries of a field."""

    def with_tangents(self, entries: object) -> None:
        """The entries of a vector with tangents: there are none."""


def _changed_by(kernel: backend.Kernel, args: tuple[Any, ...], table: FieldTable) -> list[object] | None:
    """The fields and arrays that a launch changes; None if the kernel cannot be recorded."""
    if backend.is_reading_kernel(kernel):
        return []
    name = id(kernel), backend.argument_features(kernel, args)
    if name not in table.changes:
        try:
            written = written_containers(record(kernel, args).body)
        except UnsupportedError:
            written = None
        table.changes[name] = (
            kernel,
            None if written is None else [c.name if c.is_argument else c.object for c in written],
        )
    _, written = table.changes[name]
    if written is None:
        return None
    values = backend.leaf_values(kernel, args)
    positions = {leaf.name: leaf.position for leaf in backend.leaf_arguments(kernel)}
    return [values[positions[x]] if isinstance(x, str) else x for x in written]


def _differs(obj: Any, before: np.ndarray) -> bool:
    return not np.array_equal(backend.as_numpy(obj), before, equal_nan=True)


def part_of(obj: Any, session: Session) -> tuple[Key, Label | str] | None:
    """The key and name of a field, component or array that can have tangents in a session."""
    if backend.is_array(obj):
        view = view_of(obj)
        return None if session.tangents.arrays.regions.find(view) is None else (view, "an array")
    if session.table.field(obj) is None:  # of integers
        return None
    part = session.table.part(obj)
    return part.key, part.name


class Rows:
    """The tangents of a list of fields and arrays as one matrix, a row for each number."""

    def __init__(self, objects: Sequence[Any], session: Session) -> None:
        self._tangents = session.tangents
        self.keys = [part[0] for part in (part_of(obj, session) for obj in objects) if part is not None]
        self.containers = set(map(container_key, self.keys))
        self._sizes = [backend.as_numpy(obj).size for obj in objects]

    def read(self) -> np.ndarray | None:
        """The tangents; None if all are zero."""
        tangents, both = self._tangents, list(zip(self.keys, self._sizes, strict=True))
        carries = [tangents.carries(container_key(key)) for key in self.keys]
        if not any(carries):
            return None
        found = [np.zeros((size, tangents.columns.count)) for _, size in both]
        for n, (key, _) in enumerate(both):
            if carries[n]:
                tangents.shadow(container_key(key))
                found[n][...] = tangents.values(key)
        return np.concatenate(found)

    def write(self, rows: np.ndarray) -> None:
        """Replace the tangents."""
        for key, part in zip(self.keys, np.split(rows, np.cumsum(self._sizes)[:-1]), strict=True):
            self._tangents.replace(key, part)
