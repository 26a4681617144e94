"""Validate and normalise the options of a call, so that they can be compared."""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from typing import Any, NamedTuple, get_args

import numpy as np

from taichi_ext import backend
from taichi_ext.api.inputs.sparse_results import checked_format
from taichi_ext.api.inputs.types import Mode
from taichi_ext.differentiate.plan.storage_facts import STRATEGIES
from taichi_ext.errors import InvalidArgumentError, unexpected


class Options(NamedTuple):
    """See ``jacobian``."""

    max_memory: int | None = None
    tangents: str = "auto"
    chunk_size: int | None = None
    format: str | None = None
    mode: str | None = "forward"


def checked_options(
    max_memory: Any = None,
    tangents: object = "auto",
    chunk_size: Any = None,
    format: object = None,
    mode: object = "forward",
    *,
    as_matrix: object = False,
) -> Options:
    """The options of ``jacobian``; raises for a value that cannot be used."""
    check_flag("as_matrix", as_matrix)
    if as_matrix and format == "bsr":
        raise InvalidArgumentError(
            "format='bsr' needs blocks of one size, and as_matrix=True puts outputs and params with elements of "
            "different sizes into one matrix. Use format='csr'."
        )
    if max_memory is not None and not is_positive(max_memory):
        raise unexpected("max_memory", max_memory, "a positive number of bytes")
    tangents = checked_choice("tangents", tangents, STRATEGIES)
    if chunk_size is not None:
        check_count("chunk_size", chunk_size, least=1)
        chunk_size = int(chunk_size)
    format = checked_format(format)
    if mode is not None:
        mode = checked_choice("mode", mode, get_args(Mode))
    if mode == "reverse" and format is not None:
        raise InvalidArgumentError(
            f"mode='reverse' computes rows of all columns, and format={format!r} only their entries; leave out one."
        )
    return Options(max_memory, tangents, chunk_size, format, mode)


def is_whole(value: object) -> bool:
    """Whether a value is a whole number of Python or NumPy; a bool is not."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def is_positive(value: Any) -> bool:
    """Whether a value is a positive real number; a bool and NaN are not."""
    return is_real(value) and value > 0


def checked_choice(name: str, value: object, choices: Iterable[str]) -> str:
    """An option that is one of the words to choose from; raises for another value."""
    if isinstance(value, str) and value in choices:
        return value
    raise unexpected(name, value, f"one of {', '.join(map(repr, choices))}")


def check_function(name: str, value: object, meaning: str) -> None:
    """Raise for an option that is neither None nor a function that Python can call."""
    if value is not None and (not callable(value) or backend.is_known_in_kernels(value)):
        raise unexpected(name, value, f"a Python function of {meaning}")


def check_flag(name: str, value: object) -> None:
    """Raise for an option that is neither True nor False."""
    if not isinstance(value, bool):
        raise unexpected(name, value, "True or False")


def check_count(name: str, value: Any, *, least: int = 0) -> None:
    """Raise for an option that is no whole number of at least ``least``."""
    if not is_whole(value) or value < least:
        raise unexpected(name, value, f"a whole number of at least {least}")


def check_number(name: str, value: Any, meaning: str, *, least: float | None = None, is_optional: bool = True) -> None:
    """Raise for an option that is neither a positive number, or one of at least ``least``, nor None if optional."""
    is_fit = is_positive(value) or (least is not None and is_real(value) and value >= least)
    if not (is_optional if value is None else is_fit and value != float("inf")):
        kind = "positive number" if least is None else f"number of at least {least:g}"
        raise unexpected(name, value, f"a {kind}, {meaning}")


def is_real(value: object) -> bool:
    """Whether a value is a real number other than a bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
