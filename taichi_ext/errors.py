"""Exceptions and warnings that users see."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn, ParamSpec, TypeVar

from taichi_ext.host import RUNTIME, CompilationError

_LONGEST = 100  # characters of a value that a message shows
_RECORDED = ("taichi_ext.program.", "taichi_ext.record.")  # whose values stand for those of a kernel
INNER = ("taichi_ext", RUNTIME.name, "contextlib")  # packages whose frames say nothing to users

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


class UnsupportedError(CompilationError):
    """A construct whose derivative is not known.

    It is raised while a kernel is differentiated.  The message starts with the file, the line and the source text of
    the user's code, and names an alternative.  No derivative is ever guessed or silently zero.
    """


class InvalidArgumentError(ValueError):
    """An argument of a taichi_ext call is invalid; the message names it and the fix."""


def raise_problem(place: str, problem: str) -> None:
    """Raise for an argument that has a problem; there is none where that is empty."""
    if problem:
        raise InvalidArgumentError(f"{place} {problem}.")


class SignatureError(InvalidArgumentError, TypeError):
    """Arguments that do not fit a function, as a keyword that it does not have: a ``TypeError``, too."""


class InvalidRuleError(InvalidArgumentError, CompilationError):
    """A user's rule or edge does not fit the kernel that uses it; the message starts with file and line."""


class EndedFieldError(InvalidArgumentError, CompilationError):
    """A kernel names a field that no longer exists; the message starts with file and line."""


class CheckError(AssertionError):
    """A check with ``raise_on_failure=True`` has failed; the message is its report."""


class ShardError(RuntimeError):
    """A shard could not be computed; the message names it, and the error of its worker.

    Attributes:
        shard: its number.
        best: the best params so far, in ``least_squares``, structured like ``start``; None elsewhere.
    """

    def __init__(self, message: str, shard: int = -1) -> None:
        super().__init__(message)
        self.shard = shard
        self.best: object = None


class InternalError(RuntimeError):
    """A bug in taichi_ext itself, not in the kernel: the message says where it was detected, and what to report."""


class DerivativeWarning(UserWarning):
    """A derivative is well defined but probably not intended, for example a Jacobian that is zero."""


def with_short_traceback(function: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """A public function whose errors show the user's frames alone, without those of this package and of Taichi.

    Arguments that do not fit its signature raise ``SignatureError``; where one that was passed by position is
    invalid, the message gives the order.
    """

    @functools.wraps(function)
    def call(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:  # not of this call
                raise
            raise SignatureError(_misfit(function, args, kwargs)) from None
        except (UnsupportedError, InvalidArgumentError, CheckError) as error:
            if type(error) is InvalidArgumentError:
                text = _renamed(function, str(error))
                error.args = (text + (_order(function, text, len(args)) if len(args) > 2 else ""),)
            raise error.with_traceback(_users_frames(error.__traceback__)) from error.__cause__

    return call


_ELSEWHERE = {  # arguments of other libraries, and what to do here
    "argnums": "Give what to differentiate with respect to as params.",
    "x0": "It starts at the values in the params; store the start in them.",
    **dict.fromkeys(("maxiter", "max_iter", "max_steps"), "Use max_iterations=."),
}


def bound_arguments(
    function: Callable[..., object], args: Sequence[object], keywords: Mapping[str, object]
) -> inspect.BoundArguments:
    """The arguments of a function for kernels by name; raises where they do not fit its signature."""
    try:
        return inspect.signature(function).bind(*args, **keywords)
    except TypeError:
        raise InvalidRuleError(_misfit(function, args, keywords)) from None


def _misfit(function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> str:
    """Why arguments do not fit a signature, and what it is."""
    parameters, places, name = inspect.signature(function).parameters, _places(function), _name(function)
    kinds = {p.kind for p in parameters.values()}
    bare = (p.replace(annotation=p.empty, default=p.empty) for n, p in parameters.items() if n != "self")
    takes = f"{name}({', '.join(f'{p}=' if p.kind is p.KEYWORD_ONLY else str(p) for p in bare)})"
    unknown = next((k for k in kwargs if k not in parameters), None)
    if unknown is not None and inspect.Parameter.VAR_KEYWORD not in kinds:
        advice = f" {_ELSEWHERE[unknown]}" if unknown in _ELSEWHERE else suggestion(unknown, parameters)
        return f"{unknown}={shown(kwargs[unknown])} is no argument of {name}.{advice} It is called as {takes}."
    if len(args) > len(places) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        return f"{shown(args[len(places)])} is given to {name} by position; name the argument: {takes}."
    twice = [k for k in places[: len(args)] if k in kwargs]
    if twice:
        return f"{twice[0]} is given to {name} by position, and again as {shown(kwargs[twice[0]])}; give one: {takes}."
    given = {*places[: len(args)], *kwargs}
    needed = (
        n for n, p in parameters.items() if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    )
    return f"{', '.join(n for n in needed if n not in given)} is missing: {name} is called as {takes}."


def _places(function: Callable[..., object]) -> list[str]:
    """The names of the parameters that can be given by position."""
    parameters = inspect.signature(function).parameters
    return [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _renamed(function: Callable[..., object], message: str) -> str:
    """A message about outputs, which some functions call residuals or energy."""
    parameters = inspect.signature(function).parameters
    name = next((n for n in ("outputs", "residuals", "energy") if n in parameters), "outputs")
    return re.sub(r"^outputs\b", name, message)


def _order(function: Callable[..., object], message: str, count: int) -> str:
    """A sentence with the order of arguments, for a message about one of ``count`` that were passed by position."""
    places = _places(function)
    if not message.startswith(tuple(f"{place}{end}" for place in places[:count] for end in (" ", "["))):
        return ""
    return f" The order is {_name(function)}({', '.join(place for place in places if place != 'self')})."


def _name(function: Callable[..., object]) -> str:
    """The name of a public function as users write it."""
    return function.__qualname__.removesuffix(".__init__")


def _users_frames(trace: TracebackType | None) -> TracebackType | None:
    if trace is None:
        return None
    rest, frame = _users_frames(trace.tb_next), trace.tb_frame
    is_inner = str(frame.f_globals.get("__name__")).split(".")[0] in INNER
    return rest if is_inner else TracebackType(rest, frame, trace.tb_lasti, trace.tb_lineno)


def shown(value: object) -> str:
    """A value as a message shows it: on one line, not too long."""
    parts: Any = value if type(value) in (list, tuple) else (value,)
    if any(type(part).__module__.startswith(_RECORDED) for part in parts):
        return "a value of the kernel"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a repr of the user's own
        text = f"a {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def unexpected(name: str, value: object, expected: str) -> InvalidArgumentError:
    """The error for an argument that is of another kind than expected."""
    return InvalidArgumentError(f"{name} is {shown(value)}; expected {expected}.")


def suggestion(name: str, known: Iterable[str]) -> str:
    """A sentence that gives the name that was probably meant; empty where none is close."""
    lower = {k.lower(): k for k in known}
    close = difflib.get_close_matches(name.lower(), lower, 1)
    return f" Did you mean {lower[close[0]]!r}?" if close else ""


def raise_baked(what: str) -> NoReturn:
    """Raise because the compiled code depends on a Python number that is a parameter."""
    raise UnsupportedError(
        f"{what} is computed here from a Python number that is a parameter. The compiled code depends on it, as a "
        "whole number or a choice, which has no derivative. Compute it from another number, or, if the number is meant "
        "to be real, write it with a decimal point."
    )
