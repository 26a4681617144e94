"""``tangents=`` and ``chunk_size=``: how tangents are stored, and how many columns at a time, changes no number."""

import inspect
import re

import numpy as np
import pytest
import taichi as ti
from differences import outputs, scalars
from kernel_texts import func_of, kernel_of
from numpy.testing import assert_allclose

from taichi_ext import InvalidArgumentError, Jacobian, jacobian
from taichi_ext.analysis.affine import Affine
from taichi_ext.differentiate.forms.forms import Seed
from taichi_ext.differentiate.plan.storage_facts import STRATEGIES, StorageFacts
from taichi_ext.program import F64, I32, Local

pytestmark = pytest.mark.usefixtures("ti64")

N = 7


def make_nearest():
    """A choice among index expressions."""
    x, y = scalars(np.sin(np.arange(N) * 2.3) + 2.0), outputs(4)

    @ti.kernel
    def k():
        for i in y:
            best = 1e9
            for n in range(N):
                t = x[n] * (1.0 + 0.1 * i * n)
                if t < best:
                    best = t
            y[i] = best * best

    return k, x, y


@pytest.mark.chosen_only("columns are few enough for registers", "--chunk-size")
def test_what_was_chosen_is_told():
    k, x, y = make_nearest()
    chosen = "all 7 columns" if STRATEGIES["auto"] is STRATEGIES["dense"] else "indexed columns"
    for tangents, text in (("auto", chosen), ("sparse", "indexed columns"), ("dense", "all 7 columns")):
        plan = Jacobian(k, x, y, tangents=tangents)
        plan()
        assert text in plan.explain()


def test_slots_that_grow_with_each_pass_become_a_row_and_those_of_one_pass_stay():
    """The bound on growth alone, for columns of which it is not known where they come from."""
    column, limits = Local("column", I32), STRATEGIES["sparse"]
    forms = [{Seed(Affine(((column, 1),), k)): 1 for k in range(n + 1)} for n in range(limits.slots)]
    for passes, is_row in (([[form] for form in forms], True), ([forms] * 20, False)):
        facts = StorageFacts(Local("nearest", F64))
        for each in passes:
            facts.begin_pass()
            for form in each:
                facts.note_form(form, lambda seed: False, limits, loop=None, grows=False)
        assert bool(facts.why_row) == is_row
        assert facts.slots <= limits.slots


@pytest.mark.chosen_only("the operations are those on 40 columns", "--chunk-size")
def test_operations_are_counted_by_line():
    x, y, z = scalars(np.linspace(0.1, 0.9, 40)), outputs(4), outputs(4)
    scaled = func_of("return a * x[1]", "a", x=x)

    @ti.kernel
    def k():
        for i in y:
            total = 0.0
            for n in range(40):
                total += x[n] * x[39 - n]
            y[i] = total * total
            z[i] = scaled(total)

    first = inspect.getsourcelines(k.__wrapped__)[1]
    plan = Jacobian(k, x, [y, z])
    plan()
    found = {}
    for line in plan.explain().splitlines():
        match = re.fullmatch(r"  line (\d+): (\d+) operations on tangents", line)
        if match:
            found[int(match[1]) - first] = int(match[2])
    # line 5, each time: two seeds are added to the row; line 6: the weight is total + total, then 40 products;
    # line 7: 40 products, and a sum for the seed of x[1]
    assert found == {5: 2, 6: 40, 7: 41}


def test_state_is_that_of_one_run():
    x = scalars([0.3, 0.8, 0.5])
    k = kernel_of("for i in x: x[i] *= 1.0 + x[i]", x=x)
    J = jacobian(k, x, x, chunk_size=1)
    assert_allclose(J, np.diag([1.6, 2.6, 2.0]))
    assert_allclose(x.to_numpy(), [0.39, 1.44, 0.75])


@pytest.mark.mostly_sweep(every=2)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tangents": "lanes"}, "tangents is 'lanes'; expected one of 'auto', 'sparse', 'dense'"),
        ({"chunk_size": 0}, "chunk_size is 0"),
    ],
)
def test_bad_input(options, message):
    k, x, y = make_nearest()
    with pytest.raises(InvalidArgumentError, match=message):
        jacobian(k, x, y, **options)
