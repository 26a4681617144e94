"""What kernels say while they run: a field of the package in which each alert has an entry, of each Taichi program."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from taichi_ext.backend.field_memory import memory_of_field
from taichi_ext.backend.runtime import RUNTIME, ti
from taichi_ext.backend.threads import materialize

_MOST = 1024  # alerts; those after it share the last entry


class Alert(NamedTuple):
    """What a kernel says.

    Attributes:
        what: the message.
        place: where it stands in the source.
        field: a function that gives the field that is stored to there, as long as it exists, None for an array; None
            where nothing is stored.
        is_undefined: whether there is no derivative.
    """

    what: str
    place: Any
    field: Callable[[], object] | None
    is_undefined: bool


class _Alerts(NamedTuple):
    """Those of one program."""

    program: Callable[[], object]  # a weak reference
    field: Any
    numbers: dict[tuple[object, ...], int]
    given: list[Alert]


_alerts = _Alerts(lambda: None, None, {}, [])


def alert_field() -> Any:
    """The field; a kernel that stores 1 to an entry raises the alert."""
    global _alerts
    program = RUNTIME.program()
    if _alerts.program() is not program:
        materialize()
        made = ti.field(ti.i32)
        builder = ti.FieldsBuilder()
        builder.dense(ti.i, _MOST).place(made)
        builder.finalize()
        _alerts = _Alerts(weakref.ref(program), made, {}, [])
    return _alerts.field


def alert_number(what: str, place: Any, stored: object, *, is_undefined: bool) -> int:
    """The entry of an alert in ``alert_field()``; ``stored`` is the field stored to, True for an array, or None."""
    name = what, place and (place.file, place.line), id(stored)
    known = _alerts.numbers.setdefault(name, min(len(_alerts.given), _MOST - 1))
    if known == len(_alerts.given):
        field_of = None if stored is None else (lambda: None) if stored is True else weakref.ref(stored)
        _alerts.given.append(Alert(what, place, field_of, is_undefined))
    return known


def raised_alerts() -> list[Alert]:
    """The alerts since the last time."""
    program, held, _, given = _alerts
    if not given or program() is not RUNTIME.program():
        return []
    memory = memory_of_field(held)
    RUNTIME.state().sync()
    raised = held.to_numpy() if memory is None else memory
    found = [alert for n, alert in enumerate(given) if raised[n]]
    if found:
        (held if memory is None else memory).fill(0)
    return found
