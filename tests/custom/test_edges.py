"""Edges: values, boundary terms of the derivative against exact lengths and areas, and the sphere's reference values."""

import numpy as np
import pytest
import taichi as ti
import taichi.math as tm
from differences import central_differences, outputs, read, scalars, vector_outputs, vectors, write
from kernel_texts import func_of, kernel_of, kernels_of
from numpy.testing import assert_allclose, assert_array_equal
from planar import area_in_pixels, circle_in_pixels, half_plane_in_pixels, line_in_box, line_in_pixels, pixels
from reverse_mode import check_transpose, gradient_field
from runtimes import RUNTIME
from taichi_program import initialise

import taichi_ext as te
from taichi_ext import UnsupportedError, coverage, edge, jacobian, pixel, segment_edge, value_and_jacobian

pytestmark = pytest.mark.usefixtures("ti64")

W, H = 26, 21
MODES = (False, True)


def relative(a, b):
    """Distance of two images in the L2 norm, relative to the second."""
    return np.linalg.norm(a - b) / np.linalg.norm(b)


# --- a straight edge: exact -------------------------------------------------------------------------------------------

LINES = [(0.3, 11.2), (-0.9, 3.7), (2.4, -8.1), (0.02, 13.4), (np.pi / 4, 17.3), (1.2, 15.0)]  # angle, offset


def half_plane_kernel(p, image, antialias):
    """The half-plane ``cos(p1) x + sin(p1) y < p0``; its level is not a distance."""

    @ti.kernel
    def k():
        for i, j in image:
            px, py = float(i), float(j)
            level = 3.0 * (p[0] - px * ti.cos(p[1]) - py * ti.sin(p[1]))
            image[i, j] = edge(level, 1.0, 0.0, at=(px, py), antialias=antialias)

    return k


@pytest.mark.sweep
@pytest.mark.parametrize("antialias", MODES)
def test_half_plane(antialias):
    p, image = scalars([0.0, 0.0]), outputs(W, H)
    k = half_plane_kernel(p, image, antialias)
    x, y = pixels(W, H)
    for angle, offset in LINES:
        normal = np.array([np.cos(angle), np.sin(angle)])
        write(p, np.array([offset, angle]))
        value, J = value_and_jacobian(k, p, image)
        length = line_in_box(normal, offset, np.array([-0.5, -0.5]), np.array([W - 0.5, H - 0.5]))
        assert length > 5
        assert_allclose(J[..., 0].sum(), length, rtol=1e-12)
        lengths = line_in_pixels(normal, offset, W, H)
        assert_allclose(J[..., 0], lengths, rtol=1e-9, atol=1e-9)
        turning = line_in_pixels(normal, offset, W, H, lambda x, y, a=angle: x * np.sin(a) - y * np.cos(a))
        assert_allclose(J[..., 1], turning, rtol=1e-9, atol=1e-8)
        if antialias:
            exact = half_plane_in_pixels(-normal, -offset, W, H)
            assert_allclose(value, exact, rtol=1e-9, atol=1e-9)
        else:
            assert_array_equal(value, (x * normal[0] + y * normal[1] < offset).astype(float))


@pytest.mark.mostly_sweep("False")
@pytest.mark.parametrize("antialias", MODES)
def test_an_edge_on_the_border_of_pixels_is_shared(antialias):
    p, direction, image = scalars([7.5]), scalars([1.0, 0.0]), outputs(W, H)

    @ti.kernel
    def k():
        for i, j in image:
            px, py = float(i), float(j)
            image[i, j] = edge(p[0] - direction[0] * px - direction[1] * py, 1.0, 0.0, at=(px, py), antialias=antialias)

    for normal, rows in (([1.0, 0.0], H), ([0.0, 1.0], W)):
        write(direction, np.array(normal))
        write(p, np.array([7.5]))
        by_offset = jacobian(k, p, image)[..., 0]
        by_offset = by_offset if normal[0] else by_offset.T
        assert_allclose(by_offset[7:9], 0.5, rtol=1e-15)
        assert by_offset.sum() == pytest.approx(rows, rel=1e-14)
        write(p, np.array([7.0]))  # through the middle of pixels it is theirs alone
        by_offset = jacobian(k, p, image)[..., 0]
        assert_allclose(by_offset[7] if normal[0] else by_offset[:, 7], 1, rtol=1e-15)
        assert by_offset.sum() == pytest.approx(rows, rel=1e-14)


@pytest.mark.sweep
def test_many_edges_one_over_the_other():
    """Offsets of twelve half-planes, the later in front: for straight edges, J is the derivative of the covered areas."""
    n = 12
    generator = np.random.default_rng(3)
    angles, colours = generator.uniform(0, 2 * np.pi, n), generator.uniform(0, 1, n)
    offsets = [np.cos(a) * 13 + np.sin(a) * 10 + generator.uniform(-7, 7) for a in angles]
    p, image = scalars(offsets), outputs(W, H)
    direction, colour = vectors(np.stack([np.cos(angles), np.sin(angles)], axis=1)), scalars(colours)

    @ti.kernel
    def k():
        for i, j in image:
            px, py = float(i), float(j)
            c = 0.1
            for m in range(n):
                level = p[m] - px * direction[m].x - py * direction[m].y
                c = edge(level, colour[m], 0.5 * c, at=(px, py), antialias=True)
            image[i, j] += c

    J = jacobian(k, p, image)
    [[differences]] = central_differences(k, [p], [image])
    assert np.abs(J).max() > 0.1
    assert_allclose(J, differences, rtol=1e-5, atol=1e-7)


# --- discs ------------------------------------------------------------------------------------------------------------

DISC = [12.317, 9.733, 7.213]  # centre and radius
CURVED = 0.05  # what the curvature of so small a disc costs in the single pixel


@pytest.mark.sweep
def test_coverage_is_a_mask():
    p, image = scalars(DISC), outputs(W, H)

    @ti.kernel
    def k():
        for i, j in image:
            px, py = float(i), float(j)
            mask = coverage(p[2] - ti.sqrt((px - p[0]) ** 2 + (py - p[1]) ** 2), at=(px, py))
            image[i, j] = mask * 0.8 + (1 - mask) * 0.2

    k()
    covered = (read(image) - 0.2) / 0.6
    assert covered.min() >= -1e-12
    assert covered.max() <= 1 + 1e-12
    samples = (np.arange(32) + 0.5) / 32 - 0.5
    x, y = pixels(W, H)
    inside = [(x + dx - DISC[0]) ** 2 + (y + dy - DISC[1]) ** 2 < DISC[2] ** 2 for dx in samples for dy in samples]
    assert_allclose(covered, np.mean(inside, axis=0), rtol=0, atol=0.02)
    J = jacobian(k, p, image)
    assert relative(J[..., 2], 0.6 * circle_in_pixels(DISC[:2], DISC[2], lambda a, x, y: 1 + 0 * a, W, H)) < CURVED


# --- polygons ---------------------------------------------------------------------------------------------------------


def polygon_kernel(p, image, sides, antialias=False):
    @ti.kernel
    def k():
        for i, j in image:
            px, py = float(i), float(j)
            total = 0.0
            for n in range(sides):
                total += segment_edge(p[n], p[(n + 1) % sides], 1.0, at=(px, py), antialias=antialias)
            image[i, j] = total

    return k


@pytest.mark.sweep
@pytest.mark.parametrize("whole", MODES)
def test_antialiased_segments_are_covered_areas(whole):
    """Also where sides lie on the borders of pixels, run through their centres, or are short."""
    corners = np.array([[2.2, 1.4], [12.6, 3.3], [12.6, 9.7], [7.1, 5.2], [7.1, 5.9], [4.6, 13.7]])
    corners = np.round(2 * corners) / 2 if whole else corners
    width, height = 14, 11
    p, image = gradient_field(corners, 1), gradient_field(np.zeros((width, height)))
    k = polygon_kernel(p, image, len(corners), antialias=True)
    J = check_transpose(k, p, image)
    assert_allclose(read(image), area_in_pixels(corners, width, height), rtol=0, atol=1e-13)
    [[differences]] = central_differences(k, [p], [image])
    if not whole:
        assert_allclose(J, differences, rtol=1e-5, atol=1e-6)
    assert_allclose(J.sum((0, 1)), jacobian(polygon_kernel(p, image, len(corners)), p, image).sum((0, 1)), atol=1e-13)


# --- the sphere -------------------------------------------------------------------------------------------------------

SPHERE = np.array([40.0, 10.0, 10.0, 100.0])  # r, cx, cy, cz
TOTALS = {  # derivatives of the sum of the depth image by r, cx and cz
    "exact": (330001.413, 18092.290, -66869.220),
    "autodiff": (-204408.90, 7207.58, 149061.94),
    "chord": (331346.386, 17655.585, -67329.774),
    "pixel": (330236.966, 18066.566, -66959.311),
}
SPHERE_ANTIALIAS = {"autodiff": False, "chord": False, "pixel": True}  # that of the reference values


def sphere_kernel(p, depth, kind, antialias):
    @ti.func
    def hit(px, py):
        v = tm.normalize(ti.Vector([(px - 320) / 400, (py - 240) / 400, 1.0]))
        c = ti.Vector([p[1], p[2], p[3]])
        s = c.dot(v)
        return s, p[0] ** 2 - (s * v - c).norm_sqr()

    @ti.func
    def seen(px, py):
        s, D = hit(px, py)
        value = 0.0
        if D > 0:
            value = s - ti.sqrt(D)
        return value

    @ti.kernel
    def k():
        for i, j in depth:
            px, py = float(i), float(j)
            if ti.static(kind == "autodiff"):
                depth[i, j] = seen(px, py)
            elif ti.static(kind == "chord"):
                s, D = hit(px, py)
                depth[i, j] = edge(D, s - ti.sqrt(ti.max(D, 1e-9)), 0.0, at=(px, py), antialias=antialias, jump=s)
            else:
                depth[i, j] = pixel(seen, at=(px, py), antialias=antialias)

    return k


@pytest.mark.mostly_sweep("autodiff")
@pytest.mark.parametrize("kind", list(SPHERE_ANTIALIAS))
def test_sphere_reference_values(kind):
    p, depth = scalars(SPHERE), outputs(640, 480)
    J = jacobian(sphere_kernel(p, depth, kind, SPHERE_ANTIALIAS[kind]), p, depth)
    by_r, by_x, by_y, by_z = J.sum((0, 1))
    assert_allclose([by_r, by_x, by_z], TOTALS[kind], rtol=0, atol=0.02)
    turned = J[80:560, :, 2].T  # the entries at the mirrored pixels, of which rounding decides whether they are divided
    assert_allclose(J[80:560, :, 1], turned, atol=3e-4 * turned.max() if kind == "pixel" else 1e-8)
    assert by_y == pytest.approx(by_x, rel=1e-5)
    exact = np.array(TOTALS["exact"])
    if kind == "autodiff":
        assert by_r < 0 < exact[0]
        assert by_z > 0 > exact[2]
    else:
        assert_allclose([by_r, by_x, by_z], exact, rtol=2e-3 if kind == "pixel" else 3e-2)


# --- values, shapes, types --------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_vectors_and_matrices_with_tangents_of_their_own():
    p, image = scalars([*DISC, 0.7, 0.2]), vector_outputs(3, W, H)
    full = outputs(W, H, 2, 2)

    @ti.kernel
    def k():
        for i, j in image:
            px, py = float(i), float(j)
            level = p[2] - ti.sqrt((px - p[0]) ** 2 + (py - p[1]) ** 2)
            image[i, j] = edge(level, ti.Vector([1.0, p[3], px * p[3]]), ti.Vector([0.0, p[4], 0.2]), at=(px, py))
            m = edge(level, ti.Matrix([[1.0, p[3]], [0.0, 0.0]]), ti.Matrix([[0.0, 0.0], [p[4], 0.0]]), at=(px, py))
            for a, b in ti.static(ti.ndrange(2, 2)):
                full[i, j, a, b] = m[a, b]

    J, J_full = jacobian(k, p, [image, full])
    x, y = pixels(W, H)
    inside = (DISC[2] ** 2 > (x - DISC[0]) ** 2 + (y - DISC[1]) ** 2).astype(float)
    kappa = J[:, :, 0, 2]  # the jump of the first component is 1
    assert relative(kappa, circle_in_pixels(DISC[:2], DISC[2], lambda a, x, y: 1 + 0 * a, W, H)) < CURVED
    assert_allclose(J[:, :, 1, 2], kappa * (0.7 - 0.2), rtol=1e-12, atol=1e-13)
    assert_allclose(J[:, :, 2, 2], kappa * (0.7 * x - 0.2), rtol=1e-12, atol=1e-13)
    assert_allclose(J[:, :, 1, 3:], np.stack([inside, 1 - inside], -1), rtol=1e-14)
    assert_allclose(J[:, :, 2, 3:], np.stack([inside * x, 0 * x], -1), rtol=1e-14)
    assert_allclose(J_full[:, :, 0, 0, 2], kappa, rtol=1e-12)
    assert_allclose(J_full[:, :, 0, 1, 2], 0.7 * kappa, rtol=1e-12)
    assert_allclose(J_full[:, :, 1, 0, 4], 1 - inside, rtol=1e-14)


# --- both modes, both types -------------------------------------------------------------------------------------------


PAIR = [10.3, 9.2, 5.6, 15.4, 11.1, 6.3]  # two discs


TRANSPOSED = """
    hard: px, py = float(i), float(j); image[i, j] = edge(level(px, py, 0), p[6] * px, p[7] ** 2, at=(px, py))
    antialiased:
        px, py = float(i), float(j)
        image[i, j] = edge(level(px, py, 0), p[6] * px, p[7] ** 2, at=(px, py), antialias=True) ** 2
    nested:
        px, py = float(i), float(j)
        behind = edge(level(px, py, 3), p[6], 0.1, at=(px, py), antialias=True)
        image[i, j] = edge(level(px, py, 0), p[7], behind, at=(px, py), antialias=True)
    with_a_jump: px, py = float(i), float(j); image[i, j] = edge(level(px, py, 0), p[6], 0.0, at=(px, py), jump=p[7])
"""


def transposed_programs(p, image):
    level = func_of("return p[n + 2] ** 2 - (x - p[n]) ** 2 - (y - p[n + 1]) ** 2", "x, y, n", p=p)
    return tuple(
        kernels_of(
            TRANSPOSED, "for i, j in image:\n    ...\n", p=p, image=image, level=level, coverage=coverage, edge=edge
        ).values()
    )


@pytest.mark.sweep
def test_reverse_is_the_transpose_of_forward():
    p, image = gradient_field([*PAIR, 0.7, 0.3]), gradient_field(np.zeros((W, H)))
    for k in transposed_programs(p, image):
        check_transpose(k, p, image)


@pytest.mark.sweep
def test_float32():
    initialise()
    try:
        x, wide = scalars(np.array([11.2, 0.3]), ti.f32), outputs(W, H, dtype=ti.f32)
        for antialias in MODES:
            k = half_plane_kernel(x, wide, antialias)
            for angle, offset in LINES:
                normal = np.array([np.cos(angle), np.sin(angle)])
                write(x, np.array([offset, angle], np.float32))
                length = line_in_box(normal, offset, np.array([-0.5, -0.5]), np.array([W - 0.5, H - 0.5]))
                assert jacobian(k, x, wide)[..., 0].sum(dtype=float) == pytest.approx(length, rel=1e-4)
    finally:
        initialise(default_fp=ti.f64)


# --- what cannot be used ----------------------------------------------------------------------------------------------


# What a function for the value of a pixel returns -> what the message says; after !, a plain run is refused, too.
BAD = r"""
edge(8 * x[0] - px, 1.0, 0.0) -> edge needs at=\(px, py\)
!edge(8 * x[0] - px, 1.0, 0.0, antialias=True) -> edge needs at=\(px, py\)
!edge(i - 3, x[0], 0.0, at=(px, py)) -> edge: level must be a real scalar .* a value of type i32 is given
!edge(3, 1.0, 0.0, at=(px, py)) -> edge: level must be a real scalar .* 3 is given
!coverage(i - 3, at=(px, py)) -> coverage: level must be a real scalar .* a value of type i32 is given
!edge(ti.Vector([x[0] - px, 1.0]), 1.0, 0.0, at=(px, py)) -> edge: level must be a real scalar .* a value of shape \(2,\) is given
edge(8 * x[0] - i, 1.0, 0.0, at=(2 * i, j)) -> at must be two real variables
edge(8 * x[0] - float(i), 1.0, 0.0, at=(float(i), float(j))) -> at must be two real variables
edge(8 * x[0] - px, 1.0, 0.0, at=(px,)) -> edge: at must be a pair of real numbers, at=\(px, py\); a tuple of 1 is given
edge(8 * x[0] - px, 1.0, 0.0, at=(ti.Vector([px, py]), ti.Vector([px, py]))) -> edge: at must be a pair of real numbers
!segment_edge(ti.Vector([x[0], 1.0]), ti.Vector([1.0, 2.0]), 1.0, at=px) -> segment_edge: at must be a pair .* a value of type f[36][24] is given
!segment_edge(ti.Vector([x[0], 1.0]), ti.Vector([1.0, 2.0]), 1.0, at=(px, py, px)) -> segment_edge: at must be a pair .* a tuple of 3 is given
edge(8 * x[0] - 2.5, 1.0, 0.0, at=(px, py)) -> level does not depend on at=\(px, py\); compute it in the same kernel
!edge(8 * x[0] - px, 1.0, 0.0, at=(px, py), antialias="soft") -> antialias is 'soft'; expected True or False
!edge(8 * x[0] - px, 1.0, 0.0, at=(px, py), antialias=px > 1.0) -> antialias is a value of the kernel; expected True or False
!edge(8 * x[0] - px, ti.Vector([1.0, x[0]]), ti.Vector([1.0, 2.0, 3.0]), at=(px, py))[0] -> inside has shape \(2,\), outside \(3,\); give both the same shape
edge(8 * x[0] - px, 1.0, x[0], at=(px, py), jump=ti.Vector([1.0, 2.0])) -> jump has shape \(2,\), the values \(\)
!edge(8 * x[0] - px, 1.0, 0.0, at=(px, py), wrong=3) -> wrong=3 is no argument of edge. It is called as edge\(level
!edge(8 * x[0] - px, 1.0, at=(px, py)) -> outside is missing: edge is called as edge\(level, inside, outside
!edge(8 * x[0] - px, 1.0, 0.0, (px, py)) -> given to edge by position; name the argument: edge\(
!segment_edge(x[0], x[1], 1.0, at=(px, py)) -> segment_edge: start must be a vector of 2, .* a value of type f[36][24] is given
"""


@pytest.mark.parametrize("row", BAD.strip().splitlines())
def test_bad_input(row):
    body, message = row.removeprefix("!").split(" -> ")
    x, image = scalars([0.3, 0.8]), outputs(8, 6)
    scope = {"coverage": coverage, "edge": edge, "segment_edge": segment_edge}
    value = func_of(f"return {body}", "x: ti.template(), i, j, px, py", **scope)
    text = "for i, j in image: px, py = float(i), float(j); image[i, j] = value(x, i, j, px, py)"
    k = kernel_of(text, x=x, image=image, value=value)
    with pytest.raises((UnsupportedError, te.InvalidArgumentError, ti.TaichiTypeError), match=message) as error:
        jacobian(k, x, image)
    text = str(error.value)
    assert 'File "<kernels ' in text
    assert "line" in text
    assert len(text.splitlines()) < 10
    if row[0] == "!":
        with pytest.raises((UnsupportedError, te.InvalidArgumentError, ti.TaichiTypeError)) as error:
            k()
        if RUNTIME == "taichi":  # Quadrants adds its stack at each level
            assert len(str(error.value).splitlines()) < 12


@pytest.mark.mostly_sweep(every=2)
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("edge", lambda: edge(1.0, 2.0, 3.0)),
        ("edge", lambda: edge(1.0, 2.0, 3.0, at=(0.0, 0.0), antialias=True)),
        ("coverage", lambda: coverage(1.0)),
        ("coverage", lambda: coverage(np.ones(3), at=(0.0, 0.0))),
        ("segment_edge", lambda: segment_edge([0.0, 0.0], [1.0, 1.0], 1.0, at=(0.0, 0.0))),
    ],
)
def test_outside_kernels(name, call):
    message = rf'File ".*test_edges.py", line \d+:\n{name} is called from Python, .* type .*@ti.kernel'
    with pytest.raises(UnsupportedError, match=message):
        call()
