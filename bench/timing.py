"""Time several methods of one result side by side, so that whatever else the machine does reaches all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

ROUNDS = 25
# A call that takes longer than this is not repeated more than once.
LONG = 5.0


@dataclass(frozen=True)
class Timing:
    """Seconds of one method: its first call, compilation included, and the median of the later ones."""

    first: float
    later: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return median(self.later) if self.later else self.first


def time_first(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one call."""
    start = clock()
    call()
    return clock() - start


def time_in_turn(
    calls: Mapping[str, Callable[[], object]],
    first: Mapping[str, float],
    seconds: float = 2.0,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Call every method in turn, round after round.

    Args:
        calls: what is timed, by name; each has been called once already.
        first: seconds of those first calls.
        seconds: how long each method may take in all; one that is faster than that has at least 3 rounds.
        clock: gives the time in seconds.
    """
    timings = {name: Timing(first[name]) for name in calls}
    spent = dict.fromkeys(calls, 0.0)
    for n in range(ROUNDS):
        for name, call in calls.items():
            is_long = n > 0 and timings[name].later[0] > LONG
            if len(timings[name].later) < n or is_long or (n >= 3 and spent[name] > seconds):
                continue
            # an untimed call first, where that is cheap: the call before was another library's, whose data and threads
            # are still about
            if first[name] < LONG if n == 0 else timings[name].later[0] < 0.2:
                spent[name] += time_first(call)
            timings[name].later.append(time_first(call, clock))
            spent[name] += timings[name].later[-1]
    return timings
