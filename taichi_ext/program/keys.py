"""Purposes of the arrays of a kernel with tangents, and owners of the columns of a sparse Jacobian.

The key of a container is given in the request for a derivative; here are the keys of everything else.
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
    TERMS = "fields that an energy is computed from, times their adjoints"


RETURN, VALUES, TERMS = Whole


class OwnArray:
    """An internal array of a kernel, which holds no tangents of a container."""


@dataclass(frozen=True)
class Scratch(OwnArray):
    """Memory for rows of one type."""

    dtype: str


class LaunchArray(OwnArray):
    """An array that is new in each launch, even in a repeated one."""


@dataclass(frozen=True)
class SiteArray(LaunchArray):
    """An array of a site of a sparse Jacobian, or of a loop around it."""

    number: int  # of the site, the loop or the counter
    what: Literal["entries", "integers", "lengths", "offsets", "counts"]  # the kind of its contents
    owner: Key = None  # the owner of the columns of the entries; None if it is only known at run time
    key: Key = None  # of the container that the site writes to


@dataclass(frozen=True)
class AdjointsKey(LaunchArray):
    """The derivatives of an energy with respect to the fields it is computed from, a number for each column."""


ADJOINTS = AdjointsKey()
Purpose = Container | Whole | OwnArray  # the purpose of an array


@dataclass(frozen=True)
class SumKey:
    """A local of a kernel that has separate columns."""

    name: str
    number: int


@dataclass(frozen=True)
class Version:
    """A container, or such a local, after a number of the stages that write to it: an owner of columns."""

    of: Key
    number: int


def is_of_sum(owner: Key) -> TypeGuard[Version]:
    """Whether columns are those of a local."""
    return isinstance(owner, Version) and isinstance(owner.of, SumKey)
