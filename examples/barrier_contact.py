"""Discs fall into a box, by implicit steps of an energy with barriers: which ones touch changes from call to call.

A step minimises |x - y|^2 / 2h^2 + g x + barriers by ``newton``, y = x + h v. Within D of contact, a pair or a wall has
the barrier -(d - D)^2 log(d/D) of its gap d (Li et al., Incremental Potential Contact), and no step goes through a gap.

    python examples/barrier_contact.py --output barrier_contact.gif
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotting
import taichi as ti
from compare import Comparison

from taichi_ext import newton

COUNT, RADIUS, REACH, STIFFNESS, GRAVITY = 36, 0.05, 0.01, 2e4, 9.81
H, STEPS = 0.01, 90

ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
x, aim = ti.Vector.field(2, ti.f64, shape=COUNT), ti.Vector.field(2, ti.f64, shape=COUNT)
energy = ti.field(ti.f64, shape=())


@ti.func
def barrier(gap):
    return -STIFFNESS * (gap - REACH) ** 2 * ti.log(gap / REACH)


@ti.kernel
def pairs():
    for i in range(COUNT):
        for j in range(i):
            gap = (x[i] - x[j]).norm() - 2 * RADIUS
            if gap < REACH:
                energy[None] += barrier(gap)


@ti.kernel
def walls_and_motion():
    for i in x:
        for gap in ti.static((x[i][0] - RADIUS, 1 - RADIUS - x[i][0], x[i][1] - RADIUS)):
            if gap < REACH:
                energy[None] += barrier(gap)
        energy[None] += (x[i] - aim[i]).norm_sqr() / (2 * H**2) + GRAVITY * x[i][1]


def potential():
    pairs()
    walls_and_motion()


def gaps(at: np.ndarray) -> np.ndarray:
    """Of all pairs, and of discs and walls."""
    i, j = np.triu_indices(COUNT, 1)
    between = np.linalg.norm(at[i] - at[j], axis=1) - 2 * RADIUS
    return np.concatenate([between, at[:, 0] - RADIUS, 1 - RADIUS - at[:, 0], at[:, 1] - RADIUS])


def largest_step(direction: np.ndarray) -> float:
    """No disc goes farther than 0.45 of the smallest gap, so that no two of them meet."""
    return 0.45 * gaps(x.to_numpy()).min() / max(float(np.linalg.norm(direction, axis=1).max()), 1e-12)


def main(arguments: Sequence[str] | None = None) -> int:
    options = plotting.parse(plotting.parser(__doc__.splitlines()[0], "barrier_contact.gif"), arguments)
    rng = np.random.default_rng(1)
    i = np.arange(COUNT)
    at = np.stack([0.2 + 0.12 * (i % 6), 0.12 + 0.13 * (i // 6)], axis=1) + rng.uniform(-0.006, 0.006, (COUNT, 2))
    v, frames, patterns, smallest, iterations = np.zeros_like(at), [at], set(), np.inf, 0
    for _ in range(STEPS):
        aim.from_numpy(at + H * v)
        x.from_numpy(at)
        result = newton(potential, x, energy, gtol=1e-4, is_valid=lambda q: gaps(q).min() > 0, max_step=largest_step)
        assert result.success, result.summary()
        now = x.to_numpy()
        v, at = 0.98 * (now - at) / H, now
        smallest, iterations = min(smallest, gaps(at).min()), iterations + len(result.history) - 1
        patterns.add((gaps(at) < REACH).tobytes())
        frames.append(at)
    compared = Comparison(f"{COUNT} discs, {STEPS} steps of {H} s, {iterations / STEPS:.1f} Newton steps for each")
    compared.holds("no discs overlap", smallest > 0, f"smallest gap {smallest:.1e}, {len(patterns)} sets of contacts")
    compared.holds("the discs have come to lie lower", at[:, 1].mean() < frames[0][:, 1].mean() - 0.05)
    if (figure := plotting.new_figure(4, 4)) is not None:
        plotting.save_film(figure, lambda axes, n: draw(axes, frames[2 * n]), STEPS // 2, options.output)
    return compared.exit_code


def draw(axes: Any, centres: np.ndarray) -> None:
    from matplotlib.collections import EllipseCollection

    axes.clear()
    size = np.full(COUNT, 2 * RADIUS)
    discs = EllipseCollection(size, size, 0 * size, units="x", offsets=centres, transOffset=axes.transData)
    axes.add_collection(discs)
    axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")


if __name__ == "__main__":
    sys.exit(main())
