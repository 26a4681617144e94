"""Shared by the examples that draw: the command line's ``--output``, and panels in matplotlib, if it is installed."""

import argparse
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

BLUE, ORANGE, GREY = "#2563a8", "#d9622b", "#6b7280"
PAGE, TEXT = 7.5, 8  # inches of a page's width, and points of the least text on it


def parser(description: str, output: str) -> argparse.ArgumentParser:
    """A command line with ``--output``; an example adds what else it takes."""
    made, path = argparse.ArgumentParser(description=description), Path(output)
    kind = "film" if path.suffix == ".gif" else "picture"
    made.add_argument(
        "--output", type=Path, default=path, metavar=f"PATH{path.suffix}", help=f"the {kind} (default: %(default)s)"
    )
    return made


def parse(made: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, once it is clear that the picture can be written where it is wanted."""
    options = made.parse_args(arguments)
    suffix = made.get_default("output").suffix
    if options.output.suffix.lower() != suffix:
        made.error(f"--output must end in {suffix}, not {options.output.name!r}")
    if not options.output.resolve().parent.is_dir():
        made.error(f"--output: there is no folder {options.output.parent}")
    return options


def new_figure(width: float, height: float) -> Any:
    """An empty figure of that many inches; None, after saying what to install, where there is no matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("\nno picture: it needs matplotlib, python -m pip install '.[plot]'")
        return None
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, path: Path) -> None:
    """Write a picture whose text can be read at the width of a page, and whose colours tell signs."""
    make_readable(figure)
    if problems := problems_of(figure):
        raise AssertionError(f"{path}: {'; '.join(problems)}")
    figure.savefig(path, dpi=110)
    print(f"\npicture: {path}")


def make_readable(figure: Any) -> None:
    """Text of at least 8 points where the figure is as wide as a page, in lines no longer than their panels."""
    from matplotlib.axes import Axes

    least = _least(figure)
    for axes in figure.findobj(Axes):  # colour bars, too
        axes.tick_params(labelsize=least)
    for text in _texts(figure):
        text.set_fontsize(max(least, text.get_fontsize()))
    for axes in figure.axes:
        width = 72 * axes.get_window_extent().width / figure.dpi / (0.5 * axes.title.get_fontsize())
        axes.title.set_text("\n".join(textwrap.wrap(axes.get_title(), max(12, int(1.1 * width)))))


def _least(figure: Any) -> float:
    return TEXT * max(1.0, figure.get_figwidth() / PAGE)


def problems_of(figure: Any) -> list[str]:
    """What is wrong with a figure: small text, signed colours that are not symmetric."""
    least = _least(figure) - 1e-9
    found = [
        f"the text {t.get_text()!r} has {t.get_fontsize():.1f} points"
        for t in _texts(figure)
        if t.get_fontsize() < least
    ]
    for axes in figure.axes:
        for image in [*axes.images, *axes.collections]:
            norm, name = image.norm, image.get_cmap().name
            if name.startswith("RdBu") and (name != "RdBu_r" or norm.vmin != -norm.vmax):
                found.append(
                    f"{axes.get_title()!r} has {name} from {norm.vmin} to {norm.vmax}; red is plus, white is 0"
                )
    return found


def _texts(figure: Any) -> list[Any]:
    from matplotlib.text import Text

    figure.canvas.draw()
    return [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]


def draw_motion(
    path: Path, times: np.ndarray, values: np.ndarray, columns: dict[str, np.ndarray], title: str, ylabels: list[str]
) -> None:
    """A motion, and below it its derivative from each of two methods: with and without the times of its events."""
    if (figure := new_figure(7, 5)) is None:
        return
    above, below = figure.subplots(2, sharex=True)
    above.plot(times, values, color=GREY)
    above.set(ylabel=ylabels[0], title=title)
    for (name, column), style, colour in zip(columns.items(), ("-", ":"), (BLUE, ORANGE), strict=True):
        below.plot(times, column, style, color=colour, label=name)
    below.set(xlabel="time", ylabel=ylabels[1])
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    save(figure, path)


def save_film(figure: Any, draw: Callable[[Any, int], None], count: int, path: Path) -> None:
    """A film of frames, each drawn on the only axes of a figure by its number."""
    from matplotlib.animation import FuncAnimation, PillowWriter

    axes = figure.subplots()
    FuncAnimation(figure, lambda n: draw(axes, n), count).save(path, PillowWriter(fps=20), dpi=70)
    print(f"\nfilm: {path}")


def signed_scale(limit: float, linear: float | None = None) -> Any:
    """Colours from -limit to limit; logarithmic beyond ``linear``, where that is given."""
    from matplotlib.colors import Normalize, SymLogNorm

    return Normalize(-limit, limit) if linear is None else SymLogNorm(linear, vmin=-limit, vmax=limit)


def show(
    axes: Any, values: np.ndarray, title: str, scale: Any = None, origin: tuple[int, int] = (0, 0), cmap: str = "RdBu_r"
) -> Any:
    """Draw an image of shape (width, height), y up, its first pixel at ``origin``; the axes count pixels."""
    (x, y), (width, height) = origin, values.shape
    extent = (x - 0.5, x + width - 0.5, y - 0.5, y + height - 0.5)
    drawn = axes.imshow(values.T, origin="lower", extent=extent, norm=scale, cmap=cmap, interpolation="nearest")
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("x (pixels)", fontsize=8)
    axes.set_ylabel("y (pixels)", fontsize=8)
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(integer=True)
    axes.tick_params(labelsize=8, colors=GREY)
    return drawn


def show_matrix(axes: Any, J: np.ndarray, title: str) -> Any:
    """Draw a matrix, row 0 on top; red is plus, white is 0."""
    drawn = show(axes, J.T, title, signed_scale(float(np.abs(J).max())))
    axes.invert_yaxis()
    return drawn


def show_detail(
    axes: Any, values: np.ndarray, title: str, detail: tuple[slice, slice], scale: Any = None, cmap: str = "RdBu_r"
) -> Any:
    """Draw a piece of an image."""
    return show(axes, values[detail], title, scale, (detail[0].start, detail[1].start), cmap)


def frame(axes: Any, detail: tuple[slice, slice]) -> None:
    """Outline a piece of an image."""
    (left, right), (low, high) = ((part.start - 0.5, part.stop - 0.5) for part in detail)
    axes.plot([left, right, right, left, left], [low, low, high, high, low], color=ORANGE)


def color_bar(figure: Any, drawn: Any, axes: Any, label: str) -> None:
    """Add a colour bar, of the panel's height next to a single one; its label says what is drawn and in which unit."""
    is_single = hasattr(axes, "inset_axes")
    place = {"cax": axes.inset_axes((1.04, 0.0, 0.05, 1.0))} if is_single else {"ax": axes, "shrink": 0.8}
    bar = figure.colorbar(drawn, **place)
    bar.set_label(label, fontsize=8)
    if (linear := getattr(drawn.norm, "linthresh", None)) is not None:  # around 0, where labels would overlap
        limit = drawn.norm.vmax  # ticks beyond it would make the bar longer
        bar.set_ticks([tick for tick in bar.get_ticks() if tick == 0 or linear * 1.01 < abs(tick) <= limit])


def convergence(axes: Any, title: str, runs: dict[str, list[np.ndarray]], has_legend: bool = True) -> None:
    """Draw errors by step on a logarithmic axis, orange and blue, one line per run; open markers mean 0."""
    label = "exactly 0"
    for (name, lines), color in zip(runs.items(), (ORANGE, BLUE), strict=True):
        for n, errors in enumerate(lines):
            visible = np.where(errors > 0, errors, np.nan)  # 0 has no place on a logarithmic axis
            axes.semilogy(visible, "o-", color=color, markersize=3, linewidth=1.2, label=None if n else name)
            zeros = np.flatnonzero(np.asarray(errors) == 0)
            if zeros.size:  # at the lower edge, in units of the axes
                where, transform = np.full(zeros.size, 0.03), axes.get_xaxis_transform()
                axes.plot(zeros, where, "v", color=color, mfc="white", markersize=6, transform=transform, label=label)
                label = None
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("Gauss-Newton step", fontsize=9)
    axes.set_ylabel("distance (scene units)", fontsize=9)
    axes.get_xaxis().get_major_locator().set_params(integer=True)
    axes.tick_params(labelsize=8, colors=GREY)
    axes.grid(color="#dde1e7")
    if has_legend:
        axes.legend(fontsize=9)
