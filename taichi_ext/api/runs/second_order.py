"""Gradients, Hessians and Hessian-vector products of energies."""

from __future__ import annotations

import math

import numpy as np

from taichi_ext import backend
from taichi_ext.api.inputs.arguments import KernelCall, Target
from taichi_ext.api.inputs.fixed import Fixed
from taichi_ext.api.inputs.results import as_torch
from taichi_ext.api.runs.evaluation import Evaluation
from taichi_ext.api.runs.prepared import values_of
from taichi_ext.api.runs.sparse_form import SparseForm
from taichi_ext.api.runs.subject import EnergyGradient
from taichi_ext.errors import InvalidArgumentError

USES = ("gradient", "hessian", "hvp", "projected")  # of plans whose output is an energy


def check_energy(call: KernelCall, energy: list[Target], params: list[Target], use: str) -> None:
    """Raise unless the output is an energy: a single number that is not a parameter."""
    if len(energy) != 1:
        raise InvalidArgumentError(
            f"energy names {len(energy)} fields or arrays; second derivatives are those of one number. Add them up in "
            "the kernel, or take the Hessian of each."
        )
    passed = [param.name for param in params if call.is_passed_number(param)]
    if passed and use != "gradient":
        raise InvalidArgumentError(
            f"{passed[0]} is a number that a Python function takes. Second derivatives are with respect to fields, "
            "arrays and numbers that kernels read: pass it in a field."
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
        along, products = _products(evaluation, direction.reshape(-1, 1))
        return *_energy_and_gradient(along), np.concatenate(products).reshape(-1)


def _energy_and_gradient(evaluation: Evaluation) -> tuple[float, np.ndarray]:
    """The energy and its gradient, after a run."""
    (value,) = values_of(evaluation.prepared, evaluation.call, evaluation.returned)
    parts = _subject(evaluation).gradients(evaluation.layout)
    number = float(np.asarray(backend.as_numpy(value)).reshape(-1)[0])
    return number, np.concatenate([part.reshape(-1) for part in parts])


def hessian_times(evaluation: Evaluation, directions: np.ndarray, most: int | None = None) -> list[np.ndarray]:
    """H times the columns of ``directions``, at most ``most`` in a run: a matrix for each parameter."""
    return _products(evaluation, directions, most)[1]


def _products(
    evaluation: Evaluation, directions: np.ndarray, most: int | None = None
) -> tuple[Evaluation, list[np.ndarray]]:
    """The evaluation that computed the products, and the products."""
    subject, count = _subject(evaluation), max(1, directions.shape[1])
    along = evaluation.changed(directions=subject.moved(directions))
    found = [matrix for _, (matrix,) in along.column_blocks(min(count, most or count))]
    return along, subject.products(np.concatenate(found, axis=1), directions, evaluation.layout)


def _subject(evaluation: Evaluation) -> EnergyGradient:
    assert isinstance(evaluation.subject, EnergyGradient)
    return evaluation.subject
