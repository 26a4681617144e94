"""The runtime of this process and the releases of it that are supported, checked before its internals are imported."""

import functools
import importlib
import os
import sys
import types

VARIABLE = "TAICHI_EXT_RUNTIME"
# Product, oldest release, first release that is not supported, and what is wrong with those before.
RELEASES = {
    "taichi": (
        "Taichi",
        (1, 7, 2),
        (1, 8, 0),
        "it has no force_scalarize_matrix, without which kernels with vectors store wrong numbers",
    ),
    "quadrants": ("Quadrants", (1, 3, 2), (1, 4, 0), "its tracer has other internals"),
}
RULE = (
    "A process has one runtime: Quadrants if quadrants is imported before taichi_ext and taichi is not, else Taichi; "
    f"if neither is imported, the environment variable {VARIABLE}=taichi|quadrants decides"
)


def chosen() -> str:
    """The name of the runtime of this process, by ``RULE``."""
    imported = [name for name in RELEASES if sys.modules.get(name) is not None]
    name = imported[0] if imported else os.environ.get(VARIABLE) or "taichi"
    if name not in RELEASES:
        raise ImportError(f"{VARIABLE} is {name!r}; expected taichi or quadrants.")
    return name


def check_version(name: str, version: tuple[int, ...]) -> None:
    """Raise an ImportError for a release that computes wrong numbers, or whose internals are not known."""
    product, oldest, newest, reason = RELEASES[name]
    if (name == "taichi" and tuple(version) >= oldest) or oldest <= tuple(version) < newest:
        return
    text, first = (".".join(map(str, v)) for v in (version, oldest))
    if tuple(version) >= newest:
        reason = "its internals, on which this package stands, may have moved"
    raise ImportError(
        f"taichi_ext needs {product} {first} or later, and {product} {text} is installed: {reason}. "
        f'Install another one: python -m pip install "{name}>={first},<{newest[0]}.{newest[1]}"'
    )


def load(name: str) -> str:
    """Import the runtime of this process."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ImportError(
            f"{RELEASES[name][0]} is not installed, which this process would use: install it (python -m pip install "
            f"taichi, or .[quadrants] for Quadrants), or choose the other runtime. {RULE}."
        ) from error
    check_version(name, module.__version__)
    return name


NAME = load(chosen())
_OTHERS = RELEASES.keys() - {NAME}


def foreign_problem(obj: object) -> str:
    """The problem with a kernel, field or array of a runtime that is not that of this process, or an empty text."""
    name = _foreign(type(obj)) or (isinstance(obj, types.FunctionType) and _foreign(type(vars(obj).get("_primal"))))
    products = [RELEASES[n][0] for n in (name, NAME) if n]
    return f"is an object of {products[0]}, but this process uses {products[1]}. {RULE}" if name else ""


@functools.cache
def _foreign(kind: type) -> str:
    modules = {base.__module__.split(".")[0] for base in kind.__mro__} & _OTHERS
    return modules.pop() if modules else ""
