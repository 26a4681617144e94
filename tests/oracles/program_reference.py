"""A reference for Taichi programs, in NumPy: their source runs as plain Python on complex numbers, a lane per parameter.

The text of the kernels is rewritten into Python in which every local is a cell that holds a value of its own, and every
number an array with a last axis of lanes.  In lane k the k-th parameter has the imaginary part ``STEP``, so that the
imaginary parts of all other numbers, divided by ``STEP``, are the derivatives by that parameter to rounding error
(complex-step differentiation: Squire and Trapp, SIAM Review 40(1), 1998).  No derivative rule is used anywhere, nothing
of taichi_ext and nothing of Taichi.

Comparisons, floors and the like look at the real part.  The least distance to a place where one of them jumps is kept
in ``Reference.margin``: a program that runs close to one has no derivative to compare with.
"""

from __future__ import annotations

import itertools
import math
import operator
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
from program_functions import Functions, RejectedError, is_integer, real
from program_translation import to_python

STEP = 1e-30
LARGEST = 1e4  # values beyond it make a program useless for comparison


class Cell:
    """A local variable."""

    def __init__(self, v: Any) -> None:
        self.v = v


class Record:
    """A struct."""

    def __init__(self, members: dict[str, Any]) -> None:
        self.members = members


class Array:
    """A field or array argument: integers, or complex numbers with a last axis of lanes."""

    def __init__(self, data: np.ndarray, dims: int) -> None:
        self.data = data
        self.dims = dims

    @property
    def v(self) -> Array:
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape[: self.dims]

    def fill(self, value: float) -> None:
        self.data[...] = value

    def copy_from(self, other: Array) -> None:
        self.data[...] = other.data

    def __getitem__(self, index: Any) -> Any:
        index = index if isinstance(index, tuple) else (index,)
        return self.data[(*(i for i in index if i is not None), ...)].copy()

    def __setitem__(self, index: Any, value: Any) -> None:
        index = index if isinstance(index, tuple) else (index,)
        self.data[(*(i for i in index if i is not None), ...)] = value


class Reference(Functions):
    """One evaluation of a program.

    Args:
        values: the initial value of every field and array, with the number of its dimensions without components.
        seeded: the names of the parameters, in the order of their columns.
        numbers: values of scalar and vector arguments by name.
    """

    def __init__(
        self, values: dict[str, tuple[np.ndarray, int]], seeded: tuple[str, ...], numbers: dict[str, Any]
    ) -> None:
        self.margin = math.inf
        self.steps = 0
        self.seeded = seeded
        sizes = [np.size(numbers[n]) if n in numbers else values[n][0].size for n in seeded]
        self.lanes = max(sum(sizes), 1)
        first = dict(zip(seeded, np.cumsum([0, *sizes])[:-1], strict=True))
        self.arrays: dict[str, Array] = {}
        for name, (value, dims) in values.items():
            self.arrays[name] = Array(self._spread(value, first.get(name)), dims)
        self.numbers: dict[str, Any] = {}
        for name, value in numbers.items():
            is_real = not is_integer(value)
            self.numbers[name] = self._spread(np.asarray(value), first.get(name)) if is_real else value

    def _spread(self, value: np.ndarray, first: int | None) -> np.ndarray:
        if value.dtype.kind == "i":
            return value.copy()
        data = np.zeros((*value.shape, self.lanes), dtype=complex)
        data += value[..., None]
        if first is not None:
            flat = data.reshape(-1, self.lanes)
            flat[np.arange(len(flat)), first + np.arange(len(flat))] += 1j * STEP
        return data

    def value(self, name: str) -> np.ndarray:
        return np.array(real(self.arrays[name].data))

    def derivative(self, x: Any) -> np.ndarray:
        return np.imag(x) / STEP

    # --- reading and writing

    def cell(self, value: Any) -> Any:
        return value if isinstance(value, (Cell, Array)) else Cell(self.copy(value))

    def copy(self, value: Any) -> Any:
        self.steps += 1
        if self.steps > 20000:
            raise RejectedError("too long")
        if isinstance(value, tuple):
            return tuple(self.copy(v) for v in value)
        if isinstance(value, Record):
            return Record({name: self.copy(v) for name, v in value.members.items()})
        if is_integer(value):
            return np.array(value) if isinstance(value, np.ndarray) and value.ndim else int(value)
        value = np.array(value)
        if not np.all(np.abs(value) < LARGEST):
            raise RejectedError("a value is too large")
        return value if value.ndim else self.lift(float(value) if value.dtype.kind != "c" else complex(value))

    def view(self, base: Any, index: tuple[Any, ...]) -> np.ndarray:
        flat: list[Any] = []
        for i in index:
            flat += [int(j) for j in i] if isinstance(i, np.ndarray) and i.ndim else [] if i is None else [int(i)]
        data = base.data if isinstance(base, Array) else base
        limit = data.shape[: len(flat)]
        if any(not 0 <= i < n for i, n in zip(flat, limit, strict=True)):
            raise RejectedError(f"index {flat} is out of range for {limit}")
        return data[(*flat, ...)]

    def load(self, base: Any, index: tuple[Any, ...]) -> Any:
        found = self.view(base, index)
        return int(found) if found.dtype.kind == "i" and not found.ndim else found.copy()

    def whole(self, x: Any) -> Any:
        """The memory of a vector local or of an array."""
        return x.data if isinstance(x, Array) else x.v

    def part(self, base: Any, name: str) -> Any:
        """``base.xy`` or a member of a struct."""
        if isinstance(base, Record):
            return base.members[name]
        numbers = ["xyzw".index(c) for c in name]
        return base[numbers[0]] if len(numbers) == 1 else base[numbers]

    def store(self, base: Any, index: tuple[Any, ...], value: Any) -> None:
        self.view(base, index)[...] = self.copy(value)

    def store_part(self, base: Any, name: str, value: Any) -> None:
        if isinstance(base, Record):
            base.members[name] = self.copy(value)
            return
        numbers = ["xyzw".index(c) for c in name]
        base[numbers[0] if len(numbers) == 1 else numbers] = self.copy(value)

    def unpack(self, value: Any, count: int) -> list[Any]:
        parts = [self.copy(v) for v in value]
        assert len(parts) == count
        return parts

    def binary(self, name: str, a: Any, b: Any) -> Any:
        return getattr(self, name, None)(a, b) if hasattr(self, name) else getattr(operator, name)(a, b)

    def atomic(self, name: str, place: Any, value: Any) -> Any:
        """``ti.atomic_<name>(place, value)``: returns the old value."""
        old = self.copy(place.v if isinstance(place, Cell) else place if place.ndim else int(place))
        new = self.copy(self.binary({"add": "add", "sub": "sub"}.get(name, name), old, value))
        if isinstance(place, Cell):
            place.v = new
        else:
            place[...] = new
        return old

    def loop(self, iterable: Any) -> Iterator[Any]:
        if isinstance(iterable, Array):
            iterable = itertools.product(*map(range, iterable.shape))
            iterable = (i[0] if len(i) == 1 else i for i in iterable)
        for item in iterable:
            yield tuple(Cell(i) for i in item) if isinstance(item, tuple) else Cell(item)

    def identity(self, kind: Any, size: int) -> np.ndarray:
        return np.repeat(np.eye(size, dtype=complex)[..., None], self.lanes, axis=-1)

    def cast(self, x: Any, kind: Any) -> Any:
        return self.int(x) if kind == "int" else self.float(x)

    def ndrange(self, *bounds: Any) -> Iterator[tuple[int, ...]]:
        return itertools.product(*(range(*b) if isinstance(b, tuple) else range(b) for b in bounds))

    def grouped(self, x: Any) -> Iterator[np.ndarray]:
        items = itertools.product(*map(range, x.shape)) if isinstance(x, Array) else x
        return (np.array(i) for i in items)

    def method(self, base: Any, name: str, *args: Any) -> Any:
        return getattr(self, {"max": "largest", "min": "smallest"}.get(name, name))(base, *args)

    def same(self, x: Any) -> Any:
        return x

    def struct_type(self, **kinds: Any) -> Any:
        def make(*args: Any, **named: Any) -> Record:
            given = {**dict(zip(kinds, args, strict=False)), **named}
            return self.copy(Record({name: given[name] for name in kinds}))

        return make

    def nothing(self, **keywords: Any) -> None:
        return None

    # --- the program

    def modules(self) -> dict[str, Any]:
        """Replacements of ``ti``, ``tm`` and the built-in functions."""

        def smooth(name: str) -> Any:
            return lambda x: getattr(np, name)(np.asarray(x, dtype=complex))

        both = {n: smooth(n) for n in ("sin", "cos", "tan", "tanh")}
        both |= {n: smooth("arc" + n[1:]) for n in ("asin", "acos")}
        for n in ("exp", "log", "sqrt", "rsqrt", "abs", "floor", "ceil", "round", "max", "min", "pow", "atan2", "cast"):
            both[n] = getattr(self, n)
        ti = types.SimpleNamespace(
            **both,
            select=self.choose,
            Vector=self.vector,
            Matrix=_matrix_namespace(self),
            static=self.same,
            ndrange=self.ndrange,
            grouped=self.grouped,
            loop_config=self.nothing,
            types=types.SimpleNamespace(struct=self.struct_type),
            f64="float",
            i32="int",
        )
        extra = ("dot", "cross", "clamp", "mix", "smoothstep", "fract", "sign", "reflect", "distance", "mod")
        tm = types.SimpleNamespace(**both, **{n: getattr(self, n) for n in extra})
        tm.length, tm.normalize, tm.log2 = self.norm, self.normalized, lambda x: self.log(x) / math.log(2)
        for size in (2, 3):
            setattr(tm, f"vec{size}", lambda *parts, size=size: self.vec(size, *parts))
            setattr(tm, f"mat{size}", lambda *parts, size=size: self.mat(size, *parts))
        names = {n: getattr(self, n) for n in ("abs", "max", "min", "pow", "int", "float", "round")}
        return {"ti": ti, "tm": tm, "_R": self, **names}

    def execute(self, text: str, entry: str, args: tuple[Any, ...] = ()) -> Any:
        """Run ``entry(*args)`` of a program on the arrays of this evaluation."""
        scope = {**self.modules(), **self.arrays}
        exec(compile(to_python(text), "<reference>", "exec"), scope)
        with np.errstate(all="ignore"):
            return scope[entry](*args)


def _matrix_namespace(reference: Reference) -> Any:
    def matrix(rows: Any) -> np.ndarray:
        return reference.matrix(rows)

    matrix.identity = reference.identity  # type: ignore[attr-defined]
    return matrix
