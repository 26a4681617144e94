"""Tangents of the first order in a run that gives second derivatives; among them the gradient of the energy.

They have a column for each entry of the parameters, and carry tangents themselves, like containers, under the key
``GradientKey(container)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from taichi_ext.errors import UnsupportedError
from taichi_ext.launches import (
    GRADIENT,
    TERMS_GRADIENT,
    EnergyTarget,
    FirstOrder,
    FirstOrderArray,
    GradientKey,
    JacobianKernel,
    LaunchRole,
)
from taichi_ext.program.keys import Key, Scratch, Whole
from taichi_ext.runtime.memory.array_tangents import ArrayTangents
from taichi_ext.runtime.memory.regions import View
from taichi_ext.runtime.memory.shadows import FieldTangents, Shadow


class FirstOrderTangents:
    """The tangents of the first order by container; there are none if ``energy`` is None.

    Args:
        energy: the energy to differentiate twice, by the keys of the run.
        fields: the tangents of fields, and of those of the first order.
    """

    def __init__(self, energy: EnergyTarget | None, fields: FieldTangents, arrays: ArrayTangents) -> None:
        self._energy = energy
        self._fields = fields
        self._arrays = arrays
        self._shadows: dict[GradientKey, Shadow] = {}
        self._outer: Mapping[Key, Key] = {}  # the keys of the run by those of the launch
        self._before: dict[GradientKey, np.ndarray] = {}  # their values before the launch

    def gradient(self) -> np.ndarray | None:
        """The gradient; None if the energy depends on no parameter."""
        held = [self._shadows[key].to_numpy().reshape(-1) for key in (GRADIENT, TERMS_GRADIENT) if key in self._shadows]
        return sum(held[1:], held[0]) if held else None

    def containers(self) -> list[Key]:
        found = (key.of for key in self._shadows if not isinstance(key.of, (Scratch, Whole)))
        return [self._energy.key if of == GRADIENT.of and self._energy else of for of in found]

    def has(self, container: Key) -> bool:
        return bool(self._shadows) and self._key(container) in self._shadows

    def _key(self, container: Key) -> GradientKey:
        return GRADIENT if self._energy is not None and container == self._energy.key else GradientKey(container)

    def outer_key(self, key: Any) -> Any:
        """The key in the run for a gradient key of a launch; other keys are unchanged."""
        return GradientKey(self._outer.get(key.of, key.of)) if isinstance(key, GradientKey) else key

    # --- launches

    def roles(self, names: Mapping[Key, Key]) -> dict[Key, LaunchRole]:
        """The roles of the first-order tangents; ``names`` are the keys of a launch by those of the run."""
        if self._energy is None:
            return {}
        kept = (k for k in self._fields.shadows if isinstance(k, GradientKey) and not isinstance(k.of, Scratch))
        return {GradientKey(names.get(k.of, k.of)): self._fields.carriers[k].role(k) for k in kept}

    def carried(self, names: Mapping[Key, Key]) -> frozenset[Key]:
        """The containers that have tangents of the first order, by the keys of a launch."""
        if not self._shadows:
            return frozenset()
        return frozenset(names.get(c, c) for c in self.containers() if not isinstance(c, View) or c in names)

    def target(self, names: Mapping[Key, Key]) -> EnergyTarget | None:
        """The energy by the keys of a launch.

        Raises:
            UnsupportedError: arrays share a part of their memory, and one of them has tangents of the first order.
        """
        if self._energy is None:
            return None
        known = self._views(self._energy)
        for view in (key for key in names if isinstance(key, View)):
            is_own = self._arrays.region(view).role(view).first_column is not None
            if not is_own and any(view != other and view.overlaps(other) for other in known):
                raise UnsupportedError(
                    "Two arrays share a part of their memory, and one of them depends on params. Second derivatives "
                    "need arrays of their own: pass copies, or one array that holds both."
                )
        key, starts = self._energy.key, self._energy.starts
        starts = {names.get(key, key): first for key, first in starts.items()}
        return replace(self._energy, key=names.get(key, key), starts=starts, carried=self.carried(names))

    def _views(self, energy: EnergyTarget) -> set[View]:
        """The arrays that have tangents of the first order, or are parameters."""
        return {key for key in (*self.containers(), *energy.starts) if isinstance(key, View)}

    def accept(self, fused: JacobianKernel, outer: Mapping[Key, Key]) -> None:
        """Prepare for a launch; tangents of scratch memory are new in each launch."""
        self._outer = outer
        self._before.clear()
        for array in fused.first_order:
            key = self.outer_key(array.info.key)
            if array.is_scratch or key not in self._fields.carriers:
                self._fields.add(key, array.info)
            if array.is_scratch:
                self._shadows.pop(key, None)

    def array(self, fused: JacobianKernel, name: FirstOrderArray, *, may_run_again: bool) -> Any:
        """An array for a launch; if a kernel runs again, with its values before the first run."""
        (array,) = (array for array in fused.first_order if array.name == name)
        key = self.outer_key(array.info.key)
        shadow = self._shadows.get(key)
        if shadow is None:
            shadow = self._shadows[key] = _made(array)
        if key in self._before:
            shadow.set_rows(slice(None), self._before[key])
        elif may_run_again:
            self._before[key] = shadow.to_numpy().copy()
        return shadow.array

    def note_written(self, fused: JacobianKernel) -> bool:
        """Note that a kernel has written to its first-order arrays; whether some of them were zero before."""
        written = [self._shadows[self.outer_key(array.info.key)] for array in fused.first_order]
        is_new = any(first.is_fresh for first in written)
        for first in written:
            first.is_fresh = False
        return is_new

    # --- stores from Python

    def clear(self, key: Key, rows: Any) -> None:
        """Make entries of a container constants from now on; for an array, ``rows`` are those of its region."""
        if self._energy is None:
            return
        if not isinstance(key, View):
            self._clear(key, rows, self._energy)
            return
        marks = np.zeros(key.size, bool)
        marks[rows] = True
        for view in self._views(self._energy):
            if view.overlaps(key):
                self._clear(view, np.flatnonzero(marks[self._arrays.region(view).rows(view)]), self._energy)

    def _clear(self, container: Key, rows: Any, energy: EnergyTarget) -> None:
        key = self._key(container)
        first = self._shadows.get(key)
        if first is None:
            if container not in energy.starts:
                return
            info = self._arrays.infos[container] if isinstance(container, View) else self._fields.carrier(container)
            first = self._shadows[key] = Shadow(info.name, info.size, energy.columns, info.dtype)
            first.set_identity(energy.starts[container])
        first.is_fresh = False
        first.clear_rows(rows)
        carrier = self._fields.carriers.get(key)
        if carrier is not None and carrier.is_active:
            size, width = first.shape
            entries = np.arange(size * width)
            entries = entries.reshape(width, size).T if first.by_column else entries.reshape(size, width)
            carrier.shadow.clear_rows(entries[rows].reshape(-1))


def _made(array: FirstOrder) -> Shadow:
    info = array.info
    made = Shadow(info.name, info.size // array.columns, array.columns, info.dtype)
    if array.first_column is not None:
        made.set_identity(array.first_column)
    return made
