"""Fields and arrays as Python sees them: types, shapes, layouts, values."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from taichi_ext import host
from taichi_ext.backend.field_memory import memory_of_field
from taichi_ext.backend.kernels import is_scalar_type
from taichi_ext.backend.lifetime import InTree, check_not_ended, ended_problem, is_field_alive
from taichi_ext.cached import kept_weakly
from taichi_ext.errors import InvalidArgumentError
from taichi_ext.host import RUNTIME, Kernel, core, ndarray_type, primitive_types, ti

if TYPE_CHECKING:
    from taichi_ext.backend.opaque import Array, Device, Tensor, TypeIs


def is_torch_tensor(x: object) -> TypeIs[Tensor]:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def host_values(x: object) -> Any:
    """The memory of a NumPy array or of a tensor on the host as a NumPy array; None for anything else."""
    if isinstance(x, np.ndarray):
        return x
    if is_torch_tensor(x) and x.device.type == "cpu":
        return x.detach().numpy()
    return None


def memory_place(array: Array) -> tuple[Any, int, bool]:
    """Which memory an array lies in, the address of its first number, and whether its first axis changes fastest.

    A ti.ndarray is a memory of its own, and so is an array without entries.
    """
    if isinstance(array, ti.Ndarray):
        return ("ndarray", id(array)), 0, False
    if is_torch_tensor(array):
        device = array.device.type
        place = "host" if device == "cpu" else str(array.device)
        return (place, array.data_ptr(), False) if array.numel() else (("empty", id(array)), 0, False)
    if not array.size:
        return ("empty", id(array)), 0, False
    flags = array.flags
    return "host", array.__array_interface__["data"][0], flags.f_contiguous and not flags.c_contiguous


def is_same_array(a: object, b: object) -> bool:
    """Whether two arrays are one: the same numbers in the same memory, in the same shape."""
    if a is b:
        return True
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return _is_same_layout(a, b, a.strides, b.strides) and memory_place(a) == memory_place(b)
    if is_torch_tensor(a) and is_torch_tensor(b) and a.device == b.device and _is_strided(a) and _is_strided(b):
        return _is_same_layout(a, b, a.stride(), b.stride()) and memory_place(a) == memory_place(b)
    return False


def _is_strided(tensor: Tensor) -> bool:
    return not tensor.is_nested and tensor.layout == sys.modules["torch"].strided


def _is_same_layout(a: np.ndarray | Tensor, b: np.ndarray | Tensor, strides: object, others: object) -> bool:
    return a.dtype == b.dtype and tuple(a.shape) == tuple(b.shape) and strides == others


def memory_span(array: np.ndarray | Tensor) -> tuple[Any, int, int]:
    """Which memory an array lies in, and from where to where, with whatever lies between its numbers."""
    space, start, _ = memory_place(array)
    if space[0] == "empty":
        return space, 0, 0
    is_tensor = is_torch_tensor(array)
    width = array.element_size() if is_tensor else array.itemsize
    strides = [step * width for step in array.stride()] if is_tensor else array.strides
    ways = [(n - 1) * step for n, step in zip(array.shape, strides, strict=True)]
    return space, start + sum(w for w in ways if w < 0), start + sum(w for w in ways if w > 0) + width


class _HostMemory:
    """Bytes of the host's memory that an object keeps alive."""

    def __init__(self, owner: object, address: int, size: int) -> None:
        self.owner = owner
        self.__array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}


def memory_of(owner: object, address: int, size: int) -> np.ndarray | None:
    """The bytes from an address on, in memory that an array keeps alive; None for the memory of a ti.ndarray.

    On a device they are a copy.
    """
    if isinstance(owner, ti.Ndarray):
        return None
    if not size:
        return np.empty(0, np.uint8)
    if is_torch_tensor(owner) and owner.device.type != "cpu":
        return _on_device(owner, address, size).cpu().numpy().view(np.uint8)
    return np.asarray(_HostMemory(owner, address, size))


def set_memory(owner: object, address: int, values: np.ndarray) -> None:
    """Put bytes back that ``memory_of`` gave."""
    if is_torch_tensor(owner) and owner.device.type != "cpu":
        place = _on_device(owner, address, values.size)
        numbers = np.ascontiguousarray(values).view(numpy_dtype_of(owner))
        place.copy_(torch_from_numpy(numbers, owner.device))
        return
    memory = memory_of(owner, address, values.size)
    if memory is not None and not np.array_equal(memory, values):  # memory that cannot be written has not changed
        memory[...] = values


def _on_device(tensor: Tensor, address: int, size: int) -> Tensor:
    """Numbers in the memory that a tensor on a device lies in."""
    tensor, width = tensor.detach(), tensor.element_size()
    first = (address - tensor.data_ptr()) // width + tensor.storage_offset()
    return tensor.as_strided((size // width,), (1,), first)


def field_components(field: host.Field) -> list[host.Expr]:
    """The placed scalar components of a scalar or matrix field, in row-major order."""
    return list(field.vars)


def shares_components(a: host.Field, b: host.Field) -> bool:
    """Whether two fields, scalar or of matrices, have a placed component in common."""
    own = {id(v) for v in a.vars}
    return any(id(v) in own for v in b.vars)


def is_same_storage(a: object, b: object) -> bool:
    """Whether two tensors on a device lie in the same memory."""
    if not (is_torch_tensor(a) and is_torch_tensor(b) and a.device == b.device and a.device.type == "cuda"):
        return False
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def given_name(field: host.Field) -> str:
    """Taichi's name of a placed field: ``name=`` of the user's, or a number of its own; empty before it is placed."""
    return field._name if is_field_alive(field) and is_placed(field) else ""


def is_placed(field: host.Field) -> bool:
    return all(v.ptr.snode() is not None for v in field.vars)


def field_offset(field: host.Field) -> tuple[int, ...]:
    """First index of each axis; empty when all are 0."""
    while isinstance(field, ti.StructField):
        field = next(iter(field.field_dict.values()))
    return tuple(field.vars[0].ptr.snode().offset)


def array_element_shape(value: Any, annotation: object) -> tuple[int, ...]:
    if isinstance(value, ti.Ndarray):
        return tuple(value.element_shape)
    dtype = getattr(annotation, "dtype", None)
    if isinstance(dtype, host.MatrixType):
        return tuple(value.shape[-dtype.ndim :])
    return ()


def outer_array_dtype(value: Any) -> Any:
    """Scalar type of an array outside a kernel; None where Taichi has none like it."""
    try:
        return host.to_taichi_type(value.dtype)
    except (AttributeError, RuntimeError, AssertionError):  # errors of Taichi's own search
        return None


def is_array(x: object) -> bool:
    """Whether x is an array that a kernel takes: NumPy, torch or ti.ndarray."""
    return isinstance(x, (np.ndarray, ti.Ndarray)) or is_torch_tensor(x)


def full_shape(array: Array) -> tuple[int, ...]:
    shape: Any = array.shape
    return (*shape, *array.element_shape) if isinstance(array, ti.Ndarray) else tuple(shape)


def as_indices(key: Any) -> tuple[Any, ...]:
    """The indices of a subscript; None stands for those of an entry without axes."""
    if type(key) is int:  # quicker
        return (key,)
    return tuple(key) if isinstance(key, (tuple, list)) else () if key is None else (key,)


def rows_of_index(array: Array, index: Any) -> Any:
    """The row of an entry of a ti.ndarray, or its rows; the index of a component may follow."""
    index = as_indices(index)
    shape = full_shape(array)
    width, row = math.prod(shape[len(index) :]), row_at(index, shape)
    return row if width == 1 else np.arange(row * width, (row + 1) * width)


def row_at(index: Iterable[Any], shape: Sequence[int]) -> int:
    """The number of an entry, or of a part that the first indices name."""
    index, row = tuple(index), 0
    for i, size in zip(index, shape, strict=False):
        if not 0 <= i < size:
            raise InvalidArgumentError(
                f"Python accesses entry {index} of a field or array of shape {(*shape,)}. It is outside, and Taichi "
                "accesses other memory there: its indices do not count from the end."
            )
        row = row * size + int(i)
    return row


def full_field_shape(field: host.Field) -> tuple[int, ...]:
    if not isinstance(field, ti.MatrixField):
        return tuple(field.shape)
    return (*field.shape, field.n) if field.ndim == 1 else (*field.shape, field.n, field.m)


def numpy_dtype_of(x: host.Field | Array) -> np.dtype:
    return np.dtype(host.to_numpy_type(x.dtype))


def torch_from_numpy(values: object, device: Device) -> Tensor:
    torch = sys.modules["torch"]
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)


def array_problem(array: Array) -> str:
    """Why Taichi cannot take an array, whatever the kernel expects; empty where it can."""
    problem = ended_problem(array)
    if problem:
        return problem
    if isinstance(array, np.ma.MaskedArray):
        return "is a masked array, whose mask Taichi does not see; pass array.filled(...) or array.data"
    if isinstance(array, np.matrix):
        return "is an np.matrix; pass np.asarray(...)"
    if is_torch_tensor(array):
        problem = _tensor_problem(array)
        if problem:
            return problem
    if outer_array_dtype(array) is None:
        dtype = array.dtype
        if isinstance(dtype, np.dtype) and not dtype.isnative:
            return f"has elements of type {dtype}, in another byte order; pass array.astype({dtype.name!r})"
        return f"has elements of type {dtype}, which Taichi does not know; pass an array of float32 or float64"
    return ""


def _tensor_problem(tensor: Tensor) -> str:
    if tensor.is_nested:
        return "is a nested tensor; pass a padded one, torch.nested.to_padded_tensor(...)"
    if type(tensor).__name__ == "FakeTensor":  # of torch.export, and of torch.compile with fullgraph=True
        return "is a fake tensor, which has no numbers; call the function in torch.compile with fullgraph=False"
    if not _is_strided(tensor):
        return f"is a tensor in the layout {tensor.layout}; pass .to_dense()"
    if tensor.is_quantized:
        return "is a quantized tensor; pass .dequantize()"
    if tensor.is_conj() or tensor.is_neg():
        return f"is a view that is {'conjugated' if tensor.is_conj() else 'negated'}; pass .clone()"
    on_cuda = RUNTIME.config().arch == core.Arch.cuda
    if tensor.device.type != "cpu" and not (tensor.device.type == "cuda" and on_cuda):
        return f"is a tensor on {tensor.device}, but Taichi runs on {core.arch_name(RUNTIME.config().arch)}"
    return ""


def argument_problem(annotation: Any, value: object) -> str:
    """The problem with passing a value to a kernel argument, or an empty text."""
    problem, annotation = ended_problem(value), host.concrete(annotation, value)
    if problem:
        return problem
    number = (int, float, np.integer, np.floating)
    if is_scalar_type(annotation):
        allowed = number if id(annotation) in primitive_types.real_type_ids else (int, np.integer)
        if isinstance(value, allowed):
            return ""
        if isinstance(value, np.bool_):
            return "is a bool of NumPy, which Taichi does not take; pass bool(...)"
        return f"is a {type(value).__name__}; expected {host.cook_dtype(annotation).to_string()}"
    if is_array_annotation(annotation):
        return _array_problem(annotation, value)
    if host.is_template(annotation) and is_array(value):
        return "is an array, which no ti.template() takes; annotate the argument with ti.types.ndarray(...)"
    if isinstance(annotation, host.MatrixType) and is_torch_tensor(value):
        return "is a tensor; a vector or matrix is passed by value as a ti.Vector, a ti.Matrix or a list"
    if isinstance(annotation, host.MatrixType):
        return _matrix_problem(annotation, value)
    return compound_problem(annotation, value) if isinstance(annotation, COMPOUND) else ""


def _matrix_problem(annotation: Any, value: object) -> str:
    shape = tuple(annotation.get_shape())
    given = getattr(value, "get_shape", None)
    if given is not None:
        own = tuple(given())
    else:
        try:
            numbers = np.asarray(value)
        except ValueError:  # rows of different lengths
            return f"is a {type(value).__name__} without a shape; expected numbers of shape {shape}"
        own = numbers.shape
        if own == shape and numbers.dtype.kind not in "fiub":
            return f"has elements that are not real numbers; expected numbers of shape {shape}"
    return "" if own == shape else f"has shape {own}; expected {shape}"


def _array_problem(annotation: Any, value: Any) -> str:
    if not is_array(value) and hasattr(value, "__dlpack__"):
        return (
            f"is a {type(value).__module__}.{type(value).__name__}, which Taichi does not take; pass np.from_dlpack(a) "
            "or torch.from_dlpack(a), which share its memory"
        )
    if not is_array(value):
        return f"is a {type(value).__name__}; expected a NumPy array, a torch tensor or a ti.ndarray"
    problem = array_problem(value)
    if problem:
        return problem
    if isinstance(value, np.ndarray) and not (value.flags.c_contiguous or value.flags.f_contiguous):
        return "is a NumPy array that is not contiguous; pass np.ascontiguousarray(...)"
    if is_torch_tensor(value) and not value.is_contiguous():
        return "is a tensor that is not contiguous; pass .contiguous()"
    wanted = annotation.dtype.dtype if isinstance(annotation.dtype, host.MatrixType) else annotation.dtype
    if wanted is not None and outer_array_dtype(value) != host.cook_dtype(wanted):
        given = outer_array_dtype(value).to_string()
        return f"has elements of type {given}; expected {host.cook_dtype(wanted).to_string()}"
    element = array_element_shape(value, annotation)
    if isinstance(annotation.dtype, host.MatrixType) and element != annotation.dtype.get_shape():
        return f"has elements of shape {element}; expected {annotation.dtype.get_shape()}"
    if annotation.ndim is not None:
        dims = len(full_shape(value)) - len(element)
        if dims != annotation.ndim:
            return f"has {dims} dimensions; expected {annotation.ndim}"
    return ""


def copy_of(obj: Any) -> Any:
    """The values of a field or array, or what an entry or part of a layout holds; it has to exist."""
    check_not_ended(obj)
    if isinstance(obj, InTree):
        return obj.copy()
    if is_torch_tensor(obj):
        return obj.detach().clone()
    if isinstance(obj, np.ndarray):
        return obj.copy()
    values = memory_of_field(obj)
    return obj.to_numpy() if values is None else values.copy()


def as_numpy(value: Any) -> Any:
    """The numbers of a field, array, tensor, vector or matrix, as a NumPy array; anything else as it is."""
    check_not_ended(value)
    if is_torch_tensor(value):
        return value.detach().cpu().numpy()
    return value.to_numpy() if hasattr(value, "to_numpy") else value


def put_back(obj: Any, copy: Any) -> None:
    """Store values, such as those of ``copy_of`` or a NumPy array, to a field or array, which has to exist."""
    check_not_ended(obj)
    if isinstance(obj, InTree):
        obj.put_back(copy)
    elif isinstance(obj, np.ndarray):
        if obj.flags.writeable:  # others are only read
            obj[...] = copy
    elif is_torch_tensor(obj):
        obj.detach().copy_(copy if is_torch_tensor(copy) else torch_from_numpy(copy, obj.device))
    elif (memory := memory_of_field(obj)) is not None:
        memory[...] = copy
    else:
        obj.from_numpy(copy)


# Arguments of kernels taken apart: the numbers, vectors and arrays in structs and argument packs, by name.

COMPOUND = (host.StructType, host.ArgPackType)


@dataclass(frozen=True)
class LeafArgument:
    """A number, vector or array that a kernel takes, by itself or in a struct or argument pack."""

    name: str  # as users name it: ``p``, or ``p.mass`` for a member
    annotation: object  # its own
    position: int  # of the argument that it is, or that it is a member of
    path: tuple[str, ...] = ()  # the members that lead to it

    def value(self, args: Sequence[Any]) -> Any:
        value = args[self.position]
        for member in self.path:
            value = host.member_of(value, member)
        return value


@kept_weakly
def leaf_arguments(kernel: Kernel) -> tuple[LeafArgument, ...]:
    """The arguments of a kernel, with the members of structs and packs in place of these, in order."""
    whole = (LeafArgument(a.name, a.annotation, n) for n, a in enumerate(host.arguments(kernel)))
    return tuple(leaf for argument in whole for leaf in _parts(argument))


def _parts(leaf: LeafArgument) -> Iterator[LeafArgument]:
    if not isinstance(leaf.annotation, COMPOUND):
        yield leaf
        return
    for member, annotation in leaf.annotation.members.items():
        yield from _parts(LeafArgument(f"{leaf.name}.{member}", annotation, leaf.position, (*leaf.path, member)))


def leaf_values(kernel: Kernel, args: tuple[object, ...]) -> tuple[object, ...]:
    leaves = leaf_arguments(kernel)
    return tuple(leaf.value(args) for leaf in leaves) if any(leaf.path for leaf in leaves) else args


def with_leaf_values(kernel: Kernel, values: Sequence[object]) -> tuple[object, ...]:
    """The arguments of a call whose leaf arguments have these values; structs and packs are new ones."""
    rest = iter(values)
    return tuple(_rebuilt(a.annotation, rest) for a in host.arguments(kernel))


def _rebuilt(annotation: object, values: Iterator[object]) -> object:
    if not isinstance(annotation, COMPOUND):
        return next(values)
    return annotation(**{name: _rebuilt(member, values) for name, member in annotation.members.items()})


PassedArguments = dict[tuple[Kernel, int], tuple[list[object], object]]  # what identifies their values, and they


def as_they_are(kernel: Kernel, args: tuple[Any, ...], values: Sequence[Any], last: PassedArguments) -> tuple[Any, ...]:
    """The arguments with these leaf values: matrices, structs and packs are new ones, as Python may change its own.

    ``last``: those of the last call, by kernel and position, which are given again as long as their numbers are equal.
    """
    leaves = leaf_arguments(kernel)
    if not any(leaf.path or isinstance(leaf.annotation, host.MatrixType) for leaf in leaves):
        return args
    parts: dict[int, list[tuple[object, Any]]] = {}
    for leaf, value in zip(leaves, values, strict=True):
        is_matrix = isinstance(leaf.annotation, host.MatrixType)
        part = leaf.annotation, np.array(as_numpy(value)).tolist() if is_matrix else value
        parts.setdefault(leaf.position, []).append(part)
    kinds = enumerate(a.annotation for a in host.arguments(kernel))
    return tuple(_as_it_is(kind, parts.get(n, []), last, (kernel, n)) for n, kind in kinds)


def _as_it_is(
    annotation: object, parts: list[tuple[object, Any]], last: PassedArguments, name: tuple[Kernel, int]
) -> object:
    """One argument, of the annotations and values of its leaves."""
    if not isinstance(annotation, (host.MatrixType, *COMPOUND)):
        return parts[0][1]
    now = [_identity(*part) for part in parts]
    before, made = last.get(name, (None, None))
    if now != before:
        values = (ti.Matrix(value) if isinstance(kind, host.MatrixType) else value for kind, value in parts)
        made = _rebuilt(annotation, values)
        last[name] = now, made  # which keeps alive what ``now`` identifies by its ``id``
    return made


def _identity(annotation: object, value: object) -> object:
    """Equal for numbers and lists with the same bits, and for the same array or template."""
    if isinstance(value, (int, float, np.generic, list)):
        return type(value), repr(value)  # as 0.0 equals -0.0, and NaN is not equal to NaN
    return object() if is_scalar_type(annotation) else id(value)


def compound_problem(annotation: Any, value: object) -> str:
    """The problem with passing a value to an argument that is a struct or pack, or an empty text."""
    if isinstance(value, annotation):
        return ""
    kind = "struct" if isinstance(annotation, host.StructType) else "argument pack"
    found = type(value).__name__
    if isinstance(value, (ti.Struct, host.ArgPack)):
        given = "struct" if isinstance(value, ti.Struct) else "argument pack"
        found = f"{given} with the members {', '.join(value.keys)}"
    article = "an" if found[0] in "aeiou" else "a"
    return f"is {article} {found}; expected the annotated {kind}, with the members {', '.join(annotation.members)}"


def is_array_annotation(annotation: object) -> bool:
    return isinstance(annotation, ndarray_type.NdarrayType) or annotation is getattr(ti, "Tensor", None)


@kept_weakly
def array_positions(kernel: Kernel) -> tuple[int, ...]:
    """The positions of the arrays among the leaf arguments of a kernel."""
    return tuple(n for n, leaf in enumerate(leaf_arguments(kernel)) if is_array_annotation(leaf.annotation))


def array_values(kernel: Kernel, values: Sequence[Any]) -> list[tuple[LeafArgument, int, Any]]:
    """The arrays among the values of the leaf arguments, with these: some annotations allow fields, or None, too."""
    leaves = leaf_arguments(kernel)
    all_leaves = ((leaves[n], n, values[n]) for n in array_positions(kernel))
    return [(leaf, n, value) for leaf, n, value in all_leaves if host.is_passed(leaf.annotation, value)]
