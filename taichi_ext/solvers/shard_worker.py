"""The work of a process on a shard: it builds its program once, and computes its J or its normal equations."""

# pyright knows no types of Taichi, torch and SciPy, nor of arrays of any shape and type.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import hashlib
import importlib
import os
import pickle
import threading
import traceback
import uuid
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from taichi_ext import backend
from taichi_ext.api.inputs.arguments import flatten
from taichi_ext.api.inputs.options import checked_options
from taichi_ext.api.jacobian import prepared_form
from taichi_ext.backend import ti
from taichi_ext.cached import Bounded
from taichi_ext.errors import InvalidArgumentError, ShardError, UnsupportedError, shown
from taichi_ext.solvers.elimination import SparseJacobian, SparseSystem
from taichi_ext.solvers.problem import Problem, Robust
from taichi_ext.solvers.systems import products_of

_KEPT = 256  # shards whose programs a process keeps, the last ones that were used
PROCESS = uuid.uuid4().hex  # the name of this process among those of all machines


class Task(NamedTuple):
    """A part of the work, as it is sent to a worker."""

    shard: int  # its number
    factory: str  # the import path of the function that makes its program
    arguments: bytes  # those of the factory, pickled
    init: dict[str, object]  # options of ``ti.init``
    places: list[str]  # where the params stand in their structure
    shapes: list[tuple[int, ...]]  # of the params
    format: str | None  # of J
    x: np.ndarray  # the values of the params, as one vector
    # the arguments ``loss``, ``f_scale`` and ``loss_over`` of the normal equations; None where J is wanted, and
    # ``GRADIENT`` where an energy and its gradient are
    loss: tuple[object, object, str] | None
    is_finite: bool  # whether residuals that are not finite are an error
    neighbours: int = 1  # how many workers share the machine
    driver: str = ""  # the ``PROCESS`` that wants the answer, if a worker has to be another one


class Sums(NamedTuple):
    """The terms of one or more shards of the normal equations, or of an energy and its gradient."""

    cost: float  # or the energy
    gradient: Any  # Jtr; None where a residual is not finite
    JtJ: Any = None  # likewise, and for an energy
    residuals: int = 0  # their number
    param_types: tuple[np.dtype, ...] = ()
    noise: float = 0.0

    def plus(self, other: Sums) -> Sums:
        gradient, JtJ = (None if a is None or b is None else a + b for a, b in zip(self[1:3], other[1:3], strict=True))
        residuals, noise = self.residuals + other.residuals, max(self.noise, other.noise)
        return Sums(self.cost + other.cost, gradient, JtJ, residuals, self.param_types, noise)


GRADIENT = (None, None, "gradient")  # in place of a loss: the gradient of an energy is wanted


@dataclass(eq=False)
class _Shard:
    """A shard whose program is kept."""

    problem: Problem  # its program
    residuals: object  # the outputs, as the factory has returned them
    places: list[str]  # where the params stand in their structure
    program: weakref.ref[Any]  # Taichi's
    calls: int  # how often factories had been called in this process when its numbers were last known to be its own
    first: tuple[np.ndarray, np.ndarray] | None = None  # the first point that was computed, with the outputs there

    def is_current(self, calls: int, task: Task) -> bool:
        """Whether no later call of a factory has ended its Taichi program or changed the numbers that it computes with.

        A factory may fill fields that all shards share, so that the program of a shard would use the data of another.
        """
        if self.first is None or self.program() is not backend.program():
            return False
        if self.calls != calls:
            x, before = self.first
            now = self.problem.gradient(x)[0] if task.loss == GRADIENT else self.problem.compute(x)[0]
            scale = self.problem.noise * np.abs(before[np.isfinite(before)]).max(initial=0.0)
            if not np.allclose(now, before, rtol=0.0, atol=scale, equal_nan=True):
                return False
            self.calls = calls
        return True


class Worker:
    """The programs of shards, which are kept, by their factory and its arguments."""

    def __init__(self) -> None:
        self._built = Bounded[bytes, _Shard](_KEPT)
        self._calls = 0  # of factories
        self._last: _Shard | None = None  # whose program has run last

    def answer(self, task: Task) -> object:
        """J or ``Sums``; a ``ShardError`` has the error of a factory in words, since it may be none that can be pickled."""
        try:
            shard = self._shard(task)
            result, outputs = _computed(shard, task)
            shard.first = shard.first or (task.x, outputs)
            return result
        except (InvalidArgumentError, UnsupportedError) as error:
            text = f"{type(error).__name__}: {error}"
        except Exception:
            text = f"its worker raised\n{traceback.format_exc()}"
        raise ShardError(f"shard {task.shard}, from {task.factory!r}: {text}", task.shard)

    def leave(self) -> None:
        """Put back what the last program has written: the next one finds what factories have left."""
        if self._last is not None:
            self._last.problem.close()
            self._last = None

    def _shard(self, task: Task) -> _Shard:
        use = "gradient" if task.loss == GRADIENT else "jacobian"
        key = hashlib.sha256(repr((task.factory, task.format, use)).encode() + task.arguments).digest()
        shard = self._built.pop(key, None)
        if self._last is not shard:
            self.leave()
        if shard is not None and not shard.is_current(self._calls, task):
            shard.problem.close()
            shard = None
        self._last = self._built[key] = shard = shard or self._made(task, use)  # the last one that was used
        if shard.places != task.places:
            raise InvalidArgumentError(
                f"its params have the structure {shard.places}; that of the values: {task.places}."
            )
        if shard.problem.shapes != task.shapes:
            raise InvalidArgumentError(f"its params have the shapes {shard.problem.shapes}; the values: {task.shapes}.")
        return shard

    def _made(self, task: Task, use: str) -> _Shard:
        start_taichi(task.init, task.neighbours)
        self._calls += 1
        made = imported(task.factory)(*pickle.loads(task.arguments))
        if not (isinstance(made, tuple) and len(made) in (3, 4)):
            raise InvalidArgumentError(
                f"the factory returns {shown(made)}; expected (kernel, params, outputs) or these and args."
            )
        kernel, params, outputs, args = (*made, ())[:4]
        options = checked_options(format=task.format)
        plan, call = prepared_form(kernel, params, outputs, args, options, use)
        places = [place for place, _ in flatten(params)[0]]
        return _Shard(Problem(plan, call), outputs, places, weakref.ref(backend.program()), self._calls)


def start_taichi(init: dict[str, Any], neighbours: int = 1) -> None:
    """Start Taichi with the options of a user, where it has not been; on the CPU with a share of the cores."""
    if backend.program() is None:
        threads = max(1, (os.cpu_count() or 1) // neighbours)
        options: dict[str, Any] = {"arch": ti.cpu, "cpu_max_num_threads": threads, "log_level": ti.ERROR}
        ti.init(**{**options, **init})


def _computed(shard: _Shard, task: Task) -> tuple[object, np.ndarray]:
    """The answer to a task, and the outputs."""
    if task.loss is None:
        return shard.problem.jacobian(task.x)
    if task.loss == GRADIENT:
        value, gradient = shard.problem.gradient(task.x)
        return Sums(value, gradient), np.array(value)
    r, J = shard.problem.compute(task.x)
    return _sums(shard, task, r, J), r


def _sums(shard: _Shard, task: Task, r: np.ndarray, J: Any) -> Sums:
    assert task.loss is not None
    problem = shard.problem
    robust = Robust(*task.loss, shard.residuals, [part.shape for part in problem.rows])
    if task.is_finite:
        problem.check_residuals(r)
    rest = len(r), tuple(part.dtype for part in problem.parts), problem.noise
    if not np.isfinite(r).all():
        return Sums(np.inf, None, None, *rest)
    problem.check_rows(J)
    cost, scaled, factors = robust.apply(r)
    if isinstance(J, SparseJacobian):
        system = SparseSystem.of(J, scaled, factors)
        return Sums(cost, system.gradient, system.JtJ, *rest)
    JtJ, gradient = products_of(J, scaled, factors)
    return Sums(cost, gradient, JtJ, *rest)


def imported(path: str) -> Callable[..., object]:
    """The function that an import path ``package.module:function`` names."""
    module, _, name = path.partition(":")
    try:
        result: Any = importlib.import_module(module)
        for part in name.split("."):
            result = getattr(result, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidArgumentError(
            f"factory {path!r} cannot be imported here: {error}. Give a function of a module that workers can import."
        ) from error
    if not callable(result):
        raise InvalidArgumentError(f"factory {path!r} is {shown(result)}; expected a function.")
    return result


_worker = Worker()
_thread = ThreadPoolExecutor(1)  # Taichi lays out fields only in the thread that has started it


def run(task: Task) -> Any:
    """The answer to a task in a worker process; tasks run one after the other."""
    if task.driver == PROCESS:
        raise ShardError(
            f"shard {task.shard}: the executor computes in this process. A Taichi program cannot be shared by threads "
            "that build shards; give an executor of processes.",
            task.shard,
        )
    if threading.current_thread() is threading.main_thread():
        return _worker.answer(task)
    return _thread.submit(_worker.answer, task).result()
