"""The state shared by the parts of one walk over a program."""

from __future__ import annotations

from dataclasses import dataclass, field

from taichi_ext.analysis.loops import Loop
from taichi_ext.differentiate.facts.arguments import Arguments
from taichi_ext.differentiate.facts.facts import Facts
from taichi_ext.differentiate.forms.column_blocks import Blocks
from taichi_ext.differentiate.forms.cursor import Block, Cursor
from taichi_ext.differentiate.plan.naming import Naming
from taichi_ext.differentiate.plan.row_terms import RowProposals
from taichi_ext.differentiate.plan.storage_plan import Plan
from taichi_ext.program import Local, Place
from taichi_ext.program.build import Builder, Expressions


@dataclass(frozen=True)
class Declaration:
    """The declaration of a local: the block, the loops around it, the place in the source."""

    local: Local
    block: Block
    loops: tuple[Loop, ...]
    place: Place | None


@dataclass(frozen=True)
class Walk:
    """One walk over the statements of a program.

    Attributes:
        facts: facts about the program.
        plan: the storage of tangents.
        blocks: the blocks of columns that the program is valid for so far.
        builder: where statements are emitted.
        expressions: the values of the statement, and those in temporaries.
        cursor: the current statement of the walk.
        naming: the names of columns and indices.
        arguments: the arguments of the new kernel after those of the original one.
        proposals: the rows of locals that could be rows of containers.
        problems: errors in the program, raised at the end unless another walk may resolve them.
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
        """The declaration of a local that is declared at the current place."""
        return Declaration(local, self.cursor.block, self.cursor.loops, self.builder.place)
