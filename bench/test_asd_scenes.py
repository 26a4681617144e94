"""The scenes of ASD's checks of gradients: J is within 1 % of supersampled differences in the median, 3 % at worst."""

import numpy as np
import pytest
import taichi as ti
from asd_scenes import SCENES, errors


@pytest.fixture(scope="module", autouse=True)
def float64(taichi):
    """Taichi in double precision, since the reference sums 20,000 samples."""
    ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.WARN)
    yield
    taichi()


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
def test_errors_of_asds_scenes(scene):
    by_column, value, _ = errors(scene)
    assert np.median(by_column) < 0.01, by_column
    assert by_column.max() < 0.03, by_column
    assert value < 1e-3
