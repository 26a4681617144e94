"""The launches of one run: each kernel with tangents is found or built, and launched on the tangents before it."""

from __future__ import annotations

import contextlib
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from taichi_ext import backend, engine
from taichi_ext.boundary.registry import registry
from taichi_ext.cached import Bounded
from taichi_ext.differentiate.facts.decisions import Role
from taichi_ext.errors import InvalidArgumentError, UnsupportedError
from taichi_ext.labels import Label
from taichi_ext.launches import (
    ColumnBlock,
    FieldKey,
    FirstOrderArray,
    JacobianKernel,
    Launch,
    NumberColumns,
    container_key,
)
from taichi_ext.program.keys import RETURN, Key, LaunchArray, OwnArray, Scratch
from taichi_ext.record.variables import attribute_variable
from taichi_ext.runtime.launching.tangents import (
    DenseRows,
    PassedNumberError,
    Request,
    Restart,
    Tangents,
    save_changed,
    scratch_of,
)
from taichi_ext.runtime.memory.array_tangents import Binding, check_overlaps
from taichi_ext.runtime.memory.regions import View
from taichi_ext.runtime.memory.shadows import FieldTable, Shadow
from taichi_ext.runtime.memory.state import State
from taichi_ext.runtime.python.dual_numbers import UNKNOWN, PipelineRun, dual_like, warn_at_user
from taichi_ext.runtime.python.run_record import taken_out, warn_of_captured, with_passed

# takes a new kernel, and the keys of the run by the kernel's keys
Check = Callable[[JacobianKernel, Mapping[Key, Key]], None]


@dataclass(frozen=True)
class LaunchRecord:
    """A launch that was made."""

    fused: JacobianKernel
    args: tuple[Any, ...]  # the user's arguments
    passed: Sequence[object]  # the arguments after those of the user
    changes: int  # the count of changes of tangents before the launch
    result: object  # the value returned


class _Bound(NamedTuple):
    """A call of a kernel with its arrays and numbers."""

    launch: Launch  # the call, with the tangents of containers
    fused: JacobianKernel  # the kernel with tangents for it
    values: tuple[object, ...]  # its leaf arguments
    passed: Mapping[str, Sequence[Any]]  # the entries of leaf arguments with tangents, by name
    binding: Binding  # the arrays among the arguments


class Accesses:
    """The containers read and written by the launches and stores of one run.

    Attributes:
        read: containers that were read, and the keys of numbers.
        written: containers that were written.
        overwritten: parameters that were overwritten before anything read them.
        params: the names of the parameters that have columns in this run.
        lost: what solvers have changed besides their unknowns.
    """

    def __init__(self, params: Mapping[Key, Label | str], tangents: Tangents) -> None:
        self.params = params
        self.read, self.written = set[Key](), set[Key]()
        self.overwritten = set[Key]()
        self.lost = Lost()
        self._tangents = tangents

    def note(self, read: Set[Key], written: Set[Key]) -> None:
        self.read |= read
        self.written |= written
        self.lost.note(read, written)
        self.note_overwritten(written)

    def note_read(self, key: Key) -> None:
        """Note that Python reads a container."""
        if self.lost or key not in self.read:
            self.note(self._tangents.arrays.shared([key]), set())

    def note_stored(self, key: Key) -> None:
        """Note that Python stores a number with a tangent to a container."""
        if self.lost or isinstance(key, View) or key not in self.written or key in map(container_key, self.params):
            self.note(set(), self._tangents.arrays.shared([key]))

    def note_overwritten(self, containers: Iterable[Key]) -> None:
        stored = set(containers)
        for key in self.params:
            container = container_key(key)
            if container not in stored or container in self.read or key in self.overwritten:
                continue
            if self._tangents.carrier(key).shadow is not None and not self._tangents.values(key).any():
                self.overwritten.add(key)


class Session:
    """One run of a kernel, or of a pipeline of them.

    Args:
        request: the columns to compute.
        table: the fields that kernels use.
        kernels: the kernels with tangents, kept between runs.
        target: the target for entries of J.
        is_direct: whether one kernel is run, rather than a pipeline.

    Attributes:
        accesses: the containers read and written so far.
    """

    def __init__(
        self, request: Request, table: FieldTable, kernels: KernelTable, target: DenseRows, *, is_direct: bool
    ) -> None:
        self.request = request
        self.table = table
        self.tangents = Tangents(request, table, target)
        self.accesses = Accesses(request.params, self.tangents)
        self.is_direct = is_direct
        self.has_launched = False
        self._kernels = kernels
        self._target = target
        self._program = weakref.ref(backend.program())
        self._kept: dict[Key, np.ndarray] | None = None  # tangents that are put back at the end of ``undone``

    def launch(
        self,
        kernel: backend.Kernel,
        args: tuple[object, ...],
        check: Check | None = None,
        run: PipelineRun | None = None,
    ) -> LaunchRecord:
        """Run a kernel and its tangents.

        Args:
            kernel: the user's kernel.
            args: its arguments.
            check: called with a newly built kernel before its first launch.
            run: the pipeline run that numbers with tangents among the arguments belong to.
        """
        with backend.exclusive:
            bound, trace = self._bound(kernel, args, check, run), self.request.restart.trace
            if trace is not None:
                fused = bound.fused
                if run is not None and run.has_numbers:
                    warn_of_captured(fused.kernel.captures, kernel, run)
                stores = trace.launch(kernel, bound.values, fused.facts, bound.passed, self.tangents.along)
                if self.clear(stores):  # roles are others now
                    bound = self._bound(kernel, args, check, run)
            return self._launched(bound)

    def build(self, kernel: backend.Kernel, args: tuple[object, ...], check: Check) -> None:
        """Build the kernel with tangents for a launch as the first one of this run; ``check`` is called with it."""
        with backend.exclusive:
            self._bound(kernel, args, check, None)

    def _bound(
        self, kernel: backend.Kernel, args: tuple[object, ...], check: Check | None, run: PipelineRun | None
    ) -> _Bound:
        """A call with its arrays and numbers, the roles of containers now, and a kernel, built if there is none yet."""
        self.check_program()
        check_gradient_is_own(kernel)
        self.has_launched = True
        request, tangents = self.request, self.tangents
        args, values, passed = checked_arguments(kernel, args, request.numbers, run)
        if passed and not tangents.are_known:
            raise PassedNumberError("Python passes a number that depends on params to a kernel")
        numbers = with_passed(request.numbers, passed, tangents.columns)
        binding = tangents.arrays.bind(kernel, values)
        roles = {key: tangents.role(key) for key in tangents.names() if isinstance(key, FieldKey)}
        roles |= {local: tangents.role(key) for local, key in binding.outer.items()}
        names: dict[Key, Key] = {key: local for local, key in binding.outer.items()}
        roles |= tangents.first_order.roles(names)
        block = ColumnBlock(tangents.columns.count, request.block.first, request.block.is_part)
        launch = Launch(
            kernel=kernel,
            args=args,
            block=block,
            fields=self.table,
            roles=roles,
            arrays=binding.arrays,
            numbers=numbers,
            wants_return=request.wants_return if self.is_direct else self._has_dual_result(kernel),
            strategy=request.strategy,
            sparse=self._target.of_launch(names),
            energy=tangents.first_order.target(names),
            is_repeated=self._target.is_dense and not self.is_direct,
        )
        variant: list[object] = [launch.sparse and launch.sparse.variant]
        if launch.energy is not None:
            variant += [launch.energy.carried, launch.energy.has_gradient, launch.energy.has_whole_blocks]
        shapes = tuple((i, info.key, info.shape, info.element_shape) for i, info in binding.arrays.items())
        features = backend.argument_features(kernel, args)
        name = (id(kernel), features, shapes, block.count, block.is_part, *variant, numbers.key)
        fused = self._kernels.find(name, block.first, roles)
        if fused is None:
            backend.materialize()  # fields that the pipeline has just made
            fused = engine.fuse(launch, request.watch)
            if check is not None:
                check(fused, binding.outer)
            self._kernels.add(name, block.first, roles, fused)
        return _Bound(launch, fused, values, passed, binding)

    def _has_dual_result(self, kernel: backend.Kernel) -> bool:
        """Whether Python gets the numbers that a kernel of a pipeline returns with their tangents."""
        if kernel.return_type is None or not self.tangents.are_known:
            return False
        dtype = backend.return_dtype(kernel)
        return dtype is not None and backend.is_real(dtype)

    def result(self, launched: LaunchRecord, run: PipelineRun) -> Any:
        """The value that a kernel of a pipeline has returned, its numbers with tangents."""
        value = launched.result
        if backend.return_dtype(launched.fused.primal) is None:
            return value
        tangents = self.tangents
        return dual_like(value, iter(tangents.values(RETURN)) if tangents.are_known else repeat(UNKNOWN), run)

    def _launched(self, bound: _Bound) -> LaunchRecord:
        tangents, fused, outer, values = self.tangents, bound.fused, bound.binding.outer, bound.values
        tangents.first_order.accept(fused, outer)
        self._target.accept(fused, outer, tangents)
        check_overlaps(bound.binding.given, fused.facts.written)
        self._save(fused, values)
        self.keep(outer.get(k, k) for k in fused.facts.written)
        tangents.set_numbers(bound.launch.numbers)
        if RETURN in fused.shadows and not self.is_direct:
            count = math.prod(backend.return_shape(fused.primal))
            dtype = backend.return_dtype(fused.primal)
            tangents.hold(RETURN, Shadow("the return value", count, tangents.columns.count, dtype))

        def launch() -> Any:
            passed, after = self._passed(fused, outer)
            changes = tangents.changes
            return fused.launch(bound.launch.args, passed), passed, after, changes

        def save(state: State) -> None:
            save_changed(state, fused, self.table, values)
            for array in fused.first_order:
                state.save(tangents.first_order.array(array.name))

        result, passed, after, changes = self._target.run(fused, save, launch)
        self._target.collect(fused, outer)
        for give_back in after:
            give_back()
        tangents.note_written(fused, [outer.get(k, k) for k in fused.shadows if not isinstance(k, OwnArray)])
        self.accesses.note(*tangents.arrays.accesses(fused, bound.binding))
        if self.request.restart.trace is not None:
            self.request.restart.trace.after_launch(fused.primal, values)
        return LaunchRecord(fused, bound.launch.args, passed, changes, result)

    @property
    def is_dense(self) -> bool:
        """Whether tangents are rows, rather than entries of a sparse J."""
        return self._target.is_dense

    def clear(self, stores: Iterable[tuple[View, np.ndarray]]) -> bool:
        """Clear the tangents of entries of arrays that Python has stored to; whether there were any."""
        is_changed = False
        for view, entries in stores:
            rows = self.tangents.rows(view)
            rows = np.arange(rows.start, rows.stop)[entries] if isinstance(rows, slice) else rows[entries]
            if self.tangents.clear(view, rows):
                is_changed = True
                if not self.accesses.overwritten:
                    warn_of_changes(self.tangents.carrier(view).name, len(rows))
                self.accesses.note_overwritten(self.tangents.arrays.shared([view]))
        return is_changed

    def follow_arrays(self) -> None:
        """Notice entries of NumPy arrays and tensors that Python code changed since the last launch."""
        self.clear((region.layout, rows) for region, rows in self.tangents.arrays.regions.changes())

    def _passed(
        self, fused: JacobianKernel, outer: Mapping[Key, View]
    ) -> tuple[list[object], list[Callable[[], None]]]:
        """The arguments of a kernel after those of the user, and the functions to call after the launch."""
        tangents, passed, after = self.tangents, [], []
        for key in fused.shadows:
            is_covered = key in fused.facts.covered
            if isinstance(key, FirstOrderArray):
                passed.append(tangents.first_order.array(key))
            elif isinstance(key, LaunchArray):
                passed.append(self._target.array(fused, key))
            elif key in outer:
                array, give_back = tangents.arrays.borrow(outer[key], is_covered=is_covered)
                passed.append(array)
                if key in fused.facts.written:
                    after.append(give_back)
            else:
                is_scratch = isinstance(key, Scratch)
                shadow = scratch_of(fused, key, tangents.columns) if is_scratch else tangents.shadow(key)
                if is_covered:
                    shadow.is_dirty = False
                else:
                    shadow.clean()
                passed.append(shadow.array)
        if fused.columns.takes_first:
            passed.append(self.request.block.first)
        return passed, after

    def _save(self, fused: JacobianKernel, values: tuple[object, ...]) -> None:
        """Save the containers that a kernel may change, and compare the arrays that it reads with the run before."""
        restart = self.request.restart
        if restart.state is not None:
            save_changed(restart.state, fused, self.table, values)
            if restart.is_repeated:
                restart.state.check_repetition()
        if restart.record is not None:
            restart.record.arrays(fused.primal, fused.facts.read_arguments, values)

    @contextlib.contextmanager
    def undone(self) -> Iterator[tuple[State, set[Key]]]:
        """Within the context, what launches store is saved in a state, and put back at the end, with its tangents.

        Gives the state, and the set of the containers that are written.
        """
        request, state, before, written = self.request, State(), self.accesses.written, set[Key]()
        kept, own = self._kept, dict[Key, np.ndarray]()
        self.request = replace(request, restart=Restart(state))
        self.accesses.written, self._kept = written, own
        try:
            yield state, written
        finally:
            for key in written:
                self.tangents.clear(key, self.tangents.rows(key))
            for key, rows in own.items():
                self.tangents.replace(key, rows)
            before |= written  # in place: another solver's residual may be around this one
            self.request, self.accesses.written, self._kept = request, before, kept
            state.undo()

    def keep(self, written: Iterable[Key]) -> None:
        """Keep the tangents of what is about to be written, within ``undone``."""
        kept = self._kept
        if kept is None:
            return
        for key in written:
            is_first = isinstance(key, (FieldKey, View)) and key not in kept and key not in self.accesses.written
            if is_first and self.tangents.carries(key):
                self.tangents.shadow(key)
                kept[key] = np.array(self.tangents.values(key))

    def check_program(self) -> None:
        """Raise where the run began in another Taichi program."""
        check_same_program(self._program())

    def end_pipeline(self) -> None:
        """End the run of a pipeline."""
        self._target.end_pipeline(self.request.energy and self.request.energy.key)

    def outputs(self) -> list[Any]:
        """The tangents of each output after the run, a row for each entry."""
        return [self.tangents.values(output.key) for output in self.request.outputs]


backend.compile_with(engine.plain_kernel, lambda: registry.version, lambda func: registry.rule_for(func) is not None)


# The table of kernels with tangents, found by name, columns and the roles of containers.

MOST_KERNELS = 256  # kept for one prepared Jacobian, for each of its blocks of columns
KernelName = tuple[object, ...]  # what is known of a launch before its tangents are


class KernelTable(Bounded[Any, JacobianKernel]):
    """The kernels of a prepared form, by their names, and the first column and the roles of their first launch."""

    def __init__(self) -> None:
        super().__init__(MOST_KERNELS)

    def allow(self, blocks: int) -> None:
        """Make room for the kernels of so many blocks of columns."""
        self._most = max(self._most, MOST_KERNELS * blocks)

    def find(self, name: KernelName, first: int, roles: Mapping[Key, Role]) -> JacobianKernel | None:
        """A kernel that is valid for the block of columns from ``first`` on and for these roles."""
        exact = (*name, first, frozenset(roles.items()))
        for key in itertools.chain((exact,), (key for key in list(self) if key[:-2] == name)):
            fused = self.get(key)
            if fused is None:
                continue
            if not is_current(fused):
                del self[key]
            elif not fused.columns.has_block(first):
                continue
            elif key[-1] == exact[-1] or fused.suits(roles):
                return fused
        return None

    def add(self, name: KernelName, first: int, roles: Mapping[Key, Role], fused: JacobianKernel) -> None:
        """Keep a kernel; the oldest one is dropped if there are too many."""
        self[(*name, first, frozenset(roles.items()))] = fused


def is_current(fused: JacobianKernel) -> bool:
    """Whether a kernel was built with the rules and Python values of now.

    Raises:
        UnsupportedError: a Python value has changed, and the plain kernel goes on with the one before.
    """
    return fused.memory.rules.are_current() and fused.kernel.captures.are_current(fused.primal)


def is_repeatable(fused: JacobianKernel) -> bool:
    """Whether a kernel is current, and no rule has been registered since its last launch."""
    return fused.memory.rules.version == registry.version and is_current(fused)


# Checks before a launch with tangents: errors, and warnings where tangents are lost.


def check_gradient_is_own(kernel: backend.Kernel) -> None:
    """Raise if a kernel is launched in a function with ``ti.ad.no_grad`` or ``ti.ad.grad_replaced``."""
    if backend.is_gradient_replaced():
        raise UnsupportedError(
            f"{kernel.func.__qualname__} is launched in a function decorated with ti.ad.no_grad or "
            "ti.ad.grad_replaced, whose gradient is only defined in reverse mode. Call it without the decorator, "
            "or stop the gradient in the kernel."
        )


def check_same_program(program: object) -> None:
    """Raise if a run began in another program; ``program`` is None if that has ended."""
    if program is None or program is not backend.program():
        raise InvalidArgumentError(
            "ti.init or ti.reset was called while a Jacobian was computed, in the pipeline or in another thread: "
            "the fields and kernels from before no longer exist. Call it before."
        )


def checked_arguments(
    kernel: backend.Kernel, args: tuple[Any, ...], numbers: NumberColumns, run: PipelineRun | None
) -> tuple[tuple[Any, ...], tuple[Any, ...], dict[str, list[Any]]]:
    """The arguments, see ``taken_out``; raises where one has ended, or is a struct that holds a parameter."""
    keys = {variable.key for variable, _ in numbers.constants}
    for position, value in enumerate(args):
        problem = backend.ended_problem(value)
        if problem:
            raise InvalidArgumentError(f"Argument {position} of {kernel.func.__qualname__} {problem}.")
        member = _parameter_in(value, keys)
        if member and not backend.is_template(backend.arguments(kernel)[position].annotation):
            raise UnsupportedError(
                f"Argument {position} of {kernel.func.__qualname__} is a struct whose member {member!r} is a "
                "parameter, and a struct that is passed is a constant. Read it in the kernel by its name."
            )
    args = tuple(a.detach() if backend.is_torch_tensor(a) and a.requires_grad else a for a in args)
    return taken_out(kernel, args, run)


def _parameter_in(value: object, keys: Set[object]) -> str:
    """The member of a struct of Python numbers that is one of the parameters, if any."""
    if not isinstance(value, backend.Struct) or not keys:
        return ""
    names = (name for name in value.keys if attribute_variable(value, name).key in keys)
    return next(names, "") or next(filter(None, (_parameter_in(getattr(value, m), keys) for m in value.keys)), "")


class Lost:
    """The fields and arrays that solvers have made constants of, and what to do if one of them is read."""

    def __init__(self) -> None:
        self._names: dict[object, tuple[object, Callable[[object], None]]] = {}

    def __bool__(self) -> bool:
        return bool(self._names)

    def add(self, names: Mapping[Any, object], note: Callable[[Any], None]) -> None:
        """These are constants, by key; ``note`` is called with the name of one that is read before it is written."""
        self._names |= {key: (name, note) for key, name in names.items()}

    def note(self, read: Set[object], written: Set[object]) -> None:
        """A kernel or Python reads and writes."""
        for key in list(self._names):
            if is_among(key, written):
                del self._names[key]
            elif is_among(key, read):
                name, note = self._names.pop(key)
                note(name)

    def read(self, key: object, value: object) -> bool:
        """Python reads a number, or a whole field or array; whether that is one of them."""
        if not self._names:
            return False
        is_lost = any(is_among(lost, {key}) for lost in self._names)
        if isinstance(value, float):
            self.note({key}, set())
        return is_lost


def is_among(key: object, keys: Set[object]) -> bool:
    """Whether a field is among the keys, or an array shares memory with one of them."""
    return key in keys or (isinstance(key, View) and any(isinstance(k, View) and k.overlaps(key) for k in keys))


def warn_of_changes(name: object, count: int) -> None:
    """Warn of entries of an array that Python has stored to."""
    warn_at_user(
        f"{count} entries of {name} were changed from Python between kernels: they count as constants, their tangents "
        "are lost. Change them in a kernel."
    )
