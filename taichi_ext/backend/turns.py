"""Runs of kernels and pipelines wait while another thread has moved params, which they would read."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator

from taichi_ext.backend.following import works_for_pipeline

_PATIENCE = 60.0  # seconds; another thread may wait for this one
_turns = threading.Condition()
_running: dict[int, int] = {}  # runs under way, by thread
_moving: int | None = None  # the thread that has moved params


@contextlib.contextmanager
def running(*, moves: bool = False) -> Generator[None, None, None]:
    """Within the context, this thread runs something; no other one does if it moves params in memory."""
    global _moving
    thread = threading.get_ident()
    with _turns:
        own, before = _running.pop(thread, 0), _moving
        if not works_for_pipeline() and (moves or not own):
            _turns.wait_for(lambda: _moving in (None, thread) and not (moves and _running), _PATIENCE)
        _running[thread] = own + 1
        if moves:
            _moving = thread
    try:
        yield
    finally:
        with _turns:
            _running.pop(thread)
            if own:
                _running[thread] = own
            if moves:
                _moving = before
            _turns.notify_all()


def is_moved_elsewhere() -> bool:
    """Whether another thread has moved params for a moment."""
    return _moving not in (None, threading.get_ident())
