"""check_hessian: the Hessian compared with central differences of the gradient."""

# pyright knows no types of arrays of any shape and type.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from taichi_ext.api.inputs.arguments import KernelCall
from taichi_ext.api.inputs.options import checked_options
from taichi_ext.api.inputs.types import Format
from taichi_ext.api.jacobian import prepared_form
from taichi_ext.api.plans.plan import Plan
from taichi_ext.checks.check import Comparison, Run, report_of
from taichi_ext.checks.reports import JacobianReport
from taichi_ext.errors import with_short_traceback


@with_short_traceback
def check_hessian(
    kernel: Callable[..., object],
    params: object,
    energy: object = None,
    *,
    args: tuple[object, ...] = (),
    step: float | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    most_entries: int | None = 200,
    raise_on_failure: bool = False,
    progress: bool | None = None,
    format: Format | None = None,
) -> JacobianReport:
    """Compare ``hessian(kernel, params, energy, args=args)`` with central differences of its gradient.

    The gradient is that of ``value_and_gradient``, which ``check_jacobian(kernel, params, energy)`` compares with
    differences of the energy.  It is computed twice for each checked entry of a parameter.  Afterwards, every field and
    array that the kernel changes is restored.

    Args:
        kernel: see ``hessian``.
        params: see ``hessian``.
        energy: see ``hessian``.
        args: see ``hessian``.
        step: see ``check_jacobian``.
        rtol: see ``check_jacobian``.
        atol: see ``check_jacobian``.
        most_entries: see ``check_jacobian``.
        raise_on_failure: see ``check_jacobian``.
        progress: see ``check_jacobian``.
        format: the format in which H is computed; see ``hessian``.

    Returns:
        The report, see ``check_jacobian``; its outputs are the gradients with respect to each parameter.

    Raises:
        CheckError: the report is not true, and ``raise_on_failure`` is set.
        InvalidArgumentError: see ``check_jacobian``.
        UnsupportedError: see ``hessian``.

    Example:
        >>> import taichi as ti
        >>> from taichi_ext import check_hessian
        >>> ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
        >>> x, energy = ti.field(ti.f64, shape=2), ti.field(ti.f64, shape=())
        >>> x[0], x[1] = 1.0, 2.0
        >>> @ti.kernel
        ... def rosenbrock():
        ...     energy[None] += (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2
        >>> print(check_hessian(rosenbrock, x, energy))  # doctest: +ELLIPSIS
        H of rosenbrock agrees with central differences (relative tolerance 1e-06)
          output ...
          gradient with respect to params (field x of shape (2,))  params (field x of shape (2,))  4 of 4 ...
    """
    way = Comparison(step, rtol, atol, most_entries, progress, raise_on_failure)
    way.check()
    plan, call = prepared_form(kernel, params, energy, args, checked_options(None, "auto", None, format), "hessian")
    gradient, _ = prepared_form(kernel, params, energy, args, checked_options(None, "auto", None, None), "gradient")
    return report_of(_GradientRun(plan, gradient, call), way, "H")


class _GradientRun(Run):
    """The kernel, its parameters, and the gradient with respect to each of them in place of outputs."""

    def __init__(self, plan: Plan, gradient: Plan, call: KernelCall) -> None:
        super().__init__(plan, call)
        self._gradient = gradient
        self.names = [f"gradient with respect to {param.name}" for param in self.params]

    def results(self, args: tuple[object, ...]) -> list[np.ndarray]:
        """The gradient with respect to each parameter."""
        evaluation = self._gradient.start(self.call.with_args(args))
        (blocks,) = evaluation.blocks()
        shapes = evaluation.parameter_shapes()
        return [np.reshape(np.asarray(b, np.float64), s) for s, b in zip(shapes, blocks, strict=True)]
