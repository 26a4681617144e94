"""Expressions that are passed by reference: evaluated again at each use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from taichi_ext.derivative.values import Scalar, TensorValue, primal_of


class ByReference:
    """An expression that was passed by reference: evaluated again at each use, as Taichi does."""

    _data_oriented = True

    def __init__(self, tracer: Any, expression: Any) -> None:
        self.tracer = tracer
        self.expression = expression

    def value(self) -> Any:
        return evaluated_anew(self.tracer, self.expression)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.value(), name)

    def __len__(self) -> int:
        return len(self.expression)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        return iter(self.value())


def evaluated_anew(tracer: Any, x: Any) -> Any:
    """The same expression, of what its operands are now."""
    if isinstance(x, TensorValue):
        return TensorValue([evaluated_anew(tracer, e) for e in x.entries], x.shape)
    if not isinstance(x, Scalar):
        return x
    if x.source is not None:
        return x.source()
    if x.branches is not None:
        return tracer.where(x.branches.condition, *(evaluated_anew(tracer, side) for side in x.branches.sides))
    if x.rule is None or x.variable is not None:
        return x
    args = tuple(evaluated_anew(tracer, a) for a in x.args)
    return Scalar(x.rule.primal(*map(primal_of, args)), rule=x.rule, args=args, is_tangent=x.is_tangent)
