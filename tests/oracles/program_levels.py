"""Random levels in loops: many half-planes, seeds that are no columns, and edges that read them.

Levels are the largest, the smallest or the sum of half-planes, in loops whose lengths may be known at run time only.
Stopped and replaced gradients and a function with a rule stand among them.  Normals and factors are constants, so that
the gradient of a level by the position is one, too, and the area that it covers has exact differences.
``program_level_check`` judges these programs.
"""

import random
from dataclasses import dataclass

UPDATES = (
    ("l = ti.max(l, e)",),
    ("l = ti.min(l, e)",),
    ("l += 0.2 * e",),
    ("l = l * 0.9 + 0.2 * e",),
    ("if e > l:", "    l = e + 0.1 * x", "else:", "    l += 0.05 * y"),
    ("l, m = m * 0.5 + 0.3 * e, l",),
    ("m = ti.max(m, e) * 0.8", "l = ti.min(l, m + x * 0.1)"),
    ("for q in range(2):", "    l = ti.max(l * 0.95, e + 0.3 * q - 0.1 * y)"),
)
# Updates whose tangents add up to a row: loops that only they change are accumulated backwards.
MIXTURES = (
    ("l = l * 0.8 + ti.max(l, e) * 0.2",),
    ("l = l * 0.7 + 0.2 * e",),
    ("l = ti.max(l * 0.9 + m * 0.05, e - 0.3 * m)", "m = m * 0.5 + 0.1 * e"),
    ("l, m = m * 0.6 + 0.3 * e, l * 0.9 - 0.02 * x",),
    ("if e > l:", "    l = l * 0.5 + e * 0.5", "else:", "    l = l * 0.9 + 0.05 * e + 0.02 * y"),
    ("m = ti.min(m, e) * 0.5 + m * 0.4", "l = l * 0.9 + ti.max(m, e) * 0.1"),
    ("for q in range(2):", "    l = l * 0.9 + 0.05 * e - 0.1 * y"),
    ("l = l * 0.9 - 0.05 * p[k]",),
)
ARGUMENTS = (
    "{0}",
    "{0}",
    "({0}) * 0.5 + 0.1 * x - 0.2",
    "ti.max({0}, 1.3 - x)",
    "stop_gradient({0}) * 0.3 + {0}",
    "replace_gradient({0}, ({0}) * 1.5 + 0.1 * x)",
    "bent({0}, x)",
)


@dataclass(frozen=True)
class LevelProgram:
    """The text of a kernel ``run``, and how many half-planes there are."""

    text: str
    count: int


class Levels:
    """Writes one program."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.count = rng.choice([1, 3, 7, 9, 12, 20, 20, 25])
        self.is_mixed = self.count > 8 and self.chance(0.7)

    def program(self) -> LevelProgram:
        lines = [*self.rule(), *self.level(), "@ti.kernel", "def run():", "    for i, j in image:"]
        lines += [f"        x = float(i) + {self.rng.choice(['0.0', '0.25'])}", "        y = float(j)"]
        lines += ["        l = level(x, y)", *(f"        {line}" for line in self.uses())]
        return LevelProgram("\n".join(lines) + "\n", self.count)

    def rule(self) -> list[str]:
        """A function with a rule that adds up its tangents in a loop, and is not the derivative."""
        update = self.rng.choice(["t = t * 0.5 + d_u * a[k] + d_v * 0.3", "t += d_u * 0.2 - d_v * b[k] * 0.1"])
        loop = ["    t = d_u * 0.4", *self.loop([update]), "    return t"]
        return ["@ti.func", "def bent(u, v):", "    return u + 0.3 * v", "@rule", "def _(d_u, d_v):", *loop]

    def bound(self) -> str:
        if self.is_mixed:
            return str(self.count)
        return self.rng.choice([*[str(self.count)] * 5, "n[None]"])

    def level(self) -> list[str]:
        k = self.rng.choice(["k", "k", "k", "k", "order[k]"])
        plane = [f"e = a[{k}] * x + b[{k}] * y - p[{k}]"]
        body = plane + [line for update in self.updates() for line in update]
        if not self.is_mixed:
            bent = ["e = bent(e, p[0] + 0.2 * x)"] * self.chance(0.1)
            skips = ["if k % 3 == 1:", "    continue"] * self.chance(0.1)
            body = [*skips, *plane, *bent, *body[1:], *(["if l > 4.0:", "    break"] * self.chance(0.1))]
        start = self.rng.choice(["-9.0", "9.0", "0.3 * x - p[0]", "0.0"])
        end = self.rng.choice(["", "", " + m * 0.3", " - 1.0"])
        first = ["@ti.func", "def level(x, y):", f"    l = {start}", "    m = 0.2 * y"]
        return [*first, *self.loop(body), f"    return l{end}"]

    def loop(self, body: list[str]) -> list[str]:
        """A loop over the half-planes, sometimes over more numbers and with a condition."""
        bound, more = self.bound(), self.rng.randint(1, 5)
        if not self.chance(0.25):
            return [f"    for k in range({bound}):", *(f"        {s}" for s in body)]
        head = [f"    for k in range({bound} + {more}):"]
        if self.chance(0.3):
            return [*head, f"        if k >= {bound}:", "            continue", *(f"        {s}" for s in body)]
        return [*head, f"        if k < {bound}:", *(f"            {s}" for s in body)]

    def updates(self) -> list[tuple[str, ...]]:
        """The use of the half-plane ``e`` in an iteration."""
        first = [self.rng.choice(MIXTURES)] if self.is_mixed else []
        others = self.rng.sample(UPDATES, self.rng.choice([0, 0, 1]) if first else self.rng.choice([1, 1, 2]))
        return [*first, *others]

    def uses(self) -> list[str]:
        """The use of the level ``l`` of a pixel."""
        if self.chance(0.05 if self.is_mixed else 0.15):
            loop = ["t = 0.0", "for q in range(2):", f"    t += {self.use('l + 0.4 * q')}"]
            return [*loop, f"image[i, j] = t * {self.value()} + 0.1 * t"]
        operator = self.rng.choice([" + ", " * "])
        return [
            f"image[i, j] = {operator.join(self.use('l') for _ in range(self.rng.choice([1, 1, 2] if self.is_mixed else [1, 2])))}"
        ]

    def use(self, level: str) -> str:
        level = self.rng.choice(ARGUMENTS).format(level)
        if self.chance(0.5):
            return f"coverage({level}, at=(x, y))"
        return f"edge({level}, {self.value()}, {self.value()}, at=(x, y), antialias=True)"

    def value(self) -> str:
        n = self.count
        return self.rng.choice([f"p[{n}]", f"p[{n + 1}] * x", "0.3 * l", "0.2", "stop_gradient(l)"])

    def chance(self, share: float) -> bool:
        return self.rng.random() < share


def generate(seed: int) -> LevelProgram:
    """The program of a seed."""
    return Levels(random.Random(seed)).program()
