"""Arithmetic on intervals of integers."""

from __future__ import annotations

from collections.abc import Iterable

from taichi_ext.program import I32, Type

Interval = tuple[int, int]  # the least and the greatest number


def range_of(dtype: Type) -> Interval:
    """The numbers that an integer type has."""
    if not dtype.is_signed:
        return 0, 2**dtype.bits - 1
    return -(2 ** (dtype.bits - 1)), 2 ** (dtype.bits - 1) - 1


RANGE = range_of(I32)


def fits(interval: Interval, dtype: Type = I32) -> bool:
    """Whether a type has all numbers of an interval."""
    least, most = range_of(dtype)
    return least <= interval[0] and interval[1] <= most


def common(a: Interval, b: Interval) -> Interval:
    """The numbers that two intervals share."""
    return max(a[0], b[0]), min(a[1], b[1])


def hull(a: Interval, b: Interval) -> Interval:
    """The least interval that has two others in it."""
    return min(a[0], b[0]), max(a[1], b[1])


def interval_of(name: str, args: list[Interval]) -> Interval | None:
    """Between which numbers the result of an operation lies if it does not wrap; None where that is not known."""
    low, high = args[0]
    match name:
        case "cast":
            return low, high
        case "min":
            return min(a[0] for a in args), min(a[1] for a in args)
        case "max":
            return max(a[0] for a in args), max(a[1] for a in args)
        case "abs":
            return (0 if low <= 0 <= high else min(abs(low), abs(high))), max(abs(low), abs(high))
        case "mul":
            return _extremes(a * b for a in args[0] for b in args[1])
    return _quotient(name, args[0], args[-1]) or _of_bits(name, args[0], args[-1])


def _quotient(name: str, dividend: Interval, divisor: Interval) -> Interval | None:
    """The interval of a quotient or remainder by positive numbers."""
    (low, high), (first, last) = dividend, divisor
    if first <= 0:
        return None
    match name:
        case "mod":
            return (low, high) if 0 <= low and high < first else (0, last - 1)
        case "raw_mod":
            return (1 - last if low < 0 else 0), (min(high, last - 1) if high > 0 else 0)
        case "floordiv":
            return _extremes(a // b for a in dividend for b in divisor)
        case "raw_div" if low >= 0:
            return low // last, high // first
    return None


def _of_bits(name: str, a: Interval, b: Interval) -> Interval | None:
    """The interval of an operation on the bits of two numbers, at least one of them not negative."""
    (low, high), (first, last) = a, b
    match name:
        case "bit_and" if low >= 0 or first >= 0:
            return 0, min(end for start, end in (a, b) if start >= 0)
        case "bit_or" | "bit_xor" if low >= 0 and first >= 0:
            return 0, 2 ** max(high, last).bit_length() - 1
        case "shift_right" | "bit_sar" | "bit_shr" if first >= 0 and last < 64 and (low >= 0 or name != "bit_shr"):
            return _extremes(end >> count for end, count in ((low, first), (low, last), (high, first), (high, last)))
        case "shift_left" | "bit_shl" if first == last and 0 <= first < 32 and low >= 0:
            return low << first, high << first
    return None


def _extremes(numbers: Iterable[int]) -> Interval:
    found = list(numbers)
    return min(found), max(found)
