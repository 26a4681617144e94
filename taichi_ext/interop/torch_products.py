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
    """The data that a call passes through torch in addition to its tensors."""

    function: Any  # computes outputs and products, see ``torch_runs.Runs``
    wanted: tuple[bool, ...]  # by input, whether a derivative is wanted
    tensor_names: tuple[str, ...]  # the arguments that the tensors after the inputs are
    constants: Mapping[str, object]  # the other arguments by name
    snapshot: list[Any]  # once it has run, the fields that it used, as they were before; within a map, a list of those
    results: list[Any]  # the shape and type of each real output, once it has run
    batch: int | None = None  # how many cotangents or directions along a leading axis; None: one, without that axis

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
    proxies = (tracing.get_proxy_slot(t, mode.tracer, None) for t in tensors)
    nodes, seen = [f.proxy.node for f in proxies if f is not None], set[object]()
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


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    ctx.call, ctx.is_real = inputs[0], [r.is_floating_point() for r in output]
    ctx.save_for_backward(*inputs[1:])
    ctx.save_for_forward(*inputs[1:])
    ctx.mark_non_differentiable(*[r for r in output if not r.is_floating_point()])
    ctx.set_materialize_grads(False)


def _run(call: TorchCall, *tensors: object) -> tuple[object, ...]:
    with _as_constants(call, tensors):
        return call.function.plain(call, tensors)


def _run_backward(ctx: Any, *gradients: Any) -> tuple[object, ...]:
    given = [g for g, is_real in zip(gradients, ctx.is_real, strict=True) if is_real]
    return None, *_rows(ctx.call, ctx.saved_tensors, _filled(ctx.call.results, given))


def _run_forward(ctx: Any, _: None, *tangents: Any) -> tuple[Any, ...]:
    outputs = list(_columns(ctx.call, ctx.saved_tensors, tangents))
    return tuple(outputs.pop(0) if is_real else None for is_real in ctx.is_real)


def _rows_backward(ctx: Any, *gradients: Any) -> tuple[object, ...]:
    call, (tensors, cotangents), directions = ctx.call, _split(ctx), _by_input(ctx.call, gradients)
    curved = _curvature(call, tensors, cotangents, directions, ctx.needs_input_grad[1:])
    return None, *curved, *_columns(call, tensors, directions)


def _rows_forward(ctx: Any, _: None, *tangents: Any) -> tuple[Any, ...]:
    call, (tensors, cotangents) = ctx.call, _split(ctx)
    along = _curvature(call, tensors, cotangents, tangents[: call.count], call.wanted)
    added = _rows(call, tensors, _filled(call.results, tangents[call.count :]))
    return tuple(added[n] if along[n] is None else along[n] + added[n] for n in call.wanted_inputs)


def _columns_backward(ctx: Any, *gradients: Any) -> tuple[object, ...]:
    call, (tensors, given), cotangents = ctx.call, _split(ctx), _filled(ctx.call.results, gradients)
    back = _rows(call, tensors, cotangents)
    curved = _curvature(call, tensors, cotangents, _by_input(call, given), ctx.needs_input_grad[1:])
    return None, *curved, *[back[n] for n in call.wanted_inputs]


def _columns_forward(ctx: Any, _: None, *tangents: Any) -> tuple[Any, ...]:
    call, count = ctx.call, ctx.call.count
    if any(t is not None for t in tangents[:count]):
        raise _unknown(call.function.name, "A second derivative in forward mode alone")
    return tuple(_columns(call, ctx.saved_tensors[:count], _by_input(call, tangents[count:])))


def _product(name: str, call: TorchCall, *tensors: Any) -> tuple[Any, ...]:
    """Products, also of the tensors of torch's prototype vmap (``is_grads_batched=True``, ``vectorize=True``)."""
    torch, compute = require_torch(), getattr(call.function, name)
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
    pairs = list(zip(parts, is_batched, strict=True))
    count = next(len(t) for t, b in pairs if b)
    given = [t if b else t.expand(count, *t.shape) for t, b in pairs[call.count :]]
    outputs = compute(replace(call, batch=count), parts[: call.count], given)
    return tuple(torch._add_batch_dim(f, 0, level) for f in outputs)


def _curvature_of(call: TorchCall, *tensors: Any) -> tuple[object, ...]:
    with _as_constants(call, tensors):
        return call.function.curvature(call, tensors[: call.count], tensors[call.count :])


def _third(ctx: Any, *_: object) -> tuple[object, ...]:
    raise _unknown(ctx.call.function.name, "A third derivative")


def _split(ctx: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """The tensors of the call, and the cotangents or directions."""
    return ctx.saved_tensors[: ctx.call.count], ctx.saved_tensors[ctx.call.count :]


@functools.cache
def _function(kind: str) -> Any:
    """A ``torch.autograd.Function``, see the table above; each gives a tensor for each output or wanted input."""
    forward, backward, jvp, is_product = _FUNCTIONS[kind]
    methods = {"forward": forward, "setup_context": _keep_inputs, "backward": backward, "jvp": jvp}
    methods["vmap"] = functools.partial(_batched if is_product else _one_by_one, kind)
    members = {name: staticmethod(method) for name, method in methods.items()}
    return type(kind, (require_torch().autograd.Function,), members)


_FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any], bool]] = {
    "Run": (_run, _run_backward, _run_forward, False),
    "Rows": (functools.partial(_product, "rows"), _rows_backward, _rows_forward, True),
    "Columns": (functools.partial(_product, "columns"), _columns_backward, _columns_forward, True),
    "Curvature": (_curvature_of, _third, _third, False),
}


def run(call: TorchCall, *tensors: object) -> tuple[Any, ...]:
    """The outputs, which torch differentiates."""
    return _function("Run").apply(call, *tensors)


# --- calls of these functions, on tensors that may be missing


def _rows(call: TorchCall, tensors: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
    """A tensor for each tensor of the call, None for those that are not wanted."""
    rows = _function("Rows").apply(call, *tensors, *cotangents)
    return _by_input(call, rows)


def _columns(call: TorchCall, tensors: Sequence[Any], directions: Sequence[Any]) -> Sequence[Any]:
    """J times directions, of which there may be one for each tensor of the call."""
    if all(d is None for d in directions):
        return [None] * len(call.results)
    given = [_zeros(tensors[n], call) if directions[n] is None else directions[n] for n in call.wanted_inputs]
    if _tracing_mode() is not None:
        return _columns_by_matrix(call, tensors, given)
    return _function("Columns").apply(call, *tensors, *given)


def _columns_by_matrix(call: TorchCall, tensors: Sequence[Any], directions: Sequence[Any]) -> list[Any]:
    """J times directions that torch.fx writes down: J is a constant of its graph."""
    with _as_constants(call, tensors):
        rows = call.function.jacobian(call, tensors)
    result: list[Any] = []
    for row, (shape, _) in zip(rows, call.results, strict=True):
        parts: list[Any] = [b @ d.reshape(b.shape[1]).to(b.dtype) for b, d in zip(row, directions, strict=True)]
        result.append(require_torch().stack(parts).sum(0).reshape(shape))
    return result


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
    return _by_input(call, _function("Curvature").apply(call, *tensors, *cotangents, *given))


def _zeros(like: Any, call: TorchCall) -> Any:
    zeros = require_torch().zeros_like(like)
    return zeros if call.batch is None else zeros.expand(call.batch, *zeros.shape)


def _filled(results: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """Cotangents of all real outputs: zeros where one is missing."""
    torch = require_torch()
    return [torch.zeros(s, **o) if g is None else g for g, (s, o) in zip(given, results, strict=True)]


def _by_input(call: TorchCall, values: Sequence[Any]) -> list[Any]:
    result: list[Any] = [None] * call.count
    for n, value in zip(call.wanted_inputs, values, strict=True):
        result[n] = value
    return result


# --- several at once


def _one_by_one(kind: str, info: Any, in_dims: tuple[Any, ...], call: TorchCall, *tensors: Any) -> tuple[Any, Any]:
    """A ``vmap`` that runs the function once per item of the batch."""
    if info.batch_size == 0:
        raise InvalidArgumentError(f"{call.function.name} was mapped over an empty batch.")
    calls = [_item(call, n) for n in range(info.batch_size)]
    dims = in_dims[1:]
    rows = [
        _function(kind).apply(item, *[t if d is None else t.select(d, n) for t, d in zip(tensors, dims, strict=True)])
        for n, item in enumerate(calls)
    ]
    if not call.snapshot:
        call.snapshot[:], call.results[:] = [[item.snapshot[0] for item in calls]], calls[0].results
    columns = zip(*rows, strict=True)
    stacked = tuple(None if column[0] is None else require_torch().stack(column) for column in columns)
    return stacked, tuple(None if column is None else 0 for column in stacked)


def _item(call: TorchCall, number: int) -> TorchCall:
    """One of the calls of a map, before it has run or afterwards."""
    snapshots = [s[number] if isinstance(s, list) else s for s in call.snapshot]
    return replace(call, snapshot=snapshots, results=list(call.results))


def _batched(kind: str, info: Any, in_dims: tuple[Any, ...], call: TorchCall, *tensors: Any) -> tuple[Any, Any]:
    """A ``vmap`` for products: those with the same J are computed together."""
    dims = in_dims[1:]
    is_same = all(d is None for d in dims[: call.count]) and call.batch is None
    if not is_same or (info.batch_size > 0 and any(map(wants_derivative, tensors))):
        return _one_by_one(kind, info, in_dims, call, *tensors)
    pairs = list(zip(tensors, dims, strict=True))[call.count :]
    given = [t.expand(info.batch_size, *t.shape) if d is None else t.movedim(d, 0) for t, d in pairs]
    results = _function(kind).apply(replace(call, batch=info.batch_size), *tensors[: call.count], *given)
    return results, (0,) * len(results)


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
        return tuple(kind.get_shape()) if isinstance(kind, backend.MatrixType) else ()
