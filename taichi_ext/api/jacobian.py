"""``jacobian``, ``value_and_jacobian``, ``jvp`` and ``vjp``: the prepared form of a call, and its result."""

# Arrays are of any shape and type here, which pyright takes for unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from taichi_ext import backend
from taichi_ext.api.inputs.arguments import KernelCall, check_not_ended, flatten
from taichi_ext.api.inputs.options import Options, checked_options
from taichi_ext.api.inputs.progress import check_progress
from taichi_ext.api.inputs.results import as_torch
from taichi_ext.api.inputs.types import AnyJacobian, AnyProduct, DenseJacobian, DenseProduct, Format, Kernel, Leaf, Mode
from taichi_ext.api.plans.plan import Plan, prepare
from taichi_ext.api.plans.preparations import PlanTable, origin_of, structure_key
from taichi_ext.api.runs.by_adjoint import products_by_adjoint
from taichi_ext.api.runs.evaluation import Evaluation, equal_parts
from taichi_ext.api.runs.subject import by_param
from taichi_ext.differentiate.plan.storage_facts import Strategy
from taichi_ext.errors import InvalidArgumentError, unexpected, with_short_traceback

if TYPE_CHECKING:
    from typing_extensions import Unpack

_plans = PlanTable()


@overload
def jacobian(
    kernel: Kernel, params: Leaf, outputs: Leaf | None = None, **options: Unpack[DenseJacobian]
) -> np.ndarray: ...
@overload
def jacobian(kernel: Kernel, params: object, outputs: object = None, **options: Unpack[AnyJacobian]) -> Any: ...
@with_short_traceback
def jacobian(
    kernel: Kernel,
    params: object,
    outputs: object = None,
    *,
    args: tuple[object, ...] = (),
    out: object = None,
    max_memory: int | None = None,
    tangents: Strategy = "auto",
    chunk_size: int | None = None,
    format: Format | None = None,
    as_matrix: bool = False,
    progress: bool | None = None,
    mode: Mode | None = None,
) -> Any:
    """The Jacobian of a kernel's outputs with respect to its parameters, in one launch.

    ``J[o..., p...] = d outputs[o...] / d params[p...]``, by automatic differentiation of the kernel's source: all
    columns in forward mode, or all rows in reverse mode.  The call has the side effects of one plain run of the kernel.

    Args:
        kernel: a ``@ti.kernel``, plain or a bound method of a ``@ti.data_oriented`` class, or a Python function that
            launches kernels.
        params: a ``ti.field`` (scalar, vector, matrix, struct member, any layout), an array that is in ``args``, or the
            name of a kernel argument; or the name of a Python number that kernels read: a global or closure variable
            (``"gravity"``) or an attribute (``"self.dt"``); or a list, tuple or dict of those.
        outputs: likewise; None means the kernel's return value.
        args: positional arguments of the call.
        out: an array of the result's shape and type that is filled instead of a new one.
        max_memory: bytes for the tangents of intermediate fields and arrays, not counting the Jacobian; by default half
            of the free memory.  If they need more, the columns are computed in 2, 4, 8, ... runs, until each run fits.
            Everything that the kernels wrote is restored between runs.  A Python function is then called several times.
        tangents: storage for the tangents of locals that are written in branches and loops.  "sparse" keeps only the
            coefficients that can be nonzero, each with its column, where possible.  "dense" keeps all columns.  "auto"
            is sparse up to 24 columns of constant indices or 8 of computed ones.  The result is the same.
        chunk_size: the largest number of columns in one run; by default all.  The runs have balanced sizes, and
            everything that the kernels wrote is restored between them.  In reverse mode, which takes one run, of rows
            on one way back.
        format: None for dense arrays.  "csr", "csc", "coo" or "bsr" for a sparse Jacobian, computed without a dense
            one: for each pair of output and parameter a ``scipy.sparse`` array of shape (entries of the output, entries
            of the parameter), both in C order, elements last.  It holds the entries that can be nonzero, those that
            happen to be zero as well.  "torch_csr" and "torch_coo" give torch tensors if the outputs are torch
            tensors.  ``out=`` is then a ``csr_array`` of the same pattern.
        as_matrix: whether to return one matrix: a row for each entry of all outputs, a column for each entry of all
            params, one after the other in C order, elements last.  Its type is the common type of the outputs.  With
            ``format=`` it is sparse.
        progress: whether to show a progress bar if the columns are computed in several runs, and, while kernels are
            built for more than 2 s, a line that says so.  By default, if stderr is a terminal, or in a notebook.
        mode: "forward" computes columns of J, "reverse" rows: the better one where few outputs depend on many params in
            each iteration, see ``vjp``.  None chooses by estimated work; ``Jacobian.explain()`` says which, and why.

    Returns:
        A NumPy array of shape ``outputs.shape + element_shape + params.shape + element_shape`` and the type of the
        output; torch tensors if all outputs are torch tensors.  If outputs or params are lists, tuples or dicts, the
        result has the structure of outputs, and inside it that of params; with ``as_matrix=True`` it is one matrix.

    Raises:
        InvalidArgumentError: an argument is invalid; the message names it and the fix.
        UnsupportedError: the derivative of a construct is not known; the message has file, line and source text.

    Example:
        >>> import numpy as np
        >>> import taichi as ti
        >>> from taichi_ext import jacobian
        >>> ti.init(arch=ti.cpu, log_level=ti.ERROR)
        >>> x = ti.field(ti.f32, shape=2)
        >>> y = ti.field(ti.f32, shape=3)
        >>> @ti.kernel
        ... def powers():
        ...     for i in range(3):
        ...         y[i] = x[0] ** (i + 1) * x[1]
        >>> x.from_numpy(np.array([2, 1], dtype=np.float32))
        >>> jacobian(powers, x, y)
        array([[ 1.,  2.],
               [ 4.,  4.],
               [12.,  8.]], dtype=float32)
    """
    check_progress(progress)
    options = checked_options(max_memory, tangents, chunk_size, format, mode, as_matrix=as_matrix)
    plan, call = prepared_form(kernel, params, outputs, args, options)
    return plan.start(call, out, progress=progress, as_matrix=as_matrix).jacobian()


@overload
def value_and_jacobian(
    kernel: Kernel, params: Leaf, outputs: Leaf | None = None, **options: Unpack[DenseJacobian]
) -> tuple[Any, np.ndarray]: ...
@overload
def value_and_jacobian(
    kernel: Kernel, params: object, outputs: object = None, **options: Unpack[AnyJacobian]
) -> tuple[Any, Any]: ...
@with_short_traceback
def value_and_jacobian(
    kernel: Kernel,
    params: object,
    outputs: object = None,
    *,
    args: tuple[object, ...] = (),
    out: object = None,
    max_memory: int | None = None,
    tangents: Strategy = "auto",
    chunk_size: int | None = None,
    format: Format | None = None,
    as_matrix: bool = False,
    progress: bool | None = None,
    mode: Mode | None = None,
) -> tuple[Any, Any]:
    """The outputs and their Jacobian, from the same launch.

    Args and errors are those of ``jacobian``.

    Returns:
        The outputs and the Jacobian.  The outputs are NumPy arrays, structured like ``outputs``; if that is None, they
        are the return value.

    Example:
        >>> import taichi as ti
        >>> from taichi_ext import value_and_jacobian
        >>> ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
        >>> @ti.kernel
        ... def area(width: ti.f64, height: ti.f64) -> ti.f64:
        ...     return width * height
        >>> value, J = value_and_jacobian(area, ["width", "height"], args=(3.0, 5.0))
        >>> value, [float(column) for column in J]
        (15.0, [5.0, 3.0])
    """
    check_progress(progress)
    options = checked_options(max_memory, tangents, chunk_size, format, mode, as_matrix=as_matrix)
    plan, call = prepared_form(kernel, params, outputs, args, options)
    return plan.start(call, out, progress=progress, as_matrix=as_matrix).value_and_jacobian()


def prepared_form(
    kernel: object, params: object, outputs: object, args: tuple[object, ...], options: Options, use: str = "jacobian"
) -> tuple[Plan, KernelCall]:
    """A plan, from the table where there is one for the same kernel, params, outputs and use, and this call of it."""
    origin = origin_of(kernel)
    key = (structure_key(params, args), structure_key(outputs, args), options, use)
    with backend.exclusive:
        plan = _plans.find(origin, key)
        if plan is not None:
            return plan, plan.call(kernel, args)
        plan, call = prepare(kernel, params, outputs, args, options, use)
        _plans.keep(kernel, origin, key, plan)
    return plan, call


# Products without forming the Jacobian.

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
    options = checked_options(max_memory, chunk_size=chunk_size)
    plan, call = prepared_form(kernel, params, outputs, args, Options(options.max_memory), "products")
    evaluation = plan.start(call)
    given, count = matrices(tangents, params, "tangents", evaluation.parameter_shapes())
    columns = directional(evaluation, np.concatenate(given).astype(np.float64), options.chunk_size)
    return in_structure(evaluation, columns, count, "outputs")


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
    options = checked_options(max_memory, chunk_size=chunk_size)
    check_progress(progress)
    plan, call = prepared_form(kernel, params, outputs, args, Options(options.max_memory))
    evaluation = plan.start(call, progress=progress)
    given, count = matrices(cotangents, outputs, "cotangents", [shape for shape, _ in evaluation.output_shapes()])
    products = None if options.chunk_size is not None else products_by_adjoint(evaluation, given)
    rows = transposed(evaluation, given, options.chunk_size).T if products is None else products.rows
    return in_structure(evaluation, by_param(rows, evaluation.layout), count, "params")


# --- the products, of matrices ----------------------------------------------------------------------------------------


def directional(evaluation: Evaluation, directions: np.ndarray, chunk_size: int | None) -> list[np.ndarray]:
    """J times the columns of ``directions``: for each output a row for each entry."""
    total = directions.shape[1]
    along = replace(evaluation, directions=directions)
    if not total:
        return [np.zeros((math.prod(shape), 0), dtype) for shape, dtype in evaluation.output_shapes()]
    return side_by_side(columns for _, columns in along.column_blocks(equal_parts(total, chunk_size or total)))


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
    size = equal_parts(total, chunk_size) if chunk_size else block_size(evaluation, BLOCK)
    for first, columns in evaluation.column_blocks(size):
        block = sum(v @ J for v, J in zip(rows, columns, strict=True))
        result[:, first : first + columns[0].shape[1]] = block
    return result


def block_size(evaluation: Evaluation, memory: float) -> int:
    """The number of columns of J in a block that fits into ``memory`` bytes, at least one; blocks are balanced."""
    total = evaluation.column_count()
    column = sum(math.prod(shape) * dtype.itemsize for shape, dtype in evaluation.output_shapes())
    return equal_parts(total, int(memory // max(1, column)))


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
    blocks: list[np.ndarray] = []
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
        blocks.append(values.reshape(1 if values.shape == shape else len(values), math.prod(shape)).T)
    if len(counts) > 1:
        raise InvalidArgumentError(f"{what} differ in their number: give as many for each, along a leading axis.")
    return blocks, counts.pop()


_LIKE = {
    "tangents": "params",
    "vectors": "params",
    "cotangents": "outputs",
    "weights": "residuals",
    "bounds[0]": "params",
    "bounds[1]": "params",
}


def real_array(value: object, place: str) -> np.ndarray:
    """The numbers of an argument; raises unless they are real ones."""
    check_not_ended(place, value)
    try:
        result = np.asarray(backend.as_numpy(value))
        is_real = result.dtype.kind in "fiu"
    except (ValueError, TypeError):  # a list of lists of different lengths
        result, is_real = np.empty(0), False
    if not is_real:
        raise unexpected(place, value, "an array of real numbers")
    return result


def in_structure(evaluation: Evaluation, columns: list[np.ndarray], count: int | None, what: str) -> object:
    """Columns in the structure of the params or the outputs, as tensors where the outputs are.

    ``count`` is the size of their leading axis; None if there is only one, without that axis.
    """
    question, lead = evaluation.prepared.question, () if count is None else (count,)
    rebuild, shapes = question.rebuild_params, evaluation.parameter_shapes()
    if what == "outputs":
        rebuild, shapes = question.rebuild_outputs, [shape for shape, _ in evaluation.output_shapes()]
    values = [np.ascontiguousarray(v.T).reshape((*lead, *s)) for v, s in zip(columns, shapes, strict=True)]
    return as_torch(rebuild(values), evaluation.call, question.outputs)
