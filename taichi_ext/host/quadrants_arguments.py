"""Arguments of kernels of Quadrants: dataclasses, tensors and optional arrays, and their annotations."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import dataclasses
import functools
import weakref
from typing import Any

import quadrants as ti
from quadrants import Field
from quadrants.lang._final_dataclass_fields import is_final_annotation
from quadrants.lang.kernel_arguments import ArgMetadata as KernelArgument
from quadrants.types import ndarray_type, primitive_types


class ArgPack:
    """Quadrants has none: it takes dataclasses apart."""


class ArgPackType:
    """A dataclass as the type of an argument, in the form of Taichi's types of argument packs."""

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.members = {f.name: _annotation(f.type) for f in dataclasses.fields(kind)}

    def __call__(self, **members: object) -> object:
        return self.kind(**members)

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, self.kind)


@functools.cache
def _pack_type(kind: type) -> ArgPackType:
    return ArgPackType(kind)


class _OptionalArray(ndarray_type.NdarrayType):
    """``T | None``: an array, or None, which is put into the kernel."""


def _annotation(annotation: Any, is_optional: bool = False) -> Any:
    if is_optional and type(annotation) is ndarray_type.NdarrayType:
        found = _OptionalArray.__new__(_OptionalArray)
        vars(found).update(vars(annotation))
        return found
    is_pack = isinstance(annotation, type) and dataclasses.is_dataclass(annotation)
    return _pack_type(annotation) if is_pack else ti.template() if is_final_annotation(annotation) else annotation


def native_annotation(annotation: object) -> object:
    return annotation.kind if isinstance(annotation, ArgPackType) else annotation


def member_of(value: Any, name: str) -> Any:
    """A member of a struct, argument pack or dataclass."""
    return unwrapped(getattr(value, name)) if dataclasses.is_dataclass(value) else value[name]


def arguments(function: Any) -> list[Any]:
    """The arguments of a kernel or function: names and annotations."""
    known = _ARGUMENTS.get(function)
    if known is None:
        known = [KernelArgument(_annotation(a.annotation, a.optional), a.name, a.default) for a in function.arg_metas]
        _ARGUMENTS[function] = known
    return known


_ARGUMENTS: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


def unwrapped(x: object) -> object:
    """The field or ndarray in a ``qd.Tensor``; anything else as it is."""
    return x._unwrap() if isinstance(x, ti.Tensor) else x


def unwrapped_args(args: object) -> Any:
    """The same for each argument of a call."""
    return tuple(map(unwrapped, args)) if isinstance(args, (tuple, list)) else args


def is_passed(annotation: object, value: object) -> bool:
    """Whether an argument is passed at each launch, and not put into the kernel as it is."""
    return not is_template(concrete(annotation, value))


def passed_feature(annotation: object, feature: Any) -> Any:
    """The template key of an argument that is passed, for a kernel that says what it is."""
    return feature[1:] if annotation is ti.Tensor else feature


def concrete(annotation: object, value: object) -> object:
    """What an annotation stands for where this value is passed."""
    if isinstance(annotation, _OptionalArray) and value is None:
        return ti.template()
    if annotation is not ti.Tensor:
        return annotation
    return ti.template() if isinstance(value, Field) else ndarray_type.NdarrayType()


def is_reference(annotation: object) -> bool:
    """Whether an argument of a function is passed by reference."""
    return isinstance(annotation, (primitive_types.RefType, ArgPackType))


def is_template(annotation: object) -> bool:
    """Whether an argument is put into the kernel as it is."""
    return annotation is ti.template or isinstance(annotation, ti.template)
