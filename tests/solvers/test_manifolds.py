"""Parameters that are points of manifolds: local coordinates against closed forms and central differences."""

import numpy as np
import pytest
import taichi as ti
from differences import read, vectors, write
from kernel_texts import kernel_of
from numpy.testing import assert_allclose

from taichi_ext import InvalidArgumentError, Manifold, least_squares, manifolds
from taichi_ext.solvers.parts import Part
from taichi_ext.solvers.problem import Charts

pytestmark = [pytest.mark.usefixtures("ti64"), pytest.mark.double_only("compared with float64")]

RNG = np.random.default_rng(0)
F64 = np.dtype(np.float64)
A, NOISE = RNG.standard_normal((8, 3)), 0.02 * RNG.standard_normal((8, 3))


def rotation_of(q):
    """The matrix of a quaternion (w, x, y, z)."""
    w, x, y, z = q
    K = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return np.eye(3) + 2 * w * K + 2 * K @ K


def normalized(v):
    return v / np.linalg.norm(v, axis=-1, keepdims=True)


def exponential(r):
    """The matrix of a rotation vector."""
    K, t = np.array([[0, -r[2], r[1]], [r[2], 0, -r[0]], [-r[1], r[0], 0]]), np.linalg.norm(r)
    return np.eye(3) + np.sin(t) / t * K + (1 - np.cos(t)) / t**2 * K @ K


def kabsch(a, b):
    """The rotation R for which ``sum |R a - b|**2`` is least."""
    U, _, V = np.linalg.svd(b.T @ a)
    return U @ np.diag([1, 1, np.linalg.det(U @ V)]) @ V


TRUE = rotation_of(normalized(np.array([0.4, 0.5, -0.6, 0.7])))
B = A @ TRUE.T + NOISE
QUATERNIONS = normalized(RNG.standard_normal((4, 4)))
ROTATIONS = np.stack([rotation_of(q) for q in QUATERNIONS])
POSES = np.tile(np.eye(4), (4, 1, 1))
POSES[:, :3, :3], POSES[:, :3, 3] = ROTATIONS, RNG.standard_normal((4, 3))
UNITS = normalized(RNG.standard_normal((4, 3)))
POINTS = {"unit_vector": UNITS, "unit_quaternion": QUATERNIONS, "so3": ROTATIONS, "se3": POSES}


@pytest.fixture(scope="module")
def charts(ti64):
    parts = [Part(name, x.shape, F64) for name, x in POINTS.items()]
    return Charts([getattr(manifolds, name) for name in POINTS], parts)


@pytest.mark.sweep
def test_derivatives(charts):
    """J by local coordinates is J times central differences of the points."""
    rng = np.random.default_rng(0)
    x = np.concatenate([v.reshape(-1) for v in POINTS.values()])
    J = rng.standard_normal((5, len(x)))
    size = 4 * (2 + 3 + 3 + 6)
    assert [part.shape for part in charts.parts] == [(4, 2), (4, 3), (4, 3), (4, 6)]
    differences = [(charts.plus(x, 1e-5 * e) - charts.plus(x, -1e-5 * e)) / 2e-5 for e in np.eye(size)]
    assert_allclose(charts.local_jacobian(J, x), J @ np.stack(differences, axis=1), atol=1e-8)


def test_steps_stay_on_manifolds(charts):
    rng = np.random.default_rng(0)
    x = np.concatenate([v.reshape(-1) for v in POINTS.values()])
    assert_allclose(charts.plus(x, np.zeros(4 * 14)), x, atol=1e-15)
    own = [(charts.plus(x, 1e-5 * e) - charts.plus(x, -1e-5 * e))[:12] / 2e-5 for e in np.eye(4 * 14)[:8]]
    assert_allclose(own @ np.transpose(own), np.eye(8), atol=1e-9)  # two directions of a sphere, at right angles
    moved = charts.plus(x, rng.standard_normal(4 * 14))
    u, q, R, T = (v.reshape(p.shape) for v, p in zip(np.split(moved, [12, 28, 64]), POINTS.values(), strict=True))
    assert_allclose(np.linalg.norm(u, axis=1), 1.0)
    assert_allclose(np.linalg.norm(q, axis=1), 1.0)
    for M in (*R, *T[:, :3, :3]):
        assert_allclose(M @ M.T, np.eye(3), atol=1e-14)
        assert np.linalg.det(M) > 0
    assert_allclose(T[:, 3], np.tile([0, 0, 0, 1], (4, 1)))


def test_steps_are_rotation_vectors_to_second_order(charts):
    rng = np.random.default_rng(0)
    x, step = np.concatenate([v.reshape(-1) for v in POINTS.values()]), 1e-3 * rng.standard_normal((4, 6))
    zeros, r = np.zeros((4, 2)), step[:, 3:]
    moved = charts.plus(x, np.concatenate([v.reshape(-1) for v in (zeros, r, r, step)]))
    _, q, R, T = (v.reshape(p.shape) for v, p in zip(np.split(moved, [12, 28, 64]), POINTS.values(), strict=True))
    for k in range(4):
        wanted = ROTATIONS[k] @ exponential(r[k])
        for found in (rotation_of(q[k]), R[k], T[k, :3, :3]):
            assert_allclose(found, wanted, atol=1e-9)
        assert_allclose(T[k, :3, 3], POSES[k, :3, 3] + ROTATIONS[k] @ step[k, :3], atol=1e-15)


def test_products_with_numbers_beside_a_manifold():
    """Dense and sparse ones are those of J by local coordinates."""
    sparse, rng = pytest.importorskip("scipy.sparse"), np.random.default_rng(0)
    charts = Charts([manifolds.unit_vector, None], [Part("u", UNITS.shape, F64), Part("free", (3,), F64)])
    x, J, r = np.append(UNITS, [0.3, 0.5, 0.7]), rng.standard_normal((20, 15)), rng.standard_normal(20)
    local = charts.local_jacobian(J, x)
    for convert in (np.asarray, sparse.csr_array):
        product, gradient = charts.local_products(convert(J.T @ J), J.T @ r, x)
        assert_allclose(product @ np.eye(11), local.T @ local, atol=1e-12)
        assert_allclose(gradient, local.T @ r, atol=1e-12)


class Wahba:
    """The rotation that takes some vectors to others, as a quaternion and as a matrix."""

    def __init__(self):
        self.q, self.R = vectors(QUATERNIONS[:1]), ti.Matrix.field(3, 3, ti.f64, shape=())
        self.errors = vectors(np.zeros((8, 3)))
        a, b, q, R, errors = vectors(A), vectors(B), self.q, self.R, self.errors

        @ti.kernel
        def by_quaternion():
            for k in errors:
                u = ti.Vector([q[0][1], q[0][2], q[0][3]])
                t = 2 * u.cross(a[k])
                errors[k] = a[k] + q[0][0] * t + u.cross(t) - b[k]

        by_matrix = kernel_of("for k in errors: errors[k] = R[None] @ a[k] - b[k]", errors=errors, R=R, a=a, b=b)
        self.by_quaternion, self.by_matrix = by_quaternion, by_matrix


@pytest.fixture(scope="module")
def wahba(ti64):
    return Wahba()


@pytest.mark.sweep
@pytest.mark.parametrize("format", [None, "csr"])
def test_rotations(wahba, format):
    """Kabsch's closed form; the covariance in the frame of the vectors is ``(sum |a|**2 - a a^T)^-1``."""
    if format:
        pytest.importorskip("scipy.sparse")
    R = kabsch(A, B)
    information = sum(a @ a * np.eye(3) - np.outer(a, a) for a in A)
    write(wahba.q, QUATERNIONS[:1])
    write(wahba.R, ROTATIONS[0])
    tight = {"format": format, "xtol": 1e-12, "gtol": 1e-14, "ftol": 1e-15}
    by_quaternion = least_squares(
        wahba.by_quaternion, [wahba.q], wahba.errors, retract=[manifolds.unit_quaternion], **tight
    )
    by_matrix = least_squares(wahba.by_matrix, wahba.R, wahba.errors, retract=manifolds.so3, **tight)
    assert_allclose(rotation_of(read(wahba.q)[0]), R, atol=1e-9)
    assert_allclose(read(wahba.R), R, atol=1e-9)
    for result in (by_quaternion, by_matrix):
        assert result.success and result.nfev < 20
        assert result.jacobian.shape == (24, 3) and result.grad.shape == (3,)
        assert_allclose(result.cost, 0.5 * np.square(A @ R.T - B).sum(), rtol=1e-12)
        # the vectors turned by R differ from B by the noise, so JtJ is that of A
        assert_allclose(result.covariance(variance=1.0), np.linalg.inv(information), rtol=1e-8)
    assert by_quaternion.standard_errors(variance=1.0)[0].shape == (1, 3)
    assert by_matrix.standard_errors(variance=1.0).shape == (3,)
    assert by_matrix.split(by_matrix.x).shape == (3, 3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"retract": "rotation"}, "retract is 'rotation'; expected a Manifold or None for each of the 1 params"),
        ({"retract": [manifolds.so3, None]}, "for each of the 1 params"),
        ({"retract": manifolds.unit_vector}, r"has the shape \(1, 4\) .* points of its manifold have the shape \(3,\)"),
        ({"bounds": (-2.0, 2.0)}, "bounds limits .* which moves on a manifold"),
        ({"method": "trf"}, "retract needs method='lm'"),
    ],
)
def test_bad_input(wahba, options, words):
    write(wahba.q, QUATERNIONS[:1])
    with pytest.raises(InvalidArgumentError, match=words):
        least_squares(wahba.by_quaternion, wahba.q, wahba.errors, **{"retract": manifolds.unit_quaternion, **options})


@pytest.mark.mostly_sweep("one argument")
@pytest.mark.parametrize("retract", [lambda p, delta: p, ti.func(lambda p: p)], ids=["no delta", "one argument"])
def test_functions_that_are_no_retraction(wahba, retract):
    write(wahba.q, QUATERNIONS[:1])
    with pytest.raises(InvalidArgumentError, match="retract must be a ti.func of a point and of its local coordinates"):
        least_squares(wahba.by_quaternion, wahba.q, wahba.errors, retract=Manifold(retract, size=3, shape=(4,)))


def test_a_start_that_is_not_on_the_manifold(wahba):
    write(wahba.q, 2 * QUATERNIONS[:1])
    with pytest.raises(InvalidArgumentError, match=r"entry \[0, 0\] of .*after a step of length 0 on its manifold"):
        least_squares(wahba.by_quaternion, wahba.q, wahba.errors, retract=manifolds.unit_quaternion)
    assert_allclose(read(wahba.q), 2 * QUATERNIONS[:1])


@pytest.mark.mostly_sweep(every=2)
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("turn", 1, (2,)), "retract is 'turn'; expected a ti.func"),
        ((len, 0, (2,)), "size is 0; expected a positive whole number"),
        ((len, 1, 2), "shape is 2; expected a tuple"),
    ],
)
def test_manifolds_that_are_refused(given, words):
    with pytest.raises(InvalidArgumentError, match=words):
        Manifold(*given)
