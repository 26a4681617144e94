"""Fits of a sphere to its depth image: autodiff runs away, with the boundary term Gauss-Newton converges from far.

Without damping or line search.  From far starts, the residual and its Jacobian are blurred together, less and less.

    python examples/silhouette_fits.py [--starts 4] [--output silhouette_fits.png]
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotting
import silhouette
import taichi as ti
from compare import Comparison
from silhouette import HEIGHT, SPHERE, WIDTH, Renderer

NEAR = SPHERE + np.array([0.1, 0.05, -0.05, 0.1])
LOWEST, HIGHEST = np.array([25.0, -30.0, -30.0, 80.0]), np.array([60.0, 50.0, 50.0, 140.0])  # of the far starts
BLURS, STEPS = (32, 16, 8, 4, 2, 1), 10  # standard deviations in pixels, of which 1 is no blur; steps at most for each
LOST = 1e4  # a distance from the true parameters
NAMES = {"autodiff": "autodiff", "both": "with boundary term"}


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
        self.derivative = silhouette.plan(self.renderer, self.name)
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
        """The distance from the true parameters after each step; the next blur's turn comes when a step is small."""
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


def main(arguments: Sequence[str] | None = None) -> int:
    made = plotting.parser(__doc__.splitlines()[0], "silhouette_fits.png")
    made.add_argument("--starts", type=int, default=4, help="fits from far")
    options = plotting.parse(made, arguments)
    ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
    compared, renderer = Comparison("The radius and centre of a sphere, from its depth image"), Renderer()
    fits = {name: Fit(renderer, name) for name in NAMES}
    near = {name: [fit.run(NEAR, widths=(1,), steps=8)] for name, fit in fits.items()}
    far = {name: [fit.run(start) for start in far_starts(options.starts)] for name, fit in fits.items()}
    print("       distance from the truth, by step of a fit from near:")
    for name, title in NAMES.items():
        print(f"       {title:<22}" + "".join(f"{error:>9.1e}" for error in near[name][0]))
    compared.holds("autodiff of the renderer runs away", near["autodiff"][0].max() > 10)
    holds = (near["both"][0][[2, 3, 4, -1]] < [1e-2, 2e-5, 1e-7, 3e-12]).all()
    compared.holds("with the boundary term, steps 2, 3, 4 and the last are below 1e-2, 2e-5, 1e-7 and 3e-12", holds)
    print("       distance from the truth, fits from far, at the start and at the end:")
    for name, title in NAMES.items():
        for run in far[name]:
            print(f"       {title:<22}{run[0]:>9.1f}{run[-1]:>9.1e}  after {len(run) - 1} steps")
    found = {name: sum(run[-1] < 1e-6 for run in runs) for name, runs in far.items()}
    compared.holds(f"autodiff of the renderer finds the sphere from 0 of {options.starts}", found["autodiff"] == 0)
    compared.holds(f"with the boundary term from all {options.starts}", found["both"] == options.starts)
    if (figure := plotting.new_figure(12, 5.5)) is not None:
        left, right = figure.subplots(1, 2)
        for axes, title, runs in ((left, "a start nearby", near), (right, "far starts, with blur", far)):
            plotting.convergence(axes, title, {NAMES[name]: lines for name, lines in runs.items()}, has_legend=False)
        figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=3)
        plotting.save(figure, options.output)
    return compared.exit_code


if __name__ == "__main__":
    sys.exit(main())
