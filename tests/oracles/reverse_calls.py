"""Gradients in reverse mode by the runtime itself, with what it says about memory, and rows of J for comparison."""

from typing import Any

import numpy as np

from taichi_ext import jacobian
from taichi_ext.api.inputs.options import Options
from taichi_ext.api.jacobian import prepared_form
from taichi_ext.launches import ColumnBlock
from taichi_ext.runtime.launching.tangents import Request
from taichi_ext.runtime.reverse.reverse import CotangentProducts, Reverse, Run


class Prepared:
    """A kernel or pipeline with its parameters (a list) and outputs (a list, or None for the returned value)."""

    def __init__(self, function: Any, params: list[Any], outputs: list[Any] | None = None, args: Any = ()) -> None:
        self.given = function, params, outputs
        plan, self.call = prepared_form(function, params, outputs, args, Options())
        self.plan = plan
        self.reverse = Reverse(plan.prepared.fields)

    def __call__(self, cotangents: list[Any] | None = None, args: Any = (), **options: Any) -> list[np.ndarray]:
        """The products for each parameter; cotangents have a leading axis, by default there is one of ones."""
        return self.products(cotangents, args, **options)[0]

    def products(
        self, cotangents: list[Any] | None = None, args: Any = (), **options: Any
    ) -> tuple[list[np.ndarray], CotangentProducts]:
        """The same, and how they were computed."""
        _, call = prepared_form(*self.given, args, Options())
        layout = self.plan.start(call).layout
        request = Request(
            block=ColumnBlock(layout.count),
            seeds=layout.seeds,
            arrays=layout.arrays,
            outputs=layout.outputs,
            numbers=layout.numbers(None),
            wants_return=any(o.target.kind == "return" for o in layout.outputs),
        )
        given = [np.ones((1, *o.shape)) for o in layout.outputs] if cotangents is None else cotangents
        both = zip(given, layout.outputs, strict=True)
        matrices = [np.ascontiguousarray(np.reshape(c, (len(c), -1)).T, o.result_dtype) for c, o in both]
        own = call.args if call.kernel is None else call.full_args
        run = Run(call.kernel, call.function, own, call.names, layout.passed)
        found = self.reverse.vjp(run, request, matrices, **options)
        parts = [found.rows[p.first : p.first + p.size].T for p in layout.params]
        return [part.reshape(len(part), *p.shape) for part, p in zip(parts, layout.params, strict=True)], found


def expected(function: Any, params: list[Any], outputs: list[Any] | None, cotangents: list[Any], args: Any = ()) -> Any:
    """The same products from J in forward mode."""
    found = jacobian(function, params, outputs, args=args)
    rows = [found] if outputs is None else found
    both = [list(zip(cotangents, (row[n] for row in rows), strict=True)) for n in range(len(params))]
    return [sum(np.tensordot(c, block, axes=np.ndim(c) - 1) for c, block in pairs) for pairs in both]
