"""``custom_root``, ``implicit_jacobian``: against differences of converged solves and closed forms."""

import functools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import shard_factories
import taichi as ti
from captured_warnings import no_warnings
from differences import central_differences, read, write
from kernel_texts import kernel_of

import taichi_ext as te
from taichi_ext import DerivativeWarning, InvalidArgumentError, custom_root, jacobian, value_and_gradient, vjp
from taichi_ext.runtime.reverse.reverse import Reverse
from taichi_ext.solvers.implicit import Equation

pytestmark = pytest.mark.usefixtures("ti64")


def differences(run, x, out):
    [[J]] = central_differences(run, [x], [out], step=1e-6)
    return J


def fields(*shapes):
    return [ti.field(ti.f64, shape=shape) for shape in shapes]


@pytest.mark.parametrize("mode", ["forward", "reverse"])
def test_residuals_are_put_back_each_time(mode):
    """Later calls repeat the launch of the first one, which must be undone, too."""
    a, x, r = fields((2,), (2,), (2,))
    a.fill(0.5)
    r.fill(7.0)
    solve = kernel_of("for i in x: x[i] = 2.0 * a[i] + 1e-6", x=x, a=a)
    residual = kernel_of("residual: for i in x: r[i] = x[i] - 2.0 * a[i]", x=x, r=r, a=a)
    root = custom_root(solve, residual, x, r)
    for _ in range(3):
        np.testing.assert_allclose(jacobian(lambda: root(), a, x, mode=mode), 2.0 * np.eye(2))
        assert read(r).tolist() == [7.0, 7.0]


@pytest.mark.mostly_sweep("direct-0.4")
@pytest.mark.parametrize(
    ("linear", "skew"), [("auto", 0.0), ("direct", 0.4), ("cg", 0.0), ("gmres", 0.4), ("superlu", 0.0)]
)
def test_methods_for_many_unknowns(linear, skew, monkeypatch):
    pytest.importorskip("scipy", reason="SciPy is the extra scipy")
    if linear == "superlu":  # where CVXOPT is installed, symmetric matrices are decomposed by CHOLMOD
        linear = "direct"
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    n = 300
    p, x, r, y = fields(2, n, n, ())

    @ti.kernel
    def residual():
        for i in x:
            left = x[i - 1] if i > 0 else 0.0
            right = x[i + 1] if i < n - 1 else 0.0
            r[i] = 3 * x[i] - (1 - skew) * left - (1 + skew) * right - p[0] * ti.sin(p[1] * i)

    def solve():
        A = 3 * np.eye(n) - (1 + skew) * np.eye(n, k=1) - (1 - skew) * np.eye(n, k=-1)
        x.from_numpy(np.linalg.solve(A, p[0] * np.sin(p[1] * np.arange(n))))

    @ti.kernel
    def energy():
        y[None] = 0.0
        for i in x:
            y[None] += x[i] ** 2

    root = custom_root(solve, residual, x, r, linear=linear)
    run = lambda: (root(), energy())
    write(p, np.array([1.5, 0.3]))
    np.testing.assert_allclose(jacobian(run, p, y), differences(run, p, y), rtol=1e-6)
    _, gradient = value_and_gradient(run, p, y)
    np.testing.assert_allclose(gradient, jacobian(run, p, y), rtol=1e-7)


@pytest.mark.sweep
def test_several_unknowns_arrays_and_arguments():
    p, y = fields(3, 3)
    write(p, np.array([0.3, 0.8, 1.2]))
    x, lam = np.zeros(3), np.zeros(1)
    r, g = np.zeros(3), np.zeros(1)

    @ti.kernel
    def residual(
        x: ti.types.ndarray(), lam: ti.types.ndarray(), r: ti.types.ndarray(), g: ti.types.ndarray(), s: float
    ):
        for i in range(3):
            r[i] = x[i] - p[i] + s * lam[0] * (i + 1)
        g[0] = x[0] + 2 * x[1] + 3 * x[2] - p[0] * p[1]

    equation = lambda s: residual(x, lam, r, g, s)

    def solve(s):
        q, a = p.to_numpy(), np.array([1.0, 2.0, 3.0])
        lam[0] = (a @ q - q[0] * q[1]) / (s * a @ a)
        x[:] = q - s * lam[0] * a

    after = kernel_of("for i in range(3): y[i] = x[i] * lam[0]", "x: A, lam: A", y=y)
    root = custom_root(solve, equation, [x, lam], (r, g))
    run = lambda s: (root(s), after(x, lam))
    J = jacobian(run, p, y, args=(0.7,))
    np.testing.assert_allclose(J, differences(lambda: run(0.7), p, y), rtol=1e-6, atol=1e-9)
    run(0.7)
    by_x, by_lam = te.implicit_jacobian(lambda: equation(0.7), [x, lam], p, (r, g))
    np.testing.assert_allclose(lam[0] * by_x + np.outer(x, by_lam), J, rtol=1e-12, atol=1e-12)
    by_s = jacobian(run, "s", y, args=(0.7,))
    start = read(y)
    run(0.7 + 1e-6)
    np.testing.assert_allclose(by_s, (read(y) - start) / 1e-6, rtol=1e-4)


def random_system():
    """``A x + sin(c x) + d x^3 = B p + old``, in one to three steps, with random numbers."""
    n = 6
    A, B, c, d, p, x, old, r = fields((n, n), (n, 3), n, n, 3, n, n, n)

    @ti.kernel
    def residual():
        for i in range(n):
            r[i] = ti.sin(c[i] * x[i]) + d[i] * x[i] ** 3 - old[i]
            for j in range(n):
                r[i] += A[i, j] * x[j]
            for j in range(3):
                r[i] -= B[i, j] * p[j] * (1 + 0.1 * x[i])

    keep = kernel_of("for i in x: old[i] = x[i] * p[0]", x=x, old=old, p=p)

    def solve():
        a, f, q, v = A.to_numpy(), c.to_numpy(), d.to_numpy(), np.zeros(n)
        load = B.to_numpy() @ p.to_numpy()
        for _ in range(100):
            F = a @ v + np.sin(f * v) + q * v**3 - load * (1 + 0.1 * v) - old.to_numpy()
            step = np.linalg.solve(a + np.diag(f * np.cos(f * v) + 3 * q * v**2 - 0.1 * load), -F)
            v += step
            if np.abs(step).max() < 1e-14:
                break
        x.from_numpy(v)

    roots = {linear: custom_root(solve, residual, x, r, linear=linear) for linear in ("auto", "cg", "gmres")}
    chosen = {}

    def run():
        x.fill(0.2)
        for _ in range(chosen["steps"]):
            keep()
            roots[chosen["linear"]]()

    return A, B, c, d, p, x, chosen, run


def check_random_systems(seeds):
    A, B, c, d, p, x, chosen, run = random_system()
    for seed in seeds:
        rng = np.random.default_rng(seed)
        chosen["linear"], chosen["steps"] = str(rng.choice(["auto", "cg", "gmres"])), int(rng.integers(1, 4))
        a = rng.normal(size=A.shape)
        A.from_numpy(5 * np.eye(6) + (a + a.T if chosen["linear"] == "cg" else a) / 2)
        for field, size in ((B, 1.0), (p, 1.0), (c, 0.5), (d, 0.3)):
            field.from_numpy(size * rng.uniform(-1 if field in (B, p) else 0, 1, field.shape))
        expected = differences(run, p, x)
        close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-8, err_msg=f"seed {seed}")
        close(jacobian(run, p, x), expected)
        close(jacobian(run, p, x, chunk_size=2), expected)
        close(jacobian(run, p, x, format="csr").toarray(), expected)
        t, w = rng.normal(size=p.shape), rng.normal(size=(2, *x.shape))
        close(te.jvp(run, p, t, x), expected @ t)
        for max_memory in (None, 3000):  # snapshots
            close(vjp(run, p, x, w, max_memory=max_memory), w @ expected)


@pytest.mark.sweep
def test_random_systems():
    check_random_systems(range(12))


@pytest.mark.sweep
def test_more_random_systems():
    check_random_systems(range(12, 200))


# --- costs


def test_solves_and_runs_of_the_residual(monkeypatch):
    """One linear system a step, with a column for each param or cotangent, one for the residuals, and few runs."""
    k, u, v, r = fields(7, 7, 7, 7)
    write(k, np.linspace(0.5, 0.8, 7))
    counts = {"systems": 0, "columns": 0, "residuals": 0}
    system = Equation.system

    def counted(self, args):
        counts["systems"] += 1
        solve = system(self, args)

        def columns(right, **options):
            counts["columns"] += right.shape[1]
            return solve(right, **options)

        return columns

    equation = kernel_of("for i in u: r[i] = k[i] * u[i] + u[i] ** 3 - v[i]", u=u, r=r, k=k, v=v)
    keep = kernel_of("for i in u: v[i] = u[i] + 1.0", u=u, v=v)

    def residual():
        counts["residuals"] += 1
        equation()

    def solve():
        x, a, b = u.to_numpy(), k.to_numpy(), v.to_numpy()
        for _ in range(50):
            x = x - (a * x + x**3 - b) / (a + 3 * x**2)
        u.from_numpy(x)

    root = custom_root(solve, residual, u, r)
    steps = 4

    def run():
        u.fill(0.0)
        for _ in range(steps):
            keep()
            root()

    monkeypatch.setattr(Equation, "system", counted)
    weights = np.ones((3, 7))
    for call, columns in ((lambda: jacobian(run, k, u), 7), (lambda: vjp(run, k, u, weights), 3)):
        call()  # which also looks for numbers that Python passes on
        counts.update(dict.fromkeys(counts, 0))
        call()
        assert counts == {"systems": steps, "columns": steps * (columns + 1), "residuals": counts["residuals"]}
        assert steps < counts["residuals"] <= 3 * steps


@pytest.mark.sweep
def test_memory_does_not_depend_on_the_number_of_iterations(monkeypatch):
    n, steps, peaks = 16, 50, []
    force, u, b, r, res = fields(n, n, n, n, n)
    write(force, np.cos(np.arange(n)))
    original = Reverse.vjp

    def noted(self, *args, **kwargs):
        found = original(self, *args, **kwargs)
        peaks.append(found.peak)
        return found

    @ti.func
    def neighbours(i):
        return (u[i - 1] if i > 0 else 0.0) + (u[i + 1] if i < n - 1 else 0.0)

    start = kernel_of("for i in u: b[i] = force[i] + 0.5 * u[i]", u=u, b=b, force=force)

    @ti.kernel
    def iterate():
        for i in u:
            r[i] = (b[i] + neighbours(i)) / 3
        for i in u:
            u[i] = r[i]

    residual = kernel_of(
        "residual: for i in res: res[i] = 3 * u[i] - neighbours(i) - b[i]", res=res, u=u, neighbours=neighbours, b=b
    )

    def solver(iterations):
        def solve():
            for _ in range(iterations):
                iterate()

        root = custom_root(solve, residual, u, res)

        def run():
            u.fill(0.0)
            for _ in range(steps):
                start()
                root()

        return run

    monkeypatch.setattr(Reverse, "vjp", noted)
    few, many = (vjp(solver(iterations), force, u, np.ones(n)) for iterations in (80, 200))
    np.testing.assert_allclose(few, many, rtol=1e-9)
    assert peaks[0] == peaks[-1] > 0


def test_shards_and_threads():
    """In shards of data, and solvers of their own in several threads at once."""
    at, shards = np.array([1.3, 0.7]), [(1,), (2,)]
    columns = [
        sum((shard_factories.cubic_roots(p, shard_factories.loads(*shard)) ** 2).sum() for shard in shards)
        for p in at + 1e-30j * np.eye(2)
    ]
    value, gradient = value_and_gradient(shard_factories.root_squares, shards=shards, at=at)
    np.testing.assert_allclose(value, np.real(columns[0]), rtol=1e-12)
    np.testing.assert_allclose(gradient, np.imag(columns) / 1e-30, rtol=1e-9)

    plans = []
    for number in range(3):
        run, p, total, args = shard_factories.root_squares(number)
        p[:] = at
        plans.append(te.Jacobian(run, p, total, args=args))
    expected = [plan() for plan in plans]
    with ThreadPoolExecutor(3) as pool:
        for _ in range(5):
            np.testing.assert_array_equal(list(pool.map(lambda plan: plan(), plans)), expected)


# --- bad input


def cube_root(iterations=60):
    p, x, r, other, y = fields((), (), (), (), ())

    @ti.kernel
    def solve():
        x[None] = 1.0
        for _ in range(iterations):
            x[None] -= (x[None] ** 3 - p[None]) / (3 * x[None] ** 2)
        other[None] = 2 * p[None]

    residual = kernel_of("residual: r[None] = x[None] ** 3 - p[None]", r=r, x=x, p=p)
    p[None] = 8.0
    return p, x, r, other, y, solve, residual


@pytest.mark.sweep
def test_a_solver_that_has_not_converged_gives_a_warning():
    p, x, r, _, _, solve, residual = cube_root(iterations=4)
    root = custom_root(solve, residual, x, r)
    run = lambda: root()
    with pytest.warns(DerivativeWarning, match=r"solve has not solved its equation.*off by about"):
        jacobian(run, p, x)


@pytest.mark.sweep
def test_a_singular_equation_is_an_error():
    p, x, r, _, _, solve, _ = cube_root()
    flat = kernel_of("r[None] = 0.0 * x[None] - p[None]", r=r, x=x, p=p)
    root = custom_root(solve, flat, x, r)
    run = lambda: root()
    with pytest.raises(InvalidArgumentError, match="singular"):
        jacobian(run, p, x)
    with pytest.raises(InvalidArgumentError, match="singular"):
        te.implicit_jacobian(flat, x, p, r)


@pytest.mark.mostly_sweep("array-reverse")
@pytest.mark.parametrize("call", [jacobian, vjp], ids=["forward", "reverse"])
@pytest.mark.parametrize("kind", ["kernel", "entry", "array", "ndarray"])
def test_what_else_a_solver_changes_and_the_residual_reads(kind, call):
    p, x, r, other, _, solve, _ = cube_root()
    array = np.zeros(1) if kind == "array" else ti.ndarray(ti.f64, 1)
    of_fields = kernel_of("r[None] = x[None] ** 3 - other[None] / 2 + 0.0 * p[None]", r=r, x=x, other=other, p=p)
    of_arrays = kernel_of("r[None] = x[None] ** 3 - a[0] / 2 + 0.0 * p[None]", "a: A", r=r, x=x, p=p)

    def by_python():
        x[None] = p[None] ** (1 / 3)
        if kind == "entry":
            other[None] = 2 * p[None]
        else:
            array[0] = 2 * p[None]

    is_field = kind in ("kernel", "entry")
    equation = of_fields if is_field else lambda: of_arrays(array)
    root = custom_root(solve if kind == "kernel" else by_python, equation, x, r)
    run = lambda: root()
    name = r"the field other of shape \(\)" if is_field else "an array"
    with pytest.raises(InvalidArgumentError, match=f"reads {name}, which the solver changes"):
        call(run, p, x, *([1.0] if call is vjp else []))


@pytest.mark.mostly_sweep("kernel-reverse")
@pytest.mark.parametrize("call", [jacobian, vjp], ids=["forward", "reverse"])
@pytest.mark.parametrize("kind", ["kernel", "entry", "output"])
def test_what_else_a_solver_changes_is_a_constant(kind, call):
    p, x, r, other, y, solve, residual = cube_root()
    before = kernel_of("other[None] = 5 * p[None]", other=other, p=p)
    after = kernel_of("y[None] = x[None] + other[None]", y=y, x=x, other=other)
    root = custom_root(solve, residual, x, r)

    def run():
        before()
        root()
        if kind == "kernel":
            after()
        elif kind == "entry":
            y[None] = x[None] + other[None]

    given = [1.0] if call is vjp else []
    with pytest.warns(DerivativeWarning, match="other of shape .* was changed by"):
        found = call(run, p, other if kind == "output" else y, *given)
    np.testing.assert_allclose(found, 0 if kind == "output" else 1 / 12, rtol=1e-6)


@pytest.mark.parametrize(
    "options", [{"chunk_size": 1}, {"mode": "reverse", "chunk_size": 1}], ids=["forward", "reverse"]
)
def test_what_a_solver_adds_to_is_that_of_one_run(options):
    p, x, r, runs = fields(2, 2, 2, ())
    solve = kernel_of("runs[None] += 1.0; for i in x: x[i] += p[i] ** (1 / 3)", x=x, p=p, runs=runs)
    root = custom_root(solve, kernel_of("for i in x: r[i] = x[i] ** 3 - p[i]", r=r, x=x, p=p), x, r)
    p.from_numpy(np.array([8.0, 27.0]))
    np.testing.assert_allclose(jacobian(lambda: root(), p, x, **options), np.diag([1 / 12, 1 / 27]), rtol=1e-6)
    assert (runs[None], *x.to_numpy().round(9)) == (1, 2, 3)


def test_what_a_solver_changes_and_python_stores_afterwards_is_known():
    p, x, r, other, y, solve, residual = cube_root()
    after = kernel_of("y[None] = x[None] * other[None]", y=y, x=x, other=other)
    root = custom_root(solve, residual, x, r)

    def run():
        root()
        other[None] = 2.0
        after()

    with no_warnings():
        np.testing.assert_allclose([jacobian(run, p, y), vjp(run, p, y, 1.0)], 2 / 12, rtol=1e-6)


@pytest.mark.sweep
@pytest.mark.parametrize("call", [jacobian, vjp], ids=["forward", "reverse"])
def test_numbers_that_a_solver_returns_are_constants(call):
    p, x, r, _, y, solve, residual = cube_root()

    def returns():
        solve()
        return 3 * p[None]

    after = kernel_of("y[None] = x[None] * factor", "factor: ti.f64", y=y, x=x)
    root = custom_root(returns, residual, x, r)
    run = lambda: after(root())
    with pytest.warns(DerivativeWarning, match="A number passed to .* has computed it without its derivative"):
        found = call(run, p, y, *([1.0] if call is vjp else []))
    np.testing.assert_allclose(found, 24 / 12, rtol=1e-6)


@pytest.mark.sweep
def test_wrong_arguments():
    p, x, r, _, y, solve, residual = cube_root()
    for call, message in (
        (lambda: custom_root(solve, residual, [x, y], r), "2 numbers and residuals 1"),
        (lambda: custom_root(solve, residual, x, "r"), "expected fields and arrays"),
        (lambda: custom_root(solve, residual, x, r, linear="lu"), "linear is 'lu'; expected one of"),
        (lambda: custom_root(solve, residual, x, r, tol=0), "tol is 0; expected a positive number"),
        (lambda: custom_root(solve, residual, ti.field(ti.i32, ()), r), "expected fields and arrays of real numbers"),
        (lambda: custom_root(1, residual, x, r), "solve is 1; expected a function"),
        (lambda: custom_root(solve, None, x, r), "residual is None; expected a function"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            call()


@pytest.mark.mostly_sweep("reverse")
@pytest.mark.parametrize("call", [jacobian, vjp], ids=["forward", "reverse"])
def test_residuals_that_are_no_equations_of_the_unknowns(call):
    p, x, r, other, _, solve, residual = cube_root()
    constant = kernel_of("constant: r[None] = p[None] - 8.0", r=r, p=p)
    elsewhere = kernel_of("other[None] = x[None] - p[None]", other=other, x=x, p=p)

    def lost():
        x[None] = float("nan")

    for solver, equation, message in (
        (solve, constant, r"unknowns \(field x of shape \(\)\) is not read in .*constant"),
        (solve, elsewhere, "does not write the field r of shape"),
        (lost, residual, "The residuals of residual are not finite at the solution of lost"),
    ):
        root = custom_root(solver, equation, x, r)

        def run(root=root):
            root()

        with pytest.raises(InvalidArgumentError, match=message):
            call(run, p, x, *([1.0] if call is vjp else []))


@pytest.mark.mostly_sweep("reverse-cg")
@pytest.mark.parametrize("linear", ["direct", "cg", "gmres"])
@pytest.mark.parametrize("call", [jacobian, vjp], ids=["forward", "reverse"])
def test_unknowns_that_are_free_and_systems_that_are_not_symmetric(linear, call):
    """The right-hand side has a solution, so that iterations would end with one of many."""
    p, x, r = fields((), 2, 2)
    p[None] = 3.0

    def system(matrix):
        @ti.kernel
        def residual():
            for i in ti.static(range(2)):
                r[i] = matrix[i][0] * x[0] + matrix[i][1] * x[1] - (1 + i) * p[None]

        solve = lambda: x.from_numpy(np.linalg.lstsq(np.array(matrix), p[None] * np.array([1.0, 2.0]), rcond=None)[0])
        root = custom_root(solve, residual, x, r, linear=linear)
        return lambda: root()

    given = [np.ones(2)] if call is vjp else []
    with pytest.raises(InvalidArgumentError, match="is singular"):
        call(system(((1.0, 0.0), (2.0, 0.0))), p, x, *given)
    upper = system(((2.0, 1.0), (0.0, 4.0)))
    if linear == "cg" and given:  # forward mode knows by the residual whether it has found a solution
        with pytest.raises(InvalidArgumentError, match="not symmetric positive definite"):
            call(upper, p, x, *given)
    else:
        expected = np.array([0.25, 0.5])
        np.testing.assert_allclose(call(upper, p, x, *given), expected.sum() if given else expected, rtol=1e-8)


@pytest.mark.sweep
def test_second_derivatives_are_refused():
    p, x, r, _, y, solve, residual = cube_root()
    root = custom_root(solve, residual, x, r)
    energy = kernel_of("y[None] = x[None] ** 2", y=y, x=x)
    run = lambda: (root(), energy())
    with pytest.raises(te.UnsupportedError, match="Second derivatives of"):
        te.hessian(run, p, y)


def chain_equation(n=5):
    """``2.5 x[i] - x[i - 1] - x[i + 1] + 0.1 x[i]^3 = f[i] + y[i]``, where y is no parameter."""
    f, x, y, r, w, z = fields(n, n, n, n, n, n)
    f.from_numpy(np.cos(np.arange(n)))

    def solved():
        A, v = 2.5 * np.eye(n) - np.eye(n, k=1) - np.eye(n, k=-1), np.zeros(n)
        for _ in range(50):
            v = v - np.linalg.solve(A + np.diag(0.3 * v**2), A @ v + 0.1 * v**3 - f.to_numpy() - y.to_numpy())
        return v

    @ti.func
    def rest(i):
        left = x[i - 1] if i > 0 else 0.0
        right = x[i + 1] if i < n - 1 else 0.0
        return 0.1 * x[i] ** 3 - left - right - f[i] - y[i]

    return f, x, y, r, w, z, solved, rest


@pytest.mark.sweep
@pytest.mark.parametrize("is_python", [False, True])
def test_what_the_residual_overwrites_has_its_derivatives_afterwards(is_python):
    f, x, _, r, w, z, solved, rest = chain_equation()
    before = kernel_of("for i in w: w[i], r[i] = f[i] ** 2, 3 * f[i]", w=w, r=r, f=f)
    scratch = kernel_of("for i in w: w[i] = 2.5 * x[i]", w=w, x=x)
    equation = kernel_of("for i in x: r[i] = w[i] + rest(i)", x=x, r=r, w=w, rest=rest)

    def residual():
        if is_python:
            for i in range(w.shape[0]):
                w[i] = 2.5 * x[i]
        else:
            scratch()
        equation()

    after = kernel_of("for i in z: z[i] = w[i] * x[i] + r[i]", z=z, w=w, x=x, r=r)
    root = custom_root(lambda: x.from_numpy(solved()), residual, x, r)
    run = lambda: (before(), root(), after())
    expected = differences(run, f, z)
    np.testing.assert_allclose(jacobian(run, f, z), expected, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(vjp(run, f, z, np.eye(5)), expected, rtol=1e-6, atol=1e-8)
