"""The log ``taichi_ext``: the stages of a call that takes long because it builds kernels, with their times."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import time
from collections.abc import Iterator
from types import TracebackType

LOG = logging.getLogger("taichi_ext")
LOG.addHandler(logging.NullHandler())
SLOW = 2.0  # seconds; stages of shorter calls are not logged

_local = threading.local()


class Stages:
    """The stages of one call, logged once it has taken long; ``with Stages(name):`` around the call."""

    def __init__(self, name: str) -> None:
        self._name = name
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
        if self._has_any and self._log_pending():
            LOG.info("%s: %.1f s in total", self._name, time.perf_counter() - self._start)

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


def note(stage: str, start: float) -> None:
    """Note the end of a stage of this thread's call, which began at ``start`` by ``time.perf_counter()``."""
    stages: Stages | None = getattr(_local, "stages", None)
    if stages is not None:
        stages.note(stage, time.perf_counter() - start)
