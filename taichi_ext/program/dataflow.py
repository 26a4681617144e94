"""What depends on what in a program: what blocks inherit, what statements give to memory, and all that is reached so.

The facts of most analyses are sets that grow by union alone, whatever the order of statements. Then a fixpoint is what
is reached in a graph, from what values are computed from to what they are given to, or back. An analysis says which
edges the graph has: through which operands of a value it goes (``through``), and which statements carry it (``flows``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from taichi_ext.program.statements import Boundary, Call, Declare, Effect, Statement, Store, bodies, values_of
from taichi_ext.program.values import Container, Local, Value, children

Memory = Local | Container
T = TypeVar("T")


def inherited(body: Iterable[Statement], fact: T, within: Callable[[Statement, T], T]) -> Iterator[tuple[Statement, T]]:
    """All statements of a block and of those in it, each with a fact; ``within`` gives that of a statement's blocks."""
    for s in body:
        yield s, fact
        for block in bodies(s):
            yield from inherited(block, within(s, fact), within)


def enclosed(body: Iterable[Statement]) -> Iterator[tuple[Statement, tuple[Statement, ...]]]:
    """All statements of a block and of those in it, each with those around it."""
    return inherited(body, tuple[Statement, ...](), lambda s, around: (*around, s))


def through(values: Iterable[Value], operands: Callable[[Value], Iterable[Value]] = children) -> Iterator[Value]:
    """The nodes that values are computed from, through the operands that count; each once."""
    pending, seen = [*values], set[Value]()
    while pending:
        value = pending.pop()
        if value not in seen:
            yield value
            seen.add(value)
            pending += operands(value)


def flows(s: Statement, carriers: Mapping[str, str] = {}) -> list[tuple[Memory, list[Value]]]:
    """The memory that a statement gives values, each with these.

    Args:
        s: the statement; the locals of a loop, and what a call with effects changes, are given nothing.
        carriers: for kinds of boundaries, which of their arguments reach the results: none for ""; else all do.
    """
    match s:
        case Declare(local=local, values=values):
            return [(local, [*values])]
        case Store(target=target, value=value):
            result = getattr(s, "result", None)
            return [(target.memory, [value]), *([] if result is None else [(result, [target])])]
        case Boundary(kind=kind) if kind in carriers:
            given = s.sources(carriers[kind]) if carriers[kind] else []
        case Call() | Boundary() | Effect():
            given = values_of(s)
        case _:
            return []
    return [(local, given) for local in s.results]


def reached(start: Iterable[T], edges: Iterable[tuple[T, T]]) -> dict[T, T]:
    """All that edges lead to from a start, and the start: each with the part of the start that it is reached from."""
    after: dict[T, list[T]] = defaultdict(list)
    for source, target in edges:
        after[source].append(target)
    result = {node: node for node in start}
    pending = [*result]
    for node in pending:  # it grows
        for target in after.get(node, ()):
            if target not in result:
                result[target] = result[node]
                pending.append(target)
    return result
