"""A kernel, and products with its first and second derivatives, as functions that torch differentiates.

A derivative of each is one of the others: with outputs ``f(x)``, cotangents v and directions u and w,

    function    is        reverse, for a cotangent g           forward
    Run         f         v J, at v = g                        J u
    Rows        v J       with respect to x: g H; to v: J g    dx H + dv J
    Columns     J u       with respect to x: u H; to u: g J    J du; of x: unknown
    Curvature   w H       unknown

where H is the Hessian of ``v f(x)``, which is symmetric; for ``Columns``, v is the cotangent g.
"""

# pyright knows no types of Taichi, torch and SciPy, nor of arrays of any shape and type.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from taichi_ext import backend
from taichi_ext.errors import InvalidArgumentError, UnsupportedError
from taichi_ext.solvers.operator import required


def require_torch() -> Any:
    return required("torch", "torch_function")


@dataclass(frozen=True)
class TorchCall:
    """The data that a call passes through torch in addition to its tensors.

    Attributes:
        function: computes outputs and products, see ``torch_runs.Runs``.
        wanted: by input, whether a derivative is wanted.
        tensor_names: the arguments that the tensors after the inputs are.
        constants: the other arguments by name.
        snapshot: once it has run, the fields that it used, as they were before; within a map, a list of those.
        results: the shape and type of each real output, once it has run.
        batch: the number of cotangents or directions along a leading axis; None: one, without that axis.
    """

    function: Any
    wanted: tuple[bool, ...]
    tensor_names: tuple[str, ...]
    constants: Mapping[str, object]
    snapshot: list[Any]
    results: list[Any]
    batch: int | None = None

    @property
    def wanted_inputs(self) -> list[int]:
        return [n for n, is_wanted in enumerate(self.wanted) if is_wanted]

    @property
    def count(self) -> int:
        """How many tensors the kernel takes."""
        return len(self.wanted) + len(self.tensor_names)


# --- whether derivatives are wanted


def _layers(x: object) -> tuple[Any, bool]:
    """The tensor under the wrappers of ``torch.func``, and whether one of those differentiates."""
    functorch = require_torch()._C._functorch
    is_tracked = False
    while functorch.is_functorch_wrapped_tensor(x):
        is_tracked |= functorch.is_gradtrackingtensor(x)
        x = functorch.get_unwrapped(x)
    return x, is_tracked


def wants_derivative(x: object) -> bool:
    torch = require_torch()
    plain, is_tracked = _layers(x)
    if is_tracked or (torch.is_grad_enabled() and plain.requires_grad):
        return True
    forward_ad = torch.autograd.forward_ad
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(plain).tangent is not None


# --- torch.fx


def _tracing_mode() -> Any:
    tracing = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return None if tracing is None else tracing.get_proxy_mode()


@contextlib.contextmanager
def _as_constants(call: TorchCall, tensors: Sequence[object]) -> Generator[None, None, None]:
    """Run a kernel while torch may write down a graph (``make_fx``, ``torch.func.linearize``), for a constant in it.

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
                f"{call.function.name} was called while torch.fx traced its values (make_fx), and a kernel is no "
                "operation of torch that its graph could hold. Use torch.compile with fullgraph=False, which runs "
                "kernels between its graphs."
            )
        nodes += [n for n in node.all_input_nodes if n not in seen]
        seen.update(node.all_input_nodes)
    with tracing.disable_proxy_modes_tracing():
        yield


# --- the functions


def _unknown(name: str, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what} of {name} was requested, which torch_function does not give. Detach tensors that should count as "
        "constants (x.detach()), or differentiate by differences of its derivatives."
    )


@functools.cache
def run_function() -> Any:
    """The ``torch.autograd.Function`` that runs the kernel."""
    torch = require_torch()

    class Run(torch.autograd.Function):
        @staticmethod
        def forward(call: TorchCall, *tensors: object) -> tuple[object, ...]:
            with _as_constants(call, tensors):
                return call.function.plain(call, tensors)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
            call, *tensors = inputs
            ctx.call, ctx.is_real = call, [r.is_floating_point() for r in output]
            ctx.save_for_backward(*tensors)
            ctx.save_for_forward(*tensors)
            ctx.mark_non_differentiable(*[r for r in output if not r.is_floating_point()])
            ctx.set_materialize_grads(False)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> tuple[object, ...]:
            given = _filled(ctx.call.results, [g for g, real in zip(gradients, ctx.is_real, strict=True) if real])
            return None, *_rows(ctx.call, ctx.saved_tensors, given)

        @staticmethod
        def jvp(ctx: Any, call: None, *tangents: Any) -> tuple[Any, ...]:
            found = list(_columns(ctx.call, ctx.saved_tensors, tangents))
            return tuple(found.pop(0) if is_real else None for is_real in ctx.is_real)

    Run.vmap = staticmethod(_one_by_one(run_function))
    return Run


@functools.cache
def _rows_function() -> Any:
    """Cotangents of the outputs times J: a tensor for each wanted input."""
    torch = require_torch()

    class Rows(torch.autograd.Function):
        @staticmethod
        def forward(call: TorchCall, *tensors: object) -> tuple[object, ...]:
            return _in_batch(call, tensors, call.function.rows)

        setup_context = staticmethod(_keep_inputs)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> tuple[object, ...]:
            call, saved = ctx.call, ctx.saved_tensors
            tensors, cotangents = saved[: call.count], saved[call.count :]
            directions = _by_input(call, gradients)
            return (
                None,
                *_curvature(call, tensors, cotangents, directions, ctx.needs_input_grad[1:]),
                *_columns(call, tensors, directions),
            )

        @staticmethod
        def jvp(ctx: Any, call: None, *tangents: Any) -> tuple[Any, ...]:
            call_, saved = ctx.call, ctx.saved_tensors
            tensors, cotangents = saved[: call_.count], saved[call_.count :]
            moved, changed = tangents[: call_.count], tangents[call_.count :]
            found = _curvature(call_, tensors, cotangents, moved, call_.wanted)
            added = _rows(call_, tensors, _filled(call_.results, changed))
            return tuple(_sum(found[n], added[n]) for n in call_.wanted_inputs)

    Rows.vmap = staticmethod(_batched(_rows_function))
    return Rows


@functools.cache
def _columns_function() -> Any:
    """J times directions of the wanted inputs: a tensor for each real output."""
    torch = require_torch()

    class Columns(torch.autograd.Function):
        @staticmethod
        def forward(call: TorchCall, *tensors: object) -> tuple[object, ...]:
            return _in_batch(call, tensors, call.function.columns)

        setup_context = staticmethod(_keep_inputs)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> tuple[object, ...]:
            call, saved = ctx.call, ctx.saved_tensors
            tensors, directions = saved[: call.count], _by_input(call, saved[call.count :])
            cotangents = _filled(call.results, gradients)
            found = _rows(call, tensors, cotangents)
            return (
                None,
                *_curvature(call, tensors, cotangents, directions, ctx.needs_input_grad[1:]),
                *[found[n] for n in call.wanted_inputs],
            )

        @staticmethod
        def jvp(ctx: Any, call: None, *tangents: Any) -> tuple[Any, ...]:
            count = ctx.call.count
            if any(t is not None for t in tangents[:count]):
                raise _unknown(ctx.call.function.name, "A second derivative in forward mode alone")
            return tuple(_columns(ctx.call, ctx.saved_tensors[:count], _by_input(ctx.call, tangents[count:])))

    Columns.vmap = staticmethod(_batched(_columns_function))
    return Columns


@functools.cache
def _curvature_function() -> Any:
    """Directions times the Hessian of cotangents times outputs: a tensor for each wanted input."""
    torch = require_torch()

    class Curvature(torch.autograd.Function):
        @staticmethod
        def forward(call: TorchCall, *tensors: object) -> tuple[object, ...]:
            with _as_constants(call, tensors):
                return call.function.curvature(call, tensors[: call.count], tensors[call.count :])

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[object, ...]) -> None:
            ctx.name = inputs[0].function.name

        @staticmethod
        def backward(ctx: Any, *gradients: object) -> tuple[object, ...]:
            raise _unknown(ctx.name, "A third derivative")

        @staticmethod
        def jvp(ctx: Any, *tangents: object) -> tuple[Any, ...]:
            raise _unknown(ctx.name, "A third derivative")

    Curvature.vmap = staticmethod(_one_by_one(_curvature_function))
    return Curvature


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[object, ...]) -> None:
    ctx.call = inputs[0]
    ctx.save_for_backward(*inputs[1:])
    ctx.save_for_forward(*inputs[1:])
    ctx.set_materialize_grads(False)


# --- calls of these functions, on tensors that may be missing


def _rows(call: TorchCall, tensors: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
    """A tensor for each tensor of the call, None for those that are not wanted."""
    found = _rows_function().apply(call, *tensors, *cotangents)
    return _by_input(call, found)


def _columns(call: TorchCall, tensors: Sequence[Any], directions: Sequence[Any]) -> Sequence[Any]:
    """J times directions, of which there may be one for each tensor of the call."""
    if all(d is None for d in directions):
        return [None] * len(call.results)
    given = [_zeros(tensors[n], call) if directions[n] is None else directions[n] for n in call.wanted_inputs]
    if _tracing_mode() is not None:
        return _columns_by_matrix(call, tensors, given)
    return _columns_function().apply(call, *tensors, *given)


def _columns_by_matrix(call: TorchCall, tensors: Sequence[Any], directions: Sequence[Any]) -> list[Any]:
    """J times directions that torch.fx writes down: J is a constant of its graph."""
    with _as_constants(call, tensors):
        rows = call.function.jacobian(call, tensors)
    found: list[Any] = []
    for row, (shape, _) in zip(rows, call.results, strict=True):
        parts: list[Any] = [b @ d.reshape(b.shape[1]).to(b.dtype) for b, d in zip(row, directions, strict=True)]
        found.append(require_torch().stack(parts).sum(0).reshape(shape))
    return found


def _curvature(
    call: TorchCall,
    tensors: Sequence[Any],
    cotangents: Sequence[Any],
    directions: Sequence[Any],
    needed: Sequence[bool],
) -> list[Any]:
    """A tensor for each tensor of the call; None where no derivative is needed."""
    if not any(needed[: call.count]) or all(d is None for d in directions):
        return [None] * call.count
    if call.batch is not None:
        raise _unknown(call.function.name, "A second derivative of several products at once")
    given = [_zeros(tensors[n], call) if directions[n] is None else directions[n] for n in call.wanted_inputs]
    return _by_input(call, _curvature_function().apply(call, *tensors, *cotangents, *given))


def _zeros(like: Any, call: TorchCall) -> Any:
    zeros = require_torch().zeros_like(like)
    return zeros if call.batch is None else zeros.expand(call.batch, *zeros.shape)


def _filled(results: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """Cotangents of all real outputs: zeros where one is missing."""
    torch = require_torch()
    return [torch.zeros(s, **o) if g is None else g for g, (s, o) in zip(given, results, strict=True)]


def _by_input(call: TorchCall, values: Sequence[Any]) -> list[Any]:
    found: list[Any] = [None] * call.count
    for n, value in zip(call.wanted_inputs, values, strict=True):
        found[n] = value
    return found


def _sum(a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else a + b


# --- several at once


def _one_by_one(function: Any) -> Callable[..., tuple[object, object]]:
    """A ``vmap`` that runs the function once per item of the batch."""
    torch = require_torch()

    def vmap(info: Any, in_dims: tuple[Any, ...], call: TorchCall, *tensors: Any) -> tuple[object, object]:
        if info.batch_size == 0:
            raise InvalidArgumentError(f"{call.function.name} was mapped over an empty batch.")
        calls = [_item(call, n) for n in range(info.batch_size)]
        rows = [
            function().apply(
                item, *[t if d is None else t.select(d, n) for t, d in zip(tensors, in_dims[1:], strict=True)]
            )
            for n, item in enumerate(calls)
        ]
        if not call.snapshot:
            call.snapshot[:], call.results[:] = [[item.snapshot[0] for item in calls]], calls[0].results
        stacked = tuple(None if column[0] is None else torch.stack(column) for column in zip(*rows, strict=True))
        return stacked, tuple(None if column is None else 0 for column in stacked)

    return vmap


def _item(call: TorchCall, number: int) -> TorchCall:
    """One of the calls of a map, before it has run or afterwards."""
    snapshots = [s[number] if isinstance(s, list) else s for s in call.snapshot]
    return replace(call, snapshot=snapshots, results=list(call.results))


def _batched(function: Any) -> Callable[..., tuple[object, object]]:
    """A ``vmap`` for products: those with the same J are computed together."""
    one_by_one = _one_by_one(function)

    def vmap(info: Any, in_dims: tuple[Any, ...], call: TorchCall, *tensors: Any) -> tuple[object, object]:
        dims = in_dims[1:]
        is_same = all(d is None for d in dims[: call.count]) and call.batch is None
        if not is_same or (info.batch_size > 0 and any(map(wants_derivative, tensors))):
            return one_by_one(info, in_dims, call, *tensors)
        given = [
            t.expand(info.batch_size, *t.shape) if d is None else t.movedim(d, 0)
            for t, d in zip(tensors[call.count :], dims[call.count :], strict=True)
        ]
        found = function().apply(replace(call, batch=info.batch_size), *tensors[: call.count], *given)
        return found, (0,) * len(found)

    return vmap


def _in_batch(call: TorchCall, tensors: Sequence[Any], compute: Callable[..., tuple[Any, ...]]) -> tuple[Any, ...]:
    """Products, also of the tensors of torch's prototype vmap (``is_grads_batched=True``, ``vectorize=True``)."""
    torch = require_torch()
    is_batched = [torch._C._functorch.is_legacy_batchedtensor(t) for t in tensors]
    if not any(is_batched):
        with _as_constants(call, tensors):
            return compute(call, tensors[: call.count], tensors[call.count :])
    if any(is_batched[: call.count]) or call.batch is not None:
        raise UnsupportedError(
            f"{call.function.name} is mapped by torch's prototype vmap (is_grads_batched=True, vectorize=True), which "
            "does not let its values be read. Use torch.func.vmap."
        )
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    parts = [torch._remove_batch_dim(t, level, 1, 0) if b else t for t, b in zip(tensors, is_batched, strict=True)]
    count = next(len(t) for t, b in zip(parts, is_batched, strict=True) if b)
    given = [
        t if b else t.expand(count, *t.shape)
        for t, b in zip(parts[call.count :], is_batched[call.count :], strict=True)
    ]
    found = compute(replace(call, batch=count), parts[: call.count], given)
    return tuple(torch._add_batch_dim(f, 0, level) for f in found)


# Arguments of kernels by name, and values as kernels take and return them, from and to torch tensors.


def host_number(value: Any) -> Any:
    return value.item() if value.ndim == 0 else value.cpu().numpy()


def as_tensor(block: object, device: object) -> Any:
    torch = require_torch()
    return block if isinstance(block, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(block)).to(device)


def returned_tensor(returned: object, kernel: object, device: object) -> object:
    bound = backend.primal_kernel(kernel)
    assert bound is not None
    values = returned if isinstance(returned, (list, tuple)) else [returned]
    arrays = [np.asarray(backend.as_numpy(v)) for v in values]
    joined = arrays[0] if len(arrays) == 1 else np.concatenate([a.reshape(-1) for a in arrays])
    dtype = backend.to_numpy_type(backend.return_dtype(bound[0]))
    return require_torch().from_numpy(np.array(joined, dtype)).to(device)


class Signature(NamedTuple):
    """The names of the arguments, and the annotations of a kernel's."""

    names: list[str]
    annotations: dict[str, object]

    @classmethod
    def of(cls, kernel: Any) -> Signature:
        bound = backend.primal_kernel(kernel)
        if bound is None:
            return cls(list(inspect.signature(kernel).parameters), {})
        annotations = {a.name: a.annotation for a in backend.arguments(bound[0])[len(bound[1]) :]}
        return cls(list(annotations), annotations)

    def is_value(self, name: str) -> bool:
        annotation = self.annotations.get(name)
        return annotation is not None and not backend.is_array_annotation(annotation)

    def value_shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of the tensor for an argument passed by value; None for an array."""
        if not self.is_value(name):
            return None
        kind = self.annotations[name]
        if isinstance(kind, backend.MatrixType):
            return tuple(kind.get_shape())
        return ()
