"""``custom_root``, ``implicit_jacobian``: derivatives of the solution of an equation, whatever solves it.

If ``residual(x, p) = 0`` defines x near a solution, then ``dx/dp = -(dr/dx)^-1 dr/dp`` (the implicit function theorem;
Griewank and Walther, Evaluating Derivatives, 2nd ed., 2008, chapter 15).  The iterations that led to x do not matter.
"""

# pyright knows no types of Taichi and SciPy, nor of arrays of any shape and type.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np

from taichi_ext import backend
from taichi_ext.api.inputs.arguments import flatten
from taichi_ext.api.inputs.options import Options, check_number, checked_choice
from taichi_ext.api.jacobian import prepared_form
from taichi_ext.errors import InvalidArgumentError, shown, with_short_traceback
from taichi_ext.runtime.launching.roots import Root
from taichi_ext.runtime.memory.state import State
from taichi_ext.runtime.python.dual_numbers import plain_number
from taichi_ext.runtime.python.warning import warn_at_user
from taichi_ext.solvers.extra import require_scipy
from taichi_ext.solvers.operator import linear_operator

Solve = Callable[[np.ndarray, bool], np.ndarray]  # takes columns of right-hand sides, and whether to transpose dr/dx

_Linear = Literal["auto", "direct", "cg", "gmres"]
_FEW = 256  # unknowns, up to which dr/dx is dense
_MANY = 200_000  # unknowns, from which on "auto" does not decompose dr/dx


class ImplicitSolver:
    """What ``custom_root`` returns; call it in place of ``solve``."""

    def __init__(
        self, solve: Callable[..., object], equation: Equation, residual: Callable[..., object], tol: float
    ) -> None:
        self._solve, self._equation, self._residual, self._tol = solve, equation, residual, tol

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
                solve=lambda: self._solve(*plain),
                residual=lambda: self._residual(*args),
                unknowns=self._equation.unknowns,
                residuals=self._equation.residuals,
                step=functools.partial(self._step, plain),
            )
        )

    def _step(
        self, args: tuple[object, ...], values: np.ndarray, right: np.ndarray, *, transposed: bool = False
    ) -> np.ndarray:
        """The solution for each column of ``right``; warns where the residuals are not zero."""
        found = self._equation.solved(args, values[:, None], right, transposed=transposed)
        off, size = np.abs(found[:, 0]).max(initial=0.0), np.abs(self._equation.solution()).max(initial=0.0)
        if not off <= self._tol * max(size, np.finfo(np.float64).tiny):
            warn_at_user(
                f"{_name(self._solve)} has not solved its equation: by the residuals, the unknowns are off by about "
                f"{off:.2g}, the largest of them being {size:.2g}, and so are their derivatives. Let it iterate "
                f"longer, or give a larger tol= than {self._tol:g}."
            )
        return found[:, 1:]


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
                if not isinstance(leaf, backend.Field) and not backend.is_array(leaf):
                    raise InvalidArgumentError(f"{name} has {shown(leaf)}; expected fields and arrays.")
        rows, columns = (sum(map(_count, x)) for x in (self.residuals, self.unknowns))
        if rows != columns or not rows:
            raise InvalidArgumentError(
                f"unknowns have {columns} numbers and residuals {rows}; there must be as many of both."
            )
        self._count = columns

    def solution(self) -> np.ndarray:
        """The unknowns as one vector."""
        return np.concatenate([backend.as_numpy(x).reshape(-1) for x in self.unknowns])

    def solved(
        self, args: tuple[object, ...], values: np.ndarray, right: np.ndarray, *, transposed: bool = False
    ) -> np.ndarray:
        """The columns of ``(dr/dx)^-1 values`` and of ``(dr/dx)^-1 right``, or ``(dr/dx)^-T right`` if transposed."""
        method = self._linear
        if method == "auto":
            method = "direct" if self._count <= _MANY else "gmres"
        solve = self._factors(args) if method == "direct" else self._iterations(args, method)
        if transposed:
            found = np.hstack([solve(values.astype(np.float64), False), solve(right.astype(np.float64), True)])
        else:
            found = solve(np.hstack([values, right]).astype(np.float64), False)
        if not np.isfinite(found).all() and np.isfinite(values).all() and np.isfinite(right).all():
            raise self._singular()
        return found

    def _factors(self, args: tuple[object, ...]) -> Solve:
        """Decompose dr/dx."""
        matrix = self._matrix(args, "csr" if self._count > _FEW else None).astype(np.float64)
        if self._count <= _FEW:
            with np.errstate(all="ignore"):
                if not np.linalg.cond(matrix, 1) < 1 / np.finfo(np.float64).eps:
                    raise self._singular()

            def solve(right: np.ndarray, transposed: bool) -> np.ndarray:
                return np.linalg.solve(matrix.T if transposed else matrix, right)

            return solve
        splu = require_scipy("sparse.linalg", "custom_root with more than 256 unknowns").splu
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                factors = splu(matrix.tocsc())
            except RuntimeError:  # exactly singular
                raise self._singular() from None
        pivots = np.abs(factors.U.diagonal())
        if pivots.min() <= np.finfo(np.float64).eps * pivots.max():
            raise self._singular()
        return lambda b, transposed: factors.solve(b, "T" if transposed else "N")

    def _iterations(self, args: tuple[object, ...], method: str) -> Solve:
        """Multiply with dr/dx."""
        solver = getattr(require_scipy("sparse.linalg", f"custom_root with linear={method!r}"), method)
        operator = linear_operator(*self._call, args=args)
        rtol = 1e-10 if operator.dtype == np.float64 else 1e-6

        def solve(right: np.ndarray, transposed: bool) -> np.ndarray:
            columns = []
            for b in right.T:
                found, status = solver(operator.T if transposed and method == "gmres" else operator, b, rtol=rtol)
                if status:
                    raise InvalidArgumentError(
                        f"linear={method!r} has not solved the linear system of {self._name} in {status} iterations. "
                        "Use linear='direct'" + (", or 'gmres' if it is not symmetric." if method == "cg" else ".")
                    )
                columns.append(found)
            return np.column_stack(columns)

        return solve

    def _matrix(self, args: tuple[object, ...], format: str | None) -> Any:
        """dr/dx at the present state, which is left as it is."""
        return matrix_of(*self._call, args, format)

    @property
    def _name(self) -> str:
        return _name(self._call[0])

    def _singular(self) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"The derivative of the residuals of {self._name} with respect to its unknowns is singular: they do "
            "not determine the unknowns. Add an equation for those that are free, such as a fixed value."
        )


def matrix_of(kernel: Any, params: Any, outputs: Any, args: tuple[object, ...], format: str | None = None) -> Any:
    """J as one matrix, from a run whose effects are undone."""
    plan, call = prepared_form(kernel, params, outputs, args, Options(format=format))
    state = State()
    evaluation = plan.start(call, state=state, as_matrix=True)
    try:
        return evaluation.jacobian()
    finally:
        state.undo()


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
            a sparse one (SciPy's SuperLU) for more.  "cg" (symmetric positive definite dr/dx) and "gmres" need only
            products with it.  "auto" is "direct" up to 200,000 unknowns, and "gmres" for more.
        tol: relative error of the unknowns, estimated from the residuals by one step of Newton's method, from which on
            a ``DerivativeWarning`` says that ``solve`` has not converged.

    Returns:
        A function that takes the arguments of ``solve`` and returns its result.

    Raises:
        InvalidArgumentError: there are not as many residuals as unknowns; in a call, dr/dx is singular, or the
            residuals depend on something else that ``solve`` changes.
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
            raise InvalidArgumentError(f"{name} is {shown(function)}; expected a function or kernel.")
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
    plan, call = prepared_form(residual, params, residuals, args, Options())
    shapes = plan.start(call).parameter_shapes()
    right = matrix_of(residual, params, residuals, args)
    found = -equation.solved(args, np.zeros((len(right), 0)), right)
    (leaves, rebuild), (given, rebuild_params) = flatten(unknowns), flatten(params)
    assert len(given) == len(shapes)
    rows = np.split(found, np.cumsum([_count(x) for _, x in leaves])[:-1])
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
