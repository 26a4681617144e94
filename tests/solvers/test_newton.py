"""``newton``: minima that are known, statics of springs, callbacks, state."""

import math
import os
import subprocess
import sys
from itertools import pairwise, product

import example_programs
import numpy as np
import pytest
import taichi as ti
from differences import outputs, read, scalars, vectors, write
from kernel_texts import kernel_of
from numpy.testing import assert_allclose, assert_array_equal

from taichi_ext import InvalidArgumentError, UnsupportedError, hessian, newton, value_and_gradient

pytestmark = pytest.mark.usefixtures("ti64")


def hanging_chain(n=12):
    """Springs between neighbours, pressed at the start, that hang under their weight between fixed ends."""
    points = np.stack([np.linspace(0, 4, n), 0.1 * np.sin(np.arange(n))], axis=1)
    x, energy = vectors(points), scalars(0.25)

    @ti.kernel
    def run():
        for i in range(n - 1):
            energy[None] += 50 * ((x[i + 1] - x[i]).norm() - 0.5) ** 2
        for i in range(n):
            energy[None] += 0.1 * x[i][1]

    fixed = np.zeros(n, bool)
    fixed[[0, -1]] = True
    return run, x, energy, fixed


@pytest.mark.parametrize("method", ["cg", "cholmod"])
def test_methods(method):
    """The same minimum, with the patterns of pulled and of pressed springs."""
    if method == "cholmod":
        pytest.importorskip("cvxopt")
    run, x, energy, fixed = hanging_chain()
    start, near = read(x), newton(run, x, energy, fixed=fixed)
    for _ in range(2):
        write(x, near.x.reshape(12, 2) + 0.01 * np.sin(np.arange(24)).reshape(12, 2) * ~fixed[:, None])
        result = newton(run, x, energy, fixed=fixed, method=method, gtol=1e-9)
        assert result.success and result.nhev > 2
        assert_allclose(result.x, near.x, atol=1e-6)
    write(x, start)
    result = newton(run, x, energy, fixed=fixed, method=method, max_iterations=300)
    assert result.success and any(h.is_projected for h in result.history)


def test_what_is_not_installed(monkeypatch):
    run, x, energy, fixed = hanging_chain()
    monkeypatch.setitem(sys.modules, "cvxopt", None)
    with pytest.raises(ImportError, match=r"python -m pip install '\.\[cholmod\]'"):
        newton(run, x, energy, fixed=fixed, method="cholmod")


def test_rosenbrock_and_several_params():
    x, y, energy = scalars([-1.2]), scalars([1.0]), outputs(1)
    run = kernel_of(
        "for _ in range(1): energy[0] += (1 - x[0]) ** 2 + 100 * (y[0] - x[0] ** 2) ** 2", energy=energy, x=x, y=y
    )
    result = newton(run, {"x": x, "y": y}, energy)
    assert_allclose(result.x, [1, 1], rtol=1e-9)
    assert len(result.history) < 30
    assert (np.diff([h.energy for h in result.history]) < 0).all()
    write(x, [-1.2])
    write(y, [1.0])
    newton(run, {"x": x, "y": y}, energy, fixed={"x": [True], "y": None})
    assert_allclose([read(x)[0], read(y)[0]], [-1.2, 1.44], rtol=1e-12)


def test_returned_energies_and_arrays():
    x = np.array([3.0, -2.0])

    @ti.kernel
    def run(x: ti.types.ndarray(ti.f64, ndim=1)) -> ti.f64:
        total = 0.0
        for i in range(2):
            total += ti.exp(x[i] - i) + ti.exp(i - x[i])
        return total

    result = newton(run, x, args=(x,))
    assert result.success
    assert_allclose(x, [0, 1], atol=1e-6)


def test_callbacks_keep_steps_where_they_are_valid():
    """A barrier is only known where x is positive; max_step ends a step before it, is_valid takes it back."""
    x, energy = scalars([1e-3]), scalars(0.0)
    run = kernel_of(
        "for _ in range(1): energy[None] += 100 * (x[0] + 1) ** 2 - 1e-4 * ti.log(x[0])", energy=energy, x=x
    )
    seen, steps = [], []

    def is_valid(point):
        seen.append(point[0])
        return point[0] > 0

    def max_step(direction):
        steps.append((read(x)[0], direction[0]))
        return 0.9 * x[0] / -direction[0] if direction[0] < 0 else 1.0

    for options in ({"is_valid": is_valid}, {"max_step": max_step, "is_valid": is_valid}):
        write(x, [1e-3])
        seen.clear()
        result = newton(run, x, energy, **options)
        assert result.success
        # 200 (x + 1) = 1e-4 / x
        assert_allclose(read(x)[0], (-1 + np.sqrt(1 + 4 * 5e-7)) / 2, rtol=1e-6)
        assert (min(seen) > 0) == ("max_step" in options)
    assert steps[0][0] == 1e-3


@pytest.mark.mostly_sweep("nan")
@pytest.mark.parametrize("most", [-1.0, math.nan])
def test_a_step_of_no_length(most):
    """A step that may not be made does not end at a minimum, and a factor below zero is none."""
    run, x, energy, fixed = hanging_chain(5)
    before = read(x)
    result = newton(run, x, energy, fixed=fixed, max_step=lambda direction: 0.0)
    assert result.status == -2 and not result.success
    with pytest.raises(InvalidArgumentError, match=f"max_step returned {most}; expected the factor of a step"):
        newton(run, x, energy, fixed=fixed, max_step=lambda direction: most)
    assert_allclose(read(x), before)


@pytest.mark.sweep
def test_conjugate_gradients_go_downhill_where_the_energy_is_stiff_and_indefinite():
    """Negative curvature beside stiffnesses of eight orders of magnitude, in turned directions."""
    x, energy = vectors(np.full((12, 2), 0.1)), outputs(1)

    @ti.kernel
    def run():
        for i in x:
            stiffness, angle = 10.0 ** (i % 9), 0.7 * i
            along = ti.cos(angle) * x[i][0] + ti.sin(angle) * x[i][1]
            across = ti.cos(angle) * x[i][1] - ti.sin(angle) * x[i][0]
            energy[0] += 0.5 * stiffness * along**2 + (across**2 - 1) ** 2
        for i in range(11):
            energy[0] += 0.1 * (x[i] - x[i + 1]).norm_sqr()

    assert np.linalg.eigvalsh(hessian(run, x, energy).reshape(24, 24))[0] < 0
    slopes = []

    def max_step(direction):
        slopes.append((value_and_gradient(run, x, energy)[1] * direction).sum())
        return 1.0

    result = newton(run, x, energy, method="cg", max_step=max_step)
    assert result.success and any(h.is_projected for h in result.history)
    assert max(slopes) < 0
    energies = [h.energy for h in result.history]
    assert all(b <= a + 1e-9 * abs(a) for a, b in pairwise(energies))
    assert np.linalg.eigvalsh(hessian(run, x, energy).reshape(24, 24))[0] > 0


@pytest.mark.sweep
@pytest.mark.parametrize("method", ["splu", "cg"])
def test_saddles_and_maxima_are_left(method):
    """Starts where the gradient vanishes, or does on the way, and none of the iterations sees the way down."""
    x, energy = scalars([0.0, 0.0]), scalars(0.0)
    valleys = kernel_of("for _ in range(1): energy[None] += x[0] ** 2 + (x[1] ** 2 - 1) ** 2", energy=energy, x=x)
    waves = kernel_of("for i in range(2): energy[None] += ti.cos(x[i])", energy=energy, x=x)

    @ti.kernel
    def bent():
        for _ in range(1):
            energy[None] += 0.5 * (x[0] - 1) ** 2 + 0.5 * x[1] ** 2 * (x[0] - 2) + x[1] ** 4

    for kernel, start in (
        (valleys, [0, 0]),
        (valleys, [1, 0]),
        (waves, [0, 0]),
        (waves, [2 * np.pi, 0]),
        (bent, [3, 0]),
    ):
        write(x, np.array(start, float))
        write(energy, 0.0)
        result = newton(kernel, x, energy, method=method)
        assert result.success and np.abs(result.gradient).max() < 1e-6
        assert np.linalg.eigvalsh(hessian(kernel, x, energy))[0] > 1e-3


def test_a_singular_minimum_is_one():
    x, energy = scalars([0.0, 0.0]), scalars(0.0)
    quartic = kernel_of("for i in range(2): energy[None] += x[i] ** 4", energy=energy, x=x)
    for start in ([0.0, 0.0], [1.0, 1.0]):
        write(x, np.array(start))
        assert newton(quartic, x, energy).success


@pytest.mark.mostly_sweep("1e-09", "0.03")
@pytest.mark.parametrize("bend", [0.0, 1e-9, 0.03])
def test_pressed_springs_buckle(bend):
    """Springs in a line: without curvature across it, or nearly so."""
    run, x, energy, fixed = hanging_chain(9)
    write(x, np.stack([0.36 * np.arange(9), bend * np.sin(np.arange(9))], axis=1))
    result = newton(run, x, energy, fixed=fixed, gtol=1e-10)
    assert result.success, result.message


def test_ends():
    x, energy = scalars([3.0]), scalars(0.0)
    quartic = kernel_of("for _ in range(1): energy[None] += x[0] ** 4", energy=energy, x=x)
    result = newton(quartic, x, energy, max_iterations=2)
    assert not result.success and result.status == 0 and len(result.history) == 3
    write(x, [3.0])
    result = newton(quartic, x, energy, callback=lambda h: h.number == 1)
    assert result.status == -1 and len(result.history) == 2
    assert_allclose(read(x), [2.0])  # 2/3 of the way


@pytest.mark.sweep
def test_elastic_bar_of_the_examples(tmp_path):
    """In a process of its own, as examples start Taichi; it checks that the wall carries the weight of the bar."""
    path = example_programs.EXAMPLES / "elastic_bar.py"
    environment = {**os.environ, "PYTHONPATH": str(path.parent.parent), "TI_CPU_MAX_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, path], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the gradient is smaller than gtol" in done.stdout
    assert "ok  the wall carries 4.000000" in done.stdout


def test_fixed_takes_indices_or_a_mask():
    run, x, energy, mask = hanging_chain(5)
    expected = hessian(run, x, energy, fixed=mask)
    held = np.flatnonzero(mask)
    for given in (held, held.tolist(), mask.tolist(), held.astype(np.uint8), [held]):
        assert_array_equal(hessian(run, x, energy, fixed=given), expected)


def test_progress(capsys):
    run, x, energy, fixed = hanging_chain(5)
    result = newton(run, x, energy, fixed=fixed, progress=True)
    assert capsys.readouterr().out.splitlines() == result.summary().splitlines()[:-1]


@pytest.mark.sweep
def test_bad_input():
    run, x, energy, _ = hanging_chain(5)
    before, indices = read(x), "expected a list of indices from 0 to 4"
    options = [
        *[(option, None, f"{option} is None") for option in ("gtol", "xtol")],
        *[
            (option, given, f"{option} is .*; expected a Python function of")
            for option, given in product(("is_valid", "max_step", "callback"), (3, "f", [], ti.math.length))
        ],
        *[("fixed", given, indices) for given in ([0, 5], [-1], np.array([[0], [4]]))],
    ]
    for option, given, words in (
        ("fixed", np.zeros(4, bool), r"fixed\[0\] has shape \(4,\)"),
        ("fixed", np.ones(5, bool), "fixed leaves nothing that moves"),
        ("fixed", [np.ones(5, bool), None], "fixed has 2 arrays"),
        ("fixed", np.array([0, 1, 0, 0, 1]), "could be indices or a mask"),
        ("fixed", np.array([1, 0, 1]), "has an index twice"),
        ("method", "lu", "method is 'lu'; expected one of 'splu'"),
        ("method", np.zeros(3), "method is array"),
        ("gtol", -1, "gtol is -1"),
        ("max_iterations", 0.5, "max_iterations is 0.5"),
        ("progress", 3, "progress is 3; expected True or False"),
        ("max_step", lambda _: "far", "max_step returned 'far'; expected the factor"),
        ("is_valid", lambda _: None, "is_valid returned None; expected True or False"),
        *options,
    ):
        with pytest.raises(InvalidArgumentError, match=words):
            newton(run, x, energy, **{option: given})
    with pytest.raises(InvalidArgumentError, match="one number"):
        newton(run, x, x)
    not_finite = kernel_of("for i in range(5): energy[None] += ti.log(-1.0 - x[i].norm())", energy=energy, x=x)
    with pytest.raises(InvalidArgumentError, match="not finite at the start"):
        newton(not_finite, x, energy)
    random = kernel_of("for i in range(5): energy[None] += x[i].norm_sqr() * ti.random(ti.f64)", energy=energy, x=x)
    with pytest.raises((InvalidArgumentError, UnsupportedError)):
        newton(random, x, energy)
    assert_array_equal(read(x), before)
