"""Kernels and functions: their source and arguments, how Taichi walks them, and kernels traced from another tree."""

# Taichi declares attributes as None that have a value once there is a program and a kernel.
# pyright: reportOptionalMemberAccess=false

from __future__ import annotations

import ast
import contextlib
import re
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from taichi_ext import host
from taichi_ext.backend.captures import Captures, noting
from taichi_ext.backend.expressions import DataType, is_host_arch, source_location
from taichi_ext.backend.lifetime import Uses
from taichi_ext.backend.threads import exclusive
from taichi_ext.host import (
    RUNTIME,
    ASTResolver,
    ASTTransformer,
    AutodiffMode,
    Func,
    Kernel,
    mesh,
    position,
    primitive_types,
    ti,
)

SECTIONS = ("graph_do_while", "graph_parallel", "graph_parallel_context", "stream_parallel", "checkpoint")
STATIC_CALLS = (ti.static, ti.static_assert, ti.grouped, ti.ndrange, *(vars(ti)[n] for n in SECTIONS if n in vars(ti)))


def resolves_to_static_call(node: ast.AST, scope: Mapping[str, object]) -> str:
    """``static``, ``grouped``, ``ndrange`` ... when node is a call of that name in scope, else an empty string."""
    if isinstance(node, ast.Call):
        for wanted in STATIC_CALLS:
            if ASTResolver.resolve_to(node.func, wanted, scope):
                return wanted.__name__
    return ""


def source_of(function: types.FunctionType) -> tuple[str, list[str], int]:
    """File, source lines and first line number."""
    file = host.getsourcefile(function)
    lines, start = host.getsourcelines(function)
    return file, [line.expandtabs(4).rstrip() for line in lines], start


def taichi_func(function: Any) -> Func | None:
    """The ``Func`` behind a ``@ti.func``, looking through wrappers such as Taichi's own precondition checks."""
    seen = 0
    while seen < 8:
        function = (host.bound(function) or (function,))[0]
        func = host.func_of(function)
        if func is not None:
            return func
        if not hasattr(function, "__wrapped__"):
            return None
        function, seen = function.__wrapped__, seen + 1
    return None


# how fused kernels are compiled, whatever the settings of the program are
SETTINGS = {
    "cache_loop_invariant_global_vars": False,  # keeps S[0] in a register over a serial loop that stores to S[j]
    "cfg_optimization": False,  # drops a store to a local vector that is read after an inner loop
    "force_scalarize_matrix": False,  # makes a store for each number of a local array, also of those that never run
    "real_matrix_scalarize": True,  # without it, vectors in a fused kernel hold wrong values
}
# further settings, by the hazards of a kernel
HAZARDS = {
    # fields or array arguments have vectors or matrices as entries: Taichi aborts, or stores nothing, where such
    # entries are used before and after a parallel loop
    "vectors": {"force_scalarize_matrix": True},
    # an atomic operation on a component with an index that is only known at run time: with a constant, it aborts
    "indexed components": {"make_thread_local": False},
}
# with offline_cache=False, the key of a compiled kernel lacks its functions: another kernel's would run
FUNCTIONS_IN_KEY: dict[str, int] = {"offline_cache": True}
LONG = 800  # lines; for each value that such a kernel computes twice, Taichi would go over the whole kernel


def _settings_of(hazards: frozenset[str], lines: int) -> dict[str, int]:
    settings: dict[str, int] = {**SETTINGS}
    for hazard in sorted(hazards):
        settings |= HAZARDS[hazard]
    if lines > LONG:  # short ones run faster with it; in long ones LLVM finds such values soon enough
        settings["opt_level"] = 0
    return settings


@contextlib.contextmanager
def _settings(config: object, values: dict[str, int]) -> Iterator[None]:
    """Compile with other settings than the user's."""
    with exclusive:
        before = {name: getattr(config, name) for name in values}
        try:
            for name, value in values.items():
                setattr(config, name, value)
            yield
        finally:
            for name, value in before.items():
                setattr(config, name, value)


def careful_compilation(hazards: frozenset[str], lines: int = 0) -> contextlib.AbstractContextManager[None]:
    """Within the context, kernels are compiled without passes that Taichi 1.7.4 gets wrong.

    ``hazards`` are keys of ``HAZARDS``, ``lines`` is the length of the kernel.
    """
    return _settings(RUNTIME.program().config(), _settings_of(hazards, lines))


def with_functions_in_key() -> contextlib.AbstractContextManager[None]:
    """Within the context, traced functions are noted for the key by which Taichi finds a compiled kernel again."""
    return _settings(RUNTIME.program().config(), FUNCTIONS_IN_KEY)


class _DroppedError(Exception):
    """Raised while Taichi makes a kernel, so that it does not keep it."""


class FusedKernel(Kernel):
    """A kernel traced from a given tree rather than from a function's source; it is never found by name."""

    def __init__(self, primal: Kernel, *, hazards: frozenset[str] = frozenset()) -> None:
        host.put_attributes(self, primal)
        self.cpp = None
        self.compiled: object = None
        self.captures = Captures()
        self.uses = Uses()
        self.hazards = hazards  # keys of HAZARDS
        self.lines = 0  # of its text, where it was generated

    def noted(self) -> contextlib.AbstractContextManager[None]:
        """Take note of the Python values that are named in the meantime."""
        return noting(self.captures)

    def trace(self, tree: ast.Module, ctx: host.ASTTransformerContext, name: str, is_final: Callable[[], bool]) -> None:
        """Walk the tree once and keep the resulting kernel, not compiled to machine code before its first launch.

        Where ``is_final`` says no at the end of the walk, the kernel is dropped: a program keeps all others for ever.
        """
        runtime: Any = self.runtime

        def generate(kernel_cxx: Any) -> None:
            if runtime.inside_kernel:
                raise host.SyntaxFault("A Jacobian cannot be taken inside a kernel.")
            self.kernel_cpp = kernel_cxx
            with host.tracing(self, kernel_cxx, ctx):
                ctx.ast_builder = kernel_cxx.ast_builder()
                with self.noted():
                    host.walk_tree(tree, ctx)
                if not is_final():
                    raise _DroppedError

        with contextlib.suppress(_DroppedError):
            self.cpp = runtime.prog.create_kernel(generate, name, self.autodiff_mode)

    def compile(self) -> object:
        """Compile it to machine code, once, with settings that avoid faults of Taichi 1.7.4."""
        prog = self.runtime.prog
        if self.compiled is None:
            with careful_compilation(self.hazards, self.lines):
                self.compiled = host.compile_kernel(prog, self.cpp)
        return self.compiled

    def launch(self, *args: Any) -> Any:
        self.uses.check_not_ended()
        self.compile()
        return host.launch_fused(self, args)


def short_name(kernel: Kernel) -> str:
    """The name of a kernel, with that of its class, as messages call it."""
    return kernel.func.__qualname__.split("<locals>.")[-1]


def module_of(function: object) -> str:
    """The name of the module of a function or other callable, empty where it has none."""
    return getattr(function, "__module__", None) or ""


def is_library(function: object) -> bool:
    """Whether a function is one of Taichi's own."""
    return RUNTIME.owns(module_of(function))


def kernels_made() -> int:
    """How many kernels have been made so far."""
    return Kernel.counter


def is_kernel_since(kernel: Kernel, made: int) -> bool:
    """Whether a kernel was made after so many."""
    return kernel.kernel_counter >= made


_LIBRARY = f"{RUNTIME.name}._kernels"


def is_library_kernel(kernel: Kernel) -> bool:
    """Whether a kernel is one of Taichi's own."""
    return kernel.func.__module__ == _LIBRARY


def is_plain_call(kernel: Kernel) -> bool:
    """Whether a kernel takes only templates, returns and prints nothing, and can check nothing while it runs."""
    is_bare = len(kernel.template_slot_locations) == len(host.arguments(kernel)) and kernel.return_type is None
    return is_bare and not kernel.has_print and not RUNTIME.config().debug and is_host_arch()


def takes_numbers_alone(kernel: Kernel) -> bool:
    """Whether a kernel takes nothing but numbers, or nothing."""
    return not kernel.template_slot_locations and all(is_scalar_type(a.annotation) for a in host.arguments(kernel))


class RepeatedLaunch:
    """A launch of a compiled kernel that takes NumPy arrays and numbers, set up once to be made many times.

    Arguments ``given`` at the start, by position, are kept and passed to each launch; the others are given to each.
    """

    def __init__(self, fused: FusedKernel, given: Mapping[int, Any]) -> None:
        self._context = fused.cpp.make_launch_context()
        self._runtime = fused.runtime  # it drops its program at ti.init
        self._uses = fused.uses
        self._compiled = fused.compile()
        self._given = given
        self._set(given)

    def __call__(self, given: Mapping[int, object]) -> None:
        self._uses.check_not_ended()
        self._set(given)
        self._runtime.prog.launch_kernel(self._compiled, self._context)

    def _set(self, given: Mapping[int, Any]) -> None:
        for number, value in given.items():
            if isinstance(value, (int, float)):
                set_number = self._context.set_arg_int if isinstance(value, int) else self._context.set_arg_float
                set_number(position(number), value)
            else:
                address = value.__array_interface__["data"][0]
                shape = position(number), address, value.nbytes, value.shape, 0
                self._context.set_arg_external_array_with_shape(*shape)


NUMBER_FEATURE = "#"  # template key of a number, by which Taichi does not tell kernels apart


def program() -> Any:
    """The current Taichi program, None before ``ti.init``; it changes identity at each ``ti.init``."""
    return RUNTIME.program()


def return_shape(kernel: Kernel) -> tuple[int, ...]:
    """Shape of a kernel's return value: of one vector or matrix, or the number of scalars."""
    kinds: Any = kernel.return_type
    if len(kinds) == 1:
        kind = kinds[0]
        return tuple(kind.get_shape()) if isinstance(kind, host.MatrixType) else ()
    return (sum(k.n * k.m if isinstance(k, host.MatrixType) else 1 for k in kinds),)


_READING_KERNELS = ("tensor_to_ext_arr", "matrix_to_ext_arr", "ndarray_to_ext_arr", "ndarray_matrix_to_ext_arr")


def is_reading_kernel(kernel: Kernel) -> bool:
    """Whether a kernel is one of Taichi's own that copy a field or array out to the host."""
    return is_library_kernel(kernel) and kernel.func.__name__ in _READING_KERNELS


def is_fill(kernel: Kernel) -> bool:
    """Whether a kernel is Taichi's own that stores a number, vector or matrix to each entry of a field."""
    return is_library_kernel(kernel) and kernel.func.__name__ in ("fill_field", "field_fill_python_scope")


def return_dtype(kernel: Kernel) -> DataType | None:
    """The scalar type of a kernel's return value; None when it mixes types."""
    returned: Any = kernel.return_type
    if any(isinstance(k, host.StructType) for k in returned):
        return None
    kinds = [host.cook_dtype(k.dtype if isinstance(k, host.MatrixType) else k) for k in returned]
    return kinds[0] if all(k == kinds[0] for k in kinds) else None


def is_scalar_type(annotation: object) -> bool:
    return id(annotation) in primitive_types.type_ids


eig_function = ti.eig.__globals__["_eig2x2"]  # the ti.func behind ti.eig
randn_function = ti.randn.__globals__["_randn"]  # the ti.func behind ti.randn


def returned_types(kernel: Kernel) -> tuple[object, ...]:
    """The types of the results of a kernel or function; empty if it returns nothing."""
    return tuple(kernel.return_type or ())


def is_reverse(kernel: Kernel) -> bool:
    return kernel.autodiff_mode == AutodiffMode.REVERSE


def deactivated_node(kernel: Kernel, args: tuple[Any, ...]) -> ti.SNode | None:
    """The node that one of Taichi's own kernels deactivates as a whole; None for any other kernel."""
    names = ("snode_deactivate", "snode_deactivate_dynamic")
    return args[0] if is_library_kernel(kernel) and kernel.func.__name__ in names else None


def numpy_dtype_of_annotation(annotation: object) -> np.dtype:
    """The NumPy type of a scalar, vector or matrix argument."""
    dtype = annotation.dtype if isinstance(annotation, host.MatrixType) else annotation
    return np.dtype(host.to_numpy_type(host.cook_dtype(dtype)))


def known_in_kernels(function: Any) -> Any:
    """A Python function that kernels may call: Taichi takes it for one of its own."""
    setattr(function, host.MARKS[0], True)
    return function


def is_known_in_kernels(function: object) -> bool:
    """Whether a function is a kernel, a ``ti.func`` or one that kernels may call."""
    return any(hasattr(function, mark) for mark in host.MARKS)


def as_function(func: Func) -> object:
    """A ``Func`` as something that is called in a kernel by its name: a ti.func again."""

    def call(*args: object) -> Any:
        return func.__call__(*args)

    call.func = func  # type: ignore[attr-defined]
    setattr(call, host.MARKS[1], True)
    call.wrapper = func  # type: ignore[attr-defined]
    return call


def settings_text(hazards: frozenset[str], lines: int, *, has_functions: bool) -> str:
    """``careful_compilation`` as the text of a function that needs Taichi alone."""
    settings = _settings_of(hazards, lines) | (FUNCTIONS_IN_KEY if has_functions else {})
    return textwrap.dedent(f'''\
        @_contextlib.contextmanager
        def _careful_compilation():
            """Compile with settings that avoid faults of Taichi 1.7.4."""
            config = ti.lang.impl.get_runtime().prog.config()
            settings = {settings!r}
            before = {{name: getattr(config, name) for name in settings}}
            try:
                for name, value in settings.items():
                    setattr(config, name, value)
                yield
            finally:
                for name, value in before.items():
                    setattr(config, name, value)
        ''')


# Attributes and calls as Taichi evaluates them in a kernel; calls that are kept from adding statements.


def native_attribute(ctx: host.ASTTransformerContext, obj: Any, name: str) -> tuple[object, object]:
    """``obj.name`` as Taichi evaluates it in a kernel, and the object to pass first when it is called."""
    node: Any = ast.fix_missing_locations(ast.Attribute(value=ast.Constant(value=obj), attr=name, ctx=ast.Load()))
    ASTTransformer.build_Attribute(ctx, node)
    return node.ptr, (node,) if hasattr(node, "caller") else ()


def native_call(ctx: host.ASTTransformerContext, function: object, args: Any, keywords: Mapping[str, Any]) -> object:
    """``function(*args, **keywords)`` as Taichi evaluates it in a kernel."""
    match = re.search(r"line (\d+), in", source_location())
    line = int(match.group(1)) - ctx.lineno_offset if match else 1
    name = getattr(function, "__name__", "function")
    node = ast.Call(
        func=ast.Name(id=name, ctx=ast.Load()),  # by its name, which Taichi's warnings cite
        args=[ast.Constant(value=a) for a in args],
        keywords=[ast.keyword(arg=k, value=ast.Constant(value=v)) for k, v in keywords.items()],
        lineno=line,
        end_lineno=line,
    )
    ast.fix_missing_locations(node)  # the others have its line
    ctx.local_scopes.append({name: function})
    try:
        return ASTTransformer.build_Call(ctx, node)
    finally:
        ctx.local_scopes.pop()


def is_mesh_domain(x: object) -> bool:
    """Whether a loop over something is one over the elements of a mesh, or those next to an element."""
    return isinstance(x, (mesh.MeshElementField, mesh.MeshRelationAccessProxy))


def thread_functions(*modules: Any) -> list[object]:
    """The functions of modules such as ``ti.simt.warp``: of the threads of a GPU."""
    functions = [(module, f) for module in modules for f in vars(module).values() if isinstance(f, types.FunctionType)]
    return [f for module, f in functions if f.__module__ == module.__name__]


class SealedError(BaseException):
    """Raised where a function that is called sealed adds statements to the kernel: it may read or write anything."""


class _Seal:
    def __getattr__(self, name: str) -> object:
        raise SealedError


def sealed() -> contextlib.AbstractContextManager[None]:
    """Within the context, called functions may only compute expressions."""
    return host.sealed_with(_Seal())
