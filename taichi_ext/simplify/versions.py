"""A local that is only assigned in the block of its declaration gets a new local for each version."""

from __future__ import annotations

from taichi_ext.program import (
    Assign,
    Atomic,
    Body,
    Declare,
    Local,
    Op,
    Read,
    Statement,
    Update,
    Value,
    bodies,
    rebuilt,
    with_bodies,
    with_values,
)
from taichi_ext.simplify.usage import kept_locals


def with_versions(body: Body) -> Body:
    """The block in which such locals are never assigned."""
    candidates = _candidates(body) - kept_locals(body)
    return _block(body, candidates, {}) if candidates else body


def _candidates(body: Body) -> set[Local]:
    """Scalars that are assigned, always as statements of the block of their declaration."""
    assigned: set[Local] = set()
    elsewhere: set[Local] = set()

    def scan(block: Body) -> None:
        own: set[Local] = set()
        for s in block:
            if isinstance(s, Declare) and not s.local.shape:
                own.add(s.local)
            elif isinstance(s, (Assign, Update, Atomic)) and isinstance(s.target, Read):
                local = s.target.local
                assigned.add(local)
                is_simple = isinstance(s, Assign) or (isinstance(s, Update) and local.dtype.bits >= 32)
                if local not in own or not is_simple:
                    elsewhere.add(local)
            for inner in bodies(s):
                scan(inner)

    scan(body)
    return assigned - elsewhere


def _block(body: Body, candidates: set[Local], outer: dict[Local, Local]) -> Body:
    current = dict(outer)

    def now(node: Value) -> Value:
        found = current.get(node.local) if isinstance(node, Read) else None
        return node if found is None else Read(found, place=node.place)

    made: list[Statement] = []
    for s in body:
        memo: dict[Value, Value] = {}
        if not s.contents.locals.isdisjoint(current):
            s = with_values(s, lambda v, memo=memo: rebuilt(v, now, memo))
        if bodies(s):
            s = with_bodies(s, tuple(_block(block, candidates, current) for block in bodies(s)))
        target = s.target if isinstance(s, (Assign, Update)) else None
        if not isinstance(target, Read) or target.local not in candidates:
            made.append(s)
            continue
        assert isinstance(s, (Assign, Update))
        local = target.local
        value = s.value
        if isinstance(s, Update):
            value = Op(s.op, (now(target), value), local.dtype, place=s.place)
        elif value.dtype != local.dtype:
            value = Op("cast", (value,), local.dtype, place=s.place)
        current[local] = Local(local.name, local.dtype, (), local.kind)
        made.append(Declare(current[local], (value,), place=s.place))
    return tuple(made)
