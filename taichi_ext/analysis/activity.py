"""Which locals and containers carry tangents: those that a parameter reaches through operations on real numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import taichi_ext.program as ir
from taichi_ext.program import Body, Op, Read, Statement, Value, flows, reached, statements, through, values_of
from taichi_ext.program.build import REPLACED

# The derivative of these is zero wherever it exists.
CONSTANT = frozenset(("floor", "ceil", "round", "floordiv", "random", "bit_cast", "zero", "one"))
_CARRIERS = {"stop_gradient": "", "gradient": "", "weighted": "arguments"}  # of tangents, by boundary


@dataclass(frozen=True)
class Activity:
    """The containers and locals that carry tangents."""

    locals: frozenset[ir.Local]
    containers: frozenset[ir.Container]

    def has(self, value: ir.Value) -> bool:
        return carries_tangent(value, self._is_active)

    def _is_active(self, v: Read | ir.Load) -> bool:
        return v.local in self.locals if isinstance(v, Read) else v.container in self.containers and v.dtype.is_real


def carries_tangent(value: Value, is_active: Callable[[Read | ir.Load], bool]) -> bool:
    """Whether the tangent of a value depends on one that is read."""
    return any(is_active(v) for v in through((value,), _operands) if isinstance(v, (Read, ir.Load)))


def _operands(value: ir.Value) -> tuple[ir.Value, ...]:
    """The operands on whose tangents that of a value depends."""
    match value:
        case ir.FoldedConst(source=source):
            return (source,)
        case ir.Op(name=name, args=args, dtype=dtype) if dtype.is_real and name not in CONSTANT:
            return args[1:] if name == REPLACED else args
    return ()


def _sources(values: Iterable[ir.Value]) -> set[ir.Memory]:
    """The memory on whose tangents those of values depend."""
    nodes = through(values, _operands)
    return {v.memory for v in nodes if isinstance(v, Read) or (isinstance(v, ir.Load) and v.dtype.is_real)}


def find_activity(
    program: ir.Program,
    containers: Iterable[ir.Container],
    locals_: Iterable[ir.Local] = (),
    own: Iterable[ir.Local] = (),
) -> Activity:
    """The containers and locals that carry tangents if these do at the start: a fixed point.

    ``own`` are locals with seeds of their own, such as the position of a pixel, which no container carries.
    """
    every = [s for s in statements(program.body) if not isinstance(s, ir.Effect)]
    without = {s for loop in every if isinstance(loop, ir.For) and loop.is_together for s in loop.within}
    given = (flow for s in every if s not in without for flow in flows(s, _CARRIERS))
    edges = [(source, to) for to, values in given if to.dtype.is_real for source in _sources(values)]
    names = reached((*containers, *locals_), edges).keys()
    names |= reached((*names, *own), [(a, b) for a, b in edges if isinstance(b, ir.Local) or b in names]).keys()
    locals_ = frozenset(m for m in names if isinstance(m, ir.Local))
    return Activity(locals_, frozenset(m for m in names if isinstance(m, ir.Container)))


def useful_activity(program: ir.Program, activity: Activity) -> Activity:
    """The same without locals whose tangents reach nothing: they are only compared, rounded or stopped."""
    edges: list[tuple[ir.Memory, ir.Memory]] = []
    used: set[ir.Memory] = set()
    for s in statements(program.body):
        match s:
            case ir.Declare() | ir.Store(target=ir.Read()):
                edges += ((to, source) for to, values in flows(s) for source in _sources(values))
            case ir.Boundary(kind="stop_gradient"):
                pass
            case _:
                used |= _sources(values_of(s))
    return replace(activity, locals=activity.locals.intersection(reached(used, edges)))


def returns_active(program: ir.Program, activity: Activity) -> bool:
    """Whether a kernel returns a value that carries a tangent."""
    returned = (value for s in statements(program.body) if isinstance(s, ir.Return) for value in values_of(s))
    return any(map(activity.has, returned))


def returning_bits(body: Body, activity: Activity) -> tuple[Op, Statement] | None:
    """The first cast of bits back to a real number with a tangent, and the statement; None if there is none.

    Bits that are compared, sorted by, or used as a whole number have no derivative to lose, as a cast has none.
    """

    def sources(values: Iterable[Value]) -> set[ir.Memory | Op]:
        """What bits may come from: memory, and casts of numbers with tangents."""
        nodes = list(through(values, _whole_operands))
        casts = {v for v in nodes if isinstance(v, Op) and v.name == "bit_cast" and not v.dtype.is_real}
        memory = {v.memory for v in nodes if isinstance(v, (Read, ir.Load))}
        return memory | {v for v in casts if activity.has(v.args[0])}

    everything = [(s, values_of(s)) for s in statements(body)]
    operations = ((v, s) for s, values in everything for v in through(values) if isinstance(v, Op))
    casts_back = [(v, s) for v, s in operations if v.name == "bit_cast" and v.dtype.is_real]
    if not casts_back:
        return None
    given = [flow for s, _ in everything for flow in flows(s) if not flow[0].dtype.is_real]
    casts = (x for _, values in everything for x in sources(through(values)) if isinstance(x, Op))
    holders = reached(casts, [(source, to) for to, values in given for source in sources(values)])
    return next((back for back in casts_back if not sources(back[0].args).isdisjoint(holders)), None)


def _whole_operands(value: Value) -> tuple[Value, ...]:
    """The operands whose bits may be those of a whole number."""
    if not isinstance(value, Op) or value.dtype.is_real or value.name in ir.COMPARISONS:
        return ()
    return value.args
