"""Random parallel loops in lanes compute what they do one iteration after the other.

Neighbours part in branches and loops, and by ``break`` and ``continue``; values that they share stand next to values
that differ. The interpreter ends loops that go on for ever, and raises for an index out of bounds and a division by 0.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
from forced_lanes import set_limits
from numpy.testing import assert_array_equal
from program_interpreter import Interpreter

from taichi_ext.analysis.loops import Extent
from taichi_ext.differentiate.forms.build import cast, literal, operation
from taichi_ext.program import (
    F64,
    I32,
    Assign,
    Body,
    Const,
    Container,
    Declare,
    For,
    If,
    Jump,
    Load,
    Local,
    Program,
    Read,
    Statement,
    Update,
    Value,
    While,
    text,
)
from taichi_ext.schedule import masks
from taichi_ext.schedule.lanes import CannotError, find_lanes
from taichi_ext.schedule.machine import Machine
from taichi_ext.schedule.stretches import in_lanes

LOOPS = 500
SIZES = (8, 7)  # iterations, four at a time
ENTRIES = 3  # of x


class Bodies:
    """Writes the body of one parallel loop.

    It reads x, and w at the iteration, stores y and z there, and rows of D, two numbers each. ``v`` may not be written.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.size = rng.choice(SIZES)
        self.x, self.w, self.y, self.z, self.d = (Container(name, F64, 1, is_argument=True) for name in "xwyzD")
        self.j = Local("j", I32, (), "loop")
        self.reals = [Local(name, F64) for name in "abc"]
        self.counts = [Local(name, I32) for name in "mn"]
        self.array = Local("h", F64, (ENTRIES,))

    # --- values

    def whole(self, numbers: list[Local]) -> Value:
        """A whole number from 0 to 4 that lanes share, or that differs."""
        shared = literal(self.rng.randrange(4), I32)
        options = [shared, shared, *(operation("mod", Read(x), self.rng.choice([2, 3, 5])) for x in (*numbers, self.j))]
        return self.rng.choice(options)

    def real(self, numbers: list[Local]) -> Value:
        def leaf() -> Value:
            entry = operation("mod", self.whole(numbers), ENTRIES)
            options = [
                *(Read(x) for x in self.reals),
                *(Load(c, (Read(self.j),)) for c in (self.w, self.y, self.z)),
                *(Load(self.x, (literal(n, I32),)) for n in range(ENTRIES)),
                *(Load(self.x, (entry,)), Read(self.array, (entry,)), cast(self.whole(numbers), F64)),
            ]
            return self.rng.choice(options)

        if self.rng.random() < 0.3:
            return leaf()
        return operation(self.rng.choice(["add", "sub", "mul", "max"]), leaf(), leaf())

    def condition(self, numbers: list[Local]) -> Value:
        if self.rng.random() < 0.5:
            return operation(self.rng.choice(["lt", "eq"]), self.whole(numbers), self.whole(numbers))
        return operation("lt", self.real(numbers), self.real(numbers))

    # --- statements

    def change(self, numbers: list[Local]) -> Body:
        """Statements without blocks."""
        own = (Read(self.j),)
        entry = operation("mod", self.whole(numbers), ENTRIES)
        kind = self.rng.randrange(7)
        if kind == 0:
            fresh = Local("k", I32)
            numbers.append(fresh)
            return (Declare(fresh, (self.whole(numbers[:-1]),)),)
        if kind == 1:
            return (Assign(Read(self.rng.choice(self.counts)), self.whole(numbers)),)
        if kind == 2:
            place = operation("add", operation("mul", Read(self.j), 2), self.rng.randrange(2))
            return (Assign(Load(self.d, (place,)), self.real(numbers)),)
        target = self.rng.choice(
            [*(Read(x) for x in self.reals), Load(self.y, own), Load(self.z, own), Read(self.array, (entry,))]
        )
        if kind < 5 and isinstance(target, Read):
            return (Update(target, "add", self.real(numbers)),)
        return (Assign(target, self.real(numbers)),)

    def branch(self, numbers: list[Local], depth: int, jumps: list[str]) -> Body:
        then, orelse = (self.block(list(numbers), depth - 1, jumps) for _ in range(2))
        return (If(self.condition(numbers), then, orelse if self.rng.random() < 0.5 else ()),)

    def guarded(self, numbers: list[Local], depth: int, jumps: list[str]) -> Body:
        """A division and an index that are safe only in the lanes of a branch, or behind a jump of the others."""
        k = Local("k", I32)
        declared = Declare(k, (self.whole(numbers),))
        whole = operation("floordiv", literal(ENTRIES - 1, I32), Read(k))
        used: Body = (Update(Read(self.rng.choice(self.reals)), "add", Load(self.x, (whole,))),)
        is_none = operation("eq", Read(k), 0)
        if jumps and self.rng.random() < 0.5:
            return (declared, If(is_none, (Jump(self.rng.choice(jumps)),)), *used)
        return (declared, If(operation("logical_not", is_none), used))

    def range_loop(self, numbers: list[Local], depth: int, jumps: list[str]) -> Body:
        n = Local("i", I32, (), "loop")
        bounds = tuple(self.whole(numbers) for _ in range(self.rng.choice([1, 1, 2])))
        return (For("range", (n,), bounds, self.block([*numbers, n], depth - 1, ["break", "continue"])),)

    def while_loop(self, numbers: list[Local], depth: int, jumps: list[str]) -> Body:
        """A loop that a counter ends; a jump may come before, in between or behind."""
        n = Local("n", I32)
        inner, kinds = [*numbers, n], ["break", "continue"]
        is_last = operation("gt", Read(n), operation("add", self.whole(numbers), 1))
        end: Body = (Update(Read(n), "add", literal(1, I32)), If(is_last, (Jump("break"),)))
        declared = Declare(n, (literal(0, I32),))
        if self.rng.random() < 0.3:
            goes_on = operation("lt", Read(n), self.whole(numbers))
            return (declared, While(goes_on, (end[0], *self.block(inner, depth - 1, kinds))))
        before = self.block(inner, 0, ["break"]) if self.rng.random() < 0.3 else ()
        return (declared, While(None, (*before, *end, *self.block(inner, depth - 1, kinds))))

    def jump(self, numbers: list[Local], depth: int, jumps: list[str]) -> Body:
        return (If(self.condition(numbers), (*self.block(list(numbers), 0, []), Jump(self.rng.choice(jumps)))),)

    def block(self, numbers: list[Local], depth: int, jumps: list[str]) -> Body:
        made: list[Statement] = []
        inner: list[Callable[[list[Local], int, list[str]], Body]] = [self.guarded, *[self.jump] * bool(jumps)]
        inner += [self.branch, self.range_loop, self.while_loop] * bool(depth)
        for _ in range(self.rng.randint(1, 4)):
            kind = self.rng.choice(inner) if self.rng.random() < 0.5 else None
            made += self.change(numbers) if kind is None else kind(numbers, depth, jumps)
        return tuple(made)

    def loop(self) -> For:
        """The loop; ``continue`` ends an iteration of the parallel loop, too."""
        start: Body = (
            *(
                Declare(x, (Load(self.w, (Read(self.j),)) if n else literal(0.5, F64),))
                for n, x in enumerate(self.reals)
            ),
            *(Declare(x, (self.whole([]),)) for x in self.counts),
            Declare(self.array, tuple(Const(0.1 * n, F64) for n in range(ENTRIES))),
        )
        body = self.block([*self.counts], 3, ["continue"])
        end = tuple(Update(Load(self.y, (Read(self.j),)), "add", Read(x)) for x in self.reals)
        return For("range", (self.j,), (literal(self.size, I32),), (*start, *body, *end))

    @property
    def machine(self) -> Machine:
        return Machine(1, extents={c: Extent((self.size,), (0,)) for c in (self.w, self.y, self.z)})

    def after(self, loop: For) -> dict[str, np.ndarray]:
        """The memory after a run of the loop."""
        rng, sizes = np.random.default_rng(0), (ENTRIES, self.size, self.size, self.size, 2 * self.size)
        containers = (self.x, self.w, self.y, self.z, self.d)
        state = Interpreter({c: rng.uniform(-1, 1, n) for c, n in zip(containers, sizes, strict=True)})
        with np.errstate(all="ignore"):
            state.run((loop,))
        return {c.name: values for c, values in state.arrays.items()}


def test_random_loops_compute_what_they_did(monkeypatch):
    monkeypatch.setattr(masks, "LEAST_GUARDED", 4)
    set_limits(monkeypatch, LANES_OF_FLOAT64=4, NEEDS_VECTORS=False, MOST_OPERATIONS=10**6)
    count = 0
    for seed in range(LOOPS):
        bodies = Bodies(random.Random(seed))
        loop = bodies.loop()
        try:
            made = in_lanes(find_lanes(loop, (bodies.size,), {bodies.d: bodies.y}, bodies.machine))
        except CannotError:
            continue
        count += 1
        shown = f"seed {seed}\n" + "".join(
            text(Program(n, (), (), (s,), ())) for n, s in (("k", loop), ("lanes", made))
        )
        try:
            found = bodies.after(made)
        except Exception as error:
            raise AssertionError(shown) from error
        for name, expected in bodies.after(loop).items():
            assert_array_equal(found[name], expected, err_msg=f"{name}, {shown}")
    assert count > LOOPS / 2
