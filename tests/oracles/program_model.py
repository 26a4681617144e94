"""The parts of random programs: fields, arguments, variables, and where they may be used."""

from dataclasses import dataclass, field, replace

import numpy as np

SHAPES = {"f": (), "v2": (2,), "v3": (3,), "m22": (2, 2), "m33": (3, 3)}
VECTORS = ("v2", "v3")
MATRICES = ("m22", "m33")
ANNOTATIONS = {"f": "ti.f64", "v2": "tm.vec2", "v3": "tm.vec3", "m22": "tm.mat2", "m33": "tm.mat3", "i": "ti.i32"}
STRUCT = "S = ti.types.struct(p=ti.f64, q=tm.vec3)"
MEMBERS = {"p": "f", "q": "v3"}


@dataclass(frozen=True)
class Field:
    """A field, or an array argument."""

    name: str
    type: str  # of an entry: "i" or one of SHAPES
    shape: tuple[int, ...]
    high: int = 0  # integers lie in [0, high)
    is_array: bool = False  # an argument of the kernels
    access: str = "whole"  # of vectors and matrices; Taichi 1.7.4 itself is wrong on some programs that mix the ways

    @property
    def annotation(self) -> str:
        return f"ti.types.ndarray(dtype={ANNOTATIONS[self.type]}, ndim={len(self.shape)})"

    def values(self, rng: np.random.Generator) -> np.ndarray:
        if self.type == "i":
            return rng.integers(0, self.high, self.shape).astype(np.int32)
        return rng.uniform(-1.2, 1.2, (*self.shape, *SHAPES[self.type]))


@dataclass(frozen=True)
class Argument:
    """An argument that is passed by value."""

    name: str
    type: str

    @property
    def annotation(self) -> str:
        return ANNOTATIONS[self.type]

    def value(self, rng: np.random.Generator) -> object:
        return int(rng.integers(1, 4)) if self.type == "i" else rng.uniform(-1.2, 1.2, SHAPES[self.type])


@dataclass(frozen=True)
class Program:
    """A generated program: ``entry`` is launched, with the arguments named in ``args`` where there are any."""

    text: str
    fields: tuple[Field, ...]
    args: tuple[Argument | Field, ...]
    params: tuple[str, ...]
    outputs: tuple[str, ...]
    returns: bool
    entry: str


@dataclass
class Variable:
    name: str
    type: str
    low: int = 0
    high: int = 0  # integers lie in [low, high]
    is_readable: bool = True
    is_writable: bool = True
    is_sum: bool = False  # added to by the iterations of a parallel loop
    is_static: bool = (
        False  # a number that Taichi knows: it refuses indices beyond the end, whatever conditions there are
    )


@dataclass
class Function:
    name: str
    parameters: list[tuple[str, str]]  # type and kind: "value", "reference" or "entry"
    results: list[str]
    has_loop: bool


@dataclass
class Access:
    """The allowed uses of a field at a place."""

    can_read: bool = True
    can_write: bool = True
    can_add: bool = True
    own: tuple[str | None, ...] = ()  # indices that are prescribed


@dataclass
class Place:
    """The surroundings of a statement."""

    scopes: list[list[Variable]] = field(default_factory=lambda: [[]])
    access: dict[str, Access] = field(default_factory=dict)
    is_root: bool = False
    can_break: bool = False
    can_continue: bool = False
    can_loop: bool = True
    trips: int = 1
    depth: int = 0


def locals_of(v: Variable) -> list[Variable]:
    """A local with its members, which can be used like locals."""
    members = MEMBERS if v.type == "s" else {}
    return [v, *(replace(v, name=f"{v.name}.{name}", type=type) for name, type in members.items())]
