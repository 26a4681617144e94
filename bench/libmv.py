"""libmv's bundle adjustment problems: scenes of a film, in the files of Ceres' folder data/libmv-ba-problems."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import taichi as ti
from sparse_programs import SparseProgram, turned


class Scene(NamedTuple):
    """What a file holds.

    Attributes:
        intrinsics: focal length, principal point (2), radial (3) and tangential distortion (2).
        cameras: rotation matrices and translations, of shapes (n, 3, 3) and (n, 3).
        points: of shape (m, 3).
        pairs: the camera and the point of each marker, of shape (p, 2): their places in those arrays.
        markers: in pixels, of shape (p, 2).
    """

    intrinsics: np.ndarray
    cameras: tuple[np.ndarray, np.ndarray]
    points: np.ndarray
    pairs: np.ndarray
    markers: np.ndarray


def read_scene(path: str | Path) -> Scene:
    """The problem of a file in libmv's format; the first camera is that of the first marker, as Ceres holds it."""
    data = Path(path).read_bytes()
    order, at = {b"v": "<", b"V": ">"}[data[:1]], 34
    if data[1:2] != b"P":
        raise ValueError(f"{path} has its markers in normalized coordinates; expected pixels.")
    tables: list[np.ndarray] = []
    for integers, floats in ((1, 12), (1, 3), (2, 2)):
        kind = np.dtype([("numbers", f"{order}i4", (integers,)), ("values", f"{order}f4", (floats,))])
        count = int(np.frombuffer(data, f"{order}i4", 1, at)[0])
        tables.append(np.frombuffer(data, kind, count, at + 4))
        at += 4 + count * kind.itemsize
    cameras, points, markers = tables
    cameras = np.roll(cameras, -int(np.argmax(cameras["numbers"][:, 0] == markers["numbers"][0, 0])))
    places = [{int(n): k for k, n in enumerate(table["numbers"][:, 0])} for table in (cameras, points)]
    is_known = [all(int(n) in place for n, place in zip(pair, places, strict=True)) for pair in markers["numbers"]]
    markers = markers[is_known]
    pairs = [[place[int(n)] for n, place in zip(pair, places, strict=True)] for pair in markers["numbers"]]
    values = cameras["values"].astype(float)
    rotations = values[:, :9].reshape(-1, 3, 3).transpose(0, 2, 1)
    return Scene(
        np.frombuffer(data, f"{order}f4", 8, 2).astype(float),
        (rotations, values[:, 9:]),
        points["values"].astype(float),
        np.array(pairs, np.int32),
        markers["values"].astype(float),
    )


def make_libmv(path: str | Path) -> SparseProgram:
    """Errors of the markers, by intrinsics (focal length, two coefficients of distortion), cameras but one, points."""
    from scipy.spatial.transform import Rotation

    scene = read_scene(path)
    rotations, translations = scene.cameras
    poses = np.concatenate([Rotation.from_matrix(rotations).as_rotvec(), translations], axis=1)
    lens, cameras, p = ti.field(ti.f64, 3), ti.field(ti.f64, (len(poses) - 1, 6)), len(scene.pairs)
    points = ti.Vector.field(3, ti.f64, len(scene.points))
    pairs, seen, errors = ti.Vector.field(2, ti.i32, p), ti.Vector.field(2, ti.f64, p), ti.Vector.field(2, ti.f64, p)
    lens.from_numpy(scene.intrinsics[[0, 3, 4]])
    cameras.from_numpy(poses[1:])
    points.from_numpy(scene.points)
    pairs.from_numpy(scene.pairs)
    seen.from_numpy(scene.markers)
    first, centre = poses[0].tolist(), scene.intrinsics[1:3].tolist()

    @ti.kernel
    def kernel():
        for k in errors:
            i = pairs[k][0] - 1
            r, t = ti.Vector(first[:3]), ti.Vector(first[3:])
            if i >= 0:
                r = ti.Vector([cameras[i, 0], cameras[i, 1], cameras[i, 2]])
                t = ti.Vector([cameras[i, 3], cameras[i, 4], cameras[i, 5]])
            y = turned(r, points[pairs[k][1]]) + t
            u = ti.Vector([y[0], y[1]]) / y[2]
            q = u.dot(u)
            u *= lens[0] * (1 + lens[1] * q + lens[2] * q * q)
            errors[k] = u + ti.Vector(centre) - seen[k]

    return SparseProgram(kernel, [lens, cameras, points], [errors], seen=seen, ends=pairs)


def gtsam_libmv(path: str | Path) -> tuple[Any, Any]:
    """The same problem as GTSAM's graph, and the values to start from."""
    import gtsam
    from gtsam.symbol_shorthand import C, K, P
    from scipy.spatial.transform import Rotation

    scene, noise = read_scene(path), gtsam.noiseModel.Unit.Create(2)
    graph, start = gtsam.NonlinearFactorGraph(), gtsam.Values()
    for (i, j), seen in zip(scene.pairs.tolist(), scene.markers, strict=True):
        graph.add(gtsam.GeneralSFMFactor2Cal3Bundler(seen, noise, C(i), P(j), K(0)))
    start.insert(K(0), gtsam.Cal3Bundler(*scene.intrinsics[[0, 3, 4, 1, 2]]))
    for i, (R, t) in enumerate(zip(*scene.cameras, strict=True)):
        start.insert(C(i), gtsam.Pose3(gtsam.Rot3(Rotation.from_matrix(R).as_matrix()), t).inverse())
    graph.add(gtsam.NonlinearEqualityPose3(C(0), start.atPose3(C(0))))
    for j, point in enumerate(scene.points):
        start.insert(P(j), point)
    return graph, start
