"""The engine's choices for a kernel, as text."""

from __future__ import annotations

from collections.abc import Iterator

from taichi_ext import backend
from taichi_ext.differentiate.forms.column_blocks import LAST
from taichi_ext.launches import ArrayArgument, Fused, NumberArgument
from taichi_ext.program.keys import RETURN, VALUES, Key, Scratch, SumKey, Version
from taichi_ext.runtime.memory.kernel_arrays import numpy_dtype
from taichi_ext.runtime.memory.shadows import FieldTable


class Text(str):
    """A text that notebooks and the prompt show line by line."""

    __slots__ = ()
    __repr__ = str.__str__


def explain(fused: Fused, fields: FieldTable) -> str:
    """The choices made for one fused kernel: storage of locals, shadows of fields, loops made serial.

    Also, for each source line, the number of operations on tangents each time it runs.
    """
    function = fused.primal.func
    lines = [f"{function.__qualname__} ({function.__code__.co_filename}:{function.__code__.co_firstlineno})"]
    lines.append(f"  columns: {fused.columns.count}{_blocks(fused.columns.firsts)}")
    lines += [f"  tangents of {line}" for line in _shadows(fused, fields)]
    lines += [f"  entries of {line}" for line in _entries(fused, fields)]
    lines += [f"  {line}" for line in fused.facts.report.lines(fused.columns.count, lambda key: _name(key, fields))]
    return "\n".join(lines)


def _blocks(first_columns: range | None) -> str:
    """The blocks of columns that a kernel computes; empty if it computes all columns at once."""
    if first_columns is None:
        return ""
    first, last = first_columns[0], first_columns[-1]
    which = f"any of the columns {first} to {last}"
    if last == LAST:
        which = f"column {first} or any later one" if first else "any column"
    return f", the first of them {f'column {first}' if first == last else which}"


def _shadows(fused: Fused, fields: FieldTable) -> Iterator[str]:
    for key in fused.shadows:
        if key == RETURN:
            yield "the return value"
        elif key == VALUES:
            yield "arguments and Python numbers, which are given"
        elif isinstance(key, Scratch):
            size = fused.scratch_sizes[key] * numpy_dtype(backend.named_type(key.dtype)).itemsize
            yield f"locals with all columns: {size} bytes of scratch memory"
        elif isinstance(key, ArrayArgument):
            yield f"array argument {key.position}"
        elif key in fields.infos:
            info = fields.infos[key]
            size = info.size * fused.columns.count * numpy_dtype(info.dtype).itemsize
            written = ", every entry written" if key in fused.facts.covered else ""
            yield f"{info.name}: {info.size} x {fused.columns.count}, {size} bytes{written}"


def _entries(fused: Fused, fields: FieldTable) -> Iterator[str]:
    """The number of entries of a sparse Jacobian that each statement writes, by their columns."""
    for site in fused.sites:
        verb = "added" if site.is_sum else "stored"
        counts = [f"{len(group.entries)} with respect to {_owner(group.owner, fields)}" for group in site.groups]
        rows = ", from dense tangents: those that are zero are left out" if site.has_rows else ""
        parts = f"{len(site.rows)} rows" if len(site.rows) > 1 else "one row"
        yield f"{_name(site.key, fields)}, {parts} {verb} at a time: {' and '.join(counts) or 'none'}{rows}"


def _owner(owner: object, fields: FieldTable) -> str:
    if owner is None:
        return "columns that are known at run time"
    return f"{_name(owner.of, fields)} as it is then" if isinstance(owner, Version) else _name(owner, fields)


def _name(key: Key, fields: FieldTable) -> str:
    if key == RETURN:
        return "the return value"
    if isinstance(key, SumKey):
        return f"the local {key.name}"
    if isinstance(key, (ArrayArgument, NumberArgument)):
        return f"argument {key.position if isinstance(key, ArrayArgument) else key.name}"
    return str(fields.infos[key].name) if key in fields.infos else "a Python number"
