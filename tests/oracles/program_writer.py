"""Writes the lines of a random program and tracks visible names; every choice comes from one generator."""

import contextlib
import random
from collections.abc import Callable, Iterator

from program_model import Field, Function, Place, Variable


class Writer:
    """Lines of text, blocks, and the locals that they see."""

    fields: tuple[Field, ...]
    constants: set[str]

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.lines: list[str] = []
        self.indent = 0
        self.names = 0
        self.budget = 0
        self.place = Place()
        self.functions: list[Function] = []
        self.closed: dict[str, list[str]] = {}

    # --- choices

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def pick(self, *options: tuple[float, Callable[[], str | None]]) -> str:
        """The text of one option; options that do not apply return None."""
        remaining = list(options)
        while True:
            index = self.rng.choices(range(len(remaining)), [w for w, _ in remaining])[0]
            text = remaining[index][1]()
            if text is not None:
                return text
            del remaining[index]

    def literal(self) -> str:
        return f"{self.rng.randint(1, 19) / 10:.1f}"

    def fresh(self, type: str) -> str:
        reusable = [n for n in self.closed.get(type, []) if not self.is_visible(n)]
        if reusable and self.chance(0.25):
            return self.rng.choice(reusable)
        self.names += 1
        return f"{'a' if type == 'f' else 'k' if type == 'i' else 'r' if type == 's' else type[0]}{self.names}"

    def is_visible(self, name: str) -> bool:
        return any(v.name.split("[")[0].split(".")[0] == name for scope in self.place.scopes for v in scope)

    # --- text

    def emit(self, text: str) -> None:
        self.lines.append("    " * self.indent + text)

    @contextlib.contextmanager
    def block(self, *variables: Variable, trips: int = 1, **changes: object) -> Iterator[None]:
        """An indented block with a scope of its own and changed surroundings."""
        outer = self.place
        scopes = [*outer.scopes, list(variables)]
        inner = Place(scopes, outer.access, False, outer.can_break, outer.can_continue, outer.can_loop)
        inner.trips, inner.depth = outer.trips * trips, outer.depth + 1
        for name, value in changes.items():
            setattr(inner, name, value)
        self.place = inner
        self.indent += 1
        try:
            yield
        finally:
            self.indent -= 1
            self.place = outer
            for v in (v for v in scopes[-1] if v.name.isalnum()):
                self.closed.setdefault(v.type, []).append(v.name)

    def variables(self, type: str) -> list[Variable]:
        return [v for scope in self.place.scopes for v in scope if v.type == type]

    def readable(self, type: str) -> list[Variable]:
        return [v for v in self.variables(type) if v.is_readable]

    def writable(self, type: str) -> list[Variable]:
        return [v for v in self.variables(type) if v.is_writable]
