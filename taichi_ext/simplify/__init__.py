"""Smaller programs that compute the same values, bit for bit."""

from taichi_ext.simplify.pipeline import simplify
