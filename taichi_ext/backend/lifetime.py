"""Whether fields and arrays belong to the program that runs: Taichi reads freed memory where they do not."""

# Taichi declares as None what it holds once there is a program and a kernel.
# pyright: reportOptionalMemberAccess=false

from __future__ import annotations

import weakref
from typing import Any

from taichi import Field, FieldsBuilder, Ndarray, ScalarNdarray, StructField
from taichi._snode.snode_tree import SNodeTree
from taichi.lang import impl

from taichi_ext.errors import EndedFieldError


class _Layout:
    """The fields of one program, by the addresses of their expressions, which live as long as their Python objects."""

    def __init__(self, program: Any) -> None:
        self.program = program
        self.destroyed: set[int] = set()  # numbers of trees
        self.version = 0  # changes when a tree is destroyed
        self._addresses: set[int] = set()

    def has(self, component: Any) -> bool:
        address = component.ptr.get_underlying_ptr_address()
        if address not in self._addresses:
            self._addresses = self._placed()
        return address in self._addresses or any(component is pending for pending in _pending())

    def destroy(self, tree: int) -> None:
        self.destroyed.add(tree)
        self.version += 1
        self._addresses = set()

    def _placed(self) -> set[int]:
        program, found = impl.get_runtime().prog, set()
        nodes = [program.get_snode_root(n) for n in range(program.get_snode_tree_size()) if n not in self.destroyed]
        while nodes:
            node = nodes.pop()
            for child in (node.get_ch(n) for n in range(node.get_num_ch())):
                if child.is_place():
                    found.add(child.get_expr().get_underlying_ptr_address())
                else:
                    nodes.append(child)
        return found


def _pending() -> list[Any]:
    """Components that are not laid out yet."""
    runtime = impl.get_runtime()
    return [*runtime.global_vars, *runtime.grad_vars, *runtime.dual_vars]


_current: Any = None


def _layout() -> _Layout:
    global _current
    program = impl.get_runtime().prog
    if _current is None or _current.program() is not program:
        _current = _Layout(weakref.ref(program))
    return _current


def layout_version() -> int:
    """A number that changes when a tree of fields is destroyed."""
    return _layout().version


def is_field_alive(field: Any) -> bool:
    """Whether a field is one of the program that runs, and its tree has not been destroyed."""
    return impl.get_runtime().prog is not None and all(_layout().has(component) for component in field.vars)


_PROGRAM = "_taichi_ext_program"
_first_program = impl.get_runtime().prog and weakref.ref(impl.get_runtime().prog)  # of arrays made before this import


def is_array_alive(array: Ndarray) -> bool:
    """Whether a ti.ndarray is one of the program that runs."""
    program = array.__dict__.get(_PROGRAM, _first_program)
    return program is not None and program() is not None and program() is impl.get_runtime().prog


def ended_problem(obj: Any) -> str:
    """Why a field or ti.ndarray cannot be used any more; empty where it can, and for anything else."""
    if isinstance(obj, StructField):
        return next(filter(None, map(ended_problem, obj.field_dict.values())), "")
    if isinstance(obj, Field) and not is_field_alive(obj):
        return "no longer exists: ti.init was called since it was made, or its tree was destroyed; create it again"
    if isinstance(obj, Ndarray) and not is_array_alive(obj):
        return "no longer exists: ti.init was called since it was made; create it again"
    return ""


def refuse_ended(obj: Any, what: str) -> None:
    """Raise for a field that no longer exists; for use while a kernel is traced."""
    problem = ended_problem(obj)
    if problem:
        raise EndedFieldError(f"{what} {problem}.")


_make_array, _destroy, _finalize = Ndarray.__init__, SNodeTree.destroy, FieldsBuilder._finalize


def _remember_program(self: Any) -> None:
    _make_array(self)
    self.__dict__[_PROGRAM] = weakref.ref(impl.get_runtime().prog)


def _note_destroyed(self: Any) -> None:
    number = None if self.destroyed or self.prog is not impl.get_runtime().prog else self.id
    _destroy(self)
    if number is not None:
        _layout().destroy(number)


def _note_finalized(self: Any, *args: Any, **kwargs: Any) -> Any:
    tree = _finalize(self, *args, **kwargs)
    _layout().destroyed.discard(tree.id)  # numbers are given again
    return tree


_delete_array = ScalarNdarray.__del__


def _delete_if_alive(self: Any) -> None:
    """Taichi deletes by address, from whatever program runs: there may be an array of that one at the address."""
    if is_array_alive(self):
        _delete_array(self)


Ndarray.__init__ = _remember_program
ScalarNdarray.__del__ = _delete_if_alive
SNodeTree.destroy = _note_destroyed
FieldsBuilder._finalize = _note_finalized
