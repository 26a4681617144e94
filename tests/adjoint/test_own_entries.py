"""Entries that an iteration owns are locals of its adjoint: state in place, and loops in which they cannot be."""

import numpy as np
import pytest
import taichi as ti
from differences import outputs, read, scalars, vectors, write
from kernel_texts import kernel_of, kernels_of, names_of
from numpy.testing import assert_allclose

from taichi_ext import Jacobian, jacobian, vjp

pytestmark = pytest.mark.usefixtures("ti64")
N = 600  # more than one thread runs


def field(*shape, components=0):
    random = np.random.default_rng(len(shape))
    return (
        vectors(random.uniform(0.3, 1.4, (*shape, components)))
        if components
        else scalars(random.uniform(0.3, 1.4, shape))
    )


def check(run, param, output):
    """The adjoint against the forward engine, and the state that both leave against a plain run."""
    fields, found, states = {param, output}, {}, []
    before = {f: read(f) for f in fields}

    def again():
        for f in fields:
            write(f, before[f])

    again()
    run()
    plain = read(output)
    row = np.random.default_rng(5).standard_normal(plain.shape)
    for mode in ("reverse", "forward"):
        again()
        if mode == "reverse":
            found[mode] = vjp(run, param, output, row)
        else:
            found[mode] = np.tensordot(row, jacobian(run, param, output, mode=mode), plain.ndim)
        states.append(read(output))
    assert np.abs(found["forward"]).max() > 0
    assert_allclose(found["reverse"], found["forward"], rtol=1e-9, atol=1e-12)
    assert_allclose(states, [plain, plain], rtol=1e-12)


def test_state_in_place_with_branches_and_loops_needs_no_tape():
    v = field(N, components=2)

    @ti.kernel
    def run():
        for i in v:
            v[i] *= v[i].y - 0.8
            if v[i].x < 0:
                v[i].x = 0.25 * v[i].x * v[i].y
            for _ in range(3):
                v[i].y += ti.sin(v[i].x * v[i].y)
            if i % 3 == 0 and v[i].y > 0.5:
                v[i].y = 0

    check(run, v, v)
    loss = outputs()
    total = kernel_of("for i in v: loss[None] += v[i].x * v[i].y", v=v, loss=loss)
    plan = Jacobian(lambda: (run(), total()), v, loss, mode="reverse")
    plan()
    assert "own_v" in plan.source and "tape_reals" not in plan.source


KERNELS = """
    at_other_places:
        for i in range(N):
            x[i] *= x[i]
            if x[i] > 0.5:
                x[i + N] = x[i] * x[i + N]
            x[i] += x[i + N]
    beyond_the_container:
        for i in range(3 * N):
            if i < 2 * N:
                x[i] *= x[i]
                x[i] += 0.5 * x[i] ** 2
    stored_before_an_early_end:
        for i in x:
            x[i] *= x[i]
            if x[i] > 0.6:
                continue
            x[i] += ti.exp(x[i])
    transposed:
        for i, j in square:
            if i < j:
                square[i, j] *= square[j, i]
                square[j, i] += square[i, j]
    constant_components:
        for i in range(N):
            rows[i, 0] *= rows[i, 1]
            if rows[i, 0] > 0.7:
                rows[i, 2] -= rows[i, 0] ** 2
            rows[i, 0] += rows[i, 2]
    varying_components:
        for i in range(N):
            for k in range(3):
                rows[i, k] *= rows[i, (k + 1) % 3]
            rows[i, 1] += rows[i, 0] * rows[i, 2]
    computed_components:
        for i in range(N):
            rows[i, 1] *= rows[i, 2]
            for k in range(3):
                rows[i, 2 * k % 3] *= rows[i, (k + 1) % 3]
            rows[i, 1] += rows[i, 0] * rows[i, 2]
"""


@pytest.mark.mostly_sweep("stored_before_an_early_end", "varying_components", "computed_components")
@pytest.mark.parametrize("name", names_of(KERNELS))
def test_entries_of_one_field(name):
    fields = {"x": field(2 * N), "square": field(25, 25), "rows": field(N, 3)}
    changed = fields["square" if name == "transposed" else "rows" if name.endswith("components") else "x"]
    check(kernels_of(KERNELS, **fields, N=N)[name], changed, changed)


def test_entries_of_several_iterations_are_shared():
    x, s = field(30, 40), field(30)
    run = kernel_of("for i, j in x: s[i] += x[i, j] ** 2; s[i] -= x[i, j] ** 3", x=x, s=s)
    check(run, x, s)


@pytest.mark.sweep
def test_cells_that_a_store_activates():
    x, y = field(N), ti.field(ti.f64)
    ti.root.bitmasked(ti.i, N).place(y)
    total = outputs()

    @ti.kernel
    def store():
        for i in x:
            if i % 3 == 1:
                y[i] = x[i] ** 2
                y[i] *= 1 + y[i]

    add = kernel_of("for i in y: total[None] += y[i] + 1", y=y, total=total)

    def run():
        ti.deactivate_all_snodes()
        total[None] = 0
        store()
        add()

    check(run, x, total)
