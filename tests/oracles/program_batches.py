"""Run many random programs, each batch in a process of its own, so that a crash or an endless loop names its seed.

    python tests/oracles/program_batches.py 2000                       # the programs of seeds 0 to 1999
    python tests/oracles/program_batches.py 2000 --generator pipelines # pipelines: several kernels, and Python between them
    python tests/oracles/program_batches.py 500 --generator lists --format csr  # sums over neighbours, loops of any length
    python tests/oracles/program_batches.py 300 --generator wide       # pipelines with more columns, and loops that end early
    python tests/oracles/program_batches.py 500 --generator reverse    # products of pipelines in reverse mode, memory drawn
    python tests/oracles/program_batches.py 500 --generator levels     # levels in loops, with edges, stopped gradients and rules
    python tests/oracles/program_batches.py 500 --generator hessians   # energies of what programs compute, differentiated twice
    python tests/oracles/program_batches.py 300 --tangents dense       # with another storage of tangents
    python tests/oracles/program_batches.py 300 --by-column            # with tangents in memory as on a GPU
    python tests/oracles/program_batches.py 300 --chunk-size 3         # with three columns of J in each run
    python tests/oracles/program_batches.py 300 --mode reverse         # rows of J by adjoints; with every generator
    python tests/oracles/program_batches.py 300 --offsets              # with fields that begin at other indices than 0
    python tests/oracles/program_batches.py 300 --vary                 # with these three drawn by the seed of each program
    python tests/oracles/program_batches.py 60 --setting fast_math=False  # fused kernels compiled with another setting of ti.init
    python tests/oracles/program_batches.py 60 --limit schedule.columns.MOST_WRITTEN_OUT=1  # as programs of other sizes are
    python tests/oracles/program_batches.py 60 --limit schedule.loops.LEAST_ITERATIONS=0  # with no loop made serial
    python tests/oracles/program_batches.py 500 --lanes                # loops run in lanes where they can
    python tests/oracles/program_batches.py 1 --first 123 --reduce     # one program, cut down if it fails

Every program that is not right is appended to the log, one line of JSON each; the counts come last.
"""

import argparse
import ast
import collections
import faulthandler
import importlib
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

import program_check
import program_grammar
import program_hessians
import program_levels
import program_lists
import program_offsets
import program_pipelines
from program_level_check import LevelWorkshop, describe_level, level_verdict
from program_pipeline_check import PipelineWorkshop, describe_pipeline, pipeline_verdict
from program_reverse_check import reverse_verdict
from program_verdict import BY_ITSELF, REFUSED, REJECTED, RIGHT, Workshop, describe, reduced, verdict

from taichi_ext import backend
from taichi_ext.backend import kernels
from taichi_ext.differentiate.plan.storage_facts import STRATEGIES

PER_PROCESS = 50
IN_LANES = [
    *("schedule.lanes.LANES_OF_FLOAT32=2", "schedule.lanes.LANES_OF_FLOAT64=2", "schedule.lanes.MOST_REPEATED=1.0"),
    *(
        "schedule.lanes.LEAST_TOTAL=0",
        "schedule.masks.LEAST_GUARDED=2",
        "schedule.lanes.LEAST_WORK=0",
        "schedule.lanes.NEEDS_VECTORS=False",
        "schedule.lanes.VECTORS_OF_FLOAT64=False",
    ),
]
LONGEST = 300  # seconds without a verdict, after which a process ends
LEGITIMATE = {RIGHT, REJECTED, REFUSED, *BY_ITSELF}
MOST_CUT = 20  # times that long where a program is cut down
# by name: what writes a program, what runs programs, what judges one, what shows one
GENERATORS: dict[str, tuple[Any, Any, Any, Any]] = {
    "hessians": (program_hessians.generate, Workshop, program_hessians.hessian_verdict, describe),
    "kernels": (program_grammar.generate, Workshop, verdict, describe),
    "levels": (program_levels.generate, LevelWorkshop, level_verdict, describe_level),
    "lists": (program_lists.generate, Workshop, verdict, describe),
    "reverse": (program_pipelines.generate, PipelineWorkshop, reverse_verdict, describe_pipeline),
    "wide": (program_pipelines.generate_wide, PipelineWorkshop, pipeline_verdict, describe_pipeline),
    "pipelines": (program_pipelines.generate, PipelineWorkshop, pipeline_verdict, describe_pipeline),
}


def drawn_ways(seed: int) -> dict[str, Any]:
    """Options of jacobian for the program of a seed, and how its tangents lie in memory."""
    rng = random.Random(f"options of {seed}")
    drawn = {"tangents": rng.choice([*STRATEGIES]), "chunk_size": rng.choice([None, None, 1, 2, 3, 5, 9])}
    return {**drawn, "by_column": rng.random() < 0.3}


def set_ways(ways: dict[str, Any]) -> None:
    """Let the Jacobians of the next programs be computed so."""
    program_check.OPTIONS.update({name: value for name, value in ways.items() if name != "by_column"})
    if "by_column" in ways:
        backend.stores_by_column = lambda: ways["by_column"]


def run_batch(generator: str, first: int, count: int, is_reducing: bool, is_varying: bool) -> None:
    """The programs of some seeds, in this process: one line before each and one after."""
    generate, make_workshop, judge, show = GENERATORS[generator]
    workshop = make_workshop()
    for seed in range(first, first + count):
        drawn = drawn_ways(seed) if is_varying else {}
        print(json.dumps({"seed": seed, **drawn}), flush=True)
        faulthandler.dump_traceback_later(LONGEST * (MOST_CUT if is_reducing else 1), exit=True)
        program = generate(seed)
        set_ways(drawn)
        runs_alone = program_check.IS_PLAIN or seed % 4 == 0
        kind, message = judge(program, seed, workshop, runs_alone=runs_alone)
        if is_reducing and kind not in (RIGHT, REJECTED) and generator != "levels":
            message += "\n" + show(reduced(program, seed, workshop, judge=judge))
        print(json.dumps({"seed": seed, "kind": kind, "message": message, **drawn}), flush=True)


def run_process(first: int, count: int, how: list[str]) -> list[dict[str, Any]]:
    """The verdicts of a batch; where the process dies or is ended, that of its last seed says so and ends the list."""
    command = [sys.executable, __file__, str(count), "--first", str(first), "--here", *how]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"seed"')]
    verdicts = [line for line in lines if "kind" in line]
    if len(verdicts) < count:
        last = lines[-1] if lines else {"seed": first}
        kind = "timed out" if "\nTimeout (" in f"\n{done.stderr}" else "died"
        if "--plain" not in how and run_process(last["seed"], 1, [*how, "--plain"])[0]["kind"] == kind:
            kind = "plain crash"
        verdicts.append({**last, "kind": kind, "message": f"exit status {done.returncode}\n{done.stderr[-3000:]}"})
    return verdicts


def run_all(first: int, count: int, how: list[str], log: IO[str]) -> collections.Counter[str]:
    """The counts of what came out, of which the log tells more."""
    counts: collections.Counter[str] = collections.Counter()
    start, seed = time.time(), first
    while seed < first + count:
        verdicts = run_process(seed, min(PER_PROCESS, first + count - seed), how)
        seed = verdicts[-1]["seed"] + 1
        for found in verdicts:
            counts[found["kind"]] += 1
            if found["kind"] != RIGHT:
                print(json.dumps(found), file=log, flush=True)
            if found["kind"] not in LEGITIMATE:
                print({name: value for name, value in found.items() if name != "message"})
        print(f"{seed - first} programs, {time.time() - start:.0f} s: {dict(counts)}", flush=True)
    return counts


def set_limit(text: str) -> None:
    """Change a number of taichi_ext that decides what becomes of programs of some size, given as ``module.NAME=NUMBER``."""
    path, value = text.split("=")
    module, name = path.rsplit(".", 1)
    found = importlib.import_module(f"taichi_ext.{module}")
    assert type(getattr(found, name)) is type(ast.literal_eval(value)), f"{path} is {getattr(found, name)}"
    setattr(found, name, ast.literal_eval(value))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--generator", choices=GENERATORS, default="kernels", help="of the programs, default kernels")
    parser.add_argument("--log", type=Path, default=Path("random_programs.jsonl"))
    parser.add_argument("--reduce", action="store_true", help="cut down what fails")
    parser.add_argument("--tangents", choices=STRATEGIES, default="auto", help="what jacobian is told, default auto")
    parser.add_argument("--by-column", action="store_true", help="tangents in memory as on a GPU")
    parser.add_argument("--chunk-size", type=int, metavar="N", help="columns of J in each run at most")
    parser.add_argument("--mode", choices=("forward", "reverse"), help="of the Jacobians")
    parser.add_argument("--vary", action="store_true", help="draw these three by the seed of each program")
    parser.add_argument("--offsets", action="store_true", help="fields that begin at other indices than 0")
    parser.add_argument("--format", choices=("dense", "csr"), default="dense", help="of the Jacobians, default dense")
    parser.add_argument(
        "--setting", action="append", default=[], metavar="NAME=VALUE", help="of ti.init, for fused kernels alone"
    )
    parser.add_argument(
        "--limit", action="append", default=[], metavar="MODULE.NAME=VALUE", help="a constant of taichi_ext"
    )
    parser.add_argument("--here", action="store_true", help="one batch in this process")
    parser.add_argument("--plain", action="store_true", help="only what Taichi does by itself, after a process died")
    parser.add_argument("--lanes", action="store_true", help="let all loops that can run in lanes do so, two at a time")
    options = parser.parse_args()
    options.limit += IN_LANES * options.lanes
    STRATEGIES["auto"] = STRATEGIES[options.tangents]
    program_check.IS_PLAIN = options.plain
    program_offsets.IS_DRAWN = options.offsets
    program_check.FORMAT = None if options.format == "dense" else options.format
    kernels.SETTINGS.update({n: ast.literal_eval(value) for n, value in (s.split("=") for s in options.setting)})
    for limit in options.limit:
        set_limit(limit)
    ways = {"by_column": options.by_column} if options.by_column else {}
    ways |= {} if options.mode is None else {"mode": options.mode}
    set_ways(ways if options.chunk_size is None else {**ways, "chunk_size": options.chunk_size})
    if options.here:
        run_batch(options.generator, options.first, options.count, options.reduce, options.vary)
        return 0
    how = ["--generator", options.generator, "--tangents", options.tangents, "--format", options.format]
    how += [f"--setting={setting}" for setting in options.setting] + [f"--limit={limit}" for limit in options.limit]
    how += ["--reduce"] * options.reduce + ["--vary"] * options.vary
    how += ["--by-column"] * options.by_column + ["--offsets"] * options.offsets
    how += [] if options.mode is None else ["--mode", options.mode]
    how += [] if options.chunk_size is None else ["--chunk-size", str(options.chunk_size)]
    with options.log.open("a") as log:
        counts = run_all(options.first, options.count, how, log)
    return 0 if set(counts) <= LEGITIMATE else 1


if __name__ == "__main__":
    raise SystemExit(main())
