"""The program of a gradient: a kernel's program that adds up the gradient of its energy, too.

It is the program with tangents that ``differentiate`` makes of it: the tangent of the energy, one number for each
column, is the gradient. It is an ordinary program, so that its Jacobian is the Hessian of the energy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from taichi_ext import backend
from taichi_ext.analysis.accesses import read_containers
from taichi_ext.analysis.energy_sums import EnergySums, energy_sums
from taichi_ext.differentiate.build import written_out
from taichi_ext.differentiate.decisions import Differentiated, Seeds
from taichi_ext.differentiate.forward import differentiate
from taichi_ext.differentiate.keys import RETURN, Key, Scratch
from taichi_ext.differentiate.sparse_columns import DenseRowsError
from taichi_ext.differentiate.storage_facts import SPARSE
from taichi_ext.launches.keys import GRADIENT, FirstOrderArray, GradientKey, NumberArgument
from taichi_ext.launches.launch import ColumnBlock, ContainerInfo, EnergyTarget, Launch, NumberColumns, Role
from taichi_ext.launches.seeds import seeds_of
from taichi_ext.program import Container, Program, mapped, rebuilt, with_values
from taichi_ext.record.constants import Constants
from taichi_ext.simplify import simplify


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
        """What the array itself is known by, beside its tangents."""
        return FirstOrderArray(self.info.key)


@dataclass(frozen=True)
class GradientProgram:
    """The program with tangents of the first order, the arrays that it keeps them in, and the energy."""

    program: Program
    arrays: dict[Container, FirstOrder]
    energy: Container | None
    sums: EnergySums | None

    @property
    def infos(self) -> dict[Container, ContainerInfo]:
        return {c: array.info for c, array in self.arrays.items()}

    def seeds(self, seeds: Seeds) -> Seeds:
        """What is asked for, without tangents of the energy itself where nothing reads it."""
        is_read = self.energy is None or self.energy in read_containers(self.program.body)
        ignored: set[Key] = set() if is_read else {self.energy}
        if self.sums is not None:
            ignored |= energy_sums(self.program, self.sums.container).weights.keys()
        return replace(seeds, wants_return=False, ignored=frozenset(ignored))

    def completed(self, found: Differentiated) -> Differentiated:
        """The program with tangents of the second order, of operations that Taichi has."""
        body = mapped(found.program.body, lambda s: with_values(s, lambda v: rebuilt(v, written_out)))
        arrays = tuple((array.name, c) for c, array in self.arrays.items())
        return replace(found, program=replace(found.program, body=body), shadows=(*arrays, *found.shadows))


def gradient_program(
    program: Program, launch: Launch, infos: dict[Container, ContainerInfo], constants: Constants | None
) -> GradientProgram:
    """The program that computes the gradient of ``launch.energy``, in an array by the key ``GRADIENT``."""
    target = launch.energy
    assert target is not None
    energy = next((c for c, info in infos.items() if info.key == target.key), None)
    sums = energy_sums(program, energy) if target.adds_terms else None
    seeds = seeds_of(program, _first_launch(launch, target), infos, constants)
    seeds = replace(seeds, wants_return=target.key == RETURN, is_again=True, sums=sums)
    if sums is not None:
        seeds = replace(seeds, limits=SPARSE)
    found = differentiate(program, seeds)
    if launch.sparse is not None:
        _refuse_rows(found, energy)
    arrays: dict[Container, FirstOrder] = {}
    for what, c in found.shadows:
        is_energy = what == RETURN if not isinstance(what, Container) else infos[what].key == target.key
        key = GRADIENT if is_energy else GradientKey(1 + len(arrays))
        if isinstance(what, Container):
            arrays[c] = _first_order(key, c, infos[what].size, target.columns, seeds.roles[what].first_column)
        else:
            size = found.scratch_sizes[what] if isinstance(what, Scratch) else target.columns
            arrays[c] = _first_order(key, c, 1, size)
    containers = (*found.program.containers, *arrays)
    result = simplify(replace(found.program, name=f"{program.name}_gradient", containers=containers))
    return GradientProgram(result, arrays, energy, sums)


def _first_launch(launch: Launch, energy: EnergyTarget) -> Launch:
    """The launch that gives the gradient: with a column for each entry of the parameters, all of them dense."""
    starts, numbers = energy.starts, launch.numbers
    return replace(
        launch,
        block=ColumnBlock(energy.columns),
        roles={k: Role(starts[k]) if k in starts else r for k, r in launch.roles.items()},
        numbers=NumberColumns(
            {name: starts[NumberArgument(name)] for name in numbers.arguments},
            tuple((variable, starts[variable.key]) for variable, _ in numbers.constants),
        ),
        sparse=None,
    )


def _refuse_rows(found: Differentiated, energy: Container | None) -> None:
    """Raise where the gradient takes tangents of intermediates that have a column for each entry of the parameters."""
    for what, _ in found.shadows:
        if isinstance(what, Container) and what is not energy:
            raise DenseRowsError(f"the energy is computed from {what.name}, which the same kernel computes from params")
        if not isinstance(what, Container) and what != RETURN:
            raise DenseRowsError(
                "the energy is no sum of terms of few entries of the params: a local adds up terms of many, and the "
                "energy is not linear in it"
            )


def _first_order(key: Key, c: Container, rows: int, columns: int, first_column: int | None = None) -> FirstOrder:
    info = ContainerInfo(key, c.name, None, (rows * columns,), (), (), backend.named_type(c.dtype.name))
    return FirstOrder(info, columns, first_column)
