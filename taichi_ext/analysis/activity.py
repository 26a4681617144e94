"""Which locals and containers carry tangents: those that a parameter reaches through operations on real numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from taichi_ext.program import (
    Assign,
    Atomic,
    Boundary,
    Call,
    Const,
    Container,
    Declare,
    Known,
    Load,
    Local,
    Op,
    Program,
    Read,
    Return,
    Statement,
    Update,
    Value,
    statements,
    values_of,
)

# The derivative of these is zero wherever it exists.
CONSTANT = frozenset(("floor", "ceil", "round", "floordiv", "random", "bit_cast", "zero", "one"))


@dataclass(frozen=True)
class Activity:
    """The containers and locals that carry tangents."""

    locals: frozenset[Local]
    containers: frozenset[Container]

    def has(self, value: Value) -> bool:
        """Whether a value carries a tangent."""
        match value:
            case Const():
                return False
            case Known(source=source):
                return self.has(source)
            case Read(local=local):
                return local in self.locals
            case Load(container=container):
                return container in self.containers and container.dtype.is_real
            case Op(name=name, args=args, dtype=dtype):
                return dtype.is_real and name not in CONSTANT and any(map(self.has, args))
        return False


def find_activity(
    program: Program, containers: Iterable[Container], locals_: Iterable[Local] = (), own: Iterable[Local] = ()
) -> Activity:
    """The containers and locals that carry tangents if these do at the start: a fixed point.

    ``own`` are locals with a tangent of their own, such as the position of a pixel: no container takes it on.
    """
    everything = list(statements(program.body))
    found = _closure(everything, Activity(frozenset(locals_), frozenset(containers)))
    seeded = frozenset(own) - found.locals
    if not seeded:
        return found
    return _closure(everything, replace(found, locals=found.locals | seeded), has_all_containers=True)


def returns_active(program: Program, activity: Activity) -> bool:
    """Whether a kernel returns a value that carries a tangent."""
    returned = (value for s in statements(program.body) if isinstance(s, Return) for value in values_of(s))
    return any(map(activity.has, returned))


def _closure(everything: list[Statement], found: Activity, *, has_all_containers: bool = False) -> Activity:
    while True:
        locals_now, containers_now = set(found.locals), set(found.containers)
        for statement in everything:
            _spread(statement, found, locals_now, containers_now)
        new = Activity(frozenset(locals_now), found.containers if has_all_containers else frozenset(containers_now))
        if new == found:
            return found
        found = new


def _spread(s: Statement, found: Activity, locals_: set[Local], containers: set[Container]) -> None:
    match s:
        case Declare(local=local, values=values):
            if local.dtype.is_real and any(map(found.has, values)):
                locals_.add(local)
        case Assign(target=target, value=value) | Update(target=target, value=value):
            _store(target, found.has(value), locals_, containers)
        case Atomic(target=target, value=value, result=result):
            _store(target, found.has(value), locals_, containers)
            if result is not None and result.dtype.is_real and found.has(target):
                locals_.add(result)
        case Call(results=results):
            if any(map(found.has, values_of(s))):
                locals_.update(r for r in results if r.dtype.is_real)
        case Boundary(kind=kind, results=results):
            if kind not in ("stop_gradient", "gradient") and any(map(found.has, values_of(s))):
                locals_.update(r for r in results if r.dtype.is_real)


def _store(target: Read | Load, is_active: bool, locals_: set[Local], containers: set[Container]) -> None:
    if not is_active or not target.dtype.is_real:
        return
    if isinstance(target, Read):
        locals_.add(target.local)
    else:
        containers.add(target.container)
