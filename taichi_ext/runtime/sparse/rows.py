"""The current rows of containers, by parameter, between two stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from taichi_ext.errors import InternalError
from taichi_ext.program.keys import Key, SumKey, Version
from taichi_ext.runtime.sparse.matrices import Arithmetic, Matrix, identity, scipy_sparse
from taichi_ext.runtime.sparse.pattern import sparse_dtype
from taichi_ext.runtime.sparse.streams import StageBlocks

IDENTITY = "identity"  # the derivative of a parameter with respect to itself, before any write


class SparseRows:
    """For each container, a sparse matrix for each parameter; ``arithmetic`` is kept between calls."""

    def __init__(self, sizes: dict[Key, int], arithmetic: Arithmetic) -> None:
        self._sizes = sizes
        self._arithmetic = arithmetic
        self._blocks: dict[Key, dict[Key, object]] = {key: {key: IDENTITY} for key in sizes}

    def keys(self) -> list[object]:
        return list(self._blocks)

    def of(self, key: Key, note_clear: Callable[[object], None] | None = None) -> Rows:
        """The rows of one container; ``note_clear`` is called before some of them are cleared."""
        return Rows(self, key, note_clear)

    def blocks(self, key: Key) -> dict[Key, Any]:
        """The blocks of a container that have entries."""
        return self._blocks.get(key, {})

    def block(self, key: Key, param: Key, rows: int, dtype: object) -> Any:
        """A block of J as a CSR array."""
        found = self.blocks(key).get(param)
        if found is None:
            return scipy_sparse().csr_array((rows, self._sizes[param]), dtype=dtype)
        return identity(rows, dtype).csr() if isinstance(found, str) else found.csr()

    def replace(self, key: Key, blocks: Mapping[Key, object]) -> None:
        """Replace the rows of a container by CSR arrays."""
        self._blocks[key] = {param: Matrix.of(block) for param, block in blocks.items()}

    def clear(self, key: Key, rows: Any) -> None:
        """Set the tangents of some entries to zero."""
        left = {}
        for param, block in self.blocks(key).items():
            size = self._sizes[key] if isinstance(block, str) else block.shape[0]
            rest = self._without_rows(block, np.arange(size)[rows].reshape(-1), size)
            if rest is not None:
                left[param] = rest
        self._blocks[key] = left

    def compose(self, stages: Iterable[list[StageBlocks]], outer: Callable[[Key], Key]) -> None:
        """Compose the entries of one launch, stage by stage, with the rows before it."""
        versions: dict[Key, list[Any]] = {}

        def before(key: Key, version: int) -> dict[Key, Any] | None:
            made = versions.get(key, [self.blocks(key)])
            return made[version] if version < len(made) else None

        for written in stages:
            found = {outer(w.key): self._after(w, outer, before) for w in written}
            for key, blocks in found.items():
                versions.setdefault(key, [self.blocks(key)]).append(blocks)
            self._blocks.update(found)
        for key in [key for key in self._blocks if isinstance(key, SumKey)]:
            del self._blocks[key]

    def _after(
        self, written: StageBlocks, outer: Callable[[Key], Key], known: Callable[[Any, int], dict[Key, Any] | None]
    ) -> dict[Key, object]:
        terms: dict[Key, list[Any]] = {}
        for owner, (block, data) in written.blocks.items():
            matrix = Matrix(block.pattern, data)
            if block.has_rows:
                matrix = self._arithmetic.without_zeros(block.pattern, data)
            if not isinstance(owner, Version):
                terms.setdefault(outer(owner), []).append(matrix)
                continue
            blocks = known(outer(owner.of), owner.number)
            if blocks is None:  # columns of the row of a local that only a later store gives it
                if matrix.data.any():
                    raise InternalError(f"{written.key} takes a later version of {owner.of}: please report this kernel")
                continue
            for param, before in blocks.items():
                term = matrix if isinstance(before, str) else self._arithmetic.product(matrix, before)
                terms.setdefault(param, []).append(term)
        for param, before in self.blocks(outer(written.key)).items():
            rest = self._without_rows(before, written.stored, written.size)
            if rest is not None:
                terms.setdefault(param, []).append(rest)
        return {param: self._total(param, matrices) for param, matrices in terms.items()}

    def _without_rows(self, block: Any, rows: np.ndarray, size: int) -> str | Matrix | None:
        """A block with some rows empty; None if no entry is left."""
        if isinstance(block, str):
            if not len(rows):
                return block
            block = identity(size, np.float64)
        return self._arithmetic.without_rows(block, rows)

    def _total(self, param: Key, blocks: list[Any]) -> object:
        if len(blocks) == 1:
            return blocks[0]
        types = [b.data.dtype for b in blocks if not isinstance(b, str)]
        eye = identity(self._sizes[param], np.result_type(*types))
        return self._arithmetic.total([eye if isinstance(b, str) else b for b in blocks])


class Rows:
    """The rows of one container, with the methods that a session uses."""

    is_fresh = False

    def __init__(self, rows: SparseRows, key: Key, note_clear: Callable[[object], None] | None) -> None:
        self._rows = rows
        self._key = key
        self._note_clear = note_clear

    def columns(self, param: Key, count: int) -> np.ndarray:
        """Which columns of a parameter have entries that are not zero."""
        block = self._rows.blocks(self._key).get(param)
        csr = None if block is None or isinstance(block, str) else block.csr()
        if csr is None:
            return np.full(count, block is not None)
        return np.bincount(csr.indices[csr.data != 0], minlength=count) > 0

    def any(self) -> bool:
        return any(isinstance(b, str) or b.nnz for b in self._rows.blocks(self._key).values())

    def clear_rows(self, rows: object) -> None:
        """Set the tangents of some entries to zero."""
        if self._note_clear is not None:
            self._note_clear(self._key)
        self._rows.clear(self._key, rows)


def csr_of(values: np.ndarray) -> object:
    """The entries of a dense matrix that are not zero."""
    return scipy_sparse().csr_array(values.astype(sparse_dtype(values.dtype), copy=False))


# Products with the transpose of a sparse J: cotangents go backwards through the entries of each launch.
#
# The entries of each stage are kept without composing them, so J itself is never formed. In the end they are visited in
# reverse order; each container has one adjoint for each number of stages that have written to it.

Adjoints = dict[Key, np.ndarray]


@dataclass(frozen=True)
class _Written:
    """The matrices that one stage writes to one container, by the owner of their columns: a parameter or a version."""

    key: Key
    stored: np.ndarray
    matrices: list[tuple[Any, Any]]


class AdjointRows(SparseRows):
    """The matrices written so far, launch by launch; inherited blocks only record which containers carry tangents."""

    def __init__(self, sizes: dict[Key, int], arithmetic: Arithmetic) -> None:
        super().__init__(sizes, arithmetic)
        self._events: list[Callable[[Adjoints, Adjoints], None]] = []
        self.adjoints: Adjoints = {}  # after ``times``: adjoints of written containers, after the last launch first

    def replace(self, key: Key, blocks: dict[Key, Any]) -> None:
        """Turn rows of tangents into sparse ones."""
        self._blocks[key] = {key: IDENTITY}

        def back(adjoints: Adjoints, gradient: Adjoints) -> None:
            adjoint = adjoints.pop(key, None)
            for param, block in blocks.items() if adjoint is not None else ():
                _add(gradient, param, block.T @ adjoint)

        self._events.append(back)

    def clear(self, key: Key, rows: object) -> None:
        """Note that Python has stored constants to some entries."""

        def back(adjoints: Adjoints, gradient: Adjoints) -> None:
            if key in adjoints:
                adjoints[key] = _without(adjoints[key], rows)

        self._events.append(back)

    def compose(self, stages: Iterable[list[StageBlocks]], outer: Callable[[Key], Key]) -> None:
        launch = [[self._written(w, outer) for w in stage] for stage in stages]
        self._events.append(lambda adjoints, gradient: _back(launch, adjoints, gradient, self.adjoints))

    def _written(self, written: StageBlocks, outer: Callable[[Key], Key]) -> _Written:
        key = outer(written.key)
        matrices = []
        for owner, (block, data) in written.blocks.items():
            source = Version(outer(owner.of), owner.number) if isinstance(owner, Version) else outer(owner)
            own = data.copy() if block.is_lent else data  # used after the last launch
            matrices.append((source, Matrix(block.pattern, own).view()))
        if matrices and not isinstance(key, SumKey):
            self._blocks[key] = {key: IDENTITY}
        return _Written(key, written.stored, matrices)

    def times(self, cotangents: Adjoints) -> Adjoints:
        """The product of the transpose of J with cotangents: for each parameter a matrix with a row for each entry."""
        adjoints, gradient = dict(cotangents), {}
        for back in reversed(self._events):
            back(adjoints, gradient)
        for key, adjoint in adjoints.items():
            _add(gradient, key, adjoint)
        return gradient


def _back(launch: list[list[_Written]], adjoints: Adjoints, gradient: Adjoints, of_written: Adjoints) -> None:
    """The adjoints before a launch, from those after it; those of parameters are added to the gradient."""
    now: dict[Key, int] = {}  # the number of stages so far that have written to a container
    for stage in launch:
        for written in stage:
            now[written.key] = now.get(written.key, 0) + 1
    versions = {Version(key, count): adjoints.pop(key) for key, count in now.items() if key in adjoints}
    for stage in reversed(launch):
        for written in stage:
            adjoint = versions.pop(Version(written.key, now[written.key]), None)
            now[written.key] -= 1
            if adjoint is None:
                continue
            of_written.setdefault(written.key, adjoint)
            _add(versions, Version(written.key, now[written.key]), _without(adjoint, written.stored))
            for source, matrix in written.matrices:
                _add(versions if isinstance(source, Version) else gradient, source, matrix.T @ adjoint)
    for version, adjoint in versions.items():
        if not isinstance(version.of, SumKey):
            _add(adjoints, version.of, adjoint)


def _without(adjoint: np.ndarray, rows: object) -> np.ndarray:
    """The adjoint with some rows set to zero."""
    rest = adjoint.copy()
    rest[rows] = 0
    return rest


def _add(to: dict[Any, np.ndarray], key: Key, values: np.ndarray) -> None:
    to[key] = to[key] + values if key in to else values
