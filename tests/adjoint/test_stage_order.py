"""Parallel loops whose iterations store to the same entries: a run of one thread has a result, and it is what is transposed."""

import functools

import numpy as np
import pytest
import taichi as ti
from captured_warnings import all_warnings
from differences import check_jacobian, integers, outputs, read, scalars, write
from kernel_texts import kernels_of
from numpy.testing import assert_allclose
from taichi_program import share_program

from taichi_ext import UnsupportedError, jacobian, vjp
from taichi_ext.runtime.reverse import calls
from taichi_ext.runtime.reverse.boxes import Places
from taichi_ext.runtime.reverse.kernels import staged_kernel
from taichi_ext.schedule import loops

KERNELS = """
    steps:
        # the loop over steps is the parallel one
        for t in range(3):
            for i in range(x.shape[0]):
                x[i] = x[i] * w[t] + ti.cos(x[i]) * w[t + 1]
        for i in x:
            y[i] = x[i] * w[0]
    one_entry:
        for i in x:
            s[0] = s[0] * w[0] + x[i]
        for i in y:
            y[i] = s[0] * x[i]
    in_a_branch:
        for i in range(4):
            for j in range(2):
                if j == 1:
                    x[j] = ti.sin(x[j]) + x[i]
        for i in y:
            y[i] = x[i] ** 2
    by_one_iteration:
        # the condition says which iteration stores
        for i in x:
            if i == 2:
                s[0] = s[0] * w[0] + x[i]
            y[i] = w[1] * x[i]
"""


@pytest.mark.parametrize(
    ("name", "reads"), [("steps", "xw"), ("one_entry", "xws"), ("in_a_branch", "x"), ("by_one_iteration", "xw")]
)
def test_entries_that_every_iteration_stores_to(name, reads):
    share_program(default_fp=ti.f64, cpu_max_num_threads=1)
    f = {
        "x": scalars(np.linspace(0.2, 0.9, 5)),
        "w": scalars([0.8, 1.1, 0.9, 1.2]),
        "y": outputs(5),
        "s": scalars([0.4]),
    }
    k, start, u = kernels_of(KERNELS, **f)[name], [read(field) for field in f.values()], np.arange(1.0, 6.0)

    def again(call, *weights):
        for field, values in zip(f.values(), start, strict=True):
            write(field, values)
        return call(k, [f[n] for n in reads], f["y"], *weights)

    J = again(functools.partial(check_jacobian, state=[f["x"], f["s"], f["y"]]))
    for found, block in zip(again(vjp, u), J, strict=True):
        assert_allclose(found, u @ block, rtol=1e-12, atol=1e-14)


MEETING = """
    neighbours:
        for i in x:
            if 0 < i < 5:
                x[i] = 0.5 * (x[i - 1] * w[i] + x[i + 1])
    pairs:
        for i in range(5):
            d = x[i + 1] - x[i] - w[i]
            x[i] += 0.3 * d
            x[i + 1] -= 0.3 * d
    last_one: for i in w: y[i // 2] = w[i] * x[i] + y[2]
    by_a_list: for i in x: x[i] += ti.sin(x[near[i]]) * w[i]
    last_in_a_list:
        for k in w:
            y[near[k]] = w[k] * x[k]
    in_a_list_of_bytes: for k in w: y[(ti.cast(near[k], ti.u8) + 300) % 300] = w[k] * x[k]
    in_a_list_of_vectors: for k in w: y[apart[k][0]] = w[k] * x[k]
    two_ways_to_a_list:
        for k in w:
            if k < 3: y[near[k]] = w[k] * x[k]
            else: y[near[k]] = w[k]
    entries_of_a_list: for k in w: x[near[k]] = ti.sin(x[near[k]]) * w[k]
    part_of_a_list:
        # without the entries that are there again
        for k in w:
            if k < 5 and near[k] != 0:
                x[near[k]] = ti.sin(x[near[k]]) * w[k]
    perhaps_of_a_list:
        # of the conditions, a launch knows nothing
        for k in w:
            if w[k] < 1.15:
                y[near[k]] = w[k] * x[k]
    there_and_back:
        # the sum of one iteration and the store of another are to the same entry
        for i in range(3):
            y[i] = w[i] * x[i]
            y[2 - i] += x[i] * x[2 - i]
    every_other:
        for i in x:
            if i % 2 == 1 and i < 5:
                x[i] = 0.5 * (x[i - 1] * w[i] + x[i + 1])
    but_third:
        for i in range(5):
            if i % 3 == 2:
                continue
            x[i] = w[i] * ti.sin(x[i + 1])
    chosen:
        # of which a launch knows nothing
        for i in range(5):
            if near[i] > 0:
                x[i] = w[i] * ti.sin(x[i + 1])
    overlapping_pieces:
        # of three entries, two apart
        for i in range(2):
            for k in range(3):
                x[2 * i + k] = w[i] * x[2 * i + k] + w[k]
    few_rows: for i, j in ti.ndrange(2, (1, 3)): z[i, j] = w[i] * ti.sin(z[i, j]) + x[3 * i + j]
    pieces:
        for i in range(2):
            for k in range(3):
                x[3 * i + k] = w[i] * x[3 * i + k] + w[k]
    quotients: for k in range(6): i, j = k // 3, k % 3; z[i, j] = w[k] * z[i, j] + x[k]
    odd_from_even: for i in range(3): x[2 * i + 1] = w[i] * x[2 * i] + x[2 * i + 1]
    rows:
        for i in range(3):
            for t in range(1):
                z[t + 1, i] = ti.sin(z[t, i]) * w[i] + z[t + 1, i] * x[i]
    butterflies(half: ti.i32):
        for k in range(3):
            i = k // half * 2 * half + k % half
            a, b = x[i], x[i + half]
            x[i], x[i + half] = w[k] * a + b, a - w[k] * b
    strides(m: ti.i32):
        for k in range(3):
            for n in range(1, 2):
                x[k * m % 6] = w[k] * ti.sin(x[(k * m + n) % 6])
    two_apart(m: ti.i32): for k in range(3): x[k * m % 6] = w[k] * ti.sin(x[(k * m + 2) % 6])
    buffers(a: ti.i32, b: ti.i32): for i in range(1, 3): z[b % 2, i] = w[i] * z[a, i - 1] + x[i]
"""


def meeting(**fields):
    near, apart = integers([2, 0, 5, 1, 0, 2]), ti.Vector.field(2, ti.i32, 6, layout=ti.Layout.SOA)
    apart.from_numpy(np.stack([near.to_numpy()] * 2, 1))
    return kernels_of(MEETING, near=near, apart=apart, **fields)


LONGEST = loops.LEAST_ITERATIONS  # of the loops that run on one thread
OUTPUTS = {  # the output, and whether there is order if several threads share the loop, too
    "neighbours": ("x", True),
    "pairs": ("x", True),
    "last_one": ("y", False),
    "by_a_list": ("x", False),
    "last_in_a_list": ("y", False),
    "in_a_list_of_bytes": ("y", False),
    "in_a_list_of_vectors": ("y", False),
    "two_ways_to_a_list": ("y", False),
    "entries_of_a_list": ("x", False),
    "part_of_a_list": ("x", False),
    "perhaps_of_a_list": ("y", False),
    "there_and_back": ("y", False),
    "every_other": ("x", False),
    "but_third": ("x", False),
    "chosen": ("x", False),
    "overlapping_pieces": ("x", True),
}
SEPARATE = {"pieces": "x", "few_rows": "z", "quotients": "z", "odd_from_even": "x", "rows": "z", "buffers": "z"}


class Meeting:
    """A kernel, launched from the same numbers each time."""

    def __init__(self, name, threads, monkeypatch):
        share_program(default_fp=ti.f64, cpu_max_num_threads=threads)
        self.staged = []

        def watched(*args):
            self.staged.append(staged_kernel(*args))
            return self.staged[-1]

        monkeypatch.setattr(calls, "staged_kernel", watched)
        f = {
            "x": scalars(np.linspace(0.2, 0.9, 6)),
            "w": scalars([0.8, 1.1, 0.9, 1.2, 0.7, 1.3]),
            "y": outputs(6),
            "z": outputs(2, 3),
        }
        write(f["z"], np.linspace(0.3, 1.1, 6).reshape(2, 3))
        self.kernel, self.fields = meeting(**f)[name], f
        self.start = [read(field) for field in f.values()]

    def reset(self):
        for field, values in zip(self.fields.values(), self.start, strict=True):
            write(field, values)

    def gradient(self, output, args=()):
        """The derivatives of a weighted sum of outputs with respect to w and x, and the outputs."""
        self.reset()
        u = np.arange(1.0, 7.0).reshape(self.fields[output].shape)
        found = vjp(self.kernel, [self.fields["w"], self.fields["x"]], self.fields[output], u, args=args)
        return np.concatenate(found), read(self.fields[output])

    def differences(self, output, args=()):
        """The same by central differences."""
        u, found = np.arange(1.0, 7.0).reshape(self.fields[output].shape), []
        for field in (self.fields["w"], self.fields["x"]):
            for n in range(6):
                sums = []
                for step in (1e-5, -1e-5):
                    self.reset()
                    write(field, read(field) + step * np.eye(6)[n])
                    self.kernel(*args)
                    sums.append(np.vdot(u, read(self.fields[output])))
                found.append((sums[0] - sums[1]) / 2e-5)
        return np.array(found)


@pytest.mark.mostly_sweep("last_one", "last_in_a_list")
@pytest.mark.parametrize("name", OUTPUTS)
def test_iterations_that_meet(name, monkeypatch):
    output, is_ordered = OUTPUTS[name]
    program = Meeting(name, 1, monkeypatch)
    gradient, values = program.gradient(output)
    assert program.staged[0].staged.stages[0].loop is None
    assert_allclose(gradient, program.differences(output), rtol=1e-7, atol=1e-8)
    for length in (LONGEST, 0):
        monkeypatch.setattr(loops, "LEAST_ITERATIONS", length)
        program = Meeting(name, 2, monkeypatch)
        if length or is_ordered:
            again, values_again = program.gradient(output)
            assert_allclose(again, gradient, rtol=1e-12, atol=1e-14)
            assert_allclose(values_again, values, rtol=1e-14)
    if is_ordered:
        return
    with all_warnings() as found:
        program.gradient(output)
    assert program.staged[0].staged.stages[0].loop is not None
    compared = [frozenset((pair.first, pair.second)) for pair in program.staged[0].staged.order.unsure]
    assert len(set(compared)) == len(compared)
    texts = [str(w.message) for w in found if w.filename.startswith("<kernels")]
    is_warned = any("may read or replace entries of" in text for text in texts)
    assert is_warned == (name not in ("every_other", "part_of_a_list", "perhaps_of_a_list"))


@pytest.mark.mostly_sweep("pieces", "few_rows", "buffers")
@pytest.mark.parametrize("name", SEPARATE)
def test_iterations_that_do_not_meet(name, monkeypatch):
    output, args = SEPARATE[name], (0, 1) * (name == "buffers")
    for threads in (1, 2) if name == "pieces" else (2,):
        program = Meeting(name, threads, monkeypatch)
        gradient, _ = program.gradient(output, args)
        assert program.staged[0].staged.stages[0].loop is not None
        assert_allclose(gradient, program.differences(output, args), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize(
    ("name", "arguments", "is_warned"),
    [("butterflies", (1, 3), False), ("strides", (2,), False), ("strides", (2, 1), True), ("two_apart", (1,), True)],
)
def test_indices_of_a_launch_are_compared(name, arguments, is_warned, monkeypatch):
    """With several threads, where the kernel alone does not show whether iterations read what others store."""
    monkeypatch.setattr(loops, "LEAST_ITERATIONS", 0)
    program = Meeting(name, 2, monkeypatch)
    with all_warnings() as found:
        for n in arguments:
            gradient, _ = program.gradient("x", (n,))
            if n != 1 or not is_warned:
                assert_allclose(gradient, program.differences("x", (n,)), rtol=1e-7, atol=1e-8)
    assert sum("may read or replace entries of x" in str(w.message) for w in found) == is_warned


def test_indices_are_compared_once_for_the_arguments_that_they_read(monkeypatch):
    """A red-black loop that is given its step, too: once for each colour, not for each step."""
    share_program(default_fp=ti.f64, cpu_max_num_threads=2)
    monkeypatch.setattr(loops, "LEAST_ITERATIONS", 0)
    compared, meet = [], Places.meet

    def noted(places, pair, arguments, extents):
        compared.append(tuple(arguments.values()))
        return meet(places, pair, arguments, extents)

    monkeypatch.setattr(Places, "meet", noted)
    x, y = scalars(np.linspace(0.3, 0.9, 8)), outputs(8)

    @ti.kernel
    def relax(step: ti.i32, colour: ti.i32):
        for i in y:
            side = (i + colour) % 2
            if side == 0 and 0 < i < 7:
                y[i] += ti.sin(y[i - 1] + y[i + 1]) / (step + 1) + x[i]

    def run():
        y.fill(0)
        for step in range(3):
            relax(step, 0)
            relax(step, 1)

    u = np.arange(1.0, 9)
    assert_allclose(vjp(run, x, y, u), u @ jacobian(run, x, y, mode="forward"), rtol=1e-12, atol=1e-14)
    assert {colour for _, colour in compared} == {0, 1}
    assert {step for step, _ in compared} == {0}


def test_arguments_that_let_iterations_meet(monkeypatch):
    """The launch is refused an adjoint, and its gradient comes from columns of J."""
    program = Meeting("buffers", 1, monkeypatch)
    for args in ((0, 1), (0, 2), (0, 1)):
        gradient, _ = program.gradient("z", args)
        assert_allclose(gradient, program.differences("z", args), rtol=1e-7, atol=1e-8)
    program.reset()
    with pytest.raises(UnsupportedError, match=r"z\[b % 2, i\] = (.|\n)*store to entries of z that others read"):
        jacobian(program.kernel, program.fields["w"], program.fields["z"], args=(1, 3), mode="reverse")


def test_additions_of_one_thread():
    """They are no atomics then; what is added is rounded to the type of the entry first, as Taichi does."""
    share_program(default_fp=ti.f64, cpu_max_num_threads=1)
    x, total = scalars(np.linspace(-2.3, 2.9, 8)), outputs(3)
    count, single, mask = ti.field(ti.i32, 3), ti.field(ti.f32, 3), ti.field(ti.i32, 3)

    @ti.kernel
    def sums():
        for i in x:
            total[i % 3] += ti.sin(x[i])
            count[i % 3] += 2.5 * x[i]
            single[i % 3] -= x[i] ** 2
            mask[i % 3] |= i

    kept = (total, count, single, mask)
    sums()
    plain = [read(f) for f in kept]
    for f in kept:
        f.fill(0)
    found = vjp(sums, x, total, np.arange(1.0, 4.0))
    assert_allclose(found, np.cos(read(x)) * np.arange(1.0, 4.0)[np.arange(8) % 3], rtol=1e-12)
    for f, values in zip(kept, plain, strict=True):
        np.testing.assert_array_equal(read(f), values)


def test_pieces_of_a_long_row_for_many_threads():
    """The product of the pieces' number and the row's length has more than 32 bits."""
    count = 270_000
    share_program(default_fp=ti.f64, cpu_max_num_threads=64)
    x, y, seen = scalars([0.7]), outputs(1, count), ti.field(ti.i32, ())

    @ti.kernel
    def powers():
        for i, j in y:
            ti.atomic_add(seen[None], 1)
            power = 1.0
            for _ in range(j % 3):
                power *= x[0]
            y[i, j] = power

    expected = np.array([0.0, 1.0, 1.4])[np.arange(count) % 3]
    found = jacobian(powers, x, y, mode="forward")
    assert_allclose(found.reshape(-1), expected, rtol=1e-12)
    assert_allclose(vjp(powers, x, y, np.ones((1, count))), expected.sum(), rtol=1e-9)
    assert seen[None] == 2 * count
