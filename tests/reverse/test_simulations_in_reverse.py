"""Gradients of whole simulations and renderers with their state in place, against differences along directions."""

import numpy as np
import pytest
import taichi as ti
from kernel_texts import kernel_of
from numpy.testing import assert_allclose
from taichi_program import share_program

from taichi_ext import value_and_gradient

pytestmark = [pytest.mark.sweep, pytest.mark.double_only("differences of long programs")]


def scalar(*shape):
    return ti.field(ti.f64, shape)


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
    begin = kernel_of(
        "for i, j in height: height[i, j] = start[i, j]; speed[i, j] = 0", height=height, start=start, speed=speed
    )

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


def billiards():
    """Balls that collide, by the speed of the first; velocities and impulses are overwritten."""
    count, dt, radius = 6, 0.02, 0.12
    x, v, push = (ti.Vector.field(2, ti.f64, count) for _ in range(3))
    start, target, loss = ti.Vector.field(2, ti.f64, ()), ti.Vector.field(2, ti.f64, ()), scalar()

    @ti.kernel
    def begin():
        for i in x:
            x[i] = [0.22 * i + 0.4, 0.06 * (i % 3)]
            v[i] = [0.0, 0.0]
        x[0] = [0.0, 0.0]
        v[0] = start[None] + ti.Vector([1.5, 0.0])

    @ti.kernel
    def step():
        for i in x:
            push[i] = [0.0, 0.0]
        for i in x:
            for j in range(count):
                d = x[i] - x[j]
                if i != j and d.norm() < 2 * radius:
                    normal = d.normalized()
                    closing = (v[i] - v[j]).dot(normal)
                    push[i] += (-0.95 * ti.min(closing, 0.0) + 2.0 * (2 * radius - d.norm())) * normal
        for i in x:
            v[i] += push[i]
            x[i] += dt * v[i]

    end = kernel_of("loss[None] = (x[count - 1] - target[None]).norm_sqr()", loss=loss, x=x, count=count, target=target)

    def run():
        begin()
        for _ in range(60):
            step()
        end()

    return run, {"start": start}, loss, [target]


def material():
    """Particles of a solid and of a liquid on a grid (MPM), by muscles that pull: grid and particles are overwritten."""
    count, n, dt = 40, 12, 2e-3
    x, v = (ti.Vector.field(2, ti.f64, count) for _ in range(2))
    affine, gradient = (ti.Matrix.field(2, 2, ti.f64, count) for _ in range(2))
    mass, momentum, muscle, target = scalar(n, n), ti.Vector.field(2, ti.f64, (n, n)), scalar(4), scalar(2)
    loss = scalar()

    @ti.kernel
    def begin():
        for p in x:
            x[p] = [0.3 + 0.05 * (p % 8), 0.3 + 0.05 * (p // 8)]
            v[p] = [0.5, -1.0]
            affine[p] = ti.Matrix.zero(ti.f64, 2, 2)
            gradient[p] = ti.Matrix.identity(ti.f64, 2)

    @ti.kernel
    def step(t: ti.f64):
        for cell in ti.grouped(mass):
            mass[cell] = 0.0
            momentum[cell] = [0.0, 0.0]
        for p in x:
            base = ti.floor(x[p] * n - 0.5, ti.i32)
            f = x[p] * n - base
            w = [0.5 * (1.5 - f) ** 2, 0.75 - (f - 1) ** 2, 0.5 * (f - 0.5) ** 2]
            gradient[p] = gradient[p] + dt * affine[p] @ gradient[p]
            J = gradient[p].determinant()
            stress = ti.Matrix.identity(ti.f64, 2) * 50.0 * (J - 1)
            if p % 8 < 4:
                r, _ = ti.polar_decompose(gradient[p])
                pull = 200 * muscle[p // 8 % 4] * ti.sin(20 * t)
                stress = 40 * (gradient[p] - r) @ gradient[p].transpose() + ti.Matrix([[0.0, 0.0], [0.0, pull]])
            part = -dt * 4 * n * n * 2e-3 * stress + affine[p]
            for o in ti.static(ti.ndrange(3, 3)):
                weight = w[o[0]][0] * w[o[1]][1]
                momentum[base + ti.Vector(o)] += weight * (v[p] + part @ ((ti.Vector(o) - f) / n))
                mass[base + ti.Vector(o)] += weight
        for i, j in mass:
            if mass[i, j] > 0:
                momentum[i, j] /= mass[i, j]
                momentum[i, j][1] -= dt * 9.8
                if j < 3:
                    momentum[i, j][1] = ti.max(momentum[i, j][1], 0.0)
        for p in x:
            base = ti.floor(x[p] * n - 0.5, ti.i32)
            f = x[p] * n - base
            w = [0.5 * (1.5 - f) ** 2, 0.75 - (f - 1) ** 2, 0.5 * (f - 0.5) ** 2]
            new, c = ti.Vector.zero(ti.f64, 2), ti.Matrix.zero(ti.f64, 2, 2)
            for o in ti.static(ti.ndrange(3, 3)):
                g = w[o[0]][0] * w[o[1]][1] * momentum[base + ti.Vector(o)]
                new += g
                c += 4 * n * g.outer_product(ti.Vector(o) - f)
            v[p], affine[p] = new, c
            x[p] += dt * v[p]

    @ti.kernel
    def end():
        for p in x:
            loss[None] += (x[p] - ti.Vector([target[0], target[1]])).norm_sqr() / count

    def run():
        loss[None] = 0
        begin()
        for s in range(40):
            step(s * dt)
        end()

    return run, {"muscle": muscle}, loss, [target]


def rigid():
    """Two rods with a joint, by impulses at their corners on the ground: state and impulses are overwritten."""
    dt, length, thickness = 5e-3, 0.4, 0.1
    x, v, push = (ti.Vector.field(2, ti.f64, 2) for _ in range(3))
    angle, spin, turn, loss = scalar(2), scalar(2), scalar(2), scalar()
    drive, target = scalar(3), scalar(2)
    inertia = (length**2 + thickness**2) / 12

    @ti.func
    def turned(a, at):
        return ti.Vector([ti.cos(a) * at[0] - ti.sin(a) * at[1], ti.sin(a) * at[0] + ti.cos(a) * at[1]])

    @ti.func
    def add(i, arm, impulse):
        push[i] += impulse
        turn[i] += arm.cross(impulse) / inertia

    @ti.kernel
    def begin():
        for i in x:
            x[i] = [0.45 * i, 0.16]
            v[i] = [0.3, -0.5]
            angle[i] = 0.2 - 0.5 * i
            spin[i] = 0.0

    @ti.kernel
    def step(t: ti.f64):
        for i in x:
            push[i] = [0.0, 0.0]
            turn[i] = 0.0
        for i in x:
            for corner in ti.static(ti.ndrange(2, 2)):
                arm = turned(angle[i], ti.Vector([(corner[0] - 0.5) * length, (corner[1] - 0.5) * thickness]))
                speed = v[i] + spin[i] * ti.Vector([-arm[1], arm[0]])
                if x[i][1] + arm[1] < 0 and speed[1] < 0:
                    up = -1.3 * speed[1] / (1 + arm[0] ** 2 / inertia)
                    along = -speed[0] / (1 + arm[1] ** 2 / inertia)
                    add(i, arm, ti.Vector([ti.math.clamp(along, -0.4 * up, 0.4 * up), up]))
        for _ in range(1):
            a, b = turned(angle[0], ti.Vector([0.22, 0.0])), turned(angle[1], ti.Vector([-0.22, 0.0]))
            pull = 60 * dt * (x[1] + b - x[0] - a)
            add(0, a, pull)
            add(1, b, -pull)
            torque = dt * (drive[0] + drive[1] * ti.sin(20 * t) + drive[2] * (angle[1] - angle[0]))
            turn[0] -= torque / inertia
            turn[1] += torque / inertia
        for i in x:
            v[i] += push[i] + ti.Vector([0.0, -9.8 * dt])
            spin[i] = 0.995 * (spin[i] + turn[i])
            x[i] += dt * v[i]
            angle[i] += dt * spin[i]

    end = kernel_of("loss[None] = (x[1] - ti.Vector([target[0], target[1]])).norm_sqr()", loss=loss, x=x, target=target)

    def run():
        begin()
        for n in range(60):
            step(n * dt)
        end()

    return run, {"drive": drive}, loss, [target]


@pytest.mark.parametrize("program", [volume, water, billiards, material, rigid])
def test_gradient(program):
    share_program(default_fp=ti.f64)
    run, params, loss, targets = program()
    rng = np.random.default_rng(0)
    for field in (*params.values(), *targets):
        field.from_numpy(rng.random(field.to_numpy().shape))
    values = {name: field.to_numpy() for name, field in params.items()}
    value, gradient = value_and_gradient(run, params, loss)
    assert all(np.mean(g != 0) > 0.2 for g in gradient.values())
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
