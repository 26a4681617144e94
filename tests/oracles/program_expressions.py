"""Expressions of random programs, with the types, bounds and accesses that they may have where they stand."""

from program_model import MATRICES, SHAPES, VECTORS, Access, Field, Variable
from program_writer import Writer


class Expressions(Writer):
    """Writes expressions."""

    # --- integers

    def integer(self) -> tuple[str, int, int]:
        """An integer expression that is not negative, with its bounds."""
        known = [v for v in self.readable("i") if v.low >= 0]
        if not known or self.chance(0.2):
            n = self.rng.randint(0, 3)
            return str(n), n, n
        v = self.rng.choice(known)
        kind = self.rng.randrange(6)
        if kind == 0:
            return f"({v.name} + 1)", v.low + 1, v.high + 1
        if kind == 1:
            return f"{v.name} * 2", v.low * 2, v.high * 2
        if kind == 2 and len(known) > 1:
            w = self.rng.choice(known)
            return f"({v.name} + {w.name})", v.low + w.low, v.high + w.high
        return v.name, v.low, v.high

    def index(self, size: int) -> str:
        """An index into a dimension."""

        def bare() -> str | None:
            fitting = [v for v in self.readable("i") if v.low >= 0 and v.high < size]
            return self.rng.choice(fitting).name if fitting else None

        def reversed_() -> str | None:
            name = bare()
            return None if name is None else f"{size - 1} - {name}"

        def shifted() -> str | None:
            fitting = [v for v in self.readable("i") if 0 <= v.high - v.low < size]
            if not fitting:
                return None
            v = self.rng.choice(fitting)
            offset = self.rng.randint(-v.low, size - 1 - v.high)
            return f"{v.name} {'-' if offset < 0 else '+'} {abs(offset)}"

        def scaled() -> str | None:
            fitting = [v for v in self.readable("i") if v.low >= 0 and 2 * v.high + 1 < size]
            return f"2 * {self.rng.choice(fitting).name} + {self.rng.randint(0, 1)}" if fitting else None

        def wrapped() -> str:
            text, _, high = self.integer()
            if self.chance(0.2):  # of positive numbers only: Taichi 1.7.4 folds (0 - 1) % 3 into -1
                return f"({text} + {self.rng.randint(1, 5)}) % {size}"
            return text if high < size else f"{text} % {size}"

        def clamped() -> str:
            return f"min({self.integer()[0]}, {size - 1})"

        def looked_up() -> str | None:
            text = self.entry(["i"], "read", high=size)
            return text

        def computed() -> str | None:
            return f"int(abs({self.leaf()}) * 2.7) % {size}" if self.place.depth < 5 else None

        return self.pick(
            (2, lambda: str(self.rng.randrange(size))),
            (6, bare),
            (1, reversed_),
            (1, shifted),
            (1, scaled),
            (2, wrapped),
            (0.5, clamped),
            (1, looked_up),
            (0.4, computed),
        )

    # --- fields

    def entry(self, types: list[str], use: str, high: int = 0, part: str = "whole") -> str | None:
        """``name[index]`` of a field whose entries have one of the types, and which may be used that way here."""
        candidates = []
        for f in self.fields:
            access = self.place.access.get(f.name)
            if access is None or f.type not in types or (high and f.high > high):
                continue
            if (f.access == "whole") != (part == "whole") and f.type in (*VECTORS, *MATRICES):
                continue
            if {"read": access.can_read, "write": access.can_write, "add": access.can_add}[use]:
                candidates.append((f, access))
        if not candidates:
            return None
        f, access = self.rng.choice(candidates)
        return self.entry_of(f, access, use)

    def entry_of(self, f: Field, access: Access, use: str) -> str:
        if access.own and access.own[0] is not None and len(access.own) < len(f.shape):
            return f"{f.name}[{access.own[0]}]"  # an index vector
        indices = []
        for n, size in enumerate(f.shape):
            own = access.own[n] if n < len(access.own) else None
            indices.append(self.index(size) if own is None else own)
        return f"{f.name}[{', '.join(indices) or 'None'}]"

    # --- scalars

    def leaf(self) -> str:
        def local() -> str | None:
            known = self.readable("f")
            return self.rng.choice(known).name if known else None

        def component() -> str | None:
            known = [v for t in (*VECTORS, *MATRICES) for v in self.readable(t)]
            return self.component(self.rng.choice(known)) if known else None

        def from_integer() -> str | None:
            known = self.readable("i")
            return f"0.3 * {self.rng.choice(known).name}" if known else None

        def vector_entry() -> str | None:
            return self.entry_component("read")

        return self.pick(
            (1, self.literal),
            (5, local),
            (5, lambda: self.entry(["f"], "read")),
            (2, component),
            (0.7, from_integer),
            (1.5, vector_entry),
        )

    def component(self, v: Variable) -> str:
        """One entry of a vector or matrix local, as something to read or to store to."""
        n = SHAPES[v.type][0]
        if v.type in MATRICES:
            return f"{v.name}[{self.index(n)}, {self.index(n)}]"
        return f"{v.name}.{self.rng.choice('xyz'[:n])}" if self.chance(0.3) else f"{v.name}[{self.index(n)}]"

    def scalar(self, depth: int) -> str:
        if depth <= 0 or self.chance(0.3):
            return self.leaf()
        e = lambda: self.scalar(depth - 1)

        def reduction() -> str | None:
            kind = self.rng.choice(VECTORS)
            v, w = self.vector(kind, depth - 1), self.vector(kind, depth - 1)
            return self.rng.choice(
                [
                    f"({v}).dot({w})",
                    f"tm.dot({v}, {w})",
                    f"({v} + 2.5).norm()",
                    f"({v}).norm_sqr()",
                    f"({v}).sum()",
                    f"tm.length({v} + 3.0)",
                    f"tm.distance({v}, {w} + 4.0)",
                    f"({v}).max()",
                    f"({v}).min()",
                    f"({v})[{self.index(SHAPES[kind][0])}]",
                    f"({v}).x",
                ]
            )

        def of_matrix() -> str | None:
            kind = self.rng.choice(MATRICES)
            m = self.matrix(kind, depth - 1)
            return self.rng.choice([f"({m}).trace()", f"({m}).determinant()", f"({m})[0, 1]", f"({m}).sum()"])

        return self.pick(
            (5, lambda: f"({e()} + {e()})"),
            (4, lambda: f"({e()} - {e()})"),
            (6, lambda: f"{e()} * {e()}"),
            (1, lambda: f"-{self.leaf()}"),
            (1.5, lambda: f"{e()} / (1.5 + {self.square(depth)})"),
            (1, lambda: f"({e()}) ** {self.rng.choice(['2', '3', '2.0'])}"),
            (0.5, lambda: f"(1.2 + {self.square(depth)}) ** {self.rng.choice(['1.5', '-0.7', '-2', self.leaf()])}"),
            (4, lambda: f"{self.rng.choice(['ti.sin', 'ti.cos', 'ti.tanh', 'tm.sin'])}({e()})"),
            (1, lambda: f"ti.exp(0.4 * ti.sin({e()}))"),
            (1, lambda: f"{self.rng.choice(['ti.log', 'ti.sqrt', 'ti.rsqrt', 'tm.log2'])}(1.3 + {self.square(depth)})"),
            (0.7, lambda: f"{self.rng.choice(['ti.asin', 'ti.acos', 'ti.tan'])}(0.8 * ti.sin({e()}))"),
            (0.5, lambda: f"ti.atan2({e()}, 1.4 + {self.square(depth)})"),
            (1.5, lambda: f"{self.rng.choice(['abs', 'ti.abs'])}({e()})"),
            (2, lambda: f"{self.rng.choice(['ti.max', 'ti.min', 'max', 'min'])}({e()}, {e()})"),
            (0.4, lambda: f"max({e()}, {e()}, {self.literal()})"),
            (0.7, lambda: f"tm.clamp({e()}, -0.6, {self.literal()})"),
            (0.7, lambda: f"({e()}) % {self.rng.choice(['1.3', f'(1.5 + {self.square(depth)})'])}"),
            (0.4, lambda: f"{self.rng.choice(['ti.floor', 'ti.ceil', 'ti.round', 'tm.fract', 'tm.sign'])}({e()})"),
            (0.5, lambda: f"tm.mix({e()}, {e()}, {e()})"),
            (0.3, lambda: f"tm.smoothstep(-1.1, 1.3, {e()})"),
            (1, lambda: f"ti.select({self.condition(1)}, {e()}, {e()})"),
            (2, lambda: f"({e()} if {self.condition(1)} else {e()})"),
            (0.3, lambda: f"float({self.integer()[0]}) * {e()}"),
            (0.3, lambda: f"ti.cast({self.leaf()} > {self.literal()}, ti.f64) * {e()}"),
            (2, reduction),
            (0.7, of_matrix),
            (2, lambda: self.call(["f"], depth)),
        )

    def square(self, depth: int) -> str:
        text = self.leaf() if depth < 2 else f"({self.scalar(depth - 2)})"
        return f"{text} * {text}" if self.chance(0.5) else f"{text} ** 2"

    def condition(self, depth: int) -> str:
        def of_integers() -> str | None:
            if not self.readable("i"):
                return None
            text, low, high = self.integer()
            if self.chance(0.5):
                return f"{text} % 2 == {self.rng.randint(0, 1)}"
            return f"{text} {self.rng.choice(['<', '>=', '==', '!='])} {self.rng.randint(low, high)}"

        compared = self.rng.choice(["<", ">", "<=", ">="])
        return self.pick(
            (4, lambda: f"{self.leaf()} {compared} {self.leaf()}"),
            (2, lambda: f"{self.scalar(depth)} {compared} {self.literal()}"),
            (3, of_integers),
            (0.7, lambda: f"-0.7 < {self.leaf()} < {self.literal()}"),
            (0.7, lambda: f"not {self.leaf()} > {self.literal()}"),
            (1, lambda: f"{self.leaf()} < {self.literal()} {self.rng.choice(['and', 'or'])} {self.leaf()} > 0.1"),
            (0.5, lambda: f"({self.leaf()} < {self.literal()}) {self.rng.choice('&|')} ({self.leaf()} > 0.1)"),
        )

    # --- vectors and matrices

    def known(self, type: str) -> str | None:
        """A local or an entry of that type."""
        locals_ = [v.name for v in self.readable(type)]
        text = self.entry([type], "read") if not locals_ or self.chance(0.4) else None
        return text or (self.rng.choice(locals_) if locals_ else None)

    def vector(self, type: str, depth: int) -> str:
        n = SHAPES[type][0]
        e = lambda: self.scalar(depth - 1)
        v = lambda: self.vector(type, depth - 1)
        m = lambda: self.matrix(f"m{n}{n}", depth - 1)

        def built() -> str:
            parts = ", ".join(e() for _ in range(n))
            return self.rng.choice([f"ti.Vector([{parts}])", f"tm.vec{n}({parts})"])

        if depth <= 0:
            return self.pick((6, lambda: self.known(type)), (1, lambda: f"tm.vec{n}({self.leaf()})"), (1, built))

        def swizzled() -> str:
            source = self.rng.choice(VECTORS)
            letters = "".join(self.rng.choice("xyz"[: int(source[1])]) for _ in range(n))
            return f"({self.vector(source, depth - 1)}).{letters}"

        return self.pick(
            (3, lambda: self.known(type)),
            (3, built),
            (3, lambda: f"({v()} {self.rng.choice('+-')} {v()})"),
            (2, lambda: f"({v()} * {self.leaf()})"),
            (1, lambda: f"({self.leaf()} * {v()})"),
            (1, lambda: f"({v()} * {v()})"),
            (0.5, lambda: f"(-{self.known(type)})" if self.known(type) else None),
            (0.7, lambda: f"({v()} / (1.5 + {self.square(1)}))"),
            (0.7, lambda: f"{self.rng.choice(['ti.sin', 'ti.cos', 'ti.tanh', 'ti.exp', 'ti.abs'])}({v()})"),
            (0.7, lambda: f"{self.rng.choice(['ti.max', 'ti.min', 'max'])}({v()}, {v()})"),
            (0.3, lambda: f"ti.max({v()}, {self.leaf()})"),
            (0.3, lambda: f"tm.clamp({v()}, -0.5, {self.literal()})"),
            (0.7, lambda: f"({v()} + 2.5).normalized()"),
            (0.3, lambda: f"tm.normalize({v()} + 3.0)"),
            (0.3, lambda: f"tm.mix({v()}, {v()}, {self.leaf()})"),
            (0.3, lambda: f"tm.reflect({v()}, {v()})"),
            (0.3, lambda: f"({v()}) ** 2"),
            (0.7, lambda: f"({v()}).cross({v()})" if n == 3 else None),
            (0.3, lambda: f"tm.cross({v()}, {v()})" if n == 3 else None),
            (0.5, lambda: f"tm.vec3({self.vector('v2', depth - 1)}, {e()})" if n == 3 else None),
            (1, lambda: f"({m()} @ {v()})"),
            (1.5, swizzled),
            (0.5, lambda: f"ti.select({self.condition(1)}, {v()}, {v()})"),
            (1, lambda: f"({v()} if {self.condition(1)} else {v()})"),
            (1, lambda: self.call([type], depth)),
        )

    def matrix(self, type: str, depth: int) -> str:
        n = SHAPES[type][0]

        def built() -> str:
            rows = [", ".join(self.leaf() for _ in range(n)) for _ in range(n)]
            return f"ti.Matrix([{', '.join(f'[{r}]' for r in rows)}])"

        if depth <= 0:
            return self.pick((4, lambda: self.known(type)), (1, built))
        m = lambda: self.matrix(type, depth - 1)
        v = lambda: self.vector(f"v{n}", depth - 1)
        return self.pick(
            (3, lambda: self.known(type)),
            (2, built),
            (2, lambda: f"({m()} {self.rng.choice('+-')} {m()})"),
            (1, lambda: f"({m()} * {self.leaf()})"),
            (1, lambda: f"({m()} @ {m()})"),
            (1, lambda: f"({m()}).transpose()"),
            (1, lambda: f"({v()}).outer_product({v()})"),
            (0.5, lambda: f"(0.1 * ti.sin({m()}) + ti.Matrix.identity(ti.f64, {n})).inverse()"),
            (0.5, lambda: f"tm.mat{n}({', '.join(self.leaf() for _ in range(n * n))})"),
        )

    def value(self, type: str, depth: int) -> str:
        if type == "f":
            return self.scalar(depth)
        if type == "s":
            return self.struct(depth)
        return self.vector(type, depth) if type in VECTORS else self.matrix(type, min(depth, 2))

    def struct(self, depth: int) -> str:
        def built() -> str:
            p, q = self.scalar(depth - 1), self.vector("v3", depth - 1)
            return self.rng.choice([f"S({p}, {q})", f"S(p={p}, q={q})"])

        return self.pick((2, built), (1, lambda: self.known("s")), (1, lambda: self.call(["s"], depth)))

    # --- functions

    def call(self, results: list[str], depth: int, as_statement: bool = False) -> str | None:
        """A call of a function with these results; one that changes its arguments only as a whole statement."""
        fitting = [
            f
            for f in self.functions
            if f.results == results
            and not (f.has_loop and (self.place.is_root or self.place.trips > 20))
            and (as_statement or all(kind == "value" for _, kind in f.parameters))
        ]
        if not fitting:
            return None
        function = self.rng.choice(fitting)
        args: list[str] = []
        for type, kind in function.parameters:
            if kind == "reference":
                names = [
                    v.name for v in self.writable(type) if v.is_readable and v.name not in args and v.name.isalnum()
                ]
                if not names:
                    return None
                args.append(self.rng.choice(names))
            elif kind == "entry":
                found = self.own_entry()
                if found is None:
                    return None
                args += found
            else:
                args.append(self.integer()[0] if type == "i" else self.value(type, min(depth - 1, 1)))
        return f"{function.name}({', '.join(args)})"

    def own_entry(self) -> list[str] | None:
        """A one-dimensional field of scalars that may be read and written here, and an index."""
        fitting = [f for f in self.fields if f.type == "f" and len(f.shape) == 1 and not f.is_array]
        fitting = [f for f in fitting if f.name in self.place.access]
        fitting = [f for f in fitting if self.place.access[f.name].can_read and self.place.access[f.name].can_write]
        if not fitting:
            return None
        f = self.rng.choice(fitting)
        text = self.entry_of(f, self.place.access[f.name], "write")
        return [f.name, text[len(f.name) + 1 : -1]]

    def entry_component(self, use: str) -> str | None:
        type = self.rng.choice([*VECTORS, "m22"])
        text = self.entry([type], use, part="component")
        if text is None:
            return None
        numbers = [str(self.rng.randrange(2)) for _ in SHAPES[type]]
        if next(f for f in self.fields if f.name == text.split("[")[0]).access == "indexed":
            fitting = [v.name for v in self.readable("i") if v.low >= 0 and v.high < 2]
            if not fitting:
                return None
            numbers = [self.rng.choice(fitting) for _ in numbers]
        elif type in VECTORS and self.chance(0.4):
            return f"{text}.{self.rng.choice('xyz'[: int(type[1])])}"
        return f"{text}[{', '.join(numbers)}]"
