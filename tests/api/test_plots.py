"""Pictures of J: what is drawn where, and what is refused."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import taichi as ti
from kernel_texts import kernel_of
from numpy.testing import assert_allclose, assert_array_equal
from taichi_program import share_program

from taichi_ext import InvalidArgumentError, Jacobian, least_squares, plot_fit, plot_jacobian, plot_sparsity


@pytest.fixture(autouse=True)
def pyplot():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    yield plt
    plt.close("all")


def pictures(figure):
    """The titles and numbers of what is drawn, without the bars of colours."""
    return {a.get_title(): np.asarray(a.images[0].get_array()) for a in figure.axes if a.images and a.get_title()}


@pytest.fixture
def scene():
    """Two outputs, an image of vectors and a list, and two params: points in the plane and a number."""
    share_program(default_fp=ti.f64)
    image, points = ti.Vector.field(3, ti.f64, shape=(12, 9)), ti.Vector.field(2, ti.f64, shape=2)
    scale, sums = ti.field(ti.f64, shape=()), ti.field(ti.f64, shape=5)

    @ti.kernel
    def draw():
        for i, j in image:
            image[i, j] = scale[None] * ti.Vector([points[0].x * i, points[1].y * j, points[0].y])
        for i in sums:
            sums[i] = scale[None] * points[1].x * i

    points.fill(2.0), scale.fill(3.0)
    plan = Jacobian(draw, {"points": points, "scale": scale}, [image, sums])
    return plan, plan(), {"points": points, "scale": scale}, [image, sums]


@pytest.mark.sweep
def test_images_have_a_row_for_each_component_and_a_column_for_each_entry(scene):
    plan, J, params, outputs = scene
    figure = plot_jacobian(J, plan, units="m")
    found = pictures(figure)
    entries = ["points[0].x", "points[0].y", "points[1].x", "points[1].y"]
    wanted = [f"∂image.{c} / ∂{e}" for c in "xyz" for e in entries]
    assert [t for t in found if t.startswith("∂image") and "points" in t] == wanted
    for c, e in np.ndindex(3, 4):
        assert_array_equal(found[wanted[4 * c + e]], J[0]["points"].reshape(12, 9, 3, 4)[:, :, c, e].T)
    assert_array_equal(found["∂image.y / ∂scale"], J[0]["scale"][..., 1].T)
    assert_array_equal(found["∂sums / ∂points"], J[1]["points"].reshape(5, 4))
    matrix = next(a for a in figure.axes if a.get_title() == "∂sums / ∂points")
    assert [t.get_text() for t in matrix.get_xticklabels()] == entries
    assert [t.get_text() for t in matrix.get_yticklabels()] == [f"sums[{i}]" for i in range(5)]
    assert all(i.get_interpolation() == "nearest" for a in figure.axes if a.get_title() for i in a.images)
    bars = [inner for a in figure.axes for inner in a.child_axes]
    assert {a.get_ylabel() for a in bars} == {"m"}
    figure.draw_without_rendering()
    for a in figure.axes:
        for bar in a.child_axes:  # is as high as its panel
            assert_allclose(bar.get_window_extent().height, a.get_window_extent().height)


def test_params_of_another_jacobian(scene):
    plan, J, params, outputs = scene
    with pytest.raises(InvalidArgumentError, match="J has 2 blocks; 2 outputs and 2 params have 4"):
        plot_jacobian(J[0], plan)
    with pytest.raises(
        InvalidArgumentError, match=r"J\[0\]\['points'\] has shape \(5, 2, 2\); for image and points it is"
    ):
        plot_jacobian(J[::-1], plan)
    with pytest.raises(InvalidArgumentError, match="plan is 3; expected the Jacobian"):
        plot_jacobian(J, 3)
    with pytest.raises(InvalidArgumentError, match="units is .* one for each of J's 4 blocks"):
        plot_jacobian(J, plan, units=["m"])


def test_an_array_alone_does_not_tell_its_axes():
    for shape in [(400, 3, 2, 3, 2), (96, 72, 3, 5, 3), (50, 50, 3)]:
        for plot in (plot_jacobian, plot_sparsity):
            with pytest.raises(InvalidArgumentError, match="does not say which axes belong to the output"):
                plot(np.ones(shape))
    figure = plot_jacobian(np.ones((50, 50, 3)), output_axes=1)  # 50 outputs by 50 points
    assert len(pictures(figure)) == 1


def test_images():
    J = np.random.default_rng(0).standard_normal((12, 9, 3))
    J[2, 3, 1] = np.nan
    found = pictures(plot_jacobian({"pose": J, "light": J[..., 0]}, output_axes=2))
    assert list(found)[2:] == ["∂output['pose'] / ∂parameter[2]", "∂output['light'] / ∂parameter"]
    assert_array_equal(found["∂output['pose'] / ∂parameter[1]"], J[..., 1].T)
    assert_array_equal(found["∂output['light'] / ∂parameter"], J[..., 0].T)


def test_only_some_images():
    found = list(pictures(plot_jacobian(np.ones((8, 8, 2, 5)), columns=3, output_axes=2)))
    assert found[0] == "∂output / ∂parameter[0, 0]"
    assert found[2:] == ["∂output / ∂parameter[0, 2]\n(3 of 10 entries)"]


def test_pyplot_keeps_no_figure(pyplot):
    for _ in range(21):
        plot_jacobian(np.eye(2))
    assert pyplot.get_fignums() == []


def test_a_notebook_shows_the_figure_whether_or_not_pyplot_was_used():
    assert plot_jacobian(np.eye(2))._repr_png_()[:8] == b"\x89PNG\r\n\x1a\n"


def test_sparsity():
    sparse = pytest.importorskip("scipy.sparse")
    rows, columns = np.array([0, 1, 1999]), np.array([5, 0, 3999])
    J = sparse.csr_array((np.array([1.0, 0.0, 2.0]), (rows, columns)), shape=(2000, 4000))
    found = pictures(plot_sparsity([[J, np.eye(3)]]))
    large, small = found.values()
    assert list(found)[0] == "[0][0]: 2000 x 4000, 3 entries (3.75e-05 %)"
    assert large.shape == (512, 512)
    assert large.sum() == 2  # the first two lie in one pixel
    assert_array_equal(small, np.eye(3))
    assert_array_equal(pictures(plot_jacobian(J[:3, :6]))["J"][0], [0, 0, 0, 0, 0, 1.0])


def test_bad_input():
    for J, words in [("J", "J is 'J'; expected an array"), ([], "J is empty"), ([[1.0], "a"], r"J\[1\] is 'a'")]:
        with pytest.raises(InvalidArgumentError, match=words):
            plot_jacobian(J)
        with pytest.raises(InvalidArgumentError, match=words):
            plot_sparsity(J)
    with pytest.raises(InvalidArgumentError, match="J is 3, a plain number; expected a result of jacobian"):
        plot_jacobian(3)
    with pytest.raises(InvalidArgumentError, match="columns is 0"):
        plot_jacobian(np.eye(2), columns=0)
    with pytest.raises(InvalidArgumentError, match="output_axes is 3, and J has shape"):
        plot_jacobian(np.eye(2), output_axes=3)


def test_sparse_block_that_is_too_large_to_be_drawn_entry_by_entry():
    sparse = pytest.importorskip("scipy.sparse")
    large = sparse.coo_array(([1.0], ([7], [9])), shape=(200000, 300000))
    with pytest.raises(InvalidArgumentError, match=r"J\[0\] has shape \(200000, 300000\), too large .* plot_sparsity"):
        plot_jacobian([large])
    assert "200000 x 300000, 1 entries" in plot_sparsity([large]).axes[0].get_title()


def test_matplotlib_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for plot in (plot_jacobian, plot_sparsity):
        with pytest.raises(ImportError, match=r"plot_\w+ needs matplotlib.*\.\[plot\]"):
            plot(np.eye(2))


def test_a_fit_is_drawn():
    """The costs as they were, rejected steps marked, residuals counted, and correlations of a line: -sqrt(3) / 2."""
    share_program(default_fp=ti.f64)
    line, angle, r = ti.field(ti.f64, shape=2), ti.field(ti.f64, shape=1), ti.field(ti.f64, shape=64)
    straight = kernel_of("for i in r: r[i] = line[0] + line[1] * i - ti.sin(12.9 * i)", r=r, line=line)

    @ti.kernel
    def overshoot():  # Newton's steps from 3 on go farther and farther
        for i in r:
            r[i] = ti.atan2(angle[0], 1.0) - 0.01 * ti.sin(1.0 * i)

    figure = plot_fit(least_squares(straight, line, r))
    history, residuals, correlations = figure.axes[:3]
    assert history.get_yscale() == "log"
    counts = [patch.get_height() * patch.get_width() for patch in residuals.patches]
    assert len(counts) == 8
    assert_allclose(sum(counts), 1.0)
    i = np.arange(64)
    wanted = -i.sum() / np.sqrt(64 * (i * i).sum())
    assert_allclose(correlations.images[0].get_array(), [[1, wanted], [wanted, 1]], rtol=1e-12)
    assert [text.get_text() for text in correlations.get_yticklabels()] == ["line[0]", "line[1]"]
    assert style().problems_of(figure) == []
    angle[0] = 3.0
    result = least_squares(overshoot, angle, r)
    drawn = plot_fit(result).axes
    assert len(drawn) == 2  # one parameter has no correlations
    costs, rejected = (curve.get_data() for curve in drawn[0].lines)
    assert_array_equal(costs, [[h.number for h in result.history], [h.cost for h in result.history]])
    assert_array_equal(rejected[0], [h.number for h in result.history[1:] if h.change <= 0])
    assert len(rejected[0]) > 0
    with pytest.raises(InvalidArgumentError, match="result is 3; expected a result of least_squares"):
        plot_fit(3)


def style():
    """The module that examples draw with."""
    path = Path(__file__).parents[2] / "examples" / "plotting.py"
    spec = importlib.util.spec_from_file_location("plotting", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_plots_can_be_read_and_do_not_lie():
    draw = style()
    image = plot_jacobian(np.random.default_rng(0).normal(size=(12, 9, 11)), output_axes=2, units="m / s")
    matrix = plot_jacobian(np.arange(-6.0, 6.0).reshape(3, 4))
    for figure in (image, matrix, plot_sparsity([np.eye(4), np.ones((4, 2))])):
        assert draw.problems_of(figure) == []
        assert figure.get_figwidth() <= draw.PAGE
    assert [axes.get_subplotspec().rowspan.start for axes in image.axes] == [0] * 4 + [1] * 4
    rows = matrix.axes[0].images[0]
    assert rows.origin == "upper" and rows.get_clim() == (-6, 6)
    assert rows.to_rgba(6.0)[0] > rows.to_rgba(6.0)[2] and min(rows.to_rgba(0.0)) > 0.96


def test_a_picture_with_small_text_or_reversed_signs_is_found():
    draw = style()
    figure = draw.new_figure(15, 4)
    left, right = figure.subplots(1, 2)
    left.imshow(np.eye(3), cmap="RdBu", vmin=-1, vmax=1)
    right.imshow(np.eye(3), cmap="RdBu_r", vmin=-1, vmax=2)
    right.set_title("small", fontsize=9)
    problems = "\n".join(draw.problems_of(figure))
    assert "RdBu from" in problems and "from -1.0 to 2.0" in problems and "'small' has 9.0 points" in problems
    draw.make_readable(figure)
    assert "points" not in "\n".join(draw.problems_of(figure))
