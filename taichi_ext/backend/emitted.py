"""Kernels whose text was generated: traced once, compiled with the settings that they need."""

from __future__ import annotations

import ast
import textwrap
from typing import Any

from taichi_ext.backend.contexts import make_context
from taichi_ext.backend.kernels import FusedKernel, deep_recursion, global_variables, source_of


class EmittedKernel(FusedKernel):
    """A generated kernel; it is launched with the arguments of the user's kernel and, behind them, its own."""

    def __init__(
        self,
        kernel: Any,
        positions: list[int],
        given: list[Any],
        features: tuple[Any, ...],
        *,
        has_vectors: bool,
        like: Any = None,
    ) -> None:
        super().__init__(kernel, [], has_vectors=has_vectors)
        if like is not None:  # the user's kernel, in place of which Taichi launches this one
            self.autodiff_mode = like.autodiff_mode
        self.positions = positions
        source = source_of(kernel.func)
        self.lines = len(source[1])
        tree = ast.parse(textwrap.dedent("\n".join(source[1])))
        context = make_context(
            kernel.func,
            source,
            dict(global_variables(kernel.func)),
            kernel=self,
            arguments=given,
            argument_features=features,
            places={},
            is_brief=True,
        )
        with deep_recursion():
            self.trace(tree, context, kernel.func.__name__, lambda: True)

    def launch(self, *args: Any) -> Any:
        """Run it: ``args`` are those of the user's kernel, then its own; templates among them are left out."""
        return super().launch(*[args[p] for p in self.positions])
