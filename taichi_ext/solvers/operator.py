"""``linear_operator``, ``hessian_operator``: J and H as something that multiplies, for SciPy's iterative solvers."""

# pyright knows no types of Taichi, torch and SciPy, nor of arrays of any shape and type.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import numbers
from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import Any

import numpy as np

from taichi_ext.api.inputs.arguments import KernelCall
from taichi_ext.api.inputs.fixed import Fixed
from taichi_ext.api.inputs.options import Options, checked_options
from taichi_ext.api.inputs.results import joined
from taichi_ext.api.jacobian import directional, prepared_form, transposed
from taichi_ext.api.plans.plan import Plan
from taichi_ext.api.runs.by_adjoint import products_by_adjoint
from taichi_ext.api.runs.second_order import MOST_VECTORS, hessian_times, with_choices
from taichi_ext.errors import InvalidArgumentError, shown, with_short_traceback
from taichi_ext.runtime.memory.state import RANDOM_BEFORE, State


@with_short_traceback
def linear_operator(
    kernel: Callable[..., object],
    params: object,
    outputs: object = None,
    *,
    args: tuple[object, ...] = (),
    max_memory: int | None = None,
    chunk_size: int | None = None,
) -> Any:
    """The Jacobian as a ``scipy.sparse.linalg.LinearOperator``, which multiplies without keeping J.

    Each product uses J at the current values of the fields.  Everything that the kernels write in it is restored, so
    products do not affect each other.  ``A @ x`` costs one launch with one column, ``A.T @ y`` the same as ``vjp``,
    ``A @ X`` one launch for up to 32 columns of X.  A complex vector counts as two columns, its real and its imaginary
    part.

    Args:
        kernel, params, outputs, max_memory: see ``jacobian``.
        args: see ``jacobian``; the operator keeps them.
        chunk_size: the largest number of columns of J in one run of ``A.T @ y``.

    Returns:
        The operator, of shape (numbers in the outputs, numbers in the params): both raveled in C order, one after the
        other in the order of their structure.  ``A.materialize()`` is the matrix, a NumPy array.

    Raises:
        ImportError: SciPy is not installed (the extra ``scipy``).
        InvalidArgumentError: an argument is invalid, or ``ti.init`` has been called since; in a product, the kernel
            draws random numbers, so that another run would compute something else.
        UnsupportedError: in a product, the derivative of a construct is not known.

    Example:
        >>> import numpy as np
        >>> import taichi as ti
        >>> from taichi_ext import linear_operator
        >>> ti.init(arch=ti.cpu, log_level=ti.ERROR)
        >>> x, y = ti.field(ti.f32, shape=3), ti.field(ti.f32, shape=2)
        >>> @ti.kernel
        ... def sums():
        ...     for i in y:
        ...         y[i] = x[i] * x[i + 1]
        >>> x.from_numpy(np.array([1, 2, 3], dtype=np.float32))
        >>> A = linear_operator(sums, x, y)
        >>> A @ np.array([1.0, 1.0, 1.0])
        array([3., 5.])
        >>> A.materialize()
        array([[2., 1., 0.],
               [0., 3., 2.]], dtype=float32)
    """
    operator = _operator_class()
    memory, _, chunk_size, *_ = checked_options(max_memory, chunk_size=chunk_size)
    prepare = functools.partial(prepared_form, kernel, params, outputs, args, Options(memory))
    return operator(_Products(prepare, chunk_size))


@with_short_traceback
def hessian_operator(
    kernel: Callable[..., object],
    params: object,
    energy: object = None,
    *,
    args: tuple[object, ...] = (),
    max_memory: int | None = None,
    fixed: object = None,
) -> Any:
    """The Hessian of an energy as a ``scipy.sparse.linalg.LinearOperator``: for ``cg``, ``minres`` and ``eigsh``.

    Each product uses the current values of the fields and restores them, as with ``linear_operator``.  ``H @ x`` costs
    the same as ``hvp``.

    Args:
        kernel, params, energy: see ``hessian``.
        args: see ``hessian``; the operator keeps them.
        max_memory: see ``hvp``.
        fixed: entries of the params that do not move, see ``hessian``.

    Returns:
        The operator, of shape (numbers in the params, numbers in the params), raveled in C order, one after the other
        in the order of their structure.  ``H.materialize()`` is the matrix, a NumPy array.

    Raises:
        ImportError: SciPy is not installed (the extra ``scipy``).
        InvalidArgumentError: see ``linear_operator``.
        UnsupportedError: see ``hessian``.

    Example:
        >>> import numpy as np
        >>> import taichi as ti
        >>> from scipy.sparse.linalg import cg
        >>> from taichi_ext import hessian_operator
        >>> ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
        >>> x, energy = ti.field(ti.f64, shape=3), ti.field(ti.f64, shape=())
        >>> @ti.kernel
        ... def chain():
        ...     for i in range(3):
        ...         energy[None] += x[i] ** 2
        ...     for i in range(2):
        ...         energy[None] += x[i] * x[i + 1]
        >>> H = hessian_operator(chain, x, energy)
        >>> H @ np.array([1.0, 0.0, 0.0])
        array([2., 1., 0.])
        >>> step, _ = cg(H, np.array([1.0, 0.0, 1.0]), rtol=1e-12)
        >>> step.round(12).tolist()
        [1.0, -1.0, 1.0]
    """
    operator = _operator_class()
    options = checked_options(max_memory)
    return operator(_SymmetricProducts(*prepared_form(kernel, params, energy, args, options, "hvp"), fixed))


class _Products:
    """The prepared forms of J, and of J times given directions, and one state for both."""

    def __init__(self, prepare: Callable[..., tuple[Plan, KernelCall]], chunk_size: int | None) -> None:
        self._whole, self._call = prepare()
        self._along, _ = prepare("products")
        self._chunk_size = chunk_size
        evaluation = self._whole.start(self._call)
        self.dtype = np.result_type(*(dtype for _, dtype in evaluation.output_shapes()))
        self.rows = [math.prod(shape) for shape, _ in evaluation.output_shapes()]
        self.shape = (sum(self.rows), evaluation.column_count())

    def times(self, vectors: np.ndarray) -> np.ndarray:
        """J times the columns of a matrix."""
        with _started(self._along, self._call) as evaluation:
            return np.concatenate(directional(evaluation, np.asarray(vectors, np.float64), MOST_VECTORS))

    def transposed_times(self, vectors: np.ndarray) -> np.ndarray:
        """The transpose of J times the columns of a matrix."""
        parts = np.split(vectors, np.cumsum(self.rows)[:-1])
        with _started(self._whole, self._call) as evaluation:
            products = None if self._chunk_size is not None else products_by_adjoint(evaluation, parts, restores=True)
            return transposed(evaluation, parts, self._chunk_size).T if products is None else products.rows

    def matrix(self) -> np.ndarray:
        with _started(self._whole, self._call) as evaluation:
            return joined(evaluation.blocks(), evaluation.layout).astype(self.dtype, copy=False)


class _SymmetricProducts:
    """The prepared form of products with the Hessian of an energy."""

    def __init__(self, plan: Plan, call: KernelCall, fixed: object) -> None:
        self._plan, self._call = plan, call
        evaluation = plan.start(call)
        self.dtype = evaluation.output_shapes()[0][1]
        self.shape = (evaluation.column_count(),) * 2
        self._fixed = Fixed(fixed, evaluation.parameter_shapes())

    def times(self, vectors: np.ndarray) -> np.ndarray:
        """H times the columns of a matrix."""
        with _started(self._plan, self._call) as evaluation:
            along = with_choices(evaluation, None, self._fixed, has_gradient=False)
            return np.concatenate(hessian_times(along, np.asarray(vectors, np.float64)))

    def transposed_times(self, vectors: np.ndarray) -> np.ndarray:
        """The same: H is symmetric."""
        return self.times(vectors)

    def matrix(self) -> np.ndarray:
        columns = self.times(np.eye(self.shape[0]))
        return 0.5 * (columns + columns.T)


@contextlib.contextmanager
def _started(plan: Plan, call: KernelCall) -> Generator[Any, None, None]:
    """An evaluation whose runs leave the state as it was."""
    plan.check_not_ended()
    state = State(call.python_state())
    state.reason, state.advice = "Products with an operator restore everything that the kernels write", RANDOM_BEFORE
    evaluation = plan.start(call, state=state)
    try:
        yield evaluation
    finally:
        if state.has_random:
            state.undo()
            raise InvalidArgumentError(
                "The kernel draws random numbers, so that each product would be with another J or H. Read the numbers "
                "from a field that is filled before."
            )
        state.restore()


def _checked_operand(given: object, columns: int, method: str = "") -> np.ndarray:
    """The vector, or the vectors as columns of a matrix, that an operator is multiplied with, by a method of SciPy."""
    try:
        vectors = np.asarray(given)
    except (TypeError, ValueError, RuntimeError):  # ragged lists, tensors on a GPU
        vectors = np.empty(0, object)
    if vectors.dtype.kind not in "biufc":
        kind = "" if vectors.dtype == object else f", with elements of type {vectors.dtype}"
        raise InvalidArgumentError(f"The vector is {shown(given)}{kind}; expected real or complex numbers.")
    if vectors.ndim not in (1, 2) or len(vectors) != columns:
        raise InvalidArgumentError(
            f"The vector has the shape {vectors.shape}; expected ({columns},), or ({columns}, n) for n columns."
        )
    takes_matrix = method.endswith("mat")
    if method and (vectors.ndim == 1 if takes_matrix else vectors.size != columns):
        expected, other = ("a matrix", "vec") if takes_matrix else ("one vector", "mat")
        raise InvalidArgumentError(
            f"{method} takes {expected}, and got the shape {vectors.shape}; use {method[:-3]}{other}, or @ for both."
        )
    return vectors


def _product(multiply: Callable[[np.ndarray], np.ndarray], given: object, dtype: np.dtype) -> np.ndarray:
    """A product with columns of real or complex numbers: the real and imaginary parts are columns of one product."""
    X = np.asarray(given)
    kind = np.result_type(dtype, X.dtype)
    if X.dtype.kind != "c":
        return multiply(X).astype(kind, copy=False)
    count, product = X.shape[1], multiply(np.hstack([np.real(X), np.imag(X)]))
    result = np.empty((len(product), count), kind)
    # NumPy's stubs have the parts of arrays of a known complex type only
    result.real, result.imag = product[:, :count], product[:, count:]  # pyright: ignore[reportAttributeAccessIssue]
    return result


@functools.cache
def _operator_class() -> Any:
    base = require_scipy("sparse.linalg", "linear_operator").LinearOperator

    class JacobianOperator(base):  # type: ignore[misc, valid-type]
        """J or H, which multiplies vectors; see ``linear_operator`` and ``hessian_operator``."""

        def __init__(self, products: Any) -> None:
            super().__init__(products.dtype, products.shape)
            self._products = products

        def __matmul__(self, other: object) -> Any:
            return self.dot(other if isinstance(other, base) else _checked_operand(other, self.shape[1]))

        def dot(self, x: Any) -> Any:
            is_factor = isinstance(x, (base, numbers.Number))
            return super().dot(x if is_factor else _checked_operand(x, self.shape[1]))

        def matvec(self, x: object) -> np.ndarray:
            return super().matvec(_checked_operand(x, self.shape[1], "matvec"))

        def matmat(self, X: object) -> np.ndarray:
            return super().matmat(_checked_operand(X, self.shape[1], "matmat"))

        def rmatvec(self, x: object) -> np.ndarray:
            return super().rmatvec(_checked_operand(x, self.shape[0], "rmatvec"))

        def rmatmat(self, X: object) -> np.ndarray:
            return super().rmatmat(_checked_operand(X, self.shape[0], "rmatmat"))

        def _transpose(self) -> JacobianOperator:  # J is real, so that this is the adjoint, too
            own = self._products
            swapped = {"times": own.transposed_times, "transposed_times": own.times, "matrix": lambda: own.matrix().T}
            return JacobianOperator(SimpleNamespace(dtype=own.dtype, shape=own.shape[::-1], **swapped))

        _adjoint = _transpose

        def _matmat(self, X: np.ndarray) -> np.ndarray:
            return _product(self._products.times, X, self.dtype)

        def materialize(self) -> np.ndarray:
            """The matrix, of shape ``A.shape``: a NumPy array."""
            return self._products.matrix()

    return JacobianOperator


# Libraries that only some functions need, each with the extra of this package that installs it.

_EXTRAS = {"scipy": ("SciPy", "scipy"), "torch": ("PyTorch", "torch"), "matplotlib": ("matplotlib", "plot")}
_EXTRAS["cvxopt"] = ("CVXOPT", "cholmod")


def required(module: str, user: str) -> Any:
    """A module of one of these libraries; raises ImportError, which names the user and the extra, without it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        library, extra = _EXTRAS[module.split(".")[0]]
        raise ImportError(
            f"{user} needs {library}, which is not installed: python -m pip install '.[{extra}]' in a clone of "
            "taichi_ext"
        ) from error


def require_scipy(module: str, user: str) -> Any:
    """A module of SciPy; raises where it is not installed."""
    return required(f"scipy.{module}", user)
