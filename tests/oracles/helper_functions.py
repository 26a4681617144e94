"""Plain Python functions of another module, which kernels of the tests call."""

import taichi as ti

SCALE = 1.5


def scaled(v, by=2.0):
    return nested(v) * by * SCALE


def nested(v):
    return ti.sin(v) + v
