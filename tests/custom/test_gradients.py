"""User rules in a kernel: what they are given, what is applied, and the same rule in Taichi's reverse mode; structures."""

import re
from functools import partial

import numpy as np
import pytest
import taichi as ti
from differences import outputs, read, scalars, write
from kernel_texts import func_of, kernel_of, kernels_of, names_of
from numpy.testing import assert_allclose, assert_array_equal
from program_rows import rows_of
from reverse_mode import check_transpose, gradient_field

import taichi_ext as te
from taichi_ext import (
    InvalidArgumentError,
    InvalidRuleError,
    boundary_gradient,
    check_rule,
    edge,
    jacobian,
    mark,
    registry,
    replace_gradient,
    segment_edge,
    stop_gradient,
)

pytestmark = pytest.mark.usefixtures("ti64")


V, S = np.array([0.3, 0.8]), 0.5
BY_V = np.column_stack([S * np.eye(2) + np.outer(V, V), V + V * S])
MANY = np.linspace(0.1, 1.0, 40)
X = np.array([0.3, 0.6, 0.72, 1.2])
after, BY_STEPS = X, 1.0
for _ in range(3):
    after, BY_STEPS = after + 0.5 * after**2, BY_STEPS * (1 + 0.5 * after)  # half of autodiff's slope
SMALL = 3
# functions with rules, and a kernel that calls them; x, y, J in closed form (or None), and what y holds then
RULES = """
takes_by_name: x, y = field([0.3, 0.8]), zeros(1) | x, y, np.cos(0.288) * np.array([[2 * (2 * 0.48 + 2.4), 0.36 + 0.288 * 0.6]]), [np.sin(0.288)]
    @ti.func
    def f(a, b):
        return a * a * b
    @boundary_gradient(f)
    def _(d_b, out, auto, a, d_a, b):
        return auto + 3.0 * d_a * b + d_b * out * a
    y[0] = ti.sin(f(2.0 * x[0], x[1]))
leaves_arguments_to_autodiff: x, y = field([0.3, 0.8]), zeros(2) | x, y, [[0.48, 7], [(2 * 0.24**2 + 7) * 0.8, (2 * 0.24**2 + 7) * 0.3]]
    @ti.func
    def f(a, b):
        return a * a * b
    @boundary_gradient(f)
    def _(d_b):
        return 7.0 * d_b
    y[0] = f(x[0], x[1])
    v = x[0] * x[1]
    y[1] = f(v, v)  # only the second use of v is the rule's
with_an_edge_between_tangents: x, y = field([0.3, -0.3]), zeros(2) | x, y, [[2, 0], [0, 3]]
    @ti.func
    def f(a):
        return a * a
    @boundary_gradient(f)
    def _(d_a, a):
        return edge(a, 2.0 * d_a, 3.0 * d_a)  # which is not differentiated, and needs no position
    for i in x:
        y[i] = f(x[i])
of_nothing_is_zero: x, y = field([0.3]), zeros(1) | x, y, [[1]]
    @ti.func
    def f(a):
        return a * a
    @boundary_gradient(f)
    def _(d_a):
        return 0.0
    y[0] = f(x[0]) + x[0]
vectors: x, y = field([0.3, 0.8, 0.5]), zeros(2) | x, y, [S * V[1] * BY_V[0] + S * V[0] * BY_V[1], BY_V[1]]
    @ti.func
    def f(v, s):
        return v * s
    @boundary_gradient(f)
    def _(v, s, d_v, d_s, out, auto):
        return auto + d_v.dot(v) * v + d_s * out
    r = f(ti.Vector([x[0], x[1]]), x[2])
    y[0] = r[0] * r[1]
    y[1] = r.y
matrices: x, y = field([0.3, 0.8, 0.5, 0.2, 0.7, 0.9]), zeros(2) | x, y, [[1.4, 1.8, 0, 0, 0.9, 2.4], [0, 0, 1.4, 1.8, 1.5, 0.6]]
    @ti.func
    def f(m, v):
        return m @ v
    @boundary_gradient(f)
    def _(m, v, d_m, d_v):
        return 2.0 * (d_m @ v) + 3.0 * (m @ d_v)
    r = f(ti.Matrix([[x[0], x[1]], [x[2], x[3]]]), ti.Vector([x[4], x[5]]))
    y[0] = r[0]
    y[1] = r[1]
tuples: x, y = field([0.3, 0.8]), zeros(3) | x, y, [[2 * 0.8 + 1, 2 * 0.3], [3, 0.3], [0, 3 + 0.8]]
    @ti.func
    def f(a, b):
        return a * b, ti.Vector([a, b])
    @boundary_gradient(f)
    def _(a, b, d_a, d_b, out, auto):
        return 2.0 * auto[0] + d_a, 3.0 * auto[1] + d_b * out[1]
    p, q = f(x[0], x[1])
    y[0] = p
    y[1] = q[0]
    y[2] = q[1]
functions_of_other_packages: x, y = field([0.3, 0.8, 0.5]), zeros(3) | x, y, [[0.5, 0.5, 2.5], [0.5, 0.5, 2.5], [0, 0, 10]]
    @boundary_gradient(tm.mix)
    def _(x, y, a, d_a):
        return 5.0 * (y - x) * d_a
    y[0] = tm.mix(x[0], x[1], x[2])
    v = tm.mix(tm.vec2(x[0], 1.0), tm.vec2(x[1], 3.0), x[2])
    y[1] = v.x
    y[2] = v.y
rules_of_a_function_and_of_one_that_it_calls: x, y = field([0.3]), zeros(1) | x, y, [[2 * 6 + 2.25]]
    @ti.func
    def g(a):
        return a * a
    @ti.func
    def f(a):
        return g(a) + a
    @boundary_gradient(g)
    def _(d_a):
        return 5.0 * d_a
    @boundary_gradient(f)
    def _(d_a, auto):
        return 2.0 * auto + g(1.5) * d_a  # auto holds the inner rule; what a rule computes is primal
    y[0] = f(x[0])
calls_its_own_function: x, y = field([0.3]), zeros(1) | x, y, [[1.69]]
    @ti.func
    def f(a):
        return a * a
    @boundary_gradient(f)
    def _(a, d_a):
        return f(a + 1.0) * d_a
    y[0] = f(x[0])
branches_and_loops: x, y = field([0.3, 0.6, 0.8]), zeros(3) | x, y, np.diag([0.5, 2 * 1.2 + 3 + 0.6, 2 * 1.6 + 3 + 1])
    @ti.func
    def f(a):
        r = 0.0
        if a > 0.5:
            r = a * a
        else:
            r = a
        return r
    @boundary_gradient(f)
    def _(a, d_a, auto):
        t = 0.0 * d_a
        if a > 0.5:
            t = 2.0 * auto
        for n in range(3):
            t += n * d_a if a > 0.4 else 0.0
        return t + (d_a if a > 0.7 else 0.5 * auto)
    for i in x:
        y[i] = f(x[i])
loops_with_rows_of_tangents: x, y = field(MANY), zeros(40);
        by_x = 2 * (np.diag(np.full(40, MANY.sum())) + np.outer(MANY, np.ones(40))) | x, y, 2 * (MANY[:, None] * by_x + np.diag(MANY * MANY.sum()))
    @ti.func
    def f(a, b):
        return a * b
    @boundary_gradient(f)
    def _(a, b, d_a, d_b):
        return 2.0 * (a * d_b + b * d_a)
    for i in range(40):
        s = 0.0
        for j in range(40):
            s += f(x[i], x[j])
        y[i] = f(s, x[i])
structs: x, y = field([0.3, 0.8, 0.5]), zeros(1) | x, y, [[0.4, 0.15, 7 * 0.8]]
    @ti.dataclass
    class Ray:
        origin: tm.vec2
        slope: ti.f64
    @ti.func
    def f(ray, s):
        return ray.origin.x * ray.slope * s
    @boundary_gradient(f)
    def _(ray, d_s):
        return 7.0 * d_s * ray.slope
    y[0] = f(Ray(origin=tm.vec2(x[0], 1.0), slope=x[1]), x[2])
mark_without_a_rule: x, y = field([0.3, 0.8]), zeros(1) | x, y, [[1.8, 0]], [0.27]
    y[0] = 3 * mark("square", x[0] * x[0], other=ti.sin(x[1]))
mark: x, y = field([0.3, 0.8]), zeros(1) | x, y, [[3 * 0.6 * 2.09, 3 * np.sin(0.8) * np.cos(0.8)]], [0.27]
    @boundary_gradient("square")
    def _(out, auto, other, d_other):
        return 2.0 * auto + d_other * other + out * auto
    y[0] = 3 * mark("square", x[0] * x[0], other=ti.sin(x[1]))
marks_of_vectors_in_functions_and_in_several_places: x, y = field([0.3, 0.8]), zeros(2) | x, y, [[4 * 0.3 + 0.3 + 1, 2], [0.8, 4 * 0.8 + 1]]
    @ti.func
    def f(v):
        return mark("v", v * v, s=v[0], w=v)
    @boundary_gradient("v")
    def _(auto, d_s, w, d_w):
        return 2.0 * auto + w * d_s + d_w
    u = f(ti.Vector([x[0], x[1]])) + mark("v", ti.Vector([x[1], 0.0]), s=0.5, w=ti.Vector([1.0, 2.0]))
    y[0] = u[0]
    y[1] = u[1]
marks_in_conditional_code: x, y = field([0.3, 0.8]), zeros(2) | x, y, [[0, 0], [0.64, 1.6]]
    @boundary_gradient("inside")
    def _(auto, d_p, out):
        return auto + d_p * out
    for i in x:
        r = 0.0
        if x[i] > 0.5:
            r = mark("inside", x[i] * x[i], p=x[0])
        y[i] = r
stop_gradient: x, y = field([0.3, 0.8]), zeros(3) | x, y, [[0.3, 0], [0, 0.3], [2, 0]], [0.09, 0.3 * 0.8 + 0.8, 1.1]
    y[0] = stop_gradient(x[0]) * x[0]
    v = stop_gradient(ti.Vector([x[0], x[1]]))
    y[1] = v[0] * x[1] + v[1]
    y[2] = stop_gradient(2) * x[0] + stop_gradient(0.5)
replace_gradient: x, y = field([0.37, 0.84]), zeros(3) | x, y, [[10, 0], [2, 1], [0, 0]], [3, 0, 0.37**2]
    y[0] = replace_gradient(ti.floor(10 * x[0]), 10 * x[0])  # straight-through rounding
    w = replace_gradient(ti.floor(ti.Vector([x[0], x[1]])), ti.Vector([x[1], x[0]]))
    y[1] = w[0] + 2 * w[1]
    y[2] = replace_gradient(x[0] * x[0], 1.0)
rounded_structs: x, y = field(X), zeros(4); Pair = ti.types.struct(a=ti.f64, b=ti.f64) | x, y, np.diag(2 * X + 3)
    for i in x:
        pair = replace_gradient(Pair(a=ti.floor(x[i]), b=2.0), Pair(a=x[i] * x[i], b=x[i]))
        y[i] = pair.a + 3.0 * pair.b
several_rounded_values: x, y = field(X), zeros(4) | x, y, np.diag([3.0] * 4)
    for i in x:
        p, q = replace_gradient((ti.ceil(x[i]), ti.cast(ti.cast(x[i], ti.i32), ti.f64)), (x[i], 2.0 * x[i]))
        y[i] = p + q
bits: x, y = field(X), zeros(4) | x, y, np.diag(X.view(np.int64) % 7 + np.array([0, 1, 1, 2]))
    for i in x:
        bits = ti.cast(ti.bit_cast(x[i], ti.i64) % 7, ti.f64)
        y[i] = x[i] * stop_gradient(bits) + x[i] * ti.cast(tm.popcnt(i), ti.f64)
stopped_integers: x, y = field(X), zeros(4) | x, y, np.diag(np.arange(4) + (X > 0.5) + 2)
    for i in x:
        pair = stop_gradient(ti.Vector([i, 2]))
        y[i] = x[i] * stop_gradient(i) + x[i] * float(stop_gradient(x[i] > 0.5)) + pair[1] * x[i]
template_arguments: x, y = field(X), zeros(4); scale = field([2.0]) | x, y, np.diag(3 * X + 5)
    @ti.func
    def g(a, is_cubed: ti.template(), count: ti.template(), table: ti.template()):
        return a * a
    @boundary_gradient(g)
    def _(a, is_cubed, count, table, d_a):
        t = d_a
        if ti.static(is_cubed):
            t = 3.0 * a * d_a
        for _ in ti.static(range(count)):
            t += table[0] * d_a
        return t
    for i in x:
        y[i] = g(x[i], True, 2, scale) + g(x[i], False, 0, scale)
defaults_and_keywords: x, y = field(X), zeros(4) | x, y, np.diag(3.0 + 20 + np.arange(4))
    @ti.func
    def g(a, b=2.0, n=3):
        return a * b * n
    @boundary_gradient(g)
    def _(a, b, n, d_a, d_b, d_n):
        return d_a * n + 10.0 * d_b + d_n
    for i in x:
        y[i] = g(x[i]) + g(b=2.0 * x[i], a=1.0) + g(x[i], n=i)
methods_and_real_functions: x, y = field(X), zeros(4) | x, y, np.diag(13 * X)
    @ti.data_oriented
    class Program:
        count = 4
        @ti.func
        def f(self, a):
            return a * a
    @ti.real_func
    def real(a: ti.f64) -> ti.f64:
        if a > 0.5:
            return a * a
        return a
    @boundary_gradient(Program.f)
    def _(self, a, d_a):
        t = 0.0
        for n in range(self.count):
            t += n * d_a
        return t * a
    @boundary_gradient(real)
    def _(a, d_a):
        return 7.0 * a * d_a
    program = Program()
    @ti.func
    def both(a):
        return program.f(a) + real(a)
    for i in x:
        y[i] = both(x[i])
loops_around_a_rule: x, y = field(X), zeros(4) | x, y, np.diag(BY_STEPS)
    @ti.func
    def f(a):
        return a * a
    @boundary_gradient(f)
    def _(d_a, auto):
        return 0.5 * auto
    for i in x:
        a = x[i]
        for n in range(5):
            if n == 0:
                continue
            if n == 3:
                break
            a += 0.5 * f(a)
        m = 0
        while m < 1:
            a += 0.5 * f(a)
            m += 1
        y[i] = a
results_of_integers: x, y = field(X), zeros(4) | x, y, np.diag(10 * X * np.floor(3 * X))
    @ti.func
    def both(a):
        return ti.cast(3.0 * a, ti.i32), a * a
    @boundary_gradient(both)
    def _(auto):
        return auto[0], 5.0 * auto[1]
    for i in x:
        n, b = both(x[i])
        y[i] = n * b
marks_in_loops: x, y = field(SIX), zeros(6) | x, y, None
    @boundary_gradient("m")
    def _(auto, s, d_s, w, d_w, out):
        return 2.0 * auto + w * d_s * s + d_w * out
    for i in range(4):
        v = ti.Vector([x[i], x[i + 1]])
        w = mark("m", v * v, s=x[i + 2], w=v)
        y[i] = w[0] * w[1]
rule_beside_an_edge: x, y = field(SIX), zeros(6) | x, y, None
    @ti.func
    def radius(a, b):
        return 2.0 * ti.max(a, b)
    @boundary_gradient(radius)
    def _(a, b, d_a, d_b):
        return d_a + d_b
    for i in range(6):
        px = float(i)
        py = 0.3
        level = radius(x[0], x[1]) - ti.sqrt((px - 2.0) ** 2 + (py - x[2]) ** 2)
        y[i] = edge(level, x[3] * px, x[4] ** 2, at=(px, py))
loops_in_a_rule: x, y = field(SIX), zeros(6) | x, y, None
    @ti.func
    def f(a, b):
        return ti.max(a * b, 0.1)
    @boundary_gradient(f)
    def _(a, b, d_a, d_b, out, auto):
        total = auto * 0.5
        for n in range(SMALL):
            for m in range(1, n + 3):
                if m != n:
                    total += d_a * a**m + out * d_b * n
        for m, _ in ti.ndrange((1, 3), 3):
            total -= d_b * b * m
        for index in ti.grouped(ti.ndrange(2, SMALL)):
            total += d_a * index[1] * (index.x + 1)
        return total
    for i in range(5):
        y[i] = ti.sin(f(2.0 * x[i], x[i + 1])) * x[i]
loops_in_what_a_rule_calls: x, y = field(SIX), zeros(6) | x, y, None
    @ti.func
    def f(m, v):
        return m @ v, v.norm()
    @ti.func
    def power(m, v, n: ti.template()):
        result = v
        for _ in range(n):
            result = m @ result
        return result
    @boundary_gradient(f)
    def _(m, v, d_m, d_v, auto):
        return power(m, d_v, 3) + d_m @ v + 0.25 * auto[0], power(m, d_v, 2).sum() - auto[1]
    for i in range(3):
        m = ti.Matrix([[x[i], x[i + 1]], [x[i + 2] ** 2, 0.3]])
        u, n = f(m, ti.Vector([ti.sin(x[i]), x[i + 3]]))
        y[i] = u[0] * u[1]
        y[i + 3] = n * x[i]
"""
ROWS = rows_of(RULES)


def made(name, dtype=ti.f64):
    """The kernel, and what stands in a row of the table."""
    scope = {f.__name__: f for f in (boundary_gradient, edge, mark, replace_gradient, stop_gradient)}
    scope |= {n: globals()[n] for n in ("V", "S", "BY_V", "X", "BY_STEPS", "MANY", "SMALL")}
    scope |= {"SIX": [0.3, 0.8, 0.5, 0.2, 0.7, 0.9], "field": partial(gradient_field, dtype=dtype)}
    kernel, asked, _ = ROWS[name].made(**scope, zeros=lambda *shape: gradient_field(np.zeros(shape), dtype=dtype))
    return kernel, *asked


def check(kernel, x, y, expected, *values):
    """J of a program with rules against its closed form."""
    J = jacobian(kernel, x, y)
    expected = np.asarray(expected, np.float64)
    assert J.shape == expected.shape
    assert_allclose(J, expected, rtol=1e-12, atol=1e-14)
    for value in values:
        assert_allclose(read(y), value, rtol=1e-14)


@pytest.mark.parametrize("name", [name for name in ROWS if not ROWS[name].asked.endswith("None")])
def test_rules(name):
    check(*made(name))


@pytest.mark.mostly_sweep(every=6)
@pytest.mark.parametrize("name", ROWS)
def test_reverse_is_the_transpose_of_forward(name):
    """The same rule in Taichi's reverse mode; a kernel that is compiled with a gradient and without has the same value."""
    k, x, y, *_ = made(name)
    check_transpose(k, x, y)
    write(y, 0)
    k()
    value = read(y)
    write(y, 0)
    k.grad()
    k()
    assert_array_equal(read(y), value)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("mark", lambda: mark("any", 3.0)),
        ("stop_gradient", lambda: stop_gradient([3.0])),
        ("replace_gradient", lambda: replace_gradient(3.0, 4.0)),
    ],
)
def test_outside_kernels(name, call):
    message = rf'File ".*test_gradients.py", line \d+:\n{name} is called from Python, .* type (float|list).*@ti.kernel'
    with pytest.raises(te.UnsupportedError, match=message):
        call()
    assert stop_gradient(3.0) == 3.0  # Python may compute with numbers in a pipeline


# --- rules that do not fit --------------------------------------------------------------------------------------------


def product_kernel():
    f = func_of("f(a, b): return a * b")
    x, y = scalars([0.3, 0.8]), outputs(1)
    k = kernel_of("y[0] = f(x[0], x[1])", y=y, f=f, x=x)
    return f, k, x, y


# fmt: off
def squared(d_a): return d_a * d_a
def sine(d_a): return ti.sin(d_a)
def branching(d_a):
    t = 0.0
    if d_a > 0:
        t = d_a
    return t
def clamped(d_a): return ti.max(d_a, 0.0)
def divided(a, d_a): return a / d_a
def length(d_a): return ti.Vector([d_a, d_a]).norm()
def dotted(d_a):
    v = ti.Vector([d_a, d_a])
    return v.dot(v)
def through_a_loop(d_a):
    t = 0.0
    for _ in range(3):
        t += d_a
    return ti.sin(t)
def to_integer(d_a): return ti.cast(d_a, ti.i32)
def looping(d_a):
    w = 3.0
    while w > 1:
        w -= d_a
    return w
def with_offset(d_a): return d_a + 1.0
def independent(a, d_a): return a
def with_a_primal_offset(b, d_a): return d_a + b
def with_a_field_offset(a, d_a): return d_a + OFFSET[0]
def chosen_offset(a, d_a): return ti.select(a > 0.5, d_a, a)
def assigned_offset(a, d_a):
    t = a
    if a > 0.5:
        t = d_a
    return t
def offset_in_a_vector(d_a):
    v = ti.Vector([d_a, 1.0])
    t = 0.0
    for n in range(2):
        t += v[n]
    return t
def local_maximum(d_a):
    t = d_a
    ti.atomic_max(t, 0.0)
    return t
def old_value(d_a):
    t = d_a
    old = ti.atomic_add(t, 0.0)
    return old * t
def stopped_tangent(d_a): return stop_gradient(d_a) * 2.0 + d_a
def replaced_tangent(d_a): return replace_gradient(d_a, 3.0 * d_a)
def step_of_a_tangent(a, d_a): return edge(d_a, 1.0, 0.0, at=(a, a))
def marked_tangent(d_a): return mark("has a rule", d_a)
def decomposed(d_a):
    _, s, _ = ti.svd(ti.Matrix([[d_a, 0.0], [0.0, 1.0]]))
    return s[0, 0]
# fmt: on


NOT_LINEAR = (
    *(squared, sine, branching, clamped, divided, length, dotted, through_a_loop, to_integer, looping),
    *(with_offset, independent, with_a_primal_offset, with_a_field_offset, chosen_offset, assigned_offset),
    *(offset_in_a_vector, local_maximum, old_value, stopped_tangent, replaced_tangent, step_of_a_tangent),
    *(marked_tangent, decomposed),
)


@pytest.mark.mostly_sweep(every=2)
@pytest.mark.parametrize("mode", ["jacobian", "reverse"])
@pytest.mark.parametrize("rule", NOT_LINEAR)
def test_rules_that_are_not_linear_are_refused(rule, mode):
    """In both modes, by the same check: before anything is launched, with the rule, its place and the line."""
    global OFFSET
    f, k, x, y = product_kernel()
    OFFSET = outputs(1)
    boundary_gradient(f, name="crooked")(rule)
    boundary_gradient("has a rule")(doubled)
    launch = k.grad if mode == "reverse" else lambda: jacobian(k, x, y)
    with pytest.raises((te.UnsupportedError, te.InvalidRuleError), match="linear") as error:
        launch()
    line = rule.__code__.co_firstlineno
    assert re.search(rf"The rule 'crooked' \(.*test_gradients.py:{line}\)", str(error.value))
    assert re.search(r'^File "(.*test_gradients.py|<kernels .*)", line \d+', str(error.value))
    assert "auto" in str(error.value)  # what to return instead
    assert read(y)[0] == 0


def doubled(auto):
    return 2.0 * auto


INTEGERS = r"replace_gradient: the value is of type (i32|u1).*float\(n\)"
SHAPES = "replace_gradient: the value has shape .*, the surrogate .*same shape"
DO_NOT_FIT = {  # what a kernel says of a = x[i], or a rule returns; and what both modes say of it
    "y[i] = float(replace_gradient(ti.cast(a, ti.i32), a))": INTEGERS,  # the derivative of the surrogate would be lost
    "y[i] = float(replace_gradient(a > 0.5, a))": INTEGERS,
    "y[i] = float(replace_gradient(1, a))": INTEGERS,
    "y[i] = float(replace_gradient(ti.cast(ti.Vector([a, a]), ti.i32), ti.Vector([a, a])).sum())": INTEGERS,
    "p, q = replace_gradient((a, i), (a, a)); y[i] = p * q": INTEGERS,
    "y[i] = replace_gradient(ti.Vector([a, a]), a)[0]": SHAPES,
    "y[i] = replace_gradient(ti.Vector([a, a]), ti.Vector([a, a, a]))[0]": SHAPES,
    "y[i] = replace_gradient(Pair(a=a, b=a), Other(a=a, c=a)).b": SHAPES,
    "y[i] = replace_gradient(a, 'text')": SHAPES,
    "y[i] = whole(a) * a": "returns a tangent for a result of type i32, which has no derivative",
    "return ti.Vector([d_a, d_a])": r"a value of shape \(2,\)",
    "return ti.Matrix([[d_a]])": r"a value of shape \(1, 1\)",
    "return d_a, d_a": r"a value of shape \[\(\), \(\)\]",
    "pass": "nothing",
    "return 'd_a'": "a text",
    "return Pair(a=d_a, b=d_a)": r"a value of shape \{'a': \(\), 'b': \(\)\}",
}


@pytest.mark.parametrize("text", DO_NOT_FIT)
def test_values_that_do_not_fit(text):
    is_rule, words = not text.startswith(("y", "p,")), DO_NOT_FIT[text]
    definitions = f"""
@ti.func
def whole(a): return ti.cast(3.0 * a, ti.i32)
@ti.func
def square(a): return a * a
@boundary_gradient(whole)
def _(d_a): return 3.0 * d_a
@boundary_gradient(square, name="misfit")
def _(d_a): {text if is_rule else "return d_a"}
"""
    x, y = gradient_field(X), gradient_field(np.zeros(4))
    scope = {"Pair": ti.types.struct(a=ti.f64, b=ti.f64), "Other": ti.types.struct(a=ti.f64, c=ti.f64), "x": x, "y": y}
    scope |= {"replace_gradient": replace_gradient, "boundary_gradient": boundary_gradient}
    body = f"k:\n    for i in x:\n        a = x[i]\n        {'y[i] = square(a)' if is_rule else text}\n"
    k = kernels_of(body, definitions=definitions, **scope)["k"]
    words = rf"The rule 'misfit' \(.*:8\) returns {words}; the result of 'square'" if is_rule else words
    for launch in (k.grad, lambda: jacobian(k, x, y)):
        with pytest.raises((te.InvalidRuleError, te.UnsupportedError), match=words) as error:
            launch()
        assert re.search(r'File "<kernels .*", line \d+', str(error.value))
    assert_array_equal(read(y), np.zeros(4))


def test_what_a_mark_does_not_pass_along():
    x, y = scalars([0.3, 0.8]), outputs(1)
    k = kernel_of('y[0] = mark("m", x[0], other=x[1])', y=y, x=x)

    @boundary_gradient("m")
    def _(auto, another):
        return auto

    with pytest.raises(
        te.InvalidArgumentError, match=r"'another'.*mark\('m', \.\.\.\).*can take auto, d_other, other, out"
    ):
        jacobian(k, x, y)


def test_misuse_of_mark():
    x, y = scalars([0.3, 0.8]), outputs(1)
    number = kernel_of("y[0] = mark(3, x[0])", y=y, x=x)
    no_value = kernel_of('y[0] = mark("m")', y=y)
    with pytest.raises(te.InvalidArgumentError, match="name is 3; expected a string"):
        jacobian(number, x, y)
    with pytest.raises(
        te.InvalidArgumentError, match=r"value is missing: mark is called as mark\(name, value, \*\*along\)"
    ):
        jacobian(no_value, x, y)


# --- the same rule in Taichi's reverse mode ---------------------------------------------------------------------------


@pytest.mark.mostly_sweep("a field")
@pytest.mark.parametrize("what", ["a field", "an argument", "a copy"])
def test_stores_in_functions_that_a_rule_calls(what):
    """To a field, however deep, or to what is taken by reference; what is taken by value may be changed."""
    f, _, _, _ = product_kernel()
    log = gradient_field([0.0])
    deep = func_of("deep(a): ti.atomic_add(log[0], a); return a", log=log)
    to_a_field = func_of("return deep(v[0]) * 2.0", "v", deep=deep)

    @ti.func
    def to_an_argument(v: ti.template()):
        v[0] = 1.0
        return v[0]

    to_a_copy = func_of("v[0] = v[0] * 2.0; return v[0] + v[1]", "v")
    function = {"a field": to_a_field, "an argument": to_an_argument, "a copy": to_a_copy}[what]

    @boundary_gradient(f)
    def _(d_a, auto):
        v = ti.Vector([d_a, d_a])
        return auto + function(v)

    x, y = gradient_field([0.3, 0.8]), gradient_field([0.0])
    k = kernel_of("y[0] = f(x[0], x[1])", y=y, f=f, x=x)
    if what == "a copy":
        assert_allclose(check_transpose(k, x, y), [[0.8 + 3.0, 0.3]], rtol=1e-14)
    else:
        for launch in (k.grad, lambda: jacobian(k, x, y)):
            with pytest.raises(te.UnsupportedError, match="must not write" if what == "a field" else "linear"):
                launch()
    assert log[0] == 0.0


LOOPS = """
    a_while_loop:
        while t < 3.0:
            t += 1.0
        t *= d_a
    left_early:
        for n in range(4):
            if n == 3:
                break
            t += d_a
    with_gaps:
        for n in range(4):
            if n == 3:
                continue
            t += d_a
    bounds_that_are_no_constants: for _ in range(int(x[0] * 10.5)): t += d_a
    many_iterations:
        for i, j in ti.ndrange(30, 60):
            if i + j < 2:
                t += d_a
"""


@pytest.mark.mostly_sweep("bounds_that_are_no_constants")
@pytest.mark.parametrize("what", names_of(LOOPS))
def test_loops_of_rules_in_both_modes(what):
    f, _, _, _ = product_kernel()
    x, y = gradient_field([0.3, 0.8]), gradient_field([0.0, 0.0])
    frame = "t = 0.0\n...\nreturn t\n"
    helper = kernels_of(LOOPS, frame, decorator="@ti.func", arguments="(d_a)", x=x)[what]

    @boundary_gradient(f, name="with a helper")
    def _(d_a, auto):
        return auto + helper(d_a)

    k = kernel_of("for i in range(2): y[i] = f(x[0], x[i])", y=y, f=f, x=x)
    assert_allclose(check_transpose(k, x, y), [[0.6 + 3, 0], [0.8 + 3, 0.3]], rtol=1e-14)


def test_tape():
    inside = func_of("inside(a): return ti.select(a > 0.0, 1.0, 0.0)")

    @boundary_gradient(inside)
    def _(a, d_a):
        return ti.exp(-a * a) * d_a

    x, loss = gradient_field([0.3, -0.8, 0.5]), ti.field(ti.f64, (), needs_grad=True)
    k = kernel_of("for i in x: loss[None] += inside(x[i]) * x[i]", x=x, loss=loss, inside=inside)
    with ti.ad.Tape(loss):
        k()
    v = np.array([0.3, -0.8, 0.5])
    expected = (v > 0) + v * np.exp(-v * v)
    assert_allclose(read(x.grad), expected, rtol=1e-12)
    with registry.disabled(), ti.ad.Tape(loss):
        k()
    assert_allclose(read(x.grad), v > 0, rtol=1e-12)
    with ti.ad.Tape(loss):
        k()
    assert_allclose(read(x.grad), expected, rtol=1e-12)


def test_segments_in_reverse():
    corners = gradient_field([[1.2, 0.7], [6.3, 1.9], [2.8, 5.6]], 1)
    image = gradient_field(np.zeros((8, 7)))

    @ti.kernel
    def k():
        for i, j in image:
            px, py = float(i), float(j)
            total = 0.0
            for n in ti.static(range(3)):
                total += segment_edge(corners[n], corners[(n + 1) % 3], 1.0, at=(px, py))
            image[i, j] = total

    check_transpose(k, corners, image)


START = np.array([1.0, 2.0, -1.5])


@ti.dataclass
class Inner:
    m: ti.types.matrix(2, 2, ti.f64)
    n: ti.i32


@ti.dataclass
class Ball:
    mass: ti.f64
    velocity: ti.types.vector(2, ti.f64)
    inner: Inner

    @ti.func
    def speed(self):
        return self.velocity.norm()


def functions():
    @ti.func
    def made(a):
        return Ball(a, ti.Vector([a, 1.0]), Inner(ti.Matrix([[1.0, a], [0.0, 1.0]]), 3))

    @ti.func
    def energy(ball, scale):
        return scale * ball.mass * ball.velocity.norm_sqr() + ball.inner.m[0, 1] * ball.speed()

    @ti.func
    def moved(ball, dt):
        return Ball(ball.mass * dt, ball.velocity * dt, Inner(ball.inner.m, ball.inner.n + 1))

    return made, energy, moved


def test_entries_of_fields_of_structs():
    _, energy, _ = functions()
    balls, y = Ball.field(shape=3), outputs(3)
    balls.velocity.from_numpy(np.array([[3.0, 4.0], [1.0, 0.0], [0.0, 2.0]]))
    balls.mass.fill(2.0)

    @boundary_gradient(energy)
    def _(ball, d_ball):
        return 5.0 * d_ball.velocity.dot(ball.velocity) - d_ball.mass

    k = kernel_of("for i in balls: y[i] = energy(balls[i], 1.0)", balls=balls, y=y, energy=energy)
    by_mass, by_velocity = jacobian(k, [balls.mass, balls.velocity], y)
    assert_allclose(by_mass, -np.eye(3))
    expected = np.zeros((3, 3, 2))
    expected[range(3), range(3)] = 5 * balls.velocity.to_numpy()
    assert_allclose(by_velocity, expected)


def test_zeros_among_the_tangents():
    made, _, moved = functions()
    x, y = scalars(START), outputs(3)
    pair = func_of("return ti.Vector([a, a * a])", "a")

    @boundary_gradient(pair)
    def _(a, d_a):
        return ti.Vector([d_a, 0.0])

    @boundary_gradient(moved)
    def _(ball, d_ball):
        return Ball(mass=4.0 * d_ball.mass)

    text = "for i in x: ball = moved(made(x[i]), 2.0); y[i] = ball.mass + ball.velocity.sum() + pair(x[i]).sum()"
    k = kernel_of(text, x=x, moved=moved, made=made, y=y, pair=pair)
    assert_allclose(jacobian(k, x, y), np.diag([5.0, 5.0, 5.0]), rtol=1e-14)


@pytest.mark.parametrize("given", ["number", "other struct", "constant"])
def test_tangents_of_another_form_are_refused(given):
    made, _, moved = functions()
    x, y = scalars(START), outputs(3)

    @boundary_gradient(moved)
    def _(ball, d_ball):
        if ti.static(given == "number"):
            return d_ball.mass
        if ti.static(given == "other struct"):
            return d_ball.inner
        return Ball(1.0, d_ball.velocity, d_ball.inner)

    k = kernel_of("for i in x: y[i] = moved(made(x[i]), 2.0).mass", x=x, y=y, moved=moved, made=made)
    with pytest.raises(InvalidRuleError, match=r"does not depend" if given == "constant" else "returns a value of"):
        jacobian(k, x, y)


def test_check_rule_says_that_it_takes_no_structs():
    _, energy, moved = functions()

    @boundary_gradient(energy)
    def _(ball, d_ball):
        return d_ball.mass

    with pytest.raises(InvalidArgumentError, match="ball"):
        check_rule(energy, {"ball": {"mass": [1.0], "velocity": [[1.0, 2.0]]}, "scale": 1.0})
