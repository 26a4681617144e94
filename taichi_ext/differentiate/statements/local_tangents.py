"""Declarations and assignments of locals: their tangents are deferred to the use, kept as a form, or stored."""

from __future__ import annotations

from dataclasses import dataclass, replace

from taichi_ext.differentiate.facts.facts import PassState, only_inside
from taichi_ext.differentiate.forms.forms import Form, has_row, materialize, negated
from taichi_ext.differentiate.statements.linearize import Linearizer
from taichi_ext.differentiate.storage.storage import Storage
from taichi_ext.differentiate.storage.storages import MOST_IN_ROWS, Deferred, LocalForms, Storages
from taichi_ext.program import Assign, Declare, Local, Op, Read, Update, Value, with_children, with_values


@dataclass(frozen=True)
class LocalTangents:
    """The statements of one walk that write locals."""

    walk: PassState
    storages: Storages  # the storages of locals that change
    known: LocalForms  # the tangents of locals, to which declarations add
    linearizer: Linearizer  # the forms of values

    def _begin_own(self, local: Local) -> None:
        """Start the seeds without a column at the local's declaration: in a loop, each iteration has others."""
        own = self.walk.facts.own_seeds.get(local)
        if own is not None:
            self.storages.forget(own.values())

    def declare_form(self, s: Declare, form: Form) -> None:
        """Declare a local that does not change, with an evaluated value and a given tangent."""
        local = s.local
        self._begin_own(local)
        self.walk.builder.frozen.add(local)
        if local.dtype.is_integer:
            self.walk.cursor.block.declared.add(local)
        form = materialize(self.walk.builder, form)
        self.walk.builder.emit(s)
        self.known.keep(local, [form])

    def declare(self, s: Declare) -> None:
        local = s.local
        self._begin_own(local)
        if local not in self.walk.facts.changed and not local.shape:
            self.walk.builder.frozen.add(local)
            self.known.definitions[local] = s.values[0]
        if local.dtype.is_integer and local not in self.walk.facts.changed:
            self.walk.cursor.block.declared.add(local)
        if local not in self.walk.facts.activity.locals:
            self.walk.builder.emit(with_values(s, self.walk.expressions.primal))
            return
        if local.shape:
            self._declare_array(s)
            return
        value = s.values[0]
        facts, plan = self.walk.facts, self.walk.plan
        tables = (facts.changed, facts.own_seeds, plan.own_rows, plan.accumulated)
        if any(local in table for table in tables) or not self._defer(s, value):
            self.declare_kept(s, value)

    def _defer(self, s: Declare, value: Value) -> bool:
        """Defer the accumulation of the tangent to the use of the local; False if that is not possible."""
        value = _copied(value)
        with self.walk.builder.collecting() as body:
            is_deferred = self.linearizer.prepare(value)
            primal = self.walk.expressions.primal(value)
            evaluated = self.walk.builder.evaluated.maps[0]
        if not is_deferred:
            self.linearizer.begin_statement()
            return False
        self.walk.builder.evaluated.update(evaluated)
        for inner in body:
            self.walk.builder.emit(inner)
        self.walk.builder.emit(replace(s, values=(primal,)))
        self.known.deferred[s.local] = Deferred(s.local, value, self.walk.cursor.loops)
        return True

    def declare_kept(self, s: Declare, value: Value) -> None:
        """Declare a local whose tangent is that of a value."""
        form = self.linearizer.unsettled(value)
        if s.local not in self.walk.facts.changed and self._is_better_row(form):
            self.walk.plan.own_rows.setdefault(s.local, "it is made of several locals with all columns")
        form = materialize(self.walk.builder, form)
        self.walk.builder.emit(replace(s, values=(self.walk.expressions.primal(s.values[0]),)))
        self.known.keep(s.local, [form])

    def _is_better_row(self, form: Form) -> bool:
        """Whether a row for a local that is used several times is shorter than copies of its form in the uses."""
        return 0 < self.walk.numbering.all_in_rows <= MOST_IN_ROWS and len(form) > 1 and has_row(form)

    def _declare_array(self, s: Declare) -> None:
        forms = [materialize(self.walk.builder, self.linearizer.form(v)) for v in s.values]
        forms = self.known.with_own(s.local, forms)
        self.walk.builder.emit(with_values(s, self.walk.expressions.primal))
        storage = self.storages.begin(s.local)
        if any(forms):
            storage.write(forms, list(range(len(forms))))
        if isinstance(storage, Storage):
            storage.forget_zeros()

    def assign(self, s: Assign | Update) -> None:
        assert isinstance(s.target, Read)
        local = s.target.local
        if local not in self.walk.facts.activity.locals:
            self.walk.builder.emit(replace(s, value=self.walk.expressions.primal(s.value)))
            return
        storage = self.storages.by_local[local]
        target = s.target
        index = self.known.flat_index(target)
        has_own = index in self.walk.facts.own_seeds.get(local, ())
        op, value = s.op if isinstance(s, Update) else "", s.value
        is_sum = op in ("add", "sub") and not has_own
        if op and not is_sum:
            value = Op(op, (target, value), local.dtype, place=value.place)
        form = materialize(self.walk.builder, self.linearizer.form(value))
        primal = self.walk.expressions.primal(value)
        new = replace(s, target=target, value=primal) if is_sum else Assign(target, primal, place=s.place)
        self.walk.builder.emit(new)
        with only_inside(self.walk, target) as is_possible:
            if is_possible and is_sum:
                storage.add(form if op == "add" else negated(form), index)
            elif is_possible:
                storage.write(self.known.with_own(local, [form], index), [index])


def _copied(value: Value) -> Value:
    """A copy of the expression with new nodes: a recorded node can occur in several statements."""
    known: dict[Value, Value] = {}

    def copy(node: Value) -> Value:
        if node not in known:
            new = with_children(node, copy)
            known[node] = replace(node) if new is node else new  # type: ignore[type-var]
        return known[node]

    return copy(value)
