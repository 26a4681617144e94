"""Fields and arrays of a program as they are known outside of the kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.analysis.activity import find_activity
from taichi_ext.launches.launch import ContainerInfo, Launch
from taichi_ext.launches.seeds import seeds_of
from taichi_ext.program import Assign, Atomic, Container, For, Load, Program, Update, mapped, rebuilt, with_values
from taichi_ext.record.constants import Constants
from taichi_ext.record.node_calls import refuse_lost, with_appends, with_clears
from taichi_ext.record.recording import field_container


def with_whole_fields(program: Program, launch: Launch) -> tuple[Program, dict[Container, ContainerInfo]]:
    """What is known outside of the kernel of its fields and arrays, each field being one container.

    A component of a vector field that the kernel names by itself becomes an entry of the field.
    """
    infos: dict[Container, ContainerInfo] = {}
    whole: dict[Any, Container] = {}
    parts: dict[Container, tuple[Container, tuple[int, ...]]] = {}
    positions = {leaf.name: n for n, leaf in enumerate(backend.leaf_arguments(launch.kernel))}
    for c in program.containers:
        info = launch.arrays.get(positions[c.name]) if c.is_argument else launch.fields.field(c.object)
        if info is None:
            continue
        component = None if c.is_argument else launch.fields.component(c.object)
        if info.key not in whole:
            is_part = component is not None
            whole[info.key] = replace(c, element_shape=info.element_shape, object=info.obj) if is_part else c
            infos[whole[info.key]] = info
        if whole[info.key] is not c:
            index = () if component is None else tuple(map(int, np.unravel_index(component, info.element_shape)))
            parts[c] = whole[info.key], index
    if not parts:
        return program, infos

    def change(value: Any) -> Any:
        if isinstance(value, Load) and value.container in parts:
            container, index = parts[value.container]
            return Load(container, value.indices, index or value.component, place=value.place)
        return value

    body = mapped(program.body, lambda s: _with_targets(with_values(s, lambda v: rebuilt(v, change)), change, parts))
    containers = tuple(dict.fromkeys(parts[c][0] if c in parts else c for c in program.containers))
    return replace(program, body=body, containers=containers), infos


def _with_targets(s: Any, change: Any, parts: Any) -> Any:
    """The statement with its target, and the domain of its loop, changed."""
    if isinstance(s, (Assign, Update, Atomic)):
        return replace(s, target=change(s.target))
    if isinstance(s, For):
        return replace(s, domain=tuple(parts[d][0] if isinstance(d, Container) and d in parts else d for d in s.domain))
    return s


def with_node_calls(
    program: Program, launch: Launch, infos: dict[Container, ContainerInfo], constants: Constants | None
) -> tuple[Program, dict[Container, ContainerInfo]]:
    """The program with what its calls on nodes of the layout do to fields, also to those that it does not name."""
    seen = {info.key for info in infos.values()}
    others = {field_container(i.obj, str(i.name)): i for k, i in launch.fields.infos.items() if k not in seen}
    infos = {**infos, **others}
    fields = [c for c in infos if not c.is_argument]
    program, lost = with_appends(replace(program, containers=(*program.containers, *others)), fields)
    seeds = seeds_of(program, launch, infos, constants)
    activity = find_activity(program, seeds.start, seeds.arguments)
    refuse_lost(lost, activity)
    return with_clears(program, fields, activity), infos
