"""Integer expressions of a program in normal form, and which of them are the same wherever they stand."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from taichi_ext.analysis.affine import Affine, Atom, VectorEntry
from taichi_ext.analysis.loops import Extents
from taichi_ext.program import (
    I8,
    I16,
    I32,
    U1,
    U8,
    U16,
    Const,
    Container,
    Local,
    Op,
    Read,
    Size,
    Value,
    children,
    own_part,
)

_LINEAR = frozenset(("add", "sub", "mul", "neg", "cast"))
NARROW = frozenset((U1, I8, I16, U8, U16, I32))  # types of which an i32 holds every number


class Expressions:
    """Integer expressions of one program in normal form; expressions that are written alike and do not change are one.

    Args:
        changing: the locals and containers that the program changes.
        extents: the shapes of its containers.
    """

    def __init__(self, changing: Iterable[Local | Container], extents: Extents) -> None:
        self.changing = frozenset(changing)
        self.extents = extents
        self.definitions: dict[Local, Affine] = {}  # of locals that do not change
        self.conditions: dict[Local, Value] = {}
        self._atoms: dict[object, Value] = {}
        self._lasting: set[Value] = set()
        self.pending: set[Value] = set()  # operations that are being looked at

    def define(self, local: Local, value: Value) -> None:
        """Note the definition of a local; it can only replace the local later if it never changes."""
        if local in self.changing or local.shape:
            return
        if local.dtype == U1 and self._key(value) is not None:
            self.conditions[local] = value
        form = self.linear(value) if local.dtype == I32 == value.dtype else None
        if form is not None and all(map(self.is_lasting, (atom for atom, _ in form.terms))):
            self.definitions[local] = form

    def is_lasting(self, atom: Atom) -> bool:
        """Whether an atom is the same wherever it stands."""
        if isinstance(atom, VectorEntry):
            return atom.local not in self.changing
        return atom not in self.changing if isinstance(atom, Local) else atom in self._lasting

    def linear(self, value: Value | int) -> Affine | None:
        """The normal form of an expression of type i32, or of one that converts to i32 without loss."""
        if isinstance(value, int):
            return Affine((), value)
        if value.dtype not in NARROW:
            return None
        match value:
            case Const(value=number):
                return Affine((), int(number))
            case Size(container=container, axis=axis) if container in self.extents:
                return Affine((), self.extents[container].shape[axis])
            case Read(local=local, index=()):
                return self.definitions.get(local, Affine(((local, 1),)))
            case Read(local=local, index=index) if all(isinstance(i, int) for i in index):
                return Affine(((VectorEntry(local, tuple(i for i in index if isinstance(i, int))), 1),))
            case Op() if value.dtype == I32 and value.name in _LINEAR:
                form = self._combined(value.name, list(map(self.linear, value.args)))
                return self._atom(value) if form is None else form
        return self._atom(value)

    def _combined(self, name: str, parts: list[Affine | None]) -> Affine | None:
        """The normal form of an operation on such forms, None where there is none."""
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

    def _atom(self, value: Value) -> Affine:
        """An expression without normal form; one for all that are written alike."""
        key = self._key(value)
        if key is None:
            return Affine(((value, 1),))
        known = self._atoms.setdefault(key, value)
        self._lasting.add(known)
        return Affine(((known, 1),))

    def _key(self, value: Value) -> Hashable:
        """A key that is equal for expressions written alike; None where their values may differ all the same."""
        if not value.contents.is_same(self.changing, self.changing):
            return None
        return own_part(value), *map(self._key, children(value))
