"""The current place of a walk over a program, and whether rows that were read before may have changed there.

Only context managers move the cursor: after ``with cursor.in_loop(loop)`` it is back at its place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

from taichi_ext.analysis.loops import Loop
from taichi_ext.differentiate.forms.forms import Row
from taichi_ext.program import Container, Local, Value


class Block:
    """A block of control flow, in which its declarations are visible."""

    def __init__(self, outer: Block | None, *, is_guard: bool = False) -> None:
        self.outer = outer
        self.is_guard = is_guard  # whether it guards the index of one statement
        self.depth: int = 0 if outer is None else outer.depth + 1  # of the kernel's own block: 1
        self.declared: set[Local] = set()
        self.stopped: set[Container] = set()  # containers that count as constants in the rest of the block

    @property
    def is_kernel(self) -> bool:
        """Whether this is the block of the kernel itself, whose locals iterations of a parallel loop share."""
        return self.depth <= 1

    def stops(self, container: Container) -> bool:
        """Whether values read from a container count as constants."""
        return container in self.stopped or (self.outer is not None and self.outer.stops(container))

    def is_within(self, other: Block) -> bool:
        """Whether this is ``other``, or is nested in it."""
        block: Block | None = self
        while block is not None and block is not other:
            block = block.outer
        return block is other

    def can_name(self, atom: Local | Value) -> bool:
        block: Block | None = self
        while block is not None:
            if atom in block.declared:
                return True
            block = block.outer
        return False


class Cursor:
    """The block and the loops of the statement that is differentiated."""

    def __init__(self) -> None:
        self._block = Block(None)
        self._loops: tuple[Loop, ...] = ()

    @property
    def block(self) -> Block:
        """The block of the statement."""
        return self._block

    @property
    def loops(self) -> tuple[Loop, ...]:
        """The loops around the statement, the outermost first."""
        return self._loops

    @property
    def parallel_loop(self) -> Loop | None:
        """The parallel loop around the statement."""
        return self._loops[0] if self._loops and self._loops[0].is_parallel else None

    @contextlib.contextmanager
    def in_block(self, declared: tuple[Local, ...] = (), *, is_guard: bool = False) -> Iterator[None]:
        """Enter a block in which these locals are visible."""
        outer, self._block = self._block, Block(self._block, is_guard=is_guard)
        self._block.declared.update(declared)
        try:
            yield
        finally:
            self._block = outer

    @contextlib.contextmanager
    def in_loop(self, loop: Loop) -> Iterator[None]:
        """Enter a loop."""
        outer, self._loops = self._loops, (*self._loops, loop)
        try:
            yield
        finally:
            self._loops = outer


class Source(Protocol):
    """The tangent of a local or a container; each change gives it a new version."""

    version: int


class RowSources:
    """The sources of rows by local and container; given tangents have none, and do not change."""

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self._sources: dict[Local | Container, Source] = {}

    def add(self, what: Local | Container, source: Source) -> None:
        """Set the source for a local or container from here on."""
        self._sources[what] = source

    def is_stale(self, row: Row) -> bool:
        """Whether a row may have changed since it was read."""
        source = self._sources.get(row.source)
        entered = [loop for loop in self._cursor.loops if loop not in row.loops]
        is_later = row.version != (0 if source is None else source.version)
        return is_later or any(row.source in loop.changes for loop in entered)
