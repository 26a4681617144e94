"""Products with Hessians: beside H itself, and beside differences of gradients."""

import re

import numpy as np
import pytest
import taichi as ti
from differences import outputs, read, scalars, vectors, write
from kernel_texts import func_of, kernel_of
from numpy.testing import assert_allclose

import taichi_ext as te
from taichi_ext import InvalidArgumentError, hessian, hvp, replace_gradient, stop_gradient, value_and_gradient
from taichi_ext.api.inputs.options import Options
from taichi_ext.api.jacobian import prepared_form
from taichi_ext.runtime.reverse.kernels import StagedKernel

pytestmark = pytest.mark.usefixtures("ti64")


def test_springs_with_one_vector_and_several():
    rng = np.random.default_rng(5)
    x, energy = vectors(rng.normal(size=(6, 3))), scalars(0.0)

    @ti.kernel
    def springs():
        for i in range(5):
            total = 0.0
            for k in range(i + 1):
                total += ((x[i + 1] - x[k]).norm() - 0.3) ** 2
            energy[None] += 2 * total

    H = hessian(springs, x, energy)
    one, several = rng.normal(size=(6, 3)), rng.normal(size=(4, 6, 3))
    write(energy, 0.0)
    found = hvp(springs, x, one, energy)
    assert_allclose(found, np.tensordot(H, one, 2), rtol=1e-12, atol=1e-12)
    after = read(energy)
    write(energy, 0.0)
    springs()
    assert_allclose(after, read(energy), rtol=1e-14)
    assert_allclose(hvp(springs, x, several, energy), np.einsum("aibj,nbj->nai", H, several), rtol=1e-12, atol=1e-12)
    operator, after, vectors_of = te.hessian_operator(springs, x, energy), read(energy), several.reshape(4, -1).T
    assert_allclose(operator @ vectors_of, H.reshape(18, 18) @ vectors_of, rtol=1e-12, atol=1e-12)
    assert_allclose(operator.materialize(), H.reshape(18, 18), rtol=1e-12, atol=1e-12)
    held = te.hessian_operator(springs, x, energy, fixed=[0, 5])
    assert_allclose(held.materialize().reshape(H.shape), hessian(springs, x, energy, fixed=[0, 5]), atol=1e-12)
    write(energy, after)
    assert held.T @ one.ravel() is not None and read(energy) == after  # it leaves the state as it was


def test_entries_whose_indices_may_be_out_of_range(monkeypatch):
    """Particles on a grid: one branch leaves such an entry out, not a choice for each product with its adjoint."""
    X, V = np.array([0.3, 1.2, 1.7, 2.4]), np.array([0.5, -1.0, 2.0, 1.5])
    x, grid, energy, texts = scalars(X), outputs(4), scalars(0.0), []
    adjoint = StagedKernel.adjoint

    def noted(self, *args, **options):
        made = adjoint(self, *args, **options)
        texts.append(made.stage.kernel.text)
        return made

    @ti.kernel
    def scatter():
        for p in x:
            base = int(x[p])
            w = x[p] - base
            grid[base] += (1 - w) * x[p] ** 2
            grid[base + 1] += w * x[p] ** 2

    @ti.kernel
    def gather():
        for p in x:
            base = int(x[p])
            energy[None] += (grid[base] ** 3 + grid[base + 1]) * x[p]

    run = lambda: (scatter(), gather())

    def gradient(x):
        base, w = x.astype(int), x % 1
        grid, g = np.zeros(4), np.zeros(4)
        np.add.at(grid, base, (1 - w) * x**2)
        np.add.at(grid, base + 1, w * x**2)
        np.add.at(g, base, 3 * grid[base] ** 2 * x)
        np.add.at(g, base + 1, x)
        own = g[base] * (2 * x * (1 - w) - x**2) + g[base + 1] * (2 * x * w + x**2)
        return own + grid[base] ** 3 + grid[base + 1]

    monkeypatch.setattr(StagedKernel, "adjoint", noted)
    found = hvp(run, x, V, energy)
    assert_allclose(found, (gradient(X + 1e-6 * V) - gradient(X - 1e-6 * V)) / 2e-6, rtol=1e-7)
    write(grid, 0.0)
    assert_allclose(value_and_gradient(run, x, energy)[1], gradient(X), rtol=1e-12)
    assert any(re.search(r"if .*base < 4\)?:", text) for text in texts)
    assert not any("== 0.0, 0.0, ti.select" in text for text in texts)


def check_by_differences(run, x, energy, count=2, rtol=1e-7, **options):
    """Products with random vectors beside central differences of the gradient."""
    rng = np.random.default_rng(5)
    start, vectors_ = read(x), rng.normal(size=(count, *read(x).shape))

    def gradient(values):
        write(x, values)
        return np.array(value_and_gradient(run, x, energy)[1])

    step = 1e-5
    expected = np.array([(gradient(start + step * v) - gradient(start - step * v)) / (2 * step) for v in vectors_])
    write(x, start)
    found = hvp(run, x, vectors_, energy, **options)
    assert_allclose(found, expected, rtol=0, atol=rtol * np.abs(expected).max())
    write(x, start)
    pairs = vectors_.reshape(count, -1) @ found.reshape(count, -1).T
    assert_allclose(pairs, pairs.T, rtol=1e-11, atol=1e-11 * np.abs(pairs).max())


@pytest.mark.mostly_sweep(every=2)
@pytest.mark.parametrize("max_memory", [None, 3000])
def test_pipelines_in_place(max_memory):
    """State that is overwritten, loops of unknown length, and snapshots where memory is short."""
    rng = np.random.default_rng(5)
    x, q, v, energy = scalars(rng.uniform(0.3, 1, 12)), outputs(12), outputs(12), scalars(0.0)

    @ti.kernel
    def start():
        energy[None] = 0.0
        for i in q:
            q[i], v[i] = x[i], 0.0

    @ti.kernel
    def step():
        for i in v:
            force = 0.0
            n = 0
            while n < 3 and force < 9.0 * x[i]:
                force += ti.sin(q[(i + n) % 12]) * x[i]
                n += 1
            v[i] += 0.1 * force
        for i in q:
            q[i] += 0.1 * ti.sin(v[i]) * q[i]

    finish = kernel_of("for i in q: energy[None] += q[i] ** 3 + v[i] * x[i]", q=q, energy=energy, v=v, x=x)

    def simulate():
        start()
        for _ in range(12):
            step()
        finish()

    check_by_differences(simulate, x, energy, max_memory=max_memory)


def test_stages_have_one_adjoint():
    """A state that becomes active in the first step has the adjoint of later steps, which take as long to compile."""
    x, q, v, energy = scalars(np.linspace(0.3, 1, 3)), scalars(np.linspace(1, 2, 3)), outputs(3), scalars(0.0)

    @ti.kernel
    def step():
        for i in v:
            v[i] += ti.sin(q[i]) * x[i]
        for i in q:
            q[i] += 0.1 * v[i]

    @ti.kernel
    def finish():
        for i in q:
            energy[None] += q[i] ** 3

    def simulate():
        step()
        step()
        finish()

    hvp(simulate, x, np.ones(3), energy)
    plan, _ = prepared_form(simulate, x, energy, (), Options(), "hvp")
    assert len(re.findall(r"def \w+_adjoint\(", plan.prepared.reverse.source)) == 3


def test_arrays_that_share_memory():
    """Rows of an array, one after the other; and two orders of its numbers, of which adjoints are added from copies."""
    rng = np.random.default_rng(5)
    x, energy = rng.uniform(0.3, 1, (3, 8)), scalars(0.0)
    product = kernel_of(
        "for i in a: a[i] = a[i] * ti.sin(b[i]); energy[None] += a[i] ** 2", "a: A, b: A", energy=energy
    )
    mixed = kernel_of("for i, j in a: energy[None] += a[i, j] ** 2 * b[i, j]", "a: A2, b: A2", energy=energy)

    def run():
        energy[None] = 0.0
        mixed(x.T, x.reshape(8, 3))
        product(x[0], x[1])
        product(x[2], x[0])
        product(x[1], x[2])

    def value(x):
        total = (x.T**2 * x.reshape(8, 3)).sum()
        for a, b in ((0, 1), (2, 0), (1, 2)):
            x[a] *= np.sin(x[b])
            total += (x[a] ** 2).sum()
        return total

    start, direction, step = x.copy(), rng.normal(size=x.shape), 1e-5
    units = 1e-30j * np.eye(24).reshape(24, 3, 8)
    slopes = [np.array([value(start + t * direction + u).imag for u in units]) for t in (step, -step, 0.0)]
    expected = (slopes[0] - slopes[1]).reshape(x.shape) / (2 * step * 1e-30)
    found = hvp(run, x, direction, energy)
    assert_allclose(found, expected, rtol=0, atol=1e-7 * np.abs(expected).max())
    x[:] = start
    assert_allclose(value_and_gradient(run, x, energy)[1], slopes[2].reshape(x.shape) * 1e30, rtol=1e-12)


@pytest.mark.parametrize("first", [slice(2, 6), slice(0, 4)])
def test_views_before_a_larger_part_of_their_memory(first):
    """Tangents of a view move where a kernel takes a larger part of the array, also within repeated launches."""
    x, energy, a = scalars([0.3, -0.7, 1.1, 0.6]), scalars(0.0), np.zeros(8)
    put = kernel_of("for i in x: part[i] += x[i] ** 2", "part: A", x=x)
    total = kernel_of("for i in whole: energy[None] += whole[i] ** 2 * (i + 1)", "whole: A", energy=energy)

    def run():
        a[:] = 0.0
        energy[None] = 0.0
        for _ in range(2):
            put(a[first])
            total(a)

    x0, weights, v = read(x), np.arange(1.0, 9)[first], np.array([1.0, 2, -1, 0.5])
    expected = 5 * 12 * weights * x0**2 * v  # of x^4 and (2 x^2)^2, each times its weight
    for _ in range(2):
        assert_allclose(hvp(run, x, v, energy), expected, rtol=1e-12)


def test_kernels_whose_terms_depend_on_many_parameters():
    """Rows of all parameters would not fit: forward over reverse, with the derivatives of stopped and replaced values."""
    rng = np.random.default_rng(5)
    x, energy = scalars(rng.uniform(0.3, 1, 600)), scalars(0.0)

    @ti.kernel
    def of_a_sum():
        energy[None] = 0.0
        for k in range(3):
            total = 0.0
            for i in range(600):
                total += x[i] ** 2 * ti.cos(float(k + i)) + replace_gradient(0.0, x[i] ** 3) * stop_gradient(x[i])
            energy[None] += total**2 + ti.sqrt(total * total) * x[k]

    vectors_ = rng.normal(size=(2, 600))
    found = hvp(of_a_sum, x, vectors_, energy)
    assert_allclose(found, vectors_ @ hessian(of_a_sum, x, energy), rtol=1e-10, atol=1e-10)


def test_where_partials_are_infinite():
    """A root of 0 whose adjoint is 0 there, and moves."""
    x, y, energy = scalars([0.0, 0.7, 0.0, 0.4]), outputs(4), scalars(0.0)
    roots = kernel_of("for i in x: y[i] = ti.sqrt(x[i]) * x[(i + 1) % 4]", x=x, y=y)
    total = kernel_of("for i in y: energy[None] += y[i] * x[(i + 3) % 4] * 0.0 + x[i] ** 2", y=y, energy=energy, x=x)

    def run():
        energy[None] = 0.0
        roots()
        total()

    found = hvp(run, x, np.ones(4), energy)
    assert_allclose(found, [2.0, 2.0, 2.0, 2.0])


def test_second_derivatives_that_are_not_known():
    x, y, r, energy = scalars([0.4, 0.7]), outputs(2), outputs(2), scalars(0.0)
    square = func_of("square(a): return a * a")

    @te.boundary_gradient(square, name="half")
    def _(d_a):
        return 0.5 * d_a

    solve = kernel_of("for i in x: y[i] = ti.sqrt(x[i])", x=x, y=y)
    residual = kernel_of("for i in x: r[i] = y[i] ** 2 - x[i]", x=x, r=r, y=y)
    ruled = kernel_of("for i in x: energy[None] += square(y[i])", x=x, energy=energy, square=square, y=y)
    plain = kernel_of("for i in x: energy[None] += y[i] ** 2", x=x, energy=energy, y=y)
    root = te.custom_root(lambda: solve(), lambda: residual(), y, r)
    with_a_rule = lambda: (solve(), ruled())
    implicit = lambda: (root(), plain())
    for run, match in ((with_a_rule, "a function with a rule"), (implicit, "<lambda>, the root of an equation")):
        with pytest.raises(te.UnsupportedError, match=rf"(?is)second derivative.*{match}"):
            hvp(run, x, np.ones(2), energy)
        assert read(energy) == 0


@pytest.mark.sweep
def test_bad_input():
    x, y, energy = scalars([0.4, 0.7]), outputs(2), scalars(0.0)
    run = kernel_of("for i in range(2): energy[None] += x[i] ** 2; y[i] = x[i]", energy=energy, x=x, y=y)
    with pytest.raises(InvalidArgumentError, match=r"vectors has shape \(3,\); expected \(2,\), or \(n, 2\)"):
        hvp(run, x, np.ones(3), energy)
    with pytest.raises(InvalidArgumentError, match="vectors has another structure than params"):
        hvp(run, [x], {"x": np.ones(2)}, energy)
    with pytest.raises(InvalidArgumentError, match="its leading axis is empty"):
        hvp(run, x, np.ones((0, 2)), energy)
    with pytest.raises(InvalidArgumentError, match="one number"):
        hvp(run, x, np.ones(2), y)
    assert read(energy) == 0
