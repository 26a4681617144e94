"""What ``jacobian`` has prepared before, found by owner and function, of which neither is kept alive.

A plan refers to neither of them, so weak references are enough: what was prepared goes when one of them goes, and
nothing is left on the user's objects.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from taichi_ext import backend
from taichi_ext.api.cache_keys import Origin
from taichi_ext.api.plan import Plan

_MOST_PLANS = 32  # of one owner


@dataclass
class _Entry:
    function: weakref.ref[Any]
    plan: Plan


@dataclass
class _Owned:
    owner: weakref.ref[Any]
    entries: dict[Any, _Entry] = field(default_factory=dict)


class PlanTable:
    """The plans of the Taichi program that runs; ``find`` and ``keep`` are called by one thread at a time.

    Objects are recognised by identity, whatever their ``__eq__`` says.  An object that is made at the address of one
    that is gone finds nothing: references of the one that is gone are empty.
    """

    def __init__(self) -> None:
        self._owned: dict[int, _Owned] = {}
        self._program: Callable[[], Any] = lambda: None

    def find(self, origin: Origin, key: Any) -> Plan | None:
        """What was prepared for the same owner, function and key; None where nothing was."""
        program = backend.program()
        if program is None or self._program() is not program:
            self._owned = {}
            return None
        owned = self._owned.get(id(origin.owner))
        if owned is None or owned.owner() is not origin.owner:
            return None
        entry = owned.entries.get((id(origin.function), key))
        return entry.plan if entry is not None and entry.function() is origin.function else None

    def keep(self, origin: Origin, key: Any, plan: Plan) -> None:
        """Keep a plan; nothing is kept for an owner or function that cannot be referred to weakly."""
        self._program = weakref.ref(backend.program())
        number, place = id(origin.owner), (id(origin.function), key)
        try:
            entry = _Entry(weakref.ref(origin.function, partial(self._forget_function, number, place)), plan)
            owned = self._owned.get(number)
            if owned is None or owned.owner() is not origin.owner:
                owned = _Owned(weakref.ref(origin.owner, partial(self._forget_owner, number)))
        except TypeError:
            return
        self._owned[number] = owned
        if len(owned.entries) >= _MOST_PLANS:
            owned.entries.pop(next(iter(list(owned.entries))), None)
        owned.entries[place] = entry

    # Python calls these when an object goes, perhaps in the middle of anything: they take no lock and do not iterate.

    def _forget_owner(self, number: int, reference: weakref.ref[Any]) -> None:
        owned = self._owned.get(number)
        if owned is not None and owned.owner is reference:
            self._owned.pop(number, None)

    def _forget_function(self, number: int, place: Any, reference: weakref.ref[Any]) -> None:
        owned = self._owned.get(number)
        entry = None if owned is None else owned.entries.get(place)
        if owned is not None and entry is not None and entry.function is reference:
            owned.entries.pop(place, None)
