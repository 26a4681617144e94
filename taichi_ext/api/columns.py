"""Which columns of J belong to which parameter, and tangents that are given in place of columns."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from taichi_ext.api.arguments import KernelCall, Target
from taichi_ext.differentiate.keys import Key
from taichi_ext.errors import InvalidArgumentError
from taichi_ext.labels import Label
from taichi_ext.launches import container_key
from taichi_ext.record.variables import Variable
from taichi_ext.runtime.session import Session

Columns = list[tuple[int, tuple[int, ...]]]  # of each parameter: the first column and the shape


@dataclass
class Parameters:
    """Which columns belong to which parameter: by key, and for each the first one and the shape."""

    columns: Columns = field(default_factory=list)
    seeds: dict[Key, int] = field(default_factory=dict)  # fields and arrays
    names: dict[Key, Label | str] = field(default_factory=dict)  # of them
    arguments: dict[str, int] = field(default_factory=dict)
    constants: dict[Key, tuple[Variable, int]] = field(default_factory=dict)
    passed: dict[int, int] = field(default_factory=dict)  # numbers that a pipeline takes, by their positions
    tangents: np.ndarray | None = None  # of arguments and constants, which then have rows in place of columns

    def names_within(self, first: int, count: int) -> dict[Key, Label | str]:
        """The names of the fields and arrays that have some of the ``count`` columns from ``first`` on."""
        ends = {at: at + math.prod(shape) for at, shape in self.columns}
        return {k: self.names[k] for k, at in self.seeds.items() if at < first + count and ends[at] > first}


def lay_out(
    call: KernelCall, targets: list[Target], container: Callable[[Target], tuple[Any, tuple[int, ...]]]
) -> Parameters:
    """Give every parameter its columns; ``container`` gives the key and shape of a field or array."""
    found, total = Parameters(), 0
    for target in targets:
        group: dict[Any, Any]
        place: Any = total
        if target.variable is not None:
            group, key, shape = found.constants, target.variable.key, target.shape
            place = (target.variable, total)
        elif call.is_value(target):
            group, key = (found.arguments, target.argument) if call.kernel else (found.passed, target.position)
            shape = call.value_shape(target)
        else:
            group = found.seeds
            key, shape = container(target)
            _refuse_part(key, target, found)
            found.names[key] = target.name
        if key in group:
            raise InvalidArgumentError(f"{target.name} is given twice among params.")
        group[key] = place
        found.columns.append((total, shape))
        total += math.prod(shape)
    return found


def _refuse_part(key: Key, target: Target, found: Parameters) -> None:
    """Raise for a component of a field among the parameters, and for a field a component of which is among them."""
    for other in found.seeds:
        container = container_key(key)
        if other != key and container_key(other) == container and container in (key, other):
            raise InvalidArgumentError(
                f"{found.names[other]} and {target.name} share a part of their memory; name the whole field, or each "
                "component once."
            )


def direct(session: Session, parameters: Parameters, directions: np.ndarray) -> None:
    """Let the tangents of the parameters be ``directions`` from the session's first column on: a row for each entry."""
    first, session.first_column = session.first_column, 0
    session.directions = directions[:, first : first + session.columns]
    sizes = {at: math.prod(shape) for at, shape in parameters.columns}
    rows: list[np.ndarray] = []
    count = 0
    for name, at in parameters.arguments.items():
        parameters.arguments[name] = count
        rows.append(session.directions[at : at + sizes[at]])
        count += sizes[at]
    for key, (variable, at) in parameters.constants.items():
        parameters.constants[key] = (variable, count)
        rows.append(session.directions[at : at + sizes[at]])
        count += sizes[at]
    parameters.tangents = np.concatenate(rows) if rows else None


def by_parameter(values: np.ndarray, shape: tuple[int, ...], columns: Columns) -> list[np.ndarray]:
    """The Jacobian of one output, cut into its parameters."""
    full = values.reshape((*shape, values.shape[1]))
    return [full[..., first : first + math.prod(s)].reshape((*shape, *s)) for first, s in columns]
