"""The models of NIST's Statistical Reference Datasets for nonlinear regression, by parameters ``b`` at ``x``."""

import json
from pathlib import Path

import numpy as np
import taichi as ti
from kernel_texts import kernels_of

MODELS = {
    "Bennett5": "b[0] * (b[1] + x) ** (-1 / b[2])",
    "BoxBOD Misra1a": "b[0] * (1 - exp(-b[1] * x))",
    "Chwirut1 Chwirut2": "exp(-b[0] * x) / (b[1] + b[2] * x)",
    "DanWood": "b[0] * x ** b[1]",
    "ENSO": "b[0] + b[1] * ti.cos(2 * pi * x / 12) + b[2] * ti.sin(2 * pi * x / 12)"
    " + b[4] * ti.cos(2 * pi * x / b[3]) + b[5] * ti.sin(2 * pi * x / b[3])"
    " + b[7] * ti.cos(2 * pi * x / b[6]) + b[8] * ti.sin(2 * pi * x / b[6])",
    "Eckerle4": "b[0] / b[1] * exp(-0.5 * ((x - b[2]) / b[1]) ** 2)",
    "Gauss1 Gauss2 Gauss3": "b[0] * exp(-b[1] * x) + b[2] * exp(-(((x - b[3]) / b[4]) ** 2)) + b[5] * exp(-(((x - b[6]) / b[7]) ** 2))",
    "Hahn1 Thurber": "(b[0] + x * (b[1] + x * (b[2] + x * b[3]))) / (1 + x * (b[4] + x * (b[5] + x * b[6])))",
    "Kirby2": "(b[0] + x * (b[1] + x * b[2])) / (1 + x * (b[3] + x * b[4]))",
    "Lanczos1 Lanczos2 Lanczos3": "b[0] * exp(-b[1] * x) + b[2] * exp(-b[3] * x) + b[4] * exp(-b[5] * x)",
    "MGH09": "b[0] * (x * x + x * b[1]) / (x * x + x * b[2] + b[3])",
    "MGH10": "b[0] * exp(b[1] / (x + b[2]))",
    "MGH17": "b[0] + b[1] * exp(-x * b[3]) + b[2] * exp(-x * b[4])",
    "Misra1b": "b[0] * (1 - (1 + b[1] * x / 2) ** -2)",
    "Misra1c": "b[0] * (1 - (1 + 2 * b[1] * x) ** -0.5)",
    "Misra1d": "b[0] * b[1] * x / (1 + b[1] * x)",
    "Nelson": "b[0] - b[1] * at[i, 0] * exp(-b[2] * at[i, 1])",
    "Rat42": "b[0] / (1 + exp(b[1] - b[2] * x))",
    "Rat43": "b[0] / (1 + exp(b[1] - b[2] * x)) ** (1 / b[3])",
    "Roszman1": "b[0] - b[1] * x - ti.atan2(b[2], x - b[3]) / pi",
}
ARRAYS = "(b: ti.types.ndarray(), at: ti.types.ndarray(), y: ti.types.ndarray(), r: ti.types.ndarray())"


def problem(name):
    """A problem's kernel, which takes (b, x, y, r), and its numbers from NIST."""
    numbers = {key: np.array(value) for key, value in PROBLEMS[name].items()}
    (model,) = (text for names, text in MODELS.items() if name in names.split())
    lines = [f"r[i] = {model} - ti.log(y[i])"] if name == "Nelson" else ["x = at[i]", f"r[i] = {model} - y[i]"]
    table = "\n        ".join(["residuals:\n    for i in range(r.shape[0]):", *lines])
    return kernels_of(table, arguments=ARRAYS, exp=ti.exp, pi=np.pi)["residuals"], numbers


def digits(found, certified):
    """How many digits of all numbers are right: 0 to 11, as in Ceres' comparison."""
    with np.errstate(divide="ignore"):
        return float(np.clip(-np.log10(np.abs(found - certified) / np.abs(certified)), 0, 11).min())


PROBLEMS = json.loads((Path(__file__).parent / "nist" / "problems.json").read_text(encoding="utf-8"))
