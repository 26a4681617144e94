"""Products with J and normal equations: their time relative to the kernel alone, and their memory.

python bench/products.py                 every program
python bench/products.py springs image   the programs of these names
python bench/products.py --cpu-time      CPU time of one thread, for a machine that is in use
"""

import argparse
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import taichi as ti
from report import describe, markdown_table
from sparse_programs import SparseProgram, make_bundle_adjustment, make_springs
from timing import time_first, time_in_turn

from taichi_ext import Jacobian, jvp, normal_equations, vjp

TOLERANCE = 1e-9
VECTORS = 16  # tangents at once


def make_image(width: int = 320, height: int = 240, blobs: int = 75) -> SparseProgram:
    """Residuals of a picture that is a sum of blobs, each with a place, a width and a height: a dense J."""
    p, r = ti.Vector.field(4, ti.f64, blobs), ti.field(ti.f64, (height, width))
    p.from_numpy(np.random.default_rng(0).uniform(0.1, 0.9, (blobs, 4)))

    @ti.kernel
    def kernel():
        for i, j in r:
            x, y = (j + 0.5) / width, (i + 0.5) / height
            total = -ti.sin(9 * x) * y
            for k in range(blobs):
                dx, dy = x - p[k][0], y - p[k][1]
                total += p[k][3] * ti.exp(-(dx * dx + dy * dy) / (p[k][2] * p[k][2]))
            r[i, j] = total

    return SparseProgram(kernel, [p], [r])


# by name: the program, whether its J is sparse, which products are measured
PROGRAMS: dict[str, tuple[Callable[[], SparseProgram], bool, tuple[str, ...]]] = {
    "ba1": (make_bundle_adjustment, True, ("jvp", "several", "vjp", "J", "normal equations")),
    "springs": (partial(make_springs, 1000, 4500), True, ("jvp", "several", "vjp", "J", "normal equations")),
    "image": (make_image, False, ("jvp", "vjp", "normal equations")),
}


def vectors_of(program: SparseProgram) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Several tangents of the parameters, and cotangents of the outputs."""
    rng = np.random.default_rng(1)
    tangents = [rng.standard_normal((VECTORS, *p.to_numpy().shape)) for p in program.params]
    return tangents, [rng.standard_normal(r.to_numpy().shape) for r in program.outputs]


def calls_of(program: SparseProgram, is_sparse: bool) -> dict[str, Callable[[], Any]]:
    """The products by name."""
    kernel, params, outputs = program.kernel, program.params, program.outputs
    tangents, cotangents = vectors_of(program)
    return {
        "jvp": partial(jvp, kernel, params, [t[0] for t in tangents], outputs),
        "several": partial(jvp, kernel, params, tangents, outputs),
        "vjp": partial(vjp, kernel, params, outputs, cotangents),
        "normal equations": partial(normal_equations, kernel, params, outputs, format="csr" if is_sparse else None),
    }


def check(program: SparseProgram, calls: dict[str, Callable[[], Any]], names: tuple[str, ...]) -> None:
    """Raise where ``vjp`` is not ``jvp`` transposed, or the normal equations are not those of J."""
    (tangents, cotangents), along = vectors_of(program), calls["jvp"]()
    first = [t[0] for t in tangents]
    if "vjp" in names:
        left, right = _product(cotangents, along), _product(first, calls["vjp"]())
        np.testing.assert_allclose(left, right, rtol=TOLERANCE)
    flat = np.concatenate([t.reshape(-1) for t in first])
    np.testing.assert_allclose(flat @ (calls["normal equations"]().JtJ @ flat), _product(along, along), rtol=TOLERANCE)


def _product(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    return sum(float(np.vdot(x, y)) for x, y in zip(a, b, strict=True))


def measure(name: str, clock: Callable[[], float], seconds: float) -> list[str]:
    """One line of the table."""
    make, is_sparse, names = PROGRAMS[name]
    program = make()
    calls = calls_of(program, is_sparse)
    check(program, calls, names)
    tracemalloc.start()
    calls["normal equations"]()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    calls["J"] = Jacobian(program.kernel, program.params, program.outputs, format="csr" if is_sparse else None)
    timed: dict[str, Callable[[], Any]] = {"kernel": program.kernel, **{n: calls[n] for n in names}}
    first = {n: time_first(call, clock) for n, call in timed.items()}
    timings = time_in_turn(timed, first, seconds, clock)
    columns = ("kernel", "jvp", "several", "vjp", "J", "normal equations")
    shown = [f"{timings[c].median * 1e3:.2f}" if c in timings else "" for c in columns]
    sizes = [sum(f.to_numpy().size for f in fields) for fields in (program.outputs, program.params)]
    return [name, f"{sizes[0]} x {sizes[1]}", *shown, f"{peak / 2**20:.0f}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(PROGRAMS), help="default: all")
    parser.add_argument("--cpu-time", action="store_true", help="CPU time of one thread")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each method")
    options = parser.parse_args()
    clock = time.process_time if options.cpu_time else time.perf_counter
    threads = {"cpu_max_num_threads": 1} if options.cpu_time else {}
    rows = []
    for name in options.names:
        ti.init(arch=ti.cpu, default_fp=ti.f64, offline_cache=False, log_level=ti.ERROR, **threads)
        rows.append(measure(name, clock, options.seconds))
        print(" ".join(rows[-1]), flush=True)
    head = ["program", "J", "kernel", "jvp", f"{VECTORS} at once", "vjp", "J itself", "normal equations", "peak MiB"]
    print(describe("CPU time, ms" if options.cpu_time else "wall time, ms", "float64"))
    print(markdown_table(head, rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
