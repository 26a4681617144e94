"""Fields and arrays of a program as they are known outside of the kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from taichi_ext import backend
from taichi_ext.analysis.activity import find_activity
from taichi_ext.launches.launch import ContainerInfo, Launch
from taichi_ext.launches.seeds import seeds_of
from taichi_ext.program import Container, Effect, Load, Program, Store, mapped, with_nodes
from taichi_ext.record.constants import Constants
from taichi_ext.record.node_calls import check_appended, with_appends, with_clears
from taichi_ext.record.recording import field_container


def with_whole_fields(program: Program, launch: Launch) -> tuple[Program, dict[Container, ContainerInfo]]:
    """Facts from outside of the kernel about its fields and arrays, each field and array being one container.

    A component of a vector field that the kernel names by itself becomes an entry of the field. Loops over it stay: its
    layout may be another than that of the field. An array that the kernel is given twice is the first of its arguments.
    """
    positions = {leaf.name: n for n, leaf in enumerate(backend.leaf_arguments(launch.kernel))}
    found = ((c, launch.arrays.get(positions[c.name])) for c in program.containers if c.is_argument)
    arrays = [(c, info) for c, info in found if info is not None]
    wholes = _wholes(program)
    first = {info.key: c for c, info in reversed(arrays)}
    fields = ((whole, launch.fields.field(c.object)) for c, (whole, _) in wholes.items())
    infos = {c: info for c, info in (*arrays, *fields) if info is not None and first.get(info.key, c) is c}
    parts = {c: whole for c, whole in wholes.items() if whole[0] is not c}
    parts |= {c: (first[info.key], ()) for c, info in arrays if first[info.key] is not c}
    return (_with_parts(program, parts) if parts else program), infos


def _wholes(program: Program) -> dict[Container, tuple[Container, tuple[int, ...]]]:
    """For each field that a program names, its container, and its component in that."""
    found: dict[Container, tuple[Container, tuple[int, ...]]] = {}
    fields = [(c, backend.whole_field(c.object)) for c in program.containers if not c.is_argument]
    wholes: dict[Any, Container] = {}
    for c, whole in sorted(fields, key=lambda field: field[0].object is not field[1]):  # whole fields first
        name = backend.field_identity(whole)
        if name not in wholes:
            wholes[name] = c if whole is c.object else field_container(whole, c.name)
        found[c] = wholes[name], backend.component_index(whole, c.object)
    return found


def _with_parts(program: Program, parts: dict[Container, tuple[Container, tuple[int, ...]]]) -> Program:
    """The program with entries of whole fields for those of their components."""

    def change(value: object) -> Any:
        if isinstance(value, Load) and value.container in parts:
            container, index = parts[value.container]
            return Load(container, value.indices, index or value.component, place=value.place)
        return value

    def changed(s: Any) -> Any:
        s = with_nodes(s, change)
        if isinstance(s, Store):
            return replace(s, target=change(s.target))
        if isinstance(s, Effect):
            return replace(s, writes=tuple(dict.fromkeys(parts[c][0] if c in parts else c for c in s.writes)))
        return s

    containers = tuple(dict.fromkeys((*(whole for whole, _ in parts.values()), *program.containers)))
    return replace(program, body=mapped(program.body, changed), containers=containers)


def with_node_calls(
    program: Program, launch: Launch, infos: dict[Container, ContainerInfo], constants: Constants | None
) -> tuple[Program, dict[Container, ContainerInfo]]:
    """The program with the effects of its calls on layout nodes on fields, including fields that it does not name."""
    seen = {info.key for info in infos.values()}
    known = (i for k, i in launch.fields.infos.items() if k not in seen and not backend.ended_problem(i.obj))
    others = {field_container(info.obj, str(info.name)): info for info in known}
    infos = {**infos, **others}
    fields = [c for c in infos if not c.is_argument]
    program, lost = with_appends(replace(program, containers=(*program.containers, *others)), fields)
    seeds = seeds_of(program, launch, infos, constants)
    activity = find_activity(program, seeds.start, seeds.arguments)
    check_appended(lost, activity)
    return with_clears(program, fields, activity), infos
