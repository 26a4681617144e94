"""Arguments of kernels taken apart: the numbers, vectors and arrays in structs and argument packs, by name."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from taichi_ext.backend.runtime import ArgPack, ArgPackType, Kernel, StructType, arguments, member_of, ndarray_type, ti

COMPOUND = (StructType, ArgPackType)


@dataclass(frozen=True)
class LeafArgument:
    """A number, vector or array that a kernel takes, by itself or in a struct or argument pack.

    Attributes:
        name: as users name it: ``p``, or ``p.mass`` for a member.
        annotation: its own.
        position: of the argument that it is, or that it is a member of.
        path: the members that lead to it.
    """

    name: str
    annotation: object
    position: int
    path: tuple[str, ...] = ()

    def value(self, args: Sequence[Any]) -> Any:
        """Its value in a call with these arguments."""
        value = args[self.position]
        for member in self.path:
            value = member_of(value, member)
        return value


_leaves: weakref.WeakKeyDictionary[Kernel, tuple[LeafArgument, ...]] = weakref.WeakKeyDictionary()


def leaf_arguments(kernel: Kernel) -> tuple[LeafArgument, ...]:
    """The arguments of a kernel, with the members of structs and packs in place of these, in order."""
    known = _leaves.get(kernel)
    if known is None:
        known = tuple(
            leaf for n, a in enumerate(arguments(kernel)) for leaf in _parts(LeafArgument(a.name, a.annotation, n))
        )
        _leaves[kernel] = known
    return known


def _parts(leaf: LeafArgument) -> Iterator[LeafArgument]:
    if not isinstance(leaf.annotation, COMPOUND):
        yield leaf
        return
    for member, annotation in leaf.annotation.members.items():
        yield from _parts(LeafArgument(f"{leaf.name}.{member}", annotation, leaf.position, (*leaf.path, member)))


def leaf_values(kernel: Kernel, args: tuple[object, ...]) -> tuple[object, ...]:
    """The values of the leaf arguments in a call."""
    leaves = leaf_arguments(kernel)
    return tuple(leaf.value(args) for leaf in leaves) if any(leaf.path for leaf in leaves) else args


def with_leaf_values(kernel: Kernel, values: Sequence[object]) -> tuple[object, ...]:
    """The arguments of a call whose leaf arguments have these values; structs and packs are new ones."""
    rest = iter(values)
    return tuple(_rebuilt(a.annotation, rest) for a in arguments(kernel))


def _rebuilt(annotation: object, values: Iterator[object]) -> object:
    if not isinstance(annotation, COMPOUND):
        return next(values)
    return annotation(**{name: _rebuilt(member, values) for name, member in annotation.members.items()})


def compound_problem(annotation: Any, value: object) -> str:
    """The problem with passing a value to an argument that is a struct or pack, or an empty text."""
    if isinstance(value, annotation):
        return ""
    kind = "struct" if isinstance(annotation, StructType) else "argument pack"
    found = type(value).__name__
    if isinstance(value, (ti.Struct, ArgPack)):
        found = (
            f"{'struct' if isinstance(value, ti.Struct) else 'argument pack'} with the members {', '.join(value.keys)}"
        )
    article = "an" if found[0] in "aeiou" else "a"
    return f"is {article} {found}; expected the annotated {kind}, with the members {', '.join(annotation.members)}"


def is_array_annotation(annotation: object) -> bool:
    return isinstance(annotation, ndarray_type.NdarrayType) or annotation is getattr(ti, "Tensor", None)


_array_positions: weakref.WeakKeyDictionary[Kernel, tuple[int, ...]] = weakref.WeakKeyDictionary()


def array_positions(kernel: Kernel) -> tuple[int, ...]:
    """The positions of the arrays among the leaf arguments of a kernel."""
    known = _array_positions.get(kernel)
    if known is None:
        known = tuple(n for n, leaf in enumerate(leaf_arguments(kernel)) if is_array_annotation(leaf.annotation))
        _array_positions[kernel] = known
    return known
