"""What a run changes, kept so that it can be run again: only needed when columns are computed in several runs."""

from __future__ import annotations

from typing import Any

from taichi_ext import _taichi
from taichi_ext.errors import InvalidArgumentError


class State:
    """Copies of fields and arrays as they were before they were first written."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Any, Any]] = {}
        self.has_random = False

    def save(self, obj: Any) -> None:
        """Keep a copy of a field or array, the first time that it is named."""
        if id(obj) not in self._copies:
            with _taichi.suspend_following():
                self._copies[id(obj)] = (obj, _taichi.copy_of(obj))

    def restore(self) -> None:
        """Put everything back as it was."""
        if self.has_random:
            raise InvalidArgumentError(
                "The columns are to be computed in several runs (chunk_size=, or tangents that do not fit into "
                "max_memory at once), and kernels with random numbers cannot be run again with the same ones. Leave "
                "out chunk_size=, allow more max_memory, or use fewer parameters at a time."
            )
        with _taichi.suspend_following():
            for obj, copy in self._copies.values():
                if isinstance(obj, _taichi.Field) and not _taichi.is_dense(obj):
                    raise InvalidArgumentError(
                        "The columns are to be computed in several runs (chunk_size=, or tangents that do not fit into "
                        f"max_memory at once), and a field of shape {tuple(obj.shape)} in a sparse layout cannot be "
                        "put back as it was for another run. Leave out chunk_size=, allow more max_memory, or use "
                        "fewer parameters at a time."
                    )
                _taichi.put_back(obj, copy)


class OverBudgetError(Exception):
    """The tangents of intermediates need more memory than allowed; fewer columns at a time are tried."""
