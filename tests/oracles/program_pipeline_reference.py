"""The reference for pipelines: kernels, the Python around them, and the memory that both share, on complex numbers.

``program_reference`` runs kernels; here are array arguments with their annotations, structs with methods, data-oriented
objects, what Python reads and stores between kernels, and long loops, whose iterations are computed side by side.
"""

from __future__ import annotations

import ast
import functools
import types
from typing import Any

import numpy as np
from program_functions import real
from program_hosts import KINDS, MATH, HostArray, HostField, HostNumber, HostStructs, Struct, StructType, lanes
from program_reference import STEP, Array, Cell, Record, Reference
from program_translation import Translator, annotation, call

LONG = 2000  # iterations from which on a loop is computed at once
CLASSES = 12  # and in so many batches, by the remainder of the iteration's number


class PipelineReference(Reference):
    """One evaluation of a pipeline.

    Args:
        lanes: the number of columns.
    """

    def __init__(self, lanes: int) -> None:
        super().__init__({}, (), {})
        self.lanes = max(lanes, 1)
        self.result: Any = None  # the last kernel's return value, with its lanes
        self.touched: set[int] = set()  # memory that kernels have read or stored to, by the id of its owner
        self.stored: set[int] = set()

    # --- the program

    def zeros(self, kind: type, shape: tuple[int, ...], element: tuple[int, ...] = ()) -> Any:
        return kind(np.zeros((*shape, *element, self.lanes), complex), len(shape))

    def load_program(self, text: str) -> dict[str, Any]:
        """The names that a program defines."""
        self.scope = {**self.modules(), "placed": lambda layout, field, shape: self.reshaped(field, shape)}
        exec(compile(translate(text), "<reference>", "exec"), self.scope)
        return self.scope

    def seed(self, data: np.ndarray, value: np.ndarray, first: int | None) -> None:
        """Set memory to values, which are parameters from a column on where one is given."""
        flat = data.reshape(-1, self.lanes)
        shares = np.shares_memory(flat, data)
        flat[...] = np.reshape(value, -1)[:, None]
        if first is not None:
            flat[np.arange(len(flat)), first + np.arange(len(flat))] += 1j * STEP
        if not shares:
            data[...] = flat.reshape(data.shape)

    def number(self, value: np.ndarray, first: int | None) -> Any:
        """An argument that is passed by value, a parameter from a column on where one is given."""
        data = np.zeros((*value.shape, self.lanes), complex)
        self.seed(data, value, first)
        return data

    def run(self, entry: str, args: tuple[Any, ...]) -> Any:
        with np.errstate(all="ignore"):
            return eval(entry, self.scope)(*args)

    def kernel(self, function: Any) -> Any:
        """A kernel: what it returns is a number for Python."""

        @functools.wraps(function)
        def launched(*args: Any) -> Any:
            self.result = function(*args)
            return HostNumber(self.result) if isinstance(self.result, np.ndarray) else self.result

        return launched

    def dataclass(self, made: type) -> StructType:
        members = {name: self.scope.get(kind) or KINDS[kind] for name, kind in made.members.items()}  # type: ignore[attr-defined]
        methods = {name: value for name, value in vars(made).items() if callable(value)}
        return StructType(self, members, methods)

    @staticmethod
    def reshaped(field: HostField, shape: tuple[int, ...]) -> HostField:
        """A field whose shape is that of its layout."""
        data = np.zeros((*shape, *field.data.shape), field.data.dtype)
        return HostField(data, len(shape))

    # --- memory

    def bind(self, value: Any, kind: str) -> Any:
        """An argument as the kernel sees it, by its annotation."""
        value = lanes(value)
        if isinstance(value, Array) and "ndim=" in kind:
            return Array(value.data, int(kind.split("ndim=")[1].split(",")[0].strip(")")))
        if not isinstance(value, (int, float, complex, np.ndarray, np.generic, Record, Cell)):
            return value if isinstance(value, (Array, HostStructs)) else Holder(value)
        return self.cell(float(value) if kind.startswith("ti.f") and np.ndim(value) == 0 else value)

    def cell(self, value: Any) -> Any:
        return value if isinstance(value, (HostStructs, Holder)) else super().cell(value)

    def whole(self, x: Any) -> Any:
        return x if isinstance(x, (HostStructs, Array)) else super().whole(x)

    def copy(self, value: Any) -> Any:
        if isinstance(value, Struct):
            return Struct({name: self.copy(v) for name, v in value.members.items()}, value.kind)
        if isinstance(value, (HostStructs, Array)):
            return value
        return super().copy(value)

    def view(self, base: Any, index: tuple[Any, ...]) -> Any:
        if isinstance(base, Array):
            self.touched.add(owner(base.data))
        if isinstance(base, HostStructs):
            next_field = base
            while isinstance(next_field, HostStructs):
                next_field = next(iter(next_field.members.values()))
            flat = [int(j) for i in index for j in np.ravel(i)]
            super().view(next_field, tuple(flat))  # is it in range
            return base.place(tuple(flat))
        if any(is_batch(i) for i in index):
            base = base.data if isinstance(base, Array) else base
            return base[tuple(i[:, 0] if is_batch(i) else i for i in index)]
        if isinstance(base, np.ndarray) and base.dtype.kind == "c" and base.ndim == 3 and len(index) == 1:
            if len(base) > 3:  # the vectors of a batch
                return base[:, index[0]]
        return super().view(base, index)

    def load(self, base: Any, index: tuple[Any, ...]) -> Any:
        if isinstance(base, tuple):  # a shape
            return base[int(index[0])]
        found = self.view(base, index)
        return self.copy(found) if isinstance(found, Struct) else super().load(base, index)

    def part(self, base: Any, name: str) -> Any:
        if isinstance(base, Holder):
            return getattr(base.object, name)
        if name == "shape" or isinstance(base, HostStructs):
            return getattr(base, name)
        return super().part(base, name)

    def store(self, base: Any, index: tuple[Any, ...], value: Any) -> None:
        value = self.copy(value)
        self.stored |= owners(self.view(base, index)) if not any(is_batch(i) for i in index) else {owner(base.data)}
        if isinstance(value, Struct):
            place = self.view(base, index)
            for name, part in value.members.items():
                place.put(name, part)
        elif any(is_batch(i) for i in index):
            data = base.data if isinstance(base, Array) else base
            data[tuple(i[:, 0] if is_batch(i) else i for i in index)] = value
        else:
            super().store(base, index, value)

    def store_part(self, base: Any, name: str, value: Any) -> None:
        self.stored |= owners(base.members[name] if isinstance(base, Struct) else base)
        if isinstance(base, Struct):
            base.put(name, self.copy(value))
        else:
            super().store_part(base, name, value)

    def augment(self, base: Any, index: tuple[Any, ...], name: str, value: Any) -> None:
        """``base[index] += value`` and the like; iterations of a batch add up."""
        if is_many(value) and not any(is_batch(i) for i in index):
            assert name in ("add", "sub")
            value = value.sum(axis=0)
        elif any(is_batch(i) for i in index) and name in ("add", "sub"):
            data = base.data if isinstance(base, Array) else base
            sign = 1 if name == "add" else -1
            self.stored.add(owner(data))
            np.add.at(data, tuple(i[:, 0] if is_batch(i) else i for i in index), sign * value)
            return
        self.store(base, index, self.binary(name, self.load(base, index), value))

    def atomic(self, name: str, place: Any, value: Any) -> Any:
        self.stored |= owners(place)
        if not is_many(value):
            return super().atomic(name, place, value)
        if name in ("add", "sub"):
            value = value.sum(axis=0)
        else:
            order = np.argsort(real(value) * (1 if name == "min" else -1))
            self.note_kink(value[order[0]] - value[order[1]])
            value = value[order[0]]
        super().atomic(name, place, value)
        return None

    def method(self, base: Any, name: str, *args: Any) -> Any:
        if isinstance(base, Struct):
            return base.kind.methods[name](base, *args)
        if isinstance(base, Holder):
            return getattr(base.object, name)(*args)
        return super().method(base, name, *args)

    # --- iterations side by side

    def loop(self, iterable: Any) -> Any:
        if isinstance(iterable, Array) and iterable.dims == 1 and iterable.shape[0] > LONG:
            iterable = range(iterable.shape[0])
        if isinstance(iterable, HostStructs):
            iterable = Array(np.zeros(iterable.shape), len(iterable.shape))
        if not isinstance(iterable, range) or len(iterable) <= LONG:
            yield from super().loop(iterable)
            return
        for remainder in range(CLASSES):
            yield Cell(np.array([i for i in iterable if i % CLASSES == remainder])[:, None])

    def compare(self, name: str, a: Any, b: Any) -> Any:
        result = super().compare(name, a, b)
        if np.ndim(result) == 2 and (result.all() or not result.any()):
            return bool(result.all())
        return result[:, 0] if np.ndim(result) == 2 else result

    def lift(self, x: Any) -> np.ndarray:
        x = lanes(x)
        return np.asarray(x, dtype=complex) if np.ndim(x) > 1 else super().lift(x)

    def vector(self, entries: Any) -> np.ndarray:
        return np.stack(np.broadcast_arrays(*(self.lift(e) for e in entries)), axis=-2)

    def modules(self) -> dict[str, Any]:
        names = super().modules()
        ti = names["ti"]

        def field(*args: Any, shape: Any = (), kind: type = HostField) -> Any:
            element = tuple(n for n in args if isinstance(n, int))
            shape = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
            return self.zeros(kind, shape, element)

        def vector(entries: Any) -> np.ndarray:
            return self.vector(entries)

        ti.Vector, ti.f32 = vector, "float"
        for place in (ti, ti.Vector, ti.Matrix):
            place.field = place.ndarray = field
        numpy = types.SimpleNamespace(
            zeros=lambda shape, dtype=None, order="C": self.array(shape, order),
            float32=None,
            float64=None,
            full=np.full,
            linspace=np.linspace,
        )
        torch = types.SimpleNamespace(
            zeros=lambda *shape, dtype=None: self.array(*shape, "C"), float32=None, float64=None
        )
        return {**names, "np": numpy, "torch": torch, "math": types.SimpleNamespace(**MATH)}

    def array(self, shape: Any, order: str) -> HostArray:
        shape = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
        if order == "F":
            made = np.zeros((*shape[::-1], self.lanes), complex)
            return HostArray(made.transpose(*reversed(range(len(shape))), len(shape)), len(shape))
        return self.zeros(HostArray, shape)


class Holder:
    """A data-oriented object in a kernel."""

    def __init__(self, held: Any) -> None:
        self.object = held

    @property
    def v(self) -> Holder:
        return self


def owner(data: np.ndarray) -> int:
    """The memory of an array and of all its views."""
    return id(owner_array(data))


def owner_array(data: np.ndarray) -> np.ndarray:
    return data if data.base is None else owner_array(data.base)


def owners(place: Any) -> set[int]:
    """Those of a place, which may be a struct."""
    if isinstance(place, Struct):
        return {found for part in place.members.values() for found in owners(part)}
    return {owner(place)} if isinstance(place, np.ndarray) else set()


def is_batch(index: Any) -> bool:
    """Whether an index is that of many iterations."""
    return isinstance(index, np.ndarray) and index.ndim == 2


def is_many(value: Any) -> bool:
    """Whether a scalar has values for many iterations."""
    return isinstance(value, np.ndarray) and value.ndim == 2 and value.dtype.kind == "c" and len(value) > 4


def columns_of(shapes: dict[str, tuple[int, ...]], params: tuple[str, ...]) -> dict[str, int]:
    """The first column of each leaf of the parameters, in order; ``""`` has the number of all.

    Args:
        shapes: of everything that can be a parameter, by name; members of structs by ``S.m``.
        params: names, or those of whole struct fields.
    """
    first, at = {}, 0
    for param in params:
        for leaf, shape in shapes.items():
            if f"{leaf}.".startswith(f"{param}."):
                first[leaf] = at
                at += int(np.prod(shape, dtype=int))
    return {**first, "": at}


# --- from the text to plain Python


def translate(text: str) -> ast.Module:
    """The program with its kernels, functions and classes on cells and arrays; other functions stay."""
    tree = ast.parse(text)
    functions = {f.name: f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef)}
    templates = {name: [annotation(a) == "ti.template()" for a in f.args.args] for name, f in functions.items()}
    translator = _Translator(templates)
    tree.body = [translator.definition(s) for s in tree.body]
    return ast.fix_missing_locations(tree)


class _Translator(Translator):
    def definition(self, node: ast.stmt) -> ast.stmt:
        if isinstance(node, ast.FunctionDef) and node.decorator_list:
            return self.function(node)
        if isinstance(node, ast.ClassDef):
            is_struct = "dataclass" in ast.unparse(node.decorator_list[0])
            node.decorator_list = [ast.parse("_R.dataclass", mode="eval").body] if is_struct else []
            members = {}
            for s in node.body:
                if isinstance(s, ast.AnnAssign):
                    members[ast.unparse(s.target)] = ast.unparse(s.annotation)
            node.body = [self.definition(s) for s in node.body if not isinstance(s, ast.AnnAssign)]
            node.body.append(ast.parse(f"members = {members!r}").body[0])
        return node

    def function(self, node: ast.FunctionDef) -> ast.FunctionDef:
        kind = ast.unparse(node.decorator_list[0])
        self.annotations = {a.arg: annotation(a) for a in node.args.args}
        made = super().function(node)
        made.decorator_list = [ast.parse("_R.kernel", mode="eval").body] if kind == "ti.kernel" else []
        return made

    def argument(self, name: str) -> ast.stmt:
        value = call("bind", ast.Name(name, ast.Load()), ast.Constant(self.annotations.get(name, "")))
        return ast.Assign([ast.Name(name, ast.Store())], value)

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        if not isinstance(node.target, ast.Subscript):
            return super().visit_AugAssign(node)
        place, index = self.place(node.target.value), self.index(node.target.slice)
        name = ast.Constant(self.operator_name(node.op))
        return ast.Expr(call("augment", place, index, name, self.visit(node.value)))
