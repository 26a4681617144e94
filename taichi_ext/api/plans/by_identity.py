"""A table whose keys are objects: recognised by identity, referred to weakly."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, Generic, TypeVar

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
