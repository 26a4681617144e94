"""The loops of a program: whether they run in parallel, their domains, and their statements."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from taichi_ext.analysis.affine import Affine, Atom, IntegerForms, loop_atoms
from taichi_ext.analysis.changes import written
from taichi_ext.program import Body, Const, Container, For, If, Jump, Local, Size, Statement, Value, While, enclosed


@dataclass(frozen=True, eq=False)
class Loop:
    """One loop: ``atoms`` are its variables in index expressions, ``bounds`` the ranges of these, if known."""

    statement: For | While
    is_parallel: bool
    atoms: tuple[Atom, ...] = ()
    bounds: tuple[tuple[int, int], ...] | None = None
    is_interrupted: bool = False  # by a continue or break: not all of its body may be reached
    changes: frozenset[Local | Container] = frozenset()  # locals and containers written in it
    reach: tuple[tuple[int, int], ...] | None = None  # the same where cells may be left out, as in a sparse field

    @property
    def iterations(self) -> int | None:
        """How often it runs."""
        return None if self.bounds is None else math.prod(end - first for first, end in self.bounds)

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape that it runs over from zero on."""
        if self.bounds is None or any(first for first, _ in self.bounds):
            return None
        return tuple(end for _, end in self.bounds)


@dataclass(frozen=True)
class Extent:
    """The indices of a container: a shape from an offset on."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    is_full: bool = True  # whether a loop over it visits all of them
    is_safe: bool = False  # whether no index is ever out of range

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """The least index of each axis, and the end."""
        firsts = self.offset or (0,) * len(self.shape)
        return tuple((first, first + n) for first, n in zip(firsts, self.shape, strict=True))


Extents = Mapping[Container, Extent]


def integer_forms(body: Body, extents: Extents) -> IntegerForms:
    """The integer expressions of a program in normal form, where containers have these shapes."""
    return IntegerForms(body, {c: extent.shape for c, extent in extents.items()})


def find_loops(body: Body, extents: Extents, serial: frozenset[Statement] = frozenset()) -> dict[Statement, Loop]:
    """All loops of a kernel; those at its top run in parallel, but for those in ``serial``."""
    loops = ((s, around) for s, around in enclosed(body) if isinstance(s, (For, While)))
    return {s: _loop(s, extents, not around and s not in serial) for s, around in loops}


def _loop(s: For | While, extents: Extents, is_top: bool) -> Loop:
    changes, is_interrupted = frozenset(written(s.body)), leaves(s.body)
    if isinstance(s, While):
        return Loop(s, False, is_interrupted=is_interrupted, changes=changes)
    is_parallel = is_top and not is_serialized(s)
    bounds, reach = loop_bounds(s, extents), loop_reach(s, extents)
    return Loop(s, is_parallel, loop_atoms(s), bounds, is_interrupted, changes, reach)


def is_serialized(s: For) -> bool:
    """Whether the configuration of a loop says that it is not parallel."""
    return bool(s.config.get("serialize", False)) or s.config.get("parallelize") == 1


def loop_bounds(s: For, extents: Extents) -> tuple[tuple[int, int], ...] | None:
    """The first index and the end of each variable of a loop; None if they are not known before the kernel runs."""
    extent = _extent(s, extents)
    return loop_reach(s, extents) if extent is None or extent.is_full else None


def _extent(s: For, extents: Extents) -> Extent | None:
    """The indices of the container that a loop runs over."""
    over = s.domain[0] if s.kind in ("field", "grouped") else None
    return extents.get(over) if isinstance(over, Container) else None


def loop_reach(s: For, extents: Extents) -> tuple[tuple[int, int], ...] | None:
    """The same, also where the loop may leave out some of its indices."""
    if s.kind in ("field", "grouped"):
        extent = _extent(s, extents)
        return None if extent is None else extent.bounds
    bounds = [(number(a, extents), number(b, extents)) for a, b in ranges(s)]
    if not bounds or any(a is None or b is None for a, b in bounds):
        return None
    return tuple((a, max(a, b)) for a, b in bounds)  # type: ignore[misc, type-var]


def iterations(s: For, extents: Extents) -> int | None:
    """How often a loop runs, None where it is not known before the kernel runs."""
    bounds = loop_bounds(s, extents)
    return None if bounds is None else math.prod(end - first for first, end in bounds)


def trips(s: Statement) -> int | None:
    """How often the blocks of a statement run, None where it is not known before the kernel runs."""
    return 1 if isinstance(s, If) else iterations(s, {}) if isinstance(s, For) else None


def ranges(s: For) -> list[tuple[int | Value, int | Value]]:
    """The first index and the end of each variable of a loop over ranges; nothing for a range with steps."""
    if s.kind == "range":
        pairs = [(0, *s.domain)[-2:]] if len(s.domain) < 3 else []
    else:
        pairs = [d if isinstance(d, (tuple, list)) else (0, d) for d in s.domain]
    return [(first, end) for first, end in pairs]


def number(x: object, extents: Extents) -> int | None:
    """A bound of a loop, None where it is not known before the kernel runs."""
    if isinstance(x, Size) and x.container in extents:
        return extents[x.container].shape[x.axis]
    if isinstance(x, Const):
        x = x.value
    return int(x) if isinstance(x, int) else None


def span(column: Affine, loops: Iterable[Loop]) -> tuple[int, int] | None:
    """The least and the greatest value of an index in these loops, None where the kernel alone knows them."""
    bounds = ((a, b) for loop in loops if loop.bounds for a, b in zip(loop.atoms, loop.bounds, strict=True))
    taken = {atom: (first, end - 1) for atom, (first, end) in bounds}
    return column.between(taken.__getitem__) if all(atom in taken for atom, _ in column.terms) else None


def leaves(body: Body, kinds: tuple[str, ...] = ("break", "continue")) -> bool:
    """Whether a statement leaves the loop whose body this is, or ends its iteration."""
    pending = [*body]
    while pending:
        s = pending.pop()
        if isinstance(s, Jump) and s.kind in kinds:
            return True
        pending += (*s.then, *s.orelse) if isinstance(s, If) else ()
    return False
