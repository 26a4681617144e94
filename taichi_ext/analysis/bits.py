"""Whether the bits of a number with a tangent are used for more than a comparison.

``isnan`` and ``isinf`` compare bits: there is no derivative to lose. Bits that are kept may become a number again.
"""

from __future__ import annotations

from taichi_ext.analysis.activity import Activity
from taichi_ext.program import Body, Declare, Local, Op, Read, Statement, Value, children, statements, values_of
from taichi_ext.simplify.usage import assigned_locals

_COMPARISONS = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))


def escaping_bits(body: Body, activity: Activity) -> tuple[Op, Statement] | None:
    """The first cast to bits that escape, and the statement where they do; None where none do."""
    changed = assigned_locals(body)
    holders: dict[Local, Op] = {}  # integers that hold such bits

    def bits_in(value: Value) -> Op | None:
        if isinstance(value, Op):
            if value.name in _COMPARISONS:
                return None
            if value.name == "bit_cast" and activity.has(value.args[0]):
                return value
        if isinstance(value, Read) and value.local in holders:
            return holders[value.local]
        return next((found for found in map(bits_in, children(value)) if found is not None), None)

    for s in statements(body):
        for value in values_of(s):
            found = bits_in(value)
            if found is None:
                continue
            if not isinstance(s, Declare) or s.local in changed or s.local.shape or s.local.dtype.is_real:
                return found, s
            holders[s.local] = found
    return None
