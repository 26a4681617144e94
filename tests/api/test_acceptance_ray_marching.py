"""The volume renderer of examples/ray_marching.py against the same renderer in torch, and against differences."""

import example_programs
import numpy as np
import pytest
import taichi as ti
from numpy.testing import assert_allclose
from taichi_program import initialise

from taichi_ext import InvalidArgumentError, jacobian, value_and_jacobian

example = example_programs.load("ray_marching")


def numpy_image(volume: np.ndarray, position: np.ndarray) -> np.ndarray:
    """The image by plain NumPy loops, rotation I: shape (4, PIXELS, PIXELS)."""
    image = np.zeros((4, example.PIXELS, example.PIXELS))
    for x, y in np.ndindex(example.PIXELS, example.PIXELS):
        middle = (example.PIXELS - 1) / 2
        direction = np.array([(x - middle) / example.PIXELS, (y - middle) / example.PIXELS, 1.0])
        direction /= np.linalg.norm(direction)
        for step in range(example.STEPS):
            p = position + step * example.STEP_LENGTH * direction
            if np.all(np.abs(p) <= 1):
                place = (p[::-1] + 1) / 2 * (len(volume) - 1)
                low = np.floor(place).astype(int)
                sample = np.zeros(4)
                for corner in np.ndindex(2, 2, 2):
                    weight = np.prod(np.where(corner, place - low, 1 - (place - low)))
                    sample += weight * volume[tuple(np.clip(low + corner, 0, len(volume) - 1))]
                gain = min(image[3, x, y] + sample[3] * example.STEP_LENGTH, 1.0) - image[3, x, y]
                image[:3, x, y] += gain * sample[:3]
                image[3, x, y] += gain
    return image


@pytest.mark.sweep
@pytest.mark.cpu_only("Mesa's llvmpipe leaves loops after 65536 iterations in all")
def test_image_and_directional_derivatives_are_those_of_numpy(ti64):
    volume = example.densities()
    program = example.VolumeRenderer(volume)
    image, J = value_and_jacobian(program.run, [program.density, program.position], program.image)
    position = np.array(example.CAMERA)
    assert_allclose(image[0], numpy_image(volume, position), rtol=1e-12)
    rng = np.random.default_rng(0)
    h = 1e-6
    for _ in range(3):
        d_volume, d_position = rng.standard_normal(volume.shape), rng.standard_normal(3)
        high = numpy_image(volume + h * d_volume, position + h * d_position)
        low = numpy_image(volume - h * d_volume, position - h * d_position)
        along = np.tensordot(J[0], d_volume[None], 5) + np.tensordot(J[1], d_position[None], 2)
        assert_allclose(along[0], (high - low) / (2 * h), rtol=1e-6, atol=1e-8)


@pytest.mark.sweep
@pytest.mark.cpu_only("Mesa's llvmpipe leaves loops after 65536 iterations in all")
def test_float32(ti32):
    program = example.VolumeRenderer(example.densities(), ti.f32)
    image, J = value_and_jacobian(program.run, program.density, program.image)
    assert_allclose(image.sum((0, 2, 3)), example.EXPECTED_IMAGE, rtol=1e-5)
    assert_allclose(J.sum((0, 1, 2, 3, 4, 5, 6, 7)), example.EXPECTED_BY_DENSITY, rtol=1e-5)


@pytest.mark.sweep
@pytest.mark.chosen_only("they are computed one after the other, for hours", "--chunk-size")
def test_67_million_densities_are_refused_with_advice():
    initialise()
    program = example.VolumeRenderer(np.zeros((256, 256, 256, 4), np.float32), ti.f32)
    with pytest.raises(InvalidArgumentError, match=r"67108864") as caught:
        jacobian(program.run, program.density, program.image)
    for word in ("product", "sparse"):
        assert word in str(caught.value), str(caught.value)
    ti.reset()
