"""``Jacobian.export``: the module that it writes runs in a process without taichi_ext, and gives the same bits."""

import subprocess
import sys

import numpy as np
import pytest
import taichi as ti
from kernel_texts import func_of, kernel_of

from taichi_ext import DerivativeWarning, InvalidArgumentError, Jacobian, UnsupportedError

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


wave = func_of("return ti.sin(a) * ti.Vector([b, a])", "a, b")


def make_kernels(x, v, y):
    @ti.kernel
    def directly():
        for i in v:
            w = wave(v[i][0], x[i % 3])
            for k in ti.static(range(2)):
                y[i, k] = w[k] * 1.5 + v[i].norm()

    in_place = kernel_of("in_place: for i in x: x[i] = x[i] * x[i] * 0.5", x=x)

    @ti.kernel
    def by_arrays(a: ti.types.ndarray(ti.f64, ndim=1), b: ti.types.ndarray(ti.f64, ndim=1), s: ti.f64) -> ti.f64:
        total = 0.0
        for i in range(3):
            b[i] = a[i] * s
        for i in range(3):
            total += b[i] * x[i]
        return total

    return directly, in_place, by_arrays


# The same containers in a process of its own; argv: folder with the modules and J as the plan gave it
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
run = directly.bind(x=x, v=v, y=y)
for _ in range(2):
    by_x, by_v = np.full((4, 2, 3), np.nan), np.full((4, 2, 4, 2), np.nan)
    run(by_x, by_v)
    assert (by_x == expected["directly_by_x"]).all() and (by_v == expected["directly_by_v"]).all()
assert (y.to_numpy() == expected["y"]).all()
by_x = ti.ndarray(ti.f64, (4, 2, 3))
run(by_x, by_v)
assert (by_x.to_numpy() == expected["directly_by_x"]).all()
for wrong in (np.zeros((4, 2, 4)), np.zeros((3, 4, 2)), np.zeros((2, 4, 3)).transpose(1, 0, 2), np.zeros(24)):
    try:
        run(wrong, by_v)
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
by_a, by_s, run = np.full(3, np.nan), np.full((), np.nan), by_arrays.bind(a=a, b=b, s=1.25, x=x)
for _ in range(2):  # the tangents of b are in memory of the module
    assert run(by_a, by_s) == expected["result"]
    assert (by_a == expected["by_a"]).all() and by_s == expected["by_s"]

J = np.full((3, 3), np.nan)
in_place.bind(x=x)(J)
assert (J == expected["in_place"]).all() and (x.to_numpy() == expected["x"]).all()
assert not any(name.startswith("taichi_ext") for name in sys.modules)
"""


@pytest.mark.sweep
@pytest.mark.chosen_only("what it looks at is that of one run", "--chunk-size")
def test_modules_run_without_the_package_and_give_the_same_bits(fields, tmp_path):
    x, v, y = fields
    directly, in_place, by_arrays = make_kernels(*fields)
    before, expected = x.to_numpy(), {}
    plan = Jacobian(directly, (x, v), y)
    expected["directly_by_x"], expected["directly_by_v"] = plan()
    expected["y"] = y.to_numpy()
    plan.export(tmp_path / "directly.py")
    a, b = np.array([0.2, 0.4, 0.8]), np.zeros(3)
    plan = Jacobian(by_arrays, ("a", "s"), args=(a, b, 1.25))
    expected["by_a"], expected["by_s"] = plan()
    expected["result"] = plan.value()
    plan.export(str(tmp_path / "by_arrays.py"))
    plan = Jacobian(in_place, x, x)
    expected["in_place"], expected["x"] = plan(), x.to_numpy()
    plan.export(tmp_path / "in_place.py")
    x.from_numpy(before)
    np.savez(tmp_path / "expected.npz", **expected)
    text = (tmp_path / "directly.py").read_text()
    assert "run(d_y_by_x, d_y_by_v)" in text
    command = [sys.executable, "-c", RUN, str(tmp_path)]
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
J = [np.full(expected[name].shape, np.nan) for name in expected]
run(*J)
assert all((found == expected[name]).all() for name, found in zip(expected, J))
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
    np.savez(tmp_path / "collected.npz", *J[0], *J[1])
    plan.export(tmp_path / "collected.py")
    text = (tmp_path / "collected.py").read_text()
    assert "    grids_1: a dense field of f64, shape (2,)" in text
    program = NAMES.replace("threads=2", f"threads={ti.cfg.cpu_max_num_threads}")
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.chosen_only("what it looks at is that of one run", "--chunk-size")
def test_what_cannot_be_exported_says_why(fields, tmp_path):
    x, v, y = fields
    directly = make_kernels(*fields)[0]
    with_constants = kernel_of("for i in x: y[i, 0] = x[i]; v[i] = ti.Vector([1.0, 2.0])", x=x, y=y, v=v)
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
