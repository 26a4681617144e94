"""The volume rendering kernel of a neural radiance field, every array an argument, differentiated by name.

Rays have different numbers of samples, found through an integer table.  Along a ray the transmittance falls by
``T[s + 1] = T[s] (1 - alpha)``, each sample adds ``T alpha`` times its colour, and samples behind the point where T
falls below a threshold are skipped: their derivative is exactly zero.

    python examples/nerf_rendering.py --output nerf_rendering.png
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotting
import taichi as ti
from compare import Comparison

from taichi_ext import check_jacobian, value_and_jacobian

RAYS = [[2, 0, 5], [0, 5, 9], [3, 14, 1], [1, 15, 7]]  # where the ray's results go, its first sample, how many it has
THRESHOLD, OUTPUTS = 0.05, ("opacity", "depth", "rgb", "ws")


@ti.kernel
def render(
    sigmas: ti.types.ndarray(),
    rgbs: ti.types.ndarray(),
    deltas: ti.types.ndarray(),
    ts: ti.types.ndarray(),
    rays: ti.types.ndarray(),
    threshold: ti.f64,
    T: ti.types.ndarray(),  # transmittance
    samples: ti.types.ndarray(),
    opacity: ti.types.ndarray(),
    depth: ti.types.ndarray(),
    rgb: ti.types.ndarray(),
    ws: ti.types.ndarray(),
):
    for n in range(rays.shape[0]):
        ray, start, count = rays[n, 0], rays[n, 1], rays[n, 2]
        T[start + n] = 1.0  # one entry more than the ray has samples
        for sample in range(count):
            s = start + sample
            transmittance = T[s + n]
            if transmittance > threshold:
                alpha = 1.0 - ti.exp(-sigmas[s] * deltas[s])
                w = alpha * transmittance
                for c in ti.static(range(3)):
                    rgb[ray, c] += w * rgbs[s, c]
                depth[ray] += w * ts[s]
                opacity[ray] += w
                ws[s] = w
                T[s + n + 1] = transmittance * (1.0 - alpha)
                samples[ray] += 1
            else:
                T[s + n + 1] = 0.0


def make_arguments(seed: int = 0, dtype: Any = np.float64) -> dict[str, Any]:
    """The arguments of ``render`` by name, outputs zero; some rays reach the threshold and some do not."""
    rng = np.random.default_rng(seed)
    rays = np.array(RAYS, np.int32)
    total = int(rays[:, 2].sum())
    deltas = rng.uniform(0.1, 0.3, total)
    return {
        "sigmas": rng.uniform(0.5, 5.0, total).astype(dtype),
        "rgbs": rng.uniform(0.0, 1.0, (total, 3)).astype(dtype),
        "deltas": deltas.astype(dtype),
        "ts": np.cumsum(deltas).astype(dtype),
        "rays": rays,
        "threshold": THRESHOLD,
        "T": np.zeros(total + len(rays), dtype),
        "samples": np.zeros(len(rays), np.int32),
        "opacity": np.zeros(len(rays), dtype),
        "depth": np.zeros(len(rays), dtype),
        "rgb": np.zeros((len(rays), 3), dtype),
        "ws": np.zeros(total, dtype),
    }


def skipped_samples(arguments: dict[str, Any]) -> np.ndarray:
    """Numbers of the samples that the threshold skipped, after a run."""
    used = arguments["samples"]
    return np.concatenate([np.arange(start + used[ray], start + count) for ray, start, count in arguments["rays"]])


def main(arguments: Sequence[str] | None = None) -> int:
    options = plotting.parse(plotting.parser(__doc__.splitlines()[0], "nerf_rendering.png"), arguments)
    ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
    compared = Comparison("Volume rendering of a neural radiance field, 4 rays, 22 samples")
    arguments = make_arguments()
    values, J = value_and_jacobian(
        render,
        {"sigmas": arguments["sigmas"], "rgbs": arguments["rgbs"]},
        {name: arguments[name] for name in OUTPUTS},
        args=tuple(arguments.values()),
    )
    plain = make_arguments()
    render(*plain.values())
    for name in OUTPUTS:
        compared.numbers(name, values[name], plain[name], rtol=1e-12)
    report = check_jacobian(render, ["sigmas", "rgbs"], list(OUTPUTS), args=tuple(make_arguments().values()))
    compared.holds("J agrees with central differences", report, str(report))
    skipped = skipped_samples(arguments)
    is_zero = not any(J[out]["sigmas"][..., skipped].any() or J[out]["rgbs"][..., skipped, :].any() for out in OUTPUTS)
    compared.holds(f"samples behind the threshold ({', '.join(map(str, skipped))}) have derivative 0", is_zero)
    if (figure := plotting.new_figure(8, 4.6)) is not None:
        for axes, out in zip(figure.subplots(2, 1), ("opacity", "depth"), strict=True):
            block = J[out]["sigmas"]
            drawn = plotting.show_matrix(axes, block, f"∂{out} / ∂sigmas")
            drawn.set_norm(plotting.signed_scale(float(np.abs(block).max()), 0.01))
            axes.set(xlabel="sample", ylabel="ray", aspect="auto", yticks=range(len(RAYS)))
            plotting.color_bar(figure, drawn, axes, "derivative")
        plotting.save(figure, options.output)
    return compared.exit_code


if __name__ == "__main__":
    sys.exit(main())
