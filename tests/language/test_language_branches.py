"""Branches, static ones too, several loops in a kernel, and programs of many loops."""

import importlib.util

import numpy as np
import pytest
import taichi as ti
import taichi.math as tm
from differences import check_jacobian, matrices, outputs, scalars, vector_outputs, vectors

from taichi_ext import jacobian

pytestmark = pytest.mark.usefixtures("ti64")

FIVE = [1.3, 0.4, 0.7, 0.2, 0.9]


def test_static_branches():
    x, y = scalars(FIVE), outputs(3)
    mode, flags = "square", {"double": True}

    @ti.kernel
    def k():
        a = x[0]
        if ti.static(mode == "square"):
            a = a * x[1]
        elif ti.static(mode == "cube"):
            a = a * a * a
        else:
            a = 0.0
        b = a
        if ti.static(flags["double"]):
            b = a * 2.0
            c = b * x[2]
            y[0] = c
        else:
            b = tm.vec2(a)
        y[0] += b * a
        for i in ti.static(range(2)):
            for j in ti.static(range(2)):
                if ti.static(i == j):
                    y[1] += x[i] * x[j]
                else:
                    y[2] += x[i] * x[j] ** 2
        ti.static_assert(mode == "square")

    check_jacobian(k, x, y)


@pytest.mark.sweep
def test_particles_to_a_grid_and_back():
    n, g = 6, 5
    generator = np.random.default_rng(0)
    x, v = vectors(generator.uniform(0.3, 0.7, (n, 2))), vectors(generator.uniform(-1, 1, (n, 2)))
    c = matrices(generator.uniform(-1, 1, (n, 2, 2)))
    momentum, mass, out = vector_outputs(2, g, g), outputs(g, g), vector_outputs(2, n)

    @ti.kernel
    def k():
        for I in ti.grouped(mass):
            momentum[I] = tm.vec2(0.0)
            mass[I] = 0.0
        for p in x:
            base = ti.cast(x[p] * g - 0.5, ti.i32)
            fx = x[p] * g - ti.cast(base, ti.f64)
            w = [0.5 * (1.5 - fx) ** 2, 0.75 - (fx - 1) ** 2, 0.5 * (fx - 0.5) ** 2]
            for i, j in ti.static(ti.ndrange(3, 3)):
                offset = ti.Vector([i, j])
                weight = w[i].x * w[j].y
                momentum[base + offset] += weight * (v[p] + c[p] @ ((ti.cast(offset, ti.f64) - fx) / g))
                mass[base + offset] += weight
        for i, j in mass:
            if mass[i, j] > 0:
                momentum[i, j] /= mass[i, j]
                momentum[i, j].y -= 0.1
                if i < 1 and momentum[i, j].x < 0:
                    momentum[i, j].x = 0.0
        for p in x:
            base = ti.cast(x[p] * g - 0.5, ti.i32)
            fx = x[p] * g - ti.cast(base, ti.f64)
            w = [0.5 * (1.5 - fx) ** 2, 0.75 - (fx - 1) ** 2, 0.5 * (fx - 0.5) ** 2]
            new = ti.Vector.zero(ti.f64, 2)
            for i in ti.static(range(3)):
                for j in ti.static(range(3)):
                    new += w[i].x * w[j].y * momentum[base + ti.Vector([i, j])]
            out[p] = new

    # sums into the grid are made in no fixed order
    check_jacobian(k, [x, v, c], out, state=[momentum, mass], rtol=1e-5, atol=1e-6, state_rtol=1e-10)


@pytest.mark.sweep
def test_a_sum_of_many_terms_and_a_branch_of_many_sides(tmp_path):
    """As deep as Taichi compiles them on Python 3.12, which counts recursion through functions in C apart."""
    terms = " + ".join(f"x[0] * {number}.0" for number in range(450))
    sides = "".join(f"    {'el' if n else ''}if number == {n}:\n        v = x[1] * {n}.0\n" for n in range(280))
    path = tmp_path / "deep.py"
    path.write_text(
        "import taichi as ti\n\n\n@ti.kernel\ndef k(x: ti.template(), y: ti.template(), number: int):\n"
        f"    y[0] = {terms}\n    v = 0.0\n{sides}    y[1] = v\n"
    )
    spec = importlib.util.spec_from_file_location("deep", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    x, y = scalars([0.5, 2.0]), outputs(2)
    expected = [[450 * 449 / 2, 0.0], [0.0, 270.0]]
    np.testing.assert_allclose(jacobian(module.k, x, y, args=(x, y, 270)), expected, rtol=1e-12)
