"""Numbers of slots of the sites of a sparse Jacobian that are only known at run time, launch by launch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from taichi_ext.differentiate.forms.entry_sites import Site
from taichi_ext.errors import InvalidArgumentError
from taichi_ext.runtime.memory.kernel_arrays import array_of, to_numpy

MOST_SLOTS = 2**31 - 2


class SlotCounts:
    """The room for entries, and the part filled by the last launch.

    Attributes:
        rooms: by open loop, the number of iterations that fit.
        lengths: by open loop, the number of iterations in the last launch.
        offsets: by counter, the starts of the slots of each iteration, and the end of the last one twice. The slot
            after that is unused.
        counts: by counter, the number of slots that each iteration has filled.
    """

    def __init__(self, sites: Iterable[Site]) -> None:
        self._sites = [s for s in sites if s.around.opened is not None or s.around.counter is not None]
        self.rooms = {s.around.opened: 0 for s in self._sites if s.around.opened is not None}
        self.lengths = dict(self.rooms)
        self.offsets: dict[int, np.ndarray] = {}
        self.counts: dict[int, np.ndarray] = {}
        self._memory: dict[object, object] = {}
        for site in self._sites:
            if site.around.counter is not None:
                self._set_counts(site, np.zeros(self._iterations(site), np.int64))

    def __bool__(self) -> bool:
        return bool(self._sites)

    def _iterations(self, site: Site) -> int:
        """The number of iterations of the loops around a site, known ones and those that there is room for."""
        return site.slots * (1 if site.around.opened is None else self.rooms[site.around.opened])

    def _set_counts(self, site: Site, counts: np.ndarray) -> None:
        assert site.around.counter is not None
        ends = np.cumsum(counts)
        self.offsets[site.around.counter] = np.concatenate([[0], ends, ends[-1:] if len(ends) else [0]])
        self.counts[site.around.counter] = counts

    # --- slots

    def slots(self, site: Site) -> int:
        """The number of slots of a site; if only known at run time, the last one is unused."""
        if site.around.counter is not None:
            return int(self.offsets[site.around.counter][-1]) + 1
        return self._iterations(site) + (site.around.opened is not None)

    def numbers(self, site: Site) -> tuple[np.ndarray, np.ndarray]:
        """For each slot, the number of its iteration, and whether it is filled."""
        if site.around.counter is None:
            numbers = np.arange(self.slots(site), dtype=np.int64)
            if site.around.opened is None:
                return numbers, np.ones(len(numbers), bool)
            return numbers, numbers < site.slots * self.lengths[site.around.opened]
        offsets, counts = self.offsets[site.around.counter], self.counts[site.around.counter]
        rooms = np.diff(offsets)[:-1]
        numbers = np.repeat(np.arange(len(rooms)), rooms)
        is_filled = np.arange(len(numbers)) - offsets[numbers] < counts[numbers]
        return np.append(numbers, 0), np.append(is_filled, False)

    # --- launches

    def begin(self) -> None:
        """Allocate the arrays that hold the room of a kernel."""
        self._memory = {}
        for number, room in self.rooms.items():
            self._memory[number, "lengths"] = self._filled(np.array([room, 0]))
        for number, offsets in self.offsets.items():
            self._memory[number, "offsets"] = self._filled(offsets)
            self._memory[number, "counts"] = self._filled(offsets[:-1])

    def _filled(self, values: np.ndarray) -> object:
        if values.max(initial=0) > MOST_SLOTS:
            raise InvalidArgumentError(
                f"A sparse Jacobian of {values.max()} entries in one loop is more than Taichi can index. "
                "Compute it for fewer outputs at a time."
            )
        return array_of(values.astype(np.int32))

    def array(self, number: int, what: str) -> Any:
        return self._memory[number, what]

    def end(self) -> bool:
        """Read the counts of the launch; False if there was too little room, which is then made."""
        found = {name: to_numpy(array).astype(np.int64) for name, array in self._memory.items()}
        self.lengths = {number: int(found[number, "lengths"][1]) for number in self.rooms}
        if any(self.lengths[number] > room for number, room in self.rooms.items()):
            self.rooms = {number: max(room, self.lengths[number]) for number, room in self.rooms.items()}
            for site in self._sites:
                if site.around.counter is not None and site.around.opened is not None:
                    self._set_counts(site, np.zeros(self._iterations(site), np.int64))
            return False
        is_enough = True
        for site in {s.around.counter: s for s in self._sites if s.around.counter is not None}.values():
            counter: int = site.around.counter  # type: ignore[assignment]
            offsets = self.offsets[counter]
            counts = found[counter, "counts"][: len(offsets) - 2] - offsets[:-2]
            if site.around.opened is not None:
                counts[site.slots * self.lengths[site.around.opened] :] = 0
            if (counts > np.diff(offsets)[:-1]).any():
                self._set_counts(site, counts)
                is_enough = False
            self.counts[counter] = counts
        return is_enough
