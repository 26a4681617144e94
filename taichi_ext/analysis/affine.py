"""Integer expressions in the normal form ``sum(factor * variable) + constant``: equal indices look equal."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import taichi_ext.program as ir
from taichi_ext.analysis.changes import written
from taichi_ext.analysis.same_values import ValueNumbers
from taichi_ext.cached import cached_property
from taichi_ext.program.build import Coefficient, add, cast, multiply


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

    def is_apart_from(self, other: Affine) -> bool:
        """Whether the two differ for all values of their variables, which may be others in each."""
        divisor = math.gcd(*(factor for _, factor in (*self.terms, *other.terms)))
        difference = self.constant - other.constant
        return difference % divisor != 0 if divisor else difference != 0

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


class IntegerForms:
    """Integer expressions of one program in normal form; expressions that are written alike and do not change are one.

    Args:
        body: the program.
        shapes: those of its containers that are known.

    Attributes:
        definitions: the normal forms of locals that do not change, of what does not change.
        conditions: the definitions of such locals that are true or false.
        pending: operations whose interval is being looked for.
    """

    def __init__(self, body: ir.Body, shapes: Mapping[ir.Container, tuple[int, ...]] = MappingProxyType({})) -> None:
        self._changing = frozenset(written(body))
        self._shapes = shapes
        self.definitions: dict[ir.Local, Affine] = {}
        self.conditions: dict[ir.Local, ir.Value] = {}
        self.pending: set[ir.Value] = set()
        self._named: dict[ir.Local, Affine] = {}  # the definitions over other locals
        self._clamped: dict[ir.Local, Affine] = {}  # the forms of clamped locals within their range
        self._numbers = ValueNumbers()
        self._lasting: set[ir.Value] = set()
        for s in ir.statements(body):
            if isinstance(s, ir.Declare) and not s.local.shape and s.local not in self._changing:
                self._define(s.local, s.values[0])

    def _define(self, local: ir.Local, value: ir.Value) -> None:
        if local.dtype == ir.U1 and self.is_unchanging(value):
            self.conditions[local] = value
        if local.dtype != ir.I32 or not value.dtype.is_integer:
            return
        form, named = self.linear(value), self.form(value)
        if form is not None and all(self.is_lasting(atom) for atom, _ in form.terms):
            self.definitions[local] = form
        if named is not None:
            self._named[local] = named
        match value:
            case ir.Op(name="max", args=(ir.Const(), ir.Op(name="min", args=(index, ir.Const())))):
                inner = self.form(index)
                if inner is not None:
                    self._clamped[local] = inner

    def unclamped(self, affine: Affine) -> Affine:
        """An index that is kept within a range, as it is in the range."""
        if len(affine.terms) == 1 and affine.terms[0][0] in self._clamped and affine.terms[0][1] == 1:
            return self._clamped[affine.terms[0][0]] + Affine((), affine.constant)  # type: ignore[index]
        return affine

    def is_lasting(self, atom: Atom) -> bool:
        """Whether an atom is the same wherever it stands."""
        return atom in self._lasting if isinstance(atom, ir.Value) else source_of(atom) not in self._changing

    def linear(self, value: ir.Value | int) -> Affine | None:
        """The normal form of an expression of type i32, or of one that converts to i32 without loss, here."""
        return linear_form(value, self._atom)

    def form(self, value: ir.Value | int) -> Affine | None:
        """The normal form over locals that do not change, and entries of such vectors; None where there is none."""
        return linear_form(value, self._name)

    def site(self, index: ir.Value | int) -> Affine:
        """The same, of any index: one that has none is an atom, the same for those that do not change alike."""
        form = self.form(index)
        if form is None:
            assert isinstance(index, ir.Value)
            form = Affine(((self._unchanging(index) or index, 1),))
        return form

    def _name(self, value: ir.Value) -> Affine | None:
        """What is neither a number nor a sum, if it is a local or a number of a vector that does not change."""
        if isinstance(value, ir.Size) and value.container in self._shapes:
            return Affine((), self._shapes[value.container][value.axis])
        if not isinstance(value, ir.Read) or value.local in self._changing or not value.dtype.is_integer:
            return None
        local, entry = value.local, tuple(i for i in value.index if isinstance(i, int))
        if not value.index:
            return self._named.get(local, Affine(((local, 1),)))
        return Affine(((VectorEntry(local, entry), 1),)) if len(entry) == len(value.index) else None

    def _atom(self, value: ir.Value) -> Affine | None:
        """What is neither a number nor a sum, whatever it is."""
        if value.dtype not in NARROW:
            return None
        match value:
            case ir.Read(local=local, index=()):
                return self.definitions.get(local, Affine(((local, 1),)))
            case ir.Read(local=local, index=index) if all(isinstance(i, int) for i in index):
                return Affine(((VectorEntry(local, tuple(i for i in index if isinstance(i, int))), 1),))
        return self._name(value) or Affine(((self._unchanging(value) or value, 1),))

    def _unchanging(self, value: ir.Value) -> ir.Value | None:
        """The first expression that is written like this one, if their values are the same; None if they may not be."""
        if not self.is_unchanging(value):
            return None
        self._lasting.add(first := self._numbers.first(value))
        return first

    def is_unchanging(self, value: ir.Value) -> bool:
        """Whether expressions that are written like this one have its value."""
        return value.contents.is_same(self._changing, self._changing)


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
