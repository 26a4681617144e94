"""``Jacobian``: what is to be differentiated, analysed and compiled once, evaluated many times."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from taichi_ext import _taichi
from taichi_ext.arguments import KernelCall, Target, flatten, refuse_inactive
from taichi_ext.errors import InvalidArgumentError
from taichi_ext.explain import explain
from taichi_ext.labels import Label
from taichi_ext.memory import FieldTable, available_memory, numpy_dtype
from taichi_ext.options import checked_options
from taichi_ext.registry import registry
from taichi_ext.replay import Replay
from taichi_ext.results import as_torch, by_path, check_out, fill_out, in_place, refuse_shared_out
from taichi_ext.session import Session, warn_at_user
from taichi_ext.state import OverBudgetError, State
from taichi_ext.trace import RETURN, Fused


class Jacobian:
    """The prepared form of ``jacobian``: analysed and compiled once, called many times.

    Args:
        kernel: see ``jacobian``.
        params: see ``jacobian``.
        outputs: see ``jacobian``.
        args: see ``jacobian``; can be given anew at each call.
        max_memory: see ``jacobian``.
        tangents: see ``jacobian``.
        chunk_size: see ``jacobian``.

    Raises:
        InvalidArgumentError: an argument that cannot be used, named.

    Calling it (``plan()``, ``plan(out=J)``, ``plan(args=...)``) runs the kernel once and returns the Jacobian: a fresh
    array, or the one given as ``out=``.

    Example:
        >>> import numpy as np
        >>> import taichi as ti
        >>> from taichi_ext import Jacobian
        >>> ti.init(arch=ti.cpu, log_level=ti.ERROR)
        >>> x, y = ti.field(ti.f32, shape=2), ti.field(ti.f32, shape=2)
        >>> @ti.kernel
        ... def square():
        ...     for i in x:
        ...         y[i] = x[i] ** 2
        >>> plan = Jacobian(square, x, y)
        >>> J = np.empty((2, 2), np.float32)
        >>> for start in (1.0, 2.0):
        ...     x.fill(start)
        ...     print(plan(out=J).diagonal())
        [2. 2.]
        [4. 4.]
    """

    def __init__(
        self,
        kernel: Any,
        params: Any,
        outputs: Any = None,
        *,
        args: tuple[Any, ...] = (),
        max_memory: int | None = None,
        tangents: str = "auto",
        chunk_size: int | None = None,
    ) -> None:
        if _taichi.program() is None:
            raise InvalidArgumentError("Taichi is not initialised; call ti.init(...) first.")
        if _taichi.is_inside_kernel():
            raise InvalidArgumentError("A Jacobian cannot be taken inside a kernel; call it from Python.")
        # a strong reference would keep the program's threads and memory after ti.init
        self._program = weakref.ref(_taichi.program(), _call_if_alive(weakref.WeakMethod(self._end)))
        max_memory, tangents, chunk_size = checked_options(max_memory, tangents, chunk_size)
        self._call = KernelCall(kernel, args)
        leaves, self._rebuild_params = flatten(params, "params")
        self._params = [self._call.resolve("params", path, leaf) for path, leaf in leaves]
        if outputs is None:
            self._outputs = [self._call.return_target()]
            self._rebuild_outputs: Callable[[list[Any]], Any] = _only
        else:
            leaves, self._rebuild_outputs = flatten(outputs, "outputs")
            self._outputs = [self._call.resolve("outputs", path, leaf) for path, leaf in leaves]
        for what, targets in (("params", self._params), ("outputs", self._outputs)):
            if not targets:
                raise InvalidArgumentError(f"{what} is empty; name at least one field, array or argument.")
        _taichi.materialize()
        self._fields = FieldTable(self._call.labels)
        self._fused: dict[Any, Fused] = {}
        self._returned: Any = None
        self._is_checked = False
        self._rules_seen = -1
        self._limit = max_memory
        self._strategy = tangents
        self._blocks = 1
        self._watch: Any = None
        self._replay: Replay | None = None
        if chunk_size is not None:
            self._blocks = max(1, -(-self._new_session(0, None, None)[0].columns // chunk_size))

    def is_current(self) -> bool:
        """Whether the Taichi program that it was prepared in still runs: ``ti.init`` begins another."""
        program = self._program()
        return program is not None and program is _taichi.program()

    def _end(self) -> None:
        """The program is over: let go of its arrays, and of all but what ``source`` and ``explain()`` show.

        Taichi 1.7.4 deletes a ti.ndarray by its address from whichever program then runs; there is none at this moment.
        """
        self.__dict__ = {name: self.__dict__[name] for name in ("_program", "_fields", "_fused")}

    def _refuse_ended(self) -> None:
        if not self.is_current():
            raise InvalidArgumentError(
                "ti.init was called again since this Jacobian was prepared, so its fields no longer exist; prepare it "
                "anew."
            )

    def forget_args(self) -> None:
        """Keep no argument alive; the next call has to give them anew."""
        self._call.args = ()

    def __call__(self, *, args: tuple[Any, ...] | None = None, out: Any = None) -> Any:
        """Run the kernel once; returns the Jacobian, see ``jacobian``."""
        if _taichi.is_inside_kernel():
            raise InvalidArgumentError("A Jacobian cannot be taken inside a kernel; call it from Python.")
        if _taichi.is_followed():
            raise InvalidArgumentError(
                "A Jacobian is computed in a pipeline that is itself being differentiated. Compute the inner one "
                "before, and pass its numbers in a field."
            )
        self._refuse_ended()
        if args is not None and (args or self._call.args):
            self._call = self._call.with_args(args)
        if self._replay is not None:
            repeated = self._replay.run(out)
            if repeated is not None:
                return self._rebuild_outputs([self._rebuild_params([repeated])])
        blocks = self._compute_within_memory(out, State() if self._may_need_state() else None)
        result = self._rebuild_outputs([self._rebuild_params(block) for block in blocks])
        return as_torch(result, self._call, self._outputs) if out is None else fill_out(out, result)

    def evaluate(self, state: State, watch: Any = None) -> list[list[np.ndarray]]:
        """J as ``[output][parameter]``; ``state`` keeps what the run changes, ``watch`` is shown what it computes."""
        fused = self._fused
        self._fused, self._watch = (fused, None) if watch is None else ({}, watch)
        try:
            return self._compute_within_memory(None, state)
        finally:
            self._fused, self._watch = fused, None

    def _compute_within_memory(self, out: Any, state: State | None) -> list[list[np.ndarray]]:
        while True:
            try:
                return self._compute(out, state)
            except OverBudgetError:
                self._blocks *= 2
                if state is None:
                    state = State()
                state.restore()

    def _may_need_state(self) -> bool:
        """Whether what is run may have to be run again: before it is known what a pipeline needs, or in blocks."""
        return self._blocks > 1 or (self._call.kernel is None and not self._is_checked)

    def _compute(self, out: Any, state: State | None) -> list[list[np.ndarray]]:
        """The Jacobian of each output by each parameter, all columns at once or, to save memory, in blocks."""
        places = self._places(out)
        if self._blocks == 1:
            session, columns = self._new_session(0, None, state)
            outputs = [self._open_output(session, t, place) for t, place in zip(self._outputs, places, strict=True)]
            self._check_out(out, session, outputs, columns)
            self._run(session, [key for key, _ in outputs])
            self._replay = self._repeatable(session, outputs, columns)
            full = [(session.tangents(key), shape) for key, shape in outputs]
            for n in range(1, len(full)):  # an output that is named twice gets memory of its own
                if any(np.may_share_memory(full[n][0], values) for values, _ in full[:n]):
                    full[n] = (full[n][0].copy(), full[n][1])
            return [_by_parameter(values, shape, columns) for values, shape in full]
        parts: list[list[np.ndarray]] = []
        first, end = 0, 1
        while first < end:
            if first:
                assert state is not None
                state.restore()
            session, columns = self._new_session(first, self._blocks, state)
            end = sum(math.prod(shape) for _, shape in columns)
            outputs = [self._open_output(session, target, None) for target in self._outputs]
            self._check_out(out, session, outputs, columns)
            self._run(session, [key for key, _ in outputs])
            parts.append([session.tangents(key) for key, _ in outputs])
            first += session.columns
        joined = [np.concatenate(values, axis=1) for values in zip(*parts, strict=True)]
        return [_by_parameter(values, shape, columns) for values, (_, shape) in zip(joined, outputs, strict=True)]

    def _repeatable(self, session: Session, outputs: list[Any], columns: list[Any]) -> Replay | None:
        """The shortest way to do the same again, where there is one."""
        is_simple = self._call.kernel is not None and not self._call.args and len(self._params) == len(outputs) == 1
        if not is_simple or self._watch is not None or self._outputs[0].kind != "field":
            return None
        (key, shape), (_, inner) = outputs[0], columns[0]
        (fused, *others) = self._fused.values()
        if others or key in session.params or not Replay.is_possible(fused, key):
            return None
        return Replay(fused, self._call.full_args, key, (*shape, *inner), session.dtype(key))

    # --- parameters and outputs

    def _new_session(
        self, first: int, blocks: int | None, state: State | None
    ) -> tuple[Session, list[tuple[int, tuple[int, ...]]]]:
        """Give every parameter its columns: the first one and the shape of each.

        With ``blocks``, the session computes the columns from ``first`` on that one of so many balanced blocks has.
        """
        columns: list[tuple[int, tuple[int, ...]]] = []
        seeds: dict[Any, int] = {}
        arguments: dict[str, int] = {}
        names: dict[Any, Label | str] = {}
        session = Session(self._fields, self._fused, self._call.kernel is not None)
        total = 0
        for target in self._params:
            if self._call.is_value(target):
                shape = self._call.value_shape(target)
                if target.argument in arguments:
                    raise InvalidArgumentError(f"{target.name} is given twice among params.")
                arguments[target.argument] = total
            else:
                key, shape = self._container(session, target)
                if key in seeds:
                    raise InvalidArgumentError(f"{target.name} is given twice among params.")
                seeds[key] = total
                names[key] = target.name
            columns.append((total, shape))
            total += math.prod(shape)
        session.first_column = first
        session.columns = total - first if blocks is None else min(-(-total // blocks), total - first)
        session.max_memory = self._max_memory()
        session.state = state
        session.watch = self._watch
        session.strategy = self._strategy
        session.seed(seeds)
        session.params = names
        session.argument_columns = arguments
        session.wants_return = any(target.kind == "return" for target in self._outputs)
        return session, columns

    def _container(self, session: Session, target: Target) -> tuple[Any, tuple[int, ...]]:
        """Key and shape, element shape included, of a field or array."""
        if target.kind == "field":
            info = self._fields.field(target.field)
            assert info is not None
            if self._fields.component(target.field) is not None:
                raise InvalidArgumentError(
                    f"{target.name} is one component of a matrix field that is used as a whole; name the whole field."
                )
            return info.key, (*info.shape, *info.element_shape)
        value = self._call.value(target)
        key = session.register_array(value, self._call.annotation(target), target.name)
        return key, tuple(_taichi.full_shape(value))

    def _open_output(self, session: Session, target: Target, place: Any) -> tuple[Any, tuple[int, ...]]:
        """Key and shape of an output; its shadow is made now, in the array given as ``out`` where that is possible."""
        if target.kind == "return":
            key, shape, dtype = RETURN, self._call.return_shape(), self._call.return_dtype()
        elif self._call.is_value(target):
            raise InvalidArgumentError(f"{target.name} is passed by value and cannot be written by the kernel.")
        else:
            key, shape = self._container(session, target)
            host = None if target.kind == "field" else _taichi.host_values(self._call.value(target))
            if host is not None and not host.flags.writeable:
                raise InvalidArgumentError(f"{target.name} is read-only; give an array that can be written.")
            dtype = session.info(key).dtype
        rows = math.prod(shape)
        is_fit = place is not None and place.size == rows * session.columns and place.dtype == numpy_dtype(dtype)
        session.open_output(key, target.name, rows, dtype, place if is_fit else None)
        return key, shape

    def _max_memory(self) -> float:
        """Bytes that tangents other than J may take."""
        if self._limit is not None:
            return self._limit
        return math.inf if self._is_checked and self._blocks == 1 else available_memory() / 2

    def _run(self, session: Session, outputs: list[Any]) -> None:
        if self._call.kernel is not None:
            if not self._is_checked:
                session.before_launch = lambda fused, outer: self._check_before_launch(session, fused, outer)
            self._returned = session.launch(self._call.kernel, self._call.full_args)
            session.before_launch = None  # which refers to the session: nothing of it waits for the garbage collector
        else:
            session.start(self._call.function, self._call.args)
            with _taichi.follow(session):
                self._returned = self._call.function(*self._call.args)
        session.finish()
        self._check_after_run(session, outputs)

    # --- checks

    def _skeleton(self) -> Any:
        """Something of the structure of the result."""
        return self._rebuild_outputs([self._rebuild_params([0] * len(self._params)) for _ in self._outputs])

    def _places(self, out: Any) -> list[Any]:
        """For each output the memory of ``out`` in which its Jacobian can be computed."""
        if out is None or len(self._params) != 1 or self._call.kernel is None:
            return [None] * len(self._outputs)
        return [in_place(target, list(self._call.args)) for _, target in by_path(out, self._skeleton())]

    def _check_out(self, out: Any, session: Session, outputs: list[Any], columns: list[Any]) -> None:
        if out is not None:
            wanted = [((*shape, *p), session.dtype(key)) for key, shape in outputs for _, p in columns]
            leaves = by_path(out, self._skeleton())
            check_out(leaves, wanted)
            containers = [target.field for target in (*self._params, *self._outputs) if target.field is not None]
            refuse_shared_out(leaves, [*containers, *self._call.args])

    def _check_before_launch(self, session: Session, fused: Fused, outer: dict[Any, Any]) -> None:
        """Every parameter is read by the kernel and every output written."""
        read = session.arrays.shared(outer.get(k, k) for k in fused.facts.read)
        written = session.arrays.shared(outer.get(k, k) for k in fused.facts.written)
        refuse_inactive(*self._keys(session), read, written, f"in {self._call.name}")

    def _keys(self, session: Session) -> tuple[list[tuple[Target, Any]], list[tuple[Target, Any]]]:
        """The parameters and the outputs, each with its key in a session."""
        params, outputs = ([(t, self._key(session, t)) for t in targets] for targets in (self._params, self._outputs))
        return params, outputs

    def _key(self, session: Session, target: Target) -> Any:
        if target.kind == "return":
            return RETURN
        if self._call.is_value(target):
            return ("argument", target.argument)
        return self._container(session, target)[0]

    def _check_after_run(self, session: Session, outputs: list[Any]) -> None:
        if self._rules_seen != registry.version:
            self._rules_seen = registry.version
            for message in registry.unused_marks():
                warn_at_user(message)
        if self._is_checked:
            return
        if self._call.kernel is None:
            if not session.has_launched:
                raise InvalidArgumentError(
                    f"{self._call.name} launched no kernel, so there is nothing to differentiate."
                )
            where = f"by the kernels that {self._call.name} launched"
            refuse_inactive(*self._keys(session), session.read, session.written, where)
        self._is_checked = True
        for target, key in zip(self._outputs, outputs, strict=True):
            if session.is_fresh(key):
                warn_at_user(f"{target.name} does not depend on any of the params: its Jacobian is zero.")
            elif self._blocks == 1 and not session.overwritten and not session.tangents(key).any():
                warn_at_user(f"{target.name} does not depend on the params as they are now: its Jacobian is zero.")

    # --- inspection

    @property
    def source(self) -> str:
        """The rewritten kernels as text, after the first call."""
        return "\n\n".join(dict.fromkeys(f.text for f in self._fused.values()))

    def explain(self) -> str:
        """What was chosen for each kernel, after the first call: where tangents are kept, and how large they are."""
        return "\n\n".join(dict.fromkeys(explain(f, self._fields) for f in self._fused.values()))

    def value(self) -> Any:
        """The outputs as they are now, structured like ``outputs``."""
        self._refuse_ended()
        values = []
        for target in self._outputs:
            if target.kind == "return":
                values.append(self._returned)
            else:
                source = target.field if target.kind == "field" else self._call.value(target)
                values.append(_taichi.copy_of(source))
        return self._rebuild_outputs(values)


def _call_if_alive(reference: weakref.WeakMethod[Callable[[], None]]) -> Callable[[Any], None]:
    """A callback that calls a method of an object which it does not keep alive."""

    def call(_: Any) -> None:
        method = reference()
        if method is not None:
            method()

    return call


def _by_parameter(values: np.ndarray, shape: tuple[int, ...], columns: list[Any]) -> list[np.ndarray]:
    """The Jacobian of one output, cut into its parameters."""
    full = values.reshape((*shape, values.shape[1]))
    return [full[..., first : first + math.prod(s)].reshape((*shape, *s)) for first, s in columns]


def _only(values: list[Any]) -> Any:
    return values[0]
