"""Build the fused kernel of one launch: trace until the facts no longer change; the last trace emits.

Building a kernel without launching it costs milliseconds and compiles nothing to machine code.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from taichi_ext import backend, stages
from taichi_ext.boundary.registry import registry
from taichi_ext.derivative.linear_form import Affine, Form, Seed, as_expression, is_row
from taichi_ext.derivative.rows import rows_loop
from taichi_ext.derivative.storage import SPARSE, row_sum
from taichi_ext.derivative.values import Scalar, TensorValue, entries_of, linearize, primal_of
from taichi_ext.derivative.watch import TracedWatch
from taichi_ext.differentiate.decisions import RETURN, VALUES
from taichi_ext.differentiate.entry_sites import Site
from taichi_ext.differentiate.sparse_columns import Columns
from taichi_ext.differentiate.storage import STRATEGIES
from taichi_ext.errors import UnsupportedError
from taichi_ext.launches import ContainerInfo, Fused, Launch, Role, refuse_changed
from taichi_ext.record.names import TRACER
from taichi_ext.record.nesting import loops_by_number
from taichi_ext.record.rewrite import Rewritten, rewrite
from taichi_ext.tracing.constants import Constants
from taichi_ext.tracing.containers import Container, ShadowRow, broadcast, columns_only
from taichi_ext.tracing.explained import reported
from taichi_ext.tracing.facts import Facts
from taichi_ext.tracing.sparse_containers import sink_returned, sparse_container
from taichi_ext.tracing.sparse_sink import Sink
from taichi_ext.tracing.tracer import Tracer

MAX_TRACES = 400


class _Bindings:
    """The tracer's view of a launch."""

    def __init__(self, launch: Launch, extra: tuple[Any, ...], facts: Facts) -> None:
        self.launch = launch
        self.extra = extra
        self.facts = facts
        self.containers: dict[Any, Container] = {}
        self.arrays: dict[int, tuple[Any, ContainerInfo]] = {}
        self.shadow_arrays: dict[Any, Any] = {}
        self.paired = facts.paired()
        self.sparse: Columns | None = None
        self.texts: dict[str, str] = {}
        self.constants: Constants | None = None

    def bind_arguments(self, tracer: Tracer, context: Any) -> None:
        launch = self.launch
        for key, name in zip(self.extra, shadow_names(self.extra), strict=True):
            self.shadow_arrays[key] = context.get_var_by_name(name)
        if self.sparse is not None:
            tracer.sink = Sink(tracer, self.sparse, self.shadow_arrays)
        for position, argument in enumerate(launch.kernel.arguments):
            name = argument.name
            bound = context.get_var_by_name(name)
            if position in launch.arrays:
                self.arrays[id(bound)] = (bound, launch.arrays[position])
            elif name in launch.argument_columns:
                first = launch.argument_columns[name]
                if self.sparse is not None:
                    first = self.sparse.first(("argument", name)) or 0
                self._seed_argument(context, name, bound, first)
            elif backend.is_scalar_integer(bound):
                tracer.set_atom(f"argument {name}", bound)

    def _seed_argument(self, context: Any, name: str, bound: Any, first: int) -> None:
        if name in rewrite(self.launch.kernel.func).names:
            self.facts.read.add(("argument", name))
        if backend.is_tensor(bound):
            entries = [self._seeded(e, first + i) for i, e in enumerate(entries_of(bound))]
            value: Any = TensorValue(entries, backend.shape_of(bound))
        else:
            value = self._seeded(bound, first)
        for scope in context.local_scopes:
            if name in scope:
                scope[name] = value

    def seed_form(self, column: int) -> Form:
        """The tangent of one number that is an argument or Python's: its column, or a given row of tangents."""
        dtype = self.launch.values_dtype
        if dtype is None:
            column -= self.launch.first_column
            is_here = self.sparse is not None or 0 <= column < self.launch.columns
            return {Seed(Affine((), column)): 1} if is_here else {}
        self.facts.note(self.facts.shadowed, VALUES)
        shadow = self.shadow_arrays.get(VALUES)
        if shadow is None:
            return {}  # in the first trace
        rows = Container(VALUES, "values", (1,), (), (), dtype, self.launch.columns, shadow=shadow)
        return {ShadowRow(rows, VALUES, Affine((), column), column): 1}

    def _seeded(self, expression: Any, column: int) -> Scalar:
        scalar = Scalar(expression, form=self.seed_form(column))
        scalar.variable = expression  # an argument does not change
        return scalar

    def container(self, tracer: Tracer, obj: Any) -> Container | None:
        if not self.launch.columns:
            return None  # no derivative is asked for: fields and arrays are what they are to Taichi
        info = self._info(obj)
        if info is None:
            return None
        if info.key not in self.containers:
            role = self.launch.roles.get(info.key, Role())
            if self.sparse is not None:
                if role.has_shadow and not self._is_sunk(info.key):
                    self.facts.note(self.facts.shadowed, info.key)
                shadow = None if self._is_sunk(info.key) else self.shadow_arrays.get(info.key)
                is_fresh = role.first_column is None and not role.has_shadow
                self.containers[info.key] = sparse_container(
                    tracer, info, self.sparse, shadow, self._is_sunk(info.key), role.first_column is not None, is_fresh
                )
                return self.containers[info.key]
            if role.has_shadow:
                self.facts.note(self.facts.shadowed, info.key)
            self.containers[info.key] = Container(
                info.key,
                info.name,
                info.shape,
                info.element_shape,
                info.offset,
                info.dtype,
                self.launch.columns,
                None
                if info.key in self.shadow_arrays or role.first_column is None
                else role.first_column - self.launch.first_column,
                self.shadow_arrays.get(info.key),
                role.first_column is None and (role.is_fresh or not role.has_shadow),
                is_paired=info.key in self.paired,
            )
        return self.containers[info.key]

    def _is_sunk(self, key: Any) -> bool:
        return key in self.launch.sinks or key in self.facts.composed

    def container_by_key(self, tracer: Tracer, key: Any) -> Container | None:
        """The container of a field, by its key."""
        info = self.launch.fields.infos.get(key)
        return None if info is None else self.container(tracer, info.obj)

    def placed(self, noted: Any) -> Any:
        """The field that was noted in an earlier trace, or the argument of this one that is the array noted there."""
        if isinstance(noted.target, backend.Field):
            return noted.target
        return next(array for array, info in self.arrays.values() if info.key == noted.key)

    def _info(self, obj: Any) -> ContainerInfo | None:
        if isinstance(obj, backend.AnyArray):
            known = self.arrays.get(id(obj))
            return None if known is None else known[1]
        return self.launch.fields.field(obj)

    def component(self, obj: Any) -> int | None:
        return None if isinstance(obj, backend.AnyArray) else self.launch.fields.component(obj)

    def sunk(self, tracer: Tracer, launch: Launch, sites: tuple[Site, ...]) -> tuple[dict[Any, int], dict[Any, Any]]:
        """Size and type of each container that sites write to."""
        sizes = {site.key: tracer.sink.sizes[site.key] for site in sites}
        return sizes, {key: _shadow_dtype(launch, key) for key in sizes}

    def returned(self, tracer: Tracer, value: Any) -> Any:
        if self.launch.wants_return:
            if tracer.sink is None:
                self.facts.note(self.facts.shadowed, RETURN)
            self.facts.written.add(RETURN)
            if tracer.sink is not None:
                sink_returned(tracer, RETURN, value)
            shadow = self.shadow_arrays.get(RETURN)
            if shadow is not None:
                _store_returned(tracer, shadow, value)
        return primal_of(value)


def _store_returned(tracer: Tracer, shadow: Any, value: Any) -> None:
    scalars = broadcast(value, 1)
    dtypes = [backend.dtype_of(primal_of(scalar)) for scalar in scalars]
    container = Container(RETURN, "the return value", (len(scalars),), (), (), dtypes[0], tracer.columns, shadow=shadow)
    for i, (scalar, dtype) in enumerate(zip(scalars, dtypes, strict=True)):
        form = columns_only(tracer, linearize(tracer, scalar))
        if any(is_row(leaf) for leaf in form):

            def body(k: Any, i: int = i, form: Any = form, dtype: Any = dtype) -> None:
                backend.assign(container.tangent(i, k), row_sum(form, k, dtype))

            rows_loop(tracer.columns, body, reads_memory=True)
        for seed, c in form.items():
            if not is_row(seed):
                entry = container.tangent(i, tracer.column_expression(seed))
                backend.assign(entry, entry + as_expression(c, dtype))


def shadow_names(keys: tuple[Any, ...]) -> list[str]:
    return [f"<shadow{i}>" for i in range(len(keys))]


def fuse(launch: Launch) -> Fused:
    """The kernel that does what ``launch.kernel`` does, and its tangents."""
    kernel = launch.kernel
    rewritten = rewrite(kernel.func)
    features = backend.argument_features(kernel, launch.args)
    facts = Facts(STRATEGIES[launch.strategy])
    if launch.sparse is not None:
        if launch.strategy == "auto":
            facts.limits = SPARSE
        facts.in_rows, facts.composed = set(launch.sparse.in_rows), dict(launch.sparse.composed)
    start = time.perf_counter()
    for count in range(1, MAX_TRACES + 1):
        facts.changed = False
        extra = (*sorted(facts.shadowed - set(facts.composed) - launch.sinks, key=repr), *facts.streams)
        with backend.deep_recursion():
            fused = _trace_once(launch, rewritten, features, facts, extra)
        if not facts.changed:
            for rule in facts.used_rules:
                rule.uses += 1
            refuse_changed(kernel, backend.first_captures(kernel, features, fused.kernel.captures).changed())
            stages.note(f"{backend.short_name(kernel)} analysed in {count} traces", start)
            return fused
    code = kernel.func.__code__
    raise UnsupportedError(
        f'File "{code.co_filename}", line {code.co_firstlineno}, in {kernel.func.__qualname__}:\nThe analysis did '
        f"not settle: the dependencies of the locals kept changing over {MAX_TRACES} traces. Split the kernel in two."
    )


def trace_plain(kernel: Any, args: tuple[Any, ...], fields: Any) -> Any:
    """A kernel that asks for no Jacobian, traced for what only the engine can build (antialiased edges)."""
    return fuse(Launch(kernel, args, 0, fields, {})).kernel


def _trace_once(launch: Launch, rewritten: Rewritten, features: Any, facts: Facts, extra: tuple[Any, ...]) -> Fused:
    kernel = launch.kernel
    bindings = _Bindings(launch, extra, facts)
    is_reverse = backend.is_reverse(kernel)
    facts.covered.clear()
    if launch.sparse is not None:
        bindings.sparse = launch.sparse.extended(facts.in_rows, facts.composed, facts.versions)
    columns = launch.columns if bindings.sparse is None else bindings.sparse.width
    tracer = Tracer(facts, columns, bindings, is_reverse)
    tracer.watch = None if launch.watch is None else TracedWatch(launch.watch)
    bindings.constants = _constants(launch, tracer, facts, bindings.sparse)
    names = shadow_names(extra)
    arrays = ((a, v) for a, v in zip(kernel.arguments, launch.args, strict=True) if backend.is_array(v))
    has_vectors = any(backend.array_element_shape(value, argument.annotation) for argument, value in arrays)
    fused = backend.FusedKernel(kernel, names, has_vectors=has_vectors)
    fused.captures.reader = bindings.constants
    scope = {**backend.global_variables(kernel.func), TRACER: tracer}
    for position in kernel.template_slot_locations:
        scope[kernel.arguments[position].name] = launch.args[position]
    dtypes = [backend.ti.u64 if key in bindings.paired else _shadow_dtype(launch, key) for key in extra]
    shadow_features = [backend.array_feature(dtype) for dtype in dtypes]
    context = backend.make_context(
        kernel.func,
        rewritten.source,
        scope,
        kernel=fused,
        arguments=list(launch.args),
        argument_features=(*features, *shadow_features),
        places=rewritten.places,
    )
    tracer.contexts.append(context)
    tree = rewritten.tree()
    tracer.loop_nodes = loops_by_number(tree)
    fused.trace(tree, context, f"{kernel.func.__name__}_jacobian", lambda: _is_settled(facts, tracer, bindings))
    sizes, version = tracer.scratch_sizes, registry.version
    known = replace(facts.frozen(), report=reported(facts, columns))
    sites = () if tracer.sink is None else tuple(tracer.sink.sites)
    return Fused(
        kernel, fused, extra, known, rewritten.text, sizes, version, columns, {}, bindings.paired, sites,
        bindings.sparse, *bindings.sunk(tracer, launch, sites),
    )  # fmt: skip


def _constants(launch: Launch, tracer: Tracer, facts: Facts, sparse: Columns | None) -> Constants | None:
    """The Python numbers that are parameters; None where there are none, and no name could mean one."""
    if not launch.columns or not (launch.constants or launch.argument_columns):
        return None
    columns = {variable.key: first for variable, first in launch.constants}
    variables = tuple(variable for variable, _ in launch.constants)
    arguments = frozenset(launch.argument_columns)
    if sparse is not None:
        columns = {key: sparse.first(key) or 0 for key in columns}
    return Constants(tracer, columns, variables, tracer.plan.seed_form, arguments, facts.read, facts.namesakes)


def _is_settled(facts: Facts, tracer: Tracer, bindings: _Bindings) -> bool:
    """Collect the facts that only the end of a trace knows; True where the trace has found nothing new."""
    if facts.writes != tracer.writes:
        facts.writes = tracer.writes
        facts.changed = True
    for key in bindings.paired:
        if key in bindings.containers and bindings.containers[key].accesses:
            facts.note(facts.single, key)
    facts.operations = tracer.operations
    unused = {key for key in facts.shadowed if key[0] == "scratch" and key not in tracer.scratch_sizes}
    if unused:  # rows that have since been found to be rows of J
        facts.shadowed -= unused
        facts.changed = True
    if tracer.sink is not None and tracer.sink.names() != facts.streams:
        facts.streams, facts.changed = tracer.sink.names(), True
    if not facts.changed:
        tracer.accept_aliases()
        tracer.accept_stores()
    if not facts.changed:
        tracer.accept_pieces()
    if not facts.changed and tracer.sink is not None:
        tracer.sink.check()
    return not facts.changed


def _shadow_dtype(launch: Launch, key: Any) -> Any:
    if key == RETURN:
        return backend.return_dtype(launch.kernel)
    if key == VALUES:
        return launch.values_dtype
    if key[0] == "scratch":
        return backend.named_type(key[1])
    if key[0] == "site":
        return backend.i32 if key[2] == "integers" else _shadow_dtype(launch, key[3])
    if key[0] == "argument":
        return launch.arrays[key[1]].dtype
    return launch.fields.infos[key].dtype
