"""A prepared Jacobian as a Python module that needs Taichi alone."""

from __future__ import annotations

import itertools
import re
from typing import Any

from taichi_ext import backend
from taichi_ext.api.inputs.arguments import KernelCall
from taichi_ext.api.inputs.layout import Placed, lay_out
from taichi_ext.api.runs.prepared import Prepared
from taichi_ext.emit import Part, Tangents, export
from taichi_ext.errors import InvalidArgumentError, UnsupportedError
from taichi_ext.launches import ArrayArgument
from taichi_ext.program.keys import Scratch


def module_text(prepared: Prepared, call: KernelCall) -> str:
    """The text of the module for the kernel of a prepared Jacobian.

    Raises:
        InvalidArgumentError: it has not been called yet, or its kernel was built for several shapes or in blocks.
        UnsupportedError: it is a pipeline or sparse, or its kernel uses an object that has no text.
    """
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
    (fused,) = kernels
    program = fused.program
    assert program is not None

    def key_of(placed: Placed) -> Any:
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
    own: list[Any] = [a.value for a in program.arguments[len(program.arguments) - len(fused.shadows) :]]
    tangents: list[Tangents] = []
    for key, c in zip(fused.shadows, own, strict=True):
        size = fused.scratch_sizes[key] if isinstance(key, Scratch) else rows.get(key, 1)
        tangents.append((c.dtype.name, size, 1 if isinstance(key, Scratch) else fused.columns.count, params.get(key)))
    names = {id(c.object): c.name for c in program.containers if not c.is_argument}
    parts: dict[str, Part] = {}
    for o, p in itertools.product(layout.outputs, layout.params):
        n = fused.shadows.index(key_of(o))
        by = names.get(id(p.target.field)) or p.target.argument or f"param_{layout.params.index(p)}"
        name = own[n].name if len(params) == 1 else re.sub(r"\W", "_", f"{own[n].name}_by_{by}")
        parts[name + "_" * (name in parts)] = n, p.first, p.size, (*o.shape, *p.shape)
    leaves = [a.name for a in backend.leaf_arguments(fused.primal)]
    shapes = {leaves[n]: (*info.shape, *info.element_shape) for n, info in fused.arrays.items()}
    by = ", ".join(str(t.name) for t in prepared.params)
    title = f"Jacobian of {call.name}: {', '.join(str(t.name) for t in prepared.outputs)} with respect to {by}."
    return export(program, tangents, parts, shapes, title)
