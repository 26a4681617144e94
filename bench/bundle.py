"""Bundle adjustment by ``least_squares``: steps of Levenberg and Marquardt with the points eliminated.

python bench/bundle.py                       ADBench's ba1 and a synthetic of the size of a published problem
python bench/bundle.py ba2 synthetic         these
python bench/bundle.py synthetic --scipy     compared with SciPy's trf: the time to a cost within 1e-6 of the minimum
python bench/bundle.py problem_01.bin        a file in libmv's format, as in Ceres' repository (data/libmv-ba-problems)
python bench/bundle.py --cpu-time            CPU time of the process, for a machine that is in use

The synthetic problem is none of the published ones: it has the size of BAL's problem-16-22106-pre, 16 cameras, 22,106
points and 83,718 observations, and is drawn at random.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import taichi as ti
from libmv import gtsam_libmv, make_libmv
from report import describe, markdown_table
from sparse_programs import BA_SIZES, SparseProgram, make_bundle_adjustment, turned
from timing import time_first, time_in_turn

from taichi_ext import Jacobian, least_squares

ITERATIONS = 5
MOST_SECONDS = 60.0  # for SciPy's trf
SIZE = (16, 22106, 83718)


def make_synthetic(sizes: tuple[int, int, int] = SIZE) -> SparseProgram:
    """Cameras (rotation, translation, focal length, two coefficients of distortion) in a row that look at points."""
    n, m, p = sizes
    rng = np.random.default_rng(0)
    places = rng.uniform(-1, 1, (m, 3)) * [4.0, 1.5, 1.0]
    true = np.zeros((n, 9))
    true[:, :3] = 0.05 * rng.standard_normal((n, 3))
    true[:, 3] = np.linspace(3.5, -3.5, n)
    true[:, 5] = -6.0
    true[:, 6:] = 800.0, -0.05, 0.005
    point = np.concatenate([np.arange(m), np.arange(m), rng.integers(0, m, p - 2 * m)])
    # each is seen by cameras that are near it, by none of them twice
    order = np.argsort(np.abs(places[:, :1] + true[:, 3]) + 1e-3 * rng.standard_normal((m, n)), axis=1)
    turn = np.zeros(p, int)
    seen_before = np.zeros(m, int)
    for k, j in enumerate(point):
        turn[k], seen_before[j] = seen_before[j] % n, seen_before[j] + 1
    camera = order[point, turn]
    cameras, points = ti.field(ti.f64, (n, 9)), ti.Vector.field(3, ti.f64, m)
    pairs, seen, errors = ti.Vector.field(2, ti.i32, p), ti.Vector.field(2, ti.f64, p), ti.Vector.field(2, ti.f64, p)
    pairs.from_numpy(np.stack([camera, point], axis=1).astype(np.int32))

    @ti.kernel
    def kernel():
        for k in errors:
            i = pairs[k][0]
            r = ti.Vector([cameras[i, 0], cameras[i, 1], cameras[i, 2]])
            y = turned(r, points[pairs[k][1]]) + ti.Vector([cameras[i, 3], cameras[i, 4], cameras[i, 5]])
            u = -ti.Vector([y[0], y[1]]) / y[2]
            q = u.dot(u)
            errors[k] = cameras[i, 6] * (1 + cameras[i, 7] * q + cameras[i, 8] * q * q) * u - seen[k]

    cameras.from_numpy(true)
    points.from_numpy(places)
    kernel()
    seen.from_numpy(errors.to_numpy() + 0.5 * rng.standard_normal((p, 2)))
    cameras.from_numpy(true + 0.01 * rng.standard_normal((n, 9)) * ([1.0] * 6 + [100.0, 0.1, 0.01]))
    points.from_numpy(places + 0.02 * rng.standard_normal((m, 3)))
    return SparseProgram(kernel, [cameras, points], [errors], seen=seen, ends=pairs)


def make(name: str) -> SparseProgram:
    if name.endswith(".bin"):
        return make_libmv(name)
    return make_synthetic() if name == "synthetic" else make_bundle_adjustment(name)


def to_eliminate(program: SparseProgram) -> list[Any]:
    """Weights, if there are some, and points; or cameras where they have more numbers."""
    if len(program.params) == 2 or program.params[2].to_numpy().ndim == 1:
        return program.params[:0:-1]
    return [max(program.params[1:], key=lambda field: field.to_numpy().size)]


def gtsam_problem(program: SparseProgram) -> tuple[Any, Any]:
    """The synthetic problem as GTSAM's graph, and the values to start from."""
    import gtsam
    from gtsam.symbol_shorthand import C, P

    cameras, points = (field.to_numpy() for field in program.params)
    pairs, seen = program.ends.to_numpy(), program.seen.to_numpy()
    noise, flip = gtsam.noiseModel.Unit.Create(2), np.diag([1.0, -1.0, -1.0])
    graph, start = gtsam.NonlinearFactorGraph(), gtsam.Values()
    for (i, j), (u, v) in zip(pairs.tolist(), seen.tolist(), strict=True):
        graph.add(gtsam.GeneralSFMFactorCal3Bundler(np.array([u, -v]), noise, C(i), P(j)))
    for i, camera in enumerate(cameras):
        rotation = flip @ gtsam.Rot3.Expmap(camera[:3]).matrix()
        pose = gtsam.Pose3(gtsam.Rot3(rotation), flip @ camera[3:6]).inverse()
        start.insert(C(i), gtsam.PinholeCameraCal3Bundler(pose, gtsam.Cal3Bundler(*camera[6:], 0.0, 0.0)))
    for j, point in enumerate(points):
        start.insert(P(j), point)
    return graph, start


def gtsam_solver(graph: Any, start: Any, iterations: int) -> Callable[[], float]:
    """GTSAM's Levenberg-Marquardt with Ceres' defaults, in an order that is found before."""
    import gtsam

    options = gtsam.LevenbergMarquardtParams.CeresDefaults()
    options.setMaxIterations(iterations)
    for tolerance in (options.setAbsoluteErrorTol, options.setRelativeErrorTol, options.setErrorTol):
        tolerance(0.0)
    ordering = gtsam.Ordering.ColamdNonlinearFactorGraph(graph)
    print(f"GTSAM: cost {graph.error(start):.9e} at the start")
    return lambda: graph.error(gtsam.LevenbergMarquardtOptimizer(graph, start, ordering, options).optimize())


def to_the_minimum(solve: Callable[..., Any], eliminated: list[Any], clock: Callable[[], float]) -> list[str]:
    """How long ours, and SciPy's trf with and without scaling, take to a cost within 1e-6 of the minimum."""
    goal = (1 + 1e-6) * solve(eliminate=eliminated, max_iterations=399, ftol=1e-13, xtol=1e-12).cost
    ours: dict[str, Any] = {"eliminate": eliminated, "max_iterations": 399}
    trf: dict[str, Any] = {"method": "trf", "tr_solver": "lsmr", "max_iterations": 10**6, "xtol": 1e-15}
    solve(**{**trf, "max_iterations": 1})
    cells: list[str] = []
    for options in (ours, ours, {**trf, "x_scale": "jac"}, trf):
        began = clock()
        found = solve(callback=lambda line, began=began: line.cost <= goal or clock() - began > MOST_SECONDS, **options)
        is_there = "" if found.cost <= goal else f", cost {found.cost:.6e}"
        cells.append(f"{(clock() - began) * 1e3:.0f} ({found.nfev} points{is_there})")
    return cells[1:]  # the first call is not timed


def measure(name: str, clock: Callable[[], float], with_scipy: bool, with_gtsam: bool) -> list[str]:
    """One line of the table: iterations with the launch of J, without the first call of each."""
    program = make(name)
    start = [field.to_numpy() for field in program.params]
    eliminated = to_eliminate(program)
    plan = Jacobian(program.kernel, program.params, program.outputs, format="csr")
    options: dict[str, Any] = {"ftol": 0.0, "xtol": 0.0, "gtol": 0.0, "format": "csr", "max_iterations": ITERATIONS}

    def solve(**more: Any) -> Any:
        for field, values in zip(program.params, start, strict=True):
            field.from_numpy(values)
        return least_squares(program.kernel, program.params, program.outputs, **{**options, **more})

    calls = {"J": plan, "lm": lambda: solve(eliminate=eliminated)}
    first = {key: time_first(call, clock) for key, call in calls.items()}
    timings = time_in_turn(calls, first, 3.0, clock)
    lm, J = timings["lm"].median, median(timings["J"].later)
    result = solve(eliminate=eliminated)
    cells = [
        Path(name).stem,
        f"{J * 1e3:.1f}",
        f"{lm * 1e3:.0f}",
        f"{lm / ITERATIONS / J:.1f}",
        f"{result.history[0].cost:.6e}",
    ]
    cells.append(f"{result.cost:.6e}")
    if with_scipy:
        cells += to_the_minimum(solve, eliminated, clock)
    if with_gtsam and name not in BA_SIZES:
        for field, values in zip(program.params, start, strict=True):
            field.from_numpy(values)
        run = gtsam_solver(*(gtsam_problem(program) if name == "synthetic" else gtsam_libmv(name)), ITERATIONS)
        for _ in range(3):
            began, cpu = time.perf_counter(), time.process_time()
            cost = run()
            print(
                f"GTSAM: {time.perf_counter() - began:.3f} s, {time.process_time() - cpu:.3f} s of CPU, cost {cost:.9e}"
            )
    print(result.summary())
    return cells


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", default=["ba1", "synthetic"], help=f"of {', '.join(BA_SIZES)}, synthetic, files"
    )
    parser.add_argument("--scipy", action="store_true", help="SciPy's trf as well")
    parser.add_argument("--gtsam", action="store_true", help="compare with GTSAM, which is installed")
    parser.add_argument("--cpu-time", action="store_true", help="CPU time of the process")
    options = parser.parse_args()
    clock = time.process_time if options.cpu_time else time.perf_counter
    ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
    print(describe("CPU time" if options.cpu_time else "wall time", "float64"), flush=True)
    head = ["problem", "J (ms)", f"{ITERATIONS} iterations (ms)", "iteration / J", "first cost", "last cost"]
    head += ["to the minimum (ms)", "trf, scaled (ms)", "trf (ms)"] if options.scipy else []
    print(markdown_table(head, [measure(name, clock, options.scipy, options.gtsam) for name in options.names]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
