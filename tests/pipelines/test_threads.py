"""Calls from several threads: each has its own arguments and its own result, first calls too."""

import concurrent.futures
import gc
import inspect
import math
import queue
import sys
import threading
from contextlib import contextmanager
from multiprocessing.pool import ThreadPool
from pathlib import Path

import devices
import numpy as np
import pytest
import taichi as ti
from differences import outputs, scalars
from kernel_texts import kernel_of, squares
from many_threads import in_threads
from numpy.testing import assert_allclose, assert_array_equal
from taichi.lang import impl
from taichi_program import end_program, initialise

import taichi_ext
from taichi_ext import (
    DerivativeWarning,
    InvalidArgumentError,
    Jacobian,
    UnsupportedError,
    backend,
    jacobian,
    jvp,
    value_and_jacobian,
)
from taichi_ext.cached import cached_property

# The number that a function gives in a pool of the standard library, of concurrent.futures or multiprocessing.
POOL_CALLS = {
    "submit": (0, lambda pool, work: pool.submit(work, 1).result(60)),
    "executor map": (0, lambda pool, work: next(pool.map(work, [1]))),
    "apply": (1, lambda pool, work: pool.apply(func=work, args=(1,))),
    "starmap": (1, lambda pool, work: pool.starmap(work, [(1, 2)])[0]),
    "imap": (1, lambda pool, work: next(pool.imap(work, [1]))),
    "imap_unordered": (1, lambda pool, work: next(pool.imap_unordered(work, [1]))),
}


@contextmanager
def started_pools():
    with concurrent.futures.ThreadPoolExecutor(1) as executor, ThreadPool(1) as pool:
        executor.submit(int).result(60)
        yield executor, pool


def in_pool_before(how, pools, work):
    number, call = POOL_CALLS[how]
    return call(pools[number], work)


@pytest.fixture(autouse=True)
def frequent_switches():
    """Threads take turns much more often than usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def area():
    area = kernel_of("area(width: ti.f64, height: ti.f64) -> ti.f64: return width * width * height")
    return area


@pytest.mark.usefixtures("ti64")
class TestCalls:
    @pytest.mark.sweep
    def test_arguments_and_returned_values_are_of_the_own_call(self, area):
        def work(number):
            for n in range(40):
                w = number + 1.0 + n / 8
                value, (by_w, by_h) = value_and_jacobian(area, ["width", "height"], args=(w, 5.0))
                assert_allclose([value, by_w, by_h], [5 * w * w, 10 * w, w * w])

        in_threads(work)

    @pytest.mark.sweep
    def test_a_prepared_form_is_shared(self, area):
        plan = Jacobian(area, ["width", "height"], args=(1.0, 5.0))

        def work(number):
            w = number + 2.0
            assert_allclose(plan(), [10.0, 1.0])
            for _ in range(40):
                assert_allclose(plan(args=(w, 5.0)), [10 * w, w * w])
                assert_allclose(plan.value(), 5 * w * w)
                assert_allclose(plan(), [10 * w, w * w])

        in_threads(work)
        assert_allclose(plan(), [10.0, 1.0])

    def test_rows_in_scratch_memory(self):
        n = 600  # more columns than a local array holds
        x, scale = scalars(np.ones(n)), np.arange(1.0, n + 1)

        @ti.kernel
        def k(w: ti.f64) -> ti.f64:
            total = 0.0
            for _ in range(1):
                s = 0.0
                for i in range(n):
                    s += w * x[i] * (i + 1)
                total += s * s
            return total

        def work(number):
            w = number + 1.0
            for _ in range(4):
                assert_allclose(jacobian(k, x, args=(w,)), 2 * w * w * scale.sum() * scale)

        in_threads(work, 4)

    def test_pipelines(self):
        square = kernel_of("for i in a: b[i] = a[i] * a[i]", "a: A1, b: A1")
        scaled = kernel_of("for i in b: c[i] = factor * b[i] * b[i]", "b: A1, factor: ti.f64, c: A1")

        def pipeline(a, factor, c):
            b = np.zeros_like(a)
            square(a, b)
            for _ in range(2):
                scaled(b, factor, c)

        def work(number):
            a, c = devices.real([1.0, 2.0, 3.0]), devices.real(np.zeros(3))
            for n in range(10):
                factor = 1.0 + number + n
                J = jacobian(pipeline, a, c, args=(a, factor, c), chunk_size=None if number % 2 else 2)
                assert_allclose(J, np.diag(4 * factor * a**3))
                assert_allclose(c, factor * a**4)

        in_threads(work)

    @pytest.mark.parametrize("is_served", [False, True])
    def test_a_pipeline_may_wait_for_another_thread(self, is_served):
        """One of its own, or one that takes work from a queue."""
        x, y, z = scalars([1.0, 2.0]), outputs(2), outputs(2)
        work, done, found = queue.Queue(), queue.Queue(), []
        first, other = squares(x, y), kernel_of("for i in x: z[i] = 3 * x[i]", x=x, z=z)

        def inner():
            if float(x[1]) > 0:
                other()

        def pipeline():
            if is_served:
                work.put(inner)
                found.append(done.get(timeout=120))
            else:
                in_threads(lambda _: found.append(jacobian(inner, x, z)), 1)
            if float(x[0]) > 0:
                first()

        server = threading.Thread(target=lambda: [done.put(jacobian(f, x, z)) for f in iter(work.get, None)])
        server.start()
        assert_allclose(jacobian(pipeline, x, y), np.diag([2.0, 4.0]))
        work.put(None)
        server.join(60)
        assert all(np.allclose(J, np.diag([3.0, 3.0])) for J in found)

    def test_who_moves_params_goes_before_later_runs(self):
        """Otherwise runs of other threads, one after the other, would not let a first call end."""
        order = []

        def run(name, **options):
            with backend.running(**options):
                order.append(name)

        threads = [
            threading.Thread(target=run, args=("moves",), kwargs={"moves": True}),
            threading.Thread(target=run, args=("later",)),
        ]
        with backend.running():
            for thread in threads:
                thread.start()
                thread.join(0.3)
        for thread in threads:
            thread.join(60)
        assert order == ["moves", "later"]

    @pytest.mark.mostly_sweep("pool", "field entry", "from_numpy", *sorted(POOL_CALLS))
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    @pytest.mark.parametrize(
        "how", ["launch", "nested launch", "pool", "field entry", "fill", "from_numpy", *POOL_CALLS]
    )
    def test_threads_of_a_pipeline_lose_no_derivative_in_silence(self, how):
        x, y = scalars([1.0, 2.0]), outputs(2)
        square = squares(x, y)
        add = kernel_of("for i in x: y[i] += 5 * x[i]", x=x, y=y)

        def store():
            y[0] = 3.0

        def nested():
            in_thread(add)

        def in_thread(work):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join(60)

        def in_pool():
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                pool.submit(add).exception()

        stores = {"field entry": store, "fill": lambda: y.fill(1.0), "from_numpy": lambda: y.from_numpy(np.ones(2))}
        works = {"launch": add, "nested launch": nested, **stores}

        def pipeline():
            square()
            if how in POOL_CALLS:
                in_pool_before(how, pools, lambda *_: add())
            else:
                in_pool() if how == "pool" else in_thread(works[how])

        with started_pools() as pools, pytest.raises(UnsupportedError, match="a thread that works for a pipeline"):
            jacobian(pipeline, x, y)
        in_thread(add)  # threads are as free as before
        assert_allclose(jacobian(square, x, y), np.diag([2.0, 4.0]))
        assert_allclose(y.to_numpy(), [1.0, 4.0])

    @pytest.mark.parametrize("how", POOL_CALLS)
    def test_pools_that_were_started_before_may_read(self, how):
        x, y, z = scalars([1.0, 2.0]), outputs(2), outputs()
        square = squares(x, y)
        add = kernel_of("z[None] = y[0] * number", "number: ti.f64", z=z, y=y)

        def pipeline():
            square()
            add(in_pool_before(how, pools, lambda *_: math.sqrt(y[0] + y[1])))

        with started_pools() as pools:
            expected = [2 * math.sqrt(5) + 1 / math.sqrt(5), 2 / math.sqrt(5)]
            assert_allclose(jacobian(pipeline, x, z), expected)
            assert_allclose(jacobian(pipeline, x, z, mode="reverse"), expected)
            assert in_pool_before(how, pools, lambda *_: type(y[0])) is float

    @pytest.mark.parametrize("mode", [None, "reverse"])
    @pytest.mark.parametrize("kind", ["pipeline", "kernel", "kernel again"])
    def test_no_thread_sees_moved_params(self, kind, mode):
        """A pipeline whose Python reads numbers is run again, with other params; another thread waits meanwhile."""
        x, y, z, numbers = scalars([1.0, 2.0]), outputs(2), outputs(2), queue.SimpleQueue()
        square, other = squares(x, y), squares(x, z)
        may_begin, found = threading.Event(), []

        def read():
            if x[0] > 0:
                other()

        function = read if kind == "pipeline" else other
        if kind == "kernel again":
            jacobian(other, x, z)

        def work():
            may_begin.wait(60)
            found.append(jacobian(function, x, z))

        def pipeline():
            square()
            number = float(x[0])
            numbers.put(number)
            if number != 1.0:
                may_begin.set()
                thread.join(0.2)
            y[0] = number

        thread = threading.Thread(target=work)
        thread.start()
        with pytest.warns(DerivativeWarning):
            jacobian(pipeline, x, y, mode=mode)
        thread.join(60)
        assert len({numbers.get() for _ in range(numbers.qsize())}) > 1
        assert_array_equal(found[0], np.diag([2.0, 4.0]))
        assert_array_equal(z.to_numpy(), [1.0, 4.0])

    @pytest.mark.chosen_only("what it looks at is that of one run", "--chunk-size")
    def test_threads_of_a_pipeline_may_read(self):
        x, y, seen = scalars([1.0, 2.0]), outputs(2), []
        square = squares(x, y)

        def pipeline():
            square()
            in_threads(lambda _: seen.extend([y[1], *y.to_numpy()]), 1)

        assert_allclose(jacobian(pipeline, x, y), np.diag([2.0, 4.0]))
        assert_allclose(np.array(seen, float), [4.0, 1.0, 4.0])


def test_a_property_that_waits_keeps_no_other_object_waiting():
    """On Python 3.10 and 3.11, ``functools.cached_property`` has one lock for all objects of a class."""

    class Owner:
        def __init__(self, wait):
            self.wait, self.calls = wait, 0

        @cached_property
        def value(self):
            self.calls += 1
            return self.wait()

    is_waiting, may_end, found = threading.Event(), threading.Event(), []
    slow = Owner(lambda: is_waiting.set() or may_end.wait(60))
    waiting = threading.Thread(target=lambda: found.append(slow.value))
    waiting.start()
    is_waiting.wait(60)
    quick = Owner(lambda: "quick")
    reading = threading.Thread(target=lambda: found.append(quick.value), daemon=True)
    reading.start()
    reading.join(10)
    may_end.set()
    waiting.join()
    reading.join()
    assert found == ["quick", True]
    assert (quick.value, quick.calls) == ("quick", 1)
    assert isinstance(Owner.value, cached_property)


@pytest.mark.sweep
@pytest.mark.usefixtures("ti64")
def test_calls_do_not_wait_for_each_other():
    """A thread reads a property under the lock for launches, while another one waits for that lock in a property."""
    fields = [(scalars([1.0, 2.0, 3.0]), outputs(3)) for _ in range(8)]
    ti.sync()

    def work(number):
        x, y = fields[number]
        k = squares(x, y)
        for _ in range(20):
            found = jvp(k, x, np.ones(3), y) if number % 2 else jacobian(k, x, y, chunk_size=2).sum(axis=1)
            assert_allclose(found, [2.0, 4.0, 6.0])

    in_threads(work)


@pytest.mark.usefixtures("ti64")
@pytest.mark.filterwarnings("ignore:.*Calling non-taichi function")
def test_only_the_thread_that_traces_is_inside_a_kernel():
    seen = []

    def note():
        in_threads(lambda _: seen.append(impl.inside_kernel()), 1)
        seen.append(impl.inside_kernel())

    k = kernel_of("ti.static(note())", note=note)
    k()
    assert set(zip(seen[::2], seen[1::2], strict=True)) == {(False, True)}  # Quadrants traces it twice


@pytest.mark.sweep
class TestFirstCalls:
    @pytest.fixture(autouse=True)
    def program(self):
        initialise(default_fp=ti.f64)
        yield
        end_program()

    def test_of_one_kernel_without_any_field(self, area):
        in_threads(lambda n: assert_allclose(jacobian(area, ["width", "height"], args=(n, 5.0)), [10 * n, n * n]))

    def test_of_kernels_of_their_own_among_plain_launches(self):
        fields = [(scalars(np.arange(1.0, 4.0)), outputs(3)) for _ in range(8)]
        ti.sync()

        def kernel(x, y, factor):
            k = kernel_of("for i in x: y[i] = factor * x[i] ** 2", x=x, y=y, factor=factor)
            return k

        def work(number):
            x, y = fields[number]
            for factor in range(1, 4):
                k = kernel(x, y, factor)
                if number % 2:
                    k()
                    assert_allclose(y.to_numpy(), factor * np.arange(1.0, 4.0) ** 2)
                x.fill(float(number + 1))
                x[1] = 2.0
                assert_allclose(jacobian(k, x, y).diagonal(), 2 * factor * np.array([number + 1, 2, number + 1]))
                x.from_numpy(np.arange(1.0, 4.0))

        in_threads(work)

    def test_fields_that_are_not_laid_out_are_refused(self):
        x, y = ti.field(ti.f64, 3), ti.field(ti.f64, 3)
        k = squares(x, y)

        def work(_):
            with pytest.raises(InvalidArgumentError, match=r"ti\.sync\(\)"):
                jacobian(k, x, y)

        in_threads(work, 2)
        x.fill(2.0)
        in_threads(lambda _: assert_allclose(jacobian(k, x, y), 4 * np.eye(3)), 2)


class Finalized:
    """In a cycle: the collector runs Python, and so may change the thread, in the middle of whatever allocates."""

    def __init__(self):
        self.me = self

    def __del__(self):
        for _ in range(20):
            pass


def test_sources_are_parsed_by_one_thread_at_a_time():
    """CPython before 3.12 counts the depth of a tree once for all threads, and raises SystemError if they meet."""
    text = inspect.getsource(inspect)
    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(1)

    def work(number):
        if number:  # at another depth of the stack
            work(number - 1)
        else:
            for _ in range(5):
                Finalized()
                backend.syntax_tree(text)

    try:
        in_threads(work, 4)
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*threshold)


def test_each_source_is_parsed_by_that_function():
    parsing = [path.name for path in Path(taichi_ext.__file__).parent.rglob("*.py") if "ast.parse(" in path.read_text()]
    assert parsing == ["threads.py"]
