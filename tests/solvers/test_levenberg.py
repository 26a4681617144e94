"""The Levenberg-Marquardt iteration on functions in NumPy, without Taichi."""

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from taichi_ext.solvers.elimination import BlockLayout, SparseJacobian, SparseSystem
from taichi_ext.solvers.levenberg import Point, Space, StoppingCriteria, minimize
from taichi_ext.solvers.parts import Part
from taichi_ext.solvers.problem import LOSSES
from taichi_ext.solvers.results import History
from taichi_ext.solvers.systems import JacobianSystem, NormalSystem, system_of


def everywhere(n, low=-np.inf, high=np.inf):
    return Space(np.full(n, low, float), np.full(n, high, float), lambda x, s: x + s)


def run(residuals, jacobian, start, space=None, system=system_of, **limits):
    """The end of the iteration, and the lines of its report."""
    lines = []

    def evaluate(x):
        r, J = residuals(x), jacobian(x)
        return Point(x, 0.5 * float(r @ r), lambda: system(J, r, None))

    start = np.array(start, float)
    options = {"ftol": 1e-15, "xtol": 1e-15, "gtol": 1e-15, **limits}
    history = History(lines.append)
    return minimize(evaluate, start, space or everywhere(len(start)), StoppingCriteria(**options), history), lines


def banana(x):
    return np.array([10 * (x[1] - x[0] ** 2), 1 - x[0]])


def banana_rows(x):
    return np.array([[-20 * x[0], 10.0], [-1.0, 0.0]])


def as_csr(J, r, factors):
    sparse = pytest.importorskip("scipy.sparse")
    sizes = [(Part(name, (n,), np.dtype(float)), 1) for name, n in zip(("r", "x"), J.shape, strict=True)]
    return SparseSystem.of(SparseJacobian([[sparse.csr_array(J)]], BlockLayout(sizes[:1], sizes[1:], [])), r, factors)


SYSTEMS = {"QR": system_of, "Cholesky": lambda J, r, _: NormalSystem(J.T @ J, J.T @ r), "sparse LU": as_csr}


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS)
def test_solution(system):
    ended, lines = run(banana, banana_rows, [-1.2, 1.0], system=system)
    assert_allclose(ended.point.x, [1.0, 1.0], rtol=1e-12)
    assert ended.status > 0 and ended.evaluations <= (15 if system is system_of else 40)
    costs = [line.cost for line in lines]
    assert costs == sorted(costs, reverse=True)
    assert [line.number for line in lines] == list(range(len(lines)))
    assert_array_equal(lines[-1].x, ended.point.x)


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS)
def test_a_step_with_parts_held(system):
    """The minimum of the damped quadratic over the entries that are not fixed, from the full system of equations."""
    rng = np.random.default_rng(0)
    J, r, damping = rng.standard_normal((7, 4)), rng.standard_normal(7), np.array([0.1, 1e40, 0.3, 0.4])
    fixed = np.array([0.0, 0.7, 0.0, 0.0])
    found = system(J, r, None).solve(damping, fixed)
    free = [0, 2, 3]
    A = J[:, free].T @ J[:, free] + np.diag(damping[free])
    assert_allclose(found[free], np.linalg.solve(A, -J[:, free].T @ (r + J @ fixed)), rtol=1e-10)
    assert abs(found[1]) < 1e-30


@pytest.mark.parametrize("high", [0.5, 0.9])
def test_bounds(high):
    """At the bound of the first parameter, the second one is its square."""
    ended, _ = run(banana, banana_rows, [-1.2, high], everywhere(2, -2.0, high))
    assert_allclose(ended.point.x, [high, high**2], rtol=1e-7)
    assert ended.point.x[0] == high and ended.status > 0


def test_units_of_parameters_do_not_matter():
    """In other units, the points are the same; powers of two are exact."""
    unit = np.array([2.0**40, 2.0**-30])
    plain, lines = run(banana, banana_rows, [-1.2, 1.0], ftol=1e-8, xtol=1e-8, gtol=1e-8)
    scaled, others = run(
        lambda x: banana(x * unit), lambda x: banana_rows(x * unit) * unit, [-1.2, 1.0] / unit,
        ftol=1e-8, xtol=1e-8, gtol=1e-8,
    )  # fmt: skip
    assert_allclose(scaled.point.x * unit, plain.point.x, rtol=1e-6)
    assert len(lines) == len(others)


def test_values_that_are_not_finite():
    """A trial where residuals are NaN is rejected."""
    with np.errstate(invalid="ignore", divide="ignore"):
        ended, lines = run(lambda x: np.log(x) + 3.0, lambda x: 1 / x[:, None], [4.0])
    assert_allclose(ended.point.x, np.exp(-3.0))
    assert any(line.change == -np.inf for line in lines)


def test_a_parameter_that_nothing_depends_on():
    ended, _ = run(lambda x: x[:1] - 3.0, lambda x: np.array([[1.0, 0.0]]), [1.0, 5.0])
    assert_allclose(ended.point.x, [3.0, 5.0])


@pytest.mark.parametrize("start", [0.0, 1e-8, 1.0])
def test_a_start_near_zero(start):
    """The first radius is at least the length of the residuals, and a step that it limits is no end."""
    ended, lines = run(lambda x: x - 1e6, lambda x: np.eye(1), [start], ftol=1e-8, xtol=1e-8, gtol=1e-8)
    assert_allclose(ended.point.x, 1e6)
    assert ended.status > 0 and len(lines) <= 4


@pytest.mark.parametrize("loss", ["soft_l1", "huber", "cauchy", "arctan", "tukey"])
def test_losses_keep_the_digits_of_small_residuals(loss):
    """Costs that are rounded to 1e-16 of the scale hide the steps to a minimum at small residuals."""
    z = np.array([1e-15, 1e-9, 1e-5])
    third = {"soft_l1": 1 / 8, "huber": 0.0, "cauchy": 1 / 3, "arctan": -1 / 3, "tukey": 1 / 3}[loss]
    second = {"soft_l1": -1 / 4, "huber": 0.0, "cauchy": -1 / 2, "arctan": 0.0, "tukey": -1.0}[loss]
    assert_allclose(LOSSES[loss](z)[0], z * (1 + z * (second + z * third)), rtol=1e-14)
    z, h = np.array([0.1, 0.6, 0.9, 1.4, 30.0]), 1e-6
    for n in range(2):  # its derivatives
        differences = (LOSSES[loss](z + h)[n] - LOSSES[loss](z - h)[n]) / (2 * h)
        assert_allclose(LOSSES[loss](z)[n + 1], differences, rtol=1e-7, atol=1e-9)


def test_all_ends_have_words():
    for options, status, words in [
        ({"max_iterations": 3}, 0, "largest number of iterations, 3"),
        ({"ftol": 0.9}, 2, "cost changes little"),
        ({"xtol": 10.0}, 3, "step is small"),
        ({"gtol": 1.0}, 1, "gradient is small"),
    ]:
        ended, _ = run(banana, banana_rows, [-1.2, 1.0], **options)
        assert ended.status == status and words in ended.message
    ended, lines = run(banana, lambda x: -banana_rows(x), [-1.2, 1.0], xtol=0.0)
    assert ended.status == -2 and "check_jacobian" in ended.message
    assert_array_equal(ended.point.x, [-1.2, 1.0])


def decay(p):
    t = np.linspace(0, 2, 20)
    return p[0] * np.exp(-p[1] * t) + p[2] - 2.5 * np.exp(-1.3 * t) - 0.3


def decay_rows(p):
    t = np.linspace(0, 2, 20)
    return np.stack([np.exp(-p[1] * t), -p[0] * t * np.exp(-p[1] * t), np.ones_like(t)], 1)


WRONG = {
    "decay, second column": (decay, lambda p: decay_rows(p) * [1, -1, 1], [1.0, 1.0, 0.0]),
    "decay, third column": (decay, lambda p: decay_rows(p) * [1, 1, -1], [1.0, 1.0, 0.0]),
    "decay, first column": (decay, lambda p: decay_rows(p) * [-1, 1, 1], [1.0, 1.0, 0.0]),
    "decay, size of a column": (decay, lambda p: decay_rows(p) * [1, 30, 1], [1.0, 1.0, 0.0]),
    "banana, first entry": (banana, lambda x: banana_rows(x) * [[-1, 1], [1, 1]], [-1.2, 1.0]),
    "banana, second entry": (banana, lambda x: banana_rows(x) * [[1, -1], [1, 1]], [-1.2, 1.0]),
    "banana, second row": (banana, lambda x: banana_rows(x) * [[1, 1], [-1, 1]], [-1.2, 1.0]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_jacobian_is_no_success(name):
    """The first steps lower the cost; SciPy and MINPACK end with success by xtol."""
    residuals, jacobian, start = WRONG[name]
    ended, lines = run(residuals, jacobian, start, ftol=1e-8, xtol=1e-8, gtol=1e-8)
    assert lines[-1].cost < lines[0].cost
    assert ended.status == -2 and "check_jacobian" in ended.message


def kinked(x):
    return np.array([abs(x[0] - 1) + 0.5 * x[0], abs(x[1]) + 1, 0.1 * x[0] + 0.05 * x[1]])


def kinked_rows(x):
    return np.array([[np.sign(x[0] - 1) + 0.5, 0], [0, np.sign(x[1])], [0.1, 0.05]])


@pytest.mark.parametrize("start", [[3.0, 2.0], [0.5, -3.0]])
def test_a_minimum_at_a_kink_is_a_success(start):
    ended, _ = run(kinked, kinked_rows, start, ftol=1e-8, xtol=1e-8, gtol=1e-8)
    assert ended.status > 0
    assert abs(ended.point.x[1]) < 1e-6


def test_qr_keeps_digits():
    """Columns that differ by 1e-9: the solution is right with QR, while JtJ is singular to rounding."""
    J = np.array([[1.0, 1.0], [1.0, 1.0 + 1e-9], [0.0, 1e-9]])
    step = JacobianSystem(J, -J @ [2.0, 3.0]).solve(np.full(2, 1e-40), np.zeros(2))
    assert_allclose(step, [2.0, 3.0], rtol=1e-5)
