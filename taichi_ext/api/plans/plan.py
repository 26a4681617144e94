"""``Jacobian``: a kernel analysed and compiled once and evaluated many times; and its plan."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from taichi_ext import backend
from taichi_ext.api.inputs.arguments import KernelCall, check_initialised, flatten
from taichi_ext.api.inputs.options import Options, checked_options
from taichi_ext.api.inputs.progress import Progress, check_progress
from taichi_ext.api.inputs.types import Format, Mode
from taichi_ext.api.plans.exported import module_text
from taichi_ext.api.runs.by_adjoint import HessianForm, RowsOrColumns
from taichi_ext.api.runs.evaluation import DenseForm, Evaluation
from taichi_ext.api.runs.replay import JacobianProblem, Prepared, SparseChoices, values_of
from taichi_ext.api.runs.second_order import USES, check_energy
from taichi_ext.api.runs.sparse_form import SparseForm
from taichi_ext.api.runs.subject import EnergyGradient, RowSpace
from taichi_ext.boundary.registry import registry
from taichi_ext.differentiate.forms.entry_sites import LAST
from taichi_ext.differentiate.plan.storage_facts import Strategy
from taichi_ext.errors import InvalidArgumentError, UnsupportedError, raise_problem, unexpected, with_short_traceback
from taichi_ext.launches import ArrayArgument, JacobianKernel, NumberArgument
from taichi_ext.program.keys import RETURN, VALUES, Key, Scratch, SumKey, Version
from taichi_ext.runtime.launching.session import KernelTable
from taichi_ext.runtime.memory.shadows import FieldTable, numpy_dtype
from taichi_ext.runtime.memory.state import State

_Kind = tuple[Callable[[], RowSpace], type[DenseForm]]
_OF_HESSIANS: dict[str, _Kind] = dict.fromkeys(("hessian", "hvp", "projected"), (EnergyGradient, HessianForm))


class Plan:
    """The part shared by all calls of one kernel with the same params and outputs; keeps no argument or owner alive.

    ``use`` is one of ``USES`` if ``outputs`` is an energy.
    """

    def __init__(
        self, call: KernelCall, params: object, outputs: object, options: Options, use: str = "jacobian"
    ) -> None:
        self._pattern = call.pattern()
        leaves, rebuild_params = flatten(params, "params")
        param_targets = [call.resolve("params", path, leaf) for path, leaf in leaves]
        word = "energy" if use in USES else "outputs"
        if outputs is None:
            output_targets = [call.return_target()]
            rebuild_outputs: Callable[[list[Any]], Any] = _only
        else:
            leaves, rebuild_outputs = flatten(outputs, word)
            output_targets = [call.resolve(word, path, leaf) for path, leaf in leaves]
        for what, targets in (("params", param_targets), (word, output_targets)):
            if not targets:
                raise InvalidArgumentError(f"{what} is empty; name at least one field, array or argument.")
        if use in USES:
            check_energy(call, output_targets, param_targets, use)
            rebuild_outputs = _only
        backend.materialize()
        question = JacobianProblem(param_targets, output_targets, rebuild_params, rebuild_outputs, options, use)
        self.prepared = Prepared(question=question, fields=FieldTable(call.labels))
        # a strong reference would keep the program's threads and memory after ti.init
        self._program = _program_until(self._end)
        if options.chunk_size is not None:
            self.evaluation(self.prepared, call).column_count()  # raises if columns cannot be assigned

    def _end(self) -> None:
        """The program has ended: drop its arrays, and everything that ``source`` and ``explain()`` do not need.

        Taichi 1.7.4 deletes a ti.ndarray by its address from the program that runs then; at this moment none runs.
        """
        prepared = self.prepared
        for name, fused in prepared.fused.items():
            fused.memory.scratch.clear()
            prepared.fused[name] = replace(fused, program=None)
        question = replace(prepared.question, params=[], outputs=[], rebuild_params=_only, rebuild_outputs=_only)
        self.prepared = Prepared(question=question, fields=prepared.fields, fused=prepared.fused)

    def check_not_ended(self) -> None:
        """Raise where the Taichi program that it was prepared in has ended: ``ti.init`` begins another."""
        program = self._program()
        if program is None or program is not backend.program():
            raise InvalidArgumentError(
                "ti.init was called again since this Jacobian was prepared, so its fields no longer exist; prepare it "
                "again."
            )

    def call(self, kernel: object, args: tuple[object, ...]) -> KernelCall:
        """A call of the kernel or pipeline, which is passed because the plan does not keep it alive."""
        return self._pattern.of(kernel, args)

    def start(
        self,
        call: KernelCall,
        out: object = None,
        state: State | None = None,
        watch: object = None,
        progress: Progress = "stages",
        *,
        as_matrix: bool = False,
    ) -> Evaluation:
        """One call, checked and ready to run; ``state`` saves changed containers, ``watch`` sees computed values.

        ``progress="stages"`` draws no bar, and says what a long first call does, as None and True do.
        """
        _check_place()
        with backend.ending:
            if backend.is_followed():
                raise InvalidArgumentError(
                    "A Jacobian is computed in a pipeline that is itself being differentiated. Compute the inner one "
                    "before, and pass its numbers in a field."
                )
        self.check_not_ended()
        with backend.exclusive:
            self.follow_layout(call)
            self._follow_constants(call)
            if self.prepared.rules_seen != registry.version:
                self.prepared.has_no_adjoint = ""
        prepared = self.prepared if watch is None else replace(self.prepared, fused=KernelTable())
        return self.evaluation(
            prepared, call, as_matrix=as_matrix, out=out, state=state, watch=watch, progress=progress
        )

    @staticmethod
    def evaluation(prepared: Prepared, call: KernelCall, *, as_matrix: bool = False, **options: Any) -> Evaluation:
        """One call, with the subject and the form that its use needs."""
        use, mode = prepared.question.use, prepared.question.options.mode
        plain = partial(RowSpace, warns_of_zeros=use not in USES), DenseForm if mode == "forward" else RowsOrColumns
        subject, dense = _OF_HESSIANS.get(use, plain)
        form = dense if prepared.format is None else SparseForm
        return Evaluation(prepared, call, subject(), form(as_matrix=as_matrix), **options)

    def follow_layout(self, call: KernelCall) -> None:
        """Build kernels again after a field tree was destroyed; raise if the tree held a field of this call."""
        prepared = self.prepared
        if prepared.fields.layout == backend.layout_version():
            return
        for target in map(call.current, (*prepared.params, *prepared.outputs)):
            raise_problem(str(target.name), backend.ended_problem(target.field))
        new = {"fields": FieldTable(call.labels), "fused": KernelTable(), "replay": None, "sparse": SparseChoices()}
        self.prepared = replace(prepared, **new)

    def _follow_constants(self, call: KernelCall) -> None:
        """Build kernels again after a Python number that is a parameter, or its owner, was replaced."""
        prepared = self.prepared
        now = [call.current(target) if target.variable is not None else target for target in prepared.params]
        if any(target.held != before.held for target, before in zip(now, prepared.params, strict=True)):
            question = replace(prepared.question, params=now)
            self.prepared = replace(prepared, question=question, fused=KernelTable(), replay=None, is_checked=False)


def prepare(
    kernel: object, params: object, outputs: object, args: tuple[object, ...], options: Options, use: str = "jacobian"
) -> tuple[Plan, KernelCall]:
    """A new plan, and the call with these arguments."""
    check_initialised()
    _check_place()
    call = KernelCall(kernel, args)
    return Plan(call, params, outputs, options, use), call


class Jacobian:
    """The prepared form of ``jacobian``: analysed and compiled once, called many times.

    Args are those of ``jacobian``.  A call can pass other args; without args it uses those of its thread's last call.

    Raises:
        InvalidArgumentError: an argument is invalid; the message names it and the fix.

    Calling it (``plan()``, ``plan(out=J)``, ``plan(args=...)``) runs the kernel once and returns the Jacobian: a new
    array, or the one given as ``out=``.  Threads can share it: each call has its own arguments and its own result.

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

    _as_matrix = False

    @with_short_traceback
    def __init__(
        self,
        kernel: Callable[..., object],
        params: object,
        outputs: object = None,
        *,
        args: tuple[object, ...] = (),
        max_memory: int | None = None,
        tangents: Strategy = "auto",
        chunk_size: int | None = None,
        format: Format | None = None,
        as_matrix: bool = False,
        progress: bool | None = None,
        mode: Mode | None = None,
    ) -> None:
        self._as_matrix = as_matrix
        options = checked_options(max_memory, tangents, chunk_size, format, mode, as_matrix=as_matrix)
        self._begin(*prepare(kernel, params, outputs, args, options), progress)

    def _begin(self, plan: Plan, call: KernelCall, progress: bool | None) -> None:
        check_progress(progress)
        self._plan, self._call, self._progress = plan, call, progress
        self._program = _program_until(self._end)
        self._last = threading.local()  # values that value() needs, of this thread's last call

    def __repr__(self) -> str:
        prepared = self._prepared
        if not prepared.params:
            return f"<{type(self).__name__}: ti.init was called again since it was prepared>"
        outputs, params = (", ".join(str(t.name) for t in targets) for targets in (prepared.outputs, prepared.params))
        state = "compiled" if prepared.fused else "not called yet"
        name = self._call.name
        return f"<{type(self).__name__} of {name}, {state}: {outputs} with respect to {params}>"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "A Jacobian cannot be pickled or copied: it is compiled for the Taichi program of this process. Threads "
            "can share it; in another process, prepare it there with Jacobian(kernel, params, outputs)."
        )

    def _end(self) -> None:
        """The program has ended: keep no argument alive."""
        self._call, self._last = self._call.pattern(), threading.local()

    @property
    def _prepared(self) -> Prepared:
        return self._plan.prepared

    @with_short_traceback
    def __call__(self, *, args: tuple[object, ...] | None = None, out: object = None) -> Any:
        """Run the kernel once; returns the Jacobian, see ``jacobian``."""
        evaluation = self._started(args, out)
        result = evaluation.jacobian()
        self._last.returned = evaluation.returned
        return result

    def _started(self, args: tuple[object, ...] | None, out: object) -> Any:
        """The evaluation of a call."""
        self._plan.check_not_ended()
        call = self._last_call() if args is None else self._call.with_args(args)
        evaluation = self._plan.start(call, out, progress=self._progress, as_matrix=self._as_matrix)
        self._last.call, self._last.returned = call, None
        return evaluation

    def _last_call(self) -> KernelCall:
        """This thread's last call, or that of the preparation before the first one."""
        return getattr(self._last, "call", self._call)

    # --- inspection

    @property
    def source(self) -> str:
        """The text of the kernels with tangents, after the first call; comments name the lines of your source.

        If rows of J are computed in reverse mode, it is that of the kernels as stages, and of their adjoints.
        """
        prepared = self._prepared
        text = "\n\n".join(dict.fromkeys(f.kernel.text for f in list(prepared.fused.values())))
        return Text(text if text or prepared.reverse is None else prepared.reverse.source)

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write the kernel with tangents as a Python module that needs Taichi alone, after the first call.

        Args:
            path: of the file. The module defines ``bind(**given)``, which takes by name the fields, arrays and
                numbers that the kernel uses and gives a function. That takes the arrays of J, one for each pair
                of output and parameter, output by output, in C order and of J's shape and the output's type, fills
                them, and returns the kernel's result; it also takes numbers of one call, by name. The shapes are
                those of the last call. Both raise ``ValueError`` for fields and arrays of another kind, type or shape
                than those of the plan, and for arrays that share memory.

        Raises:
            InvalidArgumentError: there has been no call yet, or there is more than one kernel.
            UnsupportedError: a pipeline, a sparse Jacobian, or a kernel that uses an object that has no text.

        Example:
            >>> import runpy
            >>> import tempfile
            >>> import numpy as np
            >>> import taichi as ti
            >>> from taichi_ext import Jacobian
            >>> ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
            >>> x, y = ti.field(ti.f64, shape=2), ti.field(ti.f64, shape=3)
            >>> x[0], x[1] = 1.0, 2.0
            >>> @ti.kernel
            ... def k():
            ...     for i in y:
            ...         y[i] = i * x[0] * x[1]
            >>> plan, folder = Jacobian(k, x, y), tempfile.mkdtemp()
            >>> J = plan()
            >>> plan.export(f"{folder}/k_jacobian.py")
            >>> module, again = runpy.run_path(f"{folder}/k_jacobian.py"), np.zeros((3, 2))
            >>> module["bind"](x=x, y=y)(again)
            >>> np.array_equal(again, J)
            True
        """
        try:
            file = Path(path)
        except TypeError:
            raise unexpected("path", path, "the path of a file, a str or Path") from None
        self._plan.check_not_ended()
        with backend.exclusive:
            self._plan.follow_layout(self._last_call())
        file.write_text(module_text(self._prepared, self._last_call()), encoding="utf-8")

    def explain(self) -> str:
        """The decisions for each kernel as text, after the first call: storage and size of tangents, cost by line."""
        prepared, sparse = self._prepared, self._prepared.sparse
        reason = sparse.dense_reason
        first = [f"J is computed dense, and its zeros are left out, because of this:\n{reason}"] if reason else []
        if sparse.of_energy and not reason:
            names = ", ".join(str(prepared.fields.infos[key].name) for key in sparse.of_energy)
            first = [f"two runs, since the energy is computed from {names}"]
        first += [prepared.mode] if prepared.mode else []
        first += [f"reverse mode: {prepared.reverse.report}"] if prepared.reverse and prepared.reverse.report else []
        kernels = (explain(f, prepared.fields) for f in list(prepared.fused.values()))
        return Text("\n\n".join(dict.fromkeys((*first, *kernels))))

    def value(self) -> Any:
        """The outputs or the energy as they are now, in their structure; a return value is this thread's last one."""
        self._plan.check_not_ended()
        returned = getattr(self._last, "returned", None)
        return self._prepared.question.rebuild_outputs(values_of(self._prepared, self._last_call(), returned))


def _check_place() -> None:
    if backend.is_inside_kernel():
        raise InvalidArgumentError("A Jacobian cannot be taken inside a kernel; call it from Python.")
    if backend.is_recorded():
        raise UnsupportedError(
            "A Jacobian is computed within ti.ad.Tape or ti.ad.FwdMode, whose gradient would miss its launch. Compute "
            "it before or after the with block, and launch the kernel itself in it."
        )


def _program_until(end: Callable[[], None]) -> Callable[[], object]:
    """A weak reference to the program, whose end calls a method if its object is alive."""
    method = weakref.WeakMethod(end)

    def ended(_: object) -> None:
        if (call := method()) is not None:
            call()

    return weakref.ref(backend.program(), ended)


def _only(values: Sequence[object]) -> object:
    return values[0]


# The engine's choices for a kernel, as text.


class Text(str):
    """A text that notebooks and the prompt show line by line."""

    __slots__ = ()
    __repr__ = str.__str__


def explain(fused: JacobianKernel, fields: FieldTable) -> str:
    """The choices made for one fused kernel: storage of locals, shadows of fields, loops made serial.

    Also, for each source line, the number of operations on tangents each time it runs.
    """
    function: Any = fused.primal.func
    lines = [f"{function.__qualname__} ({function.__code__.co_filename}:{function.__code__.co_firstlineno})"]
    lines.append(f"  columns: {fused.columns.count}{_blocks(fused.columns.firsts)}")
    lines += [f"  tangents of {line}" for line in _shadows(fused, fields)]
    lines += [f"  entries of {line}" for line in _entries(fused, fields)]
    lines += [f"  {line}" for line in fused.facts.report.lines(fused.columns.count, lambda key: _name(key, fields))]
    return "\n".join(lines)


def _blocks(first_columns: range | None) -> str:
    """The blocks of columns that a kernel computes; empty if it computes all columns at once."""
    if first_columns is None:
        return ""
    first, last = first_columns[0], first_columns[-1]
    which = f"any of the columns {first} to {last}"
    if last == LAST:
        which = f"column {first} or any later one" if first else "any column"
    return f", the first of them {f'column {first}' if first == last else which}"


def _shadows(fused: JacobianKernel, fields: FieldTable) -> Iterator[str]:
    for key in fused.shadows:
        if key == RETURN:
            yield "the return value"
        elif key == VALUES:
            yield "arguments and Python numbers, which are given"
        elif isinstance(key, Scratch):
            size = fused.scratch_sizes[key] * numpy_dtype(backend.named_type(key.dtype)).itemsize
            yield f"locals with all columns: {size} bytes of scratch memory"
        elif isinstance(key, ArrayArgument):
            yield f"array argument {key.position}"
        elif key in fields.infos:
            info = fields.infos[key]
            size = info.size * fused.columns.count * numpy_dtype(info.dtype).itemsize
            written = ", every entry written" if key in fused.facts.covered else ""
            yield f"{info.name}: {info.size} x {fused.columns.count}, {size} bytes{written}"


def _entries(fused: JacobianKernel, fields: FieldTable) -> Iterator[str]:
    """The number of entries of a sparse Jacobian that each statement writes, by their columns."""
    for site in fused.sites:
        verb = "added" if site.is_sum else "stored"
        counts = [f"{len(group.entries)} with respect to {_owner(group.owner, fields)}" for group in site.groups]
        rows = ", from dense tangents: those that are zero are left out" if site.has_rows else ""
        parts = f"{len(site.rows)} rows" if len(site.rows) > 1 else "one row"
        yield f"{_name(site.key, fields)}, {parts} {verb} at a time: {' and '.join(counts) or 'none'}{rows}"


def _owner(owner: object, fields: FieldTable) -> str:
    if owner is None:
        return "columns that are known at run time"
    return f"{_name(owner.of, fields)} as it is then" if isinstance(owner, Version) else _name(owner, fields)


def _name(key: Key, fields: FieldTable) -> str:
    if key == RETURN:
        return "the return value"
    if isinstance(key, SumKey):
        return f"the local {key.name}"
    if isinstance(key, (ArrayArgument, NumberArgument)):
        return f"argument {key.position if isinstance(key, ArrayArgument) else key.name}"
    return str(fields.infos[key].name) if key in fields.infos else "a Python number"
