"""Integer expressions in the normal form ``sum(factor * variable) + constant``: equal indices look equal."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import taichi_ext.program as ir
from taichi_ext.cached import cached_property
from taichi_ext.program.build import Coefficient, add, cast, multiply
from taichi_ext.simplify.usage import assigned_locals


@dataclass(frozen=True)
class VectorEntry:
    """An entry of an integer vector that does not change: the vector, and the numbers of the entry."""

    local: ir.Local
    entry: tuple[int, ...]


Atom = ir.Local | ir.Value | VectorEntry


@dataclass(frozen=True)
class Affine:
    """``sum(factor * atom) + constant``; atoms are unchanging integer locals, or values without a normal form."""

    terms: tuple[tuple[Atom, int], ...] = ()
    constant: int = 0

    @cached_property
    def _hash(self) -> int:
        return hash((self.terms, self.constant))

    def __hash__(self) -> int:
        return self._hash  # found once: columns are the keys of forms

    @property
    def is_constant(self) -> bool:
        return not self.terms

    def __add__(self, other: Affine) -> Affine:
        factors = dict(self.terms)
        for atom, factor in other.terms:
            factors[atom] = factors.get(atom, 0) + factor
        return Affine(_sorted(factors), self.constant + other.constant)

    def __mul__(self, factor: int) -> Affine:
        if factor == 0:
            return Affine()
        return Affine(tuple((a, f * factor) for a, f in self.terms), self.constant * factor)

    def between(self, interval: Callable[[Atom], tuple[int, int]]) -> tuple[int, int]:
        """The least and the greatest value where none wraps around, from those of its atoms."""
        low = high = self.constant
        for atom, factor in self.terms:
            ends = sorted(factor * end for end in interval(atom))
            low, high = low + ends[0], high + ends[1]
        return low, high


_ranks: weakref.WeakKeyDictionary[ir.Local | ir.Value, int] = weakref.WeakKeyDictionary()
_count = itertools.count()


def _rank(atom: Atom) -> tuple[int, ...]:
    """The place of an atom in sums: the order in which atoms are first seen, so that texts are the same in each run."""
    if isinstance(atom, VectorEntry):
        return (*_rank(atom.local), *atom.entry)
    return (_ranks[atom] if atom in _ranks else _ranks.setdefault(atom, next(_count)),)


def _sorted(factors: Mapping[Atom, int]) -> tuple[tuple[Atom, int], ...]:
    return tuple(sorted(((a, f) for a, f in factors.items() if f), key=lambda term: _rank(term[0])))


_LINEAR = frozenset(("add", "sub", "mul", "neg", "cast"))
NARROW = frozenset((ir.U1, ir.I8, ir.I16, ir.U8, ir.U16, ir.I32))  # types of which an i32 holds every number


def linear_form(value: ir.Value | int, atom: Callable[[ir.Value], Affine | None]) -> Affine | None:
    """The normal form of an expression that is computed in i32, None where there is none.

    ``atom`` gives the form of what is neither a number nor a sum or product of such forms.
    """
    if isinstance(value, int):
        return Affine((), value)
    if isinstance(value, ir.Const):
        number = int(value.value)
        return Affine((), number) if number == ir.I32.wrapped(number) else None
    if isinstance(value, ir.Op) and value.dtype == ir.I32 and value.name in _LINEAR:
        parts = [linear_form(a, atom) if a.dtype in NARROW else None for a in value.args]
        form = _combined(value.name, parts)
        if form is not None:  # of that type, a sum or product wraps, whatever its factors are
            factors = {atom: ir.I32.wrapped(factor) for atom, factor in form.terms}
            return Affine(_sorted(factors), ir.I32.wrapped(form.constant))
    return atom(value)


def _combined(name: str, parts: list[Affine | None]) -> Affine | None:
    match name, parts:
        case "add", [Affine() as a, Affine() as b]:
            return a + b
        case "sub", [Affine() as a, Affine() as b]:
            return a + b * -1
        case "mul", [Affine(terms=()) as a, Affine() as b]:
            return b * a.constant
        case "mul", [Affine() as a, Affine(terms=()) as b]:
            return a * b.constant
        case "neg", [Affine() as a]:
            return a * -1
        case "cast", [Affine() as a]:
            return a
    return None


class Indices:
    """The normal forms of a program's integer expressions."""

    def __init__(self, body: ir.Body) -> None:
        self.forms: dict[ir.Local, Affine] = {}  # of integer locals
        self.vectors: set[ir.Local] = set()  # of integers, that do not change
        self.clamped: dict[ir.Local, Affine] = {}  # the forms of clamped locals within their range
        changed = assigned_locals(body)
        for statement in ir.statements(body):
            for local in ir.declared(statement):
                if local in changed or not local.dtype.is_integer:
                    continue
                if local.shape:
                    self.vectors.add(local)
                    continue
                known = None
                if isinstance(statement, ir.Declare) and local.dtype == ir.I32:
                    known = self.form(statement.values[0])
                    self._note_clamped(local, statement.values[0])
                self.forms[local] = Affine(((local, 1),)) if known is None else known

    def _note_clamped(self, local: ir.Local, value: ir.Value) -> None:
        match value:
            case ir.Op(name="max", args=(ir.Const(), ir.Op(name="min", args=(index, ir.Const())))):
                known = self.form(index)
                if known is not None:
                    self.clamped[local] = known

    def unclamped(self, affine: Affine) -> Affine:
        """An index that is kept within a range, as it is in the range."""
        if len(affine.terms) == 1 and affine.terms[0][0] in self.clamped and affine.terms[0][1] == 1:
            return self.clamped[affine.terms[0][0]] + Affine((), affine.constant)  # type: ignore[index]
        return affine

    def name(self, local: ir.Local) -> Affine:
        """A local that does not change as a normal form of its own."""
        return self.forms.setdefault(local, Affine(((local, 1),)))

    def form(self, index: ir.Value | int) -> Affine | None:
        return linear_form(index, self._atom)

    def _atom(self, value: ir.Value) -> Affine | None:
        match value:
            case ir.Read(local=local, index=()):
                if local in self.forms:
                    return self.forms[local]
                return self.name(local) if local.kind == "parameter" and local.dtype.is_integer else None
            case ir.Read(local=local, index=entry) if local in self.vectors or local.kind == "parameter":
                numbers = tuple(i for i in entry if isinstance(i, int))
                is_known = local.dtype.is_integer and len(numbers) == len(entry)
                return Affine(((VectorEntry(local, numbers), 1),)) if is_known else None
        return None

    def site(self, index: ir.Value | int) -> Affine:
        """The normal form; an index without one becomes a new atom, equal to nothing else."""
        if isinstance(index, int):
            return Affine((), index)
        known = self.form(index)
        return Affine(((index, 1),)) if known is None else known


def atom_value(atom: Atom) -> ir.Value:
    """The meaning of an atom: a local, an entry of an integer vector, or a value."""
    if isinstance(atom, ir.Local):
        return ir.Read(atom)
    return ir.Read(atom.local, atom.entry) if isinstance(atom, VectorEntry) else atom


def value_of(affine: Affine) -> ir.Value:
    total: Coefficient = 0
    for atom, factor in affine.terms:
        total = add(total, multiply(factor, cast(atom_value(atom), ir.I32)))
    return cast(add(total, affine.constant), ir.I32)


def loop_atoms(s: ir.For) -> tuple[Atom, ...]:
    """The variables of a loop; the entries of one that is a vector."""
    if len(s.variables) == 1 and s.variables[0].shape:
        (vector,) = s.variables
        return tuple(VectorEntry(vector, (n,)) for n in range(vector.shape[0]))
    return s.variables


def source_of(atom: Atom) -> ir.Local | ir.Value:
    """The source of an atom: the local, that of an entry, or the value itself."""
    return atom.local if isinstance(atom, VectorEntry) else atom
