"""The parts of a walk that rules use, and rules of users: the form of a rule's result gives its partials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from taichi_ext.differentiate.facts.walk import Walk
from taichi_ext.differentiate.forms.forms import Form, Leaf, accumulate, bare, materialize
from taichi_ext.differentiate.statements.linearize import Linearizer
from taichi_ext.differentiate.statements.local_tangents import LocalTangents
from taichi_ext.differentiate.storage.local_forms import LocalForms
from taichi_ext.program import Boundary, Declare, Local, Tensor, Value
from taichi_ext.program.build import Coefficient, literal

Parts = Sequence[tuple[Value, Coefficient]]


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

    def declare(self, s: Boundary, result: Local, primal: Value, form: Form, parts: Parts = ()) -> None:
        """Declare a result of a statement, with its value and its tangent.

        ``parts`` are the arguments and weights whose tangents this is the sum of, if it has to be known as such a sum.
        """
        if not self.walk.facts.seeds.use.is_lowered:
            self.locals.declare_form(Declare(result, (primal,), place=s.place), form)
            return
        weights = tuple([w if isinstance(w, Value) else literal(w, result.dtype) for _, w in parts])
        arguments = tuple([v for v, _ in parts])
        given = {"arguments": Tensor(arguments, (len(parts),)), "weights": Tensor(weights, (len(parts),))}
        self.keep(Boundary("weighted", None, given, primal, (result,), place=s.place), [form])

    def keep(self, s: Boundary, forms: Sequence[Form]) -> None:
        """Keep a statement, whose results have these forms."""
        for result, form in zip(s.results, forms, strict=True):
            self.walk.builder.frozen.add(result)
            self.forms.forms[result] = self.forms.with_own(result, [materialize(self.walk.builder, form)])[0]
        self.walk.builder.emit(s)


def rule(ctx: RuleContext, s: Boundary) -> None:
    """Declare results with the tangent from a rule, and from autodiff for arguments that the rule does not take."""
    tangents = _Tangents(ctx, s)
    is_lowered = ctx.walk.facts.seeds.use.is_lowered
    for result, value, given in zip(s.results, s.numbers, s.sources("returned"), strict=True):
        form: Form = {}
        parts: list[tuple[Value, Coefficient]] = []
        if result.dtype.is_real:
            if s.options["keeps_automatic"]:
                accumulate(form, ctx.linearizer.form(value))
                parts += [(ctx.walk.expressions.keep(value), 1)] if is_lowered else []
            for leaf, partial in ctx.form(given).items():
                accumulate(form, tangents.form(leaf), partial)
                if is_lowered and leaf in tangents.sources:
                    parts.append((ctx.walk.expressions.keep(tangents.sources[leaf]), bare(partial)))
        ctx.declare(s, result, ctx.primal(value), form, parts)


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
