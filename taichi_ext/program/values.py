"""Values of a program: immutable nodes of expression trees over locals, containers and constants.

An expression is evaluated where the statement stands that holds it. A node may occur in several places of one
statement; it is then evaluated once. Walks of expressions, which may be deep, do not recurse through functions in C
such as ``map`` and ``any``: Python 3.12 counts that apart, and allows less of it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from taichi_ext.cached import cached_property

COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
LAZY = frozenset(("ifte", "logical_and", "logical_or"))  # whose operands after the first may not be evaluated
# What Python computes for operations, by their names; not ``invert``, as ``~True`` is -2.
_NAMED = (*COMPARISONS, "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg")
PYTHON: dict[str, Callable[..., Any]] = {n: getattr(operator, n) for n in _NAMED}
PYTHON |= {"bit_and": operator.and_, "bit_or": operator.or_, "bit_xor": operator.xor}
PYTHON |= {"shift_left": operator.lshift, "shift_right": operator.rshift}


@dataclass(frozen=True)
class Place:
    """Where something stands in the user's source, and the call that led there."""

    file: str
    line: int
    text: str = ""
    function: str = ""
    caller: Place | None = None

    def message(self) -> str:
        """File, line and source text as the first lines of an error message."""
        return f'File "{self.file}", line {self.line}, in {self.function}:\n{self.text}'


def cited(place: Place | None) -> str:
    """The first lines of an error message, which name a place; nothing if it is not known."""
    return "" if place is None else place.message() + "\n"


@dataclass(frozen=True, eq=False)
class Local:
    """A variable of the kernel, a kernel argument or a loop variable; known by its identity.

    ``kind`` is one of ``user`` (named by the user), ``argument`` (of an inlined function), ``temporary``, ``loop``,
    ``parameter`` (an argument of the kernel, or a Python number), ``rule`` (the tangent that a rule of a user
    takes: it is 0). In a differentiated program there are also ``partial`` (of an operation), ``weight`` (a product
    or sum that becomes part of tangents), ``tangent`` (of a local), ``column`` (the variable of a loop over columns),
    ``inside`` (whether the indices of an entry are in range) and ``kept`` (a temporary that is not inlined).
    """

    name: str
    dtype: Type
    shape: tuple[int, ...] = ()
    kind: str = "user"


@dataclass(frozen=True, eq=False)
class Container:
    """A field or an array argument; ``object`` is Taichi's own, ``shape`` is None where it is not yet known."""

    name: str
    dtype: Type
    ndim: int
    element_shape: tuple[int, ...] = ()
    object: Any = None
    is_argument: bool = False
    shape: tuple[int, ...] | None = None
    offset: tuple[int, ...] = ()


class Contents(NamedTuple):
    """The parts of an expression."""

    locals: frozenset[Local]  # that it reads
    containers: frozenset[Container]  # of which it reads entries
    size: int  # operations, each as often as it occurs
    is_pure: bool  # whether it is the same each time that it is evaluated

    def is_same(self, varying: Set[Local | Container], written: Set[Local | Container]) -> bool:
        """Whether it is the same where only these locals and containers may have changed."""
        return self.is_pure and varying.isdisjoint(self.locals) and written.isdisjoint(self.containers)


class Value:
    """A typed scalar expression: a constant, an operation, or something that is read."""

    dtype: Type
    place: Place | None

    @cached_property
    def contents(self) -> Contents:
        """The parts of the expression, found once for each node."""
        return _contents(self)


@dataclass(frozen=True, eq=False)
class Const(Value):
    """A number, exact in its type."""

    value: float | int | bool
    dtype: Type
    place: Place | None = field(default=None, kw_only=True, repr=False)


@dataclass(frozen=True, eq=False)
class FoldedConst(Value):
    """A number that is known already but depends on parameters: it has the derivative of its ``source``.

    ``source`` is an operation, or the read of a local of the kind ``parameter`` that is nowhere declared.
    """

    value: float | int
    dtype: Type
    source: Value
    place: Place | None = field(default=None, kw_only=True, repr=False)

    @property
    def constant(self) -> Const:
        """The number without its derivative."""
        return Const(self.value, self.dtype, place=self.place)


@dataclass(frozen=True, eq=False)
class Op(Value):
    """An operation on values: ``add``, ``sin``, ``cast`` (to its own type), ``select``, ``ifte``, ``random`` ..."""

    name: str
    args: tuple[Value, ...]
    dtype: Type
    place: Place | None = field(default=None, kw_only=True, repr=False)


@dataclass(frozen=True)
class Check:
    """An index that may be out of range: the number of the axis, the least index and the end, None if known to hold.

    The axes of a container are followed by those of its entries.
    """

    axis: int
    first: int | None
    end: int | None


@dataclass(frozen=True, eq=False)
class Read(Value):
    """A local, or one entry of a local vector or matrix."""

    local: Local
    index: tuple[int | Value, ...] = ()
    checks: tuple[Check, ...] = field(default=(), kw_only=True, repr=False)
    place: Place | None = field(default=None, kw_only=True, repr=False)

    @property
    def dtype(self) -> Type:  # type: ignore[override]
        return self.local.dtype

    @property
    def memory(self) -> Local:
        """The local, as the place that a store goes to."""
        return self.local

    @property
    def number(self) -> int | None:
        """The number of the entry in C order; None if the kernel computes it."""
        return flat_number(self.index, self.local.shape)


@dataclass(frozen=True, eq=False)
class Load(Value):
    """One entry of a container; ``component`` is the entry of a vector or matrix in it."""

    container: Container
    indices: tuple[Value, ...]
    component: tuple[int | Value, ...] = ()
    checks: tuple[Check, ...] = field(default=(), kw_only=True, repr=False)
    place: Place | None = field(default=None, kw_only=True, repr=False)

    @property
    def dtype(self) -> Type:  # type: ignore[override]
        return self.container.dtype

    @property
    def memory(self) -> Container:
        """The container, as the place that a store goes to."""
        return self.container


def flat_number(index: tuple[int | Value, ...], shape: tuple[int, ...]) -> int | None:
    """The number of an entry in C order; None unless all its indices are constants."""
    number = 0
    for i, n in zip(index, shape, strict=True):
        i = i.value if isinstance(i, Const) else i
        if not isinstance(i, int):
            return None
        number = number * n + i
    return number


@dataclass(frozen=True, eq=False)
class Size(Value):
    """The extent of an array argument along an axis."""

    container: Container
    axis: int
    place: Place | None = field(default=None, kw_only=True, repr=False)

    @property
    def dtype(self) -> Type:  # type: ignore[override]
        return I32


@dataclass(frozen=True, eq=False)
class Tensor:
    """Scalars that form a vector or matrix, in C order."""

    entries: tuple[Value, ...]
    shape: tuple[int, ...]

    @property
    def dtype(self) -> Type:
        return self.entries[0].dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[object]:
        """Entries of a vector, rows of a matrix."""
        width = len(self.entries) // self.shape[0]
        rows = (self.entries[i : i + width] for i in range(0, len(self.entries), width))
        return iter(self.entries) if len(self.shape) == 1 else rows


@dataclass(frozen=True, eq=False)
class Struct:
    """Named groups of values; ``kind`` is Taichi's struct type, where it has one."""

    members: Mapping[str, Group]
    kind: object = None


@dataclass(frozen=True, eq=False)
class Format:
    """Text with values in it, as ``template.format(*args)`` makes it, or ``template % args``."""

    template: str
    args: tuple[Any, ...]
    is_percent: bool = False


Group = Value | Tensor | Struct  # an argument or result of a function


def entries(group: Group) -> tuple[Value, ...]:
    """The scalars of a group, members in their order."""
    if isinstance(group, Struct):
        return tuple(e for member in group.members.values() for e in entries(member))
    return group.entries if isinstance(group, Tensor) else (group,)


def regrouped(like: Group, values: tuple[Value, ...]) -> Group:
    """A group of the structure of another, of the given scalars."""
    if isinstance(like, Struct):
        rest, members = values, {}
        for name, member in like.members.items():
            count = len(entries(member))
            members[name], rest = regrouped(member, rest[:count]), rest[count:]
        return Struct(members, like.kind)
    return Tensor(values, like.shape) if isinstance(like, Tensor) else values[0]


def children(value: Value) -> tuple[Value, ...]:
    """The operands of a node; indices are operands."""
    kind = type(value)
    if kind is Op:
        return value.args  # type: ignore[attr-defined]
    if kind is Read:
        return tuple([i for i in value.index if isinstance(i, Value)]) if value.index else ()  # type: ignore[attr-defined]
    if kind is Load:
        component = value.component  # type: ignore[attr-defined]
        return (*value.indices, *[i for i in component if isinstance(i, Value)])  # type: ignore[attr-defined]
    return ()


def own_part(value: Value) -> tuple[Hashable, ...]:
    """A node without its operands: values are written alike where these, and the operands, are equal."""
    match value:
        case Const(value=number, dtype=dtype):
            return repr(number), dtype
        case Op(name=name, dtype=dtype) if name != "random":
            return name, dtype
        case Read(local=local, index=index):
            return local, *(i if isinstance(i, int) else None for i in index)
        case Load(container=container, component=component):
            return container, *(i if isinstance(i, int) else None for i in component)
        case Size(container=container, axis=axis):
            return "size", container, axis
    return (value,)


_NOTHING = Contents(frozenset(), frozenset(), 0, True)


def _contents(value: Value) -> Contents:
    known = value.__dict__.get("contents")
    if known is None:
        locals_, containers, size, is_pure = joined_contents(children(value))
        if isinstance(value, Op):
            size, is_pure = size + 1, is_pure and value.name != "random"
        elif isinstance(value, Read):
            locals_ |= {value.local}
        elif isinstance(value, Load):
            containers |= {value.container}
        known = value.__dict__["contents"] = Contents(locals_, containers, size, is_pure)
    return known


def joined_contents(values: Iterable[Value]) -> Contents:
    """The parts of several expressions."""
    parts = [_contents(value) for value in values]
    if len(parts) < 2:
        return parts[0] if parts else _NOTHING
    locals_, containers, sizes, are_pure = zip(*parts, strict=True)
    return Contents(frozenset().union(*locals_), frozenset().union(*containers), sum(sizes), all(are_pure))


def walk(value: Value) -> list[Value]:
    """A node and all below it, each as often as it occurs, parents first."""
    result: list[Value] = []
    pending = [value]
    while pending:
        node = pending.pop()
        result.append(node)
        pending.extend(reversed(children(node)))
    return result


def with_children(value: Value, change: Callable[[Value], Value]) -> Value:
    """The node with changed operands; itself where none changes."""
    old = children(value)
    if not old:
        return value
    new = tuple([change(part) for part in old])
    if old == new:  # nodes are equal only to themselves
        return value
    if isinstance(value, Op):
        return Op(value.name, new, value.dtype, place=value.place)
    rest = iter(new)
    if isinstance(value, Read):
        return Read(value.local, _filled(value.index, rest), checks=value.checks, place=value.place)
    assert isinstance(value, Load)
    indices = tuple(next(rest) for _ in value.indices)
    component = _filled(value.component, rest)
    return Load(value.container, indices, component, checks=value.checks, place=value.place)


def _filled(index: tuple[int | Value, ...], new: Iterator[Value]) -> tuple[int | Value, ...]:
    return tuple(next(new) if isinstance(i, Value) else i for i in index)


def read_from(value: Value, names: Mapping[Local, Local]) -> Value:
    """The value; where it reads a local that has another one in ``names``, a read of that."""
    return replace(value, local=names[value.local]) if isinstance(value, Read) and value.local in names else value


def rebuilt(value: Value, change: Callable[[Value], Value], memo: dict[Value, Value] | None = None) -> Value:
    """The tree with ``change`` applied to each node, operands first; shared nodes stay shared.

    With a ``memo`` that several trees use, nodes that they share stay shared between them.
    """
    known: dict[Value, Value] = {} if memo is None else memo
    new = known.get(value)
    if new is None:
        new = known[value] = change(with_children(value, lambda part: rebuilt(part, change, known)))
    return new


# The scalar types of a program: names and properties, independent of Taichi.


@dataclass(frozen=True, eq=False)
class Type:
    """A scalar type, named as in Taichi: ``f32``, ``i32``, ``u1``. Those of ``TYPES`` are known by their identity."""

    name: str

    @cached_property
    def is_real(self) -> bool:
        return self.name.startswith("f")

    @cached_property
    def is_integer(self) -> bool:
        return not self.is_real

    @cached_property
    def is_signed(self) -> bool:
        return not self.name.startswith("u")

    @cached_property
    def bits(self) -> int:
        return int(self.name[1:])

    def wrapped(self, number: int) -> int:
        """The number in this type of whole numbers for a result that may lie beyond its range."""
        if self.bits == 1:
            return int(number != 0)
        number %= 2**self.bits
        return number - 2**self.bits if self.is_signed and number >= 2 ** (self.bits - 1) else number

    def __repr__(self) -> str:
        return self.name


F16, F32, F64 = Type("f16"), Type("f32"), Type("f64")
I8, I16, I32, I64 = Type("i8"), Type("i16"), Type("i32"), Type("i64")
U1, U8, U16, U32, U64 = Type("u1"), Type("u8"), Type("u16"), Type("u32"), Type("u64")
TYPES = {t.name: t for t in (F16, F32, F64, I8, I16, I32, I64, U1, U8, U16, U32, U64)}
