"""Shared by bezier_fit.py and voronoi_fit.py: a picture of some numbers, fitted to a target by damped Gauss-Newton."""

from pathlib import Path
from typing import Any

import numpy as np
import plotting
import taichi as ti
from compare import Comparison
from supersampling import Supersampled, differences, mean_derivative, relative

from taichi_ext import Jacobian

WIDTH, HEIGHT = 48, 36
STEPS = 20
STEP = 0.25  # of the differences


@ti.data_oriented
class Picture(Supersampled):
    """An image of ``p``; classes of examples say what it shows: ``at(x, y)``, and ``render`` with edges."""

    def __init__(self, p: np.ndarray) -> None:
        self.p = ti.field(ti.f64, shape=p.size)
        self.image = ti.field(ti.f64, shape=(WIDTH, HEIGHT))
        self.set(p)

    def set(self, p: np.ndarray) -> None:
        self.p.from_numpy(p.ravel())


def fit(picture: Any, target: np.ndarray, start: np.ndarray) -> tuple[np.ndarray, Jacobian]:
    """Gauss-Newton, damped as long as the residual is large; the residual (L2) by step."""
    derivative = Jacobian(picture.render, picture.p, picture.image)
    guess, residuals = start.ravel().copy(), []
    for _ in range(STEPS):
        picture.set(guess)
        J = derivative().reshape(-1, guess.size)
        residual = (picture.image.to_numpy() - target).ravel()
        residuals.append(np.linalg.norm(residual))
        damping = 1e-2 * residuals[-1] ** 2 / len(residual) * np.trace(J.T @ J)
        step = np.linalg.solve(J.T @ J + damping * np.eye(guess.size), J.T @ residual)
        guess = guess - np.clip(step, -3, 3)
    picture.set(guess)
    return np.array(residuals), derivative


def run(title: str, picture: Any, start: np.ndarray, k: int, by: str, path: Path) -> int:
    """A fit to the supersampled picture, column k of J (by the number of that name), and a drawing of both."""
    compared = Comparison(f"{title} in {WIDTH} x {HEIGHT} pixels, {picture.p.shape[0]} parameters")
    truth, images = picture.p.to_numpy(), {}
    picture.supersample()
    images["target"] = picture.image.to_numpy()
    picture.set(start)
    picture.render()
    images["start"] = picture.image.to_numpy()
    residuals, derivative = fit(picture, images["target"], start)
    off = np.abs(picture.p.to_numpy() - truth).max()
    picture.render()
    images["fit"] = picture.image.to_numpy()
    detail = f"off by {off:.3f} after {STEPS} steps; residual {residuals[0]:.1e}, then {residuals[-1]:.1e}"
    compared.holds("all parameters agree to 0.1 pixels", off < 0.1, detail)
    picture.set(truth)
    columns = {f"∂image / ∂{by}": mean_derivative(derivative, picture.p, k, STEP)}
    columns["differences"] = differences(picture.supersample, picture.p, picture.image, k, STEP)
    mean, exact = columns.values()
    detail = f"L2: {100 * relative(mean, exact):.2f} %, differences of 24 x 24 samples"
    compared.holds("each pixel of a column of J agrees to 4 %", relative(mean, exact) < 0.04, detail)
    if (figure := plotting.new_figure(12, 5.8)) is not None:
        panels, scale = figure.subplots(2, 3), plotting.signed_scale(np.abs(exact).max())
        for axes, (name, image) in zip(panels[0], images.items(), strict=True):
            plotting.show(axes, image, name, cmap="gray")
        for axes, (name, column) in zip(panels[1], columns.items(), strict=False):
            drawn = plotting.show(axes, column, name, scale)
        plotting.color_bar(figure, drawn, axes, "per pixel")
        small = plotting.signed_scale(np.abs(mean - exact).max())
        drawn = plotting.show(panels[1, 2], mean - exact, "difference", small)
        plotting.color_bar(figure, drawn, panels[1, 2], "per pixel")
        plotting.save(figure, path)
    return compared.exit_code
