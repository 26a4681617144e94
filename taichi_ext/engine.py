"""The engine on one page: a kernel is recorded, simplified, differentiated and emitted."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from taichi_ext import backend, launches, stages
from taichi_ext.analysis.activity import returns_active
from taichi_ext.analysis.changes import (
    draws_random_numbers,
    read_containers,
    read_locals,
    stages_with_arrays,
    written_containers,
)
from taichi_ext.analysis.cuts import Paths, find_paths, has_cuts
from taichi_ext.analysis.draws import without_unused_draws
from taichi_ext.analysis.linearity import check_rules
from taichi_ext.analysis.loops import Extents
from taichi_ext.analysis.stores import free_loops
from taichi_ext.boundary.registry import RulesInUse
from taichi_ext.differentiate.facts.decisions import Device, Differentiated, DifferentiationRequest
from taichi_ext.differentiate.facts.facts import first_column_argument, shadow_argument
from taichi_ext.differentiate.transform.forward import differentiate
from taichi_ext.emit import Emitted, build
from taichi_ext.program import Container, Local, Program
from taichi_ext.program.keys import RETURN, Key, SiteArray
from taichi_ext.record import record
from taichi_ext.record.node_calls import changed_nodes, has_node_calls
from taichi_ext.record.variables import Constants
from taichi_ext.schedule import Machine, Scheduled, from_below_zero, schedule, with_lower_triangle, with_private_sums
from taichi_ext.simplify import simplify


@stages.without_collections()
def fuse(launch: launches.Launch, watch: Any = None) -> launches.JacobianKernel:
    """The kernel that does the same as ``launch.kernel`` and also computes its tangents.

    ``watch`` is the observer that looks for numbers that are not finite, if there is one.
    """
    with backend.deep_recursion(launch.kernel):
        start = stages.begin(f"differentiating {backend.short_name(launch.kernel)}")
        captures, constants = backend.Captures(), launches.constants_of(launch)
        rules = RulesInUse(takes_derivative=True)
        recorded, infos = _recorded(launch, rules, captures, constants, launch.energy.order)
        program = simplify(without_unused_draws(recorded))
        check_rules(program)
        paths = _paths(program, launch, infos, constants)
        is_cut = has_cuts(program)
        subject = launches.program_of(program, launch, infos, constants)
        program, infos = subject.program, infos | subject.infos
        seeds = subject.seeds(launches.seeds_of(program, launch, infos, constants))
        if launch.is_repeated:
            seeds = launches.with_own_tangents(program, seeds)
        machine = _machine(program, seeds, is_checked=backend.is_debug() or watch is not None)
        differentiated = differentiate(program, seeds)
        if backend.confuses_local_arrays() and stages_with_arrays(simplify(differentiated.program).body) > 1:
            differentiated = differentiate(program, replace(seeds, limits=replace(seeds.limits, local_array=0)))
        differentiated = _completed(differentiated, launch, subject, machine, watch)
        result = simplify(with_arguments(differentiated))
        scheduled = Scheduled(result) if machine is None else schedule(program, result, owners(differentiated), machine)
        final = from_below_zero(scheduled.program, seeds.extents, is_host=seeds.device.is_host)
        launches.check_buffers(launch.kernel, final, is_sparse=launch.sparse is not None)
        emitted = build(final)
        kernel = _kernel(launch, recorded, emitted, own_features(differentiated), captures)
        stages.note(f"{backend.short_name(launch.kernel)} analysed in {differentiated.passes} rounds", start)
        rules.count_uses()
        keys = tuple(infos[what].key if what in infos else what for what, _ in differentiated.shadows)
        loops = (*differentiated.report.loops, *scheduled.choices)
        report = replace(differentiated.report, loops=loops, has_cuts=is_cut, paths=paths)
        differentiated = replace(differentiated, report=report)
        facts = _facts(recorded, differentiated, infos, launch, constants)
        facts = replace(
            facts,
            returns_active=returns_active(program, differentiated.active),
            left_out=frozenset(infos[c].key for c in subject.left_out),
        )
        entries = differentiated.sparse
        assumed = {info.key: launches.assumed_role(c, launch, seeds, differentiated) for c, info in infos.items()}
        return launches.JacobianKernel(
            primal=launch.kernel,
            kernel=kernel,
            shadows=keys,
            facts=facts,
            scratch_sizes=differentiated.scratch_sizes,
            columns=launches.KernelColumns(
                launch.block.count if entries is None else entries.columns.width,
                differentiated.first_columns,
                differentiated.first_column is not None,
            ),
            entries=entries,
            program=final,
            arrays=launch.arrays,
            first_order=tuple(subject.arrays.values()),
            assumed=None if launch.sparse is not None else assumed,
            memory=launches.KernelMemory(rules),
        )


def _recorded(
    launch: launches.Launch, rules: RulesInUse, captures: backend.Captures, constants: Constants | None, order: int
) -> tuple[Program, dict[Container, launches.ContainerInfo]]:
    """A summary of the kernel and its containers."""
    recorded = record(launch.kernel, launch.args, rules, captures, constants, order=order)
    recorded, infos = launches.with_whole_fields(recorded, launch)
    if has_node_calls(recorded.body):
        return launches.with_node_calls(recorded, launch, infos, constants)
    return recorded, infos


def _paths(
    program: Program,
    launch: launches.Launch,
    infos: dict[Container, launches.ContainerInfo],
    constants: Constants | None,
) -> Callable[[], Paths]:
    """From where to where numbers go in a kernel, and where they lose their derivative."""
    numbers = launches.number_locals(program, launch, constants)

    def key_of(memory: Local | Container | None) -> Any:
        if isinstance(memory, Local):
            return numbers[memory][0] if memory in numbers else None
        return RETURN if memory is None else infos[memory].key if memory in infos else id(memory.object) or id(memory)

    has_source = not backend.is_library_kernel(launch.kernel)
    return functools.cache(lambda: find_paths(program, key_of, has_source=has_source))


def _completed(
    differentiated: Differentiated,
    launch: launches.Launch,
    subject: launches.KernelProgram,
    machine: Machine | None,
    watch: Any,
) -> Differentiated:
    """The program with separate sums for each thread if that is faster, and watched if requested."""
    differentiated = subject.completed(differentiated)
    if watch is not None:
        return replace(differentiated, program=watch.program(differentiated))
    if machine is None or machine.is_checked or (launch.sparse is not None and machine.threads > 1):
        return differentiated
    return with_private_sums(with_lower_triangle(differentiated, subject.mirrored, launch.block.count), machine)


def _kernel(
    launch: launches.Launch, recorded: Program, emitted: Emitted, extra: tuple[object, ...], captures: backend.Captures
) -> backend.EmittedKernel:
    """The emitted kernel, compiled with the values that Python has now."""
    kernel = compiled(launch.kernel, launch.args, emitted, extra)
    kernel.captures = captures
    fields = {c.name: c.object for c in recorded.containers if not c.is_argument}
    kernel.uses = backend.Uses(backend.short_name(launch.kernel), fields)
    features = backend.argument_features(launch.kernel, launch.args)
    backend.first_captures(launch.kernel, features, captures)
    captures.are_current(launch.kernel)
    return kernel


def recorded(
    launch: launches.Launch, rules: RulesInUse, captures: backend.Captures, order: int = 1
) -> tuple[Program, dict[Container, launches.ContainerInfo], dict[Local, Key], tuple[set[Container], set[Container]]]:
    """A kernel as it is: program, containers, arguments and numbers that are parameters, what it reads and writes.

    ``order``: of the derivatives that are computed from it.
    """
    constants = launches.constants_of(launch)
    program, infos = _recorded(launch, rules, captures, constants, order)
    accessed = read_containers(program.body), written_containers(program.body)
    program = simplify(without_unused_draws(program))
    numbers = launches.number_locals(program, launch, constants)
    return program, infos, {local: key for local, (key, _) in numbers.items()}, accessed


def plain_kernel(kernel: backend.Kernel, args: tuple[object, ...]) -> Any:
    """A kernel with antialiased edges, which Taichi cannot compile by itself, without a Jacobian."""
    with backend.deep_recursion(kernel):
        rules = RulesInUse(takes_derivative=False)
        captures = backend.Captures()
        program = simplify(without_unused_draws(record(kernel, args, rules, captures)))
        seeds = DifferentiationRequest(0, {}, {}, device=Device(backend.is_host_arch()))
        program = simplify(differentiate(program, seeds).program)
        emitted = build(from_below_zero(program, {}, is_host=seeds.device.is_host))
        plain = compiled(kernel, args, emitted, like=kernel)
        plain.captures = captures
        return plain


def compiled(
    kernel: backend.Kernel,
    args: tuple[object, ...],
    emitted: Emitted,
    extra: tuple[object, ...] = (),
    like: object = None,
) -> backend.EmittedKernel:
    """The emitted kernel, traced once: it takes the arguments of the user's kernel and ``extra`` arrays behind them."""
    kinds = [a.annotation for a in backend.arguments(kernel)]
    positions = [n for n, kind in enumerate(kinds) if backend.is_passed(kind, args[n])]
    features = backend.argument_features(kernel, args)
    return backend.EmittedKernel(
        emitted.kernel._primal,
        (emitted.tree, emitted.text, emitted.places),
        [*positions, *range(len(args), len(args) + len(extra))],
        [args[p] for p in positions] + [None] * len(extra),
        (*(backend.passed_feature(kinds[p], features[p]) for p in positions), *extra),
        hazards=emitted.hazards,
        like=like,
    )


def owners(differentiated: Differentiated) -> dict[Container, Container | None]:
    """The container that each shadow belongs to; None for entries of a sparse Jacobian, which are by iteration."""
    shadows = {shadow: what for what, shadow in differentiated.shadows if isinstance(what, (Container, SiteArray))}
    return {shadow: what if isinstance(what, Container) else None for shadow, what in shadows.items()}


def own_features(differentiated: Differentiated) -> tuple[object, ...]:
    """The types of the kernel's own arguments for Taichi, in their order."""
    features: list[Any] = [backend.array_feature(backend.named_type(c.dtype.name)) for _, c in differentiated.shadows]
    if differentiated.first_column is not None:
        features.append(backend.NUMBER_FEATURE)
    return tuple(features)


def with_arguments(differentiated: Differentiated) -> Program:
    """The program with its own arguments, shadows first, under names that no other argument has."""
    program = differentiated.program
    own = [shadow_argument(c) for _, c in differentiated.shadows]
    if differentiated.first_column is not None:
        own.append(first_column_argument(differentiated.first_column))
    return replace(program, arguments=(*program.arguments, *own))


def _machine(program: Program, seeds: DifferentiationRequest, *, is_checked: bool) -> Machine | None:
    """The machine that the loops of a differentiated program are scheduled for; None where they stay as they are."""
    if not seeds.device.is_host or seeds.device.by_column or not seeds.columns:
        return None
    return machine_of(program, seeds.extents, seeds.device.threads, is_checked=is_checked)


def machine_of(program: Program, extents: Extents, threads: int, *, is_checked: bool) -> Machine:
    """The CPU that the loops of a program are scheduled for."""
    fields = [c for c in program.containers if not c.is_argument]
    shapes = {c: e.shape for c, e in extents.items() if c.is_argument}
    shapes |= {c: tuple(c.object.shape) for c in fields if backend.is_flat(c.object)}
    return Machine(threads, is_checked, shapes, extents, free_loops(program, extents), backend.is_fast())


def _facts(
    recorded: Program,
    d: Differentiated,
    infos: dict[Container, launches.ContainerInfo],
    launch: launches.Launch,
    constants: Constants | None,
) -> launches.KernelFacts:
    """The facts about the kernel that a session needs."""
    read, written = read_containers(recorded.body), written_containers(recorded.body)
    outputs = {infos[c].key for c in written if c in infos} | ({RETURN} if launch.wants_return else set())
    locals_ = read_locals(recorded.body)
    names = {local.name for local in locals_ if local.kind == "parameter"}
    numbers: set[Key] = {launches.NumberArgument(name) for name in names & launch.numbers.arguments.keys()}
    numbers |= set() if constants is None else set(constants.locals)
    others = {id(c.object): c.object for c in written if c not in infos and not c.is_argument}
    return launches.KernelFacts(
        frozenset({infos[c].key for c in read if c in infos} | numbers),
        frozenset(outputs),
        frozenset(infos[c].key for c in d.covered),
        tuple(others.values()),
        frozenset(c.name for c in read if c.is_argument),
        frozenset(c.name for c in written - read - set(d.covered) if c.is_argument),
        changed_nodes(recorded.body),
        draws_random_numbers(recorded.body),
        report=d.report.placed(lambda c: infos[c].key),
        namesakes={} if constants is None else constants.namesakes,
    )
