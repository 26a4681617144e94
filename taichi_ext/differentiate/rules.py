"""Rules of users: the form of what a rule returns over its own tangents gives the partials of the rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

from taichi_ext.differentiate.forms import Form, Leaf, accumulate, settled
from taichi_ext.program import Boundary, Declare, Value

if TYPE_CHECKING:
    from taichi_ext.differentiate.forward import Forward


def rule(f: Forward, s: Boundary) -> None:
    """Results with the tangent that a rule gives, and that of autodiff where the rule leaves arguments to it."""
    tangents = _Tangents(f, s)
    for result, value, given in zip(s.results, s.numbers, s.sources("returned"), strict=True):
        form: Form = {}
        if result.dtype.is_real:
            if s.options["keeps_automatic"]:
                accumulate(form, f.form(value))
            for leaf, partial in settled(f.builder, f.form(given)).items():
                accumulate(form, tangents.form(leaf), partial)
        f.locals.declare_form(Declare(result, (f.primal(value),), place=s.place), form)


class _Tangents:
    """What the tangents that a rule is given stand for."""

    def __init__(self, f: Forward, s: Boundary) -> None:
        self.f = f
        seeds = [
            seed for locals_ in s.inner.values() for local in locals_ for seed in f.facts.own_seeds[local].values()
        ]
        values = [e for name in s.inner for e in s.sources(name)]
        self.sources: dict[Leaf, Value] = dict(zip(seeds, values, strict=True))
        self.forms: dict[Leaf, Form] = {}

    def form(self, leaf: Leaf) -> Form:
        """The form that a leaf stands for: nothing for fields that the rule reads, at tangents of 0."""
        if leaf not in self.forms:
            source = self.sources.get(leaf)
            self.forms[leaf] = {} if source is None else settled(self.f.builder, self.f.form(source))
        return self.forms[leaf]
