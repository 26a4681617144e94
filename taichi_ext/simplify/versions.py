"""A name for each version of a local, and none for a first value that nothing reads."""

from __future__ import annotations

import taichi_ext.program as ir
from taichi_ext.simplify.usage import assigned_locals, kept_locals


def with_versions(body: ir.Body) -> ir.Body:
    """The block in which such locals are never assigned."""
    candidates = _candidates(body) - kept_locals(body)
    return _block(body, candidates, {}) if candidates else body


def _candidates(body: ir.Body) -> set[ir.Local]:
    """Scalars that are assigned, always as statements of the block of their declaration."""
    assigned: set[ir.Local] = set()
    elsewhere: set[ir.Local] = set()

    def scan(block: ir.Body) -> None:
        own: set[ir.Local] = set()
        for s in block:
            if isinstance(s, ir.Declare) and not s.local.shape:
                own.add(s.local)
            elif isinstance(s, ir.Store) and isinstance(s.target, ir.Read):
                local = s.target.local
                assigned.add(local)
                is_simple = isinstance(s, ir.Assign) or (isinstance(s, ir.Update) and local.dtype.bits >= 32)
                if local not in own or not is_simple:
                    elsewhere.add(local)
            for inner in ir.bodies(s):
                scan(inner)

    scan(body)
    return assigned - elsewhere


def _block(body: ir.Body, candidates: set[ir.Local], outer: dict[ir.Local, ir.Local]) -> ir.Body:
    current = dict(outer)

    def now(node: ir.Value) -> ir.Value:
        found = current.get(node.local) if isinstance(node, ir.Read) else None
        return node if found is None else ir.Read(found, place=node.place)

    made: list[ir.Statement] = []
    for s in body:
        if not s.contents.locals.isdisjoint(current):
            s = ir.with_nodes(s, now)
        s = ir.with_blocks(s, lambda block: _block(block, candidates, current))
        target = s.target if isinstance(s, (ir.Assign, ir.Update)) else None
        if not isinstance(target, ir.Read) or target.local not in candidates:
            made.append(s)
            continue
        assert isinstance(s, (ir.Assign, ir.Update))
        local = target.local
        value = s.value
        if isinstance(s, ir.Update):
            value = ir.Op(s.op, (now(target), value), local.dtype, place=s.place)
        elif value.dtype != local.dtype:
            value = ir.Op("cast", (value,), local.dtype, place=s.place)
        current[local] = ir.Local(local.name, local.dtype, (), local.kind)
        made.append(ir.Declare(current[local], (value,), place=s.place))
    return tuple(made)


def with_first_values(body: ir.Body) -> ir.Body:
    """The block without declarations that the next use of the local, in the same block, overwrites."""
    return _with_first_values(body, assigned_locals(body) - kept_locals(body))


def _with_first_values(body: ir.Body, candidates: set[ir.Local]) -> ir.Body:
    made: list[ir.Statement | None] = []
    unused: dict[ir.Local, int] = {}  # declarations of which nothing has been read yet, by their places in the block
    for s in body:
        s = ir.with_blocks(s, lambda block: _with_first_values(block, candidates))
        target = _assigned(s)
        if isinstance(s, ir.Assign) and target in unused and target not in _named(s, values_only=True):
            made[unused.pop(target)] = None
            value = s.value if s.value.dtype == target.dtype else ir.Op("cast", (s.value,), target.dtype, place=s.place)
            s = ir.Declare(target, (value,), place=s.place)
        for local in _named(s) if unused else ():
            unused.pop(local, None)
        if isinstance(s, ir.Declare) and s.local in candidates and not s.local.shape and s.contents.is_pure:
            unused[s.local] = len(made)
        made.append(s)
    return tuple(s for s in made if s is not None)


def _assigned(s: ir.Statement) -> ir.Local | None:
    return s.target.local if isinstance(s, ir.Assign) and isinstance(s.target, ir.Read) else None


def _named(statement: ir.Statement, *, values_only: bool = False) -> set[ir.Local]:
    """The locals that a statement reads or assigns, blocks in it included."""
    found = statement.reads if values_only else statement.reads | statement.written
    return {memory for memory in found if isinstance(memory, ir.Local)}
