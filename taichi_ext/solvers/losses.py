"""Robust losses: functions of squared residuals, and the scaling of residuals and rows of J."""

# pyright knows no types of arrays of any shape and type.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np

from taichi_ext.api.inputs.arguments import flatten
from taichi_ext.api.inputs.options import check_number
from taichi_ext.errors import InvalidArgumentError, shown, unexpected

_LEAST_CURVATURE = 0.1  # of a loss, as a share of its slope
Values = tuple[np.ndarray, np.ndarray, np.ndarray]  # rho(z), rho'(z), rho''(z)


def _soft_l1(z: np.ndarray) -> Values:
    t = 1 + z
    return 2 * np.expm1(0.5 * np.log1p(z)), t**-0.5, -0.5 * t**-1.5  # sqrt(t) - 1 loses the digits of a small z


def _huber(z: np.ndarray) -> Values:
    t = np.maximum(z, 1.0)
    return np.where(z <= 1, z, 2 * np.sqrt(t) - 1), t**-0.5, np.where(z <= 1, 0.0, -0.5 * t**-1.5)


def _cauchy(z: np.ndarray) -> Values:
    t = 1 / (1 + z)
    return np.log1p(z), t, -(t**2)


def _arctan(z: np.ndarray) -> Values:
    t = 1 / (1 + z**2)
    return np.arctan(z), t, -2 * z * t**2


def _tukey(z: np.ndarray) -> Values:
    t, inside = np.maximum(1 - z, 0.0), np.minimum(z, 1.0)
    return inside * (1 - inside * (1 - inside / 3)), t**2, -2 * t


# As in SciPy; Tukey's biweight as in Ceres, where residuals past the scale have no influence.
LOSSES: dict[str, Callable[[np.ndarray], Values]] = {
    "linear": lambda z: (z, np.ones_like(z), np.zeros_like(z)),
    "soft_l1": _soft_l1,
    "huber": _huber,
    "cauchy": _cauchy,
    "arctan": _arctan,
    "tukey": _tukey,
}

Loss = Literal["linear", "soft_l1", "huber", "cauchy", "arctan", "tukey"]
LossOver = Literal["entries", "last axis"]
assert get_args(Loss) == tuple(LOSSES)


class Robust:
    """The cost of residuals u: half the sum of ``s**2 rho(z / s**2)``, where z are their squares and s the scales.

    Args:
        loss: a name or a function, or a structure of those like the residuals.
        scale: a positive number, or such a structure.
        over: "entries", or "last axis" for the squared norms along the last axis of each output.
        residuals: the structure of the residuals.
        shapes: of the outputs.
    """

    def __init__(self, loss: Any, scale: Any, over: str, residuals: Any, shapes: list[tuple[int, ...]]) -> None:
        losses, scales = _for_each(loss, residuals, "loss"), _for_each(scale, residuals, "f_scale")
        for given in losses:
            if not callable(given) and not (isinstance(given, str) and given in LOSSES):
                names = ", ".join(map(repr, LOSSES))
                raise unexpected("loss", given, f"one of {names}, or a function")
        for given in scales:
            check_number("f_scale", given, "the size of an outlier", is_optional=False)
        self.is_linear = all(given == "linear" for given in losses)
        widths = [shape[-1] if over == "last axis" and shape else 1 for shape in shapes]
        self._is_single = all(width == 1 for width in widths)
        sizes = [math.prod(shape) // max(1, width) for shape, width in zip(shapes, widths, strict=True)]
        self._ends = np.cumsum(sizes)
        self._width = np.repeat(widths, sizes)
        self._losses = [LOSSES[given] if isinstance(given, str) else given for given in losses]
        self._scales = [float(given) ** 2 for given in scales]

    def rho(self, z: np.ndarray) -> np.ndarray:
        """The loss of squares, with its first two derivatives, of shape (3, m)."""
        parts = np.split(z, self._ends[:-1])
        return np.concatenate([_of(*p) for p in zip(self._losses, self._scales, parts, strict=True)], axis=1)

    def apply(self, u: np.ndarray) -> tuple[float, np.ndarray, np.ndarray | None]:
        """The cost of residuals; residuals and factors of rows of J that have its gradient, and nearly its curvature.

        The second derivative of the loss counts as in B. Triggs et al., Bundle adjustment: a modern synthesis, 2000,
        section 4.3, with a least curvature; that of norms does not, as in Ceres for losses that are concave.
        """
        if self.is_linear:
            with np.errstate(over="ignore"):
                return 0.5 * float((u * u).sum()), u, None  # which BLAS's threads do not change
        starts = np.cumsum(self._width) - self._width
        z = u * u if self._is_single else np.add.reduceat(u * u, starts)
        rho, slope, curvature = self.rho(z)
        weight = np.maximum(slope + 2 * z * curvature, _LEAST_CURVATURE * slope) if self._is_single else slope
        factor = np.sqrt(weight)
        share = np.divide(slope, factor, out=np.zeros_like(slope), where=factor > 0)
        if not self._is_single:
            share, factor = np.repeat(share, self._width), np.repeat(factor, self._width)
        return 0.5 * float(rho.sum()), share * u, factor


def _of(loss: Callable[[np.ndarray], object], scale: float, z: np.ndarray) -> np.ndarray:
    found = np.asarray(loss(z / scale))
    if found.shape != (3, len(z)) or found.dtype.kind not in "fiu":
        raise InvalidArgumentError(
            f"loss returns an array of shape {found.shape} and type {found.dtype} for {len(z)} squares; expected real "
            f"numbers of shape (3, {len(z)}): the loss and its first and second derivative."
        )
    is_wrong = np.isfinite(z) & (~np.isfinite(found).all(axis=0) | (found[1] < 0))
    if is_wrong.any():
        n = int(np.argmax(is_wrong))
        raise InvalidArgumentError(
            f"loss and its derivatives of {z[n] / scale:g}, a square over f_scale**2, are {found[:, n]}; expected "
            "finite numbers, and a first derivative that is not negative."
        )
    return found * [[scale], [1.0], [1 / scale]]


def _for_each(given: object, residuals: object, what: str) -> list[Any]:
    """The option for each output: one for all of them, or a structure like that of the residuals."""
    outputs = flatten(residuals)[0]
    if not isinstance(given, (list, tuple, dict)):
        return [given] * len(outputs)
    found, places = flatten(given, what)[0], [path for path, _ in outputs]
    if [path for path, _ in found] != places:
        wanted = (
            ", ".join(f"{what}{path}" for path in places) if any(places) else "a single one, for the only residuals"
        )
        raise InvalidArgumentError(
            f"{what} is {shown(given)}, with another structure than residuals; expected {wanted}, or one for all."
        )
    return [value for _, value in found]
