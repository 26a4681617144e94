"""A block on a moving belt sticks and slips: derivatives of its way with respect to belt, friction and spring.

A spring holds the block.  While it sticks, it moves with the belt, until the spring pulls harder than the friction can
hold.  Then it slips back, until it is as fast as the belt again.  Both times are computed within the step, and the rest
of the step runs in the other phase.  So autodiff is exact, although the friction jumps.  A simulation that changes the
phase at the end of a step gives derivatives that are wrong from the first change on.

    python examples/stick_slip.py [--output stick_slip.png]

The picture needs ``python -m pip install '.[plot]'``; the figures are printed without it.
"""

import sys
from collections.abc import Sequence

import numpy as np
import plotting
import taichi as ti
from compare import Comparison, errors_of_columns, percents

from taichi_ext import Jacobian

STEPS, DT = 600, 0.02
PARAMETERS = ("belt speed", "holding friction", "sliding friction", "stiffness")
VALUES = np.array([0.3, 1.0, 0.6, 1.7])  # the mass is 1
EXACT, LATE = "phases change within a step", "phases change at the end of a step"


@ti.data_oriented
class Block:
    """The positions of the block at the end of each step."""

    def __init__(self) -> None:
        self.p = ti.field(ti.f64, shape=len(VALUES))
        self.x = ti.field(ti.f64, shape=STEPS)
        self.p.from_numpy(VALUES)

    @ti.kernel
    def move(self, is_exact: ti.template()):
        for _ in range(1):
            belt, hold, slide, stiffness = self.p[0], self.p[1], self.p[2], self.p[3]
            x = 0.0
            v = belt
            sticks = True
            for n in range(STEPS):
                left = DT
                for _part in range(2):  # before and after a change
                    force = 0.0 if sticks else slide - stiffness * x
                    time = left
                    changes = False
                    if sticks and x + left * belt > hold / stiffness:
                        changes = True
                        time = (hold / stiffness - x) / belt
                    elif not sticks and force > 0 and v + left * force > belt:
                        changes = True
                        time = (belt - v) / force
                    if ti.static(not is_exact):
                        time = left
                    x += time * v + 0.5 * time**2 * force
                    v += time * force
                    left -= time
                    if changes:
                        sticks = not sticks
                        v = belt
                self.x[n] = x


def differences(block: Block, h: float = 1e-6) -> np.ndarray:
    """Central differences of the exact simulation, shape (STEPS, parameters)."""
    columns = []
    for k in range(len(VALUES)):
        ends = []
        for sign in (1, -1):
            moved = VALUES.copy()
            moved[k] += sign * h
            block.p.from_numpy(moved)
            block.move(True)
            ends.append(block.x.to_numpy())
        columns.append((ends[0] - ends[1]) / (2 * h))
    block.p.from_numpy(VALUES)
    return np.stack(columns, axis=1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Derivatives in both ways, compared with differences."""
    output = plotting.parse(plotting.parser(__doc__.splitlines()[0], "stick_slip.png"), arguments).output
    ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
    compared = Comparison(f"A block on a belt, {STEPS} steps, by {', '.join(PARAMETERS)}")
    block = Block()
    J = {}
    for name, is_exact in ((LATE, False), (EXACT, True)):
        J[name] = Jacobian(block.move, block.p, block.x, args=(is_exact,))()
    way, expected = block.x.to_numpy(), differences(block)
    compared.numbers("d position / d parameters, at the end", J[EXACT][-1], expected[-1], rtol=1e-5)
    off = {name: errors_of_columns(found, expected) for name, found in J.items()}
    compared.holds("at all times", off[EXACT].max() < 1e-5, f"off by {off[EXACT].max():.1e}")
    compared.holds("not if phases change at the end of a step", off[LATE].max() > 0.5, f"off by {percents(off[LATE])}")
    derivatives = {name: J[name][:, 0] for name in (EXACT, LATE)}
    title, ylabels = "A block that sticks to a belt, and slips", ["position", "d position / d belt speed"]
    plotting.draw_motion(output, DT * np.arange(1, STEPS + 1), way, derivatives, title, ylabels)
    return compared.exit_code


if __name__ == "__main__":
    sys.exit(main())
