"""Statements and expressions of a program as lines of a kernel, next to them the user's file and line."""

from __future__ import annotations

import builtins
import keyword
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import taichi_ext.program as ir
from taichi_ext.analysis.changes import read_locals, written_containers
from taichi_ext.analysis.draws import is_draw
from taichi_ext.backend import ti
from taichi_ext.errors import UnsupportedError
from taichi_ext.program.build import cast
from taichi_ext.program.values import Format
from taichi_ext.schedule.elementary import ELEMENTARY, Elementary

# name: sign and how strongly it binds
INFIX = {
    **{"pow": ("**", 13), "mul": ("*", 11), "truediv": ("/", 11), "floordiv": ("//", 11), "mod": ("%", 11)},
    **{"add": ("+", 10), "sub": ("-", 10), "shift_left": ("<<", 9), "shift_right": (">>", 9)},
    **{"bit_and": ("&", 8), "bit_xor": ("^", 7), "bit_or": ("|", 6)},
    **{"eq": ("==", 5), "ne": ("!=", 5), "lt": ("<", 5), "le": ("<=", 5), "gt": (">", 5), "ge": (">=", 5)},
    **{"logical_and": ("and", 3), "logical_or": ("or", 2)},
}
PREFIX = {"neg": ("-", 12), "invert": ("~", 12), "logical_not": ("not ", 4)}
_POWER, _COMPARISON, _ATOM = 13, 5, 20
_BUILTIN = ("max", "min", "abs")
_THREAD = "ti.cast(ti.global_thread_idx(), ti.i32)"
_IN_MATH = ("popcnt", "clz")
Text = tuple[str, int]  # and how strongly its outermost operation binds


class ExpressionWriter:
    """Writes the expressions of one program."""

    def __init__(self, program: ir.Program, names: Names) -> None:
        self.program = program
        self.names = names
        self.shared: dict[ir.Value, str] = {}  # values of the current statement that have names
        self.elementary: dict[str, Elementary] = {}  # the functions of the package that are called
        self.thread = ""  # the name of the thread's number, in a function that takes it

    def text(self, value: ir.Value, level: int = 0) -> str:
        """An expression, in parentheses where something that binds as strongly as ``level`` is around it."""
        if value in self.shared:
            return self.shared[value]
        text, strength = self.unshared(value)
        return f"({text})" if strength < level else text

    def unshared(self, value: ir.Value) -> Text:
        if isinstance(value, ir.Const):
            return self.constant(value)
        if isinstance(value, ir.FoldedConst):
            return self.constant(value.constant)
        if isinstance(value, ir.Read):
            name = self.names.of(value.local)
            return (f"{name}[{self.local_index(value.index)}]" if value.index else name), _ATOM
        if isinstance(value, ir.Load):
            text = f"{self.names.container(value.container)}[{self.index(value.indices) or 'None'}]"
            return (f"{text}[{self.index(value.component)}]" if value.component else text), _ATOM
        if isinstance(value, ir.Size):
            return f"{self.names.container(value.container)}.shape[{value.axis}]", _ATOM
        assert isinstance(value, ir.Op)
        return self.operation(value)

    def index(self, index: tuple[int | ir.Value, ...]) -> str:
        return ", ".join(self.text(i) if isinstance(i, ir.Value) else str(i) for i in index)

    def local_index(self, index: tuple[int | ir.Value, ...]) -> str:
        """Of a local array: Taichi takes ti.i32 alone, whatever ``default_ip`` is."""
        texts = (self.index((i,)) for i in index)
        wide = (isinstance(i, ir.Value) and i.dtype != ir.I32 for i in index)
        return ", ".join(f"ti.i32({text})" if is_wide else text for text, is_wide in zip(texts, wide, strict=True))

    def type(self, kind: ir.Type) -> str:
        return f"ti.{kind.name}"

    def constant(self, c: ir.Const, is_explicit: bool = False) -> Text:
        """A literal; with its type where that is not the one that literals have."""
        v = c.value
        if isinstance(v, bool) and c.dtype == ir.U1:
            return repr(v), _ATOM
        text = repr(v)
        if isinstance(v, float) and not math.isfinite(v):
            text = "nan" if v != v else "inf" if v > 0 else "-inf"
        default = self.program.default_real if isinstance(v, float) else self.program.default_integer
        if is_explicit or c.dtype != default:
            return f"{self.type(c.dtype)}({text})", _ATOM  # exact, which ti.cast of a literal is not
        return text, 12 if text.startswith("-") else _ATOM

    # --- operations

    def operation(self, op: ir.Op) -> Text:
        special: Callable[[ir.Op], Text] | None = getattr(self, f"_{op.name}", None)
        if special is not None:
            return special(op)
        if all(isinstance(a, ir.Const) for a in op.args):
            return self._of_constants(op)
        if op.name in INFIX:
            return self._infix(op)
        if op.name in PREFIX:
            sign, strength = PREFIX[op.name]
            return f"{sign}{self.text(op.args[0], strength + (strength == 12))}", strength
        return f"{self._function(op.name)}({', '.join(map(self.text, op.args))})", _ATOM

    def _infix(self, op: ir.Op) -> Text:
        sign, strength = INFIX[op.name]
        left, right = strength, strength + 1
        if strength in (2, 3, _POWER):  # nested to the right, as Taichi does
            left, right = strength + 1, strength
        elif strength == _COMPARISON:
            left = strength + 1
        return f"{self.text(op.args[0], left)} {sign} {self.text(op.args[1], right)}", strength

    def _of_constants(self, op: ir.Op) -> Text:
        """An operation on literals, which Python would compute if the first had no type."""
        first, *rest = op.args
        texts = [self.constant(first, True)[0], *(self.constant(a)[0] for a in rest)]  # type: ignore[arg-type]
        if op.name in INFIX:
            return f"({texts[0]} {INFIX[op.name][0]} ({texts[1]}))", _ATOM
        if op.name in PREFIX:
            return f"({PREFIX[op.name][0]}{texts[0]})", _ATOM
        return f"{self._function(op.name)}({', '.join(texts)})", _ATOM

    def _function(self, name: str) -> str:
        if name in ELEMENTARY:
            self.elementary[name] = ELEMENTARY[name]
            return name
        if name in _BUILTIN:
            return name
        return f"ti.math.{name}" if name in _IN_MATH else f"ti.{name}"

    def _random(self, op: ir.Op) -> Text:
        return f"ti.random({self.type(op.dtype)})", _ATOM

    def _global_thread_idx(self, op: ir.Op) -> Text:
        return self.thread or _THREAD, _ATOM

    def _bit_cast(self, op: ir.Op) -> Text:
        return f"ti.bit_cast({self.text(op.args[0])}, {self.type(op.dtype)})", _ATOM

    def _cast(self, op: ir.Op) -> Text:
        (x,) = op.args
        if isinstance(x, ir.Const):
            return f"ti.cast({self.constant(x)[0]}, {self.type(op.dtype)})", _ATOM
        short = {self.program.default_real: "float", self.program.default_integer: "int"}.get(op.dtype)
        if short is not None:
            return f"{short}({self.text(x)})", _ATOM
        return f"ti.cast({self.text(x)}, {self.type(op.dtype)})", _ATOM

    def _ifte(self, op: ir.Op) -> Text:
        condition, then, orelse = op.args
        return f"{self.text(then, 2)} if {self.text(condition, 2)} else {self.text(orelse, 2)}", 1

    # --- groups and other arguments

    def tensor(self, values: tuple[ir.Value, ...], shape: tuple[int, ...], dtype: ir.Type) -> str:
        texts = [self.text(v) for v in values]
        kind = self.type(dtype)
        if len(shape) == 1 and len(texts) > 8 and len(set(texts)) == 1:
            return f"ti.Vector([{texts[0]}] * {len(texts)}, {kind})"
        if len(shape) == 1:
            return f"ti.Vector([{', '.join(texts)}], {kind})"
        rows = (", ".join(texts[i * shape[1] : (i + 1) * shape[1]]) for i in range(shape[0]))
        return f"ti.Matrix([{', '.join(f'[{row}]' for row in rows)}], {kind})"

    def argument(self, x: object) -> str:
        """Anything that a call can take."""
        match x:
            case ir.Value():
                return self.text(x)
            case ir.Tensor(entries=entries, shape=shape):
                return self.tensor(entries, shape, x.dtype)
            case ir.Struct(members=members, kind=kind):
                texts = ", ".join(f"{k}={self.argument(m)}" for k, m in members.items())
                return f"{'ti.Struct' if kind is None else self.names.object(kind, 'Struct')}({texts})"
            case ir.Container():
                return self.names.container(x)
            case ir.Type():
                return self.type(x)
            case Format(template=template, args=args):
                given = ", ".join(map(self.argument, args))
                return f"{template!r} % ({given},)" if x.is_percent else f"{template!r}.format({given})"
            case tuple() | list():
                return f"[{', '.join(map(self.argument, x))}]"
            case int() | float() | str() | None:
                return repr(x)
        return self.names.object(x, getattr(x, "__name__", type(x).__name__.lower()))

    def function(self, function: object) -> str:
        """A callable of Taichi's by its public name, where it has one."""
        name = getattr(function, "__name__", "function")
        for owner, path in (
            (ti, "ti"),
            (ti.math, "ti.math"),
            (ti.Matrix, "ti.Matrix"),
            (ti.simt.block, "ti.simt.block"),
        ):
            if getattr(owner, name, None) is function:
                return f"{path}.{name}"
        return self.names.object(function, name)


_ITERABLES = {
    "range": "range({})",
    "ndrange": "ti.ndrange({})",
    "field": "{}",
    "grouped": "ti.grouped({})",
    "grouped ndrange": "ti.grouped(ti.ndrange({}))",
}
_KERNEL = 2  # the depth of statements of the kernel itself
MOST_STORED = 16  # numbers of a local array that Taichi may store one by one


class Lines:
    """Writes the statements of one program."""

    def __init__(self, program: ir.Program, names: Names, annotations: Mapping[str, str]) -> None:
        self.names, self.annotations = names, annotations
        self.expressions = ExpressionWriter(program, names)
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
        if place is not None and (place.file, place.line) != self.last_place:
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
            is_lazy = isinstance(node, ir.Op) and node.name in ir.LAZY
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
            is_one = isinstance(s.values[0], ir.Const) and len(set(s.values)) == 1  # constant
            if self.depth > _KERNEL and len(local.shape) == 1 and len(s.values) > MOST_STORED and is_one:
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
            domain = ", ".join(self.bound(x, is_narrow=s.kind != "range") for x in s.domain)
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
        values = (value for x in ir.statements(s.body) for value in ir.values_of(x))
        if any(isinstance(n, ir.Op) and n.name == "global_thread_idx" for value in values for n in ir.walk(value)):
            thread = self.expressions.thread = self.names.of_function("own_thread")  # Taichi has none in functions
            self.line(f"    {thread} = {_THREAD}")
            arguments = {**arguments, thread: "ti.i32"}
        kernel, self.lines, self.places = (self.lines, self.places), [], []
        depth, self.depth = self.depth, 1
        self.line("@ti.real_func")
        self.line(f"def {name}({', '.join(f'{a}: {kind}' for a, kind in arguments.items())}):")
        self.block(s.body)
        self.functions += [*self.lines, ""]
        self.places_of_functions += [*self.places, None]
        (self.lines, self.places), self.depth, self.expressions.thread = kernel, depth, ""
        self.line(f"    {name}({', '.join(arguments)})")

    def bound(self, x: Any, *, is_narrow: bool) -> str:
        """The bounds of a loop; those of ``ti.ndrange`` give its variables their type, which is ti.i32."""
        if isinstance(x, tuple):
            return f"({', '.join(self.bound(part, is_narrow=is_narrow) for part in x)})"
        return self.expressions.text(cast(x, ir.I32) if is_narrow else x)

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
        for local, value in zip(s.results, s.numbers, strict=True):
            self.line(f"{self.names.declare(local)} = {self.expressions.text(value)}", s.place)


def _is_worth_a_name(node: ir.Value) -> bool:
    """Whether a value that is used twice is computed: not read, converted from a local, or random."""
    if not isinstance(node, ir.Op) or not node.contents.is_pure:
        return False
    return not (node.name == "cast" and isinstance(node.args[0], (ir.Const, ir.Read)))


# Names in an emitted kernel: the user's own, with a number where one is taken.

RESERVED = frozenset((*keyword.kwlist, *dir(builtins), "ti", "inf", "nan", *ELEMENTARY))


class Names:
    """The names of locals, containers and objects; a name is free again where its block has ended."""

    def __init__(self, taken: set[str]) -> None:
        self.scopes: list[set[str]] = [set(taken)]
        self.locals: dict[ir.Local, str] = {}
        self.objects: dict[str, object] = {}  # that the factory takes
        self.counts: dict[str, int] = {}  # names with smaller numbers are taken
        self._outer: list[dict[str, int]] = []

    def open(self) -> None:
        """A block begins."""
        self.scopes.append(set())
        self._outer.append(dict(self.counts))

    def close(self) -> None:
        """A block ends, and its names are free again."""
        self.scopes.pop()
        self.counts = self._outer.pop()

    def fresh(self, name: str) -> str:
        """A name that is free here, like the given one."""
        name = name if name.isidentifier() else "value"
        number = self.counts.get(name, 0)
        new = f"{name}_{number}" if number else name
        while new in RESERVED or any(new in scope for scope in self.scopes):
            number += 1
            new = f"{name}_{number}"
        self.scopes[-1].add(new)
        self.counts[name] = number + 1
        return new

    def declare(self, local: ir.Local) -> str:
        self.locals[local] = self.fresh(local.name)
        return self.locals[local]

    def of(self, local: ir.Local) -> str:
        return local.name if local.kind == "parameter" else self.locals[local]

    def of_function(self, name: str) -> str:
        new = self.fresh(name)
        self.scopes[0].add(new)
        return new

    def object(self, obj: Any, name: str) -> str:
        for known, other in self.objects.items():
            if other is obj:
                return known
        name = name if name.isidentifier() else "value"
        new, number = name, 1
        while new in RESERVED or new in self.objects or any(new in scope for scope in self.scopes):
            new, number = f"{name}_{number}", number + 1
        self.objects[new] = obj
        self.scopes[0].add(new)
        return new

    def container(self, container: ir.Container) -> str:
        return container.name if container.is_argument else self.object(container.object, container.name)
