"""Python values that Taichi puts into a kernel when it compiles it, and whether they have changed since.

Taichi compiles a kernel once and does not notice when a global, attribute or item that it names is assigned again.
Numbers and texts are compared by value; vectors, tuples, lists, dicts and arrays by what they hold; functions by their
code and closure; fields and all other objects by identity. Of a plain Python function that Taichi calls, the numbers,
fields and functions are compared that its code names.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import inspect
import linecache
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from taichi_ext.backend.lifetime import check_not_ended
from taichi_ext.backend.opaque import TracingState
from taichi_ext.errors import UnsupportedError
from taichi_ext.host import RUNTIME, ASTResolver, ASTTransformer, Func, Kernel, bound, build_call, is_decorated, ti

# How Python values are reached that kernels name, and those that plain Python functions name.

NUMBERS = (bool, int, float, complex, str, type(None), np.generic)


class Path(NamedTuple):
    """How a value is reached: attributes and items of an object, or a name from outside of a function and its own."""

    owner: Any  # the object or function
    steps: tuple[Any, ...]  # names of attributes, and items, each in a tuple of its own
    text: str  # as the source has it
    is_global: bool = False  # whether the first step is a name that the function reads

    @property
    def key(self) -> object:
        """The same for each way to write it, as long as the owner exists."""
        return id(self.owner), self.steps

    def part(self, step: Any) -> Path:
        """An attribute or item of its value."""
        text = f"{self.text}.{step}" if isinstance(step, str) else f"{self.text}[{step[0]!r}]"
        return self._replace(steps=(*self.steps, step), text=text.lstrip("."))

    def reader(self) -> Callable[[], Any]:
        """A function that gives its present value; it keeps no object alive whose attribute it is."""
        (first, *others), owner = self.steps, self.owner
        if not self.is_global:
            get, held = _getter(owner, first), reference_to(owner)
            read = lambda: get(held(), first)  # noqa: E731
        elif first in owner.__code__.co_freevars:
            cell = owner.__closure__[owner.__code__.co_freevars.index(first)]
            read = functools.partial(getattr, cell, "cell_contents")
        else:
            read = functools.partial(owner.__globals__.__getitem__, first)
        if not others:
            return read
        steps = [operator.attrgetter(s) if isinstance(s, str) else operator.itemgetter(*s) for s in others]
        if len(steps) == 1:
            (step,) = steps
            return lambda: step(read())
        return lambda: functools.reduce(lambda value, step: step(value), steps, read())


def _getter(owner: Any, name: str) -> Callable[[Any, str], Any]:
    """The function that reads an attribute of an object: not Taichi's for classes with kernels, which takes long.

    Taichi's takes properties of such a class from the class itself, whatever a subclass has in their place.
    """
    classes = type(owner).__mro__[:-1]
    own = [vars(c)["__getattribute__"] for c in classes if "__getattribute__" in vars(c)]
    is_property = any(isinstance(vars(c).get(name), property) for c in classes)
    return object.__getattribute__ if own and all(map(is_taichi, own)) and not is_property else getattr


def reference_to(obj: Any) -> Callable[[], Any]:
    """A function that gives an object, without keeping it alive where it can be referred to weakly."""
    if not isinstance(obj, NUMBERS):
        with contextlib.suppress(TypeError):  # it has no weak references
            return weakref.ref(obj)
    return lambda: obj


def is_taichi(obj: object) -> bool:
    """Whether an object is, or belongs to, one of Taichi's own."""
    module = getattr(obj, "__module__", None) or getattr(obj, "__name__", None) or ""
    return RUNTIME.owns(str(module)) or RUNTIME.owns(type(obj).__module__)


def python_function(value: Any) -> tuple[Any, object]:
    """The plain Python function of the user's behind a callable, and the object that it is bound to."""
    owner: object = None
    if isinstance(value, types.MethodType):
        value, owner = value.__func__, value.__self__
    elif not isinstance(value, (types.FunctionType, type)):
        value, owner = inspect.getattr_static(type(value), "__call__", None), value
    module = getattr(value, "__module__", None) or ""
    is_library = module.split(".")[0] in (RUNTIME.name, "numpy", "taichi_ext", *sys.stdlib_module_names)
    is_plain = isinstance(value, types.FunctionType) and not hasattr(value, "_is_taichi_function")
    return (value, owner) if is_plain and not is_library else (None, None)


def python_reads(function: types.FunctionType, owner: object) -> Iterator[tuple[Path, object]]:
    """The numbers, fields and functions that a Python function names."""
    for path, value in _values(function, {} if owner is None else {function.__code__.co_varnames[0]: owner}):
        if isinstance(value, (*NUMBERS, ti.Field, ti.Ndarray, ti.Matrix, types.FunctionType, types.MethodType)):
            yield path, value


def values_read(
    function: types.FunctionType, given: Mapping[str, object], codes: tuple[types.CodeType, ...] = ()
) -> Iterator[tuple[Path, object]]:
    """What a kernel names, and functions that it names: variables, and attributes of the objects given as arguments."""
    for path, value in _values(function, given):
        yield path, value
        method = bound(value)
        inner = method[0] if method is not None else value if is_decorated(value) else None
        inner = inspect.unwrap(inner) if callable(inner) else None
        if inspect.isfunction(inner) and not is_taichi(inner) and inner.__code__ not in codes:
            own = {} if method is None else dict.fromkeys(inner.__code__.co_varnames[:1], method[1])
            yield from values_read(inner, own, (*codes, inner.__code__))


def _values(function: types.FunctionType, given: Mapping[str, object]) -> Iterator[tuple[Path, object]]:
    code = function.__code__
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    for first, *names in _paths(code):
        path = Path(function, (first,), first, is_global=True)
        if first in cells:
            value = None if cells[first] == types.CellType() else cells[first].cell_contents
        elif first in function.__globals__ and first not in code.co_varnames:
            value = function.__globals__[first]
        elif first in given and names:
            path, value = Path(given[first], (), first), given[first]
        else:
            continue
        for name in names:
            if isinstance(value, (*NUMBERS, ti.Field, ti.Matrix)):
                break
            path = path.part(name)
            try:
                value = getattr(value, name)
            except Exception:  # of a property
                break
        yield path, value


@functools.lru_cache(maxsize=1024)
def _paths(code: types.CodeType) -> list[list[str]]:
    """The names in the code of a function, each with the attributes that are read of it; not those that it assigns."""
    paths: list[list[str]] = []
    path: list[str] = []
    stored: set[object] = set()
    for instruction in dis.get_instructions(code):
        kind, name = instruction.opname, instruction.argval
        if kind.startswith(("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FAST")):
            path = [name[-1] if isinstance(name, tuple) else name]
            paths.append(path)
        elif kind in ("LOAD_ATTR", "LOAD_METHOD"):
            path.append(name)
        elif kind.startswith("STORE_"):
            stored.add(name)
        if not kind.startswith(("LOAD_", "PUSH_NULL", "CACHE", "EXTENDED_ARG")):
            path = []
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return [p for p in paths if stored.isdisjoint(p)] + [p for c in inner for p in _paths(c)]


# What is compared, and how.

CONTAINERS = (list, tuple, dict)
_COMPARED = (*CONTAINERS, types.MethodType, np.ndarray, ti.Matrix, ti.Struct)  # by what they hold
_LARGEST_ARRAY = 4096  # entries, of those that are compared
_LONGEST = 1024  # items of a list, tuple or dict, of those that are compared
_MOST_ITEMS = 8  # of a container that are compared separately: otherwise all of it is compared
_DEEPEST = 8  # containers and functions in each other
_GONE = (AttributeError, KeyError, IndexError, ReferenceError, ValueError)  # an owner, or a variable, has been deleted

Place = tuple[str, int, str]  # file, line, function


class Capture:
    """A global, attribute or item as it was when a kernel was compiled.

    Attributes:
        read: gives its present value.
        text: it, as the source has it.
        key: equal for values that mean the same in a kernel.
        reference: gives the value that it was, if that is compared by identity.
        is_still: whether a value is certainly the same, quickly; if not, the keys decide.
        uses: the number of its uses other than to read an attribute or item of it.
        items: the number of its items that are captures of their own.
    """

    def __init__(self, path: Path, place: Place, value: object) -> None:
        self.read, self.text, self._place = path.reader(), path.text, place
        self.key = frozen(value)
        self.reference = None if isinstance(value, _COMPARED) else reference_to(value)
        self.is_still = _quick_test(value)
        self.is_number = isinstance(value, NUMBERS)
        self.value = value if self.is_number else None  # keeps no field alive
        self.uses, self.items = 1, 0

    @property
    def place(self) -> str:
        """Where the source names it, as Taichi's messages cite it."""
        file, line, function = self._place
        return f'File "{file}", line {line}, in {function}:\n{linecache.getline(file, line).rstrip()}'

    def has_changed(self) -> bool:
        """Whether it is another value than it was."""
        try:
            now = self.read()
        except _GONE:
            return False
        return not self.is_still(now) and frozen(now) != self.key


class _Same:
    """An object, referred to weakly where possible: equal to itself alone."""

    def __init__(self, obj: object) -> None:
        self.get = reference_to(obj)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.get() is not None and self.get() is other.get()

    __hash__ = None  # type: ignore[assignment]


def _quick_test(value: Any) -> Callable[[Any], bool]:
    if isinstance(value, NUMBERS):
        return lambda now: now is value
    if isinstance(value, types.MethodType):
        function, owner = reference_to(value.__func__), reference_to(value.__self__)
        return lambda now: type(now) is types.MethodType and now.__func__ is function() and now.__self__ is owner()
    if isinstance(value, CONTAINERS):
        kept = _leaves(value)
        if len(kept) > _LONGEST or not all(isinstance(leaf, NUMBERS) for leaf in kept):
            return lambda now: False
        return lambda now: (
            isinstance(now, CONTAINERS) and len(f := _leaves(now)) == len(kept) and all(map(operator.is_, f, kept))
        )
    reference = reference_to(value)
    if isinstance(value, ti.Matrix):
        data = _numbers(value).tobytes()
        return lambda now: now is not None and now is reference() and now.entries.tobytes() == data
    is_fixed = not isinstance(value, (np.ndarray, ti.Struct))
    return lambda now: now is not None and now is reference() and is_fixed


def _leaves(container: Any, depth: int = 0) -> list[object]:
    """What a container holds, within others that it holds, too, with the sizes of those; no more than are compared."""
    leaves: list[object] = []
    for item in (*container, *container.values()) if isinstance(container, dict) else container:
        is_inner = isinstance(item, CONTAINERS) and depth < _DEEPEST
        leaves += [len(item), *_leaves(item, depth + 1)] if is_inner else [item]
        if len(leaves) > _LONGEST:
            break
    return leaves


def _numbers(array: Any) -> np.ndarray:
    numbers = np.asarray(array.entries if isinstance(array, ti.Matrix) else array)
    return numbers.astype(np.float64) if isinstance(array, ti.Matrix) and numbers.dtype == object else numbers


def frozen(value: Any, depth: int = 0) -> Any:
    """A key that is equal for values that mean the same in a kernel."""
    if isinstance(value, NUMBERS):
        value = float(value) if isinstance(value, float) else value  # the same with a tangent
        return (type(value), value if value and value == value else repr(value))  # 0.0 is not -0.0, nan is nan
    if depth < _DEEPEST:
        if isinstance(value, CONTAINERS):
            leaves = _leaves(value)
            is_long = len(leaves) > _LONGEST
            return (len(value), id(value)) if is_long else tuple(frozen(leaf, depth + 1) for leaf in leaves)
        if isinstance(value, ti.Struct):
            return ("struct", *((name, frozen(getattr(value, name), depth + 1)) for name in value.keys))
        if isinstance(value, types.MethodType):
            return ("method", frozen(value.__func__, depth + 1), _Same(value.__self__))
        if isinstance(value, types.FunctionType) or is_decorated(value):
            return _frozen_function(value, depth + 1)
    if isinstance(value, ti.Matrix) or (isinstance(value, np.ndarray) and value.size <= _LARGEST_ARRAY):
        numbers = _numbers(value)
        return ("array", numbers.shape, numbers.dtype.str, numbers.tobytes())
    return _Same(value)


def _frozen_function(value: Any, depth: int) -> Any:
    """The code of a function and the values that it has from around it; functions of Taichi and our own as objects."""
    function: Any = inspect.unwrap(value)
    if is_taichi(function) or hasattr(function, "_is_wrapped_kernel"):
        return _Same(value)
    if not hasattr(function, "__code__"):  # of C, also behind a stand-in that takes dual numbers
        return _Same(function)
    cells = [c.cell_contents for c in function.__closure__ or () if c != types.CellType()]
    values = (*cells, *(function.__defaults__ or ()), function.__kwdefaults__)
    return ("function", function.__code__, frozen(values, depth))


class Reader(Protocol):
    """Gives the values of names and attributes, and notices when ``ti.static`` is evaluated."""

    def read_name(self, function: Any, name: str, value: Any) -> Any: ...

    def read_attribute(self, owner: object, name: str, value: object) -> object: ...

    def enter_static(self, change: int) -> None: ...


class Captures:
    """The values that one compilation has put into a kernel."""

    def __init__(self) -> None:
        self._all: dict[object, Capture] = {}
        self._used: list[Capture] | None = None
        self.first = _First(self)
        self._agrees = self  # the first values that these have been found to agree with
        self.reader: Reader | None = None

    def note(self, path: Path, value: Any, place: Place) -> bool:
        """Keep a value; False where it is none that can be compared."""
        if path.key in self._all:
            self._all[path.key].uses += 1
            return True
        if isinstance(value, float) and _is_own(value):
            value = float(value)  # keeps no tangent alive
        if isinstance(value, types.ModuleType) or _is_own(value) or _is_own(path.owner):
            return False
        check_not_ended(value, f"The field {path.text}")  # of plain kernels too, which would die
        capture = Capture(path, place, value)
        if isinstance(capture.key, _Same) and capture.has_changed():  # each time that it is read
            return False
        self._all[path.key], self._used = capture, None
        function, bound = python_function(value)
        for read, captured in () if function is None else python_reads(function, bound):
            self.note(read, captured, place)
        return True

    def note_part(self, whole: Path, step: Any, value: Any, place: Place) -> None:
        """Keep an attribute or item of a value, which itself is compared only if it is used otherwise, too."""
        of, path = self._all.get(whole.key), whole.part(step)
        if isinstance(step, tuple) and path.key not in self._all:
            if of is None or of.items == _MOST_ITEMS:
                return
            of.items += 1
        if self.note(path, value, place) and of is not None:
            of.uses -= 1

    def add(self, others: Captures) -> None:
        """Compare those of another compilation, too."""
        for key, capture in others._all.items():  # of the same class
            mine = self._all.setdefault(key, capture)
            mine.uses += 0 if mine is capture else max(0, capture.uses)
        self._used = None

    def with_numbers(self) -> Iterator[tuple[Capture, object]]:
        """Those that are numbers or may hold some, with their values now."""
        for c in self._all.values():
            if c.uses > 0 and (c.is_number or c.reference is None):
                with contextlib.suppress(*_GONE):
                    yield c, c.read()

    def changed(self) -> Capture | None:
        if self._used is None:
            self._used = [c for c in self._all.values() if c.uses > 0]
        for capture in self._used:  # at each launch
            if capture.has_changed():
                return capture
        return None

    def are_current(self, kernel: Kernel) -> bool:
        """Whether a kernel that was compiled with them computes what the plain kernel would; False: compile it again.

        Raises UnsupportedError where the plain kernel, or the first one with tangents, was compiled with other values.
        """
        changed, first = self.changed(), self.first.captures
        if changed is None and first is self._agrees:
            return True
        other = first.changed()
        if other is not None:
            raise UnsupportedError(_message(kernel, other))
        if changed is None:
            self.add(first)
            self._agrees = first
        return changed is None


class _First:
    """The values that count for a kernel with such arguments: the plain kernel's, once Taichi has compiled it."""

    def __init__(self, captures: Captures) -> None:
        self.captures = captures


def _message(kernel: Kernel, changed: Capture) -> str:
    values = f" from {changed.value!r} to {changed.read()!r}" if changed.is_number else ""
    return (
        f"{changed.place}\n{changed.text} has changed{values} since {kernel.func.__qualname__} was compiled. "
        "Taichi puts Python values into a kernel when it first compiles it, and does not notice when they change. "
        "Pass what changes as an argument of the kernel (a field as a ti.template()), or keep numbers in a field."
    )


def _is_own(value: object) -> bool:
    """Whether something is a value of the kernel that is compiled, as Taichi or the recorder has it."""
    module = type(value).__module__
    return module.startswith("taichi_ext.") or module == f"{RUNTIME.name}.lang.expr"


# --- what kernels were first compiled with


_kernels: weakref.WeakKeyDictionary[Kernel, tuple[Any, dict[Any, _First]]] = weakref.WeakKeyDictionary()


def first_captures(kernel: Kernel, features: object, captures: Captures, *, is_plain: bool = False) -> Captures:
    """The values that count for a kernel with such arguments: these, if it is the plain one or the first one."""
    program = RUNTIME.program()
    known = _kernels.get(kernel)
    if known is None or known[0]() is not program:
        known = _kernels[kernel] = (weakref.ref(program), {})
    captures.first = known[1].setdefault(features, _First(captures))
    if is_plain:
        captures.first.captures = captures
    return captures.first.captures


# --- notes of the values, taken while Taichi or the recorder walks a kernel


_noting: list[Captures] = []
_functions: weakref.WeakKeyDictionary[Func, tuple[Any, Captures]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def noting(captures: Captures) -> Iterator[None]:
    """Note the Python values that are named while a kernel is compiled."""
    _noting.append(captures)
    try:
        yield
    finally:
        _noting.pop()


def keep_function(func: Func, captures: Captures) -> None:
    """A real function was compiled with these values, once for all kernels that call it."""
    known = _functions.get(func)
    if known is not None and known[0]() is RUNTIME.program():
        captures.add(known[1])  # for other types of arguments
    _functions[func] = weakref.ref(RUNTIME.program()), captures


def note_function(func: Func) -> None:
    """A function is called: if it is a real one that was compiled before, the values of that time count."""
    known = _functions.get(func)
    if _noting and known is not None and known[0]() is RUNTIME.program():
        _noting[-1].add(known[1])


def read_member(struct: object, name: str) -> object:
    """The value of a member of a struct of Python numbers, in the kernel that is walked."""
    value = getattr(struct, name)
    reader = _noting[-1].reader if _noting else None
    return value if reader is None else reader.read_attribute(struct, name, value)


def _note_name(context: TracingState, node: Any) -> None:
    name, function = node.id, context.func.func
    if name not in context.global_vars or any(name in scope for scope in context.local_scopes):
        node.root = Path(node.ptr, (), name)
    elif not is_taichi(function) and not name.startswith("<"):  # a function of the recorder
        node.root = Path(function, (name,), name, is_global=True)
        captures = _noting[-1]
        captures.note(node.root, context.global_vars[name], _place(context, node))
        if captures.reader is not None:
            node.ptr = captures.reader.read_name(function, name, node.ptr)


def _note_attribute(context: TracingState, node: Any) -> None:
    _note_read(context, node, node.value, node.attr)


def _note_read(context: TracingState, node: Any, base: Any, name: str) -> None:
    """Note that a node reads an attribute of another one's value."""
    reader = _noting[-1].reader
    if _note_part(context, node, base, name, node.ptr) and reader is not None:
        node.ptr = reader.read_attribute(base.ptr, name, node.ptr)


def _note_item(context: TracingState, node: Any) -> None:
    index = node.slice.ptr
    if isinstance(index, (list, tuple)) and len(index) == 1:
        index = index[0]
    _note_part(context, node, node.value, (index,))


def _note_part(context: TracingState, node: Any, base: Any, step: Any, value: object = None) -> bool:
    """Note an attribute, or an item in a tuple of its own, of the value of a node; False for those of Taichi."""
    if isinstance(base, ast.Constant):  # evaluated for a call that reads an attribute, which is noted itself
        return False
    whole: Path = getattr(base, "root", None) or Path(base.ptr, (), "")
    of_taichi = is_taichi(whole.owner) or is_taichi(base.ptr)
    if whole.owner is None or (of_taichi and not isinstance(base.ptr, ti.Struct)):
        return False
    if isinstance(step, tuple):
        if not (whole.steps and isinstance(base.ptr, CONTAINERS) and isinstance(step[0], (int, str))):
            return False
        container: Any = base.ptr
        value = container[step[0]]
    node.root = whole.part(step)
    _noting[-1].note_part(whole, step, value, _place(context, node))
    return True


def _place(context: TracingState, node: Any) -> tuple[str, int, str]:
    return context.file, node.lineno + context.lineno_offset, context.func.func.__name__


def _note_call(context: TracingState, node: Any) -> None:
    """Note what a call of the recorder reads: ``<ad>.attribute(x, "name")``, a ``method`` or ``load``."""
    function = getattr(node.func, "id", "")
    if function == "<ad>.attribute":
        _note_read(context, node, node.args[0], node.args[1].value)
    elif function == "<ad>.method":
        base, name = node.args[0], node.args[1].value
        if hasattr(base.ptr, name):
            _note_part(context, ast.copy_location(ast.Pass(), node), base, name, getattr(base.ptr, name))
    elif function == "<ad>.load" and len(node.args[1].elts) == 1:
        _note_part(context, node, node.args[0], (node.args[1].elts[0].ptr,))


def follow_captures() -> None:
    """From now on, the Python values that kernels are compiled with can be noted."""
    notes = {"build_Name": _note_name, "build_Attribute": _note_attribute, "build_Subscript": _note_item}
    for kind, note in notes.items():
        setattr(ASTTransformer, kind, staticmethod(_followed(getattr(ASTTransformer, kind), note)))
    setattr(ASTTransformer, "build_Call", staticmethod(_followed_call(build_call)))  # noqa: B010


def _followed(build: Callable[..., object], note: Callable[..., None]) -> Callable[..., object]:
    def wrapped(context: object, node: object) -> object:
        result = build(context, node)
        if _noting:
            note(context, node)
        return result

    return wrapped


def _followed_call(build: Callable[..., object]) -> Callable[..., object]:
    noted = _followed(build, _note_call)

    def wrapped(context: TracingState, node: Any) -> object:
        reader = _noting[-1].reader if _noting else None
        is_static = reader is not None and any(
            ASTResolver.resolve_to(node.func, static, context.global_vars) for static in (ti.static, ti.static_assert)
        )
        if reader is None or not is_static:
            return noted(context, node)
        reader.enter_static(1)
        try:
            return build(context, node)
        finally:
            reader.enter_static(-1)

    return wrapped
