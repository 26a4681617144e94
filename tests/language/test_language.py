"""Operators in kernels, and the order in which Taichi evaluates an expression."""

import importlib.util
import operator

import numpy as np
import pytest
import taichi as ti
from differences import check_jacobian, outputs, scalars, vector_outputs, vectors

pytestmark = pytest.mark.usefixtures("ti64")


def integers(*values):
    field = ti.field(ti.i32, shape=len(values))
    field.from_numpy(np.array(values, dtype=np.int32))
    return field


# --- arithmetic -------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_augmented_assignment():
    """Of a local, an entry and a vector; sums, differences, products and quotients stand in random programs."""
    x, y, z = scalars([1.3, 0.45]), scalars([2.2, 0.7, 1.9]), outputs(3)
    v, w = vectors([[1.3, 0.45]]), vectors([[2.2, 0.7], [1.6, 1.0], [0.8, 1.9]])

    @ti.kernel
    def k():
        a, b, c = x[0], x[0], x[0]
        a //= x[1]
        b %= x[1]
        c **= x[1]
        z[0], z[1], z[2] = a * x[0], b * x[0], c * x[0]
        y[0] //= x[1]
        y[1] %= x[0]
        y[2] **= y[1]
        w[0] //= x[1]
        w[1] %= v[0]
        w[2] **= x[0]

    check_jacobian(k, [x, y, v, w], [y, z, w])


@pytest.mark.filterwarnings("ignore:.*Calling non-taichi function")
def test_operators_as_functions():
    x, y = scalars([1.3, 0.45]), outputs(8)
    plus = operator.add

    @ti.kernel
    def k():
        a, b = x[0], x[1]
        y[0] = plus(a, b) * operator.sub(a, b)
        y[1] = operator.mul(a, operator.truediv(a, b))
        y[2] = operator.mod(a, b) + operator.floordiv(a, b)
        y[3] = operator.pow(a, b) + operator.neg(a)
        if operator.lt(b, a):
            y[4] = operator.mul(a, 2)

    check_jacobian(k, x, y)


@pytest.mark.sweep
def test_integers_mixed_in():
    x, y = scalars([1.3, 0.45]), outputs(10)
    n = integers(3, -2, 5)

    @ti.kernel
    def k():
        m = n[0]
        y[0] = x[0] * (n[0] // 2) + (n[2] % 3) * x[1]
        y[1] = x[0] ** n[0] + x[0] ** n[1]
        y[2] = x[0] * (n[0] & 1) + x[1] * (n[2] | 2) - x[0] * (n[0] ^ n[2])
        y[3] = x[0] * (n[0] << 2) - x[1] * (n[2] >> 1) + x[0] * (~n[0])
        y[4] = n[0] / n[2] * x[0] + n[0] / x[0]
        y[5] = x[0] * (m > 2) + (m == 3) * x[1] + x[0] * (not m)
        m += 1
        y[6] = x[0] * m
        m *= n[2]
        m -= 1
        y[7] = m * x[0] / n[1] * x[1]
        y[8] = x[m % 2] * x[(m + 1) % 2] ** 2
        m <<= 1
        m |= 1
        m ^= 2
        m &= 13
        m >>= 1
        m //= 2
        m %= 3
        y[9] = x[0] * m + x[1] * ti.cast(m, ti.f64) * abs(n[1]) * max(m, n[0]) * min(m, n[1])

    check_jacobian(k, x, y)


@pytest.mark.sweep
def test_single_precision_mixed_with_double():
    x, s = scalars([1.25, 0.5]), scalars([0.75, 1.5], ti.f32)
    y, z = outputs(4), outputs(3, dtype=ti.f32)

    @ti.kernel
    def k():
        y[0] = x[0] * s[0]
        t = s[0]
        t = t * x[1]
        y[1] = t * t
        u = ti.cast(0.0, ti.f32)
        for i in range(2):
            u += s[i] * x[i]
        y[2] = u * u
        y[3] = max(s[0], x[0]) + min(s[1], x[0]) * s[0]
        z[0] = x[0] * x[1]
        z[1] = s[0] * s[1] * 3.0
        z[2] = u

    p, q = x.to_numpy(), s.to_numpy().astype(float)
    u = float(q @ p)
    by_x = [[q[0], 0], [0, 2 * q[0] ** 2 * p[1]], 2 * u * q, [1 + q[0], 0]]
    by_s = [[p[0], 0], [2 * q[0] * p[1] ** 2, 0], 2 * u * p, [p[0], 0]]
    z_by_x = [[p[1], p[0]], [0, 0], q]
    z_by_s = [[0, 0], [3 * q[1], 3 * q[0]], p]
    check_jacobian(k, [x, s], [y, z], expected=[[by_x, by_s], [z_by_x, z_by_s]])


# --- order of evaluation ----------------------------------------------------------------------------------------------


def test_side_effects_within_an_expression():
    """Taichi evaluates the operands of a statement after the calls in it have had their effects."""
    x, y = scalars([0.3, 0.8, 1.4]), outputs(5)

    @ti.func
    def double(a: ti.template()):
        a = a * 2.0
        return a

    @ti.kernel
    def k():
        p = x[0] * x[1]
        y[0] = p * 2.0 + double(p)
        q = x[0] * x[1]
        y[1] = q * x[2] + ti.atomic_add(q, x[1]) * q
        r = x[0]
        y[2] = (r := x[1] * r) + r * r
        s = x[2]
        t = s * double(s) + s
        y[3] = t * s
        y[4] = double(s) + double(s) * double(t) + t

    check_jacobian(k, x, y)


@pytest.mark.sweep
def test_side_effects_on_fields_within_an_expression():
    x, v = scalars([0.3, 0.8]), vectors([[0.3, 0.8], [1.2, 0.5]])
    z, w, y, u = outputs(1), vector_outputs(2, 1), outputs(3), vector_outputs(2, 2)

    @ti.func
    def double():
        z[0] = z[0] * 2.0
        return z[0]

    @ti.func
    def double_vector():
        w[0] = w[0] * 2.0
        return w[0].x

    @ti.kernel
    def k():
        for _ in range(1):
            z[0] = x[0]
            y[0] = z[0] + double()
            y[1] = z[0] * x[1] + double() * z[0]
            y[2] = (z[0] * 3.0 if x[0] < 1.0 else z[0]) + double()
            w[0] = v[0]
            u[0] = w[0] + double_vector()
            u[1] = w[0] * v[1] + double_vector() * w[0]

    check_jacobian(k, [x, v], [y, u, z, w])


@pytest.mark.cpu_only("shaders print elsewhere")
def test_print_and_assert(capfd):
    x, y = scalars([0.3, 0.8]), outputs(1)

    @ti.kernel
    def k():
        a = x[0] * x[1]
        print("a", a, "x", x[0], f"sum {a + x[1]} and {x[0]:.3f}", f"{a} {x[1]}", sep=" ", end="!\n")
        assert a > 0.0
        assert a > 0.0 and x[1] > a, "message"  # noqa: PT018
        assert a < x[1], f"a is {a}"
        assert x[0] < 5.0, "x is %f" % x[0]  # noqa: UP031
        y[0] = a * x[0]
        print(ti.Vector([a, x[0]]), y[0])

    check_jacobian(k, x, y)
    ti.sync()
    assert "sum 1.04" in capfd.readouterr().out


def test_docstrings_pass_and_bare_expressions():
    x, y = scalars([0.3, 0.8]), outputs(1)

    @ti.kernel
    def k():
        """A kernel."""
        x[0] * 2.0
        x[1]
        if x[0] > 0.1:
            pass
        else:
            ...
        y[0] = x[0] * x[1]

    check_jacobian(k, x, y)


@pytest.mark.sweep
def test_more_terms_than_python_nests_calls(tmp_path):
    """Of so many terms that Python's usual limit of nested calls is passed, as programs write them; Taichi takes it."""
    terms = " + ".join(f"x[{n % 5}] * {n}.0" for n in range(300))
    text = f"import taichi as ti\ndef make(x, y):\n    @ti.kernel\n    def k():\n        y[0] = {terms}\n    return k\n"
    file = tmp_path / "long_expression.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location("long_expression", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    x, y = scalars([0.1, 0.2, 0.3, 0.4, 0.5]), outputs(1)
    check_jacobian(module.make(x, y), x, y, expected=[[sum(range(n, 300, 5)) for n in range(5)]])
