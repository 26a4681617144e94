"""A volume renderer: the image with respect to the volume's densities and the camera's pose.

Each ray steps through a volume of colours and densities, interpolates them trilinearly, and accumulates them until the
ray is opaque.  The accumulated opacity is read back in the very loop that writes it, which Taichi's reverse mode does
not support (taichi-dev/taichi issue 2241).

    python examples/ray_marching.py --output ray_marching.png
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotting
import taichi as ti
from compare import Comparison

from taichi_ext import check_jacobian, jacobian, value_and_jacobian

RESOLUTION, PIXELS, STEPS = 8, 4, 12
STEP_LENGTH, CAMERA = 0.25, [0.1, -0.05, -1.6]

EXPECTED_IMAGE = [7.747998, 8.255055, 8.534855, 14.653700]
EXPECTED_BY_DENSITY = [14.653700, 14.653700, 14.653700, 49.729162]
EXPECTED_BY_CAMERA_Z = [-1.018151, -1.266230, -1.337754, -1.090214]


def densities() -> np.ndarray:
    """Three colours and a density for each voxel, shape (RESOLUTION, RESOLUTION, RESOLUTION, 4)."""
    i, j, k, c = np.meshgrid(*[np.arange(n) for n in (RESOLUTION,) * 3 + (4,)], indexing="ij")
    return 0.5 + 0.4 * np.sin(0.7 * i + 1.3 * j + 0.9 * k + 0.5 * c)


@ti.data_oriented
class VolumeRenderer:
    """A batch of one camera before a volume that fills the cube from -1 to 1."""

    def __init__(self, volume: np.ndarray, dtype: Any = ti.f64, pixels: int = PIXELS) -> None:
        self.resolution, self.pixels = volume.shape[0], pixels
        self.density = ti.field(dtype, shape=(1, *volume.shape))
        self.position = ti.field(dtype, shape=(1, 3))
        self.rotation = ti.field(dtype, shape=(1, 3, 3))
        self.image = ti.field(dtype, shape=(1, 4, pixels, pixels))
        np_dtype = np.float32 if dtype == ti.f32 else np.float64
        self.density.from_numpy(volume[None].astype(np_dtype, copy=False))
        self.position.from_numpy(np.array([CAMERA], np_dtype))
        self.rotation.from_numpy(np.eye(3, dtype=np_dtype)[None])

    @ti.func
    def interpolate(self, n, p):
        """Colour and density at p; the first axis of the volume is z."""
        place = (p + 1.0) * 0.5 * (self.resolution - 1)
        low = ti.floor(place)
        w = place - low
        i = int(low)
        total = ti.Vector([0.0, 0.0, 0.0, 0.0])
        for corner in ti.static(ti.ndrange(2, 2, 2)):
            weight = 1.0
            at = ti.Vector([0, 0, 0])
            for axis in ti.static(range(3)):
                weight *= w[axis] if corner[axis] == 1 else 1.0 - w[axis]
                at[axis] = ti.math.clamp(i[axis] + corner[axis], 0, self.resolution - 1)
            for c in ti.static(range(4)):
                total[c] += weight * self.density[n, at.z, at.y, at.x, c]
        return total

    @ti.kernel
    def march(self):
        for n, x, y in ti.ndrange(1, self.pixels, self.pixels):
            pixel = ti.Vector([(x + 0.5) / self.pixels - 0.5, (y + 0.5) / self.pixels - 0.5, 1.0])
            direction = ti.Vector([0.0, 0.0, 0.0])
            for i in ti.static(range(3)):
                for j in ti.static(range(3)):
                    direction[i] += self.rotation[n, i, j] * pixel[j]
            direction = direction.normalized()
            p = ti.Vector([self.position[n, 0], self.position[n, 1], self.position[n, 2]])
            for _ in range(STEPS):
                if ti.abs(p).max() <= 1:
                    opacity = self.image[n, 3, x, y]
                    sample = self.interpolate(n, p)
                    step = ti.min(opacity + sample[3] * STEP_LENGTH, 1.0) - opacity
                    for c in ti.static(range(3)):
                        self.image[n, c, x, y] += step * sample[c]
                    self.image[n, 3, x, y] += step
                p += direction * STEP_LENGTH

    def run(self) -> None:
        self.image.fill(0.0)
        self.march()


def main(arguments: Sequence[str] | None = None) -> int:
    options = plotting.parse(plotting.parser(__doc__.splitlines()[0], "ray_marching.png"), arguments)
    ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
    compared = Comparison(f"Volume renderer: {RESOLUTION}^3 voxels, {PIXELS} x {PIXELS} pixels, {STEPS} steps")
    program = VolumeRenderer(densities())
    image, by_density = value_and_jacobian(program.run, program.density, program.image)
    compared.numbers("image, summed per channel", image.sum((0, 2, 3)), EXPECTED_IMAGE, rtol=1e-6)
    by_channel = by_density.sum((0, 1, 2, 3)).sum((0, 1, 2, 3))
    compared.numbers("∂(sum of image) / ∂density, per channel", by_channel, EXPECTED_BY_DENSITY, rtol=1e-6)
    report = check_jacobian(program.run, [program.position, program.rotation], program.image)
    compared.holds("J of position and rotation agrees with central differences", report, str(report))
    by_z = jacobian(program.run, program.position, program.image)[..., 0, 2].sum((0, 2, 3))
    compared.numbers("∂(sums of channels) / ∂position.z", by_z, EXPECTED_BY_CAMERA_Z, rtol=1e-6)
    if (figure := plotting.new_figure(10, 3)) is not None:
        larger = VolumeRenderer(densities(), pixels=48)
        image, J = value_and_jacobian(larger.run, larger.position, larger.image)
        panels = figure.subplots(1, 3)
        plotting.color_bar(figure, plotting.show(panels[0], image[0, 3], "image", cmap="viridis"), panels[0], "opacity")
        for axes, axis in zip(panels[1:], (0, 2), strict=True):
            block, title = J[0, 3, :, :, 0, axis], f"∂opacity / ∂position.{'xyz'[axis]}"
            drawn = plotting.show(axes, block, title, plotting.signed_scale(abs(block).max()))
            plotting.color_bar(figure, drawn, axes, "per unit")
        plotting.save(figure, options.output)
    return compared.exit_code


if __name__ == "__main__":
    sys.exit(main())
