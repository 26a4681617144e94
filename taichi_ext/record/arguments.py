"""Arguments and results of a recorded kernel: as values of its program, and as text for the emitted one."""

from __future__ import annotations

from typing import Any

from taichi_ext import backend
from taichi_ext.errors import UnsupportedError
from taichi_ext.program import Argument, Container, Local
from taichi_ext.record.handles import Cell, Cells, Record, group_of, place_of_local, value_of
from taichi_ext.record.recording import Recording
from taichi_ext.record.taichi_types import type_of


def bind_arguments(r: Recording) -> None:
    """Bind the names of the kernel's arguments to values and containers of the program."""
    made = []
    for argument in backend.arguments(r.kernel):
        name, annotation = argument.name, argument.annotation
        if backend.is_template(annotation):
            made.append(Argument(name, annotation))
            continue
        place = _parameter(r, name, r.context.value_named(name), annotation)
        if place is None or isinstance(place, backend.Field):
            made.append(Argument(name, annotation))
            continue
        if isinstance(place, backend.AnyArray):
            container = r.containers[id(place)]
            made.append(Argument(name, array_annotation(container), container))
            continue
        for scope in r.context.local_scopes:
            if name in scope:
                scope[name] = place
        made.append(Argument(name, annotation_text(annotation), group_of(_numbers_in(place))))
    r.arguments = tuple(made)


def _numbers_in(place: object) -> Any:
    """The value of an argument, without the arrays in a pack."""
    if not isinstance(place, Record):
        return value_of(place)
    members = {k: _numbers_in(m) for k, m in place.members.items() if isinstance(m, (Record, Cell, Cells))}
    return Record(members, place.methods, place.kind)


def _parameter(r: Recording, name: str, bound: Any, kind: object) -> object:
    """An argument; members of a struct or pack are locals and arrays, named as they are read."""
    if backend.is_template(kind) or bound is None or isinstance(bound, backend.Field):
        return bound
    if isinstance(kind, backend.COMPOUND):
        members = {
            k: _parameter(r, f"{name}.{k}", backend.bound_member(r.context, name, bound, k), member)
            for k, member in kind.members.items()
        }
        return Record(members, getattr(kind, "methods", {}), kind)
    if isinstance(bound, backend.AnyArray):
        dtype, shape = backend.array_type(bound)
        r.containers[id(bound)] = Container(name, type_of(dtype), len(bound.shape), shape, None, True)
        return bound
    if not backend.is_expr(bound):
        what = type(kind).__name__.removesuffix("Type")  # a Texture
        raise UnsupportedError(
            f"The argument {name!r} has the type {what}, which is not differentiated. Pass numbers, vectors, "
            "structs and argument packs of them, fields or arrays."
        )
    shape = backend.shape_of(bound)
    return place_of_local(Local(name, type_of(backend.dtype_of(bound)), shape, "parameter"))


def annotation_text(annotation: object) -> object:
    """The text of an annotation; for a struct type, the object itself."""
    if isinstance(annotation, backend.MatrixType):
        return tensor_annotation(type_of(annotation.dtype).name, (annotation.n, annotation.m)[: annotation.ndim])
    if annotation in (int, float, bool):
        return annotation.__name__
    return (
        f"ti.{type_of(annotation)}"
        if isinstance(annotation, backend.DataType)
        else backend.native_annotation(annotation)
    )


def tensor_annotation(dtype: str, shape: tuple[int, ...]) -> str:
    kind = "matrix" if len(shape) == 2 else "vector"
    return f"ti.types.{kind}({', '.join(map(str, shape))}, ti.{dtype})"


def array_annotation(array: Container) -> str:
    dtype = f"ti.{array.dtype}"
    if array.element_shape:
        dtype = tensor_annotation(array.dtype.name, array.element_shape)
    return f"ti.types.ndarray(dtype={dtype}, ndim={array.ndim})"


def returned_annotations(kernel: backend.Kernel) -> tuple[object, ...]:
    return tuple(map(annotation_text, backend.returned_types(kernel)))
