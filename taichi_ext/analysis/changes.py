"""What a block of statements writes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from taichi_ext.program import Assign, Atomic, Body, Container, Effect, Load, Statement, Update, statements
from taichi_ext.simplify.usage import assigned_locals


def written_containers(body: Body | Iterable[Statement]) -> set[Container]:
    """The containers that are stored to, in whatever way."""
    found: set[Container] = set()
    for s in statements(tuple(body)):
        if isinstance(s, (Assign, Update, Atomic)) and isinstance(s.target, Load):
            found.add(s.target.container)
        if isinstance(s, Effect):
            found |= {a for a in _flat(s.args) if isinstance(a, Container)}
    return found


def written(body: Body | Iterable[Statement]) -> set[Any]:
    """The locals and containers that change."""
    kept = tuple(body)
    return assigned_locals(kept) | written_containers(kept)


def _flat(x: Any) -> Iterable[Any]:
    if isinstance(x, (tuple, list)):
        for e in x:
            yield from _flat(e)
    else:
        yield x
