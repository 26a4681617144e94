"""``custom_root``, ``implicit_jacobian``: against differences of converged solves, closed forms and unrolled solvers."""

import numpy as np
import pytest
import taichi as ti

from taichi_ext import (
    DerivativeWarning,
    InvalidArgumentError,
    UnsupportedError,
    custom_root,
    hessian,
    implicit_jacobian,
    jacobian,
    jvp,
    newton,
    value_and_gradient,
    vjp,
)

pytestmark = pytest.mark.usefixtures("ti64")


def differences(run, x, out, h=1e-6):
    """Central differences of a pipeline, in the shape of J; the params are put back."""
    start = x.to_numpy()
    columns = []
    for n in range(start.size):
        found = []
        for sign in (1, -1):
            moved = start.copy().reshape(-1)
            moved[n] += sign * h
            x.from_numpy(moved.reshape(start.shape))
            run()
            found.append(out.to_numpy().reshape(-1).copy())
        columns.append((found[0] - found[1]) / (2 * h))
    x.from_numpy(start)
    return np.stack(columns, 1).reshape(out.to_numpy().shape + start.shape)


def fields(*shapes):
    return [ti.field(ti.f64, shape=shape) for shape in shapes]


def heat(n=12, steps=3, solver="jacobi"):
    """Implicit heat conduction: in each step ``(1 + k L) u = v``, with the conductivities k as params."""
    k, u, v, r, w = fields(n + 1, n, n, n, n)
    k.from_numpy(0.4 + 0.1 * np.sin(np.arange(n + 1)))
    start = np.cos(np.arange(n) * 0.7)

    @ti.func
    def applied(x: ti.template(), i):
        left = x[i - 1] if i > 0 else 0.0
        right = x[i + 1] if i < n - 1 else 0.0
        return x[i] + k[i] * (x[i] - left) + k[i + 1] * (x[i] - right)

    @ti.kernel
    def begin():
        for i in u:
            u[i] = 0.3 * i

    @ti.kernel
    def keep():
        for i in u:
            v[i] = u[i]

    @ti.kernel
    def sweep():
        for i in u:
            w[i] = u[i] + (v[i] - applied(u, i)) / (1 + k[i] + k[i + 1])
        for i in u:
            u[i] = w[i]

    @ti.kernel
    def residual():
        for i in u:
            r[i] = applied(u, i) - v[i]

    def by_sweeps():
        for _ in range(200):
            sweep()

    def by_numpy():
        c = k.to_numpy()
        A = np.diag(1 + c[:-1] + c[1:]) - np.diag(c[1:-1], 1) - np.diag(c[1:-1], -1)
        u.from_numpy(np.linalg.solve(A, v.to_numpy()))

    root = custom_root({"jacobi": by_sweeps, "numpy": by_numpy}[solver], residual, u, r)

    def run(solve=root):
        begin()
        for _ in range(steps):
            keep()
            solve()

    return k, u, run, by_sweeps, start


@pytest.mark.sweep
@pytest.mark.parametrize("solver", ["jacobi", "numpy"])
def test_a_solver_in_each_step_against_differences(solver):
    k, u, run, _, _ = heat(solver=solver)
    J = jacobian(run, k, u)
    assert np.abs(J).max() > 0.1
    np.testing.assert_allclose(J, differences(run, k, u), rtol=1e-6, atol=1e-8)


@pytest.mark.sweep
def test_it_agrees_with_the_unrolled_solver():
    k, u, run, by_sweeps, _ = heat(steps=2)
    np.testing.assert_allclose(jacobian(run, k, u), jacobian(lambda: run(by_sweeps), k, u), rtol=1e-9, atol=1e-11)


@pytest.mark.sweep
def test_products():
    k, u, run, _, _ = heat()
    J, rng = jacobian(run, k, u), np.random.default_rng(0)
    t, c = rng.normal(size=k.shape), rng.normal(size=u.shape)
    np.testing.assert_allclose(jvp(run, k, t, u), J @ t, rtol=1e-10)
    np.testing.assert_allclose(vjp(run, k, u, c), c @ J, rtol=1e-10)


@pytest.mark.sweep
def test_columns_in_several_runs():
    k, u, run, _, _ = heat()
    J = jacobian(run, k, u)
    np.testing.assert_allclose(jacobian(run, k, u, chunk_size=5), J, rtol=1e-12)
    np.testing.assert_allclose(jacobian(run, k, u, format="csr").toarray(), J, rtol=1e-12)


@pytest.mark.sweep
def test_the_state_afterwards_is_that_of_a_plain_run():
    k, u, run, _, _ = heat()
    run()
    expected = u.to_numpy()
    u.fill(0)
    jacobian(run, k, u)
    np.testing.assert_array_equal(u.to_numpy(), expected)


@pytest.mark.mostly_sweep("auto")
@pytest.mark.parametrize("linear", ["auto", "direct", "cg", "gmres"])
def test_methods_for_many_unknowns(linear):
    pytest.importorskip("scipy", reason="SciPy is the extra scipy")
    n = 300
    p, x, r, y = fields(2, n, n, ())

    @ti.kernel
    def residual():
        for i in x:
            left = x[i - 1] if i > 0 else 0.0
            right = x[i + 1] if i < n - 1 else 0.0
            r[i] = 3 * x[i] - left - right - p[0] * ti.sin(p[1] * i)

    def solve():
        A = 3 * np.eye(n) - np.eye(n, k=1) - np.eye(n, k=-1)
        x.from_numpy(np.linalg.solve(A, p[0] * np.sin(p[1] * np.arange(n))))

    @ti.kernel
    def energy():
        y[None] = 0.0
        for i in x:
            y[None] += x[i] ** 2

    root = custom_root(solve, residual, x, r, linear=linear)

    def run():
        root()
        energy()

    p.from_numpy(np.array([1.5, 0.3]))
    np.testing.assert_allclose(jacobian(run, p, y), differences(run, p, y), rtol=1e-6)
    _, gradient = value_and_gradient(run, p, y)
    np.testing.assert_allclose(gradient, jacobian(run, p, y), rtol=1e-7)


@pytest.mark.sweep
def test_newton_of_the_user_for_vectors_and_in_place_arrays():
    n = 4
    p = ti.Vector.field(2, ti.f64, shape=n)
    x = ti.Vector.field(2, ti.f64, shape=n)
    r = ti.Vector.field(2, ti.f64, shape=n)
    p.from_numpy(np.random.default_rng(1).uniform(0.5, 1.5, (n, 2)))

    @ti.func
    def f(v, q):
        return ti.Vector([v[0] ** 3 + q[0] * v[1] - 1.0, v[1] + q[1] * v[0] ** 2 - 0.5])

    @ti.kernel
    def solve():
        for i in x:
            v = ti.Vector([0.7, 0.1])
            for _ in range(40):
                F = f(v, p[i])
                A = ti.Matrix([[3 * v[0] ** 2, p[i][0]], [2 * p[i][1] * v[0], 1.0]])
                v -= A.inverse() @ F
            x[i] = v

    @ti.kernel
    def residual():
        for i in x:
            r[i] = f(x[i], p[i])

    root = custom_root(solve, residual, x, r)

    def run():
        root()

    J = jacobian(run, p, x)
    np.testing.assert_allclose(J, differences(run, p, x), rtol=1e-6, atol=1e-8)
    run()
    found = implicit_jacobian(residual, x, p, r)
    assert found.shape == (n, 2, n, 2)
    np.testing.assert_allclose(found, J, rtol=1e-12, atol=1e-13)


@pytest.mark.sweep
def test_several_unknowns_arrays_and_arguments():
    p, y = fields(3, 3)
    p.from_numpy(np.array([0.3, 0.8, 1.2]))
    x, lam = np.zeros(3), np.zeros(1)
    r, g = np.zeros(3), np.zeros(1)

    @ti.kernel
    def residual(
        x: ti.types.ndarray(), lam: ti.types.ndarray(), r: ti.types.ndarray(), g: ti.types.ndarray(), s: float
    ):
        for i in range(3):
            r[i] = x[i] - p[i] + s * lam[0] * (i + 1)
        g[0] = x[0] + 2 * x[1] + 3 * x[2] - p[0] * p[1]

    def equation(s):
        residual(x, lam, r, g, s)

    def solve(s):
        q, a = p.to_numpy(), np.array([1.0, 2.0, 3.0])
        lam[0] = (a @ q - q[0] * q[1]) / (s * a @ a)
        x[:] = q - s * lam[0] * a

    @ti.kernel
    def after(x: ti.types.ndarray(), lam: ti.types.ndarray()):
        for i in range(3):
            y[i] = x[i] * lam[0]

    root = custom_root(solve, equation, [x, lam], (r, g))

    def run(s):
        root(s)
        after(x, lam)

    J = jacobian(run, p, y, args=(0.7,))
    np.testing.assert_allclose(J, differences(lambda: run(0.7), p, y), rtol=1e-6, atol=1e-9)
    by_s = jacobian(run, "s", y, args=(0.7,))
    start = y.to_numpy()
    run(0.7 + 1e-6)
    np.testing.assert_allclose(by_s, (y.to_numpy() - start) / 1e-6, rtol=1e-4)


@pytest.mark.sweep
def test_a_pressure_projection_by_conjugate_gradients():
    n = 8
    force = ti.field(ti.f64, shape=(n, n))
    v, div, q, r, d, w, loss = fields((n + 1, n), (n, n), (n, n), (n, n), (n, n), (n, n), ())
    sums = ti.field(ti.f64, shape=2)
    force.from_numpy(np.random.default_rng(3).normal(size=(n, n)))

    @ti.func
    def laplacian(x: ti.template(), i, j):
        total = 0.2 * x[i, j]
        for s in ti.static(((-1, 0), (1, 0), (0, -1), (0, 1))):
            a, b = i + s[0], j + s[1]
            if 0 <= a < n and 0 <= b < n:
                total += x[i, j] - x[a, b]
        return total

    @ti.kernel
    def divergence():
        for i, j in div:
            div[i, j] = force[i, j] * (1 + 0.1 * q[i, j])

    @ti.kernel
    def start():
        for i, j in q:
            q[i, j] = 0.0
            r[i, j] = div[i, j]
            d[i, j] = div[i, j]

    @ti.kernel
    def products():
        sums[0] = 0.0
        sums[1] = 0.0
        for i, j in d:
            w[i, j] = laplacian(d, i, j)
        for i, j in d:
            sums[0] += d[i, j] * w[i, j]
            sums[1] += r[i, j] ** 2

    @ti.kernel
    def advance(alpha: ti.f64):
        for i, j in q:
            q[i, j] += alpha * d[i, j]
            r[i, j] -= alpha * w[i, j]

    @ti.kernel
    def turn(before: ti.f64):
        sums[0] = 0.0
        for i, j in r:
            sums[0] += r[i, j] ** 2
        for i, j in d:
            d[i, j] = r[i, j] + sums[0] / before * d[i, j]

    def conjugate_gradients():
        start()
        for _ in range(200):
            products()
            rr = sums[1]
            if rr < 1e-26:
                break
            advance(rr / sums[0])
            turn(rr)

    res = ti.field(ti.f64, shape=(n, n))

    @ti.kernel
    def residual():
        for i, j in res:
            res[i, j] = laplacian(q, i, j) - div[i, j]

    @ti.kernel
    def energy():
        loss[None] = 0.0
        for i, j in q:
            loss[None] += q[i, j] ** 2

    root = custom_root(conjugate_gradients, residual, q, res)

    def run():
        q.fill(0.0)
        for _ in range(3):
            divergence()
            root()
        energy()

    value, gradient = value_and_gradient(run, force, loss)
    expected = differences(run, force, loss)
    np.testing.assert_allclose(gradient, expected, rtol=2e-6, atol=1e-8 * np.abs(expected).max())


@pytest.mark.sweep
def test_random_systems():
    rng = np.random.default_rng(7)
    n = 5
    A, B, p, x, r = (ti.field(ti.f64, shape=s) for s in ((n, n), (n, 3), 3, n, n))

    @ti.kernel
    def residual():
        for i in range(n):
            total = 0.0
            for j in range(n):
                total += A[i, j] * x[j]
            for j in range(3):
                total -= B[i, j] * p[j]
            r[i] = total + 0.1 * ti.sin(x[i] * p[0])

    def solve():
        a, b, q = A.to_numpy(), B.to_numpy(), p.to_numpy()
        v = np.zeros(n)
        for _ in range(60):
            F = a @ v - b @ q + 0.1 * np.sin(v * q[0])
            v -= np.linalg.solve(a + np.diag(0.1 * np.cos(v * q[0]) * q[0]), F)
        x.from_numpy(v)

    root = custom_root(solve, residual, x, r)

    def run():
        root()

    for _ in range(40):
        A.from_numpy(rng.normal(size=(n, n)) + 3 * np.eye(n))
        B.from_numpy(rng.normal(size=(n, 3)))
        p.from_numpy(rng.normal(size=3))
        np.testing.assert_allclose(jacobian(run, p, x), differences(run, p, x), rtol=1e-5, atol=1e-7)


# --- bad input


def cube_root(iterations=60):
    p, x, r, other, y = fields((), (), (), (), ())

    @ti.kernel
    def solve():
        x[None] = 1.0
        for _ in range(iterations):
            x[None] -= (x[None] ** 3 - p[None]) / (3 * x[None] ** 2)
        other[None] = 2 * p[None]

    @ti.kernel
    def residual():
        r[None] = x[None] ** 3 - p[None]

    p[None] = 8.0
    return p, x, r, other, y, solve, residual


@pytest.mark.sweep
def test_a_solver_that_has_not_converged_gives_a_warning():
    p, x, r, _, _, solve, residual = cube_root(iterations=4)
    root = custom_root(solve, residual, x, r)

    def run():
        root()

    with pytest.warns(DerivativeWarning, match=r"solve has not solved its equation.*off by about"):
        jacobian(run, p, x)


@pytest.mark.sweep
def test_a_singular_equation_is_an_error():
    p, x, r, _, _, solve, _ = cube_root()

    @ti.kernel
    def flat():
        r[None] = 0.0 * x[None] - p[None]

    root = custom_root(solve, flat, x, r)

    def run():
        root()

    with pytest.raises(InvalidArgumentError, match="singular"):
        jacobian(run, p, x)
    with pytest.raises(InvalidArgumentError, match="singular"):
        implicit_jacobian(flat, x, p, r)


@pytest.mark.sweep
def test_what_else_a_solver_changes():
    p, x, r, other, y, solve, residual = cube_root()

    @ti.kernel
    def reads():
        r[None] = x[None] ** 3 - other[None] / 2

    @ti.kernel
    def after():
        y[None] = x[None] + other[None]

    refused, warned = custom_root(solve, reads, x, r), custom_root(solve, residual, x, r)

    def bad():
        refused()

    def lossy():
        warned()
        after()

    with pytest.raises(InvalidArgumentError, match=r"reads the field other.*, which the solver changes"):
        jacobian(bad, p, x)
    with pytest.warns(DerivativeWarning, match="other of shape .* was changed by"):
        jacobian(lossy, p, y)


@pytest.mark.sweep
def test_wrong_arguments():
    p, x, r, _, y, solve, residual = cube_root()
    for call, message in (
        (lambda: custom_root(solve, residual, [x, y], r), "2 numbers and residuals 1"),
        (lambda: custom_root(solve, residual, x, "r"), "expected fields and arrays"),
        (lambda: custom_root(solve, residual, x, r, linear="lu"), "linear is 'lu'; expected one of"),
        (lambda: custom_root(solve, residual, x, r, tol=0), "tol is 0; expected a positive number"),
        (lambda: custom_root(1, residual, x, r), "solve is 1; expected a function"),
        (lambda: custom_root(solve, None, x, r), "residual is None; expected a function"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            call()


@pytest.mark.sweep
def test_a_residual_that_does_not_read_the_unknowns():
    p, x, r, _, _, solve, _ = cube_root()

    @ti.kernel
    def constant():
        r[None] = p[None] - 8.0

    root = custom_root(solve, constant, x, r)

    def run():
        root()

    with pytest.raises(InvalidArgumentError, match="x"):
        jacobian(run, p, x)


@pytest.mark.sweep
def test_second_derivatives_are_refused():
    p, x, r, _, y, solve, residual = cube_root()
    root = custom_root(solve, residual, x, r)

    @ti.kernel
    def energy():
        y[None] = x[None] ** 2

    def run():
        root()
        energy()

    with pytest.raises(UnsupportedError, match="Second derivatives of"):
        hessian(run, p, y)


# --- solvers of this package


@pytest.mark.sweep
@pytest.mark.parametrize("chunk_size", [None, 1])
def test_newton_of_this_package_as_the_solver(chunk_size):
    n = 6
    load, x, g, energy = fields(2, n, n, ())
    load.from_numpy(np.array([0.4, 0.9]))

    @ti.kernel
    def potential():
        energy[None] = 0.0
        for i in x:
            before = x[i - 1] if i > 0 else 0.0
            energy[None] += (x[i] - before) ** 2 + 0.25 * x[i] ** 4 - load[0] * x[i] * ti.sin(load[1] * i)

    @ti.kernel
    def balance():
        for i in x:
            before = x[i - 1] if i > 0 else 0.0
            g[i] = 2 * (x[i] - before) + x[i] ** 3 - load[0] * ti.sin(load[1] * i)
            if i < n - 1:
                g[i] -= 2 * (x[i + 1] - x[i])

    def solve():
        x.fill(0.1)
        newton(potential, x, energy, gtol=1e-12)

    root = custom_root(solve, balance, x, g)

    def run():
        root()

    J = jacobian(run, load, x, chunk_size=chunk_size)
    np.testing.assert_allclose(J, differences(run, load, x), rtol=1e-5, atol=1e-7)


@pytest.mark.sweep
def test_a_sparse_solver_of_taichi():
    n = 10
    k, u, v, r = fields(n + 1, n, n, n)
    k.from_numpy(0.4 + 0.1 * np.sin(np.arange(n + 1)))

    @ti.kernel
    def assemble(A: ti.types.sparse_matrix_builder(), b: ti.types.ndarray()):
        for i in range(n):
            b[i] = v[i]
            A[i, i] += 1.0 + k[i] + k[i + 1]
            if i > 0:
                A[i, i - 1] -= k[i]
            if i < n - 1:
                A[i, i + 1] -= k[i + 1]

    @ti.kernel
    def residual():
        for i in u:
            left = u[i - 1] if i > 0 else 0.0
            right = u[i + 1] if i < n - 1 else 0.0
            r[i] = (1.0 + k[i] + k[i + 1]) * u[i] - k[i] * left - k[i + 1] * right - v[i]

    @ti.kernel
    def keep():
        for i in v:
            v[i] = u[i] + 0.1

    def solve():
        builder = ti.linalg.SparseMatrixBuilder(n, n, max_num_triplets=3 * n, dtype=ti.f64)
        b = ti.ndarray(ti.f64, n)
        assemble(builder, b)
        solver = ti.linalg.SparseSolver(dtype=ti.f64, solver_type="LU")
        A = builder.build()
        solver.analyze_pattern(A)
        solver.factorize(A)
        u.from_numpy(solver.solve(b).to_numpy())

    root = custom_root(solve, residual, u, r)

    def run():
        u.fill(0.3)
        for _ in range(3):
            keep()
            root()

    np.testing.assert_allclose(jacobian(run, k, u), differences(run, k, u), rtol=1e-6, atol=1e-9)


@pytest.mark.sweep
def test_snapshots_in_reverse_mode():
    k, u, run, _, _ = heat(n=6, steps=12, solver="numpy")
    cotangents = np.random.default_rng(2).normal(size=(2, *u.shape))
    expected = cotangents @ jacobian(run, k, u)
    for max_memory in (None, 3000):
        np.testing.assert_allclose(vjp(run, k, u, cotangents, max_memory=max_memory), expected, rtol=1e-9)


@pytest.mark.sweep
def test_what_else_a_solver_changes_in_reverse_mode():
    p, x, r, other, y, solve, residual = cube_root()

    @ti.kernel
    def reads():
        r[None] = x[None] ** 3 - other[None] / 2

    @ti.kernel
    def after():
        y[None] = x[None] + other[None]

    refused, warned = custom_root(solve, reads, x, r), custom_root(solve, residual, x, r)

    def bad():
        refused()

    def lossy():
        warned()
        after()

    with pytest.raises(InvalidArgumentError, match=r"reads the field other.*, which the solver changes"):
        vjp(bad, p, x, 1.0)
    with pytest.warns(DerivativeWarning, match="other of shape .* was changed by"):
        found = vjp(lossy, p, y, 1.0)
    np.testing.assert_allclose(found, 1 / 12, rtol=1e-6)
