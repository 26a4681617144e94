"""Loops over columns that run from the first to the last column in which the rows that they read are not zero.

A bone of a hand depends on the angles of one finger, so most columns of its tangents are zero. The range of the others
is found in front of a loop that reads such rows many times::

    for e in range(bones):                      for i in y:
        first_of[e], end_of[e] = P, 0               first, end = P, 0
        for k in range(P):                          for n in range(start[i], start[i + 1]):
            if d_turn[e * P + k] != 0:                  first = min(first, first_of[bone[n]])
                first_of[e] = min(first_of[e], k)       end = max(end, end_of[bone[n]])
                end_of[e] = k + 1                       for k in range(first_of[bone[n]], end_of[bone[n]]):
                                                            d_sum[k] += w[n] * d_turn[bone[n] * P + k]
                                                    for k in range(first, end):
                                                        d_other[k] = v * d_sum[k]

Assumptions, each of them established in the text of the loop:

* It stores nothing to rows whose ranges it uses. They are rows of fields, which share no memory; those of arrays may.
* A local array is zero outside of ``first`` to ``end``. It is declared in the loop, as zeros, and loops over columns
  store to it, each to its own column: 0, or sums of products with a factor that is zero where the rows are. A store to
  another column extends the range to that.
* Loops that overwrite local arrays, or read others, run from ``first`` to ``end``. Only additions of rows of fields run
  over the range of those rows alone.

A column that is left out keeps its zero, even where a factor of it is infinite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce

import taichi_ext.program as ir
from taichi_ext.analysis.affine import Affine, Indices
from taichi_ext.analysis.changes import written_containers
from taichi_ext.analysis.loops import Extents, loop_bounds
from taichi_ext.differentiate.facts.decisions import Differentiated
from taichi_ext.differentiate.forms.build import add, cast, element, is_over_columns, literal, multiply, operation
from taichi_ext.differentiate.plan.report import LoopChoice, parallel_loops
from taichi_ext.schedule.machine import Machine
from taichi_ext.schedule.private_sums import reserved
from taichi_ext.simplify.usage import assigned_locals

LEAST_COLUMNS = 16
LEAST_READS = 4  # of each row whose range is found
MOST_RANGES = 8  # that one loop joins
ONLY_NARROW = True  # only rows of fields that are likely to be zero in most columns
BITS = {ir.F32: ir.I32, ir.F64: ir.I64}  # to compare with zero: with fast_math, a NaN may be equal to it


@dataclass(frozen=True)
class Rows:
    """The tangents of a field: ``width`` rows for each of its elements, one for each number in it."""

    owner: ir.Container
    elements: int
    width: int
    columns: int


def with_column_ranges(
    recorded: ir.Program,
    differentiated: Differentiated,
    owners: Mapping[ir.Container, ir.Container | None],
    columns: int,
    machine: Machine,
) -> Differentiated:
    """The scheduled program with shorter loops over columns, and memory for their ranges.

    Args:
        recorded: the program without tangents.
        differentiated: the scheduled program.
        owners: the container that each shadow belongs to.
        columns: of the shadows.
        machine: facts about the machine.
    """
    found, program = differentiated, differentiated.program
    if columns < LEAST_COLUMNS or machine.is_checked:
        return found
    rows = narrow_rows(program.body, owners, machine.extents, columns)
    numbers = {s.variables[0]: n for n, s in enumerate(parallel_loops(recorded.body), 1)}
    body: list[ir.Statement] = []
    choices: list[LoopChoice] = []
    for s in program.body:
        survey = _Survey(s, rows, machine.extents) if rows and isinstance(s, ir.For) else None
        if survey is None or not survey.pays:
            body.append(s)
            continue
        number = next((numbers[v] for x in ir.statements((s,)) for v in ir.declared(x) if v in numbers), 0)
        names = " and ".join(rows[c].owner.name for c in survey.tangents)
        choices.append(LoopChoice(number, f"leaves out columns that are zero in the rows of {names}"))
        starts: dict[ir.Container, ir.Load] = {}
        for c in survey.tangents:
            found, memory, start = reserved(found, "ranges_of_columns", ir.I32, 2 * rows[c].elements)
            starts[c] = element(memory, start)
            body.append(_filled(c, rows[c], starts[c]))
        body.append(survey.shorter(starts))
    report = replace(found.report, loops=(*found.report.loops, *choices))
    return replace(found, program=replace(program, body=tuple(body)), report=report)


def narrow_rows(
    body: ir.Body, owners: Mapping[ir.Container, ir.Container | None], extents: Extents, columns: int
) -> dict[ir.Container, Rows]:
    """The tangents of fields whose rows are likely to be zero in most columns.

    They are made of columns that differ from element to element, and not of local arrays, where loops add up tangents.
    """
    indices = Indices(body)
    sources: dict[object, set[object]] = {}
    wide: set[object] = set()
    own: set[object] = set()
    for s in ir.statements(body):
        contents = s.contents
        if isinstance(s, ir.Store) and s.target.memory in owners:
            contents = s.value.contents
            (index,) = s.target.indices  # type: ignore[union-attr]
            place = indices.form(index)
            is_row = any(v.kind == "column" for v in index.contents.locals)
            if not is_row and (place is None or any(factor % columns for _, factor in place.terms)):
                own.add(s.target.memory)
        for x in (s.target.memory,) if isinstance(s, ir.Store) else ir.declared(s):
            sources.setdefault(x, set()).update(contents.locals, contents.containers)
            if isinstance(x, ir.Local) and x.shape and x.kind == "tangent":
                wide.add(x)
    for reached in (wide, own):
        count = -1
        while count != len(reached):
            count = len(reached)
            reached.update(x for x, of in sources.items() if not reached.isdisjoint(of))
    return {
        c: Rows(owner, math.prod(extents[owner].shape), math.prod(owner.element_shape), columns)
        for c, owner in owners.items()
        if owner is not None and owner in extents and c.dtype in BITS
        if not ONLY_NARROW or (c in own and c not in wide and not owner.is_argument)
    }


class _Survey:
    """The loops over columns within one loop of a kernel, and the tangents whose ranges make them shorter."""

    def __init__(self, s: ir.For, rows: Mapping[ir.Container, Rows], extents: Extents) -> None:
        stored, inner, changed = written_containers((s,)), ir.statements(s.body), assigned_locals((s,))
        self.loop, self.rows = s, {c: r for c, r in rows.items() if c not in stored}
        self.columns = next(iter(rows.values())).columns
        self.indices = Indices((s,))
        declares = [x for x in inner if isinstance(x, ir.Declare)]
        self.values = {x.local: x.values[0] for x in declares if not x.local.shape and x.local not in changed}
        self.arrays = {x.local for x in declares if x.local.shape == (self.columns,)}
        self.arrays -= {x.local for x in declares if not x.values or not all(map(_is_zero, x.values))}
        loops = [x for x in inner if is_over_columns(x) and not any(map(ir.bodies, x.body))]
        count, readers = -1, [_Reader(self, x) for x in loops]
        while count != len(self.arrays):  # an array that anything else stores to is none of them
            count = len(self.arrays)
            readers = [r for r in (_Reader(self, x) for x in loops) if r.is_linear]
            fit = {x for r in readers for x in r.loop.body}
            stores = (x for x in inner if isinstance(x, ir.Store) and x not in fit and _point(x) is None)
            self.arrays -= {x.target.memory for x in stores if isinstance(x.target, ir.Read)}
        self.readers = {r.loop: r for r in readers if r.rows or r.reads_arrays}
        self.tangents = tuple(dict.fromkeys(c for r in self.readers.values() for c, _ in r.rows))
        bounds = loop_bounds(s, extents) or ()
        self._reads = math.prod(max(1, b - a) for a, b in bounds) * sum(r.reads for r in self.readers.values())

    @property
    def pays(self) -> bool:
        """Whether there are such loops, which read rows often."""
        looked_at = sum(self.rows[c].elements * self.rows[c].width for c in self.tangents)
        return bool(self.tangents) and self._reads >= LEAST_READS * looked_at

    def shorter(self, starts: Mapping[ir.Container, ir.Load]) -> ir.For:
        """The loop with shorter loops over columns; ``starts`` are the first entries of the ranges of each field."""
        bounds = _Bounds.new()
        needs_bounds = not all(r.is_sum for r in self.readers.values())

        def change(x: ir.Statement) -> ir.Statement | ir.Body:
            reader = self.readers.get(x)  # type: ignore[call-overload]
            point = _point(x)
            if needs_bounds and point is not None and x.target.memory in self.arrays:  # type: ignore[attr-defined]
                return (*bounds.joined(point, cast(add(point, 1), ir.I32)), x)
            if reader is None:
                return x
            made: list[ir.Statement] = []
            used = bounds
            if reader.rows:
                entries = [_range_of(row, self.rows[c], starts[c]) for (c, _), row in reader.rows.items()]
                own = _Bounds(*(replace(v) for v in (bounds.first, bounds.end)))
                made += own.declared(
                    *(reduce(f, e) for f, e in zip((_min, _max), zip(*entries, strict=True), strict=True))
                )
                made += bounds.joined(ir.Read(own.first), ir.Read(own.end)) if needs_bounds else ()
                used = own if reader.is_sum else bounds
            return (*made, reader.between(ir.Read(used.first), ir.Read(used.end)))

        body = ir.mapped(self.loop.body, change)
        nothing = bounds.declared(literal(self.columns, ir.I32), literal(0, ir.I32)) if needs_bounds else ()
        return replace(self.loop, body=(*nothing, *body))


class _Reader:
    """A loop over columns, and the rows that it reads.

    Attributes:
        rows: for each field, and each element of it as far as that is known, the number of one of its rows.
        reads: how many rows it reads.
        reads_arrays: whether it reads local arrays, other than those that it adds to.
        is_sum: whether it only adds rows of fields to local arrays.
        is_linear: whether all that it stores goes to local arrays, and is zero where those and the rows are zero.
    """

    def __init__(self, survey: _Survey, loop: ir.For) -> None:
        self.survey, self.loop = survey, loop
        (self._k,) = loop.variables
        self.rows: dict[tuple[ir.Container, object], ir.Value] = {}
        self.reads, self.reads_arrays, self.is_sum = 0, False, True
        self._linear: set[ir.Local] = set()  # locals of the loop that are such sums
        self._own = {self._k, *(v for x in loop.body for v in ir.declared(x))}
        is_whole = len(loop.domain) == 1 and getattr(loop.domain[0], "value", None) == survey.columns
        self.is_linear = is_whole and all(map(self._note, loop.body)) and len(self.rows) <= MOST_RANGES

    def between(self, first: ir.Value, end: ir.Value) -> ir.For:
        """The loop over some columns; its variable has another kind, since it is not over all columns."""
        memo: dict[ir.Value, ir.Value] = {}
        k = replace(self._k, kind="loop")

        def rename(v: ir.Value) -> ir.Value:
            return ir.Read(k) if _is_read(v, self._k) else v

        body = tuple(ir.with_values(x, lambda v: ir.rebuilt(v, rename, memo)) for x in self.loop.body)
        return replace(self.loop, variables=(k,), domain=(first, end), body=body)

    def _note(self, s: ir.Statement) -> bool:
        """Whether a statement of the loop is of that form."""
        if not s.contents.is_pure:
            return False
        if isinstance(s, ir.Declare) and not s.local.shape:
            if self._vanishes(s.values[0]):
                self._linear.add(s.local)
            return True
        if not isinstance(s, ir.Assign) or not isinstance(s.target, ir.Read) or not self._is_entry(s.target):
            return False
        added = self._added(s.target, s.value)
        self.is_sum &= added is not None
        return self._vanishes(s.value if added is None else added)

    def _is_entry(self, x: ir.Value) -> bool:
        """Whether a value is the column of the iteration in a local array."""
        return isinstance(x, ir.Read) and x.local in self.survey.arrays and all(_is_read(i, self._k) for i in x.index)

    def _added(self, target: ir.Read, value: ir.Value) -> ir.Value | None:
        """What a statement adds to its target; None where it does something else."""
        if isinstance(value, ir.Op) and value.name in ("add", "sub"):
            a, b = value.args
            for entry, rest in ((a, b), (b, a)):
                if self._is_entry(entry) and entry.local is target.local:  # type: ignore[attr-defined]
                    return rest if value.name == "add" or entry is a else None
        return None

    def _vanishes(self, value: ir.Value) -> bool:
        """Whether a value is zero where the rows and arrays are zero that it reads, which are noted."""
        match value:
            case ir.Const():
                return _is_zero(value)
            case ir.Read(local=local) if local.shape:
                self.is_sum, self.reads_arrays = False, True
                return self._is_entry(value)
            case ir.Read(local=local):
                return local in self._linear
            case ir.Load():
                return self._note_row(value)
            case ir.Op(name="add" | "sub", args=args):
                return all(map(self._vanishes, args))
            case ir.Op(name="mul", args=(a, b)):
                return self._vanishes(a) or self._vanishes(b)
            case ir.Op(name="neg" | "cast" | "truediv", args=(a, *_)):
                return self._vanishes(a)
            case ir.Op(name="select", args=(_, a, b)):
                return self._vanishes(a) and self._vanishes(b)
        return False

    def _note_row(self, load: ir.Load) -> bool:
        """Note the row of an entry of a field's tangents, if it is in the column of the iteration."""
        match load.indices[0]:
            case ir.Op(name="add", args=(ir.Op(name="mul", args=(row, ir.Const(value=count))), k)):
                pass
            case ir.Op(name="add", args=(ir.Const(value=start), k)):
                row, count = literal(int(start) // self.survey.columns, ir.I32), self.survey.columns
                if start % count:
                    return False
            case _:
                return False
        if load.container not in self.survey.rows or count != self.survey.columns or not _is_read(k, self._k):
            return False
        if not row.contents.is_pure or not self._own.isdisjoint(row.contents.locals):
            return False
        self.rows.setdefault((load.container, self._element(row, self.survey.rows[load.container].width)), row)
        self.reads += 1
        return True

    def _element(self, row: ir.Value, width: int) -> object:
        """The same for rows that are known to be of one element."""
        known, condition, number = self.survey.values, None, row
        match known.get(row.local) if isinstance(row, ir.Read) else row:
            case ir.Op(name="select", args=(ir.Read(local=local, index=()), inner, ir.Const(value=0))) if (
                local in known
            ):
                condition, number = local, inner
        place = self.survey.indices.form(number)
        if place is None or any(factor % width for _, factor in place.terms):
            return row.local if isinstance(row, ir.Read) else row
        return condition, Affine(tuple((a, f // width) for a, f in place.terms), place.constant // width)


def _point(s: ir.Statement) -> ir.Value | None:
    """The column of a number in a local array that a statement stores to, outside of loops over columns."""
    match s:
        case ir.Assign(target=ir.Read(index=(column,))) | ir.Update(target=ir.Read(index=(column,))):
            column = column if isinstance(column, ir.Value) else literal(column, ir.I32)
            return None if any(x.kind == "column" for x in column.contents.locals) else column
    return None


def _is_zero(x: ir.Value) -> bool:
    return isinstance(x, ir.Const) and x.value == 0


def _is_read(x: object, local: ir.Local) -> bool:
    return isinstance(x, ir.Read) and x.local is local and not x.index


# --- ranges as values and statements


@dataclass(frozen=True)
class _Bounds:
    """Two locals: the first column of a range, and its end."""

    first: ir.Local
    end: ir.Local

    @staticmethod
    def new() -> _Bounds:
        return _Bounds(*(ir.Local(name, ir.I32, (), "kept") for name in ("first", "end")))

    def declared(self, first: ir.Value, end: ir.Value) -> ir.Body:
        return ir.Declare(self.first, (first,)), ir.Declare(self.end, (end,))

    def joined(self, first: ir.Value, end: ir.Value) -> ir.Body:
        """The statements that extend it to another range."""
        return tuple(
            ir.Assign(ir.Read(local), join(ir.Read(local), other))
            for local, join, other in ((self.first, _min, first), (self.end, _max, end))
        )


def _min(a: ir.Value, b: ir.Value) -> ir.Value:
    return operation("min", a, b)


def _max(a: ir.Value, b: ir.Value) -> ir.Value:
    return operation("max", a, b)


def _range_of(row: ir.Value, rows: Rows, start: ir.Load) -> tuple[ir.Load, ir.Load]:
    """The first column of the range of a row's element, and the end."""
    number = row if rows.width == 1 else operation("floordiv", row, rows.width)
    first, end = (add(multiply(number, 2), add(start.indices[0], n)) for n in (0, 1))
    return element(start.container, first), element(start.container, end)


def _filled(tangents: ir.Container, rows: Rows, start: ir.Load) -> ir.For:
    """The loop that finds the ranges of a field's elements."""
    e, k = (ir.Local(name, ir.I32, (), "loop") for name in ("e", "k"))
    bounds = _Bounds.new()
    numbers = [
        element(tangents, add(multiply(add(multiply(ir.Read(e), rows.width), n), rows.columns), ir.Read(k)))
        for n in range(rows.width)
    ]
    bits = reduce(lambda a, b: operation("bit_or", a, b), (ir.Op("bit_cast", (x,), BITS[x.dtype]) for x in numbers))
    following = cast(add(ir.Read(k), 1), ir.I32)
    inner = ir.If(operation("ne", bits, 0), bounds.joined(ir.Read(k), following))
    entries = _range_of(ir.Read(e), replace(rows, width=1), start)
    body = (
        *bounds.declared(literal(rows.columns, ir.I32), literal(0, ir.I32)),
        ir.For("range", (k,), (literal(rows.columns, ir.I32),), (inner,)),
        *(ir.Assign(x, ir.Read(v)) for x, v in zip(entries, (bounds.first, bounds.end), strict=True)),
    )
    return ir.For("range", (e,), (literal(rows.elements, ir.I32),), body, {"serialize": True})
