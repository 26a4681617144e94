"""Exceptions and warnings that users see."""

from __future__ import annotations

import taichi as ti


class UnsupportedError(ti.TaichiCompilationError):
    """A construct whose derivative is not known.

    Raised while a kernel is being differentiated; the message starts with the file, the line and the source text of
    the user's code, and says what to do instead.  No derivative is ever guessed or silently zero.
    """


class InvalidArgumentError(ValueError):
    """An argument of a taichi_ext call that cannot be used; the message names it and the mend."""


class InvalidRuleError(InvalidArgumentError, ti.TaichiCompilationError):
    """A user's rule or edge that does not fit the kernel where it is used; the message starts with file and line."""


class CheckError(AssertionError):
    """A check that was told to raise has failed; the message is its report."""


class DerivativeWarning(UserWarning):
    """A derivative that is well defined but probably not what was meant, for example a Jacobian that is zero."""
