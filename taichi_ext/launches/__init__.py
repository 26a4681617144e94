"""Launches: what is asked for, in the words of the program, and the kernel that does it."""

from taichi_ext.launches.containers import with_node_calls, with_whole_fields
from taichi_ext.launches.gradient import FirstOrder, GradientProgram, gradient_program
from taichi_ext.launches.keys import (
    GRADIENT,
    ArrayArgument,
    FieldKey,
    FirstOrderArray,
    GradientKey,
    NumberArgument,
    PipelineArgument,
    container_key,
)
from taichi_ext.launches.launch import (
    ContainerInfo,
    Fused,
    KernelFacts,
    Launch,
    Relaunch,
    Role,
    refuse_buffers,
    refuse_changed,
    rows_of,
)
from taichi_ext.launches.seeds import assumed_role, constants_of, seeds_of, with_own_tangents

__all__ = [
    "GRADIENT",
    "ArrayArgument",
    "ContainerInfo",
    "FieldKey",
    "FirstOrder",
    "FirstOrderArray",
    "Fused",
    "GradientKey",
    "GradientProgram",
    "KernelFacts",
    "Launch",
    "NumberArgument",
    "PipelineArgument",
    "Relaunch",
    "Role",
    "assumed_role",
    "constants_of",
    "container_key",
    "gradient_program",
    "refuse_buffers",
    "refuse_changed",
    "rows_of",
    "seeds_of",
    "with_node_calls",
    "with_own_tangents",
    "with_whole_fields",
]
