"""Plain Python functions that a kernel calls: run while the kernel is recorded, on its values."""

from __future__ import annotations
import __future__

import ast
import builtins
import copy
import dataclasses
import functools
import inspect
import itertools
import operator
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, reduce
from operator import or_
from typing import Any

import numpy as np

import taichi_ext.record.subscripts as subscripts
from taichi_ext import backend
from taichi_ext.backend import ti
from taichi_ext.errors import UnsupportedError, raise_baked
from taichi_ext.program import Known, Tensor, Value
from taichi_ext.record.assignments import update_place
from taichi_ext.record.handles import HANDLES, Cell, Cells
from taichi_ext.record.operations import operate
from taichi_ext.record.recording import Recording
from taichi_ext.record.rewriter import BINARY, COMPARE, PYTHON_NAMES, copied
from taichi_ext.record.variables import READS_PARAMETER

_NUMBERS = (bool, int, float, complex, str, bytes, type(None), np.generic)
_CONTAINERS = (list, tuple, dict, set, frozenset, str, range)
# Callables that only combine values into containers, or take them apart.
_STRUCTURE = (
    *(list, tuple, dict, set, zip, enumerate, reversed, range, iter, next, slice, callable, id, len),
    *(itertools.chain, itertools.product, itertools.permutations, itertools.combinations, itertools.repeat),
    *(itertools.cycle, itertools.islice, itertools.zip_longest, itertools.chain.from_iterable, itertools.pairwise),
)
_OF_VALUES = (abs, pow, round, int, float, bool, len, print)  # also of the recorder's own
_OF_PLAIN_VALUES = (isinstance, type, print, repr, str, hasattr, issubclass)


def is_python(function: object) -> bool:
    """Whether a callable is plain Python, with a source that can be rewritten."""
    if isinstance(function, types.FunctionType):
        is_marked = backend.is_known_in_kernels(function)
        return not is_marked and not backend.is_library(function)
    if isinstance(function, type):
        return type(function) is type and function.__module__ != "builtins" and not backend.is_library(function)
    is_wrapper = isinstance(function, (functools.partial, types.MethodType, functools._lru_cache_wrapper))
    return is_wrapper or isinstance(inspect.getattr_static(type(function), "__call__", None), types.FunctionType)


def call_python(r: Recording, function: object, args: list[object], keywords: dict[str, object]) -> object:
    """Call a plain Python function, method, class or object as Taichi does while it compiles."""
    if isinstance(function, functools.partial):
        return r.library.call(function.func, *function.args, *args, **{**function.keywords, **keywords})
    if isinstance(function, functools._lru_cache_wrapper):
        return r.library.call(function.__wrapped__, *args, **keywords)
    if isinstance(function, types.MethodType):
        return r.library.call(function.__func__, function.__self__, *args, **keywords)
    if isinstance(function, type):
        return _construct(r, function, args, keywords)
    if not isinstance(function, types.FunctionType):
        return r.library.call(type(function).__call__, function, *args, **keywords)
    if is_rewritten(function):
        return function(*args, **keywords)
    if all(map(_is_plain, [*args, *keywords.values()])):
        try:  # most such functions compute with numbers and indices
            with backend.sealed(), r.constants.watching() as watched:
                result = function(*args, **keywords)
            if not watched.may_read:
                return result
        except backend.SealedError:
            pass  # it reads or writes fields, or calls ti.funcs: that is recorded
    return _run(r, function, args, keywords)


def _run(r: Recording, function: types.FunctionType, args: Sequence[object], keywords: Mapping[str, object]) -> object:
    made = rewritten(function, PythonScope(r), r.constants.replaced)
    if made is None:
        raise UnsupportedError(
            f"The Python function {function.__qualname__!r} is called in a kernel, and its source is not to be found. "
            "Define it in a file, or write it as a @ti.func."
        )
    return made(*args, **keywords)


def _construct(r: Recording, kind: type, args: list[Any], keywords: dict[str, object]) -> object:
    """An object of a Python class."""
    is_record = dataclasses.is_dataclass(kind) and not hasattr(kind, "__post_init__")
    if is_record or issubclass(kind, (tuple, list, dict, BaseException)):
        return kind(*args, **keywords)
    initialise = kind.__init__
    if kind.__new__ is not object.__new__ or not isinstance(initialise, types.FunctionType):
        return _native(r, kind, args, keywords)
    made = object.__new__(kind)
    r.library.call(initialise, made, *args, **keywords)
    return made


def _native(r: Recording, function: Any, args: list[object], keywords: dict[str, object]) -> object:
    if not all(map(_is_plain, [*args, *keywords.values()])):
        raise UnsupportedError(f"{function!r} is called on a value of the kernel; write it as a @ti.func.")
    with backend.sealed(), r.constants.watching() as watched:
        result = function(*args, **keywords)
    if watched.may_read:
        raise UnsupportedError(READS_PARAMETER.format(repr(function)))
    return result


def _is_plain(x: object) -> bool:
    """Whether a value is known to contain nothing that is only known when the kernel runs."""
    if isinstance(x, (list, tuple, set)):
        return all(map(_is_plain, x))
    if isinstance(x, dict):
        return all(map(_is_plain, x.values()))
    return isinstance(x, _NUMBERS) or backend.is_expr(x) or (isinstance(x, np.ndarray) and x.dtype != object)


class PythonScope:
    """Operations called by rewritten Python functions, as ``<py>``: of Python, or of the recorder on its values."""

    def __init__(self, r: Recording) -> None:
        self.recording = r

    # --- operators

    def binary(self, name: str, a: Any, b: Any) -> object:
        found = self._own_operator(PYTHON_NAMES.get(name, name), a, b)
        if found is not NotImplemented:
            return found
        if (_is_array(a) and _is_object(b)) or (_is_array(b) and _is_object(a)):
            arrays = np.broadcast_arrays(*(x if _is_array(x) else _as_array([x], ()) for x in (a, b)))
            entries = [
                self.binary(name, _number(x), _number(y)) for x, y in zip(*(r.flat for r in arrays), strict=True)
            ]
            return _as_array(entries, arrays[0].shape)
        if isinstance(a, HANDLES) or isinstance(b, HANDLES):
            if name == "matmul":
                return self.recording.library.matmul(_number(a), _number(b))
            return operate(self.recording, name, _number(a), _number(b))
        return getattr(operator, f"__{PYTHON_NAMES.get(name, name)}__")(a, b)

    def _own_operator(self, name: str, a: object, b: object) -> object:
        """The result of an operator that a Python class defines; NotImplemented if it defines none."""
        for x, other, method in ((a, b, f"__{name}__"), (b, a, f"__r{name}__")):
            own = _method(x, method)
            if own is not None and not isinstance(x, HANDLES):
                found = self.recording.library.call(own, x, other)
                if found is not NotImplemented:
                    return found
        return NotImplemented

    def unary(self, name: str, x: Any) -> object:
        own = _method(x, f"__{name}__")
        if isinstance(x, HANDLES):
            return operate(self.recording, name, x)
        if own is not None:
            return self.recording.library.call(own, x)
        if _is_array(x) and x.dtype == object:
            return _as_array([self.unary(name, e) for e in x.flat], x.shape)
        return getattr(operator, name)(x)

    def compare(self, names: tuple[str, ...], *operands: object) -> object:
        result = True
        for n, name in enumerate(names):
            a, b = operands[n : n + 2]
            found = self._own_operator(name, a, b)
            if found is not NotImplemented:
                result = found
            elif isinstance(a, HANDLES) or isinstance(b, HANDLES):
                result = operate(self.recording, name, _number(a), _number(b))
            else:
                result = getattr(operator, name)(a, b)
            if isinstance(result, bool) and (isinstance(a, Known) or isinstance(b, Known)):
                raise_baked("A choice")
            if n + 1 < len(names) and not result:
                break
        return result

    def augmented(self, target: object, name: str, value: object) -> object:
        """``target += value``: changes a local or an entry of a field in place; otherwise returns a new object."""
        if isinstance(target, (Cell, Cells)):
            update_place(self.recording, target, name, value)
            return target
        if isinstance(target, (Value, Tensor)):
            raise backend.SyntaxFault(f"cannot use a non-writable target as the first operand of {name!r}")
        own = getattr(type(target), f"__i{PYTHON_NAMES.get(name, name)}__", None)
        if isinstance(own, types.FunctionType) and not backend.is_library(own):
            return self.recording.library.call(own, target, value)
        if isinstance(value, HANDLES) or own is None or (_is_array(target) and _has_objects(value)):
            return self.binary(name, target, value)
        return getattr(operator, f"__i{PYTHON_NAMES.get(name, name)}__")(target, value)

    def augment_item(self, base: Any, index: object, name: str, value: object) -> None:
        base[index] = self.augmented(self.item(base, index), name, value)

    def augment_attribute(self, base: object, attribute: str, name: str, value: object) -> None:
        after = self.augmented(self.attribute(base, attribute), name, value)
        if not isinstance(base, HANDLES):
            setattr(base, attribute, after)

    # --- reading

    def slice(self, start: object, stop: object, step: object) -> Any:
        return slice(start, stop, step)

    def item(self, base: Any, index: object) -> object:
        if isinstance(base, HANDLES):
            return subscripts.load(self.recording, base, index if isinstance(index, tuple) else (index,))
        own = _method(base, "__getitem__")
        if own is not None:
            return self.recording.library.call(own, base, index)
        return base[index]

    def attribute(self, base: object, name: str) -> object:
        if not isinstance(base, HANDLES):
            found = inspect.getattr_static(base, name, None)
            if isinstance(found, property) and isinstance(found.fget, types.FunctionType) and is_python(found.fget):
                return self.recording.library.call(found.fget, base)
            return self.recording.constants.read_attribute(base, name, getattr(base, name))
        return subscripts.attribute(self.recording, base, name)

    # --- calls

    def method(self, base: object, name: str, /, *args: object, **keywords: object) -> object:
        if isinstance(base, HANDLES) or (isinstance(base, backend.Field) and name == "fill"):
            return self.recording.library.method(base, name, *args, **keywords)
        function = self.attribute(base, name)
        if isinstance(base, _CONTAINERS) and isinstance(function, types.BuiltinMethodType):
            return function(*args, **keywords)
        return self.call(function, *args, **keywords)

    def run(self, function: object, /, *args: object, **keywords: object) -> None:
        """A call whose result is not used."""
        self._call(self.recording.library.run, function, args, keywords)

    def call(self, function: object, /, *args: object, **keywords: object) -> Any:
        return self._call(self.recording.library.call, function, args, keywords)

    def _call(self, otherwise: Any, function: Any, args: tuple[Any, ...], keywords: dict[str, object]) -> Any:
        if function is ti.static:
            return args[0] if len(args) == 1 else args
        if any(function is f for f in _OF_PLAIN_VALUES):
            return function(*args, **keywords)
        found = self.structure(function, args, keywords)
        if found is NotImplemented and isinstance(function, types.BuiltinFunctionType | type):
            found = self._builtin(function, args, keywords)
        return otherwise(function, *args, **keywords) if found is NotImplemented else found

    def structure(self, function: Any, args: tuple[Any, ...], keywords: dict[str, object]) -> object:
        """The result of a callable of Python that combines values; NotImplemented for any other."""
        if function is len and isinstance(args[0], HANDLES):
            return NotImplemented
        if any(function is f for f in _STRUCTURE):
            return function(*args, **keywords)
        if function is sum:
            return self.fold(operator.add, args[0], *(args[1:] or keywords.values() or (0,)))
        if function is functools.reduce:
            return self.fold(*args)
        if function is map:
            return (self.call(args[0], *values) for values in zip(*args[1:], strict=False))
        if function is filter:
            return (value for value in args[1] if (value if args[0] is None else self.call(args[0], value)))
        return NotImplemented

    def _builtin(self, function: Any, args: tuple[Any, ...], keywords: dict[str, object]) -> object:
        """The result of another built-in function of Python; NotImplemented for other callables."""
        if getattr(builtins, getattr(function, "__name__", ""), None) is not function:
            return NotImplemented
        if function is abs and isinstance(args[0], HANDLES):
            return self.recording.library.call(abs, args[0])
        if function is pow and len(args) == 2:
            return self.binary("pow", *args)
        if any(isinstance(a, HANDLES) for a in args) and function not in _OF_VALUES:
            raise UnsupportedError(
                f"Python's {function.__name__!r} is called on a value of the kernel in a plain Python function. Use "
                "Taichi's function of that name, or make the function a @ti.func."
            )
        return NotImplemented if any(isinstance(a, HANDLES) for a in args) else function(*args, **keywords)

    def fold(self, function: object, values: Iterable[object], *first: object) -> object:
        """``functools.reduce``."""
        iterator = iter(values)
        total = first[0] if first else next(iterator)
        for value in iterator:
            total = self.binary("add", total, value) if function is operator.add else self.call(function, total, value)
        return total


def _method(x: object, name: str) -> types.FunctionType | None:
    """A special method that a class of the user's defines."""
    own = getattr(type(x), name, None)
    return own if isinstance(own, types.FunctionType) and not backend.is_library(own) else None


def _is_object(x: object) -> bool:
    """Whether an array that is combined with x holds expressions or values with tangents."""
    return isinstance(x, HANDLES) or backend.is_expr(x) or _has_objects(x)


def _is_array(x: object) -> bool:
    return isinstance(x, np.ndarray)


def _has_objects(x: Any) -> bool:
    return _is_array(x) and x.dtype == object


def _as_array(entries: Sequence[object], shape: tuple[int, ...]) -> np.ndarray:
    """An array of objects, built so that NumPy does not look into them."""
    array = np.empty(len(entries), object)
    for n, entry in enumerate(entries):
        array[n] = entry
    return array.reshape(shape)


def _number(x: object) -> object:
    return x.item() if isinstance(x, np.generic) else x


# Plain Python functions rewritten so that their operators and calls also take values with tangents; AST in, code out.
#
# Taichi runs a plain Python function while it compiles, with expressions as arguments. Its control flow is Python's
# and stays unchanged; operators, subscripts, attributes and calls become calls on ``<py>``, which is a
# ``python_functions.PythonScope``.

SCOPE = "<py>"
_NAME = "<function>"  # no function has this name, so names within keep their meaning
_UNARY = {ast.USub: "neg", ast.UAdd: "pos", ast.Invert: "invert"}
_KEPT = frozenset(("super", "locals", "globals", "vars", "eval", "exec", "dir"))  # these look at the calling frame
_FUTURE = reduce(or_, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names))


def rewritten(
    function: types.FunctionType, scope: object, replaced: Callable[[types.FunctionType], Mapping[str, object]]
) -> Callable[..., object] | None:
    """The function with its operators and calls on ``scope``; None if its source cannot be found.

    ``replaced`` gives the names of its closure and module that have another value.
    """
    code = _rewritten_code(function.__code__, function.__qualname__)
    if code is None:
        return None
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    cells[SCOPE] = types.CellType(scope)
    other = replaced(function)
    cells.update({name: types.CellType(value) for name, value in other.items() if name in cells})
    closure = tuple(cells[name] for name in code.co_freevars)
    names = {**function.__globals__, **other} if other else function.__globals__
    made = types.FunctionType(code, names, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__qualname__ = function.__qualname__
    return made


def is_rewritten(function: types.FunctionType) -> bool:
    """Whether a function, or one around it, has been rewritten already."""
    return SCOPE in function.__code__.co_freevars


@lru_cache(maxsize=1024)
def _rewritten_code(code: types.CodeType, qualname: str) -> types.CodeType | None:
    node = definition(code, qualname)
    try:
        return None if node is None else _compiled(_Rewriter().of_definition(node), code, (SCOPE,))
    except RecursionError:
        raise UnsupportedError(
            f"{code.co_filename}:{code.co_firstlineno}: an expression or block of {qualname!r} nests deeper than "
            "Python can follow once its operations are watched for tangents. Compute parts of it in variables."
        ) from None


def definition(code: types.CodeType, qualname: str) -> Any:
    """The ``def`` or ``lambda`` that a code object was compiled from, without decorators, defaults and annotations."""
    tree = _module(code)
    if tree is None:
        return None
    found = [_alone(node, qualname) for node in _definitions(tree).get((code.co_name, code.co_firstlineno), ())]
    if len(found) > 1:  # several lambdas in one line
        found = [node for node in found if _is_same_code(code, _compiled(node, code, ()))]
    return found[0] if found else None


def _module(code: types.CodeType) -> ast.Module | None:
    try:
        lines, _ = inspect.findsource(code)
        return _parsed("".join(lines))
    except (OSError, TypeError, IndexError, SyntaxError):
        return None


@lru_cache(maxsize=64)
def _parsed(text: str) -> ast.Module:
    return backend.syntax_tree(text)


@lru_cache(maxsize=64)
def _imports(tree: ast.Module) -> list[Any]:
    """The names that a module imports: attributes of these are compiled in another way."""
    pending: list[Any] = list(tree.body)
    names: dict[str, None] = {}
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update((alias.asname or alias.name.split(".")[0], None) for alias in node.names)
        elif isinstance(node, (ast.If, ast.Try, ast.With, ast.For, ast.While, ast.ExceptHandler)):
            pending += ast.iter_child_nodes(node)
    names.pop("*", None)
    return [ast.Import(names=[ast.alias(name=name)]) for name in names]


@lru_cache(maxsize=64)
def _definitions(tree: ast.Module) -> dict[tuple[str, int], list[Any]]:
    """The functions of a module by their name and first line, as code objects have them."""
    found: dict[tuple[str, int], list[Any]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda):
            found.setdefault(("<lambda>", node.lineno), []).append(node)
        elif isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            found.setdefault((node.name, first), []).append(node)
    return found


def _alone(node: Any, qualname: str) -> object:
    """A copy of a definition without defaults, decorators and annotations, private names written out."""
    node = copied(node)
    args = node.args
    args.defaults, args.kw_defaults = [], [None] * len(args.kwonlyargs)
    for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg):
        if arg is not None:
            arg.annotation = None
    if isinstance(node, ast.FunctionDef):
        node.decorator_list, node.returns, node.name = [], None, _NAME
        if hasattr(node, "type_params"):  # from Python 3.12 on; where they are used they are free names
            node.type_params = []  # pyright: ignore[reportAttributeAccessIssue]  # from Python 3.12 on
    owner = qualname.split(".")[-2].lstrip("_") if "." in qualname else ""
    if owner and not owner.endswith(">"):  # a class
        for child in ast.walk(node):
            for field in ("id", "attr", "arg", "name"):
                name = getattr(child, field, None)
                if isinstance(name, str) and name.startswith("__") and not name.endswith("__"):
                    setattr(child, field, f"_{owner}{name}")
    return node


def _compiled(node: object, code: types.CodeType, free: tuple[str, ...]) -> types.CodeType:
    """The code of a definition within a scope that has some names and the free names of ``code``."""
    is_lambda = isinstance(node, ast.Lambda)
    names = [ast.arg(arg=name) for name in (*free, *code.co_freevars)]
    around: Any = backend.syntax_tree("def around(): pass").body[0]
    around.args.args = names
    around.body = [ast.Expr(value=node) if is_lambda else node]
    module = _module(code)
    imports = [] if module is None else _imports(module)
    tree = ast.fix_missing_locations(ast.Module(body=[*imports, around], type_ignores=[]))
    found = compile(tree, code.co_filename, "exec", flags=code.co_flags & _FUTURE, dont_inherit=True)
    for name in ("around", "<lambda>" if is_lambda else _NAME):
        found = next(c for c in found.co_consts if isinstance(c, types.CodeType) and c.co_name == name)
    return found


def _is_same_code(a: object, b: object) -> bool:
    if isinstance(a, str) and isinstance(b, str) and ".<locals>." in b:
        return a.split(".")[-1] == b.split(".")[-1]  # before Python 3.11, paths of inner functions are constants
    if not isinstance(a, types.CodeType) or not isinstance(b, types.CodeType):
        return type(a) is type(b) and a == b
    attributes = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars")
    is_alike = all(getattr(a, n) == getattr(b, n) for n in attributes)
    is_alike = is_alike and len(a.co_consts) == len(b.co_consts)
    return is_alike and all(map(_is_same_code, a.co_consts, b.co_consts))


class _Rewriter(ast.NodeTransformer):
    """Turns operations into calls of the functions of a scope."""

    scope = ast.Name(id=SCOPE, ctx=ast.Load())

    def of_definition(self, node: Any) -> Any:
        """A definition, its body rewritten."""
        if isinstance(node, ast.Lambda):
            node.body = self.visit(node.body)
        else:
            module = ast.Module(body=node.body, type_ignores=[])
            node.body = self.generic_visit(module).body  # pyright: ignore[reportAttributeAccessIssue]
        return ast.fix_missing_locations(node)

    def library(self, name: str, node: Any, *args: Any, keywords: Any = ()) -> Any:
        """A call of a function of the scope; arguments that are no nodes are constants."""
        nodes: list[Any] = [
            a if isinstance(a, ast.AST) else ast.copy_location(ast.Constant(value=a), node) for a in args
        ]
        function: Any = ast.Attribute(value=copy.copy(self.scope), attr=name, ctx=ast.Load())
        for new in (function, function.value):
            ast.copy_location(new, node)
            new.end_lineno, new.end_col_offset = new.lineno, new.col_offset  # whose last line a call has
        return ast.copy_location(ast.Call(func=function, args=nodes, keywords=list(keywords)), node)

    def index(self, node: Any) -> Any:
        if isinstance(node, ast.Slice):
            parts = [None if p is None else self.visit(p) for p in (node.lower, node.upper, node.step)]
            return self.library("slice", node, *parts)
        if isinstance(node, ast.Tuple):
            return ast.copy_location(ast.Tuple(elts=[self.index(e) for e in node.elts], ctx=ast.Load()), node)
        return self.visit(node)

    def visit_arguments(self, node: ast.arguments) -> object:
        node.defaults = [self.visit(e) for e in node.defaults]
        node.kw_defaults = [None if e is None else self.visit(e) for e in node.kw_defaults]
        return node  # annotations stay

    def visit_BinOp(self, node: ast.BinOp) -> object:
        return self.library("binary", node, BINARY[type(node.op)], self.visit(node.left), self.visit(node.right))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> object:
        if isinstance(node.op, ast.Not):
            return self.generic_visit(node)
        return self.library("unary", node, _UNARY[type(node.op)], self.visit(node.operand))

    def visit_Compare(self, node: ast.Compare) -> object:
        if not all(type(op) in COMPARE for op in node.ops):
            return self.generic_visit(node)
        names = tuple(COMPARE[type(op)] for op in node.ops)
        return self.library("compare", node, names, self.visit(node.left), *map(self.visit, node.comparators))

    def visit_Attribute(self, node: ast.Attribute) -> object:
        if not isinstance(node.ctx, ast.Load):
            return self.generic_visit(node)
        return self.library("attribute", node, self.visit(node.value), node.attr)

    def visit_Subscript(self, node: ast.Subscript) -> object:
        if not isinstance(node.ctx, ast.Load):
            return self.generic_visit(node)
        return self.library("item", node, self.visit(node.value), self.index(node.slice))

    def visit_AugAssign(self, node: ast.AugAssign) -> object:
        name, value = BINARY[type(node.op)], self.visit(node.value)
        target = node.target
        if isinstance(target, ast.Name):
            before = ast.copy_location(ast.Name(id=target.id, ctx=ast.Load()), target)
            after = self.library("augmented", node, before, name, value)
            return ast.copy_location(ast.Assign(targets=[target], value=after), node)
        is_item = isinstance(target, ast.Subscript)
        place = self.index(target.slice) if is_item else target.attr
        kind = "augment_item" if is_item else "augment_attribute"
        call = self.library(kind, node, self.visit(target.value), place, name, value)
        return ast.copy_location(ast.Expr(value=call), node)

    def visit_Expr(self, node: ast.Expr) -> object:
        value = node.value
        if isinstance(value, ast.Call) and not isinstance(value.func, ast.Attribute):
            return ast.copy_location(ast.Expr(value=self.call("run", value)), node)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> object:
        return self.call("call", node)

    def call(self, name: str, node: ast.Call) -> Any:
        function = node.func
        if isinstance(function, ast.Name) and function.id in _KEPT:
            return self.generic_visit(node)
        args, keywords = ([self.visit(x) for x in given] for given in (node.args, node.keywords))
        if isinstance(function, ast.Attribute):
            base = self.visit(function.value)
            return self.library("method", node, base, function.attr, *args, keywords=keywords)
        return self.library(name, node, self.visit(function), *args, keywords=keywords)
