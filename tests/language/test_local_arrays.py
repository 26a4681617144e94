"""Local arrays of many numbers: declared without a store for each number, filled where the iteration needs them."""

import re

import numpy as np
import pytest
import taichi as ti
from differences import outputs, scalars
from numpy.testing import assert_allclose, assert_array_equal

from taichi_ext import Jacobian

pytestmark = pytest.mark.usefixtures("ti64")

MANY = 40
VALUES = np.random.default_rng(3).uniform(0.3, 1.2, MANY)


def text_of(kernel, x, y):
    """The emitted kernel without comments."""
    plan = Jacobian(kernel, x, y)
    plan()
    return re.sub(r"  # .*", "", plan.source)


def sums(n):
    """Accumulators in a loop over n parameters, within a parallel loop."""
    x, y = scalars(np.linspace(0.3, 1.2, n)), outputs(5)

    @ti.kernel
    def k():
        for i in y:
            a, b = 0.0, 1.0
            for j in range(n):
                a += x[j] * x[(j + i) % n]
                b += ti.sin(x[j] * i) * a
            y[i] = a * b

    return k, x, y


@pytest.mark.chosen_only("rows are chosen", "--tangents", "--chunk-size")
def test_no_first_value_runs():
    """The only vector of many numbers stands where it never runs: it says what type the memory has."""
    lines = text_of(*sums(MANY)).splitlines()
    vectors = [n for n, line in enumerate(lines) if "ti.Vector([0.0] * " in line]
    assert vectors
    for n in vectors:
        condition, name, _ = lines[n].replace(":", "=").split("=")
        assert condition.strip() == "if False"
        assert lines[n - 1].strip() == f"({name.strip()} := None)"


def test_sums_of_repeated_launches():
    """Scratch memory of the kernel itself is cleared in each launch, not once."""
    x, y = scalars(VALUES), outputs(1)

    @ti.kernel
    def k():
        s = 0.0
        for j in x:
            s += x[j] ** 2
        y[0] = s * x[0]

    plan = Jacobian(k, x, y)
    first = np.array(plan())
    assert_array_equal(plan(), first)
    expected = 2 * VALUES * VALUES[0]
    expected[0] += (VALUES**2).sum()
    assert_allclose(first[0], expected, rtol=1e-12)


@pytest.mark.cpu_only("a GPU has no serial loops of the kernel itself")
@pytest.mark.chosen_only("loops over columns are chosen", "--tangents", "--by-column", "--chunk-size")
def test_columns_of_the_kernel_itself_are_no_parallel_loops():
    x, y = scalars(VALUES), outputs(2)

    @ti.kernel
    def k():
        s = x[0]
        for j in range(MANY):
            s += x[j] * x[(j + 1) % MANY]
        y[0] = s * x[2]
        y[1] = s + x[3]

    own = [line for line in text_of(k, x, y).splitlines() if re.match(r" {8}(for|while) ", line)]
    assert sum(line.startswith("        for ") for line in own) <= 2  # the user's, and its entries
    assert any(line.startswith("        while ") for line in own)
