"""Shards in worker processes: the sums of the serial run to the last bit, lost workers, and errors that name the shard."""

import io
import multiprocessing
import os
import signal
import sys
import time
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import shard_factories
from numpy.testing import assert_allclose, assert_array_equal

from taichi_ext import (
    InvalidArgumentError,
    Jacobian,
    ShardError,
    least_squares,
    manifolds,
    map_jacobian,
    normal_equations,
    value_and_gradient,
)  # fmt: skip
from taichi_ext.solvers import shards as sharded

pytestmark = [pytest.mark.usefixtures("ti64"), pytest.mark.cpu_only("processes that start Taichi on the CPU")]

START = {"p": np.array([1.0, 0.5]), "q": np.array(0.1)}
COUNTS = [40, 1, 7, 1500]
SHARDS = list(enumerate(COUNTS))
decay = shard_factories.decay


def spawned(workers=2):
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))


@pytest.fixture(scope="module")
def pool():
    with spawned() as made:
        yield made


def expected():
    """Residuals and J of all shards, by hand."""
    a, b, c = *START["p"], float(START["q"])
    t, y = (np.concatenate(v) for v in zip(*(shard_factories.data(*s) for s in SHARDS)))
    e = np.exp(-b * t)
    return a * e + c - y, np.stack([e, -a * t * e, np.ones_like(t)], axis=1)


@pytest.mark.sweep
def test_jacobians_come_in_order(pool):
    _, J = expected()
    found = list(map_jacobian(decay, SHARDS, at=START, executor=pool))
    assert [part["p"].shape for part in found] == [(n, 2) for n in COUNTS]
    assert_allclose(np.concatenate([part["p"] for part in found]), J[:, :2], rtol=1e-13)
    assert_array_equal(np.concatenate([part["q"] for part in found]), J[:, 2])


@pytest.mark.sweep
def test_factories_that_start_taichi(pool):
    """Each ends the programs of the others, which are built again."""
    shards = [(n, 50) for n in range(3)]
    fit = least_squares(shard_factories.started, shards=shards, executor=pool, start=np.array([1.5, 0.5]))
    assert fit.success
    assert_allclose(fit.x, [2.0, 0.7], rtol=1e-6)


class TestFactoriesThatShareFields:
    """Each call of the factory stores the data of its shard in the same fields, and kernels add to what is there."""

    HERE = {"a": np.array(1.5), "b": np.array(0.5)}

    @staticmethod
    def expected(at):
        t = 0.1 * np.arange(30)
        e, seen = np.exp(-at["b"] * t), np.exp(-0.7 * t)
        r = np.concatenate([at["a"] * e - (n + 1) * seen for n in range(3)])
        return r, np.tile(np.stack([e, -at["a"] * t * e], axis=1), (3, 1))

    @pytest.mark.mostly_sweep(every=3)
    @pytest.mark.parametrize("where", ["here", "pool"])
    @pytest.mark.parametrize("what", ["kernel", "list", "energy"])
    def test_repeated(self, request, what, where):
        executor = request.getfixturevalue("pool") if where == "pool" else None
        shards = [(n, f"{what} {where}", what) for n in range(3)]
        for factor in (1.0, 1.2, 0.9):
            at = {name: factor * value for name, value in self.HERE.items()}
            r, J = self.expected(at)
            if what == "energy":
                value, gradient = value_and_gradient(shard_factories.shared, shards=shards, at=at, executor=executor)
                assert_allclose(value, r @ r, rtol=1e-12)
                assert_allclose([gradient["a"], gradient["b"]], 2 * J.T @ r, rtol=1e-11)
                continue
            found = normal_equations(shard_factories.shared, shards=shards, at=at, executor=executor)
            assert_allclose(found.rtr, r @ r, rtol=1e-12)
            assert_allclose(found.Jtr, J.T @ r, rtol=1e-11)
            assert_allclose(found.JtJ, J.T @ J, rtol=1e-11)
        if what != "energy":
            fit = least_squares(shard_factories.shared, shards=shards, start=self.HERE, executor=executor)
            assert_allclose(fit.x, [2.0, 0.7], rtol=1e-6)

    def test_the_bar_counts_shards(self, monkeypatch):
        pytest.importorskip("rich")
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        shards = [(n, "bar", "energy") for n in range(3)]
        value_and_gradient(shard_factories.shared, shards=shards, at=self.HERE, progress=True)
        assert "3/3" in sys.stderr.getvalue()

    def test_values_in_another_structure(self, pool):
        """A worker that has the shard does not take one param for the other."""
        shards = [(0, "structure")]
        normal_equations(shard_factories.shared, shards=shards, at=self.HERE, executor=pool)
        swapped = dict(reversed(self.HERE.items()))
        for at, words in ((swapped, r"\[\"\['b'\]\", \"\['a'\]\"\]"), (list(self.HERE.values()), r"'\[0\]', '\[1\]'")):
            with pytest.raises(ShardError, match=f"shard 0, .* structure .*; that of the values: .*{words}"):
                normal_equations(shard_factories.shared, shards=shards, at=at, executor=pool)


def test_the_cores_are_shared_between_workers(pool):
    (J,) = map_jacobian(shard_factories.threads, [(0,)], at=np.ones(1), executor=pool)
    assert J.item() == max(1, os.cpu_count() // 2)


class Broken(ThreadPoolExecutor):
    """Loses its workers before they answer."""

    def submit(self, *_):
        raise BrokenExecutor("gone")


class TestLostWorkers:
    def test_the_shard_that_is_lost_again_is_named(self):
        with pytest.raises(ShardError, match="^shard 0 has lost its worker 4 times, the last time alone: gone") as info:
            list(map_jacobian(decay, SHARDS, at=START, executor=partial(Broken, 1)))
        assert info.value.shard == 0

    @pytest.mark.sweep
    def test_a_fit(self, tmp_path):
        """A worker is killed in the first pass over the shards, and one later; the digits are those of a serial run."""
        shards = [(n, count, "killed once" if n == 2 else "", str(tmp_path)) for n, count in SHARDS]
        killed = []

        def kill(line):
            if line.number == 2:
                newest = max(tmp_path.glob("*-0"), key=lambda path: path.stat().st_mtime)
                killed.append(int(newest.name.split("-")[0]))
                os.kill(killed[0], signal.SIGKILL)

        found = least_squares(decay, shards=shards, start=START, executor=partial(spawned, 1), callback=kill)
        assert (tmp_path / "seen-2").exists()
        assert killed and killed[0] != os.getpid()
        assert_array_equal(found.x, least_squares(decay, shards=SHARDS, start=START).x)

    def test_workers_that_do_not_end(self, monkeypatch):
        """As one does whose neighbour was killed with the lock of the queue: it is terminated."""
        monkeypatch.setattr(sharded, "_MOST_SECONDS", 0.1)
        pool = spawned(1)
        pool.submit(os.getpid).result()
        (process,) = pool._processes.values()
        pool.submit(time.sleep, 1e6)
        sharded._end(pool)
        while process.exitcode is None:  # a thread of the pool may have waited for it, and not noted how it ended yet
            process.join(0.1)
        assert process.exitcode == -signal.SIGTERM

    @pytest.mark.sweep
    def test_a_shard_that_always_kills(self, tmp_path, monkeypatch):
        monkeypatch.setattr(sharded, "_MOST_LOSSES", 1)  # 3 takes four starts of a process
        shards = [(n, count, "always killed" if n == 1 else "", str(tmp_path)) for n, count in SHARDS]
        with pytest.raises(ShardError, match="^shard 1 has lost its worker 2 times, the last time alone") as info:
            normal_equations(decay, shards=shards, at=START, executor=partial(spawned, 1))
        assert info.value.shard == 1

    @pytest.mark.sweep
    def test_an_executor_that_cannot_be_replaced(self):
        with spawned(1) as broken:
            with pytest.raises(ShardError, match=r"shard 0, .* has lost its worker: .*executor= a function") as info:
                list(map_jacobian(decay, [(0, 5, "exits"), (1, 5)], at=START, executor=broken))
            assert info.value.shard == 0


class TestBadInput:
    @pytest.mark.mostly_sweep(every=2)
    @pytest.mark.parametrize(
        ("what", "words"),
        [
            ("raises", r"shard 1, from 'shard_factories:decay': .*raised(?s:.*)ZeroDivisionError: no data"),
            ("nan", r"shard 1, .*InvalidArgumentError: entry \[1\] of .* is nan"),
            ("shape", r"shard 1, .* shapes \[\(4,\), \(\)\]; the values: \[\(2,\), \(\)\]"),
            ("structure", r"shard 1, .* structure \['\[0\]', '\[1\]'\]; that of the values: \[\"\['p'\]\", .*"),
            (
                "one object",
                r"shard 1, .*the factory returns .*(compare|Callable).*; expected \(kernel, params, outputs\)",
            ),
        ],
    )
    def test_a_shard_fails(self, pool, what, words):
        with pytest.raises(ShardError, match=words):
            normal_equations(decay, shards=[(0, 5), (1, 5, what)], at=START, executor=pool)

    @pytest.mark.parametrize(
        ("factory", "words"),
        [
            (lambda n: None, "factory is <function .*<lambda>.*; expected a function of a module"),
            ("shard_factories:missing", "cannot be imported here: .*missing"),
            ("no_such_module:f", "cannot be imported here: No module named 'no_such_module'"),
            ("shard_factories:not_a_function", "is 3; expected a function"),
            ("decay", "expected a function of a module"),
            (partial(decay, 1), "expected a function of a module"),
            (
                shard_factories.compare,
                "'shard_factories:compare' is a kernel or ti.func; expected a function of Python",
            ),
        ],
    )
    def test_no_factory(self, factory, words):
        for call in (map_jacobian, lambda f, s, at: least_squares(f, shards=s, start=at)):
            with pytest.raises(InvalidArgumentError, match=words):
                call(factory, SHARDS, at=START)

    def test_a_plan_is_no_factory(self):
        p, q, r, t, y = np.zeros(2), np.zeros(()), np.zeros(3), np.zeros(3), np.zeros(3)
        plan = Jacobian(shard_factories.compare, p, r, args=(p, q, t, y, r))
        with pytest.raises(InvalidArgumentError, match="factory is .*; expected a function of a module"):
            map_jacobian(plan, SHARDS, at=START)

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"shards": 3}, "shards is 3; expected a list of tuples"),
            ({"shards": []}, "shards is"),
            ({"shards": [1, 2]}, "expected a list of tuples"),
            ({"shards": [(0, 5), (lambda: 0,)]}, r"shards\[1\] cannot be pickled"),
            ({"start": {"p": np.array([1.0, np.nan]), "q": 0.0}}, r"entry \[1\] of start\['p'\] is nan"),
            ({"start": None}, "start is missing"),
            ({"start": {"p": ["x"], "q": 0.0}}, "start.*expected an array of real numbers"),
            ({"bounds": (2.0, 3.0)}, "start within the bounds"),
            ({"method": "trf"}, "with shards, expected 'lm'"),
            ({"params": START}, "params cannot be given with shards"),
            ({"weights": np.ones(5)}, "weights are factors in its kernel"),
            ({"eliminate": "p"}, "eliminate names 'p', .* of the arrays in start"),
            ({"eliminate": START["p"]}, r"eliminate names start\['p'\].* and a residual depends on both"),
            ({"retract": manifolds.so3}, "expected a Manifold or None for each of the 2 params"),
            ({"loss": lambda z: z, "executor": spawned}, "loss cannot be pickled: .* a function of a module"),
            ({"init": 3}, "init is 3"),
            ({"executor": 3}, "executor is 3"),
            ({"executor": ProcessPoolExecutor}, "expected a concurrent.futures.Executor, or a function"),
            ({"executor": dict}, "executor is"),
            ({"executor": lambda: 3}, r"executor\(\) returns 3"),
            ({"executor": lambda: None}, r"executor\(\) returns None"),
        ],
    )
    def test_options(self, options, words):
        with pytest.raises(InvalidArgumentError, match=words):
            least_squares(decay, **{"shards": SHARDS, "start": START, **options})

    def test_without_shards(self):
        p, r = np.zeros(2), np.zeros(2)
        with pytest.raises(InvalidArgumentError, match="executor needs shards="):
            least_squares(decay, p, r, executor=spawned)
        with pytest.raises(InvalidArgumentError, match="at needs shards="):
            normal_equations(decay, p, r, at=p)

    def test_energies(self):
        with pytest.raises(InvalidArgumentError, match="params cannot be given with shards="):
            value_and_gradient(shard_factories.misfit, "p", shards=SHARDS, at=START)
        with pytest.raises(InvalidArgumentError, match="args cannot be given with shards="):
            value_and_gradient(shard_factories.misfit, shards=SHARDS, at=START, args=(1.0,))
        with pytest.raises(ShardError, match="shard 0.*has shape"):
            value_and_gradient(decay, shards=SHARDS[:1], at=START)

    def test_executors_that_cannot_be_used(self):
        forked = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork"))
        with pytest.raises(InvalidArgumentError, match="forks its workers"):
            map_jacobian(decay, SHARDS, at=START, executor=forked)
        ended = spawned(1)
        ended.shutdown()
        with pytest.raises(InvalidArgumentError, match="executor takes no tasks: .*shutdown"):
            list(map_jacobian(decay, SHARDS, at=START, executor=ended))
        with ThreadPoolExecutor(1) as threads, pytest.raises(ShardError, match="shard 0.*computes in this process"):
            list(map_jacobian(decay, SHARDS, at=START, executor=threads))

    @pytest.mark.sweep
    def test_the_best_point_is_in_the_error(self, pool):
        def stop(line):
            raise KeyError(line.number)

        with pytest.raises(KeyError):
            least_squares(decay, shards=SHARDS, start=START, executor=pool, callback=stop)


@pytest.mark.sweep
def test_dask(tmp_path):
    """Dask replaces a worker that was lost, and computes again what it had."""
    distributed = pytest.importorskip("distributed", reason="needs Dask, the extra 'dask'")
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    with distributed.LocalCluster(**options) as cluster, distributed.Client(cluster) as client:
        shards = [(n, count, "killed once" if n == 1 else "", str(tmp_path)) for n, count in SHARDS]
        found = least_squares(decay, shards=shards, start=START, executor=client.get_executor())
        assert_array_equal(found.x, least_squares(decay, shards=SHARDS, start=START).x)
        with pytest.raises(ShardError, match="shard 2, (?s:.*)ZeroDivisionError") as info:
            shards = [(n, count, "raises" if n == 2 else "") for n, count in SHARDS]
            normal_equations(decay, shards=shards, at=START, executor=client.get_executor())
        assert info.value.shard == 2
