"""The programs in ``examples/``, loaded and run in this process."""

import importlib
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import devices
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load(name: str) -> ModuleType:
    """The module of an example, as Python finds it for one that runs in that folder."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)


def run(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str] | None = None
) -> str:
    """The output of an example; it must exit with 0 and print no failed line.  Some take arguments."""
    if devices.is_single():
        pytest.skip("CPU only: examples start Taichi themselves")
    monkeypatch.setitem(os.environ, "TI_CPU_MAX_NUM_THREADS", "2")
    monkeypatch.setitem(os.environ, "TI_OFFLINE_CACHE", "0")
    arguments = [] if arguments is None else arguments
    with tempfile.TemporaryDirectory() as folder:
        output = [] if "--output" in arguments else ["--output", str(Path(folder) / f"{name}.png")]
        exit_code = load(name).main([*arguments, *output])
    printed = capsys.readouterr().out
    assert exit_code == 0, printed
    assert "FAIL" not in printed
    assert "  ok  " in printed
    return printed
