"""Reports of the checks, and their text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Entry:
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
class Block:
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
    worst: Entry | None
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
    blocks: tuple[Block, ...]
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
        rows = [("output", "parameter", "compared", "failed", "undecided", "largest error", "worst entry")]
        rows += [
            (
                block.output,
                block.param,
                f"{block.compared} of {block.total}",
                str(block.failed),
                str(block.undecided),
                "" if block.worst is None else f"{block.worst.error:.2g}",
                "" if block.worst is None else block.worst.text(self.of),
            )
            for block in self.blocks
        ]
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
