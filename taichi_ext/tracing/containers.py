"""Fields and arrays inside a traced kernel: reading seeds and shadows, storing primal and tangent.

A *container* is a field or an array argument.  A parameter that is only read is its own seed; whatever else carries
tangents has a *shadow*, a matrix with one row per scalar entry (row-major, components last) and one column per seed,
passed to the kernel as an extra argument.  An output's shadow is its Jacobian.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from taichi_ext import backend
from taichi_ext.derivative.linear_form import Affine, Form, Seed, as_expression, is_one, is_row, scaled
from taichi_ext.derivative.rows import SharedRow, rows_loop
from taichi_ext.derivative.storage import LocalRow, are_local, row_sum, settle
from taichi_ext.derivative.values import (
    Scalar,
    TensorValue,
    entries_of,
    is_active,
    is_tensor_like,
    linearize,
    primal_of,
)
from taichi_ext.labels import Label

MOST_WRITTEN_OUT = 16  # columns up to which zeros are stored one by one


@dataclass
class Container:
    """One field or array argument as a trace sees it."""

    key: Any
    name: Label | str
    shape: tuple[int, ...]
    element_shape: tuple[int, ...]
    offset: tuple[int, ...]
    dtype: Any
    columns: int
    first_column: int | None = None  # set for a parameter that is its own seed
    shadow: Any = None  # the array expression, set when the container has a shadow
    is_fresh: bool = False  # the shadow is zero when the kernel starts
    version: int = 0
    is_paired: bool = False  # the array is one of pairs of tangents, for a loop in pieces that writes all of them
    accesses: int = 0  # to single tangents, in this trace
    accesses_in_place: int = 0  # of them, by locals whose row is a row of the shadow
    sink: Any = None  # takes the tangents that are stored, where a sparse Jacobian is computed

    def tangent(self, row: Any, column: Any) -> Any:
        """One entry of the shadow, to be read or written.

        Shadows are indexed by one number: with two, Taichi 1.7.4 keeps ``S[i, i]`` in a register while ``S[i, j]`` is
        stored to (``cache_loop_invariant_global_vars``).
        """
        self.accesses += 1
        if self.is_paired:  # this trace only collects facts
            return backend.variable(0, self.dtype)
        outer, length, inner = (row, self.columns, column)
        if backend.stores_by_column():
            outer, length, inner = (column, self.size, row)
        return backend.element(self.shadow, ((outer * length if length > 1 else outer) + inner,))

    def tangent_in_place(self, row: Any, column: Any) -> Any:
        """One entry of a row that is written as a whole by the local whose row it is, before anything reads it."""
        self.accesses_in_place += 1
        return self.tangent(row, column)

    @property
    def is_active(self) -> bool:
        """Whether what is read from it has a tangent."""
        return self.shadow is not None or self.first_column is not None or self.sink is not None

    @property
    def keeps_tangents(self) -> bool:
        """Whether what is stored to it keeps its tangent in this trace."""
        return self.shadow is not None or self.sink is not None

    @property
    def has_been_accessed(self) -> bool:
        """Whether single tangents have been read or written, but by the locals whose rows they are."""
        return self.accesses > self.accesses_in_place

    @property
    def size(self) -> int:
        n = self.components
        for s in self.shape:
            n *= s
        return n

    @property
    def components(self) -> int:
        n = 1
        for s in self.element_shape:
            n *= s
        return n


@dataclass(frozen=True)
class ShadowRow:
    """One row of a shadow as a leaf."""

    container: Any = field(compare=False, hash=False)
    place: Any = None
    row: Affine = field(default_factory=Affine)
    index: Any = field(compare=False, default=None)
    version: int = 0
    loops: tuple[Any, ...] = ()
    owner: Any = None

    @property
    def current_version(self) -> int:
        return self.container.version

    def entry(self, k: Any) -> Any:
        return self.container.tangent(self.index, k)


class Ref:
    """An entry of a container as it stands in the source: can be read, stored to, indexed further."""

    _data_oriented = True

    def __init__(
        self, tracer: Any, container: Container, target: Any, indices: tuple[Any, ...], component: Any
    ) -> None:
        self.tracer = tracer
        self.container = container
        self.target = target  # the Taichi field or array
        self.indices = indices
        self.component = component  # None for the whole entry, else a number or an integer expression
        self._primal: Any = None

    def settled(self) -> Ref:
        """The entry with its indices evaluated once: what they are computed from may be what is stored to."""
        indices = tuple(self.tracer.settled_index(i) for i in self.indices)
        component = None if self.component is None else self.tracer.settled_index(self.component)
        return Ref(self.tracer, self.container, self.target, indices, component)

    @property
    def primal(self) -> Any:
        if self._primal is None:
            self._primal = self.tracer.fixed_load(self)
        if self._primal is None:
            whole = backend.element(self.target, self.indices)
            if self.component is None or not backend.is_tensor(whole):  # a component may be a field of its own
                self._primal = whole
            else:
                self._primal = backend.element(whole, _unflatten(self.component, self.container.element_shape))
        return self._primal

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.tracer.attribute_of(self, name)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.container.element_shape if self.component is None else ()

    def get_shape(self) -> tuple[int, ...]:
        return self.shape

    @property
    def n(self) -> int:
        return self.shape[0]

    @property
    def m(self) -> int:
        return self.shape[1]

    def __len__(self) -> int:
        return self.shape[0]

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Any:
        return iter(self.tracer.value_of(self))

    def at(self, component: Any) -> Ref:
        return Ref(self.tracer, self.container, self.target, self.indices, component)

    def parts(self) -> list[Ref]:
        """The scalar entries."""
        if self.component is not None or not self.container.element_shape:
            return [self]
        return [self.at(i) for i in range(self.container.components)]

    # --- tangents

    def row(self) -> tuple[Affine, Any]:
        """Number of the entry's row, in normal form where there is one, and as an expression."""
        affine, c = Affine(), self.container
        offsets = c.offset or (0,) * len(c.shape)
        for index, size, offset in zip(self.indices, c.shape, offsets, strict=True):
            affine = affine * size + self.tracer.affine(index) + Affine((), -offset)
        component = 0 if self.component is None else self.component
        affine = affine * c.components + self.tracer.affine(component)
        return affine, self.tracer.affine_expression(affine)

    def form(self) -> Form:
        """The tangent of a scalar entry."""
        c = self.container
        if c.sink is not None:
            return c.sink.read(self)
        if c.shadow is None and self.tracer.sink is not None:
            return self.tracer.sink.seed(self)
        affine, index = self.row()
        if c.shadow is None:
            assert c.first_column is not None
            return self._seed(affine + Affine((), c.first_column))
        return {ShadowRow(c, c.key, affine, index, c.version, self.tracer.loop_sites()): 1}

    def _seed(self, column: Affine) -> Form:
        """The seed of a column, nothing where it is outside the block of columns that is computed."""
        first, end = self.container.first_column, self.tracer.columns
        assert first is not None
        if column.is_constant:
            return {Seed(column): 1} if 0 <= column.constant < end else {}
        if first >= 0 and first + self.container.size <= end:
            return {Seed(column): 1}
        k = backend.variable(self.tracer.affine_expression(column))
        is_inside = (k >= 0) & (k < end)
        within = self.tracer.new_atom(backend.variable(backend.ops.select(is_inside, k, 0)))
        one = backend.constant(1, self.container.dtype)
        return {Seed(within): backend.ops.select(is_inside, one, one * 0)}

    def value(self) -> Any:
        """What the entry reads as: with its tangent if the container has one."""
        c = self.container
        self.tracer.note_read(c)
        if not c.is_active or self.tracer.is_stopped(c):
            return self.primal
        if self.shape:
            # read whole, as the user does: Taichi 1.7.4 keeps component loads in registers while the whole is stored to
            whole = backend.cast(self.primal, c.dtype)
            parts = self.parts()
            for part in parts:
                part._primal = backend.element(whole, _unflatten(part.component, self.shape))
            return TensorValue([part.value() for part in parts], self.shape)
        return Scalar(self.primal, form=self.form, source=self.value)

    def store(self, value: Any) -> None:
        """``entry = value``, primal and tangent."""
        self.settled()._store(value)

    def _store(self, value: Any) -> None:
        c = self.container
        self.tracer.note_write(c, self, is_active(value))
        self.tracer.note_store(c, self)
        if not c.keeps_tangents:
            backend.assign(self.primal, primal_of(value))
            return
        parts = self.parts()
        values = broadcast(value, len(parts))
        forms = [settle(columns_only(self.tracer, linearize(self.tracer, v)), c.dtype) for v in values]
        if not self.tracer.keep_value(c, self, primal_of(value)):
            backend.assign(self.primal, primal_of(value))
        if self._is_sunk(forms):
            if c.sink is not None:
                c.sink.store(self, parts, forms)
            return
        if any(forms) or not self.tracer.is_untouched(c):
            self._store_forms(parts, forms)

    def store_tangent(self, value: Any) -> None:
        """The tangent of a value whose primal has been stored."""
        if self.container.sink is not None:
            self.container.sink.refuse(f"a part of {self.container.name} is appended or deactivated")
        parts = self.parts()
        values = broadcast(value, len(parts))
        forms = [settle(columns_only(self.tracer, linearize(self.tracer, v)), self.container.dtype) for v in values]
        self._store_forms(parts, forms)

    def _store_forms(self, parts: list[Ref], forms: list[Form]) -> None:
        tracer, c = self.tracer, self.container
        rows = [part.row() for part in parts]
        covers = tracer.covers(c)
        is_unread = covers and not c.has_been_accessed and not any(_is_row_of(leaf, c) for f in forms for leaf in f)
        if covers and tracer.columns <= MOST_WRITTEN_OUT:
            forms = [_written_out(form, tracer.columns) for form in forms]
        is_complete = covers and all(_is_complete(form, tracer.columns) for form in forms)
        if not tracer.collect(c, self, forms, is_complete):
            self._emit_store(rows, forms, covers, is_complete)
        if is_unread:
            tracer.note_covering(c)
        c.version += 1
        tracer.note_modified(c.key, ())

    def _emit_store(self, rows: list[Any], forms: list[Form], covers: bool, is_complete: bool) -> None:
        """Store forms to rows of the shadow, each given by its normal form and its number."""
        tracer, c = self.tracer, self.container
        kept = [_keeps_row(form, c, affine) for form, (affine, _) in zip(forms, rows, strict=True)]
        fresh = is_complete or (tracer.is_first_write(c, self) and not covers)

        def body(k: Any) -> None:
            sums = [row_sum(form, k, c.dtype) for form in forms]
            values = [backend.variable(as_expression(0 if s is None else s, c.dtype)) for s in sums]
            for (_, index), value in zip(rows, values, strict=True):
                backend.assign(c.tangent(index, k), value)

        has_rows = any(is_row(leaf) for form in forms for leaf in form)
        if covers and len(forms) == 1:
            storage = _only_row(forms[0])
            if storage is not None:
                tracer.note_alias(storage, c)
                if isinstance(storage.row, SharedRow) and storage.row.container is c:
                    kept, has_rows = [True], False  # the row is in its place already
        if not all(kept) and (has_rows or not fresh):
            tracer.note_rows(forms)
            rows_loop(tracer.columns, body, reads_memory=not are_local(forms))
        for (_, index), form in zip(rows, forms, strict=True):
            # constant columns differ from each other; index expressions may meet them and one another
            for seed in sorted((s for s in form if not is_row(s)), key=lambda s: not s.is_constant):
                entry = c.tangent(index, tracer.column_expression(seed))
                value = as_expression(form[seed], c.dtype)
                is_alone = fresh and not has_rows and seed.is_constant
                tracer.note_operations(not is_alone)
                backend.assign(entry, value if is_alone else entry + value)

    def add(self, value: Any, sign: int) -> None:
        """``entry += value`` (sign 1) or ``entry -= value`` (sign -1): atomic, primal and tangent."""
        self.settled()._add(value, sign)

    def _add(self, value: Any, sign: int) -> None:
        tracer, c = self.tracer, self.container
        tracer.note_write(c, self, is_active(value))
        tracer.note_store(c, self)
        tracer.refuse_pieces()
        operator = "Add" if sign > 0 else "Sub"
        if not c.keeps_tangents or not is_active(value):
            backend.augassign(self.primal, primal_of(value), operator)
            return
        parts = self.parts()
        values = broadcast(value, len(parts))
        forms = [settle(columns_only(self.tracer, linearize(tracer, v)), c.dtype) for v in values]
        backend.augassign(self.primal, primal_of(value), operator)
        if self._is_sunk(forms):
            if c.sink is not None:
                c.sink.add(self, parts, [scaled(form, sign) for form in forms])
            return
        plus = self._plus(sign)
        rows = [part.row()[1] for part in parts]
        tracer.note_rows(forms)
        tracer.note_seeds(forms)
        if any(is_row(leaf) for form in forms for leaf in form):

            def body(k: Any) -> None:
                sums = [row_sum(form, k, c.dtype) for form in forms]
                kept = [None if s is None else backend.variable(as_expression(s, c.dtype)) for s in sums]
                for index, s in zip(rows, kept, strict=True):
                    if s is not None:
                        plus(c.tangent(index, k), s)

            rows_loop(tracer.columns, body, reads_memory=True)
        for index, form in zip(rows, forms, strict=True):
            for seed, coefficient in form.items():
                if not is_row(seed):
                    entry = c.tangent(index, tracer.column_expression(seed))
                    plus(entry, as_expression(coefficient, c.dtype))
        c.version += 1
        tracer.note_modified(c.key, ())

    def _is_sunk(self, forms: list[Form]) -> bool:
        """Whether tangents are entries of a sparse Jacobian rather than rows of a shadow."""
        sink = self.tracer.sink
        if sink is not None and self.container.sink is None and any(sink.has_sparse(form) for form in forms):
            sink.require_columns(self.container)
            return True
        return self.container.sink is not None

    def _plus(self, sign: int) -> Any:
        if self.tracer.is_private(self.container, self):
            return lambda entry, value: backend.assign(entry, entry + value if sign > 0 else entry - value)
        return lambda entry, value: backend.atomic_add(entry, value if sign > 0 else -value)


def _written_out(form: Form, columns: int) -> Form:
    """A form over constant columns with its zeros."""
    if any(is_row(leaf) or not leaf.is_constant for leaf in form):
        return form
    return {seed: form.get(seed, 0) for seed in (Seed(Affine((), k)) for k in range(columns))}


def _is_complete(form: Form, columns: int) -> bool:
    return len(form) == columns and not any(is_row(leaf) or not leaf.is_constant for leaf in form)


def _only_row(form: Form) -> Any:
    """The storage of the row that is, once, all the rows of a form."""
    rows = [(leaf, c) for leaf, c in form.items() if is_row(leaf)]
    is_one_row = len(rows) == 1 and is_one(rows[0][1]) and isinstance(rows[0][0], LocalRow)
    return rows[0][0].storage if is_one_row else None


def _is_row_of(leaf: Any, container: Container) -> bool:
    return isinstance(leaf, ShadowRow) and leaf.container is container


def _keeps_row(form: Form, container: Container, row: Affine) -> bool:
    """Whether the rows of the form are just the entry's own row, once."""
    rows = [(leaf, c) for leaf, c in form.items() if is_row(leaf)]
    if len(rows) != 1 or not is_one(rows[0][1]):
        return False
    leaf = rows[0][0]
    return _is_row_of(leaf, container) and leaf.row == row


def columns_only(tracer: Any, form: Form) -> Form:
    """The form without the positions of pixels, which have no column in a shadow."""
    return {s: c for s, c in form.items() if is_row(s) or not s.is_constant or tracer.is_column(s.column.constant)}


def broadcast(value: Any, n: int) -> list[Any]:
    """What a value stores to the n scalar entries of a place."""
    if isinstance(value, (list, tuple)):
        return [entry for part in value for entry in broadcast(part, 1)]
    return entries_of(value) if is_tensor_like(value) else [value] * n


def _unflatten(component: Any, shape: tuple[int, ...]) -> tuple[Any, ...]:
    if len(shape) == 1:
        return (component,)
    return component // shape[1], component % shape[1]
