"""Start Taichi once for all benchmarks, keep their medians, and print them as ratios at the end."""

import functools
import os
import platform
from importlib.metadata import version

import numpy as np
import pytest
import taichi as ti

MEDIANS = pytest.StashKey[dict[tuple[str, str], float]]()
# Both sides of a ratio run under the same settings. FwdMode needs force_scalarize_matrix for a kernel with vectors.
SETTINGS = {"force_scalarize_matrix": True, "offline_cache": False, "log_level": ti.WARN}


def pytest_addoption(parser):
    group = parser.getgroup("taichi_ext benchmarks")
    group.addoption("--arch", default="cpu", choices=("cpu", "cuda", "vulkan", "metal"), help="default: cpu")
    group.addoption("--spheres", default="1,4,16", metavar="N,N,...", help="counts of soft spheres, default 1,4,16")


def pytest_configure(config):
    config.stash[MEDIANS] = {}


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        counts = [int(count) for count in metafunc.config.getoption("--spheres").split(",") if count]
        cases = ["sphere", *(f"soft spheres, N = {count}" for count in counts)]
        metafunc.parametrize("case", cases, scope="session")


@pytest.fixture(scope="session", autouse=True)
def taichi(request):
    """Taichi, started on the chosen device; the function that starts it."""
    arch = getattr(ti, request.config.getoption("--arch"))
    start = functools.partial(ti.init, arch=arch, **SETTINGS)
    start()
    if ti.cfg.arch != arch:
        pytest.exit(f"Taichi finds no {arch} device here", returncode=2)
    yield start
    ti.reset()


@pytest.fixture
def record(request, benchmark):
    """Time a call with pytest-benchmark and keep its median for the table."""

    def run(case: str, method: str, call, rounds: int):
        benchmark.group = case
        benchmark.extra_info.update(case=case, method=method, arch=request.config.getoption("--arch"), dtype="float32")

        def timed():
            result = call()
            ti.sync()
            return result

        result = benchmark.pedantic(timed, rounds=rounds, warmup_rounds=2)
        if benchmark.stats is not None:
            request.config.stash[MEDIANS][case, method] = benchmark.stats.stats.median
        return result

    return run


def pytest_terminal_summary(terminalreporter, config):
    medians = config.stash[MEDIANS]
    if not medians:
        return
    write = terminalreporter.write_line
    terminalreporter.section("Jacobians: medians in milliseconds, and how many times as long as `jacobian`")
    arch = config.getoption("--arch")
    write(f"device {arch}, {platform.machine()}, {os.cpu_count()} cores; float32; J read to NumPy")
    packages = ", ".join(f"{name} {version(name)}" for name in ("taichi", "numpy", "pytest-benchmark"))
    write(f"Python {platform.python_version()}, {packages}; taichi_ext of this checkout")
    write("sphere: 640 x 480 pixels, 4 parameters; soft spheres: 320 x 240 pixels, 4 N parameters")
    methods = list(dict.fromkeys(method for _, method in medians))
    write("")
    write(f"{'':<24}" + "".join(f"{method:>24}" for method in methods))
    for case in dict.fromkeys(case for case, _ in medians):
        base = medians.get((case, "jacobian"), np.nan)
        cells = []
        for method in methods:
            median = medians.get((case, method), np.nan)
            cells.append(f"{median * 1e3:.2f} ({median / base:.2f} x)")
        write(f"{case:<24}" + "".join(f"{cell:>24}" for cell in cells))
