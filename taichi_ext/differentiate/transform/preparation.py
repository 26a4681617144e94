"""The program that is differentiated: branches as statements, checks of entries, indices by name; facts about it."""

from __future__ import annotations

from dataclasses import replace

import taichi_ext.program as ir
from taichi_ext.analysis.activity import Activity, find_activity, returning_bits, useful_activity
from taichi_ext.analysis.bounds import UncertainAccess, with_checks
from taichi_ext.analysis.loops import Extents, integer_forms
from taichi_ext.analysis.same_values import ValueNumbers
from taichi_ext.analysis.stores import grouped
from taichi_ext.differentiate.edges.edges import check_positions, own_seeds
from taichi_ext.differentiate.facts.decisions import DifferentiationRequest
from taichi_ext.differentiate.facts.facts import Facts
from taichi_ext.differentiate.facts.pixel_indices import with_real_positions
from taichi_ext.differentiate.rules.decompositions import with_equations
from taichi_ext.differentiate.statements.linearize import raise_unknown
from taichi_ext.program import Program, statements
from taichi_ext.program.build import literal


def find_facts(program: Program, seeds: DifferentiationRequest) -> tuple[Facts, tuple[UncertainAccess, ...]]:
    """The facts of the prepared program, and its accesses that may be out of range; raises for unknown derivatives."""
    program = with_real_positions(program)
    own = own_seeds(statements(program.body))
    if own:
        check_positions(program.body)
    activity = find_activity(program, seeds.start, seeds.arguments, own)
    body = with_equations(program.body, activity.has)
    program = replace(program, body=ir.mapped(body, lambda s: _split(s, activity)))
    activity = find_activity(program, seeds.start, seeds.arguments, own)
    ignored = seeds.ignored
    activity = replace(activity, containers=activity.containers - ignored, locals=activity.locals - ignored)
    check_bits(program.body, activity)
    activity = useful_activity(program, activity)
    accesses: tuple[UncertainAccess, ...] = ()
    if activity.containers or activity.locals:
        program, accesses = with_checks(program, seeds.extents, activity)
    program = replace(program, body=_NamedIndices(program, activity, seeds.extents).block(program.body))
    return Facts.of(program, seeds, activity, own), accesses


def check_bits(body: ir.Body, activity: Activity) -> None:
    """Raise if the bits of a number with a tangent become a number again."""
    back = returning_bits(body, activity)
    if back is not None:
        op, s = back
        raise_unknown("bit_cast", op.place or s.place)


class _NamedIndices:
    """Writes blocks with a local for each index of an entry with a tangent that has no normal form."""

    def __init__(self, program: ir.Program, activity: Activity, extents: Extents) -> None:
        self.activity = activity
        self.forms = integer_forms(program.body, extents)
        self.numbers = ValueNumbers()
        self.lasting: dict[int, ir.Local] = {}  # the names here of indices that never change
        self.others: dict[int, ir.Local] = {}  # of those in one statement
        self.added: list[ir.Statement] = []

    def block(self, body: ir.Body) -> ir.Body:
        outer, self.lasting, result = self.lasting, dict(self.lasting), []
        for group in grouped(body):
            self.others, self.added = {}, []
            new = [self._named(s) for s in group]
            result += self.added
            result += [ir.with_blocks(s, self.block) for s in new]
        self.lasting = outer
        return tuple(result)

    def _named(self, s: ir.Statement) -> ir.Statement:
        if not isinstance(s, ir.WITH_TANGENTS):
            return s
        done: dict[ir.Value, ir.Value] = {}

        def change(value: ir.Value) -> ir.Value:
            if value not in done:
                done[value] = value
                if isinstance(value, (ir.Op, ir.Load, ir.Read)) and self.activity.has(value):
                    new = ir.with_children(value, change)
                    done[value] = self._entry(new) if isinstance(new, (ir.Load, ir.Read)) else new
            return done[value]

        new = ir.with_values(s, change)
        if isinstance(new, ir.Store) and self.activity.has(new.target):
            return replace(new, target=self._entry(new.target))
        return new

    def _entry(self, entry: ir.Target) -> ir.Target:
        if isinstance(entry, ir.Read):
            return replace(entry, index=tuple(map(self._name, entry.index))) if entry.index else entry
        indices, component = tuple(map(self._name, entry.indices)), tuple(map(self._name, entry.component))
        return replace(entry, indices=indices, component=component)

    def _name(self, index: int | ir.Value) -> int | ir.Value:
        if self.forms.form(index) is not None:
            return index
        assert isinstance(index, ir.Value)
        number, names = self.numbers.of(index), self.lasting if self.forms.is_unchanging(index) else self.others
        if number not in names:
            names[number] = local = ir.Local("index", index.dtype, (), "temporary")
            self.added.append(ir.Declare(local, (index,), place=index.place))
        return ir.Read(names[number])


def _split(s: ir.Statement, activity: Activity) -> ir.Body:
    """The statement with an ``if`` statement for each conditional expression that carries a tangent."""
    if not isinstance(s, ir.WITH_TANGENTS):
        return (s,)
    if not any(_is_branch(node, activity) for value in ir.values_of(s) for node in ir.walk(value)):
        return (s,)
    before: list[ir.Statement] = []
    known: dict[ir.Value, ir.Value] = {}

    def change(value: ir.Value) -> ir.Value:
        if value not in known:
            if _is_branch(value, activity):
                assert isinstance(value, ir.Op)
                known[value] = _joined(value, s, before, activity)
            else:
                known[value] = ir.with_children(value, change)
        return known[value]

    new = ir.with_values(s, change)
    return (*before, new)


def _joined(value: ir.Op, s: ir.Statement, before: list[ir.Statement], activity: Activity) -> ir.Read:
    """A local that takes the value in an ``if`` statement, which is added to ``before``."""
    condition, then, orelse = value.args
    local = ir.Local("value", value.dtype)
    target = ir.Read(local, place=value.place)
    sides = (_split(ir.Assign(target, side, place=s.place), activity) for side in (then, orelse))
    before.append(ir.Declare(local, (literal(0, value.dtype),), place=s.place))
    before.append(ir.If(condition, *sides, place=s.place))
    return target


def _is_branch(value: ir.Value, activity: Activity) -> bool:
    return isinstance(value, ir.Op) and value.name == "ifte" and activity.has(value)
