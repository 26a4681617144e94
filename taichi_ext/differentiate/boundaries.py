"""Values whose derivative is not that of their expression: stopped, replaced, given by a rule or by an edge."""

from __future__ import annotations

from typing import TYPE_CHECKING

from taichi_ext.differentiate import edges
from taichi_ext.differentiate.rules import rule
from taichi_ext.program import Boundary, Declare

if TYPE_CHECKING:
    from taichi_ext.differentiate.forward import Forward


def boundary(f: Forward, s: Boundary) -> None:
    """Declare the results of a boundary."""
    _KINDS[s.kind](f, s)


def _stop(f: Forward, s: Boundary) -> None:
    for result, value in zip(s.results, s.numbers, strict=True):
        f.locals.declare_form(Declare(result, (f.primal(value),), place=s.place), {})


def _replace(f: Forward, s: Boundary) -> None:
    for result, value, source in zip(s.results, s.numbers, s.sources("surrogate"), strict=True):
        f.locals.declare_form(Declare(result, (f.primal(value),), place=s.place), f.form(source))


_KINDS = {
    "stop_gradient": _stop,
    "replace_gradient": _replace,
    "rule": rule,
    "edge": edges.edge,
    "step": edges.edge,
    "coverage": edges.edge,
    "sqrt_edge": edges.sqrt_edge,
    "segment_edge": edges.segment_edge,
    "gradient": edges.gradient,
}
