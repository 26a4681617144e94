"""A block of an adjoint: its statements, and the adjoints of its locals, which are passed on along expressions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import product

import taichi_ext.program as ir
from taichi_ext.adjoint.normal import whole
from taichi_ext.adjoint.sweep import Sweep, Weights, array_of, is_none, substitution
from taichi_ext.analysis.affine import Affine, Atom, atom_value, linear_form, value_of
from taichi_ext.analysis.same_values import ValueNumbers
from taichi_ext.differentiate.rules.table import AGAIN, LAST, Rule, partials_of_operation, rule_of
from taichi_ext.errors import UnsupportedError
from taichi_ext.program import Const, Load, Local, Op, Read, Value
from taichi_ext.program.build import (
    GUARDED,
    GUARDED_BOTH,
    Coefficient,
    add,
    cast,
    is_number,
    is_same,
    literal,
    multiply,
    operation,
    select,
    written_out,
)

_FROZEN = ("weight", "temporary", "partial")
_POSITIVE = 2**31 - 1  # the bits of numbers from zero on
_LARGEST = {ir.F16: 6e4, ir.F32: 3e38, ir.F64: 1e308}  # beyond these, numbers count as infinite


class Later:
    """Statements that are known when the way back has been made."""

    def __init__(self, make: Callable[[], ir.Body]) -> None:
        self.make = make


@dataclass(eq=False)
class Block:
    """A block that runs forward and backwards.

    Attributes:
        sweep: of the stage.
        env: the values of the stage's locals in the adjoint program.
        definitions: what locals of the adjoint program hold.
        made: the statements.
        records: the statements that the way back visits, as they were run forward.
        adjoints: those of locals, where the way back is.
        moved: for locals that the block changes, the adjoints after it, as they were moved into it.
        unchanged: locals of which the adjoints before the block are those after it.
        numbers: of conditions.
        insides: by number, the locals that say whether indices are in range.
    """

    sweep: Sweep
    env: dict[Local, Value]
    definitions: dict[Local, Value] = field(default_factory=dict)
    made: list[ir.Statement | Later] = field(default_factory=list)
    records: list[object] = field(default_factory=list)
    adjoints: dict[Local, Weights] = field(default_factory=dict)
    moved: dict[Local, Weights] = field(default_factory=dict)
    unchanged: set[Local] = field(default_factory=set)
    numbers: ValueNumbers = field(default_factory=ValueNumbers)
    insides: dict[int, Read] = field(default_factory=dict)

    def finished(self) -> ir.Body:
        self.made = [x for s in self.made for x in (s.make() if isinstance(s, Later) else (s,))]
        return tuple(self.made)  # type: ignore[arg-type]

    # --- values and statements

    def sub(self, value: Value) -> Value:
        """A value of the stage in terms of the adjoint program."""
        return substitution(self.env)(value)

    def target(self, t: ir.Target) -> ir.Target:
        """The target of a store in terms of the adjoint program."""
        t = ir.with_children(t, self.sub)  # type: ignore[assignment]
        return replace(t, local=array_of(self.env, t.local)) if isinstance(t, Read) else t

    def emit(self, *statements: ir.Statement | Later) -> None:
        """Put statements behind the others."""
        self.made += statements

    def declare(self, name: str, dtype: ir.Type, value: Coefficient, kind: str) -> Read:
        local = Local(name, dtype, (), kind)
        self.emit(ir.Declare(local, (cast(value, dtype),)))
        return Read(local)

    def keep(self, x: Coefficient, name: str = "w") -> Coefficient:
        """A value that is used more than once."""
        if not isinstance(x, Value) or isinstance(x, Const):
            return x
        is_kept = isinstance(x, Read) and not x.index and x.local.kind in _FROZEN
        return x if is_kept else self.declare(name, x.dtype, x, "weight")

    def keep_weight(self, w: Coefficient, name: str = "w") -> Coefficient:
        """An adjoint that is used more than once, and stays a choice where choices may leave it out."""
        condition = _taken(w)
        if condition is None:
            return self.keep(w, name)
        while (part := _choice(w)) is not None:
            w = part
        return select(self._inside(condition), self.keep(w, name), 0)

    def adjoint_array(self, local: Local) -> None:
        """Make the adjoints of a local array."""
        arrays = [Local(f"b_{local.name}", local.dtype, local.shape, "tangent") for _ in range(self.sweep.width)]
        zeros = (literal(0, local.dtype),) * len(entry_indices(local))
        self.sweep.local_arrays[local] = arrays
        self.emit(*(ir.Declare(array, zeros) for array in arrays))

    def array_weights(self, local: Local, index: tuple[int, ...]) -> Weights:
        """The adjoint of one entry of a local array."""
        return [self.keep(Read(array, index)) for array in self.sweep.local_arrays[local]]

    # --- adjoints

    def take(self, local: Local) -> Weights:
        """The adjoint of a local, which is not needed again."""
        return self.adjoints.pop(local, None) or self.sweep.none()

    def accumulate(self, local: Local, ws: Weights) -> None:
        """Add to the adjoint of a local."""
        if local not in self.sweep.active:
            return
        made: Weights = []
        for a, w in zip(self.adjoints.get(local) or self.sweep.none(), ws, strict=True):
            total = add(a, _typed(w, local.dtype))
            is_long = isinstance(total, Op) and total.contents.size > 2
            made.append(self.keep_weight(total, f"b_{local.name}") if is_long else total)
        self.adjoints[local] = made

    def spread(self, root: Value, ws: Weights, local: Local | None = None) -> None:
        """Pass the adjoint of a value, which a local may hold, to what it is computed from."""
        if is_none(ws) or not self.sweep.has(root):
            return
        weights: dict[Value, Weights] = {root: ws}
        values: dict[Value, Value] = {} if local is None or local.dtype != root.dtype else {root: Read(local)}
        for node in reversed(self._active_nodes(root)):
            weight = weights.pop(node, None)
            if weight is None or is_none(weight):
                continue
            if isinstance(node, Read):
                assert not node.index, "entries of arrays stand alone in a declaration"
                self.accumulate(node.local, weight)
            elif isinstance(node, Load):
                self._scatter(node, weight)
            else:
                assert isinstance(node, Op)
                for arg, part in self._products(node, weight, values):
                    part = [_typed(p, arg.dtype) for p in part]
                    known = weights.get(arg) or self.sweep.none()
                    weights[arg] = [add(x, p) for x, p in zip(known, part, strict=True)]

    def _active_nodes(self, root: Value) -> list[Value]:
        """The nodes of an expression that have adjoints, operands first."""
        order: list[Value] = []
        seen: set[Value] = set()
        stack = [(root, False)]
        while stack:
            node, is_done = stack.pop()
            if is_done:
                order.append(node)
            elif node not in seen:
                seen.add(node)
                stack.append((node, True))
                if isinstance(node, Op):
                    stack.extend((a, False) for a in node.args if self.sweep.has(a))
        return order

    def _value(self, node: Value, dtype: ir.Type | None, values: dict[Value, Value]) -> Value:
        """The number of a node, in a local."""
        value_now = node
        if not isinstance(node, Const) and not (isinstance(node, Read) and not node.index):
            if node not in values:
                values[node] = self.keep(ir.with_children(node, lambda x: values.get(x, x)), "t")  # type: ignore[assignment]
            value_now = values[node]
        return value_now if dtype is None else cast(value_now, dtype)

    def _definition(self, node: Value) -> Value:
        return self.definitions.get(node.local, node) if isinstance(node, Read) and not node.index else node

    def _products(self, node: Op, ws: Weights, values: dict[Value, Value]) -> list[tuple[Value, Weights]]:
        """The operands of an operation, each with its part of the adjoint."""
        for x, root in (node.args, node.args[::-1]) if node.name == "mul" else ():
            definition = self._definition(root)
            if isinstance(definition, Op) and definition.name == "sqrt" and is_same(definition.args[0], x):
                partial = multiply(self._value(root, node.dtype, values), 1.5)  # without a division, and at 0
                return [(x, self.times(ws, partial, is_singular=False))]
        rule = rule_of(node, self._definition, AGAIN if self.sweep.is_again else LAST)
        active = [a for a in node.args if self.sweep.has(a)]
        if rule.kind == "unknown":
            raise UnsupportedError(f"{ir.cited(node.place)}The derivative of {node.name} is not known.")
        if len(active) > 1 or rule.kind != "smooth":
            ws = [self.keep_weight(w) for w in ws]
        if rule.kind == "choice":
            return [(a, part) for a, part in self._choices(node, rule, ws, values) if self.sweep.has(a)]
        terms = [*partials_of_operation(node, rule, lambda v, dtype: self._value(v, dtype, values), self.sweep.has)]
        if self.sweep.is_guarded:
            terms = [(arg, self._of_used(partial, self._value(arg, node.dtype, values))) for arg, partial in terms]
        is_singular = rule.kind == "singular" and node.name != "log"  # which is infinite itself
        return [(arg, self.times(ws, partial, is_singular=is_singular)) for arg, partial in terms]

    def _of_used(self, partial: Coefficient, operand: Value) -> Coefficient:
        """A partial; not a number where it is 0 for an operand that is infinite, as in ``1 / (1 / x)`` at 0.

        Nothing is known of the derivative then, while the operand of a choice that takes another one has none.
        """
        if not isinstance(partial, Value) or isinstance(partial, Const):
            return partial
        partial = self.keep(partial, "partial")
        is_finite = operation("le", operation("abs", operand), literal(_LARGEST[operand.dtype], operand.dtype))
        is_lost = _and(operation("eq", partial, 0.0), operation("logical_not", is_finite))
        return select(is_lost, math.nan, partial)

    def _choices(self, node: Op, rule: Rule, ws: Weights, values: dict[Value, Value]) -> list[tuple[Value, Weights]]:
        if node.name == "select":
            args, is_first = node.args[1:], self._value(node.args[0], None, values)
        else:
            args = node.args
            assert rule.picks is not None
            given = [self._value(a, node.dtype, values) for a in (*args, node)]
            is_first = rule.picks(*given)[0]
            assert is_first is not None
            is_first = self.keep(is_first, "is_first")
        assert isinstance(is_first, Value)
        first: Weights = [0 if is_number(w, 0) else select(is_first, w, 0) for w in ws]
        second: Weights = [0 if is_number(w, 0) else select(is_first, 0, w) for w in ws]
        return [(args[0], first), (args[1], second)]

    def times(self, ws: Weights, partial: Coefficient, *, is_singular: bool) -> Weights:
        """An adjoint times a partial; where one of them is 0, the other may be infinite."""
        is_guarded = self.sweep.is_guarded and isinstance(partial, Value) and not isinstance(partial, Const)
        is_singular = is_singular or is_guarded
        if self.sweep.width > 1 or is_guarded:
            partial = self.keep(partial, "partial")

        def product(w: Coefficient) -> Coefficient:
            if _choice(w) is not None:  # where it is left out, the partial may be infinite
                assert isinstance(w, Op)
                return select(w.args[0], *(0 if is_number(x, 0) else product(x) for x in w.args[1:]))
            if is_singular and isinstance(w, Value) and isinstance(partial, Value):
                scaled = operation(GUARDED_BOTH if is_guarded else GUARDED, w, partial)
                return scaled if self.sweep.is_again else written_out(scaled)
            return multiply(w, partial)

        return [product(w) for w in ws]

    def entries(self, load: Load) -> tuple[list[Load], Value | None]:
        """The adjoints of an entry, and whether its indices are in range; None if they always are."""
        array = self.sweep.arrays[load.container]
        indices = [*load.indices, *load.component]
        checks = [
            operation(name, whole(indices[check.axis]), end)
            for check in load.checks
            for name, end in (("ge", check.first), ("lt", check.end))
            if end is not None
        ]
        condition = self._inside(reduce(_and, checks)) if checks else None
        number = array.number(load)
        form = linear_form(number, self._atom)
        first: Coefficient = multiply(number if form is None else value_of(form), array.width)
        if array.width > 1 and (form is None or any(self._is_computed(atom) for atom, _ in form.terms)):
            first = operation("bit_and", whole(first), literal(_POSITIVE, ir.I32))
        return self._neighbours(array.container, first), condition

    def _is_computed(self, atom: Atom) -> bool:
        """Whether a part of an index is an operation, such as ``%``.

        LLVM 15 may find ``(i + n - 1) % n`` to be ``i - 1``, and extend the number of an entry without its sign.
        """
        return isinstance(self._definition(atom_value(atom)), Op)

    def _atom(self, value: Value) -> Affine | None:
        """The normal form of a local, by what it was computed from: see ``multiply``."""
        if not isinstance(value, Read) or value.index or value.dtype != ir.I32:
            return None
        definition = self._definition(value)
        known = None if definition is value else linear_form(definition, self._atom)
        return Affine(((value.local, 1),)) if known is None else known

    def _inside(self, condition: Value) -> Value:
        """A local with this condition; entries at the same indices share it where no memory is read."""
        contents = condition.contents
        if contents.containers or any(local.shape for local in contents.locals):
            return self.declare("inside", ir.U1, condition, "inside")
        number = self.numbers.of(condition)
        if number not in self.insides:
            self.insides[number] = self.declare("inside", ir.U1, condition, "inside")
        return self.insides[number]

    def _neighbours(self, array: ir.Container, first: Coefficient) -> list[Load]:
        if self.sweep.width > 1:
            first = self.keep(first, "entry")
        return [Load(array, (cast(add(first, k), ir.I32),)) for k in range(self.sweep.width)]

    def _scatter(self, load: Load, ws: Weights) -> None:
        sweep = self.sweep
        entries, condition = self.entries(load)
        own = sweep.own.get(load.container)
        if own is not None:
            assert own.shape is not None
            row = multiply(Read(sweep.thread), own_width(own.shape[0]))
            entries = self._neighbours(own, add(row, entries[0].indices[0]))
        for entry, w in zip(entries, ws, strict=True):
            if is_number(w, 0):
                continue
            total = operation("add", entry, cast(w, entry.dtype))
            is_atomic = sweep.contention.is_atomic(load.container)
            added = ir.Update(entry, "add", cast(w, entry.dtype)) if is_atomic else ir.Assign(entry, total)
            self.emit(added if condition is None else ir.If(condition, (added,), ()))


def _choice(w: Coefficient) -> Value | None:
    """What an adjoint is where a choice takes it; None if it is none, as a product that is 0 where a factor is."""
    if not isinstance(w, Op) or w.name != "select" or not isinstance(w.args[0], Read):
        return None
    return next((a for a, b in (w.args[1:], w.args[:0:-1]) if is_number(b, 0)), None)


def _taken(w: Coefficient) -> Value | None:
    """Whether choices leave in an adjoint, or some of its terms; None: always."""
    if not isinstance(w, Op):
        return None
    if w.name in ("add", "sub", "neg"):
        terms = [x for x in map(_taken, w.args) if x is not None]
        return reduce(lambda a, b: ir.Op("bit_or", (a, b), ir.U1), terms) if len(terms) == len(w.args) else None
    part = _choice(w)
    if part is None:
        return None
    condition = w.args[0] if part is w.args[1] else operation("logical_not", w.args[0])
    inner = _taken(part)
    return condition if inner is None else _and(condition, inner)


def _and(a: Value, b: Value) -> Value:
    return ir.Op("bit_and", (a, b), ir.U1)


def own_width(size: int) -> int:
    """The distance of the sums of two threads: no two share a cache line."""
    return -(-size // 16) * 16


def entry_indices(local: Local) -> list[tuple[int, ...]]:
    return list(product(*map(range, local.shape)))


def _typed(w: Coefficient, dtype: ir.Type) -> Coefficient:
    return cast(w, dtype) if isinstance(w, Value) else w
