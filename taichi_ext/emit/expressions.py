"""Values of a program as text, in the language of kernels."""

from __future__ import annotations

import math
from collections.abc import Callable

from taichi_ext.backend import ti
from taichi_ext.emit.names import Names
from taichi_ext.program import U1, Const, Container, Known, Load, Op, Program, Read, Size, Struct, Tensor, Type, Value
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
_IN_MATH = ("popcnt", "clz")
Text = tuple[str, int]  # and how strongly its outermost operation binds


class Expressions:
    """Writes the expressions of one program."""

    def __init__(self, program: Program, names: Names) -> None:
        self.program = program
        self.names = names
        self.shared: dict[Value, str] = {}  # values of the current statement that have names
        self.elementary: dict[str, Elementary] = {}  # the functions of the package that are called

    def text(self, value: Value, level: int = 0) -> str:
        """An expression, in parentheses where something that binds as strongly as ``level`` is around it."""
        if value in self.shared:
            return self.shared[value]
        text, strength = self.unshared(value)
        return f"({text})" if strength < level else text

    def unshared(self, value: Value) -> Text:
        if isinstance(value, Const):
            return self.constant(value)
        if isinstance(value, Known):
            return self.constant(value.constant)
        if isinstance(value, Read):
            name = self.names.of(value.local)
            return (f"{name}[{self.index(value.index)}]" if value.index else name), _ATOM
        if isinstance(value, Load):
            text = f"{self.names.container(value.container)}[{self.index(value.indices) or 'None'}]"
            return (f"{text}[{self.index(value.component)}]" if value.component else text), _ATOM
        if isinstance(value, Size):
            return f"{self.names.container(value.container)}.shape[{value.axis}]", _ATOM
        assert isinstance(value, Op)
        return self.operation(value)

    def index(self, index: tuple[int | Value, ...]) -> str:
        return ", ".join(self.text(i) if isinstance(i, Value) else str(i) for i in index)

    def type(self, kind: Type) -> str:
        return f"ti.{kind.name}"

    def constant(self, c: Const, is_explicit: bool = False) -> Text:
        """A literal; with its type where that is not the one that literals have."""
        v = c.value
        if isinstance(v, bool) and c.dtype == U1:
            return repr(v), _ATOM
        text = repr(v)
        if isinstance(v, float) and not math.isfinite(v):
            text = "nan" if v != v else "inf" if v > 0 else "-inf"
        default = self.program.default_real if isinstance(v, float) else self.program.default_integer
        if is_explicit or c.dtype != default:
            return f"{self.type(c.dtype)}({text})", _ATOM  # exact, which ti.cast of a literal is not
        return text, 12 if text.startswith("-") else _ATOM

    # --- operations

    def operation(self, op: Op) -> Text:
        special: Callable[[Op], Text] | None = getattr(self, f"_{op.name}", None)
        if special is not None:
            return special(op)
        if all(isinstance(a, Const) for a in op.args):
            return self._of_constants(op)
        if op.name in INFIX:
            return self._infix(op)
        if op.name in PREFIX:
            sign, strength = PREFIX[op.name]
            return f"{sign}{self.text(op.args[0], strength + (strength == 12))}", strength
        return f"{self._function(op.name)}({', '.join(map(self.text, op.args))})", _ATOM

    def _infix(self, op: Op) -> Text:
        sign, strength = INFIX[op.name]
        left, right = strength, strength + 1
        if strength in (2, 3, _POWER):  # nested to the right, as Taichi does
            left, right = strength + 1, strength
        elif strength == _COMPARISON:
            left = strength + 1
        return f"{self.text(op.args[0], left)} {sign} {self.text(op.args[1], right)}", strength

    def _of_constants(self, op: Op) -> Text:
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

    def _random(self, op: Op) -> Text:
        return f"ti.random({self.type(op.dtype)})", _ATOM

    def _global_thread_idx(self, op: Op) -> Text:
        return "ti.cast(ti.global_thread_idx(), ti.i32)", _ATOM

    def _bit_cast(self, op: Op) -> Text:
        return f"ti.bit_cast({self.text(op.args[0])}, {self.type(op.dtype)})", _ATOM

    def _cast(self, op: Op) -> Text:
        (x,) = op.args
        if isinstance(x, Const):
            return f"ti.cast({self.constant(x)[0]}, {self.type(op.dtype)})", _ATOM
        short = {self.program.default_real: "float", self.program.default_integer: "int"}.get(op.dtype)
        if short is not None:
            return f"{short}({self.text(x)})", _ATOM
        return f"ti.cast({self.text(x)}, {self.type(op.dtype)})", _ATOM

    def _ifte(self, op: Op) -> Text:
        condition, then, orelse = op.args
        return f"{self.text(then, 2)} if {self.text(condition, 2)} else {self.text(orelse, 2)}", 1

    # --- groups and other arguments

    def tensor(self, values: tuple[Value, ...], shape: tuple[int, ...], dtype: Type) -> str:
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
            case Value():
                return self.text(x)
            case Tensor(entries=entries, shape=shape):
                return self.tensor(entries, shape, x.dtype)
            case Struct(members=members, kind=kind):
                texts = ", ".join(f"{k}={self.argument(m)}" for k, m in members.items())
                return f"{'ti.Struct' if kind is None else self.names.object(kind, 'Struct')}({texts})"
            case Container():
                return self.names.container(x)
            case Type():
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
