"""Levels that are the largest of many shapes in a loop: the position of the pixel has no column, and needs none.

Half-planes are those of random levels (``program_levels``), in pixels that are not divided. Discs, in pixels that are
divided, are compared with the same loop written out.
"""

import linecache

import numpy as np
import pytest
import taichi as ti
from differences import central_differences, outputs, scalars
from numpy.testing import assert_allclose, assert_array_equal
from planar import undivided_pixels

import taichi_ext
from taichi_ext import Jacobian, boundary_gradient, coverage, jacobian

pytestmark = [pytest.mark.usefixtures("ti64"), pytest.mark.double_only("differences in float64")]
W, H = 5, 4
OPTIONS = [{}, {"tangents": "dense"}, {"tangents": "sparse"}, {"chunk_size": 3}, {"chunk_size": 1}, {"format": "csr"}]


@pytest.mark.sweep
def test_no_position_is_taken_for_a_column():
    """What follows J in memory is left as it is, and what the level does not depend on stays 0."""
    n, rng = 12, np.random.default_rng(12)
    angle = rng.uniform(0.2, 1.2, n) + np.pi / 2 * rng.integers(0, 4, n)
    at = np.stack([rng.uniform(1, W - 2, n), rng.uniform(1, H - 2, n)])
    normals, image = scalars(np.stack([np.cos(angle), np.sin(angle)])), outputs(W, H)
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

    memory = np.full(W * H * 12 + 64, 7.0)
    J = memory[32:-32].reshape(W, H, 12)
    with undivided_pixels():
        Jacobian(run, d, image)(out=J)
        ((wanted,),) = central_differences(run, [d], [image])
    assert_array_equal(memory[:32], 7.0)
    assert_array_equal(memory[-32:], 7.0)
    assert_allclose(J, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.sweep
def test_tangents_of_rules_in_a_loop():
    """A rule that adds up its tangents in a loop, and reads the parameters there; it is the derivative."""
    n = 9
    d, image = scalars(np.random.default_rng(n).uniform(0.3, 1.2, n)), outputs(W, H)

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

    ((wanted,),) = central_differences(run, [d], [image])
    for option in OPTIONS:
        found = jacobian(run, d, image, **option)
        found = found.toarray().reshape(wanted.shape) if "format" in option else found
        assert_allclose(found, wanted, rtol=1e-6, atol=1e-7, err_msg=str(option))


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
        x, y = float(i), float(j)
        image[i, j] = USE
"""
USES = {
    "edge": "edge(level_at(x, y), x * 0.1 + p[0, 0], p[1, 1] * y, at=(x, y))",
    "root": "sqrt_edge(level_at(x, y), at=(x, y))",
    "root in an edge": "edge(level_at(x, y), sqrt_edge(level_at(x, y), at=(x, y)), 0.1, at=(x, y))",
    "layers": "layers(shape, 2, 0.0, at=(i, j))",
    "nearest": "layers(deep_shape, 2, 0.0, at=(i, j), order='depth')",
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


@pytest.mark.sweep
@pytest.mark.parametrize("use", USES)
def test_a_loop_is_right_where_it_is_when_written_out(use):
    rng, n = np.random.default_rng(5), 4
    p, image = scalars(np.c_[rng.uniform(0, W, n), rng.uniform(0, H, n), rng.uniform(0.6, 1.5, n)]), outputs(W, H)
    text = DISCS.replace("USE", USES[use])
    wanted = jacobian(compiled(text.replace("LOOP", f"ti.static(range({n}))"), p=p, image=image), p, image)
    assert wanted.any()
    for option in ({}, {"format": "csr"}):
        found = jacobian(compiled(text.replace("LOOP", f"range({n})"), p=p, image=image), p, image, **option)
        found = found.toarray().reshape(wanted.shape) if "format" in option else found
        assert_allclose(found, wanted, rtol=1e-9, atol=1e-11, err_msg=str(option))
