"""Integer expressions of a traced kernel in normal form, so that equal indices are seen to be equal."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterable
from typing import Any

from taichi_ext import backend
from taichi_ext.derivative.linear_form import Affine, Form, Seed, is_row
from taichi_ext.derivative.storage import Storage
from taichi_ext.derivative.values import primal_of
from taichi_ext.record.parallel_loops import Piece, Pieces, Survey
from taichi_ext.tracing.containers import Ref
from taichi_ext.tracing.facts import Facts, WriteSite
from taichi_ext.tracing.local_variables import Local, LocalEntry, LocalStruct, LocalTensor

Locals = (Local, LocalTensor, LocalEntry, LocalStruct)


@dataclasses.dataclass(eq=False)
class Loop:
    """A loop that is decided at run time."""

    site: Any
    is_parallel: bool
    variables: tuple[str, ...]
    domain: tuple[int, ...] | None = None  # runs once over every index below these
    offset: tuple[int, ...] = ()  # of the field that it is over

    def bounds(self) -> list[tuple[int, int]] | None:
        """First index and end of each variable, None where they are not known while tracing."""
        if self.domain is None:
            return None
        if len(self.domain) == 2 and len(self.variables) == 1:  # range(first, end)
            return [(self.domain[0], max(self.domain))]
        first = self.offset or (0,) * len(self.domain)
        return [(f, f + n) for f, n in zip(first, self.domain, strict=True)]

    def iterations(self) -> int | None:
        """How often it runs."""
        bounds = self.bounds()
        return None if bounds is None else math.prod(end - first for first, end in bounds)


@dataclasses.dataclass(eq=False)
class Block:
    """A block of run-time control flow; ``loop`` is set for the body of a loop."""

    loop: Loop | None = None
    stopped: set[Any] = dataclasses.field(default_factory=set)  # containers under ti.stop_grad


class IndexForms:
    """The state of a trace, and its first layer: places in the source, and the normal form of indices."""

    def __init__(self, facts: Facts, columns: int, plan: Any, is_reverse: bool = False) -> None:
        self.facts = facts
        self.columns = columns  # of the Jacobian
        self.width = columns + len(facts.spatial)  # of a row: the positions of pixels are seeds too
        self.watch: Any = None  # called with each value whose tangent is kept
        self.is_reverse = is_reverse  # compiled for Taichi's reverse mode, which takes the derivative itself
        self.origins: dict[Any, Any] = {}
        self.roots: dict[Seed, tuple[Any, Any]] = {}  # marks of sqrt_edge: the level, and the block that it is known in
        self.plan = plan
        self.contexts: list[Any] = []
        self.path: tuple[Any, ...] = ()
        self.block = Block()
        self.blocks: list[Block] = [self.block]
        self.loops: list[Loop] = []
        self.atoms: dict[str, Any] = {}
        self.atom_counts: collections.Counter[Any] = collections.Counter()  # by place in the source
        self.atom_numbers: dict[str, int] = {}  # in order of their declaration
        self.affines: dict[int, tuple[Any, Affine]] = {}  # id -> (expression kept alive, normal form)
        self.index_vectors: dict[int, tuple[Any, list[str]]] = {}
        self.slot_atoms: dict[str, Any] = {}
        self.declarations: dict[int, tuple[Any, Any]] = {}
        self.literals: dict[int, tuple[Any, float]] = {}  # id -> (expression kept alive, the number that it is)
        self.join_counts: dict[Any, int] = {}
        self.writes: dict[Any, list[WriteSite]] = {}
        self.loop_numbers: dict[Any, bool] = {}
        self.pending_serial = False
        self.sweeps = 0
        self.loop_nodes: dict[int, Any] = {}  # the kernel's loops in the tree that is walked
        self.domain: tuple[int, ...] | None = None
        self.offset: tuple[int, ...] = ()
        self.visits: collections.Counter[int] = collections.Counter()  # of loops, by number
        self.surveys: dict[Any, Survey] = {}  # of the parallel loops that may run in pieces
        self.survey: Survey | None = None  # of the loop that is being traced
        self.next_survey: Survey | None = None
        self.pieces: Pieces | None = None  # how the loop that is being traced runs in pieces
        self.piece: Piece | None = None
        self.is_inside_expression = False
        self.without_rules: list[Any] = []
        self.covering: list[tuple[Any, int]] = []  # containers that the loop being traced covers, and their accesses
        self.storages: dict[Any, list[Storage]] = {}
        self.alias_candidates: dict[Any, tuple[Storage, Any, tuple[int, int]]] = {}
        self.scratch_sizes: dict[Any, int] = {}
        self.operations: collections.Counter[Any] = collections.Counter()  # on tangents, by place in the source
        self.arrays: dict[int, tuple[Any, Any]] = {}
        self.sink: Any = None  # takes the entries of a sparse Jacobian
        self.stage = 0  # number of the statement at the top of the kernel

    @property
    def context(self) -> Any:
        return self.contexts[-1]

    # --- places in the source

    def line(self) -> int:
        match = re.search(r"line (\d+), in", backend.source_location())
        return int(match.group(1)) if match else 0

    def note_operations(self, count: int) -> None:
        """So many operations on tangents are done each time the current line runs."""
        if count:
            self.operations[self.path, self.line()] += count

    def note_rows(self, forms: Iterable[Form]) -> None:
        """The rows of forms are added up here, column by column."""
        self.note_operations(self.columns * sum(is_row(leaf) for form in forms for leaf in form))

    def note_seeds(self, forms: Iterable[Form]) -> None:
        """The terms of forms that are no rows are added here, each to an entry."""
        self.note_operations(sum(not is_row(leaf) for form in forms for leaf in form))

    def declaration_key(self, name: Any) -> Any:
        return (self.path, self.line(), name)  # keys of other things have a word in the second place

    # --- integer expressions

    def set_atom(self, name: str, variable: Any) -> None:
        self.atoms[name] = variable
        self.atom_numbers[name] = len(self.atom_numbers)
        self.affines[id(variable)] = (variable, Affine(((name, 1),)))

    def new_atom(self, variable: Any) -> Affine:
        """A name for an integer variable that does not change."""
        name = f"v{len(self.atoms)}"
        if self.sink is not None:  # the next trace has the same name for it
            place = (self.path, self.line())
            self.atom_counts[place] += 1
            name = f"v{self.atom_counts[place]} {place}"
        self.set_atom(name, variable)
        return Affine(((name, 1),))

    def new_slot_atom(self, storage: Storage, variable: Any) -> Affine:
        affine = self.new_atom(variable)
        self.slot_atoms[affine.terms[0][0]] = storage
        return affine

    def are_fixed_since(self, number: int, seed: Seed) -> bool:
        """Whether a column depends on nothing that was declared after so many variables of indices.

        Its coefficient in a local of that time can be kept in a register, as that of a constant column is.
        """
        numbers = self.atom_numbers
        return self.sink is not None and all(numbers.get(a, number) < number for a, _ in seed.column.terms)

    def affine(self, index: Any) -> Affine:
        """An index in normal form; what is not linear in unchanging variables is evaluated now and named."""
        if isinstance(index, Ref):
            index = index.primal
        if isinstance(index, Locals):
            index = primal_of(self.value_of(index))
        if not backend.is_expr(index):
            return Affine((), int(index))
        known = self.affines.get(id(index))
        if known is not None:
            return known[1]
        return self.new_atom(backend.variable(index))

    def settled_index(self, index: Any) -> Any:
        """An index that does not change: evaluated now, unless it is in normal form."""
        if not backend.is_expr(index) or id(index) in self.affines:
            return index
        kept = backend.variable(index)
        self.new_atom(kept)
        return kept

    def affine_expression(self, affine: Affine) -> Any:
        total: Any = None
        for atom, factor in affine.terms:
            term = self.atoms[atom] if factor == 1 else self.atoms[atom] * factor
            total = term if total is None else total + term
        if total is None:
            return affine.constant
        return total + affine.constant if affine.constant else total

    def column_expression(self, seed: Seed) -> Any:
        return self.affine_expression(seed.column)

    def _track(self, name: str, a: Any, b: Any, result: Any) -> Any:
        """Remember the normal form of an integer sum or product."""
        if not backend.is_expr(result) or backend.is_tensor(result) or name not in ("add", "sub", "mul"):
            return result
        if backend.dtype_of(result) != backend.i32:  # smaller types wrap around
            return result
        forms = []
        for x in (a, b):
            if isinstance(x, int) and not isinstance(x, bool):
                forms.append(Affine((), x))
            elif backend.is_expr(x) and id(x) in self.affines:
                forms.append(self.affines[id(x)][1])
            else:
                return result
        left, right = forms
        if name == "add":
            affine = left + right
        elif name == "sub":
            affine = left + right * -1
        elif right.is_constant:
            affine = left * right.constant
        elif left.is_constant:
            affine = right * left.constant
        else:
            return result
        self.affines[id(result)] = (result, affine)
        return result
