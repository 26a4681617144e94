"""Components of vector and matrix fields: ``V.get_scalar_field(0)`` is a view of a part of V."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from taichi_ext.backend.runtime import RUNTIME, Field, ti

_WHOLE = "_taichi_ext_whole"  # of a component: the field that was made of it, which it does not keep alive


def whole_field(field: object) -> Any:
    """The vector or matrix field that a scalar field is a component of; the field itself where it is none."""
    if not isinstance(field, ti.ScalarField):
        return field
    reference = field.vars[0].__dict__.get(_WHOLE)
    whole = None if reference is None else reference()
    return field if whole is None else whole


def field_identity(field: ti.Field) -> tuple[Any, ...]:
    """Equal for objects of the same field or component, such as those that ``get_scalar_field`` makes at each call."""
    if isinstance(field, ti.StructField):
        return tuple((name, field_identity(member)) for name, member in field.field_dict.items())
    sizes = (field.n, field.m, field.ndim) if isinstance(field, ti.MatrixField) else ()
    return (*sizes, *map(id, field.vars))


def component_index(whole: object, field: Field) -> tuple[int, ...]:
    """Which component of a vector or matrix field a scalar field is; empty where both are the same field."""
    if not isinstance(whole, ti.MatrixField) or isinstance(field, ti.MatrixField):
        return ()
    number = next(n for n, component in enumerate(whole.vars) if component is field.vars[0])
    return (number,) if whole.ndim == 1 else divmod(number, whole.m)


def _note(field: ti.MatrixField) -> None:
    reference = weakref.ref(field)
    for component in field.vars:
        known = component.__dict__.get(_WHOLE)
        if known is None or known() is None:
            component.__dict__[_WHOLE] = reference


_make = ti.MatrixField.__init__


def _make_and_note(self: ti.MatrixField, *args: Any, **kwargs: object) -> None:
    _make(self, *args, **kwargs)
    _note(self)


ti.MatrixField.__init__ = _make_and_note
if RUNTIME.program() is not None:  # there may be fields that were made before this module was imported
    for _made in gc.get_objects():
        if type(_made) is ti.MatrixField and "vars" in _made.__dict__:
            _note(_made)
