"""Entries of a sparse Jacobian in programs written by hand, without Taichi: which columns, in which order, or a reason."""

import itertools

import pytest

from taichi_ext.analysis.affine import Affine
from taichi_ext.analysis.loops import Extent
from taichi_ext.differentiate.facts.decisions import DifferentiationRequest, Role
from taichi_ext.differentiate.forms.entry_sites import DenseRowsError, SparseColumns
from taichi_ext.differentiate.plan.sparse_numbering import SparseSeeds
from taichi_ext.differentiate.transform.forward import differentiate
from taichi_ext.program import F64, I32, Assign, Const, Container, For, Load, Local, Op, Program, Read

P, M = 5, 4
x, y, u = Container("x", F64, 1, shape=(P,)), Container("y", F64, 1, shape=(M,)), Container("u", F64, 1, shape=(M,))
which = Container("which", I32, 1, shape=(M,))
i, j = Local("i", I32, kind="loop"), Local("j", I32, kind="loop")


def op(name, *args):
    return Op(name, args, args[-1].dtype)


def at(container, index):
    return Load(container, (index,))


def over(container, *body):
    return For("field", (i,), (container,), body)


def sparse(*body, between=(u,)):
    """The sparse part of a program with the parameter x, the output y and fields between them."""
    roles = {x: Role(0, is_fresh=False), y: Role(), **{c: Role() for c in between}}
    containers = (x, y, which, *between)
    asked = SparseSeeds(SparseColumns({"x": P}), frozenset({"y"}), {c: c.name for c in containers})
    program = Program("program", (), (), body, containers)
    extents = {c: Extent(c.shape, ()) for c in containers}
    return differentiate(program, DifferentiationRequest(P, roles, extents, sparse=asked)).sparse


def test_reasons_for_dense_rows():
    neighbour = at(y, op("sub", Read(i), Const(1, I32)))
    with pytest.raises(DenseRowsError, match="read in the loop that writes it"):
        sparse(over(y, Assign(at(y, Read(i)), op("mul", neighbour, at(x, Read(i))))))
    count = Local("count", I32, kind="parameter")
    bounds = (Const(0, I32), Read(count), Const(2, I32))
    loop = For("range", (i,), bounds, (Assign(at(y, Read(i)), at(x, Read(i))),))
    with pytest.raises(DenseRowsError, match="y is written in a loop whose number of iterations is not known"):
        sparse(loop)


def test_rows_that_are_apart():
    even = Affine(((i, 2),))
    assert even.is_apart_from(Affine(((j, 4),), 1))
    assert not even.is_apart_from(Affine(((j, 3),), 1))
    assert not even.is_apart_from(even)


def test_columns_of_fields_in_between_are_numbered_in_the_order_of_the_program():
    between = [Container(f"u{n}", F64, 1, shape=(M,)) for n in range(8)]
    steps = [
        over(b, Assign(at(b, Read(i)), op("sin", at(a, Read(i))))) for a, b in itertools.pairwise([x, *between, y])
    ]
    found = sparse(*steps, between=between[::-1])
    assert list(found.columns.intermediates) == [c.name for c in between]
