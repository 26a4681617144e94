"""The version of this package."""

import importlib.metadata
import re
from pathlib import Path


def _own_version() -> str:
    """From the installed package; in a checkout that is not installed, from pyproject.toml, where it stands."""
    try:
        return importlib.metadata.version("taichi-ext")
    except importlib.metadata.PackageNotFoundError:
        text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
        return re.findall(r'^version = "(.+)"$', text, re.MULTILINE)[0]


__version__ = _own_version()
