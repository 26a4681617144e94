"""The problems of ``more_garbow_hillstrom`` in Taichi: for each a row of its residuals, and a kernel of all of them."""

# The annotations of kernels are values that Taichi reads.

import math

import taichi as ti

ARRAY = ti.types.ndarray(dtype=ti.f64, ndim=1)


def _rosenbrock(x: ti.template(), i, t, y):
    r = 0.0
    if i % 2 == 0:
        r = 10 * (x[i + 1] - x[i] ** 2)
    else:
        r = 1 - x[i - 1]
    return r


def _powell_badly_scaled(x: ti.template(), i, t, y):
    r = 1e4 * x[0] * x[1] - 1
    if i == 1:
        r = ti.exp(-x[0]) + ti.exp(-x[1]) - 1.0001
    return r


def _beale(x: ti.template(), i, t, y):
    return y - x[0] * (1 - x[1] ** (i + 1))


def _bard(x: ti.template(), i, t, y):
    return y - (x[0] + t / ((16 - t) * x[1] + ti.min(t, 16 - t) * x[2]))


def _meyer(x: ti.template(), i, t, y):
    return x[0] * ti.exp(x[1] / (t + x[2])) - y


def _box(x: ti.template(), i, t, y):
    return ti.exp(-t * x[0]) - ti.exp(-t * x[1]) - x[2] * (ti.exp(-t) - ti.exp(-10 * t))


def _powell_singular(x: ti.template(), i, t, y):
    j = i // 4 * 4
    r = x[j] + 10 * x[j + 1]
    if i % 4 == 1:
        r = ti.sqrt(5.0) * (x[j + 2] - x[j + 3])
    elif i % 4 == 2:
        r = (x[j + 1] - 2 * x[j + 2]) ** 2
    elif i % 4 == 3:
        r = ti.sqrt(10.0) * (x[j] - x[j + 3]) ** 2
    return r


def _kowalik_osborne(x: ti.template(), i, t, y):
    return y - x[0] * t * (t + x[1]) / (t * (t + x[2]) + x[3])


def _brown_dennis(x: ti.template(), i, t, y):
    return (x[0] + t * x[1] - ti.exp(t)) ** 2 + (x[2] + x[3] * ti.sin(t) - ti.cos(t)) ** 2


def _osborne_1(x: ti.template(), i, t, y):
    return y - (x[0] + x[1] * ti.exp(-t * x[3]) + x[2] * ti.exp(-t * x[4]))


def _watson(x: ti.template(), i, t, y):
    r = x[0]
    if i == 30:
        r = x[1] - x[0] ** 2 - 1
    elif i < 29:
        value, slope, power = 0.0, 0.0, 1.0
        for j in range(x.shape[0]):
            value += x[j] * power
            if j + 1 < x.shape[0]:
                slope += (j + 1) * x[j + 1] * power
            power *= t
        r = slope - value**2 - 1
    return r


def _penalty_1(x: ti.template(), i, t, y):
    r = -0.25
    if i < x.shape[0]:
        r = ti.sqrt(1e-5) * (x[i] - 1)
    else:
        for j in range(x.shape[0]):
            r += x[j] ** 2
    return r


def _brown_almost_linear(x: ti.template(), i, t, y):
    n = x.shape[0]
    total, product = -(n + 1.0), 1.0
    for j in range(n):
        total += x[j]
        product *= x[j]
    r = product - 1
    if i < n - 1:
        r = x[i] + total
    return r


def _broyden_banded(x: ti.template(), i, t, y):
    r = x[i] * (2 + 5 * x[i] ** 2) + 1
    for j in range(ti.max(0, i - 5), ti.min(x.shape[0], i + 2)):
        if j != i:
            r -= x[j] * (1 + x[j])
    return r


def _linear_rank_1(x: ti.template(), i, t, y):
    r = -1.0
    for j in range(x.shape[0]):
        r += (i + 1) * (j + 1) * x[j]
    return r


def _chebyquad(x: ti.template(), i, t, y):
    r = 0.0
    for j in range(x.shape[0]):
        before, now = 1.0, 2 * x[j] - 1
        for _ in range(i):
            after = 2 * (2 * x[j] - 1) * now - before
            before = now
            now = after
        r += now / x.shape[0]
    if i % 2 == 1:
        r += 1.0 / ((i + 1) ** 2 - 1)
    return r


def _helical_valley(x: ti.template(), i, t, y):
    turn = ti.atan2(x[1], x[0]) / (2 * math.pi)
    if x[0] < 0 and x[1] < 0:
        turn += 1.0
    r = 10 * (x[2] - 10 * turn)
    if i == 1:
        r = 10 * (ti.sqrt(x[0] ** 2 + x[1] ** 2) - 1)
    elif i == 2:
        r = x[2]
    return r


ROWS = {
    "rosenbrock": _rosenbrock,
    "powell_badly_scaled": _powell_badly_scaled,
    "beale": _beale,
    "helical_valley": _helical_valley,
    "bard": _bard,
    "meyer": _meyer,
    "box": _box,
    "powell_singular": _powell_singular,
    "kowalik_osborne": _kowalik_osborne,
    "brown_dennis": _brown_dennis,
    "osborne_1": _osborne_1,
    "watson": _watson,
    "extended_rosenbrock": _rosenbrock,
    "extended_powell_singular": _powell_singular,
    "penalty_1": _penalty_1,
    "brown_almost_linear": _brown_almost_linear,
    "broyden_banded": _broyden_banded,
    "linear_rank_1": _linear_rank_1,
    "chebyquad": _chebyquad,
}


def kernel_of(name):
    """A kernel of the params, the data and the residuals of a problem."""
    row = ti.func(ROWS[name])

    @ti.kernel
    def residuals(x: ARRAY, t: ARRAY, y: ARRAY, r: ARRAY):
        for i in range(r.shape[0]):
            r[i] = row(x, i, t[i], y[i])

    return residuals
