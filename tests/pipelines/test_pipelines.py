"""Pipelines: Python functions that launch kernels, and what the host stores between them."""

import warnings

import numpy as np
import pytest
import taichi as ti
from differences import check_jacobian, outputs, scalars
from kernel_texts import kernel_of
from numpy.testing import assert_allclose, assert_array_equal

import taichi_ext as te
from taichi_ext import DerivativeWarning, Jacobian, UnsupportedError, jacobian, vjp

pytestmark = pytest.mark.usefixtures("ti64")

X = [0.3, -0.8, 1.1]

square_of = kernel_of("for i in a: b[i] = a[i] ** 2", "a: A, b: A")
add_to = kernel_of("for i in a: b[i] += a[i]", "a: A, b: A")
square = kernel_of("for i in a: b[i] = a[i] ** 2", "a: ti.template(), b: ti.template()")
add = kernel_of("for i in a: b[i] += scale * a[i]", "a: ti.template(), b: ti.template(), scale: ti.f64")

# --- stores of the host between kernels


def test_parameter_assigned_before_it_is_read():
    """Only the entry that is left depends on what the parameter held."""
    x, y = scalars(X), outputs(3)

    def run():
        x[0] = 2.0
        square(x, y)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is not overwritten as a whole
        J = jacobian(run, x, y)
    assert_allclose(J, np.diag([0, *2 * np.array(X[1:])]), rtol=1e-14)
    assert_array_equal(x.to_numpy(), [2.0, *X[1:]])


@pytest.mark.mostly_sweep("None")
@pytest.mark.parametrize("chunk_size", [1, 2, 4, None])
def test_warnings_are_those_of_all_runs_together(chunk_size):
    """A run has columns of an entry that is overwritten, of others, or of another parameter or output."""
    x, c, t, y, z = scalars(X), scalars(X), scalars(X), outputs(3), outputs(3)

    def run():
        x[0] = 2.0
        t.fill(1.0)
        square(x, y)
        add(t, y, 1.0)
        square(c, z)
        z[1] = z[0]
        z[2] = 0.0

    with pytest.warns(DerivativeWarning) as caught:
        J = jacobian(run, [x, c, t], [y, z], chunk_size=chunk_size)
    assert [str(w.message).split(" (")[0] for w in caught] == ["params[2]"]
    assert_allclose(J[0][0], np.diag([0, *2 * np.array(X[1:])]), rtol=1e-14)
    assert_allclose(J[1][1], np.outer([2 * X[0], 2 * X[0], 0], [1, 0, 0]), rtol=1e-14)
    for block in (*J[0][1:], J[1][0], J[1][2]):
        assert not block.any()


def test_temporary_with_constants_at_the_address_of_one_with_tangents():
    x, y = np.array(X), np.zeros(3)

    def run(x, y):
        t = np.zeros(3)
        square_of(x, t)
        del t
        for _ in range(10):
            c = np.full(3, 2.0)  # may get the memory that t had
            add_to(c, y)
            del c

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DerivativeWarning)
        J = jacobian(run, x, y, args=(x, y))
    assert_array_equal(J, np.zeros((3, 3)))


# --- decorators of Taichi's own differentiation


def test_replaced_gradients_are_refused_or_followed():
    x, y = scalars(X), outputs(3)

    @ti.ad.grad_replaced
    def forward():
        square(x, y)

    @ti.ad.grad_for(forward)
    def backward():
        pass

    with pytest.raises(UnsupportedError, match="grad_replaced"):
        jacobian(forward, x, y)


# --- bad input


class Careful:
    """A pipeline that goes on after any error of a step, or tries it again until it works."""

    def __init__(self):
        self.x, self.y, self.whole = scalars(X), outputs(3), ti.field(ti.i32, 3)
        y = self.y
        scale = kernel_of("for i in y: y[i] = factor * y[i]", "factor: ti.f64", y=y)
        of_bits = kernel_of("for i in y: y[i] *= ti.bit_cast(ti.bit_cast(y[i], ti.i64), ti.f64)", y=y)
        self.scale, self.of_bits = scale, of_bits

    def run(self, step):
        square(self.x, self.y)
        try:
            step(self)
        except Exception:
            self.whole[0] = 1

    def again(self, step):
        square(self.x, self.y)
        while True:
            try:
                step(self)
                break
            except Exception:
                continue

    def other_error(self, step):
        square(self.x, self.y)
        try:
            step(self)
        except Exception as error:
            raise KeyError("step") from error


STEPS = {"passed": lambda c: c.scale(c.y[0] + 2.0), "stored": lambda c: c.y.__setitem__(1, c.y[0] * c.y[2])}


@pytest.mark.mostly_sweep("run-passed", "again-stored")
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("how", ["run", "again", "other_error"])
def test_code_that_catches_errors_does_not_catch_changes_of_plan(how, step):
    careful = Careful()
    x, y, run, args = careful.x, careful.y, getattr(careful, how), (STEPS[step],)
    check_jacobian(run, x, y, args=args)
    J = jacobian(run, x, y, args=args)
    assert_array_equal(jacobian(run, x, y, args=args, format="csr").toarray(), J)
    assert_array_equal(jacobian(run, x, y, args=args, chunk_size=2), J)
    assert_allclose(vjp(run, x, y, np.eye(3), args=args), J, rtol=1e-14)


@pytest.mark.mostly_sweep("run", "again")
@pytest.mark.parametrize("how", ["run", "again", "other_error"])
def test_errors_are_raised_although_the_pipeline_catches_them(how):
    careful = Careful()
    x, y, run = careful.x, careful.y, getattr(careful, how)
    with pytest.raises(UnsupportedError, match="bit_cast"):
        vjp(run, x, y, np.ones(3), args=(lambda c: c.of_bits(),))
    with pytest.raises(te.InvalidArgumentError, match="in a pipeline that is itself being differentiated"):
        jacobian(run, x, y, args=(lambda c: jacobian(c.scale, x, y, args=(1.0,)),))
    with pytest.raises(UnsupportedError, match="is computed by Taichi in a pipeline"):
        jacobian(run, x, y, args=(lambda c: c.scale.grad(1.0),))
    assert_allclose(jacobian(run, x, y, args=(STEPS["passed"],))[1, 1], 2 * X[1] * (X[0] ** 2 + 2), rtol=1e-12)


def test_attributes_that_are_swapped_while_a_pipeline_runs():
    """Plain Taichi compiles a method once, with the fields that the object had then."""

    @ti.data_oriented
    class Buffers:
        def __init__(self):
            self.u, self.v = scalars([0.5, 0.7]), scalars([0.1, 0.2])

        @ti.kernel
        def step(self):
            for i in self.v:
                self.v[i] = self.u[i] * 2.0 + self.v[i]

    buffers = Buffers()
    u, v = buffers.u, buffers.v

    def run():
        for _ in range(3):
            buffers.step()
            buffers.u, buffers.v = buffers.v, buffers.u

    with pytest.raises(UnsupportedError, match=r"self\.[uv] has changed since .*Buffers\.step.*ti\.template"):
        jacobian(run, u, [u, v])


def test_an_atomic_statement_in_a_kernel_that_is_launched_again():
    """Whether a sum is atomic by ``+=`` or by a call, it does not count as reading the field."""
    x, total = scalars([0.3, 0.8, 0.5]), outputs()
    k = kernel_of("for i in x: x[i] -= 0.7 * x[i]; ti.atomic_sub(total[None], x[i])", x=x, total=total)
    run = lambda: (k(), k())
    assert_allclose(jacobian(run, x, total), [-0.3 - 0.09] * 3, rtol=1e-12)


@pytest.mark.mostly_sweep(every=2)
@pytest.mark.parametrize("order", [0, 1], ids=["seeds first", "tangents first"])
def test_one_kernel_takes_seeds_and_tangents_of_what_it_writes(order):
    """A parameter that is no output has seeds at the first launch, and other tangents once it is stored to."""
    x, v, y = scalars([0.3, 0.8]), scalars([0.5, 0.1]), outputs(2)
    step = kernel_of("step: for i in x: v[i] = ti.sin(v[i]) + x[i] * x[1]; y[i] += v[i] * v[i]", x=x, v=v, y=y)
    change = kernel_of("change: v[0] += 2 * x[1]", v=v, x=x)

    def run():
        if order:
            change()
        for _ in range(3):
            step()
        change()
        step()

    check_jacobian(run, [x, v], y, state=[v, y])
    plan = Jacobian(run, [x, v], y)
    plan()
    names = [fused.primal.func.__name__ for fused in plan._prepared.fused.values()]
    assert len({(name, fused.columns.firsts) for name, fused in zip(names, plan._prepared.fused.values())}) == len(
        names
    )
    assert set(names) == {"step", "change"}
