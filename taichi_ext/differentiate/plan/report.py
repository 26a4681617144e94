"""The decisions for a kernel and their reasons, as text: storage of tangents, loops, cost of lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import taichi_ext.program as ir
from taichi_ext.analysis.bounds import UncertainAccess
from taichi_ext.analysis.cuts import Paths
from taichi_ext.analysis.loops import iterations
from taichi_ext.differentiate.plan.row_terms import ADDED, WORDS
from taichi_ext.program.build import is_over_columns
from taichi_ext.program.keys import Key

LOCAL_ARRAY, SCRATCH = "local array", "scratch memory"
BACKWARDS = "is gone over a second time, backwards, to accumulate tangents"
INPUTS = "adds up factors, and behind it adds the tangents of"
_COUNTED = frozenset(("add", "sub", "mul", "truediv"))


@dataclass(frozen=True, order=True)
class Line:
    """A line of the user's source; in an inlined function, with the function and the line of its call."""

    number: int
    function: str = ""
    call: int = 0

    def __str__(self) -> str:
        return f"line {self.number}" + (f" in {self.function} (called at line {self.call})" if self.function else "")


@dataclass(frozen=True)
class LocalChoice:
    """The storage of a local's tangent: registers, slots, a row."""

    name: str
    line: Line
    registers: int = 0
    slots: int = 0
    row: ir.Container | Key | str | None = None  # LOCAL_ARRAY, SCRATCH, or the container whose tangents contain it
    terms: int = ADDED  # how terms are written to the row
    why: str = ""  # the reason for the storage
    notes: tuple[str, ...] = ()  # other decisions, each with its reason


@dataclass(frozen=True)
class LoopChoice:
    """How a parallel loop runs, and why: ``runs serially: ...``; ``number`` is that of the loop in its kernel."""

    number: int
    text: str


@dataclass(frozen=True)
class Costs:
    """The products and sums on tangents: of each line when it runs, and of an iteration of the parallel loops."""

    by_line: Mapping[Line, int] = field(default_factory=dict)
    total: int = 0
    runs: int = 0  # how often lines with tangents run in such an iteration, a loop of unknown length once


@dataclass(frozen=True)
class Report:
    """The decisions for one kernel."""

    locals: tuple[LocalChoice, ...] = ()
    loops: tuple[LoopChoice, ...] = ()
    in_rows: tuple[tuple[Key, str], ...] = ()  # parameters whose columns rows hold, and the reason
    costs: Costs = field(default_factory=Costs)
    accesses: tuple[UncertainAccess, ...] = ()  # accesses whose indices may be out of range
    edges: tuple[ir.Place, ...] = ()  # conditions that ``pixel`` has found
    has_cuts: bool = False  # whether numbers lose their derivative
    paths: Callable[[], Paths] = Paths  # from containers to others, and where they are cut

    def placed(self, key_of: Callable[[ir.Container], Key]) -> Report:
        """The same with containers replaced by their keys."""
        rows = (replace(c, row=key_of(c.row)) if isinstance(c.row, ir.Container) else c for c in self.locals)
        return replace(self, locals=tuple(rows))

    def lines(self, columns: int, name_of: Callable[[ir.Container | Key], str]) -> list[str]:
        """The decisions as lines of text; ``name_of`` gives the user's name of a container."""
        locals_ = dict.fromkeys(_of_local(choice, columns, name_of) for choice in self.locals)
        operations = (f"{line}: {count} operations on tangents" for line, count in sorted(self.costs.by_line.items()))
        loops = (f"parallel loop {x.number} {x.text}" for x in sorted(self.loops, key=lambda loop: loop.number))
        guards = dict.fromkeys(f"{line_of(access.place)}: {access.guard()}" for access in self.accesses)
        edges = dict.fromkeys(f"{p.file}:{p.line}: an edge of pixel, where a condition changes" for p in self.edges)
        rows = (f"{why} has all columns of {name_of(key)}" for key, why in self.in_rows)
        cuts = self.paths().cuts if self.has_cuts else ()
        ends = (f"a path ends at {cut}, where the derivative is 0" for cut in cuts)
        return [*rows, *locals_, *edges, *ends, *guards, *operations, *loops]


def _of_local(choice: LocalChoice, columns: int, name_of: Callable[[ir.Container | Key], str]) -> str:
    parts = [f"{choice.registers} fixed columns"] if choice.registers else []
    if choice.row is not None:
        is_shared = choice.row not in (LOCAL_ARRAY, SCRATCH)
        place = f"the tangents of {name_of(choice.row)}" if is_shared else choice.row
        parts = [f"all {columns} columns in {place}", *parts]
    elif choice.slots:
        parts.append(f"{choice.slots} indexed columns")
    terms = "" if choice.row is None else f", its terms {WORDS[choice.terms]}"
    why = f", since {choice.why}" if parts and choice.why else ""
    said = [f"{' and '.join(parts)}{terms}{why}"] if parts else []
    return f"local {choice.name}, {choice.line}: {'; '.join((*said, *choice.notes))}"


# --- loops and edges


def found_edges(body: ir.Body) -> tuple[ir.Place, ...]:
    """The places of the conditions at which ``pixel`` looks for edges."""
    edges = (s for s in ir.statements(body) if isinstance(s, ir.Boundary) and s.options.get("is_found"))
    return tuple(s.place for s in edges if s.place is not None)


def loop_choices(
    body: ir.Body, serial: Mapping[ir.Statement, str], inner: Mapping[ir.Statement, str]
) -> tuple[LoopChoice, ...]:
    """How loops run: those in ``serial`` keep their order; ``inner`` says how loops in them are differentiated."""
    choices: list[LoopChoice] = []
    for n, loop in enumerate(parallel_loops(body), 1):
        if loop in serial:
            choices.append(LoopChoice(n, f"runs serially: {serial[loop]}"))
        said = (s for s in ir.statements(loop.body) if s in inner)
        choices += [LoopChoice(n, f"has a loop, {line_of(s.place)}, that {inner[s]}") for s in said]
    return tuple(choices)


def parallel_loops(body: ir.Body) -> list[ir.For]:
    """The loops that a kernel runs in parallel, or could, in the order of their numbers."""
    return [s for s in body if isinstance(s, ir.For)]


def line_of(place: ir.Place | None) -> Line:
    if place is None:
        return Line(0)
    return Line(place.line) if place.caller is None else Line(place.line, place.function, place.caller.line)


# --- costs


def costs(body: ir.Body, shadows: set[ir.Container]) -> Costs:
    """The products and sums on tangents, for all columns; partial derivatives are not counted."""
    counts, runs = Counter[Line](), dict[Line, int]()
    for s, (columns, times) in ir.inherited(body, (1, 0), _repeated):
        count = _operations(s, shadows)
        if count is not None:
            line = line_of(s.place)
            counts[line] += columns * count
            runs[line] = max(times, 1, runs.get(line, 0))
    total = sum(count * runs[line] for line, count in counts.items())
    return Costs({line: count for line, count in counts.items() if count}, total, sum(runs.values()))


def _repeated(s: ir.Statement, around: tuple[int, int]) -> tuple[int, int]:
    """For how many columns, and how often in an iteration of a parallel loop, blocks run; 0: outside of one."""
    columns, times = around
    repeats = (iterations(s, {}) or 1) if isinstance(s, ir.For) else 1
    return (columns * repeats, times) if is_over_columns(s) else (columns, times * repeats or 1)


def _operations(s: ir.Statement, shadows: set[ir.Container]) -> int | None:
    """Those of a statement; None if it has no tangent."""
    if isinstance(s, ir.Declare):
        return sum(map(_size, s.values)) if s.local.kind in ("tangent", "weight") else None
    if isinstance(s, (ir.Assign, ir.Update)):
        memory = s.target.memory
        is_tangent = memory.kind == "tangent" if isinstance(memory, ir.Local) else memory in shadows
        return _size(s.value) + isinstance(s, ir.Update) if is_tangent else None
    return None


def _size(value: ir.Value) -> int:
    """The number of products and sums of real numbers in an expression, without those in indices."""
    count, pending = 0, [value]
    while pending:
        node = pending.pop()
        if isinstance(node, ir.Op) and node.dtype.is_real:
            count += node.name in _COUNTED
            pending += node.args
    return count
