"""Whole numbers of all types next to numbers with tangents: what wraps in a plain run wraps in the same place.

Values are compared bit by bit with those of the plain kernel. The real expressions are linear in each parameter, so
that differences over any step are the derivative; whole numbers are taken from the ends of their ranges.
"""

import contextlib
import importlib.util
import random

import numpy as np
import pytest
import taichi as ti
from differences import outputs, scalars
from kernel_texts import kernel_of
from numpy.testing import assert_allclose, assert_array_equal
from taichi_program import end_program, initialise

from taichi_ext import jacobian
from taichi_ext.analysis.affine import Affine, IntegerForms
from taichi_ext.program import F64, I32, TYPES, U8, U32, Const, Local, Op, Read
from taichi_ext.simplify.pipeline import tidied

pytestmark = pytest.mark.cpu_only("compares bits")
KINDS = ("u8", "i8", "u16", "i16", "i32", "u32", "i64", "u64")
N = 6
SEEDS = range(8)


@pytest.fixture(scope="module", autouse=True)
def strict():
    initialise(default_fp=ti.f64, fast_math=False)
    yield
    end_program()


@contextlib.contextmanager
def other_types():
    """A program whose whole numbers have 64 bits."""
    initialise(default_fp=ti.f64, default_ip=ti.i64)
    try:
        yield
    finally:
        initialise(default_fp=ti.f64, fast_math=False)


def dtype_of(kind):
    return np.dtype(kind.replace("u", "uint") if kind[0] == "u" else kind.replace("i", "int"))


def filled(kind, values):
    field = ti.field(getattr(ti, kind), len(values))
    field.from_numpy(np.array(values, np.uint8 if kind == "u1" else dtype_of(kind)))
    return field


@pytest.mark.mostly_sweep("reverse")
@pytest.mark.parametrize("options", [{}, {"mode": "reverse"}, {"format": "csr"}], ids=["forward", "reverse", "csr"])
def test_variables_of_ndrange_have_the_type_of_its_bounds(options):
    """Products that wrap in 32 bits, and not in 64."""
    x, y, n = scalars([1.5, 2.5, -3.0]), outputs(2), filled("i64", [3])

    @ti.kernel
    def k():
        for i in y:
            y[i] = 0.0
            for a, b in ti.ndrange((0, 1), n[0]):
                y[i] += x[b] * ti.cast((b + a + i + 1) * 100000 * 100000 % 7, ti.f64)

    J = jacobian(k, x, y, **options)
    expected = [[(b + i + 1) * 10**10 % 7 for b in range(3)] for i in range(2)]
    assert_array_equal(J.toarray() if "format" in options else J, expected)


@pytest.mark.mostly_sweep("forward", "reverse")
@pytest.mark.parametrize("options", [{}, {"mode": "reverse"}, {"format": "csr"}], ids=["forward", "reverse", "csr"])
def test_variables_of_parallel_loops_have_the_type_of_their_bounds(options):
    """Which the package runs as loops over ranges of 32 bits."""
    X = np.linspace(0.5, 1.5, 15)
    x, y, n = scalars(X), outputs(15), filled("i64", [0, 3])

    @ti.kernel
    def k():
        for a in ti.ndrange((ti.i64(0), ti.i64(15))):
            y[a] = x[a] * ti.cast((a + 1) * 100000 * 100000 % 7, ti.f64)
        for a, b in ti.ndrange((n[0], n[1]), (0, 5)):
            y[a * 5 + b] += 2.0 * x[a * 5 + b] * ti.cast((a + 1) * 100000 * 100000 * (b + 1) % 7, ti.f64)

    J = jacobian(k, x, y, **options)
    slopes = [(i + 1) * 10**10 % 7 + 2.0 * ((i // 5 + 1) * 10**10 * (i % 5 + 1) % 7) for i in range(15)]
    assert_array_equal(J.toarray() if "format" in options else J, np.diag(slopes))
    assert_allclose(y.to_numpy(), slopes * X, rtol=1e-14)


@pytest.mark.mostly_sweep("forward")
@pytest.mark.parametrize("options", [{}, {"mode": "reverse"}, {"format": "csr"}], ids=["forward", "reverse", "csr"])
def test_tangents_by_indices_of_64_bits(options):
    """With ``default_ip=ti.i64``, variables of ``ti.ndrange`` have 64 bits; local arrays take indices of 32."""
    with other_types():
        x, y = scalars([0.2, 0.4, 0.7, 1.1]), outputs(4)

        @ti.kernel
        def k():
            for i in y:
                total, weights = 0.0, 0.0
                for a, b in ti.ndrange((0, 2), (0, 2)):
                    w = ti.exp(-((x[i] - x[2 * a + b]) ** 2))
                    total += w * x[2 * a + b]
                    weights += w
                y[i] = total / weights

        J = jacobian(k, x, y, **options)
        at, h = x.to_numpy(), 1e-6
        columns = []
        for step in h * np.eye(4):
            ends = []
            for moved in (at + step, at - step):
                x.from_numpy(moved)
                k()
                ends.append(y.to_numpy())
            columns.append((ends[0] - ends[1]) / (2 * h))
        assert_allclose(J.toarray() if "format" in options else J, np.transpose(columns), atol=1e-9)


@pytest.mark.mostly_sweep(every=2)
@pytest.mark.parametrize(
    ("kind", "values", "want"),
    [
        ("u8", [1, 2, 0, 255], [255, 254, 0, 1]),
        ("u32", [1, 2, 0, 4294967295], [4294967295, 4294967294, 0, 1]),
        ("i8", [1, -128, 127, 0], [-1, -128, -127, 0]),
        ("i32", [1, -2147483648, 2147483647, 0], [-1, -2147483648, -2147483647, 0]),
        ("u1", [1, 0, 1, 0], [1, 0, 1, 0]),
    ],
)
def test_a_negation_wraps_before_it_is_multiplied(kind, values, want):
    x, y, z, n = scalars([1.5, 2.5, -3.0, 4.0]), outputs(4), outputs(4), filled(kind, values)
    k = kernel_of("for i in range(4): y[i] = x[i] * (-n[i]); z[i] = (-n[i]) + x[i]", y=y, x=x, n=n, z=z)
    J = jacobian(k, x, [y, z])
    assert_array_equal(J[0], np.diag(np.array(want, float)))
    assert_array_equal(y.to_numpy(), x.to_numpy() * want)
    assert_array_equal(z.to_numpy(), x.to_numpy() + want)
    assert_array_equal(J[1], np.eye(4))


def test_a_product_that_overflows_keeps_its_sign():
    x, y, n = scalars([1.5, 2.5]), outputs(4), filled("i32", [1073741824, 3])
    k = kernel_of("for i in range(2): y[i] = x[i] + (-2 * n[i]); y[i + 2] = x[i] * (-2 * n[i] * n[i])", y=y, x=x, n=n)
    J = jacobian(k, x, y)
    assert_array_equal(y.to_numpy(), [1.5 - 2147483648, 2.5 - 6, 0, -2.5 * 18])
    assert_array_equal(J, [[1, 0], [0, 1], [0, 0], [0, -18]])


def test_an_index_wraps_in_its_own_type():
    x, y, u = scalars([1.0, 2.0, 3.0, 4.0]), outputs(3), filled("u8", [255, 0, 1])

    @ti.kernel
    def k():
        for i in range(3):
            first = u[i] + ti.u8(1)
            far = i * 65536 * 65536 + i  # i, as 2**32 wraps to 0
            y[i] = x[first] * 2 + x[far] + x[(i + 2147483647) - 2147483647]

    J = jacobian(k, x, y)
    want = np.zeros((3, 4))
    for i, first in enumerate([0, 1, 2]):
        want[i, first] += 2
        want[i, i] += 2
    assert_array_equal(J, want)
    assert_array_equal(y.to_numpy(), want @ [1.0, 2.0, 3.0, 4.0])


@pytest.mark.mostly_sweep("%")
@pytest.mark.parametrize("operator", ["%", "//"])
def test_quotients_of_bytes_may_be_out_of_range(operator):
    """Taichi computes others than Python: the index 200 % 6 is 194, which has no column."""
    x, y, n = scalars(np.arange(1.0, 7.0)), outputs(6), filled("i32", [0] * 6)
    u, text = filled("u8", [200, 3, 77, 250, 7, 12]), f"u[i] {operator} ti.u8({6 if operator == '%' else 40})"
    index = kernel_of(f"for i in range(6): n[i] = ti.cast({text}, ti.i32)", n=n, u=u)
    k = kernel_of(f"for i in range(6): y[i] += x[{text}] * x[i]", y=y, x=x, u=u)
    index()
    J = jacobian(k, x, y, format="csr")
    assert all(0 <= c < 6 for c in J.indices)
    want, found = np.zeros((6, 6)), n.to_numpy()
    for i, c in enumerate(found):
        if 0 <= c < 6:
            want[i, c] += i + 1
            want[i, i] += c + 1
    inside = (found >= 0) & (found < 6)
    for J in (J.toarray(), jacobian(k, x, y), jacobian(k, x, y, mode="reverse")):
        assert_array_equal(J[inside], want[inside])


def test_an_atomic_sum_is_converted_first():
    x, y = scalars([0.1, 1e-8, 0.3]), ti.field(ti.f32, 2)

    def run(launch):
        y.fill(1.0)
        launch()
        return y.to_numpy()

    k = kernel_of("for i in range(3): old = ti.atomic_add(y[0], x[i] + 5e-9); y[1] += old", y=y, x=x)
    assert_array_equal(run(lambda: jacobian(k, x, y)), run(k))


# --- the rewritings by themselves


def entry(kind):
    return Read(Local("n", TYPES[kind]))


def test_signs_of_whole_numbers_stay():
    x = entry("f64")
    for kind in (*KINDS, "u1"):
        n = entry(kind)
        for inner in (Op("neg", (n,), n.dtype), Op("mul", (Const(-2, n.dtype), n), n.dtype)):
            for name in ("add", "sub", "mul"):
                for args in ((x, inner), (inner, x)):
                    value = Op(name, args, F64)
                    assert tidied(value) is value
    made = tidied(Op("add", (x, Op("neg", (entry("f32"),), TYPES["f32"])), F64))
    assert isinstance(made, Op)
    assert made.name == "sub"  # a change of sign is exact in any real type


def test_the_least_number_has_no_opposite():
    x, least = entry("f64"), Const(-(2**31), I32)
    value = Op("add", (x, Op("mul", (least, x), F64)), F64)
    assert tidied(value) is value


def test_constants_are_rounded_to_their_own_type_first():
    value = Op("add", (Const(0.1, TYPES["f32"]), Const(0.1, F64)), F64)
    assert tidied(value) is value
    made = tidied(Op("mul", (Const(3, I32), Const(0.1, F64)), F64))
    assert isinstance(made, Const)
    assert made.value == 3 * 0.1


def test_normal_forms_wrap():
    n = Local("n", I32)
    factor = Op("mul", (Op("mul", (Read(n), Const(65536, I32)), I32), Const(65536, I32)), I32)
    indices = IntegerForms(())
    assert indices.form(factor) == Affine()
    assert indices.form(Op("add", (factor, Read(n)), I32)) == Affine(((n, 1),))
    assert indices.form(Op("add", (Read(Local("u", U8)), Const(1, U8)), U8)) is None
    assert indices.form(Op("sub", (Read(Local("u", U32)), Const(1, I32)), U32)) is None


@pytest.mark.mostly_sweep("u8--1-255", "i8-128--128", "u1-2-1")
@pytest.mark.parametrize(
    ("kind", "number", "want"), [("u8", -1, 255), ("i8", 128, -128), ("u1", 2, 1), ("i32", 2**31, -(2**31))]
)
def test_types_wrap(kind, number, want):
    assert TYPES[kind].wrapped(number) == want


# --- random programs


class Writer:
    """Expressions of whole numbers of all types, and real ones that are linear in each parameter."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.locals = []

    def pick(self, *options):
        return self.random.choice(options)

    def leaf(self):
        fields = [f"{kind}[i]" for kind in KINDS] * 2
        literals = ["0", "1", "2", "3", "-1", "-2", "7", "255", "65536", "2147483000"]
        typed = [f"ti.{self.pick(*KINDS)}({self.pick(1, 2, 3, 100)})"] * 4
        return self.pick(
            *fields, "u1[i]", "u1[i]", "i", *literals[: self.random.randrange(1, 11)], *typed, *self.locals
        )

    def whole(self, depth):
        if depth <= 0:
            return self.leaf()
        a, b = self.whole(depth - 1), self.whole(depth - 1)
        typed = f"ti.cast({a}, ti.{self.pick(*KINDS)})"
        return self.pick(
            *(f"({a} {operator} {b})" for operator in ("+", "-", "*", "&", "|", "^")),
            *(f"({a} {operator} {self.pick(2, 3, 'ti.u8(3)', 'ti.i64(5)')})" for operator in ("//", "%")),
            *(f"({typed} {operator} {self.pick(1, 2, 7)})" for operator in ("<<", ">>")),
            *(f"(-{a})", f"(-{a})", f"(~{a})", typed, f"abs(ti.cast({a}, ti.i64))"),
            f"{self.pick('min', 'max')}(ti.cast({a}, ti.{self.pick(*KINDS[2:])}), {b})",  # Taichi has none of u8
            f"ti.select({self.truth(depth - 1)}, {a}, {b})",
            f"({a} if {self.truth(depth - 1)} else {b})",
            f"({a} {self.pick('+', '-')} {self.pick(1, 0, 2)} {self.pick('+', '-')} {self.pick(1, 2)})",
            f"({a} * {self.pick(2, -1, 1, 16)} * {self.pick(3, -1, 1, 65536)})",
            f"(-{self.pick(1, 2, 3)} * {a})",
        )

    def truth(self, depth):
        a = f"({self.whole(depth)} {self.pick('<', '<=', '>', '==', '!=')} {self.whole(depth)})"
        return self.pick(
            a, a, f"(not {a})", f"({a} {self.pick('and', 'or')} {self.truth(depth - 1)})" if depth > 0 else a
        )

    def factor(self):
        return self.pick("0.5", "f[i]", "2.0", "ti.f32(0.1)", "ti.f64(0.1)", *(self.whole(2) for _ in range(9)))

    def real(self, depth, parameters):
        if depth <= 0 or not parameters:
            return self.pick(*parameters) if parameters else self.factor()
        a, half = self.real(depth - 1, parameters), len(parameters) // 2
        return self.pick(
            f"({a} {self.pick('+', '-')} {self.real(depth - 1, parameters)})",
            *(f"({a} {operator} {self.factor()})" for operator in ("+", "-", "*")),
            *(f"({self.factor()} {operator} {a})" for operator in ("+", "-", "*")),
            f"(-{a})",
            f"({self.real(depth - 1, parameters[:half])} * {self.real(depth - 1, parameters[half:])})",
            f"({a} / {self.pick(2, 4.0, 'ti.u8(3)', '(abs(f[i]) + 1)')})",
            f"({a} if {self.truth(1)} else {self.real(depth - 1, parameters)})",
        )

    def program(self):
        given = ", ".join(("x", "xf", "y", "yf", "f", "u1", *KINDS, *(f"n_{kind}" for kind in KINDS)))
        lines = [f"def make({given}):", "    @ti.kernel", "    def k():", f"        for i in range({N}):"]
        for n in range(self.random.randrange(1, 4)):
            body = [f"t{n} = {self.whole(2)}"]
            self.locals.append(f"t{n}")
            body.append(f"{self.pick(*self.locals)} {self.pick('+=', '-=', '*=', '&=', '=')} {self.whole(1)}")
            body += [
                f"if {self.truth(1)}:",
                f"    {self.pick(*self.locals)} {self.pick('+=', '-=', '=')} {self.whole(1)}",
            ]
            lines += [" " * 12 + line for line in body]
        parameters = ["x[0]", "x[1]", "xf[0]", "x[2]", "xf[1]", "x[3]"]
        lines.append(f"{' ' * 12}y[i] = {self.real(4, parameters)}")
        lines.append(f"{' ' * 12}yf[i] {self.pick('=', '+=', '-=')} {self.real(3, parameters)}")
        lines.append(f"{' ' * 12}y[i] += 0.5 * x[0] - xf[1]")  # each parameter is read
        for kind in self.random.sample(KINDS, 3):
            lines.append(f"{' ' * 12}n_{kind}[i] {self.pick('=', '+=')} {self.whole(2)}")
        return "\n".join(["import taichi as ti", "", *lines, "    return k", ""])


class Fields:
    """The fields that a program uses."""

    def __init__(self):
        kinds = {
            **{k: k for k in KINDS},
            **{f"n_{k}": k for k in KINDS},
            "u1": "u1",
            "f": "f32",
            "y": "f64",
            "yf": "f32",
        }
        self.all = {name: ti.field(getattr(ti, kind), N) for name, kind in kinds.items()}
        self.all |= {"x": ti.field(ti.f64, 4), "xf": ti.field(ti.f32, 2)}

    def reset(self, seed):
        rng = np.random.default_rng(seed)
        for kind in KINDS:
            limits = np.iinfo(dtype_of(kind))
            ends = [0, 1, 2, 7, limits.max, limits.min, limits.max - 1, limits.min + 1, limits.max // 2 + 1]
            for name in (kind, f"n_{kind}"):
                values = [ends[n] for n in rng.integers(len(ends), size=N)]
                self.all[name].from_numpy(np.array(values, dtype_of(kind)))
        self.all["u1"].from_numpy(rng.integers(0, 2, N).astype(np.uint8))
        self.all["f"].from_numpy(rng.integers(-8, 9, N).astype(np.float32) / 4)
        for name, size, kind in (
            ("x", 4, np.float64),
            ("xf", 2, np.float32),
            ("y", N, np.float64),
            ("yf", N, np.float32),
        ):
            self.all[name].from_numpy(rng.integers(-16, 17, size).astype(kind) / 8)

    def stored(self):
        return {name: self.all[name].to_numpy() for name in ("y", "yf", *(f"n_{kind}" for kind in KINDS))}


def difference(k, fields, seed, name, n):
    """How the outputs vary with one parameter, and how large they are."""
    ends = []
    for step in (0.25, -0.25):
        fields.reset(seed)
        fields.all[name][n] += step
        k()
        ends.append([fields.all[o].to_numpy().astype(float) for o in ("y", "yf")])
    return [((a - b) / 0.5, np.abs(a) + np.abs(b)) for a, b in zip(*ends, strict=True)]


@pytest.mark.sweep
@pytest.mark.parametrize("seed", SEEDS)
def test_random_programs(seed, tmp_path):
    path = tmp_path / f"program_{seed}.py"
    path.write_text(Writer(seed).program())
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    fields = Fields()
    names = module.make.__code__.co_varnames[: module.make.__code__.co_argcount]
    k = module.make(*(fields.all[name] for name in names))
    fields.reset(seed)
    k()
    plain = fields.stored()
    fields.reset(seed)
    J = jacobian(k, {name: fields.all[name] for name in ("x", "xf")}, [fields.all["y"], fields.all["yf"]])
    for name, values in fields.stored().items():
        assert_array_equal(values, plain[name], err_msg=name)
    for name in ("x", "xf"):
        for n in range(fields.all[name].shape[0]):
            found = difference(k, fields, seed, name, n)
            for part, (want, scale), tolerance in zip(J, found, (1e-6, 1e-4), strict=True):
                assert_allclose(part[name][:, n] / (1 + scale), want / (1 + scale), rtol=0, atol=tolerance)
