"""``plot_jacobian`` and ``plot_sparsity``: J as pictures, a row for each of its blocks."""

# Arrays are of any shape and type here, which pyright takes for unknown.
# pyright: reportUnknownMemberType=false
# What users give is checked, whatever its annotation says.
# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

import math
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.api.arguments import flatten, refuse_ended
from taichi_ext.errors import InvalidArgumentError, shown

_LEAST_IMAGE = 8  # entries of both axes, from which on they are taken for those of an image
_MOST_PIXELS = 512  # of a side of a pattern
_MOST_COLUMNS = 8  # images of one block
_MOST_ENTRIES = 2**26  # of a sparse block that is drawn entry by entry


def plot_jacobian(J: Any, *, output_axes: int | None = None, columns: int = _MOST_COLUMNS) -> Any:
    """Draw a Jacobian: a row of pictures for each block of output and parameter, red above and blue below zero.

    A block whose output is an image is drawn as images, one for each entry of the parameter.  Any other block is drawn
    as a matrix, with a row for each entry of the output and a column for each entry of the parameter.  Entries that are
    not finite are left blank.

    Args:
        J: what ``jacobian`` returns: an array or tensor, a sparse array, or a structure of those.
        output_axes: how many axes of each block belong to the output.  By default 2 where a block has at least three
            axes and the first two have at least 8 entries each, else 1.
        columns: the largest number of images drawn for a block.

    Returns:
        The matplotlib figure.

    Raises:
        ImportError: matplotlib is not installed (the extra ``plot``).
        InvalidArgumentError: J is no Jacobian, or an option is invalid.

    Example:
        >>> import numpy as np
        >>> from taichi_ext import plot_jacobian
        >>> figure = plot_jacobian({"pose": np.ones((32, 24, 4))})
        >>> [axes.get_title() for axes in figure.axes[:2]]
        ["['pose'] by entry 0", "['pose'] by entry 1"]
    """
    plt = _pyplot("plot_jacobian")
    if not isinstance(columns, int) or columns < 1:
        raise InvalidArgumentError(f"columns is {shown(columns)}; expected a positive whole number of images.")
    if output_axes is not None and (not isinstance(output_axes, int) or output_axes < 0):
        raise InvalidArgumentError(f"output_axes is {shown(output_axes)}; expected a whole number of axes, or None.")
    rows = [_pictures(path, _dense(block, path), output_axes, columns) for path, block in _blocks(J)]
    width = max(len(pictures) for pictures in rows)
    figure = plt.figure(figsize=(2.0 + 2.4 * width, 2.6 * len(rows)), layout="constrained")
    grid = figure.add_gridspec(len(rows), width)
    for n, pictures in enumerate(rows):
        finite = [np.abs(p[np.isfinite(p)]).max(initial=0.0) for _, p, _ in pictures]
        largest = max(finite) or 1.0
        drawn: Any = None
        axes: list[Any] = []
        for k, (title, picture, is_image) in enumerate(pictures):
            place = (n, k) if len(pictures) > 1 else (n, slice(None))
            axes.append(figure.add_subplot(grid[place]))
            # images as Taichi shows them: the first index to the right, the second one up
            layout = {"origin": "lower", "aspect": "equal"} if is_image else {"aspect": "auto"}
            colours = {"cmap": "RdBu_r", "vmin": -largest, "vmax": largest}
            drawn = axes[-1].imshow(picture.T if is_image else picture, **layout, **colours)
            axes[-1].set_title(title, fontsize="small")
            if is_image:
                axes[-1].set_axis_off()
            else:
                axes[-1].set(xlabel="parameter", ylabel="output")
        figure.colorbar(drawn, ax=axes, shrink=0.8)
    return figure


def plot_sparsity(J: Any) -> Any:
    """Draw which entries of a Jacobian are not zero: a picture for each block of output and parameter.

    Rows are the entries of the output, columns those of the parameter, both in C order; of a sparse array, all stored
    entries count.  A block larger than 512 x 512 is drawn coarser: a pixel is filled if anything in it is.

    Args:
        J: what ``jacobian`` returns: an array or tensor, a sparse array, or a structure of those.  A dense block is
            taken as a matrix with a row for each index of its first axis (of its first two if it looks like an image,
            see ``plot_jacobian``).

    Returns:
        The matplotlib figure; the title of each picture has the shape and the number of entries.

    Raises:
        ImportError: matplotlib is not installed (the extra ``plot``).
        InvalidArgumentError: J is no Jacobian.

    Example:
        >>> import numpy as np
        >>> from taichi_ext import plot_sparsity
        >>> figure = plot_sparsity([np.eye(4), np.ones((4, 2))])
        >>> figure.axes[0].get_title()
        '[0]: 4 x 4, 4 entries (25 %)'
    """
    plt = _pyplot("plot_sparsity")
    blocks = _blocks(J)
    across = math.ceil(math.sqrt(len(blocks)))
    figure = plt.figure(figsize=(4.0 * across, 4.0 * math.ceil(len(blocks) / across)), layout="constrained")
    for n, (path, block) in enumerate(blocks):
        (height, width), rows, columns = _pattern(block, path)
        axes = figure.add_subplot(math.ceil(len(blocks) / across), across, n + 1)
        size = (min(height, _MOST_PIXELS), min(width, _MOST_PIXELS))
        picture = np.zeros(size, bool)
        picture[rows * size[0] // max(1, height), columns * size[1] // max(1, width)] = True
        extent = (-0.5, width - 0.5, height - 0.5, -0.5)
        axes.imshow(picture, cmap="binary", vmin=0, vmax=1, aspect="auto", extent=extent, interpolation="nearest")
        share = 100 * len(rows) / max(1, height * width)
        name = f"{path}: " if path else ""
        axes.set_title(f"{name}{height} x {width}, {len(rows)} entries ({share:.3g} %)", fontsize="small")
        axes.set(xlabel="parameter", ylabel="output")
    return figure


def _pyplot(user: str) -> Any:
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            f"{user} needs matplotlib, which is not installed: python -m pip install 'taichi-ext[plot]'"
        ) from error
    return plt


def _blocks(J: Any) -> list[tuple[str, Any]]:
    blocks = flatten(J, "J")[0]
    if not blocks:
        raise InvalidArgumentError("J is empty; give what jacobian returns.")
    return blocks


def _is_sparse(block: Any) -> bool:
    return hasattr(block, "tocoo")


def _dense(block: Any, path: str) -> np.ndarray:
    """A block as a NumPy array of real numbers."""
    if _is_sparse(block) and math.prod(block.shape) > _MOST_ENTRIES:
        raise InvalidArgumentError(
            f"J{path} has shape {tuple(block.shape)}, too large to be drawn entry by entry; use plot_sparsity."
        )
    refuse_ended(f"J{path}", block)
    values = block.toarray() if _is_sparse(block) else block
    values = values.to_dense() if hasattr(values, "to_dense") else values
    values = backend.as_numpy(values)
    try:
        found = np.asarray(values)
    except (ValueError, TypeError):
        found = np.empty(0, object)
    if found.dtype.kind not in "fiu":
        raise InvalidArgumentError(f"J{path} is {shown(block)}; expected an array of real numbers.")
    return found.astype(np.float64)


def _is_image(shape: tuple[int, ...]) -> bool:
    return len(shape) >= 3 and min(shape[:2]) >= _LEAST_IMAGE


def _output_axes(shape: tuple[int, ...], given: int | None, path: str) -> int:
    if given is None:
        return 2 if _is_image(shape) else min(1, len(shape))
    if given > len(shape):
        raise InvalidArgumentError(f"output_axes is {given}, and J{path} has shape {shape}.")
    return given


def _pictures(path: str, block: np.ndarray, output_axes: int | None, most: int) -> list[tuple[str, np.ndarray, bool]]:
    """The pictures of a block: title, numbers, and whether it is an image of the output."""
    count = _output_axes(block.shape, output_axes, path)
    rows = math.prod(block.shape[:count])
    matrix = block.reshape(rows, math.prod(block.shape[count:]))
    if count != 2 or min(block.shape[:2], default=0) < 2:
        return [(path or "J", matrix, False)]
    images = matrix.reshape(*block.shape[:2], -1)
    total = images.shape[2]
    name = f"{path} " if path else ""
    found = [(f"{name}by entry {k}", images[:, :, k], True) for k in range(min(most, total))]
    if total > most:
        title, image, _ = found[-1]
        found[-1] = (f"{title} of {total}", image, True)
    return found


def _pattern(block: Any, path: str) -> tuple[tuple[int, int], np.ndarray, np.ndarray]:
    """The shape of a block as a matrix, and the rows and columns of its entries."""
    if _is_sparse(block):
        found = block.tocoo()
        return tuple(found.shape), found.row.astype(np.int64), found.col.astype(np.int64)
    values = _dense(block, path)
    count = _output_axes(values.shape, None, path)
    matrix = values.reshape(math.prod(values.shape[:count]), math.prod(values.shape[count:]))
    rows, columns = np.nonzero(matrix)
    return matrix.shape, rows, columns
