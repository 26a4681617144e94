"""Progress of calls that take long: a line of text, with a bar where a kernel runs many times."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from taichi_ext.errors import unexpected

_WIDTH = 40  # of a bar
_BETWEEN = 0.1  # seconds between two updates of it


def check_progress(progress: object) -> None:
    """Raise for a value of ``progress=`` that cannot be used."""
    if progress is not None and not isinstance(progress, bool):
        raise unexpected("progress", progress, "True, False or None")


def shown_line(*, is_wanted: bool = False) -> Callable[[str | None], object] | None:
    """A function that shows a line of text in place of the last one, or removes it (None), if anyone sees it."""
    if "ipykernel" in sys.modules:
        return _notebook_line()
    if is_wanted or (sys.stderr is not None and sys.stderr.isatty()):
        return lambda text: print(f"\r{text or ''}\x1b[K", end="", file=sys.stderr, flush=True)
    return None


def _notebook_line() -> Callable[[str | None], None]:
    import IPython.display  # pyright: ignore[reportMissingImports]  # a notebook has it, no extra brings it

    shown: list[Any] = []

    def show(text: str | None) -> None:
        if not shown and text is not None:
            shown.append(IPython.display.display({"text/plain": text}, raw=True, display_id=True))
        elif shown:
            shown[0].update({} if text is None else {"text/plain": text}, raw=True)

    return show


@contextlib.contextmanager
def progress_bar(progress: bool | None, text: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar that is removed when the block ends; gives a function that advances it."""
    show = None if progress is False or total <= 1 else shown_line(is_wanted=progress is True)
    if show is None:
        yield lambda _: None
        return
    begun, done, shown_at = time.monotonic(), 0, 0.0
    show(text)

    def advance(more: int) -> None:
        nonlocal done, shown_at
        done, now = done + more, time.monotonic()
        if now - shown_at > _BETWEEN or done == total:
            shown_at, full = now, _WIDTH * done // total
            left = (now - begun) * (total - done) / max(1, done)
            show(f"{text} {'━' * full}{' ' * (_WIDTH - full)} {done}/{total}, {left:.0f} s left")

    try:
        yield advance
    finally:
        show(None)
