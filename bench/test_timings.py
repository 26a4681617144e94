"""Time `jacobian`, Taichi's FwdMode, a hand-derived kernel and the primal alone, after checking that they agree.

python -m pytest bench                                 time everything
python -m pytest bench --benchmark-disable             run everything once
python -m pytest bench --spheres 64 -k "not fwd_mode"  more spheres; FwdMode takes 256 launches here
"""

from functools import cache

import numpy as np
from programs import CASES, Program, assert_same_jacobian, run_forward_mode, run_hand_derived

from taichi_ext import Jacobian, jacobian

ROUNDS = 15
FORWARD_MODE_ROUNDS = 5


@cache
def build(case: str, needs_dual: bool = False) -> Program:
    return CASES[case](needs_dual=needs_dual)


@cache
def reference(case: str) -> np.ndarray:
    return run_hand_derived(build(case))


def assert_correct(jac: np.ndarray, case: str) -> None:
    assert_same_jacobian(jac, reference(case), build(case).point.size)


def test_primal(case, record):
    record(case, "primal alone", build(case).kernel, ROUNDS)


def test_hand_derived(case, record):
    program = build(case)
    record(case, "hand-derived", lambda: run_hand_derived(program), ROUNDS)


def test_jacobian(case, record):
    program = build(case)
    jac = record(case, "jacobian", lambda: jacobian(program.kernel, program.params, program.outputs), ROUNDS)
    assert_correct(jac, case)


def test_prepared_jacobian(case, record):
    program = build(case)
    plan = Jacobian(program.kernel, program.params, program.outputs)
    out = np.empty(program.jacobian_shape, np.float32)
    jac = record(case, "prepared, out=", lambda: plan(out=out), ROUNDS)
    assert jac is out
    assert_correct(jac, case)


def test_fwd_mode(case, record):
    program = build(case, needs_dual=True)
    jac = record(case, "FwdMode by column", lambda: run_forward_mode(program), FORWARD_MODE_ROUNDS)
    assert_correct(jac, case)
