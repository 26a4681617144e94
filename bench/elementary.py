"""The coefficients in schedule/elementary.py, which Chebyshev series give: python bench/elementary.py."""

import mpmath as mp
import numpy as np

mp.mp.dps = 90
LOG2 = mp.log(2) * mp.mpf("1.0001")
HALF = (mp.sqrt(0.5) - 1, mp.sqrt(2) - 1)  # of a power of 2 on each side of 1


def exp(r):
    """What is left of exp behind 1 + r, by r**2."""
    return (mp.expm1(r) - r) / r**2


def log(f):
    """What is left of log(1 + f) behind f - f**2 / 2, by f**3."""
    return (mp.log1p(f) - f + f * f / 2) / f**3


def tanh(z):
    """What is left of tanh(x) behind x, by x**3, with z = x**2."""
    return (mp.tanh(mp.sqrt(z)) - mp.sqrt(z)) / mp.sqrt(z) ** 3


def sin(z):
    """What is left of sin(y) behind y, by y**3, with z = y**2."""
    return (mp.sin(mp.sqrt(z)) - mp.sqrt(z)) / mp.sqrt(z) ** 3


def cos(z):
    """What is left of cos(y) behind 1 - z / 2, by z**2, with z = y**2."""
    return (mp.cos(mp.sqrt(z)) - 1 + z / 2) / z**2


def asin(z):
    """What is left of asin(x) behind x, by x**3, with z = x**2."""
    return (mp.asin(mp.sqrt(z)) - mp.sqrt(z)) / mp.sqrt(z) ** 3


def atan(z):
    """What is left of atan(x) behind x, by x**3, with z = x**2."""
    return (mp.atan(mp.sqrt(z)) - mp.sqrt(z)) / mp.sqrt(z) ** 3


def log2_of_ratio(z):
    """log2((1 + s) / (1 - s)) by s, with z = s**2."""
    return 2 * mp.atanh(mp.sqrt(z)) / mp.sqrt(z) / mp.log(2)


def exp2(r):
    """What is left of 2**r behind 1, by r."""
    return (mp.mpf(2) ** r - 1) / r


def parts_of_turn(bits: int = 29, count: int = 7) -> list[str]:
    """1 / (2 * pi) as a sum of numbers with so many bits each: their products with a float32 are exact in float64."""
    rest, found = 1 / (2 * mp.pi), []
    for k in range(1, count + 1):
        part = mp.floor(rest * mp.mpf(2) ** (bits * k)) / mp.mpf(2) ** (bits * k)
        found.append(repr(float(part)))
        rest -= part
    return found


QUARTER = (0, (mp.pi / 4 * mp.mpf("1.0001")) ** 2)

SERIES = {
    "exp, float32": (exp, (-LOG2 / 2, LOG2 / 2), 4, np.float32),
    "exp, float64": (exp, (-0.2 * LOG2, 0.8 * LOG2), 10, np.float64),
    "log, float32": (log, HALF, 8, np.float32),
    "tanh, float32": (tanh, (0, 0.625**2), 5, np.float32),
    "tanh, float64": (tanh, (0, 0.256**2), 6, np.float64),
    "sin, float32": (sin, QUARTER, 3, np.float32),
    "cos, float32": (cos, QUARTER, 2, np.float32),
    "asin, float32": (asin, (0, 0.25), 4, np.float32),
    "atan, float32": (atan, (0, 1), 8, np.float32),
    "atan, float64": (atan, (0, 1), 19, np.float64),
    "log2, float64": (log2_of_ratio, (0, (HALF[1] / (HALF[1] + 2)) ** 2), 5, np.float64),
    "exp2, float64": (exp2, (-0.501, 0.501), 6, np.float64),
}


def coefficients(name: str) -> list[str]:
    """Highest powers first; the functions are 0 / 0 at 0, which is moved a little."""
    function, ends, degree, dtype = SERIES[name]
    found = mp.chebyfit(lambda x: function(x if abs(x) > 1e-20 else mp.mpf("1e-20")), ends, degree + 1)
    return [str(dtype(float(c))) for c in found]


if __name__ == "__main__":
    for name in SERIES:
        print(f"{name}: {', '.join(coefficients(name))}")
    print(f"turn: {', '.join(parts_of_turn())}")
