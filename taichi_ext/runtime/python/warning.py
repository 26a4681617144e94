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
    frame, said = backend.user_frame(), _said.get()
    if said is not None:
        place = (message, frame and (frame.f_code.co_filename, frame.f_lineno))
        if place in said:
            return
        said.add(place)
    if frame is None:
        warnings.warn(message, DerivativeWarning, stacklevel=3)
    else:
        warnings.warn_explicit(message, DerivativeWarning, frame.f_code.co_filename, frame.f_lineno)
