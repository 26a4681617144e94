"""How Taichi compiles kernels: one thread at a time; those that only the engine can build are built by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import taichi as ti
from taichi.lang import impl
from taichi.lang.kernel_impl import Func, Kernel

from taichi_ext.backend.captures import Captures, first_captures, follow_captures, noting
from taichi_ext.backend.kernels import FusedKernel
from taichi_ext.backend.threads import exclusive, skip_empty_layout


class NeedsTracing(ti.TaichiCompilationError):
    """Raised while Taichi compiles a kernel, by what only the engine can build; the kernel is then compiled by it."""


def compile_with(trace: Callable[[Kernel, tuple[Any, ...]], FusedKernel]) -> None:
    """From now on, kernels whose compilation raises ``NeedsTracing`` are built by ``trace(kernel, args)``."""
    compile_kernel, compile_function = Kernel.materialize, Func.do_compile

    def materialize(self: Kernel, key: Any = None, args: Any = None, arg_features: Any = None) -> None:
        with exclusive:
            skip_empty_layout()
            if key in self.compiled_kernels:
                compile_kernel(self, key, args, arg_features)
                return
            captures = Captures()
            try:
                with noting(captures):
                    compile_kernel(self, key, args, arg_features)
                first_captures(self, arg_features, captures)
            except NeedsTracing:
                traced = trace(self, args)
                traced.compile()
                self.compiled_kernels[key] = traced.cpp
                self.has_print |= traced.has_print

    def do_compile(self: Func, key: Any, args: Any, arg_features: Any) -> None:
        callable_before = impl.get_runtime().compiling_callable
        try:
            compile_function(self, key, args, arg_features)
        except NeedsTracing:
            # Taichi would take the function for compiled when the next kernel calls it
            impl.get_runtime().compiling_callable = callable_before
            for table in (self.compiled, self.taichi_functions):
                del table[key.instance_id]  # type: ignore[attr-defined]
            self.func_id, Func.function_counter = Func.function_counter, Func.function_counter + 1
            raise

    follow_captures()
    Kernel.materialize = materialize  # type: ignore[method-assign]
    Func.do_compile = do_compile  # type: ignore[method-assign]
