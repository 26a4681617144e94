"""Fields of every placement and with every gradient flag; Taichi lays them out, the Jacobian is the same."""

import numpy as np
import pytest
import taichi as ti
from devices import real
from numpy.testing import assert_allclose, assert_array_equal
from taichi_program import end_program, initialise

from taichi_ext import jacobian

N = 6
X = np.array([0.3, -0.8, 1.1, 0.6, -0.2, 0.9])


@pytest.fixture(autouse=True)
def _fresh_program():
    """Gradient flags are taken by the whole layout at once, so each test starts Taichi anew."""
    initialise(default_fp=ti.f64)
    yield
    end_program()


def place(fields, how):
    """Place fields of shape (N,) in some layout."""
    if how == "dense":
        ti.root.dense(ti.i, N).place(*fields)
    elif how == "apart":
        for field in fields:
            ti.root.dense(ti.i, N).place(field)
    elif how == "nested":
        ti.root.dense(ti.i, 2).dense(ti.i, 3).place(*fields)
    elif how == "pointer":
        ti.root.pointer(ti.i, 3).dense(ti.i, 2).place(*fields)
    elif how == "bitmasked":
        ti.root.bitmasked(ti.i, N).place(*fields)
    elif how == "builder":
        builder = ti.FieldsBuilder()
        builder.dense(ti.i, N).place(*fields)
        return builder
    return None


def make_fields(how, flag):
    """Three fields of shape (N,) in some placement, with some gradient flag: parameter, intermediate, output."""
    wanted = [part for part in ("grad", "dual") if part in flag and not flag.startswith("lazy")]
    options = {f"needs_{part}": True for part in wanted}
    if how == "shape":
        return [ti.field(ti.f64, shape=N, **options) for _ in range(3)]
    fields = [ti.field(ti.f64, **options) for _ in range(3)]
    builder = place([*fields, *(getattr(field, part) for field in fields for part in wanted)], how)
    if flag.startswith("lazy"):
        getattr(builder or ti.root, flag)()
    if builder is not None:
        builder.finalize()
    return fields


def is_placed(field):
    return field is not None and field.vars[0].ptr.snode() is not None


def fill(x):
    """Set all entries from Python, which activates them in sparse layouts."""
    for i in range(N):
        x[i] = X[i]


def in_one_kernel(fields):
    """What the fields hold, read by one kernel: Taichi compiles one for each ``to_numpy`` of another field."""
    found, count = real(np.zeros((len(fields), N))), len(fields)

    @ti.kernel
    def read_all(found: ti.types.ndarray(ti.f64, ndim=2)):
        for i in range(N):
            for n in ti.static(range(count)):
                found[n, i] = fields[n][i]

    read_all(found)
    return found


PLACEMENTS = ["shape", "dense", "apart", "nested", "pointer", "bitmasked", "builder"]
FLAGS = ["none", "grad", "dual", "grad and dual", "lazy_grad", "lazy_dual"]
# fields with shape= are placed as they are made, and their flags with them: nothing is left to be lazy about
COMBINATIONS = [(how, flag) for how in PLACEMENTS for flag in FLAGS if how != "shape" or not flag.startswith("lazy")]


@pytest.mark.sweep
@pytest.mark.parametrize("flag", FLAGS)
def test_placements_with_gradient_flag(flag):
    following = np.roll(np.eye(N), 1, axis=1)
    expected = np.diag(3 * X**2 + np.roll(X, -1)) + np.diag(X) @ following
    made = [(how, make_fields(how, flag)) for how, other in COMBINATIONS if other == flag]

    @ti.kernel
    def chain(x: ti.template(), t: ti.template(), y: ti.template()):
        for i in range(N):
            t[i] = x[i] ** 2 + x[(i + 1) % N]
        for i in range(N):
            y[i] += t[i] * x[i]

    for how, (x, t, y) in made:
        fill(x)
        J = jacobian(chain, x, y, args=(x, t, y))
        assert_allclose(J, expected, rtol=1e-13, atol=1e-15, err_msg=how)
    values = in_one_kernel([field for _, (_, t, y) in made for field in (t, y)])
    for how, t, y in zip([how for how, _ in made], values[::2], values[1::2]):
        assert_allclose(t, X**2 + np.roll(X, -1), rtol=1e-14, err_msg=how)
        assert_allclose(y, (X**2 + np.roll(X, -1)) * X, rtol=1e-14, err_msg=how)
    companions = [f for _, fields in made for field in fields for f in (field.grad, field.dual) if is_placed(f)]
    if companions:
        assert_array_equal(in_one_kernel(companions), 0, err_msg="gradient fields are not used")
