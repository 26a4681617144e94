"""Whether fields and arrays belong to the program that runs: Taichi reads freed memory where they do not."""

# Taichi declares attributes as None that have a value once there is a program and a kernel.
# pyright: reportOptionalMemberAccess=false

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from taichi_ext.backend.opaque import CoreNode, tree_of
from taichi_ext.errors import EndedFieldError
from taichi_ext.host import RUNTIME, Expr, Field, SNodeTree, foreign_problem, ti

_counter = itertools.count(1)


@dataclass(frozen=True)
class Moment:
    """A moment in the life of a program: which trees of fields there were."""

    program: Callable[[], object]  # a weak reference
    serial: int  # between those of trees and arrays from before and from after
    destroyed: int  # how many trees had been destroyed


class _ProgramFields:
    """The fields of one program, by the addresses of their expressions, which live as long as their Python objects."""

    def __init__(self, program: Callable[[], Any]) -> None:
        self.program = program
        self.destroyed: set[int] = set()  # numbers of trees
        self.version = next(_counter)  # changes when a tree is destroyed, and is another one in each program
        self.known: defaultdict[str, dict[int, Any]] = defaultdict(dict)  # until a tree is destroyed
        self.lost: list[tuple[int, str]] = []  # destroyed trees: serial numbers, and texts about their contents
        self._addresses: set[int] = set()
        self._ended: list[object] = []  # components of trees that were destroyed before Taichi laid out all fields
        self._serials = {n: next(_counter) for n in range(program().get_snode_tree_size())}

    def serial(self, tree: int) -> int:
        """A number that no other tree has had, or will have; those of trees are given again."""
        return self._serials.setdefault(tree, next(_counter))

    def add(self, tree: int) -> None:
        self.destroyed.discard(tree)
        self._serials[tree] = next(_counter)

    def moment(self) -> Moment:
        return Moment(self.program, next(_counter), len(self.lost))

    def lives(self, serial: int) -> bool:
        """Whether a tree is one of this program and has not been destroyed."""
        return serial in self._serials.values()

    def has(self, component: Expr) -> bool:
        address = component.ptr.get_underlying_ptr_address()
        if address not in self._addresses:
            trees = range(self.program().get_snode_tree_size())
            self._addresses = self._placed(n for n in trees if n not in self.destroyed)
        if address in self._addresses:
            return True
        return any(component is c for c in _pending()) and not any(component is c for c in self._ended)

    def before_destroy(self, tree: int) -> None:
        placed = self._placed([tree])
        self._ended += [c for c in _pending() if c.ptr.get_underlying_ptr_address() in placed]

    def destroy(self, tree: int, text: str) -> None:
        self.destroyed.add(tree)
        self.lost.append((self._serials.pop(tree, 0), text))
        self.version = next(_counter)
        self.known.clear()
        self._addresses = set()

    def _placed(self, trees: Iterable[int]) -> set[int]:
        nodes, result = [self.program().get_snode_root(n) for n in trees], set()
        while nodes:
            node = nodes.pop()
            for child in (node.get_ch(n) for n in range(node.get_num_ch())):
                if child.is_place():
                    result.add(child.get_expr().get_underlying_ptr_address())
                else:
                    nodes.append(child)
        return result


def _pending() -> list[Expr]:
    """Components that are not laid out yet."""
    runtime = RUNTIME.state()
    return [*runtime.global_vars, *runtime.grad_vars, *runtime.dual_vars]


_current: _ProgramFields | None = None


def _layout() -> _ProgramFields:
    global _current
    program = RUNTIME.program()
    if _current is None or _current.program() is not program:
        _current = _ProgramFields(weakref.ref(program))
    return _current


def layout_version() -> int:
    """A number that changes when a tree of fields is destroyed, and with the program; -1 without one."""
    return _layout().version if RUNTIME.program() is not None else -1


def known_of_layout(what: str) -> dict[int, Any]:
    """What is known of trees or nodes, by their numbers, until a tree is destroyed or the program ends."""
    return _layout().known[what]


def tree_serial(node: CoreNode) -> int:
    """Tells the tree of a node, as Taichi's core has it, from all others, those of other programs included."""
    return _layout().serial(tree_of(node))


def is_tree_alive(serial: int) -> bool:
    """Whether the tree with a serial number still exists."""
    return RUNTIME.program() is not None and _layout().lives(serial)


class InTree:
    """Something of ours that reads and writes a part of a tree of fields, which exists."""

    __slots__ = ()
    tree_serial: int

    def copy(self) -> Any:
        """What it holds."""
        raise NotImplementedError

    def put_back(self, copy: Any) -> None:
        """Store that again."""
        raise NotImplementedError


class Uses:
    """The trees of fields that a compiled kernel uses, which it accesses without checking that they exist."""

    def __init__(self, kernel: str = "", fields: Mapping[str, ti.Field] | None = None) -> None:
        self._kernel = kernel  # its name in messages, as those of the fields are
        given = (fields or {}).items()
        self._trees = {tree_serial(component.ptr.snode()): name for name, f in given for component in f.vars}
        self._version = layout_version()

    def check_not_ended(self) -> None:
        """Raise where one of them no longer exists; this is quick where none has been destroyed since."""
        version = layout_version()
        if version == self._version:
            return
        for serial, name in self._trees.items():
            if not is_tree_alive(serial):
                raise EndedFieldError(
                    f"{self._kernel} uses the field {name}, which no longer exists: ti.init was called since the "
                    "kernel was compiled, or its tree was destroyed. Pass a field that is made again as an argument "
                    "(ti.template()), or destroy it after the call."
                )
        self._version = version


def moment() -> Moment:
    """Now, to be compared with later."""
    return _layout().moment()


def lost_since(before: Moment) -> str:
    """The fields that existed at a moment and no longer do, in words; empty where all of them exist."""
    program = RUNTIME.program()
    if program is None or before.program() is not program:
        return "ti.init or ti.reset was called"
    lost = (text for serial, text in _layout().lost[before.destroyed :] if serial <= before.serial)
    tree = next(lost, None)
    return "" if tree is None else f"the tree of {tree} was destroyed"


def is_field_alive(field: Field) -> bool:
    """Whether a field is one of the program that runs, and its tree has not been destroyed."""
    return RUNTIME.program() is not None and all(_layout().has(component) for component in field.vars)


def is_made_since(obj: object, before: Moment) -> bool:
    """Whether a field, an entry of one or a ti.ndarray was made after a moment."""
    if isinstance(obj, ti.StructField):
        return all(is_made_since(member, before) for member in obj.field_dict.values())
    if isinstance(obj, ti.Field):
        placed = [component for component in obj.vars if not any(component is c for c in _pending())]
        return all(tree_serial(component.ptr.snode()) > before.serial for component in placed)
    serial = obj.tree_serial if isinstance(obj, InTree) else obj.__dict__.get(_SERIAL, 0)
    return serial > before.serial


_PROGRAM, _SERIAL = "_taichi_ext_program", "_taichi_ext_serial"
_first_program = RUNTIME.program() and weakref.ref(RUNTIME.program())  # of arrays made before this import


def is_array_alive(array: ti.Ndarray) -> bool:
    program = array.__dict__.get(_PROGRAM, _first_program)
    return program is not None and program() is not None and program() is RUNTIME.program()


def ended_problem(obj: object) -> str:
    """Why a field or ti.ndarray cannot be used, or no longer; empty where it can, and for anything else."""
    if isinstance(obj, ti.StructField):
        return next(filter(None, map(ended_problem, obj.field_dict.values())), "")
    if isinstance(obj, ti.Field) and not is_field_alive(obj):
        return _GONE
    if isinstance(obj, ti.Ndarray) and not is_array_alive(obj):
        return "no longer exists: ti.init was called since it was made; create it again"
    if isinstance(obj, InTree) and not is_tree_alive(obj.tree_serial):
        return _GONE
    return foreign_problem(obj)


def check_not_ended(obj: object, what: str = "") -> None:
    """Raise for a field or array that no longer exists, before Taichi reads or writes freed memory."""
    problem = ended_problem(obj)
    if problem:
        kind = "A ti.ndarray" if isinstance(obj, ti.Ndarray) else "A field"
        raise EndedFieldError(f"{what or f'{kind} that is read or written here'} {problem}.")


_GONE = "no longer exists: ti.init was called since it was made, or its tree was destroyed; create it again"


_make_array, _destroy, _finalize = ti.Ndarray.__init__, SNodeTree.destroy, ti.FieldsBuilder._finalize


def _remember_program(self: ti.Ndarray) -> None:
    _make_array(self)
    self.__dict__[_PROGRAM] = weakref.ref(RUNTIME.program())
    self.__dict__[_SERIAL] = next(_counter)


def _note_destroyed(self: SNodeTree) -> None:
    number = None if self.destroyed or self.prog is not RUNTIME.program() else self.id
    text = "" if number is None else _first_field(self.prog.get_snode_root(number))
    if number is not None:
        _layout().before_destroy(number)
    _destroy(self)
    if number is not None:
        _layout().destroy(number, text)


def _first_field(node: CoreNode) -> str:
    """The name, in messages, of the first field below a node of a tree."""
    for child in (node.get_ch(n) for n in range(node.get_num_ch())):
        if child.is_place():
            return f"a field of shape {tuple(ti.SNode(child).shape)}"
        result = _first_field(child)
        if result:
            return result
    return ""


def _note_finalized(self: ti.FieldsBuilder, *args: object, **kwargs: object) -> SNodeTree:
    _layout()
    tree = _finalize(self, *args, **kwargs)
    _layout().add(tree.id)  # numbers are given again
    return tree


_OWNER: Any = ti.ScalarNdarray if "__del__" in vars(ti.ScalarNdarray) else ti.Ndarray
_delete_array: Any = _OWNER.__del__


def _delete_if_alive(self: Any) -> None:
    """Taichi deletes by address, from whatever program runs: there may be an array of that one at the address."""
    if is_array_alive(self):
        _delete_array(self)


ti.Ndarray.__init__ = _remember_program
_OWNER.__del__ = _delete_if_alive
SNodeTree.destroy = _note_destroyed
ti.FieldsBuilder._finalize = _note_finalized
