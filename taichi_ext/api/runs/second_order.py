"""Gradients, Hessians and Hessian-vector products of energies."""

from __future__ import annotations

import math

import numpy as np

from taichi_ext import backend
from taichi_ext.api.inputs.arguments import KernelCall, Target
from taichi_ext.api.inputs.fixed import Fixed
from taichi_ext.api.inputs.results import as_torch
from taichi_ext.api.runs.by_adjoint import energy_along
from taichi_ext.api.runs.evaluation import Evaluation
from taichi_ext.api.runs.replay import values_of
from taichi_ext.api.runs.sparse_form import SparseForm
from taichi_ext.api.runs.subject import EnergyGradient, Outputs
from taichi_ext.errors import InvalidArgumentError, UnsupportedError
from taichi_ext.launches import GRADIENT, Fused, PipelineArgument

USES = ("gradient", "hessian", "hvp", "projected")  # of plans whose output is an energy
MOST_DIRECTIONS = 8  # in one run forward and back
MOST_VECTORS = 32  # that are multiplied in one run forward: kernels are compiled for their number


def check_energy(call: KernelCall, energy: list[Target], params: list[Target], use: str) -> None:
    """Raise unless the output is an energy: a single number that is not a parameter."""
    if len(energy) != 1:
        raise InvalidArgumentError(
            f"energy names {len(energy)} fields or arrays; second derivatives are those of one number. Add them up in "
            "the kernel, or take the Hessian of each."
        )
    passed = [param.name for param in params if call.is_passed_number(param)]
    if passed and use not in ("gradient", "hvp"):
        raise InvalidArgumentError(_PASSED.format(passed[0]))
    (target,) = energy
    shape = _shape(call, target)
    if math.prod(shape) != 1:
        raise InvalidArgumentError(
            f"{target.name} has shape {shape}; an energy is one number: a field of shape () or (1,), an array with one "
            "entry, or a returned number."
        )
    if any(_is_same(target, param) for param in params):
        raise InvalidArgumentError(f"{target.name} is an energy and a parameter; give the energy a field of its own.")


_PASSED = (
    "{} is a number that a Python function takes. Hessians are with respect to fields, arrays and numbers that kernels "
    "read: pass it in a field, or use hvp."
)


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


def with_choices(
    evaluation: Evaluation, projection: str | None, fixed: Fixed, *, has_gradient: bool = True
) -> Evaluation:
    """The same call, for H with projected blocks and fixed entries; perhaps without the gradient."""
    subject = EnergyGradient(is_projected=projection is not None, fixed=fixed, has_gradient=has_gradient)
    form = SparseForm(projection) if evaluation.form.is_sparse else evaluation.form
    return evaluation.changed(subject=subject, form=form)


def value_gradient_and_hessian_of(evaluation: Evaluation) -> tuple[object, object, object]:
    """The energy, its gradient in the structure of the parameters, and H."""
    subject, layout = _subject(evaluation), evaluation.layout
    with evaluation.whole():
        result = evaluation.jacobian()
        (value,) = values_of(evaluation.prepared, evaluation.call, evaluation.returned)
    gradient = evaluation.prepared.question.rebuild_params(subject.free_gradients(layout))
    return value, as_torch(gradient, evaluation.call, [o.target for o in layout.outputs]), result


def point_of(evaluation: Evaluation) -> tuple[float, np.ndarray, list[list[np.ndarray]]]:
    """The energy, its gradient as one vector, and the blocks of H by pairs of parameters."""
    with evaluation.whole(), backend.suspend_following():
        blocks = evaluation.blocks()
        return *_energy_and_gradient(evaluation), blocks


def point_along(evaluation: Evaluation, direction: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """The energy, its gradient, and H times a direction, all as vectors, from one run."""
    with evaluation.whole(), backend.suspend_following():
        given = direction.reshape(-1, 1)
        found = None if _prefers_forward(evaluation) else _by_adjoint(evaluation, given)
        if found is not None:
            value, gradient, products = found
            return _number(value), gradient, np.concatenate(products).reshape(-1)
        try:
            along, products = _forward_products(evaluation, given)
        except _HasDenseGradient:
            return point_along(evaluation, direction)
        return *_energy_and_gradient(along), np.concatenate(products).reshape(-1)


def _energy_and_gradient(evaluation: Evaluation) -> tuple[float, np.ndarray]:
    """The energy and its gradient, after a run."""
    (value,) = values_of(evaluation.prepared, evaluation.call, evaluation.returned)
    parts = _subject(evaluation).gradients(evaluation.layout)
    return _number(value), np.concatenate([part.reshape(-1) for part in parts])


def _number(value: object) -> float:
    return float(np.asarray(backend.as_numpy(value)).reshape(-1)[0])


def hessian_times(evaluation: Evaluation, directions: np.ndarray) -> list[np.ndarray]:
    """H times the columns of ``directions``: a matrix for each parameter."""
    if not _prefers_forward(evaluation):
        found = _in_blocks(evaluation, directions)
        if found is not None:
            return found
    try:
        return _forward_products(evaluation, directions)[1]
    except _HasDenseGradient:
        return hessian_times(evaluation, directions)


class _HasDenseGradient(Exception):
    """Raised before a kernel is launched that would compute tangents along all parameters for the gradient."""


def _prefers_forward(evaluation: Evaluation) -> bool:
    """Whether products are computed by differentiating forward twice.

    That takes half of the time where each term of the energy depends on few params, as far as is known.
    """
    return evaluation.call.kernel is not None and not evaluation.prepared.mode


def _in_blocks(evaluation: Evaluation, directions: np.ndarray) -> list[np.ndarray] | None:
    """Products by adjoints, some directions in each run; None: no adjoint."""
    total, parts = directions.shape[1], list[list[np.ndarray]]()
    width = -(-total // max(1, -(-total // MOST_DIRECTIONS)))
    for first in range(0, total, max(1, width)):
        block = directions[:, first : first + width]
        padded = np.pad(block, ((0, 0), (0, width - block.shape[1])))
        found = _by_adjoint(evaluation, padded, restores=first + width < total)
        if found is None:
            return None
        parts.append([part[:, : block.shape[1]] for part in found[2]])
    return [np.concatenate(columns, axis=1) for columns in zip(*parts, strict=True)]


def _by_adjoint(
    evaluation: Evaluation, directions: np.ndarray, *, restores: bool = False
) -> tuple[object, np.ndarray, list[np.ndarray]] | None:
    """The energy, its gradient, and products with H for each parameter, forward over reverse; None: no adjoint."""
    subject, layout = _subject(evaluation), evaluation.layout
    plain = evaluation.changed(subject=Outputs(is_gradient=True))
    found = energy_along(plain, subject.moved(directions), restores=restores)
    evaluation.returned = plain.returned
    if found is None:
        return None
    value, gradient, products = found
    return value, gradient, subject.free_products(products, directions, layout)


def _forward_products(evaluation: Evaluation, directions: np.ndarray) -> tuple[Evaluation, list[np.ndarray]]:
    """The evaluation that computed products by differentiating forward twice, and the products."""
    prepared = evaluation.prepared
    passed = [param.target.name for param in evaluation.layout.params if isinstance(param.key, PipelineArgument)]
    if passed:
        raise UnsupportedError(f"{prepared.has_no_adjoint}\n{_PASSED.format(passed[0])}")
    subject = _subject(evaluation)
    along = evaluation.changed(directions=subject.moved(directions))

    def check(fused: Fused) -> None:
        if any(array.info.key != GRADIENT for array in fused.first_order):
            prepared.mode = "forward over reverse: terms of the energy depend on many params"
            prepared.fused.clear()
            raise _HasDenseGradient

    if _prefers_forward(evaluation) and not prepared.has_no_adjoint and backend.is_host_arch():
        along.before_launch = check
    found = [matrix for _, (matrix,) in along.column_blocks(MOST_VECTORS)]
    return along, subject.products(np.concatenate(found, axis=1), directions, evaluation.layout)


def _subject(evaluation: Evaluation) -> EnergyGradient:
    assert isinstance(evaluation.subject, EnergyGradient)
    return evaluation.subject
