"""Translate a launch request into program terms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from taichi_ext import backend
from taichi_ext.analysis.activity import find_activity
from taichi_ext.analysis.changes import read_containers, written_containers
from taichi_ext.analysis.loops import Extent
from taichi_ext.differentiate.facts.decisions import Device, Differentiated, Seeds
from taichi_ext.differentiate.plan.sparse_numbering import SparseSeeds
from taichi_ext.differentiate.plan.storage_facts import SPARSE, STRATEGIES
from taichi_ext.differentiate.statements import shadows
from taichi_ext.launches.launch import ContainerInfo, Launch, NumberArgument, Role
from taichi_ext.program import Container, Effect, Load, Local, Program, Read, Store, entries, mapped, with_nodes
from taichi_ext.program.keys import Key
from taichi_ext.record.constants import Constants
from taichi_ext.record.literals import type_of
from taichi_ext.record.node_calls import check_appended, with_appends, with_clears
from taichi_ext.record.recording import field_container


def constants_of(launch: Launch) -> Constants | None:
    """The Python numbers that are parameters; None where there are none, and no name could mean one."""
    numbers = launch.numbers
    if not launch.block.count or not (numbers.constants or numbers.arguments):
        return None
    return Constants(tuple(variable for variable, _ in numbers.constants), frozenset(numbers.arguments))


def seeds_of(
    program: Program, launch: Launch, infos: dict[Container, ContainerInfo], constants: Constants | None
) -> Seeds:
    """The seeds of a launch, by the locals and containers of its program."""
    numbers = number_locals(program, launch, constants)
    limits, sparse = STRATEGIES[launch.strategy], None
    if launch.sparse is not None:
        limits = SPARSE if launch.strategy == "auto" else limits
        keys: dict[Local | Container, Key] = {what: key for what, (key, _) in numbers.items()}
        keys |= {c: info.key for c, info in infos.items()}
        sparse = SparseSeeds(launch.sparse.columns, launch.sparse.outputs, keys)
        if launch.energy is not None:
            is_whole = launch.energy.has_whole_blocks
            sparse = replace(sparse, starts=launch.energy.starts, has_whole_blocks=is_whole)
    return Seeds(
        columns=launch.block.count,
        roles=_roles(launch, infos),
        extents=_extents(program, infos),
        arguments={local: first - launch.block.first for local, (_, first) in numbers.items()},
        limits=limits,
        wants_return=launch.wants_return,
        device=Device(backend.is_host_arch(), backend.stores_by_column(), backend.thread_count(), backend.block_size()),
        values=None if launch.numbers.shadow is None else (type_of(launch.numbers.shadow[0]), launch.numbers.shadow[1]),
        sparse=sparse,
        first_column=launch.block.first if launch.block.is_part else None,
    )


def _roles(launch: Launch, infos: dict[Container, ContainerInfo]) -> dict[Container, shadows.Role]:
    """The tangents of the containers, with columns counted from the first of the block."""
    found = {}
    for c, info in infos.items():
        role = launch.roles.get(info.key, Role())
        first = None if role.first_column is None else role.first_column - launch.block.first
        is_fresh = first is None and (role.is_fresh or not role.has_shadow)
        components = tuple((number, column - launch.block.first) for number, column in role.components)
        found[c] = shadows.Role(first, is_fresh, backend.stores_by_column(), components)
    return found


def _extents(program: Program, infos: dict[Container, ContainerInfo]) -> dict[Container, Extent]:
    """The shapes of the containers, and whether all of their entries are there."""
    fields = [c for c in program.containers if not c.is_argument]
    extents = {c: Extent(c.shape or (), c.offset, backend.is_dense(c.object)) for c in fields}
    for c, info in infos.items():
        extents[c] = Extent(info.shape, info.offset, c.is_argument or backend.is_dense(c.object))
    return extents


def number_locals(program: Program, launch: Launch, constants: Constants | None) -> dict[Local, tuple[Key, int]]:
    """The arguments and Python numbers that are parameters: the key and the first column of each."""
    found: dict[Local, tuple[Key, int]] = {}
    for argument in program.arguments:
        if argument.value is not None and not isinstance(argument.value, Container):
            for local in {value.local for value in entries(argument.value) if isinstance(value, Read)}:
                if local.name in launch.numbers.arguments:
                    found[local] = NumberArgument(local.name), launch.numbers.arguments[local.name]
    for variable, first in launch.numbers.constants:
        if constants is not None and variable.key in constants.locals:
            found[constants.locals[variable.key]] = variable.key, first
    return found


def with_own_tangents(program: Program, seeds: Seeds) -> Seeds:
    """The seeds where the kernel runs again: it reads the tangents that it has stored the time before."""
    activity = find_activity(program, seeds.start, seeds.arguments)
    own = activity.containers & read_containers(program.body) & written_containers(program.body)
    roles = {c: replace(role, is_fresh=False) if c in own else role for c, role in seeds.roles.items()}
    return replace(seeds, roles=roles)


def assumed_role(c: Container, launch: Launch, seeds: Seeds, differentiated: Differentiated) -> Role:
    """The tangents that a container may have at the launch: a kernel for tangents is right for zeros, too."""
    role = seeds.roles[c]
    has_shadow = any(what is c for what, _ in differentiated.shadows)  # a shadow can hold any tangents, including seeds
    if role.first_column is not None and not has_shadow:
        components = tuple((number, column + launch.block.first) for number, column in role.components)
        return Role(role.first_column + launch.block.first, components)
    may_carry = c in differentiated.active.containers and c not in differentiated.relied
    return Role(has_shadow=may_carry or not role.is_fresh)


# Fields and arrays of a program as they are known outside of the kernel.


def with_whole_fields(program: Program, launch: Launch) -> tuple[Program, dict[Container, ContainerInfo]]:
    """Facts from outside of the kernel about its fields and arrays, each field and array being one container.

    A component of a vector field that the kernel names by itself becomes an entry of the field. Loops over it stay: its
    layout may be another than that of the field. An array that the kernel is given twice is the first of its arguments.
    """
    positions = {leaf.name: n for n, leaf in enumerate(backend.leaf_arguments(launch.kernel))}
    found = ((c, launch.arrays.get(positions[c.name])) for c in program.containers if c.is_argument)
    arrays = [(c, info) for c, info in found if info is not None]
    wholes = _wholes(program)
    first = {info.key: c for c, info in reversed(arrays)}
    fields = ((whole, launch.fields.field(c.object)) for c, (whole, _) in wholes.items())
    infos = {c: info for c, info in (*arrays, *fields) if info is not None and first.get(info.key, c) is c}
    parts = {c: whole for c, whole in wholes.items() if whole[0] is not c}
    parts |= {c: (first[info.key], ()) for c, info in arrays if first[info.key] is not c}
    return (_with_parts(program, parts) if parts else program), infos


def _wholes(program: Program) -> dict[Container, tuple[Container, tuple[int, ...]]]:
    """For each field that a program names, its container, and its component in that."""
    found: dict[Container, tuple[Container, tuple[int, ...]]] = {}
    fields = [(c, backend.whole_field(c.object)) for c in program.containers if not c.is_argument]
    wholes: dict[Any, Container] = {}
    for c, whole in sorted(fields, key=lambda field: field[0].object is not field[1]):  # whole fields first
        name = backend.field_identity(whole)
        if name not in wholes:
            wholes[name] = c if whole is c.object else field_container(whole, c.name)
        found[c] = wholes[name], backend.component_index(whole, c.object)
    return found


def _with_parts(program: Program, parts: dict[Container, tuple[Container, tuple[int, ...]]]) -> Program:
    """The program with entries of whole fields for those of their components."""

    def change(value: object) -> Any:
        if isinstance(value, Load) and value.container in parts:
            container, index = parts[value.container]
            return Load(container, value.indices, index or value.component, place=value.place)
        return value

    def changed(s: Any) -> Any:
        s = with_nodes(s, change)
        if isinstance(s, Store):
            return replace(s, target=change(s.target))
        if isinstance(s, Effect):
            return replace(s, writes=tuple(dict.fromkeys(parts[c][0] if c in parts else c for c in s.writes)))
        return s

    containers = tuple(dict.fromkeys((*(whole for whole, _ in parts.values()), *program.containers)))
    return replace(program, body=mapped(program.body, changed), containers=containers)


def with_node_calls(
    program: Program, launch: Launch, infos: dict[Container, ContainerInfo], constants: Constants | None
) -> tuple[Program, dict[Container, ContainerInfo]]:
    """The program with the effects of its calls on layout nodes on fields, including fields that it does not name."""
    seen = {info.key for info in infos.values()}
    known = (i for k, i in launch.fields.infos.items() if k not in seen and not backend.ended_problem(i.obj))
    others = {field_container(info.obj, str(info.name)): info for info in known}
    infos = {**infos, **others}
    fields = [c for c in infos if not c.is_argument]
    program, lost = with_appends(replace(program, containers=(*program.containers, *others)), fields)
    seeds = seeds_of(program, launch, infos, constants)
    activity = find_activity(program, seeds.start, seeds.arguments)
    check_appended(lost, activity)
    return with_clears(program, fields, activity), infos
