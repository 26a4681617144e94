"""The prepared forms of ``jacobian``, found by owner and function, without keeping either alive.

A plan refers to neither of them, so weak references are enough: a prepared form is dropped when one of them is
collected, and nothing is left on the user's objects.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable

from taichi_ext import backend
from taichi_ext.api.plans.cache_keys import Origin
from taichi_ext.api.plans.plan import Plan
from taichi_ext.api.plans.preparations import ByIdentity

_MOST_PLANS = 32  # of one function of one owner


class PlanTable:
    """The plans of the Taichi program that runs; ``find`` and ``keep`` are called by one thread at a time."""

    def __init__(self) -> None:
        self._owners: ByIdentity[ByIdentity[dict[object, Plan]]] = ByIdentity()  # by owner, function and key
        self._program: Callable[[], object] = lambda: None

    def find(self, origin: Origin, key: Hashable) -> Plan | None:
        """The form prepared for the same owner, function and key, or None."""
        program = backend.program()
        if program is None or self._program() is not program:
            self._owners = ByIdentity()
            return None
        functions = self._owners.get(origin.owner)
        plans = None if functions is None else functions.get(origin.function)
        return None if plans is None else plans.get(key)

    def keep(self, origin: Origin, key: Hashable, plan: Plan) -> bool:
        """Keep a plan; False where the owner or the function cannot be referred to weakly, so that nothing is kept."""
        self._program = weakref.ref(backend.program())
        functions = self._owners.get(origin.owner) or ByIdentity()
        plans = functions.get(origin.function) or {}
        try:
            functions.set(origin.function, plans)
            self._owners.set(origin.owner, functions)
        except TypeError:
            return False
        if len(plans) >= _MOST_PLANS:
            del plans[next(iter(plans))]
        plans[key] = plan
        return True
