"""Warnings of a block of a test: none, or all of them."""

import contextlib
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def no_warnings(kind: type[Warning] = Warning) -> Iterator[None]:
    """Warnings of this kind are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", kind)
        yield


@contextlib.contextmanager
def all_warnings() -> Iterator[list[warnings.WarningMessage]]:
    """The warnings, each as often as it is given."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught
