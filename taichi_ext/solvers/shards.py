"""Data in shards, each computed by a worker: J of one after the other, and sums over them."""

# pyright knows no types of Taichi, torch and SciPy, nor of arrays of any shape and type.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import os
import pickle
import threading
import time
import traceback
import uuid
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np

from taichi_ext import backend
from taichi_ext.api.inputs.arguments import flatten
from taichi_ext.api.inputs.options import checked_options
from taichi_ext.api.inputs.progress import check_progress, progress_bar
from taichi_ext.api.inputs.types import Format
from taichi_ext.api.jacobian import prepared_form, real_array
from taichi_ext.backend import ti
from taichi_ext.cached import Bounded
from taichi_ext.errors import (
    InvalidArgumentError,
    ShardError,
    UnsupportedError,
    shown,
    unexpected,
    with_short_traceback,
)
from taichi_ext.solvers.elimination import BlockLayout, SparseJacobian, SparseSystem
from taichi_ext.solvers.levenberg import Point, System
from taichi_ext.solvers.parts import Part, check_finite, pieces_of, rounded
from taichi_ext.solvers.problem import Charts, Problem, Robust
from taichi_ext.solvers.systems import NormalSystem, products_of

AnyExecutor = Executor | Callable[[], Executor] | None

# The work of a process on a shard: it builds its program once, and computes its J or its normal equations.

_KEPT = 256  # shards whose programs a process keeps, the last ones that were used
_ORIGIN = uuid.uuid4().hex  # of this process and those that are forked from it, among those of all machines


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
    driver: tuple[str, int] | None = None  # the process that wants the answer, if a worker has to be another one


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
        """J or ``Sums``; a ``ShardError`` tells of any other error in words, since not all of them can be pickled."""
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
    if task.driver == (_ORIGIN, os.getpid()):
        raise ShardError(
            f"shard {task.shard}: the executor computes in this process. A Taichi program cannot be shared by threads "
            "that build shards; give an executor of processes.",
            task.shard,
        )
    if threading.current_thread() is threading.main_thread():
        return _worker.answer(task)
    return _thread.submit(_worker.answer, task).result()


# The process that wants the answers.


class Shards:
    """Shards of data, and the instructions for workers.

    Attributes:
        parts: the params as parts of a vector.
        x: the given values, as one vector.
        split: puts such a vector into the structure of the values.
        options: of ``ti.init``.
    """

    def __init__(self, factory: Any, shards: Any, values: object, what: str, init: object, format: str | None) -> None:
        self._factory, self._shards = _path_of(factory), shards
        if not isinstance(shards, (list, tuple)) or not shards or not all(isinstance(s, tuple) for s in shards):
            raise unexpected("shards", shards, "a list of tuples: the arguments of the factory for each shard")
        if not (init is None or isinstance(init, dict)):
            raise unexpected("init", init, "a dict with options of ti.init")
        if values is None:
            raise InvalidArgumentError(f"{what} is missing: with shards, {what}= gives the values of the params.")
        self.options: dict[str, Any] = init or {}
        self._format = checked_options(format=format)[3]
        leaves, rebuild = flatten(values, what)
        self._places = [place for place, _ in leaves]
        arrays = [real_array(leaf, f"{what}{place}") for place, leaf in leaves]
        self._shapes = [array.shape for array in arrays]
        self.parts = [Part(f"{what}{place}", a.shape, a.dtype) for place, a in zip(self._places, arrays, strict=True)]
        self.x = np.concatenate([array.astype(np.float64).reshape(-1) for array in arrays])
        check_finite(self.x, self.parts, "; give finite numbers.")
        self.split: Callable[[np.ndarray], object] = lambda x: rebuild(pieces_of(x, self._shapes))

    def tasks(self, x: np.ndarray, loss: Any = None, *, is_finite: bool = False) -> Iterator[Task]:
        """A task for each shard: J, or its normal equations with a loss."""
        for n, shard in enumerate(self._shards):
            arguments = _pickled(shard, f"shards[{n}]", "numbers, arrays and names of files")
            program = self._factory, arguments, self.options, self._places, self._shapes, self._format
            yield Task(n, *program, x, loss, is_finite)

    def answers(self, workers: Workers, progress: bool | None, loss: Any = None) -> Iterator[Any]:
        """What workers answer at the given values, in the order of the shards: J, or its normal equations."""
        with contextlib.closing(workers), progress_bar(progress, "shards", len(self._shards)) as advance:
            for answer in workers.answers(self.tasks(self.x, loss, is_finite=loss is not None)):
                advance(1)
                yield answer

    def total(self, executor: AnyExecutor, loss: Any, progress: bool | None) -> Sums:
        """The sum over all shards at the given values, added in their order."""
        return functools.reduce(Sums.plus, self.answers(Workers(executor), progress, loss))


class ShardedProblem:
    """The cost of all shards as a function of one vector, for the iteration; see ``Problem`` and ``Weighted``.

    Attributes:
        parts: the params as parts of a vector.
        start: their values, as one vector.
        noise: the relative rounding error of the cost.
        best: the best point so far; None before the first one.
        split: puts a vector into the structure of the params.
        charts: see ``Problem``.
    """

    def __init__(
        self,
        shards: Shards,
        executor: AnyExecutor,
        loss: tuple[Any, Any, str],
        eliminated: list[int] | None = None,
        retract: object = None,
    ) -> None:
        if executor is not None:
            _pickled(loss, "loss", "a name, or a function of a module that workers can import")
        self._shards, self._loss, self._workers = shards, loss, Workers(executor)
        self.split = shards.split
        self.best: np.ndarray | None = None
        try:
            first = self._sums(shards.x, is_finite=True)
        except BaseException:
            self.close()
            raise
        self.parts = [part._replace(dtype=t) for part, t in zip(shards.parts, first.param_types, strict=True)]
        self.start, self.noise = rounded(shards.x, self.parts), first.noise
        if retract is not None:
            start_taichi(shards.options)  # which moves the points, in this process
        self.charts = Charts(retract, self.parts)
        self._layout = BlockLayout([], [(part, 1) for part in self.charts.parts], eliminated) if eliminated else None
        self._known = [self._point(self.start, first)]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [part.shape for part in self.parts]

    def point(self, x: np.ndarray) -> Point:
        """See ``minimize``."""
        if self._known and np.array_equal(x, self._known[0].x):
            return self._known.pop()
        return self._point(x, self._sums(x, is_finite=False))

    def _sums(self, x: np.ndarray, *, is_finite: bool) -> Sums:
        try:
            tasks = self._shards.tasks(x, self._loss, is_finite=is_finite)
            return functools.reduce(Sums.plus, self._workers.answers(tasks))
        except ShardError as error:
            error.best = None if self.best is None else self._shards.split(self.best)
            raise

    def _point(self, x: np.ndarray, sums: Sums) -> Point:
        def system() -> System:
            JtJ, Jtr = self.charts.local_products(sums.JtJ, sums.gradient, x)
            return NormalSystem(JtJ, Jtr) if self._layout is None else SparseSystem.of_products(JtJ, Jtr, self._layout)

        return Point(x, sums.cost, system, (None, None, sums.residuals))

    def close(self) -> None:
        """End the workers that were started for this problem."""
        self._workers.close()


@with_short_traceback
def map_jacobian(
    factory: Callable[..., object] | str,
    shards: Sequence[tuple[object, ...]],
    *,
    at: object,
    executor: AnyExecutor = None,
    format: Format | None = None,
    init: Mapping[str, object] | None = None,
    progress: bool | None = False,
) -> Iterator[Any]:
    """The Jacobians of many shards of data, computed by worker processes, one after the other in their order.

    A worker starts Taichi, and calls ``factory(*shard)`` for each shard that it gets: it returns ``(kernel, params,
    outputs)`` or ``(kernel, params, outputs, args)``, see ``jacobian``.  The worker keeps them (the last 256), so that
    other values of the params cost a launch.  A factory that calls ``ti.init`` ends the other programs of its worker,
    which are built again for each point: give ``init=`` instead.  At most two shards for each worker are under way, so
    the memory of this process does not grow with their number.

    Shards lost with a worker are computed again, at most three times, if ``executor`` is a function; by Dask, too.

    Args:
        factory: a function of a module that workers can import, or its import path ``"package.module:function"``.
        shards: the arguments of the factory, a tuple for each shard; they are pickled.
        at: the values of the params, structured like them; all shards have the same params.
        executor: a ``concurrent.futures.Executor`` of processes that are spawned, not forked, such as
            ``ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn"))`` or Dask's
            ``client.get_executor()``; or a function that makes one, which is shut down at the end; None computes in
            this process.
        format: see ``jacobian``.
        init: options of ``ti.init`` in the workers, where ``arch=ti.cpu`` with a share of the cores is the default.  A
            worker in which Taichi has been started, and this process, keep that.
        progress: True draws a progress bar of the shards.

    Returns:
        An iterator over the Jacobians, each as of ``jacobian``.

    Raises:
        InvalidArgumentError: an argument is invalid.
        ShardError: a shard could not be computed; the message names it and the error of its worker.

    Example:
        >>> from taichi_ext import map_jacobian
        >>> def norms(executor, camera):  # views.py has ``def view(number): ...; return kernel, camera, errors``
        ...     shards = [(0,), (1,), (2,)]
        ...     return [abs(J).max() for J in map_jacobian("views:view", shards, at=camera, executor=executor)]
    """
    check_progress(progress)
    return Shards(factory, shards, at, "at", init, format).answers(Workers(executor), progress)


def check_shard_options(shards: object, of_kernels: dict[str, object], of_shards: dict[str, object]) -> None:
    """Raise for options of a kernel where shards are given, and for those of shards where none are."""
    name = next((n for n, value in (of_shards if shards is None else of_kernels).items() if value is not None), None)
    if name is not None and shards is None:
        raise InvalidArgumentError(f"{name} needs shards=, and a factory in the place of the kernel.")
    if name is not None:
        raise InvalidArgumentError(
            f"{name} cannot be given with shards=: the factory returns (kernel, params, outputs), or these and args; "
            "weights are factors in its kernel."
        )


def _pickled(value: object, what: str, wanted: str) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise InvalidArgumentError(f"{what} cannot be pickled: {error}; give {wanted}.") from error


def _path_of(factory: object) -> str:
    """The import path of a factory, imported here once: an import that fails here would fail in each worker."""
    if isinstance(factory, str):
        path = factory
    else:
        path = f"{getattr(factory, '__module__', '')}:{getattr(factory, '__qualname__', '')}"
    advice = 'expected a function of a module, or its import path "package.module:function"'
    if path.startswith(":") or path.endswith(":") or ":" not in path or "<" in path:
        raise InvalidArgumentError(
            f"factory is {shown(factory)}; {advice}. Workers call it, so they have to import it."
        )
    module = imported(path)
    if backend.is_known_in_kernels(module):
        raise InvalidArgumentError(
            f"factory {path!r} is a kernel or ti.func; expected a function of Python that returns (kernel, params, "
            "outputs)."
        )
    if not isinstance(factory, str) and module is not factory:
        raise InvalidArgumentError(f"factory is {shown(factory)}, and {path!r} is another object; {advice}.")
    return path


# Tasks on an executor: their answers in order, and again those whose worker was lost.

_MOST_SECONDS = 5.0  # for workers to end, once nothing is wanted of them
_MOST_LOSSES = 3  # of workers in a row, after which the first task is not tried again


class Workers:
    """An executor for the time of a call; None stands for this process.

    A broken executor that a callable made is replaced; the last one is shut down at the end.
    """

    def __init__(self, executor: Executor | Callable[[], Executor] | None) -> None:
        self._here = Worker()
        self._make = None if executor is None or isinstance(executor, Executor) else executor
        if self._make is not None and (not callable(executor) or isinstance(executor, type)):
            raise unexpected("executor", executor, "a concurrent.futures.Executor, or a function that makes one")
        self._pool = None if executor is None else _checked_pool(executor if self._make is None else self._make())

    def close(self) -> None:
        """Leave this process as factories have, and shut an executor down that was made for this call."""
        self._here.leave()
        if self._make is not None and self._pool is not None:
            _end(self._pool)

    def answers(self, tasks: Iterable[Task]) -> Iterator[Any]:
        """The answers in the order of the tasks; raises for the first one that is a failure.

        At most two tasks for each worker are under way.  Where a worker is lost, those under way are computed again
        one by one, so that it is known which one loses its worker again.
        """
        if self._pool is None:
            for task in tasks:
                yield self._here.answer(task)
            return
        waiting, under_way = iter(tasks), deque[tuple[Task, Future[Any]]]()
        losses = alone = 0  # workers lost in a row with the first task; tasks that are computed one by one
        count, neighbours = _worker_counts(self._pool)
        try:
            while True:
                for task in islice(waiting, max(0, (1 if alone else 2 * count) - len(under_way))):
                    task = task._replace(neighbours=neighbours, driver=(_ORIGIN, os.getpid()))
                    under_way.append((task, self._submit(task)))
                if not under_way:
                    return
                task, future = under_way[0]
                error = _error_of(future)
                if isinstance(error, BrokenExecutor):
                    losses, alone = losses + 1, max(alone, len(under_way))
                    self._replace_pool(task.shard, losses, len(under_way), error)
                    waiting = chain([lost for lost, _ in under_way], waiting)
                    under_way.clear()
                elif isinstance(error, ShardError):
                    raise error
                elif error is not None:
                    raise ShardError(f"shard {task.shard}: {type(error).__name__}: {error}", task.shard) from error
                else:
                    losses, alone = 0, max(0, alone - 1)
                    under_way.popleft()
                    yield future.result()
        finally:
            for _, future in under_way:
                future.cancel()

    def _submit(self, task: Task) -> Future[Any]:
        assert self._pool is not None  # None has answered in this process
        try:
            return self._pool.submit(run, task)
        except BrokenExecutor as error:
            future: Future[Any] = Future()
            future.set_exception(error)
            return future
        except Exception as error:
            raise InvalidArgumentError(f"executor takes no tasks: {error}; give one that runs.") from error

    def _replace_pool(self, shard: int, losses: int, count: int, error: BrokenExecutor) -> None:
        """Make another executor in the place of a broken one; ``count`` tasks are under way, ``shard`` the first."""
        ending = f"{str(error).rstrip('.')} (the system ends processes where memory runs out)"
        if losses > _MOST_LOSSES:
            raise ShardError(
                f"shard {shard} has lost its worker {losses} times, the last time alone: {ending}.", shard
            ) from error
        if self._make is None or self._pool is None:
            raise ShardError(
                f"shard {shard}, or one of the next {count - 1}, has lost its worker: {ending}. Its executor takes no "
                "more tasks; give executor= a function that makes one, and it is replaced.",
                shard,
            ) from error
        self._pool.shutdown(wait=False)
        self._pool = _checked_pool(self._make())


def _end(pool: Executor) -> None:
    """Shut an executor down; workers that do not end are terminated.

    A worker that is lost while it waits for a task can hold the lock of the queue.  If the executor is shut down before
    it notices, the others wait for that lock, and the executor for them, without end.
    """
    processes = list((getattr(pool, "_processes", None) or {}).values())
    pool.shutdown(wait=not processes)
    end = time.monotonic() + _MOST_SECONDS
    for process in processes:
        process.join(max(0.1, end - time.monotonic()))
        if process.is_alive():
            process.terminate()


def _checked_pool(pool: object) -> Executor:
    """An executor; raises where it cannot be one of processes that Taichi runs in."""
    if not isinstance(pool, Executor):
        raise InvalidArgumentError(f"executor() returns {shown(pool)}; expected a concurrent.futures.Executor.")
    context = getattr(pool, "_mp_context", None)
    if context is not None and context.get_start_method() == "fork":
        raise InvalidArgumentError(
            "executor forks its workers, and Taichi hangs in a process that was forked after it was started. Give "
            'ProcessPoolExecutor(..., mp_context=multiprocessing.get_context("spawn")).'
        )
    return pool


def _worker_counts(pool: object) -> tuple[int, int]:
    """How many workers there are, and how many on one machine."""
    client = getattr(pool, "_client", None)
    if client is not None:  # Dask's
        hosts = Counter(address.rpartition(":")[0] for address in client.ncores())
        return max(1, sum(hosts.values())), max(hosts.values(), default=1)
    count = getattr(pool, "_max_workers", None) or getattr(pool, "num_workers", None) or os.cpu_count() or 1
    return int(count), int(count)


def _error_of(future: Future[object]) -> BaseException | None:
    try:
        return future.exception()
    except CancelledError as error:
        return error
