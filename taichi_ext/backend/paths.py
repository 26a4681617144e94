"""How Python values are reached that kernels name, and those that plain Python functions name."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from taichi_ext.host import RUNTIME, bound, is_decorated, ti

NUMBERS = (bool, int, float, complex, str, type(None), np.generic)


class Path(NamedTuple):
    """How a value is reached: attributes and items of an object, or a name from outside of a function and those of it.

    Attributes:
        owner: the object or function.
        steps: names of attributes, and items, each in a tuple of its own.
        text: as the source has it.
        is_global: whether the first step is a name that the function reads.
    """

    owner: Any
    steps: tuple[Any, ...]
    text: str
    is_global: bool = False

    @property
    def key(self) -> object:
        """The same for each way to write it, as long as the owner exists."""
        return id(self.owner), self.steps

    def part(self, step: Any) -> Path:
        """An attribute or item of its value."""
        text = f"{self.text}.{step}" if isinstance(step, str) else f"{self.text}[{step[0]!r}]"
        return self._replace(steps=(*self.steps, step), text=text.lstrip("."))

    def reader(self) -> Callable[[], Any]:
        """A function that gives its present value; it keeps no object alive whose attribute it is."""
        (first, *others), owner = self.steps, self.owner
        if not self.is_global:
            get, held = _getter(owner, first), reference_to(owner)
            read = lambda: get(held(), first)  # noqa: E731
        elif first in owner.__code__.co_freevars:
            cell = owner.__closure__[owner.__code__.co_freevars.index(first)]
            read = functools.partial(getattr, cell, "cell_contents")
        else:
            read = functools.partial(owner.__globals__.__getitem__, first)
        if not others:
            return read
        steps = [operator.attrgetter(s) if isinstance(s, str) else operator.itemgetter(*s) for s in others]
        if len(steps) == 1:
            (step,) = steps
            return lambda: step(read())
        return lambda: functools.reduce(lambda value, step: step(value), steps, read())


def _getter(owner: Any, name: str) -> Callable[[Any, str], Any]:
    """The function that reads an attribute of an object: not Taichi's for classes with kernels, which takes long.

    Taichi's takes properties of such a class from the class itself, whatever a subclass has in their place.
    """
    classes = type(owner).__mro__[:-1]
    own = [vars(c)["__getattribute__"] for c in classes if "__getattribute__" in vars(c)]
    is_property = any(isinstance(vars(c).get(name), property) for c in classes)
    return object.__getattribute__ if own and all(map(is_taichi, own)) and not is_property else getattr


def reference_to(obj: Any) -> Callable[[], Any]:
    """A function that gives an object, without keeping it alive where it can be referred to weakly."""
    if not isinstance(obj, NUMBERS):
        with contextlib.suppress(TypeError):  # it has no weak references
            return weakref.ref(obj)
    return lambda: obj


def is_taichi(obj: object) -> bool:
    """Whether an object is, or belongs to, one of Taichi's own."""
    module = getattr(obj, "__module__", None) or getattr(obj, "__name__", None) or ""
    return RUNTIME.owns(str(module)) or RUNTIME.owns(type(obj).__module__)


def python_function(value: Any) -> tuple[Any, object]:
    """The plain Python function of the user's behind a callable, and the object that it is bound to."""
    owner: object = None
    if isinstance(value, types.MethodType):
        value, owner = value.__func__, value.__self__
    elif not isinstance(value, (types.FunctionType, type)):
        value, owner = inspect.getattr_static(type(value), "__call__", None), value
    module = getattr(value, "__module__", None) or ""
    is_library = module.split(".")[0] in (RUNTIME.name, "numpy", "taichi_ext", *sys.stdlib_module_names)
    is_plain = isinstance(value, types.FunctionType) and not hasattr(value, "_is_taichi_function")
    return (value, owner) if is_plain and not is_library else (None, None)


def python_reads(function: types.FunctionType, owner: object) -> Iterator[tuple[Path, object]]:
    """The numbers, fields and functions that a Python function names."""
    for path, value in _values(function, {} if owner is None else {function.__code__.co_varnames[0]: owner}):
        if isinstance(value, (*NUMBERS, ti.Field, ti.Ndarray, ti.Matrix, types.FunctionType, types.MethodType)):
            yield path, value


def values_read(
    function: types.FunctionType, given: Mapping[str, object], codes: tuple[types.CodeType, ...] = ()
) -> Iterator[tuple[Path, object]]:
    """What a kernel names, and functions that it names: variables, and attributes of the objects given as arguments."""
    for path, value in _values(function, given):
        yield path, value
        method = bound(value)
        inner = method[0] if method is not None else value if is_decorated(value) else None
        inner = inspect.unwrap(inner) if callable(inner) else None
        if inspect.isfunction(inner) and not is_taichi(inner) and inner.__code__ not in codes:
            own = {} if method is None else dict.fromkeys(inner.__code__.co_varnames[:1], method[1])
            yield from values_read(inner, own, (*codes, inner.__code__))


def _values(function: types.FunctionType, given: Mapping[str, object]) -> Iterator[tuple[Path, object]]:
    code = function.__code__
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    for first, *names in _paths(code):
        path = Path(function, (first,), first, is_global=True)
        if first in cells:
            value = None if cells[first] == types.CellType() else cells[first].cell_contents
        elif first in function.__globals__ and first not in code.co_varnames:
            value = function.__globals__[first]
        elif first in given and names:
            path, value = Path(given[first], (), first), given[first]
        else:
            continue
        for name in names:
            if isinstance(value, (*NUMBERS, ti.Field, ti.Matrix)):
                break
            path = path.part(name)
            try:
                value = getattr(value, name)
            except Exception:  # of a property
                break
        yield path, value


@functools.lru_cache(maxsize=1024)
def _paths(code: types.CodeType) -> list[list[str]]:
    """The names in the code of a function, each with the attributes that are read of it; not those that it assigns."""
    found: list[list[str]] = []
    path: list[str] = []
    stored: set[object] = set()
    for instruction in dis.get_instructions(code):
        kind, name = instruction.opname, instruction.argval
        if kind.startswith(("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FAST")):
            path = [name[-1] if isinstance(name, tuple) else name]
            found.append(path)
        elif kind in ("LOAD_ATTR", "LOAD_METHOD"):
            path.append(name)
        elif kind.startswith("STORE_"):
            stored.add(name)
        if not kind.startswith(("LOAD_", "PUSH_NULL", "CACHE", "EXTENDED_ARG")):
            path = []
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return [p for p in found if stored.isdisjoint(p)] + [p for c in inner for p in _paths(c)]
