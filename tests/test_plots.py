"""Pictures of J: what is drawn where, and what is refused."""

import sys

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from taichi_ext import InvalidArgumentError, plot_jacobian, plot_sparsity


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


def test_images():
    J = np.random.default_rng(0).standard_normal((12, 9, 3))
    J[2, 3, 1] = np.nan
    found = pictures(plot_jacobian({"pose": J, "light": J[..., 0]}))
    assert list(found) == ["['pose'] by entry 0", "['pose'] by entry 1", "['pose'] by entry 2", "['light']"]
    assert_array_equal(found["['pose'] by entry 2"], J[..., 2].T)
    assert_array_equal(found["['light']"], J[..., 0])


def test_only_some_images():
    found = pictures(plot_jacobian(np.ones((8, 8, 2, 5)), columns=3))
    assert list(found) == ["by entry 0", "by entry 1", "by entry 2 of 10"]


def test_matrices():
    J = np.arange(24.0).reshape(4, 3, 2)
    (found,) = pictures(plot_jacobian(J)).values()
    assert_array_equal(found, J.reshape(4, 6))
    (found,) = pictures(plot_jacobian(np.float32(2.0))).values()
    assert_array_equal(found, [[2.0]])
    assert len(pictures(plot_jacobian(J, output_axes=2))) == 2


def test_figure_is_saved(tmp_path):
    plot_jacobian([np.zeros((9, 9, 2)), np.eye(3)]).savefig(tmp_path / "J.png")
    assert (tmp_path / "J.png").stat().st_size > 1000


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
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    for plot in (plot_jacobian, plot_sparsity):
        with pytest.raises(ImportError, match=r"plot_\w+ needs matplotlib.*taichi-ext\[plot\]"):
            plot(np.eye(2))
