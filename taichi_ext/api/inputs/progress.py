"""Progress of long calls: a line of text on a terminal or in a notebook, which is replaced and removed at the end."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from taichi_ext.errors import unexpected

_WIDTH = 40  # of a bar
_BETWEEN = 0.1  # seconds between two updates of it

Show = Callable[[str | None], object]  # shows a line of text in place of the last one, or removes it (None)


def check_progress(progress: object) -> None:
    """Raise for a value of ``progress=`` that cannot be used."""
    if progress is not None and not isinstance(progress, bool):
        raise unexpected("progress", progress, "True, False or None")


def stage_line() -> Show | None:
    """The line of text, if anyone sees it."""
    if "ipykernel" in sys.modules:
        return _notebook_line()
    return _terminal_line if sys.stderr is not None and sys.stderr.isatty() else None


def _terminal_line(text: str | None) -> None:
    print(f"\r{text or ''}\x1b[K", end="", file=sys.stderr, flush=True)


def _notebook_line() -> Show:
    import IPython.display  # pyright: ignore[reportMissingImports]  # a notebook has it, no extra brings it

    shown_line: list[Any] = []

    def show(text: str | None) -> None:
        if not shown_line and text is not None:
            shown_line.append(IPython.display.display({"text/plain": text}, raw=True, display_id=True))
        elif shown_line:
            shown_line[0].update({} if text is None else {"text/plain": text}, raw=True)

    return show


@contextlib.contextmanager
def progress_bar(progress: bool | None, text: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar that is removed when the block ends; gives a function that advances it."""
    show = stage_line() if total > 1 and progress is not False else None
    show = _terminal_line if show is None and total > 1 and progress else show
    done, shown_at = 0, 0.0

    def advance(more: int) -> None:
        nonlocal done, shown_at
        done, now = done + more, time.monotonic()
        if show is not None and (now - shown_at > _BETWEEN or done == total):
            shown_at, bar = now, "━" * (_WIDTH * done // total)
            show(f"{text} {bar:{_WIDTH}} {done}/{total}")

    try:
        advance(0)
        yield advance
    finally:
        if show is not None:
            show(None)
