"""What ``least_squares`` returns."""

# pyright knows no types of SciPy, nor of arrays of any shape and type.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# J is the Jacobian, and no constant.
# pyright: reportConstantRedefinition=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from taichi_ext.errors import InvalidArgumentError
from taichi_ext.solvers.levenberg import TITLE, Iteration


@dataclass(frozen=True, repr=False)
class LeastSquaresResult:
    """The solution of a least-squares problem; P numbers in the params, M residuals.

    Attributes:
        x: the params as one vector of shape (P,), each raveled in C order; they hold it, too.
        cost: half the sum of squares there, or of the losses.
        fun: the residuals there, of shape (M,), without weights; None with shards.
        jacobian: J there, of shape (M, P), dense or CSR, without weights; None with shards.
        grad: the gradient of the cost there, of shape (P,).
        success: whether a tolerance was reached.
        status: 1 to 4 for the tolerance that was reached, 0 for the largest number of iterations, -1 for the callback,
            -2 where no step lowers the cost; SciPy's for its methods.
        message: the reason in words.
        nfev: how many points were computed.
        njev: how many points were accepted.
        history: a line for each iteration, the start included; ``np.array([h.cost for h in result.history])``.
        method: which was used.
        seconds: where the time went, by part.
    """

    x: np.ndarray
    cost: float
    fun: np.ndarray | None
    jacobian: Any
    grad: np.ndarray
    success: bool
    status: int
    message: str
    nfev: int
    njev: int
    history: list[Iteration]
    method: str
    seconds: dict[str, float]
    _split: Callable[[np.ndarray], Any]

    def split(self, vector: np.ndarray) -> Any:
        """A vector of P numbers, such as ``x``, as arrays of the shapes of the params, structured like them."""
        values = np.asarray(vector)
        if values.shape != self.x.shape:
            raise InvalidArgumentError(f"vector has shape {values.shape}; expected {self.x.shape}.")
        return self._split(values)

    def summary(self) -> str:
        """A report as text: the history, the reason of the end, where the time went."""
        total = self.history[-1].total if self.history else 0.0
        times = "".join(f"{part:>18}: {1e3 * s:10.3f} ms\n" for part, s in {**self.seconds, "total": total}.items())
        count = "" if self.fun is None else f"{len(self.fun)} residuals, "
        first = self.history[0].cost if self.history else np.nan
        return (
            f"{TITLE}\n" + "".join(f"{line}\n" for line in self.history) + f"\n{'method':>18}: {self.method}, "
            f"{count}{len(self.x)} parameters\n"
            f"{'cost':>18}: {first:.6e} at the start, {self.cost:.6e} at the end\n"
            f"{'points':>18}: {self.nfev}, of which {self.njev} accepted\n{times}{'end':>18}: {self.message}"
        )

    __str__ = __repr__ = summary
