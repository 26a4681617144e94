"""One thread at a time: Taichi traces kernels with state of the whole process.

A launch of a compiled kernel needs nothing of this: Taichi 1.7.4 holds Python's interpreter lock while it runs, and
returned values are in the launch's own memory.
"""

from __future__ import annotations

import threading

from taichi_ext.backend.runtime import RUNTIME, impl, ti
from taichi_ext.errors import InvalidArgumentError

exclusive = RUNTIME.lock


def is_inside_kernel() -> bool:
    """Whether this thread is tracing a kernel."""
    if not RUNTIME.state().inside_kernel:
        return False
    is_own = exclusive.acquire(blocking=False)  # whoever traces has the lock, so another thread does not get it
    if is_own:
        exclusive.release()
    return is_own


# Taichi refuses in all threads what may not be done while one of them traces a kernel: reads, stores, launches.
impl.inside_kernel = is_inside_kernel


_program_thread = threading.main_thread()
_create_program = impl.PyTaichi.create_program


def _remember_thread(self: impl.PyTaichi) -> None:
    global _program_thread
    _program_thread = threading.current_thread()
    _create_program(self)


impl.PyTaichi.create_program = _remember_thread


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


def skip_empty_layout() -> None:
    """Let another thread than that of ti.init launch the first kernel, where there are no fields."""
    runtime = RUNTIME.state()
    if not runtime.materialized and ti.root.empty and _is_other_thread():
        runtime.materialized = True


def _is_other_thread() -> bool:
    return threading.current_thread() is not _program_thread
