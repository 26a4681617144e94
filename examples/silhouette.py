"""A sphere's depth image: what autodiff misses at the silhouette, and fits that converge with the added boundary term.

The derivative of the image has two terms: the one inside the sphere, which differentiating the renderer gives, and the
one along its silhouette, where the depth jumps to 0.  The first alone has the wrong sign in two of three columns of the
image's sum.  Gauss-Newton with it runs away from a start that is 0.16 off; with both terms it converges from far, the
residual and its Jacobian being blurred together, less and less.

    python examples/silhouette.py [--starts 4] [--samples 16] [--output silhouette.png]

The picture needs ``python -m pip install '.[plot]'``; the figures are printed without it.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import plotting
import taichi as ti
from compare import Comparison
from supersampling import differences, mean_derivative, relative

from taichi_ext import Jacobian, edge, sqrt_edge

WIDTH, HEIGHT, FOCAL = 640, 480, 400.0
SPHERE = np.array([40.0, 10.0, 10.0, 100.0])  # radius, centre
NEAR = SPHERE + np.array([0.1, 0.05, -0.05, 0.1])
LOWEST, HIGHEST = np.array([25.0, -30.0, -30.0, 80.0]), np.array([60.0, 50.0, 50.0, 140.0])  # of the far starts
BLURS = (32, 16, 8, 4, 2, 1)  # standard deviations in pixels; 1 is the image as it is
STEPS = 10  # at most, for each blur
FOUND, LOST = 1e-6, 1e4  # distances from the true parameters

# Derivatives of the sum of the image by r, cx and cz; that by cy is the one by cx.
EXACT_INTERIOR = [-205754.925, 7645.788, 149522.616]
EXACT_BOUNDARY = [535756.338, 10446.502, -216391.836]
EXACT = [330001.413, 18092.290, -66869.220]
AUTODIFF = [-204408.90, 7207.58, 149061.94]
CHORD = [331345.44, 17659.33, -67329.37]
BOTH = [330019.68, 18097.68, -66875.45]
SUPERSAMPLED = [330004.90, 18097.67, -66872.05]  # 16 x 16 samples, step 0.5

DETAIL = (slice(476, 512), slice(385, 412))  # a piece of the silhouette, for the picture
DETAIL_STEP = 0.1


@ti.data_oriented
class Renderer:
    """The depth along each pixel's ray, 0 where it misses the sphere, in the ways that are compared here."""

    def __init__(self) -> None:
        self.sphere = ti.field(ti.f64, shape=4)
        self.depth = ti.field(ti.f64, shape=(WIDTH, HEIGHT))
        self.samples = 16
        self.plans: dict[str, Jacobian] = {}
        self.sphere.from_numpy(SPHERE)

    @ti.func
    def hit(self, px, py):
        """The depth of the point nearest to the centre, and the level: the squared half of the chord."""
        ray = ti.Vector([(px - WIDTH / 2) / FOCAL, (py - HEIGHT / 2) / FOCAL, 1.0]).normalized()
        centre = ti.Vector([self.sphere[1], self.sphere[2], self.sphere[3]])
        s = centre.dot(ray)
        return s, self.sphere[0] ** 2 - (s * ray - centre).norm_sqr()

    @ti.kernel
    def autodiff(self):
        for i, j in self.depth:
            s, level = self.hit(float(i), float(j))
            self.depth[i, j] = 0.0
            if level > 0:
                self.depth[i, j] = s - ti.sqrt(level)

    @ti.kernel
    def chord(self):
        """The simplest edge: the root is sampled at the pixel's centre."""
        for i, j in self.depth:
            px = float(i)
            py = float(j)
            s, level = self.hit(px, py)
            self.depth[i, j] = edge(level, s - ti.sqrt(ti.max(level, 1e-9)), 0.0, at=(px, py), jump=s)

    @ti.kernel
    def both(self):
        """The root goes to 0 at the silhouette, and its derivative is averaged there; s jumps."""
        for i, j in self.depth:
            px = float(i)
            py = float(j)
            s, level = self.hit(px, py)
            self.depth[i, j] = edge(level, s, 0.0, at=(px, py), antialias=True) - sqrt_edge(level, at=(px, py))

    @ti.kernel
    def interior(self):
        """The same image; with a jump of 0, its derivative has no boundary term."""
        for i, j in self.depth:
            px = float(i)
            py = float(j)
            s, level = self.hit(px, py)
            smooth = edge(level, s, 0.0, at=(px, py), antialias=True, jump=0.0)
            self.depth[i, j] = smooth - sqrt_edge(level, at=(px, py))

    @ti.kernel
    def sample(self, n: ti.i32):
        """The mean of n x n samples in each pixel."""
        for i, j in self.depth:
            total = 0.0
            for a, b in ti.ndrange(n, n):
                s, level = self.hit(i - 0.5 + (a + 0.5) / n, j - 0.5 + (b + 0.5) / n)
                if level > 0:
                    total += s - ti.sqrt(level)
            self.depth[i, j] = total / n**2

    def supersample(self) -> None:
        self.sample(self.samples)


def plan(renderer: Renderer, name: str) -> Jacobian:
    """The Jacobian of one of the ways by all four parameters, prepared once."""
    if name not in renderer.plans:
        renderer.plans[name] = Jacobian(getattr(renderer, name), renderer.sphere, renderer.depth)
    return renderer.plans[name]


def column_sums(renderer: Renderer, name: str) -> np.ndarray:
    """Derivatives of the sum of the image by r, cx and cz."""
    return plan(renderer, name)().sum((0, 1))[[0, 1, 3]]


def supersampled_sums(renderer: Renderer, step: float = 0.5) -> np.ndarray:
    """The same by finite differences of a supersampled image."""
    return np.array(
        [differences(renderer.supersample, renderer.sphere, renderer.depth, k, step).sum() for k in (0, 1, 3)]
    )


def boundary_term(sphere: np.ndarray = SPHERE) -> np.ndarray:
    """The boundary term of those sums in closed form.

    The depth of the silhouette is the same all around, that of a tangent, L = sqrt(c·c - r²).  So the term is L times
    the derivative of the area of the ellipse in the image, pi f² r² L / (cz² - r²)^1.5.
    """
    r, *centre = sphere
    cx, _, cz = centre
    tangent_squared, across = np.dot(centre, centre) - r**2, cz**2 - r**2
    area = np.pi * FOCAL**2 * r**2 * np.sqrt(tangent_squared) / across**1.5
    by_logarithm = [
        2 / r - r / tangent_squared + 3 * r / across,
        cx / tangent_squared,
        cz / tangent_squared - 3 * cz / across,
    ]
    return np.sqrt(tangent_squared) * area * np.array(by_logarithm)


# --- fits -------------------------------------------------------------------------------------------------------------


def blur_weights(pixels: int, width: float) -> np.ndarray:
    """A Gaussian blur along one axis, kept at every (width / 2)-th pixel: shape (kept, pixels)."""
    stride = max(1, int(width / 2))
    centres = np.arange(0, pixels, stride) + (stride - 1) / 2
    return np.exp(-0.5 * ((np.arange(pixels) - centres[:, None]) / width) ** 2) / (width * np.sqrt(2 * np.pi))


def blurred(image: np.ndarray, width: float) -> np.ndarray:
    """An image, or one per parameter, as one row per pixel that is kept."""
    columns = image.reshape(WIDTH, HEIGHT, -1)
    if width > 1:
        columns = np.tensordot(blur_weights(WIDTH, width), columns, (1, 0))
        columns = np.tensordot(blur_weights(HEIGHT, width), columns, (1, 1))
    return columns.reshape(-1, columns.shape[-1])


@dataclass
class Fit:
    """Gauss-Newton on the depth image, without damping or line search, with one of the renderer's derivatives."""

    renderer: Renderer
    name: str

    def __post_init__(self) -> None:
        self.derivative = plan(self.renderer, self.name)
        self.J = np.empty((WIDTH, HEIGHT, len(SPHERE)), self.renderer.depth.to_numpy().dtype)
        self.target = self.render(SPHERE)

    def render(self, guess: np.ndarray) -> np.ndarray:
        """The image of a guess; J is its Jacobian."""
        self.renderer.sphere.from_numpy(guess)
        self.derivative(out=self.J)
        return self.renderer.depth.to_numpy()

    def step(self, guess: np.ndarray, width: float) -> np.ndarray:
        """The next guess, from the residual and J, blurred alike."""
        residual = blurred(self.render(guess) - self.target, width)[:, 0]
        rows = blurred(self.J, width)
        return guess - np.linalg.lstsq(rows.T @ rows, rows.T @ residual, rcond=None)[0]

    def run(self, start: np.ndarray, widths: Sequence[float] = BLURS, steps: int = STEPS) -> np.ndarray:
        """The distance from the true parameters at the start and after each step.

        The next blur's turn comes when a step is small.  A guess that is further off than the scene is large is lost.
        """
        guess, errors = start, [np.linalg.norm(start - SPHERE)]
        for width in widths:
            for _ in range(steps):
                before, guess = guess, self.step(guess, width)
                errors.append(np.linalg.norm(guess - SPHERE))
                if not errors[-1] < LOST:
                    return np.array(errors)
                if np.linalg.norm(guess - before) < (0.01 * width if width > 1 else 1e-13):
                    break
        return np.array(errors)


def far_starts(count: int) -> np.ndarray:
    """Random spheres, shape (count, 4)."""
    return np.random.default_rng(0).uniform(LOWEST, HIGHEST, (count, len(SPHERE)))


# --- what is printed and drawn ----------------------------------------------------------------------------------------


def compare_sums(compared: Comparison, renderer: Renderer) -> None:
    """The table: derivatives of the sum of the image, compared with the expected ones."""
    print("       derivatives of the sum of the image by r, cx (and cy), cz:")
    compared.numbers("boundary term, closed form", boundary_term(), EXACT_BOUNDARY, rtol=0, atol=1e-3)
    compared.numbers("autodiff of the renderer", column_sums(renderer, "autodiff"), AUTODIFF, rtol=0, atol=0.02)
    compared.numbers("autodiff and edge", column_sums(renderer, "chord"), CHORD, rtol=0, atol=0.02)
    both, interior = column_sums(renderer, "both"), column_sums(renderer, "interior")
    compared.numbers("sqrt_edge and edge", both, BOTH, rtol=0, atol=0.02)
    compared.numbers("  their interior term, against the exact one", interior, EXACT_INTERIOR, rtol=5e-4)
    compared.numbers("  their boundary term, against the exact one", both - interior, EXACT_BOUNDARY, rtol=1e-3)
    compared.numbers("  their sum, against the exact one", both, EXACT, rtol=5e-4)
    compared.numbers("  their sum, against finite differences", both, SUPERSAMPLED, rtol=1e-4)
    n = renderer.samples
    expected, atol = (SUPERSAMPLED, 0.01) if n == 16 else (EXACT, 300.0)
    name = f"finite differences, {n} x {n} samples per pixel"
    compared.numbers(name, supersampled_sums(renderer), expected, rtol=0, atol=atol)


def compare_near(compared: Comparison, fits: dict[str, Fit]) -> dict[str, np.ndarray]:
    """Fits of the image as it is, from a start nearby."""
    errors = {name: fit.run(NEAR, widths=(1,), steps=8) for name, fit in fits.items()}
    print("\n       distance from the truth, by step of a fit from near:")
    for name, title in NAMES.items():
        print(f"       {title:<22}" + "".join(f"{error:>9.1e}" for error in errors[name]))
    compared.holds("autodiff of the renderer runs away", errors["autodiff"].max() > 10)
    compared.numbers("with the boundary term, steps 1 and 2", errors["both"][1:3], [0.151, 8.2e-3], rtol=0.05)
    holds = (errors["both"][[3, 4, -1]] < [1e-5, 1e-7, 3e-12]).all()
    compared.holds("  and steps 3, 4 and the last below 1e-5, 1e-7 and 3e-12", holds)
    return errors


def compare_far(compared: Comparison, fits: dict[str, Fit], starts: np.ndarray) -> dict[str, list[np.ndarray]]:
    """Fits of blurred images, from random starts."""
    errors = {name: [fit.run(start) for start in starts] for name, fit in fits.items()}
    print("\n       distance from the truth, fits from far, at the start and at the end:")
    for name, title in NAMES.items():
        for run in errors[name]:
            print(f"       {title:<22}{run[0]:>9.1f}{run[-1]:>9.1e}  after {len(run) - 1} steps")
    found = {name: sum(run[-1] < FOUND for run in runs) for name, runs in errors.items()}
    compared.holds(f"autodiff of the renderer finds the sphere from 0 of {len(starts)}", found["autodiff"] == 0)
    compared.holds(f"with the boundary term from all {len(starts)}", found["both"] == len(starts))
    return errors


NAMES = {"autodiff": "autodiff", "both": "with boundary term"}


def derivative_images(renderer: Renderer) -> dict[str, np.ndarray]:
    """d depth / d r in every pixel, all averaged over the step of the differences."""

    def mean(name: str) -> np.ndarray:
        return mean_derivative(plan(renderer, name), renderer.sphere, 0, DETAIL_STEP)

    both, interior = mean("both"), mean("interior")
    expected = differences(renderer.supersample, renderer.sphere, renderer.depth, 0, DETAIL_STEP)
    return {
        "interior term": interior,
        "boundary term": both - interior,
        "their sum": both,
        "finite differences": expected,
    }


def draw(path: Path, renderer: Renderer, images: dict[str, np.ndarray], near: Any, far: Any) -> None:
    figure = plotting.new_figure(15, 7.4)
    if figure is None:
        return
    figure.suptitle("A sphere's depth image: autodiff misses the motion of the silhouette", fontsize=14)
    upper, lower = figure.subfigures(2, 1, height_ratios=(1.25, 1))
    depth_axes, near_axes, far_axes = upper.subplots(1, 3)
    renderer.autodiff()
    depth = renderer.depth.to_numpy()
    shown = np.where(depth > 0, depth, np.nan)
    drawn = plotting.show(depth_axes, shown, "depth; the frame marks the detail below", cmap="viridis")
    plotting.color_bar(upper, drawn, depth_axes, "depth (scene units)")
    plotting.frame(depth_axes, DETAIL)

    plotting.convergence(
        near_axes, "Gauss-Newton from 0.16 away", {NAMES[name]: [errors] for name, errors in near.items()}
    )
    count = len(far["both"])
    title = f"from {count} far starts, blurred from {BLURS[0]} pixels to none"
    plotting.convergence(far_axes, title, {NAMES[name]: runs for name, runs in far.items()})
    panels = lower.subplots(1, len(images))
    scale = plotting.signed_scale(max(np.abs(image[DETAIL]).max() for image in images.values()), linear=3.0)
    for axes, (name, image) in zip(panels, images.items(), strict=True):
        drawn = plotting.show_detail(axes, image, f"d depth / d r: {name}", DETAIL, scale)
    plotting.color_bar(lower, drawn, panels, "d depth / d r")
    plotting.save(figure, path)


def main(arguments: Sequence[str] | None = None) -> int:
    """The table of sums, single pixels, fits from near and far, and the picture."""
    made = plotting.parser("A sphere's depth image: what autodiff misses at the silhouette.", "silhouette.png")
    made.add_argument("--starts", type=int, default=4, help="fits from far (default: %(default)s)")
    made.add_argument(
        "--samples", type=int, default=16, help="per pixel and axis, of differences (default: %(default)s)"
    )
    options = plotting.parse(made, arguments)
    ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
    compared = Comparison(f"Depth of a sphere in {WIDTH} x {HEIGHT} pixels, by its radius and centre")
    renderer = Renderer()
    renderer.samples = options.samples
    compare_sums(compared, renderer)

    images = derivative_images(renderer)
    expected = images["finite differences"]
    off = {name: relative(images[name], expected) for name in ("interior term", "their sum")}
    print("\n       d depth / d r in every pixel, error (L2) against finite differences:")
    compared.holds("with the boundary term below 2 %", off["their sum"] < 0.02, f"{100 * off['their sum']:.2f} %")
    compared.holds("without it, all is missing", off["interior term"] > 0.9, f"{100 * off['interior term']:.0f} %")

    fits = {name: Fit(renderer, name) for name in NAMES}
    near = compare_near(compared, fits)
    far = compare_far(compared, fits, far_starts(options.starts))
    renderer.sphere.from_numpy(SPHERE)
    draw(options.output, renderer, images, near, far)
    return compared.exit_code


if __name__ == "__main__":
    sys.exit(main())
