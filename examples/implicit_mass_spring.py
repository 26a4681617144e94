"""Taichi's own implicit cloth, from its energies alone: the same steps, without matrices that are derived by hand.

A step solves (M + h R'' + h^2 V'') dv = -h (V' + h V'' v): V is the energy of springs, weight and held corners, and R
that of the dampers between velocities. Taichi's example derives forces and matrices in 110 lines.

    python examples/implicit_mass_spring.py --output implicit_mass_spring.gif
"""

import inspect
import runpy
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import plotting
import scipy.sparse as sparse
import taichi as ti
from compare import Comparison
from scipy.sparse.linalg import spsolve
from taichi.examples.simulation import implicit_mass_spring

from taichi_ext import Hessian

CELLS, H, STEPS = 5, 0.01, 150
STIFFNESS, DAMPING, HELD, GRAVITY = 1000.0, 0.5, 1.0e5, -2.0
BY_HAND = "init_mass_sp clear_force compute_force compute_Jacobians assemble_K assemble_D copy_to compute_b update"


@ti.data_oriented
class Cloth:
    """The same cloth: where its nodes begin, and its springs, are those of Taichi's."""

    def __init__(self, other: Any) -> None:
        count, springs = other.NV, other.spring.to_numpy()
        self.x, self.v, self.start = (ti.Vector.field(2, ti.f64, count) for _ in range(3))
        self.ends, self.rest = ti.Vector.field(2, ti.i32, len(springs)), ti.field(ti.f64, len(springs))
        self.held = ti.field(ti.i32, 2)
        self.energy, self.dissipation = ti.field(ti.f64, ()), ti.field(ti.f64, ())
        for ours, theirs in ((self.x, other.pos), (self.start, other.pos), (self.rest, other.rest_len)):
            ours.from_numpy(theirs.to_numpy())
        self.ends.from_numpy(springs)
        self.held.from_numpy(np.array(other.fix_vertex, np.int32))
        self.elastic = Hessian(self.potential, self.x, self.energy, format="csr")
        self.damping = Hessian(self.dampers, self.v, self.dissipation, format="csr")

    @ti.kernel
    def potential(self):
        for e in self.ends:
            stretch = (self.x[self.ends[e][0]] - self.x[self.ends[e][1]]).norm() - self.rest[e]
            self.energy[None] += 0.5 * STIFFNESS * stretch**2
        for i in self.x:
            self.energy[None] -= GRAVITY * self.x[i][1]
        for k in self.held:
            self.energy[None] += 0.5 * HELD * (self.x[self.held[k]] - self.start[self.held[k]]).norm_sqr()

    @ti.kernel
    def dampers(self):
        for e in self.ends:
            self.dissipation[None] += 0.5 * DAMPING * (self.v[self.ends[e][0]] - self.v[self.ends[e][1]]).norm_sqr()

    def update(self, h: float) -> None:
        """One step; all masses are 1."""
        _, slope, stiffness = self.elastic.value_gradient_and_hessian()
        v = self.v.to_numpy().ravel()
        matrix = sparse.eye_array(len(v)) + h * self.damping() + h**2 * stiffness
        v += spsolve(matrix.tocsc(), -h * (slope.ravel() + h * (stiffness @ v)))
        self.v.from_numpy(v.reshape(-1, 2))
        self.x.from_numpy(self.x.to_numpy() + h * v.reshape(-1, 2))


def taichis_cloth() -> Any:
    """The class of Taichi's example, in double precision."""
    text = inspect.getsource(implicit_mass_spring).replace("ti.f32", "ti.f64")
    text = text.replace("max_num_triplets=10000)", "max_num_triplets=10000, dtype=ti.f64)")
    text = text.replace('solver_type="LDLT")', 'solver_type="LDLT", dtype=ti.f64)')
    text = text.replace("h**2 * K\n", "h**2 * K\n        A.dtype = ti.f64\n")  # which differences of matrices lack
    path = Path(tempfile.mkdtemp(), "in_double_precision.py")
    path.write_text(text, encoding="utf-8")
    return runpy.run_path(str(path))["Cloth"]


def lines(owner: Any, names: str) -> int:
    return sum(len(inspect.getsource(getattr(owner, name)).splitlines()) for name in names.split())


def main(arguments: Sequence[str] | None = None) -> int:
    options = plotting.parse(plotting.parser(__doc__.splitlines()[0], "implicit_mass_spring.gif"), arguments)
    ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
    theirs = taichis_cloth()(CELLS)
    ours, frames, worst = Cloth(theirs), [], 0.0
    for _ in range(STEPS):
        theirs.update(H)
        ours.update(H)
        frames.append(ours.x.to_numpy())
        worst = max(worst, float(np.abs(frames[-1] - theirs.pos.to_numpy()).max()))
    compared = Comparison(f"A cloth of {CELLS} x {CELLS} cells, {len(ours.rest.to_numpy())} springs, {STEPS} steps")
    compared.holds("positions are those of Taichi's example", worst < 1e-10, f"largest difference {worst:.1e}")
    by_hand, from_energies = lines(implicit_mass_spring.Cloth, BY_HAND), lines(Cloth, "potential dampers update")
    compared.holds("fewer lines", from_energies < by_hand / 3, f"{from_energies} lines in place of {by_hand}")
    if (figure := plotting.new_figure(5, 5)) is not None:
        plotting.save_film(figure, lambda axes, n: draw(axes, frames[3 * n], ours), STEPS // 3, options.output)
    return compared.exit_code


def draw(axes: Any, points: np.ndarray, cloth: Cloth) -> None:
    axes.clear()
    axes.plot(*points[cloth.ends.to_numpy()].transpose(2, 1, 0), color=plotting.BLUE, linewidth=1)
    axes.set(xlim=(0.1, 0.9), ylim=(-0.1, 0.9), aspect="equal")


if __name__ == "__main__":
    sys.exit(main())
