"""The examples with sparse Jacobians."""

import example_programs
import pytest


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "arguments", "lines"), [("cloth", None, 3), ("hand_tracking", [], 4)])
def test_example_prints_the_expected_numbers(name, arguments, lines, capsys, monkeypatch):
    assert example_programs.run(name, capsys, monkeypatch, arguments).count("  ok  ") == lines


def test_bundle_adjustment(capsys, monkeypatch, tmp_path):
    printed = example_programs.run(
        "bundle_adjustment", capsys, monkeypatch, ["--output", str(tmp_path / "picture.png")]
    )
    assert printed.count("  ok  ") == 3
