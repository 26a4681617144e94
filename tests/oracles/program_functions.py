"""The functions that a random program can name, on complex numbers, with the distance to the places where they jump."""

import operator
from typing import Any

import numpy as np


class RejectedError(Exception):
    """The program cannot be judged at this point: values too large, or too close to a kink."""


def real(x: Any) -> Any:
    """The real part, without lanes."""
    if isinstance(x, (np.ndarray, np.generic)) and x.dtype.kind == "c":
        return np.real(x)[..., 0] if x.ndim else float(np.real(x))
    return x


def is_integer(x: Any) -> bool:
    return isinstance(x, (int, np.integer)) or (isinstance(x, np.ndarray) and x.dtype.kind in "ib")


class Functions:
    """Functions of Taichi and of ``taichi.math``; numbers that are not integers have a last axis of lanes."""

    margin: float  # the least distance to a jump or a kink so far
    lanes: int

    def lift(self, x: Any) -> np.ndarray:
        """A scalar with its lanes."""
        return np.broadcast_to(np.asarray(x, dtype=complex), (self.lanes,))

    # --- jumps

    def note(self, distance: Any) -> None:
        """How far a jump is; not where the distance is zero and stays so."""
        if np.any(distance != 0):
            distance = np.abs(np.real(distance))[distance != 0]
            self.margin = min(self.margin, float(np.min(distance)))

    def note_kink(self, distance: Any) -> None:
        """The distance of a kink; not for constants."""
        self.note(np.where(np.imag(distance) == 0, 0, distance))

    def compare(self, name: str, a: Any, b: Any) -> Any:
        if not (is_integer(a) and is_integer(b)):
            self.note(np.asarray(a) - b)
        result = getattr(operator, name)(real(a), real(b))
        return bool(result) if np.ndim(result) == 0 else result

    def choose(self, condition: Any, a: Any, b: Any) -> Any:
        if np.ndim(condition) == 0:
            return a if condition else b
        return np.where(condition[..., None], a, b)

    def max(self, *values: Any) -> Any:
        return self._extremum(operator.gt, values)

    def min(self, *values: Any) -> Any:
        return self._extremum(operator.lt, values)

    def _extremum(self, better: Any, values: tuple[Any, ...]) -> Any:
        result = values[0]
        for value in values[1:]:
            if is_integer(result) and is_integer(value):
                result = result if better(result, value) else value
            else:
                self.note_kink(np.asarray(result) - value)
                result = np.where(better(np.real(result), np.real(value)), result, value)
        return result

    def abs(self, x: Any) -> Any:
        if is_integer(x):
            return abs(x)
        self.note_kink(x)
        return np.where(np.real(x) < 0, -x, x)

    def sign(self, x: Any) -> Any:
        self.note(np.asarray(x))
        return np.sign(np.real(x)) + 0j

    def floor(self, x: Any) -> Any:
        self.note(np.asarray(x) - np.round(np.real(x)))
        return np.floor(np.real(x)) + 0j

    def ceil(self, x: Any) -> Any:
        return -self.floor(-x)

    def round(self, x: Any) -> Any:
        return self.floor(x + 0.5)

    def int(self, x: Any) -> int:
        if is_integer(x):
            return int(x)
        self.note(np.asarray(x) - np.round(np.real(x)))
        return int(real(x))

    def float(self, x: Any) -> Any:
        return x if isinstance(x, np.ndarray) else float(x)

    def mod(self, a: Any, b: Any) -> Any:
        return a % b if is_integer(a) and is_integer(b) else a - b * self.floor(a / b)

    def floordiv(self, a: Any, b: Any) -> Any:
        return a // b if is_integer(a) and is_integer(b) else self.floor(a / b)

    # --- arithmetic

    def pow(self, a: Any, b: Any) -> Any:
        if is_integer(b):
            power = 1
            for _ in range(abs(int(b))):
                power = power * a
            return power if b >= 0 else 1 / power
        return self.exp(b * self.log(a))

    def exp(self, x: Any) -> Any:
        return np.exp(np.asarray(x, dtype=complex))

    def log(self, x: Any) -> Any:
        self._require_positive(x)
        return np.log(np.asarray(x, dtype=complex))

    def sqrt(self, x: Any) -> Any:
        self._require_positive(x)
        return np.sqrt(np.asarray(x, dtype=complex))

    def rsqrt(self, x: Any) -> Any:
        return 1 / self.sqrt(x)

    def _require_positive(self, x: Any) -> None:
        if not np.all(np.real(x) > 1e-3):
            raise RejectedError("close to the end of a domain")

    def matmul(self, a: Any, b: Any) -> Any:
        return np.einsum("ijl,jkl->ikl" if b.ndim == 3 else "ijl,jl->il", a, b)

    def vector(self, entries: Any) -> np.ndarray:
        return np.stack([self.lift(e) for e in entries])

    def matrix(self, rows: Any) -> np.ndarray:
        return np.stack([row if isinstance(row, np.ndarray) and row.ndim == 2 else self.vector(row) for row in rows])

    def vec(self, size: int, *parts: Any) -> np.ndarray:
        if len(parts) == 1 and np.ndim(parts[0]) < 2:
            parts = parts * size
        entries = [e for p in parts for e in (list(p) if np.ndim(p) == 2 else [p])]
        assert len(entries) == size
        return self.vector(entries)

    def mat(self, size: int, *parts: Any) -> np.ndarray:
        if np.ndim(parts[0]) == 2:
            return np.stack(parts)
        return self.vector(parts).reshape(size, size, self.lanes)

    def sum(self, v: Any) -> Any:
        return v.sum(axis=tuple(range(v.ndim - 1)))

    def dot(self, v: Any, w: Any) -> Any:
        return self.sum(v * w)

    def norm_sqr(self, v: Any) -> Any:
        return self.sum(v * v)

    def norm(self, v: Any) -> Any:
        return self.sqrt(self.norm_sqr(v))

    def normalized(self, v: Any) -> Any:
        return v / self.norm(v)

    def distance(self, v: Any, w: Any) -> Any:
        return self.norm(v - w)

    def cross(self, v: Any, w: Any) -> Any:
        return np.stack([v[1] * w[2] - v[2] * w[1], v[2] * w[0] - v[0] * w[2], v[0] * w[1] - v[1] * w[0]])

    def reflect(self, v: Any, w: Any) -> Any:
        return v - 2 * self.dot(v, w) * w

    def outer_product(self, v: Any, w: Any) -> Any:
        return v[:, None] * w[None]

    def transpose(self, a: Any) -> Any:
        return np.swapaxes(a, 0, 1)

    def trace(self, a: Any) -> Any:
        return sum(a[i, i] for i in range(len(a)))

    def determinant(self, a: Any) -> Any:
        if len(a) == 2:
            return a[0, 0] * a[1, 1] - a[0, 1] * a[1, 0]
        return self.dot(a[0], self.cross(a[1], a[2]))

    def inverse(self, a: Any) -> Any:
        if len(a) == 2:
            adjugate = np.stack([np.stack([a[1, 1], -a[0, 1]]), np.stack([-a[1, 0], a[0, 0]])])
        else:
            adjugate = self.transpose(
                np.stack([self.cross(a[1], a[2]), self.cross(a[2], a[0]), self.cross(a[0], a[1])])
            )
        return adjugate / self.determinant(a)

    def largest(self, v: Any) -> Any:
        return self.max(*v)

    def smallest(self, v: Any) -> Any:
        return self.min(*v)

    def clamp(self, x: Any, low: Any, high: Any) -> Any:
        return self.max(low, self.min(high, x))

    def mix(self, a: Any, b: Any, t: Any) -> Any:
        return a * (1 - t) + b * t

    def smoothstep(self, low: Any, high: Any, x: Any) -> Any:
        t = self.clamp((x - low) / (high - low), 0.0, 1.0)
        return t * t * (3.0 - 2.0 * t)

    def fract(self, x: Any) -> Any:
        return x - self.floor(x)

    def atan2(self, a: Any, b: Any) -> Any:
        self._require_positive(b)
        return np.arctan(np.asarray(a / b, dtype=complex))
