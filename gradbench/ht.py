"""Hand tracking: distances of measured points from a hand of bones, and their Jacobian from one launch."""

from typing import Any

import numpy as np
import taichi as ti
from rotations import turned

from taichi_ext import Jacobian


def field_of(values: Any, element: int = 0) -> ti.Field:
    """A field of numbers, vectors or matrices that holds the values."""
    values = np.asarray(values)
    dtype, split = ti.i32 if values.dtype.kind in "iu" else ti.f64, values.ndim - element
    kinds = (ti.field, ti.Vector.field, ti.Matrix.field)
    field = kinds[element](*values.shape[split:], dtype=dtype, shape=values.shape[:split])
    field.from_numpy(values.astype(np.int32 if dtype == ti.i32 else np.float64))
    return field


@ti.data_oriented
class Hand:
    """A hand as fields.  Bones turn and move with the bone before; a bone without one with one that stands still."""

    def __init__(self, given: dict[str, Any]) -> None:
        data, model = given["data"], given["data"]["model"]
        if model["is_mirrored"]:
            raise ValueError("mirrored hands are not supported")
        self.bones, self.count = model["bone_count"], len(data["points"])
        self.is_simple = not len(given["us"])  # points are compared with corners, not with places in triangles
        parents, weights = np.array(model["parents"]), np.array(model["weights"])
        relative, inverse = (np.array(model[k]) for k in ("base_relatives", "inverse_base_absolutes"))
        vertex, bone = np.nonzero(weights)
        corners = np.array(data["correspondences"])
        self.parents = field_of(np.where(parents < 0, self.bones, parents))
        self.own_turn, self.own_shift = field_of(relative[:, :3, :3], 2), field_of(relative[:, :3, 3], 1)
        self.back_turn, self.back_shift = field_of(inverse[:, :3, :3], 2), field_of(inverse[:, :3, 3], 1)
        self.base = field_of(np.array(model["base_positions"])[:, :3], 1)
        self.first = field_of(np.searchsorted(vertex, np.arange(len(weights) + 1)))
        self.bone, self.weight = field_of(bone), field_of(weights[vertex, bone])
        triangles = np.tile(corners[:, None], (1, 3)) if self.is_simple else np.array(model["triangles"])[corners]
        self.corners, self.points = field_of(triangles, 1), field_of(data["points"], 1)
        self.theta = field_of(given["theta"])
        self.us = field_of(np.zeros((self.count, 2)) if self.is_simple else given["us"], 1)
        self.angles = field_of(np.zeros((self.bones, 3)), 1)
        self.turn = field_of(np.tile(np.eye(3), (self.bones + 1, 1, 1)), 2)
        self.shift = field_of(np.zeros((self.bones + 1, 3)), 1)
        self.skin_turn, self.skin_shift = (
            field_of(np.zeros((self.bones, 3, 3)), 2),
            field_of(np.zeros((self.bones, 3)), 1),
        )
        self.residuals = field_of(np.zeros((self.count, 3)), 1)

    @ti.func
    def corner(self, v):
        """Where a vertex is."""
        found = ti.Vector([0.0, 0.0, 0.0])
        for k in range(self.first[v], self.first[v + 1]):
            b = self.bone[k]
            found += self.weight[k] * (self.skin_turn[b] @ self.base[v] + self.skin_shift[b])
        return found

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
            if ti.static(self.is_simple):
                p = self.corner(self.corners[i][0])
            else:
                for c in ti.static(range(3)):
                    share = 1 - self.us[i][0] - self.us[i][1] if ti.static(c == 2) else self.us[i][c % 2]
                    p += share * self.corner(self.corners[i][c])
            y = turned(ti.Vector([self.theta[0], self.theta[1], self.theta[2]]), p)
            self.residuals[i] = self.points[i] - y - ti.Vector([self.theta[3], self.theta[4], self.theta[5]])


def objective(hand: Hand) -> Hand:
    hand.run()
    return hand


def prepared(given: dict[str, Any]) -> tuple[Hand, Jacobian]:
    hand = Hand(given)
    params = [hand.theta] if hand.is_simple else [hand.us, hand.theta]
    return hand, Jacobian(hand.run, params, hand.residuals, format=None if hand.is_simple else "csr")


def jacobian(state: tuple[Hand, Jacobian]) -> tuple[Hand, Any]:
    return state[0], state[1]()


def encoded_jacobian(found: tuple[Hand, Any]) -> list[list[float]]:
    """Rows of the two columns of the place in the triangle, if there are some, and of those of the pose."""
    hand, blocks = found
    if hand.is_simple:
        return blocks[0].reshape(3 * hand.count, -1).tolist()
    places, own = blocks[0].tocoo(), np.zeros((3 * hand.count, 2))
    own[places.row, places.col - 2 * (places.row // 3)] = places.data
    return np.hstack([own, blocks[1].toarray()]).tolist()


FUNCTIONS = {
    "objective": (Hand, objective, lambda hand: hand.residuals.to_numpy().reshape(-1).tolist()),
    "jacobian": (prepared, jacobian, encoded_jacobian),
}
