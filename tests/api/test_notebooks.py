"""Notebooks: cells that are run again, and what results look like in them."""

import linecache

import pytest
import taichi as ti

from taichi_ext import DerivativeWarning, InvalidArgumentError, Jacobian, jacobian, registry

pytestmark = [pytest.mark.usefixtures("ti64"), pytest.mark.cpu_only("nothing here depends on the device")]

STEP = """
@ti.func
def step_of(x):
    return ti.select(x > 0, 1.0, 0.0)
"""
RULE = """
@boundary_gradient(step_of)
def _(x, d_x):
    return 3.0 * d_x
"""
KERNEL = """
@ti.kernel
def k():
    y[None] = step_of(x[None])
"""
MARKED = """
@boundary_gradient("clipped")
def _(auto):
    return 2.0 * auto
"""


@pytest.fixture
def run():
    """Run the text of a cell as a notebook does: a file that does not exist, named after the text."""
    scope = {"__name__": "__main__", "x": ti.field(ti.f64, ()), "y": ti.field(ti.f64, ())}
    exec("import taichi as ti\nfrom taichi_ext import boundary_gradient, mark", scope)
    scope["x"][None] = 0.5
    files = []

    def run_cell(text):
        file = f"/nowhere/cell_{hash(text)}.py"
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        files.append(file)
        exec(compile(text, file, "exec"), scope)
        return scope

    yield run_cell
    for file in files:
        linecache.cache.pop(file, None)


def both_modes(scope):
    """The derivative by ``jacobian`` and by Taichi's reverse mode."""
    x, y = (ti.field(ti.f64, (), needs_grad=True) for _ in range(2))
    x[None], y.grad[None] = 0.5, 1.0
    scope |= {"x": x, "y": y}
    J = jacobian(scope["k"], x, y)
    scope["k"]()
    scope["k"].grad()
    return float(J), float(x.grad[None])


@pytest.mark.sweep
def test_a_function_whose_cell_is_run_again_keeps_its_rule(run):
    for cell in (STEP, RULE, KERNEL, STEP, KERNEL):
        scope = run(cell)
    assert both_modes(scope) == (3, 3)
    scope = run(KERNEL.replace("step_of(x[None])", "2.0 * step_of(x[None])"))
    assert both_modes(scope) == (6, 6)


def test_a_kernel_that_is_not_run_again_keeps_the_rule(run):
    for cell in (STEP, RULE, KERNEL):
        scope = run(cell)
    plan = Jacobian(scope["k"], scope["x"], scope["y"])
    assert plan() == 3
    run(STEP)
    assert plan() == 3 and jacobian(scope["k"], scope["x"], scope["y"]) == 3


def test_a_rule_whose_cell_is_run_again_takes_its_own_place(run):
    for cell in (STEP, RULE, KERNEL, RULE):
        scope = run(cell)
    assert len(registry) == 1
    assert jacobian(scope["k"], scope["x"], scope["y"]) == 3
    run(RULE.replace("3.0", "5.0"))
    assert len(registry) == 1
    assert jacobian(scope["k"], scope["x"], scope["y"]) == 5
    run(MARKED)
    run(MARKED.replace("2.0", "4.0"))
    scope = run('@ti.kernel\ndef k():\n    y[None] = mark("clipped", x[None])\n')
    assert jacobian(scope["k"], scope["x"], scope["y"]) == 4


def test_another_body_is_said_once(run):
    for cell in (STEP, RULE, STEP.replace("1.0", "2.0"), KERNEL):
        scope = run(cell)
    with pytest.warns(DerivativeWarning, match="step_of .*cell_.*:2. was defined again with another body, and keeps"):
        assert jacobian(scope["k"], scope["x"], scope["y"]) == 3
    assert jacobian(scope["k"], scope["x"], scope["y"]) == 3  # warnings are errors here


def test_other_arguments_are_an_error(run):
    for cell in (STEP, RULE, STEP.replace("x", "q"), KERNEL):
        scope = run(cell)
    with pytest.raises(InvalidArgumentError, match="has a parameter 'x'; it can take auto, d_q, out, q"):
        jacobian(scope["k"], scope["x"], scope["y"])


def test_functions_that_only_share_their_name_keep_apart(run):
    two = "fs = []\nfor factor in range(2):\n    @ti.func\n    def f(x):\n        return x * x\n    fs.append(f)\nf0, f1 = fs\n"
    for cell in (two, RULE.replace("step_of", "f0"), KERNEL.replace("step_of", "f1")):
        scope = run(cell)
    assert jacobian(scope["k"], scope["x"], scope["y"]) == 1  # 2 x, by autodiff
