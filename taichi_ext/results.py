"""Where the Jacobian goes: arrays given as ``out=``, and tensors where outputs are tensors."""

from __future__ import annotations

from typing import Any

import numpy as np

from taichi_ext import _taichi
from taichi_ext.arguments import KernelCall, Target, flatten
from taichi_ext.errors import InvalidArgumentError


def by_path(out: Any, skeleton: Any) -> list[tuple[str, Any]]:
    """The arrays of ``out`` in the order of the result, which has the structure of ``skeleton``."""
    given = dict(flatten(out, "")[0])
    paths = [path for path, _ in flatten(skeleton, "")[0]]
    if set(given) != set(paths):
        shown, wanted = (", ".join(repr(p) for p in sorted(x)) for x in (given, paths))
        raise InvalidArgumentError(f"out has the structure {shown}; the result has {wanted}.")
    return [(path, given[path]) for path in paths]


def in_place(target: Any, others: list[Any]) -> np.ndarray | None:
    """The memory of an array given as ``out`` where J can be computed in it: it is nobody else's."""
    host = _taichi.host_values(target) if not isinstance(target, _taichi.Field) else None
    if host is None or not host.flags.c_contiguous or not host.flags.writeable or _taichi.stores_by_column():
        return None
    shared = [_taichi.host_values(o) for o in others]
    return None if any(s is not None and np.may_share_memory(host, s) for s in shared) else host


def check_out(leaves: list[tuple[str, Any]], wanted: list[tuple[tuple[int, ...], Any]]) -> None:
    """Raise, before anything runs, where the arrays of ``out`` cannot take Jacobians of these shapes and types."""
    for (path, target), (shape, dtype) in zip(leaves, wanted, strict=True):
        place = f"out{path}"
        if isinstance(target, _taichi.Field):
            given = _taichi.full_field_shape(target)
        elif _taichi.is_array(target):
            given = _taichi.full_shape(target)
        else:
            raise InvalidArgumentError(f"{place} is {target!r}; expected a NumPy array, tensor, ti.ndarray or field.")
        if tuple(given) != tuple(shape):
            raise InvalidArgumentError(f"{place} has shape {tuple(given)}; the Jacobian has {tuple(shape)}.")
        host = _taichi.host_values(target)
        if host is None and _taichi.is_torch_tensor(target) and not _taichi.is_own_device(target):
            raise InvalidArgumentError(f"{place} is on {target.device}, not where Taichi runs; give a tensor there.")
        found = host.dtype if host is not None else _taichi.numpy_dtype_of(target)
        if host is not None and not host.flags.writeable:
            raise InvalidArgumentError(f"{place} is read-only.")
        if found != dtype:
            raise InvalidArgumentError(f"{place} has dtype {found}; the Jacobian has {dtype}.")


def fill_out(out: Any, result: Any) -> Any:
    """Copy the result into ``out`` where it is not already there."""
    for (_, target), (_, values) in zip(by_path(out, result), flatten(result)[0], strict=True):
        host = _taichi.host_values(target)
        if host is not None:
            if not np.shares_memory(host, values):
                host[...] = values
        elif _taichi.is_torch_tensor(target):
            target.copy_(_taichi.torch_from_numpy(values, target.device))
        else:
            target.from_numpy(np.ascontiguousarray(values))
    return out


def as_torch(result: Any, call: KernelCall, outputs: list[Target]) -> Any:
    """The result as tensors, on their device, where the outputs are tensors."""
    values = [call.value(t) if t.kind in ("argument", "array") else None for t in outputs]
    if not values or not all(_taichi.is_torch_tensor(v) for v in values):
        return result
    leaves, rebuild = flatten(result)
    return rebuild([_taichi.torch_from_numpy(leaf, values[0].device) for _, leaf in leaves])
