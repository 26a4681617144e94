"""What Quadrants alone has: its own kinds of arguments, and traps of its tracer. Not collected on Taichi."""

import dataclasses
import linecache

import numpy as np
import pytest
import taichi as qd
from kernel_texts import func_of, kernel_of
from many_threads import in_threads
from numpy.testing import assert_allclose
from taichi_program import initialise

import taichi_ext
from taichi_ext import UnsupportedError, check_jacobian, jacobian, vjp

X = np.array([0.7, -0.4, 1.3])
pytestmark = pytest.mark.usefixtures("ti64")


def fields(*values):
    made = []
    for value in values:
        made.append(qd.field(qd.f64, np.shape(value)))
        made[-1].from_numpy(np.array(value))
    return made


@dataclasses.dataclass
class State:
    x: qd.types.NDArray[qd.f64, 1]
    k: qd.f64


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: qd.types.NDArray[qd.f64, 1]


@dataclasses.dataclass(frozen=True)
class Nested:
    inner: Frozen
    y: qd.types.NDArray[qd.f64, 1]


@dataclasses.dataclass
class Fields:
    x: qd.template()
    y: qd.template()


def array(values):
    made = qd.ndarray(qd.f64, np.shape(values))
    made.from_numpy(np.array(values))
    return made


def test_a_dataclass_of_an_array_and_a_number():
    @qd.kernel
    def k(s: State, y: qd.types.NDArray[qd.f64, 1]):
        for i in range(3):
            y[i] = s.k * qd.sin(s.x[i])

    s, y = State(array(X), 2.0), array(np.zeros(3))
    J = jacobian(k, {"x": "s.x", "k": "s.k"}, "y", args=(s, y))
    assert_allclose(J["x"], np.diag(2 * np.cos(X)))
    assert_allclose(J["k"], np.sin(X))
    s.k = 5.0
    assert_allclose(jacobian(k, s.x, y, args=(s, y)), np.diag(5 * np.cos(X)))
    s.x = array(2 * X)
    assert_allclose(jacobian(k, s.x, y, args=(s, y)), np.diag(5 * np.cos(2 * X)))


def test_a_dataclass_that_changes_after_it_was_passed():
    @qd.kernel
    def k(s: State, y: qd.types.NDArray[qd.f64, 1]):
        for i in range(3):
            y[i] = s.k * qd.sin(s.x[i])

    x, middle, y = array(X), array(np.zeros(3)), array(np.zeros(3))
    s = State(x, 2.0)

    def run():
        s.x, s.k = x, 2.0
        k(s, middle)
        s.x, s.k = middle, 3.0
        k(s, y)

    expected = 6 * np.cos(2 * np.sin(X)) * np.cos(X)
    assert_allclose(jacobian(run, x, y), np.diag(expected))
    assert_allclose(vjp(run, x, y, X), X * expected)


def test_nested_and_frozen_dataclasses():
    @qd.func
    def shifted(f: Frozen, i):
        return f.x[i] ** 2

    @qd.kernel
    def k(n: Nested):
        for i in range(3):
            n.y[i] = shifted(n.inner, i) + n.inner.x[(i + 1) % 3]

    n = Nested(Frozen(array(X)), array(np.zeros(3)))
    expected = np.diag(2 * X) + np.roll(np.eye(3), 1, axis=1)
    assert_allclose(jacobian(k, "n.inner.x", "n.y", args=(n,)), expected)
    assert_allclose(vjp(k, n.inner.x, n.y, np.arange(3.0), args=(n,)), np.arange(3.0) @ expected)


def test_a_dataclass_of_fields():
    k = kernel_of("for i in range(3): s.y[i] = s.x[i] * s.x[(i + 1) % 3]", "s: Fields", Fields=Fields)
    s = Fields(*fields(X, np.zeros(3)))
    roll = np.roll(X, -1)
    assert_allclose(jacobian(k, s.x, s.y, args=(s,)), np.diag(roll) + np.roll(np.eye(3), 1, axis=1) * X[:, None])


@pytest.mark.parametrize("backend", ["FIELD", "NDARRAY"])
@pytest.mark.parametrize("layout", [None, (1, 0)], ids=["", "permuted"])
def test_tensors(backend, layout):
    options = {} if layout is None else {"layout": layout}
    x = qd.tensor(qd.f64, (2, 3), backend=qd.Backend[backend], **options)
    y = qd.tensor(qd.f64, (2, 3), backend=qd.Backend[backend], **options)

    @qd.kernel
    def k(x: qd.Tensor, y: qd.Tensor):
        for i, j in qd.ndrange(2, 3):
            y[i, j] = x[i, j] ** 2 * (1 + i + 10 * j)

    values = np.arange(1.0, 7.0).reshape(2, 3)
    x.from_numpy(values)
    J = jacobian(k, x, y, args=(x, y))
    assert J.shape == (2, 3, 2, 3)
    i, j = np.indices((2, 3))
    expected = 2 * values * (1 + i + 10 * j)
    assert_allclose(J.reshape(6, 6), np.diag(expected.ravel()))
    assert_allclose(vjp(k, x, y, values, args=(x, y)), expected * values)


@dataclasses.dataclass
class Tensors:
    x: qd.Tensor
    y: qd.Tensor


@pytest.mark.parametrize("backend", ["FIELD", "NDARRAY"])
def test_a_dataclass_of_tensors(backend):
    k = kernel_of("for i in range(3): s.y[i] = s.x[i] ** 2", "s: Tensors", Tensors=Tensors)
    s = Tensors(*(qd.tensor(qd.f64, (3,), backend=qd.Backend[backend]) for _ in range(2)))
    s.x.from_numpy(X)
    assert_allclose(jacobian(k, s.x, s.y, args=(s,)), np.diag(2 * X))
    assert_allclose(jacobian(lambda: k(s), s.x, s.y), np.diag(2 * X))
    assert_allclose(vjp(k, "s.x", "s.y", np.ones(3), args=(s,)), 2 * X)


def test_a_bare_template_and_static_arguments():
    @qd.kernel
    def k(x: qd.template, y: qd.template, n: qd.template()):
        for i in range(3):
            for _ in qd.static(range(n)):
                y[i] += x[i] ** 2

    x, y = fields(X, np.zeros(3))
    assert_allclose(jacobian(k, x, y, args=(x, y, 3)), np.diag(6 * X))


def test_fastcache_and_graphs():
    x, y = array(X), array(np.zeros(3))

    @qd.kernel(fastcache=True)
    def k(x: qd.types.NDArray[qd.f64, 1], y: qd.types.NDArray[qd.f64, 1]):
        for i in range(3):
            y[i] = qd.sin(x[i])

    @qd.kernel(graph=True)
    def g(x: qd.types.NDArray[qd.f64, 1], y: qd.types.NDArray[qd.f64, 1]):
        for i in range(3):
            y[i] = qd.sin(x[i])
        for i in range(3):
            y[i] *= x[i]

    assert_allclose(jacobian(k, x, y, args=(x, y)), np.diag(np.cos(X)))
    assert_allclose(jacobian(g, x, y, args=(x, y)), np.diag(X * np.cos(X) + np.sin(X)))


def test_loops_of_a_graph():
    """They end where their flag is 0 after an iteration."""

    @qd.kernel(graph=True)
    def k(
        x: qd.types.NDArray[qd.f64, 1],
        y: qd.types.NDArray[qd.f64, 1],
        n: qd.types.NDArray[qd.i32, 0],
        m: qd.types.NDArray[qd.i32, 0],
    ):
        while qd.graph.do_while(n):
            for i in range(1):
                m[None] = 2
            while qd.graph.do_while(m):
                for i in range(3):
                    y[i] += x[i] * (1 + y[i])
                for i in range(1):
                    m[None] -= 1
            for i in range(1):
                n[None] -= 1

    x, y, n, m = array(X), array(np.zeros(3)), qd.ndarray(qd.i32, ()), qd.ndarray(qd.i32, ())

    def run():
        n.fill(2)
        k(x, y, n, m)

    expected = 4 * (1 + X) ** 3  # 1 + y is (1 + x)**4
    assert_allclose(jacobian(run, x, y), np.diag(expected))
    assert_allclose(y.to_numpy(), (1 + X) ** 4 - 1)
    y.fill(0)
    assert_allclose(vjp(run, x, y, X), X * expected)


def test_sections_of_graphs_and_streams():
    x, y = fields(X, np.zeros(3))

    @qd.kernel(graph=True)
    def g():
        with qd.graph.parallel_context():
            with qd.graph.parallel():
                for i in range(3):
                    y[i] = qd.volatile_load(x[i]) ** 2

    @qd.kernel
    def s():
        with qd.stream_parallel():
            for i in range(3):
                y[i] = x[i] ** 2

    for kernel in (g, s):
        assert_allclose(jacobian(kernel, x, y), np.diag(2 * X))
        assert_allclose(vjp(kernel, x, y, np.ones(3)), 2 * X)


def test_streams_in_a_pipeline():
    x, y = fields(X, np.zeros(3))
    k = kernel_of("for i in range(3): y[i] = ti.sin(x[i])", y=y, x=x)
    stream = qd.create_stream()

    def run():
        k(qd_stream=stream)

    assert_allclose(jacobian(run, x, y), np.diag(np.cos(X)))


@qd.data_oriented
class Solver:
    def __init__(self, gain=2.0):
        (self.x, self.y), self.gain = fields(X, np.zeros(3)), gain

    @qd.func
    def shape(self, at, i):
        return self.gain * qd.sin(at) * self.x[i]

    @qd.func
    def call(self, function: qd.template(), i):
        return function(0.5, i)

    @qd.kernel
    def step(self):
        for i in range(3):
            self.y[i] = self.call(self.shape, i)


def test_a_bound_function_passed_as_a_value():
    s = Solver()
    assert_allclose(jacobian(s.step, s.x, s.y), np.diag(np.full(3, 2 * np.sin(0.5))))
    assert_allclose(jacobian(s.step, "self.gain", s.y), np.sin(0.5) * X)


def test_layers_of_a_bound_function():
    @qd.data_oriented
    class Plane:
        def __init__(self):
            self.edge, self.image = fields([1.3], np.zeros((4, 4)))

        @qd.func
        def shape(self, n, x, y):
            return self.edge[0] + 0.3 * y - x, 1.0

        @qd.kernel
        def render(self):
            for x, y in self.image:
                self.image[x, y] = taichi_ext.layers(self.shape, 1, 0.0, at=(float(x), float(y)))

    plane = Plane()
    check = check_jacobian(plane.render, plane.edge, plane.image)
    assert check, str(check)
    assert np.abs(jacobian(plane.render, plane.edge, plane.image)).max() > 0.5


@pytest.mark.parametrize("n", [2, 3])
def test_eigenvalues_ascend(n):
    """Those of Taichi descend in two dimensions."""
    (x,), y = fields(np.random.default_rng(n).standard_normal((n, n))), qd.field(qd.f64, n)

    @qd.kernel
    def k():
        a = qd.Matrix([[x[i, j] + x[j, i] for j in range(n)] for i in range(n)])
        values, vectors = qd.sym_eig(a)
        for i in qd.static(range(n)):
            y[i] = values[i] ** 2 + vectors[0, i] ** 2

    check = check_jacobian(k, x, y)
    assert check, str(check)


# --- what is not supported --------------------------------------------------------------------------------------------


def test_an_array_that_is_a_member_of_an_object():
    @qd.data_oriented
    class Owner:
        def __init__(self):
            (self.x, self.y), self.w, self.v = fields(X, np.zeros(3)), array([1.0, 2.0, 3.0]), array(np.zeros(3))

        @qd.kernel
        def step(self):
            for i in range(3):
                self.y[i] = self.w[i] * qd.sin(self.x[i])

        @qd.kernel
        def within(self):
            for i in range(3):
                self.v[i] = self.w[i] ** 2

    s = Owner()
    for run, params, outputs in ((s.step, s.x, s.y), (lambda: s.within(), s.w, s.v)):
        with pytest.raises(UnsupportedError, match=r'File ".*test_quadrants.py", line \d+.*(\n.*)*member'):
            jacobian(run, params, outputs)


def test_what_depends_on_the_order_of_threads_and_checkpoints():
    x, y, flag = array(X), array(np.zeros(3)), qd.ndarray(qd.i32, ())

    @qd.kernel
    def exchanged(x: qd.types.NDArray[qd.f64, 1], y: qd.types.NDArray[qd.f64, 1]):
        for i in range(3):
            qd.atomic_exchange(y[i], x[i])

    @qd.kernel
    def compared(x: qd.types.NDArray[qd.f64, 1], y: qd.types.NDArray[qd.f64, 1]):
        for i in range(3):
            qd.atomic_cas(y[i], 0.0, x[i])

    @qd.kernel(graph=True, checkpoints=True)
    def paused(x: qd.types.NDArray[qd.f64, 1], y: qd.types.NDArray[qd.f64, 1], flag: qd.types.NDArray[qd.i32, 0]):
        with qd.checkpoint(0, yield_on=flag):
            for i in range(3):
                y[i] = x[i]

    for kernel, args in ((exchanged, (x, y)), (compared, (x, y)), (paused, (x, y, flag))):
        with pytest.raises(
            UnsupportedError, match=r'File ".*test_quadrants.py", line \d+(.*\n)*.*has no derivative here'
        ):
            jacobian(kernel, x, y, args=args)


def test_numbers_of_an_object_that_are_not_part_of_the_kernel():
    @qd.data_oriented(template_primitives=False)
    class Owner:
        def __init__(self):
            (self.x, self.y), self.k = fields(X, np.zeros(3)), 2.0

        @qd.kernel
        def step(self):
            for i in range(3):
                self.y[i] = self.k * qd.sin(self.x[i])

    s = Owner()
    s.step()
    assert_allclose(jacobian(s.step, s.x, s.y), np.diag(2 * np.cos(X)))
    assert_allclose(jacobian(s.step, "self.k", s.y), np.sin(X))
    s.k = 5.0
    s.step()
    assert_allclose(s.y.to_numpy(), 5 * np.sin(X))
    with pytest.raises(
        UnsupportedError, match=r'File ".*test_quadrants.py", line \d+(.*\n)*.*self.k has changed from 2'
    ):
        jacobian(s.step, s.x, s.y)


def test_optional_arrays():
    @qd.kernel
    def k(x: qd.types.NDArray[qd.f64, 1], w: qd.types.NDArray[qd.f64, 1] | None, y: qd.types.NDArray[qd.f64, 1]):
        for i in range(3):
            if qd.static(w is None):
                y[i] = x[i] ** 2
            else:
                y[i] = x[i] ** 2 * w[i]

    x, w, y = array(X), array([1.0, 2.0, 3.0]), array(np.zeros(3))
    for given, scale in ((None, 1.0), (w, np.array([1.0, 2.0, 3.0]))):
        assert_allclose(jacobian(k, x, y, args=(x, given, y)), np.diag(2 * X * scale))
        assert_allclose(vjp(k, x, y, np.ones(3), args=(x, given, y)), 2 * X * scale)


# --- traps ------------------------------------------------------------------------------------------------------------


def test_threads_that_launch_at_once_get_their_own_kernels():
    """Plain Quadrants stores what another thread compiled under the kernel's key: 11 of 12 such rounds are wrong."""
    for _ in range(3):
        initialise(default_fp=qd.f64)
        made = fields(*np.zeros((6, 3)))
        wrong = []

        def work(n, made=made, wrong=wrong):
            made[n].fill(n + 1.0)
            if not np.all(made[n].to_numpy() == n + 1):
                wrong.append((n, made[n].to_numpy()))

        in_threads(work, 6)
        assert not wrong


def nested(depth):
    """A kernel that calls functions within functions; the innermost is wrong."""
    lines = ["@qd.func", "def f0(a):", "    return a.nosuch"]
    for n in range(1, depth):
        lines += ["@qd.func", f"def f{n}(a):", f"    return f{n - 1}(a)"]
    lines += ["@qd.kernel", "def k():", "    for i in range(3):", f"        y[i] = f{depth - 1}(x[i])"]
    text, name = "\n".join(lines), f"<nested {depth}>"
    linecache.cache[name] = len(text), None, text.splitlines(True), name
    x, y = fields(X, np.zeros(3))
    scope = {"qd": qd, "x": x, "y": y}
    exec(compile(text, name, "exec"), scope)
    return scope["k"], x, y


def test_messages_do_not_double_with_each_nested_function():
    """Those of plain Quadrants have 8.8 million characters at 12 levels."""
    sizes = {}
    for depth in (3, 12):
        with pytest.raises(Exception) as error:
            jacobian(*nested(depth))
        sizes[depth] = len(str(error.value))
        assert "nosuch" in str(error.value)
    assert sizes[12] < 8 * sizes[3]


def test_loops_that_the_reverse_mode_of_quadrants_refuses_have_a_gradient():
    x, total = qd.field(qd.f64, 3, needs_grad=True), qd.field(qd.f64, (), needs_grad=True)
    x.from_numpy(X)
    cubed = func_of("cubed(a): return a * a * a")

    @qd.kernel
    def k():
        for i in range(3):
            for n in range(i + 1):
                total[None] += cubed(x[i]) * n

    expected = 3 * X**2 * [0, 1, 3]
    assert_allclose(jacobian(k, x, total), expected)

    @taichi_ext.boundary_gradient(cubed)
    def _(a, d_a):
        return 5.0 * d_a

    for wanted in (5.0 * np.array([0, 1, 3]), expected):
        x.grad.fill(0)
        total.grad[None] = 1.0
        k.grad()
        assert_allclose(x.grad.to_numpy(), wanted)
        if "cubed" in [rule.name for rule in taichi_ext.registry]:
            taichi_ext.registry.remove("cubed")


def test_a_rule_that_changes_is_seen_by_the_reverse_mode():
    """Quadrants keeps a kernel in three tables: one that is not cleared runs the old rule."""
    x, total = qd.field(qd.f64, 3, needs_grad=True), qd.field(qd.f64, (), needs_grad=True)
    x.from_numpy(X)
    squared = func_of("squared(a): return a * a")
    k = kernel_of("for i in range(3): total[None] += squared(x[i])", total=total, squared=squared, x=x)

    def gradient():
        x.grad.fill(0)
        total.grad[None] = 1.0
        k.grad()
        return x.grad.to_numpy()

    assert_allclose(gradient(), 2 * X)

    @taichi_ext.boundary_gradient(squared)
    def _(a, d_a):
        return 3.0 * d_a

    assert_allclose(gradient(), 3.0)
    taichi_ext.registry.remove("squared")
    assert_allclose(gradient(), 2 * X)

    @taichi_ext.boundary_gradient(squared)
    def _(a, d_a):
        return 7.0 * d_a

    assert_allclose(gradient(), 7.0)
    taichi_ext.registry.remove("squared")


def test_views_of_buffers():
    k = kernel_of("for i in range(3): x[i] = view[i]", "x: ti.types.NDArray[ti.f64, 1], view: ti.BufferView[ti.f64]")
    x = array(X)
    with pytest.raises((UnsupportedError, taichi_ext.InvalidArgumentError), match="view"):
        jacobian(k, x, x, args=(x, qd.BufferView(array(X), 0, 3)))


def test_eigenvalues_of_a_larger_matrix():
    (x,), y = fields(np.diag([1.0, 2.0, 3.0, 4.0])), qd.field(qd.f64, ())

    @qd.kernel
    def k():
        a = qd.Matrix([[x[i, j] for j in range(4)] for i in range(4)])
        values, _ = qd.sym_eig(a)
        y[None] = values[3]

    with pytest.raises(
        UnsupportedError, match=r'File ".*test_quadrants.py", line \d+(.*\n)*.*2 and 3 rows; this has 4'
    ):
        jacobian(k, x, y)
