"""The version of this package, and the releases of Taichi that it runs on; checked before anything else is imported."""

import importlib.metadata
import re
from pathlib import Path

import taichi as ti

# force_scalarize_matrix came with 1.7.2. Without it, kernels that use entries of vectors on both sides of a parallel
# loop store wrong numbers, and no error says so.
OLDEST_TAICHI = (1, 7, 2)


def _own_version() -> str:
    """From the installed package; in a checkout that is not installed, from pyproject.toml, where it stands."""
    try:
        return importlib.metadata.version("taichi-ext")
    except importlib.metadata.PackageNotFoundError:
        text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
        return re.findall(r'^version = "(.+)"$', text, re.MULTILINE)[0]


def check_taichi_version(version: tuple[int, int, int]) -> None:
    """Raise an ImportError for releases of Taichi that compute wrong numbers."""
    if tuple(version) < OLDEST_TAICHI:
        text, oldest = (".".join(map(str, v)) for v in (version, OLDEST_TAICHI))
        raise ImportError(
            f"taichi_ext needs Taichi {oldest} or later, and Taichi {text} is installed: it has no "
            "force_scalarize_matrix, without which kernels with vectors store wrong numbers. "
            f'Install a later one: python -m pip install "taichi>={oldest},<1.8"'
        )


check_taichi_version(ti.__version__)
__version__ = _own_version()
