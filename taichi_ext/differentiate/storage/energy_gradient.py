"""The gradient of an energy, to be differentiated again: each addition to the energy adds its terms to the gradient.

The terms of one addition, ``gradient[column] += coefficient`` for each column of a form, are a *group* of updates.
When the gradient is differentiated again, they are one site, whose entries are the block of one element.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from taichi_ext.analysis.energy_sums import EnergySums
from taichi_ext.differentiate.facts.arguments import ShadowMatrix
from taichi_ext.differentiate.facts.walk import Declaration, Walk
from taichi_ext.differentiate.forms.forms import (
    Form,
    Weight,
    accumulate,
    coefficient,
    columns_of,
    columns_only,
    has_row,
    materialize,
    row_value,
)
from taichi_ext.differentiate.memory.own_registers import OwnRegisters
from taichi_ext.program import Container, Load, Update, Value
from taichi_ext.program.build import Index, cast, literal
from taichi_ext.program.keys import RETURN


@dataclass(frozen=True)
class EnergyGradient:
    """The gradient computed by one walk.

    Attributes:
        walk: the walk.
        sums: the energy, and the locals that it is a sum of.
        matrix: the gradient, as the tangents of the energy.
    """

    walk: Walk
    sums: EnergySums
    matrix: ShadowMatrix

    @staticmethod
    def of(walk: Walk, sums: EnergySums, matrices: Mapping[Container, ShadowMatrix]) -> EnergyGradient | None:
        """The gradient in the tangents of the energy; None if it has none."""
        if sums.container is not None and sums.container in matrices:
            return EnergyGradient(walk, sums, matrices[sums.container])
        if sums.container is not None and not walk.facts.seeds.use.intermediates:
            return None
        array = walk.arguments.add(RETURN, "d_result", sums.dtype)
        return EnergyGradient(walk, sums, ShadowMatrix(array, 1, walk.facts.columns, walk.facts.seeds.device.by_column))

    def add(self, form: Form) -> None:
        """``gradient += form``, atomically."""
        walk, entry = self.walk, self.matrix.entry
        form = materialize(walk.builder, columns_only(form, walk.facts.is_column))
        if has_row(form):
            walk.builder.loop(
                walk.facts.columns,
                lambda k: walk.builder.update(entry(0, k), row_value(form, k, self.matrix.array.dtype)),
            )
        terms = [(entry(0, walk.naming.column(seed)), c) for seed, c in columns_of(form).items()]
        values = [self._kept(target, c) for target, c in terms]
        group = object()
        for (target, _), value in zip(terms, values, strict=True):
            walk.builder.emit(Update(target, "add", value, group, place=walk.builder.place))

    def _kept(self, target: Load, c: Weight) -> Value:
        return self.walk.builder.keep(cast(coefficient(c, target.dtype), target.dtype), "w")

    def clear(self) -> None:
        """``gradient = 0``."""
        builder, entry = self.walk.builder, self.matrix.entry
        zero = literal(0, self.matrix.array.dtype)
        builder.loop(self.walk.facts.columns, lambda k: builder.assign(entry(0, k), zero))


@dataclass(eq=False)
class EnergyPart:
    """A local that is a part of the energy, in place of a storage: additions to it are added to the gradient."""

    gradient: EnergyGradient
    declared: Declaration
    own: OwnRegisters
    version: int = 0

    def form(self, index: Index = 0) -> Form:
        """The tangent that is not in the gradient yet: none."""
        return {}

    def write(self, forms: list[Form], indices: list[Index]) -> None:
        """Write the initial value of the local."""
        self.add(forms[0])

    def add(self, form: Form, index: Index = 0) -> None:
        """Add to the tangent."""
        total: Form = {}
        accumulate(total, form, self.gradient.sums.weights[self.declared.local])
        self.gradient.add(total)
