"""Tangents of locals that stand for themselves in forms, until what is stored is known.

With forms over columns, each operation of an energy costs a product for each column of its element, although its
numbers may depend on few others: the 12 columns of a tetrahedron pass through the 9 entries of F. So a local of a
Hessian's program is a leaf of the forms that use it, a *pivot*. The forms that are stored together are a graph then,
from rows over pivots to columns, and pivots are eliminated one by one: each user of a pivot gets its form, times a
coefficient. That is the chain rule in any order of operations, forward and reverse among them. The next pivot is the
one with the fewest products, less those that it would take if it were the last (U. Naumann, "Optimal accumulation of
Jacobian matrices by elimination methods on the dual computational graph", 2004, section 4).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from taichi_ext.differentiate.forms.forms import Form, Leaf, Pivot, Seed, accumulate, kept
from taichi_ext.program.build import Builder, is_number

Pivots = Mapping[Pivot, Form]  # in the order of their declarations
Node = Pivot | int  # a pivot, or the number of a row


def is_worth_pivot(form: Form) -> bool:
    """Whether a tangent is more than that of another value, and can be kept as it is: rows may change."""
    is_another = len(form) == 1 and all(is_number(c, 1) for c in form.values())
    return bool(form) and not is_another and all(isinstance(leaf, (Seed, Pivot)) for leaf in form)


def pivots_of(forms: Iterable[Form], pivots: Pivots) -> dict[Pivot, Form]:
    """All pivots that forms are made of, in the order of their declarations."""
    found: set[Pivot] = set()
    stack = [leaf for form in forms for leaf in form if isinstance(leaf, Pivot)]
    while stack:
        pivot = stack.pop()
        if pivot not in found:
            found.add(pivot)
            stack.extend(leaf for leaf in pivots[pivot] if isinstance(leaf, Pivot))
    return {pivot: form for pivot, form in pivots.items() if pivot in found}


def without_pivots(builder: Builder, pivots: Pivots, rows: list[Form]) -> list[Form]:
    """The forms over columns; ``pivots``: all that they are made of."""
    nodes: dict[Node, Form] = {pivot: dict(form) for pivot, form in pivots.items()}
    nodes |= {n: dict(row) for n, row in enumerate(rows)}
    users: dict[Pivot, dict[Node, None]] = {pivot: {} for pivot in pivots}
    for node, form in nodes.items():
        for leaf in form:
            if isinstance(leaf, Pivot):
                users[leaf][node] = None
    most = _products(pivots, users)
    while users:
        pivot = min(users, key=lambda p: len(users[p]) * len(nodes[p]) - most[p])
        form, using = nodes.pop(pivot), users.pop(pivot)
        if len(using) > 1:
            form = {leaf: kept(builder, c) for leaf, c in form.items()}
        for user in using:
            c = nodes[user].pop(pivot)
            accumulate(nodes[user], form, kept(builder, c) if len(form) > 1 else c)
        for leaf in form:
            if isinstance(leaf, Pivot):
                del users[leaf][pivot]
                users[leaf].update(using)
    return [nodes[n] for n in range(len(rows))]


def _products(pivots: Pivots, users: Mapping[Pivot, Iterable[Node]]) -> dict[Pivot, int]:
    """For each pivot, how many columns it depends on, times how many rows depend on it."""
    columns: dict[Pivot, set[Leaf]] = {}
    for pivot, form in pivots.items():
        columns[pivot] = set().union(*(columns[x] if isinstance(x, Pivot) else {x} for x in form))
    rows: dict[Pivot, set[Node]] = {}
    for pivot in reversed(list(pivots)):
        rows[pivot] = set().union(*(rows[x] if isinstance(x, Pivot) else {x} for x in users[pivot]))
    return {pivot: len(columns[pivot]) * len(rows[pivot]) for pivot in pivots}
