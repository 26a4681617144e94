"""Sparse Jacobians: bundle adjustment, a hand, springs and a fluid; also the kernel alone and a hand-derived one.

python bench/sparse.py                       bundle adjustment, springs and a fluid
python bench/sparse.py ba5 springs           the programs of these names
python bench/sparse.py --hand FOLDER         hand tracking as well, with ADBench's data in that folder
python bench/sparse.py --cpu-time            CPU time of one thread, for a machine that is in use
"""

import argparse
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import sparse_models
import taichi as ti
from hand_derived import make_hand
from report import describe, markdown_table
from scipy import sparse
from sparse_programs import BA_SIZES, SparseProgram, make_bundle_adjustment, make_fluid, make_springs
from timing import time_first, time_in_turn

from taichi_ext import Jacobian

HANDS = ("hand1_t26_c100", "hand5_t26_c800")
TOLERANCE = 1e-10


def bytes_of(blocks: list) -> int:
    """Bytes of CSR arrays."""
    return sum(a.nbytes for row in blocks for b in row for a in (b.data, b.indices, b.indptr))


def peak_memory(call: Callable[[], object]) -> int:
    """Bytes that NumPy allocates at most during a call."""
    tracemalloc.start()
    call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def check(program: SparseProgram, blocks: list) -> None:
    """Raise where the kernel that is derived by hand gives something else."""
    if program.by_hand is None:
        return
    program.by_hand(*program.arrays)
    if not program.blocks:  # blocks of a bsr_array
        found = blocks[0][0].tobsr((3, 3))
        found.sort_indices()
        np.testing.assert_allclose(found.data.reshape(-1), program.arrays[0].reshape(-1), atol=TOLERANCE)
        return
    for (row, column), values, columns in zip(program.blocks, *(program.arrays[k::2] for k in (0, 1)), strict=True):
        block = blocks[row][column]
        scale = np.abs(values).max()
        np.testing.assert_allclose(block.data, values.reshape(-1), atol=TOLERANCE * scale, rtol=TOLERANCE)
        np.testing.assert_array_equal(block.indices, columns.reshape(-1))


def check_model(blocks: list, found: list[np.ndarray]) -> None:
    """Raise where the same Jacobian in JAX has other entries; they are given block by block."""
    filled = [b for row in blocks for b in row if b.nnz]
    for block, entries in zip(filled, found, strict=True):
        data, entries = block.data, entries[entries != 0] if entries.size != block.nnz else entries
        if entries.ndim == 3 and entries.shape[1:] == (3, 3) and len(filled) == 1:  # blocks of a bsr_array
            of_blocks = block.tobsr((3, 3))
            of_blocks.sort_indices()
            data = of_blocks.data.reshape(-1)
        np.testing.assert_allclose(data, entries.reshape(-1), rtol=TOLERANCE, atol=TOLERANCE * np.abs(data).max())


def check_asdex(blocks: list, found: Any) -> None:
    """Raise where asdex finds another pattern, or other entries."""
    ours, theirs = (
        sparse.block_array(blocks).tocsr(),
        sparse.coo_array((found.data, found.indices.T), found.shape).tocsr(),
    )
    assert ours.nnz == theirs.nnz, f"{ours.nnz} entries; asdex has {theirs.nnz}"
    np.testing.assert_array_equal(ours.indptr, theirs.indptr)
    ours.sort_indices()
    theirs.sort_indices()
    np.testing.assert_array_equal(ours.indices, theirs.indices)
    np.testing.assert_allclose(ours.data, theirs.data, rtol=TOLERANCE, atol=TOLERANCE * np.abs(ours.data).max())


def measure(name: str, program: SparseProgram, clock: Callable[[], float], seconds: float) -> list[str]:
    """One line of the table."""
    plan = Jacobian(program.kernel, program.params, program.outputs, format="csr")
    first_kernel = time_first(program.kernel, clock)
    first_peak = peak_memory(plan)
    blocks = plan()
    check(program, blocks)
    calls: dict[str, Callable[[], object]] = {"kernel": program.kernel, "ours": plan}
    if program.by_hand is not None:
        calls["by hand"] = partial(program.by_hand, *program.arrays)
    model = sparse_models.jax_model(name, program)
    if model is not None:
        check_model(blocks, [np.asarray(entries) for entries in sparse_models.leaves(model())])
        calls["JAX"] = model
    coloured = sparse_models.asdex_model(name, program)
    if coloured is not None:
        check_asdex(blocks, coloured())
        calls["asdex"] = coloured
    first = {key: time_first(call, clock) for key, call in calls.items()}
    timings = time_in_turn(calls, {**first, "kernel": first_kernel}, seconds, clock)
    columns = ("kernel", "ours", "by hand", "JAX", "asdex")
    shown = [f"{timings[key].median * 1e3:.2f}" if key in calls else "" for key in columns]
    entries, size = sum(b.nnz for row in blocks for b in row), bytes_of(blocks)
    peaks = f"{first_peak / size:.1f}, {peak_memory(plan) / size:.1f}"
    ratio = timings["ours"].median / timings["kernel"].median
    return [name, str(entries), *shown, f"{ratio:.1f}", f"{size / 2**20:.2f}", peaks]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", default=["ba1", "ba5", "springs", "fluid"], help="default: ba1 ba5 springs fluid"
    )
    parser.add_argument("--hand", type=Path, metavar="FOLDER", help="ADBench's data of the hand")
    parser.add_argument("--cpu-time", action="store_true", help="CPU time of one thread")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each method")
    options = parser.parse_args()
    clock = time.process_time if options.cpu_time else time.perf_counter
    threads = {"cpu_max_num_threads": 1} if options.cpu_time else {}
    makers: dict[str, Callable[[], SparseProgram]] = {n: partial(make_bundle_adjustment, n) for n in BA_SIZES}
    makers |= {"springs": make_springs, "fluid": make_fluid}
    if options.hand is not None:
        makers.update({n: partial(make_hand, n, options.hand) for n in HANDS})
    rows = []
    for name in dict.fromkeys([*options.names, *(HANDS if options.hand is not None else ())]):
        ti.init(arch=ti.cpu, default_fp=ti.f64, offline_cache=False, log_level=ti.ERROR, **threads)
        rows.append(measure(name, makers[name](), clock, options.seconds))
        print(" ".join(rows[-1]), flush=True)
    methods = ["kernel", "taichi_ext", "by hand", "JAX", "asdex"]
    head = ["program", "entries", *methods, "over kernel", "CSR MiB", "peak / CSR (first call, later ones)"]
    print(describe("CPU time, ms" if options.cpu_time else "wall time, ms", "float64"))
    print(markdown_table(head, rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
