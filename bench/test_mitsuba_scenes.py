"""The scenes of Mitsuba's tests of gradients: errors are at most a quarter of its thresholds.

The reference is an integral over scan lines with shadows in closed form (``bench/mitsuba_scenes.py``).
"""

from dataclasses import replace

import mitsuba_scenes
import numpy as np
import pytest
from mitsuba_scenes import SCENES


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
def test_errors_of_mitsubas_scenes(scene):
    small = replace(scene, resolution=48)
    image, found, _ = mitsuba_scenes.ours(small, repeats=1)
    assert np.abs(image - mitsuba_scenes.image_of(small, 0.0)).max() < 2e-3
    assert mitsuba_scenes.error(found, mitsuba_scenes.reference(small)) < scene.threshold / 4
