"""Shapes over each other in a pixel: exact for straight edges, close to supersampled images for others; rays."""

import numpy as np
import pytest
import taichi as ti
from differences import central_differences, outputs, scalars, vector_outputs, write
from drawings import layered
from kernel_texts import func_of
from numpy.testing import assert_allclose
from planar import area, clip, square
from reverse_mode import check_transpose, gradient_field

import taichi_ext as te
from taichi_ext import Jacobian, UnsupportedError, jacobian, layers, ray_level, value_and_jacobian

pytestmark = pytest.mark.usefixtures("ti64")

W, H = 9, 7
PLANES = 4


def planes_kernel(p, image, has_depth):
    """Half-planes ``p0 > cos(p1) x + sin(p1) y`` of colours p2, at depths that are planes (p3, p4, p5) or bent by p6, too."""
    plane = func_of("return 2.0 * (p[n, 0] - x * ti.cos(p[n, 1]) - y * ti.sin(p[n, 1])), p[n, 2]", "n, x, y", p=p)

    @ti.func
    def tilted(n, x, y):
        level, colour = plane(n, x, y)
        return level, p[n, 3] + p[n, 4] * x + p[n, 5] * y + p[n, 6] * (x * x + y * y), colour

    by_order = layered(image, plane, PLANES, 0.1)
    by_depth = layered(image, tilted, PLANES, 0.1, order="depth")
    return by_depth if has_depth else by_order


def random_planes(seed):
    generator = np.random.default_rng(seed)
    angles = generator.uniform(0, 2 * np.pi, PLANES)
    offsets = np.cos(angles) * 4 + np.sin(angles) * 3 + generator.uniform(-1, 1, PLANES)
    depths = np.array([[0.0, 0.3, 0.1], [0.4, -0.2, 0.2], [50.0, 0.1, 0.0], [90.0, 0.0, -0.1]])
    return np.column_stack([offsets, angles, generator.uniform(0.2, 1, PLANES), depths, np.zeros(PLANES)])


def seen_areas(p, i, j):
    """The areas of the pixel in which each half-plane is seen, the later over the earlier, and the background."""
    parts, result = [square(i, j)], []
    for offset, angle, *_ in p[::-1]:
        normal = np.array([np.cos(angle), np.sin(angle)])
        result.append(sum(area(clip(part, -normal, -offset)) for part in parts))
        parts = [clip(part, normal, offset) for part in parts]
    return np.array([*result[::-1], sum(area(part) for part in parts)])


@pytest.mark.sweep
def test_straight_edges_over_each_other_are_exact():
    """The values against clipped polygons, and J, with lines that turn, against differences of the values."""
    p, image = scalars(np.zeros((PLANES, 7))), outputs(W, H)
    k = planes_kernel(p, image, has_depth=False)
    most = 0
    for seed in range(2):
        given = random_planes(seed)
        write(p, given)
        value, J = value_and_jacobian(k, p, image)
        areas = np.array([[seen_areas(given, i, j) for j in range(H)] for i in range(W)])
        most = max(most, (areas > 0.01).sum(-1).max())
        assert_allclose(value, areas @ [*given[:, 2], 0.1], rtol=1e-10)
        [[differences]] = central_differences(k, [p], [image])
        assert_allclose(J, differences, rtol=1e-5, atol=5e-5)  # two lines that cross beside a third are divided
    assert most >= 3  # pixels that two edges cross, at least


def test_surfaces_that_pass_through_each_other_are_exact():
    """Two planes that fill the image and swap their order, one with an edge that passes through both, one before all.

    At last a plane and a bowl, which is before it within a circle.
    """
    p, image = scalars(np.zeros((PLANES, 7))), outputs(W, H)
    k = planes_kernel(p, image, has_depth=True)
    plan = Jacobian(k, p, image)  # whose values are compared, so that no other kernel is compiled
    given = random_planes(0)
    given[:2, 0] = 100.0  # everywhere
    given[0, 3] = -2.03
    given[2, 3:6] = [-1.2, 0.11, 0.23]
    given[3, 3:6] = [-90.0, 0.0, -0.1]  # before all others
    write(p, given)
    value, J = value_and_jacobian(k, p, image)
    x, y = np.meshgrid(np.arange(W), np.arange(H), indexing="ij")
    levels = given[:, 0] - x[..., None] * np.cos(given[:, 1]) - y[..., None] * np.sin(given[:, 1])
    depths = given[:, 3] + given[:, 4] * x[..., None] + given[:, 5] * y[..., None]
    first, second = np.sort(np.where(levels > 0, depths, 1e9), axis=-1)[..., :2].transpose(2, 0, 1)
    clear = (np.abs(levels) > 0.75).all(-1) & (second - first > 0.5)  # one surface fills the pixel
    assert 10 < clear.sum() < W * H
    seen = given[np.where(levels > 0, depths, 1e9).argmin(-1), 2]
    assert_allclose(value[clear], seen[clear], rtol=1e-12)
    [[differences]] = central_differences(plan, [p], [image])
    assert_allclose(J[..., :6], differences[..., :6], rtol=1e-5, atol=1e-7)
    assert np.abs(J[..., 3]).max() > 0.05  # the line moves
    for x, y, r in ((3.9, 3.2, 2.3), (4.3, 2.8, 1.4)):
        given = np.zeros((PLANES, 7))
        given[:, 0], given[:2, 2] = [100.0, 100.0, -100.0, -100.0], [0.3, 0.8]
        given[1, 3:] = 0.1 * np.array([x * x + y * y - r * r, -2 * x, -2 * y, 1.0])
        write(p, given)
        value, J = value_and_jacobian(k, p, image)
        assert_allclose(value.sum(), 0.3 * W * H + 0.5 * np.pi * r * r, atol=2e-3)
        assert_allclose(J[..., 1, 3].sum(), -0.5 * 2 * np.pi * r / (0.2 * r), rtol=0.03)


# --- curved edges, against supersampled images ------------------------------------------------------------------------


@pytest.mark.sweep
def test_where_edges_coincide():
    """Two discs of one size: what the rim in front moves over, and the one behind, which is hidden or seen before it."""
    front, back, nothing = 0.4, 0.9, 0.05
    x, y, r = 14.3, 12.2, 9.4
    p, image = scalars([r, r]), outputs(29, 25)

    @ti.func
    def disc(n, px, py):
        return p[n] - ti.sqrt((px - x) ** 2 + (py - y) ** 2), ti.select(n == 0, back, front)

    k = layered(image, disc, 2, nothing)
    cases = (
        (1e-3, [0, front - nothing]),
        (-1e-3, [back - nothing, front - back]),
        (0.0, [0, front - nothing]),  # a tie: that of the shape on top
    )
    for by, jumps in cases:
        write(p, np.array([r, r + by]))
        assert_allclose(jacobian(k, p, image).sum((0, 1)) / (2 * np.pi * r), jumps, rtol=2e-3, atol=1e-6)


def rim_integral(disc, light, width, height):
    """The boundary term of a ball over 0.05 in each pixel, by centre and radius: an integral along its rim."""
    x, y, r = disc
    angle = np.linspace(0, 2 * np.pi, 100_000, endpoint=False)
    normal = np.stack([np.cos(angle), np.sin(angle)])
    jump = 0.1 + 0.8 * np.maximum(0, light[:2] @ normal) - 0.05
    pixels = tuple(np.floor(np.array([[x], [y]]) + r * normal + 0.5).astype(int))
    total = np.zeros((width, height, 3))
    for c, speed in enumerate((*normal, np.ones_like(angle))):
        np.add.at(total[..., c], pixels, jump * speed * 2 * np.pi * r / angle.size)
    return total


@pytest.mark.sweep
def test_shaded_balls():
    """Shading ends as a square root at the rim: the jump is that on the edge, and the inside has two samples there."""
    light, p, image = np.array([0.4, 0.3, 0.866]), scalars([6.3, 5.7, 3.0]), outputs(14, 12)

    @ti.func
    def ball(n, x, y):
        dx = x - p[0]
        dy = y - p[1]
        z = ti.sqrt(ti.max(p[2] ** 2 - dx * dx - dy * dy, 1e-9))
        shading = ti.max(0.0, (light[0] * dx + light[1] * dy + light[2] * z) / p[2])
        return p[2] - ti.sqrt(dx * dx + dy * dy), 0.1 + 0.8 * shading

    edge_alone = func_of("level, value = ball(n, x, y); return level, stop_gradient(value)", "n, x, y", ball=ball)
    plan = Jacobian(layered(image, edge_alone, 1, 0.05), p, image)
    found, expected = 0, 0
    for by in np.linspace(-0.2, 0.2, 9):  # where pixels meet the edge at other places
        disc = np.array([6.3 + by, 5.7, 3.0 + 0.7 * by])
        write(p, disc)
        found, expected = found + plan(), expected + rim_integral(disc, light, 14, 12)
    columns = np.linalg.norm(expected, axis=(0, 1))
    assert_allclose(np.linalg.norm(found - expected, axis=(0, 1)), 0, atol=0.007 * columns.min())


# --- transparent shapes -----------------------------------------------------------------------------------------------


def mean_of_planes(planes, i, j):
    """The mean of a pixel with transparent half-planes, from the polygons of all their sides."""
    parts = [(square(i, j), 0.1)]
    for offset, angle, colour, alpha in planes:
        normal = np.array([np.cos(angle), np.sin(angle)])
        outside = [(clip(part, normal, offset), value) for part, value in parts]
        inside = [(clip(part, -normal, -offset), value + alpha * (colour - value)) for part, value in parts]
        parts = outside + inside
    return sum(area(part) * value for part, value in parts)


@pytest.mark.sweep
def test_transparent_straight_edges_are_exact():
    """Values against polygons, and J by offsets, angles, colours and alphas against their differences; one is opaque."""
    given = np.column_stack([random_planes(1)[:, :3], [0.5, 0.3, 1.0, 0.7]])
    p, image = scalars(given), outputs(W, H)
    pane = func_of(
        "return 2.0 * (p[n, 0] - x * ti.cos(p[n, 1]) - y * ti.sin(p[n, 1])), p[n, 2], p[n, 3]", "n, x, y", p=p
    )
    k = layered(image, pane, PLANES, 0.1)
    value, J = value_and_jacobian(k, p, image)
    assert_allclose(value, [[mean_of_planes(given, i, j) for j in range(H)] for i in range(W)], rtol=1e-10)
    [[differences]] = central_differences(k, [p], [image])
    assert_allclose(J, differences, rtol=1e-5, atol=1e-5)


@pytest.mark.sweep
def test_many_transparent_shapes():
    """Nine that fill all pixels, by a level or by a number; the product of what they let through is exact."""
    alphas = np.linspace(0.1, 0.9, 9)
    alpha, image = scalars(alphas), vector_outputs(2, 2, 3)
    reach = scalars([50.0])
    veil = func_of("return reach[0] - x, ti.Vector([1.0, 0.1 * n]), alpha[n]", "n, x, y", reach=reach, alpha=alpha)
    veil_everywhere = func_of("_, value, own = veil(n, x, y); return 1.0, value, own", "n, x, y", veil=veil)

    def composite(a):
        value = np.zeros(2)
        for n, share in enumerate(a):
            value = value + share * (np.array([1.0, 0.1 * n]) - value)
        return value

    steps = 1e-6 * np.eye(9)
    slopes = np.stack([(composite(alphas + h) - composite(alphas - h)) / 2e-6 for h in steps], -1)
    for shape in (veil, veil_everywhere):

        @ti.kernel
        def k(shape: ti.template()):
            for i, j in image:
                image[i, j] = layers(shape, 9, ti.Vector([0.0, 0.0]), at=(float(i), float(j)))

        value, J = value_and_jacobian(k, alpha, image, args=(shape,))
        assert_allclose(value, np.broadcast_to(composite(alphas), (2, 3, 2)), rtol=1e-13)
        assert_allclose(J, np.broadcast_to(slopes, J.shape), rtol=1e-7, atol=1e-10)


# --- what cannot be used ----------------------------------------------------------------------------------------------


def draws(shape, order="index", background=0.0):
    image = outputs(5, 4)
    k = layered(image, shape, 2, background, order=order)
    return k, image


def test_bad_input():
    x = scalars([0.3, 0.8])
    alone = func_of("return x[0] - px", "n, px, py", x=x)
    of_number = func_of("of_number(n): return x[n], 1.0", x=x)
    stores = func_of("x[1] += px; return x[0] - px, px, 1.0", "n, px, py", x=x)
    without_position = func_of("return x[0] * (n + 1), 1.0", "n, px, py", x=x)
    whole = func_of("return n - 1, 1.0", "n, px, py")
    vector = func_of("return x[0] - px, ti.Vector([1.0, x[1]])", "n, px, py", x=x)
    vector_alpha = func_of("return x[0] - px, 1.0, ti.Vector([0.5, x[1]])", "n, px, py", x=x)
    for shape, order, message in (
        (of_number, "index", r"layers: shape is of_number\(n\), which takes 1 arguments; layers passes 3: n, x and y"),
        (stores, "depth", "layers: shape must only read and compute"),
        (vector_alpha, "index", "layers: alpha is .*; expected a number from 0 to 1"),
        (alone, "index", "layers: shape must return level, value; it returns"),
        (vector, "depth", "layers: shape must return level, depth, value; it returns a tuple of 2"),
        (without_position, "index", "layers: level does not depend on x and y"),
        (whole, "index", "layers: level must be a real scalar .* a value of type i32"),
        (vector, "index", r"layers: shape returns a value of shape \(2,\), and background has shape \(\)"),
        (abs, "index", "layers: shape is .*; expected a ti.func that takes n, x and y"),
        (alone, "near", 'layers: order is \'near\'; expected "index" or "depth"'),
    ):
        k, image = draws(shape, order)
        with pytest.raises((UnsupportedError, te.InvalidRuleError), match=message) as error:
            jacobian(k, x, image)
        assert "drawings.py" in str(error.value)
        assert "line" in str(error.value)
        assert len(str(error.value).splitlines()) < 14
    with pytest.raises(UnsupportedError, match="layers is called from Python"):
        layers(alone, 2, 0.0, at=(0.0, 0.0))


def test_forward_mode_is_refused():
    x, image = ti.field(ti.f64, 2, needs_dual=True), ti.field(ti.f64, (5, 4), needs_dual=True)
    shape = func_of("return x[n] - px, 1.0", "n, px, py", x=x)
    k = layered(image, shape, 2, 0.0)
    with pytest.raises(ti.TaichiCompilationError, match=r"FwdMode.*taichi_ext.jacobian"):
        with ti.ad.FwdMode(loss=image, param=x, seed=[1.0, 0.0]):
            k()


BALL = [0.2, -0.3, 5.0, 1.1]  # centre and radius
FARTHEST = 5.0  # of the places that matter, from the origin
GOLDEN = 1e-5  # the golden section ends there


def tolerance(J):
    """What the place of a minimum allows.

    Places x are rounded to e = eps |x|.  A distance of about sqrt(m^2 + t^2) to a point varies by less than e for
    |t| < sqrt(2 m e), so the minimum is found to this t, and a unit vector to the point, the derivative, to t / m.
    Here m is at least 1.
    """
    return max(GOLDEN, np.sqrt(2 * np.finfo(J.dtype).eps * FARTHEST))


def marched(p, level):
    """Levels of rays from the camera that hit, touch and miss."""
    distance = func_of("return (x - ti.Vector([p[0], p[1], p[2]])).norm() - p[3]", "x", p=p)

    @ti.kernel
    def k():
        for n in level:
            ray = ti.Vector([-0.35 + 0.05 * n, 0.02 * n, 1.0]).normalized()
            level[n] = ray_level(distance, ti.Vector([0.0, 0.0, 0.0]), ray, 0.0, 10.0)

    return k


def test_the_smallest_distance_and_its_derivative():
    p, level = scalars(BALL), outputs(16)
    value, J = value_and_jacobian(marched(p, level), p, level)
    n = np.arange(16)
    ray = np.stack([-0.35 + 0.05 * n, 0.02 * n, np.ones(16)], -1)
    ray /= np.linalg.norm(ray, axis=1, keepdims=True)

    def exact(ball):
        beside = ball[:3] - (ray @ ball[:3])[:, None] * ray
        return ball[3] - np.linalg.norm(beside, axis=1)

    assert (exact(np.array(BALL)) > 0).any()
    assert (exact(np.array(BALL)) < 0).any()
    assert_allclose(value, exact(np.array(BALL)), atol=1e-9)
    for k in range(4):
        h = 1e-5 * np.eye(4)[k]
        differences = (exact(BALL + h) - exact(BALL - h)) / 2e-5
        assert_allclose(J[:, k], differences, rtol=1e-5, atol=tolerance(J))


@pytest.mark.sweep
def test_bad_functions_of_rays():
    p, level = gradient_field(BALL), gradient_field(np.zeros(4))

    @ti.kernel
    def k():
        for n in level:
            level[n] = ray_level(abs, ti.Vector([0.0, 0.0]), ti.Vector([1.0, p[0]]), 0.0, 1.0)

    with pytest.raises(UnsupportedError, match="ray_level: distance is .*; expected a ti.func that takes a position"):
        jacobian(k, p, level)
    check_transpose(marched(p, level), p, level)
    with pytest.raises(UnsupportedError, match="ray_level is called from Python"):
        ray_level(abs, [0.0], [1.0], 0.0, 1.0)
