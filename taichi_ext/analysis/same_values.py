"""Values numbered by how they are computed: those with one number are the same where nothing changes in between."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

from taichi_ext.analysis.changes import written_containers
from taichi_ext.program import Body, Declare, FoldedConst, Load, Read, Value, children, own_part, statements, through
from taichi_ext.simplify.usage import assigned_locals


class ValueNumbers:
    """Numbers that are equal for values that are written alike.

    Args:
        definition: gives the value that stands for another one, as the definition of a local does; itself for most.
    """

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
        return isinstance(a, int) and isinstance(b, int) and a == b
    numbers = ValueNumbers()
    return a is b or (own_part(a) == own_part(b) and numbers.of(a) == numbers.of(b))


class SameValues:
    """Whether values of one kernel may be the same number: they are, where they are computed in the same way."""

    def __init__(self, body: Body) -> None:
        self._changed = assigned_locals(body)
        self._stored = written_containers(body)
        declared = (s for s in statements(body) if isinstance(s, Declare) and not s.local.shape)
        self._definitions = {s.local: s.values[0] for s in declared if s.local not in self._changed}
        self._numbers = ValueNumbers(self._definition)

    def may_be_equal(self, a: Value, b: Value) -> bool:
        """Whether two values may be equal: False where both are computed in ways that differ."""
        return self._numbers.of(a) == self._numbers.of(b) or (self._is_open(a) and self._is_open(b))

    def _definition(self, value: Value) -> Value:
        if isinstance(value, FoldedConst):
            return value.constant
        return self._definitions.get(value.local, value) if isinstance(value, Read) else value

    def _is_open(self, value: Value) -> bool:
        """Whether a value uses a local without a definition, or an entry that is stored to."""

        def operands(node: Value) -> Iterable[Value]:
            known = self._definition(node)
            return children(node) if known is node else (known,)

        return any(self._definition(node) is node and self._is_unknown(node) for node in through((value,), operands))

    def _is_unknown(self, node: Value) -> bool:
        if isinstance(node, Read):
            return node.local.kind not in ("loop", "parameter") or node.local in self._changed
        return isinstance(node, Load) and node.container in self._stored
