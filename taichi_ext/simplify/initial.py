"""A local whose first value nothing reads is declared with its second."""

from __future__ import annotations

from taichi_ext.program import Assign, Body, Declare, Local, Op, Read, Statement, Store, bodies, statements, with_bodies
from taichi_ext.simplify.usage import assigned_locals, kept_locals


def with_first_values(body: Body) -> Body:
    """The block without declarations that the next use of the local, in the same block, overwrites."""
    return _block(body, assigned_locals(body) - kept_locals(body))


def _block(body: Body, candidates: set[Local]) -> Body:
    made: list[Statement | None] = []
    unused: dict[Local, int] = {}  # declarations of which nothing has been read yet, by their places in the block
    for s in body:
        if bodies(s):
            s = with_bodies(s, tuple(_block(inner, candidates) for inner in bodies(s)))
        target = _assigned(s)
        if isinstance(s, Assign) and target in unused and target not in _named(s, values_only=True):
            made[unused.pop(target)] = None
            value = s.value if s.value.dtype == target.dtype else Op("cast", (s.value,), target.dtype, place=s.place)
            s = Declare(target, (value,), place=s.place)
        for local in _named(s) if unused else ():
            unused.pop(local, None)
        if isinstance(s, Declare) and s.local in candidates and not s.local.shape and s.contents.is_pure:
            unused[s.local] = len(made)
        made.append(s)
    return tuple(s for s in made if s is not None)


def _assigned(s: Statement) -> Local | None:
    return s.target.local if isinstance(s, Assign) and isinstance(s.target, Read) else None


def _named(statement: Statement, *, values_only: bool = False) -> set[Local]:
    """The locals that a statement reads or assigns, blocks in it included."""
    found: set[Local] = set()
    for s in statements((statement,)):
        found |= s.contents.locals
        if not values_only and isinstance(s, Store) and isinstance(s.target, Read):
            found.add(s.target.local)
    return found
