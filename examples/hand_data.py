"""Shared by hand_tracking.py and benchmarks: the data of a hand, and its residuals in NumPy."""

from pathlib import Path
from typing import Any

import numpy as np
import taichi as ti

ANGLES = 26


def read(folder: Path, name: str) -> dict[str, np.ndarray]:
    """ADBench's hand, and one of its data sets."""
    bones = [line.split(":") for line in (folder / "bones.txt").read_text().split()]
    matrices = np.array([b[2:34] for b in bones], float).reshape(-1, 2, 4, 4)
    vertices = [line.split(":") for line in (folder / "vertices.txt").read_text().split()]
    counts = [int(v[8]) for v in vertices]
    skin = [(int(v[9 + 2 * k]), float(v[10 + 2 * k])) for v, n in zip(vertices, counts, strict=True) for k in range(n)]
    triangles = np.array((folder / "triangles.txt").read_text().replace(":", " ").split(), int).reshape(-1, 3)
    lines = (folder / f"{name}.txt").read_text().split("\n")
    count, angles = map(int, lines[0].split())
    found = np.array([line.split() for line in lines[1 : count + 1]], float)
    return {
        "parents": np.array([int(b[1]) for b in bones]),
        "relative": matrices[:, 0],
        "inverse": matrices[:, 1],
        "base": np.array([v[:3] for v in vertices], float),
        "first": np.concatenate([[0], np.cumsum(counts)]),
        "bone": np.array([b for b, _ in skin]),
        "weight": np.array([w for _, w in skin]),
        "corners": triangles[found[:, 0].astype(int)],
        "points": found[:, 1:],
        "u": np.array([line.split() for line in lines[count + 1 : 2 * count + 1]], float),
        "theta": np.array(lines[2 * count + 1 : 2 * count + 1 + angles], float),
    }


def made(points: int = 60, seed: int = 0) -> dict[str, np.ndarray]:
    """A hand of simple shape: a palm, five fingers of four bones, and points of it that were measured."""
    rng = np.random.default_rng(seed)
    parents = np.array([-1, *(0 if k % 4 == 0 else k for k in range(20)), 0])
    relative = np.tile(np.eye(4), (22, 1, 1))
    for k in range(20):
        relative[k + 1, :3, 3] = (0.3 * (k // 4 - 2), 1.0, 0) if k % 4 == 0 else (0, 0.3, 0)
    whole = relative.copy()
    for b in range(1, 22):
        whole[b] = whole[parents[b]] @ relative[b]
    bone = np.repeat(np.arange(21), 3)
    base = whole[bone, :3, 3] + 0.1 * rng.standard_normal((63, 3))
    pairs = np.stack([bone, np.maximum(parents[bone], 0)], axis=1)
    corners = 3 * rng.integers(0, 21, points)[:, None] + np.arange(3)
    u = rng.dirichlet((1, 1, 1), points)[:, :2]
    data = {
        "parents": parents, "relative": relative, "inverse": np.linalg.inv(whole), "base": base,
        "first": 2 * np.arange(64), "bone": pairs.ravel(), "weight": np.tile([0.7, 0.3], 63), "corners": corners,
        "points": np.zeros((points, 3)), "u": u, "theta": 0.3 * rng.standard_normal(ANGLES),
    }  # fmt: skip
    data["points"] = -residuals(data, data["theta"], u)
    data["theta"] = data["theta"] + 0.05 * rng.standard_normal(ANGLES)
    return data


def residuals(data: dict[str, np.ndarray], theta: np.ndarray, u: np.ndarray) -> np.ndarray:
    """The same in NumPy, bone by bone, of complex numbers too."""
    absolute, skin = [], []
    for b, parent in enumerate(data["parents"]):
        x = y = z = 0.0 * theta[0]
        g, k = divmod(b - 2, 4)
        if 0 <= g < 5 and k < 3:
            x, z = theta[6 + 4 * g + (k + 1 if k else 0)], theta[7 + 4 * g] if k == 0 else z
        turn = about(2, z) @ about(1, y) @ about(0, x)
        own = data["relative"][b] @ turn
        absolute.append(own if parent < 0 else absolute[parent] @ own)
        skin.append(absolute[b] @ data["inverse"][b])
    at = np.concatenate([data["base"], np.ones((len(data["base"]), 1))], axis=1)
    vertex = np.repeat(np.arange(len(at)), np.diff(data["first"]))
    moved = data["weight"][:, None] * np.einsum("kij,kj->ki", np.array(skin)[data["bone"]], at[vertex])[:, :3]
    places = np.zeros((len(at), 3), moved.dtype)
    np.add.at(places, vertex, moved)
    shares = np.stack([u[:, 0], u[:, 1], 1 - u[:, 0] - u[:, 1]], axis=1)
    p = np.einsum("kc,kci->ki", shares, places[data["corners"]])
    r = theta[:3]
    angle = np.sqrt((r * r).sum())
    v = r / angle
    y = p * np.cos(angle) + np.cross(v, p) * np.sin(angle) + np.outer(p @ v, v) * (1 - np.cos(angle))
    return data["points"] - y - theta[3:6]


def about(axis: int, angle: complex) -> np.ndarray:
    """A rotation about one of the axes, 4 x 4."""
    found = np.eye(4).astype(np.result_type(angle))
    a, b = (axis + 1) % 3, (axis + 2) % 3
    found[a, a] = found[b, b] = np.cos(angle)
    found[b, a], found[a, b] = np.sin(angle), -np.sin(angle)
    return found


def by_complex_steps(data: dict[str, np.ndarray]) -> np.ndarray:
    """J in NumPy, a column at a time, exact to rounding: by u, then by theta."""
    size = data["u"].size
    point, columns = np.concatenate([data["u"].ravel(), data["theta"]]), []
    for k in range(len(point)):
        moved = point.astype(complex)
        moved[k] += 1e-30j
        found = residuals(data, moved[size:], moved[:size].reshape(-1, 2))
        columns.append(found.imag.ravel() / 1e-30)
    return np.stack(columns, axis=1)


def field_of(values: np.ndarray, rank: int = 0) -> ti.Field:
    """A field of numbers, vectors or matrices that holds the values."""
    is_integer = values.dtype.kind == "i"
    split = values.ndim - rank
    kinds = (ti.field, lambda *a: ti.Vector.field(*values.shape[split:], *a), None)
    kind = kinds[rank] or (lambda *a: ti.Matrix.field(*values.shape[split:], *a))
    field = kind(ti.i32 if is_integer else ti.f64, values.shape[:split])
    field.from_numpy(values.astype(np.int32 if is_integer else np.float64))
    return field


@ti.func
def turned(r, x):
    """x, turned by a rotation vector."""
    square = r.dot(r)
    y = x + r.cross(x)
    if square > 0:
        angle = ti.sqrt(square)
        v = r / angle
        y = x * ti.cos(angle) + v.cross(x) * ti.sin(angle) + v * (v.dot(x) * (1 - ti.cos(angle)))
    return y


def seen(hand: Any) -> tuple[np.ndarray, np.ndarray]:
    """The joints, turned and moved with the hand, and the places on it of the measured points."""
    theta = hand.theta.to_numpy()
    angle = float(np.linalg.norm(theta[:3]))
    v, p = theta[:3] / angle, hand.shift.to_numpy()[: hand.bones]
    joints = p * np.cos(angle) + np.cross(v, p) * np.sin(angle) + np.outer(p @ v, v) * (1 - np.cos(angle))
    return joints + theta[3:6], hand.points.to_numpy() - hand.residuals.to_numpy()
