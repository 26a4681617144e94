"""A table by identity, and a warning if code is prepared repeatedly because its function is new at each call."""

from __future__ import annotations

import inspect
import os
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Generic, NamedTuple, TypeVar

from taichi_ext import backend
from taichi_ext.api.plans.plan import Plan
from taichi_ext.errors import INNER
from taichi_ext.labels import is_library_module, plain_function
from taichi_ext.runtime.python.dual_numbers import warn_at

Value = TypeVar("Value")


class ByIdentity(Generic[Value]):
    """Values by object, each kept as long as its object exists.

    Unlike ``weakref.WeakKeyDictionary``, it takes objects without a hash, and never takes an object for another one
    that it equals.  A new object at the address of one that is gone finds nothing.
    """

    def __init__(self) -> None:
        self._items: dict[int, tuple[weakref.ref[object], Value]] = {}

    def get(self, obj: object) -> Value | None:
        """The value of an object; None where it has none."""
        item = self._items.get(id(obj))
        return None if item is None or item[0]() is not obj else item[1]

    def set(self, obj: Any, value: Value) -> None:
        """Give an object a value; raises TypeError for one that cannot be referred to weakly."""
        table, number = weakref.ref(self), id(obj)  # weakly, so that the values go at once when the table goes

        def forget(reference: object) -> None:  # called by Python in the middle of anything, so without a lock
            there = table()
            if there is not None and there._items.get(number, (None,))[0] is reference:
                there._items.pop(number, None)

        self._items[number] = weakref.ref(obj, forget), value


EVERY = 8  # preparations of the same code, for the same params and outputs, per warning
_MOST_KEYS = 32  # of one piece of code


class Preparations:
    """Count how often each piece of code was prepared for the same params and outputs."""

    def __init__(self) -> None:  # by code and key, with the fields and arrays that are named
        self._counts: ByIdentity[dict[object, tuple[list[weakref.ref[Any]], int]]] = ByIdentity()

    def note(self, kernel: object, origin: Origin, key: Any, plan: Plan, *, is_kept: bool) -> None:
        """Count a preparation, and warn where there have been many.

        Args:
            kernel: the kernel or pipeline.
            origin: its owner and function.
            key: equal for the same params, outputs and options.
            plan: the prepared form.
            is_kept: whether the plan was kept for the next call with the same owner and function.
        """
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

    def _count(self, code: types.CodeType, key: object, plan: Plan) -> int:
        counts = self._counts.get(code)
        if counts is None:
            counts = {}
            self._counts.set(code, counts)
        targets = (*plan.prepared.params, *plan.prepared.outputs)
        fields = [target.field for target in targets if target.field is not None]
        known, count = counts.pop(key, ([], 0))
        is_same = [id(reference()) for reference in known] == list(map(id, fields))
        while len(counts) >= _MOST_KEYS:
            del counts[next(iter(counts))]
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


# The prepared forms of ``jacobian``, found by owner and function, without keeping either alive.
#
# A plan refers to neither of them, so weak references are enough: a prepared form is dropped when one of them is
# collected, and nothing is left on the user's objects.

_MOST_PLANS = 32  # of one function of one owner


class PlanTable:
    """The plans of the Taichi program that runs; ``find`` and ``keep`` are called by one thread at a time."""

    def __init__(self) -> None:
        self._owners: ByIdentity[ByIdentity[dict[object, Plan]]] = ByIdentity()  # by owner, function and key
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

    def keep(self, origin: Origin, key: Hashable, plan: Plan) -> bool:
        """Keep a plan; False where the owner or the function cannot be referred to weakly, so that nothing is kept."""
        self._program = weakref.ref(backend.program())
        functions = self._owners.get(origin.owner) or ByIdentity()
        plans = functions.get(origin.function) or {}
        try:
            functions.set(origin.function, plans)
            self._owners.set(origin.owner, functions)
        except TypeError:
            return False
        if len(plans) >= _MOST_PLANS:
            del plans[next(iter(plans))]
        plans[key] = plan
        return True
