"""Tracking a hand: the pose of 22 bones, and where measured points lie on its surface.

Each residual depends on the place of its point (2 numbers of its own) and on the pose (26 numbers). Rows of 26 columns
go through the bones, which each turn with the bone before; the places have columns of their own. Both come from one
launch.
``--data`` reads the hand of ADBench and one of its data sets; without it, a hand of simple shape is made.

    python examples/hand_tracking.py --output hand_tracking.png
    python examples/hand_tracking.py --data FOLDER --set hand1_t26_c100
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import plotting
import scipy.sparse as sparse
import taichi as ti
from compare import Comparison
from scipy.sparse.linalg import splu

from taichi_ext import Jacobian

ANGLES = 26
ITERATIONS = 8


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


@ti.data_oriented
class Hand:
    """The hand as fields. A bone turns and moves with the bone before; those of the palm with one that stands still."""

    def __init__(self, data: dict[str, np.ndarray]) -> None:
        self.bones, self.count = len(data["parents"]), len(data["points"])
        self.theta, self.u = field_of(data["theta"]), field_of(data["u"], 1)
        self.residuals = ti.Vector.field(3, ti.f64, self.count)
        self.parents = field_of(np.where(data["parents"] < 0, self.bones, data["parents"]))
        self.own_turn, self.own_shift = (
            field_of(data["relative"][:, :3, :3], 2),
            field_of(data["relative"][:, :3, 3], 1),
        )
        self.back_turn, self.back_shift = (
            field_of(data["inverse"][:, :3, :3], 2),
            field_of(data["inverse"][:, :3, 3], 1),
        )
        self.base, self.weight = field_of(data["base"], 1), field_of(data["weight"])
        self.first, self.bone = field_of(data["first"]), field_of(data["bone"])
        self.corners, self.points = field_of(data["corners"], 1), field_of(data["points"], 1)
        self.angles = ti.Vector.field(3, ti.f64, self.bones)
        self.turn, self.shift = (
            field_of(np.tile(np.eye(3), (self.bones + 1, 1, 1)), 2),
            ti.Vector.field(3, ti.f64, self.bones + 1),
        )
        self.skin_turn, self.skin_shift = (
            ti.Matrix.field(3, 3, ti.f64, self.bones),
            ti.Vector.field(3, ti.f64, self.bones),
        )

    @ti.kernel
    def run(self):
        for g in range(5):
            for k in ti.static(range(3)):
                self.angles[4 * g + 2 + k][0] = self.theta[6 + 4 * g + (k + 1 if k else 0)]
            self.angles[4 * g + 2][2] = self.theta[7 + 4 * g]
        ti.loop_config(serialize=True)
        for b in range(self.bones):
            a = self.angles[b]
            c, s = ti.cos(a), ti.sin(a)
            turn = ti.Matrix([
                [c[1] * c[2], s[0] * s[1] * c[2] - c[0] * s[2], c[0] * s[1] * c[2] + s[0] * s[2]],
                [c[1] * s[2], s[0] * s[1] * s[2] + c[0] * c[2], c[0] * s[1] * s[2] - s[0] * c[2]],
                [-s[1], s[0] * c[1], c[0] * c[1]],
            ])  # fmt: skip
            before = self.parents[b]
            self.turn[b] = self.turn[before] @ (self.own_turn[b] @ turn)
            self.shift[b] = self.turn[before] @ self.own_shift[b] + self.shift[before]
        for b in range(self.bones):
            self.skin_turn[b] = self.turn[b] @ self.back_turn[b]
            self.skin_shift[b] = self.turn[b] @ self.back_shift[b] + self.shift[b]
        for i in range(self.count):
            p = ti.Vector([0.0, 0.0, 0.0])
            for c in ti.static(range(3)):
                share = 1 - self.u[i][0] - self.u[i][1] if ti.static(c == 2) else self.u[i][c % 2]
                v = self.corners[i][c]
                corner = ti.Vector([0.0, 0.0, 0.0])
                for k in range(self.first[v], self.first[v + 1]):
                    b = self.bone[k]
                    corner += self.weight[k] * (self.skin_turn[b] @ self.base[v] + self.skin_shift[b])
                p += share * corner
            y = turned(ti.Vector([self.theta[0], self.theta[1], self.theta[2]]), p)
            self.residuals[i] = self.points[i] - y - ti.Vector([self.theta[3], self.theta[4], self.theta[5]])


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


def seen(hand: Hand) -> tuple[np.ndarray, np.ndarray]:
    """The joints, turned and moved with the hand, and the places on it of the measured points."""
    theta = hand.theta.to_numpy()
    angle = float(np.linalg.norm(theta[:3]))
    v, p = theta[:3] / angle, hand.shift.to_numpy()[: hand.bones]
    joints = p * np.cos(angle) + np.cross(v, p) * np.sin(angle) + np.outer(p @ v, v) * (1 - np.cos(angle))
    return joints + theta[3:6], hand.points.to_numpy() - hand.residuals.to_numpy()


def track(hand: Hand, plan: Jacobian) -> tuple[float, float]:
    """Damped Gauss-Newton steps, each taken if it comes closer; the distance at the start and at the end."""
    fields, damping, errors = (hand.u, hand.theta), 1e-3, []
    for _ in range(ITERATIONS):
        before = [field.to_numpy() for field in fields]
        J = sparse.hstack(plan(), format="csc")
        r = hand.residuals.to_numpy().ravel()
        errors.append(float(np.sqrt((r * r).mean())))
        normal = J.T @ J
        for _ in range(8):
            damped = normal + damping * sparse.diags_array(normal.diagonal() + 1e-9)
            change = splu(damped.tocsc()).solve(-J.T @ r)
            for field, values, part in zip(fields, before, np.split(change, [2 * hand.count]), strict=True):
                field.from_numpy(values + part.reshape(values.shape))
            hand.run()
            if (hand.residuals.to_numpy() ** 2).sum() < (r * r).sum():
                damping /= 10
                break
            damping *= 10
    hand.run()
    return errors[0], float(np.sqrt((hand.residuals.to_numpy() ** 2).mean()))


def main(arguments: Sequence[str] | None = None) -> int:
    """J compared with complex steps in NumPy, and a pose that is found by Gauss-Newton steps."""
    options = plotting.parser(__doc__.splitlines()[0], "hand_tracking.png")
    options.add_argument("--data", type=Path, help="folder with ADBench's hand")
    options.add_argument("--set", default="hand1_t26_c100", help="name of the data set (default: %(default)s)")
    given = plotting.parse(options, arguments)
    ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
    data = made() if given.data is None else read(given.data, given.set)
    hand = Hand(data)
    compared = Comparison(f"A hand of {hand.bones} bones, {hand.count} points, {ANGLES} numbers of the pose")
    plan = Jacobian(hand.run, [hand.u, hand.theta], hand.residuals, format="csr")
    blocks = plan()
    expected = residuals(data, data["theta"], data["u"])
    compared.numbers("residuals (NumPy)", hand.residuals.to_numpy(), expected, rtol=0, atol=1e-12)
    J = sparse.hstack(blocks)
    compared.numbers("J (complex steps in NumPy)", J.toarray(), by_complex_steps(data), rtol=0, atol=1e-10)
    compared.holds(
        "each row has 2 entries of its place", blocks[0].nnz == 2 * 3 * hand.count, f"{J.nnz} entries in all"
    )
    before = seen(hand)
    start, end = track(hand, plan)
    compared.holds(
        "the points come closer to the hand", end < 0.9 * start, f"root mean square {start:.1e}, then {end:.1e}"
    )
    if (figure := plotting.new_figure(7.5, 4)) is not None:
        for n, (title, (joints, found)) in enumerate({"start": before, "end": seen(hand)}.items()):
            axes = figure.add_subplot(1, 2, n + 1)
            for b, parent in enumerate(data["parents"]):
                if parent >= 0:
                    axes.plot(*joints[[b, parent], :2].T, "o-", color=plotting.GREY, markersize=3)
            ends = zip(data["points"], found, strict=True)
            for measured, place in ends:
                axes.plot(*np.stack([measured, place])[:, :2].T, color=plotting.ORANGE, linewidth=1)
            axes.plot(*data["points"][:, :2].T, ".", color=plotting.BLUE, label="measured points")
            axes.plot([], [], color=plotting.ORANGE, label="their distance from the hand")
            axes.set(title=f"{title}: bones and measured points", xlabel="x", ylabel="y", aspect="equal")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
        plotting.save(figure, given.output)
    return compared.exit_code


if __name__ == "__main__":
    sys.exit(main())
