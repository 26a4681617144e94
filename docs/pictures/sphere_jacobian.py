"""The picture on the first page: what the demonstration computes, with axes.

python docs/pictures/sphere_jacobian.py      writes docs/sphere_jacobian.png; needs the extra plot
"""

import sys
from pathlib import Path

import numpy as np
import taichi as ti

from taichi_ext import jacobian
from taichi_ext.demo.demo import PARAMETERS, ZOOM, fit_sphere, make_scene

DOCS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(DOCS.parent / "examples"))

import plotting  # noqa: E402  # shared by the examples


def main() -> None:
    ti.init(arch=ti.cpu, log_level=ti.ERROR)
    scene = make_scene(needs_dual=False)
    J = jacobian(scene.trace_loss, scene.scene_params, scene.d_losses)
    depth, fit = scene.image.to_numpy(), fit_sphere(scene)
    figure = plotting.new_figure(12, 6)
    if figure is None:
        return
    panels = figure.subplots(2, 3)
    drawn = plotting.show(panels[0, 0], np.where(depth > 0, depth, np.nan), "depth of a sphere", cmap="viridis")
    plotting.color_bar(figure, drawn, panels[0, 0], "scene units")
    plotting.frame(panels[0, 0], ZOOM)
    scale, is_moved = plotting.signed_scale(4.0), (J != 0).any(axis=-1)
    places = panels[0, 1], panels[0, 2], panels[1, 1], panels[1, 2]
    for axes, name, column in zip(places, PARAMETERS, np.moveaxis(J, -1, 0), strict=True):
        shown = np.where(is_moved, column, np.nan)
        drawn = plotting.show_detail(axes, shown, f"d depth / d {name}, in the frame", ZOOM, scale)
        plotting.color_bar(figure, drawn, axes, f"depth per unit of {name}")
    for axes in places:
        axes.set_facecolor("#ebebeb")  # no hit
    runs = {"depth": [fit.residuals], "worst param": [fit.errors]}
    plotting.convergence(panels[1, 0], "Gauss-Newton fit", runs, has_legend=False)
    panels[1, 0].legend(loc="upper right")
    plotting.save(figure, DOCS / "sphere_jacobian.png")


if __name__ == "__main__":
    main()
