"""The values of a program in the new one: temporaries hold values shared by several tangents of a statement."""

from __future__ import annotations

from dataclasses import dataclass, field

from taichi_ext.differentiate.forms.build import Builder, cast
from taichi_ext.program import Known, Read, Type, Value, with_children


@dataclass(frozen=True)
class Expressions:
    """The values of the current statement, and those in temporaries.

    Attributes:
        builder: the builder that declares temporaries.
        is_again: whether the new program is differentiated again; values are then not replaced by their known numbers.
    """

    builder: Builder
    is_again: bool = field(kw_only=True)
    kept: dict[Value, Value] = field(default_factory=dict)

    def begin_statement(self) -> None:
        """Forget the values of the previous statement."""
        self.kept.clear()

    def primal(self, node: Value) -> Value:
        """The value, built on the temporaries that hold parts of it."""
        if node in self.kept:
            return self.kept[node]
        if isinstance(node, Known) and not self.is_again:
            return node.constant
        return with_children(node, self.primal)

    def keep(self, node: Value, dtype: Type | None = None, name: str = "t") -> Value:
        """The value in a temporary, or a local, that does not change."""
        if node not in self.kept:
            value = self.builder.keep(self.primal(node), name)
            if not isinstance(node, Read) or node.index or node.local not in self.builder.frozen:
                self.kept[node] = value
            else:
                return value if dtype is None else cast(value, dtype)
        value = self.kept[node]
        return value if dtype is None else cast(value, dtype)
