"""Several arrays of one memory: rows, slices, transposes, other shapes; in one launch and from launch to launch."""

import numpy as np
import pytest
import taichi as ti
from devices import real
from kernel_texts import kernel_of
from numpy.testing import assert_allclose, assert_array_equal

from taichi_ext import InvalidArgumentError, jacobian, value_and_jacobian

pytestmark = [pytest.mark.usefixtures("ti64"), pytest.mark.filterwarnings("ignore::taichi_ext.DerivativeWarning")]

A1, A2 = ti.types.ndarray(dtype=ti.f64, ndim=1), ti.types.ndarray(dtype=ti.f64, ndim=2)
V1 = ti.types.ndarray(dtype=ti.types.vector(3, ti.f64), ndim=1)
X = real(np.array([0.7, -0.4, 1.3]))

load = kernel_of("for i in a: a[i] = x[i % 3] * (i + 1)", "x: A1, a: A1")
mix = kernel_of("for i in a: a[i] = ti.sin(a[i]) + x[i % 3] * a[i]", "x: A1, a: A1")
mix_table = kernel_of("for i, j in a: a[i, j] = ti.cos(a[i, j]) * x[j % 3] + 0.1 * i", "x: A1, a: A2")
turn = "for i in v: v[i] = v[i].cross(ti.Vector([x[0], x[1], 1.0])) + x[2]"
turn_vectors = kernel_of(turn, "x: A1, v: V1", V1=V1)
constant = kernel_of("for i in a: a[i] = 2.5", "a: A1")
add_to = kernel_of("for i in a: b[i] += a[i] * a[i]", "a: A1, b: A1")


def by_differences(function, x, step=1e-6):
    columns = []
    for k in range(x.size):
        d = real(np.zeros(x.size))
        d[k] = step
        d = d.reshape(x.shape)
        columns.append((function(x + d) - function(x - d)) / (2 * step))
    return np.stack(columns, -1).reshape(*columns[0].shape, *x.shape)


def fortran(b):
    """The same memory as an array whose first axis changes fastest."""
    return b.reshape(4, 6).T


STEPS = {
    "whole": lambda x, b: mix(x, b),
    "row": lambda x, b: mix(x, b.reshape(4, 6)[2]),
    "slice": lambda x, b: mix(x, b[3:9]),
    "overlapping slice": lambda x, b: mix(x, b[7:16]),
    "slice of a slice": lambda x, b: mix(x, b[2:20][4:9]),
    "table": lambda x, b: mix_table(x, b.reshape(6, 4)),
    "rows": lambda x, b: mix_table(x, b.reshape(6, 4)[1:4]),
    "transposed": lambda x, b: mix_table(x, b.reshape(6, 4).T),
    "transposed rows": lambda x, b: mix_table(x, b.reshape(6, 4)[2:5].T),
    "column": lambda x, b: mix(x, fortran(b)[:, 1]),
    "vectors": lambda x, b: turn_vectors(x, b.reshape(8, 3)),
    "some vectors": lambda x, b: turn_vectors(x, b.reshape(8, 3)[2:5]),
    "constant": lambda x, b: constant(b[5:8]),
    "loaded": lambda x, b: load(x, b[8:14]),
    "two slices": lambda x, b: add_to(b[2:6], b[10:14]),
}


def steps_of(names):
    def pipeline(x, b):
        for name in names:
            STEPS[name](x, b)

    return pipeline


def check(pipeline, b, **options):
    """J of a buffer by ``x``, and by what it held before, and what it is left with."""

    def plain(x, before):
        buffer = before.copy()
        pipeline(x.copy(), buffer)
        return buffer

    x, buffer = X.copy(), b.copy()
    by_x, by_b = jacobian(pipeline, [x, buffer], buffer, args=(x, buffer), **options)
    assert_array_equal(buffer, plain(X, b))
    assert_allclose(by_x, by_differences(lambda x: plain(x, b), X), atol=1e-7)
    assert_allclose(by_b, by_differences(lambda before: plain(X, before), b), atol=1e-7)
    buffer = b.copy()
    assert_allclose(jacobian(pipeline, x, buffer, args=(x, buffer), **options), by_x, atol=1e-12)


@pytest.mark.mostly_sweep("column")
@pytest.mark.parametrize("name", STEPS)
def test_a_view_between_uses_of_the_whole(name):
    check(steps_of(["whole", name, "whole"]), real(np.linspace(0.2, 1.4, 24)))


@pytest.mark.mostly_sweep("slice", "transposed rows")
@pytest.mark.parametrize("name", STEPS)
def test_a_view_before_the_whole(name):
    check(steps_of([name, "whole"]), real(np.linspace(0.2, 1.4, 24)))


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(5))
def test_views_in_any_order(seed):
    random = np.random.default_rng(seed)
    names = random.choice(list(STEPS), 7)
    check(steps_of(names), real(random.uniform(0.2, 1.4, 24)), chunk_size=[None, 5][seed % 2])


def test_outputs_that_overlap():
    x, b = X.copy(), real(np.zeros(6))
    whole, part, table = jacobian(lambda x, b: load(x, b), x, [b, b[2:4], b.reshape(2, 3)], args=(x, b))
    expected = np.diag([1.0, 2.0, 3.0]).tolist() + np.diag([4.0, 5.0, 6.0]).tolist()
    assert_allclose(whole, expected)
    assert_allclose(part, expected[2:4])
    assert_allclose(table, np.reshape(expected, (2, 3, 3)))
    whole[...] = 0
    assert part.any(), "the Jacobians of two outputs share memory"


def test_parameters_that_overlap_are_refused():
    x, b = X.copy(), real(np.ones(6))
    with pytest.raises(InvalidArgumentError, match=r"params\[0\].*params\[1\].*share.*pass copies"):
        jacobian(lambda x, b: mix(x, b), [b[:4], b[3:]], b, args=(x, b))
    assert_array_equal(b, 1)


@pytest.mark.parametrize("other", [lambda a: a.T, lambda a: a.reshape(2, 8), lambda a: a[1:]])
def test_overlapping_arguments_of_which_one_is_written_are_refused(other):
    move = kernel_of("for i, j in b: b[i, j] = 2 * a[i, j]", "a: A2, b: A2")
    a = real(np.ones((4, 4)))
    with pytest.raises(InvalidArgumentError, match="'a'.*'b'.*share a part of their memory.*pass copies"):
        jacobian(move, a, "b", args=(a, other(a)))
    assert_array_equal(a, 1)


def test_an_array_of_another_type_in_the_same_memory_is_refused():
    clear = kernel_of("for i in a: a[i] = 0", "a: ti.types.ndarray(dtype=ti.i64, ndim=1)")
    pipeline = lambda x, b: (load(x, b), clear(b.view(np.int64)))
    x, b = X.copy(), real(np.zeros(6))
    with pytest.raises(InvalidArgumentError, match="share a part of their memory, but not the type"):
        jacobian(pipeline, x, b, args=(x, b))


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_tensors_and_the_arrays_that_share_their_memory(chunk_size):
    torch = pytest.importorskip("torch")

    def pipeline(x, t):
        load(x, t.view(-1))
        mix(x, t[1])
        mix(x, t.numpy()[0])
        mix_table(x, t.view(3, 4))

    def plain(x):
        t = torch.from_numpy(real(np.full((2, 6), 0.5)))
        pipeline(x.copy(), t)
        return t.numpy().copy()

    x, t = X.copy(), torch.from_numpy(real(np.full((2, 6), 0.5)))
    J = jacobian(pipeline, x, t, args=(x, t), chunk_size=chunk_size)
    assert_allclose(J.numpy(), by_differences(plain, X), atol=1e-8)
    assert_array_equal(t.numpy(), plain(X))


def test_out_takes_the_jacobian_of_a_view():
    x, b, J = X.copy(), real(np.zeros((2, 3))), real(np.full((2, 3, 3), np.nan))
    assert jacobian(lambda x, b: load(x, b[1]), x, b[1], args=(x, b), out=J[0]) is not None
    assert_allclose(J[0], np.diag([1.0, 2.0, 3.0]))
    assert np.isnan(J[1]).all()


@pytest.mark.sweep
def test_empty_arrays():
    @ti.kernel
    def scale(a: A2, d: A1):
        for i, j in a:
            a[i, j] = a[i, j] * 2
        for i in d:
            d[i] = d[i] * 3

    a, d = real(np.zeros((0, 3))), real(np.ones(2))
    values, J = value_and_jacobian(scale, {"a": a, "d": d}, {"a": a, "d": d}, args=(a, d))
    assert J["a"]["a"].shape == (0, 3, 0, 3)
    assert J["d"]["a"].shape == (2, 0, 3)
    assert J["a"]["d"].shape == (0, 3, 2)
    assert_allclose(J["d"]["d"], 3 * np.eye(2))
    assert_allclose(values["d"], 3)
    out = real(np.zeros((2, 0, 3)))
    for options in ({}, {"chunk_size": 1}, {"out": out}):
        assert jacobian(scale, a, d, args=(a, d), **options).shape == (2, 0, 3)
    assert jacobian(scale, d, a, args=(a, d)).shape == (0, 3, 2)
    assert jacobian(lambda a, d: scale(a, d), a, d, args=(a, d)).shape == (2, 0, 3)
