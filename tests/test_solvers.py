"""``normal_equations`` and ``least_squares``, compared with J, and with SciPy on functions written by hand."""

import logging
import sys

import devices
import numpy as np
import pytest
import taichi as ti
from differences import outputs, read, scalars, vectors
from numpy.testing import assert_allclose, assert_array_equal

from taichi_ext import InvalidArgumentError, least_squares, linear_operator, normal_equations, value_and_jacobian
from taichi_ext.api import evaluation

optimize = pytest.importorskip("scipy.optimize")
sparse = pytest.importorskip("scipy.sparse")
pytestmark = pytest.mark.usefixtures("ti64")

TIMES = np.linspace(0.0, 2.0, 12)
DATA = 2.5 * np.exp(-1.3 * TIMES) + 0.01 * np.sin(40 * TIMES)


class Fit:
    """A decay with an offset; the kernel adds to its residuals, so that a second run needs them cleared."""

    def __init__(self, offset=0.3):
        self.decay, self.shift = scalars([1.0, 0.5]), scalars([offset])
        self.r, self.runs = outputs(12), outputs()
        times, data = scalars(TIMES), scalars(DATA)
        decay, shift, r, runs = self.decay, self.shift, self.r, self.runs

        @ti.kernel
        def compare():
            for i in r:
                r[i] += decay[0] * ti.exp(-decay[1] * times[i]) + shift[0] - data[i]
            runs[None] += 1

        self.kernel = compare
        self.params = [self.decay, self.shift]

    @staticmethod
    def residuals(x):
        return x[0] * np.exp(-x[1] * TIMES) + x[2] - DATA

    @staticmethod
    def jacobian(x):
        e = np.exp(-x[1] * TIMES)
        return np.stack([e, -TIMES * x[0] * e, np.ones(12)], axis=1)


@pytest.fixture(scope="module")
def fit(ti64):
    return Fit()


@pytest.fixture(autouse=True)
def start(fit):
    fit.decay.from_numpy(np.array([1.0, 0.5]))
    fit.shift.from_numpy(np.array([0.3]))
    fit.r.fill(0.0)
    fit.runs[None] = 0.0


class TestNormalEquations:
    @pytest.mark.parametrize("max_memory", [None, 2 * 12 * 8 * 2, 12 * 8 * 2, 1])
    def test_dense(self, fit, max_memory):
        x = np.array([1.0, 0.5, 0.3])
        J, r = fit.jacobian(x), fit.residuals(x)
        found = normal_equations(fit.kernel, fit.params, fit.r, max_memory=max_memory)
        assert_allclose(found.JtJ, J.T @ J, rtol=1e-12)
        assert_allclose(found.Jtr, J.T @ r, rtol=1e-12)
        assert_allclose(found.rtr, r @ r)
        assert_allclose(read(fit.r), r)  # one run
        assert float(fit.runs[None]) == 1.0
        decay, shift = found.split(np.arange(3.0))
        assert_array_equal(decay, [0.0, 1.0])
        assert_array_equal(shift, [2.0])

    def test_weights_and_types(self, fit):
        x = np.array([1.0, 0.5, 0.3])
        J, r = fit.jacobian(x), fit.residuals(x)
        w = np.linspace(0.0, 2.0, 12)
        for format in (None, "csr"):
            fit.r.fill(0.0)
            found = normal_equations(fit.kernel, fit.params, fit.r, w, dtype=np.float64, format=format)
            JtJ = found.JtJ.toarray() if format else found.JtJ
            assert_allclose(JtJ, J.T @ (w[:, None] * J), rtol=1e-12)
            assert_allclose(found.Jtr, J.T @ (w * r), rtol=1e-12)
            assert_allclose(found.rtr, r @ (w * r))

    def test_several_blocks_of_several_outputs(self):
        """Five blocks: each pair of columns is met once, whatever the order."""
        p, a, b = scalars(np.linspace(0.5, 2.0, 9)), outputs(4), vectors(np.zeros((3, 2)))

        @ti.kernel
        def k():
            for i in a:
                a[i] = p[i] * p[i + 5] + p[8]
            for i in b:
                b[i] = ti.Vector([p[i] ** 2, p[i + 1] * p[i + 6]])

        (va, vb), (Ja, Jb) = value_and_jacobian(k, p, [a, b])
        J, r = np.concatenate([Ja, Jb.reshape(6, 9)]), np.concatenate([va, vb.reshape(-1)])
        for columns in (1, 2, 4):
            found = normal_equations(k, p, [a, b], max_memory=2 * columns * 10 * 8)
            assert_allclose(found.JtJ, J.T @ J, rtol=1e-12)
            assert_allclose(found.Jtr, J.T @ r, rtol=1e-12)

    def test_single_precision(self):
        p, r = scalars([1.0, 2.0], dtype=ti.f32), outputs(3, dtype=ti.f32)

        @ti.kernel
        def k():
            for i in r:
                r[i] = p[0] * (i + 1) + p[1]

        for format in (None, "csr"):
            for weights in (None, np.ones(3)):
                found = normal_equations(k, p, r, weights, format=format)
                assert found.JtJ.dtype == found.Jtr.dtype == np.float32
                found = normal_equations(k, p, r, weights, dtype=np.float64, format=format)
                assert found.JtJ.dtype == found.Jtr.dtype == np.float64

    @pytest.mark.parametrize("format", [None, "csr"])
    def test_sums_in_double_precision(self, format):
        """What kernels compute in float32 is exact here; its squares are not, in float32."""
        size = 3000
        p, r = scalars([1.0, 1.0], dtype=ti.f32), outputs(size, dtype=ti.f32)

        @ti.kernel
        def k():
            for i in r:
                r[i] = p[0] * (4097.0 + i) + p[1]

        J = np.stack([4097.0 + np.arange(size), np.ones(size)], axis=1)
        found = normal_equations(k, p, r, dtype=np.float64, format=format)
        assert_array_equal(found.JtJ.toarray() if format else found.JtJ, J.T @ J)
        assert_array_equal(found.Jtr, J.T @ J.sum(axis=1))

    def test_bad_input(self, fit):
        for kwargs, words in [
            ({"weights": np.ones(5)}, r"weights has shape \(5,\); expected \(12,\)\.$"),
            ({"weights": -np.ones(12)}, "weights has entries that are negative"),
            ({"weights": np.ones((2, 12))}, r"weights has shape \(2, 12\); expected \(12,\)\.$"),
            ({"dtype": int}, "dtype is <class 'int'>"),
            ({"format": "coo"}, "format is 'coo'"),
            ({"max_memory": 0}, "max_memory is 0"),
        ]:
            with pytest.raises(InvalidArgumentError, match=words):
                normal_equations(fit.kernel, fit.params, fit.r, **kwargs)
        with pytest.raises(InvalidArgumentError, match=r"vector has shape \(2,\); expected \(3,\)"):
            normal_equations(fit.kernel, fit.params, fit.r).split(np.ones(2))

    def test_a_matrix_that_does_not_fit(self, fit, monkeypatch):
        equations = sys.modules["taichi_ext.solvers.normal_equations"]
        monkeypatch.setattr(equations, "available_memory", lambda: 71.0)
        with pytest.raises(InvalidArgumentError, match=r"J\^T J has 3 x 3 entries.*use format='csr'"):
            normal_equations(fit.kernel, fit.params, fit.r)
        assert float(fit.runs[None]) == 0.0


class TestLeastSquares:
    @pytest.mark.parametrize("options", [{}, {"method": "lm"}, {"format": "csr", "tr_solver": "lsmr"}], ids=str)
    def test_solution(self, fit, options):
        wanted = optimize.least_squares(fit.residuals, [1.0, 0.5, 0.3], fit.jacobian)
        result = least_squares(fit.kernel, fit.params, fit.r, **options)
        assert result.success
        assert_allclose(result.x, wanted.x, rtol=1e-5)
        assert_array_equal(np.concatenate([read(p) for p in fit.params]), result.x)
        assert_allclose(read(fit.r), fit.residuals(result.x), atol=1e-13)  # one plain run there
        assert float(fit.runs[None]) == 1.0

    def test_bounds_and_losses(self, fit):
        start = [1.0, 0.5, 0.3]
        wanted = optimize.least_squares(
            fit.residuals, start, fit.jacobian, bounds=([-np.inf, -np.inf, 0.1], [2.0, 2.0, 1.0]), loss="soft_l1"
        )
        bounds = ([-np.inf, np.array([0.1])], [np.array([2.0, 2.0]), 1.0])
        result = least_squares(fit.kernel, fit.params, fit.r, bounds=bounds, loss="soft_l1")
        assert_allclose(result.x, wanted.x, rtol=1e-6)
        assert result.active_mask.any()

    def test_start_on_a_bound_that_is_rounded(self):
        x, r = ti.field(ti.f32, shape=2), ti.field(ti.f32, shape=3)

        @ti.kernel
        def k():
            for i in r:
                r[i] = x[0] * (i + 1.0) + x[1] - 5.0

        x.from_numpy(np.array([0.1, 0.05], np.float32))
        assert float(x[0]) > 0.1
        for _ in range(2):  # the solution is at both bounds, from which the second call starts
            result = least_squares(k, x, r, bounds=(0.0, 0.1))
            assert (result.x <= 0.1).all()
            assert_array_equal(read(x), np.full(2, 0.1, np.float32))

    def test_scales_like_parameters(self, fit):
        flat = optimize.least_squares(fit.residuals, [1.0, 0.5, 0.3], fit.jacobian, x_scale=[2.0, 0.5, 10.0])
        params = dict(zip("ab", fit.params, strict=True))
        result = least_squares(fit.kernel, params, fit.r, x_scale={"a": np.array([2.0, 0.5]), "b": 10.0})
        assert result.nfev == flat.nfev
        assert_allclose(result.x, flat.x, rtol=1e-9)
        least_squares(fit.kernel, params, fit.r, x_scale=[2.0, 0.5, 10.0])  # as SciPy takes them
        least_squares(fit.kernel, params, fit.r, x_scale="jac")

    @pytest.mark.chosen_only("counts the runs", "--chunk-size")
    def test_each_point_is_one_run(self, fit):
        runs = []

        def run():
            runs.append(None)
            fit.kernel()

        result = least_squares(run, fit.params, fit.r)
        assert len(runs) == result.nfev + 1  # and one at the end

    @pytest.mark.parametrize("format", [None, "csr"])
    def test_a_point_in_several_runs(self, fit, format, monkeypatch):
        """Tangents that do not fit into memory: each run of a point begins at that point, not at the start."""
        monkeypatch.setattr(evaluation, "available_memory", lambda: 2.0)
        middle = ti.field(ti.f64, fit.r.shape)
        runs = []

        @ti.kernel
        def square():
            for i in fit.r:
                fit.r[i] = fit.r[i] * (1 + middle[i])
                middle[i] = fit.r[i] / (1 + middle[i])

        def run():
            runs.append(None)
            fit.kernel()
            square()

        wanted = optimize.least_squares(fit.residuals, [1.0, 0.5, 0.3], fit.jacobian)
        result = least_squares(run, fit.params, fit.r, format=format)
        assert_allclose(result.x, wanted.x, rtol=1e-5)
        assert_array_equal(np.concatenate([read(p) for p in fit.params]), result.x)
        assert format is not None or len(runs) > result.nfev + 1

    def test_progress(self, fit, capsys, caplog):
        told = []
        result = least_squares(fit.kernel, fit.params, fit.r, progress=lambda n, cost: told.append((n, cost)))
        assert [n for n, _ in told] == list(range(result.njev))
        assert_allclose(told[-1][1], result.cost, rtol=1e-6)
        start_values = [np.array([1.0, 0.5]), np.array([0.3])]
        for field, values in zip(fit.params, start_values):
            field.from_numpy(values)
        fit.r.fill(0.0)
        least_squares(fit.kernel, fit.params, fit.r, progress=True)
        assert "iteration 0: cost" in capsys.readouterr().err
        with caplog.at_level(logging.INFO, "taichi_ext"):
            least_squares(fit.kernel, fit.params, fit.r)
        assert "iteration 0: cost" in caplog.text

    def test_parameters_that_the_kernel_changes(self):
        x, target = scalars([0.5, 0.2]), scalars([4.0, 9.0])

        @ti.kernel
        def square():
            for i in x:
                x[i] = x[i] ** 2

        r = outputs(2)

        @ti.kernel
        def compare():
            for i in r:
                r[i] = x[i] - target[i]

        def run():
            square()
            compare()

        least_squares(run, x, r)
        assert_allclose(read(x), [2.0, 3.0], rtol=1e-6)

    def test_field_of_one_number(self):
        x, r = scalars(0.5), outputs(2)

        @ti.kernel
        def k():
            for i in r:
                r[i] = x[None] ** 2 - 4.0

        least_squares(k, {"x": x}, r, bounds=({"x": 0.0}, {"x": 5.0}))
        assert_allclose(float(x[None]), 2.0, rtol=1e-6)

    def test_arrays(self):
        x, r = devices.real([0.5, 0.2]), devices.real(np.zeros(2))

        @ti.kernel
        def k(a: ti.types.ndarray(ti.f64, ndim=1), b: ti.types.ndarray(ti.f64, ndim=1)):
            for i in b:
                b[i] = a[i] ** 2 - 4.0 - 5.0 * i

        least_squares(k, x, r, args=(x, r))
        assert_allclose(x, [2.0, 3.0], rtol=1e-6)

    def test_a_failure_leaves_the_state_as_it_was(self, fit):
        fit.decay.from_numpy(np.array([np.inf, 0.5]))
        with pytest.raises(ValueError, match="finite"):
            least_squares(fit.kernel, fit.params, fit.r)
        assert_array_equal(read(fit.r), np.zeros(12))
        assert_array_equal(read(fit.decay), [np.inf, 0.5])

    def test_bad_input(self, fit):
        for kwargs, words in [
            ({"bounds": 3}, "bounds is 3; expected a pair"),
            ({"bounds": ([0.0, np.ones(4)], np.inf)}, r"bounds\[0\]\[1\] has shape \(4,\)"),
            ({"bounds": (np.ones((3, 2)), 5.0)}, r"bounds\[0\] has another structure"),
            ({"bounds": (2.0, 5.0)}, r"entry \[0\] of params\[0\] .* is 1, and bounds gives 2 to 5; start within"),
            ({"bounds": ([0.0, 2.0], 5.0)}, r"entry \[0\] of params\[1\] .* is 0.3, and bounds gives 2 to 5"),
            (
                {"bounds": (0.0, [5.0, 0.0])},
                r"entry \[0\] of params\[1\] .* bounds gives 0 to 0; expected less to more",
            ),
            ({"diff_step": 0.1}, "'diff_step' is no option of least_squares"),
            ({"jac": "2-point"}, "'jac' is no option of least_squares"),
            ({"progress": "yes"}, "progress is 'yes'"),
            ({"format": "bsr"}, "format is 'bsr'"),
        ]:
            with pytest.raises(InvalidArgumentError, match=words):
                least_squares(fit.kernel, fit.params, fit.r, **kwargs)

        assert float(fit.runs[None]) == 0.0

        @ti.kernel
        def k(a: ti.f64) -> ti.f64:
            return a * a

        with pytest.raises(InvalidArgumentError, match=r"argument 'a'\) is a number .*put it in a field"):
            least_squares(k, "a", args=(1.0,))

    @pytest.mark.parametrize("format", [None, "csr"])
    def test_numbers_that_are_not_finite(self, format):
        x, r = scalars([4.0, 0.0]), outputs(2, 3)

        @ti.kernel
        def k():
            for i, j in r:
                r[i, j] = ti.sqrt(x[i]) * (j + 1) + ti.sqrt(x[0])

        with pytest.raises(InvalidArgumentError, match=r"J of entry \[1, 0\] of .* has the entry inf; check_jacobian"):
            least_squares(k, x, r, format=format)
        assert_array_equal(read(r), np.zeros((2, 3)))
        x[1] = -1.0
        with pytest.raises(InvalidArgumentError, match=r"entry \[1, 0\] of .* is nan at the start; check_jacobian"):
            least_squares(k, x, r, format=format)
        x[1] = np.nan
        with pytest.raises(InvalidArgumentError, match=r"entry \[1\] of params .* is nan; start at finite numbers"):
            least_squares(k, x, r, format=format)
        assert_array_equal(read(r), np.zeros((2, 3)))

    def test_kernels_that_cannot_run_again(self, fit):
        x, r = scalars([1.0, 2.0]), outputs(2)

        @ti.kernel
        def draw():
            for i in r:
                r[i] = x[i] * ti.random()

        words = "draws random numbers .* into a field"
        with pytest.raises(InvalidArgumentError, match=f"^least_squares runs the kernels once for each.*{words}"):
            least_squares(draw, x, r)
        assert_array_equal(read(x), [1.0, 2.0])
        with pytest.raises(
            InvalidArgumentError, match="draws random numbers, so that each product would be with another J"
        ):
            linear_operator(draw, x, r) @ np.ones(2)

    def test_scipy_is_missing(self, fit, monkeypatch):
        monkeypatch.setitem(sys.modules, "scipy.optimize", None)
        with pytest.raises(ImportError, match=r"least_squares needs SciPy.*taichi-ext\[sparse\]"):
            least_squares(fit.kernel, fit.params, fit.r)
