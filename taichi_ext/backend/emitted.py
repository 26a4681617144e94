"""Kernels whose text was generated: traced once, compiled with the settings that they need."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Sequence
from typing import Any

from taichi_ext.backend.contexts import make_context
from taichi_ext.backend.kernels import FusedKernel, with_functions_in_key
from taichi_ext.backend.runtime import RUNTIME, global_variables


class EmittedKernel(FusedKernel):
    """A generated kernel; it is launched with the arguments of the user's kernel, followed by its own.

    ``source`` is the tree of its definition, the text that the positions of its nodes refer to, and the user's lines
    that messages cite instead.
    """

    def __init__(
        self,
        kernel: Any,
        source: tuple[ast.Module, str, dict[int, str]],
        positions: list[int],
        given: Sequence[object],
        features: tuple[object, ...],
        *,
        hazards: frozenset[str],
        like: Any = None,
    ) -> None:
        super().__init__(kernel, [], hazards=hazards)
        _unregister(kernel)
        if like is not None:  # the user's kernel, in place of which Taichi launches this one
            self.autodiff_mode = like.autodiff_mode
        self.positions = positions
        tree, self.text, places = source
        self.lines = self.text.count("\n")
        context = make_context(
            kernel.func,
            (kernel.func.__code__.co_filename, self.text.split("\n"), 1),
            dict(global_variables(kernel.func)),
            kernel=self,
            arguments=given,
            argument_features=features,
            places=places,
            is_brief=True,
        )
        with with_functions_in_key():
            self.trace(tree, context, kernel.func.__name__, lambda: True)

    def noted(self) -> contextlib.AbstractContextManager[None]:
        """Its Python values are those of the user's kernel, which are known."""
        return contextlib.nullcontext()

    def launch(self, *args: object) -> Any:
        """Run it: ``args`` are those of the user's kernel, then its own; templates among them are left out."""
        return super().launch(*[args[p] for p in self.positions])


def _unregister(kernel: Any) -> None:
    """Let a kernel be freed: otherwise Taichi keeps every ``ti.kernel`` until the process ends."""
    registered = RUNTIME.state().kernels
    for made in (kernel, kernel.grad):
        registered.remove(made)
