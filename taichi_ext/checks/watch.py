"""Where a kernel and its tangents are not finite for the first time, and where its indices are outside."""

# pyright knows no types of Taichi.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from taichi_ext import backend
from taichi_ext.differentiate.facts.decisions import Differentiated
from taichi_ext.differentiate.transform.watch import watched
from taichi_ext.program import I32, Container, Place, Program

_MOST_SITES = 4096
_SHOWN = 3


class Watch:
    """Counts, for each place that keeps a value with a tangent, how often that or its tangent is NaN or infinite.

    And how often an index at a place is outside of the field, array or local that it is of.
    It is given to ``Jacobian.start``, and shown the programs of the kernels in the order in which they run.
    """

    def __init__(self) -> None:
        self.sites: dict[tuple[str, bool], int] = {}  # for indices or not
        self.counts, self._tree = backend.temporary_field(backend.ti.i32, _MOST_SITES)

    def program(self, differentiated: Differentiated) -> Program:
        """A differentiated program that counts."""
        counts = Container("counts", I32, 1, (), self.counts, False, (_MOST_SITES,))
        return watched(differentiated, counts, self._number)

    def _number(self, place: Place | None, is_index: bool) -> int | None:
        return None if place is None else self.number(place.message(), is_index)

    def number(self, place: str, is_index: bool = False) -> int | None:
        """The number of a place; None where there are too many."""
        number = self.sites.setdefault((place.strip("\n"), is_index), len(self.sites))
        return number if number < _MOST_SITES else None

    def findings(self) -> list[str]:
        """The first places where something is not finite."""
        places = list(self._counted(is_index=False))
        if not places:
            return []
        first, *others = places
        texts = [f"it arises first in\n{_indented(first)}"]
        if others:
            lines = ", ".join(dict.fromkeys(map(_line, others[:_SHOWN])))
            texts.append(f"from there it reaches {lines}{' and more' if len(others) > _SHOWN else ''}.")
        return texts

    def outside(self) -> list[str]:
        """The places where an index is outside, and how often."""
        return [
            f"an index is outside ({count} {'time' if count == 1 else 'times'}) in\n{_indented(place)}"
            for place, count in self._counted(is_index=True).items()
        ]

    def _counted(self, *, is_index: bool) -> dict[str, int]:
        """The places where something was counted, and how often."""
        counts = self.counts.to_numpy()
        numbers = ((place, n) for (place, of_index), n in self.sites.items() if of_index == is_index)
        return {place: int(counts[n]) for place, n in numbers if n < _MOST_SITES and counts[n]}

    def close(self) -> None:
        """Give the memory back."""
        self._tree.destroy()


def _line(place: str) -> str:
    """``line 7`` of the first line of a message."""
    return place.split(", in ")[0].split(", ")[-1]


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
