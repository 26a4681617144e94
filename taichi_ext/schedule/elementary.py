"""Elementary functions as arithmetic, which LLVM puts into vectors; the library takes one number at a time.

One line of the table for a function of a type: the coefficients of its polynomials, highest powers first, and the lines
of a ``ti.func``. ``bench/elementary.py`` computes the coefficients. Results are within 2 units in the last place. The
largest errors of a million points each, against long doubles, were 1.80 for ``atan2`` of float64, 1.70 for that of
float32, 1.74 for ``asin``, and 1.44 for the others. With ``fast_math``, for which these functions are, Taichi takes
numbers below the least normal one for zero; so do they.

* ``exp(x) = 2**n * exp(r)``, ``r = x - n * log(2)`` in two steps (Cody and Waite, Software Manual for the Elementary
  Functions, 1980).
* ``log(2**n * (1 + f)) = n * log(2) + log(1 + f)``.
* ``tanh`` is a series near 0, else ``1 - 2 / (exp(2 * x) + 1)`` or ``m / (m + 2)`` with ``m = exp(2 * x) - 1``.
* ``sin``, ``cos`` and ``tan``: ``1 / (2 * pi)`` is a sum of seven float64 numbers of 29 bits, whose products
  with x are exact; whole turns are taken from each product (after Payne and Hanek, 1983), so that large x lose nothing.
* ``asin`` and ``acos`` are series up to 1/2, else ``pi / 2 - 2 * asin(sqrt((1 - x) / 2))``.
* ``atan2`` is a series of the smaller of its arguments over the larger one.
* ``pow`` is ``2**(b * log2(a))`` in float64.

The others of float64 are the library's, also in lanes: vectors of two numbers are slower. With ``exp`` as arithmetic, J
of a volume took 1.5 times as long as without lanes, with the library's 0.85 times; with ``asin``, a sum took 1.4 times.

With ``fast_math`` LLVM reorders sums and knows neither NaN nor infinity. So a choice that always falls the same way
stands between steps that must not be joined, and special values are chosen by their bits. Choices are ``ti.select``,
one instruction; ``ti.max`` and ``ti.min`` are six, since they compare with NaN.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from taichi_ext.program import F32, F64, Op, Type, Value

_BITS = {
    F32: {
        **{"SIGN": "-0x80000000", "REST": "0x7fffffff", "INF": "0x7f800000", "NAN": "0x7fc00000"},
        **{"TINY": "0x00800000", "ONE": "0x3f800000"},
    },
    F64: {
        **{"SIGN": "-0x8000000000000000", "REST": "0x7fffffffffffffff", "INF": "0x7ff0000000000000"},
        **{"NAN": "0x7ff8000000000000", "TINY": "0x0010000000000000", "ONE": "0x3ff0000000000000"},
    },
}


@dataclass(frozen=True)
class Elementary:
    """One function of one type: R, I and BITS stand for the types of its numbers and of their bits, and how many."""

    name: str
    dtype: Type
    work: int  # in additions
    lines: str
    polynomials: dict[str, tuple[float, ...]]  # each with its variable, and its type if not R: "p r"
    arguments: str = "x"

    @property
    def function(self) -> str:
        """Its name in emitted text."""
        return f"{self.name}_{self.dtype.name}"

    @property
    def text(self) -> str:
        """Its definition in Taichi's language."""
        body = self.lines
        for name, coefficients in self.polynomials.items():
            letter, *rest = name.split()
            body = re.sub(rf"\b{letter.upper()}\b", _horner(coefficients, *rest), body)
        for name, bits in _BITS[self.dtype].items():
            body = re.sub(rf"\b{name}\b", f"I({bits})", body)
        bits = str(self.dtype.bits)
        body = re.sub(r"\bR\b", f"ti.f{bits}", re.sub(r"\bI\b", f"ti.i{bits}", body))
        return f"@ti.func\ndef {self.function}({self.arguments}):\n{body}"


def _horner(coefficients: tuple[float, ...], variable: str, dtype: str = "R") -> str:
    first, *rest = coefficients
    text = f"{dtype}({first!r})"
    for c in rest:
        text = f"({text} * {variable} + {dtype}({c!r}))"
    return text


_REDUCED = """\
    n = ti.floor(t * R(1.4426950408889634) + R({half}))
    c = t - n * R({high})
    r = ti.select(c > R(-1.0), c, R(-1.0)) - n * R({low})
"""
_LOG2 = {
    F32: {"high": 0.693359375, "low": -2.12194440e-4},
    F64: {"high": 0.6931471803691238, "low": 1.90821492927059e-10},
}


def _reduced(dtype: Type, half: float = 0.5) -> str:
    return _REDUCED.format(half=half, **_LOG2[dtype])


_EXP32 = f"""\
    a = ti.select(x < R(89.0), x, R(89.0))
    t = ti.select(a > R(-88.0), a, R(-88.0))
{_reduced(F32)}    k = ti.cast(n, I)
    h = k >> I(1)
    b = (r * r * P + r + R(1.0)) * ti.bit_cast((h + I(127)) << I(23), R)
    y = ti.select(b > R(0.0), b, R(0.0)) * ti.bit_cast((k - h + I(127)) << I(23), R)
    return ti.bit_cast(ti.select((ti.bit_cast(x, I) & REST) > INF, ti.bit_cast(x, I), ti.bit_cast(y, I)), R)
"""
_LOG32 = """\
    bits = ti.bit_cast(x, I)
    n = (bits - I(0x3f3504f3)) >> I(23)
    f = ti.bit_cast(bits - (n << I(23)), R) - R(1.0)
    y = f * f * f * P - R(0.5) * f * f + f
    b = ti.bit_cast(ti.select(y > R(-1.0), y, R(-1.0)) + ti.cast(n, R) * R(0.6931471805599453), I)
    b = ti.select(bits >= INF, bits, ti.select(bits < 0, NAN, b))
    b = ti.select((bits & REST) < TINY, SIGN | INF, ti.select((bits & REST) > INF, bits, b))
    return ti.bit_cast(b, R)
"""
_TANH = """\
    bits = ti.bit_cast(x, I)
    a = ti.bit_cast(bits & REST, R)
    t = R(2.0) * ti.select(a < R({largest}), a, R({largest}))
    z = R(0.25) * t * t
    near = R(0.5) * t * z * Q + R(0.5) * t
{reduced}{far}    b = ti.bit_cast(ti.select(t < R({least}), near, far), I) | (bits & SIGN)
    return ti.bit_cast(ti.select((bits & REST) > INF, bits, b), R)
"""
_FAR32 = """\
    y = (r * r * P + r + R(1.0)) * ti.bit_cast((ti.cast(n, I) + I(127)) << I(23), R)
    far = R(1.0) - R(2.0) / (y + R(1.0))
"""
_FAR64 = """\
    s = ti.bit_cast(ti.cast(ti.cast(n, ti.i32) + 1023, I) << I(52), R)
    m = (r * r * P + r) * s + ti.select(s > R(1.0), s - R(1.0), R(0.0))
    far = m / (m + R(2.0))
"""


_PART = """\
    c = d * ti.f64({part!r})
    c = c - ti.floor(c + ti.f64(0.5))
    turn = turn + ti.select(c > ti.f64(-1.0), c, ti.f64(-1.0))
"""
_TURN = (  # 1 / (2 * pi)
    *(0.15915494225919247, 8.327028684640414e-10, 5.69002511952534e-19, 6.317065083361892e-27),
    *(5.595982707708916e-36, 6.551007945072098e-45, 9.301187157400502e-54),
)
_REST_OF_TURN = f"""\
    bits = ti.bit_cast(x, I)
    d = ti.cast(ti.bit_cast(bits & REST, R), ti.f64)
    turn = ti.f64(0.0)
{"".join(_PART.format(part=part) for part in _TURN)}\
    turn = ti.select(turn > ti.f64(-8.0), turn, ti.f64(-8.0))
    turn = turn - ti.floor(turn + ti.f64(0.5))
    n = ti.floor(turn * ti.f64(4.0) + ti.f64(0.5))
    angle = (turn * ti.f64(4.0) - n) * ti.f64(1.5707963267948966)
"""
_SIN32 = f"""\
{_REST_OF_TURN}    y = ti.cast(angle, R)
    z = y * y
    sine = y * z * P + y
    cosine = z * z * Q + (R(1.0) - R(0.5) * z)
    k = ti.cast(n, ti.i32) + I(FIRST)
    b = ti.bit_cast(ti.select((k & I(1)) == I(0), sine, cosine), I) ^ ((k & I(2)) << I(30)) ^ (bits & ODD)
    return ti.bit_cast(ti.select((bits & REST) >= INF, NAN, b), R)
"""
_TAN32 = f"""\
{_REST_OF_TURN}    z = angle * angle
    sine = angle * z * P + angle
    cosine = z * z * Q + (ti.f64(1.0) - ti.f64(0.5) * z)
    is_even = (ti.cast(n, ti.i32) & I(1)) == I(0)
    b = ti.bit_cast(ti.cast(ti.select(is_even, sine, cosine) / ti.select(is_even, cosine, -sine), R), I)
    return ti.bit_cast(ti.select((bits & REST) >= INF, NAN, b ^ (bits & SIGN)), R)
"""
_AS_IT_IS = "    {0} = ti.bit_cast(ti.select(ti.bit_cast({0}, I) == NAN, INF, ti.bit_cast({0}, I)), R)\n"
_ASIN = """\
    bits = ti.bit_cast(x, I)
    a = ti.bit_cast(bits & REST, R)
    z = ti.select(a > R(0.5), R(0.5) - R(0.5) * a, a * a)
    s = ti.select(a > R(0.5), ti.sqrt(z), a)
    y = s * z * P + s
"""
_ASIN32 = f"""\
{_ASIN}    c = R(0.8207963267948966) - R(2.0) * s
{_AS_IT_IS.format("c")}    c = c - R(2.0) * s * z * P
{_AS_IT_IS.format("c")}    far = R(0.75) + c
    b = ti.bit_cast(ti.select(a > R(0.5), far, y), I) | (bits & SIGN)
    return ti.bit_cast(ti.select((bits & REST) > ONE, NAN, b), R)
"""
_ACOS32 = f"""\
{_ASIN}    far = ti.select(bits < 0, R(3.141592653589793) - R(2.0) * y, R(2.0) * y)
    near = R(1.5707963267948966) - ti.select(bits < 0, -y, y)
    return ti.bit_cast(ti.select((bits & REST) > ONE, NAN, ti.bit_cast(ti.select(a > R(0.5), far, near), I)), R)
"""
_ATAN2 = f"""\
    up, right = ti.bit_cast(y, I) & REST, ti.bit_cast(x, I) & REST
    up, right = ti.select(up < TINY, I(0), up), ti.select(right < TINY, I(0), right)
    less, more = ti.select(up > right, right, up), ti.select(up > right, up, right)
    t = ti.bit_cast(less, R) / ti.bit_cast(more, R)
    t = ti.select(less < TINY, R(0.0), ti.select(less == more, R(1.0), t))
    z = t * t
    a = t * z * P + t
    c = R(0.8207963267948966) - a
{_AS_IT_IS.format("c")}    a = ti.select(up > right, R(0.75) + c, a)
    a = ti.select(ti.bit_cast(x, I) < 0, R(3.141592653589793) - a, a)
    b = ti.bit_cast(a, I) | (ti.bit_cast(y, I) & SIGN)
    return ti.bit_cast(ti.select(more > INF, NAN, b), R)
"""
_POW32 = """\
    bits = ti.bit_cast(a, I)
    rest = bits & REST
    k = (rest - I(0x3f3504f3)) >> I(23)
    f = ti.cast(ti.bit_cast(rest - (k << I(23)), R), ti.f64) - ti.f64(1.0)
    s = f / (f + ti.f64(2.0))
    z = s * s
    log = ti.cast(k, ti.f64) + s * P
    log = ti.select(rest < TINY, ti.f64(-1e200), ti.select(rest == INF, ti.f64(1e200), log))
    c = ti.select(b < R(3e38), ti.cast(b, ti.f64), ti.f64(1e40))
    c = ti.select(c > ti.f64(-3e38), c, ti.f64(-1e40))
    t = c * log
    t = ti.select(t < ti.f64(129.0), t, ti.f64(129.0))
    t = ti.select(t > ti.f64(-151.0), t, ti.f64(-151.0))
    n = ti.floor(t + ti.f64(0.5))
    r = t - n
    power = ti.bit_cast(ti.cast(ti.cast(n, ti.i32) + 1023, ti.i64) << ti.i64(52), ti.f64)
    y = ti.bit_cast(ti.cast((r * Q + ti.f64(1.0)) * power, R), I)
    is_odd = (ti.floor(c) == c) & (ti.floor(ti.f64(0.5) * c) != ti.f64(0.5) * c)
    has_root = (bits >= 0) | (ti.floor(c) == c) | (rest < TINY) | (rest == INF)
    y = ti.select(has_root, ti.select(is_odd, y | (bits & SIGN), y), NAN)
    to = ti.bit_cast(b, I) & REST
    y = ti.select((rest > INF) | (to > INF), NAN, y)
    return ti.bit_cast(ti.select((to < TINY) | (bits == ONE), ONE, y), R)
"""

_EXP_SERIES = (0.0013926184, 0.008363179, 0.041666556, 0.16666576, 0.5)
_EXP64_UP_TO_HALF = (  # r from -0.2 to 0.8 log(2), where exp(r) - 1 doubles later
    *(2.494390367500303e-09, 2.467552592106369e-08, 2.757352751148636e-07, 2.7557047575831834e-06),
    *(2.4801585094392507e-05, 0.00019841269964495688, 0.0013888888888281027, 0.008333333333319525),
    *(0.04166666666666751, 0.1666666666666667, 0.5),
)
_LOG_SERIES = (
    *(0.06971612, -0.11479734, 0.1168542, -0.12425687),
    *(0.14249058, -0.16667803, 0.20000716, -0.24999997),
    0.3333333,
)
_TANH32 = (0.0022927448, -0.008343945, 0.021768918, -0.053959258, 0.13333304, -0.33333334)
_TANH64 = (
    *(-0.001327807535838868, 0.0035808016175124537, -0.008862733868279881, 0.02186947708514191),
    *(-0.05396825384352375, 0.13333333333282316, -0.333333333333333),
)
_SINE = {
    "p z": (2.7249864e-06, -0.00019840086, 0.008333332, -0.16666667),
    "q z": (2.4547891e-05, -0.0013888302, 0.041666664),
}
_ASIN_SERIES = (0.038085025, 0.026554542, 0.04500138, 0.07498855, 0.16666673)
_ATAN32 = (
    *(-0.0023869972, 0.013507771, -0.03587154, 0.06250169),
    *(-0.0865688, 0.110337645, -0.14278568, 0.1999974),
    -0.3333333,
)
_ATAN64 = (
    *(1.806195461861215e-05, -0.00019996189377901382, 0.0010496035084968515, -0.0034958859739163094),
    *(0.008368931178450162, -0.015535152475414177, 0.023696731580048622, -0.031277189066996385),
    *(0.03749486812535247, -0.04260356632601652, 0.04737749579527779, -0.052579733342841106),
    *(0.05881506877793656, -0.06666564699289104, 0.07692298971033217, -0.09090908590891934),
    *(0.11111111093490827, -0.14285714285384132, 0.1999999999999753, -0.3333333333333333),
)
_LOG2_SERIES = (
    *(0.28288502340748234, 0.31990680380701336, 0.41220922406110433, 0.5770779426603044),
    *(0.9617966941122649, 2.885390081777851),
)
_EXP2_SERIES = (
    *(1.529750254363405e-05, 0.00015461676975973325, 0.0013333501938341244, 0.009618056096717177),
    *(0.055504108841199315, 0.24022650925021063, 0.6931471805599453),
)
_tanh32 = _TANH.format(largest=10.0, least=1.25, reduced=_reduced(F32), far=_FAR32)
_tanh64 = _TANH.format(largest=22.0, least=0.512, reduced=_reduced(F64, 0.2), far=_FAR64)

_TABLE = [
    Elementary("exp", F32, 25, _EXP32, {"p r": _EXP_SERIES}),
    Elementary("log", F32, 25, _LOG32, {"p f": _LOG_SERIES}),
    Elementary("tanh", F32, 35, _tanh32, {"p r": _EXP_SERIES, "q z": _TANH32}),
    Elementary("sin", F32, 40, _SIN32.replace("FIRST", "0").replace("ODD", "SIGN"), _SINE),
    Elementary("cos", F32, 40, _SIN32.replace("FIRST", "1").replace("ODD", "I(0)"), _SINE),
    Elementary("tanh", F64, 45, _tanh64, {"p r": _EXP64_UP_TO_HALF, "q z": _TANH64}),
    Elementary("tan", F32, 50, _TAN32, _SINE),
    Elementary("asin", F32, 20, _ASIN32, {"p z": _ASIN_SERIES}),
    Elementary("acos", F32, 20, _ACOS32, {"p z": _ASIN_SERIES}),
    Elementary("atan2", F32, 30, _ATAN2, {"p z": _ATAN32}, "y, x"),
    Elementary("atan2", F64, 45, _ATAN2, {"p z": _ATAN64}, "y, x"),
    Elementary("pow", F32, 60, _POW32, {"p z ti.f64": _LOG2_SERIES, "q r ti.f64": _EXP2_SERIES}, "a, b"),
]
ELEMENTARY = {e.function: e for e in _TABLE}


def elementary_of(op: Op) -> Elementary | None:
    known = ELEMENTARY.get(f"{op.name}_{op.dtype.name}")
    return known if known is not None and all(a.dtype == op.dtype for a in op.args) else None


def as_arithmetic(value: Value) -> Value:
    """The operation of the table in the place of a call of the library."""
    if not isinstance(value, Op) or (known := elementary_of(value)) is None:
        return value
    return Op(known.function, value.args, value.dtype, place=value.place)
