"""Rewritten functions, kept: their trees, texts of places, names."""

from __future__ import annotations

import ast
import contextlib
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Rewritten:
    """A function ready to be traced."""

    source: tuple[str, list[str], int]
    pickled: bytes
    text: str
    names: frozenset[str]  # that are read
    places: dict[Any, str] = field(default_factory=dict)  # texts of places in the source, as messages cite them

    free: list[Any] = field(default_factory=list)  # trees that have been walked, each with a list of its nodes

    def tree(self) -> ast.Module:
        """A fresh copy: Taichi writes into the tree that it walks."""
        return pickle.loads(self.pickled)

    @contextlib.contextmanager
    def borrowed_tree(self) -> Iterator[ast.Module]:
        """A copy that may have been walked before: making one takes longer than most walks."""
        tree, nodes = self.free.pop() if self.free else (self.tree(), None)
        yield tree
        nodes = list(ast.walk(tree)) if nodes is None else nodes
        for node in nodes:
            node.__dict__.pop("ptr", None)  # what Taichi has left, and captures
            node.__dict__.pop("root", None)
        self.free.append((tree, nodes))
