"""The tangents of one run, by the keys of containers, and the target for entries of J."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.differentiate.facts.decisions import Role
from taichi_ext.differentiate.forms.entry_sites import DenseRowsError
from taichi_ext.errors import UnsupportedError
from taichi_ext.labels import Label
from taichi_ext.launches import (
    GRADIENT,
    TERMS_GRADIENT,
    ColumnBlock,
    EnergyTarget,
    FirstOrder,
    FirstOrderArray,
    GradientKey,
    JacobianKernel,
    NumberColumns,
    SparseTarget,
    container_key,
)
from taichi_ext.program.keys import RETURN, VALUES, Key, Scratch, Whole
from taichi_ext.runtime.memory.array_tangents import ArrayTangents, Given
from taichi_ext.runtime.memory.regions import Carrier, View
from taichi_ext.runtime.memory.shadows import FieldTable, Shadow, TangentColumns, numpy_dtype
from taichi_ext.runtime.memory.state import State
from taichi_ext.runtime.python.dual_numbers import UNKNOWN
from taichi_ext.runtime.python.run_record import RunRecord


class PassedNumberError(DenseRowsError, UnsupportedError):
    """Python passes on a number that depends on params, in a run without rows of tangents for it."""


class LongKernelError(DenseRowsError):
    """A kernel with tangents would have more lines than a request allows."""


def check_known(what: str, tangents: Iterable[object]) -> None:
    """Raise where Python passes on numbers whose tangents are not known."""
    if any(tangent is UNKNOWN for tangent in tangents):
        raise PassedNumberError(what)


class DenseRows:
    """The target of a dense J: its rows are the tangents of the outputs; nothing else is written.

    A run asks its target, in this order, for ``block`` and ``open``; for each launch ``of_launch``, ``accept``,
    ``array``, ``run`` and ``collect``; and for ``end_pipeline``.

    Args:
        places: for each output memory for its rows, or None.
    """

    is_dense = True
    has_dual_numbers = True  # whether tangents are rows that numbers in Python can take with them
    changes = 0  # number of changes of the columns
    of_energy: Mapping[Any, int] | None = None  # fields that an energy is computed from, where its terms are apart

    def __init__(self, places: Sequence[Any] | None = None) -> None:
        self._places = places

    def open(self, tangents: Tangents, outputs: Sequence[Placed]) -> None:
        """Make room for the rows of the outputs."""
        for output, place in zip(outputs, self._places or [None] * len(outputs), strict=True):
            tangents.open(output, place)

    def block(self, block: ColumnBlock) -> ColumnBlock:
        """The columns of rows of tangents, from those of J."""
        return block

    def of_launch(self, names: Mapping[Key, Key]) -> SparseTarget | None:
        """The columns and outputs of a sparse J by the keys of a launch; ``names`` are these of arrays of the run.

        Raises for an array that cannot have tangents in addition to those kept in the target.
        """
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

    def accept(self, fused: JacobianKernel, outer: Mapping[Key, Key], tangents: Tangents) -> None:
        """Called before each launch of a kernel, with the kernel's facts."""

    def array(self, fused: JacobianKernel, key: Any) -> Any:
        """An array that the kernel writes entries to."""
        raise AssertionError(key)

    def run(self, fused: JacobianKernel, save: Callable[[State], None], launch: Callable[[], object]) -> Any:
        """Launch a kernel; ``save`` saves the containers that it may change."""
        return launch()

    def collect(self, fused: JacobianKernel, outer: Mapping[Key, Key]) -> None:
        """Take the entries that a launch has written."""

    def number(self, tangents: Tangents, key: Key, row: int) -> tuple[Any, int | None]:
        """The tangent of an entry that Python reads, and the column that it stands for, if any."""
        carrier = tangents.carrier(key)
        column, values = carrier.column(key, row), None
        if column is not None:
            values = tangents.columns.rows_of(column, 1)[0]
        elif carrier.shadow is not None:
            values = carrier.values(key)[row]
        return np.zeros(tangents.columns.count) if values is None else np.array(values, np.float64), column

    def tells_moves(self, run: Any, cuts: Sequence[str], is_along_all: bool) -> bool:
        """Whether it is known how the numbers of a ``TracedRun`` move that has cuts by these operations.

        ``is_along_all``: whether it had tangents along all params.
        """
        return is_along_all

    def check_root(self, name: str) -> None:
        """Raise where the unknowns of the solver of an equation cannot get tangents."""

    def end_pipeline(self, energy: Key | None) -> None:
        """Called when the run of a pipeline has ended, perhaps one that computes an energy."""


class GradientRows(DenseRows):
    """The target of a dense H: the rows of a gradient, whose own tangents are those of the first order."""

    has_dual_numbers = False

    def number(self, tangents: Tangents, key: Key, row: int) -> tuple[Any, int | None]:
        return UNKNOWN, None

    def check_root(self, name: str) -> None:
        raise UnsupportedError(
            f"Second derivatives of {name}, the root of an equation, are not supported: they need those of its "
            "residual along each tangent of its unknowns. Take differences of value_and_gradient instead."
        )


class FieldCarriers(dict[Key, Carrier]):
    """What carries the tangents of fields, which are added when asked for, and of returned values and numbers."""

    def __init__(self, table: FieldTable) -> None:
        super().__init__()
        self._table = table

    def __missing__(self, key: Key) -> Carrier:
        info = self._table.infos[key]
        self[key] = carrier = Carrier(info.name, info.size, info.dtype, math.prod(info.element_shape))
        return carrier


class Tangents:
    """The tangents of fields and arrays, and those that the target keeps.

    Attributes:
        carriers: those of all but arrays, by key.
        arrays: those of arrays.
        first_order: those of the first order, in a run that gives second derivatives.
        columns: the columns of the run.
    """

    def __init__(self, request: Request, table: FieldTable, target: DenseRows) -> None:
        self.columns = TangentColumns(target.block(request.block), request.directions, request.max_memory)
        self.carriers = FieldCarriers(table)
        self.arrays = ArrayTangents(self.columns)
        self.first_order = FirstOrderTangents(request.energy, self.carriers, self.arrays)
        self._target = target
        for array in request.arrays:
            self.arrays.register(array)
        for seed in request.seeds:
            if isinstance(seed.key, View):
                self.arrays.check_separate(seed.key)
            self.carrier(seed.key).seeds[seed.key] = seed.first
        for seed in request.seeds if request.directions is not None else ():
            self.shadow(container_key(seed.key))
        target.open(self, request.outputs)

    def open(self, output: Placed, place: Any) -> None:
        """Make a container an output; its J is computed in ``place`` if that can hold it."""
        key = output.container
        if key in (RETURN, GRADIENT):
            self.carriers[key] = Carrier(output.name, output.rows, output.dtype)
        carrier = self.carrier(key)
        if carrier.shadow is None:
            size = carrier.size * self.columns.count
            is_fit = place is not None and (place.size, place.dtype) == (size, output.result_dtype)
            place = place if is_fit and carrier.is_whole(key) else None
            carrier.shadow = Shadow(output.name, carrier.size, self.columns.count, output.dtype, place)
            carrier.sown(self.columns)

    def carrier(self, key: Any) -> Carrier:
        """What carries the tangents of a field, component or array."""
        return self.arrays.region(key) if isinstance(key, View) else self.carriers[container_key(key)]

    def hold(self, key: Key, shadow: Shadow) -> None:
        """Let something that is no container carry tangents."""
        self.carriers[key] = Carrier("", shadow.shape[0], shadow.dtype, shadow=shadow)

    @property
    def shadows(self) -> dict[Key, Shadow]:
        """The tangents of all but arrays that are stored."""
        return {key: carrier.shadow for key, carrier in self.carriers.items() if carrier.shadow is not None}

    def _is_carried(self, key: Any) -> bool:
        """Whether a field, or memory that an array has a part of, may carry tangents."""
        if isinstance(key, View):
            return any(region.is_active for region in self.arrays.regions.overlapping(key))
        carrier = self.carriers.get(container_key(key))
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

    def along(self, key: View, direction: np.ndarray) -> np.ndarray | None:
        """The tangents of an array times a direction; None if it has none, NaN where they are not known."""
        if not self.carries(key):
            return None
        is_known = self._target.is_dense and not self.first_order.has(key)
        return self.arrays.along(key, direction) if is_known else np.full(key.size, np.nan)

    def store_row(self, key: Key, rows: Any, tangent: Any) -> None:
        """Set the tangents of entries that Python has stored a number with a tangent to."""
        check_known("Python stores a number that depends on params", [tangent])
        shadow = self.shadow(key)
        self.columns.changes += shadow.is_fresh
        shadow.set_rows(rows, tangent)

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

    def role(self, key: Key) -> Role:
        """The tangents of a container when a kernel starts."""
        return self.carrier(key).role(key)

    def clear(self, key: Key, rows: object) -> bool:
        """Set the tangents of some entries to zero, of an array by rows of its region; whether there were any."""
        is_active = self.carries(key)
        if is_active:
            target = self._target.rows(key)
            if target is not None or self._is_carried(key):
                self.shadow(key).clear_rows(rows)
            self.first_order.clear(key, rows)
            gradient = self._target.rows(self.first_order.key(key))
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

    def names(self) -> list[Key]:
        """The keys of all but arrays that carry tangents."""
        return [key for key, carrier in self.carriers.items() if carrier.seeds or carrier.shadow is not None]

    def field_keys(self) -> list[Key]:
        return [*self.names(), *self._target.keys(), *self.first_order.containers()]

    def set_numbers(self, numbers: NumberColumns) -> None:
        """Store the tangents of the numbers that are passed to a launch, if they are rows."""
        if numbers.tangents is not None:
            rows = len(numbers.tangents)
            shadow = Shadow("the numbers", rows, self.columns.count, backend.default_type(float))
            shadow.set_rows(slice(None), numbers.tangents)
            self.hold(VALUES, shadow)

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


def save_stored(state: State, table: FieldTable, obj: Any, fields: Callable[[], Iterable[Any]] = tuple) -> None:
    """Save what Python is about to store to: of an entry the field, if kernels use it or it is one of the given."""
    entry = table.by_entry(obj) if isinstance(obj, backend.FieldEntry) else None
    state.save(obj if entry is None else entry[0].obj, fields)


# Tangents of the first order in a run that gives second derivatives; among them the gradient of the energy.
#
# They have a column for each entry of the parameters, and carry tangents themselves, like containers, under the key
# ``GradientKey(container)``.


class FirstOrderTangents:
    """The tangents of the first order by container; there are none where no energy is differentiated twice.

    Args:
        energy: that energy, by the keys of the run.
        carriers: of tangents, and of those of tangents of the first order.
    """

    def __init__(self, energy: EnergyTarget, carriers: FieldCarriers, arrays: ArrayTangents) -> None:
        self._energy = energy
        self._carriers, self._arrays = carriers, arrays
        self._shadows: dict[GradientKey, Shadow] = {}
        self._outer: Mapping[Key, Key] = {}  # the keys of the run by those of the launch

    def gradient(self) -> np.ndarray | None:
        """The gradient; None if the energy depends on no parameter."""
        held = [self._shadows[key].to_numpy().reshape(-1) for key in (GRADIENT, TERMS_GRADIENT) if key in self._shadows]
        return sum(held[1:], held[0]) if held else None

    def containers(self) -> list[Key]:
        owners = (key.of for key in self._shadows if not isinstance(key.of, (Scratch, Whole)))
        return [self._energy.key if of == GRADIENT.of else of for of in owners]

    def has(self, container: Key) -> bool:
        return bool(self._shadows) and self.key(container) in self._shadows

    def key(self, container: Key) -> GradientKey:
        """The key of the first-order tangents of a container."""
        return GRADIENT if container == self._energy.key else GradientKey(container)

    def outer_key(self, key: Any) -> Any:
        """The key in the run for a gradient key of a launch; other keys are unchanged."""
        return GradientKey(self._outer.get(key.of, key.of)) if isinstance(key, GradientKey) else key

    # --- launches

    def roles(self, names: Mapping[Key, Key]) -> dict[Key, Role]:
        """The roles of the first-order tangents; ``names`` are the keys of a launch by those of the run."""
        kept = ((k.of, c) for k, c in self._carriers.items() if isinstance(k, GradientKey) and c.shadow is not None)
        kept = [(of, c.role(of)) for of, c in kept if not isinstance(of, Scratch)]
        return {GradientKey(names.get(of, of)): role for of, role in kept}

    def target(self, names: Mapping[Key, Key]) -> EnergyTarget:
        """The energy by the keys of a launch.

        Raises:
            UnsupportedError: arrays share a part of their memory, and one of them has tangents of the first order.
        """
        known = self._views()
        for view in (key for key in names if known and isinstance(key, View)):
            is_own = self._arrays.region(view).role(view).first_column is not None
            if not is_own and any(view != other and view.overlaps(other) for other in known):
                raise UnsupportedError(
                    "Two arrays share a part of their memory, and one of them depends on params. Second derivatives "
                    "need arrays of their own: pass copies, or one array that holds both."
                )
        energy = self._energy
        if not names and not self._shadows:
            return energy
        starts = {names.get(key, key): first for key, first in energy.starts.items()}
        carried = frozenset(names.get(c, c) for c in self.containers() if not isinstance(c, View) or c in names)
        return replace(energy, key=names.get(energy.key, energy.key), starts=starts, carried=carried)

    def _views(self) -> set[View]:
        """The arrays that have tangents of the first order, or are parameters."""
        return {key for key in (*self.containers(), *self._energy.starts) if isinstance(key, View)}

    def accept(self, fused: JacobianKernel, outer: Mapping[Key, Key]) -> None:
        """Prepare for a launch; tangents of scratch memory are new in each launch."""
        self._outer = outer
        for array in fused.first_order:
            key = self.outer_key(array.info.key)
            if array.is_scratch or key not in self._carriers:
                self._carriers[key] = Carrier(array.info.name, array.info.size, array.info.dtype)
            if array.is_scratch or key not in self._shadows:
                self._shadows[key] = _made(array)

    def array(self, name: FirstOrderArray) -> Any:
        """An array for a launch."""
        return self._shadows[self.outer_key(name.key)].array

    def note_written(self, fused: JacobianKernel) -> bool:
        """Note that a kernel has written to its first-order arrays; whether some of them were zero before."""
        written = [self._shadows[self.outer_key(array.info.key)] for array in fused.first_order]
        is_new = any(first.is_fresh for first in written)
        for first in written:
            first.is_fresh = False
        return is_new

    # --- stores from Python

    def clear(self, key: Key, rows: Any) -> None:
        """Make entries of a container constants from now on; for an array, ``rows`` are those of its region."""
        if not isinstance(key, View):
            self._clear(key, rows)
            return
        for view in (view for view in self._views() if view.overlaps(key)):
            marks = np.zeros(key.size, bool)
            marks[rows] = True
            self._clear(view, np.flatnonzero(marks[self._arrays.region(view).rows(view)]))

    def _clear(self, container: Key, rows: Any) -> None:
        key = self.key(container)
        first = self._shadows.get(key)
        if first is None:
            if container not in self._energy.starts:
                return
            info = self._arrays.infos[container] if isinstance(container, View) else self._carriers[container]
            first = self._shadows[key] = Shadow(info.name, info.size, self._energy.columns, info.dtype)
            first.set_identity(self._energy.starts[container])
        first.is_fresh = False
        first.clear_rows(rows)
        carrier = self._carriers.get(key)
        if carrier is not None and carrier.is_active:
            size, width = first.shape
            entries = np.arange(size * width)
            entries = entries.reshape(width, size).T if first.by_column else entries.reshape(size, width)
            carrier.shadow.clear_rows(entries[rows].reshape(-1))


def _made(array: FirstOrder) -> Shadow:
    info = array.info
    made = Shadow(info.name, info.size // array.columns, array.columns, info.dtype)
    if array.first_column is not None:
        made.set_identity(array.first_column)
    return made


# The request of one run and its limits; complete before the run begins.


@dataclass(frozen=True)
class Placed:
    """A parameter or output of one call, which has columns or rows of J."""

    target: Any  # the parameter or output that the user has named
    key: Key  # of the field, component, array or number
    shape: tuple[int, ...]  # that of its elements included
    dtype: Any = None  # Taichi's
    rows: int = 0  # the number of entries of its container
    inner: slice = field(default_factory=lambda: slice(None))  # which of these belong to it
    element: int = 1  # the count of numbers in an element
    first: int = 0  # the first column of a parameter

    @property
    def name(self) -> Label | str:
        return self.target.name

    @property
    def size(self) -> int:
        """How many entries it has."""
        return math.prod(self.shape)

    @property
    def columns(self) -> slice:
        """Those of a parameter."""
        return slice(self.first, self.first + self.size)

    @property
    def container(self) -> Key:
        return container_key(self.key)

    @property
    def result_dtype(self) -> np.dtype:
        """NumPy's type of the tangents of an output."""
        return numpy_dtype(self.dtype)


@dataclass(frozen=True)
class Restart:
    """How a run can be undone, and compared with earlier runs."""

    state: State | None = None  # saves the containers that the run changes
    record: RunRecord | None = None  # the launches and stores of a pipeline, if its columns take several runs
    is_repeated: bool = False  # whether the state is restored and the run repeated afterwards
    trace: Any = None  # a ``Trace`` of the numbers that Python passes on, to compare runs with other params


@dataclass(frozen=True, kw_only=True)
class Request:
    """One run of a kernel or pipeline."""

    block: ColumnBlock  # the columns
    seeds: tuple[Placed, ...]  # the parameters that are fields and arrays
    arrays: tuple[Given, ...]  # the arrays among the parameters and outputs
    outputs: tuple[Placed, ...]  # the containers whose tangents are wanted
    directions: np.ndarray | None = None  # tangents of the parameters, a row for each entry, if not columns of J
    numbers: NumberColumns = field(default_factory=NumberColumns)  # those that are parameters
    wants_return: bool = False  # whether the returned value is an output
    max_memory: float = math.inf  # bytes for tangents other than J
    most_lines: float = math.inf  # of a kernel that can run again
    strategy: str = "auto"  # how tangents of locals are stored
    watch: Any = None  # observer of the values that kernels compute
    restart: Restart = field(default_factory=Restart)  # see ``Restart``
    energy: EnergyTarget = field(default_factory=EnergyTarget)  # to differentiate twice, by the keys of this run

    @property
    def params(self) -> dict[Key, Label | str]:
        """The names of the fields and arrays that have columns in this run."""
        if self.directions is not None:
            return {}
        start, end = self.block.first, self.block.first + self.block.count
        return {s.key: s.name for s in self.seeds if s.first < end and s.first + s.size > start}
