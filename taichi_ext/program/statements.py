"""Statements of a program: a closed set of immutable kinds, and the program that they make up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from taichi_ext.cached import cached_property
from taichi_ext.program.values import (
    F32,
    I32,
    Container,
    Contents,
    Format,
    Group,
    Load,
    Local,
    Place,
    Read,
    Struct,
    Tensor,
    Type,
    Value,
    children,
    entries,
    joined_contents,
    rebuilt,
    regrouped,
    with_children,
)

Target = Read | Load


@dataclass(frozen=True, eq=False)
class Statement:
    """One step; ``place`` is where it stands in the user's source."""

    place: Place | None = field(default=None, kw_only=True, repr=False)

    @cached_property
    def contents(self) -> Contents:
        """The parts of its expressions, as ``values_of`` gives them."""
        return joined_contents(values_of(self))

    @cached_property
    def within(self) -> tuple[Statement, ...]:
        """All statements in its blocks, in the order of the text."""
        return tuple(statements(s for body in bodies(self) for s in body))

    @cached_property
    def reads(self) -> frozenset[Local | Container]:
        """The locals and containers that it reads, in its blocks too."""
        parts = [s.contents for s in (self, *self.within)]
        return frozenset().union(*(p.locals for p in parts), *(p.containers for p in parts))

    @cached_property
    def written(self) -> frozenset[Local | Container]:
        """The locals and containers whose numbers, or their tangents, may be others after it, in its blocks too."""
        names: set[Local | Container] = set()
        for s in (self, *self.within):
            if isinstance(s, Store):
                names.add(s.target.memory)
            elif isinstance(s, Effect):
                names.update(s.writes, s.stopped)
        return frozenset(names)


Body = tuple[Statement, ...]


@dataclass(frozen=True, eq=False)
class Declare(Statement):
    """A local comes into being: one value for a scalar, else one for each entry."""

    local: Local
    values: tuple[Value, ...]


class Store(Statement):
    """A statement that gives its target a value: ``Assign``, ``Update`` or ``Atomic``."""

    target: Target
    value: Value


@dataclass(frozen=True, eq=False)
class Assign(Store):
    """``target = value``, converted to the type of the target."""

    target: Target
    value: Value


@dataclass(frozen=True, eq=False)
class Update(Store):
    """``target op= value``, ``op`` being ``add``, ``sub``, ``mul`` ...; Taichi makes sums and bits atomic.

    Locals are only updated by ``add``, ``sub``, ``bit_and``, ``bit_or`` and ``bit_xor``, with a value of their type:
    one that is declared at the top of a kernel is shared by the iterations of a parallel loop.
    Updates of one ``group`` that come one after the other add a vector to some entries of a container.
    """

    target: Target
    op: str
    value: Value
    group: object = None


@dataclass(frozen=True, eq=False)
class Atomic(Store):
    """``result = function(target, value)``, ``function`` being ``atomic_add``, ``atomic_max`` ..."""

    function: str
    target: Target
    value: Value
    result: Local | None = None


@dataclass(frozen=True, eq=False)
class If(Statement):
    condition: Value
    then: Body
    orelse: Body = ()


@dataclass(frozen=True, eq=False)
class For(Statement):
    """A loop; at the top of a kernel Taichi runs it in parallel.

    ``kind`` and ``domain`` are one of ``range`` (one to three values), ``ndrange`` (an end or a pair of bounds for
    each variable), ``grouped ndrange``, ``field`` and ``grouped`` (a container, or an object of Taichi's).
    """

    kind: str
    variables: tuple[Local, ...]
    domain: tuple[Any, ...]
    body: Body
    config: Mapping[str, Any] = field(default_factory=dict)  # for ti.loop_config
    is_function: bool = False  # whether its body is a function of its own: see ``schedule.lanes``
    # whether its few iterations go through the body together, without derivatives: see ``schedule.loops``
    is_together: bool = False


@dataclass(frozen=True, eq=False)
class While(Statement):
    """``while condition``; ``while True`` where there is none."""

    condition: Value | None
    body: Body


@dataclass(frozen=True, eq=False)
class Jump(Statement):
    """``break`` or ``continue``."""

    kind: str


@dataclass(frozen=True, eq=False)
class Return(Statement):
    values: tuple[Group, ...]


@dataclass(frozen=True, eq=False)
class Call(Statement):
    """``results = function(*args)``: a function of Taichi's library without side effects, such as ``svd``.

    Results may be vectors and matrices.
    """

    function: str
    args: tuple[Any, ...]  # groups, types, Python values
    results: tuple[Local, ...]


@dataclass(frozen=True, eq=False)
class Effect(Statement):
    """A call without tangents that stays as it is, in its place: print, assert, append, deactivate ...

    ``function`` is a name (``print``, ``assert``, ``.append`` of the first argument) or an object of Taichi's.
    """

    function: Any
    args: tuple[Any, ...]  # groups, containers, tuples of them, Python values
    results: tuple[Local, ...] = ()
    keywords: Mapping[str, object] = field(default_factory=dict)
    writes: tuple[Container, ...] = ()  # fields that it changes

    @property
    def stopped(self) -> tuple[Container, ...]:
        """The containers whose values count as constants after it."""
        return tuple(a for a in self.args if isinstance(a, Container)) if self.function == "stop_grad" else ()


@dataclass(frozen=True, eq=False)
class Boundary(Statement):
    """Values whose derivative is not that of their expression: ``results`` take ``values``, entry by entry.

    ``kind`` is ``stop_gradient``, ``replace_gradient``, ``rule`` or ``gradient`` (of a value by the position of a
    pixel); a replaced gradient is that of ``given["surrogate"]``, perhaps times ``given["weights"]``; ``weighted`` (the
    tangent is the sum of those of ``given["arguments"]``, times ``given["weights"]``) in a program for adjoints; while
    a kernel is recorded also ``level_at`` (a value at another position). ``given`` holds the arguments by name.
    The code of a rule, for the function or mark ``target``, stands before the statement. It computes
    ``given["returned"]``, linear in the locals of the kind ``rule`` in ``inner``; those of each name stand for the
    tangents of its ``sources``.
    """

    kind: str
    target: object
    given: Mapping[str, Group]
    values: Group | tuple[Group, ...]
    results: tuple[Local, ...]  # a scalar for each entry of the values
    inner: Mapping[str, tuple[Local, ...]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The function that the user has called."""
        return self.options.get("what") or self.kind

    @property
    def numbers(self) -> list[Value]:
        """The values, entry by entry."""
        return _flat(self.values)

    @property
    def declarations(self) -> tuple[Declare, ...]:
        """The results with their values, without what is said of their derivatives."""
        return tuple([Declare(r, (v,), place=self.place) for r, v in zip(self.results, self.numbers, strict=True)])

    def sources(self, name: str) -> list[Value]:
        """The values behind the tangents of one name, entry by entry: the arguments, or the results (of autodiff)."""
        return _flat(self.given.get(name, self.values))


def _flat(groups: Group | tuple[Group, ...]) -> list[Value]:
    parts = groups if isinstance(groups, tuple) else (groups,)
    return [e for part in parts for e in entries(part)]


@dataclass(frozen=True, eq=False)
class Argument:
    """An argument of a kernel: ``value`` is its value in the program, None for templates."""

    name: str
    annotation: object  # text, or an object of Taichi's
    value: Container | Group | None = None


@dataclass(frozen=True, eq=False)
class Program:
    """A kernel for arguments of certain types."""

    name: str
    arguments: tuple[Argument, ...]
    returns: tuple[object, ...]  # annotations, as in Argument
    body: Body
    containers: tuple[Container, ...]
    file: str = ""
    default_real: Type = F32
    default_integer: Type = I32

    @property
    def hazards(self) -> frozenset[str]:
        """Its constructs that Taichi gets wrong with its own settings, see ``backend.kernels.HAZARDS``."""
        vectors = {"vectors"} if any(c.element_shape for c in self.containers) else set()
        targets = (s.target for s in statements(self.body) if isinstance(s, (Atomic, Update))) if vectors else ()
        indexed = (isinstance(i, Value) for t in targets if isinstance(t, Load) for i in t.component)
        return frozenset(vectors | ({"indexed components"} if any(indexed) else set()))


# The kinds of statement whose expressions may carry tangents
WITH_TANGENTS = (Declare, Assign, Update, Atomic, Return, Call, Boundary)


def bodies(statement: Statement) -> tuple[Body, ...]:
    kind = type(statement)
    if kind is If:
        return (statement.then, statement.orelse)  # type: ignore[attr-defined]
    return (statement.body,) if kind is For or kind is While else ()  # type: ignore[attr-defined]


def with_bodies(statement: Statement, new: tuple[Body, ...]) -> Statement:
    """The statement with other blocks; itself where they are the same."""
    if new == bodies(statement):  # statements are equal only to themselves
        return statement
    if isinstance(statement, If):
        return replace(statement, then=new[0], orelse=new[1])
    return replace(statement, body=new[0]) if isinstance(statement, (For, While)) else statement


def with_blocks(statement: Statement, change: Callable[[Body], Body]) -> Statement:
    """The statement with ``change`` applied to each of its blocks."""
    blocks = bodies(statement)
    return with_bodies(statement, tuple([change(block) for block in blocks])) if blocks else statement


def statements(body: Iterable[Statement]) -> list[Statement]:
    """All statements of a block and of those in it, in the order of the text."""
    result: list[Statement] = []
    pending = [*body][::-1]
    while pending:
        statement = pending.pop()
        result.append(statement)
        for block in bodies(statement)[::-1]:
            pending.extend(block[::-1])
    return result


def declared(statement: Statement) -> tuple[Local, ...]:
    """The locals that a statement brings into being."""
    if isinstance(statement, Declare):
        return (statement.local,)
    if isinstance(statement, For):
        return statement.variables
    if isinstance(statement, Atomic):
        return () if statement.result is None else (statement.result,)
    return statement.results if isinstance(statement, (Call, Effect, Boundary)) else ()


def with_declared(statement: Statement, change: Callable[[Local], Local]) -> Statement:
    """The statement with other locals for those that it brings into being."""
    if isinstance(statement, Declare):
        return replace(statement, local=change(statement.local))
    if isinstance(statement, For):
        return replace(statement, variables=tuple(map(change, statement.variables)))
    if isinstance(statement, Atomic):
        return statement if statement.result is None else replace(statement, result=change(statement.result))
    is_call = isinstance(statement, (Call, Effect, Boundary))
    return replace(statement, results=tuple(map(change, statement.results))) if is_call else statement  # type: ignore[attr-defined]


# The attributes with the expressions of a statement; for a target, its indices
_PARTS: dict[type[Statement], tuple[str, ...]] = {
    Declare: ("values",),
    Assign: ("target", "value"),
    Update: ("target", "value"),
    Atomic: ("target", "value"),
    If: ("condition",),
    While: ("condition",),
    For: ("domain",),
    Return: ("values",),
    Call: ("args",),
    Effect: ("args", "keywords"),
    Boundary: ("given", "values"),
}


def values_of(statement: Statement) -> list[Value]:
    """The expressions of a statement, without those in its blocks; of a target, its indices."""
    result: list[Value] = []
    for name in _PARTS.get(type(statement), ()):
        part = getattr(statement, name)
        result += children(part) if name == "target" else _values_in(part)
    return result


def _values_in(x: object) -> Iterator[Value]:
    if isinstance(x, Value):
        yield x
    elif isinstance(x, (Tensor, Struct)):
        yield from entries(x)
    elif isinstance(x, Format):
        yield from _values_in(x.args)
    elif isinstance(x, (tuple, list)):
        for e in x:
            yield from _values_in(e)
    elif isinstance(x, Mapping):
        yield from _values_in(tuple(x.values()))


def with_values(statement: Statement, change: Callable[[Value], Value]) -> Statement:
    """The statement with changed expressions, itself where none changes; of a target, the indices. Blocks stay."""
    changed: dict[str, Any] = {}
    for name in _PARTS.get(type(statement), ()):
        old = getattr(statement, name)
        new = with_children(old, change) if name == "target" else _changed(old, change)
        if new is not old:
            changed[name] = new
    return replace(statement, **changed) if changed else statement


def _changed(x: object, change: Callable[[Value], Value]) -> object:
    if isinstance(x, Value):
        return change(x)
    if isinstance(x, (tuple, list)):
        new = type(x)([_changed(e, change) for e in x])
        return x if new == x else new  # values are equal only to themselves
    if isinstance(x, (Tensor, Struct)):
        return regrouped(x, tuple(map(change, entries(x))))
    if isinstance(x, Format):
        return replace(x, args=_changed(x.args, change))
    return {k: _changed(v, change) for k, v in x.items()} if isinstance(x, Mapping) and x else x


def with_nodes(statement: Statement, change: Callable[[Value], Value]) -> Statement:
    """The statement with ``change`` applied to each node of its expressions, operands first; blocks stay."""
    known: dict[Value, Value] = {}
    return with_values(statement, lambda value: rebuilt(value, change, known))


def with_places(statement: Statement, change: Callable[[Value], Value]) -> Statement:
    """``with_nodes``, and the change of what the statement stores to."""
    new = with_nodes(statement, change)
    return replace(new, target=change(new.target)) if isinstance(new, Store) else new  # type: ignore[arg-type]


def mapped(body: Body, change: Callable[[Statement], Statement | Body]) -> Body:
    """The block with ``change`` applied to each statement, inner blocks first; a change may give several or none."""
    result: list[Statement] = []
    for statement in body:
        new = change(with_blocks(statement, lambda block: mapped(block, change)))
        result.extend(new if isinstance(new, tuple) else (new,))
    return tuple(result)
