"""Invalid input is rejected before anything is launched; the error names the object and the fix."""

import functools
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import taichi as ti
from captured_warnings import all_warnings, no_warnings
from devices import real
from differences import integers, outputs, read, scalars, write
from kernel_texts import func_of, kernel_of, kernels_of
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
    k = kernel_of("for i in y: counter[i] += 1; y[i] += x[0] * x[1] + counter[i]", y=y, counter=counter, x=x)
    with_args = kernel_of(
        "with_args: for i in y: y[i] += a * v[0] * v[1] * n * x[0]",
        "a: ti.f64, n: ti.i32, v: ti.types.vector(2, ti.f64)",
        y=y,
        x=x,
    )
    arrays = kernel_of("arrays: for i in o: o[i] += a[i] * x[0]", "a: A1, o: A1", x=x)
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
                assert (word[1:] not in message) if word[0] == "~" else word in message, f"{word!r}: {message}"
        assert launched == []
        for field, values in zip((scene.x, scene.y, scene.counter), before):
            assert_array_equal(read(field), values)
        return message

    return check


# --- calls that are refused -------------------------------------------------------------------------------------------

KERNELS = """
    squares_of_x: for i in other: other[i] = x[i] ** 2
    without_a(a: ti.f64): for i in y: y[i] += x[0]
    whole(a: ti.types.ndarray(ti.i32, ndim=1), o: ti.types.ndarray(ti.f64, ndim=1)) -> ti.i32:
        for i in o:
            o[i] += a[i]
        return 3
    returns_pair() -> pair: return pair(a=x[0], b=x[1])
    returns_vector() -> (ti.f64, ti.types.vector(2, ti.i32)): return x[0], ti.Vector([1, 2])
    of_struct(p: pair, t: ti.template()): for i in y: y[i] += p.a * x[0] * t
    any_arrays(a: ti.types.ndarray(), o: ti.types.ndarray()): for i in o: o[i] += a[i] * 2.0
"""
# The arguments of jacobian -> the words of its message, or, after ~, what it must not have.
REFUSED = """
3.0, x, y -> kernel is 3.0 | expected a @ti.kernel
None, x, y -> kernel is None | expected a @ti.kernel
'k', x, y -> kernel is 'k' | expected a @ti.kernel
print, x, y -> kernel is Python's built-in print, which launches no kernel
square, x, y -> ti.func | square | @ti.kernel that calls it
real_square, x, y -> the ti.real_func | square | @ti.kernel that calls it
Solver, x, y -> kernel is the class | Solver | of one of its objects
Plain, x, y -> kernel is the class | Plain
int, x, y -> kernel is the class int
Solver(), x, y -> kernel is < | Solver object | expected a @ti.kernel
Solver.step, x, y -> Solver.step, a method without its object | solver.step
Solver.run, x, y -> Solver.run(self) cannot be called with the 0 arguments in args
Plain().step, x, y -> Plain.step, a method of a plain class | decorate Plain with @ti.data_oriented
generator, x, y -> the generator function | generator | does not run when it is called | give a plain function
coroutine, x, y -> the coroutine function | does not run when it is called | give a plain function
functools.partial(coroutine), x, y -> the coroutine function | does not run when it is called
asynchronous, x, y -> the asynchronous generator function | does not run when it is called
Callable(), x, y -> the coroutine function | does not run when it is called
run, x, y -> run(a, b, *, c=1) cannot be called with the 0 arguments | missing a required argument: 'a'
run, x, y, args=(1, 2, 3) -> run(a, b, *, c=1) cannot be called with the 3 arguments | too many positional arguments
lambda *, c: k(), x, y -> missing a required | 'c'
k.grad, x, y -> grad
nothing, x, y -> nothing | launched no kernel
k, unused, y -> params (field unused of shape (4,)) is not read in | k
k, {'a': x, 'b': [unused]}, y -> params['b'][0] (field unused of shape (4,)) is not read in
k, x, [y, unused] -> outputs[1] (field unused of shape (4,)) is not written in
squares_of_x, other, x -> is not written
without_a, [x, 'a'], y, args=(1.0,) -> params[1] (argument 'a') is not read
k, counter, y -> params | (field counter of shape (3,)) has type i32 | only fields of real numbers | ti.f32 or ti.f64
k, x, (counter,) -> outputs[0] | (field counter of shape (3,)) has type i32
with_args, 'n', y, args=args() -> params (argument 'n') is an integer
whole, n, o, args=(n, o) -> array argument 'a' | integer
whole, o, n, args=(n, o) -> array argument 'a' | integer
whole, o, None, args=(n, o) -> whole returns | i32 | ~object at
returns_pair, x, None -> returns_pair returns | struct | no struct | ~object at
returns_vector, x, None -> returns_vector returns f64, VectorType[2, i32] | of one real type | ~object at
k, x, None -> outputs is None | returns nothing | name the fields it writes
lambda: k(), x, None -> outputs is None | Python function | name the fields
k, 3.0, y -> params is | expected a ti.field, an array that is in args, or the name of a kernel argument
k, None, y -> params is | expected a ti.field, an array that is in args, or the name of a kernel argument
k, [x, ti.f64], y -> params[1] is | expected a ti.field
k, x, {'a': lambda: 0} -> outputs['a'] is | expected a ti.field
k, [], y -> params
k, x, {} -> outputs
k, circle, y -> params[1][0] contains itself | without cycles
k, x, ring -> outputs['again'] contains itself
k, x, y, out=circle -> out[1][0] contains itself
k, [[x], [x]], y -> params[1][0] | twice
k, {'x'}, y -> params is | put several into a list, tuple or dict
k, iter([x]), y -> params is | put several into a list, tuple or dict
k, {'x': x}.values(), y -> params is | put several into a list, tuple or dict
k, x, [frozenset('x')] -> outputs[0] is | put several into a list, tuple or dict
k, x, [range(2)] -> outputs[0] is | put several into a list, tuple or dict
k, [x, x], y -> params[1] | twice
with_args, ['a', 'v', 'a'], y, args=args() -> params[2] (argument 'a') is given twice
arrays, ['a', a], o, args=(a, o) -> params[1] (array argument 'a') is given twice
with_args, ['a', 'b'], y, args=args() -> params[1] is | 'b' | not an argument of | with_args | 'a', 'n', 'v'
with_args, 'a', 'b', args=args() -> outputs is | 'b' | not an argument of | with_args | 'a', 'n', 'v'
k, 'b', y -> params is 'b' | arguments: none
with_args, 'A', y, args=args() -> params is 'A' | Did you mean 'a'?
with_args, '', y, args=args() -> params is ''
with_args, 'a', 'v', args=args() -> outputs (argument 'v') | passed by value
of_struct, 'p', y, args=(pair(a=1.0, b=2.0), 3.0) -> params is 'p' | name the members that are meant: 'p.a', 'p.b'
of_struct, 't', y, args=(pair(a=1.0, b=2.0), 3.0) -> params (argument 't') | only scalar, vector, matrix and array arguments
of_struct, x, y, args=(pair(a=1.0, b=2.0), n) -> args[1] ('t' of of_struct) is an array, which no ti.template() takes | ti.types.ndarray(...)
lambda a: k(), 'a', y, args=(None,) -> params (argument 'a') | is None | Python function | is a number
arrays, np.ones(3), o, args=(a, o) -> params is an array of shape (3,) | not among args
arrays, a, a.copy(), args=(a, o) -> outputs is an array of shape (3,) | pass the same object
with_args, 'a', y, args=(1.0, 2) -> with_args takes 3 arguments (a, n, v) | args has 2
k, x, y, args=(1.0,) -> k takes 0 arguments (none) | args has 1
with_args, 'a', y, args=1.0 -> args is | expected a tuple
with_args, 'a', y, args=None -> args is | expected a tuple
with_args, 'a', y, args='abc' -> args is | expected a tuple
with_args, 'a', y, args={'a': 1.0} -> args is | expected a tuple
with_args, 'a', y, args=np.ones(3) -> args is | expected a tuple
with_args, 'a', y, args=x -> args is | expected a tuple
with_args, 'a', y, args=(a for a in (1.0, 2)) -> args is | expected a tuple
with_args, 'v', y, args=args(0, 's') -> args[0] ('a' of | is a str | expected f
with_args, 'v', y, args=args(0, [1.0]) -> args[0] ('a' of | is a list | expected f
with_args, 'v', y, args=args(0, None) -> args[0] ('a' of | is a NoneType | expected f
with_args, 'v', y, args=args(0, 1j) -> args[0] ('a' of | is a complex | expected f
with_args, 'a', y, args=args(1, 2.5) -> args[1] ('n' of | is a float | expected i32
with_args, 'a', y, args=args(1, np.bool_(1)) -> args[1] ('n' of | is a bool of NumPy, which Taichi does not take | bool(
with_args, 'a', y, args=args(2, ti.Vector([1.0, 2.0, 3.0])) -> args[2] ('v' of | has shape (3,) | expected (2,)
with_args, 'a', y, args=args(2, np.ones((2, 1))) -> args[2] ('v' of | has shape (2, 1) | expected (2,)
with_args, 'a', y, args=args(2, 1.0) -> args[2] ('v' of | expected (2,)
with_args, 'a', y, args=args(2, 'ab') -> args[2] ('v' of
with_args, 'a', y, args=args(2, ['a', 'b']) -> args[2] ('v' of | not real numbers | (2,)
with_args, 'a', y, args=args(2, [1j, 2.0]) -> args[2] ('v' of | not real numbers
with_args, 'a', y, args=args(2, [[1.0], [2.0, 3.0]]) -> args[2] ('v' of | is a list without a shape | (2,)
arrays, 'a', o, args=([1.0, 2.0, 3.0], o) -> args[0] ('a' of | is a list | expected a NumPy array
arrays, 'a', o, args=(real(np.ones((3, 2))), o) -> args[0] ('a' of | has 2 dimensions | expected 1
arrays, 'a', o, args=(n, o) -> 'a' | i32 | f
arrays, 'a', o, args=(real(np.ones((3, 2)))[:, 0], o) -> args[0] ('a' of | not contiguous | np.ascontiguousarray
any_arrays, 'a', o, args=(masked, o) -> args[0] ('a' of | masked array | .filled(
lambda p, q: any_arrays(p, q), masked, o, args=(masked, o) -> params is | masked array | .filled(
any_arrays, 'a', o, args=(matrix, o) -> args[0] ('a' of | np.matrix | np.asarray(
lambda p, q: any_arrays(p, q), matrix, o, args=(matrix, o) -> params is | np.matrix | np.asarray(
k, x, y, out=np.ma.zeros((3, 2)) -> out is a masked array
k, x, y, out=np.matrix(np.zeros((3, 2))) -> out is an np.matrix
arrays, 'a', 'o', args=(a, fixed) -> outputs (argument 'o') is read-only
arrays, 'a', 'o', args=(ones[:5], ones[3:]) -> 'a' | 'o' | share a part of their memory | pass copies
arrays, 'a', o, args=(foreign, o) -> args[0] | Foreign, which Taichi does not take | np.from_dlpack(a) | torch.from_dlpack(a)
k, foreign, y -> params is a | Foreign, which Taichi does not take | np.from_dlpack(a) | torch.from_dlpack(a)
k, x, y, out=[zeros, zeros] -> out
k, x, [y], out={'y': zeros} -> out
k, x, {'y': y}, out={'z': zeros} -> out | 'y'
k, {'x': x}, y, out={'other': zeros} -> out
k, [x], [y], out=[[zeros.T]] -> out[0][0] has shape (2, 3)
k, x, y, out=np.zeros(()) -> out has shape () | (3, 2)
k, x, y, out=np.zeros((3, 2, 1)) -> out has shape (3, 2, 1) | (3, 2)
k, x, y, out=ti.field(ti.f64, shape=()) -> out has shape () | (3, 2)
k, x, y, out=ti.field(ti.f64, shape=6) -> out has shape (6,) | (3, 2)
k, x, y, out=ti.ndarray(ti.f64, shape=(2, 3)) -> out has shape (2, 3) | (3, 2)
k, x, y, out='J' -> out
k, x, y, out=[[0.0, 0.0]] * 3 -> out
k, x, y, out={1} -> out
arrays, 'a', 'o', args=(many, many.copy()) -> 50000 x 50000 entries | format='csr' | products with J
k, x, y, out=True -> out
k, x, y, out=1.0 -> out
k, x, y, out=read_only -> out | read-only
arrays, 'a', 'o', args=(zeros3[0], zeros3[1]), out=zeros3 -> out shares memory with a parameter, an output or an argument | of its own
lambda p, q: arrays(p, q), zeros3[0], zeros3[1], args=(zeros3[0], zeros3[1]), out=zeros3 -> out shares memory with a parameter
k, x, [y, y], out=[zeros, zeros] -> out[1] and out[0] share memory
k, x, y, out=np.lib.stride_tricks.as_strided(o[:2], (3, 2), (0, o.itemsize)) -> out has entries that share their memory
k, x, y, max_memory='1G' -> max_memory is '1G' | bytes
k, x, y, max_memory=-1 -> max_memory is -1 | bytes
k, x, y, max_memory=1 + 0j -> max_memory is (1+0j) | bytes
k, x, y, max_memory=0 -> max_memory is 0 | bytes
k, x, y, max_memory=True -> max_memory is True | bytes
k, x, y, max_memory=np.float32('nan') -> max_memory is | nan | bytes
k, x, y, max_memory=np.ones(1) -> max_memory is array([1.]) | bytes
k, x, y, chunk_size=True -> chunk_size is True | expected a whole number of at least 1
k, x, y, chunk_size=np.True_ -> chunk_size is | expected a whole number of at least 1
k, x, y, chunk_size=0 -> chunk_size is 0 | expected a whole number of at least 1
k, x, y, chunk_size=1.0 -> chunk_size is 1.0 | expected a whole number of at least 1
k, x, y, chunk_size=np.float64(2) -> chunk_size is | expected a whole number of at least 1
k, x, y, chunk_size=[2] -> chunk_size is [2] | expected a whole number of at least 1
k, x, y, chunk_size=np.array(2) -> chunk_size is array(2) | expected a whole number of at least 1
k, x, y, tangents=None -> tangents is None | expected one of 'auto', 'sparse', 'dense'
k, x, y, tangents={'auto'} -> tangents is {'auto'} | expected one of 'auto', 'sparse', 'dense'
k, x, y, tangents=b'auto' -> tangents is b'auto' | expected one of 'auto', 'sparse', 'dense'
"""
ROWS = [line.split(" -> ") for line in REFUSED.strip().splitlines()]


class Foreign:
    """An array that is only known to share memory through DLPack."""

    shape = (3,)

    def __dlpack__(self, **options):
        raise AssertionError("nothing may be converted silently")


@pytest.fixture
def things(scene):
    """What the rows name."""
    x, y, k, pair = scene.x, scene.y, scene.k, ti.types.struct(a=ti.f64, b=ti.f64)
    square = func_of("square(a): return a * a")

    @ti.real_func
    def real_square(a: ti.f64) -> ti.f64:
        return a * a

    class Plain:
        @ti.kernel
        def step(self):
            for i in y:
                y[i] += x[0]

    @ti.data_oriented
    class Solver(Plain):
        @ti.kernel
        def step(self):
            for i in y:
                y[i] += x[0]

        def run(self):
            self.step()

    def generator():
        k()
        yield

    async def coroutine():
        k()

    async def asynchronous():
        k()
        yield

    class Callable:
        async def __call__(self):
            k()

    def run(a, b, *, c=1):
        k()

    def nothing():
        return 1.0

    def args(position=0, value=1.0):
        given = [1.0, 2, ti.Vector([1.0, 2.0])]
        given[position] = value
        return tuple(given)

    circle, ring = [x], {"x": x}
    circle.append([circle])
    ring["again"] = ring
    fixed, read_only, zeros, other = real(np.ones(3)), np.zeros((3, 2)), real(np.zeros((3, 2))), outputs(2)
    fixed.flags.writeable = read_only.flags.writeable = False
    masked, matrix = np.ma.masked_array(np.ones(3), [0, 1, 0]), np.matrix([1.0, 2.0, 3.0])
    a, o, ones, many, zeros3 = (real(np.ones(shape)) for shape in (3, 3, 8, 50_000, (3, 3)))
    o[:], zeros3[:], n = 0, 0, np.ones(3, np.int32)
    unused, counter, foreign = scene.unused, scene.counter, Foreign()
    own = {name: value for name, value in locals().items() if name != "scene"}
    own |= {
        "with_args": scene.with_args,
        "arrays": scene.arrays,
        "np": np,
        "ti": ti,
        "real": real,
        "functools": functools,
    }
    return own | kernels_of(KERNELS, **own)


@pytest.mark.parametrize("call,words", ROWS, ids=[call for call, _ in ROWS])
def test_a_refused_call(things, refused, call, words):
    call = f"(lambda *given, **options: refused(*given, *words.split(' | '), **options))({call})"
    eval(call, {**things, "refused": refused, "words": words})


def test_arguments_of_a_prepared_form(scene):
    a, o = real(np.ones(3)), real(np.zeros(3))
    with pytest.raises(InvalidArgumentError, match="args has 1"):
        Jacobian(scene.with_args, "a", scene.y, args=(1.0, 2, ti.Vector([1.0, 2.0])))(args=(1.0,))
    with pytest.raises(InvalidArgumentError, match="not contiguous"):
        Jacobian(scene.arrays, "a", "o", args=(a, o))(args=(a, real(np.zeros((3, 2)))[:, 1]))


def test_a_part_of_the_arguments(scene):
    run = lambda a, b: scene.k()
    assert_allclose(jacobian(functools.partial(run, 1), scene.x, scene.y, args=(2,)), [[0.5, 0.3]] * 3)


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
    k = kernel_of("for i in y: y[i] += made(x[0])", y=y, made=made, x=x)
    refused(k, x, y, "source of 'made'", "<kernels", "y[i] += made(x[0])", error=UnsupportedError)


def test_python_function_that_launches_nothing_the_second_time(scene):
    @functools.cache
    def once():
        scene.k()

    assert jacobian(once, scene.x, scene.y).any()
    with pytest.raises(InvalidArgumentError, match="once launched no kernel"):
        jacobian(once, scene.x, scene.y)


def test_call_inside_a_kernel(scene, launched):
    x, y, k = scene.x, scene.y, scene.k
    first_time = kernel_of("jacobian(k, x, y)", k=k, x=x, y=y)
    with pytest.raises(ti.TaichiCompilationError, match="cannot be taken inside a kernel; call it from Python"):
        first_time()
    assert launched == []
    jacobian(k, x, y)
    plan = Jacobian(k, x, y)
    launched.clear()
    when_cached = kernel_of("jacobian(k, x, y)", k=k, x=x, y=y)
    when_prepared = kernel_of("plan()", plan=plan)
    for kernel in (when_cached, when_prepared):
        with pytest.raises(ti.TaichiCompilationError, match="cannot be taken inside a kernel; call it from Python"):
            kernel()
    assert launched == []
    assert_allclose(jacobian(k, x, y)[0], [0.5, 0.3])


# --- params and outputs -----------------------------------------------------------------------------------------------


def test_parameter_that_no_kernel_of_a_pipeline_reads(scene):  # which is known after it has run
    for params, outs, words in (
        (scene.unused, scene.y, "params .* is not read"),
        (scene.x, scene.unused, "outputs .* is not written"),
    ):
        with pytest.raises(InvalidArgumentError, match=words):
            jacobian(lambda: scene.k(), params, outs)


def test_keys_and_empty_parts_of_structures(scene):
    result = jacobian(scene.k, {1: scene.x, None: [[]]}, {(2, 3): scene.y})
    assert list(result) == [(2, 3)]
    assert list(result[2, 3]) == [1, None]
    assert result[2, 3][None] == [[]]
    assert_allclose(result[2, 3][1], [[0.5, 0.3]] * 3)


def test_component_of_a_field_that_is_used_as_a_whole(scene, refused):
    v, y = ti.Vector.field(2, ti.f64, shape=2), scene.y
    k = kernel_of("for i in y: y[i] += v[0].norm()", y=y, v=v)
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
    k = kernel_of("y[0] += x[0]", y=y, x=x)
    with pytest.raises(InvalidArgumentError, match="params is the field free, which is not placed; give it a"):
        jacobian(k, free, y)
    with pytest.raises(InvalidArgumentError, match=r"outputs\[0\] is the field free, which is not placed"):
        jacobian(k, x, [free])
    ti.root.dense(ti.i, 1).place(free)
    assert_allclose(jacobian(k, x, y), [[1.0]])
    initialise(default_fp=ti.f64)


# --- args -------------------------------------------------------------------------------------------------------------


FOREIGN_TYPES = {
    "complex128": np.ones(3, complex),
    "object": np.array([1.0, 2.0, 3.0], object),
    "<U1": np.array(["a", "b", "c"]),
    "[('a', '<f8')]": np.zeros(3, [("a", float)]),
    "datetime64[s]": np.zeros(3, "datetime64[s]"),
    "float128": np.ones(3, np.longdouble),
    "another byte order": np.ones(3, ">f8"),
}


@pytest.mark.parametrize("dtype", FOREIGN_TYPES)
def test_types_that_taichi_does_not_have(scene, things, refused, dtype):
    any_arrays, foreign, a, o = things["any_arrays"], FOREIGN_TYPES[dtype], real(np.ones(3)), real(np.zeros(3))
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


def test_arrays_that_cannot_be_written(scene, refused):
    a, fixed = real(np.ones(3)), real(np.ones(3))
    fixed.flags.writeable = False
    refused(scene.arrays, "a", "o", "outputs (argument 'o') is read-only", args=(a, fixed))
    for chunk_size in (None, 1):  # as an input it is fine, and nothing is put back into it
        J = jacobian(scene.arrays, "a", "o", args=(fixed, real(np.zeros(3))), chunk_size=chunk_size)
        assert_allclose(J, 0.3 * np.eye(3))


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


def test_tensors_that_are_no_plain_memory(scene, things, refused):
    torch, any_arrays = pytest.importorskip("torch"), things["any_arrays"]
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


# --- out and memory ---------------------------------------------------------------------------------------------------


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


def test_out_that_is_a_parameter_or_output():
    x, y = scalars(0.3), outputs()
    k = kernel_of("y[None] += x[None] ** 2", y=y, x=x)
    for out in (x, y):
        with pytest.raises(InvalidArgumentError, match="out shares memory with a parameter, an output or an argument"):
            jacobian(k, x, y, out=out)
    assert y[None] == 0.0


@pytest.mark.chosen_only("a few columns fit into memory", "--chunk-size")
def test_jacobian_larger_than_memory(scene, refused, monkeypatch):
    many, rows = ti.field(ti.f64, shape=4000), ti.field(ti.f64, shape=5000)
    k = kernel_of("for i in rows: rows[i] = many[i % 4000]", rows=rows, many=many)
    monkeypatch.setattr("taichi_ext.runtime.memory.shadows.available_memory", lambda: 60e6)
    words = "0.1 GiB", "product", "format='csr'"
    refused(k, many, rows, "outputs (field rows of shape (5000,))", "with respect to 4000 parameters", *words)
    with pytest.raises(InvalidArgumentError, match=r"J has 5000 x 4000 entries, 0\.1 GiB, more than .* format='csr'"):
        jacobian(k, many, rows, mode="reverse")
    assert not read(rows).any()


@pytest.mark.chosen_only("a few columns can be indexed", "--chunk-size")
def test_jacobian_larger_than_what_taichi_can_index(scene, refused):
    many, rows = ti.field(ti.f32, shape=3_000_000), ti.field(ti.f32, shape=3_000)
    k = kernel_of("for i in rows: rows[i] = many[i * 1000]", rows=rows, many=many)
    words = "3000 x 3000000 entries", "2**31 - 1", "product", "format='csr'"
    refused(k, many, rows, "outputs (field rows of shape (3000,))", *words)


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
    k = kernel_of("y[0] = x[0]; z[0] = ti.floor(x[0]) + 2.0", y=y, x=x, z=z)
    with all_warnings() as caught:
        if call == "jacobian":
            result = jacobian(k, x, [y, z])  # first caller
        elif call == "value_and_jacobian":
            result = value_and_jacobian(k, x, [y, z])[1]  # second caller
        else:
            result = Jacobian(k, x, [y, z])()  # third caller
    number = {"jacobian": "first", "value_and_jacobian": "second", "Jacobian": "third"}[call]
    cuts = [w for w in caught if "paths end at" in str(w.message)]
    check_warning(cuts, f"# {number} caller", "outputs[1]", "floor", "<kernels")
    others = [w for w in caught if w not in cuts]
    check_warning(others, f"# {number} caller", "outputs[1]", "does not depend on any of the params", "zero")
    assert_array_equal(result[1], [[0.0]])
    assert_array_equal(result[0], [[1.0]])


def test_parameter_that_a_pipeline_overwrites():
    x, y = scalars([0.3]), outputs(1)
    overwrite = kernel_of("for i in x: x[i] = 2.0", x=x)
    square = kernel_of("y[0] = x[0] ** 2", y=y, x=x)
    run = lambda: (overwrite(), square())
    with all_warnings() as caught:
        result = jacobian(run, x, y)  # overwriting pipeline
    assert_array_equal(result, [[0.0]])
    own = [w for w in caught if "overwritten" in str(w.message)]
    check_warning(own, "# overwriting pipeline", "params (field x of shape (1,))", "overwritten before it is read")


@pytest.mark.mostly_sweep("options2")
@pytest.mark.parametrize("options", [{}, {"chunk_size": 1}, {"format": "csr"}])
def test_jacobian_that_is_zero_here(options):
    x, y = scalars([0.3, 0.5]), outputs(2)
    k = kernel_of("for i in x: y[i] = ti.max(x[i] - 1.0, 0.0)", x=x, y=y)

    def dense():
        J = jacobian(k, x, y, **options)
        return J.toarray() if "format" in options else J

    if "format" in options:  # entries by columns of their own are never looked at: they are stored where they are zero
        assert_allclose(dense(), np.zeros((2, 2)))
    else:
        with pytest.warns(DerivativeWarning, match=r"outputs .* does not depend on the params as they are now"):
            assert_allclose(dense(), np.zeros((2, 2)))
    x[1] = 2.0
    with no_warnings():
        assert_allclose(dense(), [[0.0, 0.0], [0.0, 1.0]])


def test_an_output_that_depends_on_some_columns_alone():
    """Nothing is said where the first run of several has a column of zeros."""
    x, y = scalars([0.3, 2.0, 0.4]), outputs(2)
    k = kernel_of("for i in y: y[i] = ti.max(x[i] - 1.0, 0.0)", y=y, x=x)
    with no_warnings():
        assert_allclose(jacobian(k, x, y, chunk_size=1), [[0, 0, 0], [0, 1, 0]])


@pytest.mark.mostly_sweep("entry")
@pytest.mark.parametrize("how", ["entry", "fill", "from_numpy"])
def test_active_value_that_python_writes_to_another_field(how):
    x, y, z = scalars([0.3]), outputs(1), outputs(1)
    square = kernel_of("y[0] = x[0] ** 2", y=y, x=x)
    add = kernel_of("z[0] = z[0] * y[0]", z=z, y=y)

    def run():
        square()
        if how == "entry":
            z[0] = y[0]
        elif how == "fill":
            z.fill(y[0])
        else:
            z.from_numpy(3.0 * y.to_numpy())  # without its derivative
        add()

    with all_warnings() as caught:
        result = jacobian(run, x, z)
    if how == "from_numpy":
        check_warning(caught, "# without its derivative", "constant", "Compute it in a kernel")
    assert [w.category for w in caught] == [DerivativeWarning] * (how == "from_numpy")
    assert_allclose(result, [[6 * 0.3**3 if how == "from_numpy" else 4 * 0.3**3]])


def test_jacobian_inside_a_pipeline_that_is_differentiated(scene):
    x, y, z = scene.x, scene.y, outputs(3)
    square = kernel_of("for i in z: z[i] = y[i] ** 2 + x[0]", z=z, y=y, x=x)
    plan = Jacobian(scene.k, x, y)
    plan()
    run = lambda: (jacobian(scene.k, x, y), square())
    run_prepared = lambda: (plan(), square())
    for pipeline in (run, run_prepared):
        with pytest.raises((InvalidArgumentError, UnsupportedError, RuntimeError), match="Jacobian"):
            jacobian(pipeline, x, z)


def test_gradient_kernels_in_a_pipeline():
    p, loss = ti.field(ti.f64, shape=(), needs_grad=True), ti.field(ti.f64, shape=(), needs_grad=True)
    o = outputs()
    p[None] = 2.0
    cube = kernel_of("loss[None] = p[None] ** 3", loss=loss, p=p)
    descend = kernel_of("o[None] = p[None] - 0.1 * p.grad[None]", o=o, p=p)

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

    with all_warnings() as caught:
        jacobian(k, x, y)
    (warning,) = {(w.filename, w.lineno) for w in caught if "You are unrolling more than" in str(w.message)}
    assert Path(warning[0]).name == "test_bad_input.py"
    assert warning[1] == line_of("# unrolled")


def test_the_package_gives_no_warnings_and_wants_a_program(tmp_path):
    program = textwrap.dedent(
        """
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Taichi's own import warns
            import taichi as ti
        import taichi_ext

        @ti.kernel
        def early() -> ti.f32:
            return 1.0

        calls = "jacobian value_and_jacobian Jacobian linear_operator least_squares normal_equations check_jacobian"
        for call in calls.split():
            try:
                getattr(taichi_ext, call)(early, [], None)
            except taichi_ext.InvalidArgumentError as error:
                print(error)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # and its start
            ti.init(arch=ti.cpu, log_level=ti.ERROR, offline_cache=False)
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
    lines = [line for line in done.stdout.splitlines() if not line.startswith("[")]  # Taichi's own
    assert lines == ["Taichi is not initialised; call ti.init(...) first."] * 7 + ["2.0", "2.0"]


@pytest.mark.sweep
@pytest.mark.cpu_only("Taichi checks indices on the CPU and on CUDA alone")
@pytest.mark.parametrize("wrong", [9, -1])
def test_an_index_outside_of_a_field_in_debug_mode(wrong):
    """Taichi tells it, and goes on before that: nothing around J is written to."""
    initialise(default_fp=ti.f64, debug=True)
    try:
        x, y, q = scalars([1.0, 2.0, 3.0, 4.0]), outputs(4), ti.field(ti.i32, 4)
        k = kernel_of("for i in range(4): y[i] = x[q[i]] * 2", y=y, x=x, q=q)
        memory = np.full(48, 7.0)
        J = memory[16:32].reshape(4, 4)
        for place in (0, 3):
            q.from_numpy(np.where(np.arange(4) == place, wrong, np.arange(4)).astype(np.int32))
            with pytest.raises(
                AssertionError,
                match=rf'size \(4\) with indices \({wrong}\)\s+File "<kernels .*", line \d+, in .*k:\s+y\[i\] = x\[q\[i\]\] \* 2',
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
        on_fields = kernel_of("for i in range(4): y[q[i]] = x[i] * 2; y[i] += x[i] ** 2", y=y, q=q, x=x)
        on_arrays = kernel_of("for i in range(4): b[q[i]] = x[i] * 2", "b: A1", q=q, x=x)
        kernel, output, args = (on_arrays, "b", (memory[8:12],)) if is_array else (on_fields, y, ())
        for wrong in (4, 6):
            q.from_numpy(np.array([0, 1, 2, wrong], np.int32))
            match = rf'with indices .{wrong}.\s+File "<kernels .*", line \d+, in .*{kernel.__name__}:\s+.\[q\[i\]\]'
            with pytest.raises(AssertionError, match=match):
                jacobian(kernel, x, output, args=args, format=format)
            assert set(np.r_[behind.to_numpy(), memory[:8], memory[12:]]) <= {0.0, 8.0}  # 8: what plain Taichi stores
        q.from_numpy(np.arange(4, dtype=np.int32))
        J = jacobian(kernel, x, output, args=args, format=format)
        assert_allclose(J.toarray() if format else J, 2 * np.eye(4) if is_array else np.diag([4.0, 6.0, 8.0, 10.0]))
    finally:
        end_program()
        initialise(default_fp=ti.f64)
