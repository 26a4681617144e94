"""ADBench's hand with a sparse Jacobian, and a kernel derived by hand that writes the same CSR arrays."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import taichi as ti
from sparse_programs import SparseProgram, turned, turned_by

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import hand_tracking

FINGERS, OF_FINGER = 5, 4  # angles of a finger: the knuckle about x and about z, then two joints about x
POSE = 4  # entries of a row by the pose of the whole hand: three of its rotation, one of its place


@ti.data_oriented
class HandByHand(hand_tracking.Hand):
    """The hand, and its derivatives: a bone depends on the angles of its finger alone, up to its own joint."""

    def __init__(self, data: dict[str, np.ndarray]) -> None:
        super().__init__(data)
        bones = self.bones
        number = np.arange(bones + 1) - 2
        in_finger = (number >= 0) & (number < 4 * FINGERS) & (number % 4 < 3)  # the fourth bone is in the palm
        finger, joint = np.where(in_finger, number // 4, -1), number % 4
        counts = np.where(in_finger, joint + 2, 0)
        own_x = np.where(in_finger, np.where(joint > 0, joint + 1, 0), -1)
        own_z = np.where(in_finger & (joint == 0), 1, -1)
        self.finger, self.counts = _field(finger), _field(counts)
        self.own_x, self.own_z = _field(own_x), _field(own_z)  # which angle of the finger turns the bone
        rows = [self._angles(data, i, finger, counts) for i in range(self.count)]
        self.first_angle = _field(np.cumsum([0, *map(len, rows)]))
        self.angle = _field(np.concatenate(rows))
        self.entry = _field(np.cumsum([0, *(3 * (POSE + len(row)) for row in rows)]))  # entry of each point
        shape = (bones + 1, OF_FINGER)
        self.turn_by, self.skin_turn_by = (ti.Matrix.field(3, 3, ti.f64, shape) for _ in range(2))
        self.shift_by, self.skin_shift_by = (ti.Vector.field(3, ti.f64, shape) for _ in range(2))

    @staticmethod
    def _angles(data: dict[str, np.ndarray], point: int, finger: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """The angles of fingers that a point depends on, in ascending order."""
        bones = {b for v in data["corners"][point] for b in data["bone"][data["first"][v] : data["first"][v + 1]]}
        return np.array(sorted({OF_FINGER * finger[b] + a for b in bones for a in range(counts[b])}), np.int32)

    @property
    def entries(self) -> int:
        return self.entry[self.count]

    @ti.kernel
    def run_by_hand(
        self,
        by_place: ti.types.ndarray(dtype=ti.f64, ndim=3),
        c0: ti.types.ndarray(dtype=ti.i32, ndim=3),
        by_pose: ti.types.ndarray(dtype=ti.f64, ndim=1),
        c1: ti.types.ndarray(dtype=ti.i32, ndim=1),
    ):
        ti.loop_config(serialize=True)
        for b in range(self.bones):
            x, z = 0.0, 0.0
            if self.own_x[b] >= 0:
                x = self.theta[6 + OF_FINGER * self.finger[b] + self.own_x[b]]
            if self.own_z[b] >= 0:
                z = self.theta[6 + OF_FINGER * self.finger[b] + self.own_z[b]]
            c, s, k, t = ti.cos(x), ti.sin(x), ti.cos(z), ti.sin(z)
            before, around = self.parents[b], self.turn[self.parents[b]] @ self.own_turn[b]
            turn = ti.Matrix([[k, -c * t, s * t], [t, c * k, -s * k], [0.0, s, c]])
            self.turn[b] = around @ turn
            self.shift[b] = self.turn[before] @ self.own_shift[b] + self.shift[before]
            for a in range(self.counts[b]):
                by = self.turn_by[before, a] @ self.own_turn[b] @ turn
                if a == self.own_x[b]:
                    by += around @ ti.Matrix([[0.0, s * t, c * t], [0.0, -s * k, -c * k], [0.0, c, -s]])
                if a == self.own_z[b]:
                    by += around @ ti.Matrix([[-t, -c * k, s * k], [k, -c * t, s * t], [0.0, 0.0, 0.0]])
                self.turn_by[b, a] = by
                self.shift_by[b, a] = self.turn_by[before, a] @ self.own_shift[b] + self.shift_by[before, a]
        for b in range(self.bones):
            self.skin_turn[b] = self.turn[b] @ self.back_turn[b]
            self.skin_shift[b] = self.turn[b] @ self.back_shift[b] + self.shift[b]
            for a in range(self.counts[b]):
                self.skin_turn_by[b, a] = self.turn_by[b, a] @ self.back_turn[b]
                self.skin_shift_by[b, a] = self.turn_by[b, a] @ self.back_shift[b] + self.shift_by[b, a]
        for i in range(self.count):
            r = ti.Vector([self.theta[0], self.theta[1], self.theta[2]])
            shares = ti.Vector([self.u[i][0], self.u[i][1], 1 - self.u[i][0] - self.u[i][1]])
            corners = ti.Matrix.zero(ti.f64, 3, 3)
            for c in ti.static(range(3)):
                v = self.corners[i][c]
                corner = ti.Vector([0.0, 0.0, 0.0])
                for k in range(self.first[v], self.first[v + 1]):
                    b = self.bone[k]
                    corner += self.weight[k] * (self.skin_turn[b] @ self.base[v] + self.skin_shift[b])
                for d in ti.static(range(3)):
                    corners[d, c] = corner[d]
            p = corners @ shares
            self.residuals[i] = self.points[i] - turned(r, p) - ti.Vector([self.theta[3], self.theta[4], self.theta[5]])
            for a in ti.static(range(2)):
                edge = turned(r, ti.Vector([corners[d, 2] - corners[d, a] for d in ti.static(range(3))]))
                for d in ti.static(range(3)):
                    by_place[i, d, a] = edge[d]
                    c0[i, d, a] = 2 * i + a
            first, length = self.entry[i], POSE + self.first_angle[i + 1] - self.first_angle[i]
            for a in ti.static(range(3)):
                by = turned_by(r, p, a)
                for d in ti.static(range(3)):
                    by_pose[first + d * length + a] = -by[d]
                    c1[first + d * length + a] = a
            for d in ti.static(range(3)):
                by_pose[first + d * length + 3] = -1.0
                c1[first + d * length + 3] = 3 + d
            for n in range(length - POSE):
                number = self.angle[self.first_angle[i] + n]
                finger, a = number // OF_FINGER, number % OF_FINGER
                total = ti.Vector([0.0, 0.0, 0.0])
                for c in ti.static(range(3)):
                    v = self.corners[i][c]
                    corner = ti.Vector([0.0, 0.0, 0.0])
                    for k in range(self.first[v], self.first[v + 1]):
                        b = self.bone[k]
                        if self.finger[b] == finger and a < self.counts[b]:
                            corner += self.weight[k] * (
                                self.skin_turn_by[b, a] @ self.base[v] + self.skin_shift_by[b, a]
                            )
                    total += shares[c] * corner
                by = turned(r, total)
                for d in ti.static(range(3)):
                    by_pose[first + d * length + POSE + n] = -by[d]
                    c1[first + d * length + POSE + n] = 6 + number


def make_hand(name: str, folder: Path) -> SparseProgram:
    """Distances of measured points to points on the surface of ADBench's hand, by those points and the pose."""
    data = hand_tracking.read(folder, name)
    hand = HandByHand(data)
    arrays: tuple[Any, ...] = tuple(
        np.zeros(shape, dtype) for shape in ((hand.count, 3, 2), hand.entries) for dtype in (np.float64, np.int32)
    )
    blocks = ((0, 0), (0, 1))
    return SparseProgram(hand.run, [hand.u, hand.theta], [hand.residuals], hand.run_by_hand, arrays, blocks, data=data)


def _field(values: np.ndarray) -> ti.Field:
    return hand_tracking.field_of(np.asarray(values, np.int32))
