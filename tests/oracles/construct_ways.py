"""Compare ways to the same derivative on a file of small programs: sparse with dense J, ``vjp`` with ``jvp``.

    python tests/oracles/construct_ways.py CASES.py            # every program of that file
    python tests/oracles/construct_ways.py CASES.py while vec  # those whose name has one of the words

The file has a list ``CASES`` of dictionaries: ``name``; ``x0``, the values of the field ``x`` of parameters; ``m``, the size
of the field ``y`` of outputs; ``pre``, text before the kernel; ``body``, the body of the kernel, or with ``pipeline`` nothing,
as ``pre`` has ``run()`` then; ``extra``, text after it. Programs run in separate processes, fifteen in each, so
that a crash of the compiler costs one program. The exit status is 1 if two ways differ.
"""

from __future__ import annotations

import argparse
import collections
import json
import linecache
import runpy
import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import taichi as ti

from taichi_ext import jacobian, jvp, vjp

TOLERANCE, SINGLE_PRECISION = 1e-12, 1e-6
PER_PROCESS = 15
HEAD = "import numpy as np\nimport taichi as ti\nimport taichi.math as tm\n"


class DifferentError(AssertionError):
    """Two ways give different numbers."""


class Construct:
    """A program of the file, loaded into a new Taichi program."""

    def __init__(self, case: dict[str, Any], number: int) -> None:
        ti.init(arch=ti.cpu, default_fp=ti.f64, cpu_max_num_threads=2, offline_cache=False, log_level=ti.ERROR)
        self.x0 = np.array(case["x0"], dtype=np.float64)
        self.x, self.y = ti.field(ti.f64, shape=self.x0.size), ti.field(ti.f64, shape=case["m"])
        self.scope: dict[str, Any] = {"__name__": "construct", "x": self.x, "y": self.y, "X0": self.x0}
        name, text = f"<construct {number}>", f"{HEAD}{case['pre']}\n{kernel_text(case)}\n{case['extra']}\n"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        exec(compile(text, name, "exec", dont_inherit=True), self.scope)
        self.tolerance = SINGLE_PRECISION if "f32" in text else TOLERANCE

    def start(self) -> Any:
        """The state before a run; returns the function to run."""
        self.y.fill(0)
        self.scope.get("reset_extra", lambda: None)()
        self.x.from_numpy(self.x0)
        return self.scope["run"]

    def compare_sparse(self) -> None:
        """CSR arrays have the entries of the dense J, and the program leaves the same outputs."""
        dense = jacobian(self.start(), self.x, self.y)
        after = self.y.to_numpy()
        sparse = jacobian(self.start(), self.x, self.y, format="csr")
        self.require_equal("sparse J", sparse.toarray(), dense)
        self.require_equal("the outputs with a sparse J", self.y.to_numpy(), after)

    def compare_products(self) -> None:
        """``vjp`` is ``jvp`` transposed, and both are J."""
        rng = np.random.default_rng(7)
        directions, cotangents = rng.standard_normal((2, self.x0.size)), rng.standard_normal((2, self.y.shape[0]))
        J = jacobian(self.start(), self.x, self.y)
        forward = jvp(self.start(), self.x, directions, self.y)
        backward = vjp(self.start(), self.x, self.y, cotangents)
        self.require_equal("jvp", forward, directions @ J.T)
        self.require_equal("vjp", backward, cotangents @ J)
        self.require_equal("vjp beside jvp", backward @ directions.T, cotangents @ forward.T)

    def require_equal(self, what: str, found: np.ndarray, expected: np.ndarray) -> None:
        """The same shape, and the same numbers to rounding."""
        if found.shape != expected.shape:
            raise DifferentError(f"{what} has shape {found.shape}, expected {expected.shape}")
        scale = 1 + np.max(np.abs(expected), initial=0, where=np.isfinite(expected))
        if not np.allclose(found, expected, rtol=self.tolerance, atol=self.tolerance * scale, equal_nan=True):
            raise DifferentError(f"{what} is {found.tolist()}, expected {expected.tolist()}")


def kernel_text(case: dict[str, Any]) -> str:
    """The kernel of a program that is one kernel, and the function that runs it."""
    if case["pipeline"]:
        return ""
    returned = " -> ti.f64" if "return x[0]" in case["body"] else ""
    return f"@ti.kernel\ndef k(){returned}:\n{textwrap.indent(case['body'], '  ')}\ndef run():\n  k()\n"


def verdicts_of(case: dict[str, Any], number: int) -> dict[str, str]:
    """By comparison: "equal", or what went wrong."""
    found = {}
    for name in ("sparse", "products")[: 1 if case["pipeline"] else 2]:
        try:
            getattr(Construct(case, number), f"compare_{name}")()
            found[name] = "equal"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def run_all(file: str, words: list[str]) -> bool:
    """Run all programs in separate processes; print those that are not equal, and the counts."""
    cases = runpy.run_path(file)["CASES"]
    left = [n for n, c in enumerate(cases) if not words or any(word in c["name"] for word in words)]
    counts: collections.Counter[str] = collections.Counter()
    while left:
        batch, left = left[:PER_PROCESS], left[PER_PROCESS:]
        command = [sys.executable, __file__, "--here", file, *map(str, batch)]
        done = subprocess.run(command, capture_output=True, text=True)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"number"')]
        if len(lines) < len(batch):
            lines.append({"number": batch[len(lines)], "found": {"process": f"died: {done.stderr[-1000:]}"}})
            left = batch[len(lines) :] + left
        for line in lines:
            for name, verdict in line["found"].items():
                counts[f"{name}: {verdict.split(':')[0]}"] += 1
                if verdict != "equal":
                    print(f"{cases[line['number']]['name']}, {name}: {verdict[:600]}", flush=True)
    print(dict(sorted(counts.items())))
    return all(key.endswith(": equal") for key in counts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", help="the file")
    parser.add_argument("words", nargs="*", help="parts of names, default all programs")
    parser.add_argument("--here", action="store_true", help="the words are numbers of programs, for this process")
    options = parser.parse_args()
    if not options.here:
        return 0 if run_all(options.cases, options.words) else 1
    cases = runpy.run_path(options.cases)["CASES"]
    for number in map(int, options.words):
        print(json.dumps({"number": number, "found": verdicts_of(cases[number], number)}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
