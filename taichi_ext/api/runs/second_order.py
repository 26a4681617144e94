"""Gradients, Hessians and Hessian-vector products of energies."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from taichi_ext import backend
from taichi_ext.api.inputs.arguments import KernelCall, Target
from taichi_ext.api.inputs.fixed import Fixed
from taichi_ext.api.inputs.results import as_torch
from taichi_ext.api.runs.by_adjoint import energy_products, no_adjoint
from taichi_ext.api.runs.evaluation import Evaluation, equal_parts
from taichi_ext.api.runs.replay import values_of
from taichi_ext.api.runs.sparse_form import ProjectedForm
from taichi_ext.api.runs.subject import EnergyGradient
from taichi_ext.differentiate.forms.entry_sites import DenseRowsError
from taichi_ext.errors import InvalidArgumentError

USES = ("gradient", "hessian", "hvp", "projected")  # of plans whose output is an energy
MOST_VECTORS = 32  # that are multiplied in one run forward: kernels are compiled for their number


def check_energy(call: KernelCall, energy: list[Target], params: list[Target], use: str) -> None:
    """Raise unless the output is an energy: a single number that is not a parameter."""
    if len(energy) != 1:
        raise InvalidArgumentError(
            f"energy names {len(energy)} fields or arrays; second derivatives are those of one number. Add them up in "
            "the kernel, or take the Hessian of each."
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
    return replace(evaluation, subject=subject, form=ProjectedForm(projection) if projection else evaluation.form)


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
        value, gradient, products = _energy_and_products(evaluation, direction.reshape(-1, 1))
        return _number(value), gradient, np.concatenate(products).reshape(-1)


def _energy_and_gradient(evaluation: Evaluation) -> tuple[float, np.ndarray]:
    (value,) = values_of(evaluation.prepared, evaluation.call, evaluation.returned)
    parts = _subject(evaluation).gradients(evaluation.layout)
    return _number(value), np.concatenate([part.reshape(-1) for part in parts])


def _number(value: object) -> float:
    return float(np.asarray(backend.as_numpy(value)).reshape(-1)[0])


def hessian_times(evaluation: Evaluation, directions: np.ndarray) -> list[np.ndarray]:
    """H times the columns of ``directions``: a matrix for each parameter."""
    return _energy_and_products(evaluation, directions)[2]


def _energy_and_products(evaluation: Evaluation, directions: np.ndarray) -> tuple[object, np.ndarray, list[np.ndarray]]:
    """The energy, its gradient, and H times the columns of ``directions``.

    A kernel is differentiated forward twice, which takes half of the time where each term of the energy depends on few
    params. Before one is made that would compute tangents along all of them for the gradient, adjoints are preferred.
    """
    prepared, subject = evaluation.prepared, _subject(evaluation)
    prefers_forward = evaluation.call.kernel is not None and not prepared.mode
    by_adjoint = None if prefers_forward else energy_products(evaluation, directions)
    if by_adjoint is not None:
        return by_adjoint
    if evaluation.layout.passed:
        raise no_adjoint(evaluation, "second derivatives with respect to numbers that a Python function takes")
    has_other = prefers_forward and not prepared.has_no_adjoint and backend.is_host_arch()
    moved = subject.moved(directions)
    along = replace(evaluation, subject=replace(subject, is_sum=has_other), directions=moved)
    try:
        size = equal_parts(moved.shape[1], MOST_VECTORS)
        products = [matrix for _, (matrix,) in along.column_blocks(size)]
    except DenseRowsError as error:
        if not has_other:
            raise
        prepared.mode = f"forward over reverse: {error}"
        return _energy_and_products(evaluation, directions)
    return *_energy_and_gradient(along), subject.products(np.concatenate(products, axis=1), directions, along.layout)


def _subject(evaluation: Evaluation) -> EnergyGradient:
    assert isinstance(evaluation.subject, EnergyGradient)
    return evaluation.subject
