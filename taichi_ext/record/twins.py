"""What a kernel computes from decompositions, computed again with tangents; see ``decompositions``.

Where it leaves the locals of the kernel, it has the value of the first and the tangent of the second: NaN where single
vectors decide it whose values are equal. The kernel notes in a field of the package that this was so, and that Taichi's
own vectors were wrong.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import taichi_ext.program as ir
from taichi_ext.simplify.usage import written_locals

# Values that single singular vectors or eigenvectors decide, rather than a function of the whole decomposition.
#
# Where two singular values are equal, their vectors may be turned in the plane that they span: ``U R f(S) (V R)^T`` is
# the same, ``U[0, 0]`` is not, and has no derivative. Whether a value is the same is found by evaluating the program
# with numbers drawn at random, once with some vectors and once with these turned.

_DRAWS = 4
_MOST_ROUNDS = 9  # of a loop
_NEAR = 1e-7
_OPERATIONS: dict[str, Callable[..., Any]] = {
    **{**ir.PYTHON, "abs": abs, "max": max, "min": min},
    **{name: getattr(math, name) for name in ("sin", "cos", "tan", "asin", "acos", "tanh", "exp", "log", "sqrt")},
    **{name: getattr(math, name) for name in ("floor", "ceil", "atan2")},
    **{"select": lambda c, a, b: a if c else b, "ifte": lambda c, a, b: a if c else b, "round": round},
    **{"logical_and": lambda a, b: a and b, "logical_or": lambda a, b: a or b, "logical_not": operator.not_},
    **{"rsqrt": lambda a: 1.0 / math.sqrt(a), "raw_div": operator.truediv},
}


@dataclass(frozen=True)
class Vectors:
    """The calls whose vectors a value depends on."""

    calls: frozenset[int] = frozenset()  # all of them, by their numbers
    # those with a pair of neighbouring values at which it has no derivative if they are equal; then come the pairs of
    # singular values of opposite signs
    tied: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True)
class Decomposition:
    """A call: its statement, its matrix, and the locals of its vectors and of its values; these may be a diagonal."""

    statement: ir.Statement
    matrix: tuple[ir.Value, ...]
    vectors: tuple[ir.Local, ...]
    values: ir.Local


def vectors_read(body: ir.Body, calls: list[Decomposition], locals_: Iterable[ir.Local]) -> Mapping[ir.Value, Vectors]:
    """For values that other statements read of ``locals_``, which are computed from decompositions, their vectors."""
    slice_ = frozenset(locals_)
    givers = (s for s in ir.statements(body) if isinstance(s, (ir.Declare, ir.Store)))
    given = ((to, s) for s in givers for to, _ in ir.flows(s) if isinstance(to, ir.Local))
    uses = ((to, local) for to, s in given for v in ir.values_of(s) for local in v.contents.locals)
    computed = frozenset(ir.reached(slice_, uses))  # such as the bounds of a clamp, the same for all values
    result: dict[ir.Value, Vectors] = {}
    for n, call in enumerate(calls):
        kinds = (True,) if len(call.vectors) == 2 else (True, False)  # singular vectors are rotations
        for pair, are_rotations in itertools.product(range(len(call.vectors) * (call.values.shape[0] - 1)), kinds):
            for value, is_tied in _judged(body, calls, (slice_, computed), (n, pair), are_rotations).items():
                known = result.get(value, Vectors())
                result[value] = Vectors(known.calls | {n}, known.tied | ({(n, pair)} if is_tied else set()))
    return result


def _judged(
    body: ir.Body,
    calls: list[Decomposition],
    locals_: tuple[frozenset[ir.Local], frozenset[ir.Local]],
    target: tuple[int, int],
    are_rotations: bool,
) -> dict[ir.Value, bool]:
    """The values that depend on the vectors of a call, and whether they change with those of a pair that is tied.

    They do if that is so in all draws in which they depend on vectors at all: a draw may take another branch.
    """
    judged: dict[ir.Value, bool] = {}
    numbered = {call.statement: (n, call) for n, call in enumerate(calls)}
    for seed in range(_DRAWS):
        drawn = _Drawn(np.random.default_rng(seed), are_rotations)
        runs = [_Run(numbered, *locals_, drawn, target, how) for how in ("", "turned", "others")]
        plain, turned, others = [run.results(body) for run in runs]
        for value, numbers in plain.items():
            if not all(map(math.isfinite, (*numbers, *turned[value]))):
                continue
            if _differs(numbers, others[value]):
                judged[value] = judged.get(value, True) and _differs(numbers, turned[value])
        if not any(judged.values()):
            break
    return judged


def _differs(some: list[float], others: list[float]) -> bool:
    return any(not abs(a - b) <= _NEAR * (1.0 + abs(a) + abs(b)) for a, b in zip(some, others, strict=False))


@dataclass
class _Drawn:
    """Numbers of one draw, which all its runs share."""

    generator: np.random.Generator
    are_rotations: bool
    numbers: dict[Hashable, Any] = field(default_factory=dict)

    def number(self, key: Hashable, dtype: ir.Type) -> float | int:
        if key not in self.numbers:
            drawn = self.generator.uniform(0.4, 1.6) if dtype.is_real else int(self.generator.integers(3))
            self.numbers[key] = drawn
        return self.numbers[key]

    def bases(self, key: Hashable, n: int, count: int) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
        """Values in descending order, orthogonal vectors, and other matrices of their shape."""
        if key not in self.numbers:
            normal = self.generator.standard_normal((2 * count, n, n))
            values = np.sort(self.generator.uniform(0.5, 1.9, n))[::-1].copy()
            vectors = [np.linalg.qr(m)[0] for m in normal[:count]]
            for m in vectors:  # a rotation, or else a reflection
                m[:, 0] *= np.linalg.det(m) * (1.0 if self.are_rotations else -1.0)
            self.numbers[key] = values, vectors, list(normal[count:])
        return self.numbers[key]


class _Jump(Exception):
    pass


@dataclass(eq=False)
class _Run:
    """One evaluation of the statements that compute a slice or numbers for it, and of what others read of the slice."""

    calls: dict[ir.Statement, tuple[int, Decomposition]]
    slice_: frozenset[ir.Local]
    computed: frozenset[ir.Local]
    drawn: _Drawn
    target: tuple[int, int]
    how: str
    locals_: dict[ir.Local, Any] = field(default_factory=dict)
    visits: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    memo: dict[ir.Value, Any] = field(default_factory=dict)
    reads: dict[ir.Value, list[float]] = field(default_factory=lambda: defaultdict(list))

    def results(self, body: ir.Body) -> dict[ir.Value, list[float]]:
        """The numbers of each value that a statement outside of the slice reads of it."""
        with contextlib.suppress(_Jump):
            self._body(body)
        return self.reads

    def _body(self, body: ir.Body) -> None:
        for s in body:
            self.memo = {}
            self._statement(s)

    def _statement(self, s: ir.Statement) -> None:
        match s:
            case ir.If(condition=condition, then=then, orelse=orelse):
                self._body(then if self._value(condition) else orelse)
            case ir.While() | ir.For():
                self._loop(s)
            case ir.Jump(kind=kind):
                raise _Jump(kind)
            case ir.Call() if s in self.calls:
                self._decomposed(*self.calls[s])
            case ir.Declare(local=local, values=values) if local in self.computed:
                numbers = [self._value(v) for v in values] or [0.0] * math.prod(local.shape)
                self.locals_[local] = np.reshape(numbers, local.shape) if local.shape else numbers[0]
            case ir.Store(target=ir.Read(local=local) as target) if local in self.computed:
                self._store(s, target)
            case ir.Call(results=results) if self.slice_.intersection(results):
                self._called(s)
            case _:
                for value in ir.values_of(s):
                    if value.dtype.is_real and not self.slice_.isdisjoint(value.contents.locals):
                        self.reads[value].append(self._value(value))

    def _loop(self, s: ir.While | ir.For) -> None:
        rounds: Iterable[tuple[int, ...]] = itertools.repeat((), _MOST_ROUNDS)
        if isinstance(s, ir.For):
            rounds = itertools.islice(itertools.product(*self._ranges(s)), _MOST_ROUNDS)
        for numbers in rounds:
            if isinstance(s, ir.For):
                loops = zip(s.variables, numbers, strict=False)
                self.locals_ |= {local: np.full(local.shape, n) if local.shape else n for local, n in loops}
            self.memo = {}
            if isinstance(s, ir.While) and s.condition is not None and not self._value(s.condition):
                break
            try:
                self._body(s.body)
            except _Jump as jump:
                if jump.args[0] == "break":
                    break

    def _ranges(self, s: ir.For) -> list[Iterable[int]]:
        """The numbers of the loop variables; one each where bounds are not known, or it runs over a field."""
        domain = s.domain if s.kind != "range" else (s.domain,)
        bounds = [part if isinstance(part, tuple) else (part,) for part in domain]
        if s.kind not in ("range", "ndrange") or not all(isinstance(v, ir.Const) for part in bounds for v in part):
            return [(0,)] * max(1, len(s.variables))
        return [range(*(int(self._value(v)) for v in part))[:_MOST_ROUNDS] for part in bounds]

    def _decomposed(self, number: int, call: Decomposition) -> None:
        visit, self.visits[number] = self.visits[number], self.visits[number] + 1
        is_nested = any(not self.slice_.isdisjoint(v.contents.locals) for v in call.matrix)
        matrix = tuple(f"{self._value(v):.6e}" for v in call.matrix) if is_nested else ()
        n = call.values.shape[0]
        values, vectors, others = self.drawn.bases((number, visit, matrix), n, len(call.vectors))
        if number == self.target[0]:
            is_opposite, k = divmod(self.target[1], n - 1)
            values = values.copy()
            values[k + 1] = -values[k] if is_opposite else values[k]
            if self.how == "turned":
                turn = np.eye(n)
                turn[k : k + 2, k : k + 2] = [[0.8, -0.6], [0.6, 0.8]]
                vectors = [v @ (turn.T if is_opposite and m else turn) for m, v in enumerate(vectors)]
            vectors = others if self.how == "others" else vectors
        self.locals_ |= zip(call.vectors, vectors, strict=True)
        self.locals_[call.values] = values if len(call.values.shape) == 1 else np.diag(values)

    def _store(self, s: ir.Store, target: ir.Read) -> None:
        new = self._value(s.value)
        if isinstance(s, (ir.Update, ir.Atomic)):
            name = s.op if isinstance(s, ir.Update) else s.function.removeprefix("atomic_")
            old = self._value(target)
            if isinstance(s, ir.Atomic) and s.result is not None:
                self.locals_[s.result] = old
            new = self._computed(name, old, new)
        if not target.index:
            self.locals_[target.local] = new
        elif target.local in self.locals_:
            self.locals_[target.local] = np.array(self.locals_[target.local], dtype=float)
            self.locals_[target.local][self._index(target)] = new

    def _called(self, s: ir.Call) -> None:
        """The results of another function of the library, where it is known."""
        groups = [a for a in s.args if isinstance(a, ir.Tensor)]
        args = [np.reshape([self._value(v) for v in a.entries], a.shape) for a in groups]
        known: dict[str, Callable[..., Any]] = {"inverse": np.linalg.inv, "solve": np.linalg.solve}
        for local in s.results:
            self.locals_[local] = known[s.function](*args) if s.function in known else np.full(local.shape, np.nan)

    # --- values

    def _value(self, value: ir.Value) -> Any:
        if value not in self.memo:
            self.memo[value] = self._evaluated(value)
        return self.memo[value]

    def _evaluated(self, value: ir.Value) -> Any:
        match value:
            case ir.Const(value=number) | ir.FoldedConst(value=number):
                return number
            case ir.Op(name="cast", args=(x,), dtype=dtype):
                return self._computed("cast" if dtype.is_real else "int", self._value(x))
            case ir.Op(name=name, args=args):
                return self._computed(name, *[self._value(a) for a in args])
            case ir.Read(local=local) if local in self.locals_:
                held = self.locals_[local]
                return held[self._index(value)].item() if value.index else held
            case ir.Read(local=memory) | ir.Load(container=memory):
                indices: Any = value.index if isinstance(value, ir.Read) else (*value.indices, *value.component)
                key = memory, tuple(v if isinstance(v, int) else self._value(v) for v in indices)
                return self.drawn.number(key, value.dtype)
        return self.drawn.number(value, value.dtype)

    def _index(self, read: ir.Read) -> tuple[int, ...]:
        index = (i if isinstance(i, int) else self._value(i) for i in read.index)
        return tuple(int(i) % n if math.isfinite(i) else 0 for i, n in zip(index, read.local.shape, strict=True))

    def _computed(self, name: str, *args: Any) -> Any:
        function = {"cast": float, "int": int}.get(name) or _OPERATIONS.get(name)
        try:
            number = math.nan if function is None else function(*args)
        except (ArithmeticError, ValueError, TypeError):
            return math.nan
        return math.nan if isinstance(number, complex) else number


# All that is computed from decompositions, again.

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
    """What a kernel finds out about one decomposition: 1 where it is so, else 0."""

    ties: tuple[ir.Local, ...]  # for each pair of neighbouring values, whether they are equal or nearly so
    is_wrong: tuple[ir.Local, ...]  # whether the vectors are; none for those that are always right


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
        if not self._again.keys().isdisjoint(written_locals(s)):
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
