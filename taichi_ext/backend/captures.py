"""Python values that Taichi puts into a kernel when it compiles it, and whether they have changed since.

Taichi compiles a kernel once and does not notice when a global, attribute or item that it names is assigned again.
Numbers and texts are compared by value; vectors, tuples, lists, dicts and arrays by what they hold; functions by their
code and closure; fields and all other objects by identity. Of a plain Python function that Taichi calls, the numbers,
fields and functions are compared that its code names.
"""

from __future__ import annotations

import contextlib
import inspect
import linecache
import operator
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from taichi_ext.backend.lifetime import check_not_ended
from taichi_ext.backend.paths import NUMBERS, Path, is_taichi, python_function, python_reads, reference_to
from taichi_ext.errors import UnsupportedError
from taichi_ext.host import RUNTIME, Kernel, is_decorated, ti

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
        for read, found in () if function is None else python_reads(function, bound):
            self.note(read, found, place)
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

        Raises:
            UnsupportedError: the plain kernel, or the first one with tangents, was compiled with other values.
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
