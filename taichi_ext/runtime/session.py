"""One evaluation: launch the fused kernels, keep the shadows, and follow what the host stores in between."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from taichi_ext import backend, engine
from taichi_ext.boundary.registry import registry
from taichi_ext.differentiate.keys import VALUES, Key, LaunchArray, OwnArray, Scratch
from taichi_ext.labels import Label
from taichi_ext.launches import ColumnBlock, ContainerInfo, FieldKey, Fused, Launch, Role, container_key, rows_of
from taichi_ext.runtime.active_numbers import ActiveNumbers
from taichi_ext.runtime.array_tangents import ArrayTangents, Binding, refuse_overlaps
from taichi_ext.runtime.field_rows import role_of, row_of_entry, rows_of_index, rows_under
from taichi_ext.runtime.fused_kernels import KernelTable
from taichi_ext.runtime.launch_checks import (
    STORED,
    refuse_arguments,
    refuse_replaced_gradient,
    refuse_restart,
    warn_of_changes,
    warn_of_lost_tangents,
)
from taichi_ext.runtime.launch_hooks import LaunchHooks
from taichi_ext.runtime.lookahead import Lookahead
from taichi_ext.runtime.memory import FieldTable, Shadow, numpy_dtype, view_of
from taichi_ext.runtime.passed_arguments import NumberSeeds, taken_out
from taichi_ext.runtime.passed_numbers import PipelineRun
from taichi_ext.runtime.python_watch import PythonRun
from taichi_ext.runtime.reachable import reachable_arrays
from taichi_ext.runtime.regions import View
from taichi_ext.runtime.repetitions import Repetitions
from taichi_ext.runtime.run_record import RunRecord
from taichi_ext.runtime.state import OverBudgetError, State
from taichi_ext.runtime.warning import warn_at_user

MOST_KERNELS = 256  # fused kernels kept for one prepared Jacobian, for each of its blocks of columns


class Session(LaunchHooks):
    """The tangents of one run of a kernel or pipeline; ``fused``: its kernels, kept from one session to the next."""

    def __init__(self, fields: FieldTable, fused: dict[Any, Fused], is_direct: bool) -> None:
        self.fields = fields
        self.kernels = KernelTable(fused)
        self.first_column = self.columns = self.spent = 0
        self.blocks = 1  # into which the columns of J are divided
        self.max_memory = math.inf  # bytes for tangents other than J
        self.state: State | None = None
        self.record: RunRecord | None = None  # of a pipeline whose columns take several runs
        self.is_repeated = False  # whether everything is put back and run again afterwards
        self.watch: Any = None
        self.strategy = "auto"
        self.is_direct = is_direct
        self.seeds: dict[Key, dict[Key, int]] = {}  # of fields: first columns by key, of the field or components
        self.shadows: dict[Key, Shadow] = {}  # of fields
        self.arrays = ArrayTangents()
        self.python = PythonRun(ActiveNumbers(self.arrays.is_active_memory), self.arrays.stores)
        self.directions: np.ndarray | None = None  # tangents of the parameters, a row for each entry: not the identity
        self.numbers = NumberSeeds()  # arguments and Python numbers that are parameters
        self.pipeline: PipelineRun | None = None  # where its arguments are parameters
        self.before_launch: Callable[[Fused, dict[Key, Any]], None] | None = None
        self.read, self.written = set[Key](), set[Key]()
        self.params: dict[Key, Label | str] = {}  # those that have columns in this run, and their names
        self.overwritten: set[Key] = set()  # of them, before anything read them
        self.has_launched = self.wants_return = False
        self._program = weakref.ref(backend.program())
        self._changes = 0  # of which shadows there are and whether they are zero
        self._repetitions = Repetitions()
        self._lookahead: Lookahead | None = None

    # --- containers

    def info(self, key: Key) -> ContainerInfo:
        """The container of a field, or of an array that is a parameter or output."""
        return self.arrays.infos[key] if isinstance(key, View) else self.fields.infos[container_key(key)]

    def register_array(self, value: Any, annotation: Any, name: Label | str) -> Any:
        """The key of an array that is a parameter or output."""
        return self.arrays.register(value, annotation, name, self)

    def seed(self, columns: dict[Key, int]) -> None:
        """Name the parameters, each with its first column."""
        for key, column in columns.items():
            if isinstance(key, View):
                self.arrays.seed(key, column)
            else:
                self.seeds.setdefault(container_key(key), {})[key] = column
        for key in columns if self.directions is not None else ():
            self.shadow(container_key(key))

    def open_output(self, key: Key, name: Label | str, rows: int, dtype: Any, place: np.ndarray | None) -> None:
        """Make the shadow of an output, in the memory of ``place`` where that is given: of a component that of all."""
        if isinstance(key, View):
            self.arrays.open_output(key, self, place)
        elif (key := container_key(key)) not in self.shadows:
            self.shadows[key] = Shadow(name, rows, self.columns, dtype, place)
            if key in self.seeds:
                self.shadow(key)

    def shadow(self, key: Key) -> Shadow:
        """The shadow of a container, made when first needed; a parameter's starts as its seeds."""
        if isinstance(key, View):
            return self.arrays.shadow(key, self)
        if key not in self.shadows or key in self.seeds:
            self._changes += 1
        if key not in self.shadows:
            info = self.info(key)
            self.shadows[key] = self.new_shadow(info.name, info.size, info.dtype)
        shadow = self.shadows[key]
        for part, column in self.seeds.pop(key, {}).items():
            self.sow(shadow, column, rows_of(part, self.info(key)))
        return shadow

    def sow(self, shadow: Shadow, column: int, rows: Any) -> None:
        """Give the rows of a parameter their tangents: its columns, or those that are given."""
        if self.directions is None:
            shadow.set_identity(column - self.first_column, rows)
        else:
            shadow.set_rows(rows, self.directions[column : column + shadow.row_count(rows)])

    def new_shadow(self, name: Label | str, rows: int, dtype: Any) -> Shadow:
        """A shadow that counts against the limit on memory."""
        self._spend(rows * self.columns * numpy_dtype(dtype).itemsize)
        return Shadow(name, rows, self.columns, dtype)

    def tangents(self, key: Key) -> np.ndarray:
        """The tangents of an output, a row for each entry."""
        if isinstance(key, View):
            return self.arrays.tangents(key)
        values = self.shadows[container_key(key)].to_numpy()
        return values if key in self.shadows else np.ascontiguousarray(values[rows_of(key, self.info(key))])

    def dtype(self, key: Key) -> np.dtype:
        """The type of the tangents of an output."""
        key = container_key(key)
        return numpy_dtype(self.arrays.infos[key].dtype) if isinstance(key, View) else self.shadows[key].dtype

    def is_fresh(self, key: Key) -> bool:
        """Whether nothing has been written to the tangents of an output."""
        return self.arrays.is_fresh(key) if isinstance(key, View) else self.shadows[container_key(key)].is_fresh

    def _spend(self, size: int) -> None:
        """Count the memory of tangents other than J against the limit; a single column is computed in any case."""
        self.spent += size
        if self.spent > self.max_memory and self.columns > 1:
            raise OverBudgetError

    def _scratch(self, fused: Fused, key: Scratch) -> Shadow:
        if key not in fused.memory.scratch:
            self._spend(fused.scratch_sizes[key] * 8)
            fused.memory.scratch[key] = Shadow("rows", fused.scratch_sizes[key], 1, backend.named_type(key.dtype))
        return fused.memory.scratch[key]

    def _passed(self, fused: Fused, outer: Mapping[Key, View]) -> tuple[list[Any], list[Callable[[], None]]]:
        """What a kernel takes behind the user's arguments, and what is to be done after the launch."""
        passed, after = [], []
        for key in fused.shadows:
            if isinstance(key, LaunchArray):
                passed.append(self._stream(fused, key))
                continue
            is_covered = key in fused.facts.covered
            if key in outer:
                array, give_back = self.arrays.lend(outer[key], self, is_covered=is_covered)
                passed.append(array)
                if key in fused.facts.written:
                    after.append(give_back)
                continue
            shadow = self._scratch(fused, key) if isinstance(key, Scratch) else self.shadow(key)
            if is_covered:
                shadow.is_dirty = False
            else:
                shadow.clean()
            passed.append(shadow.array)
        if fused.takes_first_column:
            passed.append(self.first_column)
        return passed, after

    def carries_tangent(self, key: Key) -> bool:
        if isinstance(key, View):
            return self.arrays.carries_tangent(key)
        return key in self.seeds or (key in self.shadows and not self.shadows[key].is_fresh)

    def _role(self, key: Key) -> Role:
        if isinstance(key, View):
            return self.arrays.role(key)
        return role_of(self.seeds.get(key, {}), self.shadows.get(key))

    # --- launches

    def launch(self, kernel: Any, args: tuple[Any, ...]) -> Any:
        """Run a kernel and its tangents."""
        with backend.exclusive:
            return self._launch(kernel, args)

    def _launch(self, kernel: Any, args: tuple[Any, ...]) -> Any:
        if self.record is not None:
            self.record.launch(kernel, args)
        name = (id(kernel), *map(id, args))
        repeat = self._repetitions.find(name, self._changes)
        if repeat is not None:
            return repeat()
        refuse_restart(self._program())
        if self._runs_plainly(kernel, args):
            with backend.suspend_following():
                return kernel(*args)
        refuse_replaced_gradient(kernel)
        self.has_launched = True
        if not self.is_direct:
            self._follow_host_arrays()
            warn_of_lost_tangents(kernel, backend.leaf_values(kernel, args), self.python.is_lost)
        refuse_arguments(kernel, args, tuple(variable for variable, _ in self.numbers.constants))
        args = tuple(a.detach() if backend.is_torch_tensor(a) and a.requires_grad else a for a in args)
        args, values, tangents = taken_out(kernel, args, self.pipeline)
        numbers = self.numbers.with_passed(tangents, self.directions, self.first_column, self.columns)
        binding = self.arrays.bind(kernel, values, self)
        fused = self._fused_kernel(kernel, args, binding, self._roles(binding), numbers)
        fused.refuse_changed()
        refuse_overlaps(binding.given, fused.facts.written)
        if self.state is not None:
            self._save(self.state, fused, values)
            if self.is_repeated:
                self.state.refuse_repetition()
        if self.record is not None:
            self.record.arrays(kernel, fused.facts.read_arguments, values)
        if numbers.tangents is not None:
            self.shadows[VALUES] = numbers.shadow(self.columns)
        passed, after = self._passed(fused, binding.outer)
        before = self._changes
        result = self._run(fused, args, passed)
        self._note(fused, binding, after)
        if not self.is_direct:
            self.arrays.remember()  # before Python goes on
            if self._is_repeatable(kernel, fused):  # once nothing is fresh any more, the next launch is the same
                self._repetitions.keep(name, before, fused, passed, args)
            if fused.facts.returns_active:
                return self.python.read(result)
        return result

    def _is_repeatable(self, kernel: Any, fused: Fused) -> bool:
        """Whether what it writes has been saved, and nothing of it depends on the call."""
        is_simple = not len(self.arrays.regions) and backend.is_plain_call(kernel)
        return is_simple and not fused.sites and not fused.facts.written & set(map(container_key, self.params))

    def _runs_plainly(self, kernel: Any, args: tuple[Any, ...]) -> bool:
        """Whether a kernel is one of Taichi's own that has no tangents; one that deactivates nodes clears theirs."""
        if backend.is_reading_kernel(kernel):
            for source in (a for a in args if isinstance(a, (backend.Field, backend.Ndarray))):
                self.host_read(source, None)
            return True
        node = backend.deactivated_node(kernel, args)
        if node is not None:
            self._clear_under(node)
        return node is not None

    def _roles(self, binding: Binding) -> dict[Key, Role]:
        """What the fields, and the arrays that a launch is given, carry."""
        roles = {key: self._role(key) for key in [*self.seeds, *self.shadows] if isinstance(key, FieldKey)}
        return roles | {local: self._role(key) for local, key in binding.outer.items()}

    def _fused_kernel(
        self, kernel: Any, args: tuple[Any, ...], binding: Binding, roles: dict[Key, Role], numbers: NumberSeeds
    ) -> Fused:
        """The kernel with tangents, from the table where the same was built before."""
        shapes = tuple((i, info.key, info.shape, info.element_shape) for i, info in binding.arrays.items())
        features = backend.argument_features(kernel, args)
        is_block = self.blocks > 1 and self.directions is None
        name = (id(kernel), features, shapes, (self.columns, is_block, self._variant(binding.outer), numbers.key))
        fused = self.kernels.find(name, self.first_column, roles)
        if fused is None:
            backend.materialize()  # fields that the pipeline has just made
            launch = Launch(
                kernel=kernel,
                args=args,
                block=ColumnBlock(self.columns, self.first_column, is_block),
                fields=self.fields,
                roles=roles,
                arrays=binding.arrays,
                numbers=numbers.columns,
                wants_return=self.wants_return and self.is_direct,
                watch=self.watch,
                strategy=self.strategy,
                sparse=self._sparse_target(binding.outer),
                energy=self._energy_target(binding.outer),
                is_repeated=not self.is_direct,
            )
            if self._lookahead is not None and launch.sparse is None and launch.energy is None:
                launch = self._lookahead.foreseen(launch, binding.outer, self.carries_tangent)
            fused = engine.fuse(launch)
            self.kernels.check_fields(features, fused)
            if self.before_launch is not None:
                self.before_launch(fused, binding.outer)
            self.kernels.add(name, self.first_column, roles, fused, MOST_KERNELS * self.blocks)
        self._accept(fused, binding.outer)
        return fused

    def _active_fields(self) -> list[Any]:  # that may carry tangents
        return [*self.seeds, *self.shadows]

    def _clear_under(self, node: Any) -> None:
        """A part of the layout is deactivated: its entries are constants from now on."""
        if self.state is not None:
            self.state.save_part(node)
        if backend.node_kind(node) == "bitmasked":
            return  # Taichi keeps their memory, and reads it
        for key in self._active_fields():
            info = self.fields.infos.get(key)
            if info is not None and self.carries_tangent(key) and backend.is_under(info.obj, node):
                self.clear_rows(key, rows_under(info, node))

    def _save(self, state: State, fused: Fused, args: tuple[Any, ...]) -> None:
        """Keep copies of what the kernel may change."""
        state.has_random |= fused.facts.has_random
        fields = [self.fields.infos[key].obj for key in fused.facts.written if key in self.fields.infos]
        state.save_fields([*fields, *fused.facts.other_fields], fused.facts.changed_nodes)
        for value in args:
            if backend.is_array(value):
                state.save(value)

    def _note(self, fused: Fused, binding: Binding, after: list[Callable[[], None]]) -> None:
        """What a launch has done to tangents."""
        self._collect(fused, binding.outer)
        for give_back in after:
            give_back()
        for key in (key for key in fused.shadows if not isinstance(key, OwnArray)):
            shadow = self.shadow(binding.outer.get(key, key))
            self._changes += shadow.is_fresh
            shadow.is_fresh = False
        read, written = self.arrays.accesses(fused, binding)
        self.read |= read
        self.written |= written
        for key in written:
            self._note_overwritten(key)

    def _note_overwritten(self, container: Any) -> None:
        """Parameters in a container that nothing has read and of whose seeds nothing is left."""
        for key in self.params:
            if container_key(key) != container or container in self.read or key in self.overwritten:
                continue
            has_shadow = self.arrays.has_shadow(key) if isinstance(key, View) else container in self.shadows
            if has_shadow and not self.tangents(key).any():
                self.overwritten.add(key)

    # --- what the host stores between launches

    def before_host_write(self, obj: Any, value: Any) -> None:
        """Something is about to be assigned from Python: a field or array, or a host accessor of a matrix field."""
        if self.python.is_lost(value):
            warn_at_user(STORED)
        if self.record is not None:
            self.record.store(obj, value)
        if self.state is None:
            return
        if not isinstance(obj, backend.FieldEntry):
            self.state.save(obj)
            return
        found = self.fields.by_entry(obj)
        if found is None:
            self.state.save_entry(obj)
        else:
            self.state.save(found[0].obj)

    def host_write(self, entry: backend.FieldEntry) -> None:
        """A number has been stored to a field in Python."""
        found = self.fields.by_entry(entry)
        if found is None or not self.carries_tangent(found[0].key):
            return
        info, component = found
        self.clear_rows(info.key, row_of_entry(info, component, entry.index))
        self._note_overwritten(info.key)

    def host_fill(self, array: Any) -> None:
        """``ndarray.fill(value)`` in Python."""
        self._clear_array(array, slice(None))

    def host_write_array(self, array: Any, index: Any) -> None:
        """``ndarray[index] = value`` in Python; the index of a component may follow."""
        self._clear_array(array, rows_of_index(array, index))

    def _clear_array(self, array: Any, rows: Any) -> None:
        key = view_of(array)
        if self.carries_tangent(key):
            self.clear_rows(key, rows)
            for shared in self.arrays.shared([key]):
                self._note_overwritten(shared)

    def host_read(self, obj: Any, value: Any) -> Any:
        """What Python reads, which is remembered where it has a tangent."""
        if self.record is not None:
            self.record.note_read()
        if isinstance(obj, backend.Ndarray):
            is_active = self.carries_tangent(view_of(obj))
        else:
            found = self.fields.field(obj) if isinstance(obj, backend.Field) else self.fields.by_entry(obj)
            info = found[0] if isinstance(found, tuple) else found
            is_active = info is not None and self.carries_tangent(info.key)
        return self.python.read(value) if is_active else value

    def start(self, function: Any, args: tuple[Any, ...]) -> None:
        """Before the caller runs a pipeline: remember what the arrays hold that it can change."""
        self._lookahead = Lookahead(sys._getframe(1).f_code)
        if self.state is not None:
            for array in reachable_arrays(function, args):
                self.state.save(array)
        self.arrays.remember()

    def _follow_host_arrays(self) -> None:
        """Notice entries of NumPy arrays and tensors that Python code changed since the last launch."""
        for name, key, count in self.arrays.clear_changed(self):
            if not self.overwritten:
                warn_of_changes(name, count)
            for shared in self.arrays.shared([key]):
                self._note_overwritten(shared)

    def finish(self) -> None:
        """After the run: notice what Python changed since the last launch."""
        refuse_restart(self._program())
        if not self.is_direct:
            self._follow_host_arrays()
        if self.record is not None:
            self.record.end()


backend.compile_with(engine.plain_kernel, lambda: registry.version, lambda func: registry.rule_for(func) is not None)
