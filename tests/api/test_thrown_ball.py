"""The fit of examples/thrown_ball.py."""

import example_programs
import pytest

pytestmark = pytest.mark.cpu_only("a program in float64 that starts Taichi itself")


@pytest.mark.sweep
def test_example_prints_the_expected_numbers(capsys, monkeypatch):
    pytest.importorskip("scipy")
    example_programs.load("thrown_ball")
    assert example_programs.run("thrown_ball", capsys, monkeypatch).count("  ok  ") == 4
