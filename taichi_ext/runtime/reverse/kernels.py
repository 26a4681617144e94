"""Kernels as stages that are launched one by one, forward and back: recorded, transformed, emitted."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import taichi_ext.program as ir
from taichi_ext import backend, engine, launches
from taichi_ext.adjoint import (
    AdjointArray,
    OwnArrays,
    Pair,
    Stage,
    Staged,
    Tape,
    adjoint_array,
    adjoint_of,
    checked,
    rows_in_lanes,
    running_number,
    staged,
    with_stores,
)
from taichi_ext.analysis.activity import Activity, find_activity, useful_activity
from taichi_ext.analysis.changes import read_containers, written_containers
from taichi_ext.analysis.cuts import Paths, find_paths
from taichi_ext.analysis.loops import Extent, iterations
from taichi_ext.boundary.registry import RulesInUse
from taichi_ext.cached import cached_property
from taichi_ext.differentiate.edges.edges import check_again
from taichi_ext.differentiate.facts.decisions import Device, Differentiated, DifferentiationRequest, Role
from taichi_ext.differentiate.facts.facts import shadow_argument
from taichi_ext.differentiate.transform.forward import differentiate
from taichi_ext.differentiate.transform.preparation import check_bits
from taichi_ext.emit import build
from taichi_ext.errors import UnsupportedError
from taichi_ext.program import Container, Load, Local, Read, Value
from taichi_ext.program.build import add, element, written_out
from taichi_ext.program.keys import RETURN
from taichi_ext.runtime.memory.shadows import check_indices, numpy_dtype
from taichi_ext.runtime.python.dual_numbers import warn_at
from taichi_ext.runtime.reverse.boxes import Places
from taichi_ext.schedule import Machine, from_below_zero, is_short_below_zero, schedule, without_atomics
from taichi_ext.schedule.lanes import CannotError
from taichi_ext.simplify import simplify
from taichi_ext.simplify.usage import all_values

_UNSURE = (
    "Iterations of this parallel loop may read or replace entries of {} that others store to. With several threads, "
    "their order is a matter of chance; the gradient takes none of them to see what others store. For a gradient in "
    "order, put ti.loop_config(serialize=True) before the loop."
)
_SIZES = "The adjoint of {} has {} entries x {} cotangents x {} directions"
MOST_WRITTEN_OUT = 1000  # operations of a stage times cotangents, above which half of these are in a launch
_LEAST_HALVED = 6  # cotangents
_ENDLESS = (1 << 31) - 1  # numbers of an array whose size is not known


@dataclass(frozen=True, eq=False)
class StageKernel:
    """A stage as it is launched forward or back.

    Attributes:
        build: traces it; called when it is launched first.
        extra: its own arguments, in order.
        places: the entries that it reads and writes.
        reads: the containers of the user's kernel, and of numbers, of which it needs the entries.
        writes: those that it changes.
        tangents: what tangents among its own arguments belong to: containers, or memory for tangents of locals.
        scratch: the sizes of that memory.
    """

    build: Callable[[], Any]
    extra: tuple[Container, ...]
    places: Places
    reads: frozenset[Container]
    writes: frozenset[Container]
    tangents: Mapping[Container, Any] = field(default_factory=dict)
    scratch: Mapping[Any, int] = field(default_factory=dict)

    @cached_property
    def kernel(self) -> Any:
        """It takes the arguments of the user's kernel, then its own."""
        return self.build()

    @property
    def is_built(self) -> bool:
        """Whether it is compiled already."""
        return "kernel" in vars(self)


@dataclass(frozen=True, eq=False)
class AdjointKernel:
    """The adjoint of a stage for some active containers.

    Attributes:
        stage: the kernel; it needs the entries of ``stage.reads`` as they were before the stage.
        own: containers with sums of each thread, and these.
        tape: the stack of a thread; None if it is not used.
        active: the containers that have derivatives after the stage.
        before: the containers that have derivatives before the stage.
        rows: the number of cotangents in one launch.
        is_in_lanes: whether neighbouring iterations go through inner loops together.
        recorded: arrays of values that the stage has stored as it ran forward.
    """

    stage: StageKernel
    arrays: Mapping[Container, Container]
    own: tuple[tuple[Container, Container], ...]
    tape: Tape | None
    active: frozenset[Container]
    before: frozenset[Container] = frozenset()
    rows: int = 1
    is_in_lanes: bool = False
    recorded: tuple[Container, ...] = ()

    @property
    def recorded_nbytes(self) -> int:
        """The memory of these."""
        return sum(math.prod(c.shape or ()) * np.dtype(numpy_type(c)).itemsize for c in self.recorded)


@dataclass(frozen=True)
class NumberPlace:
    """Where a number that a launch is given stands among the numbers of its type.

    Attributes:
        key: the name of the argument, or the key of the Python number.
        container: the numbers.
        start: the first of its entries.
        shape: of a vector or matrix.
    """

    key: Hashable
    container: Container
    start: int
    shape: tuple[int, ...]


@dataclass(eq=False)
class StagedKernel:
    """A kernel for arguments of some types and shapes.

    Attributes:
        kernel: the user's.
        references: to the arguments of the last launch, which are not kept alive.
        keys: the keys of fields and arrays in a launch, by container.
        staged: its stages.
        places: the entries that it reads and writes.
        extents: of its containers.
        numbers: the arguments and Python numbers that may depend on parameters.
        accessed: the containers that the user's kernel reads, and those that it writes.
        captures: the Python values that it was recorded with.
        rules: the rules in use.
    """

    kernel: Any
    references: tuple[Callable[[], Any], ...]
    program: ir.Program
    infos: Mapping[Container, Any]
    staged: Staged
    places: Places
    extents: Mapping[Container, Extent]
    numbers: tuple[NumberPlace, ...]
    accessed: tuple[frozenset[Container], ...]
    captures: Any
    rules: RulesInUse
    uses: Any
    integers: tuple[tuple[Local, int], ...]  # arguments by position that indices may be computed from
    folded: Mapping[Value, Value]  # numbers that Python has computed from parameters, by their expressions
    columns: int = 0  # of tangents along which everything is differentiated, for second derivatives
    _warned: set[Container] = field(default_factory=set)  # of the order of iterations
    _checked: set[Hashable] = field(default_factory=set)  # the arguments of launches whose order is known
    _forward: dict[Hashable, StageKernel] = field(default_factory=dict)
    _adjoints: dict[Hashable, AdjointKernel] = field(default_factory=dict)
    _later: dict[Hashable, AdjointKernel] = field(default_factory=dict)  # see ``adjoint_of_state``
    _results: dict[Hashable, list[Container]] = field(default_factory=dict)

    def texts(self) -> Iterator[str]:
        adjoints = (adjoint.stage for adjoint in dict.fromkeys(self._adjoints.values()))
        yield from (stage.kernel.text for stage in (*self._forward.values(), *adjoints) if stage.is_built)

    @cached_property
    def paths(self) -> Paths:
        """From where to where numbers go in it."""
        return find_paths(self.program, self._key)

    def _key(self, memory: Local | Container | None) -> Any:
        if memory is None:
            return RETURN
        return None if isinstance(memory, Local) else self.infos[memory].key if memory in self.infos else id(memory)

    def is_current(self) -> bool:
        """Whether it was built with the rules and Python values of now; raises as ``Captures.are_current``."""
        return self.rules.are_current() and self.captures.are_current(self.kernel)

    def check_apart(self, arguments: Mapping[Local, int], cells: Mapping[Container, Any]) -> None:
        """Raise, or warn, where with these arguments an iteration stores to entries that others use."""
        for pair in self.staged.order.apart:
            first, second = (self.places.numbers(place, arguments) for place in (pair.first, pair.second))
            if first is not None and first == second:
                raise UnsupportedError(
                    f"{ir.cited(pair.place)}With these arguments, iterations of a parallel loop store to entries of "
                    f"{pair.container.name} that others read or store to, in an order that adjoints do not know. Pass "
                    "indices that differ, or run the loop with ti.loop_config(serialize=True)."
                )
        for n, (pair, read) in enumerate(self._unsure):
            c, place, launch = pair.container, pair.place, (n, *(arguments[local] for local in read))
            if launch in self._checked or c in self._warned or not c.dtype.is_real:
                continue
            self._checked.add(launch)
            lists = [x for x in self.places.loads if pair.is_alike and x.dtype.is_integer and x in cells]
            if self.places.meet(pair, {**arguments, **{x: cells[x].numbers() for x in lists}}, self.extents):
                self._warned.add(c)
                warn_at(_UNSURE.format(c.name), None if place is None else (place.file, place.line))

    @cached_property
    def _unsure(self) -> list[tuple[Pair, list[Local]]]:
        """Pairs whose iterations have to be compared, and the arguments that these depend on."""
        return [(pair, self.places.arguments_of(pair)) for pair in self.staged.order.unsure]

    def work(self, n: int) -> float:
        """The operations on real numbers of a stage; infinity if it has a loop whose length is not known."""

        def times(s: ir.Statement, around: float) -> float:
            count = 1 if isinstance(s, ir.If) else iterations(s, self.extents) if isinstance(s, ir.For) else None
            return math.inf if count is None else count * around

        counts = ir.inherited(self.staged.stages[n].original, 1.0, times)
        return sum(
            count * sum(isinstance(v, (ir.Op, Load)) and v.dtype.is_real for v in all_values(s)) for s, count in counts
        )

    def forward(
        self,
        n: int,
        *,
        is_again: bool = False,
        active: frozenset[Container] = frozenset(),
        recorded: tuple[Container, ...] = (),
    ) -> StageKernel:
        """A stage as it runs forward.

        ``is_again``: with the random numbers of its first run; ``active``: the containers that have tangents;
        ``recorded``: arrays to store values to.
        """
        stage = self.staged.stages[n]
        is_again = is_again and stage.again is not None
        name = n, is_again, active, recorded
        if name not in self._forward:
            body = stage.again if is_again and stage.again is not None else stage.original
            if recorded and stage.recording is not None:
                body = with_stores(stage.recording.original, stage.recording.recorded, recorded)
            if not active:
                body = self._scheduled(stage.loop, ir.mapped(body, lambda s: ir.with_nodes(s, self._folded)))
            made = self._stage_kernel(f"{self.program.name}_{n}", body, [*recorded], active)
            reads = made.reads | (read_containers(stage.body) & self.staged.own.keys())
            made = replace(made, reads=reads - stage.draws, writes=made.writes - stage.draws)
            self._forward[name] = made
        return self._forward[name]

    def _scheduled(self, loop: ir.For | None, body: ir.Body) -> ir.Body:
        """A stage whose loop runs as it does in forward mode, in lanes or row by row, or whose rows are in lanes.

        ``loop``: that of the stage if its iterations give the same in any order.
        """
        if any(isinstance(s, ir.For) and s.is_together for s in ir.statements(body)):
            return body
        program, threads = replace(self.program, body=body), backend.thread_count() or 1
        machine = engine.machine_of(program, self.extents, threads, is_checked=backend.is_debug())
        if loop is not None and len(body) == 1 and isinstance(body[0], ir.For):
            with contextlib.suppress(CannotError):
                return (rows_in_lanes(body[0], machine),)
        return schedule(program, program, {}, machine).program.body

    def _folded(self, value: Value) -> Value:
        """Where Python has folded numbers, their value is that of the plain kernel."""
        return self.folded.get(value, value)

    def adjoint(
        self,
        n: int,
        active: frozenset[Container],
        width: int,
        *,
        is_guarded: bool = False,
        is_recorded: bool = False,
    ) -> AdjointKernel:
        """The adjoint of a stage; ``active`` are the containers with derivatives before it.

        ``is_guarded``: a product of 0 with what is infinite or not a number is 0; ``is_recorded``: it loads values that
        the stage has stored.
        """
        name = n, active, width, is_guarded, is_recorded
        if name not in self._adjoints:
            plain = self.staged.stages[n]
            stage = plain if plain.recording is None or not is_recorded else plain.recording
            body = stage.body
            facts = self._activity(body, active)
            activity = useful_activity(replace(self.program, body=body), facts)
            same = n, activity, width, is_guarded, is_recorded
            if same not in self._adjoints:  # what becomes active in the stage makes others alike
                machine = Machine(backend.thread_count() or 1, extents=self.extents, is_fast=backend.is_fast())
                made = self._made(n, stage, activity, machine, width, is_guarded)
                self._adjoints[same] = replace(made, before=active)
            self._adjoints[name] = self._adjoints[same]
        return self._adjoints[name]

    def results(self, n: int, active: frozenset[Container]) -> list[Container]:
        """The containers with derivatives that a stage writes, if these have some before it."""
        if active and (n, active) not in self._results:
            check_bits(self.program.body, self._activity(self.program.body, active))  # also by way of other stages
            found = self._activity(self.staged.stages[n].body, active).containers
            self._results[n, active] = [c for c in found if c in self.forward(n).writes]
        return self._results[n, active] if active else []

    def adjoint_of_state(self, n: int, active: frozenset[Container], width: int) -> AdjointKernel:
        """The adjoint of a stage; one for second derivatives, which takes long to compile, is that of later launches.

        There, all that the kernel has changed is active.
        """
        if not self.columns:
            return self.adjoint(n, active, width)
        name = n, active, width
        if name not in self._later:
            stage = self.staged.stages[n].body
            state = self._activity(self.program.body, active).containers & read_containers(self.program.body)
            later = active | (state & (read_containers(stage) | written_containers(stage)))
            try:
                self._later[name] = self.adjoint(n, later, width)
            except UnsupportedError:  # of what may not be active at any time
                self._later[name] = self.adjoint(n, active, width)
        return self._later[name]

    def recorded(self, n: int, plain: AdjointKernel, width: int) -> AdjointKernel | None:
        """The same adjoint where the stage has stored values for it; None where that does not pay."""
        if self.staged.stages[n].recording is None or plain.is_in_lanes or self.columns:
            return None
        made = self.adjoint(n, plain.before, width, is_recorded=True)
        return made if made.recorded else None

    def _made(
        self, n: int, stage: Stage, activity: Activity, machine: Machine, width: int, is_guarded: bool
    ) -> AdjointKernel:
        stage = checked(stage, self.program, {**self.extents, **self._own_extents()}, activity)
        used = read_containers(stage.body) | written_containers(stage.body)
        arrays: dict[Container, AdjointArray] = {}
        for k, c in enumerate(sorted(activity.containers & used, key=lambda c: c.name)):
            shape = (self.staged.own[c],) if c in self.staged.own else c.shape or ()
            arrays[c] = adjoint_array(c, f"adj_{k}_{c.name}" if c.name.isidentifier() else f"adj_{k}", shape, width)
            sizes = (math.prod(arrays[c].sizes), width, max(1, self.columns))
            check_indices(_SIZES.format(c.name, *sizes), math.prod(sizes), "Use fewer of these at a time.")
        rows = _rows_written_out(stage.body, width)
        if stage.loop is not None and is_short_below_zero(stage.loop, self.extents):
            machine = replace(machine, threads=1)
        made = adjoint_of(stage, activity, arrays, machine, rows, is_guarded=is_guarded, is_again=self.columns > 0)
        tape = made.tape
        body = simplify(replace(self.program, body=made.body)).body
        touched = read_containers(body) | written_containers(body)
        uses_tape = tape.is_used and tape.status in touched
        own = tuple((c, o) for c, o in made.own.items() if o in touched)
        extra = [a.container for a in arrays.values() if a.container in touched]
        extra += [tape.reals, tape.integers, tape.status] if uses_tape else []
        extra += [o for _, o in own]
        recorded = tuple(dict.fromkeys(p.container for p in stage.recorded.values() if p.container in touched))
        extra += recorded
        moving = {*extra, *activity.containers} - {tape.integers, tape.status} if self.columns else set[Container]()
        is_in_lanes = any(isinstance(s, ir.For) and s.is_function for s in body)
        kernel = self._stage_kernel(f"{self.program.name}_{n}_adjoint", body, extra, frozenset(moving))
        kernel = replace(kernel, reads=kernel.reads - stage.draws)
        by_container = {c: a.container for c, a in arrays.items()}
        used_tape = tape if uses_tape else None
        return AdjointKernel(
            kernel,
            by_container,
            own,
            used_tape,
            activity.containers,
            rows=rows,
            is_in_lanes=is_in_lanes,
            recorded=recorded,
        )

    def _activity(self, body: ir.Body, active: frozenset[Container]) -> Activity:
        boundaries = (s for s in ir.statements(body) if isinstance(s, ir.Boundary))
        own = [local for s in boundaries for locals_ in s.inner.values() for local in locals_]
        return find_activity(replace(self.program, body=body), active, own)

    def _own_extents(self) -> dict[Container, Extent]:
        return {c: Extent((size,), ()) for c, size in self.staged.own.items()}

    def _with_tangents(
        self, body: ir.Body, own: Sequence[Container], active: frozenset[Container]
    ) -> tuple[ir.Body, Differentiated]:
        """A block that also computes tangents, of active containers along the given ones."""
        extents = {c: Extent(c.shape or (_ENDLESS,), (), is_safe=True) for c in own}
        program = replace(self.program, body=body, returns=(), containers=(*self.program.containers, *own))
        extents = {**extents, **self.extents, **self._own_extents()}
        roles = {c: Role(is_fresh=c not in active) for c in extents}
        device = Device(threads=backend.thread_count())
        differentiated = differentiate(program, DifferentiationRequest(self.columns, roles, extents, device=device))
        body = ir.mapped(differentiated.program.body, lambda s: ir.with_nodes(s, written_out))
        return simplify(replace(differentiated.program, body=body)).body, differentiated

    def _stage_kernel(
        self, name: str, body: ir.Body, own: list[Container], active: frozenset[Container] = frozenset()
    ) -> StageKernel:
        reads, writes = read_containers(body), written_containers(body)
        extra = (*own, *(c for c in self.staged.own if c in reads | writes))
        places = Places(body, (local for local, _ in self.integers))
        visited = self._visited(body)
        tangents: dict[Container, Any] = {}
        scratch: Mapping[Any, int] = {}
        if active:
            body, differentiated = self._with_tangents(body, extra, active)
            tangents, scratch = {c: what for what, c in differentiated.shadows}, differentiated.scratch_sizes
            extra = (*extra, *tangents)
        if backend.thread_count() == 1:
            body = without_atomics(body, writes | set(extra))
        program = replace(
            self.program,
            name=name,
            body=body,
            arguments=(*self.program.arguments, *map(shadow_argument, extra)),
            returns=(),
            containers=(*self.program.containers, *extra),
        )

        def build_kernel() -> Any:
            with backend.deep_recursion(self.kernel):
                emitted = build(from_below_zero(program, self.extents, is_host=True))
                features = tuple(backend.array_feature(backend.named_type(c.dtype.name)) for c in extra)
                args = tuple(reference() for reference in self.references)
                kernel = engine.compiled(self.kernel, args, emitted, features)
                kernel.return_type = None
                kernel.uses = self.uses
                kernel.compile()
                return kernel

        known = frozenset((*self.program.containers, *self.staged.own))
        return StageKernel(build_kernel, extra, places, known & (reads | visited), known & writes, tangents, scratch)

    def _visited(self, body: ir.Body) -> set[Container]:
        """The fields whose active cells decide which iterations run."""
        fields = [c for c in self.program.containers if not c.is_argument and not backend.is_dense(c.object)]
        domains = [s.domain[0] for s in ir.statements(body) if isinstance(s, ir.For) and s.kind in ("field", "grouped")]
        is_known = all(isinstance(d, Container) for d in domains)
        return {c for c in fields if c in domains} if is_known else set(fields)


def _rows_written_out(body: ir.Body, width: int) -> int:
    """How many cotangents one launch takes: Taichi compiles the adjoint of each operation once for each of them."""
    size = sum(v.contents.size for s in ir.statements(body) for v in ir.values_of(s))
    return width if width % 2 or width < _LEAST_HALVED or size * width <= MOST_WRITTEN_OUT else width // 2


def staged_kernel(launch: launches.Launch, columns: int = 0) -> StagedKernel:
    """A kernel as stages, for a launch; with ``columns`` of tangents for second derivatives.

    Raises:
        UnsupportedError: it has no adjoint, or no second derivative.
    """
    with backend.deep_recursion(launch.kernel):
        captures, rules = backend.Captures(), RulesInUse(takes_derivative=True)
        program, infos, locals_, accessed = engine.recorded(launch, rules, captures, 2 if columns else 1)
        for s in ir.statements(program.body) if columns else ():
            if isinstance(s, ir.Boundary):
                check_again(s)
        leaves = {leaf.name: n for n, leaf in enumerate(backend.leaf_arguments(launch.kernel))}
        values: Any = backend.leaf_values(launch.kernel, launch.args)
        shapes = {c: tuple(values[leaves[c.name]].shape[: c.ndim]) for c in program.containers if c.is_argument}
        program, renamed = _with_shapes(program, {c: s for c, s in shapes.items() if c.shape != s})
        infos = {renamed.get(c, c): info for c, info in infos.items()}
        fields = {c.name: c.object for c in program.containers if not c.is_argument}
        whole = {leaf.name: leaf.position for leaf in backend.leaf_arguments(launch.kernel) if not leaf.path}
        integers = [
            (argument.value.local, whole[argument.name])
            for argument in program.arguments
            if isinstance(argument.value, Read) and argument.name in whole and not argument.value.dtype.is_real
        ]
        own = OwnArrays()
        program, numbers, folded = _with_numbers(program, locals_, own)
        extents = {c: _extent(c) for c in program.containers}
        places = Places(program.body, (local for local, _ in integers))
        kernel = StagedKernel(
            launch.kernel,
            references_to(launch.args),
            program,
            infos,
            staged(program, extents, backend.thread_count() or 1, places.is_fixed, own),
            places,
            extents,
            numbers,
            tuple(
                frozenset(renamed.get(c, c) for c in found if c in infos or renamed.get(c, c) in infos)
                for found in accessed
            ),
            captures,
            rules,
            backend.Uses(backend.short_name(launch.kernel), fields),
            tuple(integers),
            folded,
            columns,
        )
        for size in kernel.staged.own.values():
            what = f"What {program.name} draws, or passes from one loop to another, has {size} entries"
            check_indices(what, size, "Make them in several launches.")
        features = backend.argument_features(launch.kernel, launch.args)
        backend.first_captures(launch.kernel, features, captures)
        captures.are_current(launch.kernel)
        rules.count_uses()
        return kernel


def _extent(c: Container) -> Extent:
    return Extent(c.shape or (), c.offset, c.is_argument or backend.is_dense(c.object))


def _with_shapes(
    program: ir.Program, shapes: Mapping[Container, tuple[int, ...]]
) -> tuple[ir.Program, dict[Container, Container]]:
    new = {c: replace(c, shape=shape) for c, shape in shapes.items()}

    def change(v: Value) -> Value:
        is_one = isinstance(v, (Load, ir.Size)) and v.container in new
        return replace(v, container=new[v.container]) if is_one else v  # type: ignore[attr-defined]

    def changed(s: ir.Statement) -> ir.Statement:
        s = ir.with_places(s, change)
        if isinstance(s, ir.For) and s.domain and isinstance(s.domain[0], Container) and s.domain[0] in new:
            s = replace(s, domain=(new[s.domain[0]],))
        return s

    arguments = tuple(replace(a, value=new.get(a.value, a.value)) for a in program.arguments)  # type: ignore[arg-type]
    containers = tuple(new.get(c, c) for c in program.containers)
    return replace(program, body=ir.mapped(program.body, changed), containers=containers, arguments=arguments), new


def _with_numbers(
    program: ir.Program, locals_: Mapping[Local, Hashable], own: OwnArrays
) -> tuple[ir.Program, tuple[NumberPlace, ...], dict[Value, Value]]:
    """The program with numbers that may depend on parameters as entries of arrays, which have adjoints.

    Returns:
        The program, the places of the numbers, and the numbers that Python has computed from parameters, by the
        expressions that stand for them.
    """
    places = {
        local: NumberPlace(key, *own.reserve(local.dtype, math.prod(local.shape), "numbers_"), local.shape)
        for local, key in locals_.items()
    }
    if not places:
        return program, (), {}
    folded: dict[Value, Value] = {}

    def change(v: Value) -> Value:
        if isinstance(v, ir.FoldedConst):
            source = ir.rebuilt(v.source, change)
            if source is v.source:
                return v
            folded[source] = v.constant
            return source
        if not isinstance(v, Read) or v.local not in places:
            return v
        place = places[v.local]
        return element(place.container, add(running_number(v.index, place.shape), place.start))

    body = ir.mapped(program.body, lambda s: ir.with_nodes(s, change))
    return replace(program, body=body), tuple(places.values()), folded


def numpy_type(c: Container) -> Any:
    """NumPy's type of a container's numbers."""
    return numpy_dtype(backend.named_type(c.dtype.name))


def references_to(args: tuple[Any, ...]) -> tuple[Callable[[], Any], ...]:
    """Weak references to arguments, where they can be had."""
    return tuple(map(_reference, args))


def _reference(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value
