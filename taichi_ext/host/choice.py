"""The runtime of this process and the releases of it that are supported, checked before its internals are imported."""

import importlib

# Distribution, oldest release, first release that is not supported, and what is wrong with others.
RELEASES = {
    "taichi": (
        "Taichi",
        (1, 7, 2),
        (1, 8, 0),
        "it has no force_scalarize_matrix, without which kernels with vectors store wrong numbers",
    ),
}


def check_version(name: str, version: tuple[int, int, int]) -> None:
    """Raise an ImportError for a release that computes wrong numbers, or whose internals are not known."""
    product, oldest, newest, reason = RELEASES[name]
    if tuple(version) < oldest:
        text, first = (".".join(map(str, v)) for v in (version, oldest))
        raise ImportError(
            f"taichi_ext needs {product} {first} or later, and {product} {text} is installed: {reason}. "
            f'Install a later one: python -m pip install "{name}>={first},<{newest[0]}.{newest[1]}"'
        )


NAME = "taichi"
ti = importlib.import_module(NAME)
check_version(NAME, ti.__version__)
