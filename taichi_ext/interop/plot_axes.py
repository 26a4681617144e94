"""Which axes of a block of J belong to its output and which to its parameter, and how users call their entries."""

# Arrays are of any shape and type here, which pyright takes for unknown.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# Input is checked, whatever its annotation says.
# pyright: reportUnnecessaryIsInstance=false
# The parts of a Jacobian are private to the package, not to its module.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.api.inputs.arguments import KernelCall, Target, flatten
from taichi_ext.api.plans.plan import Jacobian
from taichi_ext.errors import InvalidArgumentError, shown
from taichi_ext.labels import Labels

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Side:
    """An output or parameter: its name, the shape of its field or array (None: unknown), and that of an element."""

    name: str
    shape: Shape | None = None
    element: Shape = ()

    @property
    def full_shape(self) -> Shape:
        assert self.shape is not None
        return self.shape + self.element

    def entry(self, number: int) -> str:
        """The name of an entry, by its number in C order: ``x[1].y``."""
        index = [int(i) for i in np.unravel_index(number, self.full_shape)] if self.full_shape else []
        count = len(index) - len(self.element)
        outer = f"[{', '.join(map(str, index[:count]))}]" if count else ""
        return f"{self.name}{outer}{self.component(index[count:])}"

    def component(self, index: list[int]) -> str:
        """The suffix for the name of an element: ``.y``, ``[1, 2]``."""
        if len(index) == 1 and self.element[0] <= len("xyzw"):
            return f".{'xyzw'[index[0]]}"
        return f"[{', '.join(map(str, index))}]" if index else ""


@dataclass(frozen=True)
class Block:
    """One block of J, a matrix with a row for each entry of ``output`` and a column for each entry of ``param``.

    Attributes:
        values: the block as it is given.
        output: its output; None if it is unknown, as for an array alone, which is then drawn unchanged.
        param: its parameter; likewise.
    """

    path: str
    values: Any
    output: Side | None
    param: Side | None

    @property
    def title(self) -> str:
        return f"∂{self.output.name} / ∂{self.param.name}" if self.output and self.param else self.path or "J"

    @property
    def matrix_shape(self) -> tuple[int, int]:
        if self.output is None or self.param is None:
            shape = self.values.shape if hasattr(self.values, "shape") else np.shape(self.values)
            rows, columns = (1, 1, *shape)[-2:]
            return rows, columns
        return math.prod(self.output.full_shape), math.prod(self.param.full_shape)


def blocks_of(J: object, plan: object, params: object, outputs: object, output_axes: int | None) -> list[Block]:
    """The blocks of J with their axes; raises where they cannot be told."""
    if output_axes is not None and (not isinstance(output_axes, int) or output_axes < 0):
        raise InvalidArgumentError(f"output_axes is {shown(output_axes)}; expected a whole number of axes, or None.")
    if plan is not None and not isinstance(plan, Jacobian):
        raise InvalidArgumentError(f"plan is {shown(plan)}; expected the Jacobian(kernel, params, outputs) of J.")
    if type(J) in (bool, int, float, complex):
        raise InvalidArgumentError(f"J is {J}, a plain number; expected a result of jacobian.")
    found = flatten(J, "J")[0]
    if not found:
        raise InvalidArgumentError("J is empty; give a result of jacobian.")
    if plan is not None:
        call, prepared = plan._last_call(), plan._plan.prepared
        down, across = (
            [_side_of_target(call, call.current(t)) for t in ts] for ts in (prepared.outputs, prepared.params)
        )
    else:
        down, across = _sides_given(outputs, "outputs"), _sides_given(params, "params")
    pairs = _pairs(down, across, len(found)) if down or across else [(None, None)] * len(found)
    return [_block(path, v, o, p, output_axes) for (path, v), (o, p) in zip(found, pairs, strict=True)]


def _pairs(down: list[Side], across: list[Side], count: int) -> list[tuple[Side | None, Side | None]]:
    """The sides of each block, if those of the outputs or of the params are known."""
    across = across or _unknown("parameter", count // len(down))
    down = down or _unknown("output", count // len(across))
    if len(across) * len(down) != count:
        raise InvalidArgumentError(
            f"J has {count} blocks; {len(down)} outputs and {len(across)} params have {len(across) * len(down)}."
        )
    return [(o, p) for o in down for p in across]


def _unknown(name: str, count: int) -> list[Side]:
    """Sides of which only their number is known."""
    return [Side(f"{name} {n}") for n in range(count)] if count > 1 else [Side(name)]


def _side_of_target(call: KernelCall, target: Target) -> Side:
    if target.kind == "return":
        return Side("returned", (), call.return_shape())
    if call.is_value(target):
        return Side(target.argument, (), call.value_shape(target))
    obj = call.value(target)
    return _side_of(obj, target.argument or call.labels.name(obj) or str(target.name).split(" (")[0])


def _sides_given(tree: object, what: str) -> list[Side]:
    return [] if tree is None else [side_given(*leaf, what) for leaf in flatten(tree, what)[0]]


def side_given(path: str, leaf: object, what: str) -> Side:
    if isinstance(leaf, str):
        return Side(leaf)
    if backend.is_array(leaf) or isinstance(leaf, backend.Field):
        return _side_of(leaf, Labels().name(leaf) or f"{what}{path}")
    raise InvalidArgumentError(
        f"{what}{path} is {shown(leaf)}; expected an argument of jacobian: a field, an array or a name."
    )


def _side_of(obj: Any, name: str) -> Side:
    full = backend.full_field_shape(obj) if isinstance(obj, backend.Field) else backend.full_shape(obj)
    shape = tuple(obj.shape)
    return Side(name, shape, tuple(full)[len(shape) :])


def _block(path: str, values: Any, output: Side | None, param: Side | None, output_axes: int | None) -> Block:
    shape = tuple(values.shape) if hasattr(values, "shape") else np.shape(values)
    is_matrix = (
        hasattr(values, "tocoo") or getattr(values, "is_sparse", False) or getattr(values, "is_sparse_csr", False)
    )
    if output is None or param is None:
        if output_axes is not None:
            if output_axes > len(shape):
                raise InvalidArgumentError(f"output_axes is {output_axes}, and J{path} has shape {shape}.")
            output, param = Side(f"output{path}", shape[:output_axes]), Side("parameter", shape[output_axes:])
        elif len(shape) > 2:
            raise InvalidArgumentError(
                f"J{path} has shape {shape}, which does not say which axes belong to the output. Give plan= (the "
                "Jacobian that computed J), or params= and outputs= as jacobian takes them, or output_axes=."
            )
        return Block(path, values, output, param)
    if is_matrix:
        output = output if output.shape is not None else replace(output, shape=shape[:1])
        param = param if param.shape is not None else replace(param, shape=shape[1:])
        wanted = (math.prod(output.full_shape), math.prod(param.full_shape))
    else:
        if output.shape is None and param.shape is None:
            if output_axes is None and len(shape) > 2:
                raise InvalidArgumentError(
                    f"The names {output.name} and {param.name} do not give the shapes; use plan= or output_axes=."
                )
            count = min(1, len(shape)) if output_axes is None else output_axes
            output = replace(output, shape=shape[:count])
        if output.shape is None:
            output = replace(output, shape=shape[: max(0, len(shape) - len(param.full_shape))])
        if param.shape is None:
            param = replace(param, shape=shape[len(output.full_shape) :])
        wanted = output.full_shape + param.full_shape
    if shape != wanted:
        raise InvalidArgumentError(f"J{path} has shape {shape}; for {output.name} and {param.name} it is {wanted}.")
    return Block(path, values, output, param)
