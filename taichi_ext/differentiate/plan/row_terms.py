"""Rows of locals: whether their terms go to distinct entries, and whether a row can be a row of J from the start.

Both are decided at the end of a pass that required nothing else, and checked by the next one.

* If each entry of a row gets at most one term, the row is *stored* to: nothing is read and added. If each entry gets
  exactly one before any read, the row is *filled*, and need not be zero before.
* If a local's row is stored unchanged to an output every row of which is written once, it can be that row of J.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from taichi_ext.analysis.affine import Affine, Atom
from taichi_ext.analysis.loops import Loop
from taichi_ext.differentiate.forms.forms import Cursor, Form, Row, Seed, columns_of, has_row, is_row, numbered
from taichi_ext.differentiate.plan.naming import Naming
from taichi_ext.program import Container
from taichi_ext.program.build import is_number

ADDED = 0  # terms are added to the entries of a row
STORED = 1  # each entry gets at most one term, which can be stored
FILLED = 2  # each entry gets exactly one term before any read: the row need not be zero before
WORDS = {ADDED: "added up", STORED: "stored, each to a column of its own", FILLED: "stored, one to each column"}


@dataclass(frozen=True)
class RowDecision:
    """How the row of a local is written, and the container whose tangents contain the row, if any."""

    terms: int = ADDED
    container: Container | None = None


class Terms:
    """Findings of one walk about the terms in the row of one local, or in a row for each entry of an array."""

    def __init__(self, naming: Naming, cursor: Cursor, width: int, *, is_array: bool) -> None:
        self._naming, self._cursor = naming, cursor  # which is at the local's declaration now
        self._width, self._is_array = width, is_array
        self._loops, self._block = cursor.loops, cursor.block
        self.level = FILLED  # the level found so far; it only decreases
        self.has_any = False
        self.reads = 0
        self.row_loops = 0  # updates of all of the row
        self.filled_in: Loop | None = None  # the loop that stores to all of the row
        self._stored: tuple[Container, int, int] | None = None  # where it was stored to, and its state there

    @property
    def found(self) -> int:
        return self.level if self.has_any else ADDED

    def note_read(self) -> None:
        self.reads += 1
        if self.filled_in in self._cursor.loops:
            self.level = min(self.level, STORED)

    def note_stored(self, container: Container, version: int) -> None:
        """Note that the row, with this version, could be that of the container's entry it is stored to."""
        self._stored = container, version, self.reads

    def decision(self, before: RowDecision | None, version: int, read: Collection[Container]) -> RowDecision:
        """At the end of a pass that required nothing else: how the next one writes the row.

        Args:
            before: how this pass writes it, if that was decided.
            read: the containers whose tangents have been read.
        """
        container = None if before is None else before.container
        if container is None and self._stored is not None:
            place, *state = self._stored
            is_left_alone = state == [version, self.reads]  # unchanged since it was stored
            container = place if is_left_alone and place not in read else None
        return RowDecision(self.found if before is None else min(before.terms, self.found), container)

    def note_write(self, *, is_zero: bool) -> None:
        """Note that the row is replaced; zeros as the first write do not count."""
        if not is_zero:
            self.level = ADDED

    def note_add(self, form: Form, registers: Collection[Seed]) -> None:
        """Note that a form is added; the row gets the columns that are not in registers."""
        if numbered(form):
            is_first = not self.has_any and not has_row(form)
            self.level = min(self.level, self._level(columns_of(form), registers) if is_first else ADDED)
            self.has_any = True

    def _level(self, form: Collection[Seed], registers: Collection[Seed]) -> int:
        """The level of an addition: whether each term goes to a different entry each time it runs.

        This holds if all columns are ``factor * v + c`` with the variable v of the only loop since the declaration,
        up to variables of the loops around that, and the constants c less than the factor apart. The terms fill all
        entries if there are ``factor`` constants, and the loop runs once, in full, over all values v needed.
        """
        if self._is_array or any(seed in registers for seed in form):
            return ADDED
        if any(seed in self._naming.conditional for seed in form):
            return ADDED  # a coefficient of 0 may go to the column of another term
        loops, outside = self._cursor.loops, len(self._loops)
        around, inner = loops[:outside], loops[outside:]
        fixed = {atom for loop in around for atom in loop.atoms}
        columns = [seed.column for seed in form]
        if len(inner) > 1 or any(column.terms != columns[0].terms for column in columns):
            return ADDED
        return self._level_in_loop(columns, inner[0], fixed) if inner else STORED

    def _level_in_loop(self, columns: list[Affine], loop: Loop, fixed: set[Atom]) -> int:
        """The same for columns that differ only in their constants; ``fixed`` are the variables of outer loops."""
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


def only_row(form: Form) -> Row | None:
    """The only row of a form, with factor 1; None otherwise."""
    rows = [(leaf, c) for leaf, c in form.items() if is_row(leaf)]
    return rows[0][0] if len(rows) == 1 and is_number(rows[0][1], 1) else None
