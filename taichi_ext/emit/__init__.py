"""A program as the text of an ordinary kernel in Taichi's public language, and as a kernel."""

from taichi_ext.emit.exported import Part, Tangents, export
from taichi_ext.emit.module import Emitted, build, emit

__all__ = ["Emitted", "Part", "Tangents", "build", "emit", "export"]
