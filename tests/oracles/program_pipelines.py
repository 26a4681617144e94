"""Random pipelines as text: containers, kernels that get views of them, and the Python that launches the kernels.

The text of a program is complete: run as it is, it defines its containers and kernels.  No result depends on the order of
parallel iterations, since a launch never gets views that meet where one of them is written, unless every access is at
the iteration's own index.
"""

import ast
import itertools
import random
import re
from dataclasses import dataclass, field, replace

from program_bodies import Body, Operand
from program_containers import ELEMENTS, STRUCTS, TYPES, Container, View, at_step, views, whole
from program_long_loops import write_long_loops
from program_stores import store_from_python

STRUCT_TEXT = """@ti.dataclass
class Body:
    m: ti.{real}
    u: tm.vec3

    @ti.func
    def energy(self, k):
        return self.m * k + 0.5 * self.u.norm_sqr()


@ti.dataclass
class Pair:
    a: Body
    w: ti.{real}


"""


@dataclass(frozen=True)
class Pipeline:
    """A generated program: ``entry`` is called with the arguments named in ``args``."""

    text: str
    containers: tuple[Container, ...]
    entry: str
    args: tuple[str, ...]  # names of arrays, or numbers
    params: tuple[str, ...]  # leaves or whole containers, or names of kernel arguments
    outputs: tuple[str, ...]  # none where the kernel's return value is the output
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of the arguments of the kernel that is the entry
    real: str = "f64"
    gets_copies: bool = False  # the second call gets copies of the arrays
    has_out: bool = False  # and arrays to fill
    options: dict[str, object] = field(default_factory=dict)
    more_options: dict[str, object] = field(default_factory=dict)  # of a second evaluation


@dataclass
class Kernel:
    """A kernel with the arguments that its launches have to pass."""

    name: str  # as the pipeline calls it
    formals: list[Operand]
    captured: list[Operand]
    numbers: list[str]  # names of the arguments passed by value
    is_serial: bool
    returns: bool = False


class Grammar:
    """Writes one pipeline."""

    has_pieces = True

    def __init__(self, rng: random.Random, real: str, is_wide: bool = False) -> None:
        self.rng = rng
        self.real = real
        self.is_wide = is_wide
        self.lines: list[str] = []
        self.kernels: list[Kernel] = []
        self.written: set[str] = set()
        self.used: set[str] = set()
        self.results: list[str] = []  # numbers that kernels have returned to Python
        self.numbers: list[str] = []  # those that Python has computed of entries and results
        self.draws = random.Random(str(rng.getstate()[1][:8]))  # of what Python computes
        self.steps = 0  # of the Python loop that is being written, 0 outside

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    # --- containers

    def choose_containers(self) -> list[Container]:
        rng = self.rng
        n, k = rng.choice([7, 9, 17] if self.is_wide else [3, 4, 4, 5]), rng.choice([2, 3])
        self.has_arrays = self.chance(0.7)
        kind = lambda: rng.choice(["field", "field", "ndarray"])
        shape = lambda: rng.choice([(n,), (n,), (k, n)])
        layout = lambda: rng.choice(["", "", "", "", "dense", "pointer", "bitmasked"])
        optional = [
            (0.35, lambda: Container("V", kind(), (n,), rng.choice(["v3", "v3", "v2"]))),
            (0.12, lambda: Container("M", kind(), (rng.choice([n, 2]),), "m22")),
            (0.4, lambda: Container("s", "field", (), "f")),
            (0.3, lambda: Container("S", "struct", (n,), rng.choice(list(STRUCTS)))),
            (0.5, lambda: Container("z", kind(), shape(), "f")),
            (0.3, lambda: Container("w", "field", (k, n), "f", layout())),
        ]
        found = [Container("x", "field", shape(), "f", layout()), Container("y", "field", (n,), "f")]
        found += [make() for p, make in optional if self.chance(p)]
        if self.has_arrays:
            array = lambda: rng.choice(["numpy", "numpy", "torch"])
            found.append(Container("B", array(), rng.choice([(k, n), (k, n), (k + 1, n), (n, k), (2, k, n)]), "f"))
            found += [Container("C", array(), rng.choice([(n,), (k * n,), (n + 1,)]), "f")] * self.chance(0.4)
            found += [Container("D", array(), (n,), "v3")] * self.chance(0.15)
            found += [Container("E", "numpy", (k, n), "f", "F")] * self.chance(0.1)
            made = lambda: Container(
                "L", rng.choice(["numpy", "ndarray"]), found[-1].shape, found[-1].element, is_local=True
            )
            found += [made()] * self.chance(0.2)
        is_argument = lambda c: c.is_array and not c.is_local and self.chance(0.75)
        return [replace(c, is_argument=is_argument(c)) for c in found]

    # --- kernels

    def annotation(self, o: Operand) -> str:
        kind = TYPES[o.element].format(real=f"ti.{self.real}")
        return f"ti.types.ndarray(dtype={kind}, ndim={len(o.shape)})"

    def value_type(self, name: str) -> str:
        return "tm.vec3" if name == "u" else f"ti.{self.real}"

    def operand(self, view: View, text: str) -> Operand:
        return Operand(text, view.element, view.shape)

    def write_function(self, name: str) -> None:
        a, b = self.rng.choice([("a * b", "ti.sin(b)"), ("a + 0.5 * b", "a * a"), ("ti.tanh(a)", "a * b")])
        self.lines += ["@ti.func", f"def {name}(a, b):", f"    r = {a}"]
        if self.chance(0.5):
            self.lines += ["    if a > 0.1:", f"        r += {b}"]
        elif self.chance(0.5):
            self.lines += ["    for j in range(2):", f"        r = 0.5 * r + {b}"]
        self.lines += ["    return r", "", ""]

    def write_kernel(self, number: int, self_name: str = "") -> None:
        """A kernel; as a method of an object its containers are attributes of that."""
        rng = self.rng
        formals: list[Operand] = []
        for name in ("a", "b", "c")[: rng.choice([0, 1, 2, 2, 3]) if self.has_arrays else 0]:
            view = rng.choice([v for c in self.containers if c.is_array for v in self.views(c)])
            twin = [o for o in formals if o.element == "f"]
            if twin and self.chance(0.4):
                view = View("", "", twin[0].shape, "f", ())
            formals.append(self.operand(view, name))
        fields = [c for c in self.containers if not c.is_array]
        some = rng.sample(fields, min(len(fields), rng.randint(1 if formals else 2, 3)))
        captured = [self.operand(whole(c), f"{self_name}{c.name}") for c in some]
        numbers = ["p", "q", "u"][: rng.choice([0, 0, 1, 2, 3])]
        operands = formals + captured
        body = Body(rng, operands, numbers[:2] + ["self.rate"] * bool(self_name), self.functions)
        body.vectors = [("v3", "u")] * ("u" in numbers)
        body.is_wide = self.is_wide
        is_serial = self.chance(0.12)
        for _ in range(rng.choice([1, 1, 2])):
            self.write_one_loop(body, operands, is_serial)
        zero = [o for o in captured if not o.shape and o.element == "f"]
        if zero and self.chance(0.3):
            body.write_single(zero[0])
        returns = self.chance(0.15)
        if returns:
            body.emit(f"return {body.scalar(2)}")
        signature = ["self"] * bool(self_name)
        signature += [f"{o.text}: {self.annotation(o)}" for o in formals] + [
            f"{n}: {self.value_type(n)}" for n in numbers
        ]
        indent = "    " * bool(self_name)
        result = f" -> ti.{self.real}" if returns else ""
        head = ["@ti.kernel", f"def k{number}({', '.join(signature)}){result}:"]
        self.lines += [f"{indent}{line}" for line in head + body.lines] + ["", ""]
        for o in captured:
            o.text = o.text.removeprefix("self.")
        name = f"sim.k{number}" if self_name else f"k{number}"
        self.kernels.append(Kernel(name, formals, captured, numbers, is_serial, returns))

    def write_one_loop(self, body: Body, operands: list[Operand], is_serial: bool) -> None:
        shaped = [o for o in operands if o.shape]
        if not shaped:
            body.write_single(operands[0])
            return
        first = self.rng.choice(shaped)
        own = [o for o in operands if o.shape == first.shape and (o is first or self.chance(0.25))]
        others = [o for o in operands if o not in own]
        sums = [o for o in others if self.chance(0.45 if not o.shape else 0.2)]
        body.write_loop(first.shape, own, sums, is_serial)

    # --- launches

    def views(self, c: Container) -> list[View]:
        return views(c, self.steps) if self.has_pieces else [whole(c)]

    def launch(self, kernel: Kernel) -> str | None:
        """A launch with views that may meet only where that has one meaning."""
        arrays = [c for c in self.containers if c.is_array]
        steps = max(self.steps, 1)
        for _ in range(30):
            chosen: list[View] = []
            for o in kernel.formals:
                fitting = [v for c in arrays for v in self.views(c) if (v.shape, v.element) == (o.shape, o.element)]
                if not fitting:
                    return None
                stepping = [v for v in fitting if "[t" in v.text]
                chosen.append(self.rng.choice(stepping if stepping and self.chance(0.7) else fitting))
            if all(self.is_sound(kernel, chosen, t) for t in range(steps)):
                break
        else:
            return None
        for o, view in [*zip(kernel.formals, chosen), *((o, None) for o in kernel.captured)]:
            name = view.root if view else o.text
            self.written |= {name} if o.is_written else set()
            self.used |= {name} if o.is_written or o.is_read else set()
        self.chosen = chosen
        number = lambda: self.rng.choice(["0.4", "1.2", "-0.3"] + ["0.1 * t"] * bool(self.steps))
        numbers = [number() if n != "u" else f"ti.Vector([{number()}, {number()}, 0.7])" for n in kernel.numbers]
        if self.results and numbers and self.chance(0.3):
            numbers[0] = self.rng.choice(self.results)
        elif self.numbers and numbers and self.draws.random() < 0.5:
            numbers[0] = self.draws.choice(self.numbers)
        return f"{kernel.name}({', '.join([v.text for v in chosen] + numbers)})"

    def is_sound(self, kernel: Kernel, chosen: list[View], t: int) -> bool:
        roots = {c.name: c for c in self.containers}
        at = [at_step(roots[v.root], v, t) for v in chosen]
        for (o, v), (p, w) in itertools.combinations(zip(kernel.formals, at, strict=True), 2):
            if not v.meets(w):
                continue
            # two views that share a part are refused, and Taichi takes two arguments for two memories where one is written
            if not v.is_same(w) or o.is_written or p.is_written:
                return False
        return True

    def statement(self) -> list[str]:
        """A line of the pipeline, or a few."""
        r = self.rng.random()
        text = self.launch(self.rng.choice(self.kernels))
        if r < 0.2:
            text = store_from_python(self.rng, self.containers, self.real)
        elif r < 0.26 and text:
            y = next(c for c in self.containers if c.name == "y")
            return [f"if y[{self.rng.randrange(y.shape[0])}] > 0.1:", f"    {text}"]
        return [text] if text else []

    def computed(self) -> list[str]:
        """Lines of Python that compute a number of entries and of earlier numbers, and may store one."""
        draws, fields = self.draws, [c for c in self.containers if not c.is_array and c.kind != "struct"]
        scalars = [c for c in fields if c.element == "f" and c.name in self.used]
        if not scalars:
            return []

        def entry() -> str:
            c = draws.choice(scalars)
            return f"{c.name}[{', '.join(str(draws.randrange(n)) for n in c.shape) if c.shape else 'None'}]"

        known = [*self.results, *self.numbers]
        number = lambda: draws.choice(known) if known and draws.random() < 0.5 else entry()
        a, b = number(), number()
        texts = [
            f"0.5 * {a} - {b}",
            f"{a} * {b} + 0.3",
            f"{a} / (1.5 + {b} * {b})",
            f"math.sin({a})",
            f"math.exp({a}) - {b}",
        ]
        name = f"n{len(self.numbers)}"
        lines = [f"{name} = {draws.choice([*texts, f'{a} if {a} > {b} else {b}', f'math.fabs({a})'])}"]
        self.numbers.append(name)
        if draws.random() < 0.4:
            lines.append(f"{entry()} {draws.choice(['=', '+=', '-='])} {name}")
        return lines

    def write_run(self, args: str) -> None:
        body = [c.definition(self.real) for c in self.containers if c.is_local]
        order = [*self.kernels, self.rng.choice(self.kernels)]
        for kernel in order:
            if self.chance(0.4) and kernel.formals:
                self.steps = self.rng.choice([1, 2, 2])
                text = self.launch(kernel)
                body += [f"for t in range({self.steps}):", f"    {text}"] * bool(text)
                if text and self.chance(0.3):
                    body += [f"    {line}" for line in self.statement()]
                self.steps = 0
            else:
                text = self.launch(kernel)
                if text and kernel.returns and self.chance(0.6):
                    self.results.append(f"r{len(self.results)}")
                    text = f"{self.results[-1]} = {text}"
                body += [text] if text else []
            if self.chance(0.35):
                body += self.statement()
            if self.draws.random() < 0.3:
                body += self.computed()
        if self.chance(0.2):  # through another function
            at = self.rng.randrange(len(body)) if body else 0
            launched = re.match(r"( *)(k\d|sim\.k0)\((.*)\)$", body[at]) if body else None
            if launched:
                indent, name, given = launched.groups()
                self.lines += ["def launch(*given):", f"    {name}(*given)", "", ""]
                body[at] = f"{indent}launch({given})"
        self.lines.append(f"def run({args}):")
        self.lines += [f"    {line}" for line in body or ["pass"]]
        self.lines += ["", ""]

    # --- the whole program

    def program(self) -> Pipeline:
        rng = self.rng
        self.containers = self.choose_containers()
        has_structs = any(c.kind == "struct" for c in self.containers)
        head = STRUCT_TEXT.format(real=self.real) if has_structs else ""
        head += "\n".join(c.definition(self.real) for c in self.containers if not c.is_local) + "\n\n\n"
        self.functions = ["f0"] * self.chance(0.3)
        for name in self.functions:
            self.write_function(name)
        is_object = self.chance(0.2)
        if is_object:
            fields = [c.name for c in self.containers if not c.is_array]
            self.lines += ["@ti.data_oriented", "class Sim:", "    def __init__(self):", "        self.rate = 0.7"]
            self.lines += [f"        self.{name} = {name}" for name in fields] + [""]
            self.write_kernel(0, "self.")
            self.lines += ["sim = Sim()", "", ""]
        for number in range(1, rng.choice([2, 3, 3])):
            self.write_kernel(number)
        kernel = self.kernels[0]
        if self.chance(0.25):
            text = self.launch(kernel)
            if text and not any(v.root == "L" for v in self.chosen):
                return self.single(head, kernel)
        args = [c.name for c in self.containers if c.is_argument]
        self.write_run(", ".join(args))
        return self.finished(head, "run", tuple(args))

    def single(self, head: str, kernel: Kernel) -> Pipeline:
        """A program whose entry is a kernel: parameters and outputs are also arguments by name."""
        rng = self.rng
        args = [v.text for v in self.chosen] + kernel.numbers
        shapes = {o.text: o.shape + ELEMENTS[o.element] for o in kernel.formals}
        shapes |= {n: (3,) if n == "u" else () for n in kernel.numbers}
        plain = self.finished(head, kernel.name, tuple(args))
        roots = {v.root for v in self.chosen}  # the whole of an array is not an argument
        fields = [p for p in plain.params if p not in roots]
        functions = [f for f in ast.walk(ast.parse("\n".join(self.lines))) if isinstance(f, ast.FunctionDef)]
        [own] = [f for f in functions if f.name == kernel.name.removeprefix("sim.")]
        body = "\n".join(map(ast.unparse, own.body))
        named = [n for n in shapes if re.search(rf"(?<![.\w]){n}\b", body) and self.chance(0.6)]
        written = [o.text for o in kernel.formals if o.is_written and self.chance(0.8)]
        outputs = [o for o in plain.outputs if o not in roots] + written
        if kernel.returns and self.chance(0.7):
            outputs = []
        elif not outputs:
            return replace(plain, params=())
        params = [*fields, *named]
        rng.shuffle(params)
        return replace(plain, params=tuple(params), outputs=tuple(outputs), shapes=shapes)

    def finished(self, head: str, entry: str, args: tuple[str, ...]) -> Pipeline:
        rng = self.rng
        leaves = [leaf for c in self.containers if not c.is_local for leaf, _ in c.leaves()]
        known = [leaf for leaf in leaves if leaf.split(".")[0] in self.used]
        written = [leaf for leaf in leaves if leaf.split(".")[0] in self.written]
        params = rng.sample(known, min(len(known), rng.choice([1, 1, 2, 2, 3])))
        if "S" in self.used and self.chance(0.3):
            params = [p for p in params if p[:1] != "S"] + ["S"]
        outputs = rng.sample(written, min(len(written), rng.choice([1, 2, 2, 3])))
        options: dict[str, object] = {}
        more: dict[str, object] = {}
        if self.chance(0.45):
            options["chunk_size"] = rng.choice([1, 2, 3, 4, 5, 7])
        if self.chance(0.15):
            options["max_memory"] = rng.choice([64, 200, 500, 1000])
        if self.chance(0.3):
            more["chunk_size"] = rng.choice([None, 2, 3])
        if self.chance(0.3):
            options["tangents"] = rng.choice(["sparse", "dense"])
        text = head + "\n".join(self.lines)
        return Pipeline(
            text,
            tuple(c for c in self.containers if not c.is_local),
            entry,
            args,
            tuple(params),
            tuple(outputs),
            real=self.real,
            gets_copies=self.chance(0.3),
            has_out=self.chance(0.2),
            options=options,
            more_options=more,
        )


def generate(seed: int, real: str | None = None) -> Pipeline:
    """The pipeline of a seed; seeds that come one after the other have the same precision, if none is given."""
    rng = random.Random(seed)
    real = real or ("f32" if seed // 10 % 3 == 2 else "f64")
    if real == "f32" and rng.random() < 0.5:
        return write_long_loops(rng, Pipeline)
    return some_pipeline(rng, real, is_wide=False)


def generate_wide(seed: int) -> Pipeline:
    """A pipeline with more columns, whose loops may be left early and have lengths that are computed."""
    return some_pipeline(random.Random(seed), "f64", is_wide=True)


def some_pipeline(rng: random.Random, real: str, is_wide: bool) -> Pipeline:
    while True:
        found = Grammar(rng, real, is_wide).program()
        if found.params and (found.outputs or found.shapes):
            return found
