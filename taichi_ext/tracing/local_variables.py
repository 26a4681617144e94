"""Local variables of a traced kernel.

A local that never carries a tangent is an ordinary Taichi variable.  The others are objects of this module: a
``Local`` is a scalar, a ``LocalTensor`` a vector or matrix, a ``LocalStruct`` a struct.  Each knows the block of
control flow it was declared in: assigned there, it is just rebound; assigned deeper, it needs a ``Storage``.
"""

from __future__ import annotations

import functools
from typing import Any

from taichi_ext import backend
from taichi_ext.derivative.deferral import defer
from taichi_ext.derivative.linear_form import Form, accumulate, is_row
from taichi_ext.derivative.storage import Storage, settle
from taichi_ext.derivative.values import (
    Scalar,
    StructValue,
    current_primal,
    entries_of,
    is_tensor_like,
    linearize,
    make_tensor,
    primal_of,
    shape_of,
)
from taichi_ext.errors import UnsupportedError


class Local:
    """A scalar local that may carry a tangent."""

    _data_oriented = True

    def __init__(self, tracer: Any, key: Any, value: Any, dtype: Any) -> None:
        self.tracer = tracer
        self.key = key
        self.dtype = dtype
        self.block = tracer.block
        self.depth = len(tracer.contexts)
        self.atoms = len(tracer.atom_numbers)  # variables of indices that were there before
        self.is_tangent = key in tracer.facts.tangent_locals
        self._note_tangent(value)
        self.storage: Storage | None = None
        if not tracer.facts.storage(key).needed and self._defer(value):
            self.primal = self.current.variable
            return
        form = settle(linearize(tracer, value), dtype)
        self.primal = backend.variable(_final_primal(value), dtype)
        if tracer.facts.storage(key).needed:
            self.storage = Storage(tracer, key, dtype)
            self.storage.write(form)
        else:
            self._bind(self.primal, form)

    def _note_tangent(self, value: Any) -> None:
        """A local that ever holds a tangent of a user's rule is one, and else only ever holds zeros."""
        if isinstance(value, Scalar) and value.is_tangent:
            self.is_tangent = True
            self.tracer.facts.note(self.tracer.facts.tangent_locals, self.key)
        elif self.is_tangent and isinstance(value, (int, float)) and value != 0:
            raise UnsupportedError(
                f"A rule must be linear in its tangents; a tangent is joined with the number {value}."
            )

    def _bind(self, primal: Any, form: Form) -> None:
        """Let the name stand for a new value: no storage, the form is simply replaced."""
        owned: Form = {}
        for leaf, c in form.items():  # rows of several owners become one
            accumulate(owned, {self.tracer.own(leaf, self.key) if is_row(leaf) else leaf: c})
        self.current = Scalar(primal, form=owned, source=self.value, is_tangent=self.is_tangent)
        self.current.variable = primal

    def _defer(self, value: Any) -> bool:
        """Let the name stand for an expression whose tangent is accumulated where it is used, if that is possible."""
        deferred = defer(self.tracer, value, self.key, self.dtype)
        if deferred is not None:
            self.current = deferred
            deferred.source = self.value
        return deferred is not None

    def _current_form(self) -> Form:
        return linearize(self.tracer, self.current)

    def seed(self, seeds: Form) -> None:
        """Let the local be a seed of its own, in addition to what it depends on."""
        form: Form = {}
        accumulate(form, self.storage.form() if self.storage is not None else self._current_form())
        form.update(seeds)
        if self.storage is not None:
            self.storage.write(form)
        else:
            self._bind(self.primal, form)

    def value(self) -> Any:
        if self.storage is None:
            is_deferred = self.current.local is not None
            is_active = is_deferred or self.current.form or self.is_tangent or self.key in self.tracer.facts.activated
            return self.current if is_active else self.current.primal
        if not self.storage.has_tangents:
            return self.primal
        return Scalar(self.primal, form=self.storage.form, source=self.value, is_tangent=self.is_tangent)

    def assign(self, value: Any) -> None:
        self._note_tangent(value)
        is_inside = self.tracer.is_inside_expression or len(self.tracer.contexts) != self.depth
        is_rebound = self.storage is None and self.tracer.block is self.block and not is_inside
        if is_rebound and self._defer(value):
            return
        form = settle({**linearize(self.tracer, value), **self.tracer.position_form(self.key)}, self.dtype)
        primal = _final_primal(value)
        if self.storage is not None:
            backend.assign(self.primal, primal)
            self.storage.write(form)
            return
        place = primal_of(self.current)
        if self.tracer.block is not self.block:
            before_form = self._current_form()
            if form or before_form:
                is_fixed = functools.partial(self.tracer.are_fixed_since, self.atoms)
                self.tracer.facts.require_storage(self.key, [form, before_form], is_fixed)
            backend.assign(place, primal)
        elif is_inside:
            # operands of the statement that were read already see the new value, as in Taichi
            backend.assign(place, primal)
            if not self.tracer.facts.changes_in_place:
                self.tracer.facts.changes_in_place = self.tracer.facts.changed = True
            before = self.current
            if form and not self._current_form():
                self.tracer.facts.note(self.tracer.facts.activated, self.key)
            self._bind(place, form)
            before.form, before.local = self.current.form, None
            self.current = before
        else:
            self._bind(backend.variable(primal, self.dtype), form)

    def add(self, value: Any, sign: int) -> None:
        """``local += value``: atomic where iterations of a parallel loop meet."""
        if self.storage is None:
            rule = "add" if sign > 0 else "sub"
            self.assign(self.tracer.operate(rule, self.value(), value))
            return
        self._note_tangent(value)
        form = linearize(self.tracer, value)
        backend.augassign(self.primal, _final_primal(value), "Add" if sign > 0 else "Sub")
        signed = form if sign > 0 else {leaf: _negative(c) for leaf, c in form.items()}
        self.storage.add(signed, atomic=self.tracer.is_shared(self.block))


def _negative(c: Any) -> Any:
    from_guard = getattr(c, "factor", None)
    return -c if from_guard is None else type(c)(-from_guard)


def _final_primal(value: Any) -> Any:
    if isinstance(value, Scalar) and value.variable is None and value.rule is not None:
        return current_primal(value)
    return primal_of(value)


class LocalTensor:
    """A vector or matrix local with at least one entry that may carry a tangent.

    Indexed by numbers only, it is a scalar local per entry; indexed at run time, one array and one ``Storage``.
    """

    _data_oriented = True

    def __init__(self, tracer: Any, key: Any, value: Any, shape: tuple[int, ...], dtype: Any) -> None:
        self.tracer = tracer
        self.key = key
        self.shape = shape
        self.dtype = dtype
        self.block = tracer.block
        entries = entries_of(value)
        self.cells: list[Any] = []
        self.array: Any = None
        self.storage: Storage | None = None
        self.is_tangent = key in tracer.facts.tangent_locals
        for e in entries:
            self._note_tangent(e)
        if key in tracer.facts.indexed:
            forms = [settle(linearize(tracer, e), dtype) for e in entries]
            self.array = backend.variable(backend.tensor([_final_primal(e) for e in entries], (len(entries),), dtype))
            self.storage = Storage(tracer, key, dtype, len(entries), is_indexed=True)
            self.storage.write_many(forms, list(range(len(entries))))
        else:
            self.cells = [tracer.declare_scalar((*key, i), e, dtype, always=True) for i, e in enumerate(entries)]

    _note_tangent = Local._note_tangent

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

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.tracer.attribute_of(self, name)

    def value(self) -> Any:
        return make_tensor([self.entry(i) for i in range(_size(self.shape))], self.shape)

    def entry(self, i: Any) -> Any:
        """Entry i (row-major) as a value; i may be an expression."""
        if self.storage is not None:
            storage, primal = self.storage, backend.element(self.array, (i,))
            form, source = lambda: storage.form(i), lambda: self.entry(i)
            return Scalar(primal, form=form, source=source, is_tangent=self.is_tangent)
        if isinstance(i, int):
            return self.cells[i].value()
        self.tracer.facts.require_index(self.key)
        return self.cells[0].value()

    def assign(self, value: Any) -> None:
        values = entries_of(value) if is_tensor_like(value) else [value] * _size(self.shape)
        if is_tensor_like(value) and shape_of(value) != self.shape:
            raise ValueError(f"a value of shape {shape_of(value)} is assigned to a local of shape {self.shape}")
        if self.storage is None:
            kept = [self.tracer.freeze(v, (*self.key, "new", i)) for i, v in enumerate(values)]
            for cell, v in zip(self.cells, kept, strict=True):
                cell.assign(v)
            return
        forms = [settle(linearize(self.tracer, v), self.dtype) for v in values]
        primals = [backend.variable(_final_primal(v)) for v in values]
        for i, primal in enumerate(primals):
            backend.assign(backend.element(self.array, (i,)), primal)
        self.storage.write_many(forms, list(range(len(values))))

    def assign_entry(self, i: Any, value: Any) -> None:
        self._note_tangent(value)
        i = self.tracer.settled_index(i)
        if self.storage is not None:
            form = settle(linearize(self.tracer, value), self.dtype)
            backend.assign(backend.element(self.array, (i,)), _final_primal(value))
            self.storage.write(form, i)
        elif isinstance(i, int):
            self.cells[i].assign(value)
        else:
            self.tracer.facts.require_index(self.key)

    def add_entry(self, i: Any, value: Any, sign: int) -> None:
        self._note_tangent(value)
        i = self.tracer.settled_index(i)
        if self.storage is not None:
            form = linearize(self.tracer, value)
            signed = form if sign > 0 else {leaf: _negative(c) for leaf, c in form.items()}
            operator = "Add" if sign > 0 else "Sub"
            backend.augassign(backend.element(self.array, (i,)), _final_primal(value), operator)
            self.storage.add(signed, i, atomic=self.tracer.is_shared(self.block))
        elif isinstance(i, int):
            self.cells[i].add(value, sign)
        else:
            self.tracer.facts.require_index(self.key)

    def add(self, value: Any, sign: int) -> None:
        values = entries_of(value) if is_tensor_like(value) else [value] * _size(self.shape)
        kept = [self.tracer.freeze(v, (*self.key, "new", i)) for i, v in enumerate(values)]
        for i, v in enumerate(kept):
            self.add_entry(i, v, sign)


class LocalEntry:
    """One entry of a tensor local that is kept as an array, as a place."""

    _data_oriented = True

    def __init__(self, tensor: LocalTensor, index: Any) -> None:
        self.tensor = tensor
        self.index = index

    @property
    def block(self) -> Any:
        return self.tensor.block

    def value(self) -> Any:
        return self.tensor.entry(self.index)

    def assign(self, value: Any) -> None:
        self.tensor.assign_entry(self.index, value)

    def add(self, value: Any, sign: int) -> None:
        self.tensor.add_entry(self.index, value, sign)


class LocalStruct:
    """A struct local: a local per member."""

    _data_oriented = True

    def __init__(self, members: dict[str, Any], methods: dict[str, Any], tracer: Any) -> None:
        self.members = members
        self.methods = methods
        self.tracer = tracer

    def __getattr__(self, name: str) -> Any:
        members = self.__dict__.get("members", {})
        if name in members:
            return members[name]
        raise AttributeError(f"a struct with the members {list(members)} has no attribute {name!r}")

    def value(self) -> StructValue:
        return StructValue({name: self.tracer.value_of(m) for name, m in self.members.items()}, self.methods)

    def assign(self, value: Any) -> None:
        members = self.tracer.struct_members(value)
        kept = {name: self.tracer.freeze(members[name], None) for name in self.members}
        for name, member in kept.items():
            self.tracer.assign_to(self.members[name], member)


def _size(shape: tuple[int, ...]) -> int:
    n = 1
    for s in shape:
        n *= s
    return n
