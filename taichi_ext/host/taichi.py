"""Taichi as a value, its names that the package uses, and what is done in another way by each runtime."""

from __future__ import annotations

import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import taichi as ti
from taichi import Field, Matrix, MatrixField, Ndarray, ScalarField, SNode, Struct, StructField, i32
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

from taichi_ext.host.values import Runtime

RUNTIME = Runtime(ti, impl.get_runtime, impl.current_cfg, lambda: impl.get_runtime().prog, threading.RLock())
CompilationError, SyntaxFault, TypeFault = ti.TaichiCompilationError, ti.TaichiSyntaxError, ti.TaichiTypeError
DataType = core.DataType


def current_kernel() -> Any:
    return impl.get_runtime().current_kernel


def compiling() -> Any:
    """What is traced, as the core has it: the kernel or a real function."""
    return impl.get_runtime().compiling_callable


def set_compiling(callable_: Any) -> None:
    impl.get_runtime().compiling_callable = callable_


@contextmanager
def tracing(kernel: Any, traced: object, context: object) -> Iterator[None]:
    """Within the context, a kernel is traced."""
    runtime: Any = impl.get_runtime()
    runtime.inside_kernel, runtime.current_kernel, runtime.compiling_callable = True, kernel, traced
    try:
        yield
    finally:
        runtime.inside_kernel, runtime.current_kernel, runtime.compiling_callable = False, None, None


@contextmanager
def sealed_with(seal: object) -> Iterator[None]:
    """Within the context, statements are added to a seal."""
    runtime: Any = impl.get_runtime()
    before = runtime.compiling_callable, runtime.current_kernel
    runtime.compiling_callable = runtime.current_kernel = seal
    try:
        yield
    finally:
        runtime.compiling_callable, runtime.current_kernel = before


def arguments(function: Any) -> list[Any]:
    """The arguments of a kernel or function: names and annotations."""
    return function.arguments


def compiled_kernels(kernel: Any) -> Any:
    return kernel.compiled_kernels


COMPILED_TABLES = ("compiled_kernels",)  # of a kernel
FUNCTION_TABLE = "taichi_functions"  # of a real function
TYPED_CONTEXT = kernel_impl, "ASTTransformerContext"  # where a walk over a function makes its state


def forget_compiled(kernel: Any) -> None:
    kernel.compiled_kernels.clear()


def keep_compiled(kernel: Any, key: object, fused: Any) -> None:
    """Let a kernel be what a fused one is, for arguments of these types."""
    kernel.compiled_kernels[key] = fused.cpp


def finish(kernel: object, key: object) -> None:
    """Taichi compiles a traced kernel at its first launch."""


def refuses_reverse(error: Exception) -> bool:
    """Whether a kernel is one that the runtime's own reverse mode does not take, but ours does."""
    return False


def keep_replaced(kernel: Any, key: object, launch: Callable[[tuple[object, ...]], object]) -> None:
    """Run a function in place of a kernel, for arguments of these types."""

    def launch_kernel(t_kernel: Any, *args: object) -> object:
        return t_kernel(args) if type(t_kernel) is type(launch) else Kernel.launch_kernel(kernel, t_kernel, *args)

    kernel.compiled_kernels[key] = launch
    kernel.launch_kernel = launch_kernel  # Taichi looks it up on the instance


def put_attributes(kernel: Any, primal: Any) -> None:
    """Give a kernel that is traced from a tree the attributes that Taichi needs."""
    vars(kernel).update(vars(primal))  # not __init__, which would register it in the runtime for ever
    kernel.arguments = list(primal.arguments)
    kernel.compiled_kernels = {}
    kernel.kernel_cpp, kernel.grad, kernel.has_print = None, None, False


def compile_kernel(prog: Any, traced: object) -> Any:
    return prog.compile_kernel(prog.config(), prog.get_device_caps(), traced)


ARGUMENTS = 64  # most elements that Taichi's launch accepts; compiled kernels take any number


def _with_more_arguments(function: Any) -> types.FunctionType:
    """Taichi's launch without its limit on arguments, a constant of its code: fused kernels may have more arrays."""
    code = function.__code__
    constants = tuple(sys.maxsize if type(c) is int and c == ARGUMENTS else c for c in code.co_consts)
    return types.FunctionType(code.replace(co_consts=constants), function.__globals__, function.__name__)


_launch_kernel = _with_more_arguments(Kernel.launch_kernel)


def launch_fused(kernel: Any, args: tuple[object, ...]) -> Any:
    return _launch_kernel(kernel, kernel.cpp, *args)


def position(number: int) -> Any:
    """The position of an argument, as the core has it."""
    return (number,)


def array_feature(dtype: object) -> tuple[object, ...]:
    """Template key of a one-dimensional scalar array argument."""
    return (dtype, 1, False, ndarray_type.NdarrayType(ndim=1).boundary)


def argument_features(kernel: Any, args: tuple[object, ...]) -> tuple[object, ...]:
    return kernel.mapper.extract(args)


def process_args(kernel: object, args: tuple[object, ...], kwargs: Mapping[str, object]) -> tuple[object, ...]:
    return tuple(kernel_impl._process_args(kernel, args, kwargs))


# the code of the functions that @ti.kernel returns
_DECORATED = tuple(c for c in kernel_impl._kernel_impl.__code__.co_consts if getattr(c, "co_name", "") == "wrapped")


def primal_kernel(obj: Any) -> tuple[Kernel, tuple[object, ...]] | None:
    """The ``Kernel`` behind a decorated function or a bound method, and the arguments that the binding adds.

    A function of the user's that ``functools.wraps(kernel)`` has given the attributes of a kernel is none.
    """
    if isinstance(obj, BoundMethod):
        return obj._primal, () if obj._is_staticmethod else (obj._kernel_owner,)
    if getattr(obj, "__code__", None) in _DECORATED and hasattr(obj, "_primal"):
        return obj._primal, ()
    return (obj, ()) if isinstance(obj, Kernel) else None


def func_of(function: Any) -> Func | None:
    """The ``Func`` of a ``@ti.func``; None for anything else."""
    func = getattr(function, "func", None)
    return func if isinstance(func, Func) else None


def bound(function: Any) -> tuple[Any, object] | None:
    """A function and the object that it is a method of; None for anything else."""
    return (function.__func__, function.__self__) if inspect.ismethod(function) else None


def is_decorated(obj: object) -> bool:
    """Whether an object that stands for a kernel is what ``@ti.kernel`` returns, which is not kept for ever."""
    return inspect.isfunction(obj)


def is_class_kernel(kernel: Any) -> bool:
    return kernel.classkernel


ASCENDING_EIGENVALUES = (3,)  # sizes of matrices for which ``ti.sym_eig`` sorts so; it has them up to 3
MARKS = ("_is_wrapped_kernel", "_is_taichi_function")  # what the decorators leave on functions


class Context(ASTTransformerContext):
    """The state of a walk over a tree, with the methods that the package overrides."""

    def value_named(self, name: str) -> object:
        return super().get_var_by_name(name)

    def get_var_by_name(self, name: str) -> object:
        return self.value_named(name)

    def place_of(self, node: Any) -> str:
        return super().get_pos_info(node)

    def get_pos_info(self, node: Any) -> str:
        return self.place_of(node)


def context_options(
    function: types.FunctionType,
    source: tuple[str, list[str], int],
    scope: Mapping[str, object],
    kernel: Any,
    names: Sequence[str],
    given: Sequence[object] | None,
    features: object,
    builder: object,
) -> dict[str, Any]:
    """What the state of a walk is made of."""
    file, lines, start = source
    owner = kernel
    if kernel is None:
        own = [KernelArgument(ti.template(), name, inspect.Parameter.empty) for name in names]
        owner = types.SimpleNamespace(func=function, arguments=own, return_type=None, has_print=False)
    return {
        "excluded_parameters": () if kernel is None else kernel.template_slot_locations,
        "is_kernel": kernel is not None,
        "func": owner,
        "arg_features": features,
        "global_vars": scope,
        "argument_data": given,
        "src": lines,
        "start_lineno": start,
        "file": file,
        "ast_builder": builder,
    }


build_call = ASTTransformer.build_Call


def native_annotation(annotation: object) -> object:
    return annotation


def member_of(value: Any, name: str) -> Any:
    """A member of a struct or argument pack."""
    return value[name]


def bound_member(context: object, name: str, bound: Any, member: str) -> object:
    """The member of an argument that is walked."""
    return bound[member]


def unwrapped(x: object) -> object:
    """The field or ndarray in an object of the runtime's; Taichi has no such objects."""
    return x


def unwrapped_args(args: object) -> Any:
    """The same for each argument of a call."""
    return args


def is_passed(annotation: object, value: object) -> bool:
    """Whether an argument is passed at each launch, and not put into the kernel as it is."""
    return not is_template(annotation)


def passed_feature(annotation: object, feature: Any) -> Any:
    """The template key of an argument that is passed, for a kernel that says what it is."""
    return feature


def concrete(annotation: object, value: object) -> object:
    """What an annotation stands for where this value is passed."""
    return annotation


def is_reference(annotation: object) -> bool:
    """Whether an argument of a real function is passed by reference."""
    return isinstance(annotation, primitive_types.RefType)


walk_tree = transform_tree


def brief_message(text: str) -> str:
    """A message as users see it."""
    return text


def is_template(annotation: object) -> bool:
    """Whether an argument is put into the kernel as it is."""
    return isinstance(annotation, ti.template)
