"""Tracking a hand: the pose of 22 bones, and where measured points lie on its surface.

Each residual depends on the place of its point (2 numbers of its own) and on the pose (26 numbers). Rows of 26 columns
go through the bones, which each turn with the bone before; the places have columns of their own. Both come from one
launch. ``--data`` reads the hand of ADBench and one of its data sets; without it, a hand of simple shape is made.

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
from hand_data import ANGLES, by_complex_steps, field_of, made, read, residuals, seen, turned

from taichi_ext import Jacobian, least_squares


@ti.data_oriented
class Hand:
    """The hand as fields. A bone turns and moves with the bone before; those of the palm with one that stands still."""

    def __init__(self, data: dict[str, np.ndarray]) -> None:
        self.bones, self.count = len(data["parents"]), len(data["points"])
        self.theta, self.u = field_of(data["theta"]), field_of(data["u"], 1)
        self.residuals = ti.Vector.field(3, ti.f64, self.count)
        self.parents = field_of(np.where(data["parents"] < 0, self.bones, data["parents"]))
        relative, inverse = data["relative"], data["inverse"]
        self.own_turn, self.own_shift = field_of(relative[:, :3, :3], 2), field_of(relative[:, :3, 3], 1)
        self.back_turn, self.back_shift = field_of(inverse[:, :3, :3], 2), field_of(inverse[:, :3, 3], 1)
        self.base, self.weight = field_of(data["base"], 1), field_of(data["weight"])
        self.first, self.bone = field_of(data["first"]), field_of(data["bone"])
        self.corners, self.points = field_of(data["corners"], 1), field_of(data["points"], 1)
        self.angles = ti.Vector.field(3, ti.f64, self.bones)
        self.turn = field_of(np.tile(np.eye(3), (self.bones + 1, 1, 1)), 2)
        self.skin_turn = ti.Matrix.field(3, 3, ti.f64, self.bones)
        self.shift, self.skin_shift = (ti.Vector.field(3, ti.f64, n) for n in (self.bones + 1, self.bones))

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


def main(arguments: Sequence[str] | None = None) -> int:
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
    compared.holds("each row has 2 entries of its place", blocks[0].nnz == 6 * hand.count, f"{J.nnz} entries in all")
    before = seen(hand)
    fit = least_squares(hand.run, [hand.u, hand.theta], hand.residuals, format="csr", max_iterations=8)
    start, end = (np.sqrt(2 * cost / (3 * hand.count)) for cost in (fit.history[0].cost, fit.cost))
    closer = f"root mean square {start:.1e}, then {end:.1e}"
    compared.holds("the points come closer to the hand", end < 0.9 * start, closer)
    draw(given.output, data, before, seen(hand))
    return compared.exit_code


def draw(path: Path, data: dict[str, np.ndarray], start: tuple[np.ndarray, ...], end: tuple[np.ndarray, ...]) -> None:
    if (figure := plotting.new_figure(7.5, 4)) is None:
        return
    for axes, title, (joints, found) in zip(figure.subplots(1, 2), ("start", "end"), (start, end), strict=True):
        pairs = [(b, parent) for b, parent in enumerate(data["parents"]) if parent >= 0]
        axes.plot(*joints[pairs, :2].T, "o-", color=plotting.GREY, markersize=3)
        axes.plot(*np.stack([data["points"], found], 1)[..., :2].T, color=plotting.ORANGE, linewidth=1)
        axes.plot(*data["points"][:, :2].T, ".", color=plotting.BLUE, label="measured points")
        axes.plot([], [], color=plotting.ORANGE, label="their distance from the hand")
        axes.set(title=f"{title}: bones and measured points", xlabel="x", ylabel="y", aspect="equal")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    plotting.save(figure, path)


if __name__ == "__main__":
    sys.exit(main())
