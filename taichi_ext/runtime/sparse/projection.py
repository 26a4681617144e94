"""Make the blocks of an energy's elements positive semidefinite, in the memory that a kernel has written.

One kernel tests all blocks by a factorisation without pivots, LDL'. Only blocks that are not positive semidefinite
are decomposed: their negative eigenvalues are replaced by 0, or by their absolute values.
"""

# The annotations of a kernel are values that Taichi reads, such as ti.template().
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportOptionalMemberAccess=false

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal

import numpy as np

from taichi_ext import backend
from taichi_ext.differentiate.forms.entry_sites import Site
from taichi_ext.runtime.sparse.streams import Streams

Projection = Literal["clamp", "abs", "on_demand"]
ROUNDING = 1000  # tolerance of a zero pivot, in units in the last place of the largest diagonal entry


@functools.cache
def _marking(ti: ModuleType) -> Callable[..., None]:
    """A kernel that marks the blocks that are not positive semidefinite."""
    array: Any = ti.types.ndarray(ndim=3)

    @ti.kernel
    def mark(blocks: array, work: array, marks: ti.types.ndarray(dtype=ti.i32, ndim=1), rounding: ti.f64):
        for e in range(blocks.shape[0]):
            size = blocks.shape[1]
            zero = 0.0 * blocks[e, 0, 0]  # the tolerance
            for i in range(size):
                zero = ti.max(zero, ti.abs(blocks[e, i, i]) * rounding)
            for i in range(size):
                for j in range(i, size):
                    pivot = blocks[e, i, j]
                    for k in range(i):
                        pivot -= work[e, k, i] * work[e, j, k]
                    if j == i:
                        if not pivot >= -zero:
                            marks[e] = 1
                        work[e, i, i] = ti.max(pivot, 0.0)
                    elif work[e, i, i] > zero:
                        work[e, i, j] = pivot  # of D L', above the diagonal, and of L below it
                        work[e, j, i] = pivot / work[e, i, i]
                    else:  # as in the plane of a rigid motion: its row has to be zero, too
                        if not ti.abs(pivot) <= zero:
                            marks[e] = 1
                        work[e, i, j] = work[e, j, i] = 0.0
                if marks[e] == 1:
                    break

    return mark


def project(streams: Streams, way: str) -> int:
    """Project the blocks of all sites of a launch; returns the number of blocks that were not semidefinite.

    "on_demand" only counts them.
    """
    return sum(_project_site(streams, site, way) for site in streams.sites)


def _project_site(streams: Streams, site: Site, way: str) -> int:
    assert site.parts is not None
    numbers = {part: n for n, part in enumerate(sorted(set(site.parts.values())))}
    slots = streams.slots(site)
    size, count = len(numbers), slots.count
    memory, places = [], []
    for group in site.groups:
        memory.append(streams.entries_of(site, group).reshape(count, len(group.entries)))
        places.append([numbers[e.part] * size + numbers[site.parts[e.column]] for e in group.entries])
    dtype = memory[0].dtype if memory else np.float64
    if len(memory) == 1 and len(places[0]) == size * size:
        blocks = memory[0].take(np.argsort(places[0]), axis=1)
    else:
        blocks = np.zeros((count, size * size), dtype)
        for values, where in zip(memory, places, strict=True):
            blocks[:, where] = values
    blocks = blocks.reshape(count, size, size)
    marks = np.zeros(count, np.int32)
    if count and size:
        blocks[~slots.is_filled] = np.eye(size)
        with backend.suspend_following():
            _marking(backend.RUNTIME.module)(blocks, np.empty_like(blocks), marks, ROUNDING * np.finfo(dtype).eps)
    bad = np.flatnonzero(marks)
    bad = bad[np.isfinite(blocks[bad]).all(axis=(1, 2))]
    if len(bad) and way != "on_demand":
        rows = np.stack([slots.of(site.rows[part])[bad] for part in numbers], axis=1)
        fixed = semidefinite(_without_repeats(blocks[bad], rows), way).reshape(len(bad), size * size)
        for values, where in zip(memory, places, strict=True):
            values[bad] = fixed.take(where, axis=1)
    return len(bad)


def _without_repeats(blocks: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Blocks in which entries of one place are added up at the first of them: an element may name a vertex twice."""
    first = (rows[:, :, None] == rows[:, None, :]).argmax(axis=2)
    to = first[:, None, :] == np.arange(rows.shape[1])[:, None]
    is_repeated = (to.sum(axis=2) > 1).any(axis=1)
    blocks[is_repeated] = to[is_repeated] @ blocks[is_repeated] @ to[is_repeated].transpose(0, 2, 1)
    return blocks


def semidefinite(blocks: np.ndarray, way: str) -> np.ndarray:
    """Symmetric matrices with negative eigenvalues replaced by 0 ("clamp") or their absolute values ("abs")."""
    values, vectors = np.linalg.eigh(blocks)
    values = np.abs(values) if way == "abs" else np.maximum(values, 0)
    found = (vectors * values[:, None, :]) @ vectors.transpose(0, 2, 1)
    return 0.5 * (found + found.transpose(0, 2, 1))
