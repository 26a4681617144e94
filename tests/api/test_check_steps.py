"""check_jacobian on functions of all scales: a right J is never called wrong, a wrong one is found, doubts are said."""

import traceback

import numpy as np
import pytest
import taichi as ti
import taichi.math as tm
from differences import outputs, scalars, vector_outputs, vectors, write
from kernel_texts import kernel_of

from taichi_ext import InvalidArgumentError, Jacobian, boundary_gradient, check_jacobian, jacobian, jvp, mark, registry
from taichi_ext.checks import differences
from taichi_ext.errors import CheckError

pytestmark = [
    pytest.mark.usefixtures("ti64"),
    pytest.mark.double_only("the tolerances of float64"),
    pytest.mark.filterwarnings("ignore::SyntaxWarning"),  # a table of functions, written out
]

# A function of q, where, and whether differences in float64 can confirm its derivative to a part in a million.
FUNCTIONS = (
    (lambda q: (1000.0 + q) ** 2 - 1e6, 1e-3, True),
    (lambda q: (1000.0 + q) ** 2 - 1e6, 1.0, True),
    (lambda q: ti.sqrt(1e12 + 2e6 * q) - 1e6, 1e-6, True),
    (lambda q: ti.sqrt(1e24 + 2e12 * q) - 1e12, 1e-6, False),
    (lambda q: 1e-12 * q, 1e-12, True),
    (lambda q: 1e12 * q, 1e12, True),
    (lambda q: q * q, 1e-12, True),
    (lambda q: q * q, 1e12, True),
    (lambda q: 1.0 / q, 1e-12, True),
    (lambda q: 1.0 / q, 1e12, True),
    (lambda q: ti.log(q), 1e-12, True),
    (lambda q: ti.exp(1e-12 * q), 1e12, True),
    (lambda q: ti.exp(-q), 30.0, True),
    (lambda q: ti.sin(1e6 * q), 1.0, True),
    (lambda q: ti.sin(1e9 * q), 1e-9, True),
    (lambda q: ti.sin(q), 1e6, True),
    (lambda q: ti.cos(q) - 1.0, 1e-5, True),
    (lambda q: ti.tanh(q), 12.0, True),
    (lambda q: ti.tanh(1e4 * (q - 1.0)), 1.0001, True),
    (lambda q: ti.sqrt(1e12 + q * q) - 1e6, 1e3, True),
    (lambda q: tm.mod(q, 1e-3), 0.5002, True),
    (lambda q: ti.abs(q - 1.0), 1.0 + 1e-7, True),
    (lambda q: ti.abs(q - 1.0), 1.0, False),
    (lambda q: ti.max(q - 2.0, 0.0), 2.0, False),
    (lambda q: 1e-7 * ti.max(q - 2.0, 0.0), 2.0, False),
    (lambda q: 1e7 * ti.max(q - 2.0, 0.0), 2.0, False),
    (lambda q: ti.select(q > 3.0, 1.0, 0.0) + q, 3.0, False),
)
POINTS = np.array([at for _, at, _ in FUNCTIONS])
TOLD = np.array([is_told for _, _, is_told in FUNCTIONS])


@pytest.fixture
def table():
    q, y = scalars(POINTS), outputs(len(FUNCTIONS))

    @ti.kernel
    def kernel():
        for k in ti.static(range(len(FUNCTIONS))):
            y[k] = mark("value", FUNCTIONS[k][0](q[k]))

    return kernel, q, y


def test_a_right_jacobian_is_never_called_wrong(table):
    report = check_jacobian(*table)
    [block] = report.blocks
    assert block.failed == 0, str(report)
    assert block.undecided == (~TOLD).sum(), str(report)
    assert report.verdict == "cannot tell"
    assert not report
    assert "CANNOT BE TOLD from central differences" in str(report)
    assert "jumps or has a kink within the step, or changes by less than its rounding error" in str(report)


@pytest.mark.sweep
@pytest.mark.parametrize("factor", [1.00001, 0.0])
def test_a_wrong_one_is_found_wherever_a_right_one_is_confirmed(table, factor, monkeypatch):
    monkeypatch.setattr(differences, "_MOST_STUDIED", len(FUNCTIONS))

    @boundary_gradient("value")
    def _(auto):
        return factor * auto

    [block] = check_jacobian(*table).blocks
    assert block.failed >= TOLD.sum() - 1  # tanh(12) to five digits
    assert block.failed + block.undecided <= len(FUNCTIONS)


def test_what_is_zero_at_small_steps_alone():
    """A part that rounding hides at the first step is not taken for zero, and neither is a J that is."""
    q, y = scalars([1e-9]), outputs(1)
    kernel = kernel_of('y[0] = mark("value", (1000.0 + q[0]) ** 2 - 1e6)', y=y, q=q)
    assert check_jacobian(kernel, q, y)

    @boundary_gradient("value")
    def _(auto):
        return 1.1 * auto

    report = check_jacobian(kernel, q, y, step=1e-9)
    assert report.verdict == "disagrees"
    assert report.blocks[0].worst.differences == pytest.approx(2000.0, rel=1e-2)


@pytest.mark.sweep
def test_sparse_jacobians():
    q, y = vectors([[0.3, 0.8], [0.5, 0.2], [0.7, 0.1]]), vector_outputs(3, 3)

    @ti.kernel
    def kernel():
        for i in q:
            y[i] = tm.vec3(q[i].x * q[i].y, mark("value", q[i].y ** 2), 1.0 / q[i].x)

    for format in ("csr", "coo", "bsr"):
        [block] = check_jacobian(kernel, q, y, format=format).blocks
        assert (block.compared, block.total, block.failed, block.undecided) == (54, 54, 0, 0)

    @boundary_gradient("value")
    def _(auto):
        return 1.1 * auto

    try:
        report = check_jacobian(kernel, q, y, format="csr")
        assert report.blocks[0].failed == 3
        assert report.blocks[0].worst.output == (0, 1)
        assert report.blocks[0].worst.param == (0, 1)
    finally:
        registry.clear()
    q[1] = [0.0, 0.2]
    assert "with respect to params (field q of shape (3,)) is -inf at [1, 2], [1, 0]" in str(
        check_jacobian(kernel, q, y, format="csr")
    )
    with pytest.raises(InvalidArgumentError, match="format is 'dense'"):
        check_jacobian(kernel, q, y, format="dense")


def test_errors_show_the_users_frames_alone():
    q, y = scalars([0.3]), outputs(1)
    kernel = kernel_of('y[0] = mark("value", q[0])', y=y, q=q)

    @boundary_gradient("value")
    def _(auto):
        return 1.1 * auto

    def pipeline():
        kernel()
        jacobian(kernel, 3.0, y)

    calls = (
        lambda: check_jacobian(kernel, q, y, raise_on_failure=True),
        lambda: jacobian(kernel, 3.0, y),
        lambda: Jacobian(kernel, q, 3.0),
        lambda: jvp(kernel, q, 3.0, [1.0]),
        lambda: jacobian(pipeline, q, y),
    )
    for number, call in enumerate(calls):
        with pytest.raises((CheckError, InvalidArgumentError)) as caught:
            call()
        frames = [f.name for f in traceback.extract_tb(caught.tb)]
        assert frames[:3] == ["test_errors_show_the_users_frames_alone", "<lambda>", "call"]  # what catches them
        assert frames[3:] == (["pipeline"] if number == 4 else [])


@pytest.mark.sweep
def test_an_offset_hides_an_output_that_oscillates():
    """Differences with large steps see the offset's size, and not that smaller ones agree with J."""
    q, r = scalars([0.1, -0.07]), outputs(2)
    offset = kernel_of(
        "r[0] = (1000.0 + q[0]) ** 2 - 1e6 + q[1]; r[1] = ti.exp(-1e-3 * q[0]) * 1e9 + ti.sin(q[1] * 1e4)", r=r, q=q
    )

    for scale in (1e-12, 1e-5, 10.0):
        write(q, scale * np.array([1.0, -0.7]))
        assert check_jacobian(offset, q, r, progress=False).verdict != "disagrees"


@pytest.mark.parametrize(("width", "at"), [(1e6, 7e7), (1e9, 1.0), (1e5, 1e8)])
def test_an_output_that_oscillates_within_the_steps_is_undecided(width, at):
    q, y = scalars([at]), outputs(1)
    kernel = kernel_of('y[0] = mark("value", ti.sin(width * q[0]) / width + q[0])', y=y, width=width, q=q)
    assert check_jacobian(kernel, q, y).verdict == "cannot tell"

    @boundary_gradient("value")
    def _(auto):
        return -auto

    assert check_jacobian(kernel, q, y).verdict == "disagrees"


# functions of q whose right J differences cannot confirm: they vary within all steps, or by less than their last place
UNTOLD = (
    lambda q: 1e12 + ti.sin(q),
    lambda q: 1e3 + ti.sin(2e11 * np.pi * q),
    lambda q: 1e6 + ti.sin(2e13 * np.pi * q),
    lambda q: 1e9 + ti.sin(2e11 * np.pi * q),
)


@pytest.mark.mostly_sweep(every=3)
@pytest.mark.parametrize("n", range(len(UNTOLD)))
@pytest.mark.parametrize("at", [0.7, 1700.0])
@pytest.mark.parametrize("factor", [1.0, 0.0])
def test_where_differences_cannot_tell_the_word_is_undecided(n, at, factor):
    q, y, z = scalars([at]), outputs(1), outputs(1)

    @ti.kernel
    def kernel():
        y[0] = mark("value", UNTOLD[n](q[0]))
        z[0] = 3e9 + 0.0 * q[0]  # a constant is one

    @boundary_gradient("value")
    def _(auto):
        return factor * auto

    try:
        untold, constant = check_jacobian(kernel, q, [y, z]).blocks
    finally:
        registry.clear()
    assert untold.failed + untold.undecided == 1 if factor == 0.0 else untold.failed == 0
    assert (constant.failed, constant.undecided) == (0, 0)
