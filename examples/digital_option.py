"""A digital option pays 1 if the stock ends above the strike: how its price changes with the stock and its volatility.

The price is an integral over samples.  The payoff jumps, so autodiff of the samples gives 0.  ``edge`` with ``at=x``,
the number of the sample, adds the motion of the place at which it jumps.

    python examples/digital_option.py [--output digital_option.png]

The picture needs ``python -m pip install '.[plot]'``; the figures are printed without it.
"""

import math
import sys
import warnings
from collections.abc import Sequence

import numpy as np
import plotting
import taichi as ti
from compare import Comparison, errors_of_columns, percents

from taichi_ext import DerivativeWarning, Jacobian, edge

SAMPLES, STRIKE = 400, 110.0
STOCKS, VOLATILITY = np.linspace(80.0, 140.0, 61), 0.2


@ti.data_oriented
class Option:
    """The price of the option for a stock and a volatility, over one year without interest."""

    def __init__(self) -> None:
        self.market = ti.field(ti.f64, shape=2)
        self.price = ti.field(ti.f64, shape=())

    @ti.kernel
    def pay(self, has_edge: ti.template()):
        self.price[None] = 0.0
        for i in range(SAMPLES):
            x = float(i)
            z = 8 * (x + 0.5) / SAMPLES - 4  # standard deviations
            stock = self.market[0] * ti.exp(self.market[1] * z - 0.5 * self.market[1] ** 2)
            density = 8 / SAMPLES * ti.exp(-0.5 * z * z) / ti.sqrt(2 * math.pi)
            if ti.static(has_edge):
                self.price[None] += density * edge(stock - STRIKE, 1.0, 0.0, at=x, antialias=True)
            else:
                self.price[None] += density * ti.select(stock > STRIKE, 1.0, 0.0)


def exact(stock: np.ndarray) -> np.ndarray:
    """The derivatives with respect to the stock and the volatility (F. Black, M. Scholes 1973), as columns."""
    distance = (np.log(stock / STRIKE) - 0.5 * VOLATILITY**2) / VOLATILITY
    density = np.exp(-0.5 * distance**2) / math.sqrt(2 * math.pi)
    return np.stack([density / (stock * VOLATILITY), -density * (distance / VOLATILITY + 1)], axis=1)


def derivatives(option: Option, *, has_edge: bool) -> np.ndarray:
    """The same, computed from the samples."""
    plan, rows = Jacobian(option.pay, option.market, option.price, args=(has_edge,)), []
    for stock in STOCKS:
        option.market.from_numpy(np.array([stock, VOLATILITY]))
        rows.append(plan())
    return np.stack(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Derivatives with and without the edge, compared with the formula."""
    output = plotting.parse(plotting.parser(__doc__.splitlines()[0], "digital_option.png"), arguments).output
    ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
    compared = Comparison(f"A digital option from {SAMPLES} samples, for {len(STOCKS)} prices of the stock")
    warnings.simplefilter("ignore", DerivativeWarning)  # that the samples alone have the derivative 0
    option, expected = Option(), exact(STOCKS)
    found, without = (derivatives(option, has_edge=has_edge) for has_edge in (True, False))
    off = errors_of_columns(found, expected)
    compared.holds("by stock and volatility", off.max() < 0.01, f"off by {percents(off, 2)}")
    compared.holds("without the edge both are 0", not without.any())
    if (figure := plotting.new_figure(8, 3.6)) is not None:
        panels = zip(figure.subplots(1, 2), ("stock", "volatility"), strict=True)
        for k, (axes, name) in enumerate(panels):
            axes.plot(STOCKS, expected[:, k], color=plotting.GREY, label="formula")
            axes.plot(STOCKS, found[:, k], ".", color=plotting.BLUE, label="edge")
            axes.plot(STOCKS, without[:, k], ":", color=plotting.ORANGE, label="autodiff of the samples")
            axes.set(xlabel="stock today", ylabel=f"d price / d {name}")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9)
        figure.suptitle("A digital option, strike 110")
        plotting.save(figure, output)
    return compared.exit_code


if __name__ == "__main__":
    sys.exit(main())
