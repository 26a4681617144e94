"""One evaluation: launch the fused kernels, keep the shadows, and follow what the host stores in between."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from taichi_ext import _taichi, trace
from taichi_ext.errors import DerivativeWarning, InvalidArgumentError, UnsupportedError
from taichi_ext.host_values import as_active, is_active_on_host
from taichi_ext.labels import Label, Labels
from taichi_ext.memory import FieldTable, Shadow, array_identity, array_info, numpy_dtype
from taichi_ext.registry import registry
from taichi_ext.state import OverBudgetError, State
from taichi_ext.trace import ContainerInfo, Fused, Launch, Role

_STORED = (
    "A number that was read from a field or array with a tangent is stored from Python: what is stored counts as a "
    "constant, its tangent is lost. Assign it in a kernel."
)
_MOST_KERNELS = 256  # fused kernels kept for one prepared Jacobian


class Session:
    """The tangents of one run of a kernel or pipeline.

    ``fused`` is the table of fused kernels, kept from one session to the next.
    """

    def __init__(self, fields: FieldTable, fused: dict[Any, Fused], is_direct: bool) -> None:
        self.fields = fields
        self.fused = fused
        self.first_column = 0
        self.columns = 0
        self.max_memory = math.inf  # bytes for tangents other than J
        self.spent = 0
        self.state: State | None = None
        self.watch: Any = None
        self.strategy = "auto"
        self.is_direct = is_direct
        self.seeds: dict[Any, int] = {}
        self.shadows: dict[Any, Shadow] = {}
        self.arrays: dict[Any, tuple[ContainerInfo, Any]] = {}  # arrays with tangents, kept alive
        self.array_copies: dict[Any, np.ndarray] = {}
        self.argument_columns: dict[str, int] = {}
        self.wants_return = False
        self.before_launch: Callable[[Fused, dict[Any, Any]], None] | None = None
        self.read: set[Any] = set()
        self.written: set[Any] = set()
        self.params: dict[Any, Label | str] = {}  # the parameters and what messages call them
        self.overwritten: set[Any] = set()
        self.has_launched = False
        self._named: dict[Any, Any] = {}  # the fields that a kernel reads and writes
        self._changes = 0  # of which shadows there are and whether they are zero
        self._repeated: dict[Any, tuple[int, Fused, Callable[[], None], Any]] = {}  # launches as they were last made

    # --- containers

    def info(self, key: Any) -> ContainerInfo:
        return self.arrays[key][0] if key in self.arrays else self.fields.infos[key]

    def register_array(self, value: Any, annotation: Any, name: Label | str) -> Any:
        """The key of an array that is a parameter or output."""
        key = ("array", array_identity(value))
        if key not in self.arrays:
            info = array_info(key, name, value, annotation)
            if info is None:
                raise InvalidArgumentError(f"{name} has integer elements; only real numbers have a derivative.")
            self.arrays[key] = (info, value)
        return key

    def shadow(self, key: Any) -> Shadow:
        """The shadow of a container, made when first needed; a parameter's starts as its seeds."""
        if key not in self.shadows or key in self.seeds:
            self._changes += 1
        if key not in self.shadows:
            info = self.info(key)
            self._spend(info.size * self.columns * numpy_dtype(info.dtype).itemsize)
            self.shadows[key] = Shadow(info.name, info.size, self.columns, info.dtype)
        shadow = self.shadows[key]
        if key in self.seeds:
            shadow.set_identity(self.seeds.pop(key) - self.first_column)
        return shadow

    def _spend(self, size: int) -> None:
        """Count the memory of tangents other than J against the limit; a single column is computed in any case."""
        self.spent += size
        if self.spent > self.max_memory and self.columns > 1:
            raise OverBudgetError

    def _extra_array(self, fused: Fused, key: Any) -> Shadow:
        if key[0] != "scratch":
            return self.shadow(key)
        if key not in fused.scratch:
            self._spend(fused.scratch_sizes[key] * 8)
            fused.scratch[key] = Shadow("rows", fused.scratch_sizes[key], 1, _taichi.named_type(key[1]))
        return fused.scratch[key]

    def carries_tangent(self, key: Any) -> bool:
        return key in self.seeds or (key in self.shadows and not self.shadows[key].is_fresh)

    def _role(self, key: Any) -> Role:
        if key in self.seeds:
            return Role(first_column=self.seeds[key])
        shadow = self.shadows.get(key)
        if shadow is None:
            return Role()
        return Role(has_shadow=not shadow.is_fresh, is_fresh=shadow.is_fresh)

    # --- launches

    def launch(self, kernel: Any, args: tuple[Any, ...]) -> Any:
        """Run a kernel and its tangents."""
        name = (id(kernel), *map(id, args))
        if name in self._repeated and not _taichi.is_gradient_replaced():
            changes, fused, repeat, _ = self._repeated[name]
            if changes == self._changes and fused.rules_version == registry.version:
                return repeat()
        if _taichi.is_reading_kernel(kernel):
            with _taichi.suspend_following():
                return kernel(*args)
        node = _taichi.deactivated_node(kernel, args)
        if node is not None:
            self._clear_under(node)
            with _taichi.suspend_following():
                return kernel(*args)
        if _taichi.is_gradient_replaced():
            raise UnsupportedError(
                f"{kernel.func.__qualname__} is launched in a function decorated with ti.ad.no_grad or "
                "ti.ad.grad_replaced, whose gradient is only defined in reverse mode. Call it without the decorator, "
                "or stop the gradient in the kernel."
            )
        self.has_launched = True
        if not self.is_direct:
            self._note_active_arguments(kernel, args)
        args = tuple(a.detach() if _taichi.is_torch_tensor(a) and a.requires_grad else a for a in args)
        self._follow_host_arrays()
        arrays, keys = self._array_arguments(kernel, args)
        roles = {key: self._role(key) for key in [*self.seeds, *self.shadows] if key[0] == "field"}
        for position, key in keys.items():
            roles[arrays[position].key] = self._role(key)
        outer = {arrays[position].key: key for position, key in keys.items()}
        fused = self._fused_kernel(kernel, args, arrays, roles, outer)
        for position, key in keys.items():
            self.arrays.setdefault(key, (arrays[position], args[position]))
        shadows = [self._extra_array(fused, outer.get(k, k)) for k in fused.shadows]
        if self.state is not None:
            self._save(self.state, fused, outer, args)
        for key, shadow in zip(fused.shadows, shadows, strict=True):
            if key in fused.facts.covered:
                shadow.is_dirty = False
            else:
                shadow.clean()
        before = self._changes
        result = fused.launch(args, [s.array for s in shadows])
        self._changes += any(shadow.is_fresh for shadow in shadows)
        for shadow in shadows:
            shadow.is_fresh = False
        self._note(fused, outer)
        self._copy_host_arrays()
        is_simple = self.state is None and not self.arrays and not self.is_direct and _taichi.is_plain_call(kernel)
        if is_simple and not fused.facts.written & set(self.params):
            repeat = _taichi.repeat_launch(fused.kernel, fused.passed([s.array for s in shadows]))
            self._repeated[name] = (before, fused, repeat, args)  # if nothing is fresh any more, the next is the same
        return result

    def _refuse_other_fields(self, kernel: Any, features: Any, fused: Fused) -> None:
        """Raise where a kernel names other fields than when it was traced before, in another state of the pipeline."""
        facts = fused.facts
        named = tuple(frozenset(key for key in keys if key[0] == "field") for keys in (facts.read, facts.written))
        if self._named.setdefault((id(kernel), features, registry.version), named) != named:
            raise UnsupportedError(
                f"{kernel.func.__qualname__} names other fields than at an earlier launch: attributes or globals were "
                "changed in between, which plain Taichi does not notice. Pass the fields as ti.template() arguments."
            )

    def _note_active_arguments(self, kernel: Any, args: tuple[Any, ...]) -> None:
        if _taichi.is_library_kernel(kernel):  # field.fill(value); copies of arrays are told where they are made
            if any(is_active_on_host(a) for a in args if not _taichi.is_array(a)):
                warn_at_user(_STORED)
        elif any(is_active_on_host(a) for a in args):
            warn_at_user(
                f"A number that was read from a field or array with a tangent is passed to {kernel.func.__qualname__}: "
                "it counts as a constant, its tangent is lost. Read it in the kernel."
            )

    def _fused_kernel(
        self, kernel: Any, args: tuple[Any, ...], arrays: dict[int, ContainerInfo], roles: Any, outer: dict[Any, Any]
    ) -> Fused:
        """The kernel with tangents, from the table where the same was built before."""
        shapes = tuple((i, info.key, info.shape, info.element_shape) for i, info in arrays.items())
        features = _taichi.argument_features(kernel, args)
        cache_key = (id(kernel), features, shapes, frozenset(roles.items()), self.first_column, self.columns)
        fused = self.fused.get(cache_key)
        if fused is not None and fused.rules_version != registry.version:
            if all(registry.rule_for(target) is rule for target, rule in fused.facts.rules.items()):
                fused.rules_version = registry.version
            else:
                fused = None
        if fused is None:
            columns = self.argument_columns if self.is_direct else {}
            wants_return = self.is_direct and self.wants_return
            _taichi.materialize()  # fields that the pipeline has just made
            launch = Launch(
                kernel,
                args,
                self.columns,
                self.fields,
                roles,
                arrays,
                columns,
                wants_return,
                self.first_column,
                self.watch,
                self.strategy,
            )
            fused = trace.fuse(launch)
            self._refuse_other_fields(kernel, features, fused)
            if self.before_launch is not None:
                self.before_launch(fused, outer)
            if len(self.fused) >= _MOST_KERNELS:
                del self.fused[next(iter(self.fused))]
            self.fused[cache_key] = fused
        return fused

    def _clear_under(self, node: Any) -> None:
        """A part of the layout is deactivated: its entries are constants from now on."""
        for key in [*self.seeds, *self.shadows]:
            info = self.fields.infos.get(key)
            if info is not None and self.carries_tangent(key) and _taichi.is_under(info.obj, node):
                if self.state is not None:
                    self.state.save(info.obj)
                self.shadow(key).clear_rows(slice(None))

    def _save(self, state: State, fused: Fused, outer: dict[Any, Any], args: tuple[Any, ...]) -> None:
        """Keep copies of what the kernel may change."""
        state.has_random |= fused.facts.has_random
        for key in (outer.get(k, k) for k in fused.facts.written if k != trace.RETURN):
            state.save(self.arrays[key][1] if key in self.arrays else self.fields.infos[key].obj)
        for obj in fused.facts.other_fields.values():
            state.save(obj)
        for value in args:
            if _taichi.is_array(value):
                state.save(value)

    def _array_arguments(self, kernel: Any, args: tuple[Any, ...]) -> tuple[dict[int, ContainerInfo], dict[int, Any]]:
        """The real arrays among the arguments, and their keys in this session, by position."""
        infos: dict[int, ContainerInfo] = {}
        keys: dict[int, Any] = {}
        first: dict[Any, Any] = {}
        for position, (argument, value) in enumerate(zip(kernel.arguments, args, strict=True)):
            if not _taichi.is_array_annotation(argument.annotation):
                continue
            identity = ("array", array_identity(value))
            local = first.setdefault(identity, ("argument", position))  # the same array given twice is one container
            info = array_info(local, f"array argument {argument.name!r}", value, argument.annotation)
            if info is not None:
                infos[position] = info
                keys[position] = identity
        _refuse_overlaps([args[p] for p in infos], [infos[p].name for p in infos])
        return infos, keys

    def _note(self, fused: Fused, outer: dict[Any, Any]) -> None:
        written = {outer.get(k, k) for k in fused.facts.written}
        self.read |= {outer.get(k, k) for k in fused.facts.read}
        self.written |= written
        for key in written:
            self._note_overwritten(key)

    def _note_overwritten(self, key: Any) -> None:
        """A parameter that nothing has read and of whose seeds nothing is left."""
        is_candidate = key in self.params and key not in self.read | self.overwritten and key in self.shadows
        if is_candidate and not self.shadows[key].to_numpy().any():
            self.overwritten.add(key)

    # --- what the host stores between launches

    def before_host_write(self, obj: Any, value: Any) -> None:
        """Something is about to be assigned from Python: a field or array, or a host accessor of a matrix field."""
        if is_active_on_host(value):
            warn_at_user(_STORED)
        if self.state is None:
            return
        if not isinstance(obj, (_taichi.Field, _taichi.Ndarray)):
            found = self.fields.by_accessor(obj)
            obj = None if found is None else found[0].obj
        if obj is not None:
            self.state.save(obj)

    def host_write(self, accessor: Any, index: tuple[int, ...]) -> None:
        """``field[index] = value`` in Python."""
        found = self.fields.by_accessor(accessor)
        if found is None:
            return
        info, component = found
        if self.carries_tangent(info.key):
            flat = 0
            offsets = info.offset or (0,) * len(info.shape)
            for i, size, offset in zip(index, info.shape, offsets, strict=False):
                flat = flat * size + i - offset
            components = math.prod(info.element_shape)
            self.shadow(info.key).clear_rows(flat * components + component)
            self._note_overwritten(info.key)

    def host_fill(self, array: Any) -> None:
        """``ndarray.fill(value)`` or ``ndarray[index] = value`` in Python."""
        key = ("array", array_identity(array))
        if self.carries_tangent(key):
            self.shadow(key).clear_rows(slice(None))
            self._note_overwritten(key)

    def host_write_array(self, array: Any, index: Any) -> None:
        """``ndarray[index] = value`` in Python."""
        key = ("array", array_identity(array))
        if self.carries_tangent(key):
            index = index if isinstance(index, tuple) else (index,)
            info = self.info(key)
            components = math.prod(info.element_shape)
            entry = int(np.ravel_multi_index(tuple(int(i) for i in index[: len(info.shape)]), info.shape))
            first = entry * components
            if len(index) > len(info.shape):
                first += int(np.ravel_multi_index(tuple(index[len(info.shape) :]), info.element_shape))
                components = 1
            self.shadow(key).clear_rows(slice(first, first + components))
            self._note_overwritten(key)

    def host_read(self, obj: Any, value: Any) -> Any:
        """What Python reads: marked where it has a tangent."""
        if isinstance(obj, _taichi.Ndarray):
            is_active = self.carries_tangent(("array", array_identity(obj)))
        else:
            found = self.fields.field(obj) if isinstance(obj, _taichi.Field) else self.fields.by_accessor(obj)
            info = found[0] if isinstance(found, tuple) else found
            is_active = info is not None and self.carries_tangent(info.key)
        return as_active(value) if is_active else value

    def start(self) -> None:
        """Before a pipeline runs: remember what the arrays hold that are parameters."""
        self._copy_host_arrays()

    def _copy_host_arrays(self) -> None:
        for key, (_, value) in self.arrays.items():
            if self.carries_tangent(key):
                values = _taichi.host_values(value)
                if values is not None:
                    self.array_copies[key] = values.copy()

    def _follow_host_arrays(self) -> None:
        """Notice entries of NumPy arrays and tensors that Python code changed since the last launch."""
        for key, copy in self.array_copies.items():
            values = _taichi.host_values(self.arrays[key][1])
            if values is None:
                continue
            changed = (values != copy) & ~((values != values) & (copy != copy))
            if changed.any() and self.carries_tangent(key):
                if not self.overwritten:
                    warn_at_user(
                        f"{int(changed.sum())} entries of {self.arrays[key][0].name} were changed from Python between "
                        "kernels: they count as constants, their tangents are lost. Change them in a kernel."
                    )
                self.shadow(key).clear_rows(np.flatnonzero(changed.reshape(-1)))
                self._note_overwritten(key)

    def finish(self) -> None:
        """After the run: say which parameters were overwritten before anything read them."""
        for key in self.overwritten:
            warn_at_user(
                f"{self.params[key]} is a parameter that is overwritten before it is read: nothing depends on what it "
                "held before."
            )


def warn_at_user(message: str) -> None:
    """A warning at the line of the user's code that led here."""
    frame = _taichi.user_frame()
    if frame is None:
        warnings.warn(message, DerivativeWarning, stacklevel=3)
    else:
        warnings.warn_explicit(message, DerivativeWarning, frame.f_code.co_filename, frame.f_lineno)


def _refuse_overlaps(arrays: list[Any], names: list[str]) -> None:
    """Two arguments may be the same array, but not share only a part of their memory."""
    ranges = [(array_identity(a), n) for a, n in zip(arrays, names, strict=True)]
    memory = sorted((i[1], i[1] + i[2], n) for i, n in ranges if i[0] == "memory" and i[2])
    for (start, end, name), (other_start, other_end, other) in itertools.pairwise(memory):
        if other_start < end and (start, end) != (other_start, other_end):
            raise InvalidArgumentError(f"{name} and {other} share a part of their memory; pass copies, or one array.")


_taichi.compile_with(lambda kernel, args: trace.trace_plain(kernel, args, FieldTable(Labels(kernel))))
