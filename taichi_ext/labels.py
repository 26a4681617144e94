"""Names of fields and arrays in messages: the expressions by which the user's code reaches them.

Names are only looked up when a message is made: in the source of the kernel or pipeline and of functions it calls, then
in the frames of the caller.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from taichi_ext import backend

_MOST_STEPS = 20_000  # objects that one search looks at
_MOST_ITEMS = 64  # entries of a list or dict that are looked at
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
        name = "" if function is None else _in_source(matches, function)
        return name or _in_frames(matches)


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
        plain, bound_to = function(), owner()
        return None if plain is None or bound_to is None else types.MethodType(plain, bound_to)

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


def identifier(obj: object, scopes: Sequence[Mapping[str, object]]) -> str:
    """The name of an object in some scopes as one word: without that of an object it is an attribute of."""
    path = next((name for scope in scopes for name, value in scope.items() if value is obj), "")
    path = path or next(filter(None, (_search(_matcher(obj), scope.items(), None) for scope in scopes)), "field")
    first, *parts = re.findall(r"\w+", path)
    holder = next((scope[first] for scope in scopes if first in scope), None)
    is_attribute = bool(parts) and not isinstance(holder, (list, tuple, dict, backend.StructField))
    return "_".join(parts if is_attribute else (first, *parts))


# --- scopes: the names that a function or a frame uses, and their values ----------------------------------------------


def outside_names(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    """The variables of closures and modules that a function uses, with their values."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if cell != types.CellType():  # not assigned yet
            yield name, cell.cell_contents
    for name in names_in_code(function.__code__) & function.__globals__.keys():
        yield name, function.__globals__[name]


def names_in_code(code: types.CodeType) -> set[str]:
    """The names and texts in a function's code, including definitions in it."""
    names = {*code.co_names, *code.co_freevars, *(c for c in code.co_consts if isinstance(c, str))}
    return names.union(*(names_in_code(c) for c in code.co_consts if isinstance(c, types.CodeType)))


def plain_function(obj: object) -> types.FunctionType | None:
    """The Python function behind a kernel, ti.func, method, partial or callable object."""
    kernel = backend.primal_kernel(obj)
    if kernel is not None:
        return kernel[0].func
    func = backend.taichi_func(obj)
    if func is not None:
        return func.func
    while isinstance(obj, (functools.partial, types.MethodType)):
        obj = obj.func if isinstance(obj, functools.partial) else obj.__func__
    obj = inspect.unwrap(obj) if callable(obj) else obj
    if not isinstance(obj, (types.FunctionType, type)):
        obj = inspect.getattr_static(type(obj), "__call__", None)
    return obj if isinstance(obj, types.FunctionType) else None


def _python_function(value: object) -> types.FunctionType | None:
    """The Python function behind a callable that is the user's; None for anything else."""
    is_function = inspect.isroutine(value) or backend.is_library(type(value))  # other objects may compute attributes
    function = plain_function(value) if is_function else None
    return None if function is None or is_library_module(backend.module_of(function)) else function


def is_library_module(module: str) -> bool:
    """Whether a module belongs to a library rather than to the user."""
    name = module.split(".")[0]
    return name in _LIBRARIES or (name in sys.stdlib_module_names and name != "__main__")


def _in_source(matches: Callable[[object], str | None], root: Any) -> str:
    """The name in the scope of a function, or of those that it can reach."""
    bound = backend.primal_kernel(root)
    owner = bound[1][0] if bound is not None and bound[1] else getattr(root, "__self__", None)
    function = bound[0].func if bound is not None else _python_function(root)
    if function is None:  # an object that is called
        function, owner = inspect.getattr_static(type(root), "__call__", None), root
    scope: list[tuple[str, object]] = []
    if owner is not None:
        scope = [(_in_frames(lambda value: "" if value is owner else None) or "self", owner)]
    return _search(matches, [*scope, *(outside_names(function) if inspect.isfunction(function) else ())], None)


def _in_frames(matches: Callable[[object], str | None]) -> str:
    """The name in the innermost frame of the user's that has one; rather not an entry of a list, nor an argument's."""
    others: list[str] = []
    frame = backend.user_frame()
    while frame is not None:
        code = frame.f_code
        if not is_library_module(frame.f_globals.get("__name__") or ""):
            names = {*names_in_code(code), *code.co_varnames, *code.co_cellvars}
            variables = {**frame.f_globals, **backend.local_variables(frame)}
            order = sorted(variables, key=lambda name: name not in names)  # those that the code uses come first
            scope = ((name, variables[name]) for name in order if name.isidentifier() and name[:2] != "__")
            result = _search(matches, scope, names)
            arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            is_general = "[" in result or result.split(".")[0] in arguments  # names that a helper may have for anything
            if result and not is_general:
                return result
            others += [result] if result else []
        frame = backend.user_frame(frame.f_back) if frame.f_back is not None else None
    return min(others, key=lambda name: ("[" in name, "." not in name), default="")


# --- the search in one scope ------------------------------------------------------------------------------------------


def _search(matches: Callable[[object], str | None], scope: Iterable[tuple[str, object]], used: set[str] | None) -> str:
    """The name of a matching object, by attributes among ``used`` (None: all), or as a function names it."""
    queue = deque((name, value, 1) for name, value in scope)
    seen: set[int] = set()
    while queue and len(seen) < _MOST_STEPS:
        name, value, depth = queue.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        rest = matches(value)
        if rest is not None:
            return name + rest
        function = _python_function(value)
        if depth <= _DEEPEST:
            parts = _parts(name, value, used) if function is None else outside_names(function)
            queue += ((part, item, depth + 1) for part, item in parts)
    return ""


def _parts(name: str, value: Any, used: set[str] | None) -> Iterator[tuple[str, object]]:
    """The contents of an object, by name.

    Nothing of the user's runs: attributes are read where they are stored, properties are not called.
    """
    if isinstance(value, backend.StructField):
        yield from ((f"{name}.{key}", member) for key, member in value.field_dict.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"{name}[{i}]", item) for i, item in enumerate(value[:_MOST_ITEMS]))
    elif isinstance(value, dict):
        keys = (key for key in list(dict.keys(value))[:_MOST_ITEMS] if isinstance(key, (str, int)))
        yield from ((f"{name}[{key!r}]", dict.__getitem__(value, key)) for key in keys)
    elif not isinstance(value, (str, bytes, int, float, backend.Field)):
        is_module, is_kind = isinstance(value, types.ModuleType), isinstance(value, type)
        module = value.__name__ if is_module else (value if is_kind else type(value)).__module__
        if is_library_module(module) if is_module else str(module).split(".")[0] in _LIBRARIES:
            return
        kinds = () if is_module or is_kind else type(value).__mro__[:-1]
        for stored in (_stored(value), *map(vars, kinds)):
            for key in [k for k in stored if k[:2] != "__"] if used is None else used & stored.keys():
                yield f"{name}.{key}", _of_slot(stored[key], value)


def _of_slot(item: object, value: object) -> object:
    """The object in a slot of an object; anything else that its type has, unchanged."""
    try:
        return item.__get__(value) if isinstance(item, types.MemberDescriptorType) else item
    except (AttributeError, TypeError):  # nothing stored yet, or the slot of a class
        return None


def _stored(value: object) -> Any:
    try:
        return vars(value) if isinstance(value, type) else object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
