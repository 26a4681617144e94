"""A prediction of the containers that have tangents at later launches, so that each kernel is compiled once.

It is predicted from the launches that the Python code names (``coming_launches``).  A kernel that is compiled for
tangents is valid if they are zero; a kernel that meets unforeseen tangents is compiled again.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from taichi_ext import backend, engine
from taichi_ext.launches import ArrayArgument, FieldKey, Flow, Launch, Role
from taichi_ext.runtime.memory.array_tangents import array_arguments
from taichi_ext.runtime.python.coming_launches import Coming, Loop, coming_launches

_MOST_ROUNDS = 16  # of a loop in Python, until no more containers get tangents


class Lookahead:
    """The prediction for one run; ``end`` is the code that runs the pipeline."""

    def __init__(self, end: types.CodeType) -> None:
        self._end = end
        self._flows: dict[Any, tuple[Flow | None, dict[Any, Any], Any]] = {}  # by kernel and arguments, kept alive

    def foreseen(self, launch: Launch, outer: Mapping[Any, object], carries: Callable[[object], bool]) -> Launch:
        """The launch, with roles for tangents that its containers carry now or when the kernel is launched again.

        Args:
            launch: the kernel, its arguments, and the current roles of its containers.
            outer: the keys of a session by those of the launch.
            carries: whether a container, by its key in a session, has tangents now.
        """
        prediction = _Prediction(lambda coming: self._flow(launch, coming), carries)
        features = backend.argument_features(launch.kernel, launch.args)
        present = Coming(launch.kernel, launch.args, features)
        coming = coming_launches(self._end)
        launches = set(_flat(coming))
        again = {c for c in launches if c.kernel is launch.kernel and c.features == features}
        if not again or again == launches:  # a launch allows for its own effects
            return launch
        before = prediction.run([present, *coming], again)
        inner = {key: local for local, key in outer.items()}
        later = {inner.get(key, key): Role(has_shadow=True) for key in before}
        known = {key: role for key, role in later.items() if isinstance(key, (FieldKey, ArrayArgument))}
        return replace(launch, roles={**launch.roles, **known})

    def _flow(self, launch: Launch, coming: Coming) -> tuple[Flow | None, dict[object, object]]:
        """The flow of tangents in a launch, and the keys of a session by those of the flow."""
        name = (id(coming.kernel), coming.features, *(id(a) for a in coming.args if backend.is_array(a)))
        if name not in self._flows:
            flow, outer = None, {}
            try:
                binding = array_arguments(coming.kernel, backend.leaf_values(coming.kernel, coming.args))
                outer = binding.outer
                flow = engine.flow(replace(launch, kernel=coming.kernel, args=coming.args, arrays=binding.arrays))
            except Exception:  # the launch itself raises it, if it is made
                pass
            self._flows[name] = flow, outer, coming
        return self._flows[name][:2]


class _Prediction:
    """A simulation of the coming launches: the containers with tangents, and those written, before each."""

    def __init__(
        self, flow: Callable[[Coming], tuple[Flow | None, Mapping[object, object]]], carries: Callable[[object], bool]
    ) -> None:
        self._flow = flow
        self._carries = carries
        self._known: set[object] = set()  # keys that have been looked at
        self._active: set[object] = set()
        self._written: set[object] = set()
        self._before: set[Any] = set()

    def run(self, coming: Iterable[Any], wanted: set[Coming]) -> set[Any]:
        """The containers that have tangents in memory before one of the wanted launches."""
        for item in coming:
            if isinstance(item, Coming):
                self._launch(item, wanted)
                continue
            for _ in range(_MOST_ROUNDS):
                state = len(self._active), len(self._written)
                self.run(item.body, wanted)
                if state == (len(self._active), len(self._written)):
                    break
        return self._before

    def _launch(self, coming: Coming, wanted: set[Coming]) -> None:
        flow, outer = self._flow(coming)
        if flow is None:
            return
        keys = {info.key: outer.get(info.key, info.key) for info in flow.infos.values()}
        for key in keys.values():
            if key not in self._known:
                self._known.add(key)
                self._active |= {key} if self._carries(key) else set()
        if coming in wanted:
            self._before |= {key for key in keys.values() if key in self._active and key in self._written}
        after = flow.active_after({local for local, key in keys.items() if key in self._active})
        self._active |= {keys[local] for local in after}
        self._written |= {keys[local] for local in flow.written}


def _flat(coming: Iterable[Any]) -> Iterable[Coming]:
    for item in coming:
        if isinstance(item, Loop):
            yield from _flat(item.body)
        else:
            yield item
