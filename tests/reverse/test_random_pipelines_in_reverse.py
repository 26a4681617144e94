"""Random pipelines in reverse mode against an interpreter of the same text: views, stores of Python, memory drawn.

``python -m pytest -m sweep tests/reverse/test_random_pipelines_in_reverse.py`` runs 60 of them.
"""

import devices
import program_offsets
import pytest
from program_pipeline_check import PipelineWorkshop, describe_pipeline
from program_pipelines import generate
from program_reverse_check import reverse_verdict
from taichi_program import end_program

SEEDS = (2, 23, 46, 134)  # views that overlap, sums of each thread, a returned number that is passed on
SWEPT = range(1000, 1060)  # every second one with fields that begin at other indices than 0


@pytest.fixture(scope="module")
def workshop():
    yield PipelineWorkshop()
    end_program()


@pytest.mark.mostly_sweep("2")
@pytest.mark.parametrize("seed", [*SEEDS, *SWEPT])
def test_random_pipelines_in_reverse_mode(workshop, monkeypatch, seed):
    monkeypatch.setattr(program_offsets, "IS_DRAWN", seed in SWEPT and seed % 2 == 0)
    program = generate(seed, "f32" if devices.is_single() else None)
    if "torch" in program.text:
        pytest.importorskip("torch")
    kind, message = reverse_verdict(program, seed, workshop)
    if kind == "rejected":
        pytest.skip(f"it cannot be judged: {message}")
    assert kind == "right", f"{message}\n{describe_pipeline(program)}"
