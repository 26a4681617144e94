"""torch_function: gradients, forward mode, torch.func, and every kind of argument."""

import subprocess
import sys

import numpy as np
import pytest
import taichi as ti
from differences import outputs, scalars, vectors
from kernel_texts import kernel_of, kernels_of

from taichi_ext import InvalidArgumentError, UnsupportedError, torch_function

torch = pytest.importorskip("torch", reason="PyTorch is not installed (python -m pip install '.[torch]')")

import torch.autograd.forward_ad as forward_ad  # noqa: E402
from torch.autograd import gradcheck  # noqa: E402

pytestmark = [pytest.mark.usefixtures("ti64"), pytest.mark.double_only("torch's gradcheck needs float64")]

EVERYTHING = {"check_forward_ad": True, "check_batched_grad": True, "check_batched_forward_grad": True}


def tensor(*shape, seed=0, requires_grad=True):
    values = torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))
    return values.requires_grad_(requires_grad)


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


triple = kernel_of("for I in ti.grouped(x): y[I] = 3 * x[I]", "x: A, y: A")


@ti.kernel
def mix(a: ti.types.ndarray(), b: ti.types.ndarray(), n: ti.i32, out: ti.types.ndarray(), total: ti.types.ndarray()):
    for i in range(a.shape[0]):
        out[i] = ti.sin(a[i]) * b[0] + n * a[(i + 1) % a.shape[0]]
        total[0] += a[i] * b[1] ** 2


def mix_in_torch(a, b, n):
    return torch.sin(a) * b[0] + n * torch.roll(a, -1), (a * b[1] ** 2).sum().reshape(1)


@pytest.fixture
def mixed():
    return torch_function(mix, inputs=["a", "b"], outputs=["out", "total"], shapes={"total": 1})


# --- reverse mode


grad = torch.autograd.grad
W = torch.tensor([0.3, -1.2, 0.7], dtype=torch.float64)


def many(a):
    """Several of a tensor, as the first axis."""
    return torch.stack([a, 2 * a, a * a, -a])


def along(f, a, b):
    """Tangents of both outputs, by dual numbers."""
    with forward_ad.dual_level():
        found = f(forward_ad.make_dual(a.detach(), W), b.detach(), 2)
        return [forward_ad.unpack_dual(y).tangent for y in found]


def reverse_inside_forward(f, a, b):
    with forward_ad.dual_level():
        out = f(forward_ad.make_dual(a, W), b.detach(), 2)[0].pow(2).sum()
        return list(forward_ad.unpack_dual(grad(out, a, create_graph=True)[0]))


def outer_gradient(f, a, b):
    """The incoming gradient may itself be differentiated: backward is linear in it."""
    v = tensor(3, seed=4)
    _, pull = torch.func.vjp(lambda a: f(a, b.detach(), 2)[0], a.detach())
    return grad(pull(v)[0].sum(), v)


def twice(f, a, b):
    out = f(a, b, 2)[0]
    return [grad(out.sum(), a, retain_graph=True)[0], grad(out.sum(), a)[0]]


def by_both_inputs(f, a, b):
    out, total = f(a, b, 2)
    gradient = grad(out.pow(3).sum() * total.sum(), (a, b), create_graph=True)
    return grad(gradient[0].pow(2).sum() + gradient[1].sum(), (a, b))


def of_one(second):
    """A second derivative of the first output by the first input."""
    return lambda f, a, b: second(lambda a: f(a, b.detach(), 2)[0], a.detach())


# What is done with the function, its kernel or its twin in torch, of a and b.
TRANSFORMS = {
    "both": lambda f, a, b: grad(sum((y.exp() * (n + 1)).sum() for n, y in enumerate(f(a, b, n=2))), (a, b)),
    "values": lambda f, a, b: list(f(a, b, 2)),
    "one output": lambda f, a, b: grad(f(a, b, 2)[1], (a, b)),
    "one input": lambda f, a, b: [grad(f(a.detach(), b, 2)[0].sum(), b)[0], grad(f(a, b.detach(), 2)[0].sum(), a)[0]],
    "twice": twice,
    "jvp": lambda f, a, b: torch.func.jvp(lambda a, b: tuple(f(a, b, 2)), (a, b), (W, W[:2])),
    "dual numbers": along,
    "jacfwd": lambda f, a, b: torch.func.jacfwd(lambda a, b: tuple(f(a, b, 2)), argnums=(0, 1))(a, b),
    "jacrev": lambda f, a, b: torch.func.jacrev(lambda a, b: tuple(f(a, b, 2)), argnums=(0, 1))(a, b),
    "vmap": lambda f, a, b: torch.vmap(lambda a, b: tuple(f(a, b, 2)))(many(a), many(b)),
    "vmap over one": lambda f, a, b: torch.vmap(lambda a, b: tuple(f(a, b, 2)), (0, None))(many(a), b),
    "per sample": lambda f, a, b: torch.vmap(torch.func.grad(lambda a: f(a, b, 2)[0].pow(2).sum()))(many(a)),
    "through vmap": lambda f, a, b: grad(torch.vmap(lambda a: f(a, b, 2)[0])(many(a)).pow(2).sum(), (a, b)),
    "reverse inside forward": reverse_inside_forward,
    "outer gradient": outer_gradient,
    "second by both": by_both_inputs,
    "hessian": of_one(lambda f, x: torch.func.hessian(lambda x: f(x).pow(2).sum())(x)),
    "jacfwd of jacrev": of_one(lambda f, x: torch.func.jacfwd(torch.func.jacrev(f))(x)),
    "hessian of vmap": of_one(
        lambda f, x: torch.func.hessian(lambda x: torch.vmap(f)(torch.stack([x, x * x])).pow(2).sum())(x)
    ),
}


@pytest.mark.mostly_sweep("both", "twice", "jacfwd", "through vmap", "per sample", "hessian")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_those_of_torch(mixed, name):
    found = [TRANSFORMS[name](f, tensor(3), tensor(2, seed=1)) for f in (mixed, mix_in_torch)]
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-13)


@pytest.mark.sweep
def test_gradcheck(mixed):
    assert gradcheck(lambda a, b: tuple(mixed(a, b, 4)), (tensor(3), tensor(2, seed=1)), **EVERYTHING)


def test_the_same_tensor_for_two_inputs():
    product = kernel_of("for i in a: c[i] = a[i] * ti.sin(b[i])", "a: A, b: A, c: A")
    f = torch_function(product, ["a", "b"], "c")
    x = tensor(3)
    close(torch.autograd.grad(f(x, x).sum(), x)[0], torch.sin(x) + x * torch.cos(x))
    g = torch_function(product, "a", "c")
    close(torch.autograd.grad(g(x, x.detach()).sum(), x)[0], torch.sin(x).detach())  # the other is a constant
    rows = tensor(2, 3)
    close(torch.autograd.grad(f(rows[0], rows[1]).sum(), rows)[0][1], (rows[0] * torch.cos(rows[1])).detach())


def test_no_derivative_is_computed_without_need(mixed, monkeypatch):
    from taichi_ext.interop import torch_runs as module

    def fail(*args, **kwargs):
        raise AssertionError("a derivative was computed")

    for name in ("vjp", "jvp", "hvp", "jacobian", "Snapshot.launch"):
        monkeypatch.setattr(module, name, fail) if "." not in name else monkeypatch.setattr(
            module.TorchSnapshot, "launch", fail
        )
    a, b = tensor(3), tensor(2, seed=1)
    with torch.no_grad():
        out, _ = mixed(a, b, 2)
    assert not out.requires_grad
    out, _ = mixed(a.detach(), b.detach(), 2)
    close(out, mix_in_torch(a, b, 2)[0].detach())
    close(torch.vmap(lambda a: mixed(a, b.detach(), 2)[0])(a.detach().expand(2, 3))[1], out)


# --- forward mode and torch.func


def test_vmap_over_a_constant():
    """A tensor that is no input, of another value for each item."""
    f = torch_function(mix, "a", ["out", "total"], shapes={"total": 1})
    a, b = tensor(3), tensor(4, 2, seed=1, requires_grad=False)
    out = torch.vmap(lambda b: f(a, b, 2)[0])(b)
    close(out, torch.stack([mix_in_torch(a, row, 2)[0] for row in b]))
    close(torch.autograd.grad(out.sum(), a)[0], sum(torch.cos(a) * row[0] + 2 for row in b).detach())


@pytest.mark.sweep
def test_second_derivatives_by_several_inputs(mixed):
    """By both inputs, with both outputs: torch's own check."""
    a, b = tensor(3), tensor(2, seed=1)
    assert torch.autograd.gradgradcheck(lambda a, b: tuple(mixed(a, b, 4)), (a, b), check_fwd_over_rev=True)


def test_derivatives_that_are_not_known_raise(mixed):
    b, x = tensor(2, seed=1, requires_grad=False), tensor(3, requires_grad=False)
    f = lambda a: mixed(a, b, 2)[0]  # noqa: E731
    with pytest.raises(UnsupportedError, match="third derivative of mix"):
        torch.func.grad(lambda x: torch.func.hessian(lambda x: f(x).sum())(x).sum())(x)
    with pytest.raises(UnsupportedError, match="second derivative in forward mode alone of mix"):
        torch.func.jacfwd(torch.func.jacfwd(f))(x)


@pytest.mark.sweep
def test_second_derivatives_of_many_functions_are_no_fault_of_the_user(recwarn):
    """Each function has a pipeline of the package's own, which the user cannot make once for all of them."""
    x = tensor(2)
    for _ in range(8):
        function = torch_function(triple, inputs=["x"], outputs="y", shapes={"y": 2})
        (slope,) = torch.autograd.grad(function(x).pow(2).sum(), x, create_graph=True)
        close(torch.autograd.grad(slope.sum(), x)[0], torch.full_like(x, 18.0))
    assert not [w for w in recwarn if "was prepared" in str(w.message)]


# --- kinds of arguments and results


def test_structure_of_the_result(mixed):
    a, b = tensor(3), tensor(2, seed=1)
    assert isinstance(mixed(a, b, 2), list)
    by_name = torch_function(mix, ["a", "b"], {"values": "out", "sum": "total"}, shapes={"total": 1})(a, b, 2)
    assert set(by_name) == {"values", "sum"}
    close(by_name["sum"], mix_in_torch(a, b, 2)[1])
    alone = torch_function(mix, ["a", "b"], "total", shapes={"total": 1, "out": lambda a: a.shape})(a, b, 2)
    close(alone, mix_in_torch(a, b, 2)[1])


def test_order_of_the_inputs_is_the_callers():
    f = torch_function(mix, ["b", "a"], ["out", "total"], shapes={"total": 1, "out": lambda a: a.shape})
    a, b = tensor(3), tensor(2, seed=1)
    close(f(b, a, 2)[0], mix_in_torch(a, b, 2)[0])
    close(f(b, n=2, a=a)[0], mix_in_torch(a, b, 2)[0])


KERNELS = """
project(v: ti.types.vector(3, ti.f64), x: ARRAY, y: ARRAY):
    for i in range(y.shape[0]):
        y[i] = v.dot(ti.Vector([x[i, 0], x[i, 1], x[i, 2]])) / v.norm()
rotate(x: VECTORS, y: VECTORS): for i in x: y[i] = ti.Vector([-x[i].y, x[i].x]) * x[i].norm()
energy(x: ARRAY, k: ti.f64) -> ti.f64:
    s = 0.0
    for i in range(x.shape[0]):
        s += k * ti.sin(x[i])
    return s
moments(x: ARRAY) -> ti.types.vector(2, ti.f64):
    s = ti.Vector([0.0, 0.0])
    ti.loop_config(serialize=True)
    for i in range(x.shape[0]):
        s += ti.Vector([x[i], x[i] ** 2])
    return s
step(x: ARRAY, dt: ti.f64): for i in x: x[i] += dt * x[i] ** 2
chain(x: ARRAY, T: ARRAY, n: ARRAY, y: ARRAY):
    ti.loop_config(serialize=True)
    for i in x:
        T[0] = T[0] * 0.5 + x[i]
        y[i] = T[0] ** 2
        n[0] += 1
of_fields(n: ti.i32): for i in a: b[i] = n * ti.sin(a[i]) * scale[i % 2].norm()
first(x: ARRAY): for i in x: b[i] = x[i] ** 2
second(y: ARRAY, k: ti.f64): for i in y: y[i] += b[i] * k
"""


@pytest.mark.sweep
def test_kinds_of_arguments():
    """Vectors by value and as elements, returned values, arrays in place, fields, integers, pipelines: torch's own check."""
    a, scale, b = scalars(np.zeros(4)), vectors(np.zeros((2, 2))), outputs(4)
    scope = {"a": a, "b": b, "scale": scale, "ARRAY": ti.types.ndarray()}
    k = kernels_of(KERNELS, **scope, VECTORS=ti.types.ndarray(dtype=ti.types.vector(2, ti.f64), ndim=1))

    def run(x, steps, y):
        for n in range(steps):
            k["first"](x)
            k["second"](y, n + 1.0)

    def check(f, *tensors):
        assert gradcheck(f, tensors, **EVERYTHING)

    x, s = tensor(4), tensor(2, 2, seed=1)
    check(
        torch_function(k["project"], ["v", "x"], "y", shapes={"y": lambda x: len(x)}), tensor(3), tensor(2, 3, seed=1)
    )
    check(torch_function(k["rotate"], "x", "y"), tensor(3, 2))
    energy, half = torch_function(k["energy"], ["x", "k"]), torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    close(energy(x, half), (half * torch.sin(x)).sum())
    assert energy(x, half).dtype == torch.float64
    check(energy, x, half)
    moments = torch_function(k["moments"], "x")
    close(moments(x), torch.stack([x.sum(), (x**2).sum()]))
    check(moments, x)
    step, before = torch_function(k["step"], "x", "x"), x.detach().clone()
    close(step(x, 0.5).detach(), before + 0.5 * before**2)
    close(x.detach(), before)
    check(lambda x: step(step(x, 0.5), 0.25), x)
    shapes = {"T": 1, "n": lambda x: torch.zeros(1, dtype=torch.int32)}
    chain = torch_function(k["chain"], "x", ["y", "n"], shapes=shapes)
    n = chain(x)[1]
    assert (n.tolist(), n.dtype, n.requires_grad) == ([4], torch.int32, False)
    check(lambda x: chain(x)[0], x)
    of_fields = torch_function(k["of_fields"], [a, scale], b)
    close(of_fields(x, s, 3).detach(), 3 * torch.sin(x.detach()) * s.detach().norm(dim=1).repeat(2))
    check(lambda a, s: of_fields(a, s, n=3), x, s)
    pipeline = torch_function(run, "x", "y")
    close(pipeline(x, 3).detach(), 6 * x.detach() ** 2)
    check(lambda x: pipeline(x, 3), x)


def test_tensors_that_are_not_contiguous():
    f = torch_function(triple, "x", "y")
    x = tensor(4, 3)
    close(f(x.T), 3 * x.T)
    close(
        torch.autograd.grad((f(x.T) * torch.arange(12.0).reshape(3, 4)).sum(), x)[0],
        3 * torch.arange(12.0).double().reshape(3, 4).T,
    )
    close(f(x[::2]), 3 * x[::2])
    close(f(x[0].expand(2, 3)), 3 * x[0].expand(2, 3))


def test_shapes_can_change_from_call_to_call():
    f = torch_function(triple, "x", "y")
    for shape in ((2,), (3, 4), (2,), (1, 1, 5)):
        x = tensor(*shape)
        close(f(x), 3 * x)
        close(torch.autograd.grad(f(x).sum(), x)[0], torch.full(shape, 3.0, dtype=torch.float64))


# --- large arrays, and state that the kernel uses


@ti.kernel
def elementwise(x: ti.types.ndarray(), scale: ti.types.ndarray(), c: ti.f64, y: ti.types.ndarray()):
    for I in ti.grouped(x):
        y[I] = ti.sin(c * x[I]) * scale[0] + ti.exp(-x[I] * x[I])


def elementwise_in_torch(x, scale, c):
    return torch.sin(c * x) * scale[0] + torch.exp(-x * x)


def test_arrays_that_are_too_large_for_the_jacobian():
    f = torch_function(elementwise, ["x", "scale"], "y")
    x, scale, weights = tensor(300, 400), tensor(1, seed=1), tensor(300, 400, seed=2, requires_grad=False)
    mine = torch.autograd.grad((f(x, scale, 1.5) * weights).sum(), (x, scale))
    own = torch.autograd.grad((elementwise_in_torch(x, scale, 1.5) * weights).sum(), (x, scale))
    torch.testing.assert_close(mine, own)
    d_x = tensor(300, 400, seed=3, requires_grad=False)
    mine = torch.func.jvp(lambda x: f(x, scale.detach(), 1.5), (x.detach(),), (d_x,))
    own = torch.func.jvp(lambda x: elementwise_in_torch(x, scale.detach(), 1.5), (x.detach(),), (d_x,))
    torch.testing.assert_close(mine, own)


@pytest.mark.mostly_sweep("True")
@pytest.mark.parametrize("is_pipeline", [False, True])
def test_derivatives_are_those_at_the_call(is_pipeline):
    """Fields that the kernel reads and changes may hold other numbers when torch asks for derivatives."""
    factor, count = scalars(np.array([1.0, 2.0, 3.0])), scalars(0.0)

    @ti.kernel
    def scaled(x: ti.types.ndarray(), y: ti.types.ndarray()):
        for i in x:
            y[i] = factor[i] * count[None] * x[i] ** 3
        for i in factor:
            factor[i] += 1

    def run(x, y):
        count[None] = count[None] + 1
        scaled(x, y)

    f = torch_function(run if is_pipeline else scaled, "x", "y")
    count[None] = 0.0 if is_pipeline else 1.0
    x = tensor(3)
    y = f(x)
    count[None] = 100.0
    factor.fill(50.0)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    close(first, 3 * x**2 * torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    close(torch.autograd.grad(first.sum(), x)[0], 6 * x.detach() * torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    assert factor.to_numpy().tolist() == [50.0] * 3
    assert count[None] == 100.0


@pytest.mark.sweep
def test_second_derivatives_of_fields_and_numbers():
    x, y = scalars(np.zeros(3)), outputs(3)
    run = kernel_of("for i in y: y[i] = ti.sin(k * x[i]) * x[(i + 1) % 3]", "k: ti.f64", y=y, x=x)
    returning = kernel_of("returning(x: A) -> ti.f64: return x[0] ** 2")
    f, a = torch_function(run, [x], y), tensor(3)
    own = torch.autograd.functional.hessian(lambda a: (torch.sin(2 * a) * torch.roll(a, -1)).pow(2).sum(), a)
    close(torch.autograd.functional.hessian(lambda a: f(a, 2.0).pow(2).sum(), a), own)
    with pytest.raises(UnsupportedError, match="second derivative of returning.*returned values"):
        torch.autograd.functional.hessian(torch_function(returning, "x"), a)


# --- bad input


def test_constant_that_carries_a_gradient(mixed):
    f = torch_function(mix, "a", ["out", "total"], shapes={"total": 1})
    with pytest.raises(InvalidArgumentError, match=r"'b' carries a gradient.*inputs"):
        f(tensor(3), tensor(2), 2)
    with torch.no_grad():
        f(tensor(3), tensor(2), 2)
    a, b = tensor(3, requires_grad=False), tensor(2, requires_grad=False)
    with pytest.raises(InvalidArgumentError, match="'b' carries a gradient"):
        torch.func.grad(lambda b: f(a, b, 2)[0].sum())(b)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"inputs": "q", "outputs": "y"}, "'q'.*not an argument.*'x', 'y'"),
        ({"inputs": "x", "outputs": "q"}, "outputs has 'q'"),
        ({"inputs": "x", "outputs": "y", "shapes": {"q": 1}}, "shapes has 'q'"),
        ({"inputs": [], "outputs": "y"}, "inputs is empty"),
        ({"inputs": ["x", "x"], "outputs": "y"}, "twice"),
        ({"inputs": "x", "outputs": ["y", "y"]}, "twice"),
        ({"inputs": "x"}, "returns nothing"),
        ({"inputs": "x", "outputs": "y", "shapes": {"x": 1}}, "'x', which is an input"),
        ({"inputs": 3, "outputs": "y"}, "inputs has 3"),
    ],
)
def test_what_does_not_fit_the_kernel(arguments, message):
    with pytest.raises(InvalidArgumentError, match=message):
        torch_function(triple, **arguments)


def test_what_is_no_kernel():
    with pytest.raises(InvalidArgumentError, match=r"expected a @ti\.kernel"):
        torch_function(3, inputs="x", outputs="y")


def test_output_passed_by_value():
    with pytest.raises(InvalidArgumentError, match="'n', which is passed by value"):
        torch_function(mix, "a", "n")


def test_wrong_calls(mixed):
    a, b = tensor(3), tensor(2)
    for args, kwargs, message in (
        ((a,), {}, "takes the arguments a, b, n"),
        ((a, b, 2, 3), {}, "4 were given"),
        ((a, b, 2), {"q": 1}, "'q' is not an argument"),
        ((a, b, 2), {"n": 1}, "'n'.*given twice"),
        ((a.detach().numpy(), b, 2), {}, "'a' is a ndarray; expected a torch tensor"),
        ((torch.ones(3, dtype=torch.int32), b, 2), {}, "'a' has type torch.int32"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            mixed(*args, **kwargs)


def test_wrong_shape_for_a_field_or_number():
    x, y = scalars(np.zeros(4)), outputs(4)
    run = kernel_of("for i in x: y[i] = x[i] * k", "k: ti.f64", x=x, y=y)
    with pytest.raises(InvalidArgumentError, match=r"shape \(3,\); expected \(4,\)"):
        torch_function(run, x, y)(tensor(3), 1.0)
    with pytest.raises(InvalidArgumentError, match=r"'k' has shape \(1,\); expected \(\)"):
        torch_function(run, [x, "k"], y)(tensor(4), tensor(1))


def test_shape_that_is_none():
    f = torch_function(triple, "x", "y", shapes={"y": lambda x: None})
    with pytest.raises(InvalidArgumentError, match="shapes\\['y'\\] is None"):
        f(tensor(3))
    f = torch_function(triple, "x", "y", shapes={"y": lambda q: 3})
    with pytest.raises(InvalidArgumentError, match="takes 'q'; known here: x"):
        f(tensor(3))


def test_kernel_that_writes_to_an_input_that_is_no_output():
    spoil = kernel_of("for i in x: y[i] = x[i] ** 2; x[i] = 0.0", "x: A, y: A")
    x = tensor(3)
    before = x.detach().clone()
    with pytest.raises(InvalidArgumentError, match=r"'x'.*outputs"):
        torch_function(spoil, "x", "y")(x)
    close(x.detach(), before)


def test_unsupported_constructs_come_through():
    odd = kernel_of("for i in x: y[i] = ti.bit_cast(ti.bit_cast(ti.cast(x[i], ti.f32), ti.i32), ti.f32)", "x: A, y: A")
    f = torch_function(odd, "x", "y")
    f(tensor(3, requires_grad=False))
    with pytest.raises(UnsupportedError, match="line"):
        f(tensor(3)).sum().backward()


@pytest.mark.sweep
def test_without_torch_the_error_names_the_extra():
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from taichi_ext.interop.torch_function import torch_function\n"
        "import taichi_ext\n"
        "try:\n    torch_function(None, inputs='x')\n"
        "except ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert ".[torch]" in done.stdout
