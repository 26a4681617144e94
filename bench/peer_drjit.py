"""The ray programs for Dr.Jit: a parameter is an array with a lane per pixel, loops are traced unrolled."""

import drjit as dr


def sphere(p, ray):
    r, *centre = p
    s = sum(c * v for c, v in zip(centre, ray, strict=True))
    d = [c - s * v for c, v in zip(centre, ray, strict=True)]
    inside = r * r - sum(x * x for x in d)
    is_hit = inside > 0
    return dr.select(is_hit, dr.abs(s) - dr.sqrt(dr.select(is_hit, inside, 1)), 0)


def soft_spheres(p, ray):
    total = 0
    for n in range(0, len(p), 4):
        r, *centre = p[n : n + 4]
        s = sum(c * v for c, v in zip(centre, ray, strict=True))
        d = [c - s * v for c, v in zip(centre, ray, strict=True)]
        total += dr.exp(-sum(x * x for x in d) / (r * r)) * 100 / dr.sqrt(s * s + 1)
    return total


def volume(p, length, emission):
    transmitted, total = 1, 0
    for density, light in zip(p, emission, strict=True):
        alpha = 1 - dr.exp(-density * length[0])
        total += transmitted * alpha * light
        transmitted *= 1 - alpha
    return total


MODELS = {"sphere": sphere, "soft_spheres": soft_spheres, "volume": volume}
