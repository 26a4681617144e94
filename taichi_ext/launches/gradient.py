"""The program of a gradient: a kernel's program that adds up the gradient of its energy, too.

It is the program with tangents that ``differentiate`` makes of it: the tangent of the energy, one number for each
column, is the gradient. It is an ordinary program, so that its Jacobian is the Hessian of the energy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from taichi_ext import backend
from taichi_ext.analysis.activity import find_activity
from taichi_ext.analysis.changes import read_containers, written_containers
from taichi_ext.analysis.energy_sums import EnergySums, energy_sums
from taichi_ext.analysis.loops import Extent
from taichi_ext.differentiate.facts.decisions import Device, Differentiated, DifferentiationRequest, Role, Use
from taichi_ext.differentiate.forms.entry_sites import IntermediatesError, check_sparse
from taichi_ext.differentiate.plan.sparse_numbering import RowSeeds, SparseSeeds
from taichi_ext.differentiate.plan.storage_facts import SPARSE, STRATEGIES
from taichi_ext.differentiate.transform.forward import differentiate
from taichi_ext.launches.launch import (
    ANY_TANGENTS,
    GRADIENT,
    ColumnBlock,
    ContainerInfo,
    EnergyTarget,
    FieldKey,
    FirstOrderArray,
    GradientKey,
    Launch,
    NumberArgument,
    NumberColumns,
)
from taichi_ext.program import Container, Effect, Load, Local, Program, Read, Store, entries, mapped, with_places
from taichi_ext.program.build import written_out
from taichi_ext.program.keys import ADJOINTS, RETURN, TERMS, Key, Purpose, Scratch
from taichi_ext.record.literals import type_of
from taichi_ext.record.node_calls import check_appended, with_appends, with_clears
from taichi_ext.record.recording import field_container
from taichi_ext.record.variables import Constants
from taichi_ext.simplify import simplify

FROM_INTERMEDIATES = "the energy is computed from {}, which {} computes from params"


@dataclass(frozen=True)
class FirstOrder:
    """An array of a kernel that has tangents of the second order: it holds tangents of the first order."""

    info: ContainerInfo  # its key, and how many numbers it has
    columns: int  # of a row of it
    first_column: int | None = None  # of its rows, where these are columns at the start

    @property
    def name(self) -> FirstOrderArray:
        """The key of the array itself, as opposed to its tangents."""
        return FirstOrderArray(self.info.key)

    @property
    def is_scratch(self) -> bool:
        """Whether it is memory for rows of one launch."""
        return isinstance(self.info.key, GradientKey) and isinstance(self.info.key.of, Scratch)


@dataclass(frozen=True)
class KernelProgram:
    """The program that a launch differentiates: that of its kernel, or one that computes a gradient, too."""

    program: Program
    arrays: Mapping[Container, FirstOrder] = field(default_factory=dict)  # of tangents of the first order
    left_out: frozenset[Container] = frozenset()  # the containers whose tangents it does not keep
    mirrored: Container | None = None  # the gradient, if entries above the diagonal of its tangents are not needed
    is_gradient: bool = False
    adjoints: Container | None = None  # of the fields that the energy is computed from, if it computes some
    ignored: frozenset[Container | Local] = frozenset()  # has tangents that nothing needs, such as the energy itself
    unneeded: Container | None = None  # the gradient, if only its tangents are needed

    @property
    def infos(self) -> dict[Container, ContainerInfo]:
        """Of the arrays that it has besides those of the kernel."""
        infos = {c: array.info for c, array in self.arrays.items()}
        return infos if self.adjoints is None else infos | {self.adjoints: _info(ADJOINTS, self.adjoints, 0)}

    def seeds(self, seeds: DifferentiationRequest) -> DifferentiationRequest:
        """The request for its tangents, without those of an energy where nothing reads it."""
        return replace(seeds, wants_return=False, ignored=self.ignored) if self.is_gradient else seeds

    def completed(self, result: Differentiated) -> Differentiated:
        """The program with tangents, as it is scheduled: those of the second order of operations that Taichi has."""
        if not self.is_gradient:
            return result
        body = mapped(result.program.body, lambda s: with_places(s, written_out))
        if self.unneeded is not None and self.unneeded not in read_containers(body):
            body = mapped(body, lambda s: () if isinstance(s, Store) and s.target.memory is self.unneeded else s)
        arrays: list[tuple[Purpose, Container]] = [(array.name, c) for c, array in self.arrays.items()]
        arrays += [] if self.adjoints is None else [(ADJOINTS, self.adjoints)]
        return replace(result, program=replace(result.program, body=body), shadows=(*arrays, *result.shadows))


def program_of(
    program: Program, launch: Launch, infos: dict[Container, ContainerInfo], constants: Constants | None
) -> KernelProgram:
    """The program as it is, or that of the gradient of ``launch.energy``, in an array by the key ``GRADIENT``."""
    target = launch.energy
    if target.order == 1:
        return KernelProgram(program)
    energy = next((c for c, info in infos.items() if info.key == target.key), None)
    has_energy = target.key in {RETURN, *(info.key for info in infos.values())}
    sums = energy_sums(program, energy) if target.adds_terms and has_energy else None
    seeds = _first_order_seeds(program, launch, target, sums, infos, constants)
    differentiated, left_out = differentiate(program, seeds), frozenset[Container]()
    if launch.sparse is not None:
        read = {c: infos[c] for c in read_containers(program.body) if c in infos}
        left_out = _check_rows(differentiated, energy, read)
        is_read = any(info.key in target.carried for info in read.values())
        check_sparse(("a kernel reads the energy that another one has added to", is_read))
        if left_out:
            differentiated = differentiate(program, replace(seeds, ignored=left_out))
    arrays = _first_order_arrays(differentiated, target, infos, seeds)
    is_dense = target.is_sum and any(array.info.key != GRADIENT for array in arrays.values())
    check_sparse(("terms of the energy depend on many params", is_dense))
    adjoints = next((c for what, c in differentiated.shadows if what == ADJOINTS), None)
    containers = (*differentiated.program.containers, *arrays, *([] if adjoints is None else [adjoints]))
    result = simplify(replace(differentiated.program, name=f"{program.name}_gradient", containers=containers))
    own = None if launch.is_repeated else next((c for c, a in arrays.items() if a.info.key == GRADIENT), None)
    return KernelProgram(
        result,
        arrays,
        left_out,
        is_gradient=True,
        mirrored=own if target.is_mirrored and launch.block.count == target.columns else None,
        adjoints=adjoints,
        ignored=left_out | (frozenset() if launch.is_repeated else _needless(result, energy, sums)),
        unneeded=None if target.has_gradient else own,
    )


def _needless(program: Program, energy: Container | None, sums: EnergySums | None) -> frozenset[Container | Local]:
    """The energy and the locals that it is a sum of, where only the tangents of its gradient are read."""
    locals_ = () if sums is None else energy_sums(program, energy).weights
    return frozenset({energy, *locals_} - read_containers(program.body) - {None})


def _first_order_seeds(
    program: Program,
    launch: Launch,
    target: EnergyTarget,
    sums: EnergySums | None,
    infos: dict[Container, ContainerInfo],
    constants: Constants | None,
) -> DifferentiationRequest:
    """The request for the gradient; where the energy is a sum, its terms are differentiated by themselves."""
    written = written_containers(program.body)
    intermediates = frozenset(c for c, info in infos.items() if info.key in target.intermediates and c in written)
    if intermediates and sums is None:
        sums = EnergySums(None, type_of(target.dtype), {})
    seeds = seeds_of(program, _first_launch(launch, target), infos, constants)
    return replace(
        seeds,
        wants_return=target.key == RETURN,
        use=Use(is_again=True, sums=sums, intermediates=intermediates),
        limits=seeds.limits if sums is None else SPARSE,
    )


def _first_order_arrays(
    first: Differentiated, target: EnergyTarget, infos: dict[Container, ContainerInfo], seeds: DifferentiationRequest
) -> dict[Container, FirstOrder]:
    """The arrays that hold tangents of the first order, the gradient among them."""
    arrays: dict[Container, FirstOrder] = {}
    for what, c in first.shadows:
        if what == ADJOINTS:
            continue
        of = infos[what].key if isinstance(what, Container) else what
        key = GRADIENT if of in (target.key, RETURN) else GradientKey(of)
        if isinstance(what, Container):
            arrays[c] = _first_order(key, c, infos[what].size, target.columns, seeds.roles[what].first_column)
        else:
            size = first.scratch_sizes[what] if isinstance(what, Scratch) else target.columns
            arrays[c] = _first_order(key, c, 1, size)
    return arrays


def _first_launch(launch: Launch, energy: EnergyTarget) -> Launch:
    """The launch that gives the gradient: with a column for each entry of the parameters, all of them dense."""
    starts, numbers = energy.starts, launch.numbers
    seeds = {k: r for k, r in launch.roles.items() if r.first_column is not None}  # of a part of a parameter, too
    seeds |= {k: Role(first, is_fresh=False) for k, first in starts.items()}
    return replace(
        launch,
        block=ColumnBlock(energy.columns),
        roles=seeds | dict.fromkeys(energy.carried, ANY_TANGENTS),
        numbers=NumberColumns(
            {name: starts[NumberArgument(name)] for name in numbers.arguments},
            tuple((variable, starts[variable.key]) for variable, _ in numbers.constants),
        ),
        sparse=None,
    )


def _check_rows(
    first: Differentiated, energy: Container | None, read: Mapping[Container, ContainerInfo]
) -> frozenset[Container]:
    """Raise where the gradient takes tangents of intermediates that have a column for each entry of the parameters.

    Returns:
        The containers that have such tangents, which nothing reads.
    """
    left_out = {what for what, _ in first.shadows if isinstance(what, Container)} - {energy}
    others = (what for what, _ in first.shadows if not isinstance(what, Container))
    intermediates = {c.name: read[c] for c in left_out if c in read}
    reason = FROM_INTERMEDIATES.format(", ".join(intermediates), "the same kernel")
    check_sparse(
        (
            "the energy is not a sum of terms of few entries of the params: a local adds up terms of many, and the "
            "energy is not linear in it",
            any(what not in (RETURN, TERMS, ADJOINTS) for what in others),
        ),
        (reason, not all(isinstance(info.key, FieldKey) for info in intermediates.values())),
    )
    if intermediates:
        raise IntermediatesError(reason, {info.key: info.size for info in intermediates.values()})
    return frozenset(left_out)


def _first_order(key: Key, c: Container, rows: int, columns: int, first_column: int | None = None) -> FirstOrder:
    return FirstOrder(_info(key, c, rows * columns), columns, first_column)


def _info(key: Key, c: Container, size: int) -> ContainerInfo:
    return ContainerInfo(key, c.name, None, (size,), (), (), backend.named_type(c.dtype.name))


# Translate a launch request into program terms.


def constants_of(launch: Launch) -> Constants | None:
    """The Python numbers that are parameters; None where there are none, and no name could mean one."""
    numbers = launch.numbers
    if not launch.block.count or not (numbers.constants or numbers.arguments):
        return None
    return Constants(tuple(variable for variable, _ in numbers.constants), frozenset(numbers.arguments))


def seeds_of(
    program: Program, launch: Launch, infos: dict[Container, ContainerInfo], constants: Constants | None
) -> DifferentiationRequest:
    """The seeds of a launch, by the locals and containers of its program."""
    numbers, rows = number_locals(program, launch, constants), launch.numbers.shadow
    before = launch.block.first if rows is None else 0  # rows are numbered by themselves
    limits, sparse = STRATEGIES[launch.strategy], RowSeeds()
    if launch.sparse is not None:
        limits = SPARSE if launch.strategy == "auto" else limits
        keys: dict[Local | Container, Key] = {what: key for what, (key, _) in numbers.items()}
        keys |= {c: info.key for c, info in infos.items()}
        starts, is_whole = launch.energy.starts, launch.energy.has_whole_blocks
        sparse = SparseSeeds(launch.sparse.columns, launch.sparse.outputs, keys, starts, is_whole)
    return DifferentiationRequest(
        columns=launch.block.count,
        roles={c: launch.roles.get(info.key, Role()).moved(-launch.block.first) for c, info in infos.items()},
        extents=_extents(program, infos),
        arguments={local: first - before for local, (_, first) in numbers.items()},
        limits=limits,
        wants_return=launch.wants_return,
        device=Device(backend.is_host_arch(), backend.stores_by_column(), backend.thread_count(), backend.block_size()),
        values=None if rows is None else (type_of(rows[0]), rows[1]),
        sparse=sparse,
        first_column=launch.block.first if launch.block.is_part else None,
    )


def _extents(program: Program, infos: dict[Container, ContainerInfo]) -> dict[Container, Extent]:
    """The shapes of the containers, and whether all of their entries are there."""
    fields = [c for c in program.containers if not c.is_argument]
    extents = {c: Extent(c.shape or (), c.offset, backend.is_dense(c.object)) for c in fields}
    for c, info in infos.items():
        extents[c] = Extent(info.shape, info.offset, c.is_argument or backend.is_dense(c.object))
    return extents


def number_locals(program: Program, launch: Launch, constants: Constants | None) -> dict[Local, tuple[Key, int]]:
    """The arguments and Python numbers that are parameters: the key and the first column of each."""
    result: dict[Local, tuple[Key, int]] = {}
    for argument in program.arguments:
        if argument.value is not None and not isinstance(argument.value, Container):
            for local in {value.local for value in entries(argument.value) if isinstance(value, Read)}:
                if local.name in launch.numbers.arguments:
                    result[local] = NumberArgument(local.name), launch.numbers.arguments[local.name]
    for variable, first in launch.numbers.constants:
        if constants is not None and variable.key in constants.locals:
            result[constants.locals[variable.key]] = variable.key, first
    return result


def with_own_tangents(program: Program, seeds: DifferentiationRequest) -> DifferentiationRequest:
    """The seeds where the kernel runs again: it reads the tangents that it has stored the time before."""
    activity = find_activity(program, seeds.start, seeds.arguments)
    own = activity.containers & read_containers(program.body) & written_containers(program.body)
    roles = {c: replace(role, is_fresh=False) if c in own else role for c, role in seeds.roles.items()}
    return replace(seeds, roles=roles)


def assumed_role(c: Container, launch: Launch, seeds: DifferentiationRequest, differentiated: Differentiated) -> Role:
    """The tangents that a container may have at the launch: a kernel for tangents is right for zeros, too."""
    role = seeds.roles[c]
    has_shadow = any(what is c for what, _ in differentiated.shadows)  # a shadow can hold any tangents, including seeds
    if role.first_column is not None and not has_shadow:
        return role.moved(launch.block.first)
    may_carry = c in differentiated.active.containers and c not in differentiated.relied
    return ANY_TANGENTS if may_carry or not role.is_fresh else Role()


# Fields and arrays of a program as they are known outside of the kernel.


def with_whole_fields(program: Program, launch: Launch) -> tuple[Program, dict[Container, ContainerInfo]]:
    """Facts from outside of the kernel about its fields and arrays, each field and array being one container.

    A component of a vector field that the kernel names by itself becomes an entry of the field. Loops over it stay: its
    layout may be another than that of the field. An array that the kernel is given twice is the first of its arguments.
    """
    positions = {leaf.name: n for n, leaf in enumerate(backend.leaf_arguments(launch.kernel))}
    given = ((c, launch.arrays.get(positions[c.name])) for c in program.containers if c.is_argument)
    arrays = [(c, info) for c, info in given if info is not None]
    wholes = _wholes(program)
    first = {info.key: c for c, info in reversed(arrays)}
    fields = ((whole, launch.fields.field(c.object)) for c, (whole, _) in wholes.items())
    infos = {c: info for c, info in (*arrays, *fields) if info is not None and first.get(info.key, c) is c}
    parts = {c: whole for c, whole in wholes.items() if whole[0] is not c}
    parts |= {c: (first[info.key], ()) for c, info in arrays if first[info.key] is not c}
    return (_with_parts(program, parts) if parts else program), infos


def _wholes(program: Program) -> dict[Container, tuple[Container, tuple[int, ...]]]:
    """For each field that a program names, its container, and its component in that."""
    result: dict[Container, tuple[Container, tuple[int, ...]]] = {}
    fields = [(c, backend.whole_field(c.object)) for c in program.containers if not c.is_argument]
    wholes: dict[Any, Container] = {}
    for c, whole in sorted(fields, key=lambda field: field[0].object is not field[1]):  # whole fields first
        name = backend.field_identity(whole)
        if name not in wholes:
            wholes[name] = c if whole is c.object else field_container(whole, c.name)
        result[c] = wholes[name], backend.component_index(whole, c.object)
    return result


def _with_parts(program: Program, parts: dict[Container, tuple[Container, tuple[int, ...]]]) -> Program:
    """The program with entries of whole fields for those of their components."""

    def change(value: object) -> Any:
        if isinstance(value, Load) and value.container in parts:
            container, index = parts[value.container]
            return Load(container, value.indices, index or value.component, place=value.place)
        return value

    def changed(s: Any) -> Any:
        s = with_places(s, change)
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
