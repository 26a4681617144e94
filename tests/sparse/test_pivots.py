"""Hessians of energies whose columns pass through few numbers: pivots, against products of matrices and closed forms."""

import numpy as np
import pytest
import taichi as ti
from differences import scalars, vectors, write
from numpy.testing import assert_allclose

from taichi_ext import Hessian, hessian
from taichi_ext.analysis.affine import Affine
from taichi_ext.differentiate.forms.forms import Pivot, Seed
from taichi_ext.differentiate.storage.storages import pivots_of, without_pivots
from taichi_ext.program import F64, Local
from taichi_ext.program.build import Builder

pytestmark = pytest.mark.usefixtures("ti64")


@pytest.mark.parametrize("seed", range(12))
def test_elimination_is_the_product_of_all_paths(seed):
    """Forms of numbers, so nothing is emitted: rows = R (I - L)^-1 C for edges L between pivots."""
    rng = np.random.default_rng(seed)
    pivots, columns, rows = rng.integers(1, 12), rng.integers(1, 6), rng.integers(1, 5)
    between = np.tril(rng.integers(-3, 4, (pivots, pivots)), -1) * rng.integers(0, 2, (pivots, pivots))
    to_columns, of_rows = rng.integers(-2, 3, (pivots, columns)), rng.integers(-2, 3, (rows, pivots + columns))
    names = [Pivot(Local(f"v{n}", F64)) for n in range(pivots)]
    seeds = [Seed(Affine((), n)) for n in range(columns)]
    form = lambda numbers, leaves: {leaf: int(c) for leaf, c in zip(leaves, numbers, strict=True) if c}
    known = {p: form([*between[n], *to_columns[n]], [*names, *seeds]) for n, p in enumerate(names)}
    forms = [form(numbers, [*names, *seeds]) for numbers in of_rows]
    builder = Builder()
    found = without_pivots(builder, pivots_of(forms, known), forms)
    whole = np.linalg.solve(np.eye(pivots) - between, to_columns)
    expected = of_rows[:, :pivots] @ whole + of_rows[:, pivots:]
    assert not builder.body
    assert_allclose([[row.get(s, 0) for s in seeds] for row in found], expected, atol=1e-9)


def element(n, F):
    """Positions of a simplex whose deformation is F, its rest shape, and F as a linear function of the positions."""
    rng = np.random.default_rng(n)
    rest = np.linalg.inv(np.eye(n) + 0.3 * rng.standard_normal((n, n)))
    corners = np.concatenate([np.zeros((1, n)), (F @ np.linalg.inv(rest)).T]) + rng.standard_normal(n)
    weights = np.concatenate(
        [-rest.sum(0)[None], rest]
    )  # F[i, j] = sum over corners of x[corner, i] * weights[corner, j]
    return corners, rest, np.einsum("cj,ik->ijck", weights, np.eye(n)).reshape(n * n, -1)


def arap(F):
    """The second derivative of |F - R|^2 by F, from the polar decomposition: dR = U (W - W^T) / (s_i + s_j) V^T."""
    n = len(F)
    u, s, vt = np.linalg.svd(F)
    if np.linalg.det(u @ vt) < 0:
        u[:, -1], s[-1] = -u[:, -1], -s[-1]
    result = np.zeros((n * n, n * n))
    for k in range(n * n):
        step = np.zeros(n * n)
        step[k] = 1.0
        w = u.T @ step.reshape(n, n) @ vt.T
        turn = np.array([[0.0 if i == j else (w - w.T)[i, j] / (s[i] + s[j]) for j in range(n)] for i in range(n)])
        result[k] = 2.0 * (step - (u @ turn @ vt).reshape(-1))
    return result


def stvk(F):
    """The second derivative of |E|^2 + tr(E)^2 / 2 with E = (F^T F - I) / 2."""
    n = len(F)
    E, result = (F.T @ F - np.eye(n)) / 2, np.zeros((n * n, n * n))
    for k in range(n * n):
        step = np.zeros(n * n)
        step[k] = 1.0
        D = step.reshape(n, n)
        dE = (D.T @ F + F.T @ D) / 2
        change = D @ (2 * E + np.trace(E) * np.eye(n)) + F @ (2 * dE + np.trace(dE) * np.eye(n))
        result[k] = change.reshape(-1)
    return result


def rotation(n):
    q = np.linalg.qr(np.random.default_rng(5).standard_normal((n, n)))[0]
    q[:, 0] *= np.linalg.det(q)
    return q


def deformations(n):
    turned, values = rotation(n), np.array([1.4, 1.1, 0.8][:n])
    return {
        "general": turned @ np.diag(values) @ rotation(n).T + 0.1 * np.eye(n),
        "at_rest": np.eye(n),
        "turned": turned,
        "near_a_tie": turned @ np.diag([1.2, 1.2 + 1e-9, 0.9][:n]),
        "rank_one": np.outer(turned[0], turned[1]),
    }


CASES = [
    (n, "stvk" if where == "rank_one" else "arap", where)
    for n in (2, 3)
    for where in ("general", "at_rest", "turned", "near_a_tie", "rank_one")
]


@pytest.mark.parametrize(("n", "name", "where"), CASES)
@pytest.mark.mostly_sweep("2-arap-general")
def test_elements(n, name, where):
    F = deformations(n)[where]
    corners, rest, B = element(n, F)
    x, energy, shape = vectors(corners), scalars(0.0), ti.Matrix(rest)

    @ti.func
    def deformation():
        Ds = ti.Matrix.zero(ti.f64, n, n)
        for i, j in ti.static(ti.ndrange(n, n)):
            Ds[i, j] = x[j + 1][i] - x[0][i]
        return Ds @ shape

    @ti.kernel
    def of_rotation():
        for _ in range(1):
            F = deformation()
            U, S, V = ti.svd(F)
            energy[None] += (F - U @ V.transpose()).norm_sqr()

    @ti.kernel
    def of_strain():
        for _ in range(1):
            F = deformation()
            E = 0.5 * (F.transpose() @ F - ti.Matrix.identity(ti.f64, n))
            energy[None] += E.norm_sqr() + 0.5 * E.trace() ** 2

    kernel, by_hand = (of_rotation, arap) if name == "arap" else (of_strain, stvk)
    expected = B.T @ by_hand(F) @ B
    scale = np.abs(expected).max()
    assert_allclose(hessian(kernel, x, energy, format="csr").toarray(), expected, atol=3e-7 * scale)
    values, bases = np.linalg.eigh(expected)
    clamped = bases @ np.diag(np.maximum(values, 0.0)) @ bases.T  # of the block of the element, not of that of F
    found = hessian(kernel, x, energy, format="csr", project="clamp").toarray()
    assert_allclose(found, clamped, atol=3e-7 * scale)


def test_columns_that_pass_through_few_numbers_take_fewer_products():
    """40 operations on 2 numbers of 12 columns: with a product for each column, these are 900 and more."""
    x, energy = scalars(np.linspace(0.1, 0.9, 12)), scalars(0.0)

    @ti.kernel
    def chain():
        for _ in range(1):
            a, b = 0.0, 0.0
            for k in ti.static(range(6)):
                a, b = a + x[k] * x[k + 6], b + x[k + 6] * (k + 1)
            for _k in ti.static(range(10)):
                c = ti.sin(a * b) + a
                d = ti.cos(a + b) * b
                a, b = c, d
            energy[None] += a * b

    plan = Hessian(chain, x, energy, format="csr")
    H = plan().toarray()
    assert_allclose(H, hessian(chain, x, energy), rtol=1e-11, atol=1e-11 * np.abs(H).max())
    assert plan.source.count("*") < 700


def test_values_that_are_not_chosen_do_not_enter():
    """At 0, tangents that a condition leaves out are infinite or NaN: 0 times them must not be added."""
    x, energy = vectors(np.zeros((2, 3))), scalars(0.0)

    @ti.kernel
    def guarded():
        for _ in range(1):
            d = x[1] - x[0]
            q = d[0] * d[0] + d[1]
            over, root = 1.0 / q, ti.sqrt(q)
            s, t = over * over + d[2] * over, root * root * root + d[2] * root
            chosen = ti.select(q > 0.5, s * over + s, 0.0)
            if q > 0.5:
                chosen += t * root + t
            energy[None] += chosen * chosen + chosen * d[1] + d.norm_sqr()

    found = hessian(guarded, x, energy, format="csr").toarray()
    assert_allclose(found, np.kron([[2.0, -2.0], [-2.0, 2.0]], np.eye(3)))


def test_locals_that_several_terms_and_inner_loops_use():
    x, energy = vectors(np.random.default_rng(3).uniform(0.5, 1.0, (4, 2))), scalars(0.0)

    @ti.kernel
    def terms():
        for i in range(3):
            d = x[i + 1] - x[i]
            area = d[0] * x[i][1] - d[1] * x[i][0]
            bent = area * area + d[0]
            if bent > 0.3:
                energy[None] += bent * area
            energy[None] += ti.sin(bent) * d[1]
            for k in range(3):
                part = bent * (k + 1) + area
                energy[None] += part * part * d[0]

    write(energy, 0.0)
    found = hessian(terms, x, energy, format="csr").toarray()
    assert_allclose(found, hessian(terms, x, energy).reshape(8, 8), rtol=1e-12, atol=1e-12)


def test_locals_with_the_same_tangent_keep_forms_together():
    """Each two rounds of the analysis found one more of them, so that it did not end with 60."""
    x, energy = scalars([0.4, 0.7]), scalars(0.0)

    @ti.kernel
    def shifted():
        for _ in range(1):
            a = x[0] * x[1]
            for k in ti.static(range(60)):
                b = a + 0.1 * k
                energy[None] += ti.sin(b) * b
                a = b

    b = 0.28 + np.cumsum(0.1 * np.arange(60))
    slope, bend = np.sum(np.sin(b) + b * np.cos(b)), np.sum(2 * np.cos(b) - b * np.sin(b))
    expected = bend * np.outer([0.7, 0.4], [0.7, 0.4]) + slope * (1 - np.eye(2))
    assert_allclose(hessian(shifted, x, energy, format="csr").toarray(), expected, rtol=1e-11)
