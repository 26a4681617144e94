"""Small kernels, one in each row: J against central differences, and the state against a plain run.

In sweeps, all rows have their J by entries and by adjoints, too.
"""

import pytest
from program_rows import rows_of

pytestmark = pytest.mark.usefixtures("ti64")

PROGRAMS = """
walrus: x, y = scalars([0.3, 0.8]), outputs(4)
    y[0] = (a := x[0] * x[1]) * a
    if (b := a * 2.0) > 0.1:
        y[1] = b * x[0]
    c = 1.0
    while (c := c * x[1]) > 0.3:
        y[2] += c * x[0]
    y[3] = c + (d := c * a) * (e := d + b) * e
one_component_fields: x, y = vectors([[0.7], [0.3]]), vector_outputs(1, 2)
    for i in range(2):
        y[i] = x[i] * x[0][0]
signs_of_constants: x, y = scalars([0.3, 0.8]), outputs(2)
    for i in range(2):
        y[i] = -ti.cast(2, ti.f64) * x[i] ** 2 + (-ti.Vector([2.0, 3.0])).dot(ti.Vector([x[i], x[0]]))
computed_entries_of_a_vector_of_indices(n: ti.types.vector(2, ti.i32)): x, y = scalars([0.3, 0.8, 1.4]), outputs(4) | x, y, args=(ti.Vector([2, 0]),)
    for i in range(4):
        y[i] = x[n[i % 2]] * x[n[(i + 1) % 2]] + x[n[1]]
a_param_that_is_an_output: x, y = scalars([0.5, 0.8]), outputs(1) | x, [y, x]
    y[0] = x[0] * x[1]
extrema_at_a_tie_keep_the_entry: x, y = scalars([0.5, 0.5]), scalars([0.5, 0.5]) | [x, y], y, expected=[[np.zeros((2, 2)), np.eye(2)]]
    ti.atomic_max(y[0], x[0])
    ti.atomic_min(y[1], x[1])
atomics_on_locals_that_nothing_reads: x, y = scalars([1.3, 0.4, 0.7, 0.23, 0.9]), outputs(1)
    unread = 1.1
    before = ti.atomic_add(unread, 0.7)  # noqa: F841
    ti.atomic_max(unread, x[0])
    kept = x[2]
    y[0] = x[1] * ti.atomic_add(kept, x[3])
chained_comparisons: x, y = scalars([0.3, 0.8]), outputs(4)
    a, b = x[0], x[1]
    if 0.0 < a < b < 1.0:
        y[0] = a * b
    if 0.0 < a * 2.0 <= 0.7 < b:
        y[1] = a * b
    if (0.0 < a and a < b < 0.5) or b > 2.0:
        y[2] = a * b
    else:
        y[2] = b * b
    n = 3
    if 0 <= n - 1 < 5 and not a > b:
        y[3] = a * a
conditional_expression_whose_sides_differ_in_type: x, y = scalars([0.3, 0.8]), outputs(5)
    y[0] = x[0] if x[0] < 0.5 else 1
    y[1] = 1 if x[0] < 0.5 else x[0]
    y[2] = ti.cast(x[0], ti.f32) * 1.0 if x[0] > 0.5 else x[1]
    y[3] = (1 if x[0] < 0.5 else 2) * x[1]
    y[4] = x[1] * (x[0] < 0.5)
total_reflection: x, y = vectors([0.9, 0.1, 0.2]), vector_outputs(3)
    y[None] = tm.refract(tm.normalize(x[None]), tm.vec3(0.0, 1.0, 0.0), 1.5)
casts_to_integers_carry_no_tangent: x, y = scalars([1.73, -2.64]), outputs(2, 7)
    for i in range(2):
        y[i, 0] = x[i] * ti.cast(x[i], ti.i32)
        y[i, 1] = x[i] * int(x[i])
        y[i, 2] = x[i] * ti.i32(x[i])
        y[i, 3] = x[i] * ti.cast(x[i] * 10.0, ti.i8) + ti.u8(3)
        y[i, 4] = x[i] * ti.floor(x[i], ti.i32)
        y[i, 5] = x[i] * ti.round(x[i], dtype=ti.i32) + ti.ceil(x[i], ti.i64)
        n: ti.i32 = x[i] * 3.0
        y[i, 6] = x[i] * n
annotated_declarations_convert: x, y = scalars([1.7]), outputs(2) | x, y, expected=[[3 + 2 * 1.7], [2 * 1.7]]
    a: ti.f32 = x[0] * x[0]
    b: ti.f64 = 3
    b += x[0]
    y[0] = b * x[0]
    y[1] = a
select: x, v, y, w = scalars([0.3, 0.8]), vectors([[0.5, -0.2, 0.9]]), outputs(4), vector_outputs(3, 4)
    y[0] = ti.select(x[0] > 0.5, x[0] * 2.0, x[1] * x[0])
    y[1] = ti.select(x[0] < 0.5, x[0] * 2.0, 7.0)
    y[2] = ti.select(1, 7.0, x[0]) + ti.select(0, 7.0, x[0])
    y[3] = ti.select(x[0] > 0.5, 1, x[1])
    w[0] = ti.select(v[0] > 0.0, v[0] * x[0], -v[0])
    w[1] = ti.select(x[0] < 0.5, v[0], x[1])
    w[2] = ti.select(v[0] > 0.3, x[0], tm.vec3(x[1]))
    w[3] = ti.select(ti.Vector([1, 0, 1]), v[0], 0.0)
values_without_derivative_beside_values_with: x, y = scalars([0.3, 0.8]), outputs(6)
    y[0] = x[0] * ti.raw_mod(7, 4) * ti.bit_shr(9, 1)
    y[1] = x[0] * ti.cast(tm.isnan(x[0]), ti.i32) + x[1] * (1 - ti.cast(tm.isinf(x[1]), ti.i32))
    y[2] = x[1] * ti.bit_cast(ti.bit_cast(ti.cast(1.5, ti.f32), ti.i32), ti.f32)
    y[3] = x[0] * tm.popcnt(ti.cast(7, ti.u32)) * tm.clz(1)
    y[4] = (tm.eye(3) * x[0])[1, 1] * tm.pi * tm.e
    y[5] = x[1] * (ti.cast(x[0] * 11.0, ti.i32) & 1) * (5 // 2) * (7 % 4)
vectors_of_indices: x, y = scalars([[1.3, 0.4], [0.7, 0.2]]), outputs(4)
    for i in range(4):
        p = ti.Vector([i // 2, i % 2])
        a = x[p]
        p[0] = 1 - p[0]
        b = x[p] * a
        p += 1
        p = p % 2
        q = p
        p.x = 0
        y[i] = b * x[p] + x[p[1], q[0]] + x[q] * x[ti.Vector([1, 0])]
grouped_indices_changed: x, y = scalars([1.3, 0.4, 0.7]), outputs(3)
    ti.loop_config(serialize=True)
    for i in range(3):
        I = ti.Vector([i])
        a = x[I]
        J = I
        J[0] = 2 - J[0]
        y[I] = a * x[J] + x[2 - I]
        I[0] = 1
        y[J] += x[I] * x[J]
serial_order: x, y, z = scalars([1.3, 0.4, 0.7, 0.2, 0.9]), outputs(6), outputs(5)
    # Outermost loops made serial, so that an iteration may use what the one before stored.
    ti.loop_config(serialize=True)
    for i in range(5):
        y[i + 1] = y[i] * 0.5 + x[i] * x[0]
        if y[i + 1] > 1.5:
            break
    ti.loop_config(serialize=True)
    for i in range(5):
        if i == 2:
            continue
        z[i] = z[i - 1] + y[i] if i > 0 else x[0]
locals_named_like_what_the_engine_keeps: x, y = scalars([1.3, 0.4, 0.7]), outputs(3)
    for i in x:
        frozen, unpacked, argument, result = x[i], x[0] * x[i], 2.0 * x[1], ti.Vector([x[0], x[1]])
        atomic = ti.atomic_add(frozen, unpacked * frozen)
        result.xy = result.yx * atomic
        argument, swizzle = [unpacked * argument, frozen]
        y[i] = frozen * unpacked + argument * atomic - result.x * swizzle
runtime_indices_of_local_vectors: x, y = scalars([0.3, 0.8, -0.5, 1.1]), outputs(6)
    for n in range(1):
        v = ti.Vector([x[0], x[1], x[2], x[3]])
        for i in range(4):
            v[i] = v[i] * x[3 - i] + v[(i + 1) % 4]
        for i in range(3):
            v[i + 1] += v[i] * x[i]
            v[3 - i] *= x[0]
            v[i] -= 0.1 * v[i]
        s = 0.0
        for i in range(4):
            for j in range(i):
                s += v[i] * v[j]
        y[0] = s
        for i in range(4):
            y[i + 1] = v[i]
        m = 2
        t = v[m]
        v[m] = x[0]
        m = 1
        v[m], v[m + 1] = v[m + 1] * t, v[m]
        y[5] = v[m] * v[2] + t
a_local_array_as_a_stack: x, y = scalars([0.3, 0.8, -0.5, 1.1]), outputs(2)
    for n in range(2):
        stack = ti.Vector.zero(ti.f64, 8)
        top = 0
        for i in range(4):
            stack[top] = x[i]
            top += 1
            if i % 2 == 1:
                top -= 1
                right = stack[top]
                top -= 1
                left = stack[top]
                stack[top] = left * right + x[n]
                top += 1
        total = 1.0
        while top > 0:
            top -= 1
            total *= stack[top]
        y[n] = total
lists_and_comprehensions: x, y = scalars([1.3, 0.4, 0.7, 0.2, 0.9]), outputs(4)
    items = [x[0] * x[1], x[2], 3.0]
    y[0] = items[0] * items[1] + items[2]
    squares = [x[i] * x[i] for i in range(5)]
    y[1] = squares[0] + squares[4] * squares[1]
    nested = [[x[i] * x[j] for j in range(2)] for i in range(3) if i != 1]
    y[2] = nested[1][0] * nested[0][1]
    table = {"a": x[0], "b": x[1] * x[0]}
    y[3] = table["a"] * table["b"]
    items[0] = x[3]
    items[1] += x[4]
    y[3] += items[0] * items[1]
methods_that_give_vectors_by_their_class: x, y = vectors([[3.0, 4.0, 1.0], [1.0, -1.0, 0.5]]), vector_outputs(3, 2, 5)
    for i in x:
        v = x[i] * x[0]
        w = x[i]
        y[i, 0] = ti.Vector.normalized(x[i], 1e-3)
        y[i, 1] = ti.Matrix.cross(v, x[1])
        y[i, 2] = ti.Matrix.transpose(ti.Matrix.outer_product(v, x[i])) @ x[0]
        y[i, 3] = ti.Matrix.__mul__(v, x[1])
        ti.Matrix.fill(w, v[0])
        y[i, 4] = w
indices_below_zero_from_the_end_stay_taichis(x: ti.types.ndarray(), y: ti.types.ndarray()): x, y = np.array([0.3, -0.8, 1.1, 0.6]).copy(), np.zeros(4) | x, y, args=(x, y)
    n = x.shape[0]
    for i in range(n):
        y[n - 1 - i] = x[i] * n
struct_for_over_an_array_of_two_axes_and_atomics(x: ti.types.ndarray(), rows: ti.types.ndarray(), best: ti.types.ndarray()): x = np.random.default_rng(4).standard_normal((3, 5));
        rows, best = np.zeros(3), np.full(5, -10.0) | x, [rows, best], args=(x, rows, best)
    for i, j in x:
        rows[i] += x[i, j] * x[0, j]
        ti.atomic_max(best[j], x[i, j])
components_of_a_vector_field_in_place: x, y = vectors([[0.3, 0.8], [0.5, 1.1]]), outputs(2);
        first, second = x.get_scalar_field(0), x.get_scalar_field(1) | x, x
    for i in range(2):
        first[i] = second[i] * first[i]
        first[i] += first[i] * second[i]
        second[i] *= first[i]
static_branches: x, y = scalars([1.3, 0.4, 0.7, 0.2, 0.9]), outputs(3); mode, flags = "square", {"double": True}
    a = x[0]
    if ti.static(mode == "square"):
        a = a * x[1]
    elif ti.static(mode == "cube"):
        a = a * a * a
    else:
        a = 0.0
    b = a
    if ti.static(flags["double"]):
        b = a * 2.0
        c = b * x[2]
        y[0] = c
    else:
        b = tm.vec2(a)
    y[0] += b * a
    for i in ti.static(range(2)):
        for j in ti.static(range(2)):
            if ti.static(i == j):
                y[1] += x[i] * x[j]
            else:
                y[2] += x[i] * x[j] ** 2
    ti.static_assert(mode == "square")
fields_in_python_containers: a, b, y, z = scalars([0.3, 0.8]), scalars([0.5, 0.6]), outputs(2), outputs(2);
        fields = [a, b]; table = {"p": a, "q": [b, y]} | fields, [y, z]
    for i in range(2):
        y[i] = fields[0][i] * fields[1][1 - i]
        for f in ti.static(fields):
            y[i] += f[i] * f[0]
        for n, f in ti.static(enumerate(fields)):
            z[i] += f[i] * n
        z[i] += table["p"][i] * table["q"][0][i]
arguments(_ad: ti.template(), _shadow1: ti.f64, _shadow0: ti.types.ndarray()): x, y = scalars([1.3, 0.4, 0.7]), outputs(3) | x, y, args=(y, 0.5, np.array([1.5, 2.5, 3.5]))
    for i in x:
        _ad[i] = x[i] * _shadow1 * _shadow0[i] * x[0]
struct_members: x, y = scalars([1.3, 0.4, 0.7]), outputs(3); Pair = ti.types.struct(_ad=ti.f64, load=ti.f64)
    for i in x:
        pair = Pair(_ad=x[i], load=x[0])
        pair._ad *= pair.load
        y[i] = pair._ad * pair.load
functions_of_the_kernel_s_own: x, y = scalars(np.array([0.7, 1.3, 2.1])), outputs(3)
    # ``sum`` directly in a kernel.
    for i in x:
        y[i] = sum([x[i], x[0], 2.0]) * sum([x[1], x[i]], x[2])
fill_of_a_parameter: x, y = scalars(np.array([0.5, -1.0, 2.0])), outputs(3) | x, y, state=[x]
    for i in x:
        y[i] = x[i] ** 2
    x.fill(3.0)
    for i in y:
        y[i] += x[i]
each_iteration_starts_with_zeros: x, y = scalars(np.random.default_rng(3).uniform(0.3, 1.2, 40)), outputs(6)
    # In serial loops, with jumps: memory of the iteration before must not be seen.
    for i in y:
        total = 0.0
        for r in range(4):
            if r == 2:
                continue
            s = 0.0
            n = 0
            while n < 40:
                if (n + i + r) % 5 == 0:
                    s += x[n] ** 2
                if n > 10 + 6 * r and s > 1.0:
                    break
                n += 1
            total += s * x[(3 * r + i) % 40]
        y[i] = total
a_sum_of_zero_tangents_stays_zero_through_a_square_root: x, zero, y = scalars(np.linspace(0.3, 0.8, 30)), scalars([0.0]), outputs(3) | x, y, expected=[np.eye(30)[i] * x[0] + np.eye(30)[0] * x[i] for i in range(3)]
    for i in range(3):
        acc = 0.0
        for j in range(30):
            acc += x[j] * zero[0]
        r = ti.sqrt(acc) + x[i]
        y[i] = r * x[0] + ti.sqrt(acc) * r + (ti.sqrt(acc) if x[0] < 1.0 else 0.0)
"""

SWEEPS = """
arguments_by_name: x, y = scalars([0.3, 0.8, 0.5]), outputs(8)
    y[0] = ti.sqrt(x=x[0])
    y[1] = ti.atan2(x2=x[1], x1=x[0])
    y[2] = ti.select(x2=x[1], cond=x[0] > 0.1, x1=x[2] * x[0])
    y[3] = ti.cast(dtype=ti.f64, obj=x[0] * x[1])
    y[4] = pow(exp=2, base=x[0])
    y[5] = ti.pow(x[0], exponent=x[1])
    y[6] = ti.math.clamp(xmax=1.0, x=x[0] * x[0], xmin=0.0)
    y[7] = ti.select(x1=2.0, x2=3.0, cond=x[0] > 0.5) * x[1]
index_arithmetic(n: ti.i32): x, y = scalars(np.linspace(0.1, 0.9, 30)), outputs(4) | x, y, args=(3,)
    for i in range(4):
        for j in range(3):
            y[i] += x[i * 2 - j + 3] * x[(i + 1) * 4 + j] + x[i * n + j] * x[i // 2 * 2]
            y[i] += x[n * n - i] * x[(i * j) % 7] - x[-(-i)] * x[j + i] * x[i + j]
            m = i * 3
            p = m - j * 2 + 5
            y[i] += x[p + m] * x[p] - x[m]
index_arithmetic_that_wraps: x, y = scalars(np.linspace(0.1, 0.9, 300)), outputs(3)
    for i in range(3):
        m = ti.cast(130 + i, ti.u8)
        n = ti.cast(i - 1, ti.i64)
        y[i] = x[m + m] * x[m] + x[n + 1] * x[m - ti.cast(1, ti.u8)]
a_matrix_that_is_solved_for_in_its_own_place(n: ti.i32): x, y = scalars([0.1, 0.2, 0.3, 0.4]), outputs(1) | x, y, args=(1,)
    for i in range(1):
        m = ti.Matrix([[0.5, 0.7], [0.7, 0.5]])
        for step in range(2):
            for j in range(4):
                m[0, 0] -= x[j] * x[(j + n) % 4]
            m = ti.Matrix([[1.25, 0.5 * m[0, 1]], [0.5 * m[n - 1, n - 1], 1.0 + m[n - 1, n - 1]]]).inverse()
        y[0] += m.sum()
indices_that_are_named_after_a_local_whose_tangent_they_reach(n: ti.i32): x, y = scalars([0.3, 0.8, -0.5, 1.1]), outputs(3) | x, y, args=(1,)
    for i in range(3):
        s = x[0]
        v = ti.Vector([0.7, s, s])
        index = n % 4
        for j in range(2):
            s += x[index] * x[1]
        y[i] += v[n % 3] * s
constant_constructors: x, y, z = scalars([0.3, 0.8, -0.5, 1.1]), matrix_outputs(3, 3, 4), vector_outputs(3, 3)
    y[0] = ti.Matrix.identity(ti.f64, 3) * x[0]
    y[1] = ti.Matrix.diag(3, x[1])
    y[2] = ti.Matrix.one(ti.f64, 3, 3) * x[2] + ti.Matrix.zero(ti.f64, 3, 3)
    y[3] = tm.eye(3) * x[1] @ ti.Matrix.diag(3, x[0])
    z[0] = ti.Vector.zero(ti.f64, 3) + x[0]
    z[1] = ti.Vector.one(ti.f64, 3) * x[1]
    z[2] = ti.Vector.unit(3, 1, ti.f64) * x[2]
methods_of_vectors: x, y, z, n = vectors([[0.3, 0.8, 0.5], [1.4, 0.6, 0.9]]), vector_outputs(3, 5), outputs(14), matrix_outputs(3, 3, 1)
    u, v = x[0], x[1]
    z[0] = u.dot(v)
    z[1] = u.norm()
    z[2] = u.norm(1e-3)
    z[3] = u.norm_sqr()
    z[4] = u.norm_inv() + v.norm_inv(1e-2)
    z[5] = u.sum()
    z[6] = u.max()
    z[7] = u.min()
    z[8] = u.any() * u[0] + u.all() * v[0]
    z[9] = u.n * u[0]
    z[10] = u.xy.cross(v.xy)
    z[11] = (u - v).norm() * (u + v).normalized().dot(u.normalized(1e-3))
    z[12] = len(u) * u[2] + u.get_shape()[0] * v[1]
    z[13] = x[0].dot(x[1]) * x[0].norm()
    y[0] = u.cross(v)
    y[1] = u.normalized()
    y[2] = v.normalized(1e-3)
    y[3] = u.cast(ti.f64) * v.cast(ti.i32)
    y[4] = x[0].cross(x[1]).normalized()
    n[0] = u.outer_product(v)
stores_to_slices: x, y, z, u = scalars([0.3, 0.8, -0.5, 1.1]), matrix_outputs(3, 3, 1), vector_outputs(3, 2), matrix_outputs(2, 3, 1)
    for i in range(1):
        c = ti.Matrix([[x[0], x[1], x[2]], [x[3], x[0] * x[1], 1.0], [2.0, x[2], x[3] * x[2]]])
        c[1, :] = ti.Vector([1.0, x[0], 2.0])
        c[:, 0] = ti.Vector([5.0, 6.0, 7.0]) * x[1]
        c[0:2, 1:3] += x[2]
        c[2, :] *= x[3]
        c[0:2, 0:2] = c[1:3, 1:3]
        v = ti.Vector([1.0, x[0], 3.0])
        v[0:2] = v[1:3] * x[0]
        if x[0] > 0:
            c[:, 1] -= c[:, 0]
        y[i] = c
        z[0][1:3] = v[0:2]
        z[1][0:2] -= x[3]
        u[0][1, :] = c[0, :]
hints_beside_tangents: x, y, n = scalars(np.array([1.0, 2.0, 3.0])), outputs(3), ti.field(ti.i32, shape=3) | x, y, state=[n]
    ti.block_local(x)
    for i in x:
        j = ti.assume_in_range(i, 0, 0, 3)
        ti.atomic_or(n[i], 1)
        k = ti.rescale_index(x, y, ti.Vector([j]))[0]
        y[i] = x[k] ** 2 * n[i]
matrices_from_scalars_rows_and_columns: x, y = scalars([0.3, 0.8, -0.5, 1.1]), matrix_outputs(2, 2, 8);
        mat = ti.types.matrix(2, 2, ti.f64)
    a, b, c, d = x[0], x[1], x[2], x[3]
    u, v = tm.vec2(a, b), tm.vec2(c, d * a)
    y[0] = ti.Matrix([[a, b], [c, d]])
    y[1] = tm.mat2(a, b * c, c, d)
    y[2] = mat(a, 1, 2, d)
    y[3] = mat([[a, b * b], [c, d]])
    y[4] = ti.Matrix.rows([u, v])
    y[5] = ti.Matrix.cols([u, v])
    y[6] = tm.mat2(u, v)
    y[7] = ti.Matrix([[x[i] * x[j] for j in range(2)] for i in range(2)])
slices: x, m = vectors([[0.3, 0.8, -0.5, 1.1]]), matrices([[[1.3, 0.2, -0.4], [0.1, 0.9, 0.7], [-0.3, 0.6, 1.8]]]);
        y, z, w = vector_outputs(3, 4), outputs(5), matrix_outputs(2, 2, 1)
    v = x[0]
    a = m[0]
    y[0] = v[1:]
    y[1] = v[:3] * v[1:4]
    y[2] = a[:, 1] * a[2, :]
    y[3] = a[0, :] + a[:, 0]
    z[0] = v[:3:2].sum() * v[0]
    z[1] = v[1:3].norm()
    w[0] = a[:2, 1:] @ a[1:, :2]
    z[2] = m[0][1, :].dot(a[:, 2])
    z[3] = a[::2, ::2].determinant()
integers_mixed_in: x, y = scalars([1.3, 0.45]), outputs(10); n = integers([3, -2, 5])
    m = n[0]
    y[0] = x[0] * (n[0] // 2) + (n[2] % 3) * x[1]
    y[1] = x[0] ** n[0] + x[0] ** n[1]
    y[2] = x[0] * (n[0] & 1) + x[1] * (n[2] | 2) - x[0] * (n[0] ^ n[2])
    y[3] = x[0] * (n[0] << 2) - x[1] * (n[2] >> 1) + x[0] * (~n[0])
    y[4] = n[0] / n[2] * x[0] + n[0] / x[0]
    y[5] = x[0] * (m > 2) + (m == 3) * x[1] + x[0] * (not m)
    m += 1
    y[6] = x[0] * m
    m *= n[2]
    m -= 1
    y[7] = m * x[0] / n[1] * x[1]
    y[8] = x[m % 2] * x[(m + 1) % 2] ** 2
    m <<= 1
    m |= 1
    m ^= 2
    m &= 13
    m >>= 1
    m //= 2
    m %= 3
    y[9] = x[0] * m + x[1] * ti.cast(m, ti.f64) * abs(n[1]) * max(m, n[0]) * min(m, n[1])
"""

ROWS = rows_of(PROGRAMS + SWEEPS)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.sweep] * (f"\n{n}" in SWEEPS)) for n in ROWS])
def test_against_differences(name):
    ROWS[name].is_right()


@pytest.mark.mostly_sweep("index_arithmetic_that_wraps", "a_local_array_as_a_stack", "hints_beside_tangents")
@pytest.mark.parametrize("name", ROWS)
def test_in_other_ways(name):
    ROWS[name].is_alike_in_other_ways()
