"""Properties, and functions of objects, that are computed once."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, overload

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
