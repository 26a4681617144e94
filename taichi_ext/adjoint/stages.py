"""A kernel as stages in normal form, each of which has an adjoint of its own.

A *stage* is a parallel loop at the top of a kernel, or a run of other statements, which one thread executes. Locals of
the kernel that several stages use are entries of an array (``crossing``), and so are returned values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product

import taichi_ext.program as ir
from taichi_ext.adjoint.draws import recorded_draws
from taichi_ext.adjoint.normal import normal, running_number, whole
from taichi_ext.adjoint.order import Order
from taichi_ext.adjoint.own_entries import with_own_entries
from taichi_ext.adjoint.recorded import with_recorded
from taichi_ext.analysis.activity import Activity, find_activity
from taichi_ext.analysis.bounds import with_checks
from taichi_ext.analysis.changes import read_containers, written_containers
from taichi_ext.analysis.linearity import check_rules
from taichi_ext.analysis.loops import Extents, is_serialized, leaves, loop_reach
from taichi_ext.differentiate.facts.decisions import DifferentiationRequest, Use
from taichi_ext.differentiate.transform.forward import differentiate
from taichi_ext.program import I32, U1, Container, Load, Local, Read, Value
from taichi_ext.program.build import Coefficient, add, cast, literal
from taichi_ext.schedule.loops import with_iterations_together
from taichi_ext.schedule.machine import Machine
from taichi_ext.simplify import simplify


@dataclass(frozen=True, eq=False)
class Stage:
    """One stage of a kernel.

    Attributes:
        loop: the parallel loop; None for statements of one thread.
        body: the body of the loop, or the statements, in normal form.
        original: the stage as it runs forward.
        draws: arrays in which its run records random numbers; its adjoint reads them as they are behind it.
        again: the stage as it runs forward a second time, with the recorded numbers; None where it is as the first.
        recorded: costly values of the body that may be loaded, and from where, see ``recorded``.
        recording: the stage with such values; None where there are none.
    """

    loop: ir.For | None
    body: ir.Body
    original: ir.Body
    draws: frozenset[Container] = frozenset()
    again: ir.Body | None = None
    recorded: Mapping[Local, Load] = field(default_factory=dict)
    recording: Stage | None = None


class OwnArrays(dict[Container, int]):
    """The arrays that each launch of a kernel has of its own, with their sizes: given numbers, locals, draws."""

    def reserve(self, dtype: ir.Type, count: int, purpose: str = "crossing_") -> tuple[Container, int]:
        """Room for some numbers: the array for this purpose, and the first of its entries."""
        dtype = I32 if dtype == U1 else dtype
        name = f"{purpose}{dtype.name}"
        array = next((c for c in self if c.name == name), Container(name, dtype, 1, is_argument=True, shape=(1,)))
        start = self.get(array, 0)
        self[array] = start + max(1, count)
        return array, start


@dataclass(eq=False)
class Staged:
    """A kernel as stages.

    Attributes:
        program: the kernel.
        order: which of its loops keep their order.
        own: the arrays of a launch: locals that several stages use are there, and what is drawn.
        stages: its stages, in their order.
        returned: the array, start and count of the returned values.
    """

    program: ir.Program
    order: Order
    own: OwnArrays
    stages: list[Stage] = field(default_factory=list)
    returned: tuple[Container, int, int] | None = None


def staged(
    program: ir.Program,
    extents: Extents,
    threads: int = 1,
    is_fixed: Callable[[Value], bool] = lambda value: False,
    own: OwnArrays | None = None,
) -> Staged:
    """A simplified program as stages in normal form.

    Args:
        program: the program.
        threads: of the machine.
        is_fixed: whether a launch can compute an integer from its arguments.
        own: the arrays of a launch that the program has already.

    Raises:
        UnsupportedError: a derivative is not known.
    """
    program = lowered(program, extents)
    machine = Machine(threads, extents=extents)
    program = replace(program, body=ir.mapped(program.body, lambda s: _together(s, machine)))
    order = Order(program, extents, threads, is_fixed)
    result = Staged(program, order, OwnArrays() if own is None else own)
    groups: list[list[ir.Statement]] = []
    is_open = False
    for s in _with_returns(program.body, result):
        s = _in_order(s, order)
        is_parallel = _is_parallel(s)
        if is_open and not is_parallel:
            groups[-1].append(s)
        else:
            groups.append([s])
        is_open = not is_parallel
    parts = _with_crossing(groups, result.own.reserve)
    crossing = frozenset(result.own)
    result.stages += [_with_draws(_stage(part, crossing, extents), result, extents) for part in parts]
    return result


def checked(stage: Stage, program: ir.Program, extents: Extents, activity: Activity) -> Stage:
    """A stage with checks of indices that may be out of range, where there are no adjoints."""
    body = stage.body if stage.loop is None else (replace(stage.loop, body=stage.body),)
    body = with_checks(replace(program, body=body), extents, activity)[0].body
    if stage.loop is not None:
        (loop,) = body
        assert isinstance(loop, ir.For)
        body = loop.body
    return replace(stage, body=body)


def _with_draws(stage: Stage, found: Staged, extents: Extents) -> Stage:
    """The stage where the random numbers that it draws are recorded."""
    purpose, loop = f"crossing_draws_{len(found.own)}_", stage.loop
    made = recorded_draws(
        loop,
        stage.body,
        None if loop is None else loop_reach(loop, extents),
        lambda dtype, count: found.own.reserve(dtype, count, purpose),
    )
    if made is None:
        return stage
    once = ir.For("range", (Local("once", I32, (), "loop"),), (literal(1, I32),), (), {"serialize": True})
    recording, again = (replace(loop or once, body=body) for body in made)
    draws = frozenset(c for c in found.own if c.name.startswith(purpose))
    return Stage(loop, made[1], (recording,), draws, (again,))


def _stage(group: ir.Body, crossing: frozenset[Container], extents: Extents) -> Stage:
    loop = group[0]
    if len(group) == 1 and isinstance(loop, ir.For) and _is_parallel(loop) and not _shares(loop, crossing):
        recorded = with_recorded(loop, extents)
        recording = None
        if recorded is not None:
            named, places = recorded
            recording = Stage(named, normal(with_own_entries(named, extents)), (named,), recorded=places)
        return Stage(loop, normal(with_own_entries(loop, extents)), group, recording=recording)
    kept = tuple(replace(s, config={}) if isinstance(s, ir.For) else s for s in group)
    return Stage(None, normal(kept), group)


def _is_parallel(s: ir.Statement) -> bool:
    return isinstance(s, ir.For) and not is_serialized(s) and not leaves(s.body, ("break",))


def _shares(s: ir.For, crossing: frozenset[Container]) -> bool:
    """Whether iterations read locals of the kernel that others change, as short loops of one thread can."""
    return bool(read_containers(s.body) & written_containers(s.body) & crossing)


def _in_order(s: ir.Statement, order: Order) -> ir.Statement:
    """A parallel loop as a serial one, where its adjoint needs the order of its iterations."""
    if not isinstance(s, ir.For) or is_serialized(s):
        return s
    needs_old = any(isinstance(x, ir.Atomic) and isinstance(x.target, Load) for x in ir.statements(s.body))
    if not needs_old and not order.matters(s):
        return s
    serial = {"parallelize": 1} if s.kind in ("field", "grouped") else {"serialize": True}
    return replace(s, config={**s.config, **serial})


def _with_returns(body: ir.Body, found: Staged) -> ir.Body:
    """The statements of a kernel, which store what it returns."""

    def change(s: ir.Statement) -> ir.Statement | ir.Body:
        if not isinstance(s, ir.Return):
            return s
        values = [e for group in s.values for e in ir.entries(group)]
        kind = max((v.dtype for v in values), key=lambda t: (t.is_real, t.bits))
        array, start = found.own.reserve(kind, len(values))
        found.returned = array, start, len(values)
        return tuple([ir.Assign(_entry(array, start + n), v, place=s.place) for n, v in enumerate(values)])

    return ir.mapped(body, change)


def _entry(array: Container, number: Coefficient) -> Load:
    return Load(array, (whole(number),))


# Locals of a kernel that several of its stages use, as entries of arrays.

_Groups = list[list[ir.Statement]]  # the statements of each stage


def _with_crossing(groups: _Groups, reserve: Callable[[ir.Type, int, str], tuple[Container, int]]) -> list[ir.Body]:
    """The stages, where locals that several of them use are entries of arrays, for which ``reserve`` makes room.

    Those that never have a derivative, such as the results of ``ti.sym_eig`` of a stopped matrix, have arrays of their
    own: whether an array has an adjoint is asked of all of it.
    """
    shared = _shared(groups)
    if not shared:
        return [tuple(group) for group in groups]
    purposes = dict.fromkeys(_may_be_active(groups), "crossing_")
    places = {x: reserve(x.dtype, math.prod(x.shape), purposes.get(x, "crossing_fixed_")) for x in shared}
    crossing = _Crossing(places)
    return [ir.mapped(tuple(group), crossing.statement) for group in groups]


def _shared(groups: _Groups) -> list[Local]:
    """The locals that are declared at the top of one stage, and used in others."""
    everything = [(n, s) for n, group in enumerate(groups) for s in group]
    owner = {local: n for n, s in everything if not isinstance(s, ir.For) for local in ir.declared(s)}
    used = {(n, m) for n, s in everything for m in s.reads | s.written}
    return [local for local, n in owner.items() if any((k, local) in used for k in range(len(groups)) if k != n)]


def _may_be_active(groups: _Groups) -> frozenset[Local]:
    """The locals that carry tangents if all that a kernel is given does."""
    program = ir.Program("", (), (), tuple(s for group in groups for s in group), ())
    used = {m for s in program.body for m in s.reads | s.written}
    containers = [m for m in used if isinstance(m, Container)]
    declared = {local for s in ir.statements(program.body) for local in ir.declared(s)}
    return find_activity(program, containers, (m for m in used if isinstance(m, Local) and m not in declared)).locals


@dataclass(frozen=True)
class _Crossing:
    """Statements with entries in place of locals; each local has an array and its first entry there."""

    places: dict[Local, tuple[Container, int]]

    def statement(self, s: ir.Statement) -> ir.Statement | ir.Body:
        s = ir.with_nodes(s, self._value)
        if isinstance(s, ir.Declare) and s.local in self.places:
            array, start = self.places[s.local]
            return tuple([ir.Assign(_entry(array, start + k), v, place=s.place) for k, v in enumerate(s.values)])
        if isinstance(s, ir.Store) and isinstance(s.target, Read) and s.target.local in self.places:
            s = replace(s, target=self._entry(s.target))
        results = () if isinstance(s, (ir.Declare, ir.For)) else ir.declared(s)
        return (s, *(store for r in results if r in self.places for store in self._stores(r)))

    def _value(self, v: Value) -> Value:
        if not isinstance(v, Read) or v.local not in self.places:
            return v
        return cast(self._entry(v), v.dtype)

    def _entry(self, v: Read) -> Load:
        array, start = self.places[v.local]
        return _entry(array, add(running_number(v.index, v.local.shape), start))

    def _stores(self, local: Local) -> list[ir.Statement]:
        """Stores of all numbers of a local to its entries."""
        array, start = self.places[local]
        entries = (Read(local, index) for index in product(*map(range, local.shape)))
        return [ir.Assign(_entry(array, start + k), cast(e, array.dtype)) for k, e in enumerate(entries)]


def _together(s: ir.Statement, machine: Machine) -> ir.Statement:
    """A loop without derivatives whose iterations go through its body together, as they do in forward mode."""
    if not isinstance(s, ir.For) or not s.is_together:
        return s
    body = ir.mapped(s.body, lambda x: x.declarations if isinstance(x, ir.Boundary) else x)
    (made,) = with_iterations_together((replace(s, body=body),), machine)
    assert isinstance(made, ir.For)
    return replace(made, is_together=True)


# Programs whose values with a derivative of their own are sums of arguments with weights.
#
# The forward engine, asked for no column, has the partials of rules over the tangents that they take, and the gradients
# of levels by the position of a pixel: these are the weights. So edges and rules have one derivative in both modes.

_PLAIN = ("stop_gradient", "replace_gradient")


def lowered(program: ir.Program, extents: Extents) -> ir.Program:
    """The program with ``weighted`` boundaries for its rules and edges.

    Raises:
        UnsupportedError: a derivative is not known, or a rule is not linear.
    """
    boundaries = [s for s in ir.statements(program.body) if isinstance(s, ir.Boundary)]
    if all(s.kind in _PLAIN and "what" not in s.options for s in boundaries):
        return program
    check_rules(program)
    return simplify(differentiate(program, DifferentiationRequest(0, {}, extents, use=Use(is_lowered=True))).program)
