"""Are kernels still the same, bit by bit, when they are recorded, simplified, emitted and run in that form?

    python tests/oracles/roundtrip.py conformance FOLDER            # the cases in FOLDER/cases.py
    python tests/oracles/roundtrip.py wild FOLDER mpm88 mpm99       # some of the programs in FOLDER/programs.py
    python tests/oracles/roundtrip.py kernels --count 300           # random programs, seeds 0 to 299
    python tests/oracles/roundtrip.py pipelines --count 100 --first 50

Both are compiled without fast math, which computes the same sums in another order for the least reason, and without
the passes of Taichi 1.7.4 that drop stores.
Programs that end with other bits are compared with what an interpreter computes, where there is one: "plain wrong" where
Taichi alone differs from it, "fast math" where both are within its tolerance. Batches run in processes of their own, so
that a crash of the compiler names its program.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import program_check
import program_grammar
import program_pipeline_check
import program_pipelines
import taichi as ti
from program_check import MismatchError
from program_pipeline_check import PipelineWorkshop
from program_reference import RejectedError
from program_verdict import Workshop
from reemission import Reemission

from taichi_ext import backend

EQUAL = "equal"
LEGITIMATE = (EQUAL, "rejected", "plain wrong", "fast math", "plain crash", "plain died")
PER_PROCESS = 40
Outcome = tuple[str, str]


def first_difference(want: dict[str, Any], got: dict[str, Any]) -> str:
    """The first value whose bits differ; empty where none does."""
    for name, value in want.items():
        a, b = np.asarray(value), np.asarray(got[name])
        if a.shape != b.shape or a.tobytes() != b.tobytes():
            where = np.argwhere(~((a == b) | ((a != a) & (b != b))))
            at = tuple(map(int, where[0])) if len(where) else ()
            return f"{name}{list(at)}: {a[at]!r} plain, {b[at]!r} emitted; {len(where)} of {a.size} differ"
    return ""


def error_text(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' | '.join(lines[:3] + lines[-1:])}"[:600]


# --- programs in files ------------------------------------------------------------------------------------------------


def load_module(path: Path, name: str) -> Any:
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Conformance:
    """Cases of a conformance suite; each is executed twice."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.cases = load_module(options.folder / "cases.py", "cases").CASES
        self.write = load_module(options.folder / "run.py", "conformance_run").program
        self.words = options.names

    def keys(self) -> list[str]:
        return [c["name"] for c in self.cases if not self.words or any(w in c["name"] for w in self.words)]

    def check(self, key: str) -> Outcome:
        (case,) = (c for c in self.cases if c["name"] == key)
        path = Path("case.py").resolve()
        path.write_text(self.write(case))
        try:
            want = self.execute(path, None)
        except Exception as error:
            return "plain crash", error_text(error)
        difference = first_difference(want, self.execute(path, Reemission()))
        return ("different", difference) if difference else (EQUAL, "")

    def execute(self, path: Path, reemission: Reemission | None) -> dict[str, Any]:
        scope: dict[str, Any] = {"__name__": "case", "__file__": str(path)}
        exec(compile(path.read_text(), str(path), "exec", dont_inherit=True), scope)
        scope["x"].from_numpy(scope["X0"])
        scope["y"].fill(0)
        if "reset_extra" in scope:
            scope["reset_extra"]()
        with backend.careful_compilation(frozenset()), reemission or contextlib.nullcontext():
            scope["run"]()
        fields = {k: v for k, v in scope.items() if isinstance(v, ti.Field) and not isinstance(v, ti.StructField)}
        return {k: v.to_numpy() for k, v in fields.items()}


class Wild:
    """Whole simulations; the state of all fields is put back in between."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.harness = load_module(options.folder / "harness.py", "harness")
        self.programs = load_module(options.folder / "programs.py", "programs").PROGRAMS
        self.names = options.names

    def keys(self) -> list[str]:
        return [name for name, p in self.programs.items() if (not self.names or name in self.names) and not p.source]

    def check(self, key: str) -> Outcome:
        self.harness.prepare()
        run, _, _ = self.programs[key].setup()
        state = self.harness.State()
        with backend.careful_compilation(frozenset()):
            run()
        want = state.read()
        state.restore()
        with Reemission() as reemission:
            run()
        got = state.read()
        names = [str(n) for n in range(len(want))]
        difference = first_difference(dict(zip(names, want, strict=True)), dict(zip(names, got, strict=True)))
        costs = ", ".join(
            f"{word} {1000 * s:.0f} ms" for word, s in zip(("record", "simplify", "emit"), reemission.seconds)
        )  # noqa: B905
        costs += f", {len(reemission.made)} kernels, {reemission.text.count(chr(10))} lines"
        return ("different", difference) if difference else (EQUAL, costs)


# --- random programs --------------------------------------------------------------------------------------------------


class Kernels:
    """Random kernels, judged by an interpreter."""

    module: Any = program_check
    tolerance = {"": 1e-9}

    def __init__(self, options: argparse.Namespace) -> None:
        self.seeds = range(options.first, options.first + options.count)
        self.workshop: Any = Workshop()

    def keys(self) -> list[str]:
        return [str(seed) for seed in self.seeds]

    def check(self, key: str) -> Outcome:
        seed = int(key)
        program = program_grammar.generate(seed)
        fields = self.workshop.ready()
        return self.compare(program_check.Loaded(program, fields, f"<random program {seed}>"), seed, 1e-9)

    def compare(self, loaded: Any, seed: int, tolerance: float) -> Outcome:
        values = self.module.values_of(loaded.program, seed * 100)
        try:
            want = self.run(loaded, values)
        except Exception as error:
            return "plain crash", error_text(error)
        print(json.dumps({"key": str(seed), "stage": "emitted"}), flush=True)
        with Reemission():
            got = self.run(loaded, values)
        difference = first_difference(want, got)
        if not difference:
            return EQUAL, ""
        return self.cause(loaded.program, values, want, got, tolerance), difference

    def run(self, loaded: Any, values: Any) -> dict[str, Any]:
        args = loaded.prepare(values)
        with backend.careful_compilation(frozenset({"vectors"})):
            result = loaded.entry(*args)
        state = loaded.state(args) if self.module is program_check else loaded.state()
        if result is not None:
            parts = result if isinstance(result, (tuple, list)) else [result]
            state |= {f"result {n}": np.array(getattr(p, "to_numpy", lambda p=p: p)()) for n, p in enumerate(parts)}
        return state

    def cause(self, program: Any, values: Any, want: Any, got: Any, tolerance: float) -> str:
        """Why the bits of a program differ, according to an interpreter."""
        try:
            expected = self.module.Expected(program, values)
        except RejectedError:  # it cannot judge them
            is_close = all(np.allclose(got[k], v, rtol=1e-9, atol=1e-12, equal_nan=True) for k, v in want.items())
            return "rejected" if is_close else "different"
        verdicts = []
        for state in (want, got):
            try:
                for name, value in expected.state.items():
                    program_check.require_close("", name, state[name], value, tolerance)
                verdicts.append(True)
            except MismatchError:
                verdicts.append(False)
        return {(True, True): "fast math", (False, True): "plain wrong"}.get(tuple(verdicts), "different")


class Pipelines(Kernels):
    """Random pipelines of several kernels."""

    module = program_pipeline_check

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.workshop = PipelineWorkshop()

    def check(self, key: str) -> Outcome:
        seed = int(key)
        program = program_pipelines.generate(seed)
        self.workshop.ready(program.real)
        loaded = program_pipeline_check.Loaded(program, f"<random pipeline {seed}>")
        return self.compare(loaded, seed, program_pipeline_check.TOLERANCE[program.real])


SUITES: dict[str, Callable[[argparse.Namespace], Any]] = {
    "conformance": Conformance,
    "wild": Wild,
    "kernels": Kernels,
    "pipelines": Pipelines,
}


# --- the command line -------------------------------------------------------------------------------------------------


def init_strictly(init: Callable[..., Any], fast_math: bool) -> Callable[..., Any]:
    """``ti.init`` for one thread, so that atomic sums always have the same order, and without fast math."""
    return lambda *args, **options: init(*args, **{**options, "cpu_max_num_threads": 1, "fast_math": fast_math})


def run_here(suite: Any, keys: list[str], fast_math: bool) -> None:
    """Some programs in this process: one line of JSON before each and one after."""
    os.chdir(tempfile.mkdtemp())
    ti.init = init_strictly(ti.init, fast_math)
    for key in keys:
        print(json.dumps({"key": key}), flush=True)
        try:
            kind, message = suite.check(key)
        except Exception as error:
            kind, message = "refused" if "UnsupportedError" in type(error).__name__ else "crash", error_text(error)
            if os.environ.get("ROUNDTRIP_TRACE"):
                traceback.print_exc()
        print(json.dumps({"key": key, "kind": kind, "message": message}), flush=True)


def run_all(keys: list[str], size: int, timeout: float) -> Iterator[dict[str, str]]:
    """The outcomes of all programs, in batches; where a process dies, its last program says so."""
    rest = list(keys)
    while rest:
        batch = rest[:size]
        command = [sys.executable, __file__, *sys.argv[1:], "--here", *batch]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout * len(batch))
            output, end = done.stdout, f"exit status {done.returncode}: {done.stderr[-300:]}"
        except subprocess.TimeoutExpired as error:
            output, end = (error.stdout or b"").decode(), "never came to an end"
        lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"key"')]
        outcomes = [line for line in lines if "kind" in line]
        if len(outcomes) < len(batch):
            last = lines[-1] if lines else {"key": batch[0]}
            kind = "died" if "stage" in last else "plain died"
            outcomes.append({"key": last["key"], "kind": kind, "message": end})
        yield from outcomes
        finished = {o["key"] for o in outcomes}
        rest = [key for key in rest if key not in finished]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("folder", type=Path, nargs="?", help="of the programs, for conformance and wild")
    parser.add_argument("names", nargs="*", help="some of them")
    parser.add_argument("--count", type=int, default=100, help="of random programs")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--fast-math", action="store_true", help="compile as Taichi does by default")
    parser.add_argument("--here", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    suite = SUITES[options.suite](options)
    if options.here:
        run_here(suite, options.here, options.fast_math)
        return 0
    counts: collections.Counter[str] = collections.Counter()
    for found in run_all(suite.keys(), 1 if options.suite == "wild" else PER_PROCESS, 600):
        counts[found["kind"]] += 1
        if found["kind"] != EQUAL or options.suite == "wild":
            print(f"{found['key']}: {found['kind']}: {found['message']}", flush=True)
    print(dict(counts))
    return 0 if set(counts) <= set(LEGITIMATE) else 1


if __name__ == "__main__":
    raise SystemExit(main())
