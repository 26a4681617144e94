"""How Taichi walks a tree: the state of a walk, and the texts of places in the source that its messages cite."""

# Taichi declares attributes as None that have a value once there is a program and a kernel.
# pyright: reportOptionalMemberAccess=false

from __future__ import annotations

import ast
import contextlib
import re
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

from taichi_ext import host
from taichi_ext.backend.expressions import builder
from taichi_ext.backend.kernels import FusedKernel, short_name, with_functions_in_key
from taichi_ext.backend.lifetime import check_not_ended
from taichi_ext.errors import UnsupportedError
from taichi_ext.host import RUNTIME, Kernel, ti

_RECURSION_LIMIT = 10000


class _Context(host.Context):
    """Places are file, line and the source line, without Taichi's marks, which take longer to write than all else.

    A matrix of Python numbers stays one, where Taichi would make an expression of it. Names are looked up once.
    """

    def __init__(self, places: dict[object, str], **options: Any) -> None:
        super().__init__(**options)
        self._places = places
        self._found: dict[str, object] = {}

    def value_named(self, name: str) -> object:
        for scope in reversed(self.local_scopes):
            if name in scope:
                return scope[name]
        if name not in self._found:
            value = self.global_vars.get(name)
            value = value if isinstance(value, ti.Matrix) else super().value_named(name)
            check_not_ended(value, f"The field {name}")
            self._found[name] = value
        return self._found[name]

    def place_of(self, node: ast.expr | ast.stmt) -> str:
        line = node.lineno
        if line not in self._places:
            assert self.src is not None
            where = f'File "{self.file}", line {line + self.lineno_offset}, in {self.func.func.__name__}:'
            self._places[line] = f"{where}\n{self.src[line - 1].rstrip()}\n"
        return self._places[line]


def make_context(
    function: types.FunctionType,
    source: tuple[str, list[str], int],
    scope: Mapping[str, object],
    *,
    kernel: Kernel | None = None,
    names: Sequence[str] = (),
    arguments: Sequence[object] | None = None,
    argument_features: object = None,
    places: dict[Any, str],
) -> host.ASTTransformerContext:
    """The state of one walk over a function's tree: of ``kernel``, or of a function that is inlined.

    Its parameters have the ``names``, and are the ``arguments``.

    ``places`` keeps the texts of places in the source from one walk to the next.
    """
    own_builder = builder() if kernel is None else None
    options = host.context_options(function, source, scope, kernel, names, arguments, argument_features, own_builder)
    return _Context(places, **options)


def function_context(**options: Any) -> host.ASTTransformerContext:
    """The state of a walk over a function, brief in a generated kernel."""
    kernel = host.current_kernel()
    is_generated = isinstance(kernel, FusedKernel) and kernel.lines > 0
    return _Context({}, **options) if is_generated else host.ASTTransformerContext(**options)


def walk(tree: ast.AST, ctx: host.ASTTransformerContext) -> Any:
    """Trace a rewritten tree; returns the function's result."""
    host.walk_tree(tree, ctx)
    return ctx.return_data


@contextmanager
def deep_recursion(kernel: Kernel) -> Iterator[None]:
    """Allow deep recursion while a kernel is built: inlined functions and long expressions nest deep."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, _RECURSION_LIMIT))
    try:
        yield
    except (RecursionError, host.CompilationError) as error:
        text = host.brief_message(str(error))
        lines = text.splitlines()
        if not isinstance(error, RecursionError) and not any(n.startswith("RecursionError:") for n in lines):
            brief = "".join(lines for lines, _ in groupby(re.split(r'^(?=File ")', text, flags=re.MULTILINE)))
            if isinstance(error, UnsupportedError) and brief != text:  # from endless recursion
                raise UnsupportedError(brief) from error.__cause__
            if text != str(error):
                raise type(error)(text) from error.__cause__
            raise
        place = "\n".join(lines[:2]) + "\n" if len(lines) > 1 else ""
        raise UnsupportedError(
            f"{place}An expression, block or chain of calls of {short_name(kernel)!r} nests deeper than Python can "
            "follow. Compute parts of a long expression in variables, and write recursion as a loop."
        ) from None
    finally:
        sys.setrecursionlimit(before)


# Kernels whose text was generated: traced once, compiled with the settings that they need.


class EmittedKernel(FusedKernel):
    """A generated kernel; it is launched with the arguments of the user's kernel, followed by its own.

    ``source`` is the tree of its definition, the text that the positions of its nodes refer to, and the user's lines
    that messages cite instead.
    """

    def __init__(
        self,
        kernel: Any,
        source: tuple[ast.Module, str, dict[int, str]],
        positions: list[int],
        given: Sequence[object],
        features: tuple[object, ...],
        *,
        hazards: frozenset[str],
        like: Any = None,
    ) -> None:
        super().__init__(kernel, hazards=hazards)
        for made in (kernel, kernel.grad):  # else Taichi keeps every ti.kernel until the process ends
            RUNTIME.state().kernels.remove(made)
        if like is not None:  # the user's kernel, in place of which Taichi launches this one
            self.autodiff_mode = like.autodiff_mode
        self.positions = positions
        tree, self.text, places = source
        self.lines = self.text.count("\n")
        context = make_context(
            kernel.func,
            (kernel.func.__code__.co_filename, self.text.split("\n"), 1),
            dict(host.global_variables(kernel.func)),
            kernel=self,
            arguments=given,
            argument_features=features,
            places=places,
        )
        with with_functions_in_key():
            self.trace(tree, context, kernel.func.__name__, lambda: True)

    def noted(self) -> contextlib.AbstractContextManager[None]:
        """Its Python values are those of the user's kernel, which are known."""
        return contextlib.nullcontext()

    def launch(self, *args: object) -> Any:
        """Run it: ``args`` are those of the user's kernel, then its own; templates among them are left out."""
        return super().launch(*[args[p] for p in self.positions])
