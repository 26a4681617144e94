"""User rules in Taichi's own reverse mode: gradients stopped and replaced while Taichi compiles ``kernel.grad``."""

# Taichi's own classes are changed while it compiles.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import operator
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import taichi as ti
from taichi import Struct
from taichi.lang import impl, kernel_impl
from taichi.lang._ndrange import _Ndrange
from taichi.lang.ast.ast_transformer import ASTTransformer, build_stmt
from taichi.lang.enums import AutodiffMode
from taichi.lang.expr import Expr
from taichi.lang.kernel_impl import Func

from taichi_ext.backend.expressions import dtype_of, is_integer
from taichi_ext.backend.kernels import is_library, source_of
from taichi_ext.errors import UnsupportedError


def _gradient_mode() -> Any:
    kernel = impl.get_runtime().current_kernel
    return AutodiffMode.NONE if kernel is None else kernel.autodiff_mode


def is_gradient_kernel() -> bool:
    """Whether a kernel is being compiled for Taichi's reverse mode; raises where it is for its forward mode."""
    mode = _gradient_mode()
    if mode == AutodiffMode.FORWARD:
        raise ti.TaichiCompilationError(
            "A custom gradient is used in a kernel that is compiled for ti.ad.FwdMode, which cannot take it; use "
            "taichi_ext.jacobian, or kernel.grad() and ti.ad.Tape."
        )
    return mode == AutodiffMode.REVERSE


def stop_gradient(x: Any) -> Any:
    """X without its derivative in reverse mode: Taichi does not differentiate floor.

    Exact for 2**-41 <= abs(x) < 2**63 in float32 (2**-12 in float64), with an absolute error of at most 2**-64 below.
    """
    if isinstance(x, (int, float)) or (isinstance(x, Expr) and is_integer(dtype_of(x))):
        return x
    if isinstance(x, (list, tuple)):
        return type(x)(stop_gradient(e) for e in x)
    if isinstance(x, Struct):
        return _by_member(stop_gradient, x)
    return impl.expr_init(ti.floor(x * 2.0**64) * 2.0**-64)


def _by_member(function: Callable[..., Any], *values: Any) -> Any:
    """A function of numbers, vectors and matrices, applied to the members of structs."""
    if not isinstance(values[0], Struct):
        return function(*values)
    members = {name: _by_member(function, *(v[name] for v in values)) for name in values[0].keys}
    return Struct({**members, "__struct_methods": values[0].methods})


def _difference(a: Any, b: Any) -> Any:
    return _by_member(lambda x, y: x - y, a, b)


def _sum(value: Any, *tangents: Any) -> Any:
    """A value with tangents; integers have none."""

    def add(x: Any, *rest: Any) -> Any:
        is_whole = isinstance(x, Expr) and is_integer(dtype_of(x))
        return x if is_whole else functools.reduce(operator.add, rest, x)

    return _by_member(add, value, *tangents)


def forget_reverse_kernels() -> None:
    """Compile kernels for reverse mode again when they are next used."""
    for kernel in impl.get_runtime().kernels:
        if kernel.compiled_kernels and kernel.autodiff_mode == AutodiffMode.REVERSE:
            kernel.compiled_kernels.clear()


_rules_being_traced: list[Any] = []  # targets of the rules whose own code Taichi is tracing


def replace_function(
    func: Func, has_rule: Callable[[], bool], stand_in: Callable[[Callable[..., Any], list[Any]], Any]
) -> None:
    """Let ``stand_in(original, args)`` be called in kernels that are compiled for a gradient."""

    def call(*args: Any, **kwargs: Any) -> Any:
        def original(*values: Any) -> Any:
            return Func.__call__(func, *values)

        is_in_rule = func in _rules_being_traced  # a rule that calls its own function gets the primal
        if impl.inside_kernel() and has_rule() and not is_in_rule and is_gradient_kernel():
            return stand_in(original, list(kernel_impl._process_args(func, args, kwargs)))
        return Func.__call__(func, *args, **kwargs)

    func.__call__ = call  # type: ignore[method-assign]  # the decorated function looks it up on the instance


def restore_function(func: Func) -> None:
    func.__dict__.pop("__call__", None)


def call_with_rule(rule: Any, original: Callable[..., Any], names: list[str], args: list[Any]) -> Any:
    """f(x) with a rule t in reverse mode: ``s(f(s(x))) + t(s(x), x - s(x))``, s being stop_gradient."""
    is_value = [isinstance(a, (int, float, Expr, Struct)) for a in args]
    kept = [impl.expr_init(a) if isinstance(a, (Expr, Struct)) else a for a in args]
    stopped = {n: stop_gradient(a) if v else a for n, a, v in zip(names, kept, is_value, strict=True)}
    takes_all = "auto" in rule.parameters
    passed = [stopped[n] if n in rule.taken and not takes_all else a for n, a in zip(names, kept, strict=True)]
    result = original(*passed)
    values = dict(zip(names, kept, strict=True))
    return _with_tangent(rule, result, stopped, values)


def mark_with_rule(rule: Any, value: Any, along: dict[str, Any]) -> Any:
    stopped = {name: stop_gradient(v) for name, v in along.items()}
    return _with_tangent(rule, value, stopped, along)


_MOST_UNROLLED = 1024


@contextlib.contextmanager
def _without_loops_and_stores(rule: Any) -> Iterator[None]:
    """Unroll the loops that Taichi traces in the meantime; raise where that cannot be done, and where it stores.

    Taichi 1.7.4 counts only the last iteration of what a loop does to a value from before it, and reads wild memory
    where the end of a loop in a loop is not a constant.
    """
    build_for, build_while, call_function = ASTTransformer.build_For, ASTTransformer.build_While, Func.__call__
    count = 0

    def call(function: Func, *args: Any, **kwargs: Any) -> Any:
        if not is_library(function.func) and _stores(function):
            raise UnsupportedError(
                "A rule must not write to fields or arrays; it returns a tangent. "
                f"{function.func.__qualname__!r} does, or to an argument that it takes by reference."
            )
        return call_function(function, *args, **kwargs)

    def unroll(ctx: Any, node: ast.For) -> Any:
        nonlocal count
        decorator = ASTTransformer.get_decorator(ctx, node.iter)
        if decorator == "static":
            return build_for(ctx, node)
        if any(isinstance(inner, (ast.Break, ast.Continue)) for inner in ast.walk(node)):
            raise _unsuitable(rule, "a loop with break or continue")
        iterations = _iterations(ctx, node.iter, decorator)
        if iterations is None:
            raise _unsuitable(rule, "a loop whose bounds are not constants")
        count += len(iterations)
        if count > _MOST_UNROLLED:
            raise _unsuitable(rule, f"more than {_MOST_UNROLLED} iterations of loops")
        values = ast.copy_location(ast.Constant(value=iterations), node.iter)  # pyright: ignore[reportArgumentType]  # as Taichi does
        unrolled = ast.copy_location(ast.For(target=node.target, iter=values, body=node.body, orelse=[]), node)
        runtime = impl.get_runtime()
        limit, runtime.unrolling_limit = runtime.unrolling_limit, 0  # up to which Taichi does not warn
        try:
            with ctx.loop_scope_guard(is_static=True):
                return ASTTransformer.build_static_for(ctx, unrolled, False)
        finally:
            runtime.unrolling_limit = limit

    def refuse(ctx: Any, node: ast.While) -> Any:
        raise _unsuitable(rule, "a while loop")

    ASTTransformer.build_For, ASTTransformer.build_While = staticmethod(unroll), staticmethod(refuse)
    Func.__call__ = call
    try:
        yield
    finally:
        ASTTransformer.build_For, ASTTransformer.build_While = staticmethod(build_for), staticmethod(build_while)
        Func.__call__ = call_function


def _iterations(ctx: Any, iterable: Any, decorator: str) -> list[Any] | None:
    """What a loop over ``range``, ``ti.ndrange`` or ``ti.grouped(ti.ndrange)`` runs over, where that are constants."""
    if decorator in ("ndrange", "grouped"):
        domain = build_stmt(ctx, iterable if decorator == "ndrange" else iterable.args[0])
        is_constant = isinstance(domain, _Ndrange) and all(map(_is_constant, itertools.chain(*domain.bounds)))
        return list(domain if decorator == "ndrange" else ti.grouped(domain)) if is_constant else None
    if not (isinstance(iterable, ast.Call) and isinstance(iterable.func, ast.Name) and iterable.func.id == "range"):
        return None
    bounds = [build_stmt(ctx, bound) for bound in iterable.args]
    return list(range(*bounds)) if all(map(_is_constant, bounds)) else None


def _is_constant(x: Any) -> bool:
    return isinstance(x, (int, np.integer))


def _unsuitable(rule: Any, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"The rule {rule.name!r} has {what}: in Taichi's reverse mode its loops are unrolled. Write a for loop with "
        "constant bounds and conditions, or use taichi_ext.jacobian."
    )


def _stores(function: Func) -> bool:
    """Whether a function stores to something that is not its own; what it takes by value is."""
    nodes = list(ast.walk(ast.parse(textwrap.dedent("\n".join(source_of(function.func)[1])))))
    own = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    own |= {a.name for a in function.arguments if not isinstance(a.annotation, ti.template)}
    targets = [n for n in nodes if isinstance(n, (ast.Subscript, ast.Attribute)) and isinstance(n.ctx, ast.Store)]
    calls = [n for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, (ast.Name, ast.Attribute)) and n.args]
    names = [(getattr(n.func, "attr", "") or getattr(n.func, "id", ""), n.args[0]) for n in calls]
    targets += [first for name, first in names if name.startswith("atomic_")]
    for target in targets:
        while isinstance(target, (ast.Subscript, ast.Attribute)):
            target = target.value
        if not (isinstance(target, ast.Name) and target.id in own):
            return True
    return False


def _with_tangent(rule: Any, result: Any, stopped: dict[str, Any], values: dict[str, Any]) -> Any:
    parts = list(result) if isinstance(result, (tuple, list)) else [result]
    parts = [impl.expr_init(p) for p in parts]
    outs = [stop_gradient(p) for p in parts]
    automatic = [_difference(p, o) for p, o in zip(parts, outs, strict=True)]
    is_tuple = isinstance(result, (tuple, list))
    bound = []
    for name in rule.parameters:
        if name == "out":
            bound.append(tuple(outs) if is_tuple else outs[0])
        elif name == "auto":
            bound.append(tuple(automatic) if is_tuple else automatic[0])
        elif name in stopped:
            bound.append(stopped[name])
        else:
            bound.append(_difference(values[name[2:]], stopped[name[2:]]))
    _rules_being_traced.append(rule.target)
    try:
        with _without_loops_and_stores(rule):
            tangent = Func(rule.function)(*bound)
    finally:
        _rules_being_traced.pop()
    tangents = list(tangent) if isinstance(tangent, (tuple, list)) else [tangent]
    if "auto" in rule.parameters:
        finished = [_sum(o, t) for o, t in zip(outs, tangents, strict=True)]
    else:
        finished = [_sum(o, a, t) for o, a, t in zip(outs, automatic, tangents, strict=True)]
    return tuple(finished) if is_tuple else finished[0]
