"""A lock for tracing kernels, since Taichi uses state of the whole process for it.

Launches of compiled kernels do not need it: Taichi 1.7.4 holds Python's interpreter lock while they run, and returned
values are in the launch's own memory.
"""

from __future__ import annotations

import ast
import functools
import threading
from collections.abc import Callable
from typing import Any

from taichi_ext.errors import InvalidArgumentError
from taichi_ext.host import RUNTIME, impl, ti

exclusive = RUNTIME.lock


def is_inside_kernel() -> bool:
    if not RUNTIME.state().inside_kernel:
        return False
    is_own = exclusive.acquire(blocking=False)  # the tracing thread has the lock, so another thread fails
    if is_own:
        exclusive.release()
    return is_own


def syntax_tree(text: str) -> ast.Module:
    """``ast.parse``, which before Python 3.12 raises SystemError where two threads are in it (Taichi calls it, too)."""
    with exclusive:
        return ast.parse(text)


# While one thread traces a kernel, Taichi rejects reads, stores and launches in all threads; here only in that one.
impl.inside_kernel = is_inside_kernel


_program_thread = threading.main_thread()
_State = type(RUNTIME.state())
_create_program = _State.create_program


def _remember_thread(self: Any) -> None:
    global _program_thread
    _program_thread = threading.current_thread()
    _create_program(self)


_State.create_program = _remember_thread


def materialize() -> None:
    """Lay out the fields declared so far; Taichi does that only in the thread that called ti.init."""
    with exclusive:
        skip_empty_layout()
        if not ti.root.finalized and not ti.root.empty and _is_other_thread():
            raise InvalidArgumentError(
                "Fields were declared that are not laid out yet, which Taichi does only in the thread that called "
                "ti.init. Declare the fields there, and call ti.sync() there before other threads begin."
            )
        RUNTIME.state().materialize()


def enter_thread() -> None:
    """Let this thread allocate arrays on CUDA, where Taichi 1.7.4 gives a thread its context at the first launch."""
    if _is_other_thread() and not hasattr(_entered, "is_done") and RUNTIME.config().arch in (ti.cuda, ti.amdgpu):
        with exclusive:
            materialize()
            _empty_kernel()(0)
        _entered.is_done = True


_entered = threading.local()


@functools.cache
def _empty_kernel() -> Callable[[int], None]:
    @ti.kernel
    def nothing(number: ti.i32):  # noqa: ANN202  # pyright: ignore[reportInvalidTypeForm]
        pass

    return nothing


def skip_empty_layout() -> None:
    """Allow a thread other than that of ti.init to launch the first kernel if there are no fields."""
    runtime = RUNTIME.state()
    if not runtime.materialized and ti.root.empty and _is_other_thread():
        runtime.materialized = True


def _is_other_thread() -> bool:
    return threading.current_thread() is not _program_thread
