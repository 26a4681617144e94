"""Kernels that are recorded, simplified, emitted and run leave the same bits behind."""

import linecache
import types

import numpy as np
import pytest
import taichi as ti
import taichi.math as tm
from differences import read, write
from kernel_texts import kernel_of, kernels_of, names_of
from reemission import Reemission
from taichi_program import end_program, initialise

from taichi_ext import UnsupportedError, backend, edge, engine, mark, replace_gradient, stop_gradient  # noqa: F401
from taichi_ext.emit import build, emit
from taichi_ext.program import Boundary, Call, Op, statements, values_of, walk
from taichi_ext.record import record
from taichi_ext.simplify import simplify

pytestmark = [
    pytest.mark.usefixtures("ti64"),
    pytest.mark.cpu_only("the emitted kernels run on every device; their bits are compared on one"),
]

N = 6


class Fields:
    """What all kernels here read and write."""

    def __init__(self):
        initialise(default_fp=ti.f64, fast_math=False)
        self.x, self.y = ti.field(ti.f64, N), ti.field(ti.f64, N)
        self.s, self.n = ti.field(ti.f64, ()), ti.field(ti.i32, N)
        self.v, self.m = ti.Vector.field(3, ti.f64, N), ti.Matrix.field(2, 2, ti.f64, N)
        self.p = ti.Struct.field({"a": ti.f64, "b": tm.vec2}, shape=N)
        self.l = ti.field(ti.i32)
        self.node = ti.root.dynamic(ti.i, 64, chunk_size=8)
        self.node.place(self.l)
        self.all = (self.x, self.y, self.s, self.n, self.v, self.m, self.p.a, self.p.b)
        rng = np.random.default_rng(0)
        self.values = [rng.uniform(0.2, 1.5, read(f).shape) for f in self.all]
        self.values[3] = rng.integers(0, N, N)

    def fill(self):
        for field, value in zip(self.all, self.values):
            write(field, value.astype(read(field).dtype))
        self.node.deactivate_all()

    def bits(self):
        return [read(f).tobytes() for f in self.all]


@pytest.fixture(scope="module")
def f():
    yield Fields()
    end_program()


def compare(f, kernel, *args):
    """Run a kernel by itself and re-emitted; returns what was recorded and emitted."""
    results = []
    reemission = Reemission()
    for is_plain in (True, False):
        f.fill()
        given = [a.copy() if isinstance(a, np.ndarray) else a for a in args]
        with backend.careful_compilation(frozenset()):
            if is_plain:
                result = kernel(*given)
            else:
                with reemission:
                    result = kernel(*given)
        results.append((f.bits(), [a for a in given if isinstance(a, np.ndarray)], result))
    (plain, arrays, value), (emitted, other_arrays, other) = results
    assert plain == emitted, reemission.text
    for a, b in zip(arrays, other_arrays):
        np.testing.assert_array_equal(a, b)
    if value is not None:
        assert str(value) == str(other)
    assert len(reemission.made) == 1
    return reemission.text


def program_of(kernel, *args, **options):
    return record(backend.primal_kernel(kernel)[0], args, **options)


# --- constructs -------------------------------------------------------------------------------------------------------


@ti.func
def changes(a: ti.template(), b):
    a += b
    b = b * 2.0
    return b


@ti.func
def squares(v):
    return v * v, v.dot(v)


@ti.real_func
def early(a: ti.f64, n: ti.i32) -> ti.f64:
    total = 0.0
    for i in range(n):
        total += a * i
        if total > 2.0:
            return total
    return total - 1.0


@ti.real_func
def doubled(a: ti.ref(ti.f64)):
    a *= 2.0


@ti.dataclass
class Ball:
    centre: tm.vec2
    radius: ti.f64

    @ti.func
    def level(self, at):
        return self.radius - (at - self.centre).norm()


Pair = ti.types.struct(a=ti.f64, b=ti.types.vector(2, ti.f64))


@ti.data_oriented
class Solver:
    def __init__(self, f):
        self.f, self.dt, self.names = f, 0.25, ["a", "b"]

    @ti.kernel
    def run(self, scale: ti.f64):
        for i in self.f.x:
            self.f.y[i] += self.dt * scale * self.rate(i)

    @ti.func
    def rate(self, i):
        return ti.sin(self.f.x[i]) * self.f.v[i].z


def polynomial(coefficients, t):
    total = 0.0
    for c in reversed(coefficients):
        total = total * t + c
    return total


KERNELS = """
    locals_and_types:
        for i in x:
            k = 1
            k += 2.7
            u = ti.u8(250)
            u += ti.u8(10)
            a = 3 / 2 + 7 // 2 - 7 % 4 + 2**3
            b = ti.cast(x[i] * 10, ti.i32) & 6 | 1 << (i % 3)
            c = ti.cast(0.1, ti.f32) + ti.f32(0.1)
            a *= -k if b > 3 else b
            y[i] = a + b + c + k + u + ti.bit_cast(x[i], ti.i64) % 7 + ~b + tm.popcnt(ti.u32(7)) + tm.clz(ti.i32(1))
    branches_and_loops:
        for i in range(1, N - 1):
            t = x[i]
            for j in range(i):
                if j == 2:
                    continue
                t += x[j] if t < 2.0 and not j == 1 else -0.5
                if t > 3.0:
                    break
            c = 0
            while t > 0.3 and c < 5:
                t *= 0.7
                c += 1
                if 0.4 < t <= 0.5:
                    break
            else_ = 1.0
            if t > 0.6:
                else_ = t
            elif t > 0.45:
                else_ = -t
            else:
                pass
            y[i] = t + c * else_
    loops_over_everything:
        for i, j in ti.ndrange(2, (1, 3)):
            m[i][0, j - 1] = x[i] * x[j]
        for I in ti.grouped(x):
            y[I] = v[I][1]
        for I in ti.grouped(ti.ndrange(3)):
            y[I[0]] += I.x
        ti.loop_config(serialize=True)
        for i in range(5):
            x[i + 1] += 0.5 * x[i]
        for i in range(2):
            for k in ti.static(range(3)):
                if ti.static(k != 1):
                    v[i][k] = k * x[i]
    sums_at_the_top() -> ti.f64:
        total, largest = 0.0, -1.0
        ti.loop_config(serialize=True)
        for i in x:
            total += x[i]
            ti.atomic_max(largest, x[i])
        return total + largest
    vectors(w: tm.vec3, A: ti.types.matrix(2, 2, ti.f64)):
        ti.loop_config(serialize=True)
        for i in range(N):
            a = tm.vec3(x[i], y[i], 1.0)
            a.xz = a.zx + w.xy
            a, b = a.cross(w), a.normalized()
            a[i % 3] *= 2.0
            j = n[i] % 3
            r = ti.Vector([0.0, 0.0, 0.0])
            r[j] += b[j]
            r += ti.max(a, 0.2) * (a > 0.1)
            v[i] = r
            m[i] = A @ m[i] + A.transpose() * A.determinant() - a.xy.outer_product(b.yz)
            m[i] += ti.Matrix.rows([b.xy, a.yz]) * a.sum() + ti.Matrix.cols([b.xy, b.yz])
            m[i] -= ti.Matrix.identity(ti.f64, 2)
            s[None] += a.norm() + b.max() + r.min()
    structs:
        for i in p:
            q = p[i]
            q.b.y += q.a
            p[i] = q
            ball = Ball(centre=q.b, radius=0.5)
            if ball.level(ti.Vector([0.5, 0.5])) > 0.0:
                ball.radius = -1.0
            p[i].a = ball.radius + ball.level(p[i].b)
    functions:
        for i in x:
            a = x[i]
            b = changes(a, 0.5)
            c, d = squares(v[i])
            e = early(a, n[i]) + early(b, 2)
            doubled(a)
            y[i] = a + b * d + c.sum() + e
    a_real_function_at_the_top: s[None] = early(0.7, 5)
    python_functions: for i in x: y[i] = polynomial([1.0, x[i], 0.5], 2.0)
    atomics:
        ti.loop_config(serialize=True)
        for i in range(N):
            old = ti.atomic_add(s[None], x[i])
            before = ti.atomic_min(v[n[i]], tm.vec3(0.5, x[i], 9.0))
            k = ti.atomic_or(n[i], 8)
            y[i] = old * 0.0 + before.sum() * 0.0 + k
    library:
        for i in range(3):
            U, S, V = ti.svd(m[i])
            w, Q = ti.sym_eig(m[i] + m[i].transpose())
            R, P = ti.polar_decompose(m[i])
            z = ti.solve(m[i] + ti.Matrix.identity(ti.f64, 2) * 3.0, ti.Vector([1.0, x[i]]))
            m[i] = m[i].inverse() + U @ S @ V.transpose() + Q * w[0] + R @ P
            v[i] = ti.atan2(v[i], v[i + 1])
            y[i] = z.sum() + tm.mix(0.1, 0.2, x[i]) + tm.clamp(x[i], 0.1, 0.9)
    lists:
        ti.loop_config(serialize=True)
        for i in range(3):
            k = l.append(i * 2)
            n[i] = k
        for i in l:
            s[None] += l[i]
        n[5] = l.length()
    whole_fields:
        y.fill(0.25)
        for i in range(1):
            s[None] = x.shape[0] + v.n
    returns_a_struct(a: ti.f64, k: ti.i32) -> Pair: return Pair(a=a, b=ti.Vector([a, x[k]]))
    returns_several(pair: Pair) -> (ti.f64, ti.i32, ti.types.vector(2, ti.f64)): return pair.a, 7, pair.b * 2
    arrays(a: ti.types.ndarray(ndim=2), b: ti.types.ndarray(dtype=tm.vec2, ndim=1)):
        for i, j in a:
            a[i, j] += b[j % b.shape[0]].x + a.shape[1]
    templates(f: ti.template(), k: ti.template()): for i in f: f[i] = f[i] * k
    walrus_and_swap:
        for i in range(N - 1):
            if (d := x[i] - 0.5) > 0:
                y[i] = d
            x[i], y[i] = y[i], x[i]
            a, b = x[i], y[i + 1]
            a, b = b, a
            y[i] += a - 2 * b
    texts:
        for i in range(1):
            assert x[i] > -1.0, "x is %f" % x[i]  # noqa: UP031
            print(f"x is {x[i]:.3f}", "and {} {k}".format(n[i], k=i), v[i])  # noqa: UP032
    boundaries:
        for i in range(N):
            px = float(i)
            y[i] = mark("named", x[i], by=y[i]) * stop_gradient(x[i]) + replace_gradient(ti.round(x[i]), x[i])
            y[i] += edge(px - x[i] * 3.0, 1.0, 0.0, at=(px, 0.5 * px))
"""
ARGUMENTS = {
    "vectors": (ti.Vector([0.3, 0.5, 0.7]), ti.Matrix([[1.0, 0.2], [0.1, 2.0]])),
    "returns_a_struct": (1.5, 2),
    "returns_several": (Pair(a=3.0, b=[1.0, 2.0]),),
    "arrays": (np.ones((2, 3)), np.arange(4.0).reshape(2, 2)),
    "run": (2.0,),
}
NAMES = [*names_of(KERNELS), "run"]


@pytest.fixture(scope="module")
def made(f):
    """Kernels by what they show, each with the arguments of a call."""
    found = {**kernels_of(KERNELS, **{**globals(), **vars(f)}), "run": Solver(f).run}
    arguments = {**ARGUMENTS, "templates": (f.y, 3)}
    return {name: (kernel, arguments.get(name, ())) for name, kernel in found.items()}


@pytest.mark.mostly_sweep(every=5)
@pytest.mark.parametrize("name", NAMES)
def test_bits(f, made, name):
    kernel, args = made[name]
    compare(f, kernel, *args)


def test_printed_texts(f, made, capfd):
    compare(f, *made["texts"][:1])
    ti.sync()
    plain, emitted = (line for line in capfd.readouterr().out.splitlines() if line.startswith("x is"))
    assert plain == emitted


def test_random_numbers_are_drawn_where_they_were():
    """``ti.random`` is a statement of its own, as in Taichi: a template that gets one reads one number twice."""

    @ti.func
    def twice(a: ti.template()):
        return a - a

    @ti.kernel
    def k() -> ti.f64:
        a = ti.random()
        b = ti.randn() + ti.random(ti.f32)
        return twice(ti.random()) + a - b

    made = simplify(program_of(k))
    values = [n for s in statements(made.body) for v in values_of(s) for n in walk(v)]
    assert sum(isinstance(n, Op) and n.name == "random" for n in values) == 5
    assert emit(made)[0].count("ti.random(") == 5


# --- what the record says ---------------------------------------------------------------------------------------------


@ti.func
def ruled(a, b: ti.template()):
    return a * b[0], ti.Vector([a, b[1]])


def test_functions_with_a_rule(f):
    k = kernel_of("for i in f.x: c, d = ruled(f.x[i], f.v[i]); f.y[i] = c + d.sum()", f=f, ruled=ruled)

    def rule(b, d_a, d_b, auto):
        return auto[0] + d_a * b[1], ti.Vector([0.0, d_b[0]])

    func = backend.taichi_func(ruled)
    made_rule = types.SimpleNamespace(
        name="r", target=func, target_name="ruled", function=rule, place="here", taken={"a", "b"},
        parameters=("b", "d_a", "d_b", "auto"),
    )  # fmt: skip
    rules = types.SimpleNamespace(rule_for=lambda found: made_rule if found is func else None)
    program = program_of(k, rules=rules)
    for made in (program, simplify(program)):
        (boundary,) = (s for s in statements(made.body) if isinstance(s, Boundary) and s.kind == "rule")
        assert boundary.target is func
        assert set(boundary.inner) == {"d_a", "d_b", "auto"}
        assert all(local.kind == "rule" for group in boundary.inner.values() for local in group)
        assert [len(boundary.sources(name)) for name in ("d_a", "d_b", "auto", "returned")] == [1, 3, 3, 3]
        assert len(boundary.results) == 3
    compare(f, k)


def test_library_calls_stay_calls(f):
    k = kernel_of("for i in f.m: U, S, V = ti.svd(f.m[i]); f.m[i] = V @ f.m[i].inverse()", f=f)
    program = program_of(k)
    assert [s.function for s in statements(program.body) if isinstance(s, Call) and not s.function.endswith("_at")] == [
        "svd",
        "inverse",
    ]
    assert [l.shape for s in statements(program.body) if isinstance(s, Call) for l in s.results] == [(2, 2)] * 7


def test_places_lead_to_the_user_s_line(f):
    k = kernel_of("for i in f.x: f.y[i] = changes(f.x[i], 1.0)", f=f, changes=changes)
    program = program_of(k)
    inner = [s.place for s in statements(program.body) if s.place and s.place.function == "changes"]
    assert inner and inner[0].file == __file__
    assert inner[0].text.strip() == "a += b"
    assert "changes(f.x[i], 1.0)" in inner[0].caller.text
    assert f"# test_record_emit.py:{inner[0].line}" in emit(program)[0]


def test_the_text_is_known_to_messages(f):
    @ti.kernel
    def k():
        f.s[None] = 1.0

    emitted = build(program_of(k))
    file = emitted.kernel._primal.func.__code__.co_filename
    assert linecache.getline(file, 11).strip().startswith("s[None] = 1.0  # test_record_emit.py:")
    del emitted


def test_taichi_makes_a_variable_for_each_name_alone(f, monkeypatch):
    @ti.kernel
    def k():
        for i in f.x:
            a = ti.sin(f.x[i])
            if a > 0.5:
                a = a * a
            f.y[i] = a

    made = []
    make = ti.lang.impl.expr_init
    program = program_of(k)
    monkeypatch.setattr(ti.lang.impl, "expr_init", lambda value: made.append(value) or make(value))
    kernel = engine.compiled(k._primal, (), build(program))
    assert len(made) == 1
    monkeypatch.undo()
    f.fill()
    kernel.launch()
    sines = np.sin(f.values[0])
    np.testing.assert_allclose(read(f.y), np.where(sines > 0.5, sines**2, sines), rtol=1e-14)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_refusals_name_the_place(f):
    table = [1.0, 2.0]
    list_at_run_time = kernel_of("for i in f.x: f.y[i] = table[i]", f=f, table=table)
    numpy_function = kernel_of("for i in f.x: f.y[i] = np.sin(f.x[i])", f=f)

    @ti.func
    def endless(a):
        return endless(a)

    recursion = kernel_of("f.s[None] = endless(f.s[None])", f=f, endless=endless)
    for kernel, words in [
        (list_at_run_time, "A Python list is indexed"),
        (numpy_function, "NumPy's sin"),
        (recursion, "nest deeper than"),
    ]:
        with pytest.raises(UnsupportedError, match=words) as caught:
            program_of(kernel)
        assert "<kernels" in str(caught.value)


@pytest.mark.sweep
def test_quantised_types_are_refused():
    initialise()
    field = ti.field(ti.types.quant.int(5))
    bits = ti.BitpackedFields(max_num_bits=32)
    bits.place(field)
    ti.root.dense(ti.i, 4).place(bits)
    k = kernel_of("for i in range(4): field[i] = i", field=field)
    with pytest.raises(UnsupportedError, match="quantised"):
        program_of(k)


@pytest.mark.parametrize("is_users", [True, False])
@pytest.mark.parametrize(("hazards", "is_on"), [((), False), (("vectors",), True)])
def test_local_arrays_are_made_scalars_early_only_for_vectors_in_fields(hazards, is_on, is_users, monkeypatch):
    config = ti.lang.impl.get_runtime().prog.config()
    monkeypatch.setattr(config, "force_scalarize_matrix", is_users)
    with backend.careful_compilation(frozenset(hazards)):
        assert config.force_scalarize_matrix == is_on
    assert config.force_scalarize_matrix == is_users


@pytest.mark.mostly_sweep("800-1")
@pytest.mark.parametrize(("lines", "level"), [(800, 1), (801, 0)])
def test_taichi_looks_for_repeated_values_in_short_kernels_alone(lines, level):
    config = ti.lang.impl.get_runtime().prog.config()
    with backend.careful_compilation(frozenset(), lines=lines):
        assert config.opt_level == level
    assert config.opt_level == 1
