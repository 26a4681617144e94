"""Kernels whose generated code Taichi's optimiser would get wrong, or abort on, with the settings of plain kernels."""

import numpy as np
import pytest
import taichi as ti
from devices import real
from differences import check_jacobian, matrix_outputs, outputs, scalars, vector_outputs, vectors
from kernel_texts import kernel_of, kernels_of, names_of, squares
from numpy.testing import assert_allclose

from taichi_ext import Jacobian, UnsupportedError, backend, jacobian

pytestmark = pytest.mark.usefixtures("ti64")

PAIR = ti.types.vector(2, ti.f64)
PAIRS = ti.types.ndarray(PAIR, ndim=1)
MATRICES = ti.types.ndarray(ti.types.matrix(2, 3, ti.f64), ndim=2)


# Kernels that bind a local again after a use, in or after an inner loop: in the place of ... in the frame, ...
REBINDING = """
    vector:
        for i in range(2):
            u = ti.Vector([1.0 + x, 2.0]) + w[i]
            a += q[i] / u[0]
            u = ti.Vector([3.0 + x, 5.0]) - w[i]
            a += w[i] / u[0]
    branch:
        for i in range(2):
            u = ti.Vector([1.0 + x, 2.0]) + w[i]
            if i < 1:
                a += q[i] / u[0]
                u = ti.Vector([3.0 + x, 5.0]) - w[i]
            a += w[i] * q[1] / u[0]
    complex_numbers:
        u = ti.Vector([1.0 + x, q[0]])
        if q[0] > 0:
            u = u + u
        u = ti.math.cdiv(u, u)
        u = ti.math.cinv(u + q[1])
        a += u[0] + 2.0 * u[1]
"""
FRAME = "for x in range(3):\n    a = 1.0\n    ...\n    o[x] = a * a\n"
# ... and whole ones.
OTHERS = """
    one_iteration:
        a = 1.0
        for i in range(2):
            u = ti.Vector([1.0, 2.0]) + w[i]
            a += q[i] / u[0]
            u = ti.Vector([3.0, 5.0]) - w[i]
            a += w[i] / u[0]
        o[0] = a * a
    sums:
        for x in range(3):
            total = ti.Vector([1.0, 0.0])
            for i in range(2):
                u = ti.Vector([1.0 + x, 2.0 + i])
                total += u * q[i] / u[0]
                u = ti.Vector([3.0 + x, 5.0])
                total += u * w[i]
            v[x] = total
"""


@ti.func
def divided(a, u):
    return a / u[0]


@pytest.mark.mostly_sweep("True-one_iteration")
@pytest.mark.parametrize("name", [*names_of(REBINDING), *names_of(OTHERS)])
@pytest.mark.parametrize("has_shadow", [False, True])
def test_locals_that_are_bound_again(name, has_shadow):
    q, w, o, v = scalars([1.0, 2.0]), scalars([0.5, 0.25]), outputs(3), vector_outputs(2, 3)
    known = {"q": q, "w": w, "o": o, "v": v, "divided": divided}
    kernel = (kernels_of(REBINDING, FRAME, **known) | kernels_of(OTHERS, **known))[name]
    out = v if name == "sums" else o
    if name == "one_iteration":
        assert check_jacobian(kernel, q, out, state=[]).shape == (3, 2)
        return
    check_jacobian(kernel, q, [q, out] if has_shadow else out)


@pytest.mark.parametrize("mode", ["forward", "reverse"])
def test_a_vector_that_is_bound_again_after_a_branch(mode):
    """The plain kernel leaves the first component as it was."""
    x, y = scalars([-0.4, 0.9]), outputs(2)

    @ti.kernel
    def k():
        w = ti.Vector([x[0], x[1]])
        if x[1] > 0:
            w = w + w
        a = w[0]
        w = ti.Vector([a, 1.0]) / w.dot(w)
        for i in ti.static(range(2)):
            y[i] = w[i]

    true = lambda v: np.array([2 * v[0], 1.0]) / (4 * v @ v)
    start = np.array([-0.4, 0.9])
    differences = [(true(start + h) - true(start - h)) / 2e-6 for h in 1e-6 * np.eye(2)]
    assert_allclose(jacobian(k, x, y, mode=mode), np.transpose(differences), rtol=1e-6)
    assert_allclose(y.to_numpy(), true(start))


@ti.func
def square(a):
    return a * a if a > 0 else a


class TestVectorsInArrays:
    """Taichi aborts where the address of their entries lives on from one parallel loop to the next."""

    P = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)

    KERNELS = """
        stored_twice:
            a[1][0] = p[3] if p[0] > 0 else a[0][0]
            a[1][1] = p[3]
            a[1][1] = p[4] * p[1]
        read_in_a_loop:
            a[1][0] = p[0] * p[1]
            for i in y:
                y[i] = a[1][0] * p[i]
        stored_around_a_loop:
            v = a[1]
            for i in y:
                y[i] = 1.0
            a[1][0] = v[0] * p[1]
        updated:
            ti.atomic_max(a[1][0], p[0] * p[1])
            a[1][0] -= p[1] * a[1][1]
            a[1][0] *= p[2]
        of_functions: a[1][0] = square(p[0]); a[1][0] += square(a[1][0]) * square(a[2][1])
        chosen_at_run_time:
            n = ti.cast(p[0] * 3, ti.i32)
            a[1][n] = p[1] * p[2]
            a[1][n] = a[1][n] * p[3] if p[2] > 0 else a[1][1 - n]
    """

    @pytest.mark.mostly_sweep(every=2)
    @pytest.mark.parametrize("name", names_of(KERNELS))
    @pytest.mark.parametrize("is_numpy", [False, True])
    def test_entries(self, name, is_numpy):
        p, y = scalars(self.P), outputs(6)
        start = real(np.linspace(0.1, 0.8, 8).reshape(4, 2))
        a = start.copy()
        if not is_numpy:
            a = ti.Vector.ndarray(2, ti.f64, 4)
            a.from_numpy(start)
        check_jacobian(
            kernels_of(self.KERNELS, arguments="(a: PAIRS)", p=p, y=y, square=square, PAIRS=PAIRS)[name],
            p,
            a,
            args=(a,),
            state=[y],
        )

    def test_matrices(self):
        p, v, m = scalars(self.P), vectors([[0.2, 0.4]]), real(np.linspace(0.1, 1.2, 24).reshape(2, 2, 2, 3))

        @ti.kernel
        def k(m: MATRICES):
            m[0, 1][1, 2] = p[0] if p[1] > 0 else m[1, 1][0, 0]
            m[0, 1][1, 2] = m[0, 1][1, 2] * p[3] + v[0][1]
            m[1, 0] = m[0, 1] * p[5]
            m[1, 0][0, 0] += p[2]

        check_jacobian(k, [p, v], m, args=(m,))

    def test_integers(self):
        p, y, n = scalars(self.P), matrix_outputs(2, 2, 2), np.zeros((4, 2), np.int32)

        @ti.kernel
        def k(n: ti.types.ndarray(ti.types.vector(2, ti.i32), ndim=1)):
            n[1][0] = 2
            y[0] = ti.Matrix([[p[0], p[1]], [p[2] * n[1][0], 1.0]])
            y[1] = y[0] @ y[0]
            n[1][0] = n[1][0] + 1
            y[1][0, 0] += y[0][0, 1] * n[1][0]

        check_jacobian(k, p, y, args=(n,))


class TestVectorsInFields:
    """Where an index of one entry is known only at run time, Taichi reads the others from elsewhere in memory."""

    P = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
    V = np.array([[0.3, -0.7, 0.2], [0.9, 0.4, -0.5]])
    M = np.linspace(-1.0, 0.75, 8).reshape(2, 2, 2)
    SUMS = V[[0, 1], [0, 1]] + V.sum(axis=1)

    def test_vectors(self):
        p, v, y = scalars(self.P), ti.Vector.field(3, ti.f64, shape=2), ti.field(ti.f64, shape=2)
        v.from_numpy(self.V)
        k = kernel_of("for i in range(2): y[i] = (v[i][i] + v[i].sum()) * p[i]", y=y, v=v, p=p)
        np.testing.assert_allclose(check_jacobian(k, p, y), self.SUMS[:, None] * np.eye(2, 6))

    def test_vectors_with_tangents(self):
        v, y = ti.Vector.field(3, ti.f64, shape=2), ti.field(ti.f64, shape=2)
        v.from_numpy(self.V)
        k = kernel_of("for i in range(2): y[i] = (v[i][i] + v[i].sum()) ** 2", y=y, v=v)
        check_jacobian(k, v, y)

    @pytest.mark.sweep
    def test_a_kernel_without_tangents_in_a_pipeline(self):
        """What runs is generated, too."""
        p, v = scalars(self.P), ti.Vector.field(3, ti.f64, shape=2)
        y, z = ti.field(ti.f64, shape=2), ti.field(ti.f64, shape=2)
        v.from_numpy(self.V)
        load = kernel_of("for i in range(2): y[i] = v[i][i] + v[i].sum()", y=y, v=v)
        k = kernel_of("for i in range(2): z[i] = y[i] * p[i]", z=z, y=y, p=p)

        def run():
            load()
            k()

        np.testing.assert_allclose(check_jacobian(run, p, z, state=[y]), self.SUMS[:, None] * np.eye(2, 6))

    @pytest.mark.parametrize("kind", ["array", "difference"])
    def test_a_constant_that_is_added_to_a_component_found_at_run_time(self, kind):
        """Taichi aborted while it made local sums for each thread."""
        x, v = scalars([1.0, 2.0]), vector_outputs(2, 2)

        @ti.kernel
        def difference():
            for i in range(2):
                v[0][i] -= 1.0
            for i in range(2):
                v[0][i] *= x[i]

        @ti.kernel
        def array(a: PAIRS):
            for i in range(2):
                a[i][i] += 1.0
            for i in range(2):
                a[i][i] *= x[i]

        expected, values = np.zeros((2, 2, 2)), np.diag([1.0, 2.0])
        expected[[0, 1], [0, 1], [0, 1]] = 1.0
        if kind == "array":
            a = np.zeros((2, 2))
            assert_allclose(jacobian(array, x, "a", args=(a,)), expected)
            assert_allclose(a, values)
        else:
            assert_allclose(jacobian(difference, x, v), np.stack([-np.eye(2), np.zeros((2, 2))]))

    def test_a_loop_over_an_array_that_adds_to_vectors(self):
        """Taichi aborted: an address was used before it was computed."""
        v, a = ti.Vector.field(3, ti.f64, shape=5), real([0.2, 0.9])

        @ti.kernel
        def k(a: ti.types.ndarray(ti.f64, ndim=1), p: ti.f64):
            for i in a:
                u = ti.Vector([0.1 * i + 1.3, 1.0, a[i]])
                a[i] = a[i] * p
                v[(i + 2) % 5] += u + a[i] * ti.Vector([0.8 * a[i], a[i] - a[i], a[i] * a[i]])

        expected = np.zeros((5, 3))
        expected[2:4] = np.stack([1.6 * a * a * 0.7, 0 * a, 3 * a**3 * 0.7**2], axis=1)
        np.testing.assert_allclose(jacobian(k, "p", v, args=(a, 0.7)), expected)


@pytest.mark.chosen_only("the buffers are those of one run", "--chunk-size")
def test_no_loop_uses_more_buffers_than_a_device_has(monkeypatch):
    """Taichi does not ask a device that takes SPIR-V how many there are: the numbers would be wrong."""
    x, y, z = scalars([1.0, 2.0]), outputs(2), outputs(2)
    many, found = scalars(np.ones(100)), outputs(100)
    square = squares(x, y)

    @ti.kernel
    def both():
        for i in x:
            y[i] = x[i] ** 2
        for i in x:
            z[i] = x[i] * y[i]

    mixed = kernel_of(
        "for i in many: found[i] = many[i] * many[(i + 1) % 100] + many[i] ** 2 * many[99 - i]", many=many, found=found
    )
    monkeypatch.setattr(backend, "most_buffers", lambda: 2)
    with pytest.raises(UnsupportedError, match="square and its derivatives uses 3 arrays and trees of fields"):
        jacobian(square, x, y)
    monkeypatch.setattr(backend, "most_buffers", lambda: 5)  # the second loop: three fields and two shadows
    by_y, by_z = jacobian(both, x, [y, z])
    assert_allclose(by_y, np.diag([2.0, 4.0]))
    assert_allclose(by_z, np.diag([3.0, 12.0]))
    monkeypatch.setattr(backend, "most_buffers", lambda: 3)  # three arrays of entries, or one shadow
    plan, identity = Jacobian(mixed, many, found, format="csr"), np.eye(100)
    assert_allclose(plan().toarray(), 3 * identity + np.roll(identity, 1, axis=1) + identity[::-1])
    assert plan.source.count("ti.types.ndarray") == 1
