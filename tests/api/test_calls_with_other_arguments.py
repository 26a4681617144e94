"""Calls of one prepared form with other arguments: fields by name, other sizes, limits that hold for each call."""

import numpy as np
import pytest
import taichi as ti
from devices import real
from differences import outputs, scalars
from kernel_texts import kernel_of
from numpy.testing import assert_allclose

from taichi_ext import InvalidArgumentError, Jacobian, jacobian, value_and_jacobian

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
            run.calls += 1
            t = np.zeros_like(x)
            double(x)
            square(x, t)
            add(t, y)

        run.calls = 0
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
            pipeline.calls = 0
            self.check(plan, n)
            assert pipeline.calls == runs

    @pytest.mark.sweep
    def test_memory_that_no_longer_suffices_in_the_middle(self, pipeline):
        plan = Jacobian(
            pipeline, "x", "y", args=(real(np.ones(2)), real(np.zeros(2))), max_memory=50 * real(0.0).itemsize
        )
        self.check(plan, 2)
        pipeline.calls = 0
        self.check(plan, 7)  # the tangents of x fit, those of t do not: x has been doubled by then
        assert pipeline.calls > 1
