"""Random programs about lists: many parameters, few of which one entry uses, and loops whose lengths are read.

They take the ways of graphs and meshes: sums over neighbours, which ``t`` lists and ``n`` counts; loops over a range
that is only known at run time, also in parallel; serial loops that store to entries that may be the same; loops that
are left early.  ``program_grammar`` writes all the rest.
"""

import random
from collections.abc import Callable
from dataclasses import replace

from program_grammar import Grammar
from program_model import VECTORS, Field, Program, Variable

LONGEST = 4  # of a list


class Lists(Grammar):
    """Writes one program."""

    serial_share = 0.3
    is_looking_up = False  # whether the index of an entry of a table is being written

    def choose_fields(self, columns: int) -> tuple[Field, ...]:
        rng = self.rng
        many = rng.choice([20, 70, 90, 130])
        rows = max(self.main_size, 3)
        style = rng.choice(["whole", "component", "indexed"])
        fields = [
            Field("x", "f", (many,)),
            Field("y", "f", (self.main_size,)),
            Field("t", "i", (rows, LONGEST), high=rng.choice([many, many, self.main_size])),
            Field("n", "i", (rows,), high=rng.randint(2, LONGEST + 1)),
        ]
        optional = [
            Field("m", "i", (), high=min(self.main_size, 9) + 1),
            Field("z", "f", (rng.choice([many, self.main_size]),)),
            Field("s", "f", ()),
            Field("c", "f", (rows, LONGEST)),
            Field("w", rng.choice(VECTORS), (rng.choice([many, self.main_size]),), access=style),
            Field("v", rng.choice(VECTORS), (rng.choice([30, many]),), access=style),
        ]
        return (*fields, *(f for f in optional if self.chance(0.5)))

    def index(self, size: int) -> str:
        """An index into a dimension, often that of a neighbour."""
        if not self.is_looking_up and self.chance(0.5):
            self.is_looking_up = True
            found = self.entry(["i"], "read", high=size)
            self.is_looking_up = False
            if found is not None:
                return found
        return super().index(size)

    def range_text(self, longest: int) -> tuple[str, int, int]:
        """The bounds of a loop, often read from a field, and those of its variable."""
        fields = [f for f in self.fields if f.type == "i" and f.high <= min(longest, 9) + 1]
        fields = [f for f in fields if f.name in self.place.access and self.place.access[f.name].can_read]
        if not fields or self.chance(0.4):
            return super().range_text(longest)
        f = self.rng.choice(fields)
        self.is_looking_up = True
        bound = self.entry_of(f, self.place.access[f.name], "read")
        self.is_looking_up = False
        if self.chance(0.2):
            return f"{bound}, {bound} + 2", 0, f.high
        return bound, 0, f.high - 2

    def root_header(self) -> tuple[list[Variable], list[Variable], Callable[[Field], tuple[str | None, ...] | None]]:
        """The first line of a parallel loop, sometimes over two ranges that are read."""
        counts = [f for f in self.fields if f.type == "i" and f.high <= 9]
        if not counts or not self.chance(0.25):
            return super().root_header()
        names = [self.fresh("i")]
        names.append(names[0] + "b")
        chosen = [self.rng.choice(counts) for _ in names]
        ends = [self.entry_of(f, self.place.access[f.name], "read") for f in chosen]
        self.emit(f"for {', '.join(names)} in ti.ndrange({', '.join(ends)}):")
        a, b = (f.high - 1 for f in chosen)
        variables = [Variable(name, "i", 0, f.high - 2, is_writable=False) for name, f in zip(names, chosen)]

        def own(f: Field) -> tuple[str | None, ...] | None:
            if len(f.shape) == 2 and f.shape[0] >= a and f.shape[1] >= b:
                return tuple(names)
            return (f"{names[0]} * {b} + {names[1]}",) if len(f.shape) == 1 and f.shape[0] >= a * b else None

        return variables, variables, own

    def statement(self) -> None:
        if self.budget > 0 and self.place.depth < 4 and self.place.trips <= 40 and self.chance(0.3):
            self.budget -= 1
            self.sum_over_list()
        else:
            super().statement()

    def sum_over_list(self) -> None:
        """A local that adds up terms in a loop of some length, and an entry that takes it."""
        is_root = self.place.is_root
        type = self.rng.choice(["f", "f", *VECTORS])
        old = self.some_local(type) if self.chance(0.4) else None
        name = old.name if old is not None and old.is_readable else self.new_sum(type)
        text, low, high = self.range_text(LONGEST)
        k = self.fresh("i")
        if is_root:
            self.emit("ti.loop_config(serialize=True)")
        text, first, last = self.padded(text, low, high)
        self.emit(f"for {k} in range({text}):")
        counter = Variable(k, "i", first, last, is_writable=False)
        with self.block(counter, trips=max(last - first + 1, 1), can_break=not is_root, can_continue=True):
            with self.within([counter], [replace(counter, low=low, high=high)]):
                self.sum_term(name, type)
        for _ in range(self.rng.choice([0, 0, 1, 2])):
            self.emit(f"{name} {self.rng.choice(['+=', '-=', '='])} {self.value(type, 2)}")
        found = self.any_entry("add") if self.chance(0.7) else None
        if found is not None:
            local = Variable(name, type)
            taken = f"{self.as_scalar(local)} * {self.scalar(1)}" if found[1] == "f" else self.value(found[1], 2)
            self.emit(f"{found[0]} {self.rng.choice(['+=', '-='])} {taken}")

    def sum_term(self, name: str, type: str) -> None:
        """An iteration of a loop that adds up terms."""
        if self.chance(0.3):
            self.leave_loop()
        if self.chance(0.4):
            self.statement()
        factor = "0.5 * " if self.chance(0.2) else ""
        operator = self.rng.choice(["+=", "+=", "+=", "-=", f"= {factor}{name} +", "="])
        self.emit(f"{name} {operator} {self.value(type, 2)}")
        if self.chance(0.3):
            self.simple()

    def new_sum(self, type: str) -> str:
        """A local as it is before a loop adds to it."""
        value = self.rng.choice(["0.0", self.scalar(1)]) if type == "f" else self.vector(type, 1)
        name = self.declare(type)
        self.emit(f"{name} = {value}")
        self.settle()
        return name

    def body(self) -> None:
        if (self.place.can_break or self.place.can_continue) and self.chance(0.25):
            self.leave_loop()
        super().body()


def generate(seed: int) -> Program:
    """The program of a seed."""
    return Lists(random.Random(seed)).program()
