"""Data in shards, each computed by a worker: J of one after the other, and sums over them."""

# pyright knows no types of Taichi, torch and SciPy, nor of arrays of any shape and type.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from itertools import accumulate
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.api.inputs.arguments import flatten
from taichi_ext.api.inputs.options import checked_options
from taichi_ext.api.inputs.progress import check_progress, progress_bar
from taichi_ext.api.inputs.types import Format
from taichi_ext.api.products import real_array
from taichi_ext.errors import InvalidArgumentError, ShardError, shown, with_short_traceback
from taichi_ext.solvers.bounds import Part, check_finite, pieces_of, rounded
from taichi_ext.solvers.charts import Charts
from taichi_ext.solvers.elimination import Layout, SparseSystem
from taichi_ext.solvers.executors import Workers
from taichi_ext.solvers.levenberg import Point, System
from taichi_ext.solvers.shard_worker import Recipe, Sums, Task, imported, start_taichi
from taichi_ext.solvers.systems import NormalSystem

AnyExecutor = Executor | Callable[[], Executor] | None


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
            raise InvalidArgumentError(
                f"shards is {shown(shards)}; expected a list of tuples: the arguments of the factory for each shard."
            )
        if not (init is None or isinstance(init, dict)):
            raise InvalidArgumentError(f"init is {shown(init)}; expected a dict with options of ti.init.")
        if values is None:
            raise InvalidArgumentError(f"{what} is missing: with shards, {what}= gives the values of the params.")
        self.options: dict[str, Any] = init or {}
        self._format = checked_options(None, "auto", None, format)[3]
        leaves, rebuild = flatten(values, what)
        self._places = [place for place, _ in leaves]
        arrays = [real_array(leaf, f"{what}{place}") for place, leaf in leaves]
        self._shapes = [array.shape for array in arrays]
        self.parts = [Part(f"{what}{place}", a.shape, a.dtype) for place, a in zip(self._places, arrays, strict=True)]
        self.x = np.concatenate([array.astype(np.float64).reshape(-1) for array in arrays])
        check_finite(self.x, self.parts, "; give finite numbers.")

        def split(x: np.ndarray) -> object:
            return rebuild(pieces_of(x, self._shapes))

        self.split = split

    def __len__(self) -> int:
        return len(self._shards)

    def tasks(self, x: np.ndarray, loss: Any = None, *, is_finite: bool = False) -> Iterator[Task]:
        """A task for each shard: J, or its normal equations with a loss."""
        for n, shard in enumerate(self._shards):
            arguments = _pickled(shard, f"shards[{n}]", "numbers, arrays and names of files")
            recipe = Recipe(self._factory, arguments, self.options, self._places, self._shapes, self._format)
            yield Task(n, recipe, x, loss, is_finite)

    def sums(
        self, workers: Workers, loss: tuple[object, object, str], x: np.ndarray, *, is_finite: bool
    ) -> Iterator[Sums]:
        """The sums over the first shards, then one more, and so on, added in their order."""
        return accumulate(workers.answers(self.tasks(x, loss, is_finite=is_finite)), Sums.plus)


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
            found = self._sums(shards.x, is_finite=True)
        except BaseException:
            self.close()
            raise
        self.parts = [part._replace(dtype=t) for part, t in zip(shards.parts, found.param_types, strict=True)]
        self.start, self.noise = rounded(shards.x, self.parts), found.noise
        if retract is not None:
            start_taichi(shards.options)  # which moves the points, in this process
        self.charts = Charts(retract, self.parts)
        self._layout = Layout([], [(part, 1) for part in self.charts.parts], eliminated) if eliminated else None
        self._known = [self._point(self.start, found)]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the params."""
        return [part.shape for part in self.parts]

    def point(self, x: np.ndarray) -> Point:
        """See ``minimize``."""
        if self._known and np.array_equal(x, self._known[0].x):
            return self._known.pop()
        return self._point(x, self._sums(x, is_finite=False))

    def _sums(self, x: np.ndarray, *, is_finite: bool) -> Sums:
        try:
            *_, total = self._shards.sums(self._workers, self._loss, x, is_finite=is_finite)
        except ShardError as error:
            error.best = None if self.best is None else self._shards.split(self.best)
            raise
        return total

    def _point(self, x: np.ndarray, found: Sums) -> Point:
        def system() -> System:
            JtJ, Jtr = self.charts.local_products(found.JtJ, found.Jtr, x)
            return NormalSystem(JtJ, Jtr) if self._layout is None else SparseSystem.of_products(JtJ, Jtr, self._layout)

        return Point(x, found.cost, system, (None, None, found.residuals))

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

    Shards lost with a worker are computed again, at most three times, if ``executor`` is a function (or Dask, which
    replaces its workers).

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
        ShardError: a shard could not be computed; the message names it and the error or end of its worker.

    Example:
        >>> from taichi_ext import map_jacobian
        >>> def norms(executor, camera):  # views.py has ``def view(number): ...; return kernel, camera, errors``
        ...     shards = [(0,), (1,), (2,)]
        ...     return [abs(J).max() for J in map_jacobian("views:view", shards, at=camera, executor=executor)]
    """
    check_progress(progress)
    found = Shards(factory, shards, at, "at", init, format)
    workers = Workers(executor)

    def jacobians() -> Iterator[object]:
        with workers, progress_bar(progress, "shards", len(shards)) as advance:
            for J in workers.answers(found.tasks(found.x)):
                advance(1)
                yield J

    return jacobians()


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
    found = imported(path)
    if backend.is_known_in_kernels(found):
        raise InvalidArgumentError(
            f"factory {path!r} is a kernel or ti.func; expected a function of Python that returns (kernel, params, "
            "outputs)."
        )
    if not isinstance(factory, str) and found is not factory:
        raise InvalidArgumentError(f"factory is {shown(factory)}, and {path!r} is another object; {advice}.")
    return path
