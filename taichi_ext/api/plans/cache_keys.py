"""The keys by which ``jacobian`` finds the prepared form of an earlier call."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from taichi_ext import backend

_DEEPEST = 100  # levels of a structure that are compared; a structure may contain itself


class Origin(NamedTuple):
    """A kernel or pipeline, however it was reached.

    Attributes:
        owner: the object of a bound method, else the kernel or function itself.
        function: the kernel or function.
    """

    owner: object
    function: Any


def origin_of(kernel: object) -> Origin:
    """The owner and the function of a kernel or pipeline."""
    bound = backend.primal_kernel(kernel)
    if bound is not None:
        # not the Kernel behind a decorated function: Taichi keeps every Kernel for ever
        owner = bound[1][0] if bound[1] else kernel if backend.is_decorated(kernel) else bound[0]
        return Origin(owner, bound[0])
    if inspect.ismethod(kernel):
        return Origin(kernel.__self__, kernel.__func__)
    return Origin(kernel, kernel)


def structure_key(tree: object, args: tuple[object, ...], depth: int = 0) -> object:
    """Equal for two calls that name the same fields, argument positions and names in the same structure."""
    if not isinstance(args, (tuple, list)) or depth > _DEEPEST:
        return id(tree)
    tree = backend.unwrapped(tree)
    if isinstance(tree, (list, tuple)):
        return (type(tree), *(structure_key(t, args, depth + 1) for t in tree))
    if isinstance(tree, dict):
        return ("dict", *((k, structure_key(v, args, depth + 1)) for k, v in tree.items()))
    if isinstance(tree, backend.StructField):
        return ("struct", *((k, structure_key(v, args, depth + 1)) for k, v in tree.field_dict.items()))
    if isinstance(tree, str) or tree is None:
        return tree
    if isinstance(tree, backend.Field):
        return backend.field_identity(tree)  # components are other objects each time
    for position, value in enumerate(args):
        if backend.is_same_array(backend.unwrapped(value), tree):
            return ("position", position)
    return id(tree)
