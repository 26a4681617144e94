"""The tangent of an expression as a linear form: reverse accumulation over smooth operations, forward over the others.

Each smooth operation costs one product per argument, for any number of columns. Choices, and operations whose partial
can be infinite, are accumulated forward: arguments that were not picked do not enter, and a zero tangent stays zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import NoReturn, TypeGuard

import taichi_ext.program as ir
from taichi_ext.analysis.same_values import ValueNumbers
from taichi_ext.differentiate.facts.facts import PassState
from taichi_ext.differentiate.forms import forms as linear
from taichi_ext.differentiate.rules.table import partials_of_operation, rule_of
from taichi_ext.differentiate.statements.shadows import ContainerTangents, ShadowFacts
from taichi_ext.differentiate.storage.storages import Deferred, LocalForms
from taichi_ext.errors import UnsupportedError
from taichi_ext.program.build import GUARDED_BOTH, Coefficient, Number, literal, multiply, operation

_QUOTIENTS = ("truediv", "raw_div")
_SINGULAR = "an operation in it may have an infinite partial"


@dataclass(frozen=True)
class Factor:
    """A power of a value; ``radicand`` is a if the value is ``sqrt(a)``."""

    value: ir.Value
    power: Number
    radicand: ir.Value | None = None

    @property
    def is_root(self) -> bool:
        """Whether the partial with respect to the radicand is finite."""
        return self.radicand is not None and self.power >= 2


Factors = dict[Hashable, Factor]  # by how they are computed


class ProductFactors:
    """The factors of products.

    Args:
        definition: gives the definition of a local that does not change.
        unchanging: the locals that never change.
        has_tangent: whether the tangent of a part of a definition is known from where that stands.
        roots: the names of the functions that count as roots.
    """

    def __init__(
        self,
        definition: Callable[[ir.Value], ir.Value],
        unchanging: set[ir.Local],
        has_tangent: Callable[[ir.Value], bool],
        roots: frozenset[str],
    ) -> None:
        self._definition, self._unchanging, self._has_tangent = definition, unchanging, has_tangent
        self._roots = roots
        self._rooted: dict[ir.Value, bool] = {}
        self._factors: dict[ir.Value, Factors] = {}
        self._numbers = ValueNumbers(self._lasting)

    def begin_statement(self) -> None:
        """Forget the factors of the previous statement, whose values may have changed."""
        self._factors.clear()
        self._numbers = ValueNumbers(self._lasting)

    def of_roots(self, node: ir.Op) -> list[Factor]:
        """The factors of a product with a root among them more than once; [] for other nodes."""
        leaves = list(self._of(node).values()) if self._roots and self._has_root(node) else []
        return leaves if any(f.is_root for f in leaves) else []

    def _has_root(self, value: ir.Value) -> bool:
        """Whether a root is among the factors, in a definition or out of it."""
        if value not in self._rooted:
            known, args = self._definition(value), ()
            if isinstance(known, ir.Op):
                args = known.args if known.name in ("mul", "neg", *_QUOTIENTS) else known.args[: known.name == "pow"]
            self._rooted[value] = self._is_root(known) or any(map(self._has_root, args))
        return self._rooted[value]

    def _of(self, value: ir.Value) -> Factors:
        if value not in self._factors:
            is_root = self._has_root(value)
            self._factors[value] = self._found(value) if is_root else {self._numbers.of(value): Factor(value, 1)}
        return self._factors[value]

    def _found(self, value: ir.Value) -> Factors:
        known = self._definition(value)
        is_same = known is value or self._is_unchanging(known)
        match known if is_same else value:
            case ir.Op(name="mul", args=(a, b)):
                return _product(self._of(a), self._of(b))
            case ir.Op(name=name, args=(a, b)) if name in _QUOTIENTS:
                return _product(self._of(a), self._of(b), -1)
            case ir.Op(name="neg", args=(a,)):
                return _product({"neg": Factor(literal(-1, value.dtype), 1)}, self._of(a))
            case ir.Op(name="pow", args=(a, ir.Const(value=n))) if n == int(n) or self._is_root(self._definition(a)):
                return _product({}, self._of(a), n)
            case inner:
                radicand = known.args[0] if isinstance(known, ir.Op) and self._is_root(known) else None
                if radicand is not None and not is_same and not self._has_tangent(radicand):
                    radicand = None
                return {self._numbers.of(inner): Factor(value, 1, radicand)}

    def _is_root(self, value: ir.Value) -> bool:
        return isinstance(value, ir.Op) and value.name in self._roots

    def _is_unchanging(self, value: ir.Value) -> bool:
        """Whether a definition has the same value wherever it is evaluated."""
        return not value.contents.containers and value.contents.locals <= self._unchanging

    def _lasting(self, value: ir.Value) -> ir.Value:
        """The definition of a local where it can stand for the local, else the value itself."""
        known = self._definition(value)
        return known if self._is_unchanging(known) else value


def partial_of(factors: list[Factor], factor: Factor, keep: Callable[[ir.Value], ir.Value]) -> Coefficient:
    """The partial of a product with respect to a factor, or to its radicand; ``keep`` evaluates a value."""
    scale = factor.power / 2 if factor.is_root else factor.power
    result: Coefficient = int(scale) if scale == int(scale) else scale
    for other in factors:
        power = other.power - (1 + factor.is_root) * (other is factor)
        if power:
            result = multiply(result, _power(keep(other.value), power))
    return result


def _product(a: Factors, b: Factors, power: Number = 1) -> Factors:
    """``a * b ** power``."""
    result = dict(a)
    for key, factor in b.items():
        old = result[key].power if key in result else 0
        result[key] = replace(factor, power=old + power * factor.power)
    return result


def _power(value: ir.Value, power: Number) -> Coefficient:
    if power < 0:
        return operation("truediv", 1.0, operation("pow", value, -power) if power != -1 else value)
    return value if power == 1 else operation("pow", value, power)


SHORT = 12  # operations of a value that may be written more than once
Step = tuple[ir.Value, Coefficient]  # an argument that carries a tangent, and its partial


class Linearizer:
    """Forms of expressions.

    Args:
        containers: the tangents of containers.
        coverage: the walk's findings about their shadows.
    """

    def __init__(
        self,
        walk: PassState,
        locals_: LocalForms,
        containers: Mapping[ir.Container, ContainerTangents],
        coverage: ShadowFacts,
    ) -> None:
        self._walk = walk
        self._locals = locals_
        self._containers = containers
        self._coverage = coverage
        rules = walk.facts.seeds.use.rules
        self._rule = functools.partial(rule_of, definition=self.definition, rules=rules)
        self._finish = rules.finish
        self.forms: dict[ir.Value, linear.Form] = {}  # forms of nodes that are not smooth
        self.tapes: dict[ir.Value, list[Step]] = {}
        self.lasting: dict[ir.Value, linear.Form] = {}  # within the definitions of deferred locals
        self.lasting_tapes: dict[ir.Value, list[Step]] = {}
        self.sweeps = 0
        self._products = ProductFactors(self.definition, walk.builder.frozen, self._has_tangent, rules.roots)

    def begin_statement(self) -> None:
        """Forget the forms of the previous statement."""
        self._walk.expressions.begin_statement()
        self.forms.clear()
        self.tapes.clear()
        self._products.begin_statement()

    def prepare(self, root: ir.Value) -> bool:
        """Evaluate the partials of a definition; False if they depend on values that may change before the use."""
        stack: list[tuple[ir.Value, bool]] = [(root, False)]
        forms: dict[ir.Value, linear.Form] = {}
        tapes: dict[ir.Value, list[Step]] = {}
        known = (self.lasting, self.lasting_tapes, forms, tapes)
        while stack:
            node, is_done = stack.pop()
            if is_done:
                tapes[node] = self.tape(node)
                continue
            if any(node in table for table in known) or self._deferred(node) is not None:
                continue
            if self._rule(node).kind == "smooth":
                stack.append((node, True))
                stack.extend((a, False) for a in self._parts(node))
                continue
            form = linear.materialize(self._walk.builder, self.leaf_form(node))
            if linear.has_row(form):
                return False
            forms[node] = form
        self.lasting.update(forms)
        self.lasting_tapes.update(tapes)
        return True

    # --- forms

    def form(self, node: ir.Value) -> linear.Form:
        """The tangent of a value, over columns; its coefficients are not yet evaluated."""
        return self._locals.settled(self.unsettled(node))

    def stored(self, values: list[ir.Value]) -> list[linear.Form]:
        """The tangents of values that are stored together, some under a condition."""
        forms = self._locals.stored(list(map(self.unsettled, map(_where_chosen, values))))
        for n, value in enumerate(values):
            if _is_zero_otherwise(value) and forms[n]:
                forms[n] = self._choice(value, [linear.materialize(self._walk.builder, forms[n]), {}])
        return forms

    def unsettled(self, node: ir.Value) -> linear.Form:
        """The tangent of a value, with pivots; its coefficients are not yet evaluated."""
        if not self._walk.facts.is_active(node):
            return {}
        if self._rule(node).kind == "smooth":
            return self._accumulated(node)
        return self.leaf_form(node)

    def definition(self, node: ir.Value) -> ir.Value:
        """The definition of a local that does not change, to find its sign."""
        if isinstance(node, ir.Read) and not node.index:
            return self._locals.definitions.get(node.local, node)
        return node

    def leaf_form(self, node: ir.Value) -> linear.Form:
        """The form of a node at which reverse accumulation stops."""
        if node in self.lasting:
            return self.lasting[node]
        if isinstance(node, (ir.Read, ir.Load)):
            deferred = self._deferred(node)
            return self._accumulated(node) if deferred is not None else self._form_of(node)
        if node not in self.forms:
            self.forms[node] = self._forward(node)
        return self.forms[node]

    def _deferred(self, node: ir.Value) -> Deferred | None:
        return self._locals.deferred.get(node.local) if isinstance(node, ir.Read) and not node.index else None

    def _form_of(self, value: ir.Read | ir.Load) -> linear.Form:
        if isinstance(value, ir.Read):
            return self._locals.form(value)
        if self._walk.cursor.block.stops(value.container):
            return {}
        self._coverage.read.add(value.container)
        return self._containers[value.container].form(value)

    def _accumulated(self, root: ir.Value) -> linear.Form:
        self.sweeps += 1
        order, leaves = self._order(root)
        weights: dict[ir.Value | ir.Local, linear.Weight] = {self._name(root): 1}
        for node in reversed(order):
            weight = weights.pop(self._name(node), 0)
            tape = self.tape(node)
            if len(tape) > 1:
                weight = linear.kept(self._walk.builder, weight)
            for arg, partial in tape:
                product = linear.times(weight, partial)
                name = self._name(arg)
                weights[name] = linear.plus(weights.get(name, 0), product)
        form: linear.Form = {}
        for name, weight in weights.items():  # the remaining nodes are leaves
            leaf = leaves[name]
            linear.accumulate(form, leaf, linear.kept(self._walk.builder, weight) if len(leaf) > 1 else weight)
        return form

    def _name(self, node: ir.Value) -> ir.Value | ir.Local:
        """The key of a node in an accumulation: for a deferred local, the local."""
        return node.local if self._deferred(node) is not None else node  # type: ignore[attr-defined]

    def _order(self, root: ir.Value) -> tuple[list[ir.Value], dict[ir.Value | ir.Local, linear.Form]]:
        """Smooth nodes, arguments first, and the forms of the leaves."""
        order: list[ir.Value] = []
        leaves: dict[ir.Value | ir.Local, linear.Form] = {}
        seen: set[ir.Value | ir.Local] = set()
        stack: list[tuple[ir.Value, bool]] = [(root, False)]
        while stack:
            node, is_done = stack.pop()
            if is_done:
                self.tape(node)
                order.append(node)
                continue
            name = self._name(node)
            if name in seen:
                continue
            seen.add(name)
            deferred = self._deferred(node)
            if deferred is not None:
                self._locals.note_sweep(deferred, self.sweeps)
                stack.append((node, True))
                stack.append((deferred.root, False))
            elif self._rule(node).kind == "smooth":
                stack.append((node, True))
                stack.extend((a, False) for a in self._parts(node))
            else:
                leaves[name] = self.leaf_form(node)
        return order, leaves

    def _parts(self, node: ir.Value) -> list[ir.Value]:
        """The arguments that may be in a node's tape; of a long value, their tapes come first: it can name them."""
        is_known = node in self.lasting_tapes or node in self.tapes or node.contents.size <= SHORT
        if is_known or not isinstance(node, ir.Op) or self._products.of_roots(node):
            return [a for a, _ in self.tape(node)]
        pairs = zip(node.args, self._rule(node).partials, strict=False)
        return [a for a, partial in pairs if partial is not None and self._walk.facts.is_active(a)]

    def tape(self, node: ir.Value) -> list[Step]:
        """The arguments that carry tangents, each with its partial."""
        deferred = self._deferred(node)
        if deferred is not None:
            return [(deferred.root, 1)]
        if isinstance(node, ir.FoldedConst):
            return [(node.source, 1)]
        if node in self.lasting_tapes:
            return self.lasting_tapes[node]
        if node not in self.tapes:
            assert isinstance(node, ir.Op)
            with self._walk.builder.at(node.place):
                self.tapes[node] = self._of_roots(node) or self._partials(node)
        return self.tapes[node]

    def _of_roots(self, node: ir.Op) -> list[Step]:
        """The steps of a product with a root as a factor more than once; [] for other nodes."""
        factors, steps = self._products.of_roots(node), []
        for factor in factors:
            arg = factor.radicand if factor.is_root else factor.value
            if arg is not None and self._walk.facts.is_active(arg):
                made = partial_of(factors, factor, lambda value: self._walk.expressions.keep(value, node.dtype))
                steps.append((arg, self._walk.builder.keep(made, "partial")))
        return steps

    def _has_tangent(self, node: ir.Value) -> bool:
        """Whether the tangent of a part of a definition is known from where that stands."""
        return node in self.lasting or node in self.lasting_tapes or self._deferred(node) is not None

    def _partials(self, node: ir.Op) -> list[Step]:
        partials = partials_of_operation(
            node, self._rule(node), self._walk.expressions.keep, self._walk.facts.is_active
        )
        return [(arg, self._walk.builder.keep(partial, "partial")) for arg, partial in partials]

    def _forward(self, node: ir.Value) -> linear.Form:
        rule = self._rule(node)
        if rule.kind == "unknown" or not isinstance(node, ir.Op):
            raise_unknown(node.name if isinstance(node, ir.Op) else type(node).__name__, node.place)
        if rule.kind == "choice":
            args = node.args[1:] if node.name == "select" else node.args
            return self._choice(node, list(map(self._settled, args)))
        if rule.kind == "guarded":
            return self._guarded(node)
        form: linear.Form = {}
        with self._walk.builder.at(node.place):
            partials = self._partials(node)
        for arg, partial in partials:
            inner = self._settled(arg)
            if any(
                isinstance(leaf, (linear.Carried, linear.Input)) for leaf in inner
            ):  # else a zero tangent might not stay zero
                for loop in self._walk.cursor.loops:
                    self._walk.plan.forward.setdefault(loop.statement, _SINGULAR)
            linear.accumulate(form, linear.guarded_scale(inner, partial, self._finish))
        return form

    def _guarded(self, node: ir.Op) -> linear.Form:
        """The tangent of a guarded product ``a * b``: ``a_dot * b``, infinite where b is, and ``a * b_dot``."""
        a, b = (self._walk.expressions.keep(arg, node.dtype) for arg in node.args)
        first, second = map(self._settled, node.args)
        form = linear.where_nonzero(a, second)
        if node.name == GUARDED_BOTH:
            linear.accumulate(form, linear.where_nonzero(b, first))
        else:
            linear.accumulate(form, first, b)
        return form

    def _settled(self, node: ir.Value) -> linear.Form:
        return linear.materialize(self._walk.builder, self.form(node))

    def _choice(self, node: ir.Op, forms: list[linear.Form]) -> linear.Form:
        """The tangent of a choice, of those of its arguments."""
        rule, args = self._rule(node), node.args
        if node.name == "select":
            picks: tuple[ir.Value | None, ...] = (self._walk.expressions.keep(node.args[0]), None)
            for seed in (seed for form in forms for seed in linear.columns_of(form)):
                self._walk.naming.note_conditional(seed, self._walk.cursor.loops)
        else:
            assert rule.picks is not None
            values = [self._walk.expressions.keep(a, node.dtype) for a in args]
            values.append(self._walk.expressions.keep(node))
            picks = tuple(p if p is None else self._walk.builder.keep(p, "is_first") for p in rule.picks(*values))
        return linear.chosen(picks, forms, node.dtype, self._finish)


def _where_chosen(value: ir.Value) -> ir.Value:
    """``x`` of ``select(condition, x, 0)``, else the value itself."""
    return value.args[1] if _is_zero_otherwise(value) else value


def _is_zero_otherwise(value: ir.Value) -> TypeGuard[ir.Op]:
    """Whether a value is ``select(condition, x, 0)``."""
    match value:
        case ir.Op(name="select", args=(_, _, ir.Const(value=0))):
            return True
        case _:
            return False


def raise_unknown(name: str, place: ir.Place | None) -> NoReturn:
    """Raise: a function or operation that takes a value with a tangent has no known derivative."""
    raise UnsupportedError(
        f"{ir.cited(place)}{name!r} is called on a value with a tangent, and its derivative is not known. Write it as "
        "a @ti.func, or call it in one that has a rule (boundary_gradient). Without a derivative: stop_gradient(x)."
    )
