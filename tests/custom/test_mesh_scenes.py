"""Edges of meshes against supersampled images: split corners, thin faces, T-junctions, corners behind the camera."""

import numpy as np
import pytest
import taichi as ti
from differences import outputs
from kernel_texts import func_of
from mesh_scenes import FOCAL, H, Scene, W, cube, linked_tori
from numpy.testing import assert_allclose
from taichi_program import initialise

from taichi_ext import add_edge, jacobian, mesh_edges

POSE = (0.43, 0.71, -0.26, 0.12, -0.07, 5.0)
STEPS = (0.03, 0.0, 0.0, 0.04, 0.0, 0.1)
FOLD = [[-1.2, -1, 0.4], [0, -1, -0.3], [0, 1, -0.3], [-1.2, 1, 0.4], [1.1, -1, 0.5], [1.1, 0.2, 0.5], [0, 0.2, -0.3]]
GROUND = [[-3, 1, -4], [3, 1, -4], [3, 1, 12], [-3, 1, 12.0]]


@pytest.fixture(scope="module")
def scene(ti64):
    return Scene()


def with_needless_faces(corners, faces, colours):
    """A face whose corners lie on one line, on an edge; one that has a corner twice."""
    corners = np.vstack([corners, [[-1, 0.3, -1]]])
    return corners, np.vstack([faces, [[0, 1, 24], [3, 3, 4]]]), np.append(colours, [1.5, 1.5])


SCENES = {  # corners, faces, colours, pose, steps, and how far the worst column may be off
    "24 corners": (*cube(), POSE, STEPS, 0.02),
    "faces without area": (*with_needless_faces(*cube()), POSE, STEPS, 0.02),
    "a side that is seen edge-on": (*cube(), (0, 0, 0, 1.0, 0.2, 5.0), (0.03, 0.03, 0, 0.04, 0.04, 0), 0.01),
    "a T-junction on a fold": (
        [*FOLD, [1.1, 1, 0.5]],
        [[0, 1, 2], [0, 2, 3], [1, 4, 5], [1, 5, 6], [6, 5, 7], [6, 7, 2]],
        (0.4, 0.4, 0.9, 0.9, 0.7, 0.7),
        (0.1, 0.2, 0.3, 0.1, 0.1, 5.0),
        STEPS,
        0.02,
    ),
    "corners behind the camera": (
        GROUND,
        [[0, 1, 2], [0, 2, 3]],
        (0.6, 0.9),
        (0.05, 0.1, 0.03, 0.1, 0.1, 0.0),
        (0.02, 0, 0.02, 0.04, 0, 0.1),
        0.02,
    ),
    "tori that hide each other in part": (
        *linked_tori(),
        (0.5, 0.3, 0.1, 0, 0, 5.0),
        (0, 0, 0.02, 0.03, 0, 0.08),
        0.03,
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", SCENES)
def test_meshes_against_supersampled_images(scene, name):
    corners, faces, colours, pose, steps, most = SCENES[name]
    scene.load(corners, faces, colours, pose)
    errors = scene.errors(steps)
    assert np.median(errors) < max(0.01, 0.6 * most), errors
    assert errors.max() < most, errors


def flat_area(corners, z):
    """The sum over the image of what a plate that faces the camera covers, times its contrast 0.5."""
    sizes = np.ptp(np.asarray(corners), axis=0)
    return 0.5 * FOCAL**2 * sizes[0] * sizes[1] / z**2


@pytest.mark.mostly_sweep("1e-07")
@pytest.mark.parametrize("width", [1e-3, 1e-7])
def test_thin_faces_have_their_area(scene, width):
    """A plate of 2 x width, seen from its front: its sides are nearer than what is looked at beside an edge."""
    corners = np.array([[-1, 0, 0], [1, 0, 0], [1, width, 0], [-1, width, 0.0]])
    edges = mesh_edges([[0, 1, 2], [0, 2, 3]], [[-1, 0], [1, 0], [1, 1], [-1, 1]])
    scene.load(corners, [[0, 1, 2], [0, 2, 3]], [0.6, 0.6], (0, 0, 0, 0.013, 0.021, 5.0), edges)
    total = scene.derivative().sum((0, 1))
    assert total[5] == pytest.approx(-2 / 5.0 * flat_area(corners, 5.0), rel=1e-5)
    assert_allclose(total[3:5], 0, atol=1e-6 * abs(total[5]))


def test_a_box_that_is_seen_from_the_side_shares_the_jump(scene):
    """Its right side is in the plane of the camera, so four edges of it, and two diagonals, lie on one line."""
    scene.load(*cube(), (0, 0, 0, -1.0, 0.03, 5.0))
    by_x = scene.derivative()[..., 3]
    column = by_x[W // 2]  # the camera looks along the centre of this column of pixels
    assert by_x[W // 2 + 1 :].sum() == 0
    height = 2 * FOCAL / 4
    speeds = FOCAL / 4, FOCAL / 6  # of the front and the back edge: half of the jump each, where both are seen
    front = 0.2 - 0.1
    assert front * height * speeds[1] < column.sum() < front * height * speeds[0]


def covered(half):
    """The areas that a square of this half side, around the centre of the image, covers of its pixels."""
    along = [np.clip(half - abs(np.arange(n) - n / 2) + 0.5, 0, 1) for n in (W, H)]
    return along[0][:, None] * along[1]


def test_the_cube_of_mitsuba_1895(scene):
    """A cube with split corners that comes nearer, under a sky of one colour: only its outline counts.

    Its front is a square, and its other sides are hidden.  Mitsuba 3.8 gave 2.7 times the derivative (mitsuba3#1895).
    """
    corners, faces, _ = cube()
    scene.load(corners, faces, [0.6], (0, 0, 0, 0, 0, 4.0))
    found, step = scene.derivative()[..., 5], 1e-6
    ends = (covered(FOCAL / (3.0 + sign * step)) for sign in (1, -1))
    expected = 0.5 * np.subtract(*ends) / (2 * step)
    assert found.sum() == pytest.approx(0.5 * -2 * (2 * FOCAL) ** 2 / 3.0**3, rel=1e-3)
    assert np.linalg.norm(found - expected) < 1e-6 * np.linalg.norm(expected)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [ti.f64, ti.f32])
def test_edges_along_the_border_of_pixels_and_ends_that_are_not_finite(ti64, dtype):
    initialise(default_fp=dtype)
    ends, image = ti.Vector.field(2, dtype, shape=4), outputs(8, 6, dtype=dtype)
    other = outputs(8, 6, dtype=dtype)
    seen = func_of("return ti.select(x < ends[0].x, 2.0, 0.5)", "x, y", ends=ends)

    @ti.kernel
    def draw():
        for i, j in image:
            image[i, j] = seen(float(i), float(j))
            other[i, j] = image[i, j]
        for k in range(2):
            add_edge(image, ends[2 * k], ends[2 * k + 1], seen)
            add_edge(other, ends[2 * k], ends[2 * k + 1], 1.5)

    expected = np.zeros((8, 6))
    expected[3:5] = 0.75  # two pixels share the edge; each end counts for a half
    for bad in ([np.nan, 1.0], [2.0, np.inf], [1e30, 2.0]):
        ends.from_numpy(np.array([[3.5, -2], [3.5, 9], [1.0, 2.0], bad], np.float64 if dtype == ti.f64 else np.float32))
        for J in jacobian(draw, ends, [image, other]):
            assert_allclose(J[..., :2, 0].sum(-1), expected, rtol=1e-5)
            assert not J[..., 2:, :].any()
    assert set(np.unique(image.to_numpy())) == {0.5, 2.0}
