"""Random programs: values, derivatives and state of each against an interpreter of the same text.

``program_grammar`` writes a program for every seed; ``program_reference`` runs its text as plain Python on complex
numbers; ``program_check`` compares.  A program that fails is cut down before it is shown.

A fixed set of seeds runs here; ``python tests/oracles/program_batches.py 2000`` runs as many programs as one likes.
"""

import ast
from dataclasses import replace

import numpy as np
import program_check
import program_grammar
import program_hessians
import program_lists
import program_offsets
import pytest
from hypothesis import HealthCheck, Phase, given, reject, settings
from hypothesis import strategies as st
from program_batches import IN_LANES, drawn_ways
from program_check import Loaded, judge, values_of
from program_grammar import generate
from program_model import Argument, Field, Program
from program_verdict import BY_ITSELF, REFUSED, REJECTED, RIGHT, Workshop, describe, reduced, verdict
from taichi_program import end_program

from taichi_ext import backend

pytestmark = pytest.mark.double_only("the reference is in float64")

PROGRAMS = 15
WAYS = {"reverse": 24, "drawn": 24, "offsets": 8, "lists": 24, "lanes": 8, "hessians": 8}  # seeds


@pytest.fixture(scope="module")
def workshop():
    yield Workshop()
    end_program()


@settings(
    max_examples=PROGRAMS,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],  # a seed cannot be shrunk, a program can
    suppress_health_check=list(HealthCheck),
)
@given(seed=st.integers(0, 2**31))
def test_random_programs(workshop, seed):
    program = generate(seed)
    kind, message = verdict(program, seed, workshop, runs_alone=seed % 4 == 0)
    if kind in (REJECTED, *BY_ITSELF):  # what Taichi alone gets wrong says nothing about taichi_ext
        reject()
    if kind != RIGHT:
        smaller = describe(reduced(program, seed, workshop))
        pytest.fail(f"seed {seed}: {kind}: {message}\n\nA smaller program that fails: {smaller}", pytrace=False)


@pytest.mark.sweep
@pytest.mark.parametrize(("way", "seed"), [(way, seed) for way, count in WAYS.items() for seed in range(count)])
def test_random_programs_in_other_ways(workshop, monkeypatch, way, seed):
    """Adjoints; tangents, blocks and memory drawn by the seed; fields with offsets; sparse sums over lists; loops in lanes; energies."""
    options = {"reverse": {"mode": "reverse"}, "drawn": drawn_ways(seed)}.get(way, {})
    if options.pop("by_column", False):
        monkeypatch.setattr(backend, "stores_by_column", lambda: True)
    for limit in IN_LANES if way == "lanes" else ():
        name, value = limit.split("=")
        monkeypatch.setattr(f"taichi_ext.{name}", ast.literal_eval(value))
    monkeypatch.setattr(program_check, "OPTIONS", options)
    monkeypatch.setattr(program_check, "FORMAT", "csr" if way == "lists" else None)
    monkeypatch.setattr(program_offsets, "IS_DRAWN", way == "offsets")
    program = {"lists": program_lists, "hessians": program_hessians}.get(way, program_grammar).generate(seed)
    judged = program_hessians.hessian_verdict if way == "hessians" else verdict
    kind, message = judged(program, seed, workshop, runs_alone=False)
    assert kind in (RIGHT, REJECTED, *BY_ITSELF, *[REFUSED] * (way == "hessians")), f"seed {seed}: {kind}: {message}"


@pytest.mark.parametrize("seed", [1, 4, 7])
def test_reference_against_central_differences(workshop, seed):
    """Derivatives of the reference against differences of what Taichi computes, without taichi_ext."""
    program = replace(generate(seed), outputs=("y",))
    fields = workshop.ready()
    [(values, expected), *_] = judge(program, seed)
    loaded = Loaded(program, fields, f"<differences of {seed}>")

    def run(name, delta):
        changed = {**values, name: values[name] + delta}
        args = loaded.prepare(changed)
        loaded.entry(*args)
        return loaded.state(args)["y"]

    columns = []
    for name in program.params:
        for i in range(np.size(values[name])):
            delta = np.zeros(np.size(values[name]))
            delta[i] = 1e-6
            delta = delta.reshape(np.shape(values[name]))
            columns.append((run(name, delta) - run(name, -delta)) / 2e-6)
    loaded.close()
    differences = np.stack(columns, axis=-1)
    np.testing.assert_allclose(expected.derivatives["y"], differences, rtol=1e-5, atol=1e-6)
    assert np.abs(differences).max() > 1e-3


X8 = Field("x", "f", (8,))
Y8 = Field("y", "f", (8,))


def program(text, *fields, params=("x",), outputs=("y",), args=(), entry="k0"):
    return Program(text, fields, args, params, outputs, False, entry)


REGRESSIONS = {
    "a matrix read whole and written whole in an inner loop": program(
        """
@ti.kernel
def k0():
    for i in y:
        for t in range(4):
            g[i] += 0.5 * g[i]
    for i in y:
        g[i] += ti.Matrix([[x[i], y[i]], [x[0], y[0]]])
""",
        X8,
        Field("y", "f", (3,)),
        Field("g", "m22", (3,)),
        outputs=("g",),
    ),
    "an index that depends on the entry it names": program(
        """
@ti.kernel
def k0():
    for i in range(3):
        y[i, int(abs(y[i, i % 2]))] = 1.7 + x[7]
    for i in range(3):
        y[i, int(abs(y[i, 0]) + 0.3) % 2] += 1.4 * x[i]
""",
        X8,
        Field("y", "f", (3, 2)),
    ),
    "a struct local without a tangent": program(
        """
S = ti.types.struct(p=ti.f64, q=tm.vec3)
@ti.kernel
def k0():
    for i in range(3):
        r = S(0.5, tm.vec3(0.3))
        if x[i] > 0.1:
            r = S(x[i], tm.vec3(x[i + 1]))
        r.q[i] += x[0]
        y[i] = r.p * r.q[2] * x[i]
""",
        X8,
        Y8,
    ),
    "an argument used in two parallel loops": program(
        """
@ti.kernel
def k0(a: ti.f64, v: tm.vec3):
    for i in range(1):
        b = ti.select(0.9 >= 1.0, a, a * v[0])
        y[i] = b
    for i in range(1, 8):
        b = a * v[1]
        y[i] = x[i] * b * a
""",
        X8,
        Y8,
        params=("a", "x", "v"),
        args=(Argument("a", "f"), Argument("v", "v3")),
    ),
    "an entry that is read, added to, and added to itself": program(
        """
@ti.kernel
def k0():
    for i in range(6):
        a = y[i]
        y[i] += x[i % 4]
        y[i] += a
""",
        Field("x", "f", (4,)),
        Field("y", "f", (6,)),
    ),
    "an entry multiplied in a loop inside a serial loop": program(
        """
@ti.kernel
def k0(a: ti.f64):
    ti.loop_config(serialize=True)
    for i in range(2):
        for j in range(3):
            y[0] *= a
""",
        Y8,
        params=("a", "y"),
        args=(Argument("a", "f"),),
    ),
    "an expression as a template argument, used on both sides of a branch and after it": program(
        """
@ti.func
def f0(a: ti.template(), c):
    r = 0.0
    if c > 0.5:
        r = a * a
    else:
        r = 2.0 * a * a
    return r + ti.sin(a) * a
@ti.kernel
def k0():
    for i in range(8):
        y[i] = f0(x[0] * x[1], x[i])
""",
        X8,
        Y8,
    ),
}


@pytest.mark.parametrize("name", REGRESSIONS)
def test_program_that_failed_once(workshop, name):
    kind, message = verdict(REGRESSIONS[name], 1, workshop, runs_alone=True)
    assert kind == "right", message


def test_a_wrong_derivative_is_found(workshop, monkeypatch):
    """The comparison sees an error in one entry of one derivative."""

    class Wrong(program_check.Jacobian):
        def __call__(self, **options):
            found = super().__call__(**options)
            found["y"]["x"][3, 3] += 1e-6
            return found

    monkeypatch.setattr(program_check, "Jacobian", Wrong)
    kind, _ = verdict(REGRESSIONS["a struct local without a tangent"], 1, workshop)
    assert kind == "derivative"


def test_values_are_those_of_the_seed():
    first, second = values_of(generate(5), 5), values_of(generate(5), 5)
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name])
