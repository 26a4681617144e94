"""Rules of users: the linear form of a rule's result over its tangents gives the partials of the rule."""

from __future__ import annotations

from taichi_ext.differentiate.edges.rule_context import RuleContext
from taichi_ext.differentiate.forms.forms import Form, Leaf, accumulate
from taichi_ext.program import Boundary, Value


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
