"""Tasks on an executor: their answers in order, and again those whose worker was lost."""

# pyright knows no types of Dask.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import os
import signal
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, wait
from itertools import islice
from typing import Any

from taichi_ext.errors import InvalidArgumentError, ShardError, shown
from taichi_ext.solvers.shard_worker import Failure, Task, Worker, run

_MOST_SECONDS = 5.0  # for workers to end, once nothing is wanted of them
_MOST_LOSSES = 3  # of workers with the same task, after which it is not tried again
_UnderWay = deque[tuple[Task, "Future[Any] | None"]]  # None for a task that is to be computed again


class Workers:
    """An executor for the time of a call; None stands for this process.

    A broken executor that a callable made is replaced; the last one is shut down at the end.
    """

    def __init__(self, executor: Executor | Callable[[], Executor] | None) -> None:
        self._here = Worker()
        self._host = socket.gethostname()
        self._make = None if executor is None or isinstance(executor, Executor) else executor
        if self._make is not None and (not callable(executor) or isinstance(executor, type)):
            raise InvalidArgumentError(
                f"executor is {shown(executor)}; expected a concurrent.futures.Executor, or a function that makes one."
            )
        self._pool = None if executor is None else _checked_pool(executor if self._make is None else self._make())

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Shut an executor down that was made for this call."""
        if self._make is not None and self._pool is not None:
            _end(self._pool)

    def answers(self, tasks: Iterable[Task]) -> Iterator[Any]:
        """The answers in the order of the tasks; raises for the first one that is a failure.

        At most two tasks for each worker are under way, or wait for the one before them.  Those that are computed again
        are so one by one, so that it is known which one loses its worker again.
        """
        if self._pool is None:
            for task in tasks:
                yield _checked(task, self._here.answer(task))
            return
        waiting, under_way = iter(tasks), _UnderWay()
        count, neighbours = _worker_counts(self._pool)
        try:
            while True:
                if all(future is not None for _, future in under_way):
                    for task in islice(waiting, 2 * count - len(under_way)):
                        task = task._replace(neighbours=neighbours, driver=(self._host, os.getpid()))
                        under_way.append((task, self._submit(task)))
                if not under_way:
                    return
                task, future = under_way[0]
                future = future or self._submit(task)
                under_way[0] = task, future
                error = _error_of(future)
                if error is None:
                    under_way.popleft()
                    yield _checked(task, future.result())
                elif _is_loss(error):
                    self._note_loss(under_way, error)
                else:
                    raise ShardError(f"shard {task.shard}: {type(error).__name__}: {error}", task.shard) from error
        finally:
            for _, future in under_way:
                if future is not None:
                    future.cancel()

    def _submit(self, task: Task) -> Future[object]:
        assert self._pool is not None  # None has answered in this process
        try:
            return self._pool.submit(run, task, self._host)
        except BrokenExecutor as error:
            future: Future[Any] = Future()
            future.set_exception(error)
            return future
        except Exception as error:
            raise InvalidArgumentError(f"executor takes no tasks: {error}; give one that runs.") from error

    def _note_loss(self, under_way: _UnderWay, error: BaseException) -> None:
        """Mark the tasks that were lost together with the first one; replace a pool that broke."""
        first, ending = under_way[0][0], _ending(self._pool, error)
        if first.attempt == _MOST_LOSSES:
            raise ShardError(
                f"shard {first.shard} has lost its worker {_MOST_LOSSES + 1} times, the last time alone: {ending}.",
                first.shard,
            ) from error
        is_broken, make = isinstance(error, BrokenExecutor), self._make
        if is_broken and make is None:
            raise ShardError(
                f"shard {first.shard}, or one of the next {len(under_way) - 1}, has lost its worker: {ending}. Its "
                "executor takes no more tasks; give executor= a function that makes one, and it is replaced.",
                first.shard,
            ) from error
        if is_broken and make is not None and self._pool is not None:
            wait([future for _, future in under_way if future is not None], timeout=10)
            self._pool.shutdown(wait=False)
            self._pool = _checked_pool(make())
        for n, (task, future) in enumerate(under_way):
            if future is not None and (not future.done() or _error_of(future) is not None) and (n == 0 or is_broken):
                under_way[n] = task._replace(attempt=task.attempt + 1), None


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


def _checked(task: Task, answer: object) -> Any:
    if isinstance(answer, Failure):
        raise ShardError(f"shard {task.shard}, from {task.recipe.factory!r}: {answer.text}", task.shard)
    return answer


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


def _is_loss(error: BaseException) -> bool:
    return isinstance(error, BrokenExecutor) or type(error).__name__ == "KilledWorker"  # Dask's


def _ending(pool: object, error: BaseException) -> str:
    """How the worker ended, in words."""
    processes = list((getattr(pool, "_processes", None) or {}).values())
    own: list[int] = []
    for _ in range(20):  # the pool's own thread may still be waiting for them
        own = [p.exitcode for p in processes if p.exitcode and p.exitcode != -signal.SIGTERM]  # that ends the others
        if own or not processes:
            break
        time.sleep(0.05)
    if not own:
        return str(error)
    name = signal.Signals(-own[0]).name if own[0] < 0 else ""
    hint = " (as the system does where memory runs out)" if name == "SIGKILL" else ""
    return f"it ended by {name}{hint}" if name else f"it ended with exit code {own[0]}"
