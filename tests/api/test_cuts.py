"""Derivatives that are cut on some of the paths: casts to integers, roundings, comparisons, overwritten params."""

import math

import numpy as np
import pytest
import taichi as ti
from captured_warnings import all_warnings
from differences import outputs, scalars, vectors
from kernel_texts import kernel_of

from taichi_ext import DerivativeWarning, Jacobian, check_jacobian, jacobian

pytestmark = pytest.mark.usefixtures("ti64")


def said(*args, **options):
    """The warnings of a Jacobian about lost derivatives."""
    with all_warnings() as found:
        jacobian(*args, **options)
    return [str(w.message) for w in found if issubclass(w.category, DerivativeWarning)]


@pytest.fixture
def places():
    return vectors([[1.2, 0.5], [3.4, 0.6], [5.1, 0.7]])


OPTIONS = pytest.mark.parametrize("options", [{}, {"chunk_size": 2}, {"format": "csr"}], ids=str)


@pytest.mark.mostly_sweep("{'format': 'csr'}")
@OPTIONS
def test_a_cast_in_an_index_cuts_one_component(places, options):
    x, weight, image = places, scalars([2.0, 3.0, 4.0]), outputs(8)

    @ti.kernel
    def splat():
        for i in x:
            image[int(x[i].x)] += weight[i] * x[i].y  # the cast

    (message,) = said(splat, [x, weight], image, **options)
    assert "params[0]" in message and "(components 0)" in message
    assert "test_cuts.py:" in message and "# the cast" in message and "a cast to an integer" in message


@pytest.mark.mostly_sweep("whole-//", "if-cast", "branch-a comparison")
@pytest.mark.parametrize(
    ("name", "word"),
    [
        *[("floor", "`floor`"), ("round", "`round`"), ("whole", "//"), ("bits", "cast to bits"), ("if", "cast")],
        *[("branch", "a comparison"), ("factor", "a comparison")],
    ],
)
def test_what_cuts_the_path_of_one_of_two_params(name, word):
    a, b, y = scalars([2.6]), scalars([1.7]), outputs(2)

    @ti.func
    def cut(v):
        r = 0.0
        if ti.static(name == "floor"):
            r = ti.floor(v)
        elif ti.static(name == "round"):
            r = ti.round(v * 2.0)
        elif ti.static(name == "whole"):
            r = v // 0.5
        elif ti.static(name == "bits"):
            r = ti.cast(ti.bit_cast(v, ti.i64) >> 60, ti.f64)
        elif ti.static(name == "factor"):
            r = (v > 1.0) * 2.0
        elif ti.static(name == "branch"):
            if v > 1.0:
                r = 3.0
        elif int(v) > 1:
            r = 3.0
        return r

    @ti.kernel
    def k():
        s = 0.0
        for i in range(2):
            s += cut(a[0] + i)
            y[i] = s * b[0]

    (message,) = said(k, {"a": a, "b": b}, y)
    assert "params['a']" in message and word in message
    assert said(k, b, y) == []


def test_a_cut_in_one_kernel_of_a_pipeline():
    a, b, cell, y = scalars([2.6, 0.3]), scalars([1.7, 2.0]), ti.field(ti.i32, 2), outputs(4)
    find = kernel_of("for i in a: cell[i] = ti.cast(a[i], ti.i32)", a=a, cell=cell)
    add = kernel_of("for i in b: y[cell[i]] += b[i]", b=b, y=y, cell=cell)
    step = lambda: (find(), add())
    (message,) = said(step, [a, b], y)
    assert "params[0]" in message and "cell[i] = ti.cast(a[i], ti.i32)" in message


def test_no_warning_where_a_path_has_a_derivative_or_is_none_of_the_output(places):
    x, weight, image, total = places, scalars([2.0, 3.0, 0.0]), outputs(8), outputs(1)

    @ti.kernel
    def interpolate():
        for i in x:
            base = int(x[i].x)
            image[base] += weight[i] * (x[i].x - base) * x[i].y
        for i in range(1):
            total[0] += weight[i]  # of which x is no part

    assert said(interpolate, [x, weight], [image, total]) == []
    x.fill(0.0)  # J is zero as a product with y is 0, not since a path is cut
    assert not any("paths end" in message for message in said(interpolate, [x, weight], [image, total]))
    meant = kernel_of("for i in x: image[i] += weight[i] * stop_gradient(x[i].x)", x=x, image=image, weight=weight)
    assert not any("paths end" in message for message in said(meant, [x, weight], image))


def test_a_param_that_is_overwritten_beside_another():
    a, b, y = scalars([2.6]), scalars([1.7]), outputs(1)
    k = kernel_of("a[0] = 3.0; y[0] = a[0] * b[0]", a=a, y=y, b=b)
    (message,) = said(k, [a, b], y)
    assert "a[0] = 3.0" in message and "a store that replaces it" in message and "params[0]" in message
    a.fill(2.6)
    in_place = kernel_of("a[0] = a[0] * 0.5 + b[0]; b[0] *= a[0]", a=a, b=b)
    assert said(in_place, [a, b], [a, b]) == []


def test_a_param_that_another_one_is_copied_to():
    """The kernel of copy_from is Taichi's: there is no line of the user's in it."""
    a, b, y = scalars([2.6, 1.0]), scalars([1.7, 2.0]), outputs(2)
    k = kernel_of("for i in y: y[i] = a[i] ** 2", y=y, a=a)
    run = lambda: (a.copy_from(b), k())
    (message,) = said(run, [a, b], y)
    assert "params[0]" in message and "paths end at a store that replaces it" in message


def test_explain_and_the_check_name_the_cut():
    a, b, y = scalars([2.6]), scalars([1.7]), outputs(1)

    @ti.kernel
    def k():
        y[0] = b[0] * ti.floor(a[0])  # the cut

    @ti.kernel
    def choice():
        if a[0] > 1.0:
            y[0] = b[0] * a[0]

    form = Jacobian(k, [a, b], y)
    with pytest.warns(DerivativeWarning, match="the cut"):
        form()
    assert "# the cut" in form.explain() and "`floor`" in form.explain()
    chosen = Jacobian(choice, [a, b], y)
    chosen()
    assert "a path ends" not in chosen.explain()  # nearly all kernels compare, and store what they do not add to
    with pytest.warns(DerivativeWarning, match="the cut"):
        assert check_jacobian(k, [a, b], y)


@pytest.mark.mostly_sweep(every=4)
@pytest.mark.parametrize(
    ("name", "word"),
    [
        *[("int", "`int`"), ("round", "`round`"), ("floor", "`floor`"), ("whole", "`floordiv`"), ("numpy", "`rint`")],
        *[("loop", "`int`"), ("compared", "a comparison"), ("true", "`bool`"), ("format", "a format")],
    ],
)
@pytest.mark.parametrize("is_read", [False, True], ids=["a param", "a number"])
def test_what_python_cuts_of_one_of_two_params(name, word, is_read):
    a, b, copy, y = scalars([2.6]), scalars([1.7, 0.3]), outputs(1), outputs(2)
    read = kernel_of("copy[0] = 2.0 * a[0]", copy=copy, a=a)
    scale = kernel_of("for i in y: y[i] += factor * b[i]", "factor: ti.f64", y=y, b=b)
    cut = {
        "int": int,
        "round": round,
        "floor": math.floor,
        "whole": lambda v: v // 0.5,
        "numpy": np.rint,
        "compared": lambda v: 2.0 if v > 1.0 else 3.0,
        "true": lambda v: 2.0 if v else 3.0,
        "format": lambda v: float(f"{v:.1f}"),
    }

    def run():
        read()
        number = copy[0] if is_read else a[0]
        if name == "loop":
            for _ in range(int(number)):
                scale(1.0)
        else:
            scale(cut[name](number))

    pytest.importorskip("scipy.sparse")
    asks = word in ("a comparison", "`bool`", "a format")  # which sparse runs do not say
    for options in ({}, {"chunk_size": 2}, *([] if asks else [{"format": "csr"}])):
        found = said(run, {"a": a, "b": b}, y, **options)
        (message,) = (message for message in found if "paths end" in message)
        assert "params['a']" in message and word in message and "test_cuts.py:" in message
    assert not any("paths end" in message for message in said(run, b, y))


def test_numbers_that_python_prints_or_compares_with_a_tolerance_cut_nothing():
    a, b, y, loss = scalars([2.6]), scalars([1.7, 0.3]), outputs(2), outputs(1)

    @ti.kernel
    def both():
        for i in y:
            y[i] = 2.0 * b[i]
        loss[0] = a[0] ** 2

    def run():
        both()
        str(loss[0])
        if loss[0] < 1e-3:
            both()

    assert said(run, [a, b], [y, loss]) == []
