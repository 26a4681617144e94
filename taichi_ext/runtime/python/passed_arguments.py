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
from taichi_ext.runtime.memory.shadows import Shadow
from taichi_ext.runtime.python.passed_numbers import PipelineRun, Tangent, is_passed, plain_number, quoted


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

    def with_passed(
        self, passed: dict[str, list[Tangent]], directions: np.ndarray | None, first: int, columns: int
    ) -> NumberSeeds:
        """The numbers of a launch with ``passed`` tangents, by the names of its leaf arguments.

        The run computes the columns from the first on, or the products with directions.
        """
        if not passed:
            return self
        starts = {name: next(iter(entries[0]), 0) for name, entries in passed.items()}
        if (
            directions is None
            and self.tangents is None
            and all(
                entry == {starts[name] + n: 1.0} for name, entries in passed.items() for n, entry in enumerate(entries)
            )
        ):
            return NumberSeeds(starts, self.constants)  # the parameters themselves
        rows: list[Tangent] = []
        constants, given = self.constants, self.tangents
        if given is None:
            given, at = np.zeros((0, columns)), self.constants
            constants = ()
            for variable, column in at:
                constants += ((variable, first + len(rows)),)
                rows += [{column + n: 1.0} for n in range(math.prod(number_shape(variable.read()) or ()))]
        arguments: dict[str, int] = {}
        for name, entries in passed.items():
            arguments[name] = first + len(given) + len(rows)
            rows += entries
        return NumberSeeds(arguments, constants, np.concatenate([given, _matrix(rows, directions, first, columns)]))


def _matrix(rows: list[Tangent], directions: np.ndarray | None, first: int, columns: int) -> np.ndarray:
    """Tangents as rows: the columns of J from the first on, or the products with directions."""
    made = np.zeros((len(rows), columns))
    for row, tangent in zip(made, rows, strict=True):
        for column, coefficient in tangent.items():
            if directions is not None:
                row += coefficient * directions[column]
            elif first <= column < first + columns:
                row[column - first] += coefficient
    return made


def taken_out(
    kernel: backend.Kernel, args: tuple[Any, ...], run: PipelineRun | None
) -> tuple[tuple[object, ...], tuple[object, ...], dict[str, list[Tangent]]]:
    """The arguments of a launch as plain values, and its leaf arguments; the tangents of entries of these, by name."""
    values = backend.leaf_values(kernel, args)
    found = tuple(map(_entries, values)) if run is not None else ()
    if run is None or not any(is_passed(n) for entries in found for n in entries):
        return args, values, {}
    convert = float if backend.is_library_kernel(kernel) else plain_number  # a store from Python warns
    plain: list[Any] = []
    tangents: dict[str, list[Tangent]] = {}
    for leaf, value, entries in zip(backend.leaf_arguments(kernel), values, found, strict=True):
        own = [n if is_passed(n) and n.run is run else None for n in entries]
        names = frozenset().union(*(n.names for n in own if n is not None))
        if names and convert is not float:
            _check_passed(kernel, leaf, names)
            run.passed |= names
            tangents[leaf.name] = [{} if n is None else n.tangent for n in own]
        numbers = np.array([float(convert(n)) for n in entries]) if any(map(is_passed, entries)) else None
        plain.append(value if numbers is None else _like(value, numbers))
    return backend.with_leaf_values(kernel, tuple(plain)), tuple(plain), tangents


def _check_passed(kernel: backend.Kernel, leaf: Any, names: frozenset[str]) -> None:
    """Raise if a kernel takes numbers with tangents as an argument that cannot carry them."""
    kind = leaf.annotation
    if backend.is_template(kind):
        problem = f"the template {leaf.name!r}, which is compiled into the kernel. Give the argument a type, as ti.f32"
    elif backend.is_array_annotation(kind):
        problem = f"a part of the array {leaf.name!r}. Pass numbers or vectors, and compute in the kernel"
    elif backend.is_scalar_type(kind) and backend.is_integer(backend.cook_dtype(kind)):
        problem = f"the integer {leaf.name!r}; whole numbers have no derivative. Leave it out of params"
    else:
        return
    raise UnsupportedError(
        f"{quoted(names)} is a parameter, and is passed to {backend.short_name(kernel)} as {problem}."
    )


def _entries(value: object) -> list[Any]:
    if isinstance(value, backend.Matrix) and not value.is_host_access:
        return list(np.asarray(value.entries, object).flat)
    if isinstance(value, (list, tuple)):
        return [entry for part in value for entry in _entries(part)]
    return list(value.flat) if isinstance(value, np.ndarray) and value.dtype == object else [value]


def _like(value: object, numbers: np.ndarray) -> object:
    """A number, array, vector, matrix or list of numbers of the shape of another."""
    if is_passed(value):
        return float(numbers[0])
    if isinstance(value, np.ndarray):
        return numbers.reshape(value.shape)
    shape = np.shape(value.entries if isinstance(value, backend.Matrix) else np.array(value, object))
    return backend.Matrix(numbers.reshape(shape).tolist())
