"""What is left behind: exactly what one plain run leaves, whatever was needed for the Jacobian; limits of memory."""

import collections
import functools
import gc
import itertools
import queue
import sys
import types
import weakref

import numpy as np
import pytest
import taichi as ti
from devices import real
from differences import Snapshot, check_jacobian, outputs, read, scalars, vectors
from kernel_texts import kernel_of
from numpy.testing import assert_allclose, assert_array_equal
from taichi.lang import impl

from taichi_ext import InvalidArgumentError, Jacobian, jacobian, linear_operator, value_and_jacobian
from taichi_ext.runtime.memory.state import State

pytestmark = pytest.mark.usefixtures("ti64")

X = np.array([0.3, -0.8, 1.1, 0.6])


@ti.data_oriented
class Everything:
    """A pipeline that does each kind of store: overwriting, accumulating, counting, in place, reading what it wrote."""

    def __init__(self):
        self.runs = itertools.count()
        self.x = scalars(X)
        self.work = outputs(4, 4)
        self.y = outputs(4)
        self.total = outputs()
        self.best = scalars([-100.0])
        self.count = ti.field(ti.i32, shape=4)
        self.log = ti.field(ti.i32, shape=())
        self.v = vectors(np.ones((4, 3)))

    @ti.kernel
    def step(self, n: ti.i32):
        for i, j in self.work:
            self.work[i, j] = self.x[i] * self.x[j] + n
        for i, j in self.work:
            self.y[i] += self.work[i, j]
            self.count[j] += 1
        for i in self.x:
            self.x[i] = 0.9 * self.x[i] + 0.1 * ti.sin(self.work[i, i])
            ti.atomic_max(self.best[0], self.x[i])
            self.total[None] += self.x[i] ** 2
            self.v[i] = self.v[i].cross(ti.Vector([self.x[i], 1.0, 2.0]))
        self.log[None] = self.log[None] * 10 + n

    def run(self):
        next(self.runs)
        for n in range(1, 4):
            self.step(n)
        self.y[0] = 4.0

    @property
    def containers(self):
        return [self.x, self.work, self.y, self.total, self.best, self.count, self.log, self.v]


def state_after(program, run):
    before = Snapshot(program.containers)
    run()
    after = [c.to_numpy() for c in program.containers]
    before.restore()
    return after


@pytest.mark.mostly_sweep("600")
@pytest.mark.parametrize("max_memory", [600, 300, 150])
def test_state_is_that_of_one_plain_run(max_memory):
    """Also when the columns have to be computed in several runs, whose J is the same."""
    program, found = Everything(), []
    outs, plain = [program.y, program.total, program.best], state_after(program, program.run)
    for limit in (None, max_memory):
        program.runs = itertools.count()
        left = state_after(program, lambda: found.append(jacobian(program.run, program.x, outs, max_memory=limit)))
        assert left[6] == 123
        for expected, value in zip(plain, left, strict=True):
            assert_allclose(value, expected, rtol=1e-13, atol=0)
    assert next(program.runs) > 1
    for whole, parts in zip(*found, strict=True):
        assert_allclose(parts, whole, rtol=1e-13, atol=1e-15)


def test_arrays_that_share_memory_are_put_back_before_each_block():
    x, y, a = scalars([0.3, 0.5]), outputs(6), np.linspace(1.0, 2.0, 6)
    scale = kernel_of("for i in v: v[i] *= x[0] + x[1]", "v: A1", x=x)
    add = kernel_of("for i in y: y[i] += v[i]", "v: A1", y=y)
    run = lambda: (scale(a), scale(a[2:5]), add(a))
    start, times = a.copy(), np.array([1, 1, 2, 2, 2, 1])
    J = jacobian(run, x, y, chunk_size=1)
    assert_allclose(J, (start * times * 0.8 ** (times - 1))[:, None] * np.ones(2), rtol=1e-13)
    assert_allclose(a, start * 0.8**times, rtol=1e-14)


def test_memory_that_was_saved_in_part_is_saved_between_the_parts():
    a, state = np.linspace(1.0, 2.0, 8), State()
    start = a.copy()
    for view in (a[5:6], a[2:4], a):
        state.save(view)
        view *= 3.0
    state.restore()
    assert_array_equal(a, start)


@pytest.mark.sweep
def test_memory_of_a_simulation_does_not_grow_with_its_steps():
    import tracemalloc

    n = 2000
    x, v = scalars(np.linspace(0, 1, n)), outputs(n)
    p = scalars([0.3, 0.7])
    steps = 5

    @ti.kernel
    def step():
        for i in x:
            v[i] += p[0] * ti.sin(x[i]) - p[1] * v[i] * 0.1
        for i in x:
            x[i] += 0.01 * v[i]

    def run():
        for _ in range(steps):
            step()

    plan = Jacobian(run, p, x)
    peaks = []
    for steps in (5, 5, 100):
        gc.collect()
        tracemalloc.start()
        plan()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    one_state = 2 * n * 2 * 8  # tangents of x and v
    assert peaks[2] < peaks[1] + 2 * one_state, peaks


@pytest.mark.sweep
@pytest.mark.cpu_only("launches are set up once where arrays lie on the host; Taichi leaves cycles behind otherwise")
def test_nothing_is_kept_of_kernels_that_are_bound_anew():
    import tracemalloc

    @ti.data_oriented
    class Owner:
        def __init__(self):
            self.p, self.x = scalars([0.3, 0.7]), outputs(2)

        @ti.kernel
        def move(self):
            for i in self.x:
                self.x[i] += self.p[i]

    owner, steps = Owner(), 10

    def run():
        names = {}
        for _ in range(steps):
            owner.move()
            names.get(str(steps))  # a built-in method is a new object each time, too

    plan = Jacobian(run, owner.p, owner.x)
    peaks = []
    for steps in (10, 10, 500):
        gc.collect()
        tracemalloc.start()
        plan()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < peaks[1] + 10 * 500, peaks  # bytes: far less than an object for each step


@pytest.mark.sweep
@pytest.mark.cpu_only("tracemalloc sees the memory of the host only")
@pytest.mark.chosen_only("the memory is that of all columns", "--chunk-size")
def test_shadows_are_freed_after_the_call():
    import tracemalloc

    n = 5000
    x, t, y = scalars(np.ones(20)), outputs(n), outputs()
    first = kernel_of("for i in t: t[i] = x[i % 20] * x[(i + 1) % 20]", t=t, x=x)
    second = kernel_of("for i in t: y[None] += t[i]", t=t, y=y)
    run = lambda: (first(), second())
    plan = Jacobian(run, x, y)
    plan()
    gc.collect()
    tracemalloc.start()
    plan()
    gc.collect()
    left, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak > n * 20 * 8  # the tangents of t were there
    assert left < n * 8


@pytest.mark.sweep
def test_program_ends_with_init_although_jacobians_are_kept():
    """Its threads, memory and arrays are not held, nor freed in the midst of what the next program does."""
    from taichi_program import initialise

    x, y = scalars(X), outputs(4)
    a, b = ti.ndarray(ti.f64, 4), ti.ndarray(ti.f64, 4)
    a.fill(1.0)
    double = kernel_of("for i in x: y[i] = 2 * x[i]", x=x, y=y)
    halve = kernel_of("for i in x: x[i] = 0.5 * x[i]", x=x)

    def run():
        for _ in range(3):
            halve()
        double()

    square = kernel_of("for i in source: result[i] = source[i] ** 2", "source: A1, result: A1")
    plans = [
        Jacobian(double, x, y),
        Jacobian(run, x, y),
        Jacobian(square, "source", b, args=(a, b)),
        Jacobian(functools.partial(square, a, b), {"a": a}, b),
    ]
    for plan in plans * 2:
        plan()
    jacobian(square, a, b, args=(a, b))
    program, arrays = weakref.ref(impl.get_runtime().prog), [weakref.ref(a), weakref.ref(b)]
    del a, b
    gc.collect()
    gc.disable()
    try:
        ti.reset()
        assert program() is None
        assert [array() for array in arrays] == [None, None]
    finally:
        gc.enable()
        initialise(default_fp=ti.f64)
    for plan in plans:
        assert "def " in plan.source
        assert plan.explain()
        for use in (plan, plan.value):
            with pytest.raises(InvalidArgumentError, match=r"ti\.init was called again"):
                use()


@pytest.mark.sweep
def test_arrays_are_not_kept_for_the_next_call():
    square = kernel_of("for i in source: result[i] = source[i] ** 2", "source: A, result: A")
    a, b = np.ones(4), np.ones(4)
    gc.collect()
    before = sys.getrefcount(a), sys.getrefcount(b)
    jacobian(square, a, b, args=(a, b))
    value_and_jacobian(square, a, b, args=(a, b))
    gc.collect()
    assert (sys.getrefcount(a), sys.getrefcount(b)) == before


@pytest.mark.sweep
def test_a_sparse_layout_in_a_pipeline_that_begins_again():
    s = ti.field(ti.f64)
    ti.root.pointer(ti.i, 4).dense(ti.i, 4).place(s)
    x, y = scalars([0.6, 0.8]), outputs(4)
    store = kernel_of("for i in range(4): s[i] = x[0] * i", s=s, x=x)

    @ti.kernel
    def chain():
        ti.loop_config(serialize=True)
        for i in range(3):
            y[i + 1] = ti.sin(y[i]) * x[1] + s[i]  # reads what another iteration has stored

    run = lambda: (store(), chain())
    J = jacobian(run, x, y, format="csr").toarray()
    expected, a, b, last = [np.zeros(2)], 0.6, 0.8, 0.0
    for i in range(3):
        expected.append(np.cos(last) * b * expected[-1] + [i, np.sin(last)])
        last = np.sin(last) * b + a * i
    np.testing.assert_allclose(J, expected, rtol=1e-13)


# --- where fields lie -------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_fields_in_every_layout_are_put_back():
    """Runs for single columns begin with the same numbers, whether fields are copied in memory or by Taichi."""
    x, y = scalars([0.5, -1.5, 2.0]), outputs(3)
    inner, turned = ti.field(ti.f64), ti.field(ti.f64, (3, 4), order="ji")
    ti.root.dense(ti.i, 2).dense(ti.i, 3).place(inner)
    shifted, whole = ti.field(ti.f32, (3, 2), offset=(-4, 7)), ti.field(ti.i32, (3, 2))
    apart, rows = ti.Vector.field(2, ti.f64, 3, layout=ti.Layout.SOA), ti.Vector.field(3, ti.f32, (2, 3))
    tables = ti.Matrix.field(2, 3, ti.f64, 3, needs_grad=True)
    struct = ti.types.struct(a=ti.f64, n=ti.i32, v=ti.types.vector(2, ti.f32)).field(shape=3)
    builder, placed = ti.FieldsBuilder(), ti.field(ti.f64)
    builder.dense(ti.i, 3).place(placed)
    builder.finalize()
    found = real(np.zeros((3, 11)))

    @ti.kernel
    def add():
        for i in range(3):
            inner[i + 2] += 1.0
            turned[i, i + 1] += 2.0
            shifted[i - 4, 8] += 3.0
            whole[i, 1] += 4
            apart[i][1] += 5.0
            rows[1, i][2] += 6.0
            tables[i][1, 2] += 7.0
            struct[i].a += 8.0
            struct[i].n += 9
            struct[i].v[1] += 10.0
            placed[i] += 11.0
            y[i] = x[i] ** 2 * (inner[i + 2] + turned[i, i + 1] + shifted[i - 4, 8] + whole[i, 1] + apart[i][1])
            y[i] += x[i] * (rows[1, i][2] + tables[i][1, 2] + struct[i].a + struct[i].n + struct[i].v[1] + placed[i])

    @ti.kernel
    def values(found: ti.types.ndarray(ti.f64, ndim=2)):
        for i in range(3):
            found[i, 0], found[i, 1], found[i, 2] = inner[i + 2], turned[i, i + 1], shifted[i - 4, 8]
            found[i, 3], found[i, 4], found[i, 5] = whole[i, 1], apart[i][1], rows[1, i][2]
            found[i, 6], found[i, 7], found[i, 8] = tables[i][1, 2], struct[i].a, struct[i].n
            found[i, 9], found[i, 10] = struct[i].v[1], placed[i]

    for runs in (1, 2):
        J = jacobian(add, x, y, chunk_size=1)
        assert_allclose(J, np.diag(runs * (2 * x.to_numpy() * (1 + 2 + 3 + 4 + 5) + (6 + 7 + 8 + 9 + 10 + 11))))
        values(found)
        assert_array_equal(found, runs * np.arange(1.0, 12.0) * np.ones((3, 1)))


@pytest.mark.sweep
def test_a_tree_in_the_place_of_another_is_put_back():
    x, y = scalars([0.5, -1.5, 2.0]), outputs(3)
    for size in (3, 5000):
        builder, count = ti.FieldsBuilder(), ti.field(ti.f64)
        builder.dense(ti.i, size).place(count)
        tree = builder.finalize()
        add = kernel_of(
            "for i in range(3): count[i] += 1.0; y[i] = x[i] ** 2 * count[i]", "count: ti.template()", y=y, x=x
        )
        J = jacobian(add, x, y, args=(count,), chunk_size=1)
        assert_allclose(J, np.diag(2 * np.array([0.5, -1.5, 2.0])))
        assert [count[0], count[2]] == [1, 1]
        tree.destroy()


class Kept:
    """An object without ``__dict__``; its class holds an array, too."""

    __slots__ = ("work",)
    shared = np.zeros(1)

    def count(self):
        IN_MODULE[0] += 1


IN_MODULE = np.zeros(1)


@pytest.mark.parametrize("mode", ["forward", "reverse"])
def test_arrays_in_slots_classes_and_objects_of_c_are_those_of_one_run(mode):
    """The first call runs the pipeline several times."""
    x, y = scalars(X), outputs(4)
    kept, held, queue = Kept(), np.zeros(1), collections.deque([np.zeros(1)])
    kept.work = np.zeros(1)
    add = functools.partial(np.add, held, 1.0, out=held)
    arrays = [kept.work, Kept.shared, IN_MODULE, held, queue[0]]
    for array in arrays:
        array[:] = 0.0
    scale = kernel_of("for i in x: y[i] = a * x[i]", "a: ti.f64", x=x, y=y)

    def run():
        kept.work[0] += 1
        Kept.shared[0] += 1
        kept.count()
        queue[0][0] += 1
        add()
        scale(2.0 * x[0])

    J = jacobian(run, x, y, mode=mode)
    assert_allclose(J, 2 * (X[0] * np.eye(4) + np.outer(X, np.eye(4)[0])))
    assert [array.item() for array in arrays] == [1.0] * 5


@ti.data_oriented
class Wave:
    def __init__(self):
        self.k = scalars([0.5, 0.7])
        self.before, self.now, self.after = scalars(np.linspace(0, 1, 6)), scalars(np.linspace(1, 2, 6)), outputs(6)

    @ti.kernel
    def step(self):
        for i in range(1, 5):
            bend = self.now[i - 1] - 2 * self.now[i] + self.now[i + 1]
            self.after[i] = 2 * self.now[i] - self.before[i] + self.k[i % 2] * bend

    @ti.kernel
    def roll(self):
        for i in self.now:
            self.before[i] = self.now[i]
            self.now[i] = self.after[i]


@pytest.mark.chosen_only("the kernels of one block of columns", "--chunk-size")
def test_a_kernel_is_built_again_where_containers_have_got_tangents():
    wave = Wave()

    def run():
        for name in ("step", "roll") * 4:
            getattr(wave, name)()
        functools.partial(wave.step)()

    check_jacobian(run, wave.k, wave.now, state=[wave.before, wave.after])
    plan = Jacobian(run, wave.k, wave.now)
    plan()
    assert len(plan._prepared.fused) == 3  # roll; step with no tangents before it, and with all
    plan()
    assert len(plan._prepared.fused) == 3


def test_a_container_that_gets_tangents_in_some_calls():
    x, t, y = scalars([0.3, 0.8]), scalars([1.0, 2.0]), outputs(2)
    add = kernel_of("for i in x: y[i] += x[i] * t[i]", x=x, y=y, t=t)
    replace = kernel_of("for i in x: t[i] = x[i]", x=x, t=t)

    def run(n):
        for k in range(3):
            add()
            if k > n:
                replace()

    for n in (5, 1, 0):
        check_jacobian(run, x, y, args=(n,), state=[t])


def test_a_field_that_is_made_after_the_first_launch():
    x, y = scalars([0.3, 0.8]), outputs(2)
    holder = types.SimpleNamespace(made=None)
    first = kernel_of("for i in x: y[i] += x[i]", x=x, y=y)
    second = kernel_of("for i in x: holder.made[i] = y[i]; y[i] += holder.made[i] * x[i]", x=x, holder=holder, y=y)

    def run():
        for k in range(2):
            first()
            if k == 0:
                holder.made = ti.field(ti.f64, shape=2)
            second()

    J = Jacobian(run, x, y)()
    v = np.array([0.3, 0.8])
    assert_allclose(J, np.diag(2 + 6 * v + 3 * v**2), rtol=1e-13)


def test_vectors_whose_tangents_do_not_fit_together():
    x, t, y = scalars([0.3, 0.5, 0.7, 0.9, 1.1]), outputs(40), outputs(40)

    @ti.kernel
    def k():
        for i in t:
            t[i] = x[i % 5] ** 2
        for i in t:
            y[i] = t[i] * x[0]

    expected = jacobian(k, x, y)
    assert_allclose(linear_operator(k, x, y, max_memory=3 * 40 * 8 - 1) @ np.eye(5), expected, rtol=1e-14)


@pytest.mark.chosen_only("what it looks at is that of one run", "--chunk-size")
def test_limit_does_not_count_the_jacobian_itself():
    x, y = scalars(np.ones(50)), outputs(40)
    runs = queue.SimpleQueue()
    k = kernel_of("for i in y: y[i] = x[i] * x[0]", y=y, x=x)

    def run():
        runs.put(1)
        k()

    result = jacobian(run, x, y, max_memory=1)
    assert result.shape == (40, 50)
    assert runs.qsize() == 1


def test_random_numbers_cannot_be_drawn_again():
    x, t, y = scalars([0.3, 0.5]), outputs(2), outputs(2)

    @ti.kernel
    def k():
        for i in t:
            t[i] = x[i] * ti.random(ti.f64)
        for i in y:
            y[i] = t[i] ** 2

    with pytest.raises(InvalidArgumentError, match="random"):
        jacobian(k, x, y, max_memory=1)
    assert jacobian(k, x, y).shape == (2, 2)


@pytest.mark.sweep
def test_limit_that_a_later_call_exceeds():
    x, y, t = scalars([1.0, 2.0, 3.0, 4.0]), outputs(4), outputs(4)
    X = read(x)
    first = kernel_of("for i in y: y[i] += x[i] * y[i]", y=y, x=x)
    more = kernel_of("for i in y: t[i] = x[i] * y[i]", y=y, t=t, x=x)
    last = kernel_of("for i in y: y[i] += t[i]", y=y, t=t)

    def pipeline(n):
        for _ in range(3):  # repeated launches, after the first of which nothing is saved
            first()
        if n:
            more()
            last()

    for make in (Jacobian, lambda *a, **o: lambda args: jacobian(*a, **{**o, "args": args})):
        plan = make(pipeline, x, y, args=(0,), max_memory=100)  # the tangents of t need 128 bytes
        for n in (0, 0, 1, 0, 1):
            y.fill(1.0)
            J = plan(args=(n,))
            assert_allclose(J, np.diag(3 * (1 + X) ** 2 if n == 0 else 4 * (1 + X) ** 3), rtol=1e-12)
            assert_allclose(read(y), (1 + X) ** (3 + n))


@pytest.mark.mostly_sweep("False-options0", "False-options1", "True-options0")
@pytest.mark.parametrize("options", [{"chunk_size": 1}, {"max_memory": 1}])
@pytest.mark.parametrize("is_pipeline", [False, True])
def test_nothing_is_changed_where_runs_cannot_be_repeated(options, is_pipeline):
    x, t, y = scalars([0.3, 0.5]), outputs(2), outputs(2)
    before = kernel_of("for i in t: t[i] += x[i]", t=t, x=x)

    @ti.kernel
    def random():
        for i in y:
            t[i] += x[i] * ti.random(ti.f64)
        for i in y:
            y[i] += t[i] ** 2

    pipeline = lambda: (before(), random())
    with pytest.raises(InvalidArgumentError, match="random"):
        jacobian(pipeline if is_pipeline else random, x, y, **options)
    assert_array_equal(read(t), [0, 0])
    assert_array_equal(read(y), [0, 0])
