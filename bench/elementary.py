"""The coefficients in schedule/elementary.py, which Chebyshev series give: python bench/elementary.py."""

import mpmath as mp
import numpy as np

mp.mp.dps = 50
LOG2 = mp.log(2) * mp.mpf("1.0001")
HALF = (mp.sqrt(0.5) - 1, mp.sqrt(2) - 1)  # of a power of 2 on each side of 1


def exp(r):
    """What is left of exp behind 1 + r, by r**2."""
    return (mp.expm1(r) - r) / r**2


def log(f):
    """What is left of log(1 + f) behind f - f**2 / 2, by f**3."""
    return (mp.log1p(f) - f + f * f / 2) / f**3


def log_of_ratio(z):
    """What is left of log((1 + s) / (1 - s)) behind 2 * s, by s**3, with z = s**2."""
    return 2 * (mp.atanh(mp.sqrt(z)) - mp.sqrt(z)) / mp.sqrt(z) ** 3


def tanh(z):
    """What is left of tanh(x) behind x, by x**3, with z = x**2."""
    return (mp.tanh(mp.sqrt(z)) - mp.sqrt(z)) / mp.sqrt(z) ** 3


SERIES = {
    "exp, float32": (exp, (-LOG2 / 2, LOG2 / 2), 4, np.float32),
    "exp, float64": (exp, (-LOG2 / 2, LOG2 / 2), 9, np.float64),
    "exp, float64, later": (exp, (-0.2 * LOG2, 0.8 * LOG2), 10, np.float64),
    "log, float32": (log, HALF, 8, np.float32),
    "log, float64": (log_of_ratio, (0, (HALF[1] / (HALF[1] + 2)) ** 2), 6, np.float64),
    "tanh, float32": (tanh, (0, 0.625**2), 5, np.float32),
    "tanh, float64": (tanh, (0, 0.25**2), 6, np.float64),
}


def coefficients(name: str) -> list[str]:
    """Highest powers first; the functions are 0 / 0 at 0, which is moved a little."""
    function, ends, degree, dtype = SERIES[name]
    found = mp.chebyfit(lambda x: function(x if abs(x) > 1e-20 else mp.mpf("1e-20")), ends, degree + 1)
    return [str(dtype(float(c))) for c in found]


if __name__ == "__main__":
    for name in SERIES:
        print(f"{name}: {', '.join(coefficients(name))}")
