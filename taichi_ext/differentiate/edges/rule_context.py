"""The tools for the derivative of a special statement."""

from __future__ import annotations

from dataclasses import dataclass

from taichi_ext.differentiate.facts.walk import Walk
from taichi_ext.differentiate.forms.forms import Form, materialize
from taichi_ext.differentiate.statements.linearize import Linearizer
from taichi_ext.differentiate.statements.local_tangents import LocalTangents
from taichi_ext.differentiate.storage.local_forms import LocalForms
from taichi_ext.program import Boundary, Declare, Local, Value


@dataclass(frozen=True)
class RuleContext:
    """The parts of a walk that a rule uses.

    Attributes:
        walk: the walk.
        linearizer: the forms of values.
        forms: the tangents of locals.
        locals: the statements that write locals.
    """

    walk: Walk
    linearizer: Linearizer
    forms: LocalForms
    locals: LocalTangents

    def primal(self, value: Value) -> Value:
        """A value, built on the temporaries of the statement."""
        return self.walk.expressions.primal(value)

    def form(self, value: Value) -> Form:
        """The tangent of a value, with coefficients that are evaluated."""
        return materialize(self.walk.builder, self.linearizer.form(value))

    def declare(self, s: Boundary, result: Local, primal: Value, form: Form) -> None:
        """Declare a result of a statement, with its value and its tangent."""
        self.locals.declare_form(Declare(result, (primal,), place=s.place), form)
