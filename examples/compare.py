"""Shared by the examples: print computed and expected numbers, and remember whether they agree."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np


def errors_of_columns(J: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """The relative error of each column of J, in the Euclidean norm."""
    return np.linalg.norm(J - expected, axis=0) / np.linalg.norm(expected, axis=0)


def complex_steps(function: Callable[..., complex], times: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The derivatives of ``function(time, *values)`` by steps in the complex plane; shape (times, values)."""
    steps = 1e-30j * np.eye(len(values))
    return np.array([[function(time, *(values + step)).imag / 1e-30 for step in steps] for time in times])


def percents(errors: Iterable[float], digits: int = 0) -> str:
    return ", ".join(f"{100 * error:.{digits}f} %" for error in errors)


class Comparison:
    """Computed numbers, each with its expected value; ``exit_code`` is 1 once two of them disagree."""

    def __init__(self, title: str) -> None:
        self.exit_code = 0
        print(title)

    def numbers(self, name: str, computed: Any, expected: Any, *, rtol: float = 1e-5, atol: float = 0.0) -> None:
        """Two arrays, element by element; a NaN disagrees with everything."""
        computed, expected = np.asarray(computed, np.float64), np.asarray(expected, np.float64)
        agrees = computed.shape == expected.shape and bool(
            np.all(np.abs(computed - expected) <= atol + rtol * np.abs(expected))
        )
        self._line(name, agrees)
        if computed.size <= 12:
            print(f"       computed {self._text(computed)}\n       expected {self._text(expected)}")
        elif computed.shape == expected.shape:
            print(f"       shape {computed.shape}, largest difference {np.abs(computed - expected).max():.2e}")
        else:
            print(f"       computed shape {computed.shape}, expected shape {expected.shape}")

    def holds(self, name: str, is_true: Any, detail: str = "") -> None:
        """A condition."""
        self._line(name, bool(is_true))
        if detail:
            print(f"       {detail}")

    def _line(self, name: str, agrees: bool) -> None:
        self.exit_code |= not agrees
        print(f"  {'ok  ' if agrees else 'FAIL'} {name}")

    @staticmethod
    def _text(array: np.ndarray) -> str:
        return np.array2string(array, precision=8, max_line_width=200).replace("\n", " ")
