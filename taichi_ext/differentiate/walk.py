"""What the parts of one walk over a program share."""

from __future__ import annotations

from dataclasses import dataclass, field

from taichi_ext.differentiate.arguments import Arguments
from taichi_ext.differentiate.build import Builder
from taichi_ext.differentiate.cursor import Cursor
from taichi_ext.differentiate.decisions import Decisions
from taichi_ext.differentiate.expressions import Expressions
from taichi_ext.differentiate.facts import Facts
from taichi_ext.differentiate.naming import Naming


@dataclass(frozen=True)
class Walk:
    """One walk over the statements of a program.

    Attributes:
        facts: what is known of the program.
        decisions: what walks have found out.
        builder: where statements are emitted.
        expressions: the values of the statement, and those that are in temporaries.
        cursor: the statement that the walk has come to.
        naming: the names of columns and indices.
        arguments: the arguments that the new kernel takes behind those of the old one.
        problems: what is wrong with the program, unless another walk finds that it is not.
    """

    facts: Facts
    decisions: Decisions
    builder: Builder
    expressions: Expressions
    cursor: Cursor
    naming: Naming
    arguments: Arguments
    problems: list[str] = field(default_factory=list)

    def refuse_once_settled(self, message: str) -> None:
        """Raise at the end of the walk, unless it has found news that may change this."""
        self.problems.append(message)
