"""The modules of the package, their syntax trees and imports."""

import ast
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "taichi_ext"
MODULES = sorted(PACKAGE.rglob("*.py"))


def name_of(module):
    """``api.jacobian``, ``backend.kernels``; a district itself is its name."""
    parts = module.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


NAMES = frozenset(map(name_of, MODULES))


@cache
def tree_of(module):
    return ast.parse(module.read_text(encoding="utf-8"), filename=str(module))


@cache
def nodes_of(module):
    return list(ast.walk(tree_of(module)))


def imports(module):
    """Every import statement in a module, as (statement, names of modules that it may load)."""
    for node in nodes_of(module):
        if isinstance(node, ast.Import):
            yield node, [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield node, [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]


@cache
def own_imports(module):
    """The modules of the package that a module names, those of its types included."""
    names = {name for _, found in imports(module) for name in found if name.startswith("taichi_ext")}
    return {name.removeprefix("taichi_ext").lstrip(".") for name in names} & NAMES
