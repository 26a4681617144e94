"""Launches: kernel, arguments and seeds, and the kernel with tangents that computes them."""

from taichi_ext.launches.containers import with_node_calls, with_whole_fields
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
    rows_of,
)
from taichi_ext.launches.seeds import assumed_role, constants_of, number_locals, seeds_of, with_own_tangents
