"""Branches and loops that neighbouring lanes do not share, with masks that say which lanes take part.

Statements that lanes do not share are in a branch on a mask, which LLVM turns into choices. A loop ends, and a long
branch is skipped, if no lane takes part. ``active`` is a sum over the lanes::

    while s > 0.001:            go = True
        s = f(s)                while True:
                                    if go:
                                        go = s > 0.001
                                    active += go
                                    if active == 0:
                                        break
                                    if go:
                                        s = f(s)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from typing import TypeGuard

import taichi_ext.program as ir
from taichi_ext.analysis.changes import parts_ways, written_containers
from taichi_ext.program.build import cast, literal, operation
from taichi_ext.simplify.usage import all_values, assigned_locals, read_counts

LEAST_GUARDED = 20  # operations of a branch that is skipped where no lane takes it
_DIVISIONS = frozenset(("floordiv", "mod"))  # which end the process where a whole number is divided by 0
FALSE, TRUE = ir.Const(False, ir.U1), ir.Const(True, ir.U1)


@dataclass(frozen=True)
class _Loop:
    """The masks of a loop: the lanes that have not left it, and those that have not left the iteration."""

    lanes: ir.Local
    iteration: ir.Local
    end: str  # the jump that all lanes take where the last one leaves the iteration


def with_masks(
    body: ir.Body,
    varying: Set[ir.Local],
    written: Set[ir.Container],
    work_of: Callable[[ir.Body], int],
    *,
    by_keys: bool = False,
) -> tuple[ir.Body, set[ir.Local]]:
    """The body of a parallel loop with masks where lanes part, and the locals that differ from lane to lane.

    Args:
        body: of the loop.
        varying: the locals that differ in it.
        written: the containers that it stores to.
        work_of: the operations in a block.
        by_keys: whether lanes with one range of an inner loop go through it by themselves.
    """
    masker = _Masker(set(varying), written, work_of, by_keys, _occurrences(body), assigned_locals(body))
    if not masker.has_jumps(body):
        return masker.block(body, _Lanes()), masker.varying
    on = masker.mask("on")
    made = masker.block(body, _Lanes(on, (), _Loop(on, on, "continue")))
    return (ir.Declare(on, (TRUE,)), *made), masker.varying


@dataclass(frozen=True)
class _Lanes:
    """The lanes that take part in a block: their mask, those around it up to the iteration's, and the loop."""

    mask: ir.Local | None = None
    around: tuple[ir.Local, ...] = ()
    loop: _Loop | None = None
    is_some: bool = True  # whether there is at least one


@dataclass(frozen=True)
class _Masker:
    """Writes blocks for the lanes of a mask."""

    varying: set[ir.Local]
    written: Set[ir.Container]
    work_of: Callable[[ir.Body], int]
    by_keys: bool
    total: Counter[ir.Local]
    assigned: set[ir.Local]

    def is_shared(self, x: ir.Statement | ir.Value) -> bool:
        """Whether a value, or the condition or bounds of a statement, are the same for all lanes."""
        return x.contents.is_same(self.varying, self.written)

    def has_jumps(self, body: ir.Body, *, is_masked: bool = False) -> bool:
        """Whether lanes may leave the loop around a block at different times."""
        return parts_ways(body, self.varying, self.written, is_chosen=is_masked)

    def _needs_mask(self, s: ir.If) -> bool:
        """Whether a branch is more than a choice of numbers."""
        is_more = (isinstance(x, (ir.For, ir.While, ir.Jump)) or is_to_memory(x) for x in s.within)
        return self.work_of((*s.then, *s.orelse)) >= LEAST_GUARDED or any(is_more)

    def mask(self, name: str) -> ir.Local:
        result = ir.Local(name, ir.U1, (), "temporary")
        self.varying.add(result)
        return result

    # --- blocks

    def block(self, body: ir.Body, lanes: _Lanes) -> ir.Body:
        made: list[ir.Statement] = []
        group: list[ir.Statement] = []
        stored: set[ir.Container] = set()  # to by the group
        has_left = False
        for s in body:
            if has_left and lanes.loop is not None and self._needs_lanes(s):
                made += (*self._group(tuple(group), lanes.mask), *_end(lanes.loop.iteration, lanes.loop.end))
                group.clear()
                stored.clear()
                has_left = False
            has_left |= lanes.loop is not None and self.has_jumps((s,), is_masked=True)
            is_some = lanes.is_some and not has_left
            if isinstance(s, ir.Declare) and self._is_shared_declaration(s, is_some=is_some):
                made.append(s)  # it depends on nothing that lanes change
                continue
            if lanes.mask is not None and is_some:
                before, s = self._with_shared_loads(s)
                made += before
            apart = self._apart(s, lanes)
            if apart is not None or any(stored & x.contents.containers for x in ir.statements((s,))):
                made += self._group(tuple(group), lanes.mask)
                group.clear()
                stored.clear()
            if apart is None:
                group.append(s)
                stored |= written_containers((s,))
            else:
                made += apart
        return (*made, *self._group(tuple(group), lanes.mask))

    def _is_shared_declaration(self, s: ir.Declare, *, is_some: bool) -> bool:
        """Whether a declaration is the same for all lanes, also for those that take no part."""
        if s.local not in self.varying:
            return True
        if not is_some or s.local.shape or s.local in self.assigned or not self.is_shared(s):
            return False
        self.varying.discard(s.local)
        return True

    def _with_shared_loads(self, s: ir.Statement) -> tuple[ir.Body, ir.Statement]:
        """A statement without loads that are the same for all lanes: LLVM makes no vectors of loads in a branch."""
        if ir.bodies(s) or any(isinstance(v, ir.Op) and v.name in ir.LAZY for v in all_values(s)):
            return (), s
        before: list[ir.Statement] = []

        def read(v: ir.Value) -> ir.Value:
            if not isinstance(v, ir.Load) or not self.is_shared(v):
                return v
            shared = ir.Local(v.container.name, v.dtype, (), "temporary")
            before.append(ir.Declare(shared, (v,), place=s.place))
            return ir.Read(shared, place=v.place)

        made = ir.with_nodes(s, read)
        return tuple(before), made

    def _needs_lanes(self, s: ir.Statement) -> bool:
        """Whether a statement would run, and may not or should not, where no lane takes part."""
        target = s.target if isinstance(s, ir.Store) else None
        changed = target.local if isinstance(target, ir.Read) else s.local if isinstance(s, ir.Declare) else None
        if changed is not None and changed not in self.varying:
            return not _is_safe(s)
        return isinstance(s, (ir.For, ir.While)) or (isinstance(s, ir.If) and self.is_shared(s))

    def _apart(self, s: ir.Statement, lanes: _Lanes) -> ir.Body | None:
        """The replacement of a statement that is by itself; None for one that stands in a branch on the mask."""
        if isinstance(s, (ir.For, ir.While)):
            return self._loop(s, lanes.mask)
        if isinstance(s, ir.If) and (self.is_shared(s) or self._needs_mask(s)):
            return self._branch(s, lanes)
        if isinstance(s, ir.Jump):
            if lanes.mask is None or lanes.loop is None:
                return (s,)  # all lanes that take part leave together
            return (ir.If(ir.Read(lanes.mask), self._leave(s, lanes), place=s.place),)
        if not isinstance(s, (ir.Assign, ir.Update)) or not isinstance(s.target, ir.Read):
            return None
        if s.target.local not in self.varying:
            return (s,)
        return _chosen(s, lanes.mask) if lanes.mask is not None and s.target.index and _is_safe(s) else None

    def _group(self, group: ir.Body, mask: ir.Local | None) -> ir.Body:
        """Statements without loops, for the lanes of a mask; locals that others use too are declared before."""
        if mask is None or not group:
            return group
        if self.by_keys and all(map(_is_choice, group)):
            return tuple(x for s in group for x in self._without_branch(s, mask))
        inner = _occurrences(group)
        before: list[ir.Statement] = []
        rest: list[ir.Statement] = []
        for s in group:
            if isinstance(s, ir.Declare) and (s.local.shape or self.total[s.local] > inner[s.local]):
                zero = FALSE if s.local.dtype == ir.U1 else literal(0, s.local.dtype)
                before.append(ir.Declare(s.local, (zero,) * len(s.values), place=s.place))
                for n, value in enumerate(s.values):
                    entry = ir.Read(s.local, (literal(n, ir.I32),) if s.local.shape else ())
                    if not isinstance(value, ir.Const) or value.value:
                        rest.append(ir.Assign(entry, value, place=s.place))
            else:
                rest.append(s)
        if any(map(is_to_memory, ir.statements(group))):
            own, mask = mask, self.mask("stores")  # this one does not change before numbers are copied to memory
            before.append(ir.Declare(mask, (ir.Read(own),)))
        return (*before, *([ir.If(ir.Read(mask), tuple(rest), place=group[0].place)] if rest else []))

    def _without_branch(self, s: ir.Statement, mask: ir.Local) -> ir.Body:
        """A statement for the lanes of a mask without a branch on it, of which LLVM makes no vectors in every case."""
        s = ir.with_nodes(s, _as_bits)
        if isinstance(s, (ir.Assign, ir.Update)):
            return _chosen(s, mask)
        if not isinstance(s, ir.If):
            return (s,)
        taken = self.mask("taken")
        is_taken = s.condition if s.condition.dtype == ir.U1 else operation("ne", s.condition, 0)
        made: list[ir.Statement] = [ir.Declare(taken, (is_taken,), place=s.place)]
        for side, block in ((ir.Read(taken), s.then), (operation("logical_not", ir.Read(taken)), s.orelse)):
            if block:
                both = ir.Op("bit_and", (ir.Read(mask), side), ir.U1)
                made.append(ir.If(both, block, place=s.place))
        return tuple(made)

    # --- branches

    def _branch(self, s: ir.If, lanes: _Lanes) -> ir.Body:
        if self.is_shared(s):
            return (ir.with_blocks(s, lambda block: self.block(block, lanes)),)
        if lanes.loop is not None and len(s.then) == 1 and isinstance(s.then[0], ir.Jump) and not s.orelse:
            return self._group((replace(s, then=self._leave(s.then[0], lanes)),), lanes.mask)
        taken = self.mask("taken")
        made = self._masked(taken, s.condition, s.then, lanes)
        if s.orelse:  # lanes that have left the loop in ``then`` are no longer in the mask
            rest = operation("logical_not", ir.Read(taken))
            made += self._masked(self.mask("other"), rest, s.orelse, lanes)
        return made

    def _masked(self, mask: ir.Local, condition: ir.Value, body: ir.Body, lanes: _Lanes) -> ir.Body:
        """A block for those lanes in which a condition holds; a long one is skipped where it holds in none."""
        made: ir.Body = (ir.Declare(mask, (condition,)),)
        if lanes.mask is not None:
            made = (ir.Declare(mask, (FALSE,)), ir.If(ir.Read(lanes.mask), (ir.Assign(ir.Read(mask), condition),)))
        around = () if lanes.loop is None else (mask, *lanes.around)
        is_short = self.work_of(body) < LEAST_GUARDED
        is_short = is_short and not any(isinstance(x, (ir.For, ir.While)) for x in ir.statements(body))
        inner = self.block(body, _Lanes(mask, around, lanes.loop, is_some=not is_short))
        if is_short:
            return made + inner
        active, count = _count(mask)
        return (*made, *count, ir.If(operation("gt", active, 0), inner))

    # --- loops

    def _loop(self, s: ir.For | ir.While, mask: ir.Local | None) -> ir.Body:
        is_left = self.has_jumps(s.body)
        condition: ir.Value | None = None
        before: ir.Body = ()
        if self.is_shared(s):
            self.varying.difference_update(s.variables if isinstance(s, ir.For) else ())
            if not is_left:
                return (ir.with_bodies(s, (self.block(s.body, _Lanes(mask)),)),)
        elif isinstance(s, ir.While):
            s, condition = replace(s, condition=None), s.condition
        elif self.by_keys and isinstance(s, ir.For):
            return self._by_keys(s, mask)
        elif s.kind == "range" and len(s.domain) < 3:
            before, s, condition = self._longest(s, mask)
            if not is_left:
                on = self.mask("on")
                return (*before, ir.with_bodies(s, ((ir.Declare(on, (condition,)), *self.block(s.body, _Lanes(on))),)))
        else:
            return (s,)
        jumps = {x.kind for x in s.within if isinstance(x, ir.Jump)}
        go = self.mask("go")
        on = self.mask("on") if "continue" in jumps else go
        head: ir.Body = () if condition is None else self._group((ir.Assign(ir.Read(go), condition),), go)
        if condition is not None or "break" in jumps:  # in front of the body: its end may be left out by "continue"
            head += _end(go, "break")
        if on is not go:
            head += (ir.Declare(on, (ir.Read(go),)),)
        inner = self.block(s.body, _Lanes(on, (), _Loop(go, on, "break" if on is go else "continue")))
        first = ir.Declare(go, (TRUE if mask is None else ir.Read(mask),))
        return (*before, first, ir.with_bodies(s, ((*head, *inner),)))

    def _by_keys(self, s: ir.For, mask: ir.Local | None) -> ir.Body:
        """A loop over a range that depends on keys, once for each of their values, for the lanes that have it.

        So what the loop reads is the same for all lanes.
        """
        todo, on = self.mask("todo"), self.mask("on")
        keys = keys_of(s, self.varying) or []
        last, chosen = ({k: ir.Local(k.name, k.dtype, (), "temporary") for k in keys} for _ in range(2))
        head: list[ir.Statement] = [*_end(todo, "break")]
        head += [ir.Declare(x, (literal(0, x.dtype),)) for x in (*last.values(), *chosen.values())]
        for k, x in last.items():
            own = ir.Op("select", (ir.Read(todo), ir.Read(k), ir.Read(x)), x.dtype)
            head.append(ir.Assign(ir.Read(x), own))
        is_on: ir.Value = ir.Read(todo)
        for k, x in chosen.items():
            head.append(ir.Assign(ir.Read(x), ir.Read(last[k])))  # behind the loop over the lanes
            is_on = operation("logical_and", is_on, operation("eq", ir.Read(k), ir.Read(x)))
        rest = operation("logical_and", ir.Read(todo), operation("logical_not", ir.Read(on)))
        head += (ir.Declare(on, (is_on,)), ir.Assign(ir.Read(todo), rest))
        self.varying.difference_update(s.variables)
        (walk,) = ir.mapped((s,), lambda x: ir.with_nodes(x, lambda v: ir.read_from(v, chosen)))
        walk = ir.with_blocks(walk, lambda block: self.block(block, _Lanes(on)))
        first = ir.Declare(todo, (TRUE if mask is None else ir.Read(mask),))
        return (first, ir.While(None, (*head, walk), place=s.place))

    def _longest(self, s: ir.For, mask: ir.Local | None) -> tuple[ir.Body, ir.For, ir.Value]:
        """A loop over a range that differs from lane to lane as one over the longest; whether a lane takes part.

        The range of a lane that is not in the mask is empty.
        """
        first, end = s.domain if len(s.domain) > 1 else (literal(0, ir.I32), *s.domain)
        (variable,) = s.variables
        begin, last, longest = (ir.Local(n, variable.dtype, (), "temporary") for n in ("begin", "end", "longest"))
        self.varying.add(last)
        if self.is_shared(first):
            self.varying.discard(variable)
            before, start, ends, number = (ir.Declare(last, (first,)),), first, ir.Read(last), variable
        else:
            self.varying.add(begin)
            start, ends = literal(0, variable.dtype), operation("sub", ir.Read(last), ir.Read(begin))
            before = (ir.Declare(begin, (start,)), *self._group((ir.Assign(ir.Read(begin), first),), mask))
            before = (*before, ir.Declare(last, (ir.Read(begin),)))
            number = ir.Local("number", variable.dtype, (), "loop")
            own = ir.Declare(variable, (operation("add", ir.Read(begin), ir.Read(number)),))
            s = replace(s, variables=(number,), body=(own, *s.body))
        longer = ir.Assign(ir.Read(longest), cast(operation("max", ir.Read(longest), ends), longest.dtype))
        last_of_own = self._group((ir.Assign(ir.Read(last), end),), mask)
        before = (ir.Declare(longest, (start,)), *before, *last_of_own, longer)
        return before, replace(s, domain=(start, ir.Read(longest))), operation("lt", ir.Read(number), ends)

    @staticmethod
    def _leave(s: ir.Statement, lanes: _Lanes) -> ir.Body:
        """Write a jump: the lanes that take it leave all masks up to that of the iteration or the loop."""
        assert isinstance(s, ir.Jump)
        assert lanes.loop is not None
        assert lanes.mask is not None
        masks = (*lanes.around, lanes.mask, lanes.loop.iteration, *([lanes.loop.lanes] if s.kind == "break" else []))
        return tuple(ir.Assign(ir.Read(m), FALSE, place=s.place) for m in dict.fromkeys(masks))


def keys_of(s: ir.For, varying: Set[ir.Local]) -> list[ir.Local] | None:
    """The whole numbers that decide over the range of a loop; None where others do, or where they change in it."""
    bounds = [v for bound in s.domain for v in ir.walk(bound)]
    keys = list(dict.fromkeys(v.local for v in bounds if isinstance(v, ir.Read) and v.local in varying))
    is_simple = s.kind == "range" and all(k.dtype.is_integer and not k.shape for k in keys)
    return keys if is_simple and not assigned_locals((s,)).intersection(keys) else None


def _count(mask: ir.Local) -> tuple[ir.Value, ir.Body]:
    """How many lanes take part."""
    active = ir.Local("active", ir.I32, (), "temporary")
    count = ir.Update(ir.Read(active), "add", cast(ir.Read(mask), ir.I32))
    return ir.Read(active), (ir.Declare(active, (literal(0, ir.I32),)), count)


def _end(mask: ir.Local, kind: str) -> ir.Body:
    """Leave a loop or an iteration where no lane takes part."""
    active, count = _count(mask)
    return (*count, ir.If(operation("eq", active, 0), (ir.Jump(kind),)))


def _is_safe(s: ir.Statement) -> bool:
    """Whether the values of a statement can be computed whatever numbers are in them."""
    return not s.contents.containers and not any(isinstance(v, ir.Op) and v.name in _DIVISIONS for v in all_values(s))


def _chosen(s: ir.Assign | ir.Update, mask: ir.Local) -> ir.Body:
    """A store to an entry of a local array in some lanes as one in all: LLVM makes no vectors of stores in a branch."""
    target = s.target
    assert isinstance(target, ir.Read)
    value = s.value if isinstance(s, ir.Assign) else operation(s.op, target, s.value)
    chosen = ir.Op("select", (ir.Read(mask), cast(value, target.dtype), target), target.dtype, place=s.place)
    return (ir.Assign(target, chosen, place=s.place),)


def _is_choice(s: ir.Statement) -> bool:
    """Whether a statement can be a choice of numbers, or a branch, for the lanes that take part."""
    is_number = isinstance(s, ir.Declare) and not s.local.shape
    is_number |= isinstance(s, (ir.Assign, ir.Update)) and isinstance(s.target, ir.Read) and not s.target.index
    is_known = all(isinstance(i, int) for v in all_values(s) if isinstance(v, ir.Read) for i in v.index)
    return is_known and _is_safe(s) and (is_number or isinstance(s, ir.If))


def _as_bits(v: ir.Value) -> ir.Value:
    """An ``and`` or ``or`` of two truth values that are both computed."""
    if not isinstance(v, ir.Op) or v.name not in ("logical_and", "logical_or") or any(a.dtype != ir.U1 for a in v.args):
        return v
    return ir.Op(v.name.replace("logical", "bit"), v.args, ir.U1, place=v.place)


def is_to_memory(s: ir.Statement) -> TypeGuard[ir.Store]:
    return isinstance(s, ir.Store) and isinstance(s.target, ir.Load)


def _occurrences(body: ir.Body) -> Counter[ir.Local]:
    """How often each local is read or changed."""
    targets = (s.target for s in ir.statements(body) if isinstance(s, ir.Store))
    return read_counts(body) + Counter(t.local for t in targets if isinstance(t, ir.Read))
