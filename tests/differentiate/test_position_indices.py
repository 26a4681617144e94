"""Positions by the indices of a loop, and levels that take such an index beside the position."""

import math

import numpy as np
import pytest
import taichi as ti
from differences import central_differences, outputs, scalars
from kernel_texts import func_of, kernels_of, names_of
from numpy.testing import assert_allclose, assert_array_equal
from planar import undivided_pixels

from taichi_ext import Jacobian, UnsupportedError, coverage, edge, jacobian, layers, stop_gradient

pytestmark = pytest.mark.usefixtures("ti64")
N, X, Y, R = 40, 19.7, 20.1, 12.0
ACCURACY = 0.004  # of sums over the pixels of the rim


@pytest.fixture(scope="module")
def scene(ti64):
    disc, image = ti.field(ti.f64, shape=3), ti.field(ti.f64, shape=(N, N))
    disc.from_numpy(np.array([X, Y, R]))
    return disc, image


@ti.func
def disc_level(disc: ti.template(), x, y):
    return disc[2] - ti.sqrt((x - disc[0]) ** 2 + (y - disc[1]) ** 2)


def kernel(table, name, disc, image):
    shape = func_of("return disc_level(disc, i, y), 3.0", "n, x, y, i", disc_level=disc_level, disc=disc)
    places = ti.field(ti.f64, shape=N)
    scope = {"places": places, "N": N, "disc_level": disc_level, "edge": edge, "coverage": coverage, "layers": layers}
    return kernels_of(table, **scope, disc=disc, image=image, shape=shape)[name]


POSITIONS = """
    with_indices: for i, j in image: image[i, j] = edge(disc_level(disc, float(i), float(j)), 5.0, 2.0, at=(i, j))
    with_indices_in_arithmetic:
        for i, j in image:
            level = disc[2] - ti.sqrt((i - disc[0]) ** 2 + (j - disc[1]) ** 2)
            image[i, j] = edge(level, 5.0, 2.0, at=(i, j))
    with_a_grouped_index:
        for I in ti.grouped(image):
            level = disc[2] - (I - ti.Vector([disc[0], disc[1]])).norm()
            image[I] = edge(level, 5.0, 2.0, at=I)
    with_serial_loops:
        for i in range(N):
            for j in range(N):
                image[i, j] = edge(disc_level(disc, i, j), 5.0, 2.0, at=(i, j))
    with_a_copy_of_an_index:
        for i, j in image:
            p, q = i, j
            value = 5.0 + ((i & 1) + (i | 1) - i - 1)  # bits of an index, which are 0
            image[i, j] = edge(disc_level(disc, float(i), float(j)), value, 2.0, at=(p, q))
"""


@pytest.mark.mostly_sweep("with_a_copy_of_an_index")
@pytest.mark.parametrize("name", names_of(POSITIONS))
def test_indices_of_a_loop_are_a_position(scene, name):
    J = jacobian(kernel(POSITIONS, name, *scene), *scene)
    assert_allclose(J[..., 2].sum(), 3.0 * 2 * math.pi * R, rtol=ACCURACY)  # jump * circumference
    for axis in range(2):  # a disc that moves does not grow, and its halves take opposite parts
        assert abs(J[..., axis].sum()) < 0.01 * abs(J[..., axis]).sum()
        assert_allclose(abs(J[..., axis]).sum(), 3.0 * 4 * R, rtol=ACCURACY)  # twice the width, on both sides


REFUSED = """
    index_for_x:
        for i, j in image:
            px, py = float(i), float(j)
            image[i, j] = edge(disc_level(disc, float(i), py), 5.0, 2.0, at=(px, py))
    index_beside_x:
        for i, j in image:
            px, py = float(i), float(j)
            level = disc[2] - ti.sqrt((i - disc[0]) * (px - disc[0]) + (py - disc[1]) ** 2)
            image[i, j] = edge(level, 5.0, 2.0, at=(px, py))
    index_by_way_of_locals:
        for i, j in image:
            px = i + 0.5
            py = j + 0.5
            twice = 2 * i + 1
            p = ti.Vector([0.5 * twice, py])
            moved = p - ti.Vector([disc[0], disc[1]])
            image[i, j] = edge(disc[2] - moved.norm(), 5.0, 2.0, at=(px, py))
    index_plus_one: for i, j in image: image[i, j] = edge(disc_level(disc, i + 1, j), 5.0, 2.0, at=(i, j))
    index_in_a_choice:
        for i, j in image:
            px, py = float(i), float(j)
            x = px
            if py > disc[1]:
                x = i + 0.0
            image[i, j] = coverage(disc_level(disc, x, py), at=(px, py))
    index_in_a_shape: for i, j in image: image[i, j] = layers(shape, 1, 0.0, float(i), at=(i, j))
    index_to_a_power:
        for i, j in image:
            px, py = float(i), float(j)
            image[i, j] = coverage(disc_level(disc, px, py) + 0.01 * i**2, at=(px, py))
    index_by_a_quotient:
        for k in range(N * N):
            i = k // N
            px = float(i)
            py = float(k - N * i)
            image[i, k - N * i] = edge(disc_level(disc, i, py), 5.0, 2.0, at=(px, py))
    index_that_moves_by_half:
        for i, j in image:
            px = 0.5 * i
            py = float(j)
            image[i, j] = edge(disc_level(disc, px + i, py), 5.0, 2.0, at=(px, py))
    index_of_a_field_with_positions:
        for i, j in image:
            px = places[i]
            py = float(j)
            image[i, j] = edge(disc_level(disc, px + i, py), 5.0, 2.0, at=(px, py))
    index_that_is_stored_and_read_back:
        for i, j in image:
            places[i] = 0.5 * i
            px = places[i]
            py = float(j)
            image[i, j] = edge(disc_level(disc, px + i, py), 5.0, 2.0, at=(px, py))
"""
READ_AGAIN = """
    places_reads_field:
        for i, j in image:
            px = places[i]
            py = float(j)
            image[i, j] = edge(disc_level(disc, px + places[i], py), 5.0, 2.0, at=(px, py))
    places_reads_local:
        for i, j in image:
            first = places[i]
            px = places[i]
            py = float(j)
            image[i, j] = coverage(disc_level(disc, px + 0.5 * first, py), at=(px, py))
    px_assigned_before_the_level_ends:
        for i, j in image:
            px, py = float(i), float(j)
            level = disc_level(disc, px, py)
            px = N - px
            image[i, j] = coverage(level + 0.1 * px, at=(px, py))
    px_assigned_before_the_edge:
        for i, j in image:
            px, py = float(i), float(j)
            level = disc_level(disc, px, py)
            px = 2 * px
            image[i, j] = coverage(level, at=(px, py))
    px_assigned_in_a_loop:
        for i, j in image:
            px, py = float(i), float(j)
            x = 0.0
            for k in range(3):
                px = N - px
                x += px
            image[i, j] = coverage(disc_level(disc, x, py), at=(px, py))
"""


@pytest.mark.mostly_sweep(every=2)
@pytest.mark.parametrize("name", names_of(REFUSED))
def test_a_level_that_takes_the_index_itself_raises(scene, name):
    with pytest.raises(UnsupportedError, match=r"(?s)kernels.*level depends on the index i itself"):
        jacobian(kernel(REFUSED, name, *scene), *scene)


@pytest.mark.mostly_sweep("px_assigned_before_the_level_ends", "places_reads_local")
@pytest.mark.parametrize("name", names_of(READ_AGAIN))
def test_a_level_that_reads_another_value_of_the_position_raises(scene, name):
    with pytest.raises(UnsupportedError, match=rf"(?s)kernels.*level reads {name.split('_')[0]}.*lack a part"):
        jacobian(kernel(READ_AGAIN, name, *scene), *scene)


@pytest.mark.sweep
def test_positions_that_change_before_the_level_are_taken(scene):
    """So are positions from a field, beside other entries of it, and copies made before a change."""
    disc, image = scene
    places = ti.Vector.field(3, ti.f64, shape=(N, N))
    centre = [(i, j, 0.5) for i in range(N) for j in range(N)]
    places.from_numpy(np.array(centre).reshape(N, N, 3))

    @ti.kernel
    def k():
        for i, j in image:
            px = float(i)
            px = N - px
            py = float(j)
            value = coverage(disc_level(disc, N - px, py), at=(px, py))
            x = places[i, j].x
            y = places[i, j].y
            copied = x
            x = 4 * x
            value += coverage(disc_level(disc, copied, y) + places[i, j].z - 0.5, at=(copied, y)) + 0.0 * x
            image[i, j] = value

    assert_allclose(jacobian(k, disc, image)[..., 2].sum(), 2 * 2 * math.pi * R, rtol=ACCURACY)


COMPUTED = """
    skewed:
        for i, j in image:
            px = float(i)
            py = float(j) + 0.5 * px - 10.0
            image[i, j] = coverage(disc_level(disc, px, py), at=(px, py))
    swapped:
        for i, j in image:
            px = float(i)
            py = float(j)
            if i > j:
                kept = px
                px = py
                py = kept
            image[i, j] = coverage(disc_level(disc, px, py), at=(px, py))
    turned:
        for i, j in image:
            q = ti.Vector([i - 20.0, j - 20.0])
            q = ti.Vector([0.8 * q.x + 0.6 * q.y, 0.8 * q.y - 0.6 * q.x]) + 20.03
            image[i, j] = coverage(disc_level(disc, q.x, q.y), at=q)
    added:
        for i, j in image:
            px = float(i)
            py = float(j)
            px += 0.5 * py - 10.0
            ti.atomic_add(py, 0.25 * px)
            image[i, j] = coverage(disc_level(disc, px, py), at=(px, py))
"""
PLACES = {
    "skewed": lambda i, j: (i, j + 0.5 * i - 10.0),
    "swapped": lambda i, j: (np.minimum(i, j), np.maximum(i, j)),
    "turned": lambda i, j: (0.8 * i + 0.6 * j - 7.97, 0.8 * j - 0.6 * i + 16.03),
    "added": lambda i, j: (i + 0.5 * j - 10.0, 1.125 * j + 0.25 * i - 2.5),
}


@pytest.mark.mostly_sweep("swapped")
@pytest.mark.parametrize("name", PLACES)
def test_coordinates_that_are_computed_from_each_other_are_independent(scene, name):
    """As those that are read from a field."""
    disc, image = scene
    places = ti.Vector.field(2, ti.f64, shape=(N, N))
    places.from_numpy(np.stack(PLACES[name](*np.mgrid[:N, :N].astype(float)), axis=-1))

    @ti.kernel
    def expected():
        for i, j in image:
            px = places[i, j].x
            py = places[i, j].y
            image[i, j] = coverage(disc_level(disc, px, py), at=(px, py))

    J = jacobian(expected, disc, image)
    assert_allclose(jacobian(kernel(COMPUTED, name, *scene), *scene), J, rtol=1e-9, atol=1e-9)


def test_an_assignment_to_an_entry_of_the_position_by_a_computed_index_raises(scene):
    disc, image = scene

    @ti.kernel
    def k():
        for i, j in image:
            q = ti.Vector([0.0, 0.0])
            for d in range(2):
                q[d] = float(i if d == 0 else j)
            image[i, j] = coverage(disc_level(disc, q.x, q.y), at=q)

    with pytest.raises(
        UnsupportedError, match=r"(?s)q\[d\] = .*assigns to an entry of q, the position in at=, by a comp"
    ):
        jacobian(k, disc, image)


def test_a_level_may_read_sums_over_the_positions_of_all_pixels(scene):
    """They do not change from pixel to pixel; a copy of the position does, in the same loop or by the same index."""
    disc, image = scene
    places = ti.Vector.field(2, ti.f64, shape=(N, N))
    places.from_numpy(np.moveaxis(np.mgrid[:N, :N].astype(float), 0, -1))
    middle, copies = ti.field(ti.f64, shape=()), ti.field(ti.f64, shape=(N, N))

    @ti.kernel
    def k(taken: ti.template()):
        middle[None] = 0.0
        for i, j in places:
            middle[None] += places[i, j].x / N**2
            copies[i, j] = places[i, j].x
        for i, j in image:
            px = places[i, j].x
            py = places[i, j].y
            first = 0.0
            m = 0
            for _ in range(N):
                first += places[m, 0].x / N
                m = m + 1
            if ti.static(taken == "copy"):
                first += copies[i, j]
            if ti.static(taken == "other"):
                first += places[ti.min(i + 1, N - 1), j].x
            image[i, j] = coverage(disc_level(disc, px, py) + middle[None] - first, at=(px, py))

    J = jacobian(k, disc, image, args=("sums",))
    assert_allclose(J[..., 2].sum(), 2 * math.pi * R, rtol=ACCURACY)
    for taken in ("copy", "other"):
        with pytest.raises(UnsupportedError, match=r"level reads places, and the position in at= is read from there"):
            jacobian(k, disc, image, args=(taken,))


def test_a_level_that_reads_an_entry_of_the_position_by_a_computed_index_raises(scene):
    disc, image = scene
    centres = ti.Vector.field(2, ti.f64, shape=(N, N))

    @ti.kernel
    def k():
        for i, j in image:
            at = centres[i, j]
            level = disc[2] - at[0]
            for d in range(2):
                level -= at[d] * disc[d]
            image[i, j] = coverage(level, at=at)

    with pytest.raises(UnsupportedError, match=r"level reads an entry of at, the position in at=, by a computed index"):
        jacobian(k, disc, image)


def test_what_is_constant_within_a_pixel_is_taken(scene):
    """Tables by pixel, comparisons, whole quotients, samples within the pixel, and what is said to be constant."""
    disc, image = scene
    table = ti.field(ti.f64, shape=N)
    table.from_numpy(np.linspace(0.0, 1.0, N))

    @ti.kernel
    def k():
        for i, j in image:
            total = 0.0
            for s in range(2):
                px = i + (s - 0.5) / 2
                py = float(j)
                level = disc_level(disc, px, py) + 1e-9 * (table[i] + i // 7 + s + (i > 3) + int(0.3 * i))
                level += 1e-9 * stop_gradient(float(i))
                total += 0.5 * edge(level, 5.0, 2.0, at=(px, py))
            image[i, j] = total

    J = jacobian(k, disc, image)
    assert_allclose(J[..., 2].sum(), 3.0 * 2 * math.pi * R, rtol=ACCURACY)


@pytest.mark.sweep
@pytest.mark.double_only("differences in float64")
def test_no_position_is_taken_for_a_column():
    """What follows J in memory is left as it is, and what the level does not depend on stays 0."""
    n, rng = 12, np.random.default_rng(12)
    angle = rng.uniform(0.2, 1.2, n) + np.pi / 2 * rng.integers(0, 4, n)
    at = np.stack([rng.uniform(1, 3, n), rng.uniform(1, 2, n)])
    normals, image = scalars(np.stack([np.cos(angle), np.sin(angle)])), outputs(5, 4)
    d = scalars((at * normals.to_numpy()).sum(axis=0))

    @ti.kernel
    def run():
        for i, j in image:
            x, y = float(i), float(j)
            level = 1e3
            for k in range(n):
                level = ti.min(level, normals[0, k] * x + normals[1, k] * y - d[k])
            level = ti.max(level + 1.0, 1.3 - x)
            image[i, j] = coverage(level, at=(x, y)) + 0.1 * level

    memory = np.full(20 * 12 + 64, 7.0)
    J = memory[32:-32].reshape(5, 4, 12)
    with undivided_pixels():
        Jacobian(run, d, image)(out=J)
        ((wanted,),) = central_differences(run, [d], [image])
    assert_array_equal(memory[:32], 7.0)
    assert_array_equal(memory[-32:], 7.0)
    assert_allclose(J, wanted, rtol=1e-6, atol=1e-7)
