"""Every callable of Taichi's is in a table: a release of Taichi that brings a new one is noticed here.

The functions of ``ti`` and ``ti.math`` are listed in test_language_functions.py.
"""

import inspect
import operator

import pytest
import taichi as ti

from taichi_ext.record.effects import WITHOUT_TANGENTS

pytestmark = pytest.mark.usefixtures("ti64")

THREADS = ("simt.block", "simt.grid", "simt.subgroup", "simt.warp")  # of a GPU: they carry no tangents
ON_THE_HOST = {  # called between kernels
    *("algorithms.parallel_sort", "linalg.MatrixFreeBICGSTAB", "linalg.MatrixFreeCG", "linalg.sqrt"),
    *("sparse.grid", "sparse.usage", "ad.clear_all_gradients", "ad.grad_for", "ad.grad_replaced", "ad.no_grad"),
    *("types.argpack", "types.matrix", "types.ref", "types.struct", "types.vector"),
    *("types.is_integral", "types.is_real", "types.is_signed", "types.is_tensor"),
}
OF_VALUES = {  # of matrices, by a value or by the class; those of values are tested in test_language_vectors.py
    *("all", "any", "cast", "cross", "determinant", "dot", "fill", "get_shape", "inverse", "max", "min", "norm"),
    *("norm_inv", "norm_sqr", "normalized", "outer_product", "sum", "trace", "transpose"),
}
STATIC = {"cols", "diag", "identity", "one", "rows", "unit", "zero"}
COPIES = {"copy_from", "from_numpy", "from_paddle", "from_torch", "to_numpy", "to_paddle", "to_torch"}  # on the host
OF_FIELDS = {"fill", "get_member_field", "get_scalar_field", "parent"}  # fill: test_language_whole_fields.py
OF_NODES = {  # on the host, except parent
    *("bitmasked", "deactivate_all", "dense", "dynamic", "lazy_dual", "lazy_grad", "parent", "place", "pointer"),
    "quant_array",
}


def functions_of(name):
    """The functions of a module of Taichi's, without types."""
    module = operator.attrgetter(name)(ti)
    found = {n: f for n, f in vars(module).items() if not n.startswith("_") and callable(f)}
    return {n: f for n, f in found.items() if not inspect.isclass(f) and not isinstance(f, type(ti.f32))}


def methods_of(kind):
    names = (name for name in dir(kind) if not name.startswith("_"))
    return {name for name in names if callable(getattr(kind, name))}


@pytest.mark.taichi_only("a table of the names of Taichi")
def test_functions_of_modules():
    found = {f"{m}.{f}" for m in ("algorithms", "linalg", "sparse", "types", "ad") for f in functions_of(m)}
    assert found == ON_THE_HOST


@pytest.mark.taichi_only("a table of the names of Taichi")
@pytest.mark.parametrize("name", THREADS)
def test_functions_of_threads(name):
    own = [f for f in functions_of(name).values() if f.__module__ == f"taichi.lang.{name}"]
    assert own
    assert WITHOUT_TANGENTS.issuperset(own)


@pytest.mark.taichi_only("a table of the names of Taichi")
def test_methods():
    assert methods_of(ti.Matrix) == OF_VALUES | STATIC | {"field", "ndarray", "to_list", "to_numpy"}
    assert methods_of(ti.Vector) == methods_of(ti.Matrix)
    assert methods_of(ti.Struct) == {"field", "to_dict"}
    fields = (ti.Field, ti.ScalarField, ti.MatrixField, ti.StructField)
    assert set.union(*map(methods_of, fields)) == OF_FIELDS | COPIES
    assert methods_of(ti.SNode) == OF_NODES
