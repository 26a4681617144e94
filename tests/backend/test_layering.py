"""How the package is put together: districts, imports in one direction, Taichi's internals in one place, short modules."""

import ast
import sys
from graphlib import CycleError, TopologicalSorter

import pytest
import taichi as ti
from package_modules import MODULES, PACKAGE, imports, name_of, nodes_of, own_imports, tree_of

from taichi_ext.host import RUNTIME, Runtime

PRIVATE = "backend"
PUBLIC = ("taichi", "taichi.math", "taichi.types", "taichi.types.ndarray_type", "taichi.types.primitive_types")
HOST = sorted((PACKAGE / "host").glob("*.py"))  # what Taichi does in its own way
INSIDE = [*sorted((PACKAGE / PRIVATE).glob("*.py")), *HOST]  # where Taichi's internals are used
# From the bottom up: a district imports only from those before it.
DISTRICTS = (
    "host",
    "version",
    "cached",
    "errors",
    "program",
    "simplify",
    "analysis",
    "differentiate",
    "schedule",
    "adjoint",
    "backend",
    "labels",
    "stages",
    "record",
    "emit",
    "launches",
    "boundary",
    "engine",
    "runtime",
    "api",
    "checks",
    "solvers",
    "interop",
    "demo",
    "__main__",
)
# The same within districts that have parts; what lies beside these uses them.
PARTS = {
    "differentiate": (
        "forms",
        "rules",
        "plan",
        "facts",
        "memory",
        "sparse",
        "storage",
        "statements",
        "edges",
        "transform",
    ),
    "runtime": ("memory", "python", "sparse", "launching", "reverse"),
    "api": ("inputs", "runs", "plans"),
}
LONGEST = 600
QUADRANTS = {"quadrants"}
# What is not a dependency of the package is loaded when it is first needed.
OPTIONAL = {
    "quadrants": QUADRANTS,  # in place of Taichi
    "plots": {"matplotlib", "matplotlib.figure", "matplotlib.figure.Figure"},
    "progress": {"rich", "rich.console", "rich.progress", "IPython", "IPython.display"},
    "sparse_results": {"torch"},
    "opaque": {"torch", "typing_extensions"},  # for the type checker alone
    **dict.fromkeys(("hessian", "jacobian"), {"typing_extensions"}),  # likewise
    "matrices": {"scipy", "scipy.sparse", "scipy.sparse.linalg", "scipy.sparse.linalg.splu"},
    "torch_function": {"torch"},
    "torch_products": {"torch"},
}


def offenders(rule):
    """What a rule finds in each module, one line for each that it finds something in."""
    found = {name_of(module): rule(module) for module in MODULES}
    return "".join(f"\n{name}: {what}" for name, what in found.items() if what)


@pytest.fixture(scope="module", autouse=True)
def _trees():
    """They are let go at the end: a million nodes slow down every later garbage collection."""
    yield
    tree_of.cache_clear()
    nodes_of.cache_clear()


def test_modules_are_found():
    assert len(MODULES) > 20
    assert len(INSIDE) > 3


def test_imports_go_one_way():
    """A module is understood without those that use it: also the types in its signatures come from below."""
    graph = {name_of(module): own_imports(module) for module in MODULES}
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"modules import each other: {' -> '.join(error.args[1])}")
    assert order.index(PRIVATE) < order.index("record.recorder") < order.index("engine") < order.index("api.jacobian")
    assert all(
        name.startswith((f"{PRIVATE}.", "host")) or name in ("errors", "cached")
        for m in INSIDE
        for name in graph[name_of(m)]
    )
    assert not any(name.startswith(f"{PRIVATE}.") for m in set(MODULES) - set(INSIDE) for name in graph[name_of(m)])


def internal_names():
    """What the package has of Taichi past its public modules, and the names that it looks up there."""
    imported = {}
    for node in nodes_of(PACKAGE / "host" / "taichi.py"):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "taichi" and node.module not in PUBLIC:
            imported.update((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)
    nodes = (node for module in INSIDE if "quadrants" not in module.stem for node in nodes_of(module))
    looked_up = (n for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name))
    return {*imported.values(), *(f"{imported[n.value.id]}.{n.attr}" for n in looked_up if n.value.id in imported)}


def test_the_number_of_internal_names_is_that_of_the_docs():
    found = internal_names()
    text = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert f"non-public names of Taichi: {len(found)} names" in text


def test_districts_import_from_those_below():
    """For types, too: what a district is about is known without those above it."""
    places = {name: place for place, name in enumerate(DISTRICTS)}
    for module in MODULES:
        district = name_of(module).split(".")[0]
        if module.parent == PACKAGE and module.stem == "__init__":
            continue
        for name in own_imports(module) - {""}:
            assert places[name.split(".")[0]] <= places[district], f"{name_of(module)} imports {name}"


@pytest.mark.parametrize("district", PARTS)
def test_parts_of_a_district_import_from_those_before(district):
    places = {f"{district}.{part}": place for place, part in enumerate(PARTS[district])}
    place_of = lambda name: places.get(".".join(name.split(".")[:2]), len(places))
    for module in (PACKAGE / district).rglob("*.py"):
        inside = {name for name in own_imports(module) if name.startswith(f"{district}.")}
        wrong = {name for name in inside if place_of(name) > place_of(name_of(module))}
        assert not wrong, f"{name_of(module)} imports {wrong}"


def test_the_language_of_the_engine_stands_alone():
    """Analyses of programs are tested without Taichi."""
    for module in (*(PACKAGE / "program").glob("*.py"), *(PACKAGE / "simplify").glob("*.py")):
        names = {name for _, found in imports(module) for name in found}
        own = ("taichi_ext.program", "taichi_ext.simplify", "taichi_ext.cached")
        foreign = {n for n in names if n.startswith("taichi") and not n.startswith(own)}
        assert not foreign, f"{name_of(module)} imports {foreign}"


def test_nothing_imports_the_package_itself():
    """``from taichi_ext import jacobian`` loads everything, which is a cycle in disguise, except for the programs."""
    for module in MODULES:
        if module.stem in ("demo", "__main__"):
            continue
        names = {
            alias.name
            for node in nodes_of(module)
            if isinstance(node, ast.ImportFrom) and node.module == "taichi_ext"
            for alias in node.names
        }
        assert names <= {name_of(m) for m in MODULES}, f"{module.name}: {names}"


def test_imports_stand_at_the_top():
    def delayed(module):
        tree = tree_of(module)
        top = set(tree.body)
        for node in tree.body:  # imports for types, or tried
            if isinstance(node, (ast.If, ast.Try)):
                top |= {child for child in ast.walk(node) if isinstance(child, (ast.Import, ast.ImportFrom))}
        return [
            f"line {node.lineno}: {', '.join(names)}"
            for node, names in imports(module)
            if node not in top and not set(names) <= OPTIONAL.get(module.stem, set())
        ]

    assert not offenders(delayed), "modules are imported inside functions"


def docstrings():
    owners = (n for m in MODULES for n in nodes_of(m) if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef)))
    return {ast.get_docstring(n, clean=False) for n in owners}


def test_one_module_imports_taichi():
    """Another runtime takes its place in ``host``."""
    found = {name_of(m) for m in MODULES for _, names in imports(m) if any(n.split(".")[0] == "taichi" for n in names)}
    assert found == {"host.taichi"}
    assert (Runtime(sys, *[None] * 4).header, RUNTIME.header) == ("import sys as ti", "import taichi as ti")
    imported = {n.value for m in MODULES for n in nodes_of(m) if isinstance(n, ast.Constant)} - docstrings()
    assert not [text for text in imported if isinstance(text, str) and "import taichi" in text]


def test_taichi_s_internals_stay_in_one_module():
    def internals(module):
        if module in INSIDE:
            return []
        found = []
        for node, names in imports(module):
            found += [(node.lineno, n) for n in names if n.startswith("taichi.") and not n.startswith("taichi.math")]
        for node in nodes_of(module):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ti":
                is_module = node.attr in ("lang", "_lib", "_kernels", "_snode")
                is_private = node.attr.startswith("_") and node.attr not in ("__version__", "__name__")
                if is_module or is_private or not hasattr(ti, node.attr):
                    found.append((node.lineno, f"ti.{node.attr}"))
        return found

    assert not offenders(internals), "put it into host/ or backend/, with a test of what it relies on"


def test_modules_have_one_job_and_say_it():
    def docstring(module):
        text = ast.get_docstring(tree_of(module)) or "no docstring"
        first = text.splitlines()[0]
        return "" if first.endswith((".", ":")) else first

    assert not offenders(docstring), "the first line of the docstring is a sentence"


def test_modules_are_short():
    def lines(module):
        count = len(module.read_text(encoding="utf-8").splitlines())
        return count if count > LONGEST else 0

    assert not offenders(lines), f"modules have more than {LONGEST} lines"


def test_functions_are_short():
    def long_functions(module):
        found = []
        for node in nodes_of(module):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                body = node.body
                first = body[1] if ast.get_docstring(node) and len(body) > 1 else body[0]
                length = (node.end_lineno or node.lineno) - first.lineno + 1
                found += [f"{node.name}, {length} lines"] if length > 80 else []
        return found

    assert not offenders(long_functions), "functions have more than 80 lines"


def test_public_names_are_declared_and_exist():
    import taichi_ext

    assert taichi_ext.__all__ == sorted(taichi_ext.__all__)
    for name in taichi_ext.__all__:
        assert hasattr(taichi_ext, name)
    body = tree_of(PACKAGE / "__init__.py").body
    allowed = (ast.ImportFrom, ast.Assign, ast.Expr)
    assert all(isinstance(node, allowed) for node in body), "__init__.py holds the public names and nothing else"


def test_version_stands_in_one_place():
    for path in [*MODULES, PACKAGE.parent / "README.md"]:
        assert "0.1.0" not in path.read_text(encoding="utf-8"), f"{path.name} repeats the version of pyproject.toml"


def test_core_needs_only_taichi_and_numpy():
    allowed = {"taichi", "numpy", "taichi_ext"}
    standard = set(sys.stdlib_module_names)
    for module in MODULES:
        loaded = {name.split(".")[0] for _, names in imports(module) for name in names}
        extra = loaded - allowed - standard - OPTIONAL.get(module.stem, set())
        assert not extra, f"{module.name} imports {extra}"
