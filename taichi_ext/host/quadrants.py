"""Quadrants as a value, its names that the package uses, and what is done in another way by each runtime."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import quadrants as ti
from quadrants import Field, Matrix, MatrixField, Ndarray, ScalarField, SNode, Struct, StructField, i32
from quadrants._funcs import field_fill_quadrants_scope as fill_function
from quadrants._lib import core
from quadrants._snode.snode_tree import SNodeTree
from quadrants.lang import _func_base, _kernel_impl_dataclass, impl, kernel_impl, matrix, matrix_ops, mesh, ops
from quadrants.lang._dataclass_util import create_flat_name
from quadrants.lang._final_dataclass_fields import is_final_annotation
from quadrants.lang._pruning import Pruning
from quadrants.lang._quadrants_callable import BoundQuadrantsCallable, QuadrantsCallable
from quadrants.lang._wrap_inspect import getsourcefile, getsourcelines
from quadrants.lang.any_array import AnyArray
from quadrants.lang.ast import transform_tree
from quadrants.lang.ast.ast_transformer import ASTTransformer, build_stmt, build_stmts
from quadrants.lang.ast.ast_transformer_utils import ASTTransformerFuncContext as ASTTransformerContext
from quadrants.lang.ast.ast_transformer_utils import ASTTransformerGlobalContext
from quadrants.lang.ast.symbol_resolver import ASTResolver
from quadrants.lang.expr import Expr
from quadrants.lang.field import SNodeHostAccess
from quadrants.lang.func import Func
from quadrants.lang.kernel import Kernel, LaunchContextBufferCache
from quadrants.lang.kernel_arguments import ArgMetadata as KernelArgument
from quadrants.lang.matrix import MatrixType
from quadrants.lang.misc import loop_unique
from quadrants.lang.struct import StructType
from quadrants.lang.util import cook_dtype, to_numpy_type
from quadrants.lang.util import to_quadrants_type as to_taichi_type
from quadrants.types import ndarray_type, primitive_types
from quadrants.types.enums import AutodiffMode
from quadrants.types.primitive_types import all_types, integer_types, real_types

from taichi_ext.host.values import Runtime

RUNTIME = Runtime(ti, impl.get_runtime, impl.current_cfg, lambda: impl.get_runtime()._prog, threading.RLock())
CompilationError, SyntaxFault, TypeFault = ti.QuadrantsCompilationError, ti.QuadrantsSyntaxError, ti.QuadrantsTypeError
DataType = core.DataTypeCxx


def bound_member(context: Any, name: str, bound: Any, member: str) -> object:
    """The member of an argument that is walked; ``name`` is the argument's, members of members behind points."""
    if not isinstance(bound, type):
        return bound[member]
    first, *others = name.split(".")
    return context.value_named(functools.reduce(create_flat_name, [*others, member], first))


def current_kernel() -> Any:
    context = impl.get_runtime()._current_global_context
    return None if context is None else context.current_kernel


def compiling() -> Any:
    """What is traced, as the core has it: the kernel or a real function."""
    return impl.get_runtime()._compiling_callable


def set_compiling(callable_: Any) -> None:
    impl.get_runtime()._compiling_callable = callable_


@contextmanager
def tracing(kernel: Any, traced: Any, context: Any) -> Iterator[None]:
    """Within the context, a kernel is traced."""
    runtime = impl.get_runtime()
    before, runtime._current_global_context = runtime._current_global_context, context.global_context
    runtime.inside_kernel, runtime._compiling_callable = True, traced
    try:
        yield
    finally:
        runtime.inside_kernel, runtime._compiling_callable = False, None
        runtime._current_global_context = before
        kernel._struct_ndarray_launch_info_by_key = {None: context.global_context.struct_ndarray_launch_info}


@contextmanager
def sealed_with(seal: Any) -> Iterator[None]:
    """Within the context, statements are added to a seal."""
    runtime = impl.get_runtime()
    before = runtime._compiling_callable, runtime._current_global_context
    runtime._compiling_callable = runtime._current_global_context = seal
    try:
        yield
    finally:
        runtime._compiling_callable, runtime._current_global_context = before


def compiled_kernels(kernel: Any) -> Any:
    return kernel.materialized_kernels


COMPILED_TABLES = ("materialized_kernels", "compiled_kernel_data_by_key")  # of a kernel
FUNCTION_TABLE = "cxx_function_by_id"  # of a real function
TYPED_CONTEXT = _func_base, "ASTTransformerFuncContext"  # where a walk over a function makes its state


def forget_compiled(kernel: Any) -> None:
    for table in COMPILED_TABLES:
        getattr(kernel, table).clear()
    kernel.launch_context_buffer_cache = LaunchContextBufferCache()


class _All:
    """A set with everything in it: no member of an argument is left out."""

    def __contains__(self, name: object) -> bool:
        return True


_EVERYTHING: Any = _All()


def keep_compiled(kernel: Any, key: object, fused: Any) -> None:
    """Let a kernel be what a fused one is, for arguments of these types."""
    kernel.materialized_kernels[key] = fused.cpp
    kernel.compiled_kernel_data_by_key[key] = fused.compiled
    kernel.used_py_dataclass_parameters_by_key_enforcing[key] = _EVERYTHING
    kernel._struct_ndarray_launch_info_by_key[key] = fused._struct_ndarray_launch_info_by_key.get(None, [])
    impl.get_runtime()._current_global_context = None  # of the compilation that was given up


def finish(kernel: Any, key: object) -> None:
    """Compile what was traced, in the thread that has the lock: Quadrants mixes up what two threads compile at once."""
    traced = kernel.materialized_kernels.get(key)
    if traced is not None and key not in kernel.compiled_kernel_data_by_key and not kernel.fast_checksum:
        kernel.compiled_kernel_data_by_key[key] = compile_kernel(impl.get_runtime()._prog, traced)


def refuses_reverse(error: Exception) -> bool:
    """Whether a kernel is one that the runtime's own reverse mode does not take, but ours does."""
    return "Cannot use non static range in Backwards mode" in str(error)


def keep_replaced(kernel: Any, key: object, launch: Callable[[tuple[object, ...]], object]) -> None:
    """Run a function in place of a kernel, for arguments of these types."""

    def launch_kernel(of: object, t_kernel: Any, compiled: Any, *args: object, **options: Any) -> object:
        if type(t_kernel) is not type(launch):
            return Kernel.launch_kernel(kernel, of, t_kernel, compiled, *args, **options)
        return t_kernel(args)

    kernel.materialized_kernels[key] = kernel.compiled_kernel_data_by_key[key] = launch
    kernel.launch_kernel = launch_kernel  # Quadrants looks it up on the instance
    impl.get_runtime()._current_global_context = None


def put_attributes(kernel: Any, primal: Any) -> None:
    """Give a kernel that is traced from a tree the attributes that Quadrants needs."""
    vars(kernel).update(vars(primal))  # not __init__, which would register it in the runtime for ever
    kernel.arg_metas = list(primal.arg_metas)
    kernel.kernel_cpp = kernel.grad = kernel.quadrants_callable = kernel.fast_checksum = None
    kernel.materialized_kernels, kernel.compiled_kernel_data_by_key = {}, {}
    kernel.used_py_dataclass_parameters_by_key_enforcing = {None: _EVERYTHING}
    kernel._struct_ndarray_launch_info_by_key, kernel._struct_primitive_launch_info_by_key = {}, {}
    kernel.launch_context_buffer_cache, kernel._mutable_nd_cached_key = LaunchContextBufferCache(), ""
    kernel.graph_do_while_levels, kernel.checkpoint_yield_on_args = [], []
    kernel.use_graph = kernel.use_checkpoints = kernel.has_print = False


def compile_kernel(prog: Any, traced: Any) -> Any:
    return prog.compile_kernel(prog.config(), prog.get_device_caps(), traced).compiled_kernel_data


def launch_fused(kernel: Any, args: tuple[object, ...]) -> Any:
    return kernel.launch_kernel(None, kernel.cpp, kernel.compiled, *args)


def position(number: int) -> Any:
    """The position of an argument, as the core has it."""
    return number


def array_feature(dtype: object) -> tuple[object, ...]:
    """Template key of a one-dimensional scalar array argument."""
    return (dtype, 1, False, ndarray_type.NdarrayType(ndim=1).boundary, None)


def argument_features(kernel: Any, args: tuple[object, ...]) -> tuple[object, ...]:
    return kernel.mapper.extract(False, args)


def process_args(kernel: Any, args: tuple[object, ...], kwargs: Mapping[str, object]) -> tuple[object, ...]:
    stream = kwargs.get("qd_stream")
    if stream is not None:  # what a differentiated call launches runs in order, in the stream of the program
        stream.synchronize()
        kwargs = {k: v for k, v in kwargs.items() if k != "qd_stream"}
    return tuple(map(unwrapped, kernel.fuse_args(None, False, False, args, kwargs)))


def global_variables(function: types.FunctionType) -> dict[str, Any]:
    return _func_base.FuncBase._get_global_vars(None, function)  # type: ignore[arg-type]


def primal_kernel(obj: Any) -> tuple[Kernel, tuple[object, ...]] | None:
    """The ``Kernel`` behind a decorated function or a bound method, and the arguments that the binding adds."""
    if type(obj) is BoundQuadrantsCallable and obj._primal is not None:
        return obj._primal, (obj.instance,)
    if type(obj) is QuadrantsCallable and obj._primal is not None:
        return obj._primal, ()
    return (obj, ()) if isinstance(obj, Kernel) else None


def func_of(function: Any) -> Func | None:
    """The ``Func`` of a ``@qd.func``; None for anything else."""
    for name in ("wrapper", "func"):
        func = getattr(function, name, None)
        if isinstance(func, Func):
            return func
    return None


def bound(function: Any) -> tuple[Any, object] | None:
    """A function, ``@qd.func`` or kernel and the object that it is a method of; None for anything else."""
    if type(function) is BoundQuadrantsCallable:
        return function.quadrants_callable, function.instance
    return (function.__func__, function.__self__) if inspect.ismethod(function) else None


def is_decorated(obj: object) -> bool:
    """Whether an object that stands for a kernel is what ``@qd.kernel`` returns, which is not kept for ever."""
    return type(obj) is QuadrantsCallable


def is_class_kernel(kernel: Any) -> bool:
    return kernel.is_classkernel


ASCENDING_EIGENVALUES = range(2, 7)  # sizes of matrices for which ``qd.sym_eig`` sorts so
MARKS = ("_is_wrapped_kernel", "_is_quadrants_function")  # what the decorators leave on functions


class Context(ASTTransformerContext):
    """The state of a walk over a tree, with the methods that the package overrides."""

    def value_named(self, name: str) -> object:
        return super().get_var_by_name(name)[1]

    def get_var_by_name(self, name: str) -> tuple[bool, Any, str | None]:
        return False, self.value_named(name), None

    def place_of(self, node: Any) -> str:
        return super()._build_pos_info(node)

    def memoized_get_pos_info(self, node: Any) -> str:
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
    owner, templates = kernel, {}
    if kernel is None:
        shared: Any = impl.get_runtime()._current_global_context
        own = [KernelArgument(ti.template(), name, inspect.Parameter.empty) for name in names]
        owner = Func.__new__(Func)  # not made by __init__, which would give it a number
        owner.func, owner.func_id, owner.return_type, owner.has_print = function, -1, None, False
        owner.arg_metas = owner.arg_metas_expanded = owner.orig_arguments = own
        owner.pos_info_cache = {}
    else:
        shared = ASTTransformerGlobalContext(kernel, Pruning(None), None, 0)
        if given is not None:
            slots = kernel.template_slot_locations
            kernel._populate_global_vars_for_templates(slots, kernel.arg_metas, templates, function, tuple(given))
    return {
        "global_context": shared,
        "template_slot_locations": () if kernel is None else kernel.template_slot_locations,
        "end_lineno": start + len(lines),
        "is_kernel": kernel is not None,
        "func": owner,
        "arg_features": features,
        "global_vars": scope,
        "template_vars": templates,
        "is_pure": False,
        "py_args": given,
        "file": file,
        "src": lines,
        "start_lineno": start,
        "ast_builder": builder,
        "is_real_function": False,
        "autodiff_mode": shared.current_kernel.autodiff_mode,
        "raise_on_templated_floats": False,
    }


_build_call = ASTTransformer.build_Call


def build_call(context: Any, node: Any) -> object:
    """A call in a walk; those of the recorder are made as they are: Quadrants takes dataclasses apart."""
    name = getattr(node.func, "id", "") or getattr(getattr(node.func, "value", None), "id", "")
    if not name.startswith("<ad>"):
        return _build_call(context, node)
    build_stmt(context, node.func)
    build_stmts(context, node.args)
    build_stmts(context, node.keywords)
    args: list[Any] = []
    for a in node.args:
        args += a.ptr if type(a).__name__ == "Starred" else [a.ptr]
    named = {name: value for k in node.keywords for name, value in k.ptr.items()}
    node.ptr = node.func.ptr(*args, **named)
    return node.ptr


def walk_tree(tree: Any, context: Any) -> None:
    """Walk a tree, in which members of dataclasses are names."""
    if context.is_kernel:
        locals_ = _kernel_impl_dataclass.extract_struct_locals_from_context(context)
        tree = _kernel_impl_dataclass.unpack_ast_struct_expressions(tree, struct_locals=locals_)
    try:
        transform_tree(tree, context)
    except CompilationError as error:  # at each level: each one writes the message of the one below twice
        text = brief_message(str(error))
        if text == str(error):
            raise
        raise type(error)(text) from error.__cause__


_TRACES = re.compile(r"quadrants stack trace:\n===\n(?:(?!quadrants stack trace:).)*?\n===\n\nYour code:\n", re.DOTALL)


def brief_message(text: str) -> str:
    """A message without the stacks of Quadrants, one for each level."""
    while _TRACES.search(text):
        text = _TRACES.sub("", text)
    return text.rstrip("\n")


# Arguments of kernels: dataclasses, tensors and optional arrays, and their annotations.


class ArgPack:
    """Quadrants has none: it takes dataclasses apart."""


class ArgPackType:
    """A dataclass as the type of an argument, in the form of Taichi's types of argument packs."""

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.members = {f.name: _annotation(f.type) for f in dataclasses.fields(kind)}

    def __call__(self, **members: object) -> object:
        return self.kind(**members)

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, self.kind)


@functools.cache
def _pack_type(kind: type) -> ArgPackType:
    return ArgPackType(kind)


class _OptionalArray(ndarray_type.NdarrayType):
    """``T | None``: an array, or None, which is put into the kernel."""


def _annotation(annotation: Any, is_optional: bool = False) -> Any:
    if is_optional and type(annotation) is ndarray_type.NdarrayType:
        result = _OptionalArray.__new__(_OptionalArray)
        vars(result).update(vars(annotation))
        return result
    is_pack = isinstance(annotation, type) and dataclasses.is_dataclass(annotation)
    return _pack_type(annotation) if is_pack else ti.template() if is_final_annotation(annotation) else annotation


def native_annotation(annotation: object) -> object:
    return annotation.kind if isinstance(annotation, ArgPackType) else annotation


def member_of(value: Any, name: str) -> Any:
    """A member of a struct, argument pack or dataclass."""
    return unwrapped(getattr(value, name)) if dataclasses.is_dataclass(value) else value[name]


def arguments(function: Any) -> list[Any]:
    """The arguments of a kernel or function: names and annotations."""
    known = _ARGUMENTS.get(function)
    if known is None:
        known = [KernelArgument(_annotation(a.annotation, a.optional), a.name, a.default) for a in function.arg_metas]
        _ARGUMENTS[function] = known
    return known


_ARGUMENTS: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


def unwrapped(x: object) -> object:
    """The field or ndarray in a ``qd.Tensor``; anything else as it is."""
    return x._unwrap() if isinstance(x, ti.Tensor) else x


def unwrapped_args(args: object) -> Any:
    """The same for each argument of a call."""
    return tuple(map(unwrapped, args)) if isinstance(args, (tuple, list)) else args


def is_passed(annotation: object, value: object) -> bool:
    """Whether an argument is passed at each launch, and not put into the kernel as it is."""
    return not is_template(concrete(annotation, value))


def passed_feature(annotation: object, feature: Any) -> Any:
    """The template key of an argument that is passed, for a kernel that says what it is."""
    return feature[1:] if annotation is ti.Tensor else feature


def concrete(annotation: object, value: object) -> object:
    """What an annotation stands for where this value is passed."""
    if isinstance(annotation, _OptionalArray) and value is None:
        return ti.template()
    if annotation is not ti.Tensor:
        return annotation
    return ti.template() if isinstance(value, Field) else ndarray_type.NdarrayType()


def is_reference(annotation: object) -> bool:
    """Whether an argument of a function is passed by reference."""
    return isinstance(annotation, (primitive_types.RefType, ArgPackType))


def is_template(annotation: object) -> bool:
    """Whether an argument is put into the kernel as it is."""
    return annotation is ti.template or isinstance(annotation, ti.template)
