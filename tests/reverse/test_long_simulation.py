"""examples/wave_speeds.py: a map of wave speeds by gradients through 300 steps."""

import example_programs
import pytest


@pytest.mark.sweep
def test_example(capsys, monkeypatch):
    example = example_programs.load("wave_speeds")
    monkeypatch.setattr(example, "ITERATIONS", 6)
    printed = example_programs.run("wave_speeds", capsys, monkeypatch)
    assert "misfit" in printed
