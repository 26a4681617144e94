"""The numbers that Python passes to kernels and stores in one run of a pipeline, for a comparison with other runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.launches import JacobianKernel, KernelFacts
from taichi_ext.runtime.launching.tangents import save_changed
from taichi_ext.runtime.memory.regions import View
from taichi_ext.runtime.memory.shadows import FieldTable, view_of
from taichi_ext.runtime.memory.state import State
from taichi_ext.runtime.python.dual_numbers import is_dual
from taichi_ext.runtime.python.run_record import entries_of

_MOST_NUMBERS = 4096  # kept of one array; of larger ones, sums
_MOST_ARRAYS = 64  # whose changes by Python are known exactly
STORED, READ, CHANGED = "stored to a field or array", "read", "that Python has changed"
_NONE = np.zeros(0)
Along = Callable[[View, np.ndarray], "np.ndarray | None"]


@dataclass(eq=False)
class TraceEvent:
    """Numbers that Python passes to a kernel or stores, or reads one after the other, or an array that it passes.

    Attributes:
        at: its number in the run.
        use: the use, as messages name it.
        kernel: the code of the kernel, if any.
        place: the user's file and line.
        numbers: the numbers; of a large array, sums of them.
        moves: how far their tangents say that they move with the params; NaN where that is not known.
        changed: of an array, whether Python has changed each entry since the last launch; None: perhaps all.
        is_array: whether it is an array.
    """

    at: int
    use: str
    kernel: object
    place: tuple[str, int] | None
    numbers: np.ndarray
    moves: np.ndarray
    changed: np.ndarray | None = None
    is_array: bool = False
    is_active: bool = False

    def is_like(self, other: TraceEvent) -> bool:
        """Whether both may be the same event of two runs."""
        is_same = self.use == other.use and self.kernel is other.kernel and self.is_array == other.is_array
        return is_same and self.numbers.shape == other.numbers.shape


@dataclass(eq=False)
class Trace:
    """The events of a run, from the first read on of a number that may depend on the params.

    Attributes:
        direction: how the params move, a number for each column of the runs; None if events are only counted.
        sees_arrays: whether Python may read the arrays that it passes, or store to them.
        known: the identities of objects that the pipeline can reach before it runs.
        stores: entries of arrays that Python stores to, though they may have the stored numbers already, by event.
        start: the event at the first such read; None before.
        facts: of each launch, the code of the kernel and the facts about it.
    """

    direction: np.ndarray | None = None
    sees_arrays: bool = True
    known: Set[int] = frozenset()
    stores: Mapping[int, np.ndarray] = field(default_factory=dict)
    start: int | None = None
    facts: list[tuple[object, KernelFacts]] = field(default_factory=list)
    _events: list[TraceEvent] = field(default_factory=list)
    _reads: tuple[TraceEvent, list[float], list[float]] | None = None  # with numbers and moves so far
    _at: int = 0
    _count: int = 0  # of events that were kept in this run
    _kernels: int = 0  # made before the run
    _along: np.ndarray = field(default_factory=lambda: np.zeros(0))
    _arrays: dict[View, tuple[Any, np.ndarray]] = field(default_factory=dict)  # with their numbers after a launch
    _thread: int = field(default_factory=threading.get_ident)

    def begin(self, first: int = 0, count: int = 0) -> None:
        """Start a run for some of the columns; the moves of all of them are added up."""
        self._end_reads()
        self._at, self._count, self._kernels = 0, 0, backend.kernels_made()
        self._along = self._along if self.direction is None else self.direction[first : first + count]
        self._arrays.clear()
        self.facts.clear()

    def note_read(self) -> None:
        """Python reads numbers that may depend on the params."""
        self.start = self._at if self.start is None else self.start

    @property
    def events(self) -> list[TraceEvent]:
        self._end_reads()
        return self._events

    @property
    def is_empty(self) -> bool:
        """Whether nothing was passed or stored after the first read."""
        return all(event.use == READ for event in self.events)

    def read(self, value: object) -> None:
        """Python has read a number of a field or array."""
        if not isinstance(value, float) or threading.get_ident() != self._thread or not self._is_kept():
            return
        if self._reads is None:
            self._reads = TraceEvent(self._at, READ, None, _place(), _NONE, _NONE), [], []
        self._reads[1].append(float(value))
        self._reads[2].append(self._move(value) if is_dual(value) else 0.0)

    def _end_reads(self) -> None:
        """What Python reads next is another event."""
        reads, self._reads = self._reads, None
        if reads is not None:
            event, *numbers = reads
            event.numbers, event.moves = map(np.array, numbers)
            self._keep(event)

    def store(self, value: object) -> None:
        """Python is about to store a number."""
        if not backend.is_array(value):
            self._add(STORED, None, entries_of(value))

    def launch(
        self,
        kernel: backend.Kernel,
        values: Sequence[Any],
        facts: KernelFacts,
        passed: Mapping[str, Sequence[object]],
        along: Along,
    ) -> list[tuple[View, np.ndarray]]:
        """A kernel is about to be launched.

        Args:
            kernel: the kernel.
            values: its leaf arguments.
            facts: those about it.
            passed: the entries of arguments with tangents, by name.
            along: the tangents of an array times a direction; None if it has none.

        Returns:
            Entries of arrays that Python has stored to, see ``stores``.
        """
        is_own = not backend.is_library_kernel(kernel)
        use, user = (f"passed to {kernel.func.__qualname__}", kernel.func.__code__) if is_own else (STORED, None)
        self.facts.append((kernel.func.__code__, facts))
        self.compiled_in(kernel, values)
        leaves, found = backend.leaf_arguments(kernel), list[tuple[View, np.ndarray]]()
        numbers = [passed.get(leaf.name) or entries_of(v) for leaf, v in zip(leaves, values, strict=True)]
        self._add(use, user, chain.from_iterable(numbers))
        for position, array in _host_arrays(kernel, values):
            if leaves[position].name in facts.read_arguments:
                found += self._add_array(use, user, array, along)
            elif leaves[position].name in facts.kept_arguments:
                found += self._add_array(CHANGED, user, array, along)
        return found

    def compiled_in(self, kernel: backend.Kernel, values: Sequence[Any]) -> None:
        """The numbers that a kernel reads which is made in each run, or of an object that is: other ones in each."""
        is_new = backend.is_kernel_since(kernel, self._kernels)
        leaves = zip(backend.leaf_arguments(kernel), values, strict=True)
        given = {leaf.name: v for leaf, v in leaves if backend.is_template(leaf.annotation) and is_made(v, self.known)}
        if is_new or given:
            read = backend.values_read(kernel.func, given)
            found = [v for path, v in read if is_new or not path.is_global]
            found = [v.tolist() if isinstance(v, np.ndarray) and v.size <= _MOST_NUMBERS else v for v in found]
            use = f"compiled into {kernel.func.__qualname__}"
            self._add(use, kernel.func.__code__, chain.from_iterable(map(entries_of, found)))

    def after_launch(self, kernel: backend.Kernel, values: Sequence[Any]) -> None:
        """A kernel has been launched."""
        self.remember(array for _, array in _host_arrays(kernel, values))

    def remember(self, arrays: Iterable[Any]) -> None:
        """Changes of these arrays from now on are those of Python."""
        for array in arrays:
            if len(self._arrays) >= _MOST_ARRAYS:
                del self._arrays[next(iter(self._arrays))]
            view = view_of(array)
            self._arrays[view] = array, _numbers(array).copy() if self.direction is not None else _NONE
            for other, (owner, numbers) in self._arrays.items():
                if numbers.size and other != view and other.overlaps(view):
                    shared = other.entries_in(view)
                    numbers[shared] = _numbers(owner)[shared]

    def _known(self, view: View) -> np.ndarray | None:
        """The numbers of an array after the last launch that used its memory; None if they are not known."""
        if view in self._arrays:
            return self._arrays[view][1]
        for other, (_, numbers) in self._arrays.items():
            if other.contains(view) and other.fits(view):
                in_memory = np.empty_like(numbers)
                in_memory[other.positions(other.start)] = numbers
                return in_memory[view.positions(other.start)]
        return None

    def end(self, along: Along) -> list[tuple[View, np.ndarray]]:
        arrays = [array for array, _ in self._arrays.values()]
        return [entries for array in arrays for entries in self._add_array(CHANGED, None, array, along)]

    def _add(self, use: str, kernel: object, numbers: Iterable[object]) -> None:
        """Note numbers; those that are not real ones have no derivative."""
        floats = [n for n in numbers if isinstance(n, (float, np.floating))]
        if not floats:
            return
        self._end_reads()
        if self._is_kept():
            moves = [self._move(n) if is_dual(n) else 0.0 for n in floats]
            self._keep(TraceEvent(self._at, use, kernel, _place(), np.array(floats, np.float64), np.array(moves)))

    def _move(self, number: Any) -> float:
        is_known = isinstance(number.tangent, np.ndarray) and not number.is_stopped
        return float(number.tangent @ self._along) if is_known else np.nan

    def _add_array(self, use: str, kernel: object, array: Any, along: Along) -> Iterable[tuple[View, np.ndarray]]:
        view = view_of(array)
        self._end_reads()
        if self._is_kept():
            numbers, known = _numbers(array), self._known(view)
            changed = None if known is None else (numbers != known) & ~(np.isnan(numbers) & np.isnan(known))
            moves = along(view, self._along)
            parts = _sums(numbers), _sums(np.zeros(numbers.shape) if moves is None else moves)
            self._keep(
                TraceEvent(self._at, use, kernel, _place(), *parts, changed, is_array=True, is_active=moves is not None)
            )
        return ((view, self.stores[self._at]),) if self._at in self.stores else ()

    def _is_kept(self) -> bool:
        """Count an event; whether it is kept."""
        self._at += 1
        return self.direction is not None and self.start is not None and self._at > self.start

    def _keep(self, event: TraceEvent) -> None:
        if self._count >= len(self._events):
            self._events.append(event)
        elif self._events[self._count].moves.shape == event.moves.shape:  # other columns of the same run
            self._events[self._count].moves += event.moves
        self._count += 1


def _place() -> tuple[str, int] | None:
    frame = backend.user_frame()
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def _host_arrays(kernel: backend.Kernel, values: Sequence[Any]) -> list[tuple[int, Any]]:
    """The arrays of real numbers among the leaf arguments that Python can read and change unnoticed."""
    return [(n, values[n]) for n in backend.array_positions(kernel) if is_host_array(values[n])]


def is_made(value: object, known: Set[int]) -> bool:
    """Whether a value is an object of a class of the user's that the pipeline has made: not among the known ones."""
    return id(value) not in known and not backend.is_library(type(value)) and hasattr(value, "__dict__")


def is_host_array(array: Any) -> bool:
    """Whether a value is a NumPy array or tensor of real numbers."""
    if isinstance(array, backend.Ndarray) or not backend.is_array(array):
        return False
    return backend.is_real(backend.outer_array_dtype(array))


def _numbers(array: Any) -> np.ndarray:
    return backend.as_numpy(array).reshape(-1)


def _sums(numbers: np.ndarray) -> np.ndarray:
    """The numbers, or sums with random signs of as many parts as are kept."""
    if numbers.size <= _MOST_NUMBERS:
        return numbers.astype(np.float64)
    starts = np.arange(0, numbers.size, -(-numbers.size // _MOST_NUMBERS))
    return np.add.reduceat(numbers * _signs(numbers.size), starts)


@lru_cache(maxsize=4)
def _signs(size: int) -> np.ndarray:
    return np.random.default_rng(size).choice([-1.0, 1.0], size)


class PlainRun(backend.Follower):
    """Follows a run without tangents, which ``backend.follow`` reports to it.

    Args:
        trace: takes its events.
        state: takes what it changes.
        kernels: the kernels with tangents, of all runs.
        table: the fields that they use.
        facts: of the run with tangents, see ``Trace``: those about a kernel differ from launch to launch.
        is_last: whether what it changes need not be undone.
    """

    def __init__(
        self,
        trace: Trace,
        state: State,
        kernels: Iterable[tuple[Any, JacobianKernel]],
        table: FieldTable,
        facts: Iterable[tuple[object, KernelFacts]],
        *,
        is_last: bool,
    ) -> None:
        self.trace, self._state, self._table, self._is_last = trace, state, table, is_last
        self._facts = iter(facts)
        kernels = list(kernels)
        self._kernels = {(name[0], _without_numbers(name[1])): fused for name, fused in kernels}
        self._alike = {
            fused.primal.func.__code__: fused for _, fused in kernels
        }  # made, or of an object made, in a run

    def launch(self, kernel: backend.Kernel, args: tuple[Any, ...]) -> Any:
        """Run a kernel; raises ``PathChangedError`` if what it changes is not known."""
        with backend.exclusive:
            node = backend.deactivated_node(kernel, args)
            features = _without_numbers(backend.argument_features(kernel, args))
            values = backend.leaf_values(kernel, args)
            known = self._kernels.get((id(kernel), features))
            fused = known or self._alike.get(kernel.func.__code__)
            is_fill = backend.is_fill(kernel)
            if is_fill:
                self.before_host_write(*args)
            if fused is None and node is None and not is_fill and not backend.is_reading_kernel(kernel):
                if not self._is_last:
                    raise PathChangedError
            elif known is None:
                self._save_all(kernel, values)
            if node is not None:
                self._state.save_part(node)
            if fused is not None and not is_fill:
                save_changed(self._state, fused, self._table, tuple(values))
                code, facts = next(self._facts, (None, fused.facts))
                facts = facts if code is kernel.func.__code__ else fused.facts  # another path
                self.trace.launch(kernel, values, facts, {}, _no_tangents)
            with backend.suspend_following():
                result = kernel(*args)
            if fused is not None:
                self.trace.after_launch(kernel, values)
            return result

    def _save_all(self, kernel: backend.Kernel, values: Sequence[Any]) -> None:
        """Save the fields and arrays that a kernel is given or names, and those in lists and dicts."""
        given = {leaf.name: v for leaf, v in zip(backend.leaf_arguments(kernel), values, strict=True)}
        for value in entries_of([*values, *(v for _, v in backend.values_read(kernel.func, given))]):
            if isinstance(value, (backend.Field, backend.StructField)) or backend.is_array(value):
                self._state.save(value)

    def root(self, root: Any) -> Any:
        """A solver of an implicit function; what it changes was saved in the run before."""
        with backend.suspend_following():
            result = root.solver()
        self.trace.remember(filter(is_host_array, root.unknowns))  # whose changes are those of the solver
        return result

    def before_host_write(self, obj: object, value: object) -> None:
        """Python is about to store to a field or array."""
        self.trace.store(value)
        self._state.save(obj)

    def host_read(self, obj: object, index: object, value: object) -> object:
        """Python reads a field or array."""
        self.trace.read(value)
        return value


def _without_numbers(features: Iterable[object]) -> tuple[object, ...]:
    """The types of arguments, and nothing of numbers that are compiled into a kernel."""
    return tuple(backend.NUMBER_FEATURE if isinstance(f, float) else f for f in features)


class PathChangedError(BaseException):  # which code of users does not catch
    """A run launches kernels that the run before did not."""


def _no_tangents(view: View, direction: np.ndarray) -> None:
    return None
