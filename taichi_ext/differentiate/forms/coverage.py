"""How a kernel treats the shadows of containers: which it reads, which it writes in full, which must be zero before."""

from __future__ import annotations

from taichi_ext.program import Container


class Coverage:
    """The findings of one walk.

    Attributes:
        read: containers whose tangents have been read.
        covered: those of which all tangents are written, whatever they were.
        assumed_zero: those whose tangents are taken to be zero at the start.
    """

    def __init__(self) -> None:
        self.read: set[Container] = set()
        self.covered: set[Container] = set()
        self.assumed_zero: set[Container] = set()
        self._in_loop: set[Container] = set()

    def note_covered(self, container: Container) -> None:
        """The loop that is walked over writes all tangents of a container, which nothing has accessed before."""
        self._in_loop.add(container)

    def end_loop(self) -> None:
        """At the end of a parallel loop: what it covers need not be cleared before, unless it reads it as well."""
        self.covered |= self._in_loop - self.read
        self._in_loop.clear()
