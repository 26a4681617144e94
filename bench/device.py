"""J into an array on the device, over the plain kernel and over a kernel by hand, and tests: one Markdown file.

python bench/device.py --arch cuda --output gpu.md          at most 8 minutes
python bench/device.py --arch cpu --only sphere --no-tests  a dry run
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import taichi as ti
from report import describe, markdown_table
from timing import time_first, time_in_turn

from taichi_ext import Jacobian, hessian, value_and_gradient

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 480  # in all
FOR_TESTS = 240
PLAIN, OURS, HAND = "plain", "derivative", "by hand"
Calls = dict[str, Callable[[], object]]


def dense(make: str, *given: int) -> Calls:
    """J of a program of ``programs.py``, without a copy to the host; compared with the kernel by hand."""
    import programs

    program = getattr(programs, make)(*given)
    out, by_hand = (ti.ndarray(ti.f32, program.jacobian_shape) for _ in range(2))
    plan = Jacobian(program.kernel, program.params, program.outputs)
    plan(out=out)
    program.hand_kernel(by_hand)
    programs.assert_same_jacobian(out.to_numpy(), by_hand.to_numpy(), program.point.size)
    return {PLAIN: program.kernel, OURS: partial(plan, out=out), HAND: partial(program.hand_kernel, by_hand)}


def springs_csr() -> Calls:
    """The sparse J of a cloth; its numbers are copied to the host."""
    import programs

    program = programs.make_springs()
    return {
        PLAIN: program.kernel,
        OURS: Jacobian(program.kernel, program.params, program.outputs, format="csr"),
    }


def second_derivatives() -> Calls:
    """H of springs, in csr."""
    import hessian_programs

    program = hessian_programs.springs()
    return {
        PLAIN: program.kernel,
        OURS: partial(hessian, program.kernel, program.x, program.energy, format="csr"),
        HAND: program.by_hand,
    }


def reverse() -> Calls:
    """The gradient of a wave of 50 steps, in reverse mode."""
    import reverse_programs

    program = reverse_programs.wave()
    return {PLAIN: program.run, OURS: partial(value_and_gradient, program.run, program.params, program.loss)}


CASES: dict[str, Callable[[], Calls]] = {
    "sphere": partial(dense, "make_sphere"),
    "soft spheres, N = 16": partial(dense, "make_soft_spheres", 16),
    "volume": partial(dense, "make_volume"),
    "network": partial(dense, "make_network"),
    "springs, csr": springs_csr,
    "springs, H in csr": second_derivatives,
    "wave, reverse mode": reverse,
}


def measure(name: str, arch: str, seconds: float) -> list[str]:
    """A row of the table: milliseconds and ratios, or why there are none."""
    ti.init(
        arch=getattr(ti, arch),
        default_fp=ti.f64 if "H in" in name else ti.f32,
        offline_cache=False,
        log_level=ti.ERROR,
        force_scalarize_matrix=True,
    )
    try:
        calls = {kind: partial(_synced, call) for kind, call in CASES[name]().items()}
        first = {kind: time_first(call) for kind, call in calls.items()}
        found = {kind: timing.median for kind, timing in time_in_turn(calls, first, seconds).items()}
    except Exception as error:  # the next program is measured all the same
        return [name, f"{type(error).__name__}: {_one_line(error)}", "", "", "", ""]
    milliseconds = [f"{1e3 * found[kind]:.3g}" if kind in found else "" for kind in (PLAIN, OURS, HAND)]
    ratios = [f"{found[OURS] / found[kind]:.2f}" if kind in found else "" for kind in (PLAIN, HAND)]
    return [name, *milliseconds, *ratios]


def _synced(call: Callable[[], object]) -> None:
    call()
    ti.sync()


def _one_line(error: object) -> str:
    lines = str(error).strip().splitlines() or [""]
    return lines[-1].replace("|", "/")[:160]


def failures(arch: str, seconds: float) -> list[str]:
    """The tests of ``device_tests.txt`` that fail, a line each; and how many there were."""
    command = [sys.executable, "-m", "pytest", "-v", "--tb=line", "-p", "no:cacheprovider", "--arch", arch]
    command += ["-o", "addopts=", f"@{ROOT / 'bench' / 'device_tests.txt'}"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
        text, end = done.stdout + done.stderr, ""
    except subprocess.TimeoutExpired as error:
        text, end = (error.stdout or b"").decode(errors="replace"), f"ended after {seconds:.0f} s"
    found = re.findall(r"^(tests/\S+(?:\[.*\])?) (?:FAILED|ERROR)", text, re.MULTILINE)
    reasons = re.findall(r"^(?:FAILED|ERROR) (tests/.*?) - (.*)$", text, re.MULTILINE)
    lines = [f"* `{name}`: {dict(reasons).get(name, 'see the log')[:160]}" for name in found]
    count = len(re.findall(r" (?:PASSED|FAILED|ERROR|SKIPPED)", text))
    return [f"{count} tests, {len(found)} failures. {end or _one_line(text)}", "", *lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default="cuda", help="of Taichi: cuda, vulkan, cpu")
    parser.add_argument("--output", type=Path, default=Path("gpu.md"))
    parser.add_argument("--only", default="", help="programs whose name contains this")
    parser.add_argument("--no-tests", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("TI_ENABLE_TORCH", "0")
    began = time.monotonic()
    head = ["program", "plain, ms", "derivative, ms", "by hand, ms", "over plain", "over by hand"]
    rows: list[list[str]] = []

    def write(tests: list[str]) -> None:
        text = ["# On a device", "", describe("wall time", "float32, H in float64"), "", markdown_table(head, rows), ""]
        options.output.write_text("\n".join([*text, *tests, ""]), encoding="utf-8")

    for name in CASES:
        if options.only in name and time.monotonic() - began < SECONDS - FOR_TESTS:
            rows.append(measure(name, options.arch, 2.0))
            print(*rows[-1], sep=", ", flush=True)
            write([])  # what there is, if the machine is taken away
    if not options.no_tests:
        write(failures(options.arch, SECONDS - 10 - (time.monotonic() - began)))
    print(f"written: {options.output}, after {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    np.seterr(all="ignore")
    main()
