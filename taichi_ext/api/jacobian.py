"""``jacobian`` and ``value_and_jacobian``: the prepared form of a call, from the cache, and its result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import numpy as np

from taichi_ext import backend
from taichi_ext.api.inputs.arguments import KernelCall
from taichi_ext.api.inputs.options import Options, check_as_matrix, checked_options
from taichi_ext.api.inputs.progress import check_progress
from taichi_ext.api.inputs.types import AnyJacobian, DenseJacobian, Format, Kernel, Leaf, Mode
from taichi_ext.api.plans.plan import Plan, prepare
from taichi_ext.api.plans.preparations import PlanTable, Preparations, origin_of, structure_key
from taichi_ext.api.runs.evaluation import Evaluation
from taichi_ext.differentiate.plan.storage_facts import Strategy
from taichi_ext.errors import with_short_traceback

if TYPE_CHECKING:
    from typing_extensions import Unpack

_plans, _preparations = PlanTable(), Preparations()


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
        chunk_size: the largest number of columns in one run, in reverse mode of rows; by default all.  The runs have
            balanced sizes, and everything that the kernels wrote is restored between them.
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
    options = checked_options(max_memory, tangents, chunk_size, format, mode)
    return _start(kernel, params, outputs, args, out, options, as_matrix, progress).jacobian()


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
    options = checked_options(max_memory, tangents, chunk_size, format, mode)
    return _start(kernel, params, outputs, args, out, options, as_matrix, progress).value_and_jacobian()


def _start(
    kernel: object,
    params: object,
    outputs: object,
    args: tuple[object, ...],
    out: object,
    options: Options,
    as_matrix: bool,
    progress: bool | None,
) -> Evaluation:
    check_progress(progress)
    check_as_matrix(as_matrix, options.format)
    plan, call = prepared_form(kernel, params, outputs, args, options)
    return plan.start(call, out, progress=progress, as_matrix=as_matrix)


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
        is_kept = _plans.keep(origin, key, plan)
        _preparations.note(kernel, origin, key, plan, is_kept=is_kept)
    return plan, call
