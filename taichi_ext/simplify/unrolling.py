"""Loops written out, iteration by iteration."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import taichi_ext.program as ir

MOST = 1024  # iterations, of all loops together

_COMPUTE: dict[str, Callable[..., int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "floordiv": lambda a, b: a // b,
    "neg": lambda a: -a,
    "max": max,
    "min": min,
    "cast": lambda a: a,
}


def unrolled(body: ir.Body, refuse: Callable[[str], Exception]) -> ir.Body:
    """The block without loops; ``refuse(what)`` is the exception for a construct that cannot be unrolled."""
    return _Unrolling(refuse).block(body, {}, {}, is_copy=False)


class _Unrolling:
    def __init__(self, refuse: Callable[[str], Exception]) -> None:
        self.refuse = refuse
        self.count = 0

    def block(
        self, body: ir.Body, names: Mapping[ir.Local, ir.Local], known: Mapping[object, int], *, is_copy: bool
    ) -> ir.Body:
        """A block: of an iteration, a copy. ``names`` are the new locals of outer copies, ``known`` loop variables."""
        names = dict(names)
        made: list[ir.Statement] = []
        for s in body:
            s = substituted(s, lambda node, names=names: _new_name(node, names, known))
            if isinstance(s, ir.While):
                raise self.refuse("a while loop")
            if isinstance(s, ir.For):
                made += self.loop(s, names, known)
                continue
            if is_copy:
                names.update((local, replace(local)) for local in ir.declared(s))
                s = renamed(s, names)
            if isinstance(s, ir.If):
                then, orelse = (self.block(b, names, known, is_copy=is_copy) for b in (s.then, s.orelse))
                s = replace(s, then=then, orelse=orelse)
            made.append(s)
        return tuple(made)

    def loop(
        self, s: ir.For, names: Mapping[ir.Local, ir.Local], known: Mapping[object, int]
    ) -> Iterator[ir.Statement]:
        if any(isinstance(inner, ir.Jump) for inner in ir.statements(s.body)):
            raise self.refuse("a loop with break or continue")
        for index in self.iterations(s):
            own, numbers = dict(names), dict(known)
            if len(s.variables) == 1 and s.variables[0].shape:
                (variable,) = s.variables
                own[variable] = replace(variable, kind="temporary")
                yield ir.Declare(own[variable], tuple(ir.Const(i, variable.dtype) for i in index), place=s.place)
                numbers.update(((variable, n), i) for n, i in enumerate(index))
            else:
                numbers.update(zip(s.variables, index, strict=True))
            yield from self.block(s.body, own, numbers, is_copy=True)

    def iterations(self, s: ir.For) -> list[tuple[int, ...]]:
        if s.kind == "range":
            axes = [tuple(map(_number, s.domain))]
        elif s.kind in ("ndrange", "grouped ndrange"):
            axes = [tuple(map(_number, d if isinstance(d, (tuple, list)) else (d,))) for d in s.domain]
        else:
            axes = [(None,)]
        if any(n is None for axis in axes for n in axis):
            raise self.refuse("a loop whose bounds are not constants")
        found = list(itertools.product(*(range(*axis) for axis in axes)))  # type: ignore[arg-type]
        self.count += len(found)
        if self.count > MOST:
            raise self.refuse(f"more than {MOST} iterations of loops")
        return found


def _new_name(node: ir.Value, names: Mapping[ir.Local, ir.Local], known: Mapping[object, int]) -> ir.Value:
    """A read of a local of a copy; a number for the variable of a loop."""
    if not isinstance(node, ir.Read):
        return node
    number = known.get((node.local, *node.index) if node.index else node.local)
    if number is not None:
        return ir.Const(number, node.dtype, place=node.place)
    new = names.get(node.local)
    return node if new is None else ir.Read(new, node.index, place=node.place)


def substituted(s: ir.Statement, change: Callable[[ir.Value], ir.Value]) -> ir.Statement:
    """The statement with ``change`` applied to each node of its expressions, and to its target."""
    s = ir.with_nodes(s, change)
    if isinstance(s, ir.Store):
        return replace(s, target=change(s.target))  # type: ignore[arg-type]
    return s


def renamed(s: ir.Statement, names: Mapping[ir.Local, ir.Local]) -> ir.Statement:
    """A statement of its own, with new locals for those that it declares."""
    if isinstance(s, ir.Declare):
        return replace(s, local=names[s.local])
    if isinstance(s, ir.Atomic) and s.result is not None:
        return replace(s, result=names[s.result])
    if isinstance(s, (ir.Call, ir.Effect, ir.Boundary)):
        return replace(s, results=tuple(names[r] for r in s.results))
    return replace(s)


def _number(value: object) -> int | None:
    """A bound that is known."""
    if isinstance(value, ir.Const):
        return int(value.value)
    if not isinstance(value, ir.Op) or value.name not in _COMPUTE or not value.dtype.is_integer:
        return None
    numbers = list(map(_number, value.args))
    if None in numbers or (value.name == "floordiv" and numbers[1] == 0):
        return None
    return value.dtype.wrapped(_COMPUTE[value.name](*numbers))
