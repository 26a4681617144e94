"""The test problems of J. J. More, B. S. Garbow, K. E. Hillstrom, Testing unconstrained optimization software, 1981.

Each is written twice: residuals in NumPy, for real and complex params, whose J is found by complex steps; and, in
``more_garbow_hillstrom_kernels``, a row of them in Taichi.  Problem 11 has ``abs(y - x[1])`` for the misprint ``y m i``.
"""

from typing import NamedTuple

import numpy as np


class Data(NamedTuple):
    """Constants of a problem's rows, one of each for a row."""

    t: np.ndarray
    y: np.ndarray


_BARD = [0.14, 0.18, 0.22, 0.25, 0.29, 0.32, 0.35, 0.39, 0.37, 0.58, 0.73, 0.96, 1.34, 2.1, 4.39]
_GAUSS = [0.0009, 0.0044, 0.0175, 0.054, 0.1295, 0.242, 0.3521, 0.3989]
_MEYER = [34780, 28610, 23650, 19630, 16370, 13720, 11540, 9744, 8261, 7030, 6005, 5147, 4427, 3820, 3307, 2872]
_KOWALIK = [0.1957, 0.1947, 0.1735, 0.16, 0.0844, 0.0627, 0.0456, 0.0342, 0.0323, 0.0235, 0.0246]
_KOWALIK_AT = [4, 2, 1, 0.5, 0.25, 0.167, 0.125, 0.1, 0.0833, 0.0714, 0.0625]
_OSBORNE_1 = (
    "844 908 932 936 925 908 881 850 818 784 751 718 685 658 628 603 580 558 538 522 506 490 478 467 457 448 438 431 424 "
    "420 414 411 406"
)
_OSBORNE_2 = (
    "1366 1191 1112 1013 991 885 831 847 786 725 746 679 608 655 616 606 602 626 651 724 649 649 694 644 624 661 612 558 "
    "533 495 500 423 395 375 372 391 396 405 428 429 523 562 607 653 672 708 633 668 645 632 591 559 597 625 739 710 729 "
    "720 636 581 428 292 162 98 54"
)


def _thousandths(text):
    return np.array(text.split(), float) / 1000


def _sqrt_of_square(v):
    return np.where(v.real < 0, -v, v)


def _rosenbrock(x, _):
    return np.stack([10 * (x[1::2] - x[::2] ** 2), 1 - x[::2]], axis=1).ravel()


def _freudenstein_roth(x, _):
    a, b = x
    return np.array([-13 + a + ((5 - b) * b - 2) * b, -29 + a + ((b + 1) * b - 14) * b])


def _powell_badly_scaled(x, _):
    return np.array([1e4 * x[0] * x[1] - 1, np.exp(-x).sum() - 1.0001])


def _brown_badly_scaled(x, _):
    return np.array([x[0] - 1e6, x[1] - 2e-6, x[0] * x[1] - 2])


def _beale(x, d):
    return d.y - x[0] * (1 - x[1] ** d.t)


def _jennrich_sampson(x, d):
    return 2 + 2 * d.t - np.exp(d.t * x[0]) - np.exp(d.t * x[1])


def _helical_valley(x, _):
    turn = np.arctan(x[1] / x[0]) / (2 * np.pi) + 0.5 * (x[0].real < 0)
    return np.array([10 * (x[2] - 10 * turn), 10 * (np.sqrt(x[0] ** 2 + x[1] ** 2) - 1), x[2]])


def _bard(x, d):
    return d.y - x[0] - d.t / ((16 - d.t) * x[1] + np.minimum(d.t, 16 - d.t) * x[2])


def _gaussian(x, d):
    return x[0] * np.exp(-x[1] * (d.t - x[2]) ** 2 / 2) - d.y


def _meyer(x, d):
    return x[0] * np.exp(x[1] / (d.t + x[2])) - d.y


def _gulf(x, d):
    return np.exp(-(_sqrt_of_square(d.y - x[1]) ** x[2]) / x[0]) - d.t


def _box(x, d):
    return np.exp(-d.t * x[0]) - np.exp(-d.t * x[1]) - x[2] * (np.exp(-d.t) - np.exp(-10 * d.t))


def _powell_singular(x, _):
    a, b, c, d = x.reshape(-1, 4).T
    rows = [a + 10 * b, 5**0.5 * (c - d), (b - 2 * c) ** 2, 10**0.5 * (a - d) ** 2]
    return np.stack(rows, axis=1).ravel()


def _wood(x, _):
    a, b, c, d = x
    return np.array([10 * (b - a**2), 1 - a, 90**0.5 * (d - c**2), 1 - c, 10**0.5 * (b + d - 2), (b - d) / 10**0.5])


def _kowalik_osborne(x, d):
    return d.y - x[0] * (d.t**2 + d.t * x[1]) / (d.t**2 + d.t * x[2] + x[3])


def _brown_dennis(x, d):
    return (x[0] + d.t * x[1] - np.exp(d.t)) ** 2 + (x[2] + x[3] * np.sin(d.t) - np.cos(d.t)) ** 2


def _osborne_1(x, d):
    return d.y - x[0] - x[1] * np.exp(-d.t * x[3]) - x[2] * np.exp(-d.t * x[4])


def _biggs(x, d):
    return x[2] * np.exp(-d.t * x[0]) - x[3] * np.exp(-d.t * x[1]) + x[5] * np.exp(-d.t * x[4]) - d.y


def _osborne_2(x, d):
    peaks = x[1:4, None] * np.exp(-((d.t - x[8:, None]) ** 2) * x[5:8, None])
    return d.y - x[0] * np.exp(-d.t * x[4]) - peaks.sum(axis=0)


def _watson(x, d):
    t, powers = d.t[:29, None], np.arange(len(x))
    slope = (powers[1:] * x[1:] * t ** powers[:-1]).sum(axis=1)
    return np.append(slope - (x * t**powers).sum(axis=1) ** 2 - 1, [x[0], x[1] - x[0] ** 2 - 1])


def _penalty_1(x, _):
    return np.append(1e-5**0.5 * (x - 1), (x**2).sum() - 0.25)


def _penalty_2(x, _):
    n, root = len(x), 1e-5**0.5
    i = np.arange(2, n + 1) / 10
    grown = np.exp(x / 10)
    pairs = grown[1:] + grown[:-1] - np.exp(i) - np.exp(i - 0.1)
    last = (np.arange(n, 0, -1) * x**2).sum() - 1
    return np.concatenate([[x[0] - 0.2], root * pairs, root * (grown[1:] - np.exp(-0.1)), [last]])


def _variably_dimensioned(x, _):
    s = (np.arange(1, len(x) + 1) * (x - 1)).sum()
    return np.append(x - 1, [s, s**2])


def _trigonometric(x, _):
    i = np.arange(1, len(x) + 1)
    return len(x) - np.cos(x).sum() + i * (1 - np.cos(x)) - np.sin(x)


def _brown_almost_linear(x, _):
    return np.append(x[:-1] + x.sum() - (len(x) + 1), x.prod() - 1)


def _cubes(x):
    t = np.arange(1, len(x) + 1) / (len(x) + 1)
    return t, (x + t + 1) ** 3


def _discrete_boundary(x, _):
    padded = np.concatenate([[0], x, [0]])
    return 2 * x - padded[:-2] - padded[2:] + _cubes(x)[1] / (2 * (len(x) + 1) ** 2)


def _discrete_integral(x, _):
    t, cubes = _cubes(x)
    total = (1 - t) * np.cumsum(t * cubes) + t * (((1 - t) * cubes).sum() - np.cumsum((1 - t) * cubes))
    return x + total / (2 * (len(x) + 1))


def _broyden_tridiagonal(x, _):
    padded = np.concatenate([[0], x, [0]])
    return (3 - 2 * x) * x - padded[:-2] - 2 * padded[2:] + 1


def _broyden_banded(x, _):
    terms = x * (1 + x)
    near = [terms[max(0, i - 5) : i + 2].sum() - terms[i] for i in range(len(x))]
    return x * (2 + 5 * x**2) + 1 - np.array(near)


def _linear_full_rank(x, d):
    m = len(d.t)
    return np.append(x, np.zeros(m - len(x))) - 2 / m * x.sum() - 1


def _linear_rank_1(x, d):
    return d.t * (np.arange(1, len(x) + 1) * x).sum() - 1


def _linear_rank_1_zero(x, d):
    s = (np.arange(2, len(x)) * x[1:-1]).sum()
    return np.concatenate([[-1 + 0 * s], (d.t[1:-1] - 1) * s - 1, [-1 + 0 * s]])


def _chebyquad(x, _):
    before, now, rows = np.ones_like(x), 2 * x - 1, []
    for i in range(1, len(x) + 1):
        rows.append(now.mean() + (1 / (i**2 - 1) if i % 2 == 0 else 0))
        before, now = now, 2 * (2 * x - 1) * now - before
    return np.array(rows)


class Problem(NamedTuple):
    """A problem: residuals of the params and the data, the standard start, and the data."""

    residuals: object
    start: np.ndarray
    data: Data

    def fun(self, x):
        """The residuals."""
        with np.errstate(all="ignore"):
            return self.residuals(np.asarray(x), self.data)

    def jac(self, x):
        """J, by complex steps."""
        with np.errstate(all="ignore"):
            steps = np.asarray(x, complex) + 1e-30j * np.eye(len(x))
            return np.stack([self.residuals(step, self.data).imag / 1e-30 for step in steps], axis=1)


def _problem(residuals, start, m, t=None, y=None):
    rows = np.arange(1, m + 1, dtype=float)
    return Problem(
        residuals, np.array(start, float), Data(*(rows if d is None else np.array(d, float) for d in (t, y)))
    )


_i = np.arange(1, 101)
_tenths = _i[:13] / 10
_grid = _i[:10] / 11
PROBLEMS = {
    "rosenbrock": _problem(_rosenbrock, [-1.2, 1], 2),
    "freudenstein_roth": _problem(_freudenstein_roth, [0.5, -2], 2),
    "powell_badly_scaled": _problem(_powell_badly_scaled, [0, 1], 2),
    "brown_badly_scaled": _problem(_brown_badly_scaled, [1, 1], 3),
    "beale": _problem(_beale, [1, 1], 3, y=[1.5, 2.25, 2.625]),
    "jennrich_sampson": _problem(_jennrich_sampson, [0.3, 0.4], 10),
    "helical_valley": _problem(_helical_valley, [-1, 0, 0], 3),
    "bard": _problem(_bard, [1, 1, 1], 15, y=_BARD),
    "gaussian": _problem(_gaussian, [0.4, 1, 0], 15, (8 - _i[:15]) / 2, _GAUSS + _GAUSS[-2::-1]),
    "meyer": _problem(_meyer, [0.02, 4000, 250], 16, 45 + 5 * _i[:16], _MEYER),
    "gulf": _problem(_gulf, [5, 2.5, 0.15], 10, _i[:10] / 100, 25 + (-50 * np.log(_i[:10] / 100)) ** (2 / 3)),
    "box": _problem(_box, [0, 10, 20], 10, _tenths[:10]),
    "powell_singular": _problem(_powell_singular, [3, -1, 0, 1], 4),
    "wood": _problem(_wood, [-3, -1, -3, -1], 6),
    "kowalik_osborne": _problem(_kowalik_osborne, [0.25, 0.39, 0.415, 0.39], 11, _KOWALIK_AT, _KOWALIK),
    "brown_dennis": _problem(_brown_dennis, [25, 5, -5, -1], 20, _i[:20] / 5),
    "osborne_1": _problem(_osborne_1, [0.5, 1.5, -1, 0.01, 0.02], 33, 10 * (_i[:33] - 1), _thousandths(_OSBORNE_1)),
    "biggs": _problem(
        _biggs, [1, 2, 1, 1, 1, 1], 13, _tenths, np.exp(-_tenths) - 5 * np.exp(-10 * _tenths) + 3 * np.exp(-4 * _tenths)
    ),
    "osborne_2": _problem(
        _osborne_2, [1.3, 0.65, 0.65, 0.7, 0.6, 3, 5, 7, 2, 4.5, 5.5], 65, (_i[:65] - 1) / 10, _thousandths(_OSBORNE_2)
    ),
    "watson": _problem(_watson, np.zeros(9), 31, _i[:31] / 29),
    "extended_rosenbrock": _problem(_rosenbrock, [-1.2, 1] * 5, 10),
    "extended_powell_singular": _problem(_powell_singular, [3, -1, 0, 1] * 3, 12),
    "penalty_1": _problem(_penalty_1, [1, 2, 3, 4], 5),
    "penalty_2": _problem(_penalty_2, [0.5] * 4, 8),
    "variably_dimensioned": _problem(_variably_dimensioned, 1 - _i[:10] / 10, 12),
    "trigonometric": _problem(_trigonometric, [0.1] * 10, 10),
    "brown_almost_linear": _problem(_brown_almost_linear, [0.5] * 10, 10),
    "discrete_boundary": _problem(_discrete_boundary, _grid * (_grid - 1), 10),
    "discrete_integral": _problem(_discrete_integral, _grid * (_grid - 1), 10),
    "broyden_tridiagonal": _problem(_broyden_tridiagonal, [-1] * 10, 10),
    "broyden_banded": _problem(_broyden_banded, [-1] * 10, 10),
    "linear_full_rank": _problem(_linear_full_rank, [1] * 5, 10),
    "linear_rank_1": _problem(_linear_rank_1, [1] * 5, 10),
    "linear_rank_1_zero": _problem(_linear_rank_1_zero, [1] * 5, 10),
    "chebyquad": _problem(_chebyquad, _i[:8] / 9, 8),
}
