"""Cases of tests, of which whole folders run some: the others are more of their kind, for sweeps, of which ``.ci/run`` draws some."""

import hashlib
import random
from itertools import groupby
from pathlib import Path

import pytest

import taichi_ext


def mark_most(items: list[pytest.Item]) -> None:
    """Mark as sweeps the cases of tests with ``mostly_sweep``, but those that it names, or every n-th."""
    marked = [
        item for item in items if item.get_closest_marker("mostly_sweep") and not item.get_closest_marker("sweep")
    ]
    for test, group in groupby(marked, lambda item: item.nodeid.partition("[")[0]):
        cases = list(group)
        mark = cases[0].get_closest_marker("mostly_sweep")
        names = [case.callspec.id for case in cases]
        kept = mark.args or names[:: mark.kwargs["every"]]
        if missing := set(kept) - set(names):
            raise pytest.UsageError(f"{test} has no cases {sorted(missing)}, which mostly_sweep names")
        for case, name in zip(cases, names, strict=True):
            if name not in kept:
                case.add_marker("sweep")


def drawn(items: list[pytest.Item], count: int) -> list[pytest.Item]:
    """All that are no sweeps, and of every ``count`` sweeps that follow one another one, by the text of the package.

    The same package draws the same sweeps everywhere, and a changed one others.
    """
    text = hashlib.sha256()
    for path in sorted(Path(taichi_ext.__file__).parent.rglob("*.py")):
        text.update(path.read_bytes())
    draw = random.Random(text.hexdigest())
    sweeps = [item for item in items if item.get_closest_marker("sweep")]
    chosen = {draw.choice(sweeps[n : n + count]) for n in range(0, len(sweeps), count)}
    return [item for item in items if item in chosen or not item.get_closest_marker("sweep")]
