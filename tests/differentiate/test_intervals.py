"""Intervals of integer expressions against all values that they take."""

import numpy as np
import pytest

from taichi_ext.analysis.affine import Affine, IntegerForms
from taichi_ext.analysis.intervals import IndexFacts, interval_of, range_of
from taichi_ext.program import I8, I32, U1, U8, Assign, Const, Local, Op, Read

FUNCTIONS = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "bit_and": np.bitwise_and,
    "bit_or": np.bitwise_or,
    "floordiv": np.floor_divide,
    "mod": np.mod,
}
COMPARISONS = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
WIDE = np.array([-(2**31), -(2**31) + 1, -3, -1, 0, 1, 2, 7, 2**31 - 2, 2**31 - 1], np.int32)


class Draw:
    """Random expressions and conditions over some variables, each with its values for all assignments."""

    def __init__(self, seed: int, ranges: list[np.ndarray]) -> None:
        self.rng = np.random.default_rng(seed)
        self.locals = [Local(f"v{n}", I32) for n in range(len(ranges))]
        grids = np.meshgrid(*ranges, indexing="ij")
        self.values = dict(zip(self.locals, (g.ravel() for g in grids), strict=True))

    def expression(self, depth: int):
        """An expression, and its value for each assignment, in the arithmetic of int32."""
        count = len(self.values[self.locals[0]])
        if depth == 0 or self.rng.random() < 0.25:
            if self.rng.random() < 0.4:
                number = int(self.rng.integers(-4, 5))
                return Const(number, I32), np.full(count, number, np.int32)
            local = self.locals[self.rng.integers(len(self.locals))]
            return Read(local), self.values[local]
        name = str(self.rng.choice([*FUNCTIONS, "add", "sub", "add", "select", "neg"]))
        a, x = self.expression(depth - 1)
        with np.errstate(over="ignore"):
            if name == "neg":
                return Op("neg", (a,), I32), -x
            if name == "select":
                c, holds = self.condition(1)
                b, y = self.expression(depth - 1)
                return Op("select", (c, a, b), I32), np.where(holds, x, y)
            b, y = self.expression(depth - 1)
            if name in ("floordiv", "mod"):
                b, y = Const(3, I32), np.full(count, 3, np.int32)
            return Op(name, (a, b), I32), FUNCTIONS[name](x, y)

    def condition(self, depth: int):
        """A condition, and whether it holds for each assignment."""
        if depth and self.rng.random() < 0.6:
            name = str(self.rng.choice(["logical_and", "logical_or", "logical_not"]))
            a, x = self.condition(depth - 1)
            if name == "logical_not":
                return Op(name, (a,), U1), ~x
            b, y = self.condition(depth - 1)
            return Op(name, (a, b), U1), (x & y) if name == "logical_and" else (x | y)
        name = str(self.rng.choice(list(COMPARISONS)))
        (a, x), (b, y) = self.expression(2), self.expression(1)
        return Op(name, (a, b), U1), COMPARISONS[name](x, y)

    def facts(self) -> IndexFacts:
        facts = IndexFacts(IntegerForms(()))
        for local, values in self.values.items():
            facts.note(Affine(((local, 1),)), (int(values.min()), int(values.max())))
        return facts


@pytest.mark.mostly_sweep(every=4)
@pytest.mark.parametrize("block", range(20))
@pytest.mark.parametrize("is_wide", [False, True])
def test_intervals_have_all_values(block, is_wide):
    """Under up to three conditions; wide variables wrap around."""
    for seed in range(25 * block, 25 * block + 25):
        ranges = [WIDE] * 3 if is_wide else [np.arange(0, 6), np.arange(-2, 4), np.arange(1, 5)]
        draw = Draw(seed, [r.astype(np.int32) for r in ranges])
        facts, holds = draw.facts(), True
        for _ in range(draw.rng.integers(0, 4)):
            condition, where = draw.condition(2)
            sign = bool(draw.rng.integers(2))
            facts, holds = facts.where(condition, sign), holds & (where == sign)
        for _ in range(4):
            expression, values = draw.expression(3)
            assert values.dtype == np.int32
            values = values[np.broadcast_to(holds, values.shape)]
            if not len(values):
                continue
            low, high = facts.interval(expression)
            assert low <= values.min(), f"seed {seed}"
            assert values.max() <= high, f"seed {seed}"


def known(*conditions: Op) -> IndexFacts:
    facts = IndexFacts(IntegerForms(()))
    for condition in conditions:
        facts = facts.where(condition)
    return facts


def compare(name: str, a: Read | Op | int, b: Read | Op | int) -> Op:
    sides = (x if not isinstance(x, int) else Const(x, I32) for x in (a, b))
    return Op(name, tuple(sides), U1)


def plus(a: Read, number: int) -> Op:
    return Op("add", (a, Const(number, I32)), I32)


def test_intervals_of_conditions():
    """Those that are worth a guard are found: literal ends."""
    i, j, n = (Read(Local(name, I32)) for name in "ijn")
    assert known(compare("ge", i, 0), compare("lt", i, 5)).interval(plus(i, 1)) == (1, 5)
    assert known(compare("lt", j, 9), compare("gt", i, 0), compare("le", i, j)).interval(plus(i, -1)) == (0, 7)
    assert known(compare("ge", i, 0), compare("lt", i, 6), compare("ne", i, 0)).interval(plus(i, -1)) == (0, 4)
    assert known(compare("eq", i, 3)).interval(Op("mul", (i, i), I32)) == (9, 9)
    both = Op("logical_and", (compare("ge", plus(i, -1), 0), compare("lt", plus(i, -1), 4)), U1)
    assert known(both).interval(plus(i, -1)) == (0, 3)
    assert known(compare("le", n, 4), compare("lt", i, n), compare("ge", i, 0)).interval(i) == (0, 3)
    assert known(Op("logical_not", (compare("lt", i, 0),), U1)).interval(i) == (0, 2**31 - 1)


SMALL = [(-5, -2), (-3, 4), (0, 0), (0, 3), (2, 6), (8, 9)]
QUOTIENTS = {"floordiv": lambda a, b: a // b, "mod": lambda a, b: a % b}
SHIFTS = {"shift_right": lambda a, n: a >> n, "bit_sar": lambda a, n: a >> n}
OPERATIONS = {"min": min, "max": max, "mul": lambda a, b: a * b, **QUOTIENTS, **SHIFTS, "bit_and": lambda a, b: a & b}


def is_known(name, a, b):
    """Whether an operation on two intervals has an interval."""
    if name in QUOTIENTS:
        return b[0] > 0
    return b[0] >= 0 if name in SHIFTS else name != "bit_and" or a[0] >= 0 or b[0] >= 0


@pytest.mark.parametrize("name", OPERATIONS)
def test_intervals_of_operations_are_those_of_all_numbers_in_them(name):
    for a in SMALL:
        for b in SMALL:
            found = interval_of(name, [a, b])
            assert (found is not None) == is_known(name, a, b), (a, b)
            if found is None:
                continue
            numbers = {OPERATIONS[name](x, y) for x in range(a[0], a[1] + 1) for y in range(b[0], b[1] + 1)}
            assert found[0] <= min(numbers), (a, b)
            assert found[1] >= max(numbers), (a, b)
            if name not in ("mod", "bit_and"):
                assert found == (min(numbers), max(numbers)), (a, b)
            elif name == "bit_and":
                assert found == (0, min(high for low, high in (a, b) if low >= 0))
            else:
                assert found == (a if 0 <= a[0] and a[1] < b[0] else (0, b[1] - 1))


def test_intervals_of_absolute_values():
    for a in SMALL:
        numbers = {abs(x) for x in range(a[0], a[1] + 1)}
        assert interval_of("abs", [a]) == (min(numbers), max(numbers))


def test_intervals_of_types():
    """What is known of a number by its type alone."""
    assert range_of(U8) == (0, 255)
    facts = known()
    assert facts.interval(Read(Local("b", U8))) == (0, 255)
    assert facts.interval(Op("sub", (Read(Local("b", U8)), Read(Local("c", I8))), I32)) == (-127, 383)
    assert facts.interval(Op("cast", (Read(Local("c", I8)),), U8)) == (0, 255)
    assert facts.interval(Op("mod", (Read(Local("i", I32)), Const(7, I32)), I32)) == (0, 6)


def test_a_local_that_changes_is_forgotten():
    i, k = Local("i", I32), Local("k", I32)
    facts = (
        IndexFacts(IntegerForms((Assign(Read(k), Const(0, I32)),)))
        .where(compare("lt", Read(i), 4))
        .where(compare("lt", Read(k), Read(i)))
    )
    assert facts.interval(Read(k))[1] == 2
    facts.forget(k)
    assert facts.interval(Read(k)) == range_of(I32)
    facts.set(k, (1, 2))
    assert facts.interval(plus(Read(k), 1)) == (2, 3)
