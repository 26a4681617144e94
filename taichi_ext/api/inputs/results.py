"""The arrays that hold the Jacobian: those given as ``out=``, and tensors if the outputs are tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.api.inputs.arguments import KernelCall, Target, flatten
from taichi_ext.api.inputs.sparse_results import check_fit
from taichi_ext.errors import InvalidArgumentError, raise_problem, unexpected
from taichi_ext.launches import FieldKey, NumberArgument, NumberColumns, PipelineArgument
from taichi_ext.program.keys import RETURN, Key
from taichi_ext.record.variables import Variable
from taichi_ext.runtime.launching.tangents import Placed
from taichi_ext.runtime.memory.array_tangents import Given
from taichi_ext.runtime.memory.shadows import FieldTable, array_info, view_of
from taichi_ext.runtime.sparse.matrices import scipy_sparse


def by_path(out: object, skeleton: object) -> list[tuple[str, Any]]:
    """The arrays of ``out`` in the order of the result, which has the structure of ``skeleton``."""
    given = dict(flatten(out, "out")[0])
    paths = [path for path, _ in flatten(skeleton)[0]]
    if set(given) != set(paths):
        raise InvalidArgumentError(f"out {_entries(given)}; the result {_entries(paths)}.")
    return [(path, given[path]) for path in paths]


def _entries(paths: Iterable[str]) -> str:
    known = sorted(paths)
    if known == [""]:
        return "is one array"
    return f"has the entries {', '.join(f'out{p}' for p in known)}" if known else "has no entries"


def in_place(target: object, others: Sequence[object]) -> np.ndarray | None:
    """The memory of an array given as ``out`` if no other container aliases it."""
    if not backend.is_array(target) or _array_problem(target):
        return None
    host = backend.host_values(target)
    if host is None or not host.flags.c_contiguous or not host.flags.writeable or backend.stores_by_column():
        return None
    shared = [backend.host_values(o) for o in others]
    return None if any(s is not None and np.may_share_memory(host, s) for s in shared) else host


def check_out(leaves: Sequence[tuple[str, Any]], wanted: Sequence[tuple[tuple[int, ...], object]]) -> None:
    """Raise, before anything runs, where the arrays of ``out`` cannot take Jacobians of these shapes and types."""
    for (path, target), (shape, dtype) in zip(leaves, wanted, strict=True):
        place = f"out{path}"
        if not isinstance(target, backend.Field) and not backend.is_array(target):
            raise unexpected(place, target, "a NumPy array, tensor, ti.ndarray or field")
        is_field = isinstance(target, backend.Field)
        raise_problem(place, backend.ended_problem(target) if is_field else _array_problem(target))
        given = backend.full_field_shape(target) if is_field else backend.full_shape(target)
        host = backend.host_values(target)
        kind = host.dtype if host is not None else backend.numpy_dtype_of(target)
        check_fit(place, host, (tuple(given), kind), (tuple(shape), dtype))


def _array_problem(array: Any) -> str:
    """Why an array cannot take a Jacobian, whatever its shape."""
    problem = backend.array_problem(array)
    if problem:
        return problem
    if backend.is_torch_tensor(array) and array.requires_grad:
        return "is a tensor that requires a gradient; give out.detach()"
    host = backend.host_values(array)
    if host is not None and _overlaps_itself(host):
        return "has entries that share their memory; give an array of its own, such as np.empty(shape)"
    return ""


def _overlaps_itself(array: np.ndarray) -> bool:
    """Whether two entries may lie at the same place, as those of ``np.broadcast_to`` do."""
    extent = array.itemsize
    for stride, size in sorted((abs(s), n) for s, n in zip(array.strides, array.shape, strict=True) if n > 1):
        if stride < extent:
            return array.size > 0
        extent += stride * (size - 1)
    return False


def check_out_is_separate(leaves: Sequence[tuple[str, object]], containers: Sequence[object]) -> None:
    """Raise for an ``out`` that is also a parameter, an output, an argument, or the ``out`` of another block."""
    for n, (path, target) in enumerate(leaves):
        if any(_is_shared(target, other) for other in containers):
            raise InvalidArgumentError(
                f"out{path} shares memory with a parameter, an output or an argument, which J would overwrite; give an "
                "array of its own."
            )
        for other_path, other in leaves[:n]:
            if _is_shared(target, other):
                raise InvalidArgumentError(f"out{path} and out{other_path} share memory; give each its own array.")


def _is_shared(a: object, b: object) -> bool:
    if isinstance(a, backend.Field) and isinstance(b, backend.Field):
        return backend.shares_components(a, b)
    values = [backend.host_values(x) for x in (a, b)]
    if values[0] is None or values[1] is None:
        return a is b or backend.is_same_storage(a, b)
    return bool(np.shares_memory(*values))


def fill_out(out: object, result: object) -> object:
    """Copy the result into ``out`` where it is not already there."""
    for (_, target), (_, values) in zip(by_path(out, result), flatten(result)[0], strict=True):
        host = backend.host_values(target)
        if host is not None:
            if not np.shares_memory(host, values):
                host[...] = values
        else:
            backend.put_back(target, np.ascontiguousarray(values))
    return out


def as_torch(result: object, call: KernelCall, outputs: list[Target]) -> Any:
    """The result as tensors, on their device, where the outputs are tensors."""
    values: list[Any] = [call.value(t) if t.kind in ("argument", "array") else None for t in outputs]
    if not values or not all(backend.is_torch_tensor(v) for v in values):
        return result
    leaves, rebuild = flatten(result)
    return rebuild([backend.torch_from_numpy(leaf, values[0].device) for _, leaf in leaves])


# The parameters and outputs of one call: their keys, shapes and columns.


@dataclass(frozen=True)
class Layout:
    """All parameters and outputs, in the order in which the user has named them."""

    params: tuple[Placed, ...]  # the parameters; their columns follow each other
    outputs: tuple[Placed, ...]
    arrays: tuple[Given, ...]  # the arrays among both
    count: int  # the number of columns of J
    passed: dict[int, int]  # the first columns of numbers that a pipeline takes, by position

    @property
    def sizes(self) -> dict[Key, int]:
        """The numbers of entries of the containers of parameters."""
        return {p.container: p.rows for p in self.params}

    @property
    def seeds(self) -> tuple[Placed, ...]:
        """The parameters that are fields and arrays."""
        held = (p for p in self.params if p.target.kind in ("field", "array", "argument"))
        return tuple(p for p in held if not isinstance(p.key, (NumberArgument, PipelineArgument)))

    def numbers(self, directions: np.ndarray | None) -> NumberColumns:
        """The numbers that are parameters; with directions they have rows in place of columns."""
        arguments: dict[str, int] = {}
        constants: list[tuple[Variable, int]] = []
        rows: list[np.ndarray] = []
        count = 0
        passed = [p for p in self.params if isinstance(p.key, NumberArgument)]
        for p in (*passed, *(p for p in self.params if p.target.variable is not None)):
            first = p.first
            if directions is not None:
                first, count = count, count + p.size
                rows.append(directions[p.columns])
            if p.target.variable is None:
                arguments[p.target.argument] = first
            else:
                constants.append((p.target.variable, first))
        return NumberColumns(arguments, tuple(constants), np.concatenate(rows) if rows else None)


def lay_out(call: KernelCall, fields: FieldTable, params: Sequence[Target], outputs: Sequence[Target]) -> Layout:
    """Find the keys and shapes of params and outputs, and give every parameter its columns.

    Raises:
        InvalidArgumentError: a parameter is given twice, or is a part of another one; or an output cannot be written.
    """
    arrays: list[Given] = []
    placed: list[Placed] = []
    total = 0
    for target in params:
        param = _placed(call, fields, target, arrays, total)
        _check_other(param, placed)
        placed.append(param)
        total += param.size
    layouts = [_output(call, fields, target, arrays) for target in outputs]
    passed = {p.target.position: p.first for p in placed if isinstance(p.key, PipelineArgument)}
    return Layout(tuple(placed), tuple(layouts), tuple(arrays), total, passed)


def _placed(call: KernelCall, fields: FieldTable, target: Target, arrays: list[Given], first: int = 0) -> Placed:
    if target.variable is not None:
        return Placed(target, target.variable.key, target.shape, rows=math.prod(target.shape), first=first)
    if call.is_value(target):
        kind, shape = NumberArgument if call.kernel else PipelineArgument, call.value_shape(target)
        return Placed(target, kind(target.argument), shape, rows=math.prod(shape), first=first)
    if target.kind == "field":
        info = fields.part(target.field)
        assert isinstance(info.key, FieldKey)
        whole, element = fields.infos[info.key.whole], math.prod(info.element_shape)
        shape = (*info.shape, *info.element_shape)
        rows = slice(None) if info is whole else slice(info.key.component, None, math.prod(whole.element_shape))
        return Placed(target, info.key, shape, info.dtype, whole.size, rows, element, first)
    value, annotation = call.value(target), call.annotation(target)
    key = view_of(value)
    info = array_info(key, target.name, value, backend.array_element_shape(value, annotation))
    if info is None:
        raise InvalidArgumentError(f"{target.name} has integer elements; only real numbers have a derivative.")
    arrays.append(Given(target.name, key, value, info))
    element = math.prod(info.element_shape)
    return Placed(target, key, key.shape, info.dtype, key.size, slice(None), element, first)


def _output(call: KernelCall, fields: FieldTable, target: Target, arrays: list[Given]) -> Placed:
    if target.kind == "return":
        shape = call.return_shape()
        return Placed(target, RETURN, shape, call.return_dtype(), math.prod(shape))
    if call.is_value(target):
        raise InvalidArgumentError(f"{target.name} is passed by value and cannot be written by the kernel.")
    host = None if target.kind == "field" else backend.host_values(call.value(target))
    if host is not None and not host.flags.writeable:
        raise InvalidArgumentError(f"{target.name} is read-only; give an array that can be written.")
    return _placed(call, fields, target, arrays)


def _check_other(param: Placed, others: list[Placed]) -> None:
    """Raise for a parameter that is given twice, and for a field given together with one of its components."""
    for other in others:
        if other.key == param.key:
            raise InvalidArgumentError(f"{param.target.name} is given twice among params.")
        if param.container == other.container and param.container in (param.key, other.key):
            raise InvalidArgumentError(
                f"{other.target.name} and {param.target.name} share a part of their memory; name the whole field, or "
                "each component once."
            )


def joined(blocks: Sequence[Sequence[Any]], layout: Layout) -> Any:
    """The blocks of J, one for each pair of output and parameter, as one matrix: an array or CSR."""
    is_single = len(blocks) == len(blocks[0]) == 1
    if not isinstance(blocks[0][0], np.ndarray):
        return blocks[0][0] if is_single else scipy_sparse().block_array(blocks, format="csr")
    parts = [
        [np.reshape(block, (o.size, p.size)) for block, p in zip(row, layout.params, strict=True)]
        for row, o in zip(blocks, layout.outputs, strict=True)
    ]
    return parts[0][0] if is_single else np.block(parts)


def by_parameter(values: np.ndarray, shape: tuple[int, ...], layout: Layout) -> list[np.ndarray]:
    """The Jacobian of one output, split by parameter."""
    full = values.reshape((*shape, values.shape[1]))
    return [full[..., p.columns].reshape((*shape, *p.shape)) for p in layout.params]
