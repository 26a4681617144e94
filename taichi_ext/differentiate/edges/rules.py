"""Rules of users: the form of what a rule returns over its own tangents gives the partials of the rule."""

from __future__ import annotations

from taichi_ext.differentiate.edges.rule_context import RuleContext
from taichi_ext.differentiate.forms.forms import Form, Leaf, accumulate
from taichi_ext.program import Boundary, Value


def rule(ctx: RuleContext, s: Boundary) -> None:
    """Results with the tangent that a rule gives, and that of autodiff where the rule leaves arguments to it."""
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
    """The meaning of the tangents that a rule is given."""

    def __init__(self, ctx: RuleContext, s: Boundary) -> None:
        self._ctx = ctx
        own = ctx.walk.facts.own_seeds
        seeds = [seed for locals_ in s.inner.values() for local in locals_ for seed in own[local].values()]
        values = [e for name in s.inner for e in s.sources(name)]
        self.sources: dict[Leaf, Value] = dict(zip(seeds, values, strict=True))
        self.forms: dict[Leaf, Form] = {}

    def form(self, leaf: Leaf) -> Form:
        """The form that a leaf stands for: nothing for fields that the rule reads, at tangents of 0."""
        if leaf not in self.forms:
            source = self.sources.get(leaf)
            self.forms[leaf] = {} if source is None else self._ctx.form(source)
        return self.forms[leaf]
