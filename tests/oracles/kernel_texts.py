"""Kernels as rows of a table: the bodies of many kernels in one text, each below its name."""

from __future__ import annotations

import linecache
import re
import textwrap
import zlib
from typing import Any

import numpy as np
import taichi as ti
import taichi.math as tm

ROW = re.compile(r"^(\w+)(\(.*)?:\n", re.MULTILINE)


def names_of(table: str) -> list[str]:
    """The names of the kernels of a table, in its order."""
    return [name for name, _ in ROW.findall(textwrap.dedent(table))]


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
        table: lines ``name:``, or ``name(arguments):``, each with the body of a kernel indented below it.
        frame: what all kernels are, with ``...`` on a line in the place of these bodies.
        decorator: of all functions.
        arguments: of those that name none.
        definitions: functions and classes before the kernels.
        scope: what the bodies name, beside ``ti``, ``tm`` and ``np``.
    """
    _, *parts = ROW.split(textwrap.dedent(table).lstrip("\n"))
    before, indent, after = re.split(r"^( *)\.\.\.\n", textwrap.dedent(frame).lstrip("\n"), flags=re.MULTILINE)
    text = definitions
    for name, own, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        whole = before + textwrap.indent(textwrap.dedent(body).rstrip() + "\n", indent) + after
        text += f"{decorator}\ndef {name}{own or arguments}:\n{textwrap.indent(whole, '    ')}\n"
    file = f"<kernels {zlib.crc32(text.encode())}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    names = {"ti": ti, "tm": tm, "np": np, **scope}
    exec(compile(text, file, "exec", dont_inherit=True), names)
    return {name: names[name] for name in parts[::3]}
