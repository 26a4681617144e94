"""All simplifications, in their order."""

from __future__ import annotations

from dataclasses import replace

from taichi_ext.program import Program
from taichi_ext.simplify.dead import without_dead_code
from taichi_ext.simplify.folding import folded
from taichi_ext.simplify.scalars import as_scalars
from taichi_ext.simplify.versions import with_first_values, with_versions


def simplify(program: Program) -> Program:
    """Vectors as scalars, a name for each version of a local, constants folded, temporaries put where they are used."""
    body = program.body
    for step in (as_scalars, with_first_values, with_versions, without_dead_code, folded):
        body = step(body)
    return replace(program, body=body)
