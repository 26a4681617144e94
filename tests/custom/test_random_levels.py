"""Random levels in loops: values and derivatives of each against differences of the same text, run by Python.

``program_levels`` writes a program for every seed, ``program_level_check`` runs and compares.  A fixed set of seeds runs
here; ``python tests/oracles/program_batches.py 2000 --generator levels --vary`` runs as many as one likes.
"""

import numpy as np
import program_check
import pytest
from program_batches import drawn_ways
from program_level_check import LevelWorkshop, Placed, Reference, covered_area, describe_level, level_verdict, values_of
from program_levels import LevelProgram, generate
from program_verdict import RIGHT
from taichi_program import end_program

from taichi_ext import backend

pytestmark = pytest.mark.double_only("differences in float64")
SEEDS = (0, 9, 30, 44, 50)  # loops are accumulated backwards in 0, 9 and 50


@pytest.fixture(scope="module")
def workshop():
    yield LevelWorkshop()
    end_program()


@pytest.mark.sweep
@pytest.mark.parametrize("seed", SEEDS)
def test_random_levels(workshop, seed, monkeypatch):
    program = generate(seed)
    drawn = drawn_ways(seed)
    by_column = drawn.pop("by_column")
    for options, is_by_column in (({}, False), (drawn, by_column)):
        monkeypatch.setattr(program_check, "OPTIONS", options)
        monkeypatch.setattr(backend, "stores_by_column", lambda is_so=is_by_column: is_so)
        verdict = level_verdict(program, seed, workshop)
        assert verdict == (RIGHT, ""), f"{options}, by column {is_by_column}\n{describe_level(program)}"


# --- the reference itself ---------------------------------------------------------------------------------------------


def test_covered_areas():
    assert covered_area(Placed(0.25, 1.0, 0.0)) == 0.75
    assert covered_area(Placed(0.5, 2.0, 0.0)) == 0.75
    assert covered_area(Placed(-9.0, 0.0, 1.0)) == 0.0
    assert covered_area(Placed(0.5, 1.0, 1.0)) == 0.875  # but for a triangle with legs of 1/2


STOPPED = """
@ti.func
def bent(u, v):
    return u * u
@rule
def _(d_u, d_v):
    return 3.0 * d_u
@ti.kernel
def run():
    for i, j in image:
        x, y = float(i), float(j)
        image[i, j] = p[0] * stop_gradient(p[0]) + replace_gradient(p[0], p[1] * 5.0) + bent(p[2], x) + x
"""


def test_gradients_of_their_own():
    program = LevelProgram(STOPPED, 1)
    values = values_of(program, 3)
    reference = Reference(program, values)
    a, b, c = values["p"]
    assert reference.run()[2, 1] == pytest.approx(a * a + a + c * c + 2)
    np.testing.assert_allclose(reference.derivatives(1e-5)[2, 1], [a, 5, 3], rtol=1e-8)


def test_the_same_options_for_the_same_seed():
    assert drawn_ways(3) == drawn_ways(3)
    assert len({tuple(drawn_ways(seed).values()) for seed in range(40)}) > 10
