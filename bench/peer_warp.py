"""The ray programs as Warp kernels: parameters repeated per pixel, (pixels, P), so that their adjoint is J."""

import warp as wp

SAMPLES = wp.constant(32)
wp.set_module_options({"max_unroll": 32})


@wp.kernel
def sphere(p: wp.array2d(dtype=float), columns: int, rays: wp.array(dtype=wp.vec3), image: wp.array(dtype=float)):
    i = wp.tid()
    v = rays[i]
    r = p[i, 0]
    centre = wp.vec3(p[i, 1], p[i, 2], p[i, 3])
    s = wp.dot(centre, v)
    d = centre - s * v
    inside = r * r - wp.dot(d, d)
    if inside > 0.0:
        image[i] = wp.abs(s) - wp.sqrt(inside)
    else:
        image[i] = 0.0


@wp.kernel
def soft_spheres(p: wp.array2d(dtype=float), columns: int, rays: wp.array(dtype=wp.vec3), image: wp.array(dtype=float)):
    i = wp.tid()
    v = rays[i]
    total = float(0.0)  # noqa: UP018
    for n in range(columns // 4):
        r = p[i, 4 * n]
        centre = wp.vec3(p[i, 4 * n + 1], p[i, 4 * n + 2], p[i, 4 * n + 3])
        s = wp.dot(centre, v)
        d = centre - s * v
        total += wp.exp(-wp.dot(d, d) / (r * r)) * 100.0 / wp.sqrt(s * s + 1.0)
    image[i] = total


@wp.kernel
def volume(
    p: wp.array2d(dtype=float),
    columns: int,
    lengths: wp.array(dtype=float),
    emission: wp.array2d(dtype=float),
    image: wp.array(dtype=float),
):
    i = wp.tid()
    transmitted = float(1.0)  # noqa: UP018
    total = float(0.0)  # noqa: UP018
    # unrolled, as Warp asks where a loop carries a value that its adjoint needs; it is wrong in a loop at run time
    for s in range(SAMPLES):
        alpha = 1.0 - wp.exp(-p[i, s] * lengths[i])
        total += transmitted * alpha * emission[i, s]
        transmitted *= 1.0 - alpha
    image[i] = total


KERNELS = {"sphere": sphere, "soft_spheres": soft_spheres, "volume": volume}
INPUTS = {"sphere": [wp.vec3], "soft_spheres": [wp.vec3], "volume": [float, float]}
