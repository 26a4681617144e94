"""Launches of a pipeline as they were last made: where nothing has changed that one depends on, it is made again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from taichi_ext import backend
from taichi_ext.boundary.registry import registry
from taichi_ext.launches import Fused


class Repetitions:
    """The launches of one run, by kernel and arguments.

    ``changes`` counts changes of which shadows there are, and of whether they are zero.
    """

    def __init__(self) -> None:
        self._launches: dict[Any, tuple[int, Fused, Callable[[], None], Any]] = {}

    def find(self, name: Any, changes: int) -> Callable[[], None] | None:
        """The launch as it was last made, where nothing has changed that it depends on."""
        if name not in self._launches or backend.is_gradient_replaced():
            return None
        before, fused, repeat, _ = self._launches[name]
        if before != changes or fused.memory.rules_version != registry.version:
            return None
        fused.refuse_changed()
        return repeat

    def keep(self, name: Any, changes: int, fused: Fused, passed: list[Any], args: Any) -> None:
        """A launch has been made; the arguments are kept alive, since the name has their identities."""
        self._launches[name] = changes, fused, backend.RepeatedLaunch(fused.kernel, passed), args
