"""Whether two values of a kernel may be the same number: they are, where they are computed in the same way."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from taichi_ext.analysis.changes import written_containers
from taichi_ext.program import Body, Declare, Known, Load, Local, Read, Value, children, own_part, statements
from taichi_ext.simplify.usage import assigned_locals


class _Number(NamedTuple):
    """Equal for values that are computed in the same way, unless they use a local without a definition."""

    number: int
    is_open: bool


class SameValues:
    """The values of one kernel, numbered by how they are computed."""

    def __init__(self, body: Body) -> None:
        self._changed = assigned_locals(body)
        self._stored = written_containers(body)
        self._numbers: dict[Hashable, int] = {}
        self._locals: dict[Local, _Number] = {}
        self._known: dict[Value, _Number] = {}
        for s in statements(body):  # definitions stand before their uses
            if isinstance(s, Declare) and not s.local.shape and s.local not in self._changed:
                self._locals[s.local] = self._number(s.values[0])

    def may_be_equal(self, a: Value, b: Value) -> bool:
        """Whether two values may be equal: False where both are computed in ways that differ."""
        one, other = self._number(a), self._number(b)
        return one.number == other.number or (one.is_open and other.is_open)

    def _number(self, value: Value) -> _Number:
        if value not in self._known:
            self._known[value] = self._found(value)
        return self._known[value]

    def _found(self, value: Value) -> _Number:
        if isinstance(value, Read) and value.local in self._locals:
            return self._locals[value.local]
        if isinstance(value, Known):
            return self._number(value.constant)
        parts = tuple(map(self._number, children(value)))
        key = (own_part(value), *(part.number for part in parts))
        is_open = self._is_open(value) or any(part.is_open for part in parts)
        return _Number(self._numbers.setdefault(key, len(self._numbers)), is_open)

    def _is_open(self, value: Value) -> bool:
        if isinstance(value, Read):
            return value.local.kind not in ("loop", "parameter") or value.local in self._changed
        return isinstance(value, Load) and value.container in self._stored
