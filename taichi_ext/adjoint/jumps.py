"""One iteration of a loop without ``break`` and ``continue``: what follows a jump stands in branches."""

from __future__ import annotations

from dataclasses import replace

import taichi_ext.program as ir
from taichi_ext.analysis.loops import leaves
from taichi_ext.program import I32, Local, Read
from taichi_ext.program.build import literal, operation


def without_jumps(body: ir.Body) -> ir.Body:
    """The body of a loop as it runs once; a flag tells the blocks around whether it was left."""
    if not leaves(body):
        return body
    goes_on = Local("go", I32, (), "user")
    return (ir.Declare(goes_on, (literal(1, I32),)), *_without(body, goes_on))


def _without(body: ir.Body, goes_on: Local) -> ir.Body:
    made: list[ir.Statement] = []
    stop = ir.Assign(Read(goes_on), literal(0, I32))
    for n, s in enumerate(body):
        rest = body[n + 1 :]
        if isinstance(s, ir.Jump):
            return (*made, stop)
        if not isinstance(s, ir.If) or not leaves((s,)):
            made.append(s)
        elif s.then and isinstance(s.then[-1], ir.Jump) and not leaves(s.then[:-1]) and not leaves(s.orelse):
            # what follows runs in the other case alone
            return (*made, replace(s, then=(*s.then[:-1], stop), orelse=(*s.orelse, *_without(rest, goes_on))))
        else:
            made.append(replace(s, then=_without(s.then, goes_on), orelse=_without(s.orelse, goes_on)))
            after = _without(rest, goes_on)
            return (*made, ir.If(operation("eq", Read(goes_on), 1), after)) if after else tuple(made)
    return tuple(made)
