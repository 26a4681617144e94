"""Control flow of a traced kernel: blocks, loops, and what parallel iterations may touch."""

from __future__ import annotations

from typing import Any

from taichi_ext import backend
from taichi_ext.errors import UnsupportedError
from taichi_ext.record.nesting import flatten_loop, index_names, nest_loop, nest_pieces, spread_loop
from taichi_ext.record.parallel_loops import LEAST_ITERATIONS, Piece, Survey
from taichi_ext.tracing.index_forms import Block, IndexForms, Loop

SHORTEST = 8  # part of a row that is worth a loop


class ControlFlow(IndexForms):
    """The layer of a tracer that knows in which blocks and loops a statement stands."""

    def before_loop(self, number: int, *domain: Any) -> None:
        if domain and backend.is_mesh_domain(domain[0]):
            raise UnsupportedError(
                "A loop over the elements of a mesh reads and stores attributes in a way that is not differentiated. "
                "Loop over the fields of the attributes, with indices kept in integer fields."
            )
        self.domain = self._domain(domain)
        self.offset = backend.field_offset(domain[0]) if domain and isinstance(domain[0], backend.Field) else ()
        site = (self.path, number)
        is_top = len(self.blocks) == 1
        is_serial_for_user = self.pending_serial and (backend.is_host_arch() or not self._is_over_field(number, domain))
        keeps_order = is_top and not is_serial_for_user and site in self.facts.serialized
        is_parallel = is_top and not is_serial_for_user and not keeps_order
        self.loop_numbers[site] = is_parallel
        if self.survey is not None:
            self.survey.has_loops = True
            self.survey.refuse()
        self.visits[number] += 1
        if len(self.contexts) == 1 and number in self.loop_nodes:
            self.loop_nodes[number].restore()
            if (
                is_parallel
                and self.columns
                and not self.is_reverse
                and backend.is_host_arch()
                and _is_row_major(domain, self.domain)
            ):
                self._nest(number, self.domain or ())
        if keeps_order:
            self._serialize(number, domain)
        self.pending_serial = False

    def _is_over_field(self, number: int, domain: tuple[Any, ...]) -> bool:
        """Whether a loop is over a field, not over a range or an array; in doubt it is."""
        if domain:
            return isinstance(domain[0], backend.Field)
        node = self.loop_nodes.get(number) if len(self.contexts) == 1 else None
        return node is None or not node.is_over_range

    def _serialize(self, number: int, domain: tuple[Any, ...]) -> None:
        """Let the next loop run in one thread, one iteration after the other."""
        backend.serialize_next_loop()
        if backend.is_host_arch() or not self._is_over_field(number, domain):
            return
        # Taichi 1.7.4 runs loops over fields in parallel on a GPU, whatever it is told
        node = self.loop_nodes[number].node if len(self.contexts) == 1 and number in self.loop_nodes else None
        names = [] if node is None or self.domain is None else index_names(node, self.domain)
        if not names or any(f"{((), number)}.{n}" in self.facts.assigned_integers for n in range(len(names))):
            raise UnsupportedError(
                "The order of the iterations matters to the derivative here, and Taichi runs this loop over a field in "
                "parallel on a GPU. Write it as a loop over a range: for i, j in ti.ndrange(n, m)."
            )
        assert node is not None
        assert self.domain is not None
        flatten_loop(node, self.domain, backend.field_offset(domain[0]))

    def _domain(self, given: tuple[Any, ...]) -> tuple[int, ...] | None:
        """The shape that a loop runs over, None where it is not known while tracing."""
        if len(given) == 1 and isinstance(given[0], backend.Field):
            backend.refuse_ended(given[0], "The field that this loop runs over")
            return tuple(given[0].shape) if backend.is_dense(given[0]) else None
        if len(given) == 1 and isinstance(given[0], backend.AnyArray):
            container = self.plan.container(self, given[0])
            return None if container is None else container.shape
        return given if given and all(isinstance(n, int) for n in given) else None

    def size(self, base: Any, index: tuple[Any, ...]) -> int | None:
        """``base.shape[index]`` as a number, None where it is not known while tracing."""
        known = self.plan.container(self, base) if isinstance(base, backend.AnyArray) else base
        shape = getattr(known, "shape", None)
        is_known = isinstance(shape, tuple) and len(index) == 1 and index[0] in range(len(shape))
        return shape[index[0]] if is_known else None  # type: ignore[index]

    def _nest(self, number: int, shape: tuple[int, ...]) -> None:
        """Run a loop over a long field row by row: finding i and j from a running number costs as much as a sum."""
        node = self.loop_nodes[number].node
        if any(f"{((), number)}.{n}" in self.facts.assigned_integers for n in range(len(shape))):
            return  # by a function that takes them by reference
        key = (number, self.visits[number])  # a loop within a static loop is visited again, over something else
        self.pieces = self.facts.pieces.get(key)
        if self.pieces is not None:
            nest_pieces(node, shape, self.pieces.length)
            return
        least = LEAST_ITERATIONS * backend.thread_count()
        if key in self.facts.spread:
            spread_loop(node, shape, least)
            return
        is_plain = self.watch is None and self.sink is None and not backend.is_debug()
        if is_plain and index_names(node, shape):
            self.surveys[key] = self.next_survey = Survey(shape, has_effects=self._has_locals())
        # Taichi gives each thread one piece of a loop, of at least 512 iterations
        count = -(-least // shape[0])
        if len(shape) > 1 and shape[1] // count >= SHORTEST:
            nest_loop(node, shape, count)

    def _has_locals(self) -> bool:
        """Whether the kernel has locals that the iterations of a parallel loop would share."""
        return any(set(scope) - set(self.context.kernel_args) for scope in self.context.local_scopes)

    def index(self, x: Any) -> Any:
        """An integer expression as an index of a loop."""
        return x if backend.dtype_of(x) == backend.i32 else backend.cast(x, backend.i32)

    def begin_piece(self, *place: Any) -> Any:
        """Before a piece of a parallel loop: the indices around it, and its first own one. Returns where it ends."""
        assert self.pieces is not None
        assert self.domain is not None
        self.piece = Piece(self, self.pieces, self.domain, place[:-1], place[-1])
        return self.index(self.piece.end)

    def end_piece(self) -> None:
        assert self.piece is not None
        self.piece.copy()
        if not self.piece.is_complete:
            self.forget_piece()
        self.piece = None

    def refuse_pieces(self) -> None:
        """The parallel loop that is being traced does what vectors cannot do."""
        if self.survey is not None:
            self.survey.refuse()

    def note_effect(self) -> None:
        """The parallel loop that is being traced does what depends on the order of its iterations."""
        if self.survey is not None:
            self.survey.has_effects = True
            self.survey.refuse()

    def forget_piece(self) -> None:
        """The loop that is being traced is not what it was taken for: it is not to run in pieces."""
        self.facts.pieces = dict.fromkeys(self.facts.pieces)
        self.facts.changed = True

    def enter(self, number: int | None = None, *variables: Any) -> None:
        loop = None
        if number is not None:
            site = (self.path, number)
            names: list[str] = []
            for n, variable in enumerate(variables):
                names += self._name_loop_variable(f"{site}.{n}", variable)
            is_parallel = bool(variables) and self.loop_numbers.get(site, False)
            loop = Loop(site, is_parallel, tuple(names), self.domain if variables else None, self.offset)
            self.loops.append(loop)
            if is_parallel:
                self.survey, self.next_survey = self.next_survey, None
        self.stage += len(self.blocks) == 1
        self.block = Block(loop)
        self.blocks.append(self.block)

    def _name_loop_variable(self, name: str, variable: Any) -> list[str]:
        if not backend.is_expr(variable) or name in self.facts.assigned_integers:
            return [name]
        self.declarations[id(variable)] = (variable, ("loop variable", name))
        if not backend.is_tensor(variable):
            self.set_atom(name, variable)
            return [name]
        names = [f"{name}.{i}" for i in range(backend.shape_of(variable)[0])]
        self.index_vectors[id(variable)] = (variable, names)
        for i, part in enumerate(names):
            self.set_atom(part, backend.element(variable, (i,)))
        return names

    def loop_condition(self, _: None, x: Any) -> Any:
        """The test of a while loop, which is traced inside the loop: ``enter`` is its first argument."""
        return self.primal(x)

    def interrupt(self) -> None:
        """``continue`` or ``break``."""
        self.refuse_pieces()
        if self.loops:
            self.facts.note(self.facts.interrupted, self.loops[-1].site)

    def leave(self) -> None:
        block = self.blocks.pop()
        self.stage += len(self.blocks) == 1
        if block.loop is not None:
            self.loops.pop()
            if not self.loops:
                self.survey = None
                self._accept_covering()
        self.block = self.blocks[-1]

    def note_covering(self, container: Any) -> None:
        """The loop that is being traced writes all tangents of a container, which nothing has accessed before."""
        self.covering.append((container, container.accesses))

    def _accept_covering(self) -> None:
        """At the end of a parallel loop: what it covers need not be cleared before, unless it reads it as well."""
        self.facts.covered |= {c.key for c, accesses in self.covering if c.accesses == accesses}
        self.covering.clear()

    def loop_sites(self) -> tuple[Any, ...]:
        return tuple(loop.site for loop in self.loops)

    def parallel_loop(self) -> Loop | None:
        return self.loops[0] if self.loops and self.loops[0].is_parallel else None

    def is_shared(self, block: Block) -> bool:
        """Whether iterations of a parallel loop meet in something declared in a block."""
        loop = self.parallel_loop()
        return loop is not None and block is self.blocks[0]

    def keep_order(self) -> None:
        """The order of the iterations matters here: the surrounding parallel loop must run serially."""
        loop = self.parallel_loop()
        if loop is not None:
            self.facts.note(self.facts.serialized, loop.site)


def _is_row_major(given: tuple[Any, ...], shape: tuple[int, ...] | None) -> bool:
    """Whether a loop goes over all indices below a known shape in the order in which memory has them."""
    if shape is None or min(shape, default=0) < 1:
        return False
    return not isinstance(given[0], backend.Field) or backend.is_flat(given[0])
