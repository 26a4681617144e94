"""Products with the Jacobian of a kernel, as functions that torch differentiates: by J itself, or without it."""

# The annotations of a kernel are values that Taichi reads, such as ti.template().
# pyright: reportInvalidTypeForm=false
# pyright knows no types of Taichi, torch and SciPy, nor of arrays of any shape and type.
# pyright: reportMissingTypeStubs=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from taichi_ext import backend
from taichi_ext.api.jacobian import jacobian
from taichi_ext.errors import InvalidArgumentError, UnsupportedError
from taichi_ext.solvers.extra import required


def require_torch() -> Any:
    return required("torch", "torch_function")


@dataclass(frozen=True)
class Call:
    """The data that a call passes through torch in addition to its tensors.

    ``function`` is the ``TorchFunction``, with the kernel, its inputs and its outputs.
    """

    function: Any
    wanted: tuple[bool, ...]  # by input: whether a derivative is wanted
    tensor_names: tuple[str, ...]  # the arguments that the tensors after the inputs are
    constants: Mapping[str, object]

    @property
    def wanted_inputs(self) -> list[int]:
        return [n for n, is_wanted in enumerate(self.wanted) if is_wanted]


# --- whether and where derivatives are wanted


def _layers(x: object) -> tuple[Any, list[int]]:
    """The tensor under the wrappers of ``torch.func``, and the levels of those that differentiate."""
    functorch = require_torch()._C._functorch
    levels = []
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_gradtrackingtensor(x):
            levels.append(functorch.maybe_get_level(x))
        x = functorch.get_unwrapped(x)
    return x, levels


def wants_derivative(x: object) -> bool:
    torch = require_torch()
    plain, levels = _layers(x)
    if levels or (torch.is_grad_enabled() and plain.requires_grad):
        return True
    forward_ad = torch.autograd.forward_ad
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(plain).tangent is not None


def check_first_order(inputs: Sequence[object], name: str) -> None:
    if len({level for x in inputs for level in _layers(x)[1]}) > 1:
        raise _second_derivative(name)


def _second_derivative(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"A second derivative of {name} was requested; torch_function gives first derivatives only. Detach tensors "
        "that should count as constants (x.detach()), or differentiate by differences of its gradient."
    )


# --- torch.fx


def is_traced() -> bool:
    """Whether torch writes down a graph of operations (``make_fx``, ``torch.func.linearize``)."""
    return _tracing_mode() is not None


def _tracing_mode() -> Any:
    tracing = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return None if tracing is None else tracing.get_proxy_mode()


@contextlib.contextmanager
def _as_constants(call: Call, tensors: Sequence[object]) -> Generator[None, None, None]:
    """Run a kernel whose results are constants of the graph that torch writes down, if it does.

    The graph cannot hold a kernel, so nothing that the kernel reads may depend on an input of the graph.
    """
    mode = _tracing_mode()
    if mode is None:
        yield
        return
    tracing: Any = sys.modules["torch.fx.experimental.proxy_tensor"]
    found = (tracing.get_proxy_slot(t, mode.tracer, None) for t in tensors)
    nodes, seen = [f.proxy.node for f in found if f is not None], set[object]()
    while nodes:
        node = nodes.pop()
        if node.op == "placeholder":
            raise UnsupportedError(
                f"{call.function.__name__} was called while torch.fx traced its values (make_fx), and a kernel is no "
                "operation of torch that its graph could hold. Use torch.compile with fullgraph=False, which runs "
                "kernels between its graphs."
            )
        nodes += [n for n in node.all_input_nodes if n not in seen]
        seen.update(node.all_input_nodes)
    with tracing.disable_proxy_modes_tracing():
        yield


def _note_results(ctx: Any, call: Call, tensors: Sequence[Any], results: Sequence[Any]) -> None:
    """The facts about the inputs and outputs of a call that ``backward`` and ``jvp`` need."""
    ctx.call = call
    ctx.is_real = [r.is_floating_point() for r in results]
    ctx.shapes = [r.shape for r in results]
    ctx.options = [{"dtype": r.dtype, "device": r.device} for r in results]
    ctx.inputs = [(t.shape, t.dtype) for t in tensors]
    ctx.has_tangents = False
    ctx.mark_non_differentiable(*[r for r in results if not r.is_floating_point()])
    ctx.set_materialize_grads(False)


def _check_no_forward_mode(ctx: Any) -> None:
    if ctx.has_tangents and require_torch().autograd.forward_ad._current_level >= 0:
        raise _second_derivative(ctx.call.function.__name__)


def _one_by_one(function: Any) -> Callable[..., tuple[object, object]]:
    """A ``vmap`` that runs the function once per item of the batch."""
    torch = require_torch()

    def vmap(info: Any, in_dims: tuple[Any, ...], call: Call, *tensors: Any) -> tuple[object, object]:
        if info.batch_size == 0:
            raise InvalidArgumentError(f"{call.function.__name__} was mapped over an empty batch.")
        rows = [
            function().apply(
                call,
                *[t if d is None else t.select(d, n) for t, d in zip(tensors, in_dims[1:], strict=True)],
            )
            for n in range(info.batch_size)
        ]
        stacked = tuple(None if column[0] is None else torch.stack(column) for column in zip(*rows, strict=True))
        return stacked, tuple(None if column is None else 0 for column in stacked)

    return vmap


# --- with J


@functools.cache
def with_jacobian() -> Any:
    """The ``torch.autograd.Function`` that computes J with the outputs, and multiplies by it.

    The blocks of J are outputs of its own, so that torch knows them at every level of ``torch.func``; a gradient that
    arrives at one of them is a second derivative.
    """
    torch = require_torch()

    class KernelFunction(torch.autograd.Function):
        @staticmethod
        def forward(call: Call, *tensors: object) -> tuple[object, ...]:
            with _as_constants(call, tensors):
                return call.function.run_with_jacobian(call, tensors)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[object, ...]) -> None:
            call, *tensors = inputs
            count = call.function.result_count
            _note_results(ctx, call, tensors, output[:count])
            ctx.save_for_backward(*output[count:])
            ctx.save_for_forward(*output[count:])

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> tuple[object, ...]:
            count = len(ctx.shapes)
            if any(g is not None for g in gradients[count:]):
                raise _second_derivative(ctx.call.function.__name__)
            _check_no_forward_mode(ctx)
            wanted, blocks = ctx.call.wanted_inputs, ctx.saved_tensors  # torch.utils.checkpoint gives them once
            real = [g for g, is_real in zip(gradients[:count], ctx.is_real, strict=True) if is_real]
            found: list[Any] = [None] * len(ctx.inputs)
            for at, number in enumerate(wanted):
                if not ctx.needs_input_grad[1 + number]:
                    continue
                shape, dtype = ctx.inputs[number]
                for row, gradient in enumerate(real):
                    if gradient is not None:
                        block = blocks[row * len(wanted) + at]
                        part = (
                            torch.mv(block.T, gradient.reshape(block.shape[0]).to(block.dtype)).reshape(shape).to(dtype)
                        )
                        found[number] = part if found[number] is None else found[number] + part
            return (None, *found)

        @staticmethod
        def jvp(ctx: Any, call: None, *tangents: Any) -> tuple[Any, ...]:
            ctx.has_tangents = True
            wanted, blocks = ctx.call.wanted_inputs, ctx.saved_tensors
            found, row = [], 0
            for shape, is_real in zip(ctx.shapes, ctx.is_real, strict=True):
                total = None
                if is_real:
                    for at, number in enumerate(wanted):
                        if tangents[number] is not None:
                            block = blocks[row * len(wanted) + at]
                            part = torch.mv(block, tangents[number].reshape(block.shape[1]).to(block.dtype)).reshape(
                                shape
                            )
                            total = part if total is None else total + part
                    row += 1
                found.append(total)
            # J changes too, in a way that is not known: whatever would use its tangent is not a number
            return (*found, *(torch.full_like(b, torch.nan) for b in blocks))

    KernelFunction.vmap = staticmethod(_one_by_one(with_jacobian))
    return KernelFunction


# --- without J


@functools.cache
def without_jacobian() -> Any:
    """The ``torch.autograd.Function`` that runs the plain kernel, and the products on demand."""
    torch = require_torch()

    class PlainFunction(torch.autograd.Function):
        @staticmethod
        def forward(call: Call, *tensors: object) -> tuple[object, ...]:
            with _as_constants(call, tensors):
                return call.function.run_plain(call, tensors)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[object, ...]) -> None:
            call, *tensors = inputs
            _note_results(ctx, call, tensors, output)
            ctx.save_for_backward(*tensors)
            ctx.save_for_forward(*tensors)

        @staticmethod
        def backward(ctx: Any, *gradients: object) -> tuple[object, ...]:
            _check_no_forward_mode(ctx)
            results = zip(gradients, ctx.shapes, ctx.options, ctx.is_real, strict=True)
            given = [torch.zeros(s, **options) if g is None else g for g, s, options, is_real in results if is_real]
            found = _product(_transposed).apply(ctx.call, *ctx.saved_tensors, *given)
            by_input = dict(zip(ctx.call.wanted_inputs, found, strict=True))
            return (None, *(by_input.get(n) for n in range(len(ctx.inputs))))

        @staticmethod
        def jvp(ctx: Any, call: None, *tangents: object) -> tuple[Any, ...]:
            ctx.has_tangents = True
            tensors = ctx.saved_tensors
            given = [
                torch.zeros_like(tensors[n]) if tangents[n] is None else tangents[n] for n in ctx.call.wanted_inputs
            ]
            found = list(_product(_along).apply(ctx.call, *tensors, *given))
            return tuple(found.pop(0) if is_real else None for is_real in ctx.is_real)

    PlainFunction.vmap = staticmethod(_one_by_one(without_jacobian))
    return PlainFunction


@functools.cache
def _product(compute: Callable[..., tuple[object, ...]]) -> Any:
    """A ``torch.autograd.Function`` of one product; its own derivative would be a second one."""
    torch = require_torch()

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(call: Call, *tensors: object) -> tuple[object, ...]:
            if any(torch._C._functorch.is_legacy_batchedtensor(t) for t in tensors):
                raise UnsupportedError(
                    f"{call.function.__name__} with reverse=True is mapped by torch's prototype vmap "
                    "(is_grads_batched=True, vectorize=True and the batched checks of gradcheck use it), which does "
                    "not let values be read. Use torch.func.vmap, or leave out reverse=True."
                )
            count = len(call.wanted) + len(call.tensor_names)
            return compute(call, tensors[:count], tensors[count:])

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[object, ...]) -> None:
            ctx.name = inputs[0].function.__name__

        @staticmethod
        def backward(ctx: Any, *gradients: object) -> tuple[object, ...]:
            raise _second_derivative(ctx.name)

        @staticmethod
        def jvp(ctx: Any, *tangents: object) -> tuple[Any, ...]:
            raise _second_derivative(ctx.name)

    Product.vmap = staticmethod(_one_by_one(lambda: Product))
    return Product


def _transposed(call: Call, tensors: Sequence[object], gradients: Sequence[object]) -> tuple[Any, ...]:
    """``v J`` by Taichi's reverse mode, compared with forward mode along a random direction.

    Taichi's reverse mode is silently wrong for kernels that overwrite values they have read.  For the right ``g = v J``
    and any direction u, ``g u = v (J u)``; for a wrong one the two differ at a random u, with probability 1 except for
    rounding.
    """
    torch = require_torch()
    function = call.function
    arguments = function.make_arguments(call, tensors)
    function.launch(arguments)
    outputs = function.real_outputs(arguments)
    for value in arguments.values():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value.requires_grad_()
            value.grad = torch.zeros_like(value)
    for name, gradient in zip(outputs, gradients, strict=True):
        arguments[name].grad.copy_(gradient)
    try:
        function.launch_reverse(arguments)
    except (RuntimeError, AssertionError, backend.CompilationError) as error:
        raise UnsupportedError(
            f"Taichi's reverse mode does not take {function.__name__}: {error}\nLeave out reverse=True."
        ) from error
    found = [arguments[function.input_names[n]].grad for n in call.wanted_inputs]
    directions = [torch.randn_like(g) for g in found]
    changes = _along(call, tensors, directions)
    left, left_size = _dot(found, directions)
    right, right_size = _dot(gradients, changes)
    tolerance = math.sqrt(torch.finfo(found[0].dtype).eps) * (left_size + right_size)
    if math.isfinite(left_size + right_size) and not abs(left - right) <= tolerance:
        raise UnsupportedError(
            f"Taichi's reverse mode gives a wrong gradient of {function.__name__}: along a random direction it is "
            f"{left:.6g}, by forward mode {right:.6g}. It does not support kernels that overwrite values they have "
            "read. Leave out reverse=True."
        )
    return tuple(found)


def _along(call: Call, tensors: Sequence[object], directions: Sequence[Any]) -> tuple[Any, ...]:
    """``J u``, the derivative of the outputs along a direction: one column, whatever the number of inputs."""
    torch = require_torch()
    function = call.function
    arguments = function.make_arguments(call, tensors)
    names = [function.input_names[n] for n in call.wanted_inputs]
    starts = [arguments[name] for name in names]
    moved = [value.clone() for value in starts]
    arguments.update(zip(names, moved, strict=True))
    outputs = [arguments[name] for name in function.real_outputs(arguments)]
    t = torch.zeros(1, dtype=moved[0].dtype, device=moved[0].device)
    flat = [v.contiguous().to(m.dtype) for v, m in zip(directions, moved, strict=True)]
    args = (t, len(names), *moved, *starts, *flat, *arguments.values())
    columns = jacobian(function.run_along, t, outputs, args=args)
    return tuple(column.reshape(value.shape) for column, value in zip(columns, outputs, strict=True))


def _dot(a: Sequence[Any], b: Sequence[Any]) -> tuple[float, float]:
    """The sum of the products of entries, and of their sizes, in float64."""
    products = [x.double().reshape(-1) * y.double().reshape(-1) for x, y in zip(a, b, strict=True)]
    return sum(float(p.sum()) for p in products), sum(float(p.abs().sum()) for p in products)


@functools.cache
def moving(ti: ModuleType) -> Callable[..., None]:
    """A kernel that sets flat arrays to ``x = start + t direction``."""
    array: Any = ti.types.ndarray()

    @ti.kernel
    def move(x: array, start: array, direction: array, t: array):
        for i in range(x.shape[0]):
            x[i] = start[i] + t[0] * direction[i]

    return move
