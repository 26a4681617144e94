"""Taichi's own examples by the numbers of their modules, as they are: their sources are read and not changed."""

import importlib.util
import itertools
from pathlib import Path

import numpy as np
import pytest
import taichi as ti
from differences import read
from numpy.testing import assert_allclose

from taichi_ext import jacobian, value_and_jacobian

pytestmark = pytest.mark.usefixtures("ti64")
numbers = itertools.count()


class Window:
    """A window that is closed at once."""

    ESCAPE, running = 0, False

    def __init__(self, *args, **kwargs):
        pass

    def get_event(self, *args):
        return False


def origin(name):
    return Path(importlib.util.find_spec(f"taichi.examples.simulation.{name}").origin)


def load(path, monkeypatch):
    """A program as a module, its window closed, in the Taichi program that runs."""
    spec = importlib.util.spec_from_file_location(f"{path.stem}_{next(numbers)}", path)
    module = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as patch:
        patch.setattr(ti, "init", lambda *args, **kwargs: None)
        patch.setattr(ti, "GUI", Window)
        spec.loader.exec_module(module)
    return module


def changed(name, changes, monkeypatch, tmp_path):
    """The same with another text."""
    text = origin(name).read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / f"{name}_{next(numbers)}.py"
    path.write_text(text)
    return load(path, monkeypatch)


def with_fields(name, fields, uses, monkeypatch, tmp_path):
    """The same with fields for numbers, each with its value, and the texts that read them."""
    start = next(line for line in origin(name).read_text().splitlines() if line.startswith("ti.init("))
    declared = "\n".join(f"{field} = ti.field(ti.f64, ())" for field in fields)
    module = changed(name, {start: f"{start}\n{declared}", **uses}, monkeypatch, tmp_path)
    for field, value in fields.items():
        getattr(module, field)[None] = value
    return module


@pytest.mark.sweep
def test_nbody(monkeypatch, tmp_path):
    uses = {"-G * m * m": "-big_g[None] * mass[None] * mass[None]", "force[i] / m": "force[i] / mass[None]"}
    m = load(origin("nbody"), monkeypatch)
    other = with_fields("nbody", {"big_g": 1.0, "mass": 1.0}, uses, monkeypatch, tmp_path)
    start = 0.5 + 0.3 * np.random.default_rng(1).standard_normal((m.N, 2))

    def J_of(module, params):
        def run():
            module.compute_force()
            module.update()

        module.pos.from_numpy(start.astype(np.float32))
        return jacobian(run, params, module.vel)

    G, mass = J_of(m, ["G", "m"])
    fields = J_of(other, [other.big_g, other.mass])
    for J, wanted in zip((G, mass), fields, strict=True):
        assert_allclose(J, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())
    assert_allclose(mass, G, rtol=1e-4, atol=1e-5 * np.abs(G).max())  # the velocity is proportional to G m


@pytest.mark.sweep
def test_mass_spring_game(monkeypatch, tmp_path):
    uses = {"* particle_mass": "* mass[None]", "/ particle_mass": "/ mass[None]", "v[i] * dt": "v[i] * h[None]"}
    uses |= {"v[i] += dt * f": "v[i] += h[None] * f", "-dt * drag": "-h[None] * drag"}
    m = load(origin("mass_spring_game"), monkeypatch)
    other = with_fields("mass_spring_game", {"mass": 1.0, "h": 1e-3}, uses, monkeypatch, tmp_path)

    def J_of(module, params):
        module.spring_Y[None], module.drag_damping[None], module.dashpot_damping[None] = 1000, 1, 100
        for place in ((0.3, 0.3), (0.3, 0.4), (0.4, 0.4)):
            module.new_particle(*place, 0)

        def run():
            for _ in range(10):
                module.substep()

        J = jacobian(run, [*params, module.drag_damping], module.x)
        return [block[:3] for block in J]

    for J, wanted in zip(J_of(m, ["particle_mass", "dt"]), J_of(other, [other.mass, other.h]), strict=True):
        assert np.abs(wanted).max() > 0
        assert_allclose(J, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.sweep
def test_mpm88(monkeypatch, tmp_path):
    """By two whole numbers, compared with the plain program in which the text gives them other values."""
    particles = 0.3 + 0.4 * np.random.default_rng(2).random((64, 2))

    def prepare(module):
        module.x.from_numpy(np.resize(particles, (module.n_particles, 2)))
        module.v.fill(-1.0)
        module.J.fill(0.98)
        return module

    m = prepare(load(origin("mpm88"), monkeypatch))
    value, by_number = value_and_jacobian(m.substep, ["E", "gravity"], m.v)
    for J, text, step in zip(by_number, ("E = 400", "gravity = 9.8"), (1.0, 0.1), strict=True):
        name, before = text.split(" = ")
        other = prepare(changed("mpm88", {text: f"{name} = {float(before) + step}"}, monkeypatch, tmp_path))
        other.substep()
        wanted = (read(other.v) - value) / step  # the step is linear in both
        assert np.abs(wanted).max() > 0
        assert_allclose(J, wanted, rtol=1e-6, atol=1e-8 * np.abs(wanted).max())
