"""The Jacobian of a Taichi kernel in one launch, and custom derivatives for functions and expressions."""

from taichi_ext import backend
from taichi_ext.api.hessian import Hessian, hessian, hvp, value_gradient_and_hessian
from taichi_ext.api.jacobian import jacobian, jvp, value_and_jacobian, vjp
from taichi_ext.api.plans.plan import Jacobian
from taichi_ext.api.reverse_mode import GradientLaunch
from taichi_ext.boundary.edges import coverage, edge, segment_edge
from taichi_ext.boundary.gradients import mark, replace_gradient, stop_gradient
from taichi_ext.boundary.layers import layers
from taichi_ext.boundary.mesh_table import mesh_edges
from taichi_ext.boundary.meshes import add_edge
from taichi_ext.boundary.pixels import pixel
from taichi_ext.boundary.rays import ray_level
from taichi_ext.boundary.registry import boundary_gradient, registry
from taichi_ext.checks.check import check_hessian, check_jacobian
from taichi_ext.checks.rule_check import check_rule
from taichi_ext.errors import (
    CheckError,
    DerivativeWarning,
    InternalError,
    InvalidArgumentError,
    InvalidRuleError,
    ShardError,
    UnsupportedError,
)
from taichi_ext.interop.plots import plot_fit, plot_jacobian, plot_sparsity
from taichi_ext.interop.torch_function import torch_function
from taichi_ext.solvers import manifolds
from taichi_ext.solvers.implicit import custom_root, implicit_jacobian
from taichi_ext.solvers.least_squares import least_squares
from taichi_ext.solvers.manifolds import Manifold
from taichi_ext.solvers.newton import NewtonIteration, NewtonResult, newton
from taichi_ext.solvers.normal_equations import NormalEquations, normal_equations, value_and_gradient
from taichi_ext.solvers.operator import hessian_operator, linear_operator
from taichi_ext.solvers.results import LeastSquaresIteration, LeastSquaresResult
from taichi_ext.solvers.shards import map_jacobian
from taichi_ext.version import __version__

__all__ = [
    "CheckError",
    "DerivativeWarning",
    "Hessian",
    "InternalError",
    "InvalidArgumentError",
    "InvalidRuleError",
    "Jacobian",
    "LeastSquaresIteration",
    "LeastSquaresResult",
    "Manifold",
    "NewtonIteration",
    "NewtonResult",
    "NormalEquations",
    "ShardError",
    "UnsupportedError",
    "__version__",
    "add_edge",
    "boundary_gradient",
    "check_hessian",
    "check_jacobian",
    "check_rule",
    "coverage",
    "custom_root",
    "edge",
    "hessian",
    "hessian_operator",
    "hvp",
    "implicit_jacobian",
    "jacobian",
    "jvp",
    "layers",
    "least_squares",
    "linear_operator",
    "manifolds",
    "map_jacobian",
    "mark",
    "mesh_edges",
    "newton",
    "normal_equations",
    "pixel",
    "plot_fit",
    "plot_jacobian",
    "plot_sparsity",
    "ray_level",
    "registry",
    "replace_gradient",
    "segment_edge",
    "stop_gradient",
    "torch_function",
    "value_and_gradient",
    "value_and_jacobian",
    "value_gradient_and_hessian",
    "vjp",
]

backend.compile_gradients_with(GradientLaunch)

__dir__ = __all__.copy  # for completion: no modules
