"""Manifolds whose points are parameters of ``least_squares``, and those that users define.

* ``unit_vector``: 3-vectors of length 1, with two local coordinates.
* ``unit_quaternion``: 4-vectors ``(w, x, y, z)`` of length 1.  Local coordinates are, to first order, a rotation vector
  that turns before the quaternion does: ``q * exp(delta)``.
* ``so3``: 3 x 3 matrices of rotations, likewise ``R exp(delta)``.
* ``se3``: 4 x 4 matrices of rotations and translations, ``T exp(delta)``; three coordinates for the translation, then
  three for the rotation.
"""

# The variables of a kernel have the types that it is called with.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from taichi_ext.api.inputs.options import is_whole
from taichi_ext.backend import ti
from taichi_ext.errors import unexpected

__all__ = ["Manifold", "se3", "so3", "unit_quaternion", "unit_vector"]
__dir__ = __all__.copy  # for completion: no modules


@dataclass(frozen=True)
class Manifold:
    """A manifold, such as that of rotations: its points have more numbers than there are directions to move in.

    Attributes:
        retract: a ``ti.func`` of a point and a vector of local coordinates, which returns the point there: the point
            itself where they are zero.  Its derivative is needed there alone.
        size: how many local coordinates there are.
        shape: of a point: ``(n,)`` for a vector, ``(n, m)`` for a matrix.

    Example:
        >>> import taichi as ti
        >>> from taichi_ext import Manifold
        >>> @ti.func
        ... def turn(x, delta):  # a point of the unit circle
        ...     return (x + delta[0] * ti.Vector([-x[1], x[0]])).normalized()
        >>> circle = Manifold(turn, size=1, shape=(2,))
    """

    retract: object
    size: int
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        shape: Any = self.shape
        is_shape = isinstance(shape, tuple) and len(shape) in (1, 2) and all(is_whole(n) and n > 0 for n in shape)
        for name, is_right, wanted in [
            ("retract", callable(self.retract), "a ti.func of a point and of local coordinates"),
            ("size", is_whole(self.size) and self.size > 0, "a positive whole number"),
            ("shape", is_shape, "a tuple of one or two whole numbers"),
        ]:
            if not is_right:
                raise unexpected(name, getattr(self, name), wanted)


@ti.func
def _retract_unit_vector(x, delta):
    """In the directions of T. Duff and others, Building an Orthonormal Basis, Revisited, 2017."""
    sign = ti.select(x[2] < 0, -1, 1)
    a = -1 / (sign + x[2])
    first = ti.Vector([1 + sign * x[0] * x[0] * a, sign * x[0] * x[1] * a, -sign * x[0]])
    second = ti.Vector([x[0] * x[1] * a, sign + x[1] * x[1] * a, -x[1]])
    return (x + delta[0] * first + delta[1] * second).normalized()


@ti.func
def _retract_quaternion(q, delta):
    """``q * (1, delta / 2)``, of length 1."""
    u, v = ti.Vector([q[1], q[2], q[3]]), delta / 2
    turned = u + q[0] * v + u.cross(v)
    return ti.Vector([q[0] - u.dot(v), turned[0], turned[1], turned[2]]).normalized()


@ti.func
def _retract_rotation(R, delta):
    """R times the rotation of the quaternion ``(1, delta / 2)``: Cayley's transform."""
    v = delta / 2
    K = ti.Matrix([[0 * v[0], -v[2], v[1]], [v[2], 0 * v[0], -v[0]], [-v[1], v[0], 0 * v[0]]])
    return R + R @ (K + K @ K) * (2 / (1 + v.norm_sqr()))


@ti.func
def _retract_pose(T, delta):
    """The rotation as above, and a translation in the directions of the pose."""
    R = ti.Matrix([[T[i, j] for j in ti.static(range(3))] for i in ti.static(range(3))])
    turned = _retract_rotation(R, ti.Vector([delta[3], delta[4], delta[5]]))
    moved = R @ ti.Vector([delta[0], delta[1], delta[2]])
    result = T
    for i in ti.static(range(3)):
        result[i, 3] += moved[i]
        for j in ti.static(range(3)):
            result[i, j] = turned[i, j]
    return result


unit_vector = Manifold(_retract_unit_vector, 2, (3,))
unit_quaternion = Manifold(_retract_quaternion, 3, (4,))
so3 = Manifold(_retract_rotation, 3, (3, 3))
se3 = Manifold(_retract_pose, 6, (4, 4))


@functools.lru_cache(maxsize=64)
def retraction(manifold: Manifold, dtype: np.dtype) -> object:
    """A kernel of points, of steps in local coordinates, and of the points that they lead to."""
    shape, retract, kind = manifold.shape, manifold.retract, ti.f32 if dtype == np.float32 else ti.f64
    element: Any = ti.types.vector(*shape, kind) if len(shape) == 1 else ti.types.matrix(*shape, kind)
    points = ti.types.ndarray(dtype=element, ndim=1)
    steps = ti.types.ndarray(dtype=ti.types.vector(manifold.size, kind), ndim=1)

    @ti.kernel
    def move(x: points, delta: steps, moved: points):
        for i in moved:
            moved[i] = retract(x[i], delta[i])

    return move
