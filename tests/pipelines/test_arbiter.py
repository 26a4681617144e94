"""Numbers that the Python code of a pipeline computes: their derivative is right, or a warning names the line.

The derivative of each program is known from central differences of plain runs.
"""

import collections
import functools
import itertools
import json
import queue
import random
import types
import warnings
from collections import namedtuple
from queue import SimpleQueue

import numpy as np
import pytest
import taichi as ti
from captured_warnings import all_warnings, no_warnings
from differences import outputs, read, scalars, vectors, write
from kernel_texts import kernel_of, kernels_of
from numpy.testing import assert_allclose, assert_array_equal

from taichi_ext import DerivativeWarning, InvalidArgumentError, Jacobian, hessian, hvp, jacobian, jvp, vjp
from taichi_ext.api.runs.arbiter import only_launches

pytestmark = [pytest.mark.usefixtures("ti64"), pytest.mark.cpu_only("programs of the host's memory")]

AT = np.array([1.1, 1.7, 0.7])
Pair = namedtuple("Pair", "first second")


KERNELS = """
    square: for i in x: y[i] = x[i] ** 2; v[i] = ti.Vector([x[i] ** 2, 3.0 * x[i]])
    add(a: ti.f64):
        s[0] = 0.0
        for i in x:
            s[0] += a * x[i]
    add_array(a: A1):
        s[0] = 0.0
        for i in x:
            s[0] += a[i] * x[i]
    load(a: A1): for i in x: a[i] = x[i] ** 2
    add_vector(a: ti.types.vector(2, ti.f64)):
        s[0] = 0.0
        for i in x:
            s[0] += a[0] * x[i] + a[1] ** 2
    add_field:
        s[0] = 0.0
        for i in x:
            s[0] += y[i] ** 2 * x[0]
    pair() -> ti.types.vector(2, ti.f64): return ti.Vector([x[0] * x[1], x[2]])
"""


class Scene:
    """Squares of the parameters in ``y`` and ``v``; sums over the parameters, with numbers that Python has computed."""

    def __init__(self):
        self.x, self.y, self.v, self.s = scalars(AT), outputs(3), vectors([[0.0, 0.0]] * 3), outputs(1)
        vars(self).update(kernels_of(KERNELS, **vars(self)))

    def reset(self):
        write(self.x, AT)
        for field in (self.y, self.v, self.s):
            write(field, 0.0)

    def differences(self, program, h=1e-6):
        """The derivative of the sum by central differences."""
        found = np.zeros(3)
        for i, sign in itertools.product(range(3), (1, -1)):
            self.reset()
            write(self.x, AT + sign * h * np.eye(3)[i])
            program(self)
            found[i] += sign * read(self.s)[0] / (2 * h)
        self.reset()
        return found


@pytest.fixture(scope="module")
def scene(ti64):
    return Scene()


IMPORTS = """
import array, contextlib, csv, ctypes, decimal, fractions, heapq, io, json, math, pickle, queue, random, sqlite3, statistics
import struct, threading
from concurrent.futures import ThreadPoolExecutor
from taichi_ext import stop_gradient
"""


def programs(squared, others):
    """Functions of a scene; those of the first table begin with the squares of the parameters."""
    scope = {"definitions": IMPORTS, "decorator": "", "arguments": "(c)", "AT": AT, "Pair": Pair, "pytest": pytest}
    return kernels_of(squared, "c.square()\n...\n", **scope) | kernels_of(others, **scope)


# programs with the right derivative
RIGHT = programs(
    """
operators: c.add((c.y[0] * 3 - c.y[1] / c.y[2]) ** 2 + -c.y[0] + abs(c.y[1]) // 1 + divmod(c.y[1], 1.5)[1])
numbers_of_numpy: c.add(np.float64(2.0) * c.y[0] + c.y[2] / np.int64(3) + np.full(2, 2.0)[1] * c.y[0])
generators: c.add(sum(c.y[i] * w for i, w in enumerate((1.0, 2.0, 3.0))) + max(c.y[i] for i in range(3)))
sorted_numbers: c.add(sorted([c.y[0], c.y[1], c.y[2]])[1] * max(c.y[2], 0.1) + min(c.y[0], c.y[1]))
a_thread_reads:
    found = queue.Queue()
    thread = threading.Thread(target=lambda: found.put(c.y[0] * c.y[1]))
    thread.start()
    thread.join()
    c.add(found.get())
a_callback_is_given_numbers: c.add((lambda f, *args: f(*args))(lambda a, b: a * b + 1, c.y[0], c.y[1]))
a_loop_on_a_value:
    step = 1.0
    while step < 30 * c.y[0]:
        step = step * (1.0 + c.y[2])
    c.add(step)
vectors_of_numbers: c.add_vector(ti.Vector([c.y[0], c.y[1] * 2]) + c.v[2] * 3.0)
stored_in_a_field:
    c.y[1] = c.y[0] * c.y[2]
    c.y[0] += 1.0
    c.add_field()
stored_in_a_vector:
    c.v[0] = [c.y[1], 4.0]
    c.v[1][0] = c.y[0] ** 2
    c.add(c.v[0][0] * c.v[1][0])
stored_in_the_output: c.s[0] = c.y[0] * c.y[1]
a_test_of_the_type: c.add(c.y[0] ** 2 if isinstance(c.y[0], float) else 1.0)
copies: c.add(Pair(c.y[0], 1.0)._replace(second=c.y[1]).second * [c.y[0]].copy()[0])
a_file_of_others:
    # Text of numbers that do not depend on the params is no reason to warn.
    file = io.StringIO()
    csv.writer(file).writerow([0.25])
    print(f"{c.y[0]:.3f}", json.dumps([c.y[1]]), file=io.StringIO())
    c.add(float(file.getvalue()))
logged: c.log = [c.y[0], float(c.y[1]), c.y.to_numpy()]; c.add(2.0)
integers:
    # Whole numbers have no derivative, as in kernels.
    c.add(int(10 * c.y[0]) * 0.5 + round(c.y[1]) + (3.0 if c.y[0] > 1 else 4.0) + math.floor(c.y[2]))
a_generator_that_is_sent_numbers:
    def sums():
        total = 0.0
        while True:
            total += (yield total) ** 2
    running = sums()
    next(running)
    c.add([running.send(c.y[i]) for i in range(3)][-1])
a_heap_and_an_order:
    heap = [c.y[0], c.y[1], c.y[2]]
    heapq.heapify(heap)
    first = max(range(3), key=lambda i: c.y[i])
    c.add(heapq.heappop(heap) + 2 * heapq.nlargest(2, heap)[1] * c.y[first])
steps_of_adaptive_length:
    time, value = 0.0, c.y[0]
    while time < 0.5:
        step = min(0.1 / (1.0 + max(c.y[i] for i in range(3))), 0.5 - time)
        value, time = value + step * (c.y[1] - value * value), time + step
    c.add(value)
numpy_arrays_of_objects:
    numbers = np.array([c.y[0], c.y[1], c.y[2]], dtype=object)
    c.add((numbers * numbers).sum() + numbers.dot(np.arange(3.0)))
said_to_be_constant: c.add(c.y[0] - stop_gradient(c.y[0]) + float(AT[0] ** 2))
random_numbers_of_python: random.seed(0); c.add(c.y[0] * random.random() + np.random.default_rng(0).normal())
""",
    """
returned_vectors: c.add_vector(c.pair() * 2.0)
a_parameter_that_python_reads: c.add(c.x[1] * 2.0)
a_parameter_that_python_changes:
    c.x[0] = c.x[1] * c.x[0]
    c.square()
    c.add(c.y[0])
""",
)
# programs that lose a derivative
SAID = programs(
    """
to_numpy: c.add(c.y.to_numpy()[0] * 2)
a_conversion: c.add(float(c.y[0]))
a_part_that_is_lost: c.add(c.y[0] + 0.3 * float(c.y[1]))
a_list_of_numbers_for_numpy: c.add(np.linalg.norm([c.y[0], c.y[1]]))
an_array_for_a_field: c.y.from_numpy(2 * c.y.to_numpy()); c.add_field()
text:
    file = io.StringIO()
    csv.writer(file).writerow([c.y[0]])
    c.add(float(file.getvalue()))
views_and_choices_of_numpy:
    a = c.y.to_numpy()
    a[1:] += a[:-1]
    c.y.from_numpy(np.where(a > a.mean(), a, 2 * a))
    c.add_field()
a_thread_with_an_array:
    with ThreadPoolExecutor(1) as pool:
        c.add(pool.submit(lambda: float(c.y.to_numpy().sum())).result())
""",
    """
rows_of_a_history:
    history = np.zeros((3, 3))
    c.load(history[0])
    history[1] = history[0]
    history[2] = 2 * history[1]
    c.add_array(history[2])
a_view:
    whole = np.zeros(6)
    c.load(whole[:3])
    whole[3:] = whole[:3] ** 2
    c.add_array(whole[3:])
a_copy:
    a = np.zeros(3)
    c.load(a)
    c.add_array(a.copy())
changed_in_place:
    a = np.zeros(3)
    c.load(a)
    a *= 2.0
    c.add_array(a)
an_object_that_is_a_float:
    class Total:
        value = 0.0
        def __float__(self):
            return float(self.value)
    c.square()
    total = Total()
    total.value = c.y[0] * 2
    c.add(float(total))
a_root:
    optimize = pytest.importorskip("scipy.optimize")
    c.square()
    target = c.y[0]
    c.add(optimize.brentq(lambda t: t**3 - target, 0.0, 5.0))
a_tensor:
    torch = pytest.importorskip("torch")
    c.square()
    c.add((c.y.to_torch() * torch.arange(3)).sum().item())
""",
)


# --- the checks -------------------------------------------------------------------------------------------------------


def evaluated(scene, program, **options):
    """J of a program, and the warnings of lost derivatives."""
    scene.reset()
    with all_warnings() as caught:
        J = jacobian(lambda: program(scene), scene.x, scene.s, **options)
    return J, [w for w in caught if w.category is DerivativeWarning and "prepared" not in str(w.message)]


def after(scene, program):
    """All fields after a plain run."""
    scene.reset()
    program(scene)
    return [read(field) for field in (scene.x, scene.y, scene.v, scene.s)]


@pytest.mark.mostly_sweep(
    *("operators", "numbers_of_numpy", "generators", "sorted_numbers", "a_thread_reads", "a_loop_on_a_value"),
    *("vectors_of_numbers", "stored_in_a_field", "stored_in_a_vector", "a_test_of_the_type", "a_file_of_others"),
    *("integers", "a_generator_that_is_sent_numbers", "a_heap_and_an_order", "steps_of_adaptive_length"),
    *("numpy_arrays_of_objects", "random_numbers_of_python", "returned_vectors", "a_parameter_that_python_changes"),
)
@pytest.mark.parametrize("name", RIGHT)
def test_programs_with_the_right_derivative(scene, name):
    program, options = RIGHT[name], [{}, {"chunk_size": 2}, {"format": "csr"}]
    expected, left = scene.differences(program), after(scene, program)
    for option in options[: 3 if name in ("operators", "stored_in_a_field", "returned_vectors", "integers") else 1]:
        J, caught = evaluated(scene, program, **option)
        assert not caught, [str(w.message) for w in caught]
        J = J.toarray()[0] if option.get("format") else J[0]
        if name == "said_to_be_constant":  # in which they are no constants
            expected = np.full(3, AT[0] ** 2) + [2 * AT[0] * AT.sum(), 0.0, 0.0]
        assert_allclose(J, expected, rtol=1e-6, atol=1e-7)
        for field, values in zip((scene.x, scene.y, scene.v, scene.s), left, strict=True):
            assert_allclose(read(field), values, rtol=1e-14)


@pytest.mark.parametrize("name", SAID)
def test_programs_that_lose_a_derivative(scene, name):
    program = SAID[name]
    expected, left = scene.differences(program), after(scene, program)
    J, caught = evaluated(scene, lambda c: (program(c), c.y[0], c.s[0]))  # what is read afterwards is no use of it
    assert not np.allclose(J, expected, rtol=1e-4), "it is right, so it belongs to the others"
    first = program.__code__.co_firstlineno
    lines = [w.lineno for w in caught]
    assert lines, "the derivative is lost without a warning"
    assert all(w.filename == program.__code__.co_filename for w in caught)
    assert all(first < line < first + 15 for line in lines)
    for field, values in zip((scene.x, scene.y, scene.v, scene.s), left, strict=True):
        assert_array_equal(read(field), values)


@pytest.mark.mostly_sweep(every=4)
@pytest.mark.parametrize("name", sorted({*RIGHT, *SAID} - {"changed_in_place"}))  # which has no adjoint
def test_programs_in_reverse_mode(scene, name):
    program = RIGHT.get(name) or SAID[name]
    J, _ = evaluated(scene, program)
    left = [read(field) for field in (scene.x, scene.y, scene.v, scene.s)]
    rows, caught = evaluated(scene, program, mode="reverse")
    assert bool(caught) == (name in SAID)
    assert_allclose(rows[0], J[0], rtol=1e-9, atol=1e-12)
    for field, values in zip((scene.x, scene.y, scene.v, scene.s), left, strict=True):
        assert_allclose(read(field), values, rtol=1e-14)
    if name in RIGHT and name != "said_to_be_constant":  # the derivative of the gradient, too
        run, along, ends = lambda: program(scene), np.array([0.3, -1.0, 0.5]), []
        for step in (1e-5, -1e-5, 0.0):
            scene.reset()
            write(scene.x, AT + step * along)
            with all_warnings():
                ends.append(vjp(run, scene.x, scene.s, np.ones(1)) if step else hvp(run, scene.x, along, scene.s))
        assert_allclose(ends[2], (ends[0] - ends[1]) / 2e-5, rtol=1e-6, atol=1e-6)


def loses(c):
    c.square()
    c.add(float(c.y[0]))


@pytest.mark.parametrize("direction", [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
def test_a_product_along_a_direction_in_which_nothing_is_lost(scene, direction):
    """The first call says what is lost along others."""
    scene.reset()
    with pytest.warns(DerivativeWarning, match="passed to .*add depends on the params"):
        jvp(lambda: loses(scene), scene.x, np.array(direction), scene.s)
    assert_allclose(read(scene.s), AT[0] ** 2 * AT.sum())


@pytest.mark.parametrize("options", [{}, {"format": "csr"}], ids=["dense", "csr"])
def test_an_array_of_which_a_part_has_tangents(scene, options):
    """Numbers that Python computes have none; sparse runs do not tell the parts apart."""

    def pipeline():
        rows = np.zeros(6)
        scene.load(rows[3:])
        rows[:3] = rows[3:] ** 2
        scene.add_array(rows)

    pytest.importorskip("scipy.sparse")
    scene.reset()
    with pytest.warns(DerivativeWarning, match="passed to .*add_array: each depends on the params"):
        J = jacobian(pipeline, scene.x, scene.s, **options)
    assert_allclose(J.toarray() if options else J, [AT**4])
    assert_allclose(read(scene.s), (AT**5).sum())


@pytest.mark.mostly_sweep("jvp", "several runs", "csr", "hessian")
@pytest.mark.parametrize(
    "call",
    [
        lambda run, c: jvp(run, c.x, np.ones(3), c.s),
        lambda run, c: vjp(run, c.x, c.s, np.ones(1)),
        lambda run, c: jacobian(run, c.x, c.s, chunk_size=1),
        lambda run, c: jacobian(run, c.x, c.s, format="csr"),
        lambda run, c: hessian(run, c.x, c.s),
    ],
    ids=["jvp", "vjp", "several runs", "csr", "hessian"],
)
def test_all_calls_warn(scene, call):
    scene.reset()
    with pytest.warns(DerivativeWarning, match="passed to .*add depends on the params"):
        call(lambda: loses(scene), scene)


@pytest.mark.mostly_sweep("forward-torch", "reverse-torch")
@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("mode", ["forward", "reverse"])
def test_a_parameter_that_python_reads_from_an_array(scene, kind, mode):
    """Before a kernel reads it, or after; where none does, it is an error."""
    array = np.array(AT) if kind == "numpy" else pytest.importorskip("torch").tensor(AT, dtype=float)

    def loses(a):
        scene.add_array(a)
        scene.add(float(a[0]) * 2.0)

    def loses_before(a):
        scene.add(float(a[0]) * 2.0)
        scene.add_array(a)

    twice = lambda a: (scene.add_array(a), scene.add_array(a))
    reads_only_here = lambda a: scene.add(float(a[0]) * 2.0)

    def found(run):
        scene.reset()
        return jacobian(run, array, scene.s, args=(array,), mode=mode)

    for run, line in ((loses, 2), (loses_before, 1)):
        with pytest.warns(DerivativeWarning, match="passed to .*add depends on the params") as caught:
            found(run)
        lines = [w.lineno - run.__code__.co_firstlineno for w in caught if "passed to" in str(w.message)]
        assert lines == [line]
    with no_warnings(DerivativeWarning):
        assert_allclose(np.ravel(found(twice)), AT, rtol=1e-12)
    with pytest.raises(InvalidArgumentError, match="what Python computes from an array has no derivative"):
        found(reads_only_here)


@pytest.mark.parametrize("mode", ["forward", "reverse"])
def test_a_parameter_that_python_only_compares(scene, mode):
    run = lambda: scene.add(1.0 if scene.y[0] > 0.0 else 2.0)
    scene.reset()
    with pytest.warns(DerivativeWarning, match="does not depend on any of the params"):
        assert not jacobian(run, scene.y, scene.s, mode=mode).any()


@pytest.mark.parametrize("product", ["vjp", "jvp"])
def test_numbers_that_python_rounds_to_float32_move_with_the_params(scene, product):
    run = lambda: (scene.square(), scene.add(float(np.float32(scene.y[0]))))
    scene.reset()
    with pytest.warns(DerivativeWarning, match="passed to .*add depends on the params"):
        if product == "vjp":
            vjp(run, scene.x, scene.s, np.ones(1))
        else:
            jvp(run, scene.x, np.array([0.1, 1.0, -2.0]), scene.s)  # along which y[0] moves little


def test_only_the_first_call_of_a_prepared_form_runs_again(scene):
    runs = SimpleQueue()
    pipeline = lambda: (runs.put(1), scene.square(), scene.add(scene.y[0]))
    plan = Jacobian(pipeline, scene.x, scene.s)
    scene.reset()
    plan()
    assert runs.qsize() == 3  # with moved params, and as they are
    for _ in range(3):
        plan()
    assert runs.qsize() == 6


def test_pipelines_that_pass_nothing_on_run_once(scene):
    runs, array = queue.SimpleQueue(), np.zeros(3)

    def reads():
        runs.put(1)
        scene.square()
        scene.add(2.0)
        while scene.s[0] < 1.0:
            pass

    def passes():
        for _ in range(2):
            scene.load(array)
        scene.add_array(array)

    for pipeline in (reads, passes):
        scene.reset()
        jacobian(pipeline, scene.x, scene.s)
    assert runs.qsize() == 1
    assert only_launches(passes, ()) and only_launches(lambda kernel=scene.square: kernel(), ())
    assert not only_launches(lambda: scene.load(array[:]), ())


class Counter:
    def __init__(self, scene):
        self.scene, self.time = scene, 0.0

    def run(self, use):
        self.scene.square()
        self.time += 0.25
        use(self.scene, self.time)


CLOCK = itertools.cycle([0.31, 1.74, 0.93, 2.27, 0.58])  # that of the machine may run as if it followed the steps


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda c, t: c.add(float(c.y[0]) + t), "its tangent is lost"),
        (lambda c, t: c.add(float(c.y[0]) * 0.0 + next(CLOCK)), "differs from run to run"),
    ],
    ids=["counter", "clock"],
)
def test_numbers_that_differ_from_run_to_run(scene, use, said):
    """Those of a counter do not: it is as it was before each run."""
    scene.reset()
    with pytest.warns(DerivativeWarning, match=said):
        jacobian(Counter(scene).run, scene.x, scene.s, args=(use,))


def test_a_counter_times_a_dual_number_is_right(scene):
    scene.reset()
    with no_warnings():
        J = jacobian(Counter(scene).run, scene.x, scene.s, args=(lambda c, t: c.add(c.y[0] * t),))
    assert_allclose(J[0] / J[0, 1], [1 + 2 * AT.sum() / AT[0], 1.0, 1.0])


class Slots:
    __slots__ = ("used",)


class Closed(list):
    def __setitem__(self, place, value):
        raise TypeError("is closed")


named = None


def first_by_name():
    global named
    before, named = named, 1
    return before is None


class Memos:
    shared, made = {}, 0

    def __init__(self):
        self.flag, self.count, self.list, self.dict, self.set = False, 0, [], {}, set()
        self.deque, self.vector, self.slots = collections.deque([2, 1, 0]), ti.Vector([0.0, 0.0]), Slots()
        self.closed, self.chain = Closed(), collections.ChainMap({})
        self.numpy, self.python = np.random.default_rng(1), random.Random(1)
        self.inner, self.cached = (
            types.SimpleNamespace(of=({"a": [[]]},)),
            functools.cache(lambda: self.dict.update(a=1)),
        )


MEMOS = {  # how a pipeline notes that it has done something, which it does again in another run
    "flag": lambda m: not m.flag and not setattr(m, "flag", "done"),
    "new attribute": lambda m: not hasattr(m, "new") and not setattr(m, "new", None),
    "counter": lambda m: setattr(m, "count", m.count + 1) or m.count == 1,
    "list": lambda m: not m.list and not m.list.append(0),
    "closed list": lambda m: not m.closed and not m.closed.append(0),
    "chain": lambda m: "a" not in m.chain and not m.chain.update(a=0),
    "entry": lambda m: "a" not in m.dict and not m.dict.update(a=0),
    "set": lambda m: 1 not in m.set and not m.set.add(1),
    "deque": lambda m: m.deque.pop() == 0,
    "class": lambda m: not Memos.made and not setattr(Memos, "made", "yes"),
    "dict of a class": lambda m: not m.shared and not m.shared.update(a=0),
    "vector": lambda m: m.vector[1] == 0.0 and not m.vector.fill(1.0),
    "slot": lambda m: not hasattr(m.slots, "used") and not setattr(m.slots, "used", True),
    "global": lambda m: first_by_name(),
    "generator": lambda m: m.python.random() == random.Random(1).random(),
    "generator of numpy": lambda m: m.numpy.random() == np.random.default_rng(1).random(),
    "deep": lambda m: not m.inner.of[0]["a"][0] and not m.inner.of[0]["a"][0].append(0),
    "cache": lambda m: m.cached() or m.dict.pop("a", 0),
}
AGAIN = {
    "forward": lambda f, x, s: jacobian(f, x, s),
    "reverse": lambda f, x, s: jacobian(f, x, s, mode="reverse"),
    "blocks": lambda f, x, s: jacobian(f, x, s, chunk_size=1),
    "csr": lambda f, x, s: jacobian(f, x, s, format="csr").toarray(),
    "hessian": lambda f, x, s: hessian(f, x, s, chunk_size=1),
    "hvp": lambda f, x, s: hvp(f, x, np.eye(3), s),
}


@pytest.mark.filterwarnings("error::taichi_ext.DerivativeWarning", "ignore:.* was prepared")
@pytest.mark.mostly_sweep(
    *("list-reverse", "entry-blocks", "set-hessian", "new attribute-reverse", "deque-csr", "cache-reverse"),
    *("slot-hvp", "dict of a class-forward", "global-reverse", "generator-blocks"),
    *("closed list-blocks", "chain-blocks"),
)
@pytest.mark.parametrize("product", AGAIN)
@pytest.mark.parametrize("memo", MEMOS)
def test_what_a_pipeline_does_once_it_does_in_every_run_of_a_call(scene, memo, product):
    def pipeline():
        for _ in range(2):
            if MEMOS[memo](memos):
                scene.square()
        scene.add(scene.y[0] + 1)

    if product == "csr":
        pytest.importorskip("scipy.sparse")
    global named
    memos, Memos.made, named = Memos(), 0, None
    Memos.shared.clear()
    scene.reset()
    found = AGAIN[product](pipeline, scene.x, scene.s)
    mixed = 2 * AT[0] * np.eye(3)[0]
    H = 2 * AT.sum() * np.diag(np.eye(3)[0]) + mixed + mixed[:, None]
    J = AT[0] ** 2 + 1 + mixed * AT.sum()
    assert_allclose(np.squeeze(found), H if product in ("hessian", "hvp") else J)
    assert not MEMOS[memo](memos) or memo == "cache"  # it is left as by one run


@pytest.mark.mostly_sweep("blocks-cache", "reverse-count", "hessian-count", "csr-count")
@pytest.mark.parametrize("kind", ["count", "cache"])
@pytest.mark.parametrize("product", [*AGAIN][1:])
def test_what_cannot_be_put_back_is_said(scene, product, kind):
    """Of a cache, entries that were there before the call stay."""

    def pipeline():
        if next(counts) == 0 if kind == "count" else made(2) is not None and made.new.pop(2, None):
            scene.square()
        scene.add(scene.y[0] + 1)

    counts, made = itertools.count(), functools.cache(lambda n: made.new.setdefault(n, [n]))
    made.new = {}
    first = made(1)
    if product == "csr":
        pytest.importorskip("scipy.sparse")
    scene.reset()
    with pytest.raises((DerivativeWarning, InvalidArgumentError), match="Python's state differs between them"):
        with warnings.catch_warnings():
            warnings.simplefilter("error", DerivativeWarning)
            AGAIN[product](pipeline, scene.x, scene.s)
    assert made(1) is first


@pytest.mark.parametrize("mode", [None, "reverse"])
@pytest.mark.parametrize("given", [2, np.int64(2), (2, 3), ti.Vector([2, 3])], ids=["int", "numpy", "tuple", "vector"])
def test_whole_numbers_for_a_param(scene, given, mode):
    """They are real in all runs, so that none differs from another."""

    def pipeline(c):
        c = c if np.ndim(given) == 0 else c[0] * c[1]
        scene.add(c)

    scene.reset()
    entries = np.array(given, float).reshape(-1)
    with no_warnings():
        J = jacobian(pipeline, "c", scene.s, args=(given,), mode=mode)
    assert_allclose(J.reshape(-1), AT.sum() * (entries[::-1] if entries.size > 1 else np.ones(1)))


def test_random_numbers_of_kernels(scene):
    x, y = scene.x, scene.y
    draw = kernel_of("for i in x: y[i] = x[i] * ti.random()", x=x, y=y)
    pipeline = lambda read: (draw(), scene.add(read(y[0])))
    scene.reset()
    with pytest.warns(DerivativeWarning, match="cannot be run again .*draws random numbers"):
        jacobian(pipeline, x, scene.s, args=(float,))
    with no_warnings():
        jacobian(pipeline, x, scene.s, args=(lambda v: 2 * v,))


def test_a_pipeline_that_cannot_run_again(scene):
    numbers = iter([2.0])
    pipeline = lambda: (scene.square(), scene.add(float(scene.y[0]) * next(numbers)))
    scene.reset()
    with pytest.warns(DerivativeWarning, match="cannot be run again .*StopIteration"):
        J = jacobian(pipeline, scene.x, scene.s)
    assert_allclose(J[0], 2 * AT[0] ** 2)
    assert_allclose(read(scene.s), 2 * AT[0] ** 2 * AT.sum())
    assert_array_equal(read(scene.x), AT)


def test_warnings_that_are_errors(scene):
    def pipeline():
        scene.square()
        scene.add(float(scene.y[0]))

    scene.reset()
    with warnings.catch_warnings(), pytest.raises(DerivativeWarning, match="^A number passed to"):
        warnings.simplefilter("error")
        jacobian(pipeline, scene.x, scene.s)
    assert_array_equal(read(scene.x), AT)


def test_a_kernel_that_does_not_compile_again(scene):
    """The reason is the user's line and what is wrong there, without Taichi's own frames."""
    counts = iter([1])

    def pipeline():
        factors = [2.0] * next(counts, 0)

        @ti.kernel
        def scale(c: ti.f64):
            for i in scene.y:
                scene.y[i] = c * scene.x[i] * factors[0]

        scene.square()
        scale(float(scene.y[0]))

    scene.reset()
    with pytest.warns(DerivativeWarning, match="cannot be run again") as caught:
        jacobian(pipeline, scene.x, scene.y)
    (text,) = [str(w.message) for w in caught if "cannot be run again" in str(w.message)]
    assert "scene.y[i] = c * scene.x[i] * factors[0]" in text
    assert "IndexError" in text
    assert "Traceback" not in text
    assert "site-packages" not in text


def test_numbers_that_are_only_compared_take_no_run_with_tangents(scene):
    """In reverse mode: the run, one with params that are moved, and the run whose way back it is."""
    runs = SimpleQueue()

    def pipeline(factor=1.0):
        runs.put(random.random())
        scene.square()
        while scene.y[0] < 0.0:
            scene.square()
        scene.add(factor)

    scene.reset()
    with no_warnings():
        (gradient,) = vjp(pipeline, [scene.x], [scene.s], [np.ones(1)])
    assert_allclose(gradient, 1.0)
    assert runs.qsize() == 3
    assert len({runs.get() for _ in range(3)}) == 1
    scene.reset()
    with pytest.warns(DerivativeWarning, match="passed to .*add depends on the params"):
        vjp(lambda: pipeline(float(scene.x[0])), [scene.x], [scene.s], [np.ones(1)])


@pytest.mark.parametrize("product", [jacobian, lambda *args: vjp(*args, np.ones(1))], ids=["jacobian", "vjp"])
def test_generators_go_on_as_after_one_run(scene, product):
    pipeline = lambda: (scene.square(), scene.add(scene.y[0] * random.random() * np.random.rand()))
    expected = []
    for run in (pipeline, lambda: product(pipeline, scene.x, scene.s)):
        random.seed(3)
        np.random.seed(3)
        scene.reset()
        run()
        expected.append((random.random(), np.random.rand(), *read(scene.s)))
    assert_allclose(*expected, rtol=1e-14)


@pytest.mark.parametrize("product", [jacobian, lambda *args: vjp(*args, np.ones(1))], ids=["jacobian", "vjp"])
def test_an_output_that_python_stores_lost_numbers_to(scene, product):
    def pipeline():
        scene.square()
        scene.s[0] = json.loads(json.dumps(scene.y[0]))

    scene.reset()
    with pytest.warns(DerivativeWarning, match="A number stored to a field or array depends on the params"):
        J = product(pipeline, scene.x, scene.s)
    assert_array_equal(J, 0.0)


def test_numbers_are_plain_ones_after_the_run(scene):
    log, named = [], {}

    def pipeline():
        scene.square()
        log.append(scene.y[0])
        named["pair"] = (scene.y[1], 1.0)

    scene.reset()
    jacobian(pipeline, scene.x, scene.y)
    assert [type(n) for n in (*log, *named["pair"])] == [float] * 3


def test_a_cache_that_keeps_numbers_of_an_earlier_run(scene):
    cached = functools.cache(lambda v: v * v)
    passes = lambda: (scene.square(), scene.add(cached(scene.y[0])))
    computes = lambda: (scene.square(), scene.add(2.0 * cached(scene.y[0])))

    def stores():
        scene.square()
        scene.s[0] = cached(scene.y[0])

    for pipeline in (passes, computes, stores):
        cached.cache_clear()
        scene.reset()
        plan = Jacobian(pipeline, scene.x, scene.s)
        with no_warnings():
            J = plan()
            assert_allclose(plan(), J)  # runs that compare leave the cache empty
        with pytest.warns(DerivativeWarning, match="an earlier run of a pipeline has left"):
            assert not np.allclose(plan(), J)


@pytest.mark.filterwarnings("ignore::taichi_ext.DerivativeWarning")
@pytest.mark.parametrize("mode", ["forward", "reverse"])
def test_a_cache_by_the_values_of_params(scene, mode):
    """However little the params move, the run goes another way than that with tangents."""
    cache = {}

    def pipeline():
        scene.square()
        key = tuple(round(float(v), 12) for v in scene.x.to_numpy())
        if key not in cache:
            cache[key] = 2 * scene.y[0]
        scene.add(cache[key])

    scene.reset()
    pipeline()
    scene.reset()
    with pytest.warns(DerivativeWarning, match="passed to .*add comes after a choice that changes"):
        jacobian(pipeline, scene.x, scene.s, mode=mode)


@pytest.mark.parametrize("is_lost", [False, True])
def test_choices_that_change_at_the_params_as_they_are(scene, is_lost):
    """One of two sides is that of the call: derivatives and warnings are those of the path taken."""
    for limit in (AT[0], -AT[0]):

        def pipeline():
            scene.square()
            if scene.x[0] <= limit:
                scene.add(2.5 * (float(scene.y[0]) if is_lost else scene.y[0]))
            else:
                scene.add_field()

        scene.reset()
        scene.x[0] = limit
        with all_warnings() as caught:
            J = jacobian(pipeline, scene.x, scene.s)
        by_first = 2.5 * (limit**2 + (0 if is_lost else 2 * limit * (limit + AT[1:].sum())))
        assert_allclose(J[0], [by_first, 2.5 * limit**2, 2.5 * limit**2])
        messages = [str(w.message) for w in caught if w.category is DerivativeWarning]
        assert len(messages) == is_lost
        assert not is_lost or "without its derivative" in messages[0]


def lost_if(use, c, value):
    c.square()
    c.add(use(value(c.y[0]) if callable(value) else float(c.y[0]) if value in (True, "plain", None) else c.y[0]))


@pytest.mark.mostly_sweep(every=2)
@pytest.mark.parametrize("mode", ["forward", "reverse", "csr"])
@pytest.mark.parametrize(
    "values",
    [(False, True), ("dual", "plain"), ((), None), (abs, lambda v: float(v)), (np.False_, np.True_)],
    ids=["flag", "word", "none", "def", "flag of numpy"],
)
def test_arguments_that_choose_another_path_in_a_later_call(scene, values, mode):
    pipeline = lambda value: lost_if(lambda number: 2.0 * number, scene, value)
    if mode == "csr":
        pytest.importorskip("scipy.sparse")
    plan = Jacobian(
        pipeline, scene.x, scene.s, args=(values[0],), **({"format": mode} if mode == "csr" else {"mode": mode})
    )
    scene.reset()
    with no_warnings():
        plan(args=(values[0],))
    with pytest.warns(DerivativeWarning, match="without its derivative"):
        plan(args=(values[1],))


@pytest.mark.mostly_sweep("closure-forward", "self-reverse")
@pytest.mark.parametrize("mode", ["forward", "reverse"])
@pytest.mark.parametrize("where", ["closure", "self", "object"])
def test_flags_outside_of_arguments_that_choose_another_path_later(scene, where, mode):
    value = False

    class Holder:
        def __init__(self):
            self.loses = False

        def run(self):
            lost_if(lambda number: 2.0 * number, scene, self.loses)

    held = Holder()
    run = {
        "closure": lambda: lost_if(lambda number: 2.0 * number, scene, value),
        "self": held.run,
        "object": lambda: lost_if(lambda number: 2.0 * number, scene, held.loses),
    }[where]
    plan = Jacobian(run, scene.x, scene.s, mode=mode)
    scene.reset()
    with no_warnings():
        plan()
        plan()
    value = held.loses = True
    with pytest.warns(DerivativeWarning, match="without its derivative"):
        plan()
    with no_warnings():
        plan()


def test_fields_in_lists_of_new_objects_are_as_after_one_run(scene):
    parts = [scalars([1.0, 2.0]) for _ in range(4)]
    made = itertools.count()

    @ti.data_oriented
    class Part:
        def __init__(self):
            self.used, self.named = [parts[next(made)]], {"first": [parts[3]]}

        @ti.kernel
        def step(self, weight: ti.f64):
            self.used[0][0] += weight
            self.named["first"][0][1] += weight

    run = lambda: (scene.square(), Part().step(float(scene.y[0])), scene.add(scene.y[1]))
    scene.reset()
    jacobian(run, scene.x, scene.s)
    assert next(made) > 1  # runs that compare have made others
    weight = scene.y[0]
    assert_array_equal(np.stack([read(part) for part in parts]), [[1 + weight, 2], [1, 2], [1, 2], [1, 2 + weight]])


square_all = kernel_of("for i in a: b[i] = a[i] ** 2", "a: A1, b: A1")
add_to_first = kernel_of("for i in range(count): b[i] += 0.5 * a[i]", "a: A1, b: A1, count: ti.i32")


def stored(out, where, numbers):
    out[where] = numbers
    return out


ADDED_TO = {  # the array that a kernel adds to, by one that another kernel has made, and whether a derivative is lost
    "whole": (lambda made, out: stored(out, slice(None), made[::-1]), True),
    "entry": (lambda made, out: stored(out, 0, made[0]), True),
    "constant": (lambda made, out: stored(out, slice(None), 2.0), False),
    "nothing": (lambda made, out: out, False),
    "copy": (lambda made, out: made.copy(), True),
    "expression": (lambda made, out: made[::-1] * 2.0, True),
    "ones": (lambda made, out: np.ones_like(made), False),
}


@pytest.mark.parametrize("mode", ["forward", "reverse"])
@pytest.mark.parametrize("name", ADDED_TO)
def test_what_python_has_computed_before_kernels_that_add(name, mode):
    """The numbers that are kept are those that Python has computed from the arrays of other kernels."""
    target, is_lost = ADDED_TO[name]

    def pipeline(a, out):
        made = np.zeros(3)
        square_all(a, made)
        sums = target(made, out)
        add_to_first(a, sums, 3 if sums is out else 2)
        if sums is not out:
            square_all(sums, out)

    a, out = AT.copy(), np.zeros(3)
    with all_warnings() as caught:
        J = jacobian(pipeline, a, out, args=(a, out), mode=mode)
    if name not in ("copy", "expression", "ones"):
        assert_allclose(J, 0.5 * np.eye(3))
    messages = [str(w.message) for w in caught]
    assert len(messages) == is_lost
    assert all("of an array that Python has changed" in m and "depends on the params" in m for m in messages)


def test_arrays_of_many_numbers_are_compared():
    """By sums of their parts."""

    def pipeline(a, out):
        made = np.zeros(5000)
        square_all(a, made)
        square_all(2.0 * made, out)

    a, out = np.linspace(1.0, 2.0, 5000), np.zeros(5000)
    with pytest.warns(DerivativeWarning, match="depends on the params"):
        vjp(pipeline, a, out, np.ones(5000), args=(a, out))


@pytest.mark.parametrize("mode", ["forward", "reverse"])
def test_a_kernel_that_runs_with_tangents_and_without(mode):
    """What it keeps of an array differs from launch to launch, so that the runs that are compared have other events."""

    def pipeline(a, out):
        made = np.empty(3)
        square_all(a, made)
        square_all(2.0 * made, out)

    a, out = AT.copy(), np.zeros(3)
    with pytest.warns(DerivativeWarning) as caught:
        jacobian(pipeline, a, out, args=(a, out), mode=mode)
    messages = [str(w.message) for w in caught if "its Jacobian is zero" not in str(w.message)]
    assert len(messages) == 1
    assert "of an array passed to" in messages[0]
    assert "depends on the params" in messages[0]


@pytest.mark.parametrize("is_argument", [False, True])
def test_what_is_stored_right_after_the_launch_that_fills_an_array(is_argument):
    x, y, total = scalars([2.0]), outputs(2), outputs(1)
    filled = np.zeros(2)
    fill = kernel_of("for i in range(2): a[i] = x[0] * (i + 1)", "a: A1", x=x)
    add = kernel_of("total[0] = y[0] + y[1] * x[0]", total=total, y=y, x=x)

    def pipeline(*args):
        a = args[0] if args else filled
        fill(a)
        y[0] = 2.0 * a[1]
        y[1] = 1.0
        add()

    for call in (jacobian, functools.partial(jacobian, mode="reverse")):
        with pytest.warns(DerivativeWarning, match="stored to a field or array depends on the params"):
            assert_allclose(call(pipeline, x, total, args=(filled,) if is_argument else ()), [[1.0]])


@pytest.mark.parametrize("product", [jacobian, lambda *args: vjp(*args, np.ones(1))], ids=["jacobian", "vjp"])
def test_sparse_params_with_an_offset(product):
    """The runs that are compared move the entries that are there, and nothing beside the field."""
    x = ti.Vector.field(2, ti.f64)
    ti.root.pointer(ti.i, 4).dense(ti.i, 2).place(x, offset=-11)
    total, beside = outputs(1), ti.field(ti.f64, shape=8)
    x[-10] = [0.5, 2.0]
    start = x.to_numpy()

    @ti.kernel
    def square():
        total[0] = 0.0
        for i in x:
            total[0] += x[i].norm_sqr()

    def pipeline():
        square()
        total[0] = 2.0 * float(total[0])

    with pytest.warns(DerivativeWarning, match="stored to a field or array depends on the params"):
        product(pipeline, x, total)
    assert_array_equal(x.to_numpy(), start)
    assert_array_equal(beside.to_numpy(), 0.0)
