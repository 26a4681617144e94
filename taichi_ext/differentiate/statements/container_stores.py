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
from taichi_ext.program import Assign, Container, Load, Op, Statement, Update


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

    def statement(self, group: tuple[Statement, ...]) -> None:
        """Assignments to components of one entry, or one update."""
        s = group[0]
        assert isinstance(s, (Assign, Update))
        assert isinstance(s.target, Load)
        site = self.walk.facts.stores.of[s]
        if isinstance(s, Assign):
            self.assign(site, group)
        elif s.op in ("add", "sub"):
            self.add(site, group, 1 if s.op == "add" else -1)
        else:
            tangents = self.containers[site.container]
            self.note_read(site.container)
            for u in group:
                assert isinstance(u, Update)
                assert isinstance(u.target, Load)
                value = Op(u.op, (u.target, u.value), u.target.dtype, place=u.value.place)
                made = Assign(u.target, value, place=u.place)
                self.assign(replace(site, component=tangents.component(u.target)), (made,))

    def assign(self, site: Site, group: tuple[Statement, ...]) -> None:
        """``entry = value`` of a container, of several components at once."""
        tangents = self.containers[site.container]
        tangents.store(site, group, self._written(group, tangents))

    def add(self, site: Site, group: tuple[Statement, ...], sign: int) -> None:
        """``entry += value`` or ``entry -= value``."""
        tangents = self.containers[site.container]
        tangents.add(site, group, self._written(group, tangents), sign)

    def note_read(self, container: Container) -> None:
        """Note that a storing statement reads the old value."""
        self.coverage.read.add(container)

    def end_loop(self) -> None:
        """At the end of a top-level loop, note the containers that it covers."""
        self.coverage.end_loop()

    def _written(self, group: tuple[Statement, ...], tangents: Tangents) -> Written:
        """Indices, forms and values, evaluated before anything is stored."""
        targets: list[Load] = []
        walk, builder, naming = self.walk, self.walk.builder, self.walk.naming
        for s in group:
            load = s.target  # type: ignore[attr-defined]
            is_same = targets and not is_scattered(s)
            indices = targets[0].indices if is_same else tuple(naming.settled_index(i) for i in load.indices)
            component = tuple(i if isinstance(i, int) else naming.settled_index(i) for i in load.component)
            targets.append(Load(load.container, indices, component, checks=load.checks, place=load.place))
        raw = [s.value for s in group]  # type: ignore[attr-defined]
        forms = list(map(self.linearizer.form, raw))
        forms = [materialize(builder, columns_only(f, walk.facts.is_column)) for f in forms]
        forms = [self.reversals.swept(f, tangents) for f in forms]
        values = [walk.expressions.primal(v) for v in raw]
        return Written(targets, forms, [builder.keep(v) for v in values] if len(values) > 1 else values)
