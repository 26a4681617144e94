"""Columns in several runs: every run of the pipeline has to be the same program, or it raises."""

import itertools
import random
import warnings

import numpy as np
import pytest
import taichi as ti
from captured_warnings import no_warnings
from differences import outputs, scalars
from kernel_texts import kernel_of, kernels_of
from numpy.testing import assert_allclose, assert_array_equal

from taichi_ext import InvalidArgumentError, hessian, jacobian

pytestmark = [
    pytest.mark.usefixtures("ti64"),
    pytest.mark.cpu_only("arrays of float64 in the host's memory"),
    pytest.mark.filterwarnings("ignore::taichi_ext.DerivativeWarning"),
]

PAIR = ti.types.vector(2, ti.f64)
STATE = ti.types.struct(a=ti.f64, n=ti.i32)


KERNELS = """
    number(s: ti.f64): for i in x: y[i] = s * x[i]
    vector(v: PAIR): for i in x: y[i] = v[1] * x[i]
    struct(s: STATE): for i in x: y[i] = s.a * s.n * x[i]
    field: for i in x: y[i] = c[i] * x[i]
    fields(a: ti.template(), b: ti.template()): for i in x: y[i] = (a[i] + 2 * b[i]) * x[i]
    of_array(a: A1): for i in x: y[i] = a[i] * x[i]
    load(a: A1): for i in x: a[i] = 2.0 * x[i]
    template(f: ti.template()): for i in x: y[i] = f[i] * x[i]
    other(s: ti.f64): for i in x: y[i] = 2.0 * s * x[i]
"""


class Scene:
    """Kernels that take what Python gives them, and a state of Python's that changes from run to run."""

    def __init__(self):
        self.x, self.y, self.c, self.d = scalars([1.0, 2.0, 3.0]), outputs(3), outputs(3), outputs(3)
        self.swapped = [self.c, self.d]
        self.array, self.out = np.ones(3), np.zeros(3)
        self.draws, self.counter, self.time = np.random.default_rng(1), itertools.count(1), 0.0
        x, y = self.x, self.y
        vars(self).update(kernels_of(KERNELS, **globals(), x=x, y=y, c=self.c))
        self.numbers = [self.number, self.other]
        self.arrays = [ti.ndarray(ti.f64, 3) for _ in range(2)]
        self.models = [Model(2.0, x, y), Model(3.0, x, y)]

    def next(self):
        return float(next(self.counter))

    def tick(self):
        self.time += 0.5
        return self.time

    def entry(self, target, value):
        target[1] = value
        return target

    def swap(self):
        return self.swapped[:: 1 if next(self.counter) % 2 else -1]


@ti.data_oriented
class Model:
    def __init__(self, factor, x, y):
        self.factor, self.x, self.y = factor, x, y

    @ti.kernel
    def scale(self):
        for i in self.x:
            self.y[i] = self.factor * self.x[i]


def made_of_a_number(s):
    factor = s.next()
    own = kernel_of("for i in s.x: s.y[i] = factor * s.x[i]", s=s, factor=factor)
    own()


DIFFERENT = {
    "number": lambda s: s.number(s.next()),
    "integer": lambda s: s.number(next(s.counter)),
    "vector": lambda s: s.vector(ti.Vector([1.0, s.next()])),
    "struct": lambda s: s.struct(STATE(a=1.0, n=next(s.counter))),
    "entry of a field": lambda s: (s.entry(s.c, s.next()), s.field()),
    "new array": lambda s: s.of_array(np.full(3, s.next())),
    "array in place": lambda s: (s.entry(s.array, s.next()), s.of_array(s.array)),
    "swapped fields": lambda s: s.fields(*s.swap()),
    "more launches": lambda s: [s.number(1.0) for _ in range(int(s.next()))],
    "another kernel of the same arguments": lambda s: s.numbers[int(s.next()) % 2](1.0),
    "another field to copy": lambda s: (s.c.copy_from([s.x, s.d][int(s.next()) % 2]), s.field()),
    "a new object": lambda s: Model(s.next(), s.x, s.y).scale(),
    "a kernel that is made of a number": made_of_a_number,
    "made in the first run alone": lambda s: s.of_array(ti.ndarray(ti.f64, 3) if s.next() < 2 else s.arrays[0]),
    "stored to an array with tangents": lambda s: (s.load(s.out), s.entry(s.out, s.next()), s.of_array(s.out)),
    "after a read": lambda s: (s.number(1.0), s.number(s.y[0] + s.next())),
}


@pytest.mark.mostly_sweep(
    *("number", "vector", "swapped fields"),
    *("another kernel of the same arguments", "made in the first run alone", "after a read"),
)
@pytest.mark.parametrize("name", DIFFERENT)
def test_runs_that_differ_raise(name):
    """Nothing of the state is changed then; in one run, the same pipeline has its Jacobian."""
    scene = Scene()
    state = [f.to_numpy() for f in (scene.x, scene.y, scene.c, scene.d)]
    arrays = [scene.array.copy(), scene.out.copy()]

    def pipeline(array, out):
        DIFFERENT[name](scene)

    args = (scene.array, scene.out)
    with pytest.raises(
        InvalidArgumentError, match="Python's state differs between them: .*Prepare changing objects before"
    ):
        jacobian(pipeline, scene.x, scene.y, args=args, chunk_size=1)
    for field, values in zip((scene.x, scene.y, scene.c, scene.d), state, strict=True):
        assert_array_equal(field.to_numpy(), values)
    for array, values in zip(args, arrays, strict=True):
        assert_array_equal(array, values)
    jacobian(pipeline, scene.x, scene.y, args=args)


def made_in_the_run(s):
    t, u = ti.field(ti.f64, 3), np.empty(3)
    t.fill(2.0)
    t[1] = 3.0
    own = kernel_of("for i in s.x: s.y[i] = t[i] * s.x[i]", s=s, t=t)
    own()
    s.load(u)
    s.of_array(u)
    v = ti.ndarray(ti.f64, 3)
    s.load(v)
    s.of_array(v)
    Model(2.0, s.x, s.y).scale()


ALIKE = {
    "constants": lambda s: (s.fields(s.c, s.d), s.fields(s.d, s.c), s.number(0.5), s.vector([1.0, 2.0])),
    "seeded draws": lambda s: s.number(np.random.default_rng(3).random()),
    "draws of a generator": lambda s: (s.number(s.draws.random()), s.of_array(s.draws.random(3))),
    "draws of all": lambda s: s.number(random.random() + np.random.random()),
    "clock": lambda s: (s.number(s.tick()), s.number(s.y[0] + s.tick())),
    "nan": lambda s: s.vector([float("nan"), 2.0]),
    "made in the run": made_in_the_run,
    "numbers of a kernel": lambda s: (s.load(s.out), s.number(float(s.out[0])), s.number(s.y[1])),
    "uninitialised memory": lambda s: (out := np.empty(3), s.load(out), s.of_array(out)),
}


@pytest.mark.mostly_sweep("constants-1", "nan-2", "made in the run-1")
@pytest.mark.parametrize("chunk_size", [1, 2])
@pytest.mark.parametrize("name", ALIKE)
def test_runs_that_do_the_same_do_not_raise(name, chunk_size):
    found = []
    for size in (None, chunk_size):
        scene = Scene()
        random.seed(1)
        np.random.seed(1)
        J = jacobian(lambda scene=scene: ALIKE[name](scene), scene.x, scene.y, chunk_size=size)
        found.append((J, [scene.time, scene.draws.random(), random.random(), np.random.random()]))
    assert_array_equal(found[1][0], found[0][0])
    assert found[1][1] == found[0][1]
    assert found[0][0].any()


def energy_of(scene, table, name):
    """An energy of what a scene computes, for which Python passes on a number with a tangent: H takes products."""
    e = outputs()
    sum_up = kernel_of("for i in scene.y: e[None] += a * scene.y[i] ** 2", "a: ti.f64", scene=scene, e=e)

    def run(array, out):
        e[None] = 0.0
        table[name](scene)
        sum_up(scene.y[0])

    return run, e


@pytest.mark.mostly_sweep("number", "array in place")
@pytest.mark.parametrize("name", [*DIFFERENT][:-3])  # the next ones see the arbiter's runs, or have no adjoint
def test_runs_for_columns_of_a_hessian_that_differ_raise(name):
    scene = Scene()
    run, e = energy_of(scene, DIFFERENT, name)
    state = scene.y.to_numpy()
    with pytest.raises(InvalidArgumentError, match="Python's state differs between them"):
        hessian(run, scene.x, e, args=(scene.array, scene.out), chunk_size=1)
    assert_array_equal(scene.y.to_numpy(), state)


@pytest.mark.mostly_sweep("constants", "uninitialised memory")
@pytest.mark.parametrize("name", ALIKE)
def test_runs_for_columns_of_a_hessian_that_do_the_same_do_not_raise(name):
    found = []
    for size in (None, 1):
        scene = Scene()
        random.seed(1)
        np.random.seed(1)
        run, e = energy_of(scene, ALIKE, name)
        found.append(hessian(run, scene.x, e, args=(scene.array, scene.out), chunk_size=size))
    assert_allclose(found[1], found[0], rtol=1e-12)
    assert found[0].any()


def test_runs_for_a_limit_on_memory_are_compared():
    scene = Scene()
    z = outputs(3)
    last = kernel_of("for i in z: z[i] = scene.y[i]", z=z, scene=scene)
    pipeline = lambda: (scene.number(scene.next()), last())
    with pytest.raises(InvalidArgumentError, match="Python's state differs between them"):
        jacobian(pipeline, scene.x, z, max_memory=48)


class TestTheUsersOwnObjects:
    """A pipeline gets, keeps and computes what it does in a plain run; nothing of a call outlives it."""

    @pytest.fixture
    def kernels(self):
        y = outputs(3)
        square = kernel_of("for i in s: y[i] = s[i] ** 2", "s: A1", y=y)
        scale = kernel_of("for i in s: y[i] = s[i] * by", "s: A1, by: ti.f64", y=y)
        return y, square, scale

    @pytest.mark.parametrize("kind", ["numpy", "torch"])
    def test_arrays(self, kernels, kind):
        y, square, _ = kernels
        front = np.array([1.0, 2.0, 3.0])
        if kind == "torch":
            front = pytest.importorskip("torch").from_numpy(front)
        kept = []

        def pipeline(a):
            kept.append((a, type(a), id(a), a is front, a[1:], a * 2))
            square(a)

        J = jacobian(pipeline, front, y, args=(front,))
        assert_allclose(J, np.diag(2 * np.array([1.0, 2.0, 3.0])))
        found, own_type, own_id, is_front, part, double = kept[0]
        assert found is front
        assert is_front
        assert own_id == id(front)
        assert own_type is type(part) is type(double) is type(front)

    VIEWS = {
        "squeeze": np.squeeze,
        "atleast_1d": np.atleast_1d,
        "split": lambda a: np.split(a, 1)[0],
        "transpose": lambda a: a.T,
        "asarray": np.asarray,
        "rows": lambda a: [*a.reshape(1, 3)][0],
        "frombuffer": np.frombuffer,
    }

    @pytest.mark.parametrize("name", VIEWS)
    def test_views_of_a_parameter_do_not_warn(self, kernels, name):
        y, square, _ = kernels

        def pipeline(a):
            square(self.VIEWS[name](a))

        a = np.array([1.0, 2.0, 3.0])
        with no_warnings():
            warnings.filterwarnings("ignore", ".* was prepared")  # each case makes its own pipeline
            assert_allclose(jacobian(pipeline, a, y, args=(a,)), np.diag(2 * a))
