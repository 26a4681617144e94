"""Hessians: the energy, its gradient and H from one launch, compared with a hand-derived kernel and with JAX.

python bench/hessian.py                      springs, tetrahedra and hexahedra; a picture and a logistic regression
python bench/hessian.py springs --wall       wall time in place of the CPU time of one thread
python bench/hessian.py --markdown docs/performance_appendix.md

By hand, blocks of 3 x 3 are added to a BSR array whose pattern is known; JAX has ``vmap(hessian)`` of one element, and
``hessian`` for dense H.
"""

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # eigenvalues of blocks by NumPy
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")

import hessian_programs
import numpy as np
import taichi as ti
from report import describe, markdown_table, write_report
from scipy import sparse
from timing import time_first, time_in_turn

from taichi_ext import Hessian, hvp, value_and_gradient

PROGRAMS = {
    "springs": hessian_programs.springs,
    "tetrahedra": hessian_programs.tetrahedra,
    "hexahedra": hessian_programs.hexahedra,
    "picture": hessian_programs.picture,
    "picture, returned": partial(hessian_programs.picture, is_returned=True),
    "logistic": hessian_programs.logistic,
}
TOLERANCE = 1e-12
PRECISE = 1e-9  # of dense sums over 10,000 and more terms, in another order
COMPARED = ["program", "entries", "kernel", "E, g and H", "by hand", "JAX", "/ by hand", "/ JAX", "first kernel, s",
            "first H, s"]  # fmt: skip
PRODUCTS = ["program", "kernel", "gradient", "`hvp`", "gradient / kernel", "`hvp` / gradient", "E, g and H, clamped",
            "sparse solve", "E, g and H / solve"]  # fmt: skip


def check(program: hessian_programs.Energy, plan: Hessian) -> int:
    """Raise where H is not symmetric to the last bit, or another one by hand or in JAX; returns its entries."""
    _, gradient, H = plan.value_gradient_and_hessian()
    if program.elements is None:
        assert np.array_equal(H, H.T)
        entries, tolerance = H, PRECISE
    else:
        assert (H != H.T).nnz == 0
        entries, tolerance = H.data, TOLERANCE
    scale = np.abs(entries).max()
    if program.by_hand is not None:
        program.by_hand()
        assert abs(H - program.matrix_by_hand()).max() <= tolerance * scale
        np.testing.assert_allclose(gradient, program.gradient.to_numpy(), atol=tolerance * scale)
    if program.jax is not None:
        _, g, found = program.jax()
        np.testing.assert_allclose(entries, found, rtol=tolerance, atol=tolerance * scale)
        np.testing.assert_allclose(gradient.reshape(-1), g, atol=tolerance * scale)
    return entries.size


def solve_of(plan: Hessian) -> Callable[[], object]:
    """The solution of a step of Newton's method by SuperLU, as ``newton`` does it, with H as it is now."""
    _, gradient, H = plan.value_gradient_and_hessian()
    matrix = (H + 1e-6 * sparse.eye_array(H.shape[0])).tocsc()
    options = {"permc_spec": "MMD_AT_PLUS_A", "diag_pivot_thresh": 0.0, "options": {"SymmetricMode": True}}
    return lambda: sparse.linalg.splu(matrix, **options).solve(gradient.reshape(-1))


def measure(name: str, clock: Callable[[], float], seconds: float) -> tuple[list[str], list[str]]:
    """A line of each table."""
    program = PROGRAMS[name]()
    kernel, x, energy = program.kernel, program.x, program.energy
    is_sparse, is_mesh = program.elements is not None, name in ("tetrahedra", "hexahedra")
    first = {"kernel": time_first(kernel, clock)}
    plan = Hessian(kernel, x, energy, format="csr" if is_sparse else None)
    first["ours"] = time_first(plan, clock)
    entries = check(program, plan)
    v = np.random.default_rng(0).standard_normal(x.to_numpy().shape)
    calls: dict[str, Callable[[], object]] = {
        "kernel": kernel,
        "ours": plan.value_gradient_and_hessian,
        "gradient": lambda: value_and_gradient(kernel, x, energy),
        "hvp": lambda: hvp(kernel, x, v, energy),
    }
    if program.by_hand is not None:
        calls["by hand"] = program.by_hand
    if program.jax is not None:
        calls["JAX"] = program.jax
    if is_sparse:
        clamped = Hessian(kernel, x, energy, format="csr", project="clamp")
        calls["clamped"] = clamped.value_gradient_and_hessian
    if is_mesh:
        calls["solve"] = solve_of(clamped)
    first = {key: first[key] if key in first else time_first(call, clock) for key, call in calls.items()}
    medians = {k: t.median * 1e3 for k, t in time_in_turn(calls, first, seconds, clock).items()}

    def times(*keys: str) -> list[str]:
        return [f"{medians[key]:.3g}" if key in medians else "" for key in keys]

    def over(key: str, other: str) -> str:
        return f"{medians[key] / medians[other]:.2f}" if key in medians and other in medians else ""

    compared = [name, str(entries), *times("kernel", "ours", "by hand", "JAX"), over("ours", "by hand"),
                over("ours", "JAX"), f"{first['kernel']:.2f}", f"{first['ours']:.2f}"]  # fmt: skip
    products = [name, *times("kernel", "gradient", "hvp"), over("gradient", "kernel"), over("hvp", "gradient"),
                *times("clamped", "solve"), over("ours", "solve")]  # fmt: skip
    return compared, products


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(PROGRAMS), help=f"default: {' '.join(PROGRAMS)}")
    parser.add_argument("--wall", action="store_true", help="wall time of all threads")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each method")
    parser.add_argument("--markdown", type=Path, help="write the tables into this file")
    options = parser.parse_args()
    clock = time.perf_counter if options.wall else time.process_time
    rows: list[tuple[list[str], list[str]]] = []
    for name in options.names:
        threads = {} if options.wall else {"cpu_max_num_threads": 1}
        ti.init(arch=ti.cpu, default_fp=ti.f64, offline_cache=False, log_level=ti.ERROR, **threads)
        rows.append(measure(name, partial(clock), options.seconds))
        print("; ".join(" ".join(row) for row in rows[-1]), flush=True)
    text = "\n\n".join(
        [
            describe("wall time, ms" if options.wall else "CPU time of one thread, ms", "float64"),
            markdown_table(COMPARED, [row for row, _ in rows]),
            markdown_table(PRODUCTS, [row for _, row in rows]),
        ]
    )
    print(text)
    if options.markdown:
        write_report(options.markdown, "hessian", text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
