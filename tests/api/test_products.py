"""Products with J: ``jvp``, ``vjp``, ``linear_operator``, compared with J itself."""

import math
import queue

import numpy as np
import pytest
import taichi as ti
from devices import real
from differences import central_differences, outputs, read, scalars, vectors
from kernel_texts import kernel_of, squares
from numpy.testing import assert_allclose, assert_array_equal

from taichi_ext import InvalidArgumentError, Jacobian, UnsupportedError, jacobian, jvp, linear_operator, vjp

pytestmark = pytest.mark.usefixtures("ti64")

rate = 1.5


@ti.data_oriented
class Program:
    """Fields, an array, an argument and a Python number; a loop, in-place steps, a returned value."""

    def __init__(self):
        self.x, self.z = scalars([0.5, 1.0, 2.0, 1.5]), vectors([[1.0, 2.0], [0.5, 1.0], [2.0, 0.3]])
        self.y, self.u = outputs(4), outputs(2)
        self.array = real(np.linspace(1.0, 2.0, 4))
        self.params = {"fields": [self.x, self.z], "array": self.array, "w": "w", "rate": "rate"}
        self.shapes = [(4,), (3, 2), (4,), (), ()]

    @ti.kernel
    def run(self, w: ti.f64, a: ti.types.ndarray(ti.f64, ndim=1)) -> ti.f64:
        total = 0.0
        for i in self.x:
            h = rate * self.x[i]
            for j in range(3):
                h += self.z[j].norm() * w * a[i]
            self.y[i] += h * h
        for i in self.u:
            self.u[i] = self.y[i] * self.y[i + 1]
        for i in range(4):
            total += ti.sin(self.y[i])
        return total

    @property
    def args(self):
        return (0.75, self.array)

    def J(self, wanted):
        """J of outputs as one matrix, and the state as it was."""
        before = [read(f) for f in (self.y, self.u)]
        blocks = jacobian(self.run, self.params, wanted, args=self.args)
        self.y.from_numpy(before[0])
        self.u.from_numpy(before[1])
        rows = [[*b["fields"], b["array"], b["w"], b["rate"]] for b in blocks]
        return np.block([[np.reshape(b, (rows[n][3].size, -1)) for b in row] for n, row in enumerate(rows)])

    def tangents(self, *lead):
        rng = np.random.default_rng(5)
        parts = [rng.standard_normal((*lead, *shape)) for shape in self.shapes]
        given = {"fields": parts[:2], "array": parts[2], "w": parts[3], "rate": parts[4]}
        return given, np.concatenate([p.reshape(*lead, math.prod(p.shape[len(lead) :])) for p in parts], axis=-1)


@pytest.fixture(scope="module")
def program(ti64):
    return Program()


class TestJvp:
    def test_none(self, program):
        given, _ = program.tangents(0)
        assert jvp(program.run, program.params, given, program.u, args=program.args).shape == (0, 2)


class TestVjpOfPrograms:
    """Cotangents times J, beside J itself."""

    def check(self, run, params, outs, start=lambda: None):
        """``vjp`` twice, with one cotangent and several, is the dense J, and leaves the outputs of one run."""
        rng = np.random.default_rng(5)
        start()
        J = jacobian(run, params, outs)
        after = [read(y) for y in outs]
        J = np.block([[b.reshape(read(y).size, -1) for b in row] for row, y in zip(J, outs)])
        for lead in ((), (3,)):
            start()
            v = [rng.standard_normal((*lead, *read(y).shape)) for y in outs]
            found = vjp(run, params, outs, v)
            flat = np.concatenate([a.reshape(*lead, -1) for a in v], axis=-1)
            given = np.concatenate([g.reshape(*lead, -1) for g in found], axis=-1)
            assert_allclose(given, flat @ J, rtol=1e-11, atol=1e-13)
            for y, wanted in zip(outs, after):
                assert_allclose(read(y), wanted, rtol=1e-14)

    @pytest.mark.sweep
    @pytest.mark.double_only("differences in float64")
    def test_rows_of_tangents_of_one_kernel_launched_several_times(self):
        """The entries of each launch are kept until the last one: the kernel writes them to the same memory again."""
        rng = np.random.default_rng(5)
        pose, x, angle, u, y = scalars([0.4, 0.7, 1.1]), scalars(np.linspace(0.5, 1.5, 80)), *map(outputs, (3, 6, 6))

        @ti.kernel
        def turn(n: ti.i32):
            ti.loop_config(serialize=True)
            for i in range(3):
                angle[i] = (0.3 + n) * pose[i] * pose[i]
                if i > 0:
                    angle[i] += angle[i - 1]
            for i in u:
                u[i] = x[i] * ti.sin(angle[i % 3])

        add = kernel_of("for i in y: y[i] += u[i] * u[i]", y=y, u=u)

        def run():
            y.fill(0.0)
            for n in range(4):
                turn(n)
                add()

        cotangent = rng.standard_normal(6)
        expected = central_differences(run, [pose, x], [y])[0]
        for found, J in zip(vjp(run, [pose, x], y, cotangent), expected):
            assert_allclose(found, cotangent @ J, rtol=1e-6, atol=1e-7)
        self.check(run, [pose, x], [y])


def neighbours():
    """A kernel of products of neighbours: the kernel, its parameter, its output."""
    x, y = scalars([1.0, 2.0, 3.0, 4.0]), outputs(3)
    k = kernel_of("for i in y: y[i] = x[i] * x[i + 1]", y=y, x=x)
    return k, x, y


class TestOperator:
    def test_products(self, program):
        rng = np.random.default_rng(5)
        J = program.J([program.y, program.u])
        A = linear_operator(program.run, program.params, [program.y, program.u], args=program.args, chunk_size=5)
        before = [read(program.y), read(program.u)]
        assert A.shape == J.shape
        assert_allclose(A.materialize(), J, rtol=1e-12)
        x, X = rng.standard_normal(16), rng.standard_normal((16, 3))
        assert_allclose(A @ x, J @ x, rtol=1e-11)
        assert_allclose(A @ X, J @ X, rtol=1e-11)
        u, U = rng.standard_normal(6), rng.standard_normal((6, 2))
        assert_allclose(A.T @ u, J.T @ u, rtol=1e-11)
        assert_allclose(A.rmatmat(U), J.T @ U, rtol=1e-11)
        assert_allclose(u @ (A @ x), x @ (A.T @ u), rtol=0, atol=1e-10 * np.abs(J).max())  # scipy's dot test
        for field, values in zip((program.y, program.u), before):
            assert_array_equal(read(field), values)  # products leave the state as it was

    def test_wrong_operands(self):
        A = linear_operator(*neighbours())
        products = [A.__matmul__, A.matvec, A.matmat, A.T.__matmul__, A.T.matvec, A.T.matmat, A.rmatvec, A.rmatmat]
        for given in (3, 1j, None, "v", [], [[1.0], [2.0, 3.0]], {}, np.ones(5), np.ones((4, 2, 2))):
            is_factor = isinstance(given, (int, complex))
            for product in products if is_factor else [*products, A.dot, A.T.dot]:
                with pytest.raises(InvalidArgumentError, match="The vector (is|has the shape) .*; expected"):
                    product(given)


class TestBadInput:
    def test_shapes_and_structures(self, program):
        args = program.args
        for tangents, words in [
            (np.ones(3), r"tangents has shape \(3,\); expected \(4,\), or \(n, 4\)"),
            ("w", "tangents is 'w'; expected an array of real numbers"),
            ([[1.0], [1.0, 2.0]], "tangents has another|expected an array"),
        ]:
            with pytest.raises(InvalidArgumentError, match=words):
                jvp(program.run, program.x, tangents, program.y, args=args)
        with pytest.raises(InvalidArgumentError, match="tangents has another structure than params"):
            jvp(program.run, [program.x, "w"], np.ones(4), program.y, args=args)
        with pytest.raises(InvalidArgumentError, match="tangents differ in their number"):
            jvp(program.run, [program.x, "w"], [np.ones((2, 4)), 1.0], program.y, args=args)
        with pytest.raises(InvalidArgumentError, match=r"cotangents\[1\] has shape \(3,\)"):
            vjp(program.run, program.x, [program.y, program.u], [np.ones(4), np.ones(3)], args=args)
        with pytest.raises(InvalidArgumentError, match="chunk_size is 0"):
            vjp(program.run, program.x, program.y, np.ones(4), args=args, chunk_size=0)

    def test_scipy_is_missing(self, program, monkeypatch):
        import taichi_ext.solvers.operator as operator

        operator._operator_class.cache_clear()
        monkeypatch.setitem(__import__("sys").modules, "scipy.sparse.linalg", None)
        with pytest.raises(ImportError, match=r"linear_operator needs SciPy.*\.\[scipy\]"):
            linear_operator(program.run, program.x, program.y, args=program.args)


class TestModes:
    """Rows of J in reverse mode are its columns in forward mode."""

    @staticmethod
    def programs():
        w, y, t = scalars(np.linspace(0.1, 0.9, 900)), outputs(2), outputs(900)
        nearest = ti.field(ti.i32, 900)
        nearest.from_numpy(np.arange(900, dtype=np.int32)[::-1].copy())

        @ti.kernel
        def absorb():
            for r in y:
                a = 0.0
                for k in range(900):
                    if a < 0.5:
                        a += (1 - a) * (1 - ti.exp(-0.01 * w[nearest[(7 * k + r) % 900]]))
                y[r] = a

        spread = kernel_of("for i in w: t[i] = w[i] * w[(i + 1) % 900]", w=w, t=t)
        total = kernel_of("for i in t: y[i % 2] += t[i] ** 2", t=t, y=y)

        def run():
            spread()
            total()

        return w, y, {"kernel": absorb, "pipeline": run}

    @pytest.mark.mostly_sweep("kernel")
    @pytest.mark.parametrize("name", ["kernel", "pipeline"])
    def test_rows_are_columns(self, name):
        w, y, programs = self.programs()
        found = {}
        for mode in ("forward", "reverse", None):
            plan = Jacobian(programs[name], w, y, mode=mode)
            for _ in range(2):
                y.fill(0)
                found[mode] = plan()
            state = read(y)
            out = np.zeros((2, 900))
            y.fill(0)
            assert plan(out=out) is out
            assert_array_equal(out, found[mode])
        assert_allclose(found["reverse"], found["forward"], rtol=1e-10, atol=1e-14)
        assert_allclose(found[None], found["forward"], rtol=1e-10, atol=1e-14)
        assert "reverse mode: J has 2 rows and 900 columns" in plan.explain()
        assert "_adjoint" in plan.source
        with pytest.raises(UnsupportedError, match=r"(mode=.forward.|single kernel)"):
            plan.export("never_written.py")
        y.fill(0)
        blocks = jacobian(programs[name], w, y, mode="reverse", chunk_size=1)
        assert_allclose(blocks, found["forward"], rtol=1e-10, atol=1e-14)
        assert_allclose(read(y), state, rtol=1e-14)  # of one run

    def test_nothing_between_params_and_outputs(self):
        """The first call of a pipeline finds that columns are less work."""
        w, y, runs = scalars(np.linspace(0.1, 0.9, 600)), outputs(2), queue.SimpleQueue()
        squares = kernel_of("for i in w: y[i % 2] += factor * w[i] ** 2", "factor: float", w=w, y=y)
        differences = kernel_of("for i in range(1, 600): y[i % 2] += (w[i] - w[i - 1]) ** 2", y=y, w=w)

        def run():
            runs.put(0)
            y.fill(0)
            squares(0.5)
            differences()

        w0 = np.linspace(0.1, 0.9, 600)
        steps, expected = np.diff(w0), np.zeros((2, 600))
        for i in range(600):
            expected[i % 2, i] += w0[i]
            if i:
                expected[i % 2, i - 1 : i + 1] += 2 * steps[i - 1] * np.array([-1, 1])
        plan = Jacobian(run, w, y)
        for _ in range(3):
            assert_allclose(plan(), expected, rtol=1e-10)
        assert plan.explain().startswith("forward mode from the second call on: only outputs depend on params")
        assert "_adjoint" not in plan.source
        assert runs.qsize() == 3

    @pytest.mark.parametrize("rows", [32, 200])
    def test_more_rows(self, rows):
        """Reverse mode is chosen for tens of rows, where tangents between kernels would have many columns."""
        n = 32 * rows
        w, t, y = scalars(np.linspace(0.1, 0.9, n)), outputs(n), outputs(rows)
        square = squares(w, t)
        add = kernel_of("for i in t: y[i % rows] += t[i] * w[i]", t=t, y=y, rows=rows, w=w)

        def run():
            square()
            add()

        plan = Jacobian(run, w, y)
        own = np.arange(n) % rows == np.arange(rows)[:, None]
        for _ in range(2):
            y.fill(0)
            assert_allclose(plan(), 3 * np.linspace(0.1, 0.9, n) ** 2 * own, rtol=1e-10)
        assert plan.explain().startswith(f"reverse mode: J has {rows} rows")

    @pytest.mark.mostly_sweep("8-Python")
    @pytest.mark.parametrize("name", ["kernels", "Python"])
    @pytest.mark.parametrize("readers", [8, 4096])
    def test_few_numbers_between_params_and_outputs(self, name, readers):
        """Tangents of one sum have all columns, which is little work where few iterations read it."""
        w, s, y = scalars(np.linspace(0.1, 0.9, 1024)), outputs(1), outputs(8)

        @ti.kernel
        def add() -> float:
            total = 0.0
            for i in range(1024):
                total += w[i] ** 2
            return total

        spread = kernel_of(
            "for r in range(readers): y[r % 8] += ti.sin(factor * (r % 8))", "factor: float", readers=readers, y=y
        )
        add_in_place = kernel_of("for i in w: s[0] += w[i] ** 2", w=w, s=s)
        spread_in_place = kernel_of(
            "for r in range(readers): y[r % 8] += ti.sin(s[0] * (r % 8))", readers=readers, y=y, s=s
        )

        def run():
            y.fill(0)
            s.fill(0)
            if name == "Python":
                spread(add())
            else:
                add_in_place()
                spread_in_place()

        plan, w0, r = Jacobian(run, w, y), np.linspace(0.1, 0.9, 1024), np.arange(8.0)
        expected = readers / 8 * (r * np.cos((w0 @ w0) * r))[:, None] * 2 * w0
        for _ in range(3):
            assert_allclose(plan(), expected, rtol=1e-10, atol=1e-9)
        assert plan.explain().startswith(
            "forward mode from the second" if readers == 8 else "reverse mode: J has 8 rows"
        )

    def test_loops_of_known_length_count_for_each_iteration(self):
        """A line that computes one column each time it runs is no reason for rows, however often it runs."""
        w, y = scalars(np.linspace(0.1, 0.9, 600)), outputs(2)

        @ti.kernel
        def sums():
            for r in y:
                s = 0.0
                for k in range(600):
                    s += w[k] * ti.sin(0.1 * k + r)
                y[r] = s * s

        plan = Jacobian(sums, w, y)
        assert_allclose(plan(), jacobian(sums, w, y, mode="reverse"), rtol=1e-10, atol=1e-14)
        assert "reverse mode" not in plan.explain()

    def test_the_choice_runs_a_pipeline_once(self):
        """What Python does in it is done once, as in a plain run: it has no undo."""
        w, y, u = scalars(np.linspace(0.1, 0.9, 600)), outputs(2), outputs(600)
        factors, runs = iter([2.0, 3.0, 5.0, 7.0]), queue.SimpleQueue()
        square = squares(w, u)
        add = kernel_of("for i in u: y[i % 2] += factor * u[i]", "factor: float", u=u, y=y)

        def run():
            runs.put(0)
            y.fill(0)
            square()
            add(next(factors))

        w0, own = np.linspace(0.1, 0.9, 600), np.arange(600) % 2 == np.arange(2)[:, None]
        plan = Jacobian(run, w, y)
        assert_allclose(plan(), 2 * 2 * w0 * own, rtol=1e-10, atol=1e-14)
        assert_allclose(plan(), 3 * 2 * w0 * own, rtol=1e-10, atol=1e-14)
        assert runs.qsize() == 2

    @pytest.mark.sweep
    def test_bad_input(self):
        k, x, y = neighbours()
        with pytest.raises(InvalidArgumentError, match="mode is 'backward'; expected one of 'forward', 'reverse'"):
            jacobian(k, x, y, mode="backward")
        with pytest.raises(InvalidArgumentError, match="mode='reverse' computes rows"):
            jacobian(k, x, y, mode="reverse", format="csr")
