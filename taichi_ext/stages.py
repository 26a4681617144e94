"""The stages of a call that takes long because it builds kernels: in the log ``taichi_ext``, and shown to users."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType

LOG = logging.getLogger("taichi_ext")
LOG.addHandler(logging.NullHandler())
SLOW = 2.0  # seconds; stages of shorter calls are not logged

_local = threading.local()


class Stages:
    """The stages of one call, logged and shown once it has taken long; ``with Stages(name):`` around the call.

    Args:
        name: of the call.
        show: shows a line in place of the last one, or removes it (None); None shows nothing.
    """

    def __init__(self, name: str, show: Callable[[str | None], object] | None = None) -> None:
        self._name, self._show = name, show
        self._stage, self._is_shown = "", False
        self._timer: threading.Timer | None = None
        self._start = time.perf_counter()
        self._pending: list[str] = []
        self._has_any = False
        self._outer: Stages | None = None

    def __enter__(self) -> Stages:
        self._outer = getattr(_local, "stages", None)
        _local.stages = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _local.stages = self._outer
        if self._timer is not None and self._show is not None:
            self._timer.cancel()
            self._timer.join()
            if self._is_shown:
                self._show(None)
        if self._has_any and self._log_pending():
            LOG.info("%s: %.1f s in total", self._name, time.perf_counter() - self._start)

    def begin(self, stage: str) -> None:
        """A stage begins, which is shown from ``SLOW`` seconds on: by a thread, since the stage keeps this one busy."""
        self._stage = f"{self._name}: {stage} ..."
        if self._show is None:
            return
        if self._timer is None:
            self._timer = threading.Timer(SLOW - (time.perf_counter() - self._start), self._tell)
            self._timer.daemon = True
            self._timer.start()
        elif not self._timer.is_alive():
            self._tell()

    def _tell(self) -> None:
        assert self._show is not None
        self._is_shown = True
        self._show(self._stage)

    def note(self, stage: str, seconds: float) -> None:
        """A stage is over."""
        self._has_any = True
        self._pending.append(f"{stage}, {seconds:.1f} s")
        self._log_pending()

    def _log_pending(self) -> bool:
        is_slow = time.perf_counter() - self._start > SLOW
        if is_slow:
            for line in self._pending:
                LOG.info("%s: %s", self._name, line)
            self._pending.clear()
        return is_slow


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """No garbage collections within the context: most objects that a stage creates are used until its end."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def begin(stage: str) -> float:
    """Note that a stage of this thread's call begins, by ``time.perf_counter()``."""
    stages: Stages | None = getattr(_local, "stages", None)
    if stages is not None:
        stages.begin(stage)
    return time.perf_counter()


def note(stage: str, start: float) -> None:
    """Note the end of a stage of this thread's call, which began at ``start`` by ``time.perf_counter()``."""
    stages: Stages | None = getattr(_local, "stages", None)
    if stages is not None:
        stages.note(stage, time.perf_counter() - start)
