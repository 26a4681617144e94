"""Figures as Markdown: tables, the machine that they come from, and their place in a document."""

import datetime
import json
import os
import platform
import re
import subprocess
import textwrap
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import taichi as ti

PACKAGES = ["taichi", "taichi-ext", "numpy", "jax", "asdex", "torch", "warp-lang", "drjit"]


def describe(clock_name: str, precision: str = "float32") -> str:
    """Machine, versions of what is installed, and conventions, as Markdown."""
    names = [f"{package} {_version(package)}" for package in PACKAGES if _version(package)]
    return textwrap.fill(
        f"{datetime.date.today()}, {_processor()}, {os.cpu_count()} cores, {platform.system()}; Python "
        f"{platform.python_version()}, {', '.join(names)}. Device {_device()}, {precision}, {clock_name}, medians.",
        120,
    )


def markdown_table(head: list[str], rows: list[list[str]]) -> str:
    """A table with its numbers on the right."""
    lines = [head, ["---"] + ["--:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def add_to_history(path: Path, clock_name: str, figures: dict) -> None:
    """Append one line of JSON to a file: date, commit, versions, machine and figures (NaN where one is missing)."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    versions = {package: _version(package) for package in PACKAGES if _version(package)}
    record = {"date": str(datetime.date.today()), "commit": commit, "versions": versions, "clock": clock_name}
    record |= {"processor": _processor(), "cores": os.cpu_count(), "device": _device(), **figures}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def write_report(path: Path, name: str, text: str) -> None:
    """Put text between the comments ``<!-- name -->`` and ``<!-- end of name -->`` of a file, or write a new file."""
    start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    section = f"{start}\n\n{text.strip()}\n\n{end}"
    document = path.read_text(encoding="utf-8") if path.exists() else f"{start}{end}\n"
    if document.count(start) != 1 or document.count(end) != 1:
        raise ValueError(f"{path} has no place for the figures: one {start} and one {end}")
    pattern = re.escape(start) + ".*" + re.escape(end)
    path.write_text(re.sub(pattern, lambda _: section, document, flags=re.DOTALL), encoding="utf-8")


def _version(package: str) -> str:
    """The version of an installed package; empty for others."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _device() -> str:
    """What Taichi runs on: ``CPU``, or the backend and the name of the GPU."""
    backend = ti.cfg.arch.name
    if backend in ("x64", "arm64"):
        return "CPU"
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        name = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        name = "of unknown name"
    return f"{backend}: {name}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
