"""The arrays that hold the Jacobian: those given as ``out=``, and tensors if the outputs are tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.api.inputs.arguments import KernelCall, Target, flatten
from taichi_ext.errors import InvalidArgumentError, shown


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
            raise InvalidArgumentError(
                f"{place} is {shown(target)}; expected a NumPy array, tensor, ti.ndarray or field."
            )
        problem = backend.ended_problem(target) if isinstance(target, backend.Field) else _array_problem(target)
        if problem:
            raise InvalidArgumentError(f"{place} {problem}.")
        given = backend.full_field_shape(target) if isinstance(target, backend.Field) else backend.full_shape(target)
        if tuple(given) != tuple(shape):
            raise InvalidArgumentError(f"{place} has shape {tuple(given)}; the Jacobian has {tuple(shape)}.")
        host = backend.host_values(target)
        found = host.dtype if host is not None else backend.numpy_dtype_of(target)
        if host is not None and not host.flags.writeable:
            raise InvalidArgumentError(f"{place} is read-only; give an array that can be written.")
        if found != dtype:
            raise InvalidArgumentError(f"{place} has dtype {found}; the Jacobian has {dtype}.")


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
