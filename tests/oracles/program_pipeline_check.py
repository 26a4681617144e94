"""Run a generated pipeline with taichi_ext and by itself, and compare both with the reference."""

import math
import operator
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import program_check
import taichi as ti
from differences import read, write
from program_check import Executed, MismatchError, check_plain_run, points_of, require_close, require_state
from program_containers import ELEMENTS, SPARSE, Container
from program_offsets import drawn_offsets, with_offsets
from program_pipeline_reference import PipelineReference, columns_of, owner
from program_pipelines import Pipeline
from program_reference import RejectedError
from program_verdict import fate
from taichi_program import initialise

from taichi_ext import Jacobian, UnsupportedError, value_and_jacobian
from taichi_ext.errors import DerivativeWarning, InvalidArgumentError

MARGIN = {"f64": 1e-6, "f32": 2e-5}
LARGEST = {"f64": 1e6, "f32": 1e2}
TOLERANCE = {"f64": 1e-8, "f32": 1e-3}
POINTS = 2
MOST_ROWS = 1 << 12
# errors that the guide documents as invalid arguments; one view can be two of a kernel's arguments
DOCUMENTED = ("is given twice among params", "is too little for the gradient")
PER_START = 30  # programs in one Taichi program


class PipelineWorkshop:
    """A Taichi program that is replaced by another now and then, and where the precision changes."""

    def __init__(self) -> None:
        self.count = 0
        self.real = ""

    def ready(self, real: str) -> None:
        if self.count % PER_START == 0 or real != self.real:
            initialise(default_fp=getattr(ti, real))
            self.count, self.real = 0, real
        self.count += 1


def placed(layout: str, field: Any, shape: tuple[int, ...], offset: tuple[int, ...] | None = None) -> Any:
    """A field in a layout of its own."""
    axes = ti.ij if len(shape) == 2 else ti.i
    if layout == "dense":
        ti.root.dense(axes, shape).place(field, offset=offset)
    else:
        getattr(ti.root, layout)(axes, shape).dense(axes, 1).place(field, offset=offset)
    return field


class Loaded(Executed):
    """A pipeline whose containers and kernels exist."""

    def __init__(self, program: Pipeline, name: str) -> None:
        scope = {"np": np, "math": math, "placed": placed}
        if "torch" in program.text:
            import torch

            scope["torch"] = torch
        fields = {c.name: c.shape for c in program.containers if c.kind == "field"}  # Taichi gives structs none
        self.offsets = drawn_offsets(program.text, fields)
        super().__init__(replace(program, text=with_offsets(program.text, self.offsets)), name, **scope)
        self.leaves = [leaf for c in program.containers for leaf in leaves_of(c)]

    def named(self, name: str) -> Any:
        return eval(name, self.scope)

    def prepare(self, values: dict[str, np.ndarray]) -> tuple[Any, ...]:
        """Set the containers; returns the arguments of the call."""
        for leaf, _, c in self.leaves:
            value = values[leaf].astype(np.float32 if self.program.real == "f32" else np.float64)
            if c.kind == "numpy":
                self.named(leaf)[...] = value
            elif c.kind == "torch":
                self.named(leaf).copy_(self.scope["torch"].from_numpy(value))
            elif c.layout in SPARSE:  # which from_numpy does not activate
                offset = self.offsets.get(c.name, (0,) * len(c.shape))
                for index in np.ndindex(value.shape):
                    self.named(leaf)[tuple(map(operator.add, index, offset))] = value[index]
            else:
                write(self.named(leaf), value)
        return self.arguments(values)

    def arguments(self, values: dict[str, np.ndarray]) -> tuple[Any, ...]:
        found = []
        for text in self.program.args:
            if text not in values or text not in self.program.shapes:
                found.append(self.named(text))
            else:
                value = values[text]
                found.append(ti.Vector(list(value), getattr(ti, self.program.real)) if value.ndim else float(value))
        return tuple(found)

    def copy_arrays(self) -> None:
        """Other arrays for the arguments."""
        for c in self.program.containers:
            if c.is_argument and c.kind in ("numpy", "torch"):
                self.scope[c.name] = self.named(c.name).copy("K") if c.kind == "numpy" else self.named(c.name).clone()

    def state(self, args: tuple[Any, ...] = ()) -> dict[str, np.ndarray]:
        found = ((leaf, self.named(leaf)) for leaf, _, _ in self.leaves)
        return {leaf: read(x) if isinstance(x, (ti.Field, ti.Ndarray)) else as_array(x) for leaf, x in found}

    def targets(self, names: tuple[str, ...]) -> list[Any]:
        return [n if n in self.program.shapes else self.named(n) for n in names]


def leaves_of(c: Container) -> list[tuple[str, str, Container]]:
    return [(leaf, element, c) for leaf, element in c.leaves()]


def as_array(x: Any) -> np.ndarray:
    if isinstance(x, (np.ndarray, float, np.floating)):
        return np.array(x)
    return x.numpy().copy() if hasattr(x, "numpy") else read(x)


def empty_like(tree: Any) -> Any:
    """Arrays for J like those of an earlier call, filled with something else."""
    if isinstance(tree, dict):
        return {name: empty_like(part) for name, part in tree.items()}
    if isinstance(tree, list):
        return [empty_like(part) for part in tree]
    return np.full_like(tree, 7) if isinstance(tree, np.ndarray) else tree * 0 + 7


def values_of(program: Pipeline, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    found = {}
    for c in program.containers:
        for leaf, element, _ in leaves_of(c):
            value = rng.uniform(-1.2, 1.2, (*c.shape, *ELEMENTS[element]))
            found[leaf] = value
    for name in program.args:
        if name in program.shapes:
            found[name] = rng.uniform(-1.2, 1.2, program.shapes[name])
    if program.real == "f32":
        found = {name: value.astype(np.float32).astype(np.float64) for name, value in found.items()}
    return found


# --- reference --------------------------------------------------------------------------------------------------------


class Expected:
    """The state after one run, and the derivatives of the outputs by leaf of the parameters."""

    def __init__(self, program: Pipeline, values: dict[str, np.ndarray]) -> None:
        shapes = {name: value.shape for name, value in values.items()} | program.shapes
        columns = columns_of(shapes, program.params)
        reference = PipelineReference(columns[""])
        scope = reference.load_program(program.text)
        leaves = {leaf: eval(leaf, scope) for c in program.containers for leaf, _ in c.leaves()}
        for leaf, array in leaves.items():
            reference.seed(array.data, values[leaf], columns.get(leaf))
        numbers = {name: reference.number(values[name], columns.get(name)) for name in program.shapes if name in values}
        args = tuple(numbers[a] if a in numbers else eval(a, scope) for a in program.args)
        named = dict(zip(program.shapes, args))  # noqa: B905, a pipeline has none
        for name, arg in named.items():
            if name in columns and name not in numbers:
                reference.seed(arg.data, np.real(arg.data[..., 0]), columns[name])
        reference.run(program.entry, args)
        self.state = {leaf: np.array(np.real(array.data[..., 0])) for leaf, array in leaves.items()}
        results = {leaf: array.data for leaf, array in leaves.items()}
        results |= {name: arg.data for name, arg in named.items() if name not in numbers}
        if not program.outputs:
            results = {"result": reference.lift(reference.result)}
        params = [p for p in columns if p]
        self.derivatives = {
            name: {p: self.block(reference, data, shapes[p], columns[p]) for p in params}
            for name, data in results.items()
        }
        self.value = {name: np.array(np.real(data[..., 0])) for name, data in results.items()}
        self.leaves = list(leaves)
        self.touched = {
            leaf for leaf, array in leaves.items() if owner(array.data) in reference.touched | reference.stored
        }
        self.stored = {leaf for leaf, array in leaves.items() if owner(array.data) in reference.stored}
        blocks = [b for found in self.derivatives.values() for b in found.values()]
        limit = LARGEST[program.real]
        is_finite = all(np.all(np.abs(b) < limit) for b in [*blocks, *self.state.values()])
        if reference.margin < MARGIN[program.real] or not is_finite:
            raise RejectedError("close to a kink, or a number is too large")

    @staticmethod
    def block(reference: Any, data: np.ndarray, shape: tuple[int, ...], first: int) -> np.ndarray:
        """The derivative by one parameter, in the shape of J."""
        part = data[..., first : first + int(np.prod(shape, dtype=int))]
        return reference.derivative(part).reshape((*data.shape[:-1], *shape))


def opened(program: Pipeline, seed: int, workshop: PipelineWorkshop, name: str) -> tuple[Loaded, Any]:
    """What is used of a pipeline, and points at which it has derivatives, with the reference there."""
    points = points_of(program, seed, 4, values_of, Expected)
    used = used_only(program, points[0][1])
    if used != program:
        points = points_of(used, seed, 4, values_of, Expected)
    workshop.ready(used.real)
    return Loaded(used, name), points


# --- the comparison ---------------------------------------------------------------------------------------------------


def check_pipeline(
    program: Pipeline, seed: int, workshop: PipelineWorkshop, name: str, *, runs_alone: bool = True
) -> None:
    """Compare everything that a pipeline does with the reference; errors are those of ``program_check.check``."""
    loaded, points = opened(program, seed, workshop, name)
    try:
        if runs_alone:
            check_plain_run(loaded, points, TOLERANCE[program.real])
        if program_check.IS_PLAIN:
            return
        try:
            _check_jacobian(loaded, points)
        except (MismatchError, UnsupportedError):
            check_plain_run(loaded, points, TOLERANCE[program.real])
            raise
    finally:
        loaded.close()


def _check_jacobian(loaded: Loaded, points: list[tuple[dict[str, np.ndarray], Expected]]) -> None:
    program = loaded.program
    params = loaded.targets(program.params)
    outputs = loaded.targets(program.outputs) or None
    tolerance = TOLERANCE[program.real]
    names = program.outputs or ("result",)
    if (
        program_check.OPTIONS.get("mode") == "reverse"
        and sum(np.size(points[0][1].value[n]) for n in names) > MOST_ROWS
    ):
        raise RejectedError("so many rows of J take minutes by adjoints")
    plan = found = None
    calls = [(*point, None) for point in points]
    if program.more_options:
        calls.append((*points[0], {**program.options, **program.more_options}))
    for n, (values, expected, options) in enumerate(calls):
        if n == 1 and program.gets_copies:
            loaded.copy_arrays()
            params, outputs = loaded.targets(program.params), loaded.targets(program.outputs) or None
        args = loaded.prepare(values)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DerivativeWarning)
                if options is not None:
                    given, found = value_and_jacobian(loaded.entry, params, outputs, args=args, **options)
                    for name, value in zip(names, given if program.outputs else [given], strict=True):
                        require_close("value", name, as_array(value), expected.value[name], tolerance)
                else:
                    options_here = {**program.options, "format": program_check.FORMAT, **program_check.OPTIONS}
                    plan = plan or Jacobian(loaded.entry, params, outputs, args=args, **options_here)
                    has_out = n == 1 and program.has_out and program_check.FORMAT is None
                    out = empty_like(found) if has_out else None
                    found = plan(args=args, out=out)
        except (UnsupportedError, MismatchError):
            raise
        except InvalidArgumentError as error:
            kind = "refused" if any(text in str(error) for text in DOCUMENTED) else "invalid"
            raise MismatchError(kind, str(error)) from error
        except Exception as error:
            raise MismatchError("crash", f"{type(error).__name__}: {error}") from error
        call = f"(call {n + 1}{f', {options}' if options else ''}) "
        require_state("state", {k: v for k, v in loaded.state().items()}, expected.state, tolerance)
        for leaf, blocks in zip(names, found if program.outputs else [found], strict=True):
            by_leaf = dict(leaf_blocks(program.params, blocks))
            for param, block in by_leaf.items():
                want = expected.derivatives[leaf][param]
                block = block.toarray().reshape(want.shape) if hasattr(block, "toarray") else block
                require_close("derivative", f"{call}d {leaf} / d {param} ", as_array(block), want, tolerance)


def used_only(program: Pipeline, expected: Expected) -> Pipeline:
    """The program without parameters that its kernels do not use, and outputs that they do not store to."""

    def is_used(param: str) -> bool:
        leaves = [leaf for leaf in expected.leaves if f"{leaf}.".startswith(f"{param}.")]
        return param in program.shapes or all(leaf in expected.touched for leaf in leaves)

    params = tuple(p for p in program.params if is_used(p))
    outputs = tuple(o for o in program.outputs if o in program.shapes or o in expected.stored)
    if not params or bool(outputs) != bool(program.outputs):
        raise RejectedError("no parameter is used, or no output stored to")
    return replace(program, params=params, outputs=outputs)


def leaf_blocks(params: tuple[str, ...], blocks: Any) -> list[tuple[str, Any]]:
    """The blocks of J by leaf; those of a struct field come as dicts of its members."""

    def flat(name: str, block: Any) -> list[tuple[str, Any]]:
        if not isinstance(block, dict):
            return [(name, block)]
        return [found for member, inner in block.items() for found in flat(f"{name}.{member}", inner)]

    return [found for name, block in zip(params, blocks, strict=True) for found in flat(name, block)]


def pipeline_verdict(
    program: Pipeline, seed: int, workshop: PipelineWorkshop, *, runs_alone: bool = False
) -> tuple[str, str]:
    """How a pipeline fares, in a word, with a message: see ``program_verdict.verdict``."""
    name = f"<random pipeline {seed}, {workshop.count}>"
    return fate(lambda: check_pipeline(program, seed, workshop, name, runs_alone=runs_alone))


def describe_pipeline(program: Pipeline) -> str:
    """The program with data that its text lacks."""
    options = f"{program.options}, {program.more_options}, {program.real}"
    return f"params {program.params}, outputs {program.outputs}, args {program.args}, {options}\n\n{program.text}"
