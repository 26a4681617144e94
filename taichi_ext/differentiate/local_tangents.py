"""Locals that carry tangents: deferred to their use, kept as a form, or stored where they change."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from taichi_ext.differentiate.build import add, cast, multiply
from taichi_ext.differentiate.forms import Form, is_row, negated, settled
from taichi_ext.differentiate.guards import clamped, is_inside, only_inside, where
from taichi_ext.differentiate.linearize import Deferred
from taichi_ext.differentiate.storages import MOST_IN_ROWS
from taichi_ext.program import I32, Assign, Declare, Local, Op, Read, Update, Value, with_children, with_values

if TYPE_CHECKING:
    from taichi_ext.differentiate.forward import Forward


class LocalTangents:
    """The tangents of the locals of one walk."""

    def __init__(self, forward: Forward) -> None:
        self.forward = forward
        self.builder = forward.builder
        self.decisions = forward.decisions
        self.definitions: dict[Local, Value] = {}  # of locals that do not change
        self.deferred: dict[Local, Deferred] = {}
        self.forms: dict[Local, Form] = {}
        self.entry_forms: dict[Local, list[Form]] = {}  # of vectors and matrices that do not change
        self.storages = forward.storages

    # --- reading

    def form(self, value: Read) -> Form:
        """The tangent of a local, or of one of its entries."""
        local = value.local
        if local in self.storages.by_local and value.checks:
            return self._guarded(value)
        if local in self.storages.by_local:
            return self.storages.by_local[local].form(self._flat_index(value))
        if local in self.entry_forms:
            index = self._flat_index(value)
            if isinstance(index, int):
                return self._fresh(self.entry_forms[local][index], local)
            self.decisions.indexed.add(local)
            return {}
        return self._fresh(self.forms.get(local, {}), local)

    def _guarded(self, value: Read) -> Form:
        """The tangent of an entry whose index is not known to lie within."""
        condition = is_inside(self.forward.naming, value)
        if condition is False:
            return {}
        index = self.builder.keep(clamped(condition, cast(self._flat_index(value), I32)), "index")
        return where(condition, self.storages.by_local[value.local].form(index), value.dtype)

    def _fresh(self, form: Form, local: Local) -> Form:
        """The form of a local, or of one of its entries, whose rows hold what they did when it was computed."""
        for leaf in form:
            if is_row(leaf):
                self._check_fresh(leaf, local)
        return form

    def _flat_index(self, value: Read) -> Any:
        if not value.index:
            return 0
        flat: Any = 0
        for i, n in zip(value.index, value.local.shape, strict=True):
            i = i if isinstance(i, int) else self.forward.naming.settled_index(i)
            flat = add(multiply(flat, n), i)
        if isinstance(flat, Value):
            affine = self.forward.facts.indices.form(flat)
            return self.builder.keep(flat, "index") if affine is None else self.forward.naming.value_of(affine)
        return flat

    def _check_fresh(self, leaf: Any, local: Local) -> None:
        """A row that may have changed since a local took it on: that local needs a copy of its own."""
        if self.forward.sources.is_stale(leaf):
            self.decisions.own_rows.add(local)

    def note_sweep(self, deferred: Deferred, sweep: int) -> None:
        """An accumulation uses a local whose tangent is left to the place of its use."""
        is_repeated = deferred.loops != self.forward.cursor.loops
        is_second = is_repeated or (deferred.sweep and deferred.sweep != sweep)
        if is_second:
            self.decisions.accumulated.add(deferred.local)
        deferred.sweep = sweep

    # --- declarations and assignments

    def with_own(self, local: Local, forms: list[Form]) -> list[Form]:
        """The forms of the entries of a local, with the seeds that are its own."""
        own = self.forward.facts.own_seeds.get(local)
        if own is None:
            return forms
        return [{**form, own[n]: 1} if n in own else form for n, form in enumerate(forms)]

    def _begin_own(self, local: Local) -> None:
        """The seeds that are a local's own begin with its declaration: in a loop, each iteration has others."""
        own = self.forward.facts.own_seeds.get(local)
        if own is not None:
            self.storages.forget(own.values())

    def declare_form(self, s: Declare, form: Form) -> None:
        """A local that does not change, of a value that is evaluated and a given tangent."""
        local = s.local
        self._begin_own(local)
        self.builder.frozen.add(local)
        if local.dtype.is_integer:
            self.forward.cursor.block.declared.add(local)
        form = self.with_own(local, [settled(self.builder, form)])[0]
        self.builder.emit(s)
        if local in self.decisions.own_rows:
            self.storages.begin(local).write([form], [0])
        elif form:
            self.forms[local] = form

    def declare(self, s: Declare) -> None:
        """A new local."""
        local = s.local
        self._begin_own(local)
        if local not in self.forward.facts.changed and not local.shape:
            self.builder.frozen.add(local)
            self.definitions[local] = s.values[0]
        if local.dtype.is_integer and local not in self.forward.facts.changed:
            self.forward.cursor.block.declared.add(local)
        if local not in self.forward.facts.activity.locals:
            self.builder.emit(with_values(s, self.forward.primal))
            return
        if local.shape:
            self._declare_array(s)
            return
        value = s.values[0]
        is_own = local in self.forward.facts.own_seeds
        if local in self.forward.facts.changed or local in self.decisions.own_rows:
            self.declare_stored(s, value)
        elif is_own or local in self.decisions.accumulated or not self._defer(s, value):
            self.declare_fixed(s, value)

    def _defer(self, s: Declare, value: Value) -> bool:
        """Let the tangent be accumulated where the local is used."""
        value = _copied(value)
        with self.builder.collecting() as body:
            is_deferred = self.forward.linearizer.prepare(value)
            primal = self.forward.primal(value)
        if not is_deferred:
            self.forward.linearizer.begin_statement()
            return False
        for inner in body:
            self.builder.emit(inner)
        self.builder.emit(replace(s, values=(primal,)))
        self.deferred[s.local] = Deferred(s.local, value, self.forward.cursor.loops)
        return True

    def declare_fixed(self, s: Declare, value: Value) -> None:
        form = self.forward.form(value)
        if self._is_better_row(form):
            self.decisions.own_rows.add(s.local)
        form = settled(self.builder, form)
        self.builder.emit(replace(s, values=(self.forward.primal(s.values[0]),)))
        self.forms[s.local] = self.with_own(s.local, [form])[0]

    def _is_better_row(self, form: Form) -> bool:
        """Whether a row for a local that is used several times is shorter than the forms that it becomes part of."""
        is_short = self.forward.sparse is None and self.forward.facts.columns <= MOST_IN_ROWS
        return is_short and len(form) > 1 and any(map(is_row, form))

    def declare_stored(self, s: Declare, value: Value) -> None:
        form = settled(self.builder, self.forward.form(value))
        self.builder.emit(replace(s, values=(self.forward.primal(s.values[0]),)))
        storage = self.storages.begin(s.local)
        storage.write(self.with_own(s.local, [form]), [0])

    def _declare_array(self, s: Declare) -> None:
        forms = [settled(self.builder, self.forward.form(v)) for v in s.values]
        forms = self.with_own(s.local, forms)
        self.builder.emit(with_values(s, self.forward.primal))
        storage = self.storages.begin(s.local)
        if any(forms):
            storage.write(forms, list(range(len(forms))))
        storage.is_zero = False  # what follows may stand in a loop

    def assign(self, s: Assign | Update) -> None:
        assert isinstance(s.target, Read)
        local = s.target.local
        if local not in self.forward.facts.activity.locals:
            self.builder.emit(replace(s, value=self.forward.primal(s.value)))
            return
        storage = self.storages.by_local[local]
        target = s.target
        if target.index:
            kept = tuple(i if isinstance(i, int) else self.forward.naming.settled_index(i) for i in target.index)
            target = Read(local, kept, checks=target.checks, place=target.place)
        index = self._flat_index(target)
        if isinstance(s, Update) and s.op in ("add", "sub"):
            form = settled(self.builder, self.forward.form(s.value))
            self.builder.emit(replace(s, target=target, value=self.forward.primal(s.value)))
            with only_inside(self.forward.naming, self.forward.cursor, target) as is_possible:
                if is_possible:
                    storage.add(form if s.op == "add" else negated(form), index)
            return
        value = s.value
        if isinstance(s, Update):
            value = Op(s.op, (target, s.value), local.dtype, place=s.value.place)
        form = settled(self.builder, self.forward.form(value))
        self.builder.emit(Assign(target, self.forward.primal(value), place=s.place))
        own = self.forward.facts.own_seeds.get(local, {}).get(index) if isinstance(index, int) else None
        with only_inside(self.forward.naming, self.forward.cursor, target) as is_possible:
            if is_possible:
                storage.write([form if own is None else {**form, own: 1}], [index])

    def set_entries(self, local: Local, forms: list[Form]) -> None:
        """The tangents of the entries of a vector or matrix that does not change."""
        forms = self.with_own(local, forms)
        if local in self.decisions.indexed or local in self.decisions.own_rows:
            self.storages.begin(local).write(forms, list(range(len(forms))))
        else:
            self.entry_forms[local] = forms


def _copied(value: Value) -> Value:
    """The same expression of nodes of its own: a recorded node can occur in several statements."""
    known: dict[Value, Value] = {}

    def copy(node: Value) -> Value:
        if node not in known:
            new = with_children(node, copy)
            known[node] = replace(node) if new is node else new  # type: ignore[type-var]
        return known[node]

    return copy(value)
