"""Watch a kernel and its tangents for what is not finite, and remember the lines where it arises."""

from __future__ import annotations

import re
from typing import Any

from taichi_ext import backend
from taichi_ext.derivative.linear_form import is_row
from taichi_ext.derivative.rows import rows_loop
from taichi_ext.derivative.storage import row_sum
from taichi_ext.derivative.values import Scalar, keep

_MOST_SITES = 4096
_SHOWN = 3


class Watch:
    """Counts, for each statement that keeps a value with a tangent, how often one of them is NaN or infinite.

    Given to ``Jacobian.evaluate``, it is called while the fused kernels are traced, in the order of the program.
    """

    def __init__(self) -> None:
        self._sites: dict[str, int] = {}
        self._counts, self._tree = backend.temporary_field(backend.ti.i32, _MOST_SITES)

    def _site(self, place: str) -> int:
        return self._sites.setdefault((place or backend.user_place()).strip("\n"), len(self._sites))

    def partials(self, value: Scalar, partials: list[Any]) -> None:
        """The partials of one operation."""
        for partial in partials:
            self._count(self._site(value.place), partial)

    def value(self, tracer: Any, value: Scalar) -> None:
        """A value and its tangent."""
        number = self._site(value.place)
        self._count(number, keep(value))
        dtype = value.dtype
        form: Any = value.form or {}
        for leaf, c in form.items():
            if not is_row(leaf):
                self._count(number, c)
        if any(is_row(leaf) for leaf in form):
            rows_loop(tracer.columns, lambda k: self._count(number, row_sum(form, k, dtype)), reads_memory=True)

    def _count(self, number: int, x: Any) -> None:
        if number < _MOST_SITES and backend.is_expr(x) and backend.is_real(backend.dtype_of(x)):
            count = backend.element(self._counts, (number,))
            backend.if_else(backend.is_not_finite(x), lambda: backend.atomic_add(count, 1))

    def findings(self) -> list[str]:
        """The first places where something is not finite."""
        counts = self._counts.to_numpy()
        places = [location for location, number in self._sites.items() if number < _MOST_SITES and counts[number]]
        if not places:
            return []
        first, *others = places
        texts = [f"it arises first in\n{_indented(first)}"]
        if others:
            lines = ", ".join(dict.fromkeys(_line(place) for place in others[:_SHOWN]))
            texts.append(f"from there it reaches {lines}{' and more' if len(others) > _SHOWN else ''}.")
        return texts

    def close(self) -> None:
        """Give the memory back."""
        self._tree.destroy()


def _line(place: str) -> str:
    match = re.search(r"line (\d+)", place)
    return f"line {match.group(1)}" if match else place


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
