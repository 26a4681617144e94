"""Containers of random pipelines: fields, structs and arrays, the views of them that kernels get, and which views meet."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np

ELEMENTS = {"f": (), "v2": (2,), "v3": (3,), "m22": (2, 2)}
TYPES = {"f": "{real}", "v2": "tm.vec2", "v3": "tm.vec3", "m22": "tm.mat2"}
STRUCTS = {"Body": {"m": "f", "u": "v3"}, "Pair": {"a": "Body", "w": "f"}}
ARRAYS = ("numpy", "torch", "ndarray")
SPARSE = ("pointer", "bitmasked", "dynamic")


@dataclass(frozen=True)
class Container:
    """A field, a field of structs, or an array."""

    name: str
    kind: str  # "field", "struct", or one of ARRAYS
    shape: tuple[int, ...]
    element: str  # one of ELEMENTS or of STRUCTS
    layout: str = ""  # of a field; "F" is that of a NumPy array in Fortran order
    is_argument: bool = False  # of the pipeline
    is_local: bool = False  # made by the pipeline each time it runs

    @property
    def is_array(self) -> bool:
        return self.kind in ARRAYS

    def leaves(self) -> list[tuple[str, str]]:
        """The scalar, vector and matrix fields that it consists of: how Python names each, and its element."""
        return _leaves(self.name, self.element)

    def definition(self, real: str) -> str:
        """The line of Python that makes it; ``real`` is "f32" or "f64"."""
        shape = f"shape={self.shape}"
        if self.kind == "numpy":
            order = ", order='F'" if self.layout == "F" else ""
            return f"{self.name} = np.zeros({self.shape + ELEMENTS[self.element]}, np.float{real[1:]}{order})"
        if self.kind == "torch":
            return f"{self.name} = torch.zeros({self.shape + ELEMENTS[self.element]}, dtype=torch.float{real[1:]})"
        if self.kind == "struct":
            return f"{self.name} = {self.element}.field({shape})"
        size = ELEMENTS[self.element]
        maker = {0: "ti.", 1: "ti.Vector.", 2: "ti.Matrix."}[len(size)]
        kind = "ndarray" if self.kind == "ndarray" else "field"
        numbers = "".join(f"{n}, " for n in size)
        if self.layout in SPARSE:
            return f"{self.name} = placed({self.layout!r}, {maker}{kind}({numbers}ti.{real}), {self.shape})"
        if self.layout == "dense":
            return f"{self.name} = placed('dense', {maker}{kind}({numbers}ti.{real}), {self.shape})"
        return f"{self.name} = {maker}{kind}({numbers}ti.{real}, {shape})"


def _leaves(name: str, element: str) -> list[tuple[str, str]]:
    if element in ELEMENTS:
        return [(name, element)]
    return [leaf for member, inner in STRUCTS[element].items() for leaf in _leaves(f"{name}.{member}", inner)]


@dataclass(frozen=True)
class View:
    """An argument of a kernel: a whole container or a piece of an array."""

    text: str
    root: str
    shape: tuple[int, ...]
    element: str
    entries: tuple[int, ...]  # numbers of the entries of the root, in the order of the view

    def meets(self, other: View) -> bool:
        return self.root == other.root and not set(self.entries).isdisjoint(other.entries)

    def is_same(self, other: View) -> bool:
        return (self.root, self.shape, self.element, self.entries) == (
            other.root,
            other.shape,
            other.element,
            other.entries,
        )


def whole(c: Container) -> View:
    return View(c.name, c.name, c.shape, c.element, tuple(range(math.prod(c.shape))))


def views(c: Container, steps: int = 0) -> list[View]:
    """Whole and contiguous pieces; with ``steps``, also ``c[t]`` and ``c[t + 1]`` where t takes that many values.

    A view with a step has the text of the first and stands for all; ``at_step`` gives the others.
    """
    found = [whole(c)]
    if c.kind not in ("numpy", "torch") or c.layout == "F":
        if c.layout == "F" and c.element == "f":
            found += _numbered(c, ["{}.T"])
        return found
    rows = c.shape[0]
    texts = [f"{{}}[{k}]" for k in (*range(rows), -1)] if len(c.shape) > 1 else []
    texts += [f"{{}}[{a}:{b}]" for a, b in itertools.combinations(range(rows + 1), 2) if b - a < rows]
    if c.element == "f":
        flat = "view" if c.kind == "torch" else "reshape"
        if len(c.shape) > 1:
            texts += [f"{{}}.{flat}(-1)", f"{{}}.reshape({', '.join(map(str, c.shape[::-1]))})"]
            texts += [f"{{}}[{k}, {a}:{b}]" for k in range(rows) for a, b in ((0, 2), (1, c.shape[1]))]
        if c.kind == "numpy" and len(c.shape) > 1:
            texts += ["{}.T", "{}.ravel()", "{}[1:].T"]
        texts += [f"{{}}.reshape({n}, -1)" for n in (2, 3) if len(c.shape) == 1 and rows % n == 0 and rows > n]
    if steps:
        texts += [text for text in ("{}[t]", "{}[t + 1]") if len(c.shape) > 1 and rows > steps]
    return found + _numbered(c, texts) + _as_vectors(c, texts)


def _numbered(c: Container, texts: list[str], element: str = "", t: int = 0) -> list[View]:
    """The views of these texts, with the entries that they have."""
    numbers = np.arange(math.prod(c.shape)).reshape(c.shape)
    if c.layout == "F":
        numbers = np.asfortranarray(numbers)
    found = []
    for text in texts:
        part = eval(text.format("numbers").replace(".view(", ".reshape("), {"numbers": numbers, "t": t})
        if 0 not in part.shape:
            found.append(View(text.format(c.name), c.name, part.shape, c.element, tuple(int(n) for n in part.flat)))
    return found


def _as_vectors(c: Container, texts: list[str]) -> list[View]:
    """Pieces of numbers whose last axis a kernel takes for vectors."""
    if c.element != "f" or c.shape[-1] not in (2, 3) or len(c.shape) < 2:
        return []
    plain = _numbered(c, ["{}", *(t for t in texts if ":" in t and "," not in t and ".T" not in t)])
    return [replace(v, shape=v.shape[:-1], element=f"v{v.shape[-1]}") for v in plain if len(v.shape) > 1]


def at_step(c: Container, view: View, t: int) -> View:
    """A view whose text names ``t``, for a value of it."""
    if "[t" not in view.text:
        return view
    [found] = _numbered(c, [view.text.replace(c.name, "{}", 1)], t=t)
    return found
