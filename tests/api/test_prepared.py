"""The prepared form and the cache: what is built once, what is kept, and how often a kernel is launched."""

import gc
import queue
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import taichi as ti
from devices import real
from differences import outputs, scalars
from kernel_texts import func_of, kernel_of
from numpy.testing import assert_allclose, assert_array_equal
from taichi.lang import impl
from taichi.lang.kernel_impl import Kernel

from taichi_ext import InvalidArgumentError, Jacobian, jacobian, value_and_jacobian
from taichi_ext.backend import kernels
from taichi_ext.runtime.launching import session

KEEPS = pytest.mark.taichi_only("Quadrants keeps what is decorated for ever, too")


@pytest.fixture
def launches(monkeypatch):
    """The names of the kernels that are launched, in order."""
    names = []

    def counted(launch, is_counted=lambda kernel: True):
        def counting(self, cpp, *args, **keywords):
            if is_counted(self):
                names.append(type(self).__name__)
            return launch(self, cpp, *args, **keywords)

        return counting

    monkeypatch.setattr(Kernel, "launch_kernel", counted(Kernel.launch_kernel, lambda k: type(k) is Kernel))
    monkeypatch.setattr(kernels.host, "launch_fused", counted(kernels.host.launch_fused))  # of kernels with tangents
    return names


@pytest.mark.usefixtures("ti64")
class TestCalls:
    def test_pipelines_of_one_definition_may_name_fields_and_then_arrays(self):
        of_fields = kernel_of("for i in a: b[i] = a[i] ** 2", "a: ti.template(), b: ti.template()")
        of_arrays = kernel_of("for i in a: b[i] = a[i] ** 2", "a: A, b: A")
        pipeline = lambda kernel: lambda a, b: kernel(a, b)
        for kernel, args in (
            (of_fields, (scalars([0.3, 0.5]), outputs(2))),
            (of_arrays, (np.array([0.3, 0.5]), np.zeros(2))),
        ):
            assert_allclose(jacobian(pipeline(kernel), "a", "b", args=args), np.diag([0.6, 1.0]))

    @pytest.mark.cpu_only("Taichi copies arrays to and from a GPU by kernels, which count")
    @pytest.mark.parametrize("count", [1, 70])
    def test_first_use_does_not_launch_anything(self, launches, count):
        """And a call launches each kernel as often as a plain run, whatever the number of parameters."""
        x, y = scalars(np.linspace(0.3, 0.5, count)), outputs(1)
        k = kernel_of("for i in x: y[0] += x[i]", x=x, y=y)

        def run():
            for _ in range(3):
                k()

        launches.clear()
        plan = Jacobian(k, x, y)
        assert launches == []
        plan()
        assert len(launches) == 1
        assert launches != ["Kernel"]  # but the one with tangents
        assert_allclose(y.to_numpy(), np.linspace(0.3, 0.5, count).sum(), rtol=1e-14)
        plan = Jacobian(run, x, y)
        plan()  # which also looks for numbers that Python passes on
        launches.clear()
        assert_allclose(plan(), np.full((1, count), 3.0))
        assert len(launches) <= 3 and "Kernel" not in launches  # the third one is prepared by then

    def test_source_is_the_text_that_runs(self):
        x, y = scalars([0.3]), outputs(1)
        wave = kernel_of("wave: for i in y: y[i] = a * ti.sin(x[i])", "a: ti.f64", y=y, x=x)
        plan = Jacobian(wave, x, y, args=(2.0,))
        plan()
        compile(plan.source, "text", "exec")
        lines = [line.split("#")[0].strip() for line in plan.source.splitlines()]
        assert "y[i] = a * ti.sin(x[i])" in lines
        kind = f"ti.{ti.f64.to_string()}"  # ti.f32 where the tests run in it
        assert f"def wave_jacobian(a: {kind}, d_y: ti.types.ndarray(dtype={kind}, ndim=1)):" in lines

    @pytest.mark.sweep
    def test_kernels_of_all_blocks_are_kept(self, traces, monkeypatch):
        monkeypatch.setattr(session, "MOST_KERNELS", 2)
        x, y = scalars([0.3, 0.5, 0.7, 0.2, 0.4]), outputs(5)

        @ti.kernel
        def k(n: ti.template()):
            for i in y:
                y[i] = x[0] * x[1] + x[2] * x[3] + x[4] * x[n]  # so that each block has a kernel of its own

        def run():
            k(0)
            k(1)

        for f, args, count in ((k, (2,), 5), (run, (), 10)):
            plan = Jacobian(f, x, y, args=args, chunk_size=1)
            traces.clear()
            first = plan()
            assert_array_equal(plan(), first)
            assert traces == ["k"] * count

    def test_source_is_the_same_in_each_run(self):
        x, y = scalars([0.3]), [outputs(1) for _ in range(6)]
        one, two, three, four, five, six = y

        @ti.kernel
        def k():
            six[0] = one[0] = four[0] = two[0] = five[0] = three[0] = x[0] ** 2

        plan = Jacobian(k, x, y)
        plan()
        (header,) = (line for line in plan.source.splitlines() if "def k_jacobian(" in line)
        names = [part.split("d_")[-1].split(":")[0] for part in header.split(" d_")[1:]]
        assert len(names) >= 5
        assert names == sorted(names)


@pytest.mark.usefixtures("ti64")
class TestCache:
    @pytest.mark.chosen_only("counts the kernels of one run", "--chunk-size")
    def test_repeated_calls_build_nothing(self, traces):
        x, y = scalars([0.3, 0.5]), outputs(2)
        k = kernel_of("for i in x: y[i] = a * x[i] ** 2", "a: ti.f64", x=x, y=y)

        for a in (1.0, 2.0, 2.0, 3.0):
            by_x, by_a = jacobian(k, [x, "a"], y, args=(a,))
            assert_allclose(by_x, np.diag(2 * a * np.array([0.3, 0.5])))
            assert_allclose(by_a, [0.09, 0.25])
        assert traces == ["k"]
        jacobian(k, x, y, args=(1.0,))
        jacobian(k, [x, "a"], y, args=(1.0,))
        assert traces == ["k", "k"]

    def test_steps_of_a_simulation_build_once(self, traces):
        x, v, p = scalars([0.3, 0.5]), outputs(2), scalars([1.5])
        step = kernel_of("for i in x: v[i] -= 0.1 * p[0] * x[i]; x[i] += 0.1 * v[i]", p=p, v=v, x=x)

        def run(n):
            for _ in range(n):
                step()

        jacobian(run, p, x, args=(5,))
        few = len(traces)
        jacobian(run, p, x, args=(50,))
        assert len(traces) == few <= 3


def forget_kernels(name):
    """Take kernels out of Taichi's own list, which holds every kernel for ever."""
    kernels = impl.get_runtime().kernels
    kernels[:] = [k for k in kernels if k.func.__name__ != name]


@pytest.mark.usefixtures("ti64")
class TestLifetime:
    @pytest.mark.sweep
    @KEEPS
    def test_a_kernel_that_is_dropped_is_freed(self):
        x, y = scalars([0.3]), outputs(1)

        def use():
            helper = func_of("return a * a", "a")
            short_lived = kernel_of("short_lived: y[0] = helper(x[0])", y=y, helper=helper, x=x)
            assert_allclose(jacobian(short_lived, x, y), [[0.6]])
            Jacobian(short_lived, x, y)()
            primal = short_lived._primal
            return [weakref.ref(o) for o in (short_lived, primal, primal.func, helper)]

        references = use()
        forget_kernels("short_lived")
        gc.collect()
        assert [r() for r in references] == [None] * 4

    @KEEPS
    def test_what_was_prepared_goes_with_the_decorated_function(self):
        """Taichi keeps the kernel itself for ever; its plan, fused kernels and arguments do not stay with it."""

        def use():
            k = kernel_of("for i in o: o[i] = a[i] ** 2", "a: A1, o: A1")
            a, o = real([0.3, 0.5]), real(np.zeros(2))
            jacobian(k, a, o, args=(a, o))
            return [weakref.ref(k), weakref.ref(a), weakref.ref(o)]

        references = use()
        gc.collect()
        assert [r() for r in references] == [None] * 3


GROWTH = """
import gc, sys
import taichi as ti
from taichi_ext import jacobian

ti.init(arch=ti.cpu, offline_cache=False, log_level=ti.ERROR, cpu_max_num_threads=1)
x, y = ti.field(ti.f32, 4), ti.field(ti.f32, 4)

def new_kernel():
    @ti.kernel
    def k():
        for i in x:
            t = 0.0
            for j in range(3):
                t += x[i] * x[j]
            y[i] = t
    return k

def resident():
    gc.collect()
    return int(open("/proc/self/statm").read().split()[1]) * 4096

for n in range(90):
    jacobian(new_kernel(), x, y)
    if n == 29:
        before = resident()
print((resident() - before) / 60)
"""


@pytest.mark.sweep
@pytest.mark.cpu_only("it measures the memory of the host")
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the resident memory is read from /proc")
@KEEPS
def test_traces_that_are_not_launched_leave_no_kernel_in_the_program(tmp_path):
    """Taichi keeps each kernel of a program for ever: about 3 kB for a plain one, 190 kB for all traces of this one."""
    program = tmp_path / "growth.py"
    program.write_text(GROWTH)
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=900, check=True)
    assert float(done.stdout.split()[-1]) < 60e3


# Calls of one prepared form with other arguments: fields by name, other sizes, limits that hold for each call.


cube = kernel_of("for i in x: y[i] = x[i] ** 3", "x: ti.template(), y: ti.template()")


def cube_in_pipeline(x, y):
    cube(x, y)


@pytest.mark.usefixtures("ti64")
class TestFieldsAsArguments:
    @pytest.mark.sweep
    @pytest.mark.parametrize("function", [cube, cube_in_pipeline])
    def test_named_fields_are_those_of_the_call(self, function):
        plan = Jacobian(function, "x", "y", args=(scalars([1.0, 2.0]), outputs(2)))
        for values in ([3.0, 4.0], [5.0, 6.0, 7.0], [8.0, 9.0]):
            x, y = scalars(values), outputs(len(values))
            expected = np.diag(3 * np.square(values))
            assert_allclose(plan(args=(x, y)), expected)
            assert_allclose(plan.value(), np.array(values) ** 3)
            value, J = value_and_jacobian(function, ["x"], {"y": "y"}, args=(x, y))
            assert_allclose(J["y"][0], expected)
            assert_allclose(value["y"], np.array(values) ** 3)

    def test_fields_given_as_objects_are_not_taken_from_another_call(self):
        x, y, other_x, other_y = scalars([1.0, 2.0]), outputs(2), scalars([3.0, 4.0]), outputs(2)
        assert_allclose(jacobian(cube, x, y, args=(x, y)), np.diag([3.0, 12.0]))
        with pytest.raises(InvalidArgumentError, match="not read"):
            jacobian(cube, x, y, args=(other_x, y))
        with pytest.raises(InvalidArgumentError, match="not written"):
            jacobian(cube, x, y, args=(x, other_y))
        assert_allclose(other_y.to_numpy(), 0)  # refused before anything ran
        assert_allclose(jacobian(cube, x, y, args=(x, y)), np.diag([3.0, 12.0]))

    def test_integer_field_in_a_later_call(self):
        plan = Jacobian(cube, "x", "y", args=(scalars([1.0, 2.0]), outputs(2)))
        plan()
        with pytest.raises(InvalidArgumentError, match=r"args\[0\].*i32"):
            plan(args=(ti.field(ti.i32, 2), outputs(2)))

    def test_fields_of_an_earlier_call_are_destroyed(self):
        builder, x, y = ti.FieldsBuilder(), ti.field(ti.f64), ti.field(ti.f64)
        builder.dense(ti.i, 2).place(x, y)
        tree = builder.finalize()
        plan = Jacobian(cube, "x", "y", args=(x, y))
        plan()
        tree.destroy()
        with pytest.raises(InvalidArgumentError, match="destroyed"):
            plan()
        assert_allclose(plan(args=(scalars([1.0, 2.0]), outputs(2))), np.diag([3.0, 12.0]))


@pytest.mark.usefixtures("ti64")
class TestArgumentsOfOtherSizes:
    @pytest.fixture
    def pipeline(self):
        double = kernel_of("for i in x: x[i] *= 2", "x: A1")
        square = kernel_of("for i in x: t[i] = x[i] ** 2", "x: A1, t: A1")
        add = kernel_of("for i in t: y[i] += t[i]", "t: A1, y: A1")

        def run(x, y):
            run.calls.put(1)
            t = np.zeros_like(x)
            double(x)
            square(x, t)
            add(t, y)

        run.calls = queue.SimpleQueue()
        return run

    def check(self, plan, n):
        x = real(np.linspace(1, 2, n))
        start, y = x.copy(), real(np.ones(n))
        assert_allclose(plan(args=(x, y)), np.diag(8 * start), atol=1e-12)
        assert_allclose(x, 2 * start)
        assert_allclose(y, 1 + 4 * start**2)

    @pytest.mark.sweep
    def test_chunk_size_is_kept(self, pipeline):
        plan = Jacobian(pipeline, "x", "y", args=(real(np.ones(2)), real(np.zeros(2))), chunk_size=2)
        for n, runs in ((2, 1), (6, 3), (11, 6), (3, 2)):
            self.check(plan, n)  # in the first call, Python's numbers are looked at in further runs
            pipeline.calls = queue.SimpleQueue()
            self.check(plan, n)
            assert pipeline.calls.qsize() == runs

    @pytest.mark.sweep
    def test_memory_that_no_longer_suffices_in_the_middle(self, pipeline):
        plan = Jacobian(
            pipeline, "x", "y", args=(real(np.ones(2)), real(np.zeros(2))), max_memory=50 * real(0.0).itemsize
        )
        self.check(plan, 2)
        pipeline.calls = queue.SimpleQueue()
        self.check(plan, 7)  # the tangents of x fit, those of t do not: x has been doubled by then
        assert pipeline.calls.qsize() > 1
