"""Which containers a program reads, and whether it draws random numbers."""

from __future__ import annotations

from collections.abc import Iterator

from taichi_ext.program import (
    Atomic,
    Body,
    Container,
    Effect,
    Load,
    Local,
    Op,
    Read,
    Update,
    Value,
    statements,
)
from taichi_ext.simplify.usage import all_values


def _values(body: Body) -> Iterator[Value]:
    for s in statements(body):
        yield from all_values(s)


def read_containers(body: Body) -> set[Container]:
    """The containers of which an entry is read; what is added to an entry does not read it."""
    found = {v.container for v in _values(body) if isinstance(v, Load)}
    for s in statements(body):
        is_sum = isinstance(s, Update) and s.op in ("add", "sub")
        is_read = (isinstance(s, Update) and not is_sum) or isinstance(s, Atomic)
        if is_read and isinstance(s.target, Load):  # type: ignore[union-attr]
            found.add(s.target.container)  # type: ignore[union-attr]
    return found


def read_locals(body: Body) -> set[Local]:
    """The locals that are read."""
    return {v.local for v in _values(body) if isinstance(v, Read)}


def draws_random_numbers(body: Body) -> bool:
    """Whether two runs may differ."""
    if any(isinstance(v, Op) and v.name == "random" for v in _values(body)):
        return True
    return any(isinstance(s, Effect) and getattr(s.function, "__name__", "") == "randn" for s in statements(body))
