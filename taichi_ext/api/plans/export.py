"""A prepared Jacobian as a Python module that needs Taichi alone."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from taichi_ext import backend
from taichi_ext.api.inputs.arguments import KernelCall, Target
from taichi_ext.api.inputs.layout import lay_out
from taichi_ext.api.runs.prepared import Prepared
from taichi_ext.differentiate.forms.keys import RETURN, Scratch
from taichi_ext.emit import JacobianPart, TangentArray, export
from taichi_ext.errors import InvalidArgumentError, UnsupportedError
from taichi_ext.launches import ArrayArgument, Fused
from taichi_ext.program import Program


def module_text(prepared: Prepared, call: KernelCall) -> str:
    """The text of the module for the kernel of a prepared Jacobian.

    Raises:
        InvalidArgumentError: it has not been called yet, or its kernel was built for several shapes or in blocks.
        UnsupportedError: it is a pipeline or sparse, or its kernel uses an object that has no text.
    """
    if call.kernel is None:
        raise UnsupportedError(
            f"{call.name} is a Python function that launches kernels, and Python would have to run in the module, too. "
            "Export the Jacobian of a single kernel."
        )
    if prepared.format is not None:
        raise UnsupportedError("A sparse Jacobian is put together by taichi_ext. Export one without format=.")
    kernels = list(prepared.fused.values())
    if len(kernels) != 1 or kernels[0].columns.firsts is not None:
        state = (
            "has not been called yet, so that its kernel does not exist"
            if not kernels
            else "has kernels for arguments of different shapes or for blocks of columns"
        )
        raise InvalidArgumentError(
            f"The Jacobian of {call.name} {state}. Export a Jacobian(kernel, params, outputs) that was called once, "
            "without chunk_size= and with enough memory for all columns."
        )
    (fused,) = kernels
    assert fused.program is not None
    program = fused.program
    outputs = [_key(prepared, call, t) for t in prepared.outputs]
    missing = [str(t.name) for t, key in zip(prepared.outputs, outputs, strict=True) if key not in fused.shadows]
    if missing:
        raise UnsupportedError(f"{', '.join(missing)} of {call.name} depends on no params: nothing to export.")
    _check_components(prepared, call, fused)
    layout = lay_out(call, prepared.fields, prepared.params, prepared.outputs)
    rows, params = [o.shape for o in layout.outputs], [(p.target, p.first, p.shape) for p in layout.params]
    columns = {_key(prepared, call, t): n for t, n, _ in params if t.variable is None and not call.is_value(t)}
    tangents = []
    for number, key in enumerate(fused.shadows):
        output = outputs.index(key) if key in outputs else None
        parts = () if output is None else tuple(_part(*param, rows[output]) for param in params)
        tangents.append(_tangents(prepared, call, fused, number, output, parts, columns))
    names = ", ".join(str(t.name) for t in prepared.outputs)
    by = ", ".join(str(t.name) for t in prepared.params)
    title = f"Jacobian of {call.name}: {names} with respect to {by}."
    return export(program, tangents, _known(prepared, fused, program), backend.stores_by_column(), title)


def _check_components(prepared: Prepared, call: KernelCall, fused: Fused) -> None:
    """Raise if a component of a field is a parameter or output: the module can only hold tangents of whole fields."""
    for target in (*prepared.params, *prepared.outputs):
        is_part = target.kind == "field" and prepared.fields.component(target.field) is not None
        if is_part and _key(prepared, call, target) in fused.shadows:
            raise UnsupportedError(
                f"{target.name} is a component of a field that the kernel writes. Export the Jacobian of the whole "
                "field."
            )


def _key(prepared: Prepared, call: KernelCall, target: Target) -> object:
    """The name that a kernel with tangents has for the container of a parameter or output."""
    if target.kind == "return":
        return RETURN
    if target.kind == "field":
        info = prepared.fields.field(target.field)
        return None if info is None else info.key
    return ArrayArgument(call.first_position + target.position)


def _part(param: Target, first: int, shape: tuple[int, ...], rows: tuple[int, ...]) -> JacobianPart:
    """The J by one parameter, from its first column on, of an output of the shape ``rows``."""
    name = re.sub(r"\W+", "_", param.argument if param.variable is None else param.variable.name)
    return JacobianPart(name, param.field, first, math.prod(shape), (*rows, *shape))


def _tangents(
    prepared: Prepared,
    call: KernelCall,
    fused: Fused,
    number: int,
    output: int | None,
    parts: tuple[JacobianPart, ...],
    columns: Mapping[object, int],
) -> TangentArray:
    """The meaning of one of the last arguments of a kernel."""
    assert fused.program is not None
    key = fused.shadows[number]
    container: Any = fused.program.arguments[number - len(fused.shadows)].value
    shape = (_rows(prepared, call, fused, key), fused.columns.count)
    if isinstance(key, Scratch):
        shape = (fused.scratch_sizes[key], 1)
    is_covered = key in fused.facts.covered or isinstance(key, Scratch)
    return TangentArray(container.name, container.dtype.name, shape, output, parts, is_covered, columns.get(key))


def _rows(prepared: Prepared, call: KernelCall, fused: Fused, key: object) -> int:
    if key == RETURN:
        return math.prod(call.return_shape())
    if isinstance(key, ArrayArgument):
        return fused.arrays[key.position].size
    return prepared.fields.infos[key].size if key in prepared.fields.infos else 1


def _known(prepared: Prepared, fused: Fused, program: Program) -> dict[object, tuple[str, tuple[int, ...]]]:
    """Names in messages, and shapes, of the fields (by identity) and arrays (by name) with stored tangents."""
    found: dict[Any, tuple[str, tuple[int, ...]]] = {}
    for c in program.containers:
        info = None if c.is_argument else prepared.fields.field(c.object)
        if info is not None:
            found[id(c.object)] = (str(info.name), tuple(info.shape))
    for position, info in fused.arrays.items():
        found[backend.leaf_arguments(fused.primal)[position].name] = (
            str(info.name),
            (*info.shape, *info.element_shape),
        )
    return found
