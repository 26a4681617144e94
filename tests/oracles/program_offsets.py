"""Random programs whose fields begin at other indices than 0: the same text, with every index of such a field moved."""

import ast
import itertools
import random
import re
from typing import Any

IS_DRAWN = False  # whether fields of random programs have offsets
Offset = tuple[int, ...]


def drawn_offsets(text: str, fields: dict[str, tuple[int, ...]]) -> dict[str, Offset]:
    """The first indices of fields, by name, if these are drawn; ``fields`` are shapes, and ``text`` is that of the program."""
    found = {}
    for name, shape in fields.items():
        draws = random.Random(str(shape) if ".copy_from(" in text else f"{name} {shape}")  # Taichi copies equal indices
        if IS_DRAWN and shape and draws.random() < 0.7:
            found[name] = tuple(draws.randint(-4, 4) for _ in shape)
    return found


def with_offsets(text: str, offsets: dict[str, Offset]) -> str:
    """The text with each index of these fields moved, and with their offsets where it defines them."""
    return ast.unparse(_Mover(offsets).visit(ast.parse(text))) if offsets else text


class _Mover(ast.NodeTransformer):
    def __init__(self, offsets: dict[str, Offset]) -> None:
        self.offsets = offsets
        self.variables: dict[str, Offset] = {}  # of loops over fields: by how much each is above what the text means

    def offset(self, node: ast.AST) -> Offset | None:
        """That of a field, or of a member of it."""
        path = re.fullmatch(r"(?:self\.)?(\w+)((?!\.shape)[^\[])*", ast.unparse(node))
        return self.offsets.get(path[1]) if path else None

    def moved(self, index: ast.expr, offset: Offset) -> Any:
        """An index, which may be a vector."""
        by = self.variables.get(ast.unparse(index), ())
        difference = [b - a for a, b in zip(by or (0,) * len(offset), offset, strict=True)]
        text = ast.unparse(index if by else self.visit(index))
        more = difference[0] if len(offset) == 1 else f"ti.Vector({difference})"
        return ast.parse(f"{text} + {more}" if any(difference) else text, mode="eval").body

    def visit_Assign(self, node: ast.Assign) -> Any:
        name = node.targets[0]
        if isinstance(name, ast.Name) and name.id in self.offsets and isinstance(node.value, ast.Call):
            node.value.keywords.append(ast.keyword("offset", ast.Constant(self.offsets[name.id])))
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> Any:
        for n, (field, index) in enumerate(itertools.pairwise(node.args)):  # to a function that names an entry
            if isinstance(field, ast.Name) and field.id in self.offsets:
                node.args[n + 1] = self.moved(index, self.offsets[field.id])
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        offset = self.offset(node.value)
        if offset is None:
            return self.generic_visit(node)
        if isinstance(node.slice, ast.Tuple):
            node.slice.elts = [self.moved(i, (n,)) for i, n in zip(node.slice.elts, offset, strict=True)]
        else:
            node.slice = self.moved(node.slice, offset)
        return node

    def visit_Name(self, node: ast.Name) -> Any:
        by = self.variables.get(node.id)
        more = by and (by[0] if len(by) == 1 else f"ti.Vector({list(by)})")
        return ast.parse(f"({node.id} - {more})", mode="eval").body if by else node

    def visit_For(self, node: ast.For) -> Any:
        grouped = isinstance(node.iter, ast.Call) and ast.unparse(node.iter.func) == "ti.grouped"
        offset = self.offset(node.iter.args[0] if grouped else node.iter)
        if offset is None:
            return self.generic_visit(node)
        names = [ast.unparse(e) for e in getattr(node.target, "elts", [node.target])]
        outer = self.variables
        self.variables = outer | dict(zip(names, [offset] if grouped else [(n,) for n in offset], strict=True))
        node.body = [self.visit(s) for s in node.body]
        self.variables = outer
        return node
