"""``hessian`` and its relatives: gradients and second derivatives of energies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args, overload

import numpy as np

from taichi_ext.api.inputs.fixed import Fixed
from taichi_ext.api.inputs.options import checked_choice, checked_options
from taichi_ext.api.inputs.progress import check_progress
from taichi_ext.api.inputs.types import AnyHessian, AnyProduct, DenseHessian, DenseProduct, Format, Kernel, Leaf
from taichi_ext.api.jacobian import in_structure, matrices, prepared_form
from taichi_ext.api.plans.plan import Jacobian, prepare
from taichi_ext.api.runs.second_order import hessian_times, value_gradient_and_hessian_of, with_choices
from taichi_ext.errors import InvalidArgumentError, with_short_traceback
from taichi_ext.runtime.sparse.streams import Projection

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Hessian(Jacobian):
    """The prepared form of ``hessian``: analysed and compiled once, called many times.

    Args are those of ``hessian``.  A call can pass other args; without args it uses those of its thread's last call.

    Raises:
        InvalidArgumentError: an argument is invalid; the message names it and the fix.

    Calling it (``plan()``, ``plan(out=H)``, ``plan(args=...)``) runs the kernel once and returns the Hessian.
    ``plan.source`` and ``plan.explain()`` are those of ``Jacobian``.

    Example:
        >>> import taichi as ti
        >>> from taichi_ext import Hessian
        >>> ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
        >>> x, energy = ti.field(ti.f64, shape=2), ti.field(ti.f64, shape=())
        >>> @ti.kernel
        ... def product():
        ...     energy[None] = x[0] ** 2 * x[1]
        >>> plan = Hessian(product, x, energy)
        >>> for start in (1.0, 2.0):
        ...     x.fill(start)
        ...     print(plan().tolist())
        [[2.0, 2.0], [2.0, 0.0]]
        [[4.0, 4.0], [4.0, 0.0]]
    """

    @with_short_traceback
    def __init__(
        self,
        kernel: Kernel,
        params: object,
        energy: object = None,
        *,
        args: tuple[object, ...] = (),
        max_memory: int | None = None,
        chunk_size: int | None = None,
        format: Format | None = None,
        project: Projection | None = None,
        fixed: object = None,
        progress: bool | None = None,
    ) -> None:
        options = checked_options(max_memory, chunk_size=chunk_size, format=format)
        self._begin(*prepare(kernel, params, energy, args, options, _use(project, format)), progress)
        self._project, self._fixed, self._mask = project, fixed, None

    @with_short_traceback
    def value_gradient_and_hessian(
        self, *, args: tuple[object, ...] | None = None, out: object = None
    ) -> tuple[Any, Any, Any]:
        """Run the kernel once; returns the energy, its gradient and H, see ``value_gradient_and_hessian``."""
        evaluation = self._started(args, out)
        result = value_gradient_and_hessian_of(evaluation)
        self._last.returned = evaluation.returned
        return result

    def _started(self, args: tuple[object, ...] | None, out: object) -> Any:
        evaluation = super()._started(args, out)
        shapes = evaluation.parameter_shapes()
        if self._mask is None or self._mask[0] != shapes:
            self._mask = shapes, Fixed(self._fixed, shapes)
        return with_choices(evaluation, self._project, self._mask[1])


@overload
def hessian(kernel: Kernel, params: Leaf, energy: object = None, **options: Unpack[DenseHessian]) -> np.ndarray: ...
@overload
def hessian(kernel: Kernel, params: object, energy: object = None, **options: Unpack[AnyHessian]) -> Any: ...
@with_short_traceback
def hessian(
    kernel: Kernel,
    params: object,
    energy: object = None,
    *,
    args: tuple[object, ...] = (),
    out: object = None,
    max_memory: int | None = None,
    chunk_size: int | None = None,
    format: Format | None = None,
    project: Projection | None = None,
    fixed: object = None,
    progress: bool | None = None,
) -> Any:
    """The Hessian of an energy, a number that a kernel computes, in one launch.

    ``H[p..., q...] = d^2 energy / d params[p...] d params[q...]``.  The kernel is differentiated twice by forward-mode
    automatic differentiation.  The call has the side effects of one plain run of the kernel.  H is symmetric to the
    last bit.  If Python passes on numbers that depend on params, there is a run for every 8 columns (see ``hvp``).

    Where an operation has no finite second derivative, such as ``sqrt(x)`` at 0 or the norm of a zero vector, H is
    infinite or NaN there.

    Args:
        kernel: a ``@ti.kernel``, plain or a bound method of a ``@ti.data_oriented`` class, or a Python function that
            launches kernels.
        params: see ``jacobian``.
        energy: a scalar field of shape () or (1,), an array with one entry that is in ``args``, or the name of such an
            argument; None means the number that the kernel returns.
        args: positional arguments of the call.
        out: an array of the result's shape and type that is filled instead of a new one, for several params one for
            each pair.
        max_memory: bytes for the tangents of intermediate fields and arrays, see ``jacobian``.
        chunk_size: the largest number of columns of H in one run; by default all columns.
        format: None for dense arrays; "csr", "csc", "coo" or "bsr" for ``scipy.sparse`` arrays (extra ``scipy``);
            "torch_csr" or "torch_coo" for tensors, where all params are tensors. Where the energy is no sum of terms of
            few entries of the params each, H is computed densely, and its zeros are left out; ``Hessian.explain()``
            says why. An energy of fields that kernels compute from params takes two runs, and the state is put back in
            between; each entry of such a field must be stored once, before it is read.
        project: how the block of each element is made positive semidefinite, for ``format=``: "clamp" sets its negative
            eigenvalues to 0, "abs" to their absolute values, and "on_demand" clamps them only if H is not positive
            definite as it is. None leaves H as it is.
        fixed: entries of the params that do not move, structured like ``params``: for each an array of bools of its
            shape and element shape, or of its shape alone, or indices along its first axis. Their rows and columns of
            H are those of the identity matrix, so that ``H p = -gradient`` leaves them where they are.
        progress: see ``jacobian``.

    Returns:
        A NumPy array of shape ``params.shape + element_shape + params.shape + element_shape`` and the type of the
        energy, a torch tensor if the energy is a tensor; with ``format=`` a sparse array of shape (entries, entries),
        raveled in C order, whose entries may be zero.  If params is a list, tuple or dict, the result has its
        structure, and inside it once more: ``H["a"]["b"]``.

    Raises:
        InvalidArgumentError: an argument is invalid; the message names it and the fix.
        UnsupportedError: a derivative is not known, such as that of an edge or of a function with a user's rule; the
            message has file, line and source text.

    Example:
        >>> import taichi as ti
        >>> from taichi_ext import hessian
        >>> ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
        >>> x, energy = ti.field(ti.f64, shape=2), ti.field(ti.f64, shape=())
        >>> x[0], x[1] = 1.0, 2.0
        >>> @ti.kernel
        ... def rosenbrock():
        ...     energy[None] = (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2
        >>> hessian(rosenbrock, x, energy)
        array([[ 402., -400.],
               [-400.,  200.]])
    """
    check_progress(progress)
    options = checked_options(max_memory, chunk_size=chunk_size, format=format)
    plan, call = prepared_form(kernel, params, energy, args, options, _use(project, format))
    evaluation = plan.start(call, out, progress=progress)
    evaluation = with_choices(evaluation, project, Fixed(fixed, evaluation.parameter_shapes()))
    return evaluation.jacobian()


@overload
def value_gradient_and_hessian(
    kernel: Kernel, params: Leaf, energy: object = None, **options: Unpack[DenseHessian]
) -> tuple[Any, np.ndarray, np.ndarray]: ...
@overload
def value_gradient_and_hessian(
    kernel: Kernel, params: object, energy: object = None, **options: Unpack[AnyHessian]
) -> tuple[Any, Any, Any]: ...
@with_short_traceback
def value_gradient_and_hessian(
    kernel: Kernel,
    params: object,
    energy: object = None,
    *,
    args: tuple[object, ...] = (),
    out: object = None,
    max_memory: int | None = None,
    chunk_size: int | None = None,
    format: Format | None = None,
    project: Projection | None = None,
    fixed: object = None,
    progress: bool | None = None,
) -> tuple[Any, Any, Any]:
    """The energy, its gradient and its Hessian, from the same launch.

    Args and errors are those of ``hessian``; ``out`` is for the Hessian.

    Returns:
        The energy as it is after the run; its gradient, structured like ``params``, for each an array of its shape and
        element shape, 0 for ``fixed`` entries; the Hessian, see ``hessian``.

    Example:
        >>> import taichi as ti
        >>> from taichi_ext import value_gradient_and_hessian
        >>> ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
        >>> @ti.kernel
        ... def cube(a: ti.f64) -> ti.f64:
        ...     return a**3
        >>> value, gradient, H = value_gradient_and_hessian(cube, "a", args=(2.0,))
        >>> value, float(gradient), float(H)
        (8.0, 12.0, 12.0)
    """
    check_progress(progress)
    options = checked_options(max_memory, chunk_size=chunk_size, format=format)
    plan, call = prepared_form(kernel, params, energy, args, options, _use(project, format))
    evaluation = plan.start(call, out, progress=progress)
    evaluation = with_choices(evaluation, project, Fixed(fixed, evaluation.parameter_shapes()))
    return value_gradient_and_hessian_of(evaluation)


@overload
def hvp(
    kernel: Kernel, params: Leaf, vectors: object, energy: object = None, **options: Unpack[DenseProduct]
) -> np.ndarray: ...
@overload
def hvp(
    kernel: Kernel, params: object, vectors: object, energy: object = None, **options: Unpack[AnyProduct]
) -> Any: ...
@with_short_traceback
def hvp(
    kernel: Kernel,
    params: object,
    vectors: object,
    energy: object = None,
    *,
    args: tuple[object, ...] = (),
    max_memory: int | None = None,
    fixed: object = None,
) -> Any:
    """Products H v of the Hessian of an energy with vectors, without H.

    They cost about twice a gradient, whatever the number of parameters.  If a kernel's energy is a sum of terms of few
    entries of the params each, it is one launch with a column for each vector.  Otherwise, and for pipelines, the run
    and its adjoint have tangents along up to 8 vectors (forward over reverse; see B. A. Pearlmutter, "Fast exact
    multiplication by the Hessian", Neural Computation 6(1), 1994).  The call has the side effects of one plain run.

    Args:
        kernel, params, energy, args: see ``hessian``.
        vectors: structured like ``params``; for each parameter an array of its shape and element shape, or several of
            them along a leading axis, as many for every parameter.
        max_memory: bytes for what a pipeline keeps for the way back, see ``vjp``.
        fixed: entries of the params that do not move, see ``hessian``: those of a product are those of the vector.

    Returns:
        An array for each parameter, of its shape and element shape and of the type of the energy, with the leading axis
        of the vectors if they have one; structured like ``params``; torch tensors if the energy is a tensor.

    Raises:
        InvalidArgumentError: an argument is invalid; the message names it and the fix.
        UnsupportedError: see ``hessian``.

    Example:
        >>> import numpy as np
        >>> import taichi as ti
        >>> from taichi_ext import hvp
        >>> ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
        >>> x, energy = ti.field(ti.f64, shape=3), ti.field(ti.f64, shape=())
        >>> x.fill(1.0)
        >>> @ti.kernel
        ... def products():
        ...     for i in range(2):
        ...         energy[None] += x[i] ** 2 * x[i + 1]
        >>> hvp(products, x, np.array([1.0, 0.0, 0.0]), energy)
        array([2., 2., 0.])
    """
    options = checked_options(max_memory)
    plan, call = prepared_form(kernel, params, energy, args, options, "hvp")
    evaluation = plan.start(call)
    shapes = evaluation.parameter_shapes()
    given, count = matrices(vectors, params, "vectors", shapes)
    if count == 0:
        raise InvalidArgumentError("vectors has no vector: its leading axis is empty.")
    evaluation = with_choices(evaluation, None, Fixed(fixed, shapes), has_gradient=False)
    products = hessian_times(evaluation, np.concatenate(given).astype(np.float64))
    return in_structure(evaluation, products, count, "params")


def _use(project: object, format: str | None) -> str:
    """The use of a plan; raises for a projection that cannot be done."""
    if project is None:
        return "hessian"
    checked_choice("project", project, get_args(Projection))
    if format is None:
        raise InvalidArgumentError(
            f"project={project!r} changes the blocks of elements, which a dense Hessian does not have; use it with "
            "format='csr', or another sparse format."
        )
    return "projected"
