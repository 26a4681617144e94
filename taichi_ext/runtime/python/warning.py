"""Warnings at the user's line, once in each call."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from taichi_ext import backend
from taichi_ext.errors import DerivativeWarning

_said: ContextVar[set[Any] | None] = ContextVar("_said", default=None)


@contextlib.contextmanager
def saying_once(said: set[object]) -> Iterator[None]:
    """Within the context, warnings in ``said`` are not repeated, and new ones are added to it."""
    token = _said.set(said)
    try:
        yield
    finally:
        _said.reset(token)


def warn_at_user(message: str) -> None:
    """A warning at the line of the user's code that led here, once in each ``saying_once``."""
    frame = backend.user_frame()
    warn_at(message, None if frame is None else (frame.f_code.co_filename, frame.f_lineno))


def warn_at(message: str, place: tuple[str, int] | None) -> None:
    """A warning at a file and line, once in each ``saying_once``."""
    said = _said.get()
    if said is not None:
        if (message, place) in said:
            return
        said.add((message, place))
    if place is None:
        warnings.warn(message, DerivativeWarning, stacklevel=4)
    else:
        warnings.warn_explicit(message, DerivativeWarning, *place)
