"""Locals that are used once: their tangent is not accumulated where they are declared but where they are used.

So the accumulation of a statement in reverse runs through the statements before it, and a vector that becomes one
number costs one weight per entry instead of a form per entry.
"""

from __future__ import annotations

from typing import Any

from taichi_ext import backend
from taichi_ext.derivative.linear_form import is_row
from taichi_ext.derivative.rules import COPY
from taichi_ext.derivative.values import Scalar, keep, partials_of, smooth_nodes


def defer(tracer: Any, value: Any, key: Any, dtype: Any) -> Scalar | None:
    """What a local can stand for if its tangent is accumulated where it is used; None where that is not once.

    The partials are evaluated here.  Until the facts tell otherwise a local is taken to be used once, in its own block.
    """
    if isinstance(value, Scalar) and value.local is not None:
        value = Scalar(value.variable, rule=COPY, args=(value,))
    is_new = isinstance(value, Scalar) and value.form is None and value.variable is None
    if not is_new or value.rule is None or value.rule.kind != "smooth" or value.is_tangent or value.dtype != dtype:
        return None
    if not tracer.may_defer(key):
        return None
    if not _has_fixed_leaves(value):
        return None
    for node in smooth_nodes(tracer, value):
        if node.tape is None:
            node.tape = [(a, backend.fixed(p) if backend.is_expr(p) else p) for a, p in partials_of(node)]
    keep(value)
    value.local, value.block = key, tracer.block
    return value


def _has_fixed_leaves(x: Scalar) -> bool:
    """Whether the tangents of what an expression reads are seeds with coefficients that do not change."""
    if x.local is not None:
        return True
    if x.form is None:
        is_smooth = x.rule is not None and x.rule.kind == "smooth"
        return is_smooth and all(_has_fixed_leaves(a) for a in x.args if isinstance(a, Scalar))
    form = x.form() if callable(x.form) else x.form
    if any(is_row(leaf) for leaf in form):
        return False
    if callable(x.form):
        if any(backend.is_expr(c) for c in form.values()):
            return False
        x.form = form
    return True
