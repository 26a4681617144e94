"""What was prepared is found by owner and function, leaves nothing on the user's objects, and keeps none alive."""

import copy
import functools
import gc
import pickle
import types
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import taichi as ti
from differences import outputs, scalars
from kernel_texts import kernel_of
from many_threads import in_threads
from numpy.testing import assert_allclose
from taichi_program import initialise

import taichi_ext as te
from taichi_ext import check_jacobian, jacobian, jvp, least_squares, linear_operator, value_and_jacobian, vjp
from taichi_ext.api.plans.plan import Plan
from taichi_ext.api.plans.preparations import EVERY

pytestmark = pytest.mark.usefixtures("ti64")


@pytest.fixture
def fields(ti64):
    return scalars([2.0] * 3), outputs(3)


@pytest.fixture
def scaled(fields):
    """``scaled(s)`` computes ``y = s x^2`` at x = 2, so that J is ``4 s`` on the diagonal."""
    x, y = fields
    k = kernel_of("for i in x: y[i] = s * x[i] ** 2", "s: ti.f64", x=x, y=y)
    return k


class Simulation:
    """A pipeline as a method; its kernel is not picklable and therefore a class attribute."""

    kernel = None

    def __init__(self, dt):
        self.dt = dt

    def run(self):
        Simulation.kernel(self.dt)

    def __call__(self):
        self.run()

    @classmethod
    def of_class(cls):
        Simulation.kernel(3.0)

    @staticmethod
    def of_none():
        Simulation.kernel(4.0)


@pytest.fixture
def simulation(scaled, monkeypatch):
    monkeypatch.setattr(Simulation, "kernel", staticmethod(scaled))
    return Simulation


class TestOwners:
    """Each owner gets the Jacobian of its own function."""

    def test_copies(self, simulation, fields):
        call = lambda function, x, y: jvp(function, x, np.ones(3), y)
        first = simulation(1.0)
        for made in (copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))):
            assert_allclose(call(first.run, *fields), 4.0)
            second = made(first)
            second.dt = 7.0
            assert_allclose(call(second.run, *fields), 28.0)
            assert_allclose(call(second, *fields), 28.0)
            assert_allclose(call(first.run, *fields), 4.0)

    @pytest.mark.sweep
    def test_kinds_of_functions(self, simulation, fields, scaled):
        class Meta(type):
            def of_meta(cls):
                scaled(5.0)

        class Class(metaclass=Meta):
            pass

        kinds = {
            1.0: simulation(1.0).run,
            2.0: simulation(2.0),
            3.0: simulation.of_class,
            4.0: simulation.of_none,
            5.0: Class.of_meta,
            6.0: functools.partial(scaled, 6.0),
            7.0: lambda: scaled(7.0),
            8.0: types.MethodType(lambda scale: scaled(scale), 8.0),  # of an owner without weak references
            9.0: functools.lru_cache(lambda: scaled(9.0)).__wrapped__,
        }
        for _ in range(2):
            for scale, function in kinds.items():
                assert_allclose(jacobian(function, *fields).diagonal(), 4 * scale, err_msg=str(scale))

    def test_objects_that_share_their_attributes(self, simulation, fields, scaled):
        class Borg:
            def __init__(self, shared, factor):
                object.__setattr__(self, "__dict__", shared)
                self.factors[id(self)] = factor

            def run(self):
                scaled(self.factors[id(self)])

        shared = {"factors": {}}
        objects = [Borg(shared, 1.0), Borg(shared, 2.0)]
        for factor, borg in zip((1.0, 2.0, 1.0), (*objects, objects[0]), strict=True):
            assert_allclose(jacobian(borg.run, *fields).diagonal(), 4 * factor)

    @pytest.mark.parametrize("has_hash", [True, False])
    def test_objects_that_are_equal(self, has_hash, fields, scaled):
        class Equal:
            def __init__(self, factor):
                self.factor = factor

            def __eq__(self, other):
                return True

            __hash__ = (lambda self: 1) if has_hash else None

            def run(self):
                scaled(self.factor)

            def __call__(self):
                scaled(self.factor)

        one, two = Equal(1.0), Equal(2.0)
        for _ in range(2):
            for function, factor in ((one.run, 1.0), (two.run, 2.0), (one, 1.0), (two, 2.0)):
                assert_allclose(jacobian(function, *fields).diagonal(), 4 * factor)

    def test_a_method_that_is_replaced(self, simulation, fields, scaled, monkeypatch):
        owner = simulation(1.0)
        assert_allclose(jacobian(owner.run, *fields).diagonal(), 4.0)
        monkeypatch.setattr(Simulation, "run", lambda self: scaled(10.0 * self.dt))
        assert_allclose(jacobian(owner.run, *fields).diagonal(), 40.0)

    def test_a_function_with_the_attributes_of_a_kernel_is_no_kernel(self, fields, scaled):
        @functools.wraps(scaled)
        def tripled(s):
            scaled(3.0 * s)

        part = functools.update_wrapper(functools.partial(scaled, 5.0), scaled)
        assert_allclose(jacobian(tripled, *fields, args=(1.0,)).diagonal(), 12.0)
        assert_allclose(jacobian(part, *fields).diagonal(), 20.0)
        assert_allclose(jacobian(scaled, *fields, args=(1.0,)).diagonal(), 4.0)


class TestNothingIsLeft:
    def test_on_objects_classes_functions_and_kernels(self, simulation, fields, scaled):
        x, y = fields

        @ti.data_oriented
        class Model:
            @ti.kernel
            def k(self, a: ti.types.ndarray()):
                for i in x:
                    y[i] = a[i] * x[i]

            def run(self):
                self.k(np.ones(3))

        class Holder:
            def __init__(self):
                self.array = ti.ndarray(ti.f64, 3)

        model, owner, part, holder = Model(), simulation(1.0), functools.partial(scaled, 2.0), Holder()
        calls = [(model.k, (np.ones(3),)), (model.run, ()), (owner.run, ()), (owner, ()), (owner.of_class, ())]
        calls += [(part, ()), (scaled, (1.0,)), (simulation.of_none, ())]
        objects = [model, Model, owner, simulation, part, scaled, scaled._primal, x, y, holder.array]
        objects += [Model.__dict__["k"], Model.__dict__["k"]._primal, simulation.of_none]
        for function, args in calls:  # the attributes that a plain run leaves are Taichi's own
            function(*args)
        scaled(1.0)
        before = [set(vars(obj)) for obj in objects]
        for function, args in calls:
            for format in (None, "csr"):
                jacobian(function, x, y, args=args, format=format)
            linear_operator(function, x, y, args=args) @ np.ones(3)
            check_jacobian(function, x, y, args=args)
        assert [set(vars(obj)) - names for obj, names in zip(objects, before, strict=True)] == [set()] * len(objects)


def use_forms(owner, x, y):
    """Dense and sparse forms, the shortest ways to repeat a launch among them, and products."""
    for _ in range(3):
        jacobian(owner, x, y)
        jacobian(owner, x, y, format="csr")
    jvp(owner, x, np.ones(1), y)
    vjp(owner, x, y, np.ones(1))
    linear_operator(owner, x, y) @ np.ones(1)


class TestLifetime:
    @pytest.mark.sweep
    def test_objects_go_without_a_collection_of_garbage(self):
        k = kernel_of("for i in x: y[i] = s * x[i]", "x: ti.template(), y: ti.template(), s: ti.f64")

        class Owner:
            def __init__(self):
                self.x, self.y, self.dt = ti.field(ti.f64, 2), ti.field(ti.f64, 2), 0.5

            def run(self):
                k(self.x, self.y, self.dt)

            def __call__(self):
                self.run()

        owner = Owner()
        reference = weakref.ref(owner)
        gc.disable()
        try:
            for function in (owner.run, owner):
                jacobian(function, owner.x, owner.y)
                jacobian(function, owner.x, owner.y, format="csr")
            del function, owner
            assert reference() is None
        finally:
            gc.enable()

    @pytest.mark.mostly_sweep("kernel method")
    @pytest.mark.parametrize("kind", ["method", "object", "lambda", "partial", "classmethod", "kernel method"])
    def test_each_kind_of_owner_goes(self, kind):
        x, y = scalars([0.3]), outputs(1)
        k = kernel_of("y[0] = s * x[0] ** 2", "s: ti.f64", y=y, x=x)

        def made():
            @ti.data_oriented
            class Owner:
                def run(self):
                    k(1.0)

                __call__ = run

                @classmethod
                def of_class(cls):
                    k(1.0)

                @ti.kernel
                def short_lived(self):
                    y[0] = x[0] ** 2

            owner = Owner()
            functions = {
                "method": owner.run,
                "object": owner,
                "lambda": lambda: k(1.0),
                "partial": functools.partial(k, 1.0),
                "classmethod": Owner.of_class,
                "kernel method": owner.short_lived,
            }
            function = functions[kind]
            use_forms(function, x, y)
            return weakref.ref(function if kind in ("lambda", "partial") else owner)

        reference = made()
        gc.collect()
        assert reference() is None

    def test_a_function_that_deletes_its_owner_while_it_runs(self, fields, simulation):
        """Until Python 3.12, a frame of which somebody has read the variables keeps them."""
        owner = simulation(2.0)
        reference = weakref.ref(owner)
        value_and_jacobian(owner.run, *fields)
        del owner
        gc.collect()
        assert reference() is None

        owner = simulation(2.0)
        mine = locals()
        value_and_jacobian(owner.run, *fields)
        assert mine["owner"] is owner

    @pytest.mark.sweep
    def test_a_number_of_its_owner_does_not_keep_it(self):
        x, y = scalars([0.3]), outputs(1)

        @ti.data_oriented
        class Model:
            def __init__(self, dt):
                self.dt = dt

            @ti.kernel
            def k(self):
                y[0] = self.dt * x[0]

        def made(dt):
            model = Model(dt)
            by_x, by_dt = jacobian(model.k, [x, "self.dt"], y)
            assert_allclose([by_x.item(), by_dt.item()], [dt, 0.3])
            return weakref.ref(model)

        references = [made(2.0), made(3.0)]
        gc.collect()
        assert [reference() for reference in references] == [None, None]

    def test_a_function_that_goes_takes_its_form_along(self, fields, scaled, traces):
        class Owner:
            pass

        owner = Owner()
        for factor in (1.0, 2.0, 3.0):  # at one address, as a rule
            method = types.MethodType(lambda self, factor=factor: scaled(factor), owner)
            assert_allclose(jacobian(method, *fields).diagonal(), 4 * factor)
            del method
        assert traces == ["k"] * 3

    @pytest.mark.sweep
    def test_a_program_that_ends_takes_all_forms_along(self):
        others: set[int] = set()  # of other tests, which may keep theirs

        def kept():
            gc.collect()
            return [obj for obj in gc.get_objects() if type(obj) is Plan and id(obj) not in others]

        def made():
            k = kernel_of("for i in x: y[i] = 3.0 * x[i]", "x: ti.template(), y: ti.template()")
            return k

        initialise(default_fp=ti.f64)
        held = kept()
        others.update(map(id, held))
        kernels = [made() for _ in range(3)]
        for _ in range(3):
            x, y = ti.field(ti.f64, 2), ti.field(ti.f64, 2)
            for n, k in enumerate(kernels):
                assert_allclose(jacobian(k, x, y, args=(x, y)), 3.0 * np.eye(2))
                assert len(kept()) == n + 1  # those of other kernels, of the last program, are gone
            initialise(default_fp=ti.f64)

    def test_a_dict_of_params_that_changes(self):
        x, z, y = scalars([0.3]), scalars([0.5]), outputs(1)
        k = kernel_of("y[0] = x[0] + 2.0 * z[0]", y=y, x=x, z=z)
        params = {"x": x, "z": z}
        plan = te.Jacobian(k, params, y)
        jacobian(k, params, y)
        params.clear()
        params.update(z=z, x=x, more=y)
        for J in (jacobian(k, {"x": x, "z": z}, y), plan()):
            assert {name: block.item() for name, block in J.items()} == {"x": 1.0, "z": 2.0}


def test_threads_share_one_form(fields, simulation, traces):
    owner = simulation(2.0)

    def work(_):
        for _ in range(5):
            assert_allclose(jacobian(owner.run, *fields).diagonal(), 8.0)

    in_threads(work)
    assert traces == ["k"]


class TestSolvers:
    """Solvers, operators and checks find what was prepared before."""

    @pytest.mark.mostly_sweep(every=2)
    @pytest.mark.chosen_only("counts the kernels of one run", "--chunk-size")
    @pytest.mark.parametrize(
        "call",
        [
            lambda f, x, y: least_squares(f, x, y, max_iterations=0),
            lambda f, x, y: least_squares(f, x, y, max_iterations=0, format="csr"),
            lambda f, x, y: linear_operator(f, x, y) @ np.ones(3),
            lambda f, x, y: linear_operator(f, x, y).T @ np.ones(3),
            lambda f, x, y: linear_operator(f, x, y).materialize(),
            lambda f, x, y: check_jacobian(f, x, y),
            lambda f, x, y: te.normal_equations(f, x, y),
            lambda f, x, y: vjp(f, x, y, np.ones(3)),
        ],
    )
    @pytest.mark.parametrize("is_pipeline", [False, True])
    def test_nothing_is_built_again(self, call, is_pipeline, fields, scaled, traces):
        x, y = fields
        k = kernel_of("for i in x: y[i] = x[i] ** 2 - 1.0", x=x, y=y)
        function = (lambda: k()) if is_pipeline else k
        call(function, x, y)
        built = len(traces)
        assert built
        for _ in range(3):
            x.fill(2.0)
            call(function, x, y)
        x.fill(2.0)
        assert len(traces) == built


class TestManyPreparations:
    @pytest.mark.parametrize("is_in_pool", [False, True])
    def test_the_warning_names_the_call_or_a_function_that_a_pool_calls(self, is_in_pool, scaled, fields):
        message = f"was prepared {EVERY} times.*once"
        with ThreadPoolExecutor(1) as pool, pytest.warns(te.DerivativeWarning, match=message) as caught:
            for _ in range(EVERY):
                made = lambda: scaled(2.0)
                call = functools.partial(jacobian, made, *fields)
                pool.submit(call).result() if is_in_pool else call()
        first = made.__code__.co_firstlineno
        assert [(w.filename, w.lineno) for w in caught] == [(__file__, first if is_in_pool else first + 2)]
