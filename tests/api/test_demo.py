"""The demonstration, run as a user runs it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu_only("a program that starts Taichi itself")

ROOT = Path(__file__).resolve().parents[2]


def run_demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "taichi_ext", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", timeout=900, stdin=subprocess.DEVNULL
    )


@pytest.fixture(scope="module")
def done():
    return run_demo()


def numbers_after(label: str, text: str) -> list[list[float]]:
    """The numbers of every line of the text that begins with the label."""
    lines = [line.strip()[len(label) :] for line in text.splitlines() if line.strip().startswith(label)]
    return [[float(number) for number in re.findall(r"-?\d+\.?\d*(?:e[-+]\d+)?", line)] for line in lines]


@pytest.mark.sweep
def test_every_check_holds(done):
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED" not in done.stdout
    assert sum(line.strip().startswith("ok ") for line in done.stdout.splitlines()) == 4


@pytest.mark.sweep
@pytest.mark.parametrize("method", ["taichi_ext", "FwdMode"])
def test_figures_are_those_of_the_closed_form(done, method):
    pixel, sums = numbers_after(method + " ", done.stdout)[:2]
    assert pixel == pytest.approx([-1.000078, 0.107752, 0.107752, 0.988400], rel=1e-5, abs=2e-6)
    assert sums == pytest.approx([-10500.16, 474.597, 474.597, 5872.767], rel=1e-3)


@pytest.mark.sweep
def test_fit_reaches_the_true_sphere(done):
    (last,) = numbers_after("step 4", done.stdout)
    assert last[:4] == pytest.approx([10, 10, 10, 100], abs=1e-4)


@pytest.mark.sweep
def test_times_are_printed_side_by_side(done):
    for label in ("the kernel alone", "jacobian, one launch", "FwdMode, 4 launches"):
        ((first, warm),) = numbers_after(label, done.stdout)
        assert 0 < warm < first * 100


@pytest.mark.sweep
def test_help_names_the_option():
    done = run_demo("--help")
    assert done.returncode == 0
    assert "--arch" in done.stdout
