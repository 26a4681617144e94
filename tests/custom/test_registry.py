"""The registry of user rules: adding, listing, disabling and removing, and what kernels notice of it."""

import warnings

import numpy as np
import pytest
import taichi as ti
from differences import outputs, read, scalars, write
from kernel_texts import kernel_of
from many_threads import in_threads
from numpy.testing import assert_allclose
from reverse_mode import gradient, gradient_field

from taichi_ext import (
    DerivativeWarning,
    InvalidArgumentError,
    Jacobian,
    UnsupportedError,
    boundary_gradient,
    jacobian,
    mark,
    registry,
)

pytestmark = pytest.mark.usefixtures("ti64")


@ti.func
def product(a, b):
    return a * b


def doubled(a, b, d_a, auto):
    return 2.0 * auto


def tripled(auto):
    return 3.0 * auto


def squared(auto):
    return auto * auto


def product_kernel():
    """y = product(x0, x1): J is [0.8, 0.3], times what a rule makes of it."""
    x, y = scalars([0.3, 0.8]), outputs(1)
    k = kernel_of("y[0] = product(x[0], x[1])", y=y, product=product, x=x)
    return k, x, y


def factor(k, x, y):
    """What the enabled rules multiply the derivative with."""
    J = jacobian(k, x, y)
    assert J[0, 1] / J[0, 0] == pytest.approx(0.3 / 0.8)
    return pytest.approx(J[0, 0] / 0.8, rel=1e-12)


# --- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_an_empty_registry_says_so():
    assert repr(registry) == "no rules are registered"
    assert len(registry) == 0
    assert list(registry) == []


def test_it_prints_as_a_table():
    boundary_gradient(product)(doubled)
    boundary_gradient("silhouette", name="rim of the sphere")(tripled)
    registry.disable("rim of the sphere")
    header, first, second = str(registry).splitlines()
    assert header.split() == ["name", "target", "defined", "at", "enabled", "uses"]
    line = doubled.__code__.co_firstlineno
    assert first.split() == ["product", "product", f"{__file__}:{line}", "yes", "0"]
    assert second.startswith("rim of the sphere  silhouette  ")
    assert second.split()[-2:] == ["no", "0"]
    columns = [header.index(word) for word in ("target", "defined at", "enabled", "uses")]
    assert all(row[c - 1] == " " and row[c] != " " for row in (first, second) for c in columns)


def test_rules_are_found_by_name():
    boundary_gradient(product)(doubled)
    rule = registry["product"]
    assert rule.function is doubled
    assert rule.is_enabled
    assert rule.taken == {"a"}
    assert "product" in registry
    assert "nothing" not in registry
    assert [r.name for r in registry] == ["product"]
    assert len(registry) == 1

    @ti.func
    def inner(a):  # in a function: its name is short
        return a

    boundary_gradient(inner)(tripled)
    assert "inner" in registry


@pytest.mark.chosen_only("counts the kernels of one run", "--chunk-size")
def test_uses_counts_kernels():
    k, x, y = product_kernel()
    boundary_gradient(product)(doubled)
    jacobian(k, x, y)
    jacobian(k, x, y)
    assert registry["product"].uses == 1
    again = kernel_of("y[0] = product(x[0], x[1]) + product(x[1], x[0])", y=y, product=product, x=x)
    jacobian(again, x, y)
    assert registry["product"].uses == 2


# --- what can be registered -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parameter", ["c", "d_c", "d_auto", "d_out", "rest"])
def test_unknown_parameters(parameter):
    scope = {}
    exec(f"def rule(a, {'*' if parameter == 'rest' else ''}{parameter}): return a", scope)
    with pytest.raises(InvalidArgumentError, match=rf"'{parameter}'; it can take a, auto, b, d_a, d_b, out\.") as error:
        boundary_gradient(product)(scope["rule"])
    assert "'rule' for 'product'" in str(error.value)
    assert len(registry) == 0


def test_what_is_not_a_function_of_taichi():
    k, _, _ = product_kernel()
    for target in (k, lambda a: a, 3, None, ti.sin, np.sin):
        with pytest.raises(InvalidArgumentError, match=r"takes a @ti\.func or the name of a mark"):
            boundary_gradient(target)(doubled)
    assert len(registry) == 0


class CallableRule:
    def __call__(self, a, d_a):
        return d_a


@pytest.mark.parametrize("rule", [lambda a, d_a: d_a, CallableRule(), 3, len])
def test_what_is_not_a_rule(rule):
    with pytest.raises(InvalidArgumentError, match="function defined with def"):
        boundary_gradient(product)(rule)
    assert len(registry) == 0


def test_a_rule_that_is_a_taichi_function_already():
    k, x, y = product_kernel()
    boundary_gradient(product)(ti.func(doubled))
    assert factor(k, x, y) == 2


def test_the_same_name_twice():
    boundary_gradient(product)(doubled)
    with pytest.raises(
        InvalidArgumentError, match=r"'product' is already registered \(.*test_registry.py:\d+\)"
    ) as error:
        boundary_gradient(product)(tripled)
    assert "registry.remove('product')" in str(error.value)
    assert "name=" in str(error.value)
    assert registry["product"].function is doubled
    with pytest.raises(InvalidArgumentError, match="already registered"):
        boundary_gradient("mark", name="product")(tripled)


def test_unknown_names():
    boundary_gradient(product)(doubled)
    for use in (registry.remove, registry.enable, registry.disable, registry.__getitem__):
        with pytest.raises(InvalidArgumentError, match=r"No rule is named 'nothing'; registered are: 'product'\."):
            use("nothing")
    for context in (registry.disabled, registry.enabled):
        with pytest.raises(InvalidArgumentError, match="No rule is named"), context("product", "nothing"):
            pass
    assert registry["product"].is_enabled


def test_a_rule_for_a_mark_that_no_kernel_has():
    x, y = scalars([0.3, 0.8]), outputs(1)
    k = kernel_of('y[0] = mark("present", x[0] * x[1])', y=y, x=x)
    boundary_gradient("absent")(tripled)
    with pytest.warns(DerivativeWarning, match=r"'absent' \(.*test_registry.py:\d+\).*mark\('absent'.*'present'"):
        J = jacobian(k, x, y)
    assert_allclose(J, [[0.8, 0.3]], rtol=1e-14)
    with warnings.catch_warnings():  # once is enough
        warnings.simplefilter("error")
        jacobian(k, x, y)
    other_kernel = kernel_of("y[0] = x[0]", y=y, x=x)
    boundary_gradient("present")(doubled_mark)
    with warnings.catch_warnings():  # a mark that another kernel has is not misspelt
        warnings.simplefilter("error")
        jacobian(other_kernel, x, y)


def doubled_mark(auto):
    return 2.0 * auto


def test_a_misspelt_rule_is_noticed_in_a_kernel_that_was_built_before():
    x, y = scalars([0.3, 0.8]), outputs(1)
    k = kernel_of('y[0] = mark("rim", x[0] * x[1])', y=y, x=x)
    jacobian(k, x, y)
    boundary_gradient("rimm")(doubled_mark)
    with pytest.warns(DerivativeWarning, match=r"mark\('rimm'"):
        jacobian(k, x, y)


# --- enabling, disabling, removing ------------------------------------------------------------------------------------


@pytest.mark.cpu_only("J in reverse mode is one of the CPU")
def test_a_kernel_has_an_adjoint_again_after_a_rule_that_has_none():
    x, y = scalars([0.3, 0.8]), outputs(1)
    k = kernel_of('y[0] = mark("area", x[0] * x[1])', y=y, x=x)
    boundary_gradient("area")(squared)
    with pytest.raises(UnsupportedError, match="must be linear"):
        jacobian(k, x, y, mode="reverse")
    registry.remove("area")
    assert_allclose(jacobian(k, x, y, mode="reverse"), [[0.8, 0.3]])


def test_the_rule_registered_last_is_applied():
    k, x, y = product_kernel()
    boundary_gradient(product, name="two")(doubled)
    boundary_gradient(product, name="three")(tripled)
    assert factor(k, x, y) == 3
    registry.disable("three")
    assert factor(k, x, y) == 2
    registry.disable()
    assert factor(k, x, y) == 1
    registry.enable("two")
    assert factor(k, x, y) == 2
    registry.enable()
    assert factor(k, x, y) == 3
    registry.remove("three")
    assert factor(k, x, y) == 2
    registry.clear()
    assert factor(k, x, y) == 1


def test_contexts_put_back_what_was():
    k, x, y = product_kernel()
    boundary_gradient(product, name="two")(doubled)
    boundary_gradient(product, name="three")(tripled)
    with registry.disabled("three"):
        assert factor(k, x, y) == 2
        with registry.disabled():
            assert factor(k, x, y) == 1
            with registry.enabled("three"):
                assert factor(k, x, y) == 3
            assert factor(k, x, y) == 1
        assert factor(k, x, y) == 2
    assert factor(k, x, y) == 3
    registry.disable("three")
    with registry.enabled():
        assert factor(k, x, y) == 3
    assert factor(k, x, y) == 2
    with pytest.raises(ZeroDivisionError), registry.disabled():
        raise ZeroDivisionError
    assert factor(k, x, y) == 2
    with registry.disabled("two"):
        registry.remove("two")
    assert "two" not in registry


REVERSE = pytest.param("reverse", marks=pytest.mark.cpu_only("reverse mode of pipelines runs on the CPU"))


@pytest.mark.parametrize("mode", ["forward", REVERSE])
def test_contexts_in_a_pipeline(mode):
    """Each launch has the rules that are enabled then, also where it was made before in the same run."""
    x, y = scalars([0.3, 0.8]), outputs(1)
    add = kernel_of("y[0] += product(x[0], x[1])", y=y, product=product, x=x)

    def run():
        add()
        with registry.disabled():
            add()
        for _ in range(3):
            add()
        with registry.disabled():
            add()

    boundary_gradient(product)(doubled)
    for _ in range(2):
        assert_allclose(jacobian(run, x, y, mode=mode), [[10 * 0.8, 10 * 0.3]], rtol=1e-14)


def test_the_function_itself_is_never_changed():
    k, x, y = product_kernel()
    boundary_gradient(product)(doubled)
    k()
    assert read(y)[0] == pytest.approx(0.24, rel=1e-14)
    with registry.disabled():
        k()
        assert read(y)[0] == pytest.approx(0.24, rel=1e-14)
    registry.clear()
    k()
    assert read(y)[0] == pytest.approx(0.24, rel=1e-14)


# --- what is rebuilt --------------------------------------------------------------------------------------------------


@pytest.mark.chosen_only("counts the kernels of one run", "--chunk-size")
def test_a_mark_in_a_kernel_is_looked_up_again(traces):
    x, y = scalars([0.3, 0.8]), outputs(1)

    @ti.kernel
    def k():
        y[0] = mark("m", x[0] * x[1])

    plan = Jacobian(k, x, y)
    assert_allclose(plan(), [[0.8, 0.3]], rtol=1e-14)
    boundary_gradient("m")(doubled_mark)
    assert_allclose(plan(), [[1.6, 0.6]], rtol=1e-14)
    assert_allclose(plan(), [[1.6, 0.6]], rtol=1e-14)
    assert traces == ["k", "k"]


# --- threads ----------------------------------------------------------------------------------------------------------


def test_threads():
    """Many threads add, disable and remove rules of their own; nothing is lost, nothing fails, each sees its own."""
    boundary_gradient(product, name="kept")(doubled)

    def work(number):
        for n in range(20):
            name = f"{number}.{n}"
            boundary_gradient(f"mark {number}", name=name)(tripled)
            with registry.disabled(name):
                rule = registry.rule_for(f"mark {number}")
                assert rule is None or rule.name != name
            assert registry.rule_for(f"mark {number}").name == name
            with registry.disabled("kept"), registry.enabled("kept"):
                str(registry)
            if n % 2:
                registry.remove(name)
                registry.remove(f"{number}.{n - 1}")

    version = registry.version
    in_threads(work, 8)
    assert [rule.name for rule in registry] == ["kept"]
    assert registry["kept"].is_enabled  # contexts that overlap in time leave it as it was
    assert registry.version == version + 8 * 20 * 2  # each rule that was added, and each that was removed


def test_contexts_hold_in_their_thread():
    """While one thread has switched a rule off, another one applies it, in ``jacobian`` and in reverse mode."""
    k, x, y = product_kernel()
    p, q = gradient_field([0.3, 0.8]), gradient_field([0.0])
    reversed_product = kernel_of("q[0] = product(p[0], p[1])", q=q, product=product, p=p)

    def reverse():
        return gradient(reversed_product, p, q, np.ones(1))[0] / 0.8

    boundary_gradient(product)(doubled)
    found = []
    in_thread = lambda: in_threads(lambda _: found.append((factor(k, x, y), reverse())), 1)
    with registry.disabled():
        assert (factor(k, x, y), reverse()) == (1, pytest.approx(1))
        in_thread()
        assert (factor(k, x, y), reverse()) == (1, pytest.approx(1))
        in_thread()
    assert (factor(k, x, y), reverse()) == (2, pytest.approx(2))
    assert found == [(2, pytest.approx(2))] * 2


@pytest.mark.sweep
def test_a_change_in_another_thread_is_seen():
    k, x, y = product_kernel()
    assert factor(k, x, y) == 1
    in_threads(lambda _: boundary_gradient(product)(doubled), 1)
    assert factor(k, x, y) == 2
    write(x, np.array([0.3, 0.8]))
