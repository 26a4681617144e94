"""Parallel loops whose order matters to the derivative: they run in one thread, whatever they go over."""

import textwrap

import numpy as np
import pytest
import taichi as ti
from kernel_texts import kernels_of, names_of
from numpy.testing import assert_allclose
from printed_programs import text
from taichi_program import end_program, initialise

from taichi_ext import Jacobian, UnsupportedError, backend, jacobian
from taichi_ext.analysis.loops import Extent
from taichi_ext.differentiate.transform.forward import serialized
from taichi_ext.program import F64, I32, Assign, Const, Container, For, Load, Local, Program, Read

pytestmark = pytest.mark.cpu_only("the threads of the CPU, and their number")

N = 1 << 16  # enough for Taichi to give each thread a share
P = 3


@pytest.fixture(scope="module", autouse=True)
def eight_threads():
    """More threads than the other tests have."""
    end_program()
    ti.init(arch=ti.cpu, offline_cache=False, log_level=ti.ERROR, cpu_max_num_threads=8, default_fp=ti.f64)
    yield
    initialise()
    end_program()


def test_a_loop_over_a_field_as_one_over_a_number():
    x = Container("x", F64, 2, shape=(3, 40))
    i, j = Local("i", I32, kind="loop"), Local("j", I32, kind="loop")
    loop = For("field", (i, j), (x,), (Assign(Load(x, (Read(i), Read(j))), Const(1.0, F64)),))
    new = serialized(loop, Extent((3, 40), (0, -5)), is_host=False)
    assert text(Program("k", (), (), (new,), (x,))) == textwrap.dedent(
        """\
        program k():
            for number in range(120:i32) with {'serialize': True}:
                i: i32 = (number // 40:i32)
                j: i32 = ((number % 40:i32) + -5:i32)
                x[i, j] = 1.0:f64
        """
    )


KERNELS = """
    over_field: for i in c: ti.atomic_min(least[None], c[i] * p[(i - offset) % P])
    over_two_indices: for i, j in c: ti.atomic_min(least[None], c[i, j] * p[(i * shape[1] + j) % P])
    over_groups: for I in ti.grouped(c): ti.atomic_min(least[None], c[I] * p[(I[0] * shape[1] + I[1]) % P])
    over_ndrange: for i, j in ti.ndrange(*shape): ti.atomic_min(least[None], c[i, j] * p[(i * shape[1] + j) % P])
    over_range: for k in range(N): ti.atomic_min(least[None], c[k // shape[1], k % shape[1]] * p[k % P])
    in_a_function: minimum()
"""


def loops(kind):
    """A kernel that takes the minimum of ``c[i] * p[i % P]``; ``c``, ``p`` and the minimum."""
    p, least = ti.field(ti.f64, P), ti.field(ti.f64, ())
    c = ti.field(ti.f64)
    shape, offset = (N,), 0
    if kind == "dense":
        ti.root.dense(ti.i, N).place(c)
    elif kind == "two levels":
        ti.root.dense(ti.i, N // 64).dense(ti.i, 64).place(c)
    elif kind == "offset":
        offset = -7
        ti.root.dense(ti.i, N).place(c, offset=(offset,))
    elif kind == "pointer":
        ti.root.pointer(ti.i, N // 64).dense(ti.i, 64).place(c)
    elif kind == "bitmasked":
        ti.root.dense(ti.i, N // 64).bitmasked(ti.i, 64).place(c)
    elif kind == "dynamic":
        ti.root.dynamic(ti.i, N, 1024).place(c)
    else:
        shape = (64, N // 64)
        ti.root.dense(ti.ij, shape).place(c)

    @ti.func
    def minimum():
        for i in c:
            ti.atomic_min(least[None], c[i] * p[i % P])

    if kind == "in_a_function":
        c, shape = ti.field(ti.f64, N), (N,)
    kernels = kernels_of(KERNELS, "least[None] = 1e5\n...\n", **locals(), P=P, N=N)
    return kernels.get(kind, kernels["over_field"]), c, p, least, shape, offset


FIELDS = ["dense", "two levels", "offset", "pointer", "bitmasked", "dynamic"]
OTHERS = names_of(KERNELS)[1:]


@pytest.mark.sweep
@pytest.mark.parametrize("kind", FIELDS + OTHERS)
def test_minimum(kind):
    """The minimum falls again and again, so that threads that ran at the same time would overtake each other."""
    kernel, c, p, least, shape, offset = loops(kind)
    p.fill(1.0)
    random = np.random.default_rng(0)

    @ti.kernel
    def fill(values: ti.types.ndarray()):
        for k in range(N):
            if ti.static(len(shape) == 2):
                c[k // shape[1], k % shape[1]] = values[k]
            else:
                c[k + offset] = values[k]

    @ti.kernel
    def append(values: ti.types.ndarray()):
        for _ in range(1):
            for k in range(N):
                c.append(values[k])

    for _ in range(8):
        values = 2.0 - np.arange(N) / N + 1e-5 * random.random(N)
        if kind == "dynamic":
            c.parent().deactivate_all()
            append(values)
        else:
            fill(values)
        where = int(np.argmin(values))
        expected = np.zeros(P)
        expected[where % P] = values[where]
        assert_allclose(jacobian(kernel, p, least), expected)
        assert least[None] == values[where]


class TestOnAGpu:
    """Loops over fields are parallel there whatever is asked for: they become loops over ranges."""

    @pytest.fixture(autouse=True)
    def no_serial_struct_for(self, monkeypatch):
        monkeypatch.setattr(backend, "is_host_arch", lambda: False)
        monkeypatch.setattr(backend, "thread_count", lambda: 8)

    @pytest.mark.mostly_sweep("over_groups")
    @pytest.mark.parametrize("kind", ["dense", "two levels", "offset", "over_two_indices", "over_groups"])
    def test_over_a_range(self, kind):
        kernel, c, p, least, shape, _ = loops(kind)
        values = (2.0 - np.arange(N) / N).reshape(shape)
        c.from_numpy(values)
        p.fill(1.0)
        expected = np.zeros(P)
        expected[(N - 1) % P] = values.min()
        assert_allclose(jacobian(kernel, p, least), expected)

    @pytest.mark.mostly_sweep("pointer")
    @pytest.mark.parametrize("kind", ["pointer", "bitmasked"])
    def test_refused(self, kind):
        kernel, _, p, least, _, _ = loops(kind)
        with pytest.raises(UnsupportedError, match=r"order of the iterations.*range"):
            Jacobian(kernel, p, least)()
