"""What a kernel computes from decompositions, computed again with tangents; see ``decompositions``.

Where it leaves the locals of the kernel, it has the value of the first and the tangent of the second: NaN where single
vectors decide it whose values are equal, see ``analysis.singular_vectors``. The kernel notes in a field of the package
that this was so, and that Taichi's own vectors were wrong.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace

import taichi_ext.program as ir
from taichi_ext.analysis.singular_vectors import Decomposition, Vectors, vectors_read

AT = "_at"  # ends the name of a call whose results are its other arguments, with the derivative of the decomposition
TIE = (
    "single vectors of ti.{} are read, whose values are equal or nearly so: they have no derivative there. J is NaN. "
    "A function of all of them, such as U f(S) V^T in one kernel, has one."
)
WRONG = (
    "ti.{} gives wrong vectors here, so values that the kernel computes from them are wrong, also without a Jacobian. "
    "The derivative is that of the true function. Eigenvalues, and ti.svd of a positive definite matrix, are right."
)


@dataclass(frozen=True)
class _Facts:
    """What a kernel finds out about one decomposition: 1 where it is so, else 0.

    Attributes:
        ties: for each pair of neighbouring values, whether they are equal or nearly so.
        is_wrong: whether the vectors are; none for those that are always right.
    """

    ties: tuple[ir.Local, ...]
    is_wrong: tuple[ir.Local, ...]


def with_tangents_at(body: ir.Body, alert: Callable[..., ir.If]) -> ir.Body:
    """The block in which all that is computed from decompositions is computed again; ``alert`` as in ``Recording``."""
    calls = [s for s in ir.statements(body) if isinstance(s, ir.Call) and _is_at(s)]
    return _Twins(body, calls, alert).body() if calls else body


class _Twins:
    """The parts of one kernel."""

    def __init__(self, body: ir.Body, calls: list[ir.Call], alert: Callable[..., ir.If]) -> None:
        self._whole = body
        self._alert = alert
        self._again: dict[ir.Local, ir.Local] = {}  # from a local to the one with tangents
        self._facts: list[_Facts] = []
        self._calls: dict[ir.Statement, ir.Body] = {}  # without the facts, which statements behind it note
        decompositions = [self._decomposition(s) for s in calls]
        self._roots = frozenset(self._again)
        computed = ir.reached(self._again, _edges(body)).keys() - self._again.keys()
        self._again |= {x: ir.Local(f"{x.name}_at", x.dtype, x.shape, "temporary") for x in computed}
        self._names = [s.function.removesuffix(AT) for s in calls]
        self._vectors = vectors_read(body, decompositions, self._again)

    def body(self) -> ir.Body:
        made = ir.mapped(self._whole, self._with_twin)
        for facts in self._facts:
            for local in (*facts.ties, *facts.is_wrong):
                made = _declared(made, local)
        return made

    def _decomposition(self, s: ir.Call) -> Decomposition:
        """A call; from now on its results take the place of those without tangents."""
        count = len(s.results)
        primal = [ir.entries(v)[0].local for v in s.args[-count:]]  # type: ignore[attr-defined]
        self._again |= zip(primal, s.results, strict=True)
        noted = [ir.Local("fact", v.dtype, (), "kept") for v in ir.entries(s.args[1 + count])]
        values = zip(noted, ir.entries(s.args[1 + count]), strict=True)
        most = [ir.Assign(ir.Read(x), ir.Op("max", (ir.Read(x), v), x.dtype), place=s.place) for x, v in values]
        self._calls[s] = (replace(s, args=(*s.args[: 1 + count], *s.args[2 + count :])), *most)
        pairs = (primal[0].shape[0] - 1) * (count - 1)  # singular values may have opposite signs
        self._facts.append(_Facts(tuple(noted[:pairs]), tuple(noted[pairs:])))
        values_at = count - 2  # of U, S, V and of L, Q
        vectors = tuple(local for n, local in enumerate(primal) if n != values_at)
        return Decomposition(s, ir.entries(s.args[0]), vectors, primal[values_at])

    def _second(self, value: ir.Value) -> ir.Value:
        return ir.rebuilt(value, lambda node: ir.read_from(node, self._again))

    def _with_twin(self, s: ir.Statement) -> ir.Statement | ir.Body:
        if isinstance(s, (ir.If, ir.While, ir.For)) or self._roots.intersection(ir.declared(s)):
            return s
        if s in self._calls:  # perhaps of a matrix that comes from another decomposition
            call, *rest = self._calls[s]
            assert isinstance(call, ir.Call)
            matrix = ir.regrouped(call.args[0], tuple(map(self._second, ir.entries(call.args[0]))))
            return replace(call, args=(matrix, *call.args[1:])), *rest
        if any(local in self._again for local in ir.declared(s)) or (
            isinstance(s, ir.Store) and s.target.memory in self._again
        ):
            return s, self._repeated(s)
        before: list[ir.Statement] = []

        def joined(value: ir.Value) -> ir.Value:
            if not value.dtype.is_real or value.contents.locals.isdisjoint(self._again):
                return value
            local = ir.Local("joined", value.dtype, (), "temporary")
            given = {"surrogate": self._second(value), **self._weights(s, value, before)}
            before.append(ir.Boundary("replace_gradient", None, given, value, (local,), place=s.place))
            return ir.Read(local, place=value.place)

        is_open = not isinstance(s, ir.Boundary) or s.kind != "stop_gradient"
        made = ir.with_values(s, joined) if is_open else s  # which adds to ``before``
        return (*before, made)

    def _repeated(self, s: ir.Statement) -> ir.Statement:
        """The statement once more, for the locals with tangents."""
        again, second = self._again, self._second
        if isinstance(s, ir.Declare):
            return replace(s, local=again[s.local], values=tuple(map(second, s.values)))
        if isinstance(s, ir.Call):
            made = ir.with_values(s, second)
            return replace(made, results=tuple(again.get(local, local) for local in s.results))
        assert isinstance(s, ir.Store)
        result = {"result": again[s.result]} if isinstance(s, ir.Atomic) and s.result is not None else {}
        return replace(s, target=second(s.target), value=second(s.value), **result)

    # --- what has no derivative, or a wrong value

    def _weights(self, s: ir.Statement, value: ir.Value, before: list[ir.Statement]) -> dict[str, ir.Value]:
        """The factor of a tangent, NaN where it does not exist; ``before`` takes the statements that it needs."""
        vectors = self._vectors.get(value, Vectors())
        for n in sorted(vectors.calls):
            self._note(s, WRONG.format(self._names[n]), self._facts[n].is_wrong, before, is_undefined=False)
        for n in sorted({n for n, _ in vectors.tied}):
            ties = tuple(self._facts[n].ties[k] for k in range(len(self._facts[n].ties)) if (n, k) in vectors.tied)
            self._note(s, TIE.format(self._names[n]), ties, before, is_undefined=True)
        every = [self._facts[n].ties[k] for n, k in sorted(vectors.tied)]
        if not every:
            return {}
        weight = ir.Local("weight", value.dtype, (), "temporary")
        numbers = ir.Const(math.nan, value.dtype), ir.Const(1.0, value.dtype)
        before.append(ir.Declare(weight, (ir.Op("select", (_any(every), *numbers), value.dtype),), place=s.place))
        return {"weights": ir.Read(weight)}

    def _note(
        self, s: ir.Statement, what: str, facts: tuple[ir.Local, ...], before: list[ir.Statement], *, is_undefined: bool
    ) -> None:
        """Note that one of the facts is so, where a value is stored that depends on it."""
        if facts:
            target = s.target.memory if isinstance(s, ir.Store) else None
            where = target.is_argument or target.object if isinstance(target, ir.Container) else None
            before.append(self._alert(what, _any(facts), s.place, where, is_undefined=is_undefined))


def _any(facts: Collection[ir.Local]) -> ir.Value:
    total = functools.reduce(lambda a, b: ir.Op("add", (a, b), a.dtype), (ir.Read(x) for x in facts))
    return ir.Op("gt", (total, ir.Const(0.5, total.dtype)), ir.U1)


def _declared(body: ir.Body, local: ir.Local) -> ir.Body:
    """The block with a declaration of a local, 0 at first, in the innermost block with all statements that name it."""
    naming = [n for n, s in enumerate(body) if _names((s, *s.within), local)]
    if not naming:
        return body
    n, s = naming[0], body[naming[0]]
    blocks = [_names(ir.statements(block), local) for block in ir.bodies(s)]
    if len(naming) == 1 and not _names((s,), local) and sum(blocks) == 1:
        return (*body[:n], ir.with_blocks(s, lambda block: _declared(block, local)), *body[n + 1 :])
    return (*body[:n], ir.Declare(local, (ir.Const(0.0, local.dtype),), place=s.place), *body[n:])


def _names(statements: Iterable[ir.Statement], local: ir.Local) -> bool:
    return any(local in s.contents.locals or (isinstance(s, ir.Store) and s.target.memory is local) for s in statements)


def _edges(body: ir.Body) -> Iterator[tuple[ir.Local, ir.Local]]:
    """From locals to those of real numbers that are computed from them."""
    computing = (s for s in ir.statements(body) if isinstance(s, (ir.Declare, ir.Store, ir.Call)) and not _is_at(s))
    for to, values in (flow for s in computing for flow in ir.flows(s)):
        if isinstance(to, ir.Local) and to.dtype.is_real:
            yield from ((local, to) for v in values if v.dtype.is_real for local in v.contents.locals)


def _is_at(s: ir.Statement) -> bool:
    return isinstance(s, ir.Call) and s.function.endswith(AT)
