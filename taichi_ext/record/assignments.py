"""Declarations and assignments of a recorded kernel."""

from __future__ import annotations

import types
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.errors import UnsupportedError, raise_baked
from taichi_ext.program import Assign, Declare, FoldedConst, Load, Local, Read, Tensor, Type, Update, Value, walk
from taichi_ext.record.handles import DynamicList, Format, Record, VectorPlace, sequence_like, value_of, with_members
from taichi_ext.record.literals import as_value, convert, described
from taichi_ext.record.operations import operate, tensor
from taichi_ext.record.recording import Recording
from taichi_ext.record.subscripts import places

# For these, Taichi converts the value to the type of the place before combining.
_ATOMIC = ("add", "sub", "bit_and", "bit_or", "bit_xor")


def declare(r: Recording, name: str, value: Any, kind: str = "user") -> Any:
    """A new local that holds a value; Python objects are returned unchanged."""
    value = value_of(value)
    kind = "temporary" if kind == "user" and r.frame.is_library else kind
    if isinstance(value, (list, tuple)):
        return sequence_like(value, [declare(r, f"{name}_{n}", v, kind) for n, v in enumerate(value)])
    if isinstance(value, dict):
        return {k: declare(r, f"{name}_{k}", v, kind) for k, v in value.items()}
    if isinstance(value, Record):
        return with_members(value, lambda k, v: declare(r, f"{name}_{k}", v, kind))
    if isinstance(value, Tensor):
        local = Local(name, value.dtype, value.shape, kind)
        r.add(Declare(local, tuple(convert(e, local.dtype) for e in value.entries), place=r.place()))
        for index, e in zip(np.ndindex(value.shape), value.entries, strict=True):
            r.note_copy(local, tuple(index), e)
        return VectorPlace(local, (), value.shape)
    if _is_object(value):
        return value
    given = _kept(as_value(value))
    local = Local(name, given.dtype, (), kind)
    r.add(Declare(local, (given,), place=r.place()))
    r.note_copy(local, (), given)
    return Read(local)


def _kept(value: Value, kind: Type | None = None) -> Value:
    """A value to be named, or stored to a place of a type; raises if a whole number depends on parameters."""
    if isinstance(value, FoldedConst) and not (kind or value.dtype).is_real:
        raise_baked("A whole number")
    return value


def _is_object(x: object) -> bool:
    """Whether assigning a value makes a second name for the same object."""
    if isinstance(x, Value):
        return False
    is_known = x is None or isinstance(x, (str, Format, DynamicList, backend.Field, backend.AnyArray, backend.DataType))
    return is_known or callable(x) or hasattr(x, "_data_oriented") or isinstance(x, types.ModuleType)


def frozen(r: Recording, value: object, name: str = "value") -> Any:
    """The current value, in separate locals; a constant is returned unchanged."""
    return value_of(declare(r, name, value, "temporary"))


def _require_mutable(r: Recording, name: str) -> None:
    if name in r.context.kernel_args:
        raise backend.SyntaxFault(
            f'Kernel argument "{name}" is immutable in the kernel. '
            f"If you want to change its value, please create a new variable."
        )


def let(r: Recording, name: str, value: object) -> None:
    """``name = value``."""
    if r.context.is_var_declared(name):
        _require_mutable(r, name)
        assign_to(r, r.context.value_named(name), value)
    else:
        r.context.create_variable(name, declare(r, name, value))


def let_value(r: Recording, name: str, value: object, scopes: int) -> object:
    """``(name := value)``, a number of scopes inside its statement, which the name belongs to."""
    opened = [r.context.local_scopes.pop() for _ in range(scopes)]
    try:
        let(r, name, value)
    finally:
        r.context.local_scopes.extend(reversed(opened))
    return r.context.value_named(name)


def bind_static(r: Recording, names: Any, value: Any) -> None:
    if isinstance(names, str):
        r.context.create_variable(names, value)
        return
    for name, v in zip(names, value, strict=True):
        r.context.create_variable(name, v)


def unpack(r: Recording, value: Any, places: tuple[Any, ...]) -> None:
    """``a, b[i] = value``: all values are read before anything is written."""
    value = value_of(value)
    if isinstance(value, Record):
        value = list(value.members.values())
    parts = list(value.entries) if isinstance(value, Tensor) else list(value)
    if len(parts) != len(places):
        raise backend.SyntaxFault("The number of targets is not equal to value length")
    if not all(isinstance(place, str) and not r.context.is_var_declared(place) for place in places):
        parts = [declare(r, "value", p, "temporary") for p in parts]
    for place, part in zip(places, parts, strict=True):
        if isinstance(place, str):
            let(r, place, part)
        else:
            store(r, part, *place)


# --- stores


def cells_of(target: object) -> list[Read | Load]:
    """The scalar places of a place."""
    if isinstance(target, (Read, Load)):
        return [target]
    if isinstance(target, VectorPlace):
        return target.cells()
    if isinstance(target, Record):
        return [c for member in target.members.values() for c in cells_of(member)]
    if isinstance(target, list):
        return [c for member in target for c in cells_of(member)]
    raise UnsupportedError(f"A {described(target)} is assigned to. Only variables and entries of fields can change.")


def parts_for(target: object, value: object) -> list[Value]:
    """A scalar for each place of a target."""
    value = value_of(value)
    if isinstance(target, Record):
        given = value.members if isinstance(value, Record) else dict.fromkeys(target.members, value)
        return [p for name, member in target.members.items() for p in parts_for(member, given[name])]
    count = len(cells_of(target))
    if isinstance(value, (list, tuple)):
        value = tensor(value)
    entries = value.entries if isinstance(value, Tensor) else [value] * count
    if len(entries) != count:
        raise backend.TypeFault(f"A value of {len(entries)} entries is assigned to a place of {count}.")
    return [as_value(e) for e in entries]


def together(r: Recording, targets: list[Read | Load], values: list[Value]) -> list[Value]:
    """Values that are all evaluated before the first store, where that matters."""
    written = {t.memory for t in targets}

    def meets(value: Value) -> bool:
        return any(isinstance(n, (Read, Load)) and n.memory in written for n in walk(value))

    if len(targets) > 1 and any(map(meets, values[1:])):
        return [frozen(r, v) for v in values]
    return values


def assign_to(r: Recording, target: object, value: object) -> None:
    targets = cells_of(target)
    for cell, v in zip(targets, together(r, targets, parts_for(target, value)), strict=True):
        r.add(Assign(cell, _kept(v, cell.dtype), place=r.place()))


def place_of(r: Recording, base: object, index: object) -> object:
    """The place ``base[index]`` or ``base.name``, to store to."""
    if not isinstance(index, str):
        return places(r, base, index)
    numbers = backend.swizzle_indices(index) if isinstance(base, (VectorPlace, Tensor)) else None
    if numbers is not None:
        if not isinstance(base, VectorPlace):
            raise UnsupportedError("An entry of an expression is assigned to. Give the expression a name first.")
        return base.at((numbers[0],)) if len(numbers) == 1 else [base.at((n,)) for n in numbers]
    return base.members[index] if isinstance(base, Record) else getattr(base, index)


def store(r: Recording, value: object, base: object, index: object) -> None:
    """``base[index] = value`` or ``base.name = value``: the value is evaluated first, as in Python."""
    assign_to(r, place_of(r, base, index), value)


def update_local(r: Recording, name: str, op: str, value: object) -> None:
    """``name += value`` and the like."""
    _require_mutable(r, name)
    update_place(r, r.context.value_named(name), op, value)


def update_place(r: Recording, target: object, op: str, value: object) -> None:
    """``target += value`` and the like."""
    if op == "matmul":
        assign_to(r, target, r.library.matmul(target, value))
        return
    targets = cells_of(target)
    for cell, v in zip(targets, together(r, targets, parts_for(target, value)), strict=True):
        _update(r, cell, op, v)


def _update(r: Recording, target: Read | Load, op: str, value: Value) -> None:
    """Sums and bit operations stay updates, which Taichi makes atomic; other updates of locals become assignments."""
    value = _kept(value, target.dtype)
    if isinstance(target, Load):
        r.add(Update(target, op, value, place=r.place()))
    elif op in _ATOMIC:
        r.add(Update(target, op, convert(value, target.dtype), place=r.place()))
    else:
        combined = convert(operate(r, op, target, value), target.dtype)
        r.add(Assign(target, combined, place=r.place()))
