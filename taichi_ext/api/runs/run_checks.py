"""Checks of the first run of a kernel or pipeline: what it has read and written."""

from __future__ import annotations

from collections.abc import Iterable

from taichi_ext.api.inputs.arguments import KernelCall, check_active, check_read
from taichi_ext.api.inputs.layout import Layout
from taichi_ext.api.runs.findings import warn_of_python_readers
from taichi_ext.api.runs.prepared import Prepared
from taichi_ext.boundary.registry import registry
from taichi_ext.errors import InvalidArgumentError
from taichi_ext.program.keys import Key
from taichi_ext.runtime.python.warning import warn_at_user


def check_accesses(call: KernelCall, layout: Layout, read: set[Key], written: set[Key], numbers: Iterable[str]) -> None:
    """Raise where a parameter is not read, or an output not written; ``numbers``: the Python numbers that are read."""
    where = f"in {call.name}" if call.kernel is not None else f"by the kernels that {call.name} launched"
    params, outputs = ([(p.target, p.container) for p in placed] for placed in (layout.params, layout.outputs))
    check_read([target for target, _ in params], read, numbers, where)
    check_active(params, outputs, read, written, where)


def check_run(
    prepared: Prepared,
    call: KernelCall,
    layout: Layout,
    accessed: tuple[set[Key], set[Key]],
    numbers: Iterable[str],
    *,
    has_launched: bool,
) -> None:
    """Check what a run has read and written, if it is the first one, and that it has launched a kernel."""
    if prepared.rules_seen != registry.version:
        prepared.rules_seen = registry.version
        for message in registry.warnings():
            warn_at_user(message)
    if call.kernel is None and not has_launched:
        own = {param.container for param in layout.params}  # their J is known without a launch
        if any(o.container not in own for o in layout.outputs):
            raise InvalidArgumentError(f"{call.name} launched no kernel, so there is nothing to differentiate.")
    if prepared.is_checked:
        return
    check_accesses(call, layout, *accessed, numbers)
    if call.kernel is None:
        warn_of_python_readers([p.target for p in layout.params], call.function)
    prepared.is_checked = True
