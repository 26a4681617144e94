"""Runs of kernels and pipelines wait while another thread has moved params, which they would read."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Generator

from taichi_ext.backend.following import works_for_pipeline
from taichi_ext.backend.threads import exclusive

_PATIENCE = 60.0  # seconds
_BLOCKED = 2.0  # seconds; a thread that waits for others so long may wait for this one
_turns = threading.Condition()
_running: dict[int, int] = {}  # runs under way, by thread
_moving: int | None = None  # the thread that has moved params
_wanting: set[int] = set()  # the threads that will move params as soon as no run is under way


@contextlib.contextmanager
def running(*, moves: bool = False) -> Generator[None, None, None]:
    """Within the context, this thread runs something; no other one does if it moves params in memory."""
    global _moving
    thread = threading.get_ident()
    with _turns:
        own, before = _running.pop(thread, 0), _moving
        if not works_for_pipeline() and (moves or not own):
            _wait(thread, moves=moves)
        _running[thread] = own + 1
        if moves:
            _moving = thread
    try:
        if moves:
            with exclusive:  # a repeated launch may have looked just before, see ``is_moved_elsewhere``
                pass
        yield
    finally:
        with _turns:
            _running.pop(thread)
            if own:
                _running[thread] = own
            if moves:
                _moving = before
            _turns.notify_all()


def _wait(thread: int, *, moves: bool) -> None:
    """Wait for other threads, but not for those that wait for others themselves: a pipeline may wait for this one."""
    now = time.monotonic()
    end, since = now + _PATIENCE, dict[int, float]()
    _wanting.update({thread} if moves else ())
    try:
        while now < end:
            ahead = {*(_running if moves else ()), *(() if _moving is None else (_moving,))} - {thread}
            frames = sys._current_frames() if ahead else {}
            since = {
                other: since.get(other, now)
                for other in ahead
                if other not in frames or frames[other].f_code.co_filename == threading.__file__
            }
            is_free = all(now - since.get(other, now) > _BLOCKED for other in ahead)
            if is_free and (moves or not _wanting):
                return
            _turns.wait(_BLOCKED / 8 if ahead else end - now)
            now = time.monotonic()
    finally:
        _wanting.discard(thread)
        _turns.notify_all()


def is_moved_elsewhere() -> bool:
    """Whether another thread has moved params for a moment."""
    return _moving not in (None, threading.get_ident())
