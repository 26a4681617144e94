"""Run kernels as recorded and emitted: every launch within the context uses the emitted kernel."""

from __future__ import annotations

import time
from typing import Any

import taichi as ti
from taichi.lang.kernel_impl import Kernel

from taichi_ext import backend
from taichi_ext.emit import Emitted, build
from taichi_ext.record import record
from taichi_ext.simplify import simplify


class Reemission:
    """While it is entered, kernels of the user's are recorded, simplified, emitted, and run in that form."""

    def __init__(self, *, simplifies: bool = True) -> None:
        self.simplifies = simplifies
        self.made: dict[Any, tuple[Emitted, Any]] = {}
        self.own: set[int] = set()
        self.seconds = [0.0, 0.0, 0.0]  # of record, simplify and emit

    def __enter__(self) -> Reemission:
        self.original = original = Kernel.__call__

        def call(kernel: Any, *args: Any, **keywords: Any) -> Any:
            is_foreign = backend.is_library_kernel(kernel) or backend.module_of(kernel.func).startswith(
                f"{ti.__name__}."
            )
            if is_foreign or id(kernel) in self.own:
                return original(kernel, *args, **keywords)
            args = backend.process_args(kernel, args, keywords)
            emitted = self.emitted(kernel, args)
            given = zip(args, backend.arguments(kernel), strict=True)
            return emitted(*[a for a, k in given if not isinstance(k.annotation, ti.template)])

        Kernel.__call__ = call
        return self

    def __exit__(self, *error: Any) -> None:
        Kernel.__call__ = self.original

    def emitted(self, kernel: Any, args: tuple[Any, ...]) -> Emitted:
        key = (id(kernel), backend.argument_features(kernel, args))
        if key not in self.made:
            times = [time.process_time()]
            program = record(kernel, args)
            times.append(time.process_time())
            program = simplify(program) if self.simplifies else program
            times.append(time.process_time())
            emitted = build(program)
            times.append(time.process_time())
            self.seconds = [s + b - a for s, a, b in zip(self.seconds, times[:-1], times[1:], strict=True)]
            self.made[key] = emitted, kernel
            self.own.add(id(emitted.kernel._primal))
        return self.made[key][0]

    @property
    def text(self) -> str:
        return "\n".join(emitted.text for emitted, _ in self.made.values())
