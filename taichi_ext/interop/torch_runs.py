"""Runs of a kernel on torch tensors: its outputs, and products with its derivatives where it was called."""

# The annotations of a kernel are values that Taichi reads, such as ti.template().
# pyright: reportInvalidTypeForm=false
# pyright knows no types of Taichi, torch and SciPy, nor of arrays of any shape and type.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownParameterType=false

import contextlib
import functools
from collections.abc import Callable, Generator, Sequence
from types import ModuleType
from typing import Any

from taichi_ext import backend
from taichi_ext.api.hessian import hvp
from taichi_ext.api.jacobian import jacobian, jvp, vjp
from taichi_ext.errors import UnsupportedError
from taichi_ext.interop.torch_products import TorchCall, as_tensor, require_torch
from taichi_ext.labels import Labels
from taichi_ext.record import record
from taichi_ext.runtime.launching.pipeline import Root, Solving
from taichi_ext.runtime.memory.shadows import FieldTable
from taichi_ext.runtime.memory.state import State

Tensors = Sequence[Any]


class TorchSnapshot(backend.Follower):
    """Follows a run: the fields and arrays that it uses, as they were before it.

    A product with the derivatives is computed later, when they may hold other numbers.
    """

    def __init__(self, known: dict[Any, Any], own: Sequence[object], table: FieldTable) -> None:
        self._known, self._table = known, table  # fields by kernel and arguments, and those of solvers
        self._own = {id(x) for x in own}
        self._state = State()

    def launch(self, kernel: Any, args: tuple[object, ...]) -> Any:
        """Save what a kernel uses, and run it."""
        with backend.suspend_following():
            name = (id(kernel), *(id(a) if isinstance(a, backend.Field) else type(a) for a in args))
            if name not in self._known:
                with backend.exclusive:
                    program = record(kernel, args)
                self._known[name] = kernel, args, [c.object for c in program.containers if not c.is_argument]
            for obj in (*self._known[name][2], *args):
                self._save(obj)
            return kernel(*args)

    def _save(self, obj: object) -> None:
        is_memory = isinstance(obj, (backend.Field, backend.FieldEntry)) or backend.is_array(obj)
        if is_memory and id(obj) not in self._own:
            self._state.save(obj)

    def before_host_write(self, obj: object, value: object) -> None:
        self._save(obj)

    def host_read(self, obj: object, index: object, value: object) -> object:
        """The value, once its field or array is saved."""
        self._save(obj)
        return value

    def root(self, root: Root) -> object:
        """Run the solver of an implicit function."""
        for obj in root.unknowns:
            self._save(obj)
        return root.solve(Solving(self._table, self._save, lambda *_: None))

    @contextlib.contextmanager
    def restored(self) -> Generator[None, None, None]:
        """Within the context everything is as it was before the run."""
        now = self._state.as_now()
        self._state.undo()
        try:
            yield
        finally:
            now.undo()


class Runs:
    """The runs of one ``TorchFunction``."""

    def __init__(self, function: Any, kernel: Any, max_memory: int | None) -> None:
        self.function, self._kernel, self._max_memory = function, kernel, max_memory
        self.name: str = function.__name__
        self._known: dict[Any, Any] = {}
        self._table = FieldTable(Labels(kernel))

    def plain(self, call: TorchCall, tensors: Tensors) -> tuple[object, ...]:
        """The outputs."""
        function = self.function
        arguments = function.make_arguments(call, tensors)
        snapshot = TorchSnapshot(self._known, list(arguments.values()), self._table)
        following = backend.follow(snapshot) if any(call.wanted) else contextlib.nullcontext()
        with function.inputs_unchanged(arguments), following:
            returned = self._kernel(*arguments.values())
        values = function.results(arguments, returned, tensors[0].device)
        real = [r for r in values if r.is_floating_point()]
        call.snapshot[:] = [snapshot]
        call.results[:] = [(r.shape, {"dtype": r.dtype, "device": r.device}) for r in real]
        return tuple(values)

    @contextlib.contextmanager
    def _again(self, call: TorchCall, tensors: Tensors) -> Generator[tuple[Any, Any, dict[str, Any]], None, None]:
        """The wanted inputs, the outputs and the options of another run like that of a call."""
        with backend.suspend_following(), call.snapshot[0].restored():
            arguments = self.function.make_arguments(call, tensors)
            options = {"args": tuple(arguments.values()), "max_memory": self._max_memory}
            wanted = [self.function.inputs[n] for n in call.wanted_inputs]
            yield wanted, self.function.real_outputs(arguments) or None, options

    def rows(self, call: TorchCall, tensors: Tensors, cotangents: Tensors) -> tuple[Any, ...]:
        """``v J``: a tensor for each wanted input, with the leading axis of the cotangents if they have one."""
        if call.batch == 0:
            return tuple(tensors[n].new_zeros((0, *tensors[n].shape)) for n in call.wanted_inputs)
        given = [_host(c) for c in cotangents]
        with self._again(call, tensors) as (wanted, outputs, options):
            products = vjp(self._kernel, wanted, outputs, given[0] if outputs is None else given, **options)
        return tuple(_like(f, tensors[n], call) for f, n in zip(products, call.wanted_inputs, strict=True))

    def columns(self, call: TorchCall, tensors: Tensors, directions: Tensors) -> tuple[Any, ...]:
        """``J u``: a tensor for each real output."""
        if call.batch == 0:
            return tuple(require_torch().zeros((0, *shape), **options) for shape, options in call.results)
        with self._again(call, tensors) as (wanted, outputs, options):
            products = jvp(self._kernel, wanted, [_host(d) for d in directions], outputs, **options)
        products = [products] if outputs is None else products
        lead = () if call.batch is None else (call.batch,)
        device = tensors[0].device
        pairs = zip(products, call.results, strict=True)
        return tuple(as_tensor(p, device).to(**options).reshape((*lead, *shape)) for p, (shape, options) in pairs)

    def jacobian(self, call: TorchCall, tensors: Tensors) -> list[list[Any]]:
        """J as a matrix for each pair of real output and wanted input."""
        with self._again(call, tensors) as (wanted, outputs, options):
            blocks = jacobian(self._kernel, wanted, outputs, **options)
        return [
            [as_tensor(b, tensors[0].device).reshape(shape.numel(), -1) for b in row]
            for row, (shape, _) in zip([blocks] if outputs is None else blocks, call.results, strict=True)
        ]

    def curvature(self, call: TorchCall, tensors: Tensors, others: Tensors) -> tuple[Any, ...]:
        """``w H``, where H is the Hessian of cotangents times outputs; ``others`` are cotangents and directions."""
        torch, count = require_torch(), len(call.results)
        cotangents, directions = others[:count], others[count:]
        with self._again(call, tensors) as (wanted, outputs, options):
            fields = [o for o in outputs or () if isinstance(o, backend.Field)]
            if outputs is None or not all(isinstance(f, backend.ScalarField) for f in fields):
                raise UnsupportedError(
                    f"A second derivative of {self.name} was requested. torch_function gives those of arrays and "
                    "scalar fields that a kernel writes, not of returned values and fields of vectors."
                )
            energy = torch.zeros(1, dtype=cotangents[0].dtype, device=cotangents[0].device)
            weights = [_own(c) for c in cotangents]
            arguments, names = options["args"], self.function.signature.names
            places = [o if isinstance(o, backend.Field) else names.index(o) for o in outputs]
            params = [arguments[names.index(w)] if isinstance(w, str) else w for w in wanted]
            options["args"] = (energy, len(weights), places, *weights, *arguments)
            products = hvp(self._weighted, params, [_host(d) for d in directions], energy, **options)
        return tuple(_like(f, tensors[n], call) for f, n in zip(products, call.wanted_inputs, strict=True))

    def _weighted(self, energy: Any, count: int, places: list[Any], *values: Any) -> None:
        """A pipeline: the kernel, then ``energy += weight * output``."""
        weights, arguments = values[:count], values[count:]
        self._kernel(*arguments)
        on_arrays, on_field = _dots(backend.RUNTIME.module)
        for place, weight in zip(places, weights, strict=True):
            if isinstance(place, backend.Field):
                on_field(place, weight, energy)
            else:
                on_arrays(arguments[place].view(-1), weight.view(-1), energy)


def _host(values: Any) -> Any:
    return values.detach().resolve_conj().resolve_neg().cpu().numpy()


def _own(values: Any) -> Any:
    """A copy in memory of its own, which kernels can take."""
    return values.detach().clone(memory_format=require_torch().contiguous_format)


def _like(values: object, tensor: Any, call: TorchCall) -> Any:
    lead = () if call.batch is None else (call.batch,)
    return as_tensor(values, tensor.device).to(tensor.dtype).reshape((*lead, *tensor.shape))


@functools.cache
def _dots(ti: ModuleType) -> tuple[Callable[..., None], Callable[..., None]]:
    """Kernels that add ``sum(x * weight)`` to an energy: for flat arrays, and for a scalar field."""
    array: Any = ti.types.ndarray()

    @ti.kernel
    def on_arrays(x: array, weight: array, energy: array):
        for i in range(x.shape[0]):
            energy[0] += x[i] * weight[i]

    @ti.kernel
    def on_field(x: ti.template(), weight: array, energy: array):
        for I in ti.grouped(x):
            energy[0] += x[I] * weight[I]

    return on_arrays, on_field
