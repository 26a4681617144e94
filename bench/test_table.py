"""The table and its programs on small sizes: hand-derived kernels against central differences, methods, report."""

import json
import re
import sys
from functools import partial

import costs
import models
import numpy as np
import peers
import pytest
import report
import table
from programs import (
    Program,
    assert_same_jacobian,
    make_network,
    make_recurrence,
    make_soft_spheres,
    make_sphere,
    make_springs,
    make_volume,
    run_hand_derived,
)

SMALL = {
    "sphere": partial(make_sphere, width=20, height=15),
    "soft spheres, N = 2": partial(make_soft_spheres, 2, width=10, height=8),
    "soft spheres, N = 3": partial(make_soft_spheres, 3, width=10, height=8),
    "volume": partial(make_volume, width=6, height=5),
    "springs": partial(make_springs, side=3),
    "network": partial(make_network, batch=7),
    "recurrence": partial(make_recurrence, steps=12, count=5),
}


def outputs_in_numpy(program: Program, params: np.ndarray) -> np.ndarray:
    """The outputs by the NumPy model in float64, flat."""
    inputs = [a if a.dtype.kind == "i" else a.astype(np.float64) for a in program.inputs]
    if program.model is not models.spring:
        return program.model(np, params, *inputs).ravel()
    ends, stiffness, rest = inputs
    x = params.reshape(-1, 3)
    pull = models.spring(np, x[ends[:, 0]] - x[ends[:, 1]], stiffness, rest)
    force = np.full_like(x, [0, 0, -9.81])
    np.add.at(force, ends[:, 0], pull)
    np.add.at(force, ends[:, 1], -pull)
    return force.ravel()


@pytest.fixture(scope="module", params=SMALL)
def program(request):
    return SMALL[request.param]()


def test_program_is_its_model(program):
    program.kernel()
    expected = outputs_in_numpy(program, program.point.astype(np.float64))
    np.testing.assert_allclose(program.outputs.to_numpy().ravel(), expected, rtol=1e-4, atol=2e-4)


def test_hand_derived_against_central_differences(program):
    jac = run_hand_derived(program).reshape(-1, program.point.size)
    point = program.point.astype(np.float64)
    step = 1e-6
    for k in range(point.size):
        shift = np.zeros_like(point)
        shift[k] = step
        column = (outputs_in_numpy(program, point + shift) - outputs_in_numpy(program, point - shift)) / (2 * step)
        np.testing.assert_allclose(jac[:, k], column, rtol=5e-3, atol=1e-4)


@pytest.fixture(scope="module")
def results():
    cases = {name: SMALL[name] for name in ("sphere", "soft spheres, N = 2", "springs")}
    return table.measure_all(cases, peer_names=[], seconds=0.0)


def test_table_has_a_figure_for_every_method(results):
    for name, case in results.items():
        assert set(case.timings) | set(case.notes) == {table.PRIMAL, table.FORWARD, table.OURS, table.HAND}, name
        assert all(timing.first > 0 and timing.median > 0 for timing in case.timings.values())
    assert results["springs"].notes == {table.FORWARD: "refuses"}


def test_report(results):
    text = f"{report.describe('wall time')}\n{table.tables(results)}"
    assert all(name in text for name in results)
    rows = [line for line in text.splitlines() if line.startswith(f"| {table.OURS} |")]
    assert len(rows) == 2
    assert len(re.findall(r"\(1x\)", rows[0])) == len(results)


def test_picture(results, tmp_path):
    pytest.importorskip("matplotlib", reason="the picture is drawn with matplotlib")
    table.draw(results, tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("peer", ["jax", "torch", "warp", "drjit"])
@pytest.mark.parametrize("name", ["soft spheres, N = 3", "volume", "springs"])
def test_peers(name, peer):
    pytest.importorskip(peer, reason=f"compares with {peer}")
    program = SMALL[name]()
    expected = run_hand_derived(program)
    methods = peers.methods(peer, program)
    assert methods or (name == "springs" and peer in ("warp", "drjit"))
    for method in methods.values():
        assert_same_jacobian(method(), expected, program.point.size)


def test_costs():
    rows, exponent = costs.growth(counts=(1, 2), seconds=0.0, width=10, height=8)
    assert [columns for columns, _, _ in rows] == [4, 8]
    assert np.isfinite(exponent)
    assert set(costs.overhead(calls=3)) == {"primal", "hand-derived", "prepared, out=", "jacobian, out="}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory():
    before, after, size = costs.memory(count=1)
    assert size == 320 * 240 * 4 * 4
    assert size < before <= after


def test_report_finds_its_place(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table -->old<!-- end of table -->\nafter\n")
    report.write_report(page, "table", "new")
    report.write_report(page, "table", "newer")
    assert page.read_text() == "before\n<!-- table -->\n\nnewer\n\n<!-- end of table -->\nafter\n"
    with pytest.raises(ValueError, match="no place"):
        report.write_report(page, "costs", "new")


def test_the_history_grows_by_a_line_of_json(tmp_path):
    path = tmp_path / "history.jsonl"
    for ratio in (0.5, 0.4):
        report.add_to_history(path, "wall time", {"ratios": {"sphere": [ratio, 1.0]}})
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["ratios"]["sphere"][0] for r in records] == [0.5, 0.4]
    assert all(r["versions"]["taichi"] and r["date"] and r["clock"] == "wall time" for r in records)
