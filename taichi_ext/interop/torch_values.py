"""Arguments of kernels by name, and values as kernels take and return them, from and to torch tensors."""

# pyright knows no types of Taichi, torch and SciPy, nor of arrays of any shape and type.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import numpy as np

from taichi_ext import backend
from taichi_ext.interop.torch_products import require_torch


def host_number(value: Any) -> Any:
    return value.item() if value.ndim == 0 else value.cpu().numpy()


def as_tensor(block: object, device: object) -> Any:
    torch = require_torch()
    return block if isinstance(block, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(block)).to(device)


def returned_tensor(returned: object, kernel: object, device: object) -> object:
    """The return value of a kernel, as a tensor of its type."""
    bound = backend.primal_kernel(kernel)
    assert bound is not None
    values = returned if isinstance(returned, (list, tuple)) else [returned]
    arrays = [np.asarray(backend.as_numpy(v)) for v in values]
    joined = arrays[0] if len(arrays) == 1 else np.concatenate([a.reshape(-1) for a in arrays])
    dtype = backend.to_numpy_type(backend.return_dtype(bound[0]))
    return require_torch().from_numpy(np.array(joined, dtype)).to(device)


class Signature(NamedTuple):
    """The names of the arguments, and the annotations of a kernel's."""

    names: list[str]
    annotations: dict[str, object]

    @classmethod
    def of(cls, kernel: Any) -> Signature:
        bound = backend.primal_kernel(kernel)
        if bound is None:
            return cls(list(inspect.signature(kernel).parameters), {})
        annotations = {a.name: a.annotation for a in backend.arguments(bound[0])[len(bound[1]) :]}
        return cls(list(annotations), annotations)

    def is_value(self, name: str) -> bool:
        """Whether an argument is passed by value."""
        annotation = self.annotations.get(name)
        return annotation is not None and not backend.is_array_annotation(annotation)

    def value_shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of the tensor for an argument passed by value; None for an array."""
        if not self.is_value(name):
            return None
        kind = self.annotations[name]
        if isinstance(kind, backend.MatrixType):
            return tuple(kind.get_shape())
        return ()
