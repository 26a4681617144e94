"""An example with sparse Jacobians."""

import example_programs


def test_bundle_adjustment(capsys, monkeypatch, tmp_path):
    printed = example_programs.run(
        "bundle_adjustment", capsys, monkeypatch, ["--output", str(tmp_path / "picture.png")]
    )
    assert printed.count("  ok  ") == 3
