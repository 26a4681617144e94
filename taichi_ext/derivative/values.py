"""Values of a traced kernel that carry a tangent.

A ``Scalar`` is lazy within a statement: it holds the operation and its arguments, and also the primal expression
exactly as Taichi would build it.  When the statement ends (a store, a declaration, a call), ``linearize`` accumulates
the derivative in reverse from the result to the leaves, so that each operation costs the same whatever the number of
seeds; between statements tangents go forward as linear forms.

A ``TensorValue`` and a ``StructValue`` are scalars with a shape or with names.  What has no tangent stays an ordinary
Taichi expression.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.derivative.linear_form import (
    Form,
    accumulate,
    as_expression,
    choose,
    guarded_scale,
    is_operation,
    is_row,
    multiply,
)
from taichi_ext.derivative.rules import Rule
from taichi_ext.errors import refuse_baked


class Scalar:
    """A real number with a tangent: an operation on scalars, or a leaf whose form is known."""

    _data_oriented = True  # lets the object pass through Taichi's own assignments and calls

    def __init__(
        self,
        primal: Any,
        *,
        form: Form | Callable[[], Form] | None = None,
        rule: Rule | None = None,
        args: tuple[Any, ...] = (),
        branches: Branches | None = None,
        source: Callable[[], Any] | None = None,
        is_tangent: bool = False,
    ) -> None:
        self.primal = primal  # expression, evaluated where it is used
        self.variable: Any = None  # the same, kept in a variable
        self.form = form
        self.rule = rule
        self.args = args
        self.branches = branches
        self.source = source  # reads the place that this was read from once more
        self.is_tangent = is_tangent  # the tangent that a user's rule is given: only linear operations take it
        self.place = ""  # in the user's source, where it is wanted
        self.tape: list[tuple[Scalar, Any]] | None = None  # arguments with partials, once they are evaluated
        self.local: Any = None  # the key of the local that this is the value of, while its form is not accumulated
        self.block: Any = None  # where that local is declared
        self.sweep = 0  # the last accumulation that came by

    @property
    def dtype(self) -> Any:
        return backend.default_type(float) if self.is_python_number else backend.dtype_of(self.primal)

    @property
    def is_python_number(self) -> bool:
        """Whether it is a Python number that is a parameter, or what Python computes from such numbers."""
        return not backend.is_expr(self.primal)

    def __bool__(self) -> bool:
        if self.is_python_number:
            refuse_baked("A choice")
        return True  # as of an expression, of which Python does not know the value

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a scalar has no attribute {name!r}")


def is_python_number(x: Any) -> bool:
    """Whether a value is a Python number that is a parameter, or what Python computes from such numbers."""
    return isinstance(x, Scalar) and x.is_python_number


class Branches:
    """The two sides of a conditional expression; only the taken one is evaluated."""

    def __init__(self, condition: Any, then: Any, orelse: Any) -> None:
        self.condition = condition
        self.sides = (then, orelse)


class TensorValue:
    """A vector or matrix with at least one entry that carries a tangent."""

    _data_oriented = True

    def __init__(self, entries: list[Any], shape: tuple[int, ...]) -> None:
        self.entries = entries
        self.shape = shape

    def get_shape(self) -> tuple[int, ...]:
        return self.shape

    @property
    def n(self) -> int:
        return self.shape[0]

    @property
    def m(self) -> int:
        if len(self.shape) < 2:
            raise AttributeError("a vector has no attribute 'm'")
        return self.shape[1]

    def __len__(self) -> int:
        return self.shape[0]

    def __bool__(self) -> bool:
        return True  # as of an expression, of which Python does not know the value

    def __iter__(self) -> Iterator[Any]:
        if len(self.shape) == 1:
            return iter(self.entries)
        width = self.shape[1]
        return iter([self.entries[i * width : (i + 1) * width] for i in range(self.shape[0])])

    def __getattr__(self, name: str) -> Any:
        numbers = backend.swizzle_indices(name)
        if numbers is None or len(self.shape) != 1 or max(numbers) >= len(self.entries):
            raise AttributeError(f"a vector or matrix of shape {self.shape} has no attribute {name!r}")
        return pick(self, numbers, name)


def pick(value: TensorValue, numbers: list[int], name: str) -> Any:
    """The entry, or vector of entries, that a swizzle names."""
    if len(name) == 1:
        return value.entries[numbers[0]]
    return make_tensor([value.entries[i] for i in numbers], (len(numbers),))


class StructValue:
    """A struct: named members, each a scalar, tensor or struct with or without a tangent, and its methods."""

    _data_oriented = True

    def __init__(self, members: dict[str, Any], methods: dict[str, Any]) -> None:
        self.members = members
        self.methods = methods

    def __getattr__(self, name: str) -> Any:
        members = self.__dict__.get("members", {})
        if name in members:
            return members[name]
        raise AttributeError(f"a struct with the members {list(members)} has no attribute {name!r}")


# --- reading ----------------------------------------------------------------------------------------------------------


def is_active(x: Any) -> bool:
    if isinstance(x, (list, tuple)):
        return any(is_active(e) for e in x)
    if isinstance(x, dict):
        return any(is_active(e) for e in x.values())
    if isinstance(x, StructValue):
        return any(is_active(e) for e in x.members.values())
    return isinstance(x, (Scalar, TensorValue))


def primal_of(x: Any) -> Any:
    """The value without its tangent, as an ordinary Taichi object."""
    if isinstance(x, Scalar):
        if x.variable is None and isinstance(x.primal, (int, np.integer)):
            refuse_baked("A whole number")
        return number_of(x)
    if isinstance(x, TensorValue):
        return backend.tensor([primal_of(e) for e in x.entries], x.shape)
    if isinstance(x, StructValue):
        entries = {name: primal_of(member) for name, member in x.members.items()}
        return backend.Struct({**entries, "__struct_methods": x.methods})
    if isinstance(x, (list, tuple)):
        return type(x)(primal_of(e) for e in x)
    if isinstance(x, dict):
        return {k: primal_of(v) for k, v in x.items()}
    return x


def number_of(x: Any) -> Any:
    """The value of a scalar without its tangent, where a whole number stands for a real one."""
    if isinstance(x, Scalar):
        return x.primal if x.variable is None else x.variable
    return primal_of(x)


def members_of(x: Any) -> dict[str, Any]:
    """The members of a struct by name."""
    return x.members if isinstance(x, StructValue) else dict(x.items)


def is_tensor_like(x: Any) -> bool:
    return isinstance(x, (TensorValue, backend.Matrix)) or backend.is_tensor(x)


def shape_of(x: Any) -> tuple[int, ...]:
    if isinstance(x, TensorValue):
        return x.shape
    if isinstance(x, backend.Matrix):
        return tuple(x.get_shape() or ())
    return backend.shape_of(x)


def entries_of(x: Any) -> list[Any]:
    """The entries of a vector or matrix in row-major order; an expression is evaluated once."""
    if isinstance(x, TensorValue):
        return x.entries
    if isinstance(x, backend.Matrix):
        return list(itertools.chain.from_iterable(x.to_list())) if x.ndim == 2 else list(x.to_list())
    shape = backend.shape_of(x)
    kept = backend.variable(x)
    return [backend.element(kept, index) for index in itertools.product(*(range(s) for s in shape))]


def make_tensor(entries: list[Any], shape: tuple[int, ...]) -> Any:
    """A vector or matrix of the entries: a TensorValue if one carries a tangent."""
    if any(isinstance(e, Scalar) for e in entries):
        return TensorValue(entries, shape)
    return backend.tensor(entries, shape)


# --- differentiation within a statement -------------------------------------------------------------------------------


def keep(x: Any, dtype: Any = None) -> Any:
    """The value of a scalar in a variable that does not change; numbers stay numbers."""
    if isinstance(x, Scalar):
        if x.variable is None:
            x.variable = backend.variable(current_primal(x), x.dtype if x.is_python_number else None)
        x = x.variable
    elif backend.is_expr(x):
        x = backend.variable(x)
    if dtype is not None and backend.is_expr(x) and backend.dtype_of(x) != dtype:
        x = backend.cast(x, dtype)
    return x


def current_primal(x: Scalar) -> Any:
    """The primal expression, built on arguments already kept in variables where there are any."""
    if x.rule is None or all(not isinstance(a, Scalar) or (a.variable is None and a.rule is None) for a in x.args):
        return x.primal
    return x.rule.primal(
        *[(a.variable if a.variable is not None else current_primal(a)) if isinstance(a, Scalar) else a for a in x.args]
    )


def linearize(tracer: Any, x: Any) -> Form:
    """The tangent of a scalar as a form over the leaves."""
    if not isinstance(x, Scalar):
        return {}
    if x.local is not None:
        return _accumulate_in_reverse(tracer, x)
    if x.form is None:
        if x.branches is not None:
            x.form = _linearize_branches(tracer, x)
        elif x.rule.kind == "smooth":
            x.form = _accumulate_in_reverse(tracer, x)
        else:
            x.form = _linearize_forward(tracer, x)
    elif callable(x.form):
        x.form = x.form()
    else:
        return _fresh(tracer, x.form)
    if tracer.watch is not None:
        tracer.watch.value(tracer, x)
    return _fresh(tracer, x.form)


def _fresh(tracer: Any, form: Form) -> Form:
    for leaf in form:
        if is_row(leaf):
            tracer.check_fresh(leaf)
    return form


def _accumulate_in_reverse(tracer: Any, root: Scalar) -> Form:
    order = smooth_nodes(tracer, root)
    sweep = tracer.new_sweep()
    for node in order:
        if node.local is not None:
            tracer.note_sweep(node, sweep)
    partials = {id(node): partials_of(node) if node.tape is None else node.tape for node in order}
    if tracer.watch is not None:
        for node in order:
            tracer.watch.partials(node, [partial for _, partial in partials[id(node)]])
    weights: dict[int, Any] = {id(root): 1}
    form: Form = {}
    operations = 0
    for node in reversed(order):
        weight = weights.pop(id(node), 0)
        if backend.is_expr(weight) and len(partials[id(node)]) > 1:
            weight = backend.fixed(weight)
        for arg, partial in partials[id(node)]:
            product = multiply(weight, partial)
            operations += is_operation(product, weight, partial)
            if arg.form is None:
                before = weights.get(id(arg), 0)
                weights[id(arg)] = _add(before, product)
                operations += is_operation(weights[id(arg)], before, product)
            else:
                if backend.is_expr(product) and len(arg.form) > 1:
                    product = backend.fixed(product)
                operations += accumulate(form, arg.form, product)
    tracer.note_operations(operations)
    return form


def smooth_nodes(tracer: Any, root: Scalar) -> list[Scalar]:
    """The smooth operations that a value is made of, arguments first; what else it is made of has its form after."""
    order: list[Scalar] = []
    seen: set[int] = set()
    stack: list[tuple[Scalar, bool]] = [(root, False)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
            continue
        if id(node) in seen:
            continue
        seen.add(id(node))
        if node.form is not None or node.branches is not None or node.rule.kind != "smooth":  # type: ignore[union-attr]
            linearize(tracer, node)
            continue
        stack.append((node, True))
        stack.extend((a, False) for a in node.args if isinstance(a, Scalar))
    return order


def _add(a: Any, b: Any) -> Any:
    total: Form = {}
    accumulate(total, {0: a})
    accumulate(total, {0: b})
    return total.get(0, 0)


def partials_of(node: Scalar) -> list[tuple[Scalar, Any]]:
    """The arguments of a node that carry tangents, each with its partial."""
    rule = node.rule
    assert rule is not None
    found = []
    values: list[Any] | None = None
    for arg, partial in zip(node.args, rule.partials, strict=True):
        if not isinstance(arg, Scalar):
            continue
        if callable(partial):
            if values is None:
                dtype = node.dtype
                values = [keep(a, dtype if rule.promotes else None) for a in node.args]
                values.append(keep(node) if rule.takes_result else None)
            partial = partial(*values)
        found.append((arg, partial))
    return found


def _linearize_forward(tracer: Any, node: Scalar) -> Form:
    rule = node.rule
    assert rule is not None
    if rule.kind == "constant":
        return {}
    forms = [linearize(tracer, a) for a in node.args]
    if rule.kind == "choice":
        values = [keep(a, node.dtype) for a in node.args]
        assert rule.picks is not None
        picks = [p if p is None or not backend.is_expr(p) else backend.fixed(p) for p in rule.picks(*values)]
        return choose(picks, forms, node.dtype)
    form: Form = {}
    for arg, partial in partials_of(node):
        weight = backend.fixed(partial) if backend.is_expr(partial) else partial
        accumulate(form, guarded_scale(linearize(tracer, arg), weight))
    return form


def _linearize_branches(tracer: Any, node: Scalar) -> Form:
    """A conditional expression as an ``if`` whose sides write into variables declared before it."""
    branches = node.branches
    assert branches is not None
    dtype = node.dtype
    value = backend.variable(0, dtype)
    condition = backend.variable(branches.condition)
    join = tracer.new_join(dtype)

    def side(x: Any) -> Callable[[], None]:
        def emit() -> None:
            form = linearize(tracer, x)
            join.write({leaf: as_expression(c, dtype) if not is_row(leaf) else c for leaf, c in form.items()})
            backend.assign(value, x.variable if isinstance(x, Scalar) and x.variable is not None else primal_of(x))

        return emit

    backend.if_else(condition, side(branches.sides[0]), side(branches.sides[1]))
    node.variable = value
    return join.form()
