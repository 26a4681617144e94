"""Sums over residuals or shards: the matrix and vector of a Gauss-Newton step; an energy and its gradient."""

# pyright knows no types of Taichi, torch and SciPy, nor of arrays of any shape and type.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike

from taichi_ext.api.inputs.arguments import flatten
from taichi_ext.api.inputs.options import checked_options
from taichi_ext.api.inputs.progress import check_progress
from taichi_ext.api.inputs.results import joined
from taichi_ext.api.inputs.types import Kernel
from taichi_ext.api.jacobian import block_size, in_structure, matrices, prepared_form, side_by_side
from taichi_ext.api.runs.by_adjoint import value_and_row
from taichi_ext.api.runs.evaluation import Evaluation
from taichi_ext.api.runs.subject import by_param
from taichi_ext.errors import InvalidArgumentError, unexpected, with_short_traceback
from taichi_ext.runtime.memory.shadows import check_fits
from taichi_ext.solvers.operator import require_scipy
from taichi_ext.solvers.parts import Part, check_finite, pieces_of
from taichi_ext.solvers.problem import output_parts, residual_vector
from taichi_ext.solvers.shards import GRADIENT, AnyExecutor, Shards, check_shard_options

_MEMORY = 2**28  # bytes of J in memory at once
_ROWS = 16384  # rows of J in one product
_SPARSE = "If its rows are sparse, use format='csr'; else linear_operator with scipy.sparse.linalg.lsqr."


@dataclass(frozen=True)
class NormalEquations:
    """The normal equations of weighted least squares at one point; P is the number of entries of the parameters.

    Attributes:
        JtJ: the matrix J^T W J, of shape (P, P): a NumPy array, or a ``scipy.sparse`` array.
        Jtr: the vector J^T W r, of shape (P,).
        rtr: the sum r^T W r of the weighted squares of the residuals.
    """

    JtJ: Any
    Jtr: np.ndarray
    rtr: float
    _split: Callable[[np.ndarray], object]

    def split(self, vector: np.ndarray) -> Any:
        """A vector of P numbers as arrays of the shapes of the parameters, structured like ``params``."""
        values = np.asarray(vector)
        if values.shape != self.Jtr.shape:
            raise InvalidArgumentError(f"vector has shape {values.shape}; expected {self.Jtr.shape}.")
        return self._split(values)


@with_short_traceback
def normal_equations(
    kernel: Callable[..., object] | str,
    params: object = None,
    residuals: object = None,
    weights: object = None,
    *,
    args: tuple[object, ...] = (),
    dtype: DTypeLike | None = None,
    format: Literal["csr"] | None = None,
    max_memory: float | None = None,
    shards: Sequence[tuple[object, ...]] | None = None,
    at: object = None,
    executor: AnyExecutor = None,
    init: Mapping[str, object] | None = None,
    progress: bool | None = False,
) -> NormalEquations:
    """J^T W J, J^T W r and r^T W r of residuals r, without keeping J.

    If J takes more than ``max_memory``, two blocks of its columns are kept in memory at once, and some are computed
    again: P columns in B blocks take about B * B / 2 runs of a B-th of the columns.  Everything that the kernels wrote
    is restored between the runs, so that the call has the side effects of one plain run.

    With ``shards``, workers compute them, see ``map_jacobian``: ``kernel`` is the factory, and the sums over the shards
    are added in their order, in float64.  They are the same to the last bit as with ``executor=None``, even if shards
    were lost and computed again, provided that the kernels have no parallel atomic sums.

    Args:
        kernel: see ``jacobian``; with ``shards``, the factory.
        params, args: see ``jacobian``.
        residuals: see ``outputs`` of ``jacobian``; None means the kernel's return value.
        weights: the weight of each residual, not negative, structured like ``residuals``; None for 1.
        dtype: the type in which products are added up: by default that of the residuals, ``np.float64`` on request.
        format: "csr" computes J and J^T W J as sparse arrays (extra ``scipy``); None computes them dense.
        max_memory: bytes of a dense J in memory at once, by default 256 MiB.
        shards: the arguments of the factory, a tuple for each shard.
        at: with ``shards``: the values of the params.
        executor: with ``shards``: see ``map_jacobian``.
        init: with ``shards``: see ``map_jacobian``.
        progress: with ``shards``: True draws a progress bar.

    Returns:
        The equations: ``JtJ``, ``Jtr``, ``rtr``, and ``split(vector)``, which gives a step the shapes of the params.

    Raises:
        InvalidArgumentError: an argument is invalid, or ``format`` is given and SciPy is not installed; or J^T J does
            not fit into memory; or a residual or an entry of J is not finite.
        ShardError: the same in a shard, or it could not be computed.
        UnsupportedError: the derivative of a construct is not known.

    Example:
        >>> import numpy as np
        >>> import taichi as ti
        >>> from taichi_ext import normal_equations
        >>> ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
        >>> line, r = ti.field(ti.f64, shape=2), ti.field(ti.f64, shape=3)
        >>> @ti.kernel
        ... def compare():
        ...     for i in r:
        ...         r[i] = line[0] + line[1] * i - (1.0 + 2.0 * i)
        >>> equations = normal_equations(compare, line, r)
        >>> equations.JtJ
        array([[3., 3.],
               [3., 5.]])
        >>> step = np.linalg.solve(equations.JtJ, -equations.Jtr)
        >>> equations.split(step).round(6).tolist()
        [1.0, 2.0]
    """
    checked_options(max_memory)
    check_matrix_format(format)
    of_kernels = {"params": params, "residuals": residuals, "weights": weights, "args": args or None, "dtype": dtype}
    check_shard_options(shards, of_kernels, {"at": at, "executor": executor, "init": init})
    if shards is not None:
        check_progress(progress)
        sums = Shards(kernel, shards, at, "at", init, format)
        total = sums.total(executor, ("linear", 1.0, "entries"), progress)
        return NormalEquations(total.JtJ, total.gradient, 2 * total.cost, sums.split)
    plan, call = prepared_form(kernel, params, residuals, args, checked_options(format=format))
    evaluation = plan.start(call)
    shapes = evaluation.output_shapes()
    w = weights_of(weights, residuals, [shape for shape, _ in shapes])
    kind = _accumulator(dtype, np.result_type(*(t for _, t in shapes)))
    if format is None:
        count = evaluation.column_count()
        check_fits(f"J^T J has {count} x {count} entries,", count * count * kind.itemsize, _SPARSE)
    JtJ: Any
    with np.errstate(invalid="ignore", over="ignore"):  # numbers that are not finite raise an error below
        if format is None:
            JtJ, Jtr, r = _dense(evaluation, w, kind, _MEMORY if max_memory is None else max_memory)
        else:
            JtJ, Jtr, r = _sparse(evaluation, w, kind)
    parameter_shapes = evaluation.parameter_shapes()
    check_finite(r, output_parts(evaluation), "; check_jacobian names the line where it arises.")
    placed = evaluation.layout.params
    columns = [Part(f"the diagonal of J^T J, of {p.target.name},", p.shape, JtJ.dtype) for p in placed]
    advice = "; check_jacobian names the line of a NaN in J, and dtype=np.float64 holds larger sums."
    check_finite(JtJ.diagonal(), columns, advice)
    rtr = float(r @ r if w is None else r @ (w * r))
    rebuild = plan.prepared.question.rebuild_params
    return NormalEquations(JtJ, Jtr, rtr, lambda vector: rebuild(pieces_of(vector, parameter_shapes)))


def weights_of(weights: object, residuals: object, shapes: list[tuple[int, ...]]) -> np.ndarray | None:
    if weights is None:
        return None
    leaves, rebuild = flatten(weights, "weights")
    ones = {path: np.ones(s) for (path, _), s in zip(flatten(residuals)[0], shapes, strict=True)}
    weights = rebuild([ones.get(path) if w is None else w for path, w in leaves])  # None for one of several is 1, too
    parts, _ = matrices(weights, residuals, "weights", shapes, are_several=False)
    result = np.concatenate(parts).reshape(-1).astype(np.float64)
    if not (np.isfinite(result).all() and (result >= 0).all()):
        raise InvalidArgumentError("weights has entries that are negative or not finite.")
    return result


def check_matrix_format(format: object) -> None:
    """Raise for another format than those of J^T J."""
    if not (format is None or (isinstance(format, str) and format == "csr")):
        raise unexpected("format", format, "'csr' or None")


def _accumulator(dtype: Any, default: np.dtype) -> np.dtype:
    if dtype is None:
        return default
    try:
        result = np.dtype(dtype)
    except (TypeError, ValueError):
        result = np.dtype(object)
    if result not in (np.dtype(np.float32), np.dtype(np.float64)):
        raise unexpected("dtype", dtype, "np.float32, np.float64 or None")
    return result


# --- dense ------------------------------------------------------------------------------------------------------------


def _dense(
    evaluation: Evaluation, w: np.ndarray | None, kind: np.dtype, memory: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    total = evaluation.column_count()
    JtJ, Jtr = np.zeros((total, total), kind), np.zeros(total, kind)
    width = block_size(evaluation, memory)
    if width < total:
        width = block_size(evaluation, memory / 2)  # two blocks at once

    def columns(first: int) -> tuple[slice, list[np.ndarray]]:
        """A block of columns of J, from a separate run: for each output its rows."""
        end = min(first + width, total)
        return slice(first, end), side_by_side(block for _, block in evaluation.column_blocks(width, first, end))

    def add(a: tuple[slice, list[np.ndarray]], b: tuple[slice, list[np.ndarray]]) -> None:
        """Add the products of two blocks of columns, some rows in each step."""
        product, at = JtJ[a[0], b[0]], 0
        for left, right in zip(a[1], b[1], strict=True):
            is_direct = w is None and left.dtype == kind  # in one go, which is quicker
            step = max(1, len(left) if is_direct else _ROWS)
            for first in range(0, len(left), step):
                part, here = slice(first, first + step), slice(at + first, at + min(first + step, len(left)))
                A = left[part].astype(kind, copy=False)
                B = A if left is right else right[part].astype(kind, copy=False)
                if left is right:
                    Jtr[a[0]] += A.T @ wr[here]
                product += (A if w is None else A * w[here, None].astype(kind)).T @ B
            at += len(left)
        JtJ[b[0], a[0]] = product.T

    starts = list(range(0, total, width))
    own: Any = columns(0) if starts else None
    r = residual_vector(evaluation)
    wr = (r if w is None else w * r).astype(kind)
    for n, start in enumerate(starts):
        own = own if n == 0 else columns(start)
        add(own, own)
        for other in starts[n + 1 :]:
            add(own, columns(other))
    return JtJ, Jtr, r


# --- sparse -----------------------------------------------------------------------------------------------------------


def _sparse(evaluation: Evaluation, w: np.ndarray | None, kind: np.dtype) -> tuple[Any, np.ndarray, np.ndarray]:
    sparse = require_scipy("sparse", "normal_equations with format='csr'")
    kind = np.result_type(kind, np.float32)  # SciPy has no float16
    J = joined(evaluation.blocks(), evaluation.layout).astype(kind, copy=False)
    r = residual_vector(evaluation)
    weighted = J if w is None else sparse.diags_array(w, dtype=kind) @ J
    return sparse.csr_array(weighted.T @ J), np.asarray(weighted.T @ r.astype(kind)), r


# ``value_and_gradient``: an energy and its gradient, in this process or of shards of data.


@with_short_traceback
def value_and_gradient(
    kernel: Kernel | str,
    params: object = None,
    energy: object = None,
    *,
    args: tuple[object, ...] = (),
    max_memory: int | None = None,
    shards: Sequence[tuple[object, ...]] | None = None,
    at: object = None,
    executor: AnyExecutor = None,
    init: Mapping[str, object] | None = None,
    progress: bool | None = None,
) -> tuple[Any, Any]:
    """An energy and its gradient, in reverse mode: for a few plain runs, whatever the number of params.

    With ``shards``, workers compute them, see ``map_jacobian``: ``kernel`` is the factory, which returns ``(kernel,
    params, energy)`` or these and ``args``.  The sums over the shards are added in their order, in float64.  They are
    the same to the last bit as with ``executor=None``, even if shards were lost and computed again, provided that the
    kernels have no parallel atomic sums.

    Args:
        kernel: see ``hessian``; with ``shards``, the factory.
        params, energy, args: see ``hessian``.
        max_memory: see ``vjp``.
        shards: the arguments of the factory, a tuple for each shard.
        at: with ``shards``: the values of the params.
        executor, init: with ``shards``: see ``map_jacobian``.
        progress: True draws a progress bar, of the way back or of the shards; False shows nothing, not even what a long
            first call does.

    Raises:
        InvalidArgumentError: an argument is invalid; the message names it and the fix.
        ShardError: a shard could not be computed.
        UnsupportedError: the derivative of a construct is not known.

    Returns:
        The energy as it is after the run, and its gradient, structured like ``params``: for each an array of its shape
        and element shape, and of the type of the energy.

    Example:
        >>> import taichi as ti
        >>> from taichi_ext import value_and_gradient
        >>> ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
        >>> x, energy = ti.field(ti.f64, shape=3), ti.field(ti.f64, shape=())
        >>> x.fill(2.0)
        >>> @ti.kernel
        ... def total():
        ...     for i in x:
        ...         energy[None] += 0.5 * i * x[i] ** 2
        >>> value, gradient = value_and_gradient(total, x, energy)
        >>> float(value), gradient
        (6.0, array([0., 2., 4.]))
    """
    of_kernels = {"params": params, "energy": energy, "args": args or None, "max_memory": max_memory}
    check_shard_options(shards, of_kernels, {"at": at, "executor": executor, "init": init})
    check_progress(progress)
    if shards is not None:
        sums = Shards(kernel, shards, at, "at", init, None)
        total = sums.total(executor, GRADIENT, progress or False)
        return total.cost, sums.split(total.gradient)
    plan, call = prepared_form(kernel, params, energy, args, checked_options(max_memory), "gradient")
    evaluation = plan.start(call, progress="stages" if progress is None else progress)
    value, row = value_and_row(evaluation)
    return value, in_structure(evaluation, by_param(row, evaluation.layout), None, "params")
