"""``torch_function``: a kernel or pipeline as a differentiable function of torch tensors."""

# pyright knows no types of Taichi, torch and SciPy, nor of arrays of any shape and type.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from taichi_ext import backend
from taichi_ext.api.inputs.arguments import check_not_ended, flatten
from taichi_ext.api.inputs.kernel_checks import check_initialised, check_kernel
from taichi_ext.api.inputs.options import checked_options
from taichi_ext.api.jacobian import value_and_jacobian
from taichi_ext.errors import InvalidArgumentError, shown, suggestion
from taichi_ext.interop.torch_products import (
    Call,
    check_first_order,
    is_traced,
    moving,
    require_torch,
    wants_derivative,
    with_jacobian,
    without_jacobian,
)
from taichi_ext.interop.torch_values import Signature, as_tensor, host_number, returned_tensor
from taichi_ext.labels import Labels
from taichi_ext.runtime.memory.regions import View
from taichi_ext.runtime.memory.shadows import view_of


def torch_function(
    kernel: Callable[..., object],
    inputs: object,
    outputs: object = None,
    *,
    shapes: Mapping[str, object] | None = None,
    max_memory: int | None = None,
    reverse: bool = False,
) -> TorchFunction:
    """A differentiable function of torch tensors that runs a kernel.

    If torch needs a derivative, one launch computes the kernel and its Jacobian J.  ``backward`` multiplies by the
    transpose of J, and forward mode by J.  The kernel runs once per call.  Second derivatives raise an error.

    Args:
        kernel: a ``@ti.kernel``, plain or a bound method, or a Python function that launches kernels.
        inputs: the name of the kernel argument to differentiate with respect to, or a list of names.  They become the
            first arguments of the function, in this order.  A ``ti.field`` instead of a name is filled from the tensor.
            For an argument that the kernel takes by value, pass a tensor of its shape.
        outputs: the name of an array argument that the function returns, or a ``ti.field``; or a list, tuple or dict of
            those, which gives the structure of the result.  None means the kernel's return value.
        shapes: a dict for array arguments that the function allocates, filled with zeros.  Each value is a shape, or a
            function that returns a shape or the tensor to use, which may hold integers.  The parameters of that
            function are kernel arguments, by name.  An output without an entry has the shape and type of the first
            input.  An output that is also an input starts as a copy of it.  Arrays that are no outputs are working
            memory.
        max_memory: see ``jacobian``.
        reverse: for arrays so large that J does not fit into memory.  ``backward`` uses Taichi's own reverse mode, and
            forward mode computes one column at a time.  Taichi's reverse mode is wrong for kernels that overwrite
            values that they have read.  So each gradient is compared with forward mode along a random direction, and an
            error is raised if they differ by more than the square root of the precision.  The kernel runs again for
            this, so it may only read and write its array arguments.

    Returns:
        A function of the inputs, followed by the remaining kernel arguments, in the kernel's order or by name.  Input
        tensors are never written.  Inside ``torch.vmap`` the kernel runs once per item of the batch.

    Raises:
        InvalidArgumentError: inputs, outputs or shapes do not fit the kernel, or torch is not installed.
        UnsupportedError: at the call: the derivative of a construct is not known; a second derivative is needed; or
            Taichi's reverse mode gives a wrong gradient.

    Example:
        >>> import taichi as ti
        >>> import torch
        >>> from taichi_ext import torch_function
        >>> ti.init(arch=ti.cpu, log_level=ti.ERROR)
        >>> @ti.kernel
        ... def blend(x: ti.types.ndarray(), weight: ti.types.ndarray(), total: ti.types.ndarray()):
        ...     for i in range(x.shape[0]):
        ...         total[0] += weight[i] * x[i] ** 2
        >>> weighted_square = torch_function(blend, inputs="x", outputs="total", shapes={"total": 1})
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> weighted_square(x, torch.tensor([3.0, 5.0])).backward()
        >>> x.grad
        tensor([ 6., 20.])
    """
    require_torch()
    return TorchFunction(kernel, inputs, outputs, {} if shapes is None else shapes, max_memory, reverse)


class TorchFunction:
    """The function that ``torch_function`` returns: call it with tensors."""

    def __init__(
        self, kernel: object, inputs: Any, outputs: object, shapes: object, max_memory: int | None, reverse: object
    ) -> None:
        check_kernel(kernel)
        if not isinstance(shapes, Mapping):
            raise InvalidArgumentError(f"shapes is {shown(shapes)}; expected a dict of shapes by name.")
        if not isinstance(reverse, bool):
            raise InvalidArgumentError(f"reverse is {shown(reverse)}; expected True or False.")
        checked_options(max_memory, "auto", None, None)
        self._kernel: Any = kernel  # has a gradient, too, if it is one of Taichi's
        self._max_memory = max_memory
        self._has_jacobian = not reverse
        self._is_checked = False
        bound = backend.primal_kernel(kernel)
        self._signature = Signature.of(kernel)
        self._inputs = _as_list(inputs)
        self._shapes = dict(shapes)
        if outputs is None:
            if bound is None or bound[0].return_type is None:
                raise InvalidArgumentError(
                    f"outputs is None, but {_name(kernel)} returns nothing; name the fields it writes."
                )
            self._outputs: list[Any] = []
            self._rebuild: Callable[[list[Any]], Any] = lambda values: values[0]
        else:
            leaves, self._rebuild = flatten(outputs, "outputs")
            self._outputs = [leaf for _, leaf in leaves]
            if not self._outputs:
                raise InvalidArgumentError("outputs is empty; name at least one argument or field, or None.")
        self._check()
        allocated = {*self._shapes, *(o for o in self._outputs if isinstance(o, str))}
        self._constants = [n for n in self._signature.names if n not in allocated and n not in self._inputs]
        self.__name__ = getattr(kernel, "__name__", type(kernel).__name__)
        self.__doc__ = getattr(kernel, "__doc__", None)

    def __repr__(self) -> str:
        names = [i if isinstance(i, str) else "field" for i in self._inputs]
        return f"torch_function({self.__name__}, inputs={names})"

    def _check(self) -> None:
        for what, items in (("inputs", self._inputs), ("outputs", self._outputs), ("shapes", list(self._shapes))):
            for item in items:
                if isinstance(item, str):
                    self._check_name(what, item)
                else:
                    self._check_field(what, item)
            if len({id(i) if isinstance(i, backend.Field) else i for i in items}) != len(items):
                raise InvalidArgumentError(f"{what} names the same argument or field twice.")
        if not self._inputs:
            raise InvalidArgumentError("inputs is empty; name at least one argument or field.")
        self._check_reverse()

    def _check_name(self, what: str, name: str) -> None:
        if name not in self._signature.names:
            raise InvalidArgumentError(
                f"{what} has {name!r}, which is not an argument of {_name(self._kernel)} (arguments: "
                f"{', '.join(map(repr, self._signature.names)) or 'none'}).{suggestion(name, self._signature.names)}"
            )
        if what == "outputs" and self._signature.is_value(name):
            raise InvalidArgumentError(f"outputs has {name!r}, which is passed by value and cannot be written.")
        if what == "shapes" and name in self._inputs:
            raise InvalidArgumentError(f"shapes has {name!r}, which is an input.")

    def _check_field(self, what: str, field: object) -> None:
        if what == "shapes" or not isinstance(field, backend.Field):
            raise InvalidArgumentError(f"{what} has {shown(field)}; expected the name of an argument or a ti.field.")
        check_not_ended(what, field)
        if not backend.is_real(field.dtype):
            raise InvalidArgumentError(
                f"{what} has {Labels(self._kernel).field(field)}, of type {field.dtype.to_string()}; only real numbers "
                "have a derivative. Use ti.f32 or ti.f64."
            )

    def _check_reverse(self) -> None:
        """Raise where Taichi's reverse mode cannot serve the request."""
        arrays = [*self._inputs, *self._outputs]
        is_reversible = self._outputs and all(isinstance(a, str) and not self._signature.is_value(a) for a in arrays)
        if not self._has_jacobian and (not is_reversible or backend.primal_kernel(self._kernel) is None):
            raise InvalidArgumentError(
                "reverse=True needs one kernel whose inputs and outputs are all array arguments; without it, fields, "
                "numbers and pipelines work too."
            )

    # --- the call

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run the kernel on tensors; see ``torch_function``."""
        torch = require_torch()
        if torch.compiler.is_compiling():  # a graph break of torch.compile
            return torch.compiler.disable(self._run)(*args, **kwargs)
        return self._run(*args, **kwargs)

    def _run(self, *args: object, **kwargs: object) -> object:
        torch = require_torch()
        check_initialised()
        check_not_ended(f"A field of {self.__name__}", *self._inputs, *self._outputs)
        inputs, constants = self._bind(args, kwargs)
        wanted = tuple(wants_derivative(x) for x in inputs)
        check_first_order(inputs, _name(self._kernel))
        names = [n for n, value in constants.items() if isinstance(value, torch.Tensor)]
        for name in names:
            if wants_derivative(constants[name]):
                raise InvalidArgumentError(
                    f"{name!r} carries a gradient, but is not among the inputs of this function; name it there or pass "
                    f"{name}.detach()."
                )
        values = {n: value for n, value in constants.items() if n not in names}
        call = Call(self, wanted, tuple(names), values)
        is_plain = not ((self._has_jacobian or is_traced()) and any(wanted))
        function = without_jacobian() if is_plain else with_jacobian()
        results = function.apply(call, *inputs, *(constants[n] for n in names))
        return self._rebuild(list(results[: self.result_count]))

    def _bind(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> tuple[list[Any], dict[str, Any]]:
        """The inputs, and the other arguments by name."""
        torch = require_torch()
        order = [*self._inputs, *self._constants]
        shown = ", ".join(o if isinstance(o, str) else "(a field's tensor)" for o in order)
        if len(args) > len(order):
            raise InvalidArgumentError(
                f"{self.__name__} takes {len(order)} arguments ({shown}); {len(args)} were given."
            )
        given: list[Any] = list(args)
        kwargs = dict(kwargs)
        for item in order[len(args) :]:
            if not isinstance(item, str) or item not in kwargs:
                raise InvalidArgumentError(f"{self.__name__} takes the arguments {shown}; {len(args)} were given.")
            given.append(kwargs.pop(item))
        if kwargs:
            raise InvalidArgumentError(
                f"{next(iter(kwargs))!r} is not an argument of {self.__name__}, or given twice (arguments: {shown})."
            )
        inputs = given[: len(self._inputs)]
        for item, value in zip(self._inputs, inputs, strict=True):
            what = repr(item) if isinstance(item, str) else "the input of a field"
            if not isinstance(value, torch.Tensor):
                raise InvalidArgumentError(f"{what} is a {type(value).__name__}; expected a torch tensor.")
            problem = backend.array_problem(value)
            if problem and not value.is_complex():
                raise InvalidArgumentError(f"{what} {problem}.")
            if not value.is_floating_point():
                raise InvalidArgumentError(f"{what} has type {value.dtype}; only real numbers have a derivative.")
            shape = (
                backend.full_field_shape(item) if isinstance(item, backend.Field) else self._signature.value_shape(item)
            )
            if shape is not None and tuple(value.shape) != shape:
                raise InvalidArgumentError(f"{what} has shape {tuple(value.shape)}; expected {shape}.")
        return inputs, dict(zip(self._constants, given[len(inputs) :], strict=True))

    # --- one run, on plain tensors

    @property
    def result_count(self) -> int:
        """How many tensors a call returns."""
        return max(1, len(self._outputs))

    @property
    def input_names(self) -> list[object]:
        """The inputs: names and fields."""
        return self._inputs

    def make_arguments(self, call: Call, tensors: Sequence[Any]) -> dict[str, Any]:
        """The arguments of one launch by name, in order; inputs of fields are stored."""
        arguments = dict(call.constants)
        arguments.update(self._in_memory(call, tensors))
        self._allocate(arguments, tensors)
        for name, annotation in self._signature.annotations.items():
            problem = backend.argument_problem(annotation, arguments[name])
            if problem:
                raise InvalidArgumentError(f"{name!r} of {self.__name__} {problem}.")
        for field, tensor in zip(self._inputs, tensors, strict=False):
            if isinstance(field, backend.Field):
                backend.check_not_ended(field)
                field.from_torch(tensor.detach())
        return {name: arguments[name] for name in self._signature.names}

    def launch(self, arguments: dict[str, object]) -> Any:
        """Run the kernel."""
        return self._kernel(*arguments.values())

    def launch_reverse(self, arguments: Mapping[str, object]) -> None:
        """Taichi's reverse mode: from the ``grad`` of the outputs to that of the inputs."""
        self._kernel.grad(*arguments.values())

    def run_along(self, t: object, count: int, *values: Any) -> None:
        """Run the kernel at ``start + t direction``; ``values`` are ``count`` arrays, starts, directions; arguments."""
        moved, starts, directions = (values[n * count : (n + 1) * count] for n in range(3))
        move = moving(backend.RUNTIME.module)
        for x, start, direction in zip(moved, starts, directions, strict=True):
            move(x.view(-1), start.view(-1), direction.view(-1), t)
        self._kernel(*values[3 * count :])

    def run_plain(self, call: Call, tensors: Sequence[Any]) -> tuple[object, ...]:
        """The outputs."""
        arguments = self.make_arguments(call, tensors)
        with self._inputs_unchanged(arguments):
            returned = self.launch(arguments)
        return tuple(self._results(arguments, returned, tensors[0].device))

    def run_with_jacobian(self, call: Call, tensors: Sequence[Any]) -> tuple[object, ...]:
        """The outputs, then the Jacobian of each real output by each wanted input, as matrices."""
        arguments = self.make_arguments(call, tensors)
        params = [self._inputs[n] for n in call.wanted_inputs]
        active = self.real_outputs(arguments) if self._outputs else None
        args = tuple(arguments.values())
        with self._inputs_unchanged(arguments):
            returned, blocks = value_and_jacobian(self._kernel, params, active, args=args, max_memory=self._max_memory)
        results = self._results(arguments, returned, tensors[0].device)
        real = [r for r in results if r.is_floating_point()]
        flat = []
        for result, row in zip(real, [blocks] if active is None else blocks, strict=True):
            pairs = zip(row, call.wanted_inputs, strict=True)
            flat += [as_tensor(b, result.device).reshape(result.numel(), tensors[n].numel()) for b, n in pairs]
        return (*results, *flat)

    def _in_memory(self, call: Call, tensors: Sequence[Any]) -> dict[str, Any]:
        """The tensors of array arguments by name, so that the kernel can read them where they are.

        The same memory given for two arguments means two variables to torch and one array to Taichi: it is copied.
        """
        found: dict[str, Any] = {}
        taken: list[View] = []
        for name, tensor in zip([*self._inputs, *call.tensor_names], tensors, strict=True):
            if isinstance(name, backend.Field):
                continue
            value = tensor.detach()
            if self._signature.is_value(name):
                found[name] = host_number(value)
                continue
            value = value.contiguous()
            if value.is_conj() or value.is_neg():
                value = value.resolve_conj().resolve_neg()
            if name in self._outputs or any(view_of(value).overlaps(view) for view in taken):
                value = value.clone()
            taken.append(view_of(value))
            found[name] = value
        return found

    @contextlib.contextmanager
    def _inputs_unchanged(self, arguments: dict[str, Any]) -> Generator[None, None, None]:
        """In the first call, raise if the kernel writes to an input that is not an output."""
        if self._is_checked:
            yield
            return
        inputs = [
            n for n in self._inputs if isinstance(n, str) and n not in self._outputs and not self._signature.is_value(n)
        ]
        before = {name: arguments[name].clone() for name in inputs}
        yield
        for name, value in before.items():
            if not require_torch().equal(arguments[name].nan_to_num(), value.nan_to_num()):
                arguments[name].copy_(value)
                raise InvalidArgumentError(
                    f"{_name(self._kernel)} writes to its argument {name!r}, which is an input only; name it among "
                    "outputs too, and the function works on a copy of it."
                )
        self._is_checked = True

    def _allocate(self, arguments: dict[str, object], tensors: Sequence[Any]) -> None:
        """Add the arrays that the function owns, zero."""
        torch = require_torch()
        first = tensors[0]
        by_name = {i: t.detach() for i, t in zip(self._inputs, tensors, strict=False) if isinstance(i, str)}
        for name in self._signature.names:
            if name in arguments:
                continue
            shape = self._shapes.get(name, tuple(first.shape))
            if callable(shape):
                shape = _call_by_name(shape, {**arguments, **by_name}, f"shapes[{name!r}]")
            if isinstance(shape, torch.Tensor):
                arguments[name] = shape.contiguous()
                continue
            try:
                arguments[name] = torch.zeros(shape, dtype=first.dtype, device=first.device)
            except (TypeError, RuntimeError) as error:
                raise InvalidArgumentError(f"shapes[{name!r}] is {shape!r}; expected a shape or a tensor.") from error

    def real_outputs(self, arguments: dict[str, Any]) -> list[Any]:
        """The outputs of real numbers: fields and names."""
        is_field = [isinstance(item, backend.Field) for item in self._outputs]
        return [
            item
            for item, own in zip(self._outputs, is_field, strict=True)
            if (backend.is_real(item.dtype) if own else arguments[item].is_floating_point())
        ]

    def _results(self, arguments: dict[str, object], returned: object, device: object) -> list[Any]:
        if not self._outputs:
            return [returned_tensor(returned, self._kernel, device)]
        found = (backend.copy_of(o) if isinstance(o, backend.Field) else arguments[o] for o in self._outputs)
        return [as_tensor(values, device) for values in found]


def _name(kernel: object) -> str:
    return getattr(kernel, "__name__", repr(kernel))


def _as_list(items: object) -> list[Any]:
    return list(items) if isinstance(items, (list, tuple)) else [items]


def _call_by_name(function: Callable[..., object], values: Mapping[str, object], what: str) -> Any:
    """``function`` with the values that its parameters name."""
    names = list(inspect.signature(function).parameters)
    unknown = [n for n in names if n not in values]
    if unknown:
        raise InvalidArgumentError(f"{what} takes {unknown[0]!r}; known here: {', '.join(values)}.")
    return function(*[values[n] for n in names])
