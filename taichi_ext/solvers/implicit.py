"""``custom_root``, ``implicit_jacobian``: derivatives of the solution of an equation, whatever solves it.

If ``residual(x, p) = 0`` defines x near a solution, then ``dx/dp = -(dr/dx)^-1 dr/dp`` (the implicit function theorem;
Griewank and Walther, Evaluating Derivatives, 2nd ed., 2008, chapter 15).  The iterations that led to x do not matter.
"""

# pyright knows no types of Taichi and SciPy, nor of arrays of any shape and type.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import functools
import importlib.util
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from taichi_ext import backend
from taichi_ext.api.inputs.arguments import flatten
from taichi_ext.api.inputs.options import Options, check_number, checked_choice
from taichi_ext.api.jacobian import prepared_form
from taichi_ext.errors import InvalidArgumentError, shown, unexpected, with_short_traceback
from taichi_ext.runtime.launching.pipeline import Root
from taichi_ext.runtime.memory.state import State
from taichi_ext.runtime.python.dual_numbers import plain_number, warn_at_user
from taichi_ext.runtime.python.reached import reachable_arrays
from taichi_ext.runtime.sparse.matrices import positive_factors
from taichi_ext.solvers.newton import Cholmod
from taichi_ext.solvers.operator import linear_operator, require_scipy

Solve = Callable[..., np.ndarray]  # takes columns of right-hand sides; transposed=, for that of dr/dx; is_rough=

_Linear = Literal["auto", "direct", "cg", "gmres"]
_FEW = 256  # unknowns, up to which dr/dx is dense
_MANY = 200_000  # unknowns, from which on "auto" does not decompose dr/dx
_MOST_ITERATIONS = 10_000


@dataclass(eq=False, repr=False)
class ImplicitSolver:
    """What ``custom_root`` returns; call it in place of ``solve``."""

    _solve: Callable[..., object]
    _equation: Equation
    _residual: Callable[..., object]
    _tol: float

    def __repr__(self) -> str:
        return f"<custom_root of {_name(self._solve)}>"

    def __call__(self, *args: object) -> Any:
        """Run ``solve``; in a pipeline that is differentiated, its unknowns get the derivatives of the solution."""
        follower = backend.pipeline_follower()
        if follower is None:
            return self._solve(*args)
        plain = tuple(map(plain_number, args))
        return follower.root(
            Root(
                name=_name(self._solve),
                solver=lambda: self._solve(*plain),
                residual=lambda: self._residual(*args),
                unknowns=self._equation.unknowns,
                residuals=self._equation.residuals,
                arrays=list(reachable_arrays(self._residual, args)),
                step=functools.partial(self._step, plain),
            )
        )

    def _step(
        self, args: tuple[object, ...], values: np.ndarray, right: np.ndarray, *, transposed: bool = False
    ) -> np.ndarray:
        """The solution for each column of ``right``; warns where the residuals are not zero."""
        if not np.isfinite(values).all():
            raise InvalidArgumentError(
                f"The residuals of {_name(self._residual)} are not finite at the solution of {_name(self._solve)}."
            )
        solve = self._equation.system(args)
        off = np.abs(solve(values[:, None], is_rough=True)).max(initial=0.0)
        size = np.abs(self._equation.solution()).max(initial=0.0)
        if not off <= self._tol * max(size, np.finfo(np.float64).tiny):
            warn_at_user(
                f"{_name(self._solve)} has not solved its equation: by the residuals, the unknowns are off by about "
                f"{off:.2g}, the largest of them being {size:.2g}, and so are their derivatives. Let it iterate "
                f"longer, or give a larger tol= than {self._tol:g}."
            )
        return solve(right, transposed=transposed)


class Equation:
    """Residuals that are zero at the solution, and the linear system of their derivatives.

    Args:
        residual: a kernel or pipeline that computes the residuals from the unknowns.
        unknowns: fields and arrays, or a list of them.
        residuals: fields and arrays, or a list of them.
        linear: the method for linear systems, see ``custom_root``.
    """

    def __init__(self, residual: Callable[..., object], unknowns: object, residuals: object, linear: str) -> None:
        self._call = residual, unknowns, residuals
        self._linear = checked_choice("linear", linear, get_args(_Linear))
        self.unknowns, self.residuals = ([leaf for _, leaf in flatten(x)[0]] for x in (unknowns, residuals))
        for name, leaves in (("unknowns", self.unknowns), ("residuals", self.residuals)):
            for leaf in leaves:
                is_field = isinstance(leaf, backend.Field)
                dtype = leaf.dtype if is_field else backend.is_array(leaf) and backend.outer_array_dtype(leaf)
                if not backend.is_real(dtype):
                    raise InvalidArgumentError(f"{name} has {shown(leaf)}; expected fields and arrays of real numbers.")
        rows, columns = (sum(map(_count, x)) for x in (self.residuals, self.unknowns))
        if rows != columns or not rows:
            raise InvalidArgumentError(
                f"unknowns have {columns} numbers and residuals {rows}; there must be as many of both."
            )
        self._count = columns

    def solution(self) -> np.ndarray:
        """The unknowns as one vector."""
        return np.concatenate([backend.as_numpy(x).reshape(-1) for x in self.unknowns])

    def system(self, args: tuple[object, ...]) -> Solve:
        """The linear system of dr/dx at the present state, which is left as it is."""
        method = self._linear
        if method == "auto":
            method = "direct" if self._count <= _MANY else "gmres"
        solve = self._factors(args) if method == "direct" else self._iterations(args, method)

        def checked(right: np.ndarray, **options: bool) -> np.ndarray:
            result = solve(right.astype(np.float64), **options)
            if not np.isfinite(result).all() and np.isfinite(right).all():
                raise self._singular()
            return result

        return checked

    def _factors(self, args: tuple[object, ...]) -> Solve:
        """Decompose dr/dx."""
        matrix, factors, eps = self._matrix(args), None, np.finfo(np.float64).eps
        if self._count <= _FEW:
            with np.errstate(all="ignore"):
                if not np.linalg.cond(matrix, 1) < 1 / eps:
                    raise self._singular()
        else:
            linalg = require_scipy("sparse.linalg", "custom_root")
            is_symmetric = not abs(matrix - matrix.T).max() > 8 * eps * abs(matrix).max()
            try:
                by_cholesky = Cholmod() if importlib.util.find_spec("cvxopt") else positive_factors
                factors = (by_cholesky(matrix) if is_symmetric else None) or linalg.splu(matrix.tocsc())
            except RuntimeError:  # exactly singular
                raise self._singular() from None
            pivots = factors.pivots if isinstance(factors, Cholmod) else np.abs(factors.U.diagonal())
            if pivots.min() <= eps * pivots.max():
                raise self._singular()

        def solve(right: np.ndarray, *, transposed: bool = False, is_rough: bool = False) -> np.ndarray:
            if factors is None:
                return np.linalg.solve(matrix.T if transposed else matrix, right)
            return factors.solve(right, "T" if transposed else "N")

        return solve

    def _iterations(self, args: tuple[object, ...], method: str) -> Solve:
        """Multiply with dr/dx.  A rough solution for random numbers finds out whether that is singular."""
        solver = getattr(require_scipy("sparse.linalg", f"custom_root with linear={method!r}"), method)
        operator, count = linear_operator(*self._call, args=args), self._count
        least = 1e-10 if operator.dtype == np.float64 else 1e-6

        def solved(A: Any, b: np.ndarray, rtol: float) -> np.ndarray:
            with np.errstate(all="ignore"):
                factor = operator if method == "cg" else A  # a product with it costs less than one with its transpose
                result, status = solver(factor, b, rtol=rtol, maxiter=min(10 * count, _MOST_ITERATIONS))
            if status or not np.linalg.norm(A @ result - b) <= 10 * rtol * np.linalg.norm(b):
                raise InvalidArgumentError(
                    f"linear={method!r} has not solved the linear system of {self._name} for its unknowns: it is "
                    f"singular, {'not symmetric positive definite, ' * (method == 'cg')}or needs too many iterations. "
                    "Use linear='direct', which names a singular system."
                )
            return result

        solved(operator, np.random.default_rng(0).standard_normal(count), 0.1 / math.sqrt(count))

        def solve(right: np.ndarray, *, transposed: bool = False, is_rough: bool = False) -> np.ndarray:
            A = operator.T if transposed else operator
            return np.column_stack([solved(A, b, 0.1 if is_rough else least) for b in right.T])

        return solve

    def _matrix(self, args: tuple[object, ...]) -> Any:
        """dr/dx in float64."""
        try:
            return matrix_of(*self._call, args, "csr" if self._count > _FEW else None).astype(np.float64)
        except InvalidArgumentError as error:  # about params and outputs of the residual
            text = re.sub("^outputs", "residuals", re.sub("^params", "unknowns", str(error)))
            raise InvalidArgumentError(text) from error

    @property
    def _name(self) -> str:
        return _name(self._call[0])

    def _singular(self) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"The derivative of the residuals of {self._name} with respect to its unknowns is singular: they do "
            "not determine the unknowns. Add an equation for those that are free, such as a fixed value."
        )


def matrix_of(kernel: Any, params: Any, outputs: Any, args: tuple[object, ...], format: str | None = None) -> Any:
    """J as one matrix, a NumPy or CSR array, from a run whose effects are undone."""
    plan, call = prepared_form(kernel, params, outputs, args, Options(format=format))
    evaluation = plan.start(call, state=State(), as_matrix=True)
    try:
        return backend.as_numpy(evaluation.jacobian())
    finally:
        evaluation.restore()


@with_short_traceback
def custom_root(
    solve: Callable[..., object],
    residual: Callable[..., object],
    unknowns: object,
    residuals: object,
    *,
    linear: _Linear = "auto",
    tol: float = 1e-4,
) -> ImplicitSolver:
    """A solver whose derivative is that of the equation it solves, rather than of its iterations.

    Call the result in a pipeline in place of ``solve``.  It runs ``solve`` as it is, kernels, Python or a library, and
    nothing in it is differentiated.  The derivative of the unknowns x is that of the implicit function
    ``residual(x, p) = 0``: ``dx = -(dr/dx)^-1 (dr/dp) dp``, over everything that ``residual`` reads.  It needs one run
    of ``residual`` with tangents, dr/dx, and one solution of a linear system for each column.

    Args:
        solve: a function or kernel that stores the solution in the unknowns.
        residual: a kernel, or a function that launches kernels, which computes the residuals from the unknowns.  It
            takes the same arguments as ``solve``.  What it stores is undone.
        unknowns: the fields or arrays that ``solve`` solves for, or a list of them.
        residuals: the fields or arrays that ``residual`` writes, or a list of them, with as many numbers in all.
        linear: the method for linear systems with dr/dx.  "direct" decomposes it: a dense matrix up to 256 unknowns,
            a sparse one for more, by CHOLMOD (the extra ``cholmod``) where that is installed and dr/dx is symmetric
            positive definite, else by SciPy's SuperLU.  "cg" (symmetric positive definite dr/dx) and "gmres" need only
            products with it.  "auto" is "direct" up to 200,000 unknowns, and "gmres" for more.
        tol: relative error of the unknowns, estimated from the residuals by one step of Newton's method, from which on
            a ``DerivativeWarning`` says that ``solve`` has not converged.

    Returns:
        A function that takes the arguments of ``solve`` and returns its result, in which numbers are constants.

    Raises:
        InvalidArgumentError: there are not as many residuals as unknowns; in a call, dr/dx is singular, or the
            residuals are not finite, or are not written, or depend on something else that ``solve`` changes.
        UnsupportedError: in a call, a second derivative is wanted.
        ImportError: SciPy (the extra ``scipy``) is not installed, and there are more than 256 unknowns.

    Example:
        A fixed point ``x = g(x)`` is the root of ``x - g(x)``.

        >>> import taichi as ti
        >>> from taichi_ext import custom_root, jacobian
        >>> ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
        >>> a, x, r = (ti.field(ti.f64, shape=()) for _ in range(3))
        >>> @ti.kernel
        ... def iterate():
        ...     for _ in range(60):
        ...         x[None] = ti.cos(a[None] * x[None])
        >>> @ti.kernel
        ... def equation():
        ...     r[None] = x[None] - ti.cos(a[None] * x[None])
        >>> root = custom_root(iterate, equation, x, r)
        >>> def pipeline():
        ...     root()
        >>> a[None] = 1.0
        >>> float(jacobian(pipeline, a, x).round(4))
        -0.2975
    """
    for name, function in (("solve", solve), ("residual", residual)):
        if not callable(function):
            raise unexpected(name, function, "a function or kernel")
    check_number("tol", tol, "a relative error of the unknowns", is_optional=False)
    return ImplicitSolver(solve, Equation(residual, unknowns, residuals, linear), residual, tol)


@with_short_traceback
def implicit_jacobian(
    residual: Callable[..., object],
    unknowns: object,
    params: object,
    residuals: object,
    *,
    args: tuple[object, ...] = (),
    linear: _Linear = "auto",
) -> Any:
    """The Jacobian of the solution of ``residual(x, p) = 0`` at the present state, without solving it.

    ``J = -(dr/dx)^-1 dr/dp``; see ``custom_root``.  Nothing is changed.

    Args:
        residual: a kernel, or a function that launches kernels, which computes the residuals.
        unknowns: the fields or arrays x that hold the solution, or a list, tuple or dict of them.
        params: the parameters p, see ``jacobian``.
        residuals: the fields or arrays that ``residual`` writes, with as many numbers as the unknowns.
        args: positional arguments of ``residual``.
        linear: see ``custom_root``.

    Returns:
        Arrays in the structure of unknowns, and in it that of params, of shape ``unknowns.shape + element_shape +
        params.shape + element_shape``, in float64.

    Raises:
        InvalidArgumentError: there are not as many residuals as unknowns, or dr/dx is singular.

    Example:
        >>> import taichi as ti
        >>> from taichi_ext import implicit_jacobian
        >>> ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
        >>> p, x, r = (ti.field(ti.f64, shape=()) for _ in range(3))
        >>> @ti.kernel
        ... def cube_root():
        ...     r[None] = x[None] ** 3 - p[None]
        >>> p[None], x[None] = 8.0, 2.0
        >>> float(implicit_jacobian(cube_root, x, p, r).round(6))
        0.083333
    """
    equation = Equation(residual, unknowns, residuals, linear)
    if any(leaf is unknown for _, leaf in flatten(params)[0] for unknown in equation.unknowns):
        raise InvalidArgumentError("params and unknowns have the same field or array; leave it out of one of the two.")
    plan, call = prepared_form(residual, params, residuals, args, Options())
    shapes = plan.start(call).parameter_shapes()
    right = matrix_of(residual, params, residuals, args)
    matrix = -equation.system(args)(right)
    (leaves, rebuild), (given, rebuild_params) = flatten(unknowns), flatten(params)
    assert len(given) == len(shapes)
    rows = np.split(matrix, np.cumsum([_count(x) for _, x in leaves])[:-1])
    widths = np.cumsum([math.prod(shape) for shape in shapes])[:-1]

    def of(x: Any, block: np.ndarray) -> Any:
        outer = backend.as_numpy(x).shape
        parts = zip(np.split(block, widths, axis=1), shapes, strict=True)
        return rebuild_params([part.reshape((*outer, *shape)) for part, shape in parts])

    return rebuild([of(x, block) for (_, x), block in zip(leaves, rows, strict=True)])


def _count(x: Any) -> int:
    return int(backend.as_numpy(x).size)


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", repr(function)).split("<locals>.")[-1]
