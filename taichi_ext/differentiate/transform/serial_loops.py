"""Loops that keep the order of their iterations.

On a GPU, Taichi ignores serialize=True for loops over fields: there they become loops over a range.
"""

from __future__ import annotations

import math
from dataclasses import replace

from taichi_ext.analysis.loops import Extent
from taichi_ext.differentiate.forms.build import add, cast
from taichi_ext.errors import UnsupportedError
from taichi_ext.program import I32, Const, Declare, For, Local, Op, Read, Value, cited


def serialized(loop: For, extent: Extent | None, *, is_host: bool) -> For:
    """The loop as one that runs in one thread; ``extent`` is that of the field that it runs over."""
    if loop.kind not in ("field", "grouped"):
        return replace(loop, config={**loop.config, "serialize": True})
    if is_host:  # Taichi does not heed serialize=True in loops over fields
        return replace(loop, config={**loop.config, "parallelize": 1})
    if loop.kind == "grouped" or extent is None or not extent.is_full:
        raise UnsupportedError(
            f"{cited(loop.place)}"
            "The order of the iterations matters to the derivative here, and Taichi runs this loop over a field in "
            "parallel on a GPU. Write it as a loop over a range: for i, j in ti.ndrange(n, m)."
        )
    return _over_range(loop, extent)


def _over_range(loop: For, extent: Extent) -> For:
    """A loop over a dense field as a loop over the number of the entry."""
    number = Local("number", I32, (), "loop")
    before, inner = [], math.prod(extent.shape)
    for v, size, offset in zip(loop.variables, extent.shape, extent.offset or (0,) * len(extent.shape), strict=True):
        inner //= size
        index: Value = Op("floordiv", (Read(number), Const(inner, I32)), I32)
        index = Op("mod", (index, Const(size, I32)), I32)
        before.append(Declare(v, (cast(add(index, offset), I32),), place=loop.place))
    total = Const(math.prod(extent.shape), I32)
    config = {**loop.config, "serialize": True}
    return replace(loop, kind="range", variables=(number,), domain=(total,), body=(*before, *loop.body), config=config)
