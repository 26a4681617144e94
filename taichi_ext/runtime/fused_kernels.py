"""Kernels with tangents, found by what they are right for."""

from __future__ import annotations

from typing import Any

from taichi_ext.boundary.registry import registry
from taichi_ext.launches import Fused, Role, refuse_changed


def find(table: dict[Any, Fused], name: tuple[Any, ...], first: int, roles: dict[Any, Role]) -> Fused | None:
    """A kernel that is right for the block of columns from ``first`` on and for these roles.

    A table has it under its name, and the first column and the roles of its first launch.
    """
    exact = (*name, first, frozenset(roles.items()))
    for key in ([exact] if exact in table else []) + [key for key in table if key[:-2] == name]:
        fused = table.get(key)
        if fused is None:
            continue
        if not _is_current(fused):
            del table[key]
        elif not fused.has_block(first):
            continue
        elif key[-1] == exact[-1]:
            return fused
        elif fused.suits(roles):
            refuse_changed(fused.primal, fused.kernel.captures.changed())
            return fused
    return None


def _is_current(fused: Fused) -> bool:
    """Whether the rules that a kernel was built with are still those of the registry."""
    if fused.rules_version == registry.version:
        return True
    if all(registry.rule_for(target) is rule for target, rule in fused.facts.rules):
        fused.rules_version = registry.version
    return fused.rules_version == registry.version
