"""``torch_function``: a kernel or pipeline as a differentiable function of torch tensors."""

# pyright knows no types of Taichi, torch and SciPy, nor of arrays of any shape and type.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from taichi_ext import backend
from taichi_ext.api.inputs.arguments import check_initialised, check_kernel, check_not_ended, flatten
from taichi_ext.api.inputs.options import checked_options
from taichi_ext.errors import InvalidArgumentError, raise_problem, shown, suggestion, unexpected, with_short_traceback
from taichi_ext.interop.torch_products import (
    Signature,
    TorchCall,
    as_tensor,
    host_number,
    require_torch,
    returned_tensor,
    run,
    wants_derivative,
)
from taichi_ext.interop.torch_runs import Runs
from taichi_ext.labels import Labels
from taichi_ext.runtime.memory.regions import View
from taichi_ext.runtime.memory.shadows import view_of


@with_short_traceback
def torch_function(
    kernel: Callable[..., object],
    inputs: object,
    outputs: object = None,
    *,
    shapes: Mapping[str, object] | None = None,
    max_memory: int | None = None,
) -> TorchFunction:
    """A differentiable function of torch tensors that runs a kernel.

    ``backward`` is ``vjp``, forward mode is ``jvp``, and second derivatives are ``hvp``.  They run the kernel again, on
    the tensors and fields as they were at the call, and put everything back that it writes, so that a call has the side
    effects of one plain run.  Fields that the kernel uses are copied at a call that torch may differentiate.

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
        max_memory: see ``vjp``.

    Returns:
        A function of the inputs, followed by the remaining kernel arguments, in the kernel's order or by name.  Input
        tensors are never written.  Inside ``torch.vmap`` the kernel runs once per item of the batch.

    Raises:
        InvalidArgumentError: inputs, outputs or shapes do not fit the kernel, or torch is not installed.
        UnsupportedError: when torch asks for it: the derivative of a construct is not known; or a third derivative, a
            second one of a returned value or a field of vectors, or one by forward mode alone
            (``torch.func.jacfwd(torch.func.jacfwd(f))``; ``torch.func.hessian`` combines both modes).

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
    return TorchFunction(kernel, inputs, outputs, {} if shapes is None else shapes, max_memory)


class TorchFunction:
    """The function that ``torch_function`` returns: call it with tensors."""

    def __init__(self, kernel: object, inputs: Any, outputs: object, shapes: object, max_memory: int | None) -> None:
        check_kernel(kernel)
        if not isinstance(shapes, Mapping):
            raise unexpected("shapes", shapes, "a dict of shapes by name")
        checked_options(max_memory)
        self._kernel: Any = kernel  # has a gradient, too, if it is one of Taichi's
        self._is_checked = False
        bound = backend.primal_kernel(kernel)
        self.signature = Signature.of(kernel)
        self.inputs = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
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
        self._constants = [n for n in self.signature.names if n not in allocated and n not in self.inputs]
        self.__name__ = getattr(kernel, "__name__", type(kernel).__name__)
        self.__doc__ = getattr(kernel, "__doc__", None)
        self._runs = Runs(self, kernel, max_memory)

    def __repr__(self) -> str:
        names = [i if isinstance(i, str) else "field" for i in self.inputs]
        return f"torch_function({self.__name__}, inputs={names})"

    def __deepcopy__(self, _: object) -> TorchFunction:
        """Itself, as of Python's functions: a module that calls one can be copied, its tensors alone are new."""
        return self

    def _check(self) -> None:
        for what, items in (("inputs", self.inputs), ("outputs", self._outputs), ("shapes", list(self._shapes))):
            for item in items:
                if isinstance(item, str):
                    self._check_name(what, item)
                else:
                    self._check_field(what, item)
            if len({id(i) if isinstance(i, backend.Field) else i for i in items}) != len(items):
                raise InvalidArgumentError(f"{what} names the same argument or field twice.")
        if not self.inputs:
            raise InvalidArgumentError("inputs is empty; name at least one argument or field.")

    def _check_name(self, what: str, name: str) -> None:
        if name not in self.signature.names:
            raise InvalidArgumentError(
                f"{what} has {name!r}, which is not an argument of {_name(self._kernel)} (arguments: "
                f"{', '.join(map(repr, self.signature.names)) or 'none'}).{suggestion(name, self.signature.names)}"
            )
        if what == "outputs" and self.signature.is_value(name):
            raise InvalidArgumentError(f"outputs has {name!r}, which is passed by value and cannot be written.")
        if what == "shapes" and name in self.inputs:
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
        check_not_ended(f"A field of {self.__name__}", *self.inputs, *self._outputs)
        inputs, constants = self._bind(args, kwargs)
        wanted = tuple(wants_derivative(x) for x in inputs)
        names = [n for n, value in constants.items() if isinstance(value, torch.Tensor)]
        for name in names:
            if wants_derivative(constants[name]):
                raise InvalidArgumentError(
                    f"{name!r} carries a gradient, but is not among the inputs of this function; name it there or pass "
                    f"{name}.detach()."
                )
        values = {n: value for n, value in constants.items() if n not in names}
        call = TorchCall(self._runs, wanted, tuple(names), values, [], [])
        return self._rebuild(list(run(call, *inputs, *(constants[n] for n in names))))

    def _bind(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> tuple[list[Any], dict[str, Any]]:
        """The inputs, and the other arguments by name."""
        torch = require_torch()
        order = [*self.inputs, *self._constants]
        shown = ", ".join(o if isinstance(o, str) else "(a field's tensor)" for o in order)
        given: list[Any] = list(args)
        kwargs = dict(kwargs)
        given += [kwargs.pop(item) for item in order[len(args) :] if isinstance(item, str) and item in kwargs]
        if len(given) != len(order):
            raise InvalidArgumentError(f"{self.__name__} takes the arguments {shown}; {len(given)} were given.")
        if kwargs:
            raise InvalidArgumentError(
                f"{next(iter(kwargs))!r} is not an argument of {self.__name__}, or given twice (arguments: {shown})."
            )
        inputs = given[: len(self.inputs)]
        for item, value in zip(self.inputs, inputs, strict=True):
            what = repr(item) if isinstance(item, str) else "the input of a field"
            if not isinstance(value, torch.Tensor):
                raise InvalidArgumentError(f"{what} is a {type(value).__name__}; expected a torch tensor.")
            if not value.is_complex():
                raise_problem(what, backend.array_problem(value))
            if not value.is_floating_point():
                raise InvalidArgumentError(f"{what} has type {value.dtype}; only real numbers have a derivative.")
            is_field = isinstance(item, backend.Field)
            shape = backend.full_field_shape(item) if is_field else self.signature.value_shape(item)
            if shape is not None and tuple(value.shape) != shape:
                raise InvalidArgumentError(f"{what} has shape {tuple(value.shape)}; expected {shape}.")
        return inputs, dict(zip(self._constants, given[len(inputs) :], strict=True))

    # --- one run, on plain tensors

    def make_arguments(self, call: TorchCall, tensors: Sequence[Any]) -> dict[str, Any]:
        """The arguments of one launch by name, in order; inputs of fields are stored."""
        arguments = dict(call.constants)
        arguments.update(self._in_memory(call, tensors))
        self._allocate(arguments, tensors)
        for name, annotation in self.signature.annotations.items():
            raise_problem(f"{name!r} of {self.__name__}", backend.argument_problem(annotation, arguments[name]))
        for field, tensor in zip(self.inputs, tensors, strict=False):
            if isinstance(field, backend.Field):
                backend.check_not_ended(field)
                field.from_torch(tensor.detach())
        return {name: arguments[name] for name in self.signature.names}

    def _in_memory(self, call: TorchCall, tensors: Sequence[Any]) -> dict[str, Any]:
        """The tensors of array arguments by name, so that the kernel can read them where they are.

        The same memory given for two arguments means two variables to torch and one array to Taichi: it is copied.
        """
        result: dict[str, Any] = {}
        taken: list[View] = []
        for name, tensor in zip([*self.inputs, *call.tensor_names], tensors, strict=True):
            if isinstance(name, backend.Field):
                continue
            value = tensor.data  # whose version is not that of the tensor: what a run writes is put back
            if self.signature.is_value(name):
                result[name] = host_number(value)
                continue
            value = value.contiguous()
            if value.is_conj() or value.is_neg():
                value = value.resolve_conj().resolve_neg()
            if name in self._outputs or any(view_of(value).overlaps(view) for view in taken):
                value = value.clone()
            taken.append(view_of(value))
            result[name] = value
        return result

    @contextlib.contextmanager
    def inputs_unchanged(self, arguments: dict[str, Any]) -> Generator[None, None, None]:
        """In the first call, raise if the kernel writes to an input that is not an output."""
        if self._is_checked:
            yield
            return
        inputs = [n for n in self.inputs if isinstance(n, str) and n not in self._outputs]
        before = {name: arguments[name].clone() for name in inputs if not self.signature.is_value(name)}
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
        by_name = {i: t.detach() for i, t in zip(self.inputs, tensors, strict=False) if isinstance(i, str)}
        for name in self.signature.names:
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

    def results(self, arguments: dict[str, object], returned: object, device: object) -> list[Any]:
        """The tensors that a call returns, after a run."""
        if not self._outputs:
            return [returned_tensor(returned, self._kernel, device)]
        given = (backend.copy_of(o) if isinstance(o, backend.Field) else arguments[o] for o in self._outputs)
        return [as_tensor(values, device) for values in given]


def _name(kernel: object) -> str:
    return getattr(kernel, "__name__", repr(kernel))


def _call_by_name(function: Callable[..., object], values: Mapping[str, object], what: str) -> Any:
    """``function`` with the values that its parameters name."""
    names = list(inspect.signature(function).parameters)
    unknown = [n for n in names if n not in values]
    if unknown:
        raise InvalidArgumentError(f"{what} takes {unknown[0]!r}; known here: {', '.join(values)}.")
    return function(*[values[n] for n in names])
