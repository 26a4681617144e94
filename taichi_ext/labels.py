"""Names of fields and arrays in messages: the expressions by which the user's code reaches them.

Names are only looked up when a message is made: in the source of the kernel or pipeline and of functions it calls, then
in the frames of the caller.
"""

from __future__ import annotations

import inspect
import re
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from taichi_ext import backend

_MOST_STEPS = 20_000  # objects that one search looks at
_MOST_ITEMS = 64  # entries of a list or dict that are looked at
_MOST_FUNCTIONS = 300  # functions whose source one search follows
_DEEPEST = 4  # parts of a name: a.b[0].c
_LIBRARIES = {
    backend.RUNTIME.name,
    *["taichi_ext", "numpy", "scipy", "torch", "matplotlib", "_pytest", "pluggy", "pytest"],
}
_UNNAMED = re.compile(r"tmp\d+$|<Struct>|\.|$")  # Taichi's name of a field that the user gave no name


class Label:
    """How messages call a field or array; converted to text when one is made."""

    def __init__(self, labels: Labels, obj: object, named: str, unnamed: str) -> None:
        self._labels = labels
        self._obj = obj
        self._given = given_name(obj)  # Taichi has it only as long as the program
        self._named = named
        self._unnamed = unnamed
        self._text = ""

    def __str__(self) -> str:
        if not self._text:
            name = self._given or self._labels.search(self._obj)
            if not name:
                return self._unnamed
            self._text = self._named.replace("{}", name)
        return self._text

    def __repr__(self) -> str:
        return repr(str(self))


class Labels:
    """The names that one kernel or pipeline has for fields and arrays; keeps neither it nor them alive."""

    def __init__(self, function: object = None) -> None:
        self._function = _weak(function)

    def field(self, field: Any) -> Label:
        """``the field x of shape (3,)``."""
        shape = f"of shape {tuple(field.shape)}"
        kind = "" if isinstance(field, backend.StructField) else f" and type {field.dtype.to_string()}"
        return Label(self, field, f"the field {{}} {shape}", f"a field {shape}{kind}")

    def target(self, place: str, obj: Any, kind: str) -> Label:
        """``params (field x of shape (3,))``."""
        shape = f"of shape {tuple(obj.shape)}"
        return Label(self, obj, f"{place} ({kind} {{}} {shape})", f"{place} ({kind} {shape})")

    def name(self, obj: Any) -> str:
        """The name of a field or array; empty where none is found."""
        return given_name(obj) or self.search(obj)

    def search(self, obj: object) -> str:
        """The name that the user's code has for a field or array; empty where none is found."""
        matches = _matcher(obj)
        function = self._function()
        found = "" if function is None else _in_source(matches, function)
        return found or _in_frames(matches)


def given_name(obj: object) -> str:
    """The name that the user has given to a placed field; empty for all others."""
    name = backend.given_name(obj) if isinstance(obj, backend.Field) else ""
    return "" if _UNNAMED.match(name) else name


def _weak(function: object) -> Callable[[], object]:
    """A reference that does not keep a function, or the owner of a bound method, alive."""
    bound = backend.primal_kernel(function)
    try:
        if inspect.ismethod(function):
            return _weak_method(weakref.ref(function.__self__), weakref.ref(function.__func__))
        if bound is not None and bound[1]:
            return _weak_method(weakref.ref(bound[1][0]), weakref.ref(bound[0].func))
        return weakref.ref(function)
    except TypeError:
        return lambda: None


def _weak_method(owner: Callable[[], Any], function: Callable[[], Any]) -> Callable[[], object]:
    """Like ``weakref.WeakMethod``, which fails in Python 3.11 where a callback of its owner's drops it."""

    def method() -> object:
        found, bound_to = function(), owner()
        return None if found is None or bound_to is None else types.MethodType(found, bound_to)

    return method


def _matcher(obj: object) -> Callable[[object], str | None]:
    """A function that gives the suffix to a value's name if the value is the object or contains it, else None."""
    if not isinstance(obj, backend.Field):
        return lambda value: "" if value is obj else None
    wanted = backend.field_components(obj)

    def match(value: object) -> str | None:
        if not isinstance(value, backend.Field) or isinstance(value, backend.StructField):
            return None
        components = backend.field_components(value)
        if components[0] is wanted[0] and len(components) == len(wanted):
            return ""
        numbers = [n for n, c in enumerate(components) if c is wanted[0]] if len(wanted) == 1 else []
        if numbers:
            assert isinstance(value, backend.MatrixField)
            index = numbers if value.ndim == 1 else divmod(numbers[0], value.m)
            return f".get_scalar_field({', '.join(map(str, index))})"
        return next((f".{of}" for of in ("grad", "dual") if _is_same(getattr(value, of, None), wanted)), None)

    return match


def _is_same(field: object, components: Sequence[object]) -> bool:
    if not isinstance(field, backend.Field) or isinstance(field, backend.StructField):
        return False
    return backend.field_components(field)[0] is components[0]


# --- scopes: the names that a function or a frame uses, and their values ----------------------------------------------


@dataclass(frozen=True)
class _Function:
    """A Python function with the object that it is bound to, and how that is called."""

    function: Any  # a Python function, which as a member of a class would be read as a method
    owner: object = None
    owner_name: str = "self"

    def scope(self) -> Iterator[tuple[str, object]]:
        if self.owner is not None:
            yield self.owner_name, self.owner
        yield from outside_names(self.function)


def outside_names(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    """The variables of closures and modules that a function uses, with their values."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for name in _names(function.__code__) & function.__globals__.keys():
        yield name, function.__globals__[name]


def _names(code: types.CodeType) -> set[str]:
    """Every name that a piece of code uses: variables and attributes, which rewritten code has as texts."""
    names = {*code.co_names, *code.co_freevars, *code.co_varnames, *code.co_cellvars}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
        elif isinstance(constant, str):
            names.add(constant)
    return names


def _as_function(value: object, owner: object = None, owner_name: str = "self") -> _Function | None:
    """The Python function behind a callable that is the user's; None for anything else."""
    if not (inspect.isroutine(value) or backend.is_library(type(value))):  # other objects may compute attributes
        return None
    bound = backend.primal_kernel(value)
    if bound is not None:
        kernel, own = bound
        return _Function(kernel.func, own[0] if own else owner, owner_name)
    if inspect.ismethod(value):
        return _Function(value.__func__, value.__self__, owner_name) if inspect.isfunction(value.__func__) else None
    func = backend.taichi_func(value)
    value = func.func if func is not None else value
    value = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
    is_own = inspect.isfunction(value) and not is_library_module(backend.module_of(value))
    return _Function(value, owner, owner_name) if is_own else None


def is_library_module(module: str) -> bool:
    """Whether a module belongs to a library rather than to the user."""
    name = module.split(".")[0]
    return name in _LIBRARIES or (name in sys.stdlib_module_names and name != "__main__")


def _in_source(matches: Callable[[object], str | None], root: object) -> str:
    """The name in the source of a function, or of those that it calls."""
    first = _as_function(root)
    if first is None:
        call = inspect.getattr_static(type(root), "__call__", None)
        first = _Function(call, root) if inspect.isfunction(call) else None
    if first is None:
        return ""
    if first.owner is not None:
        owner = first.owner
        name = _in_frames(lambda value: "" if value is owner else None)
        first = _Function(first.function, owner, name or "self")
    queue, seen = deque([first]), {(id(first.function), id(first.owner))}
    while queue and len(seen) < _MOST_FUNCTIONS:
        current = queue.popleft()
        found, called = _search(matches, current.scope(), _names(current.function.__code__))
        if found:
            return found
        for other in called:
            key = (id(other.function), id(other.owner))
            if key not in seen:
                seen.add(key)
                queue.append(other)
    return ""


def _in_frames(matches: Callable[[object], str | None]) -> str:
    """The name in the innermost frame of the user's that has one; rather not an entry of a list, nor an argument's."""
    others: list[str] = []
    frame = backend.user_frame()
    while frame is not None:
        code = frame.f_code
        if not is_library_module(frame.f_globals.get("__name__") or ""):
            names = _names(code)
            variables = {**frame.f_globals, **backend.local_variables(frame)}
            order = sorted(variables, key=lambda name: name not in names)  # those that the code uses come first
            scope = ((name, variables[name]) for name in order if name.isidentifier() and name[:2] != "__")
            found, _ = _search(matches, scope, names)
            arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            is_general = "[" in found or found.split(".")[0] in arguments  # names that a helper may have for anything
            if found and not is_general:
                return found
            others += [found] if found else []
        frame = backend.user_frame(frame.f_back) if frame.f_back is not None else None
    return min(others, key=lambda name: ("[" in name, "." not in name), default="")


# --- the search in one scope ------------------------------------------------------------------------------------------


def _search(
    matches: Callable[[object], str | None], scope: Iterator[tuple[str, object]], used: set[str]
) -> tuple[str, list[_Function]]:
    """The name of a matching object, and the user's functions found on the way; attributes must be among ``used``."""
    queue = deque((name, value, 1) for name, value in scope)
    seen: set[int] = set()
    functions: list[_Function] = []
    while queue and len(seen) < _MOST_STEPS:
        name, value, depth = queue.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        rest = matches(value)
        if rest is not None:
            return name + rest, functions
        function = _as_function(value)
        if function is not None:
            functions.append(function)
        elif depth <= _DEEPEST:
            for part, item, kind in _parts(name, value, used):
                method = _as_function(item, value, name) if kind == "type" else None
                if method is not None:
                    functions.append(method)
                else:
                    queue.append((part, item, depth + 1))
    return "", functions


def _parts(name: str, value: object, used: set[str]) -> Iterator[tuple[str, object, str]]:
    """The contents of an object: its name, the thing, and whether it was found on the object or on its type.

    Nothing of the user's runs: attributes are read where they are stored, properties are not called.
    """
    if isinstance(value, backend.StructField):
        for key, member in value.field_dict.items():
            yield f"{name}.{key}", member, "own"
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value[:_MOST_ITEMS]):
            yield f"{name}[{i}]", item, "own"
    elif isinstance(value, dict):
        for key in list(dict.keys(value))[:_MOST_ITEMS]:
            if isinstance(key, (str, int)):
                yield f"{name}[{key!r}]", dict.__getitem__(value, key), "own"
    elif not isinstance(value, (str, bytes, int, float, backend.Field)):
        own = _stored(value)
        for key in used & own.keys():
            yield f"{name}.{key}", own[key], "own"
        if not isinstance(value, (type, types.ModuleType)) and not backend.is_library(type(value)):
            for kind in type(value).__mro__[:-1]:
                for key in used & vars(kind).keys():
                    yield f"{name}.{key}", _of_slot(vars(kind)[key], value), "type"


def _of_slot(item: object, value: object) -> object:
    """The object in a slot of an object; anything else that its type has, unchanged."""
    try:
        return item.__get__(value) if isinstance(item, types.MemberDescriptorType) else item
    except AttributeError:  # nothing stored yet
        return None


def _stored(value: object) -> Any:
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
