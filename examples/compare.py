"""Shared by the examples: print computed and expected numbers, and remember whether they agree."""

from typing import Any

import numpy as np


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
