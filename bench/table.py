"""Time the Jacobians of all programs by all methods, after checking that they agree, and print a table.

python bench/table.py                                      everything; about 15 minutes on two cores
python bench/table.py --no-peers --cases sphere volume      without JAX, torch, Warp and Dr.Jit
python bench/table.py --cpu-time                           CPU time on one core: less noise on a machine that is in use
python bench/table.py --markdown docs/performance_appendix.md --picture docs/performance.png
python bench/table.py --no-peers --cpu-time --history history.jsonl     add a line to a file: what changed, and when

Peers that are not installed are left out: pip install ".[peers]" has them all.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import peers
import taichi as ti
from programs import CASES, assert_same_jacobian, run_forward_mode, run_hand_derived
from report import add_to_history, describe, markdown_table, write_report
from timing import LONG, Timing, time_first, time_in_turn

from taichi_ext import Jacobian

# FwdMode needs force_scalarize_matrix for kernels with vectors; the other methods run under the same settings.
_PANELS = 3  # in one row of the picture
_PAGE, _TEXT = 7.5, 8  # inches of its width, and points of its text
SETTINGS = {"force_scalarize_matrix": True, "offline_cache": False, "log_level": ti.ERROR}
PRIMAL, FORWARD, OURS, HAND = "primal alone", "FwdMode by column", "taichi_ext", "hand-derived"


@dataclass
class Case:
    """What was measured of one program.

    Attributes:
        timings: by method.
        notes: why a method has no figure, by method.
    """

    columns: int
    entries: int
    timings: dict[str, Timing] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def ratio(self, methods: list[str]) -> float:
        """How many times as long as taichi_ext the fastest of the methods takes; NaN where none was timed."""
        medians = [self.timings[method].median for method in methods if method in self.timings]
        return min(medians, default=np.nan) / self.timings[OURS].median


def measure(make, peer_names, skip=frozenset(), seconds=2.0, clock=time.perf_counter) -> Case:
    """Check and time all methods on one program.

    Args:
        make: builds the program.
        peer_names: which peers to ask.
        skip: methods to leave out.
        seconds: how long each method may take.
        clock: gives the time in seconds.
    """
    program, dual_program = make(), make(needs_dual=True)
    columns = program.point.size
    case = Case(columns, int(np.prod(program.jacobian_shape)) // columns)
    out, hand_out = (np.empty(program.jacobian_shape, np.float32) for _ in range(2))
    first = {}

    def primal():
        program.kernel()
        ti.sync()

    calls = {PRIMAL: primal}
    first[PRIMAL] = time_first(primal, clock)
    start = clock()
    plan = Jacobian(program.kernel, program.params, program.outputs)
    plan(out=out)
    first[OURS] = clock() - start
    expected = out.copy()
    candidates = {FORWARD: partial(run_forward_mode, dual_program), HAND: partial(run_hand_derived, program, hand_out)}
    for name in peer_names:
        candidates |= peers.methods(name, program)
    calls[OURS] = partial(plan, out=out)
    for name, call in candidates.items():
        if name in skip:
            case.notes[name] = "too slow"
            continue
        start = clock()
        try:
            actual = call()
        except Exception as error:  # a method that refuses the program has that as its result
            case.notes[name] = "refuses"
            print(f"  {name} refuses: {type(error).__name__}: {str(error).strip().splitlines()[-1:]}", file=sys.stderr)
            continue
        first[name] = clock() - start
        assert_same_jacobian(actual, expected, columns)
        calls[name] = call
    case.timings = time_in_turn(calls, first, seconds, clock)
    return case


def measure_all(cases, peer_names, seconds=2.0, clock=time.perf_counter) -> dict[str, Case]:
    """Measure the cases; a method too slow for one size of a program is not tried on the next larger one."""
    results: dict[str, Case] = {}
    slow: dict[str, set[str]] = {}
    for name, make in cases.items():
        print(f"{name} ...", file=sys.stderr, flush=True)
        family = slow.setdefault(name.partition(",")[0], set())
        results[name] = measure(make, peer_names, frozenset(family), seconds, clock)
        medians = [f"{method} {_milliseconds(timing)}" for method, timing in results[name].timings.items()]
        print(f"  milliseconds: {', '.join(medians)}", file=sys.stderr, flush=True)
        family |= {method for method, timing in results[name].timings.items() if timing.median > LONG}
    return results


# --- the report


def tables(results: dict[str, Case]) -> str:
    """The figures as Markdown: warm calls, how many times as long as taichi_ext they take, and first calls."""
    methods = list(dict.fromkeys(m for case in results.values() for m in (*case.timings, *case.notes)))
    methods.sort(key=lambda method: ([PRIMAL, OURS, HAND, FORWARD, method].index(method), method))
    head = [""] + [f"{name}<br>{case.entries} x {case.columns}" for name, case in results.items()]

    def cell(case: Case, method: str, kind: str) -> str:
        if method not in case.timings:
            return case.notes.get(method, "")
        timing = case.timings[method]
        if kind == "first":
            return f"{timing.first:.2f}"
        return f"{_milliseconds(timing)} ({_number(timing.median / case.timings[OURS].median, 2)}x)"

    def table(kind: str) -> str:
        rows = [[method] + [cell(case, method, kind) for case in results.values()] for method in methods]
        return markdown_table(head, rows)

    jax = [method for method in methods if method.startswith("JAX")]
    summary = [
        [name] + [_times(x) for x in (case.ratio([FORWARD]), case.ratio(jax), 1 / case.ratio([HAND]))]
        for name, case in results.items()
    ]
    return "\n\n".join(
        [
            "Milliseconds per Jacobian, and how many times as long as `taichi_ext`:",
            table("warm"),
            "Seconds of the first call, compilation included:",
            table("first"),
            "In short:",
            markdown_table(
                ["", "faster than FwdMode", "faster than JAX's best", "of the hand-derived kernel's time"], summary
            ),
        ]
    )


def draw(results: dict[str, Case], path: Path) -> None:
    """One panel of bars for each program: the time of each method, on one logarithmic axis."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    methods = list(dict.fromkeys(m for case in results.values() for m in case.timings))
    rows = -(-len(results) // _PANELS)
    figure = Figure(figsize=(_PAGE, 0.6 + rows * (0.6 + 0.17 * len(methods))), layout="constrained")
    axes = figure.subplots(rows, _PANELS, sharex=True, sharey=True, squeeze=False).ravel()
    for panel, (name, case) in zip(axes, results.items(), strict=False):
        for n, method in enumerate(methods):
            if method in case.timings:
                timing = case.timings[method]
                time_ms = timing.median * 1e3
                panel.barh(n, time_ms, color="C1" if method == OURS else "C0", alpha=1.0 if method == OURS else 0.45)
                panel.text(time_ms, n, f" {_milliseconds(timing)}", va="center", fontsize=_TEXT)
        panel.set_title(f"{name}\n{case.columns} parameters", fontsize=_TEXT)
        panel.set(xscale="log", yticks=range(len(methods)), yticklabels=methods)
        panel.xaxis.set_major_locator(LogLocator(numticks=5))
        panel.tick_params(labelsize=_TEXT)
        panel.grid(axis="x", alpha=0.25)
        panel.margins(x=0.4)
    for panel in axes[len(results) :]:
        panel.set_visible(False)
    axes[0].invert_yaxis()  # of all panels
    figure.supxlabel("milliseconds per Jacobian", fontsize=_TEXT)
    figure.savefig(path, dpi=150)


def _milliseconds(timing: Timing) -> str:
    return _number(timing.median * 1e3, 3)


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}g}" if value < 99.5 else f"{value:.0f}"


def _times(value: float) -> str:
    return "" if np.isnan(value) else f"{value:.2f}x" if value < 9.95 else f"{value:.0f}x"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=[""], help="which programs, by the beginnings of their names")
    parser.add_argument("--peers", default=",".join(peers.available()), help="which peers; default: those installed")
    parser.add_argument("--no-peers", dest="peers", action="store_const", const="", help="Taichi alone")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long each method is timed, default 2")
    parser.add_argument("--cpu-time", action="store_true", help="CPU time of the process on one core")
    parser.add_argument("--markdown", type=Path, help="put the tables in this file")
    parser.add_argument(
        "--history", type=Path, help="append the ratios to the hand-derived and the plain kernel, as JSON"
    )
    parser.add_argument("--picture", type=Path, help="draw the times in this file")
    options = parser.parse_args(arguments)
    cases = {name: make for name, make in CASES.items() if name.startswith(tuple(options.cases))}
    settings, clock, clock_name = dict(SETTINGS), time.perf_counter, "wall time"
    if options.cpu_time:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        settings["cpu_max_num_threads"] = 1
        clock, clock_name = time.process_time, "CPU time on one core"
    ti.init(arch=ti.cpu, **settings)
    results = measure_all(cases, [name for name in options.peers.split(",") if name], options.seconds, clock)
    text = f"{describe(clock_name)}\n\n{tables(results)}\n"
    print(text)
    if options.markdown:
        write_report(options.markdown, "table", text)
    if options.history:
        ratios = {name: [round(1 / case.ratio([m]), 3) for m in (HAND, PRIMAL)] for name, case in results.items()}
        add_to_history(options.history, clock_name, {"over": [HAND, PRIMAL], "ratios": ratios})
    if options.picture:
        draw(results, options.picture)


if __name__ == "__main__":
    main()
