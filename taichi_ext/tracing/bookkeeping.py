"""What a traced kernel reads and writes: containers, rows and their freshness, positions of pixels."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from taichi_ext import backend
from taichi_ext.derivative.linear_form import Affine, Form, Seed, as_expression
from taichi_ext.derivative.rows import LocalArray
from taichi_ext.derivative.storage import ADDED, Storage
from taichi_ext.derivative.values import is_tensor_like, primal_of, shape_of
from taichi_ext.errors import UnsupportedError
from taichi_ext.record.parallel_loops import FixedLoad
from taichi_ext.tracing.containers import Container, Ref, broadcast
from taichi_ext.tracing.control_flow import ControlFlow
from taichi_ext.tracing.facts import WriteSite
from taichi_ext.tracing.index_forms import Loop
from taichi_ext.tracing.local_variables import Local, LocalTensor


class Bookkeeping(ControlFlow):
    """The layer of a tracer that takes down facts and decides by those of the trace before."""

    # --- rows

    def own(self, leaf: Any, key: Any) -> Any:
        return dataclasses.replace(leaf, owner=key)

    def check_fresh(self, leaf: Any) -> None:
        """A row that has changed since a local took it on: that local needs a copy of its own."""
        entered = [site for site in self.loop_sites() if site not in leaf.loops]
        is_stale = leaf.version != leaf.current_version or any(
            leaf.place in self.facts.modified.get(site, ()) for site in entered
        )
        if is_stale and leaf.owner is not None:
            self.facts.require_row(leaf.owner)

    def may_defer(self, key: Any) -> bool:
        """Whether the tangent of a local can be left to the place of its use."""
        facts = self.facts
        is_plain = self.watch is None and not self.is_reverse and not facts.spatial and not facts.changes_in_place
        return is_plain and key not in facts.accumulated

    def new_sweep(self) -> int:
        self.sweeps += 1
        return self.sweeps

    def note_sweep(self, node: Any, sweep: int) -> None:
        """An accumulation reads a local whose tangent is computed where it is used."""
        if node.block is not self.block or (node.sweep and node.sweep != sweep):
            self.facts.note(self.facts.accumulated, node.local)
        node.sweep = sweep

    def note_modified(self, place: Any, loops: tuple[Any, ...]) -> None:
        for site in self.loop_sites():
            if site not in loops:
                self.facts.note_modified(site, place)

    def reads_slots_of(self, storage: Storage, form: Form) -> bool:
        symbolic = [s for s in form if isinstance(s, Seed) and not s.is_constant]
        own = [s for s in symbolic if any(self.slot_atoms.get(a) is storage for a, _ in s.column.terms)]
        return bool(own) and len(own) < len(symbolic)

    # --- positions of pixels

    def note_origin(self, key: Any, source: Any) -> None:
        """Remember that a declaration is a copy of another variable."""
        origin = source.key if isinstance(source, LocalTensor) else self._declared_key(source)
        if origin is not None:
            self.origins[key] = self.origins.get(origin, origin)

    def _declared_key(self, variable: Any) -> Any:
        if isinstance(variable, Local):
            return variable.key
        known = self.declarations.get(id(variable)) if backend.is_expr(variable) else None
        return None if known is None else known[1]

    def spatial_seed(self, what: str, variable: Any) -> Seed:
        """The seed of a coordinate of the pixel: an extra column, seeded where the variable was first declared."""
        key = self._declared_key(variable)
        dtype = backend.dtype_of(primal_of(self.value_of(variable)))
        if key is None or not backend.is_real(dtype):
            raise UnsupportedError(
                f"{what}: at must be two real variables, for example px = float(i); level is computed from them."
            )
        if key in self.origins:
            key = self.origins[key]
        elif key[:-1] in self.origins:  # an entry of a vector
            key = (*self.origins[key[:-1]], key[-1])
        return self.extra_seed(key)

    def extra_seed(self, key: Any) -> Seed:
        """A seed beyond the last column: that of a position, or of something that an edge looks for."""
        if key not in self.facts.spatial:
            self.facts.spatial.append(key)
            self.facts.changed = True
            return Seed(Affine((), self.width))
        return Seed(Affine((), self.columns + self.facts.spatial.index(key)))

    def is_column(self, number: int) -> bool:
        """Whether a constant column is one of J, and not the position of a pixel."""
        return 0 <= number < self.columns or (self.sink is not None and number >= self.width)

    def position_form(self, key: Any) -> Form:
        """The seed of a variable that is the position of a pixel."""
        if key not in self.facts.spatial:
            return {}
        return {Seed(Affine((), self.columns + self.facts.spatial.index(key))): 1}

    def require_settled(self, message: str) -> None:
        """Raise, unless the facts are still changing."""
        if not self.facts.changed:
            raise UnsupportedError(message)

    def new_join(self, dtype: Any) -> Storage:
        place = (self.path, "?", self.line())
        self.join_counts[place] = self.join_counts.get(place, 0) + 1
        key = (*place, self.join_counts[place])
        self.facts.storage(key).needed = True
        return Storage(self, key, dtype)

    def reserve_scratch(self, size: int, dtype: Any) -> tuple[Any, Any]:
        """Memory for a row: the array, None while it is only being counted, and where the row starts."""
        key = ("scratch", dtype.to_string())
        self.facts.note(self.facts.shadowed, key)
        parts, own = self._part()
        start = self.scratch_sizes.get(key, 0)
        self.scratch_sizes[key] = start + size * parts
        return self.plan.shadow_arrays.get(key), start if parts == 1 else own * size + start

    def _part(self) -> tuple[int, Any]:
        """Into how many parts scratch memory is cut here, and the number of the iteration's own.

        There is one for each thread; or for each iteration, where those are fewer or threads have no number.
        """
        loop = self.parallel_loop()
        if loop is None:
            return 1, 0
        threads = backend.thread_count()
        is_numbered = not backend.is_host_arch() and all(name in self.atoms for name in loop.variables)
        iterations = loop.iterations() if is_numbered else None
        if iterations is not None and (not threads or iterations < threads):
            return iterations, self._iteration(loop)
        if not threads:
            self.keep_order()  # in one thread, then
            return 1, 0
        return threads, backend.thread_index()

    def _iteration(self, loop: Loop) -> Any:
        """The number of an iteration of a loop."""
        number: Any = 0
        for name, (first, end) in zip(loop.variables, loop.bounds() or (), strict=True):
            number = number * (end - first) + (self.atoms[name] - first)
        return number

    # --- loops in pieces

    def fixed_load(self, ref: Ref) -> Any:
        """The value of an entry that has been read before the piece that is being traced; None for any other."""
        if self.survey is None and self.piece is None:
            return None
        c = ref.container
        offset = c.offset or (0,) * len(c.shape)
        is_inside = all(
            isinstance(i, int) and 0 <= i - first < size
            for i, first, size in zip(ref.indices, offset, c.shape, strict=True)
        )
        is_fixed = is_inside and isinstance(ref.component, (int, type(None))) and len(c.element_shape) < 2
        if not is_fixed:
            return None
        load = FixedLoad(c.key, ref.target, ref.indices, ref.component)
        if self.survey is not None:
            self.survey.loads[load] = None
        return None if self.piece is None else self.piece.loads.get(load)

    def note_access(self, target: Any, indices: tuple[Any, ...], container: Container | None) -> None:
        """A field or array is indexed in the loop that is being traced."""
        if self.survey is not None:
            self.survey.note_access(target)
            if container is None and all(isinstance(i, int) for i in indices):
                self.survey.refuse()  # it is not read before the piece

    def note_store(self, container: Container, ref: Ref) -> None:
        """A value is stored to a container, to another entry in each iteration or not."""
        if self.survey is None:
            return
        self.survey.written.add(container.key)
        self.survey.stores_others |= container.shadow is None
        if not self.is_private(container, ref):
            self.note_effect()
        if not self.covers(container) or container.dtype == backend.ti.f16:
            self.refuse_pieces()

    def note_work(self, name: str, value: Any) -> None:
        """An operation of the rule table on each entry of a value."""
        if self.survey is not None:
            self.survey.note(name, math.prod(shape_of(value)) if is_tensor_like(value) else 1)

    def collect(self, container: Container, ref: Ref, forms: list[Form], is_complete: bool) -> bool:
        """Whether the piece that is being traced keeps the tangents that are stored here, until it is done."""
        numbers = len(forms) * self.columns
        if self.survey is not None and is_complete:
            self.survey.collect(container, ref.target, numbers)
        else:
            self.refuse_pieces()
        if self.piece is None:
            return False
        if not is_complete or container.key not in self.piece.tangents:
            self.forget_piece()
            return False
        numbered = {n * self.columns + s.column.constant: c for n, form in enumerate(forms) for s, c in form.items()}
        tangents = {n: as_expression(c, container.dtype) for n, c in numbered.items()}
        self.piece.keep_tangents(container.key, ref.indices[-1], tangents)
        return True

    def keep_value(self, container: Container, ref: Ref, value: Any) -> bool:
        """Whether the piece that is being traced keeps a value that is stored, until it is done."""
        if self.piece is None or container.key not in self.piece.values:
            return False
        self.piece.keep_value(container.key, ref.indices[-1], broadcast(value, container.components))
        return True

    def accept_pieces(self) -> None:
        """At the end of a trace: the loops that are to run in pieces."""
        for key, survey in self.surveys.items():
            if key not in self.facts.pieces:
                self.facts.pieces[key] = survey.pieces()
                self.facts.changed |= self.facts.pieces[key] is not None
            if survey.is_spread():
                self.facts.note(self.facts.spread, key)

    # --- containers

    def container(self, obj: Any) -> Container | None:
        """The container of a field or array that can carry tangents."""
        return self.plan.container(self, obj)

    def is_stopped(self, container: Container) -> bool:
        return any(container.key in block.stopped for block in self.blocks)

    def note_read(self, container: Container) -> None:
        self.facts.read.add(container.key)
        if self.survey is not None:
            self.survey.read.add(container.key)

    def note_write(self, container: Container, ref: Ref, active: bool) -> None:
        self.facts.written.add(container.key)
        self.refuse_in_rule()
        if not container.keeps_tangents and (active or container.first_column is not None):
            if self.sink is not None and container.first_column is not None:
                self.sink.require_columns(container)
            else:
                self.facts.note(self.facts.shadowed, container.key)
        indices = (*(self.affine(i) for i in ref.indices), self.affine(-1 if ref.component is None else ref.component))
        loops = tuple((loop.site, loop.is_parallel, loop.variables) for loop in self.loops)
        self.writes.setdefault(container.key, []).append(WriteSite(indices, loops))

    def refuse_in_rule(self) -> None:
        """Raise where a user's rule is traced: a field or array is written to."""
        if self.without_rules:
            raise UnsupportedError("A rule must not write to fields or arrays; it returns a tangent.")

    def is_first_write(self, container: Container, ref: Ref) -> bool:
        """Whether the entry's shadow is certain to be zero here, so that it need not be cleared."""
        site = self.writes[container.key][-1]
        others = [s for s in self.facts.writes.get(container.key, []) if s != site]
        same = [s for s in self.facts.writes.get(container.key, []) if s == site]
        if not container.is_fresh or len(same) != 1:
            return False
        if any(not site.covers(variables) or not variables for _, _, variables in site.loops):
            return False
        return all(site.is_disjoint_from(other) for other in others)

    def is_untouched(self, container: Container) -> bool:
        """Whether nothing can have been written to a container before the store that was noted last."""
        sites, known = self.writes[container.key], self.facts.writes.get(container.key, [])
        if not container.is_fresh or len(sites) != 1 or known[:1] != sites:
            return False
        loops = sites[0].loops
        return not loops or all(not other.loops or other.loops[0][0] != loops[0][0] for other in known[1:])

    def covers(self, container: Container) -> bool:
        """Whether the store that was noted last is to every entry of a container, once, whatever the values are."""
        site = self.writes[container.key][-1]
        if len(self.writes[container.key]) != 1 or len(self.facts.writes.get(container.key, [])) != 1:
            return False
        if len(self.blocks) != 2 or len(self.loops) != 1 or self.loops[0].domain != container.shape:
            return False
        if self.loops[0].site in self.facts.interrupted:
            return False
        own = tuple(Affine(((v, 1),)) for v in self.loops[0].variables)
        is_whole = site.indices[-1] == Affine((), -1) and not any(container.offset)
        return is_whole and site.indices[:-1] == own

    def note_alias(self, storage: Storage, container: Container) -> None:
        """The row of a local is stored, as it is, as the row of a container of which every entry is written."""
        is_declared_here = storage.block is self.block and storage.size == 1
        # in local memory, updates of all of a row are vectorised, which pays for the copy
        is_better_local = storage.row_loops > 0 and isinstance(storage.row, LocalArray)
        if is_declared_here and not is_better_local and container.components == 1 and self.width == self.columns:
            self.alias_candidates[storage.key] = (storage, container.key, (storage.version, storage.reads))

    def shared_container(self, key: Any) -> Container | None:
        """The container whose shadow holds the row of a local, once that is settled."""
        container = self.plan.containers.get(self.facts.aliases.get(key))
        if key in self.facts.aliases and container is None:
            container = self.plan.container_by_key(self, self.facts.aliases[key])
        return container if container is not None and container.shadow is not None else None

    def accept_aliases(self) -> None:
        """At the end of a trace: the rows of locals that can be the rows of J from the start."""
        for key, (storage, container, state) in self.alias_candidates.items():
            is_left_alone = (storage.version, storage.reads) == state  # after the store
            if (
                len(self.storages[key]) == 1
                and is_left_alone
                and container not in self.facts.read
                and key not in self.facts.aliases
            ):
                self.facts.aliases[key] = container
                self.facts.changed = True

    def accept_stores(self) -> None:
        """At the end of a trace: the rows to which terms can be stored rather than added."""
        for key, made in self.storages.items():
            is_single = len(made) == 1 and made[0].row is not None and made[0].has_terms
            stores = made[0].stores if is_single else ADDED
            known = self.facts.stores.get(key)
            if stores < (known or ADDED) or (known is None and stores > ADDED):
                self.facts.stores[key] = stores
                self.facts.changed = True

    def is_private(self, container: Container, ref: Ref) -> bool:
        """Whether no other iteration of the surrounding parallel loop writes to the entry."""
        loop = self.parallel_loop()
        if loop is None:
            return True
        sites = [s for s in self.facts.writes.get(container.key, []) if s.loops and s.loops[0][0] == loop.site]
        if not sites or not loop.variables or not sites[0].covers(loop.variables):
            return False
        own = set(loop.variables)
        dims = [i for i, a in enumerate(sites[0].indices) if len(a.terms) == 1 and a.terms[0][0] in own]
        return all(s.indices[d] == sites[0].indices[d] for s in sites for d in dims)
