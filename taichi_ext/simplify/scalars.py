"""Vectors and matrices of which only constant entries are read and written become scalars.

So do the index vectors of ``ti.grouped``: Taichi 1.7.4 aborts where it drops ``v[I[0], I[1]][0] += 0.0``.
"""

from __future__ import annotations

import math
from dataclasses import replace

import taichi_ext.program as ir
from taichi_ext.simplify.usage import all_values

_PLAIN = {"grouped": "field", "grouped ndrange": "ndrange"}  # loops over the same, with a variable for each axis
Entries = dict[ir.Local, tuple[ir.Local, ...]]


def as_scalars(body: ir.Body) -> ir.Body:
    """The block with a scalar local for each entry, named ``v_x``, ``v_y`` or by number."""
    made = _entries(body)
    if not made:
        return body

    def entry(node: ir.Value) -> ir.Value:
        number = node.number if isinstance(node, ir.Read) and node.local in made else None
        if isinstance(node, ir.Read) and number is not None:
            return ir.Read(made[node.local][number], place=node.place)
        return node

    def change(statement: ir.Statement) -> ir.Statement | ir.Body:
        statement = ir.with_nodes(statement, entry)
        if isinstance(statement, ir.Declare) and statement.local in made:
            pairs = zip(made[statement.local], statement.values, strict=True)
            return tuple(ir.Declare(local, (v,), place=statement.place) for local, v in pairs)
        if isinstance(statement, ir.For) and statement.kind in _PLAIN and statement.variables[0] in made:
            return replace(statement, kind=_PLAIN[statement.kind], variables=made[statement.variables[0]])
        if isinstance(statement, ir.Store):
            return replace(statement, target=entry(statement.target))
        if isinstance(statement, ir.Boundary) and statement.inner:
            inner = {k: tuple(e for l in v for e in made.get(l, (l,))) for k, v in statement.inner.items()}
            return replace(statement, inner=inner)
        return statement

    return ir.mapped(body, change)


def _entries(body: ir.Body) -> Entries:
    everything = ir.statements(body)
    declared = [s.local for s in everything if isinstance(s, ir.Declare) and s.local.shape]
    groups = (s.variables[0] for s in everything if isinstance(s, ir.For) and s.kind in _PLAIN)
    loop_vectors = {v: None for v in groups if math.prod(v.shape)}.keys()
    declared += loop_vectors
    indexed: set[ir.Local] = set()
    for s in everything if declared else ():
        reads = [n for n in all_values(s) if isinstance(n, ir.Read)]
        if isinstance(s, ir.Store) and isinstance(s.target, ir.Read):
            reads.append(s.target)
            indexed |= loop_vectors & {s.target.local}  # a scalar loop variable cannot change
        indexed |= {n.local for n in reads if any(isinstance(i, ir.Value) for i in n.index)}
    return {v: tuple(_entry(v, m) for m in _marks(v.shape)) for v in declared if v not in indexed}


def _entry(local: ir.Local, mark: str) -> ir.Local:
    return ir.Local(f"{local.name}_{mark}", local.dtype, (), local.kind)


def _marks(shape: tuple[int, ...]) -> list[str]:
    if len(shape) == 1:
        return ["xyzw"[n] if shape[0] <= 4 else str(n) for n in range(shape[0])]
    separator = "" if max(shape) < 10 else "_"
    return [f"{i}{separator}{j}" for i in range(shape[0]) for j in range(shape[1])]
