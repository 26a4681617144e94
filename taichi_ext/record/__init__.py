"""Source rewriting, and the recorder: a kernel call as a program."""

from taichi_ext.record.recorder import record
