"""Writes the bodies of a pipeline's kernels: loops over containers, whose iterations may run in any order."""

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from program_containers import ELEMENTS, STRUCTS

VECTOR_SIZES = {"v2": 2, "v3": 3}


@dataclass
class Operand:
    """A container as a kernel names it, and its use in the kernel."""

    text: str
    element: str
    shape: tuple[int, ...]
    can_write: bool = True
    is_read: bool = False
    is_written: bool = False
    only_own: bool = True  # every access is at the index of the iteration


@dataclass
class Loop:
    """The allowed uses of operands in a loop: those not named are read anywhere."""

    shape: tuple[int, ...] = ()
    indices: tuple[str, ...] = ()
    own: list[Operand] = field(default_factory=list)  # read and written at the iteration's own index
    sums: list[Operand] = field(default_factory=list)  # only added to
    integers: list[tuple[str, int]] = field(default_factory=list)  # names, each with its upper bound
    locals: list[tuple[str, str]] = field(default_factory=list)  # element and name
    is_serial: bool = False  # anything goes


class Body:
    """The statements of one kernel.

    Args:
        rng: where every choice comes from.
        operands: the operands of the kernel.
        numbers: names of arguments that are real numbers.
        functions: names of functions of two numbers.
    """

    def __init__(self, rng: random.Random, operands: list[Operand], numbers: list[str], functions: list[str]) -> None:
        self.rng = rng
        self.operands = operands
        self.numbers = numbers
        self.functions = functions
        self.is_wide = False  # whether loops may be left early, and have lengths that are computed
        self.vectors: list[tuple[str, str]] = []  # arguments that are vectors: element and name
        self.lines: list[str] = []
        self.indent = 1
        self.names = 0
        self.loop = Loop()

    # --- text

    def emit(self, text: str) -> None:
        self.lines.append("    " * self.indent + text)

    @contextlib.contextmanager
    def block(self) -> Iterator[None]:
        self.indent += 1
        known = len(self.loop.locals), len(self.loop.integers)
        yield
        del self.loop.locals[known[0] :], self.loop.integers[known[1] :]
        self.indent -= 1

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def fresh(self, letter: str) -> str:
        self.names += 1
        return f"{letter}{self.names}"

    # --- indices and entries

    def index(self, size: int) -> str:
        """An integer below ``size``."""
        usable = [name for name, limit in self.loop.integers if limit <= size]
        larger = [name for name, limit in self.loop.integers if limit > size]
        options = [str(self.rng.randrange(size))]
        options += [name for name in usable for _ in range(3)]
        options += [f"({name} + {self.rng.randint(1, 3)}) % {size}" for name in usable[:1]]
        options += [f"{size - 1} - {name}" for name in usable[:1]]
        options += [f"{name} % {size}" for name in larger]
        return self.rng.choice(options)

    def place(self, o: Operand, *, is_own: bool) -> str:
        """An entry of a container: that of the iteration, or any."""
        if not o.shape:
            return f"{o.text}[None]"
        if is_own:
            indices = self.loop.indices
        else:
            o.only_own = False
            indices = tuple(self.index(n) for n in o.shape)
        names = ", ".join(indices)
        if "." not in o.text and o.element in STRUCTS and self.chance(0.25) and not is_own:
            return f"{o.text}[{names}]"
        return f"{o.text}[{names}]"

    def is_own(self, o: Operand) -> bool:
        """Whether this access has to be at the iteration's own index, or is chosen to be."""
        if self.loop.is_serial:
            return o.shape == self.loop.shape and self.chance(0.5)
        return o in self.loop.own or (o.shape == self.loop.shape != () and self.chance(0.6))

    def readable(self) -> list[Operand]:
        return [o for o in self.operands if o not in self.loop.sums]

    def scalar_of(self, o: Operand) -> str:
        """A number read from a container."""
        o.is_read = True
        return self.part_of(self.place(o, is_own=self.is_own(o)), o.element)

    def part_of(self, text: str, element: str) -> str:
        """A number of an entry."""
        if element == "f":
            return text
        if element in VECTOR_SIZES:
            size = VECTOR_SIZES[element]
            k = self.rng.randrange(size)
            options = [f"{text}[{k}]", f"{text}[{k}]", f"{text}.{'xyz'[k]}", f"{text}.norm_sqr()", f"{text}.sum()"]
            options += [f"{text}[{name}]" for name, limit in self.loop.integers if limit <= size]
            return self.rng.choice(options)
        if element == "m22":
            options = [
                f"{text}[{self.rng.randrange(2)}, {self.rng.randrange(2)}]",
                f"{text}.trace()",
                f"{text}.determinant()",
            ]
            return self.rng.choice(options)
        if element == "Body" and self.chance(0.25):
            return f"{text}.energy({self.leaf()})"
        member, inner = self.rng.choice(list(STRUCTS[element].items()))
        return self.part_of(f"{text}.{member}", inner)

    # --- expressions

    def leaf(self) -> str:
        """A number without operations."""
        options = [f"{self.rng.randint(1, 19) / 10:.1f}", *self.numbers, *(n for e, n in self.loop.locals if e == "f")]
        options += [self.part_of(n, e) for e, n in self.loop.locals + self.vectors if e != "f"]
        return self.rng.choice(options)

    def scalar(self, depth: int = 2) -> str:
        """A number of moderate size."""
        r = self.rng.random()
        usable = self.readable()
        if depth <= 0 or r < 0.15:
            own = [o for o in usable if self.chance(0.8)]
            return self.scalar_of(self.rng.choice(own)) if own and self.chance(0.7) else self.leaf()
        a = lambda: self.scalar(depth - 1)
        if r < 0.60:
            return f"({a()} {self.rng.choice('+-**')} {a()})"
        options = [
            lambda: f"ti.sin({a()})",
            lambda: f"ti.tanh({a()})",
            lambda: f"ti.cos({a()})",
            lambda: f"({a()}) / (1.5 + ({a()}) ** 2)",
            lambda: f"ti.sqrt(1.0 + ({a()}) ** 2)",
            lambda: f"ti.{self.rng.choice(['max', 'min'])}({a()}, {a()})",
            lambda: f"ti.select({self.condition()}, {a()}, {a()})",
            lambda: f"abs({a()})",
            lambda: f"({a()} if {self.condition()} else {a()})",
        ]
        if self.functions:
            options += [lambda: f"{self.rng.choice(self.functions)}({a()}, {a()})"] * 2
        if self.loop.integers:
            options.append(lambda: f"(0.1 * {self.rng.choice(self.loop.integers)[0]} + {a()})")
        return self.rng.choice(options)()

    def condition(self) -> str:
        if self.loop.integers and self.chance(0.5):
            return f"{self.rng.choice(self.loop.integers)[0]} % 2 == {self.rng.randrange(2)}"
        return f"{self.scalar(1)} {self.rng.choice('<>')} {self.leaf()}"

    def vector(self, element: str, depth: int = 1) -> str:
        """A vector or matrix."""
        same = [o for o in self.readable() if o.element == element]
        if same and self.chance(0.45):
            o = self.rng.choice(same)
            o.is_read = True
            text = self.place(o, is_own=self.is_own(o))
        else:
            known = [n for e, n in self.loop.locals + self.vectors if e == element]
            parts = [self.scalar(1) for _ in range(VECTOR_SIZES.get(element, 4))]
            if known and self.chance(0.5):
                text = self.rng.choice(known)
            elif element == "m22":
                text = f"ti.Matrix([[{parts[0]}, {parts[1]}], [{parts[2]}, {parts[3]}]])"
            else:
                text = self.rng.choice([f"ti.Vector([{', '.join(parts)}])", f"tm.vec{len(parts)}({', '.join(parts)})"])
        if depth and self.chance(0.5):
            return f"({text} {self.rng.choice('+-')} {self.scalar(1)} * {self.vector(element, 0)})"
        return text

    def value(self, element: str, depth: int = 2) -> str:
        if element == "f":
            return self.scalar(depth)
        if element in ELEMENTS:
            return self.vector(element)
        return f"{element}({', '.join(f'{m}={self.value(e, 1)}' for m, e in STRUCTS[element].items())})"

    # --- statements

    def member(self, text: str, element: str) -> tuple[str, str]:
        """The entry or a part of it, as something to store to."""
        while element in STRUCTS and self.chance(0.75):
            member, element = self.rng.choice(list(STRUCTS[element].items()))
            text = f"{text}.{member}"
        if element in VECTOR_SIZES and self.chance(0.4):
            return f"{text}[{self.rng.randrange(VECTOR_SIZES[element])}]", "f"
        return text, element

    def store(self, o: Operand) -> None:
        """Change an entry of the iteration's own, or any in a serial loop."""
        o.is_written = True
        own = not self.loop.is_serial or (o.shape == self.loop.shape and self.chance(0.6))
        text, element = self.member(self.place(o, is_own=own), o.element)
        if element in STRUCTS:
            self.emit(f"{text} = {self.value(element)}")
            return
        o.is_read = True
        operator = self.rng.choice(["=", "=", "=", "+=", "+=", "-=", "*="])
        if operator == "*=":
            self.emit(f"{text} *= {self.scalar(1)}")
        elif element == "f" and self.chance(0.15):
            name = self.fresh("t")
            self.emit(f"{name} = ti.atomic_{self.rng.choice(['add', 'max', 'min'])}({text}, {self.scalar(1)})")
            self.loop.locals.append(("f", name))
        else:
            self.emit(f"{text} {operator} {self.value(element)}")

    def add(self, o: Operand) -> None:
        """Add to an entry that iterations share."""
        o.is_written = o.is_read = True
        text, element = self.member(self.place(o, is_own=False), o.element)
        while element in STRUCTS:
            member, element = self.rng.choice(list(STRUCTS[element].items()))
            text = f"{text}.{member}"
        if element == "f" and self.chance(0.2):
            self.emit(f"ti.atomic_{self.rng.choice(['add', 'sub'])}({text}, {self.scalar(1)})")
        else:
            self.emit(f"{text} {self.rng.choice(['+=', '+=', '-='])} {self.value(element, 1)}")

    def statement(self, depth: int = 1) -> None:
        r = self.rng.random()
        targets = self.loop.own
        if r < 0.3 or not (targets or self.loop.sums):
            element = self.rng.choice(["f", "f", "f", "v3", "v2"])
            name = self.fresh("a" if element == "f" else "u")
            self.emit(f"{name} = {self.value(element)}")
            self.loop.locals.append((element, name))
        elif r < 0.42 and depth:
            self.accumulate()
        elif r < 0.54 and depth:
            self.emit(f"if {self.condition()}:")
            with self.block():
                self.statement(0)
            if self.chance(0.4):
                self.emit("else:")
                with self.block():
                    self.statement(0)
        elif r < 0.6 and self.loop.locals:
            element, name = self.rng.choice(self.loop.locals)
            self.emit(f"{name} {self.rng.choice(['=', '+=', '-='])} {self.value(element, 1)}")
        elif targets and (r < 0.85 or not self.loop.sums):
            self.store(self.rng.choice(targets))
        else:
            self.add(self.rng.choice(self.loop.sums))

    def accumulate(self) -> None:
        """A sum over an inner loop."""
        name, j = self.fresh("a"), self.fresh("j")
        count = self.rng.randint(2, 4)
        self.emit(f"{name} = {self.leaf()}")
        self.loop.locals.append(("f", name))
        length = str(count)
        if self.is_wide and self.loop.integers and self.chance(0.5):
            length = f"({self.rng.choice(self.loop.integers)[0]} + {self.rng.randint(0, 2)}) % {count + 1}"
        (text,), [end], tests = self.offsets((j,), (length,), (count,))
        self.emit(f"for {j} in range({end}):")
        with self.block(), self.under(tests):
            self.loop.integers.append((text, count))
            if self.is_wide and self.chance(0.3):
                self.emit(f"if {self.condition()}:")
                self.emit(f"    {self.rng.choice(['break', 'continue'])}")
            if self.chance(0.3):
                self.statement(0)
            self.emit(f"{name} += {self.scalar(2)}")

    def offsets(
        self, names: tuple[str, ...], lengths: tuple[str, ...], counts: tuple[int, ...]
    ) -> tuple[tuple[str, ...], list[str], list[str]]:
        """What loops over so many numbers are written as: the indices, the bounds of the loops, and conditions.

        Some run over more numbers, or begin at others; conditions keep the indices within the containers.
        """
        texts, ends, tests = [], [], []
        for name, length, count in zip(names, lengths, counts, strict=True):
            more = self.rng.randint(1, 4) if length.isdigit() and self.chance(0.25) else 0
            first, before = self.rng.choice([(0, 0), (0, 0), (0, 1), (2, 0), (3, 2)]) if more else (0, 0)
            texts.append(f"({name} - {first})" if first else name)
            start = f"{first - before}, " if first - before else ""
            ends.append(f"{start}{count + first + more}" if more else length)
            tests += [f"{name} >= {first}"] * (before > 0) + [f"{name} < {count + first}"] * (more > 0)
        return tuple(texts), ends, tests

    @contextlib.contextmanager
    def under(self, tests: list[str]) -> Iterator[None]:
        """The statements for which all of these hold."""
        if not tests:
            yield
        elif self.chance(0.25):
            self.emit(f"if not ({' and '.join(tests)}):")
            self.emit("    continue")
            yield
        else:
            self.emit(f"if {' and '.join(tests)}:")
            with self.block():
                yield

    def write_loop(self, shape: tuple[int, ...], own: list[Operand], sums: list[Operand], is_serial: bool) -> None:
        """A loop at the outermost level."""
        names = tuple(self.fresh("i") for _ in shape)
        self.loop = Loop(shape, names, own, [] if is_serial else sums, list(zip(names, shape)), is_serial=is_serial)
        if is_serial:
            self.loop.own = own + sums
            self.emit("ti.loop_config(serialize=True)")
        texts, ends, tests = self.offsets(names, tuple(map(str, shape)), shape)
        header = f"range({ends[0]})"
        if len(shape) > 1:
            header = f"ti.ndrange({', '.join(f'({end})' if ',' in end else end for end in ends)})"
        dense = [o for o in own if o.shape == shape]
        target = ", ".join(names)
        if dense and self.chance(0.4):
            texts, tests = names, []
            header = self.rng.choice(dense).text
            if len(shape) > 1 and self.chance(0.3):
                target, header = f"{names[0]}g", f"ti.grouped({header})"
        self.emit(f"for {target} in {header}:")
        with self.block(), self.under(tests):
            self.loop.indices, self.loop.integers = texts, list(zip(texts, shape, strict=True))
            if target.endswith("g"):
                self.loop.indices = (target,)
                self.loop.integers = [(f"{target}[{k}]", n) for k, n in enumerate(shape)]
            for _ in range(self.rng.randint(0, 2)):
                self.statement()
            for o in own:
                self.store(o) if o in self.loop.own else self.add(o)
            for o in sums:
                self.add(o) if not is_serial else self.store(o)
        self.loop = Loop()

    def write_single(self, o: Operand) -> None:
        """A statement outside of loops."""
        self.loop = Loop(is_serial=True, own=[o])
        self.store(o)
        self.loop = Loop()
