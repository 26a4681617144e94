"""Rotations by a rotation vector, whose length is the angle in radians."""

import taichi as ti


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
