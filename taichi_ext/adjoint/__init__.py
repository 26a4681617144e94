"""The adjoint of a program: from the adjoints of what it writes to the adjoints of what it reads."""

from taichi_ext.adjoint.block import own_width
from taichi_ext.adjoint.normal import running_number
from taichi_ext.adjoint.order import Pair
from taichi_ext.adjoint.recorded import with_stores
from taichi_ext.adjoint.rows import rows_in_lanes
from taichi_ext.adjoint.stage_adjoint import adjoint_of
from taichi_ext.adjoint.stages import OwnArrays, Stage, Staged, checked, staged
from taichi_ext.adjoint.tapes import AdjointArray, Tape, adjoint_array
