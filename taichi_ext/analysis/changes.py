"""What a block of statements writes."""

from __future__ import annotations

from collections.abc import Iterable

from taichi_ext.program import Assign, Atomic, Body, Container, Effect, Load, Local, Statement, Update, statements
from taichi_ext.simplify.usage import assigned_locals


def written_containers(body: Body | Iterable[Statement], *, with_effects: bool = True) -> set[Container]:
    """The containers that are stored to, by statements and, if wanted, by calls that stay as they are."""
    found: set[Container] = set()
    for s in statements(tuple(body)):
        if isinstance(s, (Assign, Update, Atomic)) and isinstance(s.target, Load):
            found.add(s.target.container)
        if isinstance(s, Effect) and with_effects:
            found |= set(s.writes)
    return found


def written(body: Body | Iterable[Statement]) -> set[Local | Container]:
    """The locals and containers that change."""
    kept = tuple(body)
    return assigned_locals(kept) | written_containers(kept)
