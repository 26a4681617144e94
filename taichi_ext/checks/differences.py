"""Central differences at one step or at several, with error estimates, and their comparison with J.

The error of ``D(h) = (y(x + h) - y(x - h)) / 2 h`` has two parts: truncation, which grows as ``h ** 2``, and the
rounding of ``y`` and its intermediates, divided by ``h``.  Steps grow by a factor of 4.  Two neighbours give
Richardson's ``R(h) = D(h) + (D(h) - D(4 h)) / 15``.  ``R(h) - R(4 h)`` estimates its truncation error.  The rounding is
measured, also where an intermediate is far larger than ``y``: it is the distance of the changes of ``y`` at smaller
steps from ``2 h R``.  The smallest step whose error is small enough decides (compare Ridders, Accurate computation of
F'(x) and F'(x) F''(x), Advances in Engineering Software 4, 1982).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_FACTOR = 4.0  # from step to step
_LEAST = 256.0  # roundings of the entry: the smallest step that decides
_FINER = 4  # how many steps are smaller, and show whether the output varies within those that decide
_WIDEST = 0.25  # the largest step, relative to the entry, to the others of the parameter, or to 1
_MOST_STUDIED = 8  # entries of a parameter that are tried with all steps and still do not agree
_ROUNDING = 16.0  # how much larger a rounding error may be than those that were seen, or than an output's last place
_NOISE = 1e-2  # of an output: larger errors are not rounding, but an output that varies within the step
_ALLOWED = 0.5  # how much rounding agrees, relative to an entry of J or the largest difference in its column
_WIDER, _MANY = 4, 1e4  # power of a step within which outputs change by at most so many last places, if by rounding
_SAFETY = 4.0  # how much larger an error may be than its estimate
_TITLES = ("output", "parameter", "compared", "failed", "undecided", "largest error", "worst entry")


@dataclass(frozen=True)
class Sample:
    """An output at both sides of an entry."""

    up: float  # how far the upper side is from the entry
    down: float  # how far the lower side is
    high: np.ndarray  # the output there
    low: np.ndarray  # the output at the lower side

    def of(self, entries: np.ndarray) -> Sample:
        """The same for some entries of the output."""
        return Sample(self.up, self.down, self.high[entries], self.low[entries])


_AGREES, _UNDECIDED, _DISAGREES = 0, 1, 2


@dataclass(frozen=True)
class Verdict:
    """The verdict of differences on the entries of a column of J, and the derivatives that they give."""

    rank: np.ndarray
    derivative: np.ndarray


def verdict_of(
    J: np.ndarray,
    centre: np.ndarray,
    samples: Sequence[Sample],
    rtol: float,
    floor: float,
    precision: float,
    finer: int = 0,
) -> Verdict:
    """Compare a column of J with differences at steps that grow by 4.

    Args:
        J: the entries of the column, one for each entry of the output.
        centre: the output at the entry itself.
        samples: at least four, the smallest step first.
        rtol: relative tolerance.
        floor: absolute tolerance.
        precision: the relative rounding of a number.
        finer: how many of the steps are too small to decide.
    """
    lost = sum(min(s.up, s.down) <= 0 for s in samples[:finer])  # steps that do not move the entry
    samples, finer = samples[lost:], finer - lost
    with np.errstate(all="ignore"):
        up, down = (np.array([getattr(s, side) for s in samples])[:, None] for side in ("up", "down"))
        high, low = (np.stack([getattr(s, side) for s in samples]) for side in ("high", "low"))
        width, change = up + down, high - low
        D = change / width
        R = D[:-1] + (D[:-1] - D[1:]) / ((width[1:] / width[:-1]) ** 2 - 1)
        bend = np.abs((high - centre) / up - (centre - low) / down)
        rank, is_open = np.full(J.shape, _UNDECIDED), np.full(J.shape, True)
        derivative, least = np.zeros(J.shape), np.full(J.shape, np.inf)
        has_changed = np.logical_or.accumulate(change != 0)  # smaller steps may be lost in rounding
        for k in range(1 + finer, len(R) - 1):
            off, gap = (np.abs(change[:k] - width[:k] * slope) for slope in (R[k], J))
            seen = off.max(0)
            size = np.maximum(np.abs(high[k]), np.abs(low[k]))
            # where two smaller steps are as J has it, and not as R has it, the output varies within this one
            part = np.abs(width[:k] * (J - R[k]))
            is_finer = ((off > 0.5 * part) & (gap < 0.25 * part) & (change[:k] != 0)).sum(0) > 1
            rounding = _ROUNDING * (seen + precision * size) / width[k]
            error = np.abs(R[k] - R[k + 1]) + rounding
            bound, distance = floor + rtol * np.maximum(np.abs(J), np.abs(R[k])), np.abs(J - R[k])
            # what looks like rounding, larger than of outputs, may be a variation within all steps that J knows
            is_unseen = seen > np.maximum(_SAFETY * precision * size, 0.1 * np.abs(change[k]))
            is_unseen &= np.abs(J) * width[0] > 0.25 * seen
            is_right = (distance <= bound) & (error <= _SAFETY * bound) & (has_changed[k] | ~has_changed[-1])
            is_wrong = (distance > bound + _SAFETY * error) & has_changed[k] & (seen <= _NOISE * size)
            is_wrong &= ~(is_finer | is_unseen)
            # the slopes of the two sides differ at every step: J may be either, or between them
            is_kink = (bend[k] > _SAFETY * error) & (bend[k - 1] > 0.5 * bend[k]) & (distance <= 0.5 * bend[k] + bound)
            is_decided = is_open & (is_right | is_wrong)
            derivative = np.where(error < least, R[k], derivative)
            least = np.fmin(least, error)
            rank[is_decided & is_right] = _AGREES
            rank[is_decided & is_wrong & ~is_kink] = _DISAGREES
            is_open &= ~is_decided
        return Verdict(rank, derivative)


@dataclass(eq=False)
class MovedEntry:
    """One entry of a parameter, moved by steps to both sides."""

    outputs: Callable[[float], list[np.ndarray]]  # where the entry has another value
    values: np.ndarray  # the parameter
    index: tuple[int, ...]  # of the entry
    step: float  # the first one, relative to the magnitude of the entry
    precision: float  # the relative rounding of a number

    def __post_init__(self) -> None:
        values = self.values
        self._x = float(values[self.index])
        sizes = np.abs(values[np.isfinite(values) & (values != 0)].astype(np.float64))
        typical = float(np.median(sizes)) if sizes.size else 1.0  # entries may be of very different sizes
        self._step = self.step * (max(abs(self._x), math.sqrt(self.precision) * typical) if self._x else typical)
        self._smaller = max(2, math.floor(math.log(self.step / (_LEAST * self.precision), _FACTOR)))
        self._widest = _WIDEST * max(abs(self._x), typical, 1.0)
        self._samples: dict[int, list[Sample]] = {}

    def samples(self, power: int) -> list[Sample]:
        """The outputs ``4 ** power`` of the first step away."""
        if power not in self._samples:
            h = _FACTOR**power * self._step
            high, low = (float(self.values.dtype.type(self._x + sign * h)) for sign in (1, -1))
            sides = zip(self.outputs(high), self.outputs(low), strict=True)
            self._samples[power] = [Sample(high - self._x, self._x - low, a.ravel(), b.ravel()) for a, b in sides]
        return self._samples[power]

    def powers(self) -> Iterator[tuple[range, int]]:
        """The powers to try, a few of them, then all; and how many are of steps too small to decide."""
        if math.isfinite(self._x):
            highest = max(3, math.floor(math.log(self._widest / self._step, _FACTOR)))
            yield range(-2, 4), 0
            yield range(-self._smaller - _FINER, highest + 1), _FINER


class ComparedColumns:
    """The columns of a block of J that have been compared: an array of the shape of the output and param, or CSR."""

    def __init__(self, jacobian: Any, centre: np.ndarray, shape: tuple[int, ...]) -> None:
        self._size, self._centre, self._shape = math.prod(jacobian.shape), centre, shape
        is_sparse = hasattr(jacobian, "tocsc")
        self._jacobian: Any = jacobian.tocsc() if is_sparse else jacobian.reshape(centre.size, math.prod(shape))
        self._counts = np.zeros(3, int)
        self._studied = 0
        self._worst = (-1, 0.0)
        self._entry: EntryComparison | None = None
        self._remark = ""

    def compare(self, entry: MovedEntry, n: int, rtol: float, atol: float | None) -> None:
        """Compare the column of one entry of the parameter with differences of output ``n``."""
        J, first = self._column(entry.index), entry.samples(0)[n]
        width = first.up + first.down
        with np.errstate(all="ignore"):
            D = (first.high - first.low) / width
            finite = np.abs(D[np.isfinite(D)])
            floor = 0.1 * rtol * (finite.max() if finite.size else 0.0) if atol is None else atol
            bound = floor + rtol * np.maximum(np.abs(J), np.abs(D))
            rank = np.where(np.isfinite(J), np.where(np.abs(J - D) <= bound, _AGREES, _UNDECIDED), _DISAGREES)
            place = entry.precision * np.maximum(np.abs(first.high), np.abs(first.low))
            rounding = _ROUNDING * place / width
            is_clear = rounding <= _ALLOWED * np.fmax(np.abs(J), finite.max() if finite.size else 0.0)
            if not is_clear[rank == _AGREES].all():  # an output may change by less than its last place
                wide = entry.samples(_WIDER)[n]
                change = np.abs(wide.high - wide.low)
                rank[(rank == _AGREES) & ~is_clear & (change > 0) & (change <= _MANY * place)] = _UNDECIDED
            is_rounding = (np.abs(J - D) <= bound + rounding) & is_clear
        doubtful = np.flatnonzero(rank == _UNDECIDED)
        if doubtful.size and self._studied >= _MOST_STUDIED:
            rank[doubtful] = _DISAGREES if self._counts[_DISAGREES] else _UNDECIDED
        elif doubtful.size:
            study = self._study(entry, n, doubtful, J[doubtful], rtol, floor)
            rank[doubtful] = study.rank
            D[doubtful] = np.where(study.rank == _UNDECIDED, D[doubtful], study.derivative)
        rank[(rank == _UNDECIDED) & is_rounding] = _AGREES
        self._counts += np.bincount(rank, minlength=3)
        self._keep_worst(entry, n, J, D, rank)

    def block(self, output: str, param: str) -> BlockComparison:
        """The comparison so far."""
        failed, undecided = (int(self._counts[rank]) for rank in (_DISAGREES, _UNDECIDED))
        compared = int(self._counts.sum())
        return BlockComparison(output, param, compared, self._size, failed, undecided, self._entry, self._remark)

    def _study(self, entry: MovedEntry, n: int, at: np.ndarray, J: np.ndarray, rtol: float, floor: float) -> Verdict:
        """The verdict of differences at more steps on some entries of a column."""
        result = Verdict(np.full(at.size, _UNDECIDED), J)
        for powers, finer in entry.powers():
            samples = [entry.samples(power)[n].of(at) for power in powers]
            result = verdict_of(J, self._centre.ravel()[at], samples, rtol, floor, entry.precision, finer)
            if not result.rank.any():
                break
        else:
            self._studied += 1
        return result

    def _keep_worst(self, entry: MovedEntry, n: int, J: np.ndarray, D: np.ndarray, rank: np.ndarray) -> None:
        if not rank.size:
            return
        with np.errstate(all="ignore"):
            error = np.nan_to_num(np.abs(J - D), nan=np.inf)
        at = int(np.lexsort((error, rank))[-1])
        if (int(rank[at]), float(error[at])) > self._worst:
            self._worst = (int(rank[at]), float(error[at]))
            place = tuple(int(i) for i in np.unravel_index(at, self._centre.shape))
            self._entry = EntryComparison(place, entry.index, float(J[at]), float(D[at]))
            self._remark = _remark(entry, n, at) if rank[at] == _UNDECIDED else ""

    def _column(self, index: tuple[int, ...]) -> np.ndarray:
        column = int(np.ravel_multi_index(index, self._shape)) if index else 0
        block = self._jacobian[:, [column]]
        return np.asarray(block.toarray() if hasattr(block, "toarray") else block, np.float64).ravel()


def _remark(entry: MovedEntry, n: int, at: int) -> str:
    """Why differences cannot tell."""
    first, finer = entry.samples(0)[n], entry.samples(-1)[n]
    ends = first.high[at], first.low[at]
    if not np.isfinite(ends).all():
        return "the output is not finite on one side of the entry, so there are no differences to compare with."
    steps = [(s.high[at] - s.low[at]) / (s.up + s.down) for s in (first, finer)]
    return (
        f"differences cannot tell: they are {steps[0]:.6g} with a step of {first.up:.2g} and {steps[1]:.6g} with "
        f"{finer.up:.2g}. The output jumps or has a kink within the step, or changes by less than its rounding error."
    )


# Reports of the checks, and their text.


@dataclass(frozen=True)
class EntryComparison:
    """One entry of a Jacobian, and the same entry by differences."""

    output: tuple[int, ...]
    param: tuple[int, ...]
    jacobian: float
    differences: float

    @property
    def error(self) -> float:
        """Their distance; NaN if one of them is not finite."""
        return abs(self.jacobian - self.differences)

    def text(self, of: str) -> str:
        """The entry in words; ``of`` is J or H."""
        place = f"{index_text(self.output)}, {index_text(self.param)}"
        return f"{place}: {of} {self.jacobian:.8g}, differences {self.differences:.8g}"


@dataclass(frozen=True)
class BlockComparison:
    """The comparison for one output and one parameter.

    Attributes:
        output: its place in ``outputs``, and its description.
        param: likewise.
        compared: the number of compared entries of J.
        total: the number of its entries.
        failed: the number of compared entries that disagree.
        undecided: the number of compared entries for which differences cannot tell.
        worst: one of those that disagree; else one that is undecided; else the one with the largest error.
        remark: why differences cannot tell.
    """

    output: str
    param: str
    compared: int
    total: int
    failed: int
    undecided: int
    worst: EntryComparison | None
    remark: str


@dataclass(frozen=True, repr=False)
class JacobianReport:
    """The result of ``check_jacobian`` or ``check_hessian``: true if everything agrees and is finite.

    ``print`` shows it as text.  For a Hessian, the outputs are the gradients with respect to each parameter.

    Attributes:
        name: the kernel.
        blocks: one comparison for each output and parameter.
        not_finite: the values that are NaN or infinite, and where they arose, one text each.
        rtol: the relative tolerance.
        outside: the lines that read or store outside of a field, array or local, one text each. J has no derivatives of
            values there; differences may.
        of: the compared derivative, J or H.
    """

    name: str
    blocks: tuple[BlockComparison, ...]
    not_finite: tuple[str, ...]
    rtol: float
    outside: tuple[str, ...] = ()
    of: str = "J"

    @property
    def is_ok(self) -> bool:
        """Whether every checked entry agrees, and J and the outputs are finite."""
        return self.verdict == "agrees"

    @property
    def verdict(self) -> str:
        """``"agrees"``, ``"disagrees"``, or ``"cannot tell"`` where nothing disagrees but something is undecided."""
        if self.not_finite or any(block.failed for block in self.blocks):
            return "disagrees"
        return "cannot tell" if any(block.undecided for block in self.blocks) else "agrees"

    def __bool__(self) -> bool:
        return self.is_ok

    def __str__(self) -> str:
        verdict = {"agrees": "agrees with", "disagrees": "DISAGREES with", "cannot tell": "CANNOT BE TOLD from"}
        start = f"{self.of} of {self.name} {verdict[self.verdict]} central differences"
        lines = [f"{start} (relative tolerance {self.rtol:.0e})"]
        rows: list[tuple[str, ...]] = [_TITLES]
        for b in self.blocks:
            worst = ("", "") if b.worst is None else (f"{b.worst.error:.2g}", b.worst.text(self.of))
            rows.append((b.output, b.param, f"{b.compared} of {b.total}", str(b.failed), str(b.undecided), *worst))
        lines += [f"  {line}" for line in table(rows)]
        lines += [f"  {block.output}, {block.param}: {block.remark}" for block in self.blocks if block.remark]
        lines += [f"  not finite: {text}" for text in self.not_finite]
        lines += [f"  {text}" for text in self.outside]
        return "\n".join(lines)

    __repr__ = __str__


def table(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows of text as lines with aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def index_text(index: tuple[int, ...]) -> str:
    """An index as Python writes it: ``[2, 3]``."""
    return f"[{', '.join(str(i) for i in index) or None}]"


def entry_text(index: tuple[int, ...]) -> str:
    """The index of an entry of a value, nothing where the value is a number."""
    return index_text(index) if index else ""


def number_text(value: object) -> str:
    """Numbers of an array on one line, with four digits."""
    return np.array2string(np.asarray(value), precision=4, separator=", ").replace("\n", "")
