"""Python values that Taichi puts into a kernel when it compiles it, and whether they have changed since.

Taichi compiles a kernel once and does not notice when a global or an attribute that it names is assigned again.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import linecache
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from taichi_ext.backend.lifetime import check_not_ended
from taichi_ext.backend.opaque import Walk
from taichi_ext.backend.runtime import RUNTIME, ASTResolver, ASTTransformer, Kernel, build_call, is_decorated, ti

_NUMBERS = (bool, int, float, complex, str, type(None), np.generic)
_LARGEST_ARRAY = 4096  # entries, of those that are compared


class Capture:
    """A global, or an attribute of an object, as it was when a kernel was compiled."""

    def __init__(self, read: Callable[[], object], text: str, place: tuple[str, int, str], value: object) -> None:
        self._read = read
        self._place = place
        self._frozen = frozen(value)
        self.text = text  # as the source has it
        self.is_number = isinstance(value, _NUMBERS)
        self._same = weakref.ref(value) if isinstance(value, types.FunctionType) or is_decorated(value) else None
        self.value = value if self.is_number else None  # keeps no field alive

    @property
    def place(self) -> str:
        """Where the source names it, as Taichi's messages cite it."""
        file, line, function = self._place
        return f'File "{file}", line {line}, in {function}:\n{linecache.getline(file, line).rstrip()}'

    def current(self) -> object:
        """Its present value."""
        return self._read()

    def has_changed(self) -> bool:
        """Whether it is another value than it was."""
        try:
            now = self._read()
        except (AttributeError, KeyError, ReferenceError, ValueError):  # its owner is gone, or it has been deleted
            return False
        same = self.value if self._same is None else self._same()
        return now is not same and frozen(now) != self._frozen

    @property
    def is_followed(self) -> bool:
        """Whether it is compared at every launch: numbers and functions, which is quick."""
        return self.is_number or self._same is not None


def _reader(owner: Any, names: tuple[str, ...], is_global: bool) -> Callable[[], object]:
    """Reads an attribute of an object, or a name from outside of a function."""
    with contextlib.suppress(TypeError):  # else it is kept alive
        owner = weakref.proxy(owner)
    first, *others = names
    if is_global:
        code = owner.__code__
        if first in code.co_freevars:
            cell = owner.__closure__[code.co_freevars.index(first)]
            read = lambda: cell.cell_contents  # noqa: E731
        else:
            read = lambda: owner.__globals__[first]  # noqa: E731
    else:
        read = functools.partial(getattr, owner, first)
    if not others:
        return read
    return lambda: functools.reduce(getattr, others, read())


def frozen(value: Any) -> Any:
    """A key that is equal for values that mean the same in a kernel; None for values that are not followed."""
    if isinstance(value, _NUMBERS):
        return (type(value).__name__, repr(value))
    if isinstance(value, ti.Matrix):
        return ("matrix", repr(value.to_list()))
    if isinstance(value, ti.Struct):
        return ("struct", *((name, frozen(getattr(value, name))) for name in value.keys))
    if isinstance(value, (list, tuple)):
        return tuple(frozen(v) for v in value)
    if isinstance(value, dict):
        return tuple((repr(k), frozen(v)) for k, v in value.items())
    if isinstance(value, np.ndarray) and value.size <= _LARGEST_ARRAY:
        return ("array", value.shape, value.dtype.str, value.tobytes())
    if isinstance(value, types.FunctionType) or is_decorated(value):
        function: Any = value
        return _frozen_function(inspect.unwrap(function))
    return ("object", id(value)) if isinstance(value, (ti.Field, ti.Ndarray)) else None


def _frozen_function(function: Any) -> Any:
    """The code of a function and the values that it has from around it; None for functions of Taichi and our own."""
    if _is_taichi(function) or hasattr(function, "_is_wrapped_kernel") or not hasattr(function, "__code__"):
        return None
    cells = [c.cell_contents for c in function.__closure__ or () if c != types.CellType()]
    numbers = tuple(frozen(v) for v in (*cells, *(function.__defaults__ or ())) if isinstance(v, _NUMBERS))
    return ("function", function.__code__, numbers)


class Reader(Protocol):
    """Gives the values of names and attributes, and notices when ``ti.static`` is evaluated."""

    def read_name(self, function: Any, name: str, value: Any) -> Any: ...

    def read_attribute(self, owner: object, name: str, value: object) -> object: ...

    def enter_static(self, change: int) -> None: ...


class Captures:
    """The values that one compilation has put into a kernel."""

    def __init__(self) -> None:
        self._all: dict[object, Capture] = {}
        self._followed: tuple[Capture, ...] = ()
        self.reader: Reader | None = None

    @property
    def numbers(self) -> list[str]:
        """The texts of the real numbers among them, as the source has them."""
        kinds = (int, float, np.integer, np.floating)
        return [c.text for c in self._followed if isinstance(c.value, kinds) and not isinstance(c.value, bool)]

    def note(
        self,
        owner: object,
        names: tuple[str, ...],
        is_global: bool,
        node: Any,
        context: Walk,
        value: object,
    ) -> None:
        """Keep the value of a global or attribute, unless it is known or none that can be followed."""
        key = (id(owner), names)
        if key in self._all or frozen(value) is None:
            return
        check_not_ended(value, f"The field {_text(node, names)}")  # of plain kernels too, which would die
        place = (context.file, node.lineno + context.lineno_offset, context.func.func.__name__)
        read = _reader(owner, names, is_global)
        self._all[key] = capture = Capture(read, _text(node, names), place, value)
        if capture.is_followed:
            self._followed += (capture,)

    def follow(self, key: object, is_parameter: bool) -> None:
        """Compare a vector that is a parameter at every launch, as numbers and functions are."""
        capture = self._all.get(key)
        if is_parameter and capture is not None and capture not in self._followed:
            self._followed += (capture,)

    def changed(self) -> Capture | None:
        """A value that has changed."""
        return next((capture for capture in self._all.values() if capture.has_changed()), None)

    def changed_at_launch(self) -> Capture | None:
        """A number or function that has changed; checked quickly."""
        for capture in self._followed:
            if capture.has_changed():
                return capture
        return None


def _text(node: ast.AST, names: tuple[str, ...]) -> str:
    base: Any = node
    while isinstance(base, ast.Attribute):
        base = base.value
    return ast.unparse(node) if isinstance(base, ast.Name) else ".".join(names)


# --- notes taken while Taichi walks a kernel


_noting: list[Captures] = []


@contextlib.contextmanager
def noting(captures: Captures) -> Iterator[None]:
    """Note the Python values that are named while a kernel is compiled."""
    _noting.append(captures)
    try:
        yield
    finally:
        _noting.pop()


def _note_name(context: Walk, node: Any) -> None:
    name, function = node.id, context.func.func
    if name not in context.global_vars or any(name in scope for scope in context.local_scopes):
        node.root = (node.ptr, ())
    elif not _is_taichi(function):
        node.root = (function, (name,))
        _noting[-1].note(function, (name,), True, node, context, context.global_vars[name])
        reader = _noting[-1].reader
        if reader is not None:
            before = node.ptr
            node.ptr = reader.read_name(function, name, before)
            _noting[-1].follow((id(function), (name,)), node.ptr is not before)


def _note_attribute(context: Walk, node: Any) -> None:
    if isinstance(node.value, ast.Constant):
        return  # evaluated for a call that reads an attribute, which is noted itself
    owner, names = getattr(node.value, "root", (node.value.ptr, ()))
    is_struct = isinstance(node.value.ptr, ti.Struct)
    if owner is None or (not is_struct and (_is_taichi(owner) or _is_taichi(node.value.ptr))):
        return
    node.root = (owner, (*names, node.attr))
    _noting[-1].note(owner, node.root[1], bool(names) and owner is context.func.func, node, context, node.ptr)
    reader = _noting[-1].reader
    if reader is not None:
        before = node.ptr
        node.ptr = reader.read_attribute(node.value.ptr, node.attr, before)
        _noting[-1].follow((id(owner), node.root[1]), node.ptr is not before)


def read_member(struct: object, name: str) -> object:
    """The value of a member of a struct of Python numbers, in the kernel that is walked."""
    value = getattr(struct, name)
    reader = _noting[-1].reader if _noting else None
    return value if reader is None else reader.read_attribute(struct, name, value)


def _is_attribute_read(node: object) -> bool:
    """Whether a call reads an attribute by name, as rewritten sources do: ``<ad>.attribute(owner, "name")``."""
    function = node.func if isinstance(node, ast.Call) else None
    if isinstance(function, ast.Attribute):
        return function.attr == "attribute" and isinstance(function.value, ast.Name) and function.value.id == "<ad>"
    return isinstance(function, ast.Name) and function.id == "<ad>.attribute"


def _as_attribute(node: Any) -> Any:
    """Such a call as the attribute that it represents."""
    if not _is_attribute_read(node):
        return node
    attribute = ast.Attribute(value=_as_attribute(node.args[0]), attr=node.args[1].value, ctx=ast.Load())
    ast.copy_location(attribute, node)
    attribute.ptr = node.ptr  # type: ignore[attr-defined]
    if hasattr(node, "root"):
        attribute.root = node.root  # type: ignore[attr-defined]
    return attribute


def _note_attribute_read(context: Walk, node: Any) -> None:
    attribute = _as_attribute(node)
    _note_attribute(context, attribute)
    node.ptr = attribute.ptr
    if hasattr(attribute, "root"):
        node.root = attribute.root


def _is_taichi(obj: object) -> bool:
    """Whether an object is, or belongs to, one of Taichi's own."""
    module = getattr(obj, "__module__", None) or getattr(obj, "__name__", None) or ""
    return RUNTIME.owns(str(module)) or RUNTIME.owns(type(obj).__module__)


def follow_captures() -> None:
    """From now on, the Python values that kernels are compiled with can be noted."""
    for kind, note in (("build_Name", _note_name), ("build_Attribute", _note_attribute)):
        setattr(ASTTransformer, kind, staticmethod(_followed(getattr(ASTTransformer, kind), note)))
    setattr(ASTTransformer, "build_Call", staticmethod(_followed_call(build_call)))  # noqa: B010


def _followed(build: Callable[..., object], note: Callable[..., None]) -> Callable[..., object]:
    def wrapped(context: object, node: object) -> object:
        result = build(context, node)
        if _noting:
            note(context, node)
        return result

    return wrapped


def _followed_call(build: Callable[..., object]) -> Callable[..., object]:
    def wrapped(context: Walk, node: Any) -> object:
        reader = _noting[-1].reader if _noting else None
        is_static = reader is not None and any(
            ASTResolver.resolve_to(node.func, static, context.global_vars) for static in (ti.static, ti.static_assert)
        )
        if not is_static:
            result = build(context, node)
            if _noting and _is_attribute_read(node):
                _note_attribute_read(context, node)
            return result
        assert reader is not None
        reader.enter_static(1)
        try:
            return build(context, node)
        finally:
            reader.enter_static(-1)

    return wrapped


# --- notes of the first compilation of a kernel


_first: weakref.WeakKeyDictionary[Kernel, tuple[Any, dict[Any, Captures]]] = weakref.WeakKeyDictionary()


def first_captures(kernel: Kernel, features: object, captures: Captures) -> Captures:
    """The values that a kernel was first compiled with for such arguments: these, if it has not been before."""
    program = RUNTIME.program()
    known = _first.get(kernel)
    if known is None or known[0]() is not program:
        known = _first[kernel] = (weakref.ref(program), {})
    return known[1].setdefault(features, captures)


def has_changed(kernel: Any) -> bool:
    """Whether a kernel was compiled in another Taichi program, or with Python values that are others now."""
    known = _first.get(kernel._primal)
    if known is None:
        return False
    return known[0]() is not RUNTIME.program() or any(c.changed() is not None for c in known[1].values())
