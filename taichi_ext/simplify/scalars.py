"""Vectors and matrices of which only constant entries are read and written become scalars.

So do the index vectors of ``ti.grouped``: Taichi 1.7.4 aborts where it drops ``v[I[0], I[1]][0] += 0.0``.
"""

from __future__ import annotations

import math
from dataclasses import replace

from taichi_ext.program import (
    Assign,
    Atomic,
    Body,
    Boundary,
    Declare,
    For,
    Local,
    Read,
    Statement,
    Update,
    Value,
    mapped,
    rebuilt,
    statements,
    with_values,
)
from taichi_ext.simplify.usage import Store, all_values

_PLAIN = {"grouped": "field", "grouped ndrange": "ndrange"}  # loops over the same, with a variable for each axis
Entries = dict[Local, tuple[Local, ...]]


def as_scalars(body: Body) -> Body:
    """The block with a scalar local for each entry, named ``v_x``, ``v_y`` or by number."""
    made = _entries(body)
    if not made:
        return body
    memo: dict[Value, Value] = {}

    def entry(node: Value) -> Value:
        if isinstance(node, Read) and node.local in made:
            return Read(made[node.local][_flat(node)], place=node.place)
        return node

    def change(statement: Statement) -> Statement | Body:
        if isinstance(statement, Declare) and statement.local in made:
            values = [rebuilt(v, entry, memo) for v in statement.values]
            pairs = zip(made[statement.local], values, strict=True)
            return tuple(Declare(local, (v,), place=statement.place) for local, v in pairs)
        statement = with_values(statement, lambda v: rebuilt(v, entry, memo))
        if isinstance(statement, For) and statement.kind in _PLAIN and statement.variables[0] in made:
            return replace(statement, kind=_PLAIN[statement.kind], variables=made[statement.variables[0]])
        if isinstance(statement, (Assign, Update, Atomic)):
            return replace(statement, target=entry(statement.target))
        if isinstance(statement, Boundary) and statement.inner:
            inner = {k: tuple(e for l in v for e in made.get(l, (l,))) for k, v in statement.inner.items()}
            return replace(statement, inner=inner)
        return statement

    return mapped(body, change)


def _entries(body: Body) -> Entries:
    everything = statements(body)
    declared = [s.local for s in everything if isinstance(s, Declare) and s.local.shape]
    groups = (s.variables[0] for s in everything if isinstance(s, For) and s.kind in _PLAIN)
    loop_vectors = {v: None for v in groups if math.prod(v.shape)}.keys()
    declared += loop_vectors
    indexed: set[Local] = set()
    for s in everything if declared else ():
        reads = [n for n in all_values(s) if isinstance(n, Read)]
        if isinstance(s, Store) and isinstance(s.target, Read):
            reads.append(s.target)
            indexed |= loop_vectors & {s.target.local}  # a scalar loop variable cannot change
        indexed |= {n.local for n in reads if any(isinstance(i, Value) for i in n.index)}
    return {v: tuple(_entry(v, m) for m in _marks(v.shape)) for v in declared if v not in indexed}


def _entry(local: Local, mark: str) -> Local:
    return Local(f"{local.name}_{mark}", local.dtype, (), local.kind)


def _marks(shape: tuple[int, ...]) -> list[str]:
    if len(shape) == 1:
        return ["xyzw"[n] if shape[0] <= 4 else str(n) for n in range(shape[0])]
    separator = "" if max(shape) < 10 else "_"
    return [f"{i}{separator}{j}" for i in range(shape[0]) for j in range(shape[1])]


def _flat(read: Read) -> int:
    index: tuple[int, ...] = read.index  # type: ignore[assignment]
    return index[0] if len(index) == 1 else index[0] * read.local.shape[1] + index[1]
