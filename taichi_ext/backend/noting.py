"""Notes of the Python values that kernels name, taken while Taichi or the recorder walks them."""

from __future__ import annotations

import ast
import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from taichi_ext.backend.captures import CONTAINERS, Captures
from taichi_ext.backend.opaque import TracingState
from taichi_ext.backend.paths import Path, is_taichi
from taichi_ext.host import RUNTIME, ASTResolver, ASTTransformer, Func, build_call, ti

_noting: list[Captures] = []
_functions: weakref.WeakKeyDictionary[Func, tuple[Any, Captures]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def noting(captures: Captures) -> Iterator[None]:
    """Note the Python values that are named while a kernel is compiled."""
    _noting.append(captures)
    try:
        yield
    finally:
        _noting.pop()


def keep_function(func: Func, captures: Captures) -> None:
    """A real function was compiled with these values, once for all kernels that call it."""
    known = _functions.get(func)
    if known is not None and known[0]() is RUNTIME.program():
        captures.add(known[1])  # for other types of arguments
    _functions[func] = weakref.ref(RUNTIME.program()), captures


def note_function(func: Func) -> None:
    """A function is called: if it is a real one that was compiled before, the values of that time count."""
    known = _functions.get(func)
    if _noting and known is not None and known[0]() is RUNTIME.program():
        _noting[-1].add(known[1])


def read_member(struct: object, name: str) -> object:
    """The value of a member of a struct of Python numbers, in the kernel that is walked."""
    value = getattr(struct, name)
    reader = _noting[-1].reader if _noting else None
    return value if reader is None else reader.read_attribute(struct, name, value)


def _note_name(context: TracingState, node: Any) -> None:
    name, function = node.id, context.func.func
    if name not in context.global_vars or any(name in scope for scope in context.local_scopes):
        node.root = Path(node.ptr, (), name)
    elif not is_taichi(function) and not name.startswith("<"):  # a function of the recorder
        node.root = Path(function, (name,), name, is_global=True)
        captures = _noting[-1]
        captures.note(node.root, context.global_vars[name], _place(context, node))
        if captures.reader is not None:
            node.ptr = captures.reader.read_name(function, name, node.ptr)


def _note_attribute(context: TracingState, node: Any) -> None:
    if _note_part(context, node, node.value, node.attr, node.ptr):
        reader = _noting[-1].reader
        if reader is not None:
            node.ptr = reader.read_attribute(node.value.ptr, node.attr, node.ptr)


def _note_item(context: TracingState, node: Any) -> None:
    index = node.slice.ptr
    if isinstance(index, (list, tuple)) and len(index) == 1:
        index = index[0]
    _note_part(context, node, node.value, (index,))


def _note_part(context: TracingState, node: Any, base: Any, step: Any, value: object = None) -> bool:
    """Note an attribute, or an item in a tuple of its own, of the value of a node; False for those of Taichi."""
    if isinstance(base, ast.Constant):  # evaluated for a call that reads an attribute, which is noted itself
        return False
    whole: Path = getattr(base, "root", None) or Path(base.ptr, (), "")
    of_taichi = is_taichi(whole.owner) or is_taichi(base.ptr)
    if whole.owner is None or (of_taichi and not isinstance(base.ptr, ti.Struct)):
        return False
    if isinstance(step, tuple):
        if not (whole.steps and isinstance(base.ptr, CONTAINERS) and isinstance(step[0], (int, str))):
            return False
        container: Any = base.ptr
        value = container[step[0]]
    node.root = whole.part(step)
    _noting[-1].note_part(whole, step, value, _place(context, node))
    return True


def _place(context: TracingState, node: Any) -> tuple[str, int, str]:
    return context.file, node.lineno + context.lineno_offset, context.func.func.__name__


def _note_call(context: TracingState, node: Any) -> None:
    """Note what a call of the recorder reads: ``<ad>.attribute(x, "name")``, a ``method`` or ``load``."""
    function = getattr(node.func, "id", "")
    if function == "<ad>.attribute":
        attribute: Any = ast.Attribute(value=node.args[0], attr=node.args[1].value, ctx=ast.Load(), lineno=node.lineno)
        attribute.ptr = node.ptr
        _note_attribute(context, attribute)
        node.ptr = attribute.ptr
        if hasattr(attribute, "root"):
            node.root = attribute.root
    elif function == "<ad>.method":
        base, name = node.args[0], node.args[1].value
        if hasattr(base.ptr, name):
            _note_part(context, ast.copy_location(ast.Pass(), node), base, name, getattr(base.ptr, name))
    elif function == "<ad>.load" and len(node.args[1].elts) == 1:
        _note_part(context, node, node.args[0], (node.args[1].elts[0].ptr,))


def follow_captures() -> None:
    """From now on, the Python values that kernels are compiled with can be noted."""
    notes = {"build_Name": _note_name, "build_Attribute": _note_attribute, "build_Subscript": _note_item}
    for kind, note in notes.items():
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
    def wrapped(context: TracingState, node: Any) -> object:
        reader = _noting[-1].reader if _noting else None
        is_static = reader is not None and any(
            ASTResolver.resolve_to(node.func, static, context.global_vars) for static in (ti.static, ti.static_assert)
        )
        if not is_static:
            result = build(context, node)
            if _noting:
                _note_call(context, node)
            return result
        assert reader is not None
        reader.enter_static(1)
        try:
            return build(context, node)
        finally:
            reader.enter_static(-1)

    return wrapped
