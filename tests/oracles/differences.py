"""The oracle of most tests: the whole Jacobian by central differences, and the state that one plain run leaves."""

from collections.abc import Callable, Iterable
from typing import Any

import devices
import numpy as np
import taichi as ti
from field_pool import pool
from numpy.testing import assert_allclose, assert_array_equal

from taichi_ext import UnsupportedError, jacobian, vjp

STEP = 1e-6
RTOL = 1e-6  # relative tolerance of J
ATOL = 1e-8  # error of central differences of constants, for outputs of order one
moved = 0.0  # all starts by a part of themselves: --move-starts


def _filled(values: Any, rank: int, dtype: Any) -> Any:
    values = np.asarray(values, dtype=np.float32 if dtype == ti.f32 else np.float64)
    split = values.ndim - rank
    field = pool.take(values.shape[split:], dtype, values.shape[:split])
    write(field, values * (1 + moved))
    return field


def scalars(values: Any, dtype: Any = ti.f64) -> Any:
    """A scalar field that holds the values."""
    return _filled(values, 0, dtype)


def integers(values: Any) -> Any:
    """A scalar field of integers that holds the values."""
    values = np.asarray(values, dtype=np.int32)
    field = pool.take((), ti.i32, values.shape)
    write(field, values)
    return field


def vectors(values: Any, dtype: Any = ti.f64) -> Any:
    """A vector field that holds the values; their last axis is the vector."""
    return _filled(values, 1, dtype)


def matrices(values: Any, dtype: Any = ti.f64) -> Any:
    """A matrix field that holds the values; their last two axes are the matrix."""
    return _filled(values, 2, dtype)


def outputs(*shape: int, dtype: Any = ti.f64) -> Any:
    """A scalar field of zeros."""
    return _filled(np.zeros(shape), 0, dtype)


def vector_outputs(n: int, *shape: int, dtype: Any = ti.f64) -> Any:
    """A field of zero vectors of n entries."""
    return _filled(np.zeros((*shape, n)), 1, dtype)


def matrix_outputs(n: int, m: int, *shape: int, dtype: Any = ti.f64) -> Any:
    """A field of zero n x m matrices."""
    return _filled(np.zeros((*shape, n, m)), 2, dtype)


def read(container: Any) -> np.ndarray:
    """A copy of the values of a field or array."""
    if isinstance(container, np.ndarray):
        return container.copy()
    if isinstance(container, ti.StructField):
        raise TypeError("name the members of a struct field")
    memory = pool.memory(container)
    return container.to_numpy() if memory is None else memory.copy()


def write(container: Any, values: Any) -> None:
    """Set the values of a field or array; one number sets all of them."""
    memory = container if isinstance(container, np.ndarray) else pool.memory(container)
    if memory is not None:
        memory[...] = values
    elif np.ndim(values) == 0:
        container.fill(np.asarray(values).item())  # Taichi looks the number up in a dict
    else:
        container.from_numpy(np.array(values, order="C"))


def move_starts(by: float) -> None:
    """Let all fields of tests hold values that are moved by this part, and ask for nine digits in place of all.

    What jumps then depends on the last bits of its start: which of two equal numbers is the larger, or whether a loop ends.
    """
    global moved
    moved, close = by, assert_allclose

    def nearly(actual: Any, desired: Any, rtol: float = 1e-7, atol: float = 0, **options: Any) -> None:
        close(actual, desired, max(rtol, 1e5 * by), max(atol, 1e3 * by), **options)

    def nearly_equal(actual: Any, desired: Any, err_msg: str = "", **options: Any) -> None:
        if all(np.asarray(values).dtype.kind in "fc" for values in (actual, desired)):
            nearly(actual, desired, 0, err_msg=err_msg)
        else:
            assert_array_equal(actual, desired, err_msg, **options)

    np.testing.assert_allclose, np.testing.assert_array_equal = nearly, nearly_equal


class Snapshot:
    """The values of containers at some time."""

    def __init__(self, containers: Iterable[Any]) -> None:
        self.containers = list({id(c): c for c in containers}.values())
        self.values = [read(c) for c in self.containers]

    def restore(self) -> None:
        """Set all of it back."""
        for container, values in zip(self.containers, self.values, strict=True):
            write(container, values)


def central_differences(
    run: Callable[[], Any], params: list[Any], outs: list[Any], state: Iterable[Any] = (), step: float = STEP
) -> list[list[np.ndarray]]:
    """d outs / d params: ``[output][parameter]`` of shape ``output.shape + parameter.shape``.

    Args:
        run: launches the kernels.
        params: fields or arrays, perturbed one entry at a time.
        outs: fields or arrays, read after each run.
        state: others that ``run`` changes; set back before each run.
        step: the distance of the differences.
    """
    start = Snapshot([*params, *outs, *state])
    blocks = [[np.zeros(read(o).shape + read(p).shape) for p in params] for o in outs]
    if devices.is_single():  # differences in float32 say little; those from the CPU are known
        return [[np.full_like(block, np.nan) for block in row] for row in blocks]
    for n, param in enumerate(params):
        start.restore()
        centre = read(param)
        for index in np.ndindex(centre.shape):
            ends = []
            for sign in (1, -1):
                start.restore()
                moved = centre.copy()
                moved[index] += sign * step
                write(param, moved)
                run()
                ends.append([read(o) for o in outs])
            for block, high, low in zip(blocks, *ends, strict=True):
                block[n][(..., *index)] = (high - low) / (2 * step)
    start.restore()
    return blocks


def as_list(x: Any) -> list[Any]:
    return list(x) if isinstance(x, (list, tuple)) else [x]


def check_jacobian(
    kernel: Any,
    params: Any,
    outs: Any,
    *,
    args: tuple[Any, ...] = (),
    state: Iterable[Any] = (),
    expected: Any = None,
    step: float = STEP,
    rtol: float = RTOL,
    atol: float = ATOL,
    state_rtol: float = 1e-13,
) -> Any:
    """Compare ``jacobian(kernel, params, outs)`` with central differences, and its side effects with one plain run.

    Args:
        kernel: a kernel or pipeline.
        params: a field or array, or a list of them.
        outs: likewise.
        args: arguments of the call.
        state: further fields and arrays that the kernel changes.
        expected: the Jacobian where differences cannot give it (at a kink): one array, or ``[output][parameter]``.
        step: the distance of the differences.
        rtol: relative tolerance.
        atol: absolute tolerance, for entries that are zero.
        state_rtol: relative tolerance of the state afterwards; the operations and their order are those of a plain run,
            but the compiler may contract a multiplication and an addition.

    Returns:
        The result of ``jacobian``.
    """
    params_list, outs_list = as_list(params), as_list(outs)
    everything = [*params_list, *outs_list, *state]
    start = Snapshot(everything)

    def run() -> None:
        kernel(*args)

    if expected is None:
        truth = central_differences(run, params_list, outs_list, state, step)
    elif isinstance(params, (list, tuple)) or isinstance(outs, (list, tuple)):
        truth = expected
    else:
        truth = [[np.asarray(expected, dtype=np.float64)]]
    run()
    plain = Snapshot(everything)
    devices.plain_run(plain.values)
    start.restore()
    result = jacobian(kernel, params, outs, args=args)
    changed = Snapshot(everything)
    rows = result if isinstance(outs, (list, tuple)) else [result]
    for n, (row, true_row) in enumerate(zip(rows, truth, strict=True)):
        blocks = row if isinstance(params, (list, tuple)) else [row]
        for m, (block, true_block) in enumerate(zip(blocks, true_row, strict=True)):
            assert block.shape == np.shape(true_block), f"output {n}, parameter {m}: shape {block.shape}"
            assert_allclose(block, true_block, rtol=rtol, atol=atol, err_msg=f"output {n} by parameter {m}")
    for values, plain_values in zip(changed.values, plain.values, strict=True):
        assert_allclose(values, plain_values, rtol=state_rtol, atol=1e-14, err_msg="state afterwards")
    written = {id(o) for o in [*outs_list, *state]}
    for param, before in zip(start.containers, start.values, strict=True):
        if id(param) not in written:
            assert_array_equal(read(param), before, err_msg="a parameter changed")
    start.restore()
    return result


def check_refused(
    kernel: Any, params: Any, outs: Any, *words: str, args: tuple[Any, ...] = (), only_forward: bool = False
) -> str:
    """Taichi runs the kernel, both modes refuse it: the messages have file, line and source text, and the words."""
    kernel(*args)
    calls = [lambda: jacobian(kernel, params, outs, args=args)]
    if isinstance(outs, ti.Field) and not only_forward:
        calls.append(lambda: vjp(kernel, params, outs, np.ones_like(read(outs)), args=args))
    messages = []
    for call in calls:
        try:
            call()
        except UnsupportedError as error:
            messages.append(str(error))
        else:
            raise AssertionError("a derivative was given for something that should be refused")
        for word in ("line", ".py", *words):
            assert word in messages[-1], f"{word!r} is missing in: {messages[-1]}"
    return messages[0]
