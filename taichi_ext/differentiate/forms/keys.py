"""Purposes of the arrays that a kernel with tangents takes, and owners of the columns of a sparse Jacobian.

A container is known by a key that whoever asks for a derivative has given; here are the keys of everything else.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal, TypeGuard

from taichi_ext.program import Container

Key = Hashable


class Whole(enum.Enum):
    """The purpose of a shadow that belongs to no container."""

    RETURN = "the return value"
    VALUES = "arguments and Python numbers, where their tangents are given"


RETURN, VALUES = Whole.RETURN, Whole.VALUES


class OwnArray:
    """An array of a kernel's own, which holds no tangents of a container."""


@dataclass(frozen=True)
class Scratch(OwnArray):
    """Memory for rows of one type."""

    dtype: str


class LaunchArray(OwnArray):
    """A new one for each launch, also where a launch is repeated."""


@dataclass(frozen=True)
class SiteArray(LaunchArray):
    """An array of a site where entries of a sparse Jacobian are written, or of a loop around it.

    Attributes:
        number: of the site, the loop or the counter.
        what: it holds.
        owner: whose columns the entries have; None where that is only known at run time.
        key: of the container that the site writes to.
    """

    number: int
    what: Literal["entries", "integers", "lengths", "offsets", "counts"]
    owner: Key = None
    key: Key = None


@dataclass(frozen=True)
class Adjoints(LaunchArray):
    """The derivatives of an energy with respect to the fields that it is computed from, a number for each column."""


ADJOINTS = Adjoints()
Purpose = Container | Whole | OwnArray  # what an array is for


@dataclass(frozen=True)
class SumKey:
    """A local of a kernel that has columns of its own."""

    name: str
    number: int


@dataclass(frozen=True)
class Version:
    """A container, or such a local, as it is after so many of the stages that write to it: the owner of columns."""

    of: Key
    number: int


def is_of_sum(owner: Key) -> TypeGuard[Version]:
    """Whether columns are those of a local."""
    return isinstance(owner, Version) and isinstance(owner.of, SumKey)
