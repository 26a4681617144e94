"""Runs programs of the engine in Python, one statement after the other: an oracle for programs derived from them."""

import math
import operator

import numpy as np

from taichi_ext import program as ir

OPERATIONS = {
    **{"add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": operator.truediv},
    **{"neg": operator.neg, "pow": operator.pow, "floordiv": operator.floordiv, "mod": operator.mod},
    **{"gt": operator.gt, "lt": operator.lt, "ge": operator.ge, "le": operator.le, "eq": operator.eq},
    **{"sin": math.sin, "cos": math.cos, "exp": math.exp, "log": math.log, "sqrt": math.sqrt, "tanh": math.tanh},
    **{"max": lambda a, b: a if a > b else b, "min": lambda a, b: a if a < b else b, "abs": abs},
    "select": lambda c, a, b: a if c else b,
    "logical_and": lambda a, b: a and b,
    "logical_or": lambda a, b: a or b,
    "logical_not": operator.not_,
    "ne": operator.ne,
    "floor": math.floor,
    **{"bit_and": operator.and_, "bit_or": operator.or_, "bit_xor": operator.xor},
    **{"shift_right": operator.rshift, "shift_left": operator.lshift},
    "global_thread_idx": lambda: 0,
    "bit_cast": lambda a: int(np.float64(a).view(np.int64)),
}


MOST_ROUNDS = 1000  # of a ``while``, so that a program that does not end is an error


class _Jumped(Exception):  # noqa: N818  (it is no error)
    pass


class Interpreter:
    """The state of one run: ``arrays`` are the contents of containers."""

    def __init__(self, arrays):
        self.arrays = arrays
        self.locals = {}
        self.generator = np.random.default_rng(0)

    def run(self, body):
        for statement in body:
            self.statement(statement)

    def statement(self, s):
        match s:
            case ir.Declare(local=local, values=()):
                self.locals[local] = np.full(local.shape, np.nan if local.dtype.is_real else 10**6)  # nothing yet
            case ir.Declare(local=local, values=values):
                found = [self.value(v) for v in values]
                self.locals[local] = np.array(found).reshape(local.shape) if local.shape else found[0]
            case ir.Assign(target=target, value=value):
                self.store(target, self.value(value))
            case ir.Update(target=target, op=op, value=value):
                self.store(target, OPERATIONS[op](self.value(target), self.value(value)))
            case ir.Atomic(function=function, target=target, value=value, result=result):
                old = self.value(target)
                if result is not None:
                    self.locals[result] = old
                self.store(target, OPERATIONS[function.removeprefix("atomic_")](old, self.value(value)))
            case ir.If(condition=condition, then=then, orelse=orelse):
                self.run(then if self.value(condition) else orelse)
            case ir.For(kind="range", variables=(variable,), domain=domain, body=body):
                self.loop(variable, range(*[self.value(d) for d in domain]), body)
            case ir.For(kind="field", variables=variables, domain=(container,), body=body):
                for index in np.ndindex(self.arrays[container].shape[: container.ndim]):
                    self.locals.update(zip(variables, index, strict=True))
                    self.run(body)
            case ir.While(condition=condition, body=body):
                for _ in range(MOST_ROUNDS):
                    if condition is not None and not self.value(condition):
                        break
                    try:
                        self.run(body)
                    except _Jumped as jump:
                        if jump.args[0] == "break":
                            break
                else:
                    raise RuntimeError(f"a loop has not ended after {MOST_ROUNDS} rounds")
            case ir.Jump(kind=kind):
                raise _Jumped(kind)
            case _:
                raise NotImplementedError(type(s).__name__)

    def loop(self, variable, numbers, body):
        for n in numbers:
            self.locals[variable] = n
            try:
                self.run(body)
            except _Jumped as jump:
                if jump.args[0] == "break":
                    break

    def index(self, index):
        return tuple(i if isinstance(i, int) else self.value(i) for i in index)

    def place(self, target):
        """The array that an entry is in, and its index."""
        if isinstance(target, ir.Load):
            return self.arrays[target.container], (*self.index(target.indices), *self.index(target.component))
        return self.locals[target.local], self.index(target.index)

    def store(self, target, value):
        if isinstance(target, ir.Read) and not target.index:
            self.locals[target.local] = value
            return
        array, index = self.place(target)
        array[index] = value

    def value(self, v):
        match v:
            case int():
                return v
            case ir.Const(value=value) | ir.FoldedConst(value=value):
                return value
            case ir.Read(local=local, index=()):
                return self.locals[local]
            case ir.Read() | ir.Load():
                array, index = self.place(v)
                assert all(0 <= i < n for i, n in zip(index, array.shape, strict=False)), f"index {index}"
                return array[index]
            case ir.Op(name="cast", args=(a,), dtype=dtype):
                return float(self.value(a)) if dtype.is_real else int(self.value(a))
            case ir.Op(name="random"):
                return self.generator.random()
            case ir.Op(name="ifte", args=(c, a, b)):
                return self.value(a) if self.value(c) else self.value(b)
            case ir.Op(name=name, args=args):
                return OPERATIONS[name](*map(self.value, args))
            case ir.Size(container=container, axis=axis):
                return self.arrays[container].shape[axis]
            case ir.Container():
                return v
        raise NotImplementedError(type(v).__name__)
