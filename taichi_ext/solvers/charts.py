"""Parameters by local coordinates: how a step moves points of manifolds, and J by those coordinates."""

# pyright knows no types of Taichi, of SciPy, nor of arrays of any shape and type.
# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# J is the Jacobian, and no constant.
# pyright: reportConstantRedefinition=false

from __future__ import annotations

from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.api.inputs.arguments import flatten
from taichi_ext.api.products import jvp
from taichi_ext.errors import InvalidArgumentError, unexpected
from taichi_ext.solvers.bounds import Part, entry_name, slices_of
from taichi_ext.solvers.elimination import SparseJacobian
from taichi_ext.solvers.manifolds import Manifold, retraction
from taichi_ext.solvers.operator import require_scipy

_NEAR = 1e-3  # the largest distance of a start from its manifold


class Charts:
    """Local coordinates of all parameters; those without a manifold are their own.

    Args:
        given: a manifold for a single param, or for each param one or None; None for no manifolds.
        parts: the params as parts of a vector.

    Attributes:
        parts: local coordinates as parts of a vector.
    """

    def __init__(self, given: object, parts: list[Part]) -> None:
        self._points, self._manifolds = parts, [None] * len(parts)
        if given is not None:
            self._manifolds = [leaf for _, leaf in flatten(given, "retract")[0]]
        if len(self._manifolds) != len(parts) or not all(isinstance(m, Manifold | None) for m in self._manifolds):
            raise unexpected(
                "retract", given, f"a Manifold or None for each of the {len(parts)} params, structured like them"
            )
        for manifold, part in zip(self._manifolds, parts, strict=True):
            if manifold is not None and part.shape[-len(manifold.shape) :] != manifold.shape:
                raise InvalidArgumentError(
                    f"{part.name} has the shape {part.shape} with its elements; points of its manifold have the shape "
                    f"{manifold.shape}."
                )
        self.parts = [
            part
            if m is None
            else Part(f"local coordinates of {part.name}", (*part.shape[: -len(m.shape)], m.size), part.dtype)
            for part, m in zip(parts, self._manifolds, strict=True)
        ]
        self._triples = list(zip(self._manifolds, slices_of(parts), slices_of(self.parts), strict=True))

    def sizes(self, elements: list[int]) -> list[int]:
        """How many numbers belong together in each param, where it has no manifold, and in its local coordinates."""
        return [n if m is None else m.size for n, m in zip(elements, self._manifolds, strict=True)]

    def plus(self, x: np.ndarray, step: np.ndarray) -> np.ndarray:
        """The points that a step in local coordinates leads to."""
        found = np.empty_like(x)
        for n, (manifold, point, local) in enumerate(self._triples):
            if manifold is None:
                found[point] = x[point] + step[local]
            else:
                found[point] = self._launch(n, x[point], step[local])[2].reshape(-1)
        return found

    def of_points(self, values: np.ndarray, other: float) -> np.ndarray:
        """Numbers for the params as numbers for local coordinates: another number for those of manifolds."""
        return np.concatenate(
            [
                values[point] if m is None else np.full(local.stop - local.start, other)
                for m, point, local in self._triples
            ]
        )

    def check_bounds(self, low: np.ndarray, high: np.ndarray) -> None:
        for part, (manifold, point, _) in zip(self._points, self._triples, strict=True):
            if manifold is not None and (np.isfinite(low[point]).any() or np.isfinite(high[point]).any()):
                raise InvalidArgumentError(
                    f"bounds limits {part.name}, which moves on a manifold; give -inf and inf for it."
                )

    def projected(self, x: np.ndarray) -> np.ndarray:
        """A start, moved onto its manifolds by no more than rounding; raises where it is not on them."""
        try:
            found = self.plus(x, np.zeros(self._triples[-1][2].stop))
            self._derivatives(x)
        except (InvalidArgumentError, backend.CompilationError) as error:
            raise InvalidArgumentError(
                f"retract must be a ti.func of a point and of its local coordinates that reads both: {error}"
            ) from error
        with np.errstate(invalid="ignore"):
            is_off = ~(np.abs(found - x) <= _NEAR)
        if is_off.any():
            n = int(np.argmax(is_off))
            raise InvalidArgumentError(
                f"{entry_name(n, self._points)} is {x[n]:g}, and {found[n]:g} after a step of length 0 on its "
                "manifold; start at points of the manifold, such as quaternions of length 1."
            )
        return found

    def local_jacobian(self, J: Any, x: np.ndarray) -> Any:
        """J by local coordinates: blocks of J times the derivatives of the points by them."""
        derivatives = self._derivatives(x)
        if not derivatives:
            return J
        if isinstance(J, SparseJacobian):
            blocks = [list(row) for row in J.blocks]
            for n, P in derivatives.items():
                for row in blocks:
                    row[n] = _times_blocks(row[n], P)
            return J._replace(blocks=blocks)
        parts: list[np.ndarray] = []
        for n, (_, point, _) in enumerate(self._triples):
            part = J[:, point]
            if n in derivatives:
                P = derivatives[n]
                part = np.matmul(part.reshape(len(J), len(P), 1, -1), P).reshape(len(J), -1)
            parts.append(part)
        return np.concatenate(parts, axis=1)

    def local_products(self, JtJ: object, Jtr: np.ndarray, x: np.ndarray) -> tuple[object, np.ndarray]:
        """JtJ, dense or CSR, and Jtr by local coordinates."""
        found = self._derivatives(x)
        if not found:
            return JtJ, Jtr
        if isinstance(JtJ, np.ndarray):
            P: Any = self.local_jacobian(np.eye(len(Jtr)), x)
        else:
            sparse = require_scipy("sparse", "format='csr'")
            blocks = [
                sparse.block_diag(found[n]) if n in found else sparse.eye_array(local.stop - local.start)
                for n, (_, _, local) in enumerate(self._triples)
            ]
            P = sparse.csr_array(sparse.block_diag(blocks))
        return P.T @ JtJ @ P, P.T @ Jtr

    def _derivatives(self, x: np.ndarray) -> dict[int, np.ndarray]:
        """By param, for each point the matrix of its derivatives with respect to local coordinates."""
        found: dict[int, np.ndarray] = {}
        for n, (manifold, point, local) in enumerate(self._triples):
            if manifold is not None:
                kernel, *arrays = self._arrays(n, x[point], np.zeros(local.stop - local.start))
                directions = np.broadcast_to(np.eye(manifold.size)[:, None], (manifold.size, *arrays[1].shape))
                by_direction = jvp(kernel, "delta", directions, "moved", args=tuple(arrays))
                found[n] = np.moveaxis(by_direction.reshape(*directions.shape[:2], -1), 0, 2).astype(np.float64)
        return found

    def _arrays(self, n: int, points: np.ndarray, step: np.ndarray) -> tuple[Any, ...]:
        """The kernel of a manifold, and its arguments."""
        manifold = self._manifolds[n]
        assert manifold is not None
        dtype = np.float32 if self._points[n].dtype.itemsize < 8 else np.float64
        x = np.ascontiguousarray(points.reshape(-1, *manifold.shape), dtype)
        kernel = retraction(manifold, np.dtype(dtype))
        return kernel, x, np.ascontiguousarray(step.reshape(-1, manifold.size), dtype), np.zeros_like(x)

    def _launch(self, n: int, points: np.ndarray, step: np.ndarray) -> tuple[np.ndarray, ...]:
        kernel, *arrays = self._arrays(n, points, step)
        kernel(*arrays)
        return tuple(arrays)


def _times_blocks(block: Any, P: np.ndarray) -> object:
    """A CSR array times a matrix with these blocks on its diagonal."""
    found = block.tobsr((1, P.shape[1]))
    data = np.matmul(found.data, P[found.indices])
    kind = type(found)
    return kind((data, found.indices, found.indptr), shape=(block.shape[0], P.shape[0] * P.shape[2])).tocsr()
