"""Components of vector, matrix and struct fields, ``V.get_scalar_field(0)``: in kernels, as parameters and outputs.

A component is a part of its field, whichever of the two is used first.
"""

import gc

import numpy as np
import pytest
import taichi as ti
from differences import outputs, read, scalars, vector_outputs, vectors, write
from kernel_texts import kernel_of, squares
from numpy.testing import assert_allclose, assert_array_equal
from taichi_program import initialise

import taichi_ext as te
from taichi_ext import InvalidArgumentError, jacobian, value_and_jacobian

pytestmark = pytest.mark.usefixtures("ti64")

N = 3
START = np.array([[0.5, 1.5, -0.3], [1.1, 0.7, 0.4], [-0.6, 0.9, 1.2]])
OPTIONS = [{}, {"chunk_size": 2}, {"chunk_size": 4}, {"tangents": "sparse"}, {"tangents": "dense"}, {"format": "csr"}]


T = "a: ti.template(), b: ti.template()"
double = kernel_of("for i in ti.grouped(a): b[i] = 2.0 * a[i]", T)
multiply = kernel_of("for i in c: c[i] = a[i] * b[i]", f"{T}, c: ti.template()")


class Mixed:
    """Kernels that use a vector field and its components, each by itself and together."""

    def __init__(self, layout="vectors"):
        self.v, self.w = _placed(layout), _placed(layout)
        v, w = self.v, self.w
        first, last = v.get_scalar_field(0), v.get_scalar_field(2)

        # Taichi 1.7.4 aborts where a loop uses both a vector field and a component of it
        @ti.kernel
        def by_components():
            for i in range(N):
                w.get_scalar_field(1)[i] = first[i] * last[(i + 1) % N] + ti.sin(first[i])
                w.get_scalar_field(0)[i] = first[i] ** 2

        @ti.kernel
        def by_vectors():
            for i in range(N):
                w[i] += v[i] * v[(i + 1) % N].norm() + ti.Vector([w[i][1], w[i][0], v[i][1]])

        @ti.kernel
        def in_place():
            for i in v:
                v[i] = v[i] * v[i].norm()
            for i in range(N):
                last[i] *= first[i]

        @ti.kernel
        def at_run_time_indices():
            for i in range(N):
                for n in range(3):
                    w[i][(n + i) % 3] += v[i][n] * v[i][(n * n + 1) % 3]

        @ti.kernel
        def everything():
            for i in range(N):
                first[i] += last[i] * last[(i + 2) % N]
            for i in range(N):
                w[i] = v[i] * v[i].norm()
            for i in range(N):
                last[i] = w.get_scalar_field(1)[i] * first[i]

        self.kernels = {
            "by components": by_components,
            "by vectors": by_vectors,
            "in place": in_place,
            "at run-time indices": at_run_time_indices,
            "everything": everything,
            "components, vectors": lambda: (by_components(), by_vectors()),
            "vectors, components": lambda: (by_vectors(), by_components()),
        }
        fill(self.v, START)


def fill(field, values):
    """Set a field, entry by entry, which makes cells of sparse layouts active."""
    for i, n in np.ndindex(N, 3):
        field.get_scalar_field(n)[i] = values[i, n]


def values_of(field):
    return np.stack([field.get_scalar_field(n).to_numpy() for n in range(3)], axis=-1)


def _placed(layout):
    if layout == "vectors":
        return vectors(np.zeros((N, 3)))
    field = ti.Vector.field(3, ti.f64)
    components = [field.get_scalar_field(n) for n in range(3)]
    if layout == "components":
        for component in components:
            ti.root.dense(ti.i, N).place(component)
    elif layout == "interleaved":
        ti.root.dense(ti.i, N).place(components[0], components[2])
        ti.root.dense(ti.i, N).place(components[1])
    elif layout == "trees":
        for component in reversed(components):
            builder = ti.FieldsBuilder()
            builder.dense(ti.i, N).place(component)
            builder.finalize()
    else:
        ti.root.pointer(ti.i, N).place(components[0])
        ti.root.dense(ti.i, N).place(components[1])
        ti.root.bitmasked(ti.i, N).place(components[2])
    return field


class TestParametersAndOutputs:
    @pytest.mark.mostly_sweep("at run-time indices")
    @pytest.mark.parametrize("name", ["in place", "at run-time indices", "everything", "components, vectors"])
    def test_blocks_and_formats_agree(self, name):
        m = Mixed()
        out = m.v if name == "in place" else m.w
        write(m.w, 0.0)
        params = lambda: [m.v.get_scalar_field(2), m.v.get_scalar_field(0)]
        parts = lambda: [out.get_scalar_field(1), out, out.get_scalar_field(0)]
        whole = Mixed()
        target = whole.v if name == "in place" else whole.w
        J = jacobian(whole.kernels[name], whole.v, target)
        expected = [
            [J[(*where, slice(None), number)] for number in (2, 0)]
            for where in ((slice(None), 1), (slice(None), slice(None)), (slice(None), 0))
        ]
        for options in OPTIONS:
            write(m.v, START)
            write(m.w, 0.0)
            found = jacobian(m.kernels[name], params(), parts(), **options)
            for row, true_row in zip(found, expected, strict=True):
                for block, true_block in zip(row, true_row, strict=True):
                    block = block.toarray().reshape(true_block.shape) if "format" in options else block
                    assert_allclose(block, true_block, rtol=1e-12, atol=1e-13, err_msg=str(options))

    def test_two_objects_for_one_component(self):
        v, w = vectors(START), vector_outputs(3, N)
        expected = 2 * np.eye(N)
        plans = {id(_plan(double, v.get_scalar_field(1), w.get_scalar_field(1), v, w)) for _ in range(5)}
        for _ in range(3):
            args = v.get_scalar_field(1), w.get_scalar_field(1)
            assert_array_equal(jacobian(double, v.get_scalar_field(1), w.get_scalar_field(1), args=args), expected)
        assert len(plans) == 1

    def test_prepared_form_with_other_components(self):
        v, w = vectors(START), vector_outputs(3, N)
        norms = kernel_of("for i in target: target[i] = source[i] ** 2", "source: ti.template(), target: ti.template()")
        plan = te.Jacobian(norms, "source", "target", args=(v.get_scalar_field(0), w.get_scalar_field(1)))
        for a, b in ((0, 1), (2, 0), (1, 2), (0, 1)):
            J = plan(args=(v.get_scalar_field(a), w.get_scalar_field(b)))
            assert_allclose(J, np.diag(2 * START[:, a]))
            assert_allclose(read(w)[:, b], START[:, a] ** 2)

    def test_overlapping_parameters(self):
        v, w = vectors(START), vector_outputs(3, N)
        for params in ([v, v.get_scalar_field(1)], [v.get_scalar_field(1), v]):
            with pytest.raises(InvalidArgumentError, match="share a part of their memory"):
                jacobian(double, params, w, args=(v, w))
        with pytest.raises(InvalidArgumentError, match="given twice"):
            jacobian(double, [v.get_scalar_field(1), v.get_scalar_field(1)], w, args=(v, w))
        assert_array_equal(read(w), 0)

    def test_values_and_out(self):
        v, w = vectors(START), vector_outputs(3, N)
        second = w.get_scalar_field(1)
        value, J = value_and_jacobian(double, v, second, args=(v, w))
        assert_array_equal(value, 2 * START[:, 1])
        out = np.full((N, N, 3), np.nan)
        for _ in range(3):
            assert jacobian(double, v, second, args=(v, w), out=out) is out
            assert_array_equal(out, J)
        assert_array_equal(J.sum((0, 2)), np.full(N, 2.0))

    def test_a_component_whose_field_is_gone(self):
        component = ti.Vector.field(2, ti.f64, N).get_scalar_field(1)
        gc.collect()
        write(component, np.arange(3.0))
        out = outputs(N)
        assert_array_equal(jacobian(double, component, out, args=(component, out)), 2 * np.eye(N))


def _plan(kernel, param, output, v, w):
    from taichi_ext.api.inputs.options import Options
    from taichi_ext.api.jacobian import prepared_form

    args = v.get_scalar_field(1), w.get_scalar_field(1)
    return prepared_form(kernel, param, output, args, Options())[0]


class TestProducts:
    def test_least_squares(self):
        v, w = vectors(START), outputs(N)
        target = np.array([1.0, 2.0, 0.5])

        @ti.kernel
        def residual():
            for i in w:
                w[i] = v[i][1] ** 3 + v[i][0] - target_field[i]

        target_field = scalars(target)
        assert te.least_squares(residual, v.get_scalar_field(1), w).success
        assert_allclose(read(v)[:, 1], np.cbrt(target - START[:, 0]), rtol=1e-6)
        assert_array_equal(read(v)[:, [0, 2]], START[:, [0, 2]])


@pytest.mark.sweep
class TestLayouts:
    @pytest.fixture(autouse=True)
    def program(self):
        """A program of its own: each test places fields in trees of their own."""
        initialise(default_fp=ti.f64)
        yield
        initialise(default_fp=ti.f64)

    @pytest.mark.parametrize("layout", ["components", "interleaved", "trees", "sparse"])
    def test_placed_by_component(self, layout):
        m, reference = Mixed(layout), Mixed()
        for name in ("vectors, components", "everything"):
            fill(reference.v, START)
            write(reference.w, 0.0)
            J = jacobian(reference.kernels[name], reference.v, reference.w)
            for options in ({}, {"chunk_size": 2}, {"format": "csr"}):
                fill(m.v, START)
                fill(m.w, np.zeros((N, 3)))
                found = jacobian(m.kernels[name], m.v.get_scalar_field(2), m.w, **options)
                found = found.toarray() if "format" in options else found
                assert_allclose(found.reshape(N, 3, N), J[..., 2], rtol=1e-12, atol=1e-13, err_msg=str(options))
                assert_allclose(values_of(m.w), values_of(reference.w), rtol=1e-13)
                assert_allclose(values_of(m.v), values_of(reference.v), rtol=1e-13)


class TestPipelines:
    @pytest.mark.mostly_sweep("options2")
    @pytest.mark.parametrize("options", OPTIONS)
    def test_component_as_intermediate(self, options):
        x, y = scalars([0.4, -0.7, 1.2]), outputs(N)
        v = vector_outputs(2, N)

        def first():
            double(x, v.get_scalar_field(0))
            multiply(v.get_scalar_field(0), x, v.get_scalar_field(1))
            sum_up(v, y)

        sum_up = kernel_of("for i in a: b[i] = a[i][0] * a[i][1]", "a: ti.template(), b: ti.template()")
        J = jacobian(first, x, y, **options)
        J = J.toarray() if "format" in options else J
        assert_allclose(J, np.diag(12 * np.array([0.4, -0.7, 1.2]) ** 2))
        assert_allclose(jacobian(first, x, [v.get_scalar_field(1), v])[0], np.diag(4 * np.array([0.4, -0.7, 1.2])))

    @pytest.mark.chosen_only("counts the kernels of its own blocks", "--chunk-size", "--by-column", "--tangents")
    def test_a_kernel_that_is_launched_again_is_not_built_again(self, traces):
        """In a block that ends within the second component, which begins at another column in each."""
        v, w, y = vectors(np.arange(12.0).reshape(4, 3) / 10 + 0.3), vector_outputs(3, 4), outputs(4)
        scale = kernel_of("scale: for i in v: w[i] += v[i] * v[i].norm()", v=v, w=w)
        add_up = kernel_of("add_up: for i in y: y[i] += w[i].sum() * v[i][1]", v=v, w=w, y=y)

        def run():
            for kernel in (scale, scale, add_up, add_up):
                kernel()

        found = []
        for chunk_size in (None, 3):
            write(w, 0.0)
            write(y, 0.0)
            traces.clear()
            params = v.get_scalar_field(2), v.get_scalar_field(0)
            found.append(jacobian(run, params, y, chunk_size=chunk_size))
        assert traces == ["scale", "add_up"]  # for all blocks: the last one has as many columns, some of which stay 0
        assert_allclose(found[1], found[0], rtol=1e-12)

    def test_entries_of_two_axes_between_kernels(self):
        """Python reads one, computes with it, and stores to another."""
        x, u, y = scalars(np.arange(1.0, 7.0).reshape(2, 3)), outputs(2, 3), outputs(2, 3)
        square = kernel_of("for i, j in x: u[i, j] = x[i, j] ** 2", x=x, u=u)

        def run():
            square()
            u[0, 1] = u[1, 2] * u[1, 0]
            double(u, y)

        J = jacobian(run, x, y).reshape(6, 6)
        expected = np.diag(4 * np.arange(1.0, 7.0))
        expected[1] = [0, 0, 0, 4 * 4 * 36, 0, 4 * 6 * 16]
        assert_allclose(J, expected)

    def test_vectors_of_numbers_with_tangents_fill_a_field(self):
        x, u, w, y = scalars([0.5, 2.0]), outputs(2), vector_outputs(2, 3), outputs(3)
        square = squares(x, u)
        add = kernel_of("for i in y: y[i] = w[i][0] ** 2 + 3 * w[i][1]", y=y, w=w)
        run = lambda: (square(), w.fill([u[1], u[0]]), add())
        assert_allclose(jacobian(run, x, y), [[3.0, 2 * 4 * 4]] * 3)
