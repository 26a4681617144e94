"""Params and outputs as users give them: checked, named, and brought into one flat list.

A parameter or output is a field, an array among ``args``, or the name of a kernel argument; lists, tuples and dicts of
those give the result its structure.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from taichi_ext import backend
from taichi_ext.errors import InvalidArgumentError, raise_problem, shown, suggestion, unexpected
from taichi_ext.labels import Label, Labels
from taichi_ext.record.variables import Variable, find_variable, named_numbers, number_shape
from taichi_ext.runtime.python.reached import PythonState


@dataclass(frozen=True)
class Target:
    """One parameter or output: a field or array, an argument by position, the return value, or a Python number."""

    kind: str  # "field", "array", "argument", "return" or "constant"; "gradient" for the rows of H
    name: Label | str  # in messages
    field: Any = None
    position: int = -1
    argument: str = ""
    variable: Variable | None = None  # holds the Python number
    shape: tuple[int, ...] = ()  # of the Python number
    held: object = None  # key of the Python number's value, equal for equal values


Flat = tuple[list[tuple[str, Any]], Callable[[list[Any]], Any]]  # leaves by path, and the rebuilding function


def flatten(tree: object, what: str = "", path: str = "", outer: tuple[int, ...] = ()) -> Flat:
    """The leaves of nested lists, tuples and dicts with their paths, and a function that rebuilds the structure.

    ``what`` is the word used in messages, ``outer`` are the ids of the structures around this one.
    """
    if id(tree) in outer:
        raise InvalidArgumentError(f"{what}{path} contains itself; give a structure without cycles.")
    inside = (*outer, id(tree))
    if isinstance(tree, (list, tuple)):
        parts = [flatten(item, what, f"{path}[{i}]", inside) for i, item in enumerate(tree)]
        kind = type(tree)
        return _join(parts, (lambda v: kind(*v)) if hasattr(tree, "_fields") else kind)
    if isinstance(tree, dict):
        parts = [flatten(item, what, f"{path}[{key!r}]", inside) for key, item in tree.items()]
        keys = tuple(tree)  # as they are now: the user's dict may change before values are put back
        return _join(parts, lambda values: dict(zip(keys, values, strict=True)))
    if isinstance(tree, backend.StructField):
        real = {k: m for k, m in tree.field_dict.items() if backend.has_real(m)} or tree.field_dict
        parts, members = [flatten(item, what, f"{path}.{key}") for key, item in real.items()], tuple(real)
        return _join(parts, lambda values: dict(zip(members, values, strict=True)))
    return [(path, backend.unwrapped(tree))], lambda values: values[0]


def _join(parts: list[Flat], make: Callable[[list[Any]], Any]) -> Flat:
    leaves = [leaf for part, _ in parts for leaf in part]

    def rebuild(values: list[Any]) -> Any:
        rebuilt, at = [], 0
        for part, inner in parts:
            rebuilt.append(inner(values[at : at + len(part)]))
            at += len(part)
        return make(rebuilt)

    return leaves, rebuild


class KernelCall:
    """The subject of differentiation: a kernel with its arguments, or a Python function that launches kernels.

    ``given`` are the arguments of the call. ``args`` and ``names`` have the members of structs and argument packs that
    a kernel takes in place of these.
    """

    def __init__(self, kernel: Any, args: tuple[Any, ...]) -> None:
        self.function = kernel
        self.given = self.args = backend.unwrapped_args(args)
        self.labels = Labels(kernel)
        bound = backend.primal_kernel(kernel)
        self.kernel, self._owner = bound if bound is not None else (None, ())
        self._leaves = () if self.kernel is None else backend.leaf_arguments(self.kernel)[len(self._owner) :]
        self._check_args_kind()
        check_kernel(kernel)
        function = self.kernel.func if self.kernel is not None else kernel
        self.name = getattr(function, "__qualname__", repr(kernel)).split("<locals>.")[-1]
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self.names = [leaf.name for leaf in self._leaves]
        if self.kernel is None:
            self.names = [p.name for p in self._parameters() if p.kind in positional]
        self._check_args()

    def python_state(self) -> PythonState | None:
        """What a pipeline can access in Python, as it is now; kernels change none of it."""
        return PythonState(self.function, self.args) if self.kernel is None else None

    def with_args(self, args: tuple[Any, ...]) -> KernelCall:
        """The same with other arguments."""
        call = self._copy()
        call.given = call.args = backend.unwrapped_args(args)
        call._check_args_kind()
        if not self.names and not args:
            return self
        call._check_args()
        return call

    def _copy(self) -> KernelCall:
        """The same as ``copy.copy``, in a fraction of the time."""
        call = object.__new__(KernelCall)
        call.__dict__.update(self.__dict__)
        return call

    def pattern(self) -> KernelCall:
        """The same for ``of`` alone: it keeps neither the kernel's owner nor its arguments alive."""
        call = self._copy()
        call.function, call._owner = None, ()
        call.given = call.args = ()
        return call

    def of(self, kernel: Any, args: tuple[object, ...]) -> KernelCall:
        """A call of a kernel or function that this is a pattern for."""
        call = self._copy()
        bound = backend.primal_kernel(kernel)
        call.function, call._owner = kernel, () if bound is None else bound[1]
        return call.with_args(args)

    @property
    def full_args(self) -> tuple[Any, ...]:
        """The arguments as the kernel takes them, its object included."""
        return (*self._owner, *self.given)

    @property
    def first_position(self) -> int:
        """The position of the first of ``args`` among the kernel's leaf arguments."""
        return len(self._owner)

    def run(self, args: tuple[Any, ...]) -> Any:
        """Call the kernel or function without derivatives, with these in place of ``args``."""
        if not any(leaf.path for leaf in self._leaves):
            return self.function(*args)
        assert self.kernel is not None
        values = backend.with_leaf_values(self.kernel, (*self._owner, *args))
        return self.function(*values[len(self._owner) :])

    def _parameters(self) -> list[inspect.Parameter]:
        try:
            return list(inspect.signature(self.function).parameters.values())
        except (TypeError, ValueError):
            return []

    def _check_args_kind(self) -> None:
        if not isinstance(self.args, (tuple, list)):
            raise unexpected("args", self.args, "a tuple with the arguments of the call")

    def _check_args(self) -> None:
        if self.kernel is None:
            self._check_call()
            for position, value in enumerate(self.args):
                raise_problem(f"args[{position}] of {self.name}", backend.ended_problem(value))
            return
        arguments = backend.arguments(self.kernel)[len(self._owner) :]
        if len(self.given) != len(arguments):
            raise InvalidArgumentError(
                f"{self.name} takes {len(arguments)} arguments ({', '.join(a.name for a in arguments) or 'none'}); "
                f"args has {len(self.given)}."
            )
        for position, (argument, value) in enumerate(zip(arguments, self.given, strict=True)):
            problem = backend.argument_problem(argument.annotation, value)
            raise_problem(f"args[{position}] ({argument.name!r} of {self.name})", problem)
        self.args = backend.leaf_values(self.kernel, self.full_args)[len(self._owner) :]
        for leaf, value in zip(self._leaves, self.args, strict=True):
            problem = backend.argument_problem(leaf.annotation, value) if leaf.path else ""
            raise_problem(f"args[{leaf.position - len(self._owner)}] ({leaf.name!r} of {self.name})", problem)

    def _check_call(self) -> None:
        """Raise where Python would not call the function with these arguments."""
        try:
            signature = inspect.signature(self.function, follow_wrapped=False)
        except (TypeError, ValueError):  # a function written in C
            return
        try:
            signature.bind(*self.args)
        except TypeError as error:
            raise InvalidArgumentError(
                f"{self.name}{signature} cannot be called with the {len(self.args)} arguments in args: {error}."
            ) from None

    def annotation(self, target: Target) -> object:
        if self.kernel is None or target.position < 0:
            return None
        return self._leaves[target.position].annotation

    # --- targets

    def resolve(self, what: str, path: str, leaf: Any) -> Target:
        """A leaf of params or outputs as a target; ``what`` is the word used in messages."""
        place = f"{what}{path}"
        if isinstance(leaf, str):
            return self._resolve_name(place, leaf)
        if isinstance(leaf, backend.Field):
            return _resolve_field(place, leaf, self.labels)
        raise_problem(place, backend.array_problem(leaf) if backend.is_array(leaf) else backend.foreign_problem(leaf))
        if not backend.is_array(leaf):
            if hasattr(leaf, "__dlpack__"):
                raise InvalidArgumentError(
                    f"{place} is a {type(leaf).__module__}.{type(leaf).__name__}, which Taichi does not take; pass "
                    "np.from_dlpack(a) or torch.from_dlpack(a) in args, which share its memory, and name that."
                )
            raise unexpected(
                place, leaf, f"a ti.field, an array that is in args, or the name of a kernel argument{_hint(leaf)}"
            )
        for position, value in enumerate(self.args):
            if backend.is_same_array(value, leaf):
                name = self.names[position] if position < len(self.names) else str(position)
                return Target("argument", f"{place} (array argument {name!r})", None, position, name)
        if self.kernel is None:
            return Target("array", self.labels.target(place, leaf, "array"), leaf)
        raise InvalidArgumentError(
            f"{place} is an array of shape {tuple(leaf.shape)} that is not among args; pass the same object in "
            "args=(...)."
        )

    def _resolve_name(self, place: str, name: str) -> Target:
        is_argument = name in self.names
        if not is_argument and (self.kernel is not None or all(p.name != name for p in self._parameters())):
            return self._resolve_constant(place, name)
        position = self.names.index(name) if is_argument else len(self.args)
        if position >= len(self.args):
            raise InvalidArgumentError(
                f"{place} is {name!r}, an argument of {self.name} that has no value in args. Give it one there; "
                "args are passed by position, so make it an argument that takes its value by position."
            )
        if isinstance(self.args[position], backend.Field):
            return replace(_resolve_field(place, self.args[position], self.labels), position=position, argument=name)
        return Target("argument", f"{place} (argument {name!r})", None, position, name)

    def _resolve_constant(self, place: str, name: str) -> Target:
        """The Python number that a kernel, or one that the function launches, reads by this name."""
        members = [n for n in self.names if n.startswith(f"{name}.")]
        if members:
            raise InvalidArgumentError(
                f"{place} is {name!r}, a struct or argument pack that {self.name} takes; name the members that are "
                f"meant: {', '.join(map(repr, members))}."
            )
        variable = find_variable(name, self.function, self._bound)
        if variable is None:
            known = ", ".join(repr(n) for n in self.names) or "none"
            owner = name.split(".")[0]
            if "." in name and owner in self.names:
                hint = f" {owner!r} is an argument; give the object itself a name that {self.name} sees."
            else:
                numbers = named_numbers(self.function, self._bound)
                hint = suggestion(name, [*self.names, *numbers]) + self.known_numbers
            raise InvalidArgumentError(
                f"{place} is {name!r}, which is not an argument of {self.name} (arguments: {known}), and no Python "
                f"number that it reads by this name.{hint}"
            )
        value = variable.read()
        shape = number_shape(value)
        if shape is None:
            if isinstance(value, backend.Field):
                problem = "a field; give the object itself, without quotes"
            elif backend.is_array(value):
                problem = "an array; pass it as an argument and give the object itself, or make it a tuple of numbers"
            elif isinstance(value, backend.Struct):
                problem = f"a struct; name the members that are meant: {', '.join(f'{name}.{m}' for m in value.keys)}"
            else:
                problem = f"{shown(value)}; expected a number, a ti.Vector or a tuple of numbers"
            raise InvalidArgumentError(f"{place} is {name!r}, which is the name of {problem}.")
        label = f"{place} (the Python number {name})"
        held = (variable.key, backend.frozen(value))
        return Target("constant", label, variable=variable, shape=shape, held=held, argument=name)

    @property
    def known_numbers(self) -> str:
        """A sentence with the names of Python numbers that can be parameters; empty where there are none."""
        numbers = named_numbers(self.function, self._bound)
        return f" Numbers that it may read: {', '.join(map(repr, numbers))}." if numbers else ""

    @property
    def _bound(self) -> tuple[object, ...]:
        """The object that the kernel or function is bound to."""
        return (self.function.__self__,) if inspect.ismethod(self.function) else self._owner

    def current(self, target: Target) -> Target:
        """A target in this call: for an argument that is a field, the field passed in this call."""
        if target.variable is not None:
            return self._resolve_constant(str(target.name).split(" (")[0], target.argument)
        if target.kind == "argument" and target.position >= len(self.args):  # which had a value before
            return self._resolve_name(str(target.name).split(" (")[0], target.argument)
        if not 0 <= target.position < len(self.args):
            return target
        value = self.args[target.position]
        if value is target.field or not (target.kind == "field" or isinstance(value, backend.Field)):
            return target
        return self._resolve_name(f"args[{target.position}]", self.names[target.position])

    def return_target(self) -> Target:
        if self.kernel is None:
            raise InvalidArgumentError(
                f"outputs is None, which means a kernel's return value, but {self.name} is a Python function; name the "
                "fields or arrays it fills."
            )
        if self.kernel.return_type is None:
            raise InvalidArgumentError(f"outputs is None, but {self.name} returns nothing; name the fields it writes.")
        return Target("return", f"the return value of {self.name}")

    def value(self, target: Target) -> Any:
        """The field, array or number that a target is in this call."""
        return target.field if target.kind in ("field", "array") else self.args[target.position]

    def is_value(self, target: Target) -> bool:
        """Whether the target is an argument passed by value: a scalar, vector or matrix."""
        if target.variable is not None:
            return True
        is_array = backend.is_array(self.args[target.position]) if target.kind == "argument" else True
        if is_array and self.kernel is not None and target.kind == "argument":
            is_array = backend.is_array_annotation(self.annotation(target))
        return not is_array

    def value_shape(self, target: Target) -> tuple[int, ...]:
        """Shape of an argument passed by value, or of a Python number."""
        if target.variable is not None:
            return target.shape
        if self.kernel is None:
            shape = number_shape(self.args[target.position])
            if shape is None:
                raise InvalidArgumentError(
                    f"{target.name} is {shown(self.args[target.position])}; an argument of a Python function that is a "
                    "parameter is a number, a ti.Vector, a tuple of numbers, an array or a field."
                )
            return shape
        kind = self.annotation(target)
        if isinstance(kind, backend.MatrixType):
            dtype, shape = kind.dtype, tuple(kind.get_shape())
        elif backend.is_scalar_type(kind):
            dtype, shape = kind, ()
        else:
            raise InvalidArgumentError(
                f"{target.name} has the type {type(kind).__name__}; only scalar, vector, matrix and array arguments "
                "can be parameters."
            )
        if not backend.is_real(backend.cook_dtype(dtype)):
            raise InvalidArgumentError(f"{target.name} is an integer; only real numbers have a derivative.")
        return shape

    def return_shape(self) -> tuple[int, ...]:
        assert self.kernel is not None  # a Python function has no outputs of this kind
        return backend.return_shape(self.kernel)

    def return_dtype(self) -> backend.DataType:
        assert self.kernel is not None
        dtype = backend.return_dtype(self.kernel)
        if dtype is None or not backend.is_real(dtype):
            raise InvalidArgumentError(
                f"{self.name} returns {backend.type_names(self.kernel.return_type)}; its Jacobian needs numbers, "
                "vectors or matrices of one real type, and no struct. Return several of these, or write to a field."
            )
        return dtype


def _hint(leaf: object) -> str:
    """A hint for an object that is not a field, array or name, such as a set of fields; empty if there is none."""
    if isinstance(leaf, (set, frozenset)) or (hasattr(leaf, "__iter__") and not hasattr(leaf, "__array__")):
        return "; put several into a list, tuple or dict" if not isinstance(leaf, (bytes, backend.Matrix)) else ""
    return ""


def _resolve_field(place: str, field: Any, labels: Labels) -> Target:
    problem = backend.ended_problem(field)
    if problem:
        name = labels.name(field)
        raise InvalidArgumentError(f"{place}{f' (field {name})' if name else ''} {problem}.")
    if not backend.is_placed(field):
        name = labels.name(field)
        what = f"the field {name}, which is" if name else "a field that is"
        raise InvalidArgumentError(f"{place} is {what} not placed; give it a shape or place it in a root.")
    if not backend.is_real(field.dtype):
        raise InvalidArgumentError(
            f"{labels.target(place, field, 'field')} has type {field.dtype.to_string()}; only fields of real numbers "
            "have a derivative. Use ti.f32 or ti.f64."
        )
    return Target("field", labels.target(place, field, "field"), field)


def check_not_ended(what: str, *items: object) -> None:
    """Raise for a field or ti.ndarray that no longer exists."""
    for item in items:
        problem = backend.ended_problem(item)
        if problem:
            name = "" if "(" in what or not isinstance(item, backend.Field) else Labels().name(item)
            raise InvalidArgumentError(f"{what}{f' (field {name})' if name else ''} {problem}.")


# Whether something is a kernel or a pipeline, and what to give instead where it is not.


def check_initialised() -> None:
    """Raise before ``ti.init``, and after ``ti.reset``."""
    if backend.program() is None:
        raise InvalidArgumentError("Taichi is not initialised; call ti.init(...) first.")


def check_kernel(kernel: object) -> None:
    """Raise unless the object is a kernel or a pipeline."""
    raise_problem("kernel is", _kernel_problem(kernel))


def _kernel_problem(kernel: object) -> str:
    """Why an object is not a kernel or pipeline, and what to give instead; empty if it is one."""
    foreign = backend.foreign_problem(kernel)
    if foreign:
        return foreign.removeprefix("is ")
    bound = backend.primal_kernel(kernel)
    name = getattr(kernel, "__qualname__", "").split("<locals>.")[-1]
    if bound is not None:
        return _bound_problem(kernel, name, bound[0])
    if isinstance(kernel, type):
        return f"the class {name}; give a kernel or method of one of its objects"
    if not callable(kernel):
        return f"{shown(kernel)}; expected a @ti.kernel or a function that launches kernels, not its result"
    func = backend.taichi_func(kernel)
    if isinstance(kernel, types.BuiltinFunctionType):
        return (
            f"Python's built-in {name}, which launches no kernel; give a @ti.kernel or a function that launches kernels"
        )
    if func is not None:
        kind = "ti.real_func" if func.is_real_function else "ti.func"
        return f"the {kind} {name or kernel!r}, which runs in kernels only; give a @ti.kernel that calls it"
    function = kernel
    while isinstance(function, functools.partial):
        function = function.func
    for kind, is_kind in _DEFERRED.items():
        if is_kind(function) or is_kind(getattr(function, "__call__", None)):  # noqa: B004
            return f"the {kind} {name or shown(kernel)}, which does not run when it is called; give a plain function"
    return ""


_DEFERRED = {
    "coroutine function": inspect.iscoroutinefunction,
    "generator function": inspect.isgeneratorfunction,
    "asynchronous generator function": inspect.isasyncgenfunction,
}


def _bound_problem(kernel: object, name: str, primal: Any) -> str:
    if backend.is_reverse(primal):
        return "the gradient of a kernel (kernel.grad); give the kernel itself"
    bound = backend.bound(kernel)
    if bound is not None and not hasattr(bound[1], "_data_oriented"):
        return f"{name}, a method of a plain class; decorate {type(bound[1]).__name__} with @ti.data_oriented"
    if backend.is_class_kernel(primal) and backend.is_decorated(kernel):  # Taichi does not call it either
        return f"{name}, a method without its object; give the method of an object, such as solver.step"
    return ""
