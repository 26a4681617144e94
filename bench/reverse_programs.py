"""Programs for gradients: a loss of many numbers, in single kernels and in simulations whose state is overwritten."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import taichi as ti

REAL = ti.f32


@dataclass(frozen=True)
class LossProgram:
    """What runs, with its parameters and its loss.

    Attributes:
        run: a function that launches kernels.
        params: fields.
        loss: a field of one entry.
        reset: puts back what a run overwrites.
    """

    run: Callable[[], None]
    params: list[Any]
    loss: Any
    reset: Callable[[], None] = lambda: None


def _random(*fields: Any) -> list[Any]:
    rng = np.random.default_rng(0)
    for f in fields:
        f.from_numpy(rng.random(f.to_numpy().shape).astype(np.float32))
    return list(fields)


def march(n: int = 32, pixels: int = 64, steps: int = 64) -> LossProgram:
    """Rays through a volume, with trilinear interpolation."""
    density, image, loss = ti.field(REAL, (n, n, n)), ti.field(REAL, (pixels, pixels)), ti.field(REAL, ())

    @ti.func
    def interpolated(p):
        base = ti.floor(p)
        f, b, total = p - base, ti.cast(base, ti.i32), 0.0
        for o in ti.static(ti.ndrange(2, 2, 2)):
            w = 1.0
            for d in ti.static(range(3)):
                w *= f[d] if o[d] == 1 else 1 - f[d]
            total += w * density[b[0] + o[0], b[1] + o[1], b[2] + o[2]]
        return total

    @ti.kernel
    def draw():
        for i, j in image:
            a = 0.0
            for k in range(steps):
                p = ti.Vector([i + 0.5, j + 0.5, (k + 0.5) * pixels / steps]) * ((n - 3) / pixels) + 1
                a += (1 - a) * (1 - ti.exp(-interpolated(p) * 0.02))
            image[i, j] = a
            loss[None] += (a - 0.5) ** 2

    def run() -> None:
        loss[None] = 0
        draw()

    return LossProgram(run, _random(density), loss)


def network(width: int = 784, hidden: int = 64, batch: int = 32) -> LossProgram:
    """Two layers."""
    first, second = ti.field(REAL, (width, hidden)), ti.field(REAL, (hidden, 10))
    given, between, loss = ti.field(REAL, (batch, width)), ti.field(REAL, (batch, hidden)), ti.field(REAL, ())
    rng = np.random.default_rng(0)
    for f, scale in ((first, 0.05), (second, 0.1), (given, 1.0)):
        f.from_numpy((scale * rng.standard_normal(f.shape)).astype(np.float32))

    @ti.kernel
    def layer():
        for b, j in between:
            s = 0.0
            for d in range(width):
                s += given[b, d] * first[d, j]
            between[b, j] = ti.tanh(s)

    @ti.kernel
    def output():
        for b in range(batch):
            for c in range(10):
                s = 0.0
                for j in range(hidden):
                    s += between[b, j] * second[j, c]
                loss[None] += (s - c * 0.1) ** 2

    def run() -> None:
        loss[None] = 0
        layer()
        output()

    return LossProgram(run, [first, second], loss)


def wave(n: int = 64, steps: int = 50, *, is_linear: bool = True) -> LossProgram:
    """The wave equation with three states in turn; not linear: the sine-Gordon equation."""
    u, start, loss = ti.field(REAL, (3, n, n)), ti.field(REAL, (n, n)), ti.field(REAL, ())

    @ti.kernel
    def begin():
        for i, j in start:
            u[0, i, j] = start[i, j]
            u[1, i, j] = start[i, j]

    @ti.kernel
    def step(a: ti.i32, b: ti.i32, c: ti.i32):
        for i, j in start:
            if 0 < i < n - 1 and 0 < j < n - 1:
                around = u[b, i + 1, j] + u[b, i - 1, j] + u[b, i, j + 1] + u[b, i, j - 1]
                new = 2 * u[b, i, j] - u[a, i, j] + 0.1 * (around - 4 * u[b, i, j])
                if ti.static(not is_linear):
                    new -= 0.01 * ti.sin(u[b, i, j])
                u[c, i, j] = new

    @ti.kernel
    def end(c: ti.i32):
        for i, j in start:
            loss[None] += u[c, i, j] ** 2

    def run() -> None:
        loss[None] = 0
        begin()
        for t in range(steps):
            step(t % 3, (t + 1) % 3, (t + 2) % 3)
        end((steps + 1) % 3)

    return LossProgram(run, _random(start), loss)


def bodies(n: int = 1024, steps: int = 5) -> LossProgram:
    """Bodies that attract each other; positions and velocities are overwritten."""
    x, v, a, speed = (ti.Vector.field(3, REAL, n) for _ in range(4))
    mass, loss = ti.field(REAL, n), ti.field(REAL, ())
    rng = np.random.default_rng(0)
    places = rng.standard_normal((n, 3)).astype(np.float32)
    speed.from_numpy((0.1 * rng.standard_normal((n, 3))).astype(np.float32))
    mass.from_numpy((rng.random(n) / n).astype(np.float32))

    @ti.kernel
    def begin():
        for i in x:
            v[i] = speed[i]

    @ti.kernel
    def step():
        for i in x:
            f = ti.Vector.zero(REAL, 3)
            for j in range(n):
                d = x[j] - x[i]
                r = d.norm_sqr() + 0.01
                f += mass[j] * d / (r * ti.sqrt(r))
            a[i] = f
        for i in x:
            v[i] += 0.05 * a[i]
            x[i] += 0.05 * v[i]

    @ti.kernel
    def energy():
        for i in x:
            loss[None] += mass[i] * v[i].norm_sqr() + x[i].norm_sqr() / n

    def run() -> None:
        loss[None] = 0
        begin()
        for _ in range(steps):
            step()
        energy()

    return LossProgram(run, [speed, mass], loss, lambda: x.from_numpy(places))


def material(particles: int = 4096, grid: int = 64, steps: int = 100) -> LossProgram:
    """MPM: particles on a grid, whose state is overwritten."""
    dx, dt, stiffness = 1 / grid, 2e-4, 400.0
    volume = (dx * 0.5) ** 2
    x, v, speed = (ti.Vector.field(2, REAL, particles) for _ in range(3))
    affine, stretch = ti.Matrix.field(2, 2, REAL, particles), ti.field(REAL, particles)
    momentum, mass, loss = ti.Vector.field(2, REAL, (grid, grid)), ti.field(REAL, (grid, grid)), ti.field(REAL, ())
    rng = np.random.default_rng(0)
    places = (rng.random((particles, 2)) * 0.4 + 0.2).astype(np.float32)
    speed.from_numpy((0.3 * rng.standard_normal((particles, 2)) + [0.5, -1]).astype(np.float32))

    @ti.kernel
    def begin():
        for p in x:
            v[p] = speed[p]
            stretch[p] = 1
            affine[p] = ti.Matrix.zero(REAL, 2, 2)

    @ti.kernel
    def step():
        for i, j in mass:
            momentum[i, j] = ti.Vector.zero(REAL, 2)
            mass[i, j] = 0
        for p in x:
            base = int(x[p] / dx - 0.5)
            f = x[p] / dx - base
            w = [0.5 * (1.5 - f) ** 2, 0.75 - (f - 1) ** 2, 0.5 * (f - 0.5) ** 2]
            stress = -dt * 4 * stiffness * volume * (stretch[p] - 1) / dx**2
            moved = ti.Matrix([[stress, 0.0], [0.0, stress]]) + volume * affine[p]
            for i, j in ti.static(ti.ndrange(3, 3)):
                offset = ti.Vector([i, j])
                weight = w[i].x * w[j].y
                momentum[base + offset] += weight * (volume * v[p] + moved @ ((offset - f) * dx))
                mass[base + offset] += weight * volume
        for i, j in mass:
            if mass[i, j] > 0:
                momentum[i, j] /= mass[i, j]
            momentum[i, j].y -= dt * 9.8
            if (i < 3 and momentum[i, j].x < 0) or (i > grid - 3 and momentum[i, j].x > 0):
                momentum[i, j].x = 0
            if (j < 3 and momentum[i, j].y < 0) or (j > grid - 3 and momentum[i, j].y > 0):
                momentum[i, j].y = 0
        for p in x:
            base = int(x[p] / dx - 0.5)
            f = x[p] / dx - base
            w = [0.5 * (1.5 - f) ** 2, 0.75 - (f - 1) ** 2, 0.5 * (f - 0.5) ** 2]
            new, change = ti.Vector.zero(REAL, 2), ti.Matrix.zero(REAL, 2, 2)
            for i, j in ti.static(ti.ndrange(3, 3)):
                offset = ti.Vector([i, j])
                part = w[i].x * w[j].y * momentum[base + offset]
                new += part
                change += 4 * part.outer_product((offset - f) * dx) / dx**2
            v[p] = new
            x[p] += dt * v[p]
            stretch[p] *= 1 + dt * change.trace()
            affine[p] = change

    @ti.kernel
    def end():
        for p in x:
            loss[None] += (x[p] - ti.Vector([0.5, 0.3])).norm_sqr() / particles

    def run() -> None:
        loss[None] = 0
        begin()
        for _ in range(steps):
            step()
        end()

    return LossProgram(run, [speed], loss, lambda: x.from_numpy(places))


def views(count: int = 8, n: int = 128, pixels: int = 128, steps: int = 300) -> LossProgram:
    """Views of a volume of colours and opacities, accumulated in the image itself (taichi-dev/taichi issue 2241)."""
    volume = ti.field(REAL, (n, n, n, 4))
    image, target, loss = (ti.field(REAL, shape) for shape in (*[(count, 4, pixels, pixels)] * 2, ()))
    length = 3.2 / steps

    @ti.func
    def interpolated(p):
        place = (p + 1.0) * 0.5 * (n - 1)
        low = ti.floor(place)
        w, corner, total = place - low, int(low), ti.Vector([0.0, 0.0, 0.0, 0.0])
        for offset in ti.static(ti.ndrange(2, 2, 2)):
            weight, at = 1.0, ti.Vector([0, 0, 0])
            for axis in ti.static(range(3)):
                weight *= w[axis] if offset[axis] == 1 else 1.0 - w[axis]
                at[axis] = ti.math.clamp(corner[axis] + offset[axis], 0, n - 1)
            for c in ti.static(range(4)):
                total[c] += weight * volume[at.z, at.y, at.x, c]
        return total

    @ti.kernel
    def draw():
        for view, i, j in ti.ndrange(count, pixels, pixels):
            c, s = ti.cos(6.2831853 * view / count), ti.sin(6.2831853 * view / count)
            x, y = (i + 0.5) / pixels - 0.5, (j + 0.5) / pixels - 0.5
            direction = ti.Vector([c * x + s, y, c - s * x]).normalized()
            for k in range(steps):
                p = ti.Vector([-1.6 * s, -0.05, -1.6 * c]) + (k + 0.5) * length * direction
                if ti.abs(p).max() <= 1:
                    sample, opacity = interpolated(p), image[view, 3, i, j]
                    added = ti.min(opacity + 0.3 * sample[3] * length, 1.0) - opacity
                    for channel in ti.static(range(3)):
                        image[view, channel, i, j] += added * sample[channel]
                    image[view, 3, i, j] += added

    @ti.kernel
    def compare():
        for view, c, i, j in image:
            loss[None] += (image[view, c, i, j] - target[view, c, i, j]) ** 2 / (count * pixels**2)

    def run() -> None:
        loss[None] = 0
        image.fill(0)
        draw()
        compare()

    return LossProgram(run, _random(volume), loss)


PROGRAMS: dict[str, Callable[[], LossProgram]] = {
    "march": march,
    "network": network,
    "wave": wave,
    "sine-Gordon": lambda: wave(256, 500, is_linear=False),
    "MPM": material,
    "N-body": bodies,
    "views": views,
}
