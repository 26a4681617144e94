"""One run that gives second derivatives: the session of a Jacobian whose output is the gradient of an energy."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from taichi_ext.differentiate.keys import Key
from taichi_ext.errors import UnsupportedError
from taichi_ext.launches import GRADIENT, ContainerInfo, EnergyTarget, FirstOrder, Fused, GradientKey
from taichi_ext.runtime.memory import Shadow
from taichi_ext.runtime.projection import project
from taichi_ext.runtime.session import Session
from taichi_ext.runtime.sparse_rows import SparseRows
from taichi_ext.runtime.sparse_session import SparseSession
from taichi_ext.runtime.sparse_streams import Streams


class SecondOrderSession(Session):
    """The tangents of one run, of the second order; ``energy`` is the key of what they are of."""

    energy: Key = None
    gradient_columns = 0  # entries of all parameters
    first_order: dict[Key, Shadow]  # arrays of the run, by key
    _infos: dict[Key, ContainerInfo]

    _starts: dict[Key, int]
    _adds_terms = False  # also of energies with few parameters, of which other tangents are rows

    def begin(self, energy: Key, sizes: dict[Key, int]) -> None:
        """Before the run: what is to be differentiated, and the entries of each container that is a parameter."""
        self.energy, self.gradient_columns = energy, sum(sizes.values())
        self._starts = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))
        self.first_order, self._infos = {}, {}

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

    def _energy_target(self, outer: Mapping[Key, Key]) -> EnergyTarget:
        names = {key: local for local, key in outer.items()}
        starts = {names.get(key, key): first for key, first in self._starts.items()}
        adds_terms = self._adds_terms or self.directions is not None
        return EnergyTarget(names.get(self.energy, self.energy), self.gradient_columns, starts, adds_terms)

    def _accept(self, fused: Fused, outer: Mapping[Key, Key]) -> None:
        self._infos = {array.info.key: array.info for array in fused.first_order}
        super()._accept(fused, outer)

    def _stream(self, fused: Fused, name: Any) -> Any:
        found = next((array for array in fused.first_order if array.name == name), None)
        return super()._stream(fused, name) if found is None else self._first_order(found)

    def _first_order(self, array: FirstOrder) -> Any:
        info = array.info
        made = Shadow(info.name, info.size // array.columns, array.columns, info.dtype)
        if array.first_column is not None:
            made.set_identity(array.first_column, slice(None))
        self.first_order[info.key] = made
        return made.array


class SparseSecondOrderSession(SecondOrderSession, SparseSession):
    """The tangents of one run, of the second order, whose Jacobian is sparse."""

    _adds_terms = True
    projection: str | None = None

    def _variant(self, outer: dict[Any, Any]) -> Any:
        return super()._variant(outer), self.projection is not None

    def _energy_target(self, outer: dict[Any, Any]) -> EnergyTarget:
        return replace(super()._energy_target(outer), has_whole_blocks=self.projection is not None)

    def _accept(self, fused: Fused, outer: dict[Any, Any]) -> None:
        if self.projection is not None and not all(site.is_symmetric for site in fused.sites):
            raise UnsupportedError(
                f"project={self.projection!r} needs the block of each element, and there is a term whose entries of "
                "params are only known in a branch or loop: a local takes them on there. Add the term to the energy in "
                "the branch or loop itself, or leave out project=."
            )
        super()._accept(fused, outer)

    def _collect(self, fused: Fused, outer: dict[Any, Any]) -> None:
        streams = Streams.of(fused) if fused.sites else None
        self._outer = outer
        self._saved = streams.saved() if streams is not None and self.projection == "on_demand" else None
        if streams is not None and self.projection in ("clamp", "abs"):
            project(streams, self.projection)
        super()._collect(fused, outer)

    def project_saved(self) -> SparseRows:
        """Project the blocks after all; the rows of the matrix that they make up."""
        assert self.launched is not None
        assert self._saved is not None
        streams = Streams.of(self.launched)
        streams.put_back(self._saved)
        project(streams, "clamp")
        self.rows = self.make_rows(self.numbering.sizes, self.arithmetic)
        super()._collect(self.launched, self._outer)
        return self.rows

    def is_symmetric(self) -> bool:
        """Whether the entries are those of a symmetric matrix, to the last bit."""
        return self.launched is not None and bool(self.launched.sites) and Streams.of(self.launched).is_symmetric
