"""Run a random level with taichi_ext, and compare value and derivatives with the same text run by Python.

There numbers carry their gradient by the position (``Placed``), the covered area is that of one straight edge (pixels are
not divided), and derivatives are central differences.  What has a gradient of its own (stopped, replaced, of a rule) is kept from the
run at the centre, and moves by its own gradient alone.
"""

from __future__ import annotations

import linecache
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import program_check
import taichi as ti
from differences import integers, outputs, read, scalars, write
from planar import undivided_pixels
from program_levels import LevelProgram
from program_verdict import PER_START, REFUSED, REJECTED, RIGHT
from taichi_program import initialise

import taichi_ext
from taichi_ext import DerivativeWarning, Jacobian, UnsupportedError, boundary_gradient, registry

W, H = 4, 3
STEPS = (1e-5, 3e-5)  # of differences, which agree where there is no kink


@dataclass(frozen=True)
class Placed:
    """A number with its gradient by the position of the pixel."""

    value: float
    x: float = 0.0
    y: float = 0.0

    def __add__(self, other: Any) -> Placed:
        o = placed(other)
        return Placed(self.value + o.value, self.x + o.x, self.y + o.y)

    def __mul__(self, other: Any) -> Placed:
        o = placed(other)
        return Placed(self.value * o.value, self.x * o.value + self.value * o.x, self.y * o.value + self.value * o.y)

    def __sub__(self, other: Any) -> Placed:
        return self + placed(other) * -1.0

    def __rsub__(self, other: Any) -> Placed:
        return placed(other) - self

    __radd__, __rmul__ = __add__, __mul__

    def __gt__(self, other: Any) -> bool:
        return self.value > placed(other).value

    def __lt__(self, other: Any) -> bool:
        return self.value < placed(other).value


def placed(a: Any) -> Placed:
    return a if isinstance(a, Placed) else Placed(float(a))


def covered_area(level: Placed) -> float:
    """The part of a unit square in which a level is positive that is linear there."""
    g = math.hypot(level.x, level.y)
    if g < 1e-20:
        return float(level.value > 0)
    s, a, b = level.value / g, max(abs(level.x), abs(level.y)) / g, min(abs(level.x), abs(level.y)) / g
    low, high = (a - b) / 2, (a + b) / 2
    distance = abs(s)
    half = distance / a if distance <= low else 0.5
    if low < distance < high:
        half = low / a + (b * b - (high - distance) ** 2) / (2 * a * b)
    return 0.5 + math.copysign(half, s)


class Reference:
    """The text, run by Python at one position after the other."""

    def __init__(self, program: LevelProgram, values: dict[str, np.ndarray]) -> None:
        self.values = values
        self.kept: list[Any] = []  # values kept from the centre, in the order of their use
        self.replay: Iterator[Any] | None = None  # of that, where this is not the centre
        self.image = np.zeros((W, H), object)
        self.has_flat_level = False  # one that does not change with the position
        taichi = SimpleNamespace(func=_same, kernel=_same, max=_most, min=_least)
        self.scope: dict[str, Any] = {
            **values,
            "n": {None: program.count},
            "ti": taichi,
            "float": float,
            "rule": self._rule,
            "image": self.image,
            "stop_gradient": lambda a: Placed(self._as_at_centre(placed(a).value)),
            "replace_gradient": self._replaced,
            "coverage": lambda level, at: self._area(level),
            "edge": self._edge,
        }
        text = program.text.replace("for i, j in image:", "for i, j in places:")
        text = text.replace("x = float(i)", "x = px(i)").replace("y = float(j)", "y = py(j)")
        self.scope["places"] = list(np.ndindex(W, H))
        self.scope["px"], self.scope["py"] = (lambda i: Placed(i, 1.0, 0.0)), (lambda j: Placed(j, 0.0, 1.0))
        exec(compile(text, "<level>", "exec", dont_inherit=True), self.scope)

    def _as_at_centre(self, value: Any) -> Any:
        if self.replay is not None:
            return next(self.replay)
        self.kept.append(value)
        return value

    def _replaced(self, value: Any, surrogate: Any) -> Placed:
        value, surrogate = placed(value), placed(surrogate)
        first, base = self._as_at_centre((value.value, surrogate.value))
        return Placed(first + surrogate.value - base, surrogate.x, surrogate.y)

    def _area(self, level: Any) -> float:
        level = placed(level)
        self.has_flat_level |= level.x == level.y == 0
        return covered_area(level)

    def _edge(self, level: Any, inside: Any, outside: Any, at: Any, antialias: bool) -> float:
        area = self._area(level)
        return area * placed(inside).value + (1 - area) * placed(outside).value

    def _rule(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        function = self.scope["bent"]

        def bent(u: Any, v: Any) -> Placed:
            u, v = placed(u), placed(v)
            first, u0, v0 = self._as_at_centre((placed(function(u, v)).value, u.value, v.value))
            moved = [placed(rule(*d)).value for d in ((u.value - u0, v.value - v0), (u.x, v.x), (u.y, v.y))]
            return Placed(first + moved[0], *moved[1:])

        self.scope["bent"] = bent
        return rule

    def run(self) -> np.ndarray:
        self.image[...] = 0
        self.scope["run"]()
        return np.array([placed(v).value for v in self.image.flat]).reshape(W, H)

    def derivatives(self, step: float) -> np.ndarray:
        """By p; the run at the centre has been before."""
        p = self.values["p"]
        J = np.zeros((W, H, len(p)))
        for k in range(len(p)):
            ends = []
            for sign in (1, -1):
                before, p[k] = p[k], p[k] + sign * step
                self.replay = iter(self.kept)
                ends.append(self.run())
                p[k] = before
            J[..., k] = (ends[0] - ends[1]) / (2 * step)
        return J


def _same(function: Any) -> Any:
    return function


def _most(a: Any, b: Any) -> Placed:
    return placed(a) if a > b else placed(b)


def _least(a: Any, b: Any) -> Placed:
    return placed(a) if a < b else placed(b)


class LevelWorkshop:
    """A Taichi program that is replaced by a new one now and then."""

    def __init__(self) -> None:
        self.count = 0

    def ready(self) -> None:
        if self.count % PER_START == 0:
            initialise(default_fp=ti.f64)
        self.count += 1


def level_verdict(
    program: LevelProgram, seed: int, workshop: LevelWorkshop, *, runs_alone: bool = False
) -> tuple[str, str]:
    """How a program fares, in a word, with a message, as ``program_verdict.verdict`` says."""
    values = values_of(program, seed)
    reference = Reference(program, values)
    image = reference.run()
    one, other = (reference.derivatives(step) for step in STEPS)
    if not np.allclose(one, other, rtol=1e-5, atol=1e-6):
        return REJECTED, "close to a kink"
    workshop.ready()
    fields = {name: (scalars if v.dtype.kind == "f" else integers)(v) for name, v in values.items()}
    fields |= {"n": integers(program.count), "image": outputs(W, H)}
    name, file = f"bent {seed} {workshop.count}", f"<random level {seed}, {workshop.count}>"
    lines = program.text.splitlines(keepends=True)
    linecache.cache[file] = (len(program.text), None, lines, file)
    scope: dict[str, Any] = {**vars(taichi_ext), **fields, "ti": ti, "__name__": "random_level"}
    scope["rule"] = lambda rule: boundary_gradient(scope["bent"], name=name)(rule)
    try:
        exec(compile(program.text, file, "exec", dont_inherit=True), scope)
        options = {"format": program_check.FORMAT, **program_check.OPTIONS}
        with undivided_pixels(), warnings.catch_warnings():
            warnings.simplefilter("ignore", DerivativeWarning)
            J = Jacobian(scope["run"], fields["p"], fields["image"], **options)()
    except UnsupportedError as error:
        is_right = reference.has_flat_level and "level does not depend on at=" in str(error)
        return (REJECTED, "a level without an edge") if is_right else (REFUSED, str(error))
    except Exception as error:
        return "crash", f"crash: {type(error).__name__}: {error}"
    finally:
        linecache.cache.pop(file)
        if name in registry:
            registry.remove(name)
    J = J if program_check.FORMAT is None else J.toarray().reshape(one.shape)
    for kind, found, wanted in (("state", read(fields["image"]), image), ("derivative", J, one)):
        difference = np.abs(found - wanted) - (1e-9 if kind == "state" else 1e-5 * (1 + np.abs(wanted)))
        if not (difference <= 0).all():
            at = tuple(map(int, np.unravel_index(np.argmax(difference), wanted.shape)))
            return kind, f"{kind}: {list(at)} is {found[at]!r}, expected {wanted[at]!r}"
    write(fields["image"], 0.0)
    return RIGHT, ""


def values_of(program: LevelProgram, seed: int) -> dict[str, np.ndarray]:
    """The values of the fields."""
    rng, n = np.random.default_rng(seed), program.count
    angle = rng.uniform(0, 2 * np.pi, n)
    a, b = np.cos(angle), np.sin(angle)
    through = a * rng.uniform(0.5, W - 1.5, n) + b * rng.uniform(0.5, H - 1.5, n)
    order = rng.permutation(n).astype(np.int32)
    return {"a": a, "b": b, "p": np.r_[through, rng.uniform(0.5, 1, 2)], "order": order}


def describe_level(program: LevelProgram) -> str:
    return f"{program.count} half-planes\n\n{program.text}"
