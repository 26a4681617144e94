"""Taichi as a value, and its names that the package uses: the other modules of this folder import them from here.

Another runtime needs such a module. Parts in which it differs from Taichi are in this folder, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import taichi as ti
from taichi import Field, Matrix, MatrixField, Ndarray, ScalarField, SNode, Struct, StructField, f32, i32
from taichi._funcs import field_fill_taichi_scope as fill_function
from taichi._lib import core
from taichi._snode.snode_tree import SNodeTree
from taichi.lang import impl, kernel_impl, matrix, matrix_ops, mesh, ops
from taichi.lang._wrap_inspect import getsourcefile, getsourcelines
from taichi.lang.any_array import AnyArray
from taichi.lang.argpack import ArgPack, ArgPackType
from taichi.lang.ast import ASTTransformerContext, transform_tree
from taichi.lang.ast.ast_transformer import ASTTransformer
from taichi.lang.ast.symbol_resolver import ASTResolver
from taichi.lang.enums import AutodiffMode
from taichi.lang.expr import Expr
from taichi.lang.field import SNodeHostAccess
from taichi.lang.kernel_arguments import KernelArgument
from taichi.lang.kernel_impl import Func, Kernel
from taichi.lang.kernel_impl import _BoundedDifferentiableMethod as BoundMethod
from taichi.lang.kernel_impl import _get_global_vars as global_variables
from taichi.lang.matrix import MatrixType
from taichi.lang.misc import loop_unique
from taichi.lang.struct import StructType
from taichi.lang.util import cook_dtype, to_numpy_type, to_taichi_type
from taichi.types import ndarray_type, primitive_types
from taichi.types.primitive_types import all_types, integer_types, real_types


@dataclass(frozen=True)
class Runtime:
    """The system that compiles and runs kernels; there is one in a process.

    Attributes:
        module: its public names, called ``ti`` in generated text.
        state: gives its current state: the program, the kernel that is traced, default types.
        config: gives the settings of the program.
        lock: held while a kernel is traced, by this package or by it, and while state shared by calls is used.
    """

    module: ModuleType
    state: Callable[[], impl.PyTaichi]
    config: Callable[[], Any]
    lock: threading.RLock

    @property
    def name(self) -> str:
        """Of its package."""
        return self.module.__name__

    @property
    def header(self) -> str:
        """The statement by which generated text imports it."""
        return f"import {self.name} as ti"

    def owns(self, name: str) -> bool:
        """Whether a module of this name is one of its own."""
        return name.split(".")[0] == self.name


RUNTIME = Runtime(ti, impl.get_runtime, impl.current_cfg, threading.RLock())
