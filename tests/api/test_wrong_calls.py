"""Wrong calls of every public function: one kind of error, which names the argument, what was given, and the fix."""

import importlib.util
import inspect
import re
import subprocess
import sys

import numpy as np
import pytest
from differences import outputs, scalars
from kernel_texts import kernel_of

import taichi_ext as te
from taichi_ext import InvalidArgumentError
from taichi_ext.api.inputs import types
from taichi_ext.errors import bound_arguments

pytestmark = pytest.mark.usefixtures("ti64")

IN_KERNELS = {  # tested where kernels are
    "add_edge", "coverage", "edge", "layers", "mark", "pixel", "ray_level", "replace_gradient",
    "segment_edge", "stop_gradient",
}  # fmt: skip
RESULTS = {"LeastSquaresIteration", "LeastSquaresResult", "NewtonIteration", "NewtonResult", "NormalEquations"}


@pytest.fixture
def things():
    x, y, e = scalars([0.3, 0.5, 0.7]), outputs(3), outputs(1)
    k = kernel_of("for i in x: y[i] += x[i] ** 2", x=x, y=y)
    energy = kernel_of("energy: for i in x: e[0] += x[i] ** 2", x=x, e=e)
    of_arrays = kernel_of("of_arrays(a: A, b: A): for i in a: b[i] = a[i] ** 2")
    scaled = kernel_of("scaled(s: float): for i in x: y[i] += s * x[i]", x=x, y=y)
    yield {"scaled": scaled, "k": k, "energy": energy, "of_arrays": of_arrays, "x": x, "y": y, "e": e, "v": np.ones(3)}
    assert not y.to_numpy().any() and not e.to_numpy().any(), "something ran"


# The call, the argument, what was given, the fix.
CALLS = [
    ("jacobian(k, x, y, argnums=0)", "argnums", "0", "params"),
    ("jacobian(k)", "params", "missing", "jacobian(kernel, params, outputs, args="),
    ("jacobian(k, 0)", "params", "0", "ti.field"),
    ("jacobian(k, x, y, v)", "jacobian", "array([1., 1., 1.])", "name the argument"),
    ("jacobian(k, x, params=x)", "params", ".field>", "give one"),
    ("jacobian(k, y, x)", "outputs", "x", "The order is jacobian(kernel, params, outputs)."),
    ("jacobian(scaled, 's', y, args=('a',))", "args", "str", "expected f64"),
    ("jacobian('k', x, y)", "kernel", "'k'", "@ti.kernel"),
    ("jacobian(k, x, y, format='banana')", "format", "'banana'", "'csr', 'csc'"),
    ("jacobian(k, x, y, tangent='dense')", "tangent", "'dense'", "Did you mean 'tangents'?"),
    ("value_and_jacobian(k, x, y, mode='back')", "mode", "'back'", "'forward', 'reverse'"),
    ("value_and_jacobian(k, x, y, chunk=3)", "chunk", "3", "chunk_size="),
    ("Jacobian(k, x, y, chunk_size=0)", "chunk_size", "0", "at least 1"),
    ("Jacobian(k, x, y, chunks=2)", "chunks", "2", "Did you mean 'chunk_size'?"),
    ("Jacobian(k, x, y)(arg=(1,))", "arg", "(1,)", "Did you mean 'args'?"),
    ("jvp(k, x, y, v)", "outputs", "array of shape (3,)", "The order is jvp(kernel, params, tangents, outputs)."),
    ("jvp(k, x, v, y, tangents=v)", "tangents", "array([1., 1., 1.])", "give one"),
    ("vjp(k, x, v, y)", "outputs", "array of shape (3,)", "The order is vjp(kernel, params, outputs, cotangents)."),
    ("vjp(k, x, y)", "cotangents", "missing", "vjp(kernel, params, outputs, cotangents"),
    ("hessian(energy, e, x)", "energy", "shape (3,)", "The order is hessian(kernel, params, energy)."),
    ("hessian(energy, x, e, project='clip', format='csr')", "project", "'clip'", "'clamp', 'abs', 'on_demand'"),
    ("Hessian(energy, x, e, projection='clamp')", "projection", "'clamp'", "Did you mean 'project'?"),
    ("value_gradient_and_hessian(energy, x, e, 3)", "value_gradient_and_hessian", "3", "name the argument"),
    ("hvp(energy, x, e, v)", "energy", "array of shape (3,)", "hvp(kernel, params, vectors, energy)."),
    ("value_and_gradient(energy, e, x)", "energy", "shape (3,)", "The order is value_and_gradient("),
    ("value_and_gradient(energy, x, e, out=v)", "out", "array([1., 1., 1.])", "max_memory="),
    ("least_squares(k, x, y, maxiter=3)", "maxiter", "3", "Use max_iterations=."),
    ("least_squares(k, x, y, max_iterations=3, max_nfev=3)", "max_iterations", "3", "one of the two"),
    ("least_squares(k, x, y, max_nfev=0)", "max_nfev", "0", "at least 1"),
    ("least_squares(k, x)", "residuals", "None", "name the fields it writes"),
    ("least_squares(k, x, e)", "residuals", "field e of shape (1,)", "The order is least_squares(kernel, params, residuals)"),
    ("normal_equations(k, x, [])", "residuals", "empty", "name at least one field"),
    ("least_squares(k, x, y, x0=v)", "x0", "array([1., 1., 1.])", "store the start in them"),
    ("least_squares(k, x, y, method='cgg')", "method", "'cgg'", "'lm', 'trf', 'dogbox'"),
    ("least_squares(k, x, y, loss='hubber')", "loss", "'hubber'", "'huber'"),
    ("least_squares(k, x, y, x_scale=v)", "x_scale", "SciPy", "method='trf'"),
    ("newton(energy, x, e, method='cgg')", "method", "'cgg'", "'splu', 'cholmod', 'cg'"),
    ("newton(energy, x, e, maxiter=5)", "maxiter", "5", "Use max_iterations=."),
    ("newton(energy, x, e, max_iterations=-1)", "max_iterations", "-1", "at least 0"),
    ("normal_equations(k, x, y, format='csc')", "format", "'csc'", "'csr'"),
    ("normal_equations(k, x, y, weight=v)", "weight", "array([1., 1., 1.])", "Did you mean 'weights'?"),
    ("linear_operator(k, x, y, format='csr')", "format", "'csr'", "chunk_size="),
    ("linear_operator(k, x, y) @ 'a'", "vector", "'a'", "real or complex numbers"),
    ("hessian_operator(energy, x)", "energy", "None", "name the fields it writes"),
    ("value_and_gradient(lambda: k(), x)", "energy", "None", "name the fields or arrays it fills"),
    ("hessian_operator(energy, e, x)", "energy", "shape (3,)", "hessian_operator(kernel, params, energy)."),
    ("map_jacobian(k, [(1,)], at=v)", "factory", "k", "expected a function"),
    ("map_jacobian('os.path:join', [(1,)], v)", "map_jacobian", "array([1., 1., 1.])", "at="),
    ("custom_root(k, k, x, y, linear='lu')", "linear", "'lu'", "'direct', 'cg', 'gmres'"),
    ("custom_root(k, 3, x, y)", "residual", "3", "custom_root(solve, residual, unknowns, residuals)."),
    ("implicit_jacobian(k, x, y, e)", "unknowns", "3 numbers", "as many of both"),
    ("implicit_jacobian(k, x, [x], y)", "params", "unknowns", "leave it out of one"),
    ("implicit_jacobian(k, x, y, y, lin='cg')", "lin", "'cg'", "Did you mean 'linear'?"),
    ("check_jacobian(k, x, y, step='a')", "step", "'a'", "positive number"),
    ("check_jacobian(k, x, y, eps=1e-3)", "eps", "0.001", "step="),
    ("check_hessian(energy, x, e, most_entries=0)", "most_entries", "0", "at least 1"),
    ("check_hessian(energy)", "params", "missing", "check_hessian(kernel, params, energy"),
    ("check_rule('nope', {})", "rule", "'nope'", "registered are"),
    ("check_rule('nope', {}, expect='boundary')", "expect", "'boundary'", "Did you mean 'expected'?"),
    ("plot_jacobian(v, output_axes='a')", "output_axes", "'a'", "a whole number of axes"),
    ("plot_jacobian(v, unit='m')", "unit", "'m'", "Did you mean 'units'?"),
    ("plot_sparsity(v, plan=3)", "plan", "3", "Jacobian(kernel, params, outputs)"),
    ("plot_fit(3)", "result", "3", "least_squares"),
    ("mesh_edges('a', 'b')", "triangles", "<U1", "shape (faces, 3)"),
    ("torch_function(of_arrays, 'q', 'b')", "inputs", "'q'", "'a', 'b'"),
    ("torch_function(of_arrays, 'a', 'b', shape={'b': 3})", "shape", "{'b': 3}", "Did you mean 'shapes'?"),
    ("Manifold(3, 1, (2,))", "retract", "3", "ti.func"),
    ("registry.remove('nope')", "rule", "'nope'", "registered are"),
    ("boundary_gradient(3)(print)", "rule", "print", "defined with def"),
]  # fmt: skip


@pytest.mark.parametrize("call,argument,given,fix", CALLS, ids=[c[0] for c in CALLS])
def test_a_wrong_call(things, call, argument, given, fix):
    if "plot" in call:
        pytest.importorskip("matplotlib", reason="plots need matplotlib")
    if "torch" in call:
        pytest.importorskip("torch", reason="torch_function needs torch")
    with pytest.raises(InvalidArgumentError) as error:
        eval(f"te.{call}", {**things, "te": te})
    message = str(error.value)
    assert re.search(rf"(?<![\w]){argument}\b", message), message
    assert given in message and fix in message, message


@pytest.mark.parametrize(
    "call", ["jacobian(k)", "jvp(k, x, y, sed=1.0)", "torch_function(of_arrays, 'a', 'b', reverse=True)"]
)
def test_what_fits_no_signature_is_a_type_error_too(things, call):
    """As for Python's own functions, so that a program may ask what a version takes."""
    with pytest.raises(TypeError) as error:
        eval(f"te.{call}", {**things, "te": te})
    assert isinstance(error.value, InvalidArgumentError)


def of_all_kinds(a, /, b, *rest, c, **more): ...


def of_two(a, *, c=1): ...


@pytest.mark.parametrize(
    "function,args,keywords,message",
    [
        (of_all_kinds, (1,), {"c": 2}, "b is missing: of_all_kinds is called as of_all_kinds(a, b, *rest, c=, **more)"),
        (of_all_kinds, (1, 2, 3), {"x": 1}, "c is missing"),
        (of_all_kinds, (1, 2), {"b": 3, "c": 4}, "b is given to of_all_kinds by position, and again as 3"),
        (of_two, (1, 2), {}, "2 is given to of_two by position; name the argument: of_two(a, c=)"),
        (of_two, (1,), {"d": 2}, "d=2 is no argument of of_two"),
    ],
)
def test_each_kind_of_parameter(function, args, keywords, message):
    with pytest.raises(InvalidArgumentError, match=re.escape(message)):
        bound_arguments(function, args, keywords)


def test_a_wrong_call_in_a_kernel():
    x, y = scalars([2.0]), outputs(4)
    k = kernel_of("for i in y: at = float(i); y[i] = te.coverage(x[0] - at, at=at, antialias=True)", y=y, te=te, x=x)
    wanted = (
        r"line \d+, in .*k:\n[\s\S]*antialias=True is no argument of coverage. It is called as coverage\(level, at=\)."
    )
    for call in (k, lambda: te.jacobian(k, x, y)):
        with pytest.raises(InvalidArgumentError, match=wanted):
            call()


def test_every_public_name_is_called():
    functions = {n for n in te.__all__ if callable(getattr(te, n)) and not _is_error(getattr(te, n))} | {"registry"}
    assert functions - IN_KERNELS - RESULTS == {re.match(r"\w+", call)[0] for call, *_ in CALLS}


def _is_error(thing):
    return inspect.isclass(thing) and issubclass(thing, (Exception, Warning))


@pytest.mark.parametrize(
    "functions,options",
    [
        (("jacobian", "value_and_jacobian"), types.AnyJacobian),
        (("hessian", "value_gradient_and_hessian"), types.AnyHessian),
        (("jvp", "vjp", "hvp"), types.AnyProduct),
    ],
)
def test_type_checkers_know_every_option(functions, options):
    known = set()
    for name in functions:
        parameters = inspect.signature(getattr(te, name)).parameters.values()
        known |= {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert known == options.__optional_keys__


def test_completion_shows_public_names_only():
    assert set(dir(te.manifolds)) == {"Manifold", "se3", "so3", "unit_quaternion", "unit_vector"}
    assert all(not name.startswith("_") and callable(getattr(te.registry, name)) for name in dir(te.registry))
    assert "disable" in dir(te.registry) and "rule_for" not in dir(te.registry)


def test_an_error_within_is_not_one_of_the_call(things):
    def solve():
        raise TypeError("of the user")

    root = te.custom_root(solve, things["k"], things["x"], things["y"])
    run = lambda: root()
    with pytest.raises(TypeError, match="of the user"):
        te.jacobian(run, things["x"], things["y"])


PROGRAM = """
import numpy as np
import taichi as ti
from taichi_ext import *
import taichi_ext

ti.init(arch=ti.cpu)
x, y, e = ti.field(ti.f32, 3), ti.field(ti.f32, 3), ti.field(ti.f32, ())
@ti.kernel
def k(): ...

J = jacobian(k, x, y, format="banana")  # 1
J = jacobian(k, x, y, mode="backward")  # 2
J = jacobian(k, x, y, tangents="spars")  # 3
J = jacobian(k, x, y, chunksize=4)  # 4
J = jacobian(k, x, y)
print(J.shpae)  # 5
H = hessian(k, x, e, format="csr", project="clip")  # 6
fit = least_squares(k, x, y, maxiter=10)  # 7
fit = least_squares(k, x, y, loss="hubber")  # 8
fit = newton(k, x, e, method="cgg")  # 9
print(least_squares(k, x, y).costs)  # 10
v = jvp(k, x, np.ones(3))
v = v.transpos()  # 11
plot_jacobian(J, unit="m")  # 12
right = hessian(k, [x, y], e, format="csr", project="clamp"), vjp(k, [x, y], y, np.ones(3))[0]
print(right[0][0], value_and_jacobian(k, "a", "b", args=(np.ones(3), 1.0), as_matrix=True)[1].T)
"""


@pytest.mark.sweep
def test_a_type_checker_finds_twelve_mistakes(tmp_path):
    if importlib.util.find_spec("pyright") is None:
        pytest.skip("pyright is not installed")
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    found = {int(n) for n in re.findall(r"program\.py:(\d+):\d+ - error", done.stdout)}
    lines = PROGRAM.splitlines()
    assert {lines[n - 1].rpartition("# ")[2] for n in found} == set(map(str, range(1, 13))), done.stdout
