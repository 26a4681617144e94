"""Reverse mode: one run forward, and its adjoints back for several cotangents, or for all rows of J."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.api.inputs.progress import progress_bar
from taichi_ext.api.inputs.results import by_parameter
from taichi_ext.api.runs.arbiter import Arbiter
from taichi_ext.api.runs.evaluation import DenseForm, Evaluation, equal_parts
from taichi_ext.api.runs.findings import check_run, warn_of_alerts
from taichi_ext.api.runs.replay import values_of
from taichi_ext.api.runs.subject import EnergyGradient, RowSpace
from taichi_ext.differentiate.plan.report import BACKWARDS, INPUTS
from taichi_ext.errors import InvalidArgumentError, UnsupportedError
from taichi_ext.launches import ColumnBlock, JacobianKernel
from taichi_ext.program.keys import RETURN, Key
from taichi_ext.runtime.launching.tangents import DenseRows, LongKernelError, PassedNumberError, Restart
from taichi_ext.runtime.memory.regions import View
from taichi_ext.runtime.memory.shadows import check_dense
from taichi_ext.runtime.memory.state import RANDOM_BEFORE, State
from taichi_ext.runtime.python.dual_numbers import saying_once, warn_at_user
from taichi_ext.runtime.python.reached import reachable
from taichi_ext.runtime.reverse.forward import Forward
from taichi_ext.runtime.reverse.reverse import CotangentProducts, Reverse

COLUMNS_PER_ROW = 32  # from which on reverse mode is taken into account
FEW_COLUMNS = 512  # below which forward mode takes less time than the bookkeeping of reverse mode
OPERATIONS_PER_ROW = 16  # on tangents, each time a line runs, that cost as much as a row of the adjoint
BOOKKEEPING = 1 << 20, 32  # operations on tangents between kernels that take as long as that of so many rows
MOST_ROWS = 256  # of J, from which on forward mode is taken
MOST_DIRECTIONS = 8  # of products with H in one run
# A kernel for all of H with more lines takes longer to compile (0.45 s times the square of its lines in thousands:
# Taichi goes over all of it for each line) than those of products, which have a fifth as many lines: about 3 s. Each
# call then takes up to 4 times as long, so products are taken only if H needs few runs.
MOST_LINES, MOST_RUNS = 3000, 8
_NOT_A_NUMBER = (
    "Entries of this gradient are NaN. If the values of the run are numbers, infinite derivatives of both signs meet "
    "in a sum on the way back, as for (max(x) - x) ** 0.8 at the largest x. Forward mode, which adds first, "
    "may have a number there: see mode='forward'. check_jacobian names the line."
)


class _PrefersRows(Exception):
    """Raised before a kernel with tangents is launched if its adjoint is estimated to take less time."""


class _Unjudged(UnsupportedError):
    """Raised in the first call of a pipeline whose Python code may lose derivatives, with the numbers it passes on."""

    def __init__(self, passed: list[float] | None) -> None:
        super().__init__("")
        self.passed = passed


class RowsOrColumns(DenseForm):
    """J as dense arrays, by the mode that the user has chosen, or that takes less time by estimate."""

    def rows(self, evaluation: Evaluation) -> list[list[np.ndarray]] | None:
        prepared, call, mode = evaluation.prepared, evaluation.call, evaluation.prepared.question.options.mode
        if mode == "reverse":
            blocks = _all_rows(evaluation)
            if blocks is None:
                raise UnsupportedError(
                    f"{call.name} has no adjoint, which mode='reverse' needs; leave it out, or use "
                    f"mode='forward'.\n{prepared.has_no_adjoint}"
                )
            return blocks
        rows, columns = sum(o.size for o in evaluation.layout.outputs), evaluation.layout.count
        is_candidate = 0 < rows <= MOST_ROWS and columns >= max(FEW_COLUMNS, COLUMNS_PER_ROW * rows)
        is_free = evaluation.watch is None and prepared.question.options.tangents == "auto"
        if not (is_candidate and is_free and prepared.is_reverse is not False) or prepared.has_no_adjoint:
            return None
        if prepared.is_reverse:
            return _all_rows(evaluation)
        sizes = f"J has {rows} {'rows' if rows > 1 else 'row'} and {columns} columns"
        if call.kernel is None:
            return self._of_pipeline(evaluation, rows, sizes)
        if prepared.fused:
            return None
        try:
            _check_columns(evaluation, [(call.kernel, call.full_args)], rows)
            return None
        except _PrefersRows as error:
            reason = str(error)
        blocks = _all_rows(evaluation)
        if blocks is not None:
            prepared.is_reverse, prepared.mode = True, f"reverse mode: {sizes}, and {reason}"
        return blocks

    def _of_pipeline(self, evaluation: Evaluation, rows: int, sizes: str) -> list[list[np.ndarray]] | None:
        """J in reverse mode, in the first call of a pipeline, which chooses the mode of later ones."""
        prepared, runs = evaluation.prepared, list[Forward]()
        blocks = _all_rows(evaluation, runs.append)
        if blocks is None:
            return None
        work, launches = runs[0].tangents_between()
        reason = "tangents between kernels would have all columns"
        reason += f", in {work:.2g} operations" if work < math.inf else ""
        little, share = BOOKKEEPING
        prepared.is_reverse = work > little * -(-rows // share)
        try:
            if not prepared.is_reverse:
                _check_columns(evaluation, launches, rows)
        except (_PrefersRows, UnsupportedError) as error:
            prepared.is_reverse, reason = True, str(error)
        if prepared.is_reverse:
            prepared.mode = f"reverse mode: {sizes}, and {reason}"
        else:
            few = f"tangents between kernels take {work:.2g} operations" if work else "only outputs depend on params"
            prepared.mode = f"forward mode from the second call on: {few}, and kernels have little work"
            prepared.reverse = None
        return blocks


def _check_columns(evaluation: Evaluation, launches: Iterable[tuple[Any, tuple[Any, ...]]], rows: int) -> None:
    """Build the kernels with tangents of some launches; raise if reverse mode is estimated to be faster."""
    session = evaluation.session(DenseRows(), 0, max(1, -(-evaluation.layout.count // evaluation.least_runs)))
    check_accesses = evaluation.checked(session)

    def check(fused: JacobianKernel, outer: Mapping[Key, Key]) -> None:
        if evaluation.call.kernel is not None:
            check_accesses(fused, outer)
        _compare(fused, rows)

    try:
        with saying_once(evaluation.said):
            for kernel, args in launches:
                session.build(kernel, args, check)
    except (_PrefersRows, UnsupportedError):
        evaluation.prepared.fused.clear()
        raise


def _compare(fused: JacobianKernel, rows: int) -> None:
    """Raise if reverse mode is estimated to be faster than a kernel with tangents.

    The estimate counts products and sums on tangents by line; loops of known length, as those over all columns, count
    for each iteration.
    """
    report = fused.facts.report
    if any(BACKWARDS in loop.text or INPUTS in loop.text for loop in report.loops):
        return  # such a loop costs about the same in both modes
    total, runs = report.costs.total, report.costs.runs
    if total > OPERATIONS_PER_ROW * rows * runs:
        raise _PrefersRows(f"tangents would take {total} operations where lines with tangents run {runs} times")


def _all_rows(evaluation: Evaluation, after: Callable[[Forward], None] | None = None) -> list[list[np.ndarray]] | None:
    """The blocks of J by its rows; None if there is no adjoint. ``after`` is called after the run."""
    layout, chunk_size = evaluation.layout, evaluation.prepared.question.options.chunk_size
    sizes, dtypes = [o.size for o in layout.outputs], [o.result_dtype for o in layout.outputs]
    total, kind = sum(sizes), np.result_type(*dtypes)
    check_dense(f"J has {total} x {layout.count} entries,", total * layout.count * kind.itemsize)
    ends, ones = np.cumsum(sizes)[:-1], np.zeros(max(0, 2 * total - 1), kind)
    ones[total - 1 : total] = 1
    identity = np.lib.stride_tricks.sliding_window_view(ones, total)[::-1] if total else np.eye(0, dtype=kind)
    products = products_by_adjoint(evaluation, np.split(identity, ends), after=after, most=chunk_size)
    if products is None:
        return None
    rows = np.split(products.rows.T, ends)
    return [
        by_parameter(np.ascontiguousarray(values, dtype), o.shape, layout)
        for values, o, dtype in zip(rows, layout.outputs, dtypes, strict=True)
    ]


class HessianForm(DenseForm):
    """A dense Hessian, in one run, or by its products with unit vectors.

    Products are taken if Python passes on numbers with tangents, or the kernel of one run would be long.
    """

    may_begin_again = True
    keeps_launch = False  # it has tangents of the first order, which a session sets up

    def most_lines(self, evaluation: Evaluation) -> float:
        few = min(evaluation.prepared.question.options.chunk_size or MOST_DIRECTIONS, MOST_DIRECTIONS) * MOST_RUNS
        is_short = evaluation.layout.count <= few and not evaluation.prepared.has_no_adjoint and backend.is_host_arch()
        return MOST_LINES if is_short else math.inf

    def blocks(self, evaluation: Evaluation) -> list[list[Any]]:
        prepared, layout, subject = evaluation.prepared, evaluation.layout, evaluation.subject
        is_long = False
        if not prepared.mode and not layout.passed:
            try:
                return super().blocks(evaluation)
            except (PassedNumberError, LongKernelError) as error:
                is_long = isinstance(error, LongKernelError)
                prepared.mode = f"forward over reverse, up to {MOST_DIRECTIONS} columns of H in a run: {error}"
                prepared.fused.clear()
                advice = "Divide the kernel." if is_long else "Compute it in a kernel."
                evaluation.restore(f"The run has to begin again, because {error}", advice)
        assert isinstance(subject, EnergyGradient)
        products = energy_products(evaluation, np.eye(layout.count), prepared.question.options.chunk_size)
        if products is None and is_long:
            prepared.mode = ""
            return self.blocks(evaluation)
        if products is None:
            raise no_adjoint(evaluation, "a Hessian, as numbers that depend on params pass through Python")
        _, gradient, rows = products
        subject.note_parts(gradient, layout)
        return subject.of_matrix(np.concatenate(rows).astype(layout.outputs[0].result_dtype), layout)


def no_adjoint(evaluation: Evaluation, what: str) -> UnsupportedError:
    """The error where a result needs an adjoint that is not known."""
    name = evaluation.call.name
    return UnsupportedError(f"{name} has no adjoint, which {what} needs.\n{evaluation.prepared.has_no_adjoint}")


def energy_products(
    evaluation: Evaluation, directions: np.ndarray, most: int | None = None
) -> tuple[object, np.ndarray, list[np.ndarray]] | None:
    """The energy, its gradient, and products of H for each parameter, forward over reverse; None: no adjoint.

    Up to ``most`` directions, at most ``MOST_DIRECTIONS``, are in each run. If the evaluation has a state, everything
    is put back as it was; without an adjoint, too.
    """
    subject, layout, total = evaluation.subject, evaluation.layout, directions.shape[1]
    assert isinstance(subject, EnergyGradient)
    value, gradient, parts = None, np.zeros(0), list[list[np.ndarray]]()
    width = equal_parts(total, min(most or MOST_DIRECTIONS, MOST_DIRECTIONS))
    plain = replace(evaluation, subject=RowSpace(warns_of_zeros=False), state=evaluation.given_state)
    start = evaluation.new_state() if total > width else State()
    for first in range(0, total, width):
        start.undo()
        block = directions[:, first : first + width]
        padded = np.pad(block, ((0, 0), (0, width - block.shape[1])))
        with plain.whole():
            both = _value_and_products(
                plain, subject.moved(padded), restores=first + width < total, is_part=total > width
            )
        evaluation.returned = plain.returned
        if both is None:
            return None
        value, products = both
        assert products.moved is not None
        assert evaluation.prepared.reverse is not None
        if evaluation.prepared.reverse.has_random:
            if evaluation.state is not None:
                evaluation.state.has_random = True
            if first + width < total:
                raise InvalidArgumentError(
                    f"Products with H for {total} directions take several runs, of up to {width} each, and a kernel "
                    f"that draws random numbers cannot draw the same ones again. {RANDOM_BEFORE}"
                )
        gradient = products.rows[:, 0]
        parts.append([p[:, : block.shape[1]] for p in subject.free_products(products.moved, padded, layout)])
    return value, gradient, [np.concatenate(columns, axis=1) for columns in zip(*parts, strict=True)]


def value_and_row(evaluation: Evaluation) -> tuple[Any, np.ndarray]:
    """The only output, which is one number, and its gradient as one vector.

    If the evaluation has a state, everything is put back as it was.
    """
    with evaluation.whole():
        gradient = _value_and_products(evaluation)
        if gradient is not None:
            return gradient[0], gradient[1].rows[:, 0]
        (blocks,) = evaluation.blocks()
        row = np.concatenate([np.reshape(block, -1) for block in blocks])
        return values_of(evaluation.prepared, evaluation.call, evaluation.returned)[0], row


def _value_and_products(
    evaluation: Evaluation,
    directions: np.ndarray | None = None,
    *,
    restores: bool = False,
    is_part: bool = False,
) -> tuple[Any, CotangentProducts] | None:
    """The only output, and its gradient, differentiated along directions."""
    prepared, call = evaluation.prepared, evaluation.call
    is_restored = restores or evaluation.state is not None
    values: list[object] = []

    def keep(_: Forward) -> None:
        values[:] = values_of(prepared, call, None)

    ones = [np.ones((1, 1), dtype) for _, dtype in evaluation.output_shapes()]
    after = keep if is_restored else None
    products = products_by_adjoint(
        evaluation, ones, restores=is_restored, after=after, directions=directions, is_part=is_part
    )
    if products is None:
        return None
    if not values or evaluation.layout.outputs[0].target.kind == "return":
        values[:] = values_of(prepared, call, evaluation.returned)
    return values[0], products


def products_by_adjoint(
    evaluation: Evaluation,
    cotangents: list[np.ndarray],
    *,
    restores: bool = False,
    after: Callable[[Forward], None] | None = None,
    directions: np.ndarray | None = None,
    most: int | None = None,
    is_part: bool = False,
) -> CotangentProducts | None:
    """Cotangents, a matrix for each output, times J, in one run.

    Args:
        evaluation: the call.
        cotangents: for each output a matrix with a row for each entry, and a column for each cotangent.
        restores: whether everything is put back as it was.
        after: called after the run, before the way back.
        directions: along which the product with one cotangent is differentiated.
        most: the most cotangents in one way back.
        is_part: whether this is one of several runs, which must agree.

    Returns:
        The products; None, with everything as it was, if the run has no adjoint.
    """
    prepared, layout = evaluation.prepared, evaluation.layout
    if prepared.stores_to_arrays and not prepared.has_no_adjoint:
        prepared.has_no_adjoint = (
            "Python stores to arrays: a number that is there already is seen by forward mode alone."
        )
    if prepared.has_no_adjoint:
        return None
    if prepared.reverse is None:
        prepared.reverse = Reverse(prepared.fields)
    memory, reverse = prepared.question.options.max_memory, prepared.reverse
    numbers = layout.numbers(None)
    request = evaluation.request(ColumnBlock(layout.count), directions=directions, numbers=numbers)

    def check(forward: Forward) -> None:
        if not evaluation.is_judged and forward.may_lose:
            raise _Unjudged(forward.passed)
        if not prepared.is_checked:
            _check(evaluation, forward)
        if after is not None:
            after(forward)

    both = zip(cotangents, layout.outputs, strict=True)
    cotangents = [np.asarray(c, np.result_type(c.dtype, o.result_dtype)) for c, o in both]

    def product(check: Callable[[Forward], None] | None) -> CotangentProducts:
        cannot_agree = check is _stop or reverse.has_random  # other params are passed on there, or other draws
        compared = None if cannot_agree else evaluation.recorded(is_part=is_part)
        with backend.suspend_following(), evaluation.whole(), saying_once(evaluation.said), _bar_of(evaluation) as bar:
            return reverse.vjp(
                evaluation.what,
                replace(request, restart=Restart(record=compared)),
                cotangents,
                max_memory=memory,
                advance=bar,
                check=check,
                known=known,
                restores=restores,
                most=most,
            )

    call = evaluation.call
    known = None if evaluation.is_judged else reachable(call.function, call.args)
    start = State() if known is None else evaluation.new_state()
    try:
        result = product(None if prepared.is_checked and evaluation.is_judged and after is None else check)
    except _Unjudged as unjudged:
        start.undo()
        is_moved = _is_moved(evaluation, unjudged.passed, lambda: product(_stop))
        start.undo()
        if is_moved:
            evaluation.judge_along()
            start.undo()
        evaluation.note_judged()
        return products_by_adjoint(
            evaluation,
            cotangents,
            restores=restores,
            after=after,
            directions=directions,
            most=most,
            is_part=is_part,
        )
    except UnsupportedError as error:
        start.undo()
        prepared.has_no_adjoint = str(error)
        return None
    evaluation.note_judged()
    if result.alerts:
        _take_alerts(evaluation, result, reverse)
    elif np.isnan(result.rows).any():
        with saying_once(evaluation.said):
            warn_at_user(_NOT_A_NUMBER)
    evaluation.returned = result.returned
    return result


def _take_alerts(evaluation: Evaluation, products: CotangentProducts, reverse: Reverse) -> None:
    """Warn of what kernels have noted; products that it makes doubtful become NaN."""
    results = [numbers for numbers in (products.rows, products.moved) if numbers is not None]
    has_nan = any(np.isnan(numbers).any() for numbers in results)  # second derivatives have it elsewhere, too
    paths = None if has_nan else reverse.paths
    if warn_of_alerts(products.alerts, evaluation.prepared.fields, evaluation.layout, paths):
        for numbers in results:  # an adjoint that happens to be 0 says nothing
            numbers[:] = np.nan


@contextlib.contextmanager
def _bar_of(evaluation: Evaluation) -> Iterator[Callable[[int, int], None]]:
    """The progress bar of the way back; gives a function that takes how many steps of how many are done."""
    draw: Callable[[int], None] | None = None
    before = 0
    with contextlib.ExitStack() as stack:

        def advance(done: int, total: int) -> None:
            nonlocal draw, before
            text = f"Way back, {evaluation.call.name}"
            draw = draw or stack.enter_context(progress_bar(evaluation.progress, text, total))
            draw(max(0, done - before))
            before = max(done, before)

        yield advance


def _stop(forward: Forward) -> None:
    raise _Unjudged(forward.passed)


def _is_moved(evaluation: Evaluation, passed: list[float] | None, run: Callable[[], object]) -> bool:
    """Whether a number that Python passes on differs where the params are moved, or may do so.

    Where none does, Python has read numbers to compare or print them, and no derivative is lost. To ask so takes one
    more run forward, and no kernel with tangents.
    """
    state = State()
    with backend.running(moves=True):
        try:
            Arbiter(evaluation.call, evaluation.layout, None).move_params(state)
            run()
        except _Unjudged as unjudged:
            both = passed or [], unjudged.passed or []
            return len(both[0]) != len(both[1]) or any(a != b for a, b in zip(*both, strict=True))  # NaN, too
        except Exception:  # the user's code cannot run there
            return True
        finally:
            state.undo()
    return True


def _check(evaluation: Evaluation, forward: Forward) -> None:
    """Raise where a parameter is not read, or an output not written; warn of outputs that are independent."""
    layout = evaluation.layout
    keys = {p.container for p in (*layout.params, *layout.outputs)}
    own = {RETURN} if forward.returned is not None else set[Key]()
    accessed = _with_views(keys, forward.read), _with_views(keys, forward.written | own)
    has_launched = bool(forward.schedule.events)
    check_run(evaluation.prepared, evaluation.call, layout, accessed, has_launched=has_launched)
    for output in layout.outputs if evaluation.subject.warns_of_zeros else ():
        if output.target.kind != "return" and not forward.cell_of(output.key).carries():
            warn_at_user(f"{output.target.name} does not depend on any of the params: its Jacobian is zero.")


def _with_views(keys: set[Key], accessed: set[Any]) -> set[Key]:
    """What was accessed, and those of the keys that share memory with it."""
    views = [key for key in accessed if isinstance(key, View)]
    return accessed | {k for k in keys if isinstance(k, View) and any(k.overlaps(view) for view in views)}
