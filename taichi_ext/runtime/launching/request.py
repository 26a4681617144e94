"""The request of one run and its limits; complete before the run begins."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from taichi_ext.labels import Label
from taichi_ext.launches import ColumnBlock, EnergyTarget
from taichi_ext.program.keys import Key
from taichi_ext.runtime.memory.array_tangents import Given
from taichi_ext.runtime.memory.state import State
from taichi_ext.runtime.python.passed_arguments import NumberSeeds
from taichi_ext.runtime.python.run_record import RunRecord


@dataclass(frozen=True)
class Seed:
    """A field or array that is a parameter: its entries are the columns from ``first`` on."""

    key: Key
    name: Label | str
    first: int
    size: int


@dataclass(frozen=True)
class Output:
    """A container that is an output: its number of entries, and memory for its J if that was given."""

    key: Key
    name: Label | str
    rows: int
    dtype: Any
    place: np.ndarray | None = None


@dataclass(frozen=True)
class Restart:
    """How a run can be undone, and compared with earlier runs.

    Attributes:
        state: saves the containers that the run changes.
        record: the launches and stores of a pipeline, if its columns take several runs.
        is_repeated: whether the state is restored and the run repeated afterwards.
        trace: takes the numbers that Python passes on, for a comparison with a run with other params (``Trace``).
    """

    state: State | None = None
    record: RunRecord | None = None
    is_repeated: bool = False
    trace: Any = None


@dataclass(frozen=True, kw_only=True)
class Request:
    """One run of a kernel or pipeline.

    Attributes:
        block: the columns.
        seeds: the fields and arrays that are parameters.
        arrays: the arrays among the parameters and outputs.
        outputs: the containers whose tangents are wanted.
        directions: the tangents of the parameters, a row for each entry, if they are not the columns of J.
        numbers: arguments and Python numbers that are parameters.
        wants_return: whether the returned value is an output.
        max_memory: bytes for tangents other than J.
        strategy: how tangents of locals are stored.
        watch: observer of the values that kernels compute.
        restart: see ``Restart``.
        energy: the energy to differentiate twice, by the keys of this run.
    """

    block: ColumnBlock
    seeds: tuple[Seed, ...]
    arrays: tuple[Given, ...]
    outputs: tuple[Output, ...]
    directions: np.ndarray | None = None
    numbers: NumberSeeds = field(default_factory=NumberSeeds)
    wants_return: bool = False
    max_memory: float = math.inf
    strategy: str = "auto"
    watch: Any = None
    restart: Restart = field(default_factory=Restart)
    energy: EnergyTarget | None = None

    @property
    def params(self) -> dict[Key, Label | str]:
        """The names of the fields and arrays that have columns in this run."""
        if self.directions is not None:
            return {}
        start, end = self.block.first, self.block.first + self.block.count
        return {s.key: s.name for s in self.seeds if s.first < end and s.first + s.size > start}
