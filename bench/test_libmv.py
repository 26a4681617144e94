"""libmv's format: a file in either order of bytes, and errors that are 0 where markers are where points are seen."""

import numpy as np
import pytest
import taichi as ti
from libmv import make_libmv, read_scene
from numpy.testing import assert_allclose, assert_array_equal

from taichi_ext import least_squares

RNG = np.random.default_rng(0)
ANGLES, PLACES = 0.1 * RNG.standard_normal(4), RNG.uniform(-1, 1, (12, 3))
LENS = [800.0, 320.0, 240.0, -0.05, 0.01, 0.0, 0.0, 0.0]


def write_scene(path, order):
    """Four cameras and twelve points, the numbers of both with gaps; a marker of a camera that is not there."""
    rotations = np.array([[[np.cos(a), 0, np.sin(a)], [0, 1, 0], [-np.sin(a), 0, np.cos(a)]] for a in ANGLES])
    translations = np.stack([ANGLES, 0.2 * ANGLES, np.full(4, 5.0)], axis=1)
    y = np.einsum("cij,pj->cpi", rotations, PLACES) + translations[:, None]
    u = y[..., :2] / y[..., 2:]
    q = (u * u).sum(axis=-1, keepdims=True)
    seen = 800 * (1 + q * (-0.05 + 0.01 * q)) * u + [320, 240]
    cameras = np.concatenate([rotations.transpose(0, 2, 1).reshape(4, 9), translations], axis=1)
    parts = [np.array(LENS, f"{order}f4").tobytes()]
    pairs = [(c, p) for p in range(12) for c in range(3, -1, -1)]  # so that the first camera is the last of the table
    markers = [([3 * c + 2, 2 * p], seen[c, p]) for c, p in pairs] + [([99, 0], seen[0, 0])]
    for rows in (
        [([3 * c + 2], row) for c, row in enumerate(cameras)],
        [([2 * p], row) for p, row in enumerate(PLACES)],
        markers,
    ):
        parts.append(np.array(len(rows), f"{order}i4").tobytes())
        for numbers, values in rows:
            parts += [np.array(numbers, f"{order}i4").tobytes(), np.array(values, f"{order}f4").tobytes()]
    path.write_bytes({"<": b"v", ">": b"V"}[order] + b"P" + b"".join(parts))


@pytest.mark.parametrize("order", ["<", ">"])
def test_a_file(tmp_path, order):
    path = tmp_path / "scene.bin"
    write_scene(path, order)
    scene = read_scene(path)
    assert scene.markers.shape == (48, 2)
    assert scene.pairs[0].tolist() == [0, 0]
    assert_array_equal(scene.intrinsics, np.array(LENS, np.float32))
    pytest.importorskip("scipy")
    if ti.cfg.arch != ti.cpu:
        pytest.skip("needs float64")
    program = make_libmv(path)
    program.kernel()
    assert_allclose(program.outputs[0].to_numpy(), 0.0, atol=2e-3)  # float32 in the file
    lens, cameras, points = program.params
    points.from_numpy(PLACES + 0.01 * RNG.standard_normal(PLACES.shape))
    result = least_squares(program.kernel, [lens, cameras, points], program.outputs, eliminate=points)
    assert result.cost < 1e-5 < result.history[0].cost
