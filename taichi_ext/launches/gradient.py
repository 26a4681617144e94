"""The program of a gradient: a kernel's program that adds up the gradient of its energy, too.

It is the program with tangents that ``differentiate`` makes of it: the tangent of the energy, one number for each
column, is the gradient. It is an ordinary program, so that its Jacobian is the Hessian of the energy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from taichi_ext import backend
from taichi_ext.analysis.changes import read_containers, written_containers
from taichi_ext.analysis.energy_sums import EnergySums, energy_sums
from taichi_ext.differentiate.facts.decisions import Differentiated, Seeds, Use
from taichi_ext.differentiate.forms.entry_sites import DenseRowsError, IntermediatesError
from taichi_ext.differentiate.plan.storage_facts import SPARSE
from taichi_ext.differentiate.transform.forward import differentiate
from taichi_ext.launches.launch import (
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
    Role,
)
from taichi_ext.launches.seeds import seeds_of
from taichi_ext.program import Container, Local, Program, Store, mapped, with_nodes
from taichi_ext.program.build import written_out
from taichi_ext.program.keys import ADJOINTS, RETURN, Key, Purpose, Scratch
from taichi_ext.record.constants import Constants
from taichi_ext.record.literals import type_of
from taichi_ext.simplify import simplify

FROM_INTERMEDIATES = "the energy is computed from {}, which {} computes from params"


@dataclass(frozen=True)
class FirstOrder:
    """An array of a kernel that has tangents of the second order: it holds tangents of the first order.

    Attributes:
        info: its key, and how many numbers it has.
        columns: of a row of it.
        first_column: of its rows, where these are columns at the start.
    """

    info: ContainerInfo
    columns: int
    first_column: int | None = None

    @property
    def name(self) -> FirstOrderArray:
        """The key of the array itself, as opposed to its tangents."""
        return FirstOrderArray(self.info.key)

    @property
    def is_scratch(self) -> bool:
        """Whether it is memory for rows of one launch."""
        return isinstance(self.info.key, GradientKey) and isinstance(self.info.key.of, Scratch)


@dataclass(frozen=True)
class GradientProgram:
    """The program with tangents of the first order.

    Attributes:
        program: the program.
        arrays: the arrays that hold them.
        energy: the energy, if that is a container.
        sums: the locals that the energy is a sum of, if its gradient is added up term by term.
        adjoints: of the fields that the energy is computed from, if it computes some.
        left_out: the containers whose tangents it does not keep.
        is_ignored: whether nothing needs the tangents of the energy itself, only those of its gradient.
        mirrored: the gradient, if entries above the diagonal of its tangents are not needed.
        unneeded: the gradient, if only its tangents are needed.
    """

    program: Program
    arrays: dict[Container, FirstOrder]
    energy: Container | None
    sums: EnergySums | None
    adjoints: Container | None
    left_out: frozenset[Container]
    is_ignored: bool
    mirrored: Container | None
    unneeded: Container | None

    @property
    def infos(self) -> dict[Container, ContainerInfo]:
        found = {c: array.info for c, array in self.arrays.items()}
        return found if self.adjoints is None else found | {self.adjoints: _info(ADJOINTS, self.adjoints, 0)}

    def seeds(self, seeds: Seeds) -> Seeds:
        """The request, without tangents of the energy itself where nothing reads it."""
        ignored: set[Container | Local] = set(self.left_out)
        if self.is_ignored:
            if self.energy is not None and self.energy not in read_containers(self.program.body):
                ignored.add(self.energy)
            if self.sums is not None and (self.energy is not None or seeds.wants_return):
                ignored |= energy_sums(self.program, self.sums.container).weights.keys()
        return replace(seeds, wants_return=False, ignored=frozenset(ignored))

    def completed(self, found: Differentiated) -> Differentiated:
        """The program with tangents of the second order, of operations that Taichi has."""
        body = mapped(found.program.body, lambda s: with_nodes(s, written_out))
        if self.unneeded is not None and self.unneeded not in read_containers(body):
            body = mapped(body, lambda s: () if isinstance(s, Store) and s.target.memory is self.unneeded else s)
        arrays: list[tuple[Purpose, Container]] = [(array.name, c) for c, array in self.arrays.items()]
        arrays += [] if self.adjoints is None else [(ADJOINTS, self.adjoints)]
        return replace(found, program=replace(found.program, body=body), shadows=(*arrays, *found.shadows))


def gradient_program(
    program: Program, launch: Launch, infos: dict[Container, ContainerInfo], constants: Constants | None
) -> GradientProgram:
    """The program that computes the gradient of ``launch.energy``, in an array by the key ``GRADIENT``."""
    target = launch.energy
    assert target is not None
    energy = next((c for c, info in infos.items() if info.key == target.key), None)
    seeds = _first_order_seeds(program, launch, energy, infos, constants)
    sums = seeds.use.sums
    found, left_out = differentiate(program, seeds), frozenset[Container]()
    if launch.sparse is not None:
        read = read_containers(program.body)
        left_out = _check_rows(found, energy, {c: infos[c] for c in read if c in infos})
        if any(info.key in target.carried for c, info in infos.items() if c in read):
            raise DenseRowsError("a kernel reads the energy that another one has added to")
        if left_out:
            found = differentiate(program, replace(seeds, ignored=left_out))
    arrays = _first_order_arrays(found, target, infos, seeds)
    adjoints = next((c for what, c in found.shadows if what == ADJOINTS), None)
    containers = (*found.program.containers, *arrays, *([] if adjoints is None else [adjoints]))
    result = simplify(replace(found.program, name=f"{program.name}_gradient", containers=containers))
    is_ignored = not launch.is_repeated or launch.sparse is not None
    is_alone = launch.sparse is None and not launch.is_repeated
    own = next((c for c, array in arrays.items() if array.info.key == GRADIENT), None) if is_alone else None
    mirrored = own if target.is_mirrored and launch.block.count == target.columns else None
    unneeded = None if target.has_gradient else own
    return GradientProgram(result, arrays, energy, sums, adjoints, left_out, is_ignored, mirrored, unneeded)


def _first_order_seeds(
    program: Program,
    launch: Launch,
    energy: Container | None,
    infos: dict[Container, ContainerInfo],
    constants: Constants | None,
) -> Seeds:
    """The request for the gradient; where the energy is a sum, its terms are differentiated by themselves."""
    target = launch.energy
    assert target is not None
    has_energy, written = energy is not None or target.key == RETURN, written_containers(program.body)
    sums = energy_sums(program, energy) if target.adds_terms and has_energy else None
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
    found: Differentiated, target: EnergyTarget, infos: dict[Container, ContainerInfo], seeds: Seeds
) -> dict[Container, FirstOrder]:
    """The arrays that hold tangents of the first order, the gradient among them."""
    arrays: dict[Container, FirstOrder] = {}
    for what, c in found.shadows:
        if what == ADJOINTS:
            continue
        of = infos[what].key if isinstance(what, Container) else what
        key = GRADIENT if of in (target.key, RETURN) else GradientKey(of)
        if isinstance(what, Container):
            arrays[c] = _first_order(key, c, infos[what].size, target.columns, seeds.roles[what].first_column)
        else:
            size = found.scratch_sizes[what] if isinstance(what, Scratch) else target.columns
            arrays[c] = _first_order(key, c, 1, size)
    return arrays


def _first_launch(launch: Launch, energy: EnergyTarget) -> Launch:
    """The launch that gives the gradient: with a column for each entry of the parameters, all of them dense."""
    starts, numbers = energy.starts, launch.numbers
    seeds = {k: r for k, r in launch.roles.items() if r.first_column is not None}  # of a part of a parameter, too
    seeds |= {k: Role(first) for k, first in starts.items()}
    return replace(
        launch,
        block=ColumnBlock(energy.columns),
        roles=seeds | dict.fromkeys(energy.carried, Role(has_shadow=True)),
        numbers=NumberColumns(
            {name: starts[NumberArgument(name)] for name in numbers.arguments},
            tuple((variable, starts[variable.key]) for variable, _ in numbers.constants),
        ),
        sparse=None,
    )


def _check_rows(
    found: Differentiated, energy: Container | None, read: Mapping[Container, ContainerInfo]
) -> frozenset[Container]:
    """Raise where the gradient takes tangents of intermediates that have a column for each entry of the parameters.

    Returns:
        The containers that have such tangents, which nothing reads.
    """
    left_out: set[Container] = set()
    for what, _ in found.shadows:
        if isinstance(what, Container) and what is not energy:
            left_out.add(what)
        if not isinstance(what, Container) and what not in (RETURN, ADJOINTS):
            raise DenseRowsError(
                "the energy is not a sum of terms of few entries of the params: a local adds up terms of many, and the "
                "energy is not linear in it"
            )
    intermediates = {c.name: read[c] for c in left_out if c in read}
    if intermediates:
        reason = FROM_INTERMEDIATES.format(", ".join(intermediates), "the same kernel")
        if not all(isinstance(info.key, FieldKey) for info in intermediates.values()):
            raise DenseRowsError(reason)
        raise IntermediatesError(reason, {info.key: info.size for info in intermediates.values()})
    return frozenset(left_out)


def _first_order(key: Key, c: Container, rows: int, columns: int, first_column: int | None = None) -> FirstOrder:
    return FirstOrder(_info(key, c, rows * columns), columns, first_column)


def _info(key: Key, c: Container, size: int) -> ContainerInfo:
    return ContainerInfo(key, c.name, None, (size,), (), (), backend.named_type(c.dtype.name))
