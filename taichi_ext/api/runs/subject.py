"""The subject of J, to which its rows belong: the outputs of a call, or the gradient of an energy (then J is H)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from taichi_ext.api.inputs.arguments import Target
from taichi_ext.api.inputs.fixed import Fixed
from taichi_ext.api.inputs.results import Layout, Placed, by_parameter
from taichi_ext.errors import InvalidArgumentError
from taichi_ext.launches import GRADIENT, EnergyTarget
from taichi_ext.runtime.launching.session import Session
from taichi_ext.runtime.launching.tangents import DenseRows, GradientRows
from taichi_ext.runtime.memory.shadows import numpy_dtype
from taichi_ext.runtime.python.dual_numbers import warn_at_user
from taichi_ext.runtime.sparse.matrices import Arithmetic, Matrix
from taichi_ext.runtime.sparse.pattern import sparse_dtype

Shapes = list[tuple[tuple[int, ...], np.dtype]]
BlockOf = Callable[[Placed, Placed], Any]  # the sparse block of a container and a parameter


@dataclass(eq=False, kw_only=True)
class RowSpace:
    """The outputs; ``warns_of_zeros`` is false for an energy, whose gradient may be zero."""

    warns_of_zeros: bool = True
    has_gradient = False  # beside J

    def outputs(self, layout: Layout) -> tuple[Placed, ...]:
        """The containers that have rows."""
        return layout.outputs

    def rows(self, layout: Layout) -> tuple[Placed, ...]:
        """The containers whose entries the rows of the blocks are."""
        return layout.outputs

    def wanted(self, layout: Layout) -> Shapes:
        return [((*o.shape, *p.shape), o.result_dtype) for o in layout.outputs for p in layout.params]

    def wanted_sparse(self, layout: Layout) -> Shapes:
        dtypes = [dtype for _, dtype in self.wanted(layout)]
        sizes = ((o.size, p.size) for o in self.rows(layout) for p in layout.params)
        return [(size, sparse_dtype(dtype)) for size, dtype in zip(sizes, dtypes, strict=True)]

    def energy(self, layout: Layout, *, is_product: bool, intermediates: Mapping[Any, int] | None) -> EnergyTarget:
        """The energy to differentiate twice; ``intermediates`` are sizes of fields, None for a dense Hessian."""
        return EnergyTarget()

    def target(self, places: Sequence[Any] | None = None) -> DenseRows:
        """The target of a run that computes rows, in these places if they fit."""
        return DenseRows(places)

    def note_run(self, session: Session, layout: Layout) -> None:
        """Called after each run."""

    def note_gradients(self, gradients: list[np.ndarray]) -> None:
        """Called with the gradient of an energy, after a launch that was repeated without a run."""

    def of_dense(self, values: list[np.ndarray], layout: Layout) -> list[list[np.ndarray]]:
        return [by_parameter(v, o.shape, layout) for v, o in zip(values, layout.outputs, strict=True)]

    def of_sparse(self, block: BlockOf, layout: Layout, *, is_symmetric: bool) -> list[list[object]]:
        """The blocks, from those of each container."""
        return [[_cut(block(o, p), o.inner) for p in layout.params] for o in layout.outputs]


@dataclass(eq=False, kw_only=True)
class EnergyGradient(RowSpace):
    """The gradient of an energy, which has a row for each entry of a container of parameters."""

    warns_of_zeros: bool = False
    is_projected: bool = False  # whether blocks of elements are made positive semidefinite
    fixed: Fixed | None = None  # entries of the params whose rows and columns of H are those of the identity matrix
    has_gradient: bool = True  # whether the gradient is needed, or only products of H
    is_sum: bool = False  # whether its terms must depend on few params alone: a ``DenseRowsError`` refuses others
    gradient: np.ndarray = field(default_factory=lambda: np.zeros(0), init=False)  # that of the last run

    def outputs(self, layout: Layout) -> tuple[Placed, ...]:
        (energy,), rows = layout.outputs, sum(layout.sizes.values())
        gradient = Target("gradient", f"the gradient of {energy.target.name}")
        return (Placed(gradient, GRADIENT, (rows,), energy.dtype, rows),)

    def rows(self, layout: Layout) -> tuple[Placed, ...]:
        return layout.params

    def wanted(self, layout: Layout) -> Shapes:
        (energy,) = layout.outputs
        return [((*p.shape, *q.shape), energy.result_dtype) for p in layout.params for q in layout.params]

    def target(self, places: Sequence[Any] | None = None) -> DenseRows:
        return GradientRows(places)

    def energy(self, layout: Layout, *, is_product: bool, intermediates: Mapping[Any, int] | None) -> EnergyTarget:
        (energy,), sizes = layout.outputs, {**layout.sizes, **(intermediates or {})}
        if not layout.count:
            raise InvalidArgumentError(f"params have no entries, so {energy.target.name} has no second derivatives.")
        return EnergyTarget(
            key=energy.container,
            columns=sum(sizes.values()),
            starts=_starts(sizes),
            dtype=energy.dtype,
            adds_terms=intermediates is not None or is_product,  # also of energies with few parameters
            has_whole_blocks=self.is_projected,
            intermediates=frozenset(intermediates or ()),
            is_mirrored=not is_product and all(_rows(p, layout) == p.columns for p in layout.params),
            has_gradient=self.has_gradient,
            is_sum=self.is_sum,
        )

    def note_run(self, session: Session, layout: Layout) -> None:
        (energy,) = layout.outputs
        gradient = session.tangents.first_order.gradient()
        if gradient is None:
            gradient = np.zeros(sum(layout.sizes.values()), numpy_dtype(energy.dtype))
            warn_at_user(f"{energy.target.name} does not depend on any of the params: its Hessian is zero.")
        self.gradient = gradient

    def note_gradients(self, gradients: list[np.ndarray]) -> None:
        (self.gradient,) = gradients

    def note_parts(self, gradient: np.ndarray, layout: Layout) -> None:
        """Note the gradient, from its entries for the params."""
        self.gradient = np.zeros(sum(layout.sizes.values()), gradient.dtype)
        for p, part in zip(layout.params, by_param(gradient, layout), strict=True):
            self.gradient[_rows(p, layout)][p.inner] = part

    def gradients(self, layout: Layout) -> list[np.ndarray]:
        return [self.gradient[_rows(p, layout)][p.inner].reshape(p.shape) for p in layout.params]

    def free_gradients(self, layout: Layout) -> list[np.ndarray]:
        """The gradient, 0 for fixed entries."""
        parts = self.gradients(layout)
        if not self.fixed:
            return parts
        whole = self.fixed.free(np.concatenate([part.reshape(-1) for part in parts]))
        return [part.reshape(p.shape) for part, p in zip(by_param(whole, layout), layout.params, strict=True)]

    def moved(self, directions: np.ndarray) -> np.ndarray:
        """Directions with their fixed entries set to 0."""
        return self.fixed.free(directions) if self.fixed else directions

    def products(self, rows: np.ndarray, directions: np.ndarray, layout: Layout) -> list[np.ndarray]:
        """H times directions for each parameter, from products of the gradient's Jacobian with ``moved`` directions."""
        return self.free_products(np.concatenate(self._by_param(rows, layout)), directions, layout)

    def free_products(self, products: np.ndarray, directions: np.ndarray, layout: Layout) -> list[np.ndarray]:
        """H times directions for each parameter, from H times ``moved`` directions, a row for each column of H."""
        return by_param(np.where(self.fixed.mask[:, None], directions, products) if self.fixed else products, layout)

    def _by_param(self, matrix: np.ndarray, layout: Layout) -> list[np.ndarray]:
        """The rows of each parameter, of a matrix with a row for each entry of the gradient."""
        return [matrix[_rows(p, layout)][p.inner] for p in layout.params]

    def of_dense(self, values: list[np.ndarray], layout: Layout) -> list[list[np.ndarray]]:
        matrix = np.concatenate(self._by_param(values[0], layout))
        if self.fixed:
            self.fixed.mask_matrix(matrix)
        return self.of_matrix(matrix, layout)

    def of_matrix(self, matrix: np.ndarray, layout: Layout) -> list[list[np.ndarray]]:
        """The blocks, from H, of which only the triangle below the diagonal is read."""
        matrix = np.where(np.tri(len(matrix), dtype=bool), matrix, matrix.T)
        ranges = [(p.columns, p.shape) for p in layout.params]
        return [[np.ascontiguousarray(matrix[r, c]).reshape((*s, *t)) for c, t in ranges] for r, s in ranges]

    def of_sparse(self, block: BlockOf, layout: Layout, *, is_symmetric: bool) -> list[list[object]]:
        (output,) = self.outputs(layout)
        row = [block(output, param) for param in layout.params]
        blocks = [[_cut(_cut(b, _rows(p, layout)), p.inner) for b in row] for p in layout.params]
        blocks = blocks if is_symmetric else _symmetric(blocks)
        return self.fixed.mask_blocks(blocks) if self.fixed else blocks


def _starts(sizes: Mapping[Any, int]) -> dict[Any, int]:
    return dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))


def by_param(values: np.ndarray, layout: Layout) -> list[np.ndarray]:
    """Rows of all parameters, by parameter."""
    return np.split(values, [p.first for p in layout.params[1:]])


def _rows(param: Placed, layout: Layout) -> slice:
    """The entries of the gradient that belong to the container of a parameter."""
    first = _starts(layout.sizes)[param.container]
    return slice(first, first + param.rows)


def _cut(block: Any, rows: slice) -> object:
    """Some rows of a CSR array; its slices are copies."""
    return block if rows in (slice(None), slice(0, block.shape[0])) else block[rows]


def _symmetric(blocks: list[list[Any]]) -> list[list[object]]:
    """The mean of a matrix and its transpose, block by block."""
    result = [list(row) for row in blocks]
    for n, row in enumerate(blocks):
        for m in range(n, len(row)):
            mirrored = blocks[m][n].T.tocsr()
            mirrored.sort_indices()
            mean = Arithmetic().total([Matrix.of(row[m]), Matrix.of(mirrored)])
            result[n][m] = Matrix(mean.pattern, 0.5 * mean.data).csr()
            result[m][n] = result[n][m] if n == m else result[n][m].T.tocsr()
    return result
