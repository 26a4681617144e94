"""``Jacobian.export``: the module that it writes runs in a process without taichi_ext, and gives the same bits."""

import subprocess
import sys

import numpy as np
import pytest
import taichi as ti

from taichi_ext import DerivativeWarning, InvalidArgumentError, Jacobian, UnsupportedError, backend

pytestmark = [
    pytest.mark.usefixtures("ti64"),
    pytest.mark.cpu_only("another process would have to start the same device"),
]


@pytest.fixture
def fields(ti64):
    x, v, y = ti.field(ti.f64, 3), ti.Vector.field(2, ti.f64, 4), ti.field(ti.f64, (4, 2))
    x.from_numpy(np.array([0.3, 0.7, 1.1]))
    v.from_numpy(np.linspace(0.1, 0.9, 8).reshape(4, 2))
    return x, v, y


@ti.func
def wave(a, b):
    return ti.sin(a) * ti.Vector([b, a])


def make_kernels(x, v, y):
    @ti.kernel
    def directly():
        for i in v:
            w = wave(v[i][0], x[i % 3])
            for k in ti.static(range(2)):
                y[i, k] = w[k] * 1.5 + v[i].norm()

    @ti.kernel
    def in_place():
        for i in x:
            x[i] = x[i] * x[i] * 0.5

    @ti.kernel
    def by_arrays(a: ti.types.ndarray(ti.f64, ndim=1), b: ti.types.ndarray(ti.f64, ndim=1), s: ti.f64) -> ti.f64:
        total = 0.0
        for i in range(3):
            b[i] = a[i] * s
        for i in range(3):
            total += b[i] * x[i]
        return total

    return directly, in_place, by_arrays


# The same containers in a process of its own; argv: folder with the modules and J as the plan gave it, order in memory
RUN = """
import sys
import numpy as np, taichi as ti
ti.init(ti.cpu, default_fp=ti.f64, offline_cache=False, cpu_max_num_threads=2)
sys.path.insert(0, sys.argv[1])
import directly, in_place, by_arrays
x, v, y = ti.field(ti.f64, 3), ti.Vector.field(2, ti.f64, 4), ti.field(ti.f64, (4, 2))
x.from_numpy(np.array([0.3, 0.7, 1.1]))
v.from_numpy(np.linspace(0.1, 0.9, 8).reshape(4, 2))
expected = np.load(sys.argv[1] + "/expected.npz")


def read(J):
    return J if sys.argv[2] == "row by row" else J.reshape(J.shape[::-1]).T


run = directly.bind(x=x, v=v, y=y)
for _ in range(2):
    J = np.full((8, 11), np.nan)
    run(J)
    assert (read(J) == expected["directly"]).all()
assert (y.to_numpy() == expected["y"]).all()
for wrong in (np.zeros((8, 10)), np.zeros((11, 8)).T):
    try:
        run(wrong)
    except ValueError:
        pass
    else:
        raise AssertionError("accepted")
try:
    directly.bind(x=y, v=v, y=y)
except ValueError:
    pass
else:
    raise AssertionError("accepted")

a, b = np.array([0.2, 0.4, 0.8]), np.zeros(3)
J, run = np.full((1, 4), np.nan), by_arrays.bind(a=a, b=b, s=1.25, x=x)
for _ in range(2):  # the tangents of b are in memory of the module
    assert run(J) == expected["result"]
    assert (read(J) == expected["returned"]).all()

J = np.full((3, 3), np.nan)
in_place.bind(x=x)(J)
assert (read(J) == expected["in_place"]).all() and (x.to_numpy() == expected["x"]).all()
assert not any(name.startswith("taichi_ext") for name in sys.modules)
"""


def columns(blocks, rows):
    """The blocks of one output side by side, as one matrix."""
    return np.concatenate([np.asarray(b).reshape(rows, -1) for b in blocks], axis=1)


@pytest.mark.chosen_only("what it looks at is that of one run", "--chunk-size")
def test_modules_run_without_the_package_and_give_the_same_bits(fields, tmp_path):
    x, v, y = fields
    directly, in_place, by_arrays = make_kernels(*fields)
    before, expected = x.to_numpy(), {}
    plan = Jacobian(directly, (x, v), y)
    expected["directly"], expected["y"] = columns(plan(), 8), y.to_numpy()
    plan.export(tmp_path / "directly.py")
    a, b = np.array([0.2, 0.4, 0.8]), np.zeros(3)
    plan = Jacobian(by_arrays, ("a", "s"), args=(a, b, 1.25))
    expected["returned"] = columns(plan(), 1)
    expected["result"] = plan.value()
    plan.export(str(tmp_path / "by_arrays.py"))
    plan = Jacobian(in_place, x, x)
    expected["in_place"], expected["x"] = plan(), x.to_numpy()
    plan.export(tmp_path / "in_place.py")
    x.from_numpy(before)
    np.savez(tmp_path / "expected.npz", **expected)
    text = (tmp_path / "directly.py").read_text()
    order = "column by column" if backend.stores_by_column() else "row by row"
    assert f"The arrays of J are contiguous, {order}:" in text
    command = [sys.executable, "-c", RUN, str(tmp_path), order]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "test_export.py:" in text
    assert plan.source in (tmp_path / "in_place.py").read_text() or "def make(x):" in plan.source


NAMES = """
import sys
import numpy as np, taichi as ti
ti.init(ti.cpu, default_fp=ti.f64, offline_cache=False, cpu_max_num_threads=2)
sys.path.insert(0, sys.argv[1])
import collected
particle = ti.types.struct(p=ti.types.vector(2, ti.f64), m=ti.f64)
particles, grids = particle.field(shape=2), [ti.field(ti.f64, 2), ti.field(ti.f64, 2)]
make, kernel, total = ti.field(ti.f64, 2), ti.field(ti.f64, ()), ti.field(ti.f64, ())
math = ti.Vector.ndarray(2, ti.f64, 2)
grids[1].fill(0.7)
particles.p.fill(0.5)
make.fill(0.3)
math.fill(0.2)
given = dict(particles_p=particles.p, particles_m=particles.m, grids_0=grids[0], grids_1=grids[1], make=make)
run = collected.bind(**given, kernel=kernel, target=total, math=math)
expected = np.load(sys.argv[1] + "/collected.npz")
by_total, by_kernel = np.full((1, 8), np.nan), np.full((1, 8), np.nan)
run(by_total, by_kernel)
assert (by_total == expected["total"]).all() and (by_kernel == expected["kernel"]).all()
"""


@pytest.mark.chosen_only("what it looks at is that of one run", "--chunk-size")
def test_fields_are_bound_by_the_names_of_the_source_and_outputs_come_in_their_order(ti64, tmp_path):
    particle = ti.types.struct(p=ti.types.vector(2, ti.f64), m=ti.f64)
    particles, grids = particle.field(shape=2), [ti.field(ti.f64, 2), ti.field(ti.f64, 2)]
    make, kernel, total = ti.field(ti.f64, 2), ti.field(ti.f64, ()), ti.field(ti.f64, ())
    math = ti.Vector.ndarray(2, ti.f64, 2)

    @ti.kernel
    def collected(target: ti.template(), math: ti.types.ndarray(ti.types.vector(2, ti.f64), ndim=1)):
        for i in particles:
            particles[i].m = particles[i].p.norm() * math[i][1]
            grids[0][i] = grids[1][i] * particles[i].m
            kernel[None] += grids[0][i] * make[i]
        for i in particles:
            target[None] += particles[i].m * make[i]

    grids[1].fill(0.7)
    particles.p.fill(0.5)
    make.fill(0.3)
    math.fill(0.2)
    plan = Jacobian(collected, (particles.p, grids[1], make), (total, kernel), args=(total, math))
    J = plan()
    np.savez(tmp_path / "collected.npz", total=columns(J[0], 1), kernel=columns(J[1], 1))
    plan.export(tmp_path / "collected.py")
    text = (tmp_path / "collected.py").read_text()
    assert "grids[1] of shape (2,)" in text.split("grids_1: ")[1].splitlines()[0]
    command = [sys.executable, "-c", NAMES, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.chosen_only("what it looks at is that of one run", "--chunk-size")
def test_what_cannot_be_exported_says_why(fields, tmp_path):
    x, v, y = fields
    directly = make_kernels(*fields)[0]

    @ti.kernel
    def with_constants():
        for i in x:
            y[i, 0] = x[i]
            v[i] = ti.Vector([1.0, 2.0])

    path = tmp_path / "module.py"
    plan = Jacobian(directly, x, y)
    with pytest.raises(InvalidArgumentError, match="has not been called yet"):
        plan.export(path)
    plan = Jacobian(directly, x, y, chunk_size=2)
    plan()
    with pytest.raises(InvalidArgumentError, match="blocks of columns"):
        plan.export(path)
    plan = Jacobian(with_constants, x, (y, v))
    with pytest.warns(DerivativeWarning, match="field v"):
        plan()
    with pytest.raises(UnsupportedError, match="field v of shape .* nothing to export"):
        plan.export(path)
    plan = Jacobian(lambda: directly(), x, y)
    plan()
    with pytest.raises(UnsupportedError, match="Export the Jacobian of a single kernel"):
        plan.export(path)
    assert not path.exists()
