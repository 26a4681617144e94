"""The recorder: the rewritten source of a kernel calls it as ``<ad>`` while Taichi walks it once.

Each method delegates to a module; they share a ``Recording``. The kernel that Taichi builds meanwhile only serves to
find types, and is discarded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import taichi_ext.record.assignments as assignments
import taichi_ext.record.calls as calls
import taichi_ext.record.construct as construct
import taichi_ext.record.effects as effects
import taichi_ext.record.operations as operations
import taichi_ext.record.subscripts as subscripts
from taichi_ext import backend
from taichi_ext.program import Const, Effect, Jump, Program, Return, Type
from taichi_ext.program.types import I32
from taichi_ext.record.arguments import bind_arguments, returned_annotations
from taichi_ext.record.constants import Constants, Watched
from taichi_ext.record.handles import Cells, group_of, has_values, value_of
from taichi_ext.record.levels import with_levels
from taichi_ext.record.literals import as_value
from taichi_ext.record.loops import before_loop, enter_for
from taichi_ext.record.recording import Frame, Recording
from taichi_ext.record.rewrite import rewrite
from taichi_ext.record.rewriter import BINARY, RECORDER
from taichi_ext.record.rules import NoRules, Rules
from taichi_ext.record.taichi_types import default_types, dummy

_OPERATORS = [n for n in (*BINARY.values(), "neg", "logical_not", "invert") if n != "matmul"]


class Recorder:
    """The library that one recording calls; ``names``: the meaning of each name in the rewritten source."""

    def __init__(self, kernel: backend.Kernel, rules: Rules, constants: Constants | None, is_reverse: bool) -> None:
        methods = (name for name in dir(type(self)) if not name.startswith("__"))
        self.names = {f"{RECORDER}.{name}": getattr(self, name) for name in methods}
        self.recording = Recording(kernel, self, rules, constants, is_reverse)

    # --- functions and control flow

    def begin(self) -> None:
        """First statement of every function: arguments of the kernel become values and containers."""
        r = self.recording
        if len(r.frames) == 1:
            bind_arguments(r)

    def if_(self, condition: object) -> object:
        self.recording.open_if(as_value(condition))
        return dummy(I32)

    def orelse(self) -> None:
        self.recording.open_else()

    def close(self) -> None:
        self.recording.close()

    def end_if(self) -> None:
        self.recording.end_if()

    def enter_while(self) -> None:
        self.recording.open_while()

    def while_(self, _: None, condition: object) -> object:
        self.recording.set_condition(as_value(condition))
        return dummy(I32)

    def before_loop(self, kind: str, *domain: object) -> None:
        before_loop(self.recording, kind, domain)

    def bound(self, number: int | None = None) -> object:
        domain = self.recording.loop.domain
        return domain if number is None else domain[number]

    def enter_for(self, *names: str) -> None:
        enter_for(self.recording, names)

    def end_loop(self) -> None:
        self.recording.end_loop()

    def jump(self, kind: str) -> None:
        r = self.recording
        if not r.context.is_in_static_for():
            r.add(Jump(kind, place=r.place()))

    def result(self, value: Any) -> Any:
        """``return value``."""
        r, value = self.recording, value_of(value)
        if len(r.frames) > 1:
            return value
        kinds = backend.returned_types(r.kernel)
        values = [value] if len(kinds) == 1 else list(value)
        typed = (construct.typed(r, kind, v) for kind, v in zip(kinds, values, strict=True))
        r.add(Return(tuple(map(group_of, typed)), place=r.place()))
        return None

    # --- statements

    def let(self, name: str, value: object) -> None:
        assignments.let(self.recording, name, value)

    def let_value(self, name: str, value: object, scopes: int) -> object:
        """``(name := value)``, a number of scopes inside its statement."""
        with assignments.outside(self.recording, scopes):
            assignments.let(self.recording, name, value)
        return self.recording.context.value_named(name)

    def bind_static(self, names: object, value: object) -> None:
        assignments.bind_static(self.recording, names, value)

    def unpack(self, names: tuple[str, ...], value: object) -> None:
        assignments.unpack(self.recording, names, value)

    def unpack_to(self, value: object, places: tuple[object, ...]) -> None:
        assignments.unpack_to(self.recording, places, value)

    def store(self, value: object, base: object, index: object) -> None:
        """``base[index] = value``: the value is evaluated first, as in Python."""
        assignments.store(self.recording, base, index, value)

    def update_local(self, name: str, operator: str, op: str, value: object) -> None:
        assignments.update_local(self.recording, name, op, value)

    def update(self, base: object, index: object, operator: str, op: str, value: object) -> None:
        assignments.update_place(self.recording, assignments.place_of(self.recording, base, index), op, value)

    def augment(self, target: object, op: str, value: object) -> None:
        """``target += value`` of a place, in a Python function."""
        assignments.update_place(self.recording, target, op, value)

    def assert_(self, condition: object, message: object) -> None:
        r, condition = self.recording, value_of(condition)
        if not has_values(condition) and condition:
            return  # known when the kernel is compiled
        r.add(Effect("assert", (as_value(condition), message), place=r.place()))

    # --- values

    def operate(self, name: str, *args: object) -> Any:
        return operations.operate(self.recording, name, *args)

    def primal(self, x: object) -> Any:
        return value_of(x)

    def pos(self, x: object) -> object:
        return value_of(x)

    def matmul(self, a: object, b: object) -> object:
        return calls.call(self.recording, backend.matrix_ops.matmul, [a, b], {})

    def percent(self, text: str, values: object) -> object:
        """``text % values``."""
        return effects.percent(text, value_of(values))

    def compare(self, names: tuple[str, ...], *operands: object) -> object:
        return operations.compare(self.recording, names, *operands)

    def bool_op(self, kind: str, *values: object) -> object:
        return operations.bool_op(self.recording, kind, *values)

    def where(self, condition: object, then: object, orelse: object) -> Any:
        return operations.where(self.recording, condition, then, orelse)

    def cast(self, x: object, dtype: Any) -> Any:
        return construct.typed(self.recording, dtype, x)

    def literal(self, x: float, kind: Type) -> Const:
        """A number of exactly this type."""
        return Const(x, kind)

    def slice(self, start: object, stop: object, step: object) -> Any:
        return slice(start, stop, step)

    def load(self, base: object, index: tuple[object, ...]) -> object:
        return subscripts.load(self.recording, base, index)

    def attribute(self, base: object, name: str) -> object:
        return subscripts.attribute(self.recording, base, name)

    def format(self, template: str, *values: object, **named: object) -> object:
        return effects.format_text(template, values, named)

    def spread(self, values: object) -> object:
        """``*values`` in a call."""
        found = value_of(values)
        return list(found) if not isinstance(values, Cells) else [values.at((n,)) for n in range(values.shape[0])]

    # --- Python numbers that are parameters

    def watching(self) -> contextlib.AbstractContextManager[Watched]:
        """Watch whether Python code within the context may read one."""
        return self.recording.constants.watching()

    def replaced_names(self, function: Any) -> dict[str, object]:
        """The names of a Python function for such numbers, with their replacements."""
        return self.recording.constants.replaced(function)

    def python_attribute(self, owner: object, name: str) -> object:
        """An attribute that a Python function reads."""
        return self.recording.constants.read_attribute(owner, name, getattr(owner, name))

    # --- calls

    def call(self, function: object, *args: object, **keywords: object) -> Any:
        return calls.call(self.recording, function, list(args), keywords)

    def run(self, function: object, *args: object, **keywords: object) -> None:
        """A call whose result is not used."""
        calls.call(self.recording, function, list(args), keywords, is_statement=True)

    def method(self, base: object, name: str, *args: object, **keywords: object) -> object:
        return calls.method(self.recording, base, name, list(args), keywords, False)


def _operator(name: str) -> Callable[..., object]:
    def method(self: Recorder, *args: object) -> object:
        return operations.operate(self.recording, name, *args)

    method.__name__ = name
    return method


for _name in _OPERATORS:
    setattr(Recorder, _name, _operator(_name))
for _method in vars(Recorder).values():
    if callable(_method) and hasattr(_method, "__dict__"):
        backend.known_in_kernels(_method)


@backend.deep_recursion()
def record(
    kernel: backend.Kernel,
    args: tuple[Any, ...],
    rules: Rules | None = None,
    captures: backend.Captures | None = None,
    constants: Constants | None = None,
    *,
    is_reverse: bool = False,
) -> Program:
    """The program of a kernel, for arguments of the types of these.

    Args:
        kernel: Taichi's kernel object, ``backend.primal_kernel(k)[0]``.
        args: all its arguments, in order.
        rules: the users' rules that apply; None for none.
        captures: takes the Python values that become part of the program.
        constants: the Python numbers that are parameters; takes the locals of the program for them.
        is_reverse: write users' rules, and gradients that are stopped or replaced, so that Taichi's own reverse mode
            differentiates them.

    Returns:
        The program.

    Raises:
        UnsupportedError: the kernel uses a construct that cannot be recorded; with the user's file, line and text.
    """
    rewritten = rewrite(kernel.func, None)
    recorder = Recorder(kernel, rules or NoRules(), constants, is_reverse)
    r = recorder.recording
    scope = {**backend.global_variables(kernel.func), **recorder.names}
    for position in kernel.template_slot_locations:
        scope[kernel.arguments[position].name] = args[position]
    throwaway = backend.FusedKernel(kernel, [])
    throwaway.captures = captures or throwaway.captures
    throwaway.captures.reader = constants
    context = backend.make_context(
        kernel.func,
        rewritten.source,
        scope,
        kernel=throwaway,
        arguments=list(args),
        argument_features=backend.argument_features(kernel, args),
        places=rewritten.places,
        is_brief=True,
    )
    r.frames.append(Frame(context, None, False))
    backend.materialize()
    throwaway.trace(rewritten.tree(), context, f"{kernel.func.__name__}_record", lambda: False)
    throwaway.captures.reader = None  # which refers to the arguments: captures are kept as long as the kernel
    containers = (*r.containers.arrays.values(), *r.containers.fields.values())
    returns = returned_annotations(kernel)
    body, file = with_levels(r.body()), rewritten.source[0]
    return Program(kernel.func.__name__, r.arguments, returns, body, containers, file, *default_types())
