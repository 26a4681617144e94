"""Print how the package is put together, in numbers that should get smaller.

    python tests/oracles/house_numbers.py

Lines by district; functions that descend into the blocks of statements by themselves, and by the common walker; modules
in circles of imports, those for types included; the largest numbers of attributes of a class; how often ``Any`` is named;
conditions that ask for the mode (dense rows, sparse entries, energies; forward, reverse, once more), ``--modes`` lists
them; places that raise ``DenseRowsError``; functions between a call of ``jacobian`` and the first one that knows a
derivative.
"""

import ast
import inspect
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any

import taichi as ti
from package_modules import MODULES, name_of, own_imports, tree_of

from taichi_ext import jacobian
from taichi_ext.differentiate.rules import table


def attributes(node: ast.ClassDef) -> set[str]:
    """The names of the attributes of instances of a class: fields of a dataclass, and attributes set on ``self``."""
    fields = {s.target.id for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)}
    stored = (n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    return fields | {n.attr for n in stored if isinstance(n.value, ast.Name) and n.value.id == "self"}


def functions_that_descend() -> tuple[list[str], list[str]]:
    """The functions that go into the blocks of statements: by themselves, and by ``mapped`` alone."""
    alone: list[str] = []
    by_walker: list[str] = []
    for module in MODULES:
        if "taichi_ext.program" not in module.read_text(encoding="utf-8"):
            continue
        for function in (n for n in ast.walk(tree_of(module)) if isinstance(n, ast.FunctionDef)):
            nodes = list(ast.walk(function))
            attributes = {n.attr for n in nodes if isinstance(n, ast.Attribute)}
            used = attributes | {n.id for n in nodes if isinstance(n, ast.Name)}
            goes_down = attributes & {"then", "orelse"} or used & {"bodies", "with_blocks", "with_bodies"}
            if goes_down or "mapped" in used:
                (alone if goes_down else by_walker).append(f"{name_of(module)}.{function.name}")
    return alone, by_walker


MODES = {"sparse", "is_sparse", "is_dense", "writer", "numbering", "energy", "gradient", "use.sums", "projection"}
MODES |= {"is_again", "is_lowered", "is_reverse", "is_energy", "has_rows_of_outputs", "is_direct"}
MODES |= {"all_in_rows", "has_dual_numbers", "may_begin_again"}  # facts that a mode sets
WITH_MODES = ("engine", "launches", "differentiate", "api", "runtime.launching")


def asked(node: ast.expr) -> Iterator[str]:
    """The names that a condition asks for: ``a`` and ``b.c`` of ``x.a is None and not b.c``."""
    match node:
        case ast.BoolOp(values=parts):
            for part in parts:
                yield from asked(part)
        case ast.Compare(left=left, comparators=others):
            for part in (left, *others):
                yield from asked(part)
        case ast.UnaryOp(operand=part):
            yield from asked(part)
        case ast.Attribute(attr=name, value=owner):
            yield from (name.lstrip("_"), f"{getattr(owner, 'attr', '')}.{name}")
        case ast.Name(id=name):
            yield name


def conditions_on_modes() -> list[str]:
    """``if``, ``while``, conditional expressions, filters, guards, assertions and ``and`` or ``or`` that ask for a mode."""
    found = []
    for module in (m for m in MODULES if name_of(m).startswith(WITH_MODES)):
        seen: set[ast.AST] = set()
        for node in ast.walk(tree_of(module)):
            tests = [getattr(node, "test", None), getattr(node, "guard", None), *getattr(node, "ifs", ())]
            for test in [t for t in (*tests, node) if isinstance(t, ast.expr) and t not in seen]:
                if test is not node or isinstance(node, ast.BoolOp):
                    seen.update(ast.walk(test))
                    if MODES & set(asked(test)):
                        found.append(f"{name_of(module)}:{test.lineno}: {ast.unparse(test)}")
    return found


def functions_to_a_derivative() -> list[str]:
    """The package's functions that are running when the first rule of the table is looked up."""
    ti.init(arch=ti.cpu, offline_cache=False, log_level=ti.ERROR)
    x, y = ti.field(ti.f32, 2), ti.field(ti.f32, 2)

    @ti.kernel
    def sine():
        for i in x:
            y[i] = ti.sin(x[i])

    found: list[list[str]] = []
    rule_of = table.rule_of
    code = rule_of.__code__

    def noted(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is code and not found:
            files = ((f.function, f.filename) for f in inspect.getouterframes(frame, 0))
            found.append([name for name, file in files if "taichi_ext" in file and "tests" not in file])

    sys.setprofile(noted)
    try:
        jacobian(sine, x, y)
    finally:
        sys.setprofile(None)
    return found[0][::-1]


def main() -> None:
    lines: Counter[str] = Counter()
    any_count, classes = 0, []
    for module in MODULES:
        tree = tree_of(module)
        lines[name_of(module).split(".")[0] or "taichi_ext"] += len(module.read_text(encoding="utf-8").splitlines())
        any_count += sum(isinstance(n, ast.Name) and n.id == "Any" for n in ast.walk(tree))
        found = (n for n in ast.walk(tree) if isinstance(n, ast.ClassDef))
        classes += [(len(attributes(n)), f"{name_of(module)}.{n.name}") for n in found]
    print(f"{lines.total()} lines:", ", ".join(f"{name} {count}" for name, count in lines.most_common()))
    try:
        TopologicalSorter({name_of(m): own_imports(m) for m in MODULES}).prepare()
        print("no circles of imports")
    except CycleError as error:
        print("a circle of imports:", " -> ".join(error.args[1]))
    print("attributes:", ", ".join(f"{name} {count}" for count, name in sorted(classes, reverse=True)[:10]))
    print(f"Any: {any_count} times")
    alone, by_walker = functions_that_descend()
    print(f"{len(alone)} functions descend into the blocks of statements by themselves, {len(by_walker)} by mapped")
    conditions = conditions_on_modes()
    print(f"{len(conditions)} conditions on modes", *(conditions if "--modes" in sys.argv else ()), sep="\n    ")
    raises = sum(module.read_text(encoding="utf-8").count("raise DenseRowsError") for module in MODULES)
    print(f"{raises} places raise DenseRowsError; {len(MODULES)} modules")
    steps = functions_to_a_derivative()
    print(f"{len(steps)} functions from jacobian to a derivative:", " > ".join(steps))


if __name__ == "__main__":
    main()
