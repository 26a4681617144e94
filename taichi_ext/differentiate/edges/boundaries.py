"""Values whose derivative is not that of their expression: stopped, replaced, given by a rule or by an edge."""

from __future__ import annotations

from taichi_ext.differentiate.edges import edges
from taichi_ext.differentiate.edges.rules import RuleContext, rule
from taichi_ext.differentiate.forms.forms import Form
from taichi_ext.errors import UnsupportedError
from taichi_ext.program import Boundary, Op, Value, cited, with_values


def boundary(ctx: RuleContext, s: Boundary) -> None:
    """Declare the results of a boundary."""
    if ctx.walk.facts.seeds.use.is_again:
        check_again(s)
    _KINDS[s.kind](ctx, s)


def check_again(s: Boundary) -> None:
    """Raise if a value has no second derivative."""
    if "what" in s.options or s.kind not in ("stop_gradient", "replace_gradient"):
        raise UnsupportedError(
            f"{cited(s.place)}The second derivative of {_NAMES.get(s.name, s.name)} is not known: only its first "
            "derivative is given. Use jacobian or value_and_gradient, or stop_gradient where it counts as a constant."
        )


def _kept(ctx: RuleContext, s: Boundary, forms: list[Form]) -> None:
    """Keep the statement, so that its results have this derivative in a second differentiation, too."""
    ctx.keep(with_values(s, ctx.primal), forms)  # type: ignore[arg-type]


def _stop(ctx: RuleContext, s: Boundary) -> None:
    if ctx.walk.facts.seeds.use.is_again:
        _kept(ctx, s, [{} for _ in s.results])
        return
    for result, value in zip(s.results, s.numbers, strict=True):
        ctx.declare(s, result, ctx.primal(value), {})


def _replace(ctx: RuleContext, s: Boundary) -> None:
    if ctx.walk.facts.seeds.use.is_again:
        _kept(ctx, s, [ctx.linearizer.form(source) for source in _weighted(s)])
        return
    for result, value, source in zip(s.results, s.numbers, _weighted(s), strict=True):
        kept = ctx.walk.expressions.keep(source) if ctx.walk.facts.seeds.use.is_lowered else source
        ctx.declare(s, result, ctx.primal(value), ctx.linearizer.form(source), [(kept, 1)])


def _weighted(s: Boundary) -> list[Value]:
    """The values whose tangents a replaced gradient takes, times their weights."""
    sources = s.sources("surrogate")
    if "weights" not in s.given:
        return sources
    return [Op("mul", pair, pair[0].dtype, place=s.place) for pair in zip(sources, s.sources("weights"), strict=True)]


_NAMES = {"rule": "a function with a rule of its own"}
_KINDS = {
    "stop_gradient": _stop,
    "replace_gradient": _replace,
    "rule": rule,
    "edge": edges.edge,
    "step": edges.edge,
    "coverage": edges.edge,
    "sqrt_edge": edges.sqrt_edge,
    "gradient": edges.gradient,
}
