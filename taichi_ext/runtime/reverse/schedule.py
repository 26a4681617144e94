"""How the state of a long run is had again on its way back: what was overwritten is kept, or snapshots are.

A run is divided into *units*, each of them as long as the log of what it overwrites fits into a quarter of the memory.
Where the logs of all units fit, nothing is computed twice. Otherwise snapshots of the state are placed between units
during the run, by Wang, Moin and Iaccarino's algorithm ("Minimal repetition dynamic checkpointing algorithm for
unsteady adjoint calculation", SIAM J. Sci. Comput. 31(4), 2009), which needs no count of units in advance. On the way
back each unit is run again from the nearest snapshot, and further snapshots are placed by the binomial schedule of
Griewank and Walther ("Algorithm 799: revolve", ACM Trans. Math. Softw. 26(1), 2000).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from taichi_ext.errors import InvalidArgumentError
from taichi_ext.runtime.reverse.backward import Backward
from taichi_ext.runtime.reverse.cells import UNIT_SHARE, Cell, Cells, Copy, Log
from taichi_ext.runtime.reverse.history import Event, LaunchEvent, ReadEvent

_ENDLESS = 1 << 30  # the level of the state at the start
_LITTLE = 1 << 20  # bytes that are kept without asking how much memory is free


@dataclass(eq=False)
class Snapshot:
    """The state between two units.

    Attributes:
        unit: the one that it comes before.
        level: snapshots of a lower level before it can be given up.
        copies: of what had been written by then.
        nbytes: their memory.
    """

    unit: int
    level: int
    copies: list[Copy]
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = sum(copy.nbytes for copy in self.copies)


class Schedule:
    """What has happened in a run, and what is kept of it.

    Args:
        log: copies of what is overwritten.

    Attributes:
        events: in their order.
        peak: the most bytes that were kept.
        repeated: launches that were made again on the way back.
        most: the largest number of snapshots at one time.
    """

    def __init__(self, cells: Cells, log: Log) -> None:
        self.cells, self.log = cells, log
        self.events: list[Event] = []
        self.peak = self.repeated = self.most = 0
        self._starts = [0]  # of the units, by event
        self._sizes = [0]  # of the logs of units; those of units that are no longer kept are 0
        self._accounted = 0  # the sum of these
        self._kept = 0  # the first unit whose log is kept
        self._snapshots = [Snapshot(0, _ENDLESS, [])]
        self._written: dict[Cell, None] = {}
        self._state_bytes = 0
        self._longest = 0  # bytes of the log of a unit
        self._largest_event = 0  # bytes that one event has added to the log
        self._is_long = False  # whether the present unit should end
        self._is_held = False

    # --- the run forward

    def begin(self) -> None:
        """An event is about to happen."""
        if self._is_long and not self._is_held:
            self._is_long = False
            self._place()
            self._starts.append(len(self.events))
            self._sizes.append(0)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Within the context, all events belong to one unit."""
        before, self._is_held = self._is_held, True
        try:
            yield
        finally:
            self._is_held = before

    def add(self, event: Event) -> None:
        """An event happens now; more of it may follow until ``end``."""
        self.events.append(event)
        if not isinstance(event, (LaunchEvent, ReadEvent)):
            self._account(event)

    def end(self) -> None:
        """The last event is over."""
        self._account(self.events[-1])

    def _account(self, event: Event) -> None:
        for cell in event.written:
            if cell.key is not None:
                self._written[cell] = None
        grown = self.log.nbytes - self._accounted
        self._accounted += grown
        self._sizes[-1] += grown
        self._largest_event = max(self._largest_event, grown)
        self._longest = max(self._longest, self._sizes[-1])
        if self._note() < _LITTLE and self.log.max_memory is None:
            return
        self._is_long = self._sizes[-1] > self.log.limit / UNIT_SHARE
        self._make_room(self._largest_event)
        state, longest = self.log.first_nbytes, self._longest
        need = 2 * state + longest if self._kept else state + longest
        if self._kept_bytes() > self.log.limit and need > self.log.limit:
            raise InvalidArgumentError(_TOO_LITTLE.format(self.log.limit, need, state, longest))

    def _make_room(self, size: int) -> None:
        """Forget what stages have recorded, then logs of earlier units, until there is room for what comes."""
        if self.log.recorded and self._kept_bytes() + size > self.log.limit:
            for event in self.events:
                if isinstance(event, LaunchEvent):
                    event.recordings.clear()
            self.log.recorded, self.log.is_recording = 0, False
        while self._kept_bytes() + size > self.log.limit and self._kept < len(self._starts) - 1:
            self._drop_log()
        while self._kept and self._kept_bytes() > self.log.limit and self._expendable():
            self._snapshots.remove(self._expendable()[0])

    def _expendable(self) -> list[Snapshot]:
        """The snapshots that have one of a higher level behind them."""
        snapshots, above = list[Snapshot](), 0
        for snapshot in reversed(self._snapshots):
            snapshots += [snapshot] * (snapshot.level < above)
            above = max(above, snapshot.level)
        return snapshots[::-1]

    def _kept_bytes(self) -> int:
        return self.log.first_nbytes + self.log.nbytes + self.log.recorded + sum(s.nbytes for s in self._snapshots)

    def _drop_log(self) -> None:
        """Forget the log of the oldest unit that has one."""
        size = self._forget(self._kept)
        self.log.nbytes -= size
        self._accounted -= size
        self._sizes[self._kept] = 0
        self._kept += 1

    def _forget(self, unit: int) -> int:
        """Drop the log of a unit; returns its bytes."""
        first, end = self._range(unit)
        for event in self.events[first:end]:
            event.forget()
        return self._sizes[unit]

    def _range(self, unit: int) -> tuple[int, int]:
        ends = [*self._starts[1:], len(self.events)]
        return self._starts[unit], ends[unit]

    def _place(self) -> None:
        """Make a snapshot of the state before the unit that begins now, in place of another if there is no room."""
        size, level = sum(map(_bytes, self._written)), 0
        while len(self._snapshots) > self._slots(size):
            last, expendable = self._snapshots[-1], self._expendable()
            if not expendable and last.level == _ENDLESS:
                break
            level = level if expendable else last.level + 1
            self._snapshots.remove(expendable[0] if expendable else last)
        self._make_room(size + self._largest_event)
        self._snapshot(len(self._starts)).level = level
        self._note()

    def _snapshot(self, unit: int) -> Snapshot:
        """A copy of the present state, which comes before a unit."""
        made = Snapshot(unit, 0, [Copy(cell, ()) for cell in self._written])
        self._snapshots.append(made)
        return made

    def _slots(self, size: int) -> int:
        """How many snapshots the memory has room for, beside the state at the start and the log of a unit."""
        room = self.log.limit - self.log.first_nbytes - self._longest - self._largest_event
        return int(max(1, room // max(1, size)))

    def _note(self) -> int:
        """Note how much is kept, and return it."""
        kept = self._kept_bytes()
        self.peak = max(self.peak, kept)
        self.most = max(self.most, len(self._snapshots) - 1)
        return kept

    # --- the way back

    def back(self, backward: Backward, progress: Callable[[int, int], None]) -> None:
        """Go back over all events; ``progress`` is told how many of how many are done."""
        count, done = len(self._starts), 0

        def advance(more: int) -> None:
            nonlocal done
            done += more
            progress(done, len(self.events))

        is_whole = self._kept == 0  # nothing has to be computed again
        for unit in reversed(range(self._kept, count)):
            self._events_back(unit, backward, advance)
            if not is_whole:  # which makes room for snapshots
                self.log.nbytes -= self._forget(unit)
        if is_whole:
            return
        backward.keep_final(self._written)
        self._state_bytes = sum(map(_bytes, self._written))
        end = self._kept
        self._kept = count
        kept = list(self._snapshots)
        for snapshot in reversed(kept):
            if snapshot.unit < end:
                self._stretch_back(snapshot, end, backward, advance)
                end = snapshot.unit
            self._snapshots.remove(snapshot)
        self._snapshots = kept

    def _events_back(self, unit: int, backward: Backward, advance: Callable[[int], None]) -> None:
        first, end = self._range(unit)
        for event in reversed(self.events[first:end]):
            backward.event(event)
        advance(end - first)

    def _stretch_back(self, start: Snapshot, end: int, backward: Backward, advance: Callable[[int], None]) -> None:
        """Go back over the units from a snapshot to an end."""
        while end > start.unit:
            self._restore(start)
            slots = self._slots(self._state_bytes) - len(self._snapshots) + 1
            if end - start.unit == 1 or slots <= 0:
                self._forward(start.unit, end - 1)
                self._unit_back(end - 1, backward, advance)
                end -= 1
                continue
            middle = start.unit + split(end - start.unit, slots)
            self._forward(start.unit, middle)
            inner = self._snapshot(middle)
            self._stretch_back(inner, end, backward, advance)
            self._snapshots.remove(inner)
            end = middle

    def _forward(self, first: int, end: int) -> None:
        """Run units again without keeping anything."""
        self.log.is_keeping = False
        for unit in range(first, end):
            self._again(unit)

    def _unit_back(self, unit: int, backward: Backward, advance: Any) -> None:
        """Run a unit again, keeping what is overwritten, and go back over it."""
        self.log.is_keeping, before = True, self.log.nbytes
        for cell in self.cells:
            cell.wanted.clear()
        self._again(unit)
        self._note()
        self._events_back(unit, backward, advance)
        self._forget(unit)
        self.log.nbytes = before

    def _again(self, unit: int) -> None:
        first, end = self._range(unit)
        for event in self.events[first:end]:
            event.again(self.log)
        self.repeated += end - first

    def _restore(self, snapshot: Snapshot) -> None:
        """Put the state back."""
        known = {copy.cell for copy in snapshot.copies}
        for cell, copy in reversed(self.log.first.items()):
            if cell not in known:
                copy.put_back()
        for copy in snapshot.copies:
            copy.put_back()


def _bytes(cell: Cell) -> int:
    return cell.size * cell.dtype.itemsize * (1 if cell.dots is None else 1 + cell.dots.width)


_TOO_LITTLE = (
    "max_memory={:.0f} is too little for the gradient, which needs {} bytes: the state that kernels change takes {}, "
    "and the numbers that one step overwrites take {}. Allow more max_memory."
)


def longest(slots: int, repetitions: int) -> int:
    """How many units can be gone back over, from a stored state, if each runs again at most so often before its turn.

    It is ``s + r choose r`` for s snapshots, the state at the start among them, and r repetitions.
    """
    return math.comb(slots + 1 + repetitions, repetitions)


@functools.cache
def split(length: int, slots: int) -> int:
    """The number of units to run before the next snapshot, by Griewank and Walther's formula."""
    r = next(r for r in itertools.count(1) if longest(slots, r) >= length)
    return max(1, min(longest(slots, r - 1), length - longest(slots - 1, r - 1)))
