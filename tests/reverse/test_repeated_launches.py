"""Launches that are repeated within a run, in reverse mode: what they rest on changes in between."""

import contextlib

import numpy as np
import pytest
import taichi as ti
from kernel_texts import kernel_of
from reverse_calls import Prepared, expected

from taichi_ext import boundary_gradient, registry, value_and_gradient
from taichi_ext.errors import InvalidArgumentError
from taichi_ext.runtime.reverse import kernels

pytestmark = pytest.mark.usefixtures("ti32")

A, B = np.array([0.3, -0.7, 1.1], np.float32), np.array([0.5, 0.2, -0.4], np.float32)


def _field(values):
    made = ti.field(ti.f32, len(values))
    made.from_numpy(values)
    return made


add_square = kernel_of("for i in x: y[i] += scale * x[i] ** 2", "x: ti.template(), y: ti.template(), scale: ti.f32")
add_up = kernel_of("for i in x: loss[None] += x[i]", "x: ti.template(), loss: ti.template()")


@pytest.mark.mostly_sweep("11")
@pytest.mark.parametrize("count", [5, 8, 11])
def test_large_stages_take_cotangents_in_two_launches(count, monkeypatch):
    a, b, total = _field(A), _field(B), _field(0 * A)

    @ti.kernel
    def iterate():
        for i in a:
            while b[i] < 1.5:  # keeps numbers on a tape
                b[i] += a[i] ** 2 + 0.1 * ti.exp(b[i])
            total[i % 2] += b[i] * ti.sin(a[i])

    def run():
        b.from_numpy(B)
        total.fill(0)
        for _ in range(2):
            iterate()
            add_square(a, b, -0.5)

    cotangents = [np.random.default_rng(n).standard_normal((count, 3)) for n in range(2)]
    whole, halved = Prepared(run, [a], [b, total]), Prepared(run, [a], [b, total])
    found = [whole(cotangents)]
    monkeypatch.setattr(kernels, "MOST_WRITTEN_OUT", 0)
    found += [halved(cotangents), halved(cotangents)]
    assert (len(halved.reverse.source) < len(whole.reverse.source)) == (count > 5)
    for products in found:
        for product, want in zip(products, expected(run, [a], [b, total], cotangents), strict=True):
            np.testing.assert_allclose(product, want, rtol=2e-5, atol=1e-6)


@pytest.mark.sweep
def test_repeated_launch_sees_what_became_active_since():
    a, b, c, loss = _field(A), _field(B), _field(0 * A), ti.field(ti.f32, ())

    def run():
        loss[None] = 0
        c.fill(0)
        for _ in range(3):  # b carries no derivative in the first round
            add_square(b, c, 1.0)
            add_square(a, b, 1.0)
        add_up(c, loss)

    _, (gradient,) = value_and_gradient(run, [a], loss)
    # c = b² + (b + a²)² + (b + 2a²)²
    np.testing.assert_allclose(gradient, 2 * (B + A**2) * 2 * A + 2 * (B + 2 * A**2) * 4 * A, rtol=1e-5)


def test_repeated_launch_sees_number_that_python_stored():
    a, b, c, loss = _field(A), _field(B), _field(0 * A), ti.field(ti.f32, ())

    def run():
        loss[None] = 0
        c.fill(0)
        add_square(b, c, 1.0)
        add_square(b, c, 1.0)
        b[1] = a[2] * 3
        add_square(b, c, 1.0)
        add_up(c, loss)

    _, (gradient,) = value_and_gradient(run, [a], loss)
    np.testing.assert_allclose(gradient, [0, 0, 18 * A[2]], rtol=1e-5)


def test_repeated_launch_takes_fields_and_numbers_of_each_call():
    a, b, c, loss = _field(A), _field(B), _field(0 * A), ti.field(ti.f32, ())

    def run():
        loss[None] = 0
        c.fill(0)
        for x, scale in ((a, 2), (b, 2.5), (a, 0.5), (b, -0.0), (a, 3), (b, 0.0), (a, np.float32(0.25)), (b, True)):
            add_square(x, c, scale)
        add_up(c, loss)

    _, gradients = value_and_gradient(run, [a, b], loss)
    np.testing.assert_allclose(gradients[0], 2 * A * 5.75, rtol=1e-5)
    np.testing.assert_allclose(gradients[1], 2 * B * 3.5, rtol=1e-5)


def test_repeated_launch_keeps_parts_by_the_integers_of_each_call():
    x, loss = ti.field(ti.f32, (4, 3)), ti.field(ti.f32, ())
    start = _field(A)
    begin = kernel_of("for i in start: x[0, i] = start[i]", start=start, x=x)
    step = kernel_of(
        "for i in start: x[t, i] = x[s, i] * x[t, i] + x[s, i] ** 2", "s: ti.i32, t: ti.i32", start=start, x=x
    )
    end = kernel_of("for i in start: loss[None] += x[t, i]", "t: ti.i32", start=start, loss=loss, x=x)
    steps = [(0, 1), (1, 2), (0, 1), (2, 0), (0, 1), (1, 1), (0, 1)]

    def run():
        loss[None] = 0
        x.fill(0.5)
        begin()
        for s, t in steps:
            step(s, t)
        end(1)

    def plain(a):
        rows = [a, *(0.5 + 0 * a for _ in range(3))]
        for s, t in steps:
            rows[t] = rows[s] * rows[t] + rows[s] ** 2
        return rows[1]

    _, (gradient,) = value_and_gradient(run, [start], loss)
    np.testing.assert_allclose(gradient, plain(A.astype(complex) + 1e-20j).imag / 1e-20, rtol=1e-4)


def test_repeated_launch_of_destroyed_field_raises():
    a, loss = _field(A), ti.field(ti.f32, ())
    b = ti.field(ti.f32)
    builder = ti.FieldsBuilder()
    builder.dense(ti.i, 3).place(b)
    tree = builder.finalize()

    def run():
        add_square(a, b, 1.0)
        add_square(a, b, 1.0)
        tree.destroy()
        add_square(a, b, 1.0)

    with pytest.raises(InvalidArgumentError, match="no longer exists"):
        value_and_gradient(run, [a], loss)


@ti.func
def square(a):
    return a * a


add_squares = kernel_of("for i in x: y[i] += square(x[i])", "x: ti.template(), y: ti.template()", square=square)


def test_repeated_launch_sees_the_rules_of_its_moment():
    a, c, loss = _field(A), _field(0 * A), ti.field(ti.f32, ())

    @boundary_gradient(square, name="times five")
    def scaled(d_a):
        return 5.0 * d_a

    def run():
        loss[None] = 0
        c.fill(0)
        for k in range(4):
            with registry.disabled("times five") if k == 2 else contextlib.nullcontext():
                add_squares(a, c)
        add_up(c, loss)

    try:
        _, (gradient,) = value_and_gradient(run, [a], loss)
    finally:
        registry.remove("times five")
    np.testing.assert_allclose(gradient, 15 + 2 * A, rtol=1e-5)
