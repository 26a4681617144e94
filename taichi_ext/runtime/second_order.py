"""One run that gives second derivatives: the session of a Jacobian whose output is the gradient of an energy.

Containers have tangents of the first order, with a column for each entry of the parameters; these have tangents
themselves, as containers do in any session, under the key ``GradientKey(container)``.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from taichi_ext.differentiate.keys import Key, Scratch
from taichi_ext.differentiate.sparse_columns import DenseRowsError
from taichi_ext.errors import UnsupportedError
from taichi_ext.launches import (
    FROM_INTERMEDIATES,
    GRADIENT,
    ContainerInfo,
    EnergyTarget,
    FirstOrder,
    Fused,
    GradientKey,
    Role,
)
from taichi_ext.runtime.array_tangents import Binding
from taichi_ext.runtime.field_rows import role_of
from taichi_ext.runtime.memory import Shadow
from taichi_ext.runtime.projection import project
from taichi_ext.runtime.regions import View
from taichi_ext.runtime.session import Session
from taichi_ext.runtime.sparse_rows import SparseRows
from taichi_ext.runtime.sparse_session import SparseSession
from taichi_ext.runtime.sparse_streams import Saved, Streams


class SecondOrderSession(Session):
    """The tangents of one run, of the second order; ``energy`` is the key of what they are of."""

    energy: Key = None
    gradient_columns = 0  # entries of all parameters
    first_order: dict[GradientKey, Shadow]  # of the run
    _infos: dict[Key, ContainerInfo]
    _outer: Mapping[Key, Key]  # the keys of the session by those of the launch

    _starts: dict[Key, int]
    _adds_terms = False  # also of energies with few parameters, of which other tangents are rows

    def begin(self, energy: Key, sizes: dict[Key, int]) -> None:
        """Before the run: what is to be differentiated, and the entries of each container that is a parameter."""
        self.energy, self.gradient_columns = energy, sum(sizes.values())
        self._starts = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))
        self.first_order, self._infos, self._outer = {}, {}, {}

    def gradient_rows(self, key: Key) -> slice:
        """The entries of the gradient that belong to a container."""
        ends = [*self._starts.values(), self.gradient_columns]
        place = list(self._starts).index(key)
        return slice(ends[place], ends[place + 1])

    def gradient(self) -> np.ndarray | None:
        """The gradient after the run; None where the energy depends on no parameter."""
        held = self.first_order.get(GRADIENT)
        return None if held is None else held.to_numpy().reshape(-1)

    def info(self, key: Key) -> ContainerInfo:
        return self._infos[key] if isinstance(key, GradientKey) else super().info(key)

    # --- from launch to launch

    def _of(self, container: Key) -> GradientKey:
        return GRADIENT if container == self.energy else GradientKey(container)

    def _container(self, key: GradientKey) -> Key:
        return self.energy if key == GRADIENT else key.of

    def _outer_key(self, key: Any) -> Any:
        return GradientKey(self._outer.get(key.of, key.of)) if isinstance(key, GradientKey) else key

    def shadow(self, key: Key) -> Any:
        return super().shadow(self._outer_key(key))

    def _containers(self) -> list[Key]:
        """The containers that have tangents of the first order."""
        return [self._container(key) for key in self.first_order if not isinstance(key.of, Scratch)]

    def carries_tangent(self, key: Key) -> bool:
        return super().carries_tangent(key) or self._of(key) in self.first_order

    def _active_fields(self) -> list[Any]:
        return [*super()._active_fields(), *self._containers()]

    def _roles(self, binding: Binding) -> dict[Key, Role]:
        names: dict[Key, Key] = {key: local for local, key in binding.outer.items()}
        kept = (key for key in self.shadows if isinstance(key, GradientKey) and not isinstance(key.of, Scratch))
        first = {GradientKey(names.get(k.of, k.of)): role_of({}, self.shadows[k]) for k in kept}
        return super()._roles(binding) | first

    def _carried(self, outer: Mapping[Key, Key]) -> frozenset[Key]:
        """The containers with tangents of the first order, as a launch knows them."""
        names: dict[Key, Key] = {key: local for local, key in outer.items()}
        return frozenset(names.get(c, c) for c in self._containers() if not isinstance(c, View) or c in names)

    def _variant(self, outer: Mapping[Key, Key]) -> Any:
        return super()._variant(outer), self._carried(outer)

    def _energy_target(self, outer: Mapping[Key, Key]) -> EnergyTarget:
        self._refuse_parts(outer)
        names = {key: local for local, key in outer.items()}
        starts = {names.get(key, key): first for key, first in self._starts.items()}
        adds_terms = self._adds_terms or self.directions is not None
        energy = names.get(self.energy, self.energy)
        return EnergyTarget(energy, self.gradient_columns, starts, self._carried(outer), adds_terms)

    def _views(self) -> set[View]:
        """The arrays that have tangents of the first order, or are parameters."""
        return {key for key in (*self._containers(), *self._starts) if isinstance(key, View)}

    def _refuse_parts(self, outer: Mapping[Key, Key]) -> None:
        """Raise for arrays that share a part of their memory with one that has tangents of the first order."""
        known = self._views()
        for view in outer.values():
            if not isinstance(view, View) or self.arrays.role(view).first_column is not None:
                continue
            if any(view != other and view.overlaps(other) for other in known):
                raise UnsupportedError(
                    "Two arrays share a part of their memory, and one of them depends on params. Second derivatives "
                    "need arrays of their own: pass copies, or one array that holds both."
                )

    def _is_repeatable(self, kernel: Any, fused: Fused) -> bool:
        return False

    def _accept(self, fused: Fused, outer: Mapping[Key, Key]) -> None:
        self._outer = outer
        for array in fused.first_order:
            key = self._outer_key(array.info.key)
            self._infos[key] = replace(array.info, key=key)
            if isinstance(key.of, Scratch):  # of one launch
                self.shadows.pop(key, None)
                self.first_order.pop(key, None)
        super()._accept(fused, outer)

    def _stream(self, fused: Fused, name: Any) -> Any:
        found = next((array for array in fused.first_order if array.name == name), None)
        return super()._stream(fused, name) if found is None else self._first_order(found)

    def _first_order(self, array: FirstOrder) -> Any:
        key, info = self._outer_key(array.info.key), array.info
        if key not in self.first_order:
            self.first_order[key] = Shadow(info.name, info.size // array.columns, array.columns, info.dtype)
            if array.first_column is not None:
                self.first_order[key].set_identity(array.first_column, slice(None))
        return self.first_order[key].array

    def clear_rows(self, key: Key, rows: Any) -> None:
        if super().carries_tangent(key):
            super().clear_rows(key, rows)
        if not isinstance(key, View):
            self._clear_first_order(key, rows)
            return
        marks = np.zeros(key.size, bool)
        marks[rows] = True
        for view in self._views():
            if view.overlaps(key):
                self._clear_first_order(view, np.flatnonzero(marks[self.arrays.rows(view)]))

    def _clear_first_order(self, container: Key, rows: Any) -> None:
        key = self._of(container)
        if key not in self.first_order:
            if container not in self._starts:
                return
            info = self.info(container)
            self.first_order[key] = Shadow(info.name, info.size, self.gradient_columns, info.dtype)
            self.first_order[key].set_identity(self._starts[container], slice(None))
        first = self.first_order[key]
        first.is_fresh = False
        first.clear_rows(rows)
        if self.carries_tangent(key):
            size, width = first.shape
            entries = np.arange(size * width)
            entries = entries.reshape(width, size).T if first.by_column else entries.reshape(size, width)
            self.shadow(key).clear_rows(entries[rows].reshape(-1))


class SparseSecondOrderSession(SecondOrderSession, SparseSession):
    """The tangents of one run, of the second order, whose Jacobian is sparse."""

    _adds_terms = True
    projection: str | None = None
    is_symmetric = True  # whether the entries are those of a symmetric matrix, to the last bit

    def begin(self, energy: Key, sizes: dict[Key, int]) -> None:
        super().begin(energy, sizes)
        self._left_out: dict[Key, Any] = {}  # containers whose tangents are not kept: their names
        self._saved: list[tuple[Fused, Mapping[Key, Key], Saved]] = []  # entries of launches

    def _variant(self, outer: Mapping[Key, Key]) -> Any:
        return super()._variant(outer), self.projection is not None

    def _energy_target(self, outer: Mapping[Key, Key]) -> EnergyTarget:
        return replace(super()._energy_target(outer), has_whole_blocks=self.projection is not None)

    def _note_clear(self, key: Key) -> None:
        if key in self.numbering.sizes:
            raise DenseRowsError("a parameter is changed from Python")
        super()._note_clear(key)

    def _accept(self, fused: Fused, outer: Mapping[Key, Key]) -> None:
        if self.projection is not None and not all(site.is_symmetric for site in fused.sites):
            raise UnsupportedError(
                f"project={self.projection!r} needs the block of each element, and there is a term whose entries of "
                "params are only known in a branch or loop: a local takes them on there. Add the term to the energy in "
                "the branch or loop itself, or leave out project=."
            )
        if not self.is_direct:
            self._refuse_left_out(fused, outer)
        self._before: dict[Key, np.ndarray] = {}  # the tangents of the first order before the launch
        super()._accept(fused, outer)

    def _refuse_left_out(self, fused: Fused, outer: Mapping[Key, Key]) -> None:
        """Come to dense tangents where a kernel reads what another one has computed from parameters."""
        for key in (outer.get(k, k) for k in fused.facts.read):
            if key in self._left_out:
                raise DenseRowsError(FROM_INTERMEDIATES.format(self._left_out[key], "another kernel"))
        for key in (outer.get(k, k) for k in fused.left_out):
            if isinstance(key, View):
                raise DenseRowsError("a kernel of the pipeline computes an array from params")
            self._left_out[key] = self.info(key).name

    def _collect(self, fused: Fused, outer: Mapping[Key, Key]) -> None:
        if fused.sites:
            streams = Streams.of(fused)
            if self.projection == "on_demand":
                if streams.counts and any(fused is other for other, _, _ in self._saved):
                    raise UnsupportedError(
                        "project='on_demand' keeps the blocks of each launch, which is not possible where a kernel "
                        "whose loops have bounds known at run time is launched twice. Use project='clamp'."
                    )
                self._saved.append((fused, outer, streams.saved()))
            elif self.projection is not None:
                project(streams, self.projection)
        super()._collect(fused, outer)
        if fused.sites:
            self.is_symmetric = self.is_symmetric and streams.is_symmetric

    def _first_order(self, array: FirstOrder) -> Any:
        given, key = super()._first_order(array), self._outer_key(array.info.key)
        if key in self._before:  # the kernel runs again, with more room for entries
            self.first_order[key].set_rows(slice(None), self._before[key])
        else:
            self._before[key] = self.first_order[key].to_numpy().copy()
        return given

    def project_saved(self) -> SparseRows:
        """Project the blocks after all; the rows of the matrix that they make up."""
        self.rows = self.make_rows(self.numbering.sizes, self.arithmetic)
        for fused, outer, saved in self._saved:
            streams = Streams.of(fused)
            streams.put_back(saved)
            project(streams, "clamp")
            super()._collect(fused, outer)
        return self.rows

    def finish(self) -> None:
        super().finish()
        if not self.is_direct and isinstance(self.energy, View):
            raise DenseRowsError("the energy is an array that Python can change")
