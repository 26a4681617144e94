"""What Python stores to NumPy arrays and tensors between kernels is a constant, also where it equals what was there.

A number that is stored to its own place keeps its derivative.
"""

import functools
import operator

import numpy as np
import pytest
import taichi as ti
from captured_warnings import all_warnings, no_warnings
from differences import outputs, scalars
from kernel_texts import kernel_of, kernels_of
from numpy.testing import assert_allclose, assert_array_equal

from taichi_ext import DerivativeWarning, jacobian, jvp, vjp

pytestmark = [pytest.mark.usefixtures("ti64"), pytest.mark.cpu_only("arrays of float64 in the host's memory")]

N = 4
ARRAY = ti.types.ndarray(ti.f64, ndim=1)
VALUES = ([0.0, 0.0, 0.0, 0.0], [0.5, -1.0, 2.0, 3.0])  # 0 is what the stores below store


FUNCTIONS = kernels_of(
    """
zero_first: t[0] = 0.0
zero_by_number: for i in range(2): t[i] *= 0.0
swapped: t[0], t[1] = t[1], t[0]
to_itself: t[:] = t
added: t += 0.0
""",
    decorator="",
    arguments="(t)",
)
zero_first = FUNCTIONS["zero_first"]
EVERYWHERE = [0, 1, 2, 3]
STORES = {
    "entry": (FUNCTIONS["zero_first"], [0]),
    "slice": (lambda t: operator.setitem(t, slice(1, 3), 0.0), [1, 2]),
    "mask": (lambda t: t.__setitem__(np.array([True, False, True, False]), 0.0), [0, 2]),
    "augmented": (FUNCTIONS["zero_by_number"], [0, 1]),
    "plus nothing": (FUNCTIONS["added"], []),
    "itself": (FUNCTIONS["to_itself"], []),
    "swap": (FUNCTIONS["swapped"], [0, 1]),
    "reshape": (lambda t: t.reshape(2, 2).__setitem__((1, 1), 0.0), [3]),
    "transposed": (lambda t: t.reshape(2, 2).T.__setitem__((0, 1), 0.0), [2]),
    "strided view": (lambda t: t[::2].__setitem__(slice(None), 0.0), [0, 2]),
    "bits": (lambda t: t.view(np.int64).__setitem__(1, t.view(np.int64)[1]), []),
    "memoryview": (lambda t: memoryview(t).__setitem__(1, 0.0), [1]),
    "out where": (lambda t: np.multiply(t, 0.0, out=t, where=np.arange(4) == 2), [2]),
    "reads only": (lambda t: (t[0] + t.sum(), np.multiply(t, 0.0), t.copy().fill(0.0)), []),
    "another array": (lambda t: np.zeros(4).__setitem__(0, 0.0), []),
}


class Scene:
    def __init__(self, make=np.zeros):
        self.x, self.y = scalars([0.0] * N), outputs(N)
        self.t = make(N)
        x, y = self.x, self.y
        load = kernel_of("for i in t: t[i] = 2.0 * x[i]", "t: A1", x=x)
        read = kernel_of("for i in t: y[i] = 3.0 * t[i]", "t: A1", y=y)
        self.load, self.read = load, read

    def check(self, store, cleared):
        pipeline = lambda t: (self.load(t), store(t), self.read(t))
        for values in VALUES:
            self.x.from_numpy(np.array(values))
            pipeline(self.t)
            plain, left = self.y.to_numpy(), self.t.tolist()
            with all_warnings() as caught:
                J = jacobian(pipeline, self.x, self.y, args=(self.t,))
            expected = np.full(N, 6.0)
            expected[cleared] = 0.0
            assert_allclose(J, np.diag(expected), atol=1e-14)
            assert_array_equal(self.y.to_numpy(), plain)
            assert self.t.tolist() == left
            messages = [str(w.message) for w in caught if issubclass(w.category, DerivativeWarning)]
            changed = [m for m in messages if "changed from Python" in m]
            assert [m.split(" entries")[0] for m in changed] == ([str(len(cleared))] if cleared else [])


@pytest.fixture(scope="module")
def scene(ti64):
    return Scene()


@pytest.mark.mostly_sweep(every=2)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", STORES)
def test_stores_to_numpy_arrays(scene, name):
    scene.check(*STORES[name])


TENSOR_STORES = {
    "entry": (FUNCTIONS["zero_first"], [0]),
    "plus nothing": (FUNCTIONS["added"], []),
    "transposed": (lambda t: t.view(2, 2).t().__setitem__((0, 1), 0.0), [2]),
    "zero_ of a part": (lambda t: t[1:3].zero_(), [1, 2]),
    "through NumPy": (lambda t: t.numpy().__setitem__(1, 0.0), [1]),
    "detached": (lambda t: t.detach().__setitem__(1, 0.0), [1]),
}


@pytest.mark.parametrize("name", TENSOR_STORES)
def test_stores_to_tensors(name):
    torch = pytest.importorskip("torch")
    Scene(functools.partial(torch.zeros, dtype=torch.float64)).check(*TENSOR_STORES[name])


def test_functions_of_torch_that_store():
    torch = pytest.importorskip("torch")
    scene = Scene(functools.partial(torch.zeros, dtype=torch.float64))
    scene.check(lambda t: torch.mul(t, 0.0, out=t), EVERYWHERE)
    scene.check(lambda t: torch.nn.init.zeros_(t), EVERYWHERE)
    scene.check(lambda t: torch.zero_(t[:2]), [0, 1])


def test_a_parameter_that_is_stored_to():
    """The numbers that the parameter held are no longer read: its columns there are zero."""
    y = outputs(N)
    read = kernel_of("read(t: A1): for i in t: y[i] = 3.0 * t[i]", y=y)

    def pipeline(t):
        t[1:3] = 0.0
        read(t)

    t = np.zeros(N)
    with pytest.warns(DerivativeWarning, match="2 entries of .* were changed from Python"):
        J = jacobian(pipeline, t, y, args=(t,))
    assert_allclose(J, np.diag([3.0, 0.0, 0.0, 3.0]))


def test_a_store_after_the_last_kernel():
    x, t = scalars([0.0] * N), np.zeros(N)
    load = kernel_of("for i in t: t[i] = 2.0 * x[i]", "t: A1", x=x)

    def pipeline(t):
        load(t)
        t[0] = 0.0

    with pytest.warns(DerivativeWarning, match="1 entries of .* were changed from Python"):
        J = jacobian(pipeline, x, t, args=(t,))
    assert_allclose(J, np.diag([0.0, 2.0, 2.0, 2.0]))


add_force = kernel_of("for i in f: f[i] += k[i] * u[i]", "u: A1, k: A1, f: A1")
move = kernel_of("for i in u: u[i] += 0.1 * f[i]", "f: A1, u: A1")


class TestKernelsThatAddOrWriteAPart:
    """Kernels that do not read an array keep its tangents, so that stores before them count."""

    MODES = {
        "J": lambda *given, **more: jacobian(*given, **more),
        "columns": lambda *given, **more: jacobian(*given, **more, chunk_size=1),
        "csr": lambda *given, **more: jacobian(*given, **more, format="csr").toarray(),
        "jvp": lambda kernel, x, y, **more: jvp(kernel, x, np.eye(len(x)), y, **more).T,
        "vjp": lambda kernel, x, y, **more: vjp(kernel, x, y, np.eye(len(x)), **more),
    }

    @pytest.mark.mostly_sweep("vjp-number", "J-number")
    @pytest.mark.filterwarnings("ignore::taichi_ext.DerivativeWarning")
    @pytest.mark.parametrize("steps", ["number", "variable"])
    @pytest.mark.parametrize("mode", MODES)
    def test_other_steps_and_sizes(self, mode, steps):
        """Calls of one prepared form with more steps, or larger arrays, than the first; forces are zeroed in each."""
        if mode == "csr":
            pytest.importorskip("scipy.sparse")
        count = 0

        def simulate(u, k, f, given):
            for _ in range(given if steps == "number" else count):
                f[:] = 0.0
                add_force(u, k, f)
                move(f, u)

        for count, size in ((1, 3), (3, 3), (2, 5), (5, 5), (3, 3)) if steps == "number" else ((2, 3), (4, 3), (3, 3)):
            k = 1.0 + np.arange(size)
            for u in (np.zeros(size), np.where(np.arange(size) == 1, 0.0, 0.3)):
                f = np.zeros(size)
                given = (u, k, f, count if steps == "number" else 0)
                J = self.MODES[mode](simulate, u, f, args=given)
                assert_allclose(J, np.diag(k * (1.0 + 0.1 * k) ** (count - 1)), rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("value", [0.0, 2.0])
    def test_a_part(self, value):
        x, y = scalars([value] * N), outputs(N)
        load = kernel_of("for i in t: t[i] = x[i]", "t: A1", x=x)
        write_first = kernel_of("t[0] = 2.0 * x[0]", "t: A1", x=x)
        read = kernel_of("for i in t: y[i] = 3.0 * t[i]", "t: A1", y=y)

        def pipeline(t):
            load(t)
            t[:2] = 0.0
            write_first(t)
            read(t)

        with pytest.warns(DerivativeWarning, match="changed from Python"):
            J = jacobian(pipeline, x, y, args=(np.zeros(N),))
        assert_allclose(J, np.diag([6.0, 0.0, 3.0, 3.0]))


@pytest.mark.mostly_sweep("3")
@pytest.mark.parametrize("options", [{"chunk_size": 1}, {"chunk_size": 3}, {"format": "csr"}], ids=["1", "3", "csr"])
def test_equal_stores_in_each_run(scene, options):
    """The runs begin again once they are known; what the first run says of cut paths is said, too."""
    b = scalars([0.0])
    cut = kernel_of("y[0] += ti.floor(b[0])", y=scene.y, b=b)

    def pipeline(t):
        scene.load(t)
        t[0] = 0.0
        scene.read(t)
        cut()

    scene.x.fill(0.0)
    with pytest.warns(DerivativeWarning, match="changed from Python"), pytest.warns(match="zero: paths end at"):
        J, _ = jacobian(pipeline, [scene.x, b], scene.y, args=(scene.t,), **options)
    assert_allclose(J.toarray() if "format" in options else J, np.diag([0.0, 6.0, 6.0, 6.0]))


def test_the_error_of_a_store_is_the_user_s_own(scene):
    """Nothing is stored, and nothing is cleared."""

    def pipeline(t):
        scene.load(t)
        try:
            t[7] = 0.0
        except IndexError:
            t.setflags(write=False)
            with pytest.raises(ValueError, match="read-only"):
                t[0] = 0.0
            t.setflags(write=True)
        scene.read(t)

    with no_warnings():
        assert_allclose(jacobian(pipeline, scene.x, scene.y, args=(scene.t,)), 6.0 * np.eye(N))


@ti.kernel
def scale_into(x: ARRAY, source: ARRAY, target: ARRAY):
    for i in target:
        target[i] = x[i] * source[i]


class TestViews:
    """Kernels store through other views of an array than Python, and than the end of the run compares."""

    VIEWS = {
        "part": lambda t: t[2:5],
        "row": lambda t: t.reshape(2, 3)[1],
        "row of a transposed array": lambda t: t.reshape(3, 2, order="F").T[1],
        "reshaped": lambda t: t.reshape(3, 2)[1:].reshape(-1)[:3],
        "tensor": lambda t: pytest.importorskip("torch").from_numpy(t)[3:],
    }

    @pytest.mark.parametrize("view", VIEWS)
    @pytest.mark.parametrize("mode", ["forward", "reverse"])
    def test_numbers_of_kernels_are_not_those_of_python(self, view, mode):
        """A kernel stores the zeros that were there."""
        x, source, buffer = np.array([0.0, 0.4, 0.0]), np.array([1.0, 2.0, 3.0]), np.zeros(6)
        pipeline = lambda x, source, buffer: scale_into(x, source, self.VIEWS[view](buffer))
        with no_warnings():
            J = jacobian(pipeline, x, buffer, args=(x, source, buffer), mode=mode)
        places = np.asarray(self.VIEWS[view](np.arange(6.0))).astype(int)
        expected = np.zeros((6, 3))
        expected[places] = np.diag(source)
        assert_array_equal(J, expected)

    @pytest.mark.parametrize("view", VIEWS)
    @pytest.mark.filterwarnings("ignore::taichi_ext.DerivativeWarning")
    def test_zeros_of_python_before_a_kernel_that_reads_a_view(self, view):
        """Python stores to the whole array; kernels write and read parts."""
        x, ones, buffer, y = np.array([0.0, 0.4, 0.0]), np.ones(3), np.zeros(6), np.zeros(3)

        def pipeline(x, ones, buffer, y):
            part = self.VIEWS[view](buffer)
            scale_into(x, ones, part)
            buffer[int(places[0])] = 0.0
            scale_into(ones, part, y)

        places = np.asarray(self.VIEWS[view](np.arange(6.0))).astype(int)
        J = jacobian(pipeline, x, y, args=(x, ones, buffer, y))
        assert_array_equal(J, np.diag([0.0, 1.0, 1.0]))
