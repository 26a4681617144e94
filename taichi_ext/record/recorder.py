"""The recorder: functions that the rewritten source of a kernel calls, as ``<ad>.name``, while Taichi walks it once.

They are listed here, and take a ``Recording``. The kernel that Taichi builds meanwhile only serves to find types, and
is discarded.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import taichi_ext.program as ir
import taichi_ext.record.assignments as assignments
import taichi_ext.record.calls as calls
import taichi_ext.record.construct as construct
import taichi_ext.record.effects as effects
import taichi_ext.record.operations as operations
import taichi_ext.record.subscripts as subscripts
from taichi_ext import backend
from taichi_ext.errors import UnsupportedError, raise_baked
from taichi_ext.program.build import cast
from taichi_ext.program.values import I32
from taichi_ext.record.handles import Record, VectorPlace, flattened, group_of, place_of_local, value_of
from taichi_ext.record.levels import with_levels
from taichi_ext.record.literals import as_value, default_types, dummy, type_of
from taichi_ext.record.operations import native
from taichi_ext.record.recording import Frame, Recording
from taichi_ext.record.rewriter import BINARY, RECORDER, rewrite
from taichi_ext.record.rules import NoRules, Rules
from taichi_ext.record.shapes import warn_of_lost_edges
from taichi_ext.record.twins import with_tangents_at
from taichi_ext.record.variables import Constants


def before_loop(r: Recording, kind: str, *domain: object) -> None:
    """The domain of a loop, and the one that Taichi walks instead."""
    given = tuple(value_of(d) for d in domain)
    if any(isinstance(x, ir.FoldedConst) for x in flattened(given)):
        raise_baked("The bound of a loop")
    if given and backend.is_mesh_domain(given[0]):
        raise UnsupportedError(
            "A loop over the elements of a mesh reads and stores attributes in a way that is not differentiated. "
            "Loop over the fields of the attributes, with indices kept in integer fields."
        )
    if kind in ("field", "grouped"):
        r.loop.domain = given
        shown: tuple[Any, ...] = (_domain_object(r, given[0]),)
    else:
        r.loop.domain = tuple([native(e) for e in d.entries] if isinstance(d, ir.Tensor) else native(d) for d in given)
        shown = tuple(_domain_bound(d) for d in given)
    r.loop.statement = ir.For(kind, (), shown, (), r.loop.config, place=r.place())
    r.loop.config = {}


def _domain_object(r: Recording, obj: object) -> object:
    if isinstance(obj, backend.StructField):
        obj = backend.leaf_fields(obj)[0]
    if isinstance(obj, (backend.ScalarField, backend.MatrixField, backend.AnyArray)):
        return r.container(obj)
    if isinstance(obj, (ir.Value, ir.Tensor, list, tuple, dict)):
        raise UnsupportedError(
            f"A loop runs over a {type(obj).__name__}. Write `for x in ti.static(...)`, or loop over indices."
        )
    return obj


def _domain_bound(x: object) -> object:
    """A bound as a value; a pair of bounds as a pair."""
    if isinstance(x, ir.Tensor):
        return tuple(x.entries)
    return tuple(map(_domain_bound, x)) if isinstance(x, (list, tuple)) else as_value(x)


def enter_for(r: Recording, *names: str) -> None:
    """Start the body of a loop: its variables become locals of the program."""
    variables, wide = [], []
    for name in names:
        scope = next(s for s in reversed(r.context.local_scopes) if name in s)
        bound = scope[name]
        is_matrix = isinstance(bound, backend.Matrix)
        shape = tuple(bound.get_shape() or ()) if is_matrix else backend.shape_of(bound)
        variable, dtype = ir.Local(name, I32, shape, "loop"), type_of(backend.dtype_of(bound))
        variables.append(variable)
        local = variable if dtype == I32 else ir.Local(name, dtype, shape, "user")
        scope[name] = place_of_local(local)
        if local is not variable:  # of ``ti.ndrange`` with bounds of 64 bits
            wide.append(ir.Declare(local, (cast(ir.Read(variable), dtype),), place=r.place()))
    loop = r.loop.statement
    r.open_block(ir.For(loop.kind, tuple(variables), loop.domain, (), loop.config, place=loop.place))
    for declare in wide:
        r.add(declare)


def jump(r: Recording, kind: str) -> None:
    if not r.context.is_in_static_for():
        r.add(ir.Jump(kind, place=r.place()))


def _if(r: Recording, condition: object) -> object:
    r.open_block(ir.If(as_value(condition), (), place=r.place()))
    return dummy(I32)


def _while(r: Recording, _: None, condition: object) -> object:
    r.set_condition(as_value(condition))
    return dummy(I32)


def _result(r: Recording, value: Any) -> Any:
    """``return value``."""
    value = value_of(value)
    if len(r.frames) > 1:
        return value
    kinds = backend.returned_types(r.kernel)
    values = [value] if len(kinds) == 1 else list(value)
    typed = (construct.typed(r, kind, v) for kind, v in zip(kinds, values, strict=True))
    r.add(ir.Return(tuple(map(group_of, typed)), place=r.place()))
    return None


def _run(r: Recording, function: object, /, *args: object, **keywords: object) -> None:
    """A call whose result is not used."""
    calls.call(r, function, list(args), keywords, is_statement=True)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    # the first statement of every function: arguments of the kernel become values and containers
    "begin": lambda r: bind_arguments(r) if len(r.frames) == 1 else None,
    **{"if_": _if, "orelse": Recording.open_block, "close": Recording.close, "end_if": Recording.end_if},
    "enter_while": lambda r: r.open_block(ir.While(None, (), place=r.place())),
    **{"while_": _while, "before_loop": before_loop, "enter_for": enter_for, "end_loop": Recording.end_loop},
    "bound": lambda r, number=None: r.loop.domain if number is None else r.loop.domain[number],
    **{"jump": jump, "result": _result, "assert_": effects.assert_, "spread": subscripts.spread},
    **{"let": assignments.let, "let_value": assignments.let_value, "bind_static": assignments.bind_static},
    **{"unpack": assignments.unpack, "store": assignments.store, "update_local": assignments.update_local},
    "update": lambda r, base, index, *update: assignments.update_place(
        r, assignments.place_of(r, base, index), *update
    ),
    **{"percent": effects.percent, "format": effects.format_text, "compare": operations.compare},
    **{"bool_op": operations.bool_op, "where": operations.where},
    "cast": lambda r, x, dtype: construct.typed(r, dtype, x),
    **{"pos": lambda r, x: value_of(x), "matmul": calls.matmul, "slice": lambda r, *parts: slice(*parts)},
    **{"load": subscripts.load, "attribute": subscripts.attribute, "walk": construct.walk_typed},
    "call": lambda r, function, /, *args, **keywords: calls.call(r, function, list(args), keywords),
    "run": _run,
    "method": lambda r, base, name, /, *args, **keywords: calls.method(r, base, name, list(args), keywords, False),
}
_OPERATORS = [n for n in (*BINARY.values(), "neg", "logical_not", "invert") if n != "matmul"]
_FUNCTIONS |= {n: lambda r, *args, name=n: operations.operate(r, name, *args) for n in _OPERATORS}


def _named(r: Recording, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function as Taichi calls it: by its own name, which errors cite.

    A method would do, but calls of methods use Python's C stack, which has a limit of its own from 3.12 on.
    """

    def named(*args: object, **keywords: object) -> Any:
        return function(r, *args, **keywords)

    named.__name__ = name
    return backend.known_in_kernels(named)


def _library(r: Recording) -> SimpleNamespace:
    """The functions for one recording; ``names``: by their names in the rewritten source."""
    made = {name: _named(r, name, function) for name, function in _FUNCTIONS.items()}
    return SimpleNamespace(names={f"{RECORDER}.{name}": function for name, function in made.items()}, **made)


def record(
    kernel: backend.Kernel,
    args: tuple[Any, ...],
    rules: Rules | None = None,
    captures: backend.Captures | None = None,
    constants: Constants | None = None,
    *,
    order: int = 1,
) -> ir.Program:
    """The program of a kernel, for arguments of the types of these.

    Args:
        kernel: Taichi's kernel object, ``backend.primal_kernel(k)[0]``.
        args: all its arguments, in order.
        rules: the users' rules that apply; None for none.
        captures: takes the Python values that become part of the program.
        constants: the Python numbers that are parameters; takes the locals of the program for them.
        order: of the derivatives that are computed from it.

    Returns:
        The program.

    Raises:
        UnsupportedError: the kernel uses a construct that cannot be recorded; with the user's file, line and text.
    """
    with backend.deep_recursion(kernel):
        rewritten = rewrite(kernel.func, None)
        r = Recording(kernel, _library, rules or NoRules(), constants or Constants(), order)
        scope = {**backend.global_variables(kernel.func), **r.library.names}
        for position in kernel.template_slot_locations:
            scope[backend.arguments(kernel)[position].name] = args[position]
        throwaway = backend.FusedKernel(kernel)
        throwaway.captures = captures or throwaway.captures
        throwaway.captures.reader = constants
        context = backend.make_context(
            kernel.func,
            rewritten.source,
            scope,
            kernel=throwaway,
            arguments=list(args),
            argument_features=backend.argument_features(kernel, args),
            places=rewritten.places,
        )
        r.frames.append(Frame(context, None, False))
        backend.materialize()
        throwaway.trace(rewritten.tree(), context, f"{kernel.func.__name__}_record", lambda: False)
        throwaway.captures.reader = None  # which refers to the arguments: captures are kept as long as the kernel
        body = with_tangents_at(r.with_alerts(r.body()), r.alert)
        containers = tuple(r.containers.values())
        returns = tuple(map(annotation_text, backend.returned_types(kernel)))
        warn_of_lost_edges(body)
        body, file = with_levels(body), rewritten.source[0]
        return ir.Program(kernel.func.__name__, r.arguments, returns, body, containers, file, *default_types())


# Arguments and results of a recorded kernel: as values of its program, and as text for the emitted one.


def bind_arguments(r: Recording) -> None:
    """Bind the names of the kernel's arguments to values and containers of the program."""
    made = []
    for argument in backend.arguments(r.kernel):
        name, annotation = argument.name, argument.annotation
        is_kept = backend.is_template(annotation)
        place = None if is_kept else _parameter(r, name, r.context.value_named(name), annotation)
        if place is None or isinstance(place, backend.Field):
            made.append(ir.Argument(name, annotation))
            continue
        if isinstance(place, backend.AnyArray):
            container = r.containers[id(place)]
            made.append(ir.Argument(name, array_annotation(container), container))
            continue
        for scope in r.context.local_scopes:
            if name in scope:
                scope[name] = place
        made.append(ir.Argument(name, annotation_text(annotation), group_of(_numbers_in(place))))
    r.arguments = tuple(made)


def _numbers_in(place: object) -> Any:
    """The value of an argument, without the arrays in a pack."""
    if not isinstance(place, Record):
        return value_of(place)
    members = {k: _numbers_in(m) for k, m in place.members.items() if isinstance(m, (Record, ir.Value, VectorPlace))}
    return Record(members, place.methods, place.kind)


def _parameter(r: Recording, name: str, bound: Any, kind: object) -> object:
    """An argument; members of a struct or pack are locals and arrays, named as they are read."""
    if backend.is_template(kind) or bound is None or isinstance(bound, backend.Field):
        return bound
    if isinstance(kind, backend.COMPOUND):
        members = {
            k: _parameter(r, f"{name}.{k}", backend.bound_member(r.context, name, bound, k), member)
            for k, member in kind.members.items()
        }
        return Record(members, getattr(kind, "methods", {}), kind)
    if isinstance(bound, backend.AnyArray):
        dtype, shape = backend.array_type(bound)
        r.containers[id(bound)] = ir.Container(name, type_of(dtype), len(bound.shape), shape, None, True)
        return bound
    if not isinstance(bound, backend.Expr):
        what = type(kind).__name__.removesuffix("Type")  # a Texture
        raise UnsupportedError(
            f"The argument {name!r} has the type {what}, which is not differentiated. Pass numbers, vectors, "
            "structs and argument packs of them, fields or arrays."
        )
    shape = backend.shape_of(bound)
    return place_of_local(ir.Local(name, type_of(backend.dtype_of(bound)), shape, "parameter"))


def annotation_text(annotation: object) -> object:
    """The text of an annotation; for a struct type, the object itself."""
    if isinstance(annotation, backend.MatrixType):
        return tensor_annotation(type_of(annotation.dtype).name, (annotation.n, annotation.m)[: annotation.ndim])
    if annotation in (int, float, bool):
        return annotation.__name__
    is_scalar = isinstance(annotation, backend.DataType)
    return f"ti.{type_of(annotation)}" if is_scalar else backend.native_annotation(annotation)


def tensor_annotation(dtype: str, shape: tuple[int, ...]) -> str:
    kind = "matrix" if len(shape) == 2 else "vector"
    return f"ti.types.{kind}({', '.join(map(str, shape))}, ti.{dtype})"


def array_annotation(array: ir.Container) -> str:
    dtype = f"ti.{array.dtype}"
    if array.element_shape:
        dtype = tensor_annotation(array.dtype.name, array.element_shape)
    return f"ti.types.ndarray(dtype={dtype}, ndim={array.ndim})"
