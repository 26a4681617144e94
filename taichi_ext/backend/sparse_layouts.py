"""Parts of the layout that are not dense: copies of their active cells with contents, to be restored.

A part is everything below the outermost node that is not dense. It is copied as a whole, since deactivating a cell
clears the entries of all fields in it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from taichi_ext.backend.lifetime import InTree, known_of_layout, tree_serial
from taichi_ext.backend.opaque import CoreNode
from taichi_ext.host import Expr, all_types, core, ti

# Taichi's stubs of kernels differ from the arguments that it takes.
# pyright: reportInvalidTypeForm=false

_KINDS = core.SNodeType
_DENSE = (_KINDS.dense, _KINDS.place)
_SPARSE = (_KINDS.pointer, _KINDS.bitmasked, _KINDS.dynamic)


class _Held(NamedTuple):
    """The contents of fields: the indices of each cell, and a row of numbers for it, as bits."""

    cells: np.ndarray
    numbers: np.ndarray


class _Node:
    """A node whose cells are active or not."""

    def __init__(self, core_node: CoreNode) -> None:
        node = ti.SNode(core_node)
        axes, outer = _axes(core_node), _axes(core_node.parent)
        self._is_dynamic = core_node.type == _KINDS.dynamic
        # a list is addressed by its outer indices, and its length follows from the stores
        self._index = [axes.index(axis) for axis in (outer if self._is_dynamic else axes)]
        rank, length = len(axes), len(self._index)

        @ti.kernel
        def find(cells: ti.types.ndarray(ti.i32, ndim=2), count: ti.types.ndarray(ti.i32, ndim=1)):
            for cell in ti.grouped(node):
                place = ti.atomic_add(count[0], 1)
                if place < cells.shape[0]:
                    for d in ti.static(range(rank)):
                        cells[place, d] = cell[d]

        @ti.kernel
        def activate(cells: ti.types.ndarray(ti.i32, ndim=2), count: int):
            for n in range(count):
                ti.activate(node, [cells[n, d] for d in ti.static(range(length))])

        @ti.kernel
        def deactivate(cells: ti.types.ndarray(ti.i32, ndim=2), count: int):
            for n in range(count):
                ti.deactivate(node, [cells[n, d] for d in ti.static(range(length))])

        self._find, self._activate, self._deactivate, self._rank = find, activate, deactivate, rank

    def active(self) -> np.ndarray:
        """The indices of the cells that are active, one row for each."""
        return _active_rows(self._find, (self._rank, np.int32))[0]

    def deactivate(self, saved: np.ndarray, now: np.ndarray) -> None:
        """Deactivate cells that were not active; of lists, all those that are longer than they were."""
        cells = _without(now, saved)[:, self._index]
        if len(cells):
            cells = np.unique(cells, axis=0) if cells.shape[1] else cells[:1]
            self._deactivate(np.ascontiguousarray(cells) if cells.shape[1] else now, len(cells))

    def activate(self, cells: np.ndarray) -> None:
        if len(cells) and not self._is_dynamic:
            self._activate(cells, len(cells))


class _Fields:
    """The numbers that are placed in the cells of one node, with one offset."""

    def __init__(self, places: list[CoreNode]) -> None:
        fields = [ti.ScalarField(Expr(place.get_expr())) for place in places]
        first, rank, count = fields[0], len(_axes(places[0].parent)), len(fields)
        is_real = [core.is_real(field.dtype) for field in fields]
        wide = [ti.f64 if real else ti.i64 for real in is_real]
        # numbers that are stored to a quantized field have a plain type
        dtypes = [f.dtype if f.dtype in all_types else w for f, w in zip(fields, wide, strict=True)]
        is_list = any(node.type == _KINDS.dynamic for node in upwards(places[0]))

        @ti.kernel
        def find(
            cells: ti.types.ndarray(ti.i32, ndim=2),
            numbers: ti.types.ndarray(ti.i64, ndim=2),
            filled: ti.types.ndarray(ti.i32, ndim=1),
        ):
            for cell in ti.grouped(first):
                place = ti.atomic_add(filled[0], 1)
                if place < cells.shape[0]:
                    for d in ti.static(range(rank)):
                        cells[place, d] = cell[d]
                    for k in ti.static(range(count)):
                        if ti.static(is_real[k]):
                            numbers[place, k] = ti.bit_cast(ti.cast(fields[k][cell], ti.f64), ti.i64)
                        else:
                            numbers[place, k] = ti.cast(fields[k][cell], ti.i64)

        @ti.kernel
        def write(cells: ti.types.ndarray(ti.i32, ndim=2), numbers: ti.types.ndarray(ti.i64, ndim=2), rows: int):
            ti.loop_config(serialize=is_list)  # the length of a list grows with each store
            for n in range(rows):
                for k in ti.static(range(count)):
                    cell = [cells[n, d] for d in ti.static(range(rank))]
                    fields[k][cell] = ti.cast(ti.bit_cast(numbers[n, k], wide[k]), dtypes[k])

        self._find, self._write, self._rank, self._count = find, write, rank, count

    def read(self) -> _Held:
        """The contents of the active cells."""
        return _Held(*_active_rows(self._find, (self._rank, np.int32), (self._count, np.int64)))

    def write(self, held: _Held) -> None:
        """Store to cells, which makes them active."""
        if len(held.cells):
            self._write(*held, len(held.cells))

    def clear(self, cells: np.ndarray) -> None:
        """Set the entries of active cells to zero."""
        self.write(_Held(cells, np.zeros((len(cells), self._count), np.int64)))


def _active_rows(find: Callable[..., None], *kinds: tuple[int, Any]) -> list[np.ndarray]:
    """Arrays of these widths and types, a row for each active cell; ``find`` writes as many as there is room for."""
    room, count = 1, np.zeros(1, np.int32)
    while True:
        arrays = [np.zeros((room, width), dtype) for width, dtype in kinds]
        count[0] = 0
        find(*arrays, count)
        if count[0] <= room:
            return [array[: count[0]] for array in arrays]
        room = int(count[0])


def upwards(node: CoreNode | None) -> Iterator[CoreNode]:
    """A node, and those above it but the root, as Taichi's core has them."""
    while node is not None and node.type != _KINDS.root:
        yield node
        node = node.parent


def is_dense_node(node: CoreNode) -> bool:
    """Whether a node, as Taichi's core has it, and all above it are dense."""
    return all(n.type in _DENSE for n in upwards(node))


def _axes(node: CoreNode | None) -> list[int]:
    assert node is not None
    return [axis for axis in node.get_physical_index_position() if axis >= 0]


def _without(cells: np.ndarray, others: np.ndarray) -> np.ndarray:
    """The rows of indices that are not among others."""
    if not len(cells) or not len(others):
        return cells
    _, numbers = np.unique(np.concatenate([cells, others]), axis=0, return_inverse=True)
    numbers = numbers.reshape(-1)
    return np.ascontiguousarray(cells[~np.isin(numbers[: len(cells)], numbers[len(cells) :])])


PartCopy = tuple[list[np.ndarray], list[_Held]]  # the active cells of each node, and the entries of fields


class SparsePart(InTree):
    """The part below an outermost node that is not dense. Its kernels are made once."""

    def __init__(self, top: CoreNode) -> None:
        self.tree_serial = tree_serial(top)
        self.nodes: list[_Node] = []  # the outer ones first
        places = defaultdict(list)
        pending = [top]
        while pending:
            node = pending.pop(0)
            if node.type in _SPARSE:
                self.nodes.append(_Node(node))
            for child in (node.get_ch(n) for n in range(node.get_num_ch())):
                if child.is_place():
                    places[node.id, tuple(child.offset)].append(child)
                else:
                    pending.append(child)
        self.fields = [_Fields(children) for children in places.values()]

    def copy(self) -> PartCopy:
        """Copy the active cells and their contents."""
        return [node.active() for node in self.nodes], [fields.read() for fields in self.fields]

    def put_back(self, copy: PartCopy) -> None:
        """Activate the same cells again, with their contents; others are not touched."""
        for fields, held in zip(self.fields, copy[1], strict=True):
            fields.clear(_without(fields.read().cells, held.cells))  # a bitmasked cell is read where it is not active
        nodes = [(node, saved, node.active()) for node, saved in zip(self.nodes, copy[0], strict=True)]
        for node, saved, now in reversed(nodes):
            node.deactivate(saved, now)
        for node, saved, now in nodes:
            node.activate(_without(saved, now))
        for fields, held in zip(self.fields, copy[1], strict=True):
            fields.write(held)


def sparse_part(node: CoreNode | ti.SNode) -> SparsePart | None:
    """The part that a node (a ``ti.SNode``, or as Taichi's core has it) lies in; None where all above it is dense."""
    outer = [n for n in upwards(node.ptr if isinstance(node, ti.SNode) else node) if n.type not in _DENSE]
    if not outer:
        return None
    top, parts = outer[-1], known_of_layout("sparse parts")
    if top.id not in parts:
        parts[top.id] = SparsePart(top)
    return parts[top.id]
