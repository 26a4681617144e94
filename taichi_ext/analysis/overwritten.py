"""Whether a kernel can run again on what it has left: whether it overwrites what it has read."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import taichi_ext.program as ir
from taichi_ext.analysis.changes import reads_target, written, written_containers
from taichi_ext.analysis.same_values import ValueNumbers
from taichi_ext.simplify.usage import all_values

Found = tuple[ir.Container, ir.Place | None]


def overwritten(body: ir.Body) -> Found | None:
    """A container with entries that are read before they change, so that another run would read other numbers.

    An entry may be read after it was stored to in the same iteration, or by an earlier loop that reads no such entry.

    Returns:
        The container, and where it is read; None if there is none.
    """
    reading = _Reading(body)
    stages = [(written_containers((s,)), _sums((s,)), list(reading.exposed((s,), set()))) for s in body]
    for n, (own, _, exposed) in enumerate(stages):
        changed = own.union(*(later for later, _, _ in stages[n:]), *(sums for _, sums, _ in stages[:n]))
        for container, place in exposed:
            if container in changed:
                return container, place
    return None


def _sums(body: ir.Body) -> set[ir.Container]:
    """The containers that statements add to."""
    stores = (s for s in ir.statements(body) if isinstance(s, ir.Store) and not isinstance(s, ir.Assign))
    added = {s.target.container for s in stores if isinstance(s.target, ir.Load)}
    return added.union(*(s.writes for s in ir.statements(body) if isinstance(s, ir.Effect)))


class _Reading:
    """The entries that statements read from before them."""

    def __init__(self, body: ir.Body) -> None:
        self._changed = written(body)
        self._numbers = ValueNumbers()

    def exposed(self, body: ir.Body, stored: set[Hashable]) -> Iterator[Found]:
        """What is read; ``stored`` are names of the entries that the same iteration has stored to, and is extended."""
        for s in body:
            loads = [v for v in all_values(s) if isinstance(v, ir.Load)]
            target = s.target if isinstance(s, ir.Store) and isinstance(s.target, ir.Load) else None
            if target is not None and reads_target(s):
                loads.append(target)
            for load in loads:
                if self._name(load) not in stored:
                    yield load.container, s.place
            if isinstance(s, ir.Effect):
                yield from ((c, s.place) for c in s.writes)
            for block in ir.bodies(s):
                yield from self.exposed(block, set(stored))
            if target is not None and isinstance(s, ir.Assign):
                stored.add(self._name(target))

    def _name(self, load: ir.Load) -> Hashable:
        """A name that entries with the same indices share, where these do not change."""
        parts = [v for v in ir.children(load) if isinstance(v, ir.Value)]
        memory = {getattr(n, "local", getattr(n, "container", None)) for v in parts for n in ir.walk(v)}
        return id(load) if memory & self._changed else self._numbers.of(load)
