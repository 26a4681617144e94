"""Run a generated pipeline in reverse mode, the call, its memory and cotangents drawn, and compare with the reference."""

import random
import re
import warnings
from typing import Any

import numpy as np
import program_check
import program_pipeline_check
from program_check import MismatchError, check_plain_run, require_close, require_state
from program_pipeline_check import TOLERANCE, Expected, Loaded, PipelineWorkshop, as_array, leaf_blocks, opened
from program_pipelines import Pipeline
from program_verdict import fate
from reverse_calls import Prepared

from taichi_ext import UnsupportedError, jacobian, value_and_gradient, vjp
from taichi_ext.errors import DerivativeWarning, InvalidArgumentError

MEMORY = (None, None, 100_000, 4_000, 2_000, 1_000)
WIDTHS = (1, 1, 2, 11)
MODES = (None, "reverse", "reverse", "forward")


def check_reverse(
    program: Pipeline, seed: int, workshop: PipelineWorkshop, name: str, *, runs_alone: bool = False
) -> None:
    """Compare products, values and the state with the reference, at each of its points."""
    (loaded, points), prepared = opened(program, seed, workshop, name), None
    program = loaded.program
    tolerance = TOLERANCE[program.real]
    try:
        if runs_alone:
            check_plain_run(loaded, points, tolerance)
        if program_check.IS_PLAIN:
            return
        for n, (values, expected) in enumerate(points):
            if n and program.gets_copies:
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
        kind = "refused" if any(text in str(error) for text in program_pipeline_check.DOCUMENTED) else "crash"
        raise MismatchError(kind, f"{type(error).__name__}: {error}") from error
    finally:
        loaded.close()


def _check_call(loaded: Loaded, prepared: Prepared, args: Any, expected: Expected, drawn: random.Random) -> None:
    program, tolerance = loaded.program, 5 * TOLERANCE[loaded.program.real]
    names = program.outputs or ("result",)
    width, options = drawn.choice(WIDTHS), {"max_memory": drawn.choice(MEMORY)}
    normal = np.random.default_rng(drawn.randrange(1000)).standard_normal
    cotangents = [normal((width, *expected.value[name].shape)) for name in names]
    is_number = expected.value[names[0]].size == 1
    ways = ["products", "products", "vjp", "jacobian", *["gradient"] * (is_number and names[0] not in program.params)]
    way = drawn.choice(ways)
    if way == "gradient":
        names, cotangents = names[:1], [np.ones((1, *expected.value[names[0]].shape))]
    if way == "jacobian":
        rows = sum(expected.value[name].size for name in names)  # thousands take minutes in reverse mode
        options |= {"mode": drawn.choice(MODES if rows < 2000 else (None,)), "chunk_size": drawn.choice((None, 1, 3))}
    leaves = [leaf for p in program.params for leaf in expected.derivatives[names[0]] if f"{leaf}.".startswith(f"{p}.")]
    while True:
        try:
            found = _products(way, loaded, prepared, cotangents, args, leaves, options)
            break
        except InvalidArgumentError as error:  # everything is as it was
            needed = re.search(r"too little .* needs (\d+) bytes", str(error))
            if needed is None:
                raise
            assert int(needed[1]) > options["max_memory"]
            options["max_memory"] = int(1.5 * int(needed[1]))
    require_state("state", loaded.state(), expected.state, tolerance)
    for leaf, got in found.items():
        blocks = [(c, expected.derivatives[name][leaf]) for name, c in zip(names, cotangents, strict=True)]
        want = sum(np.tensordot(c, block, axes=c.ndim - 1) for c, block in blocks)
        call = f"{leaf}, {way}, {options}, {width} cotangents"
        require_close("derivative", call, np.asarray(got).reshape(np.shape(want)), want, tolerance)


def _products(
    way: str, loaded: Loaded, prepared: Prepared, cotangents: list[Any], args: Any, leaves: list[str], options: Any
) -> dict[str, Any]:
    """The products of cotangents with J by leaf of the parameters, computed in one of several ways."""
    program = loaded.program
    params, outputs = loaded.targets(program.params), loaded.targets(program.outputs) or None
    if way == "products":
        return dict(zip(leaves, prepared(cotangents, args, **options), strict=True))
    if way == "jacobian":
        rows = jacobian(loaded.entry, params, outputs, args=args, **options)
        rows = [dict(leaf_blocks(program.params, row)) for row in (rows if outputs else [rows])]
        both = list(zip(cotangents, rows, strict=True))
        product = lambda c, block: np.tensordot(c, as_array(block).astype(float), axes=c.ndim - 1)
        return {leaf: sum(product(c, row[leaf]) for c, row in both) for leaf in leaves}
    if way == "gradient":
        energy = outputs and outputs[0]
        return dict(
            leaf_blocks(program.params, value_and_gradient(loaded.entry, params, energy, args=args, **options)[1])
        )
    products = vjp(loaded.entry, params, outputs, cotangents if outputs else cotangents[0], args=args, **options)
    return dict(leaf_blocks(program.params, products))


def reverse_verdict(
    program: Pipeline, seed: int, workshop: PipelineWorkshop, *, runs_alone: bool = False
) -> tuple[str, str]:
    """How a pipeline fares, in a word, with a message."""
    name = f"<random pipeline {seed}, reverse, {workshop.count}>"
    return fate(lambda: check_reverse(program, seed, workshop, name, runs_alone=runs_alone))
