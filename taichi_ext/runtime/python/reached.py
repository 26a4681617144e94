"""What a Python function can access, found without running it: its arrays, and the state of Python, to be put back."""

from __future__ import annotations

import argparse
import collections
import gc
import inspect
import random
import sys
import types
from array import array
from collections.abc import Callable, Iterable, Iterator, Set
from functools import cached_property, lru_cache, partial
from itertools import filterfalse
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.labels import is_library_module, names_in_code, outside_names
from taichi_ext.runtime.python.dual_numbers import is_dual, plain_number

_DEEPEST = 8  # containers in containers
_SIMPLE = (int, float, str, bytes)
_OPEN = (types.FunctionType, types.MethodType)
_LIBRARIES = (backend.RUNTIME.name, "taichi_ext", "numpy", "torch", "scipy")


def reachable_arrays(function: object, args: object) -> Iterator[object]:
    """NumPy arrays and tensors among the arguments, in closures, globals and attributes that the function names.

    Those in lists, tuples, dicts and objects with attributes are found too, and those of functions that it calls.
    """
    arrays = filter(backend.is_array, _reached((args, function), set(), _items))
    return (a for a in arrays if not isinstance(a, backend.Ndarray) and not getattr(a.dtype, "hasobject", False))


def flags_of(function: Any) -> tuple[object, ...]:
    """Truth values, words and None that a function names in its closure, its module and attributes of objects there."""
    code = getattr(function, "__code__", None)
    if code is None:
        return ()
    named = [value for _, value in outside_names(getattr(function, "__func__", function))]
    owners = [getattr(function, "__self__", None), *named]
    spaces = [space for space in (getattr(owner, "__dict__", None) for owner in owners) if isinstance(space, dict)]
    names = sorted(names_in_code(code)) if spaces else []
    attributes = [space[name] for space in spaces for name in names if name in space]
    return tuple(value for value in (*named, *attributes) if isinstance(value, (bool, str, type(None))))


def reachable(function: object, args: object) -> Set[int]:
    """The identities of the objects among which ``reachable_arrays`` looks for arrays."""
    seen: set[int] = set()
    collections.deque(_reached((args, function), seen, _items), maxlen=0)
    return seen


def forget_tangents(result: Any, function: object, args: object) -> Any:
    """Put floats in place of numbers with tangents that a run has left in objects that the function can access.

    Returns the result of the function, also without tangents.
    """
    reached = _reached((result, function, args), set(), partial(_items, is_all=False))
    for value in filterfalse(backend.is_array, reached):
        holder = value if isinstance(value, (list, dict)) else getattr(value, "__dict__", None)
        if isinstance(holder, (list, dict)) and not isinstance(value, _OPEN):
            for key, inner in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
                if is_dual(inner) or (isinstance(inner, tuple) and _plain(inner) is not inner):
                    holder[key] = _plain(inner)
    return _plain(result)


def _plain(value: Any) -> Any:
    """A number, or a tuple of some, without tangents."""
    if type(value) is tuple and any(map(is_dual, value)):
        return tuple(map(plain_number, value))
    return plain_number(value)


def _reached(values: Iterable[Any], seen: set[int], items: Callable[[Any], Iterable[Any]]) -> Iterator[Any]:
    """The values and what they lead to by ``items``: arrays, and other objects, which are ``seen`` once."""
    todo = collections.deque((value, 0) for value in values)
    while todo:
        value, depth = todo.popleft()
        if id(value) in seen or isinstance(value, _SIMPLE):
            continue
        yield value
        if not backend.is_array(value):
            seen.add(id(value))
            if depth < _DEEPEST:
                todo.extend((item, depth + 1) for item in items(value))


def _items(value: Any, is_all: bool = True) -> Iterable[object]:
    """The objects within an object that may be arrays, or hold some.

    ``is_all``: also those in slots and in objects of C, and what functions name in modules and classes.  Caches of
    ``functools`` are such objects: the numbers in them keep their tangents, for a warning in the next run.
    """
    if isinstance(value, (type, types.ModuleType)):
        return ()
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, dict):
        return list(value.values())
    method = backend.bound(value)
    if method is not None:
        return method
    module = backend.module_of(value if callable(value) else type(value))
    if module.split(".")[0] in _LIBRARIES:
        return ()
    if inspect.isfunction(value) or backend.is_decorated(value):
        if backend.primal_kernel(value) is not None or backend.taichi_func(value) is not None:
            return ()  # kernels get their arrays as arguments
        outside = [item for _, item in outside_names(value)]
        every = _named_in(names_in_code(value.__code__), outside) if is_all else outside
        return [*every, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    attributes = getattr(value, "__dict__", None)
    held = [item for item in gc.get_referents(value) if item is not attributes] if is_all else []
    return [*held, *attributes.values()] if isinstance(attributes, dict) else held


def _named_in(names: Set[str], owners: list[object]) -> list[object]:
    """The owners, and what is called one of these names in modules, classes and objects' classes among all of these.

    Those of libraries are left out.
    """
    every = list(owners)
    for owner in every:  # which grows: in ``module.Class.array``, an owner is named itself
        is_module = isinstance(owner, types.ModuleType)
        spaces: Any = (owner,) if is_module else (owner if isinstance(owner, type) else type(owner)).__mro__
        for space in spaces:
            if not is_library_module(str(space.__name__ if is_module else space.__module__)):
                named = [vars(space)[name] for name in names & vars(space).keys()]
                every += [item for item in named if not any(item is other for other in every)]
    return every


# What Python changes, which another run has to begin with.

_LISTS = (list, bytearray, array)
_CONTAINERS = (tuple, frozenset, list, set, collections.deque)
_WRAPPED = (collections.UserDict, collections.UserList, collections.ChainMap)  # containers, as attributes
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace, *_WRAPPED, backend.Struct)
_WRAPPERS = (partial, property, staticmethod, classmethod, cached_property, types.CellType, types.MethodType)
_Cached = type(lru_cache(len))
_Undoing = Iterator[Callable[[], object]]
_NOTHING = object()


class PythonState:
    """What a function can access, as it was: attributes, variables, containers, generators of random numbers, caches.

    ``before``: other objects.
    """

    def __init__(self, function: object, args: object, before: Iterable[object] = ()) -> None:
        self._of = function, args
        self._objects = [*_reached((args, function, *before), set(), _contents)]
        states: list[Any] = [(random.setstate, random.getstate()), (np.random.set_state, np.random.get_state())]
        torch = sys.modules.get("torch")
        if torch is not None:
            states.append((torch.set_rng_state, torch.get_rng_state()))
        self._undo = [partial(put_back, state) for put_back, state in states]
        self._undo += [undo for value in self._objects for undo in _undoing(value)]

    def as_now(self) -> PythonState:
        """The same, as it is now."""
        return PythonState(*self._of, self._objects)

    def undo(self) -> None:
        """Put it back."""
        for undo in self._undo:
            undo()


def _contents(value: Any) -> Iterable[object]:
    """The objects within a container, or one that is the user's."""
    if isinstance(value, _Cached):
        return (value.__wrapped__,)
    if isinstance(value, _WRAPPERS):
        return gc.get_referents(value)
    if isinstance(value, types.FunctionType):
        if not _is_users(value):
            return ()
        named = _named_in(names_in_code(value.__code__), [item for _, item in outside_names(value)])
        defaults = *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()
        return *named, *defaults, *(value.__closure__ or ()), *vars(value).values()
    if isinstance(value, type):
        return (*vars(value).values(), *value.__bases__) if _is_users(value) else ()
    items = value.values() if isinstance(value, dict) else value if isinstance(value, _CONTAINERS) else ()
    if not _has_attributes(value):
        return tuple(items)
    slots = [getattr(value, name, None) for name in _slots_of(value)]
    return *items, type(value), *getattr(value, "__dict__", {}).values(), *slots


def _undoing(value: Any) -> _Undoing:
    """Functions that put back what an object itself holds."""
    if isinstance(value, _Cached):
        if not value.cache_info().currsize:  # of others no entry can be taken out alone
            yield partial(_empty, value)
    elif isinstance(value, (random.Random, np.random.RandomState)):
        is_numpy = isinstance(value, np.random.RandomState)
        yield partial(value.set_state, value.get_state()) if is_numpy else partial(value.setstate, value.getstate())
    elif isinstance(value, np.random.Generator):
        yield partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    elif isinstance(value, backend.Matrix) and isinstance(value.entries, np.ndarray):
        yield partial(np.copyto, value.entries, value.entries.copy())
    elif isinstance(value, types.CellType):
        yield partial(_put_back_cell, value, gc.get_referents(value))
    elif isinstance(value, types.FunctionType):
        if _is_users(value):
            names = names_in_code(value.__code__)
            modules = filter(inspect.ismodule, _named_in(names, [item for _, item in outside_names(value)]))
            spaces = [value.__globals__, *(vars(m) for m in modules if not is_library_module(m.__name__))]
            yield from (_undoing_names(lambda: names, s.get, s.__setitem__, s.__delitem__) for s in spaces)
            yield _undoing_attributes(vars(value))
    elif isinstance(value, type):
        if _is_users(value):
            space = vars(value)
            yield _undoing_names(lambda: list(space), space.get, partial(setattr, value), partial(delattr, value))
    else:
        if isinstance(value, dict):
            yield partial(_put_back_items, value, dict(value))
        elif isinstance(value, _LISTS):
            yield partial(_put_back_list, value, _plain_type(value).__getitem__(value, slice(None)))
        elif isinstance(value, (set, collections.deque)):
            yield partial(_put_back_set, value, list(value))
        if _has_attributes(value):
            yield _undoing_attributes(getattr(value, "__dict__", {}))
            set_plainly, delete_plainly = partial(object.__setattr__, value), partial(object.__delattr__, value)
            yield _undoing_names(partial(_slots_of, value), partial(getattr, value), set_plainly, delete_plainly)


def _is_users(value: Any) -> bool:
    """Whether a class or function is the user's, and no kernel."""
    is_kernel = backend.primal_kernel(value) is not None or backend.taichi_func(value) is not None
    return not is_kernel and not is_library_module(backend.module_of(value))


def _has_attributes(value: object) -> bool:
    """Whether the attributes of an object are the user's."""
    return isinstance(value, _NAMESPACES) or _is_users(type(value))


def _slots_of(value: object) -> list[str]:
    items = [item for part in type(value).__mro__ if "__slots__" in vars(part) for item in vars(part).items()]
    return [name for name, item in items if isinstance(item, types.MemberDescriptorType)]


def _undoing_attributes(space: dict[str, object]) -> Callable[[], object]:
    return _undoing_names(lambda: list(space), space.get, space.__setitem__, space.__delitem__)


def _undoing_names(
    names: Callable[[], Iterable[str]],
    get: Callable[[str, object], object],
    put: Callable[[str, object], object],
    delete: Callable[[str], object],
) -> Callable[[], object]:
    """A function that puts back what some names stand for; those that were not there are deleted."""
    before = {name: get(name, _NOTHING) for name in names()}

    def undo() -> None:
        for name in {*before, *names()}:
            value = before.get(name, _NOTHING)
            if get(name, _NOTHING) is not value:
                delete(name) if value is _NOTHING else put(name, value)

    return undo


def _plain_type(value: Any) -> Any:
    """The class of a container below those of the user, whose methods may raise, or note changes."""
    return next(kind for kind in type(value).__mro__ if not _is_users(kind))


def _put_back_list(value: Any, before: Any) -> None:
    if not _are_same(value, before):
        _plain_type(value).__setitem__(value, slice(None), before)


def _put_back_set(value: Any, before: list[object]) -> None:
    if not _are_same(value, before):
        kind = _plain_type(value)
        kind.clear(value)
        (kind.update if isinstance(value, set) else kind.extend)(value, before)


def _put_back_items(value: dict[Any, Any], before: dict[Any, Any]) -> None:
    if not (_are_same(value, before) and _are_same(value.values(), before.values())):
        kind = _plain_type(value)
        kind.clear(value)
        for key, item in before.items():
            kind.__setitem__(value, key, item)


def _are_same(some: Any, others: Any) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


def _put_back_cell(cell: types.CellType, before: list[object]) -> None:
    if before:
        cell.cell_contents = before[0]
    elif gc.get_referents(cell):
        del cell.cell_contents


def _empty(cached: Any) -> None:
    """Empty a cache that has been filled: what is in it may have come with changes elsewhere."""
    if cached.cache_info().currsize:
        cached.cache_clear()
