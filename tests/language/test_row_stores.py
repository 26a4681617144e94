"""Sums into a local over a loop: terms that go to entries of its row of their own are stored, others are added."""

import numpy as np
import pytest
import taichi as ti
from devices import real
from differences import check_jacobian, integers, outputs, scalars
from numpy.testing import assert_array_equal

from taichi_ext import Jacobian
from taichi_ext.differentiate.plan.row_terms import ADDED, FILLED, STORED, WORDS
from taichi_ext.differentiate.statements import reverse_loops

pytestmark = pytest.mark.usefixtures("ti64")


@pytest.fixture(autouse=True)
def forward(monkeypatch):
    """Loops that could be reversed have rows, too."""
    monkeypatch.setattr(reverse_loops, "MOST_CARRIED", 0)


KERNELS = {  # by what is known of the terms that go to the row of their local total
    FILLED: """
        all_of_it all_of_it_used_again all_of_it_in_an_inner_loop over_a_field skipped
    """,
    STORED: """
        one_term backwards_and_subtracted by_condition_with_break with_an_outer_index read_while_it_is_filled
        read_before_it_is_filled filled_by_condition filled_in_part_by_condition left_early continued_early
        short_of_one from_the_second every_second of_other_length
    """,
    ADDED: """
        neighbours looked_up halves nested repeated two_statements unrolled reset started_with_a_value
        two_statements_and_read reset_and_read read_between_two_statements scaled counted_by_a_while by_reference
        straight
    """,
}
LEVELS = {name: level for level, names in KERNELS.items() for name in names.split()}


def make_kernels(x, y, order):
    """Kernels that sum into a local over a loop, by name."""
    count, pairs = x.shape[0], x.shape[0] // 2

    @ti.kernel
    def all_of_it():
        for i in y:
            total = 0.0
            for n in range(pairs):
                total += x[2 * n + 1] * x[2 * n] * (i + 1)
            y[i] = total

    @ti.kernel
    def all_of_it_used_again():
        for i in y:
            total = 0.0
            for n in range(count):
                total -= x[n] ** 2 * (i + 1) / count
            other = total * total
            for n in range(count):
                other += x[n] * total
            y[i] = other + total

    @ti.kernel
    def all_of_it_in_an_inner_loop():
        for i in y:
            product = 1.0
            for m in range(3):
                total = 0.0
                for n in range(count):
                    total += ti.sin(x[n]) * (m + 1)
                product *= total
            y[i] = product

    @ti.kernel
    def read_while_it_is_filled():
        for i in y:
            total = 0.0
            other = 0.0
            for n in range(count):
                total += x[n] ** 2
                other += total * 0.01
            y[i] = other + total * i

    @ti.kernel
    def read_before_it_is_filled():
        for i in y:
            total = 0.0
            other = total + x[i]
            for n in range(count):
                total += x[n] ** 2
            y[i] = other * total

    @ti.kernel
    def filled_by_condition():
        for i in y:
            total = 0.0
            if i > 1:
                for n in range(count):
                    total += x[n] ** 2
            y[i] = total

    @ti.kernel
    def filled_in_part_by_condition():
        for i in y:
            total = 0.0
            for n in range(count):
                if n % 2 == i % 2:
                    total += x[n] ** 2
            y[i] = total

    @ti.kernel
    def left_early():
        for i in y:
            total = 0.0
            for n in range(count):
                total += x[n] ** 2
                if n > 5 * i:
                    break
            y[i] = total

    @ti.kernel
    def continued_early():
        for i in y:
            total = 0.0
            for n in range(count):
                if n > 5 * i:
                    continue
                total += x[n] ** 2
            y[i] = total

    @ti.kernel
    def short_of_one():
        for i in y:
            total = 0.0
            for n in range(39):
                total += x[n] ** 2
            y[i] = total

    @ti.kernel
    def from_the_second():
        for i in y:
            total = 0.0
            for n in range(1, count):
                total += x[n] ** 2
            y[i] = total

    @ti.kernel
    def every_second():
        for i in y:
            total = 0.0
            for n in range(pairs):
                total += x[2 * n] ** 2
            y[i] = total

    @ti.kernel
    def of_other_length():
        for i in y:
            total = 0.0
            for n in range(10 * i):
                total += x[n] ** 2
            y[i] = total

    @ti.kernel
    def over_a_field():
        for i in y:
            total = 0.0
            for n in range(x.shape[0]):
                total += x[n] ** 2
            y[i] = total

    @ti.kernel
    def skipped():
        for i in y:
            total = 0.0
            if i == 2:
                continue
            for n in range(count):
                total += x[n] ** 2
            y[i] = total

    @ti.kernel
    def one_term():
        for i in y:
            total = 0.0
            for n in range(19):
                total += x[2 * n] * x[2 * n + 1] * i
            y[i] = total

    @ti.kernel
    def backwards_and_subtracted():
        for i in y:
            total = 0.0
            for n in range(19, 20):
                total -= x[3 - 2 * (n - 19)] * x[2 - 2 * (n - 19)] * i
            y[i] = total * total

    @ti.kernel
    def by_condition_with_break():
        for i in y:
            total = 0.0
            for n in range(20):
                if x[n] > 0.55:
                    total += x[n] ** 2
                if n > 15 + i:
                    break
            y[i] = total

    @ti.kernel
    def with_an_outer_index():
        for i in y:
            total = 0.0
            for n in range(5):
                total += x[i + 8 * n] ** 2 + x[i + 8 * n + 3]
            y[i] = total

    @ti.kernel
    def straight():
        for i in y:
            total = 0.0
            for _ in range(2):
                part = 0.0
                if i < 3:
                    part += x[i + 8] * x[i + 7] + x[i]
                total += part
            y[i] = total

    @ti.kernel
    def neighbours():
        for i in y:
            total = 0.0
            for n in range(39):
                total += x[n] * x[n + 1] * i
            y[i] = total

    @ti.kernel
    def looked_up():
        for i in y:
            total = 0.0
            for n in range(20):
                total += x[order[n]] ** 2
            y[i] = total

    @ti.kernel
    def halves():
        for i in y:
            total = 0.0
            for n in range(20):
                total += x[n // 2] ** 2
            y[i] = total

    @ti.kernel
    def nested():
        for i in y:
            total = 0.0
            for n in range(5):
                for m in range(4):
                    total += x[n + 2 * m] * x[n] * m
            y[i] = total

    @ti.kernel
    def repeated():
        for i in y:
            total = 0.0
            for _ in range(3):
                for n in range(10):
                    total += x[n] ** 2
            y[i] = total

    @ti.kernel
    def two_statements():
        for i in y:
            total = 0.0
            for n in range(10):
                total += x[n] ** 2
                total += ti.sin(x[n])
            y[i] = total

    @ti.kernel
    def unrolled():
        for i in y:
            total = 0.0
            for k in ti.static(range(2)):
                for n in range(10):
                    total += x[n + k] ** 2
            y[i] = total

    @ti.kernel
    def two_statements_and_read():
        for i in y:
            total = 0.0
            other = 0.0
            for n in range(count):
                total += 0.01 * x[n] ** 2
                total += 0.01 * ti.sin(x[n])
                other += total * 0.01
            y[i] = total + other * i

    @ti.kernel
    def reset_and_read():
        for i in y:
            total = 0.0
            other = 0.0
            for n in range(count):
                total += 0.01 * x[n] ** 2
                if n == 4:
                    total = 0.0
                    total += 0.01 * x[n] * x[1]
                other += total * 0.01
            y[i] = total + other * i

    @ti.kernel
    def read_between_two_statements():
        for i in y:
            total = 0.0
            other = 0.0
            for n in range(count):
                total += 0.01 * x[n] ** 2
                other += total * 0.01
                total -= 0.01 * ti.sin(x[n])
            y[i] = total + other * i

    @ti.kernel
    def reset():
        for i in y:
            total = 0.0
            for n in range(10):
                if n == 4:
                    total = 0.0
                total += x[n] ** 2
            y[i] = total

    @ti.kernel
    def started_with_a_value():
        for i in y:
            total = x[i]
            for n in range(10):
                total += x[n] ** 2
            y[i] = total

    @ti.kernel
    def scaled():
        for i in y:
            total = 0.0
            for n in range(10):
                total += x[n] ** 2
                total *= 1.1
            y[i] = total

    @ti.kernel
    def counted_by_a_while():
        for i in y:
            total = 0.0
            n = 0
            while n < 10:
                total += x[n] ** 2
                n += 1 if n != 3 or total > 1.5 + i else 0
                total += 0.1
            y[i] = total

    @ti.func
    def add_square(total: ti.template(), n):
        total += x[n] ** 2

    @ti.kernel
    def by_reference():
        for i in y:
            total = 0.0
            for n in range(10):
                add_square(total, n)
                add_square(total, n + 1)
            y[i] = total

    return locals()


@pytest.mark.mostly_sweep("40-scaled", "600-counted_by_a_while", "600-by_reference")
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
