"""SciPy, which only the solvers need."""

from __future__ import annotations

import importlib
from typing import Any


def require_scipy(module: str, user: str) -> Any:
    """A module of SciPy; raises where it is not installed."""
    try:
        return importlib.import_module(f"scipy.{module}")
    except ImportError as error:
        raise ImportError(
            f"{user} needs SciPy, which is not installed: python -m pip install 'taichi-ext[scipy]'"
        ) from error
