"""Which locals and containers carry tangents: those that a parameter reaches through operations on real numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import taichi_ext.program as ir
from taichi_ext.program import Body, Declare, Local, Op, Read, Statement, Value, statements, values_of, walk

# The derivative of these is zero wherever it exists.
CONSTANT = frozenset(("floor", "ceil", "round", "floordiv", "random", "bit_cast", "zero", "one"))


@dataclass(frozen=True)
class Activity:
    """The containers and locals that carry tangents."""

    locals: frozenset[ir.Local]
    containers: frozenset[ir.Container]

    def has(self, value: ir.Value) -> bool:
        """Whether a value carries a tangent."""
        pending = [value]
        while pending:
            node = pending.pop()
            if isinstance(node, ir.Read):
                if node.local in self.locals:
                    return True
            elif isinstance(node, ir.Load):
                if node.container in self.containers and node.dtype.is_real:
                    return True
            else:
                pending += _operands(node)
        return False


def _operands(value: ir.Value) -> tuple[ir.Value, ...]:
    """The operands on whose tangents that of a value depends."""
    match value:
        case ir.Known(source=source):
            return (source,)
        case ir.Op(name=name, args=args, dtype=dtype) if dtype.is_real and name not in CONSTANT:
            return args
    return ()


def find_activity(
    program: ir.Program,
    containers: Iterable[ir.Container],
    locals_: Iterable[ir.Local] = (),
    own: Iterable[ir.Local] = (),
) -> Activity:
    """The containers and locals that carry tangents if these do at the start: a fixed point.

    ``own`` are locals with seeds of their own, such as the position of a pixel, which no container carries.
    """
    everything = list(ir.statements(program.body))
    found = _closure(everything, Activity(frozenset(locals_), frozenset(containers)))
    seeded = frozenset(own) - found.locals
    if not seeded:
        return found
    return _closure(everything, replace(found, locals=found.locals | seeded), has_all_containers=True)


def useful_activity(program: ir.Program, found: Activity) -> Activity:
    """The same without locals whose tangents reach nothing: they are only compared, rounded or stopped."""
    sources: dict[ir.Local, set[ir.Local]] = {}
    reached: set[ir.Local] = set()
    for s in ir.statements(program.body):
        reads = _reads_of_tangents(ir.values_of(s))
        match s:
            case ir.Declare(local=local) | ir.Store(target=ir.Read(local=local)):
                sources.setdefault(local, set()).update(reads)
                if isinstance(s, ir.Atomic) and s.result is not None:
                    sources.setdefault(s.result, set()).add(local)
            case ir.Boundary(kind="stop_gradient"):
                pass
            case _:
                reached |= reads
    new = reached
    while new:
        new = set[ir.Local]().union(*(sources.get(local, ()) for local in new)) - reached
        reached |= new
    return replace(found, locals=found.locals & reached)


def _reads_of_tangents(values: Iterable[ir.Value]) -> set[ir.Local]:
    """The locals whose tangents those of values depend on."""
    seen, left = set[ir.Value](), list(values)
    while left:
        value = left.pop()
        if value not in seen:
            seen.add(value)
            left += _operands(value)
    return {value.local for value in seen if isinstance(value, ir.Read)}


def returns_active(program: ir.Program, activity: Activity) -> bool:
    """Whether a kernel returns a value that carries a tangent."""
    returned = (value for s in ir.statements(program.body) if isinstance(s, ir.Return) for value in ir.values_of(s))
    return any(map(activity.has, returned))


def _closure(everything: list[ir.Statement], found: Activity, *, has_all_containers: bool = False) -> Activity:
    while True:
        reached = {memory for s in everything for memory in _spread(s, found)}
        locals_ = found.locals.union(m for m in reached if isinstance(m, ir.Local))
        containers = found.containers.union(m for m in reached if isinstance(m, ir.Container))
        new = Activity(locals_, found.containers if has_all_containers else containers)
        if new == found:
            return found
        found = new


def _spread(s: ir.Statement, found: Activity) -> Iterator[ir.Local | ir.Container]:
    """The memory that gets a tangent by a statement."""
    match s:
        case ir.Declare(local=local, values=values):
            if local.dtype.is_real and any(map(found.has, values)):
                yield local
        case ir.Store(target=target, value=value):
            if target.dtype.is_real and found.has(value):
                yield target.memory
            result = s.result if isinstance(s, ir.Atomic) else None
            if result is not None and result.dtype.is_real and found.has(target):
                yield result
        case ir.Call(results=results) | ir.Boundary(results=results):
            is_constant = isinstance(s, ir.Boundary) and s.kind in ("stop_gradient", "gradient")
            is_weighted = isinstance(s, ir.Boundary) and s.kind == "weighted"
            sources = s.sources("arguments") if is_weighted else ir.values_of(s)  # type: ignore[union-attr]
            if not is_constant and any(map(found.has, sources)):
                yield from (r for r in results if r.dtype.is_real)


_COMPARISONS = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))


def returning_bits(body: Body, activity: Activity) -> tuple[Op, Statement] | None:
    """The first cast of bits back to a real number with a tangent, and the statement; None if there is none.

    Bits that are compared, sorted by, or used as a whole number have no derivative to lose, as a cast has none.
    """
    everything, holders = statements(body), set[Local | ir.Container]()  # integers that hold such bits

    def is_bits(node: Value) -> bool:
        if isinstance(node, (Read, ir.Load)):
            return node.memory in holders
        if not isinstance(node, Op) or node.dtype.is_real or node.name in _COMPARISONS:
            return False
        return (node.name == "bit_cast" and activity.has(node.args[0])) or any(map(is_bits, node.args))

    def held() -> Iterator[Local | ir.Container]:
        for s in everything:
            if isinstance(s, Declare) and any(map(is_bits, s.values)):
                yield s.local
            elif isinstance(s, ir.Store) and (is_bits(s.value) or is_bits(s.target)):
                yield from (s.target.memory, *([s.result] if isinstance(s, ir.Atomic) and s.result else []))

    while new := {memory for memory in held() if not memory.dtype.is_real} - holders:
        holders |= new
    for s in everything:
        for node in (node for value in values_of(s) for node in walk(value)):
            if isinstance(node, Op) and node.name == "bit_cast" and node.dtype.is_real and is_bits(node.args[0]):
                return node, s
    return None
