"""Solvers of implicit functions in a pipeline: their unknowns get the tangents that their equation gives.

If ``residual(x, p) = 0`` defines x, then ``dx = -(d residual / d x)^-1 (d residual / d p) dp`` (the implicit function
theorem).  ``(d residual / d p) dp`` are the tangents of the residuals in a run of ``residual`` in which the unknowns
have none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
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
from taichi_ext.runtime.launching.session import Session, is_among
from taichi_ext.runtime.memory.shadows import FieldTable, view_of
from taichi_ext.runtime.python.dual_numbers import warn_at_user


@dataclass(frozen=True)
class Root:
    """A call of the solver of an implicit function.

    Attributes:
        name: of the solver.
        solver: runs it.
        residual: computes the residuals.
        unknowns: the fields and arrays that it solves for.
        residuals: the fields and arrays that are zero at the solution.
        arrays: NumPy arrays and tensors that ``residual`` may read.
        step: at the solution, takes values of the residuals and columns of right-hand sides b, and gives the solution
            of ``(d residual / d x) dx = b`` for each; it warns if the residuals are far from zero.
    """

    name: str
    solver: Callable[[], object]
    residual: Callable[[], object]
    unknowns: Sequence[Any]
    residuals: Sequence[Any]
    arrays: Sequence[Any]
    step: Callable[..., np.ndarray]

    def solve(self, solving: Solving) -> Any:
        """Run the solver."""
        before = [(array, np.array(backend.as_numpy(array))) for array in self.arrays]
        with backend.follow_by(solving) if backend.pipeline_follower() else backend.follow(solving):
            result = self.solver()
        for array, numbers in before:
            if _differs(array, numbers):
                solving.note(array)
        return result

    def values(self, table: FieldTable, written: Set[object]) -> np.ndarray:
        """The residuals; raises if one of the fields and arrays was not written."""
        for obj in self.residuals:
            key, name = part_of(obj, table)
            if not is_among(container_key(key), written):
                raise InvalidArgumentError(f"The residual of {self.name} does not write {name}, one of its residuals.")
        with backend.suspend_following():
            return np.concatenate([np.array(backend.as_numpy(obj)).reshape(-1) for obj in self.residuals])

    def refuse(self, changed: Label | str) -> None:
        """Raise as the residual reads what the solver changes besides its unknowns."""
        raise InvalidArgumentError(
            f"The residual of {self.name} reads {changed}, which the solver changes, too, and which is not among the "
            "unknowns. Add it to unknowns, or compute it in the residual."
        )

    def warn(self, changed: Label | str) -> None:
        """Warn as something after the solver reads what that has changed besides its unknowns."""
        warn_at_user(
            f"{changed} was changed by {self.name}, which solves for other fields, and is read after it: it counts as "
            "a constant. Add it to unknowns, or compute it from the unknowns after the solver."
        )


class Solving(backend.Follower):
    """Follows a solver: its launches and stores are made as they are.

    Args:
        table: the fields of the pipeline.
        save: saves a field or array before it is changed.
        clear: takes a field or array that has changed, or an array or entry that Python has stored to with an index.

    Attributes:
        changed: the names of the fields and arrays that it has changed, by key.
    """

    runs_plainly = True  # so that solvers of this package can run in it

    def __init__(self, table: FieldTable, save: Callable[[Any], None], clear: Callable[..., object]) -> None:
        self._table, self._save, self._clear = table, save, clear
        self.changed: dict[Key, Label | str] = {}
        self._noted: set[int] = set()  # kernels of numbers alone, which change the same in each launch

    def note(self, obj: Any, *index: object) -> None:
        """A field, array or entry has changed."""
        if (found := part_of(obj, self._table)) is not None:
            self.changed[container_key(found[0])] = found[1]
            self._clear(obj, *index)

    def launch(self, kernel: backend.Kernel, args: tuple[object, ...]) -> Any:
        with backend.exclusive:
            if id(kernel) in self._noted:
                with backend.suspend_following():
                    return kernel(*args)
            changed = _changed_by(kernel, args, self._table)
            suspects = self._with_numbers(kernel, args) if changed is None else [(obj, None) for obj in changed]
            for obj, _ in suspects:
                self._save(obj)
            with backend.suspend_following():
                result = kernel(*args)
                found = [obj for obj, before in suspects if before is None or _differs(obj, before)]
            for obj in found:
                self.note(obj)
            if changed is not None and backend.takes_numbers_alone(kernel):
                self._noted.add(id(kernel))
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

    def host_write(self, obj: Any, index: object, value: object) -> None:
        """Python has stored to an entry of a field, or to an array."""
        self.note(obj, index)

    def note_field(self, field: Any) -> None:
        """Python accesses entries of a field, perhaps before a kernel does."""
        for part in backend.leaf_fields(field):
            self._table.field(part)


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


def part_of(obj: Any, table: FieldTable) -> Any:
    """The key and name of an array, field or component, or of the field of an entry; None if they are of integers."""
    if backend.is_array(obj):
        return (view_of(obj), "an array") if backend.is_real(backend.outer_array_dtype(obj)) else None
    if isinstance(obj, backend.FieldEntry):
        found = table.by_entry(obj)
        return None if found is None else (found[0].key, found[0].name)
    return None if table.field(obj) is None else (table.part(obj).key, table.part(obj).name)


class TangentMatrix:
    """The tangents of a list of fields and arrays as one matrix, a row for each number."""

    def __init__(self, objects: Sequence[Any], session: Session) -> None:
        self._tangents, self.keys = session.tangents, list[Any]()
        for obj in objects:
            self.keys.append(part_of(obj, session.table)[0])
            if backend.is_array(obj):
                session.tangents.arrays.include(obj, self.keys[-1])
        self.containers = set(map(container_key, self.keys))
        self._sizes = [backend.as_numpy(obj).size for obj in objects]

    def read(self) -> np.ndarray | None:
        tangents, found = self._tangents, list[np.ndarray]()
        carries = [tangents.carries(container_key(key)) for key in self.keys]
        for key, size, is_active in zip(self.keys, self._sizes, carries, strict=True):
            if is_active:
                tangents.shadow(container_key(key))
            found.append(tangents.values(key) if is_active else np.zeros((size, tangents.columns.count)))
        return np.concatenate(found) if any(carries) else None

    def write(self, rows: np.ndarray) -> None:
        for key, part in zip(self.keys, np.split(rows, np.cumsum(self._sizes)[:-1]), strict=True):
            self._tangents.replace(key, part)
