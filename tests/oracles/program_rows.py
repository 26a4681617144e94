"""Tables of small programs: a row has a name, the arguments of a kernel, its fields, what is asked of it, and the program.

A row begins with ``name(arguments): fields | asked``. The arguments and what is asked may be left out: asked are then all
fields of numbers as parameters, and all outputs. A first line that ends with a semicolon goes on. Below are functions and
classes that the kernel names, and the kernel.
"""

import ast
import re
import textwrap
from dataclasses import dataclass
from typing import Any

import differences
import numpy as np
import taichi as ti
import taichi.math as tm
from devices import real
from differences import Snapshot, as_list
from kernel_texts import kernels_of
from numpy.testing import assert_allclose

from taichi_ext import jacobian

HEAD = re.compile(r"^(\w+)(\(.*\))?: (\w.*? = .*?)(?: \| (.*))?\n", re.MULTILINE)
MAKERS = {"scalars": True, "vectors": True, "matrices": True}  # of parameters; of outputs: False
MAKERS |= {"outputs": False, "vector_outputs": False, "matrix_outputs": False}


@dataclass(frozen=True)
class Row:
    """A program of a table."""

    arguments: str
    fields: str
    asked: str
    body: str

    def made(self, **also: Any) -> tuple[Any, tuple[Any, Any], dict[str, Any]]:
        """The kernel, ``params, outs``, and arguments of ``check_jacobian`` by name; ``also`` is what the row names, too."""
        scope = {"ti": ti, "tm": tm, "np": np, "real": real, **vars(differences), **also}
        names = set(scope)
        exec(self.fields, scope)
        text = textwrap.dedent(self.body)
        last = [node.end_lineno for node in ast.parse(text).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
        lines, end = text.splitlines(keepends=True), last[-1] if last else 0
        definitions, kernel = "".join(lines[:end]), "".join(lines[end:])
        own = {name: value for name, value in scope.items() if name not in names or name in also}
        kernel = kernels_of(f"k{self.arguments}:\n{textwrap.indent(kernel, '    ')}", definitions=definitions, **own)[
            "k"
        ]
        if self.asked:
            return kernel, *eval(f"(lambda *asked, **more: (asked, more))({self.asked})", scope)
        made = self._makers()
        params, outs = (
            [scope[name] for name, maker in made if MAKERS[maker] == is_param] for is_param in (True, False)
        )
        return kernel, (params, outs), {}

    def _makers(self) -> list[tuple[str, str]]:
        found = []
        for statement in ast.parse(self.fields).body:
            (target,), value = statement.targets, statement.value
            pairs = zip(target.elts, value.elts, strict=True) if isinstance(target, ast.Tuple) else [(target, value)]
            calls = [
                (name.id, call.func.id) for name, call in pairs if isinstance(getattr(call, "func", None), ast.Name)
            ]
            found += [(name, maker) for name, maker in calls if maker in MAKERS]
        return found

    def is_right(self) -> None:
        """J is that of central differences, and the state that of a plain run."""
        kernel, asked, more = self.made()
        differences.check_jacobian(kernel, *asked, **more)

    def is_alike_in_other_ways(self) -> None:
        """J by entries and by adjoints."""
        kernel, (params, outs), more = self.made()
        start, found = Snapshot([*as_list(params), *as_list(outs), *more.get("state", ())]), []
        for options in ({}, {"format": "csr"}, {"mode": "reverse"}):
            J = jacobian(kernel, params, outs, args=more.get("args", ()), as_matrix=True, **options)
            found.append(J.toarray() if "format" in options else J)
            start.restore()
        assert_allclose(found[1], found[0], rtol=1e-10, atol=1e-12)
        assert_allclose(found[2], found[0], rtol=1e-10, atol=1e-12)


def rows_of(table: str) -> dict[str, Row]:
    """The rows by name."""
    _, *parts = HEAD.split(re.sub(r";\n +", "; ", table))
    rows = {name: Row(*(part or "" for part in parts[n + 1 : n + 5])) for n, name in enumerate(parts) if n % 5 == 0}
    assert len(rows) == len(parts) // 5, "two rows have one name"
    return rows
