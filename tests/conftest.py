"""Fixtures shared by the tests."""

import gc

import pytest
import taichi as ti
from differences import pool


def initialise(**options) -> None:
    """Start Taichi afresh: two threads, nothing cached on disk, errors only."""
    _end()
    ti.init(arch=ti.cpu, offline_cache=False, log_level=ti.ERROR, cpu_max_num_threads=2, **options)


def _end() -> None:
    """End the Taichi program, and what belongs to it first.

    Taichi 1.7.4 deletes a ti.ndarray by its address from whichever program then runs: one that is collected after the
    next ti.init takes an array of the next program with it.
    """
    pool.forget()
    gc.collect()
    ti.reset()


@pytest.fixture(autouse=True)
def reuse_fields():
    """Fields that one test took from the pool are free for the next."""
    yield
    pool.give_back()


@pytest.fixture(scope="module")
def ti64():
    """A Taichi program whose literals and default type are float64, one per test module."""
    initialise(default_fp=ti.f64)
    yield ti
    _end()


@pytest.fixture(scope="module")
def ti32():
    """A Taichi program with Taichi's own defaults (float32), one per test module."""
    initialise()
    yield ti
    _end()
