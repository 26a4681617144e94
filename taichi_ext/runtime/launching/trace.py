"""The numbers that Python passes to kernels and stores in one run of a pipeline, for a comparison with other runs."""

from __future__ import annotations

import operator
import sys
import threading
from array import array as flat_array
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from taichi_ext import backend
from taichi_ext.cached import Bounded
from taichi_ext.launches import JacobianKernel, KernelFacts
from taichi_ext.runtime.launching.tangents import save_changed, save_stored
from taichi_ext.runtime.memory.regions import View
from taichi_ext.runtime.memory.shadows import FieldTable, view_of
from taichi_ext.runtime.memory.state import State
from taichi_ext.runtime.python.dual_numbers import is_dual
from taichi_ext.runtime.python.run_record import entries_of

_MOST_NUMBERS = 4096  # kept of one array; of larger ones, sums
_MOST_ARRAYS = 64  # whose changes by Python are known exactly
STORED, CHANGED = "stored to a field or array", "that Python has changed"
_NONE, _FLAT = np.zeros(0), partial(flat_array, "d")
_NO_ARRAYS = partial(Bounded[View, tuple[Any, np.ndarray]], _MOST_ARRAYS)
Along = Callable[[View, np.ndarray], "np.ndarray | None"] | None  # None: nothing has tangents


class TraceEvent(NamedTuple):
    """Numbers that Python passes to a kernel or stores, or an array that it passes."""

    use: str  # the use, as messages name it
    kernel: object  # the code of the kernel, if any
    is_array: bool  # whether it is an array
    reads: int  # how many numbers Python has read since the event before; they come before its own
    at: int  # its number in the run
    start: int  # where these begin among those of the run; of a large array, they are sums
    place: tuple[str, int] | None  # the user's file and line
    changed: np.ndarray | None = None  # of an array, the entries that Python has changed; None: perhaps all
    is_active: bool = False  # of an array, whether it has tangents


_KIND = operator.itemgetter(0, 1, 2, 3)  # what is equal for an event of two runs


@dataclass(eq=False)
class TracedRun:
    """The events of a run, and their numbers one after the other."""

    along: np.ndarray = field(default_factory=lambda: np.zeros(0))  # how its params move
    kernels: int = 0  # how many had been made before
    at: int = 0  # how many events and reads there were, with those that are not kept
    reads: int = 0  # how many since the last event
    events: list[TraceEvent] = field(default_factory=list)  # from the first read of a number with a tangent on
    numbers: flat_array[float] = field(default_factory=_FLAT)  # of all events
    moves: flat_array[float] = field(default_factory=_FLAT)  # how far they move by their tangents; NaN: not known

    def add(self, use: str, kernel: object, array: tuple[np.ndarray | None, bool] | None = None) -> None:
        """An event, whose numbers are added next; of an array what has changed, and whether it has tangents."""
        frame = backend.user_frame(sys._getframe(4))  # quicker: that of the user's who stores a number, or one below it
        start = len(self.numbers) - self.reads
        place = None if frame is None else (frame.f_code.co_filename, frame.f_lineno)
        changed, is_active = array or (None, False)
        is_array = array is not None
        parts = use, kernel, is_array, self.reads, self.at, start, place, changed, is_active
        self.events.append(tuple.__new__(TraceEvent, parts))  # quicker
        self.reads = 0

    def add_number(self, number: Any) -> None:
        """A number of the last event, or one that is read."""
        move = 0.0
        if is_dual(number):
            is_known = isinstance(number.tangent, np.ndarray) and not number.is_stopped
            move = number.tangent.dot(self.along) if is_known else np.nan  # quicker than @
        self.numbers.append(number)
        self.moves.append(move)

    def ends(self) -> list[int]:
        """Where the numbers of the events end, after a 0."""
        return [*(event.start for event in self.events), len(self.numbers) - self.reads]

    @property
    def has_unknown(self) -> bool:
        """Whether it is not known how numbers move that Python may have changed."""
        ends = self.ends()
        both = zip(self.events, ends, ends[1:], strict=False)
        return any(
            (e.changed is None or e.changed.any()) and np.isnan(self.moves[a + e.reads : b]).any() for e, a, b in both
        )

    def alike(self, other: TracedRun) -> int:
        """How many events, from the first on, may be the same ones in another run."""
        both = [zip(map(_KIND, run.events), run.ends()[1:], strict=True) for run in (self, other)]
        most = min(len(self.events), len(other.events))
        return next((n for n, (a, b) in enumerate(zip(*both, strict=False)) if a != b), most)


@dataclass(eq=False)
class Trace:
    """The events of the runs of one call, with a run for each block of columns.

    Attributes:
        direction: how the params move, a number for each column of the runs; None if events are only counted.
        sees_arrays: whether Python may read the arrays that it passes, or store to them.
        known: the identities of objects that the pipeline can reach before it runs.
        stores: entries of arrays that Python stores to, though they may have the stored numbers already, by event.
        start: how many events come before the first read of a number that may depend on the params; None without one.
        facts: of each launch, the code of the kernel and the facts about it.
    """

    direction: np.ndarray | None = None
    sees_arrays: bool = True
    known: Set[int] = frozenset()
    stores: Mapping[int, np.ndarray] = field(default_factory=dict)
    start: int | None = None
    facts: list[tuple[object, KernelFacts]] = field(default_factory=list)
    _runs: list[TracedRun] = field(default_factory=lambda: [TracedRun()])  # the first, and the present one
    _arrays: Bounded[View, tuple[Any, np.ndarray]] = field(default_factory=_NO_ARRAYS)  # with numbers after a launch
    _thread: int = field(default_factory=threading.get_ident)

    def begin(self, first: int = 0, count: int = 0) -> None:
        """Start a run for some of the columns."""
        before = [self.found] if self.found.events else []
        along = np.zeros(0) if self.direction is None else self.direction[first : first + count]
        along = np.pad(along, (0, count - len(along)))
        self._runs = [*before, TracedRun(along, backend.kernels_made())]
        self._arrays.clear()
        self.facts.clear()

    def note_read(self) -> None:
        """Python reads numbers that may depend on the params."""
        self.start = self._runs[-1].at if self.start is None else self.start

    @property
    def found(self) -> TracedRun:
        """The events of the first run, whose moves are those with all columns; the run is over."""
        first, *others = self._runs
        for run in others:
            end = first.ends()[first.alike(run)]
            first.moves = flat_array("d", np.add(first.moves[:end], run.moves[:end])) + first.moves[end:]
        self._runs = [first]
        return first

    def _count(self) -> bool:
        """Count an event; returns whether its numbers are wanted."""
        run = self._runs[-1]
        run.at += 1
        return self.direction is not None and self.start is not None and run.at > self.start

    def read(self, value: object) -> None:
        """Python has read a number of a field or array."""
        if isinstance(value, float) and threading.get_ident() == self._thread and self._count():
            run = self._runs[-1]
            run.reads += 1
            run.add_number(value)

    def store(self, value: object) -> None:
        """Python is about to store a number."""
        if isinstance(value, float):
            if self._count():
                run = self._runs[-1]
                run.add(STORED, None)
                run.add_number(value)
        elif not backend.is_array(value):
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
        leaves, result = backend.leaf_arguments(kernel), list[tuple[View, np.ndarray]]()
        numbers = [passed.get(leaf.name) or entries_of(v) for leaf, v in zip(leaves, values, strict=True)]
        self._add(use, user, chain.from_iterable(numbers))
        for position, array in _host_arrays(kernel, values):
            if leaves[position].name in facts.read_arguments:
                result += self._add_array(use, user, array, along)
            elif leaves[position].name in facts.kept_arguments:
                result += self._add_array(CHANGED, user, array, along)
        return result

    def compiled_in(self, kernel: backend.Kernel, values: Sequence[Any]) -> None:
        """The numbers that a kernel reads which is made in each run, or of an object that is: other ones in each."""
        is_new = backend.is_kernel_since(kernel, self._runs[-1].kernels)
        leaves = zip(backend.leaf_arguments(kernel), values, strict=True)
        given = {leaf.name: v for leaf, v in leaves if backend.is_template(leaf.annotation) and is_made(v, self.known)}
        if is_new or given:
            read = backend.values_read(kernel.func, given)
            constants = [v for path, v in read if is_new or not path.is_global]
            constants = [v.tolist() if isinstance(v, np.ndarray) and v.size <= _MOST_NUMBERS else v for v in constants]
            use = f"compiled into {kernel.func.__qualname__}"
            self._add(use, kernel.func.__code__, chain.from_iterable(map(entries_of, constants)))

    def after_launch(self, kernel: backend.Kernel, values: Sequence[Any]) -> None:
        """A kernel has been launched."""
        self.remember(array for _, array in _host_arrays(kernel, values))

    def remember(self, arrays: Iterable[Any]) -> None:
        """Changes of these arrays from now on are those of Python."""
        for array in arrays:
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
        if floats and self._count():
            run = self._runs[-1]
            run.add(use, kernel)
            for number in floats:
                run.add_number(number)

    def _add_array(self, use: str, kernel: object, array: Any, along: Along) -> Iterable[tuple[View, np.ndarray]]:
        view, run = view_of(array), self._runs[-1]
        if self._count():
            numbers, known = _numbers(array), self._known(view)
            changed = None if known is None else (numbers != known) & ~(np.isnan(numbers) & np.isnan(known))
            moves = None if along is None else along(view, run.along)
            run.add(use, kernel, (changed, moves is not None))
            run.numbers.frombytes(_sums(numbers).tobytes())
            run.moves.frombytes(_sums(np.zeros(numbers.shape) if moves is None else moves).tobytes())
        return ((view, self.stores[run.at]),) if run.at in self.stores else ()


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
        # made, or of an object made, in a run
        self._alike = {fused.primal.func.__code__: fused for _, fused in kernels}

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
                self.trace.launch(kernel, values, facts, {}, None)
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
        save_stored(self._state, self._table, obj)

    def host_read(self, obj: object, index: object, value: object) -> object:
        """Python reads a field or array."""
        self.trace.read(value)
        return value


def _without_numbers(features: Iterable[object]) -> tuple[object, ...]:
    """The types of arguments, and nothing of numbers that are compiled into a kernel."""
    return tuple(backend.NUMBER_FEATURE if isinstance(f, float) else f for f in features)


class PathChangedError(BaseException):  # which code of users does not catch
    """A run launches kernels that the run before did not."""
