"""Levels that are constant outside, by ``max(q, 0)`` or a branch: others of the same sign, which have a slope."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

import taichi_ext.program as ir
from taichi_ext.program.build import is_same
from taichi_ext.simplify.usage import written_locals


def with_slopes(body: ir.Body, levels: Collection[ir.Local]) -> ir.Body:
    """The block in which levels are computed from what decides their sign."""
    signs = _Signs(body)

    def sloped(s: ir.Statement) -> ir.Statement:
        if not isinstance(s, ir.Declare) or s.local not in levels:
            return s
        level = signs.of(s.values[0])
        return s if level is s.values[0] else replace(s, values=(_as(level, s.local.dtype),))

    return ir.mapped(body, sloped)


class _Signs:
    """What is known of the values of a body."""

    def __init__(self, body: ir.Body) -> None:
        everything = [*ir.statements(body)]
        self._writes = Counter(local for s in everything for local in written_locals(s))
        targets = [s.target for s in everything if isinstance(s, ir.Store)]
        self._stored = {t.container for t in targets if isinstance(t, ir.Load)}
        self._values = {
            s.local: s.values[0]
            for s in everything
            if isinstance(s, ir.Declare) and s.local.shape == () and self._writes[s.local] == 1
        }
        for block in (body, *(inner for s in everything for inner in ir.bodies(s))):
            self._values.update(self._set_in_branches(block))

    def _set_in_branches(self, block: ir.Body) -> dict[ir.Local, ir.Value]:
        """The values of locals that the branches of one statement set after they are declared, as choices."""
        found: dict[ir.Local, ir.Value] = {}
        declared: dict[ir.Local, ir.Value] = {}
        for s in block:
            if isinstance(s, ir.If):
                sides = [dict(_given_by(a) for a in side if isinstance(a, ir.Assign)) for side in (s.then, s.orelse)]
                written = {local for one in s.within for local in written_locals(one)}
                for local in declared.keys() & (sides[0].keys() | sides[1].keys()):
                    given = (side.get(local, declared[local]) for side in sides)
                    value = _with_value(ir.Op("ifte", (s.condition, *given), local.dtype), local, declared[local])
                    is_all = self._writes[local] == 1 + sum(local in side for side in sides)
                    if is_all and written.isdisjoint(value.contents.locals):
                        found[local] = value
            read = {local for one in (s, *s.within) for v in ir.values_of(one) for local in v.contents.locals}
            declared = {local: v for local, v in declared.items() if local not in read}
            if isinstance(s, ir.Declare) and s.local.shape == () and s.local not in read:
                declared[s.local] = s.values[0]
        return found

    def of(self, value: ir.Value) -> ir.Value:
        """A value that is positive in the same places."""
        if isinstance(value, ir.Read) and value.local in self._values:
            own = self._values[value.local]
            sign = self.of(own)
            return value if sign is own or not self._stays(sign) else sign
        if not isinstance(value, ir.Op):
            return value
        name, args = value.name, value.args
        if name in ("select", "ifte"):
            return self._of_choice(value)
        if name == "sqrt" or (name == "pow" and self._is_clipped(value)):
            return self.of(args[0])
        if name in ("max", "min"):
            numbers = map(self._number, args)
            args = tuple(a for a, c in zip(args, numbers, strict=True) if c is None or (c > 0) != (name == "min"))
            if len(args) == 1:
                return self.of(args[0])
        elif name in ("mul", "truediv"):
            scaled = self._scaled(value)
            if scaled is not None:
                sign = self.of(scaled)
                return value if sign is scaled else sign
            if args[0] == args[1] and self._is_clipped(args[0]):
                return self.of(args[0])
            name = "min" if any(map(self._is_clipped, args)) else ""
        else:
            name = "max" if name == "add" and self._is_clipped(value) else ""
        signs = [self.of(a) for a in args] if name else []
        if not any(sign is not a for sign, a in zip(signs, args, strict=False)):
            return value
        return ir.Op(name, tuple(_as(sign, value.dtype) for sign in signs), value.dtype, place=value.place)

    def _of_choice(self, value: ir.Op) -> ir.Value:
        """That of a value where it is positive, and elsewhere of a number that is not."""
        condition, *sides = value.args
        for holds, side, other in ((True, *sides), (False, *sides[::-1])):
            number, positive = self._number(other), self._positive(condition, holds=holds)
            if number is not None and number <= 0 and positive is not None:
                sign = self.of(side)
                return sign if is_same(side, positive) or is_same(sign, self.of(positive)) else value
        return value

    def _positive(self, condition: ir.Value, *, holds: bool) -> ir.Value | None:
        """The value that is positive, or 0, where a condition holds, or does not."""
        if not isinstance(condition, ir.Op):
            return None
        name, args = condition.name, condition.args
        if name == "logical_not":
            return self._positive(args[0], holds=not holds)
        if name not in ("lt", "le", "gt", "ge") or not any(a.dtype.is_real for a in args):
            return None
        more, less = args if (name in ("gt", "ge")) == holds else args[::-1]
        return more if self._number(less) == 0 else None

    def _is_clipped(self, value: ir.Value) -> bool:
        """Whether a value is nowhere negative, and 0 in a region."""
        if isinstance(value, ir.Read):
            return value.local in self._values and self._is_clipped(self._values[value.local])
        if not isinstance(value, ir.Op):
            return False
        if value.name == "max":
            return 0 in map(self._number, value.args)
        if value.name == "pow":
            return self._is_clipped(value.args[0]) and (self._number(value.args[1]) or 0) > 0
        if value.name == "sqrt":
            return self._is_clipped(value.args[0])
        scaled = self._scaled(value)
        if scaled is not None:
            return self._is_clipped(scaled)
        return value.name in ("add", "mul", "min") and all(map(self._is_clipped, value.args))

    def _scaled(self, value: ir.Op) -> ir.Value | None:
        """The value that is multiplied with a positive number, or divided by it."""
        for own, other in (value.args, value.args[::-1])[: {"mul": 2, "truediv": 1}.get(value.name, 0)]:
            if (self._number(other) or 0) > 0:
                return own
        return None

    def _number(self, value: ir.Value) -> float | None:
        """The number that a value is, if it is known."""
        if isinstance(value, ir.Read) and value.local in self._values:
            return self._number(self._values[value.local])
        if isinstance(value, ir.Op) and value.name == "cast":
            return self._number(value.args[0])
        return float(value.value) if isinstance(value, ir.Const) else None

    def _stays(self, value: ir.Value) -> bool:
        """Whether a value is the same wherever it can be computed."""
        reads = value.contents
        return all(self._writes[local] <= 1 for local in reads.locals) and self._stored.isdisjoint(reads.containers)


def _given_by(s: ir.Assign) -> tuple[ir.Local | None, ir.Value]:
    """The scalar local that a statement sets, and its value."""
    return (s.target.local if isinstance(s.target, ir.Read) and not s.target.index else None), s.value


def _with_value(value: ir.Value, local: ir.Local, given: ir.Value) -> ir.Value:
    """A value with another one in the place of a local."""
    return ir.rebuilt(value, lambda v: given if isinstance(v, ir.Read) and v.local is local else v)


def _as(value: ir.Value, kind: ir.Type) -> ir.Value:
    return value if value.dtype == kind else ir.Op("cast", (value,), kind)
