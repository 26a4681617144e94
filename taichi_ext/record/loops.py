"""Loops of a recorded kernel: their domains and variables."""

from __future__ import annotations

from typing import Any

from taichi_ext import backend
from taichi_ext.errors import UnsupportedError, raise_baked
from taichi_ext.program import For, Jump, Known, Local, Tensor, Value
from taichi_ext.program.types import I32
from taichi_ext.record.handles import flattened, place_of_local, value_of
from taichi_ext.record.literals import as_value
from taichi_ext.record.operations import native
from taichi_ext.record.recording import Recording


def before_loop(r: Recording, kind: str, *domain: object) -> None:
    """The domain of a loop, and the one that Taichi walks instead."""
    given = tuple(value_of(d) for d in domain)
    if any(isinstance(x, Known) for x in flattened(given)):
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
        r.loop.domain = tuple(_native_bound(d) for d in given)
        shown = tuple(_bound(d) for d in given)
    r.loop.statement = For(kind, (), shown, (), r.loop.config, place=r.place())
    r.loop.config = {}


def _domain_object(r: Recording, obj: object) -> object:
    if isinstance(obj, backend.StructField):
        obj = backend.leaf_fields(obj)[0]
    if isinstance(obj, (backend.ScalarField, backend.MatrixField, backend.AnyArray)):
        return r.container(obj)
    if isinstance(obj, (Value, Tensor, list, tuple, dict)):
        raise UnsupportedError(
            f"A loop runs over a {type(obj).__name__}. Write `for x in ti.static(...)`, or loop over indices."
        )
    return obj


def _bound(x: object) -> object:
    """A bound as a value; a pair of bounds as a pair."""
    if isinstance(x, Tensor):
        return tuple(x.entries)
    return tuple(map(_bound, x)) if isinstance(x, (list, tuple)) else as_value(x)


def _native_bound(x: object) -> object:
    return [native(e) for e in x.entries] if isinstance(x, Tensor) else native(x)


def enter_for(r: Recording, *names: str) -> None:
    """Start the body of a loop: its variables become locals of the program."""
    variables = []
    for name in names:
        scope = next(s for s in reversed(r.context.local_scopes) if name in s)
        bound = scope[name]
        is_matrix = isinstance(bound, backend.Matrix)
        shape = tuple(bound.get_shape() or ()) if is_matrix else backend.shape_of(bound)
        local = Local(name, I32, shape, "loop")
        variables.append(local)
        scope[name] = place_of_local(local)
    loop = r.loop.statement
    r.open_for(For(loop.kind, tuple(variables), loop.domain, (), loop.config, place=loop.place))


def jump(r: Recording, kind: str) -> None:
    if not r.context.is_in_static_for():
        r.add(Jump(kind, place=r.place()))
