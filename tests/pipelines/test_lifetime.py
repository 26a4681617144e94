"""Fields and arrays that no longer exist, tapes that record, copies of a prepared form: refused, not guessed or crashed."""

import copy
import pickle
import types

import numpy as np
import pytest
import taichi as ti
from kernel_texts import kernel_of, kernels_of, squares
from numpy.testing import assert_allclose, assert_array_equal
from taichi_program import end_program, initialise

import taichi_ext as te
from taichi_ext import Jacobian, UnsupportedError, check_jacobian, jacobian, value_and_jacobian


@pytest.fixture(autouse=True)
def program():
    initialise(default_fp=ti.f64)
    yield
    end_program()


def fields(count=2):
    made = [ti.field(ti.f64, 3) for _ in range(count)]
    for field in made:
        field.from_numpy(np.array([1.0, 2.0, 3.0]))
    return made


def refused(call, what="create it again"):
    with pytest.raises(te.InvalidArgumentError, match=what):
        call()


NAMING = """
    reads: for i in x: y[i] = x[i] * old[i]
    reads_integers: for i in x: y[i] = x[i] * old_int[i]
    reads_of_an_object: for i in x: y[i] = x[i] * model.old[i]
    loops: for i in old: y[i] = x[i]
    stores: for i in x: y[i] = x[i]; old[i] = 1.0
    template(f: ti.template()): for i in x: y[i] = x[i] * f[i]
"""


@pytest.mark.sweep
class TestEndedProgram:
    def test_parameters_and_outputs(self):
        x, y = fields()
        k = squares(x, y)
        jacobian(k, x, y)
        operator = te.linear_operator(k, x, y)
        assert_allclose(operator @ np.ones(3), [2, 4, 6])
        initialise(default_fp=ti.f64)
        for product in (lambda: operator @ np.ones(3), lambda: operator.T @ np.ones(3), operator.materialize):
            refused(product, "prepare it again")
        for call in (jacobian, value_and_jacobian, Jacobian, check_jacobian):
            refused(lambda call=call: call(k, x, y))
        (new,) = fields(1)
        refused(lambda: jacobian(k, new, y))
        refused(lambda: jacobian(lambda: k(), x, new))

    def test_fields_that_a_kernel_refers_to(self):
        old, old_int = fields(1)[0], ti.field(ti.i32, 3)
        old_int.fill(1)
        initialise(default_fp=ti.f64)
        x, y = fields()

        kernels = kernels_of(NAMING, x=x, y=y, old=old, old_int=old_int, model=types.SimpleNamespace(old=old))
        template, reads = kernels.pop("template"), kernels["reads"]
        for kernel in (*kernels.values(), lambda: reads()):
            refused(lambda kernel=kernel: jacobian(kernel, x, y))
        refused(lambda: jacobian(template, x, y, args=(old,)))
        refused(lambda: jacobian(lambda: template(old), x, y))
        refused(lambda: jacobian(lambda f: template(f), x, y, args=(old,)))
        assert_array_equal(y.to_numpy(), [1, 2, 3])

    def test_arrays_and_out(self):
        old, old_field = ti.ndarray(ti.f64, 3), ti.field(ti.f64, (3, 3))
        old_matrix = ti.Vector.ndarray(2, ti.f64, 3)
        old.fill(1.0)
        old_field.fill(0.0)
        kept = [old, old_matrix]
        del old, old_matrix
        initialise(default_fp=ti.f64)
        x, y = fields()
        k = kernel_of("for i in x: y[i] = x[i] * a[i]", "a: A1", x=x, y=y)
        plain = kernel_of("for i in x: y[i] = x[i]", x=x, y=y)
        refused(lambda: jacobian(k, x, y, args=(kept[0],)))
        refused(lambda: jacobian(k, "a", y, args=(kept[0],)))
        refused(lambda: jacobian(lambda: k(kept[0]), x, y))
        refused(lambda: jacobian(lambda: plain(), x, kept[0]))
        refused(lambda: jacobian(plain, x, y, out=old_field))
        new = ti.ndarray(ti.f64, 3)
        new.fill(2.0)
        assert_allclose(jacobian(k, x, y, args=(new,)), 2 * np.eye(3))
        kept.clear()  # which must not take memory of this program with it
        assert_allclose(jacobian(k, x, y, args=(new,)), 2 * np.eye(3))


class TestRecording:
    @pytest.mark.mostly_sweep("True-check_jacobian")
    @pytest.mark.parametrize("how", [jacobian, value_and_jacobian, check_jacobian, lambda *a: Jacobian(*a)()])
    @pytest.mark.parametrize("is_pipeline", [False, True])
    def test_a_jacobian_within_a_tape_is_refused(self, how, is_pipeline):
        x = ti.field(ti.f64, (), needs_grad=True)
        loss = ti.field(ti.f64, (), needs_grad=True)
        x[None] = 3.0
        k = kernel_of("loss[None] += x[None] ** 2", loss=loss, x=x)
        with ti.ad.Tape(loss):
            with pytest.raises(UnsupportedError, match="before or after the with block"):
                how((lambda: k()) if is_pipeline else k, x, loss)
            k()
        assert x.grad[None] == 6.0
        assert jacobian(k, x, loss) == 6.0

    @pytest.mark.sweep
    def test_within_fwd_mode(self):
        x = ti.field(ti.f64, (), needs_dual=True)
        y = ti.field(ti.f64, (), needs_dual=True)
        x[None] = 3.0
        k = kernel_of("y[None] = x[None] ** 2", y=y, x=x)
        plan = Jacobian(k, x, y)
        with ti.ad.FwdMode(loss=y, param=x), pytest.raises(UnsupportedError, match="FwdMode"):
            plan()
        assert plan() == 6.0


@pytest.mark.sweep
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_prepared_form_is_not_copied(copied):
    x, y = fields()
    k = squares(x, y)
    plan = Jacobian(k, x, y)
    plan()
    with pytest.raises(TypeError, match=r"Jacobian .* prepare it there"):
        copied(plan)
