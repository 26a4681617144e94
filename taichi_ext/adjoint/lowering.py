"""Programs whose values with a derivative of their own are sums of arguments with weights.

The forward engine, asked for no column, has the partials of rules over the tangents that they take, and the gradients
of levels by the position of a pixel: these are the weights. So edges and rules have one derivative in both modes.
"""

from __future__ import annotations

import taichi_ext.program as ir
from taichi_ext.analysis.linearity import check_rules
from taichi_ext.analysis.loops import Extents
from taichi_ext.differentiate.facts.decisions import Seeds, Use
from taichi_ext.differentiate.transform.forward import differentiate
from taichi_ext.simplify import simplify

_PLAIN = ("stop_gradient", "replace_gradient")


def lowered(program: ir.Program, extents: Extents) -> ir.Program:
    """The program with ``weighted`` boundaries for its rules and edges.

    Raises:
        UnsupportedError: a derivative is not known, or a rule is not linear.
    """
    boundaries = [s for s in ir.statements(program.body) if isinstance(s, ir.Boundary)]
    if all(s.kind in _PLAIN and "what" not in s.options for s in boundaries):
        return program
    check_rules(program)
    return simplify(differentiate(program, Seeds(0, {}, extents, use=Use(is_lowered=True))).program)
