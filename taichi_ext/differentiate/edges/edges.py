"""Edges: values whose derivative has a term from the motion of a discontinuity through the pixel.

A pixel that integrates f = f_in where phi > 0 and f_out elsewhere has, by Reynolds' theorem, the derivative

    d/dt  integral f dx  =  integral f_dot dx  +  integral over the edge of (f_in - f_out) phi_dot / |grad phi| dl.

The form of the level has coefficients for the position of the pixel, too: they are grad phi.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import taichi_ext.program as ir
from taichi_ext.analysis.pixel_positions import Origins
from taichi_ext.differentiate.facts.facts import OwnSeeds, PassState
from taichi_ext.differentiate.forms import forms as linear
from taichi_ext.differentiate.statements.linearize import Linearizer
from taichi_ext.differentiate.statements.local_tangents import LocalTangents
from taichi_ext.differentiate.storage.storages import LocalForms
from taichi_ext.errors import UnsupportedError
from taichi_ext.program.build import Coefficient, cast, is_number, literal

# The parts of a walk that rules use, and rules of users: the form of a rule's result gives its partials.

Parts = Sequence[tuple[ir.Value, Coefficient]]


@dataclass(frozen=True)
class RuleContext:
    """The parts of a walk that a rule uses.

    Attributes:
        linearizer: the forms of values.
        forms: the tangents of locals.
        locals: the statements that write locals.
    """

    walk: PassState
    linearizer: Linearizer
    forms: LocalForms
    locals: LocalTangents

    def primal(self, value: ir.Value) -> ir.Value:
        """A value, built on the temporaries of the statement."""
        return self.walk.expressions.primal(value)

    def form(self, value: ir.Value) -> linear.Form:
        """The tangent of a value, with coefficients that are evaluated."""
        return linear.materialize(self.walk.builder, self.linearizer.form(value))

    def declare(self, s: ir.Boundary, result: ir.Local, primal: ir.Value, form: linear.Form, parts: Parts = ()) -> None:
        """Declare a result of a statement, with its value and its tangent.

        ``parts`` are the arguments and weights whose tangents this is the sum of, if it has to be known as such a sum.
        """
        if not self.walk.facts.seeds.use.is_lowered:
            self.locals.declare_form(ir.Declare(result, (primal,), place=s.place), form)
            return
        weights = tuple([w if isinstance(w, ir.Value) else literal(w, result.dtype) for _, w in parts])
        arguments = tuple([v for v, _ in parts])
        given = {"arguments": ir.Tensor(arguments, (len(parts),)), "weights": ir.Tensor(weights, (len(parts),))}
        self.keep(ir.Boundary("weighted", None, given, primal, (result,), place=s.place), [form])

    def keep(self, s: ir.Boundary, forms: Sequence[linear.Form]) -> None:
        """Keep a statement, whose results have these forms."""
        for result, form in zip(s.results, forms, strict=True):
            self.walk.builder.frozen.add(result)
            self.forms.keep(result, [linear.materialize(self.walk.builder, form)])
        self.walk.builder.emit(s)


def rule(ctx: RuleContext, s: ir.Boundary) -> None:
    """Declare results with the tangent from a rule, and from autodiff for arguments that the rule does not take."""
    tangents = _RuleTangents(ctx, s)
    is_lowered = ctx.walk.facts.seeds.use.is_lowered
    for result, value, given in zip(s.results, s.numbers, s.sources("returned"), strict=True):
        form: linear.Form = {}
        parts: list[tuple[ir.Value, Coefficient]] = []
        if result.dtype.is_real:
            if s.options["keeps_automatic"]:
                linear.accumulate(form, ctx.linearizer.form(value))
                parts += [(ctx.walk.expressions.keep(value), 1)] if is_lowered else []
            for leaf, partial in ctx.form(given).items():
                linear.accumulate(form, tangents.form(leaf), partial)
                if is_lowered and leaf in tangents.sources:
                    parts.append((ctx.walk.expressions.keep(tangents.sources[leaf]), linear.bare(partial)))
        ctx.declare(s, result, ctx.primal(value), form, parts)


class _RuleTangents:
    """The tangents that a rule takes, as forms."""

    def __init__(self, ctx: RuleContext, s: ir.Boundary) -> None:
        self._ctx = ctx
        own = ctx.walk.facts.own_seeds
        seeds = [seed for locals_ in s.inner.values() for local in locals_ for seed in own[local].values()]
        values = [e for name in s.inner for e in s.sources(name)]
        self.sources: dict[linear.Leaf, ir.Value] = dict(zip(seeds, values, strict=True))
        self.forms: dict[linear.Leaf, linear.Form] = {}

    def form(self, leaf: linear.Leaf) -> linear.Form:
        """The form of a leaf: empty for fields that the rule reads, whose tangents are 0."""
        if leaf not in self.forms:
            source = self.sources.get(leaf)
            self.forms[leaf] = {} if source is None else self._ctx.form(source)
        return self.forms[leaf]


_LEVELS = ("edge", "coverage")


def gradient(ctx: RuleContext, s: ir.Boundary) -> None:
    """The derivative of a value with respect to the position of the pixel."""
    if "at" not in s.given:
        raise UnsupportedError(
            f"{ir.cited(s.place)}{s.name} needs at=(px, py), the position of the pixel, where a derivative is taken."
        )
    value = s.given["value"]
    assert isinstance(value, ir.Value)
    form = ctx.form(value)
    slopes = _by_position(ctx, s, form)
    if not any(map(_is_not_zero, slopes)) and not s.options["may_be_flat"]:
        _check_not_flat(ctx, s)
    for result, c in zip(s.results, slopes, strict=True):
        ctx.declare(s, result, cast(linear.coefficient(c, result.dtype), result.dtype), {})


def own_seeds(everything: Iterable[ir.Statement]) -> OwnSeeds:
    """Seeds without a column, by local and entry: positions of pixels, tangents of rules."""
    by_entry: dict[tuple[ir.Local, int], set[tuple[ir.Local, int]]] = {}
    for s in everything:
        if not isinstance(s, ir.Boundary):
            continue
        if "at" in s.given:
            position = position_entries(s)
            for entry in position:
                by_entry.setdefault(entry, set()).update(position)
        tangents = (local for locals_ in s.inner.values() for local in locals_)
        for entry in ((local, n) for local in tangents for n in range(math.prod(local.shape))):
            by_entry.setdefault(entry, set())
    seeds: dict[ir.Local, dict[int, linear.LocalSeed]] = {}
    for (local, n), position in by_entry.items():
        seeds.setdefault(local, {})[n] = linear.LocalSeed(local, n, frozenset(position))
    return seeds


# --- positions --------------------------------------------------------------------------------------------------------


def check_positions(body: ir.Body) -> None:
    """Raise if the gradient of a level would miss a part of its dependence on the position.

    Raises:
        UnsupportedError: a level reads values computed from the position from memory, or takes the index of the loop.
    """
    using = [s for s in ir.statements(body) if isinstance(s, ir.Boundary) and "at" in s.given]
    if not using:
        return
    origins = Origins(body)
    for s in using:
        position = frozenset(position_entries(s))
        _check_assigned(s, body, position)
        is_shape = s.name not in _LEVELS or s.options["may_be_flat"]  # its position is computed from the pixel's
        for read, load in origins.hidden(s, ir.entries(s.given["value"]), position, with_origins=is_shape):
            raise _index_in_level(s, read) if load is None else _stored_position(s, load)


def _check_assigned(s: ir.Boundary, body: ir.Body, position: frozenset[tuple[ir.Local, int]]) -> None:
    """Raise for an assignment to an entry of a position by a computed index: it is not known which."""
    for store in ir.statements(body):
        target = store.target if isinstance(store, ir.Store) else None
        if (
            isinstance(target, ir.Read)
            and target.number is None
            and any(local is target.local for local, _ in position)
        ):
            name = target.local.name
            raise UnsupportedError(
                f"{ir.cited(store.place or s.place)}"
                f"{s.name}: this line assigns to an entry of {name}, the position in at=, by a computed index. The "
                f"gradient of the level would be wrong. Write {name}[0] and {name}[1], or a loop over "
                "ti.static(range(2))."
            )


def _stored_position(s: ir.Boundary, load: ir.Load) -> UnsupportedError:
    name = load.container.name
    return UnsupportedError(
        f"{ir.cited(load.place or s.place)}"
        f"{s.name}: level reads {name}, to which the kernel may have stored a value that depends on the position of "
        "the pixel. Fields and arrays do not keep such a dependence, so the derivative would be wrong. Keep the value "
        f"in a local variable, and use that variable here instead of {name}."
    )


def _index_in_level(s: ir.Boundary, read: ir.Read | ir.Load) -> UnsupportedError:
    name = read.container.name if isinstance(read, ir.Load) else read.local.name
    if isinstance(read, ir.Load) or (read.dtype.is_real and read.number is not None):
        again = "which is assigned again between these two"
        if isinstance(read, ir.Load):
            again = "and the position in at= is read from there, too"
        return UnsupportedError(
            f"{ir.cited(read.place or s.place)}"
            f"{s.name}: level reads {name}, {again}. The gradient of the level would lack a part, and the derivative "
            "would be wrong. Keep the position in a variable that does not change, and compute the level from it."
        )
    if read.number is None:
        return UnsupportedError(
            f"{ir.cited(read.place or s.place)}"
            f"{s.name}: level reads an entry of {name}, the position in at=, by a computed index. The gradient of the "
            f"level would lack this part. Write {name}[0] and {name}[1], or a loop over ti.static(range(2))."
        )
    return UnsupportedError(
        f"{ir.cited(read.place or s.place)}"
        f"{s.name}: level depends on the index {name} itself, and at= is computed from {name}, too. The "
        "gradient of the level would lack this part, and the derivative would be wrong. Compute the level from the "
        f"real numbers in at=, for example px = float({name}), everywhere. If the level has one value in the whole "
        f"pixel there, write stop_gradient(float({name}))."
    )


def position_entries(s: ir.Boundary) -> list[tuple[ir.Local, int]]:
    """The locals that hold the position of a pixel, each with the number of its entry.

    Raises:
        UnsupportedError: the position is neither real variables nor indices of a loop.
    """
    result = []
    for value in ir.entries(s.given["at"]):
        number = value.number if isinstance(value, ir.Read) and value.dtype.is_real else None
        if not isinstance(value, ir.Read) or number is None:
            raise UnsupportedError(
                f"{ir.cited(s.place)}{s.name}: at must be two real variables, for example px = float(i), or the "
                "indices of a loop, or one of these for an interval; level is computed from them."
            )
        result.append((value.local, number))
    return result


def _check_not_flat(ctx: RuleContext, s: ir.Boundary) -> None:
    names, remedy = ("x and y", "compute it from them in the shape")
    if s.name in _LEVELS:
        names, remedy = "at=(px, py)", "compute it in the same kernel from the same variables"
    ctx.walk.problems.append(f"{ir.cited(s.place)}{s.name}: level does not depend on {names}; {remedy}.")


def _by_position(ctx: RuleContext, s: ir.Boundary, form: linear.Form) -> tuple[Coefficient, Coefficient]:
    slopes = [linear.bare(form.get(ctx.walk.facts.own_seeds[local][n], 0)) for local, n in position_entries(s)]
    return slopes[0], slopes[1] if len(slopes) > 1 else 0  # an interval has one coordinate


def _is_not_zero(c: linear.Weight) -> bool:
    return not is_number(linear.bare(c), 0)


# Values whose derivative is not that of their expression: stopped, replaced, given by a rule or by an edge.


def boundary(ctx: RuleContext, s: ir.Boundary) -> None:
    """Declare the results of a boundary."""
    if ctx.walk.facts.seeds.use.is_again:
        check_again(s)
    _KINDS[s.kind](ctx, s)


def check_again(s: ir.Boundary) -> None:
    """Raise if a value has no second derivative."""
    if "what" in s.options or s.kind not in ("stop_gradient", "replace_gradient"):
        raise UnsupportedError(
            f"{ir.cited(s.place)}The second derivative of {_NAMES.get(s.name, s.name)} is not known: only its first "
            "derivative is given. Use jacobian or value_and_gradient, or stop_gradient where it counts as a constant."
        )


def _kept(ctx: RuleContext, s: ir.Boundary, forms: list[linear.Form]) -> None:
    """Keep the statement, so that its results have this derivative in a second differentiation, too."""
    ctx.keep(ir.with_values(s, ctx.primal), forms)  # type: ignore[arg-type]


def _stop(ctx: RuleContext, s: ir.Boundary) -> None:
    if ctx.walk.facts.seeds.use.is_again:
        _kept(ctx, s, [{} for _ in s.results])
        return
    for result, value in zip(s.results, s.numbers, strict=True):
        ctx.declare(s, result, ctx.primal(value), {})


def _replace(ctx: RuleContext, s: ir.Boundary) -> None:
    if ctx.walk.facts.seeds.use.is_again:
        _kept(ctx, s, [ctx.linearizer.form(source) for source in _weighted(s)])
        return
    for result, value, source in zip(s.results, s.numbers, _weighted(s), strict=True):
        kept = ctx.walk.expressions.keep(source) if ctx.walk.facts.seeds.use.is_lowered else source
        ctx.declare(s, result, ctx.primal(value), ctx.linearizer.unsettled(source), [(kept, 1)])


def _weighted(s: ir.Boundary) -> list[ir.Value]:
    """The values whose tangents a replaced gradient takes, times their weights."""
    sources = s.sources("surrogate")
    if "weights" not in s.given:
        return sources
    return [
        ir.Op("mul", pair, pair[0].dtype, place=s.place) for pair in zip(sources, s.sources("weights"), strict=True)
    ]


_NAMES = {"rule": "a function with a rule of its own"}
_KINDS = {
    "stop_gradient": _stop,
    "replace_gradient": _replace,
    "rule": rule,
    "gradient": gradient,
}
