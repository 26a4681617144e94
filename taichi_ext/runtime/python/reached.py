"""What a Python function can access, found without running it: its arrays, and numbers, which can be put back."""

from __future__ import annotations

import collections
import gc
import inspect
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from functools import partial
from itertools import filterfalse
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.labels import is_library_module, names_in_code, outside_names
from taichi_ext.runtime.python.dual_numbers import is_dual, plain_number

_DEEPEST = 4  # containers in containers
_SIMPLE = (int, float, str, bytes, types.ModuleType, type)
_OPEN = (types.FunctionType, types.MethodType)
_LIBRARIES = (backend.RUNTIME.name, "taichi_ext", "numpy", "torch", "scipy")


def reachable_arrays(function: object, args: object) -> Iterator[object]:
    """NumPy arrays and tensors among the arguments, in closures, globals and attributes that the function names.

    Those in lists, tuples, dicts and objects with attributes are found too, and those of functions that it calls.
    """
    arrays = filter(backend.is_array, _reached((args, function), set()))
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
    collections.deque(_reached((args, function), seen), maxlen=0)
    return seen


def forget_tangents(result: Any, function: object, args: object) -> Any:
    """Put floats in place of numbers with tangents that a run has left in objects that the function can access.

    Returns the result of the function, also without tangents.
    """
    for value in filterfalse(backend.is_array, _reached((result, function, args), set(), is_all=False)):
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


def _reached(values: Iterable[Any], seen: set[int], depth: int = 0, *, is_all: bool = True) -> Iterator[Any]:
    """The values and what they lead to: arrays, and other objects, which are ``seen`` once; see ``_items``."""
    for value in values:
        if id(value) in seen or depth > _DEEPEST or isinstance(value, _SIMPLE):
            continue
        yield value
        if not backend.is_array(value):
            seen.add(id(value))
            yield from _reached(_items(value, is_all), seen, depth + 1, is_all=is_all)


def _items(value: Any, is_all: bool) -> Iterable[object]:
    """The objects within an object that may be arrays, or hold some.

    ``is_all``: also those in slots and in objects of C, and what functions name in modules and classes.  Caches of
    ``functools`` are such objects: the numbers in them keep their tangents, for a warning in the next run.
    """
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


# Numbers that Python changes, which another run has to begin with.

_NUMBERS = {bool, int, float, np.float64}
_MOST_ITEMS = 4096  # of a list whose numbers are put back
_States = list[tuple[Callable[[Any], object], Any]]  # with functions that put them back


class PythonNumbers:
    """The random generators of libraries, and the numbers and generators that a function can access, as they were."""

    def __init__(self, function: object, args: object) -> None:
        self._of = function, args
        states: _States = [(random.setstate, random.getstate()), (np.random.set_state, np.random.get_state())]
        torch = sys.modules.get("torch")
        if torch is not None:
            states.append((torch.set_rng_state, torch.get_rng_state()))
        for value in _reached((args, function), set(), is_all=False):
            if isinstance(value, random.Random):
                states.append((value.setstate, value.getstate()))
            elif isinstance(value, np.random.Generator):
                states.append((partial(setattr, value.bit_generator, "state"), value.bit_generator.state))
            elif isinstance(value, types.FunctionType):
                states += _of_variables(value)
            elif isinstance(value, dict):
                states.append(_numbers_in(value, value))
            elif isinstance(value, list) and len(value) <= _MOST_ITEMS:
                states.append(_numbers_in(value, dict(enumerate(value))))
            elif hasattr(value, "__dict__") and not is_library_module(type(value).__module__):
                items = [item for part in type(value).__mro__ for item in vars(part).items()]
                methods = [item for _, item in items if isinstance(item, types.FunctionType)]
                states += [state for method in methods for state in _of_variables(method)]
                items = [*reversed(items), *vars(value).items()]  # of its class at first
                states.append(_numbers_in(vars(value), dict(items)))
        self._states = states

    def as_now(self) -> PythonNumbers:
        """The same ones, as they are now."""
        return PythonNumbers(*self._of)

    def undo(self) -> None:
        """Put them back."""
        for put_back, state in self._states:
            put_back(state)


def _of_variables(function: types.FunctionType) -> _States:
    """The numbers in the variables of closures and modules that a function uses."""
    cells = [cell for cell in function.__closure__ or () if type(_contents(cell)) in _NUMBERS]
    known = function.__globals__
    named = {name: known[name] for name in names_in_code(function.__code__) & known.keys()}
    return [*((partial(setattr, cell, "cell_contents"), _contents(cell)) for cell in cells), _numbers_in(known, named)]


def _contents(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _numbers_in(holder: Any, items: Mapping[Any, object]) -> tuple[Callable[[Any], object], Any]:
    return partial(_put_numbers, holder), {key: item for key, item in items.items() if type(item) in _NUMBERS}


def _put_numbers(holder: Any, numbers: Mapping[Any, object]) -> None:
    """Put numbers back where there still are some."""
    now = dict(enumerate(holder)) if isinstance(holder, list) else holder
    for key, number in numbers.items():
        if isinstance(now.get(key), (int, float)) and now[key] is not number:
            holder[key] = number
