"""``pixel``: the edges of a function of the position, found, against supersampled images."""

import re

import numpy as np
import pytest
import taichi as ti
from captured_warnings import no_warnings
from differences import central_differences, outputs, read, scalars, vector_outputs
from drawings import drawing, layered
from kernel_texts import func_of, kernel_of, kernels_of, names_of
from numpy.testing import assert_allclose
from program_interpreter import Interpreter
from supersampled import errors_by_column, sampler

import taichi_ext as te
from taichi_ext import Jacobian, UnsupportedError, jacobian, layers, pixel, ray_level, vjp
from taichi_ext.program import I32, Assign, Local, Read
from taichi_ext.record import conditions

pytestmark = pytest.mark.usefixtures("ti64")


def check(shade, p, image, steps, nodes=24, antialias=True):
    k, render = drawing(shade, image, antialias), sampler(shade, image, 20_000)
    errors = errors_by_column(k, p, image, render, steps, nodes)
    assert np.median(errors) < 0.01, errors
    assert errors.max() < 0.03, errors
    render()
    expected = read(image)
    k()
    if antialias:
        assert_allclose(read(image), expected, atol=1e-3)


def test_outcomes_of_conditions_are_told_apart():
    """The hash of what up to twelve conditions say, one after the other, is another one for each, within its bits."""
    seen, outcome = Local("seen", I32), Local("outcome", I32)
    steps = [Assign(Read(seen), value) for value in conditions._mixed(Read(seen), Read(outcome))]
    state, found = Interpreter({}), [conditions.HASH_START]
    for _ in range(12):
        for before in found[-(len(found) + 1) // 2 :]:
            for number in (0, 1):
                state.locals = {seen: before, outcome: number}
                state.run(steps)
                found.append(state.locals[seen])
    assert len(set(found)) == len(found) == 2**13 - 1
    assert 0 < min(found) and max(found) < 2**30


@pytest.mark.mostly_sweep("False")
@pytest.mark.parametrize("antialias", [False, True])
def test_arguments_of_the_kernel_reach_the_function(antialias):
    """A disc whose centre is a local vector, radius an argument and colours an array: sums against closed forms."""
    centre, image = scalars([6.3, 5.2]), outputs(14, 12)
    colours, radius = np.array([5.0, 2.0]), 3.1

    @ti.func
    def shade(x, y, middle, r, values, outside, scale=1.0):
        value = outside
        if scale * (ti.Vector([x, y]) - middle).norm() < r:
            value = values[0]
        return value

    @ti.kernel
    def draw(colour: ti.types.ndarray(), r: ti.f64):
        for i, j in image:
            middle = ti.Vector([centre[0], centre[1]])
            at = (float(i), float(j))
            image[i, j] = pixel(shade, middle, r, colour, colour[1], at=at, antialias=antialias)

    params, args = [centre, "r", colours], (colours, radius)
    by_centre, by_radius, by_colour = jacobian(draw, params, image, args=args)
    x = np.arange(14)[:, None] - 6.3 + 0 * np.arange(12)
    assert_allclose(by_radius.sum(), 3.0 * 2 * np.pi * radius, rtol=1e-4)
    assert_allclose(by_centre.sum((0, 1)), 0, atol=1e-3)
    assert_allclose((by_centre[..., 0] * x).sum(), 3.0 * np.pi * radius**2, rtol=1e-2)  # by places of pixels
    covered = np.pi * radius**2 if antialias else (read(image) == 5.0).sum()
    assert_allclose(by_colour.sum((0, 1)), [covered, 14 * 12 - covered], rtol=1e-4)
    if not antialias:
        return
    weights = np.random.default_rng(0).normal(size=image.shape)
    for back, J in zip(vjp(draw, params, image, weights, args=args), (by_centre, by_radius, by_colour), strict=True):
        assert_allclose(back, np.tensordot(weights, J, 2), rtol=1e-9, atol=1e-12)


def test_arguments_that_are_passed_on_cannot_be_stored_to():
    """The function is called several times for each pixel, so a store would change what the next call sees."""
    x, image = scalars([6.3, 5.2]), outputs(14, 12)

    @ti.func
    def shade(px, py, middle: ti.template()):
        middle += 1.0
        return ti.select((ti.Vector([px, py]) - middle).norm() < 4.0, 1.0, 0.0)

    @ti.func
    def shape(n, px, py, middle: ti.template()):
        middle += 1.0
        return 3.0 - (ti.Vector([px, py]) - middle).norm(), 1.0

    @ti.kernel
    def by_pixel():
        for i, j in image:
            middle = ti.Vector([x[0], x[1]])
            image[i, j] = pixel(shade, middle, at=(float(i), float(j)))

    @ti.kernel
    def by_layers():
        for i, j in image:
            middle = ti.Vector([x[0], x[1]])
            image[i, j] = layers(shape, 1, 0.0, middle, at=(float(i), float(j)))

    without_at = kernel_of(
        "for i, j in image: image[i, j] = pixel(shade, (i, j), x[0], x[1])", image=image, shade=shade, x=x
    )
    for kernel in (by_pixel, by_layers):
        with pytest.raises(UnsupportedError, match=r"middle \+= 1.0\nA value of shape \(2,\) is assigned to"):
            jacobian(kernel, x, image)
    with pytest.raises(te.InvalidRuleError, match=r"at is missing: pixel is called as pixel\(shade, \*args, at="):
        jacobian(without_at, x, image)


# functions of the position (x, y) with parameters p
DEFINITIONS = """
@ti.func
def turned(x, y):
    return (x * ti.cos(p[1]) + y * ti.sin(p[1]) - p[0]) / p[2], (y * ti.cos(p[1]) - x * ti.sin(p[1])) / p[2]
@ti.func
def scene(x, y):
    c = 0.1
    for n in range(3):
        if (x - 4.0 - 5.5 * n) ** 2 + (y - 6.0 - 1.5 * n - p[4]) ** 2 < (2.0 + 0.4 * n) ** 2:
            c = 0.3 + 0.25 * n
    return c
@ti.func
def distance(q):
    other = (q - ti.Vector([1.0, 0.6, 4.2])).norm() - 0.5
    return ti.min((q - ti.Vector([p[0], p[1], p[2]])).norm() - p[3], other)
"""
SHADES = """
nested:
    c = 0.1
    if ti.sqrt((x - p[0]) ** 2 + (y - p[1]) ** 2) < p[2]:
        if x + 0.3 * y < p[3] + 2:
            c = 0.8 + 0.02 * (x - p[0])
        else:
            c = 0.5
    elif y > p[3]:
        c = 0.3
    return c
transparent_discs:
    c = 0.1
    for n in range(4):
        if (x - p[n, 0]) ** 2 + (y - p[n, 1]) ** 2 < p[n, 2] ** 2:
            c += p[n, 4] * (p[n, 3] - c)
    return c
cells:
    c = 0.0
    least = 1e9
    for n in range(9):
        distance = (x - p[n, 0]) ** 2 + (y - p[n, 1]) ** 2
        if distance < least:
            least = distance
            c = p[n, 2]
    return c
sawtooth: return turned(x, y)[0] % 1.0
texture:
    u, v = turned(x, y)
    i = 0
    i = u  # converted where it is stored
    return texels[ti.math.clamp(i, 0, 7), ti.math.clamp(int(ti.round(v)), 0, 7)]
line: away = (x - p[0]) * ti.cos(p[1]) + (y - 4.3) * ti.sin(p[1]); return ti.select(abs(away) < 0.5 * p[2], 0.8, 0.1)
disc: return ti.select((x - p[0]) ** 2 + (y - p[1]) ** 2 < p[2] ** 2, 0.8, 0.1)
branches:
    # edges between an ``if`` and its ``elif``
    c = 0.1
    if x + 0.2 * y < p[0]:
        c = 0.8
    elif x - 0.1 * y < p[1]:
        c = 0.4
    return c
first_disc:
    # the loop ends at the first disc
    c = 0.1
    for n in range(4):
        if (x - p[n, 0]) ** 2 + (y - p[n, 1]) ** 2 < p[n, 2] ** 2:
            c = p[n, 3]
            break
    return c
first_of_many:
    # ``while`` with two reasons to end
    n = 0
    while n < 4 and (x - p[n, 0]) ** 2 + (y - p[n, 1]) ** 2 >= p[n, 2] ** 2:
        n += 1
    c = 0.1
    if n < 4:
        c = p[n, 3]
    return c
metaballs:
    # the speed of their edge varies within a pixel
    total = 0.0
    for n in range(4):
        total += ti.exp(-((x - p[n, 0]) ** 2 + (y - p[n, 1]) ** 2) / (1.5 * p[n, 2] ** 2))
    return ti.select(total > 0.5, 0.8, 0.1)
portal:
    # a scene that is seen through three lenses, one behind the other
    c = scene(x, y)
    u = x
    v = y
    weight = 1.0
    for q in range(3):
        if (u - p[0]) ** 2 + (v - p[1]) ** 2 < p[2] ** 2 * (1 - 0.25 * q) ** 2:
            u = p[0] + p[3] * (u - p[0]) + p[5]
            v = p[1] + p[3] * (v - p[1])
            weight *= 0.8
            c = weight * scene(u, v)
    return c
floor_with_checkers:
    # in perspective, under a horizon
    down = (y - 5.3) / 16
    ray = ti.Vector([(x - 9.6) / 16, ti.cos(p[3]) * down + ti.sin(p[3]), ti.cos(p[3]) - ti.sin(p[3]) * down])
    c = 0.8
    if ray.y > 0.12:
        t = p[2] / ray.y
        is_dark = (int(ti.floor(p[0] + t * ray.x)) + int(ti.floor(p[1] + t * ray.z))) % 2 == 0
        c = ti.select(is_dark, 0.2, 0.6) * ti.exp(-0.05 * t)
    return c
balls:
    ray = ti.Vector([(x - 9.5) / 20, (y - 7.5) / 20, 1.0]).normalized()
    return ti.select(ray_level(distance, ti.Vector([0.0, 0.0, 0.0]), ray, 0.0, 10.0) > 0, 0.9, 0.1)
"""


def shade_of(name, p):
    texels = scalars(np.random.default_rng(3).uniform(0, 1, (8, 8))) if name == "texture" else None
    [row] = re.findall(rf"^{name}:.*\n(?: .*\n)*", SHADES, re.MULTILINE)
    scope = {"p": p, "texels": texels, "ray_level": ray_level}
    return kernels_of(row, definitions=DEFINITIONS, decorator="@ti.func", arguments="(x, y)", **scope)[name]


OVER = [[6.3, 7.2, 4.4, 0.4], [11.7, 9.1, 4.3, 0.9], [14.2, 5.6, 3.7, 0.6], [8.0, 4.0, 3.0, 0.2]]
GLASS = [[6.3, 7.2, 4.4, 0.4, 0.5], [11.7, 9.1, 4.3, 0.9, 0.3], [12.7, 5.6, 3.7, 0.6, 0.7], [8.0, 4.0, 3.0, 0.2, 0.4]]
SITES = np.stack(np.meshgrid([4, 10, 16], [3, 8, 13], indexing="ij"), -1).reshape(-1, 2)
MOVED = np.random.default_rng(3).uniform((-2, -2, 0.1), (2, 2, 1), (9, 3)) + np.pad(SITES, ((0, 0), (0, 1)))
BLOBS = [[6.3, 7.2, 2.4], [11.7, 9.1, 2.1], [9.2, 4.0, 1.7], [14.5, 11.0, 1.2]]
PATTERN, BY = [0.3, 0.2, 3.3], [0.2, 0.03, 0.1]
SCENES = {  # function: parameters, steps, nodes of the mean of J
    "nested": ([10.3, 8.2, 5.1, 9.1], 0.2, 24),
    "transparent_discs": (GLASS, [[0.2, 0.2, 0.2, 0.05, 0.05]] * 4, 24),
    "cells": (MOVED, [0.2, 0.2, 0.05], 24),
    "sawtooth": (PATTERN, BY, 24),
    "texture": (PATTERN, BY, 24),
    "line": ([5.2, 0.4, 0.3], [0.25, 0.03, 0.05], 96),
    "disc": ([3.1, 3.35, 0.3], [0.2, 0.2, 0.05], 96),
    "branches": ([8.3, 13.2], 0.2, 24),
    "first_disc": (OVER, [[0.2, 0.2, 0.2, 0.05]] * 4, 24),
    "first_of_many": (OVER, [[0.2, 0.2, 0.2, 0.05]] * 4, 24),
    "metaballs": (BLOBS, 0.2, 24),
    "portal": ([9.3, 7.6, 5.2, 1.7, 0.3, 0.4], [0.15, 0.15, 0.15, 0.05, 0.15, 0.15], 24),
    "floor_with_checkers": ([0.3, 0.7, 1.2, 0.1], [0.05, 0.05, 0.03, 0.01], 16),
    "balls": ([0.1, -0.2, 5.0, 1.3], 0.05, 12),
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", SCENES)
def test_edges_are_found(name):
    given, steps, nodes = SCENES[name]
    p, image = scalars(np.array(given)), outputs(20, 16)
    check(shade_of(name, p), p, image, steps, nodes)


def test_metaballs_grow_with_their_radii():
    """Taichi compiles some conditions wrong that are traced as they stand: then no edge was found here."""
    balls = np.array([[6.3, 7.2, 2.4], [9.7, 6.1, 2.1], [6.2, 4.0, 1.7], [9.5, 9.0, 1.2]])
    p, image = scalars(balls), outputs(16, 14)
    J = jacobian(drawing(shade_of("metaballs", p), image, False), p, image)
    x, y = np.meshgrid(np.arange(-1, 17, 0.02), np.arange(-1, 15, 0.02), indexing="ij")
    squares = [(x - u) ** 2 + (y - v) ** 2 for u, v, _ in balls]
    parts = [np.exp(-s / (1.5 * r**2)) for s, r in zip(squares, balls[:, 2], strict=True)]
    near = np.exp(-0.5 * ((sum(parts) - 0.5) / 0.01) ** 2) / (0.01 * np.sqrt(2 * np.pi))  # of the edge
    for n, (part, square, (_, _, r)) in enumerate(zip(parts, squares, balls, strict=True)):
        expected = 0.7 * 0.02**2 * (near * part * 2 * square / (1.5 * r**3)).sum()
        assert_allclose(J[..., n, 2].sum(), expected, rtol=0.01)


@pytest.mark.sweep
def test_two_edges_that_cut_the_same_corner():
    """Each side of the pixel is crossed by both; none of its corners lies between them."""
    p, image = scalars([0.3, 0.6]), outputs(1, 1)

    @ti.func
    def shade(x, y):
        c = 0.0
        if x + y > p[0]:
            c += 0.3 * (2.0 - c)
        if x + y > p[1]:
            c += 0.5 * (3.0 - c)
        return c

    for antialias in (False, True):
        J = jacobian(drawing(shade, image, antialias), p, image)
        assert_allclose(J[0, 0], [-0.7 * 0.6, -0.4 * 1.2], rtol=1e-5)  # d area / d p times the jump


@pytest.mark.sweep
def test_a_kink_beside_an_edge():
    """A ramp from 0 to 1 along an edge: a pixel with both is divided as one with the ramp alone."""
    p, image = scalars([0.3, 1.2]), outputs(1, 4)
    shade = func_of("return ti.select(x < p[0], 0.5, 0.0) + ti.math.smoothstep(p[1], p[1] + 1, y)", "x, y", p=p)
    J = jacobian(drawing(shade, image, True), p, image)[0]
    t = np.arange(5) - 0.5 - 1.2  # the borders of the pixels
    s = np.clip(t, 0, 1)
    ramp, integral = s**2 * (3 - 2 * s), s**3 - 0.5 * s**4 + np.maximum(0, t - 1)
    assert_allclose(read(image)[0], 0.4 + np.diff(integral), atol=2e-3)
    assert_allclose(J, np.stack([np.full(4, 0.5), -np.diff(ramp)], axis=1), atol=0.01)


@pytest.mark.sweep
def test_what_cannot_be_treated_is_refused():
    p, image, other = scalars([3.3, 2.0]), outputs(8, 6), outputs(8, 6)
    stores = func_of("other[0, 0] = x; return x * p[0]", "x, y", other=other, p=p)
    draws = func_of("return ti.select(ti.random() < x * p[0], 1.0, 0.0)", "x, y", p=p)
    has_an_edge = func_of("return edge(p[0] - x, 1.0, 0.0, at=(x, y))", "x, y", p=p)
    takes_three = func_of("takes_three(x, y, z): return x * p[0] + y * z", p=p)
    for shade, message in (
        (stores, "must only read and compute"),
        (draws, "pixel: random in the function of a position has no level"),
        (has_an_edge, "pixel: edge in the function of a position has a derivative of its own"),
        (abs, "pixel: shade is .*; expected a ti.func that takes x and y"),
        (takes_three, r"pixel: shade is takes_three\(x, y, z\), which takes 3 arguments; pixel passes 2: x and y"),
    ):
        with pytest.raises(UnsupportedError, match=message) as error:
            jacobian(drawing(shade, image, False), p, image)
        assert re.search(r"(test_pixel|drawings)\.py", str(error.value))
        assert "line" in str(error.value)
    with pytest.raises(UnsupportedError, match="pixel is called from Python"):
        pixel(stores, at=(0.0, 0.0))


BOXES = [
    [3.17, 3.22, 2.81, 2.86],
    [1.5, 4.5, 1.5, 3.5],
    [2.0, 5.0, 1.0, 4.0],
    [1.125, 1.25, 0.75, 4.0625],
    [2.3, 2.32, 1, 4],
]


@pytest.mark.sweep
def test_the_area_of_boxes_with_corners_anywhere():
    """Also on the border or the centre of a pixel or square: the derivative by a side is the length of it."""
    p, image = scalars(BOXES[0]), outputs(8, 7)
    shade = func_of("return ti.select(x > p[0] and x < p[1] and y > p[2] and y < p[3], 1.0, 0.0)", "x, y", p=p)
    plan = Jacobian(drawing(shade, image, False), p, image)
    for box in BOXES:
        p.from_numpy(np.array(box))
        width, height = box[1] - box[0], box[3] - box[2]
        assert_allclose(plan().sum((0, 1)), [-height, height, -width, width], rtol=1e-3, err_msg=str(box))


@pytest.mark.mostly_sweep("place2")
@pytest.mark.parametrize("place", [(3.2, 3.1), (3.37, 2.81), (3.5, 3.5)])
def test_the_area_of_small_discs(place):
    """Down to 1.6 times the smallest square of 1/32 pixel, in which edges follow their tangents."""
    p, image = scalars([*place, 0.3]), outputs(8, 7)
    plan = Jacobian(drawing(shade_of("disc", p), image, False), p, image)
    for radius, most in ((0.2, 0.01), (0.15, 0.01), (0.1, 0.015), (0.07, 0.03), (0.05, 0.06)):
        p.from_numpy(np.array([*place, radius]))
        around = 0.7 * 2 * np.pi * radius
        assert_allclose(plan().sum((0, 1)), [0, 0, around], atol=most * around)


@pytest.mark.sweep
@pytest.mark.parametrize("cell", [1.03, 0.607, 0.413, 0.209])
def test_checkers_smaller_than_a_pixel(cell):
    """Four edges meet in each corner, and their terms have both signs. Integrals of a square wave are triangles."""
    given = np.array([0.637, 0.27, cell])
    p, image = scalars(given), outputs(8, 7)

    @ti.func
    def shade(x, y):
        i, j = int(ti.floor((x - p[0]) / p[2])), int(ti.floor((y - p[1]) / p[2]))
        return ti.select((i + j) % 2 == 0, 0.9, 0.2)

    def means(values):
        def wave(count, first):
            ends = (np.arange(count + 1) - 0.5 - first) / values[2]
            return np.diff(values[2] * np.abs(ends - 2 * np.floor(ends / 2 + 0.5)))

        return 0.55 + 0.35 * np.outer(wave(8, values[0]), wave(7, values[1]))

    expected = np.stack([(means(given + h) - means(given - h)) / 2e-6 for h in 1e-6 * np.eye(3)], axis=-1)
    J = Jacobian(drawing(shade, image, True), p, image)()
    assert_allclose(J, expected, atol=1e-4 * np.abs(expected).max())
    assert_allclose(image.to_numpy(), means(given), atol=1.5e-3)


def borders(shade, p, shape=(12, 10)):
    """J of an antialiased image summed over its pixels."""
    image = outputs(*shape)
    return jacobian(drawing(shade, image, True), p, image).sum((0, 1))


def labels(p, find):
    """Three labels, of the nearest of three points; ``find`` makes the function that gives the label of distances."""

    @ti.func
    def shade(x, y):
        d = ti.Vector([0.0, 0.0, 0.0])
        for n in ti.static(range(3)):
            d[n] = (x - p[2 * n]) ** 2 + (y - p[2 * n + 1]) ** 2
        return find(d)

    return shade


@ti.func
def by_order(d):
    v = 0.7
    if d[0] <= d[1] and d[0] <= d[2]:
        v = 0.2
    elif d[1] <= d[2]:
        v = 0.5
    return v


@ti.func
def by_equality(d):
    least = ti.min(d[0], d[1], d[2])
    return ti.select(least == d[0], 0.2, ti.select(least == d[1], 0.5, 0.7))


@ti.func
def by_atomic(d):
    least = d[0]
    for n in range(1, 3):
        ti.atomic_min(least, d[n])
    v = 0.0
    for n in range(3):
        if d[n] == least:
            v = ti.select(n == 0, 0.2, ti.select(n == 1, 0.5, 0.7))
    return v


@pytest.mark.sweep
@pytest.mark.parametrize("find", [by_equality, by_atomic])
def test_labels_that_are_found_by_equality(find):
    p = scalars(np.array([3.2, 2.4, 8.6, 4.1, 5.3, 8.2]))
    expected = borders(labels(p, by_order), p)
    assert np.abs(expected).max() > 0.5
    assert_allclose(borders(labels(p, find), p), expected, rtol=1e-2)


@pytest.mark.sweep
def test_a_sign_by_equality_with_the_absolute_value():
    p = scalars(np.array([5.37]))
    shade = func_of("s = x - p[0] - 0.2 * y; return ti.select(ti.abs(s) == s, 1.5, 0.5)", "x, y", p=p)
    assert_allclose(borders(shade, p), [-10.0], rtol=1e-9)


by_absolute = func_of("return s / ti.abs(s)", "s")
by_inverse = func_of("return ti.atan2(1.0 / s, 1.0) * (2 / np.pi)", "s")


@pytest.mark.sweep
@pytest.mark.parametrize("sign", [by_absolute, by_inverse])
def test_jumps_where_a_divisor_is_zero(sign):
    p = scalars(np.array([5.37]))
    shade = func_of("s = x - p[0] - 0.2 * y; return 3.0 + 0.7 * sign(s)", "x, y", p=p, sign=sign)
    expected = -14.0
    if sign is by_inverse:  # which falls between the borders of the image, and jumps in it
        right, left = (edge - p[0] - 0.2 * np.arange(10) for edge in (11.5, -0.5))
        expected = 0.7 * 2 / np.pi * (np.arctan(1 / left) - np.arctan(1 / right)).sum()
    assert_allclose(borders(shade, p), [expected], atol=0.02 * 14.0)


@pytest.mark.sweep
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_a_mask_beside_numbers_of_another_unit(scale):
    p, image = scalars(np.array([6.3, 5.6, 3.2, 5.0])), vector_outputs(2, 14, 12)

    @ti.func
    def shade(x, y):
        mask = ti.select((x - p[0]) ** 2 + (y - p[1]) ** 2 < p[2] ** 2, 1.0, 0.0)
        return ti.Vector([mask, scale * (p[3] + 0.1 * x)])

    J = jacobian(drawing(shade, image, True), p, image).sum((0, 1))
    assert_allclose(J[0], [0.0, 0.0, 2 * np.pi * 3.2, 0.0], rtol=2e-3, atol=5e-3)
    assert_allclose(J[1] / scale, [0.0, 0.0, 0.0, 14 * 12], rtol=1e-9, atol=1e-9)


def across_sides(value, shape, points=20_000):
    """J of an image of ``value(x - p[0], y)`` by p[0]: what leaves a pixel at one side and enters at the other."""
    places = (np.arange(points) + 0.5) / points - 0.5
    sides, rows = np.arange(shape[0] + 1) - 0.5, np.arange(shape[1])[:, None] + places
    flow = np.stack([value(x, rows).mean(-1) for x in sides])
    return flow[:-1] - flow[1:]


@pytest.mark.sweep
def test_a_ramp_that_is_narrower_than_a_pixel():
    """A value without an edge that varies within a tenth of a pixel, also in the middle of a pixel and at its border."""
    p, image = scalars([0.0, 0.4]), outputs(6, 2)
    shade = func_of("return 0.2 + 0.7 * ti.math.smoothstep(0.0, p[1], x + 0.2 * y - p[0])", "x, y", p=p)
    plan = Jacobian(drawing(shade, image, True), p, image)
    for width in (0.4, 0.1):
        for start in (1.8, 2.0, 2.27, 2.46):
            p.from_numpy(np.array([start, width]))

            def value(x, y, start=start, width=width):
                u = np.clip((x + 0.2 * y - start) / width, 0, 1)
                return 0.7 * u * u * (3 - 2 * u)

            with no_warnings(te.DerivativeWarning):
                J = plan()[..., 0]
            assert_allclose(J, across_sides(value, (6, 2)), atol=0.025)


@pytest.mark.sweep
def test_a_shaded_ball_in_each_pixel():
    """Its value ends as a root at the rim."""
    p, image = scalars([3.3, 3.1, 2.6]), outputs(7, 7)

    @ti.func
    def shade(x, y):
        inner = p[2] ** 2 - (x - p[0]) ** 2 - (y - p[1]) ** 2
        value = 0.2
        if inner > 0:
            value += ti.sqrt(inner) / p[2]
        return value

    value = lambda x, y: np.sqrt(np.maximum(2.6**2 - (x - 3.3) ** 2 - (y - 3.1) ** 2, 0)) / 2.6
    k = drawing(shade, image, True)
    assert_allclose(jacobian(k, p, image)[..., 0], across_sides(value, (7, 7)), atol=0.025)
    nodes = (np.arange(300) + 0.5) / 300 - 0.5
    X, Y = np.meshgrid(*[(np.arange(7)[:, None] + nodes).ravel()] * 2, indexing="ij")
    assert_allclose(read(image), 0.2 + value(X, Y).reshape(7, 300, 7, 300).mean((1, 3)), atol=4e-3)


@pytest.mark.mostly_sweep("jacobian")
@pytest.mark.parametrize("by", ["jacobian", "vjp", "kernel.grad()"])
def test_patterns_that_are_too_fine_give_a_warning(by):
    """Checkers up to their horizon."""
    p, image = ti.field(ti.f64, shape=2, needs_grad=True), ti.field(ti.f64, shape=(4, 3), needs_grad=True)
    p.from_numpy(np.array([0.3, 0.002]))

    @ti.func
    def checkers(x, y):
        t = 1.2 / ti.max(0.15 * (y + 0.35), 1e-6)
        u = int(ti.floor(p[0] + 0.13 * t * (x - 2))) + int(ti.floor(t))
        return ti.select(u % 2 == 0, 0.2, 0.6)

    k = drawing(checkers, image, True)
    with pytest.warns(te.DerivativeWarning, match="drawings.py:.*off in about (4|8) pixels:"):
        if by == "jacobian":
            jacobian(k, p, image)
        elif by == "kernel.grad()":
            k()
            image.grad.fill(1.0)
            k.grad()
        else:
            vjp(k, p, image, np.ones((4, 3)))


@pytest.mark.sweep
def test_the_warning_counts_the_pixels_of_a_row():
    """Of a value that varies within a smallest square."""
    p, image = scalars([0.3, 0.002]), outputs(2, 300)
    ramp = func_of("return ti.math.smoothstep(0.0, p[1], x - p[0])", "x, y", p=p)
    with pytest.warns(te.DerivativeWarning, match="off in about (2[5-9]|3[0-4]). pixels:"):
        vjp(drawing(ramp, image, True), p, image, np.ones((2, 300)))


@pytest.mark.parametrize(("rows", "by_row", "kind"), [(2, True, "layers"), (6, True, "pixel"), (3, False, "pixel")])
def test_an_edge_on_which_hidden_ones_lie(rows, by_row, kind):
    """Cells of a regular grid: that between two of one row lies on those of other rows, which are farther away."""
    numbers = np.arange(2 * rows)
    column, row = (numbers % 2, numbers // 2) if by_row else (numbers // rows, numbers % rows)
    site, image = ti.Vector.field(2, ti.f64, shape=2 * rows), outputs(10, 5 * rows)
    site.from_numpy(np.stack([2.0 + 6.0 * column, 2.0 + 5.0 * row], 1))
    distance = func_of("return (x - site[n][0]) ** 2 + (y - site[n][1]) ** 2", "n, x, y", site=site)

    @ti.func
    def nearest(x, y):
        best, value = 1e9, 0.0
        for n in range(2 * rows):
            if distance(n, x, y) < best:
                best, value = distance(n, x, y), 1.0 + n * n
        return value

    cell = func_of("return 1.0, distance(n, x, y), 1.0 + n * n", "n, x, y", distance=distance)
    k = drawing(nearest, image) if kind == "pixel" else layered(image, cell, 2 * rows, 0.0, order="depth")
    expected = np.zeros((10, 5 * rows, 2 * rows))
    for r in range(rows):
        left, right = np.flatnonzero(row == r)[np.argsort(column[row == r])]
        expected[5, 5 * r : 5 * r + 5, [left, right]] = 0.5 * (left**2 - right**2)
    J = jacobian(k, site, image)[..., 0]
    inside = np.arange(5 * rows) % 5 % 4 > 0  # others have corners of cells
    assert_allclose(J[:, inside], expected[:, inside], atol=1e-9 * expected.max() + 1e-9 * rows**4)


RECTANGLES = """
    if_and:
        for k in range(3):
            if x > sides[j, k, 0] and x < sides[j, k, 1]:
                v = 1.0 + k
    select:
        for k in range(3):
            v = ti.select(x > sides[j, k, 0] and x < sides[j, k, 1], 1.0 + k, v)
    nearest_first:
        for n in range(3):
            k = 2 - n
            if x > sides[j, k, 0] and x < sides[j, k, 1]:
                v = 1.0 + k
                break
    in_while:
        k = 0
        while k < 3:
            if x > sides[j, k, 0] and x < sides[j, k, 1]:
                v = 1.0 + k
            k += 1
    product:
        for k in range(3):
            v += float(x > sides[j, k, 0]) * float(x < sides[j, k, 1]) * (1.0 + k - v)
    loop_in_branch:
        for k in range(3):
            if x > sides[j, k, 0]:
                inside = True
                for m in range(1, sides.shape[2]):
                    inside = inside and x < sides[j, k, m]
                if inside:
                    v = 1.0 + k
    """


@pytest.mark.mostly_sweep("loop_in_branch")
@pytest.mark.parametrize("name", names_of(RECTANGLES))
def test_borders_that_rectangles_share(name):
    """The jump is that of the rectangle on top, and not of one behind it that has a border at the same place."""
    frame, arguments = "v = 0.5\n...\nreturn v\n", "(x, y, j, sides: ti.template())"
    shade = kernels_of(RECTANGLES, frame, decorator="@ti.func", arguments=arguments)[name]
    of = [
        [(2, 7), (7, 12), (12, 17)],
        [(2, 9), (5, 12), (9, 17)],
        [(2, 7), (2, 12), (7, 12)],
        [(2, 12), (7, 12), (2, 7)],
    ]
    borders = np.array([row[::step] for row in of for step in (1, -1)]) + 0.23
    sides, image = outputs(len(borders), 3, 2), outputs(19, len(borders))
    sides.from_numpy(borders)
    call = "image[i, j] = pixel(shade, j, sides, at=(float(i), float(j)))"
    k = kernel_of(f"for i, j in image: {call}", image=image, pixel=pixel, shade=shade, sides=sides)
    expected = np.zeros((len(borders), len(borders), 3, 2))
    for j, row in enumerate(borders):
        for border in np.unique(row):
            seen = [[n for n in range(3) if row[n, 0] < x < row[n, 1]] for x in (border - 0.1, border + 0.1)]
            before, after = (1.0 + s[-1] if s else 0.5 for s in seen)
            top = max(n for s in seen for n in s[-1:])
            expected[j, j, top, np.flatnonzero(row[top] == border)] = before - after
    assert_allclose(jacobian(k, sides, image).sum(0), expected, atol=1e-9)


@pytest.mark.sweep
def test_a_level_that_changes_its_sign_along_an_edge():
    """Cells of hexagons, by rounded coordinates: levels beside a cell are differences of distances, with saddles."""
    p, image = scalars([0.4, 0.3, 2.9, 0.2]), outputs(6, 8)

    @ti.func
    def cells(x, y):
        u, v = x - p[0], y - p[1]
        r = (v * ti.cos(p[3]) - u * ti.sin(p[3])) / p[2]
        a, b = (u * ti.cos(p[3]) + v * ti.sin(p[3])) / p[2] / ti.sqrt(3.0) - r / 3, r * 2 / 3
        c = -a - b
        i, j, k = ti.round(a), ti.round(b), ti.round(c)
        di, dj, dk = abs(i - a), abs(j - b), abs(k - c)
        if di > dj and di > dk:
            i = -j - k
        elif dj > dk:
            j = -i - k
        return 0.3 * ((i - j) % 3)

    k = drawing(cells, image, True)
    [[expected]] = central_differences(k, [p], [image])
    assert np.abs(expected).max() > 1
    assert_allclose(jacobian(k, p, image), expected, atol=1e-4 * np.abs(expected).max())
