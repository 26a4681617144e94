"""Hessians: closed forms, and central differences of gradients in float64; ``check_hessian``."""

from types import SimpleNamespace

import numpy as np
import pytest
import taichi as ti
from differences import outputs, read, scalars, vectors, write
from energies import as_matrix, energy_of_every_kind_of_parameter, require_right, sparse_matrix
from kernel_texts import func_of, kernel_of
from numpy.testing import assert_allclose, assert_array_equal

import taichi_ext as te
from taichi_ext import CheckError, InvalidArgumentError, UnsupportedError, check_hessian, hessian, hvp
from taichi_ext.api.runs.subject import EnergyGradient

pytestmark = pytest.mark.usefixtures("ti64")


def test_parameters_that_the_kernel_overwrites():
    x, e = scalars([0.5, 1.5, -2.0]), outputs()
    start = read(x)

    @ti.kernel
    def k():
        for i in x:
            x[i] = x[i] ** 2
        for i in x:
            e[None] += x[i] ** 3

    np.testing.assert_allclose(hessian(k, x, e), np.diag(30 * start**4))


def test_states_of_rest_where_first_derivatives_are_zero():
    """The derivative of a product with a factor that is zero here is that of the factor."""
    x, energy = scalars([0.3, 0.7, 1.1]), scalars(0.0)

    @ti.kernel
    def run():
        for _ in range(1):
            a = (x[0] - 0.3) * (x[1] - 0.7)
            energy[None] += ti.log(1 + a) + (1 + a) ** 1.5 + ti.sqrt(1 + a) + ti.rsqrt(1 + a) + ti.acos(0.5 + a)
            energy[None] += ti.max(a * a + a, -1.0) + ti.atan2(a, 1.0 + a) + (1.0 + a * x[2]) ** (a + x[2])
            d = ti.Vector([x[0] - 0.3, x[1] + 0.3, x[2] - 1.1])
            energy[None] += (d.norm() - 0.5) ** 2 + ti.select(a > -1, a, 0.0) + abs(1 + a)

    require_right(run, [x], energy)


@pytest.mark.sweep
def test_infinite_second_derivatives_are_not_zero():
    x, energy = scalars([0.0, 0.0, 0.0, 2.0]), scalars(0.0)
    exponent = scalars([0.0])

    @ti.kernel
    def run():
        for _ in range(1):
            energy[None] += ti.sqrt(x[0] ** 2 + x[1] ** 2)  # a cone
            energy[None] += ti.sqrt(ti.abs(x[2]) ** 3)
            energy[None] += x[3] ** exponent[0] + 0.0 * ti.sqrt(x[2] * 0.0)

    H = as_matrix(hessian(run, [x, exponent], energy))
    assert not np.isfinite(H[0, 0]) and not np.isfinite(H[1, 1]) and not np.isfinite(H[2, 2])
    assert_allclose(H[3:, 3:], [[0.0, 0.5], [0.5, np.log(2.0) ** 2]], rtol=1e-14)
    found = sparse_matrix(run, [x, exponent], energy)
    assert_array_equal(np.isfinite(np.diagonal(found)), np.isfinite(np.diagonal(H)))
    assert_allclose(found[3:, 3:], H[3:, 3:], rtol=1e-14)


def test_squares_of_norms_have_finite_second_derivatives_at_zero():
    x, energy, factor = vectors([[0.3, 0.7], [0.3, 0.7]]), scalars(0.0), scalars([0.4])

    @ti.kernel
    def squares():
        for _ in range(1):
            d = x[0] - x[1]
            energy[None] += d.norm() ** 2 + ti.sqrt(factor[0]) ** 2.0 + d.norm() ** 4 + d.norm() ** 6.0

    @ti.kernel
    def by_way_of_a_local():
        for _ in range(1):
            d = x[0] - x[1]
            length = d.norm()
            energy[None] += 0.5 * length**2 + 0.5 * factor[0] * length**2
            length = factor[0]

    two = 2 * np.kron([[1.0, -1.0], [-1.0, 1.0]], np.eye(2))
    for kernel, scale in ((squares, 1.0), (by_way_of_a_local, 0.7)):
        write(energy, 0.0)
        H = as_matrix(hessian(kernel, [x, factor], energy))
        assert_allclose(H, scale * np.pad(two, (0, 1)), rtol=1e-14, atol=1e-14)
        assert_allclose(sparse_matrix(kernel, [x, factor], energy), H, rtol=1e-14, atol=1e-14)
    write(x, [[0.3, 0.7], [0.5, -0.2]])
    for kernel in (squares, by_way_of_a_local):
        require_right(kernel, [x, factor], energy)


@pytest.mark.sweep
def test_products_of_norms_have_finite_second_derivatives_at_zero():
    x, energy, c = vectors([[0.3, 0.7], [0.3, 0.7]]), scalars(0.0), scalars([0.4, 0.8])

    @ti.kernel
    def friction():
        for _ in range(1):
            d = x[0] - x[1]
            n = d.norm()
            if n < c[1]:
                energy[None] += -n * n * n / (3 * c[1] * c[1]) + n * n / c[1]
            else:
                energy[None] += n

    @ti.kernel
    def factors():
        for _ in range(1):
            d = x[0] - x[1]
            n = d.norm()
            along = n * d
            energy[None] += c[0] * n * n + d.norm() * d.norm() + n * (n / c[1]) + along.dot(along) + n**2.5

    square = np.kron([[1.0, -1.0], [-1.0, 1.0]], np.eye(2))
    for kernel, scale in ((friction, 2 / 0.8), (factors, 2 * 0.4 + 2 + 2 / 0.8)):
        write(x, [[0.3, 0.7], [0.3, 0.7]])
        write(energy, 0.0)
        H = hessian(kernel, x, energy).reshape(4, 4)
        assert_allclose(H, scale * square, rtol=1e-14, atol=1e-14)
        assert_allclose(sparse_matrix(kernel, [x], energy), H, rtol=1e-14, atol=1e-14)
        write(x, [[0.3, 0.7], [0.5, -0.2]])
        require_right(kernel, [x, c], energy)


def test_powers_of_roots_whose_radicands_change_before_the_use():
    x, energy = scalars([0.7, 0.4, 1.3]), scalars(0.0)

    @ti.kernel
    def run():
        for _ in range(1):
            v = x[0]
            for j in range(3):
                root = ti.sqrt(v * v + x[1])
                norm = ti.sqrt(v * v)
                v = v * x[2] + x[1]
                energy[None] += root**4 + norm**2 * ti.sqrt(v * v)

    require_right(run, [x], energy)


def test_prepared_form():
    x, energy = scalars([1.0, 2.0]), scalars(0.0)
    run = kernel_of("run: energy[None] = x[0] ** 2 * x[1]", energy=energy, x=x)
    plan = te.Hessian(run, x, energy)
    assert_allclose(plan(), [[4.0, 2.0], [2.0, 0.0]])
    write(x, [2.0, 3.0])
    out = np.empty((2, 2))
    value, gradient, H = plan.value_gradient_and_hessian(out=out)
    assert H is out
    assert_allclose(H, [[6.0, 4.0], [4.0, 0.0]])
    assert_allclose(gradient, [12.0, 4.0])
    assert value == plan.value() == 12.0
    assert "def run" in plan.source and "columns: 2" in plan.explain()


def test_energies_without_second_derivatives():
    x, energy = scalars([1.0, 2.0]), scalars(0.0)
    linear = kernel_of("for i in x: energy[None] += 3.0 * x[i]", x=x, energy=energy)
    constant = kernel_of("energy[None] = 3.0; x[0] = x[0]", energy=energy, x=x)
    assert_array_equal(hessian(linear, x, energy), np.zeros((2, 2)))
    with pytest.warns(te.DerivativeWarning, match="its Hessian is zero"):
        assert_array_equal(hessian(constant, x, energy), np.zeros((2, 2)))


@pytest.fixture
def program():
    """Fields, and a kernel that fills them."""
    x, energy, other, count = scalars([1.0, 2.0]), scalars(0.0), outputs(3), ti.field(ti.i32, ())
    text = "for i in x: energy[None] += x[i] ** 2; other[i] = x[i]; count[None] += 1"
    run = kernel_of(text, x=x, energy=energy, other=other, count=count)
    return SimpleNamespace(run=run, x=x, energy=energy, other=other, count=count)


def test_energies_that_are_none(program):
    p = program
    cases = (
        (p.x, [p.energy, p.other], "energy names 2 fields"),
        (p.x, p.other, r"has shape \(3,\)"),
        (p.x, p.count, "only fields of real numbers"),
        (p.x, 3.0, "expected a ti.field"),
        (p.x, None, "returns nothing"),
        ([p.x, p.energy], p.energy, "an energy and a parameter"),
    )
    for params, energy, message in cases:
        with pytest.raises(te.InvalidArgumentError, match=message):
            hessian(p.run, params, energy)
    with pytest.raises(te.InvalidArgumentError, match=r"out has shape \(2, 3\)"):
        hessian(p.run, p.x, p.energy, out=np.empty((2, 3)))
    assert read(p.energy) == 0


def test_rules_and_edges_have_no_second_derivative(program):
    x, energy = program.x, program.energy
    bump = func_of("bump(a): return ti.sin(a)")

    @te.boundary_gradient(bump, name="bump of energies")
    def _(a, d_a):
        return ti.cos(a) * d_a

    with_rule = kernel_of("energy[None] = bump(x[0])", energy=energy, bump=bump, x=x)
    with_edge = kernel_of(
        "for i, j in ti.ndrange(2, 2): energy[None] += edge(i + j - x[0], 1.0, 0.0)", energy=energy, x=x
    )
    for kernel, name in ((with_rule, "a function with a rule"), (with_edge, "edge")):
        with pytest.raises(UnsupportedError, match=f"The second derivative of {name}"):
            hessian(kernel, x, energy)
        with pytest.raises(UnsupportedError, match=f"The second derivative of {name}"):
            hessian(kernel, x, energy, format="csr")
        with pytest.raises(UnsupportedError, match=f"The second derivative of {name}"):
            hvp(kernel, x, np.ones(2), energy)


@pytest.mark.parametrize("format", [None, "csr"])
def test_entries_of_params_that_python_stores(format):
    x, energy = scalars([0.3, 0.5, 0.8, 1.0]), outputs()
    add = kernel_of("for i in x: energy[None] += x[i] ** 3 * x[(i + 1) % 4]", x=x, energy=energy)

    def run():
        x[1] = 2.0  # a constant from here on
        add()

    a, _, c, d = read(x)
    expected = np.zeros((4, 4))
    expected[0, 0], expected[2, 2], expected[3, 3] = 6 * a * 2, 6 * c * d, 6 * d * a
    expected[2, 3] = expected[3, 2] = 3 * c**2
    expected[3, 0] = expected[0, 3] = 3 * d**2
    H = hessian(run, x, energy, format=format)
    assert_allclose(H.toarray() if format else H, expected, rtol=1e-13)


@pytest.mark.filterwarnings("ignore:.*changed from Python:taichi_ext.DerivativeWarning")
def test_entries_of_arrays_that_python_stores():
    """One of two arrays that the energy is computed from."""
    energy, x, u, w = outputs(), np.array([0.3, 0.5, 0.8]), np.zeros(3), np.zeros(3)
    array = ti.types.ndarray(ti.f64, ndim=1)
    powers = kernel_of("for i in x: u[i] = x[i] ** 2; w[i] = x[i] ** 3", "x: array, u: array, w: array", array=array)
    add = kernel_of("for i in u: energy[None] += u[i] * w[i]", "u: array, w: array", array=array, energy=energy)

    def run(x):
        powers(x, u, w)
        u[1] = 2.0
        add(u, w)

    expected = [20 * 0.3**3, 2 * 6 * 0.5, 20 * 0.8**3]
    assert_allclose(hessian(run, "x", energy, args=(x,)), np.diag(expected), rtol=1e-13)


@pytest.fixture
def springs():
    """An energy of two params, which it changes."""
    x, a, energy = vectors([[0.1, 0.4], [0.9, 0.2], [1.3, 1.1]]), scalars([0.6, 1.4]), scalars(0.5)

    @ti.kernel
    def run():
        for i in range(2):
            energy[None] += a[i] * ((x[i + 1] - x[i]).norm() - 0.3) ** 2
        for i in x:
            x[i] *= 1.5

    return run, [x, a], energy


@pytest.mark.mostly_sweep("csr")
@pytest.mark.parametrize("format", [None, "csr"])
def test_agrees(springs, format):
    run, params, energy = springs
    before = [read(f) for f in (*params, energy)]
    report = check_hessian(run, params, energy, format=format)
    assert report and sum(block.compared for block in report.blocks) == 64, report
    assert [block.output[:13] for block in report.blocks] == ["gradient with"] * 4
    assert str(report).startswith("H of run agrees")
    for field, values in zip((*params, energy), before, strict=True):
        assert_array_equal(read(field), values)


@pytest.mark.sweep
def test_every_kind_of_parameter():
    run, x, v, array = energy_of_every_kind_of_parameter()
    report = check_hessian(run, {"x": x, "v": v, "a": array, "w": "w"}, args=(array, 0.7))
    assert report and len(report.blocks) == 16, report


def test_finds_wrong_entries(springs, monkeypatch):
    run, params, energy = springs
    blocks = EnergyGradient.of_dense
    monkeypatch.setattr(EnergyGradient, "of_dense", lambda *args: wrong(blocks(*args)))
    report = check_hessian(run, params, energy)
    assert [block.failed for block in report.blocks] == [1, 0, 0, 0]
    assert report.blocks[0].worst.output == (1, 1) and report.blocks[0].worst.param == (2, 0)
    with pytest.raises(CheckError, match="H of run DISAGREES"):
        check_hessian(run, params, energy, raise_on_failure=True)


def wrong(blocks):
    blocks[0][0][1, 1, 2, 0] += 0.01
    return blocks


@pytest.mark.sweep
def test_not_finite_and_bad_input():
    x, energy = scalars([0.0, 1.0]), scalars(0.0)
    run = kernel_of("for i in x: energy[None] += ti.sqrt(x[i] ** 3)", x=x, energy=energy)
    report = check_hessian(run, x, energy)
    assert not report and "at [0], [0]" in str(report)
    with pytest.raises(InvalidArgumentError, match="step is -1"):
        check_hessian(run, x, energy, step=-1)
    assert np.isfinite(read(x)).all()
