"""The tool of GradBench: its answers to messages, against complex steps in NumPy."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from example_programs import load
from numpy.testing import assert_allclose

pytest.importorskip("scipy.sparse")
pytestmark = pytest.mark.cpu_only("a process of its own")

ROOT = Path(__file__).resolve().parents[2]
CAMERA = [-0.75, -1.1, -0.85, 34.5, 39.7, 53.9, 419.2, 5.9, -8.5, 0.09, 0.003]
SCENE = {"n": 3, "m": 5, "p": 7, "cam": CAMERA, "x": [7.2, 0.001, 3.0], "w": 0.4, "feat": [271.8, 834.2], "min_runs": 2}


@pytest.fixture(scope="module")
def hands():
    """A made hand, as an eval gives it: with places in triangles, and with corners alone."""
    hand = load("hand_tracking")
    data = hand.made(points=7)
    weights = np.zeros((len(data["base"]), len(data["parents"])))
    vertex = np.repeat(np.arange(len(weights)), np.diff(data["first"]))
    np.add.at(weights, (vertex, data["bone"]), data["weight"])
    model = {
        "bone_count": len(data["parents"]), "parents": data["parents"].tolist(), "weights": weights.tolist(),
        "base_relatives": data["relative"].tolist(), "inverse_base_absolutes": data["inverse"].tolist(),
        "base_positions": [[*p, 1.0] for p in data["base"].tolist()], "triangles": data["corners"].tolist(),
        "is_mirrored": False,
    }  # fmt: skip

    def given(us, correspondences):
        points = {"model": model, "correspondences": correspondences, "points": data["points"].tolist()}
        return {"theta": data["theta"].tolist(), "us": us, "data": points, "min_runs": 1, "min_seconds": 0}

    simple = {**data, "corners": np.tile(data["corners"][:, :1], (1, 3))}
    return [(data, given(data["u"].tolist(), list(range(7)))), (simple, given([], data["corners"][:, 0].tolist()))]


@pytest.fixture(scope="module")
def answers(hands):
    """The answers to all messages, by kind, module, function and place."""
    asked = [("hello", "square", 3.0), ("hello", "double", 3.0), ("ba", "objective", SCENE), ("ba", "jacobian", SCENE)]
    asked += [("ht", function, hand) for _, hand in hands for function in ("objective", "jacobian")]
    messages = [
        {"kind": "start", "eval": "ba"},
        {"kind": "define", "module": "ba"},
        {"kind": "define", "module": "gmm"},
    ]
    messages += [{"kind": "evaluate", "module": m, "function": f, "input": i} for m, f, i in asked]
    messages += [{"kind": "evaluate", "module": "ba", "function": "hessian", "input": SCENE}, {"kind": "analysis"}]
    lines = "".join(json.dumps({"id": n, **message}) + "\n" for n, message in enumerate(messages))
    ended = subprocess.run(
        [sys.executable, str(ROOT / "gradbench" / "run.py")], input=lines, capture_output=True, text=True, timeout=900,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TI_OFFLINE_CACHE": "0"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    found = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [a["id"] for a in found] == list(range(len(messages)))
    return found


def by_complex_steps(function, x):
    """J of a function of a vector, exact to rounding."""
    return np.stack([function(x + 1e-30j * e).imag / 1e-30 for e in np.eye(len(x))], axis=1)


def projected(x):
    """The weighted error of a camera, a point and a weight."""
    r, y, w = x[:3], x[11:14] - x[3:6], x[14]
    t = np.sqrt((r * r).sum())
    v = r / t
    y = y * np.cos(t) + np.cross(v, y) * np.sin(t) + v * (v @ y) * (1 - np.cos(t))
    u = y[:2] / y[2]
    q = (u * u).sum()
    return w * (u * (1 + x[9] * q + x[10] * q * q) * x[6] + x[7:9] - np.array(SCENE["feat"]))


@pytest.mark.sweep
def test_protocol(answers):
    assert answers[0] == {"id": 0, "tool": "taichi_ext"}
    assert answers[1] == {"id": 1, "success": True}
    assert not answers[2]["success"] and "'gmm'" in answers[2]["error"]
    assert not answers[-2]["success"] and "hessian" in answers[-2]["error"]
    assert answers[-1] == {"id": len(answers) - 1}
    for answer in answers[3:-2]:
        assert answer["success"] and all(t["name"] == "evaluate" and t["nanoseconds"] > 0 for t in answer["timings"])
    assert len(answers[5]["timings"]) == 2


@pytest.mark.sweep
def test_hello(answers):
    assert [a["output"] for a in answers[3:5]] == [9.0, 6.0]


@pytest.mark.sweep
def test_bundle_adjustment(answers):
    """Two rows with all entries of a camera, and the last entry of J, as the eval wants them."""
    x = np.array([*CAMERA, *SCENE["x"], SCENE["w"]])
    errors, J = answers[5]["output"], answers[6]["output"]
    assert_allclose(errors["reproj_error"]["elements"], projected(x), rtol=1e-12)
    assert_allclose(errors["w_err"]["element"], 1 - SCENE["w"] ** 2)
    assert errors["reproj_error"]["repeated"] == errors["w_err"]["repeated"] == 7
    assert_allclose(J["vals"][:30], by_complex_steps(projected, x).reshape(-1), rtol=1e-9, atol=1e-9)
    columns = [*range(11), 33, 34, 35, 48]
    assert J["cols"] == [*columns, *columns, 54] and J["rows"] == [*range(0, 450, 15), 217]
    assert_allclose(J["vals"][30], -2 * SCENE["w"])


@pytest.mark.sweep
@pytest.mark.parametrize("which", [0, 1], ids=["complicated", "simple"])
def test_hand_tracking(answers, hands, which):
    """The places' own columns, if there are some, then the pose."""
    hand, data = load("hand_tracking"), hands[which][0]
    errors, J = (np.array(answers[7 + 2 * which + k]["output"]) for k in range(2))
    function = lambda x: hand.residuals(data, x[14:], x[:14].reshape(7, 2)).reshape(-1)
    x = np.concatenate([data["u"].reshape(-1), data["theta"]])
    assert_allclose(errors, function(x), atol=1e-12)
    wanted = by_complex_steps(function, x)
    own = np.stack([wanted[3 * k + c, 2 * k : 2 * k + 2] for k in range(7) for c in range(3)])
    assert_allclose(J, wanted[:, 14:] if which else np.hstack([own, wanted[:, 14:]]), atol=1e-9)
