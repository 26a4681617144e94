"""check_jacobian and check_rule: what agrees, what is found, where it arose, and that nothing is left changed."""

import math
import re

import numpy as np
import pytest
import taichi as ti
from differences import outputs, read, scalars, write
from kernel_texts import kernel_of
from numpy.testing import assert_array_equal
from program_rows import rows_of
from taichi_program import initialise

import taichi_ext as te
from taichi_ext import InvalidArgumentError, boundary_gradient, check_jacobian, check_rule, edge, mark, stop_gradient
from taichi_ext.errors import CheckError, InvalidRuleError

pytestmark = pytest.mark.usefixtures("ti64")


# --- check_jacobian: agreement ----------------------------------------------------------------------------------------


# a program, the verdict, and what the report says
PROGRAMS = """
right: x, y = scalars([0.3, 0.8]), outputs(3) | x, y, True, "k agrees with central differences (relative tolerance 1e-06)", "outputs (field y of shape (3,))", "params (field x of shape (2,))", "6 of 6"
    for i in range(3):
        y[i] = x[0] ** (i + 1) * x[1]
missing_column: x, y = scalars([0.3, 1e-3]), outputs(1) | x, y, False, "[0], [1]: J 0, differences 1"
    y[0] = 1000.0 * x[0] + stop_gradient(x[1])
jump_within_the_step: x, image = scalars([2.5]), outputs(6) | x, image, False, "[3], [0]: J 0, differences", "jumps or has a kink within the step"
    for i in image:
        image[i] = 1.0 if i < x[0] + 0.5 else 0.0
nan: g_v, g_m, out = scalars([0.0, 2.0]), scalars([0.0, 3.0]), outputs(2) | [g_v, g_m], out, False, "outputs (field out of shape (2,)) is nan at [0] after a plain run", "with respect to params[0] (field g_v of shape (2,)) is inf at [0], [0]", "with respect to params[1] (field g_m of shape (2,)) is nan at [0], [0]", "it arises first in", "v = g_v[i] / m"
    for i in g_v:
        m = g_m[i] + 0
        v = g_v[i] / m
        out[i] = v * 2.0
nan_in_rows: x, y = scalars(np.linspace(0.1, 1, 40)), outputs(40) | x, y, False, "t = ti.log(s - 2.0 * ti.sqrt(s * s))"
    for i in range(40):
        s = 0.0
        for j in range(40):
            s += x[j] * x[i]
        t = ti.log(s - 2.0 * ti.sqrt(s * s))
        y[i] = s + t
nan_that_the_user_holds: x, y = scalars([0.3, np.nan]), outputs(2) | x, y, False, "params (field x of shape (2,)) holds nan at [1]", "outputs (field y of shape (2,)) is nan at [1]"
    for i in x:
        y[i] = x[i] * 2.0
zero_meets_infinity: x, image = scalars([2.3]), outputs(6) | x, image, True
    for i in image:
        px = float(i)
        py = 0.0
        level = x[0] - px
        image[i] = ti.sqrt(0.0 * x[0]) + edge(level, ti.sqrt(ti.max(level, 0.0)), 0.0, at=(px, py), jump=0.0)
"""
NAMES = {f.__name__: f for f in (boundary_gradient, edge, mark, stop_gradient)}
ROWS = rows_of(PROGRAMS)


@pytest.mark.mostly_sweep("missing_column", "nan_in_rows")
@pytest.mark.double_only("the tolerances of float64")
@pytest.mark.parametrize("name", ROWS)
def test_programs(name):
    kernel, (params, outs, is_ok, *words), _ = ROWS[name].made(**NAMES)
    start = read(outs)
    report = check_jacobian(kernel, params, outs, most_entries=3 if name == "nan_in_rows" else 200)
    text = str(report)
    assert report.is_ok == bool(report) == is_ok, text
    for word in words:
        assert word in text
    assert_array_equal(read(outs), start)
    if name == "right":
        [block] = report.blocks
        assert (block.compared, block.total, block.failed) == (6, 6, 0)
        assert block.worst.error < 1e-9
        assert block.worst.jacobian == pytest.approx(block.worst.differences, rel=1e-8)
    elif name == "nan":
        origin = text[text.index("it arises first in") :]
        assert re.match(r'it arises first in\s+File "<kernels .*", line \d+', origin), origin
        assert "out[i] = v * 2.0" not in origin.split("from there")[0]
        assert report.blocks[0].worst.output == (0,)
        assert math.isinf(report.blocks[0].worst.jacobian)  # not hidden
    elif name == "nan_in_rows":
        assert "s += x[j]" not in text


def test_everything_is_put_back():
    """In-place parameters, outputs, counters, fields that are neither; also where the check fails."""
    x, y, z = scalars([0.3, 0.8]), outputs(2), outputs(2)
    n = ti.field(ti.i32, ())
    write(y, np.array([3.0, 4.0]))
    write(z, np.array([5.0, 6.0]))
    n[None] = 3

    @ti.kernel
    def k():
        for i in x:
            y[i] += x[i] * n[None]
            z[i] = 1.0 / (i - x[i] + x[i])
        for i in x:
            x[i] *= 2.0
        n[None] += 1

    for outs, is_ok in ((y, True), (z, False)):
        assert bool(check_jacobian(k, x, outs)) == is_ok
        assert_array_equal(read(x), [0.3, 0.8])
        assert_array_equal(read(y), [3, 4])
        assert_array_equal(read(z), [5, 6])
        assert n[None] == 3


@pytest.mark.sweep
def test_float32_has_a_step_and_a_tolerance_of_its_own():
    """Also where parameters are of very different sizes, one of them zero."""
    initialise()
    try:
        x, y = scalars([3e-4, 2.0, 5e4, 0.0], ti.f32), outputs(4, dtype=ti.f32)

        @ti.kernel
        def k():
            y[0] = ti.sin(x[1]) * x[0]
            y[1] = ti.sqrt(x[2]) + x[3]
            y[2] = ti.exp(x[1]) / x[2]
            y[3] = x[0] / x[1] + x[2] * x[3]

        report = check_jacobian(k, x, y)
        assert report, str(report)
        assert report.rtol == 2e-2
        assert "relative tolerance 2e-02" in str(report)

        @boundary_gradient("root")
        def _(auto):
            return 1.1 * auto

        wrong = kernel_of('y[1] = mark("root", ti.sqrt(x[2])) + x[3]', y=y, x=x)
        report = check_jacobian(wrong, x, y)
        assert not report
        assert report.blocks[0].worst.param == (2,)
    finally:
        initialise(default_fp=ti.f64)


# --- check_rule -------------------------------------------------------------------------------------------------------


def test_wrong_calls():
    x, y = scalars([0.3, 0.8]), outputs(2)
    draw = kernel_of("for i in x: y[i] = x[i] * ti.random()", x=x, y=y)
    with pytest.raises(InvalidArgumentError, match="draws random numbers"):
        check_jacobian(draw, x, y)
    assert_array_equal(read(y), 0)
    with pytest.raises(InvalidArgumentError, match="is not read"):
        check_jacobian(draw, outputs(1), y)
    with pytest.raises(InvalidArgumentError, match="expected a ti.field"):
        check_jacobian(draw, 3.0, y)


@ti.func
def area(a, b):
    return a * a * b


# functions with rules: the name, inputs, what is expected, the verdict, and what the report says
RULES = """
vectors_matrices_tuples_and_integers: name = "f"; draw = np.random.default_rng(0).normal | name, {"v": draw(size=(4, 2)), "m": draw(size=(4, 2, 2)), "n": 3}, "boundary", True, "d out[", "differ at 4 of 4 points"
    @ti.func
    def f(v, m, n):
        return m @ v * n, v.norm()
    @boundary_gradient(f)
    def _(v, m, d_v, d_m, out, auto):
        return auto[0] + d_m @ v, d_v.dot(v) + out[1] * auto[1]
    pass
methods: name = "Scaled.f"; self = Scaled() | name, {"self": self, "a": [1.0, 2.0], "b": [3.0, 4.0]}, "boundary", True, "d out / d a  20    6"
    @boundary_gradient(Scaled.f)
    def _(self, d_a):
        return 10 * d_a * self.c
    pass
marks: name = "rim" | name, {"out": [1.0, 2.0], "s": [3.0, 4.0]}, "boundary", True, "jacobian applies the rule", "!auto agrees"
    @boundary_gradient("rim")
    def _(auto, s, d_s, out):
        return 2 * auto + s * d_s * out
    pass
jumps: name = "inside" | name, {"x": [-1.0, 0.0, 1e-9, 2.0]}, "boundary", True, "auto agrees with differences (1 at a jump or kink left out): ok"
    @ti.func
    def inside(x):
        return ti.select(x > 0, 1.0 + x, x)
    @boundary_gradient(inside)
    def _(x, d_x, auto):
        return auto + ti.exp(-x * x) * d_x
    pass
wrong_derivative_of_autodiff: name = "f" | name, {"x": [0.5, 2.0]}, "autodiff", False, "auto agrees with differences: FAILED, 0.5 at"
    @ti.func
    def f(x):
        return stop_gradient(x) * x
    @boundary_gradient(f)
    def _(auto):
        return auto
    pass
nan: name = "root" | name, {"a": [0.0, 1.0]}, "autodiff", False, "jacobian applies the rule: FAILED, nan", "at point 0 (a = 0.)"
    @ti.func
    def root(a):
        return ti.sqrt(a)
    @boundary_gradient(root)
    def _(a, d_a):
        return d_a * ti.sqrt(a - 0.5)
    pass
with_offset: name = "f" | name, {"a": [0.1, 0.4], "b": [1.0, 2.0]}, "autodiff", False, "jacobian rejects the rule", "must be linear in its tangents"
    @ti.func
    def f(a, b):
        return a * b
    @boundary_gradient(f)
    def _(a, b, d_a):
        return 2 * d_a + b
    pass
squared: name = "f" | name, {"a": [0.1, 0.4], "b": [1.0, 2.0]}, "autodiff", False, "jacobian rejects the rule", "must be linear in its tangents"
    @ti.func
    def f(a, b):
        return a * b
    @boundary_gradient(f)
    def _(d_a, a, b):
        return d_a * d_a * b
    pass
size: name = "f" | name, {"a": [0.1, 0.4], "b": [1.0, 2.0]}, "autodiff", False, "jacobian rejects the rule", "must be linear in its tangents"
    @ti.func
    def f(a, b):
        return a * b
    @boundary_gradient(f)
    def _(d_a, b):
        return abs(d_a) * b
    pass
"""
RULE_ROWS = rows_of(RULES)


@ti.data_oriented
class Scaled:
    c = 2.0

    @ti.func
    def f(self, a, b):
        return a * b * self.c


@pytest.mark.mostly_sweep("with_offset", "squared", "size")
@pytest.mark.double_only("the tolerances of float64")
@pytest.mark.parametrize("name", RULE_ROWS)
def test_rules(name):
    _, (rule, inputs, expected, is_ok, *words), _ = RULE_ROWS[name].made(**NAMES, Scaled=Scaled)
    for also in {expected, "boundary"} if name == "nan" else {expected}:
        report = check_rule(rule, inputs, expected=also)
        text = str(report)
        assert bool(report) == is_ok, text
        for word in words:
            assert (word.removeprefix("!") in text) != word.startswith("!"), text
    if not is_ok:
        with pytest.raises(CheckError):
            check_rule(rule, inputs, raise_on_failure=True)


@pytest.mark.sweep
def test_bad_inputs():
    @boundary_gradient(area)
    def rule(d_a):
        return d_a

    for inputs, message in (
        ({"a": [1.0]}, r"missing 'b'\. Expected are 'a', 'b'"),
        ({"a": [1.0], "b": 1.0, "c": 2.0}, "unknown 'c'"),
        ({"a": [1.0, 2.0], "b": [1.0, 2.0, 3.0]}, "different numbers of points"),
        ({"a": np.zeros((2, 2, 2, 2)), "b": 1.0}, r"shape \(2, 2, 2, 2\)"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            check_rule("area", inputs)
    for what in (3, lambda d_a: d_a, test_bad_inputs):
        with pytest.raises(InvalidArgumentError, match="neither the name of a rule"):
            check_rule(what, {})
    with pytest.raises(InvalidArgumentError, match="No rule is named 'other'"):
        check_rule("other", {})
    with pytest.raises(InvalidArgumentError, match="expected is 'jump'; expected one of 'autodiff', 'boundary'"):
        check_rule("area", {"a": [1.0], "b": 1.0}, expected="jump")
    with pytest.raises(InvalidArgumentError, match="'out'"):
        boundary_gradient("rim")(lambda_free)
        check_rule("rim", {"s": [1.0]})
    te.registry.clear()

    @boundary_gradient(area)
    def misfit(d_a):
        return ti.Vector([d_a, d_a])

    with pytest.raises(InvalidRuleError, match=r"shape \(2,\)"):
        check_rule("area", {"a": [1.0], "b": 1.0})


def lambda_free(auto):
    return auto
