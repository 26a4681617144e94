"""Prepared forms of calls, and a warning if code is prepared repeatedly, as for a function that is new each time."""

from __future__ import annotations

import inspect
import os
import types
import weakref
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple

from taichi_ext import backend
from taichi_ext.api.plans.plan import Plan
from taichi_ext.cached import Bounded, ByIdentity
from taichi_ext.errors import INNER
from taichi_ext.labels import is_library_module, plain_function
from taichi_ext.runtime.python.dual_numbers import warn_at

EVERY = 8  # preparations of the same code, for the same params and outputs, per warning
_MOST_PLANS = 32  # of one function of one owner, or of one piece of code
_Plans = Bounded[Hashable, Plan]
_Count = tuple[list[weakref.ref[Any]], int]  # the fields and arrays that are named, and how often


class PlanTable:
    """The plans of the Taichi program that runs, by owner, function and key; used by one thread at a time.

    A plan refers neither to the owner nor to the function, so weak references are enough: a plan is dropped when one of
    them is collected, and nothing is left on the user's objects.
    """

    def __init__(self) -> None:
        self._owners: ByIdentity[ByIdentity[_Plans]] = ByIdentity()
        self._counts: ByIdentity[Bounded[Hashable, _Count]] = ByIdentity()  # of preparations, by code and key
        self._program: Callable[[], object] = lambda: None

    def find(self, origin: Origin, key: Hashable) -> Plan | None:
        """The form prepared for the same owner, function and key, or None."""
        program = backend.program()
        if program is None or self._program() is not program:
            self._owners = ByIdentity()
            return None
        functions = self._owners.get(origin.owner)
        plans = None if functions is None else functions.get(origin.function)
        return None if plans is None else plans.get(key)

    def keep(self, kernel: object, origin: Origin, key: Hashable, plan: Plan) -> None:
        """Keep a new plan of a kernel or pipeline; warn where the same code has been prepared many times."""
        self._program = weakref.ref(backend.program())
        new_plans, is_kept = partial(_Plans, _MOST_PLANS), True
        try:
            functions = self._owners.get_or_make(origin.owner, ByIdentity[_Plans])
            functions.get_or_make(origin.function, new_plans)[key] = plan
        except TypeError:  # one of them cannot be referred to weakly
            is_kept = False
        function = plain_function(kernel)
        if function is None or str(function.__module__).split(".")[0] in INNER:
            return  # a pipeline of this package's own, as torch_function has: the user cannot make it once
        count = self._count(function.__code__, key, plan)
        if count % EVERY == 0:
            frame, code = backend.user_frame(), function.__code__
            if frame is None or is_library_module(str(frame.f_globals.get("__name__"))):  # called by a pool of threads
                place = code.co_filename, code.co_firstlineno
            else:
                place = frame.f_code.co_filename, frame.f_lineno
            warn_at(_message(function, origin, count, is_kept=is_kept), place)

    def _count(self, code: types.CodeType, key: Hashable, plan: Plan) -> int:
        """How often code was prepared for the same params, outputs and options, with this time."""
        counts = self._counts.get_or_make(code, partial(Bounded[Hashable, _Count], _MOST_PLANS))
        targets = (*plan.prepared.params, *plan.prepared.outputs)
        fields = [target.field for target in targets if target.field is not None]
        known, count = counts.pop(key, ([], 0))
        is_same = [id(reference()) for reference in known] == list(map(id, fields))
        counts[key] = (known if is_same else list(map(weakref.ref, fields))), 1 + count * is_same
        return counts[key][1]


def _message(function: types.FunctionType, origin: Origin, count: int, *, is_kept: bool) -> str:
    code = function.__code__
    name = function.__qualname__.split("<locals>.")[-1]
    reason = "A prepared form is kept as long as its function, or the object of a method, exists: 32 forms of each."
    if not is_kept:
        kind = type(origin.owner).__name__
        reason = f"Nothing is kept for an object of type {kind}, which takes no weak references (see __slots__)."
    return (
        f"{name} ({os.path.basename(code.co_filename)}, line {code.co_firstlineno}) was prepared {count} times for the "
        f"same params and outputs: each time its kernels are compiled, and Taichi keeps them. {reason} Make a "
        "Jacobian(kernel, params, outputs) once and call that, or give the same function at each call: define it once, "
        "outside of the loop, and pass what changes in args=."
    )


# The keys by which ``jacobian`` finds the prepared form of an earlier call.

_DEEPEST = 100  # levels of a structure that are compared; a structure may contain itself


class Origin(NamedTuple):
    """A kernel or pipeline, however it was reached."""

    owner: object  # the object of a bound method, else the kernel or function itself
    function: Any


def origin_of(kernel: object) -> Origin:
    """The owner and the function of a kernel or pipeline."""
    bound = backend.primal_kernel(kernel)
    if bound is not None:
        # not the Kernel behind a decorated function: Taichi keeps every Kernel for ever
        owner = bound[1][0] if bound[1] else kernel if backend.is_decorated(kernel) else bound[0]
        return Origin(owner, bound[0])
    if inspect.ismethod(kernel):
        return Origin(kernel.__self__, kernel.__func__)
    return Origin(kernel, kernel)


def structure_key(tree: object, args: tuple[object, ...], depth: int = 0) -> object:
    """Equal for two calls that name the same fields, argument positions and names in the same structure."""
    if not isinstance(args, (tuple, list)) or depth > _DEEPEST:
        return id(tree)
    tree = backend.unwrapped(tree)
    if isinstance(tree, (list, tuple)):
        return (type(tree), *(structure_key(t, args, depth + 1) for t in tree))
    if isinstance(tree, dict):
        return ("dict", *((k, structure_key(v, args, depth + 1)) for k, v in tree.items()))
    if isinstance(tree, backend.StructField):
        return ("struct", *((k, structure_key(v, args, depth + 1)) for k, v in tree.field_dict.items()))
    if isinstance(tree, str) or tree is None:
        return tree
    if isinstance(tree, backend.Field):
        return backend.field_identity(tree)  # components are other objects each time
    for position, value in enumerate(args):
        if backend.is_same_array(backend.unwrapped(value), tree):
            return ("position", position)
    return id(tree)
