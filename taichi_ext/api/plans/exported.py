"""A prepared Jacobian as a Python module of its own, which needs Taichi alone."""

from __future__ import annotations

import itertools
import os
import re
from typing import Any

from taichi_ext import backend
from taichi_ext.api.inputs.arguments import KernelCall
from taichi_ext.api.inputs.results import Placed, lay_out
from taichi_ext.api.runs.replay import Prepared
from taichi_ext.backend import RUNTIME, ti
from taichi_ext.emit import factory
from taichi_ext.errors import InvalidArgumentError, UnsupportedError
from taichi_ext.launches import ArrayArgument, JacobianKernel
from taichi_ext.program import Container
from taichi_ext.program.keys import Key, Scratch
from taichi_ext.record.recorder import annotation_text


def module_text(prepared: Prepared, call: KernelCall) -> str:
    """The text of a module for the kernel of a prepared Jacobian, which defines ``bind(...)``.

    Raises:
        InvalidArgumentError: it has not been called yet, or its kernel was built for several shapes or in blocks.
        UnsupportedError: it is a pipeline or sparse, or its kernel uses an object that has no text.
    """
    fused = _only_kernel(prepared, call)
    program = fused.program
    assert program is not None
    text, objects, _ = factory(program)
    fields = {id(c.object): c for c in program.containers if not c.is_argument}
    given = [name for name, obj in objects.items() if id(obj) in fields or isinstance(obj, ti.SNode)]
    taken = {a.name: a.value for a in program.arguments if a.value is not None}
    arguments = dict(list(taken.items())[: len(taken) - len(fused.shadows)])
    shadows: list[Any] = list(taken.values())[len(arguments) :]
    leaves = [a.name for a in backend.leaf_arguments(fused.primal)]
    shapes = {leaves[n]: (*info.shape, *info.element_shape) for n, info in fused.arrays.items()}
    expected = {name: _of_field(fields[id(objects[name])]) for name in given if id(objects[name]) in fields}
    arrays = {name: c for name, c in arguments.items() if isinstance(c, Container)}
    expected |= {name: f"an array of {c.dtype.name}, shape {shapes[name]}" for name, c in arrays.items()}
    tangents, parts = _tangents(prepared, call, fused, shadows)
    jacobians = {n: f"an array of {tangents[array][0]}, shape {shape}" for n, (array, _, _, shape) in parts.items()}
    constants = [f"{name} = {_written(name, obj)}\n" for name, obj in objects.items() if name not in given]
    count = backend.thread_count()
    is_shared = backend.is_host_arch() and (count == 1 or "global_thread_idx" in text)
    outputs, params = (", ".join(str(t.name) for t in targets) for targets in (prepared.outputs, prepared.params))
    words = {
        "title": f"Jacobian of {call.name}: {outputs} with respect to {params}.",
        "file": os.path.basename(program.file),
        "names": ", ".join(f"{name}={name}" for name in (*given, *arguments)),
        "jacobians": ", ".join(jacobians),
        "lines": "\n".join(f"    {name}: {kind}" for name, kind in (expected | jacobians).items()),
        "runtime": RUNTIME.header,
        "star": "*, " * bool(given or arguments) + ", ".join((*given, *arguments)),
        "make": ", ".join(objects),
        "numbers": "".join(f", {name}={name}" for name in arguments if name not in arrays),
        "arguments": "".join(f"{name}, " for name in arguments),
    }
    tables = [
        f"_GIVEN = {expected!r}\n_JACOBIANS = {jacobians!r}",
        f"_TANGENTS = {tangents!r}  # type, rows, columns, first seed",
        f"_PARTS = {list(parts.values())!r}  # array, first column, columns, shape of J",
        f"_BY_COLUMN, _MOST_THREADS = {backend.stores_by_column()}, {count if is_shared else None}\n\n",
    ]
    settings = backend.settings_text(program.hazards, text.count("\n"), has_functions="@ti.real_func" in text)
    make = text.replace("def make(", "def _make(", 1)
    return "\n".join((_HEAD.format(**words), *constants, *tables, make, "", settings, _CHECKS, _BIND.format(**words)))


def _only_kernel(prepared: Prepared, call: KernelCall) -> JacobianKernel:
    """The kernel of a prepared Jacobian; raises unless it has one, which can be exported."""
    if call.kernel is None or prepared.format is not None:
        raise UnsupportedError(
            f"{call.name} is not a single kernel with a dense Jacobian, which taichi_ext does not put together with "
            "code of its own. Export the Jacobian of a single kernel, without format=."
        )
    if prepared.reverse is not None and not prepared.has_no_adjoint:
        raise UnsupportedError(
            f"The rows of the Jacobian of {call.name} are computed in reverse mode, by several kernels. Export a "
            'Jacobian(kernel, params, outputs, mode="forward").'
        )
    kernels = list(prepared.fused.values())
    if len(kernels) != 1 or kernels[0].columns.firsts is not None:
        raise InvalidArgumentError(
            f"The Jacobian of {call.name} has not been called yet, or has kernels for arguments of different shapes or "
            "for blocks of columns. Export a Jacobian(kernel, params, outputs) that was called once, without "
            "chunk_size= and with enough memory for all columns."
        )
    return kernels[0]


def _tangents(
    prepared: Prepared, call: KernelCall, fused: JacobianKernel, shadows: list[Any]
) -> tuple[list[tuple[str, int, int, int | None]], dict[str, tuple[int, int, int, tuple[int, ...]]]]:
    """The arrays of tangents that a kernel takes, and the arrays of J that a call fills.

    Returns:
        Of each array of tangents: type, rows, columns, and the column from which on its rows are seeds. Of each array
        of J, by name: the number of an array of tangents, the first of its columns, how many, and the shape.
    """

    def key_of(placed: Placed) -> Key:
        """The name that the kernel has for the container of a parameter or output."""
        if placed.target.kind in ("array", "argument"):
            return ArrayArgument(call.first_position + placed.target.position)
        if placed.key != placed.container and placed.container in fused.shadows:
            raise UnsupportedError(f"{placed.target.name} is a part of a field. Export the Jacobian of the whole one.")
        return placed.key

    layout = lay_out(call, prepared.fields, prepared.params, prepared.outputs)
    for o in layout.outputs:
        if key_of(o) not in fused.shadows:
            raise UnsupportedError(f"{o.target.name} of {call.name} depends on no params: nothing to export.")
    params = {key_of(p): p.first for p in layout.params}
    rows = {key_of(o): o.rows for o in layout.outputs} | {key: info.size for key, info in prepared.fields.infos.items()}
    rows |= {ArrayArgument(n): info.size for n, info in fused.arrays.items()}
    tangents: list[tuple[str, int, int, int | None]] = []
    for key, c in zip(fused.shadows, shadows, strict=True):
        size = fused.scratch_sizes[key] if isinstance(key, Scratch) else rows.get(key, 1)
        tangents.append((c.dtype.name, size, 1 if isinstance(key, Scratch) else fused.columns.count, params.get(key)))
    assert fused.program is not None
    names = {id(c.object): c.name for c in fused.program.containers if not c.is_argument}
    parts: dict[str, tuple[int, int, int, tuple[int, ...]]] = {}
    for o, p in itertools.product(layout.outputs, layout.params):
        n = fused.shadows.index(key_of(o))
        by = names.get(id(p.target.field)) or p.target.argument or f"param_{layout.params.index(p)}"
        name = shadows[n].name if len(params) == 1 else re.sub(r"\W", "_", f"{shadows[n].name}_by_{by}")
        parts[name + "_" * (name in parts)] = n, p.first, p.size, (*o.shape, *p.shape)
    return tangents, parts


def _of_field(c: Container) -> str:
    layout = "dense" if backend.is_dense(c.object) else "sparse"
    return f"a {layout} field of {c.dtype.name}, shape {c.shape}, entries of shape {c.element_shape}, first {c.offset}"


def _written(name: str, obj: object) -> str:
    """An object as an expression of a module that imports Taichi alone."""
    if isinstance(obj, backend.StructType):
        members = (f"{k}={_written(k, annotation_text(member))}" for k, member in obj.members.items())
        return f"ti.types.struct({', '.join(members)})"
    if isinstance(obj, str):
        return obj
    raise UnsupportedError(
        f"{name!r} ({type(obj).__name__}) is a Python object that the kernel uses and that has no text, so the kernel "
        "cannot be exported. Use fields, numbers, vectors and functions of Taichi in it."
    )


_HEAD = '''\
"""{title}

Written by taichi_ext from {file}; it needs Taichi alone.

    run = bind({names})
    run({jacobians})

{lines}
"""

import contextlib as _contextlib
import weakref as _weakref
from math import inf, nan

import numpy as _np
{runtime}
'''

_CHECKS = '''
def _kind(given):
    """The type, shape and layout of a field or array, as text, and its place in memory."""
    if isinstance(given, (ti.ScalarField, ti.MatrixField)):
        node, kinds = given.vars[0].ptr.snode(), ti._lib.core.SNodeType
        entries, first = (given.n, given.m)[: given.ndim] if isinstance(given, ti.MatrixField) else (), node.offset
        while node is not None and node.type in (kinds.root, kinds.dense, kinds.place):
            node = node.parent
        name = f"a {'dense' if node is None else 'sparse'} field of {given.dtype}, shape {tuple(given.shape)}"
        return f"{name}, entries of shape {entries}, first {tuple(first)}", id(given), 1
    if isinstance(given, ti.Ndarray):
        return f"an array of {given.dtype}, shape {(*given.shape, *given.element_shape)}", id(given), 1
    if isinstance(given, _np.ndarray) and not given.flags.writeable:
        return "read-only", id(given), 1
    if not isinstance(given, _np.ndarray):
        return f"of type {type(given).__name__}, no field or array of Taichi or NumPy", id(given), 1
    dtype = "u1" if given.dtype == bool else f"{given.dtype.kind}{8 * given.dtype.itemsize}"
    layout = "" if given.flags.c_contiguous and given.dtype.isnative else ", not contiguous in C order, or swapped"
    return f"an array of {dtype}, shape {given.shape}{layout}", given.__array_interface__["data"][0], given.nbytes


def _check(given, expected):
    """Raise unless objects are as expected, and no two of them are one or share memory."""
    spans = []
    for name, kind in expected.items():
        found, start, size = _kind(given[name])
        if found != kind:
            raise ValueError(f"{name} is {found}; the kernel was made for {kind}.")
        spans.append((start, start + size, name))
    spans.sort()
    for (_, end, name), (start, _, other) in zip(spans, spans[1:]):
        if start < end:
            raise ValueError(f"{name} shares memory with {other}; the kernel was made for memory of their own.")


def _by_row(array, rows, columns):
    return array.reshape(columns, rows).T if _BY_COLUMN else array.reshape(rows, columns)


def _memory(dtype, rows, columns, seeds):
    """An array of tangents: zeros, but for the seeds of a parameter."""
    array = _np.zeros(max(1, rows * columns), dtype[0] + str(int(dtype[1:]) // 8))
    if seeds is not None:
        n = _np.arange(min(rows, columns - seeds))
        _by_row(array, rows, columns)[n, seeds + n] = 1
    return array


def _give(jacobian, rows, first, width, shape):
    """Fill an array of J with columns of the rows of an output."""
    block = _np.ascontiguousarray(rows[:, first : first + width].reshape(shape))
    if isinstance(jacobian, ti.Ndarray):
        jacobian.from_numpy(block)
    else:
        jacobian[...] = block

'''
_BIND = '''
def bind({star}):
    """A function that runs the kernel, fills the arrays of J, which it takes, and returns the kernel's result."""
    _given = dict({names})
    _check(_given, _GIVEN)
    if _MOST_THREADS is not None and ti.cfg.cpu_max_num_threads > _MOST_THREADS:
        raise ValueError(f"The kernel was made for {{_MOST_THREADS}} threads: use ti.init(cpu_max_num_threads=...).")
    _program = _weakref.ref(ti.lang.impl.get_runtime().prog)
    _kernel = _make({make})

    def _run(*_jacobians{numbers}):
        if _program() is None or ti.lang.impl.get_runtime().prog is not _program():
            raise RuntimeError("ti.init or ti.reset was called since bind, which ended all fields; call bind again.")
        _check({{**_given, **dict(zip(_JACOBIANS, _jacobians, strict=True))}}, {{**_GIVEN, **_JACOBIANS}})
        _tangents = [_memory(*t) for t in _TANGENTS]
        with _careful_compilation():
            _result = _kernel({arguments}*_tangents)
        for _target, (_n, *_part) in zip(_jacobians, _PARTS):
            _give(_target, _by_row(_tangents[_n], *_TANGENTS[_n][1:3]), *_part)
        return _result

    return _run
'''
