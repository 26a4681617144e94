"""torch_function at its borders: without a program, under torch.compile, with tensors that the kernel does not take."""

import copy
import subprocess
import sys

import numpy as np
import pytest
import taichi as ti
from captured_warnings import all_warnings
from kernel_texts import kernel_of

from taichi_ext import InvalidArgumentError, UnsupportedError, torch_function

torch = pytest.importorskip("torch", reason="PyTorch is not installed (python -m pip install '.[torch]')")

pytestmark = pytest.mark.cpu_only("its tensors are on the host")

A1 = ti.types.ndarray(ti.f32, ndim=1)
I1 = ti.types.ndarray(ti.i32, ndim=1)
V1 = ti.types.ndarray(ti.types.vector(3, ti.f32), ndim=1)


@ti.kernel
def square(a: A1, b: A1):
    for i in a:
        b[i] = a[i] ** 2


@ti.kernel
def gather(a: A1, index: I1, v: V1, b: A1):
    for i in a:
        b[i] = a[index[i]] ** 2 + v[i][0]


# --- without a program

CALLS = """
import torch, taichi as ti, taichi_ext as te

A = ti.types.ndarray(ti.f64, ndim=1)

@ti.kernel
def k(a: A, b: A):
    for i in a:
        b[i] = a[i] ** 2

@ti.func
def clamped(x):
    return ti.max(x, 0.0)

@te.boundary_gradient(clamped)
def rule(x, d_x, auto):
    return auto

t = torch.ones(3, dtype=torch.float64)
f = te.torch_function(k, "a", "b")
calls = [
    lambda: f(t), lambda: f(t.clone().requires_grad_()), lambda: torch.func.vmap(f)(t[None]),
    lambda: torch.func.grad(lambda x: f(x).sum())(t), lambda: f(t[None]), lambda: f(1),
    lambda: te.check_rule("clamped", {"x": [1.0, 2.0]}),
]

def all_say_so():
    for n, call in enumerate(calls):
        try:
            call()
        except te.InvalidArgumentError as error:
            assert "Taichi is not initialised; call ti.init(...) first" in str(error), (n, error)
        else:
            raise AssertionError(n)

all_say_so()
ti.init(arch=ti.cpu, log_level=ti.ERROR)
f(t)
ti.reset()
all_say_so()
print("fine")
"""


@pytest.mark.sweep
def test_every_call_needs_a_program(tmp_path):
    """In a process of its own: only there Taichi was never initialised."""
    program = tmp_path / "calls.py"
    program.write_text(CALLS)
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=900, check=False)
    assert done.stdout.endswith("fine\n"), done.stderr


# --- torch.compile


def compiled(function, **options):
    return torch.compile(function, backend="eager", **options)


@pytest.fixture
def doubled(ti32):
    return torch_function(square, inputs="a", outputs="b")


def value_and_gradient(function, x):
    x = x.clone().requires_grad_()
    y = function(x)
    y.sum().backward()
    return y.detach(), x.grad


class Layer(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.w = torch.nn.Parameter(torch.full((3,), 2.0))

    def forward(self, x):
        for _ in range(2):
            x = self.function(x * self.w) + 1
        return x


def test_a_copy_of_a_module_has_weights_of_its_own_and_the_same_function(doubled):
    layer, x = Layer(doubled), torch.tensor([0.5, 1.0, 2.0])
    copied = copy.deepcopy(layer)
    assert copied.function is layer.function
    with torch.no_grad():
        copied.w.fill_(3.0)
    copied(x).sum().backward()
    value = layer(x)
    assert layer.w.grad is None
    value.sum().backward()
    for module, w in ((layer, 2.0), (copied, 3.0)):
        inner = (w * x) ** 2 + 1  # the result is (w inner)^2 + 1
        torch.testing.assert_close(module.w.grad, 2 * w * inner**2 + 4 * w**3 * x**2 * inner)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "make",
    [
        lambda f: f,
        lambda f: lambda x: torch.sin(f(2 * x)) * 3,
        lambda f: lambda x: f(a=2 * x) + f(x),
        lambda f: lambda x: sum(f(n * x) for n in range(3)),
        Layer,
    ],
)
def test_a_compiled_function_computes_the_same(make, doubled):
    torch._dynamo.reset()
    function, x = make(doubled), torch.tensor([0.5, 1.0, 2.0])
    with all_warnings() as caught:
        for _ in range(3):
            for found, expected in zip(
                value_and_gradient(compiled(function), x), value_and_gradient(function, x), strict=True
            ):
                torch.testing.assert_close(found, expected)
    assert not [w for w in caught if "taichi" in str(w.message).lower() or "dynamo" in str(w.message).lower()]


@pytest.mark.sweep
def test_other_sizes_and_errors_in_a_compiled_function(doubled):
    torch._dynamo.reset()
    function = compiled(lambda x: doubled(x) + 1)
    for n in (2, 5, 7):
        torch.testing.assert_close(function(torch.ones(n)), torch.full((n,), 2.0))
    with pytest.raises(InvalidArgumentError, match="'a' of square has 2 dimensions; expected 1"):
        function(torch.ones(2, 2))


# --- tensors that the kernel does not take

INDEX, V = torch.zeros(3, dtype=torch.int32), torch.ones(3, 3)
f64 = torch.float64


@pytest.mark.parametrize("how", ["plain", "gradient", "vmap"])
@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((torch.ones(3, 1), INDEX, V), "'a' of gather has 2 dimensions; expected 1"),
        ((torch.ones(()), INDEX, V), "'a' of gather has 0 dimensions; expected 1"),
        ((torch.ones(3, dtype=f64), INDEX, V), "'a' of gather has elements of type f64; expected f32"),
        ((torch.ones(3, dtype=torch.bfloat16), INDEX, V), "'a' has elements of type torch.bfloat16"),
        ((torch.ones(3, dtype=torch.complex64), INDEX, V), "'a' has type torch.complex64"),
        ((torch.ones(3), INDEX.long(), V), "'index' of gather has elements of type i64; expected i32"),
        ((torch.ones(3), INDEX[None], V), "'index' of gather has 2 dimensions; expected 1"),
        ((torch.ones(3), torch.ones(3), V), "'index' of gather has elements of type f32; expected i32"),
        ((torch.ones(3), None, V), "'index' of gather is a NoneType"),
        ((torch.ones(3), INDEX, V.double()), "'v' of gather has elements of type f64; expected f32"),
        ((torch.ones(3), INDEX, V[0]), "'v' of gather has 0 dimensions; expected 1"),
        ((torch.ones(3), INDEX, V[:, :2]), r"'v' of gather has elements of shape \(2,\); expected \(3,\)"),
    ],
)
def test_wrong_tensors(how, args, message, ti32):
    function = torch_function(gather, inputs="a", outputs="b")
    first, *others = args
    first = first.clone().requires_grad_(how == "gradient")
    with pytest.raises(InvalidArgumentError, match=message):
        if how == "vmap":
            torch.func.vmap(lambda a: function(a, *others))(torch.stack([first, first]))
        else:
            function(first, *others)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"b": (3, 1)}, "'b' of square has 2 dimensions"),
        ({"b": lambda a: torch.zeros(3, dtype=f64)}, "'b' of square has elements of type f64"),
    ],
)
def test_wrong_tensors_that_the_function_allocates(shapes, message, ti32):
    with pytest.raises(InvalidArgumentError, match=message):
        torch_function(square, inputs="a", outputs="b", shapes=shapes)(torch.ones(3))


def test_nothing_is_stored_before_a_wrong_tensor_is_noticed(ti32):
    factor = ti.field(ti.f32, 3)
    factor.fill(7.0)
    scale = kernel_of("scale(a: A1, b: A1): for i in a: b[i] = factor[i] * a[i]", A1=A1, factor=factor)
    function = torch_function(scale, inputs=["a", factor], outputs="b")
    with pytest.raises(InvalidArgumentError, match="'a' of scale has 2 dimensions"):
        function(torch.ones(3, 1), torch.zeros(3))
    np.testing.assert_array_equal(factor.to_numpy(), 7.0)


def test_empty_tensors(ti32):
    x = torch.ones(0, requires_grad=True)
    torch_function(square, inputs="a", outputs="b")(x).sum().backward()
    assert x.grad.shape == (0,)


def test_tensors_without_numbers(ti32):
    """As ``torch.export`` passes them: their memory is at address 0."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    function = torch_function(square, inputs="a", outputs="b")
    with FakeTensorMode() as mode, pytest.raises(InvalidArgumentError, match="'a' is a fake tensor"):
        function(mode.from_tensor(torch.ones(3)))


# --- calls that torch runs again, or writes down ----------------------------------------------------------------------


@ti.kernel
def mixed(a: A1, b: A1, out: A1, total: A1):
    for i in a:
        out[i] = ti.sin(a[i]) * b[0]
        total[0] += a[i] * b[1] ** 2


def mixed_in_torch(a, b):
    return torch.sin(a) * b[0], (a * b[1] ** 2).sum().reshape(1)


@pytest.fixture
def both_outputs(ti32):
    return torch_function(mixed, ["a", "b"], ["out", "total"], shapes={"total": 1})


A, B = torch.tensor([0.3, -0.7, 1.1]), torch.tensor([0.5, 1.5])


def test_recomputed_by_checkpoint(both_outputs):
    """``torch.utils.checkpoint`` gives each saved tensor once, and runs the function again in ``backward``."""
    from torch.utils.checkpoint import checkpoint

    gradients = []
    for function in (both_outputs, mixed_in_torch):
        a, b = A.clone().requires_grad_(), B.clone().requires_grad_()
        out, total = checkpoint(lambda a, b, f=function: f(2 * a, b), a, b, use_reentrant=False)
        gradients.append(torch.autograd.grad(out.pow(2).sum() * total.sum(), (a, b)))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("pack", [torch.Tensor.clone, lambda t: t.detach().double()])
def test_saved_tensors_that_hooks_replace(pack, both_outputs):
    saved = lambda: torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t.float())
    gradients = []
    for function in (both_outputs, mixed_in_torch):
        a, b = A.clone().requires_grad_(), B.clone().requires_grad_()
        with saved():
            out, total = function(a, b)
        gradients.append(torch.autograd.grad(out.pow(2).sum() * total.sum(), (a, b)))
    torch.testing.assert_close(*gradients)


def test_linearized(both_outputs):
    """``torch.func.linearize`` writes the derivative down as a graph, where numbers of a kernel are constants."""
    directions = torch.tensor([0.2, -1.0, 0.4]), torch.tensor([2.0, -0.3])
    value, along = torch.func.linearize(lambda a, b: tuple(both_outputs(a, b)), A, B)
    torch.testing.assert_close(value, mixed_in_torch(A, B))
    for scale in (1.0, -2.0):
        given = tuple(scale * d for d in directions)
        torch.testing.assert_close(along(*given), torch.func.jvp(mixed_in_torch, (A, B), given)[1])


@pytest.mark.sweep
def test_linearized_through_vmap(both_outputs):
    rows, direction = torch.stack([A, 2 * A]), torch.stack([torch.ones(3), A])
    along = [
        torch.func.linearize(torch.vmap(lambda a, f=f: f(a, B)[0]), rows)[1] for f in (both_outputs, mixed_in_torch)
    ]
    torch.testing.assert_close(along[0](direction), along[1](direction))


def test_values_that_depend_on_the_input_of_a_graph(both_outputs):
    """A graph of ``make_fx`` would hold the numbers of the one call that it saw."""
    from torch.fx.experimental.proxy_tensor import make_fx

    both_outputs(A, B)
    for function in (
        lambda a: both_outputs(a * 2, B)[0],
        torch.func.grad(lambda a: both_outputs(a, B)[0].sum()),
        lambda a: torch.vmap(lambda a: both_outputs(a, B)[0])(torch.stack([a, a])),
    ):
        with pytest.raises(UnsupportedError, match="mixed was called while torch.fx traced its values"):
            make_fx(function)(A)


def test_an_empty_batch_of_calls_raises(both_outputs):
    """The kernel has to run to know the shapes of its outputs."""
    with pytest.raises(InvalidArgumentError, match="mapped over an empty batch"):
        torch.vmap(lambda a: both_outputs(a, B)[0])(torch.ones(0, 3))


@pytest.mark.sweep
def test_an_empty_batch_of_gradients(ti32):
    function = torch_function(mixed, ["a", "b"], ["out", "total"], shapes={"total": 1})
    _, pull = torch.func.vjp(lambda a: function(a, B)[0], A)
    assert torch.vmap(pull)(torch.ones(0, 3))[0].shape == (0, 3)
    assert torch.func.jacrev(lambda a: function(a, B)[0])(torch.ones(0)).shape == (0, 0)
    assert torch.func.jacfwd(lambda a: function(a, B)[0])(torch.ones(0)).shape == (0, 0)


def test_a_field_that_only_python_stores_to_is_left_as_it_is(ti64):
    """The way back starts from the fields as they were at the call, and puts back what they hold now."""
    count = ti.field(ti.f64, shape=2)
    scale = kernel_of("for i in x: y[i] = 3 * x[i]", "x: A1, y: A1")

    def counted(x, y):
        count[1] = count[1] + 1
        scale(x, y)

    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    total = torch_function(counted, "x", "y", shapes={"y": 2})(x).sum()
    count[1] = 10
    total.backward()
    assert x.grad.tolist() == [3, 3]
    assert count.to_numpy().tolist() == [0, 10]
