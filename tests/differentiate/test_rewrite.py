"""The rewriting of small functions, as text; and that every node stays at the position of the user's own."""

# The functions hold one construct each, written as users may write it.
# ruff: noqa: F841, RUF021, RUF059, UP031, UP032, UP034

import ast
import gc
import inspect
import textwrap
import weakref

import pytest
import taichi as ti

from taichi_ext import UnsupportedError, backend
from taichi_ext.record.rewriter import copied, flat_tree, rewrite

# --- functions --------------------------------------------------------------------------------------------------------


def test_every_node_is_at_a_line_of_the_user():
    def f(x, v, n):
        a = x[0]  # 1
        for i in range(n):
            if a > x[i] and v.dot(v) < 2:
                x[i] += a
            else:
                a, x[i] = x[i], a
            while a < 2:
                a *= 2
        return a

    user = ast.parse(textwrap.dedent(inspect.getsource(f)))
    lines = {n.lineno: n for n in ast.walk(user) if isinstance(n, ast.stmt)}
    for node in ast.walk(rewrite(f).tree()):
        if isinstance(node, ast.stmt) or (isinstance(node, ast.expr) and not isinstance(node, ast.Constant)):
            assert node.lineno in lines, ast.unparse(node)
            assert 0 <= node.col_offset
            assert node.end_lineno >= node.lineno
    for node in ast.walk(rewrite(f).tree()):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and node.value.func.id == "<ad>.store":
            assert isinstance(lines[node.lineno], (ast.Assign, ast.AugAssign))


def test_each_tree_is_fresh():
    def f(a):
        return a

    first, second = rewrite(f).tree(), rewrite(f).tree()
    assert first is not second
    first.body[0].body.clear()
    assert second.body[0].body


def test_trees_of_any_depth_are_copied():
    tree = ast.parse("a - 1 - 1.0", mode="eval")
    for _ in range(3000):  # pickle and copy recurse
        tree.body = ast.UnaryOp(op=ast.USub(), operand=tree.body)
    copy = copied(tree)
    inner, depth = copy.body, 0
    while isinstance(inner, ast.UnaryOp):
        inner, depth = inner.operand, depth + 1
    assert (depth, ast.unparse(inner)) == (3000, "a - 1 - 1.0")
    assert inner.lineno == 1
    assert flat_tree(ast.parse("1")) != flat_tree(ast.parse("1.0"))
    assert flat_tree(ast.parse("1")) == flat_tree(ast.parse("1"))


def test_too_deep_recursion_names_the_kernel():
    @ti.kernel
    def k():
        pass

    def endless() -> object:
        return endless()

    message = r"chain of calls of 'k' nests deeper than Python can follow"
    with pytest.raises(UnsupportedError, match=message), backend.deep_recursion(backend.primal_kernel(k)[0]):
        endless()


def test_functions_are_not_kept_alive():
    def use():
        def f(a):
            return a

        rewrite(f)
        assert rewrite(f) is rewrite(f)
        return weakref.ref(f)

    reference = use()
    gc.collect()
    assert reference() is None


def test_what_cannot_be_assigned_to_is_refused():
    def f(x):
        x.a, x[0] = ti.static(1, 2)

    with pytest.raises(UnsupportedError, match=r"ti\.static can only be assigned to names"):
        rewrite(f)
