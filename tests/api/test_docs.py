"""The documentation runs: every Python block of README.md and docs/, and what it says that lines print."""

import ast
import doctest
import importlib
import inspect
import itertools
import pkgutil
import re
import runpy
from pathlib import Path

import pytest
from numpy.testing import assert_allclose
from runtimes import RUNTIME
from taichi_program import end_program

import taichi_ext

pytestmark = pytest.mark.cpu_only("programs that start Taichi themselves")

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
SPLIT = re.compile(r"\s+")
DEVELOPERS = ("architecture", "performance_appendix", "taichi_faults", "boundary/accuracy")


def blocks(page):
    """The Python blocks of a page: number of the first line, and lines."""
    found, inside = [], None
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if inside is None and line.strip() == "```python":
            inside = (number + 1, [])
        elif inside is not None and line.strip() == "```":
            found.append(inside)
            inside = None
        elif inside is not None:
            inside[1].append(line)
    assert inside is None, f"{page.name}: a block is not closed"
    return found


def program_of(page):
    """All blocks that run, each at the line where it stands in the page, so that errors name that line."""
    lines = []
    for start, block in blocks(page):
        lines += [""] * (start - 1 - len(lines)) + block
    return "\n".join(lines) + "\n"


def promised(program):
    """What the page says is printed: the text after ``# ->``."""
    return [line.split("# ->", 1)[1] for line in program.splitlines() if "# ->" in line]


def normalised(lines):
    return [SPLIT.sub(" ", line).strip() for line in lines if line.strip()]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run the text of a page as a program in a folder of its own; gives its names and what it printed."""

    def run_text(text):
        file = tmp_path / "page.py"
        file.write_text(text, encoding="utf-8")
        capsys.readouterr()
        names = runpy.run_path(str(file))
        printed = [
            line for line in capsys.readouterr().out.splitlines() if not line.startswith(("[Taichi]", "[Quadrants]"))
        ]
        return names, printed

    monkeypatch.setenv("TI_CPU_MAX_NUM_THREADS", "2")
    monkeypatch.setenv("TI_OFFLINE_CACHE", "0")
    monkeypatch.chdir(tmp_path)
    yield run_text
    taichi_ext.registry.clear()
    end_program()


def is_for_this_runtime(page):
    return RUNTIME == "quadrants" or "import quadrants" not in program_of(page)


PROGRAMS = [page for page in PAGES if blocks(page) and page.name != "README.md" and is_for_this_runtime(page)]


@pytest.mark.sweep
@pytest.mark.chosen_only("the guide prints what is chosen in one run", "--chunk-size")
@pytest.mark.parametrize("page", PROGRAMS, ids=lambda page: page.name)
def test_page_runs(page, run):
    text = program_of(page)
    for extra in ("scipy", "torch"):
        if f"extra `{extra}`" in page.read_text(encoding="utf-8") and page.parent.name == "howto":
            pytest.importorskip(extra)
    _, printed = run(text)
    assert normalised(printed) == normalised(promised(text))


def test_quickstart_of_the_readme(run):
    found = {start: "\n".join(block) for start, block in blocks(ROOT / "README.md")}
    (program,) = [text for text in found.values() if "ti.init" in text]
    names, printed = run(program)
    assert names["J"].shape == (640, 480, 4)
    (said,) = re.findall(r"print\(J\[360, 280\]\S*\)  # (\[.*\])", program)
    assert normalised(printed)[0] == normalised([said])[0]
    assert_allclose(names["J"][360, 280], [-1.000078, 0.107752, 0.107752, 0.988400], rtol=1e-5)
    assert float(printed[1]) > 0

    (rest,) = [text for text in found.values() if "plan = Jacobian" in text]
    names, _ = run(f"{program}\n{rest}")
    assert_allclose(names["J"][360, 280], [-1.000078, 0.107752, 0.107752, 0.988400], rtol=1e-5)


def test_signature_in_the_readme_is_that_of_the_function():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "J = jacobian(kernel, params, outputs)" in text


def rows_of(text):
    """The cells of the first table in a text, by the first cell of each row."""
    lines = itertools.takewhile(lambda line: line.startswith("|"), text[text.index("\n|") + 1 :].splitlines())
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in cells}


def test_times_of_the_readme_are_those_of_the_performance_page():
    whole = rows_of(
        (ROOT / "docs" / "performance_appendix.md").read_text(encoding="utf-8").partition("<!-- table -->")[2]
    )
    places = {name.split("<br>")[0]: n for n, name in enumerate(whole[""])}
    milliseconds = {
        method: [float(cell.split()[0]) if " (" in cell else None for cell in row] for method, row in whole.items()
    }
    short = rows_of((ROOT / "README.md").read_text(encoding="utf-8").partition("## How fast it is")[2])
    for program, (columns, *times) in list(short.items())[2:]:
        n = places[program]
        assert whole[""][n].endswith(f" x {columns}")
        methods = ["taichi_ext", "primal alone", "hand-derived", "FwdMode by column"]
        expected = [milliseconds[method][n] for method in methods]
        peers = [row[n] for method, row in milliseconds.items() if method.startswith("JAX") and row[n] is not None]
        assert [*map(float, times)] == [*expected, min(peers)]


# --- links and text ---------------------------------------------------------------------------------------------------


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    found = set()
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            title = line.lstrip("#").strip().lower()
            found.add(re.sub(r"[^\w\- ]", "", title).replace(" ", "-"))
    return found


def lines_of_pages():
    """All lines of all pages, each with its page and place."""
    for page in PAGES:
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            yield page, f"{page.name}:{number}", line


def test_links_lead_somewhere():
    wrong = []
    for page, place, line in lines_of_pages():
        for target in re.findall(r"\]\(([^)\s]+)\)", line):
            if target.startswith(("https://", "http://")):
                continue
            path, _, anchor = target.partition("#")
            other = (page.parent / path).resolve() if path else page
            if not other.exists() or (anchor and anchor not in anchors(other)):
                wrong.append(f"{place}: {target}")
    assert not wrong


def test_lines_are_short():
    def may_be_long(page, line):
        is_table = line.startswith("|") or line.startswith("20")  # or the line about the machine above one
        return is_table or (page.name == "kernel.md" and line.startswith("        "))  # printed by the engine

    long = [place for page, place, line in lines_of_pages() if len(line) > 132 and not may_be_long(page, line)]
    assert not long


def test_users_can_read_all_pages():
    """At most 16,000 words, code included; the section of developers, and comments, do not count."""
    pages = [
        page
        for page in (ROOT / "docs").rglob("*.md")
        if not page.relative_to(ROOT / "docs").as_posix().startswith(DEVELOPERS)
    ]
    texts = [re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL) for page in pages]
    words = {page.name: len(re.findall(r"\S*\w\S*", text)) for page, text in zip(pages, texts, strict=True)}
    assert sum(words.values()) <= 16_000, words


def test_tables_have_a_row_for_each_line():
    """A table that was filled as a paragraph still has its separator, in the middle of a line."""
    wrong = [p for _, p, line in lines_of_pages() if "|---|" in line and not re.fullmatch(r" *\|[-:|]+\|", line)]
    assert not wrong


def test_every_page_is_linked_from_the_index():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").as_posix()
        if name != "index.md":
            assert f"({name})" in index, f"docs/index.md does not link {name}"


def test_the_reference_lists_every_public_name():
    listed = re.findall(r"^\.\. auto\w+:: (\w+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(set(taichi_ext.__all__) - {"__version__"})


def test_the_gallery_has_the_first_sentence_and_a_picture_of_every_example():
    text = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    for path in (ROOT / "examples").glob("*.py"):
        first = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").splitlines()[0]
        if not first.startswith("Shared by"):
            (picture,) = (ROOT / "docs" / "pictures").glob(f"{path.stem}.*")
            assert (
                f"[`{path.name}`](../examples/{path.name}):\n{first}\n\n![{path.stem}](pictures/{picture.name})\n"
                in text
            )


def test_quoted_figures_name_an_example():
    """``.ci/figures.py`` compares them with what it prints."""
    names = {name for *_, line in lines_of_pages() for name in re.findall(r"\d ?%?<!-- (\w+) -->", line)}
    assert names <= {path.stem for path in (ROOT / "examples").glob("*.py")}


def test_public_names_are_documented_somewhere():
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    missing = [name for name in taichi_ext.__all__ if f"`{name}" not in text and f"{name}(" not in text]
    assert not missing


@pytest.mark.sweep
def test_the_tables_of_modules_have_every_module():
    """Folders by the page, their modules by ``.ci/modules.py``; tests/backend/test_layering.py tests the imports."""
    package = ROOT / "taichi_ext"
    made = runpy.run_path(str(ROOT / ".ci" / "modules.py"))
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    tables, lines = made["tables"](page), made["first_lines"]()
    modules = {path.relative_to(package).as_posix() for path in package.rglob("*.py") if path.stem != "__init__"}
    assert modules == set(lines)
    assert all(lines.values())
    assert tables.count("\n| `") == len(modules)
    assert len(page.splitlines()) < 400


# The examples in docstrings run as they stand, and every public name has a docstring that says what a user needs.


SKIPPED = {"__main__", "picture", "demo", "host"}  # programs; modules of runtimes that may not be installed
MODULES = sorted(
    m.name.removeprefix("taichi_ext.")
    for m in pkgutil.walk_packages(taichi_ext.__path__, "taichi_ext.")
    if not SKIPPED & set(m.name.split("."))
)

FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


class Checker(doctest.OutputChecker):
    """Compares without the line in which Taichi greets."""

    def check_output(self, want, got, optionflags):
        lines = [line for line in got.splitlines(keepends=True) if not line.startswith(("[Taichi] ", "[Quadrants] "))]
        return super().check_output(want, "".join(lines), optionflags)


def examples_of(name):
    module = importlib.import_module(f"taichi_ext.{name}")
    finder = doctest.DocTestFinder(exclude_empty=True)
    return [test for test in finder.find(module, f"taichi_ext.{name}") if test.examples]


FIRST = ("jacobian", "Jacobian", "vjp", "hessian", "least_squares")  # the others are swept
EXAMPLES = [(name, test.name) for name in MODULES for test in examples_of(name)]


@pytest.fixture
def few_threads(monkeypatch):
    """Examples call ti.init as users do; these set what tests need."""
    monkeypatch.setenv("TI_CPU_MAX_NUM_THREADS", "2")
    monkeypatch.setenv("TI_OFFLINE_CACHE", "0")
    yield
    taichi_ext.registry.clear()
    end_program()


def as_parameters(module, name):
    """The parameters of a test; an exported module takes J in the order of memory, as its docstring says."""
    order = pytest.mark.chosen_only("its example shows J of one run, row by row", "--by-column", "--chunk-size")
    marks = [order] if name.endswith(".Jacobian.export") else []
    marks += [] if name.split(".")[-1] in FIRST else [pytest.mark.sweep]
    return pytest.param(module, name, id=name.removeprefix("taichi_ext."), marks=marks)


@pytest.mark.mostly_sweep("api.hessian.hessian")
@pytest.mark.parametrize(("module", "name"), [as_parameters(*example) for example in EXAMPLES])
@pytest.mark.usefixtures("few_threads")
def test_example(module, name, capsys):
    if module.startswith("interop.torch"):
        pytest.importorskip("torch")
    if module == "interop.plots":
        pytest.importorskip("matplotlib").use("Agg")
    if module.startswith("solvers."):
        pytest.importorskip("scipy")
    (test,) = [t for t in examples_of(module) if t.name == name]
    report = []
    with capsys.disabled():
        runner = doctest.DocTestRunner(Checker(), optionflags=FLAGS)
        # the annotations of kernels are objects, whatever the module of the docstring imports from __future__
        runner.run(test, compileflags=0, out=report.append)
    assert runner.tries > 0
    assert not report, "\n".join(report)


def public_objects():
    for name in taichi_ext.__all__:
        obj = getattr(taichi_ext, name)
        if isinstance(obj, str):
            continue  # __version__
        yield name, obj
        if inspect.isclass(obj) or not callable(obj):
            kind = obj if inspect.isclass(obj) else type(obj)
            for attribute, member in vars(kind).items():
                if not attribute.startswith("_") and (callable(member) or isinstance(member, property)):
                    yield f"{name}.{attribute}", member


@pytest.mark.parametrize(("name", "obj"), [pytest.param(n, o, id=n) for n, o in public_objects()])
def test_public_names_are_documented(name, obj):
    text = inspect.getdoc(obj)
    assert text, f"{name} has no docstring"
    first = text.split("\n\n")[0]
    assert first.strip().endswith((".", ":", "?")), f"{name}: the docstring begins with a sentence"


FUNCTIONS = [name for name in taichi_ext.__all__ if inspect.isfunction(getattr(taichi_ext, name))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_say_what_they_take_and_give(name):
    function = getattr(taichi_ext, name)
    text = inspect.getdoc(function) or ""
    refers = "are those of ``" in text  # to the docstring of a sibling
    missing = [p for p in inspect.signature(function).parameters if not re.search(rf"\b{p}\b", text)]
    assert refers or not missing, f"{name} does not describe {missing}"
    assert refers or "Args:" in text, f"{name} has no section 'Args:'"
    assert "Returns:" in text, f"{name} has no section 'Returns:'"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_have_an_example(name):
    text = inspect.getdoc(getattr(taichi_ext, name)) or ""
    assert ">>>" in text, f"{name} has no example"
