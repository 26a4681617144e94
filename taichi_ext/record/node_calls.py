"""Calls on nodes of the layout that change fields in them: appended entries, deactivated cells.

The calls stay. Appended values are stored once more by an ordinary statement, and the entries of a deactivated cell are
set to zero before: values are unchanged, and tangents follow as for any other store.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import taichi_ext.program as ir
from taichi_ext import backend
from taichi_ext.analysis.activity import Activity
from taichi_ext.analysis.changes import written_containers
from taichi_ext.backend import ti
from taichi_ext.errors import UnsupportedError
from taichi_ext.program.build import add, literal, multiply
from taichi_ext.program.values import I32

Lost = list[tuple[ir.Statement, ir.Value]]  # values that are appended to unknown fields


def changed_nodes(body: ir.Body) -> tuple[backend.SNode, ...]:
    """The nodes of the layout with cells that are activated, appended to or deactivated by name."""
    kinds = ("append", "deactivate")
    effects = [s for s in ir.statements(body) if isinstance(s, ir.Effect)]
    return tuple(_node_of(s) for s in effects if _kind(s) in kinds or s.function is ti.activate)


def has_node_calls(body: ir.Body) -> bool:
    """Whether a program appends or deactivates."""
    return any(_kind(s) for s in ir.statements(body))


def _kind(s: ir.Statement) -> str:
    """``append`` or ``deactivate``, whether called as a function or as a method; empty for any other statement."""
    name = s.function if isinstance(s, ir.Effect) else ""
    if name in (".append", ".deactivate"):
        return name[1:]
    return {ti.append: "append", ti.deactivate: "deactivate"}.get(name, "") if callable(name) else ""


def _node_of(s: ir.Effect) -> backend.SNode:
    """The node that a call appends to or deactivates a cell of."""
    what = s.args[0].object if isinstance(s.args[0], ir.Container) else s.args[0]
    return what.parent() if isinstance(s.function, str) else backend.layout_node(what)


def _indices_of(s: ir.Effect) -> tuple[ir.Value, ...]:
    return tuple(_scalars(s.args[1]))


def _scalars(x: Any) -> Iterator[ir.Value]:
    """The numbers of a value, in the order in which Taichi stores them."""
    if isinstance(x, (tuple, list)):
        for e in x:
            yield from _scalars(e)
    elif isinstance(x, (ir.Value, ir.Tensor, ir.Struct)):
        yield from ir.entries(x)
    else:
        yield ir.Const(x, I32)


# --- lists ------------------------------------------------------------------------------------------------------------


def with_appends(program: ir.Program, known: Iterable[ir.Container]) -> tuple[ir.Program, Lost]:
    """The program with a store for each number that is appended to one of the ``known`` fields."""
    lost: Lost = []
    fields = tuple(known)

    def change(s: ir.Statement) -> ir.Statement | ir.Body:
        if not isinstance(s, ir.Effect) or _kind(s) != "append":
            return s
        return _appended(s, fields, lost)

    return replace(program, body=ir.mapped(program.body, change)), lost


def _appended(s: ir.Effect, known: tuple[ir.Container, ...], lost: Lost) -> ir.Body:
    before: list[ir.Statement] = []

    def kept(value: ir.Value, name: str) -> ir.Value:
        if isinstance(value, ir.Const):
            return value
        local = ir.Local(name, value.dtype, (), "temporary")
        before.append(ir.Declare(local, (value,), place=s.place))
        return ir.Read(local)

    indices = tuple(kept(i, "index") for i in _indices_of(s))
    given = s.args[2:] if len(s.args) == 3 else (s.args[2:],)
    scalars = [kept(v, "appended") for v in _scalars(given)]
    place = s.results[0] if s.results else ir.Local("place", I32, (), "temporary")
    call = replace(s, args=(s.args[0], indices, _regrouped(given[0], scalars)), results=(place,))
    node = _node_of(s)
    parts = dict(zip(backend.child_numbers(node), scalars, strict=False))
    stores: list[ir.Statement] = []
    for c in known:
        numbers = backend.component_numbers(c.object)
        if not all(n in parts for n in numbers):
            continue
        for number, component in zip(numbers, _components(c), strict=True):
            target = ir.Load(c, (*indices, ir.Read(place)), component, place=s.place)
            stores.append(ir.Assign(target, parts.pop(number), place=s.place))
    lost.extend((s, v) for v in parts.values() if v.dtype.is_real)
    return (*before, call, *stores)


def _regrouped(given: object, scalars: list[ir.Value]) -> object:
    if isinstance(given, (tuple, list)):
        return tuple(scalars)
    return ir.regrouped(given, tuple(scalars)) if isinstance(given, (ir.Tensor, ir.Struct)) else scalars[0]


def _components(c: ir.Container) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, c.element_shape)))


def check_appended(lost: Lost, activity: Activity) -> None:
    """Raise if a value with a tangent is appended to an unknown field."""
    for s, value in lost:
        if activity.has(value):
            raise UnsupportedError(
                f"{ir.cited(s.place)}"
                "A value with a tangent is appended, and the field that it goes to is not known. Append to "
                "the field itself: field.append(value), or field[i].append(value)."
            )


# --- deactivation -----------------------------------------------------------------------------------------------------


def with_clears(program: ir.Program, known: Iterable[ir.Container], activity: Activity) -> ir.Program:
    """The program with zeros stored to entries with tangents in a cell, before the cell is deactivated."""
    fields = list(known)
    outside = [s for s in program.body if not ir.bodies(s)]
    body: list[ir.Statement] = []
    for top in program.body:
        written = written_containers((top,) if ir.bodies(top) else outside, with_effects=False)
        body += ir.mapped((top,), lambda s, written=written: _cleared(s, fields, activity, written))
    return replace(program, body=tuple(body))


def _cleared(
    s: ir.Statement, known: list[ir.Container], activity: Activity, written: set[ir.Container]
) -> ir.Statement | ir.Body:
    if not isinstance(s, ir.Effect) or _kind(s) != "deactivate":
        return s
    node = _node_of(s)
    if backend.node_kind(node) == "bitmasked":
        return s  # its memory stays unchanged
    before: list[ir.Statement] = []
    inside = [c for c in known if backend.is_under(c.object, node)]
    for c in inside:
        if c in activity.containers:
            _check_deactivation(s, node, c, written)
            before += _zeros(s, node, c)
    return (*before, replace(s, writes=tuple(dict.fromkeys((*s.writes, *inside)))))


def _check_deactivation(s: ir.Effect, node: backend.SNode, c: ir.Container, written: set[ir.Container]) -> None:
    kind = backend.node_kind(node)
    if kind not in ("dynamic", "pointer") or not backend.has_leading_axes(c.object, node):
        raise UnsupportedError(
            f"{ir.cited(s.place)}"
            f"{c.name} carries tangents and a part of its layout, a {kind} node, is deactivated in a kernel. "
            "Deactivate it from Python between kernels (snode.deactivate_all()), or store zeros."
        )
    if kind == "pointer" and c in written:
        raise UnsupportedError(
            f"{ir.cited(s.place)}"
            f"{c.name} carries tangents and is stored to in the loop that deactivates a part of it: Taichi "
            "may still read the stored value there. Deactivate it in a loop of its own."
        )


def _zeros(s: ir.Effect, node: backend.SNode, c: ir.Container) -> ir.Body:
    """Zeros for all entries of a field in the cell that is deactivated."""
    indices, shape = _indices_of(s), c.shape or ()
    cells = backend.node_shape(node)
    sizes = [n // m for n, m in zip(shape, cells, strict=False)]
    sizes += shape[len(sizes) :]
    counts: list[Any] = [literal(n, I32) for n in sizes]
    before: list[ir.Statement] = []
    if backend.node_kind(node) == "dynamic":
        length = ir.Local("length", I32, (), "temporary")
        before.append(ir.Effect(ti.length, (node, indices), (length,), place=s.place))
        counts[len(indices)] = multiply(sizes[len(indices)], ir.Read(length))
    variables = [ir.Local(f"n_{axis}", I32, (), "loop") for axis in range(len(sizes))]
    place: list[Any] = []
    for axis, (n, offset) in enumerate(zip(variables, c.offset or (0,) * len(sizes), strict=True)):
        first = multiply(indices[axis], sizes[axis]) if axis < len(indices) else 0
        place.append(add(add(ir.Read(n), first), offset))
    zero = literal(0, c.dtype)
    components = _components(c)
    inside = [components[number] for number in backend.components_under(c.object, node)]
    body: ir.Body = tuple(ir.Assign(ir.Load(c, tuple(place), m), zero, place=s.place) for m in inside)
    for n, count in reversed(list(zip(variables, counts, strict=True))):
        body = (ir.For("range", (n,), (count,), body, place=s.place),)
    return (*before, *body)
