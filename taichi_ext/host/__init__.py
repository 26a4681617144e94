"""The runtime whose kernels this package differentiates: its names, and what each runtime does in its own way."""

from taichi_ext.host.choice import NAME as NAME  # first: raises for releases that are not supported
from taichi_ext.host.taichi import *
