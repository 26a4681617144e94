"""Rows of locals: which of their terms never meet, and which rows are those of J from the start.

Both are judged at the end of a planning walk that has found nothing else, and again by the next one.

* A row of which each entry gets one term at most is *stored* to: nothing is read and added. If each entry does get one
  before anything reads it, the row is *filled*, and need not be zero before.
* A local whose row is stored, as it is, to an output of which every row is written once, can have its row there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from taichi_ext.analysis.affine import Affine, Atom
from taichi_ext.analysis.loops import Loop
from taichi_ext.differentiate.forms.build import is_number
from taichi_ext.differentiate.forms.cursor import Cursor
from taichi_ext.differentiate.forms.forms import Form, Row, Seed, columns_of, has_row, is_row, numbered
from taichi_ext.differentiate.plan.naming import Naming
from taichi_ext.program import Container, Local

ADDED = 0  # terms that go to a row are added to what is there
STORED = 1  # each entry gets one term at most, which can be stored
FILLED = 2  # and each does get one, before anything reads it: the row need not be zero before
WORDS = {ADDED: "added up", STORED: "stored, each to a column of its own", FILLED: "stored, one to each column"}


@dataclass(frozen=True)
class RowDecision:
    """How the row of a local is written, and the container in whose tangents it lies, if it does."""

    terms: int = ADDED
    container: Container | None = None


class Terms:
    """Findings of one walk about the terms that go to the row of one local.

    Args:
        naming: the names of columns.
        cursor: stands where the local is declared, and moves on.
        width: how many columns the row has.
        is_array: whether the local has several entries, each with a row.
    """

    def __init__(self, naming: Naming, cursor: Cursor, width: int, *, is_array: bool) -> None:
        self._naming, self._cursor = naming, cursor
        self._width, self._is_array = width, is_array
        self._loops, self._block = cursor.loops, cursor.block
        self.level = FILLED  # what still holds: it only ever gets less
        self.has_any = False
        self.reads = 0
        self.row_loops = 0  # updates of all of the row
        self.filled_in: Loop | None = None  # the loop that stores to all of the row

    @property
    def found(self) -> int:
        return self.level if self.has_any else ADDED

    def note_read(self) -> None:
        self.reads += 1
        if self.filled_in in self._cursor.loops:
            self.level = min(self.level, STORED)

    def note_write(self, *, is_zero: bool) -> None:
        """The row is replaced; by zeros as the first thing, that is nothing."""
        if not is_zero:
            self.level = ADDED

    def note_add(self, form: Form, registers: Collection[Seed]) -> None:
        """A form is added, of which the row has what the registers do not hold."""
        if numbered(form):
            is_first = not self.has_any and not has_row(form)
            self.level = min(self.level, self._level(columns_of(form), registers) if is_first else ADDED)
            self.has_any = True

    def _level(self, form: Collection[Seed], registers: Collection[Seed]) -> int:
        """Whether what is added goes to another entry of the row for each term and each time it runs.

        So it is where all columns are ``factor * v + c`` with the variable v of the only loop since the row was made,
        up to variables of the loops around that, and the constants c less than the factor apart. They are all entries
        where there are as many c as the factor says, and the loop runs once, whole, over as many v as that takes.
        """
        if self._is_array or any(seed in registers for seed in form):
            return ADDED
        if any(seed in self._naming.conditional for seed in form):
            return ADDED  # with a coefficient of 0, to the column of another term
        loops, outside = self._cursor.loops, len(self._loops)
        around, inner = loops[:outside], loops[outside:]
        fixed = {atom for loop in around for atom in loop.atoms}
        columns = [seed.column for seed in form]
        if len(inner) > 1 or any(column.terms != columns[0].terms for column in columns):
            return ADDED
        return self._level_in_loop(columns, inner[0], fixed) if inner else STORED

    def _level_in_loop(self, columns: list[Affine], loop: Loop, fixed: set[Atom]) -> int:
        """The same for columns that differ in their constants alone, ``fixed`` being the variables of loops around."""
        factors, width = dict(columns[0].terms), self._width
        if len(loop.atoms) != 1 or not fixed.issuperset(factors.keys() - set(loop.atoms)):
            return ADDED
        (variable,), constants = loop.atoms, sorted(column.constant for column in columns)
        factor = factors.get(variable, 0)
        if constants[-1] - constants[0] >= abs(factor):
            return ADDED
        runs_whole = self._cursor.block.outer is self._block and not loop.is_interrupted and not self.reads
        is_all = factors == {variable: len(columns)} and constants == list(range(len(columns)))
        if not (runs_whole and is_all and loop.shape == (width // factor,) and width % factor == 0):
            return STORED
        self.filled_in = loop
        return FILLED


class RowProposals:
    """The rows of locals that one walk finds could lie in containers."""

    def __init__(self) -> None:
        self._candidates: dict[Local, tuple[Terms, Container, tuple[int, int]]] = {}

    def note_stored_row(self, local: Local, terms: Terms, version: int, container: Container) -> None:
        """The row of a local could be the one of a container that it is stored to."""
        self._candidates[local] = (terms, container, (version, terms.reads))

    def decisions(
        self,
        known: Mapping[Local, RowDecision],
        rows: Mapping[Local, tuple[Terms, int]],
        read: Collection[Container],
    ) -> dict[Local, RowDecision]:
        """At the end of a walk that found nothing else: how rows are to be written from the next one on.

        Args:
            known: how they are written in this one.
            rows: of each local with a row, the terms and how often it has changed.
            read: the containers whose tangents have been read.
        """
        found: dict[Local, RowDecision] = {}
        for local, (terms, version) in rows.items():
            before = known.get(local, RowDecision())
            container = before.container
            candidate = self._candidates.get(local)
            if container is None and candidate is not None:
                its_terms, place, state = candidate
                is_left_alone = (version, terms.reads) == state  # after it was stored
                container = place if is_left_alone and its_terms is terms and place not in read else None
            level = terms.found if local not in known else min(before.terms, terms.found)
            found[local] = RowDecision(level, container)
        return found


def only_row(form: Form) -> Row | None:
    """The row that is, once, all the rows of a form."""
    rows = [(leaf, c) for leaf, c in form.items() if is_row(leaf)]
    return rows[0][0] if len(rows) == 1 and is_number(rows[0][1], 1) else None
