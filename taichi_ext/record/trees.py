"""Copies of Python's syntax trees, without recursion; AST in, parts of it or AST out.

Python 3.12 counts recursion in C by itself: ``pickle`` and ``copy`` fail for expressions that Python itself can take.
"""

from __future__ import annotations

import ast
from typing import Any


def flat_tree(tree: ast.AST) -> tuple[Any, ...]:
    """A tree of any depth without recursion: each node's class, names of its parts, and these.

    A node or list among the parts is its number in a 1-tuple, a constant has its type: 1 and 1.0 are equal.
    """
    found: list[Any] = [tree]
    flat: list[tuple[Any, ...]] = []

    def part(value: object) -> object:
        if not isinstance(value, (ast.AST, list)):
            return type(value), value
        found.append(value)
        return (len(found) - 1,)

    for value in found:
        names, parts = (None, value) if isinstance(value, list) else (tuple(vars(value)), vars(value).values())
        flat.append((type(value), names, tuple(map(part, parts))))
    return tuple(flat)


def from_flat(flat: tuple[Any, ...]) -> Any:
    """A tree from its parts, as ``flat_tree`` gives them."""
    made: list[Any] = [kind.__new__(kind) for kind, _, _ in flat]
    for value, (_, names, parts) in zip(made, flat, strict=True):
        values = [made[p[0]] if len(p) == 1 else p[1] for p in parts]
        if names is None:
            value.extend(values)
        else:
            vars(value).update(zip(names, values, strict=True))
    return made[0]


def copied(tree: Any) -> Any:
    return from_flat(flat_tree(tree))
