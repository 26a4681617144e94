"""The launches of one run: each kernel with tangents is found or built, and launched on the tangents before it."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

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
from taichi_ext.program.keys import Key, LaunchArray, OwnArray, Scratch
from taichi_ext.record.variables import attribute_variable
from taichi_ext.runtime.launching.tangents import (
    DenseRows,
    LongKernelError,
    Request,
    Tangents,
    check_known,
    save_changed,
    scratch_of,
)
from taichi_ext.runtime.memory.array_tangents import Binding, check_overlaps
from taichi_ext.runtime.memory.regions import View
from taichi_ext.runtime.memory.shadows import FieldTable
from taichi_ext.runtime.memory.state import State
from taichi_ext.runtime.python.dual_numbers import PipelineRun, is_dual, warn_at_user
from taichi_ext.runtime.python.run_record import taken_out, with_passed

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


class PlannedLaunch(NamedTuple):
    """A call of a kernel with its arrays and numbers, and the kernel with tangents for it."""

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
    """One run of a kernel; see ``pipeline.PipelineSession`` for those of a pipeline.

    Args:
        request: the columns to compute.
        table: the fields that kernels use.
        kernels: the kernels with tangents, kept between runs.
        target: the target for entries of J.

    Attributes:
        accesses: the containers read and written so far.
    """

    is_repeated = False  # whether the same kernel may be launched again, on rows of tangents that it has written

    def __init__(self, request: Request, table: FieldTable, kernels: KernelTable, target: DenseRows) -> None:
        self.request = request
        self.table = table
        self.target = target
        self.tangents = Tangents(request, table, target)
        self.accesses = Accesses(request.params, self.tangents)
        self.has_launched = False
        self._kernels = kernels
        self._program = weakref.ref(backend.program())

    def build(
        self,
        kernel: backend.Kernel,
        args: tuple[object, ...],
        check: Check | None = None,
        run: PipelineRun | None = None,
    ) -> PlannedLaunch:
        """A launch with a kernel with tangents, which is built if there is none yet for the roles of containers now.

        Args:
            kernel: the user's kernel.
            args: its arguments.
            check: called with a newly built kernel.
            run: the pipeline run that numbers with tangents among the arguments belong to.
        """
        with backend.exclusive:
            self.check_program()
            check_gradient_is_own(kernel)
            self.has_launched = True
            args, values, passed = checked_arguments(kernel, args, self.request.numbers, run)
            duals = (n for entries in passed.values() for n in entries if is_dual(n))
            check_known("Python passes a number that depends on params to a kernel", (n.tangent for n in duals))
            numbers = with_passed(self.request.numbers, passed, self.tangents.columns)
            binding = self.tangents.arrays.bind(kernel, values)
            launch = self._with_tangents(kernel, args, numbers, binding)
            shapes = tuple((i, info.key, info.shape, info.element_shape) for i, info in binding.arrays.items())
            variants = launch.sparse and launch.sparse.variant, launch.energy.variant, numbers.key
            block, features = launch.block, backend.argument_features(kernel, args)
            name = (id(kernel), features, shapes, block.count, block.is_part, *variants)
            fused = self._kernels.find(name, block.first, launch.roles)
            if fused is None:
                backend.materialize()  # fields that the pipeline has just made
                fused = engine.fuse(launch, self.request.watch)
                if fused.kernel.lines > self.request.most_lines and not fused.facts.has_random:
                    name = backend.short_name(kernel)
                    raise LongKernelError(f"{name} with tangents has {fused.kernel.lines} lines, which compile slowly")
                if check is not None:
                    check(fused, binding.outer)
                self._kernels.add(name, block.first, launch.roles, fused)
            return PlannedLaunch(launch, fused, values, passed, binding)

    def _with_tangents(
        self, kernel: backend.Kernel, args: tuple[object, ...], numbers: NumberColumns, binding: Binding
    ) -> Launch:
        """A launch, with the roles of containers now."""
        request, tangents = self.request, self.tangents
        names: dict[Key, Key] = {key: local for local, key in binding.outer.items()}
        roles = {key: tangents.role(key) for key in tangents.names() if isinstance(key, FieldKey)}
        roles |= {local: tangents.role(key) for local, key in binding.outer.items()}
        roles |= tangents.first_order.roles(names)
        return Launch(
            kernel=kernel,
            args=args,
            block=ColumnBlock(tangents.columns.count, request.block.first, request.block.is_part),
            fields=self.table,
            roles=roles,
            arrays=binding.arrays,
            numbers=numbers,
            wants_return=self.wants_return(kernel),
            strategy=request.strategy,
            sparse=self.target.of_launch(names),
            energy=tangents.first_order.target(names),
            is_repeated=self.is_repeated,
        )

    def wants_return(self, kernel: backend.Kernel) -> bool:
        """Whether the tangents of what a kernel returns are needed."""
        return self.request.wants_return

    def launch(self, planned: PlannedLaunch) -> LaunchRecord:
        """Run a kernel and its tangents."""
        tangents, fused, outer, values = self.tangents, planned.fused, planned.binding.outer, planned.values
        tangents.first_order.accept(fused, outer)
        self.target.accept(fused, outer, tangents)
        check_overlaps(planned.binding.given, fused.facts.written)
        self.before_launch(planned)
        tangents.set_numbers(planned.launch.numbers)

        def launch() -> Any:
            passed, after = self._passed(fused, outer)
            changes = tangents.changes
            return fused.launch(planned.launch.args, passed), passed, after, changes

        def save(state: State) -> None:
            save_changed(state, fused, self.table, values)
            for array in fused.first_order:
                state.save(tangents.first_order.array(array.name))

        result, passed, after, changes = self.target.run(fused, save, launch)
        self.target.collect(fused, outer)
        for give_back in after:
            give_back()
        tangents.note_written(fused, [outer.get(k, k) for k in fused.shadows if not isinstance(k, OwnArray)])
        self.accesses.note(*tangents.arrays.accesses(fused, planned.binding))
        return LaunchRecord(fused, planned.launch.args, passed, changes, result)

    def before_launch(self, planned: PlannedLaunch) -> None:
        """Save the containers that a kernel may change."""
        restart = self.request.restart
        if restart.state is not None:
            save_changed(restart.state, planned.fused, self.table, planned.values)
            if restart.is_repeated:
                restart.state.check_repetition()

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
                passed.append(self.target.array(fused, key))
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

    def check_program(self) -> None:
        """Raise where the run began in another Taichi program."""
        check_same_program(self._program())

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
