"""Launches: kernel, arguments and seeds, and the kernel with tangents that computes them."""

from taichi_ext.launches.gradient import FROM_INTERMEDIATES, FirstOrder, GradientProgram, gradient_program
from taichi_ext.launches.launch import (
    GRADIENT,
    ArrayArgument,
    ColumnBlock,
    ContainerInfo,
    EnergyTarget,
    FieldKey,
    FirstOrderArray,
    Fused,
    GradientKey,
    KernelColumns,
    KernelFacts,
    KernelMemory,
    Launch,
    NumberArgument,
    NumberColumns,
    PipelineArgument,
    Role,
    SparseTarget,
    check_buffers,
    container_key,
    rows_of,
)
from taichi_ext.launches.seeds import (
    assumed_role,
    constants_of,
    number_locals,
    seeds_of,
    with_node_calls,
    with_own_tangents,
    with_whole_fields,
)
