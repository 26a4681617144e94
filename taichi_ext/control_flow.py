"""Control flow of a traced kernel: blocks, loops, and what parallel iterations may touch."""

from __future__ import annotations

from typing import Any

from taichi_ext import _taichi
from taichi_ext.index_forms import Block, IndexForms, Loop
from taichi_ext.nesting import nest_loop

SHORTEST = 8  # part of a row that is worth a loop


class ControlFlow(IndexForms):
    """The layer of a tracer that knows in which blocks and loops a statement stands."""

    def before_loop(self, number: int, *domain: Any) -> None:
        self.domain = _domain(domain)
        site = (self.path, number)
        is_top = len(self.blocks) == 1
        is_parallel = is_top and not self.pending_serial and site not in self.facts.serialized
        if is_top and site in self.facts.serialized and not self.pending_serial:
            _taichi.serialize_next_loop()
        self.loop_numbers[site] = is_parallel
        if len(self.contexts) == 1 and number in self.loop_nodes:
            self.loop_nodes[number].restore()
            if is_parallel and not self.is_reverse:
                self._nest(number, domain)
        self.pending_serial = False

    def _nest(self, number: int, given: tuple[Any, ...]) -> None:
        """Run a loop over a long field row by row: finding i and j from a running number costs as much as a sum."""
        shape = self.domain
        if shape is None or len(shape) < 2 or min(shape) < 1:
            return
        if isinstance(given[0], _taichi.Field) and not _taichi.is_flat(given[0]):
            return
        # Taichi gives each thread one piece of a loop, of at least 512 iterations
        pieces = -(-512 * _taichi.thread_count() // shape[0])
        if shape[1] // pieces >= SHORTEST and _taichi.is_host_arch():
            nest_loop(self.loop_nodes[number].node, shape, pieces)

    def enter(self, number: int | None = None, *variables: Any) -> None:
        loop = None
        if number is not None:
            site = (self.path, number)
            names: list[str] = []
            for n, variable in enumerate(variables):
                names += self._name_loop_variable(f"{site}.{n}", variable)
            is_parallel = bool(variables) and self.loop_numbers.get(site, False)
            loop = Loop(site, is_parallel, tuple(names), self.domain if variables else None)
            self.loops.append(loop)
        self.block = Block(loop)
        self.blocks.append(self.block)

    def _name_loop_variable(self, name: str, variable: Any) -> list[str]:
        if not _taichi.is_expr(variable) or name in self.facts.assigned_integers:
            return [name]
        self.declarations[id(variable)] = (variable, ("loop variable", name))
        if not _taichi.is_tensor(variable):
            self.set_atom(name, variable)
            return [name]
        names = [f"{name}.{i}" for i in range(_taichi.shape_of(variable)[0])]
        self.index_vectors[id(variable)] = (variable, names)
        for i, part in enumerate(names):
            self.set_atom(part, _taichi.element(variable, (i,)))
        return names

    def loop_condition(self, _: None, x: Any) -> Any:
        """The test of a while loop, which is traced inside the loop: ``enter`` is its first argument."""
        return self.primal(x)

    def interrupt(self) -> None:
        """``continue`` or ``break``."""
        if self.loops:
            self.facts.note(self.facts.interrupted, self.loops[-1].site)

    def leave(self) -> None:
        block = self.blocks.pop()
        if block.loop is not None:
            self.loops.pop()
        self.block = self.blocks[-1]

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


def _domain(given: tuple[Any, ...]) -> tuple[int, ...] | None:
    """The shape that a loop runs over, None where it is not known while tracing."""
    if len(given) == 1 and isinstance(given[0], _taichi.Field):
        return tuple(given[0].shape) if _taichi.is_dense(given[0]) else None
    if given and all(isinstance(n, int) for n in given):
        return given
    return None
