"""The names of the runtime: the other modules of this folder import them from here."""

from taichi_ext.host import *
