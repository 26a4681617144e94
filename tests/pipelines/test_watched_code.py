"""The Python code of a pipeline does under watch what it does without: rewriting changes nothing that it can see."""

import collections
import contextlib
import functools
import importlib
import inspect
import logging
import sys
import warnings

import numpy as np
import pytest
import taichi as ti
from differences import outputs, scalars
from numpy.testing import assert_allclose

from taichi_ext import jacobian
from taichi_ext.runtime.python.watch import is_watched

pytestmark = pytest.mark.usefixtures("ti64")

LOG = []
TOTAL = 0


class Base:
    __slots__ = ("__dict__",)

    def __init__(self, start):
        self.start = start

    def grown(self, by=1):
        return self.start + by


class Derived(Base):
    count = 3
    __hidden = 5

    def grown(self, by=2):
        return super().grown(by) * self.__hidden

    @property
    def double(self):
        return 2 * self.start

    @double.setter
    def double(self, value):
        self.start = value / 2

    @functools.cached_property
    def cached(self):
        LOG.append("cached")
        return self.start**2

    @classmethod
    def of(cls, *args, **keywords):
        return cls(*args, **keywords)

    @staticmethod
    def halved(x):
        return x / 2

    def __getattr__(self, name):
        if name == "absent":
            raise AttributeError(name)
        return f"no {name}"

    def __add__(self, other):
        return ("add", self.start, other)

    def __radd__(self, other):
        return ("radd", self.start, other)

    def __iadd__(self, other):
        self.start += other
        return self

    def __matmul__(self, other):
        return ("matmul", other)

    def __call__(self, *args, key=None):
        return args, key

    def __getitem__(self, index):
        return index

    def __setitem__(self, index, value):
        LOG.append((index, value))

    def __len__(self):
        return 4

    def __enter__(self):
        LOG.append("enter")
        return self

    def __exit__(self, *_):
        LOG.append("exit")

    def __iter__(self):
        yield from range(self.count)


def classes():
    d = Derived.of(1.5)
    d.double = 10
    d[1:2, ...] = 3
    d[0] += 4
    d += 2.5
    found = [d.grown(), d.double, d.cached, d.cached, Derived.halved(3), d + 1, 1 + d, d @ 2, d(1, *[2, 3], key=4)]
    with d as entered, contextlib.suppress(AttributeError):
        found.append(entered is d)
        found.append(d.absent)
    return [*found, d.other, d[1:2, None], list(d), len(d), isinstance(d, Base), d.__class__.__name__]


def control():
    found = []
    for i in range(5):
        if i == 1:
            continue
        if i == 4:
            break
        found.append(i**2)
    else:
        found.append("else")
    n = 3
    while n > 0:
        n -= 1
    else:
        found.append("done")
    try:
        found.append([1, 2][5])
    except IndexError as error:
        found.append(str(error))
    finally:
        found.append("finally")
    match [1, {"a": 2}]:
        case [1, {"a": b}] if b == 2:
            found.append(b)
        case _:
            found.append("nothing")
    return found


def scopes():
    global TOTAL
    TOTAL += 1
    outer = 1

    def inner(x, *, y=2, **rest):
        nonlocal outer
        outer += x
        return outer + y + len(rest)

    values = {k: inner(k, y=k, z=0) for k in range(3)}
    lambdas = [lambda x, k=k: x * k + outer for k in range(3)]
    (walrus := [f(2) for f in lambdas]).append(len(locals()))
    return values, walrus, outer, inner.__name__, inner.__qualname__, lambdas[0].__qualname__, TOTAL > 0


def generators():
    def numbers(n):
        for i in range(n):
            sent = yield i
            if sent:
                yield sent * 10

    stream = numbers(3)
    first = [next(stream), stream.send(5), *stream]
    a, (b, *c), d = 1, [2, 3, 4], 5
    x = y = [1, 2, 3]
    x[0], y[1] = y[1], x[0]
    del x[2]
    return (
        first,
        a,
        b,
        c,
        d,
        x,
        sum(i * j for i in range(3) for j in range(i)),
        [*range(2), *"ab"],
        {**{"a": 1}, "b": 2},
    )


def augmented():
    holder = Derived(1)
    values, table = np.arange(4.0), {"a": [1]}
    values += 1
    values[1:3] *= 2
    values[[0, 3]] -= 1
    table["a"] += [2]
    table["a"][0] <<= 3
    holder.items = {"n": 1}
    holder.items["n"] += 5
    [holder][0].start **= 2
    text = "a"
    text += "b"
    bits = 0b1100
    bits &= 0b0110
    bits |= 1
    bits ^= 0xF
    matrix = np.eye(2)
    matrix @= np.array([[1.0, 2.0], [3.0, 4.0]])
    return (
        values.tolist(),
        table,
        holder.items,
        holder.start,
        text,
        bits,
        matrix.tolist(),
        7 // 2,
        -7 % 3,
        ~5,
        +True,
        not 0,
    )


def order_of_evaluation():
    seen = []

    def note(x):
        seen.append(x)
        return x

    box = {note(1): note(2)}
    box[note(1)] = note(3)
    box[note(1)] += note(4)
    values = [0, 10]

    def changing():
        values[0] = 100
        return 1

    values[0] += changing()
    total = values[0]
    total += note(5) - note(6) * note(7)
    note(f"{seen} {note(8)!r:>{note(4)}} {seen!s}{{}} {note(9)=} {'é'!a}{seen[-1]:03d}")
    return seen, box, values, total, note(1) < note(3) < note(2) < note(9)


def frames():
    here = sys._getframe().f_code.co_name
    names = [f.function for f in inspect.stack(0)[:1]]
    return here, names, sorted(vars()), eval("here + '!'")


def numbers():
    table = collections.OrderedDict(b=1.5, a=[2.5])
    point = collections.namedtuple("Point", "x y")(1.0, 2.0)
    return (
        table,
        point,
        point._replace(x=3),
        max([1.0, 3.0], key=lambda v: -v),
        sorted({3, 1}),
        f"{point.x:>5.1f}{here()!r}",
    )


def here(default=(1, 2)):
    """A docstring."""
    return here.__doc__, default


def depth(n):
    return 0 if n == 0 else 1 + depth(n - 1)


def keywords(function=1, self=2, **rest):
    return function, self, rest


class Proxy:
    """An object whose class and attributes are looked up by its own code."""

    def __init__(self, value):
        self._value = value

    def __getattribute__(self, name):
        return object.__getattribute__(self, name)

    @property
    def __class__(self):
        return type(self._value)

    def get(self):
        return type(self).doubled(self)

    def doubled(self):
        return self._value * 2


def caller():
    return sys._getframe(1).f_code.co_name, inspect.currentframe().f_back.f_locals["secret"]


def calls():
    secret = "seen"  # noqa: F841
    found = [depth(600), keywords(function=3, self=4, name=5), dict(function=1, self=2), caller()]
    return [*found, isinstance(Proxy(1), int), Proxy(3).get()]


PROGRAMS = (calls, classes, control, scopes, generators, augmented, order_of_evaluation, numbers)


@pytest.fixture(scope="module")
def scene(ti64):
    x, y = scalars([1.0, 2.0]), outputs(2)

    @ti.kernel
    def square():
        for i in x:
            y[i] = x[i] ** 2

    return x, y, square


def run_under_watch(scene, program):
    x, y, square = scene
    found = []

    def pipeline():
        square()
        found.append((program(), is_watched(program.__code__)))

    assert_allclose(jacobian(pipeline, x, y), [[2.0, 0.0], [0.0, 4.0]])
    return found[0]


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_do_what_they_do(scene, program):
    LOG.clear()
    plain, log = program(), list(LOG)
    LOG.clear()
    own = program.__code__
    found, is_rewritten = run_under_watch(scene, program)
    assert is_rewritten
    assert repr(found) == repr(plain)
    assert log == LOG
    assert program.__code__ is own


def test_functions_that_look_at_their_frame(scene):
    plain = frames()
    found, is_rewritten = run_under_watch(scene, frames)
    assert is_rewritten
    assert found[2:] == plain[2:]


def test_errors_are_the_user_s_own_with_their_lines(scene):
    x, y, square = scene

    def failing():
        square()
        return [1.0, 2.0][0] / 0.0

    own = failing.__code__
    with pytest.raises(ZeroDivisionError) as caught:
        jacobian(failing, x, y)
    lines = [entry.lineno for entry in caught.traceback if str(entry.path) == __file__]
    assert lines[-1] + 1 == own.co_firstlineno + 2  # pytest counts from 0
    assert failing.__code__ is own


def warn_at_caller():
    warnings.warn("above", UserWarning, stacklevel=2)
    return 1


def test_lines_of_helpers_and_of_long_expressions(scene):
    x, y, square = scene

    def failing():
        square()
        found = warn_at_caller()
        return [1.0, found][7]

    first = failing.__code__.co_firstlineno
    with pytest.raises(IndexError) as caught, pytest.warns(UserWarning, match="above") as warned:
        jacobian(failing, x, y)
    assert [(w.filename, w.lineno) for w in warned if w.category is UserWarning] == [(__file__, first + 2)]
    lines = [entry.lineno + 1 for entry in caught.traceback if str(entry.path) == __file__]
    assert lines[-1] == first + 3


def test_logs_and_warnings_name_the_user_s_line(scene, caplog):
    x, y, square = scene

    def pipeline():
        square()
        logging.getLogger("watched").warning("here")
        warnings.warn("there", UserWarning, stacklevel=1)

    with pytest.warns(UserWarning, match="there") as caught:
        jacobian(pipeline, x, y)
    first = pipeline.__code__.co_firstlineno
    assert [(w.filename, w.lineno) for w in caught if w.category is UserWarning] == [(__file__, first + 3)]
    (record,) = [r for r in caplog.records if r.name == "watched"]
    assert (record.pathname, record.lineno, record.funcName) == (__file__, first + 2, "pipeline")


def test_classes_and_functions_are_as_they_were(scene):
    members = dict(vars(Derived))
    codes = [f.__code__ for f in (Derived.grown, Derived.__add__, Derived.double.fget, Derived.of.__func__)]
    run_under_watch(scene, classes)
    assert dict(vars(Derived)) == members
    assert [f.__code__ for f in (Derived.grown, Derived.__add__, Derived.double.fget, Derived.of.__func__)] == codes


def test_functions_without_a_source_run_as_they_are(scene):
    names = {}
    exec("def program(a=2):\n    return [i * a for i in range(3)]", names)
    assert run_under_watch(scene, names["program"]) == ([0, 2, 4], False)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="functions have type parameters from Python 3.12 on")
def test_functions_with_type_parameters(scene, tmp_path, monkeypatch):
    path = tmp_path / "generic_functions.py"
    path.write_text(
        "def program[T](a: T = 1.5) -> list:\n"
        "    def inner[U](b: U) -> tuple:\n"
        "        return T.__name__, U.__name__, b * 2\n"
        "    return [inner(a), Box[int](2).doubled()]\n"
        "class Box[T]:\n"
        "    def __init__(self, value: T):\n"
        "        self.value = value\n"
        "    def doubled(self) -> T:\n"
        "        return self.value * 2\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    program = importlib.import_module("generic_functions").program
    assert run_under_watch(scene, program) == ([("T", "U", 3.0), 4], True)
