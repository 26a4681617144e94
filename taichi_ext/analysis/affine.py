"""Integer expressions in the normal form ``sum(factor * variable) + constant``: equal indices look equal."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from taichi_ext.program import I32, Body, Const, Declare, For, Local, Op, Read, Value, declared, statements
from taichi_ext.simplify.usage import assigned_locals


@dataclass(frozen=True)
class VectorEntry:
    """An entry of an integer vector that does not change: the vector, and the numbers of the entry."""

    local: Local
    entry: tuple[int, ...]


Atom = Local | Value | VectorEntry


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


_ranks: weakref.WeakKeyDictionary[Local | Value, int] = weakref.WeakKeyDictionary()
_count = itertools.count()


def _rank(atom: Atom) -> tuple[int, ...]:
    """The place of an atom in sums: the order in which atoms are first seen, so that texts are the same in each run."""
    if isinstance(atom, VectorEntry):
        return (*_rank(atom.local), *atom.entry)
    return (_ranks[atom] if atom in _ranks else _ranks.setdefault(atom, next(_count)),)


def _sorted(factors: Mapping[Atom, int]) -> tuple[tuple[Atom, int], ...]:
    return tuple(sorted(((a, f) for a, f in factors.items() if f), key=lambda term: _rank(term[0])))


class Indices:
    """The normal forms of a program's integer expressions."""

    def __init__(self, body: Body) -> None:
        self.forms: dict[Local, Affine] = {}  # of integer locals
        self.vectors: set[Local] = set()  # of integers, that do not change
        self.clamped: dict[Local, Affine] = {}  # the forms of clamped locals within their range
        changed = assigned_locals(body)
        for statement in statements(body):
            for local in declared(statement):
                if local in changed or not local.dtype.is_integer:
                    continue
                if local.shape:
                    self.vectors.add(local)
                    continue
                known = None
                if isinstance(statement, Declare) and local.dtype == I32:
                    known = self.form(statement.values[0])
                    self._note_clamped(local, statement.values[0])
                self.forms[local] = Affine(((local, 1),)) if known is None else known

    def _note_clamped(self, local: Local, value: Value) -> None:
        match value:
            case Op(name="max", args=(Const(), Op(name="min", args=(index, Const())))):
                known = self.form(index)
                if known is not None:
                    self.clamped[local] = known

    def unclamped(self, affine: Affine) -> Affine:
        """An index that is kept within a range, as it is in the range."""
        if len(affine.terms) == 1 and affine.terms[0][0] in self.clamped and affine.terms[0][1] == 1:
            return self.clamped[affine.terms[0][0]] + Affine((), affine.constant)  # type: ignore[index]
        return affine

    def name(self, local: Local) -> Affine:
        """A local that does not change as a normal form of its own."""
        return self.forms.setdefault(local, Affine(((local, 1),)))

    def form(self, index: Value | int) -> Affine | None:
        """The normal form of an expression, None where there is none."""
        if isinstance(index, int):
            return Affine((), index)
        match index:
            case Const(value=value):
                return Affine((), int(value))
            case Read(local=local, index=()):
                if local in self.forms:
                    return self.forms[local]
                return self.name(local) if local.kind == "parameter" and local.dtype.is_integer else None
            case Read(local=local, index=entry) if local in self.vectors or local.kind == "parameter":
                numbers = tuple(i for i in entry if isinstance(i, int))
                is_known = local.dtype.is_integer and len(numbers) == len(entry)
                return Affine(((VectorEntry(local, numbers), 1),)) if is_known else None
            case Op(name="add" | "sub" | "mul" as name, args=(a, b), dtype=dtype) if dtype == I32:
                return _combined(name, self.form(a), self.form(b))
            case Op(name="cast", args=(a,), dtype=dtype) if dtype == I32 and a.dtype == I32:
                return self.form(a)
        return None

    def site(self, index: Value | int) -> Affine:
        """The normal form; an index without one becomes a new atom, equal to nothing else."""
        if isinstance(index, int):
            return Affine((), index)
        known = self.form(index)
        return Affine(((index, 1),)) if known is None else known


def _combined(name: str, a: Affine | None, b: Affine | None) -> Affine | None:
    if a is None or b is None:
        return None
    if name != "mul":
        return _wrapped(a + (b if name == "add" else b * -1))
    if a.is_constant:
        return _wrapped(b * a.constant)
    return _wrapped(a * b.constant) if b.is_constant else None


def _wrapped(form: Affine) -> Affine:
    """The form with numbers that i32 holds: a sum or product of that type wraps, whatever its factors are."""
    factors = {atom: I32.wrapped(factor) for atom, factor in form.terms}
    return Affine(_sorted(factors), I32.wrapped(form.constant))


def atom_value(atom: Atom) -> Value:
    """The meaning of an atom: a local, an entry of an integer vector, or a value."""
    if isinstance(atom, Local):
        return Read(atom)
    return Read(atom.local, atom.entry) if isinstance(atom, VectorEntry) else atom


def loop_atoms(s: For) -> tuple[Atom, ...]:
    """The variables of a loop; the entries of one that is a vector."""
    if len(s.variables) == 1 and s.variables[0].shape:
        (vector,) = s.variables
        return tuple(VectorEntry(vector, (n,)) for n in range(vector.shape[0]))
    return s.variables


def source_of(atom: Atom) -> Local | Value:
    """The source of an atom: the local, that of an entry, or the value itself."""
    return atom.local if isinstance(atom, VectorEntry) else atom
