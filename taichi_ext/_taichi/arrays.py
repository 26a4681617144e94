"""Fields and arrays as Python sees them: types, shapes, layouts, values."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from taichi._lib import core
from taichi.lang import impl
from taichi.lang._ndarray import Ndarray
from taichi.lang.expr import Expr
from taichi.lang.matrix import MatrixField, MatrixType
from taichi.lang.struct import StructField
from taichi.lang.util import cook_dtype, to_numpy_type, to_taichi_type
from taichi.types import primitive_types

from taichi_ext._taichi.kernels import is_array_annotation, is_scalar_type


def is_torch_tensor(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def is_own_device(tensor: Any) -> bool:
    """Whether a tensor is on the device that Taichi runs on."""
    return tensor.device.type == "cuda" and impl.current_cfg().arch == core.Arch.cuda


def host_values(x: Any) -> Any:
    """The memory of a NumPy array or of a tensor on the host as a NumPy array; None for anything else."""
    if isinstance(x, np.ndarray):
        return x
    if is_torch_tensor(x) and x.device.type == "cpu":
        return x.detach().numpy()
    return None


def field_components(field: Any) -> list[Expr]:
    """The placed scalar components of a scalar or matrix field, in row-major order."""
    return list(field.vars)


def given_name(field: Any) -> str:
    """What Taichi calls a placed field: ``name=`` of the user's, or a number of its own; empty before it is placed."""
    return field._name if is_placed(field) else ""


def is_placed(field: Any) -> bool:
    return all(v.ptr.snode() is not None for v in field.vars)


def field_offset(field: Any) -> tuple[int, ...]:
    """First index of each axis; empty when all are 0."""
    return tuple(field.vars[0].ptr.snode().offset)


def array_element_shape(value: Any, annotation: Any) -> tuple[int, ...]:
    """Shape of the elements of an array that is passed to an argument with an annotation."""
    if isinstance(value, Ndarray):
        return tuple(value.element_shape)
    dtype = getattr(annotation, "dtype", None)
    if isinstance(dtype, MatrixType):
        return tuple(value.shape[-dtype.ndim :])
    return ()


def outer_array_dtype(value: Any) -> Any:
    """Scalar type of an array outside a kernel."""
    return to_taichi_type(value.dtype)


def is_array(x: Any) -> bool:
    """Whether x is an array that a kernel takes: NumPy, torch or ti.ndarray."""
    return isinstance(x, (np.ndarray, Ndarray)) or is_torch_tensor(x)


def full_shape(array: Any) -> tuple[int, ...]:
    """Shape of an array, its element shape included."""
    shape: Any = array.shape
    return (*shape, *array.element_shape) if isinstance(array, Ndarray) else tuple(shape)


def full_field_shape(field: Any) -> tuple[int, ...]:
    """Shape of a field, its element shape included."""
    if not isinstance(field, MatrixField):
        return tuple(field.shape)
    return (*field.shape, field.n) if field.ndim == 1 else (*field.shape, field.n, field.m)


def numpy_dtype_of(x: Any) -> Any:
    return np.dtype(to_numpy_type(x.dtype))


def torch_from_numpy(values: Any, device: Any) -> Any:
    torch = sys.modules["torch"]
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)


def argument_problem(annotation: Any, value: Any) -> str:
    """What is wrong with passing a value to a kernel argument; empty when nothing is."""
    number = (int, float, np.integer, np.floating)
    if is_scalar_type(annotation):
        allowed = number if id(annotation) in primitive_types.real_type_ids else (int, np.integer)
        return "" if isinstance(value, allowed) else f"is a {type(value).__name__}; expected {annotation.to_string()}"
    if is_array_annotation(annotation):
        return _array_problem(annotation, value)
    if isinstance(annotation, MatrixType) and is_torch_tensor(value):
        return "is a tensor; a vector or matrix is passed by value as a ti.Vector, a ti.Matrix or a list"
    if isinstance(annotation, MatrixType):
        shape = (annotation.n,) if annotation.ndim == 1 else (annotation.n, annotation.m)
        given = getattr(value, "get_shape", None)
        found = tuple(given()) if given is not None else np.shape(value)
        return "" if tuple(found) == shape else f"has shape {tuple(found)}; expected {shape}"
    return ""


def _array_problem(annotation: Any, value: Any) -> str:
    if not is_array(value) and hasattr(value, "__dlpack__"):
        return (
            f"is a {type(value).__module__}.{type(value).__name__}, which Taichi does not take; pass np.from_dlpack(a) "
            "or torch.from_dlpack(a), which share its memory"
        )
    if not is_array(value):
        return f"is a {type(value).__name__}; expected a NumPy array, a torch tensor or a ti.ndarray"
    if isinstance(value, np.ndarray) and not (value.flags.c_contiguous or value.flags.f_contiguous):
        return "is a NumPy array that is not contiguous; pass np.ascontiguousarray(...)"
    if is_torch_tensor(value):
        if not value.is_contiguous():
            return "is a tensor that is not contiguous; pass .contiguous()"
        on_cuda = impl.current_cfg().arch == core.Arch.cuda
        if value.device.type != "cpu" and not (value.device.type == "cuda" and on_cuda):
            return f"is a tensor on {value.device}, but Taichi runs on {core.arch_name(impl.current_cfg().arch)}"
    wanted = annotation.dtype.dtype if isinstance(annotation.dtype, MatrixType) else annotation.dtype
    if wanted is not None and outer_array_dtype(value) != cook_dtype(wanted):
        given = outer_array_dtype(value).to_string()
        return f"has elements of type {given}; expected {cook_dtype(wanted).to_string()}"
    if annotation.ndim is not None:
        element = array_element_shape(value, annotation)
        dims = len(full_shape(value)) - len(element)
        if dims != annotation.ndim:
            return f"has {dims} dimensions; expected {annotation.ndim}"
    return ""


def copy_of(obj: Any) -> Any:
    """The values of a field or array."""
    if is_torch_tensor(obj):
        return obj.detach().clone()
    return obj.copy() if isinstance(obj, np.ndarray) else obj.to_numpy()


def put_back(obj: Any, copy: Any) -> None:
    if isinstance(obj, np.ndarray):
        obj[...] = copy
    elif is_torch_tensor(obj):
        obj.detach().copy_(copy)
    else:
        obj.from_numpy(copy)


def is_flat(field: Any) -> bool:
    """Whether a field is placed in one dense level, its indices beginning at 0."""
    if isinstance(field, StructField):
        return False
    node = field.vars[0].ptr.snode()
    is_single = node.parent is not None and node.parent.parent is not None and node.parent.parent.parent is None
    return is_single and is_dense(field) and not any(node.offset)


def tree_number(field: Any) -> int:
    """Which of the trees that hold all fields a field is placed in."""
    return int(field.vars[0].ptr.snode().get_snode_tree_id())


def is_dense(field: Any) -> bool:
    """Whether all levels of a field's layout are dense."""
    if isinstance(field, StructField):
        return all(is_dense(member) for member in field.field_dict.values())
    node = field.vars[0].ptr.snode().parent
    while node is not None and node.type != core.SNodeType.root:
        if node.type != core.SNodeType.dense:
            return False
        node = node.parent
    return True


def is_under(field: Any, node: Any) -> bool:
    """Whether a field is placed in a node of the layout, or in one below it."""
    current = field.vars[0].ptr.snode()
    while current is not None:
        if current.id == node.ptr.id:
            return True
        current = current.parent
    return False


def is_dynamic(field: Any) -> bool:
    """Whether entries of a field are appended."""
    parent = field.vars[0].ptr.snode().parent
    return parent is not None and parent.type == core.SNodeType.dynamic
