"""Linear forms: the algebra of tangents, with coefficients that are numbers and with Taichi expressions."""

import numpy as np
import pytest
import taichi as ti
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from taichi_ext.derivative.linear_form import (
    Affine,
    Guarded,
    Seed,
    accumulate,
    add,
    apply_to_row,
    as_expression,
    choose,
    guarded_scale,
    is_one,
    is_row,
    is_zero,
    multiply,
)

ATOMS = ("i", "j", "n")

affines = st.builds(
    lambda terms, constant: sum_of(terms, constant),
    st.lists(st.tuples(st.sampled_from(ATOMS), st.integers(-4, 4)), max_size=4),
    st.integers(-10, 10),
)
points = st.fixed_dictionaries({atom: st.integers(-7, 7) for atom in ATOMS})
numbers = st.integers(-5, 5)
forms = st.dictionaries(st.integers(0, 4).map(lambda column: seed(column)), numbers, max_size=4)


def seed(column, *terms):
    return Seed(Affine(tuple(terms), column))


def sum_of(terms, constant):
    total = Affine((), constant)
    for atom, factor in terms:
        total = total + Affine(((atom, factor),) if factor else ())
    return total


def value(affine, point):
    return sum(factor * point[atom] for atom, factor in affine.terms) + affine.constant


class Row:
    """A leaf that is not a seed."""


# --- index expressions ------------------------------------------------------------------------------------------------


@given(affines, affines, st.integers(-5, 5), points)
def test_affine_sums_and_multiples_have_the_value_of_their_parts(a, b, factor, point):
    assert value(a + b, point) == value(a, point) + value(b, point)
    assert value(a * factor, point) == factor * value(a, point)


@given(affines, affines, affines)
def test_equal_index_expressions_are_equal_objects(a, b, c):
    assert a + b == b + a
    assert (a + b) + c == a + (b + c)
    assert a + b * -1 + b == a
    assert hash(a + b) == hash(b + a)
    assert a * 2 == a + a
    assert a * 0 == Affine()
    assert Seed(a + b) == Seed(b + a)


def test_terms_that_cancel_leave_a_constant():
    i = Affine((("i", 1),))
    assert not i.is_constant
    assert (i * 4 + i * -4).is_constant
    assert Seed(i * 2 + Affine((), 3) + i * -2) == seed(3)
    assert seed(3).is_constant
    assert not Seed(i).is_constant


def test_what_is_not_a_seed_is_a_row():
    assert is_row(Row())
    assert not is_row(seed(0))


# --- coefficients that are numbers ------------------------------------------------------------------------------------


@given(forms, forms, numbers)
def test_accumulate_adds_a_multiple(into, form, weight):
    before = dict(into)
    accumulate(into, form, weight)
    for leaf in {*before, *form}:
        assert into.get(leaf, 0) == before.get(leaf, 0) + weight * form.get(leaf, 0)


def test_what_is_zero_makes_no_entry():
    form = {}
    accumulate(form, {seed(0): 2, seed(1): 0}, 3)
    accumulate(form, {seed(2): 5}, 0)
    assert form == {seed(0): 6}


def test_accumulate_leaves_the_other_form_alone():
    form = {seed(0): 2}
    into = {}
    accumulate(into, form)
    accumulate(into, form)
    assert form == {seed(0): 2}
    assert into == {seed(0): 4}


def test_zero_and_one_are_numbers():
    assert is_zero(0)
    assert is_zero(0.0)
    assert is_one(1)
    assert is_one(1.0)
    assert not is_zero(1e-300)
    assert not is_one(Row())
    assert not is_zero(Row())


@given(numbers, numbers)
def test_products_and_sums_of_numbers_are_numbers(a, b):
    assert multiply(a, b) == a * b
    assert add(a, b) == a + b


@given(numbers, numbers)
def test_guards_stay(a, b):
    assert multiply(Guarded(a), b) == Guarded(a * b)
    assert multiply(a, Guarded(b)) == Guarded(a * b)
    assert add(Guarded(a), b) == Guarded(a + b)
    assert add(a, Guarded(b)) == Guarded(a + b)


@settings(max_examples=30)
@given(forms, numbers)
def test_guarded_scale_of_numbers(form, weight):
    assert guarded_scale(form, weight) == {leaf: weight * c for leaf, c in form.items()}


def test_rows_are_guarded_when_scaled():
    row = Row()
    scaled = guarded_scale({row: 2, seed(0): 3}, 5)
    assert scaled == {row: Guarded(10), seed(0): 15}
    assert guarded_scale(scaled, 2)[row] == Guarded(20)


# --- coefficients that are expressions --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def evaluate():
    """Run a function of two expressions while a kernel is traced; gives the values that its results have."""

    def run(function, a, b, count=1):
        x, y = ti.field(ti.f64, shape=2), ti.field(ti.f64, shape=count)
        x.from_numpy(np.array([a, b], dtype=np.float64))

        def results(p, q):
            values = function(p, q)
            values = values if isinstance(values, (list, tuple)) else [values]
            return [as_expression(v, ti.f64) for v in values]

        @ti.kernel
        def k():
            values = ti.static(results(x[0], x[1]))
            for n in ti.static(range(count)):
                y[n] = values[n]

        k()
        return y.to_numpy()

    return run


@pytest.mark.usefixtures("ti64")
@pytest.mark.filterwarnings("ignore:.*Calling non-taichi function")
class TestExpressions:
    def test_products_and_sums(self, evaluate):
        def function(a, b):
            return [multiply(a, b), multiply(a, -1), multiply(3, b), add(a, b), add(a, 2), add(multiply(a, 0), b)]

        assert_allclose(evaluate(function, 2.0, 5.0, 6), [10, -2, 15, 7, 4, 5])

    def test_trivial_factors_build_no_expression(self, evaluate):
        def function(a, b):
            assert multiply(a, 1) is a
            assert multiply(1, a) is a
            assert add(a, 0) is a
            assert add(0, a) is a
            assert multiply(a, 0) == 0
            assert multiply(0, a) == 0
            return a

        assert evaluate(function, 2.0, 5.0) == 2.0

    def test_accumulate(self, evaluate):
        def function(a, b):
            form = {seed(0): a, seed(1): 2}
            accumulate(form, {seed(0): b, seed(2): 1}, a)
            return [form[seed(n)] for n in range(3)]

        assert_allclose(evaluate(function, 2.0, 5.0, 3), [12, 2, 2])

    def test_a_zero_tangent_stays_zero_under_an_infinite_weight(self, evaluate):
        def function(a, b):
            form = guarded_scale({seed(0): a, seed(1): b, seed(2): 1}, 1 / a)
            return [form[seed(n)] for n in range(3)]

        assert_array_equal(evaluate(function, 0.0, 5.0, 3), [0.0, np.inf, np.inf])
        assert_allclose(evaluate(function, 2.0, 5.0, 3), [1.0, 2.5, 0.5])

    def test_a_zero_row_entry_stays_zero_under_an_infinite_weight(self, evaluate):
        def function(a, b):
            return [apply_to_row(Guarded(1 / a), a), apply_to_row(Guarded(1 / a), b), apply_to_row(3, b)]

        assert_array_equal(evaluate(function, 0.0, 5.0, 3), [0.0, np.inf, 15.0])

    def test_a_nan_that_is_real_is_kept(self, evaluate):
        def function(a, b):
            form = guarded_scale({seed(0): a, seed(1): b}, a)
            return [form[seed(0)], form[seed(1)], apply_to_row(Guarded(a), b)]

        assert np.isnan(evaluate(function, np.nan, 5.0, 3)).all()

    def test_choose_takes_the_form_whose_condition_holds(self, evaluate):
        def function(a, b):
            forms = [{seed(0): a, seed(1): 1}, {seed(0): b, seed(2): 7}, {}]
            form = choose([a > 10, b > 10, None], forms, ti.f64)
            return [form[seed(n)] for n in range(3)]

        assert_array_equal(evaluate(function, 20.0, 5.0, 3), [20.0, 1.0, 0.0])
        assert_array_equal(evaluate(function, 2.0, 50.0, 3), [50.0, 0.0, 7.0])
        assert_array_equal(evaluate(function, 20.0, 50.0, 3), [20.0, 1.0, 0.0])
        assert_array_equal(evaluate(function, 2.0, 5.0, 3), [0.0, 0.0, 0.0])

    def test_choose_does_not_touch_what_was_not_chosen(self, evaluate):
        def function(a, b):
            form = choose([b > 0, None], [{seed(0): b}, {seed(0): a}], ti.f64)
            return form[seed(0)]

        assert evaluate(function, np.nan, 5.0) == 5.0
        assert np.isnan(evaluate(function, np.nan, -5.0))
