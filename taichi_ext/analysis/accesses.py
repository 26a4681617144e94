"""Which containers a program reads, whether it draws random numbers, where its local arrays are."""

from __future__ import annotations

from itertools import groupby

from taichi_ext.program import (
    Atomic,
    Body,
    Container,
    Effect,
    For,
    Load,
    Local,
    Statement,
    Update,
    declared,
    statements,
)


def read_containers(body: Body) -> set[Container]:
    """The containers of which an entry is read; what is added to an entry does not read it."""
    found: set[Container] = set()
    for s in statements(body):
        found |= s.contents.containers
        is_sum = isinstance(s, Update) and s.op in ("add", "sub")
        is_read = (isinstance(s, Update) and not is_sum) or isinstance(s, Atomic)
        if is_read and isinstance(s.target, Load):  # type: ignore[union-attr]
            found.add(s.target.container)  # type: ignore[union-attr]
    return found


def read_locals(body: Body) -> set[Local]:
    """The locals that are read."""
    return {local for s in statements(body) for local in s.contents.locals}


def draws_random_numbers(body: Body) -> bool:
    """Whether two runs may differ."""
    return any(
        not s.contents.is_pure or (isinstance(s, Effect) and getattr(s.function, "__name__", "") == "randn")
        for s in statements(body)
    )


def stages_of(body: Body) -> list[Body]:
    """The stages of a kernel, which are its loops and what stands between them."""
    numbered = groupby(enumerate(body), lambda pair: pair[0] if isinstance(pair[1], For) else -1)
    return [tuple(top for _, top in stage) for _, stage in numbered]


def stages_with_arrays(body: Body) -> int:
    """How many stages of a kernel have local arrays."""
    return sum(any(map(_has_array, statements(stage))) for stage in stages_of(body))


def _has_array(statement: Statement) -> bool:
    """Whether a statement declares a local array."""
    return any(local.shape for local in declared(statement))
