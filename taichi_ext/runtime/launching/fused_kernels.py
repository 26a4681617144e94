"""The table of kernels with tangents, found by name, columns and the roles of containers."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

from taichi_ext.boundary.registry import registry
from taichi_ext.launches import Fused, Role
from taichi_ext.program.keys import Key

MOST_KERNELS = 256  # kept for one prepared Jacobian, for each of its blocks of columns


class KernelName(NamedTuple):
    """The part of a kernel's key that is known before its tangents are.

    Attributes:
        kernel: the identity of the user's kernel.
        features: the types of its arguments.
        shapes: those of its arrays.
        variant: the number of columns, and the rest of the request.
    """

    kernel: int
    features: tuple[object, ...]
    shapes: tuple[object, ...]
    variant: tuple[object, ...]


class KernelTable:
    """The kernels of one session, in a table that is kept between sessions.

    The key of a kernel is its name, and the first column and the roles of its first launch.
    """

    def __init__(self, kept: dict[Any, Fused], blocks: int = 1) -> None:
        self._kept = kept
        self._most = MOST_KERNELS * blocks

    def find(self, name: KernelName, first: int, roles: Mapping[Key, Role]) -> Fused | None:
        """A kernel that is valid for the block of columns from ``first`` on and for these roles."""
        table, exact = self._kept, (*name, first, frozenset(roles.items()))
        for key in itertools.chain((exact,), (key for key in list(table) if key[:-2] == name)):
            fused = table.get(key)
            if fused is None:
                continue
            if not is_current(fused):
                del table[key]
            elif not fused.columns.has_block(first):
                continue
            elif key[-1] == exact[-1] or fused.suits(roles):
                return fused
        return None

    def add(self, name: KernelName, first: int, roles: Mapping[Key, Role], fused: Fused) -> None:
        """Keep a kernel; the oldest one is dropped if there are too many."""
        if len(self._kept) >= self._most:
            del self._kept[next(iter(self._kept))]
        self._kept[(*name, first, frozenset(roles.items()))] = fused


def is_current(fused: Fused) -> bool:
    """Whether a kernel was built with the rules and Python values of now.

    Raises:
        UnsupportedError: a Python value has changed, and the plain kernel goes on with the one before.
    """
    if fused.memory.rules_version != registry.version:
        if any(registry.rule_for(target) is not rule for target, rule in fused.facts.rules):
            return False
        fused.memory.rules_version = registry.version
    return fused.kernel.captures.are_current(fused.primal)
