"""Levels that read from memory what was computed from the position of their pixel: refused, and nothing else is.

Fields and arrays have no tangents by positions, so the gradient of such a level would lack a part.
"""

import linecache

import numpy as np
import pytest
import taichi as ti
from differences import central_differences, integers, outputs, scalars, vector_outputs, write
from numpy.testing import assert_allclose

import taichi_ext
from taichi_ext import UnsupportedError, jacobian

pytestmark = [pytest.mark.usefixtures("ti64"), pytest.mark.double_only("differences in float64")]
W, H = 5, 4
TEXTS = iter(range(10000))
KERNEL = """
@ti.kernel
def run():
    for i, j in image:
        x = float(i)
        y = float(j)
"""


class Scene:
    """Fields that the texts of kernels name."""

    def __init__(self):
        self.p, self.image = scalars([1.737, 0.913, 0.437, 2.113]), outputs(W, H)
        self.tmp, self.other = outputs(W, H), outputs(W, H)
        self.vec, self.list, self.whole = vector_outputs(3, W, H), outputs(W, H, 4), integers(np.zeros((W, H)))
        self.parts = ti.Struct.field({"a": ti.f64, "b": ti.f64, "v": ti.types.vector(2, ti.f64)}, shape=(W, H))
        self.state = [self.tmp, self.other, self.vec, self.list]
        for field, value in zip(self.state, (0.1071, 0.053, 0.2093, 0.3117), strict=True):
            write(field, value)
        self.parts.a.fill(0.1)
        self.parts.b.fill(0.2)

    def kernel(self, body, functions=""):
        lines = body.strip().splitlines()
        text = body if body.lstrip().startswith("@ti.kernel") else KERNEL + "".join(f"        {x}\n" for x in lines)
        return self.compiled(functions + text)

    def compiled(self, text):
        file = f"<stored positions {next(TEXTS)}>"
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        scope = {**vars(taichi_ext), "ti": ti, "__name__": "scene", **vars(self)}
        exec(compile(text, file, "exec", dont_inherit=True), scope)
        return scope["run"]

    def require_right(self, run):
        """J is that of central differences."""
        for option in ({}, {"tangents": "sparse"}, {"chunk_size": 3}):
            ((wanted,),) = central_differences(run, [self.p], [self.image], state=self.state)
            values = [x.to_numpy() for x in (self.image, *self.state)]
            found = jacobian(run, self.p, self.image, **option)
            assert_allclose(found, wanted, rtol=1e-6, atol=1e-7, err_msg=str(option))
            assert wanted.any()
            for x, before in zip((self.image, *self.state), values, strict=True):
                write(x, before)


FUNCTIONS = """
@ti.func
def keep(i, j, value):
    tmp[i, j] = value

@ti.func
def kept(i, j):
    return tmp[i, j]

@ti.func
def through(i, j, value):
    vec[i, j] = ti.Vector([value, value * 0.5, 1.0])
    return vec[i, j].norm()

@ti.func
def shape(n, x, y):
    tmp_here = tmp[int(x), int(y)]
    return tmp_here + p[0] * n - 0.3 * y - 0.2 * x, 1.0 + n

@ti.func
def surface(n, x, y):
    return p[0] - 0.4 * x - 0.1 * y, tmp[1, 1] + 0.1 * x * n, 1.0 + n

@ti.func
def shade(x, y):
    return 1.0 if tmp[int(x), int(y)] + p[0] - 0.3 * y - 0.2 * x > 0.0 else p[1]

@ti.func
def distance(q):
    return (q - ti.Vector([p[0], p[1], 2.0])).norm() - 1.0 - tmp[1, 1]
"""
REFUSED = {
    "a field": "tmp[i, j] = p[0] - 2 * x\nimage[i, j] = coverage(tmp[i, j] + x - 0.3 * y, at=(x, y))",
    "another position by the same index": """tmp[i, j] = coverage(p[0] - x + 0.2 * y, at=(x, y))
u = i + 0.25
v = j + 0.25
image[i, j] = coverage(tmp[i, j] + p[1] - u + 0.3 * v, at=(u, v))""",
    "the index": "tmp[i, j] = 0.3 * i\nimage[i, j] = coverage(tmp[i, j] + x - p[0], at=(x, y))",
    "by y alone": "tmp[i, j] = p[0] - 2 * y\nimage[i, j] = edge(tmp[i, j] + x - 0.3 * y, 1.0, 0.0, at=(x, y))",
    "a level kept": """level = p[0] - x + 0.2 * y
tmp[i, j] = level
image[i, j] = edge(tmp[i, j] + 0.1 * level, x, p[1], at=(x, y), antialias=True)""",
    "a component": "vec[i, j][1] = p[0] - x\nimage[i, j] = coverage(vec[i, j][1] + 0.3 * y, at=(x, y))",
    "a whole vector": "vec[i, j] = ti.Vector([p[0], p[1], x])\nimage[i, j] = coverage(vec[i, j].sum() + y, at=(x, y))",
    "a component by number": """k = whole[i, j]
vec[i, j][1] = x
image[i, j] = coverage(vec[i, j][k] + p[0] + 0.3 * y, at=(x, y))""",
    "a member": "parts[i, j].a = p[0] - x\nimage[i, j] = coverage(parts[i, j].a - 0.2 * y, at=(x, y))",
    "a vector of a struct": """parts[i, j].v = ti.Vector([x, y])
image[i, j] = coverage(parts[i, j].v.dot(ti.Vector([0.3, 0.2])) - p[0] + 0.1 * y, at=(x, y))""",
    "a sum": "tmp[i, j] += p[0] - x\nimage[i, j] = coverage(tmp[i, j] - 0.2 * y, at=(x, y))",
    "a product": "tmp[i, j] *= p[0] - x\nimage[i, j] = coverage(tmp[i, j] - 0.2 * y, at=(x, y))",
    "an atomic": "ti.atomic_max(tmp[i, j], p[0] - x)\nimage[i, j] = coverage(tmp[i, j] - 0.2 * y, at=(x, y))",
    "what was there": """tmp[i, j] = x
old = ti.atomic_add(tmp[i, j], 1.0)
image[i, j] = coverage(old - p[0] + 0.2 * y, at=(x, y))""",
    "an array": """@ti.kernel
def run(a: ti.types.ndarray()):
    for i, j in image:
        x = float(i)
        y = float(j)
        a[i, j] = p[0] - x
        image[i, j] = coverage(a[i, j] + 0.2 * y, at=(x, y))""",
    "functions": "keep(i, j, p[0] - x)\nimage[i, j] = coverage(kept(i, j) + 0.2 * y, at=(x, y))",
    "a function's result": "image[i, j] = coverage(through(i, j, p[0] - x) + 0.2 * y - 1.0, at=(x, y))",
    "two fields": """tmp[i, j] = p[0] - x
other[i, j] = tmp[i, j] * 0.5
image[i, j] = coverage(other[i, j] + 0.2 * y, at=(x, y))""",
    "a branch": """if i > 2:
    tmp[i, j] = p[0] - x
image[i, j] = coverage(tmp[i, j] + 0.2 * y, at=(x, y))""",
    "the next iteration": """for k in range(3):
    image[i, j] += coverage(tmp[i, j] + p[0] - 0.2 * y, at=(x, y))
    tmp[i, j] = p[0] - x * k""",
    "the entry of the iteration before": """for k in range(3):
    image[i, j] += coverage(list[i, j, k] + p[0] - 0.2 * y, at=(x, y))
    list[i, j, k + 1] = p[0] - x""",
    "the next iteration of while": """k = 0
while k < 3:
    image[i, j] += coverage(tmp[i, j] + p[0] - 0.2 * y, at=(x, y))
    tmp[i, j] = p[0] - x * k
    k += 1""",
    "the same position in each iteration": """for k in range(3):
    u = float(i)
    v = float(j)
    image[i, j] += coverage(tmp[i, j] + p[0] - 0.2 * v, at=(u, v))
    tmp[i, j] = p[0] - u * k""",
    "after a break": """for k in range(4):
    tmp[i, j] = x * k
    if k > whole[i, j]:
        break
    tmp[i, j] = 0.0
image[i, j] = coverage(tmp[i, j] + p[0] - 0.2 * y, at=(x, y))""",
    "entries of a list": """for k in range(3):
    list[i, j, k] = p[k] - x
level = -1e3
for k in range(3):
    level = ti.max(level, list[i, j, k] - 0.1 * y)
image[i, j] = coverage(level, at=(x, y))""",
    "entries that may meet": """k = whole[i, j]
list[i, j, k] = x
image[i, j] = coverage(list[i, j, 2] + p[0] - 0.2 * y, at=(x, y))""",
    "a local array": """both = ti.Vector([0.0, 0.0, 0.0])
for k in range(3):
    both[(k + whole[i, j]) % 3] = p[k] - x
tmp[i, j] = both[whole[i, j]]
image[i, j] = coverage(tmp[i, j] + 0.2 * y, at=(x, y))""",
    "an edge": """tmp[i, j] = coverage(p[0] - x, at=(x, y))
image[i, j] = coverage(tmp[i, j] + 0.2 * y - p[1], at=(x, y))""",
    "a surrogate": """tmp[i, j] = replace_gradient(1.0, p[0] * x)
image[i, j] = coverage(tmp[i, j] + 0.2 * y - p[1], at=(x, y))""",
    "a vector position": """at = ti.Vector([float(i), float(j)])
tmp[i, j] = at[0] * p[0]
image[i, j] = coverage(tmp[i, j] - at[1], at=at)""",
    "layers": "tmp[i, j] = x\nimage[i, j] = layers(shape, 2, 0.0, at=(x, y))",
    "nearest": "tmp[1, 1] = x\nimage[i, j] = layers(surface, 2, 0.0, at=(x, y), order='depth')",
    "pixel": "tmp[i, j] = x\nimage[i, j] = pixel(shade, at=(x, y))",
    "a ray": """tmp[1, 1] = 0.1 * x
level = ray_level(distance, ti.Vector([x, y, 0.0]), ti.Vector([0.0, 0.0, 1.0]), 0.0, 9.0)
image[i, j] = coverage(level, at=(x, y))""",
    "a position that is an argument": """@ti.kernel
def run(u: ti.f64, v: ti.f64):
    for i, j in image:
        tmp[i, j] = p[0] - u * i
    for i, j in image:
        image[i, j] = coverage(tmp[i, j] - 0.2 * v, at=(u, v))""",
    "a position that changes": """u = x
v = y
for k in range(3):
    u = u + 0.25
    tmp[i, j] = p[0] - u
    image[i, j] += coverage(tmp[i, j] - 0.2 * v, at=(u, v))""",
    # what a later store replaces may be refused, too: one search for all orders of statements
    "replaced": """tmp[i, j] = p[0] - x
tmp[i, j] = p[1]
image[i, j] = coverage(tmp[i, j] + p[0] - x + 0.2 * y, at=(x, y))""",
    "replaced in both branches": """tmp[i, j] = p[0] - x
if i > 2:
    tmp[i, j] = p[1]
else:
    tmp[i, j] = p[2] * 0.5
image[i, j] = coverage(tmp[i, j] + p[0] - x + 0.2 * y, at=(x, y))""",
}
NAMES = {"a component": "vec", "an array": "a", "two fields": "other", "entries of a list": "list"}
NAMES["the entry of the iteration before"] = "list"
ARGUMENTS = {"an array": lambda: (np.zeros((W, H)),), "a position that is an argument": lambda: (1.0, 2.0)}


@pytest.mark.mostly_sweep("a product", "entries of a list", "a component", "the next iteration")
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    scene = Scene()
    run, args = scene.kernel(REFUSED[name], FUNCTIONS), ARGUMENTS.get(name, tuple)()
    before = scene.image.to_numpy()
    with pytest.raises(UnsupportedError, match=r'(?s)File "<stored positions.*Keep the value in a local') as caught:
        jacobian(run, scene.p, scene.image, args=args)
    assert f"reads {NAMES.get(name, '')}" in str(caught.value)
    assert_allclose(scene.image.to_numpy(), before)


@pytest.mark.sweep
def test_a_plain_launch_of_an_antialiased_value():
    """The covered area needs the gradient of the level, so that it would be wrong, too."""
    scene = Scene()
    with pytest.raises(UnsupportedError, match="reads tmp"):
        scene.kernel(REFUSED["a field"])()


RIGHT = {
    "stored later": """image[i, j] = coverage(tmp[i, j] + p[0] - x + 0.2 * y, at=(x, y))
tmp[i, j] = p[0] - x""",
    "another component": """vec[i, j][0] = p[0] - x
image[i, j] = coverage(vec[i, j][1] + p[0] - x + 0.2 * y, at=(x, y))""",
    "another member": """parts[i, j].a = p[0] - x
image[i, j] = coverage(parts[i, j].b + p[0] - x + 0.2 * y, at=(x, y))""",
    "another entry": """list[i, j, 0] = p[0] - x
image[i, j] = coverage(list[i, j, 1] + p[0] - x + 0.2 * y, at=(x, y))""",
    "of parameters alone": """tmp[i, j] = p[0] * p[1]
image[i, j] = coverage(tmp[i, j] - x + 0.2 * y, at=(x, y))""",
    "stopped": """tmp[i, j] = stop_gradient(x) * 0.1 + p[0]
image[i, j] = coverage(tmp[i, j] - x + 0.2 * y, at=(x, y))""",
    "whole numbers": """tmp[i, j] = ti.floor(x) * 0.1 + int(y) * p[0]
image[i, j] = coverage(tmp[i, j] - x + 0.2 * y + p[1], at=(x, y))""",
    "a loop that fills it first": """for k in range(3):
    list[i, j, k] = p[k]
image[i, j] = coverage(list[i, j, 1] + p[0] - x + 0.2 * y, at=(x, y))
for k in range(3):
    list[i, j, k] = p[k] * x""",
    "painted": """image[i, j] = coverage(p[0] - x + 0.2 * y, at=(x, y))
image[i, j] = edge(p[1] - y + 0.1 * x, p[2], image[i, j], at=(x, y), antialias=True)""",
    "another position in each iteration": """for k in range(3):
    u = i + 0.25 * k
    v = j + 0.1 * k
    level = p[k] - u + 0.3 * v + stop_gradient(tmp[i, j])
    image[i, j] += coverage(level, at=(u, v))
    tmp[i, j] = u * 0.1""",
    "a table of levels": """list[i, j, 0] = p[0] - x
list[i, j, 1] = p[1]
image[i, j] = coverage(list[i, j, 1] - x + 0.2 * y, at=(x, y)) * list[i, j, 0]""",
    "a side": """tmp[i, j] = p[0] * x
image[i, j] = edge(p[1] - x + 0.2 * y, tmp[i, j], p[2], at=(x, y), antialias=True)""",
    "an earlier loop": """@ti.kernel
def run():
    for i, j in tmp:
        x = float(i)
        y = float(j)
        tmp[i, j] = p[0] * 0.1 + 0.0 * x
        other[i, j] = coverage(p[0] - x, at=(x, y))
    for i, j in image:
        x = float(i)
        y = float(j)
        image[i, j] = coverage(tmp[i, j] - x + 0.2 * y + p[1], at=(x, y))""",
    "rows, one after the other": """@ti.kernel
def run():
    for i in range(image.shape[0]):
        for j in range(1, image.shape[1]):
            x = float(i)
            y = float(j)
            image[i, j] = coverage(p[1] - x + 0.2 * y, at=(x, y)) * tmp[i, j - 1]
            tmp[i, j] = p[0] * y""",
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", RIGHT)
def test_right(name):
    scene = Scene()
    scene.require_right(scene.kernel(RIGHT[name]))
