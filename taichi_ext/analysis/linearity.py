"""Whether the rules of users are linear in their tangents: only linear operations may be applied to those."""

from __future__ import annotations

from collections.abc import Iterable

from taichi_ext.errors import InvalidRuleError, UnsupportedError
from taichi_ext.program import (
    Assign,
    Atomic,
    Boundary,
    Call,
    Const,
    Declare,
    If,
    Local,
    Op,
    Place,
    Program,
    Read,
    Statement,
    Update,
    Value,
    While,
    declared,
    entries,
    statements,
    values_of,
    walk,
)


def check_rules(program: Program) -> None:
    """Raise unless all rules in a program are linear, as far as their code shows it.

    Raises:
        UnsupportedError: an operation that is not linear is applied to a tangent.
        InvalidRuleError: what a rule returns does not depend on its tangents.
    """
    everything = list(statements(program.body))
    if not any(isinstance(s, Boundary) and s.kind == "rule" for s in everything):
        return
    tangents = tangent_locals(everything)
    for s in everything:
        _check_statement(s, tangents)
        if isinstance(s, Boundary) and s.kind == "rule":
            _check_returned(s, tangents)


def tangent_locals(everything: Iterable[Statement]) -> set[Local]:
    """The locals that hold a tangent of a rule, or a value that was made of one."""
    everything = list(everything)
    found: set[Local] = set()
    count = -1
    while count != len(found):
        count = len(found)
        for s in everything:
            found |= _reached(s, found)
    return found


def _reached(s: Statement, found: set[Local]) -> set[Local]:
    if isinstance(s, Declare) and s.local.kind == "rule":
        return {s.local}
    values = values_of(s)
    if isinstance(s, Boundary):
        if s.kind in ("stop_gradient", "gradient"):
            return set()
        if s.kind == "rule":  # what it returns depends on its own tangents, the result on what they stand for
            values = [*s.numbers, *(e for name in s.inner for e in s.sources(name))]
    if not any(is_tangent(v, found) for v in values):
        return set()
    if isinstance(s, (Assign, Update, Atomic)):
        return {s.target.local} if isinstance(s.target, Read) else set()
    return {local for local in declared(s) if local.dtype.is_real}


def is_tangent(value: Value, tangents: set[Local]) -> bool:
    """Whether a value is made of a tangent."""
    if isinstance(value, Read):
        return value.local in tangents
    return isinstance(value, Op) and value.dtype.is_real and any(is_tangent(a, tangents) for a in value.args)


def _check_statement(s: Statement, tangents: set[Local]) -> None:
    for value in values_of(s):
        for node in walk(value):
            if isinstance(node, Op) and not _is_linear(node, tangents):
                raise _refusal(f"{node.name!r} is applied to one here.", node.place or s.place)
    target = getattr(s, "target", None)
    if isinstance(s, (If, While)) and s.condition is not None and is_tangent(s.condition, tangents):
        raise _refusal("a condition depends on one here.", s.place)
    if isinstance(s, Call) and any(is_tangent(v, tangents) for v in values_of(s)):
        raise _refusal(f"{s.function!r} is applied to one here.", s.place)
    local, value = None, None
    if isinstance(s, Declare) and not s.local.shape:
        local, value = s.local, s.values[0]
    elif isinstance(s, (Assign, Update)) and isinstance(target, Read):
        local, value = target.local, s.value
    if local in tangents and isinstance(value, Const) and value.value != 0:
        raise _refusal(f"a tangent is joined with the number {value.value}.", s.place)


def _is_linear(op: Op, tangents: set[Local]) -> bool:
    is_own = [is_tangent(a, tangents) for a in op.args]
    if not any(is_own):
        return True
    others = (a for a, is_one in zip(op.args, is_own, strict=True) if not is_one)
    match op.name:
        case "neg":
            return True
        case "cast":
            return op.dtype.is_real
        case "add" | "sub":
            return not any(map(_is_not_zero, others))
        case "select" | "ifte":
            return not is_own[0] and not any(_is_not_zero(a) for a in others if a is not op.args[0])
        case "mul":
            return sum(is_own) == 1
        case "truediv" | "raw_div":
            return is_own == [True, False]
    return False


def _is_not_zero(value: Value) -> bool:
    return isinstance(value, Const) and value.value != 0


def _refusal(what: str, place: Place | None) -> UnsupportedError:
    start = "" if place is None else place.message() + "\n"
    return UnsupportedError(f"{start}A rule must be linear in its tangents; {what}")


def _check_returned(s: Boundary, tangents: set[Local]) -> None:
    """What a rule returns for a real number is made of its tangents, or 0.

    Of a vector, matrix or struct, some entries may be computed without them: debug mode looks at these.
    """
    parts = s.values if isinstance(s.values, tuple) else (s.values,)
    given = s.given["returned"]
    for part, group in zip(parts, given, strict=True):  # type: ignore[call-overload]
        pairs = zip(entries(part), entries(group), strict=True)
        real = [g for p, g in pairs if p.dtype.is_real]
        depends = [is_tangent(g, tangents) for g in real]
        for value, does in zip(real, depends, strict=True):
            is_number = isinstance(value, Const)
            if not does and (_is_not_zero(value) if is_number else not any(depends)):
                start = "" if s.place is None else s.place.message() + "\n"
                raise InvalidRuleError(
                    f"{start}The rule {s.options['name']!r} ({s.options['place']}) returns a value that does not "
                    "depend on its tangents, so it is not linear in them; return a combination of the d_... and auto, "
                    "or 0.0."
                )
