"""One run that gives second derivatives: the session of a Jacobian whose output is the gradient of an energy."""

from __future__ import annotations

from typing import Any

import numpy as np

from taichi_ext.launches import GRADIENT, ContainerInfo, FirstOrder, Fused, Launch
from taichi_ext.runtime.memory import Shadow
from taichi_ext.runtime.session import Session
from taichi_ext.runtime.sparse_session import SparseSession
from taichi_ext.runtime.sparse_streams import Streams


class SecondOrderSession(Session):
    """The tangents of one run, of the second order; ``energy`` is the key of what they are of."""

    energy: Any = None
    gradient_columns = 0  # entries of all parameters
    first_order: dict[Any, Shadow]  # arrays of the run, by key
    _infos: dict[Any, ContainerInfo]

    def begin(self, energy: Any, columns: int) -> None:
        """Before the run: what is to be differentiated, and by how many numbers."""
        self.energy, self.gradient_columns = energy, columns
        self.first_order, self._infos = {}, {}

    def gradient(self) -> np.ndarray | None:
        """The gradient after the run; None where the energy depends on no parameter."""
        held = self.first_order.get(GRADIENT)
        return None if held is None else held.to_numpy().reshape(-1)

    def info(self, key: Any) -> ContainerInfo:
        return self._infos[key] if key[0] == "gradient" else super().info(key)

    def _complete(self, launch: Launch, outer: dict[Any, Any]) -> None:
        super()._complete(launch, outer)
        names = {key: local for local, key in outer.items()}
        launch.energy, launch.energy_columns = names.get(self.energy, self.energy), self.gradient_columns

    def _accept(self, fused: Fused, outer: dict[Any, Any]) -> None:
        self._infos = {array.info.key: array.info for array in fused.first_order}
        super()._accept(fused, outer)

    def _stream(self, fused: Fused, name: Any) -> Any:
        found = next((array for array in fused.first_order if array.name == name), None)
        return super()._stream(fused, name) if found is None else self._first_order(found)

    def _first_order(self, array: FirstOrder) -> Any:
        info = array.info
        made = Shadow(info.name, info.size // array.columns, array.columns, info.dtype)
        for column, rows in array.seeds:
            made.set_identity(column, rows)
        self.first_order[info.key] = made
        return made.array


class SparseSecondOrderSession(SecondOrderSession, SparseSession):
    """The tangents of one run, of the second order, whose Jacobian is sparse."""

    def number(self, sizes: dict[Any, int], in_rows: set[Any], composed: dict[Any, int]) -> None:
        super().number(sizes, in_rows, composed)
        self.gradient_columns = sum(sizes.values())  # of whole fields, also where a component is the parameter

    def is_symmetric(self) -> bool:
        """Whether the entries are those of a symmetric matrix, to the last bit."""
        return self.launched is not None and bool(self.launched.sites) and Streams.of(self.launched).is_symmetric
