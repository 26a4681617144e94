"""Dense fields on the CPU as memory: copied in place, where Taichi compiles two kernels for each field."""

import ctypes
import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from taichi_ext.backend.expressions import is_host_arch
from taichi_ext.backend.lifetime import is_field_alive, known_of_layout
from taichi_ext.backend.opaque import tree_of
from taichi_ext.backend.threads import materialize
from taichi_ext.cached import kept_weakly
from taichi_ext.host import RUNTIME, core, ti, to_numpy_type

_ADDRESSES = "addresses"  # of trees of fields


class _Layout(NamedTuple):
    """A field in one dense block, the parts of its elements one after the other."""

    tree: int
    offset: int  # of its first byte in the tree
    shape: tuple[int, ...]  # with that of its elements, as in ``to_numpy``
    strides: tuple[int, ...]
    dtype: np.dtype


def find_memory(fields: Iterable[object]) -> None:
    """Find where fields lie, with one kernel for all those of whose trees nothing is known yet."""
    layouts = [(field, layout) for field in fields if (layout := _layout(field)) is not None]
    addresses = known_of_layout(_ADDRESSES)
    unknown = {layout.tree: (field, layout) for field, layout in layouts if layout.tree not in addresses}
    if unknown:
        starts = _first_bytes([field for field, _ in unknown.values()])
        for (_, layout), address in zip(unknown.values(), starts, strict=True):
            addresses[layout.tree] = address - layout.offset


def memory_of_field(field: object) -> np.ndarray | None:
    """A field as a view shaped as by ``to_numpy``; None where it is not in one dense block on the CPU."""
    layout = _layout(field)
    if layout is None:
        return None
    find_memory([field])
    _, offset, shape, strides, dtype = layout
    size = dtype.itemsize + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    memory = (ctypes.c_char * size).from_address(known_of_layout(_ADDRESSES)[layout.tree] + offset)
    buffer: Any = memory  # which stubs only say from Python 3.12 on
    return np.ndarray(shape, dtype, buffer, strides=strides)


def _layout(field: object) -> _Layout | None:
    if not is_host_arch() or not isinstance(field, (ti.ScalarField, ti.MatrixField)) or not is_field_alive(field):
        return None
    return _layout_of_placed(field)


@kept_weakly
def _layout_of_placed(field: ti.ScalarField | ti.MatrixField) -> _Layout | None:
    materialize()
    nodes, kinds = [part.ptr.snode() for part in field.vars], core.SNodeType
    block = nodes[0].parent
    if any(n.parent.id != block.id for n in nodes) or block.type != kinds.dense or block.parent.type != kinds.root:
        return None
    dtype = np.dtype(to_numpy_type(field.dtype))
    shape, first, size = tuple(field.shape), nodes[0].offset_bytes_in_parent_cell, dtype.itemsize
    is_in_order = [axis for axis in block.get_physical_index_position() if axis >= 0] == list(range(len(shape)))
    is_together = [n.offset_bytes_in_parent_cell for n in nodes] == [first + n * size for n in range(len(nodes))]
    if not is_in_order or not is_together or field.dtype == ti.u1:
        return None
    inner = () if isinstance(field, ti.ScalarField) else (field.n,) if field.m == 1 else (field.n, field.m)
    strides = (*_strides(shape, block.cell_size_bytes), *_strides(inner, size))
    offset = block.offset_bytes_in_parent_cell + first
    return _Layout(tree_of(nodes[0]), offset, (*shape, *inner), strides, dtype)


def _strides(shape: tuple[int, ...], step: int) -> list[int]:
    return [step * math.prod(shape[n + 1 :]) for n in range(len(shape))]


def _first_bytes(fields: list[Any]) -> list[int]:
    """The address of the first entry of each field."""
    scalars = [f if isinstance(f, ti.ScalarField) else f.get_scalar_field(*(0,) * f.ndim) for f in fields]
    origins, count = [[0] * len(f.shape) for f in scalars], len(scalars)

    @ti.kernel
    def find(addresses: ti.types.ndarray(ti.u64, ndim=1)):  # type: ignore[valid-type]
        for n in ti.static(range(count)):
            addresses[n] = ti.get_addr(scalars[n], origins[n])

    addresses = np.zeros(count, np.uint64)
    find(addresses)
    scalars.clear()  # Taichi keeps the kernel
    return [int(address) for address in addresses]


# What kernels say while they run: a field of the package in which each alert has a row, of each Taichi program.

_MOST = 1024  # alerts; those after it share the last row
ALERT_PLACES = 256  # of each alert: how many a kernel has stored to says in how many pixels it was raised


class Alert(NamedTuple):
    """What a kernel says."""

    what: str  # the message; ``{pixels}`` in it stands for the number of pixels
    place: Any  # where it stands in the source
    # a function that gives the field that is stored to there, as long as it exists, None for an array; None where
    # nothing is stored
    field: Callable[[], object] | None
    is_undefined: bool  # whether there is no derivative


class _Alerts(NamedTuple):
    """Those of one program."""

    program: Callable[[], object]  # a weak reference
    field: Any
    numbers: dict[tuple[object, ...], int]
    given: list[Alert]


_alerts = _Alerts(lambda: None, None, {}, [])


def alert_field() -> Any:
    """The field; a kernel that stores 1 to an entry of its row raises the alert."""
    global _alerts
    program = RUNTIME.program()
    if _alerts.program() is not program:
        materialize()
        made = ti.field(ti.i32)
        builder = ti.FieldsBuilder()
        builder.dense(ti.ij, (_MOST, ALERT_PLACES)).place(made)
        builder.finalize()
        _alerts = _Alerts(weakref.ref(program), made, {}, [])
    return _alerts.field


def alert_number(what: str, place: Any, stored: object, *, is_undefined: bool) -> int:
    """The row of an alert in ``alert_field()``; ``stored`` is the field stored to, True for an array, or None."""
    name = what, place and (place.file, place.line), id(stored)
    known = _alerts.numbers.setdefault(name, min(len(_alerts.given), _MOST - 1))
    if known == len(_alerts.given):
        field_of = None if stored is None else (lambda: None) if stored is True else weakref.ref(stored)
        _alerts.given.append(Alert(what, place, field_of, is_undefined))
    return known


def raised_alerts() -> list[Alert]:
    """The alerts since the last time."""
    program, held, _, given = _alerts
    if not given or program() is not RUNTIME.program():
        return []
    memory = memory_of_field(held)
    RUNTIME.state().sync()
    raised = (held.to_numpy() if memory is None else memory)[: len(given)].sum(1)
    result = [_with_count(alert, int(count)) for alert, count in zip(given, raised, strict=True) if count]
    if result:
        (held if memory is None else memory).fill(0)
    return result


def _with_count(alert: Alert, count: int) -> Alert:
    """An alert whose message says in how many pixels it was raised, some of which share a place."""
    text = "more than 1000 pixels"
    if count < ALERT_PLACES:
        number = round(-ALERT_PLACES * math.log1p(-count / ALERT_PLACES))
        text = f"about {number} pixel{'s' * (number > 1)}"
    return alert._replace(what=alert.what.replace("{pixels}", text))
