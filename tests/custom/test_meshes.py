"""Edges of meshes: the table of edges, and edges that are visible in part; places that are looked at together."""

import numpy as np
import pytest
import taichi as ti
from captured_warnings import no_warnings
from differences import central_differences, integers, outputs, read, scalars, vector_outputs, vectors
from kernel_texts import func_of, kernel_of
from mesh_scenes import cube
from numpy.testing import assert_allclose, assert_array_equal
from planar import area_in_pixels, clip, line_in_pixels
from reverse_mode import check_transpose, gradient_field

import taichi_ext as te
from taichi_ext import UnsupportedError, add_edge, jacobian, mesh_edges, value_and_jacobian, vjp

W, H = 14, 11
CORNERS = np.random.default_rng(7).normal(size=(5, 3))  # where their places do not matter


def test_edges_of_a_tetrahedron_and_of_an_open_fan():
    edges = mesh_edges([[0, 1, 2], [0, 3, 1], [1, 3, 2], [2, 3, 0]], CORNERS)
    assert edges.dtype == np.int32
    assert len(edges) == 6
    assert all(sorted(row) == [0, 1, 2, 3] for row in edges.tolist())
    fan = mesh_edges(np.array([[0, 1, 2], [0, 2, 3]]), CORNERS)
    assert_array_equal(fan[fan[:, 3] >= 0], [[0, 2, 1, 3]])
    assert len(fan) == 5
    assert mesh_edges(np.zeros((0, 3), int), CORNERS).shape == (0, 4)


@pytest.mark.parametrize(
    ("triangles", "message"),
    [
        ([[0, 1, 2, 3]], r"an array of shape \(1, 4\) .* expected integers of shape \(faces, 3\)"),
        ([[0.0, 1.0, 2.0]], "type float64; expected integers"),
        ([[0, 1, 2], [0, -1, 2]], "face 1 has a negative corner number"),
    ],
)
def test_meshes_that_are_refused(triangles, message):
    with pytest.raises(te.InvalidArgumentError, match=f"mesh_edges: .*{message}"):
        mesh_edges(triangles, CORNERS)


@pytest.mark.parametrize(
    ("corners", "message"),
    [
        ([[0.0, 1.0, 2.0, 3.0]] * 3, r"corners is an array of shape \(3, 4\) .* expected real numbers of shape"),
        ([["a", "b"]] * 3, "corners is an array of shape .* and type <U1"),
        ([[0.0, 1.0]] * 2, r"face 0 has the corners \[0, 1, 2\], but there are 2 corners"),
        ([[0.0, 1.0], [np.nan, 2.0], [1.0, 0.0]], r"corner 1 is \[nan, 2.0\]; every corner must be finite"),
        ([[0.0, 1.0], [1.0, 2.0], [np.inf, 0.0]], r"corner 2 is \[inf, 0.0\]"),
    ],
)
def test_corners_that_are_refused(corners, message):
    with pytest.raises(te.InvalidArgumentError, match=f"mesh_edges: {message}"):
        mesh_edges([[0, 1, 2]], corners=corners)


def test_an_edge_may_have_more_than_two_faces():
    assert_array_equal(mesh_edges([[0, 1, 2], [1, 0, 3], [0, 1, 4]], CORNERS)[0], [0, 1, 2, 3, 4])


def test_corners_at_one_place_are_one():
    """A cube with four corners for each side, moved by less than 1e-6 of its size, with faces twice and without area."""
    corners, faces, _ = cube()
    moved = corners + np.random.default_rng(0).uniform(-4e-7, 4e-7, corners.shape)
    needless = [[3, 3, 4], [0, 1, 24], [2, 1, 0]]  # a corner twice; corners on one line; the first face again
    table = mesh_edges(np.vstack([faces, needless]), corners=np.vstack([moved, [[-1, 0.3, -1]]]))
    assert table.shape == (18, 4)  # 12 edges of the cube and 6 diagonals
    assert (table >= 0).all()
    ends = corners[table[:, :2]]
    assert sorted(np.ptp(ends, axis=1).sum(-1)) == [2] * 12 + [4] * 6
    assert mesh_edges([[0, 1, 2]], corners=np.zeros((3, 2))).shape == (0, 4)


def test_edges_are_split_where_corners_lie_on_them():
    """One face beside two, and beside five on a slanted edge of which the corners are not in order."""
    table = mesh_edges(
        [[0, 1, 2], [0, 3, 4], [3, 1, 4]], corners=[[0, 0, 0], [2, 0, 0], [1, 1, 0], [1, 0, 0], [1, -1, 1]]
    )
    assert table.tolist() == [
        [0, 2, 1, -1],
        [0, 3, 2, 4],
        [0, 4, 3, -1],
        [1, 2, 0, -1],
        [1, 3, 2, 4],
        [1, 4, 3, -1],
        [3, 4, 0, 1],
    ]
    places = np.array([0.9, 0.3, 0.7, 0.1])
    on_edge = np.outer(places, [3.0, -1.0, 2.0])
    corners = np.vstack([[[0, 0, 0], [3.0, -1, 2], [1, 4, 0], [0, -3, 1]], on_edge])
    order = [0, *(4 + np.argsort(places)), 1]
    faces = [[0, 1, 2], *([a, b, 3] for a, b in zip(order, order[1:], strict=False))]
    for offset in (0.0, np.array([5.0, 2.0, -3.0])):  # of the corner at which the edge begins
        shared = [row for row in mesh_edges(faces, corners=corners + offset).tolist() if row[3] >= 0 and 2 in row[2:]]
        assert sorted(map(sorted, (row[:2] for row in shared))) == sorted(
            sorted(p) for p in zip(order, order[1:], strict=False)
        )


def test_an_edge_that_is_hidden_in_part(ti64):
    """A slanted line between two colours, behind a strip that ends within pixels: lengths of what is seen of it."""
    p, image = scalars([6.3, 0.4]), vector_outputs(2, W, H)

    @ti.func
    def seen(x, y):
        side = ti.cos(p[1]) * x + ti.sin(p[1]) * y - p[0]
        value = ti.select(side > 0, ti.Vector([0.2, 5.0]), ti.Vector([1.0, 3.0]))
        return ti.select(y > 4.5, value, ti.Vector([0.0, 0.0]))

    @ti.kernel
    def k():
        for i, j in image:
            image[i, j] = seen(float(i), float(j))
        for _ in range(1):
            n = ti.Vector([ti.cos(p[1]), ti.sin(p[1])])
            along = ti.Vector([-n.y, n.x])
            # its left is where side is negative
            add_edge(image, p[0] * n - 40 * along, p[0] * n + 40 * along, seen)

    value, J = value_and_jacobian(k, p, image)
    lengths = line_in_pixels(np.array([np.cos(0.4), np.sin(0.4)]), 6.3, W, H)
    lengths[:, :5] = 0  # the strip ends on the border of pixels; where that is, is found to 1/16 of a pixel
    assert_allclose(J[:, 6:, 0, 0], 0.8 * lengths[:, 6:], rtol=1e-9, atol=1e-9)
    assert_allclose(J[..., 0], [0.8, -2.0] * lengths[..., None], rtol=0, atol=2.0 / 16)
    assert set(np.unique(value[..., 1])) == {0.0, 3.0, 5.0}
    turned = J[..., 0, 1].sum() / 0.8  # by the angle: the moment of the line, about its point nearest to the origin
    y, c, s = 4.5, np.cos(0.4), np.sin(0.4)
    ends = np.array([(y - 6.3 * s) / c, (H - 0.5 - 6.3 * s) / c])  # places along the line
    assert turned == pytest.approx(-(ends[1] ** 2 - ends[0] ** 2) / 2, abs=abs(ends[0]) / 16)


def test_bad_input(ti64):
    x, image, points = gradient_field([0.3, 0.8]), gradient_field(np.zeros((5, 4))), ti.Vector.field(2, ti.f64, 3)
    seen = func_of("return px", "px, py")

    def kernel(how, start, row):
        @ti.kernel
        def k():
            end = ti.Vector([x[0], x[1]])
            add_edge(image, end if ti.static(start) else x[0], end, how, faces=(points, row))

        return k

    row = ti.Vector([0, 1])
    for how, start, row, message in (
        (abs, True, row, "add_edge: jump_or_seen is .*; expected a ti.func that takes x and y, or the jump itself"),
        (seen, False, row, "add_edge: start must be a vector of 2, x and y in pixels, or of 3"),
        (seen, True, 3, "add_edge: faces is a tuple of 2, with the row 3; expected the corners in the image and a row"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            jacobian(kernel(how, start, row), x, outputs(5, 4))
    with pytest.raises(UnsupportedError, match="add_edge is called from Python"):
        add_edge(image, [0.0, 0.0], [1.0, 1.0], seen)


def test_arguments_that_do_not_fit_are_named(ti64):
    p, image = gradient_field([[0.3, 0.8], [3.1, 2.2], [1.4, 2.9]], 1), outputs(5, 4)
    vectors, flat, shifted = vector_outputs(3, 5, 4), outputs(5), ti.field(ti.f64, shape=(5, 4), offset=(-2, 0))
    row, longer = ti.Vector([0, 1, 2, -1]), ti.Vector.field(4, ti.f64, shape=3)

    def kernel(image, jump, points, row, beside):
        @ti.kernel
        def k():
            add_edge(image, p[0], p[1], jump, faces=(points, row), beside=beside)

        return k

    pair = ti.Vector([1.0, 2.0])
    for image_, jump, points, row_, beside, message in (
        (flat, 1.0, p, row, 1e-6, "image is image, of type f64, with 1 axes and offset 0; expected real numbers in a"),
        (shifted, 1.0, p, row, 1e-6, r"image is image, of type f64, with 2 axes and offset \(-2, 0\); expected"),
        (image, pair, p, row, 1e-6, r"the jump has shape \(2,\), the entries of image have \(\); give it the same"),
        (vectors, pair, p, row, 1e-6, r"the jump has shape \(2,\), the entries of image have \(3,\); give it"),
        (image, 1.0, None, row, 1e-6, "points in faces is None; expected real numbers in a field"),
        (image, 1.0, image, row, 1e-6, "points in faces is image, of type f64, with 2 axes"),
        (image, 1.0, longer, row, 1e-6, r"points in faces has entries of shape \(4,\); expected vectors of 2"),
        (image, 1.0, p, pair, 1e-6, r"faces is a tuple of 2, with the row a value of shape \(2,\); expected"),
        (image, 1.0, p, row, 0.0, "beside is 0.0; expected a positive number, in pixels"),
        (image, 1.0, p, row, -1e-6, "beside is -1e-06; expected a positive number, in pixels"),
    ):
        with pytest.raises(UnsupportedError, match=f"add_edge: {message}"):
            jacobian(kernel(image_, jump, points, row_, beside), p, image_)
    ones, by_numpy = (
        jacobian(kernel(vectors, jump, p, row, 1e-6), p, vectors) for jump in (ti.Vector([2.0] * 3), np.int32(2))
    )
    assert_array_equal(ones, by_numpy)
    assert ones.any()


def test_an_image_that_is_drawn_after_its_edges(ti64):
    """Terms that are replaced are said; not those that a later loop computes with."""
    p, image = gradient_field([[0.3, 0.8], [3.1, 2.2]], 1), outputs(5, 4)
    stores = func_of("stores(x, y): image[0, 0] = x; return y", image=image)

    @ti.kernel
    def late():
        for n in range(1):
            add_edge(image, p[n], p[n + 1], 1.0)
        for i, j in image:
            image[i, j] = p[0][0]

    @ti.kernel
    def squared():
        for i, j in image:
            image[i, j] = 0.5
        for n in range(1):
            add_edge(image, p[n], p[n + 1], 1.0)
        for i, j in image:
            value = image[i, j]
            image[i, j] = value**2

    storing = kernel_of("for n in range(1): add_edge(image, p[n], p[n + 1], stores)", image=image, p=p, stores=stores)
    with pytest.warns(
        te.DerivativeWarning, match=r"line \d+.*\n.*p\[0\]\[0\]\nThe kernel stores to image after add_edge"
    ):
        jacobian(late, p, image)
    across = 0.5 * np.array([2.2 - 0.8, 0.3 - 3.1])  # of the area to the left, by each end
    with no_warnings():
        assert_allclose(jacobian(squared, p, image).sum((0, 1)), [across, across], rtol=1e-9)
    with pytest.raises(UnsupportedError, match="add_edge: jump_or_seen must only read and compute"):
        jacobian(storing, p, image)


@pytest.mark.mostly_sweep("True")
@pytest.mark.parametrize("antialias", [False, True])
def test_a_jump_that_is_given(ti64, antialias):
    """A triangle, thinner than a pixel at its tip, of a colour that is a parameter: areas of clipped polygons."""
    corners = np.array([[1.3, 0.8], [11.9, 2.4], [4.6, 9.7]])
    p, colour, image = gradient_field(corners, 1), gradient_field([0.4, 0.9]), ti.Vector.field(2, ti.f64, shape=(W, H))
    side = func_of("return (p[b].x - p[a].x) * (y - p[a].y) - (p[b].y - p[a].y) * (x - p[a].x)", "a, b, x, y", p=p)

    @ti.kernel
    def k():
        for i, j in image:
            x, y = float(i), float(j)
            is_inside = ti.min(side(0, 1, x, y), side(1, 2, x, y), side(2, 0, x, y)) > 0
            image[i, j] = ti.select(is_inside, ti.Vector([colour[0], colour[1]]), ti.Vector([0.1, 0.1]))
        for n in range(3):
            add_edge(image, p[n], p[(n + 1) % 3], ti.Vector([colour[0], colour[1]]) - 0.1, antialias=antialias)

    value, (by_corner, by_colour) = value_and_jacobian(k, [p, colour], image)
    area = area_in_pixels(corners, W, H)
    if antialias:
        assert_allclose(value[..., 0], 0.1 + 0.3 * area, atol=1e-12)
        assert_allclose(by_colour[..., 1, 1], area, atol=1e-12)
    h = 1e-6
    for n, axis in np.ndindex(3, 2):
        moved = [corners + s * h * np.eye(3)[n][:, None] * np.eye(2)[axis] for s in (1, -1)]
        change = (area_in_pixels(moved[0], W, H) - area_in_pixels(moved[1], W, H)) / (2 * h)
        assert_allclose(by_corner[..., 0, n, axis], 0.3 * change, atol=1e-8)
        assert_allclose(by_corner[..., 1, n, axis], 0.8 * change, atol=1e-8)
    weights = np.random.default_rng(0).normal(size=(W, H, 2))
    assert_allclose(vjp(k, [p, colour], image, weights)[0], np.tensordot(weights, by_corner, 3), rtol=1e-9)


@pytest.mark.sweep
def test_antialiased_edges_of_a_mesh(ti64):
    """One triangle partly over another one: the mean of each pixel, but where an edge is hidden in part."""
    corners = np.array([[1.3, 0.8], [11.9, 2.4], [4.6, 9.7], [6.2, 4.4], [12.7, 5.1], [8.3, 9.9]])
    triangles, colours = np.array([[0, 1, 2], [3, 4, 5]]), np.array([0.3, 0.8, 0.1])  # the last is the background
    p, image = gradient_field(corners, 1), gradient_field(np.zeros((W, H)))
    table = mesh_edges(triangles, corners)
    edges = ti.Vector.field(4, ti.i32, shape=len(table))
    edges.from_numpy(table)
    side = func_of("return (p[b].x - p[a].x) * (y - p[a].y) - (p[b].y - p[a].y) * (x - p[a].x)", "a, b, x, y", p=p)

    @ti.func
    def seen(x, y):
        value = colours[2]
        for t in ti.static(range(2)):
            a, b, c = ti.static(3 * t, 3 * t + 1, 3 * t + 2)
            if ti.min(side(a, b, x, y), side(b, c, x, y), side(c, a, x, y)) > 0:
                value = colours[t]
        return value

    @ti.kernel
    def k():
        for i, j in image:
            image[i, j] = seen(float(i), float(j))
        for e in range(edges.shape[0]):
            add_edge(image, p[edges[e][0]], p[edges[e][1]], seen, faces=(p, edges[e]), antialias=True)

    J = check_transpose(k, p, image)
    value = read(image)
    back, front = corners[:3], corners[3:]
    both = back
    for n in range(3):
        along = front[(n + 1) % 3] - front[n]
        normal = np.array([-along[1], along[0]])
        both = clip(both, normal, float(normal @ front[n]))
    areas = [area_in_pixels(q, W, H) for q in (back, front, both)]
    expected = 0.1 + 0.2 * areas[0] + 0.7 * areas[1] - 0.2 * areas[2]
    crossed = np.zeros((W, H), bool)  # where an edge of one triangle goes below the other
    for q in both:
        if min(np.linalg.norm(corners - q, axis=1)) > 1e-9:
            crossed[tuple(np.floor(q + 0.5).astype(int))] = True
    assert 2 <= crossed.sum() <= 4
    assert_allclose(value[~crossed], expected[~crossed], rtol=0, atol=1e-9)
    assert_allclose(value, expected, rtol=0, atol=0.05)
    [[differences]] = central_differences(k, [p], [image])
    assert_allclose(J[~crossed], differences[~crossed], rtol=1e-4, atol=1e-5)


# --- samples along an edge


def terms_of_one_edge(row, ends, seen, W=40, H=30):
    """J of the sum of an image by the corners of one edge, of which ``seen`` gives the image."""
    p, image = vector_scalars(ends), outputs(W, H)

    @ti.kernel
    def k():
        add_edge(image, p[row[0]], p[row[1]], seen, faces=(p, ti.Vector(row)))

    return jacobian(k, p, image).sum((0, 1))


def vector_scalars(values):
    field = ti.Vector.field(2, ti.f64, shape=len(values))
    field.from_numpy(np.array(values))
    return field


DIAMOND = [[3.3, 15.2], [35.7, 15.2], [19.0, 25.0], [19.0, 5.0]]  # an edge along x, a corner above it, one below


@pytest.mark.mostly_sweep("strip1-ends", "strip3-ends")
@pytest.mark.parametrize("row", [[0, 1, 2, 3], [0, 1, 2, -1], [0, 1]], ids=["within", "rim", "ends"])
@pytest.mark.parametrize("strip", [(10.3, 11.0), (10.3, 18.4), (3.0, 7.1), (30.0, 36.0)])
def test_the_part_of_a_long_edge_that_is_hidden(ti64, row, strip):
    """Where the jump changes is found to 1/16 of a pixel, wherever the edge lies."""
    left, right = strip

    @ti.func
    def seen(x, y):
        value = ti.select(y > 15.2, 0.4, 0.1)
        if left < x and x < right:
            value = 0.16
        return value

    by_ends = terms_of_one_edge(row, DIAMOND, seen)[:2, 1]
    seen_length = 32.4 - (min(right, 35.7) - max(left, 3.3))
    assert by_ends.sum() == pytest.approx(-0.3 * seen_length, abs=0.3 * 2 / 16)


@pytest.mark.sweep
def test_a_jump_that_changes_along_an_edge(ti64):
    """Between samples it is taken to be linear: the moment of the jump 1 + x / 10 over the edge."""
    seen = func_of("return ti.select(y > 15.2, 1.0 + 0.1 * x, 0.0)", "x, y")
    for row in ([0, 1, 2, 3], [0, 1, 2, -1]):
        by_ends = terms_of_one_edge(row, DIAMOND, seen)[:2, 1]
        t, w = np.polynomial.legendre.leggauss(4)
        t = 0.5 + 0.5 * t
        jump = 1 + 0.1 * (3.3 + 32.4 * t)
        assert_allclose(by_ends, [-16.2 * (w * jump * (1 - t)).sum(), -16.2 * (w * jump * t).sum()], rtol=1e-3)


@pytest.mark.sweep
@pytest.mark.parametrize(("left", "right"), [(13.0, 14.9), (10.0, 13.2), (13.7, 17.0), (10.0, 17.0)])
def test_a_short_edge_within_a_surface_that_is_hidden_in_part(ti64, left, right):
    """Its two ends show what is hidden, to 1/16 of a pixel, but for what is documented to be missed: a part between."""
    ends = [[12.1, 15.2], [15.9, 15.2], [14.0, 17.0], [14.0, 13.0]]

    @ti.func
    def seen(x, y):
        value = ti.select(y > 15.2, 2.0, 0.5)
        if left < x and x < right:
            value = 0.8
        return value

    within, rim = (terms_of_one_edge(row, ends, seen)[:2, 1].sum() for row in ([0, 1, 2, 3], [0, 1, 2, -1]))
    length = 3.8 - (min(right, 15.9) - max(left, 12.1))
    assert rim == pytest.approx(-1.5 * length, abs=1.5 * 2 / 16)
    assert within == pytest.approx(-1.5 * (3.8 if 12.1 < left and right < 15.9 else length), abs=1.5 / 16)


BAD = [
    [[1.3, 0.8], [11.9, 2.4], [4.6, 9.7], [np.nan, 3.0]],
    [[1.3, 0.8], [11.9, 2.4], [4.6, 9.7], [np.inf, 3.0]],
    [[np.nan, np.nan]] * 4,
    [[1.3, 0.8], [11.9, 2.4], [6.6, 1.6], [17.2, 3.2]],  # on a line
    [[3.0, 3.0]] * 4,
]


@pytest.mark.sweep
@pytest.mark.filterwarnings("error::RuntimeWarning", "ignore:outputs")
def test_bad_corners_in_reverse(ti64):
    """NaN corners and faces without area: finite in both modes, and zero by corners that are bad."""
    table = mesh_edges([[0, 1, 2], [2, 1, 3]], CORNERS)
    p, image = gradient_field(BAD[0], 1), gradient_field(np.zeros((W, H)))
    edges = ti.Vector.field(4, ti.i32, shape=len(table))
    edges.from_numpy(table)

    @ti.func
    def seen(x, y):
        at = ti.Vector([x, y])
        u, v, w = p[0] - at, p[1] - at, p[2] - at
        return 0.3 + ti.select(ti.min(u.cross(v), v.cross(w), w.cross(u)) > 0, 1.0, 0.0)

    @ti.kernel
    def k():
        for e in edges:
            add_edge(image, p[edges[e][0]], p[edges[e][1]], seen, faces=(p, edges[e]))

    weights = np.random.default_rng(0).normal(size=(W, H))
    for n, values in enumerate(map(np.array, BAD)):
        p.from_numpy(values)
        J = jacobian(k, p, image)
        assert np.isfinite(J).all() and J.any() == (n < 2)
        if n < 2:  # half the opposite side, turned: the face that has no place covers nothing
            opposite = np.roll(values[:3], -1, axis=0) - np.roll(values[:3], -2, axis=0)
            assert_allclose(J.sum((0, 1))[:3], 0.5 * opposite[:, ::-1] * [1, -1], rtol=1e-6)
        assert not J[:, :, ~np.isfinite(values).all(-1)].any()
        assert_allclose(vjp(k, p, image, weights), np.tensordot(weights, J, 2), rtol=1e-9, atol=1e-12)


WIDTH, HEIGHT, CELL, COUNT = 20, 16, 2, 24


@pytest.mark.sweep
def test_lists_of_cells_give_what_one_list_gives(ti64):
    """Triangles, the later in front, found in the list of the cell of a place, or in one list of all."""
    rng = np.random.default_rng(1)
    corners = rng.uniform(-1, (WIDTH, HEIGHT), (COUNT, 1, 2)) + rng.uniform(-4, 4, (COUNT, 3, 2))
    table = mesh_edges(np.arange(3 * COUNT).reshape(COUNT, 3), corners.reshape(-1, 2))
    lists, starts = [], [0]
    for cell in np.ndindex(WIDTH // CELL, HEIGHT // CELL):
        low, high = np.array(cell) * CELL - 0.6, (np.array(cell) + 1) * CELL - 0.4
        is_near = (corners.min(1) < high).all(1) & (corners.max(1) > low).all(1)
        lists += np.flatnonzero(is_near).tolist()
        starts.append(len(lists))
    p, colours = vectors(corners.reshape(-1, 2)), scalars(rng.uniform(0.2, 1, COUNT))
    image, edges = vectors(np.zeros((WIDTH, HEIGHT, 3))), ti.Vector.field(4, ti.i32, len(table))
    edges.from_numpy(table.astype(np.int32))
    first, listed = integers(starts), integers(lists)

    @ti.func
    def is_in(f, x, y):
        at = ti.Vector([x, y])
        a, b, c = p[3 * f] - at, p[3 * f + 1] - at, p[3 * f + 2] - at
        parts = ti.Vector([b.cross(c), c.cross(a), a.cross(b)])
        return parts.min() > 0 or parts.max() < 0

    @ti.func
    def colour(found, x):
        value = 0.1 + 0.001 * x
        if found >= 0:
            value = colours[found]
        return ti.Vector([value, 0.5 * value, 1 - value])

    @ti.func
    def cell_of(x, y):
        i = ti.max(0, ti.min(WIDTH // CELL - 1, int(ti.floor((x + 0.5) / CELL))))
        return i * (HEIGHT // CELL) + ti.max(0, ti.min(HEIGHT // CELL - 1, int(ti.floor((y + 0.5) / CELL))))

    @ti.func
    def of_its_cell(x, y):
        cell, found, passed = cell_of(x, y), -1, 0
        for k in range(first[cell], first[cell + 1]):
            if is_in(listed[k], x, y):
                found = listed[k]
            elif found >= 0:
                passed += 1
        return colour(found, x + 0 * passed)

    @ti.func
    def counted(x, y):
        """The lists are left early, which needs a loop over the places, one by one."""
        k, found = first[cell_of(x, y) + 1] - 1, -1
        while found < 0 and k >= first[cell_of(x, y)]:
            if is_in(listed[k], x, y):
                found = listed[k]
            k -= 1
        return colour(found, x)

    @ti.func
    def whole(x, y):
        found = -1
        for f in range(COUNT):
            if is_in(f, x, y):
                found = f
        return colour(found, x)

    def drawn(seen):
        @ti.kernel
        def draw():
            for i, j in image:
                image[i, j] = seen(float(i), float(j))
            for e in edges:
                add_edge(image, p[edges[e][0]], p[edges[e][1]], seen, faces=(p, edges[e]))

        return draw

    expected, weights = jacobian(drawn(whole), [p, colours], image), rng.normal(size=(WIDTH, HEIGHT, 3))
    assert abs(expected[0]).max() > 0.1
    for kernel in map(drawn, (of_its_cell, counted)):
        back = vjp(kernel, [p, colours], image, weights)
        for J, by_rows, found in zip(expected, back, jacobian(kernel, [p, colours], image), strict=True):
            assert_allclose(found, J, rtol=0, atol=1e-9)
            assert_allclose(by_rows, np.tensordot(weights, J, 3), rtol=0, atol=1e-8)
