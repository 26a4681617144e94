"""Random float32 pipelines with loops long enough to run in lanes, and with loops that read what those wrote.

Iterations differ in index and data, not in the branch they take where a value decides: with tens of thousands of entries
some would lie on a kink.
"""

import random
from typing import Any

from program_containers import Container

LENGTHS = (16384, 16400, 32768, 33001)  # from 32 * 512 iterations on, two threads get whole stretches


class LongLoops:
    """Writes the kernels of one pipeline."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.lines: list[str] = []
        self.names = 0
        self.count = rng.choice(LENGTHS)
        self.columns = rng.randint(1, 5)
        self.locals: list[str] = []
        self.ready: list[str] = []  # long containers that have been written
        self.small: list[str] = []  # the others that have

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def containers(self) -> tuple[Container, ...]:
        rng = self.rng
        kind = lambda: rng.choice(["field", "field", "field", "ndarray", "numpy"])
        self.element = {"y": "f", "z": "f", "V": rng.choice(["v3", "v2"])}
        found = [
            Container("p", "field", (self.columns,), "f"),
            Container("c", "field", (self.count,), "f"),
            Container("y", kind(), (self.count,), "f"),
            Container("z", kind(), (self.count,), "f"),
            Container("V", "field", (self.count,), self.element["V"]),
            Container("s", "field", (), "f"),
            Container("m", "field", (), "f"),
            Container("t", "field", (5,), "f"),
        ]
        self.arrays = [c.name for c in found if c.is_array]
        return tuple(found)

    # --- expressions

    def leaf(self) -> str:
        rng = self.rng
        options = [
            f"{rng.randint(1, 19) / 10:.1f}",
            "c[i]",
            "c[i]",
            *(f"p[{k}]" for k in range(self.columns)),
            "0.0001 * i",
        ]
        options += [f"p[{rng.randrange(self.columns)}]", *self.locals]
        if self.chance(0.1):
            options += ["s[None]"]
        return rng.choice(options)

    def read(self, name: str) -> str:
        """An entry of a long container, that of the iteration."""
        return f"{name}[i][{self.rng.randrange(2)}]" if name == "V" else f"{name}[i]"

    def scalar(self, depth: int) -> str:
        rng = self.rng
        if depth == 0 or self.chance(0.1):
            return self.read(rng.choice(self.ready)) if self.ready and self.chance(0.25) else self.leaf()
        a, b = self.scalar(depth - 1), self.scalar(depth - 1)
        options = [f"({a} {rng.choice('+-**')} {b})"] * 6
        options += [f"ti.sqrt(1.0 + ({a}) * ({a}))", f"({a}) / (2.0 + ({b}) * ({b}))", f"ti.max({a}, {b} - 90.0)"]
        options += [
            f"(abs({a} + 30.0) - 30.0)",
            f"ti.select(i % {rng.randint(2, 4)} == 0, {a}, {b})",
            f"ti.min({b}, {a} + 90.0)",
        ]
        options += [f"ti.select(i < {self.count // 3}, {a}, {b})", f"({a} if i % 3 == 1 else {b})"]
        if self.chance(0.15):
            options = [f"ti.sin({a})", f"ti.exp(-0.1 * ({a}) * ({a}))"]
        return rng.choice(options)

    # --- loops

    def header(self, name: str) -> str:
        self.locals = []
        return f"    for i in {self.rng.choice([f'range({self.count})', name])}:"

    def local(self) -> list[str]:
        self.names += 1
        name = f"a{self.names}"
        line = f"        {name} = {self.scalar(2)}"
        self.locals.append(name)
        return [line]

    def long_loop(self) -> list[str]:
        """A loop that writes long containers."""
        names = self.rng.sample(["y", "z", "V"], self.rng.choice([1, 1, 2]))
        lines = [self.header(names[0])]
        hidden, self.ready = self.ready, [n for n in self.ready if n not in names or self.chance(0.2)]
        for _ in range(self.rng.randint(0, 2)):
            lines += self.local()
        for name in names:
            value = self.scalar(3)
            if name == "V":
                value = f"ti.Vector([{', '.join(self.scalar(2) for _ in range(int(self.element['V'][1])))}])"
            operator = "+=" if self.chance(0.12) else "="
            if self.chance(0.15) and name != "V":
                lines += ["        if i % 3 == 0:", f"            {name}[i] {operator} {value}", "        else:"]
                lines += [f"            {name}[i] = {self.scalar(2)}"]
            else:
                lines.append(f"        {name}[i] {operator} {value}")
        self.ready = sorted({*hidden, *names})
        return lines

    def reading_loop(self) -> list[str]:
        """A loop that sums up, looks for the least, or picks entries."""
        name = self.rng.choice(self.ready or ["y"])
        kind = self.rng.choice(["sum", "sum", "least", "pick", "single"])
        weight = f"{1 / self.count:.8f}"
        if kind == "sum":
            self.small.append("s")
            lines = [self.header(name)]
            lines += self.local() if self.chance(0.3) else []
            term = f"{weight} * ({self.read(name)} * {self.leaf()})"
            free = [line.replace("s[None]", "p[0]") for line in (*lines, term)]  # of the order of iterations
            return [*free[:-1], f"        s[None] += {free[-1]}"]
        if kind == "least":
            self.small.append("m")
            lines = [self.header(name)]
            return [*lines, f"        ti.atomic_{self.rng.choice(['min', 'max'])}(m[None], {self.read(name)} + c[i])"]
        self.small.append("t")
        self.locals = []
        far = f"{name}[{self.count - 1} - i * 3]" + "[1]" * (name == "V")
        near = f"{name}[i * 7]" + "[0]" * (name == "V")
        if kind == "pick":
            return ["    for i in range(5):", f"        t[i] = {near} * p[0] + {far}"]
        return [f"    t[2] += {far.replace('i', '4')} * p[0]"]

    def kernel(self, number: int) -> None:
        body: list[str] = []
        for _ in range(self.rng.choice([1, 2, 2])):
            body += self.long_loop() if self.chance(0.5) or not self.ready else self.reading_loop()
        text = "\n".join(body)
        used = [name for name in self.arrays if f"{name}[" in text or f"in {name}:" in text]
        formals = ", ".join(f"{name}: ti.types.ndarray(dtype=ti.f32, ndim=1)" for name in used)
        self.lines += ["@ti.kernel", f"def k{number}({formals}):", *body, "", ""]
        self.launches.append(f"    k{number}({', '.join(used)})")

    def between(self) -> str:
        """Something that Python does between launches."""
        options = ["m[None] = 50.0", "s[None] = 0.0", "c.fill(0.3)", "p[0] = 0.4", "t.fill(0.2)"]
        for name in ("y", "z"):
            options += [f"{name}[{self.rng.randrange(self.count)}] = 0.7", f"{name}.fill(0.6)"]
        return f"    {self.rng.choice(options)}"

    def program(self, make: Any) -> Any:
        containers = self.containers()
        self.launches: list[str] = []
        for number in range(self.rng.choice([1, 2, 2, 3])):
            self.kernel(number)
            if self.chance(0.2):
                self.launches.append(self.between())
        if self.chance(0.15):
            self.launches.append(self.launches[0])
        self.lines += ["def run():", *self.launches, ""]
        text = "\n".join([*(c.definition("f32") for c in containers), "", "", *self.lines])
        params = (
            ["p"] + ["t"] * ("t" in self.small and self.chance(0.3)) + ["s"] * ("s" in self.small and self.chance(0.3))
        )
        known = sorted({*self.ready, *self.small})
        outputs = self.rng.sample(known, min(len(known), self.rng.choice([1, 2, 2, 3])))
        options: dict[str, object] = {"chunk_size": self.rng.choice([1, 2, 3])} if self.chance(0.2) else {}
        if self.chance(0.3):
            options["tangents"] = self.rng.choice(["sparse", "dense"])
        return make(text, containers, "run", (), tuple(params), tuple(outputs), real="f32", options=options)


def write_long_loops(rng: random.Random, make: Any) -> Any:
    """A pipeline with long loops; ``make`` is the class of pipelines."""
    return LongLoops(rng).program(make)
