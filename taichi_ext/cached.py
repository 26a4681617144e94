"""What is computed once and kept: properties, values of objects, and a bounded number of others."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

Value = TypeVar("Value")
Key = TypeVar("Key")


def kept_weakly(function: Callable[[Key], Value]) -> Callable[[Key], Value]:
    """A function whose results are kept for as long as its argument lives."""
    known: weakref.WeakKeyDictionary[Key, Value] = weakref.WeakKeyDictionary()
    missing: Any = object()

    @functools.wraps(function)
    def call(key: Key) -> Value:
        result: Any = known.get(key, missing)
        if result is missing:
            result = known[key] = function(key)
        return result

    return call


class Bounded(dict[Key, Value]):
    """A table of at most ``most`` items: the oldest one goes where there are more."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: Key, value: Value) -> None:
        if key not in self and len(self) >= self._most:
            oldest, *_ = list(self)  # at once: another thread may change it
            self.pop(oldest, None)
        super().__setitem__(key, value)


class ByIdentity(Generic[Value]):
    """Values by object, each kept as long as its object exists.

    Unlike ``weakref.WeakKeyDictionary``, it takes objects without a hash, and never takes an object for another one
    that it equals.  A new object at the address of one that is gone has no value.
    """

    def __init__(self) -> None:
        self._items: dict[int, tuple[weakref.ref[object], Value]] = {}

    def get(self, obj: object) -> Value | None:
        """The value of an object; None where it has none."""
        item = self._items.get(id(obj))
        return None if item is None or item[0]() is not obj else item[1]

    def get_or_make(self, obj: Any, make: Callable[[], Value]) -> Value:
        """The value of an object, or a new one; raises TypeError for an object that cannot be referred to weakly."""
        value = self.get(obj)
        if value is not None:
            return value
        table, number = weakref.ref(self), id(obj)  # weakly, so that the values go at once when the table goes

        def forget(reference: object) -> None:  # called by Python in the middle of anything, so without a lock
            there = table()
            if there is not None and there._items.get(number, (None,))[0] is reference:
                there._items.pop(number, None)

        value = make()
        self._items[number] = weakref.ref(obj, forget), value
        return value


class cached_property(functools.cached_property[Value]):  # as the one of Python
    """The one of Python without its lock, which all objects of a class share on Python 3.10 and 3.11.

    One thread may wait in such a property for ``backend.exclusive``, which another thread holds that waits for the
    property.  Threads may compute a value at the same time; all of them get the one that is kept.
    """

    @overload
    def __get__(self, instance: None, owner: type[Any] | None = None) -> cached_property[Value]: ...

    @overload
    def __get__(self, instance: object, owner: type[Any] | None = None) -> Value: ...

    def __get__(self, instance: object, owner: type[Any] | None = None) -> cached_property[Value] | Value:
        if instance is None:
            return self
        return vars(instance).setdefault(str(self.attrname), self.func(instance))
