"""Cases of tests, of which whole folders run some: the others are more of their kind, for sweeps."""

from collections.abc import Iterable
from typing import Any

import pytest


def with_sweep(cases: Iterable[Any], *swept: Any) -> list[Any]:
    """The cases, some of which only sweeps run."""
    cases = list(cases)
    assert all(case in cases for case in swept), "a case has another name"
    return [
        pytest.param(*(c if isinstance(c, tuple) else (c,)), marks=pytest.mark.sweep) if c in swept else c
        for c in cases
    ]
