"""``y = 3 x`` on arrays from elsewhere: NumPy, ``ti.ndarray`` and torch, and torch's autograd through the kernel.

The Jacobian is 3 I for every kind of array.  With torch, the kernel becomes a function that autograd differentiates;
the gradient is right whether or not x is a leaf, because only torch adds to ``x.grad``.

    python examples/external_arrays.py --output external_arrays.png

The part with torch needs ``python -m pip install '.[torch]'``.
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotting
import taichi as ti
from compare import Comparison

from taichi_ext import jacobian, torch_function

SHAPE = (20, 30)
EXPECTED_GRADIENT = 0.00333333  # of mean |x - 3 x| at 1, in each of the 600 entries: 2 / 600


@ti.kernel
def triple(x: ti.types.ndarray(), y: ti.types.ndarray()):
    for I in ti.grouped(x):
        y[I] = 3.0 * x[I]


def identity_times_3(shape: tuple[int, ...]) -> np.ndarray:
    """d y / d x, shape ``shape + shape``."""
    n = int(np.prod(shape))
    return 3.0 * np.eye(n).reshape(*shape, *shape)


def numpy_jacobian(shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    x, y = np.ones(shape, np.float32), np.zeros(shape, np.float32)
    return jacobian(triple, x, y, args=(x, y))


def ndarray_jacobian(shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    x, y = ti.ndarray(ti.f32, shape), ti.ndarray(ti.f32, shape)
    x.fill(1.0)
    return jacobian(triple, x, y, args=(x, y))


def torch_jacobian(shape: tuple[int, ...] = SHAPE) -> Any:
    """A torch tensor, because y is one."""
    torch = import_torch()
    x, y = torch.ones(shape), torch.zeros(shape)
    return jacobian(triple, x, y, args=(x, y))


def torch_gradient(is_leaf: bool, shape: tuple[int, ...] = SHAPE) -> Any:
    """d mean |x - 3 x| / d x by autograd, for an x that is a leaf, or the result of another operation."""
    torch = import_torch()
    triple_of = torch_function(triple, inputs="x", outputs="y")
    leaf = torch.ones(shape, requires_grad=True)
    x = leaf if is_leaf else leaf.clone()
    torch.nn.L1Loss()(x, triple_of(x)).backward()
    return leaf.grad


def import_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise ImportError("this part needs PyTorch: python -m pip install '.[torch]'") from error
    return torch


def main(arguments: Sequence[str] | None = None) -> int:
    """Each kind of array compared with 3 I; then autograd."""
    options = plotting.parse(plotting.parser(__doc__.splitlines()[0], "external_arrays.png"), arguments)
    ti.init(arch=ti.cpu, log_level=ti.ERROR)
    compared = Comparison(f"y = 3 x on arrays of shape {SHAPE}")
    expected = identity_times_3(SHAPE)
    compared.numbers("d y / d x, NumPy arrays", numpy_jacobian(), expected, rtol=1e-6)
    compared.numbers("d y / d x, ti.ndarray", ndarray_jacobian(), expected, rtol=1e-6)
    if (figure := plotting.new_figure(4.5, 3.6)) is not None:
        axes = figure.subplots()
        drawn = plotting.show_matrix(axes, numpy_jacobian((3, 4)).reshape(12, 12), "d y / d x of 3 x 4 entries")
        axes.set(xlabel="entry of x", ylabel="entry of y")
        plotting.color_bar(figure, drawn, axes, "derivative")
        plotting.save(figure, options.output)
    try:
        import_torch()
    except ImportError as error:
        print(f"  left out: torch ({error})")
        return compared.exit_code
    compared.numbers("d y / d x, torch tensors", torch_jacobian(), expected, rtol=1e-6)
    for is_leaf in (True, False):
        name = "a leaf" if is_leaf else "not a leaf"
        gradient = torch_gradient(is_leaf)
        compared.numbers(f"gradient of mean |x - y|, x {name}", gradient, np.full(SHAPE, EXPECTED_GRADIENT), rtol=2e-6)
        print(f"       in each entry {gradient.min():.8f} to {gradient.max():.8f}, expected {EXPECTED_GRADIENT}")
    return compared.exit_code


if __name__ == "__main__":
    sys.exit(main())
