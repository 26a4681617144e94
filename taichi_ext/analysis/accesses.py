"""Which containers a program reads, whether it draws random numbers, where its local arrays are."""

from __future__ import annotations

from itertools import groupby

import taichi_ext.program as ir


def read_containers(body: ir.Body) -> set[ir.Container]:
    """The containers of which an entry is read; adding to an entry does not read it."""
    found: set[ir.Container] = set()
    for s in ir.statements(body):
        found |= s.contents.containers
        is_sum = isinstance(s, ir.Update) and s.op in ("add", "sub")
        is_read = (isinstance(s, ir.Update) and not is_sum) or isinstance(s, ir.Atomic)
        if is_read and isinstance(s.target, ir.Load):  # type: ignore[union-attr]
            found.add(s.target.container)  # type: ignore[union-attr]
    return found


def read_locals(body: ir.Body) -> set[ir.Local]:
    """The locals that are read."""
    return {local for s in ir.statements(body) for local in s.contents.locals}


def draws_random_numbers(body: ir.Body) -> bool:
    """Whether two runs may differ."""
    return any(
        not s.contents.is_pure or (isinstance(s, ir.Effect) and getattr(s.function, "__name__", "") == "randn")
        for s in ir.statements(body)
    )


def stages_of(body: ir.Body) -> list[ir.Body]:
    """The stages of a kernel: its loops, and the statements between them."""
    numbered = groupby(enumerate(body), lambda pair: pair[0] if isinstance(pair[1], ir.For) else -1)
    return [tuple(top for _, top in stage) for _, stage in numbered]


def stages_with_arrays(body: ir.Body) -> int:
    """How many stages of a kernel have local arrays."""
    return sum(any(map(_has_array, ir.statements(stage))) for stage in stages_of(body))


def _has_array(statement: ir.Statement) -> bool:
    """Whether a statement declares a local array."""
    return any(local.shape for local in ir.declared(statement))
