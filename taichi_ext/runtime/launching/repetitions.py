"""Repeated launches: between calls of a prepared form, and within one run of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from taichi_ext import backend
from taichi_ext.boundary.registry import registry
from taichi_ext.differentiate.forms.keys import Key
from taichi_ext.launches import Fused


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
        self._repeated = backend.RepeatedLaunch(fused.kernel, list(passed)) if passed is not None else None

    def is_current(self) -> bool:
        """Whether its rules are those of the registry; raises if a Python number that it reads has changed."""
        if self.fused.memory.rules_version != registry.version:
            return False
        self.fused.check_unchanged()
        return True

    def launch(self, args: tuple[object, ...], array: Callable[[Key], object]) -> None:
        """Launch it; ``array`` gives the arrays that are not kept."""
        fused, kept = self.fused, self.kept
        given = [kept[key] if key in kept else array(key) for key in fused.shadows]
        if self._repeated is None:
            fused.launch(args, given)
            if not backend.is_plain_call(fused.primal):
                return
        keyed = zip(fused.shadows, given, strict=True)
        if self._repeated is None:
            same = [a if key in kept else None for key, a in keyed]
            self._repeated = backend.RepeatedLaunch(fused.kernel, same)
        else:
            self._repeated(None if key in kept else a for key, a in keyed)

    def again(self) -> None:
        """Launch it with the arguments of the launch before."""
        assert self._repeated is not None
        self._repeated()
