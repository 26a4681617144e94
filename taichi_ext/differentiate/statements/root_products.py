"""Products with a root among their factors more than once: their partials are finite where that of the root is not.

``b sqrt(a)**p`` has the partial ``b p / 2 sqrt(a)**(p - 2)`` with respect to a.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

from taichi_ext.analysis.same_values import ValueNumbers
from taichi_ext.program import Const, Local, Op, Value
from taichi_ext.program.build import Coefficient, Number, literal, multiply, operation

_QUOTIENTS = ("truediv", "raw_div")


@dataclass(frozen=True)
class Factor:
    """A power of a value; ``radicand`` is a if the value is ``sqrt(a)``."""

    value: Value
    power: Number
    radicand: Value | None = None

    @property
    def is_root(self) -> bool:
        """Whether the partial with respect to the radicand is finite."""
        return self.radicand is not None and self.power >= 2


Factors = dict[Hashable, Factor]  # by how they are computed


class Products:
    """The factors of products.

    Args:
        definition: gives the definition of a local that does not change.
        unchanging: the locals that never change.
        has_tangent: whether the tangent of a part of a definition is known from where that stands.
    """

    def __init__(
        self, definition: Callable[[Value], Value], unchanging: set[Local], has_tangent: Callable[[Value], bool]
    ) -> None:
        self._definition, self._unchanging, self._has_tangent = definition, unchanging, has_tangent
        self._rooted: dict[Value, bool] = {}
        self._factors: dict[Value, Factors] = {}
        self._numbers = ValueNumbers(self._lasting)

    def begin_statement(self) -> None:
        """Forget the factors of the previous statement, whose values may have changed."""
        self._factors.clear()
        self._numbers = ValueNumbers(self._lasting)

    def of_roots(self, node: Op) -> list[Factor]:
        """The factors of a product with a root among them more than once; [] for other nodes."""
        found = list(self._of(node).values()) if self._has_root(node) else []
        return found if any(f.is_root for f in found) else []

    def _has_root(self, value: Value) -> bool:
        """Whether a root is among the factors, in a definition or out of it."""
        if value not in self._rooted:
            known, args = self._definition(value), ()
            if isinstance(known, Op):
                args = known.args if known.name in ("mul", "neg", *_QUOTIENTS) else known.args[: known.name == "pow"]
            self._rooted[value] = _is_root(known) or any(map(self._has_root, args))
        return self._rooted[value]

    def _of(self, value: Value) -> Factors:
        if value not in self._factors:
            is_root = self._has_root(value)
            self._factors[value] = self._found(value) if is_root else {self._numbers.of(value): Factor(value, 1)}
        return self._factors[value]

    def _found(self, value: Value) -> Factors:
        known = self._definition(value)
        is_same = known is value or self._is_unchanging(known)
        match known if is_same else value:
            case Op(name="mul", args=(a, b)):
                return _product(self._of(a), self._of(b))
            case Op(name=name, args=(a, b)) if name in _QUOTIENTS:
                return _product(self._of(a), self._of(b), -1)
            case Op(name="neg", args=(a,)):
                return _product({"neg": Factor(literal(-1, value.dtype), 1)}, self._of(a))
            case Op(name="pow", args=(a, Const(value=n))) if n == int(n) or _is_root(self._definition(a)):
                return _product({}, self._of(a), n)
            case inner:
                radicand = known.args[0] if isinstance(known, Op) and _is_root(known) else None
                if radicand is not None and not is_same and not self._has_tangent(radicand):
                    radicand = None
                return {self._numbers.of(inner): Factor(value, 1, radicand)}

    def _is_unchanging(self, value: Value) -> bool:
        """Whether a definition has the same value wherever it is evaluated."""
        return not value.contents.containers and value.contents.locals <= self._unchanging

    def _lasting(self, value: Value) -> Value:
        """The definition of a local where it can stand for the local, else the value itself."""
        known = self._definition(value)
        return known if self._is_unchanging(known) else value


def partial_of(factors: list[Factor], factor: Factor, keep: Callable[[Value], Value]) -> Coefficient:
    """The partial of a product with respect to a factor, or to its radicand; ``keep`` evaluates a value."""
    scale = factor.power / 2 if factor.is_root else factor.power
    found: Coefficient = int(scale) if scale == int(scale) else scale
    for other in factors:
        power = other.power - (1 + factor.is_root) * (other is factor)
        if power:
            found = multiply(found, _power(keep(other.value), power))
    return found


def _product(a: Factors, b: Factors, power: Number = 1) -> Factors:
    """``a * b ** power``."""
    found = dict(a)
    for key, factor in b.items():
        old = found[key].power if key in found else 0
        found[key] = replace(factor, power=old + power * factor.power)
    return found


def _is_root(value: Value) -> bool:
    return isinstance(value, Op) and value.name == "sqrt"


def _power(value: Value, power: Number) -> Coefficient:
    if power < 0:
        return operation("truediv", 1.0, operation("pow", value, -power) if power != -1 else value)
    return value if power == 1 else operation("pow", value, power)
