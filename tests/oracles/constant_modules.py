"""Numbers and functions in another module, for tests/language/test_constants.py."""

import taichi as ti

pull = 3.5


@ti.func
def force(a):
    return pull * a
