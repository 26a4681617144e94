"""The tracer's facts as a report for people."""

from __future__ import annotations

from collections.abc import Iterator

from taichi_ext.derivative.rows import MAX_LOCAL_ARRAY
from taichi_ext.differentiate.report import LOCAL_ARRAY, SCRATCH, Line, LocalChoice, LoopChoice, Report
from taichi_ext.differentiate.row_terms import ADDED
from taichi_ext.tracing.facts import Facts


def reported(facts: Facts, columns: int) -> Report:
    """The decisions that the facts stand for."""
    operations = {_line(path, line): count for (path, line), count in facts.operations.items()}
    return Report(tuple(_locals(facts, columns)), tuple(_loops(facts)), operations)


def _line(path: tuple[tuple[int, str], ...], line: int) -> Line:
    return Line(line, path[-1][1], path[-1][0]) if path else Line(line)


def _locals(facts: Facts, columns: int) -> Iterator[LocalChoice]:
    for key, storage in facts.storages.items():
        if not storage.needed:
            continue
        path, name, line, *part = key
        entry = "".join(f"[{p}]" for p in part if isinstance(p, int))
        row = None
        if storage.has_row:
            row = facts.aliases.get(key) or (LOCAL_ARRAY if columns <= MAX_LOCAL_ARRAY else SCRATCH)
        registers = 0 if storage.has_many_columns else len(storage.constants)
        terms = facts.stores.get(key, ADDED)
        yield LocalChoice(f"{name}{entry}", _line(path, line), registers, storage.slots, row, terms)


def _loops(facts: Facts) -> Iterator[LoopChoice]:
    for _, number in facts.serialized:
        yield LoopChoice(number, "runs serially: order of iterations matters to an atomic")
    for number, _ in sorted(facts.spread):
        yield LoopChoice(number, "has few iterations, which are spread over all threads")
    for (number, _), pieces in sorted(facts.pieces.items()):
        if pieces is not None:
            numbers = sum(collected.numbers for collected in pieces.collected.values())
            why = f"which LLVM can vectorise: {numbers} numbers of J from each"
            yield LoopChoice(number, f"runs in pieces of {pieces.length} iterations, {why}")
