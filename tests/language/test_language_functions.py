"""Every function of ``ti`` and ``ti.math`` that a kernel can call on real numbers: scalars, vectors and matrices.

Every other callable of Taichi's is in a table: a release of Taichi that brings a new one is noticed here.
"""

import inspect
import operator

import devices
import differences
import numpy as np
import pytest
import taichi as ti
import taichi.math as tm
from differences import check_jacobian, check_refused, matrix_outputs, outputs, scalars, vector_outputs, vectors
from field_pool import pool
from kernel_texts import kernel_of
from numpy.testing import assert_allclose

from taichi_ext import UnsupportedError, jacobian, vjp
from taichi_ext.record.effects import WITHOUT_TANGENTS

pytestmark = pytest.mark.usefixtures("ti64")

# What a function takes and gives: s a scalar, 2 3 4 a vector, m n a matrix of 3 x 3, 4 x 4.
FUNCTIONS = {
    "ti.abs": ("s s", "3 3"),
    "ti.acos": ("s s", "3 3"),
    "ti.asin": ("s s", "3 3"),
    "ti.atan2": ("ss s",),
    "ti.cast": (),
    "ti.ceil": ("s s", "3 3"),
    "ti.cos": ("s s", "3 3"),
    "ti.exp": ("s s", "3 3"),
    "ti.floor": ("s s", "3 3"),
    "ti.log": ("s s", "3 3"),
    "ti.max": ("ss s", "sss s", "33 3", "3s 3", "s3 3"),
    "ti.min": ("ss s", "sss s", "33 3", "3s 3", "s3 3"),
    "ti.one": ("s s", "3 3", "m m"),
    "ti.pow": ("ss s", "33 3", "3s 3", "s3 3"),
    "ti.raw_div": ("ss s", "33 3", "3s 3"),
    "ti.round": ("s s", "3 3"),
    "ti.rsqrt": ("s s", "3 3"),
    "ti.select": (),
    "ti.sin": ("s s", "3 3"),
    "ti.sqrt": ("s s", "3 3"),
    "ti.stop_grad": (),
    "ti.tan": ("s s", "3 3"),
    "ti.tanh": ("s s", "3 3", "m m"),
    "ti.zero": ("s s", "3 3", "m m"),
    "tm.acos": ("s s", "3 3"),
    "tm.asin": ("s s", "3 3"),
    "tm.atan2": ("ss s",),
    "tm.cconj": ("2 2",),
    "tm.cdiv": ("22 2",),
    "tm.ceil": ("s s", "3 3"),
    "tm.cexp": ("2 2",),
    "tm.cinv": ("2 2",),
    "tm.clamp": ("sss s", "333 3", "3ss 3"),
    "tm.clog": ("2 2",),
    "tm.cmul": ("22 2",),
    "tm.cos": ("s s", "3 3"),
    "tm.cpow": ("2s 2",),
    "tm.cross": ("22 s", "33 3"),
    "tm.csqrt": ("2 2",),
    "tm.degrees": ("s s", "3 3"),
    "tm.determinant": ("m s", "n s"),
    "tm.distance": ("22 s", "33 s"),
    "tm.dot": ("33 s", "44 s"),
    "tm.exp": ("s s", "3 3"),
    "tm.floor": ("s s", "3 3"),
    "tm.fract": ("s s", "3 3"),
    "tm.inverse": ("m m", "n n"),
    "tm.length": ("2 s", "3 s", "4 s"),
    "tm.log": ("s s", "3 3"),
    "tm.log2": ("s s", "3 3"),
    "tm.max": ("ss s", "33 3", "333 3"),
    "tm.min": ("ss s", "33 3", "333 3"),
    "tm.mix": ("sss s", "333 3", "33s 3"),
    "tm.mod": ("ss s", "33 3", "3s 3"),
    "tm.normalize": ("2 2", "3 3"),
    "tm.pow": ("ss s", "33 3", "3s 3"),
    "tm.radians": ("s s", "3 3"),
    "tm.reflect": ("33 3",),
    "tm.refract": ("33s 3",),
    "tm.rot_by_axis": ("3s n",),
    "tm.rot_yaw_pitch_roll": ("sss n",),
    "tm.rotation2d": ("s p",),
    "tm.rotation3d": ("sss n",),
    "tm.round": ("s s", "3 3"),
    "tm.scale": ("sss n",),
    "tm.sign": ("s s", "3 3"),
    "tm.sin": ("s s", "3 3"),
    "tm.smoothstep": ("sss s", "333 3", "ss3 3"),
    "tm.sqrt": ("s s", "3 3"),
    "tm.step": ("ss s", "33 3", "s3 3"),
    "tm.tan": ("s s", "3 3"),
    "tm.tanh": ("s s", "3 3"),
    "tm.translate": ("sss n",),
    "tm.vdir": ("s 2",),
    "tm.vec2": ("ss 2", "s 2"),
    "tm.vec3": ("sss 3", "2s 3", "s2 3", "s 3"),
    "tm.vec4": ("ssss 4", "22 4", "3s 4", "s3 4", "s2s 4"),
    "tm.mat2": ("ssss p", "22 p", "s p"),
    "tm.mat3": ("333 m", "s m"),
    "tm.mat4": ("4444 n", "s n"),
}
ELSEWHERE = {
    # tested in test_language_linalg.py
    *("ti.svd", "ti.polar_decompose", "ti.sym_eig", "ti.eig", "ti.solve"),
    # tested below, or in test_language.py
    *("ti.random", "ti.randn", "ti.bit_cast", "ti.assume_in_range", "tm.isinf", "tm.isnan", "tm.eye"),
    *("ti.atomic_add", "ti.atomic_sub", "ti.atomic_min", "ti.atomic_max", "ti.atomic_mul"),
    # statements and iterators, tested in the other files
    *("ti.static", "ti.static_assert", "ti.static_print", "ti.grouped", "ti.ndrange", "ti.loop_config", "ti.Vector"),
    *("ti.activate", "ti.deactivate", "ti.is_active", "ti.append", "ti.length", "ti.rescale_index", "ti.Matrix"),
    # aborts the process on a CPU in Taichi 1.7.4
    "ti.frexp",
    # of integers only
    *("ti.atomic_and", "ti.atomic_or", "ti.atomic_xor", "ti.bit_shr", "ti.raw_mod", "tm.popcnt", "tm.clz"),
    *("tm.ivec2", "tm.ivec3", "tm.ivec4", "tm.uvec2", "tm.uvec3", "tm.uvec4"),
    # hints to the compiler, of GPUs and meshes
    *("ti.block_local", "ti.mesh_local", "ti.mesh_patch_idx", "ti.cache_read_only", "ti.global_thread_idx"),
    *("ti.no_activate", "ti.get_addr"),
    # not called in kernels
    *("ti.data_oriented", "ti.dataclass", "ti.field", "ti.func", "ti.init", "ti.kernel", "ti.ndarray", "ti.pyfunc"),
    *("ti.real_func", "ti.ref", "ti.reset", "ti.set_logging_level", "ti.is_logging_effective", "ti.sync"),
    *("ti.sparse_matrix_builder", "ti.template", "ti.argpack", "ti.hex_to_rgb", "ti.rgb_to_hex"),
    *("ti.deactivate_all_snodes",),
}
ANGLES = np.array([0.37, 0.58, 0.81, 0.66, 0.27, 0.52, 0.9, 0.44, 0.73, 0.61, 0.33, 0.84, 0.47, 0.25, 0.95, 0.7])
SHAPES = {"s": (), "2": (2,), "3": (3,), "4": (4,), "p": (2, 2), "m": (3, 3), "n": (4, 4)}
CASES = [(name, signature) for name, signatures in FUNCTIONS.items() for signature in signatures]
JOINED = 9 if devices.current is None else 1  # functions in one kernel; a device may lack some
LARGE = [case for case in CASES if case[1] == "n n"]  # which take longest to compile
OTHERS = [case for case in CASES if case not in LARGE]
GROUPS = [*([case] for case in LARGE), *(OTHERS[n : n + JOINED] for n in range(0, len(OTHERS), JOINED))]


def name_of(case):
    """``tm.mix(33s->3)``"""
    name, signature = case
    return f"{name}({signature.replace(' ', '->')})"


def lookup(name):
    module, attribute = name.split(".")
    return getattr({"ti": ti, "tm": tm}[module], attribute)


@pytest.mark.sweep
@pytest.mark.taichi_only("the names of Taichi")
def test_every_callable_is_accounted_for():
    found = set()
    for prefix, module in (("ti", ti), ("tm", tm)):
        for name in dir(module):
            value = getattr(module, name)
            if name.startswith("_") or inspect.ismodule(value) or not callable(value):
                continue
            if inspect.isclass(value) and name not in ("Vector", "Matrix"):
                continue
            if value is ti.f32 or isinstance(value, type(ti.f32)) or name in ("cpu", "gpu", "axes"):
                continue
            found.add(f"{prefix}.{name}")
    assert found - set(FUNCTIONS) - ELSEWHERE == set()
    assert not set(FUNCTIONS) & ELSEWHERE


def argument(kind, number):
    """A field of no indices with numbers between 0.2 and 1, different for each argument."""
    shape = SHAPES[kind]
    size = int(np.prod(shape, dtype=int))
    values = np.roll(ANGLES, -3 * number)[:size].reshape(shape)
    if len(shape) == 2:
        return differences.matrices(values + np.diag(np.arange(1.0, shape[0] + 1)))
    return vectors(values) if shape else scalars(values)


def result(kind):
    shape = SHAPES[kind]
    return (outputs, vector_outputs, matrix_outputs)[len(shape)](*shape)


def check(cases):
    """All functions in one kernel, each with fields of its own, so that every entry of J is that of one function or 0."""
    calls, params, results = {1: [], 2: [], 3: [], 4: []}, [], []
    for name, signature in cases:
        takes, gives = signature.split()
        fields, y = [argument(kind, n) for n, kind in enumerate(takes)], result(gives)
        calls[len(fields)].append((lookup(name), *fields, y))
        params += fields
        results.append(y)
    one, two, three, four = calls.values()

    @ti.kernel
    def k():
        for f, a, y in ti.static(one):
            y[None] = f(a[None])
        for f, a, b, y in ti.static(two):
            y[None] = f(a[None], b[None])
        for f, a, b, c, y in ti.static(three):
            y[None] = f(a[None], b[None], c[None])
        for f, a, b, c, d, y in ti.static(four):
            y[None] = f(a[None], b[None], c[None], d[None])

    check_jacobian(k, params, results)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:.*does not depend on any")
@pytest.mark.parametrize("cases", GROUPS, ids=lambda cases: " ".join(name_of(case) for case in cases))
def test_functions(cases):
    """Several at a time, since compiling takes most of the time; each alone, by its name, where that fails."""
    try:
        check(cases)
    except Exception:
        pool.give_back()
        for case in cases if len(cases) > 1 else ():
            try:
                check([case])
            except Exception as error:
                raise AssertionError(f"{name_of(case)}: {error}") from error
        raise


# --- conversions and choices ------------------------------------------------------------------------------------------


def test_bits_of_a_value_that_become_a_number_again_are_refused():
    x, y, n = scalars([0.3]), outputs(2), ti.field(ti.i64, 1)
    bits = kernel_of("y[0] = ti.bit_cast(ti.bit_cast(x[0], ti.i64), ti.f64)", y=y, x=x)
    of_number = kernel_of("y[0] = ti.bit_cast(ti.bit_cast(s, ti.i64), ti.f64)", "s: ti.f64", y=y)

    @ti.kernel
    def halved():
        n = ti.bit_cast(x[0], ti.u64)
        m = n
        for _ in range(1):
            m = n >> 1
        y[0] = x[0] * ti.cast(n > 5, ti.f64)
        y[1] = ti.bit_cast(m, ti.f64)

    @ti.kernel
    def nearest():
        for _ in range(1):
            ti.atomic_min(n[0], ti.bit_cast(x[0], ti.i64))
        for i in range(1):
            y[i] = ti.bit_cast(n[0], ti.f64)

    check_refused(bits, x, y, "ti.bit_cast(ti.bit_cast(x[0], ti.i64), ti.f64)")
    with pytest.raises(UnsupportedError, match=r"bit_cast\(ti.bit_cast\(s"):
        vjp(of_number, "s", y, np.ones(2), args=(0.5,))
    check_refused(halved, x, y, "ti.bit_cast(m, ti.f64)")
    check_refused(nearest, x, y, "ti.bit_cast(n[0], ti.f64)")


def test_whole_numbers_made_of_bits_have_no_derivative():
    x, y, keys = scalars([0.3, 1.7, 0.9]), outputs(4), ti.field(ti.i64, 4)

    @ti.kernel
    def sort_by_bits():
        for i in x:
            keys[i] = ti.bit_cast(x[i] * x[0], ti.i64)
        for i in x:
            rank = 0
            for j in range(3):
                if keys[j] < ti.bit_cast(x[i] * x[0], ti.i64):
                    rank += 1
            y[rank] = x[i] ** 2 + ti.cast(ti.bit_cast(x[i], ti.i64) & 1, ti.f64) * x[0]
        bits = ti.bit_cast(x[0], ti.i64)
        y[3] = x[1] * ti.cast(bits >> 60, ti.f64)

    J = jacobian(sort_by_bits, x, y)
    odd = (x.to_numpy().view(np.int64) & 1)[[0, 2, 1]]
    expected = np.zeros((4, 3))
    expected[np.arange(3), [0, 2, 1]] = 2 * x.to_numpy()[[0, 2, 1]]
    expected[:3, 0] += odd
    expected[3, 1] = x.to_numpy().view(np.int64)[0] >> 60
    assert_allclose(J, expected, rtol=1e-14)


def test_numbers_of_threads_have_an_error_that_says_so():
    x, y = scalars([0.5, 0.7]), outputs(2)
    k = kernel_of("for i in x: y[i] = x[i] * (1 + 0 * ti.global_thread_idx())", x=x, y=y)
    with pytest.raises(UnsupportedError, match="number of the thread differs from run to run"):
        jacobian(k, x, y)


THREADS = ("simt.block", "simt.grid", "simt.subgroup", "simt.warp")  # of a GPU: they carry no tangents
ON_THE_HOST = {  # called between kernels
    *("algorithms.parallel_sort", "linalg.MatrixFreeBICGSTAB", "linalg.MatrixFreeCG", "linalg.sqrt"),
    *("sparse.grid", "sparse.usage", "ad.clear_all_gradients", "ad.grad_for", "ad.grad_replaced", "ad.no_grad"),
    *("types.argpack", "types.matrix", "types.ref", "types.struct", "types.vector"),
    *("types.is_integral", "types.is_real", "types.is_signed", "types.is_tensor"),
}
OF_VALUES = {  # of matrices, by a value or by the class; those of values are tested in test_language.py
    *("all", "any", "cast", "cross", "determinant", "dot", "fill", "get_shape", "inverse", "max", "min", "norm"),
    *("norm_inv", "norm_sqr", "normalized", "outer_product", "sum", "trace", "transpose"),
}
STATIC = {"cols", "diag", "identity", "one", "rows", "unit", "zero"}
COPIES = {"copy_from", "from_numpy", "from_paddle", "from_torch", "to_numpy", "to_paddle", "to_torch"}  # on the host
OF_FIELDS = {"fill", "get_member_field", "get_scalar_field", "parent"}  # fill: test_language_whole_fields.py
OF_NODES = {  # on the host, except parent
    *("bitmasked", "deactivate_all", "dense", "dynamic", "lazy_dual", "lazy_grad", "parent", "place", "pointer"),
    "quant_array",
}


def functions_of(name):
    """The functions of a module of Taichi's, without types."""
    module = operator.attrgetter(name)(ti)
    found = {n: f for n, f in vars(module).items() if not n.startswith("_") and callable(f)}
    return {n: f for n, f in found.items() if not inspect.isclass(f) and not isinstance(f, type(ti.f32))}


def methods_of(kind):
    names = (name for name in dir(kind) if not name.startswith("_"))
    return {name for name in names if callable(getattr(kind, name))}


@pytest.mark.taichi_only("a table of the names of Taichi")
def test_functions_of_modules():
    found = {f"{m}.{f}" for m in ("algorithms", "linalg", "sparse", "types", "ad") for f in functions_of(m)}
    assert found == ON_THE_HOST


@pytest.mark.taichi_only("a table of the names of Taichi")
@pytest.mark.parametrize("name", THREADS)
def test_functions_of_threads(name):
    own = [f for f in functions_of(name).values() if f.__module__ == f"taichi.lang.{name}"]
    assert own
    assert WITHOUT_TANGENTS.issuperset(own)


@pytest.mark.taichi_only("a table of the names of Taichi")
def test_methods():
    assert methods_of(ti.Matrix) == OF_VALUES | STATIC | {"field", "ndarray", "to_list", "to_numpy"}
    assert methods_of(ti.Vector) == methods_of(ti.Matrix)
    assert methods_of(ti.Struct) == {"field", "to_dict"}
    fields = (ti.Field, ti.ScalarField, ti.MatrixField, ti.StructField)
    assert set.union(*map(methods_of, fields)) == OF_FIELDS | COPIES
    assert methods_of(ti.SNode) == OF_NODES
