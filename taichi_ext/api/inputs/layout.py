"""The parameters and outputs of one call: their keys, shapes and columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.api.inputs.arguments import KernelCall, Target
from taichi_ext.errors import InvalidArgumentError
from taichi_ext.launches import FieldKey, NumberArgument, PipelineArgument, container_key, rows_of
from taichi_ext.program.keys import RETURN, Key
from taichi_ext.record.variables import Variable
from taichi_ext.runtime.launching.tangents import Seed
from taichi_ext.runtime.memory.array_tangents import Given
from taichi_ext.runtime.memory.shadows import FieldTable, array_info, numpy_dtype, view_of
from taichi_ext.runtime.python.passed_arguments import NumberSeeds
from taichi_ext.runtime.sparse.matrices import scipy_sparse


@dataclass(frozen=True)
class Placed:
    """A parameter or output of one call.

    Attributes:
        target: the parameter or output that the user has named.
        key: of the field, component, array or number.
        shape: that of its elements included.
        dtype: Taichi's.
        rows: the number of entries of its container.
        inner: which of these belong to it.
        element: the count of numbers in an element.
        first: the first column of a parameter.
    """

    target: Target
    key: Key
    shape: tuple[int, ...]
    dtype: Any = None
    rows: int = 0
    inner: slice = field(default_factory=lambda: slice(None))
    element: int = 1
    first: int = 0

    @property
    def size(self) -> int:
        """How many entries it has."""
        return math.prod(self.shape)

    @property
    def container(self) -> Key:
        """The key of its container."""
        return container_key(self.key)

    @property
    def result_dtype(self) -> np.dtype:
        """NumPy's type of the tangents of an output."""
        return numpy_dtype(self.dtype)


@dataclass(frozen=True)
class Layout:
    """All parameters and outputs, in the order in which the user has named them.

    Attributes:
        params: the parameters; their columns follow each other.
        outputs: the outputs.
        arrays: the arrays among both.
        count: the number of columns of J.
        passed: the first columns of numbers that a pipeline takes, by position.
    """

    params: tuple[Placed, ...]
    outputs: tuple[Placed, ...]
    arrays: tuple[Given, ...]
    count: int
    passed: dict[int, int]

    @property
    def seeds(self) -> tuple[Seed, ...]:
        """The fields and arrays that are parameters."""
        held = (p for p in self.params if p.target.kind in ("field", "array", "argument"))
        return tuple(Seed(p.key, p.target.name, p.first, p.size) for p in held if not _is_number(p.key))

    def numbers(self, directions: np.ndarray | None) -> NumberSeeds:
        """The numbers that are parameters; with directions they have rows in place of columns."""
        arguments: dict[str, int] = {}
        constants: list[tuple[Variable, int]] = []
        rows: list[np.ndarray] = []
        count = 0
        passed = [p for p in self.params if isinstance(p.key, NumberArgument)]
        for p in (*passed, *(p for p in self.params if p.target.variable is not None)):
            is_argument = p.target.variable is None
            first = p.first
            if directions is not None:
                first, count = count, count + p.size
                rows.append(directions[p.first : p.first + p.size])
            if is_argument:
                arguments[p.target.argument] = first
            elif p.target.variable is not None:
                constants.append((p.target.variable, first))
        return NumberSeeds(arguments, tuple(constants), np.concatenate(rows) if rows else None)


def _is_number(key: Key) -> bool:
    return isinstance(key, (NumberArgument, PipelineArgument))


def lay_out(call: KernelCall, fields: FieldTable, params: Sequence[Target], outputs: Sequence[Target]) -> Layout:
    """Find the keys and shapes of params and outputs, and give every parameter its columns.

    Raises:
        InvalidArgumentError: a parameter is given twice, or is a part of another one; or an output cannot be written.
    """
    arrays: list[Given] = []
    placed: list[Placed] = []
    total = 0
    for target in params:
        param = _placed(call, fields, target, arrays, total)
        _check_other(param, placed)
        placed.append(param)
        total += param.size
    found = [_output(call, fields, target, arrays) for target in outputs]
    passed = {p.target.position: p.first for p in placed if isinstance(p.key, PipelineArgument)}
    return Layout(tuple(placed), tuple(found), tuple(arrays), total, passed)


def _placed(call: KernelCall, fields: FieldTable, target: Target, arrays: list[Given], first: int = 0) -> Placed:
    if target.variable is not None:
        return Placed(target, target.variable.key, target.shape, rows=math.prod(target.shape), first=first)
    if call.is_value(target):
        kind, shape = NumberArgument if call.kernel else PipelineArgument, call.value_shape(target)
        return Placed(target, kind(target.argument), shape, rows=math.prod(shape), first=first)
    if target.kind == "field":
        info = fields.part(target.field)
        assert isinstance(info.key, FieldKey)
        whole, element = fields.infos[info.key.whole], math.prod(info.element_shape)
        shape = (*info.shape, *info.element_shape)
        return Placed(target, info.key, shape, info.dtype, whole.size, rows_of(info.key, whole), element, first)
    value, annotation = call.value(target), call.annotation(target)
    key = view_of(value)
    info = array_info(key, target.name, value, backend.array_element_shape(value, annotation))
    if info is None:
        raise InvalidArgumentError(f"{target.name} has integer elements; only real numbers have a derivative.")
    arrays.append(Given(target.name, key, value, info))
    element = math.prod(info.element_shape)
    return Placed(target, key, key.shape, info.dtype, key.size, slice(None), element, first)


def _output(call: KernelCall, fields: FieldTable, target: Target, arrays: list[Given]) -> Placed:
    if target.kind == "return":
        shape = call.return_shape()
        return Placed(target, RETURN, shape, call.return_dtype(), math.prod(shape))
    if call.is_value(target):
        raise InvalidArgumentError(f"{target.name} is passed by value and cannot be written by the kernel.")
    host = None if target.kind == "field" else backend.host_values(call.value(target))
    if host is not None and not host.flags.writeable:
        raise InvalidArgumentError(f"{target.name} is read-only; give an array that can be written.")
    return _placed(call, fields, target, arrays)


def _check_other(param: Placed, others: list[Placed]) -> None:
    """Raise for a parameter that is given twice, and for a field given together with one of its components."""
    for other in others:
        if other.key == param.key:
            raise InvalidArgumentError(f"{param.target.name} is given twice among params.")
        if param.container == other.container and param.container in (param.key, other.key):
            raise InvalidArgumentError(
                f"{other.target.name} and {param.target.name} share a part of their memory; name the whole field, or "
                "each component once."
            )


def joined(blocks: Sequence[Sequence[Any]], layout: Layout) -> Any:
    """The blocks of J, one for each pair of output and parameter, as one matrix: an array or CSR."""
    is_single = len(blocks) == len(blocks[0]) == 1
    if not isinstance(blocks[0][0], np.ndarray):
        return blocks[0][0] if is_single else scipy_sparse().block_array(blocks, format="csr")
    parts = [
        [np.reshape(block, (o.size, p.size)) for block, p in zip(row, layout.params, strict=True)]
        for row, o in zip(blocks, layout.outputs, strict=True)
    ]
    return parts[0][0] if is_single else np.block(parts)


def by_parameter(values: np.ndarray, shape: tuple[int, ...], layout: Layout) -> list[np.ndarray]:
    """The Jacobian of one output, split by parameter."""
    full = values.reshape((*shape, values.shape[1]))
    return [full[..., p.first : p.first + p.size].reshape((*shape, *p.shape)) for p in layout.params]
