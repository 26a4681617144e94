"""Calls that stay calls in a recorded kernel: atomics, lists of dynamic nodes, print, Taichi's own functions."""

from __future__ import annotations

import contextlib
import string
from collections.abc import Hashable, Sequence
from typing import Any

from taichi_ext import backend
from taichi_ext.backend import ti
from taichi_ext.errors import UnsupportedError
from taichi_ext.program import Atomic, Call, Container, Declare, Effect, Load, Local, Op, Read, Tensor, Value
from taichi_ext.program.values import I32, Format
from taichi_ext.record.assignments import cells_of, parts_for
from taichi_ext.record.handles import DynamicList, VectorPlace, group_of, has_values, place_of_local, value_of
from taichi_ext.record.literals import as_value, type_of
from taichi_ext.record.operations import native
from taichi_ext.record.recording import Recording

# Functions of Taichi's library that are recorded as calls: without side effects, on small matrices; names of results.
KEPT_CALLS: dict[Any, str] = {f: f"{f.__name__}_{{}}" for f in (ti.svd, ti.sym_eig, ti.polar_decompose, ti.solve)}
KEPT_CALLS[backend.matrix_ops.inverse] = "inverse"
# Callables that add statements without tangents, and are called on values without tangents, as Taichi calls them: they
# neither read nor write entries of fields. Those in no table may only give expressions.
WITHOUT_TANGENTS: frozenset[Any] = frozenset(
    (
        *(ti.random, ti.randn),  # marked in Facts.has_random
        *(ti.activate, ti.is_active, ti.length, ti.rescale_index, ti.get_addr),  # of the layout
        *(ti.block_local, ti.cache_read_only, ti.mesh_local, ti.no_activate, ti.assume_in_range, backend.loop_unique),
        ti.mesh_patch_idx,
        *(ti.atomic_and, ti.atomic_or, ti.atomic_xor),  # of integers only
        *(ti.static_print, ti.static_assert),
        *(getattr(ti.Matrix, name) for name in ("zero", "one", "unit", "identity")),
        *backend.thread_functions(ti.simt.block, ti.simt.grid, ti.simt.warp, ti.simt.subgroup),
    )
)


# --- atomics


def writable(target: object, name: str) -> Read | Load | VectorPlace:
    """The target of an atomic operation; raises as Taichi does where it is none."""
    if not isinstance(target, (Read, Load, VectorPlace)):
        raise backend.SyntaxFault(f"cannot use a non-writable target as the first operand of {name!r}")
    return target


def atomic(r: Recording, name: str, target: object, value: object, *, is_statement: bool) -> Tensor | Value | None:
    """``ti.atomic_add(target, value)`` and similar functions, entry by entry; returns the old value."""
    target = writable(target, name)
    results: list[Value] = []
    for cell, part in zip(cells_of(target), parts_for(target, value), strict=True):
        result = None if is_statement else Local("old", cell.dtype, (), "temporary")
        r.add(Atomic(name, cell, part, result, place=r.place()))
        if result is not None:
            results.append(Read(result))
    if is_statement:
        return None
    if isinstance(target, VectorPlace) and target.shape:
        return Tensor(tuple(results), target.shape)
    return results[0]


# --- dynamic nodes


def list_method(r: Recording, cell: DynamicList, name: str, args: Sequence[object]) -> Read | None:
    """``field[i].append(value)``, ``field[i].length()`` and ``field[i].deactivate()``."""
    if name not in ("append", "length", "deactivate"):
        raise AttributeError(f"a list of a dynamic node has no method {name!r}")
    result = {"append": Local("place", I32, (), "temporary"), "length": Local("length", I32, (), "temporary")}.get(name)
    whole = cell.field if isinstance(cell.field, backend.StructField) else cell.container
    given = (whole, cell.indices, *(group_of(value_of(a)) for a in args))
    given = tuple(as_value(a) if isinstance(a, (int, float)) else a for a in given)
    writes = () if name == "length" else tuple(map(r.container, backend.leaf_fields(cell.field)))
    r.add(Effect(f".{name}", given, () if result is None else (result,), writes=writes, place=r.place()))
    return None if result is None else Read(result)


# --- texts


def format_text(r: Recording, template: str, /, *args: object, **keywords: object) -> str | Format:
    """``template.format(...)`` with all its fields in the order of the text."""
    text, values, count = "", [], 0
    for literal, name, spec, _ in string.Formatter().parse(template):
        text += literal.replace("{", "{{").replace("}", "}}")
        if name is None:
            continue
        key: Any = count if name == "" else int(name) if name.isdigit() else name
        count += name == ""
        values.append(value_of(args[key] if isinstance(key, int) else keywords[key]))
        text += "{:" + spec + "}" if spec else "{}"
    if not has_values(values):
        return text.format(*values)
    return Format(text, tuple(map(group_of, values)))


def percent(r: Recording, text: str, values: object) -> str | Format:
    """``text % values``; Taichi takes it with values of the kernel as the message of an assertion."""
    values = value_of(values)
    if not has_values(values):
        return text % values
    return Format(text, tuple(map(group_of, values if isinstance(values, tuple) else (values,))), is_percent=True)


def assert_(r: Recording, condition: object, message: object) -> None:
    condition = value_of(condition)
    if has_values(condition) or not condition:  # others are known to hold when the kernel is compiled
        r.add(Effect("assert", (as_value(condition), message), place=r.place()))


def print_(r: Recording, /, *args: object, **keywords: object) -> None:
    r.add(Effect("print", tuple(group_of(value_of(a)) for a in args), (), keywords, place=r.place()))


# --- functions of Taichi's own


def kept_call(r: Recording, *args: object, function: Any) -> object:
    """``ti.svd`` and the like, kept as a call; its type is that of a call on expressions of the same types."""
    given = value_of(args)
    result = backend.native_call(r.context, function, [native(a) for a in given], {})
    locals_, places = _results(KEPT_CALLS[function], result)
    types = tuple(type_of(a) if isinstance(a, backend.DataType) else group_of(a) for a in given)
    r.add(Call(function.__name__, types, locals_, place=r.place()))
    return places


def _results(name: str, result: object) -> tuple[tuple[Local, ...], Any]:
    """Locals for the results of a call, of the types of ``result``, and their places in its structure."""
    made = result if isinstance(result, tuple) else (result,)
    locals_ = tuple(_result_local(name.format(n), kind) for n, kind in enumerate(made))
    places = tuple(map(place_of_local, locals_))
    return locals_, places if isinstance(result, tuple) else places[0]


def _result_local(name: str, kind: object) -> Local:
    kind = backend.Expr(kind) if isinstance(kind, backend.Matrix) else kind
    if not isinstance(kind, backend.Expr):
        raise UnsupportedError(f"{name.strip('_0')} gives a {type(kind).__name__}, which a kernel cannot hold.")
    return Local(name, type_of(backend.dtype_of(kind)), backend.shape_of(kind), "temporary")


def stop_grad(r: Recording, field: object) -> None:
    """``ti.stop_grad(field)``: values read from the field in the rest of this block count as constants."""
    r.add(Effect("stop_grad", (r.container(field),), place=r.place()))


def opaque(r: Recording, function: Any, args: Sequence[Any], keywords: dict[str, object], is_statement: bool) -> object:
    """A function of Taichi that stays a call; the type of its result is found by a call on dummies."""
    if function is ti.global_thread_idx:
        raise UnsupportedError("The number of the thread differs from run to run; use a variable of the loop.")
    values, named = value_of(args), value_of(keywords)
    is_writing = function in (ti.append, ti.deactivate)
    is_known = is_writing or (isinstance(function, Hashable) and function in WITHOUT_TANGENTS)
    try:
        with contextlib.nullcontext() if is_known else backend.sealed():
            native_values = [native(a) for a in values]
            result = backend.native_call(r.context, function, native_values, {k: native(v) for k, v in named.items()})
    except backend.SealedError:
        raise UnsupportedError(
            f"{function.__name__!r} adds statements to the kernel, and their derivatives are not known. Write them as "
            "a @ti.func."
        ) from None
    result = () if result is None or (is_statement and not isinstance(result, tuple)) else result
    made = result if isinstance(result, tuple) else (result,)
    if made and not any(isinstance(k, (backend.Expr, backend.Matrix)) for k in made):
        return result  # known when the kernel is compiled
    locals_, places = _results(getattr(function, "__name__", "result"), result)
    given = tuple(_argument(r, a) for a in values)
    keywords = {k: _argument(r, v) for k, v in named.items()}
    writes = _written_in(r, args[0]) if is_writing else ()
    r.add(Effect(function, given, locals_, keywords, writes, place=r.place()))
    return places or None


def _written_in(r: Recording, place: backend.SNode | backend.Field) -> tuple[Container, ...]:
    """The fields met so far that are placed in a node."""
    node = backend.layout_node(place)
    return tuple(c for c in r.containers.values() if c.object is not None and backend.is_under(c.object, node))


def _argument(r: Recording, x: object) -> object:
    """An argument of a call that stays: a container for a field, else a group or Python value."""
    if isinstance(x, (backend.ScalarField, backend.MatrixField, backend.AnyArray)):
        return r.container(x)
    if isinstance(x, backend.DataType):
        return type_of(x)
    return group_of(x)


def random(r: Recording, dtype: object = float) -> Read:
    """``ti.random()``: drawn here, as by Taichi, even in a side of a choice that is not taken."""
    kind = type_of(dtype)
    local = Local("random", kind, (), "temporary")
    r.add(Declare(local, (Op("random", (), kind, place=r.place()),), place=r.place()))
    return Read(local)
