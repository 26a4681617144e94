"""Single singular vectors and eigenvectors where values are equal: no derivative exists, so J is NaN, and a warning says it."""

import numpy as np
import pytest
import taichi as ti
from captured_warnings import all_warnings
from kernel_texts import kernel_of

import taichi_ext.program as ir
from taichi_ext import DerivativeWarning, hessian, hvp, jacobian
from taichi_ext.record.twins import Decomposition, vectors_read

TIED, APART = np.eye(2) * 1.1, np.array([[1.5, 0.2], [0.1, 0.7]])
MODES = ("forward", "reverse")


def warned(call):
    """The result, and the source lines that warnings name."""
    with all_warnings() as seen:
        found = call()
    return found, [str(w.message).split("`")[1] for w in seen if issubclass(w.category, DerivativeWarning)]


@ti.func
def stretched(U, S, V):
    F = ti.Matrix.zero(ti.f64, 2, 2)
    for d in range(2):  # indices that are only known at run time
        F[d, d] = ti.log(S[d, d])
    return U @ F @ V.transpose()


@pytest.fixture(scope="module")
def fields(ti64):
    names = ("A", "whole", "left", "U", "S", "V", "again")
    return {**{name: ti.Matrix.field(2, 2, ti.f64, ()) for name in names}, "one": ti.field(ti.f64, ())}


@pytest.fixture(scope="module")
def kernels(fields):
    A, whole, left, one = (fields[name] for name in ("A", "whole", "left", "one"))
    kept = [fields[name] for name in "USV"]

    @ti.kernel
    def together():
        for _ in range(1):
            U, S, V = ti.svd(A[None])
            whole[None] = stretched(U, S, V)
            left[None] = U @ S @ U.transpose()
            one[None] = U[0, 0] * S[1, 1]

    @ti.kernel
    def split():
        for _ in range(1):
            U, S, V = ti.svd(A[None])
            kept[0][None] = U
            kept[1][None] = S
            kept[2][None] = V

    @ti.kernel
    def joined():
        for _ in range(1):
            fields["again"][None] = stretched(kept[0][None], kept[1][None], kept[2][None])

    pipeline = lambda: (split(), joined())
    return together, pipeline


@pytest.mark.sweep
@pytest.mark.parametrize("mode", MODES)
def test_a_single_vector_at_a_tie_is_nan_with_a_warning(fields, kernels, mode):
    together, _ = kernels
    outputs = [fields[name] for name in ("whole", "left", "one")]
    fields["A"].from_numpy(APART)
    apart, lines = warned(lambda: jacobian(together, fields["A"], outputs, mode=mode))
    assert all(np.isfinite(J).all() and np.abs(J).max() < 10 for J in apart)
    assert not lines
    fields["A"].from_numpy(TIED)
    (whole, left, one), lines = warned(lambda: jacobian(together, fields["A"], outputs, mode=mode))
    assert lines == ["one[None] = U[0, 0] * S[1, 1]"]
    assert np.isnan(one).all()
    np.testing.assert_allclose(whole.reshape(4, 4), np.eye(4) / 1.1 + _turned(np.log(1.1) / 1.1 - 1 / 1.1), atol=1e-6)
    assert np.isfinite(left).all()


def _turned(f):
    """What the derivative of ``U f(S) V^T`` at a multiple of 1 has more for antisymmetric directions."""
    half = np.zeros((4, 4))
    half[1:3, 1:3] = [[0.5, -0.5], [-0.5, 0.5]]
    return f * half


@pytest.mark.sweep
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1.1, 1.0])  # of which the logarithm, and an adjoint, is 0
def test_vectors_in_fields_between_kernels(fields, kernels, mode, size):
    _, pipeline = kernels
    fields["A"].from_numpy(APART)
    together = jacobian(kernels[0], fields["A"], fields["whole"])
    fields["A"].from_numpy(APART)
    J, lines = warned(lambda: jacobian(pipeline, fields["A"], fields["again"], mode=mode))
    np.testing.assert_allclose(J, together, atol=1e-9)
    assert not lines
    fields["A"].from_numpy(np.eye(2) * size)
    J, lines = warned(lambda: jacobian(pipeline, fields["A"], fields["again"], mode=mode))
    assert np.isnan(J).all()
    assert set(lines) == {"kept[0][None] = U", "kept[2][None] = V"}


@pytest.mark.sweep
def test_only_the_iteration_at_a_tie_is_nan(ti64):
    """Also where a value is added up in a loop; ties of opposite signs are ties of a function that is not odd."""
    n = 4
    A, first, kept = ti.Matrix.field(2, 2, ti.f64, n), ti.field(ti.f64, n), ti.Matrix.field(2, 2, ti.f64, n)

    @ti.kernel
    def each():
        for p in A:
            U, S, V = ti.svd(A[p])
            total = 0.0
            for d in ti.static(range(2)):
                total += U[d, 0] * V[1, 0] * S[d, d] ** 2
            first[p] = total
            kept[p] = U @ ti.Matrix([[ti.exp(S[0, 0]), 0.0], [0.0, ti.exp(S[1, 1])]]) @ V.transpose()

    A.from_numpy(np.stack([APART, TIED, np.diag([1.0, -1.0]), APART.T]))
    for mode in MODES:
        (J, K), lines = warned(lambda mode=mode: jacobian(each, A, [first, kept], mode=mode))
        assert np.isnan(J).any((2, 3)).tolist() == np.diag([False, True, True, False]).tolist()
        own = np.stack([K[p, :, :, p] for p in range(n)])
        assert np.isfinite(own[[0, 1, 3]]).all()
        assert np.abs(own[[0, 1, 3]]).max() < 100
        assert len(lines) >= 1


@pytest.mark.sweep
def test_vectors_of_sym_eig_that_taichi_gets_wrong(ti64):
    """They are said where an output is computed from them; the derivative is that of the true function."""
    A, y, z, kept = (
        ti.Matrix.field(3, 3, ti.f64, ()),
        *(ti.field(ti.f64, ()) for _ in range(2)),
        ti.Matrix.field(3, 3, ti.f64, ()),
    )

    @ti.kernel
    def squares():
        for _ in range(1):
            L, Q = ti.sym_eig(A[None])
            kept[None] = Q
            y[None] = L.norm_sqr()
            z[None] = (Q @ ti.Matrix([[L[0], 0.0, 0.0], [0.0, L[1], 0.0], [0.0, 0.0, L[2]]]) @ Q.transpose()).norm_sqr()

    apart = np.array([[1.0, 0.1, 0.2], [0.1, 2.0, 0.3], [0.2, 0.3, 4.0]])
    for mode in MODES:
        for M, is_wrong in ((np.diag([1.0, 1.2, 2.0]), True), (apart, False)):
            for output in (y, z):
                A.from_numpy(M)
                J, lines = warned(lambda output=output, mode=mode: jacobian(squares, A, output, mode=mode))
                np.testing.assert_allclose((J + J.T) / 2, 2 * M, atol=1e-6)
                assert len(lines) == (is_wrong and output is z)


def test_which_values_change_where_tied_vectors_are_turned():
    """Sums over both vectors of a pair do not; a branch that is never taken says nothing."""
    U, S, V, total, matrix = (
        ir.Local(name, ir.F64, shape) for name, shape in zip("USVtm", [(2, 2)] * 3 + [(), ()], strict=True)
    )
    U_at, S_at, V_at = (ir.Local(name, ir.F64, (2, 2)) for name in ("U_at", "S_at", "V_at"))
    call = ir.Call("svd_at", (), (U_at, S_at, V_at))
    out = ir.Container("out", ir.F64, 1)
    op = lambda name, *args: ir.Op(name, args, ir.F64)
    at = lambda local, *index: ir.Read(local, index)

    def entry(f):  # [0, 1] of U f(S) V^T
        return op("add", *(op("mul", op("mul", at(U, 0, k), f(at(S, k, k))), at(V, 1, k)) for k in range(2)))

    stored = lambda value: ir.Assign(ir.Load(out, (ir.Const(0, ir.I32),)), value)
    whole = entry(lambda s: op("exp", s))
    single = op("mul", at(U, 0, 0), at(S, 0, 0))
    linear = entry(lambda s: s)
    never = at(U, 1, 1)
    symmetric = op("add", op("exp", at(S, 0, 0)), op("exp", at(S, 1, 1)))
    branch = ir.If(op("lt", at(S, 0, 0), ir.Const(0.0, ir.F64)), (stored(never),))
    sums = ir.Declare(total, (single,)), ir.Update(ir.Read(total), "add", op("mul", at(U, 0, 1), at(S, 1, 1)))
    body = (
        call,
        stored(whole),
        stored(single),
        stored(linear),
        stored(symmetric),
        branch,
        *sums,
        stored(ir.Read(total)),
    )
    found = vectors_read(body, [Decomposition(call, (ir.Read(matrix),), (U, V), S)], [U, S, V, total])
    assert found[whole].tied == {(0, 1)}  # only those of opposite signs
    assert found[single].tied == {(0, 0), (0, 1)}
    assert found[linear].tied == frozenset()
    assert symmetric not in found
    assert never not in found
    assert found[body[-1].value].tied == {(0, 0), (0, 1)}


@pytest.mark.sweep
def test_products_with_the_hessian_of_a_pipeline(ti64):
    """Those of an energy of the values; single vectors make the product NaN, which is said."""
    A, values, single, energy = ti.Matrix.field(2, 2, ti.f64, ()), *(ti.field(ti.f64, ()) for _ in range(3))
    direction = np.array([[0.3, 0.2], [-0.5, 0.7]])

    @ti.kernel
    def decompose():
        for _ in range(1):
            U, S, _V = ti.svd(A[None])
            values[None] = ti.log(S[0, 0]) ** 2 + ti.log(S[1, 1]) ** 2
            single[None] = U[0, 0] * S[0, 0]

    take = kernel_of("energy[None] = source[None]", "source: ti.template()", energy=energy)
    pipeline = lambda source: (decompose(), take(source))
    for M, source in ((APART, values), (APART, single), (TIED, single)):
        A.from_numpy(M)
        found, lines = warned(lambda source=source: hvp(pipeline, A, direction, energy, args=(source,)))
        if M is APART:
            A.from_numpy(M)
            H = hessian(pipeline, A, energy, args=(source,))
            np.testing.assert_allclose(found, np.einsum("ijkl,kl->ij", H, direction), atol=1e-7)
            assert not lines
        else:
            assert np.isnan(found).all()
            assert lines == ["single[None] = U[0, 0] * S[0, 0]"]


def test_a_transpose_that_was_forgotten(ti64):
    """``ti.svd`` gives V, not its transpose. ``U S V`` is the same in turned vectors only where V is a reflection."""
    A, y, z = (ti.Matrix.field(2, 2, ti.f64, ()) for _ in range(3))

    @ti.kernel
    def forgotten():
        for _ in range(1):
            U, S, V = ti.svd(A[None])
            y[None] = U @ S @ V
            L, Q = ti.sym_eig(A[None])
            z[None] = Q @ ti.Matrix([[L[0], 0.0], [0.0, L[1]]]) @ Q

    A.from_numpy(TIED)
    J, lines = warned(lambda: jacobian(forgotten, A, [y, z]))
    assert np.isnan(J).any((1, 2, 3, 4)).all()
    assert lines == ["y[None] = U @ S @ V", "z[None] = Q @ ti.Matrix([[L[0], 0.0], [0.0, L[1]]]) @ Q"]
