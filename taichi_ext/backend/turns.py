"""Runs of kernels and pipelines wait while another thread has moved params, which they would read."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Generator, Iterable

from taichi_ext.backend.following import works_for_pipeline
from taichi_ext.backend.threads import exclusive

_PAUSE = 0.25  # seconds between two looks at what other threads do
_WAITING, _STILL = 8, 240  # looks at which a thread waits for others, or stands still: then it is not waited for
_turns = threading.Condition()
_running: dict[int, int] = {}  # runs under way, by thread
_moving: list[int] = []  # the threads that move params, or will: the first one goes first, before runs that begin later


@contextlib.contextmanager
def running(*, moves: bool = False) -> Generator[None, None, None]:
    """Within the context, this thread runs something; no other one does if it moves params in memory."""
    me = threading.get_ident()
    with _turns:
        own = _running.pop(me, 0)  # nothing runs here while this thread waits
        if moves:
            _moving.append(me)
        _turns.notify_all()
    try:
        with _turns:
            if not works_for_pipeline() and (moves or not own):
                _wait(lambda: {*(_running if moves else ()), *_moving[:1]} - {me})
            _running[me] = own + 1
        if moves:
            with exclusive:  # a repeated launch may have looked just before, see ``is_moved_elsewhere``
                pass
        yield
    finally:
        with _turns:
            _running.pop(me, None)
            if own:
                _running[me] = own
            if moves:
                _moving.remove(me)
            _turns.notify_all()


def _wait(ahead: Callable[[], Iterable[int]]) -> None:
    """Wait until no thread is ahead, but not for one that waits itself: a pipeline may wait for this thread."""
    left, before = 1.0, None
    while left > 0 and (others := ahead()):
        if not _turns.wait(_PAUSE):
            frames = [frame for n, frame in sys._current_frames().items() if n in others]
            now = [(id(frame), frame.f_lasti) for frame in frames]
            if all(frame.f_code.co_filename == threading.__file__ for frame in frames):
                left -= 1 / _WAITING
            else:
                left = left - 1 / _STILL if now == before else 1.0
            before = now


def is_moved_elsewhere() -> bool:
    """Whether another thread has moved params for a moment, or is about to."""
    return _moving[:1] not in ([], [threading.get_ident()])
