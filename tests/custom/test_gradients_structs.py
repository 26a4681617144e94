"""Rules of functions that take and return structs: in jacobian, and in Taichi's reverse mode."""

import numpy as np
import pytest
import taichi as ti
from differences import outputs, scalars
from kernel_texts import func_of, kernel_of
from numpy.testing import assert_allclose

from taichi_ext import InvalidArgumentError, InvalidRuleError, boundary_gradient, check_rule, jacobian

pytestmark = pytest.mark.usefixtures("ti64")

X = np.array([1.0, 2.0, -1.5])


@ti.dataclass
class Inner:
    m: ti.types.matrix(2, 2, ti.f64)
    n: ti.i32


@ti.dataclass
class Ball:
    mass: ti.f64
    velocity: ti.types.vector(2, ti.f64)
    inner: Inner

    @ti.func
    def speed(self):
        return self.velocity.norm()


def functions():
    @ti.func
    def made(a):
        return Ball(a, ti.Vector([a, 1.0]), Inner(ti.Matrix([[1.0, a], [0.0, 1.0]]), 3))

    @ti.func
    def energy(ball, scale):
        return scale * ball.mass * ball.velocity.norm_sqr() + ball.inner.m[0, 1] * ball.speed()

    @ti.func
    def moved(ball, dt):
        return Ball(ball.mass * dt, ball.velocity * dt, Inner(ball.inner.m, ball.inner.n + 1))

    return made, energy, moved


def test_entries_of_fields_of_structs():
    _, energy, _ = functions()
    balls, y = Ball.field(shape=3), outputs(3)
    balls.velocity.from_numpy(np.array([[3.0, 4.0], [1.0, 0.0], [0.0, 2.0]]))
    balls.mass.fill(2.0)

    @boundary_gradient(energy)
    def _(ball, d_ball):
        return 5.0 * d_ball.velocity.dot(ball.velocity) - d_ball.mass

    k = kernel_of("for i in balls: y[i] = energy(balls[i], 1.0)", balls=balls, y=y, energy=energy)
    by_mass, by_velocity = jacobian(k, [balls.mass, balls.velocity], y)
    assert_allclose(by_mass, -np.eye(3))
    expected = np.zeros((3, 3, 2))
    expected[range(3), range(3)] = 5 * balls.velocity.to_numpy()
    assert_allclose(by_velocity, expected)


def test_zeros_among_the_tangents():
    made, _, moved = functions()
    x, y = scalars(X), outputs(3)
    pair = func_of("return ti.Vector([a, a * a])", "a")

    @boundary_gradient(pair)
    def _(a, d_a):
        return ti.Vector([d_a, 0.0])

    @boundary_gradient(moved)
    def _(ball, d_ball):
        return Ball(mass=4.0 * d_ball.mass)

    text = "for i in x: ball = moved(made(x[i]), 2.0); y[i] = ball.mass + ball.velocity.sum() + pair(x[i]).sum()"
    k = kernel_of(text, x=x, moved=moved, made=made, y=y, pair=pair)
    assert_allclose(jacobian(k, x, y), np.diag([5.0, 5.0, 5.0]), rtol=1e-14)


@pytest.mark.parametrize("given", ["number", "other struct", "constant"])
def test_tangents_of_another_form_are_refused(given):
    made, _, moved = functions()
    x, y = scalars(X), outputs(3)

    @boundary_gradient(moved)
    def _(ball, d_ball):
        if ti.static(given == "number"):
            return d_ball.mass
        if ti.static(given == "other struct"):
            return d_ball.inner
        return Ball(1.0, d_ball.velocity, d_ball.inner)

    k = kernel_of("for i in x: y[i] = moved(made(x[i]), 2.0).mass", x=x, y=y, moved=moved, made=made)
    with pytest.raises(InvalidRuleError, match=r"does not depend" if given == "constant" else "returns a value of"):
        jacobian(k, x, y)


def test_check_rule_says_that_it_takes_no_structs():
    _, energy, moved = functions()

    @boundary_gradient(energy)
    def _(ball, d_ball):
        return d_ball.mass

    with pytest.raises(InvalidArgumentError, match="ball"):
        check_rule(energy, {"ball": {"mass": [1.0], "velocity": [[1.0, 2.0]]}, "scale": 1.0})
