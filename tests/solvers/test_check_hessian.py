"""``check_hessian``: what it finds right, wrong, not finite, and that it leaves the state as it was."""

import numpy as np
import pytest
import taichi as ti
from differences import read, scalars, vectors
from energies import energy_of_every_kind_of_parameter
from kernel_texts import kernel_of
from numpy.testing import assert_array_equal

from taichi_ext import CheckError, InvalidArgumentError, check_hessian
from taichi_ext.api.runs.subject import EnergyGradient

pytestmark = pytest.mark.usefixtures("ti64")


@pytest.fixture
def springs():
    """An energy of two params, which it changes."""
    x, a, energy = vectors([[0.1, 0.4], [0.9, 0.2], [1.3, 1.1]]), scalars([0.6, 1.4]), scalars(0.5)

    @ti.kernel
    def run():
        for i in range(2):
            energy[None] += a[i] * ((x[i + 1] - x[i]).norm() - 0.3) ** 2
        for i in x:
            x[i] *= 1.5

    return run, [x, a], energy


@pytest.mark.mostly_sweep("csr")
@pytest.mark.parametrize("format", [None, "csr"])
def test_agrees(springs, format):
    run, params, energy = springs
    before = [read(f) for f in (*params, energy)]
    report = check_hessian(run, params, energy, format=format)
    assert report and sum(block.compared for block in report.blocks) == 64, report
    assert [block.output[:13] for block in report.blocks] == ["gradient with"] * 4
    assert str(report).startswith("H of run agrees")
    for field, values in zip((*params, energy), before, strict=True):
        assert_array_equal(read(field), values)


@pytest.mark.sweep
def test_every_kind_of_parameter():
    run, x, v, array = energy_of_every_kind_of_parameter()
    report = check_hessian(run, {"x": x, "v": v, "a": array, "w": "w"}, args=(array, 0.7))
    assert report and len(report.blocks) == 16, report


def test_finds_wrong_entries(springs, monkeypatch):
    run, params, energy = springs
    blocks = EnergyGradient.of_dense
    monkeypatch.setattr(EnergyGradient, "of_dense", lambda *args: wrong(blocks(*args)))
    report = check_hessian(run, params, energy)
    assert [block.failed for block in report.blocks] == [1, 0, 0, 0]
    assert report.blocks[0].worst.output == (1, 1) and report.blocks[0].worst.param == (2, 0)
    with pytest.raises(CheckError, match="H of run DISAGREES"):
        check_hessian(run, params, energy, raise_on_failure=True)


def wrong(blocks):
    blocks[0][0][1, 1, 2, 0] += 0.01
    return blocks


@pytest.mark.sweep
def test_not_finite_and_bad_input():
    x, energy = scalars([0.0, 1.0]), scalars(0.0)
    run = kernel_of("for i in x: energy[None] += ti.sqrt(x[i] ** 3)", x=x, energy=energy)
    report = check_hessian(run, x, energy)
    assert not report and "at [0], [0]" in str(report)
    with pytest.raises(InvalidArgumentError, match="step is -1"):
        check_hessian(run, x, energy, step=-1)
    assert np.isfinite(read(x)).all()
