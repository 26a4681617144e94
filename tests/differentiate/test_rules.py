"""The derivative table: every argument of every rule against central differences, and the conventions at kinks."""

import numpy as np
import pytest
import taichi as ti
import taichi.math as tm
from differences import check_jacobian, outputs, scalars, vector_outputs, vectors
from kernel_texts import kernel_of
from numpy.testing import assert_allclose, assert_array_equal
from program_rows import rows_of
from taichi_program import initialise

from taichi_ext import jacobian
from taichi_ext.differentiate.rules.table import RULES
from taichi_ext.program.build import GUARDED, GUARDED_BOTH, INVERSE, REPLACED

pytestmark = pytest.mark.usefixtures("ti64")

R, POSITIVE, UNIT = (-2.0, 2.0), (0.2, 3.0), (-0.9, 0.9)
POINTS = 6
DOMAINS = {  # operation: the function, and where its arguments are drawn from
    "add": (ti.lang.ops.add, R, R),
    "sub": (ti.lang.ops.sub, R, R),
    "mul": (ti.lang.ops.mul, R, R),
    "truediv": (ti.lang.ops.truediv, R, POSITIVE),
    "raw_div": (ti.raw_div, R, POSITIVE),
    "mod": (ti.lang.ops.mod, R, POSITIVE),
    "floordiv": (ti.lang.ops.floordiv, R, POSITIVE),
    "pow": (ti.pow, POSITIVE, R),
    "neg": (ti.lang.ops.neg, R),
    "abs": (ti.abs, R),
    "sin": (ti.sin, R),
    "cos": (ti.cos, R),
    "tan": (ti.tan, (-1.2, 1.2)),
    "tanh": (ti.tanh, R),
    "asin": (ti.asin, UNIT),
    "acos": (ti.acos, UNIT),
    "exp": (ti.exp, R),
    "log": (ti.log, POSITIVE),
    "sqrt": (ti.sqrt, POSITIVE),
    "rsqrt": (ti.rsqrt, POSITIVE),
    "atan2": (ti.atan2, R, POSITIVE),
    "max": (ti.max, R, R),
    "min": (ti.min, R, R),
    "floor": (ti.floor, R),
    "ceil": (ti.ceil, R),
    "round": (ti.round, R),
}
OF_PARTIALS = {GUARDED, GUARDED_BOTH, INVERSE, REPLACED}  # which derivatives are made of: tests/solvers/test_hessian.py
STEPS = {"floordiv", "floor", "ceil", "round"}  # whose derivative is 0
UNARY = [name for name, (_, *domain) in DOMAINS.items() if len(domain) == 1]
BINARY = [name for name, (_, *domain) in DOMAINS.items() if len(domain) == 2]


def draw(name: str, argument: int, *shape: int) -> np.ndarray:
    """Points of the domain of one argument, the same in every run and at least 0.02 away from every integer."""
    low, high = DOMAINS[name][1 + argument]
    generator = np.random.default_rng([argument, *name.encode()])
    points = generator.uniform(low, high, (64, *shape))
    nearest = np.abs(points - np.round(points)).reshape(64, -1).min(axis=1)
    return points[nearest > 0.02][:POINTS]


def test_every_rule_is_tested():
    rules = {name: rule for name, rule in RULES.items() if name not in OF_PARTIALS}
    assert set(DOMAINS) - STEPS == set(rules) - {"select", "cast"}  # which are tested with the language
    for rule in rules.values():
        assert len(rule.partials) == (3 if rule.name == "select" else len(DOMAINS.get(rule.name, (None, R))) - 1)
        assert rule.kind in ("smooth", "singular", "choice")
        assert (rule.picks is not None) == (rule.name in ("max", "min"))


@pytest.mark.mostly_sweep("floor")
@pytest.mark.parametrize("name", UNARY)
def test_unary_rule(name):
    f = DOMAINS[name][0]
    x, y = scalars(draw(name, 0)), outputs(POINTS)
    v, w = vectors(draw(name, 0, 3)), vector_outputs(3, POINTS)

    @ti.kernel
    def k():
        for i in x:
            y[i] = f(x[i])
        for i in v:
            w[i] = f(v[i])

    check_jacobian(k, [x, v], [y, w])


@pytest.mark.mostly_sweep("atan2")
@pytest.mark.parametrize("name", BINARY)
def test_binary_rule(name):
    """Both arguments active, one of them, the same one twice; the other one a field, a float, an int, an int field."""
    f = DOMAINS[name][0]
    a, b, y = scalars(draw(name, 0)), scalars(draw(name, 1)), outputs(POINTS, 10)
    c, d = scalars(draw(name, 0)[::-1]), scalars(draw(name, 1)[::-1])
    n = ti.field(ti.i32, shape=())
    n[None] = 2
    is_singular = name == "pow"  # of a negative base

    @ti.kernel
    def k():
        for i in a:
            y[i, 0] = f(a[i], b[i])
            y[i, 1] = f(a[i], d[i])
            y[i, 2] = f(c[i], b[i])
            y[i, 3] = f(abs(b[i]) + 0.1 if ti.static(is_singular) else 0.7 * b[i], b[i])
            y[i, 4] = f(a[i], 1.3)
            y[i, 5] = f(1.3, b[i])
            y[i, 6] = f(a[i], 2)
            y[i, 7] = f(2, b[i])
            y[i, 8] = f(a[i], n[None])
            y[i, 9] = f(n[None], b[i])

    check_jacobian(k, [a, b], y)


@pytest.mark.mostly_sweep("floordiv")
@pytest.mark.parametrize("name", BINARY)
def test_binary_rule_on_vectors(name):
    f = DOMAINS[name][0]
    a, b = scalars(draw(name, 0)), scalars(draw(name, 1))
    u, v = vectors(draw(name, 0, 3)), vectors(draw(name, 1, 3))
    both, left, right = (vector_outputs(3, POINTS) for _ in range(3))
    text = "for i in u: both[i] = f(u[i], v[i]); left[i] = f(a[i], v[i]); right[i] = f(u[i], b[i])"
    k = kernel_of(text, u=u, both=both, f=f, v=v, left=left, a=a, right=right, b=b)
    # Taichi 1.7.4 computes atan2 of float64 vectors in float32: differences need a longer step
    coarse = {"step": 3e-3, "rtol": 1e-3, "atol": 1e-3, "state_rtol": 1e-6} if name == "atan2" else {}
    check_jacobian(k, [a, b, u, v], [both, left, right], **coarse)


def test_atan2_on_vectors_has_the_derivative_of_atan2():
    u, v, y = vectors([[0.3, -0.8, 1.1]]), vectors([[0.5, 1.2, 0.4]]), vector_outputs(3, 1)
    k = kernel_of("y[0] = ti.atan2(u[0], v[0])", y=y, u=u, v=v)
    s, c = u.to_numpy()[0], v.to_numpy()[0]
    expected = [np.diag(p / (s * s + c * c)).reshape(1, 3, 1, 3) for p in (c, -s)]
    check_jacobian(k, [u, v], y, expected=[expected], state_rtol=1e-6)  # computed in float32 by Taichi


# --- kinks ------------------------------------------------------------------------------------------------------------


KINKS = """
abs_at_zero: x, y = scalars([0.0, -0.0, 1.0, -1.0]), outputs(4) | x, y, expected=np.diag([0, 0, 1, -1])
    for i in x:
        y[i] = abs(x[i])
tie_with_a_number: x, y = scalars([0.5]), outputs(4) | x, y, expected=[[0], [1], [0], [1]]
    y[0] = max(x[0], 0.5)
    y[1] = max(0.5, x[0])
    y[2] = min(x[0], 0.5)
    y[3] = min(0.5, x[0])
remainder_at_a_multiple_keeps_its_partials: a, b, y = scalars([1.5, -1.5, 0.0]), scalars([0.5, 0.5, 0.5]), outputs(3) | [a, b], y, expected=[[np.eye(3), np.diag([-3.0, 3.0, 0.0])]]
    for i in a:
        y[i] = a[i] % b[i]
remainder_of_negative_numbers: a, b, y = scalars([1.3, -1.3, 1.3, -1.3]), scalars([0.4, 0.4, -0.4, -0.4]), outputs(4) | [a, b], y
    for i in a:
        y[i] = a[i] % b[i]
power_of_zero: x, e, y = scalars([0.0] * 5), scalars([2.0, 1.0, 0.0, 3.5, 2.0]), outputs(5) | [x, e], y, expected=[[np.diag([0.0, 1, 0, 0, 0]), np.zeros((5, 5))]]
    for i in x:
        y[i] = x[i] ** e[i]
power_of_zero_with_numbers: x, y = scalars([0.0]), outputs(5) | x, y, expected=[[0], [1], [0], [0], [0]]
    y[0] = x[0] ** 2
    y[1] = x[0] ** 1
    y[2] = x[0] ** 0
    y[3] = x[0] ** 3.0
    y[4] = 0.0 ** (x[0] + 2.0)
power_of_a_negative_base: x, y = scalars([-1.4]), outputs(5); n = integers(3)
    y[0] = x[0] ** 2
    y[1] = x[0] ** 3
    y[2] = x[0] ** -1
    y[3] = x[0] ** n[None]
    y[4] = x[0] ** 4.0
length_of_the_zero_vector: x, y = scalars([0.0, 0.0, 0.0]), outputs(4) | x, y, expected=np.zeros((4, 3))
    v = tm.vec3(x[0], x[1], x[2])
    y[0] = v.norm()
    y[1] = tm.length(v)
    y[2] = v.norm(1e-3)
    y[3] = v.norm_sqr()
distance_of_equal_points: x, y = vectors([[0.3, 0.4], [0.3, 0.4]]), outputs(1) | x, y, expected=np.zeros((1, 2, 2))
    y[0] = tm.distance(x[0], x[1])
angle_of_the_origin: x, y, zero = scalars([0.5]), outputs(1), scalars([0.0]) | x, y, expected=[[0.0]]
    y[0] = ti.atan2(zero[0] * x[0], zero[0] * x[0])
clamp_at_and_between_its_bounds: x, y = scalars([-1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5]), outputs(7) | x, y, expected=np.diag([0, 1, 1, 1, 1, 1, 0])
    for i in x:
        y[i] = tm.clamp(x[i], -1.0, 1.0)  # min(1, max(-1, x)): the right-hand operand is x at both ties
a_side_that_is_not_chosen: x, y = scalars([0.0, 4.0]), outputs(5) | x, y, expected=[[0, 0.25], [0, 1], [0, 1], [2, 0], [0, 0]]
    y[0] = ti.sqrt(x[1]) if x[0] < 1.0 else ti.sqrt(x[0])
    y[1] = ti.select(x[0] < 1.0, x[1], 1.0 / x[0])
    y[2] = ti.max(x[1], ti.log(x[0]))
    y[3] = ti.select(x[0] > 0.0, ti.sqrt(x[0]), x[0] * 2.0)
    y[4] = x[0] * ti.log(x[0]) if x[0] > 0.0 else 0.0
nan_that_is_real_is_kept: x, y, zero = scalars([1.0, 0.0]), outputs(2), scalars([0.0]) | x, y, expected=[[np.nan, np.inf], [1, 0]]
    y[0] = x[1] / (zero[0] * x[0])
    y[1] = x[0]
"""
ROWS = rows_of(KINKS)


@pytest.mark.chosen_only("values at kinks", "--move-starts")
@pytest.mark.parametrize("name", ROWS)
def test_conventions(name):
    ROWS[name].is_right()


@pytest.mark.mostly_sweep("ti.max", "max", "min")
@pytest.mark.parametrize("f", [ti.max, ti.min, max, min], ids=["ti.max", "ti.min", "max", "min"])
def test_extremum_takes_the_right_hand_operand_at_a_tie(f):
    a, b, c, y, z = scalars([0.7, 0.0]), scalars([0.7, -0.0]), scalars([0.7, 0.0]), outputs(2), outputs(2)
    k = kernel_of("for i in a: y[i] = f(a[i], b[i]); z[i] = f(a[i], b[i], c[i])", a=a, y=y, f=f, b=b, z=z, c=c)
    one, zero = np.eye(2), np.zeros((2, 2))
    check_jacobian(k, [a, b, c], [y, z], expected=[[zero, one, zero], [zero, zero, one]])


def test_steps_have_derivative_zero_everywhere():
    x, y = scalars([1.0, 0.5, -1.5, 2.25]), outputs(4, 9)

    @ti.kernel
    def k():
        for i in x:
            y[i, 0] = ti.floor(x[i])
            y[i, 1] = ti.ceil(x[i])
            y[i, 2] = ti.round(x[i])
            y[i, 3] = x[i] // 0.5
            y[i, 4] = ti.cast(x[i], ti.i32)
            y[i, 5] = int(x[i])
            y[i, 6] = x[i] > 0.5
            y[i, 7] = ti.cast(x[i] == 1.0, ti.f64)
            y[i, 8] = tm.sign(x[i])

    with pytest.warns(UserWarning, match="does not depend"):
        assert_array_equal(jacobian(k, x, y), np.zeros((4, 9, 4)))


# --- singular points --------------------------------------------------------------------------------------------------

# operation of one argument, a point where its derivative is infinite
SINGULAR = [
    (ti.sqrt, 0.0),
    (ti.rsqrt, 0.0),
    (ti.log, 0.0),
    (ti.asin, 1.0),
    (ti.asin, -1.0),
    (ti.acos, 1.0),
    (ti.acos, -1.0),
]


@pytest.mark.parametrize(("f", "point"), SINGULAR, ids=[f"{f.__name__}({p:g})" for f, p in SINGULAR])
@pytest.mark.parametrize("has_row", [False, True], ids=["seeds", "row"])
def test_zero_tangent_stays_zero_at_a_singular_point(f, point, has_row):
    x, y, zero = scalars([0.3, 0.8]), outputs(3), scalars([0.0])

    @ti.kernel
    def k():
        for i in range(1):
            t = x[0] * zero[0]
            if ti.static(has_row):
                for j in range(2):
                    t += x[j] * zero[0]
            y[0] = f(t + point) + x[1]
            y[1] = 3.0 * f(point + 2.0 * t) * x[1]
            y[2] = f(point - t * t)

    value = float(f(np.float64(point))) if f is not ti.rsqrt else np.inf
    value = {ti.log: -np.inf}.get(f, value)
    assert_array_equal(jacobian(k, x, y), [[0, 1], [0, 3 * value], [0, 0]])


@pytest.mark.parametrize(("f", "point"), SINGULAR, ids=[f"{f.__name__}({p:g})" for f, p in SINGULAR])
def test_what_a_choice_leaves_out_has_no_tangent_at_a_singular_point(f, point):
    """The tangent of the row is not zero, but its coefficient is."""
    x, y = scalars([0.3, 0.8]), outputs(3)

    @ti.kernel
    def k():
        for i in range(1):
            t = 0.0
            for j in range(2):
                t += x[j]
            chosen = ti.max(-t, 0.0)
            y[0] = f(chosen + point)
            y[1] = f(ti.select(t > 0.0, 0.0, t) + point)
            u = 0.0
            if t < 0.0:
                u = t
            y[2] = 2.0 * f(point - u * t)

    assert_array_equal(jacobian(k, x, y), np.zeros((3, 2)))


@pytest.mark.cpu_only("0 ** -0.5 is 0 on Mesa's llvmpipe; SPIR-V leaves it open")
def test_infinite_derivative_is_kept():
    x, y = scalars([0.0]), outputs(3)
    k = kernel_of("y[0] = ti.sqrt(x[0]); y[1] = ti.log(x[0]); y[2] = x[0] ** 0.5", y=y, x=x)
    assert_array_equal(jacobian(k, x, y), [[np.inf], [np.inf], [np.inf]])


def test_fixed_powers_of_values_with_rows():
    """The partial of a power of 1 or more is finite, at 0 too: such a power needs no guard."""
    x, y = scalars([-0.7, 0.0, 0.4]), outputs(3, 6)

    @ti.kernel
    def k():
        for i in x:
            s = 0.0
            for j in range(3):
                s += x[j] * ti.static(1.0)
            u = x[i] + s - s
            y[i, 0], y[i, 1], y[i, 2] = u**1, u**2, u**3
            y[i, 3], y[i, 4], y[i, 5] = abs(u) ** 1.5, u**2.0, (u + s) ** 4

    J = jacobian(k, x, y)
    X = np.array([-0.7, 0.0, 0.4])
    total = 4 * (X + X.sum()) ** 3
    for n, slope in enumerate((X**0, 2 * X, 3 * X**2, 1.5 * np.sqrt(np.abs(X)) * np.sign(X), 2 * X)):
        assert_allclose(J[:, n], np.diag(slope), rtol=1e-12, atol=1e-12)
    assert_allclose(J[:, 5], np.diag(total) + total[:, None], rtol=1e-12, atol=1e-12)


# --- single precision -------------------------------------------------------------------------------------------------


def table_of(dtype):
    """The Jacobians of all rules that are not constant, in two kernels."""
    unary = [name for name in UNARY if name not in STEPS]
    binary = [name for name in BINARY if name not in STEPS]
    unary_functions = [DOMAINS[name][0] for name in unary]
    binary_functions = [DOMAINS[name][0] for name in binary]
    x = scalars(np.float32([draw(name, 0) for name in unary]), dtype)
    a, b = (scalars(np.float32([draw(name, n) for name in binary]), dtype) for n in range(2))
    y, z = outputs(len(unary), POINTS, dtype=dtype), outputs(len(binary), POINTS, dtype=dtype)

    @ti.kernel
    def k():
        for i in range(POINTS):
            for n, f in ti.static(enumerate(unary_functions)):
                y[n, i] = f(x[n, i])
            for n, f in ti.static(enumerate(binary_functions)):
                z[n, i] = f(a[n, i], b[n, i])

    return jacobian(k, [x, a, b], [y, z])


@pytest.mark.double_only("two types of real numbers")
def test_single_precision_agrees_with_double():
    """Every rule on float32 fields agrees with the same rule on float64 fields to a few units in the last place."""
    for row, reference in zip(table_of(ti.f32), table_of(ti.f64), strict=True):
        for single, double in zip(row, reference, strict=True):
            assert single.dtype == np.float32
            assert double.dtype == np.float64
            assert_allclose(single, double, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("power", [2.5, 3.0, 3])
def test_zero_tangents_in_a_row_stay_zero_in_powers_of_negative_numbers(power):
    n = 40
    x, w, y = scalars(np.full(n, -1.0)), scalars(np.arange(n) % 2 * 1.0), outputs(1)

    @ti.kernel
    def k():
        for i in range(1):
            s = 0.0
            for j in range(n):
                s += x[j] * w[j]
            y[i] = s**power

    J = jacobian(k, x, y)[0]
    assert_array_equal(J[::2], 0.0)
    slope = 3.0 * (n / 2) ** 2 if power == 3 else np.nan
    assert_allclose(J[1::2], slope, rtol=1e-12)


def test_max_and_min_with_nan_have_the_derivative_of_their_value():
    initialise(default_fp=ti.f64, fast_math=False)  # fast_math assumes that no number is NaN
    x, y = ti.field(ti.f64, 3), ti.field(ti.f64, 8)
    x.from_numpy(np.array([2.0, np.nan, 3.0]))

    @ti.kernel
    def k():
        w, bad = x[0] * 5.0, x[1] * 7.0
        y[0], y[1], y[2], y[3] = ti.max(w, bad), ti.max(bad, w), ti.min(w, bad), ti.min(bad, w)
        y[4], y[5] = ti.max(bad, 1.0, w), ti.min(20.0, bad, w)
        y[6], y[7] = ti.max(x[0], x[2], x[0]), ti.min(x[2], x[2] + 0.0 * x[0])

    J = jacobian(k, x, y)
    assert_array_equal(y.to_numpy(), [10, 10, 10, 10, 10, 10, 3, 3])
    assert_array_equal(J, [[5, 0, 0]] * 6 + [[0, 0, 1]] * 2)
