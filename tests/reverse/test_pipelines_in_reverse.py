"""Gradients of pipelines in reverse mode: views, stores of Python, numbers; against J in forward mode and differences."""

import operator
import tracemalloc

import numpy as np
import pytest
import taichi as ti
from captured_warnings import all_warnings
from kernel_texts import kernel_of, kernels_of, names_of
from numpy.testing import assert_allclose, assert_array_equal
from reverse_calls import Prepared, expected

from taichi_ext import DerivativeWarning, InvalidArgumentError, hessian, hessian_operator, hvp, jacobian, vjp

pytestmark = pytest.mark.usefixtures("ti64")

N = 5
RTOL = 1e-10


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).uniform(0.2, 1.2, shape)


def require_same(function, params, outputs, reset, args=(), width=2, **options):
    """Products, values and state are those of J; returns the products."""
    reset()
    prepared = Prepared(function, params, outputs, args)
    cotangents = [
        np.random.default_rng(n).standard_normal((width, *o.shape))
        for n, o in enumerate(prepared.plan.start(prepared.call).layout.outputs)
    ]
    wanted = expected(function, params, outputs, cotangents, args)
    state = [np.array(o.to_numpy() if hasattr(o, "to_numpy") else o) for o in outputs or ()]
    for _ in range(2):
        reset()
        found = prepared(cotangents, args, **options)
        for got, want in zip(found, wanted, strict=True):
            assert_allclose(got, want, rtol=RTOL, atol=1e-12)
        for output, value in zip(outputs or (), state, strict=True):
            now = output.to_numpy() if hasattr(output, "to_numpy") else output
            assert_allclose(now, value, rtol=1e-13, atol=1e-15)
    return found


mix = kernel_of("for i in a: b[i] = ti.sin(b[i]) * a[i] + b[i]", "a: A1, b: A1")

# --- memory that is shared --------------------------------------------------------------------------------------------


def overlapping(B):
    mix(B[0:3], B[3:6])
    mix(B[2:5], B[5:8])
    mix(B[4:7], B[1:4])


@pytest.mark.mostly_sweep(every=2)
@pytest.mark.parametrize("max_memory", [None, 700])
def test_views_that_overlap_from_launch_to_launch(max_memory):
    B = np.zeros(8)

    def reset():
        B[:] = drawn(8)

    require_same(overlapping, [B], [B], reset, (B,), max_memory=max_memory)


def test_arrays_of_integers_of_other_types():
    x, y = ti.field(ti.f64, shape=4), ti.field(ti.f64, shape=4)
    counts, signs = np.arange(4, dtype=np.uint32), np.array([1, -1, 1, -1], np.int8)

    @ti.kernel
    def scaled(n: ti.types.ndarray(dtype=ti.u32, ndim=1), s: ti.types.ndarray(dtype=ti.i8, ndim=1)):
        for i in x:
            y[i] = x[i] ** 2 * ti.cast(n[i], ti.f64) * s[i]

    x.fill(1.5)
    assert_allclose(vjp(scaled, x, y, np.ones(4), args=(counts, signs)), 3.0 * counts * signs, rtol=RTOL)


# --- fields -----------------------------------------------------------------------------------------------------------


@pytest.mark.mostly_sweep("pointer")
@pytest.mark.parametrize("layout", ["pointer", "bitmasked", "dynamic"])
def test_sparse_fields_whose_cells_become_active(layout):
    """A loop over active cells visits, on the way back, those that were active at the time."""
    x, y = ti.field(ti.f64), ti.field(ti.f64, shape=8)
    node = ti.root.dynamic(ti.i, 8) if layout == "dynamic" else getattr(ti.root, layout)(ti.i, 4).dense(ti.i, 2)
    node.place(x)
    add = kernel_of("for i in x: y[i] += scale * x[i]", "scale: ti.f64", x=x, y=y)

    @ti.kernel
    def grow(first: int, last: int):
        ti.loop_config(serialize=True)
        for i in range(first, last):
            x[i] = y[i - first] ** 2 + 0.5

    def run():
        grow(0, 2)
        add(1.3)
        grow(2, 6)
        add(0.7)

    reset = lambda: (ti.deactivate_all_snodes(), y.from_numpy(drawn(8)))
    require_same(run, [y], [y], reset)


def test_a_trajectory_in_one_field_is_not_copied():
    """Each launch writes one row of it, and reads another: nothing has to be kept."""
    steps = 50
    x, loss = ti.field(ti.f64, shape=(steps + 1, N)), ti.field(ti.f64, shape=())
    step = kernel_of("for i in range(N): x[t + 1, i] = ti.sin(x[t, i]) + x[t, i]", "t: int", N=N, x=x)
    end = kernel_of("for i in range(N): loss[None] += x[steps, i] ** 2", N=N, loss=loss, x=x, steps=steps)

    def run():
        for t in range(steps):
            step(t)
        end()

    x.from_numpy(np.concatenate([drawn(1, N), np.zeros((steps, N))]))
    values = x.to_numpy()[0]
    (found,), how = Prepared(run, [x], [loss]).products()
    want = np.ones(N)
    for _ in range(steps):
        want = want * (np.cos(values) + 1)
        values = np.sin(values) + values
    assert_allclose(found[0, 0], 2 * values * want, rtol=1e-12)
    assert_array_equal(found[0, 1:], 0)
    assert how.peak <= x.to_numpy().nbytes + 8  # the copy from before the run


# --- Python between launches ------------------------------------------------------------------------------------------


def test_numpy_in_place_between_launches():
    """Numbers that Python changes are constants, and those from before are read on the way back."""
    a, b = np.zeros(N), np.zeros(N)

    def run(a, b):
        mix(a, b)
        a[1:3] = [0.7, 0.9]
        mix(a, b)
        b *= 0.5
        mix(b, a)

    def reset():
        a[:], b[:] = drawn(N), drawn(N, seed=1)

    with all_warnings() as caught:
        require_same(run, [a, b], [a], reset, (a, b))
    assert any(w.category is DerivativeWarning and "changed from Python" in str(w.message) for w in caught)


@pytest.mark.parametrize("call", [vjp, hvp])
def test_one_warning_where_columns_take_over(call):
    """A pipeline whose Python stores to arrays has no adjoint, which only a run shows; J's columns run again."""
    x, loss = ti.field(ti.f64, 4), ti.field(ti.f64, ())
    x.from_numpy(drawn(4))
    a = np.zeros(4)
    cube = kernel_of("for i in x: a[i] = x[i] ** 3", "a: A1", x=x)

    @ti.kernel
    def total(a: ti.types.ndarray(dtype=ti.f64, ndim=1)):
        loss[None] = 0
        for i in x:
            loss[None] += a[i] * x[i]

    def run(a):
        cube(a)
        a[:] = np.abs(a.tolist()) * 2
        total(a)

    given = (loss, np.ones(())) if call is vjp else (np.ones(4), loss)
    for _ in range(2):
        with all_warnings() as caught:
            found = call(run, x, *given, args=(a,))
        assert ["changed from Python" in str(w.message) for w in caught] == [True]
    assert_allclose(found, 2 * drawn(4) ** 3 if call is vjp else 0.0, rtol=1e-12)


def test_a_run_that_judges_python_keeps_to_the_memory():
    """It has tangents along each component of a param, one after the other where those of the array do not fit."""
    p, y = ti.Vector.field(9, ti.f64, 16), ti.field(ti.f64, 16)
    p.from_numpy(drawn(16, 9))
    step = kernel_of("for i in y: a[i] += p[i].sum(); y[i] = a[i] * p[i].norm_sqr()", "a: A1", y=y, p=p)

    def run(a):
        a[:] = 0
        step(a)
        a += 1
        step(a)

    texts = []
    for max_memory in (None, 700):
        with all_warnings() as caught:
            found = vjp(run, p, y, np.ones(16), args=(np.zeros(16),), max_memory=max_memory)
        texts.append([str(w.message) for w in caught])
        total, square = drawn(16, 9).sum(1, keepdims=True), (drawn(16, 9) ** 2).sum(1, keepdims=True)
        assert_allclose(found, square + (2 * total + 1) * 2 * drawn(16, 9), rtol=1e-12)
    assert texts[0] == texts[1] != []


INDICES = """
    narrow(t: ti.i32):
        j = ti.cast(t, ti.u8)
    hashed(t: ti.i32):
        j = t * 73856093 % 600
    shifted(t: ti.i32):
        j = (t << 28) % 600
    shifted_out(t: ti.i32):
        # of all bits, or of none on some machines
        j = t // 300 << t // 10
    taken(t: ti.u8):
        j = ti.cast(t, ti.i32)
    quotient_of_bytes(t: ti.u8):
        j = ti.cast(t // ti.u8(7), ti.i32)
    rounded(t: ti.i32):
        j = ti.cast(2.7, ti.i32) + t
    without_a_sign(t: ti.i32):
        # 2**32 - 333 is more
        j = 5 * ti.cast(-t < ti.u32(400), ti.i32)
    below(t: ti.u32):
        j = ti.cast((t - ti.u32(500)) % ti.u32(601), ti.i32)
    halves(t: ti.i32):
        j = ti.abs(t // 7 % 600)
    logic(t: ti.i32):
        j = ti.cast(t > 300, ti.i32) + 2 * (t == 333 or t < 0) + ti.max(t, 7) % 5
    truths(t: ti.i32):
        # a truth value, too
        j = 5 * ti.cast((t > 300) + (t > 200), ti.i32)
    quotient(t: ti.i32):
        if t == 0:
            continue
        j = 4000 // t
    shift(t: ti.i32):
        if t == 0:
            continue
        j = 512 >> (t - 333)
"""
STEP = """\
for i in p:
    ...
    x[n, j, i] = (ti.sin(x[n, j, i]) + 1) * p[i]
"""


def test_indices_that_arguments_decide_are_those_of_kernels():
    """What is kept of ``x`` is found in Python: numbers that wrap, and that no iteration computes."""
    names = names_of(INDICES)
    x, p, y = (ti.field(ti.f64, shape) for shape in ((len(names), 602, 4), 4, (len(names), 4)))
    p.from_numpy(drawn(4))
    steps = [kernels_of(INDICES, STEP, x=x, p=p, n=n)[name] for n, name in enumerate(names)]
    total = kernel_of("for n, i in y: for j in range(602): y[n, i] += x[n, j, i]", x=x, y=y)

    def run():
        x.fill(0)
        y.fill(0)
        for name, step in zip(names, steps, strict=True):
            for t in (333, 333, *[0] * (name in ("quotient", "shift")), 333):
                step(260 if name == "taken" else t)
        total()

    value, at, weights = 0.0, drawn(4) + 1e-30j, drawn(len(names), 4)
    for _ in range(3):
        value = (np.sin(value) + 1) * at
    assert_allclose(vjp(run, p, y, weights), weights.sum(0) * value.imag / 1e-30, rtol=1e-12)
    for name, values in zip(names, y.to_numpy(), strict=True):
        assert_allclose(values, value.real, rtol=1e-12, err_msg=name)


# --- numbers ----------------------------------------------------------------------------------------------------------


@ti.kernel
def scaled(x: ti.template(), p: ti.f64, w: ti.types.vector(2, ti.f64)) -> ti.f64:
    total = 0.0
    for i in x:
        x[i] = ti.sin(x[i] * p) + w[1] * w[0]
    for i in range(N):
        total += x[i] ** 2
    return total * p


gravity = 0.8


@ti.kernel
def fall(x: ti.template(), dt: ti.f64):
    for i in x:
        x[i] += dt * gravity * 2 * x[i]


def test_arguments_of_a_kernel():
    x = ti.field(ti.f64, shape=N)
    require_same(scaled, ["p", "w", x], None, lambda: x.from_numpy(drawn(N)), (x, 0.6, ti.Vector([0.3, 0.4])))


@pytest.mark.mostly_sweep(every=2)
@pytest.mark.parametrize("max_memory", [None, 700])
def test_numbers_that_python_computes_and_stores(max_memory):
    x, y = ti.field(ti.f64, shape=4), ti.field(ti.f64, shape=4)
    q, a = ti.Vector.field(2, ti.f64, shape=2), ti.ndarray(ti.f64, shape=4)
    square = kernel_of("for i in x: a[i] = x[i] * x[i]; y[i] = y[i] * a[i]", "a: A1", x=x, y=y)
    add = kernel_of("for i in q: y[i] += q[i][0] * q[i][1]", q=q, y=y)

    def run(a):
        square(a)
        product = a[2] * x[1]
        y[1] = product * 3
        a[0] = product
        q[1] = [product, x[3]]
        q[0][1] = product
        square(a)
        add()
        x[2] = y[3] * y[3]
        square(a)

    def reset():
        x.from_numpy(drawn(4))
        y.from_numpy(drawn(4, seed=1))
        a.fill(0.2)
        q.fill(0.4)

    require_same(run, [x, y, q], [y, x], reset, (a,), max_memory=max_memory)


def test_stores_are_made_again_with_the_numbers_and_indices_of_then():
    """Python adds to its index in place; fields with an offset and of pointers, and parts of vectors, are stored to."""
    p, u = ti.field(ti.f64, shape=2), ti.field(ti.f64, shape=6)
    f, s = ti.field(ti.f64, shape=6, offset=2), ti.field(ti.f64)
    ti.root.pointer(ti.i, 3).dense(ti.i, 2).place(s)
    a, w = ti.ndarray(ti.f32, shape=6), ti.Vector.ndarray(2, ti.f64, shape=6)

    @ti.kernel
    def advance(a: ti.types.ndarray(ti.f32, ndim=1), w: ti.types.ndarray(ti.types.vector(2, ti.f64), ndim=1)):
        for i in u:
            u[i] = ti.sin(p[i % 2] * u[i] + f[i + 2] * u[i] + a[i] * w[i][1] + s[i] ** 2) + w[i][0]

    def run(a, w):
        at = np.array(0)
        for t in range(12):
            advance(a, w)
            number = u[1] * u[2]
            f[at + 2] = number
            a[at] = np.float32(0.1 * t)
            w[(at,)][1] = 0.3 * number + t
            s[at] = u[3] if t % 2 else 0.1
            at += 5
            at %= 6
        advance(a, w)

    def begin(move=0.0):
        p.from_numpy(np.array([0.4, 0.9]) + move)
        u.from_numpy(drawn(6))
        for filled in (f, s, a, w):
            filled.fill(0.0)

    def plain(move):
        begin(move)
        run(a, w)
        return u.to_numpy().sum()

    want = [(plain(e) - plain(-e)) / 2e-6 for e in np.eye(2) * 1e-6]
    for max_memory in (None, 1500):
        begin()
        (found,), how = Prepared(run, [p], [u], (a, w)).products([np.ones((1, 6))], (a, w), max_memory=max_memory)
        assert_allclose(found[0], want, rtol=1e-6)
    assert how.repeated
    begin()
    assert_allclose(jacobian(run, p, u, args=(a, w)).sum(0), want, rtol=1e-6)


def test_stores_to_an_array_copy_none_of_it():
    x, y, a = ti.field(ti.f64, shape=1), ti.field(ti.f64, shape=()), ti.ndarray(ti.f64, shape=1 << 16)
    add = kernel_of("for i in range(1 << 16): y[None] += a[i] * x[0]", "a: A1", y=y, x=x)

    def run(a):
        for i in range(50):
            a[i] = x[0] * i
        add(a)

    x[0] = 2.0
    vjp(run, x, y, 1.0, args=(a,))
    tracemalloc.start()
    try:
        found = vjp(run, x, y, 1.0, args=(a,))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert_allclose(found, [2 * 2.0 * 49 * 50 / 2])
    assert peak < 10 * a.to_numpy().nbytes


def test_the_last_of_many_cotangents_come_in_other_blocks():
    x = ti.field(ti.f64, shape=N)
    run = lambda: fall(x, 0.3)
    require_same(run, [x], [x], lambda: x.from_numpy(drawn(N)), width=11)


def test_random_numbers_are_those_of_the_run():
    """The way back, and recomputation, use the draws of the only run."""
    x, d = ti.field(ti.f64, shape=N), ti.field(ti.f64, shape=40)

    @ti.kernel
    def step(t: int):
        r = ti.random(ti.f64)
        d[t] = r
        for i in x:
            x[i] = ti.sin(x[i] * (0.5 + r))

    def run():
        for t in range(40):
            step(t)

    for max_memory in (None, 1000):
        x.from_numpy(drawn(N))
        (found,), how = Prepared(run, [x], [x]).products(max_memory=max_memory)
        value, want = drawn(N), np.ones(N)
        for r in d.to_numpy():
            want, value = want * (0.5 + r) * np.cos(value * (0.5 + r)), np.sin(value * (0.5 + r))
        assert_allclose(x.to_numpy(), value, rtol=1e-12)
        assert_allclose(found[0], want, rtol=1e-10)
    assert how.repeated


def test_all_rows_are_of_one_run():
    x, y, d = ti.field(ti.f64, 20), ti.field(ti.f64, 20), ti.field(ti.f64, ())
    x.from_numpy(drawn(20))

    @ti.kernel
    def scale(s: ti.f64):
        r = ti.random(ti.f64)
        d[None] = r * s
        for i in x:
            y[i] = r * s * x[i] ** 2

    draws = np.random.default_rng(0)
    for chunk_size in (None, 3):
        J = jacobian(lambda: scale(draws.random()), x, y, mode="reverse", chunk_size=chunk_size)
        assert_allclose(J, np.diag(2 * d[None] * x.to_numpy()), rtol=1e-12)


@pytest.mark.parametrize("name", ["hessian", "operator"])
@pytest.mark.parametrize("has_random", [False, True])
def test_products_with_h_are_of_runs_that_draw_the_same(has_random, name):
    """Eight directions are in each run. Draws of Python are made again, and those of kernels are refused."""
    x, e = ti.field(ti.f64, 10), ti.field(ti.f64, ())
    x.from_numpy(drawn(10))
    random = " + 0.1 * ti.random(ti.f64)" if has_random else ""
    add = kernel_of(f"for i in x: e[None] += (s{random}) * x[i] ** 3", "s: ti.f64", x=x, e=e)
    draws = np.random.default_rng(0)

    def energy():
        e[None] = 0.0
        add(draws.random())
        add(e[None])

    call = {"hessian": lambda: hessian(energy, x, e), "operator": lambda: hessian_operator(energy, x, e) @ np.eye(10)}
    for _ in range(2):
        if has_random:
            with pytest.raises(InvalidArgumentError, match="random numbers"):
                call[name]()
            continue
        H, X = call[name](), x.to_numpy()
        diagonal, row = (1 + 2 * (X**3).sum()) * 6 * X, 3 * X**2
        parts = H / (np.diag(diagonal) + 2 * np.outer(row, row))
        assert_allclose(parts, parts[0, 0], rtol=1e-10)
        assert np.isclose(np.random.default_rng(0).random(10), parts[0, 0]).any()  # one of the first draws


VECTOR = ti.types.vector(2, ti.f64)


def test_each_number_of_a_returned_vector_has_its_own_derivative():
    x, y = ti.field(ti.f64, 2), ti.field(ti.f64, ())
    x.from_numpy(drawn(2))
    both = kernel_of("both() -> VECTOR: return VECTOR(x[0] ** 2, x[0] * x[1])", x=x, VECTOR=VECTOR)
    store = kernel_of("y[None] = a * b", "a: ti.f64, b: ti.f64", y=y)
    first, second = drawn(2)
    assert_allclose(vjp(lambda: store(*both()), x, y, 1.0), [3 * first**2 * second, first**3], rtol=1e-12)


PAIR = ti.types.struct(a=ti.f64, v=VECTOR)


@pytest.mark.parametrize("make", [lambda: [2.0, 1.0], lambda: ti.Vector([2.0, 1.0]), lambda: np.array([2.0, 1.0])])
def test_a_vector_that_changes_after_it_was_passed(make):
    x, y, z = (ti.field(ti.f64, shape=N) for _ in range(3))
    scaled = kernel_of(
        "for i in a: b[i] = v[0] * ti.sin(a[i])", "a: ti.template(), v: VECTOR, b: ti.template()", VECTOR=VECTOR
    )

    def run():
        v = make()
        scaled(x, v, z)
        v[0] = 3.0
        scaled(z, v, y)

    require_same(run, [x], [y], lambda: x.from_numpy(drawn(N)))


def test_a_struct_that_changes_after_it_was_passed():
    x, y, z = (ti.field(ti.f64, shape=N) for _ in range(3))
    scaled = kernel_of(
        "for i in a: b[i] = p.a * p.v[1] * ti.sin(a[i])", "a: ti.template(), p: PAIR, b: ti.template()", PAIR=PAIR
    )

    def run():
        p = PAIR(a=2.0, v=ti.Vector([1.0, 0.5]))
        scaled(x, p, z)
        p.a = 3.0
        p.v = ti.Vector([1.0, 0.75])
        scaled(z, p, y)

    require_same(run, [x], [y], lambda: x.from_numpy(drawn(N)))


@pytest.mark.parametrize(
    "change",
    [
        lambda p: None,
        lambda p: setattr(p, "a", -0.0),
        lambda p: setattr(p, "a", np.float32(0.1)),
        lambda p: setattr(p, "v", ti.Vector([1.0, 0.75])),
        lambda p: p.v.fill(0.5),
        lambda p: operator.setitem(p.v, 1, np.nextafter(0.5, 1.0)),
    ],
)
def test_a_struct_is_passed_again_with_changes_in_place_or_without(change):
    x, y = ti.field(ti.f64, shape=N), ti.field(ti.f64, shape=(4, N))

    @ti.kernel
    def scaled(p: PAIR, n: ti.i32):
        for i in x:
            sign = ti.select(ti.bit_cast(p.a, ti.i64) < 0, 2.0, 3.0)
            y[n, i] = sign * (p.a + p.v[0] + (p.v[1] - 0.5) * 1e10) * ti.sin(x[i])

    def run():
        p = PAIR(a=0.0, v=ti.Vector([1.0, 0.5]))
        scaled(p, 0)
        scaled(p, 1)
        change(p)
        scaled(p, 2)
        p.a, p.v = 0.1, ti.Vector([1.0, 0.5])
        scaled(p, 3)

    require_same(run, [x], [y], lambda: x.from_numpy(drawn(N)))


MATRIX = ti.types.matrix(2, 3, ti.f64)
BOX = ti.types.struct(a=ti.f64, m=MATRIX, n=ti.types.matrix(2, 2, ti.i32))


def test_matrices_by_value():
    x, y = ti.field(ti.f64, shape=N), ti.field(ti.f64, shape=N)

    @ti.kernel
    def squares(m: MATRIX, n: ti.types.matrix(2, 2, ti.i32)):
        for i in x:
            y[i] = m[i % 2, i % 3] * x[i] ** n[1, 0] + m[0, 1]

    boxed = kernel_of("for i in y: y[i] *= box.a * box.m[1, 2] + x[0] * box.n[1, 1]", "box: BOX", BOX=BOX, y=y, x=x)

    def run():
        m = ti.Matrix([[1.0, 2.0, 0.5], [0.7, 0.3, 1.5]])
        squares(m, ti.Matrix([[1, 2], [3, 4]]))
        m[1, 2] = 7.0
        boxed(BOX(a=1.5, m=m, n=ti.Matrix([[1, 2], [3, 4]])))
        squares(ti.Matrix([[y[0], y[1], 2.0], [y[2] * y[3], 1.0, y[4]]]), ti.Matrix([[1, 0], [2, 1]]))

    require_same(run, [x], [y], lambda: x.from_numpy(drawn(N)))


@pytest.mark.mostly_sweep("vjp")
@pytest.mark.parametrize("call", ["vjp", "rows", "blocks of rows"])
def test_arrays_that_no_kernel_uses_change_once(call):
    """The first call runs the pipeline again, to see which numbers depend on the params."""
    x, y = ti.field(ti.f64, shape=N), ti.field(ti.f64, shape=N)
    gain, runs, parts = np.ones(N), np.zeros(3), {"history": np.zeros((2, N))}
    squares = kernel_of("for i in x: y[i] = x[i] * x[i] * a[i]; a[i] = x[i]", "a: A", x=x, y=y)

    def run():
        squares(gain)
        runs[1] += 1
        parts["history"][1:] += 0.5

    x.from_numpy(drawn(N))
    if call == "vjp":
        vjp(run, x, y, np.ones(N))
    else:
        jacobian(run, x, y, mode="reverse", chunk_size=2 if "blocks" in call else None)
    assert_array_equal(runs, [0, 1, 0])
    assert_array_equal(parts["history"], [[0] * N, [0.5] * N])
    assert_array_equal(gain, x.to_numpy())
