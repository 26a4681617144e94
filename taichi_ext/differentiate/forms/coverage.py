"""The shadows of containers that a kernel reads, those it overwrites in full, and those it needs to be zero."""

from __future__ import annotations

from taichi_ext.program import Container


class Coverage:
    """The findings of one walk.

    Attributes:
        read: containers whose tangents have been read.
        covered: containers all of whose tangents are overwritten.
        assumed_zero: containers whose tangents are assumed to be zero at the start.
    """

    def __init__(self) -> None:
        self.read: set[Container] = set()
        self.covered: set[Container] = set()
        self.assumed_zero: set[Container] = set()
        self._in_loop: set[Container] = set()

    def note_covered(self, container: Container) -> None:
        """Note that the current loop writes all tangents of a container that nothing has accessed before."""
        self._in_loop.add(container)

    def end_loop(self) -> None:
        """At the end of a parallel loop, note the containers that it covers and does not read."""
        self.covered |= self._in_loop - self.read
        self._in_loop.clear()
