"""Names in an emitted kernel: the user's own, with a number where one is taken."""

from __future__ import annotations

import builtins
import keyword
from typing import Any

from taichi_ext.program import Container, Local
from taichi_ext.schedule.elementary import ELEMENTARY

RESERVED = frozenset((*keyword.kwlist, *dir(builtins), "ti", "inf", "nan", *ELEMENTARY))


class Names:
    """The names of locals, containers and objects; a name is free again where its block has ended."""

    def __init__(self, taken: set[str]) -> None:
        self.scopes: list[set[str]] = [set(taken)]
        self.locals: dict[Local, str] = {}
        self.objects: dict[str, object] = {}  # that the factory takes
        self.counts: dict[str, int] = {}  # names with smaller numbers are taken
        self._outer: list[dict[str, int]] = []

    def open(self) -> None:
        """A block begins."""
        self.scopes.append(set())
        self._outer.append(dict(self.counts))

    def close(self) -> None:
        """A block ends, and its names are free again."""
        self.scopes.pop()
        self.counts = self._outer.pop()

    def fresh(self, name: str) -> str:
        """A name that is free here, like the given one."""
        name = name if name.isidentifier() else "value"
        number = self.counts.get(name, 0)
        new = f"{name}_{number}" if number else name
        while new in RESERVED or any(new in scope for scope in self.scopes):
            number += 1
            new = f"{name}_{number}"
        self.scopes[-1].add(new)
        self.counts[name] = number + 1
        return new

    def declare(self, local: Local) -> str:
        self.locals[local] = self.fresh(local.name)
        return self.locals[local]

    def of(self, local: Local) -> str:
        return local.name if local.kind == "parameter" else self.locals[local]

    def of_function(self, name: str) -> str:
        """The name of a function that a kernel calls."""
        new = self.fresh(name)
        self.scopes[0].add(new)
        return new

    def object(self, obj: Any, name: str) -> str:
        """The name of an object that the factory takes."""
        for known, other in self.objects.items():
            if other is obj:
                return known
        name = name if name.isidentifier() else "value"
        new, number = name, 1
        while new in RESERVED or new in self.objects or any(new in scope for scope in self.scopes):
            new, number = f"{name}_{number}", number + 1
        self.objects[new] = obj
        self.scopes[0].add(new)
        return new

    def container(self, container: Container) -> str:
        return container.name if container.is_argument else self.object(container.object, container.name)
