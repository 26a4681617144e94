"""Integer expressions of a program in normal form, and which of them are the same wherever they stand."""

from __future__ import annotations

from collections.abc import Iterable

from taichi_ext.analysis.affine import NARROW, Affine, Atom, VectorEntry, linear_form
from taichi_ext.analysis.loops import Extents
from taichi_ext.analysis.same_values import ValueNumbers
from taichi_ext.program import I32, U1, Container, Local, Read, Size, Value


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
        self._numbers = ValueNumbers()
        self._atoms: dict[int, Value] = {}  # by their numbers
        self._lasting: set[Value] = set()
        self.pending: set[Value] = set()  # operations that are being looked at

    def define(self, local: Local, value: Value) -> None:
        """Note the definition of a local; it can only replace the local later if it never changes."""
        if local in self.changing or local.shape:
            return
        if local.dtype == U1 and self._is_unchanging(value):
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
        return linear_form(value, self._atom)

    def _atom(self, value: Value) -> Affine | None:
        """What is neither a number nor a sum; expressions that are written alike and do not change are one."""
        if value.dtype not in NARROW:
            return None
        match value:
            case Size(container=container, axis=axis) if container in self.extents:
                return Affine((), self.extents[container].shape[axis])
            case Read(local=local, index=()):
                return self.definitions.get(local, Affine(((local, 1),)))
            case Read(local=local, index=index) if all(isinstance(i, int) for i in index):
                return Affine(((VectorEntry(local, tuple(i for i in index if isinstance(i, int))), 1),))
        if not self._is_unchanging(value):
            return Affine(((value, 1),))
        known = self._atoms.setdefault(self._numbers.of(value), value)
        self._lasting.add(known)
        return Affine(((known, 1),))

    def _is_unchanging(self, value: Value) -> bool:
        """Whether expressions that are written like this one have its value."""
        return value.contents.is_same(self.changing, self.changing)
