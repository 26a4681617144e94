"""The tangents of one run, by the keys of containers, and the target for entries of J."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.differentiate.forms.entry_sites import DenseRowsError
from taichi_ext.errors import UnsupportedError
from taichi_ext.labels import Label
from taichi_ext.launches import (
    GRADIENT,
    ColumnBlock,
    EnergyTarget,
    JacobianKernel,
    LaunchRole,
    SparseTarget,
    container_key,
)
from taichi_ext.program.keys import RETURN, VALUES, Key
from taichi_ext.runtime.memory.array_tangents import ArrayTangents, Given
from taichi_ext.runtime.memory.first_order import FirstOrderTangents
from taichi_ext.runtime.memory.regions import Carrier, View
from taichi_ext.runtime.memory.shadows import FieldTable, FieldTangents, Shadow, TangentColumns
from taichi_ext.runtime.memory.state import State
from taichi_ext.runtime.python.dual_numbers import UNKNOWN
from taichi_ext.runtime.python.run_record import NumberSeeds, RunRecord


class PassedNumberError(DenseRowsError, UnsupportedError):
    """Python passes on a number that depends on params, in a run without rows of tangents for it."""


class DenseRows:
    """The target of a dense J: its rows are the tangents of the outputs; nothing else is written."""

    is_dense = True
    changes = 0  # number of changes of the columns

    def block(self, block: ColumnBlock) -> ColumnBlock:
        """The columns of rows of tangents, from those of J."""
        return block

    def of_launch(self, names: Mapping[Key, Key]) -> SparseTarget | None:
        """The columns and outputs of a sparse J by the keys of a launch; ``names`` are these by the keys of the run."""
        return None

    def variant(self, target: SparseTarget | None) -> object:
        """A key for this variant of a kernel, for the target of its launch."""
        return None

    def rows(self, key: Key) -> Any:
        """The rows of a container whose tangents are kept in the target; None for all others."""
        return None

    def keys(self) -> Sequence[Key]:
        """The containers whose tangents are kept in the target."""
        return ()

    def lacks(self, key: Key) -> bool:
        """Whether a container depends on params, and its tangents are not kept."""
        return False

    def check_role(self, key: Key) -> None:
        """Raise for a container that cannot have tangents in addition to those kept in the target."""

    def accept(self, fused: JacobianKernel, outer: Mapping[Key, Key], tangents: Tangents, *, is_direct: bool) -> None:
        """Called before each launch of a kernel, with the kernel's facts."""

    def array(self, fused: JacobianKernel, key: Any) -> Any:
        """An array that the kernel writes entries to."""
        raise AssertionError(key)

    def run(self, fused: JacobianKernel, save: Callable[[State], None], launch: Callable[[], object]) -> Any:
        """Launch a kernel; ``save`` saves the containers that it may change."""
        return launch()

    def collect(self, fused: JacobianKernel, outer: Mapping[Key, Key]) -> None:
        """Take the entries that a launch has written."""

    def finish(self, *, is_direct: bool, energy: Key | None) -> None:
        """Called when the run of a kernel or pipeline has ended."""


class Tangents:
    """The tangents of fields and arrays, and those that the target keeps.

    Attributes:
        fields: those of fields.
        arrays: those of arrays.
        first_order: those of the first order, in a run that gives second derivatives.
        columns: the columns of the run.
    """

    def __init__(self, request: Request, table: FieldTable, target: DenseRows) -> None:
        self.columns = TangentColumns(target.block(request.block), request.directions, request.max_memory)
        self.fields = FieldTangents(table)
        self.arrays = ArrayTangents(self.columns)
        self.first_order = FirstOrderTangents(request.energy, self.fields, self.arrays)
        self._target = target
        self._energy = request.energy
        for array in request.arrays:
            self.arrays.register(array)
        for seed in request.seeds:
            if isinstance(seed.key, View):
                self.arrays.check_separate(seed.key)
            self.carrier(seed.key).seeds[seed.key] = seed.first
        for seed in request.seeds if request.directions is not None else ():
            self.shadow(container_key(seed.key))
        for output in request.outputs if target.is_dense else ():
            self._open(container_key(output.key), output)

    def _open(self, key: Key, output: Output) -> None:
        """Make a container an output; its J is computed in ``output.place`` if that can hold it."""
        carrier = self.fields.add(key, output) if key in (RETURN, GRADIENT) else self.carrier(key)
        if carrier.shadow is None:
            place = output.place if carrier.is_whole(key) else None
            carrier.shadow = Shadow(output.name, carrier.size, self.columns.count, output.dtype, place)
            carrier.sown(self.columns)

    def carrier(self, key: Any) -> Carrier:
        """What carries the tangents of a field, component or array."""
        return self.arrays.region(key) if isinstance(key, View) else self.fields.carrier(key)

    def _is_carried(self, key: Any) -> bool:
        """Whether a field, or memory that an array has a part of, may carry tangents."""
        if isinstance(key, View):
            return any(region.is_active for region in self.arrays.regions.overlapping(key))
        carrier = self.fields.find(key)
        return carrier is not None and carrier.is_active

    @property
    def changes(self) -> int:
        """The number of changes of the set of tangents, or of whether they are zero."""
        return self.columns.changes + self._target.changes

    def shadow(self, key: Key) -> Any:
        """The tangents of a container, allocated at first use; those of a parameter start as its seeds."""
        key, rows = self.first_order.outer_key(key), self._target.rows(key)
        return self.carrier(key).sown(self.columns) if rows is None else rows

    def values(self, key: Key) -> Any:
        rows = self._target.rows(container_key(key))
        return self.carrier(key).values(key) if rows is None else rows

    def row(self, key: Key, row: int) -> tuple[Any, int | None]:
        """The tangent of an entry that Python reads, and the column that it stands for, if any."""
        if self._energy is not None or not self._target.is_dense:
            return UNKNOWN, None
        carrier = self.carrier(key)
        column, found = carrier.column(key, row), None
        if column is not None:
            found = self.columns.rows_of(column, 1)[0]
        elif carrier.shadow is not None:
            found = carrier.values(key)[row]
        return np.zeros(self.columns.count) if found is None else np.array(found, np.float64), column

    def along(self, key: View, direction: np.ndarray) -> np.ndarray | None:
        """The tangents of an array times a direction; None if it has none, NaN where they are not known."""
        if not self.carries(key):
            return None
        is_known = self._target.is_dense and not self.first_order.has(key)
        return self.arrays.along(key, direction) if is_known else np.full(key.size, np.nan)

    def store_row(self, key: Key, rows: Any, tangent: Any) -> None:
        """Set the tangents of entries that Python has stored a number with a tangent to."""
        if tangent is UNKNOWN:
            raise PassedNumberError("Python stores a number that depends on params")
        shadow = self.shadow(key)
        self.columns.changes += shadow.is_fresh
        shadow.set_rows(rows, tangent)

    def is_stored(self, key: Key) -> bool:
        return self.carrier(key).shadow is not None

    def is_fresh(self, key: Key) -> bool:
        """Whether nothing has been written to the tangents of an output."""
        rows = self._target.rows(container_key(key))
        return self.carrier(key).shadow.is_fresh if rows is None else not rows.any()

    def carries(self, key: Key) -> bool:
        """Whether an entry may carry a tangent."""
        rows = self._target.rows(key)
        is_active = (rows is not None and rows.any()) or self._is_carried(key)
        return is_active or self.first_order.has(key)

    def is_active(self, key: Key) -> bool:
        """Whether an entry may depend on params."""
        return self.carries(key) or self._target.lacks(key)

    def role(self, key: Key) -> LaunchRole:
        """The tangents of a container when a kernel starts."""
        self._target.check_role(key)
        return self.carrier(key).role(key)

    def clear(self, key: Key, rows: object) -> bool:
        """Set the tangents of some entries to zero, of an array by rows of its region; whether there were any."""
        is_active = self.carries(key)
        if is_active:
            target = self._target.rows(key)
            if target is not None or self._is_carried(key):
                self.shadow(key).clear_rows(rows)
            self.first_order.clear(key, rows)
            gradient = self._target.rows(GRADIENT) if self._energy is not None and key == self._energy.key else None
            if gradient is not None:
                gradient.clear_rows(slice(None))
        return is_active

    def rows(self, key: Key) -> Any:
        """The rows of a field, component or array in the tangents of its container."""
        return self.carrier(key).rows(key)

    def replace(self, key: Key, tangents: np.ndarray) -> None:
        """Replace the tangents of a field, component or array."""
        self.shadow(container_key(key)).set_rows(self.rows(key), tangents)
        self.columns.changes += 1

    def field_keys(self) -> list[Key]:
        return [*self.fields.names(), *self._target.keys(), *self.first_order.containers()]

    def set_numbers(self, numbers: NumberSeeds) -> None:
        """Store the tangents of the numbers that are passed to a launch, if they are rows."""
        if numbers.tangents is not None:
            self.fields.hold(VALUES, numbers.shadow(self.columns.count))

    def note_written(self, fused: JacobianKernel, keys: Sequence[Key]) -> None:
        """Note that a kernel may have written to these tangents, and to those of the first order."""
        self.columns.changes += self.first_order.note_written(fused)
        for shadow in map(self.shadow, keys):
            self.columns.changes += shadow.is_fresh
            shadow.is_fresh = False


def scratch_of(fused: JacobianKernel, key: Any, columns: TangentColumns) -> Shadow:
    """Memory for the rows of locals, kept between launches."""
    if key not in fused.memory.scratch:
        columns.spend(fused.scratch_sizes[key] * 8)
        fused.memory.scratch[key] = Shadow("rows", fused.scratch_sizes[key], 1, backend.named_type(key.dtype))
    return fused.memory.scratch[key]


def save_changed(state: State, fused: JacobianKernel, table: FieldTable, values: tuple[object, ...]) -> None:
    """Save the containers that a kernel may change; ``values`` are its leaf arguments."""
    state.has_random |= fused.facts.has_random
    fields = [table.infos[key].obj for key in fused.facts.written if key in table.infos]
    state.save_fields([*fields, *fused.facts.other_fields], fused.facts.changed_nodes)
    for value in filter(backend.is_array, values):
        state.save(value)


# The request of one run and its limits; complete before the run begins.


@dataclass(frozen=True)
class ParameterSeed:
    """A field or array that is a parameter: its entries are the columns from ``first`` on."""

    key: Key
    name: Label | str
    first: int
    size: int


@dataclass(frozen=True)
class Output:
    """A container that is an output: its number of entries, and memory for its J if that was given."""

    key: Key
    name: Label | str
    rows: int
    dtype: Any
    place: np.ndarray | None = None


@dataclass(frozen=True)
class Restart:
    """How a run can be undone, and compared with earlier runs.

    Attributes:
        state: saves the containers that the run changes.
        record: the launches and stores of a pipeline, if its columns take several runs.
        is_repeated: whether the state is restored and the run repeated afterwards.
        trace: takes the numbers that Python passes on, for a comparison with a run with other params (``Trace``).
    """

    state: State | None = None
    record: RunRecord | None = None
    is_repeated: bool = False
    trace: Any = None


@dataclass(frozen=True, kw_only=True)
class Request:
    """One run of a kernel or pipeline.

    Attributes:
        block: the columns.
        arrays: the arrays among the parameters and outputs.
        outputs: the containers whose tangents are wanted.
        directions: the tangents of the parameters, a row for each entry, if they are not the columns of J.
        numbers: arguments and Python numbers that are parameters.
        wants_return: whether the returned value is an output.
        max_memory: bytes for tangents other than J.
        strategy: how tangents of locals are stored.
        watch: observer of the values that kernels compute.
        restart: see ``Restart``.
        energy: the energy to differentiate twice, by the keys of this run.
    """

    block: ColumnBlock
    seeds: tuple[ParameterSeed, ...]
    arrays: tuple[Given, ...]
    outputs: tuple[Output, ...]
    directions: np.ndarray | None = None
    numbers: NumberSeeds = field(default_factory=NumberSeeds)
    wants_return: bool = False
    max_memory: float = math.inf
    strategy: str = "auto"
    watch: Any = None
    restart: Restart = field(default_factory=Restart)
    energy: EnergyTarget | None = None

    @property
    def params(self) -> dict[Key, Label | str]:
        """The names of the fields and arrays that have columns in this run."""
        if self.directions is not None:
            return {}
        start, end = self.block.first, self.block.first + self.block.count
        return {s.key: s.name for s in self.seeds if s.first < end and s.first + s.size > start}
