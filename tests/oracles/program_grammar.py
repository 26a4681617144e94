"""Random Taichi programs as text, from a grammar that only knows programs with one meaning.

A program is one or more kernels, the functions they call, and perhaps a ``run()`` that launches them.  Types, bounds of
integers and the fields that may be touched are kept while the text grows, so that indices stay in range and the result
does not depend on the order of parallel iterations.
"""

import ast
import random
from dataclasses import replace

import program_model as model
from program_model import ANNOTATIONS, VECTORS, Access, Argument, Field, Function, Place, Program, Variable, locals_of
from program_statements import Statements


class Grammar(Statements):
    """Writes one program."""

    # --- functions

    def write_function(self, number: int) -> None:
        name = f"f{number}"
        self.closed = {}
        parameters: list[tuple[str, str]] = []
        texts, variables = [], []
        access = {
            f.name: Access(True, False, False) for f in self.fields if f.name in self.constants and not f.is_array
        }
        is_real = self.chance(0.15)
        structs = ["s", "s"] if self.has_structs and not is_real else []
        for n in range(self.rng.randint(1, 3)):
            type = self.rng.choice(["f", "f", "f", "v2", "v3", "i", "m22", *structs])
            kind = "reference" if type != "i" and not is_real and self.chance(0.2) else "value"
            low = 0 if type == "i" else -1
            parameters.append((type, kind))
            variables += locals_of(Variable(f"p{n}", type, low, 20, is_writable=type != "i" and not is_real))
            annotation = f": {ANNOTATIONS[type]}" if is_real or (type != "s" and self.chance(0.3)) else ""
            texts.append(f"p{n}: ti.template()" if kind == "reference" else f"p{n}{annotation}")
        if self.chance(0.2) and not is_real:
            parameters.append(("f", "entry"))
            texts += ["table: ti.template()", "at: ti.i32"]
        results = self.rng.choice(
            [["f"], ["f"], ["v2"], ["v3"], ["f", "f"], ["f", "v3"], ["v2", "f", "f"], *[["s"] for _ in structs]]
        )
        if any(kind != "value" for _, kind in parameters) and self.chance(0.5):
            results = []
        if is_real:
            self.write_real_function(name, parameters, texts, variables, access)
            return
        self.emit("@ti.func")
        self.emit(f"def {name}({', '.join(texts)}):")
        self.place = Place([variables], access, False, trips=4)
        start = len(self.lines)
        with self.block():
            if parameters[-1][1] == "entry":
                self.emit(f"{self.declare('f')} = table[at] * {self.leaf()}")
                self.emit(f"table[at] {self.rng.choice(['=', '+=', '*='])} {self.scalar(1)}")
            self.statements(self.rng.randint(1, 3))
            if results:
                self.emit(f"return {', '.join(self.value(t, 2) for t in results)}")
        has_loop = any("for " in line or "while " in line for line in self.lines[start:])
        has_loop = has_loop or any(
            f.has_loop and f"{f.name}(" in line for f in self.functions for line in self.lines[start:]
        )
        self.functions.append(Function(name, parameters, results, has_loop))

    def write_real_function(
        self,
        name: str,
        parameters: list[tuple[str, str]],
        texts: list[str],
        variables: list[Variable],
        access: dict[str, Access],
    ) -> None:
        """A function that Taichi compiles as one, and that may return early."""
        result = self.rng.choice(["f", "v3"])
        self.emit("@ti.real_func")
        self.emit(f"def {name}({', '.join(texts)}) -> {ANNOTATIONS[result]}:")
        self.place = Place([variables], access, False, trips=4)
        with self.block():
            if self.chance(0.4):
                self.emit(f"if {self.condition(1)}:")
                with self.block():
                    self.emit(f"return {self.value(result, 1)}")
            self.statements(self.rng.randint(1, 2))
            if self.chance(0.4):
                i = self.fresh("i")
                self.emit(f"for {i} in range(3):")
                with self.block(Variable(i, "i", 0, 2, is_writable=False), trips=3, can_break=True, can_continue=True):
                    self.statement()
                    self.emit(f"if {self.condition(1)}:")
                    with self.block():
                        self.emit(f"return {self.value(result, 1)}")
            self.emit(f"return {self.value(result, 2)}")
        self.functions.append(Function(name, parameters, [result], False))

    # --- the whole program

    def program(self) -> Program:
        rng = self.rng
        self.is_dense = self.chance(0.5)  # one loop with a few locals on which everything depends
        self.main_size = rng.choice([3, 5, 6, 8] if self.is_dense else [2, 3, 5, 5, 6, 8, 8, 17, 40])
        columns = rng.choice([1, 2, 3, 4, 5, 6, 8, 8, 12, 12, 30, 50])
        self.fields = self.choose_fields(columns)
        mutable = (
            {"y", "w", "z", "s", "g", "n"}
            | ({"x"} if self.chance(0.3) else set())
            | ({"v"} if self.chance(0.3) else set())
        )
        self.constants = {f.name for f in self.fields if f.name not in mutable}
        self.has_structs = self.chance(0.2)
        if self.has_structs:
            self.emit(model.STRUCT)
        for number in range(rng.choice([0, 0, 0, 1] if self.is_dense else [0, 0, 1, 2, 3])):
            self.budget = 3
            self.write_function(number)
        count = 1 if self.is_dense else rng.choice([1, 1, 1, 2, 3])
        is_alone = count == 1 and self.chance(0.6)
        self.args = self.choose_arguments(is_alone)
        returns = is_alone and self.chance(0.2)
        for number in range(count):
            self.write_kernel(number, number == count - 1, returns)
        if not is_alone:
            self.write_run(count)
        read, stored = used_names("\n".join(self.lines))
        by_value = [
            a.name for a in self.args if isinstance(a, Argument) and a.type != "i" and is_alone and self.chance(0.7)
        ]
        params = ["x"] + [f for f in ("v", "g") if f in read and self.chance(0.5)] + by_value
        written = [f.name for f in self.fields if f.name in stored and f.type != "i" and f.name != "y"]
        outputs = ["y", *rng.sample(written, min(len(written), rng.randint(0, 3)))]
        rng.shuffle(params)
        entry = "k0" if is_alone else "run"
        return Program(
            "\n".join(self.lines) + "\n", self.fields, self.args, tuple(params), tuple(outputs), returns, entry
        )

    def choose_arguments(self, is_alone: bool) -> tuple[Argument | Field, ...]:
        share = 0.5 if self.chance(0.25) else 0.0
        numbers = [Argument(f"a_{t}", t) for t in ("f", "v3", "i") if self.chance(share)]
        args = [*numbers, *(f for f in self.fields if f.is_array)]
        self.rng.shuffle(args)
        return tuple(args)

    def choose_fields(self, columns: int) -> tuple[Field, ...]:
        rng = self.rng
        small = rng.randint(2, 4)
        style = lambda: rng.choice(["whole", "component", "indexed"])
        fields = [Field("x", "f", rng.choice([(columns,), (columns,), (columns,), (2, max(columns // 2, 1))]))]
        fields.append(Field("y", "f", rng.choice([(self.main_size,), (self.main_size,), (3, small)])))
        optional = [
            Field("z", "f", rng.choice([(self.main_size,), (small, 3), (2 * self.main_size,)])),
            Field("s", "f", ()),
            Field("w", rng.choice(VECTORS), rng.choice([(self.main_size,), (2, small)]), access=style()),
            Field("v", rng.choice(VECTORS), (rng.randint(1, 4),), access=style()),
            Field("g", "m22", (rng.randint(1, 3),), access=style()),
            Field("c", "f", (rng.randint(2, 5),)),
            Field("n", "i", (rng.randint(1, 4),), high=rng.randint(2, 4)),
        ]
        fields += [f for f in optional if self.chance(0.12 if self.is_dense else 0.55)]
        share = 0.4 if self.chance(0.2) else 0.0
        return tuple(replace(f, is_array=f.shape != () and self.chance(share)) for f in fields)

    def write_kernel(self, number: int, is_last: bool, returns: bool) -> None:
        self.closed = {}
        self.budget = self.rng.randint(2, 11 if number == 0 and is_last else 5)
        access = {}
        for f in self.fields:
            access[f.name] = Access(True, False, False) if f.name in self.constants else Access()
        given = [Variable(a.name, a.type, 1, 3, is_writable=False) for a in self.args if isinstance(a, Argument)]
        self.place = Place([given], access)
        result = self.rng.choice(["f", "f", "v3"])
        self.emit("@ti.kernel")
        signature = ", ".join(f"{a.name}: {a.annotation}" for a in self.args)
        self.emit(f"def k{number}({signature}){f' -> {ANNOTATIONS[result]}' if returns else ''}:")
        with self.block(is_root=True, depth=0):
            for _ in range(0 if self.is_dense else self.rng.randint(1, 2)):
                self.loop() if self.chance(0.55) else self.statement()
            self.use_locals()
            if is_last:
                self.write_last_loop()
            if returns:
                self.emit(f"return {self.value(result, 2)} * {self.entry_of(self.fields[0], Access(), 'read')}")

    def write_last_loop(self) -> None:
        """A statement that makes y depend on x in every program."""
        y, x = self.fields[1], self.fields[0]
        name = self.fresh("i")
        self.emit(f"for {name} in range({y.shape[0]}):")
        own = (name, None)[: len(y.shape)]
        access = {f.name: Access(True, False, False) for f in self.fields}
        access["y"] = Access(own=own)
        access["x"] = Access(True, False, False)
        outer = [self.as_seen_in_parallel(v) for scope in self.place.scopes for v in scope]
        with self.block(Variable(name, "i", 0, y.shape[0] - 1, is_writable=False), access=access, trips=y.shape[0]):
            self.place.scopes = [outer, self.place.scopes[-1]]
            for _ in range(self.rng.randint(2, 3) if self.is_dense else 0):
                self.emit(self.new_local())
            self.body()
            if self.is_dense:
                self.statements(self.rng.randint(1, 3))
            target = self.entry_of(y, access["y"], "write")
            source = self.entry_of(x, access["x"], "read")
            self.emit(f"{target} {self.rng.choice(['=', '+=', '+='])} {source} * {self.scalar(2)}")
            for v in self.place.scopes[-1] if self.is_dense else []:
                if v.is_readable and v.type not in "is":
                    self.emit(f"{target} += {self.as_scalar(v)}")

    def write_run(self, count: int) -> None:
        """The function that launches the kernels."""
        names = ", ".join(a.name for a in self.args)
        self.emit(f"def run({names}):")
        self.indent += 1
        for number in range(count):
            if self.chance(0.25):
                self.emit("for step in range(2):")
                self.emit(f"    k{number}({names})")
            else:
                self.emit(f"k{number}({names})")
            if number < count - 1 and self.chance(0.25):
                self.write_between()
        self.indent -= 1

    def write_between(self) -> None:
        """Something that Python does to a field between two kernels."""
        touched = [f for f in self.fields if f.name in ("y", "z", "s", "w") and not f.is_array]
        if not touched:
            return
        f = self.rng.choice(touched)
        twins = [t for t in touched if t.shape == f.shape and t.type == f.type and t is not f]
        if twins and self.chance(0.5):
            self.emit(f"{f.name}.copy_from({self.rng.choice(twins).name})")
        elif f.type == "f" and f.shape and self.chance(0.5):
            self.emit(f"{f.name}[{', '.join('0' * len(f.shape))}] = 0.4")
        else:
            self.emit(f"{f.name}.fill(0.3)")


def used_names(text: str) -> tuple[set[str], set[str]]:
    """The names that are subscripted in kernels and in the functions they call: those read, and those written."""
    functions = {f.name: f for f in ast.parse(text).body if isinstance(f, ast.FunctionDef)}
    reached = [f for f in functions.values() if f.name.startswith("k")]
    read: set[str] = set()
    written: set[str] = set()
    for function in reached:
        for node in ast.walk(function):
            if isinstance(node, ast.Call):
                called = functions.get(ast.unparse(node.func))
                if called is not None and called not in reached:
                    reached.append(called)
                names = {a.id for a in node.args if isinstance(a, ast.Name)}
                read, written = read | names, written | names
                if ast.unparse(node.func).startswith("ti.atomic_"):
                    written.add(ast.unparse(node.args[0]).split("[")[0])
            elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
                is_store = isinstance(node.ctx, ast.Store)
                (written if is_store else read).add(node.value.id)
            if isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, ast.Store):
                written.add(ast.unparse(node).split("[")[0].split(".")[0])
    return read, written


def generate(seed: int) -> Program:
    """The program of a seed."""
    return Grammar(random.Random(seed)).program()
