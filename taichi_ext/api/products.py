"""``jvp`` and ``vjp``: products without forming the Jacobian."""

# Arrays are of any shape and type here, which pyright takes for unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# The parts of a Jacobian are private to the package, not to its module.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from taichi_ext import backend
from taichi_ext.api.inputs.arguments import check_not_ended, flatten
from taichi_ext.api.inputs.options import Options, checked_options
from taichi_ext.api.inputs.progress import check_progress
from taichi_ext.api.inputs.results import as_torch
from taichi_ext.api.inputs.types import AnyProduct, DenseProduct, Kernel, Leaf
from taichi_ext.api.jacobian import prepared_form
from taichi_ext.api.plans.plan import Plan
from taichi_ext.api.runs.by_adjoint import rows_by_adjoint
from taichi_ext.api.runs.evaluation import Evaluation
from taichi_ext.errors import InvalidArgumentError, unexpected, with_short_traceback

if TYPE_CHECKING:
    from typing_extensions import Unpack

BLOCK = 2**26  # bytes of J in memory during a product with its transpose; at least one column


@overload
def jvp(
    kernel: Kernel, params: object, tangents: object, outputs: Leaf | None = None, **options: Unpack[DenseProduct]
) -> np.ndarray: ...
@overload
def jvp(
    kernel: Kernel, params: object, tangents: object, outputs: object = None, **options: Unpack[AnyProduct]
) -> Any: ...
@with_short_traceback
def jvp(
    kernel: Kernel,
    params: object,
    tangents: object,
    outputs: object = None,
    *,
    args: tuple[object, ...] = (),
    max_memory: int | None = None,
    chunk_size: int | None = None,
) -> Any:
    """The product J t of the Jacobian with tangents of the parameters, without J.

    It costs one launch with one column per tangent, whatever the number of parameters.  The call has the side effects
    of one plain run of the kernel.

    Args:
        kernel, params, outputs, args, max_memory: see ``jacobian``.
        tangents: structured like ``params``; for each parameter an array of its shape and element shape, or several
            of them along a leading axis, as many for every parameter.
        chunk_size: the largest number of tangents in one run; by default all.

    Returns:
        An array for each output, of its shape, element shape and type, with the leading axis of the tangents if they
        have one; structured like ``outputs``; torch tensors if all outputs are torch tensors.

    Raises:
        InvalidArgumentError: an argument is invalid; the message names it and the fix.
        UnsupportedError: the derivative of a construct is not known.

    Example:
        >>> import numpy as np
        >>> import taichi as ti
        >>> from taichi_ext import jvp
        >>> ti.init(arch=ti.cpu, log_level=ti.ERROR)
        >>> x, y = ti.field(ti.f32, shape=3), ti.field(ti.f32, shape=3)
        >>> @ti.kernel
        ... def square():
        ...     for i in x:
        ...         y[i] = x[i] ** 2
        >>> x.from_numpy(np.array([1, 2, 3], dtype=np.float32))
        >>> jvp(square, x, np.array([1.0, 0.0, 1.0]), y)
        array([2., 0., 6.], dtype=float32)
    """
    options = checked_options(max_memory, "auto", chunk_size, None)
    plan, call = prepared_form(kernel, params, outputs, args, Options(options.max_memory), "products")
    evaluation = plan.start(call)
    given, count = matrices(tangents, params, "tangents", evaluation.parameter_shapes())
    result = directional(evaluation, np.concatenate(given).astype(np.float64), options.chunk_size)
    shapes = [shape for shape, _ in evaluation.output_shapes()]
    return in_structure(plan, evaluation, [shaped(v, s, count) for v, s in zip(result, shapes, strict=True)], "outputs")


@overload
def vjp(
    kernel: Kernel, params: Leaf, outputs: object, cotangents: object, **options: Unpack[DenseProduct]
) -> np.ndarray: ...
@overload
def vjp(kernel: Kernel, params: object, outputs: object, cotangents: object, **options: Unpack[AnyProduct]) -> Any: ...
@with_short_traceback
def vjp(
    kernel: Kernel,
    params: object,
    outputs: object,
    cotangents: object,
    *,
    args: tuple[object, ...] = (),
    max_memory: int | None = None,
    chunk_size: int | None = None,
    progress: bool | None = None,
) -> Any:
    """The product v J of cotangents of the outputs with the Jacobian, without keeping J.

    It costs a few plain runs, whatever the number of parameters: each launch runs forward once, then its adjoint goes
    back, for up to 8 cotangents at once (reverse mode).  A pipeline keeps what is overwritten and the way back needs.
    Where that is more than ``max_memory``, it keeps snapshots and computes the rest again.  Where a kernel has no
    adjoint, J is computed in blocks of columns, of 64 MiB by default.  The call has the side effects of one plain run.

    Args:
        kernel, params, args, progress: see ``jacobian``.
        outputs: see ``jacobian``; None means the kernel's return value.
        cotangents: structured like ``outputs``; for each output an array of its shape and element shape, or several of
            them along a leading axis, as many for every output.
        max_memory: bytes for what a pipeline keeps for the way back; half of the free memory by default.
        chunk_size: the largest number of columns of J in one run; if given, J is computed in blocks of columns.

    Returns:
        An array for each parameter, of its shape and element shape, with the leading axis of the cotangents if they
        have one; structured like ``params``.  The type is that of the outputs.  Torch tensors if all outputs are.

    Raises:
        InvalidArgumentError: an argument is invalid; the message names it and the fix.
        UnsupportedError: the derivative of a construct is not known.

    Example:
        >>> import numpy as np
        >>> import taichi as ti
        >>> from taichi_ext import vjp
        >>> ti.init(arch=ti.cpu, log_level=ti.ERROR)
        >>> x, y = ti.field(ti.f32, shape=3), ti.field(ti.f32, shape=3)
        >>> @ti.kernel
        ... def square():
        ...     for i in x:
        ...         y[i] = x[i] ** 2
        >>> x.from_numpy(np.array([1, 2, 3], dtype=np.float32))
        >>> vjp(square, x, y, np.array([1.0, 1.0, 0.5], np.float32))
        array([2., 4., 3.], dtype=float32)
    """
    options = checked_options(max_memory, "auto", chunk_size, None)
    check_progress(progress)
    plan, call = prepared_form(kernel, params, outputs, args, Options(options.max_memory))
    evaluation = plan.start(call, progress=progress)
    shapes = evaluation.output_shapes()
    given, count = matrices(cotangents, outputs, "cotangents", [shape for shape, _ in shapes])
    found = None if options.chunk_size is not None else rows_by_adjoint(evaluation, given)
    if found is None:
        found = transposed(evaluation, given, options.chunk_size)
    columns, at = [], 0
    for shape in evaluation.parameter_shapes():
        size = math.prod(shape)
        columns.append(shaped(found[:, at : at + size].T, shape, count))
        at += size
    return in_structure(plan, evaluation, columns, "params")


# --- the products, of matrices ----------------------------------------------------------------------------------------


def directional(evaluation: Evaluation, directions: np.ndarray, chunk_size: int | None) -> list[np.ndarray]:
    """J times the columns of ``directions``: for each output a row for each entry."""
    total = directions.shape[1]
    along = evaluation.changed(directions=directions)
    if not total:
        return [np.zeros((math.prod(shape), 0), dtype) for shape, dtype in evaluation.output_shapes()]
    return side_by_side(found for _, found in along.column_blocks(chunk_size or total))


def side_by_side(blocks: Iterable[list[np.ndarray]]) -> list[np.ndarray]:
    """Blocks of columns by output, joined for each output."""
    first, *others = blocks
    return [np.concatenate(values, axis=1) for values in zip(first, *others, strict=True)] if others else first


def transposed(evaluation: Evaluation, cotangents: list[np.ndarray], chunk_size: int | None) -> np.ndarray:
    """Transposed cotangents, a matrix for each output, times J: a row per cotangent, a column per parameter entry.

    J is computed in blocks of columns.
    """
    total = evaluation.column_count()
    dtype = np.result_type(*(dtype for _, dtype in evaluation.output_shapes()))
    rows = [np.ascontiguousarray(v.T, dtype) for v in cotangents]
    result = np.zeros((len(rows[0]), total), dtype)
    for first, found in evaluation.column_blocks(chunk_size or block_size(evaluation, BLOCK)):
        block = sum(v @ J for v, J in zip(rows, found, strict=True))
        result[:, first : first + found[0].shape[1]] = block
    return result


def block_size(evaluation: Evaluation, memory: float) -> int:
    """The number of columns of J in a block that fits into ``memory`` bytes, at least one; blocks are balanced."""
    total = evaluation.column_count()
    column = sum(math.prod(shape) * dtype.itemsize for shape, dtype in evaluation.output_shapes())
    blocks = -(-total // max(1, int(memory // max(1, column))))
    return max(1, -(-total // max(1, blocks)))


# --- arguments and results --------------------------------------------------------------------------------------------


def matrices(
    given: object, like: object, what: str, shapes: list[tuple[int, ...]], *, are_several: bool = True
) -> tuple[list[np.ndarray], int | None]:
    """For each target a matrix with a row for each entry, and the number of columns; None without a leading axis.

    ``are_several``: whether a leading axis is allowed.
    """
    is_nested = like is not None and (isinstance(like, (list, tuple, dict)) or len(flatten(like)[0]) > 1)
    leaves = dict(flatten(given, what)[0]) if is_nested else {"": given}
    paths = [path for path, _ in flatten(like)[0]] if is_nested else [""]
    if set(leaves) != set(paths):
        wanted = ", ".join(f"{what}{path}" for path in paths)
        raise InvalidArgumentError(f"{what} has another structure than {_LIKE.get(what, 'params')}; expected {wanted}.")
    found: list[np.ndarray] = []
    counts: set[int | None] = set()
    for path, shape in zip(paths, shapes, strict=True):
        values = real_array(leaves[path], f"{what}{path}")
        if values.shape == shape:
            counts.add(None)
        elif are_several and values.shape[1:] == shape and values.ndim == len(shape) + 1:
            counts.add(values.shape[0])
        else:
            at_once = f", or ({', '.join(('n', *map(str, shape)))}) for n of them at once" if are_several else ""
            raise InvalidArgumentError(f"{what}{path} has shape {values.shape}; expected {shape}{at_once}.")
        found.append(values.reshape(1 if values.shape == shape else len(values), math.prod(shape)).T)
    if len(counts) > 1:
        raise InvalidArgumentError(f"{what} differ in their number: give as many for each, along a leading axis.")
    return found, counts.pop()


_LIKE = {
    "tangents": "params",
    "vectors": "params",
    "cotangents": "outputs",
    "weights": "residuals",
    "bounds[0]": "params",
    "bounds[1]": "params",
}


def real_array(value: object, place: str) -> np.ndarray:
    check_not_ended(place, value)
    try:
        found = np.asarray(backend.as_numpy(value))
        is_real = found.dtype.kind in "fiu"
    except (ValueError, TypeError):  # a list of lists of different lengths
        found, is_real = np.empty(0), False
    if not is_real:
        raise unexpected(place, value, "an array of real numbers")
    return found


def shaped(values: np.ndarray, shape: tuple[int, ...], count: int | None) -> np.ndarray:
    """Columns as arrays of a shape, along a leading axis if there are several."""
    return np.ascontiguousarray(values.T).reshape(shape if count is None else (count, *shape))


def in_structure(plan: Plan, evaluation: Evaluation, values: list[np.ndarray], what: str) -> object:
    """Arrays in the structure of the params or the outputs, as tensors where the outputs are."""
    question = plan.prepared.question
    rebuild = question.rebuild_outputs if what == "outputs" else question.rebuild_params
    return as_torch(rebuild(values), evaluation.call, question.outputs)
