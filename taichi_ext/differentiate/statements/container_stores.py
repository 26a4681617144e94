"""Stores to fields and arrays: first value and tangent are evaluated, then both are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from taichi_ext.analysis.stores import Site, is_scattered
from taichi_ext.differentiate.facts.walk import Walk
from taichi_ext.differentiate.forms.forms import columns_only, materialize
from taichi_ext.differentiate.statements.linearize import Linearizer
from taichi_ext.differentiate.statements.reverse_loops import Reversals
from taichi_ext.differentiate.statements.shadows import Coverage, Tangents, Written
from taichi_ext.program import Assign, Const, Container, Load, Op, Statement, Update, Value


@dataclass(frozen=True)
class ContainerStores:
    """The stores of one walk.

    Attributes:
        walk: the walk.
        linearizer: the forms of values.
        containers: the tangents of containers.
        coverage: the walk's findings about their shadows.
        reversals: the loops whose tangents are accumulated at the store.
    """

    walk: Walk
    linearizer: Linearizer
    containers: Mapping[Container, Tangents]
    coverage: Coverage
    reversals: Reversals

    def store(self, site: Site, group: tuple[Statement, ...]) -> None:
        """Assignments to components of one entry, or updates of it, evaluated before anything is stored."""
        walk, builder, tangents, s = self.walk, self.walk.builder, self.containers[site.container], group[0]
        if isinstance(s, Update) and s.op not in ("add", "sub"):
            self._update(site, group)
            return
        targets = self._targets(group)
        raw = [s.value for s in group]  # type: ignore[attr-defined]
        parts = [self._unguarded(v, tangents, target) for v, target in zip(raw, targets, strict=True)]
        forms = list(map(self.linearizer.form, parts))
        forms = [materialize(builder, columns_only(f, walk.facts.is_column)) for f in forms]
        forms = [self.reversals.swept(f, tangents) for f in forms]
        values = [walk.expressions.primal(v) for v in raw]
        written = Written(targets, forms, [builder.keep(v) for v in values] if len(values) > 1 else values)
        if isinstance(s, Update):
            tangents.add(site, group, written, 1 if s.op == "add" else -1)
        else:
            tangents.store(site, group, written)

    def _unguarded(self, value: Value, tangents: Tangents, target: Load) -> Value:
        """A value without a condition that is needless for its tangent."""
        match value:
            case Op(name="select", args=(condition, inner, Const(value=0))):
                return inner if tangents.leaves_out(target, self.linearizer.definition(condition)) else value
            case _:
                return value

    def _update(self, site: Site, group: tuple[Statement, ...]) -> None:
        """``entry *= value`` and the like, as assignments that read the entry."""
        self.coverage.read.add(site.container)
        for u in group:
            assert isinstance(u, Update)
            assert isinstance(u.target, Load)
            value = Op(u.op, (u.target, u.value), u.target.dtype, place=u.value.place)
            component = self.containers[site.container].component(u.target)
            self.store(replace(site, component=component), (Assign(u.target, value, place=u.place),))

    def _targets(self, group: tuple[Statement, ...]) -> list[Load]:
        """The entries, with evaluated indices."""
        targets: list[Load] = []
        naming = self.walk.naming
        for s in group:
            load = s.target  # type: ignore[attr-defined]
            is_same = targets and not is_scattered(s)
            indices = targets[0].indices if is_same else tuple(naming.settled_index(i) for i in load.indices)
            component = tuple(i if isinstance(i, int) else naming.settled_index(i) for i in load.component)
            targets.append(Load(load.container, indices, component, checks=load.checks, place=load.place))
        return targets
