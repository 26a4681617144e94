"""The level of a surface that is given by its signed distance: ray_level."""

# Taichi reads the annotations of functions as objects, such as ti.template(), so they must not be strings.
# pyright: reportInvalidTypeForm=false
# Those of the variables of a function that Taichi compiles are known when it is compiled.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
from typing import Any

from taichi_ext.backend import ti
from taichi_ext.boundary.gradients import stop_gradient
from taichi_ext.boundary.kernel_scope import leave_to_engine, recorded

_STEPS = 96
_SHORTEST = 1 / 512  # of the way, for a step
_REFINEMENTS = 24
_GOLDEN = 0.6180339887498949


@recorded
def ray_level(distance: object, origin: object, direction: object, near: object, far: object, *args: object) -> Any:
    """The depth to which a ray enters a surface: minus the smallest signed distance along the ray.

    It is positive where the ray hits the surface, so it is a level for ``edge`` and ``layers``: of the silhouette, if
    the rays start at the camera, and of a hard shadow, if they start at a hit point and go to the light.  The ray is
    marched without tangents.  At the smallest distance a shift along the ray changes nothing, so the tangent is that of
    the distance at this fixed place.

    Args:
        distance: a ti.func ``distance(p)``, negative inside.  p is a vector like ``origin``.  It must not be larger
            than the true distance, and must be smooth where it is smallest.
        origin: where the ray starts, a vector.
        direction: of length 1.
        near: the distance from the origin at which the ray starts to count.
        far: the distance from the origin at which it ends.
        args: further arguments of the distance, ``distance(p, *args)``, such as variables of the kernel.

    Returns:
        A real number, minus the smallest distance.

    Raises:
        UnsupportedError: ``distance`` is not a ti.func.

    Example:
        >>> import taichi as ti
        >>> from taichi_ext import coverage, jacobian, ray_level
        >>> ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
        >>> radius, image = ti.field(ti.f64, shape=()), ti.field(ti.f64, shape=(40, 40))
        >>> radius[None] = 12.0
        >>> @ti.func
        ... def ball(p):
        ...     return p.norm() - radius[None]
        >>> @ti.kernel
        ... def draw():
        ...     for i, j in image:
        ...         px = float(i)
        ...         py = float(j)
        ...         origin = ti.Vector([px - 19.7, py - 20.1, -50.0])
        ...         level = ray_level(ball, origin, ti.Vector([0.0, 0.0, 1.0]), 0.0, 100.0)
        ...         image[i, j] = coverage(level, at=(px, py))
        >>> print(f"{jacobian(draw, radius, image).sum():.1f} of {2 * 3.14159265 * 12.0:.1f}")  # the circumference
        75.4 of 75.4
    """
    leave_to_engine("ray_level", near)


@ti.func
def level_along(distance: ti.template(), origin, direction, near, far):
    """March from near to far, also through the inside, and narrow down the place of the smallest distance."""
    start = stop_gradient(origin)
    along = stop_gradient(direction)
    t = stop_gradient(near)
    end = stop_gradient(far)
    shortest = (end - t) * _SHORTEST
    best = t
    least = stop_gradient(distance(start + t * along))
    low = t
    high = t
    before = t
    is_after = False  # the step that follows the best place ends the interval
    for _ in range(_STEPS):
        if t < end:
            here = stop_gradient(distance(start + t * along))
            if is_after:
                high = t
                is_after = False
            if here <= least:
                least = here
                best = t
                low = before
                high = t
                is_after = True
            before = t
            t = ti.min(end, t + ti.max(abs(here), shortest))
    if is_after:
        high = t
    for _ in range(_REFINEMENTS):  # the golden section
        a = high - _GOLDEN * (high - low)
        b = low + _GOLDEN * (high - low)
        if stop_gradient(distance(start + a * along)) < stop_gradient(distance(start + b * along)):
            high = b
        else:
            low = a
    middle = 0.5 * (low + high)
    if stop_gradient(distance(start + middle * along)) <= least:
        best = middle
    return -distance(origin + best * direction)


ray_level.boundary_body = level_along  # type: ignore[attr-defined]  # the recorder walks this instead
