"""The models of NIST's Statistical Reference Datasets for nonlinear regression, as functions of Taichi."""

import json
import math
from pathlib import Path

import numpy as np
import taichi as ti

exp, pi = ti.exp, math.pi


@ti.func
def bennett5(b: ti.template(), x):
    return b[0] * (b[1] + x) ** (-1 / b[2])


@ti.func
def misra1a(b: ti.template(), x):
    return b[0] * (1 - exp(-b[1] * x))


@ti.func
def chwirut(b: ti.template(), x):
    return exp(-b[0] * x) / (b[1] + b[2] * x)


@ti.func
def danwood(b: ti.template(), x):
    return b[0] * x ** b[1]


@ti.func
def enso(b: ti.template(), x):
    year = b[1] * ti.cos(2 * pi * x / 12) + b[2] * ti.sin(2 * pi * x / 12)
    second = b[4] * ti.cos(2 * pi * x / b[3]) + b[5] * ti.sin(2 * pi * x / b[3])
    third = b[7] * ti.cos(2 * pi * x / b[6]) + b[8] * ti.sin(2 * pi * x / b[6])
    return b[0] + year + second + third


@ti.func
def eckerle4(b: ti.template(), x):
    return b[0] / b[1] * exp(-0.5 * ((x - b[2]) / b[1]) ** 2)


@ti.func
def gauss(b: ti.template(), x):
    return b[0] * exp(-b[1] * x) + b[2] * exp(-(((x - b[3]) / b[4]) ** 2)) + b[5] * exp(-(((x - b[6]) / b[7]) ** 2))


@ti.func
def cubics(b: ti.template(), x):
    return (b[0] + x * (b[1] + x * (b[2] + x * b[3]))) / (1 + x * (b[4] + x * (b[5] + x * b[6])))


@ti.func
def kirby2(b: ti.template(), x):
    return (b[0] + x * (b[1] + x * b[2])) / (1 + x * (b[3] + x * b[4]))


@ti.func
def lanczos(b: ti.template(), x):
    return b[0] * exp(-b[1] * x) + b[2] * exp(-b[3] * x) + b[4] * exp(-b[5] * x)


@ti.func
def mgh09(b: ti.template(), x):
    return b[0] * (x * x + x * b[1]) / (x * x + x * b[2] + b[3])


@ti.func
def mgh10(b: ti.template(), x):
    return b[0] * exp(b[1] / (x + b[2]))


@ti.func
def mgh17(b: ti.template(), x):
    return b[0] + b[1] * exp(-x * b[3]) + b[2] * exp(-x * b[4])


@ti.func
def misra1b(b: ti.template(), x):
    return b[0] * (1 - (1 + b[1] * x / 2) ** -2)


@ti.func
def misra1c(b: ti.template(), x):
    return b[0] * (1 - (1 + 2 * b[1] * x) ** -0.5)


@ti.func
def misra1d(b: ti.template(), x):
    return b[0] * b[1] * x / (1 + b[1] * x)


@ti.func
def rat42(b: ti.template(), x):
    return b[0] / (1 + exp(b[1] - b[2] * x))


@ti.func
def rat43(b: ti.template(), x):
    return b[0] / (1 + exp(b[1] - b[2] * x)) ** (1 / b[3])


@ti.func
def roszman1(b: ti.template(), x):
    return b[0] - b[1] * x - ti.atan2(b[2], x - b[3]) / pi


MODELS = {
    "Bennett5": bennett5, "BoxBOD": misra1a, "Chwirut1": chwirut, "Chwirut2": chwirut, "DanWood": danwood, "Eckerle4": eckerle4,
    "ENSO": enso, "Gauss1": gauss, "Gauss2": gauss, "Gauss3": gauss, "Hahn1": cubics, "Kirby2": kirby2, "Lanczos1": lanczos,
    "Lanczos2": lanczos, "Lanczos3": lanczos, "MGH09": mgh09, "MGH10": mgh10, "MGH17": mgh17, "Misra1a": misra1a,
    "Misra1b": misra1b, "Misra1c": misra1c, "Misra1d": misra1d, "Rat42": rat42, "Rat43": rat43, "Roszman1": roszman1,
    "Thurber": cubics,
}  # fmt: skip


@ti.kernel
def nelson(b: ti.types.ndarray(), x: ti.types.ndarray(), y: ti.types.ndarray(), r: ti.types.ndarray()):
    for i in range(r.shape[0]):
        r[i] = b[0] - b[1] * x[i, 0] * exp(-b[2] * x[i, 1]) - ti.log(y[i])


def problem(name):
    """A problem's kernel, which takes (b, x, y, r), and its numbers from NIST."""
    numbers = {key: np.array(value) for key, value in PROBLEMS[name].items()}
    if name == "Nelson":
        return nelson, numbers
    model = MODELS[name]

    @ti.kernel
    def residuals(b: ti.types.ndarray(), x: ti.types.ndarray(), y: ti.types.ndarray(), r: ti.types.ndarray()):
        for i in range(r.shape[0]):
            r[i] = model(b, x[i]) - y[i]

    return residuals, numbers


def digits(found, certified):
    """How many digits of all numbers are right: 0 to 11, as in Ceres' comparison."""
    with np.errstate(divide="ignore"):
        return float(np.clip(-np.log10(np.abs(found - certified) / np.abs(certified)), 0, 11).min())


PROBLEMS = json.loads((Path(__file__).parent / "nist" / "problems.json").read_text(encoding="utf-8"))
