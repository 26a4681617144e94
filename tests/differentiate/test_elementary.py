"""Elementary functions as arithmetic: within 2 units in the last place of long doubles, where LLVM vectorises them."""

import linecache

import numpy as np
import pytest
import taichi as ti
from numpy.testing import assert_allclose

from taichi_ext import Jacobian
from taichi_ext.schedule.elementary import ELEMENTARY

pytestmark = pytest.mark.cpu_only("loops run in lanes, and functions as arithmetic, on the CPU")

LANES = """import taichi as ti

{text}

@ti.kernel
def run(x: ti.types.ndarray(dtype=ti.{type}, ndim=2), y: ti.types.ndarray(dtype=ti.{type}, ndim=1)):
    for piece in range(y.shape[0] // 16):
        a, b, c = ti.Vector([0.0] * 16, ti.{type}), ti.Vector([0.0] * 16, ti.{type}), ti.Vector([0.0] * 16, ti.{type})
        for k in range(16):
            a[k] = x[0, 16 * piece + k]
            b[k] = x[x.shape[0] - 1, 16 * piece + k]
        for k in range(16):
            c[k] = {name}({arguments})
        for k in range(16):
            y[16 * piece + k] = c[k]
"""
FUNCTIONS = {"asin": np.arcsin, "acos": np.arccos, "atan2": np.arctan2, "pow": np.power}


def points(dtype, seed=0, count=10_000):
    """All special numbers, numbers with any bits, of moderate size, and near 1."""
    random, bits = np.random.default_rng(seed), np.dtype(dtype).itemsize * 8
    any_bits = random.integers(0, 2**bits, count, dtype=f"uint{bits}").view(dtype)
    moderate = random.uniform(-1, 1, count) * 10 ** random.uniform(-8, 3, count)
    near = 1 + random.uniform(-1, 1, count) * 10 ** random.uniform(-8, 0, count)
    f = np.finfo(dtype)
    special = [0.0, np.inf, np.nan, f.tiny, f.tiny / 2, f.smallest_subnormal, f.max, 1, *np.float32([88.72, 88.73])]
    special += [np.pi, np.pi / 2, 11, 355, 1e5, 1e20, 16367173 * 2.0**72, 16367173 * 2.0**71]  # near multiples of pi
    special += [87.33, 87.34, 103, 104, 708.39, 708.4, 709.78, 709.79, 745.1, 745.2]
    special += [0.5, 1 - f.eps, 1 + f.eps, 2, 2.5, 3, 2.0**24 - 1, 2.0**24]
    signed = np.array([*special, *np.negative(special)], dtype)
    return signed, np.concatenate([any_bits, moderate.astype(dtype), near.astype(dtype)])


def arguments_of(name, dtype):
    """What a function is called with, one row for each argument; of two, with all pairs of special numbers."""
    special, others = points(dtype)
    found = np.concatenate([special, others])[None]
    if "," in ELEMENTARY[name].arguments:
        pairs = np.stack([np.repeat(special, special.size), np.tile(special, special.size)])
        found = np.hstack([pairs, np.stack([others, points(dtype, 1)[1]])])
    return np.resize(found.T, (-(-found.shape[1] // 16) * 16, len(found))).T.copy()


def in_lanes(name, x):
    e = ELEMENTARY[name]
    arguments = "a[k], b[k]" if len(x) > 1 else "a[k]"
    text = LANES.format(text=e.text, type=e.dtype.name, name=name, arguments=arguments)
    file, scope, y = f"<{name}>", {}, np.zeros_like(x[0])
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    exec(compile(text, file, "exec"), scope)
    scope["run"](x, y)
    return y


@pytest.mark.mostly_sweep("tan_f32")
@pytest.mark.parametrize("name", ELEMENTARY)
@pytest.mark.filterwarnings("ignore:Casting range_for")
def test_errors(name):
    dtype = np.float32 if name.endswith("32") else np.float64
    if dtype == np.float64 and np.finfo(np.longdouble).nmant <= 52:
        pytest.skip("there are no long doubles here")
    x, f, short = arguments_of(name, dtype), np.finfo(dtype), name.split("_")[0]
    function = FUNCTIONS[short] if short in FUNCTIONS else getattr(np, short)
    with np.errstate(all="ignore"):
        # Taichi takes the least numbers for zero
        exact = function(*np.where(np.abs(x) < f.tiny, np.copysign(dtype(0), x), x).astype(np.longdouble))
        expected = exact.astype(dtype)
    ti.init(ti.cpu, offline_cache=False, default_ip=ti.i64)
    actual = in_lanes(name, x)
    is_number = np.isfinite(expected)
    np.testing.assert_array_equal(actual[~is_number], expected[~is_number])
    is_signed = is_number & ((x[0] != 1) | (function is not np.log))
    np.testing.assert_array_equal(np.signbit(actual[is_signed]), np.signbit(expected[is_signed]))
    is_least = np.abs(exact) < f.tiny * (1 + 4 * f.eps)
    assert np.abs(actual[is_least]).max(initial=0) <= f.tiny * (1 + 4 * f.eps)
    is_compared = is_number & ~is_least
    _, exponents = np.frexp(exact[is_compared])
    units = np.ldexp(np.longdouble(1), exponents - f.nmant - 1)
    assert (np.abs(actual[is_compared] - exact[is_compared]) / units).max() <= 2


@pytest.mark.mostly_sweep("False")
@pytest.mark.parametrize("is_fast", [True, False])
def test_only_with_fast_math(is_fast):
    ti.init(ti.cpu, offline_cache=False, fast_math=is_fast, cpu_max_num_threads=1)
    x, y = ti.field(ti.f32, 3), ti.field(ti.f32, (40, 640))
    x.from_numpy(np.float32([0.3, 0.8, 0.5]))
    exp_f32 = 0.1

    @ti.kernel
    def k():
        for i, j in y:
            y[i, j] = ti.exp(-x[0] * j * exp_f32) + ti.tanh(x[1] * j * 0.1) * ti.log(x[2] * j + 1.0) + ti.sin(x[1] * i)
            y[i, j] += (x[0] + 0.01 * j) ** x[1] + ti.atan2(x[2] * j, 1.0 + x[0])

    plan = Jacobian(k, x, y)
    J = plan()
    assert all(
        (f"def {name}_f32" in plan.source) == is_fast for name in ("exp", "log", "tanh", "sin", "cos", "pow", "atan2")
    )
    i, j = np.mgrid[:40, :640].astype(float)
    a, b, c = x.to_numpy().astype(float)
    by_a = -j * exp_f32 * np.exp(-a * j * exp_f32)
    by_b = 0.1 * j * (1 - np.tanh(b * j * 0.1) ** 2) * np.log(c * j + 1) + i * np.cos(b * i)
    by_c = np.tanh(b * j * 0.1) * j / (c * j + 1)
    power, squares = (a + 0.01 * j) ** b, (c * j) ** 2 + (1 + a) ** 2
    by_a += b * power / (a + 0.01 * j) - c * j / squares
    by_b += power * np.log(a + 0.01 * j)
    by_c += (1 + a) * j / squares
    assert_allclose(J, np.stack([by_a, by_b, by_c], -1), rtol=1e-4, atol=1e-4)
