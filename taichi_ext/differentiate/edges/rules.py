"""The parts of a walk that rules use, and rules of users: the form of a rule's result gives its partials."""

from __future__ import annotations

from dataclasses import dataclass

from taichi_ext.differentiate.facts.walk import Walk
from taichi_ext.differentiate.forms.forms import Form, Leaf, accumulate, materialize
from taichi_ext.differentiate.statements.linearize import Linearizer
from taichi_ext.differentiate.statements.local_tangents import LocalTangents
from taichi_ext.differentiate.storage.local_forms import LocalForms
from taichi_ext.program import Boundary, Declare, Local, Value


@dataclass(frozen=True)
class RuleContext:
    """The parts of a walk that a rule uses.

    Attributes:
        walk: the walk.
        linearizer: the forms of values.
        forms: the tangents of locals.
        locals: the statements that write locals.
    """

    walk: Walk
    linearizer: Linearizer
    forms: LocalForms
    locals: LocalTangents

    def primal(self, value: Value) -> Value:
        """A value, built on the temporaries of the statement."""
        return self.walk.expressions.primal(value)

    def form(self, value: Value) -> Form:
        """The tangent of a value, with coefficients that are evaluated."""
        return materialize(self.walk.builder, self.linearizer.form(value))

    def declare(self, s: Boundary, result: Local, primal: Value, form: Form) -> None:
        """Declare a result of a statement, with its value and its tangent."""
        self.locals.declare_form(Declare(result, (primal,), place=s.place), form)


def rule(ctx: RuleContext, s: Boundary) -> None:
    """Declare results with the tangent from a rule, and from autodiff for arguments that the rule does not take."""
    tangents = _Tangents(ctx, s)
    for result, value, given in zip(s.results, s.numbers, s.sources("returned"), strict=True):
        form: Form = {}
        if result.dtype.is_real:
            if s.options["keeps_automatic"]:
                accumulate(form, ctx.linearizer.form(value))
            for leaf, partial in ctx.form(given).items():
                accumulate(form, tangents.form(leaf), partial)
        ctx.declare(s, result, ctx.primal(value), form)


class _Tangents:
    """The tangents that a rule takes, as forms."""

    def __init__(self, ctx: RuleContext, s: Boundary) -> None:
        self._ctx = ctx
        own = ctx.walk.facts.own_seeds
        seeds = [seed for locals_ in s.inner.values() for local in locals_ for seed in own[local].values()]
        values = [e for name in s.inner for e in s.sources(name)]
        self.sources: dict[Leaf, Value] = dict(zip(seeds, values, strict=True))
        self.forms: dict[Leaf, Form] = {}

    def form(self, leaf: Leaf) -> Form:
        """The form of a leaf: empty for fields that the rule reads, whose tangents are 0."""
        if leaf not in self.forms:
            source = self.sources.get(leaf)
            self.forms[leaf] = {} if source is None else self._ctx.form(source)
        return self.forms[leaf]
