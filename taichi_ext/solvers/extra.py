"""Libraries that only some functions need, each with the extra of this package that installs it."""

from __future__ import annotations

import importlib
from typing import Any

_EXTRAS = {"scipy": ("SciPy", "scipy"), "torch": ("PyTorch", "torch"), "matplotlib": ("matplotlib", "plot")}
_EXTRAS["cvxopt"] = ("CVXOPT", "cholmod")


def required(module: str, user: str) -> Any:
    """A module of one of these libraries; raises ImportError, which names the user and the extra, without it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        library, extra = _EXTRAS[module.split(".")[0]]
        raise ImportError(
            f"{user} needs {library}, which is not installed: python -m pip install '.[{extra}]' in a clone of "
            "taichi_ext"
        ) from error


def require_scipy(module: str, user: str) -> Any:
    """A module of SciPy; raises where it is not installed."""
    return required(f"scipy.{module}", user)
