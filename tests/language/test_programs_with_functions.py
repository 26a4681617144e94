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
side_effects_on_fields_within_an_expression: x, v = scalars([0.3, 0.8]), vectors([[0.3, 0.8], [1.2, 0.5]]);
        z, w, y, u = outputs(1), vector_outputs(2, 1), outputs(3), vector_outputs(2, 2)
    @ti.func
    def double():
        z[0] = z[0] * 2.0
        return z[0]
    @ti.func
    def double_vector():
        w[0] = w[0] * 2.0
        return w[0].x
    for _ in range(1):
        z[0] = x[0]
        y[0] = z[0] + double()
        y[1] = z[0] * x[1] + double() * z[0]
        y[2] = (z[0] * 3.0 if x[0] < 1.0 else z[0]) + double()
        w[0] = v[0]
        u[0] = w[0] + double_vector()
        u[1] = w[0] * v[1] + double_vector() * w[0]
atomics_on_local_vectors_that_start_without_tangents: x, y = scalars([1.3, 0.4, 0.7, 0.23, 0.9][:3]), outputs(4)
    @ti.func
    def raise_entry(entry: ti.template(), by):
        entry += by * by
    for n in range(2):
        v, w = ti.Vector([0.0, 0.0]), ti.Vector([0.5, 0.5, 0.5])
        for j in range(3):
            ti.atomic_add(v[0], x[j] * x[n])
            raise_entry(w[(j * 2) % 3], x[n])
        ti.atomic_max(v[1], x[n])
        y[n] = v[0] * v[1]
        y[2 + n] = w[0] * w[1] * w[2]
results_that_are_tuples_vectors_and_nothing: x, y = scalars([1.3, 0.4, 0.7, 0.23, 0.9]), outputs(8)
    @ti.func
    def pair(a, b):
        c = a * b
        return c, a + b
    @ti.func
    def frame(a):
        u = tm.vec2(a, a * a)
        return u, ti.Matrix([[a, 1.0], [0.0, u.y]]), a
    @ti.func
    def store(i, a):
        y[i] = a * a
    @ti.func
    def one_of(flag: ti.template(), a):
        if ti.static(flag):
            return a * a
        return -a
    p, q = pair(x[0], x[1])
    p, q = pair(q, p)
    y[0] = p * q
    u, m, a = frame(x[2])
    y[1] = (m @ u).sum() * a
    store(2, x[3] * p)
    y[3] = one_of(True, x[0]) * one_of(False, x[1])
    y[4] = pair(x[0], x[1])[0] * pair(x[2], x[1])[1]
    r = pair(x[3], x[4])
    y[5] = r[0] * r[1]
    (y[6], y[7]) = pair(x[0], x[4])
keywords_defaults_and_annotations: x, y = scalars([1.3, 0.4, 0.7, 0.23, 0.9]), outputs(6)
    @ti.func
    def f(a, b=2.0, c=3):
        return a * b + c
    @ti.func
    def typed(a: ti.f64, n: int, s: ti.f32) -> ti.f64:
        n += 1
        return a * n * s
    @ti.func
    def integral(a: ti.i32, b: ti.f64) -> ti.f64:
        a += 1
        return a * b
    y[0] = f(x[0]) + f(x[1], x[2])
    y[1] = f(b=x[0], a=x[1] * x[1])
    y[2] = typed(x[0], 2, 0.5)
    y[3] = integral(x[0] * 3.1, x[1] * 5.0) * x[0]
    y[4] = f(x[0], c=x[1])
    y[5] = typed(n=1, a=x[2], s=2.0)
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
functions_as_arguments_and_closures: x, y = scalars([1.3, 0.4, 0.7, 0.23, 0.9]), outputs(5);
        weight, shift = 2.5, [0.1, 0.2]
    @ti.func
    def square(a):
        return a * a
    def make(factor):
        @ti.func
        def scaled(a):
            return a * factor + shift[1]
        return scaled
    double, triple = make(2.0), make(3.0)
    functions = [double, triple, square]
    @ti.func
    def apply(f: ti.template(), a, n: ti.template()):
        for _ in ti.static(range(n)):
            a = f(a)
        return a
    @ti.func
    def outer(a):
        b = a * weight
        return inner(b) + inner(a)
    @ti.func
    def inner(a):
        return ti.sin(a) * shift[0]
    y[0] = double(x[0]) * triple(x[0])
    y[1] = apply(square, x[1], 3)
    y[2] = outer(x[2])
    for f in ti.static(functions):
        y[3] += f(x[3]) * f(x[0])
    y[4] = apply(double, apply(ti.sin, x[4], 2), 2)
static_recursion: x, y = scalars([1.3, 0.4, 0.7, 0.23, 0.9]), outputs(3)
    @ti.func
    def power(a, n: ti.template()):
        result = a
        if ti.static(n > 1):
            result = a * power(a, n - 1)
        return result
    @ti.func
    def fibonacci(n: ti.template()):
        result = x[n]
        if ti.static(n > 1):
            result = fibonacci(n - 1) * x[0] + fibonacci(n - 2)
        return result
    y[0] = power(x[0], 4) + power(x[1], 2) * power(x[0], 1)
    y[1] = fibonacci(4)
    y[2] = power(x[2], 20)
arrays_and_fields_through_functions(p: ti.types.ndarray(dtype=ti.f64, ndim=1), q: ti.types.ndarray(dtype=ti.f64, ndim=1)): a, b, x = real([1.3, 0.4, 0.7, 0.23, 0.9]), real(np.zeros(5)), scalars([1.3, 0.4, 0.7, 0.23, 0.9]) | [a, x], b, args=(a, b)
    @ti.func
    def get(p: ti.template(), i):
        return p[i] * p[(i + 1) % 5]
    @ti.func
    def put(p: ti.template(), i, v):
        p[i] = v
        p[i] += get(x, i)
    for i in range(5):
        put(q, i, get(p, i) * p[0])
ndranges: x, y = scalars(np.arange(1.0, 13.0).reshape(3, 4) / 7.0), outputs(3, 4); n = integers(3)
    for i, j in ti.ndrange(3, 4):
        y[i, j] = x[i, j] * x[0, 0]
    for i, j in ti.ndrange((1, 3), (0, n[None])):
        y[i, j] += x[i - 1, j] * x[i, 3 - j]
    for i in ti.ndrange(3):
        y[i, i] *= x[2, i]
    for I in ti.grouped(ti.ndrange(3, (1, 4))):
        y[I] += x[I] * x[I[0], I[1] - 1] + x[I - ti.Vector([0, 1])] * I[0]
    for _ in range(1):
        for i, j in ti.ndrange(2, (1, 3)):
            if i == j:
                continue
            y[0, 0] = y[0, 0] * x[i, j] + y[i, j]
            for I in ti.grouped(ti.ndrange(2, 2)):
                if I[0] > I[1]:
                    continue
                y[I] += 0.1 * x[I + 1] * y[i, j]
    for i, j, l in ti.ndrange(2, 2, (1, 3)):
        y[2, 3] += x[i, j] * x[j, l]
functions_of_vectors_structs_and_fields: Ball = ti.types.struct(m=ti.f64, p=ti.types.vector(2, ti.f64));
        x, v = scalars(np.array([0.7, 1.3, 2.1])), vectors([[1.0, 2.0], [0.5, -1.0], [2.0, 0.3]]);
        y, z = outputs(3), vector_outputs(2, 3)
    def stretched(a, by):
        return ti.sin(a * by) + by
    def energy(ball, k):
        return k * ball.m * ti.Matrix.norm_sqr(ball.p)
    def clear(field, value):
        field.fill(value)
        return 1.0
    @ti.func
    def entry(f: ti.template(), i):
        return f[i] * x[0]
    def read(i):
        return entry(x, i)
    y[0] = clear(z, x[1] * 2)
    for i in x:
        y[i] = energy(Ball(x[i], v[i]), x[0]) + read(i)
        z[i] += stretched(v[i], x[i])
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
real_functions_that_return_early: x, y = scalars([1.3, 0.4, 0.7, 0.23, 0.9]), outputs(5)
    @ti.real_func
    def first(a: ti.f64, b: ti.f64) -> ti.f64:
        if a > 1.0:
            return a * b
        s = b
        for j in range(50):
            s = s * a + b
            if j > 3 and s < 0.5:
                return a * s * j
            elif j == 9:
                break
        while s > 0.1:
            s *= 0.5
            if s < 0.2:
                return s * s
        return b
    for i in range(5):
        y[i] = first(x[i], x[(i + 1) % 5]) + first(x[0], x[i])
expressions_by_reference_inside_and_outside_of_blocks: x, y = scalars([0.9, 0.8, 0.3]), outputs(10)
    @ti.func
    def conditional(a: ti.template(), b: ti.template()):
        return (a * b if a > 0.5 else (ti.sin(b) if b > 0.2 else a)) + (b * a if b > a else a * a) * a
    @ti.func
    def branch(a: ti.template()):
        r = 0.0
        if a > 0.5:
            r = a * a
        return r + a * a * 2.0
    @ti.func
    def loops(a: ti.template(), b: ti.template()):
        r = a * b
        for j in range(2):
            r += a * a * j
        s = a * r
        while s < 3.0:
            s += a * b + 1.0
        return s + a * b
    y[9] = conditional(x[0] * x[1], x[2] * x[0])
    for i in range(3):
        y[i] = conditional(x[i] * x[0] + x[1], x[1] * x[i])
        y[3 + i] = branch(x[i] * x[2]) + branch(x[0] * x[1])
        y[6 + i] = loops(x[i] * x[0], x[2] + x[i])
entries_by_reference_inside_and_outside_of_blocks: x, y, v = scalars([0.9, 0.8, 0.3]), outputs(8), vectors([[0.9, 0.8], [0.3, 0.4]]);
        w = vector_outputs(2, 4)
    @ti.func
    def change(a: ti.template(), c):
        if c > 0.85:
            a = c * 2.0
        a += c * x[1]
        for j in range(2):
            a *= c
        a = a + x[2]
    @ti.func
    def change_vector(a: ti.template(), b: ti.template()):
        if b.x > 0.5:
            a = b * 2.0
        # not a += b.yx * a.x: after a whole store in a block, Taichi 1.7.4 loses the new a.x of a plain kernel
        a *= b.yx + 1.0
        a.x *= b.y
        for j in range(2):
            a.y += b.x * j
        return a.norm()
    for i in range(2):
        m = i
        if i == 1:
            m = 3
        change(y[m], x[i])
        change(y[m + 4], x[2])
        w[1 + i].x += change_vector(w[m], v[i])
        u = v[0]
        w[1 + i].y += change_vector(u, v[1] * 2.0) * u.x
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
