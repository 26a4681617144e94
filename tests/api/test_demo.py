"""The demonstration, run as a user runs it."""

import re
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu_only("a program that starts Taichi itself")

ROOT = Path(__file__).resolve().parents[2]


def run_demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "taichi_ext", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", timeout=900, stdin=subprocess.DEVNULL
    )


def read_png(path: Path) -> tuple[int, int, bytes]:
    """Width, height and the filtered scan lines of a PNG, every checksum tested."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, header, packed, last = 8, b"", b"", b""
    while at < len(data):
        length, last = struct.unpack(">I4s", data[at : at + 8])
        body = data[at + 8 : at + 8 + length]
        (checksum,) = struct.unpack(">I", data[at + 8 + length : at + 12 + length])
        assert checksum == zlib.crc32(last + body)
        header = body if last == b"IHDR" else header
        packed += body if last == b"IDAT" else b""
        at += 12 + length
    assert last == b"IEND"
    width, height, depth, color_type = struct.unpack(">IIBB", header[:10])
    assert (depth, color_type) == (8, 2)
    return width, height, zlib.decompress(packed)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    picture = tmp_path_factory.mktemp("demo") / "picture.png"
    return run_demo("--output", str(picture)), picture


def numbers_after(label: str, text: str) -> list[list[float]]:
    """The numbers of every line of the text that begins with the label."""
    lines = [line.strip()[len(label) :] for line in text.splitlines() if line.strip().startswith(label)]
    return [[float(number) for number in re.findall(r"-?\d+\.?\d*(?:e[-+]\d+)?", line)] for line in lines]


@pytest.mark.sweep
def test_every_check_holds_and_figures_are_those_of_the_closed_form(demo):
    done, _ = demo
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED" not in done.stdout
    assert sum(line.strip().startswith("ok ") for line in done.stdout.splitlines()) == 4
    for method in ("taichi_ext", "FwdMode"):
        pixel, sums = numbers_after(method + " ", done.stdout)[:2]
        assert pixel == pytest.approx([-1.000078, 0.107752, 0.107752, 0.988400], rel=1e-5, abs=2e-6)
        assert sums == pytest.approx([-10500.16, 474.597, 474.597, 5872.767], rel=1e-3)
    (last,) = numbers_after("step 4", done.stdout)
    assert last[:4] == pytest.approx([10, 10, 10, 100], abs=1e-4)
    for label in ("the kernel alone", "jacobian, one launch", "FwdMode, 4 launches"):
        ((first, warm),) = numbers_after(label, done.stdout)
        assert 0 < warm < first * 100


@pytest.mark.sweep
def test_picture_is_a_png_with_many_colours(demo):
    _, path = demo
    width, height, lines = read_png(path)
    assert width >= 1200
    assert height >= 800
    assert len(lines) == height * (1 + 3 * width)
    assert len(set(lines)) > 100


@pytest.mark.sweep
def test_options(tmp_path):
    for output in ("picture.jpg", str(tmp_path / "missing" / "picture.png")):
        done = run_demo("--output", output)
        assert done.returncode == 2
        assert "--output" in done.stderr
    assert all(option in run_demo("--help").stdout for option in ("--arch", "--output"))
