"""Gradients of whole simulations and renderers with their state in place, against differences along directions."""

import numpy as np
import pytest
import taichi as ti
from numpy.testing import assert_allclose
from taichi_program import share_program

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

    @ti.kernel
    def end():
        loss[None] = (x[count - 1] - target[None]).norm_sqr()

    def run():
        begin()
        for _ in range(60):
            step()
        end()

    return run, {"start": start}, loss, [target]


def robot():
    """Springs that a small network drives, with friction on the ground: the state of each step is overwritten."""
    ends = [(0, 1), (1, 2), (2, 3), (3, 0), (0, 2), (1, 3)]
    dt, hidden = 4e-3, 5
    x, v, force = (ti.Vector.field(2, ti.f64, 4) for _ in range(3))
    first, second, inner, drive = scalar(hidden, 6), scalar(6, hidden), scalar(hidden), scalar(6)
    target, loss = scalar(), scalar()

    @ti.kernel
    def begin():
        for i in x:
            x[i] = [0.2 * ((i + 1) // 2 % 2), 0.01 + 0.2 * (i // 2)]
            v[i] = [0.0, 0.0]

    @ti.kernel
    def control(t: ti.f64):
        for h in inner:
            total = first[h, 0] * ti.sin(30 * t) + first[h, 1] * ti.cos(30 * t)
            for i in ti.static(range(4)):
                total += first[h, 2 + i] * (x[i][1] + 0.1 * v[i][0])
            inner[h] = ti.tanh(total - 1)
        for e in drive:
            drive[e] = 0.0
            for h in range(hidden):
                drive[e] += 0.1 * second[e, h] * inner[h]

    @ti.kernel
    def step():
        for i in x:
            force[i] = [0.0, -4.8]
        for _ in range(1):
            for e in ti.static(range(6)):
                a, b = ti.static(ends[e])
                d, rest = x[a] - x[b], 0.2 * (1.4142135 if ti.static(e > 3) else 1.0)
                pull = 300 * (d.norm() - rest * (1 + drive[e])) * d.normalized()
                force[a] -= pull
                force[b] += pull
        for i in x:
            v[i] = ti.exp(-2 * dt) * (v[i] + dt * force[i])
            if x[i][1] < 0 and v[i][1] < 0:
                depth = -v[i][1]
                v[i] = [v[i][0] - ti.math.clamp(v[i][0], -0.5 * depth, 0.5 * depth), 0.0]
            x[i] += dt * v[i]

    @ti.kernel
    def end():
        loss[None] = (x[2][0] - target[None]) ** 2

    def run():
        begin()
        for n in range(80):
            control(n * dt)
            step()
        end()

    return run, {"first": first, "second": second}, loss, [target]


def smoke():
    """Smoke in periodic flow: projected by Jacobi iterations in two fields in turn, and carried back along the flow."""
    n = 12
    v, carried, start = (ti.Vector.field(2, ti.f64, (n, n)) for _ in range(3))
    density, moved, target, divergence, first, second = (scalar(n, n) for _ in range(6))
    loss = scalar()

    @ti.kernel
    def begin():
        for i, j in v:
            v[i, j] = start[i, j] - 0.5
            density[i, j] = ti.exp(-0.1 * ((i - 6) ** 2 + (j - 6) ** 2))
            first[i, j] = 0.0

    @ti.kernel
    def diverge():
        for i, j in v:
            x, y = v[(i + 1) % n, j][0] - v[(i - 1) % n, j][0], v[i, (j + 1) % n][1] - v[i, (j - 1) % n][1]
            divergence[i, j] = 0.5 * (x + y)

    @ti.kernel
    def relax(p: ti.template(), q: ti.template()):
        for i, j in p:
            around = p[(i + 1) % n, j] + p[(i - 1) % n, j] + p[i, (j + 1) % n] + p[i, (j - 1) % n]
            q[i, j] = 0.25 * (around - divergence[i, j])

    @ti.func
    def sample(f: ti.template(), at):
        corner = ti.floor(at, ti.i32)
        a, b = at[0] - corner[0], at[1] - corner[1]
        i, j = corner % n
        left = (1 - b) * f[i, j] + b * f[i, (j + 1) % n]
        return (1 - a) * left + a * ((1 - b) * f[(i + 1) % n, j] + b * f[(i + 1) % n, (j + 1) % n])

    @ti.kernel
    def carry():
        for i, j in v:
            p = ti.Vector(
                [first[(i + 1) % n, j] - first[(i - 1) % n, j], first[i, (j + 1) % n] - first[i, (j - 1) % n]]
            )
            v[i, j] -= 0.5 * p
        for i, j in v:
            at = ti.Vector([i, j]) - 0.7 * v[i, j]
            carried[i, j] = sample(v, at)
            moved[i, j] = sample(density, at)
        for i, j in v:
            v[i, j] = carried[i, j]
            density[i, j] = moved[i, j]

    @ti.kernel
    def end():
        for i, j in v:
            loss[None] += (density[i, j] - target[i, j]) ** 2

    def run():
        loss[None] = 0
        begin()
        for _ in range(6):
            diverge()
            for _ in range(3):
                relax(first, second)
                relax(second, first)
            carry()
        end()

    return run, {"start": start}, loss, [target]


def material():
    """Particles of a solid and of a liquid on a grid (MPM), by muscles that pull: grid and particles are overwritten."""
    count, n, dt = 40, 12, 2e-3
    x, v = (ti.Vector.field(2, ti.f64, count) for _ in range(2))
    affine, gradient = (ti.Matrix.field(2, 2, ti.f64, count) for _ in range(2))
    mass, momentum, muscle, target, loss = (
        scalar(n, n),
        ti.Vector.field(2, ti.f64, (n, n)),
        scalar(4),
        scalar(2),
        scalar(),
    )

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


def electric():
    """A charge that eight electrodes push along a path; a network sets them by place and speed, which are overwritten."""
    dt, hidden = 0.02, 6
    x, v, loss = ti.Vector.field(2, ti.f64, ()), ti.Vector.field(2, ti.f64, ()), scalar()
    first, second, inner, charge, goal = scalar(hidden, 6), scalar(8, hidden), scalar(hidden), scalar(8), scalar(2)

    @ti.kernel
    def begin():
        x[None] = [0.1, -0.2]
        v[None] = [0.0, 0.0]

    @ti.kernel
    def step(t: ti.f64):
        aim = ti.Vector([goal[0] * ti.sin(t), goal[1] * ti.cos(t)])
        for h in range(hidden):
            inner[h] = first[h, 0] * aim[0] + first[h, 1] * aim[1]
            for d in ti.static(range(2)):
                inner[h] += first[h, 2 + d] * x[None][d] - first[h, 4 + d] * v[None][d]
            inner[h] = ti.tanh(inner[h])
        for e in range(8):
            charge[e] = 0.0
            for h in range(hidden):
                charge[e] += second[e, h] * inner[h]
        for _ in range(1):
            for e in range(8):
                d = x[None] - ti.Vector([ti.cos(0.7854 * e), ti.sin(0.7854 * e)])
                v[None] += dt * 0.3 * charge[e] * d / (d.norm() ** 3 + 0.05)
            v[None] *= 0.99
            x[None] += dt * v[None]
            loss[None] += dt * (x[None] - aim).norm_sqr()

    def run():
        loss[None] = 0
        begin()
        for n in range(50):
            step(n * dt)

    return run, {"first": first, "second": second}, loss, [goal]


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

    @ti.kernel
    def end():
        loss[None] = (x[1] - ti.Vector([target[0], target[1]])).norm_sqr()

    def run():
        begin()
        for n in range(60):
            step(n * dt)
        end()

    return run, {"drive": drive}, loss, [target]


@pytest.mark.parametrize("program", [wave, volume, water, billiards, robot, smoke, material, electric, rigid])
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
