"""Progress bars of calls that run a kernel many times: by rich on a terminal, as a line of text in a notebook."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

from taichi_ext.errors import InvalidArgumentError, unexpected

Progress = bool | Literal["stages"] | None  # as in ``jacobian``; "stages" draws no bar, as False, and says the rest
_WIDTH = 40  # of a bar in a notebook
_BETWEEN = 0.1  # seconds between two updates of it


def check_progress(progress: object) -> None:
    """Raise for a value of ``progress=`` that cannot be used."""
    if progress is not None and not isinstance(progress, bool):
        raise unexpected("progress", progress, "True, False or None")
    if progress and _rich() is None:
        raise InvalidArgumentError(
            "progress=True needs rich, which comes with Taichi and is not installed: python -m pip install rich"
        )


def stage_line() -> Callable[[str | None], object] | None:
    """A function that shows a line of text in place of the last one, or removes it (None), if anyone sees it."""
    if "ipykernel" not in sys.modules:
        if not _is_terminal():
            return None
        return lambda text: print(f"\r{text or ''}\x1b[K", end="", file=sys.stderr, flush=True)
    return _notebook_line()


def _notebook_line() -> Callable[[str | None], None]:
    """A function that shows a line of text in a notebook in place of the last one, or removes it (None)."""
    import IPython.display  # pyright: ignore[reportMissingImports]  # a notebook has it, no extra brings it

    shown_line: list[Any] = []

    def show(text: str | None) -> None:
        if not shown_line and text is not None:
            shown_line.append(IPython.display.display({"text/plain": text}, raw=True, display_id=True))
        elif shown_line:
            shown_line[0].update({} if text is None else {"text/plain": text}, raw=True)

    return show


def progress_bar(progress: Progress, text: str, total: int) -> contextlib.AbstractContextManager[Callable[[int], None]]:
    """A bar that is removed when the block ends; gives a function that advances it."""
    if progress in (False, "stages") or (progress is None and total <= 1):
        return contextlib.nullcontext(lambda _: None)
    return _bar(text, total, is_asked=progress is True)


@contextlib.contextmanager
def _bar(text: str, total: int, *, is_asked: bool) -> Iterator[Callable[[int], None]]:
    is_notebook = "ipykernel" in sys.modules
    is_shown = total > 1 and (is_asked or is_notebook or _is_terminal())
    if is_shown and is_notebook:
        with _notebook_bar(text, total) as advance:
            yield advance
        return
    modules = _rich() if is_shown else None
    if modules is None:
        yield lambda _: None
        return
    console, bars = modules
    columns = (bars.TextColumn("{task.description}"), bars.BarColumn(), bars.MofNCompleteColumn())
    where = console.Console(stderr=True, force_terminal=is_asked or None)
    with bars.Progress(*columns, bars.TimeRemainingColumn(), console=where, transient=True) as bar:
        task = bar.add_task(text, total=total)
        yield lambda done: bar.advance(task, done)


@contextlib.contextmanager
def _notebook_bar(text: str, total: int) -> Iterator[Callable[[int], None]]:
    """A line of text that is replaced by the next one, and removed at the end."""
    show = _notebook_line()
    show(text)
    done, shown_at = 0, 0.0

    def advance(more: int) -> None:
        nonlocal done, shown_at
        done, now = done + more, time.monotonic()
        if now - shown_at > _BETWEEN:
            shown_at, full = now, _WIDTH * done // total
            bar = "━" * full + " " * (_WIDTH - full)
            show(f"{text} {bar} {done}/{total}")

    try:
        yield advance
    finally:
        show(None)


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _rich() -> tuple[Any, Any] | None:
    """The modules of rich that are used; None where it is not installed."""
    try:
        import rich.console
        import rich.progress
    except ImportError:
        return None
    return rich.console, rich.progress
