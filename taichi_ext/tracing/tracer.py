"""The trace-time library: what the rewritten kernel calls, as ``<ad>``, while Taichi walks it.

Every method sees the real expressions, hence real types, and either builds the ordinary Taichi expression (nothing
carries a tangent) or a value with a tangent.  It is built in layers: index forms, control flow, bookkeeping,
assignments, and here operators and calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.boundary.registry import registry
from taichi_ext.derivative.rules import FIXED_POWER, OF_POSITIVE, RULES, SQUARE, Rule
from taichi_ext.derivative.values import (
    Branches,
    Scalar,
    entries_of,
    is_active,
    is_python_number,
    is_tensor_like,
    make_tensor,
    number_of,
    primal_of,
    shape_of,
)
from taichi_ext.errors import UnsupportedError, refuse_baked
from taichi_ext.record.names import TRACER
from taichi_ext.record.returns import RETURN_TYPE
from taichi_ext.record.rewrite import rewrite
from taichi_ext.tracing import calls, constructors, subscripts
from taichi_ext.tracing.assignments import Assignments
from taichi_ext.tracing.constants import Watched
from taichi_ext.tracing.index_forms import Block

MAX_DEPTH = 100


class Tracer(Assignments):
    """One trace of one kernel."""

    def begin(self) -> None:
        """First statement of every function: arguments of the kernel become parameters or containers."""
        if len(self.contexts) == 1:
            self.plan.bind_arguments(self, self.context)

    # --- operators

    def operate(self, name: str, *args: Any) -> Any:
        """An operation of the rule table, elementwise on tensors."""
        return self.apply(RULES[name], *args)

    def apply(self, rule: Rule, *args: Any) -> Any:
        args = tuple(self.value_of(a) for a in args)
        is_power = rule.name == "pow" and isinstance(args[1], int)  # a product
        self.note_work("mul" if is_power else rule.name, next((a for a in args if is_tensor_like(a)), None))
        if not any(is_active(a) for a in args):
            result = rule.primal(*args)
            return self._track(rule.name, args[0], args[-1], result)
        shapes = {shape_of(a) for a in args if is_tensor_like(a)}
        if not shapes:
            return self._apply_scalar(rule, args)
        if len(shapes) > 1:
            raise ValueError(f"operands of different shapes {sorted(shapes)} in {rule.name!r}")
        shape = shapes.pop()
        columns = [entries_of(a) if is_tensor_like(a) else None for a in args]
        count = len(next(c for c in columns if c is not None))
        kept = [
            a if c is not None or not isinstance(a, Scalar) or a.is_python_number else self.freeze(a, None)
            for a, c in zip(args, columns, strict=True)
        ]
        entries = [
            self._apply_scalar(rule, tuple(k if c is None else c[i] for k, c in zip(kept, columns, strict=True)))
            for i in range(count)
        ]
        if rule.is_whole:
            whole = backend.variable(rule.primal(*[primal_of(a) for a in args]))
            for index, e in zip(np.ndindex(shape), entries, strict=True):
                if isinstance(e, Scalar):
                    e.primal = e.variable = backend.cast(backend.element(whole, index), e.dtype)
        return make_tensor(entries, shape)

    def _apply_scalar(self, rule: Rule, args: tuple[Any, ...]) -> Any:
        primal = rule.primal(*[number_of(a) for a in args])
        is_whole = backend.is_expr(primal) and not backend.is_real(backend.dtype_of(primal))
        is_constant = not any(isinstance(a, Scalar) for a in args) or rule.kind == "constant"
        if is_constant or is_whole:
            if (is_whole or not backend.is_expr(primal)) and any(map(is_python_number, args)):
                refuse_baked("A whole number")
            return primal
        if rule.name == "mul" and args[0] is args[1]:
            rule, args = SQUARE, args[:1]
        elif rule.name in OF_POSITIVE and _sign_of(args[0]) > 0:
            rule = OF_POSITIVE[rule.name]
        elif rule.name == "pow" and _is_whole_power(args[1]):
            rule = FIXED_POWER
        node = Scalar(primal, rule=rule, args=args, is_tangent=_stays_linear(rule, args))
        if self.watch is not None:
            node.place = backend.user_place()
        return node

    def where(self, condition: Any, then: Any, orelse: Any) -> Any:
        """``then if condition else orelse``: only the side that is taken is evaluated."""
        condition, then, orelse = self.condition(condition), self.value_of(then), self.value_of(orelse)
        if not is_active((then, orelse)):
            if is_tensor_like(then) or is_tensor_like(orelse):
                return backend.ops.select(condition, then, orelse)
            return backend.ops.ifte(condition, then, orelse)
        if is_tensor_like(then) or is_tensor_like(orelse):
            return constructors.select(self, condition, then, orelse)
        primal = backend.ops.ifte(condition, primal_of(then), primal_of(orelse))
        is_tangent = any(isinstance(x, Scalar) and x.is_tangent for x in (then, orelse))
        return Scalar(primal, branches=Branches(condition, then, orelse), is_tangent=is_tangent)

    def neg(self, x: Any) -> Any:
        return self.operate("neg", x)

    def pos(self, x: Any) -> Any:
        return self.value_of(x)

    def matmul(self, a: Any, b: Any) -> Any:
        return calls.matmul(self, a, b)

    # --- reading

    def slice(self, start: Any, stop: Any, step: Any) -> Any:
        return slice(start, stop, step)

    def load(self, base: Any, index: tuple[Any, ...]) -> Any:
        """``base[index]``: of a container or tensor something that can also be stored to."""
        return subscripts.load(self, base, index)

    def attribute(self, base: Any, name: str) -> Any:
        """``base.name`` where the name can be that of one entry of a vector."""
        numbers = backend.swizzle_indices(name)
        if numbers is not None and backend.is_tensor(base):
            return subscripts.load(self, base, tuple(numbers))
        return backend.native_attribute(self.context, base, name)[0]

    def cast(self, x: Any, dtype: Any) -> Any:
        return constructors.cast(self, x, dtype)

    def bound(self, x: Any) -> Any:
        """A bound of a range."""
        if is_python_number(self.value_of(x)):
            refuse_baked("The bound of a loop")
        return self.primal(x)

    # --- Python numbers that are parameters

    def watching(self) -> contextlib.AbstractContextManager[Watched]:
        """Notice whether Python code that runs in the meantime may read one."""
        constants = self.plan.constants
        return contextlib.nullcontext(Watched()) if constants is None else constants.watching()

    def replaced_names(self, function: Any) -> dict[str, Any]:
        """The names of a Python function that stand for one, with what they read as."""
        return {} if self.plan.constants is None else self.plan.constants.replaced(function)

    def read_attribute(self, owner: Any, name: str) -> Any:
        """An attribute that a Python function reads."""
        value = getattr(owner, name)
        constants = self.plan.constants
        return value if constants is None else constants.read_attribute(owner, name, value)

    # --- calls

    def call(self, function: Any, *args: Any, **keywords: Any) -> Any:
        return calls.call(self, function, list(args), keywords)

    def run(self, function: Any, *args: Any, **keywords: Any) -> None:
        """A call whose result is not used."""
        calls.call(self, function, list(args), keywords, is_statement=True)

    def method(self, base: Any, name: str, *args: Any, **keywords: Any) -> Any:
        return calls.method(self, base, name, list(args), keywords)

    def result(self, value: Any) -> Any:
        """``return value``."""
        value = self.value_of(value)
        if len(self.contexts) > 1:
            return value
        return self.plan.returned(self, value)

    def resolve_rule(self, target: Any) -> Any:
        """The user's rule for a function or mark, None while that rule itself is traced."""
        if not self.columns and not self.is_reverse:
            return None  # no derivative is asked for
        rule = registry.rule_for(target)
        self.facts.rules[target] = rule
        return None if target in self.without_rules else rule

    @contextlib.contextmanager
    def without_rule(self, target: Any) -> Iterator[None]:
        self.without_rules.append(target)
        try:
            yield
        finally:
            self.without_rules.pop()

    def inline(self, func: Any, args: list[Any]) -> Any:
        """Trace a ti.func in place, its arguments already bound."""
        function = func.func
        scope = {**backend.global_variables(function), TRACER: self}
        count = None
        if func.is_real_function:
            kinds = func.return_type or ()
            count = len(kinds)
            scope.update({RETURN_TYPE.format(n): kind for n, kind in enumerate(kinds)})
        rewritten = rewrite(function, count)
        context = backend.make_context(function, rewritten.source, scope, arguments=args, places=rewritten.places)
        path = self.path
        self.path = (*path, (self.line(), function.__qualname__))
        if len(self.path) > MAX_DEPTH:
            raise UnsupportedError(
                f"Calls of {function.__qualname__!r} nest deeper than {MAX_DEPTH}: its recursion does not end at "
                "compile time. Write it as a loop."
            )
        self.contexts.append(context)
        try:
            if func.is_real_function and len(self.blocks) == 1:
                return self._walk_serially(rewritten.tree(), context, func.return_type or ())
            return backend.walk(rewritten.tree(), context)
        finally:
            self.contexts.pop()
            self.path = path

    def _walk_serially(self, tree: Any, context: Any, kinds: tuple[Any, ...]) -> Any:
        """Trace a real function called at the top of a kernel: its loops are not the kernel's own parallel ones."""
        results = [self.declare((self.path, "result", n), _zero(kind)) for n, kind in enumerate(kinds)]
        with backend.for_range(1):
            self.block = Block()
            self.blocks.append(self.block)
            value = backend.walk(tree, context)
            for result, v in zip(results, [value] if len(kinds) == 1 else value or (), strict=True):
                self.assign_to(result, v)
            self.leave()
        if not kinds:
            return None
        return self.value_of(results[0]) if len(kinds) == 1 else tuple(self.value_of(r) for r in results)


def _sign_of(x: Any) -> float:
    """1 for what is certainly positive, 0 for what is certainly not negative, else -1."""
    if isinstance(x, (int, float)):
        return float(np.sign(x))
    name = x.rule.name if isinstance(x, Scalar) and x.rule is not None else ""
    if name == "add":
        signs = [_sign_of(a) for a in x.args]
        return max(signs) if min(signs) >= 0 else -1
    return 0 if name in ("square", "abs", "sqrt", "exp") else -1


def _is_whole_power(exponent: Any) -> bool:
    return isinstance(exponent, (int, float)) and exponent >= 1 and float(exponent).is_integer()


def _stays_linear(rule: Rule, args: tuple[Any, ...]) -> bool:
    """Whether the arguments hold a tangent of a user's rule; raises where the operation is not linear in it."""
    tangents = [isinstance(a, Scalar) and a.is_tangent for a in args]
    if not any(tangents):
        return False
    is_linear = (
        rule.name in ("neg", "cast", "select")
        or (rule.name in ("add", "sub") and all(t or _may_be_zero(a) for a, t in zip(args, tangents, strict=True)))
        or (rule.name == "mul" and sum(tangents) == 1)
        or (rule.name in ("truediv", "raw_div") and tangents == [True, False])
    )
    if not is_linear:
        raise UnsupportedError(f"A rule must be linear in its tangents; {rule.name!r} is applied to one here.")
    return True


def _may_be_zero(x: Any) -> bool:
    return not isinstance(x, (int, float)) or x == 0


def _zero(kind: Any) -> Any:
    """A zero of a scalar, vector, matrix or struct type."""
    if isinstance(kind, (backend.MatrixType, backend.StructType)):
        return kind(0)
    return backend.cast(0, kind)


def _binary(name: str) -> Any:
    def method(self: Tracer, a: Any, b: Any) -> Any:
        return self.operate(name, a, b)

    method.__name__ = name
    return method


def _plain(name: str, function: Any) -> Any:
    """An operation on values without tangents: comparisons, logic, bits."""

    def method(self: Tracer, *args: Any) -> Any:
        if name.startswith(("bit", "shift", "invert")) and any(is_python_number(self.value_of(a)) for a in args):
            refuse_baked("A whole number")
        return function(*[self.primal(a) for a in args])

    method.__name__ = name
    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Tracer, _name, _binary(_name))
for _name, _function in constructors.PLAIN_OPERATORS.items():
    setattr(Tracer, _name, _plain(_name, _function))
for _class in Tracer.__mro__[:-1]:
    for _function in vars(_class).values():
        if callable(_function) and hasattr(_function, "__dict__"):
            _function._is_wrapped_kernel = True  # Taichi: not a foreign function
