"""Memory of an adjoint: arrays of adjoints, and the tape of a thread with its log of overwritten numbers.

The tape is a stack in memory of the thread, not of the iteration: an iteration goes forward and back before the thread
takes the next. Where an entry has no room, the kernel says how much is missing and pops nothing more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import taichi_ext.program as ir
from taichi_ext.adjoint.normal import running_number, whole
from taichi_ext.program import I32, I64, U1, U64, Container, Load, Local, Read, Value
from taichi_ext.program.build import add, cast, element, indices_of, literal, operation, select

REAL, INTEGER = 0, 1  # the two parts of a tape
MOST_LOCAL = 256  # numbers of a tape in local arrays; hvp of 512 bodies: 1,200 ms with 512 here, 30 with 256
_WIDE = (I64, U64)
MOST_IN_LANES = 1024  # in lanes, where the tape of a thread is none


@dataclass(frozen=True, eq=False)
class AdjointArray:
    """The adjoints of a container: an array of one dimension.

    Attributes:
        sizes: of the primal container, along its axes and those of its components.
        firsts: its first indices, where they are not 0.
        width: cotangents, which are neighbours in memory.
    """

    container: Container
    sizes: tuple[int, ...]
    firsts: tuple[int, ...]
    width: int = 1

    def number(self, target: Load) -> Value:
        return running_number((*target.indices, *target.component), self.sizes, self.firsts)


def adjoint_array(c: Container, name: str, shape: tuple[int, ...], width: int = 1) -> AdjointArray:
    sizes = (*shape, *c.element_shape)
    array = Container(name, c.dtype, 1, is_argument=True, shape=(math.prod(sizes) * width,))
    return AdjointArray(array, sizes, c.offset or (), width)


def converted(x: Value, dtype: ir.Type) -> Value:
    """A kept number in the type that it had."""
    return operation("ne", x, 0) if dtype == U1 and x.dtype != U1 else cast(x, dtype)


def _halves(x: Value) -> tuple[Value, ...]:
    """A number as the numbers of a tape that keep it: two for 64 bits."""
    if x.dtype not in _WIDE:
        return (x,)
    bits = cast(x, I64)
    return bits, operation("shift_right", bits, 32)


def _joined(low: Value, high: Value, dtype: ir.Type) -> Value:
    """A whole number of 64 bits from its halves."""
    upper = operation("shift_left", cast(high, I64), 32)
    return cast(operation("bit_or", upper, operation("bit_and", cast(low, I64), 0xFFFFFFFF)), dtype)


class Tape:
    """The stack of a thread: real numbers and integers, and the locals that point behind their ends.

    Attributes:
        reals: the memory of all threads for real numbers.
        integers: the same for integers.
        status: [0] and [1] are the largest numbers of missing entries, [2] and [3] the entries of a thread.
        lost: the local that says whether an entry had no room.
        is_used: whether anything is pushed.
    """

    def __init__(self, real: ir.Type) -> None:
        self.reals = Container("tape_reals", real, 1, is_argument=True)
        self.integers = Container("tape_integers", I32, 1, is_argument=True)
        self.status = Container("tape_status", I32, 1, is_argument=True)
        self.lost = Local("lost", I32, (), "user")
        self.is_used = False
        self._ends = tuple(Local(f"end_{part}", I32, (), "user") for part in ("reals", "integers"))
        self._last = tuple(Local(f"last_{part}", I32, (), "temporary") for part in ("reals", "integers"))
        self._sites: list[ir.Local | Container] = []  # memory that is logged
        self._log_sites: dict[Local, dict[int, None]] = {}  # numbers of the memory that each log may name

    @property
    def arrays(self) -> tuple[Container, Container, Container]:
        """The arguments of the kernel."""
        return self.reals, self.integers, self.status

    def prelude(self, thread: Local) -> ir.Body:
        """Declarations at the start of an iteration."""
        made: list[ir.Statement] = [ir.Declare(self.lost, (literal(0, I32),))]
        for part in (REAL, INTEGER):
            room = Local("room", I32, (), "temporary")
            start = operation("mul", Read(thread), Read(room))
            last = operation("sub", operation("add", Read(self._ends[part]), Read(room)), 1)
            made += [
                ir.Declare(room, (element(self.status, 2 + part),)),
                ir.Declare(self._ends[part], (start,)),
                ir.Declare(self._last[part], (last,)),
            ]
        return tuple(made)

    def push(self, numbers: Sequence[Value], part: int) -> ir.Body:
        """Keep numbers, if there are any."""
        if not numbers:
            return ()
        self.is_used = True
        array, end, last = self._part(part)
        numbers = [half for x in numbers for half in _halves(x)]
        count = len(numbers)
        stores = [ir.Assign(element(array, add(end, n)), cast(x, array.dtype)) for n, x in enumerate(numbers)]
        has_room = operation("le", operation("add", end, count - 1), last)
        has_room = ir.Op("bit_and", (has_room, operation("eq", Read(self.lost), 0)), U1)  # ends may wrap later
        missing = operation("sub", operation("add", end, count), last)
        over = (
            ir.Atomic("atomic_max", element(self.status, part), missing),
            ir.Assign(Read(self.lost), literal(1, I32)),
        )
        return ir.If(has_room, tuple(stores), over), ir.Assign(end, operation("add", end, count))

    def pop(self, dtypes: Sequence[ir.Type], part: int) -> tuple[ir.Body, list[Value]]:
        """Statements that take numbers off again, and the numbers, as long as nothing else is pushed."""
        if not dtypes:
            return (), []
        array, end, last = self._part(part)
        count = sum(1 + (dtype in _WIDE) for dtype in dtypes)
        kept = iter([element(array, operation("min", add(end, n), last)) for n in range(count)])
        numbers = [_joined(next(kept), next(kept), t) if t in _WIDE else converted(next(kept), t) for t in dtypes]
        return (ir.Assign(end, operation("sub", end, count)),), numbers

    def _part(self, part: int) -> tuple[Container, Read, Read]:
        return self.arrays[part], Read(self._ends[part]), Read(self._last[part])

    # --- the log: old numbers of entries, with the memory that they are of

    def logged(self, target: ir.Target, log: Local) -> ir.Body:
        """Keep the number of an entry that is about to be overwritten; ``log`` counts the records."""
        memory = target.memory
        if memory not in self._sites:
            self._sites.append(memory)
        site = self._sites.index(memory)
        self._log_sites.setdefault(log, {})[site] = None
        record: list[Value] = [cast(_number(target), I32), literal(site, I32)]
        is_real = target.dtype.is_real
        reals, integers = ([target], record) if is_real else ([], [target, *record])
        count = ir.Assign(Read(log), operation("add", Read(log), 1))
        return (*self.push(reals, REAL), *self.push(integers, INTEGER), count)

    def undone(self, log: Local) -> ir.Body:
        """Put the numbers of a log back, the newest first."""
        if log not in self._log_sites:
            return ()
        index, site = Local("index", I32, (), "kept"), Local("site", I32, (), "kept")
        pop, (a, b) = self.pop((I32, I32), INTEGER)
        body = [*pop, ir.Declare(index, (a,)), ir.Declare(site, (b,))]
        for n in self._log_sites[log]:
            target = _entry(self._sites[n], Read(index))
            part = REAL if target.dtype.is_real else INTEGER
            pop, (old,) = self.pop((target.dtype,), part)
            body.append(ir.If(operation("eq", Read(site), n), (*pop, ir.Assign(target, old))))
        count = select(operation("eq", Read(self.lost), 0), Read(log), 0)
        return (ir.For("range", (Local("undone", I32, (), "loop"),), (count,), tuple(body)),)


def _number(target: ir.Target) -> Value:
    """The running number of an entry."""
    if isinstance(target, Load):
        c = target.container
        return adjoint_array(c, c.name, c.shape or (1,) * c.ndim).number(target)
    return running_number(target.index, target.local.shape)


def _entry(memory: Local | Container, number: Value) -> ir.Target:
    """The entry with a running number."""
    is_local = isinstance(memory, Local)
    sizes = memory.shape if isinstance(memory, Local) else (*(memory.shape or ()), *memory.element_shape)
    firsts = () if isinstance(memory, Local) else memory.offset
    places = indices_of(number, sizes)
    entry = [whole(add(i, first)) for i, first in zip_longest(places, firsts, fillvalue=0)]
    if is_local:
        return Read(memory, tuple(entry))
    return Load(memory, tuple(entry[: memory.ndim]), tuple(entry[memory.ndim :]))
