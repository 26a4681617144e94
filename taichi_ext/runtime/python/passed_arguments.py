"""The arguments of a launch that depend on parameters: numbers with tangents are taken out and passed as rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.errors import UnsupportedError
from taichi_ext.launches import NumberColumns
from taichi_ext.record.variables import Variable, number_shape
from taichi_ext.runtime.memory.shadows import Shadow, TangentColumns
from taichi_ext.runtime.python.dual_numbers import DualNumber, PipelineRun, is_dual, plain_number, warn_of_old_number


@dataclass(frozen=True)
class NumberSeeds:
    """The numbers that depend on parameters where a kernel is launched.

    Attributes:
        arguments: leaf arguments by name, each with its first column, or row of ``tangents``.
        constants: Python numbers that kernels read, each with its first column or row.
        tangents: a row for each entry, if these are not columns of J.
    """

    arguments: dict[str, int] = field(default_factory=dict)
    constants: tuple[tuple[Variable, int], ...] = ()
    tangents: np.ndarray | None = None

    @property
    def key(self) -> Any:
        """Equal for launches that can use the same kernel."""
        rows = None if self.tangents is None else len(self.tangents)
        return tuple(self.arguments.items()), tuple(first for _, first in self.constants), rows

    @property
    def columns(self) -> NumberColumns:
        """The columns of the numbers, for a launch."""
        shadow = None if self.tangents is None else (backend.default_type(float), len(self.tangents))
        return NumberColumns(self.arguments, self.constants, shadow)

    def shadow(self, columns: int) -> Shadow:
        """The rows in memory, as kernels take them."""
        assert self.tangents is not None
        made = Shadow("the numbers", len(self.tangents), columns, backend.default_type(float))
        made.set_rows(slice(None), self.tangents)
        return made

    def with_passed(self, passed: dict[str, list[Any]], columns: TangentColumns) -> NumberSeeds:
        """The numbers of a launch with ``passed``, dual or plain ones, by the names of its leaf arguments."""
        if not passed:
            return self
        starts: dict[str, Any] = {name: getattr(entries[0], "column", None) for name, entries in passed.items()}
        if (
            not columns.has_directions
            and self.tangents is None
            and all(
                is_dual(n) and first is not None and n.column == first + place
                for first, entries in zip(starts.values(), passed.values(), strict=True)
                for place, n in enumerate(entries)
            )
        ):
            return NumberSeeds(starts, self.constants)  # the parameters themselves
        constants, rows = self.constants, [] if self.tangents is None else [self.tangents]
        count = columns.first + sum(map(len, rows))  # rows are numbered like the columns of the block
        if self.tangents is None:
            constants = ()
            for variable, column in self.constants:
                rows.append(columns.rows_of(column, math.prod(number_shape(variable.read()) or ())))
                constants += ((variable, count),)
                count += len(rows[-1])
        arguments: dict[str, int] = {}
        zero = np.zeros(columns.count)
        for name, entries in passed.items():
            arguments[name] = count
            rows.append(np.array([n.tangent if is_dual(n) else zero for n in entries]).reshape(len(entries), -1))
            count += len(entries)
        return NumberSeeds(arguments, constants, np.concatenate(rows))


def taken_out(
    kernel: backend.Kernel, args: tuple[Any, ...], run: PipelineRun | None
) -> tuple[tuple[object, ...], tuple[object, ...], dict[str, list[Any]]]:
    """The arguments of a launch as plain values, and its leaf arguments; entries of these with tangents, by name."""
    values = backend.leaf_values(kernel, args)
    found = tuple(map(entries_of, values))
    if not any(is_dual(n) for entries in found for n in entries):
        return args, values, {}
    plain: list[Any] = []
    tangents: dict[str, list[Any]] = {}
    for leaf, value, entries in zip(backend.leaf_arguments(kernel), values, found, strict=True):
        own = [n if is_dual(n) and n.run is run else plain_number(n) for n in entries]
        if any(is_dual(n) and n.run.is_over for n in entries):
            warn_of_old_number()
        duals = [n for n in own if is_dual(n)]
        if run is not None and duals and _can_carry(kernel, leaf, duals):
            run.passed.update(*(n.names for n in duals))
            tangents[leaf.name] = own
        numbers = np.array([float(plain_number(n)) for n in entries]) if any(map(is_dual, entries)) else None
        plain.append(value if numbers is None else _like(value, numbers))
    return backend.with_leaf_values(kernel, tuple(plain)), tuple(plain), tangents


def _can_carry(kernel: backend.Kernel, leaf: Any, duals: list[DualNumber]) -> bool:
    """Whether a kernel takes numbers with tangents as an argument that carries them.

    Raises:
        UnsupportedError: it does not, and they are computed from arguments of the pipeline that are parameters.
    """
    kind = leaf.annotation
    if backend.is_template(kind):
        problem = f"the template {leaf.name!r}, which is compiled into the kernel. Give the argument a type, as ti.f32"
    elif backend.is_scalar_type(kind) and backend.is_integer(backend.cook_dtype(kind)):
        problem = f"the integer {leaf.name!r}; whole numbers have no derivative. Leave it out of params"
    else:
        return True
    names = sorted(frozenset[str]().union(*(n.names for n in duals)))
    if names and not backend.is_library_kernel(kernel):
        raise UnsupportedError(
            f"{', '.join(map(repr, names))} is a parameter, and is passed to {backend.short_name(kernel)} as {problem}."
        )
    return False


def entries_of(value: object) -> list[Any]:
    """The numbers of a vector, matrix or sequence of numbers; anything else as it is."""
    if isinstance(value, backend.Matrix) and not value.is_host_access:
        return list(np.asarray(value.entries, object).flat)
    if isinstance(value, (list, tuple)):
        return [entry for part in value for entry in entries_of(part)]
    return [value]


def _like(value: object, numbers: np.ndarray) -> object:
    """A number, vector, matrix or list of numbers of the shape of another."""
    if is_dual(value):
        return float(numbers[0])
    shape = np.shape(value.entries if isinstance(value, backend.Matrix) else np.array(value, object))
    return backend.Matrix(numbers.reshape(shape).tolist())
