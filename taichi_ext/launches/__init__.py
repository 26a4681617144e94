"""Launches: kernel, arguments and seeds, and the kernel with tangents that computes them."""

from taichi_ext.launches.containers import with_node_calls, with_whole_fields
from taichi_ext.launches.flow import Flow
from taichi_ext.launches.gradient import FROM_INTERMEDIATES, FirstOrder, GradientProgram, gradient_program
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
    ColumnBlock,
    ContainerInfo,
    EnergyTarget,
    Fused,
    KernelColumns,
    KernelFacts,
    KernelMemory,
    Launch,
    NumberColumns,
    Role,
    SparseTarget,
    check_buffers,
    check_unchanged,
    rows_of,
)
from taichi_ext.launches.seeds import assumed_role, constants_of, number_locals, seeds_of, with_own_tangents

__all__ = [
    "FROM_INTERMEDIATES",
    "GRADIENT",
    "ArrayArgument",
    "ColumnBlock",
    "ContainerInfo",
    "EnergyTarget",
    "FieldKey",
    "FirstOrder",
    "FirstOrderArray",
    "Flow",
    "Fused",
    "GradientKey",
    "GradientProgram",
    "KernelColumns",
    "KernelFacts",
    "KernelMemory",
    "Launch",
    "NumberArgument",
    "NumberColumns",
    "PipelineArgument",
    "Role",
    "SparseTarget",
    "assumed_role",
    "check_buffers",
    "check_unchanged",
    "constants_of",
    "container_key",
    "gradient_program",
    "number_locals",
    "rows_of",
    "seeds_of",
    "with_node_calls",
    "with_own_tangents",
    "with_whole_fields",
]
