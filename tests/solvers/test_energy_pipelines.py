"""Hessians of energies that several kernels add to: beside differences of gradients."""

import math

import numpy as np
import pytest
import taichi as ti
from differences import outputs, read, scalars, vector_outputs, vectors
from energies import require_right
from kernel_texts import kernel_of, kernels_of
from numpy.testing import assert_allclose

from taichi_ext import Hessian, UnsupportedError, hessian, hvp, value_and_gradient, value_gradient_and_hessian

pytestmark = pytest.mark.usefixtures("ti64")


CHAIN = """
    springs: for i in range(3): energy[None] += a[0] * ((x[i + 1] - x[i]).norm() - 0.3) ** 2
    weight: for i in x: energy[None] += a[1] * x[i][1] * ti.exp(x[i][0])
    middle: for i in x: u[i] = ti.sin(x[i]) * a[2]
    penalty: for i in u: energy[None] += u[i].dot(u[i]) ** 2
    square: energy[None] = energy[None] * energy[None]
    advance: for i in x: x[i] += 0.1 * u[i] * a[1]
"""


class Chain:
    """Kernels that add to an energy, and one that computes ``u``, one that changes the params."""

    def __init__(self):
        rng = np.random.default_rng(19)
        self.x, self.a = vectors(rng.normal(size=(4, 2))), scalars([1.3, 0.7, 0.4])
        self.energy, self.u = scalars(0.0), vector_outputs(2, 4)
        self.start = read(self.x)
        x, a, energy, u = self.x, self.a, self.energy, self.u
        vars(self).update(kernels_of(CHAIN, x=x, a=a, energy=energy, u=u))

    def sums(self):
        self.energy[None] = 0.0
        self.springs()
        self.weight()

    def sums_that_begin_again(self):
        self.springs()
        self.energy.fill(0.0)
        self.weight()
        self.springs()
        self.energy[None] = 0.0
        self.weight()
        self.springs()

    def through_u(self):
        self.springs()
        self.u.fill(0.3)
        self.middle()
        self.penalty()

    def intermediates(self):
        self.through_u()
        self.square()

    def steps(self):
        for _ in range(3):
            self.middle()
            self.advance()
            self.springs()
        self.x[2] = [0.3, 0.4]
        self.weight()

    def of_changed_params(self):
        self.springs()
        self.x[1] = [0.5, 0.1]
        self.u.fill(0.2)
        self.middle()
        self.u[0] = [0.1, 0.3]
        self.penalty()
        self.springs()


@pytest.mark.mostly_sweep("intermediates")
@pytest.mark.parametrize("name", ["sums", "sums_that_begin_again", "intermediates", "steps", "of_changed_params"])
def test_right(name):
    chain = Chain()
    require_right(getattr(chain, name), [chain.x, chain.a], chain.energy)


Numbers = ti.types.ndarray(ti.f64, ndim=1)


@ti.kernel
def middle(a: Numbers, u: Numbers):
    for i in range(4):
        u[i] = ti.sin(a[i]) * a[(i + 1) % 4]


@ti.kernel
def cubes(u: Numbers, e: Numbers):
    for i in range(u.shape[0]):
        e[0] += u[i] ** 3 * u[(i + 1) % u.shape[0]]


def intermediates(a, u, e):
    e[0] = 0.0
    middle(a, u)
    cubes(u, e)
    cubes(a, e)


def parts(a, u, e):
    cubes(a, e)
    cubes(a[1:3], e)


READ = """
    middle: for i in x: y[i] = x[i] ** 2 * w[0][i % 2] + ti.sin(x[(i + 1) % 4])
    mean() -> ti.f64:
        total = 0.0
        for i in y:
            total += y[i] ** 2 / 4
        return total
    weighted(weight: ti.f64): for i in x: energy[None] += weight * x[i] ** 3 * y[i]
"""


class Read:
    """Pipelines whose Python computes with numbers that depend on the params."""

    def __init__(self):
        self.x, self.w, self.y = scalars([0.7, 1.1, 0.4, 0.9]), vectors([[0.6, 1.3]]), outputs(4)
        self.energy = scalars(0.0)
        x, w, y, energy = self.x, self.w, self.y, self.energy
        vars(self).update(kernels_of(READ, x=x, w=w, y=y, energy=energy))

    def passed(self):
        self.middle()
        self.weighted(math.exp(-self.y[0]) * self.mean())

    def stored(self):
        self.middle()
        self.y[1] = self.y[0] * self.y[3]
        self.weighted(0.5)

    def energy_in_python(self):
        self.middle()
        self.energy[None] = self.y[0] ** 2 * self.y[1] + self.mean()

    def energy_again(self):
        self.middle()
        self.weighted(0.5)
        self.energy[None] = math.sqrt(self.energy[None])


@pytest.mark.mostly_sweep("energy_in_python")
@pytest.mark.parametrize("name", ["passed", "stored", "energy_in_python", "energy_again"])
def test_numbers_in_python(name):
    read = Read()
    require_right(getattr(read, name), [read.x, read.w], read.energy)


def test_numbers_in_python_without_an_adjoint():
    read = Read()

    def run():  # the way back cannot use a field that is gone
        field, builder = ti.field(ti.f64), ti.FieldsBuilder()
        builder.dense(ti.i, 4).place(field)
        tree = builder.finalize()
        field.fill(1.0)
        read.passed()
        tree.destroy()

    with pytest.raises(UnsupportedError, match=r"has no adjoint, which a Hessian, as numbers .* pass through Python"):
        hessian(run, read.x, read.energy)
    with pytest.raises(UnsupportedError, match="Python passes a number that depends on params to a kernel"):
        hvp(run, read.x, np.ones(4), read.energy)


CLEARED = """
    middle: for i in x: u[i] = x[i] ** 2 * x[(i + 1) % 4]
    sines: for i in x: v[i] = ti.sin(x[i])
    clear: energy[None] = 0.0
    direct: for i in x: energy[None] += x[i] ** 2 * x[(i + 1) % 4]
    of_u: for i in u: energy[None] += u[i] ** 2
    of_u_alone:
        energy[None] = 0.0
        for i in u:
            energy[None] += u[i] ** 2
    of_v: for i in v: energy[None] += v[i] ** 3
    both:
        for i in x:
            energy[None] += x[i] ** 3
        for i in x:
            u[i] = x[i] ** 2 * x[(i + 1) % 4]
        energy[None] = 0.0
        for i in u:
            energy[None] += u[i] ** 2
"""


class Cleared:
    """Energies that kernels and Python set to zero, before and after terms of ``u`` and ``v`` are computed."""

    def __init__(self):
        self.x, self.u, self.v = scalars([0.7, 0.4, 0.9, 0.6]), outputs(4), outputs(4)
        self.energy = scalars(0.0)
        x, u, v, energy = self.x, self.u, self.v, self.energy
        self.kernels = kernels_of(CLEARED, x=x, u=u, v=v, energy=energy) | {"zero": self.zero}

    def zero(self):
        self.energy[None] = 0.0

    def pipeline(self, names):
        def run():
            for name in names.split():
                self.kernels[name]()

        return run


@pytest.mark.mostly_sweep("middle of_u_alone", "direct zero direct")
@pytest.mark.parametrize(
    "names",
    ["middle of_u_alone", "direct zero direct", "middle sines clear of_u of_v", "direct middle of_u_alone direct",
     "both clear sines of_v", "middle of_u zero of_u", "both zero of_u"],
)  # fmt: skip
def test_energies_that_are_set_to_zero(names):
    cleared = Cleared()
    run, x, energy = cleared.pipeline(names), cleared.x, cleared.energy
    require_right(run, [x], energy)
    value, gradient, H = value_gradient_and_hessian(run, x, energy, format="csr")
    expected = value_and_gradient(run, x, energy)
    assert value == expected[0]
    assert_allclose(gradient, expected[1], rtol=1e-12)


def test_refused():
    a, u, e = np.ones(4), np.zeros(4), np.zeros(1)
    for kernel, args in ((parts, (a, u, e)), (two_views, (a, a[1:], e))):
        with pytest.raises(UnsupportedError, match="share a part of their memory"):
            hessian(kernel, a, e, args=args)


@ti.kernel
def two_views(a: Numbers, b: Numbers, e: Numbers):
    for i in range(3):
        e[0] += a[i] ** 2 * b[i]


def test_a_field_that_is_computed_from_another_one_by_several_terms():
    """As pressures from densities, each a sum over neighbours; the entries are those of the dense Hessian."""
    x, d, f, e = scalars([0.3, 0.9, -0.4, 0.7]), outputs(4), outputs(4), outputs()
    densities = kernel_of("for i in range(4): d[i] = x[i] ** 2 + x[(i + 1) % 4]", d=d, x=x)

    @ti.kernel
    def forces():
        for i in f:
            total = 0.0
            for j in range(4):
                if i != j:
                    total += d[i] ** 2 * d[j] * (x[i] - x[j])
            f[i] = total

    sum_up = kernel_of("for i in f: e[None] += f[i] ** 2", f=f, e=e)

    def run():
        e[None] = 0.0
        densities()
        forces()
        sum_up()

    assert_allclose(hessian(run, x, e, format="csr").toarray(), hessian(run, x, e), rtol=1e-12)


@pytest.mark.cpu_only("adjoints")
@pytest.mark.mostly_sweep("8")
@pytest.mark.parametrize("count", [8, 32])
def test_a_kernel_that_would_take_long_to_compile(count):
    """All of H in one launch, or products with unit vectors."""
    x, energy = scalars(np.linspace(0.3, 0.9, count)), scalars(0.0)

    @ti.kernel
    def chain():
        v = 0.0
        for k in ti.static(range(count)):
            v = ti.sin(v + x[k] * x[(k + 5) % count])
        energy[None] += v

    plan = Hessian(chain, x, energy)
    H = plan()
    assert ("forward over reverse" in str(plan.explain())) == (count > 8)
    value = read(energy)
    assert_allclose(hvp(chain, x, np.eye(count), energy), H, rtol=1e-10, atol=1e-12)
    assert_allclose(read(energy), 2 * value)  # H and products have the effects of one run each
    assert_allclose(plan(), H, rtol=1e-10, atol=1e-12)
