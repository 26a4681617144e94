"""The target of a sparse J: each launch gives sparse blocks, which are composed launch by launch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from taichi_ext.differentiate.forms.entry_sites import IntermediatesError, SparseColumns, check_sparse
from taichi_ext.errors import UnsupportedError
from taichi_ext.launches import FROM_INTERMEDIATES, GRADIENT, ColumnBlock, JacobianKernel, SparseTarget
from taichi_ext.program.keys import ADJOINTS, Key, OwnArray, SumKey
from taichi_ext.runtime.launching.tangents import DenseRows, Tangents
from taichi_ext.runtime.memory.regions import View
from taichi_ext.runtime.memory.shadows import Shadow
from taichi_ext.runtime.memory.state import State
from taichi_ext.runtime.python.dual_numbers import ASKING, UNKNOWN
from taichi_ext.runtime.sparse.matrices import Arithmetic
from taichi_ext.runtime.sparse.rows import SparseRows
from taichi_ext.runtime.sparse.streams import Saved, Streams, project

_ARRAY_LEFT_OUT = "a kernel of the pipeline computes an array from params"


class SparseEntries(DenseRows):
    """The entries for each pair of output and parameter.

    Args:
        numbering: the columns.
        outputs: the containers that J has rows of.
        rows: the composed rows.
        of_energy: the sizes of the fields that an energy is computed from.
        adjoints: derivatives with respect to these: a number for each column.

    Attributes:
        launched: the last kernel.
        is_symmetric: whether the entries are those of a symmetric matrix, to the last bit.
    """

    is_dense = False
    has_dual_numbers = False

    def __init__(
        self,
        numbering: SparseColumns,
        outputs: frozenset[Key],
        rows: SparseRows,
        of_energy: Mapping[Any, int],
        adjoints: Shadow | None = None,
    ) -> None:
        self.numbering = numbering
        self.of_energy: Mapping[Any, int] = of_energy
        self._adjoints = adjoints
        self._read = set[Key]()  # the containers that the kernels of the run have read so far
        self.outputs = outputs
        self.sparse_rows = rows
        self.launched: JacobianKernel | None = None
        self.changes = 0
        self.is_symmetric = True
        self._left_out: dict[Key, object] = {}  # names of containers whose tangents are not kept

    def open(self, tangents: Tangents, outputs: Sequence[object]) -> None:
        """Nothing: entries are added as they come."""

    # --- containers

    def rows(self, key: Key) -> Any:
        numbering = self.numbering
        if key in numbering.intermediates or key in self.outputs or key in numbering.sizes:
            return self.sparse_rows.of(key, self._note_clear)
        return None

    def keys(self) -> Sequence[Key]:
        return self.sparse_rows.keys()

    def lacks(self, key: Key) -> bool:
        return key in self._left_out

    def _note_clear(self, key: Key) -> None:
        """Python is about to store to a parameter: its entries no longer are the columns from the start."""
        sizes, intermediates = self.numbering.sizes, self.numbering.intermediates
        is_param, is_new = key in sizes, key in sizes and key not in intermediates
        check_sparse(
            ("a field that the energy is computed from is changed from Python", key in self.of_energy),
            ("a parameter is changed from Python", is_param and GRADIENT in self.outputs),
            ("an array that is a parameter is changed from Python", is_new and isinstance(key, View)),
        )
        if is_new:
            self._extend(self.numbering.in_rows, {**intermediates, key: sizes[key]})

    def _extend(self, in_rows: set[Key], intermediates: dict[Key, int]) -> None:
        """Number the columns of more containers; repeated launches may lack tangents of these."""
        self.numbering = self.numbering.extended(in_rows, intermediates, {})
        self.changes += 1

    # --- launches

    def block(self, block: ColumnBlock) -> ColumnBlock:
        return replace(block, count=self.numbering.width) if self.numbering.in_rows else block

    def of_launch(self, names: Mapping[Key, Key]) -> SparseTarget:
        numbering = self.numbering
        known = {k for k in (*numbering.sizes, *self.outputs) if isinstance(k, View)}
        others = [key for key in names if isinstance(key, View) and key not in known] if known else []
        is_shared = any(other.overlaps(key) for other in known for key in others)
        check_sparse(("two arrays share a part of their memory", is_shared))
        columns = SparseColumns(
            {names.get(key, key): size for key, size in numbering.sizes.items()},
            {names.get(key, key) for key in numbering.in_rows},
            {names.get(key, key): size for key, size in numbering.intermediates.items()},
        )
        return SparseTarget(columns, frozenset(names.get(key, key) for key in self.outputs))

    def accept(self, fused: JacobianKernel, outer: Mapping[Key, Key], tangents: Tangents) -> None:
        self._check_left_out(fused, outer, tangents)
        self._check_intermediates(fused)
        assert fused.entries is not None
        columns, before = fused.entries.columns, self.numbering
        in_rows = {outer.get(key, key) for key in columns.in_rows} - before.in_rows
        intermediates = {outer.get(k, k): n for k, n in columns.intermediates.items() if not isinstance(k, SumKey)}
        new = {key: n for key, n in intermediates.items() if key not in before.intermediates}
        has_rows = bool(tangents.shadows) or any(r.shadow is not None for r in tangents.arrays.regions)
        check_sparse(
            ("an array that carries tangents is read and written", any(isinstance(key, View) for key in new)),
            ("a later kernel depends on more params in its rows of tangents", has_rows and (in_rows or new)),
        )
        if in_rows or new:
            self._extend(before.in_rows | in_rows, {**before.intermediates, **new})
            tangents.columns.count = self.numbering.width

    def _check_left_out(self, fused: JacobianKernel, outer: Mapping[Key, Key], tangents: Tangents) -> None:
        """Raise if a kernel reads values that another one has computed from parameters: their tangents are needed."""
        for key in (outer.get(k, k) for k in fused.facts.read):
            if key in self._left_out:
                check_sparse((_ARRAY_LEFT_OUT, isinstance(key, View)))
                reason = FROM_INTERMEDIATES.format(self._left_out[key], "another kernel")
                raise IntermediatesError(reason, {key: tangents.carrier(key).size})
        for key in (outer.get(k, k) for k in fused.facts.left_out):
            self._left_out[key] = tangents.carrier(key).name

    def _check_intermediates(self, fused: JacobianKernel) -> None:
        """Raise if two values of an intermediate's entry may matter, or if a run cannot be repeated."""
        keys = self.of_energy.keys()
        stored = {site.key for site in fused.sites if not site.is_sum} & keys
        twice = {key for key in stored if self.rows(key).any()} | (keys & fused.facts.written & self._read)
        check_sparse(
            ("the energy is computed from fields, and a kernel draws random numbers", keys and fused.facts.has_random),
            ("a field that the energy is computed from is stored twice, or after it is read", twice),
        )
        self._read |= fused.facts.read

    def array(self, fused: JacobianKernel, key: Any) -> Any:
        if key == ADJOINTS:
            assert self._adjoints is not None
            return self._adjoints.array
        return Streams.of(fused).array(key)

    def run(self, fused: JacobianKernel, save: Callable[[State], None], launch: Callable[[], object]) -> Any:
        """Launch a kernel, and again if there was too little room for the entries that it counts."""
        self.launched = fused
        streams, state = Streams.of(fused), State()
        if streams.counts:
            save(state)
            _check_repeatable(state, fused)
        streams.begin()
        while True:
            result = launch()
            if streams.has_room():
                return result
            state.undo()
            streams.make_room()
            streams.begin()

    def collect(self, fused: JacobianKernel, outer: Mapping[Key, Key]) -> None:
        if not fused.sites:
            return
        streams = Streams.of(fused)
        self._compose(streams, outer)
        self.is_symmetric = self.is_symmetric and streams.is_symmetric

    def _compose(self, streams: Streams, outer: Mapping[Key, Key]) -> None:
        self.sparse_rows.compose(streams.end(), lambda key: outer.get(key, key))

    def number(self, tangents: Tangents, key: Key, row: int) -> tuple[Any, int | None]:
        return UNKNOWN, None

    def tells_moves(self, run: Any, cuts: Sequence[str], is_along_all: bool) -> bool:
        return not run.has_unknown and all(name in ASKING for name in cuts)

    def check_root(self, name: str) -> None:
        check_sparse((f"{name} solves for unknowns, which depend on all params", True))

    def end_pipeline(self, energy: Key | None) -> None:
        def has_array(keys: Iterable[Key]) -> bool:
            return any(isinstance(key, View) for key in keys)

        reason = "arrays that Python can change are parameters or outputs of a pipeline"
        check_sparse(
            (_ARRAY_LEFT_OUT, has_array(self._left_out)),
            (reason, has_array((*self.numbering.sizes, *self.outputs))),
            ("the energy is an array that Python can change", isinstance(energy, View)),
        )


class ProjectedEntries(SparseEntries):
    """The entries of a Hessian whose blocks of elements are made positive semidefinite, in a way of ``Projection``."""

    def __init__(self, projection: str, *entries: Any) -> None:
        super().__init__(*entries)
        self._projection = projection
        self._saved: list[
            tuple[JacobianKernel, Mapping[Key, Key], Saved, int]
        ] = []  # entries, and how many blocks to project

    def accept(self, fused: JacobianKernel, outer: Mapping[Key, Key], tangents: Tangents) -> None:
        if not all(site.is_symmetric for site in fused.sites):
            raise UnsupportedError(
                f"project={self._projection!r} needs the block of each element, and which params a term reads is not "
                "known where it is added to the energy: a local of it is set in a branch or loop. Add the term in the "
                "branch or loop itself, or leave out project=."
            )
        super().accept(fused, outer, tangents)

    def collect(self, fused: JacobianKernel, outer: Mapping[Key, Key]) -> None:
        if fused.sites and self._projection != "on_demand":
            project(Streams.of(fused), self._projection)
        elif fused.sites:
            streams = Streams.of(fused)
            if streams.counts and any(fused is other for other, *_ in self._saved):
                raise UnsupportedError(
                    "project='on_demand' keeps the blocks of each launch, which is not possible where a kernel "
                    "whose loops have bounds known at run time is launched twice. Use project='clamp'."
                )
            self._saved.append((fused, outer, streams.saved(), project(streams, "on_demand")))
        super().collect(fused, outer)

    @property
    def indefinite(self) -> int:
        """How many of the saved blocks of elements are not positive semidefinite."""
        return sum(count for *_, count in self._saved)

    def project_saved(self, arithmetic: Arithmetic) -> SparseRows:
        """Project the saved blocks of a Hessian; returns the rows of the assembled matrix."""
        self.sparse_rows = SparseRows(self.numbering.sizes, arithmetic)
        for fused, outer, saved, _ in self._saved:
            streams = Streams.of(fused)
            streams.put_back(saved)
            project(streams, "clamp")
            self._compose(streams, outer)
        return self.sparse_rows


def _check_repeatable(state: State, fused: JacobianKernel) -> None:
    """Raise if a kernel that counts its entries cannot be run again."""
    is_lost = any(k in fused.facts.written for k in fused.shadows if not isinstance(k, OwnArray))
    reason = "the number of entries is only known after a launch, which cannot be repeated: it draws random numbers, "
    check_sparse((f"{reason}or adds to tangents that are kept from an earlier one", is_lost or state.has_random))
