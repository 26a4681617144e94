"""Statements of a program as lines of a kernel, with the user's file and line next to them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import taichi_ext.program as ir
from taichi_ext.analysis.changes import read_locals, written_containers
from taichi_ext.analysis.draws import is_draw
from taichi_ext.emit.expressions import INFIX, Expressions
from taichi_ext.emit.names import Names
from taichi_ext.errors import UnsupportedError

_ITERABLES = {
    "range": "range({})",
    "ndrange": "ti.ndrange({})",
    "field": "{}",
    "grouped": "ti.grouped({})",
    "grouped ndrange": "ti.grouped(ti.ndrange({}))",
}
_LAZY = ("ifte", "logical_and", "logical_or")  # whose operands after the first may not be evaluated
_KERNEL = 2  # the depth of statements of the kernel itself
MOST_STORED = 16  # numbers of a local array that Taichi may store one by one


class Lines:
    """Writes the statements of one program."""

    def __init__(self, program: ir.Program, names: Names, annotations: Mapping[str, str], has_comments: bool) -> None:
        self.names, self.annotations = names, annotations
        self.expressions = Expressions(program, names)
        self.has_comments = has_comments
        self.read = read_locals(program.body)
        self.lines: list[str] = []
        self.places: list[ir.Place | None] = []  # of the user's statement that each line is from
        self.functions: list[str] = []  # lines of functions that the kernel calls, and their places
        self.places_of_functions: list[ir.Place | None] = []
        self.depth = 1
        self.last_place: tuple[str, int] | None = None

    def line(self, text: str, place: ir.Place | None = None) -> None:
        mark = ""
        self.places.append(place or (self.places[-1] if self.places else None))
        if self.has_comments and place is not None and (place.file, place.line) != self.last_place:
            self.last_place = place.file, place.line
            mark = f"  # {os.path.basename(place.file)}:{place.line}"
        self.lines.append("    " * self.depth + text + mark)

    def block(self, body: ir.Body) -> None:
        self.depth += 1
        self.names.open()
        for s in body:
            self.statement(s)
        if not body:
            self.line("pass")
        self.names.close()
        self.depth -= 1

    def statement(self, s: ir.Statement) -> None:
        self.expressions.shared = {}
        if not isinstance(s, ir.While):
            self.share(ir.values_of(s))
        text, argument, place = self.expressions.text, self.expressions.argument, s.place
        match s:
            case ir.Declare():
                self.declare(s)
            case ir.Assign(target=target, value=value):
                self.line(f"{text(target)} = {text(value)}", place)
            case ir.Update(target=target, op=op, value=value):
                self.line(f"{text(target)} {INFIX[op][0]}= {text(value)}", place)
            case ir.Atomic(function=function, target=target, value=value, result=result):
                call = f"ti.{function}({text(target)}, {text(value)})"
                self.line(call if result is None else f"{self.names.declare(result)} = {call}", place)
            case ir.If():
                self.branch(s, "if")
            case ir.While(condition=condition):
                self.line(f"while {'True' if condition is None else text(condition)}:", place)
                self.block(s.body)
            case ir.For():
                self.loop(s)
            case ir.Jump(kind=kind):
                self.line(kind, place)
            case ir.Return(values=values):
                self.line(f"return {', '.join(map(argument, values))}", place)
            case ir.Call(function=function, args=args, results=results):
                self.line(f"{', '.join(map(self.names.declare, results))} = {self.call(function, args)}", place)
            case ir.Effect():
                self.effect(s)
            case ir.Boundary():
                self.boundary(s)

    # --- values that a statement evaluates more than once

    def share(self, values: list[ir.Value]) -> None:
        """Keep such values in temporaries, where they are certain to be evaluated."""
        uses: dict[ir.Value, int] = {}
        certain: set[ir.Value] = set()
        order: list[ir.Value] = []

        def visit(node: ir.Value, is_certain: bool) -> None:
            is_new = node not in uses
            uses[node] = 1 if is_new else 2
            if is_certain and node not in certain:
                certain.add(node)
                is_new = True
            if not is_new:
                return
            is_lazy = isinstance(node, ir.Op) and node.name in _LAZY
            for n, child in enumerate(ir.children(node)):
                visit(child, is_certain and not (is_lazy and n > 0))
            order.append(node)

        for value in values:
            visit(value, True)
        for node in dict.fromkeys(order):
            if uses[node] > 1 and node in certain and _is_worth_a_name(node):
                text = self.expressions.unshared(node)[0]
                name = self.names.fresh("t")
                self.line(f"{name} = {text}")
                self.expressions.shared[node] = name

    # --- kinds of statement

    def declare(self, s: ir.Declare) -> None:
        local, expressions = s.local, self.expressions
        if local.shape and not s.values:
            self.declare_unfilled(local)
            return
        if local.shape:
            text = expressions.tensor(s.values, local.shape, local.dtype)
            if self.depth > _KERNEL and len(local.shape) == 1 and len(s.values) > MOST_STORED and _is_one(s.values):
                self.declare_filled(s)
                return
        else:
            text = expressions.text(s.values[0])
        self.line(f"{self.names.declare(local)} = {text}", s.place)
        if is_draw(s) and local not in self.read:
            self.line(f"{self.names.of(local)} = 0")  # Taichi drops a draw whose number is neither read nor replaced

    def declare_unfilled(self, local: ir.Local, place: ir.Place | None = None) -> str:
        """A local array without first values.

        A name for ``None`` is memory. It takes its type from an assignment, also from one that never runs.
        """
        name = self.names.declare(local)
        zeros = (ir.Const(0.0 if local.dtype.is_real else 0, local.dtype),) * local.shape[0]
        self.line(f"({name} := None)", place)
        self.line(f"if False: {name} = {self.expressions.tensor(zeros, local.shape, local.dtype)}")
        return name

    def declare_filled(self, s: ir.Declare) -> None:
        """A local array, filled by a loop.

        Taichi makes a store for each number of an array's first value, and its passes take more than in proportion to
        their number. Only within other statements: a loop of the kernel itself would be parallel.
        """
        name = self.declare_unfilled(s.local, s.place)
        self.names.open()
        k = self.names.fresh("k")
        self.line(f"for {k} in range({len(s.values)}):")
        self.line(f"    {name}[{k}] = {self.expressions.text(s.values[0])}")
        self.names.close()

    def branch(self, s: ir.If, word: str) -> None:
        self.line(f"{word} {self.expressions.text(s.condition)}:", s.place)
        self.block(s.then)
        if not s.orelse:
            return
        if len(s.orelse) == 1 and isinstance(s.orelse[0], ir.If):
            inner = s.orelse[0]
            before, self.expressions.shared = len(self.lines), {}
            self.share([inner.condition])
            if len(self.lines) == before:
                self.branch(inner, "elif")
                return
            del self.lines[before:], self.places[before:]
        self.line("else:")
        self.block(s.orelse)

    def loop(self, s: ir.For) -> None:
        if s.config:
            self.line(f"ti.loop_config({', '.join(f'{k}={v!r}' for k, v in s.config.items())})")
        if s.kind in ("field", "grouped"):
            over = s.domain[0]
            domain = self.names.container(over) if isinstance(over, ir.Container) else self.names.object(over, "node")
        else:
            domain = ", ".join(map(self.bound, s.domain))
        self.names.open()
        variables = ", ".join(map(self.names.declare, s.variables))
        self.line(f"for {variables} in {_ITERABLES[s.kind].format(domain)}:", s.place)
        arguments = self._arguments(s) if s.is_function else None
        if arguments is None:
            self.block(s.body)
        else:
            self._call_of_body(s, arguments)
        self.names.close()

    def _arguments(self, s: ir.For) -> dict[str, str] | None:
        """What the body of a loop takes from outside, with types; None for other things than arrays and numbers."""
        inner = list(ir.statements(s.body))
        own = {local for x in inner for local in ir.declared(x)}
        outer = {x for y in inner for x in y.contents.locals} - own
        touched = {c for y in inner for c in y.contents.containers} | written_containers(s.body)
        arrays = sorted(self.names.container(c) for c in touched if c.is_argument)
        if any(x.shape for x in outer) or any("ndarray" not in self.annotations.get(a, "") for a in arrays):
            return None
        numbers = sorted((self.names.of(x), self.expressions.type(x.dtype)) for x in outer)
        return {**{a: self.annotations[a] for a in arrays}, **dict(numbers)}

    def _call_of_body(self, s: ir.For, arguments: dict[str, str]) -> None:
        """The body of a loop as a function: there LLVM knows that the addresses of arrays stay the same."""
        name = self.names.of_function(f"one_{s.variables[0].name}")
        kernel, self.lines, self.places = (self.lines, self.places), [], []
        depth, self.depth = self.depth, 1
        self.line("@ti.real_func")
        self.line(f"def {name}({', '.join(f'{a}: {kind}' for a, kind in arguments.items())}):")
        self.block(s.body)
        self.functions += [*self.lines, ""]
        self.places_of_functions += [*self.places, None]
        (self.lines, self.places), self.depth = kernel, depth
        self.line(f"    {name}({', '.join(arguments)})")

    def bound(self, x: Any) -> str:
        return f"({', '.join(map(self.bound, x))})" if isinstance(x, tuple) else self.expressions.text(x)

    def call(self, function: str, args: tuple[object, ...]) -> str:
        """A function of Taichi's library; the inverse is a method, and "_at" gives what is known already."""
        texts = list(map(self.expressions.argument, args))
        if function.endswith("_at"):
            return ", ".join(texts[1 : 1 + len(texts) // 2])
        return f"{texts[0]}.inverse()" if function == "inverse" else f"ti.{function}({', '.join(texts)})"

    def effect(self, s: ir.Effect) -> None:
        argument = self.expressions.argument
        if s.function == "assert":
            condition, message = s.args
            self.line(f"assert {argument(condition)}, {argument(message)}", s.place)
            return
        args: tuple[Any, ...] = s.args
        if not isinstance(s.function, str):
            called = self.expressions.function(s.function)
        elif s.function.startswith("."):
            index = ", ".join(map(argument, args[1]))
            called = argument(args[0]) + (f"[{index}]" if index else "") + s.function
            args = args[2:]
        else:
            called = s.function if s.function == "print" else f"ti.{s.function}"
        named = [f"{k}={argument(v)}" for k, v in s.keywords.items()]
        text = f"{called}({', '.join([*map(argument, args), *named])})"
        results = ", ".join(map(self.names.declare, s.results))
        self.line(f"{results} = {text}" if results else text, s.place)

    def boundary(self, s: ir.Boundary) -> None:
        if s.options.get("antialias"):
            raise UnsupportedError(
                f"{ir.cited(s.place)}{s.kind} is antialiased: its value depends on the derivative "
                "of level, which a kernel without derivatives does not have."
            )
        groups = s.values if isinstance(s.values, tuple) else (s.values,)
        for local, value in zip(s.results, (e for g in groups for e in ir.entries(g)), strict=True):
            self.line(f"{self.names.declare(local)} = {self.expressions.text(value)}", s.place)


def _is_one(values: tuple[ir.Value, ...]) -> bool:
    """Whether all are the same constant."""
    return isinstance(values[0], ir.Const) and len(set(values)) == 1


def _is_worth_a_name(node: ir.Value) -> bool:
    """Whether a value that is used twice is computed: not read, converted from a local, or random."""
    if not isinstance(node, ir.Op) or not node.contents.is_pure:
        return False
    return not (node.name == "cast" and isinstance(node.args[0], (ir.Const, ir.Read)))
