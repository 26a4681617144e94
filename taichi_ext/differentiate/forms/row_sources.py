"""Owners of rows of tangents, and whether a row that was read may have changed since."""

from __future__ import annotations

from typing import Protocol

from taichi_ext.differentiate.forms.cursor import Cursor
from taichi_ext.differentiate.forms.forms import Row
from taichi_ext.program import Container, Local


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
