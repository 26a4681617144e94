"""Progress bars of calls that run a kernel many times, drawn by rich on the terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from taichi_ext.errors import InvalidArgumentError, shown


def check_progress(progress: Any) -> None:
    """Raise for a value of ``progress=`` that cannot be used."""
    if progress is not None and not isinstance(progress, bool):
        raise InvalidArgumentError(f"progress is {shown(progress)}; expected True, False or None.")
    if progress and _rich() is None:
        raise InvalidArgumentError(
            "progress=True needs rich, which comes with Taichi and is not installed: python -m pip install rich"
        )


@contextlib.contextmanager
def progress_bar(progress: bool | None, text: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar while the block runs; gives the function that is told how much has been done since its last call."""
    modules = _rich() if progress or (progress is None and _is_interactive()) else None
    if modules is None or total < 2:
        yield _ignore
        return
    console, bars = modules
    columns = (bars.TextColumn("{task.description}"), bars.BarColumn(), bars.MofNCompleteColumn())
    where = console.Console(stderr=True, force_terminal=True if progress else None)
    with bars.Progress(*columns, bars.TimeRemainingColumn(), console=where, transient=True) as bar:
        task = bar.add_task(text, total=total)
        yield lambda done: bar.advance(task, done)


def _is_interactive() -> bool:
    """Whether somebody watches: a terminal, or a notebook."""
    return "ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())


def _rich() -> tuple[Any, Any] | None:
    """The modules of rich that are used; None where it is not installed."""
    try:
        import rich.console
        import rich.progress
    except ImportError:
        return None
    return rich.console, rich.progress


def _ignore(done: int) -> None:
    pass
