"""``plot_jacobian`` and ``plot_sparsity``: J as pictures, a row for each of its blocks; ``plot_fit``."""

# Arrays are of any shape and type here, which pyright takes for unknown.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# The problem of a result is private to the package, not to its module.
# pyright: reportPrivateUsage=false
# Input is checked, whatever its annotation says.
# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

import functools
import io
import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.api.inputs.arguments import KernelCall, Target, flatten
from taichi_ext.api.inputs.options import check_count
from taichi_ext.api.jacobian import real_array
from taichi_ext.api.plans.plan import Jacobian
from taichi_ext.checks.differences import entry_text
from taichi_ext.errors import InvalidArgumentError, unexpected, with_short_traceback
from taichi_ext.labels import Labels
from taichi_ext.solvers.operator import required
from taichi_ext.solvers.results import LeastSquaresResult

_LEAST_IMAGE = 8  # entries of both axes of an output, from which on it is drawn as an image
_MOST_PIXELS = 512  # of a side of a pattern
_MOST_COLUMNS = 8  # images of one block
MOST_NAMES = 16  # entries of an axis that are named one by one
_ACROSS = 4  # images next to each other
PAGE = 7.5  # inches, the width of a page, where text has at least TEXT points
TEXT = 8
_MOST_ENTRIES = 2**26  # of a sparse block that is drawn entry by entry


@with_short_traceback
def plot_jacobian(
    J: object,
    plan: object = None,
    *,
    output_axes: int | None = None,
    columns: int = _MOST_COLUMNS,
    units: object = None,
) -> Any:
    """Draw a Jacobian: a row of pictures for each pair of output and parameter, red above and blue below zero.

    An output with two axes of at least 8 entries each is drawn as images: one column for each entry of the parameter,
    and one row for each component of the output.  Any other block is drawn as a matrix, with a row for each entry of
    the output and a column for each entry of the parameter.  Entries that are not finite are left blank.

    An array does not say which of its axes belong to the output.  Give the Jacobian that computed it, or how many they
    are.  Without these, arrays with up to two axes are drawn as they are, and arrays with more raise an error.

    Args:
        J: the result of ``jacobian``: an array or tensor, a sparse array, or a structure of those.
        plan: the ``Jacobian`` that computed J.
        output_axes: instead of ``plan``, how many axes of each block belong to the output.
        columns: the largest number of images drawn for a block, in each direction.
        units: the unit of the entries of J, a text for the colour bars; or a structure of texts like that of J.

    Returns:
        The matplotlib figure, which pyplot does not keep: ``figure.savefig("J.png")``; a notebook shows it as the value
        of a cell.

    Raises:
        ImportError: matplotlib is not installed (the extra ``plot``).
        InvalidArgumentError: J is none of this plan, or an option is invalid.

    Example:
        >>> import numpy as np
        >>> from taichi_ext import plot_jacobian
        >>> figure = plot_jacobian(np.ones((32, 24, 4)), output_axes=2)
        >>> [axes.get_title() for axes in figure.axes[:2]]
        ['∂output / ∂parameter[0]', '∂output / ∂parameter[1]']
    """
    figure = new_figure("plot_jacobian")
    check_count("columns", columns, least=1)
    blocks = blocks_of(J, plan, output_axes)
    texts = _units(units, blocks)
    drawn = [_pictures(block, _dense(block), columns) for block in blocks]
    width = max(len(row) for rows in drawn for row in rows)
    height = sum(map(len, drawn))
    size = PAGE if width > 2 else 2.0 + 2.6 * width
    tall = max(p.shape[1] / p.shape[0] if is_image else 1.0 for rows in drawn for row in rows for _, p, is_image in row)
    figure.set_size_inches(size, 2.8 * height if width < 3 else (0.6 + tall * size / width) * height)
    grid, at = figure.add_gridspec(height, width), 0
    for block, rows, unit in zip(blocks, drawn, texts, strict=True):
        finite = [np.abs(p[np.isfinite(p)]).max(initial=0.0) for row in rows for _, p, _ in row]
        colours = {"cmap": "RdBu_r", "vmin": -(max(finite) or 1.0), "vmax": max(finite) or 1.0}
        for row in rows:
            for k, (title, picture, is_image) in enumerate(row):
                axes = figure.add_subplot(grid[at, k if len(row) > 1 else slice(None) if not is_image else 0])
                # images as Taichi shows them: the first index to the right, the second one up
                layout = {"origin": "lower", "aspect": "equal"} if is_image else {"aspect": "auto"}
                shown = picture.T if is_image else picture
                image = axes.imshow(shown, **layout, **colours, interpolation="nearest")
                axes.set_title(title, fontsize=TEXT)
                if is_image:
                    axes.set_axis_off()
                else:
                    _label(axes, block)
                if k == len(row) - 1:
                    bar = figure.colorbar(image, cax=axes.inset_axes((1.04, 0.0, 0.05, 1.0)))
                    bar.set_label(unit, fontsize=TEXT)
                    bar.ax.tick_params(labelsize=TEXT)
            at += 1
    return figure


@with_short_traceback
def plot_sparsity(J: object, plan: object = None, *, output_axes: int | None = None) -> Any:
    """Draw which entries of a Jacobian are not zero: a picture for each pair of output and parameter.

    Rows are the entries of the output, columns those of the parameter, both in C order; of a sparse array, all stored
    entries count.  A block larger than 512 x 512 is drawn coarser: a pixel is filled if anything in it is.

    Args:
        J: the result of ``jacobian``: an array or tensor, a sparse array, or a structure of those.
        plan: as for ``plot_jacobian``: a dense array of more than two axes needs one of these two.
        output_axes: likewise.

    Returns:
        The matplotlib figure; the title of each picture has the shape and the number of entries.

    Raises:
        ImportError: matplotlib is not installed (the extra ``plot``).
        InvalidArgumentError: J is none of this plan.

    Example:
        >>> import numpy as np
        >>> from taichi_ext import plot_sparsity
        >>> figure = plot_sparsity([np.eye(4), np.ones((4, 2))])
        >>> figure.axes[0].get_title()
        '[0]: 4 x 4, 4 entries (25 %)'
    """
    figure = new_figure("plot_sparsity")
    blocks = blocks_of(J, plan, output_axes)
    across = math.ceil(math.sqrt(len(blocks)))
    down = math.ceil(len(blocks) / across)
    size = min(PAGE, 4.0 * across)
    figure.set_size_inches(size, size / across * down)
    for n, block in enumerate(blocks):
        height, width = block.matrix_shape
        rows, columns = _pattern(block)
        axes = figure.add_subplot(down, across, n + 1)
        size = (min(height, _MOST_PIXELS), min(width, _MOST_PIXELS))
        picture = np.zeros(size, bool)
        picture[rows * size[0] // max(1, height), columns * size[1] // max(1, width)] = True
        extent = (-0.5, width - 0.5, height - 0.5, -0.5)
        axes.imshow(picture, cmap="binary", vmin=0, vmax=1, aspect="auto", extent=extent, interpolation="nearest")
        share = 100 * len(rows) / max(1, height * width)
        name = f"{block.title}: " if block.path or block.output else ""
        axes.set_title(f"{name}{height} x {width}, {len(rows)} entries ({share:.3g} %)", fontsize=TEXT)
        _label(axes, block)
    return figure


def new_figure(user: str) -> Any:
    """A figure that pyplot does not manage: it is not shown twice in a notebook, and freed when it is dropped."""
    figure = required("matplotlib.figure", user).Figure(layout="constrained")
    figure._repr_png_ = functools.partial(_png, figure)  # for notebooks without pyplot
    return figure


def _png(figure: Any) -> bytes:
    """The picture of a figure."""
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()


def _units(units: object, blocks: list[BlockPicture]) -> list[str]:
    named = [("", units or "")] * len(blocks) if units is None or isinstance(units, str) else flatten(units, "units")[0]
    if len(named) != len(blocks) or not all(isinstance(unit, str) for _, unit in named):
        raise unexpected("units", units, f"a text, or one for each of J's {len(blocks)} blocks")
    return [unit for _, unit in named]


def _label(axes: Any, block: BlockPicture) -> None:
    """Name the entries of a matrix as the user does; an axis with many has the name of the output or parameter."""
    if block.output is None or block.param is None:
        count = min(2, len(_shape_of(block.values)))
        numbered = [*(f"axis {n}" for n in reversed(range(count))), "", ""]
        names = ["parameter", "output"] if _is_sparse(block.values) else numbered
        axes.set_xlabel(names[0], fontsize=TEXT)
        axes.set_ylabel(names[1], fontsize=TEXT)
        axes.tick_params(labelsize=TEXT)
        return
    for axis, side in ((axes.xaxis, block.param), (axes.yaxis, block.output)):
        count = math.prod(side.full_shape)
        if 1 < count <= MOST_NAMES:
            axis.set_ticks(range(count), [side.entry(k) for k in range(count)], fontsize=TEXT)
        else:
            axis.set_label_text(f"entries of {side.name}" if count > 1 else side.entry(0), fontsize=TEXT)
            axis.set_tick_params(labelsize=TEXT)
            if count > 1:
                axis.get_major_locator().set_params(integer=True)
            else:
                axis.set_ticks([])
    if 1 < math.prod(block.param.full_shape) <= MOST_NAMES:
        axes.tick_params(axis="x", rotation=90)


def _is_sparse(block: object) -> bool:
    return hasattr(block, "tocoo")


def _dense(block: BlockPicture) -> np.ndarray:
    """A block as a NumPy matrix of real numbers."""
    path, values = block.path, block.values
    if _is_sparse(values) and math.prod(values.shape) > _MOST_ENTRIES:
        raise InvalidArgumentError(
            f"J{path} has shape {tuple(values.shape)}, too large to be drawn entry by entry; use plot_sparsity."
        )
    values = values.toarray() if _is_sparse(values) else values
    values = values.to_dense() if hasattr(values, "to_dense") else values
    return real_array(values, f"J{path}").astype(np.float64).reshape(block.matrix_shape)


def _pictures(block: BlockPicture, matrix: np.ndarray, most: int) -> list[list[tuple[str, np.ndarray, bool]]]:
    """The pictures of a block, in rows: title, numbers, and whether it is an image of the output."""
    output, param = block.output, block.param
    if output is None or param is None or len(output.shape) != 2 or min(output.shape) < _LEAST_IMAGE:
        return [[(block.title, matrix, False)]]
    components: list[tuple[int, ...]] = list(np.ndindex(*output.element))
    images = matrix.reshape(*output.shape, len(components), -1)
    total = images.shape[3]
    rows: list[list[tuple[str, np.ndarray, bool]]] = []
    for c, index in enumerate(components[:most]):
        name = f"∂{output.name}{output.component(index)}"
        more = f"\n({most} of {total} entries)" if total > most else ""
        titles = [f"{name} / ∂{param.entry(k)}" for k in range(min(most, total))]
        titles[-1] += more
        row = [(title, images[:, :, c, k], True) for k, title in enumerate(titles)]
        rows += [row[k : k + _ACROSS] for k in range(0, len(row), _ACROSS)]
    return rows


def _pattern(block: BlockPicture) -> tuple[np.ndarray, np.ndarray]:
    """The rows and columns of the entries of a block as a matrix."""
    if _is_sparse(block.values):
        entries = block.values.tocoo()
        return entries.row.astype(np.int64), entries.col.astype(np.int64)
    rows, columns = np.nonzero(_dense(block))
    return rows, columns


# ``plot_fit``: the progress of a fit, and its remaining residuals.

_MOST_BINS = 60
_MOST_PARAMS = 32  # whose correlations are drawn


@with_short_traceback
def plot_fit(result: LeastSquaresResult) -> Any:
    """Draw a fit: its cost after each iteration, its residuals, and the correlations of up to 32 parameters.

    Steps that were rejected are marked.  The curve over the residuals is the normal distribution of their standard
    deviation, ``sqrt(2 * cost / (M - P))``: where residuals are far beyond, a robust loss may help.  Correlations near
    1 or -1 are of parameters that the residuals hardly tell apart; the panel is left out where they cannot.

    Args:
        result: of ``least_squares``; with shards, it has no residuals.

    Returns:
        The matplotlib figure, which pyplot does not keep: ``figure.savefig("fit.png")``.

    Raises:
        ImportError: matplotlib is not installed (the extra ``plot``).
        InvalidArgumentError: ``result`` is none of ``least_squares``.

    Example:
        >>> from taichi_ext import plot_fit
        >>> def save(result):  # of least_squares
        ...     plot_fit(result).savefig("fit.png")
    """
    if not isinstance(result, LeastSquaresResult):
        raise unexpected("result", result, "a result of least_squares")
    figure = new_figure("plot_fit")
    panels = [_draw_history]
    if result.fun is not None:
        panels.append(_draw_residuals)
    correlations = _correlations(result)
    count = len(panels) + (correlations is not None)
    figure.set_size_inches(min(PAGE, 4.5 * count), 3.6 if count < 3 else 6.4)
    every = figure.subplots(1 if count < 3 else 2, min(count, 2), squeeze=False).ravel()
    for draw, axes in zip(panels, every, strict=False):
        draw(axes, result)
    if correlations is not None:
        image = every[count - 1].imshow(correlations, cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
        every[count - 1].set_title("correlations of the parameters")
        names, every_few = _names(result), 1 + (len(result.grad) - 1) // MOST_NAMES
        for axis in (every[count - 1].xaxis, every[count - 1].yaxis):
            axis.set_ticks(range(len(names))[::every_few], names[::every_few], fontsize=TEXT)
        every[count - 1].tick_params(axis="x", rotation=90)
        figure.colorbar(image, ax=every[count - 1])
    for axes in every[count:]:
        axes.remove()
    return figure


def _draw_history(axes: Any, result: LeastSquaresResult) -> None:
    numbers, costs = (np.array([getattr(line, name) for line in result.history]) for name in ("number", "cost"))
    rejected = [line.number > 0 and not line.change > 0 for line in result.history]
    axes.plot(numbers, costs, "o-", markersize=3, label="cost")
    if any(rejected):
        axes.plot(numbers[rejected], costs[rejected], "x", color="C3", label="rejected step")
        axes.legend(fontsize=TEXT)
    if (costs > 0).all():
        axes.set_yscale("log")
    axes.get_xaxis().get_major_locator().set_params(integer=True)
    axes.set(title=f"cost {result.cost:.4g}", xlabel="iteration", ylabel="cost")


def _draw_residuals(axes: Any, result: LeastSquaresResult) -> None:
    residuals = np.asarray(result.fun)
    free = len(residuals) - len(result.grad)
    bins = min(_MOST_BINS, max(5, round(math.sqrt(len(residuals)))))
    axes.hist(residuals, bins=bins, density=True)
    sigma = math.sqrt(2 * result.cost / free) if free > 0 else 0.0
    if sigma > 0:
        at = np.linspace(-4 * sigma, 4 * sigma, 200)
        axes.plot(at, np.exp(-0.5 * (at / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi)), color="C1")
    axes.set(title=f"{len(residuals)} residuals\nstandard deviation {sigma:.3g}", xlabel="residual", ylabel="density")


def _names(result: LeastSquaresResult) -> list[str]:
    """The numbers of the params, or the local coordinates of points of manifolds, as users name them."""
    problem, names = result._problem, []
    for n, (leaf, shape, part) in enumerate(zip(problem.params, problem.shapes, problem.parts, strict=True)):
        side = Side(leaf, shape) if isinstance(leaf, str) else _side_of(leaf, Labels().name(leaf) or f"params[{n}]")
        is_local = math.prod(part.shape) != math.prod(shape)
        names += [f"{side.name}, {k}" if is_local else side.entry(k) for k in range(math.prod(part.shape))]
    return names


def _correlations(result: LeastSquaresResult) -> np.ndarray | None:
    if not 1 < len(result.grad) <= _MOST_PARAMS:
        return None
    try:
        covariance = result.covariance(variance=1.0)
    except InvalidArgumentError:  # the residuals do not determine all parameters
        return None
    errors = np.sqrt(covariance.diagonal())
    return covariance / errors / errors[:, None]


# Which axes of a block of J belong to its output and which to its parameter, and how users call their entries.

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Side:
    """An output or parameter: its name, the shape of its field or array, and that of an element."""

    name: str
    shape: Shape = ()
    element: Shape = ()

    @property
    def full_shape(self) -> Shape:
        return self.shape + self.element

    def entry(self, number: int) -> str:
        """The name of an entry, by its number in C order: ``x[1].y``."""
        index = tuple([int(i) for i in np.unravel_index(number, self.full_shape)])
        count = len(self.shape)
        return f"{self.name}{entry_text(index[:count])}{self.component(index[count:])}"

    def component(self, index: tuple[int, ...]) -> str:
        """The suffix for the name of an element: ``.y``, ``[1, 2]``."""
        if len(index) == 1 and self.element[0] <= len("xyzw"):
            return f".{'xyzw'[index[0]]}"
        return entry_text(index)


@dataclass(frozen=True)
class BlockPicture:
    """One block of J, a matrix with a row for each entry of ``output`` and a column for each entry of ``param``."""

    path: str
    values: Any  # the block as it is given
    output: Side | None  # its output; None if it is unknown, as for an array alone, which is then drawn unchanged
    param: Side | None  # its parameter; likewise

    @property
    def title(self) -> str:
        return f"∂{self.output.name} / ∂{self.param.name}" if self.output and self.param else self.path or "J"

    @property
    def matrix_shape(self) -> tuple[int, int]:
        if self.output is None or self.param is None:
            rows, columns = (1, 1, *_shape_of(self.values))[-2:]
            return rows, columns
        return math.prod(self.output.full_shape), math.prod(self.param.full_shape)


def blocks_of(J: object, plan: object, output_axes: int | None) -> list[BlockPicture]:
    """The blocks of J with their axes; raises where they cannot be told."""
    if output_axes is not None and (not isinstance(output_axes, int) or output_axes < 0):
        raise unexpected("output_axes", output_axes, "a whole number of axes, or None")
    if plan is not None and not isinstance(plan, Jacobian):
        raise unexpected("plan", plan, "the Jacobian(kernel, params, outputs) of J")
    if type(J) in (bool, int, float, complex):
        raise InvalidArgumentError(f"J is {J}, a plain number; expected a result of jacobian.")
    blocks = flatten(J, "J")[0]
    if not blocks:
        raise InvalidArgumentError("J is empty; give a result of jacobian.")
    if plan is None:
        return [_unnamed(path, values, output_axes) for path, values in blocks]
    call, prepared = plan._last_call(), plan._plan.prepared
    down, across = ([_side_of_target(call, call.current(t)) for t in ts] for ts in (prepared.outputs, prepared.params))
    if len(across) * len(down) != len(blocks):
        raise InvalidArgumentError(
            f"J has {len(blocks)} blocks; {len(down)} outputs and {len(across)} params have {len(across) * len(down)}."
        )
    pairs = itertools.product(down, across)
    return [_named(path, values, o, p) for (path, values), (o, p) in zip(blocks, pairs, strict=True)]


def _side_of_target(call: KernelCall, target: Target) -> Side:
    if target.kind == "return":
        return Side("returned", (), call.return_shape())
    if call.is_value(target):
        return Side(target.argument, (), call.value_shape(target))
    obj = call.value(target)
    return _side_of(obj, target.argument or call.labels.name(obj) or str(target.name).split(" (")[0])


def _side_of(obj: Any, name: str) -> Side:
    full = backend.full_field_shape(obj) if isinstance(obj, backend.Field) else backend.full_shape(obj)
    shape = tuple(obj.shape)
    return Side(name, shape, tuple(full)[len(shape) :])


def _unnamed(path: str, values: Any, output_axes: int | None) -> BlockPicture:
    """A block of which at most the number of axes of its output is known."""
    shape = _shape_of(values)
    if output_axes is None and len(shape) > 2:
        raise InvalidArgumentError(
            f"J{path} has shape {shape}, which does not say which axes belong to the output. Give plan= (the "
            "Jacobian that computed J), or output_axes=."
        )
    if output_axes is None:
        return BlockPicture(path, values, None, None)
    if output_axes > len(shape):
        raise InvalidArgumentError(f"output_axes is {output_axes}, and J{path} has shape {shape}.")
    output, param = Side(f"output{path}", shape[:output_axes]), Side("parameter", shape[output_axes:])
    return BlockPicture(path, values, output, param)


def _named(path: str, values: Any, output: Side, param: Side) -> BlockPicture:
    """A block whose output and parameter are known."""
    shape, wanted = _shape_of(values), output.full_shape + param.full_shape
    is_sparse = getattr(values, "is_sparse", False) or getattr(values, "is_sparse_csr", False)
    if _is_sparse(values) or is_sparse:
        wanted = (math.prod(output.full_shape), math.prod(param.full_shape))
    if shape != wanted:
        raise InvalidArgumentError(f"J{path} has shape {shape}; for {output.name} and {param.name} it is {wanted}.")
    return BlockPicture(path, values, output, param)


def _shape_of(values: Any) -> Shape:
    return tuple(values.shape) if hasattr(values, "shape") else np.shape(values)
