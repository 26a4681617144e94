"""Arrays from elsewhere: the programs of examples/external_arrays.py and examples/nerf_rendering.py."""

import devices
import example_programs
import numpy as np
import pytest
from differences import check_jacobian
from numpy.testing import assert_allclose, assert_array_equal
from taichi_program import initialise

from taichi_ext import Jacobian, jacobian

nerf = example_programs.load("nerf_rendering")
arrays = example_programs.load("external_arrays")

REAL = np.float32 if devices.is_single() else np.float64
needs_torch = "PyTorch is not installed (python -m pip install '.[torch]')"


@pytest.mark.sweep
def test_external_arrays_runs_without_torch(capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    printed = example_programs.run("external_arrays", capsys, monkeypatch)
    assert printed.count("  ok  ") == 2
    assert ".[torch]" in printed


@pytest.mark.parametrize("is_leaf", [True, False])
def test_gradient_of_a_leaf_and_of_another_tensor(is_leaf):
    pytest.importorskip("torch", reason=needs_torch)
    initialise()
    assert_allclose(arrays.torch_gradient(is_leaf).numpy(), np.full((20, 30), 2 / 600), rtol=1e-6)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["numpy", "ndarray"])
def test_jacobian_is_three_times_the_identity(kind):
    initialise()
    make = {"numpy": arrays.numpy_jacobian, "ndarray": arrays.ndarray_jacobian}[kind]
    J = make((3, 5))
    assert isinstance(J, np.ndarray)
    assert J.dtype == np.float32
    assert_array_equal(J, 3 * np.eye(15, dtype=np.float32).reshape(3, 5, 3, 5))


def test_torch_jacobian_is_a_tensor():
    torch = pytest.importorskip("torch", reason=needs_torch)
    initialise()
    J = arrays.torch_jacobian((3, 5))
    assert isinstance(J, torch.Tensor)
    assert J.dtype == torch.float32
    assert_array_equal(J.numpy(), 3 * np.eye(15).reshape(3, 5, 3, 5))


@pytest.mark.sweep
def test_nerf_outputs_accumulate_on_what_they_held(ti64):
    """The outputs are added to, as in one plain run, and the working array T is left as that run leaves it."""
    arguments, plain = nerf.make_arguments(3, REAL), nerf.make_arguments(3, REAL)
    for each in (arguments, plain):
        each["rgb"][...] = 0.25
    nerf.render(*plain.values())
    jacobian(nerf.render, "sigmas", ["rgb", "opacity"], args=tuple(arguments.values()))
    for name, value in plain.items():
        assert_allclose(arguments[name], value, rtol=1e-13, err_msg=name)


@pytest.mark.sweep
def test_nerf_by_every_real_array_at_once(ti64):
    arguments = nerf.make_arguments(5, REAL)
    params = [arguments[name] for name in ("sigmas", "rgbs", "deltas", "ts")]
    outs = [arguments[name] for name in nerf.OUTPUTS]
    state = [arguments["T"], arguments["samples"]]
    check_jacobian(nerf.render, params, outs, args=tuple(arguments.values()), state=state)


def test_nerf_on_tensors_gives_tensors(ti64):
    torch = pytest.importorskip("torch", reason=needs_torch)
    plan = Jacobian(
        nerf.render, ["sigmas", "ts"], ["opacity", "depth"], args=tuple(nerf.make_arguments(dtype=REAL).values())
    )
    J = plan()
    values = plan.value()
    again = {
        n: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for n, v in nerf.make_arguments(dtype=REAL).items()
    }
    J_tensors = plan(args=tuple(again.values()))
    for row, row_of_tensors in zip(J, J_tensors, strict=True):
        for block, tensor in zip(row, row_of_tensors, strict=True):
            assert isinstance(tensor, torch.Tensor)
            assert_array_equal(tensor.numpy(), block)
    for value, tensor in zip(values, plan.value(), strict=True):
        assert_array_equal(tensor.numpy(), value)
