"""Loops over more numbers than fields have entries, and indices that lie beyond, with conditions that keep them within."""

import contextlib
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace

from program_expressions import Expressions
from program_model import Variable


class Guards(Expressions):
    """Writes the bounds of loops, and conditions on integers."""

    @abstractmethod
    def body(self) -> None:
        """Some statements."""

    def padded(self, text: str, low: int, high: int) -> tuple[str, int, int]:
        """The bounds of a loop over these numbers and perhaps some more, and those of its variable."""
        if not self.chance(0.3):
            return text, low, high
        more = self.rng.randint(1, 4)
        if not text.isdigit():
            return f"{text} + {more}", low, high + more
        first = self.rng.choice([0, 0, -1, -2])
        return f"{first}, {high + 1 + more}" if first else str(high + 1 + more), first, high + more

    @contextlib.contextmanager
    def within(self, wide: list[Variable], narrow: list[Variable]) -> Iterator[None]:
        """The statements for which integers lie within narrower bounds: under a condition, or behind a jump."""
        tests: list[str] = []
        for v, w in zip(wide, narrow, strict=True):
            lower = [self.rng.choice([f"{v.name} >= {w.low}", f"{w.low} <= {v.name}"])] * (w.low > v.low)
            upper = [self.rng.choice([f"{v.name} < {w.high + 1}", f"{v.name} <= {w.high}"])] * (w.high < v.high)
            both = lower + upper
            tests += [f"{w.low} <= {v.name} < {w.high + 1}"] if len(both) == 2 and self.chance(0.3) else both
        if not tests:
            yield
            return
        known = {w.name: w for w in narrow}
        scopes = [[known.get(v.name, v) for v in scope] for scope in self.place.scopes]
        if all(map(self.is_visible, known)) and self.place.can_continue and self.chance(0.3):
            self.emit(f"if not ({' and '.join(tests)}):")
            self.emit("    continue")
            self.place.scopes = scopes
            yield
            return
        is_nested = len(tests) > 1 and self.chance(0.4)
        self.emit(f"if {tests[0] if is_nested else ' and '.join(tests)}:")
        new = [w for w in narrow if not any(v.name == w.name for scope in scopes for v in scope)]
        with self.block(*new), contextlib.ExitStack() as stack:
            if is_nested:
                self.emit(f"if {' and '.join(tests[1:])}:")
                stack.enter_context(self.block(*new))
                scopes.append([])
            self.place.scopes = [*scopes, self.place.scopes[-1]]
            yield

    def guarded_offset(self) -> bool:
        """Statements in which a sum or difference of integers lies within a field; False where there are none."""
        known = [v for v in self.readable("i") if not (v.is_writable or v.is_static) and v.name.isalnum()]
        if not known:
            return False
        a, b, n = self.rng.choice(known), self.rng.choice(known), self.rng.randint(1, 3)
        options = [(f"({a.name} - {n})", a.low - n, a.high - n), (f"({a.name} + {n})", a.low + n, a.high + n)]
        options += [(f"({a.name} + {b.name})", a.low + b.low, a.high + b.high)]
        options += [(f"({a.name} - {b.name})", a.low - b.high, a.high - b.low)] * (a is not b)
        options += [(f"(2 * {a.name} - {n})", 2 * a.low - n, 2 * a.high - n)]
        text, low, high = self.rng.choice(options)
        end = self.rng.choice([n for f in self.fields for n in f.shape] or [3]) - 1
        if self.is_visible(text) or high < 0 or low > end:
            return False
        wide = Variable(text, "i", low, high, is_writable=False)
        with self.within([wide], [replace(wide, low=max(low, 0), high=min(high, end))]):
            self.body()
        return True

    def ndrange(self, name: str, a: int, b: int) -> tuple[list[Variable], list[Variable]]:
        """The first line of a loop over pairs: its variables, and those with the bounds that conditions give them."""
        names, ranges = (name, name + "b"), [self.padded(str(n), 0, n - 1) for n in (a, b)]
        texts = [f"({text})" if "," in text else text for text, _, _ in ranges]
        self.emit(f"for {', '.join(names)} in ti.ndrange({', '.join(texts)}):")
        wide = [Variable(n, "i", low, high, is_writable=False) for n, (_, low, high) in zip(names, ranges, strict=True)]
        return wide, [replace(v, low=0, high=n - 1) for v, n in zip(wide, (a, b), strict=True)]
