"""The state of one recording: functions that are being walked, open blocks, fields and arrays met so far."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field, replace
from typing import Any

import taichi_ext.program as ir
from taichi_ext import backend
from taichi_ext.errors import UnsupportedError
from taichi_ext.labels import identifier
from taichi_ext.program.values import U1
from taichi_ext.record.literals import type_of
from taichi_ext.record.variables import Constants

_ALERT = "alert"  # a statement in the place of one that raises it
_POSITION = re.compile(r'File "(.*?)", line (\d+), in (\S+):\n(.*)', re.DOTALL)


@dataclass
class Frame:
    """A function that is being walked, and the place of its call."""

    context: object
    caller: ir.Place | None
    is_library: bool


@dataclass
class OpenBlock:
    """An open block, and the statement that it will be part of once it is closed."""

    statements: list[ir.Statement] = field(default_factory=list)
    head: Any = None  # If: condition, place and the statements before else; While, For: the statement so far


@dataclass
class NextLoop:
    """The loop whose body comes next."""

    statement: Any = None  # with its domain; None before the first one
    domain: tuple[Any, ...] = ()  # the domain that Taichi walks instead
    config: dict[str, Any] = field(default_factory=dict)  # the settings of the loop to come


@dataclass(eq=False)
class Recording:
    """The state shared by all parts of the recorder."""

    kernel: backend.Kernel
    make_library: InitVar[Callable[[Recording], Any]]
    rules: Any  # of users, that apply to the kernel
    constants: Constants
    order: int  # of the derivatives
    arguments: tuple[ir.Argument, ...] = ()
    frames: list[Frame] = field(default_factory=list)
    blocks: list[OpenBlock] = field(default_factory=lambda: [OpenBlock()])
    containers: dict[int, ir.Container] = field(default_factory=dict)  # of arguments and the fields met, by identity
    loop: NextLoop = field(default_factory=NextLoop)
    # the source of each local, with an index, that was declared as a copy; how often both had changed
    _copies: dict[Any, Any] = field(default_factory=dict)
    _changes: Counter[ir.Local] = field(default_factory=Counter)
    stopped: list[object] = field(default_factory=list)  # the functions and marks whose rules are being walked
    has_alerts: bool = False
    of_shapes: set[ir.Statement] = field(default_factory=set)  # of ``layers``
    _places: dict[Any, ir.Place | None] = field(default_factory=dict)

    def __post_init__(self, make_library: Callable[[Recording], Any]) -> None:
        self.constants.library = make_library(self)

    @property
    def library(self) -> Any:
        """The functions that the rewritten source calls, by name."""
        return self.constants.library

    # --- functions and places

    @property
    def frame(self) -> Frame:
        return self.frames[-1]

    @property
    def context(self) -> Any:
        return self.frames[-1].context

    def place(self) -> ir.Place | None:
        """The place of the current statement in the user's source."""
        for frame in reversed(self.frames):
            if not frame.is_library:
                break
            if frame.caller is not None:
                return frame.caller
        key = (backend.source_location(), self.frames[-1].caller)
        if key not in self._places:
            place, match = key[1], _POSITION.match(key[0])
            if match:
                place = ir.Place(match[1], int(match[2]), match[4].strip("\n"), match[3], place)
            self._places[key] = place
        return self._places[key]

    # --- statements

    def add(self, statement: ir.Statement) -> None:
        if self.stopped and _writes(statement):
            raise UnsupportedError("A rule must not write to fields or arrays; it returns a tangent.")
        self.blocks[-1].statements.append(statement)
        if isinstance(statement, ir.Store) and isinstance(statement.target, ir.Read):
            self._changes[statement.target.local] += 1

    def note_copy(self, local: ir.Local, index: tuple[int, ...], value: ir.Value) -> None:
        """Remember where the value of a local, or of an entry of it, was read first."""
        if isinstance(value, ir.Read) and all(isinstance(i, int) for i in value.index):
            source = self.origin(value)
            self._copies[local, index] = source, self._changes[source.local], self._changes[local]

    def origin(self, value: ir.Value) -> Any:
        """The local that a local is a copy of, if neither has changed since."""
        if not isinstance(value, ir.Read) or (value.local, value.index) not in self._copies:
            return value
        source, *changes = self._copies[value.local, value.index]
        return source if changes == [self._changes[source.local], self._changes[value.local]] else value

    def open_block(self, head: ir.If | ir.While | ir.For | None = None) -> None:
        """Start the block of a statement; without one, that of an else."""
        self.blocks.append(OpenBlock(head=head))

    def close(self) -> None:
        """The end of one side of a branch."""
        block = self.blocks[-1]
        if block.head is None:  # else
            self.blocks.pop()
            self.blocks[-1].head = replace(self.blocks[-1].head, orelse=tuple(block.statements))
        else:
            block.head = replace(block.head, then=tuple(block.statements))

    def end_if(self) -> None:
        self.add(self.blocks.pop().head)

    def set_condition(self, condition: ir.Value) -> None:
        """Set the condition of a while loop; if computing it took statements, a branch leaves the loop."""
        block = self.blocks[-1]
        if block.statements:
            ends = ir.Op("logical_not", (condition,), U1)
            self.add(ir.If(ends, (ir.Jump("break"),), place=self.place()))
        else:
            block.head = replace(block.head, condition=condition)

    def end_loop(self) -> None:
        block = self.blocks.pop()
        self.add(replace(block.head, body=tuple(block.statements)))

    def body(self) -> ir.Body:
        assert len(self.blocks) == 1
        return tuple(self.blocks[0].statements)

    # --- fields and arrays

    def container(self, obj: object) -> ir.Container:
        if id(obj) not in self.containers:
            if isinstance(obj, backend.AnyArray):
                raise UnsupportedError(
                    "An array that is a member of an object is read or written here. Pass it to the kernel as an "
                    "argument, or keep the values in a field."
                )
            name = identifier(obj, [*self.context.local_scopes, self.context.global_vars])
            self.containers[id(obj)] = field_container(obj, name)  # which keeps it alive
        return self.containers[id(obj)]

    def alert_later(self, what: str, is_raised: ir.Value, at: ir.Value) -> None:
        """Record an alert; its field cannot be made while Taichi compiles a kernel."""
        self.has_alerts = True
        self.blocks[-1].statements.append(ir.Effect(_ALERT, (what, is_raised, at), place=self.place()))

    def with_alerts(self, body: ir.Body) -> ir.Body:
        """The block with the statements that raise its alerts."""

        def raising(s: ir.Statement) -> ir.Statement:
            if not isinstance(s, ir.Effect) or s.function != _ALERT:
                return s
            what, is_raised, at = s.args
            return self.alert(what, is_raised, s.place, at=at)

        return ir.mapped(body, raising) if self.has_alerts else body

    def alert(
        self,
        what: str,
        is_raised: ir.Value,
        place: ir.Place | None,
        stored: object = None,
        *,
        is_undefined: bool = False,
        at: ir.Value | None = None,
    ) -> ir.If:
        """A statement that notes what a kernel has to say, ``at`` a place of several: see ``backend.alert_number``."""
        field = backend.alert_field()
        container = self.containers.setdefault(id(field), field_container(field, "alerts"))
        number = backend.alert_number(what, place, stored, is_undefined=is_undefined)
        entry = ir.Load(container, (ir.Const(number, ir.I32), at or ir.Const(0, ir.I32)))
        return ir.If(is_raised, (ir.Assign(entry, ir.Const(1, ir.I32), place=place),), place=place)


def field_container(field: Any, name: str) -> ir.Container:
    """The container of a scalar or matrix field."""
    element_shape = (field.n, field.m)[: field.ndim] if isinstance(field, backend.MatrixField) else ()
    shape, offset = tuple(field.shape), tuple(backend.field_offset(field) or ())
    return ir.Container(name, type_of(field.dtype), len(shape), element_shape, field, False, shape, offset)


def _writes(s: ir.Statement) -> bool:
    """Whether a statement may change a field or an array."""
    if isinstance(s, ir.Effect):
        name = s.function if isinstance(s.function, str) else getattr(s.function, "__name__", "")
        return name.lstrip(".") in ("append", "deactivate")
    return isinstance(s, ir.Store) and isinstance(s.target, ir.Load)
