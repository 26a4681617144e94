"""Invalid input is rejected before anything is launched; the error names the object and the fix."""

import functools
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import numpy as np
import pytest
import taichi as ti
from devices import real
from differences import integers, outputs, read, scalars, write
from numpy.testing import assert_allclose, assert_array_equal
from taichi.lang.kernel_impl import Kernel
from taichi_program import end_program, initialise

from taichi_ext import DerivativeWarning, InvalidArgumentError, Jacobian, UnsupportedError, jacobian, value_and_jacobian

pytestmark = pytest.mark.usefixtures("ti64")


@pytest.fixture
def launched(monkeypatch):
    """The kernels that are launched, except those that read and write fields from Python, and find their memory."""
    names = []
    launch = Kernel.launch_kernel

    def noted(self, cpp, *args, **keywords):
        if self.func.__module__ not in (f"{ti.__name__}._kernels", "taichi_ext.backend.field_memory"):
            names.append(self.func.__name__)
        return launch(self, cpp, *args, **keywords)

    monkeypatch.setattr(Kernel, "launch_kernel", noted)
    return names


@pytest.fixture
def scene(launched):
    """Fields and kernels that count their runs."""

    class Scene:
        x, y, unused = scalars([0.3, 0.5]), outputs(3), scalars([1.0, 2.0, 3.0, 4.0])
        counter = integers([0, 0, 0])

    s = Scene
    x, y, counter = s.x, s.y, s.counter

    @ti.kernel
    def k():
        for i in y:
            counter[i] += 1
            y[i] += x[0] * x[1] + counter[i]

    @ti.kernel
    def with_args(a: ti.f64, n: ti.i32, v: ti.types.vector(2, ti.f64)):
        for i in y:
            y[i] += a * v[0] * v[1] * n * x[0]

    @ti.kernel
    def arrays(a: ti.types.ndarray(ti.f64, ndim=1), o: ti.types.ndarray(ti.f64, ndim=1)):
        for i in o:
            o[i] += a[i] * x[0]

    s.k, s.with_args, s.arrays = staticmethod(k), staticmethod(with_args), staticmethod(arrays)
    launched.clear()
    return s


@pytest.fixture
def refused(scene, launched):
    """Hold that a call is refused, that its message has the words, and that nothing was launched or changed."""

    def check(kernel, params, outs, *words, error=InvalidArgumentError, again=True, **options):
        before = [read(f) for f in (scene.x, scene.y, scene.counter)]
        for call in (jacobian, value_and_jacobian) if again else (jacobian,):
            with pytest.raises(error) as caught:
                call(kernel, params, outs, **options)
            message = str(caught.value)
            for word in words:
                assert word in message, f"{word!r} is missing in: {message}"
        assert launched == []
        for field, values in zip((scene.x, scene.y, scene.counter), before):
            assert_array_equal(read(field), values)
        return message

    return check


# --- the kernel -------------------------------------------------------------------------------------------------------


def test_kernel_without_source(scene, refused):
    scope = {"ti": ti, "x": scene.x, "y": scene.y}
    text = "@ti.kernel\ndef made():\n    for i in y:\n        y[i] = x[0]\n"
    exec(compile(text, "<generated>", "exec"), scope)
    words = "source of 'made'", "<generated>", "define it in a file"
    refused(scope["made"], scene.x, scene.y, *words, error=UnsupportedError)


def test_function_without_source_that_a_kernel_calls(scene, refused):
    scope = {"ti": ti}
    exec(compile("@ti.func\ndef made(a):\n    return a * a\n", "<generated>", "exec"), scope)
    made, x, y = scope["made"], scene.x, scene.y

    @ti.kernel
    def k():
        for i in y:
            y[i] += made(x[0])

    refused(k, x, y, "source of 'made'", "test_bad_input.py", "y[i] += made(x[0])", error=UnsupportedError)


@pytest.mark.parametrize("kernel", [3.0, None, "k"])
def test_something_that_is_no_kernel(scene, refused, kernel):
    refused(kernel, scene.x, scene.y, f"kernel is {kernel!r}", "expected a @ti.kernel")


def test_built_in_function_instead_of_a_kernel(scene, refused):
    refused(print, scene.x, scene.y, "kernel is Python's built-in print, which launches no kernel")


def test_ti_func_instead_of_a_kernel(scene, refused):
    @ti.func
    def square(a):
        return a * a

    refused(square, scene.x, scene.y, "ti.func", "square", "@ti.kernel that calls it")


def test_real_function_instead_of_a_kernel(scene, refused):
    @ti.real_func
    def square(a: ti.f64) -> ti.f64:
        return a * a

    refused(square, scene.x, scene.y, "the ti.real_func", "square", "@ti.kernel that calls it")


def test_classes_and_methods_without_their_object(scene, refused):
    x, y = scene.x, scene.y

    @ti.data_oriented
    class Solver:
        @ti.kernel
        def step(self):
            for i in y:
                y[i] += x[0]

        def run(self):
            self.step()

    class Plain:
        @ti.kernel
        def step(self):
            for i in y:
                y[i] += x[0]

    refused(Solver, x, y, "kernel is the class", "Solver", "of one of its objects")
    refused(Plain, x, y, "kernel is the class", "Plain")
    refused(int, x, y, "kernel is the class int")
    refused(Solver(), x, y, "kernel is <", "Solver object", "expected a @ti.kernel")
    refused(Solver.step, x, y, "Solver.step, a method without its object", "solver.step")
    refused(Solver.run, x, y, "Solver.run(self) cannot be called with the 0 arguments in args")
    refused(Plain().step, x, y, "Plain.step, a method of a plain class", "decorate Plain with @ti.data_oriented")


def test_functions_that_do_not_run_when_they_are_called(scene, refused):
    def generator():
        scene.k()
        yield

    async def coroutine():
        scene.k()

    async def asynchronous():
        scene.k()
        yield

    class Callable:
        async def __call__(self):
            scene.k()

    words = "does not run when it is called", "give a plain function"
    refused(generator, scene.x, scene.y, "the generator function", "generator", *words)
    refused(coroutine, scene.x, scene.y, "the coroutine function", *words)
    refused(functools.partial(coroutine), scene.x, scene.y, "the coroutine function", *words)
    refused(asynchronous, scene.x, scene.y, "the asynchronous generator function", *words)
    refused(Callable(), scene.x, scene.y, "the coroutine function", *words)


def test_arguments_that_python_would_not_take(scene, refused):
    def run(a, b, *, c=1):
        scene.k()

    words = "run(a, b, *, c=1) cannot be called with the"
    refused(run, scene.x, scene.y, words, "0 arguments", "missing a required argument: 'a'")
    refused(run, scene.x, scene.y, words, "3 arguments", "too many positional arguments", args=(1, 2, 3))
    refused(lambda *, c: scene.k(), scene.x, scene.y, "missing a required", "'c'")
    assert jacobian(functools.partial(run, 1), scene.x, scene.y, args=(2,)).shape == (3, 2)


def test_gradient_kernel_instead_of_the_kernel(scene, refused):
    refused(scene.k.grad, scene.x, scene.y, "grad")


def test_python_function_that_launches_nothing(scene, refused):
    def run():
        return 1.0

    refused(run, scene.x, scene.y, "run", "launched no kernel")


def test_python_function_that_launches_nothing_the_second_time(scene):
    @functools.cache
    def once():
        scene.k()

    assert jacobian(once, scene.x, scene.y).any()
    with pytest.raises(InvalidArgumentError, match="once launched no kernel"):
        jacobian(once, scene.x, scene.y)


def test_call_inside_a_kernel(scene, launched):
    x, y, k = scene.x, scene.y, scene.k

    @ti.kernel
    def first_time():
        jacobian(k, x, y)

    with pytest.raises(ti.TaichiCompilationError, match="cannot be taken inside a kernel; call it from Python"):
        first_time()
    assert launched == []
    jacobian(k, x, y)
    plan = Jacobian(k, x, y)
    launched.clear()

    @ti.kernel
    def when_cached():
        jacobian(k, x, y)

    @ti.kernel
    def when_prepared():
        plan()

    for kernel in (when_cached, when_prepared):
        with pytest.raises(ti.TaichiCompilationError, match="cannot be taken inside a kernel; call it from Python"):
            kernel()
    assert launched == []
    assert_allclose(jacobian(k, x, y)[0], [0.5, 0.3])


def test_call_before_init():
    program = textwrap.dedent(
        """
        import taichi as ti
        from taichi_ext import InvalidArgumentError, Jacobian, jacobian, value_and_jacobian

        @ti.kernel
        def k() -> ti.f32:
            return 1.0

        for call in (jacobian, value_and_jacobian, Jacobian):
            try:
                call(k, [], None)
            except InvalidArgumentError as error:
                print(error)
        """
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, timeout=900)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "ti.init" in line]
    assert lines == ["Taichi is not initialised; call ti.init(...) first."] * 3


# --- params and outputs -----------------------------------------------------------------------------------------------


def test_parameter_that_is_not_read(scene, refused):
    refused(scene.k, scene.unused, scene.y, "params (field scene.unused of shape (4,)) is not read in", "k")
    refused(scene.k, {"a": scene.x, "b": [scene.unused]}, scene.y, "params['b'][0] (field scene.unused of shape (4,))")


def test_output_that_is_not_written(scene, refused):
    refused(scene.k, scene.x, scene.unused, "outputs (field scene.unused of shape (4,)) is not written in")
    refused(scene.k, scene.x, [scene.y, scene.unused], "outputs[1] (field scene.unused of shape (4,)) is not written")


def test_params_and_outputs_exchanged(scene, refused):
    x, other = scene.x, outputs(2)

    @ti.kernel
    def k():
        for i in other:
            other[i] = x[i] ** 2

    refused(k, other, x, "is not written")


def test_argument_that_is_not_read(scene, refused):
    x, y = scene.x, scene.y

    @ti.kernel
    def k(a: ti.f64):
        for i in y:
            y[i] += x[0]

    refused(k, [x, "a"], y, "params[1] (argument 'a') is not read", args=(1.0,))


def test_parameter_that_no_kernel_of_a_pipeline_reads(scene):
    def run():
        scene.k()

    with pytest.raises(
        InvalidArgumentError, match=r"params \(field scene.unused of shape \(4,\)\) is not read by .*run"
    ):
        jacobian(run, scene.unused, scene.y)
    with pytest.raises(
        InvalidArgumentError, match=r"outputs \(field scene.unused of shape \(4,\)\) is not written by .*run"
    ):
        jacobian(run, scene.x, scene.unused)


def test_integer_fields(scene, refused):
    words = "(field counter of shape (3,)) has type i32", "only fields of real numbers", "ti.f32 or ti.f64"
    refused(scene.k, scene.counter, scene.y, "params", *words)
    refused(scene.k, scene.x, (scene.counter,), "outputs[0]", *words)


def test_integer_arguments_arrays_and_return_values(scene, refused):
    args = (1.0, 2, ti.Vector([1.0, 2.0]))
    refused(scene.with_args, "n", scene.y, "params (argument 'n') is an integer", args=args)

    @ti.kernel
    def integers(a: ti.types.ndarray(ti.i32, ndim=1), o: ti.types.ndarray(ti.f64, ndim=1)) -> ti.i32:
        for i in o:
            o[i] += a[i]
        return 3

    a, o = np.ones(2, np.int32), real(np.zeros(2))
    refused(integers, a, o, "array argument 'a'", "integer", args=(a, o))
    refused(integers, o, a, "array argument 'a'", "integer", args=(a, o))
    message = refused(integers, o, None, "integers returns", "i32", args=(a, o))
    assert "object at" not in message
    assert_array_equal(o, 0)


def test_return_value_that_does_not_exist(scene, refused):
    refused(scene.k, scene.x, None, "outputs is None", "returns nothing", "name the fields it writes")
    refused(lambda: scene.k(), scene.x, None, "outputs is None", "Python function", "name the fields")


def test_return_value_that_is_a_struct(scene, refused):
    x, pair = scene.x, ti.types.struct(a=ti.f64, b=ti.f64)

    @ti.kernel
    def k() -> pair:
        return pair(a=x[0], b=x[1])

    message = refused(k, x, None, "k returns", "struct")
    assert "object at" not in message


@pytest.mark.parametrize("leaf", [3.0, None, ti.f64, lambda: 0])
def test_leaf_that_is_nothing_differentiable(scene, refused, leaf):
    words = "expected a ti.field, an array that is in args, or the name of a kernel argument"
    refused(scene.k, leaf, scene.y, "params is", words)
    refused(scene.k, [scene.x, leaf], scene.y, "params[1] is", words)
    if leaf is not None:
        refused(scene.k, scene.x, {"a": leaf}, "outputs['a'] is", words)


def test_empty_structures(scene, refused):
    for empty in ([], (), {}):
        refused(scene.k, empty, scene.y, "params")
        refused(scene.k, scene.x, empty, "outputs")


def test_structures_that_contain_themselves(scene, refused):
    circle, ring = [scene.x], {"x": scene.x}
    circle.append([circle])
    ring["again"] = ring
    refused(scene.k, circle, scene.y, "params[1][0] contains itself", "without cycles")
    refused(scene.k, scene.x, ring, "outputs['again'] contains itself")
    refused(scene.k, scene.x, scene.y, "out[1][0] contains itself", out=circle)
    shared = [scene.x]
    refused(scene.k, [shared, shared], scene.y, "params[1][0]", "twice")  # no cycle


def test_collections_without_order(scene, refused):
    words = "put several into a list, tuple or dict"
    for several in ({"x"}, frozenset("x"), iter([scene.x]), (x for x in [scene.x]), {"x": scene.x}.values(), range(2)):
        refused(scene.k, several, scene.y, "params is", words)
        refused(scene.k, scene.x, [several], "outputs[0] is", words)


def test_keys_and_empty_parts_of_structures(scene):
    result = jacobian(scene.k, {1: scene.x, None: [[]]}, {(2, 3): scene.y})
    assert list(result) == [(2, 3)]
    assert list(result[2, 3]) == [1, None]
    assert result[2, 3][None] == [[]]
    assert_allclose(result[2, 3][1], [[0.5, 0.3]] * 3)


def test_parameter_given_twice(scene, refused):
    refused(scene.k, [scene.x, scene.x], scene.y, "params[1]", "twice")
    args = (1.0, 2, ti.Vector([1.0, 2.0]))
    refused(scene.with_args, ["a", "v", "a"], scene.y, "params[2] (argument 'a') is given twice", args=args)
    a, o = real(np.ones(3)), real(np.zeros(3))
    refused(scene.arrays, ["a", a], o, "params[1] (array argument 'a') is given twice", args=(a, o))


def test_unknown_argument_name(scene, refused):
    args = (1.0, 2, ti.Vector([1.0, 2.0]))
    words = "'b'", "not an argument of", "with_args", "'a', 'n', 'v'"
    refused(scene.with_args, ["a", "b"], scene.y, "params[1] is", *words, args=args)
    refused(scene.with_args, "a", "b", "outputs is", *words, args=args)
    refused(scene.k, "b", scene.y, "params is 'b'", "arguments: none")
    refused(scene.with_args, "A", scene.y, "params is 'A'", "Did you mean 'a'?", args=args)
    refused(scene.with_args, "", scene.y, "params is ''", args=args)


def test_argument_passed_by_value_as_output(scene, refused):
    args = (1.0, 2, ti.Vector([1.0, 2.0]))
    refused(scene.with_args, "a", "v", "outputs (argument 'v')", "passed by value", args=args)


def test_arguments_that_cannot_be_parameters(scene, refused):
    x, y, pair = scene.x, scene.y, ti.types.struct(a=ti.f64, b=ti.f64)

    @ti.kernel
    def k(p: pair, t: ti.template()):
        for i in y:
            y[i] += p.a * x[0] * t

    args = (pair(a=1.0, b=2.0), 3.0)
    refused(k, "p", y, "params is 'p'", "name the members that are meant: 'p.a', 'p.b'", args=args)
    refused(k, "t", y, "params (argument 't')", "only scalar, vector, matrix and array arguments", args=args)


def test_argument_of_a_python_function_as_parameter(scene, refused):
    def run(a):
        scene.with_args(1.0, 1, ti.Vector([1.0, 2.0]))

    refused(run, "a", scene.y, "params (argument 'a')", "is None", "Python function", "is a number", args=(None,))


def test_array_that_is_not_among_args(scene, refused):
    a, o = real(np.ones(3)), real(np.zeros(3))
    refused(scene.arrays, np.ones(3), o, "params is an array of shape (3,)", "not among args", args=(a, o))
    refused(scene.arrays, a, a.copy(), "outputs is an array of shape (3,)", "pass the same object", args=(a, o))


def test_component_of_a_field_that_is_used_as_a_whole(scene, refused):
    v, y = ti.Vector.field(2, ti.f64, shape=2), scene.y

    @ti.kernel
    def k():
        for i in y:
            y[i] += v[0].norm()

    v.fill(1.0)
    jacobian(k, v, y)
    y.fill(0.0)
    with pytest.raises((InvalidArgumentError, UnsupportedError), match="whole"):
        jacobian(k, [v, v.get_scalar_field(0)], y)
    assert_array_equal(y.to_numpy(), 0)


@pytest.mark.sweep
def test_field_that_is_not_placed():
    """Taichi runs no kernel at all while a field is not placed, so in a program of its own."""
    initialise(default_fp=ti.f64)
    x, y, free = scalars([0.3]), outputs(1), ti.field(ti.f64)

    @ti.kernel
    def k():
        y[0] += x[0]

    with pytest.raises(InvalidArgumentError, match="params is the field free, which is not placed; give it a"):
        jacobian(k, free, y)
    with pytest.raises(InvalidArgumentError, match=r"outputs\[0\] is the field free, which is not placed"):
        jacobian(k, x, [free])
    ti.root.dense(ti.i, 1).place(free)
    assert_allclose(jacobian(k, x, y), [[1.0]])
    initialise(default_fp=ti.f64)


# --- args -------------------------------------------------------------------------------------------------------------


def test_wrong_number_of_args(scene, refused):
    words = "with_args takes 3 arguments (a, n, v)", "args has 2"
    refused(scene.with_args, "a", scene.y, *words, args=(1.0, 2))
    refused(scene.k, scene.x, scene.y, "k takes 0 arguments (none)", "args has 1", args=(1.0,))
    plan = Jacobian(scene.with_args, "a", scene.y, args=(1.0, 2, ti.Vector([1.0, 2.0])))
    with pytest.raises(InvalidArgumentError, match="args has 1"):
        plan(args=(1.0,))


def test_args_that_are_no_tuple(scene, refused):
    for args in (1.0, None, "abc", {"a": 1.0}, np.ones(3), scene.x, (a for a in (1.0, 2))):
        refused(scene.with_args, "a", scene.y, "args is ", "expected a tuple", args=args)


@pytest.mark.parametrize(
    ("position", "value", "words"),
    [
        (0, "s", ("args[0] ('a' of", "is a str", f"expected {ti.f64}")),
        (0, [1.0], ("args[0] ('a' of", "is a list", f"expected {ti.f64}")),
        (1, 2.5, ("args[1] ('n' of", "is a float", "expected i32")),
        (2, ti.Vector([1.0, 2.0, 3.0]), ("args[2] ('v' of", "has shape (3,)", "expected (2,)")),
        (2, np.ones((2, 1)), ("args[2] ('v' of", "has shape (2, 1)", "expected (2,)")),
        (2, 1.0, ("args[2] ('v' of", "expected (2,)")),
        (2, "ab", ("args[2] ('v' of",)),
        (2, ["a", "b"], ("args[2] ('v' of", "not real numbers", "(2,)")),
        (2, [1j, 2.0], ("args[2] ('v' of", "not real numbers")),
        (2, [[1.0], [2.0, 3.0]], ("args[2] ('v' of", "is a list without a shape", "(2,)")),
        (0, None, ("args[0] ('a' of", "is a NoneType", f"expected {ti.f64}")),
        (0, 1j, ("args[0] ('a' of", "is a complex", f"expected {ti.f64}")),
    ],
)
def test_wrong_type_or_shape_of_a_value(scene, refused, position, value, words):
    args = [1.0, 2, ti.Vector([1.0, 2.0])]
    param = "a" if position != 0 else "v"
    args[position] = value
    refused(scene.with_args, param, scene.y, *words, args=tuple(args))


def test_wrong_arrays(scene, refused):
    a, o, k = real(np.ones(3)), real(np.zeros(3)), scene.arrays
    refused(k, "a", o, "args[0] ('a' of", "is a list", "expected a NumPy array", args=([1.0, 2.0, 3.0], o))
    refused(k, "a", o, "args[0] ('a' of", "has 2 dimensions", "expected 1", args=(real(np.ones((3, 2))), o))
    refused(k, "a", o, "'a'", "i32", f"{ti.f64}", error=ValueError, args=(np.ones(3, np.int32), o))
    words = "args[0] ('a' of", "not contiguous", "np.ascontiguousarray"
    refused(k, "a", o, *words, args=(real(np.ones((3, 2)))[:, 0], o))
    plan = Jacobian(k, "a", "o", args=(a, o))
    with pytest.raises(InvalidArgumentError, match="not contiguous"):
        plan(args=(a, real(np.zeros((3, 2)))[:, 1]))
    assert_array_equal(o, 0)


FOREIGN_TYPES = {
    "complex128": np.ones(3, complex),
    "object": np.array([1.0, 2.0, 3.0], object),
    "<U1": np.array(["a", "b", "c"]),
    "[('a', '<f8')]": np.zeros(3, [("a", float)]),
    "datetime64[s]": np.zeros(3, "datetime64[s]"),
    "float128": np.ones(3, np.longdouble),
    "another byte order": np.ones(3, ">f8"),
}


@pytest.fixture
def any_arrays(scene):
    """A kernel whose arrays may have any type."""

    @ti.kernel
    def k(a: ti.types.ndarray(), o: ti.types.ndarray()):
        for i in o:
            o[i] += a[i] * 2.0

    return k


@pytest.mark.parametrize("dtype", FOREIGN_TYPES)
def test_types_that_taichi_does_not_have(scene, any_arrays, refused, dtype):
    foreign, a, o = FOREIGN_TYPES[dtype], real(np.ones(3)), real(np.zeros(3))
    if dtype == "float128" and foreign.dtype.itemsize == 8:
        pytest.skip("long double is float64 here")
    for kernel in (any_arrays, scene.arrays):
        refused(kernel, "a", o, "args[0] ('a' of", dtype, "; pass", args=(foreign, o))
        refused(kernel, "a", "o", "args[1] ('o' of", dtype, args=(a, foreign))
    refused(scene.k, foreign, scene.y, "params has elements of type", dtype)
    run = lambda p, q: any_arrays(p, q)
    refused(run, foreign, o, "params has elements of type", dtype, args=(foreign, o))
    refused(lambda p: any_arrays(foreign, p), scene.x, o, "array argument 'a' has elements of", dtype, args=(o,))
    refused(scene.k, scene.x, scene.y, "out has elements of type", dtype, out=foreign)
    assert_array_equal(o, 0)


def test_masked_arrays_and_matrices(scene, any_arrays, refused):
    o = real(np.zeros(3))
    masked, matrix = np.ma.masked_array(np.ones(3), [0, 1, 0]), np.matrix([1.0, 2.0, 3.0])
    for wrong, words in ((masked, ("masked array", ".filled(")), (matrix, ("np.matrix", "np.asarray("))):
        refused(any_arrays, "a", o, "args[0] ('a' of", *words, args=(wrong, o))
        refused(lambda p, q: any_arrays(p, q), wrong, o, "params is", *words, args=(wrong, o))
    refused(scene.k, scene.x, scene.y, "out is a masked array", out=np.ma.zeros((3, 2)))
    refused(scene.k, scene.x, scene.y, "out is an np.matrix", out=np.matrix(np.zeros((3, 2))))


def test_arrays_that_cannot_be_written(scene, refused):
    a, fixed = real(np.ones(3)), real(np.ones(3))
    fixed.flags.writeable = False
    refused(scene.arrays, "a", "o", "outputs (argument 'o') is read-only", args=(a, fixed))
    for chunk_size in (None, 1):  # as an input it is fine, and nothing is put back into it
        J = jacobian(scene.arrays, "a", "o", args=(fixed, real(np.zeros(3))), chunk_size=chunk_size)
        assert_allclose(J, 0.3 * np.eye(3))


def test_arrays_that_overlap(scene, refused):
    whole = real(np.ones(8))
    words = "'a'", "'o'", "share a part of their memory", "pass copies"
    refused(scene.arrays, "a", "o", *words, args=(whole[:5], whole[3:]))
    assert_array_equal(whole, 1)


@pytest.mark.cpu_only("a GPU gets a copy of the host's array for each argument")
def test_the_same_array_twice_is_one_array(scene):
    a = real([0.3, 0.5])
    assert_allclose(jacobian(scene.arrays, a, a, args=(a, a)), 1.3 * np.eye(2))
    assert_allclose(a, [0.39, 0.65])


@pytest.mark.double_only("tensors of float64")
def test_torch_tensors_that_cannot_be_used(scene, refused):
    torch = pytest.importorskip("torch")
    o, k = torch.zeros(3, dtype=torch.float64), scene.arrays
    strided = torch.ones((3, 2), dtype=torch.float64)[:, 0]
    refused(k, "a", "o", "args[0] ('a' of", "not contiguous", ".contiguous()", args=(strided, o))
    elsewhere = torch.ones(3, dtype=torch.float64, device="meta")
    refused(k, "a", "o", "args[0] ('a' of", "on meta", "but Taichi runs on", args=(elsewhere, o))
    whole = torch.ones(8, dtype=torch.float64)
    refused(k, "a", "o", "share a part of their memory", args=(whole[:5], whole[3:]))
    assert o.count_nonzero() == 0


def test_tensors_that_are_no_plain_memory(scene, any_arrays, refused):
    torch = pytest.importorskip("torch")
    ones, o = torch.ones(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    cases = {
        "torch.bfloat16": ones.bfloat16(),
        "torch.complex64": torch.ones(3, dtype=torch.complex64),
        "torch.sparse_coo; pass .to_dense()": ones.to_sparse(),
        "nested tensor": torch.nested.nested_tensor([ones[:1], ones[:2]]),
        "conjugated; pass .clone()": torch.ones(3, dtype=torch.complex64).conj(),
        "negated; pass .clone()": torch.ones(3, dtype=torch.complex128).conj().imag,
        "on meta": ones.to("meta"),
    }
    for words, tensor in cases.items():
        words = words.split("; ")
        refused(any_arrays, "a", "o", "args[0] ('a' of", *words, args=(tensor, o))
        refused(lambda p, q: any_arrays(p, q), tensor, o, "params", *words, args=(tensor, o))
        refused(scene.k, scene.x, scene.y, "out", *words, out=tensor)
    tracked = torch.zeros((3, 2), dtype=torch.float64, requires_grad=True)
    refused(scene.k, scene.x, scene.y, "out is a tensor that requires a gradient", "out.detach()", out=tracked)
    assert o.count_nonzero() == 0


def test_array_of_another_library(scene, refused):
    class Foreign:
        """An array that is only known to share memory through DLPack."""

        shape = (3,)

        def __dlpack__(self, **options):
            raise AssertionError("nothing may be converted silently")

    foreign, o = Foreign(), real(np.zeros(3))
    words = "Foreign, which Taichi does not take", "np.from_dlpack(a)", "torch.from_dlpack(a)"
    refused(scene.arrays, "a", o, "args[0]", *words, args=(foreign, o))
    refused(scene.k, foreign, scene.y, "params is a", *words)


def test_arrays_that_change_their_shape_between_calls(scene):
    """Another size is another launch, not an error; another number of dimensions is refused."""
    for size in (3, 5, 3):
        a, o = real(np.arange(1.0, size + 1)), real(np.zeros(size))
        assert_allclose(jacobian(scene.arrays, a, o, args=(a, o)), 0.3 * np.eye(size))
        assert_allclose(o, 0.3 * a)
    with pytest.raises(InvalidArgumentError, match="2 dimensions"):
        jacobian(scene.arrays, "a", "o", args=(real(np.ones((2, 2))), real(np.zeros(2))))


# --- out and memory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 3), (2, 3), (6,), (3, 2, 1), ()])
def test_out_of_another_shape(scene, refused, shape):
    words = f"out has shape {shape}", "(3, 2)"
    refused(scene.k, scene.x, scene.y, *words, out=np.zeros(shape))
    refused(scene.k, scene.x, scene.y, *words, out=ti.field(ti.f64, shape=shape))
    if shape:
        refused(scene.k, scene.x, scene.y, *words, out=ti.ndarray(ti.f64, shape=shape))


@pytest.mark.double_only("two types of real numbers")
def test_out_of_another_dtype(scene, refused):
    for out in (np.zeros((3, 2), np.float32), ti.field(ti.f32, shape=(3, 2)), ti.ndarray(ti.f32, shape=(3, 2))):
        refused(scene.k, scene.x, scene.y, "out has dtype float32", "float64", out=out)
    refused(scene.k, scene.x, scene.y, "out has dtype int64", "float64", out=np.zeros((3, 2), np.int64))


@pytest.mark.double_only("two types of real numbers")
def test_out_tensor_of_another_shape_dtype_or_device(scene, refused):
    torch = pytest.importorskip("torch")
    refused(scene.k, scene.x, scene.y, "out has shape (2, 3)", "(3, 2)", out=torch.zeros((2, 3), dtype=torch.float64))
    refused(scene.k, scene.x, scene.y, "out has dtype float32", out=torch.zeros((3, 2)))
    elsewhere = torch.zeros((3, 2), dtype=torch.float64, device="meta")
    refused(scene.k, scene.x, scene.y, "out", "meta", out=elsewhere)


def test_out_of_another_structure(scene, refused):
    good = np.zeros((3, 2))
    refused(scene.k, scene.x, scene.y, "out", out=[good, good])
    refused(scene.k, scene.x, [scene.y], "out", out={"y": good})
    refused(scene.k, scene.x, {"y": scene.y}, "out", "'y'", out={"z": good})
    refused(scene.k, {"x": scene.x}, scene.y, "out", out={"other": good})
    refused(scene.k, [scene.x], [scene.y], "out[0][0] has shape (2, 3)", out=[[good.T]])


def test_out_that_shares_memory(scene, refused):
    square = real(np.zeros((3, 3)))
    words = "shares memory with a parameter, an output or an argument"
    refused(scene.arrays, "a", "o", f"out {words}", "of its own", args=(square[0], square[1]), out=square)
    refused(
        lambda p, q: scene.arrays(p, q), square[0], square[1], f"out {words}", args=(square[0], square[1]), out=square
    )
    same = real(np.zeros((3, 2)))
    refused(scene.k, scene.x, [scene.y, scene.y], "out[1] and out[0] share memory", out=[same, same])
    pair = real(np.zeros(2))
    repeated = np.lib.stride_tricks.as_strided(pair, (3, 2), (0, pair.itemsize))
    refused(scene.k, scene.x, scene.y, "out has entries that share their memory", out=repeated)
    for good in (real(np.zeros((3, 4)))[:, ::2], real(np.zeros((2, 3))).T, real(np.zeros((3, 2)))[::-1]):
        assert_allclose(jacobian(scene.k, scene.x, scene.y, out=good), [[0.5, 0.3]] * 3)


def test_out_that_is_a_parameter_or_output():
    x, y = scalars(0.3), outputs()

    @ti.kernel
    def k():
        y[None] += x[None] ** 2

    for out in (x, y):
        with pytest.raises(InvalidArgumentError, match="out shares memory with a parameter, an output or an argument"):
            jacobian(k, x, y, out=out)
    assert y[None] == 0.0


@pytest.mark.parametrize("out", ["J", 1.0, [[0.0, 0.0]] * 3, {1}, True, [], {}])
def test_out_that_is_no_array(scene, refused, out):
    refused(scene.k, scene.x, scene.y, "out", out=out)


def test_out_that_cannot_be_written(scene, refused):
    out = np.zeros((3, 2))
    out.flags.writeable = False
    refused(scene.k, scene.x, scene.y, "out", "read-only", out=out)


@pytest.mark.chosen_only("a few columns fit into memory", "--chunk-size")
def test_jacobian_larger_than_memory(scene, refused, monkeypatch):
    many, rows = ti.field(ti.f64, shape=4000), ti.field(ti.f64, shape=5000)

    @ti.kernel
    def k():
        for i in rows:
            rows[i] = many[i % 4000]

    monkeypatch.setattr("taichi_ext.runtime.memory.shadows.available_memory", lambda: 60e6)
    words = "0.1 GiB", "product", "format='csr'"
    refused(k, many, rows, "outputs (field rows of shape (5000,))", "with respect to 4000 parameters", *words)


@pytest.mark.chosen_only("a few columns can be indexed", "--chunk-size")
def test_jacobian_larger_than_what_taichi_can_index(scene, refused):
    many, rows = ti.field(ti.f32, shape=3_000_000), ti.field(ti.f32, shape=3_000)

    @ti.kernel
    def k():
        for i in rows:
            rows[i] = many[i * 1000]

    words = "3000 x 3000000 entries", "2**31 - 1", "product", "format='csr'"
    refused(k, many, rows, "outputs (field rows of shape (3000,))", *words)


@pytest.mark.parametrize("limit", ["1G", -1, 1.5j, 1 + 0j, 0, True, np.nan, np.float32("nan"), [1], np.ones(1)])
def test_limit_that_is_no_number_of_bytes(scene, refused, limit):
    refused(scene.k, scene.x, scene.y, f"max_memory is {limit!r}", "bytes", max_memory=limit)


@pytest.mark.parametrize("size", [True, np.True_, 0, -1, 2.5, 1.0, "3", np.float64(2), np.nan, [2], np.array(2)])
def test_chunk_size_that_is_no_number_of_columns(scene, refused, size):
    refused(
        scene.k, scene.x, scene.y, f"chunk_size is {size!r}", "expected a whole number of at least 1", chunk_size=size
    )


@pytest.mark.parametrize("tangents", [None, "Auto", ["auto"], {"auto"}, 1, b"auto"])
def test_tangents_that_do_not_exist(scene, refused, tangents):
    words = f"tangents is {tangents!r}", "expected one of 'auto', 'sparse', 'dense'"
    refused(scene.k, scene.x, scene.y, *words, tangents=tangents)


def test_options_are_checked_although_an_equal_one_was_used_before(scene, refused):
    for options in ({"chunk_size": 1}, {"max_memory": 1}):
        jacobian(scene.k, scene.x, scene.y, **options)
    write(scene.y, 0.0)
    write(scene.counter, 0)
    for wrong in (True, 1 + 0j):
        with pytest.raises(InvalidArgumentError, match="chunk_size is"):
            jacobian(scene.k, scene.x, scene.y, chunk_size=wrong)
        with pytest.raises(InvalidArgumentError, match="max_memory is"):
            jacobian(scene.k, scene.x, scene.y, max_memory=wrong)
    assert_array_equal(read(scene.counter), 0)


def test_numbers_of_numpy_are_numbers(scene):
    J = jacobian(scene.k, scene.x, scene.y, chunk_size=np.int64(1), max_memory=np.float64(1e9))
    assert_allclose(J, [[0.5, 0.3]] * 3)


# --- warnings ---------------------------------------------------------------------------------------------------------


def line_of(text):
    """The number of the one line of this file that contains the text."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (number,) = [n for n, line in enumerate(lines, 1) if line.endswith(f"  {text}")]
    return number


def check_warning(caught, text, *words):
    (warning,) = [w for w in caught if issubclass(w.category, DerivativeWarning)]
    for word in words:
        assert word in str(warning.message)
    assert Path(warning.filename).name == "test_bad_input.py"
    assert warning.lineno == line_of(text)


@pytest.mark.mostly_sweep("Jacobian")
@pytest.mark.parametrize("call", ["jacobian", "value_and_jacobian", "Jacobian"])
def test_output_that_depends_on_no_parameter(call):
    x, y, z = scalars([0.3]), outputs(1), outputs(1)

    @ti.kernel
    def k():
        y[0] = x[0]
        z[0] = ti.floor(x[0]) + 2.0

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if call == "jacobian":
            result = jacobian(k, x, [y, z])  # first caller
        elif call == "value_and_jacobian":
            result = value_and_jacobian(k, x, [y, z])[1]  # second caller
        else:
            result = Jacobian(k, x, [y, z])()  # third caller
    number = {"jacobian": "first", "value_and_jacobian": "second", "Jacobian": "third"}[call]
    cuts = [w for w in caught if "paths end at" in str(w.message)]
    check_warning(cuts, f"# {number} caller", "outputs[1]", "floor", "test_bad_input.py")
    others = [w for w in caught if w not in cuts]
    check_warning(others, f"# {number} caller", "outputs[1]", "does not depend on any of the params", "zero")
    assert_array_equal(result[1], [[0.0]])
    assert_array_equal(result[0], [[1.0]])


def test_no_warning_where_there_is_a_derivative():
    x, y = scalars([0.3]), outputs(1)

    @ti.kernel
    def k():
        y[0] = x[0] ** 2

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jacobian(k, x, y)
        jacobian(lambda: k(), x, y)


def test_parameter_that_a_pipeline_overwrites():
    x, y = scalars([0.3]), outputs(1)

    @ti.kernel
    def overwrite():
        for i in x:
            x[i] = 2.0

    @ti.kernel
    def square():
        y[0] = x[0] ** 2

    def run():
        overwrite()
        square()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = jacobian(run, x, y)  # overwriting pipeline
    assert_array_equal(result, [[0.0]])
    own = [w for w in caught if "overwritten" in str(w.message)]
    check_warning(own, "# overwriting pipeline", "params (field x of shape (1,))", "overwritten before it is read")


def test_python_that_branches_on_an_active_value_is_allowed():
    x, y = scalars([0.3]), outputs(1)

    @ti.kernel
    def double():
        x[0] *= 2.0

    @ti.kernel
    def square():
        y[0] = x[0] ** 2

    def run():
        double()
        while x[0] < 2.0:
            double()
        square()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = jacobian(run, x, y)
    assert_allclose(result, [[2 * 0.3 * 8**2]])
    assert_allclose(read(x), [2.4])


def test_active_value_that_python_writes_back():
    x, y = scalars([0.3, 0.5]), outputs(1)

    @ti.kernel
    def scale():
        for i in x:
            x[i] *= 3.0

    @ti.kernel
    def add():
        y[0] = x[0] + 10.0 * x[1]

    def run():
        scale()
        x[1] = x.to_numpy()[0]  # written back by hand
        add()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = jacobian(run, x, y)
    check_warning(caught, "# written back by hand", "tangent is lost", "Compute it in a kernel")
    assert_allclose(result, [[3.0, 0.0]])
    assert_allclose(read(y), [0.9 * 11])


@pytest.mark.mostly_sweep("options2")
@pytest.mark.parametrize("options", [{}, {"chunk_size": 1}, {"format": "csr"}])
def test_jacobian_that_is_zero_here(options):
    x, y = scalars([0.3, 0.5]), outputs(2)

    @ti.kernel
    def k():
        for i in x:
            y[i] = ti.max(x[i] - 1.0, 0.0)

    def dense():
        J = jacobian(k, x, y, **options)
        return J.toarray() if "format" in options else J

    if "format" in options:  # entries by columns of their own are never looked at: they are stored where they are zero
        assert_allclose(dense(), np.zeros((2, 2)))
    else:
        with pytest.warns(DerivativeWarning, match=r"outputs .* does not depend on the params as they are now"):
            assert_allclose(dense(), np.zeros((2, 2)))
    x[1] = 2.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_allclose(dense(), [[0.0, 0.0], [0.0, 1.0]])


def test_an_output_that_depends_on_some_columns_alone():
    """Nothing is said where the first run of several has a column of zeros."""
    x, y = scalars([0.3, 2.0, 0.4]), outputs(2)

    @ti.kernel
    def k():
        for i in y:
            y[i] = ti.max(x[i] - 1.0, 0.0)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_allclose(jacobian(k, x, y, chunk_size=1), [[0, 0, 0], [0, 1, 0]])


def test_array_that_python_changes_between_kernels():
    a, o = real([0.3, 0.5]), real(np.zeros(2))

    @ti.kernel
    def scale(v: ti.types.ndarray(ti.f64, ndim=1), w: ti.types.ndarray(ti.f64, ndim=1)):
        for i in v:
            w[i] = 3.0 * v[i]

    b = real(np.zeros(2))

    def run(p, q):
        scale(p, b)
        b[1] = 2.0 * b[0]
        scale(b, q)  # notices the change

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = jacobian(run, a, o, args=(a, o))
    check_warning(caught, "# notices the change", "changed from Python", "Change them in a kernel")
    assert_allclose(result, [[9.0, 0.0], [0.0, 0.0]])


@pytest.mark.mostly_sweep("entry")
@pytest.mark.parametrize("how", ["entry", "fill", "from_numpy"])
def test_active_value_that_python_writes_to_another_field(how):
    x, y, z = scalars([0.3]), outputs(1), outputs(1)

    @ti.kernel
    def square():
        y[0] = x[0] ** 2

    @ti.kernel
    def add():
        z[0] = z[0] + y[0]

    def run():
        square()
        if how == "entry":
            z[0] = y[0]
        elif how == "fill":
            z.fill(y[0])
        else:
            z.from_numpy(2.0 * y.to_numpy())  # without its derivative
        add()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = jacobian(run, x, z)
    if how == "from_numpy":
        check_warning(caught, "# without its derivative", "constant", "Compute it in a kernel")
    assert [w.category for w in caught] == [DerivativeWarning] * (how == "from_numpy")
    assert_allclose(result, [[0.6 if how == "from_numpy" else 1.2]])


def test_jacobian_inside_a_pipeline_that_is_differentiated(scene):
    x, y, z = scene.x, scene.y, outputs(3)

    @ti.kernel
    def square():
        for i in z:
            z[i] = y[i] ** 2 + x[0]

    plan = Jacobian(scene.k, x, y)
    plan()

    def run():
        jacobian(scene.k, x, y)
        square()

    def run_prepared():
        plan()
        square()

    for pipeline in (run, run_prepared):
        with pytest.raises((InvalidArgumentError, UnsupportedError, RuntimeError), match="Jacobian"):
            jacobian(pipeline, x, z)


def test_gradient_kernels_in_a_pipeline():
    p, loss = ti.field(ti.f64, shape=(), needs_grad=True), ti.field(ti.f64, shape=(), needs_grad=True)
    o = outputs()
    p[None] = 2.0

    @ti.kernel
    def cube():
        loss[None] = p[None] ** 3

    @ti.kernel
    def descend():
        o[None] = p[None] - 0.1 * p.grad[None]

    def by_hand():
        cube()
        loss.grad[None] = 1.0
        p.grad[None] = 0.0
        cube.grad()
        descend()

    def by_tape():
        with ti.ad.Tape(loss):
            cube()
        descend()

    for pipeline in (by_hand, by_tape):
        with pytest.raises(UnsupportedError, match=r"second derivative|gradient"):
            jacobian(pipeline, p, o)


# --- constructs -------------------------------------------------------------------------------------------------------


def test_construct_without_a_rule(scene, refused):
    x, y = scene.x, scene.y

    @ti.kernel
    def k():
        for i in y:
            y[i] += ti.bit_cast(ti.bit_cast(x[0], ti.i64), ti.f64)  # no rule in a kernel

    number = line_of("# no rule in a kernel")
    words = (
        "test_bad_input.py",
        f"line {number}, in k",
        "ti.bit_cast(x[0], ti.i64)",
        "bit_cast",
        "derivative is not known",
    )
    refused(k, x, y, *words, error=UnsupportedError)


def test_construct_without_a_rule_in_a_function(scene, refused):
    x, y = scene.x, scene.y

    @ti.func
    def bits(a):
        return ti.bit_cast(ti.bit_cast(a, ti.i64), ti.f64)  # no rule in a function

    @ti.kernel
    def k():
        for i in y:
            y[i] += bits(x[0])

    number = line_of("# no rule in a function")
    refused(k, x, y, "test_bad_input.py", f"line {number}, in bits", "ti.bit_cast(a, ti.i64)", error=UnsupportedError)


def test_launch_in_a_function_whose_gradient_is_replaced(scene):
    @ti.ad.no_grad
    def run():
        scene.k()

    with pytest.raises(UnsupportedError, match=r"k is launched in a function decorated with ti\.ad\.no_grad"):
        jacobian(lambda: run(), scene.x, scene.y)


def test_an_error_leaves_nothing_behind(scene, refused):
    """After any refusal, the same kernel can be differentiated and launched."""
    refused(scene.k, scene.unused, scene.y, "is not read")
    refused(scene.k, scene.x, scene.y, "out has shape (2, 2)", out=np.zeros((2, 2)))

    def broken():
        scene.k()
        raise RuntimeError("the user's own")

    with pytest.raises(RuntimeError, match="the user's own"):
        jacobian(broken, scene.x, scene.y)
    scene.k()
    before = read(scene.counter)
    assert_allclose(jacobian(scene.k, scene.x, scene.y), [[0.5, 0.3]] * 3)
    assert_array_equal(read(scene.counter), before + 1)


def test_taichi_s_own_errors_name_the_user_s_line(scene, refused):
    x, y = scene.x, scene.y

    @ti.kernel
    def k():
        for i in y:
            y[i] += x[0] @ x[1]  # no product

    number = line_of("# no product")
    words = "test_bad_input.py", f"line {number}, in k", "y[i] += x[0] @ x[1]"
    refused(k, x, y, *words, error=ti.TaichiCompilationError)


def test_taichi_s_own_warnings_name_the_user_s_line(scene):
    x, y = scene.x, scene.y

    @ti.kernel
    def k():
        for i in y:
            for j in ti.static(range(33)):  # unrolled
                y[i] += x[0] * j

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jacobian(k, x, y)
    (warning,) = {(w.filename, w.lineno) for w in caught if "You are unrolling more than" in str(w.message)}
    assert Path(warning[0]).name == "test_bad_input.py"
    assert warning[1] == line_of("# unrolled")


def test_the_package_gives_no_warnings(tmp_path):
    program = textwrap.dedent(
        """
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Taichi's own import and start warn
            import taichi as ti

            ti.init(arch=ti.cpu, log_level=ti.ERROR, offline_cache=False)
        import taichi_ext

        x, y = ti.field(ti.f32, shape=2), ti.field(ti.f32, shape=2)

        @ti.kernel
        def k():
            for i in x:
                y[i] += ti.sin(x[i])

        for kernel in (k, lambda: k()):
            print(taichi_ext.jacobian(kernel, x, y).trace())
            assert taichi_ext.check_jacobian(kernel, x, y)
        """
    )
    file = tmp_path / "program.py"
    file.write_text(program)
    command = [sys.executable, "-X", "dev", "-W", "error", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["2.0", "2.0"]


@pytest.mark.sweep
@pytest.mark.cpu_only("Taichi checks indices on the CPU and on CUDA alone")
@pytest.mark.parametrize("wrong", [9, -1])
def test_an_index_outside_of_a_field_in_debug_mode(wrong):
    """Taichi tells it, and goes on before that: nothing around J is written to."""
    initialise(default_fp=ti.f64, debug=True)
    try:
        x, y, q = scalars([1.0, 2.0, 3.0, 4.0]), outputs(4), ti.field(ti.i32, 4)

        @ti.kernel
        def k():
            for i in range(4):
                y[i] = x[q[i]] * 2

        memory = np.full(48, 7.0)
        J = memory[16:32].reshape(4, 4)
        for place in (0, 3):
            q.from_numpy(np.where(np.arange(4) == place, wrong, np.arange(4)).astype(np.int32))
            with pytest.raises(
                AssertionError,
                match=rf'size \(4\) with indices \({wrong}\)\s+File ".*test_bad_input.py", line \d+, in .*k:\s+y\[i\] = x\[q\[i\]\] \* 2',
            ):
                jacobian(k, x, y, out=J)
            assert_allclose(memory[:16], 7)
            assert_allclose(memory[32:], 7)
        q.from_numpy(np.arange(4, dtype=np.int32))
        assert_allclose(jacobian(k, x, y, out=J), 2 * np.eye(4))
    finally:
        end_program()
        initialise(default_fp=ti.f64)


@pytest.mark.sweep
@pytest.mark.cpu_only("Taichi checks indices on the CPU and on CUDA alone")
@pytest.mark.parametrize("format", [None, "csr"])
@pytest.mark.parametrize("is_array", [False, True])
def test_a_store_outside_in_debug_mode(is_array, format):
    """Taichi reports the user's line; its own store lands behind the field, and no tangent lands anywhere outside."""
    if format:
        pytest.importorskip("scipy")
    initialise(default_fp=ti.f64, debug=True)
    try:
        x, y, behind, q = scalars([1.0, 2.0, 3.0, 4.0]), outputs(4), ti.field(ti.f64, 16), ti.field(ti.i32, 4)
        memory = np.zeros(32)

        @ti.kernel
        def on_fields():
            for i in range(4):
                y[q[i]] = x[i] * 2
                y[i] += x[i] ** 2

        @ti.kernel
        def on_arrays(b: ti.types.ndarray(ti.f64, ndim=1)):
            for i in range(4):
                b[q[i]] = x[i] * 2

        kernel, output, args = (on_arrays, "b", (memory[8:12],)) if is_array else (on_fields, y, ())
        for wrong in (4, 6):
            q.from_numpy(np.array([0, 1, 2, wrong], np.int32))
            match = (
                rf'with indices .{wrong}.\s+File ".*test_bad_input.py", line \d+, in .*{kernel.__name__}:\s+.\[q\[i\]\]'
            )
            with pytest.raises(AssertionError, match=match):
                jacobian(kernel, x, output, args=args, format=format)
            assert set(np.r_[behind.to_numpy(), memory[:8], memory[12:]]) <= {0.0, 8.0}  # 8: what plain Taichi stores
        q.from_numpy(np.arange(4, dtype=np.int32))
        J = jacobian(kernel, x, output, args=args, format=format)
        assert_allclose(J.toarray() if format else J, 2 * np.eye(4) if is_array else np.diag([4.0, 6.0, 8.0, 10.0]))
    finally:
        end_program()
        initialise(default_fp=ti.f64)
