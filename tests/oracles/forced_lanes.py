"""Lets the loops of tests, which are short and do little, run in lanes."""

import pytest

from taichi_ext import backend
from taichi_ext.schedule import lanes, loops
from taichi_ext.schedule.lanes import CannotError, Lanes, find_lanes


class Decisions(list[Lanes | None]):
    """How each loop that was looked at runs in lanes, None of one that does not; and why not."""

    def __init__(self) -> None:
        super().__init__()
        self.reasons: list[str] = []


def force_lanes(monkeypatch: pytest.MonkeyPatch, **limits: object) -> Decisions:
    """Run all loops in lanes that can be, in this test; ``limits`` of ``schedule.lanes``."""
    if backend.stores_by_column():
        pytest.skip("loops run in lanes where the rows of J come one after the other in memory, not on a GPU")
    found = Decisions()

    def noted(*args: object) -> Lanes:
        found.append(None)
        try:
            found[-1] = find_lanes(*args)  # type: ignore[arg-type]
        except CannotError as reason:
            found.reasons.append(str(reason))
            raise
        return found[-1]

    set_limits(monkeypatch, **limits)
    monkeypatch.setattr(loops, "find_lanes", noted)
    return found


def set_limits(monkeypatch: pytest.MonkeyPatch, **limits: object) -> None:
    """Let short loops that do little run in lanes."""
    changed = {"MOST_REPEATED": 1.0, "LEAST_WORK": 0, "LEAST_TOTAL": 0, "VECTORS_OF_FLOAT64": False, **limits}
    for name, value in changed.items():
        monkeypatch.setattr(lanes, name, value)
