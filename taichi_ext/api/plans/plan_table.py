"""The prepared forms of ``jacobian``, found by owner and function, of which neither is kept alive.

A plan refers to neither of them, so weak references are enough: what was prepared goes when one of them goes, and
nothing is left on the user's objects.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from taichi_ext import backend
from taichi_ext.api.plans.by_identity import ByIdentity
from taichi_ext.api.plans.cache_keys import Origin
from taichi_ext.api.plans.plan import Plan

_MOST_PLANS = 32  # of one owner


class _Plans:
    """The plans of one owner, each with its function."""

    def __init__(self) -> None:
        self.items: dict[Any, tuple[weakref.ref[Any], Plan]] = {}


class PlanTable:
    """The plans of the Taichi program that runs; ``find`` and ``keep`` are called by one thread at a time."""

    def __init__(self) -> None:
        self._owners: ByIdentity[_Plans] = ByIdentity()
        self._program: Callable[[], Any] = lambda: None

    def find(self, origin: Origin, key: Any) -> Plan | None:
        """The form prepared for the same owner, function and key, or None."""
        program = backend.program()
        if program is None or self._program() is not program:
            self._owners = ByIdentity()
            return None
        plans = self._owners.get(origin.owner)
        if plans is None:
            return None
        function, plan = plans.items.get((id(origin.function), key), (None, None))
        return plan if function is not None and function() is origin.function else None

    def keep(self, origin: Origin, key: Any, plan: Plan) -> bool:
        """Keep a plan; False where the owner or the function cannot be referred to weakly, so that nothing is kept."""
        self._program = weakref.ref(backend.program())
        plans, place = self._owners.get(origin.owner) or _Plans(), (id(origin.function), key)
        try:
            function = weakref.ref(origin.function, partial(_forget, weakref.ref(plans), place))
            self._owners.set(origin.owner, plans)
        except TypeError:
            return False
        if len(plans.items) >= _MOST_PLANS:
            plans.items.pop(next(iter(list(plans.items))), None)
        plans.items[place] = function, plan
        return True


def _forget(reference: weakref.ref[_Plans], place: Any, function: weakref.ref[Any]) -> None:
    """Drop the plan of a function that is gone: called by Python in the middle of anything, so without a lock."""
    plans = reference()
    found = None if plans is None else plans.items.get(place)
    if plans is not None and found is not None and found[0] is function:
        plans.items.pop(place, None)
