"""The problems of ``more_garbow_hillstrom`` in Taichi: for each a row of its residuals, and a kernel of all of them."""

import math

import taichi as ti
from kernel_texts import kernels_of, names_of

ARRAY = ti.types.ndarray(dtype=ti.f64, ndim=1)
ROWS = """
    rosenbrock:
        r = 0.0
        if i % 2 == 0:
            r = 10 * (x[i + 1] - x[i] ** 2)
        else:
            r = 1 - x[i - 1]
        return r
    powell_badly_scaled:
        r = 1e4 * x[0] * x[1] - 1
        if i == 1:
            r = ti.exp(-x[0]) + ti.exp(-x[1]) - 1.0001
        return r
    beale:
        return y - x[0] * (1 - x[1] ** (i + 1))
    bard:
        return y - (x[0] + t / ((16 - t) * x[1] + ti.min(t, 16 - t) * x[2]))
    meyer:
        return x[0] * ti.exp(x[1] / (t + x[2])) - y
    box:
        return ti.exp(-t * x[0]) - ti.exp(-t * x[1]) - x[2] * (ti.exp(-t) - ti.exp(-10 * t))
    powell_singular:
        j = i // 4 * 4
        r = x[j] + 10 * x[j + 1]
        if i % 4 == 1:
            r = ti.sqrt(5.0) * (x[j + 2] - x[j + 3])
        elif i % 4 == 2:
            r = (x[j + 1] - 2 * x[j + 2]) ** 2
        elif i % 4 == 3:
            r = ti.sqrt(10.0) * (x[j] - x[j + 3]) ** 2
        return r
    kowalik_osborne:
        return y - x[0] * t * (t + x[1]) / (t * (t + x[2]) + x[3])
    brown_dennis:
        return (x[0] + t * x[1] - ti.exp(t)) ** 2 + (x[2] + x[3] * ti.sin(t) - ti.cos(t)) ** 2
    osborne_1:
        return y - (x[0] + x[1] * ti.exp(-t * x[3]) + x[2] * ti.exp(-t * x[4]))
    watson:
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
    penalty_1:
        r = -0.25
        if i < x.shape[0]:
            r = ti.sqrt(1e-5) * (x[i] - 1)
        else:
            for j in range(x.shape[0]):
                r += x[j] ** 2
        return r
    brown_almost_linear:
        n = x.shape[0]
        total, product = -(n + 1.0), 1.0
        for j in range(n):
            total += x[j]
            product *= x[j]
        r = product - 1
        if i < n - 1:
            r = x[i] + total
        return r
    broyden_banded:
        r = x[i] * (2 + 5 * x[i] ** 2) + 1
        for j in range(ti.max(0, i - 5), ti.min(x.shape[0], i + 2)):
            if j != i:
                r -= x[j] * (1 + x[j])
        return r
    linear_rank_1:
        r = -1.0
        for j in range(x.shape[0]):
            r += (i + 1) * (j + 1) * x[j]
        return r
    chebyquad:
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
    helical_valley:
        turn = ti.atan2(x[1], x[0]) / (2 * math.pi)
        if x[0] < 0 and x[1] < 0:
            turn += 1.0
        r = 10 * (x[2] - 10 * turn)
        if i == 1:
            r = 10 * (ti.sqrt(x[0] ** 2 + x[1] ** 2) - 1)
        elif i == 2:
            r = x[2]
        return r
"""
NAMES = [*names_of(ROWS), "extended_rosenbrock", "extended_powell_singular"]


def kernel_of(name):
    """A kernel of the params, the data and the residuals of a problem."""
    rows = kernels_of(ROWS, decorator="@ti.func", arguments="(x: ti.template(), i, t, y)", math=math)
    row = rows[name.removeprefix("extended_")]

    @ti.kernel
    def residuals(x: ARRAY, t: ARRAY, y: ARRAY, r: ARRAY):
        for i in range(r.shape[0]):
            r[i] = row(x, i, t[i], y[i])

    return residuals
