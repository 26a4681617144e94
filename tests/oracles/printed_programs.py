"""A program as text for people: one statement a line, types where a local is declared."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from taichi_ext import program as ir
from taichi_ext.program.values import Const, Container, FoldedConst, Format, Load, Local, Op, Read, Size, Struct, Tensor

SIGNS = {
    **{"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**"},
    **{"bit_and": "&", "bit_or": "|", "bit_xor": "^", "shift_left": "<<", "shift_right": ">>"},
    **{"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="},
    **{"logical_and": "and", "logical_or": "or"},
}


def text(program: ir.Program) -> str:
    """The whole program; numbers distinguish locals of one name."""
    printer = _Printer()
    arguments = ", ".join(a.name for a in program.arguments)
    printer.lines.append(f"program {program.name}({arguments}):")
    printer.block(program.body)
    return "\n".join(printer.lines) + "\n"


class _Printer:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 0
        self.names: dict[Local, str] = {}
        self.counts: Counter[str] = Counter()

    def name(self, local: Local) -> str:
        if local not in self.names:
            self.counts[local.name] += 1
            number = self.counts[local.name]
            self.names[local] = local.name if number == 1 else f"{local.name}.{number}"
        return self.names[local]

    def value(self, x: object) -> str:
        match x:
            case Const(value=value, dtype=dtype):
                return f"{value!r}:{dtype}"
            case FoldedConst(value=value, dtype=dtype, source=source):
                return f"{value!r}:{dtype}<{self.value(source)}>"
            case Read(local=local, index=index):
                return self.name(local) + (f"[{self.list(index)}]" if index else "")
            case Load(container=container, indices=indices, component=component):
                return f"{container.name}[{self.list(indices)}]" + (f"[{self.list(component)}]" if component else "")
            case Size(container=container, axis=axis):
                return f"{container.name}.shape[{axis}]"
            case Op(name=name, args=(a, b)) if name in SIGNS:
                return f"({self.value(a)} {SIGNS[name]} {self.value(b)})"
            case Op(name=name, args=args, dtype=dtype):
                return f"{dtype if name == 'cast' else name}({self.list(args)})"
            case Tensor(entries=entries):
                return f"[{self.list(entries)}]"
            case Struct(members=members):
                return self.value(members)
            case Container(name=name):
                return name
            case Format(template=template, args=args):
                return f"{template!r}.format({self.list(args)})"
            case tuple() | list():
                return f"({self.list(x)})"
        if isinstance(x, Mapping):
            return "{" + ", ".join(f"{k}: {self.value(v)}" for k, v in x.items()) + "}"
        return getattr(x, "__name__", None) or repr(x)

    def list(self, values: Any) -> str:
        return ", ".join(map(self.value, values))

    def line(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)

    def block(self, body: ir.Body) -> None:
        self.depth += 1
        for statement in body:
            self.statement(statement)
        if not body:
            self.line("pass")
        self.depth -= 1

    def locals(self, locals_: tuple[Local, ...]) -> str:
        return ", ".join(f"{self.name(l)}: {_type_text(l)}" for l in locals_)

    def statement(self, s: ir.Statement) -> None:
        match s:
            case ir.Declare(local=local, values=values):
                given = f"[{self.list(values)}]" if local.shape else self.value(values[0])
                self.line(f"{self.locals((local,))} = {given}")
            case ir.Assign(target=target, value=value):
                self.line(f"{self.value(target)} = {self.value(value)}")
            case ir.Update(target=target, op=op, value=value):
                self.line(f"{self.value(target)} {SIGNS.get(op, op)}= {self.value(value)}")
            case ir.Atomic(function=function, target=target, value=value, result=result):
                start = "" if result is None else f"{self.locals((result,))} = "
                self.line(f"{start}{function}({self.value(target)}, {self.value(value)})")
            case ir.If() | ir.While() | ir.For():
                self.compound(s)
            case ir.Jump(kind=kind):
                self.line(kind)
            case ir.Return(values=values):
                self.line(f"return {self.list(values)}")
            case ir.Call(function=function, args=args, results=results):
                self.line(f"{self.locals(results)} = {function}({self.list(args)})")
            case ir.Effect(function=function, args=args, results=results, keywords=keywords):
                start = f"{self.locals(results)} = " if results else ""
                named = [f"{k}={self.value(v)}" for k, v in keywords.items()]
                self.line(f"{start}effect {self.value(function)}({', '.join([*map(self.value, args), *named])})")
            case ir.Boundary(kind=kind, target=target, given=given, values=values, results=results):
                start = f"{self.locals(results)} = " if results else ""
                named = [f"{k}={self.value(v)}" for k, v in given.items()]
                what = kind if target is None else f"{kind} {self.value(target)}"
                self.line(f"{start}boundary {what}({', '.join(named)}) of {self.value(values)}")

    def compound(self, s: ir.If | ir.While | ir.For) -> None:
        if isinstance(s, ir.If):
            self.line(f"if {self.value(s.condition)}:")
            self.block(s.then)
            if s.orelse:
                self.line("else:")
                self.block(s.orelse)
            return
        if isinstance(s, ir.While):
            self.line(f"while {True if s.condition is None else self.value(s.condition)}:")
        else:
            names = ", ".join(map(self.name, s.variables))
            config = f" with {dict(s.config)}" if s.config else ""
            self.line(f"for {names} in {s.kind}({self.list(s.domain)}){config}:")
        self.block(s.body)


def _type_text(local: Local) -> str:
    return repr(local.dtype) + (f"[{', '.join(map(str, local.shape))}]" if local.shape else "")
