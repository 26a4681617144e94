"""The examples of boundary gradients: a sphere's silhouette, discs in front of each other, a triangle's corners."""

import builtins
import struct

import example_programs
import numpy as np
import pytest
from numpy.testing import assert_allclose

silhouette = example_programs.load("silhouette")
silhouette_fits = example_programs.load("silhouette_fits")
occlusion = example_programs.load("occlusion")
triangle = example_programs.load("triangle")
supersampling = example_programs.load("supersampling")

ARGUMENTS = {"triangle": ["--samples", "32"], "voronoi_fit": []}
CHECKS = {"triangle": 4, "voronoi_fit": 2}


@pytest.fixture
def without_matplotlib(monkeypatch):
    original = builtins.__import__

    def find(name, *rest):
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", find)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["triangle", "voronoi_fit"])
def test_example_prints_figures_that_agree_and_draws(name, capsys, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib", reason="the pictures are drawn with matplotlib")
    output = tmp_path / "picture.png"
    printed = example_programs.run(name, capsys, monkeypatch, [*ARGUMENTS[name], "--output", str(output)])
    assert printed.count("  ok  ") == CHECKS[name]
    assert f"picture: {output}" in printed
    data = output.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width >= 1300
    assert height >= 600
    assert len(data) > 40_000  # a page with nothing on it takes less


@pytest.mark.sweep
def test_without_matplotlib_the_figures_are_printed(without_matplotlib, capsys, monkeypatch, tmp_path):
    output = tmp_path / "picture.png"
    printed = example_programs.run("triangle", capsys, monkeypatch, [*ARGUMENTS["triangle"], "--output", str(output)])
    assert printed.count("  ok  ") == CHECKS["triangle"]
    assert ".[plot]" in printed
    assert not output.exists()


@pytest.mark.parametrize(
    "name", ["silhouette", "silhouette_fits", "occlusion", "meshes", "signed_distance", *ARGUMENTS]
)
def test_output_must_be_a_png_in_a_folder_that_exists(name, capsys, tmp_path):
    for output in ("picture.jpg", str(tmp_path / "missing" / "picture.png")):
        with pytest.raises(SystemExit) as caught:
            example_programs.load(name).main(["--output", output])
        assert caught.value.code == 2
        assert "--output" in capsys.readouterr().err


# --- the sphere -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def renderer(ti64):
    return silhouette.Renderer()


def test_the_boundary_term_of_the_closed_form_is_an_integral_along_the_silhouette():
    """Depth times normal velocity along the image of the circle in which the tangents touch, for another sphere, too."""
    for sphere in (silhouette.SPHERE, np.array([25.0, -14.0, 0.0, 90.0])):
        terms = silhouette.boundary_term(sphere)
        for n, k in enumerate((0, 1, 3)):
            h = 1e-4
            outlines = [outline(sphere + sign * h * np.eye(4)[k]) for sign in (1, 0, -1)]
            speed = (outlines[0] - outlines[2]) / (2 * h)
            middle = outlines[1]
            along = (np.roll(middle, -1, axis=0) - np.roll(middle, 1, axis=0)) / 2
            depth = np.sqrt(sphere[1:] @ sphere[1:] - sphere[0] ** 2)
            around = np.sum(speed[:, 0] * along[:, 1] - speed[:, 1] * along[:, 0])
            turns = np.sum(middle[:, 0] * along[:, 1] - middle[:, 1] * along[:, 0])
            assert terms[n] == pytest.approx(depth * around * np.sign(turns), rel=1e-5)


def outline(sphere: np.ndarray, count: int = 4000) -> np.ndarray:
    """The points of the image at which rays touch the sphere."""
    radius, centre = sphere[0], sphere[1:]
    away = np.linalg.norm(centre)
    towards = centre / away
    sideways = np.cross(towards, [0.0, 1.0, 0.0])
    sideways /= np.linalg.norm(sideways)
    angle = np.arange(count)[:, None] * 2 * np.pi / count
    turned = np.cos(angle) * sideways + np.sin(angle) * np.cross(towards, sideways)
    points = centre - radius**2 / away * towards + radius * np.sqrt(1 - (radius / away) ** 2) * turned
    return silhouette.FOCAL * points[:, :2] / points[:, 2:]


@pytest.mark.sweep
def test_every_pixel_of_the_sphere(renderer):
    """By the distance of the centre; the example does it by r.  The silhouette moves by half a pixel at most."""
    k, step = 3, 0.1
    expected = supersampling.differences(renderer.supersample, renderer.sphere, renderer.depth, k, step)
    mean = supersampling.mean_derivative(silhouette.plan(renderer, "both"), renderer.sphere, k, step)
    assert supersampling.relative(mean, expected) < 0.02


@pytest.mark.sweep
def test_fits_from_far_need_the_boundary_term(renderer):
    """Two of the 15 starts; all of them take a minute, and the example's ``--starts 15`` tries them."""
    starts = silhouette_fits.far_starts(15)[[3, 10]]
    for name, is_found in (("both", True), ("autodiff", False)):
        fit = silhouette_fits.Fit(renderer, name)
        nearest = max(1e-10, np.finfo(fit.J.dtype).eps * np.abs(silhouette.SPHERE).max())
        for start in starts:
            errors = fit.run(start)
            assert errors[0] > 15
            assert (errors[-1] < nearest) == is_found
            assert is_found or errors[-1] > 10


def test_blur_keeps_the_sum_inside_and_treats_columns_alike():
    generator = np.random.default_rng(5)
    image = np.zeros((silhouette.WIDTH, silhouette.HEIGHT, 2))
    image[250:400, 200:300] = generator.uniform(size=(150, 100, 2))
    for width in (8, 2):
        both = silhouette_fits.blurred(image, width)
        assert_allclose(both[:, 1], silhouette_fits.blurred(image[..., 1], width)[:, 0], rtol=1e-13)
        assert_allclose(both.sum(0) * (width / 2) ** 2, image.sum((0, 1)), rtol=1e-4)


# --- discs ------------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_occlusion_away_from_crossings_is_nearly_exact(ti64):
    """What is left of the error stems from the pixels that two edges cross."""
    discs = occlusion.Discs()
    discs.samples = 24
    J, expected = occlusion.columns(discs)
    J = J["render"]
    x, y = np.mgrid[: occlusion.WIDTH, : occlusion.HEIGHT]
    a, b = occlusion.CROSSING[:3], occlusion.CROSSING[3:6]
    edges = [
        np.hypot(x - a[0], y - a[1]) - a[2],
        np.hypot(x - b[0], y - b[1]) - b[2],
        (0.6 * (x - b[0]) + 0.3 * (y - b[1]) + 12) / np.hypot(0.6, 0.3),
    ]
    crossed = np.sum([np.abs(level) < 1.5 for level in edges], axis=0) > 1
    assert 5 < crossed.sum() < 120
    for k in range(7):
        assert supersampling.relative(J[..., k], expected[..., k]) < 0.03
        assert supersampling.relative(J[~crossed][:, k], expected[~crossed][:, k]) < 0.015


def test_occlusion_of_one_disc_wholly_before_the_other(ti64):
    """The hidden part of a rim has no derivative, and neither has the depth."""
    discs = occlusion.Discs()
    derivative = occlusion.plan(discs)
    x, y = np.mgrid[: occlusion.WIDTH, : occlusion.HEIGHT]
    for depth, near, far in ((-100.0, 0, 3), (100.0, 3, 0)):
        discs.p[6] = depth
        J = derivative()
        centre_x, centre_y, radius = occlusion.CROSSING[near : near + 3]
        hidden = J[np.hypot(x - centre_x, y - centre_y) < radius - 1][:, far : far + 3]
        assert np.abs(hidden).max() < 1e-12 < np.abs(J[..., far : far + 3]).max()
        assert not J[..., 6].any()


# --- the triangle -----------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_corners_cost_little_and_segments_nothing(ti64):
    """Triangles in many positions against the closed form, and that against differences of the shoelace formula."""
    drawn = triangle.Triangle()
    minimum, segments = (triangle.plan(drawn, name) for name in ("minimum", "segments"))
    generator = np.random.default_rng(2)
    errors = []
    for _ in range(20):
        corners = triangle.CORNERS + generator.uniform(-4, 4, (3, 2))
        expected = triangle.closed_form(corners)
        h = 1e-3
        for n, c in np.ndindex(3, 2):
            ends = [area(moved(corners, n, c, sign * h)) for sign in (1, -1)]
            assert (ends[0] - ends[1]) / (2 * h) == pytest.approx(expected[n, c], rel=1e-8)
        drawn.corners.from_numpy(corners)
        assert_allclose(segments().sum((0, 1)), expected, rtol=1e-10)
        errors.append(np.linalg.norm(minimum().sum((0, 1)) - expected, axis=1))
    assert np.median(errors) < 0.05
    assert np.max(errors) < 0.2


def moved(corners: np.ndarray, n: int, c: int, by: float) -> np.ndarray:
    result = corners.copy()
    result[n, c] += by
    return result


def area(corners: np.ndarray) -> float:
    x, y = corners.T
    return 0.5 * float(np.sum(x * np.roll(y, -1) - np.roll(x, -1) * y))
