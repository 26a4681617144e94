"""Locals that an energy is a weighted sum of.

In ``e = 0.0; for k in range(8): e += w[k] * f(x[i, k]); energy[None] += 2 * e``, each term of ``e`` is added to the
energy, times 2. So the gradient's terms can be added where the energy's terms are, element by element, and the tangent
of ``e``, which has as many columns as all elements together, is not needed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import taichi_ext.program as ir

SIGNS = {"add": 1, "sub": -1}
Path = tuple[ir.Statement, ...]  # those around a statement


@dataclass(frozen=True)
class EnergySums:
    """An energy: a container with one entry, or None for the number that is returned; the locals with their weights."""

    container: ir.Container | None
    dtype: ir.Type
    weights: dict[ir.Local, float]


@dataclass(frozen=True)
class _Occurrence:
    number: int  # in the order of the text
    path: Path
    statement: ir.Statement


@dataclass
class _Uses:
    """Where the locals and the energy are declared, written and read, and where blocks are left."""

    energy: ir.Container | None  # see ``EnergySums``
    # the factors of locals in the energy; None for those that it is no sum of
    weights: dict[ir.Local, float | None] = field(default_factory=dict)
    declared: dict[ir.Local, _Occurrence] = field(default_factory=dict)
    writes: dict[object, list[_Occurrence]] = field(default_factory=dict)
    reads: dict[object, list[_Occurrence]] = field(default_factory=dict)
    jumps: list[_Occurrence] = field(default_factory=list)
    returns: list[_Occurrence] = field(default_factory=list)

    def collect(self, body: ir.Body) -> None:
        for number, (s, path) in enumerate(ir.enclosed(body)):
            place = _Occurrence(number, path, s)
            if isinstance(s, ir.Declare) and not s.local.shape and s.local.dtype.is_real:
                self.declared[s.local] = place
            for what in () if s.within else s.written:
                self.writes.setdefault(what, []).append(place)
            for what in s.contents.locals | s.contents.containers:
                self.reads.setdefault(what, []).append(place)
            if isinstance(s, ir.Jump):
                self.jumps.append(place)
            if isinstance(s, ir.Return):
                self.returns.append(place)

    def consider(self, value: ir.Value, weight: float, place: _Occurrence) -> None:
        """Find the locals that a value, which is added to the energy at a place, is a weighted sum of."""
        terms = weighted_terms(value, weight)
        locals_ = [node.local for _, node in terms if isinstance(node, ir.Read)]
        others = {local for _, v in terms if not isinstance(v, ir.Read) for local in v.contents.locals}
        for factor, node in terms:
            if not isinstance(node, ir.Read) or node.local not in self.declared or node.local not in self.writes:
                continue
            local = node.local
            is_sum = local not in self.weights and local not in others and locals_.count(local) == 1
            if not is_sum or not self._is_added_up(local, place):
                self.weights[local] = None
                continue
            self.weights[local] = factor
            for write in self.writes[local]:
                assert isinstance(write.statement, ir.Update)
                self.consider(write.statement.value, factor * SIGNS[write.statement.op], write)

    def _is_added_up(self, local: ir.Local, place: _Occurrence) -> bool:
        """Whether a local is only added to between its declaration and the place, which is reached in any case."""
        start = self.declared[local]
        between = range(start.number + 1, place.number)
        is_read_here = [p.statement for p in self.reads[local]] == [place.statement]
        is_summed = all(_sign(w.statement) is not None and w.number in between for w in self.writes[local])
        jumps = [j.path[len(start.path) :] for j in self.jumps if j.number in between]  # with what is around them
        is_left = not all(any(isinstance(s, (ir.For, ir.While)) for s in path) for path in jumps)
        others = [w for w in self.writes.get(self.energy, []) if w.number in between]
        is_kept = not any(_sign(w.statement) is None for w in others)
        return start.path == place.path and is_read_here and is_summed and not is_left and is_kept


def energy_sums(program: ir.Program, energy: ir.Container | None) -> EnergySums:
    """The locals that an energy is a weighted sum of, wherever terms are added to them."""
    uses = _Uses(energy)
    uses.collect(program.body)
    if energy is None:
        (value,) = (e for place in uses.returns for group in place.statement.values for e in ir.entries(group))  # type: ignore[attr-defined]
        uses.consider(value, 1, uses.returns[0])
    for place in () if energy is None or energy in uses.reads else uses.writes.get(energy, []):
        is_first = isinstance(place.statement, ir.Assign) and not place.path and uses.writes[energy][0] is place
        sign = 1 if is_first else _sign(place.statement)
        if sign is not None:
            uses.consider(place.statement.value, sign, place)  # type: ignore[attr-defined]
    weights = {local: weight for local, weight in uses.weights.items() if weight is not None}
    return EnergySums(energy, value.dtype if energy is None else energy.dtype, weights)


def _sign(s: ir.Statement) -> int | None:
    """The sign of the term that a statement adds; None if it does something else."""
    return SIGNS.get(s.op) if isinstance(s, ir.Update) else None


def weighted_terms(value: ir.Value, weight: float = 1.0) -> list[tuple[float, ir.Value]]:
    """The values that a value is a sum of, each with its constant factor."""
    result: list[tuple[float, ir.Value]] = []
    pending = [(weight, value)]
    while pending:
        factor, node = pending.pop()
        match node:
            case ir.Op("add" | "sub" as name, (a, b)):
                pending += [(factor * SIGNS[name], b), (factor, a)]
            case ir.Op("neg", (a,)):
                pending.append((-factor, a))
            case ir.Op("cast", (a,), dtype) if dtype.is_real or not a.dtype.is_real:  # the others round
                pending.append((factor, a))
            case ir.Op("mul", (ir.Const(number), a)) | ir.Op("mul", (a, ir.Const(number))):
                pending.append((factor * float(number), a))
            case ir.Op("truediv" | "raw_div", (a, ir.Const(number))) if number != 0:
                pending.append((factor / float(number), a))
            case _:
                result.append((factor, node))
    return result
