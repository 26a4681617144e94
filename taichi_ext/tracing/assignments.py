"""Declarations and assignments in a traced kernel."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

from taichi_ext import backend
from taichi_ext.derivative.references import ByReference
from taichi_ext.derivative.values import (
    Scalar,
    StructValue,
    TensorValue,
    entries_of,
    is_active,
    is_python_number,
    is_tensor_like,
    make_tensor,
    primal_of,
    shape_of,
)
from taichi_ext.errors import UnsupportedError, refuse_baked
from taichi_ext.tracing import subscripts
from taichi_ext.tracing.bookkeeping import Bookkeeping
from taichi_ext.tracing.containers import Ref
from taichi_ext.tracing.index_forms import Locals
from taichi_ext.tracing.local_variables import Local, LocalStruct, LocalTensor


class Assignments(Bookkeeping):
    """The layer of a tracer that reads places, declares locals and stores values."""

    # --- values

    def value_of(self, x: Any) -> Any:
        """What a name or place reads as."""
        if isinstance(x, (Ref, ByReference, *Locals)):
            return x.value()
        if isinstance(x, subscripts.StructRef):
            return x.value()
        if isinstance(x, (list, tuple)) and any(
            isinstance(e, (Ref, ByReference, list, tuple, subscripts.StructRef, *Locals)) for e in x
        ):
            return type(x)(self.value_of(e) for e in x)
        if isinstance(x, dict):
            return {k: self.value_of(v) for k, v in x.items()}
        return x

    def primal(self, x: Any) -> Any:
        value = self.value_of(x)
        if _has_tangent_entry(value):
            raise UnsupportedError("A rule must be linear in its tangents; this one uses the value of a tangent.")
        return primal_of(value)

    def condition(self, x: Any) -> Any:
        return self.primal(x)

    def freeze(self, x: Any, key: Any) -> Any:
        """The value as it is now, in variables of its own."""
        key = self.declaration_key("<frozen>") if key is None else key
        return self.value_of(self.declare(key, self.value_of(x)))

    def struct_members(self, x: Any) -> dict[str, Any]:
        x = self.value_of(x)
        if isinstance(x, StructValue):
            return x.members
        return {
            name: x[name] if isinstance(x, dict) else getattr(x, name)
            for name in (x if isinstance(x, dict) else x.keys)
        }

    def attribute_of(self, x: Any, name: str) -> Any:
        """``x.name`` for a container entry or tensor local: a swizzle."""
        numbers = backend.swizzle_indices(name)
        if numbers is None or len(x.shape) != 1 or max(numbers) >= x.shape[0]:
            raise AttributeError(f"a value of shape {x.shape} has no attribute {name!r}")
        if len(numbers) == 1:
            return subscripts.load(self, x, (numbers[0],))
        return make_tensor([self.value_of(subscripts.load(self, x, (i,))) for i in numbers], (len(numbers),))

    def let(self, name: str, value: Any) -> None:
        """``name = value``."""
        if not self.context.is_var_declared(name):
            self.note_origin(self.declaration_key(name), value)
        value = self.value_of(value)
        if self.context.is_var_declared(name):
            if name in self.context.kernel_args:
                self._refuse_argument(name)
            self.assign_to(self.context.get_var_by_name(name), value)
        else:
            self.context.create_variable(name, self.declare(self.declaration_key(name), value))

    def let_value(self, name: str, value: Any, scopes: int) -> Any:
        """``(name := value)``, a number of scopes inside its statement."""
        context = self.context
        opened = [context.local_scopes.pop() for _ in range(scopes)]
        try:
            with self.inside_expression():
                self.let(name, value)
        finally:
            context.local_scopes.extend(reversed(opened))
        return self.context.get_var_by_name(name)

    @contextlib.contextmanager
    def inside_expression(self) -> Iterator[None]:
        """Assignments within take effect in operands that were read before them, as Taichi evaluates statements."""
        before, self.is_inside_expression = self.is_inside_expression, True
        try:
            yield
        finally:
            self.is_inside_expression = before

    def _refuse_argument(self, name: str) -> None:
        raise backend.ti.TaichiSyntaxError(
            f'Kernel argument "{name}" is immutable in the kernel. '
            f"If you want to change its value, please create a new variable."
        )

    def bind_static(self, names: Any, value: Any) -> None:
        if isinstance(names, str):
            self.context.create_variable(names, value)
            return
        for name, v in zip(names, value, strict=True):
            self.context.create_variable(name, v)

    def unpack(self, names: tuple[str, ...], value: Any) -> None:
        """``a, b = value``: all is read before anything is written."""
        for name, v in zip(names, self._unpacked(value, len(names)), strict=True):
            self.let(name, v)

    def unpack_to(self, places: tuple[Any, ...], value: Any) -> None:
        for place, v in zip(places, self._unpacked(value, len(places)), strict=True):
            if isinstance(place, str):
                self.let(place, v)
            else:
                self.store(place[0], place[1], v)

    def _unpacked(self, value: Any, count: int) -> list[Any]:
        value = self.value_of(value)
        parts = entries_of(value) if is_tensor_like(value) else list(value)
        if len(parts) != count:
            raise backend.ti.TaichiSyntaxError("The number of targets is not equal to value length")
        return [self.freeze(p, (self.path, "unpacked", self.line(), i)) for i, p in enumerate(parts)]

    def declare(self, key: Any, value: Any) -> Any:
        """A new local that holds the value."""
        if isinstance(value, (list, tuple)):
            return type(value)(self.declare((*key, i), v) for i, v in enumerate(value))
        if isinstance(value, dict):
            return {k: self.declare((*key, k), v) for k, v in value.items()}
        if isinstance(value, (StructValue, backend.Struct)):
            methods = value.methods
            members = {n: self.declare((*key, n), m) for n, m in self.struct_members(value).items()}
            return LocalStruct(members, methods, self)
        if is_tensor_like(value):
            own = [key, *((*key, i) for i in range(math.prod(shape_of(value))))]
            if is_active(value) or any(k in self.facts.active or k in self.facts.spatial for k in own):
                dtype = value_dtype(value)
                if backend.is_real(dtype):
                    return LocalTensor(self, key, value, shape_of(value), dtype)
            return self._declare_native(key, value)
        return self.declare_scalar(key, value, None)

    def declare_scalar(self, key: Any, value: Any, dtype: Any, always: bool = False) -> Any:
        is_position = key in self.facts.spatial
        if isinstance(value, Scalar) or key in self.facts.active or always or is_position:
            dtype = value_dtype(value) if dtype is None else dtype
            if backend.is_real(dtype):
                local = Local(self, key, value, dtype)
                if is_position:
                    local.seed(self.position_form(key))
                return local
        return self._declare_native(key, primal_of(value))

    def _declare_native(self, key: Any, value: Any) -> Any:
        variable = backend.native_init(value)
        if backend.is_expr(variable):
            self.declarations[id(variable)] = (variable, key)
            if backend.is_scalar_integer(variable) and key not in self.facts.assigned_integers:
                known = self.affines.get(id(value)) if backend.is_expr(value) else None
                if known is not None:
                    self.affines[id(variable)] = (variable, known[1])
                else:
                    self.new_atom(variable)
        return variable

    def assign_to(self, target: Any, value: Any) -> None:
        """Store a value to a local, a container entry or an ordinary variable."""
        value = self.value_of(value)
        if isinstance(target, ByReference):
            raise UnsupportedError("An expression that was passed by reference is assigned to; pass a variable.")
        if isinstance(target, Locals):
            target.assign(value)
        elif isinstance(target, (Ref, subscripts.StructRef)):
            target.store(value)
        elif isinstance(target, (list, tuple)):
            raise UnsupportedError("A list or tuple of values cannot be assigned again in a kernel; use a vector.")
        else:
            self._note_native_assignment(target, value)
            backend.assign(target, primal_of(value))

    def _note_native_assignment(self, target: Any, value: Any) -> None:
        if is_python_number(value) and backend.is_expr(target) and backend.is_integer(backend.dtype_of(target)):
            refuse_baked("A whole number")
        known = self.declarations.get(id(target))
        if known is None:
            self.refuse_in_rule()
            self.note_effect()
            is_integer = backend.is_expr(target) and backend.is_integer(backend.dtype_of(target))
            if self.columns and is_active(value) and not is_integer:
                raise UnsupportedError("A value with a tangent is stored to something whose tangent cannot be kept.")
            return
        key = known[1]
        if id(target) in self.affines or id(target) in self.index_vectors:
            name = key[1] if key[0] == "loop variable" else key
            self.facts.note(self.facts.assigned_integers, name)
        if is_active(value) and backend.is_real(backend.dtype_of(target)):
            self.facts.require_active(key)

    def store(self, base: Any, index: Any, value: Any) -> None:
        """``base[index] = value`` or ``base.name = value``."""
        target, component = self._place(base, index)
        value = self.value_of(value)
        if component is not None:
            if isinstance(component, list):
                values = entries_of(value) if is_tensor_like(value) else [value] * len(component)
                kept = [self.freeze(v, (self.path, "swizzle", self.line(), i)) for i, v in enumerate(values)]
                for i, v in zip(component, kept, strict=True):
                    self.store(target, (i,), v)
                return
            target.assign_entry(component, value)
            return
        self.assign_to(target, value)

    def _place(self, base: Any, index: Any) -> tuple[Any, Any]:
        """What ``base[index]`` or ``base.name`` names: something to store to, or a tensor local and an entry."""
        if isinstance(index, str):
            numbers = backend.swizzle_indices(index)
            is_swizzle = numbers is not None and (isinstance(base, (Ref, LocalTensor)) or backend.is_tensor(base))
            if is_swizzle:
                assert numbers is not None
                if len(numbers) == 1:
                    return self._place(base, (numbers[0],))
                return base, numbers
            return getattr(base, index), None
        if isinstance(base, LocalTensor):
            return base, self._flat(base.shape, index)
        place = subscripts.load(self, base, index)
        if backend.is_expr(place) and backend.is_expr(base) and id(base) in self.declarations:
            # an entry of an ordinary tensor local: what is stored decides whether it stays one
            self.declarations[id(place)] = (place, self.declarations[id(base)][1])
        return place, None

    def _flat(self, shape: tuple[int, ...], index: tuple[Any, ...]) -> Any:
        """Row-major number of an entry."""
        index = tuple(self.primal(i) for i in index)
        if len(index) != len(shape):
            raise backend.ti.TaichiSyntaxError(f"{len(index)} indices for a value of shape {shape}")
        for i, size in zip(index, shape, strict=True):
            if isinstance(i, int) and not 0 <= i < size:
                raise backend.ti.TaichiSyntaxError(f"index {i} is out of range for a value of shape {shape}")
        return index[0] if len(index) == 1 else index[0] * shape[1] + index[1]

    def update_local(self, name: str, operator: str, rule: str, value: Any) -> None:
        """``name += value`` and the like."""
        if name in self.context.kernel_args:
            self._refuse_argument(name)
        self._update(self.context.get_var_by_name(name), None, operator, rule, value)

    def update(self, base: Any, index: Any, operator: str, rule: str, value: Any) -> None:
        """``base[index] += value`` and the like."""
        target, component = self._place(base, index)
        self._update(target, component, operator, rule, value)

    def augment(self, target: Any, operator: str, rule: str, value: Any) -> None:
        """``target += value`` and the like, of a place."""
        self._update(target, None, operator, rule, value)

    def _update(self, target: Any, component: Any, operator: str, rule: str, value: Any) -> None:
        value = self.value_of(value)
        if isinstance(component, list):
            values = entries_of(value) if is_tensor_like(value) else [value] * len(component)
            kept = [self.freeze(v, (self.path, "swizzle", self.line(), i)) for i, v in enumerate(values)]
            for i, v in zip(component, kept, strict=True):
                self.update(target, (i,), operator, rule, v)
            return
        sign = {"Add": 1, "Sub": -1}.get(operator)
        if not isinstance(target, (Ref, *Locals)):
            self._note_native_assignment(target, value)
            backend.augassign(target, primal_of(value), operator)
        elif sign is None:
            old = target.entry(component) if component is not None else target.value()
            new = getattr(self, rule)(old, value)
            if component is not None:
                target.assign_entry(component, new)
            else:
                self.assign_to(target, new)
        elif component is not None:
            target.add_entry(component, value, sign)
        else:
            target.add(value, sign)


def value_dtype(x: Any) -> Any:
    """Element type of a scalar or tensor."""
    if isinstance(x, TensorValue):
        return backend.dtype_of(primal_of(x))
    if isinstance(x, backend.Matrix):
        return backend.dtype_of(x.to_list()[0] if x.ndim == 1 else x.to_list()[0][0])
    return backend.dtype_of(primal_of(x))


def _has_tangent_entry(x: Any) -> bool:
    entries = x.entries if isinstance(x, TensorValue) else [x]
    return any(isinstance(e, Scalar) and e.is_tangent for e in entries)
