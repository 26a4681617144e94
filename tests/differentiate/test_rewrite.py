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


def text_of(function):
    return ast.unparse(rewrite(function).tree()).replace("<ad>", "_ad")


def signature(function):
    return text_of(function).splitlines()[0]


def rewritten(function):
    """The statements after the first, as text."""
    lines = text_of(function).splitlines()
    assert lines[1].strip() == "_ad.begin()"
    return textwrap.dedent("\n".join(lines[2:]))


def check(function, text):
    assert rewritten(function) == textwrap.dedent(text).strip("\n")


# --- expressions ------------------------------------------------------------------------------------------------------


def test_comparisons_that_are_not_arithmetic_stay():
    def f(a):
        if ti.static(a is None or "x" not in a):
            pass

    check(
        f,
        """
        if ti.static(_ad.bool_op('or', a is None, 'x' not in a)):
            pass
        """,
    )


def test_a_local_that_hides_a_module_is_a_value():
    def f(tm):
        a = tm.dot(tm)

    check(f, "_ad.let('a', _ad.method(tm, 'dot', tm))")


def test_text_is_formatted_from_primal_values():
    def f(a):
        print(a, "text")
        print(f"{a}")
        print("%d" % a)
        print("{}".format(a))

    check(
        f,
        """
        _ad.run(print, a, 'text')
        _ad.run(print, _ad.format('{}', a))
        _ad.run(print, _ad.percent('%d', a))
        _ad.run(print, _ad.format('{}', a))
        """,
    )


def test_assert_shows_the_user_s_text():
    def f(a):
        assert a > 0
        assert a < 1, "too large"

    check(
        f,
        """
        _ad.assert_(_ad.compare(('gt',), a, 0), 'a > 0')
        _ad.assert_(_ad.compare(('lt',), a, 1), 'too large')
        """,
    )


# --- functions --------------------------------------------------------------------------------------------------------


def test_decorators_and_defaults_are_dropped_and_annotations_kept():
    @ti.kernel
    def k(a: ti.f64, x: ti.template()):
        pass

    def with_default(a, b=2.0):
        pass

    assert signature(k._primal.func) == "def k(a: ti.f64, x: ti.template()):"
    assert signature(with_default) == "def with_default(a, b):"


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


def test_source_is_the_user_s_file_and_line():
    def f(a):
        return a

    file, lines, start = rewrite(f).source
    assert file.endswith("test_rewrite.py")
    assert lines[0].strip() == "def f(a):"
    with open(__file__, encoding="utf-8") as source:
        assert source.read().splitlines()[start - 1].strip() == "def f(a):"


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
