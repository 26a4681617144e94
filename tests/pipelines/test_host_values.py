"""Numbers that a pipeline reads from fields with tangents: ordinary ones, of which a run knows what depends on them."""

import array
import contextlib
import csv
import ctypes
import gzip
import importlib.util
import io
import json
import logging
import pickle
import sqlite3
import struct
import types
import warnings

import devices
import numpy as np
import pytest
import taichi as ti
from differences import outputs, scalars, vectors
from numpy.testing import assert_allclose

from taichi_ext import DerivativeWarning, jacobian
from taichi_ext.runtime.python.watch import current_run

pytestmark = pytest.mark.usefixtures("ti64")

# Y and Z are arrays of float64 and float32 that depend on the parameters, y is their field
MARKED = """Y[0]; Y[0].item(); Y.sum().item() / 0.5; round(Y.max(), 3); Y[0] / 0.0; (-Y[0]) ** 0.5; Y.mean(); y[0] + 1
3 * y[0]; max(y[0], Y[1]); Y.reshape(2, 2)[1]; Y[1:3]; list(Y); y[0] ** 2; 2 ** y[0]; -Y; abs(Y); np.sum(Y, axis=0)
np.sqrt(Y[0]); np.maximum(1.0, Y.sum()); np.exp(Z[0]); np.where(Y > 0.1, Y, 0.0); np.dot(Y, Y); np.linalg.norm(Y)
np.linalg.eigh(np.outer(Y, Y)).eigenvalues.max(); np.concatenate([np.zeros(1), Y]); np.stack([Y, Y])[0]; np.clip(Y, 0, 1); np.einsum("i,i", Y, Y)
Y.sum(axis=0, keepdims=True); Z[0] / 3; np.exp(Z); np.sin(y[0]); {"a": Y[0]}; Y.astype(np.float32); Y @ Y; 1 - Z[1]; Y.tolist()
math.sin(y[0]); float(Y[0]); np.array([y[0], y[1]]); np.float64(y[0]); (y[0] * 1j).imag; list(Y.flat); np.clip(y[0], 0, 1); sum([y[0], 1.0])
np.sum([y[0], 1.0]); np.linalg.norm([y[0], 1.0]); np.interp(y[0], [0, 1], [0, 1]); max(map(math.sqrt, Y)); [a * b for a, b in zip(Y, Z)]; (lambda v: -v)(y[0])
divmod(y[0], 0.1)[1]; np.asarray(Y)[0]; {k: v for k, v in enumerate(Y)}[1]; functools.reduce(max, [y[0], y[1]]); eval("y[0]"); [*Y][1]; f(*Y[:2]); y[0] if Y.any() else 0.0
float(f"{Y[0]:.{8 + 9}f}"); float(str(Y[0])); float("%r" % y[0]); json.loads(json.dumps(Y.sum())); eval(f"[{y[0]!r}]")[0]; float("{:.17g}".format(y[0])[:30])
np.frombuffer(Y.tobytes()); pickle.loads(pickle.dumps(Y)); struct.unpack("d", struct.pack("d", y[0]))[0]; float(" ".join(["1", repr(y[0])]).split()[1])
saved(np.save, Y, np.load); saved(np.savetxt, Y, np.loadtxt)"""
OTHERS = """round(y[0]); hash(Y.sum()); json.dumps(Y.sum()); {Y.max(): 1}; Y.astype(int); Y > 0; (Y > 0).sum(); Y.argmax()
f"{Y[0]:.3f} {Y.sum():.2f} {y[0]:.3e}"; int(Y[0] * 10); bool(Y.any()); Y.dtype; Z.sum().dtype; np.exp(Z[0]).dtype; np.allclose(Y, Y)
np.shape(Y); np.argsort(Y); np.isnan(Y[0]); np.searchsorted(Y, 0.2); max(y[0], 100.0); [y[0], 0.5][1]; 0.1 * Y.size; Y.shape[0] / 3; 0.5 if y[0] > 0 else 0.25
float(f"{0.5}"); math.sqrt(len(Y)); np.zeros_like(Y).size * 0.5; sum(range(Y.size)) * 0.1; np.linspace(0, 1, Y.size)[1]
isinstance(Y.sum(), float); y[0] > 0.1; Z[0] == Z[0] / 3 * 3; np.zeros(2)[0]"""


def expressions(text):
    return [e.strip() for line in text.splitlines() for e in line.split(";")]


def functions_of(texts, folder):
    """A Python function of a file for each expression."""
    lines = [
        "import functools, io, json, math, pickle, struct",
        "import numpy as np",
        "def f(a, b):",
        "    return a * b",
    ]
    lines += ["def saved(save, value, load):", "    file = io.BytesIO()", "    save(file, value)", "    file.seek(0)"]
    lines += ["    return load(file)"]
    lines += [line for n, text in enumerate(texts) for line in (f"def f{n}(y, Y, Z):", f"    return {text}")]
    path = folder / "expressions.py"
    path.write_text("\n".join(lines))
    spec = importlib.util.spec_from_file_location("expressions", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {text: getattr(module, f"f{n}") for n, text in enumerate(texts)}


@pytest.mark.double_only("two types of real numbers, one of which json writes")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_numbers_compute_as_without_a_derivative(tmp_path):
    x, y, z = scalars([0.3, 0.8, 0.5, 0.7]), outputs(4), outputs(4, dtype=ti.f32)

    @ti.kernel
    def k():
        for i in x:
            y[i] = x[i] * x[0]
            z[i] = ti.cast(x[i], ti.f32)

    functions = functions_of([*expressions(MARKED), *expressions(OTHERS)], tmp_path)
    found, lost = {}, {}

    def run():
        k()
        Y, Z = y.to_numpy(), z.to_numpy()
        for text, function in functions.items():
            found[text] = function(y, Y, Z)
            active = current_run()
            lost[text] = active is not None and active.is_lost(found[text])

    run()
    plain = {text: (type(value), repr(value)) for text, value in found.items()}
    assert not any(lost.values())
    own = [function.__code__ for function in functions.values()]
    jacobian(run, x, [y, z])
    assert [function.__code__ for function in functions.values()] == own
    for text in functions:
        assert (type(found[text]), repr(found[text])) == plain[text], text
        assert lost[text] == (text in expressions(MARKED)), text


def by_writer(v):
    file = io.StringIO()
    csv.writer(file).writerow([v])
    return float(file.getvalue())


def by_dict_writer(v):
    file = io.StringIO()
    writer = csv.DictWriter(file, ["v"])
    writer.writerow({"v": v})
    file.seek(0)
    return float(next(csv.reader(file))[0])


def by_json(v):
    file = io.StringIO()
    json.dump([v], file)
    return json.loads(file.getvalue())[0]


def by_pickler(v):
    file = io.BytesIO()
    pickle.Pickler(file).dump({"v": v})
    return pickle.loads(file.getvalue())["v"]


def by_compression(v):
    file = io.BytesIO()
    with gzip.GzipFile(fileobj=file, mode="wb") as packed:
        packed.write(repr(v).encode())
    return float(gzip.decompress(file.getvalue()))


def by_print(v):
    file = io.StringIO()
    with contextlib.redirect_stdout(file):
        print(v)
    return float(file.getvalue())


def by_log(v):
    file, logger = io.StringIO(), logging.getLogger("written")
    handler = logging.StreamHandler(file)
    logger.addHandler(handler)
    logger.warning("%r", v)
    logger.removeHandler(handler)
    return float(file.getvalue())


def by_database(v):
    base = sqlite3.connect(":memory:")
    cursor = base.cursor()
    cursor.execute("create table numbers (v real)")
    cursor.execute("insert into numbers values (?)", (v,))
    found = base.execute("select v from numbers").fetchone()[0]
    base.close()
    return found


def by_bytes(v):
    memory = bytearray(8)
    struct.pack_into("d", memory, 0, v)
    return struct.unpack("d", memory)[0]


def by_view_of_bytes(v):
    memory = bytearray(8)
    memoryview(memory).cast("d")[0] = v
    return struct.unpack("d", memory)[0]


def by_attribute(v):
    held = ctypes.c_double()
    held.value = v
    return held.value


def by_item(v):
    held = (ctypes.c_double * 2)()
    held[1] = v
    return held[1]


def by_array(v):
    held = array.array("d", [0.0])
    held[0] = v
    return held[0]


def in_an_object(v):
    held = types.SimpleNamespace(a=0.5)
    held.b = v
    return held.b


def of_another(v):
    file = io.StringIO()
    csv.writer(file).writerow([0.25])
    by_log(v)
    return float(file.getvalue())


def beside_a_number(v):
    held = types.SimpleNamespace()
    held.a, held.b = v, 0.25
    return held.b


def of_a_generator(v):
    generator = np.random.default_rng(0)
    by_json(v)
    return generator.normal()


class Holder:
    def __init__(self):
        self.generator = np.random.default_rng(0)


def of_the_parts_of_an_object(v):
    held = Holder()
    setattr(held, "v", v)  # noqa: B010
    return held.generator.normal()


WRITTEN = (by_writer, by_dict_writer, by_json, by_pickler, by_compression, by_print, by_log, by_database, by_bytes)
WRITTEN += (by_view_of_bytes, by_attribute, by_item, by_array, in_an_object)
NOT_WRITTEN = (of_another, beside_a_number, of_a_generator, of_the_parts_of_an_object)


def test_numbers_that_are_written_and_read_again_are_marked():
    x, y = scalars([0.3, 0.8]), outputs(2)
    found = {}

    @ti.kernel
    def k():
        for i in x:
            y[i] = 2.0 * x[i]

    def run():
        k()
        for function in (*WRITTEN, *NOT_WRITTEN):
            value = function(y[0])
            found[function.__name__] = value, current_run().is_lost(value)

    jacobian(run, x, y)
    assert [name for name, (_, is_lost) in found.items() if is_lost] == [f.__name__ for f in WRITTEN]
    assert_allclose([found[f.__name__][0] for f in WRITTEN], 0.6, rtol=1e-15)


def test_what_kernels_return_is_marked():
    pair = ti.types.vector(2, ti.f64)
    state = ti.types.struct(a=ti.f64, v=pair, n=ti.i32)
    x, y = scalars([0.3, 0.8]), outputs(2)

    @ti.kernel
    def number() -> ti.f64:
        return x[0] * x[1]

    @ti.kernel
    def constant() -> ti.f64:
        return ti.floor(x[0])

    @ti.kernel
    def vector() -> pair:
        return pair(x[0], 1.0)

    @ti.kernel
    def several() -> (ti.f64, pair):
        return x[0], pair(x[0], x[1])

    @ti.kernel
    def struct() -> state:
        return state(a=x[0], v=pair(x[0], x[1]), n=3)

    @ti.kernel
    def use(a: ti.f64):
        for i in y:
            y[i] = a * x[i]

    found, lost = {}, {}

    def run():
        found.update(number=number(), vector=vector(), sum=vector() + 1.0, several=several()[1], struct=struct().v)
        found.update(entry=vector()[1], member=struct().a, whole=struct().n, constant=constant())
        use(0.5)

        lost.update((name, current_run().is_lost(value)) for name, value in found.items())

    jacobian(run, x, y)
    assert {name for name in found if not lost[name]} == {"whole", "constant"}
    assert_allclose(float(found["number"]), 0.3 * 0.8, rtol=1e-15)
    assert_allclose(found["sum"].to_list(), [1.3, 2.0], rtol=1e-15)

    def passing():
        use(number())

    with pytest.warns(DerivativeWarning, match="is passed to .*use: it counts as a constant"):
        J = jacobian(passing, x, y)
    assert_allclose(J, 0.24 * np.eye(2))


def test_vectors_that_python_computes_are_marked():
    x, y = vectors([[0.3, 0.8], [0.5, 0.7]]), outputs(2)
    found = []

    @ti.kernel
    def use(v: ti.types.vector(2, ti.f64)):
        for i in y:
            y[i] = v.dot(x[i])

    def run():
        values = [x[0], x[0] * 2, x[0] + x[1], ti.Vector([x[0][0], 1.0]), -x[0], ti.Vector([1.0, 2.0]) * 2]
        found[:] = [(current_run().is_lost(value), value.to_list()) for value in values]
        use(values[-1])

    jacobian(run, x, y)
    assert [is_marked for is_marked, _ in found] == [True] * 5 + [False]
    values = [value for _, value in found]
    assert_allclose(values, [[0.3, 0.8], [0.6, 1.6], [0.8, 1.5], [0.3, 1.0], [-0.3, -0.8], [2.0, 4.0]], rtol=1e-15)


def test_values_of_types_are_marked():
    pair, square = ti.types.vector(2, ti.f64), ti.types.matrix(2, 2, ti.f64)
    state = ti.types.struct(a=ti.f64, b=ti.f64, v=pair, n=ti.i32)
    nested = ti.types.struct(s=state, c=ti.f64)
    x, y = scalars([0.3, 0.8]), outputs(2)
    found, lost = {}, {}

    @ti.kernel
    def use(s: state, m: square):
        for i in y:
            y[i] = s.v[i] * x[i] + m[0, 0]

    def run():
        s = state(a=x[0], v=[x[0], 1.0], n=3)
        v, m = pair(x[1], 2.0), square([[x[0], 1.0], [2.0, 3.0]])
        found.update(
            vector=v, of_list=pair([x[0], x[1]]), filled=pair(x[0]), matrix=m, again=pair(v), math=ti.math.vec2(v)
        )
        found.update(struct=s, a=s.a, v=s.v, norm=v.norm(), largest=m.max(), inverse=m.inverse(), inner=nested(s=s).s.a)
        found.update(plain=pair(1.0, 2.0), b=s.b, n=s.n, whole=state(a=1.0), c=nested(s=s, c=1.0).c)
        lost.update((name, current_run().is_lost(value)) for name, value in found.items())
        use(s, m)

    with pytest.warns(DerivativeWarning, match="is passed to .*use: it counts as a constant"):
        jacobian(run, x, y)
    assert {name for name in found if not lost[name]} == {"plain", "b", "n", "whole", "c"}
    assert_allclose(found["struct"].v.to_list(), [0.3, 1.0], rtol=1e-15)
    assert_allclose(found["again"].to_list(), [0.8, 2.0], rtol=1e-15)


class TestArraysThatPythonMakes:
    """Arrays that kernels are given carry their tangents; those that Python computes from them do not."""

    @pytest.fixture
    def multiply(self):
        array = ti.types.ndarray(ti.f64, ndim=1)

        @ti.kernel
        def multiply(a: array, b: array, c: array):
            for i in c:
                c[i] += a[i] * b[i]

        return multiply

    @pytest.fixture
    def arrays(self):
        return devices.real([0.5, 1.0, 1.5]), devices.real([2.0, 3.0, 4.0]), devices.real(np.zeros(3))

    @pytest.mark.parametrize("make", [np.copy, lambda a: 2 * a, lambda a: np.concatenate([a[:1], a[1:]])])
    def test_computed_from_a_parameter(self, multiply, arrays, make):
        a, b, c = arrays

        def run(a, c):
            multiply(a, b, c)
            multiply(make(a), b, c)

        with pytest.warns(DerivativeWarning, match="is passed to .*multiply: it counts as a constant"):
            J = jacobian(run, a, c, args=(a, c))
        assert_allclose(J, np.diag(b))

    def test_computed_from_what_a_kernel_has_written(self, multiply, arrays):
        a, b, c = arrays

        def run(a, c):
            between = np.zeros_like(c)
            multiply(a, b, between)
            multiply(between, b, c)
            multiply(between**2, b, c)

        with pytest.warns(DerivativeWarning, match="is passed to .*multiply: it counts as a constant"):
            J = jacobian(run, a, c, args=(a, c))
        assert_allclose(J, np.diag(b**2))

    @pytest.mark.parametrize(
        "read",
        [
            lambda a: a[1],
            lambda a: a[1:].sum(),
            lambda a: a.reshape(3, 1)[1, 0] * 2,
            np.max,
            lambda a: np.random.default_rng(0).normal(a[1], 0.1),  # a function of Cython
        ],
    )
    def test_numbers_of_a_parameter(self, arrays, read):
        a, _, c = arrays

        @ti.kernel
        def scale(a: ti.types.ndarray(ti.f64, ndim=1), by: ti.f64, c: ti.types.ndarray(ti.f64, ndim=1)):
            for i in c:
                c[i] = a[i] * by

        def run(a, c):
            scale(a, read(a), c)

        with pytest.warns(DerivativeWarning, match="is passed to .*scale: it counts as a constant"):
            J = jacobian(run, a, c, args=(a, c))
        assert_allclose(J, np.diag(np.full(3, read(a))))

    def test_stored_to_a_field(self, arrays):
        a, _, _ = arrays
        x, y = scalars([1.0, 1.0, 1.0]), outputs(3)

        @ti.kernel
        def multiply(a: ti.types.ndarray(ti.f64, ndim=1)):
            for i in y:
                y[i] = a[i] * x[i]

        def run(a, make):
            x.from_numpy(make(a))
            multiply(a)

        for make in (lambda a: a + 1, lambda a: np.array([*map(float, a)])):
            with pytest.warns(DerivativeWarning, match="stored.*: .* counts as a constant"):
                jacobian(run, a, y, args=(a, make))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_allclose(jacobian(run, a, y, args=(a, lambda a: a)), np.diag(2 * a))

    def test_others_are_no_reason_to_warn(self, multiply, arrays):
        a, b, c = arrays
        weights, named = [b, b + 1], {"w": b + 2}

        def run(a, c):
            zeros, ones = np.zeros_like(c), np.ones_like(c)
            multiply(a, b, zeros)  # memory to work in
            multiply(zeros, ones, c)
            for given in (weights[0], weights[1][:], named["w"], a):
                multiply(a, given, c)
            multiply(a[:2], a[1:], c[:2])  # parts of what is known
            multiply(a, np.empty(0, c.dtype), c[:0])

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            J = jacobian(run, a, c, args=(a, c))
        expected = np.diag(b + b + b + 1 + b + 2 + 2 * a)
        expected[[0, 1], [0, 1]] += a[1:]
        expected[[0, 1], [1, 2]] += a[:2]
        assert_allclose(J, expected)
