"""Options of the checks and of ``torch_function``: wrong values are refused before anything runs."""

import numpy as np
import pytest
import taichi as ti
from differences import outputs, scalars
from kernel_texts import func_of, kernel_of

import taichi_ext as te
from taichi_ext import InvalidArgumentError, Jacobian, check_jacobian, check_rule, registry, torch_function

pytestmark = pytest.mark.usefixtures("ti64")

NO_NUMBERS = ["a", -1, np.nan, np.inf, True, [1], 1j, np.ones(2)]


@pytest.fixture
def square():
    x, y = scalars([0.3, 0.5]), outputs(2)
    k = kernel_of("for i in x: y[i] += x[i] ** 2", x=x, y=y)
    yield k, x, y
    assert not y.to_numpy().any(), "something ran"


@pytest.fixture
def clamped():
    clamped = func_of("clamped(a): return ti.max(a, 0.0)")

    @te.boundary_gradient(clamped)
    def _(a, d_a, auto):
        return auto

    yield "clamped"
    registry.remove("clamped")


@pytest.mark.parametrize("value", NO_NUMBERS)
@pytest.mark.parametrize("name", ["step", "rtol", "atol"])
def test_numbers_of_check_jacobian(square, name, value):
    with pytest.raises(InvalidArgumentError, match=f"^{name} is .*; expected a "):
        check_jacobian(*square, **{name: value})


def test_zero_as_a_number_of_check_jacobian(square):
    with pytest.raises(InvalidArgumentError, match="step is 0; expected a positive number"):
        check_jacobian(*square, step=0)
    assert check_jacobian(*square, rtol=0, atol=0).rtol == 0


@pytest.mark.parametrize("value", ["a", -1, 0, 2.5, True])
def test_number_of_entries_of_check_jacobian(square, value):
    with pytest.raises(InvalidArgumentError, match="most_entries is .*; expected a whole number of at least 1"):
        check_jacobian(*square, most_entries=value)
    assert check_jacobian(*square, most_entries=np.int64(1)).blocks[0].compared == 2


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_tolerance_of_check_rule(clamped, value):
    with pytest.raises(InvalidArgumentError, match="^rtol is .*; expected a number of at least 0"):
        check_rule(clamped, {"a": [1.0]}, rtol=value)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (None, "inputs is None; expected a dict"),
        ([1.0], "inputs is .* expected a dict"),
        ({"a": [1, 2]}, "inputs has no real numbers"),
        ({"a": ti.f64}, "inputs has no real numbers"),
        ({"a": [[1.0], [1.0, 2.0]]}, r"inputs\['a'\] has rows of different lengths"),
        ({"a": []}, r"inputs\['a'\] is empty"),
        ({"a": [1j]}, r"inputs\['a'\] has complex numbers"),
        ({"a": np.array(["s"])}, r"inputs\['a'\] has elements of type <U1"),
        ({"a": np.ma.ones(2)}, r"inputs\['a'\] is a masked array"),
    ],
)
def test_inputs_of_check_rule(clamped, inputs, words):
    with pytest.raises(InvalidArgumentError, match=words):
        check_rule(clamped, inputs)


def test_options_of_torch_function():
    pytest.importorskip("torch")
    n = ti.field(ti.i32, shape=2)
    k = kernel_of("for i in a: out[i] += a[i] ** 2", "a: A1, out: A1")

    def refused(words, inputs="a", outs="out", kernel=k, **options):
        with pytest.raises(InvalidArgumentError, match=words):
            torch_function(kernel, inputs, outs, **options)

    refused("kernel is the class int", kernel=int)
    refused("kernel is the gradient of a kernel", kernel=k.grad)
    refused("inputs has 'A'.*Did you mean 'a'?", inputs="A")
    refused("inputs has the field n of shape .* of type i32", inputs=n)
    refused("outputs has the field n of shape .* of type i32", outs=n)
    refused("outputs is empty", outs=[])
    refused("shapes is 3; expected a dict", shapes=3)
    refused("shapes is 'out'; expected a dict", shapes="out")
    refused("max_memory is '1GB'", max_memory="1GB")


def test_tensors_of_torch_function_that_are_no_plain_memory():
    torch = pytest.importorskip("torch")
    k = kernel_of("for i in a: out[i] += a[i] ** 2", "a: A, out: A")
    function, ones = torch_function(k, "a", "out"), torch.ones(3, dtype=torch.float64)
    cases = {"on meta": ones.to("meta"), "to_dense": ones.to_sparse(), "bfloat16": ones.bfloat16()}
    cases["only real numbers"] = torch.ones(3, dtype=torch.complex64)
    cases["nested tensor"] = torch.nested.nested_tensor([ones[:1], ones])
    for words, tensor in cases.items():
        with pytest.raises(InvalidArgumentError, match=f"'a' .*{words}"):
            function(tensor)


@pytest.mark.parametrize("value", [3, None, [], object(), np.ones(3)])
def test_path_of_an_export(square, value):
    with pytest.raises(InvalidArgumentError, match="path is .*; expected the path of a file"):
        Jacobian(*square).export(value)


@pytest.mark.parametrize("value", [3, np.ones(3), "args"])
def test_args_of_a_prepared_form_without_arguments(square, value):
    plan = Jacobian(*square)
    with pytest.raises(InvalidArgumentError, match="args is .*; expected a tuple"):
        plan(args=value)


@pytest.mark.parametrize("value", [3, [], {}, np.ones(3)])
def test_names_of_rules(value):
    with pytest.raises(InvalidArgumentError, match="No rule is named"):
        registry.remove(value)
