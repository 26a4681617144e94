"""``value_and_gradient``: an energy and its gradient, in this process or of shards of data."""

# pyright knows no types of Taichi, torch and SciPy, nor of arrays of any shape and type.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from taichi_ext.api.inputs.options import checked_options
from taichi_ext.api.inputs.progress import check_progress, progress_bar
from taichi_ext.api.inputs.types import Kernel
from taichi_ext.api.jacobian import prepared_form
from taichi_ext.api.products import in_structure
from taichi_ext.api.runs.by_adjoint import value_and_row
from taichi_ext.errors import with_short_traceback
from taichi_ext.solvers.bounds import pieces_of
from taichi_ext.solvers.executors import Workers
from taichi_ext.solvers.shard_worker import GRADIENT, GradientSum
from taichi_ext.solvers.shards import AnyExecutor, Shards, check_shard_options


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
        params: see ``hessian``.
        energy: see ``hessian``.
        args: see ``hessian``.
        max_memory: see ``vjp``.
        shards: the arguments of the factory, a tuple for each shard.
        at: with ``shards``: the values of the params.
        executor: with ``shards``: see ``map_jacobian``.
        init: with ``shards``: see ``map_jacobian``.
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
    if shards is not None:
        return _of_shards(Shards(kernel, shards, at, "at", init, None), executor, progress)
    plan, call = prepared_form(
        kernel, params, energy, args, checked_options(max_memory, "auto", None, None), "gradient"
    )
    check_progress(progress)
    evaluation = plan.start(call, progress="stages" if progress is None else progress)
    value, row = value_and_row(evaluation)
    return value, in_structure(plan, evaluation, pieces_of(row, evaluation.parameter_shapes()), "params")


def _of_shards(shards: Shards, executor: AnyExecutor, progress: bool | None) -> tuple[float, Any]:
    check_progress(progress)
    with Workers(executor) as workers, progress_bar(progress or False, "shards", len(shards)) as advance:
        total = GradientSum(0.0, 0 * shards.x)
        for total in accumulate(workers.answers(shards.tasks(shards.x, GRADIENT)), GradientSum.plus):  # noqa: B007
            advance(1)
    return total.value, shards.split(total.gradient)
