"""Outputs as one vector: raveled in C order, one after the other."""

# pyright knows no types of Taichi, torch and SciPy, nor of arrays of any shape and type.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# The parts of a Jacobian are private to the package, not to its module.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import numpy as np

from taichi_ext import backend
from taichi_ext.api.runs.evaluation import Evaluation
from taichi_ext.api.runs.prepared import values_of


def residual_vector(evaluation: Evaluation) -> np.ndarray:
    """The outputs after a run, in float64."""
    values = values_of(evaluation.prepared, evaluation.call, evaluation.returned)
    return np.concatenate([_raveled(value) for value in values])


def _raveled(value: object) -> np.ndarray:
    """The values of an output, or of a kernel's return: numbers, vectors and matrices."""
    if isinstance(value, (list, tuple)):
        return np.concatenate([_raveled(v) for v in value])
    return np.asarray(backend.as_numpy(value), np.float64).reshape(-1)
