"""Levels that are the largest of many shapes in a loop: the position of the pixel has no column, and needs none.

The shapes are half-planes with fixed normals. Pixels are not divided, so that the covered area of a pixel is that of one
straight edge, and its central differences are exact. Discs, in pixels that are divided, are compared with the same loop
written out.
"""

import linecache

import numpy as np
import pytest
import taichi as ti
from differences import central_differences, integers, outputs, scalars, write
from numpy.testing import assert_allclose, assert_array_equal
from planar import undivided_pixels

import taichi_ext
from taichi_ext import Jacobian, boundary_gradient, coverage, edge, jacobian, registry

pytestmark = [pytest.mark.usefixtures("ti64"), pytest.mark.double_only("differences in float64")]
W, H = 5, 4
OPTIONS = [{}, {"tangents": "dense"}, {"tangents": "sparse"}, {"chunk_size": 3}, {"chunk_size": 1}, {"format": "csr"}]


class Planes:
    """Half-planes ``a[k] x + b[k] y > d[k]``, of which the offsets d are the parameters, and a colour for each."""

    def __init__(self, n):
        rng = np.random.default_rng(n)
        angle = rng.uniform(0.2, 1.2, n) + np.pi / 2 * rng.integers(0, 4, n)
        self.n, self.image, self.colour, self.count = n, outputs(W, H), scalars(rng.uniform(0.5, 1, 3)), integers(n)
        self.normals = scalars(np.stack([np.cos(angle), np.sin(angle)]))
        at = np.stack([rng.uniform(1, W - 2, n), rng.uniform(1, H - 2, n)])
        self.d = scalars((at * self.normals.to_numpy()).sum(axis=0))
        self.order = integers(rng.permutation(n))

    @undivided_pixels()
    def require(self, run, options=OPTIONS):
        """J is that of central differences, however tangents are kept."""
        params = [self.d, self.colour]
        ((by_d, by_colour),) = central_differences(run, params, [self.image])
        for option in options:
            write(self.image, 0.0)
            found = Jacobian(run, params, self.image, **option)()
            for J, wanted in zip(found, (by_d, by_colour), strict=True):
                J = J.toarray().reshape(wanted.shape) if "format" in option else J
                assert_allclose(J, wanted, rtol=1e-6, atol=1e-7, err_msg=str(option))
        assert by_d.any()


def make_levels(planes):
    """Levels at a position, by name."""
    d, normals, colour, count, order, n = (
        planes.d,
        planes.normals,
        planes.colour,
        planes.count,
        planes.order,
        planes.n,
    )

    @ti.func
    def plane(k, x, y):
        return normals[0, k] * x + normals[1, k] * y - d[k]

    @ti.func
    def union(x, y):
        level = -1e3
        for k in range(n):
            level = ti.max(level, plane(k, x, y))
        return level - 1.5

    @ti.func
    def polygon(x, y):
        level = 1e3
        for k in range(n):
            level = ti.min(level, plane(k, x, y))
        return ti.max(level + 1.0, 1.3 - x)

    @ti.func
    def from_a_start(x, y):
        level = 0.3 * x - y * 0.2 - colour[0]
        for k in range(n):
            level = ti.max(level * 0.9 - 0.1 * y, plane(k, x, y) - 1.0)
        return level

    @ti.func
    def sums(x, y):
        level = 0.0
        for k in range(n):
            level += 0.3 * plane(k, x, y) - 0.01 * x
        return level + 0.1 * y - 0.05

    @ti.func
    def two_numbers(x, y):
        least, most = 1e3, -1e3
        for k in range(n):
            least = ti.min(least, plane(k, x, y)) + 0.01 * x
            most = ti.max(most, least + plane(k, y, x)) * 0.9
        return least * 0.3 + most - 0.4

    @ti.func
    def two_loops(x, y):
        level = -1e3
        for k in range(n):
            level = ti.max(level, plane(k, x, y))
        other = level * 0.5
        for k in range(n):
            other = ti.min(other + 0.1, plane(k, x, y) + 2.0 + 0.1 * x)
        return other + level * 0.3 - 0.5

    @ti.func
    def nested(x, y):
        level = -1e3
        for k in range(n):
            part = 1e3
            for m in range(3):
                part = ti.min(part, plane((k + m) % n, x, y))
            level = ti.max(level, part)
        return level + 0.3

    @ti.func
    def repeated(x, y):
        level = -1e3
        for m in range(2):
            for k in range(n):
                level = ti.max(level * 0.99, plane(k, x, y) + 0.05 * m * x)
        return level - 1.5

    @ti.func
    def branches(x, y):
        level = -1e3
        for k in range(n):
            one = plane(k, x, y)
            if one > level:
                level = one + 0.01 * x
            elif k % 2 == 0:
                level += 0.01 * y
        return level - 1.5

    @ti.func
    def counted(x, y):
        level = -1e3
        for k in range(count[None]):
            level = ti.max(level, plane(k, x, y))
        return level - 1.5

    @ti.func
    def until(x, y):
        level, k = -1e3, 0
        while k < count[None]:
            level = ti.max(level, plane(k, x, y))
            k += 1
        return level - 1.5

    @ti.func
    def interrupted(x, y):
        level = -1e3
        for k in range(n):
            one = plane(k, x, y)
            if one < -2.0:
                continue
            level = ti.max(level, one)
            if level > 3.0:
                break
        return level - 1.5

    @ti.func
    def looked_up(x, y):
        level = -1e3
        for k in range(n):
            level = ti.max(level, plane(order[k], x, y))
        return level - 1.5

    @ti.func
    def local_array(x, y):
        part = ti.Vector([-1e3, -1e3, -1e3])
        for k in range(n):
            part[k % 3] = ti.max(part[k % 3], plane(k, x, y) - 1.0)
            part[0] += 0.01 * x
        return ti.max(part[0], part[1]) + part[2] * 0.2 - 0.5

    @ti.func
    def vectors(x, y):
        both = ti.Vector([-1e3, 0.0])
        for k in range(n):
            one = plane(k, x, y)
            both = ti.Vector([ti.max(both[0], one), both[1] + one * 0.01])
        return both[0] + both[1] - 1.5

    @ti.func
    def only_at_the_start(x, y):
        level = 0.3 * x - y * 0.2
        for k in range(n):
            level = level * 0.9 - 0.02 * d[k]
        return level + 0.1

    @ti.func
    def turned(x, y):
        at = ti.Vector([x, y])
        for k in range(n):
            at = ti.Matrix([[0.9, 0.1], [-0.1, 0.8]]) @ at - 0.05 * d[k]
        return at[0] - 0.3 * at[1] + 0.4

    return {name: f for name, f in locals().items() if name not in ("plane", "planes") and callable(f)}


LEVELS = """
    union polygon from_a_start sums two_numbers two_loops nested repeated branches counted until interrupted looked_up
    local_array vectors only_at_the_start turned
""".split()


@pytest.mark.sweep
@pytest.mark.parametrize("name", LEVELS)
def test_covered_area(name):
    planes = Planes(7)
    levels, image, colour = make_levels(planes), planes.image, planes.colour
    assert set(levels) == set(LEVELS)
    f = levels[name]

    @ti.kernel
    def run():
        for i, j in image:
            x = float(i)
            y = float(j)
            image[i, j] = colour[0] * coverage(f(x, y), at=(x, y)) + colour[1] * x

    others = OPTIONS[1:]
    planes.require(run, [{}, *(others[(LEVELS.index(name) + n) % len(others)] for n in (0, 2))])


@pytest.mark.sweep
@pytest.mark.parametrize("n", [1, 2, 5, 6, 24, 40])
def test_any_number_of_shapes(n):
    """From 9 columns on loops are accumulated backwards; there are n + 3."""
    planes = Planes(n)
    f, image, colour = make_levels(planes)["polygon"], planes.image, planes.colour

    @ti.kernel
    def run():
        for i, j in image:
            x = float(i)
            y = float(j)
            image[i, j] = edge(f(x, y), colour[0] + colour[1] * x, colour[2] * y, at=(x, y), antialias=True)

    planes.require(run, [{}, {"tangents": "dense"}])


def make_uses(planes):
    """Kernels that use one level in several ways, by name."""
    union, image, colour, d, normals, n = (
        make_levels(planes)["union"],
        planes.image,
        planes.colour,
        planes.d,
        planes.normals,
        planes.n,
    )

    @ti.kernel
    def twice():
        for i, j in image:
            x = float(i)
            y = float(j)
            level = union(x, y)
            other = coverage(level * 0.5 + x * 0.1 - 0.2 * colour[2], at=(x, y))
            image[i, j] = coverage(level, at=(x, y)) * other * colour[0]

    @ti.kernel
    def within():
        for i, j in image:
            x = float(i)
            y = float(j)
            level = union(x, y)
            inner = edge(x + 0.3 * y - colour[0], colour[1], colour[2], at=(x, y), antialias=True)
            image[i, j] += edge(level, inner, 0.3 * level, at=(x, y), antialias=True)

    @ti.kernel
    def in_a_loop_of_edges():
        for i, j in image:
            x = float(i)
            y = float(j)
            level, shade = -1e3, colour[0]
            for k in range(n):
                level = ti.max(level, normals[0, k] * x + normals[1, k] * y - d[k])
                shade = edge(level - 1.5, colour[1] + 0.1 * k, shade * 0.5, at=(x, y), antialias=True)
            image[i, j] = shade

    @ti.kernel
    def at_several_positions():
        for i, j in image:
            total = 0.0
            for s in range(3):
                x = i + 0.25 * s
                y = j + 0.1 * s
                total += coverage(union(x, y), at=(x, y)) * colour[1]
            image[i, j] = total

    return {name: f for name, f in locals().items() if hasattr(f, "_primal")}


USED = ["twice", "within", "in_a_loop_of_edges", "at_several_positions"]


@pytest.mark.sweep
@pytest.mark.parametrize("name", USED)
def test_several_edges_of_a_level(name):
    planes, others = Planes(8), OPTIONS[1:]
    planes.require(make_uses(planes)[name], [{}, *(others[(USED.index(name) + n) % len(others)] for n in (0, 2))])


@pytest.mark.sweep
def test_no_position_is_taken_for_a_column():
    """What follows J in memory is left as it is, and what the level does not depend on stays 0."""
    planes = Planes(12)
    f, image = make_levels(planes)["polygon"], planes.image

    @ti.kernel
    def run():
        for i, j in image:
            x = float(i)
            y = float(j)
            level = f(x, y)
            image[i, j] = coverage(level, at=(x, y)) + 0.1 * level

    memory = np.full(W * H * 12 + 64, 7.0)
    J = memory[32:-32].reshape(W, H, 12)
    with undivided_pixels():
        Jacobian(run, planes.d, image)(out=J)
        ((wanted,),) = central_differences(run, [planes.d], [image])
    assert_array_equal(memory[:32], 7.0)
    assert_array_equal(memory[-32:], 7.0)
    assert_allclose(J, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.sweep
def test_tangents_of_rules_in_a_loop():
    """A rule that adds up its tangents in a loop, and reads the parameters there; it is the derivative."""
    planes = Planes(9)
    d, image, n = planes.d, planes.image, planes.n

    @ti.func
    def weighted(u, v):
        total = 0.0
        for k in range(n):
            total = total * 0.5 + u * d[k] + v * 0.1 * k
        return total

    @boundary_gradient(weighted, name="weighted in a loop")
    def rule(u, v, d_u, d_v):
        total = 0.0
        for k in range(n):
            total = total * 0.5 + d_u * d[k] + d_v * 0.1 * k
        return total

    @ti.kernel
    def run():
        for i, j in image:
            image[i, j] = weighted(d[0] * i, d[1] * d[2] + j)

    try:
        ((wanted,),) = central_differences(run, [d], [image])
        for option in OPTIONS:
            found = jacobian(run, d, image, **option)
            found = found.toarray().reshape(wanted.shape) if "format" in option else found
            assert_allclose(found, wanted, rtol=1e-6, atol=1e-7, err_msg=str(option))
    finally:
        registry.remove("weighted in a loop")


# --- discs, against the same loop written out -------------------------------------------------------------------------


DISCS = """
@ti.func
def level_at(x, y):
    level = -1e3
    for k in LOOP:
        level = ti.max(level, p[k, 2] - ti.sqrt((x - p[k, 0]) ** 2 + (y - p[k, 1]) ** 2 + 0.01))
    return level

@ti.func
def shape(n, x, y):
    return ti.select(n == 0, level_at(x, y), 0.2 * p[0, 0] - 0.5 * x - 0.1 * y), 0.1 * n + 0.2

@ti.func
def deep_shape(n, x, y):
    return shape(n, x, y)[0], 1.0 + 0.3 * n + 0.1 * x, 0.1 * n + 0.2

@ti.func
def distance(q):
    return ti.max(-level_at(q[0], q[1]), ti.abs(q[2] - 4.0) - 1.0)

@ti.func
def roots_over_each_other(x, y):
    seen = 0.0
    for k in LOOP:
        level = p[k, 2] - ti.sqrt((x - p[k, 0]) ** 2 + (y - p[k, 1]) ** 2 + 0.01)
        seen = edge(level, sqrt_edge(level, at=(x, y)) + 0.1 * k, seen * 0.9, at=(x, y))
    return seen

@ti.func
def at_moved_positions(x, y):
    carried, seen = 0.1 * p[0, 0], 0.0
    for k in LOOP:
        u = x + 0.2 * k
        v = y - 0.1 * k
        carried = carried * 0.5 + 0.1 * p[k, 2]
        level = carried + level_at(u, v)
        seen += coverage(level, at=(u, v)) * p[k, 2]
    return seen

@ti.kernel
def run():
    for i, j in image:
        x = float(i)
        y = float(j)
        image[i, j] = USE
"""
USES = {
    "step": "step(level_at(x, y), at=(x, y))",
    "edge": "edge(level_at(x, y), x * 0.1 + p[0, 0], p[1, 1] * y, at=(x, y))",
    "root": "sqrt_edge(level_at(x, y), at=(x, y))",
    "root in an edge": "edge(level_at(x, y), sqrt_edge(level_at(x, y), at=(x, y)), 0.1, at=(x, y))",
    "layers": "layers(shape, 2, 0.0, at=(i, j))",
    "nearest": "nearest(deep_shape, 2, 0.0, at=(i, j))",
    "ray": "coverage(ray_level(distance, ti.Vector([x, y, 0.0]), ti.Vector([0.0, 0.0, 1.0]), 0.0, 9.0), at=(x, y))",
    "flattened": "coverage(ti.log(1.0 + ti.exp(level_at(x, y))) - 0.7, at=(x, y))",
    "replaced": "coverage(replace_gradient(ti.round(level_at(x, y)), level_at(x, y) * 1.5) + 0.3, at=(x, y))",
    "roots over each other": "roots_over_each_other(x, y)",
    "moved positions": "at_moved_positions(x, y)",
    "segment": "segment_edge(ti.Vector([p[0, 0], p[0, 1]]), ti.Vector([p[1, 0], p[1, 1]]), level_at(x, y), at=(i, j))",
}
TEXTS = iter(range(1000))


def compiled(text, **names):
    """The kernel of a text."""
    file = f"<discs {next(TEXTS)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    scope = {**vars(taichi_ext), "ti": ti, "__name__": "discs", **names}
    exec(compile(text, file, "exec", dont_inherit=True), scope)
    return scope["run"]


@pytest.mark.mostly_sweep("replaced")
@pytest.mark.parametrize("use", USES)
def test_a_loop_is_right_where_it_is_when_written_out(use):
    rng, n = np.random.default_rng(5), 4
    p, image = scalars(np.c_[rng.uniform(0, W, n), rng.uniform(0, H, n), rng.uniform(0.6, 1.5, n)]), outputs(W, H)
    text = DISCS.replace("USE", USES[use])
    wanted = jacobian(compiled(text.replace("LOOP", f"ti.static(range({n}))"), p=p, image=image), p, image)
    assert wanted.any()
    for option in ({}, {"tangents": "dense"}, {"format": "csr"}):
        found = jacobian(compiled(text.replace("LOOP", f"range({n})"), p=p, image=image), p, image, **option)
        found = found.toarray().reshape(wanted.shape) if "format" in option else found
        assert_allclose(found, wanted, rtol=1e-9, atol=1e-11, err_msg=str(option))
