"""Compilation of kernels by Taichi in one thread, or by the engine for kernels that only it can build."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from taichi_ext import host
from taichi_ext.backend.arrays import as_numpy, is_placed, is_torch_tensor, put_back
from taichi_ext.backend.captures import Captures, first_captures, follow_captures, keep_function, note_function, noting
from taichi_ext.backend.contexts import function_context
from taichi_ext.backend.kernels import FusedKernel, is_reverse
from taichi_ext.backend.lifetime import check_not_ended
from taichi_ext.backend.threads import exclusive, skip_empty_layout
from taichi_ext.host import RUNTIME, AutodiffMode, Func, Kernel, impl


class NeedsEngine(host.CompilationError):
    """Raised while Taichi compiles a kernel that only the engine can build, which it then does."""


# Attributes of kernels and functions as they were before these were compiled again, within ``compiled_again``.
_before: dict[tuple[int, str], tuple[Any, Any]] | None = None


def _renew(obj: object, name: str, value: object) -> None:
    """Give an attribute another value, once."""
    if _before is not None and (id(obj), name) not in _before:
        _before[id(obj), name] = obj, getattr(obj, name)
        setattr(obj, name, value)


@contextlib.contextmanager
def compiled_again() -> Iterator[None]:
    """Kernels that are launched within are compiled for it, with the Python values of now."""
    global _before
    assert _before is None
    _before = {}
    try:
        yield
    finally:
        before, _before = _before, None
        for (_, name), (obj, value) in before.items():
            setattr(obj, name, value)


def compile_with(
    trace: Callable[[Kernel, tuple[object, ...]], FusedKernel],
    rules: Callable[[], object],
    has_rule: Callable[[Func], bool],
) -> None:
    """From now on, kernels whose compilation raises ``NeedsEngine`` are built by ``trace(kernel, args)``.

    Kernels for a gradient are replaced (``replace_gradient_kernel``), and compiled again if ``rules()`` has changed
    since: if they call a function that has a rule, Taichi cannot compile them.
    """
    compiled_with: weakref.WeakKeyDictionary[Kernel, Any] = weakref.WeakKeyDictionary()
    compile_kernel, compile_function, call_function = Kernel.materialize, Func.do_compile, Func.__call__

    def materialize(
        self: Kernel, key: object = None, args: Any = None, arg_features: object = None, py_args: Any = None
    ) -> None:
        with exclusive:
            args = args if py_args is None else py_args  # the same in another runtime
            compile_natively = partial(compile_kernel, self, key, args, arg_features)
            skip_empty_layout()
            for table in host.COMPILED_TABLES if _before is not None else ():
                _renew(self, table, {})
            if is_reverse(self) and compiled_with.get(self) != rules():
                host.forget_compiled(self)
                compiled_with[self] = rules()
            if key in host.compiled_kernels(self):
                compile_natively()
                return
            captures = Captures()
            for given in args or ():
                check_not_ended(given, "A field that is passed here")
            try:
                with noting(captures):
                    compile_natively()
                host.finish(self, key)
                if _before is None:
                    first_captures(self, arg_features, captures, is_plain=True)
            except host.CompilationError as error:
                is_refused = is_reverse(self) and host.refuses_reverse(error)
                if not isinstance(error, NeedsEngine) and not is_refused:
                    raise
                if is_reverse(self):
                    replace_gradient_kernel(self, key, args)
                    return
                traced = trace(self, args)
                if _before is None:
                    first_captures(self, arg_features, traced.captures, is_plain=True)
                traced.compile()
                host.keep_compiled(self, key, traced)
                self.has_print |= traced.has_print

    def do_compile(self: Func, key: object, args: object, arg_features: object) -> None:
        callable_before = host.compiling()
        captures = Captures()
        try:
            with noting(captures):
                compile_function(self, key, args, arg_features)
            if _before is None:
                keep_function(self, captures)
        except NeedsEngine:
            # Taichi would take the function for compiled when the next kernel calls it
            host.set_compiling(callable_before)
            for table in (self.compiled, getattr(self, host.FUNCTION_TABLE)):
                del table[key.instance_id]  # type: ignore[attr-defined]
            self.func_id, Func.function_counter = Func.function_counter, Func.function_counter + 1
            raise

    def call(self: Func, *args: object, **keywords: object) -> Any:
        if _before is not None and self.is_real_function:
            _renew(self, "compiled", {})
            _renew(self, host.FUNCTION_TABLE, {})
            _renew(self, "func_id", Func.function_counter)
            Func.function_counter += 1
        is_users = impl.inside_kernel() and not isinstance(host.current_kernel(), FusedKernel)
        if is_users and has_rule(self) and is_gradient_kernel():
            raise NeedsEngine(self.func.__qualname__)
        result = call_function(self, *args, **keywords)
        note_function(self)
        return result

    follow_captures()
    Func.__call__ = call  # type: ignore[method-assign]
    Kernel.materialize = materialize  # type: ignore[method-assign]
    Func.do_compile = do_compile  # type: ignore[method-assign]
    setattr(*host.TYPED_CONTEXT, function_context)


# Kernels that Taichi compiles for a gradient, their replacements, and gradients of fields and arrays.


def is_gradient_kernel() -> bool:
    """Whether a kernel is being compiled for Taichi's reverse mode; raises where it is for its forward mode."""
    kernel = host.current_kernel()
    mode = AutodiffMode.NONE if kernel is None else kernel.autodiff_mode
    if mode == AutodiffMode.FORWARD:
        raise host.CompilationError(
            "A custom gradient is used in a kernel that is compiled for ti.ad.FwdMode, which cannot take it; use "
            "taichi_ext.jacobian, or kernel.grad() and ti.ad.Tape."
        )
    return mode == AutodiffMode.REVERSE


Launch = Callable[[tuple[Any, ...]], object]
_gradient_of: Callable[[Kernel, tuple[Any, ...]], Launch] | None = None


def compile_gradients_with(gradient_launch: Callable[[Kernel, tuple[Any, ...]], Launch]) -> None:
    """From now on, kernels for a gradient that Taichi cannot compile are launched by ``gradient_launch(kernel, args)``.

    It is called where Taichi would compile one, with the kernel itself and arguments of its types, and gives a function
    of arguments.
    """
    global _gradient_of
    _gradient_of = gradient_launch


def replace_gradient_kernel(kernel: Kernel, key: object, args: tuple[Any, ...]) -> None:
    """Launch our adjoint in place of a kernel for a gradient, for arguments of these types."""
    assert _gradient_of is not None
    primal = next(k for k in RUNTIME.state().kernels if k.grad is kernel)
    host.keep_replaced(kernel, key, _gradient_of(primal, args))


def gradient_of(x: Any) -> object:
    """The field or array that holds the gradient of a field or array; None where it has none."""
    if is_torch_tensor(x) and x.requires_grad and x.grad is None:
        x.grad = x.detach().clone().zero_()
    grad = getattr(x, "grad", None)
    return None if isinstance(grad, host.Field) and not is_placed(grad) else grad


def add_to(x: Any, values: np.ndarray, *, is_added: bool = True) -> None:
    """Add values to a field or array, or store them."""
    before = np.asarray(as_numpy(x))
    values = np.broadcast_to(values.reshape(before.shape) if values.size == before.size else values, before.shape)
    total = np.asarray(before + values if is_added else values, before.dtype)
    if is_torch_tensor(x):
        put_back(x, x.new_tensor(total))
    else:
        x.from_numpy(total)
