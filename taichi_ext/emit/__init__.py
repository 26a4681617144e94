"""A program as the text of an ordinary kernel in Taichi's public language, and as a kernel."""

from taichi_ext.emit.kernels import Emitted, build, emit, factory
