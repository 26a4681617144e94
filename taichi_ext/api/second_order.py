"""One call for second derivatives: a Jacobian of the gradient of an energy, in one launch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.api.arguments import KernelCall, Target
from taichi_ext.api.columns import Columns
from taichi_ext.api.evaluation import Evaluation
from taichi_ext.api.findings import Findings
from taichi_ext.api.fixed import Fixed
from taichi_ext.api.prepared import values_of
from taichi_ext.api.results import as_torch, by_path, check_out, fill_out, refuse_shared_out
from taichi_ext.differentiate.keys import RETURN
from taichi_ext.errors import InvalidArgumentError
from taichi_ext.launches import GRADIENT, container_key
from taichi_ext.runtime.memory import numpy_dtype
from taichi_ext.runtime.second_order import SecondOrderSession
from taichi_ext.runtime.session import Session
from taichi_ext.runtime.warning import warn_at_user


def check_energy(call: KernelCall, energy: list[Target], params: list[Target], use: str) -> None:
    """Raise for what is no energy: more than one number, or a parameter; and for pipelines, which have no Hessian."""
    if len(energy) != 1:
        raise InvalidArgumentError(
            f"energy names {len(energy)} fields or arrays; second derivatives are those of one number. Add them up in "
            "the kernel, or take the Hessian of each."
        )
    passed = [param.name for param in params if call.is_passed_number(param)]
    if passed and use != "gradient":
        raise InvalidArgumentError(
            f"{passed[0]} is a number that a Python function takes. Second derivatives are those by fields, arrays and "
            "numbers that kernels read: pass it in a field."
        )
    (target,) = energy
    shape = _shape(call, target)
    if math.prod(shape) != 1:
        raise InvalidArgumentError(
            f"{target.name} has shape {shape}; an energy is one number: a field of shape () or (1,), an array with one "
            "entry, or a returned number."
        )
    if any(_is_same(target, param) for param in params):
        raise InvalidArgumentError(f"{target.name} is an energy and a parameter; give the energy a field of its own.")


def _shape(call: KernelCall, target: Target) -> tuple[int, ...]:
    if target.kind == "return":
        call.return_dtype()  # raises for an integer
        return call.return_shape()
    if target.kind == "field":
        return tuple(backend.full_field_shape(target.field))
    return () if call.is_value(target) else tuple(backend.full_shape(call.value(target)))


def _is_same(energy: Target, param: Target) -> bool:
    if energy.kind == "field" and param.kind == "field":
        return backend.shares_components(energy.field, param.field)
    return energy.kind == param.kind == "argument" and energy.position == param.position


class GradientEvaluation(Evaluation):
    """A call for the gradient of an energy, which may be zero."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._findings = Findings(of_zeros=False)


class SecondOrderEvaluation(GradientEvaluation):
    """A call of a ``Hessian``."""

    _projection: str | None = None
    _fixed: Fixed | None = None

    def changed(self, projection: str | None, fixed: Fixed | None) -> SecondOrderEvaluation:
        """The same call, of H with projected blocks and fixed entries."""
        self._projection, self._fixed = projection, fixed
        return self

    def value_gradient_and_hessian(self) -> tuple[Any, Any, Any]:
        """The energy, its gradient in the structure of the parameters, and H."""
        with self._whole():
            result = self.jacobian()
            (value,) = values_of(self._prepared, self.call, self.returned)
        parts = self._gradients()
        if self._fixed:
            whole = self._fixed.free(_joined(parts))
            parts = [p.reshape(s) for p, (_, _, s) in zip(self._cut(whole), self._ranges, strict=True)]
        gradient = self._prepared.rebuild_params(parts)
        return value, as_torch(gradient, self.call, self._outputs), result

    def point(self, run: Callable[[], Any] | None = None) -> tuple[float, np.ndarray, Any]:
        """The energy, its gradient as one vector, and what a run gives: the blocks of H by pairs of parameters."""
        with self._whole(), backend.suspend_following():
            result = (run or self.blocks)()
            (value,) = values_of(self._prepared, self.call, self.returned)
        return float(np.asarray(backend.as_numpy(value)).reshape(-1)[0]), _joined(self._gradients()), result

    def _gradients(self) -> list[np.ndarray]:
        """The gradient by each parameter."""
        return [self._gradient[rows][inner].reshape(shape) for rows, inner, shape in self._ranges]

    def jacobian(self) -> Any:
        """H in the structure of the parameters, twice, in ``out`` if that was given."""
        with backend.suspend_following():
            result = self._prepared.result(self.blocks())
            return as_torch(result, self.call, self._outputs) if self._out is None else fill_out(self._out, result)

    def _run_within_memory(self) -> list[list[Any]]:
        return self._square(super()._run_within_memory())

    def _square(self, blocks: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
        """A block for each pair of parameters, of the blocks of the gradient."""
        size = len(self._gradient)
        matrix = np.concatenate([block.reshape(size, -1) for block in blocks[0]], axis=1)
        matrix = _symmetric(np.concatenate([matrix[rows][inner] for rows, inner, _ in self._ranges]))
        if self._fixed:
            self._fixed.mask_matrix(matrix)
        ranges = [(slice(first, first + math.prod(shape)), shape) for first, shape in self._columns]
        return [[np.ascontiguousarray(matrix[r, c]).reshape((*s, *t)) for c, t in ranges] for r, s in ranges]

    def times(self, directions: np.ndarray, most: int | None = None) -> list[np.ndarray]:
        """H times the columns of ``directions``, so many in a run, if that is given: for each parameter a matrix."""
        count = max(1, directions.shape[1])
        moved = self._fixed.free(directions) if self._fixed else directions
        found = [matrix for _, (matrix,) in self.along(moved).column_blocks(min(count, most or count))]
        matrix = np.concatenate(found, axis=1)
        products = [matrix[rows][inner] for rows, inner, _ in self._ranges]
        return self._cut(self._fixed.masked_products(np.concatenate(products), directions)) if self._fixed else products

    def _cut(self, values: np.ndarray) -> list[np.ndarray]:
        """Rows of all parameters, those of each."""
        return np.split(values, np.cumsum([math.prod(shape) for shape in self.parameter_shapes()])[:-1])

    # --- runs

    def _session(self) -> Session:
        return SecondOrderSession(self._prepared.fields, self._prepared.fused, self.call.kernel is not None)

    def _new_session(self, first: int, count: int | None) -> tuple[Any, Columns]:
        session, columns = super()._new_session(first, count)
        assert isinstance(session, SecondOrderSession)
        self._columns = columns
        (energy,) = self._outputs
        keys = [self._key(session, target) for target in self._params]
        shapes = [shape for _, shape in columns] if self._directions is None else self.parameter_shapes()
        sizes = {container_key(key): self._size(key, shape) for key, shape in zip(keys, shapes, strict=True)}
        session.begin(container_key(self._key(session, energy)), sizes)
        rows = [session.gradient_rows(container_key(key)) for key in keys]
        self._ranges = list(zip(rows, map(self._rows_of, keys), shapes, strict=True))
        return session, columns

    def _open_output(self, session: Any, target: Target, place: Any) -> tuple[Any, tuple[int, ...]]:
        """The gradient is what has a Jacobian."""
        size = session.gradient_columns
        session.open_output(GRADIENT, f"the gradient of {target.name}", size, self._energy_dtype(session), None)
        return GRADIENT, (size,)

    def _energy_dtype(self, session: Any) -> Any:
        return self.call.return_dtype() if session.energy == RETURN else session.info(session.energy).dtype

    def _places(self) -> list[Any]:
        return [None]

    def _check_out(self, session: Session, outputs: list[Any], columns: Columns) -> None:
        if self._out is None:
            return
        dtype = numpy_dtype(self._energy_dtype(session))
        leaves = by_path(self._out, self._prepared.skeleton())
        check_out(leaves, [((*s, *t), dtype) for _, s in columns for _, t in columns])
        refuse_shared_out(leaves, self._containers())

    def _is_repeatable(self, session: Session, outputs: list[Any]) -> bool:
        return False

    def _launch(self, session: Any, outputs: list[Any]) -> None:
        super()._launch(session, outputs)
        self._gradient = session.gradient()
        if self._gradient is None:
            self._gradient = np.zeros(session.gradient_columns, numpy_dtype(self._energy_dtype(session)))
            warn_at_user(f"{self._outputs[0].name} does not depend on any of the params: its Hessian is zero.")


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([part.reshape(-1) for part in parts])


def _symmetric(matrix: np.ndarray) -> np.ndarray:
    """The mean of a matrix and its transpose, which are the same but for rounding."""
    return 0.5 * (matrix + matrix.T)
