"""Whether the rules of users are linear in their tangents: only linear operations may be applied to those."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import taichi_ext.program as ir
from taichi_ext.errors import InvalidRuleError, UnsupportedError

_SIGNS = {  # as users write them
    **{"mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**", "logical_and": "and", "logical_or": "or"},
    **{"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="},
}


def check_rules(program: ir.Program) -> None:
    """Raise unless all rules in a program are linear in their tangents.

    Raises:
        UnsupportedError: an operation that is not linear is applied to a tangent.
        InvalidRuleError: the result of a rule does not depend on its tangents.
    """
    everything = list(ir.statements(program.body))
    rules = [s for s in everything if isinstance(s, ir.Boundary) and s.kind == "rule"]
    if not rules:
        return
    tangents = _tangent_locals(everything, rules)
    check = _Check(tangents, _zero_locals(everything, tangents))
    for s in everything:
        check.statement(s)


def _tangent_locals(everything: Sequence[ir.Statement], rules: Sequence[ir.Boundary]) -> dict[ir.Local, ir.Boundary]:
    """The locals that hold a tangent of a rule, or a value that was made of one, each with the rule."""
    start = {local: s for s in rules for local, source in _tangents_of(s) if source.dtype.is_real}
    given = [(to, values) for s in everything for to, values in ir.flows(s, _CARRIERS) if to.dtype.is_real]
    reads = ((v, to) for to, values in given for v in ir.through(values, _operands) if isinstance(v, ir.Read))
    found = ir.reached(start, [(v.local, to) for v, to in reads if isinstance(to, ir.Local)])
    return {local: start[first] for local, first in found.items()}


def _tangents_of(rule: ir.Boundary) -> Iterator[tuple[ir.Local, ir.Value]]:
    """The locals for the tangents of a rule, each with the first number whose tangents it represents."""
    for name, locals_ in rule.inner.items():
        sources = iter(rule.sources(name))
        for local in locals_:
            first, *_ = islice(sources, math.prod(local.shape))
            yield local, first


_CARRIERS = {"stop_gradient": "", "gradient": "", "rule": ""}  # none of these is applied to tangents


def _operands(value: ir.Value) -> tuple[ir.Value, ...]:
    """The operands whose tangents a value is made of."""
    return value.args if isinstance(value, ir.Op) and value.dtype.is_real else ()


def _rule_of(value: ir.Value, tangents: Mapping[ir.Local, ir.Boundary]) -> ir.Boundary | None:
    """The rule whose tangents a value is made of."""
    if tangents.keys().isdisjoint(value.contents.locals):
        return None
    return tangents.get(value.local) if isinstance(value, ir.Read) else _rule_within(_operands(value), tangents)


def _rule_within(values: Sequence[ir.Value], tangents: Mapping[ir.Local, ir.Boundary]) -> ir.Boundary | None:
    return next((rule for rule in (_rule_of(v, tangents) for v in values) if rule is not None), None)


def _zero_locals(everything: Sequence[ir.Statement], tangents: Mapping[ir.Local, ir.Boundary]) -> set[ir.Local]:
    """The locals that are 0 whenever they are read: all that they are ever given is."""
    stores = [(local, value) for s in everything for local, value in _stores(s) if local not in tangents]
    found = {local for local, _ in stores}
    count = -1
    while count != len(found):
        count = len(found)
        found -= {local for local, value in stores if local in found and not _is_zero(value, found)}
    return found


def _stores(s: ir.Statement) -> Iterator[tuple[ir.Local, ir.Value]]:
    """The locals that a statement gives values that are its own expressions; an update adds."""
    if isinstance(s, ir.Declare):
        yield from ((s.local, value) for value in s.values)
    elif isinstance(s, ir.Store) and isinstance(s.target, ir.Read):
        yield s.target.local, s.value


def _is_zero(value: ir.Value, zeros: set[ir.Local]) -> bool:
    """Whether a value is certainly 0."""
    match value:
        case ir.Const():
            return value.value == 0
        case ir.Read():
            return value.local in zeros
        case ir.Op(name="neg" | "cast" | "add" | "sub"):
            return all(_is_zero(a, zeros) for a in value.args)
        case ir.Op(name="mul"):
            return any(_is_zero(a, zeros) for a in value.args)
        case ir.Op(name="truediv" | "raw_div"):
            return _is_zero(value.args[0], zeros)
        case ir.Op(name="select" | "ifte"):
            return all(_is_zero(a, zeros) for a in value.args[1:])
    return False


class _Check:
    """The statements of a program with rules, checked one by one."""

    def __init__(self, tangents: Mapping[ir.Local, ir.Boundary], zeros: set[ir.Local]) -> None:
        self.tangents = tangents
        self.zeros = zeros

    def rule_of(self, value: ir.Value) -> ir.Boundary | None:
        return _rule_of(value, self.tangents)

    def is_offset(self, value: ir.Value) -> bool:
        """Whether a value has a part without tangents, which is not certainly 0."""
        return self.rule_of(value) is None and not _is_zero(value, self.zeros)

    def statement(self, s: ir.Statement) -> None:
        for value in ir.values_of(s):
            if not self.tangents.keys().isdisjoint(value.contents.locals):
                for node in ir.walk(value):
                    if isinstance(node, ir.Op):
                        self.operation(node, s.place)
        if isinstance(s, (ir.If, ir.While)) and s.condition is not None:
            self.refuse([s.condition], "a condition depends on a tangent here.", s.place)
        elif isinstance(s, ir.Call):
            self.refuse(ir.values_of(s), f"{s.function!r} is applied to a tangent here.", s.place)
        elif isinstance(s, ir.Atomic) and s.function not in ("atomic_add", "atomic_sub"):
            self.refuse([s.target, s.value], f"{s.function!r} is applied to a tangent here.", s.place)
        elif isinstance(s, ir.Boundary):
            self.boundary(s)
            if s.kind == "rule":
                self.returned(s)
        self.joined(s)

    def operation(self, op: ir.Op, place: ir.Place | None) -> None:
        rule = _rule_within(op.args, self.tangents)
        if rule is None or self.is_linear(op):
            return
        is_joined = op.name in ("add", "sub") or (op.name in _CHOICES and self.rule_of(op.args[0]) is None)
        name = _SIGNS.get(op.name, op.name)
        raise _refusal(rule, _JOINED if is_joined else f"{name!r} is applied to a tangent here.", op.place or place)

    def is_linear(self, op: ir.Op) -> bool:
        """Whether an operation is linear in the tangents among its operands."""
        is_own = [self.rule_of(a) is not None for a in op.args]
        match op.name:
            case "neg":
                return True
            case "cast":
                return op.dtype.is_real
            case "add" | "sub":
                return not any(map(self.is_offset, op.args))
            case "select" | "ifte":
                return not is_own[0] and not any(map(self.is_offset, op.args[1:]))
            case "mul":
                return sum(is_own) == 1
            case "truediv" | "raw_div":
                return is_own == [True, False]
        return False

    def boundary(self, s: ir.Boundary) -> None:
        """Of all that has a derivative of its own, only an edge is linear, in its two sides."""
        is_edge = s.kind in ("edge", "coverage")
        sides = [e for name in s.given if is_edge and name in _SIDES for e in s.sources(name)]
        others = [e for name in s.given if name not in (*_SIDES, "returned") for e in s.sources(name)]
        what = _APPLIED.get(s.kind, f"{s.kind!r} is applied to a tangent here.")
        self.refuse(others if is_edge else [*others, *s.numbers], what, s.place)
        if any(map(self.is_offset, sides)):
            self.refuse(sides, _JOINED, s.place)

    def joined(self, s: ir.Statement) -> None:
        """No local holds a tangent at one time and another value at another time."""
        for local, value in _stores(s):
            if local in self.tangents and self.is_offset(value):
                raise _refusal(self.tangents[local], _JOINED, s.place)

    def refuse(self, values: Sequence[ir.Value], what: str, place: ir.Place | None) -> None:
        rule = _rule_within(values, self.tangents)
        if rule is not None:
            raise _refusal(rule, what, place)

    def returned(self, s: ir.Boundary) -> None:
        """Check a rule's result: each real number is linear in the tangents, or 0; whole numbers have no tangents."""
        for value, given in zip(s.numbers, s.sources("returned"), strict=True):
            if value.dtype.is_real and self.is_offset(given):
                problem = "returns a value that does not depend on its tangents, so it is not linear in them"
                raise InvalidRuleError(f"{ir.cited(s.place)}The rule {_named(s)} {problem}. {_REMEDY}, or 0.0.")
            if not value.dtype.is_real and self.rule_of(given) is not None:
                problem = f"returns a tangent for a result of type {value.dtype.name}, which has no derivative"
                remedy = "Let the function return a real number, or the rule 0 for this result."
                raise InvalidRuleError(f"{ir.cited(s.place)}The rule {_named(s)} {problem}. {remedy}")


_CHOICES = ("select", "ifte")
_SIDES = ("inside", "outside")
_JOINED = "a tangent is added here to a value that does not depend on a tangent."
_APPLIED = {
    "stop_gradient": "a tangent is stopped here, by stop_gradient or in a call of a function that has a rule.",
    "rule": "a function or mark that has a rule is applied to a tangent here.",
}
_REMEDY = "Return a sum of the d_... and auto, each times values that do not depend on them"


def _refusal(rule: ir.Boundary, what: str, place: ir.Place | None) -> UnsupportedError:
    return UnsupportedError(
        f"{ir.cited(place)}The rule {_named(rule)} must be linear in its tangents; {what} {_REMEDY}."
    )


def _named(rule: ir.Boundary) -> str:
    return f"{rule.options['name']!r} ({rule.options['place']})"
