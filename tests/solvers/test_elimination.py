"""Parts of normal equations that are eliminated, compared with the whole equations; covariances."""

import copy
import functools
import pickle

import numpy as np
import pytest
import taichi as ti
from differences import outputs, scalars, vectors
from kernel_texts import kernel_of
from numpy.testing import assert_allclose

from taichi_ext import InvalidArgumentError, least_squares
from taichi_ext.solvers import elimination
from taichi_ext.solvers.elimination import BlockLayout, BlockProducts, SparseJacobian, SparseSystem
from taichi_ext.solvers.parts import Part

sparse = pytest.importorskip("scipy.sparse")
pytestmark = [pytest.mark.usefixtures("ti64"), pytest.mark.double_only("compared with float64")]

CAMERAS, POINTS, SEEN = 4, 11, 35
RNG = np.random.default_rng(0)
CENTRES = RNG.uniform(-1, 1, (CAMERAS, 4)) + [0, 0, -6, 2]
PLACES = RNG.uniform(-1, 1, (POINTS, 3))
PAIRS = np.stack([np.arange(SEEN) % CAMERAS, (np.arange(SEEN) // 2) % (POINTS - 1)], axis=1)  # nobody sees the last one
Y = PLACES[PAIRS[:, 1]] - CENTRES[PAIRS[:, 0], :3]
IMAGES = CENTRES[PAIRS[:, 0], 3:] * Y[:, :2] / Y[:, 2:] + 0.05 * RNG.standard_normal((SEEN, 2))
START = PLACES + 0.2 * RNG.standard_normal(PLACES.shape)
WHOLE = {"format": "csr", "eliminate": []}
EXACT = {"ftol": 0.0, "xtol": 0.0, "gtol": 0.0}


class Scene:
    """Cameras (centre and focal length), points, and a weight for each observation, with a prior."""

    def __init__(self):
        self.cameras, self.points, self.weights = scalars(CENTRES), vectors(PLACES), scalars(np.ones(SEEN))
        self.errors, self.priors = vectors(np.zeros((SEEN, 2))), outputs(SEEN)
        pairs, images = ti.Vector.field(2, ti.i32, SEEN), vectors(IMAGES)
        pairs.from_numpy(PAIRS.astype(np.int32))
        cameras, points, weights, errors, priors = self.cameras, self.points, self.weights, self.errors, self.priors

        @ti.kernel
        def residuals():
            for k in errors:
                c = pairs[k][0]
                y = points[pairs[k][1]] - ti.Vector([cameras[c, 0], cameras[c, 1], cameras[c, 2]])
                errors[k] = weights[k] * (cameras[c, 3] * ti.Vector([y[0], y[1]]) / y[2] - images[k])
                priors[k] = 1.1 - weights[k] ** 2

        self.kernel = residuals
        self.params, self.residuals = [self.cameras, self.points, self.weights], [self.errors, self.priors]

    def solve(self, params=None, residuals=None, **options):
        for field, values in zip(self.params, (CENTRES, START, np.ones(SEEN)), strict=True):
            field.from_numpy(values)
        options = {"max_iterations": 11, **options}
        return least_squares(self.kernel, params or self.params, residuals or self.residuals, **options)


@pytest.fixture(scope="module")
def scene(ti64):
    return Scene()


def same_steps(found, wanted):
    """The same points, one after the other."""
    assert len(found.history) == len(wanted.history)
    for a, b in zip(found.history, wanted.history, strict=True):
        assert_allclose(a.x, b.x, rtol=1e-9, atol=1e-9)
        assert_allclose(a.cost, b.cost, rtol=1e-9)


@pytest.mark.sweep
@pytest.mark.parametrize("which", [["points"], ["weights"], ["weights", "points"], ["weights", "cameras"]])
def test_steps(scene, which):
    """A point that nobody sees stays; the weights couple a camera and a point each, so they go first."""
    wanted = scene.solve(**EXACT, **WHOLE)
    found = scene.solve(eliminate=[getattr(scene, name) for name in which], **EXACT)
    same_steps(found, wanted)
    assert sparse.issparse(found.jacobian)
    assert_allclose(found.jacobian.toarray(), wanted.jacobian.toarray(), atol=1e-9 * np.abs(wanted.jacobian).max())
    assert_allclose(found.split(found.x)[1][-1], START[-1])


def test_everything_is_eliminated(scene):
    """Points alone: fits that have nothing to do with each other."""
    wanted = scene.solve([scene.points], scene.errors, **WHOLE)
    same_steps(scene.solve([scene.points], scene.errors, eliminate=scene.points), wanted)


def test_covariance(scene):
    """Points that cameras have seen at known places."""
    params = [scene.points, scene.weights]
    bounds = ([-1.5, 0.0], [1.5, 3.0])
    options = {"bounds": bounds, "max_iterations": 3}
    wanted, found = scene.solve(params, **options, **WHOLE), scene.solve(params, eliminate=scene.weights, **options)
    with pytest.raises(InvalidArgumentError, match=r"do not determine entry \[10, 0\]"):
        found.covariance(scene.weights)
    assert_allclose(found.grad, wanted.grad, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(("density", "width"), [(0.1, 1), (1.0, 3)])
@pytest.mark.parametrize("factors", [None, np.linspace(0.5, 2.0, 40)], ids=["", "factors"])
def test_system(factors, density, width):
    """A system of J with random entries, in blocks of 3 if those are not mostly zero, 2 and 1, against its matrix."""
    rng = np.random.default_rng(0)
    rows, columns = np.arange(40), 9 + 2 * np.arange(5)
    dense = np.zeros((40, 9 + 10 + 4))
    dense[:, :9] = rng.standard_normal((40, 9)) * (rng.uniform(size=(40, 9)) < density)
    for k in range(2):
        dense[rows, columns[rows % 5] + k] = rng.standard_normal(40)
    dense[:, 19:] = rng.standard_normal((40, 4))
    parts = [
        (Part("a", (3, 3), np.dtype(float)), 3),
        (Part("b", (5, 2), np.dtype(float)), 1),
        (Part("c", (4,), np.dtype(float)), 1),
    ]
    layout = BlockLayout([(Part("r", (20, 2), np.dtype(float)), 2)], parts, [1])
    J = SparseJacobian([[sparse.csr_array(p) for p in np.split(dense, [9, 19], axis=1)]], layout)
    r, damping, fixed = rng.standard_normal(40), rng.uniform(0.1, 1.0, 23), rng.standard_normal(23)
    scaled = dense if factors is None else factors[:, None] * dense
    system, A = SparseSystem.of(J, r, factors), scaled.T @ scaled
    assert layout.widths == [width, 2, 1]
    assert_allclose(elimination.whole(J).toarray(), dense)
    assert_allclose(system.JtJ.toarray(), A, atol=1e-12)
    assert_allclose(system.gradient, scaled.T @ r, atol=1e-12)
    assert_allclose(system.diagonal, A.diagonal())
    assert_allclose(system.curvature(fixed), fixed @ A @ fixed)
    wanted = np.linalg.solve(A + np.diag(damping), -(scaled.T @ r + A @ fixed))
    assert_allclose(system.solve(damping, fixed), wanted, rtol=1e-9)
    damping[9] = -A[9, 9] - 1.0
    assert system.solve(damping, fixed) is None


@pytest.fixture
def compiled(monkeypatch):
    """The kernel adds up the terms of small products, too; returns the sizes of blocks that it was launched for."""
    monkeypatch.setattr(elimination, "_LEAST_WORK", 1)
    launches, kernel = [], elimination._kernel
    monkeypatch.setattr(elimination, "_kernel", lambda ti: lambda *args: launches.append(args[6:]) or kernel(ti)(*args))
    return launches


def random_blocks(rng, shape, size, density, order=1):
    """A BSR array with random blocks, in each row in ascending or descending order."""
    mask = rng.uniform(size=shape) < density
    columns = np.concatenate([np.flatnonzero(row)[::order] for row in mask])
    data = rng.standard_normal((len(columns), *size))
    pattern = columns.astype(np.int32), np.append(0, mask.sum(axis=1).cumsum()).astype(np.int32)
    return sparse.bsr_array((data, *pattern), shape=np.multiply(shape, size))


@pytest.mark.mostly_sweep("-1-2-3-6", "-1-1-2-1", "-1-3-11-32")
@pytest.mark.parametrize(("height", "left", "right"), [(2, 3, 6), (1, 2, 1), (3, 11, 32)])
@pytest.mark.parametrize("sign", [1, -1])
def test_products_of_blocks(compiled, height, left, right, sign):
    """Rows without blocks, blocks in any order, matrices that are added to, and other patterns under the same key."""
    products, random_ones = BlockProducts(is_compiled=True), functools.partial(random_blocks, np.random.default_rng(7))
    for density in (0.5, 0.2):
        A, B = random_ones((9, 4), (height, left), density), random_ones((9, 5), (height, right), density, -1)
        for before in (None, random_ones((4, 5), (left, right), 0.5, -1)):
            found = products.add("AB", before, A, B, sign)
            wanted = sign * A.toarray().T @ B.toarray() + (0 if before is None else before.toarray())
            assert_allclose(found.toarray(), wanted, atol=1e-12)
        S = random_ones((4, 4), (left, left), 0.5)
        S = S + S.T
        for before in (None, S):
            found = products.add("AA", before, A, A, sign).toarray()
            assert_allclose(
                found, sign * A.toarray().T @ A.toarray() + (0 if before is None else S.toarray()), atol=1e-12
            )
    assert len(compiled) == 8


def test_products_of_many_columns(compiled):
    """Pairs of 70,000 columns are more than 32 bits hold."""
    rng = np.random.default_rng(0)
    columns = np.array([0, 1, 46341, 65535, 65536, 69999], np.int32)
    data, rows = rng.standard_normal((6, 2, 2)), np.array([0, 3, 6], np.int32)
    A = sparse.bsr_array((data, columns, rows), shape=(4, 140000))
    found, wanted = BlockProducts(is_compiled=True).add("", None, A, A), A.T @ A
    assert len(compiled) == 1 and found.nnz == wanted.nnz == 18 * 4
    assert abs(found - wanted).max() < 1e-14


def test_products_by_scipy(compiled):
    """Blocks that are too wide, no blocks, and sums over shards."""
    rng = np.random.default_rng(0)
    for size, density in (((2, 33), 0.5), ((2, 3), 0.0)):
        A = random_blocks(rng, (9, 4), size, density)
        assert_allclose(BlockProducts(is_compiled=True).add("", None, A, A).toarray(), (A.T @ A).toarray(), atol=1e-12)
    A = random_blocks(rng, (9, 4), (2, 3), 0.5)
    BlockProducts(is_compiled=False).add("", None, A, A)
    assert not compiled


@pytest.fixture
def small(monkeypatch):
    """Params of few numbers are chosen, too."""
    monkeypatch.setattr(elimination, "_LEAST_BLOCKS", 2)
    monkeypatch.setattr(elimination, "_FEW", 8)


def test_a_pattern_that_changes(small):
    """A param that was chosen for the first J is not block diagonal in the next: it is eliminated no more."""
    rng = np.random.default_rng(0)
    parts = [(Part("a", (10,), np.dtype(float)), 1), (Part("b", (2,), np.dtype(float)), 1)]
    layout = BlockLayout([(Part("r", (20,), np.dtype(float)), 1)], parts, None)
    dense, damping = rng.standard_normal((20, 12)), np.full(12, 0.1)
    dense[:, :10] *= np.arange(20)[:, None] // 2 == np.arange(10)
    for change, eliminated in ((0.0, [0]), (1.0, []), (0.0, [])):
        dense[3, 7] = change
        r = rng.standard_normal(20)
        J = SparseJacobian([[sparse.csr_array(part) for part in np.split(dense, [10], axis=1)]], layout)
        step = SparseSystem.of(J, r, None).solve(damping, np.zeros(12))
        assert layout.eliminated == eliminated
        assert_allclose(step, np.linalg.solve(dense.T @ dense + np.diag(damping), -dense.T @ r), rtol=1e-9)


def test_parts_that_are_not_block_diagonal(scene):
    """The message names the param, two entries, and the residual that depends on both."""
    chain, r = vectors(np.zeros((6, 2))), outputs(5)
    differences = kernel_of("for i in r: r[i] = chain[i][0] - chain[i + 1][1] - 1.0", r=r, chain=chain)
    with pytest.raises(InvalidArgumentError) as told:
        least_squares(differences, chain, r, eliminate=chain)
    for words in ["not block diagonal", "entry [0, 0]", "entry [1, 1]", "depends on both", "Leave it out"]:
        assert words in str(told.value)
    with pytest.raises(InvalidArgumentError, match="another part that is eliminated before is coupled with both"):
        scene.solve(eliminate=[scene.points, scene.weights])


@pytest.mark.mostly_sweep(every=2)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"eliminate": "nothing"}, "eliminate names 'nothing', which is none of the params"),
        ({"eliminate": ["points", "points"]}, "eliminate names 'points'"),
        ({"eliminate": "fields"}, "twice"),
        ({"eliminate": "one", "method": "trf"}, "eliminate needs method='lm'; method is 'trf'"),
    ],
)
def test_bad_input(scene, options, words):
    fields = {"fields": [scene.points, scene.points], "one": scene.points}
    eliminate = options["eliminate"]
    given = fields.get(eliminate, eliminate) if isinstance(eliminate, str) else eliminate
    with pytest.raises(InvalidArgumentError, match=words):
        scene.solve(**{**options, "eliminate": given})


X = np.linspace(-1.0, 2.0, 30)
NOISE = np.random.default_rng(0).standard_normal(30)
A = np.stack([np.ones(30), X, X**2], axis=1)


class Parabola:
    def __init__(self, is_twice=False):
        self.p, self.q, self.r = scalars([0.0, 0.0]), scalars([0.0]), outputs(30)
        x, y = scalars(X), scalars(A @ [1.0, 2.0, 3.0] + 0.1 * NOISE)
        p, q, r = self.p, self.q, self.r
        factor = 0.0 if is_twice else 1.0

        @ti.kernel
        def residuals():
            for i in r:
                r[i] = p[0] + p[1] * x[i] + q[0] * x[i] ** (2 * factor) - y[i]

        self.kernel = residuals

    def solve(self, **options):
        return least_squares(self.kernel, {"p": self.p, "q": self.q}, self.r, **options)


@pytest.fixture(scope="module")
def parabola(ti64):
    return Parabola()


@pytest.mark.mostly_sweep("csr")
@pytest.mark.parametrize("format", [None, "csr"])
def test_linear_problems(parabola, format):
    """sigma**2 (A^T A)^-1, of all parameters and of some of them."""
    if format:
        pytest.importorskip("scipy.sparse")
    result = parabola.solve(format=format)
    wanted = np.linalg.inv(A.T @ A)
    r = A @ np.linalg.lstsq(A, A @ [1.0, 2.0, 3.0] + 0.1 * NOISE, rcond=None)[0] - A @ [1.0, 2.0, 3.0] - 0.1 * NOISE
    assert_allclose(result.covariance(), wanted * (r @ r) / 27, rtol=1e-10)
    assert_allclose(result.covariance(variance=0.01), wanted * 0.01, rtol=1e-10)
    assert_allclose(
        result.covariance([parabola.q, parabola.p], variance=1.0), wanted[np.ix_([2, 0, 1], [2, 0, 1])], rtol=1e-10
    )
    assert_allclose(result.covariance(parabola.q, variance=1.0), wanted[2:, 2:], rtol=1e-10)
    for kept in (result, copy.deepcopy(result), pickle.loads(pickle.dumps(result))):
        errors = kept.standard_errors(variance=4.0)
        assert_allclose(errors["p"], 2 * np.sqrt(wanted.diagonal()[:2]), rtol=1e-10)
        assert errors["q"].shape == (1,)
        assert str(kept) == str(result)


def test_weights(parabola):
    """Weights are inverse variances: (A^T W A)^-1 for variance 1."""
    w = np.linspace(0.5, 2.0, 30)
    result = parabola.solve(weights=w)
    assert_allclose(result.covariance(variance=1.0), np.linalg.inv(A.T @ (w[:, None] * A)), rtol=1e-10)


@pytest.mark.parametrize("format", [None, "csr"])
def test_parameters_that_are_not_determined(format):
    """Two constants: their sum alone is known."""
    if format:
        pytest.importorskip("scipy.sparse")
    result = Parabola(is_twice=True).solve(format=format)
    words = "determine entry .* of .*" if format else r"determine entry \[0\] of .*, entry \[0\] of .*, or not"
    with pytest.raises(InvalidArgumentError, match=words):
        result.covariance()


def test_bad_params_of_covariance(parabola):
    result = parabola.solve()
    with pytest.raises(InvalidArgumentError, match="none of the params"):
        result.covariance(parabola.r)
    with pytest.raises(InvalidArgumentError, match="variance is -1"):
        result.covariance(variance=-1.0)
    with pytest.raises(InvalidArgumentError, match=r"vector has shape \(2,\)"):
        result.split(np.zeros(2))


@pytest.mark.sweep
def test_too_few_residuals(ti64):
    p, r = scalars([1.0, 2.0]), outputs(1)
    one = kernel_of("r[0] = p[0] + p[1] - 1", r=r, p=p)
    result = least_squares(one, p, r)
    with pytest.raises(InvalidArgumentError, match="variance is missing: 1 residuals of 2"):
        result.covariance()
    with pytest.raises(InvalidArgumentError, match="do not determine"):
        result.covariance(variance=1.0)
