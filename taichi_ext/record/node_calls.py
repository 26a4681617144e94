"""Calls on nodes of the layout, as they change the fields in them: appended entries, deactivated cells.

The calls stay. What is appended is stored once more by an ordinary statement, and what a deactivated cell holds is set
to zero before: values stay what they are, and tangents follow as they do for any other store.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from taichi_ext import backend
from taichi_ext.analysis.activity import Activity
from taichi_ext.analysis.changes import written_containers
from taichi_ext.backend import ti
from taichi_ext.differentiate.forms.build import add, literal, multiply
from taichi_ext.errors import UnsupportedError
from taichi_ext.program import (
    Assign,
    Body,
    Const,
    Container,
    Declare,
    Effect,
    For,
    Load,
    Local,
    Program,
    Read,
    Statement,
    Struct,
    Tensor,
    Value,
    bodies,
    entries,
    mapped,
    regrouped,
    statements,
)
from taichi_ext.program.types import I32

Lost = list[tuple[Statement, Value]]  # values that are appended to fields that are not known


def changed_nodes(body: Body) -> tuple[Any, ...]:
    """The nodes of the layout cells of which are activated, appended to or deactivated by name."""
    kinds = ("append", "deactivate")
    calls = [s for s in statements(body) if _kind(s) in kinds or (isinstance(s, Effect) and s.function is ti.activate)]
    return tuple(_node_of(s) for s in calls)  # type: ignore[arg-type]


def has_node_calls(body: Body) -> bool:
    """Whether a program appends or deactivates."""
    return any(_kind(s) for s in statements(body))


def _kind(s: Statement) -> str:
    """``append`` or ``deactivate``, and whether the call is a method's: empty for any other statement."""
    name = s.function if isinstance(s, Effect) else ""
    if name in (".append", ".deactivate"):
        return name[1:]
    return {ti.append: "append", ti.deactivate: "deactivate"}.get(name, "") if callable(name) else ""


def _node_of(s: Effect) -> Any:
    """The node that a call appends to or deactivates a cell of."""
    what = s.args[0].object if isinstance(s.args[0], Container) else s.args[0]
    return what.parent() if isinstance(s.function, str) else backend.layout_node(what)


def _indices_of(s: Effect) -> tuple[Value, ...]:
    return tuple(_scalars(s.args[1]))


def _scalars(x: Any) -> Iterator[Value]:
    """The numbers that a value consists of, in the order in which Taichi stores them."""
    if isinstance(x, (tuple, list)):
        for e in x:
            yield from _scalars(e)
    elif isinstance(x, (Value, Tensor, Struct)):
        yield from entries(x)
    else:
        yield Const(x, I32)


# --- lists ------------------------------------------------------------------------------------------------------------


def with_appends(program: Program, known: Iterable[Container]) -> tuple[Program, Lost]:
    """The program with a store for each number that is appended to one of the ``known`` fields."""
    lost: Lost = []
    fields = tuple(known)

    def change(s: Statement) -> Statement | Body:
        if not isinstance(s, Effect) or _kind(s) != "append":
            return s
        return _appended(s, fields, lost)

    return replace(program, body=mapped(program.body, change)), lost


def _appended(s: Effect, known: tuple[Container, ...], lost: Lost) -> Body:
    before: list[Statement] = []

    def kept(value: Value, name: str) -> Value:
        if isinstance(value, Const):
            return value
        local = Local(name, value.dtype, (), "temporary")
        before.append(Declare(local, (value,), place=s.place))
        return Read(local)

    indices = tuple(kept(i, "index") for i in _indices_of(s))
    given = s.args[2:] if len(s.args) == 3 else (s.args[2:],)
    scalars = [kept(v, "appended") for v in _scalars(given)]
    place = s.results[0] if s.results else Local("place", I32, (), "temporary")
    call = replace(s, args=(s.args[0], indices, _regrouped(given[0], scalars)), results=(place,))
    node = _node_of(s)
    parts = dict(zip(backend.child_numbers(node), scalars, strict=False))
    stores: list[Statement] = []
    for c in known:
        numbers = backend.component_numbers(c.object)
        if not all(n in parts for n in numbers):
            continue
        for number, component in zip(numbers, _components(c), strict=True):
            target = Load(c, (*indices, Read(place)), component, place=s.place)
            stores.append(Assign(target, parts.pop(number), place=s.place))
    lost.extend((s, v) for v in parts.values() if v.dtype.is_real)
    return (*before, call, *stores)


def _regrouped(given: Any, scalars: list[Value]) -> Any:
    if isinstance(given, (tuple, list)):
        return tuple(scalars)
    return regrouped(given, tuple(scalars)) if isinstance(given, (Tensor, Struct)) else scalars[0]


def _components(c: Container) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, c.element_shape)))


def refuse_lost(lost: Lost, activity: Activity) -> None:
    """Raise where a value with a tangent goes to a field that is not known."""
    for s, value in lost:
        if activity.has(value):
            raise UnsupportedError(
                f"{_text(s)}A value with a tangent is appended, and the field that it goes to is not known. Append to "
                "the field itself: field.append(value), or field[i].append(value)."
            )


def _text(s: Statement) -> str:
    return "" if s.place is None else s.place.message() + "\n"


# --- deactivation -----------------------------------------------------------------------------------------------------


def with_clears(program: Program, known: Iterable[Container], activity: Activity) -> Program:
    """The program with zeros stored to what carries tangents in a cell, before the cell is deactivated."""
    fields = list(known)
    outside = [s for s in program.body if not bodies(s)]
    body: list[Statement] = []
    for top in program.body:
        written = written_containers((top,) if bodies(top) else outside, with_effects=False)
        body += mapped((top,), lambda s, written=written: _cleared(s, fields, activity, written))
    return replace(program, body=tuple(body))


def _cleared(s: Statement, known: list[Container], activity: Activity, written: set[Container]) -> Statement | Body:
    if not isinstance(s, Effect) or _kind(s) != "deactivate":
        return s
    node = _node_of(s)
    if backend.node_kind(node) == "bitmasked":
        return s  # its memory, and what is read from it, stays as it was
    before: list[Statement] = []
    inside = [c for c in known if backend.is_under(c.object, node)]
    for c in inside:
        if c in activity.containers:
            _refuse_deactivation(s, node, c, written)
            before += _zeros(s, node, c)
    return (*before, replace(s, writes=tuple(dict.fromkeys((*s.writes, *inside)))))


def _refuse_deactivation(s: Effect, node: Any, c: Container, written: set[Container]) -> None:
    kind = backend.node_kind(node)
    if kind not in ("dynamic", "pointer") or not backend.has_leading_axes(c.object, node):
        raise UnsupportedError(
            f"{_text(s)}{c.name} carries tangents and a part of its layout, a {kind} node, is deactivated in a kernel. "
            "Deactivate it from Python between kernels (snode.deactivate_all()), or store zeros."
        )
    if kind == "pointer" and c in written:
        raise UnsupportedError(
            f"{_text(s)}{c.name} carries tangents and is stored to in the loop that deactivates a part of it: Taichi "
            "may still read there what was stored. Deactivate it in a loop of its own."
        )


def _zeros(s: Effect, node: Any, c: Container) -> Body:
    """Zeros for all entries of a field in the cell that is deactivated."""
    indices, shape = _indices_of(s), c.shape or ()
    cells = backend.node_shape(node)
    sizes = [n // m for n, m in zip(shape, cells, strict=False)]
    sizes += shape[len(sizes) :]
    counts: list[Any] = [literal(n, I32) for n in sizes]
    before: list[Statement] = []
    if backend.node_kind(node) == "dynamic":
        length = Local("length", I32, (), "temporary")
        before.append(Effect(ti.length, (node, indices), (length,), place=s.place))
        counts[len(indices)] = multiply(sizes[len(indices)], Read(length))
    variables = [Local(f"n_{axis}", I32, (), "loop") for axis in range(len(sizes))]
    place: list[Any] = []
    for axis, (n, offset) in enumerate(zip(variables, c.offset or (0,) * len(sizes), strict=True)):
        first = multiply(indices[axis], sizes[axis]) if axis < len(indices) else 0
        place.append(add(add(Read(n), first), offset))
    zero = literal(0, c.dtype)
    components = _components(c)
    inside = [components[number] for number in backend.components_under(c.object, node)]
    body: Body = tuple(Assign(Load(c, tuple(place), m), zero, place=s.place) for m in inside)
    for n, count in reversed(list(zip(variables, counts, strict=True))):
        body = (For("range", (n,), (count,), body, place=s.place),)
    return (*before, *body)
