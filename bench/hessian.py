"""Sparse Hessians: the energy, its gradient and H from one launch, compared with a hand-derived kernel and with JAX.

python bench/hessian.py                      springs, tetrahedra and hexahedra
python bench/hessian.py springs --wall       wall time in place of the CPU time of one thread

By hand, blocks of 3 x 3 are added to a BSR array whose pattern is known; JAX has ``vmap(hessian)`` of one element.
"""

import argparse
import os
import time
from collections.abc import Callable
from functools import partial

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")

import hessian_programs
import numpy as np
import taichi as ti
from report import describe, markdown_table
from timing import time_first, time_in_turn

from taichi_ext import Hessian

PROGRAMS = {
    "springs": hessian_programs.springs,
    "tetrahedra": hessian_programs.tetrahedra,
    "hexahedra": hessian_programs.hexahedra,
}
TOLERANCE = 1e-12


def check(program: hessian_programs.Energy, plan: Hessian) -> int:
    """Raise where H is not symmetric to the last bit, or another one by hand or in JAX; returns its entries."""
    _, gradient, H = plan.value_gradient_and_hessian()
    assert (H != H.T).nnz == 0
    scale = np.abs(H.data).max()
    if program.by_hand is not None:
        program.by_hand()
        assert abs(H - program.matrix_by_hand()).max() <= TOLERANCE * scale
        np.testing.assert_allclose(gradient, program.gradient.to_numpy(), atol=TOLERANCE * scale)
    if program.jax is not None:
        _, g, entries = program.jax()
        assert len(entries) == H.nnz
        np.testing.assert_allclose(H.data, entries, rtol=TOLERANCE, atol=TOLERANCE * scale)
        np.testing.assert_allclose(gradient.reshape(-1), g, atol=TOLERANCE * scale)
    return H.nnz


def measure(name: str, clock: Callable[[], float], seconds: float) -> list[str]:
    """One line of the table."""
    program = PROGRAMS[name]()
    calls: dict[str, Callable[[], object]] = {"kernel": program.kernel}
    first = {"kernel": time_first(program.kernel, clock)}
    plan = Hessian(program.kernel, program.x, program.energy, format="csr")
    first["ours"] = time_first(plan, clock)
    entries = check(program, plan)
    calls["ours"] = plan.value_gradient_and_hessian
    if program.by_hand is not None:
        calls["by hand"] = program.by_hand
    if program.jax is not None:
        calls["JAX"] = program.jax
    first = {key: first.get(key, 0.0) for key in calls}
    timings = time_in_turn(calls, first, seconds, clock)
    shown = [f"{timings[key].median * 1e3:.2f}" if key in calls else "" for key in ("kernel", "ours", "by hand", "JAX")]
    ratios = [
        f"{timings['ours'].median / timings[key].median:.2f}" if key in calls else "" for key in ("by hand", "JAX")
    ]
    return [name, str(entries), *shown, *ratios, f"{first['kernel']:.2f}", f"{first['ours']:.2f}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(PROGRAMS), help=f"default: {' '.join(PROGRAMS)}")
    parser.add_argument("--wall", action="store_true", help="wall time of all threads")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each method")
    options = parser.parse_args()
    clock = time.perf_counter if options.wall else time.process_time
    rows = []
    for name in options.names:
        threads = {} if options.wall else {"cpu_max_num_threads": 1}
        ti.init(arch=ti.cpu, default_fp=ti.f64, offline_cache=False, log_level=ti.ERROR, **threads)
        rows.append(measure(name, partial(clock), options.seconds))
        print(" ".join(rows[-1]), flush=True)
    head = ["program", "entries", "kernel", "E, g and H", "by hand", "JAX", "/ by hand", "/ JAX", "first kernel, s",
            "first H, s"]  # fmt: skip
    print(describe("wall time, ms" if options.wall else "CPU time of one thread, ms", "float64"))
    print(markdown_table(head, rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
