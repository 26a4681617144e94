"""The keys of fields and arguments outside of kernels; an array is known by the view of memory that it is."""

from __future__ import annotations

from dataclasses import dataclass

from taichi_ext.program.keys import Key, LaunchArray


@dataclass(frozen=True)
class FieldKey:
    """A field, or one component of it.

    Attributes:
        identity: of the first component that is placed.
        component: its number; None for the whole field.
    """

    identity: int
    component: int | None = None

    def __hash__(self) -> int:
        return self.identity

    @property
    def whole(self) -> FieldKey:
        """The field that it is, or is a component of."""
        return self if self.component is None else FieldKey(self.identity)


@dataclass(frozen=True)
class ArrayArgument:
    """An array that a kernel is given, by its position among the leaf arguments."""

    position: int

    def __hash__(self) -> int:
        return self.position


@dataclass(frozen=True)
class NumberArgument:
    """An argument of a kernel that is passed by value."""

    name: str


@dataclass(frozen=True)
class PipelineArgument:
    """An argument of a pipeline that is passed by value."""

    name: str


@dataclass(frozen=True)
class GradientKey:
    """Tangents of the first order, of a container or of scratch memory, which have tangents themselves."""

    of: Key


GRADIENT = GradientKey("energy")


@dataclass(frozen=True)
class FirstOrderArray(LaunchArray):
    """Such an array itself, as opposed to its tangents."""

    key: Key


def container_key(key: Key) -> Key:
    """The key of the container of a parameter or output, which may be a component of it."""
    return key.whole if isinstance(key, FieldKey) else key
