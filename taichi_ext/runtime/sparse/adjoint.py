"""Products with the transpose of a sparse J: cotangents go backwards through the entries of each launch.

The entries of each stage are kept without composing them, so J itself is never formed. In the end they are visited in
reverse order; each container has one adjoint for each number of stages that have written to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from taichi_ext.program.keys import Key, SumKey, Version
from taichi_ext.runtime.sparse.matrices import Arithmetic, Matrix
from taichi_ext.runtime.sparse.rows import IDENTITY, SparseRows
from taichi_ext.runtime.sparse.streams import StageBlocks

Adjoints = dict[Key, np.ndarray]


@dataclass(frozen=True)
class _Written:
    """The matrices that one stage writes to one container, by the owner of their columns: a parameter or a version."""

    key: Key
    stored: np.ndarray
    matrices: list[tuple[Any, Any]]


class AdjointRows(SparseRows):
    """The matrices written so far, launch by launch; inherited blocks only record which containers carry tangents."""

    def __init__(self, sizes: dict[Key, int], arithmetic: Arithmetic) -> None:
        super().__init__(sizes, arithmetic)
        self._events: list[Callable[[Adjoints, Adjoints], None]] = []
        self.adjoints: Adjoints = {}  # after ``times``: adjoints of written containers, after the last launch first

    def replace(self, key: Key, blocks: dict[Key, Any]) -> None:
        """Turn rows of tangents into sparse ones."""
        self._blocks[key] = {key: IDENTITY}

        def back(adjoints: Adjoints, gradient: Adjoints) -> None:
            adjoint = adjoints.pop(key, None)
            for param, block in blocks.items() if adjoint is not None else ():
                _add(gradient, param, block.T @ adjoint)

        self._events.append(back)

    def clear(self, key: Key, rows: object) -> None:
        """Note that Python has stored constants to some entries."""

        def back(adjoints: Adjoints, gradient: Adjoints) -> None:
            if key in adjoints:
                adjoints[key] = _without(adjoints[key], rows)

        self._events.append(back)

    def compose(self, stages: Iterable[list[StageBlocks]], outer: Callable[[Key], Key]) -> None:
        launch = [[self._written(w, outer) for w in stage] for stage in stages]
        self._events.append(lambda adjoints, gradient: _back(launch, adjoints, gradient, self.adjoints))

    def _written(self, written: StageBlocks, outer: Callable[[Key], Key]) -> _Written:
        key = outer(written.key)
        matrices = []
        for owner, (block, data) in written.blocks.items():
            source = Version(outer(owner.of), owner.number) if isinstance(owner, Version) else outer(owner)
            own = data.copy() if block.is_lent else data  # used after the last launch
            matrices.append((source, Matrix(block.pattern, own).view()))
        if matrices and not isinstance(key, SumKey):
            self._blocks[key] = {key: IDENTITY}
        return _Written(key, written.stored, matrices)

    def times(self, cotangents: Adjoints) -> Adjoints:
        """The product of the transpose of J with cotangents: for each parameter a matrix with a row for each entry."""
        adjoints, gradient = dict(cotangents), {}
        for back in reversed(self._events):
            back(adjoints, gradient)
        for key, adjoint in adjoints.items():
            _add(gradient, key, adjoint)
        return gradient


def _back(launch: list[list[_Written]], adjoints: Adjoints, gradient: Adjoints, of_written: Adjoints) -> None:
    """The adjoints before a launch, from those after it; those of parameters are added to the gradient."""
    now: dict[Key, int] = {}  # the number of stages so far that have written to a container
    for stage in launch:
        for written in stage:
            now[written.key] = now.get(written.key, 0) + 1
    versions = {Version(key, count): adjoints.pop(key) for key, count in now.items() if key in adjoints}
    for stage in reversed(launch):
        for written in stage:
            adjoint = versions.pop(Version(written.key, now[written.key]), None)
            now[written.key] -= 1
            if adjoint is None:
                continue
            of_written.setdefault(written.key, adjoint)
            _add(versions, Version(written.key, now[written.key]), _without(adjoint, written.stored))
            for source, matrix in written.matrices:
                _add(versions if isinstance(source, Version) else gradient, source, matrix.T @ adjoint)
    for version, adjoint in versions.items():
        if not isinstance(version.of, SumKey):
            _add(adjoints, version.of, adjoint)


def _without(adjoint: np.ndarray, rows: object) -> np.ndarray:
    """The adjoint with some rows set to zero."""
    rest = adjoint.copy()
    rest[rows] = 0
    return rest


def _add(to: dict[Any, np.ndarray], key: Key, values: np.ndarray) -> None:
    to[key] = to[key] + values if key in to else values
