"""taichi_ext as a tool of GradBench: answers the messages on stdin, one a line, on stdout.

python gradbench/run.py [--multithreaded]
"""

import argparse
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

MODULES = ("hello", "ba", "ht")


class Function(NamedTuple):
    """A function of an eval.

    Attributes:
        prepare: makes what is evaluated from the input of a message.
        evaluate: what is timed.
        encode: makes the output of the answer from what that returns.
    """

    prepare: Callable[[Any], Any]
    evaluate: Callable[[Any], Any]
    encode: Callable[[Any], Any]


def evaluate(function: Function, given: Any, threads: int) -> dict[str, Any]:
    """The output, and the nanoseconds of each evaluation; one before them compiles."""
    import taichi as ti

    options = given if isinstance(given, dict) else {}
    ti.init(arch=ti.cpu, default_fp=ti.f64, cpu_max_num_threads=threads, log_level=ti.ERROR)
    state = function.prepare(given)
    found = function.evaluate(state)
    timings: list[int] = []
    while len(timings) < options.get("min_runs", 1) or sum(timings) < 1e9 * options.get("min_seconds", 0):
        began = time.perf_counter_ns()
        found = function.evaluate(state)
        timings.append(time.perf_counter_ns() - began)
    return {
        "success": True,
        "output": function.encode(found),
        "timings": [{"name": "evaluate", "nanoseconds": n} for n in timings],
    }


def answer(message: dict[str, Any], threads: int) -> dict[str, Any]:
    """What is answered to a message, but for its number."""
    kind, module = message["kind"], message.get("module")
    if kind == "start":
        return {"tool": "taichi_ext"}
    if kind not in ("define", "evaluate"):
        return {}
    if module not in MODULES:
        return {"success": False, "error": f"no module {module!r}; there are {', '.join(MODULES)}"}
    try:
        functions = importlib.import_module(module).FUNCTIONS
        if kind == "define":
            return {"success": True}
        return evaluate(Function(*functions[message["function"]]), message["input"], threads)
    except Exception:
        return {"success": False, "error": traceback.format_exc()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--multithreaded", action="store_true", help="run kernels on all cores, not on one")
    threads = (os.cpu_count() or 1) if parser.parse_args().multithreaded else 1
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Taichi greets on stdout
    for line in sys.stdin:
        message = json.loads(line)
        print(json.dumps({"id": message["id"], **answer(message, threads)}), file=answers, flush=True)


if __name__ == "__main__":
    main()
