"""Translate a launch request into program terms."""

from __future__ import annotations

from dataclasses import replace

from taichi_ext import backend
from taichi_ext.analysis.activity import find_activity
from taichi_ext.analysis.changes import read_containers, written_containers
from taichi_ext.analysis.loops import Extent
from taichi_ext.differentiate.facts.decisions import Device, Differentiated, Seeds
from taichi_ext.differentiate.plan.sparse_numbering import SparseSeeds
from taichi_ext.differentiate.plan.storage_facts import SPARSE, STRATEGIES
from taichi_ext.differentiate.statements import shadows
from taichi_ext.launches.keys import NumberArgument
from taichi_ext.launches.launch import ContainerInfo, Launch, Role
from taichi_ext.program import Container, Local, Program, Read, entries
from taichi_ext.program.keys import Key
from taichi_ext.record.constants import Constants
from taichi_ext.record.taichi_types import type_of


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
