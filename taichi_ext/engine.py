"""The engine on one page: a kernel is recorded, simplified, differentiated and emitted."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np

from taichi_ext import backend, stages
from taichi_ext.analysis.accesses import draws_random_numbers, read_containers, read_locals
from taichi_ext.analysis.activity import find_activity
from taichi_ext.analysis.changes import written_containers
from taichi_ext.analysis.linearity import check_rules
from taichi_ext.analysis.loops import Extent
from taichi_ext.analysis.order import free_loops
from taichi_ext.boundary.registry import RulesInUse, registry
from taichi_ext.differentiate import shadows
from taichi_ext.differentiate.arguments import shadow_argument
from taichi_ext.differentiate.decisions import RETURN, Differentiated, Seeds
from taichi_ext.differentiate.forward import differentiate
from taichi_ext.differentiate.sparse_numbering import SparseSeeds
from taichi_ext.differentiate.sparse_sink import SparseResult
from taichi_ext.differentiate.storage import SPARSE, STRATEGIES
from taichi_ext.emit import build
from taichi_ext.launches import ContainerInfo, Fused, KernelFacts, Launch, Role, refuse_changed
from taichi_ext.program import (
    Argument,
    Assign,
    Atomic,
    Container,
    For,
    Load,
    Local,
    Program,
    Read,
    Update,
    entries,
    mapped,
    rebuilt,
    with_values,
)
from taichi_ext.record import record
from taichi_ext.record.constants import Constants
from taichi_ext.record.node_calls import has_node_calls, refuse_lost, with_appends, with_clears
from taichi_ext.record.recording import field_container
from taichi_ext.record.taichi_types import type_of
from taichi_ext.schedule import Machine, Scheduled, schedule
from taichi_ext.simplify import simplify


def fuse(launch: Launch) -> Fused:
    """The kernel that does what ``launch.kernel`` does, and its tangents."""
    start = time.perf_counter()
    captures, constants = backend.Captures(), constants_of(launch)
    rules = RulesInUse(takes_derivative=launch.columns > 0 or launch.sparse is not None)
    recorded = record(launch.kernel, launch.args, rules, captures, constants)
    recorded, infos = with_whole_fields(recorded, launch)
    if has_node_calls(recorded.body):
        recorded, infos = with_node_calls(recorded, launch, infos, constants)
    program = simplify(recorded)
    check_rules(program)
    seeds = seeds_of(program, launch, infos, constants)
    if launch.is_repeated and launch.sparse is None:
        seeds = with_own_tangents(program, seeds)
    differentiated = differentiate(program, seeds)
    if launch.watch is not None:
        differentiated = replace(differentiated, program=launch.watch.program(differentiated))
    scheduled = with_schedule(simplify(with_arguments(differentiated)), program, differentiated, launch, seeds)
    emitted = build(scheduled.program)
    kernel = compiled(launch, emitted.kernel._primal, differentiated, scheduled.paired)
    kernel.captures = captures
    features = backend.argument_features(launch.kernel, launch.args)
    refuse_changed(launch.kernel, backend.first_captures(launch.kernel, features, captures).changed())
    stages.note(f"{backend.short_name(launch.kernel)} analysed in {differentiated.walks} walks", start)
    rules.count_uses()
    keys = tuple(infos[what].key if what in infos else what for what, _ in differentiated.shadows)
    report = replace(differentiated.report, loops=(*differentiated.report.loops, *scheduled.choices))
    differentiated = replace(differentiated, report=report)
    facts, sizes = _facts(recorded, differentiated, infos, launch, constants), differentiated.scratch_sizes
    facts = replace(facts, rules=tuple(rules.found.items()))
    fused = Fused(launch.kernel, kernel, keys, facts, emitted.text, sizes, registry.version, launch.columns)
    fused.paired = frozenset(infos[what].key for what, c in differentiated.shadows if c in scheduled.paired)
    fused.program, fused.arrays = scheduled.program, launch.arrays
    if launch.sparse is None:
        fused.assumed = {info.key: assumed_role(c, launch, seeds, differentiated) for c, info in infos.items()}
    if differentiated.sparse is not None:
        _note_entries(fused, differentiated.sparse)
    return fused


def plain_kernel(kernel: Any, args: tuple[Any, ...]) -> Any:
    """A kernel that Taichi cannot compile by itself (with antialiased edges), without a Jacobian.

    Taichi may compile it for its reverse mode.
    """
    is_reverse = backend.is_reverse(kernel)
    rules = RulesInUse(takes_derivative=is_reverse)
    captures = backend.Captures()
    program = simplify(record(kernel, args, rules, captures))
    seeds = Seeds(0, {}, {}, is_host=backend.is_host_arch(), is_reverse=is_reverse)
    emitted = build(simplify(differentiate(program, seeds).program))
    rules.count_uses()
    positions = [n for n, a in enumerate(kernel.arguments) if not isinstance(a.annotation, backend.ti.template)]
    features = backend.argument_features(kernel, args)
    plain = backend.EmittedKernel(
        emitted.kernel._primal,
        positions,
        [args[p] for p in positions],
        tuple(features[p] for p in positions),
        has_vectors=emitted.has_vectors,
        like=kernel,
    )
    plain.captures = captures
    return plain


def _note_entries(fused: Fused, found: SparseResult) -> None:
    """What a session has to know of the entries of a sparse Jacobian."""
    fused.sites, fused.sparse, fused.columns = found.sites, found.columns, found.columns.width
    fused.row_counts = {key: c.size for key, c in found.containers.items()}
    fused.row_types = {key: backend.named_type(c.dtype.name) for key, c in found.containers.items()}


def constants_of(launch: Launch) -> Constants | None:
    """The Python numbers that are parameters; None where there are none, and no name could mean one."""
    if not launch.columns or not (launch.constants or launch.argument_columns):
        return None
    return Constants(tuple(variable for variable, _ in launch.constants), frozenset(launch.argument_columns))


def with_whole_fields(program: Program, launch: Launch) -> tuple[Program, dict[Container, ContainerInfo]]:
    """What is known outside of the kernel of its fields and arrays, each field being one container.

    A component of a vector field that the kernel names by itself becomes an entry of the field.
    """
    infos: dict[Container, ContainerInfo] = {}
    whole: dict[Any, Container] = {}
    parts: dict[Container, tuple[Container, tuple[int, ...]]] = {}
    positions = {a.name: n for n, a in enumerate(launch.kernel.arguments)}
    for c in program.containers:
        info = launch.arrays.get(positions[c.name]) if c.is_argument else launch.fields.field(c.object)
        if info is None:
            continue
        component = None if c.is_argument else launch.fields.component(c.object)
        if info.key not in whole:
            is_part = component is not None
            whole[info.key] = replace(c, element_shape=info.element_shape, object=info.obj) if is_part else c
            infos[whole[info.key]] = info
        if whole[info.key] is not c:
            index = () if component is None else tuple(map(int, np.unravel_index(component, info.element_shape)))
            parts[c] = whole[info.key], index
    if not parts:
        return program, infos

    def change(value: Any) -> Any:
        if isinstance(value, Load) and value.container in parts:
            container, index = parts[value.container]
            return Load(container, value.indices, index or value.component, place=value.place)
        return value

    body = mapped(program.body, lambda s: _with_targets(with_values(s, lambda v: rebuilt(v, change)), change, parts))
    containers = tuple(dict.fromkeys(parts[c][0] if c in parts else c for c in program.containers))
    return replace(program, body=body, containers=containers), infos


def with_node_calls(
    program: Program, launch: Launch, infos: dict[Container, ContainerInfo], constants: Constants | None
) -> tuple[Program, dict[Container, ContainerInfo]]:
    """The program with what its calls on nodes of the layout do to fields, also to those that it does not name."""
    seen = {info.key for info in infos.values()}
    others = {field_container(i.obj, str(i.name)): i for k, i in launch.fields.infos.items() if k not in seen}
    infos = {**infos, **others}
    fields = [c for c in infos if not c.is_argument]
    program, lost = with_appends(replace(program, containers=(*program.containers, *others)), fields)
    seeds = seeds_of(program, launch, infos, constants)
    activity = find_activity(program, seeds.start, seeds.arguments)
    refuse_lost(lost, activity)
    return with_clears(program, fields, activity), infos


def _with_targets(s: Any, change: Any, parts: Any) -> Any:
    """The statement with its target, and the domain of its loop, changed."""
    if isinstance(s, (Assign, Update, Atomic)):
        return replace(s, target=change(s.target))
    if isinstance(s, For):
        return replace(s, domain=tuple(parts[d][0] if isinstance(d, Container) and d in parts else d for d in s.domain))
    return s


def seeds_of(
    program: Program, launch: Launch, infos: dict[Container, ContainerInfo], constants: Constants | None
) -> Seeds:
    """What is asked for, in the words of the program."""
    roles: dict[Container, Role] = {}
    fields = [c for c in program.containers if not c.is_argument]
    extents = {c: Extent(c.shape or (), c.offset, backend.is_dense(c.object)) for c in fields}
    by_column = backend.stores_by_column()
    for c, info in infos.items():
        role = launch.roles.get(info.key, Role())
        first = None if role.first_column is None else role.first_column - launch.first_column
        is_fresh = first is None and (role.is_fresh or not role.has_shadow)
        roles[c] = shadows.Role(first, is_fresh, by_column)
        extents[c] = Extent(info.shape, info.offset, c.is_argument or backend.is_dense(c.object))
    arguments, parameters = {}, {}
    for argument in program.arguments:
        if argument.name in launch.argument_columns and argument.value is not None:
            (local,) = {value.local for value in entries(argument.value)}  # type: ignore[arg-type, union-attr]
            arguments[local] = launch.argument_columns[argument.name] - launch.first_column
            parameters[local] = ("argument", argument.name)
    for variable, first in launch.constants:
        if constants is not None and variable.key in constants.locals:
            arguments[constants.locals[variable.key]] = first - launch.first_column
            parameters[constants.locals[variable.key]] = variable.key
    limits, sparse = STRATEGIES[launch.strategy], None
    if launch.sparse is not None:
        limits = SPARSE if launch.strategy == "auto" else limits
        keys = {c: info.key for c, info in infos.items()}
        sparse = SparseSeeds(launch.sparse, launch.sinks, {**keys, **parameters})
    return Seeds(
        launch.columns,
        roles,
        extents,
        arguments,
        limits,
        launch.wants_return,
        by_column,
        backend.is_host_arch(),
        None if launch.values_dtype is None else (type_of(launch.values_dtype), launch.values_rows),
        is_debug=backend.is_debug(),
        threads=backend.thread_count(),
        sparse=sparse,
    )


def with_own_tangents(program: Program, seeds: Seeds) -> Seeds:
    """What is asked for where the kernel runs again: it reads the tangents that it has stored the time before."""
    activity = find_activity(program, seeds.start, seeds.arguments)
    own = activity.containers & read_containers(program.body) & written_containers(program.body)
    roles = {c: replace(role, is_fresh=False) if c in own else role for c, role in seeds.roles.items()}
    return replace(seeds, roles=roles)


def assumed_role(c: Container, launch: Launch, seeds: Seeds, differentiated: Differentiated) -> Role:
    """What a container may carry when the kernel is launched: a kernel for tangents is right for zeros, too."""
    role = seeds.roles[c]
    if role.first_column is not None:
        return Role(role.first_column + launch.first_column)
    may_carry = c in differentiated.active.containers and c not in differentiated.relied
    return Role(has_shadow=may_carry or not role.is_fresh)


def with_arguments(differentiated: Differentiated) -> Program:
    """The program with its shadows as arguments, under names that no other argument has."""
    program = differentiated.program
    shadows = (shadow_argument(c) for _, c in differentiated.shadows)
    return replace(program, arguments=(*program.arguments, *shadows))


def with_schedule(
    result: Program, program: Program, differentiated: Differentiated, launch: Launch, seeds: Seeds
) -> Scheduled:
    """The differentiated program with its parallel loops as they run fastest on this machine."""
    if not seeds.is_host or seeds.by_column or not seeds.columns:
        return Scheduled(result)
    fields = [c for c in program.containers if not c.is_argument]
    shapes = {c: e.shape for c, e in seeds.extents.items() if c.is_argument}
    shapes |= {c: tuple(c.object.shape) for c in fields if backend.is_flat(c.object)}
    machine = Machine(
        seeds.threads,
        backend.is_debug() or launch.watch is not None or launch.sparse is not None,
        shapes,
        {c: backend.tree_number(c.object) for c in fields},
        seeds.extents,
        free_loops(program, seeds.extents),
    )
    shadows = {shadow: what for what, shadow in differentiated.shadows if isinstance(what, Container)}
    return schedule(program, result, shadows, seeds.columns, machine)


def compiled(launch: Launch, kernel: Any, differentiated: Differentiated, paired: frozenset[Container]) -> Any:
    """The emitted kernel, traced once."""
    positions = [n for n, a in enumerate(launch.kernel.arguments) if not isinstance(a.annotation, backend.ti.template)]
    features = backend.argument_features(launch.kernel, launch.args)
    types = ("u64" if c in paired else c.dtype.name for _, c in differentiated.shadows)
    shadows = tuple(backend.array_feature(backend.named_type(name)) for name in types)
    count = len(launch.args)
    given = [launch.args[p] for p in positions]
    return backend.EmittedKernel(
        kernel,
        [*positions, *range(count, count + len(shadows))],
        given + [None] * len(shadows),
        (*(features[p] for p in positions), *shadows),
        has_vectors=any(c.is_argument and c.element_shape for c in differentiated.program.containers),
    )


def _is_read(argument: Argument, launch: Launch, read: set[Local]) -> bool:
    """Whether an argument is a parameter, and the kernel reads it."""
    if argument.name not in launch.argument_columns or argument.value is None:
        return False
    return any(v.local in read for v in entries(argument.value) if isinstance(v, Read))  # type: ignore[arg-type]


def _facts(
    recorded: Program,
    d: Differentiated,
    infos: dict[Container, ContainerInfo],
    launch: Launch,
    constants: Constants | None,
) -> KernelFacts:
    """What a session has to know of the kernel."""
    read, written = read_containers(recorded.body), written_containers(recorded.body)
    outputs = {infos[c].key for c in written if c in infos} | ({RETURN} if launch.wants_return else set())
    locals_ = read_locals(recorded.body)
    numbers = {("argument", a.name) for a in recorded.arguments if _is_read(a, launch, locals_)}
    numbers |= set() if constants is None else set(constants.locals)
    others = {id(c.object): c.object for c in written if c not in infos and not c.is_argument}
    return KernelFacts(
        frozenset({infos[c].key for c in read if c in infos} | numbers),
        frozenset(outputs),
        frozenset(infos[c].key for c in d.covered),
        tuple(others.values()),
        draws_random_numbers(recorded.body),
        report=d.report.placed(lambda c: infos[c].key),
        namesakes={} if constants is None else constants.namesakes,
    )
