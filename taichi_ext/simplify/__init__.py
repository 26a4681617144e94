"""Programs made smaller without a change of what they compute, bit by bit."""

from taichi_ext.simplify.pipeline import simplify

__all__ = ["simplify"]
