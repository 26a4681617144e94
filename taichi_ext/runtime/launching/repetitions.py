"""Repeated launches: between calls of a prepared form, and within one run of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from taichi_ext import backend
from taichi_ext.boundary.registry import registry
from taichi_ext.launches import Fused
from taichi_ext.program.keys import Key
from taichi_ext.runtime.launching.fused_kernels import is_current


class Repetition:
    """One kernel, launched repeatedly with arrays of the same types; the launch is set up once.

    Args:
        fused: the kernel.
        kept: the arrays that are the same in each launch, by key; the dict may grow until the first launch.
        passed: all arguments of an earlier launch, if none of them changes; None before one.
    """

    def __init__(self, fused: Fused, kept: dict[Key, Any], passed: Sequence[object] | None = None) -> None:
        self.fused = fused
        self.kept = kept
        self._repeated: backend.RepeatedLaunch | None = None
        self._changing: list[tuple[int, Key]] = []  # positions and keys of the arrays that are not kept
        if passed is not None:
            self._repeated = backend.RepeatedLaunch(fused.kernel, dict(enumerate(passed)))

    def is_current(self) -> bool:
        """Whether no rule has been registered since, and the kernel is current, see ``fused_kernels.is_current``."""
        return self.fused.memory.rules_version == registry.version and is_current(self.fused)

    def launch(self, args: tuple[object, ...], array: Callable[[Key], object]) -> None:
        """Launch it; ``array`` gives the arrays that are not kept."""
        if self._repeated is not None:
            self._repeated({position: array(key) for position, key in self._changing})
            return
        fused, kept = self.fused, self.kept
        fused.launch(args, [kept[key] if key in kept else array(key) for key in fused.shadows])
        if backend.is_plain_call(fused.primal):
            numbered = list(enumerate(fused.shadows))
            self._changing = [(position, key) for position, key in numbered if key not in kept]
            same = {position: kept[key] for position, key in numbered if key in kept}
            self._repeated = backend.RepeatedLaunch(fused.kernel, same)

    def again(self) -> None:
        """Launch it with the arguments of the launch before."""
        assert self._repeated is not None
        self._repeated({})
