"""``normal_equations`` and ``least_squares``, compared with J, and with SciPy on functions written by hand."""

import logging
import queue
import sys

import devices
import numpy as np
import pytest
import taichi as ti
from differences import outputs, read, scalars, vectors, write
from kernel_texts import kernel_of
from numpy.testing import assert_allclose, assert_array_equal

from taichi_ext import InvalidArgumentError, least_squares, linear_operator, normal_equations
from taichi_ext.api.runs import evaluation

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
    start_at(fit)


def start_at(fit):
    fit.decay.from_numpy(np.array([1.0, 0.5]))
    fit.shift.from_numpy(np.array([0.3]))
    fit.r.fill(0.0)
    fit.runs[None] = 0.0


class TestNormalEquations:
    @pytest.mark.mostly_sweep("384", "1")
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
        fit.r.fill(0.0)
        found = normal_equations(fit.kernel, fit.params, {"a": fit.r, "b": fit.r}, {"a": w, "b": None})
        assert_allclose(found.rtr, r @ ((1 + w) * r))

    def test_weights_of_some_residuals_in_another_order(self):
        p, a, b = scalars([2.0]), outputs(2), outputs(3)

        @ti.kernel
        def k():
            for i in a:
                a[i] = p[0]
            for i in b:
                b[i] = p[0] * i

        w = np.array([0.0, 2.0, 3.0])
        for weights, JtJ in (({"b": w, "a": None}, 16), ({"b": None, "a": 3 * np.ones(2)}, 11)):
            assert_allclose(normal_equations(k, p, {"a": a, "b": b}, weights).JtJ, [[JtJ]])

    def test_single_precision(self):
        p, r = scalars([1.0, 2.0], dtype=ti.f32), outputs(3, dtype=ti.f32)
        k = kernel_of("for i in r: r[i] = p[0] * (i + 1) + p[1]", r=r, p=p)
        for format in (None, "csr"):
            for weights in (None, np.ones(3)):
                found = normal_equations(k, p, r, weights, format=format)
                assert found.JtJ.dtype == found.Jtr.dtype == np.float32
                found = normal_equations(k, p, r, weights, dtype=np.float64, format=format)
                assert found.JtJ.dtype == found.Jtr.dtype == np.float64

    @pytest.mark.mostly_sweep("csr")
    @pytest.mark.parametrize("format", [None, "csr"])
    def test_what_is_not_finite(self, format):
        """A residual, also one of weight 0, or an entry of J where the residual is finite: sqrt at 0."""
        p, r = scalars([1.0, 4.0]), outputs(2)
        k = kernel_of("for i in r: r[i] = ti.sqrt(p[i])", r=r, p=p)
        for value, message in (
            (-1.0, r"entry \[1\] of outputs .field r .* is nan"),
            (0.0, r"entry \[1\] of .*J\^T J, of params .field p .* is inf"),
        ):
            p[1] = value
            with pytest.raises(InvalidArgumentError, match=message):
                normal_equations(k, p, r, [1.0, 0.0] if value else None, format=format)

    @pytest.mark.mostly_sweep("csr")
    @pytest.mark.parametrize("format", [None, "csr"])
    def test_sums_in_double_precision(self, format):
        """What kernels compute in float32 is exact here; its squares are not, in float32."""
        size = 3000
        p, r = scalars([1.0, 1.0], dtype=ti.f32), outputs(size, dtype=ti.f32)
        k = kernel_of("for i in r: r[i] = p[0] * (4097.0 + i) + p[1]", r=r, p=p)
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
            ({"dtype": fit.r}, "dtype is <[a-z]+.field>"),
            ({"format": "coo"}, "format is 'coo'"),
            ({"max_memory": 0}, "max_memory is 0"),
        ]:
            with pytest.raises(InvalidArgumentError, match=words):
                normal_equations(fit.kernel, fit.params, fit.r, **kwargs)
        with pytest.raises(InvalidArgumentError, match=r"vector has shape \(2,\); expected \(3,\)"):
            normal_equations(fit.kernel, fit.params, fit.r).split(np.ones(2))

    def test_a_matrix_that_does_not_fit(self, fit, monkeypatch):
        monkeypatch.setattr("taichi_ext.runtime.memory.shadows.available_memory", lambda: 71.0)
        with pytest.raises(InvalidArgumentError, match=r"J\^T J has 3 x 3 entries.*use format='csr'"):
            normal_equations(fit.kernel, fit.params, fit.r)
        assert float(fit.runs[None]) == 0.0


class TestLeastSquares:
    @pytest.mark.mostly_sweep("{'method': 'trf', 'format': 'csr', 'tr_solver': 'lsmr'}")
    @pytest.mark.parametrize(
        "options", [{}, {"format": "csr"}, {"method": "trf", "format": "csr", "tr_solver": "lsmr"}], ids=str
    )
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
        options = {"loss": "soft_l1", "ftol": 1e-13, "xtol": 1e-13}
        limits = ([-np.inf, -np.inf, 0.1], [2.0, 2.0, 1.0])
        wanted = optimize.least_squares(fit.residuals, start, fit.jacobian, bounds=limits, **options)
        bounds = ([-np.inf, np.array([0.1])], [np.array([2.0, 2.0]), 1.0])
        result = least_squares(fit.kernel, fit.params, fit.r, bounds=bounds, **options)
        assert_allclose(result.x, wanted.x, rtol=1e-5)
        assert result.x[0] == 2.0  # which trf does not reach

    def test_start_on_a_bound_that_is_rounded(self):
        x, r = ti.field(ti.f32, shape=2), ti.field(ti.f32, shape=3)
        k = kernel_of("for i in r: r[i] = x[0] * (i + 1.0) + x[1] - 5.0", r=r, x=x)
        x.from_numpy(np.array([0.1, 0.05], np.float32))
        assert float(x[0]) > 0.1
        for _ in range(2):  # the solution is at both bounds, from which the second call starts
            result = least_squares(k, x, r, bounds=(0.0, 0.1))
            assert (result.x <= 0.1).all()
            assert_array_equal(read(x), np.full(2, 0.1, np.float32))

    def test_scales_like_parameters(self, fit):
        flat = optimize.least_squares(fit.residuals, [1.0, 0.5, 0.3], fit.jacobian, x_scale=[2.0, 0.5, 10.0])
        params = dict(zip("ab", fit.params, strict=True))
        options = {"method": "trf", "x_scale": {"a": np.array([2.0, 0.5]), "b": 10.0}}
        result = least_squares(fit.kernel, params, fit.r, **options)
        assert result.nfev == flat.nfev
        assert_allclose(result.x, flat.x, rtol=1e-9)
        for given in ({"method": "trf", "x_scale": [2.0, 0.5, 10.0]}, {"method": "dogbox", "x_scale": "jac"}):
            start_at(fit)
            assert_allclose(
                least_squares(fit.kernel, params, fit.r, **given).x, flat.x, rtol=1e-6
            )  # as SciPy takes them

    @pytest.mark.chosen_only("counts the runs", "--chunk-size")
    def test_each_point_is_one_run(self, fit):
        runs = queue.SimpleQueue()

        def run():
            runs.put(None)
            fit.kernel()

        result = least_squares(run, fit.params, fit.r)
        assert runs.qsize() == result.nfev + 1  # and one at the end

    @pytest.mark.mostly_sweep("csr")
    @pytest.mark.parametrize("format", [None, "csr"])
    def test_a_point_in_several_runs(self, fit, format, monkeypatch):
        """Tangents that do not fit into memory: each run of a point begins at that point, not at the start."""
        monkeypatch.setattr(evaluation, "available_memory", lambda: 2.0)
        middle = ti.field(ti.f64, fit.r.shape)
        runs = queue.SimpleQueue()
        text = "for i in fit.r: fit.r[i] = fit.r[i] * (1 + middle[i]); middle[i] = fit.r[i] / (1 + middle[i])"
        square = kernel_of(text, fit=fit, middle=middle)

        def run():
            runs.put(None)
            fit.kernel()
            square()

        wanted = optimize.least_squares(fit.residuals, [1.0, 0.5, 0.3], fit.jacobian)
        result = least_squares(run, fit.params, fit.r, format=format)
        assert_allclose(result.x, wanted.x, rtol=1e-5)
        assert_array_equal(np.concatenate([read(p) for p in fit.params]), result.x)
        assert format is not None or runs.qsize() > result.nfev + 1

    @pytest.mark.mostly_sweep("trf")
    @pytest.mark.parametrize("method", ["lm", "trf"])
    def test_progress(self, fit, capsys, caplog, method):
        """The cost is the robust one; of SciPy's methods, only points that are accepted are told.

        SciPy before 1.16 scales what it is given in place, which the result must not hold.
        """
        told = []
        options = {"method": method, "loss": "cauchy", "f_scale": 0.1}
        result = least_squares(fit.kernel, fit.params, fit.r, callback=told.append, progress=True, **options)
        assert_allclose(result.fun, fit.residuals(result.x), atol=1e-12)
        assert_allclose(result.jacobian, fit.jacobian(result.x), atol=1e-12)
        rho = 0.01 * np.log1p((result.fun / 0.1) ** 2)
        assert_allclose(told[-1].cost, 0.5 * rho.sum(), rtol=1e-12)
        assert_array_equal(told[-1].x, result.x)
        assert [line.number for line in told] == list(range(len(told))) and told == result.history
        accepted = [line.cost for line in told if line.change > 0 or line.number == 0]
        assert (np.diff(accepted) < 0).all() and len(accepted) == result.njev
        changes = [line.change for line in told if line.change > 0]
        assert len(changes) > 2
        assert_allclose(changes, -np.diff(accepted), rtol=1e-6, atol=1e-12)
        lines = capsys.readouterr().err.splitlines()
        assert lines[0].split()[:4] == ["iter", "cost", "cost_change", "|gradient|"] and len(lines) == len(told) + 1
        assert lines[1].split()[1] == f"{told[0].cost:.8e}" and lines[-1] == str(told[-1])
        assert result.message in str(result)
        with caplog.at_level(logging.INFO, "taichi_ext"):
            least_squares(fit.kernel, fit.params, fit.r, method=method, max_iterations=0)
        assert str(result.history[0])[:4] == caplog.messages[-1][:4] == "   0"

    @pytest.mark.parametrize("most", [1, 3])
    def test_a_limit_of_points_counts_the_start(self, fit, most):
        result = least_squares(fit.kernel, fit.params, fit.r, max_nfev=most)
        assert len(result.history) == result.nfev == most

    @pytest.mark.mostly_sweep("lm")
    @pytest.mark.parametrize("method", ["lm", "trf"])
    def test_the_best_point_stays(self, fit, method):
        """After the callback's end, and after its exception, the fields hold the best point, run once."""

        def stop(line):
            seen.append(line.x)
            return len(seen) == 4

        def interrupt(line):
            if stop(line):
                raise KeyboardInterrupt

        for callback in (stop, interrupt):
            start_at(fit)
            seen = []
            if callback is stop:
                result = least_squares(fit.kernel, fit.params, fit.r, method=method, callback=callback)
                assert (result.status, result.success) == (-1, False) and "callback" in result.message
            else:
                with pytest.raises(KeyboardInterrupt):
                    least_squares(fit.kernel, fit.params, fit.r, method=method, callback=callback)
            assert len(seen) == 4
            assert_array_equal(np.concatenate([read(p) for p in fit.params]), seen[-1])
            assert_allclose(read(fit.r), fit.residuals(seen[-1]), atol=1e-13)
            assert float(fit.runs[None]) == 1.0

    @pytest.mark.mostly_sweep(every=2)
    @pytest.mark.parametrize("format", [None, "csr"])
    @pytest.mark.parametrize("loss", ["linear", "soft_l1", "huber", "cauchy", "arctan", "tukey", "mixed"])
    def test_losses_and_weights(self, fit, loss, format):
        """The minimum of the cost that the documentation states, by another program."""
        w, s = np.linspace(0.5, 2.0, 12), 0.02
        rho = {
            "linear": lambda z: z,
            "soft_l1": lambda z: 2 * (np.sqrt(1 + z) - 1),
            "huber": lambda z: np.where(z <= 1, z, 2 * np.sqrt(z) - 1),
            "cauchy": np.log1p,
            "arctan": np.arctan,
            "tukey": lambda z: (1 - np.maximum(1 - z, 0) ** 3) / 3,
            "mixed": lambda z: z + 0.5 * z**2,
        }
        cost = lambda x: 0.5 * (s**2 * rho[loss](w * fit.residuals(x) ** 2 / s**2)).sum()
        own = lambda z: np.stack([z + 0.5 * z**2, 1 + z, np.ones_like(z)])
        for p, values in zip(fit.params, [[2.4, 1.2], [0.02]]):
            p.from_numpy(np.array(values))
        given = [own] if loss == "mixed" else [loss]
        options = {"loss": given, "f_scale": [s], "weights": [w], "ftol": 1e-15, "format": format}
        result = least_squares(fit.kernel, fit.params, [fit.r], **options)
        assert_allclose(result.cost, cost(result.x), rtol=1e-12)
        h = 1e-5
        slopes = [(cost(result.x + h * e) - cost(result.x - h * e)) / (2 * h) for e in np.eye(3)]
        assert_allclose(slopes, 0, atol=1e-6 * np.abs(result.jacobian).sum() * s)
        assert result.success and result.cost < result.history[0].cost

    @pytest.mark.sweep
    def test_losses_of_norms(self):
        """A vector counts by its norm: the minimum is the same in turned coordinates."""
        points = np.array([[0.0, 0.0], [0.2, 0.1], [0.1, -0.1], [-0.1, 0.2], [7.0, 5.0]])
        turned = points @ np.array([[0.6, -0.8], [0.8, 0.6]])
        found = []
        for given in (points, turned):
            data, x, r = vectors(given), scalars([1.0, 1.0]), vectors(np.zeros((5, 2)))
            k = kernel_of("for i in r: r[i] = ti.Vector([x[0], x[1]]) - data[i]", r=r, x=x, data=data)
            options = {"loss": "cauchy", "f_scale": 0.2, "ftol": 1e-15}
            found.append(least_squares(k, x, r, loss_over="last axis", **options))
            z = (found[-1].fun.reshape(5, 2) ** 2).sum(axis=1) / 0.04
            assert_allclose(found[-1].cost, 0.5 * 0.04 * np.log1p(z).sum())
        assert_allclose(found[0].x @ np.array([[0.6, -0.8], [0.8, 0.6]]), found[1].x, atol=1e-6)

    def test_arrays(self):
        x, r = devices.real([0.5, 0.2]), devices.real(np.zeros(2))
        k = kernel_of("for i in b: b[i] = a[i] ** 2 - 4.0 - 5.0 * i", "a: A1, b: A1")
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
            ({"diff_step": 0.1}, "diff_step=0.1 is no argument of least_squares"),
            (
                {"x0": [1.0, 2.0, 3.0]},
                r"^x0=\[1.0, 2.0, 3.0\] is no argument .* starts at the values in the params; store",
            ),
            ({"x_scale": 1.0}, "x_scale is an option of SciPy's methods; give method='trf'"),
            ({"method": "gn"}, "method is 'gn'; expected one of 'lm', 'trf', 'dogbox'"),
            ({"progress": "yes"}, "progress is 'yes'"),
            ({"callback": 3}, "callback is 3; expected a Python function"),
            ({"format": "bsr"}, "format is 'bsr'"),
            ({"format": np.zeros(2)}, r"format is array\(\[0., 0.\]\)"),
            ({"method": np.zeros(2)}, r"method is array\(\[0., 0.\]\); expected one of 'lm'"),
            ({"loss_over": np.zeros(2)}, r"loss_over is array\(\[0., 0.\]\); expected one of 'entries'"),
            ({"callback": ti.math.length}, "callback is .*; expected a Python function"),
            ({"ftol": -1.0}, "ftol is -1.0; expected a number"),
            ({"max_iterations": -1}, "max_iterations is -1; expected a whole number of at least 0"),
            ({"loss": "l1"}, "loss is 'l1'; expected one of 'linear', 'soft_l1'"),
            ({"loss": ["huber", "huber"]}, r"loss is \['huber', 'huber'\], with another .*; expected a single one"),
            ({"loss": lambda z: z}, r"loss returns an array of shape \(12,\) .* 12 squares; .* of shape \(3, 12\)"),
            ({"loss": lambda z: np.ones((3, len(z))) * 1j}, "type complex128 for 12 squares; expected real numbers"),
            (
                {"loss": lambda z: np.stack([z, z * np.nan, z])},
                r"loss and its derivatives of .* nan .*; expected finite",
            ),
            ({"loss": lambda z: np.stack([-z, z * 0 - 1, z])}, "a first derivative that is not negative"),
            ({"f_scale": 0.0}, "f_scale is 0.0; expected a positive number"),
            ({"loss_over": "rows"}, "loss_over is 'rows'"),
            ({"loss_over": "last axis", "method": "trf"}, "loss_over='last axis' needs method='lm'"),
            ({"weights": np.ones(5)}, r"weights has shape \(5,\)"),
        ]:
            with pytest.raises(InvalidArgumentError, match=words):
                least_squares(fit.kernel, fit.params, fit.r, **kwargs)

        assert float(fit.runs[None]) == 0.0
        k = kernel_of("k(a: ti.f64) -> ti.f64: return a * a")
        with pytest.raises(InvalidArgumentError, match=r"argument 'a'\) is a number .*put it in a field"):
            least_squares(k, "a", args=(1.0,))
        square = kernel_of("for i in r: r[i] = x[i] * x[i] - 2", "x: A, r: A")
        x = np.ones(2)
        x.flags.writeable = False
        with pytest.raises(InvalidArgumentError, match=r"argument 'x'\) is read-only, .*; pass a copy"):
            least_squares(square, "x", "r", args=(x, np.zeros(2)))

    @pytest.mark.mostly_sweep("None-trf", "None-lm")
    @pytest.mark.parametrize("method", ["lm", "trf"])
    @pytest.mark.parametrize("format", [None, "csr"])
    def test_numbers_that_are_not_finite(self, format, method):
        x, r = scalars([4.0, 0.0]), outputs(2, 3)
        k = kernel_of("for i, j in r: r[i, j] = ti.sqrt(x[i]) * (j + 1) + ti.sqrt(x[0])", r=r, x=x)
        with pytest.raises(InvalidArgumentError, match=r"J of entry \[1, 0\] of .* has the entry inf; check_jacobian"):
            least_squares(k, x, r, format=format, method=method)
        assert_array_equal(read(r), np.zeros((2, 3)))
        if method == "trf":  # SciPy looks at costs itself
            return
        write(x, [1e308, 1e308])
        with pytest.raises(InvalidArgumentError, match="cost at the start is inf: residuals are too large"):
            least_squares(k, x, r, format=format, method=method, weights=np.full((2, 3), 1e10))
        write(x, [4.0, -1.0])
        with pytest.raises(InvalidArgumentError, match=r"entry \[1, 0\] of .* is nan at the start; check_jacobian"):
            least_squares(k, x, r, format=format, method=method)
        x[1] = np.nan
        with pytest.raises(InvalidArgumentError, match=r"entry \[1\] of params .* is nan; start at finite numbers"):
            least_squares(k, x, r, format=format, method=method)
        assert_array_equal(read(r), np.zeros((2, 3)))

    def test_kernels_that_cannot_run_again(self, fit):
        x, r = scalars([1.0, 2.0]), outputs(2)
        draw = kernel_of("for i in r: r[i] = x[i] * ti.random()", r=r, x=x)
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
        with pytest.raises(ImportError, match=r"least_squares with method='trf' needs SciPy.*\.\[scipy\]"):
            least_squares(fit.kernel, fit.params, fit.r, method="trf")
        assert least_squares(fit.kernel, fit.params, fit.r).success
