"""Small kernels with functions and classes that they name, one in each row: J against central differences.

In sweeps, all rows have their J by entries and by adjoints, too.
"""

import pytest
from program_rows import rows_of

pytestmark = [pytest.mark.usefixtures("ti64"), pytest.mark.filterwarnings("ignore:.*Calling non-taichi function")]

PROGRAMS = """
side_effects_within_an_expression: x, y = scalars([0.3, 0.8, 1.4]), outputs(5)
    # Taichi evaluates the operands of a statement after the calls in it have had their effects.
    @ti.func
    def double(a: ti.template()):
        a = a * 2.0
        return a
    p = x[0] * x[1]
    y[0] = p * 2.0 + double(p)
    q = x[0] * x[1]
    y[1] = q * x[2] + ti.atomic_add(q, x[1]) * q
    r = x[0]
    y[2] = (r := x[1] * r) + r * r
    s = x[2]
    t = s * double(s) + s
    y[3] = t * s
    y[4] = double(s) + double(s) * double(t) + t
while_at_the_top_level_and_conditions_that_call: x, y = scalars([1.3, 0.4]), outputs(2)
    @ti.func
    def square(a):
        t = a * a
        return t
    s = x[0]
    while square(s) < 20.0 and not square(x[1]) > 1.0:
        s = s * 1.5 + square(x[1]) * s
    y[0] = s
    while y[1] < 3.0:
        y[1] += s * x[1]
locals_are_changed_in_place: x, y = scalars(np.array([0.7, 1.3, 2.1])), outputs(3)
    def doubled(a, by):
        a += by
        a *= 2.0
        return a * by
    def counted(a, by):
        ti.atomic_add(a, by * by)
        return by
    for i in x:
        a = 1.0
        b = doubled(a, x[i])
        c = x[0] * 2
        d = counted(c, x[i])
        y[i] = a * b + c * d
loops_in_real_functions_are_serial: x, y = scalars([1.3, 0.4]), outputs(1)
    @ti.real_func
    def f(a: ti.f64, b: ti.f64) -> ti.f64:
        s = a
        for j in range(3000):
            s = ti.sin(s * 3.0 + b * j * 0.01) * 0.3 + s * 0.5
        return s
    y[0] = f(x[0], x[1])
arguments_by_reference: x, y, v = scalars([1.3, 0.4, 0.7, 0.23, 0.9]), outputs(6), vectors([[0.3, 0.8]])
    @ti.func
    def f(a: ti.template(), w: ti.template(), field: ti.template()):
        a = a * w.x + field[0]
        w *= a
        w.y += field[1]
        field[2] = a * field[0]
    @ti.func
    def twice(a: ti.template(), b):
        for _ in range(2):
            f(a, b, y)
    for _ in range(1):
        y[0] = x[3]
        y[1] = x[4]
        s, w = x[0], v[0]
        f(s, w, y)
        y[3] = s * w.x * w.y
        f(y[3], w, y)
        twice(s, w)
        y[4] = s * y[2]
        y[5] = w.norm()
functions_of_structs: x, y = scalars([1.3, 0.4, 0.7, 0.23, 0.9]), outputs(3)
    @ti.func
    def make(a):
        return ti.types.struct(a=ti.f64, b=ti.f64)(a=a * a, b=a)
    @ti.func
    def change(s: ti.template(), a):
        s.a *= a
        s.b = s.a
    @ti.func
    def by_value(s, a):
        s.a *= a
        return s.a + s.b
    @ti.func
    def typed(s: ti.types.struct(a=ti.f64, b=ti.f64)) -> ti.f64:
        return s.a * s.b
    s = make(x[0])
    change(s, x[1])
    y[0] = s.a * s.b
    y[1] = by_value(s, x[2]) * s.a + by_value(make(x[3]), 2.0)
    y[2] = typed(s) + typed(make(x[4]))
entries_of_struct_fields_by_reference: x, vec2, Pair = scalars([1.3, 0.4, 0.7, 0.23, 0.9]), ti.types.vector(2, ti.f64), ti.types.struct(a=ti.f64, b=ti.f64);
        f = ti.types.struct(first=Pair, second=Pair, w=vec2).field(shape=3) | x, [f.first.a, f.second.a, f.w]
    @ti.func
    def change(s: ti.template(), c):
        if c > 0.85:
            s.first.a = c * 2.0
            s.w.x += s.first.a
        s.w *= c
        s.first.a += s.w.y * c + s.w.x
        t = s
        t.first.a = 0.0
        return t.w.sum()
    for i in range(2):
        m = i
        if i == 1:
            m = 2
        f[m].w = vec2(x[0], x[i])
        f[1].second.a += change(f[m], x[i])
"""

SWEEPS = """
arguments_are_called_what_the_user_likes: x, y = scalars([1.3, 0.4, 0.7, 0.23, 0.9]), outputs(5);
        names = ti.types.struct(r=ti.f64, function=ti.f64, base=ti.f64, name=ti.f64)
    # Names of the engine's own arguments are no different from others, in functions, methods, classes and texts.
    def plain(r, function, base, name, value, template, keywords):
        return shown(r=r * function, name=base * name) + value * template - keywords
    def shown(r, name):
        return r + name
    @ti.data_oriented
    class Owner:
        @ti.func
        def f(self, r, base, name, function):
            return r * base - name * function
        def plain(self, r, base, name, function):
            return r * base + name * function
    owner = Owner()
    @ti.func
    def f(r, function, base, name, value, kind, args):
        return r * function + base * name + value * kind - args
    y[0] = f(r=x[0], function=x[1], base=x[2], name=x[3], value=x[4], kind=x[0], args=x[1])
    y[1] = plain(r=x[0], function=x[1], base=x[2], name=x[3], value=x[4], template=x[0], keywords=x[1])
    y[2] = owner.f(r=x[0], base=x[1], name=x[2], function=x[3])
    y[3] = owner.plain(r=x[0], base=x[1], name=x[2], function=x[3])
    s = names(r=x[0], function=x[1], base=x[2], name=x[3])
    y[4] = s.r * s.function + s.base * s.name
    print("{r} {template} {name}".format(r=y[0], template=y[1], name=y[2]))  # noqa: UP032  # a method of a text
lists_and_dicts_that_grow_in_the_kernel: x, y, z = scalars([0.3, 0.8, 0.5, 1.2]), outputs(4), outputs(4)
    @ti.func
    def powers(a, n: ti.template()):
        made = [1.0 * a]
        for k in ti.static(range(1, n)):
            made.append(made[k - 1] * a)
        return ti.Vector(made)
    for i in x:
        terms, rows, named = [], [], {}
        for j in ti.static(range(3)):
            terms.append(x[(i + j) % 4] * (j + 1))
            rows.append([x[i], ti.sin(x[i] * j)])
            named.update({j: x[i] + j})
        terms.extend([x[0], 2.0])
        terms.insert(0, x[i] * x[i])
        total = ti.Vector(terms)
        named.setdefault(7, x[3])
        y[i] = total.dot(total) + named[2] * named[7] + len(terms)
        z[i] = ti.Matrix(rows).norm() + powers(x[i], 4).sum()
real_functions: x, y = scalars([1.3, 0.4, 0.7, 0.23, 0.9]), outputs(6)
    @ti.real_func
    def f(a: ti.f64, b: ti.f64) -> ti.f64:
        return a * a * b
    @ti.real_func
    def pair(a: ti.f64, n: ti.i32) -> (ti.f64, ti.f64):
        b = a
        for _ in range(n):
            b *= 1.1 * a
        return b * n, a + f(a, b)
    @ti.real_func
    def vector(v: tm.vec2) -> tm.vec2:
        return v * v.x
    @ti.real_func
    def store(i: ti.i32, a: ti.f64):
        y[i] = a * 2.0
    @ti.real_func
    def change(a: ti.ref(ti.f64), b: ti.f64):
        a = a * b
        a += b
    y[0] = f(x[0], x[1]) + f(f(x[2], x[3]), 2.0)
    p, q = pair(x[0], 3)
    y[1] = p * q
    y[2] = vector(tm.vec2(x[0], x[1])).y
    store(3, x[3] * x[4])
    s = x[0] * x[1]
    change(s, x[2])
    y[4] = s
    y[5] = f(x[0] * 3, 2)
an_entry_by_reference_whose_index_changes: x, y = scalars([0.9, 0.8, 0.3]), outputs(4)
    # Taichi evaluates the index anew at each use.
    @ti.func
    def f(a: ti.template(), m: ti.template()):
        a = x[0] * 3.0
        m = 2  # noqa: F841
        a = a + x[1]
    for _ in range(1):
        m = 0
        f(y[m], m)
an_expression_by_reference_is_evaluated_at_each_use: x, y = scalars([0.9, 0.8, 0.3]), outputs(2)
    @ti.func
    def f(a: ti.template(), s: ti.template()):
        before = a
        s = s + x[1]
        return a * s + before
    @ti.func
    def stored(a: ti.template()):
        before = a
        y[1] = x[2] * 2.0
        return a * before
    for _ in range(1):
        s = x[0]
        y[0] = f(s * 2.0, s)
        y[1] = x[0]
        y[0] += stored(y[1] * 3.0)
"""

ROWS = rows_of(PROGRAMS + SWEEPS)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.sweep] * (f"\n{n}" in SWEEPS)) for n in ROWS])
def test_against_differences(name):
    ROWS[name].is_right()


@pytest.mark.sweep
@pytest.mark.parametrize("name", ROWS)
def test_in_other_ways(name):
    ROWS[name].is_alike_in_other_ways()
