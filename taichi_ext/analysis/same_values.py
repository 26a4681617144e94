"""Values numbered by how they are computed: those with one number are the same where nothing changes in between."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from taichi_ext.program import Value, children, own_part


class ValueNumbers:
    """Numbers that are equal for values that are written alike, or defined so: most are their own ``definition``."""

    def __init__(self, definition: Callable[[Value], Value] = lambda value: value) -> None:
        self._definition = definition
        self._numbers: dict[Hashable, int] = {}
        self._known: dict[Value, int] = {}
        self._first: dict[int, Value] = {}

    def first(self, value: Value) -> Value:
        """The first value asked for with its number."""
        return self._first.setdefault(self.of(value), value)

    def of(self, value: Value) -> int:
        if value not in self._known:
            known = self._definition(value)
            if known is not value:
                return self._known.setdefault(value, self.of(known))
            key = (own_part(value), *[self.of(part) for part in children(value)])
            self._known[value] = self._numbers.setdefault(key, len(self._numbers))
        return self._known[value]


def is_equal(a: int | Value, b: int | Value) -> bool:
    """Whether two values are written alike, so that they are equal where nothing changes in between."""
    if isinstance(a, int) or isinstance(b, int):
        return a == b
    numbers = ValueNumbers()
    return a is b or (own_part(a) == own_part(b) and numbers.of(a) == numbers.of(b))
