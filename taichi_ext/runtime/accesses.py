"""Which containers a run has read and written, and which parameters it has overwritten before anything read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from taichi_ext.differentiate.keys import Key
from taichi_ext.labels import Label
from taichi_ext.launches import PipelineArgument, container_key
from taichi_ext.runtime.tangents import Tangents


class Accesses:
    """The containers that the launches and stores of one run have read and written.

    Attributes:
        read: containers, and numbers by their keys.
        written: containers.
        overwritten: parameters that nothing has read and of whose columns nothing is left.
        params: the names of the parameters that have columns in this run.
    """

    def __init__(self, params: Mapping[Key, Label | str], tangents: Tangents) -> None:
        self.params = params
        self.read, self.written = set[Key](), set[Key]()
        self.overwritten = set[Key]()
        self._tangents = tangents

    def note(self, read: Set[Key], written: Set[Key]) -> None:
        """A kernel has read and written containers."""
        self.read |= read
        self.written |= written
        self.note_overwritten(written)

    def note_passed(self, names: Iterable[str]) -> None:
        """Arguments of a pipeline, passed by value, were given to kernels."""
        self.read |= {PipelineArgument(name) for name in names}

    def note_overwritten(self, containers: Iterable[Key]) -> None:
        """Containers have been stored to."""
        stored = set(containers)
        for key in self.params:
            container = container_key(key)
            if container not in stored or container in self.read or key in self.overwritten:
                continue
            if self._tangents.is_stored(key) and not self._tangents.values(key).any():
                self.overwritten.add(key)
