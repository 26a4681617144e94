"""How many faults the tests would find: ``python tests/power.py --count 30 --seed 1 --table tests/power.md``.

Small changes are drawn at random in the districts below, each alone in a copy of the package: a flipped sign, a dropped term, swapped
operands, another bound or guard, a number off by one, a statement (a clear, an undo) left out. For each, the mapped tests run
until one fails: those of whole folders, or with ``--whole`` the sweeps, too. The table names what was changed, and the test that
failed. A change that no test finds either does not change what the package does, or asks for a test.
"""

import argparse
import ast
import compileall
import contextlib
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# what is changed, and the tests that are run for it, by folder: the nearest first, since the first failure ends a run
TABLE = """
differentiate/rules: differentiate/differentiate,rules language/language_rows,decompositions solvers/hessian
simplify: differentiate/record_emit,rewrite language/short_loops,programs,language,random_programs
schedule: differentiate/lanes,lanes_of_arithmetic,masks,elementary,column_loops,random_lanes,column_blocks
    language/loop_order,short_loops,random_programs
analysis: differentiate/intervals,regions,program,position_indices,storage_plan language/bounds api/cuts sparse/sparse
    language/random_programs
differentiate: differentiate/differentiate,tangent_options,reverse_loops,column_blocks,by_column,storage_plan
    sparse/sparse,sparse_sums,sparse_hessian language/language_whole_fields,language_rows,random_programs
record: differentiate/record_emit
    language/language,language_python,language_functions,programs,programs_with_functions,captures,constants
    language/language_rows,language_whole_fields
    custom/registry,edges,reverse_rules,exact_pixels api/bad_input
adjoint: adjoint reverse api/products
api: api pipelines/state
backend: backend language/arrays,captures pipelines/destroyed_trees
checks: api/check,check_steps,cuts,export_checks
launches: pipelines/pipelines,state,random_pipelines api/products sparse/sparse_hessian language/components
runtime/launching: pipelines/pipelines,state,random_pipelines,host_stores,arbiter solvers/implicit sparse/sparse_versions
    solvers/projection api/bad_input
runtime/memory: differentiate/regions language/views,arrays pipelines/pipelines,state,random_pipelines
    sparse/sparse_layout_state language/components
runtime/python: pipelines/arbiter,passed_numbers,pipelines,state,random_pipelines
runtime/reverse: reverse adjoint/stage_order solvers/hvp api/products pipelines/destroyed_trees
runtime/sparse: sparse solvers/energy_pipelines
boundary: custom
solvers: api/wrong_calls solvers
"""


def named_tests(row: str) -> list[str]:
    """The modules and folders of a row of the table."""
    folders = [word.partition("/")[::2] for word in row.split()]
    return [f"{folder}/test_{name}.py" if name else folder for folder, names in folders for name in names.split(",")]


DISTRICTS = {name: named_tests(row) for name, row in re.findall(r"^(\S+): (.*(?:\n .*)*)", TABLE, re.MULTILINE)}
PLAIN = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%"}
OTHER = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "is not": "is"}
OTHER |= {"in": "not in", "not in": "in"}
NAMES = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is"}
NAMES |= {ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in"}
ROW = re.compile(r"^\| (\d+) \| (\S+):(\d+) \| ([\w ]+) \| `(.+?)` → `(.+?)` \| ", re.MULTILINE)  # of a table
TEXT = (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp)


@dataclass(frozen=True)
class Mutant:
    path: Path
    line: int
    kind: str
    old: str
    new: str
    start: int  # bytes of the file
    end: int

    @property
    def place(self) -> str:
        return f"{self.path.relative_to(ROOT / 'taichi_ext').as_posix()}:{self.line}"


class Mutations(ast.NodeVisitor):
    """All changes of a module, in the order of its lines."""

    def __init__(self, path: Path) -> None:
        self.path, self.source = path, path.read_bytes()
        self.starts = [0]
        for line in self.source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.found: list[Mutant] = []
        self.depth = 0  # of functions
        self.visit(ast.parse(self.source))

    def text(self, node: ast.AST) -> str:
        return self.source[slice(*self.span(node))].decode()

    def span(self, node: ast.AST) -> tuple[int, int]:
        start = self.starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        return start, self.starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def add(self, node: ast.AST, kind: str, new: str) -> None:
        start, end = self.span(node)
        if self.depth:
            line = node.lineno  # type: ignore[attr-defined]
            self.found.append(Mutant(self.path, line, kind, self.text(node), new, start, end))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name in ("__repr__", "__str__"):
            return
        self.depth += 1
        for statement in node.body:
            self.visit(statement)
        self.depth -= 1

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.depth += 1
        self.visit(node.body)
        self.depth -= 1

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def leave_out(self, node: ast.AST) -> None:
        """Messages are not worth a change."""

    visit_Raise = visit_Assert = visit_JoinedStr = leave_out

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
            self.add(node, "sign", f"({self.text(node.operand)})")
        elif isinstance(node.op, ast.Not):
            self.add(node, "guard", f"bool({self.text(node.operand)})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        left, right, symbol = self.text(node.left), self.text(node.right), PLAIN.get(type(node.op))
        if symbol and not self.is_text(node):
            if symbol in "+-":
                self.add(node, "sign", f"({left} {'-' if symbol == '+' else '+'} {right})")
            if symbol in "+-*":
                self.add(node, "dropped term", f"({left})")
            if symbol not in "+*":
                self.add(node, "swapped operands", f"(({right}) {symbol} ({left}))")
        self.generic_visit(node)

    def is_text(self, node: ast.BinOp) -> bool:
        sides = (node.left, node.right)
        return any(isinstance(s, TEXT) or (isinstance(s, ast.Constant) and isinstance(s.value, str)) for s in sides)

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            left, right, symbol = self.text(node.left), self.text(node.comparators[0]), NAMES[type(node.ops[0])]
            self.add(node, "bound" if symbol[0] in "<>" else "guard", f"({left} {OTHER[symbol]} {right})")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        word = " or " if isinstance(node.op, ast.And) else " and "
        texts = [f"({self.text(value)})" for value in node.values]
        self.add(node, "guard", f"({word.join(texts)})")
        self.add(node, "dropped term", texts[0])
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        is_raise = isinstance(node.body[0], ast.Raise)
        self.add(node.test, "guard", "False" if is_raise else "True")
        if not is_raise:
            self.add(node.test, "guard", "False")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if len(node.args) == 2 and not node.keywords and not any(isinstance(a, ast.Starred) for a in node.args):
            a, b = map(self.text, node.args)
            if self.text(node.func) not in ("isinstance", "getattr", "hasattr", "zip"):
                self.add(node, "swapped arguments", f"{self.text(node.func)}({b}, {a})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if type(node.value) is int:
            self.add(node, "off by one", f"{node.value + 1}")

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and "warn" not in self.text(node.value.func):
            self.add(node, "left out", "pass")
        if not isinstance(node.value, ast.Constant):
            self.generic_visit(node)


def mutants(count: int, seed: int, districts: list[str], by_lines: bool) -> Iterator[tuple[str, Mutant]]:
    """So many, alike many of each district or as many as it has lines, and of each kind."""
    draw = random.Random(seed)
    pools: dict[str, dict[str, list[Mutant]]] = {name: {} for name in DISTRICTS if name in districts}
    lines: Counter[str] = Counter()
    for path in sorted((ROOT / "taichi_ext").rglob("*.py")):
        name = path.relative_to(ROOT / "taichi_ext").as_posix()
        district = district_of(name)
        lines[district] += len(path.read_bytes().splitlines())
        for mutant in Mutations(path).found if district in pools else ():
            pools[district].setdefault(mutant.kind, []).append(mutant)
    turns = {name: draw.sample(sorted(pool), len(pool)) for name, pool in pools.items() if pool}
    for _ in range(count):
        name = draw.choices(list(turns), [lines[n] for n in turns])[0] if by_lines else next(iter(turns))
        kinds = turns.pop(name)  # and at the end again, where some are left
        kind, pool = kinds[0], pools[name][kinds[0]]
        yield name, pool.pop(draw.randrange(len(pool)))
        if kinds := [*kinds[1:], *([kind] if pool else [])]:
            turns[name] = kinds


def district_of(name: str) -> str:
    return max((d for d in DISTRICTS if name.startswith(f"{d}/")), key=len, default="")


def mutants_again(table: Path) -> Iterator[tuple[str, Mutant]]:
    """The changes of a table, each where its text is nearest to its line; those whose text is gone are printed."""
    for number, name, line, kind, old, new in ROW.findall(table.read_text(encoding="utf-8").replace("\\|", "|")):
        path = ROOT / "taichi_ext" / name
        source = path.read_bytes() if path.exists() else b""
        places = list(re.finditer(rb"\s+".join(map(re.escape, old.encode().split())), source))
        starts = [1 + source[: place.start()].count(b"\n") for place in places]
        nearest = min(range(len(places)), key=lambda n: abs(starts[n] - int(line)), default=None)
        if nearest is None:
            print(f"gone: {number}: {name}:{line}: {old}")
        else:
            yield district_of(name), Mutant(path, starts[nearest], kind, old, new, *places[nearest].span())


def run_tests(copy: Path, modules: list[str], chosen: str, log: Path, limit: float) -> str:
    """Run modules in a forked process with this copy of the package: the test that failed, or ''."""
    child = os.fork()
    if child == 0:
        os.setsid()
        with open(log, "wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.path.insert(0, str(copy))
        os.environ["PYTHONPATH"] = str(copy)
        os.chdir(ROOT)
        import pytest

        paths = [f"tests/{module}" for module in modules]
        options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", chosen]
        os._exit(int(pytest.main([*options, *paths])))
    end = time.monotonic() + limit
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            failures = re.findall(r"^(?:FAILED|ERROR) (tests/\S+)", log.read_text(errors="replace"), re.MULTILINE)
            code = os.waitstatus_to_exitcode(status)
            return (failures[-1] if failures else f"ends with {code}") if code else ""
        time.sleep(0.2)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return f"not done after {limit:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--districts", nargs="*", default=list(DISTRICTS), choices=list(DISTRICTS))
    parser.add_argument("--by-lines", action="store_true", help="as many changes of a district as it has lines")
    parser.add_argument(
        "--again", type=Path, metavar="TABLE", help="make the changes of this table again, and no others"
    )
    parser.add_argument("--whole", action="store_true", help="run the sweeps of the mapped tests, too")
    parser.add_argument("--baseline", action="store_true", help="first see that all mapped tests pass without a change")
    parser.add_argument("--limit", type=float, default=900, help="seconds after which a run counts as failed")
    parser.add_argument("--table", type=Path, help="write the table here")
    parser.add_argument("--list", action="store_true", help="print the changes and run nothing")
    options = parser.parse_args()
    if gone := [name for names in DISTRICTS.values() for name in names if not (ROOT / "tests" / name).exists()]:
        parser.error(f"{gone} are no tests: each change would count as found")
    if options.again:
        chosen = [(d, mutant) for d, mutant in mutants_again(options.again) if d in options.districts]
    else:
        chosen = list(mutants(options.count, options.seed, options.districts, options.by_lines))
    if options.list:
        for district, mutant in chosen:
            print(f"{district}: {mutant.place}: {mutant.kind}: {mutant.old} -> {mutant.new}")
        return

    import hypothesis  # noqa: F401  all that takes long to import, once for all runs
    import pytest  # noqa: F401
    import scipy.optimize  # noqa: F401
    import scipy.sparse  # noqa: F401
    import taichi  # noqa: F401

    with contextlib.suppress(ImportError):
        import torch  # noqa: F401

    sys.dont_write_bytecode = True
    rows, counts = [], Counter()
    head = ["| | place | kind | change | test that fails |", "|--:|---|---|---|---|"]
    with tempfile.TemporaryDirectory(prefix="power-") as scratch:
        copy = Path(scratch)
        shutil.copytree(ROOT / "taichi_ext", copy / "taichi_ext", ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(copy, quiet=1)
        tests = "sweep or not sweep" if options.whole else "not sweep"
        for district in options.districts if options.baseline else ():
            if failed := run_tests(copy, DISTRICTS[district], tests, copy / "log.txt", options.limit):
                sys.exit(f"without any change, {failed} fails")
        for number, (district, mutant) in enumerate(chosen, 1):
            target = copy / mutant.path.relative_to(ROOT)
            source = target.read_bytes()
            target.write_bytes(source[: mutant.start] + mutant.new.encode() + source[mutant.end :])
            for cached in (target.parent / "__pycache__").glob(f"{target.stem}.*"):
                cached.unlink()
            started = time.monotonic()
            failed = run_tests(copy, DISTRICTS[district], tests, copy / "log.txt", options.limit)
            target.write_bytes(source)
            counts["found" if failed else "not found"] += 1
            change = " ".join(f"`{mutant.old}` → `{mutant.new}`".split()).replace("|", "\\|")
            rows.append(f"| {number} | {mutant.place} | {mutant.kind} | {change} | {failed or '**none**'} |")
            print(rows[-1], f"{time.monotonic() - started:.0f} s", flush=True)
            if options.table:
                title = f"{counts['found']} of {counts.total()} changes are found; `{' '.join(sys.argv)}`."
                options.table.write_text("\n".join([title, "", *head, *rows, ""]), encoding="utf-8")
    print(dict(counts))


if __name__ == "__main__":
    main()
