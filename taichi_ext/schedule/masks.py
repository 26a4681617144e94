"""Branches and loops that neighbouring lanes do not share, with masks that say which lanes take part.

What lanes do not share stands in a branch on a mask, which LLVM turns into choices. A loop ends, and a long branch is
skipped, where no lane takes part. ``active`` is a sum over the lanes::

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

from taichi_ext.differentiate.forms.build import cast, literal, operation
from taichi_ext.program import (
    I32,
    U1,
    Assign,
    Body,
    Const,
    Container,
    Declare,
    For,
    If,
    Jump,
    Load,
    Local,
    Op,
    Read,
    Statement,
    Update,
    Value,
    While,
    bodies,
    rebuilt,
    statements,
    with_bodies,
    with_values,
)
from taichi_ext.simplify.usage import Store, all_values, assigned_locals

LEAST_GUARDED = 20  # operations of a branch that is skipped where no lane takes it
_DIVISIONS = frozenset(("floordiv", "mod"))  # which end the process where a whole number is divided by 0
_CHOICES = frozenset(("ifte", "logical_and", "logical_or"))  # which may leave an operand out
FALSE, TRUE = Const(False, U1), Const(True, U1)


@dataclass(frozen=True)
class _Loop:
    """The masks of a loop: the lanes that have not left it, and those that have not left the iteration.

    ``end`` is the jump that all lanes take where the last one leaves the iteration.
    """

    lanes: Local
    iteration: Local
    end: str


def with_masks(
    body: Body, varying: Set[Local], written: Set[Container], work_of: Callable[[Body], int]
) -> tuple[Body, set[Local]]:
    """The body of a parallel loop with masks where lanes part, and the locals that differ from lane to lane.

    Args:
        body: of the loop.
        varying: the locals that differ in it.
        written: the containers that it stores to.
        work_of: the operations in a block.
    """
    masker = _Masker(body, varying, written, work_of)
    if not masker.has_jumps(body):
        return masker.block(body, _Lanes()), masker.varying
    on = masker.mask("on")
    made = masker.block(body, _Lanes(on, (), _Loop(on, on, "continue")))
    return (Declare(on, (TRUE,)), *made), masker.varying


@dataclass(frozen=True)
class _Lanes:
    """The lanes that take part in a block: their mask, those around it up to the iteration's, and the loop.

    ``is_some``: there is at least one.
    """

    mask: Local | None = None
    around: tuple[Local, ...] = ()
    loop: _Loop | None = None
    is_some: bool = True


class _Masker:
    """Writes blocks for the lanes of a mask."""

    def __init__(
        self, body: Body, varying: Set[Local], written: Set[Container], work_of: Callable[[Body], int]
    ) -> None:
        self.varying, self.written, self.work_of = set(varying), written, work_of
        self.total, self.assigned = _occurrences(body), assigned_locals(body)

    def is_shared(self, x: Statement | Value) -> bool:
        """Whether a value, or the condition or bounds of a statement, are the same for all lanes."""
        c = x.contents
        return c.is_pure and self.varying.isdisjoint(c.locals) and self.written.isdisjoint(c.containers)

    def has_jumps(self, body: Body, *, is_masked: bool = False) -> bool:
        """Whether lanes may leave the loop around a block at different times."""
        return any(
            (isinstance(s, Jump) and is_masked)
            or (
                isinstance(s, If)
                and any(self.has_jumps(b, is_masked=is_masked or not self.is_shared(s)) for b in bodies(s))
            )
            for s in body
        )

    def _needs_mask(self, s: If) -> bool:
        """Whether a branch is more than a choice of numbers."""
        inner = (*s.then, *s.orelse)
        return self.work_of(inner) >= LEAST_GUARDED or any(
            isinstance(x, (For, While, Jump)) or _is_to_memory(x) for x in statements(inner)
        )

    def mask(self, name: str) -> Local:
        found = Local(name, U1, (), "temporary")
        self.varying.add(found)
        return found

    # --- blocks

    def block(self, body: Body, lanes: _Lanes) -> Body:
        made: list[Statement] = []
        group: list[Statement] = []
        has_left = False
        for s in body:
            if has_left and lanes.loop is not None and self._needs_lanes(s):
                made += (*self._group(tuple(group), lanes.mask), *_end(lanes.loop.iteration, lanes.loop.end))
                group.clear()
                has_left = False
            has_left |= self.has_jumps((s,), is_masked=lanes.mask is not None)
            is_some = lanes.is_some and not has_left
            if isinstance(s, Declare) and self._is_shared_declaration(s, is_some=is_some):
                made.append(s)  # it depends on nothing that lanes change
                continue
            if lanes.mask is not None and is_some:
                before, s = self._with_shared_loads(s)
                made += before
            apart = self._apart(s, lanes)
            if apart is None:
                group.append(s)
                continue
            made += self._group(tuple(group), lanes.mask)
            group.clear()
            made += apart
        return (*made, *self._group(tuple(group), lanes.mask))

    def _is_shared_declaration(self, s: Declare, *, is_some: bool) -> bool:
        """Whether a declaration is the same for all lanes, also for those that take no part."""
        if s.local not in self.varying:
            return True
        if not is_some or s.local.shape or s.local in self.assigned or not self.is_shared(s):
            return False
        self.varying.discard(s.local)
        return True

    def _with_shared_loads(self, s: Statement) -> tuple[Body, Statement]:
        """A statement without loads that are the same for all lanes: LLVM makes no vectors of loads in a branch."""
        if bodies(s) or any(isinstance(v, Op) and v.name in _CHOICES for v in all_values(s)):
            return (), s
        before: list[Statement] = []

        def read(v: Value) -> Value:
            if not isinstance(v, Load) or not self.is_shared(v):
                return v
            shared = Local(v.container.name, v.dtype, (), "temporary")
            before.append(Declare(shared, (v,), place=s.place))
            return Read(shared, place=v.place)

        memo: dict[Value, Value] = {}
        made = with_values(s, lambda v: rebuilt(v, read, memo))
        return tuple(before), made

    def _needs_lanes(self, s: Statement) -> bool:
        """Whether a statement would run, and may not or should not, where no lane takes part."""
        if isinstance(s, Declare) and s.local not in self.varying:
            return not _is_safe(s)
        return isinstance(s, (For, While)) or (isinstance(s, If) and self.is_shared(s))

    def _apart(self, s: Statement, lanes: _Lanes) -> Body | None:
        """The replacement of a statement that is by itself; None for one that stands in a branch on the mask."""
        if isinstance(s, (For, While)):
            return self._loop(s, lanes.mask)
        if isinstance(s, If) and (self.is_shared(s) or self._needs_mask(s)):
            return self._branch(s, lanes)
        if isinstance(s, Jump):
            if lanes.mask is None or lanes.loop is None:
                return (s,)
            return (If(Read(lanes.mask), self._leave(s, lanes), place=s.place),)
        if not isinstance(s, (Assign, Update)) or not isinstance(s.target, Read):
            return None
        if s.target.local not in self.varying:
            return (s,)
        return _chosen(s, lanes.mask) if lanes.mask is not None and s.target.index and _is_safe(s) else None

    def _group(self, group: Body, mask: Local | None) -> Body:
        """Statements without loops, for the lanes of a mask; locals that others use too are declared before."""
        if mask is None or not group:
            return group
        inner = _occurrences(group)
        before: list[Statement] = []
        rest: list[Statement] = []
        for s in group:
            if isinstance(s, Declare) and (s.local.shape or self.total[s.local] > inner[s.local]):
                zero = FALSE if s.local.dtype == U1 else literal(0, s.local.dtype)
                before.append(Declare(s.local, (zero,) * len(s.values), place=s.place))
                for n, value in enumerate(s.values):
                    entry = Read(s.local, (literal(n, I32),) if s.local.shape else ())
                    if not isinstance(value, Const) or value.value:
                        rest.append(Assign(entry, value, place=s.place))
            else:
                rest.append(s)
        if any(map(_is_to_memory, statements(group))):
            own, mask = mask, self.mask("stores")  # this one does not change before numbers are copied to memory
            before.append(Declare(mask, (Read(own),)))
        return (*before, *([If(Read(mask), tuple(rest), place=group[0].place)] if rest else []))

    # --- branches

    def _branch(self, s: If, lanes: _Lanes) -> Body:
        if self.is_shared(s):
            return (with_bodies(s, tuple(self.block(b, lanes) for b in bodies(s))),)
        if lanes.loop is not None and len(s.then) == 1 and isinstance(s.then[0], Jump) and not s.orelse:
            return self._group((replace(s, then=self._leave(s.then[0], lanes)),), lanes.mask)
        taken = self.mask("taken")
        made = self._masked(taken, s.condition, s.then, lanes)
        if s.orelse:  # lanes that have left the loop in ``then`` are no longer in the mask
            rest = operation("logical_not", Read(taken))
            made += self._masked(self.mask("other"), rest, s.orelse, lanes)
        return made

    def _masked(self, mask: Local, condition: Value, body: Body, lanes: _Lanes) -> Body:
        """A block for those lanes in which a condition holds; a long one is skipped where it holds in none."""
        made: Body = (Declare(mask, (condition,)),)
        if lanes.mask is not None:
            made = (Declare(mask, (FALSE,)), If(Read(lanes.mask), (Assign(Read(mask), condition),)))
        around = () if lanes.loop is None else (mask, *lanes.around)
        is_short = self.work_of(body) < LEAST_GUARDED
        is_short = is_short and not any(isinstance(x, (For, While)) for x in statements(body))
        inner = self.block(body, _Lanes(mask, around, lanes.loop, is_some=not is_short))
        if is_short:
            return made + inner
        active, count = _count(mask)
        return (*made, *count, If(operation("gt", active, 0), inner))

    # --- loops

    def _loop(self, s: For | While, mask: Local | None) -> Body:
        is_left = self.has_jumps(s.body, is_masked=mask is not None)
        condition: Value | None = None
        before: Body = ()
        if self.is_shared(s):
            self.varying.difference_update(s.variables if isinstance(s, For) else ())
            if not is_left:
                return (with_bodies(s, (self.block(s.body, _Lanes(mask)),)),)
        elif isinstance(s, While):
            s, condition = replace(s, condition=None), s.condition
        elif s.kind == "range" and len(s.domain) < 3:
            before, s, condition = self._longest(s, mask)
            if not is_left:
                on = self.mask("on")
                takes = condition if mask is None else operation("logical_and", Read(mask), condition)
                return (*before, with_bodies(s, ((Declare(on, (takes,)), *self.block(s.body, _Lanes(on))),)))
        else:
            return (s,)
        jumps = {x.kind for x in s.within if isinstance(x, Jump)}
        go = self.mask("go")
        on = self.mask("on") if "continue" in jumps else go
        head: Body = () if on is go else (Declare(on, (Read(go),)),)
        tail = _end(go, "break") if condition is None and "break" in jumps else ()
        if condition is not None:
            head = (*self._group((Assign(Read(go), condition),), go), *_end(go, "break"), *head)
        inner = self.block(s.body, _Lanes(on, (), _Loop(go, on, "break" if on is go else "continue")))
        first = Declare(go, (TRUE if mask is None else Read(mask),))
        return (*before, first, with_bodies(s, ((*head, *inner, *tail),)))

    def _longest(self, s: For, mask: Local | None) -> tuple[Body, For, Value]:
        """A loop over a range that differs from lane to lane as one over the longest; whether a lane takes part."""
        first, end = s.domain if len(s.domain) > 1 else (literal(0, I32), *s.domain)
        (variable,) = s.variables
        begin, last, longest = (Local(n, variable.dtype, (), "temporary") for n in ("begin", "end", "longest"))
        self.varying.add(last)
        if self.is_shared(first):
            self.varying.discard(variable)
            before, start, ends, number = (Declare(last, (first,)),), first, Read(last), variable
        else:
            self.varying.add(begin)
            start, ends = literal(0, variable.dtype), operation("sub", Read(last), Read(begin))
            before = (Declare(begin, (start,)), *self._group((Assign(Read(begin), first),), mask))
            before = (*before, Declare(last, (Read(begin),)))
            number = Local("number", variable.dtype, (), "loop")
            own = Declare(variable, (operation("add", Read(begin), Read(number)),))
            s = replace(s, variables=(number,), body=(own, *s.body))
        longer = Assign(Read(longest), cast(operation("max", Read(longest), ends), longest.dtype))
        last_of_own = self._group((Assign(Read(last), end),), mask)
        before = (Declare(longest, (start,)), *before, *last_of_own, longer)
        return before, replace(s, domain=(start, Read(longest))), operation("lt", Read(number), ends)

    @staticmethod
    def _leave(s: Statement, lanes: _Lanes) -> Body:
        """Write a jump: the lanes that take it leave all masks up to that of the iteration or the loop."""
        assert isinstance(s, Jump)
        assert lanes.loop is not None
        assert lanes.mask is not None
        masks = (*lanes.around, lanes.mask, lanes.loop.iteration, *([lanes.loop.lanes] if s.kind == "break" else []))
        return tuple(Assign(Read(m), FALSE, place=s.place) for m in dict.fromkeys(masks))


def _count(mask: Local) -> tuple[Value, Body]:
    """How many lanes take part."""
    active = Local("active", I32, (), "temporary")
    count = Update(Read(active), "add", cast(Read(mask), I32))
    return Read(active), (Declare(active, (literal(0, I32),)), count)


def _end(mask: Local, kind: str) -> Body:
    """Leave a loop or an iteration where no lane takes part."""
    active, count = _count(mask)
    return (*count, If(operation("eq", active, 0), (Jump(kind),)))


def _is_safe(s: Statement) -> bool:
    """Whether the values of a statement can be computed whatever numbers are in them."""
    return not s.contents.containers and not any(isinstance(v, Op) and v.name in _DIVISIONS for v in all_values(s))


def _chosen(s: Assign | Update, mask: Local) -> Body:
    """A store to an entry of a local array in some lanes as one in all: LLVM makes no vectors of stores in a branch."""
    target = s.target
    assert isinstance(target, Read)
    value = s.value if isinstance(s, Assign) else operation(s.op, target, s.value)
    chosen = Op("select", (Read(mask), cast(value, target.dtype), target), target.dtype, place=s.place)
    return (Assign(target, chosen, place=s.place),)


def _is_to_memory(s: Statement) -> bool:
    return isinstance(s, Store) and isinstance(s.target, Load)


def _occurrences(body: Body) -> Counter[Local]:
    """How often each local is read or changed."""
    found: Counter[Local] = Counter()
    for s in statements(body):
        found.update(v.local for v in all_values(s) if isinstance(v, Read))
        if isinstance(s, Store) and isinstance(s.target, Read):
            found[s.target.local] += 1
    return found
