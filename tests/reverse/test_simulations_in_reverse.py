"""Gradients of whole simulations and renderers with their state in place, against differences along directions."""

import numpy as np
import pytest
import taichi as ti
from numpy.testing import assert_allclose
from taichi_program import initialise

from taichi_ext import value_and_gradient

pytestmark = [pytest.mark.sweep, pytest.mark.double_only("differences of long programs")]


def scalar(*shape):
    return ti.field(ti.f64, shape)


def wave():
    """A membrane with damping, by its start: two earlier states, and the next one in a third field."""
    n, dx, dt, damping = 16, 1 / 16, 3e-3, 1e-3
    before, now, after, start, target = (scalar(n, n) for _ in range(5))
    loss = scalar()

    @ti.func
    def laplacian(f, i, j):
        total = -4 * f[i, j]
        if i > 0:
            total += f[i - 1, j]
        if i < n - 1:
            total += f[i + 1, j]
        if j > 0:
            total += f[i, j - 1]
        if j < n - 1:
            total += f[i, j + 1]
        return total / dx**2

    @ti.kernel
    def begin():
        for i, j in start:
            before[i, j] = start[i, j]
            now[i, j] = start[i, j]

    @ti.kernel
    def step():
        for i, j in now:
            bend = laplacian(now, i, j)
            after[i, j] = 2 * now[i, j] - before[i, j] + dt**2 * bend
            after[i, j] += damping * dt * (bend - laplacian(before, i, j))
        for i, j in now:
            before[i, j] = now[i, j]
            now[i, j] = after[i, j]

    @ti.kernel
    def end():
        for i, j in now:
            loss[None] += dx**2 * (target[i, j] - now[i, j]) ** 2

    def run():
        loss[None] = 0
        begin()
        for _ in range(40):
            step()
        end()

    return run, {"start": start}, loss, [target]


def volume():
    """Three views of densities, one after the other in the same image; rays end where little light is left."""
    n, size, steps = 8, 12, 20
    density, image, target, loss = scalar(n, n, n), scalar(size, size), scalar(3, size, size), scalar()

    @ti.func
    def sample(at):
        place = at * n - 0.5
        corner = ti.floor(place, ti.i32)
        part, result = place - corner, 0.0
        if corner.min() >= 0 and corner.max() < n - 1:
            for offset in ti.static(ti.ndrange(2, 2, 2)):
                weight = 1.0
                for d in ti.static(range(3)):
                    weight *= part[d] if offset[d] == 1 else 1 - part[d]
                result += weight * density[corner + ti.Vector(offset)]
        return result

    @ti.kernel
    def draw(angle: ti.f64):
        for i, j in image:
            image[i, j] = 0
        for i, j in image:
            c, s, light = ti.cos(angle), ti.sin(angle), 1.0
            for k in range(steps):
                u = 1.2 * ti.Vector([(i + 0.5) / size - 0.5, (j + 0.5) / size - 0.5, (k + 0.5) / steps - 0.5])
                opacity = 0.4 * sample(ti.Vector([c * u[0] - s * u[2], u[1], s * u[0] + c * u[2]]) + 0.5)
                image[i, j] += light * opacity
                light *= 1 - ti.min(opacity, 0.9)
                if light < 0.05:
                    break

    @ti.kernel
    def compare(view: ti.i32):
        for i, j in image:
            loss[None] += (image[i, j] - target[view, i, j]) ** 2

    def run():
        loss[None] = 0
        for view in range(3):
            draw(0.7 * view)
            compare(view)

    return run, {"density": density}, loss, [target]


def water():
    """A picture seen through waves: the place of each colour is an index that depends on the state."""
    n, dx, dt = 16, 1 / 16, 4e-3
    height, speed, after, start = (scalar(n, n) for _ in range(4))
    colour, image, target = (ti.Vector.field(3, ti.f64, (n, n)) for _ in range(3))
    loss = scalar()

    @ti.kernel
    def begin():
        for i, j in height:
            height[i, j] = start[i, j]
            speed[i, j] = 0

    @ti.func
    def slope(i, j):
        x = height[ti.min(i + 1, n - 1), j] - height[ti.max(i - 1, 0), j]
        y = height[i, ti.min(j + 1, n - 1)] - height[i, ti.max(j - 1, 0)]
        return ti.Vector([x, y])

    @ti.kernel
    def step():
        for i, j in height:
            sides = height[ti.max(i - 1, 0), j] + height[ti.min(i + 1, n - 1), j]
            sides += height[i, ti.max(j - 1, 0)] + height[i, ti.min(j + 1, n - 1)]
            after[i, j] = height[i, j] + dt * (speed[i, j] + dt * (sides - 4 * height[i, j]) / dx**2)
        for i, j in height:
            speed[i, j] = 0.999 * (after[i, j] - height[i, j]) / dt
            height[i, j] = after[i, j]

    @ti.kernel
    def draw():
        for i, j in image:
            tilt = slope(i, j)
            at = ti.max(0.0, ti.min(n - 1 - 1e-4, ti.Vector([i, j]) + 3 * tilt))
            corner = ti.floor(at, ti.i32)
            a, b = at[0] - corner[0], at[1] - corner[1]
            left = (1 - b) * colour[corner] + b * colour[corner + ti.Vector([0, 1])]
            right = (1 - b) * colour[corner + ti.Vector([1, 0])] + b * colour[corner + ti.Vector([1, 1])]
            normal = ti.Vector([-tilt[0], 1.0, -tilt[1]]).normalized()
            image[i, j] = ((1 - a) * left + a * right) * ti.max(0.0, normal.dot(ti.Vector([0.3, 0.9, 0.3])))

    @ti.kernel
    def end():
        for i, j in image:
            loss[None] += (image[i, j] - target[i, j]).norm_sqr() / n**2

    def run():
        loss[None] = 0
        begin()
        for _ in range(20):
            step()
        draw()
        end()

    return run, {"start": start, "colour": colour}, loss, [target]


@pytest.mark.parametrize("program", [wave, volume, water])
def test_gradient(program):
    initialise(default_fp=ti.f64)
    run, params, loss, targets = program()
    rng = np.random.default_rng(0)
    for field in (*params.values(), *targets):
        field.from_numpy(rng.random(field.to_numpy().shape))
    values = {name: field.to_numpy() for name, field in params.items()}
    value, gradient = value_and_gradient(run, params, loss)
    run()
    assert_allclose(value, loss[None], rtol=1e-12)
    for _ in range(3):
        direction = {name: rng.standard_normal(v.shape) for name, v in values.items()}
        losses = []
        for step in (1e-6, -1e-6):
            for name, field in params.items():
                field.from_numpy(values[name] + step * direction[name])
            run()
            losses.append(loss[None])
        expected = (losses[0] - losses[1]) / 2e-6
        assert_allclose(sum(np.vdot(gradient[name], d) for name, d in direction.items()), expected, rtol=1e-6)
