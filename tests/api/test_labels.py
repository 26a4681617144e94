"""Messages and ``explain()`` call fields and arrays by the names that the user's code has for them."""

import gc
import re
import weakref

import numpy as np
import pytest
import taichi as ti
from captured_warnings import no_warnings
from devices import real
from differences import outputs, scalars
from kernel_texts import kernel_of

from taichi_ext import DerivativeWarning, InvalidArgumentError, Jacobian, check_jacobian, jacobian
from taichi_ext.labels import Labels

pytestmark = pytest.mark.usefixtures("ti64")


@ti.data_oriented
class Material:
    def __init__(self):
        self.stiffness = ti.field(ti.f64, shape=3)

    @ti.func
    def force(self, i):
        return self.stiffness[i]


@ti.data_oriented
class Solver:
    def __init__(self):
        self.v = ti.field(ti.f64, shape=3)
        self.unused = ti.field(ti.f64, shape=5)
        self.material = Material()
        self.levels = [ti.field(ti.f64, shape=3)]
        self.table = {"mass": ti.field(ti.f64, shape=3)}
        self.out = ti.field(ti.f64, shape=3)

    @ti.kernel
    def step(self):
        for i in self.out:
            self.out[i] += self.v[i] * self.material.force(i) + self.levels[0][i] * self.table["mass"][i]

    def fit(self):
        return jacobian(self.step, self.unused, self.out)


def refusal(*args, **options):
    """The message with which a call of ``jacobian`` is refused."""
    with pytest.raises(InvalidArgumentError) as caught:
        jacobian(*args, **options)
    return str(caught.value)


def test_attributes_of_objects():
    solver = Solver()
    assert refusal(solver.step, solver.unused, solver.out).startswith("params (field solver.unused of shape (5,))")
    assert refusal(solver.step, solver.v, solver.unused).startswith("outputs (field solver.unused of shape (5,))")
    with pytest.raises(InvalidArgumentError, match=r"params \(field solver\.unused of shape \(5,\)\)"):
        solver.fit()
    params = [solver.v, solver.material.stiffness, solver.levels[0], solver.table["mass"]]
    names = ("solver.v", "solver.material.stiffness", "solver.levels[0]", "solver.table['mass']")
    for of in (solver.step, lambda: solver.step()):
        report = str(check_jacobian(of, params, solver.out))
        for n, name in enumerate(names):
            assert f"params[{n}] (field {name} of shape (3,))" in report
        assert "outputs (field solver.out of shape (3,))" in report


def test_members_of_structs_and_components_of_vectors():
    particle = ti.types.struct(pos=ti.types.vector(2, ti.f64), mass=ti.f64).field(shape=3)
    velocity, y = ti.Vector.field(2, ti.f64, shape=3), outputs(3)
    k = kernel_of("for i in y: y[i] = particle[i].pos[0] * particle[i].mass", y=y, particle=particle)
    assert "params[1] (field particle.mass of shape (3,)) is given twice" in refusal(k, [particle.mass] * 2, y)
    assert refusal(k, velocity.get_scalar_field(1), y).startswith("params (field velocity.get_scalar_field(1) of")
    assert refusal(k, velocity, y).startswith("params (field velocity of shape (3,)) is not read")


def test_the_name_that_the_user_gave_to_taichi():
    x, y = scalars([0.3]), outputs(1)
    fields = [ti.field(ti.f64, shape=4, name="temperature"), ti.Vector.field(2, ti.f64, shape=4, name="wind")]
    k = kernel_of("y[0] = x[0] ** 2", y=y, x=x)
    assert refusal(k, fields[0], y).startswith("params (field temperature of shape (4,))")
    assert refusal(k, fields[1], y).startswith("params (field wind of shape (4,))")


def test_a_field_without_a_name_is_described():
    y = outputs(1)
    label = Labels(None).field(ti.field(ti.f32, shape=7))
    assert str(label) == "a field of shape (7,) and type f32"
    k = kernel_of("y[0] = f[0] ** 2", "f: ti.template()", y=y)
    assert "tmp" not in refusal(k, ti.field(ti.f64, shape=7), y, args=(scalars([0.3]),))


@pytest.mark.chosen_only("what it looks at is that of one run", "--chunk-size")
def test_explain_and_warnings():
    x, y, z = scalars([0.3, 0.5]), outputs(2), outputs(2)

    @ti.kernel
    def k():
        for i in x:
            y[i] = x[i] ** 2
        for i in z:
            z[i] = ti.floor(x[i])

    plan = Jacobian(k, x, [y, z])
    with pytest.warns(DerivativeWarning, match=r"outputs\[1\] \(field z of shape \(2,\)\) does not depend on"):
        plan()
    assert "tangents of the field y of shape (2,): 2 x 2" in plan.explain()
    assert not re.search(r"\btmp\d", plan.explain())


def test_arrays_of_a_pipeline():
    positions, speeds, other = real(np.ones(3)), real(np.zeros(3)), real(np.zeros(4))
    k = kernel_of("for i in a: b[i] = a[i] ** 2", "a: A1, b: A1")
    run = lambda: k(positions, speeds)
    assert refusal(run, other, speeds).startswith("params (array other of shape (4,)) is not read")
    assert refusal(run, positions, other).startswith("outputs (array other of shape (4,)) is not written")


@pytest.mark.taichi_only("Quadrants itself asks objects in kernels for attributes")
def test_properties_of_the_user_are_not_called():
    y, unused = outputs(1), outputs(4)

    class Scene:
        x = scalars([0.3])

        @property
        def unused(self):
            raise AssertionError("a message has run the user's code")

        def __getattr__(self, name):
            raise AssertionError("a message has run the user's code")

    scene = Scene()
    k = kernel_of("y[0] = scene.x[0] ** 2", y=y, scene=scene)
    assert refusal(k, unused, y).startswith("params (field unused of shape (4,))")


def test_names_are_looked_up_only_for_a_message(monkeypatch):
    x, y = scalars([0.3]), outputs(1)
    k = kernel_of("y[0] = x[0] ** 2", y=y, x=x)

    def fail(*_):
        raise AssertionError("a name was looked up")

    monkeypatch.setattr(Labels, "name", fail)
    with no_warnings():
        jacobian(k, x, y)
        jacobian(lambda: k(), x, y)
        Jacobian(k, x, y)()


@pytest.mark.sweep
def test_labels_keep_no_function_and_no_owner_alive():
    def make():
        solver = Solver()
        run = lambda: solver.step()
        labels = Labels(solver.step), Labels(run)
        assert labels[0].name(solver.v) == labels[1].name(solver.v) == "solver.v"
        return weakref.ref(run), labels

    run, labels = make()
    gc.collect()
    assert run() is None
    assert all(label.name(object()) == "" for label in labels)
