"""Values of an iteration that its way back reads and that are kept instead of computed again."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import taichi_ext.program as ir
from taichi_ext.analysis.changes import written
from taichi_ext.program import Container, Local, Op, Read, Value

LEAST_COST = 8  # of a value that is kept
_COSTLY = frozenset(("exp", "log", "sin", "cos", "tan", "tanh", "pow", "sqrt", "rsqrt", "truediv", "asin", "acos"))
_OPERATION = 4  # the cost of one of these, against that of a load


def single_declarations(body: ir.Body) -> dict[Local, ir.Declare]:
    """The numbers that a block declares and never changes."""
    changed = written(body)
    return {s.local: s for s in body if isinstance(s, ir.Declare) and not s.local.shape and s.local not in changed}


def find_costly(body: ir.Body, given: Collection[Local], changed: Collection[Container]) -> list[ir.Declare]:
    """The declarations of a block whose values are kept, later ones first.

    Args:
        body: one iteration, forward and back.
        given: locals from around it that are the same where the iteration runs forward.
        changed: containers that may not be, such as those of adjoints.
    """
    changes = written(body) | set(changed)
    single = single_declarations(body)
    result: list[ir.Declare] = []
    roots = [v for s in ir.statements(body) if getattr(s, "local", None) not in single for v in ir.values_of(s)]
    needed = _needed(roots, single, ())
    for s in reversed(single.values()):
        if s.local not in needed or not s.local.dtype.is_real or not is_costly(s.values[0]):
            continue
        cone = cone_of(s, single)
        values = [d.values[0] for d in cone]
        reads = {local for v in values for local in v.contents.locals}
        containers = {c for v in values for c in v.contents.containers}
        is_same = all(local in single or (local in given and local not in changes) for local in reads)
        if is_same and not containers & changes and sum(map(cost_of, values)) >= LEAST_COST:
            result.append(s)
            needed = _needed(roots, single, {d.local for d in result})
    return result


def _needed(roots: list[Value], single: Mapping[Local, ir.Declare], kept: Collection[Local]) -> set[Local]:
    """The locals that some values are computed from, if some of them are kept."""
    edges = ((local, x) for local, d in single.items() if local not in kept for x in d.contents.locals)
    return set(ir.reached((local for v in roots for local in v.contents.locals), edges))


def cone_of(s: ir.Declare, single: Mapping[Local, ir.Declare]) -> list[ir.Declare]:
    """The declarations that the value of one is computed from, in order, with itself at the end."""
    used, cone = {s.local}, list[ir.Declare]()
    for local, d in reversed(list(single.items())):
        if local in used:
            used |= d.values[0].contents.locals
            cone.append(d)
    return cone[::-1]


def is_costly(v: Value) -> bool:
    """Whether a value has an operation that takes long."""
    return any(map(is_costly_operation, ir.walk(v)))


def is_costly_operation(v: Value) -> bool:
    return isinstance(v, Op) and v.name in _COSTLY


def cost_of(v: Value) -> int:
    """What it costs to compute a value, against a load."""
    nodes = ir.walk(v)
    loads = sum(isinstance(n, ir.Load) or (isinstance(n, Read) and bool(n.index)) for n in nodes)
    return loads + _OPERATION * sum(map(is_costly_operation, nodes))
