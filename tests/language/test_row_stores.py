"""Sums into a local over a loop: terms that go to entries of its row of their own are stored, others are added."""

import numpy as np
import pytest
import taichi as ti
from devices import real
from differences import check_jacobian, integers, outputs, scalars
from kernel_texts import kernels_of, names_of
from numpy.testing import assert_array_equal

from taichi_ext import Jacobian
from taichi_ext.differentiate.plan.row_terms import ADDED, FILLED, STORED, WORDS
from taichi_ext.differentiate.statements import reverse_loops

pytestmark = pytest.mark.usefixtures("ti64")


@pytest.fixture(autouse=True)
def forward(monkeypatch):
    """Loops that could be reversed have rows, too."""
    monkeypatch.setattr(reverse_loops, "MOST_CARRIED", 0)


# by what is known of the terms that go to the row of their local total: what is done in a loop over all entries of y, ...
SUMS = {  # ... from total = 0 to the store of it
    FILLED: """
        all_of_it: for n in range(pairs): total += x[2 * n + 1] * x[2 * n] * (i + 1)
        skipped:
            if i == 2:
                continue
            for n in range(count):
                total += x[n] ** 2
    """,
    STORED: """
        one_term: for n in range(19): total += x[2 * n] * x[2 * n + 1] * i
        with_an_outer_index: for n in range(5): total += x[i + 8 * n] ** 2 + x[i + 8 * n + 3]
        filled_in_part_by_condition:
            for n in range(count):
                if n % 2 == i % 2:
                    total += x[n] ** 2
        left_early:
            for n in range(count):
                total += x[n] ** 2
                if n > 5 * i:
                    break
    """,
    ADDED: """
        neighbours: for n in range(39): total += x[n] * x[n + 1] * i
        looked_up: for n in range(20): total += x[order[n]] ** 2
        scaled: for n in range(10): total += x[n] ** 2; total *= 1.1
        counted_by_a_while:
            n = 0
            while n < 10:
                total += x[n] ** 2
                n += 1 if n != 3 or total > 1.5 + i else 0
                total += 0.1
        by_reference: for n in range(10): add_square(total, n); add_square(total, n + 1)
    """,
}
OTHERS = {
    FILLED: """
        all_of_it_used_again:
            total = 0.0
            for n in range(count):
                total -= x[n] ** 2 * (i + 1) / count
            other = total * total
            for n in range(count):
                other += x[n] * total
            y[i] = other + total
    """,
    STORED: """
        read_while_it_is_filled:
            total = 0.0
            other = 0.0
            for n in range(count):
                total += x[n] ** 2
                other += total * 0.01
            y[i] = other + total * i
        read_before_it_is_filled:
            total = 0.0
            other = total + x[i]
            for n in range(count):
                total += x[n] ** 2
            y[i] = other * total
    """,
    ADDED: """
        started_with_a_value:
            total = x[i]
            for n in range(10):
                total += x[n] ** 2
            y[i] = total
        two_statements_and_read:
            total = 0.0
            other = 0.0
            for n in range(count):
                total += 0.01 * x[n] ** 2
                total += 0.01 * ti.sin(x[n])
                other += total * 0.01
            y[i] = total + other * i
        reset_and_read:
            total = 0.0
            other = 0.0
            for n in range(count):
                total += 0.01 * x[n] ** 2
                if n == 4:
                    total = 0.0
                    total += 0.01 * x[n] * x[1]
                other += total * 0.01
            y[i] = total + other * i
    """,
}
LEVELS = {name: level for table in (SUMS, OTHERS) for level, text in table.items() for name in names_of(text)}


def make_kernels(x, y, order):
    """Kernels that sum into a local over a loop, by name."""

    @ti.func
    def add_square(total: ti.template(), n):
        total += x[n] ** 2

    known = {"x": x, "y": y, "order": order, "count": x.shape[0], "pairs": x.shape[0] // 2, "add_square": add_square}
    whole = "for i in y:\n    total = 0.0\n    ...\n    y[i] = total\n"
    found = {}
    for table, frame in ((SUMS, whole), (OTHERS, "for i in y:\n    ...\n")):
        for text in table.values():
            found |= kernels_of(text, frame, **known)
    return found


@pytest.mark.mostly_sweep("40-scaled", "40-all_of_it", "40-neighbours", "600-counted_by_a_while", "600-by_reference")
@pytest.mark.chosen_only("a few columns are kept in registers, not in rows", "--chunk-size")
@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize(
    "size",
    [40, pytest.param(600, marks=pytest.mark.cpu_only("Mesa's llvmpipe leaves loops after 65536 iterations in all"))],
)
def test_terms_are_stored_where_no_two_meet_and_else_added(name, size):
    """Beyond 512 columns rows are in scratch memory, which holds what the last launch left there."""
    x, y, order = scalars(np.linspace(0.3, 0.9, size)), outputs(4), integers(np.arange(20) // 3)
    k = make_kernels(x, y, order)[name]
    check_jacobian(k, x, y)
    plan = Jacobian(k, x, y, mode="forward")
    first = plan()
    assert_array_equal(plan(), first)
    assert_array_equal(plan(out=real(np.full((4, size), np.nan))), first)
    lines = [line for line in plan.explain().splitlines() if "local" in line and "total" in line and "all " in line]
    found = [level for level, words in WORDS.items() for line in lines if f", its terms {words}, since" in line]
    assert len(found) == len(lines)
    assert found == [LEVELS[name]] or (name == "straight" and not lines)  # whose few columns can be named
