"""What a runtime is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Runtime:
    """The system that compiles and runs kernels; there is one in a process.

    Attributes:
        module: its public names, called ``ti`` in generated text.
        state: gives its current state: the program, the kernel that is traced, default types.
        config: gives the settings of the program.
        program: gives the current program, None before ``ti.init``; it changes identity at each ``ti.init``.
        lock: held while a kernel is traced, by this package or by it, and while state shared by calls is used.
    """

    module: ModuleType
    state: Callable[[], Any]
    config: Callable[[], Any]
    program: Callable[[], Any]
    lock: threading.RLock

    @property
    def name(self) -> str:
        """Of its package."""
        return self.module.__name__

    @property
    def header(self) -> str:
        """The statement by which generated text imports it."""
        return f"import {self.name} as ti"

    def owns(self, name: str) -> bool:
        """Whether a module of this name is one of its own."""
        return name.split(".")[0] == self.name
