"""The runtime whose kernels this package differentiates: its names, and what each runtime does in its own way."""

from typing import TYPE_CHECKING

from taichi_ext.host.choice import NAME, foreign_problem  # first: raises for releases that are not supported

if TYPE_CHECKING or NAME == "taichi":
    from taichi_ext.host.taichi import *
else:
    from taichi_ext.host.quadrants import *
