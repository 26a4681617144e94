"""Levels whose slope is 0 exactly where they are 0: of ``max(q, 0)`` and ``if q > 0`` it is, where q is.

The usual signed distance of a box is such a level.  The sums of J over the pixels are the derivatives of its area, also
where its sides lie on borders of pixels or of squares in them, or a rounding beside them.
"""

import numpy as np
import pytest
import taichi as ti
from kernel_texts import func_of, kernels_of
from numpy.testing import assert_allclose

from taichi_ext import coverage, edge, jacobian, layers, pixel, value_and_jacobian

SIDE = 20
PLACES = {  # centre, half of the sides, angle
    "through centres of pixels": (10.0, 10.0, 5.0, 4.0, 0.0),
    "along borders of pixels": (10.0, 10.0, 4.5, 3.5, 0.0),
    "with roundings": (9.3, 10.2, 5.3, 3.4, 0.0),
    "turned": (9.3, 10.2, 5.3, 3.4, 0.6),
}


@pytest.fixture(scope="module", params=["float32", "float64"])
def dtype(request):
    request.getfixturevalue({"float32": "ti32", "float64": "ti64"}[request.param])
    return getattr(ti, request.param)


@pytest.fixture(scope="module")
def scene(dtype):
    box, image = ti.field(dtype, shape=5), ti.field(dtype, shape=(SIDE, SIDE))
    return box, image, {}  # the kernels, by form and name


def set_box(box, numbers):
    box.from_numpy(np.array(numbers, dtype=np.float32 if box.dtype == ti.f32 else np.float64))


def make_level(box, form):
    @ti.func
    def offsets(x, y):
        c, s = ti.cos(box[4]), ti.sin(box[4])
        u, v = x - box[0], y - box[1]
        return abs(c * u + s * v) - box[2], abs(c * v - s * u) - box[3]

    @ti.func
    def by_max(x, y):
        qx, qy = offsets(x, y)
        return -(ti.Vector([ti.max(qx, 0.0), ti.max(qy, 0.0)]).norm() + ti.min(ti.max(qx, qy), 0.0))

    @ti.func
    def by_branches(x, y):
        qx, qy = offsets(x, y)
        outside = 0.0
        if qx > 0:
            outside += qx
        if qy > 0:
            outside += qy
        within = 0.0
        if qx < 0 and qy < 0:
            within = ti.max(qx, qy)
        return -(outside + within)

    with_slope = func_of("qx, qy = offsets(x, y); return -ti.max(qx, qy)", "x, y", offsets=offsets)
    one_sided = func_of("qx, qy = offsets(x, y); return ti.max(-ti.max(qx, qy), 0.0)", "x, y", offsets=offsets)
    return {"max": by_max, "branches": by_branches, "with a slope": with_slope, "one-sided": one_sided}[form]


def kernel_for(scene, form, name):
    """The kernel of the module for a form of the level and a function of the package."""
    box, image, kernels = scene
    if (form, name) not in kernels:
        kernels[form, name] = make_kernel(make_level(box, form), image, name)
    return kernels[form, name]


KERNELS = """
    by_edge: x, y = float(i), float(j); image[i, j] = edge(level(x, y), 3.0, 1.0, at=(x, y))
    by_coverage: x, y = float(i), float(j); image[i, j] = 1.0 + 2.0 * coverage(level(x, y), at=(x, y))
    by_layers: image[i, j] = layers(layer, 1, 1.0, at=(i, j))
    by_nearest:
        image[i, j] = layers(surface, 1, 1.0, at=(i, j), order="depth")
    by_pixel: image[i, j] = pixel(shade, at=(i, j))
"""


def make_kernel(level, image, name):
    layer = func_of("return level(x, y), 3.0", "n, x, y", level=level)
    surface = func_of("return level(x, y), 1.0, 3.0", "n, x, y", level=level)
    shade = func_of("return ti.select(level(x, y) > 0, 3.0, 1.0)", "x, y", level=level)
    scope = {"level": level, "image": image, "layer": layer, "surface": surface, "shade": shade}
    scope |= {"coverage": coverage, "edge": edge, "layers": layers, "pixel": pixel}
    return kernels_of(KERNELS, "for i, j in image:\n    ...\n", **scope)[f"by_{name}"]


def assert_sums(scene, kernel, place, atol):
    box, image, _ = scene
    set_box(box, place)
    J = jacobian(kernel, box, image)
    width, height = place[2:4]
    area = np.array([0.0, 0.0, 4 * height, 4 * width, 0.0])
    assert_allclose(J.sum((0, 1)), 2.0 * area, atol=atol)
    return J


ATOL = {"edge": 0.3, "coverage": 0.3, "layers": 0.1, "nearest": 0.1, "pixel": 0.15}  # of a part of 1/32 at each corner


@pytest.mark.mostly_sweep("float32-max-turned-coverage", "float32-max-through centres of pixels-layers")
@pytest.mark.parametrize("name", ATOL)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("form", ["max", "branches", "with a slope"])
def test_a_box(scene, form, place, name):
    assert_sums(scene, kernel_for(scene, form, name), PLACES[place], ATOL[name])
    if (form, name, place) == ("max", "coverage", "turned"):
        assert_allclose(scene[1].to_numpy().sum() - SIDE**2, 8 * 5.3 * 3.4, atol=2e-3)


# Where no side of a pixel meets the sloped side, as at a turned corner, a level that is 0 all around shows no edge.
@pytest.mark.mostly_sweep("float32-with roundings-coverage")
@pytest.mark.parametrize("name", ATOL)
@pytest.mark.parametrize("place", ["through centres of pixels", "with roundings"])
def test_a_level_that_is_constant_outside(scene, place, name):
    assert_sums(scene, kernel_for(scene, "one-sided", name), PLACES[place], ATOL[name])


FLAT = ["u**3 * v", "ti.max(u * v, 0)", "ti.max(u * v, 0) ** 2", "ti.sqrt(ti.max(u * v, 0))", "-ti.min(0, -(u**3) / v)"]
FLAT += ["m"]


@pytest.mark.mostly_sweep("float64-u**3 * v", "float64-m")
@pytest.mark.parametrize("text", FLAT)
def test_pixels_by_the_sign_of_a_product(dtype, text):
    """Lines on which the level is flat were lost, or half of them: the sign of each factor is a condition of its own."""
    p, image = ti.field(dtype, shape=2), ti.field(dtype, shape=(4, 3))
    p.from_numpy(np.array([1.37, 0.81], dtype=np.float32 if dtype == ti.f32 else np.float64))
    largest = "m = 0.0 * x; ti.atomic_max(m, u * v); " if text == "m" else ""
    level = func_of(f"u, v = p[0] - x, p[1] - y; {largest}return {text}", "x, y", p=p)
    wanted = np.zeros((4, 3, 2))
    wanted[1, :, 0], wanted[:, 1, 1] = [2.0, -0.76, -2.0], [2.0, 1.48, -2.0, -2.0]  # of lines that change their side
    assert_allclose(jacobian(make_kernel(level, image, "pixel"), p, image), wanted, atol=0.01)


CLIPPED = {  # levels that are constant outside, and others with the same edges
    "ti.sqrt(ti.max(v, 0)) * ti.max(u, 0)": "ti.min(u, v)",
    "0.5 * ti.max(u * v, 0) ** 2": "u * v",
    "w / 3 + ti.sqrt(ti.max(v, 0))": "ti.max(u, v)",
    "ti.math.clamp(v, 0, 1)": "v",
    "z": "v",
    "t": "v",
}


@pytest.mark.mostly_sweep("ti.sqrt(ti.max(v, 0)) * ti.max(u, 0)")
@pytest.mark.parametrize("text", CLIPPED)
def test_coverage_by_levels_that_are_constant_outside(ti64, text):
    """A third to all of the edge was lost in some pixels."""
    p, image = ti.field(ti.f64, shape=3), ti.field(ti.f64, shape=(9, 8))
    p.from_numpy(np.array([4.3, 3.8, 2.2]))

    def found(level, change):
        table = f"""
            k:
                x, y = float(i), float(j)
                u, v = 0.8 * (x - p[0]) - 0.6 * (y - p[1]), p[2] - ti.sqrt((x - p[0]) ** 2 + (y - p[1]) ** 2)
                w, z, t = ti.max(u, 0), 0.0, v
                {change}
                if not v <= 0: z = ti.sqrt(v)
                if t < 0: t = -1.0
                image[i, j] = coverage({level}, at=(x, y))
        """
        made = kernels_of(table, "for i, j in image:\n    ...\n", image=image, p=p, coverage=coverage)
        return value_and_jacobian(made["k"], p, image)

    (value, J), expected = found(text, "pass"), found(CLIPPED[text], "pass")
    assert np.abs(J).max() > 0.5
    assert_allclose(J, expected[1], atol=1e-12)
    if "w" in text:
        assert_allclose(found(text, "u += 9.0")[0], value, atol=0.1)  # not by the new one


@pytest.mark.mostly_sweep("float32-coverage", "float32-layers")
@pytest.mark.parametrize("name", ["coverage", "layers"])
def test_corners_a_rounding_beside_the_centre_of_a_pixel(scene, name):
    """The sides of a square that the pixel is divided into are on the edges there, or beside them."""
    kernel = kernel_for(scene, "max", name)
    for dx in (0.0, 1e-15, 4.8e-7, -4.8e-7, 5e-6):
        for dy in (0.0, 1e-15, -4.8e-7, 5e-6):
            J = assert_sums(scene, kernel, (9.0 + dx, 10.0 + dy, 5.0, 4.0, 0.0), 0.8)
            assert_allclose(J[4, 6, :4], [-1.0, -1.0, 1.0, 1.0], atol=0.1)
