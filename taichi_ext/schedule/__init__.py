"""How the parallel loops of a program with tangents run: row by row, in lanes, or spread over all threads."""

from taichi_ext.schedule.loops import Scheduled, schedule
from taichi_ext.schedule.machine import Machine

__all__ = ["Machine", "Scheduled", "schedule"]
