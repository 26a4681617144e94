"""A table by identity, and a warning if code is prepared repeatedly because its function is new at each call."""

from __future__ import annotations

import os
import types
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from taichi_ext.api.plans.cache_keys import Origin
from taichi_ext.api.plans.plan import Plan
from taichi_ext.errors import INNER
from taichi_ext.record.variables import plain_function
from taichi_ext.runtime.python.warning import warn_at_user

Value = TypeVar("Value")


class ByIdentity(Generic[Value]):
    """Values by object, each kept as long as its object exists.

    Unlike ``weakref.WeakKeyDictionary``, it takes objects without a hash, and never takes an object for another one
    that it equals.  A new object at the address of one that is gone finds nothing.
    """

    def __init__(self) -> None:
        self._items: dict[int, tuple[weakref.ref[object], Value]] = {}

    def get(self, obj: object) -> Value | None:
        """The value of an object; None where it has none."""
        item = self._items.get(id(obj))
        return None if item is None or item[0]() is not obj else item[1]

    def set(self, obj: Any, value: Value) -> None:
        """Give an object a value; raises TypeError for one that cannot be referred to weakly."""
        self._items[id(obj)] = weakref.ref(obj, partial(_forget, weakref.ref(self), id(obj))), value

    def forget(self, number: int, reference: weakref.ref[object]) -> None:
        """Drop the value of an object that is gone: called by Python in the middle of anything, so without a lock."""
        item = self._items.get(number)
        if item is not None and item[0] is reference:
            self._items.pop(number, None)


def _forget(table: weakref.ref[ByIdentity[Any]], number: int, reference: weakref.ref[object]) -> None:
    """The table is referred to weakly, so that its values go at once when it goes."""
    found = table()
    if found is not None:
        found.forget(number, reference)


EVERY = 8  # preparations of the same code, for the same params and outputs, per warning
_MOST_KEYS = 32  # of one piece of code


@dataclass
class _Count:
    fields: list[weakref.ref[Any]]  # fields and arrays that are named
    count: int = 0

    def is_of(self, fields: Sequence[object]) -> bool:
        return all(reference() is field for reference, field in zip(self.fields, fields, strict=True))


class Preparations:
    """Count how often each piece of code was prepared for the same params and outputs."""

    def __init__(self) -> None:
        self._counts: ByIdentity[dict[object, _Count]] = ByIdentity()

    def note(self, kernel: object, origin: Origin, key: Any, plan: Plan, *, is_kept: bool) -> None:
        """Count a preparation, and warn where there have been many.

        Args:
            kernel: the kernel or pipeline.
            origin: its owner and function.
            key: equal for the same params, outputs and options.
            plan: the prepared form.
            is_kept: whether the plan was kept for the next call with the same owner and function.
        """
        function = plain_function(kernel)
        if function is None or str(function.__module__).split(".")[0] in INNER:
            return  # a pipeline of this package's own, as torch_function has: the user cannot make it once
        count = self._count(function.__code__, key, plan)
        if count % EVERY == 0:
            warn_at_user(_message(function, origin, count, is_kept=is_kept))

    def _count(self, code: types.CodeType, key: object, plan: Plan) -> int:
        counts = self._counts.get(code)
        if counts is None:
            counts = {}
            self._counts.set(code, counts)
        targets = (*plan.prepared.params, *plan.prepared.outputs)
        fields = [target.field for target in targets if target.field is not None]
        known = counts.pop(key, None)
        if known is None or not known.is_of(fields):
            known = _Count(list(map(weakref.ref, fields)))
        while len(counts) >= _MOST_KEYS:
            del counts[next(iter(counts))]
        counts[key] = known
        known.count += 1
        return known.count


def _message(function: types.FunctionType, origin: Origin, count: int, *, is_kept: bool) -> str:
    code = function.__code__
    name = function.__qualname__.split("<locals>.")[-1]
    reason = "A prepared form is kept as long as its function, or the object of a method, exists: 32 forms of each."
    if not is_kept:
        kind = type(origin.owner).__name__
        reason = f"Nothing is kept for an object of type {kind}, which takes no weak references (see __slots__)."
    return (
        f"{name} ({os.path.basename(code.co_filename)}, line {code.co_firstlineno}) was prepared {count} times for the "
        f"same params and outputs: each time its kernels are compiled, and Taichi keeps them. {reason} Make a "
        "Jacobian(kernel, params, outputs) once and call that, or give the same function at each call: define it once, "
        "outside of the loop, and pass what changes in args=."
    )
