"""How the parallel loops of a program with tangents run: row by row, in lanes, or spread over all threads."""

from taichi_ext.schedule.loops import Scheduled, from_below_zero, is_of_one_thread, is_short_below_zero, schedule
from taichi_ext.schedule.machine import Machine
from taichi_ext.schedule.private_sums import with_lower_triangle, with_private_sums, without_atomics
