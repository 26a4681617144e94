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
import taichi.math as tm

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


def test_operators_become_calls():
    def f(a, b):
        c = a + b * 2 - a / b
        d = a // b % 3**b @ a
        e = -a + +b
        g = a & 1 | ~b ^ a << 2 >> 1

    check(
        f,
        """
        _ad.let('c', _ad.sub(_ad.add(a, _ad.mul(b, 2)), _ad.truediv(a, b)))
        _ad.let('d', _ad.matmul(_ad.mod(_ad.floordiv(a, b), _ad.pow(3, b)), a))
        _ad.let('e', _ad.add(_ad.neg(a), _ad.pos(b)))
        _ad.let('g', _ad.bit_or(_ad.bit_and(a, 1), _ad.bit_xor(_ad.invert(b), \
_ad.shift_right(_ad.shift_left(a, 2), 1))))
        """,
    )


def test_numbers_stay_numbers():
    def f(a):
        b = -1.5 * a
        c = a[-1]

    check(f, "_ad.let('b', _ad.mul(-1.5, a))\n_ad.let('c', _ad.load(a, (-1,)))")


def test_comparisons_and_logic():
    def f(a, b):
        c = a < b
        d = a == 1 and not b >= 2 or a != b
        e = 0 < a <= b

    check(
        f,
        """
        _ad.let('c', _ad.compare(('lt',), a, b))
        _ad.let('d', _ad.bool_op('or', _ad.bool_op('and', _ad.compare(('eq',), a, 1), _ad.logical_not(_ad.compare(('ge',), b, 2))), _ad.compare(('ne',), a, b)))
        _ad.let('e', _ad.compare(('lt', 'le'), 0, a, b))
        """,
    )


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


def test_conditional_expression():
    def f(a, b):
        c = a if b > 0 else -a
        d = a if ti.static(b) else 1

    check(
        f,
        """
        _ad.let('c', _ad.where(_ad.compare(('gt',), b, 0), a, _ad.neg(a)))
        _ad.let('d', a if ti.static(b) else 1)
        """,
    )


def test_reads_of_places():
    def f(x, i):
        a = x[i]
        b = x[i, 2][0]
        c = x[i].pos.xy
        d = x[1:3]

    check(
        f,
        """
        _ad.let('a', _ad.load(x, (i,)))
        _ad.let('b', _ad.load(_ad.load(x, (i, 2)), (0,)))
        _ad.let('c', _ad.attribute(_ad.attribute(_ad.load(x, (i,)), 'pos'), 'xy'))
        _ad.let('d', _ad.load(x, (_ad.slice(1, 3, None),)))
        """,
    )


def test_calls_and_methods():
    def f(v, s):
        a = ti.sin(s)
        b = tm.vec3(v.x, 1, s)
        c = v.dot(v.normalized())
        d = ti.max(s, 1.0)
        e = s.law(a, stiffness=2 * a)
        v.fill(0.0)
        ti.atomic_add(v[0], s)

    check(
        f,
        """
        _ad.let('a', _ad.call(ti.sin, s))
        _ad.let('b', _ad.call(tm.vec3, _ad.attribute(v, 'x'), 1, s))
        _ad.let('c', _ad.method(v, 'dot', _ad.method(v, 'normalized')))
        _ad.let('d', _ad.call(ti.max, s, 1.0))
        _ad.let('e', _ad.method(s, 'law', a, stiffness=_ad.mul(2, a)))
        _ad.method(v, 'fill', 0.0)
        _ad.run(ti.atomic_add, _ad.load(v, (0,)), s)
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


def test_comprehensions():
    def f(v):
        a = [e * 2 for e in v]

    check(f, "_ad.let('a', [_ad.mul(e, 2) for e in v])")


# --- assignments ------------------------------------------------------------------------------------------------------


def test_assignments_to_names_and_places():
    def f(x, m, s, a):
        x[0, 1] = a
        m[0][1, 2] = a
        s.pos = a
        x[0].xy = a
        b: ti.f32 = a

    check(
        f,
        """
        _ad.store(a, x, (0, 1))
        _ad.store(a, _ad.load(m, (0,)), (1, 2))
        _ad.store(a, s, 'pos')
        _ad.store(a, _ad.load(x, (0,)), 'xy')
        _ad.let('b', _ad.cast(a, ti.f32))
        """,
    )


def test_several_targets():
    def f(x, a):
        b, c = a, x[0]
        x[0], b = b, a
        d = e = a + 1

    lines = rewritten(f).splitlines()
    assert lines[0] == "_ad.unpack((a, _ad.load(x, (0,))), ('b', 'c'))"
    assert lines[1] == "_ad.unpack((b, a), ((x, (0,)), 'b'))"
    temporary = lines[2].split("'")[1]
    assert lines[2] == f"_ad.let('{temporary}', _ad.add(a, 1))"
    assert lines[3:] == [f"_ad.let('d', {temporary})", f"_ad.let('e', {temporary})"]


def test_augmented_assignments():
    def f(x, a):
        a += 1.0
        a **= x[0]
        x[0] -= a
        x[0].y *= a

    check(
        f,
        """
        _ad.update_local('a', 'add', 1.0)
        _ad.update_local('a', 'pow', _ad.load(x, (0,)))
        _ad.update(x, (0,), 'sub', a)
        _ad.update(_ad.load(x, (0,)), 'y', 'mul', a)
        """,
    )


def test_static_values_are_bound_at_compile_time():
    def f(x):
        a = ti.static(x)
        b, c = ti.static(1, 2)

    check(f, "_ad.bind_static('a', ti.static(x))\n_ad.bind_static(('b', 'c'), ti.static(1, 2))")


def test_walrus_knows_how_many_scopes_are_around_it():
    def f(a):
        b = (c := a)
        d = ti.sin((e := a))

    check(f, "_ad.let('b', _ad.let_value('c', a, 1))\n_ad.let('d', _ad.call(ti.sin, _ad.let_value('e', a, 2)))")


def test_returned_values():
    def f(a, b):
        return a * b, b

    def g(a):
        return

    check(f, "return _ad.result((_ad.mul(a, b), b))")
    check(g, "return")


# --- control flow -----------------------------------------------------------------------------------------------------


def test_branches_are_blocks():
    def f(a):
        if a > 0:
            a = 1
        elif a < -1:
            a = 2
        else:
            a = 3

    check(
        f,
        """
        if _ad.if_(_ad.compare(('gt',), a, 0)):
            _ad.let('a', 1)
            _ad.close()
        else:
            _ad.orelse()
            if _ad.if_(_ad.compare(('lt',), a, -1)):
                _ad.let('a', 2)
                _ad.close()
            else:
                _ad.orelse()
                _ad.let('a', 3)
                _ad.close()
            _ad.end_if()
            _ad.close()
        _ad.end_if()
        """,
    )


def test_static_branches_are_none():
    def f(a):
        if ti.static(a):
            a = 1
        else:
            a = 2

    check(f, "if ti.static(a):\n    _ad.let('a', 1)\nelse:\n    _ad.let('a', 2)")


def test_static_loops_are_unrolled_by_taichi():
    def f(x):
        for i in ti.static(range(3)):
            x[i] = 1.0

    check(f, "for i in ti.static(_ad.call(range, 3)):\n    _ad.store(1.0, x, (i,))")


def loops(function):
    """Of each loop: what is told before it, and what it runs over."""
    lines = rewritten(function).splitlines()
    heads = [n for n, line in enumerate(lines) if line.startswith("for")]
    return [(lines[n - 1].removeprefix("_ad."), lines[n].split(" in ")[1].rstrip(":")) for n in heads]


def test_loops_keep_the_form_that_taichi_recognises():
    def f(x, n):
        for i in range(n):
            x[i] = 1.0
        for i in range(2, n + 1):
            x[i] = 1.0
        for i, j in ti.ndrange(n, (1, n * 2)):
            x[i] = 1.0
        for index in ti.grouped(x):
            x[index] = 1.0
        for index in ti.grouped(ti.ndrange(3, n)):
            x[index] = 1.0
        for i in x:
            x[i] = 1.0

    assert loops(f) == [
        ("before_loop('range', n)", "range(_ad.bound(0))"),
        ("before_loop('range', 2, _ad.add(n, 1))", "range(_ad.bound(0), _ad.bound(1))"),
        ("before_loop('ndrange', n, (1, _ad.mul(n, 2)))", "ti.ndrange(*_ad.bound())"),
        ("before_loop('grouped', x)", "ti.grouped(_ad.bound(0))"),
        ("before_loop('grouped ndrange', 3, n)", "ti.grouped(ti.ndrange(*_ad.bound()))"),
        ("before_loop('field', x)", "_ad.bound(0)"),
    ]


def test_loop_bodies_are_blocks_that_know_their_variables():
    def f(x):
        for i, j in x:
            x[i, j] = 1.0

    check(
        f,
        """
        _ad.before_loop('field', x)
        for i, j in _ad.bound(0):
            _ad.enter_for('i', 'j')
            _ad.store(1.0, x, (i, j))
            _ad.end_loop()
        """,
    )


def test_while_loop():
    def f(a):
        while a < 3.0:
            a *= 2.0

    check(
        f,
        """
        while _ad.while_(_ad.enter_while(), _ad.compare(('lt',), a, 3.0)):
            _ad.update_local('a', 'mul', 2.0)
            _ad.end_loop()
        """,
    )


def test_break_and_continue_are_told_and_stay():
    def f(x):
        for i in x:
            if x[i] > 1.0:
                continue
            for j in range(3):
                break

    text = rewritten(f)
    assert text.count("_ad.jump('continue')") == text.count("continue\n") == 1
    assert text.count("_ad.jump('break')") == text.count("break\n") == 1


# --- functions --------------------------------------------------------------------------------------------------------


def test_decorators_and_defaults_are_dropped_and_annotations_kept():
    @ti.kernel
    def k(a: ti.f64, x: ti.template()):
        pass

    def with_default(a, b=2.0):
        pass

    assert signature(k._primal.func) == "def k(a: ti.f64, x: ti.template()):"
    assert signature(with_default) == "def with_default(a, b):"


def test_docstrings_and_pass_stay():
    def f(a):
        """What it does."""
        pass

    check(f, "'What it does.'\npass")


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
