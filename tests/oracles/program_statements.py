"""Statements of random programs.

The iterations of a parallel loop do not meet: in such a loop a field is read only, or written at an entry of the
iteration's own, or added to and not read; a local from outside it is read only, or added to and not read.
"""

from collections.abc import Callable
from dataclasses import replace

from program_guards import Guards
from program_model import MATRICES, VECTORS, Access, Field, Variable, locals_of


class Statements(Guards):
    """Writes statements, with the blocks that belong to them."""

    main_size: int
    has_structs: bool
    serial_share = 0.12  # of the loops of the outermost level

    def declare(self, type: str, low: int = 0, high: int = 0) -> str:
        """A new local, to be assigned by the statement that asks for it."""
        name = self.fresh(type)
        self.pending = (self.place, Variable(name, type, low, high))
        return name

    def settle(self) -> None:
        """The local asked for last exists from here on."""
        place, variable = self.pending
        place.scopes[-1] += locals_of(variable)

    def statements(self, count: int) -> None:
        for _ in range(count):
            self.statement()

    def statement(self) -> None:
        if self.budget <= 0:
            self.simple()
            return
        self.budget -= 1
        deep = self.place.depth >= 5
        kinds: list[tuple[float, Callable[[], None]]] = [
            (7, self.simple),
            (0 if deep else 3, self.branch),
            (0 if deep or self.place.trips > 40 else 3, self.loop),
            (0 if deep or self.place.trips > 40 else 0.8, self.while_loop),
            (0.7 if self.place.can_break or self.place.can_continue else 0, self.leave_loop),
        ]
        self.rng.choices([k for _, k in kinds], [w for w, _ in kinds])[0]()

    def simple(self) -> None:
        """A statement without a block."""
        self.emit(
            self.pick(
                (5, self.new_local),
                (5, self.assign_local),
                (4, self.update_local),
                (3, self.assign_component),
                (5, self.assign_entry),
                (4, self.add_to_entry),
                (2, self.update_entry),
                (1.5, self.unpack),
                (0.5, self.chain),
                (0.7, self.swap),
                (1, self.atomic),
                (1.5, self.call_statement),
                (1, self.integer_statement),
            )
        )

    def random_type(self) -> str:
        return self.rng.choice(["f", "f", "f", "f", "v2", "v3", "v3", "m22", "m33", *["s", "s"] * self.has_structs])

    def new_local(self) -> str:
        type = self.random_type()
        value = self.value(type, 3)
        if type == "f" and self.chance(0.3):
            value = self.rng.choice(["0.0", self.literal()])
        text = f"{self.declare(type)} = {value}"
        self.settle()
        return text

    def some_local(self, type: str | None = None) -> Variable | None:
        types = ["f", *VECTORS, *MATRICES, "s"] if type is None else [type]
        known = [v for t in types for v in self.writable(t)]
        return self.rng.choice(known) if known else None

    def assign_local(self) -> str | None:
        v = self.some_local()
        return None if v is None else f"{v.name} = {self.value(v.type, 3)}"

    def update_local(self) -> str | None:
        sums = [v for scope in self.place.scopes for v in scope if v.is_sum]
        if sums and self.chance(0.5):
            v = self.rng.choice(sums)
            return f"{v.name} {self.rng.choice(['+=', '-='])} {self.value(v.type, 2)}"
        v = self.some_local()
        if v is None or v.type == "s":
            return None
        if v.type not in MATRICES and self.chance(0.35):
            factor = f"(0.6 + 0.3 * ti.sin({self.scalar(1)}))"
            return f"{v.name} {self.rng.choice(['*=', '/='])} {factor}"
        return f"{v.name} {self.rng.choice(['+=', '-='])} {self.value(v.type, 2)}"

    def assign_component(self) -> str | None:
        v = self.some_local(self.rng.choice([*VECTORS, *VECTORS, *MATRICES]))
        if v is None:
            return None
        if v.type in VECTORS and self.chance(0.2):
            letters = "".join(self.rng.sample("xyz"[: int(v.type[1])], 2))
            return f"{v.name}.{letters} = {self.vector('v2', 2)}"
        operator = self.rng.choice(["=", "=", "+=", "-=", "*="])
        return f"{self.component(v)} {operator} {self.scalar(1 if operator == '*=' else 2)}"

    def any_entry(self, use: str) -> tuple[str, str] | None:
        """An entry of a random type, or a component of one, with its type."""
        if self.chance(0.2):
            text = self.entry_component(use)
            return None if text is None else (text, "f")
        type = self.rng.choice(["f", "f", "f", "v2", "v3", "m22"])
        text = self.entry([type], use)
        return None if text is None else (text, type)

    def assign_entry(self) -> str | None:
        found = self.any_entry("write")
        return None if found is None else f"{found[0]} = {self.value(found[1], 3)}"

    def add_to_entry(self) -> str | None:
        found = self.any_entry("add")
        return None if found is None else f"{found[0]} {self.rng.choice(['+=', '+=', '-='])} {self.value(found[1], 3)}"

    def update_entry(self) -> str | None:
        found = self.any_entry("write")
        if found is None or found[1] in MATRICES:
            return None
        return f"{found[0]} {self.rng.choice(['*=', '/='])} (0.7 + 0.2 * ti.cos({self.scalar(1)}))"

    def unpack(self) -> str | None:
        results = self.rng.choice([["f", "f"], ["f", "v3"], ["v2", "f", "f"]])
        value = self.call(results, 2, as_statement=True) if self.chance(0.7) else None
        value = value or ", ".join(self.value(t, 2) for t in results)
        names, new = [], []
        for type in results:
            v = self.some_local(type)
            if v is not None and v.name not in names and self.chance(0.5):
                names.append(v.name)
            else:
                name = self.fresh(type)
                if name in names:
                    return None
                names.append(name)
                new.append(Variable(name, type))
        self.place.scopes[-1] += new
        return f"{', '.join(names)} = {value}"

    def chain(self) -> str | None:
        v, entry = self.some_local("f"), self.entry(["f"], "write")
        if v is None:
            return None
        if entry is None:
            value = self.scalar(2)
            name = self.declare("f")
            self.settle()
            return f"{name} = {v.name} = {value}"
        return f"{v.name} = {entry} = {self.scalar(2)}"

    def swap(self) -> str | None:
        type = self.rng.choice(["f", "f", "v3"])
        names = [v.name for v in self.writable(type) if v.is_readable]
        if len(names) < 2:
            return None
        a, b = self.rng.sample(names, 2)
        return f"{a}, {b} = {b}, {self.rng.choice([a, f'{a} * 0.5 + {b}'])}"

    def atomic(self) -> str | None:
        """An atomic operation; its result is used where the order of the iterations does not matter."""
        if self.chance(0.3):
            entry = self.entry(["f"], "add")
            return None if entry is None else f"ti.atomic_{self.rng.choice(['add', 'sub'])}({entry}, {self.scalar(2)})"
        local = self.some_local("f") if self.chance(0.3) else None
        target = self.entry(["f"], "write") if local is None else local.name
        if target is None or (local is not None and not (local.is_readable and target.isalnum())):
            return None
        text = f"ti.atomic_{self.rng.choice(['add', 'sub', 'max', 'min'])}({target}, {self.scalar(2)})"
        if self.chance(0.4):
            return text
        text = f"{self.declare('f')} = {text}"
        self.settle()
        return text

    def call_statement(self) -> str | None:
        return self.call([], 2, as_statement=True)

    def integer_statement(self) -> str | None:
        entry = self.entry(["i"], "write", high=4) if self.chance(0.3) else None
        if entry is not None:
            return f"{entry} = {self.integer()[0]} % 2"
        mutable = self.writable("i")
        text = self.integer()[0]
        if mutable and self.chance(0.5):
            v = self.rng.choice(mutable)
            return f"{v.name} = {text} % {v.high + 1}"
        bound = self.rng.randint(2, 5)
        computed = f"int(abs({self.scalar(1)}) * 3.1) % {bound}" if self.chance(0.3) else f"{text} % {bound}"
        text = f"{self.declare('i', 0, bound - 1)} = {computed}"
        self.settle()
        return text

    def body(self) -> None:
        self.statements(self.rng.choice([1, 1, 2, 2]))
        if self.chance(0.8):
            self.use_locals()

    def use_locals(self) -> None:
        """Let the locals of this block reach something that outlives it."""
        own = [v for v in self.place.scopes[-1] if v.is_readable and v.type not in "is"]
        if not own:
            return
        terms = [self.as_scalar(v) for v in self.rng.sample(own, min(len(own), 3))]
        outer = [v for scope in self.place.scopes[:-1] for v in scope if v.type == "f" and (v.is_writable or v.is_sum)]
        if outer and self.chance(0.5):
            v = self.rng.choice(outer)
            operator = "+=" if v.is_sum or not v.is_readable else self.rng.choice(["=", "+=", "-="])
            self.emit(f"{v.name} {operator} {' + '.join(terms)}")
            return
        found = self.any_entry("add")
        if found is not None and found[1] == "f":
            self.emit(f"{found[0]} += {' + '.join(terms)}")

    def as_scalar(self, v: Variable) -> str:
        if v.type == "f":
            return v.name
        return f"{v.name}.sum()" if self.chance(0.5) else self.component(v)

    def branch(self) -> None:
        if self.chance(0.15) and self.guarded_offset():
            return
        is_static = self.chance(0.06)
        self.emit(f"if ti.static({self.rng.choice(['2 > 1', '1 > 2'])}):" if is_static else f"if {self.condition(2)}:")
        with self.block(is_root=is_static and self.place.is_root):
            self.body()
        if not is_static and self.chance(0.3):
            self.emit(f"elif {self.condition(1)}:")
            with self.block():
                self.body()
        if self.chance(0.4):
            self.emit("else:")
            with self.block(is_root=is_static and self.place.is_root):
                self.body()

    def loop(self) -> None:
        if self.place.is_root:
            self.root_loop()
            return
        name = self.fresh("i")
        if self.chance(0.15):
            n = self.rng.randint(2, 3)
            self.emit(f"for {name} in ti.static(range({n})):")
            with self.block(
                Variable(name, "i", 0, n - 1, is_writable=False, is_static=True),
                trips=n,
                can_break=False,
                can_continue=False,
            ):
                self.body()
            return
        if self.chance(0.15):
            a, b = self.rng.randint(1, 3), self.rng.randint(2, 3)
            variables, narrow = self.ndrange(name, a, b)
            with self.block(*variables, trips=a * b, can_break=False, can_continue=False):
                with self.within(variables, narrow):
                    self.body()
            return
        text, low, high = self.range_text(6)
        text, first, last = self.padded(text, low, high)
        self.emit(f"for {name} in range({text}):")
        wide = Variable(name, "i", first, last, is_writable=False)
        with self.block(wide, trips=max(last - first + 1, 1), can_break=True, can_continue=True):
            with self.within([wide], [replace(wide, low=low, high=high)]):
                self.body()

    def range_text(self, longest: int) -> tuple[str, int, int]:
        """The bounds of a loop, and those of its variable."""
        bounds = [v for v in self.readable("i") if 0 <= v.low and 1 <= v.high <= longest]
        if bounds and self.chance(0.35):
            v = self.rng.choice(bounds)
            if self.chance(0.3):
                return f"{v.name}, {v.name} + 2", v.low, v.high + 1
            return v.name, 0, v.high - 1
        if self.chance(0.2):
            low = self.rng.randint(1, 2)
            high = low + self.rng.randint(1, max(longest - 2, 1))
            return f"{low}, {high}", low, high - 1
        n = self.rng.choice([n for n in (1, 2, 3, self.main_size, self.main_size) if n <= max(longest, 2)] or [2])
        return str(n), 0, n - 1

    def while_loop(self) -> None:
        name, n = self.fresh("i"), self.rng.randint(2, 4)
        first = self.rng.choice([0, 0, 0, -2])
        self.emit(f"{name} = {first}")
        wide = Variable(name, "i", first, n, is_writable=False)
        self.place.scopes[-1].append(wide)
        narrow = replace(wide, low=0, high=self.rng.randint(1, n)) if first or self.chance(0.3) else wide
        extra = f" and ({self.condition(1)})" if self.chance(0.4) else ""
        is_open = not extra and self.chance(0.2)
        self.emit("while True:" if is_open else f"while {name} < {n}{extra}:")
        with self.block(trips=n, can_break=True, can_continue=True):
            self.emit(f"{name} += 1")
            if is_open:
                self.emit(f"if {name} > {n - 1}:")
                self.emit("    break")
            with self.within([wide], [narrow]):
                self.body()

    def leave_loop(self) -> None:
        words = ["break"] * self.place.can_break + ["continue"] * self.place.can_continue
        self.emit(f"if {self.condition(1)}:")
        with self.block():
            if self.chance(0.4):
                self.simple()
            self.emit(self.rng.choice(words))

    # --- loops of the outermost level, which run in parallel

    def root_loop(self) -> None:
        if self.chance(self.serial_share):
            self.emit("ti.loop_config(serialize=True)")
            text, low, high = self.range_text(self.main_size)
            text, first, last = self.padded(text, low, high)
            name = self.fresh("i")
            self.emit(f"for {name} in range({text}):")
            wide = Variable(name, "i", first, last, is_writable=False)
            with self.block(wide, trips=max(last - first + 1, 1), can_continue=True):
                with self.within([wide], [replace(wide, low=low, high=high)]):
                    self.body()
            return
        variables, narrow, own = self.root_header()
        access = {f.name: self.root_access(f, narrow, own) for f in self.fields}
        trips = 1
        for v in variables:
            trips *= v.high - v.low + 1
        outer = [self.as_seen_in_parallel(v) for scope in self.place.scopes for v in scope]
        extra = {"access": access, "trips": max(trips, 1), "can_continue": True}
        with self.block(*variables, **extra):  # type: ignore[arg-type]
            self.place.scopes = [outer, self.place.scopes[-1]]
            with self.within(variables, narrow):
                self.statements(self.rng.randint(1, 3))
                self.use_locals()
                if self.chance(0.5):
                    self.emit(self.pick((1, self.assign_entry), (1, self.add_to_entry), (0.1, lambda: "pass")))

    def as_seen_in_parallel(self, v: Variable) -> Variable:
        """A local of the outermost level inside a parallel loop: read only, or a sum that is not read."""
        if v.is_writable and v.type in ("f", *VECTORS) and self.chance(0.25):
            return Variable(v.name, v.type, is_readable=False, is_writable=False, is_sum=True)
        return Variable(v.name, v.type, v.low, v.high, v.is_readable, is_writable=False)

    def root_header(self) -> tuple[list[Variable], list[Variable], Callable[[Field], tuple[str | None, ...] | None]]:
        """The first line of a parallel loop.

        Returns its variables; those with the bounds that conditions give them; what indices are an iteration's own in a field.
        """
        kind = self.rng.random()
        name = self.fresh("i")
        if kind < 0.15:
            a, b = self.rng.randint(2, 3), self.rng.randint(2, 4)
            variables, narrow = self.ndrange(name, a, b)
            other = name + "b"

            def own(f: Field) -> tuple[str | None, ...] | None:
                if len(f.shape) == 2 and f.shape[0] >= a and f.shape[1] >= b:
                    return (name, other)
                if len(f.shape) == 2 and f.shape[0] >= b and f.shape[1] >= a:
                    return (other, name)
                return (f"{name} * {b} + {other}",) if len(f.shape) == 1 and f.shape[0] >= a * b else None

            return variables, narrow, own
        tables = [f for f in self.fields if len(f.shape) == 2 and not f.is_array]
        if kind < 0.3 and tables:
            table = self.rng.choice(tables)
            if self.chance(0.5):
                self.emit(f"for {name} in ti.grouped({table.name}):")
                parts = [Variable(f"{name}[{d}]", "i", 0, n - 1, is_writable=False) for d, n in enumerate(table.shape)]
                return parts, parts, lambda f: (name,) if f.shape == table.shape else None
            other = name + "b"
            self.emit(f"for {name}, {other} in {table.name}:")
            a, b = table.shape
            variables = [
                Variable(name, "i", 0, a - 1, is_writable=False),
                Variable(other, "i", 0, b - 1, is_writable=False),
            ]
            return variables, variables, lambda f: (name, other) if f.shape == table.shape else None
        lists = [f for f in self.fields if len(f.shape) == 1 and not f.is_array]
        if kind < 0.42 and lists:
            table = self.rng.choice(lists)
            self.emit(f"for {name} in {table.name}:")
            low, high = 0, table.shape[0] - 1
            first, last = low, self.rng.randint(0, high) if self.chance(0.2) else high
            first, last, low, high = low, high, first, last
        else:
            text, low, high = self.range_text(self.main_size)
            text, first, last = self.padded(text, low, high)
            self.emit(f"for {name} in range({text}):")
        wide = Variable(name, "i", first, last, is_writable=False)
        return [wide], [replace(wide, low=low, high=high)], lambda f: self.own_index(f, name, low, high)

    def own_index(self, f: Field, name: str, low: int, high: int) -> tuple[str | None, ...] | None:
        dims = [d for d, size in enumerate(f.shape) if size > high - low]
        if not dims:
            return None
        d = self.rng.choice(dims)
        size = f.shape[d]
        forms = ([name] * 5 + [f"{size - 1} - {name}"]) * (high < size) + [f"{name} - {low}"] * (low > 0)
        forms += [f"{name} + 1"] * (high + 1 < size) + [f"2 * {name}"] * (2 * high < size)
        own: list[str | None] = [None] * len(f.shape)
        own[d] = self.rng.choice(forms)
        return tuple(own)

    def root_access(
        self, f: Field, variables: list[Variable], own: Callable[[Field], tuple[str | None, ...] | None]
    ) -> Access:
        if f.name in self.constants:
            return Access(True, False, False)
        prescribed = own(f)
        kind = self.rng.random()
        if prescribed is not None and kind < 0.6:
            return Access(own=prescribed)
        if kind < 0.8 and f.type != "i":
            return Access(False, False, True)
        return Access(True, False, False)
