"""Locals and fields with columns of their own: each read is by the version that the host has then, also by empty ones."""

import numpy as np
import pytest
from differences import integers, outputs, read, scalars, write
from kernel_texts import kernels_of
from test_sparse import random, require_equal

from taichi_ext import Jacobian, vjp

pytestmark = [pytest.mark.usefixtures("ti64"), pytest.mark.double_only("differences in float64")]
P, M, K = 90, 7, 4  # more parameters than rows of locals hold in any case


KERNELS = """
    constant_arm:
        for i in t:
            t[i] = w[i] * 2.0
        for i in y:
            s = x[i]
            for j in range(counts[i]):
                for n in range(counts[i]):
                    s += s + w[counts[j] % 3]
            s -= 1.0 if s < 0.5 else s * t[0]
            y[i] = s
    no_else:
        for i in t:
            t[i] = w[i] * x[i]
        for i in y:
            s = 0.0
            for j in range(K):
                s += w[nodes[i, j]]
            v = 0.0
            if s > 2.0:
                v = s * t[i]
            s -= v
            s += v * v
            y[i] = s
    middle_and_last:
        for i in y:
            s = 0.0
            for j in range(K):
                s += w[nodes[i, j]] * x[i]
            a = s
            s = 1.0
            if i > 3:
                s = 1.5
            b = s
            for j in range(K):
                s += x[nodes[i, j] % M]
            y[i] = s * a + b
            s = 0.1
            y[i] += s
    zero_coefficients:
        for i in y:
            s = x[i]
            for j in range(K):
                s += 0.0 * w[nodes[i, j]]
            u = s
            for j in range(K):
                s += w[nodes[i, j]]
            y[i] = s * u
    in_a_nested_loop:
        for i in y:
            total = 0.0
            for m in range(K):
                s = 0.0
                if m == 2:
                    s = 1.0
                for j in range(K):
                    s += w[nodes[i, j]] * x[m]
                if m == 3:
                    s = 2.0
                total += s * s
            y[i] = total
    carried_among_parameters:
        for i in y:
            s = x[i]
            for m in range(4):
                v = 0.0
                for j in range(K):
                    v += s * w[nodes[i, j]]
                if m % 2 == 0:
                    s = v
                else:
                    s = w[nodes[i, m]]
            y[i] = s
    carried_between_versions:
        for i in y:
            last = x[i]
            for _ in range(3):
                v = 0.0
                for j in range(K):
                    v += w[nodes[i, j]]
                a = v * last
                for j in range(K):
                    v += x[nodes[i, j] % M] * a
                last = v
            y[i] = last
    swapped:
        for i in y:
            a = 0.0
            for j in range(K):
                a += w[nodes[i, j]]
            b = 0.0
            for j in range(K):
                b += x[nodes[i, j] % M]
            if i % 2 == 0:
                a, b = b * w[i], a
            else:
                a = 1.0
            y[i] = a - b
    of_the_whole_kernel:
        s = 0.0
        for i in range(P):
            s += w[i] * x[i % M]
        v = 1.0 if s > 1e9 else s * w[0]
        for i in y:
            y[i] = s * v * x[i]
        if s > 0:
            s = 1.0
        for i in y:
            y[i] += s * x[i]
    fields:
        for i in t:
            t[i] = 1.0
        for i in t:
            t[i] = w[i] * x[i]
        for i in y:
            y[i] = 1.0 if i == 2 else t[i] * t[M - 1 - i]
        for i in t:
            if i % 2 == 0:
                t[i] = 0.0
        for i in y:
            y[i] += 2.0 if i > 4 else t[i] * t[M - 1 - i]
    read_after_the_stores:
        a = 0.0
        for n in range(1, 3):
            y[3] = a
            a = 1.3
        a -= y[2]
        y[5] = w[1] * x[2]
"""


def make_kernels(w, x, y, t, nodes, counts):
    """Kernels of w and x that store y, by name; the names say which version has no entries, or what is carried."""

    found = kernels_of(KERNELS, w=w, x=x, y=y, t=t, nodes=nodes, counts=counts, K=K, M=M, P=P)

    def pipeline():
        for name in ("no_else", "constant_arm", "fields"):
            found[name]()

    return {**found, "pipeline": pipeline}


class Versions:
    """The fields of these kernels."""

    def __init__(self):
        rng = np.random.default_rng(7)
        self.w, self.x, self.y, self.t = scalars(random(P)), scalars(random(M)), outputs(M), outputs(M)
        self.nodes = integers(rng.integers(0, P, (M, K)))
        self.kernels = make_kernels(self.w, self.x, self.y, self.t, self.nodes, integers(rng.integers(0, K, M)))


NAMES = [*make_kernels(*[None] * 6)]


@pytest.mark.mostly_sweep("carried_among_parameters")
@pytest.mark.parametrize("name", NAMES)
def test_sparse_rows_are_those_of_differences(name):
    v = Versions()
    plan = Jacobian(v.kernels[name], [v.w, v.x], v.y, format="csr")
    for _ in range(2):
        write(v.y, 0.2)
        require_equal([plan()], v.kernels[name], [v.w, v.x], [v.y])


@pytest.mark.mostly_sweep("read_after_the_stores")
@pytest.mark.parametrize("name", NAMES)
def test_cotangents_go_back_through_the_same_versions(name):
    v = Versions()
    dense = Jacobian(v.kernels[name], [v.w, v.x], v.y)()
    write(v.y, 0.0)
    write(v.t, 0.0)
    cotangent = random(M)
    found = vjp(v.kernels[name], [v.w, v.x], v.y, cotangent)
    for got, J in zip(found, dense, strict=True):
        np.testing.assert_allclose(got, cotangent @ J, rtol=1e-10, atol=1e-12)
    assert read(v.y).any()
