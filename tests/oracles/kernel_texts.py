"""Kernels as text: rows of a table, each below its name, or one line."""

import linecache
import re
import textwrap
import zlib
from typing import Any

import numpy as np
import taichi as ti
import taichi.math as tm

import taichi_ext

ARRAYS = {"A": ti.types.ndarray(), **{f"A{n}": ti.types.ndarray(ti.f64, ndim=n) for n in (1, 2)}}
ROW = re.compile(r"^(\w+)(\(.*)?:\n", re.MULTILINE)
LINE = re.compile(r"^(\w+(?:\(.*?\))?(?: -> .*?)?): (\S.*)$", re.MULTILINE)  # a row of one line


def names_of(table: str) -> list[str]:
    """The names of the kernels of a table, in its order."""
    return [name for name, _ in ROW.findall(_below(table))]


def kernels_of(
    table: str,
    /,
    frame: str = "...\n",
    definitions: str = "",
    decorator: str = "@ti.kernel",
    arguments: str = "()",
    **scope: Any,
) -> dict[str, Any]:
    """The kernels of a table, or other functions, by name.

    Args:
        table: lines ``name:``, or ``name(arguments):``, each with the body of a kernel indented below it, or behind it as
            for ``kernel_of``.
        frame: what all kernels are, with ``...`` on a line in the place of these bodies.
        decorator: of all functions.
        arguments: of those that name none.
        definitions: functions and classes before the kernels.
        scope: what the bodies name, beside ``ti``, ``tm``, ``np`` and functions of ``taichi_ext``.
    """
    _, *parts = ROW.split(_below(table).lstrip("\n"))
    before, indent, after = re.split(r"^( *)\.\.\.\n", textwrap.dedent(frame).lstrip("\n"), flags=re.MULTILINE)
    text = definitions
    for name, own, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        whole = before + textwrap.indent(textwrap.dedent(body).rstrip() + "\n", indent) + after
        text += f"{decorator}\ndef {name}{own or arguments}:\n{textwrap.indent(whole, '    ')}\n"
    names = _run(text, scope)
    return {name: names[name] for name in parts[::3]}


def kernel_of(text: str, arguments: str = "", /, **scope: Any) -> Any:
    """A kernel of a few statements, or of one loop around them, on one line: a closure of the names in the scope.

    Arguments are written as in Python, here or as in a row of a table: ``total(x: A) -> ti.f64: return x[0]``. A is any array,
    A1 and A2 are arrays of float64 with so many axes.
    """
    return _closure("@ti.kernel", text, arguments, scope)


def func_of(text: str, arguments: str = "", /, **scope: Any) -> Any:
    """A function of Taichi, likewise."""
    return _closure("@ti.func", text, arguments, scope)


def _closure(decorator: str, text: str, arguments: str, scope: dict[str, Any]) -> Any:
    row = LINE.fullmatch(text)
    head, body = row.groups() if row else ("kernel" if "k" in scope else "k", text)
    head += "" if "(" in head else f"({arguments})"
    text = f"{decorator}\ndef {head}:\n{textwrap.indent(_statements(body), '    ')}\nreturn {head.partition('(')[0]}\n"
    return _run(f"def make({', '.join(scope)}):\n{textwrap.indent(text, '    ')}", {})["make"](**scope)


def _below(table: str) -> str:
    """The table with all bodies below their names."""
    return LINE.sub(lambda row: f"{row[1]}:\n{textwrap.indent(_statements(row[2]), '    ')}", textwrap.dedent(table))


def _statements(line: str) -> str:
    """Statements that stand on one line, maybe behind the head of a loop, on lines of their own."""
    head, body = re.fullmatch(r"(for [^:]*: )?(.*)", line).groups()
    return body.replace("; ", "\n") if head is None else f"{head}\n    " + body.replace("; ", "\n    ")


def squares(x: Any, y: Any) -> Any:
    """y[i] = x[i]^2, in a kernel of its own."""
    return kernel_of("square: for i in x: y[i] = x[i] ** 2", x=x, y=y)


def _run(text: str, scope: dict[str, Any]) -> dict[str, Any]:
    """Run a module of this text, which Taichi can read again; the names in it."""
    file = f"<kernels {zlib.crc32(text.encode())}.py>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    # no others, since messages list what is known
    known = {name: kind for name, kind in ARRAYS.items() if f": {name}" in text}
    known |= {name: getattr(taichi_ext, name) for name in taichi_ext.__all__ if re.search(rf"\b{name}\(", text)}
    names = {"ti": ti, "tm": tm, "np": np, **known, **scope}
    exec(compile(text, file, "exec", dont_inherit=True), names)
    return names
