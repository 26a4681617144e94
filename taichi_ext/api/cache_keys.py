"""How ``jacobian`` finds what it has prepared before: what a call is recognised by."""

from __future__ import annotations

import inspect
from typing import Any

from taichi_ext import backend

_DEEPEST = 100  # levels of a structure that are compared; one that contains itself has no end


def anchor(kernel: Any) -> Any:
    """What prepared forms of a kernel are kept on, so that they go with it; None where there is nothing."""
    bound = backend.primal_kernel(kernel)
    if bound is not None:
        # not the Kernel behind a decorated function: Taichi keeps every Kernel for ever
        return bound[1][0] if bound[1] else kernel if inspect.isfunction(kernel) else bound[0]
    owner = kernel.__self__ if inspect.ismethod(kernel) else kernel
    return owner if hasattr(owner, "__dict__") else None


def identity(kernel: Any) -> Any:
    """Equal for the same kernel, however it was reached."""
    bound = backend.primal_kernel(kernel)
    if bound is not None:
        return id(bound[0])
    return id(kernel.__func__) if inspect.ismethod(kernel) else id(kernel)


def structure_key(tree: Any, args: tuple[Any, ...], depth: int = 0) -> Any:
    """Equal for two calls that name the same fields, argument positions and names in the same structure."""
    if not isinstance(args, (tuple, list)) or depth > _DEEPEST:
        return id(tree)
    if isinstance(tree, (list, tuple)):
        return (type(tree), *(structure_key(t, args, depth + 1) for t in tree))
    if isinstance(tree, dict):
        return ("dict", *((k, structure_key(v, args, depth + 1)) for k, v in tree.items()))
    if isinstance(tree, str) or tree is None:
        return tree
    if isinstance(tree, backend.Field):
        return backend.field_identity(tree)  # components are other objects each time
    for position, value in enumerate(args):
        if backend.is_same_array(value, tree):
            return ("position", position)
    return id(tree)
