"""``plot_fit``: the progress of a fit, and its remaining residuals."""

# Arrays are of any shape and type here, which pyright takes for unknown.
# The problem of a result is private to the package, not to its module.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# Input is checked, whatever its annotation says.
# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from taichi_ext.errors import InvalidArgumentError, shown, with_short_traceback
from taichi_ext.interop.plot_axes import side_given
from taichi_ext.interop.plots import MOST_NAMES, PAGE, TEXT, new_figure
from taichi_ext.solvers.results import LeastSquaresResult

_MOST_BINS = 60
_MOST_PARAMS = 32  # whose correlations are drawn


@with_short_traceback
def plot_fit(result: LeastSquaresResult) -> Any:
    """Draw a fit: its cost after each iteration, its residuals, and the correlations of up to 32 parameters.

    Steps that were rejected are marked.  The curve over the residuals is the normal distribution of their standard
    deviation, ``sqrt(2 * cost / (M - P))``: where residuals are far beyond, a robust loss may help.  Correlations near
    1 or -1 are of parameters that the residuals hardly tell apart; the panel is left out where they cannot.

    Args:
        result: of ``least_squares``; with shards, it has no residuals.

    Returns:
        The matplotlib figure, which pyplot does not keep: ``figure.savefig("fit.png")``.

    Raises:
        ImportError: matplotlib is not installed (the extra ``plot``).
        InvalidArgumentError: ``result`` is none of ``least_squares``.

    Example:
        >>> from taichi_ext import plot_fit
        >>> def save(result):  # of least_squares
        ...     plot_fit(result).savefig("fit.png")
    """
    if not isinstance(result, LeastSquaresResult):
        raise InvalidArgumentError(f"result is {shown(result)}; expected a result of least_squares.")
    figure = new_figure("plot_fit")
    panels = [_draw_history]
    if result.fun is not None:
        panels.append(_draw_residuals)
    correlations = _correlations(result)
    count = len(panels) + (correlations is not None)
    figure.set_size_inches(min(PAGE, 4.5 * count), 3.6 if count < 3 else 6.4)
    every = figure.subplots(1 if count < 3 else 2, min(count, 2), squeeze=False).ravel()
    for draw, axes in zip(panels, every, strict=False):
        draw(axes, result)
    if correlations is not None:
        image = every[count - 1].imshow(correlations, cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
        every[count - 1].set_title("correlations of the parameters")
        names, every_few = _names(result), 1 + (len(result.grad) - 1) // MOST_NAMES
        for axis in (every[count - 1].xaxis, every[count - 1].yaxis):
            axis.set_ticks(range(len(names))[::every_few], names[::every_few], fontsize=TEXT)
        every[count - 1].tick_params(axis="x", rotation=90)
        figure.colorbar(image, ax=every[count - 1])
    for axes in every[count:]:
        axes.remove()
    return figure


def _draw_history(axes: Any, result: LeastSquaresResult) -> None:
    numbers, costs = (np.array([getattr(line, name) for line in result.history]) for name in ("number", "cost"))
    rejected = [line.number > 0 and not line.change > 0 for line in result.history]
    axes.plot(numbers, costs, "o-", markersize=3, label="cost")
    if any(rejected):
        axes.plot(numbers[rejected], costs[rejected], "x", color="C3", label="rejected step")
        axes.legend(fontsize=TEXT)
    if (costs > 0).all():
        axes.set_yscale("log")
    axes.get_xaxis().get_major_locator().set_params(integer=True)
    axes.set(title=f"cost {result.cost:.4g}", xlabel="iteration", ylabel="cost")


def _draw_residuals(axes: Any, result: LeastSquaresResult) -> None:
    residuals = np.asarray(result.fun)
    free = len(residuals) - len(result.grad)
    bins = min(_MOST_BINS, max(5, round(math.sqrt(len(residuals)))))
    axes.hist(residuals, bins=bins, density=True)
    sigma = math.sqrt(2 * result.cost / free) if free > 0 else 0.0
    if sigma > 0:
        at = np.linspace(-4 * sigma, 4 * sigma, 200)
        axes.plot(at, np.exp(-0.5 * (at / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi)), color="C1")
    axes.set(title=f"{len(residuals)} residuals\nstandard deviation {sigma:.3g}", xlabel="residual", ylabel="density")


def _names(result: LeastSquaresResult) -> list[str]:
    """The numbers of the params, or the local coordinates of points of manifolds, as users name them."""
    problem, names = result._problem, []
    for n, (leaf, shape, part) in enumerate(zip(problem.params, problem.shapes, problem.parts, strict=True)):
        side = side_given(f"[{n}]", leaf, "params")
        side = side if side.shape is not None else replace(side, shape=shape)
        is_local = math.prod(part.shape) != math.prod(shape)
        names += [f"{side.name}, {k}" if is_local else side.entry(k) for k in range(math.prod(part.shape))]
    return names


def _correlations(result: LeastSquaresResult) -> np.ndarray | None:
    if not 1 < len(result.grad) <= _MOST_PARAMS:
        return None
    try:
        covariance = result.covariance(variance=1.0)
    except InvalidArgumentError:  # the residuals do not determine all parameters
        return None
    errors = np.sqrt(covariance.diagonal())
    return covariance / errors / errors[:, None]
