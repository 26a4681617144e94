"""Which containers of a kernel get tangents, from those that have some before it."""

from __future__ import annotations

from dataclasses import dataclass, field

from taichi_ext.analysis.activity import find_activity
from taichi_ext.analysis.changes import written_containers
from taichi_ext.differentiate.forms.keys import Key
from taichi_ext.launches.launch import ContainerInfo
from taichi_ext.program import Container, Local, Program


@dataclass(frozen=True, eq=False)
class Flow:
    """The effect of a kernel on the tangents of containers, which are named by their keys."""

    program: Program
    infos: dict[Container, ContainerInfo]
    numbers: frozenset[Local]  # arguments and Python numbers that are parameters
    _found: dict[frozenset[Key], frozenset[Key]] = field(default_factory=dict)

    @property
    def written(self) -> set[Key]:
        """The containers that it writes."""
        return {self.infos[c].key for c in written_containers(self.program.body) if c in self.infos}

    def active_after(self, before: set[Key]) -> frozenset[Key]:
        """Its containers that have tangents after it, where these have some before."""
        start = frozenset(before & {info.key for info in self.infos.values()})
        if start not in self._found:
            containers = [c for c, info in self.infos.items() if info.key in start]
            activity = find_activity(self.program, containers, self.numbers)
            self._found[start] = frozenset(self.infos[c].key for c in activity.containers if c in self.infos)
        return self._found[start]
