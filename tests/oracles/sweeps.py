"""Cases of tests, of which whole folders run some: the others are more of their kind, for sweeps."""

from itertools import groupby

import pytest


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
