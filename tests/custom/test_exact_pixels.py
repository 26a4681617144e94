"""``pixel``, ``coverage`` and ``layers`` in each single pixel: J against integrals along the exact outline, the worst entry of all."""

import numpy as np
import planar
import pytest
import taichi as ti
from captured_warnings import all_warnings
from differences import outputs, read, scalars, write
from drawings import drawing, layered
from kernel_texts import func_of, kernel_of
from numpy.testing import assert_allclose

from taichi_ext import Jacobian, coverage, pixel, value_and_jacobian, vjp

pytestmark = pytest.mark.usefixtures("ti64")

W, H = 14, 24


def flow(outline, given, jump, shape):
    """J of an image by a closed outline, a function of the parameters: what flows through it, in each pixel.

    The area to the left of a curve changes by the integral of ``u x dl``, where u is the motion of its points.  The jump
    is a number or a function of the points.
    """
    points = outline(given)
    along = np.roll(points, -1, axis=0) - points
    middle = points + 0.5 * along
    area = 0.5 * np.sum(points[:, 0] * along[:, 1] - points[:, 1] * along[:, 0])
    pixels = np.floor(middle + 0.5).astype(int)
    inside = ((pixels >= 0) & (pixels < shape)).all(1)
    numbers = pixels[inside] @ [shape[1], 1]
    J = np.zeros((*shape, len(given)))
    jump = jump(*middle.T) if callable(jump) else jump
    for k in range(len(given)):
        step = np.zeros(len(given))
        step[k] = 1e-6
        moved = (outline(given + step) - outline(given - step)) / 2e-6
        moved = 0.5 * (moved + np.roll(moved, -1, axis=0))
        part = (moved[:, 0] * along[:, 1] - moved[:, 1] * along[:, 0]) * np.sign(area) * jump
        J[..., k] = np.bincount(numbers, part[inside], minlength=shape[0] * shape[1]).reshape(shape)
    return J


def worst(J, expected):
    """The largest error of an entry, of the largest entry."""
    return np.abs(J - expected).max() / np.abs(expected).max()


ANGLES = (np.arange(20_000) + 0.5) / 20_000 * 2 * np.pi


def circle(p):
    return np.stack([p[0] + p[2] * np.cos(ANGLES), p[1] + p[2] * np.sin(ANGLES)], axis=1)


@pytest.fixture(scope="module")
def disc(ti64):
    """The prepared form of a disc to the right of a line, its params, the fourth of which moves the line, and the image."""
    p, image = ti.field(ti.f64, 4), ti.field(ti.f64, (8, 7))

    @ti.func
    def shade(x, y):
        value = 0.0
        if x + 0.3 * y > p[3]:
            if (x - p[0]) ** 2 + (y - p[1]) ** 2 < p[2] ** 2:
                value = 1.0
        elif x < -30.0:
            value = 2.0
        return value

    return Jacobian(drawing(shade, image), p, image), p, image


def discs(radii, count=30):
    """Discs of every size, at random; from the fourth of a size on with a cap of up to 0.02 pixels beyond the border of a pixel."""
    generator = np.random.default_rng(0)
    for n in range(count):
        radius = radii[n % len(radii)]
        given = np.array([3 + generator.uniform(-0.5, 0.5), 2.6 + generator.uniform(-0.5, 0.5), radius])
        if n >= 3 * len(radii):
            given[1] = 4.5 - radius + generator.uniform(-0.002, 0.02)
        yield given


def test_discs_and_their_caps(disc):
    plan, p, _ = disc
    for given in discs([0.05, 0.1, 0.3, 0.6, 1.1, 1.9]):
        write(p, np.array([*given, -100.0]))
        assert worst(plan()[..., :3], flow(circle, given, 1.0, (8, 7))) < (0.03 if given[2] < 0.1 else 0.015), given


def test_a_disc_behind_an_edge_that_shows_nothing(disc):
    """Conditions that do not exist at the centre of the pixel, as many as there, and the pixel's border sees one value."""
    plan, p, image = disc
    given = np.array([1.3, 1.2, 0.15])
    write(p, np.array([*given, 1.45]))
    assert worst(plan()[..., :3], flow(circle, given, 1.0, (8, 7))) < 0.01
    assert_allclose(read(image)[1, 1], np.pi * 0.15**2, atol=1e-3)


def rims(discs, background, shape):
    """J of an image by the centres and radii of discs, later ones over earlier ones, as integrals along their rims."""
    J = np.zeros((*shape, len(discs), 3))
    motion = np.stack([np.cos(ANGLES), np.sin(ANGLES), np.ones(len(ANGLES))])
    for k, (x, y, radius, value) in enumerate(discs):
        X, Y = x + radius * motion[0], y + radius * motion[1]
        outside = np.full(len(ANGLES), background)
        is_seen = np.ones(len(ANGLES), bool)
        for n, other in enumerate(discs):
            is_over = (X - other[0]) ** 2 + (Y - other[1]) ** 2 < other[2] ** 2
            if n < k:
                outside[is_over] = other[3]
            elif n > k:
                is_seen &= ~is_over
        pixels = np.floor(np.stack([X, Y], axis=1) + 0.5).astype(int)
        counted = is_seen & ((pixels >= 0) & (pixels < shape)).all(1)
        flux = (value - outside) * radius * 2 * np.pi / len(ANGLES) * motion
        for n in range(3):
            sums = np.bincount(pixels[counted] @ [shape[1], 1], flux[n, counted], minlength=shape[0] * shape[1])
            J[..., k, n] = sums.reshape(shape)
    return J


@pytest.mark.sweep
def test_discs_of_all_sizes_over_each_other():
    """Also small ones in a pixel that the rim of another one crosses, and rims that cross each other twice in one."""
    shape, count = (7, 6), 6
    p, image = scalars(np.ones((count, 4))), outputs(*shape)

    @ti.func
    def shade(x, y):
        value = 0.1
        for n in range(count):
            if (x - p[n, 0]) ** 2 + (y - p[n, 1]) ** 2 < p[n, 2] ** 2:
                value = p[n, 3]
        return value

    plan = Jacobian(drawing(shade, image), p, image)
    generator = np.random.default_rng(0)
    for n in range(63):
        radii = np.exp(generator.uniform(np.log(0.1), np.log(3.0), count))
        places = generator.uniform(-0.5, np.array(shape) - 0.5, (count, 2))
        given = np.column_stack([places, radii, generator.uniform(0.2, 1.0, count)])
        if n < 25 or n == 62:  # in this one, a disc looks out from behind another one within a pixel
            write(p, given)
            assert np.abs(plan()[..., :3] - rims(given, 0.1, shape)).max() < 0.02, given


@pytest.mark.sweep
def test_a_disc_that_is_seen_edge_on():
    """An ellipse that is 7 pixels wide and 0.25 pixels high; the ray meets its plane at a pole in the same pixel."""
    start = np.array([0.2, 0.1, 3.4, 0.45])
    p, image = scalars(start), outputs(14, 4)

    @ti.func
    def shade(x, y):
        d = ti.Vector([(x - 7.0) / 30, (y - 0.5) / 30, 1.0])
        value = 0.2
        t = p[1] / d.y
        if t > 0 and (t * d.x - p[0]) ** 2 + (t - p[2]) ** 2 < p[3] ** 2:
            value = 0.9
        return value

    def outline(q):
        x, z = q[0] + q[3] * np.cos(ANGLES), q[2] + q[3] * np.sin(ANGLES)
        return np.stack([7 + 30 * x / z, 0.5 + 30 * q[1] / z], axis=1)

    plan = Jacobian(drawing(shade, image), p, image)
    for by in (0.0, 0.006, -0.005):
        given = start + [by, 0.0, 0.0, 0.1 * by]
        write(p, given)
        J, expected = plan(), flow(outline, given, 0.7, (14, 4))
        for k in range(4):
            assert worst(J[..., k], expected[..., k]) < 0.03, (by, k)


def sliver(width):
    a, b = np.array([2.3, 3.6]), np.array([8.5, 19.5])
    across = np.array([a[1] - b[1], b[0] - a[0]]) / np.linalg.norm(b - a)
    return np.stack([a, b, b + width * across])


def triangle(p):
    corners = p.reshape(3, 2)
    part = (np.arange(100_000) / 100_000)[:, None]
    return np.concatenate([corners[k] + part * (corners[(k + 1) % 3] - corners[k]) for k in range(3)])


def level_of(p):
    """The distance from the sides of a triangle with corners in p, positive inside."""

    @ti.func
    def level(x, y):
        least = 1e9
        for k in ti.static(range(3)):
            a = ti.Vector([p[2 * k], p[2 * k + 1]])
            side = ti.Vector([p[(2 * k + 2) % 6], p[(2 * k + 3) % 6]]) - a
            least = ti.min(least, side.cross(ti.Vector([x, y]) - a) / side.norm())
        return least

    return level


def inside_of(p):
    """1 in a triangle with corners in p."""
    level = level_of(p)
    shade = func_of("return ti.select(level(x, y) > 0, 1.0, 0.0)", "x, y", level=level)
    return shade


@pytest.mark.sweep
def test_values_beside_corners():
    """Also of the outer region, whose angle is more than 180 degrees: its middle may be in the triangle."""
    p, image = scalars(sliver(0.5).ravel()), outputs(8, 7)
    k = drawing(inside_of(p), image)
    generator = np.random.default_rng(0)
    for _ in range(20):
        corners = np.array([[1.0, 1.0], [6.0, 2.0], [2.5, 5.0]]) + generator.uniform(-0.5, 0.5, (3, 2))
        write(p, corners.ravel())
        k()
        assert_allclose(read(image), planar.area_in_pixels(corners, 8, 7), atol=1e-4)


@pytest.mark.sweep
def test_slivers():
    """Triangles that taper to nothing, down to 0.02 pixels wide; and reverse mode."""
    p, image = scalars(sliver(0.5).ravel()), outputs(12, H)
    k = drawing(inside_of(p), image)
    plan = Jacobian(k, p, image)
    for width in (0.5, 0.1, 0.05, 0.02):
        given = sliver(width).ravel()
        write(p, given)
        assert worst(plan(), flow(triangle, given, 1.0, (12, H))) < 0.03, width
        a, b, c = given.reshape(3, 2)
        area = 0.5 * np.linalg.det([b - a, c - a])
        assert_allclose(read(image).sum(), area, atol=2e-3)
    cotangents = np.random.default_rng(1).normal(size=(12, H))
    assert_allclose(vjp(k, p, image, cotangents), np.tensordot(cotangents, plan(), 2), rtol=1e-9, atol=1e-12)


def test_coverage_of_discs_and_their_caps():
    """As ``test_discs_and_their_caps``, by a level that is a distance, and by one that is not."""
    p, image = scalars(np.array([3.0, 2.6, 1.0])), outputs(8, 7)

    @ti.kernel
    def k():
        for i, j in image:
            px, py = float(i), float(j)
            square = (px - p[0]) ** 2 + (py - p[1]) ** 2
            level = ti.select(p[2] > 0.5, p[2] ** 2 - square, p[2] - ti.sqrt(square))
            image[i, j] = coverage(level, at=(px, py))

    plan = Jacobian(k, p, image)
    for given in discs([0.05, 0.1, 0.3, 0.6, 1.1, 1.9]):
        write(p, given)
        assert worst(plan(), flow(circle, given, 1.0, (8, 7))) < 0.015, given
        assert_allclose(read(image).sum(), np.pi * given[2] ** 2, atol=2e-4)


def draws_disc(use, p, image):
    """The kernel that draws a disc by ``pixel`` or ``coverage``."""
    level = func_of("return p[2] - ti.sqrt((x - p[0]) ** 2 + (y - p[1]) ** 2)", "x, y", p=p)
    shade = func_of("return ti.select(level(x, y) > 0, 1.0, 0.0)", "x, y", level=level)

    @ti.kernel
    def k():
        for i, j in image:
            px, py = float(i), float(j)
            if ti.static(use == "pixel"):
                image[i, j] = pixel(shade, at=(px, py))
            else:
                image[i, j] = coverage(level(px, py), at=(px, py))

    return k


@pytest.mark.mostly_sweep("coverage")
@pytest.mark.parametrize("use", ["pixel", "coverage"])
def test_discs_that_are_smaller_than_a_pixel(use):
    """Discs within one pixel, down to a radius of 0.01: none is lost."""
    p, image = scalars(np.array([1.0, 1.0, 0.3])), outputs(3, 3)
    plan = Jacobian(draws_disc(use, p, image), p, image)
    generator = np.random.default_rng(3)
    for radius, tolerance in [(0.05, 0.02), (0.02, 0.04), (0.01, 0.11)] * 4:
        write(p, np.array([*(1 + generator.uniform(-0.45, 0.45, 2)), radius]))
        J = plan()[..., 2]
        assert_allclose(J[1, 1], 2 * np.pi * radius, rtol=tolerance, err_msg=f"{read(p)}")
        assert np.count_nonzero(J) == 1


@pytest.mark.sweep
def test_tiny_discs_in_layers():
    """Those that cross no side of a square of 1/32 pixel were lost."""
    p, image = scalars(np.array([1.0, 1.0, 0.3])), outputs(3, 3)
    shape = func_of("return p[2] - ti.sqrt((x - p[0]) ** 2 + (y - p[1]) ** 2), 1.0", "n, x, y", p=p)
    plan = Jacobian(layered(image, shape, 1, 0.0), p, image)
    generator = np.random.default_rng(1)
    for radius in (0.02, 0.01):
        found = []
        for _ in range(20):
            write(p, np.array([*(1 + generator.uniform(-0.45, 0.45, 2)), radius]))
            found.append(plan()[..., 2].sum() / (2 * np.pi * radius))
        off = np.abs(np.array(found) - 1)
        assert np.median(off) < 0.01, (radius, off)
        assert off.max() < 0.03, (radius, off)


STRIPES = [[0.503, 0.37, 0.7], [0.503, 0.37, 0.81], [0.2, 0.31, 0.4], [0.5, 0.83, 0.7]]  # angle, period and phase


@pytest.mark.mostly_sweep("sine")
@pytest.mark.parametrize("use", ["sine", "remainder"])
def test_stripes_much_narrower_than_a_pixel(use):
    """Stripes by the sign of a sine were lost in whole pixels in which it is at its top in the centre and two corners."""
    p, image = scalars(np.array(STRIPES[0])), outputs(16, 12)

    @ti.func
    def shade(x, y):
        turn = (x * ti.cos(p[0]) + y * ti.sin(p[0])) / p[1] + p[2]
        if ti.static(use == "sine"):
            return ti.select(ti.sin(2 * np.pi * turn) > 0, 1.0, 0.0)
        else:
            return ti.select(turn % 1.0 < 0.5, 1.0, 0.0)

    plan = Jacobian(drawing(shade, image), p, image)
    x, y = np.indices((16, 12))[..., None]
    for given in STRIPES:
        write(p, np.array(given))
        angle, period, phase = given
        along, across = abs(np.cos(angle)), abs(np.sin(angle))
        edges = np.arange(-2, 140)
        off = abs(x * np.cos(angle) + y * np.sin(angle) - period * (edges / 2 - phase))
        chords = np.clip((0.5 * (along + across) - off) / (along * across), 0, 1 / max(along, across))
        wanted = period * (chords * (-1.0) ** edges).sum(-1)
        assert worst(plan()[..., 2:], wanted[..., None]) < 0.01
        assert_allclose(read(image), 0.5, atol=0.5 * period)


@pytest.mark.mostly_sweep("sine")
@pytest.mark.parametrize("use", ["sine", "floor"])
def test_stripes_on_a_cylinder(use):
    """They become thinner towards its rims; the sign of a sine had lost pairs of them that no slope led to."""
    p, image = scalars(np.array([11.5, 9.5, 0.0, 25.0])), outputs(24, 2)

    @ti.func
    def shade(x, y):
        value, u = 0.0, (x - p[0]) / p[1]
        if abs(u) < 1:
            turn = p[3] * ti.asin(u) + p[2]
            if ti.static(use == "sine"):
                value = ti.select(ti.sin(turn) > 0, 1.0, 0.3)
            else:
                value = ti.select(int(ti.floor(turn / np.pi)) % 2 == 0, 1.0, 0.3)
        return value

    plan = Jacobian(drawing(shade, image), p, image)
    generator = np.random.default_rng(0)
    for count in [20.0, 25.0, 30.0, 40.0] * 5:
        x, radius, phase = np.array([11, 9, 0]) + generator.uniform(0, 1, 3) * [1, 1, 6]
        write(p, np.array([x, radius, phase, count]))
        numbers = np.arange(np.ceil((phase - np.pi / 2 * count) / np.pi), (phase + np.pi / 2 * count) / np.pi)
        angles = (numbers * np.pi - phase) / count
        after = np.where(numbers % 2 == 0, 1.0, 0.3)
        places = np.array([x - radius, *(x + radius * np.sin(angles)), x + radius])
        jumps = np.array([after[0] - 1.3, *(1.3 - 2 * after), after[-1]])
        motion = np.ones((len(places), 3))
        motion[:, 1] = [-1, *np.sin(angles), 1]
        motion[:, 2] = [0, *(-radius * np.cos(angles) / count), 0]
        wanted = np.zeros((24, 1, 3))
        np.add.at(wanted[:, 0], np.floor(places + 0.5).astype(int), jumps[:, None] * motion)
        error = np.abs(plan()[..., :3] - wanted).max((0, 1)) / np.abs(wanted).max((0, 1))
        assert error.max() < 0.02, (read(p), error)


@pytest.mark.sweep
def test_checkers_by_a_product_of_sines():
    """Slopes of the product led past pairs of edges near its saddles, and J was 0.07 off; its factors are levels of their own."""
    p, image = scalars(np.array([0.2, 0.8, 0.8])), outputs(4, 3)
    h, points = 0.15, 4000  # half a period; of each line in a pixel

    @ti.func
    def shade(x, y):
        u = x * ti.cos(p[2]) + y * ti.sin(p[2]) - p[0]
        v = y * ti.cos(p[2]) - x * ti.sin(p[2]) - p[1]
        product = ti.sin(np.pi / h * u) * ti.sin(np.pi / h * v)
        return ti.select(product > 0, 1.0, 0.0)

    plan = Jacobian(drawing(shade, image), p, image)
    along = (np.arange(16 * points) + 0.5) / points - 8
    generator = np.random.default_rng(0)
    for _ in range(5):
        given = generator.uniform(0, [1, 1, 1.5])
        write(p, given)
        wanted = np.zeros((4, 3, 2))
        cos, sin = np.cos(given[2]), np.sin(given[2])
        for axis in range(2):
            for n in range(-50, 50):
                u, v = (np.full_like(along, n * h), along)[:: 1 - 2 * axis]
                x, y = (u + given[0]) * cos - (v + given[1]) * sin, (u + given[0]) * sin + (v + given[1]) * cos
                i, j = np.floor([x + 0.5, y + 0.5]).astype(int)
                inside = (i >= 0) & (i < 4) & (j >= 0) & (j < 3)
                jump = (-1) ** n * np.sign(np.sin(np.pi / h * along))[inside]
                np.add.at(wanted[..., axis], (i[inside], j[inside]), -jump / points)
        assert np.abs(plan()[..., :2] - wanted).max() < 0.01, given  # of 13 pixels of edges in each pixel


def test_tangents_jump_at_their_poles():
    """The level of a condition on one is not 0 there; J was 200 times too large."""
    p, image = scalars(np.array([0.3, 2.1])), outputs(20, 1)
    shade = func_of("return ti.select(ti.tan((x - p[0]) * p[1]) > 0, 1.0, 0.2)", "x, y", p=p)
    J = Jacobian(drawing(shade, image), p, image)()[:, 0]
    numbers = np.arange(-1, 26)
    away = numbers * np.pi / 2 / 2.1
    jumps = np.where(numbers % 2 == 0, -0.8, 0.8)
    wanted = np.zeros((20, 2))
    np.add.at(wanted, np.floor(0.3 + away + 0.5).astype(int), jumps[:, None] * np.stack([away * 0 + 1, -away / 2.1], 1))
    assert_allclose(J, wanted, atol=1e-12)


def test_sines_that_only_shade_are_no_conditions():
    """Where they are divided by a number or a norm; an image took 100 times as long, and J was 5 % off."""
    p, image = scalars(np.array([5.3, 3.6, 2.9])), outputs(12, 8)

    def by(use):
        @ti.func
        def shade(x, y):
            value = 0.1
            if (ti.Vector([x, y]) - ti.Vector([p[0], p[1]])).norm() < p[2]:
                bump = ti.Vector([ti.sin(14 * x), ti.cos(11 * y), 2.0])
                if ti.static(use == "quotients"):
                    value += bump[0] / 4 + bump.normalized()[2]
                else:
                    value += bump[0] * 0.25 + bump[2] * ti.rsqrt(bump.norm_sqr())
            return value

        return Jacobian(drawing(shade, image), p, image)()

    assert_allclose(by("quotients"), by("products"), atol=1e-12)


@pytest.mark.sweep
def test_discs_that_the_smallest_squares_do_not_resolve_give_a_warning():
    p, image = scalars(np.array([1.0, 1.0, 0.005])), outputs(3, 3)
    plan = Jacobian(draws_disc("pixel", p, image), p, image)
    generator = np.random.default_rng(3)
    for _ in range(20):
        write(p, np.array([*(1 + generator.uniform(-0.45, 0.45, 2)), 0.005]))
        with all_warnings() as found:
            J = plan()[..., 2]
        assert found or abs(J.sum() / (2 * np.pi * 0.005) - 1) < 0.06, read(p)


def coverage_of_a_triangle(width, height):
    """The kernel that draws a triangle's coverage, the triangle's corners and the image."""
    p, image = scalars(sliver(0.5).ravel()), outputs(width, height)
    level = level_of(p)
    text = "for i, j in image: px, py = float(i), float(j); image[i, j] = coverage(level(px, py), at=(px, py))"
    k = kernel_of(text, image=image, level=level)
    return k, p, image


@pytest.mark.sweep
def test_coverage_of_slivers():
    k, p, image = coverage_of_a_triangle(12, H)
    plan = Jacobian(k, p, image)
    for width in (0.5, 0.1, 0.02):
        given = sliver(width).ravel()
        write(p, given)
        assert worst(plan(), flow(triangle, given, 1.0, (12, H))) < 0.02, width
        assert_allclose(read(image), planar.area_in_pixels(given.reshape(3, 2), 12, H), atol=5e-4)
    J = plan()
    assert_allclose(vjp(k, p, image, image), np.tensordot(read(image), J, 2), rtol=1e-9, atol=1e-12)


def test_coverage_of_corners_on_sides():
    """Corners of a triangle on the border of two pixels, and up to 0.03 pixels beside it: each column is right."""
    k, p, image = coverage_of_a_triangle(8, 7)
    plan = Jacobian(k, p, image)
    generator = np.random.default_rng(0)
    for n in range(6):
        corners = np.array([[1.0, 1.0], [6.0, 2.0], [2.5, 5.0]]) + generator.uniform(-0.5, 0.5, (3, 2))
        which, axis = n % 3, n % 2
        off = [0.0, 1e-9, 1e-6, -1e-5, 1e-3, -0.03][n]
        corners[which, axis] = np.round(corners[which, axis]) + 0.5 + off
        write(p, corners.ravel())
        J, expected = plan(), flow(triangle, corners.ravel(), 1.0, (8, 7))
        for column in range(6):
            assert worst(J[..., column], expected[..., column]) < 5e-4, (corners, column)
        assert_allclose(read(image), planar.area_in_pixels(corners, 8, 7), atol=1e-6)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["layers", "hole", "transparent", "nearest"])
def test_two_straight_edges_of_one_shape_in_layers(kind):
    """Two edges that meet at a small angle are exact, also where the larger level of two counts."""
    p, image = scalars(sliver(0.5).ravel()), outputs(12, H)
    level = level_of(p)
    sign, alpha = {"hole": (-1.0, 1.0), "transparent": (1.0, 0.3)}.get(kind, (1.0, 1.0))

    @ti.func
    def shape(n, x, y):
        if ti.static(kind == "nearest"):
            return level(x, y), 2.0, 1.0
        elif ti.static(kind == "transparent"):
            return level(x, y), 1.0, alpha
        else:
            return sign * level(x, y), 1.0

    order = "depth" if kind == "nearest" else "index"
    k = layered(image, shape, 1, 0.0, order=order)
    plan = Jacobian(k, p, image)
    for width in (0.5, 0.1, 0.02):
        given = sliver(width).ravel()
        write(p, given)
        J, area = plan(), planar.area_in_pixels(given.reshape(3, 2), 12, H)
        assert worst(J, sign * alpha * flow(triangle, given, 1.0, (12, H))) < 0.002, width
        assert_allclose(read(image), 1 - area if kind == "hole" else alpha * area, atol=1e-6)
    assert_allclose(vjp(k, p, image, image), np.tensordot(read(image), J, 2), rtol=1e-9, atol=1e-12)


def test_a_line_in_layers_that_is_thinner_than_a_pixel():
    """Of a value that is linear."""
    p, image, half = scalars([5.3, 0.4]), outputs(12, 9), 0.15
    shape = func_of(
        "return half - abs(x * ti.cos(p[1]) + y * ti.sin(p[1]) - p[0]), 1.0 + 0.1 * x - 0.2 * y",
        "n, x, y",
        p=p,
        half=half,
    )
    value, J = value_and_jacobian(layered(image, shape, 1, 0.0), p, image)
    normal, sides = np.array([np.cos(0.4), np.sin(0.4)]), (5.3 + half, 5.3 - half)
    ends = [planar.line_in_pixels(normal, side, 12, 9, lambda x, y: 1.0 + 0.1 * x - 0.2 * y) for side in sides]
    assert_allclose(J[..., 0], ends[0] - ends[1], atol=3e-5)
    x, y = (np.arange(n * 100) / 100 - 0.495 for n in (12, 9))
    inside = np.abs(np.add.outer(x * normal[0], y * normal[1]) - 5.3) < half
    mean = np.where(inside, np.add.outer(1.0 + 0.1 * x, -0.2 * y), 0.0).reshape(12, 100, 9, 100).mean((1, 3))
    assert_allclose(value, mean, atol=3e-3)


@pytest.mark.sweep
def test_layers_of_discs_and_their_caps():
    """Also of caps between two corners of a pixel, and of what is left of a pixel beside one; of a value that is linear."""
    p, image = scalars(np.array([3.0, 2.6, 1.0])), outputs(8, 7)
    x, y = np.meshgrid((np.arange(800) + 0.5) / 100 - 0.5, (np.arange(700) + 0.5) / 100 - 0.5, indexing="ij")

    def value(x, y):
        return 1.0 + 0.3 * (x - 3.0) + 0.5 * (y - 2.6)

    shape = func_of(
        "return p[2] - ti.sqrt((x - p[0]) ** 2 + (y - p[1]) ** 2), 1.0 + 0.3 * (x - 3.0) + 0.5 * (y - 2.6)",
        "n, x, y",
        p=p,
    )
    k = layered(image, shape, 1, 0.0)
    plan = Jacobian(k, p, image)
    for n, given in enumerate(discs([0.1, 0.3, 0.6, 1.1, 1.9])):
        write(p, given)
        assert worst(plan(), flow(circle, given, value, (8, 7))) < 0.02, given
        assert_allclose(read(image).sum(), np.pi * given[2] ** 2 * value(*given[:2]), atol=1e-3, rtol=5e-4)
        if n >= 15:
            covered = np.where((x - given[0]) ** 2 + (y - given[1]) ** 2 < given[2] ** 2, value(x, y), 0.0)
            assert_allclose(read(image), covered.reshape(8, 100, 7, 100).mean((1, 3)), atol=0.01)
    for given in discs([0.03] * 10, 10):  # squares of 1/32 pixel are smaller than its arcs
        write(p, given)
        assert worst(plan(), flow(circle, given, value, (8, 7))) < 0.08, given


def test_other_outcomes_read_and_end_as_those_of_the_function():
    """What a condition guards, with a root of a negative number as index, or a loop that it lets end."""
    p, image, table = scalars([3.0, 2.1]), outputs(6, 6), scalars([0.3, 0.9, 0.4])

    @ti.func
    def shade(x, y):
        square = p[1] ** 2 - (x - p[0]) ** 2
        value, turns = 0.1, 0.0
        if square > 0:
            value = 1 + table[int(ti.sqrt(square))]
        if x < p[0]:
            turns = 1.0
        r, way = x - p[0], 1.0
        if x < p[0]:
            way = -1.0
        while r * (x - p[0]) >= 0 and r < 9:
            r -= way
        return value + turns

    J = Jacobian(drawing(shade, image), p, image)().sum((0, 1))
    by_radius = 1.2 + 0.6 * 2.1 / np.sqrt(2.1**2 - 1) - 0.5 * 2.1 / np.sqrt(2.1**2 - 4)
    assert_allclose(J, [6, 12 * by_radius], rtol=0.02)
