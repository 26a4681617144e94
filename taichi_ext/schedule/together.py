"""Iterations of a short inner loop in lanes: an image is looked at in several places at once.

The places lie near each other, so most of them go through the same list.  Lanes that do go through it together; what
it holds is read once, and LLVM makes vectors of the rest.
"""

from __future__ import annotations

from dataclasses import replace

import taichi_ext.program as ir
from taichi_ext.analysis.changes import varying_locals, written_containers
from taichi_ext.schedule.lanes import MOST_OPERATIONS, CannotError, Lanes, Survey, work_of
from taichi_ext.schedule.machine import Machine
from taichi_ext.schedule.masks import keys_of, with_masks
from taichi_ext.schedule.stretches import stretches
from taichi_ext.simplify.usage import assigned_locals


def with_iterations_together(body: ir.Body, machine: Machine) -> ir.Body:
    """The block with loops whose iterations go through their bodies together, where that is possible."""

    def change(s: ir.Statement) -> ir.Statement:
        if not isinstance(s, ir.For) or not s.is_together:
            return s
        try:
            return _together(s, machine)
        except CannotError:
            return s

    return ir.mapped(body, change)


def _together(loop: ir.For, machine: Machine) -> ir.For:
    (count,) = loop.domain
    if machine.is_checked or not isinstance(count, ir.Const) or written_containers(loop.body):
        raise CannotError("it stores to memory")
    results = assigned_locals(loop.body) - {x for s in loop.within for x in ir.declared(s)}
    if not all(x.shape for x in results):
        raise CannotError("iterations share a local")
    varying = varying_locals(loop) - results
    for s in loop.within:
        is_apart = not s.contents.is_same(varying, set())
        if isinstance(s, ir.Jump) or (is_apart and isinstance(s, ir.While)):
            raise CannotError("it ends early")
        if isinstance(s, ir.For) and is_apart and not keys_of(s, varying):
            raise CannotError("each lane has another range")

    def work(body: ir.Body) -> int:
        return work_of(body, is_fast=machine.is_fast)

    body, varying = with_masks(loop.body, varying, set(), work, by_keys=True)
    loop = replace(loop, body=body, is_together=False)
    lanes = int(count.value)
    survey = Survey(loop, (lanes,), {}, machine, frozenset(varying))
    parts = survey.block(body, 1)
    if survey.totals.operations > MOST_OPERATIONS:
        raise CannotError("LLVM takes too long")
    return stretches(Lanes(loop, (lanes,), lanes, survey.varying, parts, {}, True, machine.is_fast))
