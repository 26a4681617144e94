"""What the tracer shows a watch: values, tangents and partials, each with its place in the source."""

from __future__ import annotations

from typing import Any

from taichi_ext import backend
from taichi_ext.derivative.linear_form import is_row
from taichi_ext.derivative.rows import rows_loop
from taichi_ext.derivative.storage import row_sum
from taichi_ext.derivative.values import Scalar, keep


class TracedWatch:
    """Counts in a watch what is not finite, while a kernel is traced."""

    def __init__(self, watch: Any) -> None:
        self.watch = watch

    def _site(self, place: str) -> int | None:
        return self.watch.number(place or backend.user_place())

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

    def _count(self, number: int | None, x: Any) -> None:
        if number is not None and backend.is_expr(x) and backend.is_real(backend.dtype_of(x)):
            count = backend.element(self.watch.counts, (number,))
            backend.if_else(backend.is_not_finite(x), lambda: backend.atomic_add(count, 1))
