"""The examples in docstrings run as they stand, and every public name has a docstring that says what a user needs."""

import doctest
import importlib
import inspect
import pkgutil
import re

import pytest
from taichi_program import end_program

import taichi_ext

pytestmark = pytest.mark.cpu_only("programs that start Taichi themselves")

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
