"""Antialiased edges in kernels that are launched without a Jacobian: only the engine can build them."""

import numpy as np
import pytest
import taichi as ti
from kernel_texts import func_of, kernel_of
from numpy.testing import assert_allclose

from taichi_ext import edge

pytestmark = pytest.mark.usefixtures("ti64")

BORDER = 1.3
COVERED = np.array([0.0, 0.2, 1.0, 1.0, 1.0])  # of pixels of width 1 at 0, 1, ...

right_of = func_of("py = 0.0; return coverage(px - border, at=(px, py))", "border, px")


@ti.real_func
def right_of_it(border: ti.f64, px: ti.f64) -> ti.f64:
    py = 0.0
    return edge(px - border, 1.0, 0.0, at=(px, py), antialias=True)


def test_plain_launches_with_structs_and_vectors():
    Scene = ti.types.struct(border=ti.f64, colour=ti.math.vec2)

    @ti.kernel
    def k(scene: Scene, scale: ti.math.vec2, a: ti.types.ndarray()) -> ti.math.vec2:
        for i in a:
            p = ti.Vector([float(i), 0.0])
            a[i] = edge(p.x - scene.border, scene.colour, scale, at=p, antialias=True).y
        return scale * a[1]

    a = np.zeros(3)
    result = k(Scene(border=BORDER, colour=[5.0, 3.0]), ti.math.vec2(2.0, 1.0), a)
    assert_allclose(a, 1 + 2 * COVERED[:3], rtol=1e-12)
    assert_allclose(list(result), [2.8, 1.4], rtol=1e-12)


@pytest.mark.sweep
def test_plain_launches_of_real_functions():
    """Taichi would take a function for compiled whose compilation was broken off."""

    @ti.kernel
    def k(a: ti.types.ndarray(), factor: ti.template()):
        for i in a:
            a[i] = factor * right_of_it(BORDER, float(i))

    @ti.kernel
    def other(a: ti.types.ndarray()):
        for i in range(a.shape[0]):
            a[i] = right_of_it(BORDER, float(i)) + 1.0

    a, b, c = np.zeros(5), np.zeros(5), np.zeros(5)
    k(a, 1.0)
    k(b, 2.0)
    other(c)
    for _ in range(2):
        assert_allclose([a, b / 2, c - 1], [COVERED] * 3, rtol=1e-12, atol=1e-12)


@pytest.mark.cpu_only("Taichi prints nothing from kernels on Mesa's llvmpipe")
def test_plain_launches_that_print(capfd):
    @ti.kernel
    def k(a: ti.types.ndarray()):
        for i in range(2):
            a[i] = right_of(BORDER, float(i))
            print("covered", a[i])

    k(np.zeros(2))
    assert capfd.readouterr().out.count("covered") == 2


def slope_kernel():
    text = "for i in a: px = float(i); py = 0.0; a[i] = edge(p[0] - px, 2.0 * p[1], 1.0, at=(px, py), antialias=True)"
    k = kernel_of(text, "p: A, a: A")
    return k


@pytest.mark.sweep
@pytest.mark.cpu_only("on Vulkan, gradients of arrays are 0 in Taichi's reverse mode")
def test_gradients_of_ndarrays():
    """The sum of the image is 4 + (p0 + 0.5) (2 p1 - 1)."""
    k = slope_kernel()
    p, a = ti.ndarray(ti.f64, 2, needs_grad=True), ti.ndarray(ti.f64, 4, needs_grad=True)
    p.from_numpy(np.array([1.2, 1.0]))
    k(p, a)
    a.grad.fill(1.0)
    k.grad(p, a)
    assert_allclose(a.to_numpy(), [2.0, 1.7, 1.0, 1.0], rtol=1e-12)
    assert_allclose(p.grad.to_numpy(), [1.0, 3.4], rtol=1e-12)
