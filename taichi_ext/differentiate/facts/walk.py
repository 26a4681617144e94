"""The state shared by the parts of one walk over a program."""

from __future__ import annotations

from dataclasses import dataclass, field

from taichi_ext.analysis.loops import Loop
from taichi_ext.differentiate.facts.arguments import Arguments
from taichi_ext.differentiate.facts.facts import Facts
from taichi_ext.differentiate.forms.build import Builder
from taichi_ext.differentiate.forms.column_blocks import Blocks
from taichi_ext.differentiate.forms.cursor import Block, Cursor
from taichi_ext.differentiate.forms.expressions import Expressions
from taichi_ext.differentiate.plan.naming import Naming
from taichi_ext.differentiate.plan.row_terms import RowProposals
from taichi_ext.differentiate.plan.storage_plan import Plan
from taichi_ext.program import Local, Place


@dataclass(frozen=True)
class Declaration:
    """Where a local is declared: the block, the loops around it, the place in the source."""

    local: Local
    block: Block
    loops: tuple[Loop, ...]
    place: Place | None


@dataclass(frozen=True)
class Walk:
    """One walk over the statements of a program.

    Attributes:
        facts: what is known of the program.
        plan: where tangents are kept.
        blocks: the blocks of columns that the program is right for, as far as the walk has asked.
        builder: where statements are emitted.
        expressions: the values of the statement, and those that are in temporaries.
        cursor: the statement that the walk has come to.
        naming: the names of columns and indices.
        arguments: the arguments that the new kernel takes behind those of the old one.
        proposals: the rows of locals that could be rows of containers.
        problems: what is wrong with the program, unless another walk finds that it is not.
    """

    facts: Facts
    plan: Plan
    blocks: Blocks
    builder: Builder
    expressions: Expressions
    cursor: Cursor
    naming: Naming
    arguments: Arguments
    proposals: RowProposals = field(default_factory=RowProposals)
    problems: list[str] = field(default_factory=list)

    def declaration(self, local: Local) -> Declaration:
        """That of a local which is declared here."""
        return Declaration(local, self.cursor.block, self.cursor.loops, self.builder.place)

    def add_problem(self, message: str) -> None:
        """Raise at the end of the walk, unless something was found that may change this."""
        self.problems.append(message)
