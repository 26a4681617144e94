"""The contract of ``host/``: what the package has of a runtime, tested on the one of this process; and how it is chosen."""

import ast
import subprocess
import sys
import weakref

import numpy as np
import pytest
import taichi as ti
from kernel_texts import kernel_of
from package_modules import PACKAGE, nodes_of
from runtimes import RUNTIME
from taichi_program import initialise

from taichi_ext import InvalidArgumentError, backend, host, jacobian
from taichi_ext.host import choice

pytestmark = [pytest.mark.usefixtures("ti64"), pytest.mark.cpu_only("what no device changes")]


@ti.data_oriented
class Owner:
    def __init__(self):
        self.x = ti.field(ti.f64, 3)

    @ti.kernel
    def method(self, n: ti.i32):
        for i in range(n):
            self.x[i] = self.square(2.0)

    @ti.func
    def square(self, a):
        return a * a


@ti.func
def twice(a):
    return 2 * a


@ti.kernel
def kernel_of_the_test(t: ti.template(), v: ti.types.ndarray(ti.f64, 1), n: ti.i32):
    for i in range(n):
        v[i] = twice(t[i])


PRIMAL = kernel_of_the_test._primal


def names_in(*modules):
    """What modules define or import."""
    for name in modules:
        for node in nodes_of(PACKAGE / "host" / f"{name}.py"):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                yield node.name
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                yield from (alias.asname or alias.name for alias in node.names)
            elif isinstance(node, ast.Assign):
                yield from (n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name))


HOSTS = {"taichi": ("taichi",), "quadrants": ("quadrants",)}


@pytest.mark.parametrize("name", HOSTS)
def test_each_host_has_the_names_that_the_package_uses(name):
    modules = (*sorted((PACKAGE / "backend").glob("*.py")), PACKAGE / "errors.py")
    nodes = [node for module in modules for node in nodes_of(module)]
    imports = (n for n in nodes if isinstance(n, ast.ImportFrom) and n.module == "taichi_ext.host")
    used = {alias.name for n in imports for alias in n.names}
    used |= {n.attr for n in nodes if isinstance(n, ast.Attribute) and getattr(n.value, "id", "") == "host"}
    assert len(used) > 60
    assert used - {*names_in(*HOSTS[name]), "foreign_problem"} == set()


def test_runtime():
    runtime = host.RUNTIME
    assert runtime.name == RUNTIME
    assert runtime.header == f"import {RUNTIME} as ti"
    assert runtime.owns(f"{RUNTIME}.lang")
    assert not runtime.owns(f"{RUNTIME}_other")
    assert runtime.program() is runtime.state().prog
    assert runtime.config().arch == ti.cfg.arch
    before = weakref.ref(runtime.program())
    initialise(default_fp=ti.f64)
    assert runtime.program() is not before()
    ti.reset()
    assert runtime.program() is None  # Quadrants' own property raises an error there
    initialise(default_fp=ti.f64)


def test_state_of_a_trace():
    seen = []

    def look():
        seen.append((host.current_kernel(), host.compiling()))

    k = kernel_of("look()", look=look)
    k()
    assert seen
    assert all(kernel is k._primal and callable_ is not None for kernel, callable_ in seen)
    assert (host.current_kernel(), host.compiling()) == (None, None)
    with host.sealed_with("seal"):
        assert host.compiling() == "seal"
    assert host.compiling() is None


def test_kernels_functions_and_methods_are_told_apart():
    owner = Owner()
    assert host.primal_kernel(kernel_of_the_test) == (PRIMAL, ())
    assert host.primal_kernel(PRIMAL) == (PRIMAL, ())
    kernel, bound = host.primal_kernel(owner.method)
    assert isinstance(kernel, host.Kernel)
    assert bound == (owner,)
    assert host.is_class_kernel(kernel)
    assert not host.is_class_kernel(PRIMAL)
    for other in (twice, owner.square, owner, print, lambda: None):
        assert host.primal_kernel(other) is None
    assert isinstance(host.func_of(twice), host.Func)
    function, instance = host.bound(owner.square)
    assert instance is owner
    assert isinstance(host.func_of(function), host.Func)
    assert host.bound(twice) is None
    assert host.is_decorated(kernel_of_the_test)
    assert backend.is_known_in_kernels(twice)
    assert backend.is_known_in_kernels(kernel_of_the_test)
    assert not backend.is_known_in_kernels(print)
    assert host.global_variables(PRIMAL.func)["twice"] is twice


def test_arguments():
    assert [a.name for a in host.arguments(PRIMAL)] == ["t", "v", "n"]
    kinds = [a.annotation for a in host.arguments(PRIMAL)]
    assert [host.is_template(kind) for kind in kinds] == [True, False, False]
    x, v = ti.field(ti.f64, 3), ti.ndarray(ti.f64, 3)
    assert [host.is_passed(kind, value) for kind, value in zip(kinds, (x, v, 3), strict=True)] == [False, True, True]
    assert host.process_args(PRIMAL, (x,), {"n": 2, "v": v}) == (x, v, 2)
    assert host.argument_features(PRIMAL, (x, v, 2))[1][1:] == host.array_feature(ti.f64)[1:]
    assert host.unwrapped(v) is v


def test_compiled_kernels_are_kept_and_forgotten():
    x, v = ti.field(ti.f64, 3), ti.ndarray(ti.f64, 3)
    k = kernel_of("for i in range(3): v[i] = t[i] + 1", "t: ti.template(), v: A1")
    kernel = k._primal
    for _ in range(2):
        k(x, v)
        assert np.all(v.to_numpy() == 1)
        for table in host.COMPILED_TABLES:
            assert len(getattr(kernel, table)) == 1, table
        assert host.compiled_kernels(kernel) is getattr(kernel, host.COMPILED_TABLES[0])
        host.forget_compiled(kernel)
        assert not any(len(getattr(kernel, table)) for table in host.COMPILED_TABLES)


# --- one runtime a process --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("imported", "variable", "expected"),
    [
        ((), "", "taichi"),
        ((), "quadrants", "quadrants"),
        ((), "taichi", "taichi"),
        (("quadrants",), "taichi", "quadrants"),
        (("taichi",), "quadrants", "taichi"),
        (("taichi", "quadrants"), "quadrants", "taichi"),
    ],
)
def test_what_is_imported_decides_and_then_the_variable(monkeypatch, imported, variable, expected):
    for name in choice.RELEASES:
        monkeypatch.setitem(sys.modules, name, sys if name in imported else None)
    monkeypatch.setenv(choice.VARIABLE, variable)
    assert choice.chosen() == expected


def test_other_names_of_a_runtime_are_rejected(monkeypatch):
    for name in choice.RELEASES:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setenv(choice.VARIABLE, "warp")
    with pytest.raises(ImportError, match="TAICHI_EXT_RUNTIME is 'warp'; expected taichi or quadrants"):
        choice.chosen()


@pytest.mark.parametrize("name", choice.RELEASES)
def test_a_runtime_that_is_not_installed(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)  # an import of it fails
    with pytest.raises(
        ImportError, match=rf"^{name.title()} is not installed.*\.\[quadrants\](.|\n)*{choice.VARIABLE}"
    ):
        choice.load(name)


@pytest.mark.parametrize("version", [(1, 3, 0), (0, 4, 0), (1, 4, 0), (2, 0, 0)], ids=str)
def test_releases_of_quadrants_that_are_not_supported(version):
    text = ".".join(map(str, version))
    with pytest.raises(
        ImportError, match=rf"Quadrants {text} is installed.*internals.*pip install \"quadrants>=1.3.2,<1.4"
    ):
        choice.check_version("quadrants", version)
    for supported in ((1, 3, 2), (1, 3, 3), (1, 3, 12)):
        choice.check_version("quadrants", supported)


OTHER = "quadrants" if RUNTIME == "taichi" else "taichi"
Foreign = type("Field", (), {"__module__": f"{OTHER}.lang.field"})


def foreign_kernel():
    pass


foreign_kernel._primal = type("Kernel", (), {"__module__": f"{OTHER}.lang.kernel"})()


def test_objects_of_the_other_runtime_are_rejected_with_both_names_and_the_rule():
    x = ti.field(ti.f64, 3)
    k = kernel_of("for i in x: t[i] = x[i]", "t: ti.template()", x=x)
    both = f"{OTHER.title()}, but this process uses {RUNTIME.title()}. A process has one runtime"
    calls = ((k, Foreign(), x, (x,)), (k, x, Foreign(), (x,)), (k, x, x, (Foreign(),)), (foreign_kernel, x, x, ()))
    for kernel, params, outputs, args in calls:
        with pytest.raises(InvalidArgumentError, match=both):
            jacobian(kernel, params, outputs, args=args)


def test_a_field_of_the_other_runtime_in_a_kernel_is_rejected():
    x, other = ti.field(ti.f64, 3), Foreign()
    k = kernel_of("for i in x: x[i] = other[i]", x=x, other=other)
    with pytest.raises(Exception, match="this process uses"):
        jacobian(k, x, x)


@pytest.mark.sweep
def test_neither_is_imported_before_the_choice():
    """Importing the choice alone loads one runtime."""
    script = "import taichi_ext, sys; print(*[n for n in ('taichi', 'quadrants') if n in sys.modules])"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.split()[-1] == RUNTIME
    assert backend.RUNTIME is host.RUNTIME
