"""A program as the text of an ordinary kernel in Taichi's public language, and as a kernel."""

from taichi_ext.emit.exported import Emitted, Part, Tangents, build, emit, export
