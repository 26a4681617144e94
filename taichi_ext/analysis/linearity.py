"""Whether the rules of users are linear in their tangents: only linear operations may be applied to those."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import taichi_ext.program as ir
from taichi_ext.errors import InvalidRuleError, UnsupportedError

_SIGNS = {  # as users write them
    **{"mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**", "logical_and": "and", "logical_or": "or"},
    **{"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="},
}


def check_rules(program: ir.Program) -> None:
    """Raise unless all rules in a program are linear in their tangents, and their results depend on those."""
    everything = list(ir.statements(program.body))
    rules = [s for s in everything if isinstance(s, ir.Boundary) and s.kind == "rule"]
    if not rules:
        return
    check = _Check(everything, rules)
    for s in everything:
        check.statement(s)


def _tangents_of(rule: ir.Boundary) -> Iterator[tuple[ir.Local, ir.Value]]:
    """The locals for the tangents of a rule, each with the first number whose tangents it represents."""
    for name, locals_ in rule.inner.items():
        sources = iter(rule.sources(name))
        for local in locals_:
            first, *_ = islice(sources, math.prod(local.shape))
            yield local, first


_CARRIERS = {"stop_gradient": "", "gradient": "", "rule": ""}  # none of these is applied to tangents
_FREE = "free"
Kind = ir.Boundary | str | None  # of values made of tangents: their rule; "free" of them; None: certainly 0


def _joined(kinds: Iterable[Kind]) -> Kind:
    """The kind of what takes values of several kinds."""
    return max(kinds, key=lambda kind: 2 if isinstance(kind, ir.Boundary) else kind is _FREE, default=None)


def _rule_among(kinds: Iterable[Kind]) -> ir.Boundary | None:
    rule = _joined(kinds)
    return rule if isinstance(rule, ir.Boundary) else None


def _given(s: ir.Statement) -> Iterator[tuple[ir.Local, list[ir.Value], bool]]:
    """The locals that a statement gives values, and whether these are its own expressions; an update adds."""
    for to, values in ir.flows(s, _CARRIERS):
        if isinstance(to, ir.Local):
            yield to, values, isinstance(s, ir.Declare) or (isinstance(s, ir.Store) and s.target.memory is to)


class _Check:
    """The kinds of the locals of a program with rules, and its statements, checked one by one."""

    def __init__(self, everything: Sequence[ir.Statement], rules: Sequence[ir.Boundary]) -> None:
        given = [x for s in everything for x in _given(s)]
        self.kinds: dict[ir.Local, Kind] = {to: None for to, _, _ in given}
        self.kinds |= {local: s for s in rules for local, source in _tangents_of(s) if source.dtype.is_real}
        self._known: dict[ir.Value, Kind] = {}
        before: dict[ir.Local, Kind] = {}
        while before != self.kinds:
            before = dict(self.kinds)
            self._known.clear()
            for to, values, is_own in given:
                kind = _joined((self.kinds[to], *map(self.kind, values), None if is_own else _FREE))
                self.kinds[to] = kind if to.dtype.is_real or kind is None else _FREE

    def kind(self, value: ir.Value) -> Kind:
        if value not in self._known:
            self._known[value] = self._kind(value)
        return self._known[value]

    def _kind(self, value: ir.Value) -> Kind:
        match value:
            case ir.Const():
                return None if value.value == 0 else _FREE
            case ir.Read():
                return self.kinds.get(value.local, _FREE)
            case ir.Op(name=name, args=args):
                kinds = [self.kind(a) for a in args]
                rule = _rule_among(kinds) if value.dtype.is_real else None
                return rule or (None if _is_zero(name, kinds) else _FREE)
        return _FREE

    def is_offset(self, value: ir.Value) -> bool:
        """Whether a value has a part without tangents, which is not certainly 0."""
        return self.kind(value) is _FREE

    def statement(self, s: ir.Statement) -> None:
        for value in ir.values_of(s):
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
        kinds = [self.kind(a) for a in op.args]
        rule = _rule_among(kinds)
        if rule is None or _is_linear(op, kinds):
            return
        is_joined = op.name in ("add", "sub") or (op.name in _CHOICES and _rule_among(kinds[:1]) is None)
        name = _SIGNS.get(op.name, op.name)
        raise _refusal(rule, _JOINED if is_joined else f"{name!r} is applied to a tangent here.", op.place or place)

    def boundary(self, s: ir.Boundary) -> None:
        """Nothing that has a derivative of its own is applied to tangents."""
        given = [e for name in s.given if name != "returned" for e in s.sources(name)]
        self.refuse([*given, *s.numbers], _APPLIED.get(s.kind, f"{s.kind!r} is applied to a tangent here."), s.place)

    def joined(self, s: ir.Statement) -> None:
        """No local holds a tangent at one time and another value at another time."""
        for local, values, is_own in _given(s):
            rule = self.kinds[local]
            if is_own and isinstance(rule, ir.Boundary) and any(map(self.is_offset, values)):
                raise _refusal(rule, _JOINED, s.place)

    def refuse(self, values: Sequence[ir.Value], what: str, place: ir.Place | None) -> None:
        rule = _rule_among(map(self.kind, values))
        if rule is not None:
            raise _refusal(rule, what, place)

    def returned(self, s: ir.Boundary) -> None:
        """Check a rule's result: each real number is linear in the tangents, or 0; whole numbers have no tangents."""
        for value, given in zip(s.numbers, s.sources("returned"), strict=True):
            if value.dtype.is_real and self.is_offset(given):
                problem = "returns a value that does not depend on its tangents, so it is not linear in them"
                raise InvalidRuleError(f"{ir.cited(s.place)}The rule {_named(s)} {problem}. {_REMEDY}, or 0.0.")
            if not value.dtype.is_real and isinstance(self.kind(given), ir.Boundary):
                problem = f"returns a tangent for a result of type {value.dtype.name}, which has no derivative"
                remedy = "Let the function return a real number, or the rule 0 for this result."
                raise InvalidRuleError(f"{ir.cited(s.place)}The rule {_named(s)} {problem}. {remedy}")


def _is_zero(name: str, kinds: list[Kind]) -> bool:
    """Whether an operation on values of some kinds is certainly 0."""
    match name:
        case "mul":
            return None in kinds
        case "neg" | "cast" | "add" | "sub" | "truediv" | "raw_div" | "select" | "ifte":
            needed = kinds[1:] if name in _CHOICES else kinds[:1] if name.endswith("div") else kinds
            return all(kind is None for kind in needed)
    return False


def _is_linear(op: ir.Op, kinds: list[Kind]) -> bool:
    """Whether an operation on values of some kinds is linear in the tangents among them."""
    is_own = [isinstance(kind, ir.Boundary) for kind in kinds]
    match op.name:
        case "neg":
            return True
        case "cast":
            return op.dtype.is_real
        case "add" | "sub":
            return _FREE not in kinds
        case "select" | "ifte":
            return not is_own[0] and _FREE not in kinds[1:]
        case "mul":
            return sum(is_own) == 1
        case "truediv" | "raw_div":
            return is_own == [True, False]
    return False


_CHOICES = ("select", "ifte")
_JOINED = "a tangent is added here to a value that does not depend on a tangent."
_APPLIED = {
    "stop_gradient": "a tangent is stopped here, by stop_gradient or in a call of a function that has a rule.",
    "rule": "a function or mark that has a rule is applied to a tangent here.",
}
_REMEDY = "Return a sum of the d_... and auto, each times values that do not depend on them"


def _refusal(rule: ir.Boundary, what: str, place: ir.Place | None) -> UnsupportedError:
    start = f"{ir.cited(place)}The rule {_named(rule)} must be linear in its tangents"
    return UnsupportedError(f"{start}; {what} {_REMEDY}.")


def _named(rule: ir.Boundary) -> str:
    return f"{rule.options['name']!r} ({rule.options['place']})"
