"""Numbers that a pipeline takes and passes to kernels, as parameters by name."""

import copy
import functools
import math
import pickle
import re
import statistics
import sys
import warnings
from queue import SimpleQueue

import numpy as np
import pytest
import taichi as ti
from captured_warnings import no_warnings
from differences import outputs, read, scalars, vectors, write
from kernel_texts import kernel_of
from numpy.testing import assert_allclose
from runtimes import RUNTIME

import taichi_ext as te
from taichi_ext import DerivativeWarning, InvalidArgumentError, UnsupportedError, hvp, jacobian, vjp

pytestmark = [pytest.mark.usefixtures("ti64"), pytest.mark.double_only("numbers of float64")]
X = np.array([1.0, 2.0, 3.0])
from_math = math.sqrt
vec2 = ti.types.vector(2, ti.f64)


class Scene:
    """A pipeline of a number, a vector and a whole number."""

    def __init__(self):
        self.x, self.y = scalars(X), outputs(3)
        x, y = self.x, self.y
        clear = kernel_of("for i in y: y[i] = 0.0", y=y)
        add = kernel_of(
            "add: for i in x: y[i] += s * x[i] ** 2 + v[1] * x[i]", "s: ti.f64, v: vec2", vec2=vec2, x=x, y=y
        )
        total = self.total = outputs(1)

        @ti.kernel
        def energy():
            total[0] = 0.0
            for i in y:
                total[0] += y[i]

        self.clear, self.add, self.energy = clear, add, energy

    def run(self, sigma, v, steps):
        self.clear()
        self.add(sigma, v)
        for _ in range(steps):
            self.add(2.0 * sigma / steps + np.sin(sigma), v * 0.5)


ARGS = (0.7, ti.Vector([1.0, 2.0]), 2)
BY_SIGMA = X**2 * (1 + 2 * (1 + np.cos(0.7)))
BY_V = np.stack([np.zeros(3), 2 * X], 1)
BY_X = np.diag(2 * X * (0.7 + 2 * (0.7 + np.sin(0.7))) + 4.0)
PARAMS = ["sigma", "v"]


@pytest.fixture
def scene():
    return Scene()


@pytest.mark.mostly_sweep("csr")
@pytest.mark.parametrize(
    "options",
    [{}, {"chunk_size": 1}, {"chunk_size": 2}, {"tangents": "dense"}, {"format": "csr"}],
    ids=["whole", "one column", "two columns", "dense", "csr"],
)
def test_numbers_and_vectors_carry_their_tangent_through_python(scene, options):
    found = jacobian(scene.run, [*PARAMS, scene.x], scene.y, args=ARGS, **options)
    for J, expected in zip(found, [BY_SIGMA, BY_V, BY_X], strict=True):
        dense = J.toarray() if options.get("format") else J
        assert_allclose(dense.reshape(expected.shape), expected, rtol=1e-12, atol=1e-12)
    value = read(scene.y)
    scene.run(*ARGS)
    assert_allclose(read(scene.y), value, rtol=1e-15)


def test_a_prepared_form_takes_other_numbers(scene):
    plan = te.Jacobian(scene.run, "sigma", scene.y, args=ARGS)
    assert_allclose(plan(), BY_SIGMA)
    assert_allclose(plan(args=(0.2, ARGS[1], 1)), X**2 * (3 + np.cos(0.2)))


OPERATIONS = {
    "arithmetic": lambda s: (3 - s) * (s + 1) / (2 * s) - s / 4 + s * s,
    "powers": lambda s: s**2 + s**-1.5 + 2**s + s**s,
    "modulo": lambda s: 5.5 % s + (3 * s) % 2,
    "signs": lambda s: -s + abs(-s) + (+s),
    "choices": lambda s: (s if s > 0.5 else -s) + (3 * s if s <= 0.5 else s),
    "tests of values": lambda s: s if np.isfinite(s) and not np.isnan(s) else 2 * s,
    "truth": lambda s: s * (s > 0.5) + True * s - np.bool_(True) * s * 0.5,
    "quotients": lambda s: divmod(3 * s, 2)[1] + divmod(5.5, s)[1] + s.real,
    "remainders": lambda s: (
        math.remainder(1.9, s) + math.remainder(7 * s, 2 * s + 1) + math.fmod(-5.5, s) + np.fmod(5.5, -s) + -5.5 % s
    ),
    "copies": lambda s: s * copy.copy(s) + copy.deepcopy({"s": [s]})["s"][0],
    "powers of zero": lambda s: s + 0.0**s + (-s) ** 2,
    "numpy numbers": lambda s: np.float64(2.0) * s + s * np.float64(0.5) + np.float64(1.0) / s + s ** np.int32(2),
    "bounds": lambda s: (
        np.clip(s, 0, 1) + np.clip(3 * s, 0, 1) + np.minimum(s, 0.9) * np.maximum(s, 0.1) + np.fmax(s, 2)
    ),
    "beside zero and NaN": lambda s: (
        np.heaviside(0.0, s) + s * np.heaviside(s, 0.5) + np.fmax(s, np.nan) * np.fmin(np.nan, s)
    ),
    "objects": lambda s: (
        np.dot(np.array([s, 2 * s], object), np.array([1.0, 3.0])) + np.multiply(np.array([s, 1.0], object), s)[0]
    ),
    "sums": lambda s: sum([s, s * 2, 1.0]) + max(s, 0.1) + min(s, 9.0),
    "vectors": lambda s: ti.Vector([s, 2 * s]).dot(ti.Vector([3.0, s])) + (ti.Vector([s, 1.0]) * s)[0],
    "rounding": lambda s: s * (round(s) + math.floor(s) + math.ceil(s) + int(3 * s) + s // 0.3),
}
if RUNTIME == "taichi":  # vectors of Quadrants cannot be copied
    OPERATIONS["copies of vectors"] = lambda s: s * copy.deepcopy(ti.Vector([s, 1.0]))[0]


def test_operations_of_python_follow_the_chain_rule():
    y, functions, step = outputs(len(OPERATIONS)), OPERATIONS.values(), 1e-6
    store = kernel_of("y[n] = s", "n: ti.i32, s: ti.f64", y=y)

    def pipeline(s):
        for n, function in enumerate(functions):
            store(n, function(s))

    with no_warnings(DerivativeWarning):
        found = jacobian(pipeline, "s", y, args=(0.7,))
    for name, function, slope, value in zip(OPERATIONS, functions, found, read(y), strict=True):
        difference = (function(0.7 + step) - function(0.7 - step)) / (2 * step)
        assert_allclose(slope, difference, rtol=1e-7, err_msg=name)
        assert_allclose(value, function(0.7), rtol=1e-15, err_msg=name)


@pytest.mark.parametrize(("function", "slope"), [(lambda s: 0.0**s, -np.inf), (lambda s: 3 * np.sqrt(s), np.inf)])
@pytest.mark.filterwarnings("ignore:invalid value encountered in sqrt")  # of runs that compare
def test_infinite_slopes_at_zero_have_their_sign(function, slope):
    y = outputs(1)
    store = kernel_of("y[0] = s", "s: ti.f64", y=y)
    assert jacobian(lambda s: store(function(s)), "s", y, args=(0.0,)) == slope


@pytest.mark.mostly_sweep("text")
@pytest.mark.parametrize(
    "convert",
    [
        *(float, lambda s: np.array([s], float)[0], lambda s: float(f"{float(s)}"), lambda s: (1j * s).imag),
        *(lambda s: pickle.loads(pickle.dumps(s)), lambda s: float.fromhex(s.hex()), lambda s: from_math(2 * s)),
    ],
    ids=["float", "numpy", "text", "complex", "pickle", "method", "a function of math by its own name"],
)
def test_a_conversion_to_float_warns(scene, convert):
    def pipeline(s):
        scene.clear()
        for _ in range(2):
            scene.add(s, ti.Vector([0.0, convert(s)]))

    with pytest.warns(DerivativeWarning, match="passed to .*add depends on the params") as caught:
        found = jacobian(pipeline, "s", scene.y, args=(0.7,))
    assert_allclose(found, 2 * X**2)
    assert [(w.filename, w.lineno) for w in caught] == [(__file__, pipeline.__code__.co_firstlineno + 3)]  # once


@pytest.mark.parametrize("product", [jacobian, vjp], ids=["jacobian", "vjp"])
@pytest.mark.parametrize("place", ["closure", "attribute", "vector"])
def test_a_number_that_is_compiled_into_a_kernel_warns(scene, place, product):
    x, y = scene.x, scene.y

    @ti.data_oriented
    class Owner:
        scale, direction = 1.0, ti.Vector([0.0, 1.0])

        @ti.kernel
        def by_attribute(self):
            for i in x:
                y[i] += self.scale * x[i]

        @ti.kernel
        def by_vector(self):
            for i in x:
                y[i] += self.direction[0] * x[i]

    def pipeline(s):
        owner, scale = Owner(), 2.0 * s
        by_closure = kernel_of("by_closure: for i in x: y[i] += scale * x[i]", x=x, y=y, scale=scale)
        owner.scale, owner.direction = scale, ti.Vector([scale, 1.0])
        scene.clear()
        scene.add(s, ti.Vector([0.0, 0.0]))
        {"closure": by_closure, "attribute": owner.by_attribute, "vector": owner.by_vector}[place]()

    weights = () if product is jacobian else (np.ones(3),)
    with pytest.warns(DerivativeWarning, match="depends on the params, and is compiled into") as caught:
        found = product(pipeline, "s", y, *weights, args=(0.7,))
    assert {w.filename for w in caught} == {__file__}
    assert_allclose(found, X**2 if product is jacobian else np.sum(X**2))  # without what is compiled in


@pytest.mark.parametrize("product", [jacobian, vjp], ids=["jacobian", "vjp"])
@pytest.mark.parametrize("kind", ["number", "vector", "array"])
def test_a_plain_number_that_is_compiled_into_a_new_kernel_warns(scene, kind, product):
    x, y = scene.x, scene.y

    def pipeline(s):
        number = float(2.0 * s)
        vector, array = ti.Vector([number, 1.0]), np.array([number])
        by_number = kernel_of("by_number: for i in x: y[i] += number * x[i]", x=x, y=y, number=number)
        by_vector = kernel_of("by_vector: for i in x: y[i] += vector[0] * x[i]", x=x, y=y, vector=vector)
        by_array = kernel_of("by_array: for i in x: y[i] += ti.static(float(array[0])) * x[i]", x=x, y=y, array=array)
        scene.clear()
        scene.add(s, ti.Vector([0.0, 0.0]))
        {"number": by_number, "vector": by_vector, "array": by_array}[kind]()

    weights = () if product is jacobian else (np.ones(3),)
    with pytest.warns(DerivativeWarning, match=f"A number compiled into .*by_{kind} depends on the params, but"):
        found = product(pipeline, "s", y, *weights, args=(0.7,))
    assert_allclose(found, X**2 if product is jacobian else np.sum(X**2))  # without what is compiled in


@ti.data_oriented
class Scaled:
    """Reads plain numbers of its own, in kernels and in functions that they call."""

    def __init__(self, x, y, scale):
        self.x, self.y, self.scale = x, y, scale
        self.by_name, self.vector = {"scale": scale}, ti.Vector([scale, 1.0])

    @ti.func
    def scaled(self, a):
        return self.scale * a

    @ti.kernel
    def attribute(self):
        for i in self.x:
            self.y[i] += self.scale * self.x[i]

    @ti.kernel
    def item(self):
        for i in self.x:
            self.y[i] += ti.static(self.by_name["scale"]) * self.x[i]

    @ti.kernel
    def entry(self):
        for i in self.x:
            self.y[i] += self.vector[0] * self.x[i]

    @ti.kernel
    def function(self):
        for i in self.x:
            self.y[i] += self.scaled(self.x[i])


by_template = kernel_of("for i in scaled.x: scaled.y[i] += scaled.scale * scaled.x[i]", "scaled: ti.template()")


@pytest.mark.mostly_sweep(every=3)
@pytest.mark.parametrize("product", [jacobian, vjp], ids=["jacobian", "vjp"])
@pytest.mark.parametrize("name", ["attribute", "item", "entry", "function", "template"])
def test_a_plain_number_of_an_object_that_the_pipeline_makes_warns(scene, name, product):
    x, y = scene.x, scene.y

    def pipeline(s):
        scene.clear()
        scene.add(s, ti.Vector([0.0, 0.0]))
        for scale in (2.0, float(2.0 * s)):  # a constant first
            scaled = Scaled(x, y, scale)
            by_template(scaled) if name == "template" else getattr(scaled, name)()

    weights = () if product is jacobian else (np.ones(3),)
    with pytest.warns(DerivativeWarning, match="A number compiled into .* depends on the params, but"):
        found = product(pipeline, "s", y, *weights, args=(0.7,))
    assert_allclose(found, X**2 if product is jacobian else np.sum(X**2))  # without what is compiled in


@pytest.mark.filterwarnings("error")
def test_numbers_of_objects_that_do_not_depend_on_params_are_constants(scene):
    x, y, known, runs = scene.x, scene.y, Scaled(scene.x, scene.y, 3.0), SimpleQueue()

    def pipeline(s, makes):
        runs.put(makes)
        scene.clear()
        scene.add(s, ti.Vector([0.0, 0.0]))
        assert float(2.0 * s) > 0
        (Scaled(x, y, 3.0) if makes else known).attribute()

    for makes in (True, False, False, True):
        assert_allclose(jacobian(pipeline, "s", y, args=(0.7, makes)), X**2)
    assert [runs.get() for _ in range(runs.qsize())] == [True] * 3 + [False] * 3 + [
        False,
        True,
    ]  # the first call with each flag takes two more


@pytest.mark.filterwarnings("error")
def test_kernels_that_each_run_makes_are_like_those_of_the_run_before(scene):
    x, y = scene.x, scene.y

    def pipeline(s):
        add = kernel_of("for i in x: b[i] += a; y[i] += a * x[i] + b[i]", "a: ti.f64, b: A1", x=x, y=y)
        scene.clear()
        array = np.ones(3)
        add(2.0, array)
        assert float(s) > 0
        add(s, array)
        add(2.0, array)

    assert_allclose(jacobian(pipeline, "s", y, args=(0.7,)), X + 2.0)


@pytest.mark.filterwarnings("error")
def test_a_constant_that_is_compiled_into_a_new_kernel_is_one(scene):
    x, y = scene.x, scene.y

    def pipeline(s):
        scale = 2.0
        by_closure = kernel_of("by_closure: for i in x: y[i] += scale * x[i]", x=x, y=y, scale=scale)
        scene.clear()
        scene.add(s, ti.Vector([0.0, 0.0]))
        assert float(2.0 * s) > 0
        by_closure()

    assert_allclose(jacobian(pipeline, "s", y, args=(0.7,)), X**2)


def test_numbers_of_a_returned_struct_are_lost_in_both_modes(scene):
    x, y = scene.x, scene.y
    Sums = ti.types.struct(total=ti.f64, part=ti.types.struct(ends=vec2, count=ti.i32))

    @ti.kernel
    def sums() -> Sums:
        return Sums(total=x[0] * x[1], part={"ends": ti.Vector([x[0], x[2]]), "count": 3})

    def pipeline():
        scene.clear()
        found = sums()
        assert found.part.count == 3
        scene.add(found.total, found.part.ends)

    by_argument = np.diag(2 * X[0] * X[1] * X + X[2])
    with pytest.warns(DerivativeWarning, match="passed to .*add depends on the params"):
        assert_allclose(jacobian(pipeline, x, y), by_argument)
    with pytest.warns(DerivativeWarning, match="passed to .*add depends on the params"):
        assert_allclose(vjp(pipeline, x, y, np.ones(3)), by_argument.sum(0))


def test_the_type_of_a_number_converts_as_float_does(scene):
    def pipeline(s):
        scene.clear()
        scene.add(s * type(s)("2.0") + type(s)(), ti.Vector([0.0, statistics.median([s, 2 * s, 3 * s])]))

    assert_allclose(jacobian(pipeline, "s", scene.y, args=(0.7,)), 2 * X**2 + 2 * X)


def test_an_array_is_filled_with_a_number(scene):
    array, y = ti.ndarray(ti.f64, 3), scene.y
    squares = kernel_of("for i in y: y[i] = (i + 1) * a[i] ** 2", "a: A", y=y)
    pipeline = lambda s: (array.fill(3.0 * s), squares(array))
    by_number = 2 * 9.0 * 0.7 * np.arange(1.0, 4.0)
    assert_allclose(jacobian(pipeline, "s", y, args=(0.7,)), by_number)
    weights = np.stack([np.ones(3), X])
    assert_allclose(vjp(pipeline, "s", y, weights, args=(0.7,)), weights @ by_number)
    energy = lambda: (array.fill(scene.x[0] * scene.x[1]), squares(array), scene.energy())
    # 6 (x0 x1)^2, as y = (1, 2, 3) (x0 x1)^2
    assert_allclose(hvp(energy, scene.x, np.array([1.0, 0.0, 0.0]), scene.total), [12 * 4.0, 24 * 2.0, 0.0])


def test_numbers_make_what_they_make_outside_of_a_run(scene):
    torch, seen = pytest.importorskip("torch"), []

    def pipeline(s):
        scene.clear()
        scene.add(s * np.float64(2.0), ti.Vector([0.0, np.float32(3.0) * s]))
        number = scene.y[0]
        made = torch.tensor(number).dtype, torch.tensor([number, 1.0]).dtype, np.array([number]).dtype
        root = np.sqrt(number)  # of NumPy's type, with its methods
        seen.append(
            (isinstance(number, np.generic), *made, root.dtype, root.astype(np.float32).dtype, round(number, 3))
        )

    assert_allclose(jacobian(pipeline, "s", scene.y, args=(0.7,)), 2 * X**2 + 3 * X)
    pipeline(0.7)
    assert seen[0] == seen[-1]
    assert seen[0][:3] == (False, torch.float32, torch.float32)


@pytest.mark.filterwarnings("error")
def test_arrays_of_vectors_and_members_of_structs_take_numbers(scene):
    array, parts = ti.Vector.ndarray(2, ti.f64, 3), ti.types.struct(a=ti.f64, v=vec2).field(shape=3)

    @ti.kernel
    def use(a: ti.types.ndarray(vec2, 1)):
        for i in scene.y:
            scene.y[i] = (i + 1) * a[i][0] * a[i][1] + parts[i].v[1] * parts[i].a

    def pipeline(s):
        array.fill(ti.Vector([s * s, 3.0 * s]))
        for i in range(3):
            parts[i].v = ti.Vector([1.0, 2.0 * s])
            parts[i].a = s
        use(array)

    J = 9 * 0.7**2 * np.arange(1.0, 4.0) + 4 * 0.7
    assert_allclose(vjp(pipeline, "s", scene.y, X, args=(0.7,)), X @ J)
    assert_allclose(jacobian(pipeline, "s", scene.y, args=(0.7,)), J)


def fills(scene):
    """Fields of several kinds, and fills of each with numbers that depend on a param, by name."""
    z, v = outputs(3), ti.Vector.field(2, ti.f64, 3)
    m, parts = ti.Matrix.field(2, 2, ti.f64, 3), ti.types.struct(a=ti.f64, v=vec2, n=ti.i32).field(shape=3)

    @ti.kernel
    def use():
        for i in scene.y:
            scene.y[i] = (i + 1) * (z[i] ** 2 + v[i].dot(v[i].yx) + m[i].determinant() + parts[i].a * parts[i].v.x)

    def run(fill):
        for field in (z, v, m, parts.a, parts.v):
            field.fill(0.5)
        fill()
        use()

    return run, {
        "scalars": lambda s: z.fill(s),
        "vectors": lambda s: v.fill(s),
        "by a vector": lambda s: v.fill(ti.Vector([s * s, 3.0])),
        "component": lambda s: v.get_scalar_field(1).fill(s),
        "by a matrix": lambda s: m.fill([[s, 2.0], [-s, s]]),
        "again": lambda s: (v.fill(s), v.fill([2.0, s]), m.fill(s), m.fill(1.0)),
        "struct": lambda s: (parts.a.fill(s), parts.v.fill([s * s, s])),
    }


@pytest.mark.mostly_sweep("struct")
@pytest.mark.filterwarnings("error::taichi_ext.DerivativeWarning")
@pytest.mark.parametrize("name", ["scalars", "vectors", "by a vector", "component", "by a matrix", "again", "struct"])
def test_fields_are_filled_with_numbers(scene, name):
    run, by_name = fills(scene)
    y, total, fill = scene.y, scene.total, by_name[name]
    pipeline = lambda s: run(lambda: fill(s))

    def value(s):
        pipeline(s)
        return y.to_numpy()

    step = 1e-5
    J = (value(0.7 + step) - value(0.7 - step)) / (2 * step)
    assert_allclose(jacobian(pipeline, "s", y, args=(0.7,)), J, rtol=1e-8, atol=1e-8)
    weights = np.array([0.3, 1.0, -2.0])
    assert_allclose(vjp(pipeline, "s", y, weights, args=(0.7,)), weights @ J, rtol=1e-8, atol=1e-8)
    energy = lambda: (run(lambda: fill(scene.x[0] * scene.x[1])), scene.energy())
    scene.x.from_numpy(np.array([0.7, 1.0, 0.0]))
    H = 6 * (value(0.7 + 1e-4) - 2 * value(0.7) + value(0.7 - 1e-4))[0] / 1e-8  # y = (1, 2, 3) f(x0 x1)
    assert_allclose(
        hvp(energy, scene.x, np.array([1.0, 0.0, 0.0]), total), [H, 6 * J[0] + 0.7 * H, 0.0], rtol=1e-5, atol=1e-5
    )


@functools.cache
def squared(s):
    return s * s


MEMO, TABLE = {}, {0.7: 0.49}


def squared_once(s):
    if s not in MEMO:
        MEMO[s] = s * s
    return MEMO[s]


@pytest.mark.mostly_sweep("table")
@pytest.mark.parametrize(
    ("function", "message"),
    [(squared, "depends on the params"), (squared_once, "depends on the params"), (TABLE.__getitem__, "KeyError")],
    ids=["cache", "dict", "table"],
)
def test_a_number_that_is_looked_up_warns(scene, function, message):
    function(0.7)
    pipeline = lambda s: (scene.clear(), scene.add(s, ti.Vector([0.0, function(s)])))
    with pytest.warns(DerivativeWarning, match=message):
        found = jacobian(pipeline, "s", scene.y, args=(0.7,))
    assert_allclose(found, X**2)


def test_to_python_it_is_a_float(scene):
    seen = []

    def pipeline(s):
        seen.append((isinstance(s, float), s == 0.7, s < 1, f"{s:.2f}", str(s), repr(s), bool(s)))
        scene.add(s, ti.Vector([0.0, 0.0]))

    with no_warnings(DerivativeWarning):
        jacobian(pipeline, "s", scene.y, args=(0.7,))
    assert seen[0] == seen[-1] == (True, True, True, "0.70", "0.7", "0.7", True)  # others: with moved params


@pytest.mark.parametrize("mode", ["forward", "reverse"])
def test_what_outlives_the_run_is_a_plain_number(scene, mode):
    kept = []

    def pipeline(s):
        kept[:] = [s, 2 * s]
        scene.clear()
        scene.add(s, ti.Vector([0.0, 0.0]))

    jacobian(pipeline, "s", scene.y, args=(0.7,), mode=mode)
    with no_warnings(DerivativeWarning):
        assert [*map(type, kept)] == [float, float]
        assert type(kept[1] * 2) is float
        assert type(pickle.loads(pickle.dumps(kept[0]))) is float
        assert type(copy.deepcopy(kept[0])) is float
        assert math.sin(kept[0]) == math.sin(0.7)
        write(scene.y, 0.0)
        scene.add(kept[0], ti.Vector([0.0, 0.0]))  # plainly
        assert_allclose(read(scene.y), 0.7 * X**2)

        def other():
            scene.clear()
            scene.add(kept[0], ti.Vector([0.0, 0.0]))

        assert_allclose(jacobian(other, scene.x, scene.y), np.diag(1.4 * X))


def test_a_template_is_compiled_in():
    y = outputs(1)
    k = kernel_of("k(s: ti.template()): y[0] = s", y=y)
    pipeline = lambda s: k(s)
    with pytest.raises(UnsupportedError, match="passed to .*k as the template 's'"):
        jacobian(pipeline, "s", y, args=(0.7,))


@pytest.mark.mostly_sweep(every=2)
@pytest.mark.parametrize(
    ("s", "use", "message"),
    [
        (3, lambda scene, s: scene.repeat(1.0, s), "passed to repeat as the integer 'n'"),
        (3, lambda scene, s: [scene.repeat(1.0, 1) for _ in range(s)], "'s' is a parameter.*as an integer"),
        (2, lambda scene, s: scene.repeat([1.0, 2.0, 3.0][s], 1), "'s' is a parameter.*as an integer"),
        (3, lambda scene, s: scene.repeat(1.0, len(np.zeros(s))), "'s' is a parameter.*as an integer"),
        (0.7, lambda scene, s: scene.weighted(scene.x), "array argument 'a' is a ScalarField"),
    ],
)
def test_numbers_that_kernels_cannot_take_with_their_tangent(scene, s, use, message):
    x, y = scene.x, scene.y
    repeat = kernel_of("repeat(s: ti.f64, n: ti.i32): for i in x: y[i] += n * s", x=x, y=y)
    weighted = kernel_of("for i in x: y[i] += a[i] * x[i]", "a: A1", x=x, y=y)
    scene.repeat, scene.weighted = repeat, weighted
    pipeline = lambda s: (scene.add(s, ti.Vector([0.0, 0.0])), use(scene, s))
    with pytest.raises((UnsupportedError, InvalidArgumentError), match=message):
        jacobian(pipeline, "s", y, args=(s,))


@pytest.mark.parametrize("kind", ["keyword", "default", "several"])
def test_arguments_without_a_value_in_args(scene, kind):
    by_keyword = lambda a, *rest, s=0.7: scene.add(s, ti.Vector([0.0, a]))
    by_default = lambda a, s=0.7: scene.add(s, ti.Vector([0.0, a]))

    def several(a, *s):
        scene.add(s[1], ti.Vector([0.0, a]))

    pipeline, args = {
        "keyword": (by_keyword, (1.0, 2.0)),
        "default": (by_default, (1.0,)),
        "several": (several, (1.0, 2.0, 3.0)),
    }[kind]
    with pytest.raises(InvalidArgumentError, match="params is 's', an argument of .* that has no value in args"):
        jacobian(pipeline, "s", scene.y, args=args)


@pytest.mark.mostly_sweep(every=2)
@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("s", (None,), "is None; an argument of a Python function that is a parameter is a number"),
        ("s", ("text",), "is 'text'; an argument of a Python function"),
        ("s", (0.5,), "is not read by the kernels"),
    ],
)
def test_arguments_that_cannot_be_parameters(scene, name, args, message):
    pipeline = lambda s: scene.add(1.0, ti.Vector([0.0, 0.0]))
    with pytest.raises(InvalidArgumentError) as error:
        jacobian(pipeline, name, scene.y, args=args)
    assert message in str(error.value)


def test_a_name_that_a_pipeline_does_not_read_lists_those_that_it_does():
    x, y = scalars(X), outputs(3)

    @ti.data_oriented
    class Simulation:
        def __init__(self):
            self.dt, self.gain, self.steps = 0.5, 2.0, 3

        def run(self):
            for _ in range(self.steps):
                self.add(self.dt)

        @ti.kernel
        def add(self, dt: ti.f64):
            for i in x:
                y[i] += self.gain * dt * x[i]

    simulation = Simulation()
    pipeline = lambda: simulation.run()
    with pytest.raises(InvalidArgumentError, match=r"Numbers that it may read: 'simulation\.dt', 'simulation\.gain'"):
        jacobian(pipeline, "self.dt", y)
    with pytest.raises(
        InvalidArgumentError, match=r"may read: 'simulation\.dt', 'simulation\.gain'\..* make it an argument"
    ):
        jacobian(pipeline, "simulation.dt", y)
    assert_allclose(jacobian(pipeline, "simulation.gain", y), 1.5 * X)


@pytest.mark.sweep
def test_a_later_call_without_the_value(scene):
    def run(factor, sigma=2.0):
        scene.add(factor * sigma, ti.Vector([1.0, 2.0]))

    jacobian(run, "sigma", scene.y, args=(1.0, 3.0))
    with pytest.raises(InvalidArgumentError, match="params is 'sigma', an argument of .*run that has no value in args"):
        jacobian(run, "sigma", scene.y, args=(1.0,))


@pytest.mark.parametrize("call", ["jacobian", "columns", "vjp"])
def test_an_entry_of_a_vector_field_is_passed_with_its_tangents(call):
    x, v, s = vectors([[1.0, 2.0], [3.0, 4.0]]), vectors([[0.0, 0.0]] * 2), outputs(1)
    square = kernel_of("for i in x: v[i] = x[i] * x[i]", x=x, v=v)
    add = kernel_of(
        "s[0] = 3.0 * a[0] + a[1] * b[0]", "a: ti.types.vector(2, ti.f64), b: ti.types.vector(2, ti.f64)", s=s
    )
    run = lambda: (square(), add(v[0], b=v[1]))
    with no_warnings():
        if call == "vjp":
            J = vjp(run, x, s, np.ones(1))
        else:
            J = jacobian(run, x, s, chunk_size=None if call == "jacobian" else 3)[0]
    assert_allclose(J, [[6.0, 36.0], [24.0, 0.0]])


@pytest.mark.parametrize("mode", ["forward", "reverse"])
@pytest.mark.parametrize("is_stored", [False, True])
def test_entries_outside_of_a_field_or_array_raise_where_python_accesses_them(mode, is_stored):
    x, y, total = (ti.field(ti.f64, shape=n) for n in (2, 5, ()))
    array = ti.ndarray(ti.f64, shape=5)
    fill = kernel_of("for i in y: y[i] = x[0] * i; array[i] = x[1] * i", "array: A", y=y, x=x)
    for owner, index in ((y, -1), (y, 5), (array, -1), (array, 5), (array, 2**30)):  # the last ends the process

        def pipeline(owner=owner, index=index):
            fill(array)
            if is_stored:
                owner[index] = 2.0 * y[1]
            else:
                total[None] = owner[index]

        with pytest.raises(InvalidArgumentError, match=rf"entry \({index},\) .* of shape \(5,\).* outside"):
            jacobian(pipeline, x, total, mode=mode)


@pytest.mark.parametrize("mode", ["forward", "reverse"])
def test_a_loop_that_reads_entries_makes_few_calls_more_than_outside(mode):
    x, y = ti.field(ti.f64, shape=1), ti.field(ti.f64, shape=10)
    calls = []
    fill = kernel_of("for i in y: y[i] = x[0] * i", y=y, x=x)

    def pipeline():
        fill()
        count = [0]
        sys.setprofile(lambda frame, event, arg: count.__setitem__(0, count[0] + event.endswith("call")))
        for i in range(200):
            y[i % 10]
        sys.setprofile(None)
        calls.append(count[0])

    pipeline()
    for _ in range(2):
        jacobian(pipeline, x, y, mode=mode)
    assert max(calls) <= 3 * calls[0]


def calls_of_functions():
    """A call of each function of ``math`` and each of NumPy's of numbers, where s is 0.7, as texts, and its value."""
    found = {}
    modules = {"math": math, "np": np}
    names = [f"math.{name}" for name in dir(math) if callable(getattr(math, name)) and not name.startswith("_")]
    names += [f"np.{name}" for name in dir(np) if isinstance(getattr(np, name), np.ufunc)]
    for name in names:
        for arguments in ("s", "s + 1", "s, 1.5", "1.5, s", "s, 2", "[s, 2.0]", "[s, 2.0], [1.0, s]", "s, s, 2.0"):
            for entry in ("", "[0]", "[1]"):
                text = f"{name}({arguments}){entry}"
                try:
                    value = eval(text, {**modules, "s": 0.7})
                except (TypeError, ValueError, IndexError):
                    continue
                if isinstance(value, (float, np.floating)) and math.isfinite(value):
                    found[text] = float(value)
    return found


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_every_function_of_a_number_keeps_its_derivative_or_warns():
    texts = list(calls_of_functions())
    assert len(texts) > 150
    x, y, results = outputs(1), outputs(1), outputs(len(texts))
    copy_number = kernel_of("copy_number: y[0] = x[0]", y=y, x=x)
    lines = [f"    results[{n}] = {text}" for n, text in enumerate(texts)]
    source = "\n".join(["def pipeline():", "    copy_number()", "    s = y[0]", *lines])
    scope = {"math": math, "np": np, "copy_number": copy_number, "y": y, "results": results}
    exec(compile(source, "table.py", "exec"), scope)

    def values(s):
        write(x, [s])
        scope["pipeline"]()
        return read(results)

    differences = (values(0.7 + 1e-6) - values(0.7 - 1e-6)) / 2e-6
    write(x, [0.7])
    for mode in ("forward", "reverse"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", DerivativeWarning)
            found = jacobian(scope["pipeline"], x, results, mode=mode)[:, 0]
        warned = {w.lineno - 4 for w in caught if w.filename == "table.py"}
        wrong = np.flatnonzero(~np.isclose(found, differences, rtol=1e-5, atol=1e-7))
        assert [texts[n] for n in wrong if n not in warned] == []
        lost = {re.split(r"[.(]", texts[n])[1] for n in wrong if "([" not in texts[n]}
        assert lost == {"gamma", "lgamma", "modf", "frexp", "nextafter", "divmod"}
