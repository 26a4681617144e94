"""Join successive loops over columns: a statement with several tangents costs LLVM one loop.

A loop moves down to the next one over the same columns, if nothing in between accesses its writes or changes its reads.
Both may store to the same array if they only access its column k in iteration k.

Likewise branches on indices being in range are joined if several statements access the same entry. A loop that only
adds where that holds is put in such a branch, in place of a choice for each column: 0.8 of the time of ADBench's hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, replace

import taichi_ext.program as ir
from taichi_ext.program.build import is_over_columns
from taichi_ext.simplify.usage import all_values

MOST_STORES = 16  # in one loop


def with_joined_columns(body: ir.Body) -> ir.Body:
    """The block with fewer loops over columns."""
    made: list[ir.Statement] = []
    last: _Columns | None = None  # a loop over columns that can still move down
    for s in body:
        s = ir.with_blocks(s, with_joined_columns)
        columns = _Columns.of(s)
        if last is not None and columns is not None and last.can_join(columns):
            made.remove(last.loop)
            columns = last.joined(columns)
            s = columns.loop
        elif last is not None and not last.is_apart(s):
            last = None
        last = columns or last
        made.append(s)
    return tuple(made)


def with_joined_guards(body: ir.Body) -> ir.Body:
    """The block with fewer branches on whether indices lie within."""
    made: list[ir.Statement] = []
    last: ir.If | None = None  # a branch that can still move down
    for s in body:
        s = ir.with_blocks(s, with_joined_guards)
        guard = s if isinstance(s, ir.If) and _is_guard(s) else None
        if last is not None and guard is not None and _guard_of(last) is _guard_of(guard):
            made.remove(last)
            s = guard = replace(guard, then=(*last.then, *guard.then), place=last.place)
        elif last is not None and not _are_apart(*_memory((last,)), s):
            last = None
        last = guard or last
        made.append(s)
    return tuple(made)


def with_guarded_sums(body: ir.Body) -> ir.Body:
    """The block with loops over columns that add nothing where indices are out of range in a branch on that."""
    return ir.mapped(body, _guarded)


def _guarded(s: ir.Statement) -> ir.Statement:
    added = [_added(x) for x in s.body] if is_over_columns(s) else [None]
    if None in added or len({guard.local for guard, _ in added}) != 1:  # type: ignore[misc]
        return s
    assert isinstance(s, ir.For)
    guards, sums = zip(*added, strict=True)  # type: ignore[arg-type]
    return ir.If(guards[0], (replace(s, body=sums),), place=s.place)


def _added(s: ir.Statement) -> tuple[ir.Read, ir.Assign] | None:
    """For ``x[k] = x[k] + select(inside, term, 0)``: the condition, and the sum without it."""
    match s:
        case ir.Assign(ir.Read(x, (ir.Read(k),)), ir.Op("add", (ir.Read(y, (ir.Read(same),)) as old, choice)) as value):
            if x is not y or k is not same or not isinstance(choice, ir.Op) or choice.name != "select":
                return None
            guard, term, no = choice.args
            is_zero = isinstance(no, ir.Const) and no.value == 0 and term.dtype == choice.dtype
            if is_zero and isinstance(guard, ir.Read) and guard.local.kind == "inside":
                return guard, replace(s, value=replace(value, args=(old, term)))
    return None


def _is_guard(s: ir.If) -> bool:
    return _guard_of(s) is not None and not s.orelse


def _guard_of(s: ir.If) -> ir.Local | None:
    """The local that says whether indices lie within; it does not change."""
    condition = s.condition
    return condition.local if isinstance(condition, ir.Read) and condition.local.kind == "inside" else None


@dataclass(frozen=True)
class _Columns:
    """A loop over columns of simple statements, and the memory that it writes and touches."""

    loop: ir.For
    count: int
    written: frozenset[ir.Local | ir.Container]
    touched: frozenset[ir.Local | ir.Container]

    @staticmethod
    def of(s: ir.Statement) -> _Columns | None:
        if not is_over_columns(s):
            return None
        (count,) = s.domain
        if (
            not isinstance(count, ir.Const)
            or not isinstance(count.value, int)
            or any(ir.bodies(inner) for inner in s.body)
        ):
            return None
        return _Columns(s, count.value, *map(frozenset, _memory(s.body)))

    def can_join(self, later: _Columns) -> bool:
        targets = [s.target for s in (*self.loop.body, *later.loop.body) if isinstance(s, ir.Store)]
        # a loop that stores to local memory only is vectorised
        is_alike = len({isinstance(t, ir.Load) for t in targets}) == 1 and len(targets) <= MOST_STORES
        if self.count != later.count or not is_alike:
            return False
        shared = (self.written & later.touched) | (self.touched & later.written)
        return all(_is_in_column(c.loop, shared, c.count) for c in (self, later))

    def joined(self, later: _Columns) -> _Columns:
        """One loop with the statements of both."""
        (old,), (new,) = self.loop.variables, later.loop.variables

        def rename(value: ir.Value) -> ir.Value:
            return ir.Read(new) if isinstance(value, ir.Read) and value.local is old else value

        moved = tuple(ir.with_nodes(s, rename) for s in self.loop.body)
        loop = replace(later.loop, body=(*moved, *later.loop.body), place=self.loop.place)
        return _Columns(loop, self.count, self.written | later.written, self.touched | later.touched)

    def is_apart(self, s: ir.Statement) -> bool:
        """Whether it makes no difference which of the two comes first."""
        return _are_apart(self.written, self.touched, s)


def _are_apart(written: Set[ir.Local | ir.Container], touched: Set[ir.Local | ir.Container], s: ir.Statement) -> bool:
    """Whether code that writes and touches some memory can be moved after a statement."""
    if any(isinstance(x, (ir.Jump, ir.Return, ir.Effect, ir.Boundary, ir.Call, ir.While)) for x in (s, *s.within)):
        return False
    others = _memory((s,))
    return not (others[0] & touched or others[1] & written)


def _memory(body: Iterable[ir.Statement]) -> tuple[set[ir.Local | ir.Container], set[ir.Local | ir.Container]]:
    """The locals and containers that statements write, and all that they touch."""
    written = set().union(*(s.written for s in body))
    return written, written.union(*(s.reads for s in body))


def _is_in_column(loop: ir.For, shared: Set[ir.Local | ir.Container], columns: int) -> bool:
    """Whether all that a loop accesses of some memory is in the column of the iteration."""
    (k,) = loop.variables
    for s in loop.body:
        targets = [s.target] if isinstance(s, ir.Store) else []
        for v in (*all_values(s), *targets):
            if isinstance(v, (ir.Read, ir.Load)) and v.memory in shared:
                index = v.indices if isinstance(v, ir.Load) else v.index
                if len(index) != 1 or not _is_column(index[0], k, columns):
                    return False
    return True


def _is_column(index: int | ir.Value, k: ir.Local, columns: int) -> bool:
    """Whether an index is that of column k of some row."""
    if isinstance(index, ir.Read):
        return index.local is k
    if not isinstance(index, ir.Op) or index.name != "add":
        return False
    a, b = index.args
    return (_is_column(b, k, columns) and _is_multiple(a, columns)) or (
        _is_column(a, k, columns) and _is_multiple(b, columns)
    )


def _is_multiple(value: ir.Value, columns: int) -> bool:
    if isinstance(value, ir.Const):
        return value.value % columns == 0
    if not isinstance(value, ir.Op):
        return False
    if value.name == "mul":
        return any(_is_multiple(a, columns) for a in value.args if isinstance(a, (ir.Const, ir.Op)))
    return value.name in ("add", "sub") and all(_is_multiple(a, columns) for a in value.args)
