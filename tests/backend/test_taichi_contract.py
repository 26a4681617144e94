"""What ``taichi_ext/backend`` assumes about names of Taichi that are not public: one test per assumption.

Everything here is about Taichi alone.  A test that fails says what has changed in Taichi, and so what to look at in
``backend.py``.
"""

import ast
import functools
import inspect
import re
import subprocess
import sys
import threading
import time
import types
import weakref

import numpy as np
import pytest
import taichi as ti
import taichi.math as tm
from kernel_texts import func_of, kernel_of
from numpy.testing import assert_array_equal
from taichi import _kernels
from taichi._lib import core
from taichi.lang import impl, kernel_impl, matrix, matrix_ops, ops, util
from taichi.lang._ndarray import Ndarray, ScalarNdarray
from taichi.lang._ndrange import ndrange
from taichi.lang._wrap_inspect import getsourcefile, getsourcelines
from taichi.lang.any_array import AnyArray
from taichi.lang.argpack import ArgPack, ArgPackType
from taichi.lang.ast import ASTTransformerContext, transform_tree
from taichi.lang.ast.ast_transformer import ASTTransformer
from taichi.lang.ast.symbol_resolver import ASTResolver
from taichi.lang.enums import AutodiffMode
from taichi.lang.expr import Expr
from taichi.lang.field import ScalarField, SNodeHostAccess
from taichi.lang.kernel_arguments import KernelArgument
from taichi.lang.kernel_impl import Func, Kernel, _BoundedDifferentiableMethod, _get_global_vars
from taichi.lang.matrix import Matrix, MatrixType
from taichi.lang.struct import Struct, StructField, StructType
from taichi.lang.util import cook_dtype, to_numpy_type, to_taichi_type
from taichi.types import ndarray_type, primitive_types
from taichi.types.annotations import template
from taichi_program import initialise

from taichi_ext import backend
from taichi_ext.backend.opaque import tree_of
from taichi_ext.host import taichi as host

SCALE = 0.5

pytestmark = [
    pytest.mark.usefixtures("ti64"),
    pytest.mark.cpu_only("what Taichi does on the CPU"),
    pytest.mark.filterwarnings("ignore:.*Calling non-taichi function"),
]


def traced(function):
    """What a Python function gives when it is called while Taichi traces a kernel; the kernel is launched."""
    results = []

    def call():
        results.append(function())

    @ti.kernel
    def kernel_of_the_test():
        call()

    kernel_of_the_test()
    return results[0]


@pytest.mark.sweep
def test_version():
    assert ti.__version__[:2] == (1, 7), "taichi_ext is made for Taichi 1.7; go through all of this file"


# --- the runtime ------------------------------------------------------------------------------------------------------


def test_runtime_has_the_state_that_is_read():
    runtime = impl.get_runtime()
    names = ("prog", "default_fp", "default_ip", "inside_kernel", "current_kernel", "compiling_callable", "kernels")
    for name in (*names, "src_info_stack", "grad_replaced", "materialize"):
        assert hasattr(runtime, name), f"the runtime has no attribute {name!r} any more"
    assert runtime.default_fp == ti.f64
    assert runtime.default_ip == ti.i32
    assert not runtime.inside_kernel
    assert runtime.current_kernel is None
    assert not runtime.grad_replaced


def test_state_while_a_kernel_is_traced():
    def look():
        runtime = impl.get_runtime()
        return runtime.inside_kernel, impl.inside_kernel(), runtime.current_kernel, runtime.compiling_callable

    inside, also_inside, kernel, callable_ = traced(look)
    assert inside, "runtime.inside_kernel is not set while a kernel is traced"
    assert also_inside, "impl.inside_kernel() is not true while a kernel is traced"
    assert isinstance(kernel, Kernel), "runtime.current_kernel is not the kernel that is traced"
    assert kernel.func.__name__ == "kernel_of_the_test"
    assert callable_ is not None


def test_current_source_line_is_on_a_stack_of_texts():
    def look():
        return list(impl.get_runtime().src_info_stack)

    stack = traced(look)
    assert stack, "runtime.src_info_stack is empty while a kernel is traced"
    assert all(isinstance(text, str) for text in stack), "runtime.src_info_stack no longer holds texts"
    match = re.match(r'File ".*test_taichi_contract\.py", line (\d+), in kernel_of_the_test:\n', stack[-1])
    assert match, f"the form of a source position has changed: {stack[-1]!r}"
    assert "call()" in stack[-1], "a source position no longer shows the statement"
    assert impl.get_runtime().src_info_stack == [], "runtime.src_info_stack is not empty after a trace"
    core.DebugInfo(stack[-1])


@pytest.mark.sweep
def test_program_changes_with_init():
    before = weakref.ref(impl.get_runtime().prog)
    initialise(default_fp=ti.f64)
    assert before() is None, "ti.init keeps the program"
    ti.reset()
    assert impl.get_runtime().prog is None, "there is a program without ti.init"
    initialise(default_fp=ti.f64)


def test_configuration():
    configuration = impl.current_cfg()
    assert configuration.arch in (ti.x64, ti.arm64)
    assert configuration.cpu_max_num_threads > 0
    assert configuration.debug is False
    assert core.arch_name(configuration.arch) in ("x64", "arm64")
    assert core.Arch.cuda == ti.cuda


# --- expressions ------------------------------------------------------------------------------------------------------


def test_expressions_tell_their_type_and_shape():
    v = ti.Vector.field(3, ti.f32, shape=2)
    v.fill(1.0)

    def look():
        scalar, vector = Expr(2.5), impl.subscript(builder(), v, 0)
        return scalar.ptr.is_tensor(), vector.ptr.is_tensor(), list(vector.ptr.get_shape()), types_of(scalar, vector)

    is_tensor, is_vector, shape, (dtype, element) = traced(look)
    assert not is_tensor
    assert is_vector, "an entry of a vector field is no longer one tensor expression"
    assert shape == [3]
    assert dtype == ti.f64, "a float literal in a kernel no longer has default_fp"
    assert element == ti.f32, "get_rvalue_type().element_type() is not the type of the entries"


def builder():
    return impl.get_runtime().compiling_callable.ast_builder()


def types_of(scalar, vector):
    return scalar.ptr.get_rvalue_type(), vector.ptr.get_rvalue_type().element_type()


def test_literals_of_an_exact_type():
    def look():
        return [Expr(1.0, dtype=t).ptr.get_rvalue_type() for t in (ti.f16, ti.f32, ti.f64)], Expr(1, dtype=ti.i64)

    reals, integer = traced(look)
    assert reals == [ti.f16, ti.f32, ti.f64], "Expr(x, dtype=...) does not make a literal of that type"
    assert integer.ptr.get_rvalue_type() == ti.i64


def test_types_of_operations_promote():
    assert core.promoted_type(ti.f32, ti.f64) == ti.f64
    assert core.promoted_type(ti.i32, ti.f32) == ti.f32
    assert ti.f64 in primitive_types.real_types
    assert ti.i32 in primitive_types.integer_types
    assert ti.u1 == primitive_types.u1
    assert id(ti.f32) in primitive_types.type_ids
    assert id(ti.f32) in primitive_types.real_type_ids
    assert id(ti.i32) not in primitive_types.real_type_ids
    assert cook_dtype(float) == ti.f64
    assert to_numpy_type(ti.f32) is np.float32
    assert to_taichi_type(np.dtype(np.float64)) == ti.f64
    assert isinstance(ti.f32, core.DataType)


def test_reference_arguments_are_a_type_of_their_own():
    assert isinstance(ti.ref(ti.f64), primitive_types.RefType)


def emitted(function, values=(3.0, 5.0), size=4):
    """Entries of an output field after code was emitted by a Python function of an input and an output field."""
    x, y = ti.field(ti.f64, shape=len(values)), ti.field(ti.f64, shape=size)
    x.from_numpy(np.array(values))
    entry = lambda field, *index: impl.subscript(builder(), field, *index)
    call = lambda: function(functools.partial(entry, x), functools.partial(entry, y))
    kernel_of("call()", call=call)()
    return y.to_numpy()


def test_matrices_are_made_row_by_row():
    def emit(x, y):
        made = impl.expr_init(matrix.make_matrix_with_shape([x(0), x(1), Expr(1.0), Expr(2.0)], [2, 2], ti.f64))
        y(0)._assign(impl.subscript(builder(), made, 0, 1))
        y(1)._assign(impl.subscript(builder(), made, 1, 0))

    assert_array_equal(emitted(emit)[:2], [5.0, 1.0])


@pytest.mark.sweep
def test_loops_can_be_emitted():
    def emit(x, y):
        b = builder()
        with_if = Expr(b.make_id_expr(""))
        b.begin_frontend_range_for(with_if.ptr, Expr(0).ptr, Expr(4).ptr, core.DebugInfo(""))
        y(with_if)._assign(ops.cast(with_if, ti.f64) * x(0))
        b.end_frontend_range_for()

    assert_array_equal(emitted(emit), [0.0, 3.0, 6.0, 9.0])


def test_most_threads_of_a_gpu():
    """How many threads a CUDA kernel has at most is part of the configuration; 0 until Taichi has a device."""
    configuration = impl.current_cfg()
    assert configuration.saturating_grid_dim >= 0


# --- the walk over the source -----------------------------------------------------------------------------------------


def context_for(function, tree, scope, arguments):
    """A context as ``backend.make_context`` makes it for a function that is inlined."""
    names = list(inspect.signature(function).parameters)
    owner = types.SimpleNamespace(
        func=function,
        arguments=[KernelArgument(template(), name, inspect.Parameter.empty) for name in names],
        return_type=None,
        has_print=False,
    )
    lines, start = getsourcelines(function)
    return ASTTransformerContext(
        excluded_parameters=(),
        is_kernel=False,
        func=owner,
        arg_features=None,
        global_vars=scope,
        argument_data=arguments,
        src=lines,
        start_lineno=start,
        file=getsourcefile(function),
        ast_builder=builder(),
    )


def walk_in_kernel(text, scope, arguments=()):
    """Walk a function given as text, in a kernel; gives what it returns and the context."""

    def place(*names):
        pass

    tree = ast.parse(text)
    names = [a.arg for a in tree.body[0].args.args]
    function = eval(f"lambda {', '.join(names)}: None")
    function.__code__ = function.__code__.replace(co_firstlineno=place.__code__.co_firstlineno)

    def call():
        context = context_for(place, tree, scope, list(arguments))
        context.func.arguments = [KernelArgument(template(), name, inspect.Parameter.empty) for name in names]
        context.src = ["def place(*names):\n"] * 50
        transform_tree(tree, context)
        return context.return_data, context

    return traced(call)


def test_a_tree_can_be_walked_with_a_scope_of_its_own():
    value, context = walk_in_kernel("def f(a):\n    b = a\n    return g(b)", {"g": lambda v: ("seen", v)}, [3])
    assert value[0] == "seen", "transform_tree no longer evaluates calls of Python functions in the given scope"
    assert context.local_scopes is not None
    assert callable(context.is_in_static_scope)
    assert isinstance(context.lineno_offset, int)


def test_contexts_hold_variables_by_name():
    seen = {}

    def look(context):
        context.create_variable("made", 5)
        seen["declared"] = context.is_var_declared("made"), context.is_var_declared("missing")
        seen["value"] = context.get_var_by_name("made")
        seen["scopes"] = [dict(scope) for scope in context.local_scopes]
        seen["arguments"] = list(context.kernel_args)

    def call():
        def place():
            pass

        context = context_for(place, None, {}, [])
        with context.variable_scope_guard():
            look(context)

    traced(call)
    assert seen["declared"] == (True, False)
    assert seen["value"] == 5
    assert seen["scopes"][-1] == {"made": 5}, "local variables are no longer kept in context.local_scopes by name"
    assert seen["arguments"] == []


class Opaque:
    """An object that Taichi does not know."""

    _data_oriented = True

    def __init__(self):
        self.x = 4.0


def test_constants_may_hold_any_object():
    thing = Opaque()

    def call():
        def place():
            pass

        context = context_for(place, None, {}, [])
        position = {"lineno": 1, "col_offset": 0, "end_lineno": 1, "end_col_offset": 0}
        attribute = ast.Attribute(value=ast.Constant(value=thing, **position), attr="x", ctx=ast.Load(), **position)
        ASTTransformer.build_Attribute(context, attribute)
        function = ast.Constant(value=lambda a, b=0: (a, b), **position)
        arguments = [ast.Constant(value=thing, **position)]
        keywords = [ast.keyword(arg="b", value=ast.Constant(value=3, **position), **position)]
        result = ASTTransformer.build_Call(
            context, ast.Call(func=function, args=arguments, keywords=keywords, **position)
        )
        return attribute.ptr, result

    value, result = traced(call)
    assert value == 4.0, "build_Attribute no longer leaves its value in node.ptr"
    assert result == (thing, 3), "build_Call no longer returns the value of a call of constant nodes"


def test_methods_of_matrices_are_in_one_module():
    assert hasattr(matrix_ops, "norm"), "matrix methods are no longer found in matrix_ops"
    assert not hasattr(matrix_ops, "xy")


def test_swizzles_are_listed():
    table = Matrix._swizzle_to_keygroup
    assert "xyzw".startswith(tuple(table["xy"])[:2][0])
    for name, numbers in (("xy", [0, 1]), ("zyx", [2, 1, 0]), ("bgr", [2, 1, 0]), ("w", [3]), ("ts", [1, 0])):
        assert [table[name].index(c) for c in name] == numbers, f"the swizzle {name!r} is listed differently"
    assert "norm" not in table


def test_static_calls_are_recognised_by_name():
    scope = {"ti": ti, "s": ti.static}
    resolves = lambda text, wanted: ASTResolver.resolve_to(ast.parse(text, mode="eval").body, wanted, scope)
    assert resolves("ti.static", impl.static)
    assert resolves("s", impl.static)
    assert resolves("ti.grouped", impl.grouped)
    assert resolves("ti.ndrange", ndrange)
    assert resolves("ti.static_assert", impl.static_assert)
    assert not resolves("ti.sin", impl.static)
    assert not resolves("missing.name", impl.static)


def test_names_are_resolved_in_globals_and_closures():
    captured = 3

    def function():
        return captured, tm

    scope = _get_global_vars(function)
    assert scope["captured"] == 3
    assert scope["tm"] is tm


def test_source_of_a_function():
    def function(a):
        return a

    lines, start = getsourcelines(function)
    assert [line.strip() for line in lines] == ["def function(a):", "return a"]
    assert start == function.__code__.co_firstlineno
    assert getsourcefile(function).endswith("test_taichi_contract.py")
    scope = {}
    exec(compile("def made():\n    return 0\n", "<generated>", "exec"), scope)
    with pytest.raises((OSError, TypeError)):
        getsourcelines(scope["made"])


# --- functions and kernels --------------------------------------------------------------------------------------------


def test_decorated_functions_show_what_they_wrap():
    plain = func_of("plain(a): return a")

    @ti.real_func
    def real(a: ti.f64) -> ti.f64:
        return a

    assert isinstance(plain.func, Func), "a ti.func no longer has its Func as .func"
    assert plain.func.func.__name__ == "plain"
    assert not plain.func.is_real_function
    assert real.func.is_real_function
    assert list(real.func.return_type) == [ti.f64]
    assert isinstance(ti.eig.__globals__["_eig2x2"].func, Func), "ti.eig is built differently"


@pytest.mark.sweep
@pytest.mark.cpu_only("real functions do not compile on Vulkan")
@pytest.mark.parametrize("is_noted", [True, False])
def test_the_key_of_a_kernel_has_its_functions_where_they_are_traced_with_the_offline_cache(is_noted):
    initialise(default_fp=ti.f64)  # nothing cached on disk
    config = impl.get_runtime().prog.config()

    def made(number):
        y = ti.field(ti.f64, 4)

        @ti.real_func
        def one(i: ti.i32):
            y[i] = number

        k = kernel_of("for i in range(4): one(i)", one=one)
        config.offline_cache = is_noted
        k()
        config.offline_cache = False
        return y.to_numpy()

    assert_array_equal(made(1.0), np.full(4, 1.0))
    assert_array_equal(made(2.0), np.full(4, 2.0 if is_noted else 0.0), "with_functions_in_key is no longer needed")


def test_functions_of_taichi_s_library_are_taichi_functions():
    for function in (tm.length, tm.mix, tm.smoothstep, tm.reflect, ti.polar_decompose, ti.svd, ti.sym_eig):
        found = function
        for _ in range(8):
            if isinstance(getattr(found, "func", None), Func) or not hasattr(found, "__wrapped__"):
                break
            found = found.__wrapped__
        is_function = isinstance(getattr(found, "func", None), Func) or inspect.isfunction(found)
        assert is_function, f"{function} is wrapped differently"


def test_a_function_is_called_through_its_func():
    f = func_of("f(a): return a * 2.0")
    y = ti.field(ti.f64, shape=())
    calls = []

    def instead(*args):
        calls.append(args)
        return Func.__call__(f.func, *args)

    f.func.__call__ = instead
    k = kernel_of("y[None] = f(3.0)", y=y, f=f)
    k()
    assert len(calls) == 1, "a decorated ti.func no longer looks up __call__ on its Func"
    assert y[None] == 6.0


def test_decorated_kernels_show_what_they_wrap():
    @ti.data_oriented
    class Owner:
        @ti.kernel
        def method(self, a: ti.f64):
            pass

        @staticmethod
        @ti.kernel
        def static(a: ti.f64):
            pass

    @ti.kernel
    def k(a: ti.f64, t: ti.template(), v: ti.types.vector(2, ti.f32)) -> (ti.f64, ti.types.matrix(2, 3, ti.f32)):
        return 1.0, ti.Matrix.zero(ti.f32, 2, 3)

    assert k._is_wrapped_kernel
    primal = k._primal
    assert isinstance(primal, Kernel)
    assert primal.func.__name__ == "k"
    assert [a.name for a in primal.arguments] == ["a", "t", "v"]
    assert list(primal.template_slot_locations) == [1]
    assert isinstance(primal.arguments[1].annotation, template)
    scalar, pair = primal.return_type
    assert scalar == ti.f64
    assert (pair.n, pair.m, pair.ndim, pair.dtype) == (2, 3, 2, ti.f32)
    assert isinstance(pair, MatrixType)
    owner = Owner()
    bound, static = owner.method, owner.static
    assert isinstance(bound, _BoundedDifferentiableMethod)
    assert bound._kernel_owner is owner
    assert isinstance(bound._primal, Kernel)
    assert not bound._is_staticmethod
    assert getattr(static, "_is_staticmethod", True), "static kernels are bound differently"
    assert Owner.method._primal is bound._primal
    for function in (k, Owner.method):
        assert function.__code__ in host._DECORATED, "decorated kernels have another code"
    assert functools.wraps(k)(lambda: None).__code__ not in host._DECORATED


def test_kernels_have_the_attributes_that_a_fused_kernel_sets():
    k = kernel_of("pass", "")
    given = set(vars(k._primal))
    fused = set(vars(backend.FusedKernel(k._primal)))
    assert not given - fused, f"Kernel has new attributes: {given - fused}"
    assert fused - given == {"cpp", "compiled", "hazards", "captures", "lines", "uses"}, (
        f"Kernel has lost attributes: {fused - given}"
    )
    assert list(inspect.signature(Kernel.__init__).parameters)[1:] == ["_func", "autodiff_mode", "_classkernel"]
    source = inspect.getsource(Kernel.__init__)
    assert "impl.get_runtime().kernels.append(self)" in source, "kernels are registered differently"


def test_kernels_are_created_and_launched_in_two_steps():
    y = ti.field(ti.f64, shape=())
    steps = []
    k = kernel_of("y[None] = 1.0", y=y)
    k()
    primal = k._primal

    def generate(kernel_cxx):
        steps.append("traced")
        runtime = impl.get_runtime()
        runtime.inside_kernel, runtime.current_kernel, runtime.compiling_callable = True, primal, kernel_cxx
        try:
            with runtime.src_info_guard("the place of a statement"):
                impl.subscript(builder(), y, None)._assign(Expr(5.0))
        finally:
            runtime.inside_kernel, runtime.current_kernel, runtime.compiling_callable = False, None, None

    created = impl.get_runtime().prog.create_kernel(generate, "made_by_hand", AutodiffMode.NONE)
    assert steps == ["traced"], "create_kernel no longer traces at once"
    assert y[None] == 1.0, "create_kernel launches"
    assert list(inspect.signature(Kernel.launch_kernel).parameters)[:2] == ["self", "t_kernel"]
    primal.launch_kernel(created)
    assert y[None] == 5.0


def test_a_launch_can_be_repeated_with_its_context():
    count = kernel_of("for i in a: a[i] += i", "a: ti.types.ndarray(ndim=1)")
    values = np.zeros(3)
    count(values)
    kernel = count._primal
    (compiled,) = kernel.compiled_kernels.values()
    context = compiled.make_launch_context()
    context.set_arg_external_array_with_shape((0,), int(values.ctypes.data), values.nbytes, values.shape, 0)
    prog = impl.get_runtime().prog
    data = prog.compile_kernel(prog.config(), prog.get_device_caps(), compiled)
    for _ in range(2):
        prog.launch_kernel(data, context)
    np.testing.assert_array_equal(values, [0.0, 3.0, 6.0])


def test_values_of_python_are_named_by_two_kinds_of_nodes():
    """The builders of names and attributes see each Python value that a kernel is compiled with, once for its object."""

    @ti.data_oriented
    class Owner:
        def __init__(self):
            self.dt, self.y = 2.0, ti.field(ti.f64, 1)

        @ti.kernel
        def k(self):
            for i in self.y:
                self.y[i] = self.dt * SCALE

    owner, kernel = Owner(), Owner.k._primal
    owner.k()
    owner.dt = 3.0
    owner.k()
    assert owner.y[0] == 2.0 * SCALE
    features = backend.argument_features(kernel, (owner,))
    assert list(kernel.mapper.mapping) == [features]
    noted = backend.first_captures(kernel, features, backend.Captures())
    (number, scale) = sorted((c for c in noted._all.values() if c.is_number), key=lambda c: c.text, reverse=True)
    assert (number.text, number.value, number.read()) == ("self.dt", 2.0, 3.0)
    assert (scale.text, scale.value) == ("SCALE", SCALE)
    assert "self.y[i] = self.dt * SCALE" in number.place
    assert noted.changed() is number


def run_with(config, kernel, *args, **settings):
    """Launch a kernel for the first time, compiled with other settings."""
    before = {name: getattr(config, name) for name in settings}
    for name, value in settings.items():
        setattr(config, name, value)
    try:
        kernel(*args)
    finally:
        for name, value in before.items():
            setattr(config, name, value)


@pytest.mark.sweep
def test_flow_optimisation_can_be_turned_off_for_one_compilation():
    """With the option, Taichi 1.7.4 drops the second store to u."""
    config = impl.current_cfg()
    assert config.cfg_optimization is True
    w = ti.field(ti.f64, 2)
    w.from_numpy(np.array([0.5, 0.25]))

    def make():
        @ti.kernel
        def k(a: ti.types.ndarray(dtype=ti.f64, ndim=1), o: ti.types.ndarray(dtype=ti.f64, ndim=1)):
            for x in range(3):
                t, s = 0.0, ti.Vector([0.0, 0.0])
                for i in range(2):
                    u = ti.Vector([1.0 + x, 2.0]) + w[i]
                    r = 1.0 / u[0]
                    for j in range(2):
                        s[j] = s[j] + r * a[j]
                    u = ti.Vector([3.0 + x, 5.0]) - w[i]
                    t += w[i] / u[0]
                o[x] = s[0] + s[1] + t

        return k

    a, x = np.array([1.0, 2.0]), np.arange(3)
    right = 3 / (1.5 + x) + 3 / (1.25 + x) + 0.5 / (2.5 + x) + 0.25 / (2.75 + x)
    plain, careful = np.zeros(3), np.zeros(3)
    make()(a, plain)
    run_with(config, make(), a, careful, cfg_optimization=False)
    np.testing.assert_allclose(careful, right)
    assert not np.allclose(plain, right), "Taichi no longer needs cfg_optimization off"


VECTORS_BEFORE_AND_AFTER_A_LOOP = """
import taichi as ti
ti.init(arch=ti.cpu, log_level=ti.CRITICAL, offline_cache=False, force_scalarize_matrix={})
a, y = ti.Vector.ndarray(2, ti.f32, 4), ti.field(ti.f32, 6)

@ti.kernel
def k(a: ti.types.ndarray(ti.types.vector(2, ti.f32), ndim=1)):
    a[1][0] = 1.0
    for i in y:
        y[i] = 1.0
    a[1][0] = 2.0

k(a)
assert a[1][0] == 2.0
"""


@pytest.mark.mostly_sweep("False")
@pytest.mark.parametrize("is_scalarized", [True, False])
def test_vectors_in_arrays_need_to_be_scalarized_early(is_scalarized, tmp_path):
    """Else Taichi 1.7.4 keeps their address from one task to the next and aborts."""
    program = tmp_path / "program.py"
    program.write_text(VECTORS_BEFORE_AND_AFTER_A_LOOP.format(is_scalarized))
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=900)
    assert (done.returncode == 0) == is_scalarized, done.stderr


START = """
import numpy as np
import taichi as ti
ti.init(arch=ti.cpu, log_level=ti.CRITICAL, offline_cache=False, default_fp=ti.f64, {settings})
y = ti.field(ti.f64, 2)
"""
FAULTS = {
    "component, then another": """
@ti.kernel
def k(v: ti.types.ndarray(ti.types.vector(3, ti.f64), ndim=1)):
    for i in range(2):
        if i < 1:
            y[i] = v[i][i]
        v[i][2] += 1.0

v = np.ones((2, 3))
k(v)
assert v.tolist() == [[1.0, 1.0, 2.0]] * 2 and y[0] == 1.0
""",
    "component, then the matrix": """
M = ti.Matrix.field(3, 3, ti.f64, shape=2)
M.fill(2.0)

@ti.kernel
def k():
    for i in range(2):
        L = ti.Matrix.zero(ti.f64, 3, 3)
        for a in range(3):
            L[a, a] = M[i][a, 1]
        M[i] = L

k()
assert (M.to_numpy() == 2.0 * np.eye(3)).all()
""",
}
RETURNED_STRUCT = """
V = {vector}
S = ti.types.struct(v=V)

@ti.real_func
def of(a: float) -> S:
    return S(v=V(a, a, a))

@ti.kernel
def k():
    for i in y:
        y[i] = of(2.0).v[0]

k()
assert y[1] == 2.0
"""


def ends_well(text, folder):
    """Whether a program of its own ends without an error."""
    program = folder / "program.py"
    program.write_text(text)
    return subprocess.run([sys.executable, str(program)], capture_output=True, timeout=900).returncode == 0


@pytest.mark.sweep
@pytest.mark.parametrize("is_scalarized", [True, False])
@pytest.mark.parametrize("name", FAULTS)
def test_components_found_at_run_time_need_to_be_scalarized_early(name, is_scalarized, tmp_path):
    """Else Taichi 1.7.4 aborts."""
    start = START.format(settings=f"force_scalarize_matrix={is_scalarized}")
    assert ends_well(start + FAULTS[name], tmp_path) == is_scalarized


@pytest.mark.sweep
@pytest.mark.parametrize("vector", ["ti.math.vec3", "ti.types.vector(3, ti.f64)"])
def test_a_vector_of_the_default_type_in_a_struct_that_a_function_returns(vector, tmp_path):
    """``ti.math.vec3`` is made before the default is float64: Taichi 1.7.4 aborts."""
    text = START.format(settings="") + RETURNED_STRUCT.format(vector=vector)
    assert ends_well(text, tmp_path) == (vector != "ti.math.vec3")


@pytest.mark.sweep
def test_vectors_in_fields_need_to_be_scalarized_early():
    """Where an index is only known at run time, Taichi 1.7.4 reads other entries from elsewhere."""
    config = impl.current_cfg()
    v, y = ti.Vector.field(3, ti.f64, shape=2), ti.field(ti.f64, shape=2)
    values = np.array([[0.3, -0.7, 0.2], [0.9, 0.4, -0.5]])
    v.from_numpy(values)

    def make():
        k = kernel_of("for i in range(2): y[i] = v[i][i] + (v[i][0] + v[i][1] + v[i][2])", y=y, v=v)
        return k

    right = values[[0, 1], [0, 1]] + values.sum(axis=1)
    make()()
    plain = y.to_numpy()
    run_with(config, make(), force_scalarize_matrix=True)
    np.testing.assert_allclose(y.to_numpy(), right)
    assert not np.allclose(plain, right), "Taichi no longer needs force_scalarize_matrix for fields"


def test_global_values_in_registers_can_be_turned_off_for_one_compilation():
    """With the option, Taichi 1.7.4 keeps a[0] in a register over the loop that stores to a[j]."""
    config = impl.current_cfg()
    assert config.cache_loop_invariant_global_vars is True

    @ti.kernel
    def double_and_add(a: ti.types.ndarray(dtype=ti.f64, ndim=1)):
        ti.loop_config(serialize=True)
        for _ in range(2):
            for j in range(5):
                a[j] = a[j] * 2.0
            a[0] = a[0] + 1.0

    values = np.ones(5)
    config.cache_loop_invariant_global_vars = False
    try:
        double_and_add(values)
    finally:
        config.cache_loop_invariant_global_vars = True
    np.testing.assert_array_equal(values, [7.0, 4.0, 4.0, 4.0, 4.0])
    double_and_add(values)  # compiled once
    np.testing.assert_array_equal(values[0], 31.0)


def test_template_keys_of_arrays():
    @ti.kernel
    def k(a: ti.types.ndarray(ti.f64, ndim=1)):
        pass

    expected = (ti.f64, 1, False, ndarray_type.NdarrayType(ndim=1).boundary)
    (feature,) = k._primal.mapper.extract((ti.ndarray(ti.f64, shape=3),))
    assert tuple(feature) == expected, f"the template key of an array is {feature} now"
    (of_numpy,) = k._primal.mapper.extract((np.zeros(3),))
    assert tuple(of_numpy)[1:] == expected[1:], f"the template key of a NumPy array is {of_numpy} now"
    assert to_taichi_type(of_numpy[0]) == ti.f64


def test_a_real_function_whose_compilation_fails_counts_as_compiled():
    def refuse():
        raise ti.TaichiCompilationError("refused")

    @ti.real_func
    def broken() -> ti.f64:
        refuse()
        return 1.0

    k = kernel_of("k() -> ti.f64: return broken()", broken=broken)
    function = broken.func
    assert list(inspect.signature(Func.do_compile).parameters) == ["self", "key", "args", "arg_features"]
    with pytest.raises(ti.TaichiCompilationError, match="refused"):
        k()
    assert list(function.compiled) == list(function.taichi_functions) == [0], "no need to take it out of the tables"
    assert function.func_id < Func.function_counter
    impl.get_runtime().compiling_callable = None


def test_kernels_are_compiled_into_a_table_by_materialize():
    k = kernel_of("pass", "")
    assert list(inspect.signature(Kernel.materialize).parameters)[:4] == ["self", "key", "args", "arg_features"]
    primal = k._primal
    assert primal.compiled_kernels == {}
    k()
    assert len(primal.compiled_kernels) == 1, "kernels are no longer compiled into compiled_kernels"
    primal.compiled_kernels.clear()
    k()
    assert len(primal.compiled_kernels) == 1, "a kernel that was taken out is not compiled anew"


def test_arguments_are_brought_into_order():
    @ti.kernel
    def k(a: ti.f64, b: ti.i32):
        pass

    assert list(kernel_impl._process_args(k._primal, (1.0,), {"b": 2})) == [1.0, 2]


def test_gradient_kernels_are_told_by_their_mode():
    x = ti.field(ti.f64, shape=(), needs_grad=True)
    y = ti.field(ti.f64, shape=(), needs_grad=True)
    modes = []

    def look():
        modes.append(impl.get_runtime().current_kernel.autodiff_mode)

    k = kernel_of("look(); y[None] = x[None] * 2.0", look=look, y=y, x=x)
    k()
    k.grad()
    assert modes == [AutodiffMode.NONE, AutodiffMode.REVERSE]
    assert isinstance(k.grad, Kernel), "kernel.grad is no longer a Kernel"
    assert AutodiffMode.FORWARD != AutodiffMode.REVERSE
    assert any(kernel is k.grad for kernel in impl.get_runtime().kernels), "runtime.kernels does not list all kernels"


def test_grad_replaced_is_set_while_such_a_function_runs():
    seen = []

    @ti.ad.no_grad
    def run():
        seen.append(impl.get_runtime().grad_replaced)

    run()
    assert seen == [True]


# --- fields and arrays ------------------------------------------------------------------------------------------------


def test_numbers_of_trees_are_given_again_and_those_of_nodes_are_not():
    numbers = []
    for _ in range(2):
        field, builder = ti.field(ti.f64), ti.FieldsBuilder()
        builder.dense(ti.i, 3).place(field)
        tree = builder.finalize()
        numbers.append((tree.id, tree_of(field.snode.ptr), field.snode.ptr.id))
        tree.destroy()
    (first, first_of_node, node), (second, second_of_node, other) = numbers
    assert first == first_of_node == second == second_of_node
    assert node != other


def test_fields_list_their_components():
    scalar, pair = ti.field(ti.f64, shape=2), ti.Matrix.field(2, 3, ti.f32, shape=2)
    assert len(scalar.vars) == 1
    assert len(pair.vars) == 6
    assert pair.vars[5] is pair.get_scalar_field(1, 2).vars[0], "components are no longer listed row by row"
    assert (pair.n, pair.m, pair.ndim) == (2, 3, 2)
    assert isinstance(scalar, ScalarField)
    assert "other" not in pair.vars[0].__dict__, "what a component is noted on is a Python object with attributes"
    structure = ti.Struct.field({"a": ti.f64, "b": ti.types.vector(2, ti.f64)}, shape=2)
    assert isinstance(structure, StructField)
    assert list(structure.field_dict) == ["a", "b"]


def test_layout_can_be_walked():
    builder_of_fields, a, b = ti.FieldsBuilder(), ti.field(ti.f64), ti.field(ti.f64)
    assert a.vars[0].ptr.snode() is None, "a field that is not placed has a node"
    pointer = builder_of_fields.pointer(ti.i, 4)
    pointer.dense(ti.i, 2).place(a, offset=(3,))
    builder_of_fields.dynamic(ti.i, 8).place(b)
    tree = builder_of_fields.finalize()
    kinds, node = [], a.vars[0].ptr.snode().parent
    while node is not None and node.type != core.SNodeType.root:
        kinds.append(node.type)
        node = node.parent
    assert kinds == [core.SNodeType.dense, core.SNodeType.pointer], "the nodes of a layout are linked differently"
    assert node is not None
    assert tuple(a.vars[0].ptr.snode().offset) == (3,)
    assert tuple(b.vars[0].ptr.snode().offset) == ()
    assert b.vars[0].ptr.snode().parent.type == core.SNodeType.dynamic
    assert pointer.ptr.id == a.vars[0].ptr.snode().parent.parent.id, "nodes are numbered differently"
    tree.destroy()


def test_python_s_writes_and_reads_of_fields_go_through_known_doors(monkeypatch):
    scalar, vector = ti.field(ti.f64, shape=3), ti.Vector.field(2, ti.f64, shape=3)
    array, of_vectors = ti.ndarray(ti.f64, shape=3), ti.Vector.ndarray(2, ti.f64, shape=3)
    seen = []

    def spy(owner, name):
        original = getattr(owner, name)

        def stand_in(*args):
            seen.append((name, args))
            return original(*args)

        monkeypatch.setattr(owner, name, stand_in)

    doors = [(ScalarField, "__setitem__"), (ScalarField, "__getitem__"), (ScalarNdarray, "__setitem__")]
    for owner, name in [*doors, (Ndarray, "fill"), (matrix, "_write_host_access"), (matrix, "_read_host_access")]:
        spy(owner, name)

    def through(action):
        seen.clear()
        action()
        return [name for name, _ in seen]

    assert through(lambda: scalar.__setitem__(1, 2.0)) == ["__setitem__"]
    assert through(lambda: scalar[1]) == ["__getitem__"]
    assert through(lambda: array.__setitem__(1, 2.0)) == ["__setitem__"]
    assert through(lambda: array.fill(2.0)) == ["fill"]
    assert "_write_host_access" in through(lambda: vector[1].__setitem__(0, 2.0))
    access = seen[[name for name, _ in seen].index("_write_host_access")][1][0]
    assert isinstance(access, SNodeHostAccess)
    assert access.accessor is vector.host_accessors[0], "an access no longer names the accessor of its component"
    assert tuple(access.key)[:1] == (1,)
    assert "_write_host_access" in through(lambda: of_vectors[1].__setitem__(0, 2.0))
    access = seen[[name for name, _ in seen].index("_write_host_access")][1][0]
    assert access.ndarr is of_vectors
    assert tuple(access.indices) == (1, 0)
    assert "_read_host_access" in through(lambda: float(vector[1][0]))
    assert scalar.host_accessors, "a field has no host accessors after it was written"
    assert through(lambda: array[1]) == []  # ScalarNdarray.__getitem__ is spied on below
    spy(ScalarNdarray, "__getitem__")
    assert through(lambda: array[1]) == ["__getitem__"]


def test_members_of_struct_fields_are_read_and_written_by_name(monkeypatch):
    member = ti.types.struct(a=ti.f64, v=ti.types.vector(2, ti.f64))
    structure = ti.types.struct(a=ti.f64, b=member).field(shape=3)
    seen = []

    def spy(name):
        original = getattr(Struct, name)

        def stand_in(self, key, *args):
            seen.append((name, key, self._Struct__entries[key]))
            return original(self, key, *args)

        monkeypatch.setattr(Struct, name, stand_in)

    spy("__setitem__")
    spy("__getitem__")
    structure[1].a = 2.0
    assert [(name, key) for name, key, _ in seen] == [("__setitem__", "a")]
    assert isinstance(seen[0][2], SNodeHostAccess)
    seen.clear()
    structure[1].b.a = 3.0
    assert ("__setitem__", "a") in [(name, key) for name, key, _ in seen]
    seen.clear()
    structure[1] = {"a": 2.0, "b": {"a": 4.0, "v": [1.0, 2.0]}}
    stored = [entry for name, _, entry in seen if name == "__setitem__" and isinstance(entry, SNodeHostAccess)]
    assert len(stored) == 2, "whole structs are no longer stored member by member"
    seen.clear()
    assert structure[1].b.a == 4.0
    assert ("__getitem__", "a") in [(name, key) for name, key, _ in seen]


def test_accessors_hold_the_node_that_they_read_and_write():
    vector = ti.Vector.field(2, ti.f64, shape=3)
    vector[0] = [1.0, 2.0]
    accessor, index = vector.host_accessors[1], (0,) * core.get_max_num_indices()
    node = accessor.setter.__closure__[accessor.setter.__code__.co_freevars.index("snode")].cell_contents
    assert node.id == vector.vars[1].ptr.snode().id
    assert vector.get_scalar_field(1)._pad_key(0) == index
    assert accessor.getter(*index) == 2.0
    accessor.setter(3.0, *index)
    assert vector[0][1] == 3.0


def test_scalars_of_reordered_meshes_are_read_and_written_through_the_order():
    from taichi.lang.mesh import MeshReorderedScalarFieldProxy

    scalar, order = ti.field(ti.f64, shape=3), ti.field(ti.i32, shape=3)
    for i in range(3):
        order[i] = 2 - i
    proxy = MeshReorderedScalarFieldProxy(scalar, None, None, order)
    proxy[0] = 5.0
    assert scalar[2] == 5.0
    assert proxy[0] == 5.0
    assert proxy.g2r_field is order


def test_arrays_whose_first_axis_changes_fastest_are_copied_for_the_launch_and_back():
    """So two of them that share memory do not see what the kernel stores to the other."""
    store = kernel_of("a[0, 1] = 5.0; b[0, 0] = a[0, 1] + a[1, 0]", "a: A, b: A")
    a = np.arange(4.0).reshape(2, 2)
    store(a, a.T)
    np.testing.assert_array_equal(a, [[7, 1], [2, 3]])
    store(a.T, np.zeros((2, 2)))
    np.testing.assert_array_equal(a, [[7, 1], [5, 3]])


@pytest.mark.sweep
def test_copies_to_and_from_numpy_are_kernels_of_a_known_name(monkeypatch):
    launched = []
    original = Kernel.__call__

    def stand_in(self, *args, **kwargs):
        launched.append((self.func.__module__, self.func.__name__))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Kernel, "__call__", stand_in)
    scalar, vector = ti.field(ti.f64, shape=3), ti.Vector.field(2, ti.f64, shape=3)
    array, of_vectors = ti.ndarray(ti.f64, shape=3), ti.Vector.ndarray(2, ti.f64, shape=3)
    sources = (scalar, vector, array, of_vectors)
    for source in sources:
        source.to_numpy()
    names = ["tensor_to_ext_arr", "matrix_to_ext_arr", "ndarray_to_ext_arr", "ndarray_matrix_to_ext_arr"]
    assert launched == [("taichi._kernels", name) for name in names]
    for name in (*names, "snode_deactivate", "snode_deactivate_dynamic"):
        assert hasattr(_kernels, name), f"taichi._kernels has no {name} any more"


@pytest.mark.sweep
def test_deactivation_is_a_kernel_with_the_node_as_argument(monkeypatch):
    layout, field = ti.FieldsBuilder(), ti.field(ti.f64)
    pointer = layout.pointer(ti.i, 4)
    pointer.place(field)
    tree = layout.finalize()
    seen = []
    original = Kernel.__call__

    def stand_in(self, *args, **kwargs):
        seen.append((self.func.__name__, args))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Kernel, "__call__", stand_in)
    pointer.deactivate_all()
    names = [name for name, _ in seen]
    assert "snode_deactivate" in names
    assert seen[names.index("snode_deactivate")][1][0].ptr.id == pointer.ptr.id
    tree.destroy()


def test_names_of_fields():
    a, b = ti.field(ti.f64, shape=2), ti.Vector.field(2, ti.f64, shape=2, name="wind")
    assert re.fullmatch(r"tmp\d+", a._name), f"a field without a name is called {a._name} now"
    assert b._name == "wind"
    member = ti.types.struct(mass=ti.f64).field(shape=2).mass
    assert member._name == "<Struct>.mass"


def test_annotations_of_arrays():
    annotation = ti.types.ndarray(ti.types.vector(3, ti.f32), ndim=2)
    assert isinstance(annotation, ndarray_type.NdarrayType)
    assert annotation.ndim == 2
    assert isinstance(annotation.dtype, MatrixType)
    assert (annotation.dtype.ndim, annotation.dtype.n) == (1, 3)
    array = ti.Vector.ndarray(3, ti.f32, shape=2)
    assert isinstance(array, Ndarray)
    assert tuple(array.element_shape) == (3,)
    assert tuple(array.shape) == (2,)


def test_structs_in_a_kernel_are_made_of_members_and_methods():
    y = ti.field(ti.f64, shape=())
    double = func_of("double(self): return self.a * 2.0")

    def make(a):
        return Struct({"a": a, "__struct_methods": {"double": double}})

    k = kernel_of("s = make(3.0); y[None] = s.double()", make=make, y=y)
    k()
    assert y[None] == 6.0, "methods of a struct are no longer passed as '__struct_methods'"
    kind = ti.types.struct(a=ti.f64, b=ti.types.vector(2, ti.f64))
    assert isinstance(kind, StructType)
    assert list(kind.members) == ["a", "b"]
    assert kind.methods == {}


def test_fill_in_a_kernel_is_a_function_of_the_field_and_the_value():
    assert backend.taichi_func(backend.fill_function) is not None
    assert list(inspect.signature(backend.fill_function).parameters) == ["F", "val"]


def test_nodes_of_the_layout():
    layout, a, b = ti.FieldsBuilder(), ti.Vector.field(2, ti.f64), ti.field(ti.i32)
    pointer = layout.pointer(ti.i, 4)
    node = pointer.dynamic(ti.j, 8, chunk_size=4)
    node.place(a, b)
    tree = layout.finalize()
    assert backend.node_kind(node) == "dynamic"
    assert backend.node_kind(pointer) == "pointer"
    assert backend.node_shape(pointer) == (4,)
    assert backend.node_shape(node) == a.shape == (4, 8)
    assert backend.child_numbers(node) == backend.component_numbers(a) + backend.component_numbers(b)
    assert backend.is_dynamic_cell(a, 1)
    assert not backend.is_dynamic_cell(a, 2)
    assert backend.has_leading_axes(a, pointer)
    assert backend.layout_node(a.parent()).ptr.id == node.ptr.id
    impl.get_runtime().materialize()  # here, or the next kernel compares the shapes of what is freed by then
    tree.destroy()


def test_functions_can_be_called_sealed():
    """Expressions need no builder of the kernel; statements and reads of fields do."""
    x = ti.field(ti.f64, shape=3)
    results = []
    read = func_of("return x[i]", "i", x=x)

    def look(i):
        for function in (lambda: i * 2 + 1, lambda: ti.sin(float(3)) * i):
            with backend.sealed():
                results.append(type(function()))
        nodes = (lambda: ti.activate(x.parent(), [i]), lambda: ti.append(x.parent(), [], i))
        for function in (lambda: read(i), lambda: x.fill(0.0), ti.random, *nodes):
            with pytest.raises(backend.SealedError), backend.sealed():
                function()

    k = kernel_of("for i in x: look(i)", x=x, look=look)
    k()
    assert results == [Expr] * 2


@pytest.mark.sweep
def test_fields_are_laid_out_in_the_thread_of_init_only(tmp_path):
    """Without fields, kernels need no layout."""
    program = tmp_path / "program.py"
    program.write_text("""
import threading
import taichi as ti
from taichi.lang import impl
ti.init(arch=ti.cpu, log_level=ti.ERROR)

@ti.kernel
def one() -> ti.f32:
    return 1.0

def in_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

def declare():
    x = ti.field(ti.f32, 3)
    try:
        impl.get_runtime().materialize()
    except RuntimeError as error:
        print("main_thread" in str(error))

impl.get_runtime().materialized = True
in_thread(lambda: print(one()))
in_thread(declare)
""")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True)
    assert {"1.0", "True"} <= set(done.stdout.splitlines()), done.stderr


def test_whether_a_kernel_is_traced_is_asked_of_one_function(monkeypatch):
    """``backend.is_inside_kernel`` stands in for it, so that other threads are not refused."""
    monkeypatch.setattr(impl, "inside_kernel", lambda: "stand-in")
    assert util.in_taichi_scope() == "stand-in"


def test_kernels_are_numbered_as_they_are_made():
    made = kernel_impl.Kernel.counter

    k = kernel_of("pass", "")
    assert k._primal.kernel_counter >= made
    assert kernel_impl.Kernel.counter > k._primal.kernel_counter


def test_a_launch_holds_the_interpreter_lock():
    """Otherwise two launches could run at a time, and share scratch memory."""
    total = ti.field(ti.f64, ())

    @ti.kernel
    def slow(n: ti.i32):
        for _ in range(1):
            for i in range(n):
                total[None] += ti.sin(float(i))

    slow(1)
    began = time.process_time()
    slow(10_000_000)
    taken = time.process_time() - began
    gaps, stop = [], threading.Event()

    def work():
        last = time.perf_counter()
        while not stop.is_set():
            time.sleep(0)  # lets another thread run
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    thread = threading.Thread(target=work)
    thread.start()
    try:
        while len(gaps) < 100:
            time.sleep(0)
        gaps.clear()
        slow(10_000_000)
    finally:
        stop.set()
        thread.join()
    assert max(gaps) > 0.8 * taken


def test_fields_are_found_in_the_layout_by_the_addresses_of_their_expressions():
    """``backend.lifetime`` tells by them whether a field is one of the program that runs."""
    layout, x = ti.FieldsBuilder(), ti.field(ti.f64)
    assert any(x.vars[0] is pending for pending in impl.get_runtime().global_vars)
    layout.dense(ti.i, 3).place(x)
    tree = layout.finalize()
    root = impl.get_runtime().prog.get_snode_root(tree.id)
    place = root.get_ch(0).get_ch(0)
    assert place.is_place()
    assert place.get_expr().get_underlying_ptr_address() == x.vars[0].ptr.get_underlying_ptr_address()
    tree.destroy()


def test_types_of_operations_are_those_of_expressions_on_dummies():
    """``record.literals`` finds them while a kernel is traced, and remembers them by names of types."""
    found = []

    @ti.kernel
    def k():
        found.append(ops.truediv(Expr(1), Expr(2)).ptr.get_rvalue_type().to_string())
        found.append((Expr(1, dtype=ti.u8) + Expr(1.0, dtype=ti.f32)).ptr.get_rvalue_type().to_string())

    k()
    assert found == [impl.get_runtime().default_fp.to_string(), "f32"]
    assert all(getattr(ti, name).to_string() == name for name in "f16 f32 f64 i8 i16 i32 i64 u1 u8 u16 u32 u64".split())


def test_element_types_of_array_arguments():
    """``backend.array_type`` reads them."""
    kinds = []

    def note(a):
        assert isinstance(a, AnyArray)
        kind = a.get_type().element_type
        assert tuple(a.element_shape()) == tuple(kind.shape())
        kinds.append((kind.element_type().to_string(), tuple(kind.shape())))

    note._is_wrapped_kernel = True

    @ti.kernel
    def k(a: ti.types.ndarray(dtype=tm.vec3, ndim=1), b: ti.types.ndarray(dtype=ti.i32, ndim=1)):
        note(a)
        note(b)

    k(np.zeros((2, 3), np.float32), np.zeros(2, np.int32))
    assert kinds == [("f32", (3,)), ("i32", ())]


def test_the_function_behind_randn():
    assert isinstance(ti.randn.__globals__["_randn"].func, Func)


def test_nodes_that_have_been_walked_keep_nothing_but_ptr():
    """``Rewritten.borrowed_tree`` lets trees be walked again; ``root`` is what ``backend.captures`` leaves."""
    tree = ast.parse("def f(a):\n    b = a[0] + g(a, 1)\n    return b\n")
    before = [set(node.__dict__) for node in ast.walk(tree)]
    owner = types.SimpleNamespace(func=lambda a: None, arguments=[KernelArgument(ti.template(), "a")], return_type=None)
    seen = []

    def walk():
        context = ASTTransformerContext(
            is_kernel=False,
            func=owner,
            arg_features=None,
            global_vars={"g": lambda a, n: seen.append(n) or 2.0},
            argument_data=[[1.0]],
            src=[""] * 3,
            start_lineno=1,
            file="f",
            ast_builder=impl.get_runtime().compiling_callable.ast_builder(),
        )
        transform_tree(tree, context)

    walk._is_wrapped_kernel = True
    k = kernel_of("walk()", walk=walk)
    k()
    assert seen == [1]
    assert [set(node.__dict__) - {"ptr", "root"} for node in ast.walk(tree)] == before


def test_ends_of_an_ndrange_are_read_again_in_each_iteration():
    """How many iterations there are is known at the start; which numbers they get is not (``sparse_counts``)."""
    ends, seen, count = ti.field(ti.i32, 2), ti.Vector.field(2, ti.i32, 6), ti.field(ti.i32, ())
    ends[0], ends[1] = 2, 3

    @ti.kernel
    def k():
        ti.loop_config(serialize=True)
        for i, j in ti.ndrange(ends[0], ends[1]):
            seen[count[None]] = ti.Vector([i, j])
            count[None] += 1
            ends[1] = 2

    k()
    assert seen.to_numpy().tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [2, 0], [2, 1]]


def test_a_launch_takes_any_number_of_arguments_but_for_one_constant():
    """``launch_kernel`` counts up to 64; what is compiled has no such limit (``host.taichi.ARGUMENTS``)."""
    constants = Kernel.launch_kernel.__code__.co_consts
    assert [c for c in constants if type(c) is int and c >= 64] == [64]
    assert not Kernel.launch_kernel.__code__.co_freevars
    assert Kernel.launch_kernel.__defaults__ is None
    assert Kernel.launch_kernel.__kwdefaults__ is None


def test_an_argument_pack_has_members_by_name_and_makes_others():
    """``leaf_arguments`` reads and makes packs; Taichi takes the names of members for names of arguments."""
    Inner = ti.types.argpack(gain=ti.f64)
    Pack = ti.types.argpack(a=ti.f64, data=ti.types.ndarray(ti.f64, ndim=1), inner=Inner)
    assert isinstance(Pack, ArgPackType)
    assert list(Pack.members) == ["a", "data", "inner"]
    data = np.array([1.0, 2.0])
    pack = Pack(a=3.0, data=data, inner=Inner(gain=4.0))
    assert isinstance(pack, ArgPack)
    assert isinstance(pack, Pack)
    assert pack["a"] == 3.0
    assert pack["data"] is data
    assert pack["inner"]["gain"] == 4.0
    seen = []
    note = lambda p: seen.append((type(p["inner"]["gain"]), type(p["data"])))
    k = kernel_of("k(p: Pack) -> ti.f64: note(p); return p.a * p.data[1] * p.inner.gain", Pack=Pack, note=note)
    assert k(pack) == 24.0
    assert seen == [(Expr, AnyArray)]
    assigns = kernel_of("assigns(p: Pack) -> ti.f64: a = 2.0; return a * p.a", Pack=Pack)
    with pytest.raises(ti.TaichiSyntaxError, match='Kernel argument "a" is immutable'):
        assigns(pack)


@pytest.mark.sweep
@pytest.mark.parametrize("settings", [{}, {"force_scalarize_matrix": True}], ids=["", "force_scalarize_matrix"])
@pytest.mark.parametrize("dtype", [ti.f32, ti.f64, ti.i32], ids=str)
def test_a_name_for_none_is_memory_of_the_type_of_an_assignment_that_never_runs(settings, dtype):
    """``emit.statements.Lines.declare_filled``; the assignment itself leaves nothing behind."""
    initialise(cfg_optimization=False, **settings)

    @ti.kernel
    def k(a: ti.types.ndarray(dtype, 2)):
        for i in range(a.shape[0]):
            for repeat in range(3):
                (d := None)
                if False:
                    d = ti.Vector([7] * 40, dtype)
                for c in range(40):
                    d[c] = 0
                for c in range(i, 40):
                    d[c] += a[i, c] + repeat
                for c in range(40):
                    a[i, c] = d[c]

    start = np.arange(200).reshape(5, 40).astype(np.dtype(str(dtype).replace("f", "float").replace("i", "int")))
    given = ti.ndarray(dtype, start.shape)
    given.from_numpy(start)
    k(given)
    rows, columns = np.indices(start.shape)
    assert_array_equal(given.to_numpy(), np.where(columns < rows, 0, start + 3))
