"""Run a generated program with taichi_ext and by itself, and compare both with the reference."""

import contextlib
import linecache
import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import taichi as ti
import taichi.math as tm
from differences import read, write
from program_model import SHAPES, Argument, Field, Program
from program_offsets import drawn_offsets, with_offsets
from program_reference import Reference, RejectedError

from taichi_ext import Jacobian, UnsupportedError
from taichi_ext.errors import DerivativeWarning, InvalidArgumentError

MARGIN = 1e-6  # least distance to a jump
POINTS = 2
FORMAT: str | None = None  # of the Jacobians
IS_PLAIN = False  # only run programs by themselves
OPTIONS: dict[str, Any] = {}  # of jacobian, other than its format


class MismatchError(AssertionError):
    """The result of taichi_ext differs from that of the reference."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind


class Fields:
    """Fields by name, type and shape, made once and used by one program after the other."""

    def __init__(self) -> None:
        self.made: dict[Any, Any] = {}

    def get(self, f: Field, offset: tuple[int, ...] = ()) -> Any:
        key, placed = (f.name, f.type, f.shape, offset), {"shape": f.shape, "offset": offset or None}
        if key not in self.made:
            shape = SHAPES.get(f.type, ())
            if len(shape) == 2:
                self.made[key] = ti.Matrix.field(*shape, ti.f64, **placed)
            elif shape:
                self.made[key] = ti.Vector.field(shape[0], ti.f64, **placed)
            else:
                self.made[key] = ti.field(ti.i32 if f.type == "i" else ti.f64, **placed)
        return self.made[key]


class Executed:
    """A text that has run, in a file that Python finds by name."""

    def __init__(self, program: Any, name: str, **scope: Any) -> None:
        self.program = program
        self.name = name
        lines = program.text.splitlines(keepends=True)
        linecache.cache[name] = (len(program.text), None, lines, name)
        self.scope: dict[str, Any] = {"__name__": "random_program", "ti": ti, "tm": tm, **scope}
        exec(compile(program.text, name, "exec", dont_inherit=True), self.scope)
        self.entry: Any = eval(program.entry, self.scope)

    def close(self) -> None:
        linecache.cache.pop(self.name, None)
        self.scope.clear()
        self.entry = None


class Loaded(Executed):
    """A program whose kernels exist."""

    def __init__(self, program: Program, fields: Fields, name: str) -> None:
        used = {f.name: f for f in program.fields if not f.is_array}
        offsets = drawn_offsets(program.text, {name: f.shape for name, f in used.items()})
        self.fields = {name: fields.get(f, offsets.get(name, ())) for name, f in used.items()}
        super().__init__(replace(program, text=with_offsets(program.text, offsets)), name, **self.fields)

    def prepare(self, values: dict[str, Any]) -> tuple[Any, ...]:
        """Set the fields; returns the arguments of the call."""
        for name, field in self.fields.items():
            write(field, values[name])
        return tuple(
            values[a.name].copy() if isinstance(a, Field) else as_argument(a, values[a.name]) for a in self.program.args
        )

    def state(self, args: tuple[Any, ...]) -> dict[str, np.ndarray]:
        arrays = {a.name: v for a, v in zip(self.program.args, args, strict=True) if isinstance(a, Field)}
        return {**{name: read(f) for name, f in self.fields.items()}, **arrays}


def as_argument(a: Argument, value: Any) -> Any:
    if a.type == "i":
        return int(value)
    return float(value) if a.type == "f" else ti.Vector(list(value), ti.f64)


def values_of(program: Program, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    values: dict[str, Any] = {f.name: f.values(rng) for f in program.fields}
    values.update({a.name: a.value(rng) for a in program.args if isinstance(a, Argument)})
    return values


# --- reference --------------------------------------------------------------------------------------------------------


class Expected:
    """The state after one run, the returned value, and the derivatives."""

    def __init__(self, program: Program, values: dict[str, Any]) -> None:
        arrays = {f.name: (values[f.name], len(f.shape)) for f in program.fields}
        numbers = {a.name: values[a.name] for a in program.args if isinstance(a, Argument)}
        reference = Reference(arrays, program.params, numbers)
        args = tuple(
            reference.arrays[a.name] if isinstance(a, Field) else reference.numbers[a.name] for a in program.args
        )
        result = reference.execute(program.text, program.entry, args)
        self.margin = reference.margin
        self.state = {f.name: reference.value(f.name) for f in program.fields}
        self.derivatives = {
            f.name: reference.derivative(reference.arrays[f.name].data) for f in program.fields if f.type != "i"
        }
        if program.returns:
            parts = result if isinstance(result, tuple) else (result,)
            flat = np.concatenate(
                [np.reshape(reference.lift(p) if np.ndim(p) < 1 else p, (-1, reference.lanes)) for p in parts]
            )
            shape = np.shape(result) if not isinstance(result, tuple) else flat.shape
            self.derivatives[""] = reference.derivative(flat).reshape(shape)
        finite = all(np.isfinite(d).all() and np.max(np.abs(d), initial=0) < 1e6 for d in self.derivatives.values())
        if self.margin < MARGIN or not finite:
            raise RejectedError("close to a kink, or a derivative is too large")


def judge(program: Program, seed: int) -> list[tuple[dict[str, Any], Expected]]:
    return points_of(program, seed, 6, values_of, Expected)


def points_of(
    program: Any, seed: int, attempts: int, values_of: Any, expected: Any
) -> list[tuple[dict[str, Any], Any]]:
    """Points at which the program has derivatives, with the reference there."""
    found, reasons = [], set()
    for attempt in range(attempts):
        values = values_of(program, seed * 100 + attempt)
        try:
            found.append((values, expected(program, values)))
        except RejectedError as error:
            reasons.add(str(error))
        if len(found) == POINTS:
            break
    if not found:
        raise RejectedError(" / ".join(sorted(reasons)))
    return found


# --- the comparison ---------------------------------------------------------------------------------------------------


def require_close(kind: str, what: str, actual: Any, expected: Any, tolerance: float) -> None:
    actual, expected = np.asarray(actual), np.asarray(expected)
    if actual.shape != expected.shape:
        raise MismatchError(kind, f"{what} has shape {actual.shape}, expected {expected.shape}")
    scale = 1 + np.max(np.abs(expected), initial=0)
    wrong = ~(np.abs(actual - expected) <= tolerance * scale)
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise MismatchError(
            kind,
            f"{what}{list(at)} is {actual[at]!r}, expected {expected[at]!r}; {int(wrong.sum())} of {wrong.size} differ",
        )


def require_state(kind: str, actual: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-9) -> None:
    for name, value in expected.items():
        require_close(kind, name, actual[name], value, tolerance)


def check(
    program: Program, seed: int, fields: Fields, name: str = "<random program>", *, runs_alone: bool = True
) -> None:
    """Compare everything that a program does with the reference.

    Args:
        program: the program to run.
        seed: of the values of its fields.
        fields: those made so far.
        name: the file name under which Python knows the text.
        runs_alone: compile the program without taichi_ext too, even if nothing is wrong.

    Raises:
        MismatchError: something is wrong; its ``kind`` starts with "plain" where taichi_ext has no part in it.
        UnsupportedError: the program was refused.
        RejectedError: the program cannot be judged.
    """
    points = judge(program, seed)
    loaded = Loaded(program, fields, name)
    try:
        if runs_alone:
            check_plain_run(loaded, points)
        if IS_PLAIN:
            return
        try:
            _check_jacobian(loaded, points)
        except (MismatchError, UnsupportedError):
            check_plain_run(loaded, points)
            raise
    finally:
        loaded.close()


def check_plain_run(loaded: Any, points: list[tuple[dict[str, Any], Any]], tolerance: float = 1e-9) -> None:
    """Compare the state after runs without taichi_ext with the reference."""
    for values, expected in points:
        args = loaded.prepare(values)
        try:
            loaded.entry(*args)
        except Exception as error:
            raise MismatchError("plain crash", f"{type(error).__name__}: {error}") from error
        require_state("plain run", loaded.state(args), expected.state, tolerance)


@contextlib.contextmanager
def crashes_told() -> Iterator[None]:
    """An error of a call is a mismatch, but for what is refused, and for what ``ti.static`` leaves of a program."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DerivativeWarning)
            yield
    except UnsupportedError:
        raise
    except Exception as error:
        if isinstance(error, InvalidArgumentError) and re.search("is not (read|written)", str(error)):
            raise RejectedError(str(error)) from error
        raise MismatchError("crash", f"{type(error).__name__}: {error}") from error


def _check_jacobian(loaded: Loaded, points: list[tuple[dict[str, Any], Expected]]) -> None:
    program = loaded.program
    plan = None
    for values, expected in points:
        args = loaded.prepare(values)
        given = {a.name: v if isinstance(a, Field) else a.name for a, v in zip(program.args, args, strict=True)}
        targets = {**loaded.fields, **given}
        with crashes_told():
            if plan is None:
                outputs = None if program.returns else {n: targets[n] for n in program.outputs}
                params = {n: targets[n] for n in program.params}
                plan = Jacobian(loaded.entry, params, outputs, args=args, format=FORMAT, **OPTIONS)
            found = plan(args=args)
        if program.returns:
            found = {"": found}
        require_state("state", loaded.state(args), expected.state)
        for name, blocks in found.items():
            whole = expected.derivatives[name]
            first = 0
            for param in program.params:
                size = np.size(values[param])
                part = whole[..., first : first + size].reshape((*whole.shape[:-1], *np.shape(values[param])))
                found_here = blocks[param] if FORMAT is None else blocks[param].toarray().reshape(part.shape)
                require_close("derivative", f"d {name or 'result'} / d {param}", found_here, part, 1e-8)
                first += size
