"""The parts of containers that a stage reads or writes, as far as the arguments of a launch say which.

A kernel that is given its step, as in ``x[t + 1, i] = f(x[t, i])``, writes one row of a field that holds all steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

import taichi_ext.program as ir
from taichi_ext.adjoint import Pair
from taichi_ext.analysis.loops import Extents, loop_reach, ranges
from taichi_ext.analysis.same_values import ValueNumbers
from taichi_ext.program import Const, Container, Load, Local, Op, Read, Value
from taichi_ext.runtime.reverse.cells import Box
from taichi_ext.simplify.usage import assigned_locals

_OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: function for name, function in ir.PYTHON.items() if name not in ("truediv", "pow")},
    **{"min": np.minimum, "max": np.maximum, "cast": lambda x: x},  # between integers, which may wrap
    **{name: getattr(np, name) for name in ("logical_and", "logical_or", "logical_not")},
}
_ORDERED = (*ir.COMPARISONS, "floordiv", "mod", "min", "max")
_NUMPY = {t: bool if t.bits == 1 else f"{t.name[0]}{t.bits // 8}" for t in ir.TYPES.values()}
_MOST = 8  # different parts of one container
_MOST_ITERATIONS = 1 << 20  # of which all indices are compared

Place = tuple[Value, ...]  # the first indices of an entry, as far as they are the same in all of a launch


class Places:
    """The entries that a block loads, or that it stores to, by container."""

    def __init__(self, body: ir.Body, arguments: Iterable[Local]) -> None:
        self._arguments = frozenset(arguments)
        changed = assigned_locals(body)
        everything = list(ir.statements(body))
        self._values = {
            s.local: s.values[0]
            for s in everything
            if isinstance(s, ir.Declare) and s.local not in changed and not s.local.shape
        }
        self._fixed: dict[Value, bool] = {}
        self._numbers = ValueNumbers()
        loads = (v for s in everything for x in ir.values_of(s) for v in ir.walk(x) if isinstance(v, Load))
        self.loads = self._by_container(loads)
        targets = [s.target for s in everything if isinstance(s, ir.Store) and isinstance(s.target, Load)]
        self.stores = self._by_container(targets)
        for s in everything:
            for c in s.writes if isinstance(s, ir.Effect) else ():
                self.stores[c] = [()]

    def _by_container(self, accesses: Iterable[Load]) -> dict[Container, list[Place]]:
        by_container: dict[Container, dict[object, Place]] = {}
        for load in accesses:
            place: list[Value] = []
            for i in load.indices:
                if not self.is_fixed(i):
                    break
                place.append(i)
            name = tuple(map(self._numbers.of, place))
            by_container.setdefault(load.container, {}).setdefault(name, tuple(place))
        return {c: list(places.values()) if len(places) <= _MOST else [()] for c, places in by_container.items()}

    def is_fixed(self, value: Value) -> bool:
        """Whether a value is the same in all of a launch, and can be computed from its arguments."""
        known = self._fixed.get(value)
        if known is None:
            if isinstance(value, Read):
                is_named = value.local in self._arguments and not value.index
                inner = self._values.get(value.local)
                known = is_named or (inner is not None and not value.index and self.is_fixed(inner))
            elif isinstance(value, Op):
                known = _is_computed(value) and all(map(self.is_fixed, value.args))
            else:
                known = isinstance(value, Const) and not value.dtype.is_real
            self._fixed[value] = known
        return known

    def boxes(self, places: Iterable[Place], c: Container, arguments: Mapping[Local, int]) -> list[Box]:
        """The parts of a container in a launch with these arguments."""
        shape, offset = c.shape or (), c.offset or (0,) * c.ndim
        made: dict[Box, None] = {}
        for place in places:
            box = tuple(i - o for i, o in zip(self.numbers(place, arguments) or (), offset, strict=False))
            is_inside = all(0 <= i < n for i, n in zip(box, shape, strict=False)) and len(shape) >= len(box)
            made[box if is_inside else ()] = None
        return [()] if () in made else list(made)

    def numbers(self, place: Place, arguments: Mapping[Local, int]) -> tuple[int, ...] | None:
        """Indices in a launch with these arguments; None for quotients by 0, where no iteration gets, and the like."""
        try:
            return tuple([int(self._number(i, arguments)) for i in place])
        except (ArithmeticError, ValueError):
            return None

    def _number(self, value: Value, given: Mapping[Any, Any]) -> Any:
        """An integer, or those of all iterations, from what some locals are; raises a ``KeyError`` where unknown."""
        if isinstance(value, Read) and not value.index:
            known = given.get(value.local)
            return self._number(self._values[value.local], given) if known is None else known
        if isinstance(value, Op) and (self._fixed.get(value) or _is_computed(value)):
            kind, args = value.dtype, [self._number(a, given) for a in value.args]
            if value.name.startswith("shift_") and not np.all((args[1] >= 0) & (args[1] < kind.bits)):
                raise ValueError  # what it gives is a matter of the machine
            number = _OPERATIONS[value.name](*(args if kind == ir.U1 else [_wrapped(a, kind) for a in args]))
            return _wrapped(number, kind)
        if isinstance(value, Const) and not value.dtype.is_real:
            return int(value.value)
        if isinstance(value, Load) and value.container not in self.stores:
            numbers, firsts = given[value.container], value.container.offset or (0,) * value.container.ndim
            indices = (self._number(i, given) - first for i, first in zip(value.indices, firsts, strict=True))
            found = numbers[(*indices, *value.component)]
            return _wrapped(found, value.dtype)
        raise KeyError(value)

    def arguments_of(self, pair: Pair) -> list[Local]:
        """The arguments that ``meet`` may read."""
        todo = [*pair.first, *pair.second, *pair.guards[0], *pair.guards[1]]
        todo += [n for loop in pair.loops for ends in ranges(loop) for n in ends if isinstance(n, Value)]
        reads = [v.local for v in ir.through(todo, self._operands) if isinstance(v, Read)]
        return [local for local in dict.fromkeys(reads) if local in self._arguments]

    def _operands(self, value: Value) -> Iterable[Value]:
        """What a value is computed from, also by way of a local."""
        inner = self._values.get(value.local) if isinstance(value, Read) else None
        return ir.children(value) if inner is None else (inner,)

    def _may_hold(
        self, guards: Iterable[Value], given: Mapping[Any, Any], size: int, *, is_certain: bool
    ) -> np.ndarray:
        """The iterations in which conditions hold, or are not known, unless ``is_certain``."""
        result = np.ones(size, bool)
        for guard in guards:
            try:
                with np.errstate(divide="raise"):
                    result &= np.broadcast_to(np.asarray(self._number(guard, given), bool), size)
            except (LookupError, ValueError, ArithmeticError):
                result &= not is_certain
        return result

    def meet(self, pair: Pair, arguments: Mapping[Any, Any], extents: Extents) -> bool:
        """Whether two iterations access an entry as the pair says, in a launch; where indices differ, they may."""
        try:
            ends = [ends for loop in pair.loops for ends in loop_reach(loop, extents) or ranges(loop)]
            spans = [
                range(*(n if isinstance(n, int) else int(self._number(n, arguments)) for n in two)) for two in ends
            ]
            size, inner = math.prod(map(len, spans)), math.prod(map(len, spans[len(pair.loops[0].variables) :]))
            if size > _MOST_ITERATIONS:
                return not pair.is_alike
            variables = (v for loop in pair.loops for v in loop.variables)
            axes = (axis.reshape(-1) for axis in np.meshgrid(*spans, indexing="ij"))
            given = {**arguments, **dict(zip(variables, axes, strict=True))}
            with np.errstate(divide="raise"):
                indices = [[self._number(i, given) for i in two] for two in zip(pair.first, pair.second, strict=True)]
        except (LookupError, ValueError, ArithmeticError):
            return not pair.is_alike
        entries = np.zeros(2 * size, np.int64)
        for two in indices if size else ():
            index = np.concatenate([np.broadcast_to(np.asarray(i, np.int64), size) for i in two])
            entries = entries * (np.ptp(index) + 1) + index - index.min()
        iteration = np.arange(size) // max(1, inner)
        is_dense = entries.max(initial=0) < 8 * size
        numbers = np.split(entries if is_dense else np.unique(entries, return_inverse=True)[1], 2)
        held = [self._may_hold(guards, given, size, is_certain=pair.is_alike) for guards in pair.guards]
        return _are_shared(*((n[is_run], iteration[is_run]) for n, is_run in zip(numbers, held, strict=True)))


def _is_computed(op: Op) -> bool:
    """Whether Python computes what Taichi does.

    Of numbers with and without a sign, Taichi makes one kind before it compares them; 1 + 1 is 0 of truth values, and
    77 // 7 is 1 of bytes.
    """
    signs = {a.dtype.is_signed for a in op.args if not (isinstance(a, Const) and a.dtype.is_signed and a.value >= 0)}
    if op.dtype.is_real or op.name not in _OPERATIONS or (len(signs) > 1 and op.name in _ORDERED):
        return False
    if op.dtype.bits > 1:
        return op.dtype.bits > 8 or op.name not in ("floordiv", "mod")
    is_logic = op.name in ("bit_and", "bit_or", "bit_xor") and all(a.dtype.bits == 1 for a in op.args)
    return is_logic or op.name in (*ir.COMPARISONS, "logical_and", "logical_or", "logical_not", "cast")


def _wrapped(numbers: Any, kind: ir.Type) -> Any:
    """A number in a type, or those of all iterations, which may wrap later: they are kept in 64 bits."""
    if not isinstance(numbers, np.ndarray):
        return kind.wrapped(int(numbers))
    return numbers.astype(_NUMPY[kind]).astype(np.uint64 if kind == ir.U64 else np.int64)


def _are_shared(first: tuple[np.ndarray, np.ndarray], second: tuple[np.ndarray, np.ndarray]) -> bool:
    """Whether two iterations access an entry, one as ``first`` says and the other as ``second``.

    Each has the numbers of entries and those of iterations, with an element for each run of the statement.
    """
    entries, iteration = second
    size = 1 + max(int(part.max(initial=0)) for part in (*first, *second))
    earliest, latest = np.full(size, size), np.full(size, -1)
    np.minimum.at(earliest, *first)
    np.maximum.at(latest, *first)
    is_other = (earliest[entries] != iteration) | (latest[entries] != iteration)
    return bool((is_other & (latest[entries] >= 0)).any())
