"""Run a generated pipeline in reverse mode, its memory and cotangents drawn, and compare with the reference."""

from __future__ import annotations

import random
import re
import warnings
from typing import Any

import numpy as np
from program_check import MismatchError, check_plain_run, require_close, require_state
from program_pipeline_check import TOLERANCE, Expected, Loaded, PipelineWorkshop, opened
from program_pipelines import Pipeline
from program_verdict import fate
from reverse_calls import Prepared

from taichi_ext import UnsupportedError
from taichi_ext.errors import DerivativeWarning, InvalidArgumentError

MEMORY = (None, None, 100_000, 4_000, 2_000, 1_000)
WIDTHS = (1, 1, 2, 11)


def check_reverse(
    program: Pipeline, seed: int, workshop: PipelineWorkshop, name: str, *, runs_alone: bool = False
) -> None:
    """Compare products, values and the state with the reference, at each of its points."""
    (loaded, points), prepared = opened(program, seed, workshop, name), None
    tolerance = TOLERANCE[program.real]
    try:
        if runs_alone:
            check_plain_run(loaded, points, tolerance)
        for n, (values, expected) in enumerate(points):
            if n and loaded.program.gets_copies:
                loaded.copy_arrays()
                prepared = None
            args = loaded.prepare(values)
            params, outputs = loaded.targets(program.params), loaded.targets(program.outputs) or None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DerivativeWarning)
                prepared = prepared or Prepared(loaded.entry, params, outputs, args)
                _check_call(loaded, prepared, args, expected, random.Random(f"{seed} {n}"))
    except Exception as error:
        if not runs_alone:
            check_plain_run(loaded, points, tolerance)  # says so where Taichi is wrong by itself
        if isinstance(error, (MismatchError, UnsupportedError)):
            raise
        raise MismatchError("crash", f"{type(error).__name__}: {error}") from error
    finally:
        loaded.close()


def _check_call(loaded: Loaded, prepared: Prepared, args: Any, expected: Expected, drawn: random.Random) -> None:
    program, tolerance = loaded.program, 5 * TOLERANCE[loaded.program.real]
    names = program.outputs or ("result",)
    width, max_memory = drawn.choice(WIDTHS), drawn.choice(MEMORY)
    normal = np.random.default_rng(drawn.randrange(1000)).standard_normal
    cotangents = [normal((width, *expected.value[name].shape)) for name in names]
    while True:
        try:
            found = prepared(cotangents, args, max_memory=max_memory)
            break
        except InvalidArgumentError as error:  # everything is as it was
            needed = re.search(r"too little .* needs (\d+) bytes", str(error))
            if needed is None:
                raise
            assert int(needed[1]) > max_memory
            max_memory = int(1.5 * int(needed[1]))
    require_state("state", loaded.state(), expected.state, tolerance)
    leaves = [leaf for p in program.params for leaf in expected.derivatives[names[0]] if f"{leaf}.".startswith(f"{p}.")]
    for leaf, got in zip(leaves, found, strict=True):
        blocks = [(c, expected.derivatives[name][leaf]) for name, c in zip(names, cotangents, strict=True)]
        want = sum(np.tensordot(c, block, axes=c.ndim - 1) for c, block in blocks)
        call = f"{leaf}, max_memory {max_memory}, {width} cotangents"
        require_close("derivative", call, np.asarray(got).reshape(np.shape(want)), want, tolerance)


def reverse_verdict(
    program: Pipeline, seed: int, workshop: PipelineWorkshop, *, runs_alone: bool = False
) -> tuple[str, str]:
    """How a pipeline fares, in a word, with a message."""
    name = f"<random pipeline {seed}, reverse, {workshop.count}>"
    return fate(lambda: check_reverse(program, seed, workshop, name, runs_alone=runs_alone))
