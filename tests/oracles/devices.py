"""The suite on another device than the CPU: in float32, compared with the results of a run on the CPU in float64.

Differences in float32 say little, and Vulkan has no sine in float64. So each module of tests runs twice: in a separate
process on the CPU, which records the expected values of each comparison, and on the device, where ``ti.f64`` is
``ti.f32`` and the same comparisons must hold with the tolerances of float32.
"""

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import taichi as ti

import taichi_ext

RTOL = 1e-3
ATOL = 1e-4  # of the largest entry, and of 1
IN_SINGLE = ("vulkan", "metal")  # backends without float64, or with a part of it

ROUNDING = 1e-6
MISTAKES = (TypeError, ValueError, AttributeError, KeyError, IndexError, NameError)  # of the test: float64 arrays, say

_exact, _equal, _approx = np.testing.assert_allclose, np.testing.assert_array_equal, pytest.approx


class Comparisons:
    """The expected values of the comparisons of each test, in their order."""

    def __init__(self) -> None:
        self.known: dict[str, list[Any]] = {}
        self.test = ""
        self.place = 0

    def begin(self, test: str) -> None:
        """The comparisons that follow belong to this test."""
        self.test, self.place = test, 0


class Recorder(Comparisons):
    """On the CPU: records the expected values."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def assert_allclose(self, actual: Any, desired: Any, *args: Any, **options: Any) -> None:
        """NumPy's, which also notes the desired value."""
        _exact(actual, desired, *args, **options)
        self.plain_run([desired])

    def plain_run(self, values: Iterable[Any]) -> None:
        """Note the state after a plain run."""
        self.known.setdefault(self.test, []).extend(np.array(v) for v in values)

    def end(self) -> None:
        """Write the notes."""
        Path(self.path).write_bytes(pickle.dumps(self.known))


class Device(Comparisons):
    """On the device: compares with the notes."""

    def _next(self) -> Any:
        notes = self.known.get(self.test, ())
        self.place += 1
        return notes[self.place - 1] if self.place <= len(notes) else None

    def assert_allclose(
        self, actual: Any, desired: Any, rtol: float = 0, atol: float = 0, *args: Any, **options: Any
    ) -> None:
        """NumPy's, with the tolerances of float32, for the noted value, or else that of the test itself."""
        noted = self._next()
        try:
            _close(actual, desired if noted is None else noted, rtol, atol, *args, **options)
        except AssertionError:
            if noted is None:
                raise
            try:  # random numbers are others here; NaN where differences were left out
                _close(actual, desired, rtol, atol, *args, **options)
                return
            except AssertionError:
                pass
            raise

    def assert_array_equal(self, actual: Any, desired: Any, *args: Any, **options: Any) -> None:
        """NumPy's, for float32 up to a few roundings."""
        if all(np.asarray(x).dtype.kind == "f" for x in (actual, desired)):
            _exact(actual, desired, ROUNDING, ROUNDING, *args, **options)
        else:
            _equal(actual, desired, *args, **options)

    def approx(self, expected: Any, rel: float | None = None, abs: float | None = None, **options: Any) -> Any:
        """pytest's, with the tolerances of float32."""
        return _approx(expected, rel=max(rel or 0, RTOL), abs=max(abs or 0, ATOL), **options)

    def plain_run(self, values: Iterable[Any]) -> None:
        """Skip the test if the plain kernel, without this package, computes other values here than on the CPU."""
        for value in values:
            noted = self._next()
            try:
                if noted is not None:
                    _close(value, noted, 0, 0)
            except AssertionError as error:
                summary = " ".join(str(error).split())[:200]
                pytest.skip(f"plain Taichi computes something else here than on the CPU: {summary}")

    def end(self) -> None:
        """Nothing to write."""


def _close(actual: Any, desired: Any, rtol: float, atol: float, *args: Any, **options: Any) -> None:
    sizes = np.abs(np.asarray(desired, dtype=np.float64))
    largest = max(1.0, float(np.max(sizes[np.isfinite(sizes)], initial=0)))
    _exact(actual, desired, max(rtol, RTOL), max(atol, ATOL * largest), *args, **options)


current: Recorder | Device | None = None


def plain_run(values: Iterable[Any]) -> None:
    """A kernel has run plainly and left these values."""
    if current is not None:
        current.plain_run(values)


def real(values: Any) -> np.ndarray:
    """Numbers as an array, of float32 where the tests run in it."""
    array = np.array(values)
    return array.astype(np.float32) if is_single() and array.dtype == np.float64 else array


def is_single() -> bool:
    """Whether the tests run in float32 throughout."""
    return isinstance(current, Device)


def start(arch: str, record: str | None) -> None:
    """Replace imports of the test modules, before these are imported."""
    global current
    if record:
        current = Recorder(record)
    elif arch in IN_SINGLE:
        current = Device()
        ti.f64 = ti.float64 = ti.f32
        np.testing.assert_array_equal, pytest.approx = current.assert_array_equal, current.approx
    if current is not None:
        np.testing.assert_allclose = current.assert_allclose


def learn(items: list[pytest.Item], root: Path) -> None:
    """Run tests on the CPU, and take their notes."""
    with tempfile.TemporaryDirectory() as folder:
        notes, names = Path(folder, "notes"), Path(folder, "names")
        names.write_text("\n".join(item.nodeid for item in items))
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "TI_ARCH"))}
        done = subprocess.run(
            [*command, "--record", str(notes), f"@{names}"], cwd=root, env=environment, capture_output=True, text=True
        )
        if not notes.exists() or done.returncode == pytest.ExitCode.USAGE_ERROR:  # as where there is no such test
            raise RuntimeError(f"the run on the CPU has noted nothing:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        current.known.update(pickle.loads(notes.read_bytes()))


def excuse(error: Exception) -> str:
    """Why a test cannot pass on the device; empty if it is a fault of the package or the test."""
    if type(error) in MISTAKES:
        return ""
    message = " ".join(str(error).split())[:200]
    files, frame = [], error.__traceback__
    while frame is not None:
        files.append(Path(frame.tb_frame.f_code.co_filename))
        frame = frame.tb_next
    own, taichi = Path(taichi_ext.__file__).parent, Path(ti.__file__).parent
    plain = (own / "backend" / "lifetime.py", own / "checks")  # around functions of Taichi, and around plain kernels
    fused = [f for f in files if f.is_relative_to(own) and not any(f.is_relative_to(p) for p in plain)]
    is_of_taichi = files[-1].is_relative_to(taichi) and not fused
    return f"plain Taichi: {message}" if is_of_taichi else ""
