"""Normal equations of a sparse J, by params and in small dense blocks, and parts of them that are eliminated."""

# The annotations of a kernel are values that Taichi reads, and pyright knows no types of SciPy; J is no constant.
# pyright: reportConstantRedefinition=false, reportGeneralTypeIssues=false, reportInvalidTypeForm=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownParameterType=false, reportUnknownVariableType=false

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from taichi_ext import backend
from taichi_ext.cached import cached_property
from taichi_ext.errors import InvalidArgumentError
from taichi_ext.runtime.sparse.matrices import Pattern, listed_terms, total_pattern
from taichi_ext.solvers.operator import require_scipy
from taichi_ext.solvers.parts import Part, entry_name, slices_of
from taichi_ext.solvers.systems import FIRST_DAMPING, LEAST_DAMPING, solve_symmetric

# Sparse matrices in small dense blocks: how they are cut, and their products, by a kernel where it pays.

MOST_WIDE = 32  # numbers on the side of a block
_LEAST_WORK = 2**20  # multiplications of a product by the kernel, which takes 0.1 s to be compiled for each size
_MOST_TERMS = 2**25  # of a product that are listed
_MOST_NUMBERS = 2**31  # of all blocks of a matrix: the kernel counts in 32 bits
_MOST_TOTALS = 256  # numbers of a block that are added up at once
_RIGHT = -1  # stands for the right side among the params
_Matrix = dict[tuple[int, int], Any]  # the matrices of pairs of params


class BlockCut:
    """How CSR arrays of one pattern are cut into blocks."""

    def __init__(self, block: Any, size: tuple[int, int]) -> None:
        numbered = type(block)((np.arange(1, block.nnz + 1), block.indices, block.indptr), shape=block.shape)
        blocks = numbered.tobsr(size)
        blocks.sort_indices()
        filled = np.flatnonzero(blocks.data)
        self._places = np.empty(block.nnz, np.int64)
        self._places[blocks.data.reshape(-1)[filled] - 1] = filled
        self._indices, self._shape = (blocks.indices, blocks.indptr), blocks.data.shape
        self._array = functools.partial(type(blocks), shape=block.shape)
        self.filling = blocks.data.size / max(1, block.nnz)  # numbers in blocks for each entry

    def blocks(self, block: Any, factors: np.ndarray | None) -> Any:
        """A CSR array as a BSR array in float64, whose rows are multiplied by factors."""
        data = np.zeros(self._shape)
        data.reshape(-1)[self._places] = block.data
        if factors is not None:
            counts = np.diff(self._indices[1])
            data *= np.repeat(factors.reshape(-1, data.shape[1]), counts, axis=0)[:, :, None]
        return self._array((data, *self._indices))


class _Plan(NamedTuple):
    """The terms of a product, by the blocks of the result."""

    # the blocks of the factors by term, and for each block of the result its first term, the end of its terms, and its
    # place; for the product of a matrix with its own transpose, without blocks below the diagonal
    terms: list[np.ndarray]
    pattern: Pattern  # of the result
    before: np.ndarray | None  # places of the blocks of the matrix that it is added to
    mirrored: tuple[np.ndarray, np.ndarray] | None  # places of blocks below the diagonal, and of those above it


class BlockProducts:
    """Products of BSR arrays, and how CSR arrays are cut into those: both are planned once for each pattern."""

    def __init__(self, is_compiled: bool) -> None:
        self._is_compiled = is_compiled  # a kernel adds up the terms of large products on a CPU; else SciPy does
        self._known: dict[object, tuple[list[np.ndarray], Any]] = {}

    def cut(self, place: tuple[int, int], block: Any, size: tuple[int, int]) -> BlockCut:
        """How a CSR array is cut into blocks of a size; ``place`` stands for its pattern."""
        return self._planned((place, size), [block], lambda: BlockCut(block, size))

    def add(self, key: object, before: Any, left: Any, right: Any, sign: int = 1) -> Any:
        """``before + sign * left.T @ right``; None for ``before`` is zero, and ``key`` stands for the patterns."""
        if not self._can_be_compiled(left, right):
            product = left.T @ right
            product.data *= sign
            return product if before is None else before + product
        matrices = [matrix for matrix in (before, left, right) if matrix is not None]
        plan: _Plan = self._planned(key, matrices, lambda: _terms(matrices, left is right))
        (height, rows), width = left.blocksize, right.blocksize[1]
        data = np.zeros((len(plan.pattern.indices), rows, width))
        if before is not None:
            data[plan.before] = before.data
        group = max(n for n in range(1, rows + 1) if rows % n == 0 and (n == 1 or n * width <= _MOST_TOTALS))
        arrays = (np.ascontiguousarray(blocks).reshape(-1) for blocks in (data, left.data, right.data))
        with backend.suspend_following():
            _kernel(backend.RUNTIME.module)(*arrays, *plan.terms, height, rows, float(sign), group, width)
        if plan.mirrored is not None:
            below, above = plan.mirrored
            data[below] = data[above].transpose(0, 2, 1)
        shape = left.shape[1], right.shape[1]
        return type(left)((data, plan.pattern.indices, plan.pattern.indptr), shape=shape)

    def add_pairs(self, key: tuple[str, int], matrix: _Matrix, blocks: dict[int, Any], sign: int = 1) -> None:
        """Add products of blocks, transposed, with others to the matrices of pairs of params, or subtract them."""
        for a, b in itertools.combinations_with_replacement(blocks, 2):
            if a != _RIGHT:
                matrix[a, b] = self.add((*key, a, b), matrix.get((a, b)), blocks[a], blocks[b], sign)

    def _can_be_compiled(self, left: Any, right: Any) -> bool:
        """Whether a product has some work for the kernel, and not too much to list its terms."""
        if not (self._is_compiled and backend.program() is not None and backend.is_host_arch()):
            return False
        height, *widths = *left.blocksize, right.blocksize[1]
        count = int(np.diff(left.indptr).astype(np.int64) @ np.diff(right.indptr))
        numbers = max(left.data.size, right.data.size, count * widths[0] * widths[1])
        is_listed = count <= _MOST_TERMS and numbers < _MOST_NUMBERS and max(height, *widths) <= MOST_WIDE
        return is_listed and count * height * widths[0] * widths[1] >= _LEAST_WORK

    def _planned(self, key: object, matrices: list[Any], plan: Callable[[], Any]) -> Any:
        """What was planned for matrices of these patterns, or is now."""
        patterns = [array for matrix in matrices for array in (matrix.indptr, matrix.indices)]
        known = self._known.get(key)
        if known is None or not all(map(np.array_equal, known[0], patterns)):
            known = self._known[key] = patterns, plan()
        return known[1]


def _terms(matrices: list[Any], is_symmetric: bool) -> _Plan:
    *before, (left, of_left), (right, of_right) = map(_sorted, matrices)
    turned, order = _transposed(left)
    pattern, (lefts, rights, firsts) = listed_terms(turned, right)
    whole, (*parts, places) = total_pattern((*(p for p, _ in before), pattern))
    of_before = [numbers.take(np.argsort(order)) for numbers, (_, order) in zip(parts, before, strict=True)]
    ends, is_added, mirrored = np.append(firsts[1:], len(lefts)), np.full(len(firsts), True), None
    if is_symmetric:
        is_added = np.repeat(np.arange(pattern.shape[0]), np.diff(pattern.indptr)) <= pattern.indices
        mirrored = places[~is_added], places[_transposed(pattern)[1]][~is_added]
    slots = np.stack([firsts, ends, places], axis=1)[is_added]
    terms = [array.astype(np.int32) for array in (of_left[order[lefts]], of_right[rights], slots)]
    return _Plan(terms, whole, of_before[0] if before else None, mirrored)


def _sorted(matrix: Any) -> tuple[Pattern, np.ndarray]:
    """The pattern of the blocks of a BSR array, and their numbers in it."""
    shape = tuple(np.floor_divide(matrix.shape, matrix.blocksize))
    rows = np.repeat(np.arange(shape[0]), np.diff(matrix.indptr))
    order = np.argsort(rows * shape[1] + matrix.indices, kind="stable")
    return Pattern(matrix.indptr, matrix.indices[order], shape), order


def _transposed(pattern: Pattern) -> tuple[Pattern, np.ndarray]:
    transposed = pattern.with_data(np.arange(len(pattern.indices))).T.tocsr()
    return Pattern(transposed.indptr, transposed.indices, transposed.shape), transposed.data


@functools.cache
def _kernel(ti: ModuleType) -> Callable[..., None]:
    """A kernel that adds up the terms of each block, some of its rows at once."""
    numbers: Any = ti.types.ndarray(dtype=ti.f64, ndim=1)
    integers: Any = ti.types.ndarray(dtype=ti.i32, ndim=1)

    @ti.kernel
    def add_terms(
        sums: numbers,
        left: numbers,
        right: numbers,
        lefts: integers,
        rights: integers,
        slots: ti.types.ndarray(dtype=ti.i32, ndim=2),
        height: ti.i32,
        rows: ti.i32,
        sign: ti.f64,
        group: ti.template(),
        width: ti.template(),
    ):
        for s in range(slots.shape[0]):
            for part in range(rows // group):
                totals = ti.Vector.zero(ti.f64, group * width)
                for t in range(slots[s, 0], slots[s, 1]):
                    a = lefts[t] * height * rows + part * group
                    b = rights[t] * height * width
                    for _ in range(height):
                        for i in range(group):
                            number = left[a + i]
                            for j in range(width):
                                totals[i * width + j] += number * right[b + j]
                        a += rows
                        b += width
                place = (slots[s, 2] * rows + part * group) * width
                for j in range(group * width):
                    sums[place + j] = sums[place + j] + sign * totals[j]  # += would be atomic, ten times as slow

    return add_terms


# The normal equations, by params and in such blocks.

_MOST_FILLED = 2.0  # numbers in blocks for each entry of J
_DENSE = 0.1  # of the entries of a matrix, from which on it is decomposed as a dense one
_FEW = 256  # rows of a matrix that is decomposed as a dense one whatever its entries
_LEAST_BLOCKS = 64  # of a param that is eliminated unasked
_MOST_KEPT = 4096  # numbers that are left by such params: the matrix of these may be dense


class BlockLayout:
    """How J is cut into small dense blocks; found at the first point.

    Args:
        rows: the outputs, and how many numbers an element of each has; none of them for JtJ, whose rows are the params.
        columns: the same of the params.
        eliminated: which params are eliminated, in this order; None chooses them.
        products: with the plans of other calls; None for new ones.
    """

    def __init__(
        self,
        rows: list[tuple[Part, int]],
        columns: list[tuple[Part, int]],
        eliminated: Sequence[int] | None,
        products: BlockProducts | None = None,
    ) -> None:
        self.rows, self.columns = [part for part, _ in rows], [part for part, _ in columns]
        self.is_chosen, self.eliminated = eliminated is None, list(eliminated or ())
        self.heights = [_widths(*row)[-1] for row in rows]
        self._candidates = [_widths(*column) for column in columns]
        self.widths = [blocks[-1] for blocks in self._candidates]
        self.places = slices_of(self.columns)
        self._is_fixed = False
        self.products = products or BlockProducts(is_compiled=False)

    @property
    def kept(self) -> list[int]:
        """The other params."""
        return [n for n in range(len(self.columns)) if n not in self.eliminated]

    @property
    def order(self) -> list[int]:
        """All params, those that are eliminated first."""
        return [*self.eliminated, *self.kept]

    def fix(self, J: list[list[Any]]) -> None:
        """Find the blocks of a J or JtJ: no larger than needed where params are eliminated, mostly full elsewhere."""
        if self._is_fixed:
            return
        self._is_fixed = True
        if self.is_chosen:
            self.eliminated = self._chosen(J)
        for n in self.eliminated:
            rows = J if self.rows else [J[n]]
            self.widths[n] = self._diagonal_width(rows, n)
            if not self.widths[n]:
                self._check_coupling(rows, n)
        if not self.rows:
            self.heights = self.widths
        for m, row in enumerate(J if self.rows else []):
            numbers = sum(self.cut(block, m, n).filling * block.nnz for n, block in enumerate(row))
            if numbers > _MOST_FILLED * sum(block.nnz for block in row):
                self.heights[m] = 1
        for n in self.kept:
            if any(self.cut(row[n], m, n).filling > _MOST_FILLED for m, row in enumerate(J)):
                self.widths[n] = 1

    def _diagonal_width(self, J: Sequence[Sequence[object]], n: int) -> int:
        """The width of blocks of a param such that no row of J touches two of them; 0 if there are none."""
        return next((w for w in self._candidates[n] if not any(_crossing(row[n], w) for row in J)), 0)

    def _chosen(self, J: list[list[object]]) -> list[int]:
        """One or two params that are eliminated unasked, the larger first: of many blocks, so that little is left."""
        sizes, chosen = [math.prod(part.shape) for part in self.columns], dict[int, int]()
        for n in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
            width = self._diagonal_width(J, n)
            is_apart = width and all(_meets_one(J, (m, w), (n, width)) for m, w in chosen.items())
            if is_apart and len(chosen) < 2 and sizes[n] >= _LEAST_BLOCKS * width:
                chosen[n] = width
        is_worth_it = sum(sizes) > _FEW and sum(sizes) - sum(sizes[n] for n in chosen) <= _MOST_KEPT
        return list(chosen) if is_worth_it else []

    def cut(self, block: Any, m: int, n: int) -> BlockCut:
        """How the CSR array of an output (of JtJ, a param) and a param is cut."""
        return self.products.cut((m, n), block, (self.heights[m], self.widths[n]))

    def _check_coupling(self, J: Sequence[Sequence[object]], n: int) -> None:
        for m, row in enumerate(J):
            crossing = _crossing(row[n], self._candidates[n][-1])
            if crossing is not None:
                residual, *entries = crossing
                which = entry_name(residual, [self.rows[m]]) if self.rows else "a residual"
                raise self.coupled(n, entries, f"{which} depends on both")

    def coupled(self, n: int, entries: list[int], reason: str) -> InvalidArgumentError:
        """The error where a part is not block diagonal: two entries of param ``n`` that are coupled."""
        part = self.columns[n]
        first, second = (entry_name(k, [part]) for k in entries)
        return InvalidArgumentError(
            f"eliminate names {part.name}, whose part of J^T J is not block diagonal: {first} and {second} are in "
            f"different blocks, and {reason}. Leave it out of eliminate, or list before it the params that are only "
            "coupled with one of its blocks."
        )


class SparseJacobian(NamedTuple):
    """J as CSR blocks by output and param, and how it is cut."""

    blocks: list[list[Any]]
    layout: BlockLayout

    def dense_blocks(self, row: int, column: int, factors: np.ndarray | None) -> Any:
        """A block of J as a BSR array in float64, whose rows are multiplied by factors."""
        block = self.blocks[row][column]
        return self.layout.cut(block, row, column).blocks(block, factors)


def whole(J: object) -> Any:
    """J as one matrix, dense or CSR."""
    return require_scipy("sparse", "format=").bmat(J.blocks, format="csr") if isinstance(J, SparseJacobian) else J


class _Elimination(NamedTuple):
    """A part that is eliminated."""

    param: int  # its number
    roots: Any  # R in V^-1 = R R^T for its blocks V, on the diagonal of a BSR array
    coupling: dict[int, Any]  # by param, R^T times the coupling; and times the right side


class SparseSystem:
    """The normal equations of a sparse J; see ``System``.

    A param whose part ``V`` of JtJ is block diagonal is eliminated by its Schur complement, of the parts ``U`` of the
    other params and ``W`` in between: ``(U - W V^-1 W^T) s = -g_U + W V^-1 g_V``; see B. Triggs and others, Bundle
    Adjustment - A Modern Synthesis, 2000, section 6.1.
    """

    first_damping, least_damping, width = FIRST_DAMPING, LEAST_DAMPING, 2.0

    def __init__(self, layout: BlockLayout, matrix: _Matrix, gradient: np.ndarray) -> None:
        self._layout, self.gradient = layout, gradient
        self._matrix = matrix  # by pairs of params, eliminated ones first; zero blocks are left out
        self.diagonal = np.zeros_like(gradient)
        for n, place in enumerate(layout.places):
            if (n, n) in self._matrix:
                self.diagonal[place] = self._matrix[n, n].diagonal()

    @classmethod
    def of(cls, J: SparseJacobian, r: np.ndarray, factors: np.ndarray | None) -> "SparseSystem":
        """That of J, whose rows are multiplied by factors, and residuals."""
        layout = J.layout
        layout.fix(J.blocks)
        matrix, gradient = _Matrix(), np.zeros(layout.places[-1].stop)
        for m, rows in enumerate(slices_of(layout.rows)):
            scale = None if factors is None else factors[rows]
            blocks = {n: J.dense_blocks(m, n, scale) for n in layout.order if J.blocks[m][n].nnz}
            weighted = r[rows] if scale is None else scale * r[rows]
            for n in blocks:
                gradient[layout.places[n]] += J.blocks[m][n].T @ weighted
            layout.products.add_pairs(("output", m), matrix, blocks)
        return cls(layout, matrix, gradient)

    @classmethod
    def of_products(cls, JtJ: Any, gradient: np.ndarray, layout: BlockLayout) -> "SparseSystem":
        """That of a CSR array and Jtr."""
        cut = SparseJacobian([[JtJ[a, b] for b in layout.places] for a in layout.places], layout)
        layout.fix(cut.blocks)
        pairs = itertools.combinations_with_replacement(layout.order, 2)
        return cls(layout, {(a, b): cut.dense_blocks(a, b, None) for a, b in pairs if cut.blocks[a][b].nnz}, gradient)

    @cached_property
    def JtJ(self) -> Any:
        return self._assembled(self._matrix, range(len(self._layout.columns)))

    def curvature(self, step: np.ndarray) -> float:
        """See ``System``."""
        parts = [step[place] for place in self._layout.places]
        terms = ((1 + (a != b)) * float(parts[a] @ (part @ parts[b])) for (a, b), part in self._matrix.items())
        return sum(terms)

    def solve(self, damping: np.ndarray, fixed: np.ndarray) -> np.ndarray | None:
        """See ``System``."""
        right, places, layout = -self.gradient, self._layout.places, self._layout
        if fixed.any():
            right -= self.JtJ @ fixed
        matrix = dict(self._matrix)
        for n, (place, width) in enumerate(zip(places, layout.widths, strict=True)):
            matrix[n, _RIGHT] = stacked(right[place].reshape(-1, width, 1))
        eliminations = list[_Elimination]()
        for n in layout.eliminated:
            try:
                parts = self._eliminated(matrix, n, damping[places[n]])
            except InvalidArgumentError:
                if not layout.is_chosen:
                    raise
                layout.eliminated = []  # J has another pattern than at the first point
                return self.solve(damping, fixed)
            if parts is None:
                return None
            eliminations.append(parts)
        steps = np.zeros_like(right)
        if layout.kept and not self._solve_kept(matrix, damping, steps):
            return None
        for parts in reversed(eliminations):
            rest = parts.coupling.pop(_RIGHT).toarray().reshape(-1)
            for k, coupling in parts.coupling.items():
                rest = rest - coupling @ steps[places[k]]
            steps[places[parts.param]] = parts.roots @ rest
        return steps

    def _eliminated(self, matrix: _Matrix, n: int, damping: np.ndarray) -> _Elimination | None:
        """Eliminate a param; None where a block is not positive definite."""
        width, products = self._layout.widths[n], self._layout.products
        V = self._diagonal_blocks(matrix.pop((n, n), None), n, width)
        V[:, np.arange(width), np.arange(width)] += damping.reshape(-1, width)
        diagonal = np.einsum("nii->ni", V)
        if not ((diagonal > 0) & np.isfinite(diagonal)).all():
            return None
        scale = 1 / np.sqrt(diagonal)
        try:
            inverses = _inverses(np.linalg.cholesky(V * scale[:, :, None] * scale[:, None])) * scale[:, None]
        except np.linalg.LinAlgError:
            return None
        roots, coupling = stacked(np.ascontiguousarray(inverses.transpose(0, 2, 1)), is_diagonal=True), {}
        for k in (*self._layout.order, _RIGHT):
            part = matrix.pop((n, k), None)
            if part is not None:
                coupling[k] = products.add(("root", n, k), None, roots, part)
        products.add_pairs(("param", n), matrix, coupling, -1)
        return _Elimination(n, roots, coupling)

    def _diagonal_blocks(self, part: Any, n: int, width: int) -> np.ndarray:
        count = math.prod(self._layout.columns[n].shape) // width
        result = np.zeros((count, width, width))
        if part is not None:
            rows = np.repeat(np.arange(count), np.diff(part.indptr))
            is_beside = (rows != part.indices) & part.data.any(axis=(1, 2))
            if is_beside.any():
                k = int(np.argmax(is_beside))
                entries = [int(rows[k]) * width, int(part.indices[k]) * width]
                raise self._layout.coupled(n, entries, "another part that is eliminated before is coupled with both")
            result[part.indices[rows == part.indices]] = part.data[rows == part.indices]
        return result

    def _solve_kept(self, matrix: _Matrix, damping: np.ndarray, steps: np.ndarray) -> bool:
        """Find the steps of the params that are left; whether their matrix is positive definite."""
        kept = np.concatenate([np.r_[self._layout.places[n]] for n in self._layout.kept])
        right = np.concatenate([matrix[n, _RIGHT].toarray().reshape(-1) for n in self._layout.kept])
        A = self._assembled(matrix, self._layout.kept) if self._layout.eliminated else self.JtJ
        if len(kept) <= _FEW or A.nnz > _DENSE * len(kept) ** 2:
            A = A.toarray()
        solved = solve_symmetric(A, damping[kept], right)
        if solved is not None:
            steps[kept] = solved
        return solved is not None

    def _assembled(self, matrix: _Matrix, params: Any) -> Any:
        """The matrix of some params as one CSR array."""
        sparse, sizes = require_scipy("sparse", "format='csr'"), [math.prod(p.shape) for p in self._layout.columns]
        blocks = [[matrix.get((a, b)) for b in params] for a in params]
        for (i, a), (j, b) in itertools.product(enumerate(params), repeat=2):
            if blocks[i][j] is None:
                mirrored = matrix.get((b, a))
                blocks[i][j] = sparse.csr_array((sizes[a], sizes[b])) if mirrored is None else mirrored.T
        return sparse.bmat(blocks, format="csr")


def _inverses(lower: np.ndarray) -> np.ndarray:
    """The inverses of lower triangular matrices, row by row for all of them at once."""
    result = np.zeros_like(lower)
    for i in range(lower.shape[1]):
        result[:, i, i] = 1.0
        result[:, i, :i] -= (lower[:, i, None, :i] @ result[:, :i, :i])[:, 0]
        result[:, i] /= lower[:, i, i, None]
    return result


def _widths(part: Part, element: int) -> list[int]:
    """Possible widths of blocks of a part, ascending: its elements, or the entries that share the first indices."""
    axes = next(k for k in range(len(part.shape), -1, -1) if math.prod(part.shape[k:]) == element)
    return [w for k in range(axes, min(1, axes) - 1, -1) if (w := math.prod(part.shape[k:])) <= max(MOST_WIDE, element)]


def _crossing(block: Any, width: int) -> tuple[int, int, int] | None:
    """A row of a CSR array, and two columns of it that are in different blocks of this width."""
    of_block = block.indices // width
    starts = block.indptr[:-1][np.diff(block.indptr) > 0]
    if not len(starts):
        return None
    least, most = np.minimum.reduceat(of_block, starts), np.maximum.reduceat(of_block, starts)
    if (least == most).all():
        return None
    row = np.flatnonzero(np.diff(block.indptr))[np.argmax(least != most)]
    columns = block.indices[block.indptr[row] : block.indptr[row + 1]]
    return int(row), int(columns.min()), int(columns.max())


def _meets_one(J: list[list[Any]], a: tuple[int, int], b: tuple[int, int]) -> bool:
    """Whether each block of a param meets one of another at most, in rows that have one of each; numbers and widths."""
    pairs: list[np.ndarray] = []
    for row in J:
        first, second = row[a[0]], row[b[0]]
        has_both = (np.diff(first.indptr) > 0) & (np.diff(second.indptr) > 0)
        of_first, of_second = (x.indices[x.indptr[:-1][has_both]] // w for x, w in ((first, a[1]), (second, b[1])))
        pairs.append(of_first.astype(np.int64) * second.shape[1] + of_second)
    keys = np.unique(np.concatenate(pairs))
    return len(np.unique(keys // J[0][b[0]].shape[1])) == len(keys)


def stacked(blocks: np.ndarray, *, is_diagonal: bool = False) -> Any:
    """A BSR array of blocks, one in each row, below each other or on the diagonal."""
    count, height, width = blocks.shape
    columns = np.arange(count, dtype=np.int32) * is_diagonal
    shape = count * height, width * (count if is_diagonal else 1)
    sparse = require_scipy("sparse", "format='csr'")
    return sparse.bsr_array((blocks, columns, np.arange(count + 1, dtype=np.int32)), shape=shape)
