"""Trees of fields that a pipeline makes and destroys, and those that are destroyed before, during and after a call.

Taichi reads freed memory where a field no longer exists, which ends the process: here every case is right or an error.
"""

import gc

import numpy as np
import pytest
import taichi as ti
from kernel_texts import kernel_of, squares
from numpy.testing import assert_allclose, assert_array_equal
from taichi_program import end_program, initialise

import taichi_ext as te
from taichi_ext import Jacobian, jacobian, linear_operator, torch_function

N = 3
X = np.array([0.5, 1.5, -2.0])
ENDED = "no longer exists.*create it again"
OPTIONS = [{}, {"chunk_size": 1}, {"chunk_size": 2}, {"max_memory": 40}, {"format": "csr"}, {"tangents": "dense"}]


@pytest.fixture(autouse=True)
def program():
    initialise(default_fp=ti.f64)
    yield
    end_program()


square = kernel_of("for i in a: b[i] = a[i] ** 2", "a: ti.template(), b: ti.template()")


def tree(*fields, shape=N, kind="dense"):
    builder = ti.FieldsBuilder()
    getattr(builder, kind)(ti.i, shape).place(*fields)
    return builder.finalize()


def fields(*values):
    made = []
    for value in values:
        made.append(ti.field(ti.f64, N))
        made[-1].from_numpy(np.broadcast_to(np.asarray(value, np.float64), N).copy())
    return made


def dense(J):
    return J.toarray() if hasattr(J, "toarray") else J


def refused(call, what=ENDED):
    with pytest.raises(te.InvalidArgumentError, match=what):
        call()


def by_fields(x, y):
    t = ti.field(ti.f64)
    own = tree(t)
    square(x, t)
    square(t, y)
    own.destroy()


def by_sparse_fields(x, y):
    t = ti.field(ti.f64)
    own = tree(t, kind="pointer")
    for i in range(N):
        t[i] = 0.0
    square(x, t)
    t[1] = 7.0
    square(t, y)
    own.destroy()


def by_two_trees(x, y):
    """The second tree takes the number of the first, and most likely its memory."""
    first = ti.field(ti.f64)
    own = tree(first)
    square(x, first)
    square(first, y)
    own.destroy()
    second = ti.field(ti.f64)
    own = tree(second, shape=5)
    second.fill(2.0)
    double_of(x, second)
    add_up(second, y)
    own.destroy()


double_of = kernel_of("for i in a: b[i] = a[i] ** 2", "a: ti.template(), b: ti.template()")
add_up = kernel_of("for i in y: y[i] += a[i] + a[4]", "a: ti.template(), y: ti.template()")

PIPELINES = {
    "fields": (by_fields, 4 * X**3),
    "sparse": (by_sparse_fields, [4 * X[0] ** 3, 0.0, 4 * X[2] ** 3]),
    "two trees": (by_two_trees, 4 * X**3 + 2 * X),
}


def test_nodes_of_other_trees_are_deactivated():
    x, y = fields(X, 0.0)
    other = ti.field(ti.f64)
    node = ti.root.pointer(ti.i, N)
    node.place(other)
    squares = kernel_of("for i in x: a[i] = x[i] ** 2; y[i] = a[i] ** 2", "a: ti.template()", x=x, y=y)
    deactivate_first = kernel_of("ti.deactivate(node, [0])", node=node)

    def pipeline():
        t = ti.field(ti.f64)
        own = tree(t, kind="pointer")
        squares(t)
        own.destroy()
        deactivate_first()
        node.deactivate_all()

    assert_allclose(jacobian(pipeline, x, y, chunk_size=2), np.diag(4 * X**3))


@pytest.mark.sweep
class TestTreesOfThePipeline:
    @pytest.mark.parametrize("name", PIPELINES)
    def test_jacobian(self, name):
        x, y, z = fields(X, 0.0, 0.0)
        function, expected = PIPELINES[name]
        pipeline = lambda: function(x, y)
        pipeline()
        after = y.to_numpy()
        for options in OPTIONS:
            y.fill(0.0)
            assert_allclose(dense(jacobian(pipeline, x, y, **options)), np.diag(expected), err_msg=str(options))
            assert_array_equal(y.to_numpy(), after)
            assert_array_equal(x.to_numpy(), X)
            refused(lambda options=options: jacobian(pipeline, x, z, **options), "is not written by the kernels")

    def test_arrays_that_are_deleted(self):
        x, y = fields(X, 0.0)
        to_array = kernel_of("for i in a: b[i] = a[i] ** 2", "a: ti.template(), b: A1")
        from_array = kernel_of("for i in b: b[i] = a[i] ** 2", "a: A1, b: ti.template()")

        def pipeline():
            for _ in range(2):
                middle = ti.ndarray(ti.f64, N)
                to_array(x, middle)
                from_array(middle, y)
                del middle
                gc.collect()

        for options in OPTIONS:
            assert_allclose(dense(jacobian(pipeline, x, y, **options)), np.diag(4 * X**3))


class TestTreesFromBefore:
    @pytest.mark.sweep
    def test_destroyed_by_the_pipeline(self):
        lost = r"the tree of a field of shape \(3,\) was destroyed, which was there at its start"
        for options in ({}, {"chunk_size": 2}, None):
            x, y = fields(X, 0.25)
            t = ti.field(ti.f64)
            own = tree(t)

            def pipeline(x=x, y=y, t=t, own=own):
                square(x, t)
                square(t, y)
                own.destroy()

            if options is None:
                refused(lambda run=pipeline, x=x, y=y: linear_operator(run, x, y) @ np.ones(N), lost)
            elif options:
                refused(lambda o=options: jacobian(pipeline, x, y, **o), lost)
                assert_array_equal(y.to_numpy(), 0.25)
            else:
                assert_allclose(jacobian(pipeline, x, y), np.diag(4 * X**3))
                assert_allclose(y.to_numpy(), X**4)

    @pytest.mark.sweep
    def test_kernel_that_names_a_destroyed_field(self):
        x, y = fields(X, 0.25)
        t = ti.field(ti.f64)
        own = tree(t)
        first = kernel_of("for i in x: t[i] = x[i] ** 2", x=x, t=t)
        second = kernel_of("second: for i in x: y[i] = t[i] ** 2", x=x, y=y, t=t)

        def pipeline(count, is_destroying):
            for _ in range(count):
                first()
                second()
            if is_destroying:
                own.destroy()
            second()

        assert_allclose(jacobian(pipeline, x, y, args=(3, False)), np.diag(4 * X**3))
        refused(lambda: jacobian(pipeline, x, y, args=(3, True)), "second uses the field t, which no longer exists")
        refused(lambda: jacobian(pipeline, x, y, args=(1, False)), "The field t no longer exists")
        refused(lambda: jacobian(second, x, y), "The field t no longer exists")

    @pytest.mark.sweep
    def test_python_that_uses_a_destroyed_field(self):
        x, y = fields(X, 0.25)

        def pipeline(use, own, t, v):
            square(x, t)
            square(t, y)
            own.destroy()
            use(t, v)

        for use in (
            lambda t, v: t[0],
            lambda t, v: t.__setitem__(0, 1.0),
            lambda t, v: t.to_numpy(),
            lambda t, v: t.from_numpy(np.ones(N)),
            lambda t, v: v[0],
            lambda t, v: v.__setitem__(0, [1.0, 2.0]),
            lambda t, v: v.to_numpy(),
            lambda t, v: v.get_scalar_field(1)[0],
            lambda t, v: v.fill(1.0),
            lambda t, v: t.copy_from(t),
        ):
            t, v = ti.field(ti.f64), ti.Vector.field(2, ti.f64)
            own = tree(t, v)
            v[0] = [1.0, 2.0]
            refused(lambda: jacobian(pipeline, x, y, args=(use, own, t, v)))

    @pytest.mark.sweep
    @pytest.mark.parametrize("format", [None, "csr"])
    def test_launches_that_are_repeated(self, format):
        """A new tree that lies where a destroyed one was is not taken for it."""
        for round_ in range(3):
            a, b = ti.field(ti.f64), ti.field(ti.f64)
            own = tree(a, b)
            a.from_numpy(X + round_)

            bare = squares(a, b)
            plan = Jacobian(bare, a, b, format=format)
            for _ in range(3):
                assert_allclose(dense(plan()), np.diag(2 * (X + round_)))
                assert_allclose(dense(jacobian(bare, a, b, format=format)), np.diag(2 * (X + round_)))
            own.destroy()
            refused(plan)
            refused(plan.value)
            refused(lambda a=a, b=b, bare=bare: jacobian(bare, a, b, format=format))
            refused(lambda plan=plan: plan.export("never.py"))

    def test_torch_function_of_a_field_whose_place_is_taken(self):
        pytest.importorskip("torch")
        (x,) = fields(X)
        old, new = ti.field(ti.f64), ti.field(ti.f64)
        tree(old).destroy()
        tree(new)
        refused(lambda: torch_function(square, inputs=x, outputs=old), r"outputs \(field old\) " + ENDED)
        refused(lambda: torch_function(square, inputs=old, outputs=x), r"inputs \(field old\) " + ENDED)


class TestPrograms:
    @pytest.mark.sweep
    @pytest.mark.parametrize("options", [{}, {"chunk_size": 1}, {"format": "csr"}])
    def test_new_program_in_a_pipeline(self, options):
        x, y = fields(X, 0.0)
        at_the_end = lambda: (square(x, y), initialise(default_fp=ti.f64))
        refused(lambda: jacobian(at_the_end, x, y, **options), "ti.init or ti.reset was called")
        x, y = fields(X, 0.0)
        between = lambda: (square(x, y), initialise(default_fp=ti.f64), square(*fields(X, 0.0)))
        refused(lambda: jacobian(between, x, y, **options), "ti.init or ti.reset was called")


@pytest.mark.sweep
@pytest.mark.parametrize("launch", ["plain", "argument", "torch"])
def test_plain_kernels_that_would_end_the_process(launch):
    torch = pytest.importorskip("torch")
    field, x, y = ti.field(ti.f64), ti.field(ti.f64, N), ti.field(ti.f64, N)
    own = tree(field)
    double = kernel_of("for i in x: field[i] = x[i]; y[i] = 2.0 * field[i]", x=x, field=field, y=y)
    function = torch_function(double, x, y)
    double()
    square(field, y)
    own.destroy()
    with pytest.raises(te.InvalidArgumentError, match=ENDED):
        if launch == "plain":
            double()
        elif launch == "argument":
            square(field, y)
        else:
            function(torch.ones(N, dtype=torch.float64))
