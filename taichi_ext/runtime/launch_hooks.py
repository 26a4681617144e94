"""Hooks around each launch: here those of dense Jacobians; sparse ones override them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from taichi_ext.differentiate.keys import Key
from taichi_ext.launches import EnergyTarget, Fused, SparseTarget


class LaunchHooks:
    """Called by a session before and after it launches a kernel."""

    shadow: Callable[[Key], Any]

    def clear_rows(self, key: Key, rows: Any) -> None:
        """Python has stored to entries: constants from now on. Those of an array are given by rows of its region."""
        self.shadow(key).clear_rows(rows)

    def _variant(self, outer: Mapping[Key, Key]) -> Any:
        """What tells kernels apart that are traced from the same kernel."""
        return None

    def _sparse_target(self, outer: Mapping[Key, Key]) -> SparseTarget | None:
        """The columns and outputs of a sparse Jacobian."""
        return None

    def _energy_target(self, outer: Mapping[Key, Key]) -> EnergyTarget | None:
        """What second derivatives are of."""
        return None

    def _accept(self, fused: Fused, outer: Mapping[Key, Key]) -> None:
        """Take note of what a trace has found out, before the launch."""

    def _stream(self, fused: Fused, name: Any) -> Any:
        raise AssertionError(name)

    def _run(self, fused: Fused, args: tuple[Any, ...], passed: list[Any]) -> Any:
        """Run the kernel."""
        return fused.launch(args, passed)

    def _collect(self, fused: Fused, outer: Mapping[Key, Key]) -> None:
        """Take what a launch has written."""
