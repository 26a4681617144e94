"""Random parallel loops in lanes compute what they do one iteration after the other.

Neighbours part in branches and loops, and by ``break`` and ``continue``; values that they share stand next to values
that differ. The interpreter ends loops that go on for ever, and raises for an index out of bounds and a division by 0.
"""

import random
from collections.abc import Callable

import numpy as np
import pytest
from forced_lanes import set_limits
from numpy.testing import assert_array_equal
from printed_programs import text
from program_interpreter import Interpreter

import taichi_ext.program as ir
from taichi_ext.analysis.loops import Extent
from taichi_ext.program import F64, I32, Assign, Body, Const, Declare, For, If, Jump, Load, Local, Read, Update, Value
from taichi_ext.program.build import cast, literal, operation
from taichi_ext.schedule import masks
from taichi_ext.schedule.lanes import CannotError, find_lanes
from taichi_ext.schedule.machine import Machine
from taichi_ext.schedule.stretches import in_lanes

LOOPS = 250
SIZES = (8, 7)  # iterations, four at a time
ENTRIES = 3  # of x


class Bodies:
    """Writes the body of one parallel loop.

    It reads x, and w at the iteration, stores y and z there, and rows of D, two numbers each. Locals in ``alike`` are
    assigned what is the same for all lanes, but some of them in branches and loops that lanes do not share.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.size = rng.choice(SIZES)
        self.x, self.w, self.y, self.z, self.d = (ir.Container(name, F64, 1, is_argument=True) for name in "xwyzD")
        self.j = Local("j", I32, (), "loop")
        self.reals = [Local(name, F64) for name in "abst"]
        self.counts = [Local(name, I32) for name in "nm"]
        self.array = Local("h", F64, (ENTRIES,))
        self.alike = {*self.reals[2:], self.counts[1]}

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    # --- values

    def of(self, found: list[Local], is_alike: bool) -> list[Local]:
        return [x for x in found if x in self.alike] if is_alike else found

    def whole(self, numbers: list[Local], is_alike: bool = False) -> Value:
        """A whole number from 0 to 5 that lanes share, or that may differ."""
        own = [] if is_alike else [operation("mod", Read(self.j), self.rng.choice([2, 3, 5]))] * 2
        numbers = self.of(numbers, is_alike)
        options = [literal(self.rng.randrange(5), I32), *own, *map(Read, numbers)]
        return self.rng.choice([*options, *(operation("mod", Read(x), 3) for x in numbers)])

    def real(self, numbers: list[Local], is_alike: bool = False) -> Value:
        entry = operation("mod", self.whole(numbers, is_alike), ENTRIES)
        options: list[Value] = [*map(Read, self.of(self.reals, is_alike)), Load(self.x, (entry,))]
        if not is_alike:
            options += [Load(c, (Read(self.j),)) for c in (self.w, self.y, self.z)]
            options += [Read(self.array, (entry,)), cast(self.whole(numbers), F64)]
        if self.chance(0.3):
            return self.rng.choice(options)
        return operation(self.rng.choice(["add", "sub", "mul", "max"]), *self.rng.choices(options, k=2))

    def condition(self, numbers: list[Local]) -> Value:
        is_alike = self.chance(0.5)
        if self.chance(0.6):
            pair = (self.whole(numbers, is_alike), self.whole(numbers, is_alike))
            return operation(self.rng.choice(["lt", "eq"]), *pair)
        return operation("lt", self.real(numbers, is_alike), self.real(numbers, is_alike))

    # --- statements

    def declared(self, numbers: list[Local], value: Value, is_alike: bool) -> tuple[Local, Declare]:
        fresh = Local("k", value.dtype)
        if is_alike:
            self.alike.add(fresh)
        if value.dtype == I32:
            numbers.append(fresh)
        return fresh, Declare(fresh, (value,))

    def change(self, numbers: list[Local]) -> Body:
        """Statements without blocks."""
        own, is_alike = (Read(self.j),), self.chance(0.5)
        kind = self.rng.randrange(7)
        if kind == 0:
            return (self.declared(numbers, self.whole(numbers, is_alike), is_alike)[1],)
        if kind == 1:
            count = self.counts[is_alike]
            return (Assign(Read(count), operation("mod", self.whole(numbers, is_alike), 5)),)
        if kind == 2:
            place = operation("add", operation("mul", Read(self.j), 2), self.rng.randrange(2))
            return (Assign(Load(self.d, (place,)), self.real(numbers)),)
        entry = operation("mod", self.whole(numbers), ENTRIES)
        others = [Read(self.array, (entry,)), Load(self.y, own), Load(self.z, own)]
        locals_ = [Read(x) for x in self.reals if (x in self.alike) is is_alike]
        target = self.rng.choice(locals_ if is_alike else [*locals_, *others])
        if self.chance(0.5) and isinstance(target, Read):
            return (Update(target, "add", self.real(numbers, is_alike)),)
        return (Assign(target, self.real(numbers, is_alike)),)

    def branch(self, numbers: list[Local], depth: int, jumps: list[str]) -> Body:
        then, orelse = (self.block(list(numbers), depth - 1, jumps) for _ in range(2))
        return (If(self.condition(numbers), then, orelse if self.chance(0.5) else ()),)

    def guarded(self, numbers: list[Local], depth: int, jumps: list[str]) -> Body:
        """A division or an index that is safe only in the lanes of a branch, or behind a jump of the others."""
        is_alike = self.chance(0.6)
        k, declare = self.declared([], self.whole(numbers, is_alike), is_alike)
        if self.chance(0.5):
            is_safe = operation("lt", operation("mod", self.whole(numbers), 3), Read(k))
            entry = operation("floordiv", literal(ENTRIES - 1, I32), Read(k))
        else:
            entry = Read(k)
            is_safe = operation("lt", operation("add", entry, self.whole(numbers)), ENTRIES)
        use: list[ir.Statement] = [
            Update(Read(self.reals[self.rng.randrange(2) + 2 * is_alike]), "add", Load(self.x, (entry,)))
        ]
        if self.chance(0.5):
            fresh, first = self.declared(numbers, Load(self.x, (entry,)), is_alike)
            use = [first, Update(Read(self.reals[2 * is_alike]), "add", Read(fresh))]
        if jumps and self.chance(0.5):
            return (declare, If(operation("logical_not", is_safe), (Jump(self.rng.choice(jumps)),)), *use)
        return (declare, If(is_safe, tuple(use)))

    def range_loop(self, numbers: list[Local], depth: int, jumps: list[str]) -> Body:
        n, is_alike = Local("i", I32, (), "loop"), self.chance(0.6)
        bounds = tuple(self.whole(numbers, is_alike) for _ in range(self.rng.choice([1, 1, 2])))
        if is_alike:
            self.alike.add(n)
        return (For("range", (n,), bounds, self.block([*numbers, n], depth - 1, ["break", "continue"])),)

    def while_loop(self, numbers: list[Local], depth: int, jumps: list[str]) -> Body:
        """A loop that a counter ends; a jump may come before, in between or behind."""
        n, kinds, is_alike = Local("n", I32), ["break", "continue"], self.chance(0.5)
        inner = [*numbers, n]
        self.alike.add(n)
        step, declare = Update(Read(n), "add", literal(1, I32)), Declare(n, (literal(0, I32),))
        if self.chance(0.3):
            goes_on = operation("lt", Read(n), self.whole(numbers, is_alike))
            return (declare, ir.While(goes_on, (step, *self.block(inner, depth - 1, kinds))))
        before = self.block(inner, 0, ["break"]) if self.chance(0.3) else ()
        end = If(operation("gt", Read(n), self.whole(numbers, is_alike)), (Jump("break"),))
        return (declare, ir.While(None, (*before, step, end, *self.block(inner, depth - 1, kinds))))

    def jump(self, numbers: list[Local], depth: int, jumps: list[str]) -> Body:
        return (If(self.condition(numbers), (*self.block(list(numbers), 0, []), Jump(self.rng.choice(jumps)))),)

    def block(self, numbers: list[Local], depth: int, jumps: list[str]) -> Body:
        made: list[ir.Statement] = []
        inner: list[Callable[[list[Local], int, list[str]], Body]] = [self.guarded, *[self.jump] * bool(jumps)]
        inner += [self.branch, self.range_loop, self.while_loop] * bool(depth)
        for _ in range(self.rng.randint(1, 4)):
            kind = self.rng.choice(inner) if self.chance(0.5) else None
            made += self.change(numbers) if kind is None else kind(numbers, depth, jumps)
        return tuple(made)

    def loop(self) -> For:
        """The loop; ``continue`` ends an iteration of the parallel loop, too."""
        own = (Read(self.j),)
        starts = [Const(0.5, F64), Load(self.w, own), Const(0.25, F64), Load(self.x, (literal(1, I32),))]
        body = (
            *(Declare(x, (value,)) for x, value in zip(self.reals, starts, strict=True)),
            *(Declare(x, (self.whole([], is_alike),)) for is_alike, x in enumerate(self.counts)),
            Declare(self.array, tuple(Const(0.1 * n, F64) for n in range(ENTRIES))),
            *self.block([*self.counts], 3, ["continue"] * self.chance(0.5)),
        )
        total = operation(
            "add", *(operation("add", Read(x), Read(y)) for x, y in zip(self.reals[::2], self.reals[1::2]))
        )
        y = Load(self.y, own)
        end = (Update(y, "add", total) if self.chance(0.5) else Assign(y, operation("add", y, total)),)
        return For("range", (self.j,), (literal(self.size, I32),), (*body, *end))

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


@pytest.fixture(autouse=True)
def limits(monkeypatch):
    monkeypatch.setattr(masks, "LEAST_GUARDED", 4)
    set_limits(monkeypatch, LANES_OF_FLOAT64=4, NEEDS_VECTORS=False, MOST_OPERATIONS=10**6)


def compare(bodies: Bodies, loop: For, name: str) -> None:
    """Run a loop, and in lanes; raises where it cannot be in lanes."""
    made = in_lanes(find_lanes(loop, (bodies.size,), {bodies.d: bodies.y}, bodies.machine))
    shown = f"{name}\n" + "".join(text(ir.Program(n, (), (), (s,), ())) for n, s in (("k", loop), ("lanes", made)))
    try:
        found = bodies.after(made)
    except Exception as error:
        raise AssertionError(shown) from error
    for container, expected in bodies.after(loop).items():
        assert_array_equal(found[container], expected, err_msg=f"{container}, {shown}")


@pytest.mark.mostly_sweep("25")
@pytest.mark.parametrize("loops", [25, LOOPS])
def test_random_loops_compute_what_they_did(loops):
    count = 0
    for seed in range(loops):
        bodies = Bodies(random.Random(seed))
        try:
            compare(bodies, bodies.loop(), f"seed {seed}")
        except CannotError:
            continue
        count += 1
    assert count > loops / 2


def test_divisions_that_no_lane_takes_part_in_do_not_run():
    """A number that lanes share, behind a break of all of them; an entry of an array in some lanes."""
    bodies = Bodies(random.Random(0))
    j, n, k, a, h = Read(bodies.j), Local("n", I32, (), "loop"), Local("k", I32), bodies.reals[0], bodies.array
    two, own = literal(2, I32), (Read(bodies.j),)
    parted = operation("mod", j, 2)
    shared: Body = (
        If(operation("eq", Read(n), operation("add", parted, 1)), (Jump("break"),)),  # at 1 or 2
        Declare(k, (operation("floordiv", two, operation("sub", two, Read(n))),)),
        Update(Read(a), "add", cast(Read(k), F64)),
    )
    quotient = cast(operation("floordiv", two, operation("sub", literal(1, I32), parted)), F64)
    of_some = If(
        operation("lt", parted, 1),
        (For("range", (k,), (two,), (Assign(Read(h, (literal(0, I32),)), quotient),)), Update(Read(a), "add", Read(a))),
    )
    for name, inner in (
        ("shared", (For("range", (n,), (literal(5, I32),), shared),)),
        ("some", (For("range", (n,), (two,), (of_some,)),)),
    ):
        body = (
            Declare(a, (Load(bodies.w, own),)),
            Declare(h, (Const(0.5, F64),) * ENTRIES),
            *inner,
            Update(Load(bodies.y, own), "add", operation("mul", Read(a), Read(h, (literal(0, I32),)))),
        )
        compare(bodies, For("range", (bodies.j,), (literal(bodies.size, I32),), body), name)
